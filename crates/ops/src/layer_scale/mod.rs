//! Residuals that are added after a scale for each column (`LayerScale` in timm).

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use crate::error::{Error, Result};
use crate::param::Param;
use crate::rows::Rows;

/// The products of rows `[t, n]` and a scale `[n]`.
pub(crate) trait LayerScaleOps {
    /// Computes `residual + x · scale`, with one scale per column.
    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows;
    /// Returns the gradient of [`Self::scale_onto`] with respect to `x`, and adds the gradient of the scale to its buffer.
    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows;
}

impl Rows {
    /// Returns `residual + self · scale`, with one factor per column in `scale [cols]`.
    pub fn scaled_onto(&self, residual: &Self, scale: &Param) -> Result<Self> {
        scale.usable(self.device())?;
        self.device().check("scaled residual", residual)?;
        if residual.dims() != self.dims() || scale.len() != self.cols() {
            let what = format!("{:?} onto {:?}, scale {}", self.dims(), residual.dims(), scale.len());
            return Err(Error::shape("scaled residual", what));
        }
        Ok(self.device().backend().scale_onto(self, residual, scale))
    }

    /// Returns the gradient of [`Self::scaled_onto`] with respect to `self`, and adds the gradient of the scale to its buffer.
    /// The gradient with respect to the residual is `dy`.
    pub fn scaled_onto_back(&self, dy: &Self, scale: &Param) -> Result<Self> {
        scale.usable(self.device())?;
        self.device().check("scaled residual", dy)?;
        if dy.dims() != self.dims() || scale.len() != self.cols() {
            let what = format!("{:?}, gradient {:?}, scale {}", self.dims(), dy.dims(), scale.len());
            return Err(Error::shape("scaled residual", what));
        }
        Ok(self.device().backend().scale_onto_back(self, dy, scale))
    }
}
