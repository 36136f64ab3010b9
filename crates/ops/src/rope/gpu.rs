//! Rotary positions on a GPU.

use crate::gpu::Card;

use super::*;

impl RopeOps for Card {
    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: [usize; 2], inverse: bool) {
        let dims: [usize; 2] = x.dims().into();
        let copy =
            table.copies.on(self.device(), |()| table.waves().each_ref().map(|wave| self.gpu.upload(wave)));
        let [cos, sin] = &*copy;
        self.change(x, |x| self.gpu.rotate(x, dims, cos, sin, heads, inverse));
    }
}
