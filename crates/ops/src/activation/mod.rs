//! Activations: functions of each value, and SwiGLU.

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use omnigrpo_kernels::activation::Activation;

use crate::error::{Error, Result};
use crate::rows::Rows;
use crate::tape::{Op, Tape, Var};

/// Activations.
pub(crate) trait ActivationOps {
    /// Computes `act(x)`, `[t, i] → [t, i]`, or `[t, 2i] → [t, i]` for SwiGLU.
    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows;
    /// Replaces `x`, the input of an activation, with its gradient.
    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Nonlinearity);
    /// Returns `silu(gate) · up` of rows `[gate | up]` and replaces these with their gradient. The bits are those of both methods above.
    fn swiglu_both(&self, x: &mut Rows, dy: &Rows) -> Rows {
        let y = self.activation(x, Nonlinearity::SwiGlu);
        self.activation_back(x, dy, Nonlinearity::SwiGlu);
        y
    }
}

/// Nonlinear function of a feed-forward layer.
#[derive(Clone, Copy)]
pub(crate) enum Nonlinearity {
    /// A function of each value.
    Pointwise(Activation),
    /// `silu(gate) · up` of rows `[gate | up]`.
    SwiGlu,
}

impl Rows {
    /// Returns `act(x)`.
    pub fn activated(&self, act: Activation) -> Self {
        self.device().backend().activation(self, Nonlinearity::Pointwise(act))
    }

    /// Replaces the input of an activation with its gradient, given the gradient `dy` of the output.
    pub fn activation_back(&mut self, dy: &Self, act: Activation) -> Result<()> {
        self.check_activation("activation", dy, 1)?;
        self.device().backend().activation_back(self, dy, Nonlinearity::Pointwise(act));
        Ok(())
    }

    /// Returns [`Self::activated`], and replaces the input as [`Self::activation_back`] does.
    pub fn activated_and_back(&mut self, dy: &Self, act: Activation) -> Result<Self> {
        let y = self.activated(act);
        self.activation_back(dy, act)?;
        Ok(y)
    }

    /// Checks the gradient of an activation that has one output for each `inputs` inputs.
    fn check_activation(&self, op: &'static str, dy: &Self, inputs: usize) -> Result<()> {
        self.device().check(op, dy)?;
        match (dy.rows(), inputs * dy.cols()) == self.dims() {
            true => Ok(()),
            false => Err(Error::shape(op, format!("{:?}, gradient {:?}", self.dims(), dy.dims()))),
        }
    }

    /// Returns `silu(gate) · up` for rows `[gate | up]` of even width.
    pub fn swiglu(&self) -> Result<Self> {
        match self.cols().is_multiple_of(2) {
            true => Ok(self.device().backend().activation(self, Nonlinearity::SwiGlu)),
            false => Err(Error::shape("swiglu", format!("an odd width of {}", self.cols()))),
        }
    }

    /// Replaces rows `[gate | up]` with their gradient, given the gradient `dy` of the output.
    pub fn swiglu_back(&mut self, dy: &Self) -> Result<()> {
        self.check_activation("swiglu", dy, 2)?;
        self.device().backend().activation_back(self, dy, Nonlinearity::SwiGlu);
        Ok(())
    }

    /// Returns [`Self::swiglu`], and replaces the rows as [`Self::swiglu_back`] does.
    pub fn swiglu_and_back(&mut self, dy: &Self) -> Result<Self> {
        self.check_activation("swiglu", dy, 2)?;
        Ok(self.device().backend().swiglu_both(self, dy))
    }
}

struct Elementwise(Activation);

impl Op for Elementwise {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        Ok((x.activated(self.0), ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        let mut dx = x.clone();
        dx.activation_back(&dy, self.0)?;
        Ok([Some(dx)])
    }
}

impl Tape {
    /// Computes `act(x)`.
    ///
    /// # Errors
    /// Returns no error at present. The result type is that of all tape methods.
    pub fn activation(&mut self, x: &Var, act: Activation) -> Result<Var> {
        self.apply(Elementwise(act), [x])
    }
}
