//! `emotion`: agreement with the emotion words of the ground truth, including synonyms. Range {0, 1}.
//!
//! Source: R1-Omni (labels of DFEW, MAFW and RAVDESS), which compares texts exactly. Here "fearful" equals "fear", and a word in
//! a sentence counts unless the sentence has a negation or names other emotions as well.

use std::collections::BTreeSet;

use crate::answer::{Question, normalised, same_label};

/// Spellings of each emotion. The label is first.
const EMOTIONS: &[&[&str]] = &[
    &["happy", "happiness", "joy", "joyful", "happily", "cheerful", "delighted", "glad"],
    &["sad", "sadness", "sorrow", "sorrowful", "unhappy", "grief"],
    &["angry", "anger", "angrily", "furious", "fury", "rage", "mad"],
    &["fear", "fearful", "afraid", "scared", "frightened", "terrified", "fearfulness"],
    &["surprise", "surprised", "astonished", "astonishment", "amazed", "surprising"],
    &["disgust", "disgusted", "disgusting"],
    &["neutral", "neutrality"],
    &["contempt", "contemptuous", "scorn", "scornful", "disdain"],
    &["anxiety", "anxious", "worried", "worry", "nervous", "anxiousness"],
    &["helplessness", "helpless"],
    &["disappointment", "disappointed"],
    &["calm", "calmness"],
];

const NEGATIONS: [&str; 4] = ["not", "no", "never", "without"];

pub(crate) fn score(question: &Question<'_>) -> Option<f64> {
    if question.gold.is_empty() {
        return None;
    }
    let gold = emotions(&question.gold);
    if gold.is_empty() {
        return Some(f64::from(same_label(&question.answer, &question.gold)));
    }
    Some(f64::from(emotions(&question.answer) == gold))
}

/// Returns the indices of the emotions that a text names. Returns none for a text with a negation.
pub(crate) fn emotions(text: &str) -> BTreeSet<usize> {
    let text = normalised(text);
    let words = || text.split(|c: char| !c.is_alphanumeric() && c != '\'');
    if words().any(|word| NEGATIONS.contains(&word) || word.ends_with("n't")) {
        return BTreeSet::new();
    }
    words().filter_map(|word| EMOTIONS.iter().position(|spellings| spellings.contains(&word))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RewardOptions;
    use crate::testing::Row;

    #[test]
    fn synonyms_sentences_and_negation() {
        for (answer, gold, expected) in [
            ("fearful", "fear", 1.0),
            ("Surprised.", "surprise", 1.0),
            ("contemptuous", "Contempt", 1.0),
            ("anxious", "anxiety", 1.0),
            ("The person looks angry", "anger", 1.0),
            ("angry and sad", "angry", 0.0),
            ("sadness, anxiety", "anxious/sad", 1.0),
            ("not happy", "happy", 0.0),
            ("isn't happy", "happy", 0.0),
            ("unhappy", "happy", 0.0),
            ("", "neutral", 0.0),
            ("bored", "Bored", 1.0),
        ] {
            let completion = format!("<think>happy? sad?</think><answer>{answer}</answer>");
            let row = Row::new("", &completion, &format!("<answer>{gold}</answer>"));
            assert_eq!(row.score("emotion", &RewardOptions::default()), Some(expected), "{answer} / {gold}");
        }
    }

    #[test]
    fn no_word_means_two_emotions() {
        let all: Vec<&str> = EMOTIONS.iter().flat_map(|words| words.iter().copied()).collect();
        let distinct: BTreeSet<&str> = all.iter().copied().collect();
        assert_eq!(all.len(), distinct.len());
    }
}
