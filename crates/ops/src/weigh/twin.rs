//! Rows multiplied by weights, on the f64 twin.

use omnigrpo_kernels::{Mat, twin};

use crate::twin::Twin;

use super::*;

impl WeighOps for Twin {
    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows {
        let y = match by {
            Weighing::Gate => twin::gate_forward(x.mat64(), logits.mat64()),
            Weighing::Blend => twin::blend_forward(alternatives(x, logits), logits.twin()),
            Weighing::Experts(routes) => twin::weigh_forward(x.mat64(), logits.mat64(), routes.choices()),
        };
        Rows::on_twin(y, by.rows(x, logits), x.cols())
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, by: Weighing) -> [Rows; 2] {
        let (dx, dlogits) = match by {
            Weighing::Gate => twin::gate_backward(dy.mat64(), x.mat64(), logits.mat64()),
            Weighing::Blend => twin::blend_backward(dy.twin(), alternatives(x, logits), logits.twin()),
            Weighing::Experts(routes) => {
                twin::weigh_backward(dy.mat64(), x.mat64(), logits.mat64(), routes.choices())
            }
        };
        [Rows::on_twin(dx, x.rows(), x.cols()), Rows::on_twin(dlogits, logits.rows(), logits.cols())]
    }
}

/// Views each alternative of a blend as one row.
fn alternatives<'a>(x: &'a Rows, logits: &Rows) -> Mat<'a, f64> {
    Mat::new(x.twin(), logits.cols(), x.len() / logits.cols())
}
