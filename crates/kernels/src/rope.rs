//! Rotary position embedding in the `rotate_half` convention of the Hugging Face models.

use crate::mat::{Mat, MatMut, check};
use crate::parallel::ranges;
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

/// Rotates, in place, the heads that are side by side in the rows of `x [rows, heads · head_dim]`.
///
/// `cos` and `sin` are `[rows, half]`. With `a = x[i]` and `b = x[i + half]` of a head, for `i` below `half`: `(a, b) → (a cos − b
/// sin, b cos + a sin)`. The columns of a head from `2 · half` on stay as they are. If `inverse`, the function applies the
/// transpose, which gives the gradient.
pub fn apply(cos: Mat, sin: Mat, inverse: bool, x: MatMut, head_dim: usize) {
    let (rows, half) = cos.dims();
    let _span = span(Op::Rope, || (3 * rows * x.cols, 8 * rows * x.cols));
    check!(
        "rope",
        sin.dims() == (rows, half)
            && x.rows == rows
            && 2 * half <= head_dim
            && x.cols.is_multiple_of(head_dim),
        head_dim,
        x.dims(),
        cos.dims(),
        sin.dims()
    );
    let sign = if inverse { -1.0 } else { 1.0 };
    ranges(rows, 1, rows * x.cols, |range| {
        for r in range {
            let (cos, sin) = (cos.row(r), sin.row(r));
            for head in (0..x.cols).step_by(head_dim.max(1)) {
                // SAFETY: the heads of different rows are disjoint, and each head is visited once.
                rotate(unsafe { x.part(r, head..head + 2 * half) }, cos, sin, sign);
            }
        }
    });
}
