//! RMS and layer normalisation over the last axis.

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use std::sync::Arc;

use crate::Param;
use crate::error::{Error, Result};
use crate::rows::Rows;
use crate::tape::{Op, Tape, Var};

/// Normalisation.
pub(crate) trait NormOps {
    /// Returns the normalised rows and the statistics for the backward pass.
    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows);
    /// Adds the gradient of the input to `dx`, and the gradients of weight and bias to their buffers.
    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm);
}

/// A normalisation layer.
#[derive(Clone, Debug)]
pub enum Norm {
    /// RMS normalisation: `y = x / sqrt(mean(x²) + eps) · weight`.
    Rms {
        /// Scale `[h]`.
        weight: Arc<Param>,
        /// Constant added to the mean square.
        eps: f32,
    },
    /// RMS normalisation with a weight around zero: `y = x / sqrt(mean(x²) + eps) · (1 + weight)`. The sum is formed in f32, whatever
    /// the dtype of the weight.
    AroundOne {
        /// Scale `[h]`, less one.
        weight: Arc<Param>,
        /// Constant added to the mean square.
        eps: f32,
    },
    /// Layer normalisation with biased variance: `y = (x − mean) / sqrt(var + eps) · weight + bias`.
    Layer {
        /// Scale `[h]`.
        weight: Arc<Param>,
        /// Shift `[h]`.
        bias: Arc<Param>,
        /// Constant added to the variance.
        eps: f32,
    },
}

impl Norm {
    pub(crate) fn weight(&self) -> &Param {
        match self {
            Self::Rms { weight, .. } | Self::AroundOne { weight, .. } | Self::Layer { weight, .. } => weight,
        }
    }

    /// Returns scale and shift.
    pub fn params(&self) -> impl Iterator<Item = &Arc<Param>> {
        let (weight, bias) = match self {
            Self::Rms { weight, .. } | Self::AroundOne { weight, .. } => (weight, None),
            Self::Layer { weight, bias, .. } => (weight, Some(bias)),
        };
        [weight].into_iter().chain(bias)
    }

    /// Returns the width of the rows that the layer normalises.
    pub fn width(&self) -> usize {
        self.weight().len()
    }

    /// Normalises `[t, h] → [t, h]` and returns the statistics for the backward pass. The statistics are the reciprocal
    /// deviations `[1, t]`; for layer norm, they are `[2, t]`, with the means first.
    pub fn forward(&self, x: &Rows) -> Result<(Rows, Rows)> {
        self.check(x)?;
        Ok(x.device().backend().norm(x, self))
    }

    /// Adds the gradient of the input to `dx [t, h]`, and the gradients of weight and bias to their buffers. `x` and `stats` are
    /// the input and the statistics of [`Self::forward`].
    pub fn backward(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows) -> Result<()> {
        self.check(x)?;
        for operand in [&*dx, stats, dy] {
            x.device().check("norm backward", operand)?;
        }
        if dx.dims() != x.dims() || dy.dims() != x.dims() {
            let what = format!("input {:?}, gradients {:?} and {:?}", x.dims(), dx.dims(), dy.dims());
            return Err(Error::shape(format!("norm {}", self.weight().name()), what));
        }
        x.device().backend().norm_back(dx, x, stats, dy, self);
        Ok(())
    }

    fn check(&self, x: &Rows) -> Result<()> {
        self.weight().usable(x.device())?;
        if x.cols() != self.width() {
            let what = format!("input is {}×{}, weight has {}", x.rows(), x.cols(), self.width());
            return Err(Error::shape(format!("norm {}", self.weight().name()), what));
        }
        Ok(())
    }
}

impl Op for Norm {
    type Kept = Rows;

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, Rows)> {
        self.forward(x)
    }

    fn backward(&self, [x]: [&Rows; 1], stats: Rows, dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        let mut dx = Rows::zeros(x.device(), x.rows(), x.cols());
        self.backward(&mut dx, x, &stats, &dy)?;
        Ok([Some(dx)])
    }
}

impl Tape {
    /// Normalises `[t, h] → [t, h]`.
    pub fn norm(&mut self, x: &Var, norm: &Norm) -> Result<Var> {
        self.apply(norm.clone(), [x])
    }
}
