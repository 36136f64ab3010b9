//! `short_text`: 3 for an equal answer, 1.5 for at least half of its words, otherwise 0.
//!
//! Source: the outcome reward of the ViVQA-X project. Deliberate differences: Unicode normalisation (NFC, typographic quotes,
//! double spaces), the last answer tag instead of the first, and two measures against hedging. A ground truth that is a yes/no
//! word must match completely ("không có" is not half of "có"). The partial score requires an answer of at most twice the words.
//! `Compat::S4Accuracy` restores the source's form.

use std::collections::HashSet;

use crate::AnswerPolicy;
use crate::answer::{Question, normalised};
use crate::tags::content;
use crate::yes_no::polarity_of_word;

/// Score of an equal answer.
pub(crate) const FULL: f64 = 3.0;
const PARTIAL: f64 = 1.5;

pub(crate) fn score(question: &Question<'_>) -> Option<f64> {
    let gold = normalised(&question.gold);
    if gold.is_empty() {
        return None;
    }
    let answer = normalised(question.tagged.as_deref().unwrap_or_default());
    let hedged = polarity_of_word(&gold).is_some() || answer.split(' ').count() > 2 * gold.split(' ').count();
    Some(match graded(&answer, &gold) {
        PARTIAL if hedged => 0.0,
        score => score,
    })
}

fn graded(answer: &str, gold: &str) -> f64 {
    if answer.is_empty() || gold.is_empty() {
        return 0.0;
    }
    if answer == gold {
        return FULL;
    }
    let said: HashSet<&str> = answer.split_whitespace().collect();
    let words: Vec<&str> = gold.split_whitespace().collect();
    let hits = words.iter().filter(|word| said.contains(**word)).count();
    if 2 * hits >= words.len() { PARTIAL } else { 0.0 }
}

/// Computes the source's rule without changes.
pub(crate) fn s4_literal(question: &Question<'_>) -> f64 {
    fn clean(text: &str) -> String {
        text.to_lowercase()
            .chars()
            .filter(|c| !c.is_ascii_punctuation())
            .collect::<String>()
            .trim()
            .to_owned()
    }
    let solution = question.input.solution.unwrap_or_default();
    let gold = content(solution, "answer", AnswerPolicy::First).unwrap_or(solution);
    let answer = content(question.input.completion, "answer", AnswerPolicy::First).unwrap_or_default();
    graded(&clean(answer), &clean(gold))
}

#[cfg(test)]
mod tests {
    use crate::testing::Row;
    use crate::{AccuracyMode, Compat, RewardOptions};

    #[test]
    fn golden() {
        let ours = RewardOptions { accuracy_mode: AccuracyMode::ShortText, ..RewardOptions::default() };
        let literal = RewardOptions { compat: [Compat::S4Accuracy].into(), ..ours.clone() };
        for (completion, gold, source, own) in [
            ("<answer>Vòi sen.</answer>", "vòi sen", 3.0, 3.0),
            ("<answer>sen</answer>", "vòi sen", 1.5, 1.5),
            ("<answer>sen xanh</answer>", "vòi sen đỏ", 0.0, 0.0),
            ("vòi sen", "vòi sen", 0.0, 0.0),
            ("<answer>không có</answer>", "có", 1.5, 0.0),
            ("<answer>vòi  sen</answer>", "vòi sen", 1.5, 3.0),
            ("<answer>vo\u{300}i sen</answer>", "vòi sen", 1.5, 3.0),
            ("<answer>2 con mèo</answer>", "hai con mèo", 1.5, 1.5),
            ("<ANSWER>có</ANSWER>", "có", 3.0, 3.0),
            ("<answer>“có”</answer>", "có", 0.0, 3.0),
            ("<answer>một hai ba bốn sen</answer>", "vòi sen", 1.5, 0.0),
            ("<answer></answer>", "có", 0.0, 0.0),
        ] {
            let row = Row::new("", completion, gold);
            assert_eq!(row.score("accuracy", &literal), Some(source), "{completion}");
            assert_eq!(row.score("accuracy", &ours), Some(own), "{completion}");
        }
    }
}
