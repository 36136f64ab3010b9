//! Errors of sampling.

use omnigrpo_models::ModelError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// A sampling parameter is out of range.
    #[error("{name} is {got}; expected {expected}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Value of the setting.
        got: String,
        /// Allowed values.
        expected: &'static str,
    },
    /// The model produced a logit that is no number.
    #[error(
        "token {token} of sample {sample} of row {row}: the model's logits are not finite; the weights have diverged"
    )]
    NonFinite {
        /// Dataset row.
        row: u64,
        /// Sample in the group.
        sample: u32,
        /// Token index in the completion.
        token: usize,
    },
    /// The model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Text could not be decoded.
    #[error(transparent)]
    Text(#[from] omnigrpo_text::TextError),
    /// An operation failed.
    #[error(transparent)]
    Op(#[from] omnigrpo_ops::Error),
}

/// The crate's result.
pub type Result<T, E = RolloutError> = std::result::Result<T, E>;
