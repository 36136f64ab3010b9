//! `repetition` and `repetition_tokens`: the negative share of n-grams that repeat an earlier one. Range [-1, 0].
//!
//! Sources: `repetition`, VLM-R1: 6-grams of lower-case words, or of boxes if the completion has a JSON list of them.
//! `repetition_tokens`, TRL: 3-grams of token ids. Deliberate difference: invalid JSON is not repaired, and its words count.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use crate::boxes;
use crate::contract::PerRow;
use crate::length::num_tokens;
use crate::{Reward, RewardError, RewardInput, RewardOptions};

const TOKEN_NGRAM: usize = 3;

pub(crate) fn words(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let ngram = options.repetition_ngram;
    if ngram == 0 {
        return Err(RewardError::Setting {
            reward: "repetition".to_owned(),
            what: "the n-gram size is 0; expected at least 1".to_owned(),
        });
    }
    let score = move |input: &RewardInput<'_>| Ok(Some(in_text(input.completion, ngram)));
    Ok(Box::new(PerRow { name: "repetition", range: (-1.0, 0.0), score }))
}

pub(crate) fn tokens(_: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let score = |input: &RewardInput<'_>| {
        num_tokens(input)?;
        Ok(Some(repeated(input.completion_ids, TOKEN_NGRAM)))
    };
    Ok(Box::new(PerRow { name: "repetition_tokens", range: (-1.0, 0.0), score }))
}

fn in_text(text: &str, ngram: usize) -> f64 {
    let answer = crate::tags::content(text, "answer", crate::AnswerPolicy::Last).unwrap_or(text);
    if let Some(boxes) = boxes::detections_in_prose(answer) {
        let boxes: Vec<String> = boxes.iter().map(|b| format!("{:?} {}", b.corners, b.label)).collect();
        return repeated(&boxes, 1);
    }
    // Numbers replace words, so that hashing an n-gram takes a few bytes.
    let text = text.to_lowercase();
    let mut numbers = HashMap::new();
    let words = text.split_whitespace().map(|word| {
        let next = numbers.len();
        *numbers.entry(word).or_insert(next)
    });
    repeated(&words.collect::<Vec<_>>(), ngram)
}

fn repeated<T: Hash + Eq>(items: &[T], ngram: usize) -> f64 {
    let total = (items.len() + 1).saturating_sub(ngram);
    if total == 0 {
        return 0.0;
    }
    let distinct = items.windows(ngram).collect::<HashSet<_>>().len();
    distinct as f64 / total as f64 - 1.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::Row;

    #[test]
    fn golden_words() {
        let score =
            |text: &str| Row::new("", text, "").score("repetition", &RewardOptions::default()).unwrap();
        assert!((score("a b c d e f a b c d e f") + 0.142_857_142_857).abs() < 1e-9);
        assert!((score(&"the cat sat on the mat ".repeat(4)) + 0.684_210_526_316).abs() < 1e-9);
        assert_eq!(score("a b c"), 0.0);
        assert_eq!(score(""), 0.0);
    }

    #[test]
    fn golden_boxes() {
        let cat = json!({"bbox_2d": [0, 0, 1, 1], "label": "cat"});
        let dog = json!({"bbox_2d": [0, 0, 1, 1], "label": "dog"});
        let text = format!("<answer>```json\n{}\n```</answer>", json!([cat, cat, dog, cat]));
        assert_eq!(in_text(&text, 6), -0.5);
        // The list is in prose, after other brackets.
        let text = format!("I see [four] of them: {} in all [{{}}].", json!([cat, cat, dog, cat]));
        assert_eq!(in_text(&text, 6), -0.5);
        assert_eq!(in_text("boxes [{\"label\": \"cat\"}, {\"label\": \"cat\"}] a b", 1), 0.0);
    }

    #[test]
    fn golden_tokens() {
        // TRL's documentation uses 2-grams: [5,5,5,5,5] gives -0.75.
        assert_eq!(repeated(&[5, 5, 5, 5, 5], 2), -0.75);
        assert_eq!(repeated(&[1, 2, 3, 4], 2), 0.0);
        let row = Row::new("", "x", "").tokens(6);
        assert_eq!(row.score("repetition_tokens", &RewardOptions::default()), Some(-0.75));
    }
}
