//! Convolutions over channels-last rows on a GPU.

use omnigrpo_gpu::Unfolding;

use crate::gpu::Card;
use crate::linear::{Dx, LinearOps, Onto};
use crate::order::Order;

use super::*;

impl ConvOps for Card {
    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let unfolding = Unfolding::new(self.gpu, &patches.sources, patches.taps, x.rows());
        let unfolded = self.gpu.unfold(self.of(x), &unfolding, x.cols());
        let unfolded = self.rows(unfolded, patches.rows(), layer.k());
        self.linear(&unfolded, std::slice::from_ref(layer), Onto::Nothing, Order::Blocked)
    }

    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let (rows, c) = x.dims();
        let unfolding = Unfolding::new(self.gpu, &patches.sources, patches.taps, rows);
        let unfolded = self.gpu.unfold(self.of(x), &unfolding, c);
        let unfolded = self.rows(unfolded, patches.rows(), layer.k());
        self.linear_dw(&unfolded, dy, 0, std::slice::from_ref(layer));
        drop(unfolded);
        let dunfolded = self.linear_dx(Dx::Like(x), dy, 0, std::slice::from_ref(layer));
        let dunfolded = self.of(&dunfolded);
        let mut dx = self.gpu.zeros(rows * c, dunfolded.dtype());
        self.gpu.fold(&mut dx, dunfolded, &unfolding, c);
        self.rows(dx, rows, c)
    }

    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        let y = self.vector(weight, |weight| self.gpu.depthwise(self.of(x), weight, side, false));
        self.rows(y, x.rows(), x.cols())
    }

    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        self.accumulate(weight, |dw| self.gpu.depthwise_weight(dw, self.of(dy), self.of(x), side));
        let dx = self.vector(weight, |weight| self.gpu.depthwise(self.of(dy), weight, side, true));
        self.rows(dx, x.rows(), x.cols())
    }
}
