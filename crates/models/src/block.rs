//! The transformer block, of language models and towers alike.
//!
//! The normalisation and where it stands, the feed-forward layer, biases, rotation and the attention pattern vary;
//! attention, residual, feed-forward, residual does not. Attention of a batch needs no padding and no mask: the sequences
//! lie one after the other and the layout keeps them apart.
//!
//! For its backward pass a block keeps its input, the packed queries, keys and values, attention's output, the stream
//! between its halves and what goes into the activation; normalised rows and the activation's output are computed again.
//!
//! Shapes: `t` rows of a stream, `n` of them beyond attention, `h` width, `d` head width.

use std::sync::Arc;

use crate::experts::{Experts, ExpertsPass, KeptExperts};
use omnigrpo_ops::{
    Activation, AttentionHeads, Index, Kept, Layout, Linear, Norm, Op, PackedLinear, Param, Pass, Result,
    RopeTable, Rows,
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

/// Norms of queries and keys, before they are rotated.
pub enum QkNorm {
    /// Over all heads together: InternViT-6B.
    Together([Norm; 2]),
    /// Over each head: Qwen3.
    PerHead([Norm; 2]),
}

/// One block and its weights.
pub struct Block {
    /// Where the norms stand.
    pub order: NormOrder,
    /// Norms of attention and of the feed-forward layer.
    pub norms: [Norm; 2],
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Scales `[h]` of what attention and the feed-forward layer add to the stream.
    pub scales: Option<[Arc<Param>; 2]>,
    /// Query, key and value: one layer with its rows in this order, or three.
    pub qkv: Vec<Linear>,
    /// `[h, q · d]`
    pub proj: Linear,
    /// The feed-forward layer.
    pub mlp: Mlp,
    /// Experts beside it, of which each row uses a few: then the feed-forward layer is the one that all rows share.
    pub experts: Option<Experts>,
    /// Heads of attention.
    pub heads: AttentionHeads,
}

/// A block in one pass.
pub struct BlockPass {
    block: Arc<Block>,
    rope: Option<Arc<RopeTable>>,
    layout: Arc<Layout>,
    /// Rows that go beyond attention; `None` for all.
    rows: Option<Arc<Index>>,
    qkv: PackedLinear,
    /// The layers whose outputs join the stream, of attention and of the feed-forward layer.
    last: [PackedLinear; 2],
    /// The feed-forward layer but for its last layer.
    first: PackedLinear,
    experts: Option<ExpertsPass>,
}

/// Arrays that a block keeps for its backward pass, besides its input.
pub struct KeptBlock {
    /// Queries, keys and values before their norms, where there are some.
    raw: Option<Rows>,
    /// `[t, (q + 2 kv) · d]`
    qkv: Rows,
    /// `[t, q]`
    lse: Rows,
    /// `[t, q · d]`
    attended: Rows,
    joined: [Joined; 2],
    /// The stream between the halves, `[n, h]`.
    middle: Rows,
    /// Before the activation.
    wide: Rows,
    experts: Option<KeptExperts>,
}

impl KeptBlock {
    /// Which of [`Self::into_arrays`] have the rows that go beyond attention.
    pub(crate) const BEYOND: std::ops::Range<usize> = 4..10;

    /// Returns the arrays in the order of [`Self::from_arrays`]; nothing if there are experts among them.
    pub(crate) fn into_arrays(self) -> Option<[Option<Rows>; 10]> {
        let Self { raw, qkv, lse, attended, joined: [a, b], middle, wide, experts } = self;
        let [qkv, lse, attended, middle, wide] = [qkv, lse, attended, middle, wide].map(Some);
        experts.is_none().then_some([raw, qkv, lse, attended, a.branch, a.sum, b.branch, b.sum, middle, wide])
    }

    /// The reverse of [`Self::into_arrays`]; nothing where arrays are missing.
    pub(crate) fn from_arrays(mut arrays: impl Iterator<Item = Option<Rows>>) -> Option<Self> {
        let mut next = || arrays.next();
        let (raw, qkv, lse, attended) = (next()?, next()??, next()??, next()??);
        let mut joined = || Some(Joined { branch: next()?, sum: next()? });
        let joined = [joined()?, joined()?];
        let (middle, wide) = (next()??, next()??);
        Some(Self { raw, qkv, lse, attended, joined, middle, wide, experts: None })
    }
}

/// Arrays that joining the stream keeps.
#[derive(Default)]
struct Joined {
    /// Input of the scale, if there is one.
    branch: Option<Rows>,
    /// Input of the norm, if it comes last.
    sum: Option<Rows>,
}

impl Kept for KeptBlock {
    fn num_bytes(&self) -> usize {
        let Self { raw, qkv, lse, attended, joined, middle, wide, experts } = self;
        let joined = joined.iter().flat_map(|joined| [&joined.branch, &joined.sum]);
        let some = joined.chain([raw]).flatten();
        let rows: usize = some.chain([qkv, lse, attended, middle, wide]).map(Rows::num_bytes).sum();
        rows + experts.as_ref().map_or(0, KeptExperts::num_bytes)
    }
}

impl BlockPass {
    /// The block over the rows that `layout` describes. `rope` turns queries and keys; only `rows` go beyond attention
    /// where they are given.
    #[must_use]
    pub fn new(
        block: &Arc<Block>,
        pass: &Pass,
        rope: Option<&Arc<RopeTable>>,
        layout: &Arc<Layout>,
        rows: Option<&Arc<Index>>,
    ) -> Self {
        let some = |layers: &[&Linear]| {
            let linear = PackedLinear::new(layers, pass);
            match rows {
                Some(rows) => linear.of_rows(rows),
                None => linear,
            }
        };
        let (first, last) = match &block.mlp {
            Mlp::Plain { fc1, fc2, .. } => (some(&[fc1]), fc2),
            Mlp::SwiGlu { gate, up, down } => (some(&[gate, up]), down),
        };
        Self {
            rope: rope.map(Arc::clone),
            layout: Arc::clone(layout),
            rows: rows.map(Arc::clone),
            qkv: PackedLinear::new(&block.qkv.iter().collect::<Vec<_>>(), pass),
            last: [some(&[&block.proj]), some(&[last])],
            first,
            experts: block
                .experts
                .as_ref()
                .map(|experts| ExpertsPass::new(experts, pass, rows.map(|rows| rows.as_slice()))),
            block: Arc::clone(block),
        }
    }

    /// `x [t, h]` to the block's output `[n, h]`. `attend` makes attention's output and log-sum-exps of the packed queries,
    /// keys and values.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn run(
        &self,
        x: &Rows,
        attend: impl FnOnce(&Rows) -> Result<(Rows, Rows)>,
    ) -> Result<(Rows, KeptBlock)> {
        let mut qkv = self.qkv.forward(&self.enter(0, x)?)?;
        let raw = self.normalise(&mut qkv)?;
        if let Some(rope) = &self.rope {
            self.block.heads.rotate(&mut qkv, rope, false)?;
        }
        let (attended, lse) = attend(&qkv)?;
        let (middle, joined) = self.leave(0, &self.pick(x)?, &self.pick(&attended)?, None)?;
        let entered = self.enter(1, &middle)?;
        let wide = self.first.forward(&entered)?;
        let (routed, experts) = self.run_experts(&entered)?.unzip();
        drop(entered);
        let (y, last) = self.leave(1, &middle, &self.activate(&wide)?, routed.as_ref())?;
        Ok((y, KeptBlock { raw, qkv, lse, attended, joined: [joined, last], middle, wide, experts }))
    }

    /// The rows of `x` that go beyond attention.
    fn pick(&self, x: &Rows) -> Result<Rows> {
        self.rows.as_ref().map_or_else(|| Ok(x.clone()), |rows| x.select(rows))
    }

    /// The reverse of [`Self::pick`]: zeros in the other rows.
    fn spread(&self, x: Rows, t: usize) -> Result<Rows> {
        match &self.rows {
            Some(rows) => x.spread(rows, t),
            None => Ok(x),
        }
    }

    /// The input of a half's first layer.
    fn enter(&self, half: usize, x: &Rows) -> Result<Rows> {
        match self.block.order {
            NormOrder::Pre => Ok(self.block.norms[half].forward(x)?.0),
            NormOrder::Post => Ok(x.clone()),
        }
    }

    /// The answers of the experts, where there are some.
    fn run_experts(&self, x: &Rows) -> Result<Option<(Rows, KeptExperts)>> {
        match (&self.experts, &self.block.experts) {
            (Some(pass), Some(experts)) => pass.forward(experts, x).map(Some),
            _ => Ok(None),
        }
    }

    /// The gradient of a half's input: `dresidual` plus what goes back through its layers, of which `back` makes the gradient
    /// of their input from that input.
    fn enter_back(
        &self,
        half: usize,
        x: &Rows,
        dresidual: Rows,
        back: impl FnOnce(&Rows) -> Result<Rows>,
    ) -> Result<Rows> {
        let mut dx = dresidual;
        match self.block.order {
            NormOrder::Pre => {
                let norm = &self.block.norms[half];
                let (normed, stats) = norm.forward(x)?;
                let dnormed = back(&normed)?;
                drop(normed);
                norm.backward(&mut dx, x, &stats, &dnormed)?;
            }
            NormOrder::Post => dx.add(&back(x)?)?,
        }
        Ok(dx)
    }

    /// `residual + scale · (last(inner) + routed)`, then the norm if it stands behind.
    fn leave(
        &self,
        half: usize,
        residual: &Rows,
        inner: &Rows,
        routed: Option<&Rows>,
    ) -> Result<(Rows, Joined)> {
        let mut joined = Joined::default();
        let add = |mut to: Rows| -> Result<Rows> {
            routed.map_or(Ok(()), |routed| to.add(routed))?;
            Ok(to)
        };
        let mut y = match &self.block.scales {
            None => add(self.last[half].forward_onto(residual, inner)?)?,
            Some(scales) => {
                let branch = add(self.last[half].forward(inner)?)?;
                let y = branch.scaled_onto(residual, &scales[half])?;
                joined.branch = Some(branch);
                y
            }
        };
        if self.block.order == NormOrder::Post {
            let normed = self.block.norms[half].forward(&y)?.0;
            joined.sum = Some(std::mem::replace(&mut y, normed));
        }
        Ok((y, joined))
    }

    /// The gradients of `inner`, of the branch and of the residual stream.
    fn leave_back(&self, half: usize, inner: &Rows, joined: Joined, dy: Rows) -> Result<[Rows; 3]> {
        let dsum = match joined.sum {
            Some(sum) => {
                let norm = &self.block.norms[half];
                let stats = norm.forward(&sum)?.1;
                let mut dsum = Rows::zeros(sum.device(), sum.rows(), sum.cols());
                norm.backward(&mut dsum, &sum, &stats, &dy)?;
                dsum
            }
            None => dy,
        };
        let dbranch = match (&self.block.scales, joined.branch) {
            (Some(scales), Some(branch)) => branch.scaled_onto_back(&dsum, &scales[half])?,
            _ => dsum.clone(),
        };
        Ok([self.last[half].backward(inner, &dbranch)?, dbranch, dsum])
    }

    /// Normalises queries and keys in place; what they were, where they have norms.
    fn normalise(&self, qkv: &mut Rows) -> Result<Option<Rows>> {
        if self.block.qk_norm.is_none() {
            return Ok(None);
        }
        let raw = qkv.clone();
        for (norm, from, width, split) in self.qk_norms() {
            let (rows, cols) = (qkv.rows() * split, width / split);
            let input = raw.columns(from..from + width)?.reshape(rows, cols)?;
            qkv.set_columns(from, &norm.forward(&input)?.0.reshape(raw.rows(), width)?)?;
        }
        Ok(Some(raw))
    }

    /// The gradient of [`Self::normalise`], in place.
    fn normalise_back(&self, raw: &Rows, dqkv: &mut Rows) -> Result<()> {
        for (norm, from, width, split) in self.qk_norms() {
            let (rows, cols) = (raw.rows() * split, width / split);
            let input = raw.columns(from..from + width)?.reshape(rows, cols)?;
            let dy = dqkv.columns(from..from + width)?.reshape(rows, cols)?;
            let stats = norm.forward(&input)?.1;
            let mut dinput = Rows::zeros(raw.device(), rows, cols);
            norm.backward(&mut dinput, &input, &stats, &dy)?;
            dqkv.set_columns(from, &dinput.reshape(raw.rows(), width)?)?;
        }
        Ok(())
    }

    /// For queries and keys: the norm, their first column and width in a packed row, and the number of pieces that are
    /// normalised each.
    fn qk_norms(&self) -> Vec<(&Norm, usize, usize, usize)> {
        let heads = self.block.heads;
        let (q, k) = (heads.q_width(), heads.kv_width());
        match &self.block.qk_norm {
            None => Vec::new(),
            Some(QkNorm::Together([a, b])) => vec![(a, 0, q, 1), (b, q, k, 1)],
            Some(QkNorm::PerHead([a, b])) => vec![(a, 0, q, heads.q), (b, q, k, heads.kv)],
        }
    }

    fn activate(&self, wide: &Rows) -> Result<Rows> {
        match &self.block.mlp {
            Mlp::Plain { act, .. } => Ok(wide.activated(*act)),
            Mlp::SwiGlu { .. } => wide.swiglu(),
        }
    }
}

impl Op for BlockPass {
    type Kept = KeptBlock;
    const BLOCK: bool = true;

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, KeptBlock)> {
        self.run(x, |qkv| self.block.heads.forward(qkv, &self.layout))
    }

    /// Each kept array is freed after its use.
    fn backward(
        &self,
        [x]: [&Rows; 1],
        kept: KeptBlock,
        dy: Rows,
        _: [bool; 1],
    ) -> Result<[Option<Rows>; 1]> {
        let KeptBlock { raw, qkv, lse, attended, joined: [joined, last], middle, mut wide, experts } = kept;
        let [dinner, dbranch, dresidual] = self.leave_back(1, &self.activate(&wide)?, last, dy)?;
        // Held only where it is read, so that the residual's gradient, which may be the same rows, is added to in place.
        let routed = experts.map(|kept| (kept, dbranch));
        match &self.block.mlp {
            Mlp::Plain { act, .. } => wide.activation_back(&dinner, *act)?,
            Mlp::SwiGlu { .. } => wide.swiglu_back(&dinner)?,
        }
        drop(dinner);
        let dmiddle = self.enter_back(1, &middle, dresidual, |x| {
            let mut dx = self.first.backward(x, &wide)?;
            if let (Some(pass), Some(own), Some((kept, dy))) = (&self.experts, &self.block.experts, routed) {
                dx.add(&pass.backward(own, x, kept, &dy)?)?;
            }
            Ok(dx)
        })?;
        drop((middle, wide));
        let [dattended, _, dresidual] = self.leave_back(0, &self.pick(&attended)?, joined, dmiddle)?;
        let dattended = self.spread(dattended, x.rows())?;
        let mut dqkv = self.block.heads.backward(&qkv, &attended, &lse, &dattended, &self.layout)?;
        drop((qkv, attended, dattended));
        if let Some(rope) = &self.rope {
            self.block.heads.rotate(&mut dqkv, rope, true)?;
        }
        if let Some(raw) = raw {
            self.normalise_back(&raw, &mut dqkv)?;
        }
        let dresidual = self.spread(dresidual, x.rows())?;
        Ok([Some(self.enter_back(0, x, dresidual, |x| self.qkv.backward(x, &dqkv))?)])
    }
}
