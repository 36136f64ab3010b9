//! Qwen2.5-Omni's thinker: text, images, videos, sounds, and videos with their sound.
//!
//! The vision tower is that of Qwen2.5-VL, the audio tower a Whisper encoder over pieces of a sound, the language model a Qwen2 with
//! positions on three axes. Source: arXiv 2503.20215; `transformers` 5.23 `models/qwen2_5_omni`.
//!
//! Whole checkpoints contain a talker and a decoder of waves besides. Their tensors are never loaded, and saved copies contain them
//! unchanged.

mod config;
mod positions;
mod processor;

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::{Linear, Part, Pass, Tape, Var};
use serde_json::{Map, Value};

use config::{OmniConfig, THINKER_KEY};

use super::qwen_vl::media::MediaReader;
use super::qwen_vl::{VisionTower, renamed};
use super::sound::processor_of;
use super::{Architecture, Encoder, Format, MediumInput, MediumShape, Network, Roles};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig};
use crate::encoders::whisper::Whisper;
use crate::error::Result;
use crate::weights::{Scope, WeightSource};

/// Reads configuration and processor files.
///
/// # Errors
/// Returns an error if fields are missing or invalid.
pub fn open(dir: &Path, json: &ConfigJson) -> Result<Roles> {
    let config = Arc::new(OmniConfig::parse(json)?);
    let pixels = MediaReader::open(dir, &config.vision, &config.names.rules)?;
    let mel = processor_of(dir, config.audio.num_mels)?.trimmed();
    let media = processor::MediaReader { pixels, mel, audio: config.audio.clone() };
    let processor = Box::new(processor::OmniProcessor { config: Arc::clone(&config), media });
    let model = Arc::new(Omni(config));
    Ok(Roles { processor, architecture: Arc::clone(&model) as _, format: model })
}

/// Configuration of one checkpoint.
struct Omni(Arc<OmniConfig>);

/// Parts of a whole checkpoint that speak.
const SPEAKERS: [&str; 2] = ["talker.", "token2wav."];

impl Format for Omni {
    fn published_name(&self, key: &str) -> Option<String> {
        let other = key.ends_with("rotary_emb.inv_freq") || key.ends_with("position_ids");
        (!other && self.carried(key).is_none())
            .then(|| renamed(key, self.0.names.modules, self.0.names.prefixes()))
    }

    fn module_name(&self, published: &str) -> String {
        let names = self.0.names;
        match published == names.decoder.head {
            true => published.to_owned(),
            false => renamed(published, names.prefixes(), names.modules),
        }
    }

    /// Returns the names of the tensors of the parts that speak, and of a table that only they use.
    fn carried(&self, key: &str) -> Option<String> {
        let name = renamed(key, self.0.names.modules, self.0.names.prefixes());
        let table = name.strip_prefix(self.0.names.audio) == Some("audio_bos_eos_token.weight");
        (table || SPEAKERS.iter().any(|speaker| key.starts_with(speaker))).then_some(name)
    }

    /// Moves `tie_word_embeddings` to the thinker's configuration.
    fn saved_config(&self, config: &mut Map<String, Value>) {
        let Some(tied) = config.get("tie_word_embeddings").cloned() else { return };
        if let Some(thinker) = config.get_mut(THINKER_KEY).and_then(Value::as_object_mut) {
            thinker.insert("tie_word_embeddings".into(), tied);
            config.remove("tie_word_embeddings");
        }
    }
}

impl Architecture for Omni {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.0.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.0.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let (config, names) = (&self.0, self.0.names);
        let vision = VisionTower::build(config.vision.clone(), &names.rules, source)?;
        let audio = Whisper::build(config.audio.clone(), names.audio, Part::Audio, source)?;
        let width = config.audio.sizes.hidden;
        let mut weights = Scope::new(source, names.audio, Part::Projector);
        let sound = weights.linear("proj", config.decoder.hidden, width, true)?;
        let decoder = Decoder::build(config.decoder.clone(), names.decoder, source)?;
        Ok(Network { decoder, encoder: Some(Box::new(OmniEncoder { vision, audio, sound })) })
    }
}

/// Towers and projectors.
struct OmniEncoder {
    vision: VisionTower,
    audio: Whisper,
    /// Projection of the audio tower's output.
    sound: Linear,
}

impl Encoder for OmniEncoder {
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        match medium.shape {
            MediumShape::Mel { heard, .. } => self.audio.forward(&medium.data, heard, pass, tape),
            _ => self.vision.tower(medium, pass, tape),
        }
    }

    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        match medium.shape {
            MediumShape::Mel { .. } => {
                let (linear, pass) = (self.sound.clone(), pass.clone());
                Ok(tape.segment([tower], move |tape, [x]| tape.linear(x, &linear, &pass))?)
            }
            _ => self.vision.project(tower, medium, instruction, pass, tape),
        }
    }
}
