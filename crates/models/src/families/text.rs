//! Language models that read text only: Qwen2 and Qwen2.5, Qwen3 with and without experts, Llama 2 and 3 and SmolLM2, and dense
//! Qwen3.5 without its tower.
//!
//! Source: `transformers` 5.23, `models/{qwen2,qwen3,qwen3_moe,qwen3_5,llama}`. The class of a checkpoint is in `model_type`; sizes are in
//! `config.json` itself.

use std::sync::Arc;

use super::{Architecture, Format, Network, Processor, Roles};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames, TextDefaults};
use crate::error::Result;
use crate::weights::WeightSource;

/// A class of language models.
pub(crate) struct TextClass {
    /// `model_type` of the configuration.
    pub model_type: &'static str,
    /// Name of the class with an output head.
    pub architecture: &'static str,
    /// Fixed values and defaults of the class.
    pub defaults: TextDefaults,
}

impl TextClass {
    /// Qwen2 and Qwen2.5.
    pub const QWEN2: Self =
        Self { model_type: "qwen2", architecture: "Qwen2ForCausalLM", defaults: TextDefaults::QWEN2 };
    /// Dense Qwen3.
    pub const QWEN3: Self =
        Self { model_type: "qwen3", architecture: "Qwen3ForCausalLM", defaults: TextDefaults::QWEN3 };
    /// Dense Qwen3.5 without a tower.
    pub const QWEN35: Self = Self {
        model_type: "qwen3_5_text",
        architecture: "Qwen3_5ForCausalLM",
        defaults: TextDefaults::QWEN35,
    };
    /// Llama.
    pub const LLAMA: Self =
        Self { model_type: "llama", architecture: "LlamaForCausalLM", defaults: TextDefaults::LLAMA };
    /// Qwen3 with experts.
    pub const QWEN3_MOE: Self = Self {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        defaults: TextDefaults::QWEN3_MOE,
    };
    /// Dense classes that GGUF files and classifiers have.
    pub const ALL: [Self; 3] = [Self::QWEN2, Self::QWEN3, Self::LLAMA];

    /// Returns the dense class with this `model_type`.
    pub fn named(model_type: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.model_type == model_type)
    }
}

/// Sizes and rules of a checkpoint.
struct Text {
    decoder: DecoderConfig,
    initializer_range: f32,
    carried: Option<&'static str>,
}

/// Reads the configuration.
///
/// # Errors
/// Returns an error if fields are missing or invalid, or the checkpoint is of another class.
pub fn open(json: &ConfigJson, class: &TextClass) -> Result<Roles> {
    json.only("model_type", class.model_type)?;
    json.only("architectures", vec![class.architecture])?;
    let decoder = DecoderConfig::parse(json, json, class.defaults)?;
    let initializer_range = json.spread("initializer_range", 0.02)?;
    let text = Arc::new(Text { decoder, initializer_range, carried: class.defaults.carried() });
    Ok(Roles { processor: Box::new(TextProcessor), architecture: Arc::clone(&text) as _, format: text })
}

struct TextProcessor;

impl Processor for TextProcessor {}

impl Format for Text {
    fn published_name(&self, key: &str) -> Option<String> {
        (self.carried(key).is_none() && !key.ends_with(".rotary_emb.inv_freq")).then(|| key.to_owned())
    }

    fn carried(&self, key: &str) -> Option<String> {
        self.carried.filter(|prefix| key.starts_with(prefix)).map(|_| key.to_owned())
    }

    fn splits_experts(&self) -> bool {
        self.decoder.experts.is_some()
    }
}

impl Architecture for Text {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let names = DecoderNames { model: "model.", head: "lm_head.weight" };
        let decoder = Decoder::build(self.decoder.clone(), names, source)?;
        Ok(Network { decoder, encoder: None })
    }
}
