//! Random numbers of the generated tasks.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

/// Returns the random generator of one attempt at one row. No two rows, splits or attempts share numbers.
pub(crate) fn stream(seed: u64, split: u8, row: u64, attempt: u64) -> ChaCha8Rng {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8] = split;
    key[16..24].copy_from_slice(&row.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(attempt);
    rng
}

/// Returns a random integer in `0..bound`, by multiply-shift with a bias below `bound` / 2^32.
pub(crate) fn pick(rng: &mut ChaCha8Rng, bound: usize) -> usize {
    ((u64::from(rng.next_u32()) * bound as u64) >> 32) as usize
}

/// Shuffles the items (Fisher–Yates).
pub(crate) fn shuffle<T>(rng: &mut ChaCha8Rng, items: &mut [T]) {
    for last in (1..items.len()).rev() {
        items.swap(last, pick(rng, last + 1));
    }
}

/// Returns a random integer from `low` to `high`, both included.
pub(crate) fn between(rng: &mut ChaCha8Rng, low: i32, high: i32) -> i32 {
    low + pick(rng, (high - low + 1).max(1) as usize) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_other_rows_splits_and_attempts_differ() {
        let first = |seed, split, row, attempt| stream(seed, split, row, attempt).next_u64();
        let base = first(1, 0, 0, 0);
        assert_eq!(base, first(1, 0, 0, 0));
        assert!(
            [first(2, 0, 0, 0), first(1, 1, 0, 0), first(1, 0, 1, 0), first(1, 0, 0, 1)]
                .iter()
                .all(|&n| n != base)
        );
    }
}
