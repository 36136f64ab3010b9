//! Completions to rewards.

use std::collections::HashMap;

use omnigrpo_data::{Sample, ThinkMode};
use omnigrpo_rewards::{RewardInput, RewardMatrix, RewardSet, RowKey, Think};
use omnigrpo_rollout::{Completion, FinishReason};

use crate::error::Result;
use crate::rows::media_paths;

/// Scores the completions of several rows, prompt-major.
///
/// # Errors
/// As [`RewardSet::score`].
pub fn score(
    rewards: &RewardSet,
    rows: &[(&Sample, &[Completion])],
    seed: u64,
    step: u64,
) -> Result<RewardMatrix> {
    with_inputs(rows, seed, step, |inputs| Ok(rewards.score(inputs)?))
}

/// As [`score`], with the reward of that name alone.
pub(crate) fn score_by(
    rewards: &RewardSet,
    name: &str,
    rows: &[(&Sample, &[Completion])],
    seed: u64,
    step: u64,
) -> Result<Vec<Option<f64>>> {
    with_inputs(rows, seed, step, |inputs| Ok(rewards.score_by(name, inputs)?))
}

fn with_inputs<T>(
    rows: &[(&Sample, &[Completion])],
    seed: u64,
    step: u64,
    scored: impl FnOnce(&[RewardInput<'_>]) -> Result<T>,
) -> Result<T> {
    let contexts: Vec<_> = rows.iter().map(|(sample, _)| (sample.question(), media_paths(sample))).collect();
    let mut inputs = Vec::new();
    let before = occurrences(rows.iter().map(|(sample, _)| sample.row));
    for (((sample, completions), (question, paths)), before) in rows.iter().zip(&contexts).zip(before) {
        let first = before as usize * completions.len();
        for (index, completion) in completions.iter().enumerate() {
            inputs.push(RewardInput {
                prompt: question,
                completion: &completion.text,
                completion_ids: &completion.ids,
                solution: sample.solution.as_deref(),
                columns: &sample.columns,
                think: match sample.think {
                    ThinkMode::On => Think::On,
                    ThinkMode::Off => Think::Off,
                },
                media_paths: paths,
                key: RowKey { seed, step, row: sample.row, sample: (first + index) as u64 },
                truncated: completion.finish_reason == FinishReason::Length,
            });
        }
    }
    scored(&inputs)
}

/// For each row, how often it came before in the same list: its completions are numbered on, so that their random numbers
/// are others.
pub(crate) fn occurrences(rows: impl IntoIterator<Item = u64>) -> Vec<u32> {
    let mut seen = HashMap::new();
    let mut count = |row| {
        let next = seen.entry(row).or_insert(0);
        *next += 1;
        *next - 1
    };
    rows.into_iter().map(&mut count).collect()
}
