//! Sparse sums of rows, on the f64 twin.

use omnigrpo_kernels::{Mat, twin};

use crate::twin::{Twin, accumulate, values};

use super::*;

impl MixOps for Twin {
    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows {
        let rows = values(table);
        Rows::on_twin(twin::gather(Mat::new(&rows, rows.len() / h.max(1), h), ids), ids.len(), h)
    }

    fn add_rows(&self, x: &mut Rows, table: &Param, mix: &Mix) {
        let (h, table) = (x.cols(), values(table));
        let own = twin::mix_forward(Mat::new(&table, table.len() / h.max(1), h), mix);
        x.twin_mut().iter_mut().zip(own).for_each(|(x, own)| *x += own);
    }

    fn add_rows_back(&self, table: &Param, mix: &Mix, dy: &Rows) {
        accumulate(table, &twin::mix_backward(dy.mat64(), mix, table.len() / dy.cols().max(1)));
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        Rows::on_twin(twin::mix_forward(x.mat64(), mix), mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        Rows::on_twin(twin::mix_backward(dy.mat64(), mix, rows), rows, dy.cols())
    }
}
