//! Rollout: samples completions from a model, with the log-probabilities that training compares with.
//!
//! A prompt is encoded and prefilled once. Its completions decode together with those of other prompts, and each leaves
//! the batch when it stops. For fixed weights the bits of a completion depend only on its key, not on other
//! completions, batch size or order.
//!
//! Sampling parameters in a checkpoint are ignored: [`SamplingParams`] alone decides.

mod error;
mod generate;
mod sample;

pub use error::{Result, RolloutError};
pub use generate::{Completion, FinishReason, Generator, Request, TokenEvent};
pub use sample::SamplingParams;
