//! Creates, copies and adds large buffers, on several threads.

use std::mem::MaybeUninit;

use crate::MatMut;
use crate::parallel::{Shared, ranges};

/// Elements of a cache line. Ranges are multiples of it so that threads do not share a line.
const LINE: usize = 16;

/// Returns `len` elements. `fill(first element, destination)` writes each consecutive part.
fn build(len: usize, fill: impl Fn(usize, &mut [MaybeUninit<f32>]) + Sync) -> Vec<f32> {
    let write = |buffer: Shared| {
        ranges(len, LINE, len, |range| {
            let start = buffer.ptr(range.start).cast::<MaybeUninit<f32>>();
            // SAFETY: the ranges are disjoint and inside the buffer.
            fill(range.start, unsafe { std::slice::from_raw_parts_mut(start, range.len()) });
        });
    };
    // SAFETY: the ranges cover the buffer, and `fill` writes every element of each.
    unsafe { written(len, write) }
}

/// Returns `len` zeros.
#[must_use]
pub fn zeros(len: usize) -> Vec<f32> {
    build(len, |_, part| {
        part.fill(MaybeUninit::new(0.0));
    })
}

/// Returns `len` elements written by `write`.
///
/// # Safety
/// `write` writes every element, and reads none before writing it.
pub(crate) unsafe fn written(len: usize, write: impl FnOnce(Shared)) -> Vec<f32> {
    let mut buffer: Vec<f32> = Vec::with_capacity(len);
    // SAFETY: this is the vector's spare capacity, which nothing else refers to.
    write(unsafe { Shared::raw(buffer.as_mut_ptr(), len) });
    // SAFETY: by the contract.
    unsafe { buffer.set_len(len) };
    buffer
}

/// Returns `[rows, cols]` written by `write`.
///
/// # Safety
/// The requirement of [`written`] holds.
pub(crate) unsafe fn matrix(rows: usize, cols: usize, write: impl FnOnce(MatMut)) -> Vec<f32> {
    // SAFETY: by the contract.
    unsafe { written(rows * cols, |data| write(MatMut::over(data, rows, cols))) }
}

/// Returns `[rows, width]`. `write(row, destination)` writes each row, which is zeroed just before, so memory passes
/// through the cache once. `work` is that of [`ranges`].
pub(crate) fn of_rows(
    rows: usize,
    width: usize,
    work: usize,
    write: impl Fn(usize, &mut [f32]) + Sync,
) -> Vec<f32> {
    let fill = |buffer: Shared| {
        ranges(rows, 1, work, |range| {
            for row in range {
                buffer.clear(row * width, width);
                // SAFETY: every row is visited once, and has just been cleared.
                write(row, unsafe { buffer.part(row * width, width) });
            }
        });
    };
    // SAFETY: all rows are cleared.
    unsafe { written(rows * width, fill) }
}

/// Concatenates the rows returned by `row`, each of `width` elements, into `[rows, width]`.
#[must_use]
pub fn of_parts<'a>(rows: usize, width: usize, row: impl Fn(usize) -> &'a [f32] + Sync) -> Vec<f32> {
    of_rows(rows, width, rows * width, |at, to| to.copy_from_slice(row(at)))
}

/// Copies a buffer.
#[must_use]
pub fn copy(from: &[f32]) -> Vec<f32> {
    build(from.len(), |start, part| {
        for (to, &from) in part.iter_mut().zip(&from[start..]) {
            to.write(from);
        }
    })
}

/// Computes `to += from`, element by element.
pub fn add(to: &mut [f32], from: &[f32]) {
    assert_eq!(to.len(), from.len(), "buffers of different length");
    let (len, to) = (to.len(), Shared::new(to));
    ranges(len, LINE, len, |range| {
        // SAFETY: the ranges are disjoint.
        let to = unsafe { to.part(range.start, range.len()) };
        to.iter_mut().zip(&from[range]).for_each(|(to, from)| *to += from);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_created_copied_and_added() {
        for len in [0, 1, 15, 17, 100_003] {
            let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut y = copy(&x);
            assert_eq!(y, x);
            add(&mut y, &x);
            assert!(y.iter().zip(&x).all(|(y, x)| *y == 2.0 * x));
            let zeros = zeros(len);
            assert!(zeros.len() == len && zeros.iter().all(|&x| x == 0.0));
        }
    }
}
