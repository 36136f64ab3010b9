//! Published combinations of surrogate, ratio level, aggregation and KL, by name.
//!
//! A recipe sets every value that its name implies. Each value can be overridden by its own setting. `beta` is 0.04 unless the
//! source of a recipe states another value.

use crate::advantage::AdvantageKind;
use crate::divergence::Divergence;
use crate::loss::{Aggregation, Correction, Covariance, Kl, LossPlan, PolicyShift, RatioLevel, Surrogate};

/// One row of [`RECIPES`].
///
/// ```
/// use omnigrpo_grpo::{Aggregation, recipe};
///
/// let dapo = recipe("dapo").ok_or("unknown recipe")?;
/// assert_eq!(dapo.loss.aggregation, Aggregation::TokenMeanGlobal);
/// // Each value can be changed.
/// let mut loss = dapo.loss;
/// loss.beta = 0.0;
/// assert!(!loss.needs_reference());
/// # Ok::<(), &str>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// Name of the recipe: a value of `loss_type`.
    pub name: &'static str,
    /// Names of the same formula in other programs.
    pub aliases: &'static [&'static str],
    /// Summary in one line, for help texts.
    pub summary: &'static str,
    /// Paper or program that the recipe follows.
    pub source: &'static str,
    /// Formula of the advantages.
    pub advantage: AdvantageKind,
    /// Multiplier of the advantage (`grpo_alpha`).
    pub alpha: f64,
    pub loss: LossPlan,
}

const CLIP: Surrogate = Surrogate::Clip { low: 0.2, high: 0.2, delta: None };

const GRPO: LossPlan = LossPlan {
    surrogate: CLIP,
    ratio: RatioLevel::Token,
    aggregation: Aggregation::SequenceMean,
    kl: Kl::K3,
    beta: 0.04,
    entropy_coef: 0.0,
    top_entropy: 1.0,
    covariance: Covariance::Off,
    correction: Correction::OFF,
    off_policy_threshold: None,
    distillation: 0.0,
    divergence: Divergence::Sampled,
    mask_truncated_completions: false,
};

const fn dppo(divergence: PolicyShift, bound: f64) -> LossPlan {
    LossPlan {
        surrogate: Surrogate::Dppo { divergence, low: bound, high: bound, cap: 20.0 },
        aggregation: Aggregation::TokenMeanGlobal,
        beta: 0.0,
        ..GRPO
    }
}

/// All recipes; the first is the default.
pub const RECIPES: &[Recipe] = &[
    Recipe {
        name: "grpo",
        aliases: &[],
        summary: "clipped token ratios, mean over completions of token means",
        source: "DeepSeekMath, arXiv 2402.03300",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: GRPO,
    },
    Recipe {
        name: "bnpo",
        aliases: &[],
        summary: "grpo with a mean over the tokens of a micro-batch",
        source: "TRL 1.16, loss_type bnpo",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan { aggregation: Aggregation::TokenMeanLocal, ..GRPO },
    },
    Recipe {
        name: "dr_grpo",
        aliases: &[],
        summary: "grpo divided by the constant max_completion_length: no bias by length or by group deviation",
        source: "Dr. GRPO, arXiv 2503.20783",
        advantage: AdvantageKind::GroupCenter,
        alpha: 1.0,
        loss: LossPlan { aggregation: Aggregation::ConstantLength, ..GRPO },
    },
    Recipe {
        name: "dapo",
        aliases: &[],
        summary: "grpo with a mean over all tokens of the optimizer step",
        source: "DAPO, arXiv 2503.14476 (its clip-higher is epsilon_high 0.28)",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan { aggregation: Aggregation::TokenMeanGlobal, ..GRPO },
    },
    Recipe {
        name: "cispo",
        aliases: &[],
        summary: "capped ratio as a constant weight on the log-probability; no token loses its gradient",
        source: "MiniMax-M1, arXiv 2506.13585; epsilon_high is the cap",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan {
            surrogate: Surrogate::Cispo { cap: 5.0 },
            aggregation: Aggregation::TokenMeanGlobal,
            ..GRPO
        },
    },
    Recipe {
        name: "gspo",
        aliases: &["gspo_token"],
        summary: "one clipped ratio per completion, no KL",
        source: "GSPO, arXiv 2507.18071; clip 3e-4 and 4e-4",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan {
            surrogate: Surrogate::Clip { low: 3e-4, high: 4e-4, delta: None },
            ratio: RatioLevel::Sequence,
            beta: 0.0,
            ..GRPO
        },
    },
    Recipe {
        name: "sapo",
        aliases: &[],
        summary: "a smooth gate in place of the clip",
        source: "SAPO as in TRL 1.16; temperatures 1.0 and 1.05",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan { surrogate: Surrogate::Sapo { pos: 1.0, neg: 1.05 }, ..GRPO },
    },
    Recipe {
        name: "luspo",
        aliases: &[],
        summary: "gspo with the sum over tokens: long completions count by their length",
        source: "LUSPO as in TRL 1.16; clip 3e-4 and 4e-4 as gspo",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan {
            surrogate: Surrogate::Clip { low: 3e-4, high: 4e-4, delta: None },
            ratio: RatioLevel::Sequence,
            aggregation: Aggregation::TokenSum,
            beta: 0.0,
            ..GRPO
        },
    },
    Recipe {
        name: "vespo",
        aliases: &[],
        summary: "a smooth weight of the whole completion's ratio, which falls on both sides of 1",
        source: "VESPO as in TRL 1.16; k and lambda 2 and 3, 3 and 2 for negative advantages",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan {
            surrogate: Surrogate::Vespo { pos: [2.0, 3.0], neg: [3.0, 2.0] },
            aggregation: Aggregation::TokenMeanGlobal,
            beta: 0.0,
            ..GRPO
        },
    },
    Recipe {
        name: "gmpo",
        aliases: &["geo_mean"],
        summary: "the geometric mean of token ratios, each clipped to exp(-0.4) and exp(0.4)",
        source: "GMPO, arXiv 2507.20673; verl geo_mean",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan { surrogate: Surrogate::GeometricMean { low: 0.4, high: 0.4 }, beta: 0.0, ..GRPO },
    },
    Recipe {
        name: "rloo",
        aliases: &[],
        summary: "each reward against the mean of the others, one ratio per completion",
        source: "RLOO, arXiv 2402.14740; loss of TRL 1.16's RLOOTrainer. Its KL is part of the reward, here of the loss",
        advantage: AdvantageKind::LeaveOneOut,
        alpha: 1.0,
        loss: LossPlan { ratio: RatioLevel::Product, beta: 0.0, ..GRPO },
    },
    Recipe {
        name: "reinforce_plus_plus",
        aliases: &["reinforce++"],
        summary: "rewards against the mean and deviation of the whole batch, over its tokens",
        source: "REINFORCE++, arXiv 2501.03262; verl 0.9.1",
        advantage: AdvantageKind::Whitened,
        alpha: 1.0,
        loss: LossPlan { aggregation: Aggregation::TokenMeanGlobal, beta: 0.0, ..GRPO },
    },
    Recipe {
        name: "reinforce_plus_plus_baseline",
        aliases: &["reinforce++_baseline"],
        summary: "reinforce_plus_plus of rewards without the mean of their group",
        source: "REINFORCE++-baseline, arXiv 2501.03262; verl 0.9.1",
        advantage: AdvantageKind::GroupCenterWhitened,
        alpha: 1.0,
        loss: LossPlan { aggregation: Aggregation::TokenMeanGlobal, beta: 0.0, ..GRPO },
    },
    Recipe {
        name: "clip_cov",
        aliases: &[],
        summary: "grpo without some random tokens of a large covariance of advantage and log-probability",
        source: "Clip-Cov, arXiv 2505.22617; verl 0.9.1",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan {
            covariance: Covariance::Clip { share: 2e-4, low: 1.0, high: 5.0 },
            aggregation: Aggregation::TokenMeanGlobal,
            beta: 0.0,
            ..GRPO
        },
    },
    Recipe {
        name: "kl_cov",
        aliases: &[],
        summary: "unclipped ratio; tokens of the largest covariance pay for their distance from sampling",
        source: "KL-Cov, arXiv 2505.22617; verl 0.9.1",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: LossPlan {
            surrogate: Surrogate::Ratio,
            covariance: Covariance::Kl { share: 2e-4, coef: 1.0 },
            aggregation: Aggregation::TokenMeanGlobal,
            beta: 0.0,
            ..GRPO
        },
    },
    Recipe {
        name: "dppo_tv",
        aliases: &["dppo"],
        summary: "cispo without tokens whose probability has moved by more than 0.2",
        source: "DPPO, arXiv 2602.04879; verl 0.9.1",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: dppo(PolicyShift::TotalVariation, 0.2),
    },
    Recipe {
        name: "dppo_kl",
        aliases: &[],
        summary: "cispo without tokens whose probability has moved by a KL divergence above 0.05",
        source: "DPPO, arXiv 2602.04879; verl 0.9.1",
        advantage: AdvantageKind::GroupStd,
        alpha: 1.0,
        loss: dppo(PolicyShift::Kl, 0.05),
    },
    Recipe {
        name: "seq_logp",
        aliases: &[],
        summary: "REINFORCE on whole completions with a signed sequence KL",
        source: "Qwen2.5-VL-Video GRPO add-on, first version",
        advantage: AdvantageKind::GroupCenter,
        alpha: 0.5,
        loss: LossPlan {
            surrogate: Surrogate::LogProb,
            aggregation: Aggregation::TokenSum,
            kl: Kl::K1,
            beta: 0.1,
            ..GRPO
        },
    },
    Recipe {
        name: "clamped_std",
        aliases: &[],
        summary: "unclipped ratio, advantages over a deviation of at least 0.01",
        source: "Qwen2.5-VL-Video GRPO repository, later version",
        advantage: AdvantageKind::GroupStdClamped,
        alpha: 0.5,
        loss: LossPlan { surrogate: Surrogate::Ratio, beta: 0.1, ..GRPO },
    },
];

/// Returns the recipe with this name or alias; `None` for an unknown name.
///
/// ```
/// use omnigrpo_grpo::{AdvantageKind, recipe};
///
/// let dr_grpo = recipe("dr_grpo").unwrap();
/// assert_eq!(dr_grpo.advantage, AdvantageKind::GroupCenter);
/// assert!(recipe("unknown recipe").is_none());
/// ```
pub fn recipe(name: &str) -> Option<&'static Recipe> {
    RECIPES.iter().find(|recipe| recipe.name == name || recipe.aliases.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_plan_is_valid() {
        for (i, row) in RECIPES.iter().enumerate() {
            for name in row.aliases.iter().chain([&row.name]) {
                assert_eq!(recipe(name).map(|r| r.name), Some(row.name));
                assert!(RECIPES[..i].iter().all(|other| other.name != *name), "{name} twice");
            }
            row.loss.validate().unwrap();
        }
        assert_eq!(recipe("gpro"), None);
    }
}
