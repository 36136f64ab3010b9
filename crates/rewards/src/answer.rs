//! Answers of completions, and their comparison as text.

use unicode_normalization::UnicodeNormalization;

use crate::tags::content;
use crate::{AnswerPolicy, RewardInput};

/// A completion's answer beside the ground truth.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question<'a> {
    /// The row.
    pub input: &'a RewardInput<'a>,
    /// Content of the answer tag that the policy picks, stripped.
    pub tagged: Option<&'a str>,
    /// `tagged`, else what follows the thinking, else the whole completion; stripped.
    pub answer: &'a str,
    /// Content of the ground truth's answer tag, else all of it; stripped.
    pub gold: &'a str,
}

impl<'a> Question<'a> {
    /// `None` where the row has no ground truth.
    pub fn new(input: &'a RewardInput<'a>, policy: AnswerPolicy) -> Option<Self> {
        let solution = input.solution?;
        let gold = content(solution, "answer", policy).unwrap_or(solution).trim();
        let tagged = content(input.completion, "answer", policy).map(str::trim);
        Some(Self { input, tagged, answer: said(input.completion, policy), gold })
    }
}

/// Returns the answer of a completion: the content of the answer tag that the policy picks, else the text after the thinking, else all of
/// it; stripped.
pub(crate) fn said(completion: &str, policy: AnswerPolicy) -> &str {
    content(completion, "answer", policy).map_or_else(|| untagged(completion), str::trim)
}

/// Returns the text after the last `</think>`.
fn untagged(completion: &str) -> &str {
    crate::tags::tags(completion, &["think"])
        .filter(|tag| tag.close)
        .last()
        .map_or(completion, |tag| &completion[tag.end..])
        .trim()
}

/// Texts are cut here before they are compared: an answer of more characters equals no ground truth worth having,
/// and the quadratic comparisons stay bounded.
pub(crate) const MAX_ANSWER_CHARS: usize = 4096;

/// NFC, case folded, punctuation and symbols dropped at the edges of each word, white space collapsed.
/// A minus or a percent sign before or after a digit stays: "-3" is not "3".
pub(crate) fn normalised(text: &str) -> String {
    // Cut before composing as well: a run of combining marks is sorted as one.
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

/// Full case folding by way of the upper case, which "ß" and "ss", "ﬁ" and "fi", "ς" and "σ" share. The Turkish dotless
/// ı stays itself, as in Unicode's own folding.
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
    // A sign or a decimal point that belongs to the number behind it.
    let sign =
        end[..end.len() - core.len()].chars().next_back().is_some_and(|c| matches!(c, '-' | '−' | '.'));
    if sign && core.starts_with(|c: char| c.is_ascii_digit()) {
        let from = end.len() - core.len();
        let width = end[..from].chars().next_back().map_or(0, char::len_utf8);
        return &end[from - width..];
    }
    core
}

/// Punctuation or symbol: neither letter, digit, mark of a letter, nor white space.
fn is_mark(c: char) -> bool {
    // Combining marks belong to their letter; NFC leaves those without a composed form.
    !c.is_alphanumeric() && !c.is_whitespace() && !unicode_normalization::char::is_combining_mark(c)
}

/// Equal after normalisation; an empty side equals nothing.
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
