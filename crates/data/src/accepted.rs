//! Ground truths that accept several answers.

use serde_json::Value;

/// Returns the accepted answers of a ground truth that is a list of texts in JSON, such as `["yes", "yeah"]`; each answer once and
/// none of them empty. Numbers may be among the texts. Returns `None` for any other ground truth, lists of numbers (a box, an
/// interval) and lists of objects included.
///
/// ```
/// use omnigrpo_data::accepted_answers;
///
/// assert_eq!(accepted_answers(r#"["yes", "yeah"]"#).unwrap(), ["yes", "yeah"]);
/// assert_eq!(accepted_answers("yes"), None);
/// assert_eq!(accepted_answers("[13.4, 28.1]"), None);
/// ```
pub fn accepted_answers(solution: &str) -> Option<Vec<String>> {
    let solution = solution.trim();
    // Most ground truths are no list, and a formula such as "[0, 1)" is no JSON.
    if !(solution.starts_with('[') && solution.ends_with(']') && solution.contains('"')) {
        return None;
    }
    let Ok(Value::Array(list)) = serde_json::from_str(solution) else { return None };
    let is_scalar = |one: &Value| one.is_string() || one.is_number() || one.is_boolean();
    (list.iter().all(is_scalar) && list.iter().any(Value::is_string)).then_some(())?;
    let answers = distinct(list.iter());
    (!answers.is_empty()).then_some(answers)
}

/// Returns the ground truth of a column `answers`: a list of texts, numbers or objects with `answer` or `text`, or one of these, or an
/// object with such a list (SQuAD, VQAv2, TextVQA, DocVQA). Several answers are a list of texts in JSON. Returns `None` if the column
/// has no answers.
pub(crate) fn of_answers(value: &Value) -> Option<String> {
    let own = |value: &'_ Value| -> Option<Value> {
        ["answer", "text"].iter().find_map(|name| value.get(*name)).filter(|own| !own.is_null()).cloned()
    };
    let value = own(value).unwrap_or_else(|| value.clone());
    let list = match value {
        Value::Array(list) => list,
        one => vec![one],
    };
    let plain: Vec<Value> = list.into_iter().map(|one| own(&one).unwrap_or(one)).collect();
    plain.iter().all(|one| one.is_string() || one.is_number() || one.is_boolean()).then_some(())?;
    let mut answers = distinct(plain.iter());
    match answers.len() {
        0 => None,
        1 => answers.pop(),
        _ => Some(Value::from(answers).to_string()),
    }
}

/// Returns each text once, without empty ones, in order.
fn distinct<'a>(list: impl Iterator<Item = &'a Value>) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    let text = |one: &Value| one.as_str().map_or_else(|| one.to_string(), str::to_owned);
    list.map(text).filter(|text| !text.trim().is_empty() && seen.insert(text.clone())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_lists_of_texts_are_accepted_answers() {
        for (solution, expected) in [
            (" [\"yes\", \"yeah\", \"yes\", \"\"] ", Some(vec!["yes", "yeah"])),
            ("[\"3\", 3.0, \"three\"]", Some(vec!["3", "3.0", "three"])),
            ("[\"only\"]", Some(vec!["only"])),
            ("[\"\"]", None),
            ("[]", None),
            ("[1, 2, 30, 40]", None),
            ("[[\"a\"], [\"b\"]]", None),
            ("[{\"bbox_2d\": [1, 2, 3, 4], \"label\": \"cat\"}]", None),
            ("[\"a\"", None),
            ("\"a\"", None),
        ] {
            let expected = expected.map(|all| all.into_iter().map(str::to_owned).collect());
            assert_eq!(accepted_answers(solution), expected, "{solution}");
        }
    }

    #[test]
    fn the_column_of_other_data_sets_is_read() {
        for (answers, expected) in [
            (json!(["nous les gosses", "nous", "nous"]), Some("[\"nous les gosses\",\"nous\"]")),
            (json!(["7", "7"]), Some("7")),
            (json!([3, "three"]), Some("[\"3\",\"three\"]")),
            (json!("yes"), Some("yes")),
            (json!(7), Some("7")),
            (
                json!([{ "answer": "net", "answer_confidence": "yes" }, { "answer": "nets" }]),
                Some("[\"net\",\"nets\"]"),
            ),
            (
                json!({ "text": ["Denver", "Denver Broncos"], "answer_start": [1, 2] }),
                Some("[\"Denver\",\"Denver Broncos\"]"),
            ),
            (json!([]), None),
            (json!([[1, 2]]), None),
        ] {
            assert_eq!(of_answers(&answers).as_deref(), expected, "{answers}");
        }
    }
}
