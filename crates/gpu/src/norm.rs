//! RMS and layer norm.

use crate::device::{Array, Dtype, Gpu};
use crate::launchers::norms;

impl Gpu {
    /// Returns `x · rstd · weight` in `dtype`, and `rstd` as `[t]`.
    pub fn rms(&self, x: &Array, weight: &Array, eps: f32, dtype: Dtype) -> (Array, Array) {
        let h = weight.len();
        let t = x.len() / h.max(1);
        let (y, rstd) = (self.alloc(x.len(), dtype), self.alloc(t, Dtype::F32));
        self.each_row(norms::rms(&y, &rstd, x, weight, h, eps), t, h);
        (y, rstd)
    }

    /// Returns `(x − mean) · rstd · weight + bias` in `dtype`, and statistics `[2, t]`: the means and the reciprocal standard
    /// deviations.
    pub fn layer(&self, x: &Array, weight: &Array, bias: &Array, eps: f32, dtype: Dtype) -> (Array, Array) {
        let h = weight.len();
        let t = x.len() / h.max(1);
        let (y, stats) = (self.alloc(x.len(), dtype), self.alloc(2 * t, Dtype::F32));
        self.each_row(norms::layer(&y, &stats, x, weight, bias, h, eps), t, h);
        (y, stats)
    }

    /// Adds the gradient of [`Self::rms`] with respect to its input to `dx`, and leaves the sum in bf16, too, if `rounds` is true.
    pub fn rms_back(
        &self,
        dx: &mut Array,
        dy: &Array,
        x: &Array,
        rstd: &Array,
        weight: &Array,
        rounds: bool,
    ) {
        let h = weight.len();
        let low = rounds.then(|| self.alloc(dx.len(), Dtype::Bf16));
        self.each_row(norms::rms_back(&*dx, low.as_ref(), dy, x, rstd, weight, h), x.len() / h.max(1), h);
        dx.set_rounded(low);
    }

    /// Adds the gradient of [`Self::layer`] with respect to its input to `dx`, as [`Self::rms_back`] does.
    pub fn layer_back(
        &self,
        dx: &mut Array,
        dy: &Array,
        x: &Array,
        stats: &Array,
        weight: &Array,
        rounds: bool,
    ) {
        let h = weight.len();
        let low = rounds.then(|| self.alloc(dx.len(), Dtype::Bf16));
        self.each_row(norms::layer_back(&*dx, low.as_ref(), dy, x, stats, weight, h), x.len() / h.max(1), h);
        dx.set_rounded(low);
    }

    /// Adds the gradient of a norm with respect to its weight to `dw`. The means (absent for RMS norm) and the reciprocal
    /// standard deviations are each given as an array and the index of their first element.
    pub fn norm_weight(
        &self,
        dw: &mut Array,
        dy: &Array,
        x: &Array,
        mean: Option<(&Array, usize)>,
        rstd: (&Array, usize),
    ) {
        let h = dw.len();
        let mean = mean.map(|(array, first)| array.element(first)).unwrap_or_default();
        let by = (x.into(), mean, rstd.0.element(rstd.1));
        self.column_sums(dw, dy, [0, h], by, x.len() / h.max(1));
    }
}
