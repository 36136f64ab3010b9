//! RMS and layer normalisation over the last axis.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use omnigrpo_kernels::buffer;
use omnigrpo_kernels::norm as kernel;

use crate::Param;
use crate::slices::{f32_of, rows_from_vec, with_f32};

/// A normalisation layer.
#[derive(Clone, Debug)]
pub enum Norm {
    /// `y = x / sqrt(mean(x²) + eps) · weight`.
    Rms {
        /// `[h]`
        weight: Arc<Param>,
        /// Added to the mean square.
        eps: f32,
    },
    /// `y = (x − mean) / sqrt(var + eps) · weight + bias`, biased variance.
    Layer {
        /// `[h]`
        weight: Arc<Param>,
        /// `[h]`
        bias: Arc<Param>,
        /// Added to the variance.
        eps: f32,
    },
}

/// `[t, h] → [t, h]`. Gradient: input, weight, bias.
///
/// # Errors
/// A width that differs from the weight's.
pub fn norm(x_th: &Tensor, norm: &Norm) -> Result<Tensor> {
    x_th.apply_op1(NormOp { norm: norm.clone(), stats: Mutex::new(Vec::new()) })
}

impl Norm {
    fn weight(&self) -> &Param {
        match self {
            Self::Rms { weight, .. } | Self::Layer { weight, .. } => weight,
        }
    }

    /// `[rows, h] → [rows, h]` over plain slices, and what the backward pass needs of it: `rstd` per row, for layer norm
    /// with the means in front.
    ///
    /// # Errors
    /// A length that is not whole rows of the weight's.
    pub fn forward(&self, x: &[f32], rows: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        let dim = self.weight().len();
        if x.len() != rows * dim {
            bail!("norm {}: {} elements for {rows} rows of {dim}", self.weight().name(), x.len());
        }
        Ok(match self {
            Self::Rms { weight, eps } => {
                let mut rstd = vec![0.0; rows];
                let y = weight.with_f32(|w| kernel::rms_forward(&mut rstd, x, w, rows, dim, *eps))?;
                (y, rstd)
            }
            Self::Layer { weight, bias, eps } => {
                let mut stats = vec![0.0; 2 * rows];
                let (mean, rstd) = stats.split_at_mut(rows);
                let y = weight.with_f32(|w| {
                    bias.with_f32(|b| kernel::layer_forward(mean, rstd, x, w, b, rows, dim, *eps))
                })??;
                (y, stats)
            }
        })
    }

    /// Adds the gradient of the input to `dx [rows, h]`, and those of weight and bias to their buffers. `x` and `stats`
    /// are those of [`Self::forward`].
    ///
    /// # Errors
    /// A device without kernels.
    pub fn backward(&self, dx: &mut [f32], x: &[f32], stats: &[f32], dy: &[f32], rows: usize) -> Result<()> {
        let dim = self.weight().len();
        if [x.len(), dy.len(), dx.len()] != [rows * dim; 3] {
            let weight = self.weight().name();
            bail!(
                "norm {weight}: {}, {} and {} elements for {rows} rows of {dim}",
                x.len(),
                dy.len(),
                dx.len()
            );
        }
        match self {
            Self::Rms { weight, .. } => weight.with_f32(|w| {
                let mut run = |dw: Option<&mut [f32]>| {
                    kernel::rms_backward(dx, dw, dy, x, w, stats, rows, dim);
                };
                if weight.trainable() { weight.accumulate(|dw| run(Some(dw))) } else { run(None) }
            })?,
            Self::Layer { weight, bias, .. } => weight.with_f32(|w| {
                let (mean, rstd) = stats.split_at(rows);
                let mut dw = weight.trainable().then(|| vec![0.0; dim]);
                let mut db = bias.trainable().then(|| vec![0.0; dim]);
                kernel::layer_backward(
                    dx,
                    dw.as_deref_mut(),
                    db.as_deref_mut(),
                    dy,
                    x,
                    w,
                    mean,
                    rstd,
                    rows,
                    dim,
                );
                for (param, grad) in [(weight, dw), (bias, db)] {
                    if let Some(grad) = grad {
                        param.accumulate(|sum| sum.iter_mut().zip(grad).for_each(|(s, g)| *s += g));
                    }
                }
            })?,
        }
        Ok(())
    }
}

struct NormOp {
    norm: Norm,
    /// Of [`Norm::forward`], kept for the backward pass.
    stats: Mutex<Vec<f32>>,
}

impl CustomOp1 for NormOp {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, dim) = layout.shape().dims2()?;
        if self.norm.weight().len() != dim {
            let weight = self.norm.weight();
            bail!("norm {}: input is {rows}×{dim}, weight has {}", weight.name(), weight.len());
        }
        let (y, stats) = self.norm.forward(f32_of("norm", storage, layout)?, rows)?;
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x_th: &Tensor, _y: &Tensor, dy_th: &Tensor) -> Result<Option<Tensor>> {
        let (rows, dim) = x_th.dims2()?;
        let stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        let dy_th = dy_th.contiguous()?;
        let mut dx = buffer::zeros(rows * dim);
        with_f32(x_th, |x| with_f32(&dy_th, |dy| self.norm.backward(&mut dx, x, &stats, dy, rows)))???;
        Ok(Some(rows_from_vec(dx, rows, dim)?))
    }
}
