//! Memory, copies and sums of rows on an outline.

use omnigrpo_gpu::Dtype;

use crate::outline::{Outline, dtype, in_f32, like};
use crate::work::note_elements;

use super::*;

impl RowOps for Outline {
    fn zeros(&self, rows: usize, cols: usize, like: Option<&Rows>) -> Rows {
        Rows::on_outline(like.map_or(Dtype::F32, dtype), rows, cols)
    }

    fn upload(&self, _: Vec<f32>, rows: usize, cols: usize) -> Rows {
        in_f32(rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        vec![0.0; x.len()]
    }

    fn add(&self, to: &mut Rows, _: &Rows) {
        note_elements(to.len());
        to.touch();
    }

    fn scale(&self, x: &mut Rows, _: f32) {
        note_elements(x.len());
        x.touch();
    }

    fn part(&self, x: &Rows, _: Window, [rows, cols]: [usize; 2]) -> Rows {
        note_elements(rows * cols);
        like(x, rows, cols)
    }

    fn set_part(&self, to: &mut Rows, at: Window, _: &Rows, _: Window, [rows, cols]: [usize; 2]) {
        // The target of listed rows is zeroed first.
        note_elements(at.index.map_or(rows * cols, |_| to.len()));
        to.touch();
    }
}
