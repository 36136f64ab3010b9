//! Rows that this program wrote itself. An evaluated row contains its original row in `row`. A rollout log has one line per
//! completion, and the first line of each prompt contains its `row`. Both are read as the original row with its completions.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::RowProblem;

/// Columns that describe completions, not the row.
pub(crate) const RECORDED: [&str; 6] =
    ["completions", "completion_ids", "completion_turns", "logprobs", "rewards", "reward"];

/// Replaces a row that contains its original columns in `row` with those columns and the values recorded beside them.
pub(crate) fn unfold(mut columns: Map<String, Value>) -> Map<String, Value> {
    if !columns.contains_key("completions") || !columns.get("row").is_some_and(Value::is_object) {
        return columns;
    }
    let Some(Value::Object(mut own)) = columns.remove("row") else { return columns };
    for name in RECORDED {
        if let Some(value) = columns.remove(name) {
            own.insert(name.to_owned(), value);
        }
    }
    if let (None, Some(id)) = (super::id(&own), columns.remove("id")) {
        own.insert("id".to_owned(), id);
    }
    own
}

/// Fields that identify a line of a rollout log.
#[derive(Deserialize)]
pub(crate) struct RolloutLine {
    #[serde(rename = "step")]
    _step: u64,
    #[serde(rename = "group")]
    _group: u64,
    /// Index of the completion within its prompt.
    pub(crate) sample: u64,
    #[serde(rename = "advantage")]
    _advantage: Option<f64>,
    #[serde(rename = "completion")]
    _completion: String,
}

/// Joins the lines of one prompt into a row.
pub(crate) fn joined(lines: &[u8]) -> Result<Value, RowProblem> {
    let lines: Vec<Map<String, Value>> =
        serde_json::Deserializer::from_slice(lines).into_iter().collect::<Result<_, _>>()?;
    let missing = |what: &str, got: String| RowProblem::Column {
        column: what.to_owned(),
        got,
        expected: "a rollout log as `train` writes it, with all completions of a prompt and the prompt's `row`",
    };
    let Some(first) = lines.first() else { return Err(missing("(the row)", "nothing".to_owned())) };
    let Some(row @ Value::Object(_)) = first.get("row") else {
        return Err(missing("row", "none".to_owned()));
    };
    let mut rewards: Map<String, Value> = Map::new();
    let mut completions = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        if line.get("sample").and_then(Value::as_u64) != Some(index as u64) {
            let got = line.get("sample").cloned().unwrap_or_default();
            return Err(missing("sample", format!("{got} as completion {index}")));
        }
        completions.push(json!({
            "text": line.get("completion"),
            "finish_reason": line.get("finish_reason"),
            "turns": line.get("turns"),
        }));
        for (name, value) in line.get("rewards").and_then(Value::as_object).into_iter().flatten() {
            let list = rewards.entry(name.clone()).or_insert_with(|| json!([]));
            if let Some(list) = list.as_array_mut() {
                list.push(value.clone());
            }
        }
    }
    Ok(json!({ "id": first.get("id"), "row": row, "completions": completions, "rewards": rewards }))
}
