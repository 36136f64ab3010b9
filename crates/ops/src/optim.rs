//! The optimizer's update of one weight.

use omnigrpo_kernels::optim::AdamW;

use crate::error::Result;
use crate::param::Param;

/// The optimizer's state of one weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// Updates this weight has had.
    pub step: u64,
    /// First moment.
    pub m: Vec<f32>,
    /// Second moment.
    pub v: Vec<f32>,
    /// f32 value of a bf16 weight; empty for others, and where such a weight is updated without a master.
    pub master: Vec<f32>,
}

/// What one AdamW step needs besides the arrays (`torch.optim.AdamW`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Learning rate.
    pub lr: f32,
    /// Decay of both moments.
    pub betas: [f32; 2],
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled decay.
    pub weight_decay: f32,
    /// Factor of the gradient: clipping.
    pub grad_scale: f32,
    /// Whether a bf16 weight is updated through an f32 master.
    pub master: bool,
}

impl Step {
    /// The kernels' form for the update that is a weight's `step`-th.
    pub(crate) fn kernel(&self, step: u64) -> AdamW {
        let Self { lr, betas, eps, weight_decay, grad_scale, .. } = *self;
        AdamW { lr, betas, eps, weight_decay, grad_scale, step }
    }
}

impl Param {
    /// One AdamW step in place from the gradient that has reached this weight, which is consumed. Returns whether there
    /// was one.
    ///
    /// # Errors
    /// A quantised weight.
    pub fn adamw(&self, moments: &mut Moments, step: &Step) -> Result<bool> {
        let reached = self.with_grad(|grad| {
            let Some(grad) = grad else { return Ok(false) };
            moments.m.resize(self.len(), 0.0);
            moments.v.resize(self.len(), 0.0);
            moments.step += 1;
            grad.device().backend().adamw(self, grad, moments, step).map(|()| true)
        })?;
        self.clear_grad();
        Ok(reached)
    }
}
