//! Rows multiplied by weights, on the CPU.

use omnigrpo_kernels::{Mat, conv, experts as grouped};

use crate::cpu::Cpu;

use super::*;

impl WeighOps for Cpu {
    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows {
        let y = match by {
            Weighing::Gate => conv::gate_forward(x.mat(), logits.mat()),
            Weighing::Blend => conv::blend_forward(alternatives(x, logits), logits.cpu()),
            Weighing::Experts(routes) => grouped::weigh_forward(x.mat(), logits.mat(), routes.choices()),
        };
        Rows::on_cpu(y, by.rows(x, logits), x.cols())
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, by: Weighing) -> [Rows; 2] {
        let (dx, dlogits) = match by {
            Weighing::Gate => conv::gate_backward(dy.mat(), x.mat(), logits.mat()),
            Weighing::Blend => conv::blend_backward(dy.cpu(), alternatives(x, logits), logits.cpu()),
            Weighing::Experts(routes) => {
                grouped::weigh_backward(dy.mat(), x.mat(), logits.mat(), routes.choices())
            }
        };
        [Rows::on_cpu(dx, x.rows(), x.cols()), Rows::on_cpu(dlogits, logits.rows(), logits.cols())]
    }
}

/// Views each alternative of a blend as one row.
fn alternatives<'a>(x: &'a Rows, logits: &Rows) -> Mat<'a> {
    Mat::new(x.cpu(), logits.cols(), x.len() / logits.cols())
}
