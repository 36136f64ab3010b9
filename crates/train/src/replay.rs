//! Replay of recorded rollouts: the rows have completions, rewards and optionally log-probabilities.

use std::sync::Arc;

use omnigrpo_data::{RecordedCompletion, RecordedRewards};
use omnigrpo_grpo::{advantage, mask};
use omnigrpo_guard::told;
use omnigrpo_models::{MediumInput, Model, PromptBuilder};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_rewards::{Logged, RewardMatrix};
use omnigrpo_rollout::{Completion, FinishReason};
use omnigrpo_text::tool_calls;

use crate::error::{Result, TrainError};
use crate::features::encode_own;
use crate::rollouts::{Group, Rollouts, Scored};
use crate::rows::PreparedRow;
use crate::step::Divided;
use crate::timing::timed;

/// Builds a rollout from the completions and rewards in the rows instead of sampling. Tokens after the first stop token of a
/// completion are dropped, because other trainers record padding there. Turns of an environment are rendered again, and are not asked
/// for.
///
/// # Errors
/// Returns an error if a row lacks completions or rewards, or if their number or names differ between rows, or if several ranks
/// replay turns of an environment.
pub fn replay(
    model: &Model,
    prompts: &PromptBuilder,
    algorithm: &Divided,
    mut rows: Vec<PreparedRow>,
    timer: &mut PhaseTimer,
) -> Result<Rollouts> {
    let mut named: Vec<(Vec<Scored>, Vec<Named>)> = Vec::with_capacity(rows.len());
    for row in &mut rows {
        let fail = |id: &str, what: String| TrainError::Data { what: format!("replay, row {id}: {what}") };
        let read = read_row(prompts, algorithm, row);
        let (completions, rewards, media) = read.map_err(|what| fail(&row.sample.id, what))?;
        row.add_media(media);
        named.push((completions, rewards));
    }
    let (features, kept) = timed(timer, "encode", || encode_own(model, prompts, algorithm, &mut rows, true))?;
    let mut groups: Vec<Group> = Vec::with_capacity(rows.len());
    let mut names: Vec<String> = Vec::new();
    let mut values: Vec<Vec<Option<f64>>> = Vec::new();
    for ((row, features), (completions, named)) in rows.into_iter().zip(features).zip(named) {
        let sample = &row.sample;
        let fail = |what: String| TrainError::Data { what: format!("replay, row {}: {what}", sample.id) };
        let mut so_far = groups.iter().flat_map(|group| &group.completions).chain(&completions);
        let expected = so_far.next().is_some_and(|first| first.old.is_some());
        if completions.iter().any(|c| c.old.is_some() != expected) {
            return Err(fail(
                "expected `logprobs` for all completions of a step or for none; add the missing ones or remove the others"
                    .into(),
            ));
        }
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

/// Completions of a row, their rewards by name, and the media of their turns.
type Read = (Vec<Scored>, Vec<Named>, Vec<Arc<MediumInput>>);

/// Name of a reward with its value for each completion of a row.
type Named = (String, Vec<Option<f64>>);

/// Reads the completions and rewards of a row, and the media that turns of an environment add to those of its prompt.
fn read_row(prompts: &PromptBuilder, algorithm: &Divided, row: &PreparedRow) -> Result<Read, String> {
    let (Some(recorded), Some(rewards)) = (&row.sample.completions, &row.sample.rewards) else {
        return Err("expected the columns `completions` and `rewards`".into());
    };
    if recorded.len() != algorithm.num_generations {
        let (got, expected) = (recorded.len(), algorithm.num_generations);
        return Err(format!("got {got} completions, expected num_generations = {expected}"));
    }
    if algorithm.split.ranks.size() > 1 && recorded.iter().any(|completion| !completion.turns.is_empty()) {
        return Err("several processes cannot replay turns of an environment; use one process".into());
    }
    let mut media = row.prompt.media.clone();
    let read = recorded.iter().map(|completion| read(prompts, completion, &mut media));
    let completions = read.collect::<Result<_, _>>()?;
    let named = match rewards {
        RecordedRewards::Total(list) => vec![("replay".to_owned(), list.iter().map(|&r| Some(r)).collect())],
        RecordedRewards::Named(list) => list.clone(),
    };
    Ok((completions, named, media.split_off(row.prompt.media.len())))
}

/// Reads a completion up to the first stop token of its last turn, with its log-probabilities if it has any.
fn read(
    prompts: &PromptBuilder,
    recorded: &RecordedCompletion,
    media: &mut Vec<Arc<MediumInput>>,
) -> Result<Scored, String> {
    let (mut ids, turns) = prompts.recorded(recorded, media).map_err(|e| told(&e))?;
    let last = turns.last().map_or(0, |turn| turn.tokens().end);
    let length = last + mask::completion_length(&ids[last..], &prompts.stops().ids);
    let added: usize = turns.iter().map(|turn| turn.turn.ids.len()).sum();
    let old = match &recorded.logprobs {
        Some(logprobs) if logprobs.len() + added != ids.len() => {
            return Err(format!(
                "got {} logprobs for {} tokens of the model, expected one per token",
                logprobs.len(),
                ids.len() - added
            ));
        }
        given => given.as_ref().map(|given| given[..length - added].iter().map(|&x| x as f32).collect()),
    };
    ids.truncate(length);
    let text = prompts.tokenizer().decode(&ids[last..], true).map_err(|e| told(&e))?;
    let truncated = recorded.finish_reason.as_deref() == Some("length");
    let reason = if truncated { FinishReason::Length } else { FinishReason::Stop };
    let earlier: Vec<String> = recorded.turns.iter().map(|turn| turn.model.clone()).collect();
    let calls = earlier.iter().map(|said| tool_calls(said).len()).sum();
    let completion = Completion { turns, earlier, calls, ..Completion::recorded(ids, reason, text) };
    Ok(Scored::new(completion, old))
}
