//! Choice of the instruction set at run time, and the vector functions that kernels share.

use std::sync::atomic::{AtomicU8, Ordering};

use half::bf16;
use pulp::Arch;
pub(crate) use pulp::Simd;

/// A limit on the instructions that kernels may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Instructions {
    /// All instructions that the CPU has.
    Best,
    /// All instructions except matrix tiles.
    Pairs,
    /// All instructions except matrix tiles and products of bf16 and of bytes.
    Vectors,
    /// Only the instructions of the architecture's baseline CPU.
    Portable,
}

static LIMIT: AtomicU8 = AtomicU8::new(Instructions::Best as u8);

/// Limits the instructions that kernels of this process use. By default there is no limit.
///
/// The function is intended for tests and for comparing machines: it makes the process behave as if it ran on another CPU, so all
/// its kernels follow it. Do not call it while a kernel runs.
pub fn limit_instructions(to: Instructions) {
    LIMIT.store(to as u8, Ordering::Relaxed);
}

/// Returns true if the limit permits these instructions.
pub(crate) fn allowed(instructions: Instructions) -> bool {
    LIMIT.load(Ordering::Relaxed) <= instructions as u8
}

/// Returns the vector instructions in use.
#[inline]
pub(crate) fn arch() -> Arch {
    if allowed(Instructions::Vectors) { Arch::new() } else { Arch::Scalar }
}

/// Defines a function whose body is compiled once per instruction set. At run time, the best available version runs.
///
/// The first argument names the SIMD token and its type. Code that the body calls must be `#[inline(always)]`; otherwise it is
/// compiled for the baseline CPU. For this reason, hot loops contain no closures.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$($lt:lifetime),*>(
        $simd:ident: $S:ident, $($arg:ident: $ty:ty),* $(,)?
    ) -> $ret:ty $body:block) => {
        $(#[$meta])*
        $vis fn $name<$($lt),*>($($arg: $ty),*) -> $ret {
            struct Op<$($lt),*> { $($arg: $ty),* }
            impl<$($lt),*> pulp::WithSimd for Op<$($lt),*> {
                type Output = $ret;
                #[inline(always)]
                fn with_simd<$S: pulp::Simd>(self, $simd: $S) -> $ret {
                    let Op { $($arg),* } = self;
                    $body
                }
            }
            $crate::simd::arch().dispatch(Op { $($arg),* })
        }
    };
}

/// Computes `e^x` for every lane, with a relative error below 2e-7.
///
/// Below −87.336 (the smallest normal result) the value is 0; above 88.376 it is infinite; NaN stays NaN. The method is `x = n ln
/// 2 + r` with `|r| ≤ ln 2 / 2`: a polynomial in `r` (with the coefficients of `expf` in the Cephes library) times `2^n`.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding 1.5·2^23 rounds to an integer, which is then in the low bits.
    let magic = simd.splat_f32s(12_582_912.0);
    let shifted = simd.mul_add_e_f32s(x, simd.splat_f32s(core::f32::consts::LOG2_E), magic);
    let n = simd.sub_f32s(shifted, magic);
    // ln 2 is split into two parts. The first part has few bits, so that `n` times it is exact.
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(-355.0 / 512.0), x);
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(2.121_944_4e-4), r);
    let mut p = simd.splat_f32s(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = simd.mul_add_e_f32s(p, r, simd.splat_f32s(c));
    }
    let one = simd.splat_f32s(1.0);
    let p = simd.add_f32s(simd.mul_add_e_f32s(p, simd.mul_f32s(r, r), r), one);
    let bits = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let scale = simd.transmute_f32s_u32s(simd.add_u32s(bits, simd.transmute_u32s_f32s(one)));
    let y = simd.mul_f32s(p, scale);
    let under = simd.less_than_f32s(x, simd.splat_f32s(-87.336));
    let over = simd.greater_than_f32s(x, simd.splat_f32s(88.376));
    let y = select(simd, under, simd.splat_f32s(0.0), y);
    select(simd, over, simd.splat_f32s(f32::INFINITY), y)
}

/// Computes `2^x` for every lane, for `x` of at most 127, with a relative error below 2e-7. Below −126 the value is 0; NaN stays
/// NaN.
///
/// The method is `x = n + f` with `|f| ≤ 1/2`: a polynomial in `f` (with the coefficients of `exp2f` in the Cephes library) times
/// `2^n`. It takes fewer steps than `e^x`. This matters because exponentials take most of the time of a softmax.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding 1.5·2^23 rounds to an integer, which is then in the low bits.
    let magic = simd.splat_f32s(12_582_912.0);
    let shifted = simd.add_f32s(x, magic);
    let f = simd.sub_f32s(x, simd.sub_f32s(shifted, magic));
    let mut p = simd.splat_f32s(1.535_336_2e-4);
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 0.240_226_48, core::f32::consts::LN_2, 1.0] {
        p = simd.mul_add_e_f32s(p, f, simd.splat_f32s(c));
    }
    let bits = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let one = simd.transmute_u32s_f32s(simd.splat_f32s(1.0));
    let y = simd.mul_f32s(p, simd.transmute_f32s_u32s(simd.add_u32s(bits, one)));
    select(simd, simd.less_than_f32s(x, simd.splat_f32s(-126.0)), simd.splat_f32s(0.0), y)
}

/// An element type that can be widened to f32.
pub(crate) trait Wide: Copy {
    fn wide(self) -> f32;
}

impl Wide for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}

impl Wide for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// Computes `to[c · to_stride + r] = from[r · from_stride + c]` for the given numbers of rows and columns of `from`.
///
/// # Safety
/// All elements must be in bounds, and nothing else may refer to the elements of `to`.
pub(crate) unsafe fn transpose<T: Wide>(
    to: *mut f32,
    to_stride: usize,
    from: *const T,
    from_stride: usize,
    rows: usize,
    columns: usize,
) {
    #[cfg(target_arch = "x86_64")]
    let (whole_rows, whole_columns) = if allowed(Instructions::Vectors) && is_x86_feature_detected!("avx2") {
        let whole = (rows / squares::SIDE * squares::SIDE, columns / squares::SIDE * squares::SIDE);
        // SAFETY: AVX2 was detected; this function's contract guarantees the rest.
        unsafe { squares::transpose(to, to_stride, from, from_stride, whole.0, whole.1) };
        whole
    } else {
        (0, 0)
    };
    #[cfg(not(target_arch = "x86_64"))]
    let (whole_rows, whole_columns) = (0, 0);
    // Eight rows are processed at a time, so that writes are contiguous.
    for first in (0..rows).step_by(8) {
        for c in if first < whole_rows { whole_columns } else { 0 }..columns {
            for r in first..rows.min(first + 8) {
                // SAFETY: guaranteed by this function's contract.
                unsafe {
                    *to.wrapping_add(c * to_stride + r) = (*from.wrapping_add(r * from_stride + c)).wide()
                };
            }
        }
    }
}

/// Transposition with vectors of eight lanes.
#[cfg(target_arch = "x86_64")]
mod squares {
    use std::arch::x86_64::{
        __m128, __m256, _mm_castsi128_ps, _mm_cvtepu16_epi32, _mm_loadl_epi64, _mm_loadu_ps, _mm_slli_epi32,
        _mm256_set_m128, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps,
        _mm256_unpacklo_ps,
    };

    use super::Wide;

    /// Number of rows and of columns of a square.
    pub(super) const SIDE: usize = 8;

    /// Loads four elements and widens them.
    ///
    /// # Safety
    /// The elements must be readable.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn four<T: Wide>(from: *const T) -> __m128 {
        // SAFETY: this function's contract guarantees readable elements. `Wide` is f32, or bf16, which is the upper half of an
        // f32.
        unsafe {
            if size_of::<T>() == size_of::<f32>() {
                _mm_loadu_ps(from.cast())
            } else {
                _mm_castsi128_ps(_mm_slli_epi32::<16>(_mm_cvtepu16_epi32(_mm_loadl_epi64(from.cast()))))
            }
        }
    }

    /// Transposes complete squares, as [`super::transpose`] describes.
    ///
    /// # Safety
    /// The requirements of [`super::transpose`] must be met, and the CPU must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn transpose<T: Wide>(
        to: *mut f32,
        to_stride: usize,
        from: *const T,
        from_stride: usize,
        rows: usize,
        columns: usize,
    ) {
        for c in (0..columns).step_by(SIDE / 2) {
            for r in (0..rows).step_by(SIDE) {
                // The lower halves hold rows r to r + 3, the upper halves the next four rows.
                let mut x: [__m256; 4] = [_mm256_setzero_ps(); 4];
                for i in 0..4 {
                    let low = from.wrapping_add((r + i) * from_stride + c);
                    // SAFETY: guaranteed by this function's contract.
                    x[i] = unsafe { _mm256_set_m128(four(low.wrapping_add(4 * from_stride)), four(low)) };
                }
                let (a, b) = (_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
                let (c0, d) = (_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
                let turned = [
                    _mm256_shuffle_ps::<0b01_00_01_00>(a, c0),
                    _mm256_shuffle_ps::<0b11_10_11_10>(a, c0),
                    _mm256_shuffle_ps::<0b01_00_01_00>(b, d),
                    _mm256_shuffle_ps::<0b11_10_11_10>(b, d),
                ];
                for i in 0..4 {
                    // SAFETY: guaranteed by this function's contract.
                    unsafe { _mm256_storeu_ps(to.wrapping_add((c + i) * to_stride + r), turned[i]) };
                }
            }
        }
    }
}

/// Prefetches the cache line at `ptr`. The pointer need not be valid.
#[inline(always)]
pub(crate) fn prefetch<T>(ptr: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint that does not fault, and SSE is part of the architecture.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(ptr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

/// Prefetches into the second-level cache only; see [`prefetch`].
#[inline(always)]
pub(crate) fn prefetch_far<T>(ptr: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(ptr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

/// Returns `yes` in the lanes where the mask is set, and `no` in the others. pulp's version for floats is not always inlined.
#[inline(always)]
pub(crate) fn select<S: Simd>(simd: S, mask: S::m32s, yes: S::f32s, no: S::f32s) -> S::f32s {
    let (yes, no) = (simd.transmute_u32s_f32s(yes), simd.transmute_u32s_f32s(no));
    simd.transmute_f32s_u32s(simd.select_u32s(mask, yes, no))
}

/// Returns `s = 1 / (1 + e^-x)` and `1 − s` for every lane. Both are computed without cancellation or overflow.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let one = simd.splat_f32s(1.0);
    let e = exp(simd, simd.neg_f32s(simd.abs_f32s(x)));
    let large = simd.div_f32s(one, simd.add_f32s(one, e));
    let small = simd.mul_f32s(e, large);
    let negative = simd.less_than_f32s(x, simd.splat_f32s(0.0));
    (select(simd, negative, small, large), select(simd, negative, large, small))
}

/// Loads the first `width ≤ lanes` elements at `ptr`. The other lanes are zero.
///
/// # Safety
/// `width` elements at `ptr` must be readable.
#[inline(always)]
pub(crate) unsafe fn load_ptr<S: Simd>(simd: S, ptr: *const f32, width: usize) -> S::f32s {
    // SAFETY: this function's contract guarantees that a complete vector or its masked part is readable.
    unsafe {
        if width == S::F32_LANES {
            ptr.cast::<S::f32s>().read_unaligned()
        } else {
            simd.mask_load_ptr_f32s(simd.mask_between_m32s(0, width as u32), ptr)
        }
    }
}

/// Writes the first `width ≤ lanes` lanes to `ptr`.
///
/// # Safety
/// `width` elements at `ptr` must be writable.
#[inline(always)]
pub(crate) unsafe fn store_ptr<S: Simd>(simd: S, ptr: *mut f32, width: usize, value: S::f32s) {
    // SAFETY: this function's contract guarantees that a complete vector or its masked part is writable.
    unsafe {
        if width == S::F32_LANES {
            ptr.cast::<S::f32s>().write_unaligned(value);
        } else {
            simd.mask_store_ptr_f32s(simd.mask_between_m32s(0, width as u32), ptr, value);
        }
    }
}

/// Loads at most one vector of elements from the start of `x`. If `x` is shorter, the other lanes are zero.
#[inline(always)]
pub(crate) fn load<S: Simd>(simd: S, x: &[f32], i: usize) -> S::f32s {
    let x = &x[i..];
    // SAFETY: the function reads at most as many elements as the slice has.
    unsafe { load_ptr(simd, x.as_ptr(), x.len().min(S::F32_LANES)) }
}

/// Writes at most one vector of elements to the start of `x`.
#[inline(always)]
pub(crate) fn store<S: Simd>(simd: S, x: &mut [f32], i: usize, value: S::f32s) {
    let x = &mut x[i..];
    // SAFETY: the function writes at most as many elements as the slice has.
    unsafe { store_ptr(simd, x.as_mut_ptr(), x.len().min(S::F32_LANES), value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    simd_fn! {
        fn exp_all<'a>(simd: S, x: &'a mut [f32]) -> () {
            for i in (0..x.len()).step_by(S::F32_LANES) {
                let y = exp(simd, load(simd, x, i));
                store(simd, x, i, y);
            }
        }
    }

    #[test]
    fn exp_at_the_edges() {
        let mut x = [0.0, -0.0, f32::NEG_INFINITY, -88.0, f32::INFINITY, 89.0, f32::NAN, -1e30, 1e30];
        exp_all(&mut x);
        assert_eq!(x[..6], [1.0, 1.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY]);
        assert!(x[6].is_nan());
        assert_eq!(x[7..], [0.0, f32::INFINITY]);
    }

    simd_fn! {
        fn exp2_all<'a>(simd: S, x: &'a mut [f32]) -> () {
            for i in (0..x.len()).step_by(S::F32_LANES) {
                let y = exp2(simd, load(simd, x, i));
                store(simd, x, i, y);
            }
        }
    }

    fn is_accurate(f: impl Fn(&mut [f32]), exact: impl Fn(f64) -> f64, first: f32, step: f32) {
        let x: Vec<f32> = (0..1_000_003).map(|i| first + i as f32 * step).collect();
        let mut y = x.clone();
        f(&mut y);
        for (x, y) in x.iter().zip(&y) {
            let expected = exact(f64::from(*x));
            assert!((f64::from(*y) / expected - 1.0).abs() < 2e-7, "of {x}: {y}, expected {expected}");
        }
    }

    #[test]
    fn exponentials_are_accurate_to_2e_7() {
        is_accurate(exp_all, f64::exp, -87.3, 1.75e-4);
        is_accurate(exp2_all, f64::exp2, -126.0, 1.27e-4);
    }

    #[test]
    fn exp2_at_the_edges() {
        let mut x = [0.0, -0.0, f32::NEG_INFINITY, -126.5, -1e30, f32::NAN, 1.0, 3.0];
        exp2_all(&mut x);
        assert_eq!(x[..5], [1.0, 1.0, 0.0, 0.0, 0.0]);
        assert!(x[5].is_nan());
        assert_eq!(x[6..], [2.0, 8.0]);
    }
}
