//! Sampling parameters, and the random number of every token.

use omnigrpo_ops::Sampler;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

use crate::error::{Result, RolloutError};

/// Sampling parameters.
///
/// ```
/// use omnigrpo_rollout::SamplingParams;
///
/// let params = SamplingParams { temperature: 0.7, top_p: 0.95, max_completion_length: 64, ..SamplingParams::default() };
/// params.validate()?;
/// // Recorded log-probabilities use this temperature; those of greedy tokens use 1.
/// assert_eq!(params.scoring_temperature(), 0.7);
/// assert_eq!(SamplingParams::greedy().scoring_temperature(), 1.0);
/// # Ok::<(), omnigrpo_rollout::RolloutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SamplingParams {
    /// Divisor of the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// Probability that the smallest set of kept tokens must reach; 1 keeps all.
    pub top_p: f32,
    /// Number of most probable tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Smallest probability to keep, relative to the largest; 0 keeps all.
    pub min_p: f32,
    /// Factor for logits of tokens already present: divides positive and multiplies negative logits; 1 does nothing.
    pub repetition_penalty: f32,
    /// Maximum number of tokens.
    pub max_completion_length: usize,
    /// Number of tokens before which no stop token is drawn.
    pub min_completion_length: usize,
    /// Temperature of the recorded log-probabilities. `None` means that of sampling (1 when greedy).
    pub logprob_temperature: Option<f32>,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Limits of the answers of an environment; `None` samples completions of one turn.
    pub turns: Option<TurnLimits>,
}

/// Limits of the answers of an environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TurnLimits {
    /// Maximum number of answers per completion. The completion ends with the model's turn after the last one.
    pub max_turns: usize,
    /// Maximum number of tokens of an answer; `None` leaves only the maximum length of the completion, which includes answers.
    pub max_answer_tokens: Option<usize>,
    /// Maximum number of media in an answer.
    pub max_answer_media: usize,
}

impl Default for TurnLimits {
    /// Allows eight answers per completion with at most four media each.
    fn default() -> Self {
        Self { max_turns: 8, max_answer_tokens: None, max_answer_media: 4 }
    }
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
            turns: None,
        }
    }
}

impl SamplingParams {
    /// Always takes the most probable token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every range; the error names the first parameter out of range.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, name, got: String, expected| {
            if ok { Ok(()) } else { Err(RolloutError::Parameter { name, got, expected }) }
        };
        // Beyond these bounds, a logit divided by the temperature or multiplied by the penalty may not be finite.
        let bounded = |x: f32, from: f32| (from..=100.0).contains(&x);
        let t = self.temperature;
        check(t == 0.0 || bounded(t, 1e-4), "temperature", t.to_string(), "0, or from 0.0001 to 100")?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p.to_string(), "above 0, at most 1")?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p.to_string(), "from 0 to 1")?;
        let r = self.repetition_penalty;
        check(bounded(r, 0.01), "repetition_penalty", r.to_string(), "from 0.01 to 100")?;
        let max = self.max_completion_length;
        check(max >= 1, "max_completion_length", max.to_string(), "at least 1")?;
        let min = self.min_completion_length;
        check(min <= max, "min_completion_length", min.to_string(), "at most max_completion_length")?;
        let l = self.logprob_temperature.unwrap_or(1.0);
        check(bounded(l, 0.01), "logprob_temperature", l.to_string(), "from 0.01 to 100")
    }

    /// Converts to a device's settings; completions below the minimum length cannot draw `forbidden`.
    pub(crate) fn sampler<'a>(&self, forbidden: &'a [u32]) -> Sampler<'a> {
        Sampler {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            scoring_temperature: self.scoring_temperature(),
            forbidden,
        }
    }

    /// Returns the temperature of the recorded log-probabilities.
    pub fn scoring_temperature(&self) -> f32 {
        self.logprob_temperature.unwrap_or(if self.temperature > 0.0 { self.temperature } else { 1.0 })
    }
}

/// Inputs of a completion's random numbers besides the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleKey {
    /// Number of the rollout in the run (the optimizer step that requested it).
    pub rollout: u64,
    /// Stable index of the dataset row.
    pub row: u64,
    /// Sample of the row in this rollout.
    pub sample: u32,
}

impl SampleKey {
    /// Returns the uniform number in [0, 1) that samples token `token`.
    pub(crate) fn uniform(self, seed: u64, token: usize) -> f64 {
        self.number(seed, token, 0)
    }

    /// Returns a uniform number in [0, 1) for a choice among sampled tokens. It is independent of the numbers that sample.
    pub fn choice(self, seed: u64, token: usize) -> f64 {
        self.number(seed, token, 1)
    }

    fn number(self, seed: u64, token: usize, use_of_it: u8) -> f64 {
        let mut key = [0u8; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&self.rollout.to_le_bytes());
        key[16..24].copy_from_slice(&self.row.to_le_bytes());
        key[24..28].copy_from_slice(&self.sample.to_le_bytes());
        key[28] = use_of_it;
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_word_pos(2 * token as u128);
        (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use omnigrpo_ops::{Draw, DrawFrom, Rows};

    use super::*;

    const KEY: SampleKey = SampleKey { rollout: 3, row: 7, sample: 1 };

    /// Draws token `token` of a completion from a row of logits on the CPU.
    fn draw(
        logits: &mut [f32],
        params: &SamplingParams,
        key: SampleKey,
        token: usize,
        seen: &[u32],
        stops: &[u32],
    ) -> Option<Draw> {
        let forbids = token < params.min_completion_length;
        let from = DrawFrom { seen: [seen, &[]], forbids, uniform: key.uniform(params.seed, token) };
        let rows = Rows::from_vec(logits.to_vec(), 1, logits.len()).unwrap();
        rows.draw(&params.sampler(stops), &[from]).unwrap()[0]
    }

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
        // A choice among tokens must not depend on the numbers that sampled them.
        assert_eq!(KEY.choice(11, 5), KEY.choice(11, 5));
        assert!((0..100).all(|token| KEY.choice(11, token) != u(KEY, token)));
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

    #[test]
    fn where_every_token_is_a_stop_token_none_is_drawn() {
        let params = SamplingParams { min_completion_length: 2, max_completion_length: 4, ..params() };
        for temperature in [0.0, 1.0] {
            let params = SamplingParams { temperature, ..params.clone() };
            assert_eq!(draw(&mut [1.0, 2.0], &params, KEY, 0, &[], &[0, 1]), None);
        }
    }

    /// A nearly certain token has a log-probability of 0, not above, at a temperature without an exact inverse.
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
        // 0.5 + 0.3 reaches 0.79; the token that crosses the bound is kept.
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
        // The penalty lowers token 0 to 0.2 and stop token 1 is masked, so 0.2 exceeds 0.0 and 0 is drawn.
        let d = draw(&mut logits.clone(), &p, KEY, 0, &[0], &[1]).unwrap();
        assert_eq!(d.id, 0);
        let z: f64 = logits.iter().map(|&x| f64::from(x / t).exp()).sum();
        assert!((f64::from(d.logprob) - (f64::from(2.0 / t) - z.ln())).abs() < 1e-6);
        let minus_p_ln_p = |x: f32| (z.ln() - f64::from(x / t)) * f64::from(x / t).exp() / z;
        let entropy: f64 = logits.iter().map(|&x| minus_p_ln_p(x)).sum();
        assert!((f64::from(d.entropy) - entropy).abs() < 1e-6);
        assert_eq!(d.sampler_logprob, 0.0);
    }

    #[test]
    fn no_token_is_drawn_from_non_finite_logits() {
        assert_eq!(draw(&mut [0.0, f32::NAN], &params(), KEY, 4, &[], &[]), None);
    }

    #[test]
    fn ranges_are_checked() {
        for (p, name) in [
            (SamplingParams { temperature: -1.0, ..params() }, "temperature"),
            (SamplingParams { temperature: 1e-45, ..params() }, "temperature"),
            (SamplingParams { temperature: f32::MAX, ..params() }, "temperature"),
            (SamplingParams { temperature: f32::NAN, ..params() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..params() }, "top_p"),
            (SamplingParams { top_p: f32::NAN, ..params() }, "top_p"),
            (SamplingParams { min_p: 1.5, ..params() }, "min_p"),
            (SamplingParams { min_p: f32::NAN, ..params() }, "min_p"),
            (SamplingParams { repetition_penalty: 1e-45, ..params() }, "repetition_penalty"),
            (SamplingParams { repetition_penalty: f32::INFINITY, ..params() }, "repetition_penalty"),
            (SamplingParams { logprob_temperature: Some(1e-45), ..params() }, "logprob_temperature"),
            (SamplingParams { logprob_temperature: Some(f32::NAN), ..params() }, "logprob_temperature"),
            (SamplingParams { max_completion_length: 0, ..params() }, "max_completion_length"),
            (SamplingParams { min_completion_length: 300, ..params() }, "min_completion_length"),
        ] {
            assert!(p.validate().unwrap_err().to_string().starts_with(name));
        }
        params().validate().unwrap();
    }

    /// A valid setting never makes finite logits look like those of a model that has diverged.
    #[test]
    fn every_valid_setting_draws_from_finite_logits() {
        let logits = [1e30f32, 0.0, -1e30, 3.0, -f32::MIN_POSITIVE];
        for temperature in [0.0, 1e-4, 1.0, 100.0] {
            for repetition_penalty in [0.01, 1.0, 100.0] {
                for (top_p, min_p, top_k) in
                    [(1.0, 0.0, 0), (1e-45, 0.0, 0), (1.0, 1.0, 0), (0.5, 1e-45, usize::MAX), (1.0, 0.0, 1)]
                {
                    let params = SamplingParams {
                        temperature,
                        repetition_penalty,
                        top_p,
                        min_p,
                        top_k,
                        min_completion_length: 2,
                        logprob_temperature: Some(1.0),
                        ..params()
                    };
                    params.validate().unwrap();
                    let drawn = draw(&mut logits.clone(), &params, KEY, 0, &[0, 2], &[1]);
                    assert!(drawn.is_some_and(|drawn| drawn.id != 1), "{params:?}");
                }
            }
        }
    }
}
