//! Linear layers on an outline.

use omnigrpo_gpu::{Dtype, few_rows_scratch};
use omnigrpo_kernels::dropout::Mask;

use crate::outline::{Outline, Span, card, dtype, factor, factors, product, reach_layers, same};
use crate::work::{note_dw, note_dx, note_elements, note_linear};

use super::*;

impl LinearOps for Outline {
    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows {
        note_linear(x.rows(), layers, order);
        let out = match onto {
            Onto::Nothing => product(x, layers.iter().map(Linear::weight)),
            Onto::Residual(residual) => dtype(residual),
            Onto::Columns(mut y, _) => {
                y.touch();
                return y;
            }
        };
        let n = layers.iter().map(Linear::n).sum();
        let y = Rows::on_outline(out, x.rows(), n);
        let k = layers.first().map_or(0, Linear::k);
        // The kernels for few rows read codes, and may divide their sums.
        match order == Order::PerRow && card().is_some() {
            true => drop(Span::new(few_rows_scratch(x.rows(), n, k), Dtype::F32)),
            false => drop(factors(x, layers)),
        }
        y
    }

    fn linear_dx(&self, dx: Option<Rows>, dy: &Rows, _: usize, layers: &[Linear]) -> Rows {
        note_dx(dy.rows(), layers);
        let mut dx = dx.unwrap_or_else(|| {
            // A GPU sums the products of several layers in f32.
            let sum =
                if layers.len() > 1 { Dtype::F32 } else { product(dy, layers.iter().map(Linear::weight)) };
            Rows::on_outline(sum, dy.rows(), layers.first().map_or(0, Linear::k))
        });
        dx.touch();
        drop(factors(dy, layers));
        dx
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, _: usize, layers: &[Linear]) {
        note_dw(x.rows(), layers);
        drop([x, dy].map(|rows| {
            let wanted = layers.first().map_or(Dtype::F32, |layer| factor(layer.weight()));
            (card().is_some() && wanted != dtype(rows)).then(|| Span::new(rows.len(), wanted))
        }));
        reach_layers(layers);
    }

    fn dropout(&self, x: &Rows, _: &Mask) -> Rows {
        note_elements(x.len());
        same(x)
    }
}
