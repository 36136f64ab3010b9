//! A learnt scale per column, on the way into a residual stream.

use crate::parallel::{Shared, ranges};

/// `y [rows, dim] = residual + x · scale`, `scale [dim]`.
pub fn residual_forward(y: &mut [f32], x: &[f32], residual: &[f32], scale: &[f32]) {
    assert!(x.len() == y.len() && residual.len() == y.len(), "a branch that does not fit its stream");
    let dim = scale.len().max(1);
    let (len, to) = (y.len(), Shared::new(y));
    ranges(len / dim, 1, len, |rows| {
        for at in rows.map(|row| row * dim) {
            // SAFETY: every row is visited once.
            let y = unsafe { to.part(at, dim) };
            for (((y, x), r), s) in y.iter_mut().zip(&x[at..]).zip(&residual[at..]).zip(scale) {
                *y = r + x * s;
            }
        }
    });
}

/// Gradient of [`residual_forward`] for `x`: `dx [rows, dim] = dy · scale`. That of the residual is `dy` itself.
pub fn residual_backward_input(dx: &mut [f32], dy: &[f32], scale: &[f32]) {
    let dim = scale.len().max(1);
    let (len, to) = (dx.len(), Shared::new(dx));
    ranges(len / dim, 1, len, |rows| {
        for at in rows.map(|row| row * dim) {
            // SAFETY: every row is visited once.
            let dx = unsafe { to.part(at, dim) };
            for ((dx, dy), s) in dx.iter_mut().zip(&dy[at..]).zip(scale) {
                *dx = dy * s;
            }
        }
    });
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
