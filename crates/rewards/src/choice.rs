//! Multiple choice with one or several labels, as letters or numbers in any common notation.
//!
//! Sources: the action sets of qwen-vl-finetune (overlap), its later exact form, and VLM-R1's `mcq`. Deliberate differences:
//! answers are sets. If neither side has a label, the texts are compared; in the source, two different words are equal because
//! both lists are empty. "(B) Collision" and "B" are the same answer. `Compat::S2Accuracy`, `Compat::S3Accuracy` and
//! `Compat::VlmR1Choice` restore the sources' forms.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::Regex;

use crate::AnswerPolicy;
use crate::answer::{Question, normalised, same_label};
use crate::tags::content;

/// Labels in upper case, numbers without leading zeros.
type Labels = BTreeSet<String>;

/// A choice that the question offers.
#[derive(Debug, PartialEq)]
struct Choice {
    label: String,
    text: String,
}

/// Returns 1 if all labels are correct, otherwise 0.
pub(crate) fn exact(question: &Question<'_>) -> Option<f64> {
    let (answer, gold) = match sides(question, &question.answer)? {
        Sides::Labels(answer, gold) => (answer, gold),
        Sides::Texts(same) => return Some(f64::from(same)),
    };
    Some(f64::from(answer == gold))
}

/// Returns the number of shared labels divided by the number of all labels. Like the source, requires an answer tag.
pub(crate) fn iou(question: &Question<'_>) -> Option<f64> {
    let (answer, gold) = match sides(question, question.tagged.as_deref().unwrap_or_default())? {
        Sides::Labels(answer, gold) => (answer, gold),
        Sides::Texts(same) => return Some(f64::from(same)),
    };
    Some(answer.intersection(&gold).count() as f64 / answer.union(&gold).count() as f64)
}

/// Returns true for a multiple-choice question: the ground truth has a label or names one of the question's choices.
pub(crate) fn is_choice(question: &Question<'_>) -> bool {
    let gold = &*question.gold;
    let marked = PARENTHESISED.captures(gold).next().is_some_and(|(at, _)| at == 0)
        || LEADING.captures(gold).next().is_some()
        || (gold.len() == 1 && gold.starts_with(|c: char| c.is_ascii_uppercase()));
    marked || is_offered(question)
}

/// Returns true if the question lists choices, and the ground truth consists of their labels or is the text of one.
pub(crate) fn is_offered(question: &Question<'_>) -> bool {
    let choices = choices(question.input.prompt);
    let known = |labels: Labels| labels.iter().all(|label| choices.iter().any(|c| &c.label == label));
    !choices.is_empty() && labels(&question.gold, &choices).is_some_and(known)
}

/// Returns the number of labels in the ground truth.
pub(crate) fn num_labels(question: &Question<'_>) -> usize {
    labels(&question.gold, &choices(question.input.prompt)).map_or(0, |labels| labels.len())
}

enum Sides {
    /// Labels of the answer, which may be empty, and of the ground truth.
    Labels(Labels, Labels),
    /// Equality of the texts, for a ground truth without a label.
    Texts(bool),
}

fn sides(question: &Question<'_>, answer: &str) -> Option<Sides> {
    let gold = &*question.gold;
    if gold.is_empty() {
        return None;
    }
    let choices = choices(question.input.prompt);
    let Some(gold_labels) = labels(gold, &choices) else {
        return Some(Sides::Texts(same_label(answer, gold)));
    };
    let answer_labels = labels(answer, &choices).unwrap_or_default();
    if answer_labels.is_empty() && gold_labels.len() == 1 {
        // The text of the ground truth without its label serves for questions whose choices could not be parsed.
        let rest = LEADING_ANY.as_ref().map_or_else(String::new, |e| e.replace(gold, "").into_owned());
        return Some(Sides::Texts(same_label(answer, &rest)));
    }
    Some(Sides::Labels(answer_labels, gold_labels))
}

macro_rules! expression {
    ($name:ident, $pattern:literal) => {
        // The expression is constant. If it did not compile, the first test would fail.
        static $name: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new($pattern).ok());
    };
}

/// Pattern of a label and of the characters beside it. The expression must not consume those, since they may belong to the next
/// label.
struct Marked {
    expression: fn() -> Option<&'static Regex>,
    /// Returns true if the character may precede the match. A match may also be at the start of the text.
    before: fn(char) -> bool,
    /// Returns true if the character may follow the match. A match may also be at the end of the text.
    behind: fn(char) -> bool,
}

impl Marked {
    /// Returns the start of each match, and its captures.
    fn captures<'t>(&self, text: &'t str) -> impl Iterator<Item = (usize, regex::Captures<'t>)> {
        let (before, behind) = (self.before, self.behind);
        let all = (self.expression)().into_iter().flat_map(move |expression| expression.captures_iter(text));
        all.filter_map(move |found| {
            let whole = found.get(0)?;
            let apart = text[..whole.start()].chars().next_back().is_none_or(before)
                && text[whole.end()..].chars().next().is_none_or(behind);
            apart.then(|| (whole.start(), found))
        })
    }

    fn labels(&self, text: &str) -> Labels {
        self.captures(text).filter_map(|(_, found)| Some(label(found.get(1)?.as_str()))).collect()
    }
}

fn anything(_: char) -> bool {
    true
}

static PARENTHESISED: Marked =
    Marked { expression: || IN_PARENTHESES.as_ref(), before: |c| !c.is_alphanumeric(), behind: anything };
static LEADING: Marked =
    Marked { expression: || AT_THE_START.as_ref(), before: anything, behind: char::is_whitespace };

expression!(IN_PARENTHESES, r"\(\s*([A-Za-z]|[0-9]{1,2})\s*\)");
expression!(AT_THE_START, r"(?:\A|[\n,;])\s*([A-Za-z]|[0-9]{1,2})\s?[.):]");
expression!(LEADING_ANY, r"\A\s*(?:\(\s*(?:[A-Za-z]|[0-9]{1,2})\s*\)|(?:[A-Za-z]|[0-9]{1,2})\s?[.):])");
expression!(
    STATED,
    r"(?i:answer|option|choice|đáp án|答案|选)(?:\s*(?i:is|are|là|是|为))?\s*[:：]?\s*\$?\(?([A-Z])(?:[^\p{L}\p{N}']|\z)"
);
expression!(OPTION_PARENTHESISED, r"(?:^|\s)\(([A-Za-z]|[0-9]{1,2})\)");
expression!(OPTION_LINE, r"(?m)^[ \t]*([A-Za-z]|[0-9]{1,2})[.):][ \t]");
expression!(OPTION_INLINE, r"(?:^|\s)([A-Z])[.):]\s");

fn captures<'t>(
    expression: &'t LazyLock<Option<Regex>>,
    text: &'t str,
) -> impl Iterator<Item = regex::Captures<'t>> {
    expression.as_ref().into_iter().flat_map(move |expression| expression.captures_iter(text))
}

fn label(text: &str) -> String {
    let digits = text.trim_start_matches('0');
    if digits.is_empty() && !text.is_empty() { "0".to_owned() } else { digits.to_uppercase() }
}

/// Returns the labels of an answer. Uses the first notation that yields a label of the choices, or any label if the choices are
/// unknown: `(B)`, `B.`, bare labels, "the answer is B", the text of a choice.
fn labels(text: &str, choices: &[Choice]) -> Option<Labels> {
    let known = |labels: &Labels| {
        choices.is_empty() || labels.iter().any(|label| choices.iter().any(|choice| &choice.label == label))
    };
    let spellings: [fn(&str) -> Labels; 4] = [
        |text| PARENTHESISED.labels(text),
        |text| match LEADING.captures(text).next() {
            Some((0, _)) => LEADING.labels(text),
            _ => Labels::new(),
        },
        bare,
        |text| {
            let stated = captures(&STATED, text).filter_map(|found| Some(label(found.get(1)?.as_str())));
            stated.last().into_iter().collect()
        },
    ];
    let mut other = None;
    for spelling in spellings {
        let labels = spelling(text);
        if labels.is_empty() {
            continue;
        }
        if known(&labels) {
            return Some(labels);
        }
        other.get_or_insert(labels);
    }
    let text = normalised(text);
    let named = choices.iter().find(|choice| !text.is_empty() && normalised(&choice.text) == text);
    named.map(|choice| Labels::from([choice.label.clone()])).or(other)
}

/// Returns the labels of a text that has nothing else, such as "B", "A, C" or "1 and 3".
fn bare(text: &str) -> Labels {
    let mut labels = Labels::new();
    // A text with more words than there can be labels is a sentence.
    for word in text.split([',', ';', '/', '&', ' ', '\t', '\n']).filter(|word| !word.is_empty()) {
        let word = word.trim_matches(['.', ')', ':', '(', '"', '\'', '*']);
        if ["and", "or", "và"].contains(&word) {
            continue;
        }
        let is_label = (word.len() == 1 && word.chars().all(|c| c.is_ascii_alphabetic()))
            || (matches!(word.len(), 1 | 2) && word.chars().all(|c| c.is_ascii_digit()));
        if !is_label || labels.len() > 64 {
            return Labels::new();
        }
        labels.insert(label(word));
    }
    labels
}

/// Returns the choices of a question: the last run of at least two labels that starts with A or 1 and has no gap.
fn choices(question: &str) -> Vec<Choice> {
    [&OPTION_PARENTHESISED, &OPTION_LINE, &OPTION_INLINE]
        .into_iter()
        .map(|expression| choices_spelled(expression, question))
        .find(|choices| choices.len() >= 2)
        .unwrap_or_default()
}

fn choices_spelled(expression: &LazyLock<Option<Regex>>, question: &str) -> Vec<Choice> {
    // Label, position of the marker and position of the text, in bytes.
    let mut best: Vec<(String, usize, usize)> = Vec::new();
    let mut run: Vec<(String, usize, usize)> = Vec::new();
    for found in captures(expression, question) {
        let (Some(all), Some(mark)) = (found.get(0), found.get(1)) else { continue };
        let name = label(mark.as_str());
        if name == "A" || name == "1" {
            if run.len() >= 2 {
                best = std::mem::take(&mut run);
            }
            run.clear();
        } else if !run.last().is_some_and(|last| follows(&last.0, &name)) {
            continue;
        }
        run.push((name, all.start(), all.end()));
    }
    if run.len() >= 2 {
        best = run;
    }
    let ends = best.iter().skip(1).map(|next| next.1).chain([question.len()]).collect::<Vec<_>>();
    best.into_iter()
        .zip(ends)
        .map(|((label, _, from), to)| {
            let text = question[from..to].trim_start().lines().next().unwrap_or_default();
            Choice { label, text: text.trim().to_owned() }
        })
        .collect()
}

fn follows(last: &str, next: &str) -> bool {
    match (last.parse::<u32>(), next.parse::<u32>()) {
        (Ok(last), Ok(next)) => next == last + 1,
        (Err(_), Err(_)) => match (last.as_bytes(), next.as_bytes()) {
            (&[last], &[next]) => u32::from(next) == u32::from(last) + 1,
            _ => false,
        },
        _ => false,
    }
}

expression!(NUMBERED, r"\((\p{Nd}+)\)");

fn numbers(text: &str) -> Vec<&str> {
    let mut numbers: Vec<&str> =
        captures(&NUMBERED, text).filter_map(|found| Some(found.get(1)?.as_str())).collect();
    numbers.sort_unstable();
    numbers
}

fn first_tag(text: &str) -> Option<&str> {
    content(text, "answer", AnswerPolicy::First)
}

/// Returns the source's overlap: 1 for equal lists of `(n)`, including two empty lists.
pub(crate) fn s2_iou(question: &Question<'_>) -> f64 {
    let Some(answer) = first_tag(question.input.completion) else { return 0.0 };
    let solution = question.input.solution.unwrap_or_default();
    let (answer, gold) = (numbers(answer), numbers(first_tag(solution).unwrap_or(solution)));
    if answer == gold {
        return 1.0;
    }
    let (answer, gold): (BTreeSet<_>, BTreeSet<_>) =
        (answer.into_iter().collect(), gold.into_iter().collect());
    answer.intersection(&gold).count() as f64 / answer.union(&gold).count() as f64
}

/// Returns the source's exact form: 1 for equal non-empty lists of `(n)`, or for texts that are equal apart from spaces,
/// underscores and case.
pub(crate) fn s3_exact(question: &Question<'_>) -> f64 {
    let squeezed = |text: &str| text.replace([' ', '_'], "").to_lowercase();
    let solution = question.input.solution.unwrap_or_default();
    let answer = first_tag(question.input.completion).unwrap_or(question.input.completion).trim();
    let gold = first_tag(solution).unwrap_or(solution).trim();
    let (answer_numbers, gold_numbers) = (numbers(answer), numbers(gold));
    let same_numbers = !gold_numbers.is_empty() && answer_numbers == gold_numbers;
    let gold = squeezed(gold);
    f64::from(same_numbers || (!gold.is_empty() && squeezed(answer) == gold))
}

/// Computes VLM-R1's `mcq` without changes.
pub(crate) fn vlmr1(question: &Question<'_>) -> f64 {
    let solution = question.input.solution.unwrap_or_default();
    let gold = content(solution, "answer", AnswerPolicy::First).unwrap_or(solution);
    let gold = extract_choice(gold.trim()).map_or_else(|| solution.trim().to_owned(), String::from);
    let answer = first_tag(question.input.completion).unwrap_or(question.input.completion).trim();
    f64::from(extract_choice(answer).is_some_and(|choice| gold.chars().eq([choice])))
}

/// Searches for a letter as VLM-R1 does. Another letter must not precede it, and punctuation or the end of the text must follow
/// it. Among several letters, the one with the best surroundings at its first occurrence wins.
pub(crate) fn extract_choice(text: &str) -> Option<char> {
    const KEYWORDS: [&str; 16] = [
        "答案", "选择", "正确", "是", "对", "认为", "应该", "觉得", "ANSWER", "CORRECT", "CHOOSE", "SELECT",
        "RIGHT", "THINK", "BELIEVE", "SHOULD",
    ];
    const CONTEXT_CHARS: usize = 20;
    let upper = text.to_uppercase().split_whitespace().collect::<Vec<_>>().join(" ");
    let text: Vec<char> = upper.chars().collect();
    let mut found: Vec<char> = Vec::new();
    for (at, &letter) in text.iter().enumerate() {
        let apart = at == 0 || !text[at - 1].is_ascii_uppercase();
        let ends = text.get(at + 1).is_none_or(|next| ".,?!:;".contains(*next));
        if letter.is_ascii_uppercase() && apart && ends && !found.contains(&letter) {
            found.push(letter);
        }
    }
    let points = |letter: char| {
        let Some(at) = text.iter().position(|&c| c == letter) else { return 0 };
        let around = &text[at.saturating_sub(CONTEXT_CHARS)..text.len().min(at + CONTEXT_CHARS)];
        let around: String = around.iter().collect();
        let words = KEYWORDS.iter().filter(|word| around.contains(**word)).count();
        let late = 2 * usize::from(at as f64 > text.len() as f64 * 0.7);
        words + late + usize::from(text.get(at + 1).is_some_and(|next| "。.!！,，".contains(*next)))
    };
    // `max_by_key` returns the last of several maxima, but the first is wanted.
    found.iter().copied().rev().max_by_key(|&letter| points(letter))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Row;
    use crate::{AccuracyMode, Compat, RewardOptions};

    fn set(labels: &[&str]) -> Option<Labels> {
        Some(labels.iter().map(|label| (*label).to_owned()).collect())
    }

    #[test]
    fn spellings() {
        for (text, expected) in [
            ("(B) Collision", set(&["B"])),
            ("(b)collision", set(&["B"])),
            ("B", set(&["B"])),
            ("b.", set(&["B"])),
            ("B.", set(&["B"])),
            ("B) Collision", set(&["B"])),
            ("B: Collision", set(&["B"])),
            ("B. Collision", set(&["B"])),
            ("A, C", set(&["A", "C"])),
            ("A and C", set(&["A", "C"])),
            ("(1) Pick up (2) Insert", set(&["1", "2"])),
            ("02", set(&["2"])),
            ("A. x\nC. y", set(&["A", "C"])),
            ("(A)(C)", set(&["A", "C"])),
            ("(1)(2)(3)", set(&["1", "2", "3"])),
            ("( a )(b)", set(&["A", "B"])),
            ("(A),(C)", set(&["A", "C"])),
            ("A.\nC.", set(&["A", "C"])),
            ("A)\nB)\nC)", set(&["A", "B", "C"])),
            ("The answer is B.", set(&["B"])),
            ("The answer is C. No, the answer is A.", set(&["A"])),
            ("I do not know", None),
            ("A cat", None),
            ("f(x)", None),
            ("", None),
        ] {
            assert_eq!(labels(text, &[]), expected, "{text}");
        }
    }

    #[test]
    fn choices_of_a_question() {
        let names = |question: &str| -> Vec<(String, String)> {
            choices(question).into_iter().map(|choice| (choice.label, choice.text)).collect()
        };
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let expected = vec![pair("A", "red ball"), pair("B", "Blue"), pair("C", "none")];
        assert_eq!(names("What?\nOptions:\n(A) red ball\n(B) Blue\n(C) none\nOutput it."), expected);
        assert_eq!(names("What? A. red ball B. Blue C. none"), expected);
        assert_eq!(names("What?\nA) red ball\nB) Blue\nC) none"), expected);
        let numbers = vec![pair("1", "pick"), pair("2", "drop")];
        assert_eq!(names("Which (1) pick (2) drop"), numbers);
        assert_eq!(names("1. pick\n2. drop"), numbers);
        assert_eq!(names("Example (A) x (B) y. Now: (A) u (B) v")[1], pair("B", "v"));
        assert_eq!(names("Is (B) right?"), vec![]);
    }

    #[test]
    fn a_number_that_is_a_choice_text() {
        let question = "How many?\n(A) 1\n(B) 2\n(C) 3";
        let score = |answer: &str, gold: &str| {
            Row::new(question, &format!("<answer>{answer}</answer>"), gold)
                .score("mcq", &RewardOptions::default())
        };
        assert_eq!(score("2", "B"), Some(1.0));
        assert_eq!(score("(C)", "3"), Some(1.0));
        assert_eq!(score("1", "(C) 3"), Some(0.0));
    }

    #[test]
    fn labels_without_a_space_between_all_count() {
        let score = |answer: &str, gold: &str, reward: &str| {
            Row::new("", &format!("<answer>{answer}</answer>"), gold).score(reward, &RewardOptions::default())
        };
        for gold in ["(A)(C)", "<answer>(A)(C)</answer>", "(A) (C)"] {
            assert_eq!(score("(A)", gold, "mcq"), Some(0.0), "{gold}");
            assert_eq!(score("(A)(C)", gold, "mcq"), Some(1.0), "{gold}");
            assert_eq!(score("(A)", gold, "mcq_iou"), Some(0.5), "{gold}");
            assert_eq!(score("(A)(B)(C)", gold, "mcq_iou"), Some(2.0 / 3.0), "{gold}");
        }
        assert_eq!(score("(A)(C)", "(A)", "mcq"), Some(0.0));
    }

    /// Prediction, ground truth, overlap (source, ours), exact (source, ours).
    const TABLE: &[(&str, &str, [f64; 2], [f64; 2])] = &[
        ("<answer>(2) (1)</answer>", GOLD, [1.0, 1.0], [1.0, 1.0]),
        ("<answer>(1)</answer>", GOLD, [0.5, 0.5], [0.0, 0.0]),
        ("<answer>(1) (2) (3)</answer>", GOLD, [2.0 / 3.0, 2.0 / 3.0], [0.0, 0.0]),
        ("<answer>(3)</answer>", GOLD, [0.0, 0.0], [0.0, 0.0]),
        ("(1) (2)", GOLD, [0.0, 0.0], [1.0, 1.0]),
        ("<answer>(1) (1) (2)</answer>", GOLD, [1.0, 1.0], [0.0, 1.0]),
        ("<answer>B</answer>", "<answer>(B) Collision</answer>", [1.0, 1.0], [0.0, 1.0]),
        ("<answer>(b) collision</answer>", "<answer>(B)Collision</answer>", [1.0, 1.0], [1.0, 1.0]),
        ("<answer>happy</answer>", "sad", [1.0, 0.0], [0.0, 0.0]),
        ("<answer></answer>", "<answer></answer>", [1.0, f64::NAN], [0.0, f64::NAN]),
        ("<answer>Collision</answer>", "<answer>(B) Collision</answer>", [1.0, 1.0], [0.0, 1.0]),
    ];
    const GOLD: &str = "<answer>(1) Pick up (2) Insert</answer>";

    #[test]
    fn golden_overlap_and_exact() {
        let with = |accuracy_mode, compat: &[Compat]| RewardOptions {
            accuracy_mode,
            compat: compat.iter().copied().collect(),
            ..RewardOptions::default()
        };
        for &(completion, gold, overlap, exact) in TABLE {
            let row = Row::new("", completion, gold);
            for (mode, compat, [source, ours]) in [
                (AccuracyMode::McqIou, Compat::S2Accuracy, overlap),
                (AccuracyMode::McqExact, Compat::S3Accuracy, exact),
            ] {
                assert_eq!(
                    row.score("accuracy", &with(mode, &[compat])),
                    Some(source),
                    "{completion} {mode:?}"
                );
                // NaN means "not applicable", for an empty ground truth.
                let ours = (!ours.is_nan()).then_some(ours);
                assert_eq!(row.score("accuracy", &with(mode, &[])), ours, "{completion} {mode:?}");
            }
        }
    }

    #[test]
    fn golden_extract_choice() {
        for (text, expected) in [
            ("(B) Collision", None),
            ("B. Collision", Some('B')),
            ("The answer is B.", Some('B')),
            ("(B)", None),
            ("A, B", Some('B')),
            ("I think C. is right but maybe D.", Some('D')),
            ("a", Some('A')),
            ("Yes.", None),
        ] {
            assert_eq!(extract_choice(text), expected, "{text}");
        }
    }

    #[test]
    fn golden_mcq() {
        let literal = RewardOptions { compat: [Compat::VlmR1Choice].into(), ..RewardOptions::default() };
        let ours = RewardOptions::default();
        for (answer, gold, source, own) in [("B", "(B) Collision", 0.0, 1.0), ("b.", "B", 1.0, 1.0)] {
            let row = Row::new("", answer, gold);
            assert_eq!(row.score("mcq", &literal), Some(source), "{answer}");
            assert_eq!(row.score("mcq", &ours), Some(own), "{answer}");
        }
    }
}
