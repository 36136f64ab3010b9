//! Sparse sums of rows, on the CPU.

use omnigrpo_kernels::{conv, embedding};

use crate::cpu::{Cpu, accumulate, with_table};
use crate::rows::RowOps;

use super::*;

impl MixOps for Cpu {
    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows {
        Rows::on_cpu(with_table(table, h, |table| embedding::gather(table, ids)), ids.len(), h)
    }

    fn add_rows(&self, x: &mut Rows, table: &Param, mix: &Mix) {
        with_table(table, x.cols(), |table| embedding::add_rows(table, mix, x.mat_mut()));
    }

    fn add_rows_back(&self, table: &Param, mix: &Mix, dy: &Rows) {
        accumulate(table, |dtable| embedding::add_rows_backward(dy.mat(), mix, dtable));
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        Rows::on_cpu(conv::mix_forward(x.mat(), mix), mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        let mut dx = self.zeros(rows, dy.cols(), None);
        conv::mix_backward(dy.mat(), mix, dx.mat_mut());
        dx
    }
}
