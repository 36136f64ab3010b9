//! Rotary positions on a GPU.

use omnigrpo_gpu::Array;

use crate::gpu::Card;

use super::*;

impl Card {
    /// Returns the copies of the cosines and sines of a table.
    pub(crate) fn waves(&self, table: &RopeTable) -> Arc<[Array; 2]> {
        table.copies.on(self.device(), |()| table.waves().each_ref().map(|wave| self.gpu.upload(wave)))
    }
}

impl RopeOps for Card {
    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: [usize; 2], inverse: bool) {
        let dims: [usize; 2] = x.dims().into();
        let [cos, sin] = &*self.waves(table);
        self.change(x, |x| self.gpu.rotate(x, dims, cos, sin, heads, inverse));
    }
}
