//! Products of packed operands in vectors that multiply pairs of bf16 (AVX512-BF16).
//!
//! An instruction adds two products to each of 16 sums, with one rounding to nearest after each; numbers below 2⁻¹²⁶
//! count as zero.

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::amx::{GROUP, PART, SIDE, STEP, TILE};
use crate::probe;
use crate::simd::{self, Instructions};

/// Number of output rows that are kept in registers.
const ROWS: usize = 8;

/// Returns true if the instructions, including all that packing needs, work on this machine and are not disabled.
pub(crate) fn available() -> bool {
    let works =
        probe::bf16().works && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
    works && simd::allowed(Instructions::Pairs)
}

/// Computes `c [32, 32] = a · b` for a packed group and a packed panel of `depth` elements. Rows of `c` begin `ldc` elements
/// apart. Writes at least the first `rows` rows of `c`.
///
/// # Safety
/// All elements must be in bounds, and the CPU must have the instructions.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply(
    c: *mut f32,
    ldc: usize,
    a: *const u32,
    b: *const u32,
    depth: usize,
    rows: usize,
) {
    for first in (0..rows.min(GROUP)).step_by(ROWS) {
        let mut acc = [[_mm512_setzero_ps(); GROUP / SIDE]; ROWS];
        let mut a = a.wrapping_add(first / SIDE * TILE + first % SIDE * SIDE);
        let mut b = b;
        for done in (0..depth).step_by(STEP) {
            // The elements of a pair are 16 apart, and padded with zeros beyond the depth.
            for pair in 0..SIDE.min(depth - done) {
                // SAFETY: line `pair` of both tiles of the panel and word `pair` of the rows are in bounds, and vectors have 64
                // bytes.
                unsafe {
                    let b = b.add(pair * SIDE);
                    let right: [__m512bh; GROUP / SIDE] = [
                        b.cast::<__m512bh>().read_unaligned(),
                        b.add(TILE).cast::<__m512bh>().read_unaligned(),
                    ];
                    for r in 0..ROWS {
                        let left = _mm512_set1_epi32(*a.add(r * SIDE + pair) as i32);
                        let left: __m512bh = std::mem::transmute(left);
                        for v in 0..GROUP / SIDE {
                            acc[r][v] = _mm512_dpbf16_ps(acc[r][v], left, right[v]);
                        }
                    }
                }
            }
            a = a.wrapping_add(PART);
            b = b.wrapping_add(PART);
        }
        for r in 0..ROWS {
            for v in 0..GROUP / SIDE {
                // SAFETY: row `first + r` of the output is in bounds.
                unsafe { _mm512_storeu_ps(c.add((first + r) * ldc + v * SIDE), acc[r][v]) };
            }
        }
    }
}

/// A product of few rows with a matrix `[k, n]` that is read in memory order, without packing. The sums of each element have the order of
/// [`multiply`].
pub(crate) struct Streamed {
    /// Sums `[rows, wide]`, to which the products are added.
    pub sums: *mut f32,
    /// Columns of the sums, a multiple of 16.
    pub wide: usize,
    /// Packed rows ([`super::pack_words`]), from the first element of the block on.
    pub x: *const u32,
    /// Words of a packed row.
    pub words: usize,
    /// First element of the block and of the columns.
    pub w: *const bf16,
    pub n: usize,
    pub depth: usize,
    pub rows: usize,
    pub columns: usize,
}

/// Pairs of rows of the matrix that are read side by side.
const PAIRS: usize = 4;

impl Streamed {
    /// Runs the product.
    ///
    /// # Safety
    /// All elements that sizes and strides address must be in bounds, and the CPU must have the instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(crate) unsafe fn run(&self) {
        for step in (0..self.depth).step_by(STEP) {
            let pairs = SIDE.min(self.depth - step);
            for first in (0..self.rows).step_by(ROWS) {
                let rows = first..self.rows.min(first + ROWS);
                for pair in (0..pairs).step_by(PAIRS) {
                    for column in (0..self.columns).step_by(SIDE) {
                        // SAFETY: guaranteed by this function's contract.
                        unsafe { self.add(step, pair..pairs.min(pair + PAIRS), column, rows.clone()) };
                    }
                }
            }
        }
    }

    /// Adds the products of some pairs of a step to the sums of 16 columns.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn add(&self, step: usize, pairs: Range<usize>, column: usize, rows: Range<usize>) {
        let count = SIDE.min(self.columns - column);
        let mask = ((1u32 << count) - 1) as __mmask16;
        let mut right = [_mm512_setzero_si512(); PAIRS];
        // Rows from here to those that are read two visits later.
        let ahead = if pairs.start + 2 * PAIRS < SIDE { 2 * PAIRS } else { 2 * PAIRS + SIDE };
        for (i, pair) in pairs.clone().enumerate() {
            let line = |p: usize| {
                let from = self.w.wrapping_add((step + p) * self.n + column);
                if column.is_multiple_of(2 * SIDE) {
                    simd::prefetch(from.wrapping_add(ahead * self.n));
                }
                // SAFETY: the masked columns of an existing row are readable.
                unsafe { _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast())) }
            };
            let low = line(pair);
            // Beyond the depth there are zeros.
            let high = match step + pair + SIDE < self.depth {
                true => _mm512_slli_epi32::<16>(line(pair + SIDE)),
                false => _mm512_setzero_si512(),
            };
            right[i] = _mm512_or_si512(low, high);
        }
        for r in rows {
            // SAFETY: the row has sums of whole vectors, and a word for each pair.
            unsafe {
                let sums = self.sums.add(r * self.wide + column);
                let x = self.x.add(r * self.words + step / 2);
                let mut acc = _mm512_loadu_ps(sums);
                for (i, pair) in pairs.clone().enumerate() {
                    let left = _mm512_set1_epi32(*x.add(pair) as i32);
                    let words = |v| std::mem::transmute::<__m512i, __m512bh>(v);
                    acc = _mm512_dpbf16_ps(acc, words(left), words(right[i]));
                }
                _mm512_storeu_ps(sums, acc);
            }
        }
    }
}
