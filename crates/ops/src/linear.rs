//! Linear layers: one input, one or several weights, optionally a rotation or a residual in the same pass.
//!
//! `y = x Wᵀ (+ b)`, weights `[n, k]` as published; an [`Adapter`](crate::Adapter) on the weight adds its low-rank term
//! before a rotation or residual. Only gradients that somebody needs are computed: a frozen layer gives `dx` alone.
//! Accumulation is f32 for all weights alike.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use omnigrpo_kernels::buffer;
use omnigrpo_kernels::linear::{self as kernel, Gradient, Layer};
use omnigrpo_kernels::rope;

use crate::adapter::DropoutScope;
use crate::rope::RopeTable;
use crate::slices::{f32_of, rows_from_vec, with_f32};
use crate::{Param, ParamDtype};

/// A weight `[n, k]` and its bias `[n]`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Arc<Param>,
    bias: Option<Arc<Param>>,
    n: usize,
    k: usize,
}

impl Linear {
    /// A linear layer.
    ///
    /// # Errors
    /// A weight of rank other than 2 or a bias of another length than `n`.
    pub fn new(weight: Arc<Param>, bias: Option<Arc<Param>>) -> Result<Self> {
        let &[n, k] = weight.shape() else {
            bail!("linear {}: weight is {:?}, expected rank 2", weight.name(), weight.shape());
        };
        let layer = Self::reshaped(weight, bias, n, k)?;
        layer.weight.mark_linear();
        Ok(layer)
    }

    /// A linear layer over a weight whose published shape differs, such as a patch-embedding convolution:
    /// its `n · k` elements are read as `[n, k]`.
    ///
    /// # Errors
    /// Element counts that differ.
    pub fn reshaped(weight: Arc<Param>, bias: Option<Arc<Param>>, n: usize, k: usize) -> Result<Self> {
        if weight.len() != n * k || bias.as_ref().is_some_and(|b| b.len() != n) {
            bail!(
                "linear {}: weight has {} elements and bias {:?}, expected {n}×{k} and {n}",
                weight.name(),
                weight.len(),
                bias.map(|b| b.len())
            );
        }
        Ok(Self { weight, bias, n, k })
    }

    /// Outputs.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// The bias, if there is one.
    #[must_use]
    pub fn bias(&self) -> Option<&Arc<Param>> {
        self.bias.as_ref()
    }

    /// The weight.
    #[must_use]
    pub fn weight(&self) -> &Arc<Param> {
        &self.weight
    }
}

/// Which kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulMode {
    /// Blocked matrix product: training, scoring, prefill and towers.
    Gemm,
    /// The bits of a row depend on that row and the weight alone, whatever else is in the batch: decode.
    Rows,
}

/// `[t, k] → [t, n]`.
///
/// # Errors
/// An input width that differs from `k`.
pub fn linear(x_tk: &Tensor, layer: &Linear, mode: MatmulMode) -> Result<Tensor> {
    x_tk.apply_op1(PackedLinear::new(&[layer], mode))
}

struct Rotate {
    table: Arc<RopeTable>,
    heads: usize,
}

/// Layers that share an input: an op for candle's tape, and over plain slices for code with a tape of its own. One value serves a forward pass and its backward pass: adapters drop the same inputs in both.
pub struct PackedLinear {
    parts: Vec<Linear>,
    rope: Option<Rotate>,
    mode: MatmulMode,
    /// What adapters drop, as it was when the value was made.
    dropped: Option<DropoutScope>,
}

impl PackedLinear {
    /// The outputs of `layers` side by side in each row.
    #[must_use]
    pub fn new(layers: &[&Linear], mode: MatmulMode) -> Self {
        let parts: Vec<Linear> = layers.iter().map(|&l| l.clone()).collect();
        let dropped = parts.iter().find_map(|l| l.weight.adapter()).and_then(|a| a.scope());
        Self { parts, rope: None, mode, dropped }
    }

    /// The same, followed by a rotation of the first `heads` heads of `2 · table.half` columns each.
    #[must_use]
    pub fn rotated(mut self, table: &Arc<RopeTable>, heads: usize) -> Self {
        self.rope = Some(Rotate { table: Arc::clone(table), heads });
        self
    }

    /// For some rows of the pass only, given by their indices: adapters drop of them what they would drop among all.
    #[must_use]
    pub fn of_rows(mut self, rows: &[usize]) -> Self {
        self.dropped = self.dropped.map(|scope| scope.of_rows(rows));
        self
    }

    /// Columns of the output.
    #[must_use]
    pub fn width(&self) -> usize {
        self.parts.iter().map(Linear::n).sum()
    }

    fn rotate(&self, y: &mut [f32], rows: usize, inverse: bool) -> Result<()> {
        if let Some(Rotate { table, heads }) = &self.rope {
            if table.rows() != rows {
                bail!("linear: {} positions for {rows} rows", table.rows());
            }
            rope::apply(y, self.width(), 0, *heads, 2 * table.half, &table.cos, &table.sin, rows, inverse);
        }
        Ok(())
    }

    /// `[rows, k] → [rows, width]`.
    ///
    /// # Errors
    /// An input width that differs from `k`; a rotation table whose rows are not the input's.
    pub fn forward(&self, x: &[f32], rows: usize, k: usize) -> Result<Vec<f32>> {
        self.check(rows, k)?;
        let width = self.width();
        let mut y = Vec::new();
        with_layers(&self.parts, &[], &mut |layers| match self.mode {
            MatmulMode::Gemm => y = kernel::output(x, k, layers, rows, k),
            MatmulMode::Rows => {
                y = buffer::zeros(rows * width);
                kernel::forward_rows(&mut y, width, x, k, layers, rows, k, false);
            }
        })?;
        self.finish(&mut y, x, rows)?;
        Ok(y)
    }

    /// [`Self::forward`] plus `residual [rows, width]`, in one pass over the output.
    ///
    /// # Errors
    /// As [`Self::forward`]; a residual of another length, or a rotation, which would turn the residual too.
    pub fn forward_onto(&self, residual: &[f32], x: &[f32], rows: usize, k: usize) -> Result<Vec<f32>> {
        if residual.len() != rows * self.width() || self.rope.is_some() {
            bail!(
                "linear: a residual of {} values for an output of {rows}×{} (rotated: {})",
                residual.len(),
                self.width(),
                self.rope.is_some()
            );
        }
        self.check(rows, k)?;
        let width = self.width();
        let mut y = buffer::copy(residual);
        with_layers(&self.parts, &[], &mut |layers| match self.mode {
            MatmulMode::Gemm => kernel::forward(&mut y, width, x, k, layers, rows, k, true),
            MatmulMode::Rows => kernel::forward_rows(&mut y, width, x, k, layers, rows, k, true),
        })?;
        self.finish(&mut y, x, rows)?;
        Ok(y)
    }

    fn check(&self, rows: usize, k: usize) -> Result<()> {
        if let Some(part) = self.parts.iter().find(|part| part.k != k) {
            bail!("linear {}: input is {rows}×{k}, weight is {}×{}", part.weight.name(), part.n, part.k);
        }
        Ok(())
    }

    /// Adds what adapters give and rotates.
    fn finish(&self, y: &mut [f32], x: &[f32], rows: usize) -> Result<()> {
        let mut col = 0;
        for part in &self.parts {
            if let Some(adapter) = part.weight.adapter().filter(|_| rows > 0) {
                adapter.forward(&mut y[col..], self.width(), x, rows, self.mode, self.dropped.as_ref())?;
            }
            col += part.n;
        }
        self.rotate(y, rows, false)
    }

    /// `dx [rows, k]` for the input `x` of the forward pass, with weight and bias gradients added to their buffers.
    /// A rotation is undone in `dy [rows, width]` itself.
    ///
    /// # Errors
    /// Lengths that are not those of the forward pass.
    pub fn backward(&self, x: &[f32], dy: &mut [f32], rows: usize, k: usize) -> Result<Vec<f32>> {
        let width = self.width();
        if x.len() != rows * k || dy.len() != rows * width {
            bail!(
                "linear backward: {} inputs and {} gradients for {rows} rows of {k} and {width}",
                x.len(),
                dy.len()
            );
        }
        self.rotate(dy, rows, true)?;
        let mut dx = Vec::new();
        with_layers(&self.parts, &[], &mut |layers| dx = kernel::input_gradient(dy, width, layers, rows, k))?;
        if rows == 0 {
            return Ok(dx);
        }
        self.weight_gradients(x, dy, rows, k);
        let mut col = 0;
        for part in &self.parts {
            if let Some(adapter) = part.weight.adapter() {
                adapter.backward(&mut dx, &dy[col..], width, x, rows, self.dropped.as_ref())?;
            }
            col += part.n;
        }
        Ok(dx)
    }

    /// [`Self::backward`] where nobody asks for the gradient of the input: layers without adapters or rotation.
    ///
    /// # Errors
    /// As there; an adapter, which belongs to layers inside a model.
    pub fn backward_weights(&self, x: &[f32], dy: &[f32], rows: usize, k: usize) -> Result<()> {
        if x.len() != rows * k || dy.len() != rows * self.width() {
            bail!("linear backward: {} inputs and {} gradients for {rows} rows of {k}", x.len(), dy.len());
        }
        if self.rope.is_some() || self.parts.iter().any(|part| part.weight.adapter().is_some()) {
            bail!("linear backward: the first layer has a rotation or an adapter");
        }
        self.weight_gradients(x, dy, rows, k);
        Ok(())
    }

    fn weight_gradients(&self, x: &[f32], dy: &[f32], rows: usize, k: usize) {
        let width = self.width();
        let mut buffers: Vec<_> = self.parts.iter().map(|part| part.weight.gradient()).collect();
        let mut gradients = Vec::with_capacity(buffers.len());
        let mut col = 0;
        for (part, buffer) in self.parts.iter().zip(&mut buffers) {
            if let Some(buffer) = buffer {
                let bf16 = part.weight.dtype() == ParamDtype::Bf16;
                gradients.push(Gradient { dw: buffer.as_mut_slice(), col, n: part.n, bf16 });
            }
            col += part.n;
        }
        kernel::backward_weight(&mut gradients, dy, width, x, k, rows, k);
        drop(buffers);
        col = 0;
        for part in &self.parts {
            if let Some(bias) = &part.bias {
                bias.accumulate(|db| kernel::backward_bias(db, &dy[col..], width, rows, part.n));
            }
            col += part.n;
        }
    }

    fn backward_tensors(&self, x_tk: &Tensor, dy_tn: &Tensor) -> Result<Tensor> {
        let (rows, k) = x_tk.dims2()?;
        let mut dy = crate::to_vec(&dy_tn.contiguous()?)?;
        let dx = with_f32(x_tk, |x| self.backward(x, &mut dy, rows, k))??;
        rows_from_vec(dx, rows, k)
    }
}

impl CustomOp1 for PackedLinear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, k) = layout.shape().dims2()?;
        let y = self.forward(f32_of("linear", storage, layout)?, rows, k)?;
        Ok((CpuStorage::F32(y), Shape::from((rows, self.width()))))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.backward_tensors(x, dy)?))
    }
}

/// Calls `f` with the kernel's form of `parts`, after `done`. Weights lend their data inside a closure each.
fn with_layers(parts: &[Linear], done: &[Layer], f: &mut dyn FnMut(&[Layer])) -> Result<()> {
    let Some((part, rest)) = parts.split_first() else {
        f(done);
        return Ok(());
    };
    part.weight.with_weight(|w| {
        let mut next = |bias: Option<&[f32]>| {
            let mut layers = done.to_vec();
            layers.push(Layer { w, bias, n: part.n });
            with_layers(rest, &layers, f)
        };
        match &part.bias {
            Some(bias) => bias.with_f32(|bias| next(Some(bias)))?,
            None => next(None),
        }
    })?
}
