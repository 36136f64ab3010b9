//! Scores of explanations against their references: BLEU-1 to BLEU-4, METEOR, ROUGE-L, CIDEr and BERTScore, in percent. They are
//! reported over all rows, over the rows with a correct answer, and scaled by the accuracy.
//!
//! Source: the evaluation of the ViVQA-X project, which calls pycocoevalcap. Texts are split at white space and truncated to 150
//! words. A leading "because" or "vì" and final full stops of the prediction are removed. CIDEr's document frequencies are those
//! of the scored references. Differences: METEOR has no synonyms and paraphrases (`meteor`). BERTScore is that of the reward
//! `bertscore`, and is missing, not 0, in runs without that reward.

mod bleu;
mod meteor;
mod rouge;

use crate::AnswerPolicy;
use crate::answer::{golds, marked};
use crate::cider::DocumentFrequencies;
use crate::latex::bare;
use crate::tags::content;

/// Maximum number of words of a text. Further words are ignored.
const MAX_WORDS: usize = 150;

/// Names of the measures, in the order of [`TextScores`].
pub const MEASURES: [&str; 8] =
    ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE_L", "CIDEr", "BERTScore_F1"];

/// One value in percent per measure of [`MEASURES`] (up to 1000 for CIDEr); `None` if it was not measured.
pub type TextScores = [Option<f64>; MEASURES.len()];

/// The explanation of a completion, and the references of its row.
#[derive(Debug, Clone, Copy)]
pub struct Explained<'a> {
    /// The completion.
    pub completion: &'a str,
    /// All references.
    pub references: &'a [String],
    /// Ground truth of the answer.
    pub solution: &'a str,
    /// BERTScore F1 with the best reference, 0..1, if measured.
    pub bert_score: Option<f64>,
}

/// The three views of the scores.
#[derive(Debug, Clone, PartialEq)]
pub struct ExplanationReport {
    /// Number of completions with references.
    pub num_explained: usize,
    /// Number of completions with the correct answer.
    pub num_right: usize,
    /// Scores over all completions.
    pub unfiltered: TextScores,
    /// Scores over completions with the correct answer; 0 if there are none.
    pub filtered: TextScores,
    /// `unfiltered` multiplied by the share of correct answers.
    pub scaled: TextScores,
}

impl ExplanationReport {
    /// Returns the views with their names.
    pub fn views(&self) -> [(&'static str, &TextScores); 3] {
        [("unfiltered", &self.unfiltered), ("filtered", &self.filtered), ("scaled", &self.scaled)]
    }
}

/// Scores explanations. Returns `None` if there are none.
pub fn explanations(items: &[Explained<'_>]) -> Option<ExplanationReport> {
    if items.is_empty() {
        return None;
    }
    let (mut all, mut right) = (Vec::new(), Vec::new());
    for item in items {
        let said = content(item.completion, "explain", AnswerPolicy::First).unwrap_or_default();
        let texts = Texts {
            prediction: cut(cleaned(said)),
            references: item.references.iter().map(|text| cut(text)).collect(),
            bert_score: item.bert_score,
        };
        if is_right(item) {
            right.push(texts.clone());
        }
        all.push(texts);
    }
    let unfiltered = scores(&all);
    let filtered = if right.is_empty() { unfiltered.map(|s| s.map(|_| 0.0)) } else { scores(&right) };
    let accuracy = right.len() as f64 / all.len() as f64;
    Some(ExplanationReport {
        num_explained: all.len(),
        num_right: right.len(),
        unfiltered,
        filtered,
        scaled: unfiltered.map(|score| score.map(|score| score * accuracy)),
    })
}

/// An explanation, prepared for comparison.
#[derive(Clone)]
struct Texts {
    prediction: String,
    references: Vec<String>,
    bert_score: Option<f64>,
}

/// Returns true if the answers are equal by the source's rule.
fn is_right(item: &Explained<'_>) -> bool {
    fn answer(text: &str) -> String {
        text.trim().to_lowercase().trim_end_matches('.').replace('"', "").trim().to_owned()
    }
    let gold = content(item.solution, "answer", AnswerPolicy::Last).unwrap_or(item.solution);
    let golds = golds(item.solution, AnswerPolicy::Last).unwrap_or_else(|| vec![bare(gold).into_owned()]);
    marked(item.completion, AnswerPolicy::Last)
        .is_some_and(|said| golds.iter().any(|gold| answer(&said) == answer(gold)))
}

/// Removes full stops at the end and a leading "because" or "vì".
fn cleaned(text: &str) -> &str {
    let text = text.trim().trim_end_matches('.').trim();
    for word in ["because", "vì"] {
        let from_here = text.char_indices().nth(word.chars().count()).map_or(text.len(), |(at, _)| at);
        if text[..from_here].to_lowercase() == word {
            return text[from_here..].trim();
        }
    }
    text
}

fn cut(text: &str) -> String {
    text.split_whitespace().take(MAX_WORDS).collect::<Vec<_>>().join(" ")
}

fn scores(items: &[Texts]) -> TextScores {
    fn split(text: &str) -> Vec<&str> {
        text.split_whitespace().collect()
    }
    let words: Vec<(Vec<&str>, Vec<Vec<&str>>)> = items
        .iter()
        .map(|item| (split(&item.prediction), item.references.iter().map(|text| split(text)).collect()))
        .collect();
    let num = items.len() as f64;
    let bleu = bleu::corpus(&words);
    let rouge = words.iter().map(|(said, wanted)| rouge::score(said, wanted)).sum::<f64>() / num;
    let mut frequencies = DocumentFrequencies::default();
    for (_, references) in &words {
        frequencies.add_words(references);
    }
    let cider = words.iter().map(|(said, wanted)| frequencies.score_words(said, wanted)).sum::<f64>() / num;
    let mut statistics = meteor::Statistics::default();
    for item in items {
        let references: Vec<_> = item.references.iter().map(|text| meteor::words(text)).collect();
        statistics += meteor::best(&meteor::words(&item.prediction), &references);
    }
    // The mean is reported only if all rows were measured.
    let bert: Option<f64> = items.iter().map(|item| item.bert_score).sum();
    let measured = [bleu[0], bleu[1], bleu[2], bleu[3], statistics.score(), rouge, cider];
    let bert = bert.map(|sum| sum / num);
    std::array::from_fn(|i| measured.get(i).copied().or(bert).map(|score| 100.0 * score))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Item {
        prediction: String,
        references: Vec<String>,
    }

    #[derive(Deserialize)]
    struct Golden {
        items: Vec<Item>,
        bleu: [f64; 4],
        rouge_l: f64,
        rouge_each: Vec<f64>,
        cider: f64,
        cider_each: Vec<f64>,
        meteor: f64,
        meteor_each: Vec<f64>,
    }

    /// Values of pycocoevalcap 1.2 and METEOR 1.5, from `tests/data/explanation_goldens.py`.
    #[test]
    fn golden_corpora() {
        let all: std::collections::BTreeMap<String, Golden> =
            serde_json::from_str(include_str!("../../../tests/data/explanation_goldens.json")).unwrap();
        assert_eq!(all.len(), 3);
        for (name, golden) in all {
            let items: Vec<Texts> = golden
                .items
                .into_iter()
                .map(|item| Texts {
                    prediction: item.prediction,
                    references: item.references,
                    bert_score: None,
                })
                .collect();
            let one = |i: usize| scores(&items[i..=i]);
            for (i, Texts { prediction, references, .. }) in items.iter().enumerate() {
                let near = |got: f64, expected: f64, what: &str| {
                    assert!(
                        (got - expected).abs() < 1e-9,
                        "{name}, {what} of `{prediction}` / {references:?}: {got} {expected}"
                    );
                };
                near(one(i)[5].unwrap() / 100.0, golden.rouge_each[i], "ROUGE-L");
                near(one(i)[4].unwrap() / 100.0, golden.meteor_each[i], "METEOR");
            }
            let mut frequencies = DocumentFrequencies::default();
            let split = |text: &'_ str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
            for Texts { references, .. } in &items {
                let words: Vec<_> = references.iter().map(|r| split(r)).collect();
                let words: Vec<Vec<&str>> =
                    words.iter().map(|w| w.iter().map(String::as_str).collect()).collect();
                frequencies.add_words(&words);
            }
            for (Texts { prediction, references, .. }, expected) in items.iter().zip(&golden.cider_each) {
                let references: Vec<Vec<&str>> = references.iter().map(|r| r.split(' ').collect()).collect();
                let got = frequencies.score_words(&prediction.split(' ').collect::<Vec<_>>(), &references);
                assert!((got - expected).abs() < 1e-9, "{name}, CIDEr of `{prediction}`: {got} {expected}");
            }
            let got = scores(&items);
            let [b1, b2, b3, b4] = golden.bleu;
            for (i, expected) in
                [b1, b2, b3, b4, golden.meteor, golden.rouge_l, golden.cider].iter().enumerate()
            {
                let got = got[i].unwrap() / 100.0;
                assert!((got - expected).abs() < 1e-9, "{name}, {}: {got} {expected}", MEASURES[i]);
            }
            assert_eq!(got[7], None);
        }
    }

    #[test]
    fn views_filter_and_scale() {
        let references = [vec!["trời mưa".to_owned()], vec!["abcd".to_owned(), "ab".to_owned()]];
        let items = [
            Explained {
                completion: "<answer>\"Có\".</answer><explain>Vì trời mưa.</explain>",
                references: &references[0],
                solution: "<answer>có</answer><explain>trời mưa</explain>",
                bert_score: Some(0.9),
            },
            Explained {
                completion: "<answer>x</answer><explain>a</explain>",
                references: &references[1],
                solution: "y",
                bert_score: Some(0.5),
            },
            Explained {
                completion: "nothing",
                references: &references[1],
                solution: "nothing",
                bert_score: Some(0.0),
            },
            Explained {
                completion: "<answer>x</answer>",
                references: &[],
                solution: "y",
                bert_score: Some(0.0),
            },
        ];
        let report = explanations(&items).unwrap();
        assert_eq!((report.num_explained, report.num_right), (4, 1));
        // Predictions have 2 + 1 words, of which 2 are correct; the references with the closest length have 2 + 1 + 1 + 0.
        let brevity = (1.0f64 - 4.0 / 3.0).exp();
        assert!((report.unfiltered[0].unwrap() - 100.0 * 2.0 / 3.0 * brevity).abs() < 1e-6);
        assert!((report.filtered[0].unwrap() - 100.0).abs() < 1e-6);
        assert_eq!(report.filtered[4], Some(100.0));
        assert!((report.unfiltered[5].unwrap() - 25.0).abs() < 1e-9);
        assert!((report.scaled[5].unwrap() - 6.25).abs() < 1e-9);
        assert!((report.unfiltered[7].unwrap() - 100.0 * 1.4 / 4.0).abs() < 1e-9);
        assert!((report.filtered[7].unwrap() - 90.0).abs() < 1e-9);
        let unmeasured = [items[0], Explained { bert_score: None, ..items[1] }];
        assert_eq!(explanations(&unmeasured).unwrap().unfiltered[7], None);

        let wrong = explanations(&items[1..2]).unwrap();
        assert_eq!(
            (wrong.filtered[0], wrong.scaled[5], wrong.filtered[7]),
            (Some(0.0), Some(0.0), Some(0.0))
        );
        assert_eq!(explanations(&[]), None);
    }

    #[test]
    fn cleaning_takes_whole_prefixes_off() {
        for (text, expected) in [
            ("Because it rains..", "it rains"),
            ("VÌ mưa", "mưa"),
            ("vì", ""),
            ("it rains. ", "it rains"),
            ("", ""),
        ] {
            assert_eq!(cleaned(text), expected, "{text}");
        }
    }

    #[test]
    fn time_is_bounded_on_long_repeats() {
        let long = "a b ".repeat(100_000);
        let references = vec![long.clone(), "a ".repeat(100_000), "b a ".repeat(100_000)];
        let completion = format!("<answer>a</answer><explain>{long}</explain>");
        let item =
            Explained { completion: &completion, references: &references, solution: "a", bert_score: None };
        let start = std::time::Instant::now();
        explanations(&[item; 3]).unwrap();
        assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
    }
}
