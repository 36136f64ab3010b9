//! A learnt scale per column, on the way into a residual stream.

use crate::parallel::{Shared, ranges};

/// `y [rows, dim] = residual + x · scale`, `scale [dim]`.
pub fn residual_forward(y: &mut [f32], x: &[f32], residual: &[f32], scale: &[f32]) {
    let dim = scale.len().max(1);
    let rows = y.chunks_exact_mut(dim).zip(x.chunks_exact(dim)).zip(residual.chunks_exact(dim));
    for ((y, x), residual) in rows {
        for (((y, x), r), s) in y.iter_mut().zip(x).zip(residual).zip(scale) {
            *y = r + x * s;
        }
    }
}

/// Gradient of [`residual_forward`] for `x`: `dx [rows, dim] = dy · scale`. That of the residual is `dy` itself.
pub fn residual_backward_input(dx: &mut [f32], dy: &[f32], scale: &[f32]) {
    let dim = scale.len().max(1);
    for (dx, dy) in dx.chunks_exact_mut(dim).zip(dy.chunks_exact(dim)) {
        for ((dx, dy), s) in dx.iter_mut().zip(dy).zip(scale) {
            *dx = dy * s;
        }
    }
}

/// Gradient of [`residual_forward`] for the scale: `dscale [dim] += Σ_rows dy · x`, row by row.
pub fn residual_backward_scale(dscale: &mut [f32], dy: &[f32], x: &[f32]) {
    let dim = dscale.len().max(1);
    let dscale = Shared::new(dscale);
    // Threads own columns, so that every sum runs over the rows in order.
    ranges(dim, 16, dy.len(), |cols| {
        // SAFETY: the column ranges are disjoint.
        let sums = unsafe { dscale.part(cols.start, cols.len()) };
        for (dy, x) in dy.chunks_exact(dim).zip(x.chunks_exact(dim)) {
            for ((sum, dy), x) in sums.iter_mut().zip(&dy[cols.clone()]).zip(&x[cols.clone()]) {
                *sum += dy * x;
            }
        }
    });
}
