//! Layers of experts on an outline.

use crate::outline::{Outline, product, reach};
use crate::work::{Call, Form, note_experts};

use super::*;

impl ExpertOps for Outline {
    fn experts(&self, x: &Rows, layer: &ExpertLinear, _: &Routes, order: Order) -> Rows {
        let (k, n, form, per_row) = (layer.k(), layer.n(), Form::of(layer.weight()), order == Order::PerRow);
        note_experts(x.rows(), layer.experts(), |rows| Call::Linear { rows, k, n, form, per_row });
        Rows::on_outline(product(x, [layer.weight()].into_iter()), x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, _: &Routes) -> Rows {
        let (k, n, form) = (layer.k(), layer.n(), Form::of(layer.weight()));
        note_experts(dy.rows(), layer.experts(), |rows| Call::LinearDx { rows, k, n, form });
        Rows::on_outline(product(dy, [layer.weight()].into_iter()), dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, _: &Rows, layer: &ExpertLinear, _: &Routes) {
        let (k, n, form) = (layer.k(), layer.n(), Form::of(layer.weight()));
        if layer.weight().trainable() {
            note_experts(x.rows(), layer.experts(), |rows| Call::LinearDw { rows, k, n, form });
        }
        reach(layer.weight());
    }
}
