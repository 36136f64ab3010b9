//! Input of an update: groups of completions with their advantages.

use std::mem::{replace, take};
use std::ops::Range;

use omnigrpo_grpo::{Advantages, Covariance, LossPlan, advantage, chosen_tokens, top_entropy_tokens};
use omnigrpo_models::{DecoderMemory, Features, GroupStream, Memories, PackedStream, Prompt, TopTokens};
use omnigrpo_rewards::RewardMatrix;
use omnigrpo_rollout::{Completion, FinishReason, SampleKey};

use crate::error::Result;
use crate::rows::PreparedRow;
use crate::step::Algorithm;
use crate::streams::Part;

/// Completion with the data that its updates need.
#[derive(Clone, Debug)]
pub struct Scored {
    /// Tokens and text of the completion.
    pub completion: Completion,
    /// Advantage over the other completions of the group; 0 until the rewards are known.
    pub advantage: f64,
    /// Log-probability of each token in nats, for the denominator of the ratio: recorded, or computed before the weights changed.
    /// `None` before the first update, which is on-policy.
    pub old: Option<Vec<f32>>,
    /// Log-probability of each token under the reference, in nats. It is computed with the rollout if the reference follows the
    /// policy, otherwise in the first update.
    pub(crate) reference: Option<Vec<f32>>,
    /// Most probable tokens of the teacher at each token, if the loss reads them. They are computed with `reference`.
    pub(crate) teacher: Option<TopTokens>,
    /// Mask of the tokens that count in the policy term and the entropy bonus. It is fixed for the whole rollout; `None` keeps
    /// all tokens.
    pub(crate) kept: Option<Vec<bool>>,
    /// Mask of the tokens that the loss treats differently because of their covariance. It is fixed for the whole rollout; `None` if
    /// the covariance is off.
    pub(crate) chosen: Option<Vec<bool>>,
}

impl Scored {
    pub(crate) fn new(completion: Completion, old: Option<Vec<f32>>) -> Self {
        Self { completion, advantage: 0.0, old, reference: None, teacher: None, kept: None, chosen: None }
    }

    pub(crate) fn is_truncated(&self) -> bool {
        self.completion.finish_reason == FinishReason::Length
    }

    /// Returns the log-probability of each token when it was sampled, or that of the weights before the first update; `None` if
    /// neither is known, as for recorded completions without log-probabilities.
    pub(crate) fn at_first(&self) -> Option<&[f32]> {
        let sampled = Some(self.completion.logprobs.as_slice());
        sampled.filter(|own| own.len() == self.completion.num_sampled()).or(self.old.as_deref())
    }
}

/// Row with its completions.
#[derive(Clone, Debug)]
pub struct Group {
    /// Row and its prompt.
    pub row: PreparedRow,
    /// Features of the row's media, from the weights of the latest rollout or update.
    pub(crate) features: Vec<Features>,
    /// Completions of the group.
    pub completions: Vec<Scored>,
}

/// Reader of a group's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    Policy,
    /// Reference or teacher, whose prompt may have more in it.
    Reference,
}

impl Group {
    /// Returns the prompt as a model reads it.
    pub(crate) fn prompt(&self, reader: Reader) -> &Prompt {
        let PreparedRow { prompt, teacher, .. } = &self.row;
        teacher.as_deref().filter(|_| reader == Reader::Reference).unwrap_or(prompt)
    }

    /// Returns the lengths of the prompt and of each completion, in tokens.
    pub(crate) fn shape(&self, reader: Reader) -> (usize, Vec<usize>) {
        let completions = self.completions.iter().map(|c| c.completion.ids.len());
        (self.prompt(reader).ids.len(), completions.collect())
    }
}

/// Groups of a rollout in drawing order, or a part of them: the input of one update per iteration.
pub struct Rollouts {
    /// Groups of completions.
    pub groups: Vec<Group>,
    /// Every reward of every completion, group by group.
    pub rewards: RewardMatrix,
    /// One flag per group; true if all completions of the group have the same reward.
    pub(crate) zero_std: Vec<bool>,
    /// Results of the rollout for each leaf of this rank; the first update takes them.
    pub(crate) kept: Vec<Kept>,
    /// True if the weights have changed since the features were computed, by an update from this part or from another one. A
    /// restored rollout has the features of the checkpoint's weights.
    pub(crate) updated: bool,
}

/// Results of a rollout that the first update of a leaf can reuse.
pub(crate) struct Kept {
    /// Groups of the leaf.
    pub(crate) groups: Range<usize>,
    /// Results of the media towers; groups are numbered from 0.
    pub(crate) memories: Memories,
    /// Results of the decoder for the completions.
    pub(crate) recalled: Option<DecoderMemory>,
}

/// Compares the completions of each group and returns their advantages.
fn compare(algorithm: &Algorithm, rewards: &RewardMatrix, lengths: &[usize]) -> Result<Advantages> {
    let (size, alpha) = (algorithm.num_generations, algorithm.alpha);
    Ok(if algorithm.normalize_then_sum {
        advantage::normalize_then_sum(&rewards.values, &rewards.weights, size, alpha)?
    } else {
        advantage::advantages(&rewards.total, size, algorithm.advantage, alpha, lengths)?
    })
}

/// Returns one flag per group, true if all completions of the group have the same reward.
pub(crate) fn alike(algorithm: &Algorithm, rewards: &RewardMatrix) -> Result<Vec<bool>> {
    // Whether rewards are equal does not depend on the number of tokens.
    Ok(compare(algorithm, rewards, &vec![1; rewards.total.len()])?.zero_std)
}

impl Rollouts {
    /// Computes advantages from the rewards and stores them in the completions.
    pub(crate) fn new(
        algorithm: &Algorithm,
        mut groups: Vec<Group>,
        kept: Vec<Kept>,
        rewards: RewardMatrix,
    ) -> Result<Self> {
        let lengths = groups.iter().flat_map(|group| &group.completions).map(|c| c.completion.num_sampled());
        let advantages = compare(algorithm, &rewards, &lengths.collect::<Vec<_>>())?;
        let completions = groups.iter_mut().flat_map(|group| &mut group.completions);
        completions.zip(&advantages.values).for_each(|(c, value)| c.advantage = *value);
        let zero_std = advantages.zero_std;
        Ok(Self { groups, rewards, zero_std, kept, updated: false })
    }

    /// Selects the tokens that count in the policy term and the entropy bonus, by the entropies of the weights that sampled.
    /// Completions that the loss leaves out are left out here as well.
    pub(crate) fn gate(&mut self, plan: &LossPlan) -> Result<()> {
        let counts = |c: &Scored| !(plan.mask_truncated_completions && c.is_truncated());
        let counted = self.completions().filter(|c| counts(c)).flat_map(|c| &c.completion.entropies);
        let entropies: Vec<f64> = counted.map(|&h| f64::from(h)).collect();
        let Some(kept) = top_entropy_tokens(&entropies, plan.top_entropy)? else { return Ok(()) };
        let mut kept = kept.into_iter();
        for c in self.groups.iter_mut().flat_map(|group| &mut group.completions) {
            let tokens = c.completion.num_sampled();
            c.kept = Some(if counts(c) { kept.by_ref().take(tokens).collect() } else { vec![false; tokens] });
        }
        Ok(())
    }

    /// Chooses the tokens that the loss treats differently because of the covariance of advantage and log-probability, among all
    /// tokens of the step that count. `step` is the number of the rollout. Random choices depend on the seed, the rollout, the row, the
    /// completion and the token alone.
    pub(crate) fn choose(&mut self, plan: &LossPlan, seed: u64, step: u64) -> Result<()> {
        let counts = |c: &Scored| !(plan.mask_truncated_completions && c.is_truncated());
        let (mut advantages, mut logp, mut keys) = (Vec::new(), Vec::new(), Vec::new());
        if plan.covariance != Covariance::Off {
            for group in &self.groups {
                for (sample, c) in group.completions.iter().enumerate().filter(|(_, c)| counts(c)) {
                    let key = SampleKey { rollout: step, row: group.row.sample.row, sample: sample as u32 };
                    for (token, lp) in c.at_first().into_iter().flatten().enumerate() {
                        advantages.push(c.advantage);
                        logp.push(f64::from(*lp));
                        keys.push((key, token));
                    }
                }
            }
        }
        let draw = |at: usize| keys[at].0.choice(seed, keys[at].1);
        let Some(chosen) = chosen_tokens(plan.covariance, &advantages, &logp, draw)? else { return Ok(()) };
        let mut chosen = chosen.into_iter();
        for c in self.groups.iter_mut().flat_map(|group| &mut group.completions) {
            let tokens = c.completion.num_sampled();
            let own = if counts(c) { chosen.by_ref().take(tokens).collect() } else { vec![false; tokens] };
            c.chosen = Some(own);
        }
        Ok(())
    }

    /// Returns the number of tokens that count in the policy term and the entropy bonus; `None` without a gate.
    pub(crate) fn kept_tokens(&self) -> Option<usize> {
        let each = self.completions().map(|c| c.kept.as_ref());
        each.map(|kept| kept.map(|kept| kept.iter().filter(|kept| **kept).count())).sum()
    }

    /// Splits the rollout into parts of at most `groups` groups, each with updates of its own.
    pub(crate) fn split(mut self, groups: usize) -> Vec<Self> {
        if self.groups.len() <= groups {
            return vec![self];
        }
        let (mut parts, mut completions): (Vec<Self>, usize) = (Vec::new(), 0);
        let mut rest = take(&mut self.groups);
        while !rest.is_empty() {
            let later = rest.split_off(groups.min(rest.len()));
            let (own, first) = (replace(&mut rest, later), completions);
            completions += own.iter().map(|group| group.completions.len()).sum::<usize>();
            let before = parts.len() * groups;
            parts.push(Self {
                rewards: self.rewards.part(first..completions),
                zero_std: self.zero_std[before..before + own.len()].to_vec(),
                groups: own,
                kept: Vec::new(),
                updated: self.updated,
            });
        }
        if let Some(first) = parts.first_mut() {
            first.rewards.logged = self.rewards.logged;
        }
        parts
    }

    /// Returns all completions, group by group.
    pub fn completions(&self) -> impl Iterator<Item = &Scored> {
        self.groups.iter().flat_map(|group| &group.completions)
    }

    /// Returns true if a stream has every completion of the given groups.
    pub(crate) fn is_whole(&self, stream: &[Part], groups: Range<usize>) -> bool {
        let whole = |(at, part): (usize, &Part)| {
            part.group == at && part.completions == (0..self.groups[at].completions.len())
        };
        stream.len() == groups.len() && groups.zip(stream).all(whole)
    }

    /// Returns the completions of a stream.
    pub(crate) fn members<'a>(&'a self, stream: &'a [Part]) -> impl Iterator<Item = &'a Scored> {
        stream.iter().flat_map(|part| &self.groups[part.group].completions[part.completions.clone()])
    }

    /// Packs the parts of a stream in the form that a model reads.
    pub(crate) fn packed(&self, stream: &[Part], reader: Reader) -> Result<PackedStream> {
        let completions = |part: &Part| &self.groups[part.group].completions[part.completions.clone()];
        let group = |part: &Part| GroupStream {
            prompt: self.groups[part.group].prompt(reader),
            completions: completions(part).iter().map(|c| c.completion.ids.as_slice()).collect(),
        };
        let groups: Vec<GroupStream> = stream.iter().map(group).collect();
        let turns = |group: usize, c: usize| completions(&stream[group])[c].completion.turns.as_slice();
        let packed = PackedStream::with_turns(&groups, turns)?;
        // After an update, rows may use other experts.
        let sampled = stream.iter().flat_map(completions).filter(|_| !self.updated);
        let packed = packed.comparing_experts(sampled.map(|c| c.completion.experts.as_slice()));
        let taught = || self.members(stream).filter_map(|scored| scored.teacher.as_ref());
        let k = taught().map(|top| top.k).next().filter(|_| reader == Reader::Policy);
        let Some(k) = k else { return Ok(packed) };
        let tokens: Vec<u32> = taught().flat_map(|top| &top.tokens).copied().collect();
        Ok(packed.with_teacher_tokens(&tokens, k)?)
    }
}
