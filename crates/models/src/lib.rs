//! Models: families, towers, decoders, weights, and packed group streams.
//!
//! A [`Checkpoint`] is a directory whose configuration has been read. Its [`Family`] has three roles: a [`Processor`]
//! reads media and writes prompts, an [`Architecture`] builds a [`Network`] of decoder, towers and projectors, and a
//! [`Format`] maps the files. A [`Model`] is a network with its weights; it scores and trains [`PackedStream`]s, in which
//! the completions of a group share their prompt.
//!
//! Unsupported: pickle checkpoints, configurations of unknown models, sliding-window attention.

mod block;
mod checkpoint;
mod classifier;
mod config_json;
mod decoder;
pub mod encoders;
mod error;
mod experts;
mod export;
mod families;
mod gguf;
mod lora;
mod media_classifier;
mod media_store;
mod mixer;
mod model;
mod origin;
mod peft;
mod prompt;
mod recall;
mod rope;
mod stream;
mod weights;

pub use block::{Block, BlockPass, KeptBlock, Mlp, NormOrder, QkNorm};
pub use checkpoint::Checkpoint;
pub use classifier::SequenceClassifier;
pub use config_json::ConfigJson;
pub use decoder::{
    Decoder, DecoderConfig, DecoderInput, DecoderNames, DeepFeatures, NextTokens, Position, PositionAxes,
    Scored, TextDefaults,
};
pub use error::{ModelError, Result, SETTINGS};
pub use experts::{ExpertNames, Experts, ExpertsConfig, RouterPlan};
pub use export::COMPANIONS;
pub use families::humanomni;
pub use families::{
    Architecture, Companion, Converted, Encoder, FAMILIES, Family, FamilyOption, FamilyRow, Format,
    FrameRule, IdleSettings, MediaSettings, MediumInput, MediumKey, MediumPlan, MediumShape, MissingAudio,
    Network, OptionKind, Processor, Roles, Shown, probe_medium, sound,
};
pub use gguf::{ConvertedGguf, GgufPrecision, convert_gguf};
pub use lora::LoraConfig;
pub use media_classifier::MediaClassifier;
pub use media_store::{MediaStore, MediaUsage};
pub use mixer::{DeltaMixer, Mixer};
pub use model::{
    FeatureGradients, Features, LoadOptions, Memories, Model, ReferencePlace, StreamPass, StreamScores,
    TopTokens, Training,
};
pub use omnigrpo_guard::Setting;
pub use omnigrpo_media::{Limits, Orientation};
pub use omnigrpo_ops::{Arithmetic, Bf16Path, Part, QuantBits, Top};
pub use origin::Origin;
pub use peft::{adapter_base, whole_tensors};
pub use prompt::{
    ContextTemplate, MAX_SAID_BYTES, MAX_SAID_PARTS, Opening, PrivilegedContext, Prompt, PromptBuilder,
    PromptSettings, SftExample, check_said,
};
pub use recall::DecoderMemory;
pub use rope::{Rope, RopeScaling};
pub use stream::{AddedTurn, GroupStream, PackedStream};
pub use weights::{
    Chosen, FileSource, FrozenWeights, Init, Quantization, Scope, SharedDigests, SourceDigest, TensorDigests,
    WeightDtype, WeightFiles, WeightSource, share, source_digest, source_digests,
};
