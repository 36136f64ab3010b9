//! Activations on the CPU.

use omnigrpo_kernels::activation;

use crate::cpu::Cpu;

use super::*;

impl ActivationOps for Cpu {
    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows {
        let (y, cols) = match act {
            Nonlinearity::Pointwise(act) => (activation::forward(x.cpu(), act), x.cols()),
            Nonlinearity::SwiGlu => (activation::swiglu_forward(x.mat()), x.cols() / 2),
        };
        Rows::on_cpu(y, x.rows(), cols)
    }

    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Nonlinearity) {
        match act {
            Nonlinearity::Pointwise(act) => activation::backward(dy.cpu(), act, x.cpu_mut()),
            Nonlinearity::SwiGlu => activation::swiglu_backward(dy.mat(), x.mat_mut()),
        }
    }

    fn swiglu_both(&self, x: &mut Rows, dy: &Rows) -> Rows {
        let (rows, cols) = dy.dims();
        Rows::on_cpu(activation::swiglu_both(dy.mat(), x.mat_mut()), rows, cols)
    }
}
