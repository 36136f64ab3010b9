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
//! | CISPO, arXiv 2506.13585 | min(rᵢₜ, cap) is a constant weight on Aᵢ log π(oᵢₜ) | `LossPlan` |
//!
//! L is a function of log-probabilities alone, so `omnigrpo_grpo::evaluate` gives L and dL/dlog π in closed form and the
//! model carries the derivative back. Streams of a step add their gradients: the `Normalizer` is made for all of it first.

use std::mem::take;

use omnigrpo_grpo::{AdvantageKind, Batch, LossPlan, MetricSums, Normalizer, evaluate};
use omnigrpo_models::{FeatureGradients, Features, Model, PackedStream, Prompt, PromptBuilder, Training};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rewards::RewardSet;
use omnigrpo_rollout::{Completion, Generator, SamplingParams};

use crate::error::{Result, TrainError};
use crate::features;
use crate::gap::Gap;
use crate::optimizer::AdamW;
use crate::rollouts::{Group, Rollouts, Scored};
use crate::rows::{PreparedRow, requests};
use crate::scoring;
use crate::streams::{Part, pack};
use crate::temporal;
use crate::timing::timed;

/// What an algorithm needs to know for a step. The same for all steps of a run.
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
    /// Rows of one packed stream at most.
    pub max_stream_tokens: usize,
    /// Recompute activations in the backward pass.
    pub recompute: bool,
    /// Prompts of one micro-batch: the unit of `bnpo`'s mean.
    pub prompts_per_micro_batch: usize,
    /// Keys all random numbers.
    pub seed: u64,
}

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
        Training { recompute: algorithm.recompute, dropout_key }
    }
}

/// What an update did.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// Sums behind the metrics.
    pub sums: MetricSums,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Trained weights without a gradient.
    pub params_without_grad: usize,
    /// |log p(rollout) − log p(training)|, both at the scoring temperature, over the tokens that went through the model:
    /// largest and mean. Only for sampled, on-policy steps.
    pub rollout_gap: Option<(f64, f64)>,
    /// |log p(rollout) − log q|, where q is the distribution that tokens were drawn from, after temperature, penalties and
    /// truncation: largest and mean. Only for sampled, on-policy steps.
    pub sampler_gap: Option<(f64, f64)>,
    /// Prompt and completion tokens that went through the model.
    pub num_tokens: u64,
}

/// What a rollout is made with.
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

impl Collector<'_> {
    /// Samples completions for `rows` and scores them. `rollout` numbers the rollout, for its random numbers.
    ///
    /// # Errors
    /// As the rollout and the rewards.
    pub fn collect(&self, rows: Vec<PreparedRow>, rollout: u64, timer: &mut PhaseTimer) -> Result<Rollouts> {
        let Self { model, prompts, shuffled, rewards, algorithm } = *self;
        let activity = timer.activity().clone();
        let (features, memories) = timed(timer, "encode", || {
            features::encode(model, algorithm, rows.iter().map(|row| &*row.prompt))
        })?;
        let completions = timed(timer, "rollout", || {
            let requests = requests(&rows, &features, algorithm.num_generations, rollout);
            activity.parts("completions", 0, rows.len() * algorithm.num_generations);
            let generator = Generator::new(model, prompts, &algorithm.sampling, algorithm.max_live);
            Ok::<_, TrainError>(generator.generate(&requests, |event| activity.token(event.last))?)
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
        Rollouts::new(algorithm, groups.collect(), memories, matrix)
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
    let plan = &algorithm.loss;
    let lengths: Vec<usize> = rollouts.completions().map(|c| c.completion.ids.len()).collect();
    let truncated: Vec<bool> = rollouts.completions().map(Scored::is_truncated).collect();
    let step_normalizer =
        Normalizer::for_step(plan, &lengths, &truncated, algorithm.sampling.max_completion_length)?;
    let mut sums = MetricSums::default();
    sums.add_completions(&lengths, &truncated)?;
    let rewards = &rollouts.rewards;
    let named = rewards.names.iter().map(String::as_str).zip(rewards.values.iter().map(Vec::as_slice));
    sums.add_rewards(&named.collect::<Vec<_>>(), &rewards.total, &rollouts.zero_std)?;

    if rollouts.updated && model.trains_media() {
        timed(timer, "encode", || features::encode_again(model, &mut rollouts.groups))?;
    }
    let num_prompts = rollouts.groups.len();
    let mut pass = Pass {
        model,
        reference,
        reference_features: vec![None; num_prompts],
        gradients: FeatureGradients::default(),
        algorithm,
        training: at.training(algorithm),
        on_policy: rollouts.completions().all(|c| c.old.is_none()),
        sums,
        gap: Gap::default(),
        idle: Vec::new(),
        num_tokens: 0,
        logprobs: Vec::with_capacity(lengths.len()),
    };
    let (micro, group) = (algorithm.prompts_per_micro_batch.max(1), algorithm.num_generations);
    for first in (0..num_prompts).step_by(micro) {
        let last = (first + micro).min(num_prompts);
        let span = first * group..last * group;
        let normalizer = step_normalizer.for_micro_batch(
            plan,
            &lengths[span.clone()],
            &truncated[span],
            num_prompts.div_ceil(micro),
        )?;
        let shapes: Vec<_> = rollouts.groups[first..last].iter().map(Group::shape).collect();
        for mut stream in pack(&shapes, algorithm.max_stream_tokens) {
            stream.iter_mut().for_each(|part| part.group += first);
            let done = stream.first().map_or(first, |part| part.group);
            timer.activity().parts("prompts", done, num_prompts);
            pass.run(&stream, rollouts, &normalizer, timer)?;
        }
    }
    timer.activity().parts("prompts", num_prompts, num_prompts);

    let Pass { sums, gap, idle, num_tokens, logprobs, on_policy, mut gradients, training, .. } = pass;
    let memories = take(&mut rollouts.memories);
    timed(timer, "backward", || {
        let prompts: Vec<&Prompt> = rollouts.groups.iter().map(|g| &*g.row.prompt).collect();
        let features: Vec<&[Features]> = rollouts.groups.iter().map(|g| g.features.as_slice()).collect();
        model.reach(&prompts, &idle, &mut gradients);
        model.backward_media(&prompts, &features, memories, gradients, training)
    })?;
    let mut sampler_gap = Gap::default();
    if on_policy {
        for Scored { completion: c, .. } in rollouts.completions() {
            sampler_gap.add(&c.sampler_logprobs, &c.logprobs);
        }
    }
    let done = timed(timer, "optimizer", || optimizer.step(at.learning_rate_factor))?;
    rollouts.updated = true;
    if on_policy {
        // Later updates of the same rollout compare with the first one.
        let completions = rollouts.groups.iter_mut().flat_map(|group| &mut group.completions);
        completions.zip(logprobs).for_each(|(c, own)| c.old = Some(own));
    }
    Ok(StepOutcome {
        sums,
        grad_norm: done.grad_norm,
        params_without_grad: done.skipped,
        rollout_gap: gap.finish(),
        sampler_gap: sampler_gap.finish(),
        num_tokens,
    })
}

/// The forward and backward passes of one update, a stream at a time.
struct Pass<'a> {
    model: &'a Model,
    reference: Option<&'a Model>,
    /// Features of each prompt's media as the reference sees them, once they were needed.
    reference_features: Vec<Option<Vec<Features>>>,
    /// Feature gradients summed per prompt: media go back through the tower once, after the last stream.
    gradients: FeatureGradients,
    algorithm: &'a Algorithm,
    training: Training,
    /// Whether the weights are those that sampled.
    on_policy: bool,
    sums: MetricSums,
    gap: Gap,
    /// Prompts of streams whose gradient is 0, which were not carried back.
    idle: Vec<usize>,
    num_tokens: u64,
    /// Log-probabilities of each completion, in the order of the rollout.
    logprobs: Vec<Vec<f32>>,
}

impl Pass<'_> {
    fn run(
        &mut self,
        parts: &[Part],
        rollouts: &mut Rollouts,
        normalizer: &Normalizer,
        timer: &mut PhaseTimer,
    ) -> Result<()> {
        let plan = &self.algorithm.loss;
        let temperature = self.algorithm.sampling.scoring_temperature();
        let advantages: Vec<f64> = rollouts.members(parts).map(|c| c.advantage).collect();
        // No term of the loss depends on these completions, so there is nothing to carry back; they count as all others do.
        let idle = advantages.iter().all(|&a| a == 0.0) && !plan.needs_reference() && !plan.needs_entropy();
        let stream = PackedStream::new(&rollouts.stream(parts))?;

        let reference = match self.reference.filter(|_| plan.needs_reference()) {
            Some(reference) => Some(timed(timer, "reference", || {
                self.reference_logprobs(reference, &stream, parts, rollouts, temperature)
            })?),
            None => None,
        };
        let drawn = if idle { self.as_drawn(parts, rollouts) } else { None };
        let (logprobs, entropies, pass) = if let Some((logprobs, entropies)) = drawn {
            (logprobs, entropies, None)
        } else {
            let mut pass = timed(timer, "forward", || {
                let seen = |part: &Part| {
                    let Group { row, features, .. } = &rollouts.groups[part.group];
                    self.model.features_in_training(&row.prompt, features, self.training)
                };
                let features = parts.iter().map(seen).collect::<omnigrpo_models::Result<Vec<_>>>()?;
                let training = Training { recompute: idle || self.training.recompute, ..self.training };
                self.model.train_pass(&stream, &features, temperature, training)
            })?;
            self.num_tokens += stream.rows() as u64;
            (take(&mut pass.logprobs), take(&mut pass.entropies), Some(pass))
        };
        let old = rollouts.members(parts).filter_map(|c| c.old.as_deref()).flatten();
        let old: Vec<f64> = old.map(|&x| f64::from(x)).collect();
        let truncated: Vec<bool> = rollouts.members(parts).map(Scored::is_truncated).collect();
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (logp, entropy) = (wide(&logprobs), wide(&entropies));
        let out = evaluate(
            &Batch {
                lengths: stream.lengths(),
                logp: &logp,
                old: (!self.on_policy).then_some(&old),
                reference: reference.as_deref(),
                entropy: Some(&entropy),
                advantages: &advantages,
                truncated: &truncated,
            },
            plan,
            normalizer,
        )?;
        self.sums.merge(&out.sums);
        for (Scored { completion, .. }, own) in rollouts.members(parts).zip(stream.each(&logprobs)) {
            if self.on_policy && pass.is_some() {
                self.gap.add(&completion.logprobs, own);
            }
            self.logprobs.push(own.to_vec());
        }
        let Some(pass) = pass.filter(|_| !idle) else {
            self.idle.extend(parts.iter().map(|p| p.group));
            return Ok(());
        };
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let dentropy = plan.needs_entropy().then(|| narrow(&out.dentropy));
        timed(timer, "backward", || {
            let groups: Vec<usize> = parts.iter().map(|p| p.group).collect();
            let gradients = pass.backward(&narrow(&out.dlogp), dentropy.as_deref())?;
            self.gradients.add(gradients, &groups)
        })?;
        Ok(())
    }

    /// Reference log-probabilities of a stream's tokens, computed at the first update of a rollout and kept for the rest.
    fn reference_logprobs(
        &mut self,
        reference: &Model,
        stream: &PackedStream,
        parts: &[Part],
        rollouts: &mut Rollouts,
        temperature: f32,
    ) -> Result<Vec<f64>> {
        if rollouts.members(parts).any(|c| c.reference.is_none()) {
            let mut seen = Vec::with_capacity(parts.len());
            for part in parts {
                let slot = &mut self.reference_features[part.group];
                if slot.is_none() {
                    let Group { row, features, .. } = &rollouts.groups[part.group];
                    *slot = Some(features::of_reference(reference, self.model, &row.prompt, features)?);
                }
                seen.push(slot.clone().unwrap_or_default());
            }
            let (logprobs, _) = reference.score(stream, &seen, temperature)?;
            let mut each = stream.each(&logprobs);
            for part in parts {
                let completions = &mut rollouts.groups[part.group].completions[part.completions.clone()];
                completions.iter_mut().for_each(|c| c.reference = each.next().map(<[f32]>::to_vec));
            }
        }
        let known = rollouts.members(parts).filter_map(|c| c.reference.as_deref()).flatten();
        Ok(known.map(|&x| f64::from(x)).collect())
    }

    /// Log-probabilities and entropies of a stream's tokens as the rollout saw them, where the weights are still the same and
    /// no adapter drops inputs: what a pass through the model would give, but for rounding.
    fn as_drawn(&self, parts: &[Part], rollouts: &Rollouts) -> Option<(Vec<f32>, Vec<f32>)> {
        let drops = self.model.lora().is_some_and(|lora| lora.dropout > 0.0);
        let completions = || rollouts.members(parts).map(|c| &c.completion);
        let whole = |c: &Completion| c.logprobs.len() == c.ids.len() && c.entropies.len() == c.ids.len();
        if !self.on_policy || drops || !completions().all(whole) {
            return None;
        }
        Some((
            completions().flat_map(|c| &c.logprobs).copied().collect(),
            completions().flat_map(|c| &c.entropies).copied().collect(),
        ))
    }
}
