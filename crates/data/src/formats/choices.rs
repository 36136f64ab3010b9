//! Choices of a question that stand in columns of their own: `options`, `choices`, or `A`, `B`, `C`, ….
//!
//! They become part of the question unless the question contains them, as a line `Options:` and a line for each choice with its
//! label, after the question. This is the form of Video-R1 (`grpo.py`, `make_conversation_image_and_video`), with two deliberate
//! differences: a line break before `Options:`, and none at the end.

use serde_json::{Map, Value};

use super::present;

/// Columns with a list of choices.
const LISTS: [&str; 2] = ["options", "choices"];

/// Names of columns with one choice each.
const LETTERS: [&str; 10] = ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"];

/// A choice: its label, if it has one of its own, and its text.
type Choice = (Option<String>, String);

/// Returns the text to add to a question, if the row has choices that the question does not contain.
pub(super) fn missing(columns: &Map<String, Value>, question: impl FnOnce() -> String) -> Option<String> {
    let choices =
        LISTS.iter().find_map(|name| list(present(columns, name)?)).or_else(|| of_letters(columns))?;
    let bodies = choices.iter().map(|(_, text)| text.as_str());
    if contains_in_order(&question(), bodies) {
        return None;
    }
    let line = |(at, (label, text)): (usize, &Choice)| match (label, LETTERS.get(at)) {
        (Some(label), _) => format!("\n{label} {text}"),
        (None, Some(letter)) => format!("\n{letter}. {text}"),
        (None, None) => format!("\n{}. {text}", at + 1),
    };
    let lines: String = choices.iter().enumerate().map(line).collect();
    Some(format!("\nOptions:{lines}"))
}

/// Returns the choices of `A`, `B` and the columns that follow.
fn of_letters(columns: &Map<String, Value>) -> Option<Vec<Choice>> {
    let texts = LETTERS.iter().map_while(|name| scalar(present(columns, name)?));
    let choices: Vec<Choice> = texts.map(|text| (None, text)).collect();
    (choices.len() > 1).then_some(choices)
}

/// Returns the choices of a column: a list, an object by label, `{text: […], label: […]}`, or one of these as text, in JSON or
/// as Python writes a list.
fn list(value: &Value) -> Option<Vec<Choice>> {
    let choices: Vec<Choice> = match value {
        Value::Array(list) => {
            // Tables fill a list of choices with empty ones.
            let given = list.iter().filter(|one| !one.is_null() && one.as_str() != Some(""));
            given.map(one).collect::<Option<_>>()?
        }
        Value::Object(map) => match (map.get("text"), map.get("label")) {
            (Some(Value::Array(texts)), Some(Value::Array(labels))) if texts.len() == labels.len() => {
                let pairs = labels.iter().zip(texts);
                pairs
                    .map(|(label, text)| Some((Some(format!("{}.", scalar(label)?)), scalar(text)?)))
                    .collect::<Option<_>>()?
            }
            _ if map.keys().all(|key| key.len() <= 2) => {
                let choice =
                    |(key, value): (&String, &Value)| Some((Some(format!("{key}.")), scalar(value)?));
                map.iter().filter(|(_, value)| !value.is_null()).map(choice).collect::<Option<_>>()?
            }
            _ => return None,
        },
        Value::String(text) => {
            let text = text.trim();
            return match serde_json::from_str(text) {
                Ok(value @ (Value::Array(_) | Value::Object(_))) => list(&value),
                _ => python_list(text).or_else(|| lines(text)),
            };
        }
        _ => return None,
    };
    (choices.len() > 1).then_some(choices)
}

fn one(value: &Value) -> Option<Choice> {
    if let Value::Object(map) = value {
        let label = map.get("label").or_else(|| map.get("key")).and_then(scalar);
        let text = ["text", "value", "content"].iter().find_map(|name| scalar(map.get(*name)?))?;
        return Some((label.map(|label| format!("{label}.")), text));
    }
    scalar(value).map(|text| labelled(&text))
}

/// Returns a text or a number as text.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}

/// Splits the label off a choice such as `B. run`, `(B) run` or `B: run`.
fn labelled(text: &str) -> Choice {
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    let (label, rest) = text.split_at(end);
    let bare = label.trim_matches(['(', ')', '.', ':']);
    let is_label = bare.len() < label.len()
        && (bare.len() == 1 && bare.bytes().all(|byte| byte.is_ascii_alphabetic())
            || bare.len() <= 2 && !bare.is_empty() && bare.bytes().all(|byte| byte.is_ascii_digit()));
    match (is_label, rest.trim()) {
        (true, rest) if !rest.is_empty() => (Some(label.to_owned()), rest.to_owned()),
        _ => (None, text.to_owned()),
    }
}

/// Returns the choices of a text with one choice per line.
fn lines(text: &str) -> Option<Vec<Choice>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let choices: Vec<Choice> = lines.map(labelled).collect();
    (choices.len() > 1).then_some(choices)
}

/// Reads a list of texts as Python writes it: `['a', "b's"]`.
fn python_list(text: &str) -> Option<Vec<Choice>> {
    let mut rest = text.strip_prefix('[')?.strip_suffix(']')?.trim();
    let mut choices = Vec::new();
    while !rest.is_empty() {
        let quote = rest.chars().next().filter(|quote| ['\'', '"'].contains(quote))?;
        let (mut item, mut escaped, mut end) = (String::new(), false, None);
        for (at, char) in rest.char_indices().skip(1) {
            match char {
                _ if escaped => {
                    escaped = false;
                    item.push(if char == 'n' { '\n' } else { char });
                }
                '\\' => escaped = true,
                _ if char == quote => {
                    end = Some(at + 1);
                    break;
                }
                _ => item.push(char),
            }
        }
        choices.push(labelled(item.trim()));
        let after = rest[end?..].trim_start();
        rest = match after.strip_prefix(',') {
            Some(after) => after.trim_start(),
            None if after.is_empty() => "",
            None => return None,
        };
    }
    (choices.len() > 1).then_some(choices)
}

/// Reports whether a text contains all parts as whole words, one after the other.
fn contains_in_order<'a>(text: &str, parts: impl Iterator<Item = &'a str>) -> bool {
    let is_word = |char: Option<char>| char.is_some_and(char::is_alphanumeric);
    let mut from = 0;
    for part in parts {
        let whole = |at: &usize| {
            let (before, after) = (text[..*at].chars().next_back(), text[at + part.len()..].chars().next());
            !(is_word(before) && is_word(part.chars().next())
                || is_word(after) && is_word(part.chars().next_back()))
        };
        let Some(at) = text[from..].match_indices(part).map(|(at, _)| from + at).find(whole) else {
            return false;
        };
        from = at + part.len();
    }
    true
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn added(row: Value, question: &str) -> Option<String> {
        missing(row.as_object().unwrap(), || question.to_owned())
    }

    #[test]
    fn choices_of_every_form_become_lines() {
        let expected = Some("\nOptions:\nA. sit\nB. run".to_owned());
        for row in [
            json!({ "options": ["A. sit", "B. run"] }),
            json!({ "options": ["sit", "run"] }),
            json!({ "choices": { "text": ["sit", "run"], "label": ["A", "B"] } }),
            json!({ "choices": [{ "label": "A", "text": "sit" }, { "label": "B", "text": "run" }] }),
            json!({ "options": { "A": "sit", "B": "run", "C": null } }),
            json!({ "A": "sit", "B": "run", "C": null, "D": "" }),
            json!({ "options": "['sit', \"run\"]" }),
            json!({ "options": "[\"sit\", \"run\"]" }),
            json!({ "options": "A. sit\nB. run\n" }),
        ] {
            assert_eq!(added(row.clone(), "What does he do?"), expected, "{row}");
        }
        let own = json!({ "options": ["(a) x", "(b) y"] });
        assert_eq!(added(own, "?").unwrap(), "\nOptions:\n(a) x\n(b) y");
        let numbers = json!({ "choices": [3, 4.5] });
        assert_eq!(added(numbers, "What is 3 + 1?").unwrap(), "\nOptions:\nA. 3\nB. 4.5");
        let escaped = json!({ "options": r"['it\'s', 'a, b']" });
        assert_eq!(added(escaped, "?").unwrap(), "\nOptions:\nA. it's\nB. a, b");
    }

    #[test]
    fn choices_in_the_question_and_other_columns_add_nothing() {
        let two = json!({ "options": ["A. sit", "B. run"] });
        assert_eq!(added(two.clone(), "What?\n(A) sit\n(B) run"), None);
        assert!(added(two.clone(), "What? (B) run (A) sit").is_some());
        // A word that only contains a choice is none.
        assert!(added(two, "What situation? sitting, running").is_some());
        for row in [
            json!({}),
            json!({ "options": { "temperature": 1 } }),
            json!({ "options": [] }),
            json!({ "options": null, "A": "alone" }),
            json!({ "choices": [{ "message": { "content": "x" } }, 2] }),
            json!({ "options": "free text" }),
            json!({ "options": "['open" }),
        ] {
            assert_eq!(added(row.clone(), "Q"), None, "{row}");
        }
    }
}
