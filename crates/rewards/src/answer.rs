//! Answers of completions, and their comparison as text.

use std::borrow::Cow;
use std::sync::LazyLock;

use omnigrpo_data::accepted_answers;
use omnigrpo_text::Part;
use regex::Regex;
use unicode_normalization::UnicodeNormalization;

use crate::latex::{bare, boxed};
use crate::tags::content;
use crate::{AnswerPolicy, RewardInput};

/// The answer of a completion, with a ground truth. Both are without white space and LaTeX around them ([`bare`]).
#[derive(Debug, Clone)]
pub(crate) struct Question<'a> {
    /// The row.
    pub input: &'a RewardInput<'a>,
    /// Answer that the completion marks ([`marked`]).
    pub tagged: Option<Cow<'a, str>>,
    /// `tagged`, or otherwise the text after the thinking or the complete completion. If the prompt asks for no tag and this text
    /// says "the answer is …", what it says.
    pub answer: Cow<'a, str>,
    /// Content of the ground truth's answer tag, otherwise its last line `#### …`, otherwise the complete ground truth.
    pub gold: Cow<'a, str>,
}

impl<'a> Question<'a> {
    /// Returns `None` if the row has no ground truth.
    pub fn new(input: &'a RewardInput<'a>, policy: AnswerPolicy) -> Option<Self> {
        let solution = input.solution?;
        let gold = content(solution, "answer", policy).or_else(|| hashed(solution));
        let gold = bare(gold.unwrap_or(solution));
        let tagged = marked(input.completion, policy);
        let answer = tagged.clone().unwrap_or_else(|| {
            let text = untagged(input.completion);
            bare(stated(text).filter(|_| !asks_for_tags(input)).unwrap_or(text))
        });
        Some(Self { input, tagged, answer, gold })
    }
}

/// Compares a completion with each accepted answer of its row, and returns the best score. Returns `None` if the row has no ground
/// truth, or if `compare` returns it for every accepted answer.
pub(crate) fn best(
    input: &RewardInput<'_>,
    policy: AnswerPolicy,
    mut compare: impl FnMut(&Question<'_>) -> Option<f64>,
) -> Option<f64> {
    let solution = input.solution?;
    let Some(answers) = golds(solution, policy) else { return compare(&Question::new(input, policy)?) };
    let mut best: Option<f64> = None;
    for answer in &answers {
        let input = RewardInput { solution: Some(answer), ..*input };
        let score = Question::new(&input, policy).and_then(|question| compare(&question));
        best = match (best, score) {
            (Some(best), Some(score)) => Some(best.max(score)),
            (best, score) => best.or(score),
        };
    }
    best
}

/// Returns the accepted answers of a ground truth that is a list, with or without an answer tag around it.
pub(crate) fn golds(solution: &str, policy: AnswerPolicy) -> Option<Vec<String>> {
    accepted_answers(solution).or_else(|| accepted_answers(content(solution, "answer", policy)?))
}

/// Returns true if the prompt mentions answer tags.
fn asks_for_tags(input: &RewardInput<'_>) -> bool {
    let says = |text: &str| text.contains("<answer");
    let of_turn = |part: &Part| matches!(part, Part::Text(text) if says(text));
    says(input.prompt) || input.turns.iter().flat_map(|turn| &turn.parts).any(of_turn)
}

/// Returns what a text states as its answer: the rest of the line after the last "answer is" or "answer:".
fn stated(text: &str) -> Option<&str> {
    // The expression is constant. If it did not compile, the tests would fail.
    static STATED: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"(?i)\banswer(?:\*\*)?(?:\s+is\b:?|:)([^\n]+)").ok());
    let last = STATED.as_ref()?.captures_iter(text).last()?.get(1)?;
    let answer = last.as_str().trim_matches(|c: char| c.is_whitespace() || c == '*').trim_end_matches('.');
    (!answer.is_empty()).then_some(answer)
}

/// Returns what follows `####` in the last line of a text, as in the answers of GSM8K.
fn hashed(text: &str) -> Option<&str> {
    let last = text.trim_end().lines().next_back()?;
    let answer = last.trim_start().strip_prefix("####")?.trim();
    (!answer.is_empty()).then_some(answer)
}

/// Returns the answer that a completion marks: the content of the answer tag that the policy selects, otherwise that of the last
/// `\boxed{…}` after the thinking, otherwise what follows `####` in the last line.
pub(crate) fn marked(completion: &str, policy: AnswerPolicy) -> Option<Cow<'_, str>> {
    let tagged = content(completion, "answer", policy);
    let boxed = || Some(untagged(completion)).filter(|text| boxed(text).is_some());
    let text = tagged.or_else(boxed).or_else(|| hashed(untagged(completion)))?;
    Some(bare(text))
}

/// Returns the answer of a completion: the one that it marks, otherwise the text after the thinking, otherwise the complete text.
pub(crate) fn said(completion: &str, policy: AnswerPolicy) -> Cow<'_, str> {
    marked(completion, policy).unwrap_or_else(|| bare(untagged(completion)))
}

/// Returns the text after the last `</think>`.
fn untagged(completion: &str) -> &str {
    crate::tags::tags(completion, &["think"])
        .filter(|tag| tag.close)
        .last()
        .map_or(completion, |tag| &completion[tag.end..])
        .trim()
}

/// Maximum length of compared texts. Longer texts are truncated. No useful ground truth is longer, and the limit bounds the time
/// of quadratic comparisons.
pub(crate) const MAX_ANSWER_CHARS: usize = 4096;

/// Normalises a text: NFC, case folding, no punctuation or symbols at the edges of words, single spaces. A minus sign before a
/// digit and a percent sign after it remain: "-3" is not "3".
pub(crate) fn normalised(text: &str) -> String {
    // The text is also truncated before composition, since a run of combining marks is sorted as a whole.
    let cut = text.chars().take(4 * MAX_ANSWER_CHARS).nfc().take(MAX_ANSWER_CHARS);
    let folded: String = cut.flat_map(case_folded).nfc().collect();
    let mut words = String::with_capacity(folded.len());
    for word in folded.split_whitespace() {
        let word = trim_marks(word);
        if word.is_empty() {
            continue;
        }
        if !words.is_empty() {
            words.push(' ');
        }
        words.push_str(word);
    }
    words
}

/// Folds case through the upper case, which is the same for "ß" and "ss", "ﬁ" and "fi", "ς" and "σ". The Turkish dotless ı is
/// unchanged, as in Unicode's case folding.
fn case_folded(c: char) -> impl Iterator<Item = char> {
    let dotless = (c == 'ı').then_some(c);
    let others = (c != 'ı').then_some(c).into_iter();
    let folded =
        others.flat_map(char::to_lowercase).flat_map(char::to_uppercase).flat_map(char::to_lowercase);
    dotless.into_iter().chain(folded)
}

fn trim_marks(word: &str) -> &str {
    let end = word.trim_end_matches(|c: char| is_mark(c) && c != '%');
    let core = end.trim_start_matches(is_mark);
    let end = if core.ends_with(|c: char| c == '%' || c.is_alphanumeric()) {
        end
    } else {
        end.trim_end_matches(is_mark)
    };
    // A sign or a decimal point is part of the number that follows it.
    let sign =
        end[..end.len() - core.len()].chars().next_back().is_some_and(|c| matches!(c, '-' | '−' | '.'));
    if sign && core.starts_with(|c: char| c.is_ascii_digit()) {
        let from = end.len() - core.len();
        let width = end[..from].chars().next_back().map_or(0, char::len_utf8);
        return &end[from - width..];
    }
    core
}

/// Returns true for punctuation and symbols.
fn is_mark(c: char) -> bool {
    // Combining marks are part of their letter. NFC keeps those without a composed form.
    !c.is_alphanumeric() && !c.is_whitespace() && !unicode_normalization::char::is_combining_mark(c)
}

/// Compares texts after normalisation. An empty text equals nothing.
pub(crate) fn same_label(answer: &str, gold: &str) -> bool {
    let gold = normalised(gold);
    !gold.is_empty() && normalised(answer) == gold
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalisation() {
        for (text, expected) in [
            ("  Vòi   SEN. ", "vòi sen"),
            ("vo\u{300}i sen", "vòi sen"),
            ("“có”", "có"),
            ("(B) Collision!", "b collision"),
            ("mother-in-law's", "mother-in-law's"),
            ("-3", "-3"),
            (".5", ".5"),
            ("50%.", "50%"),
            ("$3.", "3"),
            ("—", ""),
            ("%", ""),
            ("İ", "i̇"),
            ("STRASSE Straße GROẞ", "strasse strasse gross"),
            ("ﬁre ΣΊΣΥΦΟΣ Σίσυφος", "fire σίσυφοσ σίσυφοσ"),
            ("ılık", "ılık"),
            ("हिन्दी", "हिन्दी"),
        ] {
            assert_eq!(normalised(text), expected, "{text}");
        }
    }

    #[test]
    fn empty_matches_nothing() {
        assert!(!same_label("", ""));
        assert!(!same_label("...", "!"));
        assert!(same_label("Happy.", "happy"));
    }
}
