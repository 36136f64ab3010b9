//! Pointwise activations and the gated product of SwiGLU.

use crate::buffer;
use crate::mat::{Mat, MatMut, check};
use crate::parallel::{Shared, ranges};
use crate::profile::{Op, span};
use crate::simd::{Simd, exp, load, select, sigmoid, store};

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · Φ(x)`, the exact GELU. Φ is computed with an error of at most 1e-7.
    GeluErf,
    /// GELU with `tanh(√(2/π) (x + 0.044715 x³))`.
    GeluTanh,
    /// `x · sigmoid(1.702 x)`.
    QuickGelu,
    /// The hyperbolic tangent.
    Tanh,
}

/// The constant `2 √(2/π)` in `(1 + tanh u) / 2 = sigmoid(2u)`.
const TANH_SCALE: f32 = 1.595_769_2;
const TANH_CUBE: f32 = 0.044_715;
const QUICK_SCALE: f32 = 1.702;

/// Returns Φ(x) and its density.
///
/// Φ(−|x|) = e^(−x²/2) · t · R(t) / 2 with `t = 1 / (1 + |x| / (2√2))`. R is a Chebyshev fit of degree 8 to `erfcx` on
/// t ∈ [0.25, 1] with a relative error of 4e-8.
#[inline(always)]
fn normal<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let [one, half, zero] = [1.0, 0.5, 0.0].map(|c| simd.splat_f32s(c));
    let size = simd.abs_f32s(x);
    let t = simd.div_f32s(one, simd.mul_add_e_f32s(size, simd.splat_f32s(0.353_553_4), one));
    let bell = exp(simd, simd.mul_f32s(simd.mul_f32s(x, x), simd.splat_f32s(-0.5)));
    let mut r = simd.splat_f32s(-0.051_750_503);
    for c in [
        0.247_979_6,
        -0.409_184_96,
        0.185_654_7,
        0.039_756_35,
        0.173_140_85,
        0.251_045_35,
        0.281_198_7,
        0.282_159_9,
    ] {
        r = simd.mul_add_e_f32s(r, t, simd.splat_f32s(c));
    }
    let tail = simd.mul_f32s(simd.mul_f32s(bell, simd.mul_f32s(t, half)), r);
    let phi = select(simd, simd.less_than_f32s(x, zero), tail, simd.sub_f32s(one, tail));
    (phi, simd.mul_f32s(bell, simd.splat_f32s(0.398_942_3)))
}

/// Returns `act(x)` and `act′(x)`. The compiler removes the computation of a result that the caller ignores.
#[inline(always)]
fn value_and_slope<S: Simd>(simd: S, act: Activation, x: S::f32s) -> (S::f32s, S::f32s) {
    let one = simd.splat_f32s(1.0);
    let (u, du) = match act {
        Activation::GeluErf => {
            let (phi, density) = normal(simd, x);
            return (simd.mul_f32s(x, phi), simd.mul_add_e_f32s(x, density, phi));
        }
        Activation::Tanh => {
            let (s, rest) = sigmoid(simd, simd.add_f32s(x, x));
            let slope = simd.mul_f32s(simd.splat_f32s(4.0), simd.mul_f32s(s, rest));
            return (simd.sub_f32s(s, rest), slope);
        }
        Activation::Silu => (x, one),
        Activation::QuickGelu => {
            let scale = simd.splat_f32s(QUICK_SCALE);
            (simd.mul_f32s(x, scale), scale)
        }
        Activation::GeluTanh => {
            let [scale, cube, slope] = [TANH_SCALE, TANH_SCALE * TANH_CUBE, 3.0 * TANH_SCALE * TANH_CUBE]
                .map(|c| simd.splat_f32s(c));
            let square = simd.mul_f32s(x, x);
            let u = simd.mul_f32s(x, simd.mul_add_e_f32s(square, cube, scale));
            (u, simd.mul_add_e_f32s(square, slope, scale))
        }
    };
    let (s, rest) = sigmoid(simd, u);
    let y = simd.mul_f32s(x, s);
    // s + x s (1 − s) u′
    (y, simd.mul_add_e_f32s(simd.mul_f32s(y, rest), du, s))
}

simd_fn! {
    fn forward_part<'a>(simd: S, act: Activation, y: &'a mut [f32], x: &'a [f32]) -> () {
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let value = value_and_slope(simd, act, load(simd, x, i)).0;
            store(simd, y, i, value);
        }
    }
}

simd_fn! {
    fn backward_part<'a>(simd: S, act: Activation, x: &'a mut [f32], dy: &'a [f32]) -> () {
        for i in (0..x.len()).step_by(S::F32_LANES) {
            let slope = value_and_slope(simd, act, load(simd, x, i)).1;
            store(simd, x, i, simd.mul_f32s(load(simd, dy, i), slope));
        }
    }
}

simd_fn! {
    fn swiglu_row<'a>(simd: S, y: &'a mut [f32], gate: &'a [f32], up: &'a [f32]) -> () {
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let silu = value_and_slope(simd, Activation::Silu, load(simd, gate, i)).0;
            store(simd, y, i, simd.mul_f32s(silu, load(simd, up, i)));
        }
    }
}

simd_fn! {
    fn swiglu_gradient_row<'a>(simd: S, gate: &'a mut [f32], up: &'a mut [f32], dy: &'a [f32]) -> () {
        for i in (0..dy.len()).step_by(S::F32_LANES) {
            let (silu, slope) = value_and_slope(simd, Activation::Silu, load(simd, gate, i));
            let dy = load(simd, dy, i);
            store(simd, gate, i, simd.mul_f32s(simd.mul_f32s(dy, load(simd, up, i)), slope));
            store(simd, up, i, simd.mul_f32s(dy, silu));
        }
    }
}

simd_fn! {
    fn swiglu_both_row<'a>(simd: S, y: &'a mut [f32], gate: &'a mut [f32], up: &'a mut [f32], dy: &'a [f32]) -> () {
        for i in (0..dy.len()).step_by(S::F32_LANES) {
            let (silu, slope) = value_and_slope(simd, Activation::Silu, load(simd, gate, i));
            let (dy, up_values) = (load(simd, dy, i), load(simd, up, i));
            store(simd, y, i, simd.mul_f32s(silu, up_values));
            store(simd, gate, i, simd.mul_f32s(simd.mul_f32s(dy, up_values), slope));
            store(simd, up, i, simd.mul_f32s(dy, silu));
        }
    }
}

/// Elementary operations per element of an activation, used to decide how many threads share the work.
const COST: usize = 8;

/// Elements that a thread processes before it takes the next piece.
const PIECE: usize = 4096;

/// Returns `act(x)` for every element of `x`.
#[must_use]
pub fn forward(x: &[f32], act: Activation) -> Vec<f32> {
    let n = x.len();
    let _span = span(Op::Activation, || (n * COST, 8 * n));
    let fill = |y: Shared| {
        ranges(n.div_ceil(PIECE), 1, n * COST, |range| {
            for start in range.map(|piece| piece * PIECE) {
                let len = PIECE.min(n - start);
                y.clear(start, len);
                // SAFETY: the pieces are disjoint, and this piece was just zeroed.
                forward_part(act, unsafe { y.part(start, len) }, &x[start..start + len]);
            }
        });
    };
    // SAFETY: together, the pieces cover the whole buffer.
    unsafe { buffer::written(n, fill) }
}

/// Replaces each element of `x`, the input of [`forward`], with its gradient `dy · act′(x)`.
pub fn backward(dy: &[f32], act: Activation, x: &mut [f32]) {
    let n = x.len();
    let _span = span(Op::Activation, || (n * COST, 12 * n));
    check!("activation, backward", dy.len() == n, dy.len(), n);
    let x = Shared::new(x);
    ranges(n, 64, n * COST, |range| {
        // SAFETY: the ranges are disjoint.
        let part = unsafe { x.part(range.start, range.len()) };
        backward_part(act, part, &dy[range]);
    });
}

/// Returns `silu(gate) · up [rows, i]` for `gate_up [rows, 2i]`, with the gate in the first `i` columns.
#[must_use]
pub fn swiglu_forward(gate_up: Mat) -> Vec<f32> {
    let (rows, i) = (gate_up.rows, gate_up.cols / 2);
    let _span = span(Op::Activation, || (rows * i * COST, 12 * rows * i));
    check!("swiglu", gate_up.cols == 2 * i, gate_up.dims());
    buffer::of_rows(rows, i, rows * i * COST, |r, y| {
        let (gate, up) = gate_up.row(r).split_at(i);
        swiglu_row(y, gate, up);
    })
}

/// Replaces `gate_up [rows, 2i]`, the input of [`swiglu_forward`], with its gradient.
pub fn swiglu_backward(dy: Mat, gate_up: MatMut) {
    let (rows, i) = dy.dims();
    let _span = span(Op::Activation, || (2 * rows * i * COST, 20 * rows * i));
    check!("swiglu, backward", gate_up.dims() == (rows, 2 * i), dy.dims(), gate_up.dims());
    ranges(rows, 1, rows * i * COST, |range| {
        for r in range {
            // SAFETY: each row is visited exactly once.
            let (gate, up) = unsafe { gate_up.row(r) }.split_at_mut(i);
            swiglu_gradient_row(gate, up, dy.row(r));
        }
    });
}

/// Returns [`swiglu_forward`] of `gate_up`, and replaces it as [`swiglu_backward`] does. The bits are theirs.
#[must_use]
pub fn swiglu_both(dy: Mat, gate_up: MatMut) -> Vec<f32> {
    let (rows, i) = dy.dims();
    let _span = span(Op::Activation, || (2 * rows * i * COST, 24 * rows * i));
    check!("swiglu, both", gate_up.dims() == (rows, 2 * i), dy.dims(), gate_up.dims());
    buffer::of_rows(rows, i, rows * i * COST, |r, y| {
        // SAFETY: each row is visited exactly once.
        let (gate, up) = unsafe { gate_up.row(r) }.split_at_mut(i);
        swiglu_both_row(y, gate, up, dy.row(r));
    })
}
