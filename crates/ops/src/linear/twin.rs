//! Linear layers on the f64 twin.

use omnigrpo_kernels::dropout::Mask;
use omnigrpo_kernels::{Mat, twin};

use crate::rows::RowOps;
use crate::twin::{Twin, accumulate, values};

use super::*;

impl LinearOps for Twin {
    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, _: Order) -> Rows {
        let (mut y, mut col) = match onto {
            Onto::Nothing => (self.zeros(x.rows(), layers.iter().map(Linear::n).sum(), None), 0),
            Onto::Residual(residual) => (residual.clone(), 0),
            Onto::Columns(y, col) => (y, col),
        };
        let width = y.cols();
        for layer in layers {
            let (n, w, bias) = (layer.n(), values(layer.weight()), layer.bias().map(|bias| values(bias)));
            let product = twin::linear_forward(x.mat64(), Mat::new(&w, n, layer.k()), bias.as_deref());
            let rows = y.twin_mut().chunks_exact_mut(width.max(1));
            for (y, product) in rows.zip(product.chunks_exact(n.max(1))) {
                y[col..].iter_mut().zip(product).for_each(|(y, p)| *y += p);
            }
            col += n;
        }
        y
    }

    fn linear_dx(&self, dx: Dx, dy: &Rows, col: usize, layers: &[Linear]) -> Rows {
        let (rows, k) = (dy.rows(), layers.first().map_or(0, Linear::k));
        let mut dx = if let Dx::Onto(dx) = dx { dx } else { self.zeros(rows, k, None) };
        let mut col = col;
        for layer in layers {
            let (x, n, w) = (self.zeros(rows, k, None), layer.n(), values(layer.weight()));
            let dy = dy.mat64().columns(col..col + n);
            let own = twin::linear_backward(dy, x.mat64(), Mat::new(&w, n, k)).0;
            self.add(&mut dx, &Rows::on_twin(own, rows, k));
            col += n;
        }
        dx
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]) {
        let mut col = col;
        for layer in layers {
            let n = layer.n();
            let w = self.zeros(n, layer.k(), None);
            let dy = dy.mat64().columns(col..col + n);
            let (_, dw, db) = twin::linear_backward(dy, x.mat64(), w.mat64());
            accumulate(layer.weight(), &dw);
            if let Some(bias) = layer.bias() {
                accumulate(bias, &db);
            }
            col += n;
        }
    }

    fn dropout(&self, x: &Rows, mask: &Mask) -> Rows {
        let factors = mask.factors(x.rows(), x.cols());
        let y = x.twin().iter().zip(factors).map(|(x, factor)| x * f64::from(factor)).collect();
        Rows::on_twin(y, x.rows(), x.cols())
    }
}
