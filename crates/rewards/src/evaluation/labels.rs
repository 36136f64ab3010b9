//! Classification by a set of labels: the label of each answer, the confusion matrix, and the weighted and unweighted average
//! recall.
//!
//! Source: the evaluation of R1-Omni on DFEW and MAFW. WAR is the recall of each class weighted by its frequency, which equals
//! the accuracy. UAR is the mean recall over the classes that occur. Differences: the label is read from the answer tag or,
//! without a tag, from the text after the thinking, as in the accuracy reward. Synonyms of emotion words count. A completion
//! without a known label is wrong.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::RewardError;
use crate::answer::normalised;
use crate::emotion::emotions;

/// Maximum number of labels. A table of more labels is unreadable.
const MAX_LABELS: usize = 64;

/// The labels of a classification.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LabelSet {
    names: Vec<String>,
    keys: Vec<Key>,
}

/// Normal form of a label, for comparison.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
enum Key {
    Emotion(usize),
    Text(String),
}

/// Returns the meaning of an emotion word, or the normal form of another text.
fn key(text: &str) -> Option<Key> {
    let named = emotions(text);
    if named.len() == 1 {
        return named.first().copied().map(Key::Emotion);
    }
    Some(normalised(text)).filter(|text| !text.is_empty()).map(Key::Text)
}

impl LabelSet {
    /// Creates a set from labels, in the order of the table.
    ///
    /// # Errors
    /// Returns an error for fewer than two labels, more than 64, an empty label, or two labels with the same meaning.
    pub fn new(names: &[String]) -> Result<Self, RewardError> {
        let wrong = |what: String| RewardError::Setting { reward: "label_set".to_owned(), what };
        if !(2..=MAX_LABELS).contains(&names.len()) {
            return Err(wrong(format!("got {} labels, expected 2 to {MAX_LABELS}", names.len())));
        }
        let mut keys = Vec::with_capacity(names.len());
        for name in names {
            let key = key(name).ok_or_else(|| wrong(format!("`{name}` has no letters or digits")))?;
            if keys.contains(&key) {
                return Err(wrong(format!("`{name}` has the same meaning as an earlier label")));
            }
            keys.push(key);
        }
        Ok(Self { names: names.to_vec(), keys })
    }

    /// Collects the labels of ground truths, sorted.
    pub fn of_ground_truths<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, RewardError> {
        let mut seen = BTreeSet::new();
        let mut names = BTreeSet::new();
        for text in texts {
            if key(text).is_some_and(|key| seen.insert(key)) {
                names.insert(normalised(text));
            }
            // Free text is not a set of labels. The error is returned before all texts are collected.
            if names.len() > MAX_LABELS {
                break;
            }
        }
        Self::new(&names.into_iter().collect::<Vec<_>>())
    }

    /// The labels.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the index of the label of a text.
    pub fn find(&self, text: &str) -> Option<usize> {
        let key = key(text)?;
        self.keys.iter().position(|label| *label == key)
    }
}

/// Number of answers with each label, for each true label.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Confusion {
    /// The labels.
    pub labels: Vec<String>,
    /// `counts[truth][answer]`. The last column counts answers without a known label.
    pub counts: Vec<Vec<usize>>,
    /// Number of completions whose ground truth is not a label. They are excluded from `counts`.
    pub unlabelled: usize,
}

impl Confusion {
    pub(super) fn new(labels: &LabelSet) -> Self {
        let num = labels.names.len();
        Self { labels: labels.names.clone(), counts: vec![vec![0; num + 1]; num], unlabelled: 0 }
    }

    pub(super) fn add(&mut self, labels: &LabelSet, truth: &str, answer: &str) {
        match labels.find(truth) {
            Some(truth) => {
                let answer = labels.find(answer).unwrap_or(labels.names.len());
                self.counts[truth][answer] += 1;
            }
            None => self.unlabelled += 1,
        }
    }

    /// Returns the weighted average recall, 0..1, or `None` if no completion has a labelled ground truth.
    pub fn war(&self) -> Option<f64> {
        let all: usize = self.counts.iter().flatten().sum();
        let right: usize = self.counts.iter().enumerate().map(|(label, row)| row[label]).sum();
        (all > 0).then(|| right as f64 / all as f64)
    }

    /// Returns the unweighted average recall over the classes that occur, 0..1.
    pub fn uar(&self) -> Option<f64> {
        let recalls: Vec<f64> = self.recalls().into_iter().flatten().collect();
        (!recalls.is_empty()).then(|| recalls.iter().sum::<f64>() / recalls.len() as f64)
    }

    /// Returns the recall of each label, or `None` for a label that does not occur.
    pub fn recalls(&self) -> Vec<Option<f64>> {
        let recall = |(label, row): (usize, &Vec<usize>)| {
            let all: usize = row.iter().sum();
            (all > 0).then(|| row[label] as f64 / all as f64)
        };
        self.counts.iter().enumerate().map(recall).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> LabelSet {
        LabelSet::new(&names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>()).unwrap()
    }

    /// scikit-learn 1.7: `accuracy_score` 0.6 and `recall_score(average="macro")` over the classes of the truth (3/4 + 0/1 + 3/5)
    /// / 3 = 0.45.
    #[test]
    fn war_is_accuracy_and_uar_the_mean_recall_of_classes_that_occur() {
        let labels = set(&["happy", "sad", "angry", "fear"]);
        let mut confusion = Confusion::new(&labels);
        let rows = [
            ("happy", Some("Happy.")),
            ("happy", Some("joyful")),
            ("happy", Some("happiness")),
            ("happy", Some("sad")),
            ("sad", None),
            ("fear", Some("fearful")),
            ("fear", Some("scared")),
            ("fear", Some("afraid")),
            ("fear", Some("I do not know")),
            ("fear", Some("surprise")),
            ("bored", Some("happy")),
        ];
        for (truth, answer) in rows {
            confusion.add(&labels, truth, answer.unwrap_or_default());
        }
        assert_eq!(
            confusion.counts,
            [[3, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 3, 2]].map(|row| row.to_vec())
        );
        assert_eq!(confusion.unlabelled, 1);
        assert!((confusion.war().unwrap() - 0.6).abs() < 1e-12);
        assert!((confusion.uar().unwrap() - 0.45).abs() < 1e-12);
        assert_eq!(confusion.recalls(), [Some(0.75), Some(0.0), None, Some(0.6)]);
        assert_eq!(Confusion::new(&labels).war(), None);
    }

    #[test]
    fn sets_are_checked_and_collected() {
        let labels = LabelSet::of_ground_truths(["sad", "Happy!", "joy", "sad", "cat", ""]).unwrap();
        assert_eq!(labels.names(), ["cat", "happy", "sad"]);
        assert_eq!(
            (labels.find("Cat."), labels.find("sorrow"), labels.find("dog")),
            (Some(0), Some(2), None)
        );
        for (names, expected) in [
            (vec!["a"], "got 1 labels"),
            (vec!["a", "!"], "no letters"),
            (vec!["joy", "happy"], "has the same meaning"),
        ] {
            let names: Vec<String> = names.into_iter().map(str::to_owned).collect();
            let error = LabelSet::new(&names).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let texts: Vec<String> = (0..1000).map(|i| format!("text {i}")).collect();
        assert!(LabelSet::of_ground_truths(texts.iter().map(String::as_str)).is_err());
    }
}
