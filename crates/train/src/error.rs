//! Errors of a run.

use std::path::PathBuf;

use omnigrpo_guard::{Fault, fault};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A setting that cannot be used.
    #[error("{name}: {got:?}: {what}")]
    Setting {
        /// The setting.
        name: String,
        /// Value of the setting.
        got: String,
        /// Problem and advice.
        what: String,
    },
    /// A pattern that chooses weights is no regular expression.
    #[error("{name} {pattern:?} is no regular expression")]
    Pattern {
        /// The field.
        name: &'static str,
        /// The pattern.
        pattern: String,
        /// Position of the error.
        source: regex::Error,
    },
    /// Too few rows can be used.
    #[error("{what}")]
    Data {
        /// Problem and advice.
        what: String,
    },
    /// The machine failed, and went on failing. No row is to blame, and the same work can succeed later.
    #[error("the machine failed at row {row} ({id}), which may be good")]
    Machine {
        /// Index in the dataset.
        row: u64,
        /// The row's id.
        id: String,
        /// The failure.
        source: Box<dyn std::error::Error + Send + Sync>,
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
        /// Problem and advice.
        what: String,
    },
    /// The optimizer's state cannot be written as safetensors.
    #[error("{} cannot be written as safetensors", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: safetensors::SafeTensorError,
    },
    /// A checkpoint's files are not those that were saved.
    #[error("checkpoint: {} is damaged: {what}; resume from an earlier checkpoint", checkpoint.display())]
    Damaged {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// Problem of the file.
        what: String,
        /// Error of reading it, if that is the problem.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A file could not be read or written.
    #[error("{} cannot be read or written", path.display())]
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
    #[error("a step could not be scored")]
    Unscored {
        /// Error of the reward.
        source: Box<omnigrpo_rewards::RewardError>,
        /// Rows with their completions, a JSON object each.
        rows: Vec<String>,
    },
    /// A reward failed; the completions it was asked about are kept.
    #[error("a step could not be scored; what was sampled is kept in {}", rows.display())]
    UnscoredKept {
        /// Error of the reward.
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
    /// No row is left to draw, or a place in the order that it does not have.
    #[error(transparent)]
    Order(#[from] omnigrpo_data::OrderError),
    /// The dataset cannot be used.
    #[error(transparent)]
    Dataset(#[from] omnigrpo_data::DataError),
    /// An operation failed.
    #[error(transparent)]
    Op(#[from] omnigrpo_ops::Error),
}

impl TrainError {
    /// [`Fault::Machine`] for what the same command can get over once the machine is well, else [`Fault::Run`].
    ///
    /// A file of the run that cannot be written is the run's: what it has done so far would not be complete.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Machine { .. } => Fault::Machine,
            Self::Dataset(error @ omnigrpo_data::DataError::Machine { .. }) => fault(error, Fault::Machine),
            Self::Model(omnigrpo_models::ModelError::Media(_) | omnigrpo_models::ModelError::Text(_))
            | Self::Reward(_)
            | Self::Unscored { .. }
            | Self::UnscoredKept { .. } => fault(self, Fault::Run),
            _ => Fault::Run,
        }
    }

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
