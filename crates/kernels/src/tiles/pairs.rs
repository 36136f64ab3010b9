//! Products of packed operands in vectors that multiply pairs of bf16 (AVX512-BF16).
//!
//! An instruction adds two products to each of 16 sums, with one rounding to nearest after each; numbers below 2⁻¹²⁶
//! count as zero.

use std::arch::x86_64::*;

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
