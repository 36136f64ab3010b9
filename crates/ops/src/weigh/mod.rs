//! Rows multiplied by weights, which are a function of logits: gates, blends and the weights of experts.

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use crate::error::{Error, Result};
use crate::experts::Routes;
use crate::rows::Rows;
use crate::tape::{Op, Tape, Var};

/// Rows multiplied by weights, which are a function of logits.
pub(crate) trait WeighOps {
    /// Multiplies rows by weights, which are a function of logits ([`Weighing`]).
    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows;
    /// Returns the gradients of [`Self::weigh`] with respect to `x` and `logits`.
    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, by: Weighing) -> [Rows; 2];
}

/// Weights of [`WeighOps::weigh`].
#[derive(Clone, Copy)]
pub(crate) enum Weighing<'a> {
    /// Computes `x · sigmoid(logits)`. Each row of logits applies to consecutive rows of `x`.
    Gate,
    /// Computes `Σ softmax(logits)ᵢ · xᵢ` over the alternatives in `x`.
    Blend,
    /// Multiplies each place by the softmax over the logits `[t, experts]` of the experts of its row.
    Experts(&'a Routes),
}

impl Weighing<'_> {
    /// Returns the number of rows of the result.
    pub fn rows(self, x: &Rows, logits: &Rows) -> usize {
        if let Self::Blend = self { x.rows() / logits.cols() } else { x.rows() }
    }
}

impl Rows {
    /// Returns `x · sigmoid(gate)`. Each row of `gate [n, c]` applies to `s` consecutive rows of `x [n · s, c]`.
    pub fn gated(&self, gate: &Self) -> Result<Self> {
        self.check_gate(gate)?;
        Ok(self.device().backend().weigh(self, gate, Weighing::Gate))
    }

    /// Returns the gradients of [`Self::gated`] with respect to the rows and the gate, given the gradient `dy` of the result.
    pub fn gated_back(&self, gate: &Self, dy: &Self) -> Result<[Self; 2]> {
        self.check_gate(gate)?;
        self.device().check("gate", dy)?;
        if dy.dims() != self.dims() {
            return Err(Error::shape("gate", format!("{:?}, gradient {:?}", self.dims(), dy.dims())));
        }
        Ok(self.device().backend().weigh_back(self, gate, dy, Weighing::Gate))
    }

    fn check_gate(&self, gate: &Self) -> Result<()> {
        self.device().check("gate", gate)?;
        let fits = gate.cols() == self.cols()
            && (self.rows() == gate.rows() || (gate.rows() > 0 && self.rows().is_multiple_of(gate.rows())));
        match fits {
            true => Ok(()),
            false => {
                Err(Error::shape("gate", format!("input is {:?}, gate is {:?}", self.dims(), gate.dims())))
            }
        }
    }
}

impl Routes {
    /// Multiplies each place of `x [p, i]` by its weight, which is the softmax over the logits of the experts of its row.
    pub fn weigh(&self, x: &Rows, logits: &Rows) -> Result<Rows> {
        self.check("weigh", x, logits)?;
        Ok(x.device().backend().weigh(x, logits, Weighing::Experts(self)))
    }

    /// Returns the gradients of [`Self::weigh`] with respect to `x` and `logits`.
    pub fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows) -> Result<[Rows; 2]> {
        self.check("weigh backward", x, logits)?;
        x.device().check("weigh backward", dy)?;
        match dy.dims() == x.dims() {
            true => Ok(x.device().backend().weigh_back(x, logits, dy, Weighing::Experts(self))),
            false => Err(self.error("weigh backward", dy)),
        }
    }
}

struct Gate;

impl Op<2> for Gate {
    type Kept = ();

    fn forward(&self, [x, gate]: [&Rows; 2]) -> Result<(Rows, ())> {
        Ok((x.gated(gate)?, ()))
    }

    fn backward(&self, [x, gate]: [&Rows; 2], (): (), dy: Rows, _: [bool; 2]) -> Result<[Option<Rows>; 2]> {
        Ok(x.gated_back(gate, &dy)?.map(Some))
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
    /// Computes `x · sigmoid(gate)`. Each row of `gate [n, c]` applies to `s` consecutive rows of `x [n · s, c]`.
    pub fn gate(&mut self, x: &Var, gate: &Var) -> Result<Var> {
        self.apply(Gate, [x, gate])
    }

    /// Computes `Σ softmax(logits)ᵢ · xᵢ`. `x [k · t, c]` contains `k` alternatives of `t` rows; `logits` is `[1, k]`.
    pub fn blend(&mut self, x: &Var, logits: &Var) -> Result<Var> {
        self.apply(Blend, [x, logits])
    }
}
