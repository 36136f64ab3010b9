//! What can go wrong in a run.

use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A setting that cannot be used.
    #[error("{name}: {got:?}: {what}")]
    Setting {
        /// The setting.
        name: String,
        /// Its value.
        got: String,
        /// What is wrong and what to do.
        what: String,
    },
    /// Too few rows can be used.
    #[error("{what}")]
    Data {
        /// What is wrong and what to do.
        what: String,
    },
    /// A gradient overflowed.
    #[error(
        "the gradient of {name} is not finite; the step was not taken and weights are unchanged. Lower AdamWConfig::learning_rate or set AdamWConfig::max_grad_norm"
    )]
    NonFiniteGradient {
        /// The weight.
        name: String,
    },
    /// The loss overflowed.
    #[error("step {step}: {what}; the rows are in {}", rows.display())]
    NonFiniteLoss {
        /// Optimizer step.
        step: u64,
        /// Which value.
        what: String,
        /// Where the offending rows were written.
        rows: PathBuf,
    },
    /// A weight or a moment of it overflowed.
    #[error(
        "{what} of {name} is not finite; nothing was saved, and the last checkpoint stays the newest. Lower AdamWConfig::learning_rate or set AdamWConfig::max_grad_norm"
    )]
    NonFiniteState {
        /// The weight.
        name: String,
        /// Which of its numbers.
        what: &'static str,
    },
    /// A checkpoint cannot be read or does not fit.
    #[error("checkpoint: {what}")]
    Checkpoint {
        /// What is wrong and what to do.
        what: String,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Sampling failed.
    #[error(transparent)]
    Rollout(#[from] omnigrpo_rollout::RolloutError),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] omnigrpo_models::ModelError),
    /// A reward failed.
    #[error(transparent)]
    Reward(#[from] omnigrpo_rewards::RewardError),
    /// A reward failed, and the completions it was asked about would be lost.
    #[error("{source}")]
    Unscored {
        /// What it failed with.
        source: Box<omnigrpo_rewards::RewardError>,
        /// Its rows with their completions, a JSON object each.
        rows: Vec<String>,
    },
    /// A reward failed; the completions it was asked about are kept.
    #[error(
        "{source}; what was sampled is kept in {}", rows.display()
    )]
    UnscoredKept {
        /// What it failed with.
        source: Box<omnigrpo_rewards::RewardError>,
        /// Where.
        rows: PathBuf,
    },
    /// The loss could not be computed.
    #[error(transparent)]
    Loss(#[from] omnigrpo_grpo::Error),
    /// Metrics or rollouts could not be written.
    #[error(transparent)]
    Observe(#[from] omnigrpo_observe::Error),
    /// The dataset cannot be used.
    #[error(transparent)]
    Dataset(#[from] omnigrpo_data::DataError),
    /// An operation failed.
    #[error(transparent)]
    Op(#[from] omnigrpo_ops::Error),
}

impl TrainError {
    pub(crate) fn setting(name: &str, got: &str, what: String) -> Self {
        Self::Setting { name: name.to_owned(), got: got.to_owned(), what }
    }

    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

/// The crate's result.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;
