//! AdamW over a model's trained weights.
//!
//! Source: `torch.optim.AdamW` (decoupled decay, bias-corrected moments, epsilon outside the root), and
//! `torch.nn.utils.clip_grad_norm_`. A bf16 weight is updated through an f32 master copy unless `pure_bf16` is set: at small
//! learning rates, rounding to bf16 would cancel an update. A weight that nothing in the step could reach has no gradient and is
//! skipped, as PyTorch skips `grad = None`. A weight that was reached with advantages of 0 has a gradient of 0. Momentum, decay
//! and its count of updates still apply.
//!
//! Memory per trained weight: gradient 4 B, two moments 8 B, and 4 B of master for bf16. On a card the master consists of the
//! bf16 weight and the 2 B that it lacks, so weight, gradient, moments and master take 16 B. With `offload` the card holds the
//! weight and at most the gradient, 6 B, and the CPU applies the update.

use std::collections::HashMap;
use std::sync::Arc;

pub use omnigrpo_ops::Moments;
use omnigrpo_ops::{Device, Param, ParamDtype, Part, Squares, Step};

use crate::error::{Result, TrainError};
use crate::selection::decayed_names;

/// Settings of the optimizer.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Base learning rate.
    pub learning_rate: f64,
    /// Learning rate of the projector, if it differs.
    pub projector_lr: Option<f64>,
    /// Learning rate of the towers, if it differs.
    pub tower_lr: Option<f64>,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Constant added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Maximum norm of all gradients; larger gradients are scaled down. 0 disables scaling.
    pub max_grad_norm: f64,
    /// True to update bf16 weights without an f32 master.
    pub pure_bf16: bool,
    /// True to store the moments and masters of weights on a card in main memory.
    pub offload: bool,
}

impl Default for AdamWConfig {
    /// Returns the defaults of TRL's trainer: 1e-6 for every part, betas 0.9 and 0.999, gradients clipped to a norm of 1, no
    /// decay.
    fn default() -> Self {
        Self {
            learning_rate: 1e-6,
            projector_lr: None,
            tower_lr: None,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            pure_bf16: false,
            offload: false,
        }
    }
}

/// Result of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Norm of all gradients together, before scaling.
    pub grad_norm: f64,
    /// Number of trained weights without a gradient.
    pub skipped: usize,
}

/// AdamW optimizer.
pub struct AdamW {
    config: AdamWConfig,
    params: Vec<(Arc<Param>, f64, f64)>,
    state: HashMap<String, Moments>,
}

impl AdamW {
    /// Creates an optimizer for the trained weights among `params`.
    #[must_use]
    pub fn new(config: AdamWConfig, params: &[Arc<Param>]) -> Self {
        let decayed = decayed_names(params);
        let trained = params.iter().filter(|p| p.trainable());
        let params = trained
            .map(|p| {
                let lr = match p.part() {
                    Part::Llm => None,
                    Part::Projector => config.projector_lr,
                    Part::Vision | Part::Audio | Part::Instruction => config.tower_lr,
                };
                let decay = if decayed.contains(p.name()) { config.weight_decay } else { 0.0 };
                (Arc::clone(p), lr.unwrap_or(config.learning_rate), decay)
            })
            .collect();
        Self { config, params, state: HashMap::new() }
    }

    /// Applies the accumulated gradients and clears them. `factor` scales every learning rate.
    ///
    /// # Errors
    /// Returns an error with the name of the weight if a gradient is not finite. Nothing is changed then.
    pub fn step(&mut self, factor: f64) -> Result<Update> {
        let params: Vec<&Param> = self.params.iter().map(|(param, ..)| &**param).collect();
        let each = omnigrpo_ops::squares(&params, self.config.offload);
        let skipped = each.iter().filter(|squares| squares.is_none()).count();
        let mut squares = 0.0;
        let mut device = Device::Cpu;
        for (param, Squares { device: on, sum }) in
            params.iter().zip(&each).filter_map(|(p, s)| Some((p, s.as_ref()?)))
        {
            if !sum.is_finite() {
                // A card returns NaN if a computation failed; `finish` reports that failure.
                on.finish()?;
                return Err(TrainError::NonFiniteGradient { name: param.name().to_owned() });
            }
            (device, squares) = (*on, squares + sum);
        }
        let grad_norm = squares.sqrt();
        let scale = match self.config.max_grad_norm {
            max if max > 0.0 => (max / (grad_norm + 1e-6)).min(1.0),
            _ => 1.0,
        };
        let c = &self.config;
        // Gradients that were sent first have arrived while the others are on their way.
        let mut order: Vec<usize> = (0..params.len()).filter(|&at| each[at].is_some()).collect();
        order.sort_by_key(|&at| params[at].sent());
        for at in order {
            let (param, lr, decay) = &self.params[at];
            let step = Step {
                lr: (lr * factor) as f32,
                betas: [c.beta1 as f32, c.beta2 as f32],
                eps: c.epsilon as f32,
                weight_decay: *decay as f32,
                grad_scale: scale as f32,
                master: !c.pure_bf16,
                offload: c.offload,
            };
            param.adamw(self.state.entry(param.name().to_owned()).or_default(), &step)?;
        }
        device.finish()?;
        Ok(Update { grad_norm, skipped })
    }

    /// Announces that the next pass through the decoder is the last of this step. With offload, the gradients of its linear layers
    /// then travel to main memory during the pass. Other weights have several gradients in a pass.
    pub(crate) fn announce_last_pass(&self) {
        let params = self.params.iter().filter(|_| self.config.offload);
        let linear = params.filter(|(p, ..)| p.part() == Part::Llm && (p.is_linear() || p.is_experts()));
        linear.for_each(|(param, ..)| param.send_next_grad());
    }

    /// Returns the settings.
    #[must_use]
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Returns the base learning rate.
    #[must_use]
    pub fn learning_rate(&self) -> f64 {
        self.config.learning_rate
    }

    /// Clears all gradients.
    pub fn clear(&self) {
        for (param, ..) in &self.params {
            param.clear_grad();
        }
    }

    /// Returns each weight that was updated at least once, with its state.
    pub fn state(&self) -> impl Iterator<Item = (&Param, &Moments)> {
        self.params.iter().filter_map(|(param, ..)| Some((&**param, self.state.get(param.name())?)))
    }

    /// Returns the names of trained weights that were never updated.
    #[must_use]
    pub(crate) fn never_reached(&self) -> Vec<&str> {
        let names = self.params.iter().map(|(p, ..)| p.name());
        names.filter(|name| !self.state.contains_key(*name)).collect()
    }

    /// Restores a saved state.
    ///
    /// # Errors
    /// Returns an error if a state belongs to a weight that is not trained or has another size.
    pub(crate) fn restore(&mut self, state: HashMap<String, Moments>) -> Result<()> {
        for (name, moments) in &state {
            let param = self.params.iter().find(|(p, ..)| p.name() == name);
            match param {
                Some((p, ..))
                    if moments.m().len() == p.len()
                        && moments.v().len() == p.len()
                        && moments.master(p).len() == if self.has_master(p) { p.len() } else { 0 } => {}
                _ => {
                    return Err(TrainError::Checkpoint {
                        what: format!(
                            "the optimizer state of {name} ({} values) does not match a trained weight of this size",
                            moments.m().len()
                        ),
                    });
                }
            }
        }
        self.state = state;
        Ok(())
    }

    fn has_master(&self, param: &Param) -> bool {
        param.dtype() != ParamDtype::F32 && !self.config.pure_bf16
    }

    /// Returns the bytes of gradients, moments and masters if every trained weight has them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let each = |p: &Param| p.len() * (12 + if self.has_master(p) { 4 } else { 0 });
        self.params.iter().map(|(p, ..)| each(p)).sum()
    }
}
