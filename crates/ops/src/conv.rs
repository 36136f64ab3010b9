//! Operations of convolutional projectors on channels-last rows: dense convolution over gathered patches, depthwise 3×3
//! convolution, pooling and interpolation, and two gates.

use std::sync::Arc;

use crate::device::Weighing;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::rows::Rows;
use crate::tape::{Op, Tape, Var};
use crate::{Linear, Param};

pub use omnigrpo_kernels::conv::{OUTSIDE, RowMix};

/// Weighted sums of rows, created once per pass.
pub type Mix = Host<RowMix>;

/// Patches of a convolution. Output row `r` reads the input rows `sources[r · taps..(r + 1) · taps]`, where [`OUTSIDE`] means
/// zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// Input row of each tap, or [`OUTSIDE`].
    pub sources: Vec<u32>,
    /// Number of positions in a window.
    pub taps: usize,
}

impl Patches {
    /// Returns the number of output rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sources.len() / self.taps.max(1)
    }

    fn reads(&self) -> usize {
        self.sources.iter().filter(|&&s| s != OUTSIDE).max().map_or(0, |&s| s as usize + 1)
    }
}

struct Convolution {
    layer: Linear,
    patches: Arc<Patches>,
}

impl Op for Convolution {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        self.layer.weight().usable(x.device())?;
        let Patches { sources, taps } = &*self.patches;
        let op = || format!("convolution {}", self.layer.weight().name());
        if *taps == 0 || !sources.len().is_multiple_of(*taps) || self.patches.reads() > x.rows() {
            let reads = self.patches.reads();
            let what =
                format!("{} sources under {taps} taps, reading {reads} of {} rows", sources.len(), x.rows());
            return Err(Error::shape(op(), what));
        }
        if self.layer.k() != x.cols() * taps {
            let (n, k) = (self.layer.n(), self.layer.k());
            let what = format!("input has {} channels under {taps} taps, the weight is {n}×{k}", x.cols());
            return Err(Error::shape(op(), what));
        }
        Ok((x.device().backend().convolution(x, &self.layer, &self.patches), ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        Ok([Some(x.device().backend().convolution_back(x, &dy, &self.layer, &self.patches))])
    }
}

struct Depthwise {
    weight: Arc<Param>,
    side: [usize; 2],
}

impl Op for Depthwise {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        self.weight.usable(x.device())?;
        let [h, w] = self.side;
        if h * w == 0 || !x.rows().is_multiple_of(h * w) || self.weight.len() != 9 * x.cols() {
            let (dims, len) = (x.dims(), self.weight.len());
            let what = format!("input is {dims:?} for pictures of {h}×{w}, the weight has {len} elements");
            return Err(Error::shape(format!("depthwise {}", self.weight.name()), what));
        }
        Ok((x.device().backend().depthwise(x, &self.weight, self.side), ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        Ok([Some(x.device().backend().depthwise_back(x, &dy, &self.weight, self.side))])
    }
}

struct MixRows(Arc<Mix>);

impl Op for MixRows {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        if self.0.reads() > x.rows() || !self.0.is_sound() {
            return Err(Error::shape("mix", format!("reads {} of {} rows", self.0.reads(), x.rows())));
        }
        Ok((x.device().backend().mix(x, &self.0), ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        Ok([Some(dy.device().backend().mix_back(&dy, &self.0, x.rows()))])
    }
}

struct Gate;

impl Op<2> for Gate {
    type Kept = ();

    fn forward(&self, [x, gate]: [&Rows; 2]) -> Result<(Rows, ())> {
        x.device().check("gate", gate)?;
        if gate.cols() != x.cols() || gate.rows() == 0 || !x.rows().is_multiple_of(gate.rows()) {
            return Err(Error::shape("gate", format!("input is {:?}, gate is {:?}", x.dims(), gate.dims())));
        }
        Ok((x.device().backend().weigh(x, gate, Weighing::Gate), ()))
    }

    fn backward(&self, [x, gate]: [&Rows; 2], (): (), dy: Rows, _: [bool; 2]) -> Result<[Option<Rows>; 2]> {
        Ok(x.device().backend().weigh_back(x, gate, &dy, Weighing::Gate).map(Some))
    }
}

struct Blend;

impl Op<2> for Blend {
    type Kept = ();

    fn forward(&self, [x, logits]: [&Rows; 2]) -> Result<(Rows, ())> {
        x.device().check("blend", logits)?;
        let (one, k) = logits.dims();
        if one != 1 || k == 0 || !x.rows().is_multiple_of(k) {
            let what =
                format!("input is {:?}, logits are {one}×{k}; expected one row and k × t rows", x.dims());
            return Err(Error::shape("blend", what));
        }
        Ok((x.device().backend().weigh(x, logits, Weighing::Blend), ()))
    }

    fn backward(&self, [x, logits]: [&Rows; 2], (): (), dy: Rows, _: [bool; 2]) -> Result<[Option<Rows>; 2]> {
        Ok(x.device().backend().weigh_back(x, logits, &dy, Weighing::Blend).map(Some))
    }
}

impl Tape {
    /// Computes a dense convolution over any number of dimensions: `[t, c] → [patches.rows(), n]`. The layer's weight has the
    /// published shape `[n, c, taps…]` and is read as `[n, c · taps]`. The backward pass gathers patches again, so they are not
    /// stored.
    pub fn convolution(&mut self, x: &Var, layer: &Linear, patches: &Arc<Patches>) -> Result<Var> {
        self.apply(Convolution { layer: layer.clone(), patches: Arc::clone(patches) }, [x])
    }

    /// Computes a depthwise 3×3 convolution with stride 1, zero padding 1 and no bias, for images of `side = [height, width]`:
    /// `[n · h · w, c] → [n · h · w, c]`. `weight` has the published shape `[c, 1, 3, 3]`.
    pub fn depthwise3(&mut self, x: &Var, weight: &Arc<Param>, side: [usize; 2]) -> Result<Var> {
        self.apply(Depthwise { weight: Arc::clone(weight), side }, [x])
    }

    /// Computes weighted sums of rows, `[t, c] → [mix.len(), c]`, for pooling, interpolation and selection.
    pub fn mix(&mut self, x: &Var, mix: &Arc<Mix>) -> Result<Var> {
        self.apply(MixRows(Arc::clone(mix)), [x])
    }

    /// Computes `x · sigmoid(gate)`. Each row of `gate [n, c]` applies to `s` consecutive rows of `x [n · s, c]`.
    pub fn gate(&mut self, x: &Var, gate: &Var) -> Result<Var> {
        self.apply(Gate, [x, gate])
    }

    /// Computes `Σ softmax(logits)ᵢ · xᵢ`. `x [k · t, c]` contains `k` alternatives of `t` rows; `logits` is `[1, k]`.
    pub fn blend(&mut self, x: &Var, logits: &Var) -> Result<Var> {
        self.apply(Blend, [x, logits])
    }
}
