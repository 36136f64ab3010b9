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

use std::cell::RefCell;
use std::ops::Range;

use crate::gemm::{self, Left, Line, Multiply, Pack, PackLeft};
use crate::microkernel::{self, Dots, WeightPtr};
use crate::parallel::{Shared, Strips, part, ranges, tasks};
use crate::profile::{self, Op, span};
use crate::tiles::{self, Right};
use crate::{Weight, buffer, quant};

/// Elements of packed gradients that exist at a time (8 MiB).
const PACKED_LEN: usize = 2 << 20;

thread_local! {
    static PANELS: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static GROUPS: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// One weight of a call.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// `[n, k]`.
    pub w: Weight<'a>,
    /// `[n]`.
    pub bias: Option<&'a [f32]>,
    /// Outputs.
    pub n: usize,
}

impl<'a> Layer<'a> {
    /// A layer without bias.
    #[must_use]
    pub fn new(w: Weight<'a>, n: usize) -> Self {
        Self { w, bias: None, n }
    }
}

/// One weight gradient of a call.
#[derive(Debug)]
pub struct Gradient<'a> {
    /// `[n, k]`, added to.
    pub dw: &'a mut [f32],
    /// First of the layer's columns in a row of `dy`.
    pub col: usize,
    /// Outputs.
    pub n: usize,
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
fn each_wide(layers: &[Layer], k: usize, mut f: impl FnMut(usize, Layer)) {
    let mut col = 0;
    for &layer in layers {
        if let Weight::Quantised(w) = layer.w {
            // Taken out of its cell, which kernels called meanwhile may use.
            let mut wide = WIDE.take();
            let step = (WIDE_LEN / k.max(1)).max(1);
            for start in (0..layer.n).step_by(step) {
                let n = step.min(layer.n - start);
                wide.resize(wide.len().max(n * k), 0.0);
                w.rows(start, start + n).widen(&mut wide[..n * k]);
                let bias = layer.bias.map(|bias| &bias[start..start + n]);
                f(col + start, Layer { w: Weight::F32(&wide[..n * k]), bias, n });
            }
            WIDE.set(wide);
        } else {
            f(col, layer);
        }
        col += layer.n;
    }
}

fn any_quantised(layers: &[Layer]) -> bool {
    layers.iter().any(|layer| matches!(layer.w, Weight::Quantised(_)))
}

/// Whether a matrix of `rows` rows of `width` elements, `stride` apart, fits into `len` elements.
fn fits(len: usize, rows: usize, width: usize, stride: usize) -> bool {
    rows == 0 || width == 0 || (rows - 1) * stride + width <= len
}

/// `y = x Wᵀ + b` for many rows (prefill, scoring, training), or `y += …` if `accumulate`.
///
/// `x` is `[m, k]` with rows `x_stride` apart. The outputs of the layers stand side by side in rows of `y`, `y_stride`
/// apart; only their columns are written.
pub fn forward(
    y: &mut [f32],
    y_stride: usize,
    x: &[f32],
    x_stride: usize,
    layers: &[Layer],
    m: usize,
    k: usize,
    accumulate: bool,
) {
    write_forward(Shared::new(y), y_stride, x, x_stride, layers, m, k, accumulate);
}

/// The output `[m, n]` of [`forward`] in memory of its own, which is written once.
#[must_use]
pub fn output(x: &[f32], x_stride: usize, layers: &[Layer], m: usize, k: usize) -> Vec<f32> {
    let n: usize = layers.iter().map(|layer| layer.n).sum();
    // SAFETY: columns of all layers and all rows are some task's, whose first block overwrites.
    unsafe { buffer::written(m * n, |y| write_forward(y, n, x, x_stride, layers, m, k, false)) }
}

/// Every element of the output is written, and read before only if `accumulate`.
fn write_forward(
    y: Shared,
    y_stride: usize,
    x: &[f32],
    x_stride: usize,
    layers: &[Layer],
    m: usize,
    k: usize,
    accumulate: bool,
) {
    let n: usize = layers.iter().map(|layer| layer.n).sum();
    let _span = span(Op::Linear, || profile::products(m, k, layers));
    assert!(fits(y.len(), m, n, y_stride) && fits(x.len(), m, k, x_stride), "linear: a row is out of bounds");
    assert!(
        layers
            .iter()
            .all(|layer| layer.w.len() == layer.n * k && layer.bias.is_none_or(|b| b.len() == layer.n))
    );
    if m == 0 || n == 0 {
        return;
    }
    if any_quantised(layers) {
        each_wide(layers, k, |col, layer| {
            write_forward(y.from(col), y_stride, x, x_stride, &[layer], m, k, accumulate);
        });
        return;
    }
    let widths: Vec<usize> = layers.iter().map(|layer| layer.n).collect();
    let mut at = 0;
    let rights = layers.iter().map(|&Layer { w: from, bias, n: columns }| {
        at += columns;
        Right { from, outer: k, inner: 1, columns, at: at - columns, bias }
    });
    let (narrow, wide): (Vec<Right>, Vec<Right>) = rights.partition(|right| right.from.is_bf16());
    let left = [tiles::Left { from: x, outer: x_stride, inner: 1, rows: m, c: y }];
    // SAFETY: the assertions above bound rows and columns.
    let multiply = |rights: &[Right], rounded| unsafe {
        tiles::multiply(&left, rights, k, y_stride, accumulate, rounded)
    };
    if multiply(&wide, false) && multiply(&narrow, true) {
        return;
    }
    let strips = Strips::new(&widths, m, gemm::tile_shape().1);
    tasks(strips.len(), work(m, k, n), |i| {
        let (at, columns, row_part) = strips.get(i);
        let Layer { w, bias, .. } = layers[at];
        let rows = part(m, strips.row_parts, row_part);
        let offset = widths[..at].iter().sum::<usize>() + columns.start;
        let c = y.ptr(rows.start * y_stride + offset);
        let bias = bias.map(|bias| &bias[columns.clone()]);
        let mut scratch = PANELS.take();
        let mut old = accumulate;
        // An empty sum still writes the bias.
        for block in gemm::blocks(k, gemm::STEP, gemm::DEPTH).chain((k == 0).then_some(0..0)) {
            let bias = if block.start == 0 { bias } else { None };
            let left = Left::Rows {
                data: x.as_ptr().wrapping_add(rows.start * x_stride + block.start),
                stride: x_stride,
            };
            // SAFETY: the assertions above bound rows and columns; tasks write disjoint columns or rows.
            unsafe {
                let from = w.from(columns.start * k + block.start);
                strip(
                    &mut scratch,
                    from,
                    1,
                    k,
                    left,
                    c,
                    y_stride,
                    rows.len(),
                    block.len(),
                    columns.len(),
                    old,
                    bias,
                );
            }
            old = true;
        }
        PANELS.set(scratch);
    });
}

/// Packs one block of the right operand, `depth × n` from the start of `from`, and multiplies `m` rows with it.
///
/// # Safety
/// `left` and `c` hold the rows; nothing else refers to that part of `c`.
unsafe fn strip(
    scratch: &mut Vec<Line>,
    from: Weight,
    inner: usize,
    column: usize,
    left: Left,
    c: *mut f32,
    ldc: usize,
    m: usize,
    depth: usize,
    n: usize,
    old: bool,
    bias: Option<&[f32]>,
) {
    let panels = gemm::reserve(scratch, depth * n.next_multiple_of(gemm::MAX_PANEL)).as_mut_ptr();
    // SAFETY: the scratch holds whole panels; the rest is the contract of this function.
    unsafe {
        Pack { to: panels, from, inner, column, depth, width: n }.run();
        Multiply { c, ldc, left, panels, m, depth, n, old, bias }.run();
    }
}

/// `y = x Wᵀ + b` for few rows (decoding); arguments as in [`forward`].
///
/// Row `i` of `y` depends on row `i` of `x` and on the weights only, bit for bit, for any `m`. Weights are streamed
/// once; fast for up to about 32 rows.
pub fn forward_rows(
    y: &mut [f32],
    y_stride: usize,
    x: &[f32],
    x_stride: usize,
    layers: &[Layer],
    m: usize,
    k: usize,
    accumulate: bool,
) {
    let n: usize = layers.iter().map(|layer| layer.n).sum();
    let _span = span(Op::LinearRows, || profile::products(m, k, layers));
    assert!(fits(y.len(), m, n, y_stride) && fits(x.len(), m, k, x_stride), "linear: a row is out of bounds");
    assert!(
        layers
            .iter()
            .all(|layer| layer.w.len() == layer.n * k && layer.bias.is_none_or(|b| b.len() == layer.n))
    );
    if m == 0 || n == 0 {
        return;
    }
    if any_quantised(layers) {
        let mut col = 0;
        for &layer in layers {
            let y = &mut y[col..];
            match layer.w {
                Weight::Quantised(w) if accumulate => {
                    let mut sum = vec![0.0; m * layer.n];
                    quant::forward_rows(&mut sum, layer.n, x, x_stride, w, layer.bias, m);
                    for (y, sum) in y.chunks_mut(y_stride).zip(sum.chunks_exact(layer.n.max(1))) {
                        y.iter_mut().zip(sum).for_each(|(y, sum)| *y += sum);
                    }
                }
                Weight::Quantised(w) => quant::forward_rows(y, y_stride, x, x_stride, w, layer.bias, m),
                _ => forward_rows(y, y_stride, x, x_stride, &[layer], m, k, accumulate),
            }
            col += layer.n;
        }
        return;
    }
    let mut scratch = GROUPS.take();
    let dtypes = [false, true].map(|bf16| layers.iter().any(|l| matches!(l.w, Weight::Bf16(_)) == bf16));
    let tiled = dtypes[1] && k > 0 && tiles::available();
    let plain_len = microkernel::packed_len(m, k);
    let narrow_len = if tiled { tiles::packed_len(m, k) } else { plain_len };
    let (plain, narrow) = gemm::reserve(&mut scratch, plain_len + narrow_len).split_at_mut(plain_len);
    if dtypes[0] {
        microkernel::pack_rows(plain, x, x_stride, m, k, false);
    }
    if tiled {
        tiles::pack_rows(narrow, x, x_stride, m, k);
    } else if dtypes[1] {
        microkernel::pack_rows(narrow, x, x_stride, m, k, true);
    }
    let (plain, narrow) = (&*plain, &*narrow);
    let widths: Vec<usize> = layers.iter().map(|layer| layer.n).collect();
    let threads = rayon::current_num_threads();
    // Strips of whole tiles, about four per thread.
    let panel = if tiled { 32 } else { 6 };
    let panels = n.div_ceil(panel * 4 * threads).max(if tiled { 1 } else { 4 });
    let strips = Strips { widths: &widths, panel, panels, row_parts: 1 };
    let y = Shared::new(y);
    tasks(strips.len(), work(m, k, n), |i| {
        let (at, columns, _) = strips.get(i);
        let Layer { w, bias, .. } = layers[at];
        let y = y.ptr(widths[..at].iter().sum::<usize>());
        // The strips between are probably those of the other threads.
        let (next, after, _) = strips.get(i + threads);
        let after = if next == at { after.start.max(columns.end) } else { columns.end };
        if let (Weight::Bf16(w), true) = (w, tiled) {
            let (x, old) = (narrow.as_ptr(), accumulate);
            // SAFETY: the assertions above bound rows and columns; tasks write disjoint columns.
            unsafe { tiles::Dots { y, y_stride, x, w, bias, m, k, columns, after, old }.run() };
            return;
        }
        let (w, x) = match w.rows(columns.start, columns.end, k) {
            Weight::F32(w) => (WeightPtr::F32(w.as_ptr()), plain.as_ptr()),
            Weight::Bf16(w) => (WeightPtr::Bf16(w.as_ptr()), narrow.as_ptr()),
            Weight::Quantised(_) => return,
        };
        let (y, after) = (y.wrapping_add(columns.start), after - columns.start);
        let (n, bias) = (columns.len(), bias.map(|bias| &bias[columns]));
        // SAFETY: the assertions above bound rows and columns; tasks write disjoint columns.
        unsafe { Dots { y, y_stride, x, w, bias, m, k, n, after, old: accumulate }.run() };
    });
    GROUPS.set(scratch);
}

/// `dx [m, k] = dy [m, n] · W`, or `+=` if `accumulate`, summed over the layers, whose columns of `dy` stand side by side.
/// Strides as in [`forward`].
pub fn backward_input(
    dx: &mut [f32],
    dx_stride: usize,
    dy: &[f32],
    dy_stride: usize,
    layers: &[Layer],
    m: usize,
    k: usize,
    accumulate: bool,
) {
    write_backward(Shared::new(dx), dx_stride, dy, dy_stride, layers, m, k, accumulate);
}

/// The gradient `[m, k]` of [`backward_input`] in memory of its own, which is written once.
#[must_use]
pub fn input_gradient(dy: &[f32], dy_stride: usize, layers: &[Layer], m: usize, k: usize) -> Vec<f32> {
    // SAFETY: all columns and rows are some task's, and the first block of the first layer overwrites; without any they are
    // cleared.
    unsafe { buffer::written(m * k, |dx| write_backward(dx, k, dy, dy_stride, layers, m, k, false)) }
}

/// Every element of the gradient is written, and read before only if `accumulate`.
fn write_backward(
    dx: Shared,
    dx_stride: usize,
    dy: &[f32],
    dy_stride: usize,
    layers: &[Layer],
    m: usize,
    k: usize,
    accumulate: bool,
) {
    let n: usize = layers.iter().map(|layer| layer.n).sum();
    let _span = span(Op::LinearInput, || profile::products(m, k, layers));
    assert!(
        fits(dx.len(), m, k, dx_stride) && fits(dy.len(), m, n, dy_stride),
        "linear: a row is out of bounds"
    );
    assert!(layers.iter().all(|layer| layer.w.len() == layer.n * k));
    if m == 0 || n == 0 {
        for i in 0..if accumulate { 0 } else { m } {
            dx.clear(i * dx_stride, k);
        }
        return;
    }
    if any_quantised(layers) {
        let mut old = accumulate;
        each_wide(layers, k, |col, layer| {
            write_backward(dx, dx_stride, &dy[col..], dy_stride, &[layer], m, k, old);
            old = true;
        });
        return;
    }
    let (mut col, mut old, mut done) = (0, accumulate, true);
    for &Layer { w: from, n, .. } in layers.iter().filter(|layer| layer.n > 0) {
        let left = tiles::Left { from: &dy[col..], outer: dy_stride, inner: 1, rows: m, c: dx };
        let right = Right { from, outer: 1, inner: k, columns: k, at: 0, bias: None };
        // SAFETY: the assertions above bound rows and columns.
        done = unsafe { tiles::multiply(&[left], &[right], n, dx_stride, old, from.is_bf16()) };
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
        let c = dx.ptr(rows.start * dx_stride + columns.start);
        let mut scratch = PANELS.take();
        let (mut old, mut col) = (accumulate, 0);
        for layer in layers {
            for block in gemm::blocks(layer.n, gemm::STEP, gemm::DEPTH) {
                let data = dy.as_ptr().wrapping_add(rows.start * dy_stride + col + block.start);
                let left = Left::Rows { data, stride: dy_stride };
                let from = layer.w.from(block.start * k + columns.start);
                let (m, depth, n) = (rows.len(), block.len(), columns.len());
                // SAFETY: the assertions above bound rows and columns; tasks write disjoint columns or rows.
                unsafe { strip(&mut scratch, from, k, 1, left, c, dx_stride, m, depth, n, old, None) };
                old = true;
            }
            col += layer.n;
        }
        PANELS.set(scratch);
    });
}

/// `dw [n, k] += dyᵀ · x` for several layers with the same input; `dy` rows are `dy_stride` apart, `x` is `[m, k]`.
pub fn backward_weight(
    gradients: &mut [Gradient],
    dy: &[f32],
    dy_stride: usize,
    x: &[f32],
    x_stride: usize,
    m: usize,
    k: usize,
) {
    let n: usize = gradients.iter().map(|g| g.n).sum();
    let _span = span(Op::LinearWeight, || (2 * m * k * n, 4 * (2 * n * k + m * (n + k))));
    assert!(fits(x.len(), m, k, x_stride), "linear: a row is out of bounds");
    assert!(gradients.iter().all(|g| g.dw.len() == g.n * k && fits(dy.len(), m, g.col + g.n, dy_stride)));
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let right = [Right { from: Weight::F32(x), outer: 1, inner: x_stride, columns: k, at: 0, bias: None }];
    let mut multiply = |rounded: bool| {
        let mut lefts = Vec::new();
        for Gradient { dw, col, n, .. } in gradients.iter_mut().filter(|g| g.bf16 == rounded) {
            let (from, c) = (&dy[*col..], Shared::new(dw));
            lefts.push(tiles::Left { from, outer: 1, inner: dy_stride, rows: *n, c });
        }
        // SAFETY: the assertions above bound rows and columns.
        unsafe { tiles::multiply(&lefts, &right, m, k, true, rounded) }
    };
    if multiply(false) && multiply(true) {
        return;
    }
    let (side, panel) = gemm::tile_shape();
    // What a task writes: where, first column of dy, groups of a tile's rows, groups before it.
    let mut before = 0;
    let outputs: Vec<(Shared, usize, usize, usize)> = gradients
        .iter_mut()
        .map(|g| {
            let groups = g.n.div_ceil(side);
            before += groups;
            (Shared::new(g.dw), g.col, g.n, before - groups)
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
        let packed = gemm::reserve(&mut groups, depth * total * side);
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
                let from = &dy[block.start * dy_stride + col + columns.start..];
                // SAFETY: groups of different tasks are disjoint and `place` keeps outputs and blocks apart.
                unsafe {
                    PackLeft { to, from, inner: dy_stride, depth: block.len(), rows: columns.len() }.run()
                };
            }
        });
        let packed = &*packed;
        tasks(strips.len(), work(depth, k, n), |i| {
            let (_, columns, row_part) = strips.get(i);
            let mut scratch = PANELS.take();
            for block in now {
                let (depth, width) = (block.len(), columns.len());
                let panels = gemm::reserve(&mut scratch, depth * width.next_multiple_of(gemm::MAX_PANEL));
                let from = Weight::F32(&x[block.start * x_stride + columns.start..]);
                let panels = panels.as_mut_ptr();
                // SAFETY: the scratch holds whole panels.
                unsafe { Pack { to: panels, from, inner: x_stride, column: 1, depth, width }.run() };
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

/// `db [n] +=` the column sums of `dy [m, n]`, added in row order.
pub fn backward_bias(db: &mut [f32], dy: &[f32], dy_stride: usize, m: usize, n: usize) {
    let _span = span(Op::LinearWeight, || (m * n, 4 * m * n));
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
