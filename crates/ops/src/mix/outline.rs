//! Sparse sums of rows, on an outline.

use crate::outline::{Outline, in_f32, like, reach};
use crate::work::note_elements;

use super::*;

impl MixOps for Outline {
    fn embed(&self, _: &Param, ids: &Tokens, h: usize) -> Rows {
        note_elements(ids.len() * h);
        in_f32(ids.len(), h)
    }

    fn add_rows(&self, x: &mut Rows, _: &Param, _: &Mix) {
        note_elements(x.len());
        x.touch();
    }

    fn add_rows_back(&self, table: &Param, _: &Mix, dy: &Rows) {
        note_elements(dy.len());
        reach(table);
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        note_elements(mix.rows.len() * x.cols());
        like(x, mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        note_elements(mix.rows.len() * dy.cols());
        like(dy, rows, dy.cols())
    }
}
