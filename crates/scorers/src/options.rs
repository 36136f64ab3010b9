//! Settings of the rewards that need a model.

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo_models::{FrozenWeights, Orientation, WeightDtype};
use omnigrpo_rewards::DocumentFrequencies;

/// Settings of the rewards of [`table`](crate::table).
#[derive(Clone, Debug)]
pub struct ScorerOptions {
    /// Directory of a CLIP model.
    pub clip_model: Option<PathBuf>,
    /// Directory of a text encoder that shares CLIP's feature space and replaces CLIP's own.
    pub clip_text_model: Option<PathBuf>,
    /// Weight of the CLIP score in `explanation`, 0 to 1. CIDEr has the remaining weight.
    pub explanation_clip_weight: f64,
    /// Uses the source's counting and stretching within a batch in `explanation`.
    pub explanation_compat: bool,
    /// Directory of the model for `bertscore`.
    pub bertscore_model: Option<PathBuf>,
    /// Number of blocks after which the embeddings are taken. The default is all blocks.
    pub bertscore_layer: Option<usize>,
    /// Weights tokens by their inverse document frequency in the references.
    pub bertscore_idf: bool,
    /// Scores of random pairs by layer, for rescaling, in the format of the `bert_score` package.
    pub bertscore_baseline: Option<PathBuf>,
    /// Document frequencies of the training references, for CIDEr.
    pub frequencies: Option<Arc<DocumentFrequencies>>,
    /// Training references, for `bertscore_idf`.
    pub references: Vec<String>,
    /// Form in which pictures are read. It should be that of the model.
    pub orientation: Orientation,
    /// How the weights of the models are loaded. A process that does not score needs their outline.
    pub weights: FrozenWeights,
}

impl Default for ScorerOptions {
    /// Returns equal weights of CLIP score and CIDEr, and no models.
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
            orientation: Orientation::default(),
            weights: WeightDtype::Auto.into(),
        }
    }
}
