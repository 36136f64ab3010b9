//! Sampling of tokens from rows of logits.

use std::ops::Range;
use std::sync::Arc;

use crate::device::{Array, Dtype, Gpu, Pack};
use crate::launchers::{self, sample as kernels};

/// Sampling settings; see `cuda/sample.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Temperature, by which the logits are divided; 0 takes the most probable token.
    pub temperature: f32,
    /// Probability that the kept tokens must reach together; the smallest such set is kept. 1 keeps all tokens.
    pub top_p: f32,
    /// Number of the most probable tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Smallest probability to keep, relative to the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Penalty of tokens that are already present: positive logits are divided by it, and negative logits are multiplied by it. 1
    /// has no effect.
    pub repetition_penalty: f32,
    /// Temperature of the recorded log-probabilities.
    pub scoring_temperature: f32,
}

/// The inputs of one row's draw besides the logits.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Uniform random number from the host, in [0, 1).
    pub uniform: f64,
    /// Distinct tokens to which the repetition penalty applies.
    pub seen: Vec<u32>,
    /// True if this row must not draw the forbidden tokens.
    pub forbids: bool,
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    pub id: u32,
    /// Log-probability under softmax(logits / scoring temperature) before penalties, in nats.
    pub logprob: f32,
    /// Log-probability under the distribution from which the token was drawn, in nats; 0 for greedy sampling.
    pub sampler_logprob: f32,
    /// Entropy of softmax(logits / scoring temperature), in nats.
    pub entropy: f32,
}

/// Sizes of the tables of a draw. They determine the kernels of the draw and their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DrawSize {
    pub rows: usize,
    /// Capacity for the penalised tokens of all rows.
    pub seen: usize,
    /// True if at least one row excludes tokens.
    pub forbids: bool,
}

/// Number of bins of a segment with a cut.
const BINS: usize = 2048;

/// Returns the number of blocks for a row of logits. It must depend on the vocabulary alone.
fn segments(vocab: usize) -> usize {
    vocab.div_ceil(256).clamp(1, 16)
}

impl DrawSize {
    /// Returns the sizes of the tables for these rows.
    pub fn of(rows: &[Row], sampling: &Sampling) -> Self {
        let seen = if sampling.penalises() { rows.iter().map(|row| row.seen.len()).sum() } else { 0 };
        Self { rows: rows.len(), seen, forbids: rows.iter().any(|row| row.forbids) }
    }

    /// Rounds up to one of a few sizes. Padding rows fill the rest.
    #[must_use]
    pub fn rounded(self, rows: usize) -> Self {
        let seen = if self.seen == 0 { 0 } else { self.seen.next_power_of_two() };
        Self { rows, seen, ..self }
    }
}

impl Sampling {
    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

/// Tables of the rows for which tokens are drawn, on a device.
#[derive(Debug)]
pub struct Draws {
    whole: Arc<Array>,
    at: DrawPlaces,
    size: DrawSize,
}

/// Offsets of the tables in a [`Pack`].
#[derive(Clone, Debug)]
pub struct DrawPlaces {
    /// Counters of the blocks of each row, which are 0 between kernels.
    counters: usize,
    uniforms: usize,
    offsets: usize,
    seen: usize,
    forbids: usize,
    forbidden: Range<usize>,
}

impl Draws {
    /// Packs the tables of the rows, with padding rows up to `size`. Skips tokens at or beyond `vocab`.
    #[must_use]
    pub fn pack(
        pack: &mut Pack,
        rows: &[Row],
        size: DrawSize,
        sampling: &Sampling,
        forbidden: &[u32],
        vocab: usize,
    ) -> DrawPlaces {
        let (mut offsets, mut seen) = (vec![0], Vec::new());
        for row in rows {
            if sampling.penalises() {
                seen.extend(row.seen.iter().copied().filter(|&id| (id as usize) < vocab));
            }
            offsets.push(seen.len() as u32);
        }
        offsets.resize(size.rows + 1, seen.len() as u32);
        seen.resize(size.seen, 0);
        let mut uniforms: Vec<f64> = rows.iter().map(|row| row.uniform).collect();
        uniforms.resize(size.rows, 0.0);
        let mut forbids: Vec<u32> = rows.iter().map(|row| u32::from(row.forbids)).collect();
        forbids.resize(size.rows, 0);
        let forbidden: Vec<u32> = forbidden.iter().copied().filter(|&id| (id as usize) < vocab).collect();
        DrawPlaces {
            counters: pack.add(&vec![0u32; size.rows]),
            uniforms: pack.add(&uniforms),
            offsets: pack.add(&offsets),
            seen: pack.add(&seen),
            forbids: pack.add(&forbids),
            forbidden: {
                let first = pack.add(&forbidden);
                first..first + forbidden.len()
            },
        }
    }

    /// Creates a view of the tables that were packed into `whole`.
    pub fn over(whole: &Arc<Array>, at: DrawPlaces, size: DrawSize) -> Self {
        Self { whole: Arc::clone(whole), at, size }
    }
}

impl Gpu {
    /// Draws a token from each row of `logits [rows, vocab]` in f32. Penalties overwrite the logits. Rows with `forbids` exclude
    /// the tokens in `forbidden`. Waits for queued work.
    #[must_use]
    pub fn sample(
        &self,
        logits: &mut Array,
        vocab: usize,
        sampling: &Sampling,
        rows: &[Row],
        forbidden: &[u32],
    ) -> Vec<Drawn> {
        let (mut pack, size) = (Pack::default(), DrawSize::of(rows, sampling));
        let at = Draws::pack(&mut pack, rows, size, sampling, forbidden, vocab);
        let draws = Draws::over(&pack.upload(self), at, size);
        let mut out = self.drawn(rows.len());
        self.draw(&mut out, 0, logits, vocab, sampling, &draws);
        self.read_drawn(&out)
    }

    /// Allocates memory for the tokens that are drawn for `rows` rows.
    pub fn drawn(&self, rows: usize) -> Array {
        self.alloc(4 * rows, Dtype::F32)
    }

    /// Returns the drawn tokens. Waits for queued work.
    pub fn read_drawn(&self, out: &Array) -> Vec<Drawn> {
        let drawn = |[id, rest @ ..]: [u32; 4]| {
            let [logprob, sampler_logprob, entropy] = rest.map(f32::from_bits);
            Drawn { id, logprob, sampler_logprob, entropy }
        };
        out.words::<[u32; 4]>().into_iter().map(drawn).collect()
    }

    /// Queues the draws of [`Self::sample`] for each row of `logits`. The rows have the indices from `first` on in `draws` and
    /// `out`.
    pub fn draw(
        &self,
        out: &mut Array,
        first: usize,
        logits: &mut Array,
        vocab: usize,
        sampling: &Sampling,
        draws: &Draws,
    ) {
        let Draws { whole, at, size } = draws;
        // Without a vocabulary, every row has its result, which is NaN.
        let rows = logits.len().checked_div(vocab).unwrap_or(usize::MAX).min(size.rows.saturating_sub(first));
        let penalised = sampling.penalises();
        let word = |word: usize| whole.element(word);
        let (offsets, ids) = (word(at.offsets + first), word(at.seen));
        let counters = || word(at.counters + first);
        let raw = self.alloc(size.seen, Dtype::F32);
        let launch = |kernel| self.launch(kernel, [rows, 1, 1], 256, 0);
        let segments = segments(vocab);
        let of_segments = |kernel: launchers::Kernel| self.launch(kernel, [rows, segments, 1], 256, 0);
        let [largest, lse, entropy] = [(); 3].map(|()| self.alloc(rows, Dtype::F32));
        let surveys = self.alloc(4 * rows * segments, Dtype::F32);
        let survey = |lse: Option<&Array>, entropy: Option<&Array>, logits: &Array| {
            let inverse = 1.0 / sampling.scoring_temperature;
            let kernel =
                kernels::survey(&largest, lse, entropy, &surveys, counters(), logits, vocab, inverse);
            of_segments(kernel);
        };
        survey(Some(&lse), Some(&entropy), logits);
        if penalised {
            let penalty = sampling.repetition_penalty;
            launch(kernels::penalise(&*logits, &raw, offsets, ids, vocab, penalty));
        }
        let forbids = size.forbids && !at.forbidden.is_empty();
        if forbids {
            let (forbids, forbidden) = (word(at.forbids + first), word(at.forbidden.start));
            launch(kernels::forbid(&*logits, forbids, forbidden, at.forbidden.len(), vocab));
        }
        // Only these two change the largest logit.
        if penalised || forbids {
            survey(None, None, logits);
        }
        let Sampling { temperature, top_p, top_k, min_p, scoring_temperature: scoring, .. } = *sampling;
        let how = launchers::Sampling { temperature, top_p, min_p, scoring, top_k: top_k.min(vocab), vocab };
        let (out, raw) = (out.element(4 * first), penalised.then_some(&raw));
        let uniforms = word(at.uniforms + 2 * first);
        let cut = temperature != 0.0 && (top_k > 0 || top_p < 1.0 || min_p > 0.0);
        let bins = if cut { rows * segments * BINS } else { 0 };
        let [sums, masses, counts] =
            [2 * rows * segments, 2 * bins, bins].map(|words| self.alloc(words, Dtype::F32));
        of_segments(kernels::draw(
            out,
            counters(),
            &sums,
            &masses,
            &counts,
            &*logits,
            raw,
            offsets,
            ids,
            uniforms,
            &largest,
            &lse,
            &entropy,
            how,
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_of_a_model_has_sixteen_segments() {
        assert_eq!([0, 1, 256, 300, 151_936].map(segments), [1, 1, 1, 2, 16]);
    }
}
