//! Activations on a GPU.

use crate::gpu::Card;

use super::*;

impl ActivationOps for Card {
    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows {
        let (rows, cols) = x.dims();
        match act {
            Nonlinearity::Pointwise(act) => self.rows(self.gpu.activation(self.of(x), act), rows, cols),
            Nonlinearity::SwiGlu => self.rows(self.gpu.swiglu(self.of(x), rows, cols / 2), rows, cols / 2),
        }
    }

    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Nonlinearity) {
        let ((rows, i), dy) = (dy.dims(), self.of(dy));
        self.change(x, |x| match act {
            Nonlinearity::Pointwise(act) => self.gpu.activation_back(x, dy, act),
            Nonlinearity::SwiGlu => self.gpu.swiglu_back(x, dy, None, rows, i),
        });
    }

    fn swiglu_both(&self, x: &mut Rows, dy: &Rows) -> Rows {
        let ((rows, i), dy) = (dy.dims(), self.of(dy));
        let mut y = self.gpu.alloc(rows * i, self.of(x).dtype());
        self.change(x, |x| self.gpu.swiglu_back(x, dy, Some(&mut y), rows, i));
        self.rows(y, rows, i)
    }
}
