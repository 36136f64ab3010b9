//! The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen2.5-Omni.
//!
//! Source: `transformers` 5.23 `models/qwen2_vl/modeling_qwen2_vl.py`, `models/qwen2_5_vl/modeling_qwen2_5_vl.py`,
//! `models/qwen3_vl/modeling_qwen3_vl.py`, and windows and interpolated positions in its `vision_utils.py`.
//!
//! If deep features are taken after some blocks, the tower's output has the rows of the last block first, followed by the rows of
//! these blocks. The features have the same order.
//!
//! Patch rows arrive in merge-block order: the `merge²` patches of one token are consecutive. Windows permute whole
//! tokens, so the permutation is applied once to the patch rows and undone on the features.

use std::sync::Arc;

use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_ops::{
    Activation, AttentionLayout, Device, Index, Layout, Linear, Norm, Param, Part, Pass, RopeTable, RowMix,
    Rows, Tape, Var,
};

use super::config::VisionConfig;
use super::rules::Rules;
use crate::block::{Block, BlockPass, Mlp, NormOrder};
use crate::encoders::constant;
use crate::error::{ModelError, Result};
use crate::families::{Encoder, MediumInput};
use crate::mixer::Mixer;
use crate::weights::{Init, Scope, WeightSource};

/// The vision tower and its mergers.
pub struct VisionTower {
    config: VisionConfig,
    patch_embed: Linear,
    /// `[side², c]`
    positions: Option<Arc<Param>>,
    blocks: Vec<Arc<Block>>,
    /// Merger of the tower's output, followed by those of deep features.
    mergers: Vec<Merger>,
}

/// Layers that compute a token from the patches of a cell.
#[derive(Clone)]
struct Merger {
    norm: Norm,
    /// Whether the norm is over a whole cell rather than each patch.
    joined: bool,
    fc1: Linear,
    fc2: Linear,
}

impl VisionTower {
    /// Builds the tower from a source of weights.
    pub fn build(config: VisionConfig, rules: &Rules, source: &mut dyn WeightSource) -> Result<Self> {
        let (c, i) = (config.hidden, config.intermediate);
        let wide = c * config.merge * config.merge;
        let norm = |weights: &mut Scope, name: &str, width: usize| match rules.gated {
            true => weights.rms_norm(name, width, 1e-6),
            false => weights.layer_norm(name, width, 1e-6),
        };
        let mut weights = Scope::new(source, rules.prefixes[0], Part::Vision);
        let shape = [c, config.channels, config.temporal_patch, config.patch, config.patch];
        let patch_embed = weights.convolution("patch_embed.proj", &shape, rules.patch_bias)?;
        let positions = config
            .positions
            .map(|side| weights.get("pos_embed.weight", &[side * side, c], Init::Normal))
            .transpose()?;
        let mut norms = Vec::with_capacity(config.depth);
        for b in 0..config.depth {
            norms.push([
                norm(&mut weights, &format!("blocks.{b}.norm1"), c)?,
                norm(&mut weights, &format!("blocks.{b}.norm2"), c)?,
            ]);
        }
        let [merger_norm, fc1, fc2] = rules.merger;
        let deep = (0..config.deep.len()).map(|i| format!("deepstack_merger_list.{i}."));
        let mergers: Vec<String> = std::iter::once("merger.".to_owned()).chain(deep).collect();
        let mut merger_norms = Vec::with_capacity(mergers.len());
        for (i, prefix) in mergers.iter().enumerate() {
            let width = if i == 0 { c } else { wide };
            merger_norms.push(norm(&mut weights.of(Part::Projector).sub(prefix), merger_norm, width)?);
        }
        let mut blocks = Vec::with_capacity(config.depth);
        for (b, norms) in norms.into_iter().enumerate() {
            let mut weights = weights.sub(&format!("blocks.{b}."));
            let mut linear = |name: &str, n: usize, k: usize| weights.linear(name, n, k, true);
            let qkv = rules.qkv.iter().map(|name| linear(name, 3 * c / rules.qkv.len(), c));
            let qkv = qkv.collect::<Result<_>>()?;
            blocks.push(Arc::new(Block {
                mixer: Mixer::Attention,
                order: NormOrder::Pre,
                experts: None,
                norms,
                qk_norm: None,
                scales: None,
                heads: config.heads,
                qkv,
                proj: linear("attn.proj", c, c)?,
                mlp: Some(match rules.gated {
                    false => Mlp::Plain {
                        fc1: linear(rules.plain[0], i, c)?,
                        act: config.activation,
                        fc2: linear(rules.plain[1], c, i)?,
                    },
                    true => Mlp::SwiGlu {
                        gate: linear("mlp.gate_proj", i, c)?,
                        up: linear("mlp.up_proj", i, c)?,
                        down: linear("mlp.down_proj", c, i)?,
                    },
                }),
            }));
        }
        let mut weights = weights.of(Part::Projector);
        let mergers = mergers.iter().zip(merger_norms).enumerate().map(|(i, (prefix, norm))| {
            let mut weights = weights.sub(prefix);
            let fc1 = weights.linear(fc1, wide, wide, true)?;
            Ok(Merger { norm, joined: i > 0, fc1, fc2: weights.linear(fc2, config.out, wide, true)? })
        });
        let mergers = mergers.collect::<Result<_>>()?;
        Ok(Self { config, patch_embed, positions, blocks, mergers })
    }

    /// Maps patches `[n, c]` to tokens `[n / merge², out]`; `inverse` puts them into the order of the prompt.
    fn merge(
        &self,
        Merger { norm, joined, fc1, fc2 }: Merger,
        x_nc: &Var,
        inverse: &Arc<Index>,
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let wide = self.config.merge * self.config.merge * self.config.hidden;
        let (tokens, inverse, pass) = (inverse.len(), Arc::clone(inverse), pass.clone());
        Ok(tape.segment([x_nc], move |tape, [x]| {
            let x = if joined { tape.reshape(x, tokens, wide)? } else { x.clone() };
            let x = tape.norm(&x, &norm)?;
            let x = tape.reshape(&x, tokens, wide)?;
            let x = tape.linear(&x, &fc1, &pass)?;
            let x = tape.activation(&x, Activation::GeluErf)?;
            let x = tape.linear(&x, &fc2, &pass)?;
            tape.select(&x, &inverse)
        })?)
    }

    /// Computes rotary angles: the row of a patch rotates the first half of the pairs, its column the second.
    fn rope(&self, grid: PatchGrid, order: &[usize]) -> Arc<RopeTable> {
        let quarter = self.config.heads.dim / 4;
        let frequencies: Vec<f32> =
            (0..quarter).map(|i| (1.0 / 10_000f64.powf(i as f64 / quarter as f64)) as f32).collect();
        let (merge, unit) = (self.config.merge, self.config.merge * self.config.merge);
        let (cells_w, cells) = (grid.w / merge, grid.h / merge * (grid.w / merge));
        let order = order.to_vec();
        Arc::new(RopeTable::from_angles(order.len() * unit, 2 * quarter, move |row, angles| {
            let (cell, inner) = (order[row / unit] % cells, row % unit);
            let y = cell / cells_w * merge + inner / merge;
            let x = cell % cells_w * merge + inner % merge;
            for i in 0..quarter {
                angles[i] = y as f32 * frequencies[i];
                angles[quarter + i] = x as f32 * frequencies[i];
            }
        }))
    }
}

impl Encoder for VisionTower {
    /// Maps patch rows `[n, patch_len]` to the tower's output `[(1 + deep) · n, c]`, in the tower's own token order.
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let (patches, grid) = (&medium.data, medium.shape.patches()?);
        let (n, len) = (grid.t * grid.h * grid.w, self.config.patch_len());
        if patches.len() != n * len
            || !grid.h.is_multiple_of(self.config.merge)
            || !grid.w.is_multiple_of(self.config.merge)
        {
            return Err(ModelError::shape(format!(
                "vision tower: got {} values for a grid of {}×{}×{} patches of {len}; height and width must be multiples \
                 of {}",
                patches.len(),
                grid.t,
                grid.h,
                grid.w,
                self.config.merge
            )));
        }
        let plan = WindowPlan::new(&self.config, grid);
        let unit = self.config.merge * self.config.merge;
        let in_order = || {
            let mut rows = Vec::with_capacity(patches.len());
            for &token in &plan.order {
                rows.extend_from_slice(&patches[token * unit * len..(token + 1) * unit * len]);
            }
            rows
        };
        let rope = self.rope(grid, &plan.order);
        // An outline needs only sizes, so the values of a large picture are not read.
        let x = match pass.device {
            Device::Outline => Var::constant(Rows::zeros(pass.device, n, len)),
            _ => constant(in_order(), n, len, pass)?,
        };
        let mut x = tape.linear(&x, &self.patch_embed, pass)?;
        if let (Some(table), Some(side)) = (&self.positions, self.config.positions) {
            let positions = RowMix::of_terms(position_taps(grid, self.config.merge, side));
            x = tape.add_rows(&x, table, &Arc::new(positions.into()))?;
        }
        let mut deep: Option<Var> = None;
        for (b, block) in self.blocks.iter().enumerate() {
            let layout = plan.layout(&self.config, b);
            x = tape.apply(BlockPass::new(block, pass, Some(&rope), layout, None), [&x])?;
            if self.config.deep.contains(&b) {
                deep = Some(match deep {
                    Some(above) => tape.concat([&above, &x])?,
                    None => x.clone(),
                });
            }
        }
        Ok(match deep {
            Some(deep) => tape.concat([&x, &deep])?,
            None => x,
        })
    }

    /// Runs the mergers: maps tower output `[(1 + deep) · n, c]` to features `[(1 + deep) · n / merge², out]`. The features of
    /// each level are in the order of the prompt.
    fn project(
        &self,
        tower_nc: &Var,
        medium: &MediumInput,
        _instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let grid = medium.shape.patches()?;
        let unit = self.config.merge * self.config.merge;
        let tokens = grid.t * grid.h * grid.w / unit;
        let order = WindowPlan::new(&self.config, grid).order;
        let mut inverse = vec![0; tokens];
        for (at, &token) in order.iter().enumerate() {
            inverse[token] = at;
        }
        let inverse: Arc<Index> = Arc::new(inverse.into());
        let mut features: Option<Var> = None;
        for (level, merger) in self.mergers.iter().enumerate() {
            let own = match self.mergers.len() {
                1 => tower_nc.clone(),
                _ => {
                    let rows = level * tokens * unit..(level + 1) * tokens * unit;
                    tape.select(tower_nc, &Arc::new(rows.collect::<Vec<_>>().into()))?
                }
            };
            let own = self.merge(merger.clone(), &own, &inverse, pass, tape)?;
            features = Some(match features {
                Some(above) => tape.concat([&above, &own])?,
                None => own,
            });
        }
        features.ok_or_else(|| ModelError::shape("vision tower: no merger"))
    }
}

/// Returns the learned positions that are mixed for each patch, with patches in merge-block order. The grid is laid over the
/// square of `side`, corners on corners, and each patch takes the four nearest positions, weighted by distance. All values are
/// f32, as in the reference.
fn position_taps(grid: PatchGrid, merge: usize, side: usize) -> Vec<Vec<(u32, f32)>> {
    // Returns the two positions next to patch `i` of `count`, with their weights.
    let axis = |i: usize, count: usize| {
        let at = i as f32 * (side - 1) as f32 / count.saturating_sub(1).max(1) as f32;
        let below = at.floor();
        [0.0, 1.0].map(|step| {
            let weight = (1.0 - (at - below - step).abs()).max(0.0);
            (((below + step) as usize).min(side - 1), weight)
        })
    };
    let cells_w = grid.w / merge;
    let place = |patch: usize| {
        let (cell, inner) = (patch / (merge * merge), patch % (merge * merge));
        (cell / cells_w * merge + inner / merge, cell % cells_w * merge + inner % merge)
    };
    let frame: Vec<Vec<(u32, f32)>> = (0..grid.h * grid.w)
        .map(|patch| {
            let (y, x) = place(patch);
            let (down, across) = (axis(y, grid.h), axis(x, grid.w));
            let pairs = down.iter().flat_map(|v| across.iter().map(move |h| (v, h)));
            pairs.map(|(v, h)| ((v.0 * side + h.0) as u32, v.1 * h.1)).collect()
        })
        .collect();
    (0..grid.t).flat_map(|_| frame.iter().cloned()).collect()
}

/// Token order and attention layouts of one grid.
struct WindowPlan {
    /// Token at each place of the tower's order.
    order: Vec<usize>,
    full: Arc<Layout>,
    windowed: Option<Arc<Layout>>,
}

impl WindowPlan {
    fn new(config: &VisionConfig, grid: PatchGrid) -> Self {
        let unit = config.merge * config.merge;
        let (h, w) = (grid.h / config.merge, grid.w / config.merge);
        let full = Arc::new(AttentionLayout::full_blocks(&vec![grid.h * grid.w; grid.t]).into());
        let Some((side, _)) = config.windows else {
            return Self { order: (0..grid.t * h * w).collect(), full, windowed: None };
        };
        let mut order = Vec::with_capacity(grid.t * h * w);
        let mut lengths = Vec::new();
        for t in 0..grid.t {
            for y0 in (0..h).step_by(side) {
                for x0 in (0..w).step_by(side) {
                    let start = order.len();
                    for y in y0..(y0 + side).min(h) {
                        order.extend((x0..(x0 + side).min(w)).map(|x| (t * h + y) * w + x));
                    }
                    lengths.push((order.len() - start) * unit);
                }
            }
        }
        Self { order, full, windowed: Some(Arc::new(AttentionLayout::full_blocks(&lengths).into())) }
    }

    fn layout(&self, config: &VisionConfig, block: usize) -> &Arc<Layout> {
        match (&self.windowed, &config.windows) {
            (Some(windowed), Some((_, full_blocks))) if !full_blocks.contains(&block) => windowed,
            _ => &self.full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use omnigrpo_ops::AttentionHeads;

    fn config() -> VisionConfig {
        VisionConfig {
            hidden: 32,
            depth: 4,
            heads: AttentionHeads { q: 2, kv: 2, dim: 16 },
            intermediate: 48,
            activation: Activation::Silu,
            channels: 3,
            patch: 14,
            temporal_patch: 2,
            merge: 2,
            out: 64,
            windows: Some((2, vec![1, 3])),
            tokens_per_second: Some(2.0),
            positions: None,
            deep: Vec::new(),
        }
    }

    /// Expected values: `get_vision_window_index` of `transformers` 5.23 on grids (1, 10, 6) and (1, 8, 8) with windows of 2
    /// cells.
    #[test]
    fn windows_follow_the_reference_order() {
        let first = WindowPlan::new(&config(), PatchGrid { t: 1, h: 10, w: 6 });
        assert_eq!(first.order, [0, 1, 3, 4, 2, 5, 6, 7, 9, 10, 8, 11, 12, 13, 14]);
        let ends = |plan: &WindowPlan| -> Vec<usize> {
            plan.windowed.as_ref().unwrap().ranges.iter().map(|r| r.queries.end).collect()
        };
        assert_eq!(ends(&first), [16, 24, 40, 48, 56, 60]);
        let second = WindowPlan::new(&config(), PatchGrid { t: 1, h: 8, w: 8 });
        assert_eq!(second.order, [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]);
        assert_eq!(ends(&second), [16, 32, 48, 64]);
    }

    #[test]
    fn frames_never_see_each_other() {
        let plan = WindowPlan::new(&config(), PatchGrid { t: 3, h: 4, w: 4 });
        let ranges: Vec<_> = plan.full.ranges.iter().map(|r| r.queries.clone()).collect();
        assert_eq!(ranges, [0..16, 16..32, 32..48]);
        assert_eq!(plan.windowed.as_ref().unwrap().ranges.len(), 3);
    }
}
