//! The transformer block of language models and towers.
//!
//! Blocks differ in the kind and place of their norms, the feed-forward layer, biases, rotation and the attention pattern. The
//! sequence attention, residual, feed-forward, residual is the same in all. Attention over a batch needs neither padding nor a
//! mask: the sequences follow one another in one stream, and the layout keeps them apart.
//!
//! For its backward pass a block keeps its input, the packed queries, keys and values, the output of attention, the stream
//! between its halves and the input of the activation. It recomputes normalised rows and the output of the activation.
//!
//! Shapes: `t` rows of a stream, `n` rows that continue past attention, `h` width, `d` head width.

use std::sync::Arc;

use crate::error::ModelError;
use crate::experts::{Experts, ExpertsPass, KeptExperts};
use crate::mixer::{self, Mixer};
use omnigrpo_ops::{
    Activation, AttentionHeads, Index, Kept, Layout, Lend, Linear, Norm, Op, PackedLinear, Param, Pass,
    Result, RopeTable, Rows, Turn,
};

/// The feed-forward layer of a block.
pub enum Mlp {
    /// `fc2(act(fc1 x))`
    Plain {
        /// `[intermediate, h]`
        fc1: Linear,
        /// Activation between `fc1` and `fc2`.
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

/// Position of a block's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOrder {
    /// `x += proj(attn(norm1 x)); x += mlp(norm2 x)`
    Pre,
    /// `x = norm1(x + proj(attn x)); x = norm2(x + mlp x)`, as in BERT.
    Post,
}

/// Norms of queries and keys, applied before rotation.
pub enum QkNorm {
    /// One norm over all heads together, as in InternViT-6B.
    Together([Norm; 2]),
    /// A norm over each head, as in Qwen3.
    PerHead([Norm; 2]),
}

/// One block and its weights.
pub struct Block {
    /// Position of the norms.
    pub order: NormOrder,
    /// Norms of the attention and feed-forward halves.
    pub norms: [Norm; 2],
    /// Norms of queries and keys, if the block has them.
    pub qk_norm: Option<QkNorm>,
    /// Scales `[h]` of the outputs that attention and the feed-forward layer add to the stream.
    pub scales: Option<[Arc<Param>; 2]>,
    /// How the block mixes rows.
    pub mixer: Mixer,
    /// Projections of queries, keys and values: one layer with the rows in this order, or three layers. Those of the delta rule are
    /// the input layers that [`DeltaMixer`](crate::mixer::DeltaMixer) names.
    pub qkv: Vec<Linear>,
    /// `[h, q · d]`
    pub proj: Linear,
    /// The feed-forward layer of all rows; `None` if the block has experts alone.
    pub mlp: Option<Mlp>,
    /// Experts of a mixture. Their output is added to that of `mlp`.
    pub experts: Option<Experts>,
    /// Number and width of the attention heads. The delta rule has its own heads.
    pub heads: AttentionHeads,
}

impl Block {
    /// Returns the weights of the block, without those of adapters.
    pub(crate) fn params(&self) -> Vec<&Arc<Param>> {
        let norms = match &self.qk_norm {
            Some(QkNorm::Together(norms) | QkNorm::PerHead(norms)) => norms.as_slice(),
            None => &[],
        };
        let norms = self.norms.iter().chain(norms).flat_map(Norm::params);
        let mlp = match &self.mlp {
            None => Vec::new(),
            Some(Mlp::Plain { fc1, fc2, .. }) => vec![fc1, fc2],
            Some(Mlp::SwiGlu { gate, up, down }) => vec![gate, up, down],
        };
        let experts = self.experts.iter();
        let linear = mlp.into_iter().chain(&self.qkv).chain([&self.proj]);
        let linear = linear.chain(experts.clone().map(|experts| &experts.router)).flat_map(Linear::params);
        let experts = experts.flat_map(|experts| [experts.fc1.weight(), experts.fc2.weight()]);
        let own = self.mixer.params();
        norms.chain(self.scales.iter().flatten()).chain(own).chain(linear).chain(experts).collect()
    }
}

/// A block, prepared for one pass.
pub struct BlockPass {
    block: Arc<Block>,
    rope: Option<Arc<RopeTable>>,
    layout: Arc<Layout>,
    /// Rows that continue past attention; `None` for all rows.
    rows: Option<Arc<Index>>,
    qkv: PackedLinear,
    /// Output layer of attention.
    proj: PackedLinear,
    mlp: Option<MlpPass>,
    experts: Option<ExpertsPass>,
    /// Source of the weights and the number of the block there, if they are not in memory all the time.
    lender: Option<(Arc<dyn Lend>, usize)>,
    /// Whether [`KeptBlock`] has the input of the activation.
    keeps_wide: bool,
    over_cache: bool,
}

/// The feed-forward layer, prepared for one pass.
struct MlpPass {
    /// The part up to the activation.
    first: PackedLinear,
    /// The output layer.
    last: PackedLinear,
}

/// Arrays that a block keeps for its backward pass, besides its input.
pub struct KeptBlock {
    /// Queries, keys and values before their norms, if the block has such norms, and with the gates of queries.
    raw: Option<Rows>,
    /// `[t, (q + 2 kv) · d]`, or the packed rows of the delta rule.
    qkv: Rows,
    /// `[t, q]`, or the gates of the delta rule.
    lse: Rows,
    /// Output of attention `[t, q · d]` or of the delta rule, before its gate.
    attended: Rows,
    joined: [Joined; 2],
    /// Stream between the two halves, `[n, h]`.
    middle: Rows,
    /// Input of the activation, if the block has a feed-forward layer for all rows.
    wide: Option<Rows>,
    experts: Option<KeptExperts>,
}

/// Name of an array of a block: its output, or one that it keeps. Those of a half have its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BlockArray {
    Output,
    Raw,
    Qkv,
    Lse,
    Attended,
    Branch(usize),
    Sum(usize),
    Middle,
    Wide,
    RouterLogits,
    /// Input of the experts' activation, by row.
    Routed,
}

impl BlockArray {
    /// Returns true if the array contains only the rows that continue past attention.
    pub(crate) fn is_beyond_attention(self) -> bool {
        !matches!(self, Self::Raw | Self::Qkv | Self::Lse | Self::Attended)
    }
}

impl KeptBlock {
    /// Returns the arrays that the block has, and how many experts each row uses.
    pub(crate) fn into_arrays(self) -> Result<(impl Iterator<Item = (BlockArray, Rows)>, usize)> {
        use BlockArray::{Attended, Branch, Lse, Middle, Qkv, Raw, Routed, RouterLogits, Sum, Wide};
        let Self { raw, qkv, lse, attended, joined: [a, b], middle, wide, experts } = self;
        let always = [(Qkv, qkv), (Lse, lse), (Attended, attended), (Middle, middle)];
        let [own, joined] = [a, b].map(|joined| [joined.branch, joined.sum]);
        let (experts, topk) = experts.map(KeptExperts::into_rows).transpose()?.unzip();
        let names = [Raw, Branch(0), Sum(0), Branch(1), Sum(1), Wide, RouterLogits, Routed];
        let experts = experts.map_or([None, None], |arrays| arrays.map(Some));
        let some = [raw].into_iter().chain(own).chain(joined).chain([wide]).chain(experts);
        let some = names.into_iter().zip(some).filter_map(|(name, rows)| Some((name, rows?)));
        Ok((some.chain(always), topk.unwrap_or(0)))
    }

    /// Builds the value from the arrays that `take` returns and the number of experts that each row uses. Returns `None` if required
    /// arrays are missing.
    pub(crate) fn from_arrays(
        mut take: impl FnMut(BlockArray) -> std::result::Result<Option<Rows>, ModelError>,
        topk: usize,
    ) -> std::result::Result<Option<Self>, ModelError> {
        let raw = take(BlockArray::Raw)?;
        let (qkv, lse) = (take(BlockArray::Qkv)?, take(BlockArray::Lse)?);
        let attended = take(BlockArray::Attended)?;
        let mut joined = |half| {
            Ok::<_, ModelError>(Joined {
                branch: take(BlockArray::Branch(half))?,
                sum: take(BlockArray::Sum(half))?,
            })
        };
        let joined = [joined(0)?, joined(1)?];
        let (middle, wide) = (take(BlockArray::Middle)?, take(BlockArray::Wide)?);
        let (logits, routed) = (take(BlockArray::RouterLogits)?, take(BlockArray::Routed)?);
        let routed = logits.zip(routed);
        let experts =
            routed.map(|(logits, rows)| KeptExperts::from_rows([logits, rows], topk)).transpose()?;
        let required = (|| Some((qkv?, lse?, attended?, middle?)))();
        let required = required.filter(|_| wide.is_some() || experts.is_some());
        Ok(required.map(|(qkv, lse, attended, middle)| Self {
            raw,
            qkv,
            lse,
            attended,
            joined,
            middle,
            wide,
            experts,
        }))
    }
}

/// Arrays that [`BlockPass::leave`] keeps for the backward pass.
#[derive(Default)]
struct Joined {
    /// Input of the scale, if the block has scales.
    branch: Option<Rows>,
    /// Input of the norm, if the norm comes after the addition.
    sum: Option<Rows>,
}

impl KeptBlock {
    /// Returns a number for the experts of each row, if the block has experts and the host knows them.
    pub(crate) fn marks(&self) -> Option<Vec<u32>> {
        self.experts.as_ref()?.marks()
    }
}

impl Kept for KeptBlock {
    fn num_bytes(&self) -> usize {
        let Self { raw, qkv, lse, attended, joined, middle, wide, experts } = self;
        let joined = joined.iter().flat_map(|joined| [&joined.branch, &joined.sum]);
        let some = joined.chain([raw, wide]).flatten();
        let rows: usize = some.chain([qkv, lse, attended, middle]).map(Rows::num_bytes).sum();
        rows + experts.as_ref().map_or(0, KeptExperts::num_bytes)
    }
}

impl BlockPass {
    /// Prepares the block for the rows that `layout` describes. `rope` rotates queries and keys. If `rows` is given, only these
    /// rows continue past attention.
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
        let mlp = block.mlp.as_ref().map(|mlp| match mlp {
            Mlp::Plain { fc1, fc2, .. } => MlpPass { first: some(&[fc1]), last: some(&[fc2]) },
            Mlp::SwiGlu { gate, up, down } => MlpPass { first: some(&[gate, up]), last: some(&[down]) },
        });
        Self {
            rope: rope.map(Arc::clone),
            layout: Arc::clone(layout),
            rows: rows.map(Arc::clone),
            qkv: PackedLinear::new(&block.qkv.iter().collect::<Vec<_>>(), pass),
            proj: some(&[&block.proj]),
            mlp,
            experts: block
                .experts
                .as_ref()
                .map(|experts| ExpertsPass::new(experts, pass, rows.map(|rows| rows.as_slice()))),
            block: Arc::clone(block),
            lender: None,
            keeps_wide: true,
            over_cache: false,
        }
    }

    /// Makes the block number `l` of its decoder: it fetches its weights from the lender of the pass and compares the experts of
    /// rows, if the pass asks for it. This applies to the block as an operation of a tape.
    #[must_use]
    pub(crate) fn numbered(self, pass: &Pass, l: usize) -> Self {
        let lender = pass.lender.clone().map(|lender| (lender, l));
        let experts = self.experts.map(|experts| experts.compared(pass, l));
        Self { lender, experts, ..self }
    }

    /// Leaves norms and rotation of queries and keys to the attention over a cache, if the device can ([`Self::turn`]).
    #[must_use]
    pub(crate) fn over_cache(self) -> Self {
        Self { over_cache: true, ..self }
    }

    /// Keeps no input of the activation: nobody differentiates this pass.
    #[must_use]
    pub(crate) fn without_wide(self) -> Self {
        Self { keeps_wide: false, ..self }
    }

    fn lend(&self) -> Result<()> {
        self.lender.as_ref().map_or(Ok(()), |(lender, l)| lender.lend(*l))
    }

    /// Maps `x [t, h]` to the block's output `[n, h]`. `attend` computes the output and the log-sum-exps of attention from the
    /// packed queries, keys and values.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit.
    pub fn run(
        &self,
        x: &Rows,
        attend: impl FnOnce(&Rows) -> Result<(Rows, Rows)>,
    ) -> Result<(Rows, KeptBlock)> {
        let mut qkv = self.qkv.forward(&self.enter(0, x)?)?;
        let turn = self.turn(&qkv);
        let raw = self.normalise(&mut qkv, turn.norms.is_none())?;
        if let Some(rope) = self.rotation().filter(|_| turn.rope.is_none()) {
            self.block.heads.rotate(&mut qkv, rope, false)?;
        }
        let (attended, lse) = attend(&qkv)?;
        let opened = self.open(raw.as_ref().unwrap_or(&qkv), &self.pick(&attended)?)?;
        let (middle, joined) = self.leave(0, &self.pick(x)?, Some((&self.proj, &opened)), None)?;
        drop(opened);
        let entered = self.enter(1, &middle)?;
        let [wide, joined_inner] = match (&self.mlp, &self.block.mlp) {
            (Some(mlp), Some(Mlp::SwiGlu { .. })) if !self.keeps_wide => {
                [None, Some(mlp.first.swiglu(&entered)?)]
            }
            (mlp, _) => [mlp.as_ref().map(|mlp| mlp.first.forward(&entered)).transpose()?, None],
        };
        let (routed, experts) = self.run_experts(&entered)?.unzip();
        drop(entered);
        let inner = match joined_inner {
            None => wide.as_ref().map(|wide| self.activate(wide)).transpose()?,
            inner => inner,
        };
        let shared = self.mlp.as_ref().map(|mlp| &mlp.last).zip(inner.as_ref());
        let (y, last) = self.leave(1, &middle, shared, routed.as_ref())?;
        Ok((y, KeptBlock { raw, qkv, lse, attended, joined: [joined, last], middle, wide, experts }))
    }

    /// Returns what the attention over a cache does to queries and keys, so that [`Self::run`] does not.
    pub(crate) fn turn(&self, qkv: &Rows) -> Turn<'_> {
        let Some(rope) = self.rotation().filter(|_| self.over_cache && self.block.heads.turns_cached(qkv))
        else {
            return Turn::default();
        };
        let norms = match &self.block.qk_norm {
            Some(QkNorm::PerHead([q, k])) => match (q, k) {
                (Norm::Rms { eps, .. }, Norm::Rms { eps: other, .. })
                | (Norm::AroundOne { eps, .. }, Norm::AroundOne { eps: other, .. })
                    if eps.to_bits() == other.to_bits() =>
                {
                    Some([q, k])
                }
                _ => None,
            },
            _ => None,
        };
        // Rotation follows the norms.
        let rope = (norms.is_some() || self.block.qk_norm.is_none()).then_some(&**rope);
        Turn { norms, rope }
    }

    /// Returns the rotation of queries and keys. The delta rule has none.
    fn rotation(&self) -> Option<&Arc<RopeTable>> {
        self.rope.as_ref().filter(|_| !matches!(self.block.mixer, Mixer::Delta(_)))
    }

    /// Returns the input of the output layer, for the rows that continue past attention. `attended` has only these rows.
    fn open(&self, packed: &Rows, attended: &Rows) -> Result<Rows> {
        match &self.block.mixer {
            Mixer::Attention => Ok(attended.clone()),
            Mixer::GatedAttention => attended.gated(&self.pick(&mixer::gates(packed, self.block.heads)?)?),
            Mixer::Delta(delta) => delta.open(&self.pick(packed)?, attended),
        }
    }

    /// Returns the gradients of `attended` and of its gate, if there is one, given that of the output layer's input.
    fn open_back(&self, packed: &Rows, attended: &Rows, dy: Rows) -> Result<(Rows, Option<Rows>)> {
        let [dattended, dgate] = match &self.block.mixer {
            Mixer::Attention => return Ok((dy, None)),
            Mixer::GatedAttention => {
                attended.gated_back(&self.pick(&mixer::gates(packed, self.block.heads)?)?, &dy)?
            }
            Mixer::Delta(delta) => delta.open_back(&self.pick(packed)?, attended, &dy)?,
        };
        Ok((dattended, Some(dgate)))
    }

    /// Selects the rows of `x` that continue past attention.
    fn pick(&self, x: &Rows) -> Result<Rows> {
        self.rows.as_ref().map_or_else(|| Ok(x.clone()), |rows| x.select(rows))
    }

    /// Reverses [`Self::pick`]; the other rows are zero.
    fn spread(&self, x: Rows, t: usize) -> Result<Rows> {
        match &self.rows {
            Some(rows) => x.spread(rows, t),
            None => Ok(x),
        }
    }

    /// Computes the input of the first layer of a half.
    fn enter(&self, half: usize, x: &Rows) -> Result<Rows> {
        match self.block.order {
            NormOrder::Pre => Ok(self.block.norms[half].forward(x)?.0),
            NormOrder::Post => Ok(x.clone()),
        }
    }

    /// Runs the experts, if the block has any.
    fn run_experts(&self, x: &Rows) -> Result<Option<(Rows, KeptExperts)>> {
        match (&self.experts, &self.block.experts) {
            (Some(pass), Some(experts)) => pass.forward(experts, x).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the gradient of a half's input: `dresidual` plus the gradient through the half's layers. `back` maps the input of
    /// these layers to the gradient of that input.
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

    /// Returns `residual + scale · (last(inner) + routed)`, normalised if the norm comes after the addition. `last` is the output
    /// layer of the half with its input, if the half has one.
    fn leave(
        &self,
        half: usize,
        residual: &Rows,
        last: Option<(&PackedLinear, &Rows)>,
        routed: Option<&Rows>,
    ) -> Result<(Rows, Joined)> {
        let mut joined = Joined::default();
        let add = |mut to: Rows| -> Result<Rows> {
            routed.map_or(Ok(()), |routed| to.add(routed))?;
            Ok(to)
        };
        let mut y = match (&self.block.scales, last) {
            (None, Some((last, inner))) => add(last.forward_onto(residual, inner)?)?,
            (None, None) => add(residual.clone())?,
            (Some(scales), last) => {
                let branch = match last {
                    Some((last, inner)) => add(last.forward(inner)?)?,
                    None => add(Rows::zeros(residual.device(), residual.rows(), residual.cols()))?,
                };
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

    /// Returns the gradients of the branch, which is the sum of the half's outputs, and of the residual stream.
    fn leave_back(&self, half: usize, joined: Joined, dy: Rows) -> Result<[Rows; 2]> {
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
        Ok([dbranch, dsum])
    }

    /// Removes the gates of queries and, if `norms` is true, normalises queries and keys, in place. Returns the previous rows if they differ.
    fn normalise(&self, qkv: &mut Rows, norms: bool) -> Result<Option<Rows>> {
        let gated = matches!(self.block.mixer, Mixer::GatedAttention);
        let norms = if norms { self.qk_norms() } else { Vec::new() };
        if norms.is_empty() && !gated {
            return Ok(None);
        }
        let raw = qkv.clone();
        if gated {
            *qkv = mixer::without_gates(&raw, self.block.heads)?;
        }
        let plain = qkv.clone();
        for (norm, from, width, split) in norms {
            let (rows, cols) = (qkv.rows() * split, width / split);
            let input = plain.columns(from..from + width)?.reshape(rows, cols)?;
            qkv.set_columns(from, &norm.forward(&input)?.0.reshape(raw.rows(), width)?)?;
        }
        Ok(Some(raw))
    }

    /// Turns the gradient of the output of [`Self::normalise`] into that of its input, in place. `dgate` is the gradient of the gates
    /// of queries, if there are gates.
    fn normalise_back(&self, raw: &Rows, dqkv: &mut Rows, dgate: Option<&Rows>) -> Result<()> {
        let plain = dgate.map(|_| mixer::without_gates(raw, self.block.heads)).transpose()?;
        let raw = plain.as_ref().unwrap_or(raw);
        for (norm, from, width, split) in self.qk_norms() {
            let (rows, cols) = (raw.rows() * split, width / split);
            let input = raw.columns(from..from + width)?.reshape(rows, cols)?;
            let dy = dqkv.columns(from..from + width)?.reshape(rows, cols)?;
            let stats = norm.forward(&input)?.1;
            let mut dinput = Rows::zeros(raw.device(), rows, cols);
            norm.backward(&mut dinput, &input, &stats, &dy)?;
            dqkv.set_columns(from, &dinput.reshape(raw.rows(), width)?)?;
        }
        if let Some(dgate) = dgate {
            *dqkv = mixer::join_gates(dqkv, dgate, self.block.heads)?;
        }
        Ok(())
    }

    /// Lists, for queries and for keys: the norm, the first column and the width in a packed row, and the number of pieces that
    /// are normalised separately.
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
            Some(Mlp::Plain { act, .. }) => Ok(wide.activated(*act)),
            _ => wide.swiglu(),
        }
    }
}

impl Op for BlockPass {
    type Kept = KeptBlock;
    const BLOCK: bool = true;

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, KeptBlock)> {
        self.lend()?;
        self.run(x, |qkv| match &self.block.mixer {
            Mixer::Delta(delta) => delta.forward(qkv, &self.layout),
            _ => self.block.heads.forward(qkv, &self.layout),
        })
    }

    /// Runs the backward pass. Each kept array is freed after its use.
    fn backward(
        &self,
        [x]: [&Rows; 1],
        kept: KeptBlock,
        dy: Rows,
        _: [bool; 1],
    ) -> Result<[Option<Rows>; 1]> {
        self.lend()?;
        let KeptBlock { raw, qkv, lse, attended, joined: [joined, last], middle, mut wide, experts } = kept;
        let [dbranch, dresidual] = self.leave_back(1, last, dy)?;
        if let (Some(pass), Some(mlp), Some(wide)) = (&self.mlp, &self.block.mlp, &mut wide) {
            pass.last.backward_to(wide, &dbranch, |wide, dinner| match mlp {
                Mlp::Plain { act, .. } => wide.activated_and_back(&dinner, *act),
                Mlp::SwiGlu { .. } => wide.swiglu_and_back(&dinner),
            })?;
        }
        // `dbranch` is kept only for experts. Otherwise the residual's gradient, which may share its rows, is changed in place.
        let routed = experts.map(|kept| (kept, dbranch));
        let dmiddle = self.enter_back(1, &middle, dresidual, |x| {
            let shared = self.mlp.as_ref().zip(wide.as_ref());
            let dx = shared.map(|(mlp, dwide)| mlp.first.backward(x, dwide)).transpose()?;
            let routed = match (&self.experts, &self.block.experts, routed) {
                (Some(pass), Some(own), Some((kept, dy))) => Some(pass.backward(own, x, kept, &dy)?),
                _ => None,
            };
            match (dx, routed) {
                (Some(mut dx), Some(routed)) => dx.add(&routed).map(|()| dx),
                (dx, routed) => {
                    let none = || Rows::zeros(x.device(), x.rows(), x.cols());
                    Ok(dx.or(routed).unwrap_or_else(none))
                }
            }
        })?;
        drop((middle, wide));
        let [dbranch, dresidual] = self.leave_back(0, joined, dmiddle)?;
        let (packed, picked) = (raw.as_ref().unwrap_or(&qkv), self.pick(&attended)?);
        let dopened = self.proj.backward(&self.open(packed, &picked)?, &dbranch)?;
        drop(dbranch);
        let (dattended, dgate) = self.open_back(packed, &picked, dopened)?;
        drop(picked);
        let dattended = self.spread(dattended, x.rows())?;
        let dgate = dgate.map(|dgate| self.spread(dgate, x.rows())).transpose()?;
        let dqkv = match (&self.block.mixer, &dgate) {
            (Mixer::Delta(delta), Some(dgate)) => {
                delta.backward(&qkv, &lse, &dattended, dgate, &self.layout)?
            }
            _ => {
                let mut dqkv = self.block.heads.backward(&qkv, &attended, &lse, &dattended, &self.layout)?;
                drop((qkv, attended, dattended));
                if let Some(rope) = &self.rope {
                    self.block.heads.rotate(&mut dqkv, rope, true)?;
                }
                if let Some(raw) = raw {
                    self.normalise_back(&raw, &mut dqkv, dgate.as_ref())?;
                }
                dqkv
            }
        };
        let dresidual = self.spread(dresidual, x.rows())?;
        Ok([Some(self.enter_back(0, x, dresidual, |x| self.qkv.backward(x, &dqkv))?)])
    }
}
