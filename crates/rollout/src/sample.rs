//! Drawing one token from one row of logits.
//!
//! The order of the steps is that of `transformers`' generation: repetition penalty, minimum length, temperature,
//! top-k, top-p, min-p. The recorded log-probability is that of `softmax(logits / temperature)` before penalties and
//! truncation, the distribution whose gradient training takes.

use omnigrpo_kernels::logprob::{WEIGHTS_CHUNK, Weights};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::error::{Result, RolloutError};

/// How completions are sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
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
    /// Tokens at most.
    pub max_completion_length: usize,
    /// No stop token before this many tokens.
    pub min_completion_length: usize,
    /// Temperature of the recorded log-probabilities. `None`: that of sampling (1 when greedy).
    pub logprob_temperature: Option<f32>,
    /// Keys all random numbers.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            max_completion_length: 256,
            min_completion_length: 0,
            logprob_temperature: None,
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// The most probable token each time.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first parameter out of range.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, name, got: String, expected| {
            if ok { Ok(()) } else { Err(RolloutError::Parameter { name, got, expected }) }
        };
        let finite = |x: f32, ok: bool| x.is_finite() && ok;
        let t = self.temperature;
        check(finite(t, t >= 0.0), "temperature", t.to_string(), "a number from 0")?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p.to_string(), "above 0, at most 1")?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p.to_string(), "from 0 to 1")?;
        let r = self.repetition_penalty;
        check(finite(r, r > 0.0), "repetition_penalty", r.to_string(), "a number above 0")?;
        let max = self.max_completion_length;
        check(max >= 1, "max_completion_length", max.to_string(), "at least 1")?;
        let min = self.min_completion_length;
        check(min <= max, "min_completion_length", min.to_string(), "at most max_completion_length")?;
        let l = self.logprob_temperature.unwrap_or(1.0);
        check(finite(l, l > 0.0), "logprob_temperature", l.to_string(), "a number above 0")
    }

    /// Temperature of the recorded log-probabilities.
    #[must_use]
    pub fn scoring_temperature(&self) -> f32 {
        self.logprob_temperature.unwrap_or(if self.temperature > 0.0 { self.temperature } else { 1.0 })
    }
}

/// What a completion's random numbers depend on, besides the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleKey {
    /// Which rollout of the run (the optimizer step that asked for it).
    pub rollout: u64,
    /// Dataset row.
    pub row: u64,
    /// Sample of the row in this rollout.
    pub sample: u32,
}

impl SampleKey {
    /// The uniform number in [0, 1) for token `token`.
    fn uniform(self, seed: u64, token: usize) -> f64 {
        let mut key = [0u8; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&self.rollout.to_le_bytes());
        key[16..24].copy_from_slice(&self.row.to_le_bytes());
        key[24..28].copy_from_slice(&self.sample.to_le_bytes());
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_word_pos(2 * token as u128);
        (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Draw {
    pub id: u32,
    /// Of softmax(logits / scoring temperature), nats.
    pub logprob: f32,
    /// Of the distribution that was sampled from, nats; 0 when greedy.
    pub sampler_logprob: f32,
    /// Entropy of softmax(logits / scoring temperature), nats.
    pub entropy: f32,
}

/// Draws token number `token` of a completion from its logits. `seen` are the ids so far, prompt included.
pub(crate) fn draw(
    logits: &mut [f32],
    params: &SamplingParams,
    key: SampleKey,
    token: usize,
    seen: &[&[u32]],
    stops: &[u32],
) -> Result<Draw> {
    let scoring = params.scoring_temperature();
    let broken = || RolloutError::NonFinite { row: key.row, sample: key.sample, token };
    let scored = Weights::new(logits, scoring).ok_or_else(broken)?;
    let (lse, scale, entropy) = (scored.lse, scored.scale, scored.entropy as f32);
    // Only the few logits that penalties touch are remembered, for the chosen token's record.
    let mut raw: Vec<(u32, f32)> = Vec::new();
    if params.repetition_penalty != 1.0 {
        let mut ids: Vec<u32> = seen.iter().flat_map(|ids| ids.iter().copied()).collect();
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            if let Some(x) = logits.get_mut(id as usize) {
                raw.push((id, *x));
                *x = if *x > 0.0 { *x / params.repetition_penalty } else { *x * params.repetition_penalty };
            }
        }
    }
    if token < params.min_completion_length {
        for &id in stops {
            if let Some(x) = logits.get_mut(id as usize) {
                *x = f32::NEG_INFINITY;
            }
        }
    }
    if logits.iter().all(|x| *x == f32::NEG_INFINITY) {
        return Err(broken());
    }
    let (id, sampler_logprob) = if params.temperature == 0.0 {
        (argmax(logits), 0.0)
    } else {
        let truncated = params.top_p < 1.0 || params.top_k > 0 || params.min_p > 0.0;
        let u = key.uniform(params.seed, token);
        let changed = !raw.is_empty() || token < params.min_completion_length;
        if truncated {
            from_truncated(logits, params, u)
        } else if !changed && params.temperature == scoring {
            from_all(&scored, u)
        } else {
            from_all(&Weights::new(logits, params.temperature).ok_or_else(broken)?, u)
        }
    };
    let logit = raw.iter().find(|(i, _)| *i == id).map_or(logits[id as usize], |(_, x)| *x);
    let logprob = (f64::from(logit) * f64::from(scale) - lse) as f32;
    Ok(Draw { id, logprob, sampler_logprob, entropy })
}

/// The first of the largest logits.
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
    // First the chunk of the vocabulary, then the token in it; rounding may leave the last of either.
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

fn from_truncated(logits: &[f32], params: &SamplingParams, u: f64) -> (u32, f32) {
    let t = f64::from(params.temperature);
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let keep = if params.top_k > 0 { params.top_k.min(ids.len()) } else { ids.len() };
    if keep < ids.len() {
        ids.select_nth_unstable_by(keep - 1, order);
        ids.truncate(keep);
    }
    ids.sort_unstable_by(order);
    let max = f64::from(logits[ids[0] as usize]) / t;
    let mut weights: Vec<f64> =
        ids.iter().map(|&i| (f64::from(logits[i as usize]) / t - max).exp()).collect();
    if params.top_p < 1.0 {
        let total: f64 = weights.iter().sum();
        let (mut sum, mut n) = (0.0, 0);
        // The token that crosses the bound is kept.
        while n < weights.len() && (n == 0 || sum < f64::from(params.top_p) * total) {
            sum += weights[n];
            n += 1;
        }
        weights.truncate(n);
    }
    if params.min_p > 0.0 {
        let n = weights.iter().take_while(|&&w| w >= f64::from(params.min_p)).count();
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

    const KEY: SampleKey = SampleKey { rollout: 3, row: 7, sample: 1 };

    fn params() -> SamplingParams {
        SamplingParams { seed: 11, ..SamplingParams::default() }
    }

    #[test]
    fn a_draw_depends_on_its_key_and_token_alone() {
        let u = |key: SampleKey, token| key.uniform(11, token);
        assert_eq!(u(KEY, 5), u(KEY, 5));
        let other = SampleKey { sample: 2, ..KEY };
        assert_ne!(u(KEY, 5), u(other, 5));
        assert_ne!(u(KEY, 5), u(KEY, 6));
        assert_ne!(u(KEY, 5), KEY.uniform(12, 5));
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, -1.0, 2.0];
        let exps: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
        let total: f64 = exps.iter().sum();
        let mut counts = [0usize; 4];
        const N: usize = 40_000;
        for token in 0..N {
            let d = draw(&mut logits.clone(), &params(), KEY, token, &[], &[]).unwrap();
            counts[d.id as usize] += 1;
            assert!((f64::from(d.logprob) - (exps[d.id as usize] / total).ln()).abs() < 1e-6);
            assert!((d.logprob - d.sampler_logprob).abs() < 1e-6);
        }
        for (count, e) in counts.iter().zip(&exps) {
            let p = e / total;
            let sigma = (p * (1.0 - p) / N as f64).sqrt();
            assert!((*count as f64 / N as f64 - p).abs() < 5.0 * sigma, "{counts:?}");
        }
    }

    /// A vocabulary of several chunks: the inverse of the cumulative distribution, as summed one by one.
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

    /// Tokens of weight 0 are never drawn, wherever they stand; whole chunks of them too.
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
        let params = SamplingParams { min_completion_length: 2, max_completion_length: 4, ..params() };
        for temperature in [0.0, 1.0] {
            let params = SamplingParams { temperature, ..params.clone() };
            let drawn = draw(&mut [1.0, 2.0], &params, KEY, 0, &[], &[0, 1]);
            assert!(drawn.unwrap_err().to_string().contains("token 0"), "every token is a stop token");
        }
    }

    /// A token that is as good as certain has a log-probability of 0, not above, at a temperature that has no exact inverse.
    #[test]
    fn certainty_is_zero() {
        let params = SamplingParams { temperature: 0.7, ..params() };
        let draw = draw(&mut [40.0, -40.0, 1.0], &params, KEY, 0, &[], &[]).unwrap();
        assert_eq!(draw.id, 0);
        assert!(draw.logprob.abs() < 4e-6 && draw.sampler_logprob == 0.0, "{draw:?}");
    }

    #[test]
    fn truncation_keeps_the_right_tokens() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.15f32.ln(), 0.05f32.ln()];
        let seen = |p: SamplingParams| {
            let mut ids: Vec<u32> =
                (0..2000).map(|t| draw(&mut logits.clone(), &p, KEY, t, &[], &[]).unwrap().id).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        assert_eq!(seen(params()), [0, 1, 2, 3]);
        assert_eq!(seen(SamplingParams { top_k: 2, ..params() }), [0, 1]);
        // 0.5 + 0.3 reaches 0.79; the token that crosses the bound stays.
        assert_eq!(seen(SamplingParams { top_p: 0.79, ..params() }), [0, 1]);
        assert_eq!(seen(SamplingParams { top_p: 0.81, ..params() }), [0, 1, 2]);
        // 0.15 / 0.5 = 0.3, 0.05 / 0.5 = 0.1.
        assert_eq!(seen(SamplingParams { min_p: 0.2, ..params() }), [0, 1, 2]);
        assert_eq!(seen(SamplingParams { temperature: 0.0, ..params() }), [0]);
    }

    #[test]
    fn the_record_ignores_penalty_truncation_and_minimum_length() {
        let logits = [2.0f32, 1.0, 0.0];
        let t = 0.5f32;
        let p = SamplingParams {
            temperature: t,
            top_k: 1,
            repetition_penalty: 10.0,
            min_completion_length: 1,
            max_completion_length: 4,
            ..params()
        };
        // Token 0 is penalised to 0.2 and stop token 1 is masked, so 0.2 beats 0.0 and 0 is drawn.
        let d = draw(&mut logits.clone(), &p, KEY, 0, &[&[0]], &[1]).unwrap();
        assert_eq!(d.id, 0);
        let z: f64 = logits.iter().map(|&x| f64::from(x / t).exp()).sum();
        assert!((f64::from(d.logprob) - (f64::from(2.0 / t) - z.ln())).abs() < 1e-6);
        let minus_p_ln_p = |x: f32| (z.ln() - f64::from(x / t)) * f64::from(x / t).exp() / z;
        let entropy: f64 = logits.iter().map(|&x| minus_p_ln_p(x)).sum();
        assert!((f64::from(d.entropy) - entropy).abs() < 1e-6);
        assert_eq!(d.sampler_logprob, 0.0);
    }

    #[test]
    fn logits_that_are_no_numbers_are_an_error() {
        let error = draw(&mut [0.0, f32::NAN], &params(), KEY, 4, &[], &[]).unwrap_err();
        assert!(error.to_string().contains("token 4 of sample 1 of row 7"), "{error}");
    }

    #[test]
    fn ranges_are_checked() {
        for (p, name) in [
            (SamplingParams { temperature: -1.0, ..params() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..params() }, "top_p"),
            (SamplingParams { min_p: 1.5, ..params() }, "min_p"),
            (SamplingParams { max_completion_length: 0, ..params() }, "max_completion_length"),
            (SamplingParams { min_completion_length: 300, ..params() }, "min_completion_length"),
        ] {
            assert!(p.validate().unwrap_err().to_string().starts_with(name));
        }
        params().validate().unwrap();
    }
}
