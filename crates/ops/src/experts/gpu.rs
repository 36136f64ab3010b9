//! Layers of experts on a GPU.

use omnigrpo_gpu::{Array, Dtype};

use crate::gpu::{Card, Weights};
use crate::param::ParamDtype;

use super::*;

impl ExpertOps for Card {
    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, order: Order) -> Rows {
        let (weight, sizes) = (self.weights(layer.weight()), [layer.k(), layer.n()]);
        let mut y = self.gpu.alloc(x.rows() * layer.n(), both(self.of(x), &weight));
        match order {
            Order::Blocked => {
                self.gpu.experts(&mut y, self.of(x), weight.weight(), routes.offsets(), sizes);
            }
            Order::PerRow => {
                self.gpu.experts_rows(&mut y, self.of(x), weight.weight(), &self.experts_of(routes), sizes);
            }
        }
        self.rows(y, x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows {
        let (weight, sizes) = (self.weights(layer.weight()), [layer.k(), layer.n()]);
        let mut dx = self.gpu.alloc(dy.rows() * layer.k(), both(self.of(dy), &weight));
        self.gpu.experts_dx(&mut dx, self.of(dy), weight.weight(), routes.offsets(), sizes);
        self.rows(dx, dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes) {
        let dtype = match layer.weight().dtype() {
            ParamDtype::F32 => Dtype::F32,
            ParamDtype::Bf16 | ParamDtype::Quantised(_) => Dtype::Bf16,
        };
        self.accumulate(layer.weight(), |dw| {
            let (routes, sizes) = ((routes.offsets(), dtype), [layer.k(), layer.n()]);
            self.gpu.experts_dw(dw, self.of(x), self.of(dy), routes, sizes);
        });
    }
}

/// Returns bf16 if both factors of a product are bf16, and f32 otherwise.
fn both(x: &Array, weight: &Weights) -> Dtype {
    match x.dtype() == Dtype::Bf16 && weight.weight().dtype() == Dtype::Bf16 {
        true => Dtype::Bf16,
        false => Dtype::F32,
    }
}

impl Card {
    /// Chooses the experts of each row of `logits`.
    pub(crate) fn choose_experts(&self, logits: &Rows, topk: usize) -> Chosen {
        self.gpu.choose_experts(self.of(logits), [logits.rows(), logits.cols(), topk])
    }

    /// Returns the expert of each place.
    pub(crate) fn experts_of(&self, routes: &Routes) -> Arc<Array> {
        routes.experts().on(self.device(), |experts| self.gpu.upload_words(experts))
    }
}
