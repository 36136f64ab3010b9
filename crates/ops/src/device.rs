//! Where arrays live, and the contract that every such place fulfils.
//!
//! A [`Device`] is a value: it is handed down, never looked up. Each operation of this crate asks the device of its
//! first operand for its [`Backend`] and calls one method of it, so a match on the device happens once per operation.
//! Backends check nothing but that operands are theirs; shapes are checked by the operations.

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

/// A place where arrays live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// f32 in main memory, with the kernels of `omnigrpo-kernels`.
    #[default]
    Cpu,
    /// f64 in main memory, with plain loops: what the other devices are compared with.
    Twin,
    /// An NVIDIA card, or its emulator: bf16 or f32 in its memory, with the kernels of `omnigrpo-gpu`.
    Gpu(crate::gpu::Card),
    /// Nowhere: sizes without numbers, to know what a pass takes ([`footprint`](crate::footprint)). Weights may be outlines.
    Outline,
}

impl Device {
    /// Every device of this build that every machine has. The emulator among them is a new one.
    #[must_use]
    pub fn all() -> Vec<Self> {
        [Self::Cpu, Self::Twin].into_iter().chain(Self::emulator()).collect()
    }

    /// A new emulator of a card, in builds for tests.
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

    /// Waits for the work that is queued on this device, and says whether all of it was done. Operations on a card do not
    /// fail: they are queued, and after a failure what is read back is NaN.
    ///
    /// # Errors
    /// The first failure of the device, such as memory that did not suffice.
    pub fn finish(self) -> Result<()> {
        match self {
            Self::Gpu(card) => card.finish(),
            _ => Ok(()),
        }
    }

    /// Rows whose logits are best formed and drawn from at once: on a card the token of every row in flight comes to the host in
    /// one copy, on a CPU logits stay in its cache.
    #[must_use]
    pub fn logit_rows(self) -> usize {
        match self {
            Self::Gpu(_) => 128,
            _ => 16,
        }
    }

    /// Whether decoding leaves what a backward pass needs, where the host can read it.
    #[must_use]
    pub fn remembers_decoding(self) -> bool {
        self == Self::Cpu
    }

    /// Fails where `rows` lives elsewhere.
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

/// Operations of a device: the complete interface between models and arithmetic.
///
/// `t` rows, `k` inputs, `n` outputs. Functions that return [`Rows`] make new ones; those that take `&mut Rows` add to or
/// replace what is there, as each says. Gradients of weights are added to the weight's own buffer, and only for weights
/// that are trained.
pub(crate) trait Backend: Sync {
    // Memory.

    /// `[rows, cols]` of zeros.
    fn zeros(&self, rows: usize, cols: usize) -> Rows;
    /// Rows from host numbers, row by row. `data.len() == rows · cols`.
    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows;
    /// The numbers, row by row, rounded to f32.
    fn download(&self, x: &Rows) -> Vec<f32>;
    /// The numbers, row by row, without rounding.
    fn download_f64(&self, x: &Rows) -> Vec<f64>;
    /// `to += from`
    fn add(&self, to: &mut Rows, from: &Rows);
    /// `x *= by`
    fn scale(&self, x: &mut Rows, by: f32);
    /// The rows `index` of `x`, in that order.
    fn select(&self, x: &Rows, index: &Index) -> Rows;
    /// The reverse of [`Self::select`] for distinct rows: `rows` rows, zeros in the others.
    fn spread(&self, x: &Rows, index: &Index, rows: usize) -> Rows;
    /// Some columns of every row.
    fn columns(&self, x: &Rows, columns: Range<usize>) -> Rows;
    /// Replaces the columns from `first` on.
    fn set_columns(&self, to: &mut Rows, first: usize, from: &Rows);
    /// Replaces the rows from `first` on by the rows `range` of `from`.
    fn set_rows(&self, to: &mut Rows, first: usize, from: &Rows, range: Range<usize>);
    /// Replaces some rows by zeros.
    fn clear_rows(&self, x: &mut Rows, range: Range<usize>);

    // Linear layers. Several layers have their outputs side by side.

    /// `x Wᵀ + b (+ residual)`, `[t, k] → [t, Σ n]`.
    fn linear(&self, x: &Rows, layers: &[Linear], residual: Option<&Rows>, order: Order) -> Rows;
    /// Adds `x Wᵀ` to the columns of `y` from `col` on; no bias.
    fn linear_add(&self, y: &mut Rows, col: usize, x: &Rows, weight: &Linear, order: Order);
    /// `dy W`, `[t, Σ n] → [t, k]`.
    fn linear_dx(&self, dy: &Rows, layers: &[Linear]) -> Rows;
    /// `dy W` of one layer, whose columns of `dy` begin at `col`, added to `dx` where there is one.
    fn linear_dx_of(&self, dx: Option<Rows>, dy: &Rows, col: usize, weight: &Linear) -> Rows;
    /// Adds `dyᵀ x` and the column sums of `dy` to the gradients of weights and biases. The layers' columns of `dy`
    /// begin at `col`.
    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]);
    /// `x` with dropped elements as zeros and the rest times `1 / (1 − rate)`.
    fn dropout(&self, x: &Rows, mask: &omnigrpo_kernels::dropout::Mask) -> Rows;

    // Experts. A row for each place.

    /// Each place times its expert's matrix, `[p, k] → [p, n]`.
    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, order: Order) -> Rows;
    /// `dy Wᵀ`, `[p, n] → [p, k]`.
    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows;
    /// Adds `xᵀ dy` of each expert's places to the gradient of its matrix.
    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes);
    /// Each place times the softmax over the logits `[t, experts]` of its row's experts.
    fn weigh(&self, x: &Rows, logits: &Rows, routes: &Routes) -> Rows;
    /// The gradients of both.
    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, routes: &Routes) -> [Rows; 2];

    // Normalisation.

    /// The norm of each row, and what its gradient needs.
    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows);
    /// Adds the gradient of the input to `dx`, those of weight and bias to their buffers.
    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm);

    // Attention. A packed row is `[queries | keys | values]`.

    /// Attention of packed rows with themselves: `[t, q · d]` and the log-sum-exps `[t, q]`.
    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows);
    /// The gradient of the packed rows.
    fn attention_back(
        &self,
        qkv: &Rows,
        out: &Rows,
        lse: &Rows,
        dout: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows;
    /// Room for the keys and values of `rows` tokens in each layer: of a prompt and of `slots` completions of one length.
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
    /// Appends each row to its slot's cache and gives its attention over prompt and slot, with its log-sum-exps where the
    /// device has them ([`Device::remembers_decoding`]).
    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
    ) -> (Rows, Rows);
    /// Turns the first `heads` heads of each row in place.
    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, inverse: bool);

    // Elementwise.

    /// `act(x)`
    fn activation(&self, x: &Rows, act: Activation) -> Rows;
    /// Replaces `x` by the gradient of the activation's input.
    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Activation);
    /// `silu(gate) · up`, `[t, 2i] → [t, i]`.
    fn swiglu(&self, gate_up: &Rows) -> Rows;
    /// Replaces `gate_up` by its gradient.
    fn swiglu_back(&self, gate_up: &mut Rows, dy: &Rows);
    /// `residual + x · scale`, the scale per column.
    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows;
    /// The gradient of `x` of [`Self::scale_onto`]; that of the scale is added to its buffer.
    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows;

    // Tables and sparse sums of rows.

    /// Rows of a table.
    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows;
    /// Adds rows to those of a table's gradient.
    fn embed_back(&self, table: &Param, ids: &[u32], dx: &Rows);
    /// Adds a row of a table to each row that has an id.
    fn add_rows(&self, x: &mut Rows, table: &Param, ids: &Ids);
    /// The table's gradient of [`Self::add_rows`].
    fn add_rows_back(&self, table: &Param, ids: &Ids, dy: &Rows);
    /// Adds a weighted sum of a table's rows to each row.
    fn add_mixed(&self, x: &mut Rows, table: &Param, taps: &Taps);
    /// The table's gradient of [`Self::add_mixed`].
    fn add_mixed_back(&self, table: &Param, taps: &Taps, dy: &Rows);
    /// Rows as weighted sums of rows.
    fn mix(&self, x: &Rows, mix: &Mix) -> Rows;
    /// The gradient of [`Self::mix`] for an input of `rows` rows.
    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows;

    // Convolution over channels-last rows.

    /// A convolution over gathered patches.
    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows;
    /// The gradient of its input, which has `rows` rows; those of weight and bias are added to their buffers.
    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows;
    /// Depthwise 3×3 of pictures of `side = [height, width]`.
    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows;
    /// The gradient of its input; that of the weight is added to its buffer.
    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows;
    /// `x · sigmoid(gate)`, a row of the gate for consecutive rows of `x`.
    fn gate(&self, x: &Rows, gate: &Rows) -> Rows;
    /// The gradients of both.
    fn gate_back(&self, x: &Rows, gate: &Rows, dy: &Rows) -> [Rows; 2];
    /// `Σ softmax(logits)ᵢ · xᵢ` over the alternatives of which `x` holds the rows.
    fn blend(&self, x: &Rows, logits: &Rows) -> Rows;
    /// The gradients of both.
    fn blend_back(&self, x: &Rows, logits: &Rows, dy: &Rows) -> [Rows; 2];

    // The output head.

    /// Log-probabilities of targets, without a matrix of logits.
    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores;
    /// The gradient of `normed`; that of the head is added to its buffer. `dentropy` is per row.
    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        targets: &Targets,
        scores: &Scores,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Rows;
    /// `[t, vocabulary]`, each row by itself.
    fn logits(&self, normed: &Rows, head: &Param) -> Rows;
    /// Draws a token from each row of logits, which are changed. `None`: a logit is NaN or +∞, or no token can be drawn.
    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>>;

    // The optimizer.

    /// The sum of squares of all elements.
    fn sum_of_squares(&self, x: &Rows) -> f64;
    /// One AdamW step of a weight from its gradient.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()>;
}
