//! `yes_no`: agreement of yes or no with the ground truth, in English and Vietnamese. Range {0, 1}.
//!
//! Source: VLM-R1. Deliberate differences: only whole words count, not the "no" in "know". An answer is wrong if it has neither
//! word, or has both and starts with neither. Two texts with neither word are not equal. `Compat::VlmR1Choice` restores the
//! source's form.

use crate::AnswerPolicy;
use crate::answer::{Question, normalised, same_label};
use crate::tags::content;

const YES: [&str; 4] = ["yes", "true", "có", "đúng"];
const NO: [&str; 4] = ["no", "false", "không", "sai"];

pub(crate) fn score(question: &Question<'_>) -> Option<f64> {
    if question.gold.is_empty() {
        return None;
    }
    let Some(gold) = polarity(&question.gold) else {
        return Some(f64::from(same_label(&question.answer, &question.gold)));
    };
    Some(f64::from(polarity(&question.answer) == Some(gold)))
}

/// Returns the meaning of a text that consists of one yes or no word.
pub(crate) fn polarity_of_word(text: &str) -> Option<bool> {
    // All words are shorter, so normalisation would be wasted.
    if text.len() > 32 {
        return None;
    }
    word_polarity(&normalised(text))
}

fn word_polarity(word: &str) -> Option<bool> {
    if YES.contains(&word) { Some(true) } else { NO.contains(&word).then_some(false) }
}

/// Returns the meaning of the first word or, otherwise, that of all yes and no words if they agree.
fn polarity(text: &str) -> Option<bool> {
    let text = normalised(text);
    let mut words = text.split(' ');
    if let Some(first) = words.next().and_then(word_polarity) {
        return Some(first);
    }
    let mut said = words.filter_map(word_polarity);
    let first = said.next()?;
    said.all(|other| other == first).then_some(first)
}

/// Computes VLM-R1's rule without changes: compares the first "yes" or "no" among the letters of each side. Two texts with
/// neither are equal.
pub(crate) fn vlmr1(question: &Question<'_>) -> f64 {
    fn first(text: &str) -> Option<bool> {
        let text = text.to_lowercase();
        let text = content(&text, "answer", AnswerPolicy::First).unwrap_or(&text);
        match (text.find("yes"), text.find("no")) {
            (Some(yes), Some(no)) => Some(yes < no),
            (yes, no) => yes.or(no).map(|_| yes.is_some()),
        }
    }
    f64::from(first(question.input.completion) == first(question.input.solution.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use crate::testing::Row;
    use crate::{Compat, RewardOptions};

    #[test]
    fn golden() {
        let literal = RewardOptions { compat: [Compat::VlmR1Choice].into(), ..RewardOptions::default() };
        for (completion, gold, source, ours) in [
            ("maybe", "có", 1.0, 0.0),
            ("I do not know", "no", 1.0, 0.0),
            ("<answer>Yes, it is.</answer>", "yes", 1.0, 1.0),
            ("<answer>No</answer>", "<answer>yes</answer>", 0.0, 0.0),
            ("<answer>không có</answer>", "có", 1.0, 0.0),
            ("<answer>đúng</answer>", "Đúng.", 1.0, 1.0),
            ("<answer>yes or no</answer>", "yes", 1.0, 1.0),
            ("<answer>either yes or no</answer>", "yes", 1.0, 0.0),
        ] {
            let row = Row::new("", completion, gold);
            assert_eq!(row.score("yes_no", &literal), Some(source), "{completion}");
            assert_eq!(row.score("yes_no", &RewardOptions::default()), Some(ours), "{completion}");
        }
    }
}
