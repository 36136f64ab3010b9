//! Matrix products on AMX tiles: the blocked product of `gemm` for CPUs that multiply 16 × 32 by 32 × 16 bf16 numbers in one
//! instruction.
//!
//! The instruction has 32 times the rate of `f32` multiply-adds and sums in `f32`, but its factors are bf16. A factor is
//! therefore written as the sum of three bf16 numbers, `x = x₁ + x₂ + x₃`: the rounded `x`, and the upper and the lower half of
//! the remainder, which has 16 bits. Of the nine products of two such sums, those below 2⁻²⁵ of the result are omitted:
//!
//! `x y ≈ x₁y₁ + x₁y₂ + x₂y₁ + x₂y₂ + x₁y₃ + x₃y₁`
//!
//! The error of a sum is that of `f32` addition, as elsewhere; the tests compare with `f64`. Three things differ from `f32`
//! arithmetic. Numbers below 2⁻¹²⁶ count as zero. The bits of a number that are worth less than 2⁻¹²⁶ are lost. A factor that
//! rounds to infinity as bf16 (from 3.39·10³⁸) gives NaN. (Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 Artificial
//! Intelligence Datatype For Higher-Precision Computations", arXiv 1904.06376.)
//!
//! A bf16 weight has only one part, and the other factor is rounded to one part, so there is one product. Some CPUs add products
//! of bf16 pairs in vectors at twice the rate of `f32` ([`pairs`]). The same packed operands can be used with these instructions.
//! [`crate::paths`] chooses between tiles, pairs and neither.
//!
//! During packing, `split` divides both operands into tiles. The instruction adds products of pairs: elements `p` and `p + 16` of
//! 32 consecutive elements of the inner dimension, in both operands.
//!
//! Decoding multiplies few rows by weights that are read once, so packing the weights would cost more than it saves. [`Dots`]
//! takes bf16 weights as the left operand, whose tiles are rows in their memory order. It packs the rounded rows of `x` as the
//! right operand, with adjacent elements as pairs. `f32` weights would have to be split while they are read; vectors are as fast
//! as that.
//!
//! An output element is the sum, in order, of the blocks of its inner dimension. Each block is computed from zero, in an order
//! that does not depend on other elements. The bits of an element therefore depend on the inner size alone.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod amx;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod dots;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod pairs;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod product;

use std::ops::Range;

use half::bf16;

use crate::Stored;
use crate::mat::Mat;
use crate::parallel::Shared;
use crate::paths::Path;

/// Returns true if products run on matrix tiles, that is, if CPU and system support tiles and the user has not disabled them.
#[must_use]
pub(crate) fn available() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return crate::probe::amx().works && crate::simd::allowed(crate::simd::Instructions::Best);
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

/// Returns true if vectors multiply bf16, that is, if CPU and system support it and the user has not disabled it.
#[must_use]
pub(crate) fn has_pairs() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return pairs::available();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

/// Rows of the left operand, and the destination of their products.
pub(crate) struct Left<'a> {
    /// Elements: `(i, p)` is `from[i · outer + p · inner]`. Either `inner` or `outer` is 1.
    pub from: &'a [f32],
    pub outer: usize,
    pub inner: usize,
    pub rows: usize,
    /// Output. Row `i` begins at element `i · ldc`.
    pub c: Shared<'a>,
}

/// Columns of the right operand, and their position in the output.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a> {
    /// Elements: `(p, j)` is `from[p · inner + j · outer]`. Either `inner` or `outer` is 1. The elements are not quantised.
    pub from: Stored<'a>,
    pub outer: usize,
    pub inner: usize,
    pub columns: usize,
    /// Index of the first of these columns in a row of the output.
    pub at: usize,
    /// Bias, which is added once.
    pub bias: Option<&'a [f32]>,
}

/// Computes `c = left · right (+ bias)` for every left and every right operand with inner size `k`, and adds the previous `c` if
/// `old`. With a path in `rounding`, both factors are rounded to bf16. Returns `false`, without writing anything, if the path widens
/// or this CPU does not support the product.
///
/// # Safety
/// All elements that sizes and strides address must exist in operands and outputs. Outputs must not overlap. All left operands
/// must have the same strides.
#[inline]
pub(crate) unsafe fn multiply(
    lefts: &[Left],
    rights: &[Right],
    k: usize,
    ldc: usize,
    old: bool,
    rounding: Option<Path>,
) -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if k > 0 && rounding.map_or_else(available, |path| path != Path::Widened) {
        debug_assert!(lefts.windows(2).all(|w| (w[0].outer, w[0].inner) == (w[1].outer, w[1].inner)));
        if lefts.iter().all(|left| left.rows == 0) || rights.iter().all(|right| right.columns == 0) {
            return true;
        }
        // SAFETY: guaranteed by this function's contract, and the CPU has the instructions.
        unsafe {
            match rounding {
                Some(path) => product::multiply::<1>(lefts, rights, k, ldc, old, path == Path::Amx),
                None => product::multiply::<{ amx::PARTS }>(lefts, rights, k, ldc, old, true),
            }
        }
        return true;
    }
    let _ = (lefts, rights, k, ldc, old, rounding);
    false
}

/// Returns the blocks of an inner dimension that [`multiply`] sums separately.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn blocks(k: usize) -> impl Iterator<Item = Range<usize>> {
    product::blocks(k)
}

/// Returns the number of words of a row that [`pack_words`] has packed.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn row_words(k: usize) -> usize {
    k.next_multiple_of(amx::STEP) / 2
}

/// Rounds rows to bf16 and packs them into words, for [`Streamed`]: elements `p` and `p + 16` of each 32.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn pack_words(x: Mat, to: &mut [f32]) {
    let words = row_words(x.cols);
    for (r, to) in to.chunks_exact_mut(words.max(1)).enumerate().take(x.rows) {
        for (x, to) in x.row(r).chunks(amx::STEP).zip(to.chunks_exact_mut(amx::SIDE)) {
            let number = |i: usize| u32::from(x.get(i).map_or(0, |&x| bf16::from_f32(x).to_bits()));
            for (p, to) in to.iter_mut().enumerate() {
                *to = f32::from_bits(number(p) | number(p + amx::SIDE) << 16);
            }
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use pairs::Streamed;

/// Returns the number of elements that [`pack_rows`] writes.
pub(crate) fn packed_len(m: usize, k: usize) -> usize {
    // Rows are padded to 16 or 32, and stored in words of two bf16.
    m.next_multiple_of(16) * k.next_multiple_of(32) / 2
}

/// Packs rows of `x` for [`Dots`]. Requires a CPU with tiles.
pub(crate) fn pack_rows(x: Mat, to: &mut [f32]) {
    let (m, k) = x.dims();
    assert!(available() && to.len() >= packed_len(m, k));
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    // SAFETY: the assertion checks the length, and a matrix has all its elements.
    unsafe {
        dots::pack_rows(to.as_mut_ptr().cast(), x.data.as_ptr(), x.stride, m, k);
    }
}

/// A single-threaded product for few rows and bf16 weights, which computes columns of `y [m, n] = x [m, k] · wᵀ + bias`. Requires
/// a CPU with tiles.
///
/// The weights are the left operand and are read directly from memory without packing, 32 rows at a time, while the next 32 rows
/// are prefetched. The rows of `x` are the columns of the right operand.
pub(crate) struct Dots<'a> {
    /// Pointer to element `(0, 0)` of the output.
    pub y: *mut f32,
    pub y_stride: usize,
    /// Rows that [`pack_rows`] has packed.
    pub x: *const f32,
    /// Weight `[n, k]`.
    pub w: &'a [bf16],
    pub bias: Option<&'a [f32]>,
    pub m: usize,
    pub k: usize,
    pub columns: Range<usize>,
    /// Row of `w` that this thread will probably need next.
    pub after: usize,
    /// True if the product is added to the previous `y`.
    pub old: bool,
}

impl Dots<'_> {
    /// Runs the product.
    ///
    /// # Safety
    /// `w` and `bias` must have all rows up to the end of the columns. `y` must have these columns in `m` rows, and nothing else
    /// may refer to them. [`available`] must be true, and `k > 0`.
    pub(crate) unsafe fn run(self) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        // SAFETY: guaranteed by this function's contract.
        unsafe {
            dots::run(&self);
        }
    }
}
