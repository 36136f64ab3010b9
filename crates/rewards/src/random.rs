//! `random`: a number in [0, 1) that depends only on the completion's key. It is a baseline that cannot be learned, and gives the
//! groups of a benchmark a variance.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::contract::PerRow;
use crate::{Reward, RewardError, RewardOptions, RowKey};

pub(crate) fn reward(_: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    Ok(Box::new(PerRow {
        name: "random",
        range: (0.0, 1.0),
        score: |input: &crate::RewardInput<'_>| Ok(Some(uniform(input.key))),
    }))
}

/// The key is the seed of the generator. Every completion therefore has its own stream, and order does not matter.
pub(crate) fn uniform(key: RowKey) -> f64 {
    let mut seed = [0u8; 32];
    for (chunk, word) in seed.chunks_exact_mut(8).zip([key.seed, key.step, key.row, key.sample]) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    // An f64 below 1 has 53 random bits.
    (ChaCha8Rng::from_seed(seed).next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depends_on_the_key_alone_and_is_uniform() {
        let key = |sample| RowKey { seed: 42, step: 3, row: 9, sample };
        let values: Vec<f64> = (0..4000).map(|sample| uniform(key(sample))).collect();
        assert_eq!(uniform(key(17)), values[17]);
        assert_ne!(uniform(RowKey { step: 4, ..key(17) }), values[17]);
        assert!(values.iter().all(|v| (0.0..1.0).contains(v)));
        let mean = values.iter().sum::<f64>() / 4000.0;
        // Standard deviation of the mean: 1 / sqrt(12 · 4000) = 0.0046.
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }

    #[test]
    fn the_stream_is_pinned() {
        // Another generator would change every benchmark that uses this reward.
        assert_eq!(format!("{:.6}", uniform(RowKey { seed: 0, step: 0, row: 0, sample: 0 })), "0.836920");
    }
}
