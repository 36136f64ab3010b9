//! Copies of rows and columns, for devices that store values as slices in main memory. Callers check sizes as the contract in
//! `device` requires.

use std::ops::Range;

/// Returns the columns in a range from rows of `cols` values.
pub(crate) fn columns<T: Copy>(x: &[T], cols: usize, columns: Range<usize>) -> Vec<T> {
    x.chunks_exact(cols.max(1)).flat_map(|row| &row[columns.clone()]).copied().collect()
}

/// Replaces columns in rows of `cols` values with rows of `width` values, starting at column `first`.
pub(crate) fn set_columns<T: Copy>(to: &mut [T], cols: usize, first: usize, from: &[T], width: usize) {
    for (to, from) in to.chunks_exact_mut(cols.max(1)).zip(from.chunks_exact(width.max(1))) {
        to[first..first + width].copy_from_slice(from);
    }
}

/// Returns the rows listed in `index`, in that order.
pub(crate) fn select<T: Copy>(x: &[T], cols: usize, index: &[usize]) -> Vec<T> {
    let mut y = Vec::with_capacity(index.len() * cols);
    index.iter().for_each(|&row| y.extend_from_slice(&x[row * cols..(row + 1) * cols]));
    y
}

/// Writes each row of `x` to the row of `to` given by `index`.
pub(crate) fn spread<T: Copy>(to: &mut [T], cols: usize, index: &[usize], x: &[T]) {
    for (x, &row) in x.chunks_exact(cols.max(1)).zip(index) {
        to[row * cols..(row + 1) * cols].copy_from_slice(x);
    }
}

/// Replaces rows of `to`, starting at row `first`, with the rows `range` of `from`.
pub(crate) fn set_rows<T: Copy>(to: &mut [T], cols: usize, first: usize, from: &[T], range: Range<usize>) {
    to[first * cols..(first + range.len()) * cols]
        .copy_from_slice(&from[range.start * cols..range.end * cols]);
}
