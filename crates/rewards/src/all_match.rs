//! `all_match`: equality of cleaned texts. Range {0, 1}.
//!
//! Source: VLM-R1. Cleaning only converts line breaks to spaces, removes trailing full stops and converts to lower case.
//! Deliberate difference: the reward does not apply to an empty ground truth. In VLM-R1, an empty answer equals it.

use crate::answer::Question;

pub(crate) fn score(question: &Question<'_>) -> Option<f64> {
    let gold = clean(&question.gold);
    (!gold.is_empty()).then(|| f64::from(clean(&question.answer) == gold))
}

/// Cleans a text without its answer tag, as VLM-R1 does.
pub(crate) fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut before = None;
    for c in text.chars() {
        match c {
            // A line break becomes a space, unless white space precedes it.
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
