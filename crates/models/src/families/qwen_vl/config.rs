//! `config.json` of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
//!
//! Text fields may be at the root (as in the published Qwen2-VL and Qwen2.5-VL) or under `text_config` (newer files). Rotary
//! settings may be `rope_scaling` or `rope_parameters`. If a published file omits a field, the class default of `transformers`
//! 5.23 applies, but the sizes of the language model must be present.

use omnigrpo_ops::{Activation, AttentionHeads};

use super::rules::Rules;
use crate::config_json::ConfigJson;
use crate::decoder::DecoderConfig;
use crate::error::Result;

/// Sizes and rules of the vision tower.
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
    /// Activation of the plain feed-forward layer (the gated one uses SiLU).
    pub activation: Activation,
    /// Number of colour channels.
    pub channels: usize,
    /// Side of a patch, px.
    pub patch: usize,
    /// Number of frames in a patch.
    pub temporal_patch: usize,
    /// Number of patches per side that are merged into a token.
    pub merge: usize,
    /// Width of the features, equal to that of the decoder.
    pub out: usize,
    /// Side of an attention window in merged cells, and the indices of the blocks that attend to whole frames instead.
    pub windows: Option<(usize, Vec<usize>)>,
    /// Temporal positions per second of video; `None` if temporal patches are counted instead.
    pub tokens_per_second: Option<f64>,
    /// Number of learned positions per side of a square. They are interpolated to the grid of a picture.
    pub positions: Option<usize>,
    /// Indices of the blocks after which deep features are taken, ascending.
    pub deep: Vec<usize>,
}

impl VisionConfig {
    /// Returns the number of values in a patch row.
    pub fn patch_len(&self) -> usize {
        self.channels * self.temporal_patch * self.patch * self.patch
    }
}

/// A whole Qwen-VL configuration.
#[derive(Clone, Debug)]
pub struct QwenVlConfig {
    /// Rules of the generation.
    pub rules: &'static Rules,
    /// Configuration of the language model.
    pub decoder: DecoderConfig,
    /// Configuration of the vision tower.
    pub vision: VisionConfig,
    /// Placeholder id of a feature of an image.
    pub image_token: u32,
    /// Placeholder id of a feature of a video.
    pub video_token: u32,
    /// Standard deviation of new weights.
    pub initializer_range: f32,
}

impl QwenVlConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is missing or invalid.
    pub fn parse(json: &ConfigJson, rules: &'static Rules) -> Result<Self> {
        let text = json.section("text_config")?.unwrap_or_else(|| json.clone());
        let mut decoder = DecoderConfig::parse(&text, json, rules.text)?;
        let vision = VisionConfig::parse(&json.required_section("vision_config")?, rules)?;
        if vision.out != decoder.hidden {
            let (out, hidden) = (vision.out, decoder.hidden);
            return Err(
                json.error(format!("features have width {out}, but the language model has width {hidden}"))
            );
        }
        decoder.deep = vision.deep.len();
        if decoder.deep >= decoder.layers {
            return Err(json.error(format!(
                "deepstack_visual_indexes lists {} blocks; expected fewer than the {} blocks of the language model",
                decoder.deep, decoder.layers
            )));
        }
        let id = |key: &str, default: u32| {
            let place = if json.get(key).is_some() { json } else { &text };
            place.token(key, default, decoder.vocab)
        };
        Ok(Self {
            rules,
            image_token: id("image_token_id", rules.media_tokens[0])?,
            video_token: id("video_token_id", rules.media_tokens[1])?,
            initializer_range: text.spread("initializer_range", 0.02)?,
            decoder,
            vision,
        })
    }
}

impl VisionConfig {
    /// Reads the section of the tower.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is invalid.
    pub fn parse(json: &ConfigJson, rules: &Rules) -> Result<Self> {
        let (key, default) = rules.width;
        let hidden = json.size(key, Some(default))?;
        let merge = json.size("spatial_merge_size", Some(2))?;
        let patch = json.size("patch_size", Some(rules.patch))?;
        let depth = json.size("depth", Some(rules.depth))?;
        let intermediate = match rules.intermediate {
            None => (hidden as f64 * json.number_in("mlp_ratio", 4.0, 0.01..=1e3)?) as usize,
            default => json.size("intermediate_size", default)?,
        };
        Ok(Self {
            hidden,
            depth,
            heads: json.heads(("num_heads", 16), hidden, 4)?,
            intermediate,
            activation: json.choice("hidden_act", rules.activations[0].0, rules.activations)?,
            channels: json.size(json.either("in_channels", "in_chans"), Some(3))?,
            patch,
            temporal_patch: json.size("temporal_patch_size", Some(2))?,
            merge,
            out: json.size(rules.features, Some(3584))?,
            windows: rules.windows.then(|| windows(json, merge * patch)).transpose()?,
            tokens_per_second: match rules.absolute_time {
                true => Some(json.number_in("tokens_per_second", 4.0, 0.0..=1e3)?),
                false => None,
            },
            positions: rules.positions.then(|| positions(json)).transpose()?,
            deep: if rules.deep { deep(json, depth)? } else { Vec::new() },
        })
    }
}

/// Returns the side of a window in merged cells, and the indices of the blocks that attend to whole frames.
fn windows(json: &ConfigJson, cell_px: usize) -> Result<(usize, Vec<usize>)> {
    let full = json.sizes("fullatt_block_indexes")?.unwrap_or_else(|| vec![7, 15, 23, 31]);
    match json.size("window_size", Some(112))? / cell_px {
        0 => Err(json.error(format!("window_size is smaller than a merged cell of {cell_px} px"))),
        cells => Ok((cells, full)),
    }
}

/// Returns the side of the square of learned positions.
fn positions(json: &ConfigJson) -> Result<usize> {
    let count = json.size("num_position_embeddings", Some(2304))?;
    match count.isqrt() {
        side if side * side == count => Ok(side),
        _ => Err(json.error(format!("num_position_embeddings is {count}; expected a square number"))),
    }
}

/// Returns the indices of the blocks after which deep features are taken.
fn deep(json: &ConfigJson, depth: usize) -> Result<Vec<usize>> {
    let key = "deepstack_visual_indexes";
    let blocks = json.sizes(key)?.unwrap_or_else(|| vec![8, 16, 24]);
    if blocks.is_sorted_by(|a, b| a < b) && blocks.last().is_none_or(|&last| last < depth) {
        return Ok(blocks);
    }
    let what = format!("expected ascending indices of the tower's {depth} blocks, from 0");
    Err(json.error(format!("{key} is {blocks:?}; {what}")))
}
