//! RMS and layer normalisation over the last axis.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
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

struct NormOp {
    norm: Norm,
    /// `rstd` per row (and the mean in front of it for layer norm), kept for the backward pass.
    stats: Mutex<Vec<f32>>,
}

impl NormOp {
    fn weight(&self) -> &Param {
        match &self.norm {
            Norm::Rms { weight, .. } | Norm::Layer { weight, .. } => weight,
        }
    }
}

impl CustomOp1 for NormOp {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, dim) = layout.shape().dims2()?;
        if self.weight().len() != dim {
            bail!("norm {}: input is {rows}×{dim}, weight has {}", self.weight().name(), self.weight().len());
        }
        let x = f32_of("norm", storage, layout)?;
        let mut y = vec![0.0; x.len()];
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        match &self.norm {
            Norm::Rms { weight, eps } => {
                stats.resize(rows, 0.0);
                weight.with_f32(|w| kernel::rms_forward(&mut y, &mut stats, x, w, rows, dim, *eps))?;
            }
            Norm::Layer { weight, bias, eps } => {
                stats.resize(2 * rows, 0.0);
                let (mean, rstd) = stats.split_at_mut(rows);
                weight.with_f32(|w| {
                    bias.with_f32(|b| kernel::layer_forward(&mut y, mean, rstd, x, w, b, rows, dim, *eps))
                })??;
            }
        }
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x_th: &Tensor, _y: &Tensor, dy_th: &Tensor) -> Result<Option<Tensor>> {
        let (rows, dim) = x_th.dims2()?;
        let mut dx = vec![0.0; rows * dim];
        let stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        let dy_th = dy_th.contiguous()?;
        with_f32(x_th, |x| {
            with_f32(&dy_th, |dy| match &self.norm {
                Norm::Rms { weight, .. } => weight.with_f32(|w| {
                    let mut done = false;
                    weight.accumulate(|dw| {
                        kernel::rms_backward(&mut dx, Some(dw), dy, x, w, &stats, rows, dim);
                        done = true;
                    });
                    if !done {
                        kernel::rms_backward(&mut dx, None, dy, x, w, &stats, rows, dim);
                    }
                }),
                Norm::Layer { weight, bias, .. } => weight.with_f32(|w| {
                    let (mean, rstd) = stats.split_at(rows);
                    let mut dw = weight.trainable().then(|| vec![0.0; dim]);
                    let mut db = bias.trainable().then(|| vec![0.0; dim]);
                    kernel::layer_backward(
                        &mut dx,
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
                }),
            })
        })???;
        Ok(Some(rows_from_vec(dx, rows, dim)?))
    }
}
