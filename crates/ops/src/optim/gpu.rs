//! The optimizer on a GPU.

use omnigrpo_gpu::{Array, Dtype, MomentCodes, Moments as Both};
use omnigrpo_kernels::moments;

use crate::gpu::{Card, Weights};

use super::*;

impl OptimOps for Card {
    fn sum_of_squares(&self, x: &Rows) -> f64 {
        self.gpu.sum_of_squares(self.of(x))
    }

    /// Updates a weight on the GPU. Its state stays there.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()> {
        if matches!(param.dtype(), ParamDtype::Quantised(_)) {
            return param.write(|_| ());
        }
        let Step { lr, betas, eps, weight_decay, grad_scale, .. } = *step;
        let count = moments.step;
        let random = match step.rounding(param, count) {
            Rounding::Random { key, .. } => Some(key),
            Rounding::Nearest => None,
        };
        let own = omnigrpo_gpu::Step { lr, betas, eps, weight_decay, grad_scale, count, random };
        let (mut state, of_master) = self.state(param, moments, step.has_master(param), step.is_coded(param));
        let mut update = |weight: &mut Array| {
            let both = match &mut state.moments {
                OnCard::F32([m, v]) => [m, v].into(),
                OnCard::Codes([m, v]) => Both::Codes([m, v]),
            };
            self.gpu.adamw(weight, state.rest.as_mut(), both, self.of(grad), &own);
        };
        // The first use of the weight copies it to the GPU. If somebody else holds that copy, it keeps its values.
        let copy = || self.vector(param, |weight| self.gpu.cast(weight, weight.dtype()));
        drop(self.weights(param));
        if of_master.is_some() || !param.change_on_gpu(self.device(), &mut update) {
            let mut weight = of_master.unwrap_or_else(copy);
            update(&mut weight);
            param.replace_on_gpu(self.device(), weight);
        }
        moments.put(state);
        Ok(())
    }
}

/// Optimizer state of a weight, on the GPU that updates the weight.
#[derive(Debug)]
pub(crate) struct State {
    card: Card,
    moments: OnCard,
    /// Number of values.
    len: usize,
    /// Difference between the f32 master and the bf16 weight.
    pub rest: Option<Array>,
}

/// First and second moment.
#[derive(Debug)]
enum OnCard {
    F32([Array; 2]),
    Codes([MomentCodes; 2]),
}

impl State {
    /// Returns first moment (0) or second moment (1).
    pub fn moment(&self, which: usize) -> Vec<f32> {
        match &self.moments {
            OnCard::F32(each) => each[which].to_vec(),
            OnCard::Codes(each) => {
                let (mut codes, scales) = each[which].read();
                codes.truncate(self.len);
                Codes { codes, scales }.decode(FORMS[which])
            }
        }
    }

    /// Returns the f32 master, or an empty vector if there is none.
    pub fn master(&self, param: &Param) -> Vec<f32> {
        match (&*self.card.weights(param), &self.rest) {
            (Weights::Dense(weight), Some(rest)) => self.card.gpu.join_master(weight, rest),
            _ => Vec::new(),
        }
    }

    /// Returns the state in the form for main memory.
    pub fn numbers(&self, param: &Param) -> Numbers {
        Numbers { m: self.moment(0), v: self.moment(1), master: self.master(param) }
    }
}

impl Card {
    /// Moves the optimizer state of a weight to this GPU from its current location, with moments in 8 bits if `coded`. Also returns the
    /// weight if it follows from an f32 master of that state.
    fn state(
        &self,
        param: &Param,
        moments: &mut Moments,
        with_master: bool,
        coded: bool,
    ) -> (State, Option<Array>) {
        let numbers = match moments.take() {
            (Some(state), _) if state.card == *self && matches!(state.moments, OnCard::Codes(_)) == coded => {
                return (state, None);
            }
            // State is moved from another GPU, or to another form, through main memory.
            (Some(state), _) => state.numbers(param),
            (None, numbers) => numbers,
        };
        let len = param.len();
        let moments = match (coded, [numbers.m, numbers.v]) {
            (false, each) => OnCard::F32(each.map(|data| match data.is_empty() {
                true => self.gpu.zeros(len, Dtype::F32),
                false => self.gpu.upload(&data),
            })),
            (true, [m, v]) => {
                OnCard::Codes([(m, FORMS[0]), (v, FORMS[1])].map(|(data, form)| match data.is_empty() {
                    true => MomentCodes {
                        codes: self.gpu.zeros(len.div_ceil(4), Dtype::F32),
                        scales: self.gpu.zeros(len.div_ceil(moments::BLOCK), Dtype::F32),
                    },
                    false => {
                        let Codes { codes, scales } = Codes::encode(&data, form);
                        self.gpu.upload_codes(&codes, &scales)
                    }
                }))
            }
        };
        let (weight, rest) = match (with_master, numbers.master.is_empty()) {
            (true, false) => {
                let (weight, rest) = self.gpu.split_master(&numbers.master);
                (Some(weight), Some(rest))
            }
            // At the first step, the master is equal to the weight.
            (true, true) => (None, Some(self.gpu.zeros(len, Dtype::Bf16))),
            (false, _) => (None, None),
        };
        (State { card: *self, moments, len, rest }, weight)
    }
}
