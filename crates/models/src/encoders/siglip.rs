//! The SigLIP vision tower.
//!
//! Each patch is a token; there is no class token. Source: arXiv 2303.15343; `transformers` 5.23
//! `models/siglip/modeling_siglip.py`. The attention-pooling head is loaded, so that a saved checkpoint is complete, but never
//! run: families use the tokens. Unsupported: pictures of a size other than the configuration's.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::{AttentionLayout, Linear, Norm, Param, Part, Pass, RowMix, Tape, Var};

use super::{Blocks, LayerNames, PictureConfig, SizeKeys, constant, load};
use crate::block::NormOrder;
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::weights::{Init, Scope, WeightDtype, WeightSource};

/// Names of the blocks of SigLIP and of both towers of CLIP.
pub(crate) const LAYERS: LayerNames = LayerNames {
    prefix: "encoder.layers.",
    order: NormOrder::Pre,
    norm1: "layer_norm1",
    qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    out: "self_attn.out_proj",
    norm2: "layer_norm2",
    fc: ["mlp.fc1", "mlp.fc2"],
    key_bias: true,
};

/// A SigLIP vision configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct SiglipConfig {
    /// Sizes of pictures and blocks.
    pub picture: PictureConfig,
    /// Whether the checkpoint has the pooling head.
    pub head: bool,
    /// Whether the position of a patch is the nearest one below its place along the side, computed in f32 as in Idefics3. For some
    /// sizes, rounding then repeats a position.
    pub bucketed: bool,
}

impl SiglipConfig {
    /// Reads the `config.json` of a vision tower, or of a whole SigLIP (its `vision_config`).
    ///
    /// # Errors
    /// Returns an error that names the field if a field is invalid.
    pub fn parse(json: &ConfigJson) -> Result<Self> {
        let json = json.section("vision_config")?.unwrap_or_else(|| json.clone());
        let keys = SizeKeys {
            hidden: ("hidden_size", 768),
            intermediate: ("intermediate_size", 3072),
            layers: ("num_hidden_layers", 12),
            heads: ("num_attention_heads", 12),
            activation: ("hidden_act", "gelu_pytorch_tanh"),
            norm_eps: 1e-6,
        };
        Ok(Self {
            picture: PictureConfig::parse(&json, &keys, 16)?,
            head: json.boolean("vision_use_head", true)?,
            bucketed: false,
        })
    }

    /// Returns the number of blocks whose output is `hidden_states[index]` of `transformers`: 0 is the stream before the first
    /// block, −1 the last block's output (before the last norm), −2 the output of the block before it.
    ///
    /// # Errors
    /// Returns an error if the index is outside the list.
    pub fn blocks_at(&self, index: i64) -> Result<usize> {
        let states = self.picture.sizes.layers as i64 + 1;
        usize::try_from(if index < 0 { states + index } else { index })
            .ok()
            .filter(|&blocks| (blocks as i64) < states)
            .ok_or_else(|| {
                ModelError::shape(format!(
                    "SigLIP: hidden state {index} does not exist; expected −{states} to {}",
                    states - 1
                ))
            })
    }
}

/// A SigLIP vision tower.
pub struct Siglip {
    config: SiglipConfig,
    patch_embed: Linear,
    positions: Arc<Param>,
    blocks: Blocks,
    post_norm: Norm,
}

impl Siglip {
    /// Builds the tower. Names below `prefix` are those of `SiglipVisionModel`, such as
    /// `embeddings.patch_embedding.weight`. In the files of the Hugging Face Hub the prefix is `vision_model.`.
    pub fn build(
        config: SiglipConfig,
        prefix: &str,
        part: Part,
        source: &mut dyn WeightSource,
    ) -> Result<Self> {
        let mut weights = Scope::new(source, prefix, part);
        let (picture, sizes) = (&config.picture, &config.picture.sizes);
        let c = sizes.hidden;
        let patch_embed = weights.convolution("embeddings.patch_embedding", &picture.patch_shape(), true)?;
        let positions =
            weights.get("embeddings.position_embedding.weight", &[picture.num_patches(), c], Init::Normal)?;
        let blocks = Blocks::build(sizes, &LAYERS, &mut weights)?;
        let post_norm = weights.layer_norm("post_layernorm", c, sizes.norm_eps)?;
        if config.head {
            weights.get("head.probe", &[1, 1, c], Init::Normal)?;
            weights.get("head.attention.in_proj_weight", &[3 * c, c], Init::Normal)?;
            weights.get("head.attention.in_proj_bias", &[3 * c], Init::Zeros)?;
            weights.linear("head.attention.out_proj", c, c, true)?;
            weights.layer_norm("head.layernorm", c, sizes.norm_eps)?;
            weights.linear("head.mlp.fc1", sizes.intermediate, c, true)?;
            weights.linear("head.mlp.fc2", c, sizes.intermediate, true)?;
        }
        Ok(Self { patch_embed, positions, blocks, post_norm, config })
    }

    /// Loads a tower, frozen, from a separate directory or from that of a whole SigLIP.
    ///
    /// # Errors
    /// Returns an error if files are unreadable, the architecture is another one or tensors do not fit.
    pub fn load(dir: &Path, part: Part, dtype: WeightDtype) -> Result<Self> {
        load(dir, dtype, "SigLIP", published_name, |json, source| {
            Self::build(SiglipConfig::parse(json)?, "", part, source)
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &SiglipConfig {
        &self.config
    }

    /// Maps normalised pixels `[n, 3, side, side]` to the stream after the first `blocks` blocks, `[n · patches, c]`, picture by
    /// picture. See [`SiglipConfig::blocks_at`].
    ///
    /// # Errors
    /// Returns an error if the pixels have another size or the tower has fewer blocks.
    pub fn hidden(
        &self,
        pixels: &[f32],
        n: usize,
        blocks: usize,
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let picture = &self.config.picture;
        if blocks > picture.sizes.layers {
            let what =
                format!("SigLIP: {blocks} blocks were requested, but the tower has {}", picture.sizes.layers);
            return Err(ModelError::shape(what));
        }
        let patches = picture.num_patches();
        let x = constant(picture.patch_rows(pixels, n, 0)?, n * patches, picture.patch_len(), pass)?;
        let side = picture.side_px / picture.patch_px;
        let place = |i: usize| if self.config.bucketed { bucket(i, side, side) } else { i };
        let position = |patch: usize| (place(patch / side) * side + place(patch % side)) as u32;
        let table: Vec<u32> = (0..patches).map(position).collect();
        let ids = RowMix::select((0..n).flat_map(|_| table.iter().copied()).collect());
        let x = tape.linear(&x, &self.patch_embed, pass)?;
        let x = tape.add_rows(&x, &self.positions, &Arc::new(ids.into()))?;
        self.blocks.forward(x, blocks, AttentionLayout::full_blocks(&vec![patches; n]), pass, tape)
    }

    /// Maps normalised pixels `[n, 3, side, side]` to `last_hidden_state` `[n · patches, c]`, with all blocks and the last norm.
    ///
    /// # Errors
    /// Returns an error if the pixels have another size.
    pub fn forward(&self, pixels: &[f32], n: usize, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let x = self.hidden(pixels, n, self.config.picture.sizes.layers, pass, tape)?;
        Ok(tape.norm(&x, &self.post_norm)?)
    }
}

/// Maps the name of a tensor in a SigLIP directory to its name below an empty prefix, or to `None` for the text tower and entries
/// that are not weights.
pub fn published_name(key: &str) -> Option<String> {
    let other = ["text_model.", "logit_scale", "logit_bias"].iter().any(|start| key.starts_with(start));
    let name = key.strip_prefix("vision_model.").unwrap_or(key);
    (!other && name != "embeddings.position_ids").then(|| name.to_owned())
}

/// Returns the index, among `table` learned positions of an axis, for patch `i` of `count`. The rule is that of Idefics2,
/// Idefics3 and Aria: `searchsorted(boundaries, i · (1 / count), right)`. All values are f32, since rounding matters if a patch falls on a
/// boundary.
pub(crate) fn bucket(i: usize, count: usize, table: usize) -> usize {
    let fraction = (i as f32 * (1.0 / count as f32)).min((1.0 - 1e-6) as f32);
    let step = 1.0 / table as f64;
    let boundary = |k: usize| (step + k as f64 * step) as f32;
    (0..table - 1).take_while(|&k| boundary(k) <= fraction).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks all numbers of patches along 70 positions against `transformers`
    /// (`tools/goldens/make_aria.py`).
    #[test]
    fn buckets_equal_transformers() {
        let text = include_str!("../../tests/golden/aria/buckets.json");
        let rows: Vec<Vec<usize>> = serde_json::from_str(text).unwrap_or_default();
        assert_eq!(rows.len(), 70);
        for (count, want) in (1..).zip(rows) {
            let got: Vec<usize> = (0..count).map(|i| bucket(i, count, 70)).collect();
            assert_eq!(got, want, "{count} patches");
        }
        // Along a side as long as the table, rounding repeats positions; the tiles of published models have 27 and 32 patches. torch
        // computes boundaries in vectors, whose rounding depends on their width: with AVX-512 it repeats 11 to 13 of 25 as well.
        let repeated = |count| (0..count).filter(|&i| bucket(i, count, count) != i).collect::<Vec<_>>();
        assert!([16, 27, 32].map(repeated).concat().is_empty());
        assert_eq!(repeated(25), [5, 9, 10, 15, 18, 20, 23]);
        // At this index, f32 differs from exact arithmetic.
        assert_ne!(bucket(5, 25, 70), 5 * 70 / 25);
    }
}
