//! `config.json` of SmolVLM and Idefics3.
//!
//! Published files omit sizes that equal the defaults of the `transformers` classes: heads of the language model, and width,
//! heads, depth or feed-forward width of the tower. `pad_token_id` of the whole configuration is outside the vocabulary and not
//! used; that of `text_config` applies. `vision_config.size` is not used either: the image processor has its own sizes.

use crate::config_json::ConfigJson;
use crate::decoder::{DecoderConfig, TextDefaults};
use crate::encoders::siglip::SiglipConfig;
use crate::encoders::{PictureConfig, SizeKeys};
use crate::error::Result;

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct SmolVlmConfig {
    /// Configuration of the language model, a Llama.
    pub decoder: DecoderConfig,
    /// Configuration of the tower; the side of its pictures is that of a tile.
    pub tower: SiglipConfig,
    /// Number of patches per side that become one token.
    pub merge: usize,
    /// Placeholder id of a feature.
    pub image_token: u32,
    /// Whether the published processor reads videos; that of Idefics3, which SmolVLM v1 has, reads images only.
    pub videos: bool,
    /// Standard deviation of new weights.
    pub initializer_range: f32,
}

impl SmolVlmConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is missing or invalid.
    pub fn parse(json: &ConfigJson) -> Result<Self> {
        let text = json.required_section("text_config")?;
        text.only("model_type", "llama")?;
        let decoder = DecoderConfig::parse(&text, json, TextDefaults::LLAMA)?;
        let vision = json.required_section("vision_config")?;
        let picture = PictureConfig::parse(&vision, &SizeKeys::IDEFICS3, 32)?;
        vision.only("num_channels", 3)?;
        let merge = json.size("scale_factor", Some(2))?;
        let grid = picture.side_px / picture.patch_px;
        if !grid.is_multiple_of(merge) {
            let what = format!("scale_factor is {merge}, but a tile has {grid} × {grid} patches");
            return Err(json.error(format!("{what}; expected a multiple of scale_factor along each side")));
        }
        let videos = json.text("model_type")? != Some("idefics3");
        Ok(Self {
            image_token: json.token("image_token_id", 128_257, decoder.vocab)?,
            initializer_range: text.spread("initializer_range", 0.02)?,
            tower: SiglipConfig { picture, head: false, bucketed: true },
            decoder,
            merge,
            videos,
        })
    }

    /// Returns the number of tokens of a tile in the prompt.
    pub fn tokens_per_tile(&self) -> usize {
        self.tower.picture.num_patches() / (self.merge * self.merge)
    }
}
