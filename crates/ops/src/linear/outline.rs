//! Linear layers on an outline.

use omnigrpo_gpu::{Dtype, few_rows_scratch};
use omnigrpo_kernels::dropout::Mask;

use crate::outline::{Outline, Span, card, dtype, factor, product, reach, rounded, same};
use crate::work::{note_dw, note_dx, note_elements, note_linear};

use super::*;

impl Linear {
    /// Counts the gradients of trained weights.
    pub(crate) fn reach(&self) {
        reach(self.weight());
        self.bias().into_iter().for_each(|bias| reach(bias));
    }
}

/// Counts the memory that a GPU needs during products: a copy of `x` in the dtype of the weights, and a widened weight.
fn factors(x: &Rows, layers: &[Linear]) -> [Option<Span>; 2] {
    let wanted = layers.first().map_or(Dtype::F32, |layer| factor(layer.weight()));
    let copy = card().is_some() && wanted != dtype(x);
    let codes = layers.iter().map(Linear::weight);
    let codes = codes.filter(|w| card().is_some() && matches!(w.dtype(), ParamDtype::Quantised(_)));
    let widest = codes.map(|weight| weight.len()).max();
    [copy.then(|| Span::new(x.len(), wanted)), widest.map(|len| Span::new(len, Dtype::Bf16))]
}

impl LinearOps for Outline {
    fn factor(&self, x: &Rows, layers: &[Linear]) -> Rows {
        let mut wanted = layers.iter().map(|layer| factor(layer.weight()));
        match wanted.next().filter(|_| card().is_some()) {
            Some(first) if first != dtype(x) && wanted.all(|other| other == first) => rounded(x, first),
            _ => x.clone(),
        }
    }

    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows {
        note_linear(x.rows(), layers, order);
        let out = match onto {
            Onto::Nothing => product(x, layers.iter().map(Linear::weight)),
            Onto::Residual(residual) => dtype(residual),
            Onto::Columns(mut y, _) => {
                y.touch();
                return y;
            }
        };
        let n = layers.iter().map(Linear::n).sum();
        let y = Rows::on_outline(out, x.rows(), n);
        let k = layers.first().map_or(0, Linear::k);
        // The kernels for few rows read codes, and may divide their sums.
        match order == Order::PerRow && card().is_some() {
            true => drop(Span::new(few_rows_scratch(x.rows(), n, k), Dtype::F32)),
            false => drop(factors(x, layers)),
        }
        y
    }

    fn linear_dx(&self, dx: Dx, dy: &Rows, _: usize, layers: &[Linear]) -> Rows {
        note_dx(dy.rows(), layers);
        let mut dx = match dx {
            Dx::Onto(dx) => dx,
            Dx::Like(x) => {
                let narrow = card().is_some() && dtype(x) == Dtype::Bf16 && has_narrow_dx(layers);
                let dtype = if narrow { Dtype::Bf16 } else { Dtype::F32 };
                Rows::on_outline(dtype, dy.rows(), layers.first().map_or(0, Linear::k))
            }
        };
        dx.touch();
        drop(factors(dy, layers));
        dx
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, _: usize, layers: &[Linear]) {
        note_dw(x.rows(), layers);
        drop([x, dy].map(|rows| {
            let wanted = layers.first().map_or(Dtype::F32, |layer| factor(layer.weight()));
            (card().is_some() && wanted != dtype(rows)).then(|| Span::new(rows.len(), wanted))
        }));
        layers.iter().for_each(Linear::reach);
    }

    fn dropout(&self, x: &Rows, _: &Mask) -> Rows {
        note_elements(x.len());
        same(x)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::norm::Norm;
    use crate::outline::{is_on_card, on_card};
    use crate::param::ParamDtype;
    use crate::{Device, Part};

    /// The norm with a bf16 weight reads f32 rows and begins the bf16 part of a block, which ends with the residual stream.
    #[test]
    fn a_card_stores_what_follows_a_norm_in_bf16() {
        let weight = |shape: &[usize]| Arc::new(Param::outline("w", Part::Llm, shape, ParamDtype::Bf16));
        let layer = Linear::new(weight(&[6, 8]), None).unwrap();
        let norm = Norm::Rms { weight: weight(&[8]), eps: 1e-6 };
        let run = || {
            let linear = PackedLinear::new(&[&layer], &Pass { device: Device::Outline, ..Pass::default() });
            let x = Rows::zeros(Device::Outline, 4, 8);
            let normed = norm.forward(&x).unwrap().0;
            let (y, of_stream) = (linear.forward(&normed).unwrap(), linear.forward(&x).unwrap());
            let onto = linear.forward_onto(&of_stream, &normed).unwrap();
            [&x, &normed, &y, &of_stream, &onto].map(Rows::num_bytes)
        };
        assert_eq!(run(), [128, 128, 96, 96, 96]);
        assert_eq!(on_card(true, run), [128, 64, 48, 96, 96]);
        assert!(!is_on_card());
    }

    /// The test `layers_with_one_input_are_one_product` expects the same sizes of a card.
    #[test]
    fn the_gradient_of_an_input_is_in_bf16_if_one_product_computes_it() {
        let sizes = |low: bool, k: usize, n: [usize; 2], dtype: ParamDtype| {
            let weight = |n| Arc::new(Param::outline("w", Part::Llm, &[n, k], dtype));
            let layers = n.map(|n| Linear::new(weight(n), None).unwrap());
            let pass = Pass { device: Device::Outline, ..Pass::default() };
            on_card(true, || {
                let rows = |dtype, cols| Rows::on_outline(dtype, 3, cols);
                let x = rows(if low { Dtype::Bf16 } else { Dtype::F32 }, k);
                let dy = rows(Dtype::F32, n.iter().sum());
                let packed = PackedLinear::new(&[&layers[0], &layers[1]], &pass);
                packed.backward(&x, &dy).unwrap().num_bytes() / x.len()
            })
        };
        assert_eq!(sizes(true, 8, [16, 8], ParamDtype::Bf16), 2);
        assert_eq!(sizes(false, 8, [16, 8], ParamDtype::Bf16), 4, "the gradient of a stream");
        assert_eq!(sizes(true, 8, [16, 8], ParamDtype::F32), 4);
        assert_eq!(sizes(true, 7, [3, 5], ParamDtype::Bf16), 4, "sizes that no card joins");
    }
}
