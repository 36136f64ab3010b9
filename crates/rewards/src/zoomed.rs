//! `zoomed`: 1 for a correct answer after a tool has shown a picture, else 0. An answer is correct if `accuracy` gives at least 0.7 of
//! its full score.
//!
//! Source: DeepEyes, `verl/utils/reward_score/vl_agent.py`, where it has the weight 1.2. Its judge says whether an answer is correct.

use omnigrpo_text::{MediumKind, Part, Role};

use crate::accuracy::Scorer;
use crate::contract::PerRow;
use crate::{Reward, RewardError, RewardInput, RewardOptions};

pub(crate) fn reward(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let accuracy = Scorer::new(options);
    let score = move |input: &RewardInput<'_>| {
        let right = accuracy.is_right(input)?;
        Ok(right.map(|right| f64::from(right && was_shown_a_picture(input))))
    };
    Ok(Box::new(PerRow { name: "zoomed", range: (0.0, 1.0), score }))
}

/// Returns true if an answer of the environment in the completion contains a picture.
fn was_shown_a_picture(input: &RewardInput<'_>) -> bool {
    let first = input.turns.len().saturating_sub(input.added_turns);
    let answers = input.turns[first..].iter().filter(|turn| turn.role != Role::Assistant);
    answers
        .flat_map(|turn| &turn.parts)
        .any(|part| matches!(part, Part::Medium { kind: MediumKind::Image, .. }))
}

#[cfg(test)]
mod tests {
    use omnigrpo_text::Turn;

    use super::*;
    use crate::build;
    use crate::testing::Row;

    #[test]
    fn only_a_correct_answer_after_a_picture_counts() {
        let picture = |role| Turn { role, parts: vec![Part::Medium { kind: MediumKind::Image, index: 0 }] };
        let said = || Turn::text(Role::Assistant, "call");
        let question = || picture(Role::User);
        let error = || Turn::text(Role::Tool, "{\"error\": \"the box is empty\"}");
        let rewards = build(&["zoomed"], &RewardOptions::default()).unwrap();
        for (turns, added_turns, answer, expected) in [
            (vec![question(), said(), picture(Role::Tool)], 2, "7", 1.0),
            (vec![question(), said(), error(), said(), picture(Role::User)], 4, "7", 1.0),
            (vec![question(), said(), picture(Role::Tool)], 2, "8", 0.0),
            (vec![question(), said(), error()], 2, "7", 0.0),
            (vec![question()], 0, "7", 0.0),
            // The picture belongs to the row.
            (vec![question(), said(), picture(Role::Tool)], 0, "7", 0.0),
        ] {
            let row = Row::new("", &format!("<answer>{answer}</answer>"), "<answer>7</answer>");
            let input = RewardInput { turns: &turns, added_turns, ..row.input() };
            let score = rewards.score(&[input]).unwrap().values[0][0];
            assert_eq!(score, Some(expected), "{turns:?} {answer}");
        }
    }
}
