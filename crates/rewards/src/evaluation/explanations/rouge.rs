//! ROUGE-L of one prediction: F-measure of the longest common subsequence, from the best precision and the best recall over the
//! references.
//!
//! Source: Lin 2004, in the form of pycocoevalcap 1.2 (β = 1.2; precision and recall may come from different references).

const BETA: f64 = 1.2;

/// Returns ROUGE-L in 0..1.
pub(super) fn score(prediction: &[&str], references: &[Vec<&str>]) -> f64 {
    let (mut precision, mut recall) = (0.0f64, 0.0f64);
    for reference in references.iter().filter(|reference| !reference.is_empty() && !prediction.is_empty()) {
        let common = longest_common(prediction, reference) as f64;
        precision = precision.max(common / prediction.len() as f64);
        recall = recall.max(common / reference.len() as f64);
    }
    if precision == 0.0 {
        return 0.0;
    }
    (1.0 + BETA * BETA) * precision * recall / (recall + BETA * BETA * precision)
}

fn longest_common(a: &[&str], b: &[&str]) -> usize {
    let mut row = vec![0; b.len() + 1];
    for word in a {
        let mut diagonal = 0;
        for (j, other) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = if word == other { diagonal + 1 } else { above.max(row[j]) };
            diagonal = above;
        }
    }
    row[b.len()]
}
