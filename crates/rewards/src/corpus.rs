//! References of a dataset, which determine the word weights of some rewards.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::RewardError;
use crate::cider::DocumentFrequencies;

/// The references of a dataset. `cider` and `explanation` weight words by their inverse document frequency, and `bertscore`
/// weights tokens likewise if requested.
#[derive(Debug, Clone, Default)]
pub struct Corpus {
    /// Number of rows whose references contain each n-gram.
    pub frequencies: Arc<DocumentFrequencies>,
    /// Texts of the references, if kept.
    pub texts: Vec<String>,
}

impl Corpus {
    /// Name of the file in a run directory that stores the counts, for evaluations of its checkpoints.
    pub const FILE: &'static str = "document_frequencies.json";

    /// Counts the references of rows, and keeps the texts if requested. A row without references is ignored, since it would make
    /// every word appear rarer.
    pub fn of<R: AsRef<str>>(rows: impl IntoIterator<Item = Vec<R>>, keep_texts: bool) -> Self {
        let (mut frequencies, mut texts) = (DocumentFrequencies::default(), Vec::new());
        for references in rows.into_iter().filter(|references| !references.is_empty()) {
            frequencies.add_item(&references);
            if keep_texts {
                texts.extend(references.iter().map(|text| text.as_ref().to_owned()));
            }
        }
        Self { frequencies: Arc::new(frequencies), texts }
    }

    /// Replaces the counts with those stored by the run that made the checkpoint in `dir`, if any. Scores then mean the same as
    /// in training.
    ///
    /// # Errors
    /// Returns an error if a file of counts cannot be read.
    pub fn or_kept(mut self, dir: &Path) -> Result<Self, RewardError> {
        let kept = [Some(dir), dir.parent()].into_iter().flatten().map(|dir| dir.join(Self::FILE));
        if let Some(path) = kept.into_iter().find(|path| path.is_file()) {
            let text = std::fs::read(&path).map_err(|e| broken(&path, e.into()))?;
            self.frequencies = Arc::new(serde_json::from_slice(&text).map_err(|e| broken(&path, e.into()))?);
        }
        Ok(self)
    }

    /// Returns the content of [`Self::FILE`]. The same counts give the same bytes.
    pub fn kept(&self) -> Vec<u8> {
        // Words and counts can always be written as JSON.
        serde_json::to_vec(self.frequencies.as_ref()).unwrap_or_default()
    }
}

fn broken(path: &Path, source: Box<dyn std::error::Error + Send + Sync>) -> RewardError {
    RewardError::Corpus { path: PathBuf::from(path), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_corpus_leaves_out_rows_without_references_and_comes_back_from_its_file() {
        let rows = || vec![vec!["a red boat", "a boat"], vec![], vec!["two red hats"]];
        let corpus = Corpus::of(rows(), true);
        assert_eq!((corpus.frequencies.num_items(), corpus.texts.len()), (2, 3));
        assert!(Corpus::of(rows(), false).texts.is_empty());
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = dir.path().join("checkpoint-3");
        std::fs::create_dir(&checkpoint).unwrap();
        std::fs::write(dir.path().join(Corpus::FILE), corpus.kept()).unwrap();
        let other = Corpus::of([vec!["nothing alike"]], false);
        let score = |corpus: &Corpus| corpus.frequencies.score("a red boat", &["a red boat", "a boat"]);
        assert_ne!(score(&other), score(&corpus));
        assert_eq!(score(&other.clone().or_kept(&checkpoint).unwrap()), score(&corpus));
        std::fs::write(dir.path().join(Corpus::FILE), "[").unwrap();
        let error = other.or_kept(&checkpoint).unwrap_err().to_string();
        assert!(error.contains(Corpus::FILE) && error.contains("remove the file"), "{error}");
    }
}
