//! The output head on a GPU.

use omnigrpo_gpu::{Affine, Array, Dtype, Head, Marks};
use omnigrpo_kernels::{largest, parallel};

use crate::gpu::{Card, Weights, draw_rows, sampling, sound, words};
use crate::rows::{RowOps, Window};

use super::*;

/// Number of logits that the host has at a time while it selects the most probable tokens.
const TOP_LOGITS: usize = 1 << 24;

impl HeadOps for Card {
    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32, top: Top) -> Scores {
        let (marks, weights) = (self.marks(targets), self.weights(head));
        let own = head_of(&weights, head, normed.cols(), temperature);
        let [logprobs, entropies, lse] = self.gpu.score(self.of(normed), own, &marks).map(|x| self.line(x));
        let top = if top.k == 0 { Vec::new() } else { self.top(normed, head, &lse, temperature, top) };
        Scores { logprobs, entropies, lse, temperature, top }
    }

    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        targets: &Targets,
        scores: &Scores,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Rows {
        let (rows, h) = normed.dims();
        let (marks, weights) = (self.marks(targets), self.weights(head));
        let own = head_of(&weights, head, h, scores.temperature);
        let (dlogp, dentropy) = (self.gpu.upload(dlogp), dentropy.map(|d| self.gpu.upload(d)));
        let stats = [self.of(&scores.entropies), self.of(&scores.lse)];
        let run = |dhead: Option<&mut Array>| {
            self.gpu.score_back(self.of(normed), own, &marks, stats, (&dlogp, dentropy.as_ref()), dhead)
        };
        let mut dnormed = None;
        self.accumulate(head, |dhead| dnormed = Some(run(Some(dhead))));
        self.rows(dnormed.unwrap_or_else(|| run(None)), rows, h)
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (rows, h) = normed.dims();
        let (vocab, weights) = (head.len() / h.max(1), self.weights(head));
        let mut y = self.gpu.alloc(rows * vocab, Dtype::F32);
        let x = self.of(normed);
        let layer = Affine { weight: weights.weight(), bias: None, n: vocab };
        self.gpu.linear_rows(&mut y, [0, vocab], x, &[layer], h, omnigrpo_gpu::Onto::Nothing);
        self.rows(y, rows, vocab)
    }

    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>> {
        let vocab = logits.cols();
        let (sampling, rows) = (sampling(how), draw_rows(from));
        let mut drawn = Vec::new();
        self.change(logits, |logits| drawn = self.gpu.sample(logits, vocab, &sampling, &rows, how.forbidden));
        drawn.into_iter().map(sound).collect()
    }
}

fn head_of<'a>(weights: &'a Weights, head: &Param, h: usize, temperature: f32) -> Head<'a> {
    Head { weight: weights.weight(), vocab: head.len() / h.max(1), h, temperature }
}

impl Card {
    /// Returns the most probable tokens of each row with their log-probabilities. The host selects them from pieces of logits.
    fn top(&self, normed: &Rows, head: &Param, lse: &Rows, temperature: f32, top: Top) -> Vec<(u32, f32)> {
        let (rows, vocab, scale) = (normed.rows(), head.len() / normed.cols().max(1), 1.0 / temperature);
        let (piece, lse) = ((TOP_LOGITS / vocab.max(1)).max(1), lse.to_vec());
        let mut most = Vec::with_capacity(rows * top.k);
        for first in (0..rows).step_by(piece) {
            let own = first..rows.min(first + piece);
            let count = own.len();
            let x = self.part(normed, Window::at(first, 0), [count, normed.cols()]);
            let logits = self.logits(&x, head).to_vec();
            let each = logits.chunks(vocab).zip(&lse[own]).collect::<Vec<_>>();
            let found = parallel::map(each, count * vocab, |(logits, lse)| {
                let of = |(z, id)| (id, z * scale - lse);
                largest(&logits[..top.below], top.k).into_iter().map(of).collect::<Vec<_>>()
            });
            most.extend(found.into_iter().flatten());
        }
        most
    }

    fn line(&self, data: Array) -> Rows {
        let cols = data.len();
        self.rows(data, 1, cols)
    }

    fn marks(&self, targets: &Targets) -> Marks {
        Marks::new(self.gpu, &words(&targets.offsets), &targets.tokens)
    }
}
