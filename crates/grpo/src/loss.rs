//! Loss of one optimizer step and its gradient with respect to log-probabilities and entropies.
//!
//! For completion `i` with `L_i` tokens and token `t`: `lp = log pi(token)`, `old` and `ref` are its log-probabilities under the
//! sampling and the reference policy, and `A_i` is the advantage:
//!
//! ```text
//! d_it  = lp_it - old_it                                  (0 when on-policy, with derivative 1)
//! c_it  = exp(d_it)            RatioLevel::Token
//! c_i   = exp(mean_t d_it)     RatioLevel::Sequence
//! c_i   = exp(sum_t d_it)      RatioLevel::Product
//! l_it  = (surrogate(c, A_i + tau (ref_it - old_it), lp_it) + p_it) * g_it * v_it * m_i
//! g_it  = 1 for the fraction `top_entropy` of tokens with the highest entropy, else 0; see top_entropy_tokens
//! v_it  = weight of the difference between sampler and policy, see Correction
//! tau   = weight of a teacher, whose log-probabilities are `ref`; see LossPlan::distillation
//! p_it  = covariance penalty of a chosen token, or what takes the token out of the term; see Covariance
//! m_i   = 0 for a completion that the policy has left behind, else 1; see LossPlan::off_policy_threshold
//! k_it  = kl(lp_it, ref_it, c)
//! D_it  = divergence from a teacher over its most probable tokens, see Divergence; l_it has no `tau` then
//! loss  = sum_it w_i (l_it + beta k_it + tau D_it)  -  entropy_coef * mean_it H_it
//! ```
//!
//! [`Aggregation`] and [`Normalizer`] determine `w_i`. The normalizer is created once for the complete optimizer step. The loss
//! of the step is therefore the plain sum of the losses of its parts, however the groups are divided.
//!
//! Source: TRL 1.16 `GRPOTrainer._compute_loss`; each variant names its paper. Deliberate differences:
//! - The exponent of every ratio is clamped to ±20, and that of k3 to at most 20, with gradient 0 beyond. Otherwise one token
//!   with a collapsed probability would make the step infinite. Exponents within the bound are unchanged.
//! - The k3 exponent has no lower clamp: `exp` cannot overflow there and k3 grows only linearly, so the gradient still pulls
//!   towards the reference. With [`Kl::K3Corrected`] the clamp limits only the value: the gradient is `-c (ref - lp)`, linear on
//!   both sides.
//! - The entropy bonus is a mean over the tokens of the complete optimizer step, not a mean of micro-batch means.
//! - The entropy gate selects its tokens once per rollout, from the entropies of the sampling weights. TRL selects them in each
//!   pass, from the entropies of that pass.
//! - The tokens of [`Covariance`] are chosen once per rollout too, among all tokens of the optimizer step and from the log-probabilities
//!   of the sampling weights. verl chooses them in each pass, among the tokens of a micro-batch, from the log-probabilities of that
//!   pass. Both are equal in the first update of a step without micro-batches.
//! - `dapo` and `cispo` divide by the tokens of the optimizer step. TRL divides by the tokens of the generation batch over its
//!   number of steps. Both are equal with one optimizer step per rollout.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::custom::{CustomTerm, Dual, PolicyToken};
use crate::divergence::Divergence;
use crate::metrics::MetricSums;

/// Largest exponent of a probability ratio; `exp(20)` is 5e8.
const MAX_EXPONENT: f64 = 20.0;
/// Smallest logarithm of a weight of [`Surrogate::Vespo`]: `ln 1e-8`, as in TRL.
const LN_LEAST_WEIGHT: f64 = -18.420_680_743_952_367;

/// Per-token policy term `l` as a function of the ratio `c`, the advantage `A` and the log-probability `lp`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Surrogate {
    /// `-min(min(c, delta) A, clamp(c, 1 - low, 1 + high) A)`. PPO (arXiv 1707.06347); `high > low` is clip-higher
    /// (DAPO, arXiv 2503.14476); `delta` bounds the ratio if the advantage is negative (INTELLECT-2).
    Clip {
        /// Lower clip distance, in `[0, 1]`.
        low: f64,
        /// Upper clip distance, at least 0.
        high: f64,
        /// Upper bound of the unclipped ratio, above `1 + high`.
        delta: Option<f64>,
    },
    /// `-c A`: the unclipped ratio.
    Ratio,
    /// `-stopgrad(min(c, cap)) A lp`: every token keeps a gradient (MiniMax-M1, arXiv 2506.13585).
    Cispo {
        /// Upper bound of the ratio itself, not a distance from 1.
        cap: f64,
    },
    /// `-sigmoid(tau (c - 1)) (4 / tau) A` with `tau = pos` if `A > 0`, else `neg` (SAPO).
    Sapo {
        /// Temperature for positive advantages.
        pos: f64,
        /// Temperature for other advantages.
        neg: f64,
    },
    /// `-A lp`: the policy gradient without a ratio (REINFORCE). Its token sum is `-A log pi(completion)`.
    LogProb,
    /// `-exp(mean_t e_t) A`, where `e_t` is `d_t` clamped to `[-low, high]` on the side that `A` pulls to: `min(d, clamp d)` if `A >
    /// 0`, else `max(d, clamp d)`. One term per completion, whatever the ratio level (GMPO, arXiv 2507.20673; verl `geo_mean`).
    GeometricMean {
        /// Lower bound of a token's log-ratio, at least 0.
        low: f64,
        /// Upper bound of a token's log-ratio, at least 0.
        high: f64,
    },
    /// `-stopgrad(phi) A lp` with `phi = exp(lambda + k ln w - lambda w)`, and `ln w = sum_t d_t + sum_t ln v_t` between `ln 1e-8`
    /// and 20. It has a constant of its own for `A >= 0` and for `A < 0`. The weight of [`Correction`] is part of `w` (VESPO; TRL
    /// 1.16 `get_gamma_weights`).
    Vespo {
        /// `k` and `lambda` for advantages of at least 0.
        pos: [f64; 2],
        /// `k` and `lambda` for negative advantages.
        neg: [f64; 2],
    },
    /// `-stopgrad(min(c, cap)) A lp`, and 0 for a token whose probability `p = exp(lp)` has moved further from `q = exp(old)` than the
    /// bound, on the side that `A` pulls to (DPPO, arXiv 2602.04879, equations 13 and 14; verl `dppo_tv` and `dppo_kl`).
    Dppo {
        /// Measure of the distance.
        divergence: PolicyShift,
        /// Bound for other advantages, at least 0.
        low: f64,
        /// Bound for positive advantages, at least 0.
        high: f64,
        /// Upper bound of the ratio itself.
        cap: f64,
    },
    /// Custom function, evaluated for tokens with a nonzero advantage. It cannot be serialized.
    #[serde(skip)]
    Custom(CustomTerm),
}

/// Distance between the probabilities `p` and `q` of one token, with every other token of the vocabulary as one ([`Surrogate::Dppo`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyShift {
    /// `|p - q|`.
    TotalVariation,
    /// `q ln(q / p) + (1 - q) ln((1 - q + 1e-8) / (1 - p + 1e-8))`.
    Kl,
}

impl PolicyShift {
    /// Returns true if a token has moved too far on the side that the advantage pulls to.
    fn is_beyond(self, [low, high]: [f64; 2], token: &Token) -> bool {
        const NEAR_0: f64 = 1e-8;
        // Rounding may leave a log-probability above 0.
        let (p, q) = (token.logp.min(0.0).exp(), token.old.min(0.0).exp());
        let (moved, bound) = if token.advantage > 0.0 { (p - q, high) } else { (q - p, low) };
        match self {
            Self::TotalVariation => moved > bound,
            Self::Kl => {
                let others = (1.0 - q) * ((1.0 - q + NEAR_0) / (1.0 - p + NEAR_0)).ln();
                moved > 0.0 && q * (token.old - token.logp) + others > bound
            }
        }
    }
}

/// Treatment of the tokens by which the policy loses entropy fastest: those with a large covariance `(A - mean A) (lp - mean lp)`,
/// where `A` is the advantage of a token's completion and both means are over the tokens of the step ("The Entropy Mechanism of
/// Reinforcement Learning", arXiv 2505.22617; verl `clip_cov` and `kl_cov`). [`chosen_tokens`] chooses `n = max(1, floor(share *
/// tokens))` of them, and [`Batch::chosen`] marks them.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Covariance {
    /// No token is treated differently.
    #[default]
    Off,
    /// Clip-Cov: `n` random tokens of those whose covariance is between the bounds have no policy term.
    Clip {
        /// Share of the tokens, in (0, 1].
        share: f64,
        /// Lower bound of the covariance, exclusive.
        low: f64,
        /// Upper bound of the covariance, exclusive, above `low`.
        high: f64,
    },
    /// KL-Cov: the policy term of the `n` tokens with the largest covariance has `coef |lp - old|` added.
    Kl {
        /// Share of the tokens, in (0, 1].
        share: f64,
        /// Weight of the penalty, at least 0.
        coef: f64,
    },
}

/// Unit over which the probability ratio is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// One ratio per token.
    #[default]
    Token,
    /// One ratio per completion, the geometric mean of its token ratios (GSPO, arXiv 2507.18071).
    Sequence,
    /// One ratio per completion, the product of its token ratios (RLOO, arXiv 2402.14740).
    Product,
}

/// Weight of a token in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Mean over completions of the mean over their tokens (`grpo`).
    #[default]
    SequenceMean,
    /// Mean over the tokens of a micro-batch, then mean over micro-batches (`bnpo`).
    TokenMeanLocal,
    /// Sum over tokens divided by completions times `max_completion_length` (`dr_grpo`, arXiv 2503.20783).
    ConstantLength,
    /// Mean over all tokens of the optimizer step (`dapo`, `cispo`).
    TokenMeanGlobal,
    /// Sum over tokens, mean over completions.
    TokenSum,
}

/// Correction for tokens whose probability during sampling differs from that during training, because decoding uses other kernels
/// and possibly other weights (quantised ones). `smp` is the log-probability that the sampler computed, `d = old - smp`, and `w`
/// is the weight of [`CorrectionKind`]:
///
/// ```text
/// truncate: v = min(w, max), not below min        mask: v = w between min and max, else 0
/// ```
///
/// The gradient treats the weight as a constant. Source: TRL 1.16 `vllm_importance_sampling_mode`. Truncation follows Espeholt et
/// al. (arXiv 1802.01561), masking follows IcePop (Ling team 2025).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Correction {
    /// Kind of the weight.
    pub kind: CorrectionKind,
    /// Upper bound of the weight, above 0.
    pub max: f64,
    /// Lower bound of the weight, below `max`; `None` for no lower bound.
    pub min: Option<f64>,
}

/// Unit of a [`Correction`]'s weight, and treatment of weights beyond the bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionKind {
    /// No correction.
    #[default]
    Off,
    /// `exp(d_t)` for each token, clamped to the bounds (TIS).
    TokenTruncate,
    /// `exp(d_t)` for each token; tokens beyond the bounds get weight 0 (MIS).
    TokenMask,
    /// `exp(sum_t d_t)` for a completion, clamped to the bounds.
    SequenceTruncate,
    /// `exp(sum_t d_t)` for a completion; completions beyond the bounds get weight 0.
    SequenceMask,
}

impl Correction {
    /// No correction.
    pub const OFF: Self = Self { kind: CorrectionKind::Off, max: 3.0, min: None };

    /// Returns true if the correction needs log-probabilities of the sampler.
    pub fn is_on(&self) -> bool {
        self.kind != CorrectionKind::Off
    }

    /// Returns the weight of each token of a completion. `d` is the difference `old - smp` of each token.
    fn weights(&self, d: impl Iterator<Item = f64>) -> Vec<f64> {
        use CorrectionKind::{Off, SequenceMask, SequenceTruncate, TokenMask, TokenTruncate};
        let bounded = |d: f64| {
            let weight = d.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp();
            let min = self.min.unwrap_or(0.0);
            match self.kind {
                Off => 1.0,
                TokenTruncate | SequenceTruncate => weight.max(min).min(self.max),
                TokenMask | SequenceMask if (min..=self.max).contains(&weight) => weight,
                TokenMask | SequenceMask => 0.0,
            }
        };
        match self.kind {
            SequenceTruncate | SequenceMask => {
                let each: Vec<f64> = d.collect();
                vec![bounded(each.iter().sum()); each.len()]
            }
            Off | TokenTruncate | TokenMask => d.map(bounded).collect(),
        }
    }
}

/// Per-token penalty for deviating from the reference policy, multiplied by `beta`. With `x = ref - lp`:
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kl {
    /// No penalty; no reference is needed.
    Off,
    /// `exp(x) - x - 1`, never negative (k3; Schulman 2020, "Approximating KL divergence").
    #[default]
    K3,
    /// `(exp(x) - x - 1) c`, where the gradient also flows through `c`. Off-policy, this gradient equals the gradient of the KL
    /// divergence (DeepSeek-V3.2; TRL `use_bias_correction_kl`).
    K3Corrected,
    /// `-x`, which can be negative. Its token sum is `log pi(completion) - log ref(completion)` (k1 per sequence).
    K1,
}

/// Loss as a set of independent choices. The module documentation gives the formula.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossPlan {
    pub surrogate: Surrogate,
    pub ratio: RatioLevel,
    pub aggregation: Aggregation,
    /// KL estimator; no effect if `beta` is 0.
    pub kl: Kl,
    /// Weight of the KL term. 0 requires no reference policy.
    pub beta: f64,
    /// Weight of the entropy bonus (mean entropy per token, in nats). 0 requires no entropies.
    pub entropy_coef: f64,
    /// Fraction of a step's tokens, in (0, 1], that count in the policy term and the entropy bonus: the tokens with the highest
    /// entropy. [`top_entropy_tokens`] finds them, and [`Batch::kept`] marks them.
    pub top_entropy: f64,
    /// Correction of the difference between sampler and policy.
    pub correction: Correction,
    /// Treatment of tokens with a large covariance of advantage and log-probability.
    pub covariance: Covariance,
    /// Largest mean of `smp - lp` over the tokens of a completion, in nats, up to which a completion with a negative advantage counts
    /// in the policy term; `None` to count all. `smp` is the log-probability of the sampler if the batch has it, else `old` (off-policy
    /// sequence mask, DeepSeek-V3.2; TRL `off_policy_mask_threshold`).
    pub off_policy_threshold: Option<f64>,
    /// Weight of a teacher. With [`Divergence::Sampled`], `ref_t - old_t` is added to the advantage of each token with this weight,
    /// where `ref` are the teacher's log-probabilities. Its mean under the policy is minus the KL divergence from the policy to the
    /// teacher (on-policy distillation; MiniLLM, arXiv 2306.08543, GKD, arXiv 2306.13649). 0 without a teacher.
    pub distillation: f64,
    /// Divergence from the teacher. One over its most probable tokens is a term of its own, with the weight `distillation`.
    pub divergence: Divergence,
    /// True to exclude completions that reached the length limit from the policy term, the KL and the entropy. As in TRL, they
    /// still count in the number of completions, by which [`Aggregation::SequenceMean`] and other means over completions divide.
    pub mask_truncated_completions: bool,
}

impl LossPlan {
    /// Returns true if the loss needs the log-probabilities of a reference policy or of a teacher.
    pub fn needs_reference(&self) -> bool {
        self.distillation != 0.0 || self.beta != 0.0 && self.kl != Kl::Off
    }

    /// Returns the number of the teacher's most probable tokens that the loss reads at each position.
    pub fn teacher_tokens(&self) -> usize {
        if self.distillation == 0.0 { 0 } else { self.divergence.top_k() }
    }

    /// Returns true if the loss includes per-token entropies. Otherwise their gradient is zero.
    pub fn needs_entropy(&self) -> bool {
        self.entropy_coef != 0.0
    }

    /// Checks the range of every number.
    ///
    /// # Errors
    /// Returns [`Error::Setting`] with the first setting outside its range.
    pub fn validate(&self) -> Result<(), Error> {
        self.surrogate.validate()?;
        let gated = matches!(self.surrogate, Surrogate::GeometricMean { .. }) && self.top_entropy < 1.0;
        require(!gated, "top_entropy", self.top_entropy, "1, as GMPO's term belongs to the completion")?;
        let whole = matches!(self.surrogate, Surrogate::GeometricMean { .. } | Surrogate::Vespo { .. });
        let weight = self.distillation;
        require(not_negative(weight), "distillation", weight, "a finite number >= 0")?;
        require(
            weight == 0.0 || !whole || self.divergence != Divergence::Sampled,
            "distillation",
            weight,
            "0, as this loss has one advantage per completion",
        )?;
        if let Some(share) = self.covariance.validate()? {
            let by_token = weight == 0.0 && !whole;
            require(
                by_token,
                "covariance",
                share,
                "no covariance beside a teacher or a term per completion",
            )?;
        }
        if self.divergence != Divergence::Sampled {
            let (top_k, beta) = (self.divergence.top_k(), self.divergence.beta());
            require(top_k > 0, "divergence.top_k", top_k as f64, "at least 1 token")?;
            require((0.0..=1.0).contains(&beta), "divergence.beta", beta, "a number in [0, 1]")?;
        }
        if let Some(threshold) = self.off_policy_threshold {
            let valid = not_negative(threshold);
            require(valid, "off_policy_threshold", threshold, "a finite number of nats >= 0")?;
        }
        require(not_negative(self.beta), "beta", self.beta, "a finite number >= 0")?;
        require(self.entropy_coef.is_finite(), "entropy_coef", self.entropy_coef, "a finite number")?;
        let share = self.top_entropy > 0.0 && self.top_entropy <= 1.0;
        require(share, "top_entropy", self.top_entropy, "a number in (0, 1]")?;
        let Correction { max, min, .. } = self.correction;
        require(positive(max), "correction.max", max, "a finite ratio > 0")?;
        if let Some(min) = min {
            let below = min.is_finite() && (0.0..max).contains(&min);
            require(below, "correction.min", min, "a ratio of at least 0 and below correction.max")?;
        }
        Ok(())
    }
}

impl Surrogate {
    fn validate(&self) -> Result<(), Error> {
        let bounds = |low, high, expected| {
            require(not_negative(low), "surrogate.low", low, expected)?;
            require(not_negative(high), "surrogate.high", high, expected)
        };
        match *self {
            Self::Clip { low, high, delta } => {
                require((0.0..=1.0).contains(&low), "surrogate.low", low, "a number in [0, 1]")?;
                require(not_negative(high), "surrogate.high", high, "a finite number >= 0")?;
                let Some(delta) = delta else { return Ok(()) };
                let above = delta.is_finite() && delta > 1.0 + high;
                require(above, "surrogate.delta", delta, "a finite number above 1 plus the upper clip")
            }
            Self::Cispo { cap } => require(positive(cap), "surrogate.cap", cap, "a finite ratio > 0"),
            Self::Sapo { pos, neg } => {
                require(positive(pos), "surrogate.pos", pos, "a finite number > 0")?;
                require(positive(neg), "surrogate.neg", neg, "a finite number > 0")
            }
            Self::GeometricMean { low, high } => bounds(low, high, "a finite log-ratio >= 0"),
            Self::Vespo { pos, neg } => {
                let names =
                    ["surrogate.k_pos", "surrogate.lambda_pos", "surrogate.k_neg", "surrogate.lambda_neg"];
                names.into_iter().zip([pos, neg].concat()).try_for_each(|(setting, value)| {
                    require(not_negative(value), setting, value, "a finite number >= 0")
                })
            }
            Self::Dppo { low, high, cap, .. } => {
                bounds(low, high, "a finite divergence >= 0")?;
                require(positive(cap), "surrogate.cap", cap, "a finite ratio > 0")
            }
            Self::Ratio | Self::LogProb | Self::Custom(_) => Ok(()),
        }
    }
}

impl Covariance {
    /// Checks the range of every number. Returns the share of the tokens.
    fn validate(&self) -> Result<Option<f64>, Error> {
        let share = match *self {
            Self::Off => return Ok(None),
            Self::Clip { share, low, high } => {
                require(low.is_finite(), "covariance.low", low, "a finite number")?;
                let above = high.is_finite() && high > low;
                require(above, "covariance.high", high, "a finite number above the lower bound")?;
                share
            }
            Self::Kl { share, coef } => {
                require(not_negative(coef), "covariance.coef", coef, "a finite number >= 0")?;
                share
            }
        };
        require(share > 0.0 && share <= 1.0, "covariance.share", share, "a number in (0, 1]")?;
        Ok(Some(share))
    }
}

/// Returns an error about a setting unless its value is in order.
fn require(ok: bool, setting: &'static str, value: f64, expected: &'static str) -> Result<(), Error> {
    if ok { Ok(()) } else { Err(Error::Setting { setting, value, expected }) }
}

fn positive(x: f64) -> bool {
    x.is_finite() && x > 0.0
}

fn not_negative(x: f64) -> bool {
    x.is_finite() && x >= 0.0
}

/// Completions with their tokens: a complete optimizer step or any part of it.
///
/// Per-token slices contain the tokens of completion 0, then those of completion 1, and so on, without padding.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Tokens per completion. An empty completion adds nothing to the loss but counts as a completion.
    pub lengths: &'a [usize],
    /// Log-probability of each token under the current policy, in nats, ≤ 0.
    pub logp: &'a [f64],
    /// Log-probability of each token under the sampling policy. `None` if the sampling policy is the current one (on-policy,
    /// ratio exactly 1).
    pub old: Option<&'a [f64]>,
    /// Log-probability of each token as the sampler computed it, for [`Correction`].
    pub sampler: Option<&'a [f64]>,
    /// Log-probability of each token under the reference policy.
    pub reference: Option<&'a [f64]>,
    /// Teacher's most probable tokens at each token, for a [`Divergence`] over them.
    pub teacher: Option<TeacherTokens<'a>>,
    /// Entropy of the current policy at each token, in nats.
    pub entropy: Option<&'a [f64]>,
    /// Mask of the tokens that count in the policy term and the entropy bonus; `None` keeps all. See [`top_entropy_tokens`].
    pub kept: Option<&'a [bool]>,
    /// Mask of the tokens that [`Covariance`] chooses; required if it is on. See [`chosen_tokens`].
    pub chosen: Option<&'a [bool]>,
    /// Advantage of each completion.
    pub advantages: &'a [f64],
    /// One flag per completion; true if it reached the length limit.
    pub truncated: &'a [bool],
}

/// Log-probabilities of a teacher's most probable tokens: `[tokens, k]`, where `k` may be below [`Divergence::top_k`] if the
/// vocabulary is smaller.
#[derive(Debug, Clone, Copy)]
pub struct TeacherTokens<'a> {
    /// Number of tokens at each position, `k`.
    pub k: usize,
    /// Log-probability of each of them under the current policy, in nats.
    pub logp: &'a [f64],
    /// Log-probability of each of them under the teacher.
    pub teacher: &'a [f64],
}

/// Finds the fraction `top` of a step's tokens with the highest entropy (arXiv 2506.01939, TRL `top_entropy_quantile`). Only
/// these tokens count in the policy term and the entropy bonus; the KL term keeps all tokens. Returns one flag per token, true if
/// it is kept, or `None` if `top` is 1.
///
/// The gate keeps the tokens that reach the linear `1 - top` quantile, as TRL does. Tokens with equal entropies are all kept or all
/// dropped: the first tokens of a prompt's completions have the same entropy to the bit, and a gate between them would treat
/// completions of one group differently. If no two entropies are equal, `n - ceil((1 - top) (n - 1))` of `n` tokens remain.
///
/// # Errors
/// Returns an error if `top` is outside (0, 1].
pub fn top_entropy_tokens(entropies: &[f64], top: f64) -> Result<Option<Vec<bool>>, Error> {
    require(top > 0.0 && top <= 1.0, "top_entropy", top, "a number in (0, 1]")?;
    if top == 1.0 {
        return Ok(None);
    }
    let mut rising = entropies.to_vec();
    rising.sort_by(f64::total_cmp);
    // In f64, (1 - 0.7) * 10 is slightly above 3, so a small number is subtracted before rounding up.
    let position = (1.0 - top) * entropies.len().saturating_sub(1) as f64 - 1e-9;
    // The quantile is at most the entropy at the next rank, and above the one before it unless the two are equal.
    let lowest = rising.get(position.ceil().max(0.0) as usize);
    Ok(Some(entropies.iter().map(|entropy| lowest.is_some_and(|lowest| entropy >= lowest)).collect()))
}

/// Chooses the tokens of a step that [`Covariance`] treats differently. Returns one flag per token, true if it is chosen, or `None` if
/// the covariance is off.
///
/// `advantages` (that of each token's completion) and `logp` have one entry per token that counts. `draw` returns the random number of
/// a token: of the candidates of [`Covariance::Clip`], those with the smallest numbers are chosen. It is called for candidates only. Of
/// equal numbers or equal covariances, the first tokens are chosen.
///
/// # Errors
/// Returns an error if the slices differ in length.
pub fn chosen_tokens(
    covariance: Covariance,
    advantages: &[f64],
    logp: &[f64],
    mut draw: impl FnMut(usize) -> f64,
) -> Result<Option<Vec<bool>>, Error> {
    expect_length("advantages", advantages.len(), logp.len(), "one per token")?;
    let count = logp.len();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / count.max(1) as f64;
    let (mean_advantage, mean_logp) = (mean(advantages), mean(logp));
    let covariances =
        advantages.iter().zip(logp).map(|(a, lp)| (a - mean_advantage) * (lp - mean_logp)).enumerate();
    let (share, mut ranked): (f64, Vec<(usize, f64)>) = match covariance {
        Covariance::Off => return Ok(None),
        Covariance::Clip { share, low, high } => {
            let between = covariances.filter(|(_, own)| *own > low && *own < high);
            (share, between.map(|(t, _)| (t, draw(t))).collect())
        }
        Covariance::Kl { share, .. } => (share, covariances.map(|(t, own)| (t, -own)).collect()),
    };
    ranked.sort_by(|a, b| a.1.total_cmp(&b.1));
    let most = ((share * count as f64) as usize).max(1);
    let mut chosen = vec![false; count];
    ranked.iter().take(most).for_each(|(t, _)| chosen[*t] = true);
    Ok(Some(chosen))
}

/// Denominators of one optimizer step, the same for all of its parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalizer {
    /// Number of completions, including masked and empty ones.
    pub completions: usize,
    /// Number of tokens that count. Tokens of truncated completions do not count if the plan masks them.
    pub tokens: usize,
    /// Length limit in tokens; used by [`Aggregation::ConstantLength`].
    pub max_completion_length: usize,
    /// Number of tokens that count in this part's micro-batch; used by [`Aggregation::TokenMeanLocal`].
    pub micro_batch_tokens: usize,
    /// Number of micro-batches per optimizer step (gradient accumulation times ranks); used by [`Aggregation::TokenMeanLocal`].
    pub micro_batches: usize,
    /// Number of tokens that count and are kept by the entropy gate; `None` without a gate.
    pub kept_tokens: Option<usize>,
}

impl Normalizer {
    /// Creates the normalizer of an optimizer step with one micro-batch, from the completions of the complete step on all ranks.
    ///
    /// # Errors
    /// Returns an error if `lengths` and `truncated` differ in length, or if `max_completion_length` is 0.
    pub fn for_step(
        plan: &LossPlan,
        lengths: &[usize],
        truncated: &[bool],
        max_completion_length: usize,
    ) -> Result<Self, Error> {
        require(max_completion_length > 0, "max_completion_length", 0.0, "at least 1")?;
        let tokens = counted_tokens(plan, lengths, truncated)?;
        Ok(Self {
            completions: lengths.len(),
            tokens,
            max_completion_length,
            micro_batch_tokens: tokens,
            micro_batches: 1,
            kept_tokens: None,
        })
    }

    /// Returns the normalizer of the same step for one of its `micro_batches`. `lengths` and `truncated` describe the completions
    /// of the micro-batch. Only [`Aggregation::TokenMeanLocal`] distinguishes micro-batches.
    ///
    /// # Errors
    /// Returns an error if `lengths` and `truncated` differ in length, or if `micro_batches` is 0.
    pub fn for_micro_batch(
        &self,
        plan: &LossPlan,
        lengths: &[usize],
        truncated: &[bool],
        micro_batches: usize,
    ) -> Result<Self, Error> {
        require(micro_batches > 0, "micro_batches", 0.0, "at least 1")?;
        Ok(Self { micro_batch_tokens: counted_tokens(plan, lengths, truncated)?, micro_batches, ..*self })
    }

    /// Returns the normalizer of the same step with an entropy gate, which keeps `kept_tokens` of the tokens that count.
    #[must_use]
    pub fn with_kept_tokens(self, kept_tokens: Option<usize>) -> Self {
        Self { kept_tokens, ..self }
    }

    fn token_weight(&self, aggregation: Aggregation, length: usize) -> f64 {
        let at_least_1 = |n: usize| n.max(1) as f64;
        let completions = at_least_1(self.completions);
        match aggregation {
            Aggregation::SequenceMean => 1.0 / (completions * at_least_1(length)),
            Aggregation::TokenMeanLocal => {
                1.0 / (at_least_1(self.micro_batch_tokens) * at_least_1(self.micro_batches))
            }
            Aggregation::ConstantLength => 1.0 / (completions * at_least_1(self.max_completion_length)),
            Aggregation::TokenMeanGlobal => 1.0 / at_least_1(self.tokens),
            Aggregation::TokenSum => 1.0 / completions,
        }
    }
}

fn counted_tokens(plan: &LossPlan, lengths: &[usize], truncated: &[bool]) -> Result<usize, Error> {
    expect_length("truncated", truncated.len(), lengths.len(), "one per completion")?;
    let counts = |cut: bool| !(cut && plan.mask_truncated_completions);
    let counted = lengths.iter().zip(truncated).filter(|(_, cut)| counts(**cut));
    Ok(counted.fold(0, |sum: usize, (length, _)| sum.saturating_add(*length)))
}

/// Returns the number of tokens that count and are kept. `kept` has one entry per token of the completions.
fn kept_tokens(plan: &LossPlan, lengths: &[usize], truncated: &[bool], kept: &[bool]) -> usize {
    let mut start = 0;
    let mut of_completion = |(&length, &cut): (&usize, &bool)| {
        let own = &kept[start..start + length];
        start += length;
        if cut && plan.mask_truncated_completions { 0 } else { own.iter().filter(|kept| **kept).count() }
    };
    lengths.iter().zip(truncated).map(&mut of_completion).sum()
}

/// Share of a batch in the loss, and its gradient.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LossOutput {
    /// `policy + kl_term + teacher_term + entropy_term`.
    pub loss: f64,
    /// Aggregated policy term.
    pub policy: f64,
    /// `beta` times the aggregated KL.
    pub kl_term: f64,
    /// `distillation` times the aggregated divergence from the teacher; 0 with [`Divergence::Sampled`].
    pub teacher_term: f64,
    /// `-entropy_coef` times the mean entropy.
    pub entropy_term: f64,
    /// Derivative of `loss` with respect to each entry of [`Batch::logp`]; `old` and `reference` are constants.
    pub dlogp: Vec<f64>,
    /// Derivative of `loss` with respect to each entry of [`TeacherTokens::logp`]; empty if the batch has none.
    pub dteacher: Vec<f64>,
    /// Derivative of `loss` with respect to each entry of [`Batch::entropy`]; empty if the batch has none.
    pub dentropy: Vec<f64>,
    /// Sums from which the step's metrics are computed. The caller merges the sums of all parts.
    pub sums: MetricSums,
}

/// Computes a batch's share of the loss of an optimizer step, with its gradient.
///
/// The shares of all parts of a step add up to the loss of the step, and so do their gradients. Completions with advantage 0 get
/// a policy gradient of exactly 0 but keep their KL gradient and the penalty of [`Covariance::Kl`].
///
/// # Errors
/// Returns an error if the plan is out of range, a slice has the wrong length, or the reference or the entropies are missing.
/// Also returns an error if an input is not finite (the message names completion and token) or the loss overflows.
pub fn evaluate(batch: &Batch<'_>, plan: &LossPlan, normalizer: &Normalizer) -> Result<LossOutput, Error> {
    plan.validate()?;
    let reference = check_batch(batch, plan, normalizer)?;
    let mut out = LossOutput {
        dlogp: vec![0.0; batch.logp.len()],
        dteacher: vec![0.0; batch.teacher.map_or(0, |own| own.logp.len())],
        dentropy: vec![0.0; batch.entropy.map_or(0, <[f64]>::len)],
        ..LossOutput::default()
    };
    let entropy_tokens = normalizer.kept_tokens.unwrap_or(normalizer.tokens).max(1) as f64;
    let entropy_weight = plan.entropy_coef / entropy_tokens;
    let mut kl_sum = 0.0;

    let mut start = 0;
    for (index, &length) in batch.lengths.iter().enumerate() {
        let span = start..start + length;
        start += length;
        let advantage = batch.advantages[index];
        let masked = plan.mask_truncated_completions && batch.truncated[index];
        if masked || length == 0 {
            out.sums.add_completion(0.0, advantage);
            if plan.ratio != RatioLevel::Token {
                let mut clipped = Clipped::default();
                clipped.count(plan.surrogate, &Token { ratio: 1.0, advantage, logp: 0.0, old: 0.0 });
                out.sums.add_clipped(&clipped, plan.ratio, 1);
            }
            continue;
        }
        let logp = &batch.logp[span.clone()];
        let weight = normalizer.token_weight(plan.aggregation, length);
        let old = batch.old.map(|old| &old[span.clone()]);
        let ratios = Ratios::of(plan.ratio, logp, old);
        let completion = Completion { batch, plan, span, logp, old, advantage, weight, ratios };

        let mut clipped = Clipped::default();
        let mut derivatives =
            Derivatives { of_logp: &mut out.dlogp[completion.span.clone()], of_sequence: 0.0 };
        let policy = completion.policy(reference, &mut out.sums, &mut clipped, &mut derivatives);
        let kl = reference.map_or(0.0, |reference| completion.kl(reference, &mut derivatives));
        let share = match plan.ratio {
            RatioLevel::Token => 0.0,
            RatioLevel::Sequence => derivatives.of_sequence / length as f64,
            RatioLevel::Product => derivatives.of_sequence,
        };
        if share != 0.0 {
            derivatives.of_logp.iter_mut().for_each(|d| *d += share);
        }
        completion.entropy(entropy_weight, &mut out);
        let divergence = batch.teacher.map_or(0.0, |teacher| completion.diverge(teacher, &mut out.dteacher));

        finite("policy term", index, policy * weight)?;
        finite("KL term", index, kl * weight * plan.beta)?;
        finite("divergence from the teacher", index, divergence * weight * plan.distillation)?;
        out.policy += weight * policy;
        kl_sum += weight * kl;
        out.teacher_term += weight * plan.distillation * divergence;
        out.sums.add_completion(logp.iter().sum(), advantage);
        if reference.is_some() {
            out.sums.add_kl(kl, length);
        }
        if batch.teacher.is_some() {
            out.sums.add_divergence(divergence, length);
        }
        out.sums.add_clipped(&clipped, plan.ratio, length);
    }

    out.kl_term = plan.beta * kl_sum;
    out.loss = out.policy + out.kl_term + out.entropy_term + out.teacher_term;
    if let Some(completion) = first_non_finite(&out.dlogp, batch.lengths) {
        return Err(Error::Overflow { what: "gradient", completion, value: f64::NAN });
    }
    let k = batch.teacher.map_or(1, |own| own.k.max(1));
    if let Some(at) = out.dteacher.iter().position(|d| !d.is_finite()) {
        let completion = locate(at / k, batch.lengths).0;
        return Err(Error::Overflow { what: "gradient", completion, value: f64::NAN });
    }
    out.sums.add_loss(out.loss, out.policy, reference.is_some().then_some(kl_sum));
    Ok(out)
}

/// One completion of a batch.
struct Completion<'a> {
    batch: &'a Batch<'a>,
    plan: &'a LossPlan,
    /// Tokens of the completion in the batch.
    span: Range<usize>,
    logp: &'a [f64],
    /// Log-probabilities under the sampling policy; `None` if that is the current one.
    old: Option<&'a [f64]>,
    advantage: f64,
    /// Weight of each token.
    weight: f64,
    ratios: Ratios<'a>,
}

/// Derivatives of the loss for one completion.
struct Derivatives<'a> {
    of_logp: &'a mut [f64],
    /// Derivative with respect to the completion's single ratio, which is distributed over its tokens at the end.
    of_sequence: f64,
}

impl Derivatives<'_> {
    /// Adds a derivative with respect to the exponent of the ratio of token `t`.
    fn add_exponent(&mut self, level: RatioLevel, t: usize, derivative: f64) {
        match level {
            RatioLevel::Token => self.of_logp[t] += derivative,
            RatioLevel::Sequence | RatioLevel::Product => self.of_sequence += derivative,
        }
    }
}

impl Completion<'_> {
    fn kept(&self, t: usize) -> bool {
        self.batch.kept.is_none_or(|kept| kept[self.span.start + t])
    }

    /// Returns the covariance's treatment of token `t`, if it is chosen.
    fn covariance(&self, t: usize) -> Covariance {
        match self.batch.chosen {
            Some(chosen) if chosen[self.span.start + t] => self.plan.covariance,
            _ => Covariance::Off,
        }
    }

    /// Returns the weight of each token that corrects for a sampler whose log-probabilities differ from the policy's.
    fn corrections(&self, sums: &mut MetricSums) -> Option<Vec<f64>> {
        let correction = &self.plan.correction;
        let sampler = self.batch.sampler.filter(|_| correction.is_on())?;
        let old = self.old.unwrap_or(self.logp);
        let weights =
            correction.weights(old.iter().zip(&sampler[self.span.clone()]).map(|(old, smp)| old - smp));
        sums.add_corrected(correction.kind, &weights);
        Some(weights)
    }

    /// Returns the sum of the policy term over the tokens, without their weight, and adds what it leaves out to `sums`.
    fn policy(
        &self,
        reference: Option<&[f64]>,
        sums: &mut MetricSums,
        clipped: &mut Clipped,
        derivatives: &mut Derivatives<'_>,
    ) -> f64 {
        let plan = self.plan;
        let corrections = self.corrections(sums);
        let corrections = corrections.as_deref();
        let is_left_behind = self.is_left_behind();
        if plan.off_policy_threshold.is_some() {
            sums.add_left_behind(is_left_behind);
        }
        if plan.covariance != Covariance::Off {
            let chosen = (0..self.logp.len()).filter(|t| self.covariance(*t) != Covariance::Off).count();
            sums.add_chosen(chosen, self.logp.len());
        }
        match plan.surrogate {
            _ if is_left_behind => 0.0,
            Surrogate::GeometricMean { low, high } => {
                self.geometric_mean([low, high], corrections, clipped, derivatives.of_logp)
            }
            Surrogate::Vespo { pos, neg } => self.vespo([pos, neg], corrections, derivatives.of_logp),
            _ => {
                let is_sampled = plan.distillation != 0.0 && plan.divergence == Divergence::Sampled;
                let teacher = reference.filter(|_| is_sampled).map(|all| &all[self.span.clone()]);
                self.by_token((corrections, teacher), clipped, derivatives)
            }
        }
    }

    /// Returns the sum over the tokens of a policy term that each token has, without their weight.
    fn by_token(
        &self,
        (corrections, teacher): (Option<&[f64]>, Option<&[f64]>),
        clipped: &mut Clipped,
        derivatives: &mut Derivatives<'_>,
    ) -> f64 {
        let mut policy = 0.0;
        let old = self.old.unwrap_or(self.logp);
        for t in 0..self.logp.len() {
            let ratio = self.ratios.at(t);
            let taught = teacher.map_or(0.0, |teacher| self.plan.distillation * (teacher[t] - old[t]));
            let advantage = self.advantage + taught;
            let token = Token { ratio: ratio.value, advantage, logp: self.logp[t], old: old[t] };
            clipped.count(self.plan.surrogate, &token);
            let covariance = self.covariance(t);
            if !self.kept(t) || matches!(covariance, Covariance::Clip { .. }) {
                continue;
            }
            let v = corrections.map_or(1.0, |weights| weights[t]);
            let weight = self.weight * v;
            if let Covariance::Kl { coef, .. } = covariance {
                let d = self.logp[t] - old[t];
                policy += v * coef * d.abs();
                // The derivative is 0 at 0, as in PyTorch.
                derivatives.of_logp[t] += if d == 0.0 { 0.0 } else { weight * coef * d.signum() };
            }
            if advantage == 0.0 {
                continue;
            }
            let term = policy_term(self.plan.surrogate, &token);
            policy += v * term.value;
            derivatives.of_logp[t] += weight * term.d_logp;
            derivatives.add_exponent(self.plan.ratio, t, weight * term.d_ratio * ratio.d_exponent);
        }
        policy
    }

    /// Returns true if the policy term leaves this completion out: its advantage is negative, and the policy has moved away from it
    /// ([`LossPlan::off_policy_threshold`]).
    fn is_left_behind(&self) -> bool {
        let Some(threshold) = self.plan.off_policy_threshold.filter(|_| self.advantage < 0.0) else {
            return false;
        };
        let sampler = self.batch.sampler.map(|all| &all[self.span.clone()]).or(self.old);
        let Some(sampler) = sampler else { return false };
        let gap: f64 = sampler.iter().zip(self.logp).map(|(smp, lp)| smp - lp).sum();
        gap / self.logp.len() as f64 > threshold
    }

    /// Returns the log-ratio of token `t`.
    fn log_ratio(&self, t: usize) -> f64 {
        self.old.map_or(0.0, |old| self.logp[t] - old[t])
    }

    /// Returns the sum of GMPO's term over the tokens, without their weight ([`Surrogate::GeometricMean`]). A correction enters by its
    /// geometric mean.
    fn geometric_mean(
        &self,
        [low, high]: [f64; 2],
        corrections: Option<&[f64]>,
        clipped: &mut Clipped,
        of_logp: &mut [f64],
    ) -> f64 {
        let (a, length) = (self.advantage, self.logp.len() as f64);
        // A token beyond the bound on the side that the advantage pulls to has no gradient.
        let stops = |d: f64| if a > 0.0 { d > high } else { d < -low };
        let mut sum = 0.0;
        for t in 0..self.logp.len() {
            let d = self.log_ratio(t);
            clipped.applies = true;
            clipped.low += usize::from(a < 0.0 && d < -low);
            clipped.high += usize::from(a > 0.0 && d > high);
            sum += match stops(d) {
                true if a > 0.0 => high,
                true => -low,
                false => d,
            };
        }
        if a == 0.0 {
            return 0.0;
        }
        let ratio = Ratio::from_exponent(sum / length);
        let corrected = corrections.map_or(1.0, |weights| {
            let ln = |weight: &f64| (weight + 1e-10).ln();
            (weights.iter().map(ln).sum::<f64>() / length).exp()
        });
        for (t, d) in of_logp.iter_mut().enumerate() {
            if !stops(self.log_ratio(t)) {
                *d -= self.weight * corrected * a * ratio.d_exponent;
            }
        }
        -corrected * ratio.value * a * length
    }

    /// Returns the sum of VESPO's term over the tokens, without their weight ([`Surrogate::Vespo`]).
    fn vespo(&self, [pos, neg]: [[f64; 2]; 2], corrections: Option<&[f64]>, of_logp: &mut [f64]) -> f64 {
        let a = self.advantage;
        if a == 0.0 {
            return 0.0;
        }
        let ratios = (0..self.logp.len()).map(|t| self.log_ratio(t).clamp(-MAX_EXPONENT, MAX_EXPONENT));
        let ln_correction = |weight: &f64| weight.ln().clamp(LN_LEAST_WEIGHT, MAX_EXPONENT);
        let corrected: f64 = corrections.map_or(0.0, |weights| weights.iter().map(ln_correction).sum());
        let ln_w = (ratios.sum::<f64>() + corrected).clamp(LN_LEAST_WEIGHT, MAX_EXPONENT);
        let [k, lambda] = if a >= 0.0 { pos } else { neg };
        let lambda = lambda.max(1e-4);
        let factor = a * (lambda + k * ln_w - lambda * ln_w.exp()).exp();
        let mut policy = 0.0;
        for t in (0..self.logp.len()).filter(|t| self.kept(*t)) {
            policy -= factor * self.logp[t];
            of_logp[t] -= self.weight * factor;
        }
        policy
    }

    /// Returns the sum of the KL term over the tokens, without `beta` and their weight.
    fn kl(&self, reference: &[f64], derivatives: &mut Derivatives<'_>) -> f64 {
        let reference = &reference[self.span.clone()];
        let mut kl = 0.0;
        for t in 0..self.logp.len() {
            let ratio = self.ratios.at(t);
            let term = kl_term(self.plan.kl, reference[t] - self.logp[t], ratio.value);
            kl += term.value;
            derivatives.of_logp[t] += self.weight * self.plan.beta * term.d_logp;
            // This is the derivative of exp(exponent) even if the exponent is clamped, because part of it cancels d_logp.
            let d_exponent = self.weight * self.plan.beta * term.d_ratio * ratio.value;
            derivatives.add_exponent(self.plan.ratio, t, d_exponent);
        }
        kl
    }

    /// Returns the sum of the divergence from the teacher over the tokens, without their weight. Adds its derivatives.
    fn diverge(&self, TeacherTokens { k, logp, teacher }: TeacherTokens, dteacher: &mut [f64]) -> f64 {
        let weight = self.weight * self.plan.distillation;
        let at = |t: usize| {
            let own = t * k..(t + 1) * k;
            self.plan.divergence.at(&logp[own.clone()], &teacher[own.clone()], weight, &mut dteacher[own])
        };
        self.span.clone().map(at).sum()
    }

    fn entropy(&self, weight: f64, out: &mut LossOutput) {
        let Some(entropy) = self.batch.entropy else { return };
        let entropy = &entropy[self.span.clone()];
        out.sums.entropy_tokens += entropy.len() as u64;
        out.sums.entropy += entropy.iter().sum::<f64>();
        for t in (0..entropy.len()).filter(|t| self.kept(*t)) {
            out.entropy_term -= weight * entropy[t];
            out.dentropy[self.span.start + t] = -weight;
        }
    }
}

/// Inputs of the policy term of one token.
struct Token {
    ratio: f64,
    advantage: f64,
    logp: f64,
    /// Log-probability under the sampling policy.
    old: f64,
}

/// Policy or KL term of one token with its partial derivatives.
struct Term {
    value: f64,
    /// Derivative with respect to `lp`, with the ratio fixed.
    d_logp: f64,
    /// Derivative with respect to the ratio, with `lp` fixed.
    d_ratio: f64,
}

#[derive(Clone, Copy)]
struct Ratio {
    value: f64,
    /// Derivative of the value with respect to its exponent: the value itself, or 0 if the exponent is clamped.
    d_exponent: f64,
}

impl Ratio {
    fn from_exponent(exponent: f64) -> Self {
        let value = exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp();
        Self { value, d_exponent: if exponent.abs() <= MAX_EXPONENT { value } else { 0.0 } }
    }
}

enum Ratios<'a> {
    OnPolicy,
    Token { logp: &'a [f64], old: &'a [f64] },
    Sequence(Ratio),
}

impl<'a> Ratios<'a> {
    fn of(level: RatioLevel, logp: &'a [f64], old: Option<&'a [f64]>) -> Self {
        match (old, level) {
            (None, _) => Self::OnPolicy,
            (Some(old), RatioLevel::Token) => Self::Token { logp, old },
            (Some(old), RatioLevel::Sequence | RatioLevel::Product) => {
                let sum: f64 = logp.iter().zip(old).map(|(lp, old)| lp - old).sum();
                let over = if level == RatioLevel::Sequence { logp.len().max(1) as f64 } else { 1.0 };
                Self::Sequence(Ratio::from_exponent(sum / over))
            }
        }
    }

    fn at(&self, t: usize) -> Ratio {
        match self {
            Self::OnPolicy => Ratio { value: 1.0, d_exponent: 1.0 },
            Self::Token { logp, old } => Ratio::from_exponent(logp[t] - old[t]),
            Self::Sequence(ratio) => *ratio,
        }
    }
}

fn policy_term(surrogate: Surrogate, token: &Token) -> Term {
    let &Token { ratio: c, advantage: a, logp, .. } = token;
    match surrogate {
        Surrogate::Clip { low, high, delta } => {
            let (clip_low, clip_high) = (1.0 - low, 1.0 + high);
            let bounded = delta.map_or(c, |delta| c.min(delta));
            let free = bounded * a;
            let clipped = c.clamp(clip_low, clip_high) * a;
            let d_free = if delta.is_none_or(|delta| c <= delta) { a } else { 0.0 };
            let d_clipped = if (clip_low..=clip_high).contains(&c) { a } else { 0.0 };
            let d_ratio = match free.total_cmp(&clipped) {
                std::cmp::Ordering::Less => -d_free,
                std::cmp::Ordering::Greater => -d_clipped,
                std::cmp::Ordering::Equal => -0.5 * (d_free + d_clipped),
            };
            Term { value: -free.min(clipped), d_logp: 0.0, d_ratio }
        }
        Surrogate::Ratio => Term { value: -c * a, d_logp: 0.0, d_ratio: -a },
        Surrogate::Cispo { cap } => {
            let factor = c.min(cap) * a;
            Term { value: -factor * logp, d_logp: -factor, d_ratio: 0.0 }
        }
        Surrogate::Sapo { pos, neg } => {
            let tau = if a > 0.0 { pos } else { neg };
            let gate = 1.0 / (1.0 + (-tau * (c - 1.0)).exp());
            Term { value: -gate * (4.0 / tau) * a, d_logp: 0.0, d_ratio: -4.0 * gate * (1.0 - gate) * a }
        }
        Surrogate::Dppo { divergence, low, high, cap } => {
            let factor = if divergence.is_beyond([low, high], token) { 0.0 } else { c.min(cap) * a };
            Term { value: -factor * logp, d_logp: -factor, d_ratio: 0.0 }
        }
        Surrogate::LogProb => Term { value: -a * logp, d_logp: -a, d_ratio: 0.0 },
        // One term per completion: see `Completion::geometric_mean` and `Completion::vespo`.
        Surrogate::GeometricMean { .. } | Surrogate::Vespo { .. } => {
            Term { value: 0.0, d_logp: 0.0, d_ratio: 0.0 }
        }
        Surrogate::Custom(CustomTerm(term)) => {
            let token = PolicyToken { ratio: Dual::ratio(c), logp: Dual::logp(logp), advantage: a };
            let Dual { value, d_ratio, d_logp } = term(token);
            Term { value, d_logp, d_ratio }
        }
    }
}

/// Computes the KL term from `x = ref - lp` and the ratio `c`.
fn kl_term(kl: Kl, x: f64, c: f64) -> Term {
    let (k3, d_k3) = if x <= MAX_EXPONENT {
        (x.exp_m1() - x, -x.exp_m1())
    } else {
        (MAX_EXPONENT.exp_m1() - MAX_EXPONENT, 0.0)
    };
    match kl {
        Kl::Off => Term { value: 0.0, d_logp: 0.0, d_ratio: 0.0 },
        Kl::K3 => Term { value: k3, d_logp: d_k3, d_ratio: 0.0 },
        // If the ratio and the KL belong to the same token, both derivatives add up to -x c for any x, as without the clamp.
        Kl::K3Corrected => {
            let beyond = (x - MAX_EXPONENT).max(0.0);
            let d_logp = -x.min(MAX_EXPONENT).exp_m1() - beyond;
            Term { value: k3 * c, d_logp: d_logp * c, d_ratio: k3 }
        }
        Kl::K1 => Term { value: -x, d_logp: 1.0, d_ratio: 0.0 },
    }
}

/// Number of tokens of one completion whose ratio is outside the clip range on the side that stops the gradient. With a ratio per
/// completion, a completion without counted tokens has the ratio 1 and counts, as in TRL.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Clipped {
    pub(crate) applies: bool,
    pub(crate) low: usize,
    pub(crate) high: usize,
}

impl Clipped {
    fn count(&mut self, surrogate: Surrogate, token: &Token) {
        let &Token { ratio: c, advantage: a, .. } = token;
        let (low, high) = match surrogate {
            Surrogate::Clip { low, high, .. } => (c < 1.0 - low && a < 0.0, c > 1.0 + high && a > 0.0),
            Surrogate::Cispo { cap } => (false, c > cap && a > 0.0),
            Surrogate::Dppo { divergence, low, high, .. } => {
                let is_beyond = divergence.is_beyond([low, high], token);
                (is_beyond && a < 0.0, is_beyond && a > 0.0)
            }
            Surrogate::Ratio
            | Surrogate::Sapo { .. }
            | Surrogate::LogProb
            | Surrogate::GeometricMean { .. }
            | Surrogate::Vespo { .. }
            | Surrogate::Custom(_) => return,
        };
        self.applies = true;
        self.low += usize::from(low);
        self.high += usize::from(high);
    }
}

fn expect_length(what: &'static str, got: usize, expected: usize, per: &'static str) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected, per }) }
}

fn finite(what: &'static str, completion: usize, value: f64) -> Result<(), Error> {
    if value.is_finite() { Ok(()) } else { Err(Error::Overflow { what, completion, value }) }
}

/// Checks every slice and returns the reference log-probabilities if the plan uses them.
fn check_batch<'a>(
    batch: &Batch<'a>,
    plan: &LossPlan,
    normalizer: &Normalizer,
) -> Result<Option<&'a [f64]>, Error> {
    let completions = batch.lengths.len();
    // A saturated sum cannot equal a slice length, so saturation does not hide an overflow.
    let tokens = batch.lengths.iter().fold(0_usize, |sum, length| sum.saturating_add(*length));
    expect_length("advantages", batch.advantages.len(), completions, "one per completion")?;
    expect_length("truncated", batch.truncated.len(), completions, "one per completion")?;
    let reference = required_inputs(batch, plan, normalizer)?;
    for (what, mask) in [("kept", batch.kept), ("chosen", batch.chosen)] {
        if let Some(mask) = mask {
            expect_length(what, mask.len(), tokens, "one per token")?;
        }
    }
    let per_token = [
        ("logp", Some(batch.logp)),
        ("old logp", batch.old),
        ("reference logp", reference),
        ("sampler logp", batch.sampler),
        ("entropy", batch.entropy),
    ];
    for (what, values) in per_token {
        let Some(values) = values else { continue };
        expect_length(what, values.len(), tokens, "one per token")?;
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            let (completion, token) = locate(at, batch.lengths);
            return Err(Error::NonFinite { what, completion, token, value: values[at] });
        }
    }
    if let Some(TeacherTokens { k, logp, teacher }) = batch.teacher {
        for (what, values) in
            [("the policy's logp of a teacher's token", logp), ("the teacher's logp", teacher)]
        {
            expect_length(what, values.len(), tokens.saturating_mul(k), "k per token")?;
            if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                let (completion, token) = locate(at / k.max(1), batch.lengths);
                return Err(Error::NonFinite { what, completion, token, value: values[at] });
            }
        }
    }
    if let Some(completion) = batch.advantages.iter().position(|a| !a.is_finite()) {
        let value = batch.advantages[completion];
        return Err(Error::NonFinite { what: "the advantage", completion, token: 0, value });
    }
    check_normalizer(batch, plan, normalizer)?;
    Ok(reference)
}

/// Returns the log-probabilities of the reference if the plan needs them, and an error if an input of the plan is missing.
fn required_inputs<'a>(
    batch: &Batch<'a>,
    plan: &LossPlan,
    normalizer: &Normalizer,
) -> Result<Option<&'a [f64]>, Error> {
    let reference = if plan.needs_reference() {
        Some(batch.reference.ok_or(Error::MissingInput {
            what: "reference log-probabilities",
            needed_by: "beta > 0",
            remedy: "evaluate the reference policy or set beta to 0",
        })?)
    } else {
        None
    };
    if batch.teacher.is_some() != (plan.teacher_tokens() > 0) {
        return Err(Error::MissingInput {
            what: if batch.teacher.is_some() {
                "a divergence over the teacher's most probable tokens"
            } else {
                "the teacher's most probable tokens"
            },
            needed_by: if batch.teacher.is_some() { "Batch::teacher" } else { "divergence" },
            remedy: "set both Batch::teacher and LossPlan::divergence, or neither",
        });
    }
    if batch.entropy.is_none() && plan.needs_entropy() {
        return Err(Error::MissingInput {
            what: "entropies",
            needed_by: "entropy_coef",
            remedy: "compute the entropies of the policy or set entropy_coef to 0",
        });
    }
    if batch.kept.is_some() != normalizer.kept_tokens.is_some() {
        return Err(Error::MissingInput {
            what: if batch.kept.is_some() { "the number of kept tokens" } else { "the mask of kept tokens" },
            needed_by: "top_entropy",
            remedy: "set both Batch::kept and Normalizer::kept_tokens, or neither",
        });
    }
    if batch.chosen.is_none() && plan.covariance != Covariance::Off {
        return Err(Error::MissingInput {
            what: "the mask of chosen tokens",
            needed_by: "covariance",
            remedy: "choose them with chosen_tokens or turn the setting off",
        });
    }
    if batch.sampler.is_none() && plan.correction.is_on() {
        return Err(Error::MissingInput {
            what: "log-probabilities of the sampler",
            needed_by: "correction",
            remedy: "use sampled completions or turn the setting off",
        });
    }
    Ok(reference)
}

/// Checks that the batch is not larger than the step.
fn check_normalizer(batch: &Batch<'_>, plan: &LossPlan, normalizer: &Normalizer) -> Result<(), Error> {
    let completions = batch.lengths.len();
    if completions > normalizer.completions {
        return Err(Error::Normalizer {
            unit: "completions",
            got: completions,
            expected: normalizer.completions,
        });
    }
    let counted = counted_tokens(plan, batch.lengths, batch.truncated)?;
    if counted > normalizer.tokens {
        return Err(Error::Normalizer { unit: "tokens", got: counted, expected: normalizer.tokens });
    }
    if let (Some(kept), Some(expected)) = (batch.kept, normalizer.kept_tokens) {
        let got = kept_tokens(plan, batch.lengths, batch.truncated, kept);
        if got > expected {
            return Err(Error::Normalizer { unit: "tokens kept", got, expected });
        }
    }
    Ok(())
}

fn first_non_finite(values: &[f64], lengths: &[usize]) -> Option<usize> {
    values.iter().position(|v| !v.is_finite()).map(|at| locate(at, lengths).0)
}

/// Converts a flat token index to the completion and the token within it.
fn locate(flat: usize, lengths: &[usize]) -> (usize, usize) {
    let mut start = 0;
    for (completion, length) in lengths.iter().enumerate() {
        if flat < start + length {
            return (completion, flat - start);
        }
        start += length;
    }
    (lengths.len(), flat - start)
}
