//! Errors of scorers.

use std::path::{Path, PathBuf};

use omnigrpo_rewards::RewardError;

use crate::ScorerOptions;

omnigrpo_guard::settings! {
    struct ScorerOptions {
        BERTSCORE_MODEL = bertscore_model, CLIP_MODEL = clip_model, CLIP_WEIGHT = explanation_clip_weight,
    }
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ScorerError {
    /// A file of a scorer's directory has an unexpected content.
    #[error("{}: {what}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// Problem and expected value.
        what: String,
    },
    /// A file of a scorer's directory cannot be read.
    #[error("{} cannot be read", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A file of a scorer's directory is not valid JSON of the expected structure.
    #[error("{} is not the JSON that is expected of it", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message, with line and column.
        source: serde_json::Error,
    },
    /// A setting is missing or does not fit the model.
    #[error("reward `{reward}`: {what}")]
    Setting {
        /// The reward.
        reward: &'static str,
        /// Problem and advice.
        what: String,
    },
    /// A model could not be loaded or run.
    #[error(transparent)]
    Model(#[from] omnigrpo_models::ModelError),
    /// A text could not be tokenised.
    #[error(transparent)]
    Text(#[from] omnigrpo_text::TextError),
    /// A picture could not be read.
    #[error(transparent)]
    Media(#[from] omnigrpo_media::MediaError),
    /// An operation failed.
    #[error(transparent)]
    Op(#[from] omnigrpo_ops::Error),
}

/// Result type of this crate.
pub type Result<T, E = ScorerError> = std::result::Result<T, E>;

impl ScorerError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    /// Converts the error into that of a reward for a complete batch.
    pub(crate) fn of_batch(self, reward: impl Into<String>) -> RewardError {
        RewardError::Failed { reward: reward.into(), source: self.into() }
    }
}
