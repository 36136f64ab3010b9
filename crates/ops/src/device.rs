//! Devices, and the contract that every device implements.
//!
//! A [`Device`] is a value that callers pass down; there is no global device. Each operation of this crate obtains the
//! [`Backend`] of its first operand's device and calls one of its methods. The code therefore branches on the device once per
//! operation. Backends check only that operands are on their device; operations check shapes.

use std::fmt;

use crate::activation::ActivationOps;
use crate::attention::AttentionOps;
use crate::conv::ConvOps;
use crate::error::{Error, Result};
use crate::experts::ExpertOps;
use crate::head::HeadOps;
use crate::layer_scale::LayerScaleOps;
use crate::linear::LinearOps;
use crate::mix::MixOps;
use crate::norm::NormOps;
use crate::optim::OptimOps;
use crate::recurrent::RecurrentOps;
use crate::rope::RopeOps;
use crate::rows::RowOps;
use crate::rows::Rows;
use crate::weigh::WeighOps;
use crate::{cpu, outline};

/// Device that stores arrays and computes with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// CPU: f32 in main memory, with the kernels of `omnigrpo-kernels`.
    #[default]
    Cpu,
    /// Reference for tests: f64 in main memory, with plain loops.
    #[cfg(feature = "twin")]
    Twin,
    /// NVIDIA GPU or emulator of one: bf16 or f32 in GPU memory, with the kernels of `omnigrpo-gpu`.
    Gpu(crate::gpu::Card),
    /// Sizes without values, which measure the memory that a pass needs ([`footprint`](crate::footprint)). Weights may be
    /// outlines.
    Outline,
}

impl Device {
    /// Returns the devices of this build that are available on every machine, including a new emulator.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Cpu];
        #[cfg(feature = "twin")]
        all.push(Self::Twin);
        all.extend(Self::emulator());
        all
    }

    /// Creates an emulator of a GPU. Returns `None` in builds without the feature `emulator`.
    pub fn emulator() -> Option<Self> {
        #[cfg(feature = "emulator")]
        return Some(Self::Gpu(crate::gpu::Card::emulated(None)));
        #[cfg(not(feature = "emulator"))]
        None
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Self::Cpu => &cpu::Cpu,
            #[cfg(feature = "twin")]
            Self::Twin => &crate::twin::Twin,
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
    pub fn logit_rows(self) -> usize {
        match self {
            Self::Gpu(_) => 128,
            _ => 16,
        }
    }

    /// Returns whether decoding stores the values that a backward pass needs, so that the host can read them.
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
            #[cfg(feature = "twin")]
            Self::Twin => f.write_str("twin"),
            Self::Gpu(card) => card.fmt(f),
            Self::Outline => f.write_str("outline"),
        }
    }
}

/// The operations of a device: the complete interface between models and arithmetic. Each operation defines its part in its folder.
///
/// Shapes: `t` rows, `k` inputs, `n` outputs. Functions that return [`Rows`] create new ones. Functions with `&mut Rows` add to
/// existing values or replace them, as their comments state. The gradient of a weight is added to the weight's buffer, and only
/// if the weight is trained.
pub(crate) trait Backend:
    Sync
    + RowOps
    + LinearOps
    + ExpertOps
    + WeighOps
    + NormOps
    + AttentionOps
    + RopeOps
    + ActivationOps
    + LayerScaleOps
    + MixOps
    + ConvOps
    + RecurrentOps
    + HeadOps
    + OptimOps
{
}

impl Backend for cpu::Cpu {}
#[cfg(feature = "twin")]
impl Backend for crate::twin::Twin {}
impl Backend for crate::gpu::Card {}
impl Backend for outline::Outline {}
