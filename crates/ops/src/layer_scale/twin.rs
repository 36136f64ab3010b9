//! Scaled residuals, on the f64 twin.

use omnigrpo_kernels::twin;

use crate::twin::{Twin, accumulate, values};

use super::*;

impl LayerScaleOps for Twin {
    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        let y = twin::residual_forward(x.mat64(), residual.mat64(), &values(scale));
        Rows::on_twin(y, x.rows(), x.cols())
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let (dx, dscale) = twin::residual_backward(dy.mat64(), x.mat64(), &values(scale));
        accumulate(scale, &dscale);
        Rows::on_twin(dx, x.rows(), x.cols())
    }
}
