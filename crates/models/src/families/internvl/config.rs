//! `config.json` of InternVL in both layouts.
//!
//! If a published file omits a field, the default of the layout's own class applies. The defaults differ: without further fields,
//! a tower has RMS norms in the original layout and layer norms in hf.

use omnigrpo_media::tiles::TileProcessor;
use omnigrpo_ops::{Activation, AttentionHeads};

use super::layout::Layout;
use super::template;
use crate::config_json::ConfigJson;
use crate::decoder::{DecoderConfig, TextDefaults};
use crate::encoders::ACTIVATIONS;
use crate::error::Result;
use crate::families::TextClass;

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
    /// neither Qwen2 nor Qwen3.
    pub fn parse(json: &ConfigJson, layout: Layout) -> Result<Self> {
        let text = json.required_section(layout.rules().text)?;
        let model_type = text.text("model_type")?.unwrap_or("qwen2");
        let architecture = text.get("architectures").and_then(|v| v.as_array()?.first()?.as_str());
        let classes = [TextClass::QWEN2, TextClass::QWEN3, TextClass::QWEN3_MOE];
        let named = |class: &TextClass| {
            class.model_type == model_type && architecture.is_none_or(|name| name == class.architecture)
        };
        let class = match classes.into_iter().find(named) {
            Some(class) => class.defaults,
            None => {
                let architecture = architecture.unwrap_or("of unknown architecture");
                let what = "expected Qwen2 or Qwen3";
                return Err(
                    json.error(format!("the language model is {architecture} ({model_type}); {what}"))
                );
            }
        };
        let class = TextDefaults { tied: layout.rules().tied, ..class };
        let ratio = json.number("downsample_ratio", 0.5)?;
        let merge = (1.0 / ratio) as usize;
        if !(1..=64).contains(&merge) || merge as f64 * ratio != 1.0 {
            return Err(json.error(format!("downsample_ratio is {ratio}; expected 1/n")));
        }
        let vision = VisionConfig::parse(&json.required_section("vision_config")?, layout)?;
        let side_px = (vision.grid * vision.patch) as u32;
        let mut this = Self {
            layout,
            projector_activation: json.choice("projector_hidden_act", "gelu", &ACTIVATIONS)?,
            initializer_range: text.spread("initializer_range", 0.02)?,
            decoder: DecoderConfig::parse(&text, json, class)?,
            vision,
            merge,
            tiles: TileProcessor { side_px, ..TileProcessor::default() },
            context_token: None,
            template: None,
        };
        match layout {
            Layout::Original => read_original(json, &mut this)?,
            Layout::Hf => read_hf(json, &mut this)?,
        }
        let (side, tokens) = (this.tiles.side_px, this.tokens_per_tile());
        this.check_side(side as usize).map_err(|what| json.error(what))?;
        if json.size("image_seq_length", Some(tokens))? != tokens {
            let what = format!("image_seq_length differs from the {tokens} tokens of a tile of {side} px");
            return Err(json.error(what));
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
    pub fn tokens_per_tile(&self) -> usize {
        let side = self.tiles.side_px as usize / self.vision.patch / self.merge;
        side * side
    }
}

/// Reads tiling and template, which only the original layout has in `config.json`.
fn read_original(json: &ConfigJson, config: &mut InternVlConfig) -> Result<()> {
    json.only("select_layer", -1)?;
    json.only("pad2square", false)?;
    if json.text("ps_version")? != Some("v2") {
        return Err(json.error("ps_version is not \"v2\"; the older pixel shuffle is not supported"));
    }
    let tiles = &mut config.tiles;
    tiles.side_px = json.size("force_image_size", Some(tiles.side_px as usize))? as u32;
    tiles.thumbnail = json.boolean("use_thumbnail", false)?;
    tiles.max_tiles = 1;
    if json.boolean("dynamic_image_size", false)? {
        tiles.min_tiles = json.size("min_dynamic_patch", Some(1))? as u32;
        tiles.max_tiles = json.size("max_dynamic_patch", Some(6))? as u32;
    }
    let names = template::NAMES.map(|(name, ..)| (name, name));
    if json.get("template").is_some() {
        config.template = template::original(json.choice("template", "", &names)?);
    }
    Ok(())
}

/// Reads the placeholder and the size of tiles of the hf layout. Its processor may cut tiles of another size than the tower's. The
/// number of tokens determines that size.
fn read_hf(json: &ConfigJson, config: &mut InternVlConfig) -> Result<()> {
    json.only("vision_feature_layer", -1)?;
    json.only("vision_feature_select_strategy", "default")?;
    let key = json.either("image_token_id", "image_token_index");
    config.context_token = Some(json.token(key, 151_667, config.decoder.vocab)?);
    if json.get("image_seq_length").is_some() {
        let tokens = json.size("image_seq_length", None)? as f64;
        config.tiles.side_px = (tokens.sqrt() as usize * config.vision.patch * config.merge) as u32;
    }
    Ok(())
}

impl VisionConfig {
    fn parse(json: &ConfigJson, layout: Layout) -> Result<Self> {
        let rules = layout.rules();
        let [width, depth, heads, intermediate] = rules.sizes;
        let hidden = json.size("hidden_size", Some(width))?;
        let image = json.side("image_size", rules.image_px)?;
        let patch = json.side("patch_size", 14)?;
        if image < patch {
            return Err(json.error(format!("image_size is {image}, smaller than patch_size {patch}")));
        }
        json.only("num_channels", 3)?;
        json.only("use_mask_token", false)?;
        json.only("use_mean_pooling", true)?;
        json.only("use_absolute_position_embeddings", true)?;
        let norm_eps = json.epsilon("layer_norm_eps", 1e-6)?;
        let (key, default) = rules.qk_norm;
        Ok(Self {
            hidden,
            depth: json.size("num_hidden_layers", Some(depth))?,
            heads: json.heads(("num_attention_heads", heads), hidden, 1)?,
            intermediate: json.size("intermediate_size", Some(intermediate))?,
            activation: json.choice("hidden_act", "gelu", &ACTIVATIONS)?,
            patch,
            grid: image / patch,
            rms: json.choice("norm_type", rules.norm, &[("rms_norm", true), ("layer_norm", false)])?,
            norm_eps,
            qk_norm_eps: json.boolean(key, default)?.then_some(rules.qk_norm_eps.unwrap_or(norm_eps)),
            qkv_bias: json.boolean(rules.qkv_bias, false)?,
        })
    }
}
