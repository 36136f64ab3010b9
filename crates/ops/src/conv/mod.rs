//! Convolutions on channels-last rows: dense over gathered patches, and depthwise 3×3.

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::rows::Rows;
use crate::tape::{Op, Tape, Var};
use crate::{Linear, Param};

pub use omnigrpo_kernels::conv::OUTSIDE;

/// Convolutions over channels-last rows.
pub(crate) trait ConvOps {
    /// Computes a convolution over gathered patches.
    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows;
    /// Returns the gradient of the convolution's input, and adds the gradients of weight and bias to their buffers.
    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows;
    /// Computes a depthwise 3×3 convolution of images of `side = [height, width]`.
    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows;
    /// Returns the gradient of the convolution's input, and adds the gradient of the weight to its buffer.
    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows;
}

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
}
