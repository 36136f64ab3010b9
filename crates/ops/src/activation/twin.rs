//! Activations on the f64 twin.

use omnigrpo_kernels::twin;

use crate::twin::Twin;

use super::*;

impl ActivationOps for Twin {
    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows {
        let (y, cols) = match act {
            Nonlinearity::Pointwise(act) => {
                (x.twin().iter().map(|&x| twin::activation(act, x).0).collect(), x.cols())
            }
            Nonlinearity::SwiGlu => (twin::swiglu_forward(x.mat64()), x.cols() / 2),
        };
        Rows::on_twin(y, x.rows(), cols)
    }

    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Nonlinearity) {
        let dx = match act {
            Nonlinearity::Pointwise(act) => {
                x.twin().iter().zip(dy.twin()).map(|(&x, dy)| dy * twin::activation(act, x).1).collect()
            }
            Nonlinearity::SwiGlu => twin::swiglu_backward(dy.mat64(), x.mat64()),
        };
        *x = Rows::on_twin(dx, x.rows(), x.cols());
    }
}
