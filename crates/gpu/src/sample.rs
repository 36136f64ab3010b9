//! Drawing tokens from rows of logits.

use std::ops::Range;
use std::sync::Arc;

use crate::device::{Arg, Array, Dtype, Gpu, Launch, Pack};
use crate::head::Marks;

/// How tokens are drawn; see `cuda/sample.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; 0 takes the most probable token.
    pub temperature: f32,
    /// Keep the smallest set of tokens with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep tokens with at least this share of the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive and multiplies the negative logits of tokens already present; 1 does nothing.
    pub repetition_penalty: f32,
    /// Temperature of the recorded log-probabilities.
    pub scoring_temperature: f32,
}

/// What one row is drawn with.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// From the host, in [0, 1).
    pub uniform: f64,
    /// Distinct tokens that the penalty concerns.
    pub seen: Vec<u32>,
    /// Whether the tokens named for it cannot be drawn.
    pub forbids: bool,
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub id: u32,
    /// Of softmax(logits / scoring temperature) before penalties, nats.
    pub logprob: f32,
    /// Of the distribution that was sampled from, nats; 0 when greedy.
    pub sampler_logprob: f32,
    /// Entropy of softmax(logits / scoring temperature), nats.
    pub entropy: f32,
}

/// How large the descriptions of a draw are: what its kernels and their memory depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DrawSize {
    /// Rows.
    pub rows: usize,
    /// Room for tokens that the penalty concerns, of all rows.
    pub seen: usize,
    /// Whether some row cannot draw everything.
    pub forbids: bool,
}

impl DrawSize {
    /// What these rows need.
    #[must_use]
    pub fn of(rows: &[Row], sampling: &Sampling) -> Self {
        let seen = if sampling.penalises() { rows.iter().map(|row| row.seen.len()).sum() } else { 0 };
        Self { rows: rows.len(), seen, forbids: rows.iter().any(|row| row.forbids) }
    }

    /// One of few sizes that has room for as much, with rows that nobody reads.
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

/// What rows are drawn with, on a device.
#[derive(Debug)]
pub struct Draws {
    whole: Arc<Array>,
    at: DrawPlaces,
    size: DrawSize,
}

/// Where in a [`Pack`] they are.
#[derive(Clone, Debug)]
pub struct DrawPlaces {
    zeros: usize,
    uniforms: usize,
    offsets: usize,
    seen: usize,
    forbids: usize,
    forbidden: Range<usize>,
}

impl Draws {
    /// Packs what rows are drawn with, and rows behind them up to `size`. Tokens beyond `vocab` are left out.
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
            zeros: pack.add(&vec![0u32; size.rows + 1]),
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

    /// Those that were packed into `whole`.
    #[must_use]
    pub fn over(whole: &Arc<Array>, at: DrawPlaces, size: DrawSize) -> Self {
        Self { whole: Arc::clone(whole), at, size }
    }
}

impl Gpu {
    /// Draws a token from each row of `logits [rows, vocab]` in f32, which penalties change. Rows that say so cannot draw
    /// `forbidden`. Waits for queued work.
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

    /// Room for the tokens that `rows` rows draw.
    #[must_use]
    pub fn drawn(&self, rows: usize) -> Array {
        self.alloc(4 * rows, Dtype::F32)
    }

    /// The tokens that were drawn. Waits for queued work.
    #[must_use]
    pub fn read_drawn(&self, out: &Array) -> Vec<Drawn> {
        let drawn = |[id, rest @ ..]: [u32; 4]| {
            let [logprob, sampler_logprob, entropy] = rest.map(f32::from_bits);
            Drawn { id, logprob, sampler_logprob, entropy }
        };
        out.words::<[u32; 4]>().into_iter().map(drawn).collect()
    }

    /// Queues the draw of a token from each row of `logits`, as [`Self::sample`]; they are rows `first..` of `draws` and `out`.
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
        let rows = (logits.len() / vocab.max(1)).min(size.rows.saturating_sub(first));
        let none = Marks::none(whole, at.zeros, rows);
        let [_, entropy, lse] = self.score_logits(logits, vocab, &none, sampling.scoring_temperature);
        let penalised = sampling.penalises();
        let word = |word: usize| Arg::Pointer(whole.place(word));
        let (offsets, ids) = (word(at.offsets + first), word(at.seen));
        let raw = self.alloc(size.seen, Dtype::F32);
        let vocab_arg = Arg::Unsigned(vocab as u32);
        let block = |kernel| Launch { kernel, grid: [rows, 1, 1], threads: 256, shared: 0 };
        if penalised {
            let penalty = Arg::Float(sampling.repetition_penalty);
            let args = [logits.pointer(), raw.pointer(), offsets, ids, vocab_arg, penalty];
            self.launch(block("sample/penalise"), &args);
        }
        if size.forbids && !at.forbidden.is_empty() {
            let count = Arg::Int(at.forbidden.len() as i32);
            let (forbids, forbidden) = (word(at.forbids + first), word(at.forbidden.start));
            self.launch(block("sample/forbid"), &[logits.pointer(), forbids, forbidden, count, vocab_arg]);
        }
        let Sampling { temperature, top_p, top_k, min_p, scoring_temperature, .. } = *sampling;
        let [temperature, top_p, min_p, scoring] =
            [temperature, top_p, min_p, scoring_temperature].map(f32::to_bits);
        let args = [
            Arg::Pointer(out.place(4 * first)),
            logits.pointer(),
            if penalised { raw.pointer() } else { Arg::NULL },
            offsets,
            ids,
            word(at.uniforms + 2 * first),
            lse.pointer(),
            entropy.pointer(),
            Arg::fields(&[temperature, top_p, min_p, scoring, top_k as u32, vocab as u32]),
        ];
        self.launch(block("sample/draw"), &args);
    }
}
