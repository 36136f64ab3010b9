//! The optimizer on the CPU.

use omnigrpo_kernels::optim;

use crate::cpu::Cpu;

use super::*;

impl OptimOps for Cpu {
    fn sum_of_squares(&self, x: &Rows) -> f64 {
        optim::sum_of_squares(x.cpu())
    }

    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()> {
        param.adamw_range(0..param.len(), grad.cpu(), moments, step)
    }
}
