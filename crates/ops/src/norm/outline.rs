//! Normalisation on an outline.

use omnigrpo_gpu::Dtype;

use crate::outline::{Outline, dtype, factor, in_f32, reach};
use crate::work::{Call, note};

use super::*;

impl NormOps for Outline {
    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        note(|| Call::Norm { rows: x.rows(), dim: x.cols(), back: false });
        let statistics = if matches!(norm, Norm::Layer { .. }) { 2 } else { 1 };
        (Rows::on_outline(factor(norm.weight()), x.rows(), x.cols()), in_f32(statistics, x.rows()))
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, _: &Rows, _: &Rows, norm: &Norm) {
        note(|| Call::Norm { rows: dx.rows(), dim: dx.cols(), back: true });
        dx.touch();
        if dtype(x) == Dtype::F32 {
            dx.round_stream(norm.weight());
        }
        reach(norm.weight());
        if let Norm::Layer { bias, .. } = norm {
            reach(bias);
        }
    }
}
