//! `config.json` of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
//!
//! Text fields may be at the root (as in the published Qwen2-VL and Qwen2.5-VL) or under `text_config` (newer files). Rotary
//! settings may be `rope_scaling` or `rope_parameters`. If a published file omits a field, the class default of `transformers`
//! 5.23 applies, but the sizes of the language model must be present.

use omnigrpo_ops::{Activation, AttentionHeads};

use crate::config_json::ConfigJson;
use crate::decoder::{DecoderConfig, TextDefaults};
use crate::error::Result;

/// Generation of the vision tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// Layer norm, plain feed-forward, full attention inside a frame.
    Qwen2,
    /// RMS norm, SwiGLU, windows, absolute time in positions.
    Qwen25,
    /// Like [`Self::Qwen2`], with learned positions in addition to the rotation, biases in the patch layer, and deep features.
    /// The prompt contains the times of video frames as text.
    Qwen3,
}

impl Generation {
    /// Returns whether the prompt contains the times of a video's frames as text. Each slice of frames is then a separate
    /// picture.
    pub fn times_as_text(self) -> bool {
        self == Self::Qwen3
    }

    /// Returns whether files name weights as the modules of `transformers` do.
    pub fn named_as_modules(self) -> bool {
        self == Self::Qwen3
    }
}

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
    #[must_use]
    pub fn patch_len(&self) -> usize {
        self.channels * self.temporal_patch * self.patch * self.patch
    }
}

/// A whole Qwen-VL configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct QwenVlConfig {
    /// Generation of the vision tower.
    pub generation: Generation,
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
    pub fn parse(json: &ConfigJson, generation: Generation) -> Result<Self> {
        let text = json.section("text_config")?.unwrap_or_else(|| json.clone());
        let class = match generation {
            Generation::Qwen3 => TextDefaults::QWEN3_VL,
            _ => TextDefaults::QWEN_VL,
        };
        let mut decoder = DecoderConfig::parse(&text, json, class)?;
        let vision = Self::vision(&json.required_section("vision_config")?, generation, decoder.hidden)?;
        decoder.deep = vision.deep.len();
        if decoder.deep >= decoder.layers {
            return Err(json.error(format!(
                "deepstack_visual_indexes lists {} blocks; expected fewer than the {} blocks of the language model",
                decoder.deep, decoder.layers
            )));
        }
        let id = |key: &str, default: u32| -> Result<u32> {
            let given = match json.id(key, decoder.vocab)? {
                None => text.id(key, decoder.vocab)?,
                given => given,
            };
            match given.unwrap_or(default) {
                id if (id as usize) < decoder.vocab => Ok(id),
                id => Err(json.error(format!(
                    "{key} is missing, and its default {id} is outside the vocabulary of {}",
                    decoder.vocab
                ))),
            }
        };
        Ok(Self {
            generation,
            image_token: id("image_token_id", 151_655)?,
            video_token: id("video_token_id", 151_656)?,
            initializer_range: text.spread("initializer_range", 0.02)?,
            decoder,
            vision,
        })
    }

    fn vision(json: &ConfigJson, generation: Generation, decoder_hidden: usize) -> Result<VisionConfig> {
        let (old, new) = (generation == Generation::Qwen2, generation == Generation::Qwen3);
        let hidden = match generation {
            Generation::Qwen2 => json.size("embed_dim", Some(1280))?,
            Generation::Qwen25 => json.size("hidden_size", Some(3584))?,
            Generation::Qwen3 => json.size("hidden_size", Some(1152))?,
        };
        let heads = json.size("num_heads", Some(16))?;
        let dim = hidden / heads;
        if heads * dim != hidden || !dim.is_multiple_of(4) {
            return Err(
                json.error(format!("a width of {hidden} cannot be split into {heads} heads of 4n columns"))
            );
        }
        let merge = json.size("spatial_merge_size", Some(2))?;
        let patch = json.size("patch_size", Some(if new { 16 } else { 14 }))?;
        let out = match old {
            true => json.size("hidden_size", Some(3584))?,
            false => json.size("out_hidden_size", Some(3584))?,
        };
        if out != decoder_hidden {
            return Err(json.error(format!(
                "features have width {out}, but the language model has width {decoder_hidden}"
            )));
        }
        let activation = match (generation, json.text("hidden_act")?) {
            (Generation::Qwen2, None | Some("quick_gelu")) => Activation::QuickGelu,
            (Generation::Qwen2 | Generation::Qwen3, Some("gelu")) => Activation::GeluErf,
            (Generation::Qwen25, None | Some("silu")) => Activation::Silu,
            (Generation::Qwen3, None | Some("gelu_pytorch_tanh")) => Activation::GeluTanh,
            (_, Some(other)) => {
                return Err(json.error(format!("hidden_act is {other:?}, which this tower does not support")));
            }
        };
        let windows = if generation != Generation::Qwen25 {
            None
        } else {
            let cells = json.size("window_size", Some(112))? / merge / patch;
            if cells == 0 {
                return Err(
                    json.error(format!("window_size is smaller than a merged cell of {} px", merge * patch))
                );
            }
            let full = json.sizes("fullatt_block_indexes")?.unwrap_or_else(|| vec![7, 15, 23, 31]);
            Some((cells, full))
        };
        let intermediate = match old {
            true => match json.number("mlp_ratio", 4.0)? {
                ratio if (0.01..=1e3).contains(&ratio) => (hidden as f64 * ratio) as usize,
                ratio => {
                    return Err(
                        json.error(format!("mlp_ratio is {ratio:e}; expected a number from 0.01 to 1000"))
                    );
                }
            },
            false => json.size("intermediate_size", Some(if new { 4304 } else { 3420 }))?,
        };
        let depth = json.size("depth", Some(if new { 27 } else { 32 }))?;
        let (positions, deep) = match new {
            true => (Some(Self::positions(json)?), Self::deep(json, depth)?),
            false => (None, Vec::new()),
        };
        let channels_key = if json.get("in_channels").is_some() { "in_channels" } else { "in_chans" };
        Ok(VisionConfig {
            hidden,
            depth,
            heads: AttentionHeads { q: heads, kv: heads, dim },
            intermediate,
            activation,
            channels: json.size(channels_key, Some(3))?,
            patch,
            temporal_patch: json.size("temporal_patch_size", Some(2))?,
            merge,
            out,
            windows,
            tokens_per_second: match json.number("tokens_per_second", 4.0)? {
                _ if old || new => None,
                rate if (0.0..=1e3).contains(&rate) => Some(rate),
                rate => {
                    let what = "expected a number from 0 to 1000";
                    return Err(json.error(format!("tokens_per_second is {rate:e}; {what}")));
                }
            },
            positions,
            deep,
        })
    }

    /// Returns the side of the square of learned positions.
    fn positions(json: &ConfigJson) -> Result<usize> {
        let count = json.size("num_position_embeddings", Some(2304))?;
        match count.isqrt() {
            side if side * side == count => Ok(side),
            _ => {
                let what = "expected a square number";
                Err(json.error(format!("num_position_embeddings is {count}; {what}")))
            }
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
}
