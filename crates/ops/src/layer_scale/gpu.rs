//! Residuals that are added after a scale for each column on a GPU.

use crate::gpu::Card;

use super::*;

impl LayerScaleOps for Card {
    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        let y =
            self.vector(scale, |scale| self.gpu.scale_columns(self.of(x), Some(self.of(residual)), scale));
        self.rows(y, x.rows(), x.cols())
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let (rows, cols) = x.dims();
        let dx = self.vector(scale, |scale| self.gpu.scale_columns(self.of(dy), None, scale));
        self.accumulate(scale, |ds| {
            self.gpu.add_column_sums(ds, self.of(dy), [0, cols], Some(self.of(x)), rows);
        });
        self.rows(dx, rows, cols)
    }
}
