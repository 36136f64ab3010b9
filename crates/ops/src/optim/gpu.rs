//! The optimizer on a GPU.

use omnigrpo_gpu::{Array, Dtype};

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
        let own = omnigrpo_gpu::Step { lr, betas, eps, weight_decay, grad_scale, count };
        let (state, of_master) = self.state(param, moments, step.master && param.dtype() == ParamDtype::Bf16);
        let State { mut m, mut v, mut rest, .. } = state;
        let mut update = |weight: &mut Array| {
            self.gpu.adamw(weight, rest.as_mut(), [&mut m, &mut v], self.of(grad), &own);
        };
        // The first use of the weight copies it to the GPU. If somebody else holds that copy, it keeps its values.
        let copy = || self.vector(param, |weight| self.gpu.cast(weight, weight.dtype()));
        drop(self.weights(param));
        if of_master.is_some() || !param.change_on_gpu(self.device(), &mut update) {
            let mut weight = of_master.unwrap_or_else(copy);
            update(&mut weight);
            param.replace_on_gpu(self.device(), weight);
        }
        moments.put(State { card: *self, m, v, rest });
        Ok(())
    }
}

/// Optimizer state of a weight, on the GPU that updates the weight.
#[derive(Debug)]
pub(crate) struct State {
    card: Card,
    pub m: Array,
    pub v: Array,
    /// Difference between the f32 master and the bf16 weight.
    pub rest: Option<Array>,
}

impl State {
    /// Returns the f32 master, or an empty vector if there is none.
    pub fn master(&self, param: &Param) -> Vec<f32> {
        match (&*self.card.weights(param), &self.rest) {
            (Weights::Dense(weight), Some(rest)) => self.card.gpu.join_master(weight, rest),
            _ => Vec::new(),
        }
    }

    /// Returns the state in the form for main memory.
    pub fn numbers(&self, param: &Param) -> Numbers {
        Numbers { m: self.m.to_vec(), v: self.v.to_vec(), master: self.master(param) }
    }
}

impl Card {
    /// Moves the optimizer state of a weight to this GPU from its current location. Also returns the weight if it follows from an f32
    /// master of that state.
    fn state(&self, param: &Param, moments: &mut Moments, with_master: bool) -> (State, Option<Array>) {
        let numbers = match moments.take() {
            (Some(state), _) if state.card == *self => return (state, None),
            // State is moved from another GPU through main memory.
            (Some(state), _) => state.numbers(param),
            (None, numbers) => numbers,
        };
        let part = |data: &[f32]| match data.is_empty() {
            true => self.gpu.zeros(param.len(), Dtype::F32),
            false => self.gpu.upload(data),
        };
        let (weight, rest) = match (with_master, numbers.master.is_empty()) {
            (true, false) => {
                let (weight, rest) = self.gpu.split_master(&numbers.master);
                (Some(weight), Some(rest))
            }
            // At the first step, the master is equal to the weight.
            (true, true) => (None, Some(self.gpu.zeros(param.len(), Dtype::Bf16))),
            (false, _) => (None, None),
        };
        (State { card: *self, m: part(&numbers.m), v: part(&numbers.v), rest }, weight)
    }
}
