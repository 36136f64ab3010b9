//! `od_ap`, `od_ap50`, `odLength`: COCO average precision of a list of labelled boxes. Range [0, 1].
//!
//! Source: VLM-R1, which runs pycocotools on one image with score 1 for every box. Boxes with labels that are missing from the
//! ground truth are dropped. Deliberate differences: case is ignored in labels, and an answer that is not a list of boxes earns 0
//! even if the ground truth is empty (the source gives any text 1 in that case).

use crate::answer::Question;
use crate::boxes::{Detection, detections, iou};

/// Overlap thresholds at which a box counts as found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Thresholds {
    /// Average over 0.5, 0.55 … 0.95.
    Coco,
    /// Only 0.5.
    Half,
}

/// Maximum number of boxes per label, as in COCO. Further boxes are ignored.
const MAX_PER_LABEL: usize = 100;
const RECALL_POINTS: usize = 101;

/// Returns `None` if the ground truth is not a list of boxes.
pub(crate) fn average_precision(question: &Question<'_>, thresholds: Thresholds) -> Option<f64> {
    score(question, thresholds).map(|(score, _)| score)
}

/// Returns the COCO score, multiplied by (gold boxes / predicted boxes) if there are more predicted than gold boxes.
pub(crate) fn with_length(question: &Question<'_>) -> Option<f64> {
    score(question, Thresholds::Coco).map(|(score, length)| score * length)
}

/// Returns the average precision and the factor for surplus boxes.
fn score(question: &Question<'_>, thresholds: Thresholds) -> Option<(f64, f64)> {
    let gold = detections(&question.gold)?;
    let Some(predicted) = question.tagged.as_deref().and_then(detections) else { return Some((0.0, 1.0)) };
    let length = if predicted.len() > gold.len() { gold.len() as f64 / predicted.len() as f64 } else { 1.0 };
    let score = match (gold.is_empty(), predicted.is_empty()) {
        (true, true) => 1.0,
        (false, false) => mean_over_labels(&predicted, &gold, thresholds),
        _ => 0.0,
    };
    Some((score, length))
}

fn mean_over_labels(predicted: &[Detection], gold: &[Detection], thresholds: Thresholds) -> f64 {
    let mut labels: Vec<&str> = gold.iter().map(|detection| detection.label.as_str()).collect();
    labels.sort_unstable();
    labels.dedup();
    let steps = if thresholds == Thresholds::Coco { 10 } else { 1 };
    let mut sum = 0.0;
    for label in &labels {
        let gold: Vec<_> = gold.iter().filter(|detection| detection.label == *label).collect();
        let predicted: Vec<_> =
            predicted.iter().filter(|detection| detection.label == *label).take(MAX_PER_LABEL).collect();
        let overlaps: Vec<Vec<f64>> = predicted
            .iter()
            .map(|p| gold.iter().map(|g| iou(&p.corners, &g.corners, false)).collect())
            .collect();
        for step in 0..steps {
            sum += one_precision(&overlaps, gold.len(), 0.5 + 0.05 * f64::from(step));
        }
    }
    sum / (labels.len() as f64 * f64::from(steps))
}

/// Returns the precision averaged over 101 recalls, for one label and one threshold. The overlaps are
/// `overlaps[prediction][gold]`.
fn one_precision(overlaps: &[Vec<f64>], num_gold: usize, threshold: f64) -> f64 {
    let mut taken = vec![false; num_gold];
    let mut hits = 0usize;
    // Recall and precision after each prediction, in the given order (all scores are equal).
    let mut curve: Vec<(f64, f64)> = Vec::with_capacity(overlaps.len());
    for (index, row) in overlaps.iter().enumerate() {
        // Finds the largest overlap among unmatched boxes. The last of equal ones wins, as in pycocotools.
        let (mut best, mut found) = (threshold.min(1.0 - 1e-10), None);
        for (gold, &overlap) in row.iter().enumerate() {
            if !taken[gold] && overlap >= best {
                (best, found) = (overlap, Some(gold));
            }
        }
        if let Some(gold) = found {
            taken[gold] = true;
            hits += 1;
        }
        curve.push((hits as f64 / num_gold as f64, hits as f64 / (index + 1) as f64));
    }
    for index in (1..curve.len()).rev() {
        curve[index - 1].1 = curve[index - 1].1.max(curve[index].1);
    }
    let mut at = 0;
    let mut sum = 0.0;
    for point in 0..RECALL_POINTS {
        // This is numpy's `linspace(0, 1, 101)`: a multiple of 0.01, which is not always the nearest hundredth.
        let recall = if point + 1 == RECALL_POINTS { 1.0 } else { point as f64 * 0.01 };
        while curve.get(at).is_some_and(|(reached, _)| *reached < recall) {
            at += 1;
        }
        sum += curve.get(at).map_or(0.0, |(_, precision)| *precision);
    }
    sum / RECALL_POINTS as f64
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::RewardOptions;
    use crate::testing::Row;

    fn fence(boxes: &Value) -> String {
        format!("<answer>```json\n{boxes}\n```</answer>")
    }

    /// Values of pycocotools 2.0.11, from `tests/data/coco_goldens.py`.
    #[test]
    fn golden_average_precision() {
        let cases: Vec<Value> =
            serde_json::from_str(include_str!("../tests/data/coco_goldens.json")).unwrap();
        assert!(cases.len() >= 40);
        for case in &cases {
            let row = Row::new("", &fence(&case["predicted"]), &fence(&case["gold"]));
            for name in ["od_ap", "od_ap50", "odLength"] {
                let got = row.score(name, &RewardOptions::default()).unwrap();
                let expected = case[name].as_f64().unwrap();
                assert!((got - expected).abs() < 1e-9, "{name}: {got} for {case}");
            }
        }
    }

    #[test]
    fn empty_lists_and_answers_that_are_no_list() {
        let score = |completion: &str, gold: &str| {
            Row::new("", completion, gold).score("od_ap", &RewardOptions::default())
        };
        let cat = fence(&json!([{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]));
        assert_eq!(score("<answer>None</answer>", "<answer>None</answer>"), Some(1.0));
        assert_eq!(score(&fence(&json!([])), "None"), Some(1.0));
        assert_eq!(score("<answer>nothing here</answer>", "None"), Some(0.0));
        assert_eq!(score(&cat, "None"), Some(0.0));
        assert_eq!(score("<answer>None</answer>", &cat), Some(0.0));
        assert_eq!(score("no tag", &cat), Some(0.0));
        assert_eq!(score(&cat, "a cat"), None);
        assert_eq!(score(&cat.replace("cat", "CAT"), &cat), Some(1.0));
    }
}
