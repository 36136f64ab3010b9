//! InternVL2, 2.5 and 3 with Qwen2 language models (including Vintern), and 3.5 with dense Qwen3, in both published layouts.
//!
//! Source: `internvl_chat` of OpenGVLab/InternVL (original layout), `transformers` 5.23 `models/internvl` (hf layout), the
//! published configurations. The layouts differ in tensor names, in the form of the query, key and value projections, in
//! their files and in the prompt; the values are the same. A saved checkpoint keeps its layout; [`convert`] changes it.

mod config;
mod convert;
mod layout;
mod media;
mod processor;
mod template;
mod vision;

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::Param;
use omnigrpo_text::Tokenizer;

pub use config::InternVlConfig;
pub use convert::convert;
pub use layout::Layout;
pub use vision::VisionTower;

use super::{Architecture, Converted, Format, Network, Roles};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames};
use crate::error::{ModelError, Result};
use crate::weights::WeightSource;

const NAMES: DecoderNames =
    DecoderNames { model: "language_model.model.", head: "language_model.lm_head.weight" };

/// Tokens around the features of a tile or frame, and the placeholder token of a feature.
const OPEN: &str = "<img>";
const CLOSE: &str = "</img>";
const CONTEXT: &str = "<IMG_CONTEXT>";

/// Configuration of one checkpoint.
pub struct InternVl {
    config: InternVlConfig,
    context_token: u32,
}

/// Reads configuration, processor and, in the original layout, tokenizer files.
///
/// # Errors
/// Returns an error if fields are missing or invalid, or the vocabulary does not have `<IMG_CONTEXT>`.
pub fn open(dir: &Path, json: &ConfigJson, layout: Layout) -> Result<Roles> {
    let config = InternVlConfig::parse(json, layout)?;
    let media = media::MediaReader::open(dir, &config)?;
    let context_token = match config.context_token {
        Some(id) => id,
        // The original configuration does not contain the token's id.
        None => match Tokenizer::from_dir(dir)?.token_id(CONTEXT) {
            Some(id) if (id as usize) < config.decoder.vocab => id,
            other => {
                return Err(ModelError::Checkpoint {
                    dir: dir.to_path_buf(),
                    what: format!(
                        "{}; expected an id below the vocabulary size {}",
                        other.map_or_else(
                            || format!("the tokenizer has no token {CONTEXT}"),
                            |id| format!("the tokenizer's id of {CONTEXT} is {id}")
                        ),
                        config.decoder.vocab
                    ),
                });
            }
        },
    };
    let model = Arc::new(InternVl { config, context_token });
    let processor = Box::new(processor::InternVlProcessor { model: Arc::clone(&model), media });
    Ok(Roles { processor, architecture: Arc::clone(&model) as _, format: model })
}

impl Format for InternVl {
    fn published_name(&self, key: &str) -> Option<String> {
        if key.ends_with("rotary_emb.inv_freq") || key.ends_with("position_ids") {
            return None;
        }
        if !self.config.layout.rules().as_modules {
            return Some(key.to_owned());
        }
        // Newer versions of `transformers` (4.52 and later) use these names for the modules.
        Some(match key.strip_prefix("model.") {
            Some(rest) => match rest.strip_prefix("language_model.") {
                Some(inner) => format!("{}{inner}", NAMES.model),
                None => rest.to_owned(),
            },
            None if key == "lm_head.weight" => NAMES.head.to_owned(),
            None => key.to_owned(),
        })
    }

    fn splits_experts(&self) -> bool {
        self.config.decoder.experts.is_some()
    }

    fn module_name(&self, published: &str) -> String {
        if !self.config.layout.rules().as_modules {
            return published.to_owned();
        }
        match published.strip_prefix("language_model.") {
            Some(head) if head.starts_with("lm_head") => head.to_owned(),
            _ => match published.strip_prefix(NAMES.model) {
                Some(inner) => format!("model.language_model.{inner}"),
                None => format!("model.{published}"),
            },
        }
    }

    fn layout(&self) -> &'static str {
        self.config.layout.name()
    }

    fn convert(
        &self,
        dir: &Path,
        json: &ConfigJson,
        params: &[Arc<Param>],
        layout: &str,
    ) -> Result<Option<Converted>> {
        convert(dir, json, &self.config, self.context_token, params, layout).map(Some)
    }
}

impl Architecture for InternVl {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.config.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.config.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let tower = VisionTower::build(&self.config, source)?;
        let decoder = Decoder::build(self.config.decoder.clone(), NAMES, source)?;
        Ok(Network { decoder, encoder: Some(Box::new(tower)) })
    }
}
