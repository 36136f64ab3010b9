//! State of a rollout that still has updates to come, as a checkpoint stores it.

use std::path::Path;

use omnigrpo_data::Dataset;
use omnigrpo_grpo::Covariance;
use omnigrpo_models::{Model, PromptBuilder, TopTokens};
use omnigrpo_rewards::{Logged, RewardMatrix};
use omnigrpo_rollout::{Completion, FinishReason};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{Result, TrainError};
use crate::features::settle;
use crate::rollouts::{Group, Rollouts, Scored};
use crate::rows::{prepare, prepare_split};
use crate::saved_turns::{self, SavedTurn};
use crate::step::Divided;

/// Advice where a rollout in progress cannot be restored.
const WITHOUT: &str = "resume from a checkpoint without a rollout in progress";

/// State of a rollout that still has updates to come.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BufferState {
    /// Number of updates already done with this rollout.
    pub iteration: usize,
    /// Row numbers in the dataset.
    pub rows: Vec<u64>,
    /// Pass over the data that drew each row.
    pub epochs: Vec<u64>,
    /// Digest of the prompt's tokens, by row. Prompts are built again from the rows, so an environment must open a row in the same
    /// way each time.
    #[serde(default)]
    pub prompts: Vec<String>,
    /// Token ids by row and completion.
    pub ids: Vec<Vec<Vec<u32>>>,
    /// Text by row and completion.
    pub texts: Vec<Vec<String>>,
    /// Completions that reached the length limit, by row and completion.
    pub truncated: Vec<Vec<bool>>,
    /// Old log-probabilities by row, completion and token. JSON preserves f32 values exactly.
    pub old: Vec<Vec<Vec<f32>>>,
    /// Log-probabilities at sampling by row, completion and token; empty for recorded completions.
    #[serde(default)]
    pub sampled: Vec<Vec<Vec<f32>>>,
    /// Log-probabilities under the reference by row, completion and token; null if they have not been computed yet.
    #[serde(default)]
    pub reference: Vec<Vec<Option<Vec<f32>>>>,
    /// Most probable tokens of the teacher by row, completion and token; empty unless the loss reads them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub teacher: Vec<Vec<Option<TopTokens>>>,
    /// Decision of the entropy gate for each token, true if the token is kept; null without a gate.
    #[serde(default)]
    pub kept: Vec<Vec<Option<Vec<bool>>>>,
    /// Tokens that the covariance chooses; null if the covariance is off.
    #[serde(default)]
    pub chosen: Vec<Vec<Option<Vec<bool>>>>,
    /// Turns of an environment by row and completion; empty without an environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<Vec<Vec<SavedTurn>>>,
    /// Reward names.
    pub reward_names: Vec<String>,
    /// Reward weights.
    pub reward_weights: Vec<f64>,
    /// Reward values, one list per name.
    pub reward_values: Vec<Vec<Option<f64>>>,
    /// Weighted totals.
    pub reward_totals: Vec<Option<f64>>,
}

impl BufferState {
    /// Captures the state of a rollout after `iteration` of its updates. The rollout may be split into parts.
    pub(crate) fn of(rollouts: &[Rollouts], iteration: usize) -> Self {
        fn each<T>(rollouts: &[Rollouts], what: impl Fn(&Scored) -> T) -> Vec<Vec<T>> {
            let groups = rollouts.iter().flat_map(|part| &part.groups);
            groups.map(|group| group.completions.iter().map(&what).collect()).collect()
        }
        let groups = || rollouts.iter().flat_map(|part| &part.groups);
        let (names, weights) = rollouts
            .first()
            .map(|part| (part.rewards.names.clone(), part.rewards.weights.clone()))
            .unwrap_or_default();
        let turns = each(rollouts, |c| SavedTurn::of(&c.completion));
        let teacher = each(rollouts, |c| c.teacher.clone());
        let values =
            |reward: usize| rollouts.iter().flat_map(|part| part.rewards.values[reward].clone()).collect();
        Self {
            iteration,
            rows: groups().map(|group| group.row.sample.row).collect(),
            epochs: groups().map(|group| group.row.epoch).collect(),
            prompts: groups().map(|group| digest(&group.row.prompt.ids)).collect(),
            ids: each(rollouts, |c| c.completion.ids.clone()),
            texts: each(rollouts, |c| c.completion.text.clone()),
            truncated: each(rollouts, Scored::is_truncated),
            old: each(rollouts, |c| c.old.clone().unwrap_or_default()),
            sampled: each(rollouts, |c| c.completion.logprobs.clone()),
            reference: each(rollouts, |c| c.reference.clone()),
            teacher: if teacher.iter().flatten().all(Option::is_none) { Vec::new() } else { teacher },
            kept: each(rollouts, |c| c.kept.clone()),
            chosen: each(rollouts, |c| c.chosen.clone()),
            turns: if turns.iter().flatten().all(Vec::is_empty) { Vec::new() } else { turns },
            reward_values: (0..names.len()).map(values).collect(),
            reward_names: names,
            reward_weights: weights,
            reward_totals: rollouts.iter().flat_map(|part| part.rewards.total.clone()).collect(),
        }
    }

    /// Returns true if every list has an entry per row, completion and token. The lists of a damaged file may be shorter.
    pub(crate) fn is_whole(&self) -> bool {
        let rows = self.rows.len();
        let completions: usize = self.ids.iter().map(Vec::len).sum();
        let Some(sampled_tokens) = self.sampled_tokens() else { return false };
        let groups = |g: usize| {
            let (ids, old) = (&self.ids[g], &self.old[g]);
            let fits = |(&tokens, old): (&usize, &Vec<f32>)| tokens == old.len();
            self.texts[g].len() == ids.len()
                && self.truncated[g].len() == ids.len()
                && old.len() == ids.len()
                && sampled_tokens[g].iter().zip(old).all(fits)
        };
        let lists =
            [self.epochs.len(), self.ids.len(), self.texts.len(), self.truncated.len(), self.old.len()];
        let sampled = self.sampled.is_empty()
            || self.sampled.len() == rows
                && self.sampled.iter().zip(&self.ids).all(|(own, ids)| own.len() == ids.len());
        lists.iter().all(|&n| n == rows)
            && sampled
            && (self.prompts.is_empty() || self.prompts.len() == rows)
            && per_token(&self.reference, &sampled_tokens)
            && per_token(&self.kept, &sampled_tokens)
            && per_token(&self.chosen, &sampled_tokens)
            && self.teacher_is_whole(&sampled_tokens)
            && (0..rows).all(groups)
            && self.reward_totals.len() == completions
            && self.reward_values.len() == self.reward_names.len()
            && self.reward_weights.len() == self.reward_names.len()
            && self.reward_values.iter().all(|values| values.len() == completions)
    }

    /// Returns true if the teacher's tokens have an entry for each completion, token and place, or if there are none.
    fn teacher_is_whole(&self, tokens: &[Vec<usize>]) -> bool {
        let of = |own: &[Option<TopTokens>]| {
            own.iter().map(|top| top.as_ref().map(|top| top.k)).collect::<Vec<_>>()
        };
        let fits = |(own, &tokens): (&Option<TopTokens>, &usize)| {
            let whole =
                |top: &TopTokens| [top.tokens.len(), top.logprobs.len()] == [tokens.saturating_mul(top.k); 2];
            own.as_ref().is_none_or(whole)
        };
        let mut sizes = self.teacher.iter().flat_map(|own| of(own));
        let first = sizes.next();
        let group = |(own, tokens): (&Vec<Option<TopTokens>>, &Vec<usize>)| {
            own.len() == tokens.len() && own.iter().zip(tokens).all(fits)
        };
        self.teacher.is_empty()
            || sizes.all(|size| Some(size) == first)
                && self.teacher.len() == tokens.len()
                && self.teacher.iter().zip(tokens).all(group)
    }

    /// Returns the number of sampled tokens by row and completion, or `None` if the turns do not fit the completions.
    fn sampled_tokens(&self) -> Option<Vec<Vec<usize>>> {
        let (rows, none) = (self.ids.len(), Vec::new());
        if !(self.turns.is_empty() || self.turns.len() == rows) {
            return None;
        }
        let group = |(g, ids): (usize, &Vec<Vec<u32>>)| {
            let turns = self.turns.get(g).unwrap_or(&none);
            let placed = |(turns, ids): (&Vec<SavedTurn>, &Vec<u32>)| {
                let mut end = 0;
                turns.iter().all(|turn| turn.is_in(ids, &mut end))
            };
            let fits = turns.is_empty() || turns.len() == ids.len() && turns.iter().zip(ids).all(placed);
            let added = |c: usize| turns.get(c).into_iter().flatten().map(SavedTurn::tokens).sum::<usize>();
            let each = ids.iter().enumerate().map(|(c, ids)| ids.len().checked_sub(added(c)));
            each.collect::<Option<Vec<usize>>>().filter(|_| fits)
        };
        self.ids.iter().enumerate().map(group).collect()
    }

    /// Returns the state with the files of turns in the run directory `dir`, which may have been moved.
    pub(crate) fn following(mut self, dir: &Path) -> Self {
        self.turns.iter_mut().flatten().flatten().for_each(|turn| turn.follow(dir));
        self
    }

    /// Restores the rollout, split into parts of `prompts_per_step` prompts. Prompts and features are recomputed from the rows
    /// and the weights.
    ///
    /// # Errors
    /// Returns an error if the groups have another size than the algorithm's, if a row can no longer be read, or if an earlier version
    /// wrote a checkpoint without the numbers that this algorithm needs.
    pub fn restore(
        &self,
        algorithm: &Divided,
        model: &Model,
        prompts: &PromptBuilder,
        dataset: &Dataset,
        prompts_per_step: usize,
        moving_reference: bool,
    ) -> Result<Vec<Rollouts>> {
        self.check(algorithm, moving_reference)?;
        let at: Vec<(u64, u64)> = self.rows.iter().copied().zip(self.epochs.iter().copied()).collect();
        let owners = algorithm.split.owners(at.len(), algorithm.micro());
        let rows = prepare_split(&algorithm.split, dataset, &at, &owners, |(row, epoch)| {
            prepare(dataset, prompts, None, row, epoch)
        })?;
        let mut groups = Vec::with_capacity(self.rows.len());
        for (r, (number, prepared)) in self.rows.iter().zip(rows).enumerate() {
            let fail = |what| TrainError::Checkpoint {
                what: format!("row {number} of a rollout in progress {what}"),
            };
            let row = prepared.map_err(|e| fail(format!("can no longer be read: {}", e.reason)))?;
            if self.prompts.get(r).is_some_and(|prompt| *prompt != digest(&row.prompt.ids)) {
                return Err(fail(format!(
                    "has another prompt than when its completions were sampled; an environment must open a row in the same way \
                     each time; {WITHOUT}"
                )));
            }
            groups.push(Group { features: Vec::new(), completions: self.completions(r), row });
        }
        settle(model, prompts, algorithm, &mut groups)?;
        let rewards = RewardMatrix {
            names: self.reward_names.clone(),
            values: self.reward_values.clone(),
            weights: self.reward_weights.clone(),
            total: self.reward_totals.clone(),
            logged: Logged::default(),
        };
        let rollouts = Rollouts::new(algorithm, groups, Vec::new(), rewards)?;
        Ok(rollouts.split(prompts_per_step))
    }

    /// Returns an error if the groups have another size than the algorithm's, or numbers that it needs are missing.
    fn check(&self, algorithm: &Divided, moving_reference: bool) -> Result<()> {
        let size = algorithm.num_generations;
        if self.rows.is_empty() || self.ids.iter().any(|group| group.len() != size) {
            let rows = self.rows.len();
            let what = format!(
                "its rollout in progress does not fit the run: {rows} rows, expected at least one, each with {size} completions; \
                 {WITHOUT}"
            );
            return Err(TrainError::Checkpoint { what });
        }
        let needed = [
            ("top_entropy_quantile", algorithm.loss.top_entropy < 1.0, self.kept.is_empty()),
            ("loss_type", algorithm.loss.covariance != Covariance::Off, self.chosen.is_empty()),
            ("the reference or teacher", moving_reference, self.reference.is_empty()),
        ];
        let Some((setting, ..)) = needed.iter().find(|(_, needed, missing)| *needed && *missing) else {
            return Ok(());
        };
        let what = format!(
            "its rollout in progress lacks the data for {setting}, because an earlier version wrote it; {WITHOUT}"
        );
        Err(TrainError::Checkpoint { what })
    }

    /// Returns the completions of group `g`.
    fn completions(&self, g: usize) -> Vec<Scored> {
        let each = self.ids[g].iter().zip(&self.texts[g]).zip(self.truncated[g].iter().zip(&self.old[g]));
        let mut sampled = self.sampled.get(g).into_iter().flatten();
        let mut reference = self.reference.get(g).into_iter().flatten();
        let mut teacher = self.teacher.get(g).into_iter().flatten();
        let mut kept = self.kept.get(g).into_iter().flatten();
        let mut chosen = self.chosen.get(g).into_iter().flatten();
        let mut turns = self.turns.get(g).into_iter().flatten();
        each.map(|((ids, text), (&cut, old))| {
            let reason = if cut { FinishReason::Length } else { FinishReason::Stop };
            let mut completion = Completion::recorded(ids.clone(), reason, text.clone());
            completion.logprobs = sampled.next().cloned().unwrap_or_default();
            saved_turns::give_back(&mut completion, turns.next().map_or(&[], Vec::as_slice));
            Scored {
                reference: reference.next().cloned().flatten(),
                teacher: teacher.next().cloned().flatten(),
                kept: kept.next().cloned().flatten(),
                chosen: chosen.next().cloned().flatten(),
                ..Scored::new(completion, Some(old.clone()))
            }
        })
        .collect()
    }
}

/// Returns a digest of tokens.
fn digest(ids: &[u32]) -> String {
    let mut hash = Sha256::new();
    ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns true if `lists` is empty or has one value per completion and sampled token. A completion without a list is accepted.
fn per_token<T>(lists: &[Vec<Option<Vec<T>>>], tokens: &[Vec<usize>]) -> bool {
    let fits = |(own, &tokens): (&Option<Vec<T>>, &usize)| own.as_ref().is_none_or(|own| own.len() == tokens);
    let group = |(own, tokens): (&Vec<Option<Vec<T>>>, &Vec<usize>)| {
        own.len() == tokens.len() && own.iter().zip(tokens).all(fits)
    };
    lists.is_empty() || lists.len() == tokens.len() && lists.iter().zip(tokens).all(group)
}
