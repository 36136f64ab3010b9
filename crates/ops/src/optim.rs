//! The optimizer's update of one weight, and its state.

use std::borrow::Cow;

use omnigrpo_kernels::optim::AdamW;

use crate::error::Result;
use crate::param::Param;

/// The numbers of the optimizer's state of one weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Numbers {
    /// First moment.
    pub m: Vec<f32>,
    /// Second moment.
    pub v: Vec<f32>,
    /// f32 value of a bf16 weight; empty for others, and where such a weight is updated without a master.
    pub master: Vec<f32>,
}

/// The optimizer's state of one weight: in main memory, or on the card that updates the weight, as [`Step::offload`] says.
#[derive(Debug, Default)]
pub struct Moments {
    /// Updates this weight has had.
    pub step: u64,
    /// Empty while the state is on a card.
    numbers: Numbers,
    card: Option<crate::gpu::State>,
}

impl Moments {
    /// The state after so many updates.
    #[must_use]
    pub fn new(step: u64, numbers: Numbers) -> Self {
        Self { step, numbers, card: None }
    }

    /// First moment.
    #[must_use]
    pub fn m(&self) -> Cow<'_, [f32]> {
        match &self.card {
            Some(state) => state.m.to_vec().into(),
            None => (&self.numbers.m).into(),
        }
    }

    /// Second moment.
    #[must_use]
    pub fn v(&self) -> Cow<'_, [f32]> {
        match &self.card {
            Some(state) => state.v.to_vec().into(),
            None => (&self.numbers.v).into(),
        }
    }

    /// The f32 value of `param`, whose state this is; empty without a master.
    #[must_use]
    pub fn master(&self, param: &Param) -> Cow<'_, [f32]> {
        match &self.card {
            Some(state) => state.master(param).into(),
            None => (&self.numbers.master).into(),
        }
    }

    /// Whether there is a master.
    #[must_use]
    pub fn has_master(&self) -> bool {
        match &self.card {
            Some(state) => state.rest.is_some(),
            None => !self.numbers.master.is_empty(),
        }
    }

    /// The numbers in main memory, for an update there: fetched from a card, zeros at first.
    pub(crate) fn on_host(&mut self, param: &Param) -> &mut Numbers {
        if let Some(state) = self.card.take() {
            self.numbers = state.numbers(param);
        }
        self.numbers.m.resize(param.len(), 0.0);
        self.numbers.v.resize(param.len(), 0.0);
        &mut self.numbers
    }

    /// Takes the state for an update on a card.
    pub(crate) fn take(&mut self) -> (Option<crate::gpu::State>, Numbers) {
        (self.card.take(), std::mem::take(&mut self.numbers))
    }

    /// Puts it back, into main memory or where it was updated.
    pub(crate) fn put(&mut self, state: crate::gpu::State, param: &Param, offload: bool) {
        match offload {
            true => self.numbers = state.numbers(param),
            false => self.card = Some(state),
        }
    }
}

/// Numbers of one AdamW step beside the arrays (`torch.optim.AdamW`).
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
    /// Whether the state of a weight that a card updates stays in main memory, and travels for each step.
    pub offload: bool,
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
    /// was one. A card's step is queued; [`crate::Device::finish`] tells whether it was done.
    ///
    /// # Errors
    /// A quantised weight.
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
