//! Devices, and the contract that every device implements.
//!
//! A [`Device`] is a value: callers pass it down, nothing looks it up. Each operation of this crate obtains the
//! [`Backend`] of its first operand's device and calls one of its methods, so a match on the device happens once per
//! operation. Backends check only that operands are on their device; operations check shapes.

use std::fmt;
use std::ops::Range;

use omnigrpo_kernels::activation::Activation;
use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};

use crate::attention::{AttentionHeads, Layout};
use crate::conv::{Mix, Patches};
use crate::decode::DecodeBatch;
use crate::embedding::{Ids, Taps, Tokens};
use crate::error::{Error, Result};
use crate::experts::{ExpertLinear, Routes};
use crate::head::{Scores, Targets};
use crate::linear::{Linear, Order};
use crate::norm::Norm;
use crate::optim::{Moments, Step};
use crate::param::Param;
use crate::rope::RopeTable;
use crate::rows::{Index, Rows};
use crate::{cpu, outline, twin};

/// A place where arrays are stored and computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// CPU: f32 in main memory, with the kernels of `omnigrpo-kernels`.
    #[default]
    Cpu,
    /// Reference for tests: f64 in main memory, with plain loops.
    Twin,
    /// NVIDIA GPU or its emulator: bf16 or f32 in its memory, with the kernels of `omnigrpo-gpu`.
    Gpu(crate::gpu::Card),
    /// Sizes without values, to measure what a pass needs ([`footprint`](crate::footprint)). Weights may be outlines.
    Outline,
}

impl Device {
    /// Returns every device of this build that exists on every machine, including a new emulator.
    #[must_use]
    pub fn all() -> Vec<Self> {
        [Self::Cpu, Self::Twin].into_iter().chain(Self::emulator()).collect()
    }

    /// Creates an emulator of a GPU, in builds for tests.
    #[must_use]
    pub fn emulator() -> Option<Self> {
        #[cfg(feature = "emulator")]
        return Some(Self::Gpu(crate::gpu::Card::emulated(None)));
        #[cfg(not(feature = "emulator"))]
        None
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Self::Cpu => &cpu::Cpu,
            Self::Twin => &twin::Twin,
            Self::Gpu(card) => card,
            Self::Outline => &outline::Outline,
        }
    }

    /// Waits for the queued work of this device and returns its first failure, such as insufficient memory. Operations
    /// on a GPU do not fail themselves: they are queued, and after a failure all results are NaN.
    pub fn finish(self) -> Result<()> {
        match self {
            Self::Gpu(card) => card.finish(),
            _ => Ok(()),
        }
    }

    /// Returns how many rows of logits to compute and draw from at a time. On a GPU the tokens of all rows in flight
    /// reach the host in one copy; on a CPU logits stay in its cache.
    #[must_use]
    pub fn logit_rows(self) -> usize {
        match self {
            Self::Gpu(_) => 128,
            _ => 16,
        }
    }

    /// Returns whether decoding stores, readable by the host, what a backward pass needs.
    #[must_use]
    pub fn remembers_decoding(self) -> bool {
        self == Self::Cpu
    }

    /// Fails if `rows` is on another device.
    pub(crate) fn check(self, op: &'static str, rows: &Rows) -> Result<()> {
        match rows.device() {
            got if got == self => Ok(()),
            got => Err(Error::Device { op, got, expected: self }),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Twin => f.write_str("twin"),
            Self::Gpu(card) => card.fmt(f),
            Self::Outline => f.write_str("outline"),
        }
    }
}

/// The operations of a device: the complete interface between models and arithmetic.
///
/// `t` rows, `k` inputs, `n` outputs. Functions that return [`Rows`] create new ones; those with `&mut Rows` add to or
/// replace existing values, as each states. Gradients of weights are added to the weight's own buffer, and only if the
/// weight is trained.
pub(crate) trait Backend: Sync {
    // Memory.

    /// Creates `[rows, cols]` of zeros.
    fn zeros(&self, rows: usize, cols: usize) -> Rows;
    /// Creates rows from host values in row-major order. `data.len() == rows · cols`.
    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows;
    /// Returns the values in row-major order, rounded to f32.
    fn download(&self, x: &Rows) -> Vec<f32>;
    /// Returns the values in row-major order, without rounding.
    fn download_f64(&self, x: &Rows) -> Vec<f64>;
    /// Computes `to += from`.
    fn add(&self, to: &mut Rows, from: &Rows);
    /// Computes `x *= by`.
    fn scale(&self, x: &mut Rows, by: f32);
    /// Returns the rows `index` of `x`, in this order.
    fn select(&self, x: &Rows, index: &Index) -> Rows;
    /// Reverses [`Self::select`] for distinct rows: returns `rows` rows, zero where `index` has none.
    fn spread(&self, x: &Rows, index: &Index, rows: usize) -> Rows;
    /// Returns some columns of every row.
    fn columns(&self, x: &Rows, columns: Range<usize>) -> Rows;
    /// Replaces the columns from `first` on.
    fn set_columns(&self, to: &mut Rows, first: usize, from: &Rows);
    /// Replaces the rows from `first` on with the rows `range` of `from`.
    fn set_rows(&self, to: &mut Rows, first: usize, from: &Rows, range: Range<usize>);
    /// Zeroes some rows.
    fn clear_rows(&self, x: &mut Rows, range: Range<usize>);

    // Linear layers. The outputs of several layers are side by side.

    /// Computes `x Wᵀ + b (+ residual)`, `[t, k] → [t, Σ n]`.
    fn linear(&self, x: &Rows, layers: &[Linear], residual: Option<&Rows>, order: Order) -> Rows;
    /// Adds `x Wᵀ` to the columns of `y` from `col` on, without bias.
    fn linear_add(&self, y: &mut Rows, col: usize, x: &Rows, weight: &Linear, order: Order);
    /// Computes `dy W`, `[t, Σ n] → [t, k]`.
    fn linear_dx(&self, dy: &Rows, layers: &[Linear]) -> Rows;
    /// Computes `dy W` of one layer, whose columns of `dy` begin at `col`, and adds it to `dx` if given.
    fn linear_dx_of(&self, dx: Option<Rows>, dy: &Rows, col: usize, weight: &Linear) -> Rows;
    /// Adds `dyᵀ x` and the column sums of `dy` to the gradients of weights and biases. The layers' columns of `dy`
    /// begin at `col`.
    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]);
    /// Zeroes dropped elements of `x` and multiplies the others by `1 / (1 − rate)`.
    fn dropout(&self, x: &Rows, mask: &omnigrpo_kernels::dropout::Mask) -> Rows;

    // Experts. Arrays have one row per place.

    /// Multiplies each place by its expert's matrix, `[p, k] → [p, n]`.
    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, order: Order) -> Rows;
    /// Computes `dy Wᵀ`, `[p, n] → [p, k]`.
    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows;
    /// Adds `xᵀ dy` of each expert's places to the gradient of its matrix.
    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes);
    /// Multiplies each place by its weight, the softmax over the logits `[t, experts]` of its row's experts.
    fn weigh(&self, x: &Rows, logits: &Rows, routes: &Routes) -> Rows;
    /// Returns the gradients of `x` and `logits`.
    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, routes: &Routes) -> [Rows; 2];

    // Normalisation.

    /// Returns the normalised rows and the statistics for the backward pass.
    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows);
    /// Adds the gradient of the input to `dx`, and those of weight and bias to their buffers.
    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm);

    // Attention. A packed row is `[queries | keys | values]`.

    /// Computes self-attention of packed rows: `[t, q · d]` and the log-sum-exps `[t, q]`.
    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows);
    /// Returns the gradient of the packed rows.
    fn attention_back(
        &self,
        qkv: &Rows,
        out: &Rows,
        lse: &Rows,
        dout: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows;
    /// Creates a cache for the keys and values of a prompt of `rows` tokens and of `slots` completions of equal maximum
    /// length, in each layer.
    fn cache(
        &self,
        layers: usize,
        slots: usize,
        rows: usize,
        heads: AttentionHeads,
    ) -> std::io::Result<crate::cache::Store>;
    /// Writes keys and values of packed rows to the first rows of a layer's cache.
    fn cache_prompt(
        &self,
        cache: &mut crate::cache::GroupCache,
        layer: usize,
        qkv: &Rows,
        heads: AttentionHeads,
    );
    /// Appends each row to its slot's cache and returns its attention over prompt and slot, with its log-sum-exps if
    /// [`Device::remembers_decoding`].
    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
    ) -> (Rows, Rows);
    /// Rotates the first `heads` heads of each row in place.
    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, inverse: bool);

    // Elementwise.

    /// Computes `act(x)`.
    fn activation(&self, x: &Rows, act: Activation) -> Rows;
    /// Replaces `x` with the gradient of the activation's input.
    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Activation);
    /// Computes `silu(gate) · up`, `[t, 2i] → [t, i]`.
    fn swiglu(&self, gate_up: &Rows) -> Rows;
    /// Replaces `gate_up` with its gradient.
    fn swiglu_back(&self, gate_up: &mut Rows, dy: &Rows);
    /// Computes `residual + x · scale`, with one scale per column.
    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows;
    /// Returns the gradient of [`Self::scale_onto`] for `x` and adds that of the scale to its buffer.
    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows;

    // Tables and sparse sums of rows.

    /// Returns rows of a table.
    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows;
    /// Adds rows to rows of a table's gradient.
    fn embed_back(&self, table: &Param, ids: &[u32], dx: &Rows);
    /// Adds a row of a table to each row that has an id.
    fn add_rows(&self, x: &mut Rows, table: &Param, ids: &Ids);
    /// Adds the table's gradient of [`Self::add_rows`].
    fn add_rows_back(&self, table: &Param, ids: &Ids, dy: &Rows);
    /// Adds a weighted sum of a table's rows to each row.
    fn add_mixed(&self, x: &mut Rows, table: &Param, taps: &Taps);
    /// Adds the table's gradient of [`Self::add_mixed`].
    fn add_mixed_back(&self, table: &Param, taps: &Taps, dy: &Rows);
    /// Computes weighted sums of rows.
    fn mix(&self, x: &Rows, mix: &Mix) -> Rows;
    /// Returns the gradient of [`Self::mix`] for an input of `rows` rows.
    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows;

    // Convolution over channels-last rows.

    /// Computes a convolution over gathered patches.
    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows;
    /// Returns the gradient of its input, and adds those of weight and bias to their buffers.
    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows;
    /// Computes a depthwise 3×3 convolution of images of `side = [height, width]`.
    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows;
    /// Returns the gradient of its input, and adds that of the weight to its buffer.
    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows;
    /// Computes `x · sigmoid(gate)`; each row of the gate applies to consecutive rows of `x`.
    fn gate(&self, x: &Rows, gate: &Rows) -> Rows;
    /// Returns the gradients of `x` and `gate`.
    fn gate_back(&self, x: &Rows, gate: &Rows, dy: &Rows) -> [Rows; 2];
    /// Computes `Σ softmax(logits)ᵢ · xᵢ` over the alternatives in `x`.
    fn blend(&self, x: &Rows, logits: &Rows) -> Rows;
    /// Returns the gradients of `x` and `logits`.
    fn blend_back(&self, x: &Rows, logits: &Rows, dy: &Rows) -> [Rows; 2];

    // The output head.

    /// Returns log-probabilities of targets, without a matrix of logits.
    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores;
    /// Returns the gradient of `normed` and adds that of the head to its buffer. `dentropy` is per row.
    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        targets: &Targets,
        scores: &Scores,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Rows;
    /// Returns logits `[t, vocabulary]`; rows are independent.
    fn logits(&self, normed: &Rows, head: &Param) -> Rows;
    /// Draws a token from each row of logits, which it overwrites. A draw is `None` if a logit is NaN or +∞, or if no
    /// token can be drawn.
    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>>;

    // The optimizer.

    /// Returns the sum of squares of all elements.
    fn sum_of_squares(&self, x: &Rows) -> f64;
    /// Applies one AdamW step to a weight, using its gradient.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()>;
}
