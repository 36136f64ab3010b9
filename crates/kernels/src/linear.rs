//! Linear layers `y = x Wᵀ + b` and their gradients.
//!
//! [`forward`] and the gradients are blocked products for many rows, [`forward_rows`] is the kernel for decoding, limited by
//! the memory that the weights come from. In all of them the bits of an output element depend on its own row of `x`, its
//! row of the weight and the inner size, never on the other rows or columns of the call; weight gradients sum over the
//! rows in order.
//!
//! Sums are `f32`. Where products run on matrix tiles ([`crate::has_tiles`]), those with a bf16 weight round the other
//! factor to bf16 too, and both factors of its gradient; elsewhere bf16 is widened and nothing is rounded.
//!
//! Several layers with the same input (queries, keys and values; gate and up) run as one call.

use std::ops::Range;

use crate::gemm::{self, Left, Multiply, Pack, PackLeft};
use crate::mat::{Mat, MatMut, check};
use crate::microkernel::{self, Dots, WeightPtr};
use crate::parallel::{Shared, Strips, part, ranges, tasks};
use crate::profile::{self, Op, span};
use crate::tiles::{self, Right};
use crate::workspace::{GROUPS, PANELS, WIDE, reserve};
use crate::{Stored, Weight, buffer, quant};

/// Elements of packed gradients that exist at a time (8 MiB).
const PACKED_LEN: usize = 2 << 20;

/// One weight of a call, and its bias.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// `[n, k]`.
    pub w: Weight<'a>,
    /// `[n]`.
    pub bias: Option<&'a [f32]>,
}

impl<'a> Layer<'a> {
    /// A layer without bias.
    #[must_use]
    pub fn new(w: Weight<'a>) -> Self {
        Self { w, bias: None }
    }

    /// Outputs.
    fn n(&self) -> usize {
        self.w.dims().0
    }
}

/// Outputs of all layers, side by side.
fn outputs(layers: &[Layer]) -> usize {
    layers.iter().map(Layer::n).sum()
}

/// One weight gradient of a call.
#[derive(Debug)]
pub struct Gradient<'a> {
    /// `[n, k]`, added to.
    pub dw: MatMut<'a>,
    /// First of the layer's columns in a row of `dy`.
    pub col: usize,
    /// Whether the weight is bf16.
    pub bf16: bool,
}

/// Multiply-adds as elementary operations, for the decision to use threads.
fn work(m: usize, k: usize, n: usize) -> usize {
    m * k * n / 8
}

/// Elements of a piece of a quantised weight that is widened at a time (4 MiB).
const WIDE_LEN: usize = 1 << 20;

/// Calls `f(first column of the layer's output, layer)` for every layer, a quantised one in widened pieces. Their bounds
/// depend on `k` alone.
fn each_wide(layers: &[Layer], mut f: impl FnMut(usize, Layer)) {
    let mut col = 0;
    for &layer in layers {
        let (total, k) = layer.w.dims();
        if let Stored::Quantised(w) = layer.w.stored() {
            let mut scratch = WIDE.take();
            let step = (WIDE_LEN / k.max(1)).max(1);
            for start in (0..total).step_by(step) {
                let n = step.min(total - start);
                let wide = reserve(&mut scratch, n * k);
                w.rows(start, start + n).widen(wide);
                let bias = layer.bias.map(|bias| &bias[start..start + n]);
                f(col + start, Layer { w: Weight::f32(wide, n, k), bias });
            }
            WIDE.set(scratch);
        } else {
            f(col, layer);
        }
        col += total;
    }
}

fn any_quantised(layers: &[Layer]) -> bool {
    layers.iter().any(|layer| matches!(layer.w.stored(), Stored::Quantised(_)))
}

/// `x Wᵀ + b` for many rows (prefill, scoring, training): `x [m, k]`, the outputs of the layers side by side in `[m, Σ n]`.
#[must_use]
pub fn forward(x: Mat, layers: &[Layer]) -> Vec<f32> {
    // SAFETY: columns of all layers and all rows are some task's, whose first block overwrites.
    unsafe { buffer::matrix(x.rows, outputs(layers), |y| write_forward(x, layers, false, y)) }
}

/// [`forward`] into `y [m, Σ n]`, which is replaced, or added to if `accumulate`.
pub fn forward_into(x: Mat, layers: &[Layer], accumulate: bool, y: MatMut) {
    write_forward(x, layers, accumulate, y);
}

/// Whether `x`, layers and `y` fit together.
fn fit(x: Mat, layers: &[Layer], y: &MatMut) -> bool {
    let of_layer = |l: &Layer| l.w.dims().1 == x.cols && l.bias.is_none_or(|b| b.len() == l.n());
    y.dims() == (x.rows, outputs(layers)) && layers.iter().all(of_layer)
}

/// Every element of the output is written, and read before only if `accumulate`.
fn write_forward(x: Mat, layers: &[Layer], accumulate: bool, mut y: MatMut) {
    let ((m, k), n) = (x.dims(), y.cols);
    let _span = span(Op::Linear, || profile::products(m, layers));
    check("linear", fit(x, layers, &y));
    if m == 0 || n == 0 {
        return;
    }
    if any_quantised(layers) {
        each_wide(layers, |col, layer| {
            write_forward(x, &[layer], accumulate, y.again().columns(col..col + layer.n()));
        });
        return;
    }
    let widths: Vec<usize> = layers.iter().map(Layer::n).collect();
    let mut at = 0;
    let rights = layers.iter().map(|layer| {
        let (from, columns, bias) = (layer.w.stored(), layer.n(), layer.bias);
        at += columns;
        Right { from, outer: k, inner: 1, columns, at: at - columns, bias }
    });
    let (narrow, wide): (Vec<Right>, Vec<Right>) =
        rights.partition(|right| matches!(right.from, Stored::Bf16(_)));
    let left = [tiles::Left { from: x.data, outer: x.stride, inner: 1, rows: m, c: y.data }];
    // SAFETY: the check above bounds rows and columns.
    let multiply = |rights: &[Right], rounded| unsafe {
        tiles::multiply(&left, rights, k, y.stride, accumulate, rounded)
    };
    if multiply(&wide, false) && multiply(&narrow, true) {
        return;
    }
    let strips = Strips::new(&widths, m, gemm::tile_shape().1);
    tasks(strips.len(), work(m, k, n), |i| {
        let (at, columns, row_part) = strips.get(i);
        let Layer { w, bias } = layers[at];
        let rows = part(m, strips.row_parts, row_part);
        let offset = widths[..at].iter().sum::<usize>() + columns.start;
        let (c, ldc) = (y.data.ptr(rows.start * y.stride + offset), y.stride);
        let (m, n) = (rows.len(), columns.len());
        let mut scratch = PANELS.take();
        let mut old = accumulate;
        // An empty sum still writes the bias.
        for block in gemm::blocks(k, gemm::STEP, gemm::DEPTH).chain((k == 0).then_some(0..0)) {
            let depth = block.len();
            let from = w.stored().from(columns.start * k + block.start);
            let panels = Pack { from, inner: 1, column: k, depth, width: n }.run(&mut scratch);
            let bias = bias.filter(|_| block.start == 0).map(|bias| &bias[columns.clone()]);
            let data = x.data.as_ptr().wrapping_add(rows.start * x.stride + block.start);
            let left = Left::Rows { data, stride: x.stride };
            // SAFETY: the check above bounds rows and columns; tasks write disjoint columns or rows.
            unsafe { Multiply { c, ldc, left, panels, m, depth, n, old, bias }.run() };
            old = true;
        }
        PANELS.set(scratch);
    });
}

/// [`forward_into`] for few rows (decoding).
///
/// Row `i` of `y` depends on row `i` of `x` and on the weights only, bit for bit, for any `m`. Weights are streamed
/// once; fast for up to about 32 rows.
pub fn forward_rows_into(x: Mat, layers: &[Layer], accumulate: bool, mut y: MatMut) {
    let ((m, k), n) = (x.dims(), y.cols);
    let _span = span(Op::LinearRows, || profile::products(m, layers));
    check("linear, few rows", fit(x, layers, &y));
    if m == 0 || n == 0 {
        return;
    }
    if any_quantised(layers) {
        let mut col = 0;
        for layer in layers {
            let n = layer.n();
            let y = y.again().columns(col..col + n);
            match layer.w.stored() {
                Stored::Quantised(w) if accumulate => {
                    let mut sum = vec![0.0; m * n];
                    quant::forward_rows(x, w, layer.bias, MatMut::new(&mut sum, m, n));
                    for (r, sum) in sum.chunks_exact(n.max(1)).enumerate() {
                        // SAFETY: one row after the other.
                        unsafe { y.row(r) }.iter_mut().zip(sum).for_each(|(y, sum)| *y += sum);
                    }
                }
                Stored::Quantised(w) => quant::forward_rows(x, w, layer.bias, y),
                _ => forward_rows_into(x, &[*layer], accumulate, y),
            }
            col += n;
        }
        return;
    }
    let mut scratch = GROUPS.take();
    let dtypes = [false, true].map(|bf16| layers.iter().any(|layer| layer.w.is_bf16() == bf16));
    let tiled = dtypes[1] && k > 0 && tiles::available();
    let plain_len = microkernel::packed_len(m, k);
    let narrow_len = if tiled { tiles::packed_len(m, k) } else { plain_len };
    let (plain, narrow) = reserve(&mut scratch, plain_len + narrow_len).split_at_mut(plain_len);
    if dtypes[0] {
        microkernel::pack_rows(x, false, plain);
    }
    if tiled {
        tiles::pack_rows(x, narrow);
    } else if dtypes[1] {
        microkernel::pack_rows(x, true, narrow);
    }
    let (plain, narrow) = (&*plain, &*narrow);
    let widths: Vec<usize> = layers.iter().map(Layer::n).collect();
    let threads = rayon::current_num_threads();
    // Strips of whole tiles, about four per thread.
    let panel = if tiled { 32 } else { 6 };
    let panels = n.div_ceil(panel * 4 * threads).max(if tiled { 1 } else { 4 });
    let strips = Strips { widths: &widths, panel, panels, row_parts: 1 };
    tasks(strips.len(), work(m, k, n), |i| {
        let (at, columns, _) = strips.get(i);
        let Layer { w, bias } = layers[at];
        let (y, y_stride) = (y.data.ptr(widths[..at].iter().sum::<usize>()), y.stride);
        // The strips between are probably those of the other threads.
        let (next, after, _) = strips.get(i + threads);
        let after = if next == at { after.start.max(columns.end) } else { columns.end };
        if let (Stored::Bf16(w), true) = (w.stored(), tiled) {
            let (x, old) = (narrow.as_ptr(), accumulate);
            // SAFETY: the check above bounds rows and columns; tasks write disjoint columns.
            unsafe { tiles::Dots { y, y_stride, x, w, bias, m, k, columns, after, old }.run() };
            return;
        }
        let (w, x) = match w.rows(columns.clone()).stored() {
            Stored::F32(w) => (WeightPtr::F32(w.as_ptr()), plain.as_ptr()),
            Stored::Bf16(w) => (WeightPtr::Bf16(w.as_ptr()), narrow.as_ptr()),
            Stored::Quantised(_) => return,
        };
        let (y, after) = (y.wrapping_add(columns.start), after - columns.start);
        let (n, bias) = (columns.len(), bias.map(|bias| &bias[columns]));
        // SAFETY: the check above bounds rows and columns; tasks write disjoint columns.
        unsafe { Dots { y, y_stride, x, w, bias, m, k, n, after, old: accumulate }.run() };
    });
    GROUPS.set(scratch);
}

/// Gradient of [`forward`] for `x`: `dy · W`, `[m, k]`, summed over the layers, whose columns of `dy [m, Σ n]` stand side by
/// side.
#[must_use]
pub fn backward_input(dy: Mat, layers: &[Layer]) -> Vec<f32> {
    let k = layers.first().map_or(0, |layer| layer.w.dims().1);
    // SAFETY: all columns and rows are some task's, and the first block of the first layer overwrites; without any they are
    // cleared.
    unsafe { buffer::matrix(dy.rows, k, |dx| write_backward(dy, layers, false, dx)) }
}

/// [`backward_input`] into `dx [m, k]`, which is replaced, or added to if `accumulate`.
pub fn backward_input_into(dy: Mat, layers: &[Layer], accumulate: bool, dx: MatMut) {
    write_backward(dy, layers, accumulate, dx);
}

/// Every element of the gradient is written, and read before only if `accumulate`.
fn write_backward(dy: Mat, layers: &[Layer], accumulate: bool, mut dx: MatMut) {
    let ((m, k), n) = (dx.dims(), dy.cols);
    let _span = span(Op::LinearInput, || profile::products(m, layers));
    let fits = dy.dims() == (m, outputs(layers)) && layers.iter().all(|layer| layer.w.dims().1 == k);
    check("linear, gradient of the input", fits);
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
    let (mut col, mut old, mut done) = (0, accumulate, true);
    for layer in layers.iter().filter(|layer| layer.n() > 0) {
        let (from, n) = (layer.w.stored(), layer.n());
        let left = tiles::Left { from: &dy.data[col..], outer: dy.stride, inner: 1, rows: m, c: dx.data };
        let right = Right { from, outer: 1, inner: k, columns: k, at: 0, bias: None };
        // SAFETY: the check above bounds rows and columns.
        done = unsafe { tiles::multiply(&[left], &[right], n, dx.stride, old, layer.w.is_bf16()) };
        (col, old) = (col + n, true);
        if !done {
            break;
        }
    }
    if done {
        return;
    }
    let widths = [k];
    let strips = Strips::new(&widths, m, gemm::tile_shape().1);
    tasks(strips.len(), work(m, k, n), |i| {
        let (_, columns, row_part) = strips.get(i);
        let rows = part(m, strips.row_parts, row_part);
        let (c, ldc) = (dx.data.ptr(rows.start * dx.stride + columns.start), dx.stride);
        let (m, n) = (rows.len(), columns.len());
        let mut scratch = PANELS.take();
        let (mut old, mut col) = (accumulate, 0);
        for layer in layers {
            for block in gemm::blocks(layer.n(), gemm::STEP, gemm::DEPTH) {
                let depth = block.len();
                let from = layer.w.stored().from(block.start * k + columns.start);
                let panels = Pack { from, inner: k, column: 1, depth, width: n }.run(&mut scratch);
                let data = dy.data.as_ptr().wrapping_add(rows.start * dy.stride + col + block.start);
                let left = Left::Rows { data, stride: dy.stride };
                // SAFETY: the check above bounds rows and columns; tasks write disjoint columns or rows.
                unsafe { Multiply { c, ldc, left, panels, m, depth, n, old, bias: None }.run() };
                old = true;
            }
            col += layer.n();
        }
        PANELS.set(scratch);
    });
}

/// Gradients of [`forward`] for weights: `dw [n, k] += dyᵀ · x` for several layers with the same input `x [m, k]`.
pub fn backward_weight(dy: Mat, x: Mat, gradients: &mut [Gradient]) {
    let (m, k) = x.dims();
    let n: usize = gradients.iter().map(|g| g.dw.rows).sum();
    let _span = span(Op::LinearWeight, || (2 * m * k * n, 4 * (2 * n * k + m * (n + k))));
    let of_layer = |g: &Gradient| g.dw.cols == k && g.dw.stride == k && g.col + g.dw.rows <= dy.cols;
    check("linear, gradient of the weight", dy.rows == m && gradients.iter().all(of_layer));
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let right =
        [Right { from: Stored::F32(x.data), outer: 1, inner: x.stride, columns: k, at: 0, bias: None }];
    let multiply = |rounded: bool| {
        let mut lefts = Vec::new();
        for g in gradients.iter().filter(|g| g.bf16 == rounded) {
            let (from, rows, c) = (&dy.data[g.col..], g.dw.rows, g.dw.data);
            lefts.push(tiles::Left { from, outer: 1, inner: dy.stride, rows, c });
        }
        // SAFETY: the check above bounds rows and columns.
        unsafe { tiles::multiply(&lefts, &right, m, k, true, rounded) }
    };
    if multiply(false) && multiply(true) {
        return;
    }
    let (side, panel) = gemm::tile_shape();
    // What a task writes: where, first column of dy, groups of a tile's rows, groups before it.
    let mut before = 0;
    let outputs: Vec<(Shared, usize, usize, usize)> = gradients
        .iter()
        .map(|g| {
            let groups = g.dw.rows.div_ceil(side);
            before += groups;
            (g.dw.data, g.col, g.dw.rows, before - groups)
        })
        .collect();
    let total = before;
    let blocks: Vec<Range<usize>> = gemm::blocks(m, gemm::STEP, gemm::DEPTH).collect();
    let widths = [k];
    let strips = Strips::new(&widths, n, panel);
    let mut groups = GROUPS.take();
    let mut rest = &blocks[..];
    while let Some(first) = rest.first() {
        let fit = (PACKED_LEN / (total * side)).max(1);
        let take = rest.iter().take_while(|block| block.end - first.start <= fit).count().max(1);
        let (now, later) = rest.split_at(take);
        rest = later;
        let depth: usize = now.iter().map(ExactSizeIterator::len).sum();
        let packed = reserve(&mut groups, depth * total * side);
        // Where the packed columns of an output begin for a block: blocks one after the other, outputs inside.
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
                // SAFETY: groups of different tasks are disjoint and `place` keeps outputs and blocks apart.
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
                    // SAFETY: `packed` and `panels` hold these sizes; tasks write disjoint rows or columns of dw.
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

/// Gradient of [`forward`] for a bias: `db [n] +=` the column sums of `dy [m, n]`, added in row order.
pub fn backward_bias(dy: Mat, db: &mut [f32]) {
    let (m, n) = dy.dims();
    let _span = span(Op::LinearWeight, || (m * n, 4 * m * n));
    check("linear, gradient of the bias", db.len() == n);
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
