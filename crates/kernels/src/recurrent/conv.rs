//! Causal depthwise convolution over the rows of each sequence, followed by SiLU.
//!
//! A row's window has the row itself and the rows before it in its sequence ([`Segments`]). Rows before the start of the sequence
//! are zeros.

use super::{Continued, Segment, Segments, covers};
use crate::buffer;
use crate::mat::{Mat, MatMut, check};
use crate::parallel::{self, Shared, ranges};
use crate::profile::{Op, span};
use crate::simd::{Simd, load, sigmoid, store};

/// Maximum number of taps. Published models have four.
const MAX_TAPS: usize = 8;

/// Columns to which the parts of threads are aligned.
const ALIGN: usize = 64;

/// Rows of a window, oldest first. Rows before the start of the sequence are absent.
#[derive(Clone, Copy)]
struct Window<'a> {
    rows: [Option<&'a [f32]>; MAX_TAPS],
    len: usize,
}

simd_fn! {
    /// Computes the sums of a window, and SiLU of them. `taps [len, width]` are the weights by tap.
    fn convolve<'a>(simd: S, y: &'a mut [f32], window: Window<'a>, taps: &'a [f32]) -> () {
        let width = y.len();
        for i in (0..width).step_by(S::F32_LANES) {
            let sum = window_sum(simd, window, taps, width, i);
            store(simd, y, i, simd.mul_f32s(sum, sigmoid(simd, sum).0));
        }
    }
}

/// Returns one vector of sums, which starts at column `i`.
#[inline(always)]
fn window_sum<S: Simd>(simd: S, window: Window, taps: &[f32], width: usize, i: usize) -> S::f32s {
    let mut sum = simd.splat_f32s(0.0);
    for tap in 0..window.len {
        if let Some(x) = window.rows[tap] {
            let weight = load(simd, &taps[tap * width..(tap + 1) * width], i);
            sum = simd.mul_add_e_f32s(load(simd, x, i), weight, sum);
        }
    }
    sum
}

simd_fn! {
    /// Replaces `dy` by the gradient of the sums of a window.
    fn through_silu<'a>(simd: S, dy: &'a mut [f32], window: Window<'a>, taps: &'a [f32]) -> () {
        let width = dy.len();
        for i in (0..width).step_by(S::F32_LANES) {
            let sum = window_sum(simd, window, taps, width, i);
            // The derivative is s + x · s · (1 − s), with s = sigmoid(x).
            let (open, closed) = sigmoid(simd, sum);
            let slope = simd.mul_add_e_f32s(simd.mul_f32s(sum, open), closed, open);
            let d = simd.mul_f32s(load(simd, dy, i), slope);
            store(simd, dy, i, d);
        }
    }
}

simd_fn! {
    /// Computes `y += w · x` for every element.
    fn add_product<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], w: &'a [f32]) -> () {
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let sum = simd.mul_add_e_f32s(load(simd, x, i), load(simd, w, i), load(simd, y, i));
            store(simd, y, i, sum);
        }
    }
}

/// Returns the weight `[c, taps]` by tap, `[taps, c]`.
fn by_tap(weight: &[f32], c: usize) -> Vec<f32> {
    let count = weight.len() / c.max(1);
    (0..weight.len()).map(|i| weight[i % c * count + i / c]).collect()
}

/// Returns the number of taps. Panics if the sizes do not fit together.
fn taps_of(x: Mat, weight: &[f32], segments: &Segments) -> usize {
    let count = weight.len() / x.cols.max(1);
    check!(
        "causal convolution",
        weight.len() == count * x.cols && (1..=MAX_TAPS).contains(&count) && segments.rows() == x.rows,
        x.dims(),
        weight.len(),
        segments.rows()
    );
    count
}

/// Returns the input rows of the window of row `row` of a segment, oldest first.
fn sources(segments: &Segments, segment: &Segment, row: usize, count: usize) -> [Option<usize>; MAX_TAPS] {
    let mut rows = [None; MAX_TAPS];
    let own = row - segment.rows.start;
    for (tap, source) in rows.iter_mut().enumerate().take(count) {
        let back = count - 1 - tap;
        *source = match back.checked_sub(own + 1) {
            None => Some(row - back),
            Some(rest) => segments.row_before(segment, rest + 1),
        };
    }
    rows
}

/// Returns the segment of each row.
fn owners(segments: &Segments) -> Vec<u32> {
    let mut owners = Vec::with_capacity(segments.rows());
    for (s, segment) in segments.all().iter().enumerate() {
        owners.resize(segment.rows.end, s as u32);
    }
    owners
}

/// Returns `silu(Σᵢ weight[:, i] · x[row − taps + 1 + i])` for each row, where rows count along its sequence. `x` and the result
/// are `[rows, c]`. `weight [c, taps]` has the layout of published weights, `[c, 1, taps]`.
#[must_use]
pub fn causal_forward(x: Mat, weight: &[f32], segments: &Segments) -> Vec<f32> {
    let (rows, c) = x.dims();
    let count = taps_of(x, weight, segments);
    let _span = span(Op::CausalConv, || (2 * rows * c * count, 8 * rows * c));
    let (taps, owners) = (by_tap(weight, c), owners(segments));
    buffer::of_rows(rows, c, rows * c * count, |row, y| {
        let segment = &segments.all()[owners[row] as usize];
        let rows = sources(segments, segment, row, count).map(|row| row.map(|row| x.row(row)));
        convolve(y, Window { rows, len: count }, &taps);
    })
}

/// Returns the gradient of [`causal_forward`] with respect to `x`, and adds the gradient of the weight to `dweight [c, taps]`.
///
/// Each thread computes its own columns, and goes through the rows in order.
#[must_use]
pub fn causal_backward(
    dy: Mat,
    x: Mat,
    weight: &[f32],
    segments: &Segments,
    dweight: Option<&mut [f32]>,
) -> Vec<f32> {
    let (rows, c) = x.dims();
    let count = taps_of(x, weight, segments);
    check!("causal convolution, backward", dy.dims() == x.dims(), dy.dims(), x.dims());
    let _span = span(Op::CausalConv, || (6 * rows * c * count, 12 * rows * c));
    let owners = owners(segments);
    let (mut dx, mut dtaps) = (buffer::zeros(rows * c), vec![0.0; count * c]);
    let (to, of_taps) = (MatMut::new(&mut dx, rows, c), Shared::new(&mut dtaps));
    let wanted = dweight.is_some();
    ranges(c, ALIGN, 3 * rows * c * count, |cols| {
        let width = cols.len();
        let taps = by_tap(&weight[cols.start * count..cols.end * count], width);
        let mut d = vec![0.0; width];
        for row in 0..rows {
            let segment = &segments.all()[owners[row] as usize];
            let sources = sources(segments, segment, row, count);
            let window = sources.map(|row| row.map(|row| x.part(row, cols.start, width)));
            d.copy_from_slice(dy.part(row, cols.start, width));
            through_silu(&mut d, Window { rows: window, len: count }, &taps);
            for tap in 0..count {
                if let (Some(source), Some(x)) = (sources[tap], window[tap]) {
                    // SAFETY: the column ranges are disjoint.
                    let (dx, dtap) =
                        unsafe { (to.part(source, cols.clone()), of_taps.part(tap * c + cols.start, width)) };
                    add_product(dx, &d, &taps[tap * width..(tap + 1) * width]);
                    if wanted {
                        add_product(dtap, &d, x);
                    }
                }
            }
        }
    });
    if let Some(dweight) = dweight {
        check!("causal convolution, backward", dweight.len() == weight.len(), dweight.len(), weight.len());
        for (i, d) in dweight.iter_mut().enumerate() {
            *d += dtaps[i % count * c + i / count];
        }
    }
    dx
}

/// Computes [`causal_forward`] of rows that continue sequences. The state `[taps − 1, c]` of a sequence has the rows before its
/// next row, oldest first; rows before the start are zeros. The states are moved on. Every row of `x` is in one part, in order.
///
/// The bits of a row are those of [`causal_forward`].
#[must_use]
pub fn causal_steps(x: Mat, weight: &[f32], parts: &mut [Continued]) -> Vec<f32> {
    let (rows, c) = x.dims();
    let count = weight.len() / c.max(1);
    let lengths: Vec<usize> = parts.iter().map(|part| part.state.len()).collect();
    check!(
        "causal convolution, decode",
        weight.len() == count * c
            && (1..=MAX_TAPS).contains(&count)
            && covers(parts, rows)
            && lengths.iter().all(|len| *len == (count - 1) * c),
        x.dims(),
        weight.len(),
        lengths
    );
    let _span = span(Op::CausalConv, || (2 * rows * c * count, 4 * c * (2 * rows + 2 * count * parts.len())));
    let taps = by_tap(weight, c);
    let mut y = buffer::zeros(rows * c);
    let mut rest = &mut y[..];
    let mut work = Vec::with_capacity(parts.len());
    for part in parts {
        let own = rest.split_off_mut(..part.rows.len() * c).unwrap_or_default();
        work.push((part, own));
    }
    parallel::map(work, rows * c * count, |(part, y)| {
        for (row, y) in part.rows.clone().zip(y.chunks_exact_mut(c.max(1))) {
            let mut window = [None; MAX_TAPS];
            for (to, row) in window.iter_mut().zip(part.state.chunks_exact(c.max(1))) {
                *to = Some(row);
            }
            window[count - 1] = Some(x.row(row));
            convolve(y, Window { rows: window, len: count }, &taps);
            if count > 1 {
                part.state.copy_within(c.., 0);
                part.state[(count - 2) * c..].copy_from_slice(x.row(row));
            }
        }
    });
    y
}

/// Writes the rows that the window of the row after a segment reads, oldest first, to `state [taps − 1, c]`. Rows before the
/// start of the sequence are zeros.
pub fn causal_state(x: Mat, segments: &Segments, segment: usize, state: &mut [f32]) {
    let count = state.len() / x.cols.max(1);
    let segment = &segments.all()[segment];
    for (i, to) in state.chunks_exact_mut(x.cols.max(1)).enumerate() {
        let back = count - i;
        let row = match back.checked_sub(segment.rows.len() + 1) {
            None => Some(segment.rows.end - back),
            Some(rest) => segments.row_before(segment, rest + 1),
        };
        match row {
            Some(row) => to.copy_from_slice(x.row(row)),
            None => to.fill(0.0),
        }
    }
}
