//! Interface of a reward, its results, and the combination of several rewards into one number per completion.
//!
//! Each reward declares its range. For each completion, it returns a finite number within the range, or "not applicable". A wrong
//! number of values, a value that is not finite or is outside the range, and a panic are errors that name the reward and the row.
//! They are never replaced with 0, since the model would learn from a silent 0.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use omnigrpo_data::{MediumRef, Think};
use omnigrpo_text::Turn;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::RewardError;

/// Key of one completion of a run. It keys the numbers of the `random` reward, so that they do not depend on batches, order or
/// resumption.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowKey {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step (or index of the rollout) of the completion.
    pub step: u64,
    /// Stable index of the dataset row.
    pub row: u64,
    /// Index of the completion within its group.
    pub sample: u64,
}

/// A completion to score, with all inputs of a reward.
#[derive(Debug, Clone, Copy)]
pub struct RewardInput<'a> {
    /// Text of the last user turn.
    pub prompt: &'a str,
    /// Conversation before the completion, including media.
    pub turns: &'a [Turn],
    /// Text of the completion, without its stop token.
    pub completion: &'a str,
    /// Token ids of the completion.
    pub completion_ids: &'a [u32],
    /// Verbatim ground truth with its tags, if the row has one; a list of accepted answers is JSON
    /// ([`accepted_answers`](omnigrpo_data::accepted_answers)).
    pub solution: Option<&'a str>,
    /// All columns of the dataset row.
    pub columns: &'a Map<String, Value>,
    /// Thinking mode.
    pub think: Think,
    /// Resolved paths of the row's media, in prompt order.
    pub media_paths: &'a [PathBuf],
    /// Media of the row with their reading options. `Part::Medium { kind, index }` of `turns` is the `index`-th medium of that
    /// kind.
    pub media: &'a [MediumRef],
    /// Key of this completion.
    pub key: RowKey,
    /// True if the completion reached the length limit before it stopped.
    pub truncated: bool,
    /// Number of turns at the end of `turns` that are part of the completion: earlier turns of the model, each with the answer of
    /// an environment.
    pub added_turns: usize,
    /// True if the prompt is a text that the completion continues as it stands, without a chat template.
    pub is_text: bool,
}

/// Records of a reward, in addition to its scores.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Logged {
    /// Metrics of the step.
    pub metrics: BTreeMap<String, f64>,
    /// Columns for the records of completions, with one value per completion, in order.
    pub columns: BTreeMap<String, Vec<Value>>,
}

/// Maximum input length of a reward, in its own tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenLimit {
    /// Maximum number of tokens of prompt and completion together.
    pub most: usize,
    /// Length in tokens of the longest prompt among the rows passed to [`Reward::applies`] so far; 0 before the first.
    pub longest_prompt: usize,
}

impl TokenLimit {
    /// Returns the number of tokens that remain for a completion after the longest prompt.
    pub fn room(&self) -> usize {
        self.most.saturating_sub(self.longest_prompt)
    }
}

/// A scoring function. Built-in rewards score one completion at a time. A program or an endpoint receives the batch.
pub trait Reward: Send + Sync {
    /// Returns the name in metrics (`rewards/<name>/mean`) and errors.
    fn name(&self) -> &str;

    /// Returns the smallest and largest possible value, inclusive. An unbounded side is infinite.
    fn range(&self) -> (f64, f64);

    /// Scores completions, one value each, in order. The value is `None` if the reward does not apply (for example, without a
    /// ground truth), or if the reward cannot read what the policy wrote. An error ends the run, and a resumed run samples the
    /// same completion again. Problems of a completion are therefore `None`, and counted in [`Self::take_logged`].
    ///
    /// # Errors
    /// Returns an error for any other problem that prevents scoring. Callers must not replace it with an invented value.
    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError>;

    /// Returns the records of the last scored batch. Called once per batch.
    fn take_logged(&self) -> Logged {
        Logged::default()
    }

    /// Returns true if the reward applies to a row, whatever the completion. Returns `None` if only scoring can tell.
    ///
    /// # Errors
    /// Returns an error that explains why no completion of the row can be scored.
    fn applies(&self, row: &RewardInput<'_>) -> Result<Option<bool>, RewardError> {
        let _ = row;
        Ok(None)
    }

    /// Returns the maximum input length, if the reward has one. It is compared with the length of completions before a run.
    fn token_limit(&self) -> Option<TokenLimit> {
        None
    }

    /// Scores the completions of one row before a run, so that an unreachable endpoint, a broken program or a wrong number of values
    /// is found before anything is sampled. Built-in rewards have nothing to probe.
    fn probe(&self, group: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        Ok(vec![None; group.len()])
    }
}

/// Scores of a batch: one row of `values` per reward, one entry per completion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewardMatrix {
    /// Reward names, in the requested order.
    pub names: Vec<String>,
    /// `values[reward][completion]`, unweighted; `None` where the reward does not apply.
    pub values: Vec<Vec<Option<f64>>>,
    /// Weight of each reward.
    pub weights: Vec<f64>,
    /// Weighted sum over the rewards that apply; `None` if no reward applies.
    pub total: Vec<Option<f64>>,
    /// Records of the rewards. Metrics have the names `rewards/<reward>/<name>`.
    pub logged: Logged,
}

impl RewardMatrix {
    /// Adds a reward of weight 1, with one value per completion.
    pub fn add(&mut self, name: &str, values: Vec<Option<f64>>) {
        for (total, value) in self.total.iter_mut().zip(&values) {
            if let Some(value) = value {
                *total = Some(total.unwrap_or(0.0) + value);
            }
        }
        self.names.push(name.to_owned());
        self.values.push(values);
        self.weights.push(1.0);
    }

    /// Returns the matrix of some of the completions, without the rewards' records.
    pub fn part(&self, completions: Range<usize>) -> Self {
        Self {
            names: self.names.clone(),
            values: self.values.iter().map(|row| row[completions.clone()].to_vec()).collect(),
            weights: self.weights.clone(),
            total: self.total[completions].to_vec(),
            logged: Logged::default(),
        }
    }

    /// Replaces the completions from `at` on, and their columns, with completions of another matrix of the same rewards.
    pub fn replace(&mut self, at: usize, other: &Self, completions: Range<usize>) {
        let to = at..at + completions.len();
        for (own, row) in self.values.iter_mut().zip(&other.values) {
            own[to.clone()].copy_from_slice(&row[completions.clone()]);
        }
        self.total[to.clone()].copy_from_slice(&other.total[completions.clone()]);
        for (name, own) in &mut self.logged.columns {
            let row = other.logged.columns.get(name);
            for (to, from) in to.clone().zip(completions.clone()) {
                own[to] = row.map_or(Value::Null, |row| row[from].clone());
            }
        }
    }

    /// Returns the mean and population standard deviation of each reward over the completions to which it applies. A reward that
    /// applies to no completion has `None`.
    pub fn mean_and_std(&self) -> Vec<Option<(f64, f64)>> {
        self.values.iter().map(|row| mean_and_std(row)).collect()
    }
}

fn mean_and_std(row: &[Option<f64>]) -> Option<(f64, f64)> {
    let given: Vec<f64> = row.iter().flatten().copied().collect();
    if given.is_empty() {
        return None;
    }
    let n = given.len() as f64;
    let mean = given.iter().sum::<f64>() / n;
    let variance = given.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    Some((mean, variance.sqrt()))
}

/// The rewards of a run, with their weights.
///
/// ```
/// use omnigrpo_rewards::{RewardOptions, build};
///
/// let options = RewardOptions { weights: vec![1.0, 0.5], ..RewardOptions::default() };
/// let rewards = build(&["accuracy", "format"], &options)?;
/// assert_eq!(rewards.names(), ["accuracy", "format"]);
/// # Ok::<(), omnigrpo_rewards::RewardError>(())
/// ```
pub struct RewardSet {
    rewards: Vec<Box<dyn Reward>>,
    weights: Vec<f64>,
}

impl std::fmt::Debug for RewardSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RewardSet").field("names", &self.names()).field("weights", &self.weights).finish()
    }
}

impl RewardSet {
    /// Combines rewards. Without weights, each reward has weight 1.
    ///
    /// # Errors
    /// Returns an error if the numbers of weights and rewards differ, a weight is not finite, two rewards have the same name, or
    /// no reward is given.
    pub fn new(rewards: Vec<Box<dyn Reward>>, weights: &[f64]) -> Result<Self, RewardError> {
        if rewards.is_empty() {
            return Err(RewardError::NoRewards);
        }
        for (index, reward) in rewards.iter().enumerate() {
            if rewards[..index].iter().any(|earlier| earlier.name() == reward.name()) {
                return Err(RewardError::NameTwice { name: reward.name().to_owned() });
            }
        }
        let weights = if weights.is_empty() { vec![1.0; rewards.len()] } else { weights.to_vec() };
        if weights.len() != rewards.len() || !weights.iter().all(|w| w.is_finite()) {
            let names = rewards.iter().map(|r| r.name().to_owned()).collect();
            return Err(RewardError::Weights { weights, names });
        }
        Ok(Self { rewards, weights })
    }

    /// Returns the names in the requested order.
    pub fn names(&self) -> Vec<&str> {
        self.rewards.iter().map(|reward| reward.name()).collect()
    }

    /// Returns the weights in the order of the names.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Returns the smallest and largest value of a reward.
    pub fn range_of(&self, name: &str) -> Option<(f64, f64)> {
        self.rewards.iter().find(|reward| reward.name() == name).map(|reward| reward.range())
    }

    /// Returns the range of the weighted sum, for display and for early stopping at the best possible score.
    pub fn range(&self) -> (f64, f64) {
        self.rewards.iter().zip(&self.weights).fold((0.0, 0.0), |(low, high), (reward, &weight)| {
            let (a, b) = reward.range();
            // The product of a weight of 0 and an infinite bound is NaN.
            let (a, b) = if weight == 0.0 { (0.0, 0.0) } else { (a * weight, b * weight) };
            (low + a.min(b), high + a.max(b))
        })
    }

    /// Scores a batch with every reward.
    ///
    /// # Errors
    /// Returns an error if a reward reports an error, panics, returns the wrong number of values, or returns a value that is not
    /// finite or is outside its range. The error names the reward and, if one row is the cause, that row.
    pub fn score(&self, batch: &[RewardInput<'_>]) -> Result<RewardMatrix, RewardError> {
        let values = self
            .rewards
            .iter()
            .map(|reward| checked(reward.as_ref(), batch))
            .collect::<Result<Vec<_>, _>>()?;
        let total = (0..batch.len())
            .map(|row| {
                let mut applied = values
                    .iter()
                    .zip(&self.weights)
                    .filter_map(|(scores, weight)| Some(scores[row]? * weight));
                let first = applied.next()?;
                Some(applied.fold(first, |sum, value| sum + value))
            })
            .collect();
        let names = self.rewards.iter().map(|reward| reward.name().to_owned()).collect();
        let mut logged = Logged::default();
        for reward in &self.rewards {
            let own = reward.take_logged();
            let named = |(name, value)| (format!("rewards/{}/{name}", reward.name()), value);
            logged.metrics.extend(own.metrics.into_iter().map(named));
            logged.columns.extend(own.columns);
        }
        Ok(RewardMatrix { names, values, weights: self.weights.clone(), total, logged })
    }

    /// Returns, for each reward in order, whether it applies to a row, judged by the row's columns. The value is `None` if only
    /// scoring can tell.
    ///
    /// # Errors
    /// Returns the error of the first reward that can score no completion of the row.
    pub fn applies(&self, row: &RewardInput<'_>) -> Result<Vec<Option<bool>>, RewardError> {
        let bare = RewardInput { completion: "", completion_ids: &[], truncated: false, ..*row };
        let ask = |reward: &dyn Reward| {
            omnigrpo_guard::guarded(|| reward.applies(&bare)).unwrap_or_else(|payload| {
                Err(RewardError::Panicked {
                    reward: reward.name().to_owned(),
                    row: row_name(0, &bare),
                    what: message(payload.as_ref()),
                })
            })
        };
        self.rewards.iter().map(|reward| ask(reward.as_ref())).collect()
    }

    /// Returns the rewards that cannot read a completion of this length after their longest prompt so far, with their limits. One
    /// token of the policy counts as one token of the reward.
    pub fn too_short_for(&self, completion_tokens: usize) -> Vec<(&str, TokenLimit)> {
        let limits = self.rewards.iter().filter_map(|reward| Some((reward.name(), reward.token_limit()?)));
        limits.filter(|(_, limit)| limit.room() < completion_tokens).collect()
    }

    /// Asks every program and endpoint to score the completions of one row. Returns the name and the values of each reward; built-in
    /// rewards have none.
    #[expect(clippy::type_complexity, reason = "names with their scores, taken apart at once")]
    pub fn probe(&self, group: &[RewardInput<'_>]) -> Result<Vec<(&str, Vec<Option<f64>>)>, RewardError> {
        let each = self.rewards.iter().map(|reward| {
            let values = reward.probe(group)?;
            check(reward.as_ref(), group, &values)?;
            Ok((reward.name(), values))
        });
        each.collect()
    }

    /// Scores a batch with only the named reward.
    pub fn score_by(&self, name: &str, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        match self.rewards.iter().find(|reward| reward.name() == name) {
            Some(reward) => checked(reward.as_ref(), batch),
            None => Err(RewardError::UnknownReward {
                name: name.to_owned(),
                hint: String::new(),
                known: self.names().join(", "),
            }),
        }
    }
}

/// Returns the scores of one reward after checking their number and range.
fn checked(reward: &dyn Reward, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
    let scores = guarded(reward, batch)?;
    check(reward, batch, &scores)?;
    Ok(scores)
}

/// Runs a reward and converts a panic into an error. After a panic, rows are scored one by one to find the cause.
fn guarded(reward: &dyn Reward, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
    let run = |rows: &[RewardInput<'_>]| omnigrpo_guard::guarded(|| reward.score(rows));
    let payload = match run(batch) {
        Ok(result) => return result,
        Err(payload) => payload,
    };
    let culprit = (0..batch.len()).find(|&index| run(&batch[index..=index]).is_err());
    Err(RewardError::Panicked {
        reward: reward.name().to_owned(),
        row: culprit.map_or_else(|| "unknown".to_owned(), |index| row_name(index, &batch[index])),
        what: message(payload.as_ref()),
    })
}

/// Returns the message of a panic.
fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

fn check(reward: &dyn Reward, batch: &[RewardInput<'_>], scores: &[Option<f64>]) -> Result<(), RewardError> {
    if scores.len() != batch.len() {
        return Err(RewardError::Count {
            reward: reward.name().to_owned(),
            got: scores.len(),
            expected: batch.len(),
        });
    }
    let (low, high) = reward.range();
    for (index, score) in scores.iter().enumerate() {
        let Some(value) = *score else { continue };
        // A sum of weighted parts may exceed its bound by a rounding error.
        let slack = 1e-9 * (1.0 + value.abs());
        if !value.is_finite() || value < low - slack || value > high + slack {
            return Err(RewardError::Value {
                reward: reward.name().to_owned(),
                row: row_name(index, &batch[index]),
                value,
                low,
                high,
            });
        }
    }
    Ok(())
}

/// Returns the name of a row in errors: its index in the batch, the row of the dataset and the sample.
pub(crate) fn row_name(index: usize, input: &RewardInput<'_>) -> String {
    format!("{index} (dataset row {}, sample {})", input.key.row, input.key.sample)
}

/// Result of the function of a [`reward`].
pub trait Score {
    /// Converts the result to a number, to `None` if the reward does not apply, or to an error.
    ///
    /// # Errors
    /// Returns the reason why the row cannot be scored.
    fn score(self) -> Result<Option<f64>, String>;
}

impl Score for f64 {
    fn score(self) -> Result<Option<f64>, String> {
        Ok(Some(self))
    }
}

impl Score for Option<f64> {
    fn score(self) -> Result<Option<f64>, String> {
        Ok(self)
    }
}

impl Score for Result<Option<f64>, String> {
    fn score(self) -> Result<Option<f64>, String> {
        self
    }
}

/// Creates a reward from a function of one completion. The function returns a number within `range` (whose ends may be infinite),
/// `None` if the reward does not apply, or an error that describes the problem of the row.
///
/// ```
/// use omnigrpo_rewards::{RewardSet, reward};
///
/// let polite = reward("polite", (0.0, 1.0), |row| f64::from(row.completion.contains("please")));
/// let short = reward("short", (f64::NEG_INFINITY, 0.0), |row| -(row.completion.len() as f64));
/// // Weights have the same order.
/// let rewards = RewardSet::new(vec![polite, short], &[1.0, 0.01])?;
/// assert_eq!(rewards.names(), ["polite", "short"]);
/// # Ok::<(), omnigrpo_rewards::RewardError>(())
/// ```
pub fn reward<S: Score>(
    name: impl Into<String>,
    range: (f64, f64),
    score: impl Fn(&RewardInput<'_>) -> S + Send + Sync + 'static,
) -> Box<dyn Reward> {
    Box::new(PerRow { name: name.into(), range, score: move |row: &RewardInput<'_>| score(row).score() })
}

/// A reward that is a pure function of one completion.
pub(crate) struct PerRow<N, F> {
    /// Name in metrics and errors.
    pub name: N,
    /// Declared range.
    pub range: (f64, f64),
    /// Scoring function. Its error describes the problem of the row.
    pub score: F,
}

impl<N, F> Reward for PerRow<N, F>
where
    N: AsRef<str> + Send + Sync,
    F: Fn(&RewardInput<'_>) -> Result<Option<f64>, String> + Send + Sync,
{
    fn name(&self) -> &str {
        self.name.as_ref()
    }

    fn range(&self) -> (f64, f64) {
        self.range
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let score = |(index, input): (usize, &RewardInput<'_>)| {
            (self.score)(input).map_err(|what| RewardError::Row {
                reward: self.name().to_owned(),
                row: row_name(index, input),
                what,
            })
        };
        batch.iter().enumerate().map(score).collect()
    }

    /// Only the row decides whether a built-in reward applies, so an empty completion is sufficient.
    fn applies(&self, row: &RewardInput<'_>) -> Result<Option<bool>, RewardError> {
        Ok(self.score(std::slice::from_ref(row))?.first().map(Option::is_some))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Row;

    fn fixed(name: &'static str, range: (f64, f64), values: Vec<Option<f64>>) -> Box<dyn Reward> {
        struct Fixed(&'static str, (f64, f64), Vec<Option<f64>>);
        impl Reward for Fixed {
            fn name(&self) -> &str {
                self.0
            }
            fn range(&self) -> (f64, f64) {
                self.1
            }
            fn score(&self, _: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
                Ok(self.2.clone())
            }
        }
        Box::new(Fixed(name, range, values))
    }

    fn three() -> Vec<Row> {
        (0..3).map(|i| Row::new("q", "c", "s").sample(i)).collect()
    }

    #[test]
    fn total_is_the_weighted_sum_of_what_applies() {
        let rewards = vec![
            fixed("a", (0.0, 1.0), vec![Some(1.0), None, None]),
            fixed("b", (0.0, 3.0), vec![Some(3.0), Some(1.5), None]),
        ];
        let set = RewardSet::new(rewards, &[0.5, 2.0]).unwrap();
        let rows = three();
        let batch: Vec<_> = rows.iter().map(Row::input).collect();
        let matrix = set.score(&batch).unwrap();
        assert_eq!(matrix.total, vec![Some(6.5), Some(3.0), None]);
        assert_eq!(matrix.mean_and_std(), vec![Some((1.0, 0.0)), Some((2.25, 0.75))]);
        assert_eq!(set.range(), (0.0, 6.5));
        assert_eq!(set.score_by("b", &batch).unwrap(), vec![Some(3.0), Some(1.5), None]);
        assert!(set.score_by("c", &batch).unwrap_err().to_string().contains("a, b"));

        let mut matrix = matrix;
        matrix.add("bonus", vec![Some(0.25), None, None]);
        assert_eq!(matrix.total, vec![Some(6.75), Some(3.0), None]);
        assert_eq!((matrix.names[2].as_str(), matrix.weights[2]), ("bonus", 1.0));
        assert_eq!(matrix.mean_and_std()[2], Some((0.25, 0.0)));
    }

    #[test]
    fn wrong_count_nan_and_range_name_the_reward_and_the_row() {
        let rows = three();
        let batch: Vec<_> = rows.iter().map(Row::input).collect();
        let message = |values: Vec<Option<f64>>| {
            let set = RewardSet::new(vec![fixed("mine", (0.0, 1.0), values)], &[]).unwrap();
            set.score(&batch).unwrap_err().to_string()
        };
        let count = message(vec![Some(1.0)]);
        assert!(count.contains("mine") && count.contains("1 value") && count.contains('3'), "{count}");
        let nan = message(vec![Some(1.0), Some(f64::NAN), None]);
        assert!(nan.contains("mine") && nan.contains("row 1 (dataset row 0, sample 1)"), "{nan}");
        let high = message(vec![Some(1.0), None, Some(1.5)]);
        assert!(high.contains("row 2") && high.contains("1.5") && high.contains("0..=1"), "{high}");
    }

    #[test]
    fn a_panic_becomes_an_error_that_names_the_row() {
        let score = |input: &RewardInput<'_>| {
            assert!(input.key.sample != 2, "sample two is cursed");
            Ok(Some(0.0))
        };
        let set =
            RewardSet::new(vec![Box::new(PerRow { name: "cursed", range: (0.0, 1.0), score })], &[]).unwrap();
        let rows = three();
        let batch: Vec<_> = rows.iter().map(Row::input).collect();
        let error = set.score(&batch).unwrap_err().to_string();
        assert!(error.contains("cursed") && error.contains("row 2"), "{error}");
        assert!(error.contains("sample two is cursed"), "{error}");
    }

    #[test]
    fn rows_are_asked_about_before_there_are_completions() {
        let options = crate::RewardOptions::default();
        let names = ["accuracy", "iou", "format", "length"].map(str::to_owned);
        let set = crate::build(&names, &options).unwrap();
        let applies = |row: Row| set.applies(&row.input()).map_err(|error| error.to_string());
        assert_eq!(
            applies(Row::new("q", "<answer>said</answer>", "yes")).unwrap(),
            [Some(true), Some(false), Some(true), Some(true)]
        );
        let mut bare = Row::new("q", "", "");
        bare.solution = None;
        assert_eq!(applies(bare).unwrap(), [Some(false), Some(false), Some(true), Some(false)]);
        let wrong = Row::new("q", "", "yes").column("reward_method", serde_json::json!("bogus"));
        let error = applies(wrong).unwrap_err();
        assert!(error.contains("`accuracy`") && error.contains("`reward_method`"), "{error}");
        // A reward that is not a function of one row cannot tell, and is not called.
        let set = RewardSet::new(vec![fixed("mine", (0.0, 1.0), vec![])], &[]).unwrap();
        assert_eq!(set.applies(&Row::new("q", "", "").input()).unwrap(), [None]);
        assert!(set.probe(&[Row::new("q", "", "").input()]).is_ok());
    }

    #[test]
    fn weights_must_match_and_names_must_differ() {
        let two = || vec![fixed("a", (0.0, 1.0), vec![]), fixed("b", (0.0, 1.0), vec![])];
        let error = RewardSet::new(two(), &[1.0]).unwrap_err().to_string();
        assert!(error.contains("a, b"), "{error}");
        assert!(RewardSet::new(two(), &[1.0, f64::INFINITY]).is_err());
        let twice = vec![fixed("a", (0.0, 1.0), vec![]), fixed("a", (0.0, 1.0), vec![])];
        assert!(RewardSet::new(twice, &[]).unwrap_err().to_string().contains("name=spec"));
        assert!(RewardSet::new(vec![], &[]).is_err());
    }
}
