//! Replay of recorded rollouts: the rows have completions, rewards and optionally log-probabilities.

use omnigrpo_data::{RecordedCompletion, RecordedRewards};
use omnigrpo_grpo::{advantage, mask};
use omnigrpo_guard::told;
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rewards::{Logged, RewardMatrix};
use omnigrpo_rollout::{Completion, FinishReason};

use crate::error::{Result, TrainError};
use crate::features::encode_own;
use crate::rollouts::{Group, Rollouts, Scored};
use crate::rows::PreparedRow;
use crate::step::Algorithm;

/// Builds a rollout from the completions and rewards in the rows instead of sampling. Tokens after the first stop token of a
/// completion are dropped, because other trainers record padding there.
///
/// # Errors
/// Returns an error if a row lacks completions or rewards, or if their number or names differ between rows.
pub fn replay(
    model: &Model,
    prompts: &PromptBuilder,
    algorithm: &Algorithm,
    mut rows: Vec<PreparedRow>,
    timer: &mut PhaseTimer,
) -> Result<Rollouts> {
    let (features, kept) = encode_own(model, prompts, algorithm, &mut rows, true, timer)?;
    let mut groups: Vec<Group> = Vec::with_capacity(rows.len());
    let mut names: Vec<String> = Vec::new();
    let mut values: Vec<Vec<Option<f64>>> = Vec::new();
    for (row, features) in rows.into_iter().zip(features) {
        let sample = &row.sample;
        let fail = |what: String| TrainError::Data { what: format!("replay, row {}: {what}", sample.id) };
        let (Some(recorded), Some(rewards)) = (&sample.completions, &sample.rewards) else {
            return Err(fail("expected the columns `completions` and `rewards`".into()));
        };
        if recorded.len() != algorithm.num_generations {
            return Err(fail(format!(
                "got {} completions, expected num_generations = {}",
                recorded.len(),
                algorithm.num_generations
            )));
        }
        let completions = recorded
            .iter()
            .map(|completion| read(prompts, completion))
            .collect::<Result<Vec<Scored>, String>>()
            .map_err(fail)?;
        let mut so_far = groups.iter().flat_map(|group| &group.completions).chain(&completions);
        let expected = so_far.next().is_some_and(|first| first.old.is_some());
        if completions.iter().any(|c| c.old.is_some() != expected) {
            return Err(fail(
                "expected `logprobs` for all completions of a step or for none; add the missing ones or remove the others"
                    .into(),
            ));
        }
        let named = match rewards {
            RecordedRewards::Total(list) => {
                vec![("replay".to_owned(), list.iter().map(|&r| Some(r)).collect())]
            }
            RecordedRewards::Named(list) => list.clone(),
        };
        if groups.is_empty() {
            names = named.iter().map(|(name, _)| name.clone()).collect();
            values = vec![Vec::new(); names.len()];
        }
        for (i, (name, list)) in named.into_iter().enumerate() {
            if names.get(i) != Some(&name) || list.len() != completions.len() {
                return Err(fail(format!(
                    "the reward {name:?} has {} values; expected the reward names of the other rows, and one value \
                     per completion",
                    list.len()
                )));
            }
            values[i].extend(list);
        }
        groups.push(Group { row, features, completions });
    }
    let weights = vec![1.0; names.len()];
    let total = advantage::weighted_sum(&values, &weights)?;
    let rewards = RewardMatrix { names, values, weights, total, logged: Logged::default() };
    Rollouts::new(algorithm, groups, kept, rewards)
}

/// Reads a completion up to its first stop token, with its log-probabilities if it has any.
fn read(prompts: &PromptBuilder, recorded: &RecordedCompletion) -> Result<Scored, String> {
    let mut ids = prompts.recorded_ids(recorded).map_err(|e| told(&e))?;
    let length = mask::completion_length(&ids, &prompts.stops().ids);
    let old = match &recorded.logprobs {
        Some(logprobs) if logprobs.len() != ids.len() => {
            return Err(format!(
                "got {} logprobs for {} tokens, expected one per token",
                logprobs.len(),
                ids.len()
            ));
        }
        given => given.as_ref().map(|given| given[..length].iter().map(|&x| x as f32).collect()),
    };
    ids.truncate(length);
    let text = prompts.tokenizer().decode(&ids, true).map_err(|e| told(&e))?;
    let truncated = recorded.finish_reason.as_deref() == Some("length");
    let reason = if truncated { FinishReason::Length } else { FinishReason::Stop };
    Ok(Scored::new(Completion::recorded(ids, reason, text), old))
}
