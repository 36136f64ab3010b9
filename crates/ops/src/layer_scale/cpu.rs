//! Scaled residuals, on the CPU.

use omnigrpo_kernels::scale;

use crate::cpu::{Cpu, accumulate};

use super::*;

impl LayerScaleOps for Cpu {
    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        let y = scale::residual_forward(x.mat(), residual.mat(), &scale.read().f32());
        Rows::on_cpu(y, x.rows(), x.cols())
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let dx = scale::residual_backward_input(dy.mat(), &scale.read().f32());
        accumulate(scale, |dscale| scale::residual_backward_scale(dy.mat(), x.mat(), dscale));
        Rows::on_cpu(dx, x.rows(), x.cols())
    }
}
