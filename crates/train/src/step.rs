//! The training step: rollouts → rewards → advantages → log-probabilities → loss → update.

use std::mem::take;

use omnigrpo_data::RecordedRewards;
use omnigrpo_grpo::{
    AdvantageKind, Advantages, Batch, LossPlan, MetricSums, Normalizer, advantage, evaluate, mask,
};
use omnigrpo_models::{
    FeatureGradients, Features, GroupStream, Memories, Model, PackedStream, Prompt, PromptBuilder,
    SftExample, Training,
};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rewards::{Logged, RewardMatrix, RewardSet};
use omnigrpo_rollout::{Completion, FinishReason, Generator, Request, SamplingParams};

use crate::error::{Result, TrainError};
use crate::optimizer::AdamW;
use crate::rows::PreparedRow;
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

/// The groups of one rollout, scored; the input of `num_iterations` updates.
pub struct Rollouts {
    /// Rows with their prompts, in drawing order.
    pub rows: Vec<PreparedRow>,
    /// Completions of each row.
    pub completions: Vec<Vec<Completion>>,
    /// Features of each row's media.
    features: Vec<Vec<Features>>,
    /// What the towers computed for them, until the first update takes it.
    memories: Memories,
    /// Whether the weights have changed since the features were computed.
    updated: bool,
    /// Every reward of every completion, prompt-major.
    pub rewards: RewardMatrix,
    /// Advantage of each completion, prompt-major.
    pub advantages: Advantages,
    /// Log-probabilities the ratio compares with, per row and completion: those of the first update, or given ones.
    /// `None` before the first update: then the step is on-policy.
    pub old: Option<Vec<Vec<Vec<f32>>>>,
    /// Log-probabilities under the reference, per row and completion.
    reference: Vec<Vec<Vec<f32>>>,
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
    fn training(self, algorithm: &Algorithm) -> Training {
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

/// Samples completions for `rows` and scores them; with `shuffled`, which makes prompts with shuffled frames, answers
/// that need the order of the frames earn a bonus.
///
/// # Errors
/// As the rollout and the rewards.
pub fn collect(
    model: &Model,
    prompts: &PromptBuilder,
    shuffled: Option<&PromptBuilder>,
    rewards: &RewardSet,
    algorithm: &Algorithm,
    rows: Vec<PreparedRow>,
    step: u64,
    timer: &mut PhaseTimer,
) -> Result<Rollouts> {
    let activity = timer.activity().clone();
    let (features, memories) =
        timed(timer, "encode", || encode(model, algorithm, rows.iter().map(|row| &*row.prompt)))?;
    let completions = timed(timer, "rollout", || {
        let num_samples = algorithm.num_generations;
        let before = scoring::occurrences(rows.iter().map(|row| row.sample.row));
        let requests: Vec<Request> = rows
            .iter()
            .zip(&features)
            .zip(before)
            .map(|((row, features), before)| Request {
                prompt: &row.prompt,
                features,
                num_samples,
                rollout: step,
                row: row.sample.row,
                first_sample: before * num_samples as u32,
            })
            .collect();
        activity.parts("completions", 0, rows.len() * algorithm.num_generations);
        let generator = generator(model, prompts, algorithm);
        Ok::<_, TrainError>(generator.generate(&requests, |event| activity.token(event.last))?)
    })?;
    let mut matrix = timed(timer, "reward", || {
        let scored: Vec<_> = rows.iter().zip(&completions).map(|(r, c)| (&r.sample, c.as_slice())).collect();
        scoring::score(rewards, &scored, algorithm.seed, step).map_err(|e| scoring::unscored(e, &scored))
    })?;
    if let Some(shuffled) = shuffled {
        timed(timer, "shuffled_rollout", || {
            temporal::add_order_bonus(model, shuffled, rewards, algorithm, &rows, step, &mut matrix)
        })?;
    }
    assemble(algorithm, rows, completions, (features, memories), matrix, None)
}

/// Features of every prompt's media, for sampling and for the first update after it.
fn encode<'p>(
    model: &Model,
    algorithm: &Algorithm,
    prompts: impl Iterator<Item = &'p Prompt>,
) -> Result<(Vec<Vec<Features>>, Memories)> {
    if algorithm.recompute {
        // Whoever saves memory there does not want it spent here.
        let features = prompts.map(|prompt| Ok(model.encode_prompt(prompt)?)).collect::<Result<_>>()?;
        return Ok((features, Memories::default()));
    }
    Ok(model.encode_for_training(prompts)?)
}

/// Samples as the algorithm says.
pub(crate) fn generator<'a>(
    model: &'a Model,
    prompts: &'a PromptBuilder,
    algorithm: &'a Algorithm,
) -> Generator<'a> {
    Generator {
        model,
        tokenizer: prompts.tokenizer(),
        stops: prompts.stops(),
        params: &algorithm.sampling,
        max_live: algorithm.max_live,
    }
}

/// Takes completions and rewards from the rows themselves instead of sampling. What stands behind a completion's first
/// stop token is left out: other trainers record the padding, too.
///
/// # Errors
/// A row without completions or rewards, or with another number of them than the other rows.
pub fn replay(
    model: &Model,
    prompts: &PromptBuilder,
    algorithm: &Algorithm,
    rows: Vec<PreparedRow>,
    timer: &mut PhaseTimer,
) -> Result<Rollouts> {
    let (features, memories) =
        timed(timer, "encode", || encode(model, algorithm, rows.iter().map(|row| &*row.prompt)))?;
    let mut completions = Vec::with_capacity(rows.len());
    let mut names: Vec<String> = Vec::new();
    let mut values: Vec<Vec<Option<f64>>> = Vec::new();
    let mut old: Vec<Vec<Vec<f32>>> = Vec::new();
    for row in &rows {
        let sample = &row.sample;
        let fail = |what: String| TrainError::Data { what: format!("replay, row {}: {what}", sample.id) };
        let (Some(recorded), Some(recorded_rewards)) = (&sample.completions, &sample.rewards) else {
            return Err(fail("expected the columns `completions` and `rewards`".into()));
        };
        if recorded.len() != algorithm.num_generations {
            return Err(fail(format!(
                "{} completions, expected num_generations = {}",
                recorded.len(),
                algorithm.num_generations
            )));
        }
        let mut group = Vec::with_capacity(recorded.len());
        let mut given = Vec::with_capacity(recorded.len());
        for completion in recorded {
            let mut ids = prompts.recorded_ids(completion).map_err(|e| fail(e.to_string()))?;
            let length = mask::completion_length(&ids, &prompts.stops().ids);
            if let Some(logprobs) = &completion.logprobs {
                if logprobs.len() != ids.len() {
                    return Err(fail(format!("{} logprobs for {} tokens", logprobs.len(), ids.len())));
                }
                given.push(logprobs[..length].iter().map(|&x| x as f32).collect::<Vec<f32>>());
            }
            ids.truncate(length);
            let text = prompts
                .tokenizer()
                .decode(&ids, true)
                .map_err(|e| fail(format!("a completion cannot be decoded: {e}")))?;
            let truncated = completion.finish_reason.as_deref() == Some("length");
            let reason = if truncated { FinishReason::Length } else { FinishReason::Stop };
            group.push(Completion::recorded(ids, reason, text));
        }
        let (some, all) = (!given.is_empty(), given.len() == group.len());
        if all {
            old.push(given);
        }
        // Of the rows so far all have log-probabilities, or none.
        if some != all || ![0, completions.len() + 1].contains(&old.len()) {
            return Err(fail(
                "expected `logprobs` of every completion of all rows of a step, or of none; add the missing ones or remove \
                 the others"
                    .into(),
            ));
        }
        let named = match recorded_rewards {
            RecordedRewards::Total(list) => {
                vec![("replay".to_owned(), list.iter().map(|&r| Some(r)).collect())]
            }
            RecordedRewards::Named(list) => list.clone(),
        };
        if values.is_empty() {
            names = named.iter().map(|(name, _)| name.clone()).collect();
            values = vec![Vec::new(); names.len()];
        }
        for (i, (name, list)) in named.into_iter().enumerate() {
            if names.get(i) != Some(&name) || list.len() != group.len() {
                return Err(fail(format!(
                    "rewards {name:?} with {} values do not fit the other rows",
                    list.len()
                )));
            }
            values[i].extend(list);
        }
        completions.push(group);
    }
    let weights = vec![1.0; names.len()];
    let total = advantage::weighted_sum(&values, &weights)?;
    let matrix = RewardMatrix { names, values, weights, total, logged: Logged::default() };
    let old = (!old.is_empty()).then_some(old);
    assemble(algorithm, rows, completions, (features, memories), matrix, old)
}

fn assemble(
    algorithm: &Algorithm,
    rows: Vec<PreparedRow>,
    completions: Vec<Vec<Completion>>,
    (features, memories): (Vec<Vec<Features>>, Memories),
    rewards: RewardMatrix,
    old: Option<Vec<Vec<Vec<f32>>>>,
) -> Result<Rollouts> {
    let (kind, alpha) = (algorithm.advantage, algorithm.alpha);
    let group = algorithm.num_generations;
    let advantages = if algorithm.normalize_then_sum {
        advantage::normalize_then_sum(&rewards.values, &rewards.weights, group, alpha)?
    } else {
        advantage::advantages(&rewards.total, group, kind, alpha)?
    };
    let reference = vec![Vec::new(); rows.len()];
    Ok(Rollouts {
        rows,
        completions,
        features,
        memories,
        updated: false,
        rewards,
        advantages,
        old,
        reference,
    })
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
    let lengths: Vec<usize> = rollouts.completions.iter().flatten().map(|c| c.ids.len()).collect();
    let truncated: Vec<bool> =
        rollouts.completions.iter().flatten().map(|c| c.finish_reason == FinishReason::Length).collect();
    let plan = &algorithm.loss;
    let step_normalizer =
        Normalizer::for_step(plan, &lengths, &truncated, algorithm.sampling.max_completion_length)?;
    let mut sums = MetricSums::default();
    sums.add_completions(&lengths, &truncated)?;
    let named: Vec<(&str, &[Option<f64>])> = rollouts
        .rewards
        .names
        .iter()
        .zip(&rollouts.rewards.values)
        .map(|(name, values)| (name.as_str(), values.as_slice()))
        .collect();
    sums.add_rewards(&named, &rollouts.rewards.total, &rollouts.advantages)?;

    if rollouts.updated && model.trains_media() {
        rollouts.features = timed(timer, "encode", || encode_again(model, rollouts))?;
    }
    let group = algorithm.num_generations;
    let mut pass = Pass {
        model,
        reference,
        reference_features: vec![None; rollouts.rows.len()],
        gradients: FeatureGradients::default(),
        algorithm,
        training: at.training(algorithm),
        sums,
        gap: Gap::default(),
        idle: Vec::new(),
        num_tokens: 0,
        new_old: rollouts.rows.iter().map(|_| vec![Vec::new(); group]).collect(),
        on_policy: rollouts.old.is_none(),
    };
    let micro = algorithm.prompts_per_micro_batch.max(1);
    let micro_batches = rollouts.rows.len().div_ceil(micro);
    for first in (0..rollouts.rows.len()).step_by(micro) {
        let last = (first + micro).min(rollouts.rows.len());
        let span = first * group..last * group;
        let normalizer =
            step_normalizer.for_micro_batch(plan, &lengths[span.clone()], &truncated[span], micro_batches)?;
        let shapes: Vec<(usize, Vec<usize>)> = (first..last)
            .map(|r| {
                let lengths = rollouts.completions[r].iter().map(|c| c.ids.len()).collect();
                (rollouts.rows[r].prompt.ids.len(), lengths)
            })
            .collect();
        for mut stream in pack(&shapes, algorithm.max_stream_tokens) {
            stream.iter_mut().for_each(|part| part.group += first);
            let done = stream.first().map_or(first, |part| part.group);
            timer.activity().parts("prompts", done, rollouts.rows.len());
            pass.run(&stream, rollouts, &normalizer, timer)?;
        }
    }
    timer.activity().parts("prompts", rollouts.rows.len(), rollouts.rows.len());
    let Pass { sums, gap, idle, num_tokens, new_old, on_policy, mut gradients, training, .. } = pass;
    let memories = std::mem::take(&mut rollouts.memories);
    let prompts: Vec<&Prompt> = rollouts.rows.iter().map(|row| row.prompt.as_ref()).collect();
    timed(timer, "backward", || {
        model.reach(&prompts, &idle, &mut gradients);
        model.backward_media(&prompts, &rollouts.features, memories, gradients, training)
    })?;
    let mut sampler_gap = Gap::default();
    if on_policy {
        for c in rollouts.completions.iter().flatten() {
            sampler_gap.add(&c.sampler_logprobs, &c.logprobs);
        }
    }
    let update = timed(timer, "optimizer", || optimizer.step(at.learning_rate_factor))?;
    rollouts.updated = true;
    if on_policy {
        rollouts.old = Some(new_old);
    }
    Ok(StepOutcome {
        sums,
        grad_norm: update.grad_norm,
        params_without_grad: update.skipped,
        rollout_gap: gap.finish(),
        sampler_gap: sampler_gap.finish(),
        num_tokens,
    })
}

/// The forward and backward passes of one update.
struct Pass<'a> {
    model: &'a Model,
    reference: Option<&'a Model>,
    /// Features of each row's media as the reference sees them, once they were needed.
    reference_features: Vec<Option<Vec<Features>>>,
    /// Of all streams so far, by row: media go back through the tower once, after the last stream.
    gradients: FeatureGradients,
    algorithm: &'a Algorithm,
    training: Training,
    sums: MetricSums,
    gap: Gap,
    /// Rows of streams whose gradient is 0, which were not carried back.
    idle: Vec<usize>,
    num_tokens: u64,
    /// Log-probabilities of this update, which later updates of the same rollouts compare with.
    new_old: Vec<Vec<Vec<f32>>>,
    on_policy: bool,
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
        let group = self.algorithm.num_generations;
        let advantages: Vec<f64> = parts
            .iter()
            .flat_map(|p| p.completions.clone().map(|c| rollouts.advantages.values[p.group * group + c]))
            .collect();
        // No term of the loss depends on these completions, so there is nothing to carry back; they count as all others do.
        let idle = advantages.iter().all(|&a| a == 0.0) && !plan.needs_reference() && !plan.needs_entropy();
        let rows = &rollouts.rows;
        let groups: Vec<GroupStream> = parts
            .iter()
            .map(|p| GroupStream {
                prompt: &rows[p.group].prompt,
                completions: p
                    .completions
                    .clone()
                    .map(|c| rollouts.completions[p.group][c].ids.as_slice())
                    .collect(),
            })
            .collect();
        let stream = PackedStream::new(&groups)?;
        let temperature = self.algorithm.sampling.scoring_temperature();

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
                let own = |p: &Part| {
                    let (prompt, features) = (&rollouts.rows[p.group].prompt, &rollouts.features[p.group]);
                    self.model.features_in_training(prompt, features, self.training)
                };
                let features = parts.iter().map(own).collect::<omnigrpo_models::Result<Vec<_>>>()?;
                let training = Training { recompute: idle || self.training.recompute, ..self.training };
                self.model.train_pass(&stream, &features, temperature, training)
            })?;
            self.num_tokens += stream.rows() as u64;
            (take(&mut pass.logprobs), take(&mut pass.entropies), Some(pass))
        };
        let old: Option<Vec<f64>> = rollouts.old.as_ref().map(|old| {
            let tokens = parts.iter().flat_map(|p| p.completions.clone().flat_map(|c| &old[p.group][c]));
            tokens.map(|&x| f64::from(x)).collect()
        });
        let truncated: Vec<bool> = parts
            .iter()
            .flat_map(|p| &rollouts.completions[p.group][p.completions.clone()])
            .map(|c| c.finish_reason == FinishReason::Length)
            .collect();
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (logp, entropy) = (wide(&logprobs), wide(&entropies));
        let out = evaluate(
            &Batch {
                lengths: stream.lengths(),
                logp: &logp,
                old: old.as_deref(),
                reference: reference.as_deref(),
                entropy: Some(&entropy),
                advantages: &advantages,
                truncated: &truncated,
            },
            plan,
            normalizer,
        )?;
        self.sums.merge(&out.sums);
        self.record(parts, rollouts, &logprobs, pass.is_some());
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
        let known = parts.iter().all(|p| rollouts.reference[p.group].len() > p.completions.end - 1);
        if !known {
            let mut own = Vec::with_capacity(parts.len());
            for part in parts {
                let slot = &mut self.reference_features[part.group];
                if slot.is_none() {
                    let prompt = &rollouts.rows[part.group].prompt;
                    let features = &rollouts.features[part.group];
                    *slot = Some(reference_features(reference, self.model, prompt, features)?);
                }
                own.push(slot.clone().unwrap_or_default());
            }
            let (logprobs, _) = reference.score(stream, &own, temperature)?;
            let mut at = 0;
            for (part, lengths) in parts.iter().zip(lengths_by_part(parts, stream.lengths())) {
                let list = &mut rollouts.reference[part.group];
                list.resize(list.len().max(part.completions.end), Vec::new());
                for (c, len) in part.completions.clone().zip(lengths) {
                    list[c] = logprobs[at..at + len].to_vec();
                    at += len;
                }
            }
        }
        Ok(parts
            .iter()
            .flat_map(|p| p.completions.clone().flat_map(|c| &rollouts.reference[p.group][c]))
            .map(|&x| f64::from(x))
            .collect())
    }

    /// Log-probabilities and entropies of a stream's tokens as the rollout saw them, where the weights are still the same and
    /// no adapter drops inputs: what a pass through the model would give, but for rounding.
    fn as_drawn(&self, parts: &[Part], rollouts: &Rollouts) -> Option<(Vec<f32>, Vec<f32>)> {
        let drops = self.model.lora().is_some_and(|lora| lora.dropout > 0.0);
        let completions = || parts.iter().flat_map(|p| &rollouts.completions[p.group][p.completions.clone()]);
        let whole = |c: &Completion| c.logprobs.len() == c.ids.len() && c.entropies.len() == c.ids.len();
        if !self.on_policy || drops || !completions().all(whole) {
            return None;
        }
        Some((
            completions().flat_map(|c| &c.logprobs).copied().collect(),
            completions().flat_map(|c| &c.entropies).copied().collect(),
        ))
    }

    /// Keeps this update's log-probabilities for later ones and compares them with the rollout's, if they are not those.
    fn record(&mut self, parts: &[Part], rollouts: &Rollouts, logprobs: &[f32], computed: bool) {
        let mut at = 0;
        for part in parts {
            for c in part.completions.clone() {
                let completion = &rollouts.completions[part.group][c];
                let now = &logprobs[at..at + completion.ids.len()];
                at += now.len();
                if self.on_policy {
                    if computed {
                        self.gap.add(&completion.logprobs, now);
                    }
                    self.new_old[part.group][c] = now.to_vec();
                }
            }
        }
    }
}

/// Features after an update: through the tower again where it is trained, else through the projector alone.
fn encode_again(model: &Model, rollouts: &Rollouts) -> Result<Vec<Vec<Features>>> {
    use omnigrpo_ops::Part::{Audio, Vision};
    let towers = model.trains(Vision) || model.trains(Audio);
    rollouts
        .rows
        .iter()
        .zip(&rollouts.features)
        .map(
            |(row, old)| {
                if towers { Ok(model.encode_prompt(&row.prompt)?) } else { project(model, &row.prompt, old) }
            },
        )
        .collect()
}

fn project(model: &Model, prompt: &Prompt, features: &[Features]) -> Result<Vec<Features>> {
    let each = prompt.media.iter().zip(features);
    Ok(each
        .map(|(m, f)| model.project(&f.tower, m, &prompt.instruction))
        .collect::<omnigrpo_models::Result<_>>()?)
}

/// Features as the reference sees them: the policy's where tower and projector are the same weights, the tower's output
/// reused where only the projector differs.
fn reference_features(
    reference: &Model,
    policy: &Model,
    prompt: &Prompt,
    features: &[Features],
) -> Result<Vec<Features>> {
    if policy.trains_tower() {
        return Ok(reference.encode_prompt(prompt)?);
    }
    if policy.trains_projection() { project(reference, prompt, features) } else { Ok(features.to_vec()) }
}

fn lengths_by_part<'a>(parts: &'a [Part], lengths: &'a [usize]) -> impl Iterator<Item = &'a [usize]> {
    let mut at = 0;
    parts.iter().map(move |p| {
        let n = p.completions.len();
        at += n;
        &lengths[at - n..at]
    })
}

/// The difference between rollout and training log-probabilities.
#[derive(Default)]
struct Gap {
    max: f64,
    sum: f64,
    tokens: u64,
}

impl Gap {
    fn add(&mut self, rollout: &[f32], training: &[f32]) {
        for (a, b) in rollout.iter().zip(training) {
            let d = f64::from((a - b).abs());
            self.max = self.max.max(d);
            self.sum += d;
            self.tokens += 1;
        }
    }

    fn finish(&self) -> Option<(f64, f64)> {
        (self.tokens > 0).then(|| (self.max, self.sum / self.tokens as f64))
    }
}

/// One supervised update: the mean negative log-probability of the targets' tokens.
///
/// # Errors
/// A gradient that is not finite; weights are unchanged then.
pub fn imitate(
    model: &Model,
    optimizer: &mut AdamW,
    at: UpdateAt,
    algorithm: &Algorithm,
    examples: &[SftExample],
    timer: &mut PhaseTimer,
) -> Result<ImitationOutcome> {
    let shapes: Vec<(usize, Vec<usize>)> =
        examples.iter().map(|e| (e.prompt.ids.len(), vec![e.target.len()])).collect();
    let tokens: usize = examples.iter().map(|e| e.target.len()).sum();
    let weight = 1.0 / tokens.max(1) as f64;
    let training = at.training(algorithm);
    let (mut loss, mut entropy, mut num_tokens) = (0.0, 0.0, 0);
    for parts in pack(&shapes, algorithm.max_stream_tokens) {
        let done = parts.first().map_or(0, |part| part.group);
        timer.activity().parts("answers", done, examples.len());
        let members: Vec<&SftExample> = parts.iter().map(|p| &examples[p.group]).collect();
        let groups: Vec<GroupStream> =
            members.iter().map(|e| GroupStream { prompt: &e.prompt, completions: vec![&e.target] }).collect();
        let stream = PackedStream::new(&groups)?;
        num_tokens += stream.rows() as u64;
        let prompts: Vec<&Prompt> = members.iter().map(|e| &e.prompt).collect();
        let (features, memories) =
            timed(timer, "encode", || encode(model, algorithm, prompts.iter().copied()))?;
        let seen = timed(timer, "encode", || {
            let seen = prompts.iter().zip(&features);
            seen.map(|(p, own)| Ok(model.features_in_training(p, own, training)?)).collect::<Result<Vec<_>>>()
        })?;
        let pass = timed(timer, "forward", || model.train_pass(&stream, &seen, 1.0, training))?;
        loss -= weight * pass.logprobs.iter().map(|&x| f64::from(x)).sum::<f64>();
        entropy += weight * pass.entropies.iter().map(|&x| f64::from(x)).sum::<f64>();
        let dlogp = vec![-weight as f32; stream.num_targets()];
        timed(timer, "backward", || {
            let gradients = pass.backward(&dlogp, None)?;
            model.backward_media(&prompts, &features, memories, gradients, training)
        })?;
    }
    let update = timed(timer, "optimizer", || optimizer.step(at.learning_rate_factor))?;
    Ok(ImitationOutcome {
        loss,
        entropy,
        grad_norm: update.grad_norm,
        params_without_grad: update.skipped,
        num_tokens,
    })
}

/// What a supervised update did.
#[derive(Clone, Copy, Debug)]
pub struct ImitationOutcome {
    /// Mean negative log-probability per target token, nats.
    pub loss: f64,
    /// Mean entropy at target tokens, nats.
    pub entropy: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Trained weights without a gradient.
    pub params_without_grad: usize,
    /// Rows that went through the decoder.
    pub num_tokens: u64,
}

/// A rollout from its parts, for tests and for resuming in the middle of a buffer.
///
/// # Errors
/// As the advantages.
pub fn restore(
    algorithm: &Algorithm,
    model: &Model,
    rows: Vec<PreparedRow>,
    completions: Vec<Vec<Completion>>,
    rewards: RewardMatrix,
    old: Option<Vec<Vec<Vec<f32>>>>,
) -> Result<Rollouts> {
    let features =
        rows.iter().map(|row| Ok(model.encode_prompt(&row.prompt)?)).collect::<Result<Vec<_>>>()?;
    assemble(algorithm, rows, completions, (features, Memories::default()), rewards, old)
}
