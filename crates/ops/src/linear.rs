//! Linear layers: one input, one or several weights, optionally a rotation or a residual in the same op.
//!
//! `y = x Wᵀ (+ b)`, weights `[n, k]` as published. Only gradients that somebody needs are computed: a frozen
//! layer gives `dx` alone. Accumulation is f32 for f32 and bf16 weights alike.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};
use omnigrpo_kernels::{linear as kernel, rope};

use crate::Param;
use crate::rope::RopeTable;
use crate::slices::{f32_of, rows_from_vec, with_f32};

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
        let (n, k) = weight.value().dims2()?;
        Self::reshaped(weight, bias, n, k)
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
    packed_linear(x_tk, &[layer], mode)
}

/// `[t, k] → [t, n₁ + n₂ + …]`: the outputs of several layers side by side in each row.
///
/// # Errors
/// As [`linear`].
pub fn packed_linear(x_tk: &Tensor, layers: &[&Linear], mode: MatmulMode) -> Result<Tensor> {
    x_tk.apply_op1(Packed { parts: layers.iter().map(|&l| l.clone()).collect(), rope: None, mode })
}

/// [`packed_linear`] followed by a rotary embedding of the first `heads` heads of `2 · table.half` columns each.
///
/// # Errors
/// As [`linear`]; a table whose rows are not the input's.
pub fn qkv_rope(
    x_tk: &Tensor,
    layers: &[&Linear],
    table: &Arc<RopeTable>,
    heads: usize,
    mode: MatmulMode,
) -> Result<Tensor> {
    if table.rows() != x_tk.dim(0)? {
        bail!("qkv_rope: {} positions for {} rows", table.rows(), x_tk.dim(0)?);
    }
    let rope = Some(Rotate { table: Arc::clone(table), heads });
    x_tk.apply_op1(Packed { parts: layers.iter().map(|&l| l.clone()).collect(), rope, mode })
}

/// `residual + x Wᵀ (+ b)`, `[t, k]` and `[t, n]` → `[t, n]`.
///
/// # Errors
/// As [`linear`]; a residual of another shape than the output.
pub fn linear_residual(
    x_tk: &Tensor,
    residual_tn: &Tensor,
    layer: &Linear,
    mode: MatmulMode,
) -> Result<Tensor> {
    let packed = Packed { parts: vec![layer.clone()], rope: None, mode };
    x_tk.apply_op2(residual_tn, Residual(packed))
}

struct Rotate {
    table: Arc<RopeTable>,
    heads: usize,
}

struct Packed {
    parts: Vec<Linear>,
    rope: Option<Rotate>,
    mode: MatmulMode,
}

impl Packed {
    fn width(&self) -> usize {
        self.parts.iter().map(Linear::n).sum()
    }

    fn rotate(&self, y: &mut [f32], rows: usize, inverse: bool) {
        if let Some(Rotate { table, heads }) = &self.rope {
            rope::apply(y, self.width(), 0, *heads, 2 * table.half, &table.cos, &table.sin, rows, inverse);
        }
    }

    fn forward(&self, x: &[f32], rows: usize, k: usize) -> Result<Vec<f32>> {
        let width = self.width();
        let mut y = vec![0.0; rows * width];
        let mut col = 0;
        for part in &self.parts {
            if part.k != k {
                bail!("linear {}: input is {rows}×{k}, weight is {}×{}", part.weight.name(), part.n, part.k);
            }
            if rows > 0 {
                part.weight.with_weight(|w| {
                    let mut run = |bias: Option<&[f32]>| {
                        let run = match self.mode {
                            MatmulMode::Gemm => kernel::forward,
                            MatmulMode::Rows => kernel::forward_rows,
                        };
                        run(&mut y[col..], width, x, k, w, bias, rows, k, part.n);
                    };
                    match &part.bias {
                        Some(bias) => bias.with_f32(|b| run(Some(b))),
                        None => {
                            run(None);
                            Ok(())
                        }
                    }
                })??;
            }
            col += part.n;
        }
        self.rotate(&mut y, rows, false);
        Ok(y)
    }

    /// `dx`, with weight and bias gradients added to their buffers.
    fn backward(&self, x_tk: &Tensor, dy_tn: &Tensor) -> Result<Tensor> {
        let (rows, k) = x_tk.dims2()?;
        let dy_tn = dy_tn.contiguous()?;
        let mut dx = vec![0.0; rows * k];
        with_f32(x_tk, |x| {
            with_f32(&dy_tn, |dy| {
                let rotated;
                let dy = if self.rope.is_some() {
                    let mut copy = dy.to_vec();
                    self.rotate(&mut copy, rows, true);
                    rotated = copy;
                    &rotated
                } else {
                    dy
                };
                let width = self.width();
                let mut col = 0;
                for (i, part) in self.parts.iter().enumerate() {
                    let dy = &dy[col..];
                    part.weight.with_weight(|w| {
                        kernel::backward_input(&mut dx, k, dy, width, w, rows, k, part.n, i > 0);
                    })?;
                    part.weight
                        .accumulate(|dw| kernel::backward_weight(dw, dy, width, x, k, rows, k, part.n));
                    if let Some(bias) = &part.bias {
                        bias.accumulate(|db| kernel::backward_bias(db, dy, width, rows, part.n));
                    }
                    col += part.n;
                }
                Ok::<_, candle_core::Error>(())
            })
        })???;
        rows_from_vec(dx, rows, k)
    }
}

impl CustomOp1 for Packed {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, k) = layout.shape().dims2()?;
        let y = self.forward(f32_of("linear", storage, layout)?, rows, k)?;
        Ok((CpuStorage::F32(y), Shape::from((rows, self.width()))))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.backward(x, dy)?))
    }
}

struct Residual(Packed);

impl CustomOp2 for Residual {
    fn name(&self) -> &'static str {
        "linear_residual"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        residual: &CpuStorage,
        residual_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, k) = layout.shape().dims2()?;
        let mut y = self.0.forward(f32_of("linear_residual", storage, layout)?, rows, k)?;
        let residual = f32_of("linear_residual", residual, residual_layout)?;
        if residual.len() != y.len() {
            bail!(
                "linear_residual: residual is {:?}, output is {rows}×{}",
                residual_layout.shape(),
                self.0.width()
            );
        }
        for (y, r) in y.iter_mut().zip(residual) {
            *y += r;
        }
        Ok((CpuStorage::F32(y), Shape::from((rows, self.0.width()))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        _residual: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(self.0.backward(x, dy)?), Some(dy.clone())))
    }
}
