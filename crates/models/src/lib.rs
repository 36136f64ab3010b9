//! Models: families, towers, decoders, weights, and packed group streams.
//!
//! A [`Family`] knows a model's configuration, how a medium becomes tower input and how many tokens it takes, and
//! which positions a rendered prompt has. Given weights it becomes a [`Network`]: tower, projector and decoder. A
//! [`Model`] is a network with its weights; it scores and trains [`PackedStream`]s, in which the completions of a
//! group share their prompt.
//!
//! Refused: pickle checkpoints, configurations of unknown models, sliding-window attention.

mod cache;
mod config_json;
mod decoder;
mod error;
mod export;
mod families;
mod model;
mod prompt;
mod stream;
mod tower;
mod weights;

pub use cache::GroupCache;
pub use config_json::ConfigJson;
pub use decoder::{DecodeRows, Decoder, DecoderConfig, Position, Scored, Targets};
pub use error::{ModelError, Result};
pub use families::qwen_vl;
pub use families::{
    FAMILIES, Family, FamilyRow, FrameRule, MediaSettings, MediumInput, MediumPlan, Network, open_family,
    probe_medium,
};
pub use model::{Features, Model, StreamPass};
pub use prompt::{Prompt, PromptBuilder, PromptSettings, SftExample};
pub use stream::{GroupStream, PackedStream};
pub use weights::{Init, WeightDtype, WeightFiles, WeightSource, save_weights};
