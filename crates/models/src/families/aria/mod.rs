//! Aria: images and videos of masked patches, and a language model with experts.
//!
//! Source: `transformers` 5.23 (`models/aria`, its tower in `models/idefics3`), the published checkpoints and rhymes-ai/Aria
//! for names and defaults. Files may use the names of either; a checkpoint is saved under the published names of `transformers`.

mod config;
mod media;
mod processor;
mod vision;

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

pub use config::AriaConfig;
pub use vision::VisionTower;

use super::{Architecture, Format, Network, Roles};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames};
use crate::error::Result;
use crate::weights::WeightSource;

const NAMES: DecoderNames =
    DecoderNames { model: "language_model.model.", head: "language_model.lm_head.weight" };

/// Prefixes in the model's own code or in the modules of `transformers`, each with the published prefix.
const RENAMED: [(&str, &str); 5] = [
    ("vision_tower.vision_model.", "vision_tower."),
    ("multi_modal_projector.ln_ffn.", "multi_modal_projector.layer_norm."),
    ("multi_modal_projector.ffn.", "multi_modal_projector.feed_forward."),
    ("multi_modal_projector.cross_attn.ln_kv.", "multi_modal_projector.cross_attn.layer_norm_kv."),
    ("multi_modal_projector.cross_attn.ln_q.", "multi_modal_projector.cross_attn.layer_norm."),
];

/// Names of fused experts, in published files and in the modules of `transformers`.
const EXPERTS: [(&str, &str); 2] =
    [(".experts.fc1.weight", ".experts.gate_up_proj"), (".experts.fc2.weight", ".experts.down_proj")];

/// Reads configuration and processor files.
///
/// # Errors
/// Returns an error if fields are missing or invalid.
pub fn open(dir: &Path, json: &ConfigJson) -> Result<Roles> {
    let config = Arc::new(AriaConfig::parse(json)?);
    let media = media::MediaReader::open(dir, &config)?;
    let processor = Box::new(processor::AriaPrompts { config: Arc::clone(&config), media });
    let aria = Arc::new(Aria(config));
    Ok(Roles { processor, architecture: Arc::clone(&aria) as _, format: aria })
}

/// Configuration of one checkpoint.
struct Aria(Arc<AriaConfig>);

impl Format for Aria {
    fn published_name(&self, key: &str) -> Option<String> {
        if key.ends_with("rotary_emb.inv_freq") || key.ends_with("position_ids") {
            return None;
        }
        let mut name = match key.strip_prefix("model.") {
            Some(rest) => match rest.strip_prefix("language_model.") {
                Some(inner) => format!("{}{inner}", NAMES.model),
                None => rest.to_owned(),
            },
            None if key == "lm_head.weight" => NAMES.head.to_owned(),
            None => key.to_owned(),
        };
        for (own, published) in RENAMED {
            if let Some(rest) = name.strip_prefix(own) {
                name = format!("{published}{rest}");
            }
        }
        for (published, memory) in EXPERTS {
            if let Some(start) = name.strip_suffix(memory) {
                name = format!("{start}{published}");
            }
        }
        Some(name)
    }

    fn module_name(&self, published: &str) -> String {
        let mut name = match published.strip_prefix("language_model.") {
            Some(head) if head.starts_with("lm_head") => head.to_owned(),
            _ => match published.strip_prefix(NAMES.model) {
                Some(inner) => format!("model.language_model.{inner}"),
                None => format!("model.{published}"),
            },
        };
        for (published, memory) in EXPERTS {
            // The name of a module does not end with `.weight`.
            for (ending, other) in [(published, memory), (published.trim_end_matches(".weight"), memory)] {
                if let Some(start) = name.strip_suffix(ending) {
                    name = format!("{start}{other}");
                }
            }
        }
        name
    }

    /// Rewrites the configuration of a checkpoint for the model's own code, so that `transformers` can read the saved copy.
    fn saved_config(&self, config: &mut Map<String, Value>) {
        config.remove("auto_map");
        if let Some(Value::Object(text)) = config.get_mut("text_config") {
            if let Some(width) = text.remove("moe_intermediate_size") {
                text.insert("intermediate_size".into(), width);
            }
            text.insert("model_type".into(), "aria_text".into());
            text.remove("auto_map");
        }
        if let Some(Value::Object(vision)) = config.get_mut("vision_config") {
            vision.insert("model_type".into(), "idefics3_vision".into());
            vision.remove("auto_map");
        }
    }
}

impl Architecture for Aria {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.0.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.0.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let tower = VisionTower::build(&self.0, source)?;
        let decoder = Decoder::build(self.0.decoder.clone(), NAMES, source)?;
        Ok(Network { decoder, encoder: Some(Box::new(tower)) })
    }
}
