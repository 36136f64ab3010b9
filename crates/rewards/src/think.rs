//! `think_format`: one block of thinking at the start of the completion. Range: 0 or 1.
//!
//! Source: `think_format_reward` of TRL, whose expression is `^<think>(?!.*<think>)(.*?)</think>.*$` over all lines: the text begins
//! with `<think>`, which occurs once, and `</think>` follows. What follows it is free.

use crate::contract::PerRow;
use crate::{Reward, RewardError, RewardOptions};

const OPEN: &str = "<think>";

pub(crate) fn reward(_: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let score = |input: &crate::RewardInput<'_>| Ok(Some(f64::from(has_block(input.completion))));
    Ok(Box::new(PerRow { name: "think_format", range: (0.0, 1.0), score }))
}

fn has_block(text: &str) -> bool {
    text.strip_prefix(OPEN).is_some_and(|rest| !rest.contains(OPEN) && rest.contains("</think>"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values are those of `re.match` with TRL's expression and flags.
    #[test]
    fn texts_score_as_in_trl() {
        for (text, expected) in [
            ("<think>a</think>b", true),
            ("<think>\na\n</think>\nb\nc", true),
            ("<think></think>", true),
            ("<think>a</think>b</think>", true),
            (" <think>a</think>b", false),
            ("a<think>a</think>b", false),
            ("<think>a<think>b</think>c", false),
            ("<think>a</think>b<think>", false),
            ("<think>a", false),
            ("</think>a", false),
            ("<Think>a</Think>", false),
            ("", false),
        ] {
            assert_eq!(has_block(text), expected, "{text:?}");
        }
    }
}
