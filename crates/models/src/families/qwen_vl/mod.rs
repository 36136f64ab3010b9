//! Qwen2-VL, Qwen2.5-VL and the dense sizes of Qwen3-VL.
//!
//! Source: `transformers` 5.23 (`models/qwen2_vl`, `models/qwen2_5_vl`, `models/qwen3_vl`), `qwen-vl-utils` 0.0.14 for media, the
//! published checkpoints for defaults.

mod config;
mod media;
mod positions;
mod processor;
mod vision;

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::{Pass, Tape, Var};

pub use config::{Generation, QwenVlConfig};
pub use vision::VisionTower;

use super::{Architecture, Encoder, Format, MediumInput, Network, Roles};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames};
use crate::error::Result;
use crate::weights::WeightSource;

const NAMES: DecoderNames = DecoderNames { model: "model.", head: "lm_head.weight" };
/// Names of Qwen3-VL, which is published under the module names of `transformers`.
const MODULE_NAMES: DecoderNames = DecoderNames { model: "model.language_model.", head: "lm_head.weight" };

/// Reads configuration and processor files.
///
/// # Errors
/// Returns an error if fields are missing or invalid.
pub fn open(dir: &Path, json: &ConfigJson, generation: Generation) -> Result<Roles> {
    let config = Arc::new(QwenVlConfig::parse(json, generation)?);
    let media = media::MediaReader::open(dir, &config.vision, generation)?;
    let processor = Box::new(processor::QwenVlProcessor { config: Arc::clone(&config), media });
    Ok(Roles { processor, architecture: Arc::clone(&config) as _, format: config })
}

impl Format for QwenVlConfig {
    fn published_name(&self, key: &str) -> Option<String> {
        if key.ends_with("rotary_emb.inv_freq") || key.ends_with("position_ids") {
            return None;
        }
        if self.generation.named_as_modules() {
            return Some(key.to_owned());
        }
        Some(match key.strip_prefix("model.") {
            Some(rest) if rest.starts_with("visual.") => rest.to_owned(),
            Some(rest) => match rest.strip_prefix("language_model.") {
                Some(inner) => format!("model.{inner}"),
                None => key.to_owned(),
            },
            None => key.to_owned(),
        })
    }

    fn module_name(&self, published: &str) -> String {
        if self.generation.named_as_modules() {
            return published.to_owned();
        }
        match published.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None if published.starts_with("visual.") => format!("model.{published}"),
            None => published.to_owned(),
        }
    }
}

impl Architecture for QwenVlConfig {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let tower = VisionTower::build(self.vision.clone(), self.generation, source)?;
        let names = if self.generation.named_as_modules() { MODULE_NAMES } else { NAMES };
        let decoder = Decoder::build(self.decoder.clone(), names, source)?;
        Ok(Network { decoder, encoder: Box::new(tower) })
    }
}

impl Encoder for VisionTower {
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        self.forward(&medium.data, medium.shape.patches()?, pass, tape)
    }

    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        _instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        VisionTower::project(self, tower, medium.shape.patches()?, pass, tape)
    }
}
