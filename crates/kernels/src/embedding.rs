//! Embedding rows and their gradient.

use half::bf16;

use crate::Weight;
use crate::parallel::{Shared, ranges};
use crate::profile::{Op, span};

/// `y [ids, h]` = rows `ids` of `table [vocab, h]`. Every id is below `vocab`.
pub fn gather(y: &mut [f32], table: Weight, ids: &[u32], h: usize) {
    let _span = span(Op::Embedding, || (0, 8 * ids.len() * h));
    debug_assert_eq!(y.len(), ids.len() * h);
    let work = y.len();
    let y = Shared::new(y);
    ranges(ids.len(), 1, work, |range| {
        for i in range {
            // SAFETY: every row is visited once.
            let y = unsafe { y.part(i * h, h) };
            let row = ids[i] as usize;
            match table.rows(row, row + 1, h) {
                Weight::F32(row) => y.copy_from_slice(row),
                Weight::Bf16(row) => widen(y, row),
                Weight::Quantised(row) => row.widen(y),
            }
        }
    });
}

simd_fn! {
    fn widen<'a>(_simd: S, y: &'a mut [f32], row: &'a [bf16]) -> () {
        for (y, x) in y.iter_mut().zip(row) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }
}

/// `dtable [vocab, h] +=` rows of `dy [ids, h]` at `ids`, in the order of the ids. Every id is below `vocab`.
pub fn scatter_add(dtable: &mut [f32], dy: &[f32], ids: &[u32], h: usize) {
    let _span = span(Op::Embedding, || (ids.len() * h, 12 * ids.len() * h));
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

/// `y [rows, h] +=` rows of `table [vocab, h]` at `ids`; a row without id stays as it is. Every id is below `vocab`.
pub fn add_rows(y: &mut [f32], table: Weight, ids: &[Option<u32>], h: usize) {
    debug_assert_eq!(y.len(), ids.len() * h);
    for (y, id) in y.chunks_exact_mut(h.max(1)).zip(ids) {
        let Some(row) = id.map(|id| id as usize) else { continue };
        add_row(y, table.rows(row, row + 1, h), 1.0);
    }
}

fn add_row(y: &mut [f32], row: Weight, weight: f32) {
    match row {
        Weight::F32(row) => y.iter_mut().zip(row).for_each(|(y, x)| *y += weight * x),
        Weight::Bf16(row) => y.iter_mut().zip(row).for_each(|(y, x)| *y += weight * x.to_f32()),
        Weight::Quantised(row) => {
            let mut wide = vec![0.0; row.len()];
            row.widen(&mut wide);
            y.iter_mut().zip(&wide).for_each(|(y, x)| *y += weight * x);
        }
    }
}

/// Gradient of [`add_rows`] for the table: `dtable [vocab, h] +=` rows of `dy [rows, h]` at `ids`, in their order.
pub fn add_rows_backward(dtable: &mut [f32], dy: &[f32], ids: &[Option<u32>], h: usize) {
    debug_assert_eq!(dy.len(), ids.len() * h);
    for (dy, id) in dy.chunks_exact(h.max(1)).zip(ids) {
        let Some(row) = id.map(|id| id as usize) else { continue };
        dtable[row * h..(row + 1) * h].iter_mut().zip(dy).for_each(|(to, from)| *to += from);
    }
}

/// `y [rows, h] +=` weighted sums of rows of `table [vocab, h]`: row `r` receives `taps[r]`. Every id is below `vocab`.
pub fn add_mixed(y: &mut [f32], table: Weight, taps: &[Vec<(u32, f32)>], h: usize) {
    debug_assert_eq!(y.len(), taps.len() * h);
    for (y, taps) in y.chunks_exact_mut(h.max(1)).zip(taps) {
        for &(id, weight) in taps {
            let row = id as usize;
            add_row(y, table.rows(row, row + 1, h), weight);
        }
    }
}

/// Gradient of [`add_mixed`] for the table, in the order of the rows and their taps.
pub fn add_mixed_backward(dtable: &mut [f32], dy: &[f32], taps: &[Vec<(u32, f32)>], h: usize) {
    debug_assert_eq!(dy.len(), taps.len() * h);
    for (dy, taps) in dy.chunks_exact(h.max(1)).zip(taps) {
        for &(id, weight) in taps {
            let row = &mut dtable[id as usize * h..][..h];
            row.iter_mut().zip(dy).for_each(|(to, from)| *to += weight * from);
        }
    }
}
