//! Multi-threaded creation, copying and addition of large buffers.

use std::mem::MaybeUninit;

use crate::MatMut;
use crate::parallel::{Shared, ranges};

/// Elements of a cache line. Range bounds are multiples of this number so that two threads never write to the same line.
const LINE: usize = 16;
/// Bytes of a page of memory, and of a part that a thread touches at a time.
const PAGE: usize = 4096;
const PIECE: usize = 1 << 22;

/// Returns a buffer of `len` elements. Calls `fill(first element, destination)` for consecutive parts that cover the buffer.
fn build(len: usize, fill: impl Fn(usize, &mut [MaybeUninit<f32>]) + Sync) -> Vec<f32> {
    let write = |buffer: Shared| {
        ranges(len, LINE, len, |range| {
            let start = buffer.ptr(range.start).cast::<MaybeUninit<f32>>();
            // SAFETY: the ranges are disjoint and inside the buffer.
            fill(range.start, unsafe { std::slice::from_raw_parts_mut(start, range.len()) });
        });
    };
    // SAFETY: the ranges cover the buffer, and `fill` writes every element of its range.
    unsafe { written(len, write) }
}

/// Returns `len` zeros.
#[must_use]
pub fn zeros(len: usize) -> Vec<f32> {
    build(len, |_, part| {
        part.fill(MaybeUninit::new(0.0));
    })
}

/// Returns `len` bytes of zero, whose pages the system has given already: all threads write to them.
#[must_use]
pub fn zero_bytes(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    crate::parallel::map(bytes.chunks_mut(PIECE), len, |piece| {
        for byte in piece.iter_mut().step_by(PAGE) {
            // SAFETY: the reference is valid. A plain zero would be left out, since the memory holds zeros.
            unsafe { std::ptr::write_volatile(byte, 0) };
        }
    });
    bytes
}

/// Returns a buffer of `len` elements that `write` fills.
///
/// # Safety
/// `write` must write every element, and must not read an element before writing it.
pub(crate) unsafe fn written(len: usize, write: impl FnOnce(Shared)) -> Vec<f32> {
    let mut buffer: Vec<f32> = Vec::with_capacity(len);
    // SAFETY: this is the vector's spare capacity, which nothing else refers to.
    write(unsafe { Shared::raw(buffer.as_mut_ptr(), len) });
    // SAFETY: guaranteed by this function's contract.
    unsafe { buffer.set_len(len) };
    buffer
}

/// Returns a `[rows, cols]` buffer that `write` fills.
///
/// # Safety
/// `write` must meet the requirement of [`written`].
pub(crate) unsafe fn matrix(rows: usize, cols: usize, write: impl FnOnce(MatMut)) -> Vec<f32> {
    // SAFETY: guaranteed by this function's contract.
    unsafe { written(rows * cols, |data| write(MatMut::over(data, rows, cols))) }
}

/// Returns a `[rows, width]` buffer. Each row is zeroed and then passed to `write(row, destination)` at once, so that memory
/// passes through the cache only once. `work` has the meaning that it has in [`ranges`].
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
                // SAFETY: each row is visited exactly once and was zeroed in the line above.
                write(row, unsafe { buffer.part(row * width, width) });
            }
        });
    };
    // SAFETY: every row is zeroed.
    unsafe { written(rows * width, fill) }
}

/// Concatenates the slices that `row` returns for each row, each of `width` elements, into `[rows, width]`.
#[must_use]
pub fn of_parts<'a>(rows: usize, width: usize, row: impl Fn(usize) -> &'a [f32] + Sync) -> Vec<f32> {
    of_rows(rows, width, rows * width, |at, to| to.copy_from_slice(row(at)))
}

/// Copies a buffer of numbers that f32 represents exactly.
#[must_use]
pub fn copy<T: Copy + Into<f32> + Sync>(from: &[T]) -> Vec<f32> {
    build(from.len(), |start, part| {
        for (to, &from) in part.iter_mut().zip(&from[start..]) {
            to.write(from.into());
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
