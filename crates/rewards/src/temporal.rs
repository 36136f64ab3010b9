//! T-GRPO: a bonus for right answers that need the order of the frames.
//!
//! Not a reward of the table, since it needs a second set of completions, sampled with shuffled frames: a
//! trainer takes them and adds what is returned here to the rewards. Source: Video-R1, with its
//! constants.

/// Ordered frames must reach this share of the accuracy on shuffled frames.
const SHUFFLED_SHARE: f64 = 0.8;
/// Accuracy above which a completion counts as right.
const RIGHT_ABOVE: f64 = 0.1;
const ORDER_BONUS: f64 = 0.3;

/// One bonus per completion sampled with the frames in order: 0.3 for each with accuracy above 0.1, if their mean
/// accuracy is at least 0.8 times that of the completions sampled with shuffled frames; else 0. Without shuffled
/// completions there is nothing to compare with, and no bonus.
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
        // Nobody right on either side: the comparison holds, and there is nobody to reward.
        assert_eq!(temporal_order_bonus(&[0.0, 0.1], &[0.0]), vec![0.0, 0.0]);
        assert_eq!(temporal_order_bonus(&[1.0], &[]), vec![0.0]);
    }
}
