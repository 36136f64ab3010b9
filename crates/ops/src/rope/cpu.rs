//! Rotary positions on the CPU.

use omnigrpo_kernels::{Mat, rope};

use crate::cpu::Cpu;

use super::*;

impl RopeOps for Cpu {
    fn rotate(&self, x: &mut Rows, table: &RopeTable, [heads, dim]: [usize; 2], inverse: bool) {
        let rows = x.rows();
        let [cos, sin] = table.waves().each_ref().map(|wave| Mat::new(wave, rows, table.half));
        rope::apply(cos, sin, inverse, x.mat_mut().columns(0..heads * dim), dim);
    }
}
