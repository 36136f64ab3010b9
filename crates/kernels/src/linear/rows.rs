//! Linear layers for few rows: decoding.

use super::{Layer, alike, any_quantised, arithmetic_of, dims_of, fit, outputs, work};
use crate::mat::{Mat, MatMut, check};
use crate::microkernel::{self, Dots, WeightPtr};
use crate::parallel::{Strips, tasks};
use crate::paths::Path;
use crate::profile::{self, Op, span};
use crate::workspace::{GROUPS, reserve};
use crate::{Stored, quant, tiles};

/// Computes [`forward_into`](super::forward_into) for few rows (decoding).
///
/// Row `i` of `y` depends only on row `i` of `x` and on the weights, bit for bit, for any `m`. The weights are read from memory
/// once. The kernel is fast for up to about 32 rows.
pub fn forward_rows_into(x: Mat, layers: &[Layer], accumulate: bool, mut y: MatMut) {
    let ((m, k), n) = (x.dims(), y.cols);
    let _span = span(Op::LinearRows, || profile::products(m, layers));
    check!("linear, few rows", fit(x, layers, &y), x.dims(), y.dims(), dims_of(layers));
    if m == 0 || n == 0 {
        return;
    }
    let arithmetic = arithmetic_of(layers);
    if any_quantised(layers) || layers.iter().any(|layer| layer.w.arithmetic() != arithmetic) {
        let mut col = 0;
        for (quantised, layers) in alike(layers) {
            let y = y.again().columns(col..col + outputs(layers));
            col += outputs(layers);
            if quantised.is_empty() {
                forward_rows_into(x, layers, accumulate, y);
            } else {
                quant::forward_rows(x, &quantised, arithmetic_of(layers), accumulate, y);
            }
        }
        return;
    }
    let mut scratch = GROUPS.take();
    let dtypes = [false, true].map(|bf16| layers.iter().any(|layer| layer.w.is_bf16() == bf16));
    let path = arithmetic.path();
    let tiled = dtypes[1] && k > 0 && path == Path::Amx;
    let paired = dtypes[1] && path == Path::Dot;
    let plain_len = microkernel::packed_len(m, k);
    let narrow_len = if tiled { tiles::packed_len(m, k) } else { plain_len };
    let (plain, narrow) = reserve(&mut scratch, plain_len + narrow_len).split_at_mut(plain_len);
    if dtypes[0] {
        microkernel::pack_rows(x, false, plain);
    }
    if tiled {
        tiles::pack_rows(x, narrow);
    } else if paired {
        microkernel::round_rows(x, narrow);
    } else if dtypes[1] {
        microkernel::pack_rows(x, true, narrow);
    }
    let (plain, narrow) = (&*plain, &*narrow);
    let widths: Vec<usize> = layers.iter().map(Layer::n).collect();
    let threads = rayon::current_num_threads();
    // Strips consist of complete tiles. With vectors, there are about sixteen strips per thread, so that no thread waits long for
    // another.
    let (panel, each, least) = if tiled { (32, 4, 1) } else { (6, 16, 4) };
    let panels = n.div_ceil(panel * each * threads).max(least);
    let strips = Strips { widths: &widths, panel, panels, row_parts: 1 };
    tasks(strips.len(), work(m, k, n), |i| {
        let (at, columns, _) = strips.get(i);
        let Layer { w, bias } = layers[at];
        let (y, y_stride) = (y.data.ptr(widths[..at].iter().sum::<usize>()), y.stride);
        // Other threads probably take the strips between this one and the next.
        let (next, after, _) = strips.get(i + threads);
        let after = if next == at { after.start.max(columns.end) } else { columns.end };
        if let (Stored::Bf16(w), true) = (w.stored(), tiled) {
            let (x, old) = (narrow.as_ptr(), accumulate);
            // SAFETY: the check above ensures that rows and columns are in bounds; tasks write disjoint columns.
            unsafe { tiles::Dots { y, y_stride, x, w, bias, m, k, columns, after, old }.run() };
            return;
        }
        let (w, x) = match w.rows(columns.clone()).stored() {
            Stored::F32(w) => (WeightPtr::F32(w.as_ptr()), plain.as_ptr()),
            Stored::Bf16(w) if paired => (WeightPtr::Pairs(w.as_ptr()), narrow.as_ptr()),
            Stored::Bf16(w) => (WeightPtr::Bf16(w.as_ptr()), narrow.as_ptr()),
            Stored::Quantised(_) => return,
        };
        let (y, after) = (y.wrapping_add(columns.start), after - columns.start);
        let (n, bias) = (columns.len(), bias.map(|bias| &bias[columns]));
        // SAFETY: the check above ensures that rows and columns are in bounds; tasks write disjoint columns.
        unsafe { Dots { y, y_stride, x, w, bias, m, k, n, after, old: accumulate }.run() };
    });
    GROUPS.set(scratch);
}
