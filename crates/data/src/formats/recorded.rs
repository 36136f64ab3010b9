//! Completions and rewards recorded in a row, for scoring, replay and comparison with other trainers.

use omnigrpo_text::Role;
use serde_json::{Map, Value, json};

use super::{Context, column, conversation, media, present, spoken, turn, verbatim};
use crate::error::RowProblem;
use crate::sample::{RecordedCompletion, RecordedRewards, RecordedTurn};

/// Column with the turns of an environment in each completion, where completions are texts.
pub(super) const COMPLETION_TURNS: &str = "completion_turns";

pub(super) fn completions(
    columns: &Map<String, Value>,
    context: &Context,
) -> Result<Option<Vec<RecordedCompletion>>, RowProblem> {
    let list = |name: &str| match present(columns, name) {
        None => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(other) => Err(column(name, other, "a list, one entry per completion")),
    };
    let (texts, ids, logprobs) = (list("completions")?, list("completion_ids")?, list("logprobs")?);
    let turns = list(COMPLETION_TURNS)?;
    let Some(num) = texts.or(ids).map(Vec::len) else { return Ok(None) };
    for (name, other) in [("completion_ids", ids), ("logprobs", logprobs), (COMPLETION_TURNS, turns)] {
        if let Some(other) = other.filter(|other| other.len() != num) {
            return Err(RowProblem::Column {
                column: name.to_owned(),
                got: format!("a list of {} beside {num} completions", other.len()),
                expected: "one entry per completion",
            });
        }
    }
    let at = |list: Option<&'_ Vec<Value>>, index: usize| list.and_then(|list| list.get(index)).cloned();
    (0..num)
        .map(|index| {
            let place = format!("completions[{index}]");
            let mut recorded = match at(texts, index) {
                Some(value) => recorded(&value, &place, context)?,
                None => RecordedCompletion::default(),
            };
            if let Some(value) = at(ids, index) {
                recorded.completion_ids = Some(token_ids(&value, &format!("completion_ids[{index}]"))?);
            }
            if let Some(value) = at(logprobs, index) {
                recorded.logprobs = Some(numbers(&value, &format!("logprobs[{index}]"))?);
            }
            if let Some(value) = at(turns, index) {
                recorded.turns = added_turns(&value, &format!("{COMPLETION_TURNS}[{index}]"), context)?;
            }
            if recorded.text.is_none() && recorded.completion_ids.is_none() {
                let got = at(texts, index).unwrap_or_default();
                return Err(column(place, &got, "a text, or an object with `text` or `completion_ids`"));
            }
            match (&recorded.completion_ids, &recorded.logprobs) {
                // The tokens of an environment, which have no numbers, are known when its turns are rendered.
                (Some(ids), Some(logprobs)) if recorded.turns.is_empty() && ids.len() != logprobs.len() => {
                    Err(RowProblem::Column {
                        column: format!("{place}.logprobs"),
                        got: format!("{} numbers for {} tokens", logprobs.len(), ids.len()),
                        expected: "one number per token",
                    })
                }
                _ => Ok(recorded),
            }
        })
        .collect::<Result<_, _>>()
        .map(Some)
}

fn recorded(value: &Value, place: &str, context: &Context) -> Result<RecordedCompletion, RowProblem> {
    let text = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        other => Err(column(format!("{place}.text"), other, "a text")),
    };
    match value {
        Value::String(text) => Ok(RecordedCompletion { text: Some(text.clone()), ..Default::default() }),
        // TRL's conversational format: each completion is one assistant message.
        Value::Array(_) => match conversation(value, place)?.pop() {
            Some(turn) if turn.role == Role::Assistant => {
                Ok(RecordedCompletion { text: Some(spoken(turn)?.written()), ..Default::default() })
            }
            _ => Err(column(place, value, "messages that end with an assistant turn")),
        },
        Value::Object(map) => Ok(RecordedCompletion {
            text: present(map, "text").or_else(|| present(map, "content")).map(text).transpose()?,
            completion_ids: present(map, "completion_ids")
                .map(|value| token_ids(value, &format!("{place}.completion_ids")))
                .transpose()?,
            logprobs: present(map, "logprobs")
                .map(|value| numbers(value, &format!("{place}.logprobs")))
                .transpose()?,
            finish_reason: present(map, "finish_reason").map(verbatim),
            turns: present(map, "turns")
                .map(|value| added_turns(value, &format!("{place}.turns"), context))
                .transpose()?
                .unwrap_or_default(),
        }),
        other => Err(column(place, other, "a text, or an object with `text` or `completion_ids`")),
    }
}

/// Returns the turns of an environment in a completion, as records of runs have them. A turn without `content` shows its `media`,
/// pictures, before its `text`.
fn added_turns(value: &Value, place: &str, context: &Context) -> Result<Vec<RecordedTurn>, RowProblem> {
    const EXPECTED: &str = "a list of {model, text, media} as `train`, `generate` and `eval` write it";
    let list = value.as_array().ok_or_else(|| column(place, value, EXPECTED))?;
    let added = |(index, value): (usize, &Value)| {
        let place = format!("{place}[{index}]");
        let wrong = || column(&place, value, EXPECTED);
        let map = value.as_object().ok_or_else(wrong)?;
        let text = |name: &str| present(map, name).map(|value| value.as_str().ok_or_else(wrong)).transpose();
        let number = |name: &str| {
            let read = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(wrong);
            present(map, name).map(read).transpose()
        };
        let content = match present(map, "content") {
            Some(content) => content.clone(),
            None => {
                let media =
                    present(map, "media").map(|media| media.as_array().ok_or_else(wrong)).transpose()?;
                let pictures =
                    media.into_iter().flatten().map(|path| json!({ "type": "image", "image": path }));
                let said = text("text")?.filter(|said| !said.is_empty());
                pictures.chain(said.map(|said| json!({ "type": "text", "text": said }))).collect()
            }
        };
        let role = text("role")?.unwrap_or(Role::Tool.as_str());
        let raw = turn(&json!({ "role": role, "content": content }), &place)?;
        if !matches!(raw.role, Role::Tool | Role::User) {
            return Err(wrong());
        }
        let (mut turns, media) = media::place_own(vec![raw], context)?;
        Ok(RecordedTurn {
            model: text("model")?.ok_or_else(wrong)?.to_owned(),
            model_tokens: number("model_tokens")?,
            said: turns.pop().ok_or_else(wrong)?,
            media,
            tokens: number("tokens")?,
        })
    };
    list.iter().enumerate().map(added).collect()
}

fn token_ids(value: &Value, place: &str) -> Result<Vec<u32>, RowProblem> {
    let ids =
        value.as_array().map(|list| list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())));
    ids.and_then(Iterator::collect).ok_or_else(|| column(place, value, "a list of token ids"))
}

fn numbers(value: &Value, place: &str) -> Result<Vec<f64>, RowProblem> {
    let numbers = value.as_array().map(|list| list.iter().map(Value::as_f64));
    numbers.and_then(Iterator::collect).ok_or_else(|| column(place, value, "a list of numbers"))
}

pub(super) fn rewards(
    columns: &Map<String, Value>,
    num_completions: usize,
) -> Result<Option<RecordedRewards>, RowProblem> {
    let rewards = match present(columns, "rewards") {
        None => return Ok(None),
        Some(value @ Value::Array(_)) => RecordedRewards::Total(numbers(value, "rewards")?),
        Some(Value::Object(map)) => {
            let named = map.iter().map(|(name, value)| {
                let place = format!("rewards.{name}");
                let list =
                    value.as_array().ok_or_else(|| column(&place, value, "a list of numbers or nulls"))?;
                let number = |value: &Value| match value {
                    Value::Null => Ok(None),
                    value => {
                        value.as_f64().map(Some).ok_or_else(|| column(&place, value, "a number or null"))
                    }
                };
                Ok((name.clone(), list.iter().map(number).collect::<Result<Vec<_>, RowProblem>>()?))
            });
            RecordedRewards::Named(named.collect::<Result<_, RowProblem>>()?)
        }
        Some(other) => return Err(column("rewards", other, "a list, or an object of lists by reward name")),
    };
    let wrong = match &rewards {
        RecordedRewards::Total(values) => (values.len() != num_completions).then_some(values.len()),
        RecordedRewards::Named(named) => {
            named.iter().map(|(_, values)| values.len()).find(|&len| len != num_completions)
        }
    };
    match wrong {
        Some(len) => Err(RowProblem::Column {
            column: "rewards".to_owned(),
            got: format!("{len} numbers for {num_completions} completions"),
            expected: "one number per completion",
        }),
        None => Ok(Some(rewards)),
    }
}
