//! Rollout: samples completions from a model, with the log-probabilities that training compares with.
//!
//! A prompt is encoded and prefilled once. Its completions decode together with those of other prompts, and each leaves
//! the batch when it stops. For fixed weights the bits of a completion depend only on its key, not on other
//! completions, batch size or order.
//!
//! In a [`Session`], requests arrive and leave while others decode, each with its own parameters; `serve` uses it.
//!
//! An [`Environment`] may answer a completion in its middle, with text and media; the completion goes on after the answer, over the
//! same cache.
//!
//! Sampling parameters in a checkpoint are ignored: [`SamplingParams`] alone decides.

mod answers;
mod completion;
mod environment;
mod error;
mod generate;
mod rules;
mod sample;
mod session;
mod zoom;

pub use completion::{Completion, FinishReason};
pub use environment::{
    Answer, AnswerPart, Environment, Episode, EpisodeKey, Interaction, ModelTurn, answer_calls, append,
};
pub use error::{Result, RolloutError};
pub use generate::{GenerateOptions, Generated, Generator, MAX_LIVE, Request, TokenEvent};
pub use sample::{SampleKey, SamplingParams, TurnLimits};
pub use session::{Job, Scored, Session, Step, Token};
pub use zoom::{BoxUnit, ENVIRONMENTS, Zoom, environment, store_picture};
