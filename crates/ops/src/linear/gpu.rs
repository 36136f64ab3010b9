//! Linear layers on a GPU.

use omnigrpo_gpu::{Affine, Array, Dtype, Weight};
use omnigrpo_kernels::dropout::Mask;

use crate::gpu::{Card, Weights};
use crate::rows::Data;

use super::*;

impl LinearOps for Card {
    fn factor(&self, x: &Rows, layers: &[Linear]) -> Rows {
        let ((rows, cols), own) = (x.dims(), self.of(x));
        let mut wanted = layers.iter().map(|layer| product_dtype(layer.weight()));
        match wanted.next() {
            Some(first) if first != own.dtype() && wanted.all(|other| other == first) => {
                // A kernel may have left the values in bf16.
                let left = own.rounded().filter(|low| low.dtype() == first);
                let data = left.map_or_else(|| Arc::new(self.gpu.cast(own, first)), Arc::clone);
                Rows::over(Data::Gpu(*self, data), rows, cols)
            }
            _ => x.clone(),
        }
    }

    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows {
        use omnigrpo_gpu::Onto as Plus;
        let (rows, k) = x.dims();
        // Several products share one conversion.
        let converted = if layers.len() > 1 { self.factor(x, layers) } else { x.clone() };
        let (x, layers) = (self.of(x), self.layers(layers, order));
        let width = layers.iter().map(|layer| layer.n).sum();
        let create = |dtype| self.rows(self.gpu.alloc(rows * width, dtype), rows, width);
        let (mut y, first, plus) = match onto {
            Onto::Nothing => (create(self.output(x.dtype(), &layers)), 0, Plus::Nothing),
            Onto::Residual(residual) => {
                let residual = self.of(residual);
                (create(residual.dtype()), 0, Plus::Residual(residual))
            }
            Onto::Columns(y, first) => {
                debug_assert!(layers.iter().all(|layer| layer.biases.is_empty()), "a bias replaces columns");
                (y, first, Plus::Output)
            }
        };
        let (x, stride) = (self.of(&converted), y.cols());
        self.change(&mut y, |y| {
            if order == Order::PerRow {
                let layers: Vec<_> = layers.iter().map(Layer::affine).collect();
                self.gpu.linear_rows(y, [first, stride], x, &layers, k, plus);
                return;
            }
            let mut col = first;
            for layer in &layers {
                let residual = if let Plus::Residual(residual) = plus { Some(residual) } else { None };
                let mut first = col;
                for bias in layer.biases() {
                    self.gpu.bias_rows(y, first, stride, rows, bias, residual);
                    first += bias.len();
                }
                let plus = if layer.biases.is_empty() { plus } else { Plus::Output };
                self.gpu.linear(y, [col, stride], x, layer.weight.weight(), [0, layer.n, k], plus);
                col += layer.n;
            }
        });
        y
    }

    fn linear_swiglu(&self, x: &Rows, gate_up: &[Linear; 2]) -> Rows {
        let ((rows, k), layers) = (x.dims(), self.layers(gate_up, Order::PerRow));
        let [gate, up] = [&layers[0], &layers[1]].map(Layer::affine);
        let y =
            self.gpu.swiglu_rows(self.of(x), [gate, up], [rows, k], self.output(self.of(x).dtype(), &layers));
        self.rows(y, rows, gate.n)
    }

    fn linear_dx(&self, dx: Dx, dy: &Rows, col: usize, layers: &[Linear]) -> Rows {
        let ((rows, width), dy, narrow) = (dy.dims(), self.of(dy), has_narrow_dx(layers));
        let layers = self.layers(layers, Order::Blocked);
        let k = layers.first().map_or(0, |layer| layer.k);
        // In bf16, each of several products would be rounded before the next one is added.
        let (mut dx, mut adds, rounds) = match dx {
            Dx::Onto(dx) => (dx, true, false),
            Dx::Like(x) => {
                let narrow = narrow && self.of(x).dtype() == Dtype::Bf16;
                let dtype = if narrow && layers.len() == 1 { Dtype::Bf16 } else { Dtype::F32 };
                (self.rows(self.gpu.alloc(rows * k, dtype), rows, k), false, narrow)
            }
        };
        self.change(&mut dx, |dx| {
            let mut col = col;
            for layer in &layers {
                self.gpu.linear_dx(dx, dy, [col, width], layer.weight.weight(), [0, layer.n, k], adds);
                adds = true;
                col += layer.n;
            }
        });
        // The weights could not be joined.
        if rounds && layers.len() > 1 { dx.cast(Dtype::Bf16) } else { dx }
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]) {
        let ((rows, k), width) = (x.dims(), dy.cols());
        let mut at = col;
        for layer in layers {
            let n = layer.n();
            let dtype = product_dtype(layer.weight());
            self.accumulate(layer.weight(), |dw| {
                self.gpu.linear_dw(dw, self.of(x), self.of(dy), [at, width], [0, n, k], dtype);
            });
            if let Some(bias) = layer.bias() {
                self.accumulate(bias, |db| {
                    self.gpu.add_column_sums(db, self.of(dy), [at, width], None, rows);
                });
            }
            at += n;
        }
    }

    fn dropout(&self, x: &Rows, mask: &Mask) -> Rows {
        let keys = mask.rows.as_ref().map(|keys| self.gpu.upload_words(&keys[..]));
        let (threshold, keep) = (u64::from(mask.threshold()), mask.keep());
        let y = self.gpu.dropout(self.of(x), x.cols(), keys.as_ref(), mask.key, threshold, keep);
        self.rows(y, x.rows(), x.cols())
    }
}

/// Returns the dtype of the factors in a product with a weight.
fn product_dtype(weight: &Param) -> Dtype {
    match weight.dtype() {
        ParamDtype::F32 => Dtype::F32,
        ParamDtype::Bf16 | ParamDtype::Quantised(_) => Dtype::Bf16,
    }
}

/// A weight on the GPU, or several that are neighbours in memory.
enum Place {
    Own(Arc<Weights>),
    Joined(Arc<Array>),
}

impl Place {
    fn weight(&self) -> Weight<'_> {
        match self {
            Self::Own(weights) => weights.weight(),
            Self::Joined(array) => Weight::Dense(array),
        }
    }
}

/// A layer's weight and bias on the GPU, or those of several layers that are one product.
struct Layer {
    weight: Place,
    biases: Vec<Arc<Weights>>,
    n: usize,
    k: usize,
}

impl Layer {
    fn biases(&self) -> impl Iterator<Item = &Array> {
        self.biases.iter().filter_map(|bias| match bias.weight() {
            Weight::Dense(array) => Some(array),
            Weight::Codes(_) => None,
        })
    }

    /// Returns the layer, if it is one, with its bias.
    fn affine(&self) -> Affine<'_> {
        Affine { weight: self.weight.weight(), bias: self.biases().next(), n: self.n }
    }
}

impl Card {
    /// Returns the layers for products of many rows as one layer, if their weights can be neighbours in memory. The kernels for few
    /// rows take several weights.
    fn layers(&self, layers: &[Linear], order: Order) -> Vec<Layer> {
        if order == Order::Blocked && layers.len() > 1 && are_alike(layers) {
            let weights: Vec<&Param> = layers.iter().map(|layer| &**layer.weight()).collect();
            if let Some(weight) = self.joined(&weights) {
                let biases = layers.iter().filter_map(Linear::bias);
                let biases = biases.map(|bias| self.weights(bias)).collect();
                let n = layers.iter().map(Linear::n).sum();
                return vec![Layer { weight: Place::Joined(weight), biases, n, k: layers[0].k() }];
            }
        }
        layers.iter().map(|layer| self.layer(layer)).collect()
    }

    /// Returns bf16 if the input and all weights are bf16, and f32 otherwise.
    fn output(&self, x: Dtype, layers: &[Layer]) -> Dtype {
        let narrow = |layer: &Layer| layer.weight.weight().dtype() == Dtype::Bf16;
        match x == Dtype::Bf16 && layers.iter().all(narrow) {
            true => Dtype::Bf16,
            false => Dtype::F32,
        }
    }

    fn layer(&self, linear: &Linear) -> Layer {
        let biases = linear.bias().map(|bias| self.weights(bias)).into_iter().collect();
        Layer { weight: Place::Own(self.weights(linear.weight())), biases, n: linear.n(), k: linear.k() }
    }
}
