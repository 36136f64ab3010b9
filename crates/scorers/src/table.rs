//! The table of rewards that need a model.

use omnigrpo_rewards::Reward;

use crate::error::Result;
use crate::options::ScorerOptions;
use crate::{bertscore, explanation};

/// One reward that needs a model.
pub struct ScorerRow {
    /// Name on the command line and in metrics.
    pub name: &'static str,
    /// One line of help.
    pub doc: fn() -> String,
    /// Source of the rule.
    pub source: &'static str,
    /// Function that loads the reward.
    pub make: fn(&ScorerOptions) -> Result<Box<dyn Reward>>,
}

/// Returns all rewards that need a model.
pub fn table() -> &'static [ScorerRow] {
    &[
        ScorerRow {
            name: "explanation",
            doc: || "CLIP score of picture and <explain> text, and cider, weighted; 0..1".into(),
            source: "ViVQA-X",
            make: explanation::reward,
        },
        ScorerRow {
            name: "bertscore",
            doc: || "BERTScore F1 of the <explain> text, best reference; 0..1".into(),
            source: "arXiv 1904.09675, ViVQA-X",
            make: bertscore::reward,
        },
    ]
}
