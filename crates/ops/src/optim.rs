//! The optimizer's update of a weight, and the state of that update.

use std::borrow::Cow;

use omnigrpo_kernels::optim::AdamW;

use crate::error::Result;
use crate::param::Param;

/// Arrays of the optimizer's state for one weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Numbers {
    /// First moment.
    pub m: Vec<f32>,
    /// Second moment.
    pub v: Vec<f32>,
    /// Master copy of a bf16 weight in f32. Empty for other weights, and for bf16 weights that are updated without a master.
    pub master: Vec<f32>,
}

/// The optimizer's state for one weight, in main memory or on the GPU that updates the weight; see [`Step::offload`].
#[derive(Debug, Default)]
pub struct Moments {
    /// Number of updates applied to this weight.
    pub step: u64,
    /// Arrays in main memory. They are empty while the state is on a GPU.
    numbers: Numbers,
    card: Option<crate::gpu::State>,
}

impl Moments {
    /// Restores the state after `step` updates.
    #[must_use]
    pub fn new(step: u64, numbers: Numbers) -> Self {
        Self { step, numbers, card: None }
    }

    /// Returns the first moment.
    #[must_use]
    pub fn m(&self) -> Cow<'_, [f32]> {
        match &self.card {
            Some(state) => state.m.to_vec().into(),
            None => (&self.numbers.m).into(),
        }
    }

    /// Returns the second moment.
    #[must_use]
    pub fn v(&self) -> Cow<'_, [f32]> {
        match &self.card {
            Some(state) => state.v.to_vec().into(),
            None => (&self.numbers.v).into(),
        }
    }

    /// Returns the f32 master copy of `param`, the weight of this state. The result is empty if there is no master.
    #[must_use]
    pub fn master(&self, param: &Param) -> Cow<'_, [f32]> {
        match &self.card {
            Some(state) => state.master(param).into(),
            None => (&self.numbers.master).into(),
        }
    }

    #[must_use]
    pub fn has_master(&self) -> bool {
        match &self.card {
            Some(state) => state.rest.is_some(),
            None => !self.numbers.master.is_empty(),
        }
    }

    /// Returns the arrays in main memory, for an update there. Fetches them from the GPU if the state is on one; new moments are
    /// zeros.
    pub(crate) fn on_host(&mut self, param: &Param) -> &mut Numbers {
        if let Some(state) = self.card.take() {
            self.numbers = state.numbers(param);
        }
        self.numbers.m.resize(param.len(), 0.0);
        self.numbers.v.resize(param.len(), 0.0);
        &mut self.numbers
    }

    /// Removes and returns the state, for an update on a GPU.
    pub(crate) fn take(&mut self) -> (Option<crate::gpu::State>, Numbers) {
        (self.card.take(), std::mem::take(&mut self.numbers))
    }

    /// Stores the state after an update on a GPU: in main memory if `offload`, otherwise on that GPU.
    pub(crate) fn put(&mut self, state: crate::gpu::State, param: &Param, offload: bool) {
        match offload {
            true => self.numbers = state.numbers(param),
            false => self.card = Some(state),
        }
    }
}

/// Scalar parameters of one AdamW step (`torch.optim.AdamW`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Learning rate.
    pub lr: f32,
    /// Decay rates of the first and second moments.
    pub betas: [f32; 2],
    /// Term added to the square root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Factor applied to the gradient, for clipping.
    pub grad_scale: f32,
    /// True if bf16 weights are updated through an f32 master.
    pub master: bool,
    /// True if main memory stores the state of weights that a GPU updates. The state is then transferred for each step.
    pub offload: bool,
}

impl Step {
    /// Converts to the kernels' structure, for update number `step` of a weight.
    pub(crate) fn kernel(&self, step: u64) -> AdamW {
        let Self { lr, betas, eps, weight_decay, grad_scale, .. } = *self;
        AdamW { lr, betas, eps, weight_decay, grad_scale, step }
    }
}

impl Param {
    /// Applies one AdamW step in place and consumes the weight's gradient. Returns `false` if the weight has no gradient. On a
    /// GPU the step is queued, and [`crate::Device::finish`] reports its failure. Returns an error for a quantised weight.
    pub fn adamw(&self, moments: &mut Moments, step: &Step) -> Result<bool> {
        let reached = self.with_grad(|grad| {
            let Some(grad) = grad else { return Ok(false) };
            moments.step += 1;
            grad.device().backend().adamw(self, grad, moments, step).map(|()| true)
        })?;
        self.clear_grad();
        Ok(reached)
    }
}
