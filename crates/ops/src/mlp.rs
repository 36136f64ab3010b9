//! Elementwise operations: activations, sums and scaled residuals. Also operations that select and rearrange rows.

use std::sync::Arc;

use omnigrpo_kernels::activation::Activation;

use crate::error::{Error, Result};
use crate::param::Param;
use crate::rows::{Index, Rows};
use crate::tape::{Op, Tape, Var};

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
    #[must_use]
    pub fn activated(&self, act: Activation) -> Self {
        self.device().backend().activation(self, Nonlinearity::Pointwise(act))
    }

    /// Replaces the input of an activation with its gradient, given the gradient `dy` of the output.
    pub fn activation_back(&mut self, dy: &Self, act: Activation) -> Result<()> {
        self.device().check("activation", dy)?;
        if dy.dims() != self.dims() {
            return Err(Error::shape("activation", format!("{:?}, gradient {:?}", self.dims(), dy.dims())));
        }
        self.device().backend().activation_back(self, dy, Nonlinearity::Pointwise(act));
        Ok(())
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
        self.device().check("swiglu", dy)?;
        if (dy.rows(), 2 * dy.cols()) != self.dims() {
            return Err(Error::shape("swiglu", format!("{:?}, gradient {:?}", self.dims(), dy.dims())));
        }
        self.device().backend().activation_back(self, dy, Nonlinearity::SwiGlu);
        Ok(())
    }

    /// Returns `residual + self · scale`, with one factor per column in `scale [cols]`.
    pub fn scaled_onto(&self, residual: &Self, scale: &Param) -> Result<Self> {
        scale.usable(self.device())?;
        self.device().check("scaled residual", residual)?;
        if residual.dims() != self.dims() || scale.len() != self.cols() {
            let what = format!("{:?} onto {:?}, scale {}", self.dims(), residual.dims(), scale.len());
            return Err(Error::shape("scaled residual", what));
        }
        Ok(self.device().backend().scale_onto(self, residual, scale))
    }

    /// Returns the gradient of [`Self::scaled_onto`] with respect to `self`, and adds the gradient of the scale to its buffer.
    /// The gradient with respect to the residual is `dy`.
    pub fn scaled_onto_back(&self, dy: &Self, scale: &Param) -> Result<Self> {
        self.device().check("scaled residual", dy)?;
        if dy.dims() != self.dims() {
            return Err(Error::shape(
                "scaled residual",
                format!("{:?}, gradient {:?}", self.dims(), dy.dims()),
            ));
        }
        Ok(self.device().backend().scale_onto_back(self, dy, scale))
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

struct Sum;

impl Op<2> for Sum {
    type Kept = ();

    fn forward(&self, [a, b]: [&Rows; 2]) -> Result<(Rows, ())> {
        let mut y = a.clone();
        y.add(b)?;
        Ok((y, ()))
    }

    fn backward(&self, _: [&Rows; 2], (): (), dy: Rows, _: [bool; 2]) -> Result<[Option<Rows>; 2]> {
        Ok([Some(dy.clone()), Some(dy)])
    }
}

struct Reshape(usize, usize);

impl Op for Reshape {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        Ok((x.clone().reshape(self.0, self.1)?, ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        Ok([Some(dy.reshape(x.rows(), x.cols())?)])
    }
}

/// Selection of distinct rows in a given order.
struct Select(Arc<Index>);

impl Op for Select {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        Ok((x.select(&self.0)?, ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        Ok([Some(dy.spread(&self.0, x.rows())?)])
    }
}

/// Placement of rows at distinct indices, with zeros elsewhere.
struct Spread(Arc<Index>, usize);

impl Op for Spread {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        Ok((x.spread(&self.0, self.1)?, ()))
    }

    fn backward(&self, _: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        Ok([Some(dy.select(&self.0)?)])
    }
}

struct Concat;

impl<const N: usize> Op<N> for Concat {
    type Kept = ();

    fn forward(&self, parts: [&Rows; N]) -> Result<(Rows, ())> {
        Ok((Rows::concat(&parts)?, ()))
    }

    fn backward(&self, parts: [&Rows; N], (): (), dy: Rows, wanted: [bool; N]) -> Result<[Option<Rows>; N]> {
        let mut gradients = std::array::from_fn(|_| None);
        let mut at = 0;
        for ((part, wanted), gradient) in parts.iter().zip(wanted).zip(&mut gradients) {
            if wanted {
                *gradient = Some(dy.row_range(at..at + part.rows())?);
            }
            at += part.rows();
        }
        Ok(gradients)
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

    /// Computes `a + b`.
    pub fn add(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.apply(Sum, [a, b])
    }

    /// Reinterprets the values as an array with another number of rows and columns.
    pub fn reshape(&mut self, x: &Var, rows: usize, cols: usize) -> Result<Var> {
        self.apply(Reshape(rows, cols), [x])
    }

    /// Returns the rows listed in `index`, in that order. The indices must be distinct.
    pub fn select(&mut self, x: &Var, index: &Arc<Index>) -> Result<Var> {
        self.apply(Select(Arc::clone(index)), [x])
    }

    /// Reverses [`Self::select`]: returns `rows` rows, which are zero except at `index`.
    pub fn spread(&mut self, x: &Var, index: &Arc<Index>, rows: usize) -> Result<Var> {
        self.apply(Spread(Arc::clone(index), rows), [x])
    }

    /// Stacks arrays of the same width vertically.
    pub fn concat<const N: usize>(&mut self, parts: [&Var; N]) -> Result<Var> {
        self.apply(Concat, parts)
    }
}
