//! Messages of libraries without the names of Rust's types.
//!
//! `serde` says "invalid type: map, expected struct Row" or "expected usize". A reader of a file or a client of the server does not
//! know these names, so every message passes through [`plain`].

use std::borrow::Cow;

/// Marks of messages that `serde` writes.
const MARKS: [&str; 4] =
    ["invalid type: ", "invalid value: ", "invalid length ", "did not match any variant of untagged enum "];

/// Names of what was found, after "invalid type: " or "invalid value: ".
const FOUND: [(&str, &str); 16] = [
    ("boolean `", "`"),
    ("integer `", "`"),
    ("floating point `", "`"),
    ("character `", "`"),
    ("sequence", "a list"),
    ("map", "a mapping"),
    ("unit value", "nothing"),
    ("Option value", "a value"),
    ("newtype struct", "a value"),
    ("enum", "a name"),
    ("unit variant", "a name"),
    ("newtype variant", "a name"),
    ("tuple variant", "a name"),
    ("struct variant", "a name"),
    ("byte array", "bytes"),
    ("string ", "the text "),
];

/// Names of what was expected, after "expected ". A name is a whole word.
const EXPECTED: [(&str, &str); 34] = [
    ("a tuple", "a list"),
    ("tuple", "a list"),
    ("a sequence", "a list"),
    ("sequence", "a list"),
    ("a map", "a mapping"),
    ("map", "a mapping"),
    ("a string or map", "a text or a mapping"),
    ("a borrowed string", "a text"),
    ("a string", "a text"),
    ("string", "a text"),
    ("str", "a text"),
    ("a character", "a character"),
    ("path string", "a path"),
    ("a boolean", "true or false"),
    ("bool", "true or false"),
    ("unit", "nothing"),
    ("option", "a value"),
    ("variant identifier", "a name"),
    ("field identifier", "a name"),
    ("identifier", "a name"),
    ("u8", "a whole number from 0"),
    ("u16", "a whole number from 0"),
    ("u32", "a whole number from 0"),
    ("u64", "a whole number from 0"),
    ("u128", "a whole number from 0"),
    ("usize", "a whole number from 0"),
    ("i8", "a whole number"),
    ("i16", "a whole number"),
    ("i32", "a whole number"),
    ("i64", "a whole number"),
    ("i128", "a whole number"),
    ("isize", "a whole number"),
    ("f32", "a number"),
    ("f64", "a number"),
];

/// Names of what was expected that the name of a type follows.
const TYPES: [(&str, &str); 7] = [
    ("tuple struct ", "a list"),
    ("newtype struct ", "a value"),
    ("unit struct ", "nothing"),
    ("struct variant ", "a mapping"),
    ("tuple variant ", "a list"),
    ("struct ", "a mapping"),
    ("enum ", "a name"),
];

/// Returns a message in which the type names of `serde` are plain words. Other messages are unchanged.
#[must_use]
pub fn plain(message: &str) -> Cow<'_, str> {
    if !MARKS.iter().any(|mark| message.contains(mark)) {
        return message.into();
    }
    let mut out = String::with_capacity(message.len());
    let mut rest = message;
    while !rest.is_empty() {
        let (said, after) = next(rest);
        out.push_str(&said);
        rest = after;
    }
    out.into()
}

/// Returns the next piece of a message in plain words, and the rest.
fn next(text: &str) -> (Cow<'_, str>, &str) {
    for mark in ["invalid type: ", "invalid value: "] {
        if let Some(after) = text.strip_prefix(mark) {
            let known = FOUND.iter().find_map(|(name, said)| Some((*said, after.strip_prefix(name)?)));
            let (said, rest) = known.unwrap_or(("", after));
            return (format!("got {said}").into(), rest);
        }
    }
    if let Some(after) = text.strip_prefix("invalid length ") {
        return ("got the length ".into(), after);
    }
    if let Some(after) = text.strip_prefix("data did not match any variant of untagged enum ") {
        return ("the value has another form than expected".into(), after_name(after));
    }
    if let Some(after) = text.strip_prefix("expected ") {
        if let Some((said, after)) =
            TYPES.iter().find_map(|(name, said)| Some((*said, after.strip_prefix(name)?)))
        {
            return (format!("expected {said}").into(), after_name(after));
        }
        let word = |name: &str| {
            let rest = after.strip_prefix(name)?;
            (!rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')).then_some(rest)
        };
        let known = EXPECTED.iter().filter_map(|(name, said)| Some((*said, word(name)?)));
        if let Some((said, rest)) = known.min_by_key(|(_, rest)| rest.len()) {
            return (format!("expected {said}").into(), rest);
        }
    }
    let len = text.chars().next().map_or(0, char::len_utf8);
    (text[..len].into(), &text[len..])
}

/// Returns what follows the name of a type.
fn after_name(text: &str) -> &str {
    text.trim_start_matches(|c: char| c.is_alphanumeric() || matches!(c, '_' | ':' | '<' | '>'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_names_of_serde_become_plain_words() {
        for (message, expected) in [
            ("invalid type: map, expected a sequence at line 1", "got a mapping, expected a list at line 1"),
            ("row 3: invalid type: null, expected struct Row", "row 3: got null, expected a mapping"),
            ("invalid type: string \"hot\", expected f32", "got the text \"hot\", expected a number"),
            ("invalid value: integer `-1`, expected usize", "got `-1`, expected a whole number from 0"),
            ("invalid value: floating point `0.5`, expected i64", "got `0.5`, expected a whole number"),
            (
                "invalid type: boolean `true`, expected a string or map",
                "got `true`, expected a text or a mapping",
            ),
            ("invalid length 2, expected a tuple of size 3", "got the length 2, expected a list of size 3"),
            (
                "invalid type: sequence, expected struct a::B<C> with 3 elements",
                "got a list, expected a mapping with 3 elements",
            ),
            (
                "data did not match any variant of untagged enum Stops",
                "the value has another form than expected",
            ),
            (
                "invalid type: map, expected a mapping of f32 values",
                "got a mapping, expected a mapping of f32 values",
            ),
            // Messages of this program are left as they are.
            ("adapters in F16; expected f32", "adapters in F16; expected f32"),
            ("unknown field `x`, expected `y`", "unknown field `x`, expected `y`"),
        ] {
            assert_eq!(plain(message), expected);
        }
    }
}
