//! BLEU-1 to BLEU-4 of a corpus: clipped n-gram precision over all items, geometric mean over n, brevity penalty against
//! the reference closest in length.
//!
//! Source: Papineni et al. 2002, in the form of pycocoevalcap 1.2, whose small constants keep an empty count from ending
//! in 0/0. Difference: a single item is compared with its closest reference too, not with the average of their lengths.

use std::collections::HashMap;

const MAX_N: usize = 4;

/// BLEU-1..4 in 0..1 of predictions with their references, all as words.
pub(super) fn corpus(items: &[(Vec<&str>, Vec<Vec<&str>>)]) -> [f64; MAX_N] {
    let (mut correct, mut guessed) = ([0usize; MAX_N], [0usize; MAX_N]);
    let (mut said, mut wanted) = (0usize, 0usize);
    for (prediction, references) in items {
        said += prediction.len();
        let distance = |reference: &&Vec<&str>| (reference.len().abs_diff(prediction.len()), reference.len());
        wanted += references.iter().min_by_key(distance).map_or(0, Vec::len);
        for n in 1..=MAX_N {
            guessed[n - 1] += (prediction.len() + 1).saturating_sub(n);
            let mut most: HashMap<&[&str], usize> = HashMap::new();
            for reference in references {
                for (gram, count) in counts(reference, n) {
                    let entry = most.entry(gram).or_default();
                    *entry = count.max(*entry);
                }
            }
            let clipped = |(gram, count): (&[&str], usize)| count.min(most.get(gram).copied().unwrap_or(0));
            correct[n - 1] += counts(prediction, n).into_iter().map(clipped).sum::<usize>();
        }
    }
    let ratio = (said as f64 + 1e-15) / (wanted as f64 + 1e-9);
    let brevity = if ratio < 1.0 { (1.0 - 1.0 / ratio).exp() } else { 1.0 };
    let mut product = 1.0;
    std::array::from_fn(|k| {
        product *= (correct[k] as f64 + 1e-15) / (guessed[k] as f64 + 1e-9);
        f64::powf(product, 1.0 / (k + 1) as f64) * brevity
    })
}

fn counts<'a, 'w>(words: &'a [&'w str], n: usize) -> HashMap<&'a [&'w str], usize> {
    let mut counts = HashMap::new();
    for gram in words.windows(n) {
        *counts.entry(gram).or_default() += 1;
    }
    counts
}
