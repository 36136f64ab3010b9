//! The training step: one rollout, then updates from it.
//!
//! [`Collector::collect`] samples G completions oᵢ of each prompt q from the policy, scores them, and compares the rewards
//! within the group (GRPO: DeepSeekMath, arXiv 2402.03300, §4.1):
//!
//! ```text
//! Aᵢ = (Rᵢ − mean R) / std R
//! ```
//!
//! [`update`] takes one step of AdamW down the gradient of L (the negative of DeepSeekMath's eq. 3; the KL estimate is its eq. 4):
//!
//! ```text
//! L   = − mean over q of  1/G Σᵢ 1/|oᵢ| Σₜ ( min(rᵢₜ Aᵢ, clip(rᵢₜ, 1−ε, 1+ε) Aᵢ) − β Dᵢₜ )
//! rᵢₜ = π(oᵢₜ) / π_old(oᵢₜ)                     π_old: the weights that sampled; r = 1 in the first update
//! Dᵢₜ = π_ref(oᵢₜ) / π(oᵢₜ) − log(π_ref(oᵢₜ) / π(oᵢₜ)) − 1
//! ```
//!
//! with π(oᵢₜ) = π(oᵢₜ | q, oᵢ,₁ … oᵢ,ₜ₋₁). Every other algorithm changes one factor ([`omnigrpo_grpo::RECIPES`]):
//!
//! | name | difference | code |
//! |---|---|---|
//! | Dr. GRPO, arXiv 2503.20783 | Aᵢ = Rᵢ − mean R; one constant, the maximum completion length, replaces each \|oᵢ\| | `Advantages`, `Normalizer` |
//! | DAPO, arXiv 2503.14476 | Σᵢ Σₜ over the tokens of the whole step, divided by their number; clip from 1−ε to 1+ε_high | `Normalizer`, `LossPlan` |
//! | GSPO, arXiv 2507.18071 | one ratio per completion: rᵢ = exp(1/\|oᵢ\| Σₜ log rᵢₜ) | `LossPlan` |
//! | high-entropy tokens, arXiv 2506.01939 | the policy term keeps only the given share of tokens with the highest entropy | `top_entropy_tokens` |
//! | TIS, MIS | each token is weighted by the ratio of its probability in the training pass to that in the sampler | `Correction` |
//! | Clip-Cov, KL-Cov, arXiv 2505.22617 | tokens of a large covariance of advantage and log-probability have no policy term, or pay for their distance from π_old | `chosen_tokens` |
//! | DPPO, arXiv 2602.04879 | as CISPO, without tokens whose probability has moved too far | `LossPlan` |
//! | CISPO, arXiv 2506.13585 | min(rᵢₜ, cap) is a constant weight on Aᵢ log π(oᵢₜ) | `LossPlan` |
//!
//! L is a function of log-probabilities alone. `omnigrpo_grpo::evaluate` therefore computes L and dL/dlog π in closed form, and
//! the backward pass of the model starts from that derivative. The streams of a step add up their gradients, so the
//! `Normalizer` must first be computed for the whole step.

use std::ops::{Deref, DerefMut, Range};
use std::time::Duration;

use omnigrpo_grpo::{AdvantageKind, LossPlan, MetricSums, RECIPES, Recipe, metric};
use omnigrpo_models::{Model, PromptBuilder, RouterPlan, Training};
use omnigrpo_observe::{Metric, PhaseTimer};
use omnigrpo_ranks::Ranks;
use omnigrpo_rewards::{RewardMatrix, RewardSet};
use omnigrpo_rollout::{Completion, Interaction, MAX_LIVE, SamplingParams};

use crate::error::Result;
use crate::features::{self, settle};
use crate::gap::Gap;
use crate::lender::Models;
use crate::optimizer::AdamW;
use crate::pass::{Pass, reference_logprobs};
use crate::rollouts::{Group, Kept, Rollouts, Scored, alike};
use crate::rows::PreparedRow;
use crate::sampling;
use crate::scoring;
use crate::split::{Division, Split};
use crate::temporal;
use crate::timing::timed;

/// Settings of the algorithm for a step. They are the same for all steps of a run.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Algorithm {
    /// Completions per prompt.
    pub num_generations: usize,
    /// Sampling settings of the completions.
    pub sampling: SamplingParams,
    /// Maximum number of completions decoded at the same time. A run on a GPU with room for more replaces 64, the default, by up to 256.
    pub max_live: usize,
    /// Formula that turns rewards into advantages.
    pub advantage: AdvantageKind,
    /// Factor on every advantage.
    pub alpha: f64,
    /// True to normalise each reward before the rewards are summed.
    pub normalize_then_sum: bool,
    /// Settings of the loss.
    pub loss: LossPlan,
    /// Losses of the expert routers.
    pub router: RouterPlan,
    /// Maximum rows per packed stream. A larger group is split over several streams that repeat its prompt. `None` stands for
    /// 4096 rows, enough for several short groups or one with a long prompt.
    pub max_stream_tokens: Option<usize>,
    /// True to recompute activations in the backward pass.
    pub recompute: bool,
    /// True to let the first update of a rollout reuse the rollout's own forward pass. This requires that both passes give the
    /// same results up to rounding ([`Model::can_recall`]) and that a leaf fits in one stream.
    pub recall: bool,
    /// Prompts per micro-batch, over which `bnpo` takes its mean.
    pub prompts_per_micro_batch: usize,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Maximum number of times that groups with equal rewards are replaced by new ones; 0 keeps them.
    pub max_resample_times: usize,
    /// True if right answers of middle length earn a bonus ([`omnigrpo_rewards::length_bonus`]).
    pub length_bonus: bool,
    /// True to return the numbers of each token with the outcome of an update.
    pub token_stats: bool,
    /// Division of a step over ranks.
    pub split: Division,
}

/// An algorithm, and the ranks that run its steps.
#[derive(Clone, Debug)]
pub struct Divided {
    /// Settings of the algorithm.
    pub algorithm: Algorithm,
    /// Division of a step over the ranks.
    pub split: Split,
}

impl Divided {
    /// Returns an algorithm whose steps the ranks divide as its settings say, `local` of them on this machine.
    #[must_use]
    pub fn new(algorithm: Algorithm, ranks: Ranks, local: usize) -> Self {
        let split = Split { settings: algorithm.split, local, ..Split::over(ranks) };
        Self { algorithm, split }
    }

    /// Returns the prompts of each leaf of this rank, in an update with `prompts` prompts.
    pub(crate) fn own_leaves(&self, prompts: usize) -> Vec<Range<usize>> {
        self.split.own_leaves(prompts, self.micro()).into_iter().map(|(_, leaf)| leaf).collect()
    }

    /// Returns the prompts of each leaf of this rank, in a rollout with `prompts` prompts.
    pub(crate) fn own_leaves_of_rollout(&self, prompts: usize) -> Vec<Range<usize>> {
        self.split.own_leaves_of_rollout(prompts, self.micro())
    }

    /// Returns for each prompt of a rollout whether this rank trains on it.
    pub(crate) fn owns(&self, prompts: usize) -> Vec<bool> {
        let owners = self.split.owners(prompts, self.micro());
        owners.into_iter().map(|owner| owner == self.split.ranks.rank()).collect()
    }

    /// Returns true if a rollout with `prompts` prompts serves one update of each iteration.
    pub(crate) fn is_one_update(&self, prompts: usize) -> bool {
        self.split.prompts_per_step.is_none_or(|step| prompts <= step)
    }
}

impl From<Algorithm> for Divided {
    /// Returns an algorithm whose steps one process runs.
    fn from(algorithm: Algorithm) -> Self {
        Self::new(algorithm, Ranks::default(), 1)
    }
}

impl Deref for Divided {
    type Target = Algorithm;

    fn deref(&self) -> &Algorithm {
        &self.algorithm
    }
}

impl DerefMut for Divided {
    fn deref_mut(&mut self) -> &mut Algorithm {
        &mut self.algorithm
    }
}

impl Default for Algorithm {
    /// Returns the first recipe, `grpo`, with eight completions per prompt.
    fn default() -> Self {
        Self::of(&RECIPES[0])
    }
}

impl Algorithm {
    /// Returns the settings of a recipe with eight completions per prompt and seed 42.
    #[must_use]
    pub fn of(recipe: &Recipe) -> Self {
        let seed = 42;
        Self {
            num_generations: 8,
            sampling: SamplingParams { seed, ..SamplingParams::default() },
            max_live: MAX_LIVE,
            advantage: recipe.advantage,
            alpha: recipe.alpha,
            normalize_then_sum: false,
            loss: recipe.loss,
            router: RouterPlan::default(),
            max_stream_tokens: None,
            recompute: false,
            recall: true,
            prompts_per_micro_batch: 1,
            seed,
            max_resample_times: 0,
            length_bonus: false,
            token_stats: false,
            split: Division::default(),
        }
    }

    /// Copies the advantage, its factor and the loss from a recipe.
    pub fn follow(&mut self, recipe: &Recipe) {
        (self.advantage, self.alpha, self.loss) = (recipe.advantage, recipe.alpha, recipe.loss);
    }

    /// Returns the prompts of a micro-batch.
    pub(crate) fn micro(&self) -> usize {
        self.prompts_per_micro_batch.max(1)
    }

    /// Returns the maximum number of rows per packed stream.
    pub fn stream_rows(&self) -> usize {
        self.max_stream_tokens.unwrap_or(STREAM_ROWS)
    }
}

/// Default maximum of rows per packed stream.
pub const STREAM_ROWS: usize = 4096;

/// Position of an update in the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateAt {
    /// Number of earlier updates.
    pub step: u64,
    /// Factor of the schedule on every learning rate.
    pub learning_rate_factor: f64,
}

impl UpdateAt {
    pub(crate) fn training(self, algorithm: &Algorithm) -> Training {
        let dropout_key = algorithm.seed.rotate_left(32) ^ self.step;
        Training {
            temperature: algorithm.sampling.scoring_temperature(),
            recompute: algorithm.recompute,
            dropout_key,
            router: algorithm.router,
            ..Training::default()
        }
    }
}

/// Result of an update.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// Sums behind the metrics.
    pub sums: MetricSums,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Trained weights without a gradient.
    pub params_without_grad: usize,
    /// Largest and mean |log p(rollout) − log p(training)| over the tokens that went through the model, at the scoring
    /// temperature. Available only for sampled, on-policy steps. If the rollout was recalled, only the heads contribute to the
    /// difference.
    pub rollout_gap: Option<(f64, f64)>,
    /// Largest and mean |log p(rollout) − log q|. q is the distribution that tokens were drawn from, after temperature, penalties
    /// and truncation. Available only for sampled, on-policy steps.
    pub sampler_gap: Option<(f64, f64)>,
    /// Number of prompt and completion tokens that went through the model.
    pub num_tokens: u64,
    /// Number of completion rows whose experts differ from those of the rollout in some block, and of all compared rows. Available on
    /// the CPU, only for sampled, on-policy steps of a model with experts.
    pub experts: Option<[usize; 2]>,
    /// Balance loss and z-loss of the expert routers, summed over blocks, if they are enabled.
    pub router: Option<[f64; 2]>,
    /// Numbers of each completion's tokens in the order of the rollout, if the algorithm records them.
    pub tokens: Vec<TokenNumbers>,
}

impl StepOutcome {
    /// Returns the metrics of the update.
    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let mut metrics: Vec<Metric> = self.sums.metrics();
        let mut put = |name: &str, value: f64| metrics.push((name.to_owned(), Some(value)));
        put(metric::GRAD_NORM, self.grad_norm);
        put(metric::NUM_TOKENS, self.num_tokens as f64);
        put("params_without_grad", self.params_without_grad as f64);
        if let Some([balance, z]) = self.router {
            put("router_aux_loss", balance);
            put("router_z_loss", z);
        }
        if let Some([others, _]) = self.experts {
            put("sampling/rows_with_other_experts", others as f64);
        }
        if let Some((max, mean)) = self.rollout_gap {
            put("sampling/sampling_logp_difference/max", max);
            put("sampling/sampling_logp_difference/mean", mean);
        }
        if let Some((max, mean)) = self.sampler_gap {
            put("sampling/distribution_logp_difference/max", max);
            put("sampling/distribution_logp_difference/mean", mean);
        }
        metrics
    }
}

/// Numbers of a completion's tokens in an update, in nats.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct TokenNumbers {
    /// Log-probabilities under the policy before the update.
    pub logprobs: Vec<f32>,
    /// Entropies of the policy.
    pub entropies: Vec<f32>,
    /// Log-probabilities in the denominator of the ratio; empty on-policy.
    pub old: Vec<f32>,
    /// Log-probabilities under the reference; empty without a reference.
    pub reference: Vec<f32>,
    /// Decision of the entropy gate for each token, true if the token is kept; empty without a gate.
    pub kept: Vec<bool>,
}

/// Models and settings for collecting rollouts.
#[derive(Clone, Copy)]
pub struct Collector<'a> {
    /// Policy that samples.
    pub model: &'a Model,
    /// Builder of prompts.
    pub prompts: &'a PromptBuilder,
    /// Builder of prompts with shuffled frames. If it is set, answers that need the order of the frames earn a bonus.
    pub shuffled: Option<&'a PromptBuilder>,
    /// Rewards that score the completions.
    pub rewards: &'a RewardSet,
    /// Environment that answers completions.
    pub interaction: Option<&'a Interaction>,
    /// Settings for the number of completions, their sampling and their comparison.
    pub algorithm: &'a Divided,
}

/// Sampled and scored completions before advantages are computed.
struct Sampled {
    groups: Vec<Group>,
    kept: Vec<Kept>,
    rewards: RewardMatrix,
}

/// Offset on a rollout's number for each time that its groups are sampled again.
const AGAIN: u64 = 1 << 48;

impl Collector<'_> {
    /// Samples completions for `rows` and scores them. `rollout` is the number of the rollout, which keys its random numbers.
    ///
    /// With dynamic sampling (DAPO, arXiv 2503.14476, §3.2), a group with equal rewards gives no gradient. It is replaced by one
    /// of the rows that `draw` returns, up to the limit of the algorithm.
    ///
    /// # Errors
    /// Returns an error if a completion cannot be sampled or scored. The failure may be on this rank alone, if it cannot read what
    /// another one has sampled.
    pub fn collect(
        &self,
        rows: Vec<PreparedRow>,
        rollout: u64,
        draw: &mut dyn FnMut(usize) -> Result<Vec<PreparedRow>>,
        timer: &mut PhaseTimer,
    ) -> Result<Rollouts> {
        let (algorithm, size) = (self.algorithm, self.algorithm.num_generations);
        let mut sampled = self.sample(rows, rollout, true, timer)?;
        let mut dropped = 0;
        for round in 1..=algorithm.max_resample_times as u64 {
            let idle = alike(algorithm, &sampled.rewards)?;
            let idle: Vec<usize> = (0..idle.len()).filter(|&group| idle[group]).collect();
            if idle.is_empty() {
                break;
            }
            let rows = timed(timer, "data", || draw(idle.len()))?;
            let others = self.sample(rows, rollout + round * AGAIN, false, timer)?;
            let alike = alike(algorithm, &others.rewards)?;
            let telling = others.groups.into_iter().enumerate().filter(|(group, _)| !alike[*group]);
            for (to, (from, group)) in idle.into_iter().zip(telling) {
                sampled.groups[to] = group;
                sampled.rewards.replace(to * size, &others.rewards, from * size..(from + 1) * size);
                // These results belong to the original prompts.
                sampled.kept.retain(|kept| !kept.groups.contains(&to));
                dropped += 1;
            }
        }
        let Sampled { mut groups, kept, mut rewards } = sampled;
        if dropped > 0 {
            // Another rank may have sampled a group that this rank trains on.
            timed(timer, "encode", || settle(self.model, self.prompts, algorithm, &mut groups))?;
        }
        if algorithm.max_resample_times > 0 {
            rewards.logged.metrics.insert("sampling/resampled_prompts".into(), f64::from(dropped));
        }
        if let Some(interaction) = self.interaction {
            let wait = interaction.take_wait();
            rewards.logged.metrics.extend(turn_metrics(&groups, wait));
        }
        Rollouts::new(algorithm, groups, kept, rewards)
    }

    /// Samples completions of rows and scores them. With `keep`, results are kept for the first update.
    fn sample(
        &self,
        rows: Vec<PreparedRow>,
        rollout: u64,
        keep: bool,
        timer: &mut PhaseTimer,
    ) -> Result<Sampled> {
        let Self { shuffled, rewards, algorithm, .. } = *self;
        let done = sampling::completed(self, rows, rollout, keep, timer)?;
        let mut matrix = timed(timer, "reward", || {
            scoring::once(&algorithm.split, &done.rows, &done.completions, |scored| {
                scoring::score(rewards, scored, algorithm.seed, rollout)
                    .map_err(|error| scoring::unscored(error, scored))
            })
        })?;
        if let Some(shuffled) = shuffled {
            timed(timer, "shuffled_rollout", || {
                temporal::add_order_bonus(self, shuffled, &done.rows, rollout, &mut matrix)
            })?;
        }
        if algorithm.length_bonus {
            temporal::add_length_bonus(rewards, &done.completions, &mut matrix)?;
        }
        let (groups, kept) = done.into_groups();
        Ok(Sampled { groups, kept, rewards: matrix })
    }
}

/// Returns the metrics of environments, with TRL's names where it has them. `wait` is the time in which no completion could go on.
fn turn_metrics(groups: &[Group], wait: Duration) -> Vec<(String, f64)> {
    let completions = || groups.iter().flat_map(|group| &group.completions).map(|scored| &scored.completion);
    let count = completions().count().max(1) as f64;
    let sum = |of: &dyn Fn(&Completion) -> usize| completions().map(of).sum::<usize>() as f64;
    let (calls, failed) = (sum(&|c| c.calls), sum(&|c| c.failed_calls));
    let turns = |c: &Completion| c.turns.len() + 1;
    let each = [
        ("tools/call_frequency", calls / count),
        ("tools/failure_frequency", failed / calls.max(1.0)),
        ("turns/mean", sum(&turns) / count),
        ("turns/max", completions().map(turns).max().unwrap_or_default() as f64),
        ("turns/environment_tokens", sum(&|c| c.ids.len() - c.num_sampled()) / count),
        ("time/environment", wait.as_secs_f64()),
    ];
    each.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Performs one optimizer update from scored rollouts.
///
/// # Errors
/// Returns an error if a loss or gradient is not finite. The weights are unchanged then.
pub fn update<'m>(
    models: impl Into<Models<'m>>,
    optimizer: &mut AdamW,
    at: UpdateAt,
    algorithm: &Divided,
    rollouts: &mut Rollouts,
    timer: &mut PhaseTimer,
) -> Result<StepOutcome> {
    let models = models.into();
    let pass = Pass::new(models, algorithm, at.training(algorithm), rollouts)?;
    let mut ready = Ok(());
    if rollouts.updated && models.policy.trains_media() {
        let groups = &mut rollouts.groups;
        let mut leaves = algorithm.own_leaves(groups.len()).into_iter();
        ready = timed(timer, "encode", || {
            leaves.try_for_each(|leaf| features::encode_again(models.policy, &mut groups[leaf]))
        });
    }
    let unknown = rollouts.completions().any(|c| c.reference.is_none());
    if models.reference.is_some() && algorithm.loss.needs_reference() && unknown {
        ready = timed(timer, "reference", || reference_logprobs(models, algorithm, ready, rollouts));
    }
    let passed = pass.run(ready, rollouts, optimizer, timer)?;
    let mut sampler_gap = Gap::default();
    if passed.on_policy {
        for Scored { completion: c, .. } in rollouts.completions() {
            sampler_gap.add(&c.sampler_logprobs, &c.logprobs);
        }
    }
    let done = timed(timer, "optimizer", || optimizer.step(at.learning_rate_factor))?;
    rollouts.updated = true;
    if passed.on_policy {
        // Later updates of the same rollout use the log-probabilities of the first one in their ratios.
        let completions = rollouts.groups.iter_mut().flat_map(|group| &mut group.completions);
        completions.zip(passed.logprobs).for_each(|(c, own)| c.old = Some(own));
    }
    Ok(StepOutcome {
        sums: passed.sums,
        grad_norm: done.grad_norm,
        params_without_grad: done.skipped,
        rollout_gap: passed.gap.finish(),
        sampler_gap: sampler_gap.finish(),
        num_tokens: passed.num_tokens,
        experts: Some(passed.experts).filter(|[_, compared]| *compared > 0),
        router: (!algorithm.router.is_off()).then_some(passed.router),
        tokens: passed.tokens,
    })
}
