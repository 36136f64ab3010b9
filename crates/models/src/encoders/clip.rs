//! CLIP: pictures and text in one space.
//!
//! Source: arXiv 2103.00020; `transformers` 5.23 `models/clip/modeling_clip.py`. The model is frozen and used only for scores.
//! Unsupported: pictures of a size other than the configuration's.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::{AttentionLayout, Index, Linear, Norm, Param, Part, Pass, RowMix, Rows, Tape, Var};

use super::siglip::LAYERS;
use super::{Blocks, EncoderSizes, PictureConfig, SizeKeys, constant, load};
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::weights::{FrozenWeights, Init, Scope, WeightSource};

/// A CLIP configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipConfig {
    /// Sizes of pictures and of the vision tower's blocks.
    pub picture: PictureConfig,
    /// Sizes of the text tower's blocks.
    pub text: EncoderSizes,
    /// Rows of the word embedding.
    pub vocab: usize,
    /// Length of the longest text, in tokens.
    pub max_tokens: usize,
    /// End token, whose row represents the text; `None` to use the largest id instead, as the first published models do.
    pub end_token: Option<u32>,
    /// Width of the common space.
    pub projection: usize,
}

impl ClipConfig {
    /// Reads a `config.json` with `vision_config` and `text_config`.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is missing or invalid.
    pub fn parse(json: &ConfigJson) -> Result<Self> {
        let (vision, text) = (json.required_section("vision_config")?, json.required_section("text_config")?);
        let keys = |hidden, intermediate, heads| SizeKeys {
            hidden: ("hidden_size", hidden),
            intermediate: ("intermediate_size", intermediate),
            layers: ("num_hidden_layers", 12),
            heads: ("num_attention_heads", heads),
            activation: ("hidden_act", "quick_gelu"),
            norm_eps: 1e-5,
        };
        let end = match text.get("eos_token_id") {
            None => 49_407,
            Some(value) => value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| text.error(format!("eos_token_id is {value}; expected a token id")))?,
        };
        Ok(Self {
            picture: PictureConfig::parse(&vision, &keys(768, 3072, 12), 32)?,
            text: EncoderSizes::parse(&text, &keys(512, 2048, 8))?,
            vocab: text.size("vocab_size", Some(49_408))?,
            max_tokens: text.size("max_position_embeddings", Some(77))?,
            // The published files contain 2, which is not the end token's id.
            end_token: (end != 2).then_some(end),
            projection: json.size("projection_dim", Some(512))?,
        })
    }
}

/// A CLIP model.
pub struct Clip {
    config: ClipConfig,
    class: Arc<Param>,
    patch_embed: Linear,
    picture_positions: Arc<Param>,
    pre_norm: Norm,
    picture_blocks: Blocks,
    post_norm: Norm,
    picture_projection: Linear,
    words: Arc<Param>,
    text_positions: Arc<Param>,
    text_blocks: Blocks,
    text_norm: Norm,
    text_projection: Linear,
}

impl Clip {
    /// Builds the model. Names below `prefix` are those of `CLIPModel`.
    pub fn build(
        config: ClipConfig,
        prefix: &str,
        part: Part,
        source: &mut dyn WeightSource,
    ) -> Result<Self> {
        let picture = &config.picture;
        let (c, eps) = (picture.sizes.hidden, picture.sizes.norm_eps);
        let vision = format!("{prefix}vision_model.");
        let mut weights = Scope::new(&mut *source, &vision, part);
        let class = weights.get("embeddings.class_embedding", &[c], Init::Normal)?;
        let patch_embed = weights.convolution("embeddings.patch_embedding", &picture.patch_shape(), false)?;
        let rows = picture.num_patches() + 1;
        let picture_positions =
            weights.get("embeddings.position_embedding.weight", &[rows, c], Init::Normal)?;
        // Every published checkpoint misspells this name.
        let pre_norm = weights.layer_norm("pre_layrnorm", c, eps)?;
        let picture_blocks = Blocks::build(&picture.sizes, &LAYERS, &mut weights)?;
        let post_norm = weights.layer_norm("post_layernorm", c, eps)?;

        let (t, eps) = (config.text.hidden, config.text.norm_eps);
        let text = format!("{prefix}text_model.");
        let mut weights = Scope::new(&mut *source, &text, part);
        let words = weights.get("embeddings.token_embedding.weight", &[config.vocab, t], Init::Normal)?;
        let text_positions =
            weights.get("embeddings.position_embedding.weight", &[config.max_tokens, t], Init::Normal)?;
        let text_blocks = Blocks::build(&config.text, &LAYERS, &mut weights)?;
        let text_norm = weights.layer_norm("final_layer_norm", t, eps)?;

        let mut weights = Scope::new(source, prefix, part);
        let picture_projection = weights.linear("visual_projection", config.projection, c, false)?;
        let text_projection = weights.linear("text_projection", config.projection, t, false)?;
        Ok(Self {
            class,
            patch_embed,
            picture_positions,
            pre_norm,
            picture_blocks,
            post_norm,
            picture_projection,
            words,
            text_positions,
            text_blocks,
            text_norm,
            text_projection,
            config,
        })
    }

    /// Loads a directory.
    ///
    /// # Errors
    /// Returns an error if files are unreadable, the architecture is another one or tensors do not fit.
    pub fn load(dir: &Path, how: impl Into<FrozenWeights>) -> Result<Self> {
        let name = |key: &str| {
            let weight = key != "logit_scale" && !key.ends_with("embeddings.position_ids");
            weight.then(|| key.to_owned())
        };
        load(dir, how, "CLIP", name, |json, source| {
            Self::build(ClipConfig::parse(json)?, "", Part::Vision, source)
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ClipConfig {
        &self.config
    }

    /// Maps normalised pixels `[n, 3, side, side]` to features `[n, p]`, which are not normalised.
    ///
    /// # Errors
    /// Returns an error if the pixels have another size.
    pub fn picture_features(&self, pixels: &[f32], n: usize, pass: &Pass) -> Result<Rows> {
        let picture = &self.config.picture;
        let rows = picture.num_patches() + 1;
        let tape = &mut Tape::off();
        let x = constant(picture.patch_rows(pixels, n, 1)?, n * rows, picture.patch_len(), pass)?;
        // The patch layer has no bias, so it maps a row of zeros to zeros. The class token is added to that row below.
        let x = tape.linear(&x, &self.patch_embed, pass)?;
        let class = RowMix::of_ids((0..n * rows).map(|i| (i % rows == 0).then_some(0)));
        let ids = RowMix::select((0..n * rows).map(|i| (i % rows) as u32).collect());
        let x = tape.add_rows(&x, &self.class, &Arc::new(class.into()))?;
        let x = tape.add_rows(&x, &self.picture_positions, &Arc::new(ids.into()))?;
        let x = tape.norm(&x, &self.pre_norm)?;
        let layout = AttentionLayout::full_blocks(&vec![rows; n]);
        let x = self.picture_blocks.forward(x, picture.sizes.layers, layout, pass, tape)?;
        let first: Index = (0..n).map(|i| i * rows).collect::<Vec<_>>().into();
        self.readout(&x, &first, &self.post_norm, &self.picture_projection, pass)
    }

    /// Normalises and projects the selected rows.
    fn readout(&self, x: &Var, rows: &Index, norm: &Norm, projection: &Linear, pass: &Pass) -> Result<Rows> {
        let tape = &mut Tape::off();
        let x = tape.norm(&Var::constant(x.rows().select(rows)?), norm)?;
        Ok(tape.linear(&x, projection, pass)?.into_rows())
    }

    /// Maps token ids with start and end tokens to features `[n, p]`, which are not normalised.
    ///
    /// # Errors
    /// Returns an error if there is no text, a text is empty, too long or without an end token, or an id is outside the
    /// vocabulary.
    pub fn text_features(&self, texts: &[&[u32]], pass: &Pass) -> Result<Rows> {
        let config = &self.config;
        let mut ends = Vec::with_capacity(texts.len());
        let mut total = 0;
        for ids in texts {
            if ids.is_empty() || ids.len() > config.max_tokens {
                let what =
                    format!("CLIP: a text has {} tokens; expected 1 to {}", ids.len(), config.max_tokens);
                return Err(ModelError::shape(what));
            }
            let end = match config.end_token {
                Some(end) => ids.iter().position(|&id| id == end),
                None => ids.iter().enumerate().rev().max_by_key(|(_, id)| **id).map(|(i, _)| i),
            };
            let end = end.ok_or_else(|| {
                ModelError::shape(format!(
                    "CLIP: a text does not contain the end token {:?}",
                    config.end_token
                ))
            })?;
            ends.push(total + end);
            total += ids.len();
        }
        if texts.is_empty() {
            return Err(ModelError::shape("CLIP: no text was given"));
        }
        let words = RowMix::select(texts.iter().flat_map(|ids| ids.iter().copied()).collect());
        let positions = RowMix::select(texts.iter().flat_map(|ids| 0..ids.len() as u32).collect());
        let tape = &mut Tape::off();
        let x = Var::constant(Rows::zeros(pass.device, total, config.text.hidden));
        let x = tape.add_rows(&x, &self.words, &Arc::new(words.into()))?;
        let x = tape.add_rows(&x, &self.text_positions, &Arc::new(positions.into()))?;
        let groups: Vec<_> = texts.iter().map(|ids| (ids.len(), Vec::new())).collect();
        let layout = AttentionLayout::groups(&groups);
        let x = self.text_blocks.forward(x, config.text.layers, layout, pass, tape)?;
        self.readout(&x, &ends.into(), &self.text_norm, &self.text_projection, pass)
    }
}
