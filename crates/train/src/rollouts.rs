//! Input of an update: groups of completions with their advantages.

use std::mem::{replace, take};

use omnigrpo_grpo::{Advantages, LossPlan, advantage, top_entropy_tokens};
use omnigrpo_models::{DecoderMemory, Features, GroupStream, Memories};
use omnigrpo_rewards::RewardMatrix;
use omnigrpo_rollout::{Completion, FinishReason};

use crate::error::Result;
use crate::rows::PreparedRow;
use crate::step::Algorithm;
use crate::streams::Part;

/// A completion and what its updates need to know of it.
#[derive(Clone, Debug)]
pub struct Scored {
    /// The completion.
    pub completion: Completion,
    /// How much better it is than the others of its group; 0 before the rewards are in.
    pub advantage: f64,
    /// Log-probability of each token, in nats, that the ratio compares with: recorded ones, or those of the first
    /// update. `None` before that one, which is on-policy.
    pub old: Option<Vec<f32>>,
    /// Log-probability of each token under the reference, in nats: from the rollout on where the reference moves, else from the
    /// first update on.
    pub(crate) reference: Option<Vec<f32>>,
    /// Whether policy term and entropy bonus keep each token, decided once for the rollout; `None` keeps all.
    pub(crate) kept: Option<Vec<bool>>,
}

impl Scored {
    pub(crate) fn new(completion: Completion, old: Option<Vec<f32>>) -> Self {
        Self { completion, advantage: 0.0, old, reference: None, kept: None }
    }

    pub(crate) fn is_truncated(&self) -> bool {
        self.completion.finish_reason == FinishReason::Length
    }
}

/// A row with its completions.
#[derive(Clone, Debug)]
pub struct Group {
    /// The row and its prompt.
    pub row: PreparedRow,
    /// Features of its media, under the weights of the latest rollout or update.
    pub(crate) features: Vec<Features>,
    /// Completions of the group.
    pub completions: Vec<Scored>,
}

impl Group {
    /// Lengths of prompt and completions, tokens.
    pub(crate) fn shape(&self) -> (usize, Vec<usize>) {
        (self.row.prompt.ids.len(), self.completions.iter().map(|c| c.completion.ids.len()).collect())
    }
}

/// The groups of a rollout, in drawing order, or a part of them: the input of an update, or of one in each iteration.
pub struct Rollouts {
    /// The groups.
    pub groups: Vec<Group>,
    /// Every reward of every completion, group by group.
    pub rewards: RewardMatrix,
    /// Whether the rewards of a group do not tell its completions apart, per group.
    pub(crate) zero_std: Vec<bool>,
    /// Results of the towers for the features, until the first update takes them.
    pub(crate) memories: Memories,
    /// Results of the decoder for the completions, until the first update takes them.
    pub(crate) recalled: Option<DecoderMemory>,
    /// Whether the weights have changed since the features were computed.
    pub(crate) updated: bool,
}

/// How much better each completion is than the others of its group.
fn compare(algorithm: &Algorithm, rewards: &RewardMatrix) -> Result<Advantages> {
    let (size, alpha) = (algorithm.num_generations, algorithm.alpha);
    Ok(if algorithm.normalize_then_sum {
        advantage::normalize_then_sum(&rewards.values, &rewards.weights, size, alpha)?
    } else {
        advantage::advantages(&rewards.total, size, algorithm.advantage, alpha)?
    })
}

/// Whether the rewards of each group do not tell its completions apart.
pub(crate) fn alike(algorithm: &Algorithm, rewards: &RewardMatrix) -> Result<Vec<bool>> {
    Ok(compare(algorithm, rewards)?.zero_std)
}

impl Rollouts {
    /// Turns rewards into advantages.
    pub(crate) fn new(
        algorithm: &Algorithm,
        mut groups: Vec<Group>,
        memories: Memories,
        rewards: RewardMatrix,
    ) -> Result<Self> {
        let advantages = compare(algorithm, &rewards)?;
        let completions = groups.iter_mut().flat_map(|group| &mut group.completions);
        completions.zip(&advantages.values).for_each(|(c, value)| c.advantage = *value);
        let zero_std = advantages.zero_std;
        Ok(Self { groups, rewards, zero_std, memories, recalled: None, updated: false })
    }

    /// Decides which tokens policy term and entropy bonus keep, from the entropies of the weights that sampled. Completions that
    /// do not count in the loss do not count here.
    pub(crate) fn gate(&mut self, plan: &LossPlan) -> Result<()> {
        let counts = |c: &Scored| !(plan.mask_truncated_completions && c.is_truncated());
        let counted = self.completions().filter(|c| counts(c)).flat_map(|c| &c.completion.entropies);
        let entropies: Vec<f64> = counted.map(|&h| f64::from(h)).collect();
        let Some(kept) = top_entropy_tokens(&entropies, plan.top_entropy)? else { return Ok(()) };
        let mut kept = kept.into_iter();
        for c in self.groups.iter_mut().flat_map(|group| &mut group.completions) {
            let tokens = c.completion.ids.len();
            c.kept = Some(if counts(c) { kept.by_ref().take(tokens).collect() } else { vec![false; tokens] });
        }
        Ok(())
    }

    /// Tokens that policy term and entropy bonus keep; `None` where they keep all.
    pub(crate) fn kept_tokens(&self) -> Option<usize> {
        let each = self.completions().map(|c| c.kept.as_ref());
        each.map(|kept| kept.map(|kept| kept.iter().filter(|kept| **kept).count())).sum()
    }

    /// Cuts it into parts of so many groups, each for an update of its own; all but the first are updated from when the weights
    /// have already changed.
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
                // They are of all groups together.
                memories: Memories::default(),
                recalled: None,
                updated: !parts.is_empty(),
            });
        }
        if let Some(first) = parts.first_mut() {
            first.rewards.logged = self.rewards.logged;
        }
        parts
    }

    /// All completions, group by group.
    pub fn completions(&self) -> impl Iterator<Item = &Scored> {
        self.groups.iter().flat_map(|group| &group.completions)
    }

    /// Whether a stream has every completion of every group.
    pub(crate) fn is_whole(&self, stream: &[Part]) -> bool {
        let whole = |(at, part): (usize, &Part)| {
            part.group == at && part.completions == (0..self.groups[at].completions.len())
        };
        stream.len() == self.groups.len() && stream.iter().enumerate().all(whole)
    }

    /// Returns the completions of a stream.
    pub(crate) fn members<'a>(&'a self, stream: &'a [Part]) -> impl Iterator<Item = &'a Scored> {
        stream.iter().flat_map(|part| &self.groups[part.group].completions[part.completions.clone()])
    }

    /// A stream as the model reads it.
    pub(crate) fn stream(&self, stream: &[Part]) -> Vec<GroupStream<'_>> {
        let group = |part: &Part| {
            let Group { row, completions, .. } = &self.groups[part.group];
            let ids = completions[part.completions.clone()].iter().map(|c| c.completion.ids.as_slice());
            GroupStream { prompt: &row.prompt, completions: ids.collect() }
        };
        stream.iter().map(group).collect()
    }
}
