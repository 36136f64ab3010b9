//! The table of rewards that need a model.

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo_models::WeightDtype;
use omnigrpo_rewards::{DocumentFrequencies, Reward};

use crate::error::Result;
use crate::{bertscore, explanation};

/// One reward that needs a model.
pub struct ScorerRow {
    /// Name on the command line and in metrics.
    pub name: &'static str,
    /// One line of help.
    pub doc: &'static str,
    /// Where the rule comes from.
    pub source: &'static str,
    /// Loads it.
    pub make: fn(&ScorerOptions) -> Result<Box<dyn Reward>>,
}

/// Every reward that needs a model.
#[must_use]
pub fn table() -> &'static [ScorerRow] {
    &[
        ScorerRow {
            name: "explanation",
            doc: "CLIP score of picture and <explain> text, and cider, weighted; 0..1",
            source: "ViVQA-X",
            make: explanation::reward,
        },
        ScorerRow {
            name: "bertscore",
            doc: "BERTScore F1 of the <explain> text, best reference; 0..1",
            source: "arXiv 1904.09675, ViVQA-X",
            make: bertscore::reward,
        },
    ]
}

/// Settings of [`table`]'s rewards.
#[derive(Clone, Debug)]
pub struct ScorerOptions {
    /// Directory of a CLIP.
    pub clip_model: Option<PathBuf>,
    /// Directory of a text encoder that shares CLIP's space, in place of CLIP's own.
    pub clip_text_model: Option<PathBuf>,
    /// Share of the CLIP score in `explanation`, 0 to 1; CIDEr has the rest.
    pub explanation_clip_weight: f64,
    /// Reproduce the source's batch-local counting and stretching in `explanation`.
    pub explanation_compat: bool,
    /// Directory of the model of `bertscore`.
    pub bertscore_model: Option<PathBuf>,
    /// After how many blocks its embeddings are taken; the last one by default.
    pub bertscore_layer: Option<usize>,
    /// Weigh tokens by how few of the references have them.
    pub bertscore_idf: bool,
    /// Scores of random pairs by layer, as the `bert_score` package has them, to rescale by.
    pub bertscore_baseline: Option<PathBuf>,
    /// Document frequencies of the training references, for CIDEr.
    pub frequencies: Option<Arc<DocumentFrequencies>>,
    /// The training references, for `bertscore_idf`.
    pub references: Vec<String>,
    /// In which dtype weights are held.
    pub dtype: WeightDtype,
}

impl Default for ScorerOptions {
    /// Half CLIP score, half CIDEr; nothing loaded.
    fn default() -> Self {
        Self {
            clip_model: None,
            clip_text_model: None,
            explanation_clip_weight: 0.5,
            explanation_compat: false,
            bertscore_model: None,
            bertscore_layer: None,
            bertscore_idf: false,
            bertscore_baseline: None,
            frequencies: None,
            references: Vec::new(),
            dtype: WeightDtype::Auto,
        }
    }
}
