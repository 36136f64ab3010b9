//! `weighted_sum`: 0.7 × position + 0.3 × completeness of greedily matched boxes. Range [0, 1].
//!
//! Source: VLM-R1's detection score (its label weight is 0). Boxes are matched in order of decreasing overlap, down to 0.5. A
//! match with the wrong label counts as found, with overlap 0. Position is the sum of overlaps divided by the number of gold
//! boxes. Completeness is 1 minus half of the missed share and half of the surplus share.

use crate::answer::Question;
use crate::boxes::{Detection, detections, iou};

const MIN_OVERLAP: f64 = 0.5;
const POSITION: f64 = 0.7;
const COMPLETENESS: f64 = 0.3;

/// Returns `None` if the ground truth is not a list of boxes.
pub(crate) fn score(question: &Question<'_>, pixel_convention: bool) -> Option<f64> {
    let gold = detections(&question.gold)?;
    let predicted = detections(&question.answer);
    Some(match (gold.as_slice(), predicted.as_deref()) {
        ([], Some([])) => 1.0,
        (_, None | Some([])) | ([], _) => 0.0,
        (gold, Some(predicted)) => matched(predicted, gold, pixel_convention),
    })
}

fn matched(predicted: &[Detection], gold: &[Detection], pixel_convention: bool) -> f64 {
    let mut pairs: Vec<(f64, usize, usize)> = Vec::new();
    for (p, prediction) in predicted.iter().enumerate() {
        for (g, gold) in gold.iter().enumerate() {
            let overlap = iou(&prediction.corners, &gold.corners, pixel_convention);
            if overlap >= MIN_OVERLAP {
                pairs.push((overlap, p, g));
            }
        }
    }
    // The sort is stable, so the first of equal overlaps is taken.
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (mut used, mut found) = (vec![false; predicted.len()], vec![false; gold.len()]);
    let (mut position, mut matches) = (0.0, 0usize);
    for (overlap, p, g) in pairs {
        if used[p] || found[g] {
            continue;
        }
        (used[p], found[g]) = (true, true);
        matches += 1;
        if predicted[p].label == gold[g].label {
            position += overlap;
        }
    }
    let missed = (gold.len() - matches) as f64 / gold.len() as f64;
    let surplus = (predicted.len() - matches) as f64 / predicted.len() as f64;
    let completeness = 1.0 - (missed + surplus) / 2.0;
    POSITION * position / gold.len() as f64 + COMPLETENESS * completeness
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::RewardOptions;
    use crate::testing::Row;

    #[test]
    fn golden() {
        let entry = |corners: [i32; 4], label: &str| json!({"bbox_2d": corners, "label": label});
        let cat = entry([0, 0, 10, 10], "cat");
        let far = entry([50, 50, 60, 60], "cat");
        let half = entry([0, 0, 10, 5], "Cat");
        let gold = json!([cat]);
        for (predicted, gold, expected) in [
            (json!([cat]), &gold, 1.0),
            (json!([entry([0, 0, 10, 10], "dog")]), &gold, 0.3),
            (json!([cat, far]), &gold, 0.925),
            (json!([entry([0, 0, 10, 4], "cat")]), &gold, 0.0),
            (json!([half]), &gold, 0.7 * 0.5 + 0.3),
            (json!([cat]), &json!([cat, far]), 0.7 * 0.5 + 0.3 * 0.75),
            (json!([]), &gold, 0.0),
            (json!([]), &json!([]), 1.0),
            (json!([cat]), &json!([]), 0.0),
        ] {
            let fence = |boxes: &Value| format!("<answer>\n```json\n{boxes}\n```\n</answer>");
            let row = Row::new("", &fence(&predicted), &fence(gold));
            let got = row.score("weighted_sum", &RewardOptions::default()).unwrap();
            assert!((got - expected).abs() < 1e-12, "{predicted}: {got}");
        }
    }
}
