//! Divergence of the policy from a teacher over the teacher's most probable tokens.
//!
//! At each position, `P` is the teacher's distribution and `Q` the policy's over `k + 1` tokens: the teacher's `k` most probable
//! ones, and one that stands for all others and has the rest of the probability. For a mixture `M = beta P + (1 - beta) Q`:
//!
//! ```text
//! forward KL   sum_a P_a log(P_a / Q_a)
//! reverse KL   sum_a Q_a log(Q_a / P_a)
//! jsd          beta sum_a P_a log(P_a / M_a) + (1 - beta) sum_a Q_a log(Q_a / M_a)
//! ```
//!
//! With `d_a` the derivative by `Q_a`, the derivative by the log-probability of token `a` is `Q_a (d_a - d_rest)`, because the rest is
//! `1 - sum_a Q_a`. The log-probabilities are those of the whole vocabulary, so the head's gradient reaches every token.
//!
//! Source: the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1; TRL 1.16 `generalized_jsd_loss`, whose
//! number it equals if `k` is the whole vocabulary), with the rest of TRL's `add_tail_bucket`. Deliberate difference: a rest below
//! [`LEAST_REST`] counts as [`LEAST_REST`] and has no gradient, where TRL has 1e-7. So small a rest is a rounding error of float32.

use serde::{Deserialize, Serialize};

/// Smallest probability of the tokens that are not among the teacher's most probable ones.
pub const LEAST_REST: f64 = 1e-5;

/// Divergence from a teacher that an update makes smaller.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// Reverse KL divergence by the sampled token alone: an advantage of each token ([`LossPlan::distillation`](crate::LossPlan)).
    #[default]
    Sampled,
    /// KL divergence from the policy to the teacher.
    ReverseKl {
        /// Number of the teacher's most probable tokens, at least 1.
        top_k: usize,
    },
    /// KL divergence from the teacher to the policy.
    ForwardKl {
        /// Number of the teacher's most probable tokens, at least 1.
        top_k: usize,
    },
    /// Generalised Jensen-Shannon divergence.
    Jsd {
        /// Number of the teacher's most probable tokens, at least 1.
        top_k: usize,
        /// Share of the teacher in the mixture, in [0, 1]. 0 stands for the forward KL and 1 for the reverse KL, as in GKD.
        beta: f64,
    },
}

impl Divergence {
    /// Number of the teacher's most probable tokens where a program does not set it.
    pub const TOP_K: usize = 100;

    /// Returns the number of tokens that are read at each position; 0 if the sampled token alone is.
    pub fn top_k(self) -> usize {
        match self {
            Self::Sampled => 0,
            Self::ReverseKl { top_k } | Self::ForwardKl { top_k } | Self::Jsd { top_k, .. } => top_k,
        }
    }

    /// Returns the share of the teacher in the mixture.
    pub(crate) fn beta(self) -> f64 {
        match self {
            Self::Sampled | Self::ReverseKl { .. } => 1.0,
            Self::ForwardKl { .. } => 0.0,
            Self::Jsd { beta, .. } => beta,
        }
    }

    /// Returns the divergence at one position, from the log-probabilities of the teacher's tokens under the policy and under the
    /// teacher. Adds `weight` times its derivative by each of the policy's to `dlogp`.
    pub(crate) fn at(self, logp: &[f64], teacher: &[f64], weight: f64, dlogp: &mut [f64]) -> f64 {
        let rest = |logp: &[f64]| 1.0 - logp.iter().map(|lp| lp.exp()).sum::<f64>();
        let rest_q = rest(logp);
        let bounded = rest_q.max(LEAST_REST);
        let (mut value, slope) = self.term(bounded.ln(), rest(teacher).max(LEAST_REST).ln());
        let d_rest = if rest_q < LEAST_REST { 0.0 } else { slope / bounded };
        for ((&log_q, &log_p), d) in logp.iter().zip(teacher).zip(dlogp) {
            let (own, slope) = self.term(log_q, log_p);
            value += own;
            *d += weight * (slope - log_q.exp() * d_rest);
        }
        value
    }

    /// Returns the share of one token with the probabilities `Q` and `P`, and its derivative by `log Q`.
    fn term(self, log_q: f64, log_p: f64) -> (f64, f64) {
        let (q, p, beta) = (log_q.exp(), log_p.exp(), self.beta());
        if beta == 0.0 {
            return (p * (log_p - log_q), -p);
        }
        if beta == 1.0 {
            return (q * (log_q - log_p), q * (log_q - log_p + 1.0));
        }
        let (of_p, of_q) = (log_p + beta.ln(), log_q + (-beta).ln_1p());
        let largest = of_p.max(of_q);
        let log_m = largest + ((of_p - largest).exp() + (of_q - largest).exp()).ln();
        let of_policy = (1.0 - beta) * q * (log_q - log_m);
        (beta * p * (log_p - log_m) + of_policy, of_policy)
    }
}
