//! Rows multiplied by weights, on an outline.

use crate::outline::{Outline, like, same};
use crate::work::note_elements;

use super::*;

impl WeighOps for Outline {
    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows {
        note_elements(x.len());
        like(x, by.rows(x, logits), x.cols())
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, _: &Rows, _: Weighing) -> [Rows; 2] {
        note_elements(x.len());
        [same(x), same(logits)]
    }
}
