//! Gates of the gated delta rule.

use crate::buffer;
use crate::mat::{Mat, check};

/// Elementary operations per gate, used to decide how many threads share the work.
const COST: usize = 40;

/// Returns `ln(1 + eˣ)` and its derivative.
fn softplus(x: f32) -> (f32, f32) {
    let e = (-x.abs()).exp();
    let slope = if x < 0.0 { e / (1.0 + e) } else { 1.0 / (1.0 + e) };
    (x.max(0.0) + e.ln_1p(), slope)
}

fn sizes(x: Mat, a_log: &[f32], dt_bias: &[f32]) -> usize {
    let heads = a_log.len();
    check!("gates", x.cols == 2 * heads && dt_bias.len() == heads, x.dims(), a_log.len(), dt_bias.len());
    heads
}

/// Returns the log-decays `g = −exp(a_log) · softplus(a + dt_bias)` and the weights `β = sigmoid(b)` of rows `[a | b]`, as rows
/// `[g | β]`, `[rows, 2 · heads]`.
#[must_use]
pub fn gates_forward(x: Mat, a_log: &[f32], dt_bias: &[f32]) -> Vec<f32> {
    let heads = sizes(x, a_log, dt_bias);
    buffer::of_rows(x.rows, x.cols, x.rows * x.cols * COST, |r, y| {
        let ((a, b), (g, beta)) = (x.row(r).split_at(heads), y.split_at_mut(heads));
        for h in 0..heads {
            g[h] = -a_log[h].exp() * softplus(a[h] + dt_bias[h]).0;
            beta[h] = softplus(b[h]).1;
        }
    })
}

/// Returns the gradients of [`gates_forward`] with respect to `x`, `a_log` and `dt_bias`, given its result `y`.
#[must_use]
pub fn gates_backward(
    dy: Mat,
    x: Mat,
    y: Mat,
    a_log: &[f32],
    dt_bias: &[f32],
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let heads = sizes(x, a_log, dt_bias);
    check!("gates, backward", dy.dims() == x.dims() && y.dims() == x.dims(), dy.dims(), x.dims(), y.dims());
    let dx = buffer::of_rows(x.rows, x.cols, x.rows * x.cols * COST, |r, dx| {
        let (a, dy, beta) = (x.row(r), dy.row(r), &y.row(r)[heads..]);
        for h in 0..heads {
            dx[h] = -dy[h] * a_log[h].exp() * softplus(a[h] + dt_bias[h]).1;
            dx[heads + h] = dy[heads + h] * beta[h] * (1.0 - beta[h]);
        }
    });
    let (mut da_log, mut ddt_bias) = (vec![0.0; heads], vec![0.0; heads]);
    for r in 0..x.rows {
        let (dx, dy, g) = (&dx[r * x.cols..], dy.row(r), y.row(r));
        for h in 0..heads {
            ddt_bias[h] += dx[h];
            da_log[h] += dy[h] * g[h];
        }
    }
    (dx, da_log, ddt_bias)
}
