//! Elementwise activations of the feed-forward layers.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use omnigrpo_kernels::activation::{self as kernel, Activation};
use omnigrpo_kernels::buffer;

use crate::slices::{f32_of, rows_from_vec, with_f32};

/// Applies `act` to every element of a `[t, n]` tensor.
///
/// # Errors
/// A tensor that is not contiguous f32 of rank 2.
pub fn activation(x: &Tensor, act: Activation) -> Result<Tensor> {
    x.apply_op1(Elementwise(act))
}

struct Elementwise(Activation);

impl CustomOp1 for Elementwise {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = f32_of("activation", storage, layout)?;
        Ok((CpuStorage::F32(kernel::forward(self.0, x)), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (rows, width) = x.dims2()?;
        let mut dx = with_f32(x, buffer::copy)?;
        let dy = dy.contiguous()?;
        with_f32(&dy, |dy| kernel::backward(self.0, &mut dx, dy))?;
        Ok(Some(rows_from_vec(dx, rows, width)?))
    }
}
