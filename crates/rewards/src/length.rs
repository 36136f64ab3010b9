//! `length` and `cosine`: short correct answers earn more, short wrong answers earn less. The reward follows half a cosine over
//! the tokens of the completion. An answer is correct if `accuracy` gives at least 0.7 of its full score.
//!
//! Sources: `length`, VLM-R1: correct from 1 to 0.5, wrong from 0 to -0.5. `cosine`, TRL: correct from 1 to 0.5, wrong from -1 to
//! -0.5. Both follow "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373). Deliberate differences: VLM-R1 overwrites
//! the accuracy with 1, and its curve rises again beyond the limit. Here the accuracy counts, and the curve is constant beyond
//! the limit. `Compat::VlmR1Length` restores the source's form.

use std::f64::consts::PI;

use crate::accuracy::Scorer;
use crate::contract::PerRow;
use crate::error::MAX_COMPLETION_TOKENS;
use crate::{Compat, Reward, RewardError, RewardInput, RewardOptions};

/// Rewards at 0 tokens and at the limit.
#[derive(Debug, Clone, Copy)]
struct Ends {
    right: (f64, f64),
    wrong: (f64, f64),
}

pub(crate) fn length(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let ends = Ends { right: (1.0, 0.5), wrong: (0.0, -0.5) };
    make("length", ends, options, options.compat.contains(&Compat::VlmR1Length))
}

pub(crate) fn cosine(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    make("cosine", Ends { right: (1.0, 0.5), wrong: (-1.0, -0.5) }, options, false)
}

fn make(
    name: &'static str,
    ends: Ends,
    options: &RewardOptions,
    literal: bool,
) -> Result<Box<dyn Reward>, RewardError> {
    let limit = options.max_completion_tokens;
    if limit == 0 {
        return Err(RewardError::Setting {
            reward: name.to_owned(),
            what: format!("{MAX_COMPLETION_TOKENS} is 0; it must be at least 1"),
        });
    }
    let accuracy = Scorer::new(options);
    let score = move |input: &RewardInput<'_>| {
        let right = if literal { Some(true) } else { accuracy.is_right(input)? };
        let Some(right) = right else { return Ok(None) };
        let share = num_tokens(input)? as f64 / limit as f64;
        let share = if literal { share } else { share.min(1.0) };
        Ok(Some(along(if right { ends.right } else { ends.wrong }, share)))
    };
    let low = ends.right.1.min(ends.wrong.0).min(ends.wrong.1);
    Ok(Box::new(PerRow { name, range: (low, ends.right.0), score }))
}

/// Returns the value between `start` (share 0) and `end` (share 1).
fn along((start, end): (f64, f64), share: f64) -> f64 {
    start + (end - start) * (1.0 - (share * PI).cos()) / 2.0
}

/// Returns the number of tokens of the completion, including the stop token.
pub(crate) fn num_tokens(input: &RewardInput<'_>) -> Result<usize, String> {
    if input.completion_ids.is_empty() && !input.completion.is_empty() {
        return Err(
            "the completion has a text and no token ids, so its length is unknown; give `completion_ids`, one per token"
                .to_owned()
        );
    }
    Ok(input.completion_ids.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Row;

    fn score(name: &str, answer: &str, num_tokens: usize, options: &RewardOptions) -> f64 {
        Row::new("", answer, "yes").tokens(num_tokens).score(name, options).unwrap()
    }

    #[test]
    fn golden_length() {
        let options = RewardOptions { max_completion_tokens: 1024, ..RewardOptions::default() };
        let literal = RewardOptions { compat: [Compat::VlmR1Length].into(), ..options.clone() };
        for (num_tokens, source, right, wrong) in [
            (0, 1.0, 1.0, 0.0),
            (256, 0.926_776_695, 0.926_776_695, -0.073_223_305),
            (512, 0.75, 0.75, -0.25),
            (1024, 0.5, 0.5, -0.5),
            (2048, 1.0, 0.5, -0.5),
        ] {
            let (yes, no) = if num_tokens == 0 { ("", "") } else { ("yes", "no") };
            assert!((score("length", yes, num_tokens, &literal) - source).abs() < 1e-9, "{num_tokens}");
            if num_tokens > 0 {
                assert!((score("length", yes, num_tokens, &options) - right).abs() < 1e-9, "{num_tokens}");
            }
            assert!((score("length", no, num_tokens, &options) - wrong).abs() < 1e-9, "{num_tokens}");
        }
    }

    #[test]
    fn golden_cosine() {
        // Example from TRL's documentation: 50 of 100 tokens.
        let options = RewardOptions { max_completion_tokens: 100, ..RewardOptions::default() };
        assert!((score("cosine", "yes", 50, &options) - 0.75).abs() < 1e-12);
        assert!((score("cosine", "no", 50, &options) + 0.75).abs() < 1e-12);
        // Value of `_CosineScaledReward` in TRL 1.16, at 10 tokens.
        assert!((score("cosine", "yes", 10, &options) - 0.987_764_129_073_788_3).abs() < 1e-12);
        assert!((score("cosine", "no", 10, &options) + 0.987_764_129_073_788_3).abs() < 1e-12);
    }

    /// The rule of `accuracy`, in the run's mode, decides what is correct.
    #[test]
    fn the_mode_of_the_accuracy_decides() {
        let score = |accuracy_mode| {
            let options =
                RewardOptions { accuracy_mode, max_completion_tokens: 100, ..RewardOptions::default() };
            Row::new("", "sadness", "sad").tokens(1).score("length", &options).unwrap()
        };
        assert!(score(crate::AccuracyMode::Auto) < 0.0 && score(crate::AccuracyMode::Emotion) > 0.9);
    }

    #[test]
    fn text_without_ids_is_an_error() {
        let error = Row::new("", "yes", "yes").try_score("length", &RewardOptions::default()).unwrap_err();
        assert!(error.to_string().contains("completion_ids"), "{error}");
    }
}
