//! The part of a block that mixes rows, between the block's input layers and its output layer.
//!
//! Source: `transformers` 5.23 `models/qwen3_5` for attention with an output gate and for the gated delta rule.
//!
//! Shapes: `t` rows, `q` and `kv` heads of `d` columns; `c` channels of the convolution, `v` columns of the delta rule's values.

use std::sync::Arc;

use omnigrpo_ops::{
    AttentionHeads, CausalConv, DecodeBatch, DeltaGates, DeltaHeads, GatedNorm, GroupCache, Layout, Param,
    Result, Rows,
};

/// How a block mixes rows.
pub enum Mixer {
    /// Softmax attention.
    Attention,
    /// Softmax attention, whose output is multiplied by the sigmoid of a gate. The first input layer has the queries of each head,
    /// followed by the gate of that head.
    GatedAttention,
    /// The gated delta rule.
    Delta(DeltaMixer),
}

/// The gated delta rule with its convolution, gates and norm. A packed row is `[queries, keys and values | gate of the output |
/// logits of the decay | logits of β]`: `[c | v | value heads | value heads]`.
pub struct DeltaMixer {
    /// Convolution of queries, keys and values.
    pub conv: CausalConv,
    /// Decays and weights.
    pub gates: DeltaGates,
    /// Norm of the output, with its gate.
    pub norm: GatedNorm,
    /// Numbers and sizes of the heads.
    pub heads: DeltaHeads,
}

impl Mixer {
    /// Returns the weights, without those of input and output layers.
    pub(crate) fn params(&self) -> Vec<&Arc<Param>> {
        match self {
            Self::Delta(DeltaMixer { conv, gates, norm, .. }) => {
                vec![conv.weight(), &gates.a_log, &gates.dt_bias, &norm.weight]
            }
            Self::Attention | Self::GatedAttention => Vec::new(),
        }
    }
}

impl DeltaMixer {
    fn part(&self, packed: &Rows, part: usize) -> Result<Rows> {
        let (c, v, gates) = (self.conv.channels(), self.heads.value_width(), 2 * self.heads.value);
        let (first, width) = [(0, c), (c, v), (c + v, gates)][part];
        packed.columns(first..first + width)
    }

    /// Returns the output of the delta rule `[t, v]`, and the gates `[t, 2 · value heads]`.
    pub(crate) fn forward(&self, packed: &Rows, layout: &Layout) -> Result<(Rows, Rows)> {
        let mixed = self.conv.forward(&self.part(packed, 0)?, layout)?;
        let gates = self.gates.forward(&self.part(packed, 2)?)?;
        Ok((self.heads.forward(&mixed, &gates, layout)?.0, gates))
    }

    /// Computes [`Self::forward`] of a prompt, and writes its state to recurrent layer `index` of the cache.
    pub(crate) fn prefill(
        &self,
        packed: &Rows,
        layout: &Layout,
        index: usize,
        cache: &mut GroupCache,
    ) -> Result<(Rows, Rows)> {
        let x = self.part(packed, 0)?;
        let gates = self.gates.forward(&self.part(packed, 2)?)?;
        let (out, states) = self.heads.forward_prompt(&self.conv.forward(&x, layout)?, &gates)?;
        cache.write_prompt_state(index, &x, &states)?;
        Ok((out, gates))
    }

    /// Computes [`Self::forward`] of the next row of each slot.
    pub(crate) fn decode(
        &self,
        packed: &Rows,
        index: usize,
        batch: &mut DecodeBatch,
    ) -> Result<(Rows, Rows)> {
        let mixed = self.conv.forward_cached(&self.part(packed, 0)?, index, batch)?;
        let gates = self.gates.forward(&self.part(packed, 2)?)?;
        Ok((self.heads.forward_cached(&mixed, &gates, index, batch)?, gates))
    }

    /// Computes [`Self::forward`] of consecutive rows that continue one slot.
    pub(crate) fn extend(
        &self,
        packed: &Rows,
        index: usize,
        cache: &mut GroupCache,
        slot: usize,
    ) -> Result<(Rows, Rows)> {
        let mixed = self.conv.forward_extended(&self.part(packed, 0)?, index, cache, slot)?;
        let gates = self.gates.forward(&self.part(packed, 2)?)?;
        Ok((self.heads.forward_extended(&mixed, &gates, index, cache, slot)?, gates))
    }

    /// Normalises the output of the delta rule and multiplies it by its gate.
    pub(crate) fn open(&self, packed: &Rows, out: &Rows) -> Result<Rows> {
        Ok(self.norm.forward(out, &self.part(packed, 1)?)?.0)
    }

    /// Returns the gradients of the output of the delta rule and of its gate.
    pub(crate) fn open_back(&self, packed: &Rows, out: &Rows, dy: &Rows) -> Result<[Rows; 2]> {
        let gate = self.part(packed, 1)?;
        let stats = self.norm.forward(out, &gate)?.1;
        self.norm.backward(out, &gate, &stats, dy)
    }

    /// Returns the gradient of the packed rows. The states between chunks are computed again, so that no pass keeps them.
    pub(crate) fn backward(
        &self,
        packed: &Rows,
        gates: &Rows,
        dout: &Rows,
        dgate: &Rows,
        layout: &Layout,
    ) -> Result<Rows> {
        let x = self.part(packed, 0)?;
        let mixed = self.conv.forward(&x, layout)?;
        let states = self.heads.forward(&mixed, gates, layout)?.1;
        let [dmixed, dgates] = self.heads.backward(&mixed, gates, &states, dout, layout)?;
        drop((states, mixed));
        let mut dpacked = Rows::zeros(packed.device(), packed.rows(), packed.cols());
        dpacked.set_columns(0, &self.conv.backward(&x, &dmixed, layout)?)?;
        dpacked.set_columns(self.conv.channels(), dgate)?;
        let dlogits = self.gates.backward(&self.part(packed, 2)?, gates, &dgates)?;
        dpacked.set_columns(self.conv.channels() + self.heads.value_width(), &dlogits)?;
        Ok(dpacked)
    }
}

/// Returns the queries, keys and values of rows whose queries alternate with gates, `[t, (2q + 2kv) · d] → [t, (q + 2kv) · d]`.
pub(crate) fn without_gates(raw: &Rows, heads: AttentionHeads) -> Result<Rows> {
    let q = heads.q_width();
    let mut qkv = Rows::zeros(raw.device(), raw.rows(), heads.packed_width());
    qkv.set_columns(0, &of_heads(raw, heads, 0)?)?;
    qkv.set_columns(q, &raw.columns(2 * q..raw.cols())?)?;
    Ok(qkv)
}

/// Returns the gates of such rows, `[t, q · d]`.
pub(crate) fn gates(raw: &Rows, heads: AttentionHeads) -> Result<Rows> {
    of_heads(raw, heads, heads.dim)
}

/// Returns `d` columns of each pair of a query head and its gate, from column `first` on.
fn of_heads(raw: &Rows, heads: AttentionHeads, first: usize) -> Result<Rows> {
    let (t, q) = (raw.rows(), heads.q_width());
    let pairs = raw.columns(0..2 * q)?.reshape(t * heads.q, 2 * heads.dim)?;
    pairs.columns(first..first + heads.dim)?.reshape(t, q)
}

/// Returns the gradient of the rows that [`without_gates`] and [`gates`] split.
pub(crate) fn join_gates(dqkv: &Rows, dgates: &Rows, heads: AttentionHeads) -> Result<Rows> {
    let (t, q, d) = (dqkv.rows(), heads.q_width(), heads.dim);
    let mut pairs = Rows::zeros(dqkv.device(), t * heads.q, 2 * d);
    pairs.set_columns(0, &dqkv.columns(0..q)?.reshape(t * heads.q, d)?)?;
    pairs.set_columns(d, &dgates.clone().reshape(t * heads.q, d)?)?;
    let mut draw = Rows::zeros(dqkv.device(), t, q + heads.packed_width());
    draw.set_columns(0, &pairs.reshape(t, 2 * q)?)?;
    draw.set_columns(2 * q, &dqkv.columns(q..dqkv.cols())?)?;
    Ok(draw)
}
