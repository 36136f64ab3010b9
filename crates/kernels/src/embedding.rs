//! Gathering of embedding rows, and scattering of their gradients.
//!
//! Ids are row indices of a table `[vocab, h]`. Each id is below `vocab`.

use half::bf16;

use crate::mat::{Mat, MatMut, check};
use crate::parallel::{Shared, ranges};
use crate::profile::{Op, span};
use crate::{Stored, Weight, buffer};

/// Returns the rows of `table` whose indices are `ids`, as `[ids, h]`.
#[must_use]
pub fn gather(table: Weight, ids: &[u32]) -> Vec<f32> {
    let (rows, h) = (ids.len(), table.dims().1);
    let _span = span(Op::Embedding, || (0, 8 * rows * h));
    buffer::of_rows(rows, h, rows * h, |i, y| {
        let row = ids[i] as usize;
        match table.rows(row..row + 1).stored() {
            Stored::F32(row) => y.copy_from_slice(row),
            Stored::Bf16(row) => widen(y, row),
            Stored::Quantised(row) => row.widen(y),
        }
    })
}

simd_fn! {
    fn widen<'a>(_simd: S, y: &'a mut [f32], row: &'a [bf16]) -> () {
        for (y, x) in y.iter_mut().zip(row) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }
}

/// Adds the gradient of [`gather`] to `dtable`. Row `i` of `dy [ids, h]` is added to row `ids[i]`, in the order of the ids.
pub fn scatter_add(dy: Mat, ids: &[u32], dtable: &mut [f32]) {
    let (rows, h) = dy.dims();
    let _span = span(Op::Embedding, || (rows * h, 12 * rows * h));
    check!("scatter_add", rows == ids.len(), dy.dims(), ids.len());
    let dtable = Shared::new(dtable);
    // Each thread computes its own columns, so that the terms of a repeated row are always added in the same order.
    ranges(h, 16, rows * h, |cols| {
        for (i, &id) in ids.iter().enumerate() {
            // SAFETY: the column ranges are disjoint.
            let row = unsafe { dtable.part(id as usize * h + cols.start, cols.len()) };
            for (to, from) in row.iter_mut().zip(&dy.row(i)[cols.clone()]) {
                *to += from;
            }
        }
    });
}

/// Adds row `ids[i]` of `table` to row `i` of `y [rows, h]`. A row without an id is unchanged.
pub fn add_rows(table: Weight, ids: &[Option<u32>], y: MatMut) {
    check!("add_rows", y.dims() == (ids.len(), table.dims().1), y.dims(), ids.len(), table.dims());
    for (i, id) in ids.iter().enumerate() {
        let Some(row) = id.map(|id| id as usize) else { continue };
        // SAFETY: rows are processed one after the other.
        add_row(unsafe { y.row(i) }, table.rows(row..row + 1), 1.0);
    }
}

fn add_row(y: &mut [f32], row: Weight, weight: f32) {
    match row.stored() {
        Stored::F32(row) => y.iter_mut().zip(row).for_each(|(y, x)| *y += weight * x),
        Stored::Bf16(row) => y.iter_mut().zip(row).for_each(|(y, x)| *y += weight * x.to_f32()),
        Stored::Quantised(row) => {
            let mut wide = vec![0.0; row.len()];
            row.widen(&mut wide);
            y.iter_mut().zip(&wide).for_each(|(y, x)| *y += weight * x);
        }
    }
}

/// Adds the gradient of [`add_rows`] to `dtable`: adds each row of `dy [rows, h]` that has an id to the table row of that id, in
/// the order of the rows.
pub fn add_rows_backward(dy: Mat, ids: &[Option<u32>], dtable: &mut [f32]) {
    check!("add_rows, backward", dy.rows == ids.len(), dy.dims(), ids.len());
    for (i, id) in ids.iter().enumerate() {
        let Some(row) = id.map(|id| id as usize) else { continue };
        let to = &mut dtable[row * dy.cols..][..dy.cols];
        to.iter_mut().zip(dy.row(i)).for_each(|(to, from)| *to += from);
    }
}

/// Adds weighted sums of rows of `table` to `y [rows, h]`. `taps[r]` lists the terms of row `r` as pairs of a table row and a
/// weight.
pub fn add_mixed(table: Weight, taps: &[Vec<(u32, f32)>], y: MatMut) {
    check!("add_mixed", y.dims() == (taps.len(), table.dims().1), y.dims(), taps.len(), table.dims());
    for (i, taps) in taps.iter().enumerate() {
        for &(id, weight) in taps {
            let row = id as usize;
            // SAFETY: rows are processed one after the other.
            add_row(unsafe { y.row(i) }, table.rows(row..row + 1), weight);
        }
    }
}

/// Adds the gradient of [`add_mixed`] to `dtable`, in the order of the rows and their taps.
pub fn add_mixed_backward(dy: Mat, taps: &[Vec<(u32, f32)>], dtable: &mut [f32]) {
    check!("add_mixed, backward", dy.rows == taps.len(), dy.dims(), taps.len());
    for (i, taps) in taps.iter().enumerate() {
        for &(id, weight) in taps {
            let to = &mut dtable[id as usize * dy.cols..][..dy.cols];
            to.iter_mut().zip(dy.row(i)).for_each(|(to, from)| *to += weight * from);
        }
    }
}
