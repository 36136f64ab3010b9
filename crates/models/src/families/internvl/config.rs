//! `config.json` of InternVL in both layouts.
//!
//! If a published file omits a field, the default of the layout's own class applies. The defaults differ: without further fields,
//! a tower has RMS norms in the original layout and layer norms in hf.

use omnigrpo_media::tiles::TileProcessor;
use omnigrpo_ops::{Activation, AttentionHeads};

use super::template;
use crate::config_json::ConfigJson;
use crate::decoder::{DecoderConfig, TextDefaults};
use crate::error::Result;

/// Layout of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `InternVLChatModel`: `vision_model`, `mlp1`, one projection for query, key and value.
    Original,
    /// `InternVLForConditionalGeneration`: `vision_tower`, `multi_modal_projector`, three projections.
    Hf,
}

impl Layout {
    /// Returns the layout's name in [`Model::save_as`](crate::Model::save_as).
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Original => "original",
            Self::Hf => "hf",
        }
    }

    /// Returns the layout of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Original, Self::Hf].into_iter().find(|layout| layout.name() == name)
    }
}

/// Sizes and rules of the InternViT tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Width of the tower.
    pub hidden: usize,
    /// Number of blocks.
    pub depth: usize,
    /// Attention heads; queries, keys and values have the same number.
    pub heads: AttentionHeads,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Activation of the feed-forward layer.
    pub activation: Activation,
    /// Side of a patch, px.
    pub patch: usize,
    /// Number of positions per side in the checkpoint's table.
    pub grid: usize,
    /// Whether norms are RMS norms instead of layer norms.
    pub rms: bool,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// Epsilon of the norms of queries and keys, if these are normalised.
    pub qk_norm_eps: Option<f32>,
    /// Whether query, key and value projections have biases.
    pub qkv_bias: bool,
}

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct InternVlConfig {
    /// Layout of the checkpoint.
    pub layout: Layout,
    /// Configuration of the language model.
    pub decoder: DecoderConfig,
    /// Configuration of the vision tower.
    pub vision: VisionConfig,
    /// Activation of the projector.
    pub projector_activation: Activation,
    /// Number of patches per side that become one token.
    pub merge: usize,
    /// Tiling settings of `config.json`. In the hf layout they are in the processor file instead.
    pub tiles: TileProcessor,
    /// Placeholder id of a feature, if `config.json` contains it.
    pub context_token: Option<u32>,
    /// Name of the chat template in `config.json`.
    pub template: Option<String>,
    /// Standard deviation of new weights.
    pub initializer_range: f32,
}

impl InternVlConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is missing or invalid. Also returns an error if the language model is
    /// neither Qwen2 nor dense Qwen3.
    pub fn parse(json: &ConfigJson, layout: Layout) -> Result<Self> {
        let text = json.required_section(if layout == Layout::Hf { "text_config" } else { "llm_config" })?;
        let model_type = text.text("model_type")?.unwrap_or("qwen2");
        let architecture = text.get("architectures").and_then(|v| v.as_array()?.first()?.as_str());
        let class = match (model_type, architecture) {
            ("qwen2", None | Some("Qwen2ForCausalLM")) => TextDefaults::QWEN2,
            ("qwen3", None | Some("Qwen3ForCausalLM")) => TextDefaults::QWEN3,
            (_, architecture) => {
                return Err(json.error(format!(
                    "the language model is {} ({model_type}); expected Qwen2 or dense Qwen3",
                    architecture.unwrap_or("of unknown architecture")
                )));
            }
        };
        let class = TextDefaults { tied: layout == Layout::Hf, ..class };
        let decoder = DecoderConfig::parse(&text, json, class)?;
        let ratio = json.number("downsample_ratio", 0.5)?;
        let merge = (1.0 / ratio) as usize;
        if !(1..=64).contains(&merge) || merge as f64 * ratio != 1.0 {
            return Err(json.error(format!("downsample_ratio is {ratio}; expected 1/n")));
        }
        let vision_json = json.required_section("vision_config")?;
        let vision = VisionConfig::parse(&vision_json, layout)?;
        let image_px = vision.grid * vision.patch;
        let mut tiles = TileProcessor { side_px: image_px as u32, ..TileProcessor::default() };
        let only = |key: &str, expected: serde_json::Value| match json.get(key) {
            Some(value) if *value != expected => {
                Err(json.error(format!("{key} is {value}; only {expected} is supported")))
            }
            _ => Ok(()),
        };
        let mut context_token = None;
        let mut template = None;
        match layout {
            Layout::Original => {
                only("select_layer", (-1).into())?;
                only("pad2square", false.into())?;
                if json.text("ps_version")? != Some("v2") {
                    return Err(
                        json.error("ps_version is not \"v2\"; the older pixel shuffle is not supported")
                    );
                }
                tiles.side_px = json.size("force_image_size", Some(image_px))? as u32;
                tiles.thumbnail = json.boolean("use_thumbnail", false)?;
                if json.boolean("dynamic_image_size", false)? {
                    tiles.min_tiles = json.size("min_dynamic_patch", Some(1))? as u32;
                    tiles.max_tiles = json.size("max_dynamic_patch", Some(6))? as u32;
                } else {
                    tiles.max_tiles = 1;
                }
                if let Some(name) = json.text("template")? {
                    template = Some(template::original(name).ok_or_else(|| {
                        json.error(format!(
                            "template is {name:?}; expected one of {}",
                            template::NAMES.map(|(name, ..)| name).join(", ")
                        ))
                    })?);
                }
            }
            Layout::Hf => {
                only("vision_feature_layer", (-1).into())?;
                only("vision_feature_select_strategy", "default".into())?;
                let key =
                    if json.get("image_token_id").is_some() { "image_token_id" } else { "image_token_index" };
                let id = json.id(key, decoder.vocab)?.unwrap_or(151_667);
                if id as usize >= decoder.vocab {
                    let what = format!("{key} is missing, and its default {id} is outside the vocabulary");
                    return Err(json.error(what));
                }
                context_token = Some(id);
            }
        }
        // The processor of the hf layout may cut tiles of another size than the tower's. The number of tokens determines that
        // size.
        let seq_length =
            json.get("image_seq_length").map(|_| json.size("image_seq_length", None)).transpose()?;
        if let (Layout::Hf, Some(tokens)) = (layout, seq_length) {
            tiles.side_px = ((tokens as f64).sqrt() as usize * vision.patch * merge) as u32;
        }
        let this = Self {
            layout,
            projector_activation: activation(json, "projector_hidden_act")?,
            initializer_range: text.spread("initializer_range", 0.02)?,
            decoder,
            vision,
            merge,
            tiles,
            context_token,
            template,
        };
        this.check_side(this.tiles.side_px as usize).map_err(|what| json.error(what))?;
        if let Some(expected) = seq_length
            && expected != this.tokens_per_tile()
        {
            return Err(json.error(format!(
                "image_seq_length is {expected}; a tile of {} px has {} tokens",
                this.tiles.side_px,
                this.tokens_per_tile()
            )));
        }
        Ok(this)
    }

    /// Checks that tiles of this side fit patches and merging. The error text describes the problem.
    pub(super) fn check_side(&self, side_px: usize) -> std::result::Result<(), String> {
        let factor = self.vision.patch * self.merge;
        if side_px == 0 || !side_px.is_multiple_of(factor) {
            return Err(format!(
                "the tile size of {side_px} px is not a multiple of {factor} px, the side of a token"
            ));
        }
        Ok(())
    }

    /// Returns the number of tokens of a tile in the prompt.
    #[must_use]
    pub fn tokens_per_tile(&self) -> usize {
        let side = self.tiles.side_px as usize / self.vision.patch / self.merge;
        side * side
    }
}

fn activation(json: &ConfigJson, key: &str) -> Result<Activation> {
    match json.text(key)? {
        None | Some("gelu") => Ok(Activation::GeluErf),
        Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("quick_gelu") => Ok(Activation::QuickGelu),
        Some("silu") => Ok(Activation::Silu),
        Some(other) => {
            Err(json
                .error(format!("{key} is {other:?}; expected gelu, gelu_pytorch_tanh, quick_gelu or silu")))
        }
    }
}

impl VisionConfig {
    fn parse(json: &ConfigJson, layout: Layout) -> Result<Self> {
        let original = layout == Layout::Original;
        let default =
            |original_class: usize, hf_class: usize| Some(if original { original_class } else { hf_class });
        let hidden = json.size("hidden_size", default(3200, 1024))?;
        let heads = json.size("num_attention_heads", default(25, 16))?;
        if !hidden.is_multiple_of(heads) {
            return Err(json.error(format!("a width of {hidden} cannot be split into {heads} heads")));
        }
        let image = json.side("image_size", if original { 224 } else { 448 })?;
        let patch = json.side("patch_size", 14)?;
        if image < patch {
            return Err(json.error(format!("image_size is {image}, smaller than patch_size {patch}")));
        }
        let channels = json.size("num_channels", Some(3))?;
        if channels != 3 {
            return Err(json.error(format!("num_channels is {channels}; expected 3")));
        }
        for (key, expected) in [
            ("use_mask_token", false),
            ("use_mean_pooling", true),
            ("use_absolute_position_embeddings", true),
        ] {
            if json.boolean(key, expected)? != expected {
                return Err(json.error(format!("{key} is {}; only {expected} is supported", !expected)));
            }
        }
        let rms = match json.text("norm_type")? {
            None => original,
            Some("rms_norm") => true,
            Some("layer_norm") => false,
            Some(other) => {
                return Err(json.error(format!("norm_type is {other:?}; expected rms_norm or layer_norm")));
            }
        };
        let norm_eps = json.epsilon("layer_norm_eps", 1e-6)?;
        let qk_norm = json.boolean(if original { "qk_normalization" } else { "use_qk_norm" }, original)?;
        Ok(Self {
            hidden,
            depth: json.size("num_hidden_layers", default(48, 24))?,
            heads: AttentionHeads { q: heads, kv: heads, dim: hidden / heads },
            intermediate: json.size("intermediate_size", default(12800, 4096))?,
            activation: activation(json, "hidden_act")?,
            patch,
            grid: image / patch,
            rms,
            norm_eps,
            // The class of the hf layout does not pass its epsilon to these two norms.
            qk_norm_eps: qk_norm.then_some(if original { norm_eps } else { 1e-6 }),
            qkv_bias: json.boolean(if original { "qkv_bias" } else { "attention_bias" }, false)?,
        })
    }
}
