//! Drawing tokens from rows of logits.

use crate::device::{Arg, Array, Dtype, Gpu, Launch};
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
        let none = Marks::new(self, &vec![0; rows.len() + 1], &[]);
        let [_, entropy, lse] = self.score_logits(logits, vocab, &none, sampling.scoring_temperature);
        let (mut offsets, mut seen) = (vec![0], Vec::new());
        let penalised = sampling.repetition_penalty != 1.0;
        for row in rows {
            if penalised {
                seen.extend(row.seen.iter().copied().filter(|&id| (id as usize) < vocab));
            }
            offsets.push(seen.len() as u32);
        }
        let [offsets, ids] = [&offsets, &seen].map(|words| self.upload_words(words));
        let raw = self.alloc(seen.len(), Dtype::F32);
        let vocab_arg = Arg::Unsigned(vocab as u32);
        let block = |kernel, rows| Launch { kernel, grid: [rows, 1, 1], threads: 256, shared: 0 };
        if penalised {
            let penalty = Arg::Float(sampling.repetition_penalty);
            let args =
                [logits.pointer(), raw.pointer(), offsets.pointer(), ids.pointer(), vocab_arg, penalty];
            self.launch(block("sample/penalise", rows.len()), &args);
        }
        let short: Vec<u32> = (0u32..).zip(rows).filter(|(_, row)| row.forbids).map(|(i, _)| i).collect();
        let forbidden: Vec<u32> = forbidden.iter().copied().filter(|&id| (id as usize) < vocab).collect();
        let [short_at, forbidden_at] = [&short, &forbidden].map(|words| self.upload_words(words));
        let count = Arg::Int(forbidden.len() as i32);
        let args = [logits.pointer(), short_at.pointer(), forbidden_at.pointer(), count, vocab_arg];
        self.launch(block("sample/forbid", short.len()), &args);
        let uniforms: Vec<f64> = rows.iter().map(|row| row.uniform).collect();
        let uniforms = self.upload_words(&uniforms);
        let out = self.alloc(4 * rows.len(), Dtype::F32);
        let Sampling { temperature, top_p, top_k, min_p, scoring_temperature, .. } = *sampling;
        let [temperature, top_p, min_p, scoring] =
            [temperature, top_p, min_p, scoring_temperature].map(f32::to_bits);
        let args = [
            out.pointer(),
            logits.pointer(),
            if penalised { raw.pointer() } else { Arg::NULL },
            offsets.pointer(),
            ids.pointer(),
            uniforms.pointer(),
            lse.pointer(),
            entropy.pointer(),
            Arg::fields(&[temperature, top_p, min_p, scoring, top_k as u32, vocab as u32]),
        ];
        self.launch(block("sample/draw", rows.len()), &args);
        // The one copy to the host.
        out.words::<[u32; 4]>()
            .into_iter()
            .map(|[id, rest @ ..]| {
                let [logprob, sampler_logprob, entropy] = rest.map(f32::from_bits);
                Drawn { id, logprob, sampler_logprob, entropy }
            })
            .collect()
    }
}
