//! Rotary positions on an outline.

use crate::outline::Outline;
use crate::work::{Call, note};

use super::*;

impl RopeOps for Outline {
    fn rotate(&self, x: &mut Rows, table: &RopeTable, [heads, dim]: [usize; 2], _: bool) {
        note(|| Call::Rotate { rows: x.rows(), heads, dim, half: table.half });
        x.touch();
    }
}
