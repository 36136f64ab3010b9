//! Gradients of linear layers with respect to their input, weights and biases.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Layer, any_quantised, dims_of, each_wide, outputs, work};
use crate::gemm::{self, Left, Multiply, Pack, PackLeft};
use crate::mat::{Mat, MatMut, check};
use crate::parallel::{Shared, Strips, part, ranges, tasks};
use crate::paths::Path;
use crate::profile::{self, Op, span};
use crate::tiles::{self, Right};
use crate::workspace::{GROUPS, PANELS, reserve};
use crate::{Stored, buffer};

/// Maximum number of elements of gradients that are packed at a time (8 MiB).
const PACKED_LEN: usize = 2 << 20;

/// The weight gradient of one layer in a call.
#[derive(Debug)]
pub struct Gradient<'a> {
    /// Gradient `[n, k]`, to which the result is added.
    pub dw: MatMut<'a>,
    /// Index of the layer's first column in a row of `dy`.
    pub col: usize,
    /// Rounding of the product ([`Weight::rounding`](crate::Weight::rounding) of the weight).
    pub rounding: Option<Path>,
}

/// Returns the gradient of [`forward`](super::forward) with respect to `x`: `dy · W`, `[m, k]`, summed over the layers. The
/// columns of the layers are side by side in `dy [m, Σ n]`.
#[must_use]
pub fn backward_input(dy: Mat, layers: &[Layer]) -> Vec<f32> {
    let k = layers.first().map_or(0, |layer| layer.w.dims().1);
    // SAFETY: the tasks cover all columns and rows, and the first block of the first layer overwrites the output. Without layers,
    // everything is zeroed.
    unsafe { buffer::matrix(dy.rows, k, |dx| write_backward(dy, layers, false, dx)) }
}

/// Writes the result of [`backward_input`] to `dx [m, k]`. Replaces `dx`, or adds to it if `accumulate`.
pub fn backward_input_into(dy: Mat, layers: &[Layer], accumulate: bool, dx: MatMut) {
    write_backward(dy, layers, accumulate, dx);
}

/// Writes every element of the gradient. Reads the previous gradient only if `accumulate`.
fn write_backward(dy: Mat, layers: &[Layer], accumulate: bool, mut dx: MatMut) {
    let ((m, k), n) = (dx.dims(), dy.cols);
    let _span = span(Op::LinearInput, || profile::products(m, layers));
    let fits = dy.dims() == (m, outputs(layers)) && layers.iter().all(|layer| layer.w.dims().1 == k);
    check!("linear, gradient of the input", fits, dy.dims(), dx.dims(), dims_of(layers));
    if m == 0 || n == 0 {
        for i in 0..if accumulate { 0 } else { m } {
            dx.data.clear(i * dx.stride, k);
        }
        return;
    }
    if any_quantised(layers) {
        let mut old = accumulate;
        each_wide(layers, |col, layer| {
            write_backward(dy.columns(col..col + layer.n()), &[layer], old, dx.again());
            old = true;
        });
        return;
    }
    let (mut col, mut old, mut rest) = (0, accumulate, Vec::new());
    for layer in layers.iter().filter(|layer| layer.n() > 0) {
        let (from, n) = (layer.w.stored(), layer.n());
        let left = tiles::Left { from: &dy.data[col..], outer: dy.stride, inner: 1, rows: m, c: dx.data };
        let right = Right { from, outer: 1, inner: k, columns: k, at: 0, bias: None };
        // SAFETY: the check above ensures that rows and columns are in bounds.
        if unsafe { tiles::multiply(&[left], &[right], n, dx.stride, old, layer.w.rounding()) } {
            old = true;
        } else {
            rest.push((col, layer));
        }
        col += n;
    }
    if rest.is_empty() {
        return;
    }
    let accumulate = old;
    let widths = [k];
    let strips = Strips::new(&widths, m, gemm::tile_shape().1);
    tasks(strips.len(), work(m, k, n), |i| {
        let (_, columns, row_part) = strips.get(i);
        let rows = part(m, strips.row_parts, row_part);
        let (c, ldc) = (dx.data.ptr(rows.start * dx.stride + columns.start), dx.stride);
        let (m, n) = (rows.len(), columns.len());
        let mut scratch = PANELS.take();
        let mut old = accumulate;
        for &(col, layer) in &rest {
            for block in gemm::blocks(layer.n(), gemm::STEP, gemm::DEPTH) {
                let depth = block.len();
                let from = layer.w.stored().from(block.start * k + columns.start);
                let panels = Pack { from, inner: k, column: 1, depth, width: n }.run(&mut scratch);
                let data = dy.data.as_ptr().wrapping_add(rows.start * dy.stride + col + block.start);
                let left = Left::Rows { data, stride: dy.stride };
                // SAFETY: the check above ensures that rows and columns are in bounds; tasks write disjoint columns or rows.
                unsafe { Multiply { c, ldc, left, panels, m, depth, n, old, bias: None }.run() };
                old = true;
            }
        }
        PANELS.set(scratch);
    });
}

/// Adds the gradients of [`forward`](super::forward) with respect to the weights of several layers with the same input `x [m,
/// k]`: `dw [n, k] += dyᵀ · x`. It is one function, because the tasks that pack and those that multiply share the places of the
/// packed columns.
pub fn backward_weight(dy: Mat, x: Mat, gradients: &mut [Gradient]) {
    let (m, k) = x.dims();
    let n: usize = gradients.iter().map(|g| g.dw.rows).sum();
    let _span = span(Op::LinearWeight, || (2 * m * k * n, 4 * (2 * n * k + m * (n + k))));
    let of_layer = |g: &Gradient| g.dw.cols == k && g.dw.stride == k && g.col + g.dw.rows <= dy.cols;
    check!(
        "linear, gradient of the weight",
        dy.rows == m && gradients.iter().all(of_layer),
        dy.dims(),
        x.dims(),
        gradients.iter().map(|g| (g.col, g.dw.dims())).collect::<Vec<_>>()
    );
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let right =
        [Right { from: Stored::F32(x.data), outer: 1, inner: x.stride, columns: k, at: 0, bias: None }];
    let mut by_rounding: BTreeMap<Option<Path>, Vec<tiles::Left>> = BTreeMap::new();
    for g in gradients.iter() {
        let (from, rows, c) = (&dy.data[g.col..], g.dw.rows, g.dw.data);
        let left = tiles::Left { from, outer: 1, inner: dy.stride, rows, c };
        by_rounding.entry(g.rounding).or_default().push(left);
    }
    // SAFETY: the check above ensures that rows and columns are in bounds.
    by_rounding.retain(|rounding, lefts| unsafe { !tiles::multiply(lefts, &right, m, k, true, *rounding) });
    let (side, panel) = gemm::tile_shape();
    // For each task: the destination, the first column of dy, the number of groups of a tile's rows, and the number of groups
    // before them.
    let mut before = 0;
    let outputs: Vec<(Shared, usize, usize, usize)> = gradients
        .iter()
        .filter(|g| by_rounding.contains_key(&g.rounding))
        .map(|g| {
            let groups = g.dw.rows.div_ceil(side);
            before += groups;
            (g.dw.data, g.col, g.dw.rows, before - groups)
        })
        .collect();
    let total = before;
    if total == 0 {
        return;
    }
    let blocks: Vec<Range<usize>> = gemm::blocks(m, gemm::STEP, gemm::DEPTH).collect();
    let widths = [k];
    let strips = Strips::new(&widths, total * side, panel);
    let mut groups = GROUPS.take();
    let mut rest = &blocks[..];
    while let Some(first) = rest.first() {
        let fit = (PACKED_LEN / (total * side)).max(1);
        let take = rest.iter().take_while(|block| block.end - first.start <= fit).count().max(1);
        let (now, later) = rest.split_at(take);
        rest = later;
        let depth: usize = now.iter().map(ExactSizeIterator::len).sum();
        let packed = reserve(&mut groups, depth * total * side);
        // Returns the position at which the packed columns of an output begin for a block. Blocks are consecutive, and outputs
        // are consecutive inside each block.
        let place = |block: &Range<usize>, before: usize| {
            (block.start - first.start) * total * side + before * block.len() * side
        };
        let to = Shared::new(packed);
        const CHUNK: usize = 16;
        let chunks = total.div_ceil(CHUNK);
        tasks(chunks * now.len(), depth * n, |i| {
            let block = &now[i / chunks];
            let (start, end) = (i % chunks * CHUNK, (i % chunks * CHUNK + CHUNK).min(total));
            for &(_, col, n, before) in &outputs {
                let groups =
                    start.max(before) - before..end.min(before + n.div_ceil(side)).max(before) - before;
                if groups.is_empty() {
                    continue;
                }
                let columns = groups.start * side..n.min(groups.end * side);
                let to = to.ptr(place(block, before) + groups.start * side * block.len());
                let from = &dy.data[block.start * dy.stride + col + columns.start..];
                // SAFETY: groups of different tasks are disjoint, and `place` separates outputs and blocks.
                unsafe {
                    PackLeft { to, from, inner: dy.stride, depth: block.len(), rows: columns.len() }.run()
                };
            }
        });
        let packed = &*packed;
        tasks(strips.len(), work(depth, k, n), |i| {
            let (_, columns, row_part) = strips.get(i);
            let mut scratch = PANELS.take();
            for block in now {
                let (depth, width) = (block.len(), columns.len());
                let from = Stored::F32(&x.data[block.start * x.stride + columns.start..]);
                let panels = Pack { from, inner: x.stride, column: 1, depth, width }.run(&mut scratch);
                for &(dw, _, n, before) in &outputs {
                    let groups = part(n.div_ceil(side), strips.row_parts, row_part);
                    let rows = groups.start * side..n.min(groups.end * side);
                    if rows.is_empty() {
                        continue;
                    }
                    let left = Left::Packed(packed[place(block, before) + rows.start * depth..].as_ptr());
                    let c = dw.ptr(rows.start * k + columns.start);
                    let m = rows.len();
                    // SAFETY: `packed` and `panels` have these sizes, and tasks write disjoint rows or columns of dw.
                    unsafe {
                        Multiply { c, ldc: k, left, panels, m, depth, n: width, old: true, bias: None }.run()
                    };
                }
            }
            PANELS.set(scratch);
        });
    }
    GROUPS.set(groups);
}

/// Adds the gradient of [`forward`](super::forward) with respect to a bias: `db [n] +=` the column sums of `dy [m, n]`, in row
/// order.
pub fn backward_bias(dy: Mat, db: &mut [f32]) {
    let (m, n) = dy.dims();
    let _span = span(Op::LinearWeight, || (m * n, 4 * m * n));
    check!("linear, gradient of the bias", db.len() == n, dy.dims(), db.len());
    let db = Shared::new(db);
    ranges(n, 64, m * n, |cols| {
        // SAFETY: the column ranges are disjoint.
        let db = unsafe { db.part(cols.start, cols.len()) };
        for i in 0..m {
            for (b, g) in db.iter_mut().zip(&dy.row(i)[cols.clone()]) {
                *b += g;
            }
        }
    });
}
