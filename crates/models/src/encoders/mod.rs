//! Encoders of pictures, sound and text, used as towers of families and as scorers.
//!
//! An encoder is built from a [`WeightSource`] under a prefix and a [`Part`](omnigrpo_ops::Part) that the caller gives. The same
//! code therefore reads a separate directory or a tower inside a larger checkpoint. On a recording [`Tape`] the weights can be
//! trained. Encoders differ in the layers before and after the blocks. The blocks are [`Block`]s, and a table (`LayerNames`)
//! gives their tensor names.
//!
//! Shapes: `n` pictures or sequences, `t` rows of the stream, `c` width, `p` width of a projection.

pub mod bert;
pub mod clip;
pub mod siglip;
pub mod whisper;

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::{Activation, AttentionHeads, AttentionLayout, Layout, Pass, Rows, Tape, Var};

use crate::block::{Block, BlockPass, Mlp, NormOrder};
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::mixer::Mixer;
use crate::weights::{FileSource, FrozenWeights, Scope, WeightFiles, WeightSource};

/// Sizes of a stack of blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSizes {
    /// Width of the stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads; queries, keys and values have the same number.
    pub heads: AttentionHeads,
    /// Activation of the feed-forward layer.
    pub activation: Activation,
    /// Epsilon of the norms.
    pub norm_eps: f32,
}

/// Keys of `config.json` that contain [`EncoderSizes`], each with the default of the `transformers` class.
pub(crate) struct SizeKeys {
    pub hidden: (&'static str, usize),
    pub intermediate: (&'static str, usize),
    pub layers: (&'static str, usize),
    pub heads: (&'static str, usize),
    pub activation: (&'static str, &'static str),
    pub norm_eps: f64,
}

impl SizeKeys {
    /// Keys of the tower of Idefics3 and SmolVLM (`Idefics3VisionConfig`). The default side of a patch is 32 px.
    pub(crate) const IDEFICS3: Self = Self {
        hidden: ("hidden_size", 1152),
        intermediate: ("intermediate_size", 3072),
        layers: ("num_hidden_layers", 12),
        heads: ("num_attention_heads", 16),
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        norm_eps: 1e-6,
    };
}

/// Names of activations; the first name of each is that of saved configurations.
pub(crate) const ACTIVATIONS: [(&str, Activation); 6] = [
    ("gelu", Activation::GeluErf),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_new", Activation::GeluTanh),
    ("quick_gelu", Activation::QuickGelu),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
];

impl EncoderSizes {
    fn parse(json: &ConfigJson, keys: &SizeKeys) -> Result<Self> {
        let size = |(key, default): (&str, usize)| json.size(key, Some(default));
        let hidden = size(keys.hidden)?;
        let (key, default) = keys.activation;
        Ok(Self {
            hidden,
            intermediate: size(keys.intermediate)?,
            layers: size(keys.layers)?,
            heads: json.heads(keys.heads, hidden, 1)?,
            activation: json.choice(key, default, &ACTIVATIONS)?,
            norm_eps: json.epsilon("layer_norm_eps", keys.norm_eps)?,
        })
    }
}

/// Names that an architecture gives the parts of a block, after `prefix` and the block's number.
pub(crate) struct LayerNames {
    prefix: &'static str,
    order: NormOrder,
    /// Norm of attention; followed by query, key, value and output.
    norm1: &'static str,
    qkv: [&'static str; 3],
    out: &'static str,
    /// Norm of the feed-forward layer; followed by its two layers.
    norm2: &'static str,
    fc: [&'static str; 2],
    /// Whether the key projection has a bias; the others always do.
    key_bias: bool,
}

/// The blocks of an encoder.
pub(crate) struct Blocks(Vec<Arc<Block>>);

impl Blocks {
    pub(crate) fn build(sizes: &EncoderSizes, names: &LayerNames, weights: &mut Scope) -> Result<Self> {
        let (c, i) = (sizes.hidden, sizes.intermediate);
        let mut blocks = Vec::with_capacity(sizes.layers);
        for b in 0..sizes.layers {
            let at = |name: &str| format!("{}{b}.{name}", names.prefix);
            let [q, k, v] = names.qkv;
            let norm1 = weights.layer_norm(&at(names.norm1), c, sizes.norm_eps)?;
            let qkv = vec![
                weights.linear(&at(q), c, c, true)?,
                weights.linear(&at(k), c, c, names.key_bias)?,
                weights.linear(&at(v), c, c, true)?,
            ];
            let proj = weights.linear(&at(names.out), c, c, true)?;
            let norms = [norm1, weights.layer_norm(&at(names.norm2), c, sizes.norm_eps)?];
            blocks.push(Arc::new(Block {
                mixer: Mixer::Attention,
                order: names.order,
                experts: None,
                norms,
                qk_norm: None,
                scales: None,
                qkv,
                proj,
                mlp: Some(Mlp::Plain {
                    fc1: weights.linear(&at(names.fc[0]), i, c, true)?,
                    act: sizes.activation,
                    fc2: weights.linear(&at(names.fc[1]), c, i, true)?,
                }),
                heads: sizes.heads,
            }));
        }
        Ok(Self(blocks))
    }

    /// Runs the first `count` blocks over sequences of these lengths, `[t, c] → [t, c]`.
    pub(crate) fn forward(
        &self,
        x: Var,
        count: usize,
        layout: AttentionLayout,
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        run_blocks(&self.0[..count], x, &Arc::new(layout.into()), pass, tape)
    }
}

/// Runs blocks without rotation, one after the other.
pub(crate) fn run_blocks(
    blocks: &[Arc<Block>],
    x: Var,
    layout: &Arc<Layout>,
    pass: &Pass,
    tape: &mut Tape,
) -> Result<Var> {
    let mut x = x;
    for block in blocks {
        x = tape.apply(BlockPass::new(block, pass, None, layout, None), [&x])?;
    }
    Ok(x)
}

/// Converts the pixels of pictures `[channels, side, side]` to rows of patches, each `[channels, patch, patch]`, picture by
/// picture. `lead` rows of zeros come before the patches of each picture.
pub(crate) fn patch_rows(
    pixels: &[f32],
    [channels, side]: [usize; 2],
    patch: usize,
    lead: usize,
) -> Vec<f32> {
    let (cells, width) = (side / patch, channels * patch * patch);
    let mut rows = Vec::with_capacity(pixels.len());
    for picture in pixels.chunks_exact((channels * side * side).max(1)) {
        rows.resize(rows.len() + lead * width, 0.0);
        for cell in 0..cells * cells {
            let (y0, x0) = (cell / cells * patch, cell % cells * patch);
            for channel in picture.chunks_exact(side * side) {
                for y in y0..y0 + patch {
                    rows.extend_from_slice(&channel[y * side + x0..][..patch]);
                }
            }
        }
    }
    rows
}

/// Copies values to the device, as a constant without a gradient.
pub(crate) fn constant(data: Vec<f32>, rows: usize, cols: usize, pass: &Pass) -> Result<Var> {
    Ok(Var::constant(Rows::upload(pass.device, data, rows, cols)?))
}

/// Builds an encoder from a separate directory. `build` gets a source of the tensors, renamed by `published`, and
/// must use each of them.
fn load<T>(
    dir: &Path,
    how: impl Into<FrozenWeights>,
    name: &'static str,
    published: fn(&str) -> Option<String>,
    build: impl FnOnce(&ConfigJson, &mut dyn WeightSource) -> Result<T>,
) -> Result<T> {
    let json = ConfigJson::read(&dir.join("config.json"))?;
    let files = WeightFiles::open(dir, published)?;
    let mut source = FileSource::new(&files, how);
    let encoder = build(&json, &mut source)?;
    source.finish(name)?;
    Ok(encoder)
}

/// Sizes of a vision tower for square pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct PictureConfig {
    /// Sizes of the blocks.
    pub sizes: EncoderSizes,
    /// Number of colour channels.
    pub channels: usize,
    /// Side of a picture, px.
    pub side_px: usize,
    /// Side of a patch, px.
    pub patch_px: usize,
}

impl PictureConfig {
    pub(crate) fn parse(json: &ConfigJson, keys: &SizeKeys, default_patch: usize) -> Result<Self> {
        let this = Self {
            sizes: EncoderSizes::parse(json, keys)?,
            channels: json.size("num_channels", Some(3))?,
            side_px: json.size("image_size", Some(224))?,
            patch_px: json.size("patch_size", Some(default_patch))?,
        };
        if this.patch_px > this.side_px {
            let what = format!("patch_size is {}, but image_size is only {}", this.patch_px, this.side_px);
            return Err(json.error(what));
        }
        Ok(this)
    }

    /// Returns the number of patches of a picture. If the side is not a multiple of the patch, the remainder is ignored.
    pub fn num_patches(&self) -> usize {
        (self.side_px / self.patch_px).pow(2)
    }

    fn patch_len(&self) -> usize {
        self.channels * self.patch_px * self.patch_px
    }

    pub(crate) fn patch_shape(&self) -> [usize; 4] {
        [self.sizes.hidden, self.channels, self.patch_px, self.patch_px]
    }

    /// Converts pixels `[n, channels, side, side]` to rows of patches, each `[channels, patch, patch]`, picture by picture.
    /// `lead` rows of zeros come before the patches of each picture.
    fn patch_rows(&self, pixels: &[f32], n: usize, lead: usize) -> Result<Vec<f32>> {
        let side = self.side_px;
        let picture = self.channels * side * side;
        if n == 0 || pixels.len() != n * picture {
            return Err(ModelError::shape(format!(
                "picture tower: got {} values for {n} pictures of {}×{side}×{side}; expected {}",
                pixels.len(),
                self.channels,
                n * picture
            )));
        }
        Ok(patch_rows(pixels, [self.channels, side], self.patch_px, lead))
    }
}

/// Returns the row of a tower's output for each row of a projector's input, which has the `merge × merge` patches of a token in
/// sequence. Each picture has `grid × grid` patches after `lead` other rows.
pub(crate) fn space_to_depth(count: usize, grid: usize, merge: usize, lead: usize) -> Vec<usize> {
    let cells = grid / merge;
    let mut order = Vec::with_capacity(count * grid * grid);
    for picture in 0..count {
        let first = picture * (lead + grid * grid) + lead;
        for cell in 0..cells * cells {
            let (y0, x0) = (cell / cells * merge, cell % cells * merge);
            for inner in 0..merge * merge {
                order.push(first + (y0 + inner / merge) * grid + x0 + inner % merge);
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_squares_of_patches_row_by_row() {
        // The input has two tiles of 4 × 4 patches, each after a class token.
        let order = space_to_depth(2, 4, 2, 1);
        assert_eq!(order[..8], [1, 2, 5, 6, 3, 4, 7, 8]);
        assert_eq!(order[8..16], [9, 10, 13, 14, 11, 12, 15, 16]);
        assert_eq!(order[16..20], [18, 19, 22, 23]);
        assert_eq!(order.len(), 32);
        assert_eq!(space_to_depth(1, 4, 2, 0)[..4], [0, 1, 4, 5]);
    }
}
