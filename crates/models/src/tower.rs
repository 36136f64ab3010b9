//! Transformer blocks of towers: pictures, sound and short text.
//!
//! One block serves all of them: the normalisation and where it stands, the feed-forward layer, rotation and attention
//! pattern vary; attention, residual, feed-forward, residual does not. Attention of a batch needs no padding and no mask:
//! the sequences lie one after the other and the [`AttentionLayout`] keeps them apart.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use omnigrpo_kernels::{activation, buffer, scale};
use omnigrpo_ops::{
    Activation, AttentionHeads, AttentionLayout, Linear, MatmulMode, Norm, PackedLinear, Param, RopeTable,
    Segments, rows_from_vec, with_f32,
};

/// The feed-forward layer of a block.
pub enum Mlp {
    /// `fc2(act(fc1 x))`
    Plain {
        /// `[intermediate, h]`
        fc1: Linear,
        /// Between the two.
        act: Activation,
        /// `[h, intermediate]`
        fc2: Linear,
    },
    /// `down(silu(gate x) · up x)`
    SwiGlu {
        /// `[intermediate, h]`
        gate: Linear,
        /// `[intermediate, h]`
        up: Linear,
        /// `[h, intermediate]`
        down: Linear,
    },
}

/// Where the norms of a block stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOrder {
    /// `x += proj(attn(norm1 x)); x += mlp(norm2 x)`
    Pre,
    /// `x = norm1(x + proj(attn x)); x = norm2(x + mlp x)`, as BERT.
    Post,
}

/// One block of a tower.
pub struct TowerBlock {
    /// Where the norms stand.
    pub order: NormOrder,
    /// Of attention.
    pub norm1: Norm,
    /// Of queries and keys over all heads together, before the heads are split; InternViT-6B has them.
    pub qk_norm: Option<[Norm; 2]>,
    /// Scales `[h]` of what attention and the feed-forward layer add to the stream.
    pub scales: Option<[Arc<Param>; 2]>,
    /// Query, key and value: one layer `[3h, h]` with its rows in this order, or three `[h, h]`.
    pub qkv: Vec<Linear>,
    /// `[h, h]`
    pub proj: Linear,
    /// Of the feed-forward layer.
    pub norm2: Norm,
    /// The feed-forward layer.
    pub mlp: Mlp,
}

impl TowerBlock {
    /// `[n, h] → [n, h]`, rotating queries and keys by `rope` where there is one. With a tape, recorded there.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward<'a>(
        &'a self,
        x_nh: &Tensor,
        rope: Option<&Arc<RopeTable>>,
        heads: AttentionHeads,
        layout: &Arc<AttentionLayout>,
        tape: Option<&mut Segments<'a>>,
    ) -> Result<Tensor> {
        let (n, h) = x_nh.dims2()?;
        if let Err(error) = layout.validate(n, n) {
            bail!("tower block: {error}");
        }
        if self.qk_norm.is_some() && rope.is_some() {
            bail!("tower block: rotation comes after the norms of queries and keys");
        }
        let pass = Pass::new(self, rope, heads, layout, n);
        if h != self.proj.n() || self.scales.iter().flatten().any(|scale| scale.len() != h) {
            bail!("tower block: rows of {h}, layers and scales for {}", self.proj.n());
        }
        if pass.qkv.width() != heads.packed_width() {
            bail!("tower block: queries, keys and values of {} columns for {heads:?}", pass.qkv.width());
        }
        let x = x_nh.contiguous()?;
        let Some(tape) = tape else {
            return rows_from_vec(with_f32(&x, |x| pass.forward(x))??.0, n, h);
        };
        let (y, kept) = match tape.recall::<(Tensor, Kept)>() {
            Some(known) => known,
            None => {
                let (y, kept) = with_f32(&x, |x| pass.forward(x))??;
                (rows_from_vec(y, n, h)?, kept)
            }
        };
        if tape.remembers() {
            tape.remember(kept.bytes() + n * h * size_of::<f32>(), (y.clone(), kept));
        } else {
            let kept = (!tape.recompute()).then_some(kept);
            tape.own(move |dy| {
                let dy = omnigrpo_ops::to_vec(&dy.contiguous()?)?;
                let dx = with_f32(&x, |x| {
                    let kept = match kept {
                        Some(kept) => kept,
                        None => pass.forward(x)?.1,
                    };
                    pass.backward(x, kept, dy)
                })??;
                rows_from_vec(dx, n, h)
            });
        }
        Ok(y)
    }
}

/// One of the two halves of a block: what happens before attention or the feed-forward layer, and after.
struct Half<'a> {
    order: NormOrder,
    norm: &'a Norm,
    scale: Option<&'a Arc<Param>>,
    /// The layer whose output joins the residual stream.
    last: PackedLinear,
    /// Inputs of that.
    k: usize,
    n: usize,
}

/// What a half keeps.
#[derive(Default)]
struct Joined {
    /// What is scaled, if something is.
    branch: Option<Vec<f32>>,
    /// What is normalised, where the norm stands behind.
    sum: Option<Vec<f32>>,
}

impl<'a> Half<'a> {
    fn new(block: &'a TowerBlock, at: usize, last: &Linear, n: usize) -> Self {
        let norm = [&block.norm1, &block.norm2][at];
        let scale = block.scales.as_ref().map(|scales| &scales[at]);
        let (order, k) = (block.order, last.k());
        Self { order, norm, scale, last: PackedLinear::new(&[last], MatmulMode::Gemm), k, n }
    }

    /// The input of the half's first layer.
    fn enter<'x>(&self, x: &'x [f32]) -> Result<Cow<'x, [f32]>> {
        match self.order {
            NormOrder::Pre => Ok(self.norm.forward(x, self.n)?.0.into()),
            NormOrder::Post => Ok(x.into()),
        }
    }

    /// The gradient of the half's input from those of what [`Self::enter`] gave and of the residual stream.
    fn enter_back(&self, x: &[f32], dinput: &[f32], dresidual: Vec<f32>) -> Result<Vec<f32>> {
        let mut dx = dresidual;
        match self.order {
            NormOrder::Pre => {
                let stats = self.norm.forward(x, self.n)?.1;
                self.norm.backward(&mut dx, x, &stats, dinput, self.n)?;
            }
            NormOrder::Post => buffer::add(&mut dx, dinput),
        }
        Ok(dx)
    }

    /// `residual + scale · last(inner)`, then the norm if it stands behind.
    fn leave(&self, residual: &[f32], inner: &[f32]) -> Result<(Vec<f32>, Joined)> {
        let k = self.k;
        let mut joined = Joined::default();
        let mut y = match self.scale {
            None => self.last.forward_onto(residual, inner, self.n, k)?,
            Some(param) => {
                let branch = self.last.forward(inner, self.n, k)?;
                let mut y = buffer::zeros(branch.len());
                param.with_f32(|s| scale::residual_forward(&mut y, &branch, residual, s))?;
                joined.branch = Some(branch);
                y
            }
        };
        if self.order == NormOrder::Post {
            let normed = self.norm.forward(&y, self.n)?.0;
            joined.sum = Some(std::mem::replace(&mut y, normed));
        }
        Ok((y, joined))
    }

    /// The gradients of `inner` and of the residual stream.
    fn leave_back(&self, inner: &[f32], joined: Joined, dy: Vec<f32>) -> Result<(Vec<f32>, Vec<f32>)> {
        let mut dsum = match joined.sum {
            Some(sum) => {
                let stats = self.norm.forward(&sum, self.n)?.1;
                let mut dsum = buffer::zeros(sum.len());
                self.norm.backward(&mut dsum, &sum, &stats, &dy, self.n)?;
                dsum
            }
            None => dy,
        };
        let k = self.k;
        let dinner = match (self.scale, joined.branch) {
            (Some(param), Some(branch)) => {
                let mut dbranch = buffer::zeros(branch.len());
                param.with_f32(|s| scale::residual_backward_input(&mut dbranch, &dsum, s))?;
                param.accumulate(|ds| scale::residual_backward_scale(ds, &dsum, &branch));
                self.last.backward(inner, &mut dbranch, self.n, k)?
            }
            // Nothing is rotated, so the gradient stays as it is.
            _ => self.last.backward(inner, &mut dsum, self.n, k)?,
        };
        Ok((dinner, dsum))
    }
}

/// A block in one pass over `n` rows.
struct Pass<'a> {
    block: &'a TowerBlock,
    heads: AttentionHeads,
    layout: Arc<AttentionLayout>,
    qkv: PackedLinear,
    attend: Half<'a>,
    /// Of the feed-forward layer: all but the last.
    first: PackedLinear,
    feed: Half<'a>,
    n: usize,
}

/// What a block keeps for its backward pass, besides its input.
struct Kept {
    /// Queries, keys and values before the norms of the first two, where there are some.
    raw: Option<Vec<f32>>,
    /// `[n, (q + 2 kv) · d]`
    qkv: Vec<f32>,
    /// `[n, q]`
    lse: Vec<f32>,
    /// `[n, q · d]`
    attended: Vec<f32>,
    joined: [Joined; 2],
    /// The stream between the halves, `[n, h]`.
    middle: Vec<f32>,
    /// Before the activation.
    wide: Vec<f32>,
}

impl Kept {
    fn bytes(&self) -> usize {
        let Self { raw, qkv, lse, attended, joined, middle, wide } = self;
        let joined = joined.iter().flat_map(|joined| [&joined.branch, &joined.sum]);
        let some = joined.chain([raw]).flatten();
        some.chain([qkv, lse, attended, middle, wide]).map(|x| size_of_val(&x[..])).sum()
    }
}

impl<'a> Pass<'a> {
    fn new(
        block: &'a TowerBlock,
        rope: Option<&Arc<RopeTable>>,
        heads: AttentionHeads,
        layout: &Arc<AttentionLayout>,
        n: usize,
    ) -> Self {
        let packed = |layers: &[&Linear]| PackedLinear::new(layers, MatmulMode::Gemm);
        let mut qkv = packed(&block.qkv.iter().collect::<Vec<_>>());
        if let Some(rope) = rope {
            qkv = qkv.rotated(rope, heads.q + heads.kv);
        }
        let (first, last) = match &block.mlp {
            Mlp::Plain { fc1, fc2, .. } => (packed(&[fc1]), fc2),
            Mlp::SwiGlu { gate, up, down } => (packed(&[gate, up]), down),
        };
        let (attend, feed) = (Half::new(block, 0, &block.proj, n), Half::new(block, 1, last, n));
        Self { block, heads, layout: Arc::clone(layout), qkv, attend, first, feed, n }
    }

    fn forward(&self, x: &[f32]) -> Result<(Vec<f32>, Kept)> {
        let (n, heads) = (self.n, self.heads);
        let h = self.block.proj.n();
        let mut qkv = self.qkv.forward(&self.attend.enter(x)?, n, h)?;
        let raw = match &self.block.qk_norm {
            Some(norms) => {
                let raw = buffer::copy(&qkv);
                for (norm, (from, width)) in norms.iter().zip(self.columns()) {
                    let normed = norm.forward(&self.window(&raw, from, width), n)?.0;
                    self.put(&mut qkv, from, width, &normed);
                }
                Some(raw)
            }
            None => None,
        };
        let mut attended = buffer::zeros(n * heads.q_width());
        let mut lse = vec![0.0; n * heads.q];
        heads.forward(&qkv, &mut attended, &mut lse, &self.layout);
        let (middle, joined) = self.attend.leave(x, &attended)?;
        let wide = self.first.forward(&self.feed.enter(&middle)?, n, h)?;
        let (y, last) = self.feed.leave(&middle, &self.activate(&wide))?;
        Ok((y, Kept { raw, qkv, lse, attended, joined: [joined, last], middle, wide }))
    }

    /// `dx [n, h]` from `dy [n, h]`, with the gradients of the weights added to their buffers. Each kept array is freed
    /// after its use.
    fn backward(&self, x: &[f32], kept: Kept, dy: Vec<f32>) -> Result<Vec<f32>> {
        let Kept { raw, qkv, lse, attended, joined: [joined, last], middle, mut wide } = kept;
        let (n, heads) = (self.n, self.heads);
        let h = self.block.proj.n();
        let (dinner, dresidual) = self.feed.leave_back(&self.activate(&wide), last, dy)?;
        match &self.block.mlp {
            Mlp::Plain { act, .. } => activation::backward(*act, &mut wide, &dinner),
            Mlp::SwiGlu { .. } => {
                let i = wide.len() / n.max(1) / 2;
                activation::swiglu_backward(&mut wide, &dinner, n, i);
            }
        }
        drop(dinner);
        let dinput = self.first.backward(&self.feed.enter(&middle)?, &mut wide, n, h)?;
        drop(wide);
        let dmiddle = self.feed.enter_back(&middle, &dinput, dresidual)?;
        drop((middle, dinput));
        let (dattended, dresidual) = self.attend.leave_back(&attended, joined, dmiddle)?;
        let mut dqkv = heads.backward(&qkv, &attended, &lse, &dattended, &self.layout);
        drop((qkv, attended, dattended));
        if let (Some(norms), Some(raw)) = (&self.block.qk_norm, raw) {
            for (norm, (from, width)) in norms.iter().zip(self.columns()) {
                let input = self.window(&raw, from, width);
                let stats = norm.forward(&input, n)?.1;
                let mut dinput = buffer::zeros(n * width);
                norm.backward(&mut dinput, &input, &stats, &self.window(&dqkv, from, width), n)?;
                self.put(&mut dqkv, from, width, &dinput);
            }
        }
        let dinput = self.qkv.backward(&self.attend.enter(x)?, &mut dqkv, n, h)?;
        self.attend.enter_back(x, &dinput, dresidual)
    }

    fn activate(&self, wide: &[f32]) -> Vec<f32> {
        match &self.block.mlp {
            Mlp::Plain { act, .. } => activation::forward(*act, wide),
            Mlp::SwiGlu { .. } => activation::swiglu_forward(wide, self.n, wide.len() / self.n.max(1) / 2),
        }
    }

    /// First column and width of queries and keys in a packed row.
    fn columns(&self) -> [(usize, usize); 2] {
        [(0, self.heads.q_width()), (self.heads.q_width(), self.heads.kv_width())]
    }

    /// Columns of a packed row, one row after the other.
    fn window(&self, packed: &[f32], from: usize, width: usize) -> Vec<f32> {
        let rows = packed.chunks_exact(self.heads.packed_width().max(1));
        rows.flat_map(|row| &row[from..from + width]).copied().collect()
    }

    /// The reverse of [`Self::window`].
    fn put(&self, packed: &mut [f32], from: usize, width: usize, window: &[f32]) {
        let rows = packed.chunks_exact_mut(self.heads.packed_width().max(1));
        for (row, window) in rows.zip(window.chunks_exact(width.max(1))) {
            row[from..from + width].copy_from_slice(window);
        }
    }
}
