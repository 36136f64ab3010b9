//! Convolutions over channels-last rows on the CPU.

use std::ops::Range;

use omnigrpo_kernels::linear::Gradient;
use omnigrpo_kernels::{Mat, MatMut, conv, linear as product};

use crate::cpu::{Cpu, accumulate, with_layers};
use crate::rows::RowOps;

use super::*;

impl ConvOps for Cpu {
    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let mut y = self.zeros(patches.rows(), layer.n(), None);
        with_layers(std::slice::from_ref(layer), |layers| {
            pieces(x, patches, |rows, unfolded, _| {
                product::forward_into(unfolded, layers, false, y.mat_mut().row_range(rows));
            });
        });
        y
    }

    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let mut dx = self.zeros(x.rows(), x.cols(), None);
        let (weight, taps) = (layer.weight(), patches.taps);
        pieces(x, patches, |rows, unfolded, sources| {
            let dy = dy.mat().row_range(rows.clone());
            let rounding = weight.rounding();
            accumulate(weight, |dw| {
                let dw = MatMut::new(dw, layer.n(), layer.k());
                product::backward_weight(dy, unfolded, &mut [Gradient { dw, col: 0, rounding }]);
            });
            if let Some(bias) = layer.bias() {
                accumulate(bias, |db| product::backward_bias(dy, db));
            }
            let layers = std::slice::from_ref(layer);
            let dunfolded = with_layers(layers, |layers| product::backward_input(dy, layers));
            conv::fold(Mat::new(&dunfolded, rows.len(), layer.k()), sources, taps, dx.mat_mut());
        });
        dx
    }

    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        let y = conv::depthwise3(x.mat(), &weight.read().f32(), side, false);
        Rows::on_cpu(y, x.rows(), x.cols())
    }

    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        accumulate(weight, |dw| conv::depthwise3_weight(dy.mat(), x.mat(), side, dw));
        let dx = conv::depthwise3(dy.mat(), &weight.read().f32(), side, true);
        Rows::on_cpu(dx, x.rows(), x.cols())
    }
}

/// Calls `f(rows, unfolded rows, their sources)` for each part of a convolution's output. The bounds of the parts depend only on
/// sizes.
fn pieces(x: &Rows, patches: &Patches, mut f: impl FnMut(Range<usize>, Mat, &[u32])) {
    let Patches { sources, taps } = patches;
    let width = x.cols() * taps;
    let step = (UNFOLDED / width.max(1)).max(1);
    for start in (0..patches.rows()).step_by(step) {
        let rows = start..patches.rows().min(start + step);
        let sources = &sources[rows.start * taps..rows.end * taps];
        let unfolded = conv::unfold(x.mat(), sources, *taps);
        f(rows.clone(), Mat::new(&unfolded, rows.len(), width), sources);
    }
}

/// Maximum number of values in the patches unfolded at a time (64 MiB of `f32`).
const UNFOLDED: usize = 1 << 24;
