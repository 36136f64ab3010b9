//! Forward and backward passes of one update.
//!
//! The model processes completions in packed streams, one after the other, and sums their gradients. The backward pass of the
//! media towers runs once, after the last stream.

use std::mem::take;
use std::ops::Range;

use omnigrpo_grpo::{Batch, MetricSums, Normalizer, evaluate};
use omnigrpo_models::{FeatureGradients, Features, Model, PackedStream, Prompt, Training};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rollout::Completion;

use crate::error::Result;
use crate::features;
use crate::gap::Gap;
use crate::rollouts::{Group, Rollouts, Scored};
use crate::step::{Algorithm, TokenNumbers};
use crate::streams::{Part, pack};
use crate::timing::timed;

/// State of the passes of an update.
pub(crate) struct Pass<'a> {
    model: &'a Model,
    /// Feature gradients summed per prompt.
    gradients: FeatureGradients,
    algorithm: &'a Algorithm,
    training: Training,
    /// Length of each completion, in the order of the rollout.
    lengths: Vec<usize>,
    truncated: Vec<bool>,
    /// Normalizer of the complete step.
    normalizer: Normalizer,
    /// Prompts of streams with a gradient of 0, which had no backward pass.
    idle: Vec<usize>,
    passed: Passed,
}

/// Results of the passes.
pub(crate) struct Passed {
    /// True if the weights have not changed since sampling.
    pub(crate) on_policy: bool,
    pub(crate) sums: MetricSums,
    /// Difference between the log-probabilities of the rollout and of the pass.
    pub(crate) gap: Gap,
    pub(crate) num_tokens: u64,
    /// Losses of the routers.
    pub(crate) router: [f64; 2],
    /// Log-probabilities of each completion, in the order of the rollout.
    pub(crate) logprobs: Vec<Vec<f32>>,
    /// All numbers of each completion, if the algorithm records them.
    pub(crate) tokens: Vec<TokenNumbers>,
}

impl<'a> Pass<'a> {
    pub(crate) fn new(
        model: &'a Model,
        algorithm: &'a Algorithm,
        training: Training,
        rollouts: &Rollouts,
    ) -> Result<Self> {
        let lengths: Vec<usize> = rollouts.completions().map(|c| c.completion.ids.len()).collect();
        let truncated: Vec<bool> = rollouts.completions().map(Scored::is_truncated).collect();
        let longest = algorithm.sampling.max_completion_length;
        let normalizer = Normalizer::for_step(&algorithm.loss, &lengths, &truncated, longest)?
            .with_kept_tokens(rollouts.kept_tokens());
        let mut sums = MetricSums::default();
        sums.add_completions(&lengths, &truncated)?;
        let rewards = &rollouts.rewards;
        let named = rewards.names.iter().map(String::as_str).zip(rewards.values.iter().map(Vec::as_slice));
        sums.add_rewards(&named.collect::<Vec<_>>(), &rewards.total, &rollouts.zero_std)?;
        let of_prompt = |group: &Group| {
            let each = group.completions.iter().map(|c| c.completion.ids.len()).filter(|&len| len > 0);
            each.map(|len| group.row.prompt.ids.len() + len - 1).sum::<usize>()
        };
        let step_tokens = [rollouts.groups.iter().map(of_prompt).sum(), lengths.iter().sum()];
        let training = Training { step_tokens, ..training };
        Ok(Self {
            model,
            gradients: FeatureGradients::default(),
            algorithm,
            training,
            passed: Passed {
                on_policy: rollouts.completions().all(|c| c.old.is_none()),
                sums,
                gap: Gap::default(),
                num_tokens: 0,
                router: [0.0; 2],
                logprobs: Vec::with_capacity(lengths.len()),
                tokens: Vec::new(),
            },
            lengths,
            truncated,
            normalizer,
            idle: Vec::new(),
        })
    }

    /// Runs the passes and leaves the gradient of the step in the weights.
    pub(crate) fn run(mut self, rollouts: &mut Rollouts, timer: &mut PhaseTimer) -> Result<Passed> {
        let algorithm = self.algorithm;
        let num_prompts = rollouts.groups.len();
        let (micro, group) = (algorithm.prompts_per_micro_batch.max(1), algorithm.num_generations);
        for first in (0..num_prompts).step_by(micro) {
            let last = (first + micro).min(num_prompts);
            let span = first * group..last * group;
            let normalizer = self.normalizer.for_micro_batch(
                &algorithm.loss,
                &self.lengths[span.clone()],
                &self.truncated[span],
                num_prompts.div_ceil(micro),
            )?;
            for stream in streams(rollouts, first..last, algorithm.stream_rows()) {
                let done = stream.first().map_or(first, |part| part.group);
                timer.activity().parts("prompts", done, num_prompts);
                self.stream(&stream, rollouts, &normalizer, timer)?;
            }
        }
        timer.activity().parts("prompts", num_prompts, num_prompts);

        let memories = take(&mut rollouts.memories);
        timed(timer, "backward", || {
            let prompts: Vec<&Prompt> = rollouts.groups.iter().map(|g| &*g.row.prompt).collect();
            let features: Vec<&[Features]> = rollouts.groups.iter().map(|g| g.features.as_slice()).collect();
            self.model.reach(&prompts, &self.idle, &mut self.gradients);
            self.model.backward_media(&prompts, &features, memories, self.gradients, self.training)
        })?;
        Ok(self.passed)
    }

    fn stream(
        &mut self,
        parts: &[Part],
        rollouts: &mut Rollouts,
        normalizer: &Normalizer,
        timer: &mut PhaseTimer,
    ) -> Result<()> {
        let plan = &self.algorithm.loss;
        let temperature = self.algorithm.sampling.scoring_temperature();
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let advantages: Vec<f64> = rollouts.members(parts).map(|c| c.advantage).collect();
        // No term of the loss depends on these completions, so they need no backward pass. They count in the metrics like all
        // others.
        let idle = advantages.iter().all(|&a| a == 0.0)
            && !plan.needs_reference()
            && !plan.needs_entropy()
            && self.training.router.is_off();
        let stream = PackedStream::new(&rollouts.stream(parts))?;
        // The recalled pass fits only the stream of the complete rollout. For other streams it is dropped to free its memory.
        let recalled = rollouts.recalled.take().filter(|_| !rollouts.updated && rollouts.is_whole(parts));

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
                let known = recalled.map(|memory| memory.of_stream(&stream)).transpose()?.flatten();
                self.model.recall_pass(&stream, &features, temperature, training, known.unwrap_or_default())
            })?;
            self.passed.num_tokens += stream.rows() as u64;
            (take(&mut pass.logprobs), take(&mut pass.entropies), Some(pass))
        };
        let old = rollouts.members(parts).filter_map(|c| c.old.as_deref()).flatten();
        let old: Vec<f64> = old.map(|&x| f64::from(x)).collect();
        let sampled = rollouts.members(parts).all(|c| c.completion.logprobs.len() == c.completion.ids.len());
        let sampler = rollouts.members(parts).flat_map(|c| &c.completion.logprobs);
        let sampler: Vec<f64> = sampler.map(|&x| f64::from(x)).collect();
        let truncated: Vec<bool> = rollouts.members(parts).map(Scored::is_truncated).collect();
        let reference: Option<Vec<&[f32]>> =
            rollouts.members(parts).map(|c| c.reference.as_deref()).collect();
        let reference = reference.map(|each| wide(&each.concat()));
        let kept: Option<Vec<&[bool]>> = rollouts.members(parts).map(|c| c.kept.as_deref()).collect();
        let kept = kept.map(|each| each.concat());
        let (logp, entropy) = (wide(&logprobs), wide(&entropies));
        let out = evaluate(
            &Batch {
                lengths: stream.lengths(),
                logp: &logp,
                old: (!self.passed.on_policy).then_some(&old),
                sampler: sampled.then_some(&sampler),
                reference: reference.as_deref(),
                entropy: Some(&entropy),
                kept: kept.as_deref(),
                advantages: &advantages,
                truncated: &truncated,
            },
            plan,
            normalizer,
        )?;
        self.passed.sums.merge(&out.sums);
        for (Scored { completion, .. }, own) in rollouts.members(parts).zip(stream.each(&logprobs)) {
            if self.passed.on_policy && pass.is_some() {
                self.passed.gap.add(&completion.logprobs, own);
            }
            self.passed.logprobs.push(own.to_vec());
        }
        if self.algorithm.token_stats {
            let each = rollouts.members(parts).zip(stream.each(&logprobs)).zip(stream.each(&entropies));
            self.passed.tokens.extend(each.map(|((scored, logprobs), entropies)| TokenNumbers {
                logprobs: logprobs.to_vec(),
                entropies: entropies.to_vec(),
                old: scored.old.clone().unwrap_or_default(),
                reference: scored.reference.clone().unwrap_or_default(),
                kept: scored.kept.clone().unwrap_or_default(),
            }));
        }
        let Some(pass) = pass.filter(|_| !idle) else {
            self.idle.extend(parts.iter().map(|p| p.group));
            return Ok(());
        };
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let dentropy = plan.needs_entropy().then(|| narrow(&out.dentropy));
        timed(timer, "backward", || {
            let groups: Vec<usize> = parts.iter().map(|p| p.group).collect();
            let router = pass.router();
            let gradients = pass.backward(&narrow(&out.dlogp), dentropy.as_deref())?;
            if let Some(router) = router {
                self.passed.router.iter_mut().zip(router.losses()).for_each(|(sum, own)| *sum += own);
            }
            self.gradients.add(gradients, &groups)
        })?;
        Ok(())
    }

    /// Returns the log-probabilities and entropies of a stream's tokens from the rollout, or `None` if they are incomplete, the
    /// weights have changed or an adapter uses dropout. A pass through the model would give the same numbers, except for
    /// rounding.
    fn as_drawn(&self, parts: &[Part], rollouts: &Rollouts) -> Option<(Vec<f32>, Vec<f32>)> {
        let drops = self.model.lora().is_some_and(|lora| lora.dropout > 0.0);
        let completions = || rollouts.members(parts).map(|c| &c.completion);
        let whole = |c: &Completion| c.logprobs.len() == c.ids.len() && c.entropies.len() == c.ids.len();
        if !self.passed.on_policy || drops || !completions().all(whole) {
            return None;
        }
        Some((
            completions().flat_map(|c| &c.logprobs).copied().collect(),
            completions().flat_map(|c| &c.entropies).copied().collect(),
        ))
    }
}

/// Packs groups of a rollout into streams.
fn streams(rollouts: &Rollouts, groups: Range<usize>, max_rows: usize) -> Vec<Vec<Part>> {
    let shapes: Vec<_> = rollouts.groups[groups.clone()].iter().map(Group::shape).collect();
    let mut streams = pack(&shapes, max_rows);
    streams.iter_mut().flatten().for_each(|part| part.group += groups.start);
    streams
}

/// Scores completions with a model and passes the log-probabilities and entropies of each to `keep`. `seen` returns the features
/// of a group's media for this model.
fn score(
    model: &Model,
    algorithm: &Algorithm,
    rollouts: &mut Rollouts,
    streams: Vec<Vec<Part>>,
    seen: impl Fn(&Group) -> Result<Vec<Features>>,
    keep: impl Fn(&mut Scored, &[f32], &[f32]),
) -> Result<()> {
    let temperature = algorithm.sampling.scoring_temperature();
    let mut last: Option<(usize, Vec<Features>)> = None;
    for parts in streams {
        let stream = PackedStream::new(&rollouts.stream(&parts))?;
        let mut features = Vec::with_capacity(parts.len());
        for part in &parts {
            // A group that was split continues in the next stream.
            let own = match last.take() {
                Some((group, own)) if group == part.group => own,
                _ => seen(&rollouts.groups[part.group])?,
            };
            features.push(own.clone());
            last = Some((part.group, own));
        }
        let (logprobs, entropies) = model.score(&stream, &features, temperature)?;
        let mut each = stream.each(&logprobs).zip(stream.each(&entropies));
        for part in &parts {
            let completions = &mut rollouts.groups[part.group].completions[part.completions.clone()];
            completions.iter_mut().zip(each.by_ref()).for_each(|(c, (logp, h))| keep(c, logp, h));
        }
    }
    Ok(())
}

/// Scores the completions with the weights that sampled them, for updates after the weights have changed.
pub(crate) fn old_logprobs(model: &Model, algorithm: &Algorithm, rollouts: &mut Rollouts) -> Result<()> {
    let streams = streams(rollouts, 0..rollouts.groups.len(), algorithm.stream_rows());
    let seen = |group: &Group| Ok(group.features.clone());
    score(model, algorithm, rollouts, streams, seen, |c, logp, _| c.old = Some(logp.to_vec()))
}

/// Computes the entropies of the current weights at each token of recorded completions. Each completion is a separate stream, so
/// that the entropies do not depend on `max_stream_tokens`.
pub(crate) fn entropies(model: &Model, algorithm: &Algorithm, rollouts: &mut Rollouts) -> Result<()> {
    let streams = streams(rollouts, 0..rollouts.groups.len(), 1);
    let seen = |group: &Group| Ok(group.features.clone());
    score(model, algorithm, rollouts, streams, seen, |c, _, h| c.completion.entropies = h.to_vec())
}

/// Scores the completions with the reference, in the streams of the update. The completions store the numbers for all updates.
pub(crate) fn reference_logprobs(
    reference: &Model,
    model: &Model,
    algorithm: &Algorithm,
    rollouts: &mut Rollouts,
) -> Result<()> {
    let num_prompts = rollouts.groups.len();
    let micro = algorithm.prompts_per_micro_batch.max(1);
    let micro_batches = (0..num_prompts).step_by(micro).map(|first| first..(first + micro).min(num_prompts));
    let streams =
        micro_batches.flat_map(|groups| streams(rollouts, groups, algorithm.stream_rows())).collect();
    let seen = |group: &Group| features::of_reference(reference, model, &group.row.prompt, &group.features);
    score(reference, algorithm, rollouts, streams, seen, |c, logp, _| c.reference = Some(logp.to_vec()))?;
    // The files are checked before the numbers are used.
    Ok(reference.files_unchanged()?)
}
