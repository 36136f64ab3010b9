//! Completions and rewards recorded in a row, for scoring, replay and comparison with other trainers.

use omnigrpo_text::Role;
use serde_json::{Map, Value};

use super::{column, conversation, present, spoken, verbatim};
use crate::error::RowProblem;
use crate::sample::{RecordedCompletion, RecordedRewards};

pub(super) fn completions(
    columns: &Map<String, Value>,
) -> Result<Option<Vec<RecordedCompletion>>, RowProblem> {
    let list = |name: &str| match present(columns, name) {
        None => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(other) => Err(column(name, other, "a list, one entry per completion")),
    };
    let (texts, ids, logprobs) = (list("completions")?, list("completion_ids")?, list("logprobs")?);
    let Some(num) = texts.or(ids).map(Vec::len) else { return Ok(None) };
    for (name, other) in [("completion_ids", ids), ("logprobs", logprobs)] {
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
                Some(value) => recorded(&value, &place)?,
                None => RecordedCompletion::default(),
            };
            if let Some(value) = at(ids, index) {
                recorded.completion_ids = Some(token_ids(&value, &format!("completion_ids[{index}]"))?);
            }
            if let Some(value) = at(logprobs, index) {
                recorded.logprobs = Some(numbers(&value, &format!("logprobs[{index}]"))?);
            }
            if recorded.text.is_none() && recorded.completion_ids.is_none() {
                let got = at(texts, index).unwrap_or_default();
                return Err(column(place, &got, "a text, or an object with `text` or `completion_ids`"));
            }
            match (&recorded.completion_ids, &recorded.logprobs) {
                (Some(ids), Some(logprobs)) if ids.len() != logprobs.len() => Err(RowProblem::Column {
                    column: format!("{place}.logprobs"),
                    got: format!("{} numbers for {} tokens", logprobs.len(), ids.len()),
                    expected: "one number per token",
                }),
                _ => Ok(recorded),
            }
        })
        .collect::<Result<_, _>>()
        .map(Some)
}

fn recorded(value: &Value, place: &str) -> Result<RecordedCompletion, RowProblem> {
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
        Value::Object(map)
            if present(map, "turns").is_some_and(|turns| *turns != Value::Array(Vec::new())) =>
        {
            Err(RowProblem::Column {
                column: format!("{place}.turns"),
                got: "turns of an environment".to_owned(),
                expected: "a completion of one turn; a recorded conversation cannot be scored or replayed",
            })
        }
        Value::Object(map) => Ok(RecordedCompletion {
            text: present(map, "text").or_else(|| present(map, "content")).map(text).transpose()?,
            completion_ids: present(map, "completion_ids")
                .map(|value| token_ids(value, &format!("{place}.completion_ids")))
                .transpose()?,
            logprobs: present(map, "logprobs")
                .map(|value| numbers(value, &format!("{place}.logprobs")))
                .transpose()?,
            finish_reason: present(map, "finish_reason").map(verbatim),
        }),
        other => Err(column(place, other, "a text, or an object with `text` or `completion_ids`")),
    }
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
