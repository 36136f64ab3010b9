//! Settings that messages name.

use crate::ScorerOptions;

omnigrpo_guard::settings! {
    BERTSCORE_MODEL = ScorerOptions.bertscore_model;
    CLIP_MODEL = ScorerOptions.clip_model;
    CLIP_WEIGHT = ScorerOptions.explanation_clip_weight;
}
