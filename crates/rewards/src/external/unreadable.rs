//! Reasons why an answer of a program or an endpoint cannot be read.

use omnigrpo_guard::plain;
use serde_json::Value;

/// Describes what is wrong with an answer. Python writes numbers that are not finite as `NaN` or `Infinity`, which is no JSON; the
/// description then names the first of them.
pub(super) fn reason(text: &str, error: &serde_json::Error) -> String {
    not_finite(text).unwrap_or_else(|| plain(&error.to_string()).into_owned())
}

fn not_finite(text: &str) -> Option<String> {
    const NAMES: [&str; 3] = ["NaN", "Infinity", "-Infinity"];
    let mut json = String::with_capacity(text.len() + 16);
    let (mut rest, mut in_text) = (text, false);
    while let Some(first) = rest.chars().next() {
        let named = NAMES.into_iter().find(|name| !in_text && rest.starts_with(name));
        let piece = match named {
            Some(name) => name,
            None if in_text && first == '\\' => rest.get(..2).unwrap_or(rest),
            None => &rest[..first.len_utf8()],
        };
        match named {
            // The mark cannot be in a text of the answer, which has no such character unescaped.
            Some(name) => json.extend(["\"\\u0000", name, "\""]),
            None => json.push_str(piece),
        }
        in_text ^= first == '"';
        rest = &rest[piece.len()..];
    }
    let (place, number) = find(&serde_json::from_str(&json).ok()?, String::new())?;
    Some(format!("`{place}` is {number}, expected a finite number"))
}

/// Returns the place and the name of the first number that is not finite.
fn find(value: &Value, place: String) -> Option<(String, String)> {
    match value {
        Value::String(text) => Some((place, text.strip_prefix('\0')?.to_owned())),
        Value::Array(all) => all.iter().enumerate().find_map(|(at, one)| find(one, format!("{place}[{at}]"))),
        Value::Object(all) => all.iter().find_map(|(name, one)| {
            find(one, if place.is_empty() { name.clone() } else { format!("{place}.{name}") })
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_not_finite_is_named() {
        for (text, expected) in [
            (r#"{"id": 1, "rewards": [0.5, NaN]}"#, Some("`rewards[1]` is NaN")),
            (
                r#"{"rewards": [null], "metrics": {"a": {"b": -Infinity}}}"#,
                Some("`metrics.a.b` is -Infinity"),
            ),
            (r#"{"x": "NaN \" NaN é", "columns": {"c": [Infinity]}}"#, Some("`columns.c[0]` is Infinity")),
            (r#"{"x": "NaN\\", "y": [Infinity]}"#, Some("`y[0]` is Infinity")),
            (r#"{"x": "\"#, None),
            (r#"{"rewards": ["NaN"]}"#, None),
            ("NaN, no JSON", None),
            ("", None),
        ] {
            let said = not_finite(text);
            let expected = expected.map(|expected| format!("{expected}, expected a finite number"));
            assert_eq!(said, expected, "{text}");
        }
    }
}
