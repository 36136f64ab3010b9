//! Linear layers on the CPU.

use omnigrpo_kernels::dropout::Mask;
use omnigrpo_kernels::linear::{Gradient, Layer};
use omnigrpo_kernels::{Mat, MatMut, dropout, linear as product};

use crate::cpu::{Cpu, accumulate, with_layers};
use crate::device::Device;
use crate::param::GradGuard;
use crate::rows::RowOps;

use super::*;

impl LinearOps for Cpu {
    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows {
        let (rows, width) = (x.rows(), layers.iter().map(Linear::n).sum());
        with_layers(layers, |layers| {
            let adds = !matches!(onto, Onto::Nothing);
            let (mut y, col) = match (onto, order) {
                (Onto::Nothing, Order::Blocked) => {
                    return Rows::on_cpu(product::forward(x.mat(), layers), rows, width);
                }
                (Onto::Nothing, Order::PerRow) => (self.zeros(rows, width, None), 0),
                (Onto::Residual(residual), _) => (residual.clone(), 0),
                (Onto::Columns(y, col), _) => (y, col),
            };
            forward(order)(x.mat(), layers, adds, y.mat_mut().columns(col..col + width));
            y
        })
    }

    fn linear_dx(&self, dx: Dx, dy: &Rows, col: usize, layers: &[Linear]) -> Rows {
        let (n, k): (usize, _) = (layers.iter().map(Linear::n).sum(), layers.first().map_or(0, Linear::k));
        let own = dy.mat().columns(col..col + n);
        with_layers(layers, |layers| match dx {
            Dx::Like(_) => Rows::on_cpu(product::backward_input(own, layers), dy.rows(), k),
            Dx::Onto(mut dx) => {
                product::backward_input_into(own, layers, true, dx.mat_mut());
                dx
            }
        })
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]) {
        let mut buffers: Vec<Option<GradGuard>> =
            layers.iter().map(|l| l.weight().gradient(Device::Cpu)).collect();
        let mut gradients = Vec::with_capacity(buffers.len());
        let mut at = col;
        for (layer, buffer) in layers.iter().zip(&mut buffers) {
            if let Some(buffer) = buffer {
                let dw = MatMut::new(buffer.cpu(), layer.n(), layer.k());
                gradients.push(Gradient { dw, col: at, rounding: layer.weight().rounding() });
            }
            at += layer.n();
        }
        product::backward_weight(dy.mat(), x.mat(), &mut gradients);
        drop(buffers);
        at = col;
        for layer in layers {
            let columns = at..at + layer.n();
            at = columns.end;
            if let Some(bias) = layer.bias() {
                accumulate(bias, |db| product::backward_bias(dy.mat().columns(columns), db));
            }
        }
    }

    fn dropout(&self, x: &Rows, mask: &Mask) -> Rows {
        Rows::on_cpu(dropout::forward(x.mat(), mask), x.rows(), x.cols())
    }
}

/// Returns the kernel for an order: the blocked product, or the product whose rows are independent.
fn forward(order: Order) -> fn(Mat, &[Layer], bool, MatMut) {
    match order {
        Order::Blocked => product::forward_into,
        Order::PerRow => product::forward_rows_into,
    }
}
