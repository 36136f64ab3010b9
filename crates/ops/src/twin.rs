//! The f64 twin, a reference for tests: plain loops over the formulas of `omnigrpo_kernels::twin`.

use std::sync::Arc;

use omnigrpo_kernels::{Mat, Stored};

use crate::device::Device;
use crate::param::Param;
use crate::rows::{Data, Rows, misplaced};

pub(crate) struct Twin;

impl Rows {
    pub(crate) fn on_twin(data: Vec<f64>, rows: usize, cols: usize) -> Self {
        debug_assert_eq!(data.len(), rows * cols);
        Self::over(Data::Twin(Arc::new(data)), rows, cols)
    }

    /// Returns the values of rows on the twin.
    pub(crate) fn twin(&self) -> &[f64] {
        let device = self.device();
        match &self.data {
            Data::Twin(data) => data,
            _ => misplaced(device, "twin"),
        }
    }

    /// Returns the values for writing. Shared values are copied first.
    pub(crate) fn twin_mut(&mut self) -> &mut [f64] {
        let device = self.device();
        match &mut self.data {
            Data::Twin(data) => Arc::make_mut(data).as_mut_slice(),
            _ => misplaced(device, "twin"),
        }
    }

    pub(crate) fn mat64(&self) -> Mat<'_, f64> {
        Mat::new(self.twin(), self.rows(), self.cols())
    }
}

/// Returns the values of a weight as f64, in row-major order.
fn wide(weight: Stored) -> Vec<f64> {
    match weight {
        Stored::F32(data) => data.iter().map(|&x| f64::from(x)).collect(),
        Stored::Bf16(data) => data.iter().map(|x| x.to_f64()).collect(),
        Stored::Quantised(data) => {
            let mut f32s = vec![0.0; data.len()];
            data.widen(&mut f32s);
            f32s.into_iter().map(f64::from).collect()
        }
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
