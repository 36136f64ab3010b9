//! Copies of parts of arrays, for devices that store values as slices in main memory. Callers check sizes as the contract in
//! `device` requires.

use crate::rows::Window;

/// Returns a copy of `[rows, cols]` values of `from`, whose rows have `from_cols` values.
pub(crate) fn part<T: Copy>(from: &[T], from_cols: usize, of: Window, [rows, cols]: [usize; 2]) -> Vec<T> {
    let mut to = Vec::with_capacity(rows * cols);
    (0..rows).for_each(|row| to.extend_from_slice(&from[of.start(row, from_cols)..][..cols]));
    to
}

/// Replaces `[rows, cols]` values of `to`, whose rows have `to_cols` values, with values of `from`.
pub(crate) fn set_part<T: Copy>(
    (to, to_cols, at): (&mut [T], usize, Window),
    (from, from_cols, of): (&[T], usize, Window),
    [rows, cols]: [usize; 2],
) {
    // Complete rows in order are adjacent.
    let adjacent = cols == to_cols && cols == from_cols && at.index.or(of.index).is_none();
    let (rows, cols) = if adjacent { (rows.min(1), rows * cols) } else { (rows, cols) };
    for row in 0..rows {
        let from = &from[of.start(row, from_cols)..][..cols];
        to[at.start(row, to_cols)..][..cols].copy_from_slice(from);
    }
}
