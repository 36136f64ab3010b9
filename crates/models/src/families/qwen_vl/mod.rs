//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL, dense and with experts, and the dense sizes of Qwen3.5.
//!
//! Source: `transformers` 5.23 (`models/qwen2_vl`, `models/qwen2_5_vl`, `models/qwen3_vl`, `models/qwen3_vl_moe`, `models/qwen3_5`), `qwen-vl-utils` 0.0.14 for media, the
//! published checkpoints for defaults.

mod config;
pub(super) mod media;
pub(super) mod positions;
mod processor;
pub mod rules;
mod vision;

use std::path::Path;
use std::sync::Arc;

pub use config::{QwenVlConfig, VisionConfig};
pub use vision::VisionTower;

use rules::{MODULES, Rules};

use super::{Architecture, Format, Network, Roles};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames};
use crate::error::Result;
use crate::weights::WeightSource;

/// Reads configuration and processor files.
///
/// # Errors
/// Returns an error if fields are missing or invalid.
pub fn open(dir: &Path, json: &ConfigJson, rules: &'static Rules) -> Result<Roles> {
    let config = Arc::new(QwenVlConfig::parse(json, rules)?);
    let media = media::MediaReader::open(dir, &config.vision, rules)?;
    let processor = Box::new(processor::QwenVlProcessor { config: Arc::clone(&config), media });
    Ok(Roles { processor, architecture: Arc::clone(&config) as _, format: config })
}

impl Format for QwenVlConfig {
    fn published_name(&self, key: &str) -> Option<String> {
        if self.carried(key).is_some()
            || key.ends_with("rotary_emb.inv_freq")
            || key.ends_with("position_ids")
        {
            return None;
        }
        Some(renamed(key, MODULES, self.rules.prefixes))
    }

    fn carried(&self, key: &str) -> Option<String> {
        self.rules.text.carried().filter(|prefix| key.starts_with(prefix)).map(|_| key.to_owned())
    }

    fn module_name(&self, published: &str) -> String {
        renamed(published, self.rules.prefixes, MODULES)
    }
}

/// Returns a name with another prefix of a tower or the language model; names without such a prefix do not change.
pub(super) fn renamed<const N: usize>(name: &str, from: [&str; N], to: [&str; N]) -> String {
    let mut renamed =
        from.iter().zip(to).filter_map(|(from, to)| name.strip_prefix(from).map(|end| to.to_owned() + end));
    renamed.next().unwrap_or_else(|| name.to_owned())
}

impl Architecture for QwenVlConfig {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let tower = VisionTower::build(self.vision.clone(), self.rules, source)?;
        let names = DecoderNames { model: self.rules.prefixes[1], head: "lm_head.weight" };
        let decoder = Decoder::build(self.decoder.clone(), names, source)?;
        Ok(Network { decoder, encoder: Some(Box::new(tower)) })
    }
}
