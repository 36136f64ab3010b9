//! Scaled residuals, on an outline.

use crate::outline::{Outline, reach, same};
use crate::work::note_elements;

use super::*;

impl LayerScaleOps for Outline {
    fn scale_onto(&self, x: &Rows, residual: &Rows, _: &Param) -> Rows {
        note_elements(x.len());
        same(residual)
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        note_elements(x.len());
        reach(scale);
        same(dy)
    }
}
