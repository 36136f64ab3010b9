//! Learnt scales per column.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use omnigrpo_kernels::buffer;
use omnigrpo_kernels::scale as kernel;

use crate::Param;
use crate::slices::{f32_of, rows_from_vec, with_f32};

/// `residual + x · scale`, `[t, h]` and `[t, h]` → `[t, h]`, the scale `[h]` (CaiT's layer scale, arXiv 2103.17239).
/// Gradient: input, residual, scale.
///
/// # Errors
/// Shapes that differ.
pub fn scale_residual(x_th: &Tensor, residual_th: &Tensor, scale: &Arc<Param>) -> Result<Tensor> {
    x_th.apply_op2(residual_th, ScaleResidual(Arc::clone(scale)))
}

struct ScaleResidual(Arc<Param>);

impl CustomOp2 for ScaleResidual {
    fn name(&self) -> &'static str {
        "scale_residual"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        residual: &CpuStorage,
        residual_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, dim) = x_layout.shape().dims2()?;
        if residual_layout.shape() != x_layout.shape() || self.0.len() != dim {
            bail!(
                "scale_residual {}: input is {rows}×{dim}, residual is {:?}, scale has {}",
                self.0.name(),
                residual_layout.shape(),
                self.0.len()
            );
        }
        let x = f32_of("scale_residual", x, x_layout)?;
        let residual = f32_of("scale_residual", residual, residual_layout)?;
        let mut y = buffer::zeros(x.len());
        self.0.with_f32(|scale| kernel::residual_forward(&mut y, x, residual, scale))?;
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        _residual: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (rows, dim) = x.dims2()?;
        let dy = dy.contiguous()?;
        let mut dx = buffer::zeros(rows * dim);
        with_f32(x, |x| {
            with_f32(&dy, |dy| {
                self.0.with_f32(|scale| kernel::residual_backward_input(&mut dx, dy, scale))?;
                self.0.accumulate(|dscale| kernel::residual_backward_scale(dscale, dy, x));
                Ok::<_, candle_core::Error>(())
            })
        })???;
        Ok((Some(rows_from_vec(dx, rows, dim)?), Some(dy)))
    }
}
