//! Models: families, towers, decoders, weights, and packed group streams.
//!
//! A [`Family`] knows a model's configuration, how a medium becomes tower input and how many tokens it takes, and
//! which positions a rendered prompt has. Given weights it becomes a [`Network`]: tower, projector and decoder. A
//! [`Model`] is a network with its weights; it scores and trains [`PackedStream`]s, in which the completions of a
//! group share their prompt.
//!
//! Refused: pickle checkpoints, configurations of unknown models, sliding-window attention.

mod block;
mod config_json;
mod decoder;
pub mod encoders;
mod error;
mod export;
mod families;
mod lora;
mod model;
mod origin;
mod prompt;
mod rope;
mod stream;
mod weights;

pub use block::{Block, BlockPass, KeptBlock, Mlp, NormOrder, QkNorm};
pub use config_json::ConfigJson;
pub use decoder::{Decoder, DecoderConfig, DecoderNames, Position, Scored, TextDefaults};
pub use error::{ModelError, Result};
pub use export::COMPANIONS;
pub use families::{
    Companion, Converted, FAMILIES, Family, FamilyRow, FrameRule, MediaSettings, MediumInput, MediumPlan,
    MediumShape, MissingAudio, Network, open_family, open_family_with, probe_medium, sound,
};
pub use families::{humanomni, internvl, qwen_vl};
pub use lora::{LoraConfig, adapter_base, whole_tensors};
pub use model::{FeatureGradients, Features, LoadOptions, Memories, Model, StreamPass, Training};
pub use omnigrpo_media::Limits;
pub use omnigrpo_ops::{Part, QuantBits};
pub use origin::Origin;
pub use prompt::{Prompt, PromptBuilder, PromptSettings, SftExample};
pub use rope::{Rope, RopeScaling};
pub use stream::{GroupStream, PackedStream};
pub use weights::{
    FileSource, Init, Quantization, RandomSource, Scope, SourceDigest, WeightDtype, WeightFiles,
    WeightSource, save_weights, share, source_digest,
};
