//! What can go wrong with a scorer.

use std::path::PathBuf;

use omnigrpo_rewards::RewardError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ScorerError {
    /// A file of a scorer's directory does not say what it should.
    #[error("{}: {what}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong, what was expected.
        what: String,
    },
    /// A setting is missing, or does not fit the model.
    #[error("reward `{reward}`: {what}")]
    Setting {
        /// The reward.
        reward: &'static str,
        /// What is wrong and what to do.
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

/// The crate's result.
pub type Result<T, E = ScorerError> = std::result::Result<T, E>;

impl ScorerError {
    /// As the error of a reward, about a whole batch.
    pub(crate) fn of_batch(self, reward: &'static str) -> RewardError {
        RewardError::Setting { reward: reward.to_owned(), what: self.to_string() }
    }
}
