//! Layers that carry a state from row to row: causal convolution, and the gated delta rule with its gates and its norm.
//!
//! The layout of attention says which rows follow which ([`Segments`]). Completions continue the state of their prompt.

mod cpu;
mod gpu;
mod memory;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use std::sync::Arc;

pub use memory::StateSizes;
pub(crate) use memory::{StateStore, States};
use omnigrpo_kernels::recurrent::{DeltaShape, SegmentError, Segments};

use crate::Param;
use crate::attention::{GroupCache, Layout};
use crate::decode::{DecodeBatch, DecodeRows};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::rows::Rows;

/// Layers that carry a state.
pub(crate) trait RecurrentOps {
    /// Computes a causal convolution along each sequence, followed by SiLU.
    fn causal(&self, x: &Rows, layer: &CausalConv, segments: &Host<Segments>) -> Result<Rows>;
    /// Returns the gradient of the convolution's input, and adds that of the weight to its buffer.
    fn causal_back(&self, x: &Rows, dy: &Rows, layer: &CausalConv, segments: &Host<Segments>)
    -> Result<Rows>;
    /// Computes the gates `[g | β]` of rows `[a | b]`.
    fn delta_gates(&self, x: &Rows, layer: &DeltaGates) -> Result<Rows>;
    /// Returns the gradient of the gates' input, and adds those of the weights to their buffers. `y` is the result of
    /// [`Self::delta_gates`].
    fn delta_gates_back(&self, x: &Rows, y: &Rows, dy: &Rows, layer: &DeltaGates) -> Result<Rows>;
    /// Computes the gated delta rule. Returns the output and the states between chunks.
    fn delta(
        &self,
        qkv: &Rows,
        gates: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<(Rows, Rows)>;
    /// Returns the gradients of packed rows and gates.
    fn delta_back(
        &self,
        qkv: &Rows,
        gates: &Rows,
        states: &Rows,
        dout: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<[Rows; 2]>;
    /// Computes `weight · rms(x) · silu(gate)` head by head. Returns the result and the statistics for the backward pass.
    fn gated_norm(&self, x: &Rows, gate: &Rows, norm: &GatedNorm) -> Result<(Rows, Rows)>;
    /// Returns the gradients of `x` and `gate`, and adds that of the weight to its buffer.
    fn gated_norm_back(
        &self,
        x: &Rows,
        gate: &Rows,
        stats: &Rows,
        dy: &Rows,
        norm: &GatedNorm,
    ) -> Result<[Rows; 2]>;
    /// Creates memory for the states of `layers` layers: those of the prompt, and those of `slots` completions.
    fn states(&self, layers: usize, slots: usize, sizes: StateSizes) -> std::io::Result<StateStore>;
    /// Writes the state of a prompt: the inputs of the convolution, and the last of the states between chunks.
    fn remember_prompt(&self, states: &mut States, layer: usize, x: &Rows, kept: &Rows);
    /// Computes a causal convolution of rows that continue completions, `each` rows for each slot, and moves their states on.
    fn causal_cached(
        &self,
        x: &Rows,
        layer: &CausalConv,
        index: usize,
        batch: &mut DecodeBatch,
        each: usize,
    ) -> Result<Rows>;
    /// Computes the gated delta rule of rows that continue completions, and moves their states on.
    fn delta_cached(
        &self,
        qkv: &Rows,
        gates: &Rows,
        heads: DeltaHeads,
        index: usize,
        batch: &mut DecodeBatch,
        each: usize,
    ) -> Result<Rows>;
}

/// Returns the sequences of `rows` rows, computed once per layout.
fn segments(op: &'static str, layout: &Layout, rows: usize) -> Result<Arc<Host<Segments>>> {
    type Known = std::result::Result<Arc<Host<Segments>>, SegmentError>;
    let known =
        layout.on(Device::Cpu, |layout| -> Known { Ok(Arc::new(Segments::of(layout, rows)?.into())) });
    match &*known {
        Ok(segments) if segments.rows() == rows => Ok(Arc::clone(segments)),
        Ok(segments) => Err(Error::shape(op, format!("a layout of {} rows for {rows}", segments.rows()))),
        Err(error) => Err(Error::shape(op, error.to_string())),
    }
}

/// Returns an error unless all operands are on the device of the first.
fn on_one_device(op: &'static str, first: &Rows, others: &[&Rows]) -> Result<()> {
    others.iter().try_for_each(|rows| first.device().check(op, rows))
}

/// A causal depthwise convolution along each sequence, followed by SiLU, without a bias.
#[derive(Clone, Debug)]
pub struct CausalConv {
    weight: Arc<Param>,
    channels: usize,
    taps: usize,
}

impl CausalConv {
    /// Creates the layer from its published weight `[channels, 1, taps]`.
    ///
    /// # Errors
    /// Returns an error if the weight has another rank, or does not have one to eight taps.
    pub fn new(weight: Arc<Param>) -> Result<Self> {
        match *weight.shape() {
            [channels, 1, taps @ 1..=8] => Ok(Self { weight, channels, taps }),
            _ => {
                let what = format!(
                    "a causal convolution of shape {:?}; expected [channels, 1, taps] with one to eight taps",
                    weight.shape()
                );
                Err(Error::Weight { name: weight.name().to_owned(), what })
            }
        }
    }

    pub fn weight(&self) -> &Arc<Param> {
        &self.weight
    }

    /// Returns the number of channels, which is the width of the rows.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Returns the number of rows in a window.
    pub fn taps(&self) -> usize {
        self.taps
    }

    /// Computes `silu(Σᵢ weight[:, i] · x[row − taps + 1 + i])`, `[t, channels] → [t, channels]`, where rows count along their
    /// sequence, and rows before its start are zeros.
    ///
    /// # Errors
    /// Returns an error if the width differs or if the layout does not describe sequences of the rows.
    pub fn forward(&self, x: &Rows, layout: &Layout) -> Result<Rows> {
        self.check(x)?;
        let segments = segments("causal convolution", layout, x.rows())?;
        x.device().backend().causal(x, self, &segments)
    }

    /// Returns the gradient of the input, given that of the output, and adds the gradient of the weight to its buffer.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn backward(&self, x: &Rows, dy: &Rows, layout: &Layout) -> Result<Rows> {
        self.check(x)?;
        on_one_device("causal convolution", x, &[dy])?;
        if dy.dims() != x.dims() {
            let what = format!("input {:?}, gradient {:?}", x.dims(), dy.dims());
            return Err(Error::shape("causal convolution", what));
        }
        let segments = segments("causal convolution", layout, x.rows())?;
        x.device().backend().causal_back(x, dy, self, &segments)
    }

    /// Computes the convolution of the next row of each slot of a batch, and moves the states of recurrent layer `index` on.
    ///
    /// # Errors
    /// Returns an error if the width or the number of rows differs, or if a cache has no such layer.
    pub fn forward_cached(&self, x: &Rows, index: usize, batch: &mut DecodeBatch) -> Result<Rows> {
        self.check(x)?;
        one_each("causal convolution", x, batch)?;
        check_states(x, index, &batch.groups, |sizes| sizes.fits_conv(self))?;
        x.device().backend().causal_cached(x, self, index, batch, 1)
    }

    /// Computes the convolution of consecutive rows that continue one slot.
    ///
    /// # Errors
    /// As for [`Self::forward_cached`].
    pub fn forward_extended(
        &self,
        x: &Rows,
        index: usize,
        cache: &mut GroupCache,
        slot: usize,
    ) -> Result<Rows> {
        self.check(x)?;
        let batch = &mut DecodeBatch::new(vec![DecodeRows { cache, slots: vec![slot] }]);
        check_states(x, index, &batch.groups, |sizes| sizes.fits_conv(self))?;
        x.device().backend().causal_cached(x, self, index, batch, x.rows())
    }

    fn check(&self, x: &Rows) -> Result<()> {
        self.weight.usable(x.device())?;
        match x.cols() == self.channels {
            true => Ok(()),
            false => {
                let what = format!("input is {:?}, the weight has {} channels", x.dims(), self.channels);
                Err(Error::shape(format!("causal convolution {}", self.weight.name()), what))
            }
        }
    }
}

/// Returns an error unless there is a row for every slot of the batch.
fn one_each(op: &'static str, x: &Rows, batch: &DecodeBatch) -> Result<()> {
    match batch.rows() {
        rows if rows == x.rows() => Ok(()),
        rows => Err(Error::shape(op, format!("{} rows for {rows} slots", x.rows()))),
    }
}

/// Returns an error unless all groups have states of recurrent layer `index`, of fitting sizes, for their slots.
fn check_states(
    x: &Rows,
    index: usize,
    groups: &[DecodeRows],
    fits: impl Fn(StateSizes) -> bool,
) -> Result<()> {
    for group in groups {
        group.cache.check_device(x.device())?;
        let fits = |states: &States| {
            index < states.layers
                && fits(states.sizes)
                && group.slots.iter().all(|&slot| slot < group.cache.lengths.len())
        };
        if !group.cache.states.as_ref().is_some_and(fits) {
            let what = format!("a cache without fitting states of layer {index} for slots {:?}", group.slots);
            return Err(Error::shape("recurrent layer", what));
        }
    }
    Ok(())
}

/// The gates of a gated delta rule: a log-decay and a weight for each value head.
#[derive(Clone, Debug)]
pub struct DeltaGates {
    /// Logarithm of the decay rate, `[value_heads]`.
    pub a_log: Arc<Param>,
    /// Bias of the decay's logit, `[value_heads]`.
    pub dt_bias: Arc<Param>,
}

impl DeltaGates {
    /// Computes `g = −exp(a_log) · ln(1 + exp(a + dt_bias))` and `β = sigmoid(b)` of rows `[a | b]`. Returns rows `[g | β]`,
    /// `[t, 2 · value_heads] → [t, 2 · value_heads]`.
    ///
    /// # Errors
    /// Returns an error if the sizes differ.
    pub fn forward(&self, x: &Rows) -> Result<Rows> {
        self.check(x)?;
        x.device().backend().delta_gates(x, self)
    }

    /// Returns the gradient of the input, given the output `y` and its gradient. Adds the gradients of the weights to their
    /// buffers.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn backward(&self, x: &Rows, y: &Rows, dy: &Rows) -> Result<Rows> {
        self.check(x)?;
        on_one_device("gates", x, &[y, dy])?;
        if y.dims() != x.dims() || dy.dims() != x.dims() {
            let what = format!("input {:?}, output {:?}, gradient {:?}", x.dims(), y.dims(), dy.dims());
            return Err(Error::shape("gates", what));
        }
        x.device().backend().delta_gates_back(x, y, dy, self)
    }

    fn check(&self, x: &Rows) -> Result<()> {
        [&self.a_log, &self.dt_bias].into_iter().try_for_each(|weight| weight.usable(x.device()))?;
        let heads = self.a_log.len();
        match self.dt_bias.len() == heads && x.cols() == 2 * heads {
            true => Ok(()),
            false => {
                let what =
                    format!("input is {:?}, weights have {heads} and {}", x.dims(), self.dt_bias.len());
                Err(Error::shape(format!("gates {}", self.a_log.name()), what))
            }
        }
    }
}

/// Heads of a gated delta rule. A packed row is `[queries | keys | values]`; its gates are `[g | β]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaHeads {
    pub key: usize,
    /// Number of value heads; a key head serves `value / key` consecutive ones.
    pub value: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl DeltaHeads {
    pub(crate) fn shape(self) -> DeltaShape {
        DeltaShape {
            key_heads: self.key,
            value_heads: self.value,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
        }
    }

    /// Returns the number of columns of a packed row.
    pub fn packed_width(self) -> usize {
        self.shape().packed_width()
    }

    /// Returns the number of columns of the values, which is also that of the output.
    pub fn value_width(self) -> usize {
        self.shape().value_width()
    }

    /// Returns the number of elements of the states of all heads.
    pub fn state_len(self) -> usize {
        self.shape().state_len()
    }

    /// Computes the gated delta rule of packed rows `[t, packed_width]` with gates `[t, 2 · value]`. With the state `S`, zero at
    /// the start of a sequence, a row does `S ← exp(g) S; S ← S + k ⊗ β (v − Sᵀ k); o = Sᵀ q`, where `k` has length one and `q`
    /// length `1 / sqrt(key_dim)`. Returns the output `[t, value_width]`, and the states between chunks of 64 rows, which are all
    /// that the backward pass needs besides the arguments. Source: arXiv 2412.06464.
    ///
    /// # Errors
    /// Returns an error if sizes differ or if the layout does not describe sequences of the rows.
    pub fn forward(self, qkv: &Rows, gates: &Rows, layout: &Layout) -> Result<(Rows, Rows)> {
        self.check(qkv, gates)?;
        let segments = segments(OP, layout, qkv.rows())?;
        qkv.device().backend().delta(qkv, gates, &segments, self)
    }

    /// Computes [`Self::forward`] of one sequence, a prompt. The last row of the states is the state after the prompt.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn forward_prompt(self, qkv: &Rows, gates: &Rows) -> Result<(Rows, Rows)> {
        self.check(qkv, gates)?;
        qkv.device().backend().delta(qkv, gates, &Segments::one(qkv.rows()).into(), self)
    }

    /// Returns the gradients of packed rows and gates, given that of the output. The other arguments are those and the states of
    /// [`Self::forward`].
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn backward(
        self,
        qkv: &Rows,
        gates: &Rows,
        states: &Rows,
        dout: &Rows,
        layout: &Layout,
    ) -> Result<[Rows; 2]> {
        self.check(qkv, gates)?;
        on_one_device(OP, qkv, &[states, dout])?;
        let segments = segments(OP, layout, qkv.rows())?;
        let expected = (qkv.rows(), self.value_width());
        if dout.dims() != expected || states.dims() != (segments.states(), self.state_len()) {
            let what =
                format!("states {:?}, gradient {:?}; expected {expected:?}", states.dims(), dout.dims());
            return Err(Error::shape(OP, what));
        }
        qkv.device().backend().delta_back(qkv, gates, states, dout, &segments, self)
    }

    /// Computes the gated delta rule of the next row of each slot of a batch, and moves the states of recurrent layer `index` on.
    ///
    /// # Errors
    /// Returns an error if sizes differ, if a cache has no such layer, or if a GPU does not decode with such heads.
    pub fn forward_cached(
        self,
        qkv: &Rows,
        gates: &Rows,
        index: usize,
        batch: &mut DecodeBatch,
    ) -> Result<Rows> {
        self.check(qkv, gates)?;
        one_each(OP, qkv, batch)?;
        check_states(qkv, index, &batch.groups, |sizes| sizes.state == self.state_len())?;
        qkv.device().backend().delta_cached(qkv, gates, self, index, batch, 1)
    }

    /// Computes the gated delta rule of consecutive rows that continue one slot.
    ///
    /// # Errors
    /// As for [`Self::forward_cached`].
    pub fn forward_extended(
        self,
        qkv: &Rows,
        gates: &Rows,
        index: usize,
        cache: &mut GroupCache,
        slot: usize,
    ) -> Result<Rows> {
        self.check(qkv, gates)?;
        let batch = &mut DecodeBatch::new(vec![DecodeRows { cache, slots: vec![slot] }]);
        check_states(qkv, index, &batch.groups, |sizes| sizes.state == self.state_len())?;
        qkv.device().backend().delta_cached(qkv, gates, self, index, batch, qkv.rows())
    }

    fn check(self, qkv: &Rows, gates: &Rows) -> Result<()> {
        on_one_device(OP, qkv, &[gates])?;
        let whole =
            self.key > 0 && self.key_dim > 0 && self.value_dim > 0 && self.value.is_multiple_of(self.key);
        if !whole || qkv.cols() != self.packed_width() || gates.dims() != (qkv.rows(), 2 * self.value) {
            let what = format!("packed rows {:?} and gates {:?} for {self:?}", qkv.dims(), gates.dims());
            return Err(Error::shape(OP, what));
        }
        Ok(())
    }
}

const OP: &str = "gated delta rule";

/// An RMS norm of each head, multiplied by SiLU of a gate: `y = weight · x / sqrt(mean(x²) + eps) · silu(gate)`.
#[derive(Clone, Debug)]
pub struct GatedNorm {
    /// Scale of a head's columns, which all heads share.
    pub weight: Arc<Param>,
    /// Constant added to the mean square.
    pub eps: f32,
}

impl GatedNorm {
    /// Normalises heads that are side by side, `[t, heads · d] → [t, heads · d]`, and returns the statistics for the backward pass.
    ///
    /// # Errors
    /// Returns an error if the sizes differ.
    pub fn forward(&self, x: &Rows, gate: &Rows) -> Result<(Rows, Rows)> {
        self.check(x, gate)?;
        x.device().backend().gated_norm(x, gate, self)
    }

    /// Returns the gradients of `x` and `gate`, given the statistics of [`Self::forward`] and the gradient of its result. Adds the
    /// gradient of the weight to its buffer.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn backward(&self, x: &Rows, gate: &Rows, stats: &Rows, dy: &Rows) -> Result<[Rows; 2]> {
        self.check(x, gate)?;
        on_one_device("gated norm", x, &[stats, dy])?;
        if dy.dims() != x.dims() {
            let what = format!("input {:?}, gradient {:?}", x.dims(), dy.dims());
            return Err(Error::shape("gated norm", what));
        }
        x.device().backend().gated_norm_back(x, gate, stats, dy, self)
    }

    fn check(&self, x: &Rows, gate: &Rows) -> Result<()> {
        self.weight.usable(x.device())?;
        on_one_device("gated norm", x, &[gate])?;
        let d = self.weight.len();
        match d > 0 && x.cols().is_multiple_of(d) && gate.dims() == x.dims() {
            true => Ok(()),
            false => {
                let what = format!("input {:?}, gate {:?}, weight of {d}", x.dims(), gate.dims());
                Err(Error::shape(format!("gated norm {}", self.weight.name()), what))
            }
        }
    }
}
