//! The training step: one rollout, then updates from it.
//!
//! [`Collector::collect`] samples G completions oᵢ of each prompt q from the policy, scores them, and compares the rewards
//! within the group (GRPO: DeepSeekMath, arXiv 2402.03300, §4.1):
//!
//! ```text
//! Aᵢ = (Rᵢ − mean R) / std R
//! ```
//!
//! [`update`] takes one step of AdamW down the gradient of (the negative of its eq. 3; the KL estimate is its eq. 4)
//!
//! ```text
//! L   = − mean over q of  1/G Σᵢ 1/|oᵢ| Σₜ ( min(rᵢₜ Aᵢ, clip(rᵢₜ, 1−ε, 1+ε) Aᵢ) − β Dᵢₜ )
//! rᵢₜ = π(oᵢₜ) / π_old(oᵢₜ)                     π_old: the weights that sampled; r = 1 in the first update
//! Dᵢₜ = π_ref(oᵢₜ) / π(oᵢₜ) − log(π_ref(oᵢₜ) / π(oᵢₜ)) − 1
//! ```
//!
//! with π(oᵢₜ) = π(oᵢₜ | q, oᵢ,₁ … oᵢ,ₜ₋₁). The other algorithms change one factor each ([`omnigrpo_grpo::RECIPES`]):
//!
//! | name | what is different | in |
//! |---|---|---|
//! | Dr. GRPO, arXiv 2503.20783 | Aᵢ = Rᵢ − mean R; one constant, the longest completion allowed, in place of each \|oᵢ\| | `Advantages`, `Normalizer` |
//! | DAPO, arXiv 2503.14476 | Σᵢ Σₜ over the tokens of the whole step, divided by their number; clip from 1−ε to 1+ε_high | `Normalizer`, `LossPlan` |
//! | GSPO, arXiv 2507.18071 | one ratio per completion: rᵢ = exp(1/\|oᵢ\| Σₜ log rᵢₜ) | `LossPlan` |
//! | high-entropy tokens, arXiv 2506.01939 | the policy term keeps the share of tokens with the highest entropy | `top_entropy_tokens` |
//! | TIS, MIS | each token weighs what the training pass found it to be likelier than the sampler did | `Correction` |
//! | CISPO, arXiv 2506.13585 | min(rᵢₜ, cap) is a constant weight on Aᵢ log π(oᵢₜ) | `LossPlan` |
//!
//! L is a function of log-probabilities alone, so `omnigrpo_grpo::evaluate` gives L and dL/dlog π in closed form and the
//! model carries the derivative back. Streams of a step add their gradients: the `Normalizer` is made for all of it first.

use omnigrpo_grpo::{AdvantageKind, LossPlan, MetricSums, RECIPES, Recipe};
use omnigrpo_models::{DecoderMemory, Memories, Model, PromptBuilder, RouterPlan, Training};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rewards::{RewardMatrix, RewardSet};
use omnigrpo_rollout::{Generator, SamplingParams, TokenEvent};

use crate::error::{Result, TrainError};
use crate::features::{self, Keep};
use crate::gap::Gap;
use crate::optimizer::AdamW;
use crate::pass::{Pass, reference_logprobs};
use crate::rollouts::{Group, Rollouts, Scored, alike};
use crate::rows::{PreparedRow, requests};
use crate::scoring;
use crate::temporal;
use crate::timing::timed;

/// Settings of the algorithm for a step. They are equal for all steps of a run.
#[derive(Clone, Debug)]
pub struct Algorithm {
    /// Completions per prompt.
    pub num_generations: usize,
    /// How completions are sampled.
    pub sampling: SamplingParams,
    /// Completions decoded at once.
    pub max_live: usize,
    /// How rewards become advantages.
    pub advantage: AdvantageKind,
    /// Multiplies every advantage.
    pub alpha: f64,
    /// Normalise each reward before summing them.
    pub normalize_then_sum: bool,
    /// The loss.
    pub loss: LossPlan,
    /// Losses of the routers of experts.
    pub router: RouterPlan,
    /// Rows of one packed stream at most; a larger group is split over streams that share its prompt. `None`: 4096, room
    /// for several short groups or one of a long prompt.
    pub max_stream_tokens: Option<usize>,
    /// Recompute activations in the backward pass.
    pub recompute: bool,
    /// Let the first update of a rollout differentiate what the rollout computed, instead of a forward pass that computes it
    /// again, where that is the same up to rounding ([`Model::can_recall`]) and the rollout fits in one stream.
    pub recall: bool,
    /// Prompts of one micro-batch: the unit of `bnpo`'s mean.
    pub prompts_per_micro_batch: usize,
    /// Keys all random numbers.
    pub seed: u64,
    /// How often groups whose rewards are all the same give their places to others; 0 keeps them.
    pub max_resample_times: usize,
    /// Give each token's numbers with the outcome of an update.
    pub token_stats: bool,
}

impl Default for Algorithm {
    /// The first recipe, `grpo`, with eight completions a prompt.
    fn default() -> Self {
        Self::of(&RECIPES[0])
    }
}

impl Algorithm {
    /// A recipe with eight completions a prompt and seed 42.
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
            token_stats: false,
        }
    }

    /// Takes advantage, factor and loss from a recipe.
    pub fn follow(&mut self, recipe: &Recipe) {
        (self.advantage, self.alpha, self.loss) = (recipe.advantage, recipe.alpha, recipe.loss);
    }

    /// Rows of one packed stream at most.
    #[must_use]
    pub fn stream_rows(&self) -> usize {
        self.max_stream_tokens.unwrap_or(STREAM_ROWS)
    }
}

/// Completions decoded at once: enough to share a pass over the weights, small enough for the caches of long prompts.
pub const MAX_LIVE: usize = 64;

/// Rows of a packed stream where nothing is given.
pub const STREAM_ROWS: usize = 4096;

/// Which update of a run one is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateAt {
    /// Updates before it.
    pub step: u64,
    /// Factor of every learning rate: the schedule.
    pub learning_rate_factor: f64,
}

impl UpdateAt {
    pub(crate) fn training(self, algorithm: &Algorithm) -> Training {
        let dropout_key = algorithm.seed.rotate_left(32) ^ self.step;
        Training {
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
    /// |log p(rollout) − log p(training)|, both at the scoring temperature, over the tokens that went through the model:
    /// largest and mean. Only for sampled, on-policy steps. Where the rollout was recalled it is that of the heads alone.
    pub rollout_gap: Option<(f64, f64)>,
    /// |log p(rollout) − log q|, where q is the distribution that tokens were drawn from, after temperature, penalties and
    /// truncation: largest and mean. Only for sampled, on-policy steps.
    pub sampler_gap: Option<(f64, f64)>,
    /// Prompt and completion tokens that went through the model.
    pub num_tokens: u64,
    /// Balance and z-loss of the routers of experts, summed over blocks, where they are asked for.
    pub router: Option<[f64; 2]>,
    /// Numbers of each completion's tokens in the order of the rollout, where the algorithm asks for them.
    pub tokens: Vec<TokenNumbers>,
}

/// Numbers of a completion's tokens in an update, nats.
#[derive(Clone, Debug)]
pub struct TokenNumbers {
    /// Log-probabilities under the policy before the update.
    pub logprobs: Vec<f32>,
    /// Entropies of the policy.
    pub entropies: Vec<f32>,
    /// Log-probabilities that the ratio compares with; empty on-policy.
    pub old: Vec<f32>,
    /// Log-probabilities under the reference; empty without one.
    pub reference: Vec<f32>,
    /// Whether the entropy gate keeps each token; empty without one.
    pub kept: Vec<bool>,
}

/// Inputs of a rollout.
#[derive(Clone, Copy)]
pub struct Collector<'a> {
    /// The policy.
    pub model: &'a Model,
    /// Makes prompts.
    pub prompts: &'a PromptBuilder,
    /// Makes prompts with shuffled frames; with it, answers that need the order of the frames earn a bonus.
    pub shuffled: Option<&'a PromptBuilder>,
    /// Score completions.
    pub rewards: &'a RewardSet,
    /// How many completions, and how they are drawn and compared.
    pub algorithm: &'a Algorithm,
}

/// Sampled and scored completions before they are compared.
struct Sampled {
    groups: Vec<Group>,
    memories: Memories,
    recalled: Option<DecoderMemory>,
    rewards: RewardMatrix,
}

/// Added to a rollout's number for each time that groups of it are sampled again.
const AGAIN: u64 = 1 << 48;

impl Collector<'_> {
    /// Samples completions for `rows` and scores them. `rollout` numbers the rollout, for its random numbers.
    ///
    /// With dynamic sampling (DAPO, arXiv 2503.14476, §3.2) a group whose rewards are all the same, from which nothing can be
    /// learned, gives its place to one of the rows that `draw` returns, up to the limit of the algorithm.
    pub fn collect(
        &self,
        rows: Vec<PreparedRow>,
        rollout: u64,
        draw: &mut dyn FnMut(usize) -> Result<Vec<PreparedRow>>,
        timer: &mut PhaseTimer,
    ) -> Result<Rollouts> {
        let (algorithm, size) = (self.algorithm, self.algorithm.num_generations);
        let memory = self.memory(&rows);
        let mut sampled = self.sample(rows, rollout, memory, timer)?;
        let mut dropped = 0;
        for round in 1..=algorithm.max_resample_times as u64 {
            let idle = alike(algorithm, &sampled.rewards)?;
            let idle: Vec<usize> = (0..idle.len()).filter(|&group| idle[group]).collect();
            if idle.is_empty() {
                break;
            }
            let rows = timed(timer, "data", || draw(idle.len()))?;
            let others = self.sample(rows, rollout + round * AGAIN, None, timer)?;
            let alike = alike(algorithm, &others.rewards)?;
            let telling = others.groups.into_iter().enumerate().filter(|(group, _)| !alike[*group]);
            for (to, (from, group)) in idle.into_iter().zip(telling) {
                sampled.groups[to] = group;
                sampled.rewards.replace(to * size, &others.rewards, from * size..(from + 1) * size);
                // They are of the prompts that were there first.
                (sampled.memories, sampled.recalled) = (Memories::default(), None);
                dropped += 1;
            }
        }
        let Sampled { groups, memories, recalled, mut rewards } = sampled;
        if algorithm.max_resample_times > 0 {
            rewards.logged.metrics.insert("sampling/resampled_prompts".into(), f64::from(dropped));
        }
        let rollouts = Rollouts::new(algorithm, groups, memories, rewards)?;
        Ok(Rollouts { recalled, ..rollouts })
    }

    fn sample(
        &self,
        rows: Vec<PreparedRow>,
        rollout: u64,
        mut recalled: Option<DecoderMemory>,
        timer: &mut PhaseTimer,
    ) -> Result<Sampled> {
        let Self { model, prompts, shuffled, rewards, algorithm } = *self;
        let activity = timer.activity().clone();
        let (features, memories) = timed(timer, "encode", || {
            features::encode(model, Keep::for_update(algorithm), rows.iter().map(|row| &*row.prompt))
        })?;
        let completions = timed(timer, "rollout", || {
            let requests = requests(&rows, &features, algorithm.num_generations, rollout);
            activity.parts("completions", 0, rows.len() * algorithm.num_generations);
            let generator = Generator::new(model, prompts, &algorithm.sampling, algorithm.max_live);
            let told = |event: TokenEvent| activity.token(event.last);
            Ok::<_, TrainError>(generator.generate_with(&requests, told, recalled.as_mut())?)
        })?;
        let mut matrix = timed(timer, "reward", || {
            let scored = scoring::pairs(&rows, &completions);
            scoring::score(rewards, &scored, algorithm.seed, rollout)
                .map_err(|error| scoring::unscored(error, &scored))
        })?;
        if let Some(shuffled) = shuffled {
            timed(timer, "shuffled_rollout", || {
                temporal::add_order_bonus(self, shuffled, &rows, rollout, &mut matrix)
            })?;
        }
        let each = rows.into_iter().zip(features).zip(completions);
        let groups = each.map(|((row, features), completions)| Group {
            row,
            features,
            completions: completions.into_iter().map(|completion| Scored::new(completion, None)).collect(),
        });
        Ok(Sampled { groups: groups.collect(), memories, recalled, rewards: matrix })
    }

    /// Room for what the decoder computes, if the update will be one stream of these rows. That stream holds it in any case.
    fn memory(&self, rows: &[PreparedRow]) -> Option<DecoderMemory> {
        let Self { model, algorithm, .. } = *self;
        let together = rows.len() <= algorithm.prompts_per_micro_batch;
        let same = algorithm.recall && algorithm.router.is_off() && model.can_recall();
        (same && together).then(|| DecoderMemory::new(algorithm.stream_rows(), algorithm.recompute))
    }
}

/// One optimizer update from scored rollouts.
///
/// # Errors
/// A loss or gradient that is not finite; weights are unchanged then.
pub fn update(
    model: &Model,
    reference: Option<&Model>,
    optimizer: &mut AdamW,
    at: UpdateAt,
    algorithm: &Algorithm,
    rollouts: &mut Rollouts,
    timer: &mut PhaseTimer,
) -> Result<StepOutcome> {
    let pass = Pass::new(model, algorithm, at.training(algorithm), rollouts)?;
    if rollouts.updated && model.trains_media() {
        timed(timer, "encode", || features::encode_again(model, &mut rollouts.groups))?;
    }
    let unknown = rollouts.completions().any(|c| c.reference.is_none());
    if let Some(reference) = reference.filter(|_| algorithm.loss.needs_reference() && unknown) {
        timed(timer, "reference", || reference_logprobs(reference, model, algorithm, rollouts))?;
    }
    let passed = pass.run(rollouts, timer)?;
    let mut sampler_gap = Gap::default();
    if passed.on_policy {
        for Scored { completion: c, .. } in rollouts.completions() {
            sampler_gap.add(&c.sampler_logprobs, &c.logprobs);
        }
    }
    let done = timed(timer, "optimizer", || optimizer.step(at.learning_rate_factor))?;
    rollouts.updated = true;
    if passed.on_policy {
        // Later updates of the same rollout compare with the first one.
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
        router: (!algorithm.router.is_off()).then_some(passed.router),
        tokens: passed.tokens,
    })
}
