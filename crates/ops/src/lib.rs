//! Operations on rows of numbers, each with a hand-written backward pass, on any device.
//!
//! * [`Rows`] is the only type of activations: `[rows, cols]` on a [`Device`]. Every device implements the same contract for each
//!   operation. The f64 twin is one of the devices, and one test per operation runs on all of them.
//! * A weight is a [`Param`]: values and a gradient buffer. Operations hold references to their weights and add weight gradients
//!   directly to that buffer. A [`Tape`] therefore carries only activations, and a frozen weight costs no gradient work.
//! * A [`Pass`] contains the settings of a complete pass (device, order of sums, dropout of adapters) and is passed down by
//!   reference. Models store no settings of a pass.
//! * A mismatch of shapes or devices is an error that names the operation and both sides. The kernels that operations call do not
//!   check.
//!
//! Shape legend: `t` rows of the packed stream, `h` model width, `n` outputs and `k` inputs of a linear layer, `d` head width,
//! `v` vocabulary.

mod activation;
mod adapter;
mod attention;
mod backend;
mod blocks;
mod conv;
mod cpu;
mod decode;
mod device;
mod error;
mod experts;
mod gpu;
mod head;
mod host;
mod layer_scale;
mod linear;
mod mix;
mod norm;
mod optim;
mod order;
mod outline;
mod param;
mod pass;
mod recurrent;
mod rope;
mod rows;
mod tape;
#[cfg(feature = "twin")]
mod twin;
mod weigh;
mod work;

pub use adapter::Adapter;
pub use attention::{AttentionHeads, GroupCache, Layout, Turn};
pub use blocks::Blocks;
pub use conv::{OUTSIDE, Patches};
pub use decode::{DecodeBatch, DecodeRows, NextTokens, Replays, TokenPass};
pub use device::Device;
pub use error::{Error, Result};
pub use experts::{ExpertLinear, RouterLoss, Routes, SameExperts};
pub use gpu::Card;
pub use head::{Scores, Targets, logits, score, score_backward, score_top};
pub use host::Host;
pub use linear::{Linear, PackedLinear};
pub use mix::{Mix, RowMix, Tokens, embed, embed_backward};
pub use norm::Norm;
pub use omnigrpo_gpu::{Load as GpuLoad, Monitor as GpuMonitor};
pub use omnigrpo_kernels::activation::Activation;
pub use omnigrpo_kernels::attention::{AttentionLayout, LayoutError, QueryRange};
pub use omnigrpo_kernels::optim::{SQUARES_BLOCK, block_squares};
pub use omnigrpo_kernels::paths::Path as Bf16Path;
pub use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
pub use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};
pub use omnigrpo_kernels::{Arithmetic, Top};
pub use optim::{LEAST_CODED, Moments, Numbers, Squares, Step, squares};
pub use order::Order;
pub use outline::{Footprint, Held, footprint, holding, in_arena, is_on_card, on_card};
pub use param::{Param, ParamDtype, Part, Values, WeightGuard};
pub use pass::{Dropout, Lend, Pass};
pub use recurrent::{CausalConv, DeltaGates, DeltaHeads, GatedNorm, StateSizes};
pub use rope::RopeTable;
pub use rows::{Index, Rows};
pub use tape::{Gradients, Kept, Memory, Op, Tape, Var};
pub use work::{Rates, Work, phase, repeated, work};
