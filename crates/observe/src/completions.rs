//! Excerpt of a group for a person to read: its best and its worst completion, one line each.

use crate::Rollout;
use crate::text::{escape_line, fit};

/// Formats the row, its question and its solution, then the completions with the highest and the lowest reward. If all rewards are
/// equal, it shows only one completion. Text from rows and models is escaped, and lines are cut to `width` columns.
pub fn best_and_worst(question: &str, group: &[Rollout], width: usize) -> Vec<String> {
    let mut sorted: Vec<&Rollout> = group.iter().collect();
    // Among equal rewards, the first completion is chosen at both ends.
    let reward = |rollout: &Rollout| rollout.reward.unwrap_or(f64::NEG_INFINITY);
    sorted.sort_by(|a, b| reward(b).total_cmp(&reward(a)));
    let Some(best) = sorted.first().copied() else { return Vec::new() };
    let worst = sorted.iter().find(|rollout| reward(rollout) == reward(sorted[sorted.len() - 1]));
    let mut lines = vec![
        format!("row {}: {}", escape_line(&best.id), escape_line(question.trim())),
        format!(
            "  truth {}",
            best.solution.as_ref().map_or("none".into(), |value| {
                escape_line(value.as_str().unwrap_or(&value.to_string())).into_owned()
            })
        ),
    ];
    match worst {
        Some(worst) if reward(worst) < reward(best) => {
            lines.extend([shown("best ", best), shown("worst", worst)]);
        }
        _ => lines.push(shown(if group.len() == 1 { "only " } else { "equal" }, best)),
    }
    lines.iter().map(|line| fit(line, width).into_owned()).collect()
}

fn shown(label: &str, rollout: &Rollout) -> String {
    let rewards: Vec<String> = rollout
        .rewards
        .iter()
        .map(|(name, value)| format!("{name} {}", value.map_or("none".to_owned(), |v| format!("{v:.2}"))))
        .collect();
    let text = escape_line(&rollout.completion);
    format!("  {label} {:+.2} ({}) {text}", rollout.advantage, rewards.join(", "))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::FinishReason;

    fn rollout(sample: usize, reward: Option<f64>, completion: &str) -> Rollout {
        Rollout {
            epoch: 0.0,
            id: "a\u{1b}[2J".to_owned(),
            group: 0,
            sample,
            prompt: "rendered".to_owned(),
            completion: completion.to_owned(),
            solution: Some("<answer>B</answer>".into()),
            rewards: BTreeMap::from([("accuracy".to_owned(), reward), ("format".to_owned(), Some(0.5))]),
            reward,
            advantage: reward.map_or(0.0, |reward| 2.0 * reward - 1.0),
            length: 3,
            finish_reason: FinishReason::Stop,
            media: Vec::new(),
            frame_times_secs: Vec::new(),
            turns: Vec::new(),
            columns: BTreeMap::new(),
            row: None,
        }
    }

    #[test]
    fn the_best_and_the_worst_are_shown_cut_and_escaped() {
        let group = [
            rollout(0, Some(0.5), "middle"),
            rollout(1, None, "none"),
            rollout(2, Some(1.0), "<think>\nx\u{e}\r</think> 図図図図図図図図図図図図図図図図図図図図"),
            rollout(3, Some(1.0), "as good, later"),
        ];
        let lines = best_and_worst("What\nis it? ", &group, 60);
        assert_eq!(
            lines,
            [
                "row a\\u{1b}[2J: What\\nis it?",
                "  truth <answer>B</answer>",
                "  best  +1.00 (accuracy 1.00, format 0.50) <think>\\nx\\u{e}\\…",
                "  worst +0.00 (accuracy none, format 0.50) none",
            ]
        );
        let wide = best_and_worst("?", &group, 80);
        // Each of these characters is two columns wide.
        assert!(wide[2].ends_with("</think> 図図図図図…"), "{wide:?}");
    }

    #[test]
    fn equal_completions_are_shown_once() {
        let group = [rollout(0, Some(1.0), "same"), rollout(1, Some(1.0), "same")];
        let lines = best_and_worst("?", &group, 80);
        assert_eq!(lines[2..], ["  equal +1.00 (accuracy 1.00, format 0.50) same"]);
        assert_eq!(
            best_and_worst("?", &group[..1], 80)[2..],
            ["  only  +1.00 (accuracy 1.00, format 0.50) same"]
        );
        assert!(best_and_worst("?", &[], 80).is_empty());
    }
}
