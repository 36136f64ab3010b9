//! Convolutions over channels-last rows on the f64 twin.

use omnigrpo_kernels::twin;

use crate::linear::{Dx, LinearOps, Onto};
use crate::order::Order;
use crate::twin::{Twin, accumulate, values};

use super::*;

impl ConvOps for Twin {
    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let unfolded = twin::unfold(x.mat64(), &patches.sources, patches.taps);
        let unfolded = Rows::on_twin(unfolded, patches.rows(), layer.k());
        self.linear(&unfolded, std::slice::from_ref(layer), Onto::Nothing, Order::Blocked)
    }

    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let unfolded = twin::unfold(x.mat64(), &patches.sources, patches.taps);
        let unfolded = Rows::on_twin(unfolded, patches.rows(), layer.k());
        self.linear_dw(&unfolded, dy, 0, std::slice::from_ref(layer));
        let dunfolded = self.linear_dx(Dx::Like(x), dy, 0, std::slice::from_ref(layer));
        let dx = twin::fold(dunfolded.mat64(), &patches.sources, patches.taps, x.rows());
        Rows::on_twin(dx, x.rows(), x.cols())
    }

    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        let y = twin::depthwise3_forward(x.mat64(), &values(weight), side);
        Rows::on_twin(y, x.rows(), x.cols())
    }

    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        let (dx, dw) = twin::depthwise3_backward(dy.mat64(), x.mat64(), &values(weight), side);
        accumulate(weight, &dw);
        Rows::on_twin(dx, x.rows(), x.cols())
    }
}
