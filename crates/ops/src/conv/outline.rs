//! Convolutions over channels-last rows on an outline.

use crate::order::Order;
use crate::outline::{Outline, product, reach, same};
use crate::work::{note_dw, note_dx, note_elements, note_linear};

use super::*;

impl ConvOps for Outline {
    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        note_elements(patches.rows() * layer.k());
        note_linear(patches.rows(), std::slice::from_ref(layer), Order::Blocked);
        Rows::on_outline(product(x, [layer.weight()].into_iter()), patches.rows(), layer.n())
    }

    fn convolution_back(&self, x: &Rows, _: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let layers = std::slice::from_ref(layer);
        // The input is unfolded, and its gradient is folded.
        note_elements(2 * patches.rows() * layer.k());
        note_dx(patches.rows(), layers);
        note_dw(patches.rows(), layers);
        layer.reach();
        same(x)
    }

    fn depthwise(&self, x: &Rows, _: &Param, _: [usize; 2]) -> Rows {
        note_elements(DEPTHWISE * x.len());
        same(x)
    }

    fn depthwise_back(&self, x: &Rows, _: &Rows, weight: &Param, _: [usize; 2]) -> Rows {
        note_elements(2 * DEPTHWISE * x.len());
        reach(weight);
        same(x)
    }
}

/// Elementwise operations per output of a 3×3 convolution of one channel.
const DEPTHWISE: usize = 9;
