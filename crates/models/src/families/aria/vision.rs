//! The tower and the projector of Aria.
//!
//! Source: `transformers` 5.23 `models/idefics3/modeling_idefics3.py` (tower) and `models/aria/modeling_aria.py` (projector).
//! Difference: patches without a real pixel are left out. The source computes them but masks them in every attention, so they
//! affect no result.
//!
//! Shapes: `s` squares of `g × g` patches of which `h × w` are real, `t` real patches of all, `c` width of the tower, `q`
//! queries of a square.

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_ops::{
    Activation, AttentionHeads, AttentionLayout, Kept, Layout, Linear, Norm, Op, Param, Part, Pass,
    QueryRange, Result as OpResult, RowMix, Rows, Tape, Var,
};

use super::config::AriaConfig;
use crate::encoders::{Blocks, constant, siglip};
use crate::error::{ModelError, Result};
use crate::families::{Encoder, MediumInput};
use crate::weights::{Init, Scope, WeightSource};

const TOWER: &str = "vision_tower.";
const PROJECTOR: &str = "multi_modal_projector.";

/// Epsilon of the projector's norms, the default of `torch.nn.LayerNorm`.
const PROJECTOR_EPS: f32 = 1e-5;

/// The vision tower and the projector.
pub struct VisionTower {
    config: Arc<AriaConfig>,
    patch: Linear,
    positions: Arc<Param>,
    blocks: Blocks,
    projector: Projector,
}

/// Learned queries that attend to the patches of a square, and the layers that map the result to the language model.
#[derive(Clone)]
struct Projector {
    /// `[queries, c]`
    query: Arc<Param>,
    query_norm: Norm,
    patch_norm: Norm,
    /// Projections of queries, keys and values, applied before [`Self::inner`].
    outer: [Linear; 3],
    /// `[3c, c]`: second projection of queries, keys and values.
    inner: Linear,
    heads: AttentionHeads,
    out: Linear,
    linear: Linear,
    norm: Norm,
    fc1: Linear,
    fc2: Linear,
}

/// Rows and columns of real patches in a square.
type Real = [usize; 2];

impl VisionTower {
    /// Builds tower and projector from a source of weights.
    pub fn build(config: &Arc<AriaConfig>, source: &mut dyn WeightSource) -> Result<Self> {
        let (tower, c, h) = (&config.tower, config.tower.sizes.hidden, config.decoder.hidden);
        // Published files contain a norm that no feature goes through. The model's own code does not have it.
        let unused = format!("{TOWER}post_layernorm");
        let has_norm = source.has(&format!("{unused}.weight"));
        let mut weights = Scope::new(source, TOWER, Part::Vision);
        let patch = weights.convolution("embeddings.patch_embedding", &tower.patch_shape(), true)?;
        let table = [tower.num_patches(), c];
        let positions = weights.get("embeddings.position_embedding.weight", &table, Init::Normal)?;
        let blocks = Blocks::build(&tower.sizes, &siglip::LAYERS, &mut weights)?;
        if has_norm {
            weights.layer_norm("post_layernorm", c, tower.sizes.norm_eps)?;
        }
        let mut weights = Scope::new(source, PROJECTOR, Part::Projector);
        let query = weights.get("query", &[config.max_queries(), c], Init::Normal)?;
        let norm = weights.layer_norm("layer_norm", c, PROJECTOR_EPS)?;
        let fc1 = weights.linear("feed_forward.linear_in", h, c, false)?;
        let fc2 = weights.linear("feed_forward.linear_out", h, h, false)?;
        let mut cross = weights.sub("cross_attn.");
        let projector = Projector {
            query,
            norm,
            fc1,
            fc2,
            outer: [
                cross.linear("q_proj", c, c, false)?,
                cross.linear("k_proj", c, c, false)?,
                cross.linear("v_proj", c, c, false)?,
            ],
            inner: Linear::reshaped(
                cross.get("multihead_attn.in_proj_weight", &[3 * c, c], Init::Normal)?,
                Some(cross.get("multihead_attn.in_proj_bias", &[3 * c], Init::Zeros)?),
                3 * c,
                c,
            )?,
            heads: tower.sizes.heads,
            out: cross.linear("multihead_attn.out_proj", c, c, true)?,
            linear: cross.linear("linear", c, c, true)?,
            query_norm: cross.layer_norm("layer_norm", c, PROJECTOR_EPS)?,
            patch_norm: cross.layer_norm("layer_norm_kv", c, PROJECTOR_EPS)?,
        };
        Ok(Self { config: Arc::clone(config), patch, positions, blocks, projector })
    }

    fn queries(&self, side: usize) -> Result<usize> {
        self.config.tokens(side).ok_or_else(|| {
            let sides = self.config.sides();
            ModelError::shape(format!(
                "vision tower: squares of {side} px are unsupported; the projector supports {sides:?} px"
            ))
        })
    }

    /// Returns the real patches of each square, those with at least one real pixel.
    fn real(&self, pixels: &[f32], [count, side]: [usize; 2]) -> Result<Vec<Real>> {
        self.queries(side)?;
        let (plane, patch) = (side * side, self.config.tower.patch_px);
        if count == 0 || pixels.len() != count * 4 * plane {
            let what = format!("got {} values for {count} squares of {side} px with masks", pixels.len());
            return Err(ModelError::shape(format!("vision tower: {what}")));
        }
        let squares = pixels.chunks_exact(4 * plane).map(|square| {
            let mask = &square[3 * plane..];
            // The real pixels form a rectangle that starts at the first corner.
            let width = mask[..side].iter().take_while(|&&m| m > 0.0).count();
            let height = mask.chunks_exact(side).take_while(|row| row[0] > 0.0).count();
            [height.div_ceil(patch), width.div_ceil(patch)]
        });
        let real: Vec<Real> = squares.collect();
        match real.iter().all(|[h, w]| h * w > 0) {
            true => Ok(real),
            false => Err(ModelError::shape("vision tower: a square has no real pixel")),
        }
    }
}

impl Encoder for VisionTower {
    /// Maps squares with masks `[s, 4, side, side]` to the tower's output `[t, c]`, square by square and row by row.
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let (pixels, shape) = (&medium.data, medium.shape.masked()?);
        let [_, side] = shape;
        let real = self.real(pixels, shape)?;
        let (patch, table) = (self.config.tower.patch_px, self.config.grid(self.config.tower.side_px));
        let (mut rows, mut ids) = (Vec::new(), Vec::new());
        for (square, [h, w]) in pixels.chunks_exact(4 * side * side).zip(&real) {
            let axis =
                |count: usize| (0..count).map(move |i| siglip::bucket(i, count, table)).collect::<Vec<_>>();
            let (down, across) = (axis(*h), axis(*w));
            for (y, &row) in down.iter().enumerate() {
                for (x, &column) in across.iter().enumerate() {
                    ids.push((row * table + column) as u32);
                    for colour in square.chunks_exact(side * side).take(3) {
                        for line in y * patch..(y + 1) * patch {
                            rows.extend_from_slice(&colour[line * side + x * patch..][..patch]);
                        }
                    }
                }
            }
        }
        let lengths: Vec<usize> = real.iter().map(|[h, w]| h * w).collect();
        let x = constant(rows, ids.len(), 3 * patch * patch, pass)?;
        let x = tape.linear(&x, &self.patch, pass)?;
        let x = tape.add_rows(&x, &self.positions, &Arc::new(RowMix::select(ids).into()))?;
        let depth = self.config.tower.sizes.layers;
        self.blocks.forward(x, depth, AttentionLayout::full_blocks(&lengths), pass, tape)
    }

    /// Maps tower output `[t, c]` to features `[s · q, h]`.
    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        _instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let [count, side] = medium.shape.masked()?;
        let lengths: Vec<usize> =
            self.real(&medium.data, [count, side])?.iter().map(|[h, w]| h * w).collect();
        let (queries, patches) = (self.queries(side)?, lengths.iter().sum::<usize>());
        if tower.rows().rows() != patches {
            let what = format!(
                "the tower output has {} rows; expected {patches}, one per patch",
                tower.rows().rows()
            );
            return Err(ModelError::shape(format!("projector: {what}")));
        }
        let ids: Vec<u32> = (0..count * queries).map(|row| (row % queries) as u32).collect();
        let attend = CrossAttention::new(self.projector.heads, queries, &lengths);
        let zeros =
            constant(vec![0.0; ids.len() * tower.rows().cols()], ids.len(), tower.rows().cols(), pass)?;
        let (own, pass) = (self.projector.clone(), pass.clone());
        Ok(tape.segment([tower], move |tape, [x]| {
            let q = tape.add_rows(&zeros, &own.query, &Arc::new(RowMix::select(ids.clone()).into()))?;
            let q = tape.norm(&q, &own.query_norm)?;
            let x = tape.norm(x, &own.patch_norm)?;
            let [of_q, of_k, of_v] = &own.outer;
            let q = tape.linear(&q, of_q, &pass)?;
            let k = tape.linear(&x, of_k, &pass)?;
            let v = tape.linear(&x, of_v, &pass)?;
            let all = tape.concat([&q, &k, &v])?;
            let all = tape.linear(&all, &own.inner, &pass)?;
            let y = tape.apply(attend.clone(), [&all])?;
            let y = tape.linear(&y, &own.out, &pass)?;
            let y = tape.linear(&y, &own.linear, &pass)?;
            let y = tape.norm(&y, &own.norm)?;
            let y = tape.linear(&y, &own.fc1, &pass)?;
            let y = tape.activation(&y, Activation::GeluTanh)?;
            tape.linear(&y, &own.fc2, &pass)
        })?)
    }
}

/// Attention of queries over patches. Its input consists of rows of queries, then of patches as keys, then of patches as values.
/// One weight projects every row to `[queries | keys | values]`, and only one third of each row is used.
#[derive(Clone)]
struct CrossAttention {
    heads: AttentionHeads,
    layout: Arc<Layout>,
    queries: usize,
    patches: usize,
}

/// Arrays that attention keeps: its packed input, its output and the log-sum-exps.
struct Attended {
    packed: Rows,
    out: Rows,
    lse: Rows,
}

impl Kept for Attended {
    fn num_bytes(&self) -> usize {
        [&self.packed, &self.out, &self.lse].map(Rows::num_bytes).iter().sum()
    }
}

impl CrossAttention {
    /// Creates attention of `queries` queries per square over the patches of that square.
    fn new(heads: AttentionHeads, queries: usize, lengths: &[usize]) -> Self {
        let all = queries * lengths.len();
        let mut start = all;
        let ranges = lengths.iter().enumerate().map(|(square, &len)| {
            let keys: Range<usize> = start..start + len;
            start = keys.end;
            QueryRange { queries: square * queries..(square + 1) * queries, keys: vec![keys], causal: false }
        });
        let layout = AttentionLayout { ranges: ranges.collect() };
        Self { heads, layout: Arc::new(layout.into()), queries: all, patches: lengths.iter().sum() }
    }

    /// Returns the places of queries, keys and values: the rows and columns in the input, and the first row in the packed
    /// attention input.
    fn places(&self) -> [(Range<usize>, Range<usize>, usize); 3] {
        let (c, q, p) = (self.heads.q_width(), self.queries, self.patches);
        [(0..q, 0..c, 0), (q..q + p, c..2 * c, q), (q + p..q + 2 * p, 2 * c..3 * c, q)]
    }
}

impl Op for CrossAttention {
    type Kept = Attended;

    fn forward(&self, [x]: [&Rows; 1]) -> OpResult<(Rows, Attended)> {
        let mut packed = Rows::zeros(x.device(), self.queries + self.patches, x.cols());
        for (rows, columns, at) in self.places() {
            let mut part = packed.row_range(at..at + rows.len())?;
            part.set_columns(columns.start, &x.row_range(rows.clone())?.columns(columns)?)?;
            packed.set_rows(at, &part, 0..rows.len())?;
        }
        let (out, lse) = self.heads.forward(&packed, &self.layout)?;
        Ok((out.row_range(0..self.queries)?, Attended { packed, out, lse }))
    }

    fn backward(
        &self,
        [x]: [&Rows; 1],
        Attended { packed, out, lse }: Attended,
        dy: Rows,
        _: [bool; 1],
    ) -> OpResult<[Option<Rows>; 1]> {
        let mut dout = Rows::zeros(dy.device(), out.rows(), out.cols());
        dout.set_rows(0, &dy, 0..self.queries)?;
        let dpacked = self.heads.backward(&packed, &out, &lse, &dout, &self.layout)?;
        let mut dx = Rows::zeros(dy.device(), x.rows(), x.cols());
        for (rows, columns, at) in self.places() {
            let mut part = Rows::zeros(dy.device(), rows.len(), x.cols());
            let own = dpacked.row_range(at..at + rows.len())?.columns(columns.clone())?;
            part.set_columns(columns.start, &own)?;
            dx.set_rows(rows.start, &part, 0..rows.len())?;
        }
        Ok([Some(dx)])
    }
}
