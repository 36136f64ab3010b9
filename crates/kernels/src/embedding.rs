//! Rows of tables `[vocab, h]`: gathered, or mixed into a stream. Each index of a row is below `vocab`.

use half::bf16;

use crate::conv::RowMix;
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

/// Adds the mixed rows of `table` to `y [rows, h]`.
pub fn add_rows(table: Weight, mix: &RowMix, y: MatMut) {
    check!("add_rows", y.dims() == (mix.len(), table.dims().1), y.dims(), mix.len(), table.dims());
    for (r, row, weight) in mix.terms() {
        let row = row as usize;
        // SAFETY: rows are processed one after the other.
        add_row(unsafe { y.row(r) }, table.rows(row..row + 1), weight);
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

/// Adds the gradient of [`add_rows`] with respect to the table to `dtable`, in the order of the terms.
pub fn add_rows_backward(dy: Mat, mix: &RowMix, dtable: &mut [f32]) {
    let (rows, h) = dy.dims();
    let _span = span(Op::Embedding, || (mix.rows.len() * h, 12 * mix.rows.len() * h));
    check!("add_rows, backward", rows == mix.len(), dy.dims(), mix.len());
    let dtable = Shared::new(dtable);
    // Each thread computes its own columns, so that the terms of a repeated row are always added in the same order.
    ranges(h, 16, mix.rows.len() * h, |cols| {
        for (r, row, weight) in mix.terms() {
            // SAFETY: the column ranges are disjoint.
            let to = unsafe { dtable.part(row as usize * h + cols.start, cols.len()) };
            let pairs = to.iter_mut().zip(&dy.row(r)[cols.clone()]);
            // Most tables have weights of 1, which need no product.
            if weight == 1.0 {
                pairs.for_each(|(to, from)| *to += from);
            } else {
                pairs.for_each(|(to, from)| *to += weight * from);
            }
        }
    });
}
