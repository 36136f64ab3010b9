//! Operations of a tape that add, select and rearrange rows.

use std::sync::Arc;

use crate::error::Result;
use crate::rows::{Index, Rows};
use crate::tape::{Op, Tape, Var};

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
