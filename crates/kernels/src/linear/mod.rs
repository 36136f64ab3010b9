//! Linear layers `y = x Wᵀ + b` and their gradients.
//!
//! [`forward`] and the gradients are blocked products for many rows, [`forward_rows_into`] is the kernel for decoding, limited by
//! the memory that the weights come from. In all of them the bits of an output element depend on its own row of `x`, its
//! row of the weight and the inner size, never on the other rows or columns of the call; weight gradients sum over the
//! rows in order.
//!
//! Sums are `f32`. Where the CPU multiplies bf16, in matrix tiles or in vectors ([`crate::rounds_bf16`]), products with
//! a bf16 weight round the other factor to bf16 too, and both factors of its gradient; elsewhere bf16 is widened and nothing
//! is rounded. A bf16 number below 2⁻¹²⁶ counts as zero there. Weights of few bits are widened piece by piece, to bf16 where
//! it is multiplied, else to f32 ([`crate::quant::keep_inputs`] says f32 everywhere); while decoding they are not ([`crate::quant`]).
//!
//! Several layers with the same input (queries, keys and values; gate and up) run as one call.

mod forward;
mod gradients;
mod rows;

pub use forward::{forward, forward_into};
pub use gradients::{Gradient, backward_bias, backward_input, backward_input_into, backward_weight};
pub use rows::forward_rows_into;

use crate::mat::{Mat, MatMut};
use crate::quant::{PANEL, QuantRows};
use crate::workspace::{WIDE, reserve};
use crate::{Stored, Weight, quant, rounds_bf16};

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

    /// A weight of few bits.
    fn few_bits(&self) -> Option<QuantRows<'a>> {
        match self.w.stored() {
            Stored::Quantised(w) => Some(w),
            _ => None,
        }
    }
}

/// Outputs of all layers, side by side.
fn outputs(layers: &[Layer]) -> usize {
    layers.iter().map(Layer::n).sum()
}

/// Multiply-adds as elementary operations, for the decision to use threads.
fn work(m: usize, k: usize, n: usize) -> usize {
    m * k * n / 8
}

/// Elements of a piece of a quantised weight that is widened at a time (8 MiB of bf16, 16 of f32): for each piece the other factor is
/// packed anew.
const WIDE_LEN: usize = 1 << 22;

/// Calls `f(first column of the layer's output, layer)` for every layer, a quantised one in widened pieces. Their bounds
/// depend on `k` alone.
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
                let w = if rounds_bf16() && !quant::keeps_inputs() {
                    // SAFETY: two bf16 in the place of each f32; any bits are valid for both.
                    let wide = unsafe { std::slice::from_raw_parts_mut(wide.as_mut_ptr().cast(), n * k) };
                    w.widen_bf16(wide);
                    Weight::bf16(wide, n, k)
                } else {
                    w.widen(wide);
                    Weight::f32(wide, n, k)
                };
                f(col + start, Layer { w, bias });
            }
            WIDE.set(scratch);
        } else {
            f(col, layer);
        }
        col += total;
    }
}

fn any_quantised(layers: &[Layer]) -> bool {
    layers.iter().any(|layer| layer.few_bits().is_some())
}

/// Whether `x`, layers and `y` fit together.
fn fit(x: Mat, layers: &[Layer], y: &MatMut) -> bool {
    let of_layer = |l: &Layer| l.w.dims().1 == x.cols && l.bias.is_none_or(|b| b.len() == l.n());
    y.dims() == (x.rows, outputs(layers)) && layers.iter().all(of_layer)
}
