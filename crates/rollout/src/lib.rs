//! Rollout: completions sampled from a model, with the log-probabilities that training will compare against.
//!
//! A prompt is encoded and prefilled once; its completions decode together with those of other prompts, and each
//! leaves the batch when it stops. For fixed weights a completion depends on its key alone, to the bit: not on batch
//! mates, batch size or order.
//!
//! Refused: sampling parameters from a checkpoint. What is sampled is what [`SamplingParams`] says.

mod error;
mod generate;
mod sample;

pub use error::{Result, RolloutError};
pub use generate::{Completion, FinishReason, Generator, Request, TokenEvent};
pub use sample::SamplingParams;
