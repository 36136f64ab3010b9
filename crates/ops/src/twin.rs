//! The f64 twin, a reference for tests: plain loops over the formulas of `omnigrpo_kernels::twin`.

use std::sync::Arc;

use omnigrpo_kernels::Mat;

use crate::cpu::wide;
use crate::device::Device;
use crate::param::Param;
use crate::rows::{Data, Rows};

pub(crate) struct Twin;

impl Rows {
    /// Returns the values of rows on the twin.
    pub(crate) fn twin(&self) -> &[f64] {
        match &self.data {
            Data::Twin(data) => data,
            _ => &[],
        }
    }

    /// Returns the values for writing. Shared values are copied first.
    pub(crate) fn twin_mut(&mut self) -> &mut [f64] {
        match &mut self.data {
            Data::Twin(data) => Arc::make_mut(data).as_mut_slice(),
            _ => &mut [],
        }
    }

    pub(crate) fn mat64(&self) -> Mat<'_, f64> {
        Mat::new(self.twin(), self.rows(), self.cols())
    }
}

pub(crate) fn values(param: &Param) -> Vec<f64> {
    wide(param.read().stored())
}

/// Adds `gradient` to the gradient of a weight if the weight is trained.
pub(crate) fn accumulate(param: &Param, gradient: &[f64]) {
    if let Some(mut guard) = param.gradient(Device::Twin) {
        guard.twin().iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
    }
}
