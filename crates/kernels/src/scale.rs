//! A learned scale per column, applied before the addition to a residual stream.

use crate::buffer;
use crate::mat::{Mat, check};
use crate::parallel::{Shared, ranges};

/// Returns `residual + x · scale`. `x`, `residual` and the result are `[rows, dim]`, `scale` is `[dim]`.
#[must_use]
pub fn residual_forward(x: Mat, residual: Mat, scale: &[f32]) -> Vec<f32> {
    let (rows, dim) = x.dims();
    check!(
        "scaled residual",
        residual.dims() == (rows, dim) && scale.len() == dim,
        x.dims(),
        residual.dims(),
        scale.len()
    );
    buffer::of_rows(rows, dim, rows * dim, |row, y| {
        for (((y, x), r), s) in y.iter_mut().zip(x.row(row)).zip(residual.row(row)).zip(scale) {
            *y = r + x * s;
        }
    })
}

/// Returns the gradient of [`residual_forward`] with respect to `x`: `dy · scale`. The gradient with respect to the residual is
/// `dy` itself.
#[must_use]
pub fn residual_backward_input(dy: Mat, scale: &[f32]) -> Vec<f32> {
    let (rows, dim) = dy.dims();
    check!("scaled residual, backward", scale.len() == dim, dy.dims(), scale.len());
    buffer::of_rows(rows, dim, rows * dim, |row, dx| {
        for ((dx, dy), s) in dx.iter_mut().zip(dy.row(row)).zip(scale) {
            *dx = dy * s;
        }
    })
}

/// Adds the gradient of [`residual_forward`] with respect to the scale: `dscale [dim] += Σ_rows dy · x`, row by row.
pub fn residual_backward_scale(dy: Mat, x: Mat, dscale: &mut [f32]) {
    let (rows, dim) = dy.dims();
    check!(
        "scaled residual, gradient of the scale",
        x.dims() == (rows, dim) && dscale.len() == dim,
        dy.dims(),
        x.dims(),
        dscale.len()
    );
    let dscale = Shared::new(dscale);
    // Each thread computes its own columns, so that every sum runs over the rows in order.
    ranges(dim, 16, rows * dim, |cols| {
        // SAFETY: the column ranges are disjoint.
        let sums = unsafe { dscale.part(cols.start, cols.len()) };
        for row in 0..rows {
            let (dy, x) = (&dy.row(row)[cols.clone()], &x.row(row)[cols.clone()]);
            sums.iter_mut().zip(dy).zip(x).for_each(|((sum, dy), x)| *sum += dy * x);
        }
    });
}
