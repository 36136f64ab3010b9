//! Layers of experts on the f64 twin.

use omnigrpo_kernels::{Mat, twin};

use crate::rows::RowOps;
use crate::twin::{Twin, accumulate, values};

use super::*;

impl ExpertOps for Twin {
    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, _: Order) -> Rows {
        let w = values(layer.weight());
        let w = Mat::new(&w, layer.experts() * layer.k(), layer.n());
        Rows::on_twin(twin::experts_forward(x.mat64(), w, routes.groups()), x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows {
        let (x, w) = (self.zeros(dy.rows(), layer.k(), None), values(layer.weight()));
        let w = Mat::new(&w, layer.experts() * layer.k(), layer.n());
        let dx = twin::experts_backward(dy.mat64(), x.mat64(), w, routes.groups()).0;
        Rows::on_twin(dx, dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes) {
        let w = self.zeros(layer.experts() * layer.k(), layer.n(), None);
        let (_, dw) = twin::experts_backward(dy.mat64(), x.mat64(), w.mat64(), routes.groups());
        accumulate(layer.weight(), &dw);
    }
}
