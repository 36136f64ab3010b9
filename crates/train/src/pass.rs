//! The forward and backward passes of one update.
//!
//! Completions go through the model in packed streams, one after the other, and their gradients add up. Media go back
//! through their towers once, after the last stream.

use std::mem::take;

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

/// The passes of an update, on their way.
pub(crate) struct Pass<'a> {
    model: &'a Model,
    reference: Option<&'a Model>,
    /// Features of each prompt's media as the reference sees them, once they were needed.
    reference_features: Vec<Option<Vec<Features>>>,
    /// Feature gradients summed per prompt.
    gradients: FeatureGradients,
    algorithm: &'a Algorithm,
    training: Training,
    /// Of each completion, in the order of the rollout.
    lengths: Vec<usize>,
    truncated: Vec<bool>,
    /// Of the whole step.
    normalizer: Normalizer,
    /// Prompts of streams whose gradient is 0, which were not carried back.
    idle: Vec<usize>,
    passed: Passed,
}

/// What the passes found.
pub(crate) struct Passed {
    /// Whether the weights are those that sampled.
    pub(crate) on_policy: bool,
    pub(crate) sums: MetricSums,
    /// Between log-probabilities of rollout and pass.
    pub(crate) gap: Gap,
    pub(crate) num_tokens: u64,
    /// Losses of routers.
    pub(crate) router: [f64; 2],
    /// Log-probabilities of each completion, in the order of the rollout.
    pub(crate) logprobs: Vec<Vec<f32>>,
    /// All numbers of each, where the algorithm asks for them.
    pub(crate) tokens: Vec<TokenNumbers>,
}

impl<'a> Pass<'a> {
    pub(crate) fn new(
        model: &'a Model,
        reference: Option<&'a Model>,
        algorithm: &'a Algorithm,
        training: Training,
        rollouts: &Rollouts,
    ) -> Result<Self> {
        let lengths: Vec<usize> = rollouts.completions().map(|c| c.completion.ids.len()).collect();
        let truncated: Vec<bool> = rollouts.completions().map(Scored::is_truncated).collect();
        let longest = algorithm.sampling.max_completion_length;
        let normalizer = Normalizer::for_step(&algorithm.loss, &lengths, &truncated, longest)?
            .with_entropy_gate(rollouts.entropy_gate);
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
            reference,
            reference_features: vec![None; rollouts.groups.len()],
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

    /// Leaves the gradient of the step in the weights.
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
            let shapes: Vec<_> = rollouts.groups[first..last].iter().map(Group::shape).collect();
            for mut stream in pack(&shapes, algorithm.stream_rows()) {
                stream.iter_mut().for_each(|part| part.group += first);
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
        let advantages: Vec<f64> = rollouts.members(parts).map(|c| c.advantage).collect();
        // No term of the loss depends on these completions, so there is nothing to carry back; they count as all others do.
        let idle = advantages.iter().all(|&a| a == 0.0)
            && !plan.needs_reference()
            && !plan.needs_entropy()
            && self.training.router.is_off();
        let stream = PackedStream::new(&rollouts.stream(parts))?;
        // It fits the stream of the whole rollout; for any other one it would be memory held for nothing.
        let recalled = rollouts.recalled.take().filter(|_| !rollouts.updated && rollouts.is_whole(parts));

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
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (logp, entropy) = (wide(&logprobs), wide(&entropies));
        let out = evaluate(
            &Batch {
                lengths: stream.lengths(),
                logp: &logp,
                old: (!self.passed.on_policy).then_some(&old),
                sampler: sampled.then_some(&sampler),
                reference: reference.as_deref(),
                entropy: Some(&entropy),
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
            // Before anybody learns from them.
            reference.files_unchanged()?;
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
        if !self.passed.on_policy || drops || !completions().all(whole) {
            return None;
        }
        Some((
            completions().flat_map(|c| &c.logprobs).copied().collect(),
            completions().flat_map(|c| &c.entropies).copied().collect(),
        ))
    }
}

/// Has the weights that sampled score the completions, for updates that come when the weights have changed.
///
/// # Errors
/// As [`Model::score`].
pub(crate) fn old_logprobs(model: &Model, algorithm: &Algorithm, rollouts: &mut Rollouts) -> Result<()> {
    let temperature = algorithm.sampling.scoring_temperature();
    let shapes: Vec<_> = rollouts.groups.iter().map(Group::shape).collect();
    for parts in pack(&shapes, algorithm.stream_rows()) {
        let stream = PackedStream::new(&rollouts.stream(&parts))?;
        let seen: Vec<Vec<Features>> =
            parts.iter().map(|part| rollouts.groups[part.group].features.clone()).collect();
        let (logprobs, _) = model.score(&stream, &seen, temperature)?;
        let mut each = stream.each(&logprobs);
        for part in &parts {
            let completions = &mut rollouts.groups[part.group].completions[part.completions.clone()];
            completions.iter_mut().for_each(|c| c.old = each.next().map(<[f32]>::to_vec));
        }
    }
    Ok(())
}
