//! The InternViT tower and the projector.
//!
//! Source: `modeling_intern_vit.py` and `modeling_internvl_chat.py` of OpenGVLab/InternVL, `transformers` 5.23
//! `models/internvl/modeling_internvl.py`. All tiles of a medium run as one stream; each attends only to itself.
//!
//! Shapes: `n` tiles of `g × g` patches, `c` width of the tower, `h` width of the language model.

use std::sync::Arc;

use omnigrpo_ops::{AttentionLayout, Index, Linear, Norm, Param, Part, Pass, RowMix, Tape, Var};

use super::config::InternVlConfig;
use super::layout::Layout;
use crate::block::{Block, Mlp, NormOrder, QkNorm};
use crate::encoders::{constant, patch_rows, run_blocks, space_to_depth};
use crate::error::{ModelError, Result};
use crate::families::{Encoder, MediumInput};
use crate::mixer::Mixer;
use crate::weights::{Init, Scope, WeightSource};

/// The vision tower and the projector.
pub struct VisionTower {
    config: InternVlConfig,
    patch: Linear,
    class: Arc<Param>,
    positions: Arc<Param>,
    blocks: Vec<Arc<Block>>,
    projector_norm: Norm,
    projector_fc1: Linear,
    projector_fc2: Linear,
}

impl VisionTower {
    /// Builds the tower from a source of weights.
    pub fn build(config: &InternVlConfig, source: &mut dyn WeightSource) -> Result<Self> {
        let (layout, v) = (config.layout, &config.vision);
        let (c, i) = (v.hidden, v.intermediate);
        let [class, positions, patch] = layout.named([
            "vision_model.embeddings.class_embedding",
            "vision_model.embeddings.position_embedding",
            "vision_model.embeddings.patch_embedding",
        ]);
        let mut weights = Scope::new(source, "", Part::Vision);
        let class = weights.get(&class, &[1, 1, c], Init::Normal)?;
        let positions = weights.get(&positions, &[1, 1 + v.grid * v.grid, c], Init::Normal)?;
        let patch = weights.convolution(&patch, &[c, 3, v.patch, v.patch], true)?;
        let mut blocks = Vec::with_capacity(v.depth);
        for b in 0..v.depth {
            let own = |name: &str| format!("vision_model.encoder.layers.{b}.{name}");
            let at = |name: &str| layout.named([&own(name)]).concat();
            let qkv = Layout::Original.renamed(&own("attn.qkv"), layout);
            let each = 3 * c / qkv.len().max(1);
            let qkv =
                qkv.iter().map(|name| weights.linear(name, each, c, v.qkv_bias)).collect::<Result<_>>()?;
            let qk_norm = match v.qk_norm_eps {
                None => None,
                Some(eps) => Some(QkNorm::Together([
                    weights.rms_norm(&at("attn.q_norm"), c, eps)?,
                    weights.rms_norm(&at("attn.k_norm"), c, eps)?,
                ])),
            };
            let norm1 = norm(&mut weights, &at("norm1"), c, v.norm_eps, v.rms)?;
            let scales = Some([
                weights.get(&at("ls1"), &[c], Init::Ones)?,
                weights.get(&at("ls2"), &[c], Init::Ones)?,
            ]);
            let proj = weights.linear(&at("attn.proj"), c, c, true)?;
            blocks.push(Arc::new(Block {
                mixer: Mixer::Attention,
                order: NormOrder::Pre,
                experts: None,
                norms: [norm1, norm(&mut weights, &at("norm2"), c, v.norm_eps, v.rms)?],
                qk_norm,
                scales,
                qkv,
                proj,
                mlp: Some(Mlp::Plain {
                    fc1: weights.linear(&at("mlp.fc1"), i, c, true)?,
                    act: v.activation,
                    fc2: weights.linear(&at("mlp.fc2"), c, i, true)?,
                }),
                heads: v.heads,
            }));
        }
        let mut weights = weights.of(Part::Projector);
        let (h, wide) = (config.decoder.hidden, c * config.merge * config.merge);
        let [projector_norm, fc1, fc2] = layout.named(["mlp1.0", "mlp1.1", "mlp1.3"]);
        Ok(Self {
            projector_norm: weights.layer_norm(&projector_norm, wide, 1e-5)?,
            projector_fc1: weights.linear(&fc1, h, wide, true)?,
            projector_fc2: weights.linear(&fc2, h, h, true)?,
            config: config.clone(),
            patch,
            class,
            positions,
            blocks,
        })
    }

    /// Returns the number of patches per side of a tile.
    fn grid(&self, side_px: usize) -> usize {
        side_px / self.config.vision.patch
    }
}

impl Encoder for VisionTower {
    /// Maps pictures `[n, 3, side, side]` to the tower's output `[n · (1 + g²), c]`, with the class token first in each tile.
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let (pixels, [count, height_px, width_px]) = (&medium.data, medium.shape.pictures()?);
        let v = &self.config.vision;
        let fits = self.config.check_side(height_px);
        if pixels.len() != count * 3 * height_px * width_px || height_px != width_px || fits.is_err() {
            return Err(ModelError::shape(format!(
                "vision tower: got {} values for {count} tiles of {height_px}×{width_px} px; expected squares whose side \
                 is a multiple of {} px",
                pixels.len(),
                v.patch * self.config.merge
            )));
        }
        let grid = self.grid(height_px);
        let patches = grid * grid;
        let rows = patch_rows(pixels, [3, height_px], v.patch, 0);
        let x = constant(rows, count * patches, 3 * v.patch * v.patch, pass)?;
        let all = count * (1 + patches);
        let classes = RowMix::of_ids((0..all).map(|row| (row % (1 + patches) == 0).then_some(0)));
        let places: Index = (0..all).filter(|row| row % (1 + patches) != 0).collect::<Vec<_>>().into();
        let positions = RowMix::of_terms(position_taps(count, grid, v.grid));
        let x = tape.linear(&x, &self.patch, pass)?;
        let x = tape.spread(&x, &Arc::new(places), all)?;
        let x = tape.add_rows(&x, &self.class, &Arc::new(classes.into()))?;
        let x = tape.add_rows(&x, &self.positions, &Arc::new(positions.into()))?;
        let layout = Arc::new(AttentionLayout::full_blocks(&vec![1 + patches; count]).into());
        run_blocks(&self.blocks, x, &layout, pass, tape)
    }

    /// Drops the class tokens, joins `merge × merge` patches and maps them to the language model:
    /// `[n · (1 + g²), c] → [n · (g / merge)², h]`, row by row.
    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        _instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let [count, side_px, _] = medium.shape.pictures()?;
        let (grid, merge) = (self.grid(side_px), self.config.merge);
        let order = space_to_depth(count, grid, merge, 1);
        let (tokens, wide) = (order.len() / (merge * merge), merge * merge * self.config.vision.hidden);
        let order: Arc<Index> = Arc::new(order.into());
        let (norm, fc1, fc2) =
            (self.projector_norm.clone(), self.projector_fc1.clone(), self.projector_fc2.clone());
        let (act, pass) = (self.config.projector_activation, pass.clone());
        Ok(tape.segment([tower], move |tape, [x]| {
            let x = tape.select(x, &order)?;
            let x = tape.reshape(&x, tokens, wide)?;
            let x = tape.norm(&x, &norm)?;
            let x = tape.linear(&x, &fc1, &pass)?;
            let x = tape.activation(&x, act)?;
            tape.linear(&x, &fc2, &pass)
        })?)
    }
}

fn norm(weights: &mut Scope, name: &str, dim: usize, eps: f32, rms: bool) -> Result<Norm> {
    if rms { weights.rms_norm(name, dim, eps) } else { weights.layer_norm(name, dim, eps) }
}

/// Returns the rows of the position table that are mixed for each row of the stream. If the tile has the table's size, each row
/// gets its own position, else the bicubic interpolation of PyTorch's `interpolate` (a = −0.75, corners not aligned, no
/// antialiasing).
fn position_taps(count: usize, grid: usize, table: usize) -> Vec<Vec<(u32, f32)>> {
    let axis: Vec<[(usize, f32); 4]> = (0..grid).map(|i| cubic_taps(i, grid, table)).collect();
    let mut tile = vec![vec![(0, 1.0)]];
    for y in 0..grid {
        for x in 0..grid {
            tile.push(if grid == table {
                vec![((1 + y * grid + x) as u32, 1.0)]
            } else {
                let pairs = axis[y].iter().flat_map(|v| axis[x].iter().map(move |h| (v, h)));
                pairs.map(|(v, h)| ((1 + v.0 * table + h.0) as u32, v.1 * h.1)).collect()
            });
        }
    }
    (0..count).flat_map(|_| tile.iter().cloned()).collect()
}

/// Returns the four inputs of one output of a cubic interpolation along an axis, clamped at its ends.
fn cubic_taps(output: usize, outputs: usize, inputs: usize) -> [(usize, f32); 4] {
    const A: f32 = -0.75;
    let place = (output as f32 + 0.5) * (inputs as f32 / outputs as f32) - 0.5;
    let first = place.floor();
    let t = place - first;
    let near = |x: f32| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f32| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let weights = [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)];
    std::array::from_fn(|i| {
        let at = (first as isize + i as isize - 1).clamp(0, inputs as isize - 1);
        (at as usize, weights[i])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_are_cut_in_reading_order() {
        let pixels: Vec<f32> = (0..48).map(|x| x as f32).collect();
        let rows = patch_rows(&pixels, [3, 4], 2, 0);
        assert_eq!(rows[..12], [0., 1., 4., 5., 16., 17., 20., 21., 32., 33., 36., 37.]);
        assert_eq!(rows[12..16], [2., 3., 6., 7.]);
    }

    /// Expected values: `torch.nn.functional.interpolate(mode="bicubic")` of the line 0, 1, 2, 3 to 6 places.
    #[test]
    fn positions_of_other_sizes_are_interpolated_as_in_pytorch() {
        let line = |i: usize| -> f32 { cubic_taps(i, 6, 4).iter().map(|(at, w)| *at as f32 * w).sum() };
        let expected = [-0.086_805_6, 0.406_250_06, 1.212_962_9, 1.787_037_4, 2.593_750_2, 3.086_806_3];
        for (i, expected) in expected.into_iter().enumerate() {
            assert!((line(i) - expected).abs() <= 2e-6, "{i}: {}", line(i));
        }
        let same = position_taps(2, 2, 2);
        assert_eq!(same.len(), 10);
        assert_eq!((&same[0], &same[4], &same[5]), (&vec![(0, 1.0)], &vec![(4, 1.0)], &vec![(0, 1.0)]));
    }
}
