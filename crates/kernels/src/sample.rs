//! Sampling of one token from one row of logits.
//!
//! The steps follow the order of text generation in `transformers`: repetition penalty, forbidden tokens, temperature, top-k,
//! top-p, min-p. The recorded log-probability is that of `softmax(logits / scoring temperature)` before penalties and truncation,
//! because training differentiates that distribution. The caller supplies the uniform random number, so the same number draws the
//! same token everywhere.

use crate::logprob::{WEIGHTS_CHUNK, Weights};

/// Sampling settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler<'a> {
    /// Temperature, by which the logits are divided; 0 takes the most probable token.
    pub temperature: f32,
    /// Number of the most probable tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Probability that the kept tokens must reach together; the smallest such set is kept. 1 keeps all tokens.
    pub top_p: f32,
    /// Smallest probability to keep, relative to the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Penalty of tokens that are already present: positive logits are divided by it, and negative logits are multiplied by it. 1
    /// has no effect.
    pub repetition_penalty: f32,
    /// Temperature of the recorded log-probabilities.
    pub scoring_temperature: f32,
    /// Tokens that some rows must not draw: stop tokens, for completions that are still too short.
    pub forbidden: &'a [u32],
}

impl Default for Sampler<'_> {
    /// Returns settings that can draw any token, with the probabilities softmax(logits).
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            scoring_temperature: 1.0,
            forbidden: &[],
        }
    }
}

impl Sampler<'_> {
    /// Returns true if these settings can exclude tokens.
    #[must_use]
    pub fn truncates(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }
}

/// The inputs of one draw besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct DrawFrom<'a> {
    /// Tokens that are already present (prompt, completion). The repetition penalty applies to them.
    pub seen: [&'a [u32]; 2],
    /// True if this row must not draw the forbidden tokens.
    pub forbids: bool,
    /// Uniform random number, the position in the cumulative distribution; at least 0 and below 1.
    pub uniform: f64,
}

impl DrawFrom<'_> {
    /// Returns the tokens that this row must not draw.
    pub(crate) fn forbidden<'s>(&self, how: &Sampler<'s>) -> &'s [u32] {
        if self.forbids { how.forbidden } else { &[] }
    }

    /// Returns the tokens that are already present, without duplicates.
    #[must_use]
    pub fn present(&self) -> Vec<u32> {
        let mut ids = self.seen.concat();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    pub id: u32,
    /// Log-probability under softmax(logits / scoring temperature), in nats.
    pub logprob: f32,
    /// Log-probability under the distribution from which the token was drawn, in nats; 0 for greedy sampling.
    pub sampler_logprob: f32,
    /// Entropy of softmax(logits / scoring temperature), in nats.
    pub entropy: f32,
}

/// Draws a token and overwrites `logits`. Returns `None` if a logit is NaN or +∞, or if no token can be drawn.
#[must_use]
pub fn draw(logits: &mut [f32], how: &Sampler, from: &DrawFrom) -> Option<Draw> {
    let scored = Weights::new(logits, how.scoring_temperature)?;
    // Save only the few logits that penalties change. They are needed for the log-probability of the chosen token.
    let mut raw: Vec<(u32, f32)> = Vec::new();
    if how.repetition_penalty != 1.0 {
        for id in from.present() {
            if let Some(x) = logits.get_mut(id as usize) {
                raw.push((id, *x));
                *x = if *x > 0.0 { *x / how.repetition_penalty } else { *x * how.repetition_penalty };
            }
        }
    }
    for &id in from.forbidden(how) {
        if let Some(x) = logits.get_mut(id as usize) {
            *x = f32::NEG_INFINITY;
        }
    }
    if logits.iter().all(|x| *x == f32::NEG_INFINITY) {
        return None;
    }
    let changed = !raw.is_empty() || from.forbids;
    let (id, sampler_logprob) = if how.temperature == 0.0 {
        (argmax(logits), 0.0)
    } else if how.truncates() {
        from_truncated(logits, how, from.uniform)
    } else if !changed && how.temperature == how.scoring_temperature {
        from_all(&scored, from.uniform)
    } else {
        from_all(&Weights::new(logits, how.temperature)?, from.uniform)
    };
    let logit = raw.iter().find(|(i, _)| *i == id).map_or(logits[id as usize], |(_, x)| *x);
    let logprob = (f64::from(logit) * f64::from(scored.scale) - scored.lse) as f32;
    Some(Draw { id, logprob, sampler_logprob, entropy: scored.entropy as f32 })
}

/// Returns the index of the largest logit; the first index if there are several.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x > logits[best] {
            best = i;
        }
    }
    best as u32
}

fn from_all(weights: &Weights, u: f64) -> (u32, f32) {
    let bound = u * weights.total;
    let (mut sum, mut last) = (0.0, 0);
    // Select the chunk of the vocabulary, then the token in the chunk. Because of rounding, either search may end at the last
    // candidate.
    for (chunk, (w, own)) in weights.weights.chunks(WEIGHTS_CHUNK).zip(&weights.sums).enumerate() {
        if sum + own <= bound && chunk + 1 < weights.sums.len() {
            sum += own;
            continue;
        }
        for (i, &w) in w.iter().enumerate().filter(|(_, w)| **w > 0.0) {
            sum += f64::from(w);
            last = chunk * WEIGHTS_CHUNK + i;
            if sum > bound {
                break;
            }
        }
        if sum > bound {
            break;
        }
    }
    (last as u32, (f64::from(weights.weights[last]) / weights.total).ln() as f32)
}

fn from_truncated(logits: &[f32], how: &Sampler, u: f64) -> (u32, f32) {
    let t = f64::from(how.temperature);
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let keep = if how.top_k > 0 { how.top_k.min(ids.len()) } else { ids.len() };
    if keep < ids.len() {
        ids.select_nth_unstable_by(keep - 1, order);
        ids.truncate(keep);
    }
    ids.sort_unstable_by(order);
    let max = f64::from(logits[ids[0] as usize]) / t;
    let mut weights: Vec<f64> =
        ids.iter().map(|&i| (f64::from(logits[i as usize]) / t - max).exp()).collect();
    if how.top_p < 1.0 {
        let total: f64 = weights.iter().sum();
        let (mut sum, mut n) = (0.0, 0);
        // The token at which the sum crosses the bound is kept.
        while n < weights.len() && (n == 0 || sum < f64::from(how.top_p) * total) {
            sum += weights[n];
            n += 1;
        }
        weights.truncate(n);
    }
    if how.min_p > 0.0 {
        let n = weights.iter().take_while(|&&w| w >= f64::from(how.min_p)).count();
        weights.truncate(n.max(1));
    }
    let total: f64 = weights.iter().sum();
    let mut sum = 0.0;
    let mut chosen = 0;
    for (i, &w) in weights.iter().enumerate() {
        if w > 0.0 {
            chosen = i;
            sum += w;
            if sum > u * total {
                break;
            }
        }
    }
    (ids[chosen], (weights[chosen] / total).ln() as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a vocabulary of several chunks, draws must equal the inverse of the cumulative distribution, summed token by token.
    #[test]
    fn any_chunk_can_be_drawn_from() {
        let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 977) as f32 / 100.0).collect();
        let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        let weights = Weights::new(&logits, 1.0).unwrap();
        assert!((weights.lse - total.ln()).abs() < 1e-6);
        let mean: f64 = logits.iter().map(|&x| f64::from(x) * f64::from(x).exp() / total).sum();
        assert!((weights.entropy - (total.ln() - mean)).abs() < 1e-5);
        let mut below = 0.0;
        for (id, x) in logits.iter().enumerate() {
            let own = f64::from(*x).exp() / total;
            let (drawn, logprob) = from_all(&weights, below + own / 2.0);
            assert_eq!(drawn as usize, id);
            assert!((f64::from(logprob) - own.ln()).abs() < 1e-5);
            below += own;
        }
        assert_eq!(from_all(&weights, 1.0).0, 4999);
    }

    /// Tokens of weight 0 must never be drawn, at any position, even if they fill complete chunks.
    #[test]
    fn a_token_without_weight_is_not_drawn() {
        for (len, only) in [(3072, 2000), (3072, 0), (3072, 3071), (1025, 3), (2048, 1024)] {
            let mut logits = vec![f32::NEG_INFINITY; len];
            logits[only] = 3.0;
            let weights = Weights::new(&logits, 1.0).unwrap();
            assert_eq!(weights.entropy, 0.0);
            for u in [0.0, 0.5, 1.0 - f64::EPSILON / 2.0] {
                assert_eq!(from_all(&weights, u), (only as u32, 0.0), "{len} {u}");
            }
        }
    }
}
