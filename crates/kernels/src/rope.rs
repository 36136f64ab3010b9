//! Rotary position embedding in the `rotate_half` convention of the Hugging Face models.

use crate::parallel::{Shared, ranges};
use crate::profile::{Op, span};

simd_fn! {
    fn rotate<'a>(simd: S, head: &'a mut [f32], cos: &'a [f32], sin: &'a [f32], sign: f32) -> () {
        let half = cos.len();
        let (a, b) = head.split_at_mut(half);
        let sign = simd.splat_f32s(sign);
        let mut i = 0;
        while i < half {
            let end = half.min(i + S::F32_LANES);
            let c = simd.partial_load_f32s(&cos[i..end]);
            let s = simd.mul_f32s(sign, simd.partial_load_f32s(&sin[i..end]));
            let x = simd.partial_load_f32s(&a[i..end]);
            let y = simd.partial_load_f32s(&b[i..end]);
            let xr = simd.sub_f32s(simd.mul_f32s(x, c), simd.mul_f32s(y, s));
            let yr = simd.add_f32s(simd.mul_f32s(y, c), simd.mul_f32s(x, s));
            simd.partial_store_f32s(&mut a[i..end], xr);
            simd.partial_store_f32s(&mut b[i..end], yr);
            i = end;
        }
    }
}

/// Rotates `heads` consecutive heads of every row in place, starting at column `col`.
///
/// With `a = x[i]`, `b = x[i + D/2]`: `(a, b) → (a cos − b sin, b cos + a sin)`. `inverse` applies the transpose, which
/// is the gradient. `x` holds `rows` rows at `stride`; `cos` and `sin` are `[rows, head_dim / 2]`; `head_dim` is even.
pub fn apply(
    x: &mut [f32],
    stride: usize,
    col: usize,
    heads: usize,
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
    rows: usize,
    inverse: bool,
) {
    let _span = span(Op::Rope, || (3 * rows * heads * head_dim, 8 * rows * heads * head_dim));
    debug_assert!(head_dim.is_multiple_of(2) && col + heads * head_dim <= stride);
    let half = head_dim / 2;
    let sign = if inverse { -1.0 } else { 1.0 };
    let x = Shared::new(x);
    ranges(rows, 1, rows * heads * head_dim, |range| {
        for r in range {
            for head in 0..heads {
                // SAFETY: heads of different rows are disjoint and each is visited once.
                let head = unsafe { x.part(r * stride + col + head * head_dim, head_dim) };
                rotate(head, &cos[r * half..(r + 1) * half], &sin[r * half..(r + 1) * half], sign);
            }
        }
    });
}
