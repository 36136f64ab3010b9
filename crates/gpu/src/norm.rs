//! RMS and layer norm.

use crate::device::{Arg, Array, Dtype, Gpu};

impl Gpu {
    /// Returns `x · rstd · weight` in `dtype`, and `rstd` as `[t]`.
    #[must_use]
    pub fn rms(&self, x: &Array, weight: &Array, eps: f32, dtype: Dtype) -> (Array, Array) {
        let h = weight.len();
        let t = x.len() / h.max(1);
        let (y, rstd) = (self.alloc(x.len(), dtype), self.alloc(t, Dtype::F32));
        let args = [y.arg(), rstd.pointer(), x.arg(), weight.arg(), Arg::Size(h), Arg::Float(eps)];
        self.each_row("norms/rms", t, h, &args);
        (y, rstd)
    }

    /// Returns `(x − mean) · rstd · weight + bias` in `dtype`, and statistics `[2, t]`: the means and the reciprocal standard
    /// deviations.
    #[must_use]
    pub fn layer(&self, x: &Array, weight: &Array, bias: &Array, eps: f32, dtype: Dtype) -> (Array, Array) {
        let h = weight.len();
        let t = x.len() / h.max(1);
        let (y, stats) = (self.alloc(x.len(), dtype), self.alloc(2 * t, Dtype::F32));
        let (h_arg, eps) = (Arg::Size(h), Arg::Float(eps));
        let args = [y.arg(), stats.pointer(), x.arg(), weight.arg(), bias.arg(), h_arg, eps];
        self.each_row("norms/layer", t, h, &args);
        (y, stats)
    }

    /// Adds the gradient of [`Self::rms`] with respect to its input to `dx`.
    pub fn rms_back(&self, dx: &mut Array, dy: &Array, x: &Array, rstd: &Array, weight: &Array) {
        self.norm_back("norms/rms_back", dx, dy, x, rstd, weight);
    }

    /// Adds the gradient of [`Self::layer`] with respect to its input to `dx`.
    pub fn layer_back(&self, dx: &mut Array, dy: &Array, x: &Array, stats: &Array, weight: &Array) {
        self.norm_back("norms/layer_back", dx, dy, x, stats, weight);
    }

    fn norm_back(
        &self,
        kernel: &'static str,
        dx: &mut Array,
        dy: &Array,
        x: &Array,
        stats: &Array,
        weight: &Array,
    ) {
        let h = weight.len();
        let args = [dx.arg(), dy.arg(), x.arg(), stats.pointer(), weight.arg(), Arg::Size(h)];
        self.each_row(kernel, x.len() / h.max(1), h, &args);
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
        let place = |(array, first): (&Array, usize)| array.place(first);
        self.column_sums(dw, dy, [0, h], Some((x, mean.map(place), Some(place(rstd)))), x.len() / h.max(1));
    }
}
