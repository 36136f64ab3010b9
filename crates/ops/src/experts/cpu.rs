//! Layers of experts on the CPU.

use omnigrpo_kernels::{MatMut, Weight, experts as grouped};

use crate::cpu::{Cpu, accumulate};

use super::*;

impl ExpertOps for Cpu {
    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, _: Order) -> Rows {
        let y = with_experts(layer, |w| grouped::forward(x.mat(), w, routes.groups()));
        Rows::on_cpu(y, x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows {
        let dx = with_experts(layer, |w| grouped::backward_input(dy.mat(), w, routes.groups()));
        Rows::on_cpu(dx, dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes) {
        let rounding = layer.weight().rounding();
        accumulate(layer.weight(), |dw| {
            let dw = MatMut::new(dw, layer.experts() * layer.k(), layer.n());
            grouped::backward_weight(dy.mat(), x.mat(), routes.groups(), rounding, dw);
        });
    }
}

/// Runs `f` on the matrices of all experts, stacked vertically.
fn with_experts<R>(layer: &ExpertLinear, f: impl FnOnce(Weight) -> R) -> R {
    f(layer.weight().read().weight(layer.experts() * layer.k(), layer.n()))
}
