//! RMS and layer norm.

use crate::device::{Arg, Array, Dtype, Gpu};

impl Gpu {
    /// `x · rstd · weight` in `dtype`, and `rstd [t]`.
    #[must_use]
    pub fn rms(&self, x: &Array, weight: &Array, eps: f32, dtype: Dtype) -> (Array, Array) {
        let h = weight.len();
        let t = x.len() / h.max(1);
        let (y, rstd) = (self.alloc(x.len(), dtype), self.alloc(t, Dtype::F32));
        let args = [y.arg(), rstd.pointer(), x.arg(), weight.arg(), Arg::Int(h as i32), Arg::Float(eps)];
        self.each_row("norms/rms", t, h, &args);
        (y, rstd)
    }

    /// `(x − mean) · rstd · weight + bias` in `dtype`, and `[2, t]` means and reciprocal deviations.
    #[must_use]
    pub fn layer(&self, x: &Array, weight: &Array, bias: &Array, eps: f32, dtype: Dtype) -> (Array, Array) {
        let h = weight.len();
        let t = x.len() / h.max(1);
        let (y, stats) = (self.alloc(x.len(), dtype), self.alloc(2 * t, Dtype::F32));
        let (h_arg, eps) = (Arg::Int(h as i32), Arg::Float(eps));
        let args = [y.arg(), stats.pointer(), x.arg(), weight.arg(), bias.arg(), h_arg, eps];
        self.each_row("norms/layer", t, h, &args);
        (y, stats)
    }

    /// Adds the gradient of the input of [`Self::rms`] to `dx`, that of the weight to `dw`.
    pub fn rms_back(
        &self,
        dx: &mut Array,
        dw: Option<&mut Array>,
        dy: &Array,
        x: &Array,
        rstd: &Array,
        weight: &Array,
    ) {
        let h = weight.len();
        let t = x.len() / h.max(1);
        let args = [dx.arg(), dy.arg(), x.arg(), rstd.pointer(), weight.arg(), Arg::Int(h as i32)];
        self.each_row("norms/rms_back", t, h, &args);
        if let Some(dw) = dw {
            self.column_sums(dw, dy, [0, h], Some((x, None, Some(rstd.place(0)))), t);
        }
    }

    /// As [`Self::rms_back`] for [`Self::layer`].
    pub fn layer_back(
        &self,
        dx: &mut Array,
        [dw, db]: [Option<&mut Array>; 2],
        dy: &Array,
        x: &Array,
        stats: &Array,
        weight: &Array,
    ) {
        let h = weight.len();
        let t = x.len() / h.max(1);
        let args = [dx.arg(), dy.arg(), x.arg(), stats.pointer(), weight.arg(), Arg::Int(h as i32)];
        self.each_row("norms/layer_back", t, h, &args);
        if let Some(dw) = dw {
            self.column_sums(dw, dy, [0, h], Some((x, Some(stats.place(0)), Some(stats.place(t)))), t);
        }
        if let Some(db) = db {
            self.column_sums(db, dy, [0, h], None, t);
        }
    }
}
