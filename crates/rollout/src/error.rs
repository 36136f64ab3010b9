//! Errors of sampling.

use omnigrpo_data::Cause;
use omnigrpo_models::ModelError;

#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// Sampling parameter out of range.
    #[error("{name} is {got}; expected {expected}")]
    Parameter { name: &'static str, got: String, expected: &'static str },
    /// Logit that is NaN or infinite.
    #[error(
        "token {token} of sample {sample} of row {row}: the model's logits are not finite; the weights have diverged"
    )]
    NonFinite {
        row: u64,
        /// Sample in the group, from 0.
        sample: u32,
        /// Index of the token in the completion.
        token: usize,
    },
    /// Environment that cannot answer.
    #[error("environment `{environment}`, sample {sample} of row {row}: {}", omnigrpo_guard::told(&**source))]
    Environment {
        environment: String,
        row: u64,
        /// Sample in the group, from 0.
        sample: u32,
        source: Cause,
    },
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Token ids that could not be decoded.
    #[error(transparent)]
    Text(#[from] omnigrpo_text::TextError),
    #[error(transparent)]
    Op(#[from] omnigrpo_ops::Error),
}

pub type Result<T, E = RolloutError> = std::result::Result<T, E>;
