//! `cider`: consensus of an explanation with its references. The value is CIDEr-D divided by 10, clamped to [0, 1].
//!
//! Source: CIDEr (arXiv 1411.5726), in the form of pycocoevalcap, which the ViVQA-X project calls. For each n from 1 to 4, words
//! have tf·idf weights. The candidate's weights are limited to those of the reference, a difference in length damps the cosine (σ
//! = 6), and the mean over n and references is multiplied by 10. Deliberate differences: document frequencies come from the
//! training references and are counted once, not within the scored batch (where a batch of one prompt makes every score 0). All
//! references of a row count. Words are normalised (NFC, lower case, no punctuation at their edges).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::answer::normalised;
use crate::contract::PerRow;
use crate::tags::content;
use crate::{AnswerPolicy, Reward, RewardError, RewardInput, RewardOptions};

const MAX_N: usize = 4;
const SIGMA: f64 = 6.0;
/// Columns with all references of a row. The first that is present wins.
const REFERENCE_COLUMNS: [&str; 2] = ["explanations", "explanation"];

/// Number of training items whose references contain each n-gram. Counted once and stored with the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct DocumentFrequencies {
    num_items: u64,
    counts: HashMap<String, u64>,
}

/// The entries are sorted, so that the same references always give the same file.
#[derive(Serialize, Deserialize)]
struct Stored {
    num_items: u64,
    counts: BTreeMap<String, u64>,
}

impl From<Stored> for DocumentFrequencies {
    fn from(stored: Stored) -> Self {
        Self { num_items: stored.num_items, counts: stored.counts.into_iter().collect() }
    }
}

impl From<DocumentFrequencies> for Stored {
    fn from(frequencies: DocumentFrequencies) -> Self {
        Self { num_items: frequencies.num_items, counts: frequencies.counts.into_iter().collect() }
    }
}

impl DocumentFrequencies {
    /// Counts one training item with all its references.
    pub fn add_item<S: AsRef<str>>(&mut self, references: &[S]) {
        let texts: Vec<String> = references.iter().map(|text| normalised(text.as_ref())).collect();
        self.add_words(&texts.iter().map(|text| words(text)).collect::<Vec<_>>());
    }

    /// Counts like [`Self::add_item`], for references that are already split into words.
    pub(crate) fn add_words(&mut self, references: &[Vec<&str>]) {
        let mut seen = HashSet::new();
        for words in references {
            for n in 1..=MAX_N {
                seen.extend(words.windows(n).map(|gram| gram.join(" ")));
            }
        }
        for gram in seen {
            *self.counts.entry(gram).or_default() += 1;
        }
        self.num_items += 1;
    }

    /// Returns the number of counted items.
    pub fn num_items(&self) -> u64 {
        self.num_items
    }

    /// Returns the CIDEr-D of a candidate, 0 to 10. Without references, returns 0.
    pub fn score<S: AsRef<str>>(&self, candidate: &str, references: &[S]) -> f64 {
        let candidate = normalised(candidate);
        let texts: Vec<String> = references.iter().map(|text| normalised(text.as_ref())).collect();
        self.score_words(&words(&candidate), &texts.iter().map(|text| words(text)).collect::<Vec<_>>())
    }

    /// Scores like [`Self::score`], for texts that are already split into words.
    pub(crate) fn score_words(&self, candidate: &[&str], references: &[Vec<&str>]) -> f64 {
        if references.is_empty() {
            return 0.0;
        }
        let candidate = self.vectors(candidate);
        let sum: f64 = references.iter().map(|words| similarity(&candidate, &self.vectors(words))).sum();
        10.0 * sum / references.len() as f64
    }

    fn vectors(&self, words: &[&str]) -> Vectors {
        let log_items = (self.num_items.max(1) as f64).ln();
        let weights: [HashMap<String, f64>; MAX_N] = std::array::from_fn(|index| {
            let mut weights: HashMap<String, f64> = HashMap::new();
            for gram in words.windows(index + 1) {
                *weights.entry(gram.join(" ")).or_default() += 1.0;
            }
            for (gram, weight) in &mut weights {
                let documents = self.counts.get(gram).copied().unwrap_or(0).max(1);
                *weight *= log_items - (documents as f64).ln();
            }
            weights
        });
        let norms = std::array::from_fn(|n| weights[n].values().map(|w| w * w).sum::<f64>().sqrt());
        Vectors { weights, norms, num_bigrams: words.len().saturating_sub(1) }
    }
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

struct Vectors {
    weights: [HashMap<String, f64>; MAX_N],
    norms: [f64; MAX_N],
    /// Length that pycocoevalcap compares.
    num_bigrams: usize,
}

fn similarity(candidate: &Vectors, reference: &Vectors) -> f64 {
    let difference = candidate.num_bigrams as f64 - reference.num_bigrams as f64;
    let damping = (-(difference * difference) / (2.0 * SIGMA * SIGMA)).exp();
    let mut sum = 0.0;
    for n in 0..MAX_N {
        let mut shared: Vec<f64> = candidate.weights[n]
            .iter()
            .filter_map(|(gram, &weight)| {
                let other = *reference.weights[n].get(gram)?;
                Some(weight.min(other) * other)
            })
            .collect();
        // The order of a hash map is arbitrary, and the sum must not depend on it.
        shared.sort_by(f64::total_cmp);
        let norms = candidate.norms[n] * reference.norms[n];
        if norms > 0.0 {
            sum += shared.iter().sum::<f64>() / norms * damping;
        }
    }
    sum / MAX_N as f64
}

pub(crate) fn reward(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let frequencies = options.cider.clone().filter(|frequencies| frequencies.num_items() >= 2);
    let Some(frequencies) = frequencies else {
        return Err(RewardError::Setting {
            reward: "cider".to_owned(),
            what: "it needs document frequencies of at least 2 training items with references \
                   (column `explanations`, or an <explain> tag in the solution)"
                .to_owned(),
        });
    };
    let score = move |input: &RewardInput<'_>| Ok(scored(&frequencies, input));
    Ok(Box::new(PerRow { name: "cider", range: (0.0, 1.0), score }))
}

fn scored(frequencies: &Arc<DocumentFrequencies>, input: &RewardInput<'_>) -> Option<f64> {
    let references = references(input.columns, input.solution);
    if references.is_empty() {
        return None;
    }
    Some((frequencies.score(explanation(input.completion), &references) / 10.0).clamp(0.0, 1.0))
}

/// Returns the text of a completion's first `<explain>` tag, or an empty text.
pub fn explanation(completion: &str) -> &str {
    content(completion, "explain", AnswerPolicy::First).unwrap_or_default()
}

/// Returns the references of a row: the column `explanations` or `explanation`, which is a text or a list of texts, or otherwise
/// the solution's `<explain>` tag.
pub fn references<'a>(
    columns: &'a serde_json::Map<String, Value>,
    solution: Option<&'a str>,
) -> Vec<&'a str> {
    let column =
        REFERENCE_COLUMNS.iter().find_map(|name| columns.get(*name)).filter(|value| !value.is_null());
    match column {
        Some(Value::Array(texts)) => texts.iter().filter_map(Value::as_str).collect(),
        Some(Value::String(text)) => vec![text],
        _ => solution.and_then(|text| content(text, "explain", AnswerPolicy::First)).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::Row;

    const SHOWER: &str = "nó có một đầu vòi sen treo bên trong";
    const SMILE: &str = "cô ấy đang mỉm cười với máy ảnh";

    fn counted(items: &[&[&str]]) -> DocumentFrequencies {
        let mut frequencies = DocumentFrequencies::default();
        for item in items {
            frequencies.add_item(item);
        }
        frequencies
    }

    #[test]
    fn golden_call_local() {
        // Values of pycocoevalcap for two prompts with two samples each.
        let frequencies = counted(&[&[SHOWER], &[SHOWER], &[SMILE], &[SMILE]]);
        for (candidate, reference, expected) in [
            (SHOWER, SHOWER, 10.0),
            ("có vòi sen", SHOWER, 1.115_203_89),
            (SMILE, SMILE, 10.0),
            ("cô ấy cười", SMILE, 1.380_443_22),
        ] {
            let got = frequencies.score(candidate, &[reference]);
            assert!((got - expected).abs() < 5e-9, "{candidate}: {got}");
        }
        // With one prompt per call, the source's score is 0 for every prediction.
        let one = counted(&[&[SHOWER], &[SHOWER], &[SHOWER]]);
        assert_eq!(one.score(SHOWER, &[SHOWER]), 0.0);
        assert_eq!(counted(&[&[SHOWER]]).score(SHOWER, &[SHOWER]), 0.0);
    }

    #[derive(Deserialize)]
    struct Golden {
        items: Vec<Vec<String>>,
        candidates: Vec<String>,
        scores: Vec<f64>,
    }

    /// Values of pycocoevalcap 1.2 with several references per item, from `tests/data/cider_goldens.py`.
    #[test]
    fn golden_several_references() {
        let golden: Golden = serde_json::from_str(include_str!("../tests/data/cider_goldens.json")).unwrap();
        let mut frequencies = DocumentFrequencies::default();
        for item in &golden.items {
            frequencies.add_item(item);
        }
        for ((candidate, references), expected) in
            golden.candidates.iter().zip(&golden.items).zip(&golden.scores)
        {
            let got = frequencies.score(candidate, references);
            assert!((got - expected).abs() < 1e-9, "{candidate}: {got} {expected}");
        }
    }

    #[test]
    fn reward_uses_the_corpus_and_all_references() {
        let frequencies = Arc::new(counted(&[&[SHOWER, "bên trong có vòi sen"], &[SMILE], &["một con mèo"]]));
        let options = RewardOptions { cider: Some(frequencies), ..RewardOptions::default() };
        let completion = format!("<answer>có</answer><explain>{SHOWER}.</explain>");
        let one = Row::new("", &completion, &format!("<explain>{SHOWER}</explain>"));
        assert!((one.score("cider", &options).unwrap() - 1.0).abs() < 1e-12);
        let both = Row::new("", &completion, "").column("explanations", json!([SHOWER, SMILE]));
        assert!((both.score("cider", &options).unwrap() - 0.5).abs() < 1e-12);
        assert_eq!(Row::new("", "no tag", "<explain>x</explain>").score("cider", &options), Some(0.0));
        assert_eq!(Row::new("", &completion, "có").score("cider", &options), None);
        let error = one.try_score("cider", &RewardOptions::default()).unwrap_err().to_string();
        assert!(error.contains("document frequencies"), "{error}");
    }

    #[test]
    fn round_trip() {
        let frequencies = counted(&[&["a b c"], &["b c d"]]);
        let text = serde_json::to_string(&frequencies).unwrap();
        assert_eq!(serde_json::from_str::<DocumentFrequencies>(&text).unwrap(), frequencies);
        assert_eq!(text, serde_json::to_string(&counted(&[&["a b c"], &["b c d"]])).unwrap());
    }
}
