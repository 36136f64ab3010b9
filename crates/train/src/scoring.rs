//! Scoring of completions.

use omnigrpo_data::{Cause, MediumRef, Sample, renumbered};
use omnigrpo_rewards::{RewardError, RewardInput, RewardMatrix, RewardSet, RowKey};
use omnigrpo_rollout::{Completion, FinishReason};
use omnigrpo_text::{Role, Turn};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::{Result, TrainError};
use crate::rows::{PreparedRow, media_paths, occurrences};
use crate::split::Split;

/// Scores completions on the first rank, so that a reward with a process or a bill runs once. Returns the scores on all ranks.
pub(crate) fn once<T: Serialize + DeserializeOwned>(
    split: &Split,
    rows: &[PreparedRow],
    completions: &[Vec<Completion>],
    score: impl FnOnce(&[(&Sample, &[Completion])]) -> Result<T>,
) -> Result<T> {
    split.by_first(|| {
        let pairs = rows.iter().zip(completions).map(|(row, own)| (&row.sample, own.as_slice()));
        score(&pairs.collect::<Vec<_>>())
    })
}

/// Scores the completions of several rows. The result is ordered by prompt, then completion.
pub fn score(
    rewards: &RewardSet,
    rows: &[(&Sample, &[Completion])],
    seed: u64,
    step: u64,
) -> Result<RewardMatrix> {
    with_inputs(rows, seed, step, |inputs| Ok(rewards.score(inputs)?))
}

/// Scores like [`score`], but only with the reward `name`.
pub(crate) fn score_by(
    rewards: &RewardSet,
    name: &str,
    rows: &[(&Sample, &[Completion])],
    seed: u64,
    step: u64,
) -> Result<Vec<Option<f64>>> {
    with_inputs(rows, seed, step, |inputs| Ok(rewards.score_by(name, inputs)?))
}

/// Returns for each reward whether it applies to a row; `None` if this depends on the completion.
///
/// # Errors
/// Returns an error if no completion of the row can be scored, or if the machine fails ([`omnigrpo_guard::fault`]).
pub fn applies(rewards: &RewardSet, sample: &Sample) -> Result<Vec<Option<bool>>, Cause> {
    let nothing = completion(String::new(), Vec::new());
    let asked = with_inputs(&[(sample, &[nothing])], 0, 0, |inputs| {
        Ok(inputs.iter().map(|i| rewards.applies(i)).next())
    });
    match asked {
        Ok(Some(Ok(applies))) => Ok(applies),
        Ok(Some(Err(RewardError::Row { reward, what, .. }))) => {
            Err(format!("reward `{reward}`: {what}").into())
        }
        Ok(Some(Err(error))) => Err(error.into()),
        Ok(None) => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

/// Scores the completions of one row with the rewards outside of this process. If a reward cannot be started or reached, or does not
/// return one value for each completion, this fails before anything is sampled. Returns the name and the values of each reward;
/// built-in rewards have none.
pub fn probe(
    rewards: &RewardSet,
    sample: &Sample,
    group: &[Completion],
) -> Result<Vec<(String, Vec<Option<f64>>)>> {
    with_inputs(&[(sample, group)], 0, 0, |inputs| {
        let values = rewards.probe(inputs)?;
        Ok(values.into_iter().map(|(name, values)| (name.to_owned(), values)).collect())
    })
}

pub(crate) fn completion(text: String, ids: Vec<u32>) -> Completion {
    Completion::recorded(ids, FinishReason::Stop, text)
}

/// Adds the rows and their completions to an error of scoring. Each row has the format of a dataset row.
pub(crate) fn unscored(error: TrainError, rows: &[(&Sample, &[Completion])]) -> TrainError {
    let TrainError::Reward(source) = error else { return error };
    let line = |(sample, completions): &(&Sample, &[Completion])| {
        let mut columns = sample.columns.clone();
        for recorded in ["completion_ids", "logprobs", "rewards"] {
            columns.remove(recorded);
        }
        let said = completions
            .iter()
            .map(|c| json!({ "text": c.text, "completion_ids": c.ids, "finish_reason": c.finish_reason }));
        columns.insert("id".to_owned(), sample.id.clone().into());
        columns.insert("completions".to_owned(), said.collect());
        Value::Object(columns).to_string()
    };
    TrainError::Unscored { source: Box::new(source), rows: rows.iter().map(line).collect() }
}

fn with_inputs<T>(
    rows: &[(&Sample, &[Completion])],
    seed: u64,
    step: u64,
    scored: impl FnOnce(&[RewardInput<'_>]) -> Result<T>,
) -> Result<T> {
    let contexts: Vec<_> = rows.iter().map(|(sample, _)| (sample.question(), media_paths(sample))).collect();
    let told: Vec<Vec<Option<Told>>> =
        rows.iter().map(|(sample, own)| own.iter().map(|c| Told::of(sample, c)).collect()).collect();
    let mut inputs = Vec::new();
    let before = occurrences(rows.iter().map(|(sample, _)| sample.row));
    for ((((sample, completions), (question, paths)), told), before) in
        rows.iter().zip(&contexts).zip(&told).zip(before)
    {
        let first = before as usize * completions.len();
        for (index, (completion, told)) in completions.iter().zip(told).enumerate() {
            inputs.push(RewardInput {
                prompt: question,
                turns: told.as_ref().map_or(&sample.turns, |told| &told.turns),
                completion: &completion.text,
                completion_ids: told.as_ref().map_or(&completion.ids, |told| &told.ids),
                solution: sample.solution.as_deref(),
                columns: &sample.columns,
                think: sample.think,
                media_paths: paths,
                media: told.as_ref().map_or(&sample.media, |told| &told.media),
                key: RowKey { seed, step, row: sample.row, sample: (first + index) as u64 },
                truncated: completion.finish_reason == FinishReason::Length,
                added_turns: 2 * completion.turns.len(),
                is_text: sample.is_text,
            });
        }
    }
    scored(&inputs)
}

/// Conversation before the last turn of a completion with turns of an environment.
struct Told {
    turns: Vec<Turn>,
    media: Vec<MediumRef>,
    /// Sampled tokens of all turns of the model.
    ids: Vec<u32>,
}

impl Told {
    /// Returns the conversation; `None` if no environment added a turn.
    fn of(sample: &Sample, completion: &Completion) -> Option<Self> {
        if completion.turns.is_empty() {
            return None;
        }
        let (mut turns, mut media) = (sample.turns.clone(), sample.media.clone());
        for (added, model) in completion.turns.iter().zip(&completion.earlier) {
            turns.push(Turn::text(Role::Assistant, model.clone()));
            turns.push(renumbered(&added.said, &media));
            media.extend(added.sources.iter().cloned());
        }
        Some(Self { turns, media, ids: completion.sampled_ids() })
    }
}
