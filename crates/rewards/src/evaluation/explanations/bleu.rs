//! BLEU-1 to BLEU-4 of a corpus: clipped n-gram precision over all items, geometric mean over n, and a brevity penalty relative
//! to the reference with the closest length.
//!
//! Source: Papineni et al. 2002, in the form of pycocoevalcap 1.2, which adds small constants so that an empty count does not
//! give 0/0. Difference: a single item is also compared with its closest reference, not with the average length of the
//! references.

use std::collections::HashMap;

const MAX_N: usize = 4;

/// Returns BLEU-1 to BLEU-4, each in 0..1, of predictions and their references. All texts are split into words.
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
