//! `all_match`: equal cleaned texts. Range {0, 1}.
//!
//! Source: VLM-R1. Cleaning takes line breaks for spaces, trailing full stops and case away, nothing else. Difference
//! by design: an empty ground truth is not applicable instead of equal to an empty answer.

use crate::answer::Question;

pub(crate) fn score(question: &Question<'_>) -> Option<f64> {
    let gold = clean(question.gold);
    (!gold.is_empty()).then(|| f64::from(clean(question.answer) == gold))
}

/// VLM-R1's cleaning of a text whose answer tag is taken off.
pub(crate) fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut before = None;
    for c in text.chars() {
        match c {
            // A line break becomes a space, unless there is white space before it already.
            '\n' | '\r' if before.is_some_and(char::is_whitespace) => {}
            '\n' | '\r' => out.push(' '),
            c => out.push(c),
        }
        before = Some(c);
    }
    out.trim().trim_end_matches('.').to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::clean;
    use crate::RewardOptions;
    use crate::testing::Row;

    #[test]
    fn cleaning_and_equality() {
        assert_eq!(clean(" Red\nball \n.. "), "red ball ");
        assert_eq!(clean("a\r\nb."), "a b");
        let score = |text: &str, gold| Row::new("", text, gold).score("all_match", &RewardOptions::default());
        assert_eq!(score("<answer>Red\nBall.</answer>", "<answer> red ball </answer>"), Some(1.0));
        assert_eq!(score("<answer>red  ball</answer>", "red ball"), Some(0.0));
        assert_eq!(score("<answer></answer>", "<answer></answer>"), None);
    }
}
