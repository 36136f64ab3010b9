//! The optimizer on an outline.

use crate::outline::Outline;
use crate::work::{Call, note};

use super::*;

impl OptimOps for Outline {
    fn sum_of_squares(&self, _: &Rows) -> f64 {
        0.0
    }

    fn adamw(&self, param: &Param, _: &Rows, _: &mut Moments, step: &Step) -> Result<()> {
        let coded = step.is_coded(param);
        note(|| Call::AdamW { len: param.len(), dtype: param.dtype(), master: step.master, coded });
        Ok(())
    }
}
