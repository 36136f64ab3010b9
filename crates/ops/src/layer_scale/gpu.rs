//! Scaled residuals, on a GPU.

use omnigrpo_gpu::launchers::elementwise;

use crate::gpu::Card;

use super::*;

impl LayerScaleOps for Card {
    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        self.scaled(x, Some(residual), scale)
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let (rows, cols) = x.dims();
        self.accumulate(scale, |ds| {
            self.gpu.add_column_sums(ds, self.of(dy), [0, cols], Some(self.of(x)), rows);
        });
        self.scaled(dy, None, scale)
    }
}

impl Card {
    /// Computes `x · scale`, and adds it to the residual if there is one. The result has the dtype of the residual, or of `x`.
    fn scaled(&self, x: &Rows, residual: Option<&Rows>, scale: &Param) -> Rows {
        let ((rows, cols), residual) = (x.dims(), residual.map(|residual| self.of(residual)));
        let x = self.of(x);
        let y = self.gpu.alloc(x.len(), residual.unwrap_or(x).dtype());
        self.vector(scale, |scale| {
            self.gpu.each_quad(elementwise::scale_columns(&y, x, residual, scale, rows, cols), rows, cols);
        });
        self.rows(y, rows, cols)
    }
}
