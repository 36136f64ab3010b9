//! Devices, and the contract that every device implements.
//!
//! A [`Device`] is a value that callers pass down; there is no global device. Each operation of this crate obtains the
//! [`Backend`] of its first operand's device and calls one of its methods. The code therefore branches on the device once per
//! operation. Backends check only that operands are on their device; operations check shapes.

use std::fmt;

use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};

use crate::attention::{AttentionHeads, Layout};
use crate::conv::{Mix, Patches};
use crate::decode::DecodeBatch;
use crate::embedding::Tokens;
use crate::error::{Error, Result};
use crate::experts::{ExpertLinear, Routes};
use crate::head::{Scores, Targets};
use crate::linear::{Linear, Onto, Order};
use crate::mlp::Nonlinearity;
use crate::norm::Norm;
use crate::optim::{Moments, Step};
use crate::param::Param;
use crate::rope::RopeTable;
use crate::rows::{Rows, Window};
use crate::{cpu, outline, twin};

/// Device that stores arrays and computes with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// CPU: f32 in main memory, with the kernels of `omnigrpo-kernels`.
    #[default]
    Cpu,
    /// Reference for tests: f64 in main memory, with plain loops.
    Twin,
    /// NVIDIA GPU or emulator of one: bf16 or f32 in GPU memory, with the kernels of `omnigrpo-gpu`.
    Gpu(crate::gpu::Card),
    /// Sizes without values, which measure the memory that a pass needs ([`footprint`](crate::footprint)). Weights may be
    /// outlines.
    Outline,
}

impl Device {
    /// Returns the devices of this build that are available on every machine, including a new emulator.
    #[must_use]
    pub fn all() -> Vec<Self> {
        [Self::Cpu, Self::Twin].into_iter().chain(Self::emulator()).collect()
    }

    /// Creates an emulator of a GPU. Returns `None` in builds without the feature `emulator`.
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

    /// Waits for the queued work of this device and returns the first failure, such as insufficient memory. An operation on a GPU
    /// is only queued, so it does not report a failure. After a failure, all results are NaN.
    pub fn finish(self) -> Result<()> {
        match self {
            Self::Gpu(card) => card.finish(),
            _ => Ok(()),
        }
    }

    /// Returns the number of rows for which logits are computed and drawn at a time. On a GPU, the tokens of all rows in a batch
    /// reach the host in one copy. On a CPU, the logits stay in the processor's cache.
    #[must_use]
    pub fn logit_rows(self) -> usize {
        match self {
            Self::Gpu(_) => 128,
            _ => 16,
        }
    }

    /// Returns whether decoding stores the values that a backward pass needs, so that the host can read them.
    #[must_use]
    pub fn remembers_decoding(self) -> bool {
        self == Self::Cpu
    }

    /// Returns an error if `rows` is on another device.
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

/// Weights of [`Backend::weigh`].
#[derive(Clone, Copy)]
pub(crate) enum Weighing<'a> {
    /// Computes `x · sigmoid(logits)`. Each row of logits applies to consecutive rows of `x`.
    Gate,
    /// Computes `Σ softmax(logits)ᵢ · xᵢ` over the alternatives in `x`.
    Blend,
    /// Multiplies each place by the softmax over the logits `[t, experts]` of the experts of its row.
    Experts(&'a Routes),
}

impl Weighing<'_> {
    /// Returns the number of rows of the result.
    pub fn rows(self, x: &Rows, logits: &Rows) -> usize {
        if let Self::Blend = self { x.rows() / logits.cols() } else { x.rows() }
    }
}

/// The operations of a device: the complete interface between models and arithmetic.
///
/// Shapes: `t` rows, `k` inputs, `n` outputs. Functions that return [`Rows`] create new ones. Functions with `&mut Rows` add to
/// existing values or replace them, as their comments state. The gradient of a weight is added to the weight's buffer, and only
/// if the weight is trained.
pub(crate) trait Backend: Sync {
    // Memory.

    /// Returns `[rows, cols]` zeros, in the dtype of `like` if given and otherwise in f32.
    fn zeros(&self, rows: usize, cols: usize, like: Option<&Rows>) -> Rows;
    /// Creates rows from host values in row-major order. `data.len()` must be `rows · cols`.
    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows;
    /// Returns the values in row-major order, rounded to f32.
    fn download(&self, x: &Rows) -> Vec<f32>;
    /// Computes `to += from`.
    fn add(&self, to: &mut Rows, from: &Rows);
    /// Computes `x *= by`.
    fn scale(&self, x: &mut Rows, by: f32);
    /// Returns a copy of `[rows, cols]` values of `x`.
    fn part(&self, x: &Rows, of: Window, size: [usize; 2]) -> Rows;
    /// Replaces `size = [rows, cols]` values of `to` with values of `from`.
    fn set_part(&self, to: &mut Rows, at: Window, from: &Rows, of: Window, size: [usize; 2]);

    // Linear layers. If there are several layers, their outputs are side by side in each row.

    /// Computes `x Wᵀ + b`, `[t, k] → [t, Σ n]`, and adds it to `onto`.
    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows;
    /// Computes `dy W`, `[t, Σ n] → [t, k]`, of layers whose columns of `dy` begin at `col`, and adds it to `dx` if given.
    fn linear_dx(&self, dx: Option<Rows>, dy: &Rows, col: usize, layers: &[Linear]) -> Rows;
    /// Adds `dyᵀ x` to the gradients of weights, and the column sums of `dy` to the gradients of biases. The layers' columns of
    /// `dy` begin at `col`.
    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]);
    /// Sets the dropped elements of `x` to zero and multiplies the others by `1 / (1 − rate)`.
    fn dropout(&self, x: &Rows, mask: &omnigrpo_kernels::dropout::Mask) -> Rows;

    // Experts. Arrays have one row per place.

    /// Multiplies each place by the matrix of its expert, `[p, k] → [p, n]`.
    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, order: Order) -> Rows;
    /// Computes `dy Wᵀ` with the matrix of each place's expert, `[p, n] → [p, k]`.
    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows;
    /// Adds `xᵀ dy`, over the places of each expert, to the gradient of the expert's matrix.
    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes);
    /// Multiplies rows by weights, which are a function of logits ([`Weighing`]).
    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows;
    /// Returns the gradients of [`Self::weigh`] with respect to `x` and `logits`.
    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, by: Weighing) -> [Rows; 2];

    // Normalisation.

    /// Returns the normalised rows and the statistics for the backward pass.
    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows);
    /// Adds the gradient of the input to `dx`, and the gradients of weight and bias to their buffers.
    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm);

    // Attention. A packed row is `[queries | keys | values]`.

    /// Computes self-attention of packed rows. Returns the output `[t, q · d]` and the log-sum-exp values `[t, q]`.
    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows);
    /// Returns the gradient of the packed rows, given the gradient of the output.
    fn attention_back(
        &self,
        qkv: &Rows,
        out: &Rows,
        lse: &Rows,
        dout: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows;
    /// Creates a cache for the keys and values of all layers: those of a prompt of `rows` tokens, and those of `slots`
    /// completions of equal maximum length.
    fn cache(
        &self,
        layers: usize,
        slots: usize,
        rows: usize,
        heads: AttentionHeads,
    ) -> std::io::Result<crate::cache::Store>;
    /// Writes the keys and values of packed rows to the first rows of a layer's cache.
    fn cache_prompt(
        &self,
        cache: &mut crate::cache::GroupCache,
        layer: usize,
        qkv: &Rows,
        heads: AttentionHeads,
    );
    /// Appends each row to the cache of its slot and returns its attention over prompt and slot. Also returns the log-sum-exp
    /// values if [`Device::remembers_decoding`] is true.
    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
    ) -> (Rows, Rows);
    /// Appends consecutive rows to one slot and returns as [`Self::attend_cached`] does. Each row also sees the rows before it.
    /// Returns `None` if the device appends rows only one by one.
    fn attend_extended(
        &self,
        _qkv: &Rows,
        _layer: usize,
        _cache: &mut crate::cache::GroupCache,
        _slot: usize,
        _heads: AttentionHeads,
    ) -> Option<(Rows, Rows)> {
        None
    }
    /// Applies rotary positions to the first `heads` heads of each row, in place.
    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, inverse: bool);

    // Elementwise operations.

    /// Computes `act(x)`, `[t, i] → [t, i]`, or `[t, 2i] → [t, i]` for SwiGLU.
    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows;
    /// Replaces `x`, the input of an activation, with its gradient.
    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Nonlinearity);
    /// Computes `residual + x · scale`, with one scale per column.
    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows;
    /// Returns the gradient of [`Self::scale_onto`] with respect to `x`, and adds the gradient of the scale to its buffer.
    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows;

    // Sparse sums of rows, which may be the rows of a table.

    /// Returns the rows `ids` of a table.
    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows;
    /// Adds weighted sums of the table's rows to `x`.
    fn add_rows(&self, x: &mut Rows, table: &Param, mix: &Mix);
    /// Adds the gradient of [`Self::add_rows`] with respect to the table to the table's buffer.
    fn add_rows_back(&self, table: &Param, mix: &Mix, dy: &Rows);
    /// Computes weighted sums of rows.
    fn mix(&self, x: &Rows, mix: &Mix) -> Rows;
    /// Returns the gradient of [`Self::mix`] with respect to an input of `rows` rows.
    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows;

    // Convolution over channels-last rows.

    /// Computes a convolution over gathered patches.
    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows;
    /// Returns the gradient of the convolution's input, and adds the gradients of weight and bias to their buffers.
    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows;
    /// Computes a depthwise 3×3 convolution of images of `side = [height, width]`.
    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows;
    /// Returns the gradient of the convolution's input, and adds the gradient of the weight to its buffer.
    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows;

    // The output head.

    /// Returns log-probabilities of targets, without a matrix of logits.
    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores;
    /// Returns the gradient of `normed`, and adds the gradient of the head to its buffer. `dentropy` has one value per row.
    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        targets: &Targets,
        scores: &Scores,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Rows;
    /// Returns logits `[t, vocabulary]`. The logits of a row do not depend on other rows.
    fn logits(&self, normed: &Rows, head: &Param) -> Rows;
    /// Draws a token from each row of logits, and overwrites the logits. A draw is `None` if a logit is NaN or +∞, or if no token
    /// can be drawn.
    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>>;

    // The optimizer.

    /// Returns the sum of squares of all elements.
    fn sum_of_squares(&self, x: &Rows) -> f64;
    /// Applies one AdamW step to a weight, using its gradient.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()>;
}
