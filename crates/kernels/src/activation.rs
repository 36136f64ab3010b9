//! Pointwise activations and the gated product of SwiGLU.

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · Φ(x)`, the exact GELU.
    GeluErf,
    /// GELU with `tanh(√(2/π) (x + 0.044715 x³))`.
    GeluTanh,
    /// `x · sigmoid(1.702 x)`.
    QuickGelu,
}

/// `y = act(x)`, elementwise; lengths equal.
pub fn forward(act: Activation, y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = crate::twin::activation(act, f64::from(*x)).0 as f32;
    }
}

/// `dx = dy · act′(x)`, elementwise; `dx` is overwritten.
pub fn backward(act: Activation, dx: &mut [f32], dy: &[f32], x: &[f32]) {
    for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
        *dx = dy * crate::twin::activation(act, f64::from(*x)).1 as f32;
    }
}

/// `y [rows, i] = silu(gate) · up`, `gate_up [rows, 2i]` with the gate first.
pub fn swiglu_forward(y: &mut [f32], gate_up: &[f32], rows: usize, i: usize) {
    for r in 0..rows {
        for j in 0..i {
            let silu = crate::twin::activation(Activation::Silu, f64::from(gate_up[r * 2 * i + j])).0;
            y[r * i + j] = silu as f32 * gate_up[r * 2 * i + i + j];
        }
    }
}

/// Gradient of [`swiglu_forward`]: `dgate_up [rows, 2i]` is overwritten.
pub fn swiglu_backward(dgate_up: &mut [f32], dy: &[f32], gate_up: &[f32], rows: usize, i: usize) {
    for r in 0..rows {
        for j in 0..i {
            let (silu, slope) = crate::twin::activation(Activation::Silu, f64::from(gate_up[r * 2 * i + j]));
            dgate_up[r * 2 * i + j] = dy[r * i + j] * gate_up[r * 2 * i + i + j] * slope as f32;
            dgate_up[r * 2 * i + i + j] = dy[r * i + j] * silu as f32;
        }
    }
}
