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
}
