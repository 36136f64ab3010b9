//! Linear layers: one input and one or more weights, with an optional residual added in the same pass.
//!
//! A layer computes `y = x Wᵀ (+ b)`, with weights `[n, k]` as published. An [`Adapter`](crate::Adapter) on the weight adds a
//! low-rank term. Only required gradients are computed: a frozen layer returns only `dx`. All dtypes accumulate in f32.

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use std::sync::Arc;

use omnigrpo_gpu::Array;

use crate::Param;
use crate::activation::{ActivationOps, Nonlinearity};
use crate::adapter::{self, Adapter};
use crate::error::{Error, Result};
use crate::order::Order;
use crate::param::ParamDtype;
use crate::pass::{Dropout, Pass};
use crate::rows::Rows;
use crate::tape::{Op, Tape, Var};

/// Linear layers. If there are several layers, their outputs are side by side in each row.
pub(crate) trait LinearOps: ActivationOps {
    /// Computes `x Wᵀ + b`, `[t, k] → [t, Σ n]`, and adds it to `onto`.
    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows;
    /// Returns rows in the dtype of the products with these layers, so that several products need one conversion.
    fn factor(&self, x: &Rows, _layers: &[Linear]) -> Rows {
        x.clone()
    }
    /// Computes `silu(gate) · up` of two layers, `[t, k] → [t, n]`. The bits of a row depend only on that row and the weights.
    fn linear_swiglu(&self, x: &Rows, gate_up: &[Linear; 2]) -> Rows {
        let wide = self.linear(x, gate_up, Onto::Nothing, Order::PerRow);
        self.activation(&wide, Nonlinearity::SwiGlu)
    }
    /// Computes `dy W`, `[t, Σ n] → [t, k]`, of layers whose columns of `dy` begin at `col`.
    fn linear_dx(&self, dx: Dx, dy: &Rows, col: usize, layers: &[Linear]) -> Rows;
    /// Adds `dyᵀ x` to the gradients of weights, and the column sums of `dy` to the gradients of biases. The layers' columns of
    /// `dy` begin at `col`.
    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]);
    /// Sets the dropped elements of `x` to zero and multiplies the others by `1 / (1 − rate)`.
    fn dropout(&self, x: &Rows, mask: &omnigrpo_kernels::dropout::Mask) -> Rows;
}

/// A weight `[n, k]` and an optional bias `[n]`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Arc<Param>,
    bias: Option<Arc<Param>>,
    n: usize,
    k: usize,
}

impl Linear {
    /// Creates a linear layer from a weight of rank 2 and an optional bias of length `n`.
    pub fn new(weight: Arc<Param>, bias: Option<Arc<Param>>) -> Result<Self> {
        let &[n, k] = weight.shape() else {
            let what = format!("a linear layer of shape {:?}; expected rank 2", weight.shape());
            return Err(Error::Weight { name: weight.name().to_owned(), what });
        };
        let layer = Self::reshaped(weight, bias, n, k)?;
        layer.weight.mark_linear();
        Ok(layer)
    }

    /// Creates a linear layer from a weight with another published shape, such as a patch-embedding convolution. The `n · k`
    /// elements of the weight are read as `[n, k]`.
    pub fn reshaped(weight: Arc<Param>, bias: Option<Arc<Param>>, n: usize, k: usize) -> Result<Self> {
        if weight.len() != n * k || bias.as_ref().is_some_and(|b| b.len() != n) {
            let bias = bias.map(|b| b.len());
            let what = format!("{} elements and a bias of {bias:?}; expected {n}×{k} and {n}", weight.len());
            return Err(Error::Weight { name: weight.name().to_owned(), what });
        }
        Ok(Self { weight, bias, n, k })
    }

    /// Creates a reshaped layer without a bias.
    pub(crate) fn plain(weight: &Arc<Param>, n: usize, k: usize) -> Self {
        Self { weight: Arc::clone(weight), bias: None, n, k }
    }

    /// Returns the number of outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Returns the number of inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    pub fn bias(&self) -> Option<&Arc<Param>> {
        self.bias.as_ref()
    }

    pub fn weight(&self) -> &Arc<Param> {
        &self.weight
    }

    /// Returns weight and bias.
    pub fn params(&self) -> impl Iterator<Item = &Arc<Param>> {
        [&self.weight].into_iter().chain(&self.bias)
    }
}

/// Rows to which a product is added.
pub(crate) enum Onto<'a> {
    /// None: the output is new.
    Nothing,
    /// Rows of the size of the output, which is new.
    Residual(&'a Rows),
    /// These rows, whose columns from this one on become the output. The layers have no biases.
    Columns(Rows, usize),
}

/// The gradient of an input.
pub(crate) enum Dx<'a> {
    /// New rows, for an input in the dtype of these.
    Like(&'a Rows),
    /// These rows, to which the gradient is added.
    Onto(Rows),
}

/// Layers that share an input. Each output row contains the outputs of all layers side by side. The same value serves a forward
/// pass and its backward pass, so adapters drop the same inputs in both.
#[derive(Clone, Debug)]
pub struct PackedLinear {
    layers: Vec<Linear>,
    order: Order,
    dropout: Option<Dropout>,
}

impl PackedLinear {
    /// Creates the layers for a pass.
    pub fn new(layers: &[&Linear], pass: &Pass) -> Self {
        let layers = layers.iter().map(|&l| l.clone()).collect();
        Self { layers, order: pass.order, dropout: pass.dropout.clone() }
    }

    /// Restricts the layers to the rows of the pass given by index. Adapters drop the same elements of these rows as in the
    /// complete pass.
    #[must_use]
    pub fn of_rows(mut self, rows: &[usize]) -> Self {
        self.dropout = self.dropout.map(|dropout| dropout.of_rows(rows));
        self
    }

    /// Returns the number of columns of the output.
    pub fn width(&self) -> usize {
        self.layers.iter().map(Linear::n).sum()
    }

    /// Computes `[t, k] → [t, width]`.
    pub fn forward(&self, x: &Rows) -> Result<Rows> {
        self.run(Onto::Nothing, x)
    }

    /// Computes [`Self::forward`] and adds `residual [t, width]`, in one pass over the output.
    pub fn forward_onto(&self, residual: &Rows, x: &Rows) -> Result<Rows> {
        x.device().check("linear", residual)?;
        if residual.dims() != (x.rows(), self.width()) {
            let what =
                format!("a residual of {:?} for an output of {}×{}", residual.dims(), x.rows(), self.width());
            return Err(Error::shape("linear", what));
        }
        self.run(Onto::Residual(residual), x)
    }

    /// Computes `silu(gate) · up`, `[t, k] → [t, n]`, of two layers with n outputs each. In decoding, a GPU does this in one kernel.
    pub fn swiglu(&self, x: &Rows) -> Result<Rows> {
        let adapted = self.adapters().next().is_some();
        match &self.layers[..] {
            [gate, up] if gate.n == up.n && self.order == Order::PerRow && !adapted => {
                self.check(x)?;
                Ok(x.device().backend().linear_swiglu(x, &[gate.clone(), up.clone()]))
            }
            _ => self.forward(x)?.swiglu(),
        }
    }

    fn run(&self, onto: Onto, x: &Rows) -> Result<Rows> {
        self.check(x)?;
        let mut y = x.device().backend().linear(x, &self.layers, onto, self.order);
        let own = self.for_adapters(x);
        for (adapter, col) in self.adapters().filter(|_| x.rows() > 0) {
            y = adapter.forward(y, col, own.as_ref().unwrap_or(x), self.order, self.dropout.as_ref())?;
        }
        Ok(y)
    }

    fn check(&self, x: &Rows) -> Result<()> {
        self.layers.iter().try_for_each(|layer| layer.weight.usable(x.device()))?;
        match self.layers.iter().find(|layer| layer.k != x.cols()) {
            Some(layer) => Err(Error::shape(
                format!("linear {}", layer.weight.name()),
                format!("input is {}×{}, weight is {}×{}", x.rows(), x.cols(), layer.n, layer.k),
            )),
            None => Ok(()),
        }
    }

    /// Returns `dx [t, k]`, given the input `x` of the forward pass and the gradient `dy [t, width]` of the output. Adds weight
    /// and bias gradients to their buffers.
    pub fn backward(&self, x: &Rows, dy: &Rows) -> Result<Rows> {
        self.check_gradient(x, dy)?;
        let dy = Gradient::new(self, dy);
        let (dx, inner) = self.backward_input(x, &dy)?;
        self.add_gradients(x, &dy, &inner)?;
        Ok(dx)
    }

    /// Runs [`Self::backward`] for an input that is computed again from rows of its dtype. `input` maps these rows and the gradient
    /// `dx [t, k]` of the input to the input, so that it can read both in one pass.
    pub fn backward_to(
        &self,
        from: &mut Rows,
        dy: &Rows,
        input: impl FnOnce(&mut Rows, Rows) -> Result<Rows>,
    ) -> Result<()> {
        self.layers.iter().try_for_each(|layer| layer.weight.usable(dy.device()))?;
        self.check_output(from.rows(), dy)?;
        let own = Gradient::new(self, dy);
        let (dx, inner) = self.backward_input(from, &own)?;
        let x = input(from, dx)?;
        self.check_gradient(&x, dy)?;
        self.add_gradients(&x, &own, &inner)
    }

    /// Returns rows in the dtype of the adapters' products, if there are adapters.
    fn for_adapters(&self, x: &Rows) -> Option<Rows> {
        let (adapter, _) = self.adapters().next()?;
        Some(adapter.factor(x))
    }

    /// Returns the gradient of an input in the dtype of `like`, and what each adapter computes for its own gradients.
    fn backward_input(&self, like: &Rows, dy: &Gradient) -> Result<(Rows, Vec<adapter::Inner>)> {
        let mut dx = like.device().backend().linear_dx(Dx::Like(like), &dy.own, 0, &self.layers);
        let mut all = Vec::new();
        for (adapter, col) in self.adapters().filter(|_| dy.own.rows() > 0) {
            let (sum, inner) = adapter.backward_input(dx, dy.for_adapters(), col, self.dropout.as_ref())?;
            dx = sum;
            all.push(inner);
        }
        Ok((dx, all))
    }

    /// Adds the gradients of weights, biases and adapters to their buffers.
    fn add_gradients(&self, x: &Rows, dy: &Gradient, inner: &[adapter::Inner]) -> Result<()> {
        if x.rows() == 0 {
            return Ok(());
        }
        x.device().backend().linear_dw(x, &dy.own, 0, &self.layers);
        let Some(x) = self.for_adapters(x) else { return Ok(()) };
        let mut own = self.adapters().zip(inner);
        own.try_for_each(|((adapter, col), inner)| {
            adapter.backward_weights(&x, dy.for_adapters(), col, inner)
        })
    }

    /// Returns the adapters, with the first column of their outputs.
    fn adapters(&self) -> impl Iterator<Item = (&Adapter, usize)> {
        let columns = self.layers.iter().scan(0, |col, layer| Some(std::mem::replace(col, *col + layer.n)));
        self.layers.iter().zip(columns).filter_map(|(layer, col)| Some((&**layer.weight.adapter()?, col)))
    }

    /// Runs [`Self::backward`] without computing the gradient of the input.
    fn backward_weights(&self, x: &Rows, dy: &Rows) -> Result<()> {
        if self.adapters().next().is_some() {
            return self.backward(x, dy).map(drop);
        }
        self.check_gradient(x, dy)?;
        self.add_gradients(x, &Gradient::new(self, dy), &[])
    }

    fn check_gradient(&self, x: &Rows, dy: &Rows) -> Result<()> {
        self.check(x)?;
        x.device().check("linear backward", dy)?;
        self.check_output(x.rows(), dy)
    }

    fn check_output(&self, rows: usize, dy: &Rows) -> Result<()> {
        if dy.dims() != (rows, self.width()) {
            let what = format!("a gradient of {:?} for an output of {rows}×{}", dy.dims(), self.width());
            return Err(Error::shape("linear backward", what));
        }
        Ok(())
    }
}

/// The gradient of an output, in the dtypes of the products that read it.
struct Gradient {
    own: Rows,
    for_adapters: Option<Rows>,
}

impl Gradient {
    fn new(layers: &PackedLinear, dy: &Rows) -> Self {
        let own = dy.device().backend().factor(dy, &layers.layers);
        Self { own, for_adapters: layers.for_adapters(dy) }
    }

    fn for_adapters(&self) -> &Rows {
        self.for_adapters.as_ref().unwrap_or(&self.own)
    }
}

/// Returns whether a GPU can multiply by these layers as by one: their weights are dense, of one dtype and not the same, their sizes are
/// multiples of 16 bytes, and all of them or none have a bias.
fn are_alike(layers: &[Linear]) -> bool {
    let Some(first) = layers.first() else { return false };
    let size = match first.weight.dtype() {
        ParamDtype::F32 => 4,
        ParamDtype::Bf16 => 2,
        ParamDtype::Quantised(_) => return false,
    };
    let fits = |(i, layer): (usize, &Linear)| {
        layer.weight.dtype() == first.weight.dtype()
            && layer.bias.is_some() == first.bias.is_some()
            && (size * layer.weight.len()).is_multiple_of(Array::UNIT)
            && !layers[..i].iter().any(|other| other.weight.shares_storage(&layer.weight))
    };
    layers.iter().enumerate().all(fits)
}

/// Returns whether a GPU stores the gradient of an input in bf16, if the input is: it is one product, of bf16 weights, to which no
/// adapter adds.
fn has_narrow_dx(layers: &[Linear]) -> bool {
    let narrow = |layer: &Linear| layer.weight.dtype() != ParamDtype::F32 && layer.weight.adapter().is_none();
    (layers.len() == 1 || are_alike(layers)) && layers.iter().all(narrow)
}

impl Op for PackedLinear {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        Ok((self.forward(x)?, ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, [wanted]: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        if wanted {
            return Ok([Some(self.backward(x, &dy)?)]);
        }
        self.backward_weights(x, &dy)?;
        Ok([None])
    }
}

impl Tape {
    /// Computes `[t, k] → [t, n]`.
    pub fn linear(&mut self, x: &Var, layer: &Linear, pass: &Pass) -> Result<Var> {
        self.apply(PackedLinear::new(&[layer], pass), [x])
    }
}
