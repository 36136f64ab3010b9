//! Memory, copies and sums of rows on a GPU.

use omnigrpo_gpu::{Array, Dtype, Place};

use crate::gpu::{Card, words};

use super::*;

impl RowOps for Card {
    fn zeros(&self, rows: usize, cols: usize, like: Option<&Rows>) -> Rows {
        let dtype = like.map_or(Dtype::F32, |x| self.of(x).dtype());
        self.rows(self.gpu.zeros(rows * cols, dtype), rows, cols)
    }

    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows {
        self.rows(self.gpu.upload(&data), rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        self.of(x).to_vec()
    }

    fn add(&self, to: &mut Rows, from: &Rows) {
        self.change(to, |to| self.gpu.add(to, self.of(from)));
    }

    fn scale(&self, x: &mut Rows, by: f32) {
        self.change(x, |x| self.gpu.scale(x, by));
    }

    fn part(&self, x: &Rows, of: Window, [rows, cols]: [usize; 2]) -> Rows {
        let (from, index) = (self.of(x), self.index(of));
        let mut y = self.gpu.alloc(rows * cols, from.dtype());
        let source = place(of, x.cols(), index.as_deref());
        self.gpu.copy_rows(&mut y, Place::new(0, cols), from, source, [rows, cols]);
        self.rows(y, rows, cols)
    }

    fn set_part(&self, to: &mut Rows, at: Window, from: &Rows, of: Window, size: [usize; 2]) {
        let (to_index, from_index) = (self.index(at), self.index(of));
        let target = place(at, to.cols(), to_index.as_deref());
        let source = place(of, from.cols(), from_index.as_deref());
        self.change(to, |to| self.gpu.copy_rows(to, target, self.of(from), source, size));
    }
}

/// Converts a window of an array of `cols` columns.
fn place<'a>(window: Window, cols: usize, index: Option<&'a Array>) -> Place<'a> {
    Place { first: window.row * cols + window.col, stride: cols, index }
}

impl Card {
    fn index(&self, window: Window) -> Option<Arc<Array>> {
        Some(window.index?.on(self.device(), |index| self.gpu.upload_words(&words(index))))
    }
}
