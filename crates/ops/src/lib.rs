//! Differentiable operations on candle tensors, each with a hand-written backward.
//!
//! An op is a thin [`candle_core`] custom op around a kernel of `omnigrpo-kernels`; what blocks with a tape of their own use
//! ([`PackedLinear`], [`Norm`], [`AttentionHeads`]) are methods over slices. Three rules hold:
//!
//! * A weight is a [`Param`]: a tensor plus a gradient buffer of its own. Ops hold their weights and add weight
//!   gradients straight into that buffer, so candle's gradient store only ever carries activations, and a
//!   frozen weight costs no gradient work.
//! * candle records an op only when its input is tracked. The stream's entry is therefore always a `Var`
//!   in training (see [`Segments`]); with a plain tensor the same code runs without recording anything, which
//!   is how rollout and the reference model use it.
//! * A shape that does not fit is an error that names the op and both shapes; kernels below do not check.
//!
//! Shape legend: `t` rows of the packed stream, `h` model width, `n`/`k` outputs/inputs of a linear layer,
//! `d` head width, `v` vocabulary.

mod adapter;
mod attention;
mod conv;
mod embedding;
mod linear;
mod mlp;
mod norm;
mod param;
mod segments;
mod slices;

pub use adapter::{Adapter, Dropout, DropoutScope};
pub use attention::AttentionHeads;
pub use conv::{OUTSIDE, Patches, RowMix, blend, convolution, depthwise3, gate_rows, mix_rows};
pub use embedding::{add_mixed, add_rows};
pub use linear::{Linear, MatmulMode, PackedLinear, linear};
pub use mlp::activation;
pub use norm::{Norm, norm};
pub use omnigrpo_kernels::activation::Activation;
pub use omnigrpo_kernels::attention::{AttentionLayout, QueryRange};
pub use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
pub use param::{GradBuffer, GradGuard, Param, ParamDtype, Part};
pub use rope::RopeTable;
pub use segments::{Memory, Segments};
pub use slices::{rows_from_vec, to_vec, with_f32};

mod rope;
