//! Linear layers for many rows.

use std::collections::BTreeMap;

use super::{Layer, alike, any_quantised, arithmetic_of, dims_of, each_wide, fit, outputs, work};
use crate::gemm::{self, Left, Multiply, Pack};
use crate::mat::{Mat, MatMut, check};
use crate::parallel::{Strips, part, tasks};
use crate::paths::Path;
use crate::profile::{self, Op, span};
use crate::tiles::{self, Right};
use crate::workspace::PANELS;
use crate::{buffer, quant};

/// Computes `x Wᵀ + b` for many rows (prefill, scoring, training). `x` is `[m, k]`, and the result `[m, Σ n]` has the outputs of
/// the layers side by side.
#[must_use]
pub fn forward(x: Mat, layers: &[Layer]) -> Vec<f32> {
    // SAFETY: the tasks cover the columns of all layers and all rows, and the first block overwrites the output.
    unsafe { buffer::matrix(x.rows, outputs(layers), |y| forward_into(x, layers, false, y)) }
}

/// Writes the result of [`forward`] to `y [m, Σ n]`. Replaces `y`, or adds to it if `accumulate`.
///
/// With quantised weights, each row has the bits of [`forward_rows_into`](super::forward_rows_into) if
/// [`Arithmetic::one_kernel`](crate::Arithmetic::one_kernel).
pub fn forward_into(x: Mat, layers: &[Layer], accumulate: bool, mut y: MatMut) {
    let is_one_kernel = |layer: &Layer| layer.few_bits().is_some() && layer.w.arithmetic().one_kernel();
    if !layers.iter().any(is_one_kernel) {
        return product_into(x, layers, accumulate, y);
    }
    let _span = span(Op::Linear, || profile::products(x.rows, layers));
    check!("linear", fit(x, layers, &y), x.dims(), y.dims(), dims_of(layers));
    let mut col = 0;
    for (quantised, layers) in alike(layers) {
        let y = y.again().columns(col..col + outputs(layers));
        col += outputs(layers);
        if layers.iter().any(is_one_kernel) {
            quant::forward_rows(x, &quantised, arithmetic_of(layers), accumulate, y);
        } else {
            product_into(x, layers, accumulate, y);
        }
    }
}

/// Computes [`forward_into`] without converting the left operand to bytes, as a gradient requires. Writes every element of the
/// output, and reads the previous output only if `accumulate`.
pub(crate) fn product_into(x: Mat, layers: &[Layer], accumulate: bool, mut y: MatMut) {
    let ((m, k), n) = (x.dims(), y.cols);
    let _span = span(Op::Linear, || profile::products(m, layers));
    check!("linear", fit(x, layers, &y), x.dims(), y.dims(), dims_of(layers));
    if m == 0 || n == 0 {
        return;
    }
    if any_quantised(layers) {
        each_wide(layers, |col, layer| {
            product_into(x, &[layer], accumulate, y.again().columns(col..col + layer.n()));
        });
        return;
    }
    let mut at = 0;
    let rights = layers.iter().map(|layer| {
        let (from, columns, bias) = (layer.w.stored(), layer.n(), layer.bias);
        at += columns;
        (layer.w.rounding(), Right { from, outer: k, inner: 1, columns, at: at - columns, bias })
    });
    let mut by_rounding: BTreeMap<Option<Path>, Vec<Right>> = BTreeMap::new();
    rights.for_each(|(rounding, right)| by_rounding.entry(rounding).or_default().push(right));
    let left = [tiles::Left { from: x.data, outer: x.stride, inner: 1, rows: m, c: y.data }];
    let mut rest = Vec::new();
    for (rounding, rights) in by_rounding {
        // SAFETY: the check above ensures that rows and columns are in bounds.
        if !unsafe { tiles::multiply(&left, &rights, k, y.stride, accumulate, rounding) } {
            rest.extend(rights);
        }
    }
    let widths: Vec<usize> = rest.iter().map(|right| right.columns).collect();
    let n = widths.iter().sum();
    let strips = Strips::new(&widths, m, gemm::tile_shape().1);
    tasks(strips.len(), work(m, k, n), |i| {
        let (at, columns, row_part) = strips.get(i);
        let Right { from: w, bias, at, .. } = rest[at];
        let rows = part(m, strips.row_parts, row_part);
        let (c, ldc) = (y.data.ptr(rows.start * y.stride + at + columns.start), y.stride);
        let (m, n) = (rows.len(), columns.len());
        let mut scratch = PANELS.take();
        let mut old = accumulate;
        // An empty sum still writes the bias.
        for block in gemm::blocks(k, gemm::STEP, gemm::DEPTH).chain((k == 0).then_some(0..0)) {
            let depth = block.len();
            let from = w.from(columns.start * k + block.start);
            let panels = Pack { from, inner: 1, column: k, depth, width: n }.run(&mut scratch);
            let bias = bias.filter(|_| block.start == 0).map(|bias| &bias[columns.clone()]);
            let data = x.data.as_ptr().wrapping_add(rows.start * x.stride + block.start);
            let left = Left::Rows { data, stride: x.stride };
            // SAFETY: the check above ensures that rows and columns are in bounds; tasks write disjoint columns or rows.
            unsafe { Multiply { c, ldc, left, panels, m, depth, n, old, bias }.run() };
            old = true;
        }
        PANELS.set(scratch);
    });
}
