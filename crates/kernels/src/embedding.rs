//! Embedding rows and their gradient.

use crate::Weight;
use crate::parallel::{Shared, ranges};

/// `y [ids, h]` = rows `ids` of `table [vocab, h]`. Every id is below `vocab`.
pub fn gather(y: &mut [f32], table: Weight, ids: &[u32], h: usize) {
    debug_assert_eq!(y.len(), ids.len() * h);
    for (y, &id) in y.chunks_exact_mut(h.max(1)).zip(ids) {
        let row = id as usize;
        match table.rows(row, row + 1, h) {
            Weight::F32(row) => y.copy_from_slice(row),
            Weight::Bf16(row) => y.iter_mut().zip(row).for_each(|(y, x)| *y = x.to_f32()),
        }
    }
}

/// `dtable [vocab, h] +=` rows of `dy [ids, h]` at `ids`, in the order of the ids. Every id is below `vocab`.
pub fn scatter_add(dtable: &mut [f32], dy: &[f32], ids: &[u32], h: usize) {
    debug_assert_eq!(dy.len(), ids.len() * h);
    let dtable = Shared::new(dtable);
    // Threads own columns, so that a row that occurs twice is always summed in order.
    ranges(h, 16, dy.len(), |cols| {
        for (i, &id) in ids.iter().enumerate() {
            // SAFETY: the column ranges are disjoint.
            let row = unsafe { dtable.part(id as usize * h + cols.start, cols.len()) };
            for (to, from) in row.iter_mut().zip(&dy[i * h + cols.start..i * h + cols.end]) {
                *to += from;
            }
        }
    });
}
