//! T-GRPO: a bonus for correct answers that need the order of the frames.
//!
//! This is not a reward of the table, since it needs a second set of completions, sampled with shuffled frames. The trainer
//! samples them and adds the bonus to the rewards. Source: Video-R1, with its constants.

/// Share of the accuracy on shuffled frames that the accuracy on ordered frames must reach.
const SHUFFLED_SHARE: f64 = 0.8;
/// Accuracy above which a completion is correct.
const RIGHT_ABOVE: f64 = 0.1;
const ORDER_BONUS: f64 = 0.3;

/// Returns one bonus per completion sampled with ordered frames. Each completion with accuracy above 0.1 gets 0.3 if the mean
/// accuracy is at least 0.8 times that of the completions sampled with shuffled frames, otherwise 0. Without shuffled completions
/// there is no comparison and no bonus.
pub fn temporal_order_bonus(ordered_accuracy: &[f64], shuffled_accuracy: &[f64]) -> Vec<f64> {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let needs_order =
        !shuffled_accuracy.is_empty() && mean(ordered_accuracy) >= SHUFFLED_SHARE * mean(shuffled_accuracy);
    ordered_accuracy
        .iter()
        .map(|&accuracy| if needs_order && accuracy > RIGHT_ABOVE { ORDER_BONUS } else { 0.0 })
        .collect()
}

/// Returns one bonus per completion of a group, in Video-R1's control of lengths: 0.2 for each completion with accuracy above 0.1 and
/// 320 to 512 tokens, if at least two completions of the group have such an accuracy.
pub fn length_bonus(accuracy: &[f64], num_tokens: &[usize]) -> Vec<f64> {
    const BONUS: f64 = 0.2;
    let is_right = |accuracy: &f64| *accuracy > RIGHT_ABOVE;
    let several = accuracy.iter().filter(|&accuracy| is_right(accuracy)).count() > 1;
    let earns =
        |(accuracy, tokens): (&f64, &usize)| several && is_right(accuracy) && (320..=512).contains(tokens);
    accuracy.iter().zip(num_tokens).map(|pair| if earns(pair) { BONUS } else { 0.0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_bonus() {
        // Means 0.5 and 0.5: 0.5 ≥ 0.4.
        assert_eq!(temporal_order_bonus(&[1.0, 0.0, 1.0, 0.0], &[1.0, 0.0]), vec![0.3, 0.0, 0.3, 0.0]);
        // Means 0.25 and 1: the order does not help.
        assert_eq!(temporal_order_bonus(&[1.0, 0.0, 0.0, 0.0], &[1.0, 1.0]), vec![0.0; 4]);
        // Exactly 0.8 of it.
        assert_eq!(temporal_order_bonus(&[0.8, 0.8], &[1.0, 1.0]), vec![0.3, 0.3]);
        // No completion is correct on either side: the condition holds, but there is no completion to reward.
        assert_eq!(temporal_order_bonus(&[0.0, 0.1], &[0.0]), vec![0.0, 0.0]);
        assert_eq!(temporal_order_bonus(&[1.0], &[]), vec![0.0]);
    }

    /// The values are those of lines 633 to 655 of `grpo_trainer.py` of Video-R1.
    #[test]
    fn right_answers_of_middle_length_earn_the_bonus() {
        let lengths = [319, 320, 512, 513];
        assert_eq!(length_bonus(&[1.0; 4], &lengths), vec![0.0, 0.2, 0.2, 0.0]);
        assert_eq!(length_bonus(&[0.0, 0.11, 0.1, 1.0], &lengths), vec![0.0, 0.2, 0.0, 0.0]);
        // One right answer earns nothing.
        assert_eq!(length_bonus(&[0.0, 1.0, 0.1, 0.0], &lengths), vec![0.0; 4]);
        assert_eq!(length_bonus(&[], &[]), Vec::<f64>::new());
    }
}
