//! Linear layers `y = x Wᵀ + b` and their gradients.
//!
//! [`forward`] and the gradients use the `gemm` crate, which packs and blocks for many rows. [`forward_rows`] is the
//! kernel for decoding: each output row has the same bits whatever other rows are in the call.

use std::cell::RefCell;

use gemm::Parallelism;

use crate::Weight;
use crate::microkernel::{self, Dots, WeightPtr};
use crate::parallel::{Shared, ranges};

/// Elements of the per-thread scratch that holds widened rows of a bf16 weight (4 MiB of `f32`).
const WIDE_LEN: usize = 1 << 20;

thread_local! {
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// A strided matrix for [`product`]: element `(i, j)` is `data[i * row + j * col]`.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    data: &'a [f32],
    row: usize,
    col: usize,
}

/// `dst [m, n] = lhs [m, k] · rhs [k, n]`, or `+=` if `accumulate`; `dst` rows are `stride` apart.
///
/// The bits do not depend on the number of threads: the gemm crate splits outputs only.
fn product(
    dst: &mut [f32],
    stride: usize,
    lhs: Matrix,
    rhs: Matrix,
    m: usize,
    k: usize,
    n: usize,
    accumulate: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    let fits = |len: usize, rows: usize, row: usize, cols: usize, col: usize| {
        rows == 0 || cols == 0 || (rows - 1) * row + (cols - 1) * col < len
    };
    assert!(fits(dst.len(), m, stride, n, 1), "dst too short");
    assert!(fits(lhs.data.len(), m, lhs.row, k, lhs.col), "lhs too short");
    assert!(fits(rhs.data.len(), k, rhs.row, n, rhs.col), "rhs too short");
    // SAFETY: the three assertions bound every element that the strides reach; `dst` is exclusively borrowed.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            stride as isize,
            accumulate,
            lhs.data.as_ptr(),
            lhs.col as isize,
            lhs.row as isize,
            rhs.data.as_ptr(),
            rhs.col as isize,
            rhs.row as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}

/// Calls `f(first_row, num_rows, rows as f32)` over the rows of `w [n, k]`: all at once for f32, in bounded widened
/// chunks for bf16. Chunk bounds depend on `k` alone.
fn for_wide_rows(w: Weight, n: usize, k: usize, mut f: impl FnMut(usize, usize, &[f32])) {
    match w {
        Weight::F32(w) => f(0, n, w),
        Weight::Bf16(w) => {
            let step = (WIDE_LEN / k.max(1)).max(1);
            // Taken out of its cell: rayon may run another kernel on this thread while `f` waits.
            let mut wide = WIDE.take();
            for start in (0..n).step_by(step) {
                let rows = step.min(n - start);
                let source = &w[start * k..(start + rows) * k];
                wide.resize(wide.len().max(source.len()), 0.0);
                let target = Shared::new(&mut wide[..source.len()]);
                ranges(source.len(), 64, source.len() / 4, |range| {
                    // SAFETY: the ranges are disjoint.
                    let part = unsafe { target.part(range.start, range.len()) };
                    for (to, from) in part.iter_mut().zip(&source[range]) {
                        *to = from.to_f32();
                    }
                });
                f(start, rows, &wide[..source.len()]);
            }
            WIDE.set(wide);
        }
    }
}

/// `y = x Wᵀ + b` for many rows (prefill, scoring, training).
///
/// `x` is `[m, k]` with rows `x_stride` apart, `w` `[n, k]`, `bias` `[n]`, `y` `[m, n]` with rows `y_stride ≥ n` apart;
/// only columns `0..n` of `y` are written.
pub fn forward(
    y: &mut [f32],
    y_stride: usize,
    x: &[f32],
    x_stride: usize,
    w: Weight,
    bias: Option<&[f32]>,
    m: usize,
    k: usize,
    n: usize,
) {
    debug_assert_eq!(w.len(), n * k);
    if m == 0 || n == 0 {
        return;
    }
    if let Some(bias) = bias {
        fill_bias(y, y_stride, bias, m, n);
    }
    let lhs = Matrix { data: x, row: x_stride, col: 1 };
    for_wide_rows(w, n, k, |start, rows, wide| {
        let rhs = Matrix { data: wide, row: 1, col: k };
        product(&mut y[start..], y_stride, lhs, rhs, m, k, rows, bias.is_some());
    });
}

fn fill_bias(y: &mut [f32], y_stride: usize, bias: &[f32], m: usize, n: usize) {
    for i in 0..m {
        y[i * y_stride..i * y_stride + n].copy_from_slice(&bias[..n]);
    }
}

/// `y = x Wᵀ + b` with batch-invariant bits, for decoding; arguments as in [`forward`].
///
/// Row `i` of `y` depends on row `i` of `x` and on `w` only, bit for bit, for any `m`. Fast for up to about 64 rows.
pub fn forward_rows(
    y: &mut [f32],
    y_stride: usize,
    x: &[f32],
    x_stride: usize,
    w: Weight,
    bias: Option<&[f32]>,
    m: usize,
    k: usize,
    n: usize,
) {
    debug_assert_eq!(w.len(), n * k);
    if m == 0 || n == 0 {
        return;
    }
    assert!(w.len() >= n * k && x.len() >= (m - 1) * x_stride + k && y.len() >= (m - 1) * y_stride + n);
    assert!(y_stride >= n && bias.is_none_or(|bias| bias.len() >= n));
    let reordered;
    let (x, x_stride) = match w {
        Weight::F32(_) => (x, x_stride),
        Weight::Bf16(_) => {
            let lanes = microkernel::lanes();
            let padded = k.next_multiple_of(2 * lanes);
            let mut to = vec![0.0; m * padded];
            for i in 0..m {
                microkernel::deinterleave(
                    &mut to[i * padded..(i + 1) * padded],
                    &x[i * x_stride..i * x_stride + k],
                    lanes,
                );
            }
            reordered = to;
            (&reordered[..], padded)
        }
    };
    let y = Shared::new(y);
    ranges(n, 6, m * n * k / 4, |cols| {
        let w = match w.rows(cols.start, cols.end, k) {
            Weight::F32(w) => WeightPtr::F32(w.as_ptr()),
            Weight::Bf16(w) => WeightPtr::Bf16(w.as_ptr()),
        };
        let dots = Dots {
            y: y.ptr(cols.start),
            y_stride,
            x: x.as_ptr(),
            x_stride,
            w,
            bias: bias.map(|bias| &bias[cols.clone()]),
            m,
            k,
            n: cols.len(),
        };
        // SAFETY: sizes were checked above, rows of reordered `x` are padded, and the column ranges are disjoint.
        unsafe { dots.run() };
    });
}

/// `dx [m, k] = dy [m, n] · W`, or `+=` if `accumulate`. Strides as in [`forward`].
pub fn backward_input(
    dx: &mut [f32],
    dx_stride: usize,
    dy: &[f32],
    dy_stride: usize,
    w: Weight,
    m: usize,
    k: usize,
    n: usize,
    accumulate: bool,
) {
    debug_assert_eq!(w.len(), n * k);
    if n == 0 && !accumulate {
        for i in 0..m {
            dx[i * dx_stride..i * dx_stride + k].fill(0.0);
        }
    }
    if m == 0 || n == 0 {
        return;
    }
    for_wide_rows(w, n, k, |start, rows, wide| {
        let lhs = Matrix { data: &dy[start..], row: dy_stride, col: 1 };
        let rhs = Matrix { data: wide, row: k, col: 1 };
        product(dx, dx_stride, lhs, rhs, m, rows, k, accumulate || start > 0);
    });
}

/// `dw [n, k] += dyᵀ · x`, with `dy` `[m, n]` and `x` `[m, k]`.
pub fn backward_weight(
    dw: &mut [f32],
    dy: &[f32],
    dy_stride: usize,
    x: &[f32],
    x_stride: usize,
    m: usize,
    k: usize,
    n: usize,
) {
    if m == 0 {
        return;
    }
    let lhs = Matrix { data: dy, row: 1, col: dy_stride };
    let rhs = Matrix { data: x, row: x_stride, col: 1 };
    product(dw, k, lhs, rhs, n, m, k, true);
}

/// `db [n] +=` the column sums of `dy [m, n]`, added in row order.
pub fn backward_bias(db: &mut [f32], dy: &[f32], dy_stride: usize, m: usize, n: usize) {
    let db = Shared::new(db);
    ranges(n, 64, m * n, |cols| {
        // SAFETY: the column ranges are disjoint.
        let db = unsafe { db.part(cols.start, cols.len()) };
        for i in 0..m {
            for (b, g) in db.iter_mut().zip(&dy[i * dy_stride..][cols.clone()]) {
                *b += g;
            }
        }
    });
}
