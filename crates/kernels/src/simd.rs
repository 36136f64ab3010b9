//! Run-time choice of the instruction set, and the vector functions shared by the kernels.

pub(crate) use pulp::Simd;

/// Defines a function whose body is compiled once per instruction set; the best one runs.
///
/// The first argument names the SIMD token and its type. Code called from the body must be `#[inline(always)]`, else it
/// is compiled for the baseline CPU; so closures stay out of hot loops.
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
            pulp::Arch::new().dispatch(Op { $($arg),* })
        }
    };
}

/// `e^x` for every lane, relative error below 2e-7.
///
/// Below −87.336 (the smallest normal result) the value is 0, above 88.376 it is infinite; NaN stays NaN.
/// `x = n ln 2 + r`, `|r| ≤ ln 2 / 2`, a polynomial in `r` (coefficients of the Cephes library's `expf`), times `2^n`.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding 1.5·2^23 rounds to an integer and leaves it in the low bits.
    let magic = simd.splat_f32s(12_582_912.0);
    let shifted = simd.mul_add_e_f32s(x, simd.splat_f32s(core::f32::consts::LOG2_E), magic);
    let n = simd.sub_f32s(shifted, magic);
    // ln 2 in two parts, the first exact in few bits so that n times it is exact.
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
    let y = simd.select_f32s(under, simd.splat_f32s(0.0), y);
    simd.select_f32s(over, simd.splat_f32s(f32::INFINITY), y)
}

/// `1 / (1 + e^-x)` for every lane.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let one = simd.splat_f32s(1.0);
    simd.div_f32s(one, simd.add_f32s(one, exp(simd, simd.neg_f32s(x))))
}
