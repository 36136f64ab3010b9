//! The contract that every device implements.
//!
//! Each operation of this crate obtains the [`Backend`] of its first operand's device and calls one of its methods. The code
//! therefore branches on the device once per operation. Backends check only that operands are on their device; operations check
//! shapes.

use crate::activation::ActivationOps;
use crate::attention::AttentionOps;
use crate::conv::ConvOps;
use crate::device::Device;
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
use crate::weigh::WeighOps;
use crate::{cpu, outline};

impl Device {
    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Self::Cpu => &cpu::Cpu,
            #[cfg(feature = "twin")]
            Self::Twin => &crate::twin::Twin,
            Self::Gpu(card) => card,
            Self::Outline => &outline::Outline,
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
