//! Linear layers `y = x Wᵀ + b` and their gradients.
//!
//! [`forward`] and the gradients are blocked products for many rows. [`forward_rows_into`] is the kernel for decoding, whose
//! speed is limited by reading the weights from memory. In all of them, the bits of an output element depend only on its row of
//! `x`, its row of the weight and the inner size. They never depend on other rows or columns of the call. Weight gradients sum
//! over the rows in order.
//!
//! Sums are `f32`. Some CPUs multiply bf16, in matrix tiles or in vectors ([`Arithmetic::rounds_bf16`]). On these CPUs, a product with
//! a bf16 weight also rounds the other factor to bf16, the gradient of the weight rounds both factors, and a bf16 number below
//! 2⁻¹²⁶ counts as zero. On other CPUs, bf16 is widened and nothing is rounded.
//!
//! Decoding multiplies quantised weights without widening ([`crate::quant`]), and so do products of many rows if
//! [`Arithmetic::one_kernel`]. Other products widen them piece by piece: to bf16 if the CPU multiplies bf16, else to f32
//! ([`Arithmetic::keeps_inputs`] forces f32 everywhere).
//!
//! Several layers with the same input (queries, keys and values; gate and up) run as one call.

mod forward;
mod gradients;
mod rows;

pub(crate) use forward::product_into;
pub use forward::{forward, forward_into};
pub use gradients::{Gradient, backward_bias, backward_input, backward_input_into, backward_weight};
pub use rows::forward_rows_into;

use crate::mat::{Mat, MatMut};
use crate::quant::{PANEL, QuantRows};
use crate::workspace::{WIDE, reserve};
use crate::{Arithmetic, Stored, Weight};

/// One layer of a call: a weight with its bias.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    pub w: Weight<'a>,
    pub bias: Option<&'a [f32]>,
}

impl<'a> Layer<'a> {
    #[must_use]
    pub fn new(w: Weight<'a>) -> Self {
        Self { w, bias: None }
    }

    fn n(&self) -> usize {
        self.w.dims().0
    }

    /// Returns the weight if it is quantised.
    fn few_bits(&self) -> Option<QuantRows<'a>> {
        match self.w.stored() {
            Stored::Quantised(w) => Some(w),
            _ => None,
        }
    }
}

/// Returns the total number of outputs of all layers.
fn outputs(layers: &[Layer]) -> usize {
    layers.iter().map(Layer::n).sum()
}

/// Returns the shapes of all weights, each with the length of its bias.
fn dims_of(layers: &[Layer]) -> Vec<((usize, usize), Option<usize>)> {
    layers.iter().map(|layer| (layer.w.dims(), layer.bias.map(<[f32]>::len))).collect()
}

/// Returns the number of multiply-adds, used to decide how many threads share the work.
fn work(m: usize, k: usize, n: usize) -> usize {
    m * k * n / 8
}

/// Number of elements of a quantised weight that are widened at a time (8 MiB of bf16, 16 MiB of f32). The other factor is packed
/// again for each piece.
const WIDE_LEN: usize = 1 << 22;

/// Calls `f(first column of the layer's output, layer)` for every layer. For a quantised layer, calls `f` once per widened piece.
/// The bounds of the pieces depend on `k` alone.
fn each_wide(layers: &[Layer], mut f: impl FnMut(usize, Layer)) {
    let mut col = 0;
    for &layer in layers {
        let (total, k) = layer.w.dims();
        if let Some(w) = layer.few_bits() {
            let mut scratch = WIDE.take();
            let step = (WIDE_LEN / k.max(1)).next_multiple_of(PANEL);
            for start in (0..total).step_by(step) {
                let n = step.min(total - start);
                let bias = layer.bias.map(|bias| &bias[start..start + n]);
                let (w, wide) = (w.rows(start, start + n), reserve(&mut scratch, n * k));
                let arithmetic = layer.w.arithmetic();
                let w = if arithmetic.rounds_bf16() && !arithmetic.keeps_inputs {
                    // SAFETY: the memory of each f32 has room for two bf16, and any bits are valid for both types.
                    let wide = unsafe { std::slice::from_raw_parts_mut(wide.as_mut_ptr().cast(), n * k) };
                    w.widen_bf16(wide);
                    Weight::bf16(wide, n, k)
                } else {
                    w.widen(wide);
                    Weight::f32(wide, n, k)
                };
                f(col + start, Layer { w: w.with(arithmetic), bias });
            }
            WIDE.set(scratch);
        } else {
            f(col, layer);
        }
        col += total;
    }
}

/// A quantised weight with its bias.
type FewBits<'a> = (QuantRows<'a>, Option<&'a [f32]>);

/// Splits layers into runs whose weights have the same number of bits and the same arithmetic. Returns each run, which is not empty,
/// with its quantised weights, which are none or all.
fn alike<'l, 'a>(layers: &'l [Layer<'a>]) -> impl Iterator<Item = (Vec<FewBits<'a>>, &'l [Layer<'a>])> {
    let kind = |layer: &Layer| (layer.few_bits().map(QuantRows::bits), layer.w.arithmetic());
    let runs = layers.chunk_by(move |a, b| kind(a) == kind(b));
    runs.map(|run| (run.iter().filter_map(|l| Some((l.few_bits()?, l.bias))).collect(), run))
}

/// Returns the arithmetic of layers that are alike.
fn arithmetic_of(layers: &[Layer]) -> Arithmetic {
    layers.first().map_or_else(Arithmetic::default, |layer| layer.w.arithmetic())
}

fn any_quantised(layers: &[Layer]) -> bool {
    layers.iter().any(|layer| layer.few_bits().is_some())
}

/// Returns true if the shapes of `x`, the layers and `y` fit together.
fn fit(x: Mat, layers: &[Layer], y: &MatMut) -> bool {
    let of_layer = |l: &Layer| l.w.dims().1 == x.cols && l.bias.is_none_or(|b| b.len() == l.n());
    y.dims() == (x.rows, outputs(layers)) && layers.iter().all(of_layer)
}
