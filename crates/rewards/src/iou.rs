//! `iou`: overlap of the first box in the answer with the box of the ground truth. Range [0, 1].
//!
//! Source: VLM-R1's reward for referring expressions. Deliberate differences: areas are continuous (`Compat::VlmR1Iou` restores
//! the pixel convention), decimals are read, and degenerate boxes give 0. Boxes are not converted: if a model answers in another
//! coordinate system, the ground truth must use that system.

use crate::answer::Question;
use crate::boxes;

/// Returns `None` if the ground truth has no box.
pub(crate) fn score(question: &Question<'_>, pixel_convention: bool) -> Option<f64> {
    let gold = boxes::first_box(&question.gold)?;
    let answer = question.tagged.as_deref().and_then(boxes::first_box);
    Some(answer.map_or(0.0, |answer| boxes::iou(&answer, &gold, pixel_convention)))
}

#[cfg(test)]
mod tests {
    use crate::RewardOptions;
    use crate::testing::Row;

    #[test]
    fn first_box_of_the_answer_counts() {
        let score = |text: &str, gold| Row::new("", text, gold).score("iou", &RewardOptions::default());
        let gold = "<answer>[0, 0, 10, 10]</answer>";
        assert_eq!(score("<answer>{\"bbox\": [0, 0, 10, 5]} [0,0,10,10]</answer>", gold), Some(0.5));
        assert_eq!(score("[0, 0, 10, 10]", gold), Some(0.0));
        assert_eq!(score("<answer>none</answer>", gold), Some(0.0));
        assert_eq!(score("<answer>[0, 0, 10, 10]</answer>", "no box"), None);
    }
}
