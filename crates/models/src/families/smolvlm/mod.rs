//! SmolVLM and SmolVLM2: images in tiles, clips as frames, and a Llama.
//!
//! Source: `transformers` 5.23, `models/smolvlm` and `models/idefics3`, whose layout SmolVLM v1 has.

mod config;
mod media;
mod processor;
mod vision;

use std::path::Path;
use std::sync::Arc;

pub use config::SmolVlmConfig;

use super::{Architecture, Format, Network, Roles};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames};
use crate::error::Result;
use crate::weights::WeightSource;

const NAMES: DecoderNames = DecoderNames { model: "model.text_model.", head: "lm_head.weight" };

/// Reads configuration and processor files.
///
/// # Errors
/// Returns an error if fields are missing or invalid.
pub fn open(dir: &Path, json: &ConfigJson) -> Result<Roles> {
    let config = Arc::new(SmolVlmConfig::parse(json)?);
    let media = media::MediaReader::open(dir, &config)?;
    let processor = Box::new(processor::SmolVlmPrompts { config: Arc::clone(&config), media });
    let model = Arc::new(SmolVlm(config));
    Ok(Roles { processor, architecture: Arc::clone(&model) as _, format: model })
}

/// Configuration of one checkpoint.
struct SmolVlm(Arc<SmolVlmConfig>);

impl Format for SmolVlm {
    fn published_name(&self, key: &str) -> Option<String> {
        let other = key.ends_with("rotary_emb.inv_freq") || key.ends_with("position_ids");
        (!other).then(|| key.to_owned())
    }
}

impl Architecture for SmolVlm {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.0.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.0.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let tower = vision::VisionTower::build(&self.0, source)?;
        let decoder = Decoder::build(self.0.decoder.clone(), NAMES, source)?;
        Ok(Network { decoder, encoder: Some(Box::new(tower)) })
    }
}
