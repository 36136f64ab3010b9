//! The CPU backend: f32 in main memory, with the kernels of `omnigrpo-kernels`.

use std::borrow::Cow;
use std::sync::Arc;

use omnigrpo_kernels::linear::{Gradient, Layer};
use omnigrpo_kernels::{Mat, MatMut, Weight, buffer, linear as product};

use crate::device::Device;
use crate::linear::Linear;
use crate::param::{Param, WeightGuard};
use crate::rows::{Data, Rows, misplaced};

pub(crate) struct Cpu;

impl Rows {
    /// Returns the values of rows on the CPU.
    pub(crate) fn cpu(&self) -> &[f32] {
        let device = self.device();
        match &self.data {
            Data::Cpu(data) => data,
            _ => misplaced(device, "cpu"),
        }
    }

    /// Returns the values for writing. Shared values are copied first.
    pub(crate) fn cpu_mut(&mut self) -> &mut [f32] {
        let device = self.device();
        match &mut self.data {
            Data::Cpu(data) => {
                if Arc::get_mut(data).is_none() {
                    *data = Arc::new(buffer::copy(data));
                }
                Arc::make_mut(data).as_mut_slice()
            }
            _ => misplaced(device, "cpu"),
        }
    }

    /// Views rows on the CPU as the kernels' matrix.
    pub(crate) fn mat(&self) -> Mat<'_> {
        Mat::new(self.cpu(), self.rows(), self.cols())
    }

    /// Views rows on the CPU as the kernels' mutable matrix.
    pub(crate) fn mat_mut(&mut self) -> MatMut<'_> {
        let (rows, cols) = self.dims();
        MatMut::new(self.cpu_mut(), rows, cols)
    }
}

/// Runs `f` on layers, converted to the kernels' structures.
pub(crate) fn with_layers<R>(layers: &[Linear], f: impl FnOnce(&[Layer]) -> R) -> R {
    let guards: Vec<(WeightGuard, Option<WeightGuard>)> =
        layers.iter().map(|l| (l.weight().read(), l.bias().map(|bias| bias.read()))).collect();
    let biases: Vec<Option<Cow<[f32]>>> =
        guards.iter().map(|(_, bias)| bias.as_ref().map(WeightGuard::f32)).collect();
    let parts = layers.iter().zip(&guards).zip(&biases);
    let layers: Vec<Layer> =
        parts.map(|((l, (w, _)), bias)| Layer { w: w.weight(l.n(), l.k()), bias: bias.as_deref() }).collect();
    f(&layers)
}

/// Runs `f` on a table with rows of width `h`.
pub(crate) fn with_table<R>(table: &Param, h: usize, f: impl FnOnce(Weight) -> R) -> R {
    f(table.read().weight(table.len() / h.max(1), h))
}

/// Runs `f` on the gradient of a weight if the weight is trained.
pub(crate) fn accumulate(param: &Param, f: impl FnOnce(&mut [f32])) {
    if let Some(mut gradient) = param.gradient(Device::Cpu) {
        f(gradient.cpu());
    }
}

/// Computes `w [n, k] += s · leftᵀ right`, where both factors have `rank` rows.
pub(crate) fn merge(w: &mut [f32], left: &[f32], right: &[f32], rank: usize, scale: f32) {
    let (n, k) = (left.len() / rank, right.len() / rank);
    let left: Vec<f32> = left.iter().map(|x| x * scale).collect();
    let dw = MatMut::new(w, n, k);
    let (left, right) = (Mat::new(&left, rank, n), Mat::new(right, rank, k));
    product::backward_weight(left, right, &mut [Gradient { dw, col: 0, rounding: None }]);
}
