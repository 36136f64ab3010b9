//! Division of a step over ranks.
//!
//! Every rank draws the same rows and knows every completion, reward and advantage of a step. These are small, so the code that
//! needs the whole step is the same as in one process: advantages, normalizers, metrics, dynamic sampling, the order of rows. The
//! heavy work is done once: one rank decodes the media of a row, runs its towers, samples its completions and computes its
//! passes.
//!
//! The micro-batches of an update are divided into *leaves*, each with neighbouring micro-batches. A rank has neighbouring leaves,
//! or, if gradients are cut, every n-th leaf of n ranks. The gradients of the leaves are summed as a tree ([`omnigrpo_ranks::sum`]), so one process with four leaves, two ranks with two
//! and four ranks with one give the same bits.

use std::ops::Range;

pub use omnigrpo_ranks::GradientSum;
use omnigrpo_ranks::{BUCKET, Ranks};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{LEAVES, Result, TrainError};

/// State of a run that is cut into a part for each rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum Shard {
    /// Nothing.
    #[default]
    None,
    /// Moments and masters of the optimizer (ZeRO stage 1). The state is in main memory.
    Optimizer,
    /// Gradients, too (ZeRO stage 2).
    Gradients,
    /// The large weights of the decoder, too, also if they are not trained (ZeRO stage 3).
    Weights,
}

/// Settings by which a step is divided over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Division {
    /// Number of leaves of an update, a multiple of the number of ranks; `None` for the number of ranks.
    pub leaves: Option<usize>,
    /// Way to sum the gradients of all ranks.
    pub sum: GradientSum,
    /// State that is cut into a part for each rank.
    pub shard: Shard,
    /// Maximum number of elements that are exchanged at once.
    pub bucket: usize,
    /// Minimum number of elements of a weight that is cut with [`Shard::Weights`].
    pub least_cut: usize,
}

/// Division of a step over the ranks of a run.
#[derive(Clone, Debug)]
pub struct Split {
    /// Processes of the run.
    pub ranks: Ranks,
    /// Settings of the division.
    pub settings: Division,
    /// Number of ranks on this machine, which share its memory.
    pub local: usize,
    /// Prompts of an update, if a rollout serves several updates.
    pub(crate) prompts_per_step: Option<usize>,
}

/// Default of [`Division::least_cut`], that of DeepSpeed.
const LEAST_CUT: usize = 100_000;

impl Default for Division {
    /// Returns a leaf for each rank, ordered sums, and no state that is cut.
    fn default() -> Self {
        Self {
            leaves: None,
            sum: GradientSum::Ordered,
            shard: Shard::None,
            bucket: BUCKET,
            least_cut: LEAST_CUT,
        }
    }
}

impl Default for Split {
    /// Returns the division of a single process with one leaf.
    fn default() -> Self {
        Self::over(Ranks::default())
    }
}

impl Split {
    /// Returns the default division over ranks of which no two are on one machine.
    #[must_use]
    pub fn over(ranks: Ranks) -> Self {
        Self { ranks, settings: Division::default(), local: 1, prompts_per_step: None }
    }

    /// Returns the number of leaves of an update.
    pub fn num_leaves(&self) -> usize {
        self.settings.leaves.unwrap_or(self.ranks.size())
    }

    /// Checks that every rank has the same number of leaves.
    pub(crate) fn validate(&self) -> Result<()> {
        let (leaves, size) = (self.num_leaves(), self.ranks.size());
        if leaves > 0 && leaves.is_multiple_of(size) {
            return Ok(());
        }
        Err(TrainError::setting(
            LEAVES,
            &leaves.to_string(),
            format!("expected a multiple of the number of ranks, {size}, so that all ranks have equal work"),
        ))
    }

    /// Returns true if the ranks of a machine share the frozen weights in the checkpoint's files. Weights that are cut are in memory.
    pub(crate) fn shares_base(&self) -> bool {
        self.local > 1 && self.settings.shard != Shard::Weights
    }

    /// Returns true if one process sums all gradients in the order in which they are computed.
    pub(crate) fn is_off(&self) -> bool {
        self.num_leaves() == 1
    }

    /// Returns the number of elements of each rank in an exchange.
    pub(crate) fn piece(&self) -> usize {
        self.settings.bucket.div_ceil(self.ranks.size()).max(1)
    }

    /// Returns the rank that computes a leaf of an update. If gradients are cut, the ranks exchange them after each leaf, so they
    /// compute neighbouring leaves at the same time.
    pub(crate) fn rank_of(&self, leaf: usize) -> usize {
        let size = self.ranks.size();
        if self.settings.shard >= Shard::Gradients { leaf % size } else { leaf / (self.num_leaves() / size) }
    }

    /// Returns the prompts of each leaf of an update with `prompts` prompts in micro-batches of `micro`.
    pub(crate) fn leaves(&self, prompts: usize, micro: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (leaves, batches) = (self.num_leaves(), prompts.div_ceil(micro));
        let cut = move |leaf: usize| (batches * leaf / leaves * micro).min(prompts);
        (0..leaves).map(move |leaf| cut(leaf)..cut(leaf + 1))
    }

    /// Returns the number and the prompts of each leaf of this rank, in an update with `prompts` prompts.
    pub(crate) fn own_leaves(&self, prompts: usize, micro: usize) -> Vec<(usize, Range<usize>)> {
        let own = |(leaf, _): &(usize, _)| self.rank_of(*leaf) == self.ranks.rank();
        (0..).zip(self.leaves(prompts, micro)).filter(own).collect()
    }

    /// Returns the prompts of each leaf of a rollout with `prompts` prompts, over all of its updates.
    pub(crate) fn leaves_of_rollout(&self, prompts: usize, micro: usize) -> Vec<Range<usize>> {
        let step = self.prompts_per_step.unwrap_or(prompts).max(1);
        let updates = (0..prompts).step_by(step);
        let each = updates.flat_map(|first| {
            self.leaves(step.min(prompts - first), micro).map(move |own| first + own.start..first + own.end)
        });
        each.collect()
    }

    /// Returns the prompts of each leaf of this rank, in a rollout with `prompts` prompts, over all of its updates.
    pub(crate) fn own_leaves_of_rollout(&self, prompts: usize, micro: usize) -> Vec<Range<usize>> {
        let leaves = self.leaves_of_rollout(prompts, micro).into_iter().enumerate();
        let own = |leaf: usize| self.rank_of(leaf % self.num_leaves()) == self.ranks.rank();
        leaves.filter(|(leaf, _)| own(*leaf)).map(|(_, own)| own).collect()
    }

    /// Returns the rank of each prompt of a rollout.
    pub(crate) fn owners(&self, prompts: usize, micro: usize) -> Vec<usize> {
        let leaves = self.leaves_of_rollout(prompts, micro).into_iter().enumerate();
        leaves.flat_map(|(leaf, own)| own.map(move |_| self.rank_of(leaf % self.num_leaves()))).collect()
    }

    /// Returns the places of the prompts that this rank trains on, in a rollout with `prompts` prompts.
    pub(crate) fn own_places(&self, prompts: usize, micro: usize) -> Vec<usize> {
        let owners = self.owners(prompts, micro).into_iter().enumerate();
        owners.filter_map(|(place, owner)| (owner == self.ranks.rank()).then_some(place)).collect()
    }

    /// Returns the result of this rank if no rank has failed, else the first failure ([`Ranks::agree`]).
    pub(crate) fn agree<T>(&self, own: Result<T>) -> Result<T> {
        self.ranks.agree(own, TrainError::cause)
    }

    /// Returns the value of each rank if no rank has failed, else the first failure ([`Ranks::share_all`]).
    pub(crate) fn share<T: Serialize + DeserializeOwned>(&self, own: Result<T>) -> Result<Vec<T>> {
        self.ranks.share_all(own, TrainError::cause)
    }

    /// Runs `make` on the first rank and returns its result on all ranks.
    pub(crate) fn by_first<T: Serialize + DeserializeOwned>(
        &self,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.ranks.size() == 1 {
            return make();
        }
        // An option in an option would not survive the transport.
        let made = if self.ranks.is_first() { make().map(|made| vec![made]) } else { Ok(Vec::new()) };
        let made = self.share(made)?.into_iter().flatten().next();
        made.ok_or_else(|| TrainError::Data { what: "the first rank sent no result".into() })
    }

    /// Collects a value for each item from the ranks that have it. `own` gives the items of this rank with their values.
    pub(crate) fn collect<T: Serialize + DeserializeOwned>(
        &self,
        count: usize,
        own: Result<Vec<(usize, T)>>,
    ) -> Result<Vec<T>> {
        let mut all: Vec<Option<T>> = (0..count).map(|_| None).collect();
        for (at, value) in self.share(own)?.into_iter().flatten() {
            if let Some(slot) = all.get_mut(at) {
                *slot = Some(value);
            }
        }
        let whole: Option<Vec<T>> = all.into_iter().collect();
        whole.ok_or_else(|| TrainError::Data { what: "a part of the step belongs to no rank".into() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn split(leaves: usize, prompts_per_step: Option<usize>) -> Split {
        Split {
            settings: Division { leaves: Some(leaves), ..Division::default() },
            prompts_per_step,
            ..Split::default()
        }
    }

    #[test]
    fn leaves_are_neighbouring_micro_batches() {
        let of = |leaves, prompts, micro| split(leaves, None).leaves(prompts, micro).collect::<Vec<_>>();
        assert_eq!((of(1, 5, 2).len(), of(1, 5, 2).first()), (1, Some(&(0..5))));
        assert_eq!(of(2, 5, 1), [0..2, 2..5]);
        // Three micro-batches, of which the last has one prompt.
        assert_eq!(of(2, 5, 2), [0..2, 2..5]);
        // Fewer micro-batches than leaves: some leaves are empty.
        assert_eq!(of(4, 3, 1), [0..0, 0..1, 1..2, 2..3]);
        // Two updates of a rollout, the second with one prompt less.
        assert_eq!(split(2, Some(4)).leaves_of_rollout(7, 1), [0..2, 2..4, 4..5, 5..7]);
    }

    #[test]
    fn the_rank_that_trains_on_a_prompt_owns_it() {
        let owners = |size: usize, leaves, prompts_per_step, prompts| {
            let ranks = Ranks::new(omnigrpo_ranks::Threads::new(size).swap_remove(0));
            Split { ranks, ..split(leaves, prompts_per_step) }.owners(prompts, 1)
        };
        assert_eq!(owners(1, 4, None, 5), [0; 5]);
        assert_eq!(owners(2, 2, None, 4), [0, 0, 1, 1]);
        assert_eq!(owners(2, 4, None, 5), [0, 0, 1, 1, 1]);
        assert_eq!(owners(2, 2, Some(4), 7), [0, 0, 1, 1, 0, 1, 1]);
        assert_eq!(owners(4, 4, None, 3), [1, 2, 3]);
    }

    #[test]
    fn every_rank_has_the_same_number_of_leaves() {
        let mut three = split(3, None);
        assert!(three.validate().is_ok());
        three.ranks = Ranks::new(omnigrpo_ranks::Threads::new(2).swap_remove(0));
        let told = three.validate().unwrap_err().to_string();
        assert!(
            told.contains("Division::leaves") && told.contains("a multiple of the number of ranks, 2"),
            "{told}"
        );
        assert!(split(0, None).validate().is_err());
    }
}
