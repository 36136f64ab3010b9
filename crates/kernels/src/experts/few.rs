//! Products of experts that have few rows: decoding.
//!
//! Each matrix `[k, n]` is read once from memory, in its order. A task computes a strip of an expert's columns. It reads a few rows of
//! the strip side by side and adds their products to sums that stay in the first-level cache. The blocks of the inner dimension, and
//! the order within them, are those of the blocked products ([`gemm`], [`tiles`]). A place therefore has the same bits in both.

use std::ops::Range;

use half::bf16;
use pulp::WithSimd;

use super::Groups;
use crate::mat::{Mat, MatMut};
use crate::microkernel::Units;
use crate::parallel::tasks;
use crate::paths::Path;
use crate::simd::{self, Simd, load_ptr, prefetch_far, store_ptr};
use crate::workspace::{Line, PANELS, reserve};
use crate::{Stored, Weight, gemm, tiles};

/// Largest number of rows of an expert for which this kernel is faster than a blocked product.
const MOST: usize = 16;
/// Rows that are multiplied by the same part of the weights before the next part.
const ROWS: usize = 8;
/// Inner elements that are added to a sum between two visits of the first-level cache.
const DEEP: usize = 8;
/// Smallest number of columns of a strip, and the largest for many rows; multiples of the widest unit.
const STRIP: [usize; 2] = [128, 512];
/// Sums of a strip that fit in the first-level cache beside the weights. With few rows, a strip has all columns, so that memory is read in
/// its order.
const SUMS: usize = 4096;

/// Computes the products of [`super::forward`] if all experts have few rows and the CPU multiplies their weights in vectors. Returns
/// false, without writing anything, otherwise.
pub(super) fn forward(x: Mat, w: Weight, groups: Groups, y: &mut MatMut) -> bool {
    let paired = w.rounding() == Some(Path::Dot);
    let plain = match w.stored() {
        Stored::F32(_) => !tiles::available(),
        Stored::Bf16(_) => w.rounding() == Some(Path::Widened),
        Stored::Quantised(_) => false,
    };
    let places = groups.0.windows(2).map(|ends| ends[0]..ends[1]);
    let used: Vec<(usize, Range<usize>)> =
        places.enumerate().filter(|(_, places)| !places.is_empty()).collect();
    if x.cols == 0 || !(plain || paired) || used.iter().any(|(_, places)| places.len() > MOST) {
        return false;
    }
    let (k, n) = (x.cols, y.cols);
    let even = (used.len() * n).div_ceil(4 * rayon::current_num_threads());
    let most = used.iter().map(|(_, places)| places.len()).max().unwrap_or(1);
    let width = even.next_multiple_of(32).clamp(STRIP[0], (SUMS / most).max(STRIP[1]));
    let strips = n.div_ceil(width);
    let y = &*y;
    tasks(used.len() * strips, k * n * x.rows / 8, |task| {
        let ((expert, places), first) = (&used[task / strips], task % strips * width);
        let strip = Strip {
            x: x.row_range(places.clone()),
            w: w.rows(expert * k..(expert + 1) * k).stored(),
            n,
            columns: first..n.min(first + width),
            y: y.data.ptr(places.start * y.stride),
            y_stride: y.stride,
        };
        let mut scratch = PANELS.take();
        // SAFETY: the caller has checked the shapes, tasks write different places or columns, and the path says what the CPU can do.
        unsafe {
            if paired {
                strip.multiply_pairs(&mut scratch);
            } else {
                let sums = reserve(&mut scratch, places.len() * width.next_multiple_of(32));
                simd::arch().dispatch(Plain { strip, sums });
            }
        }
        PANELS.set(scratch);
    });
    true
}

/// Columns of one expert's product.
struct Strip<'a> {
    x: Mat<'a>,
    /// `[k, n]`
    w: Stored<'a>,
    n: usize,
    columns: Range<usize>,
    /// Row 0 of the output.
    y: *mut f32,
    y_stride: usize,
}

impl Strip<'_> {
    /// Returns the output of a row, from the strip's first column on.
    fn to(&self, row: usize) -> *mut f32 {
        self.y.wrapping_add(row * self.y_stride + self.columns.start)
    }

    /// Multiplies pairs of bf16 numbers.
    ///
    /// # Safety
    /// The output must have the strip's columns in every row, and nothing else may refer to them. The CPU must have the instructions.
    unsafe fn multiply_pairs(&self, scratch: &mut Vec<Line>) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if let Stored::Bf16(w) = self.w {
            let (k, columns) = (self.x.cols, self.columns.len());
            let words = tiles::row_words(k);
            let (rows, wide) = (self.x.rows, columns.next_multiple_of(16));
            let all = reserve(scratch, rows * (words + wide));
            let (packed, sums) = all.split_at_mut(rows * words);
            // SAFETY: the sums have whole vectors, every row has its words, and the weights have `k` rows of `n`.
            unsafe {
                tiles::pack_words(self.x, packed);
                for block in tiles::blocks(k) {
                    sums.fill(0.0);
                    tiles::Streamed {
                        sums: sums.as_mut_ptr(),
                        wide,
                        x: packed.as_ptr().cast::<u32>().add(block.start / 2),
                        words,
                        w: w.as_ptr().add(block.start * self.n + self.columns.start),
                        n: self.n,
                        depth: block.len(),
                        rows,
                        columns,
                    }
                    .run();
                    for r in 0..rows {
                        let sums = &sums[r * wide..][..columns];
                        let to = std::slice::from_raw_parts_mut(self.to(r), columns);
                        match block.start {
                            0 => to.copy_from_slice(sums),
                            _ => to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum),
                        }
                    }
                }
            }
        }
        let _ = scratch;
    }
}

/// A strip of f32 weights, or of bf16 weights that are widened.
struct Plain<'a> {
    strip: Strip<'a>,
    /// Sums of all rows, whole units each.
    sums: &'a mut [f32],
}

impl WithSimd for Plain<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.strip.w {
            Stored::F32(w) => self.multiply::<S, f32>(simd, w.as_ptr()),
            Stored::Bf16(w) => self.multiply::<S, bf16>(simd, w.as_ptr()),
            Stored::Quantised(_) => {}
        }
    }
}

impl Plain<'_> {
    #[inline(always)]
    fn multiply<S: Simd, T: Units>(self, simd: S, w: *const T) {
        let Self { strip, sums } = self;
        let (rows, k, n) = (strip.x.rows, strip.x.cols, strip.n);
        let unit = 2 * S::F32_LANES;
        let columns = strip.columns.len();
        let wide = columns.next_multiple_of(unit);
        for block in gemm::blocks(k, gemm::STEP, gemm::DEPTH) {
            sums.fill(0.0);
            for start in block.clone().step_by(DEEP) {
                let deep = DEEP.min(block.end - start);
                let w = w.wrapping_add(start * n + strip.columns.start);
                for first in (0..rows).step_by(ROWS) {
                    for at in (0..columns).step_by(unit) {
                        let rows = first..rows.min(first + ROWS);
                        let sums = sums.as_mut_ptr().wrapping_add(at);
                        let place =
                            Place { x: strip.x, start, w: w.wrapping_add(at), n, deep, rows, sums, wide };
                        // SAFETY: `deep` rows of the matrix have `width` elements from here on, and the sums have whole units.
                        unsafe {
                            match columns - at {
                                width if width < unit => place.add::<S, true>(simd, width),
                                _ => place.add::<S, false>(simd, unit),
                            }
                        }
                    }
                }
            }
            for r in 0..rows {
                for at in (0..columns).step_by(unit) {
                    let sums = &sums[r * wide + at..][..unit];
                    let width = unit.min(columns - at);
                    let to = strip.to(r).wrapping_add(at);
                    for i in 0..width {
                        let sum = sums[T::place(i, S::F32_LANES)];
                        // SAFETY: the columns are in bounds.
                        unsafe { *to.add(i) = if block.start == 0 { sum } else { *to.add(i) + sum } };
                    }
                }
            }
        }
    }
}

/// A unit of columns, at some elements of the inner dimension.
struct Place<'a, T> {
    x: Mat<'a>,
    /// First element of the inner dimension.
    start: usize,
    w: *const T,
    n: usize,
    deep: usize,
    rows: Range<usize>,
    sums: *mut f32,
    /// Distance between the sums of two rows.
    wide: usize,
}

impl<T: Units> Place<'_, T> {
    /// Adds the products to the sums. If `TAIL`, the unit has only `width` columns.
    ///
    /// # Safety
    /// The weights must have these columns in `deep` rows, and the sums whole units in every row.
    #[inline(always)]
    unsafe fn add<S: Simd, const TAIL: bool>(&self, simd: S, width: usize) {
        let lanes = S::F32_LANES;
        let mut w = [[simd.splat_f32s(0.0); 2]; DEEP];
        for p in 0..self.deep {
            let from = self.w.wrapping_add(p * self.n);
            // These rows exceed the first-level cache, so they wait in the second.
            for line in (0..2 * lanes * size_of::<T>()).step_by(64) {
                prefetch_far(from.wrapping_add(2 * DEEP * self.n).cast::<u8>().wrapping_add(line));
            }
            // SAFETY: guaranteed by this function's contract.
            w[p] = unsafe { if TAIL { T::columns(simd, from, width) } else { T::unit(simd, from) } };
        }
        for r in self.rows.clone() {
            let x = &self.x.row(r)[self.start..][..self.deep];
            let sums = self.sums.wrapping_add(r * self.wide);
            // SAFETY: guaranteed by this function's contract.
            unsafe {
                let mut acc = [load_ptr(simd, sums, lanes), load_ptr(simd, sums.wrapping_add(lanes), lanes)];
                for (x, w) in x.iter().zip(w) {
                    let x = simd.splat_f32s(*x);
                    acc = [simd.mul_add_e_f32s(x, w[0], acc[0]), simd.mul_add_e_f32s(x, w[1], acc[1])];
                }
                store_ptr(simd, sums, lanes, acc[0]);
                store_ptr(simd, sums.wrapping_add(lanes), lanes, acc[1]);
            }
        }
    }
}
