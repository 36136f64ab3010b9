//! RMS norm and layer norm over the last dimension.
//!
//! Rows are independent outputs. Weight gradients are summed row by row. Each thread computes a range of columns.

use crate::buffer;
use crate::mat::{Mat, MatMut, check};
use crate::parallel::{Shared, ranges};
use crate::profile::{Op, span};
use crate::simd::{Simd, load, sigmoid, store};

/// Elementary operations per element, used to decide how many threads share the work.
const COST: usize = 2;

/// Returns `Σ x · y`, summed in an order that depends on the length alone.
#[inline(always)]
fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    // Four accumulators shorten the chain of dependent additions.
    let mut acc = [simd.splat_f32s(0.0); 4];
    for (p, i) in (0..x.len()).step_by(S::F32_LANES).enumerate() {
        acc[p % 4] = simd.mul_add_e_f32s(load(simd, x, i), load(simd, y, i), acc[p % 4]);
    }
    total(simd, acc)
}

/// Returns the sum over all lanes of four accumulators.
#[inline(always)]
fn total<S: Simd>(simd: S, acc: [S::f32s; 4]) -> f32 {
    simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(acc[0], acc[1]), simd.add_f32s(acc[2], acc[3])))
}

simd_fn! {
    fn rms_row<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], weight: &'a [f32], eps: f32) -> f32 {
        let rstd = 1.0 / (dot(simd, x, x) / x.len() as f32 + eps).sqrt();
        let scale = simd.splat_f32s(rstd);
        for i in (0..x.len()).step_by(S::F32_LANES) {
            store(simd, y, i, simd.mul_f32s(simd.mul_f32s(load(simd, x, i), scale), load(simd, weight, i)));
        }
        rstd
    }
}

simd_fn! {
    /// Computes `dx += rstd · (dy w − x̂ · mean(dy w x̂))` for one row.
    fn rms_gradient_row<'a>(simd: S, dx: &'a mut [f32], dy: &'a [f32], x: &'a [f32], weight: &'a [f32],
                            rstd: f32) -> () {
        let mut along = [simd.splat_f32s(0.0); 4];
        for (p, i) in (0..x.len()).step_by(S::F32_LANES).enumerate() {
            let g = simd.mul_f32s(load(simd, dy, i), load(simd, weight, i));
            along[p % 4] = simd.mul_add_e_f32s(g, load(simd, x, i), along[p % 4]);
        }
        let pull = -total(simd, along) * rstd * rstd * rstd / x.len() as f32;
        let (scale, pull) = (simd.splat_f32s(rstd), simd.splat_f32s(pull));
        for i in (0..x.len()).step_by(S::F32_LANES) {
            let g = simd.mul_f32s(simd.mul_f32s(load(simd, dy, i), load(simd, weight, i)), scale);
            let g = simd.mul_add_e_f32s(load(simd, x, i), pull, g);
            store(simd, dx, i, simd.add_f32s(load(simd, dx, i), g));
        }
    }
}

simd_fn! {
    fn layer_row<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], weight: &'a [f32], bias: &'a [f32],
                     eps: f32) -> (f32, f32) {
        let mut acc = [simd.splat_f32s(0.0); 4];
        for (p, i) in (0..x.len()).step_by(S::F32_LANES).enumerate() {
            acc[p % 4] = simd.add_f32s(acc[p % 4], load(simd, x, i));
        }
        let mean = total(simd, acc) / x.len() as f32;
        let minus = simd.splat_f32s(-mean);
        for i in (0..x.len()).step_by(S::F32_LANES) {
            store(simd, y, i, simd.add_f32s(load(simd, x, i), minus));
        }
        let rstd = 1.0 / (dot(simd, y, y) / x.len() as f32 + eps).sqrt();
        let scale = simd.splat_f32s(rstd);
        for i in (0..x.len()).step_by(S::F32_LANES) {
            let hat = simd.mul_f32s(load(simd, y, i), scale);
            store(simd, y, i, simd.mul_add_e_f32s(hat, load(simd, weight, i), load(simd, bias, i)));
        }
        (mean, rstd)
    }
}

simd_fn! {
    /// Computes `dx += rstd · (dy w − mean(dy w) − x̂ · mean(dy w x̂))` for one row.
    fn layer_gradient_row<'a>(simd: S, dx: &'a mut [f32], dy: &'a [f32], x: &'a [f32], weight: &'a [f32],
                              mean: f32, rstd: f32) -> () {
        let n = x.len() as f32;
        let [mut sum, mut along] = [[simd.splat_f32s(0.0); 4]; 2];
        let minus = simd.splat_f32s(-mean);
        for (p, i) in (0..x.len()).step_by(S::F32_LANES).enumerate() {
            let g = simd.mul_f32s(load(simd, dy, i), load(simd, weight, i));
            sum[p % 4] = simd.add_f32s(sum[p % 4], g);
            along[p % 4] = simd.mul_add_e_f32s(g, simd.add_f32s(load(simd, x, i), minus), along[p % 4]);
        }
        let shift = simd.splat_f32s(-total(simd, sum) / n * rstd);
        let pull = simd.splat_f32s(-total(simd, along) / n * rstd * rstd * rstd);
        let scale = simd.splat_f32s(rstd);
        for i in (0..x.len()).step_by(S::F32_LANES) {
            let centred = simd.add_f32s(load(simd, x, i), minus);
            let g = simd.mul_f32s(load(simd, dy, i), load(simd, weight, i));
            let g = simd.mul_add_e_f32s(centred, pull, simd.mul_add_e_f32s(g, scale, shift));
            store(simd, dx, i, simd.add_f32s(load(simd, dx, i), g));
        }
    }
}

/// Operands of a weight gradient: the incoming gradient, the input, and the statistics of each row.
#[derive(Clone, Copy)]
struct Rows<'a> {
    dy: Mat<'a>,
    x: Mat<'a>,
    mean: Option<&'a [f32]>,
    rstd: &'a [f32],
}

simd_fn! {
    /// Computes `dw += Σ_rows dy · (x − mean) · rstd` and `db += Σ_rows dy` for the columns that start at `first`. Rows are added
    /// in order.
    fn add_columns<'a>(simd: S, dw: &'a mut [f32], db: Option<&'a mut [f32]>, rows: Rows<'a>, first: usize) -> () {
        const VECS: usize = 4;
        let width = dw.len();
        let mut db = db;
        for start in (0..width).step_by(VECS * S::F32_LANES) {
            let end = width.min(start + VECS * S::F32_LANES);
            let count = (end - start).div_ceil(S::F32_LANES);
            let [mut weight, mut bias] = [[simd.splat_f32s(0.0); VECS]; 2];
            for v in 0..count {
                weight[v] = load(simd, &dw[..end], start + v * S::F32_LANES);
                if let Some(db) = &db {
                    bias[v] = load(simd, &db[..end], start + v * S::F32_LANES);
                }
            }
            for (r, &rstd) in rows.rstd.iter().enumerate() {
                let (dy, x) = (rows.dy.part(r, first, end), rows.x.part(r, first, end));
                let minus = simd.splat_f32s(-rows.mean.map_or(0.0, |mean| mean[r]));
                let scale = simd.splat_f32s(rstd);
                for v in 0..count {
                    let g = load(simd, dy, start + v * S::F32_LANES);
                    let hat = simd.mul_f32s(simd.add_f32s(load(simd, x, start + v * S::F32_LANES), minus), scale);
                    weight[v] = simd.mul_add_e_f32s(g, hat, weight[v]);
                    bias[v] = simd.add_f32s(bias[v], g);
                }
            }
            for v in 0..count {
                store(simd, &mut dw[..end], start + v * S::F32_LANES, weight[v]);
                if let Some(db) = &mut db {
                    store(simd, &mut db[..end], start + v * S::F32_LANES, bias[v]);
                }
            }
        }
    }
}

/// Computes `dw [dim] += Σ_rows dy · (x − mean) · rstd` and `db [dim] += Σ_rows dy`. Each thread computes its own columns.
fn weight_gradient(rows: Rows, dw: &mut [f32], db: Option<&mut [f32]>) {
    let (count, dim) = rows.x.dims();
    let (dw, db) = (Shared::new(dw), db.map(Shared::new));
    ranges(dim, 64, count * dim * COST, |cols| {
        // SAFETY: the column ranges are disjoint.
        let (dw, db) =
            unsafe { (dw.part(cols.start, cols.len()), db.map(|db| db.part(cols.start, cols.len()))) };
        add_columns(dw, db, rows, cols.start);
    });
}

/// Returns `x · rstd · weight` with `rstd = 1 / sqrt(mean(x²) + eps)`, and `rstd` as statistics `[1, rows]`. `x` and the result
/// are `[rows, dim]`.
#[must_use]
pub fn rms_forward(x: Mat, weight: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>) {
    let (rows, dim) = x.dims();
    let _span = span(Op::Norm, || (4 * rows * dim, 8 * rows * dim));
    check!("rms norm", weight.len() == dim, x.dims(), weight.len());
    let mut stats = vec![0.0; rows];
    let rstd = Shared::new(&mut stats);
    let y = buffer::of_rows(rows, dim, rows * dim * COST, |r, y| {
        // SAFETY: each row is visited exactly once.
        let rstd = unsafe { rstd.part(r, 1) };
        rstd[0] = rms_row(y, x.row(r), weight, eps);
    });
    (y, stats)
}

/// Adds the gradients of [`rms_forward`] to `dx [rows, dim]` and `dw [dim]`.
pub fn rms_backward(dy: Mat, x: Mat, weight: &[f32], stats: &[f32], dx: MatMut, dw: Option<&mut [f32]>) {
    let (rows, dim) = x.dims();
    let _span = span(Op::Norm, || (8 * rows * dim, 16 * rows * dim));
    let of_weight = weight.len() == dim && dw.as_ref().is_none_or(|dw| dw.len() == dim);
    let of_rows = dy.dims() == (rows, dim) && dx.dims() == (rows, dim) && stats.len() == rows;
    check!(
        "rms norm, backward",
        of_weight && of_rows,
        dy.dims(),
        x.dims(),
        dx.dims(),
        weight.len(),
        stats.len(),
        dw.as_ref().map(|dw| dw.len())
    );
    ranges(rows, 1, rows * dim * COST, |range| {
        for r in range {
            // SAFETY: each row is visited exactly once.
            let dx = unsafe { dx.row(r) };
            rms_gradient_row(dx, dy.row(r), x.row(r), weight, stats[r]);
        }
    });
    if let Some(dw) = dw {
        weight_gradient(Rows { dy, x, mean: None, rstd: stats }, dw, None);
    }
}

/// Returns `(x − mean) · rstd · weight + bias`, where the variance is the biased one, and the statistics `[2, rows]`: `mean` and
/// `rstd`. `x` and the result are `[rows, dim]`.
#[must_use]
pub fn layer_forward(x: Mat, weight: &[f32], bias: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>) {
    let (rows, dim) = x.dims();
    let _span = span(Op::Norm, || (6 * rows * dim, 8 * rows * dim));
    check!("layer norm", weight.len() == dim && bias.len() == dim, x.dims(), weight.len(), bias.len());
    let mut stats = vec![0.0; 2 * rows];
    let of_row = Shared::new(&mut stats);
    let y = buffer::of_rows(rows, dim, rows * dim * COST, |r, y| {
        // SAFETY: each row is visited exactly once.
        let (mean, rstd) = unsafe { (of_row.part(r, 1), of_row.part(rows + r, 1)) };
        (mean[0], rstd[0]) = layer_row(y, x.row(r), weight, bias, eps);
    });
    (y, stats)
}

/// Adds the gradients of [`layer_forward`] to `dx [rows, dim]`, `dw [dim]` and `db [dim]`.
pub fn layer_backward(
    dy: Mat,
    x: Mat,
    weight: &[f32],
    stats: &[f32],
    dx: MatMut,
    dw: Option<&mut [f32]>,
    db: Option<&mut [f32]>,
) {
    let (rows, dim) = x.dims();
    let _span = span(Op::Norm, || (10 * rows * dim, 16 * rows * dim));
    let of_weight = weight.len() == dim && [&dw, &db].into_iter().flatten().all(|d| d.len() == dim);
    let of_rows = dy.dims() == (rows, dim) && dx.dims() == (rows, dim) && stats.len() == 2 * rows;
    check!(
        "layer norm, backward",
        of_weight && of_rows,
        dy.dims(),
        x.dims(),
        dx.dims(),
        weight.len(),
        stats.len(),
        dw.as_ref().map(|dw| dw.len()),
        db.as_ref().map(|db| db.len())
    );
    let (mean, rstd) = stats.split_at(rows);
    ranges(rows, 1, rows * dim * COST, |range| {
        for r in range {
            // SAFETY: each row is visited exactly once.
            let dx = unsafe { dx.row(r) };
            layer_gradient_row(dx, dy.row(r), x.row(r), weight, mean[r], rstd[r]);
        }
    });
    match (dw, db) {
        (Some(dw), db) => weight_gradient(Rows { dy, x, mean: Some(mean), rstd }, dw, db),
        (None, Some(db)) => crate::linear::backward_bias(dy, db),
        (None, None) => {}
    }
}

simd_fn! {
    /// Computes `y = x · rstd · weight · silu(gate)` for one head, and returns `rstd`.
    fn gated_head<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], gate: &'a [f32], weight: &'a [f32], eps: f32) -> f32 {
        let rstd = 1.0 / (dot(simd, x, x) / x.len() as f32 + eps).sqrt();
        let scale = simd.splat_f32s(rstd);
        for i in (0..x.len()).step_by(S::F32_LANES) {
            let normed = simd.mul_f32s(simd.mul_f32s(load(simd, x, i), scale), load(simd, weight, i));
            let gate = load(simd, gate, i);
            store(simd, y, i, simd.mul_f32s(normed, simd.mul_f32s(gate, sigmoid(simd, gate).0)));
        }
        rstd
    }
}

simd_fn! {
    /// Writes the gradients of the normalised head, before its weight, to `dnormed`, and that of its gate to `dgate`.
    fn gated_head_gradients<'a>(simd: S, dnormed: &'a mut [f32], dgate: &'a mut [f32], dy: &'a [f32], x: &'a [f32],
                                gate: &'a [f32], weight: &'a [f32], rstd: f32) -> () {
        let scale = simd.splat_f32s(rstd);
        for i in (0..x.len()).step_by(S::F32_LANES) {
            let (dy, gate) = (load(simd, dy, i), load(simd, gate, i));
            let normed = simd.mul_f32s(simd.mul_f32s(load(simd, x, i), scale), load(simd, weight, i));
            // silu(z) = z s, and its derivative is s + z s (1 − s).
            let (open, closed) = sigmoid(simd, gate);
            let silu = simd.mul_f32s(gate, open);
            let slope = simd.mul_add_e_f32s(silu, closed, open);
            store(simd, dnormed, i, simd.mul_f32s(dy, silu));
            store(simd, dgate, i, simd.mul_f32s(simd.mul_f32s(dy, normed), slope));
        }
    }
}

/// Views rows of heads of `d` columns as one row per head.
fn heads_of<'a>(op: &'static str, x: Mat<'a>, d: usize) -> Mat<'a> {
    check!("gated norm", x.stride == x.cols && d > 0 && x.cols.is_multiple_of(d), op, x.dims(), d);
    Mat::new(&x.data[..x.rows * x.cols], x.rows * x.cols / d, d)
}

/// Returns `x · rstd · weight · silu(gate)` with `rstd = 1 / sqrt(mean(x²) + eps)` for each head of `weight.len()` columns, and
/// `rstd` as statistics `[rows, heads]`. `x`, `gate` and the result are `[rows, heads · d]`.
#[must_use]
pub fn gated_forward(x: Mat, gate: Mat, weight: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>) {
    let d = weight.len();
    let _span = span(Op::Norm, || (8 * x.rows * x.cols, 12 * x.rows * x.cols));
    check!("gated norm", gate.dims() == x.dims(), x.dims(), gate.dims());
    let (x, gate) = (heads_of("forward", x, d), heads_of("forward", gate, d));
    let mut stats = vec![0.0; x.rows];
    let rstd = Shared::new(&mut stats);
    let y = buffer::of_rows(x.rows, d, x.rows * d * GATED_COST, |r, y| {
        // SAFETY: each head is visited exactly once.
        let rstd = unsafe { rstd.part(r, 1) };
        rstd[0] = gated_head(y, x.row(r), gate.row(r), weight, eps);
    });
    (y, stats)
}

/// Elementary operations per element of a gated norm.
const GATED_COST: usize = 8;

/// Returns the gradients of [`gated_forward`] with respect to `x` and `gate`, and adds that of the weight to `dw`.
#[must_use]
pub fn gated_backward(
    dy: Mat,
    x: Mat,
    gate: Mat,
    weight: &[f32],
    stats: &[f32],
    dw: Option<&mut [f32]>,
) -> (Vec<f32>, Vec<f32>) {
    let d = weight.len();
    let _span = span(Op::Norm, || (16 * x.rows * x.cols, 20 * x.rows * x.cols));
    let fits = gate.dims() == x.dims() && dy.dims() == x.dims() && stats.len() * d == x.rows * x.cols;
    check!("gated norm, backward", fits, dy.dims(), x.dims(), gate.dims(), d, stats.len());
    let [dy, x, gate] = [dy, x, gate].map(|rows| heads_of("backward", rows, d));
    let mut dgate = buffer::zeros(x.rows * d);
    let of_gate = MatMut::new(&mut dgate, x.rows, d);
    let dnormed = buffer::of_rows(x.rows, d, x.rows * d * GATED_COST, |r, dnormed| {
        // SAFETY: each head is visited exactly once.
        let dgate = unsafe { of_gate.row(r) };
        gated_head_gradients(dnormed, dgate, dy.row(r), x.row(r), gate.row(r), weight, stats[r]);
    });
    let mut dx = buffer::zeros(x.rows * d);
    rms_backward(Mat::new(&dnormed, x.rows, d), x, weight, stats, MatMut::new(&mut dx, x.rows, d), dw);
    (dx, dgate)
}
