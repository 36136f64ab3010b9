//! Forward and backward passes of one update.
//!
//! The model processes completions in packed streams, one after the other, and sums their gradients. The backward pass of the
//! media towers runs once per leaf, after its last stream. The gradients of the leaves are then summed over all ranks.

use std::mem::{replace, take};
use std::ops::Range;

use omnigrpo_grpo::{Batch, Covariance, LossOutput, MetricSums, Normalizer, TeacherTokens, evaluate};
use omnigrpo_models::{
    DecoderMemory, FeatureGradients, Features, Memories, Model, PackedStream, Prompt, StreamPass,
    StreamScores, Top, TopTokens, Training,
};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rollout::Completion;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::exchange::Exchange;
use crate::features;
use crate::gap::Gap;
use crate::lender::{Lender, Models, in_turns};
use crate::optimizer::AdamW;
use crate::rollouts::{Group, Kept, Reader, Rollouts, Scored};
use crate::step::{Divided, TokenNumbers};
use crate::streams::{Part, pack};
use crate::timing::timed;

/// State of the passes of an update.
pub(crate) struct Pass<'a> {
    model: &'a Model,
    /// Lender of the model's weights.
    lender: Option<&'a Lender>,
    /// Groups of the current leaf.
    leaf: Range<usize>,
    /// Feature gradients summed per prompt of the leaf.
    gradients: FeatureGradients,
    /// Decoder results of the rollout for the leaf.
    recalled: Option<DecoderMemory>,
    algorithm: &'a Divided,
    training: Training,
    /// Length of each completion, in the order of the rollout.
    lengths: Vec<usize>,
    truncated: Vec<bool>,
    /// Normalizer of the complete step.
    normalizer: Normalizer,
    /// Prompts of the leaf's streams with a gradient of 0, which had no backward pass.
    idle: Vec<usize>,
    passed: Passed,
}

/// Passes that a stream needs.
enum Way {
    /// None: no term of the loss depends on the completions, and the rollout has their numbers. They count in the metrics like all
    /// others.
    Known(Scores),
    /// A forward pass for the numbers: no term of the loss depends on the completions.
    Score,
    /// A forward and a backward pass, with the decoder results of the rollout if it kept them.
    Train(Option<DecoderMemory>),
}

/// Numbers of a stream's tokens, completion by completion, in nats.
struct Scores {
    logprobs: Vec<f32>,
    entropies: Vec<f32>,
    /// Log-probabilities of the teacher's tokens, `[tokens, k]`.
    teacher: Vec<f32>,
}

/// Results of the passes, for a leaf or for all of them.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Passed {
    /// True if the weights have not changed since sampling.
    pub(crate) on_policy: bool,
    pub(crate) sums: MetricSums,
    /// Difference between the log-probabilities of the rollout and of the pass.
    pub(crate) gap: Gap,
    pub(crate) num_tokens: u64,
    /// Number of completion rows that use other experts than in the rollout, and of all compared rows.
    pub(crate) experts: [usize; 2],
    /// Losses of the routers.
    pub(crate) router: [f64; 2],
    /// Log-probabilities of each completion, in the order of the rollout.
    pub(crate) logprobs: Vec<Vec<f32>>,
    /// All numbers of each completion, if the algorithm records them.
    pub(crate) tokens: Vec<TokenNumbers>,
}

impl Passed {
    /// Adds the results of the next leaf.
    fn merge(&mut self, leaf: Self) {
        self.sums.merge(&leaf.sums);
        self.gap.merge(&leaf.gap);
        self.num_tokens += leaf.num_tokens;
        self.experts.iter_mut().zip(leaf.experts).for_each(|(sum, own)| *sum += own);
        self.router.iter_mut().zip(leaf.router).for_each(|(sum, own)| *sum += own);
        self.logprobs.extend(leaf.logprobs);
        self.tokens.extend(leaf.tokens);
    }
}

impl<'a> Pass<'a> {
    pub(crate) fn new(
        models: Models<'a>,
        algorithm: &'a Divided,
        training: Training,
        rollouts: &Rollouts,
    ) -> Result<Self> {
        let lengths: Vec<usize> = rollouts.completions().map(|c| c.completion.num_sampled()).collect();
        let truncated: Vec<bool> = rollouts.completions().map(Scored::is_truncated).collect();
        let longest = algorithm.sampling.max_completion_length;
        let normalizer = Normalizer::for_step(&algorithm.loss, &lengths, &truncated, longest)?
            .with_kept_tokens(rollouts.kept_tokens());
        let mut sums = MetricSums::default();
        sums.add_completions(&lengths, &truncated)?;
        let rewards = &rollouts.rewards;
        let named = rewards.names.iter().map(String::as_str).zip(rewards.values.iter().map(Vec::as_slice));
        sums.add_rewards(&named.collect::<Vec<_>>(), &rewards.total, &lengths, &rollouts.zero_std)?;
        let of_prompt = |group: &Group| {
            let each = group.completions.iter().map(|c| c.completion.ids.len()).filter(|&len| len > 0);
            each.map(|len| group.row.prompt.ids.len() + len - 1).sum::<usize>()
        };
        let step_tokens = [rollouts.groups.iter().map(of_prompt).sum(), lengths.iter().sum()];
        let training = Training { step_tokens, ..training };
        Ok(Self {
            model: models.policy,
            lender: models.of_policy(),
            leaf: 0..0,
            gradients: FeatureGradients::default(),
            recalled: None,
            algorithm,
            training,
            passed: Passed {
                on_policy: rollouts.completions().all(|c| c.old.is_none()),
                sums,
                ..Passed::default()
            },
            lengths,
            truncated,
            normalizer,
            idle: Vec::new(),
        })
    }

    /// Runs the passes of this rank's leaves and sums the gradient of the step over all ranks for the optimizer. Returns the results
    /// of all leaves. `done` is the result of this rank's preparation.
    pub(crate) fn run(
        mut self,
        mut done: Result<()>,
        rollouts: &mut Rollouts,
        optimizer: &mut AdamW,
        timer: &mut PhaseTimer,
    ) -> Result<Passed> {
        let split = &self.algorithm.split;
        let on_policy = self.passed.on_policy;
        let of_leaf = || Passed { on_policy, ..Passed::default() };
        let mut passed = replace(&mut self.passed, of_leaf());
        let mut own = Vec::new();
        optimizer.exchange().begin(split);
        // A rank that has failed takes part in the exchanges of its other leaves.
        for (number, leaf) in split.own_leaves(rollouts.groups.len(), self.algorithm.micro()) {
            let passed = self.leaf(leaf, done, rollouts, optimizer, timer);
            own.push((number, replace(&mut self.passed, of_leaf())));
            done = optimizer.exchange().end_leaf(passed);
        }
        let done = done.and_then(|()| optimizer.exchange().reserve(self.model.device()));
        let each = split.collect(split.num_leaves(), done.map(|()| own))?;
        if !split.is_off() {
            timed(timer, "exchange", || optimizer.exchange().sum())?;
        }
        each.into_iter().for_each(|leaf| passed.merge(leaf));
        Ok(passed)
    }

    /// Adds the gradient of a leaf to the gradient in the weights. `ready` is the result of the work before it.
    fn leaf(
        &mut self,
        leaf: Range<usize>,
        ready: Result<()>,
        rollouts: &mut Rollouts,
        optimizer: &mut AdamW,
        timer: &mut PhaseTimer,
    ) -> Result<()> {
        let algorithm = self.algorithm;
        let num_prompts = rollouts.groups.len();
        let (micro, group) = (algorithm.micro(), algorithm.num_generations);
        let kept = rollouts.kept.extract_if(.., |kept| kept.groups == leaf).next();
        let (memories, recalled) =
            kept.map(|Kept { memories, recalled, .. }| (memories, recalled)).unwrap_or_default();
        (self.leaf, self.recalled) = (leaf.clone(), recalled);
        let of_micro_batch = |first: usize| -> Result<Vec<_>> {
            let last = (first + micro).min(leaf.end);
            let span = first * group..last * group;
            let normalizer = self.normalizer.for_micro_batch(
                &algorithm.loss,
                &self.lengths[span.clone()],
                &self.truncated[span],
                num_prompts.div_ceil(micro),
            )?;
            let streams = streams(rollouts, first..last, algorithm.stream_rows(), Reader::Policy).into_iter();
            Ok(streams.map(|stream| (first, stream, normalizer)).collect())
        };
        let batches = leaf.clone().step_by(micro);
        let work = ready.and_then(|()| batches.map(of_micro_batch).collect::<Result<Vec<_>>>());
        let work = work.map(|each| each.concat());
        let split = &algorithm.split;
        in_turns(
            split,
            self.lender,
            true,
            work,
            &mut (&mut *self, &mut *optimizer, &mut *timer),
            |(pass, optimizer, timer), (first, stream, normalizer), is_last| {
                // With several leaves, gradients are summed before they are used.
                if is_last && split.is_off() {
                    optimizer.announce_last_pass(pass.model.decoder());
                }
                let done = stream.first().map_or(first, |part| part.group);
                timer.activity().parts("prompts", done, num_prompts);
                let exchange = is_last.then(|| optimizer.exchange());
                pass.stream(&stream, rollouts, &normalizer, exchange, timer)
            },
            |(_, optimizer, _), block| optimizer.exchange().block_done(block),
        )?;
        timer.activity().parts("prompts", leaf.end, num_prompts);
        timed(timer, "backward", || self.media(&rollouts.groups[leaf], memories, optimizer))?;
        // The files of weights are checked before the gradients are used.
        Ok(self.model.files_unchanged()?)
    }

    /// Runs the backward pass of the media towers for the groups of a leaf.
    fn media(&mut self, groups: &[Group], memories: Memories, optimizer: &mut AdamW) -> Result<()> {
        let prompts: Vec<&Prompt> = groups.iter().map(|g| &*g.row.prompt).collect();
        let features: Vec<&[Features]> = groups.iter().map(|g| g.features.as_slice()).collect();
        let (mut gradients, idle) = (take(&mut self.gradients), take(&mut self.idle));
        if !idle.is_empty() {
            optimizer.exchange().reach_decoder(self.model);
        }
        self.model.reach_media(&prompts, &features, &idle, &mut gradients);
        Ok(self.model.backward_media(&prompts, &features, memories, gradients, self.training)?)
    }

    /// Runs the passes of a stream and adds its loss. `exchange` is given for the last stream of a leaf, whose backward pass
    /// completes gradients.
    fn stream(
        &mut self,
        parts: &[Part],
        rollouts: &Rollouts,
        normalizer: &Normalizer,
        exchange: Option<&mut Exchange>,
        timer: &mut PhaseTimer,
    ) -> Result<()> {
        let stream = rollouts.packed(parts, Reader::Policy)?;
        let (way, recompute) = (self.way(parts, rollouts), self.training.recompute);
        let runs = !matches!(way, Way::Known(_));
        let mut forward = |recalled, recompute| {
            timed(timer, "forward", || self.forward(&stream, parts, rollouts, recalled, recompute))
        };
        let (scores, pass) = match way {
            Way::Known(scores) => (scores, None),
            Way::Score => (forward(None, true)?.0, None),
            Way::Train(recalled) => {
                let (scores, pass) = forward(recalled, recompute)?;
                (scores, Some(pass))
            }
        };
        let loss = self.loss(&stream, parts, rollouts, &scores, normalizer)?;
        self.record(&stream, parts, rollouts, &scores);
        self.passed.sums.merge(&loss.sums);
        match pass {
            Some(pass) => timed(timer, "backward", || self.backward(pass, parts, &loss, exchange))?,
            None => self.idle.extend(parts.iter().map(|part| part.group - self.leaf.start)),
        }
        if runs {
            self.passed.experts.iter_mut().zip(stream.other_experts()).for_each(|(sum, own)| *sum += own);
        }
        Ok(())
    }

    /// Decides which passes a stream needs.
    fn way(&mut self, parts: &[Part], rollouts: &Rollouts) -> Way {
        // The recalled pass fits only the stream of the complete leaf. For other streams it is dropped to free its memory.
        let recalled = self.recalled.take();
        let recalled = recalled.filter(|_| !rollouts.updated && rollouts.is_whole(parts, self.leaf.clone()));
        let plan = &self.algorithm.loss;
        let idle = rollouts.members(parts).all(|c| c.advantage == 0.0)
            && !plan.needs_reference()
            && !plan.needs_entropy()
            // Chosen tokens pay for their distance from sampling, whatever their advantage.
            && !matches!(plan.covariance, Covariance::Kl { .. })
            && self.training.router.is_off();
        match idle.then(|| self.as_drawn(parts, rollouts)) {
            None => Way::Train(recalled),
            Some(None) => Way::Score,
            Some(Some(scores)) => Way::Known(scores),
        }
    }

    /// Returns the log-probabilities and entropies of a stream's tokens from the rollout, or `None` if they are incomplete, the
    /// weights have changed or an adapter uses dropout. A pass through the model would give the same numbers, except for
    /// rounding.
    fn as_drawn(&self, parts: &[Part], rollouts: &Rollouts) -> Option<Scores> {
        let drops = self.model.lora().is_some_and(|lora| lora.dropout > 0.0);
        let completions = || rollouts.members(parts).map(|c| &c.completion);
        let whole = |c: &Completion| [c.logprobs.len(), c.entropies.len()] == [c.num_sampled(); 2];
        if !self.passed.on_policy || drops || !completions().all(whole) {
            return None;
        }
        Some(Scores {
            logprobs: completions().flat_map(|c| &c.logprobs).copied().collect(),
            entropies: completions().flat_map(|c| &c.entropies).copied().collect(),
            teacher: Vec::new(),
        })
    }

    /// Runs the forward pass of a stream. Blocks whose results are `recalled` do not run.
    fn forward<'s>(
        &mut self,
        stream: &'s PackedStream,
        parts: &[Part],
        rollouts: &Rollouts,
        recalled: Option<DecoderMemory>,
        recompute: bool,
    ) -> Result<(Scores, StreamPass<'s>)>
    where
        'a: 's,
    {
        let (model, training) = (self.model, self.training);
        let seen = |part: &Part| {
            let Group { row, features, .. } = &rollouts.groups[part.group];
            model.features_in_training(&row.prompt, features, training)
        };
        let features = parts.iter().map(seen).collect::<omnigrpo_models::Result<Vec<_>>>()?;
        let known = recalled.map(|memory| memory.of_stream(stream)).transpose()?.flatten();
        let training = Training { recompute, ..training };
        let mut pass = model.train_pass(stream, &features, training, known)?;
        let scores = Scores {
            logprobs: take(&mut pass.logprobs),
            entropies: take(&mut pass.entropies),
            teacher: take(&mut pass.teacher),
        };
        self.passed.num_tokens += stream.rows() as u64;
        if self.passed.on_policy {
            let each = rollouts.members(parts).zip(stream.each(&scores.logprobs));
            each.for_each(|(scored, own)| self.passed.gap.add(&scored.completion.logprobs, own));
        }
        Ok((scores, pass))
    }

    /// Computes the loss of a stream and its derivatives.
    fn loss(
        &self,
        stream: &PackedStream,
        parts: &[Part],
        rollouts: &Rollouts,
        scores: &Scores,
        normalizer: &Normalizer,
    ) -> Result<LossOutput> {
        let members = || rollouts.members(parts);
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let advantages: Vec<f64> = members().map(|c| c.advantage).collect();
        let truncated: Vec<bool> = members().map(Scored::is_truncated).collect();
        let old: Vec<&[f32]> = members().filter_map(|c| c.old.as_deref()).collect();
        let old = (!self.passed.on_policy).then(|| wide(&old.concat()));
        let sampler = members().map(|c| {
            let Completion { logprobs, .. } = &c.completion;
            Some(logprobs.as_slice()).filter(|own| own.len() == c.completion.num_sampled())
        });
        let sampler: Option<Vec<&[f32]>> = sampler.collect();
        let sampler = sampler.map(|each| wide(&each.concat()));
        let reference: Option<Vec<&[f32]>> = members().map(|c| c.reference.as_deref()).collect();
        let reference = reference.map(|each| wide(&each.concat()));
        let taught = self.algorithm.loss.teacher_tokens() > 0;
        let taught: Option<Vec<&TopTokens>> =
            members().map(|c| c.teacher.as_ref().filter(|_| taught)).collect();
        let taught = taught.filter(|each| !each.is_empty()).map(|each| {
            let k = each.iter().map(|top| top.k).max().unwrap_or_default();
            let own = each.iter().flat_map(|top| &top.logprobs).map(|&x| f64::from(x));
            (k, wide(&scores.teacher), own.collect::<Vec<f64>>())
        });
        let teacher = taught.as_ref().map(|(k, logp, teacher)| TeacherTokens { k: *k, logp, teacher });
        let kept: Option<Vec<&[bool]>> = members().map(|c| c.kept.as_deref()).collect();
        let kept = kept.map(|each| each.concat());
        let chosen: Option<Vec<&[bool]>> = members().map(|c| c.chosen.as_deref()).collect();
        let chosen = chosen.map(|each| each.concat());
        let batch = Batch {
            lengths: stream.lengths(),
            logp: &wide(&scores.logprobs),
            old: old.as_deref(),
            sampler: sampler.as_deref(),
            reference: reference.as_deref(),
            teacher,
            entropy: Some(&wide(&scores.entropies)),
            kept: kept.as_deref(),
            chosen: chosen.as_deref(),
            advantages: &advantages,
            truncated: &truncated,
        };
        Ok(evaluate(&batch, &self.algorithm.loss, normalizer)?)
    }

    /// Stores the numbers of each completion of a stream.
    fn record(&mut self, stream: &PackedStream, parts: &[Part], rollouts: &Rollouts, scores: &Scores) {
        let each = stream.each(&scores.logprobs).zip(stream.each(&scores.entropies));
        for (scored, (logprobs, entropies)) in rollouts.members(parts).zip(each) {
            self.passed.logprobs.push(logprobs.to_vec());
            if self.algorithm.token_stats {
                self.passed.tokens.push(TokenNumbers {
                    logprobs: logprobs.to_vec(),
                    entropies: entropies.to_vec(),
                    old: scored.old.clone().unwrap_or_default(),
                    reference: scored.reference.clone().unwrap_or_default(),
                    kept: scored.kept.clone().unwrap_or_default(),
                });
            }
        }
    }

    /// Runs the backward pass of a stream. Keeps the gradients of its media features for their towers.
    fn backward(
        &mut self,
        pass: StreamPass,
        parts: &[Part],
        loss: &LossOutput,
        mut exchange: Option<&mut Exchange>,
    ) -> Result<()> {
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let dentropy = self.algorithm.loss.needs_entropy().then(|| narrow(&loss.dentropy));
        let lender = self.lender;
        let mut done = |block: usize| {
            if let Some(exchange) = exchange.as_deref_mut() {
                exchange.block_done(block);
                if let Some(lender) = lender {
                    lender.block_done(block);
                }
            }
        };
        let router = pass.router();
        let (dlogp, dteacher) = (narrow(&loss.dlogp), narrow(&loss.dteacher));
        let gradients = pass.backward_by_block(&dlogp, dentropy.as_deref(), &dteacher, &mut done)?;
        if let Some(router) = router {
            self.passed.router.iter_mut().zip(router.losses()).for_each(|(sum, own)| *sum += own);
        }
        let groups: Vec<usize> = parts.iter().map(|part| part.group - self.leaf.start).collect();
        Ok(self.gradients.add(gradients, &groups)?)
    }
}

/// Packs groups of a rollout into streams of a model.
fn streams(rollouts: &Rollouts, groups: Range<usize>, max_rows: usize, reader: Reader) -> Vec<Vec<Part>> {
    let shapes: Vec<_> = rollouts.groups[groups.clone()].iter().map(|group| group.shape(reader)).collect();
    let mut streams = pack(&shapes, max_rows);
    streams.iter_mut().flatten().for_each(|part| part.group += groups.start);
    streams
}

/// A model that scores completions.
#[derive(Clone, Copy)]
struct Scorer<'m> {
    model: &'m Model,
    /// Lender of the model's weights.
    lender: Option<&'m Lender>,
    reader: Reader,
    /// Most probable tokens that are kept at each token.
    top: Top,
}

impl<'m> Scorer<'m> {
    fn policy(models: Models<'m>) -> Self {
        Self { model: models.policy, lender: models.of_policy(), reader: Reader::Policy, top: Top::NONE }
    }
}

/// Scores the completions of this rank with a model and passes the numbers that `choose` selects to `keep`, for the completions of
/// all ranks. `seen` returns the features of a group's media for this model.
fn score<T: Serialize + DeserializeOwned>(
    scorer: Scorer,
    algorithm: &Divided,
    rollouts: &mut Rollouts,
    streams: Result<Vec<Vec<Part>>>,
    seen: impl Fn(&Group) -> Result<Vec<Features>>,
    choose: impl Fn(StreamScores) -> T,
    keep: impl Fn(&mut Scored, T),
) -> Result<()> {
    let own = score_own(scorer, algorithm, rollouts, streams, seen, choose);
    // The files of weights are checked before the numbers are used.
    let own = own.and_then(|own| Ok(scorer.model.files_unchanged().map(|()| own)?));
    let all = algorithm.split.collect(rollouts.groups.len(), own)?;
    for (group, numbers) in rollouts.groups.iter_mut().zip(all) {
        group.completions.iter_mut().zip(numbers).for_each(|(c, numbers)| keep(c, numbers));
    }
    Ok(())
}

/// Returns the groups in the streams with the chosen numbers of each completion.
fn score_own<T>(
    Scorer { model, lender, reader, top }: Scorer,
    algorithm: &Divided,
    rollouts: &Rollouts,
    streams: Result<Vec<Vec<Part>>>,
    seen: impl Fn(&Group) -> Result<Vec<Features>>,
    choose: impl Fn(StreamScores) -> T,
) -> Result<Vec<(usize, Vec<T>)>> {
    let temperature = algorithm.sampling.scoring_temperature();
    let mut last: Option<(usize, Vec<Features>)> = None;
    // A group without completions is in no stream.
    let own = algorithm.split.own_places(rollouts.groups.len(), algorithm.micro()).into_iter();
    let mut scored: Vec<(usize, Vec<T>)> = own.map(|group| (group, Vec::new())).collect();
    let score = |scored: &mut Vec<(usize, Vec<T>)>, parts: Vec<Part>, _| {
        let stream = rollouts.packed(&parts, reader)?;
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
        let all = model.score_top(&stream, &features, temperature, top)?;
        let (mut lengths, mut start) = (stream.lengths().iter(), 0);
        for part in &parts {
            let of_group = scored.iter_mut().find(|(group, _)| *group == part.group);
            let each = lengths.by_ref().take(part.completions.len()).map(|&length| {
                let own = start..start + length;
                start = own.end;
                choose(StreamScores {
                    logprobs: all.logprobs[own.clone()].to_vec(),
                    entropies: all.entropies[own.clone()].to_vec(),
                    top: all.top.part(own),
                })
            });
            let each: Vec<T> = each.collect();
            if let Some((_, numbers)) = of_group {
                numbers.extend(each);
            }
        }
        Ok(())
    };
    in_turns(&algorithm.split, lender, false, streams, &mut scored, score, |_, _| {})?;
    Ok(scored)
}

/// Scores the completions with the weights that sampled them, for updates after the weights have changed.
pub(crate) fn old_logprobs(models: Models, algorithm: &Divided, rollouts: &mut Rollouts) -> Result<()> {
    let leaves = algorithm.own_leaves(rollouts.groups.len()).into_iter();
    let streams =
        leaves.flat_map(|leaf| streams(rollouts, leaf, algorithm.stream_rows(), Reader::Policy)).collect();
    let seen = |group: &Group| Ok(group.features.clone());
    let policy = Scorer::policy(models);
    let choose = |numbers: StreamScores| numbers.logprobs;
    score(policy, algorithm, rollouts, Ok(streams), seen, choose, |c, logp| c.old = Some(logp))
}

/// Computes the entropies of the current weights at each token of recorded completions. Each completion is a separate stream, so
/// that the entropies do not depend on `max_stream_tokens`.
pub(crate) fn entropies(models: Models, algorithm: &Divided, rollouts: &mut Rollouts) -> Result<()> {
    let leaves = algorithm.own_leaves(rollouts.groups.len()).into_iter();
    let streams = leaves.flat_map(|leaf| streams(rollouts, leaf, 1, Reader::Policy)).collect();
    let seen = |group: &Group| Ok(group.features.clone());
    let policy = Scorer::policy(models);
    let choose = |numbers: StreamScores| numbers.entropies;
    score(policy, algorithm, rollouts, Ok(streams), seen, choose, |c, h| c.completion.entropies = h)
}

/// Scores the completions with the reference or teacher, in streams like those of the update. The completions store the numbers for
/// all updates. Does nothing without a reference. `ready` is the result of this rank's preparation.
pub(crate) fn reference_logprobs(
    models: Models,
    algorithm: &Divided,
    ready: Result<()>,
    rollouts: &mut Rollouts,
) -> Result<()> {
    let Some(reference) = models.reference else { return ready };
    let micro = algorithm.micro();
    let leaves = algorithm.own_leaves(rollouts.groups.len()).into_iter();
    let batches = leaves.flat_map(|leaf| {
        let end = leaf.end;
        leaf.step_by(micro).map(move |first| first..(first + micro).min(end))
    });
    // They become targets of the policy. Sizes of one family may pad the head to different lengths.
    let below = models.policy.decoder().config().vocab;
    let (reader, top) = (Reader::Reference, Top { k: algorithm.loss.teacher_tokens(), below });
    let streams =
        batches.flat_map(|groups| streams(rollouts, groups, algorithm.stream_rows(), reader)).collect();
    let seen =
        |group: &Group| features::of_reference(reference, models.policy, &group.row.prompt, &group.features);
    score(
        Scorer { model: reference, lender: models.of_reference(), reader, top },
        algorithm,
        rollouts,
        ready.map(|()| streams),
        seen,
        |numbers| (numbers.logprobs, numbers.top),
        |c, (logp, most)| {
            c.reference = Some(logp);
            c.teacher = Some(most).filter(|_| top.k > 0);
        },
    )
}
