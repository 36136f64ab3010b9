//! Completions to rewards.

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
    for ((sample, completions), (question, paths)) in rows.iter().zip(&contexts) {
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
                key: RowKey { seed, step, row: sample.row, sample: index as u64 },
                truncated: completion.finish_reason == FinishReason::Length,
            });
        }
    }
    scored(&inputs)
}
