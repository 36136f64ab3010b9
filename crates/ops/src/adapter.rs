//! Low-rank adapters on frozen linear layers, and on frozen layers of experts.
//!
//! An adapter computes `y += s · B A drop(x)` with `A [r, k]` and `B [n, r]` in f32, whatever the dtype of the frozen weight. The
//! scale `s` is `alpha / r`, or `alpha / √r` for rank-stabilised LoRA. Source: Hu et al., arXiv 2106.09685; Kalajdzievski, arXiv
//! 2312.03732. The module structure follows `peft` 0.21 `tuners/lora/layer.py`, where dropout applies only to the adapter's
//! input.
//!
//! Gradients, with `u = A x̃`, `t = s · Bᵀ dy` and `x̃ = m ⊙ x / (1 − p)`: `dB += s · dy uᵀ`, `dA += t x̃ᵀ`, `dx += m ⊙ (Aᵀ t) /
//! (1 − p)`. Nothing is computed for the frozen weight.
//!
//! Difference: a dropout mask depends only on the keys of the update and the adapter, the row and the column. A block therefore
//! has the same mask when it is recomputed, and a row has the same mask at any position in a packed stream. The
//! [`Pass`](crate::Pass) carries the keys; without keys, nothing is dropped.
//!
//! Each expert has a separate adapter: `y += s · x A B` with `A [e, k, r]` and `B [e, r, n]`, in the layout of the experts'
//! weights. As in `peft`'s `ParamWrapper`, these adapters have no dropout.

use std::sync::Arc;

use omnigrpo_kernels::dropout::{Mask, key_of, mix};

use crate::error::{Error, Result};
use crate::experts::{ExpertLinear, Routes};
use crate::linear::{Dx, Linear, Onto};
use crate::order::Order;
use crate::param::{Param, ParamDtype};
use crate::pass::Dropout;
use crate::rows::Rows;

/// A low-rank update of one linear layer.
#[derive(Debug)]
pub struct Adapter {
    factors: Factors,
    scale: f32,
    rate: f32,
    /// Key of this adapter's masks, which makes the dropout of different layers independent.
    id: u64,
}

/// Values that [`Adapter::backward_input`] computes for the gradients of the factors.
pub(crate) struct Inner {
    /// `s · Bᵀ dy`, `[t, r]`
    t: Rows,
    mask: Option<Mask>,
}

/// Factors `A` and `B` of an adapter.
#[derive(Debug)]
enum Factors {
    Linear(Linear, Linear),
    Experts(ExpertLinear, ExpertLinear),
}

impl Adapter {
    /// Creates adapters of experts from `A [e, k, r]` and `B [e, r, n]`, both f32.
    pub fn of_experts(a: Arc<Param>, b: Arc<Param>, scale: f32) -> Result<Self> {
        let refuse = |what: String| Err(Error::Weight { name: a.name().to_owned(), what });
        let (&[experts, _, rank], &[own, inner, _]) = (a.shape(), b.shape()) else {
            return refuse(format!("adapters of {:?} and {:?}; expected rank 3", a.shape(), b.shape()));
        };
        if rank == 0 || (experts, rank) != (own, inner) {
            let expected = "expected [e, k, r] and [e, r, n]";
            return refuse(format!("adapters of {:?} and {:?}; {expected}", a.shape(), b.shape()));
        }
        if [&a, &b].iter().any(|p| p.dtype() != ParamDtype::F32) {
            return refuse(format!("adapters in {:?} and {:?}; expected f32", a.dtype(), b.dtype()));
        }
        let factors = Factors::Experts(ExpertLinear::new(a)?, ExpertLinear::new(b)?);
        Ok(Self { factors, scale, rate: 0.0, id: 0 })
    }

    /// Creates an adapter from `A [r, k]` and `B [n, r]`, both f32. `rate`, in `0..1`, is the fraction of inputs that are dropped
    /// in passes with dropout.
    pub fn new(a: Arc<Param>, b: Arc<Param>, scale: f32, rate: f32) -> Result<Self> {
        let refuse = |what: String| Err(Error::Weight { name: a.name().to_owned(), what });
        let (&[rank, k], &[n, inner]) = (a.shape(), b.shape()) else {
            return refuse(format!("an adapter of {:?} and {:?}; expected rank 2", a.shape(), b.shape()));
        };
        if rank == 0 || rank != inner {
            return refuse(format!(
                "an adapter of {:?} and {:?}; expected [r, k] and [n, r]",
                a.shape(),
                b.shape()
            ));
        }
        if [&a, &b].iter().any(|p| p.dtype() != ParamDtype::F32) {
            return refuse(format!("an adapter in {:?} and {:?}; expected f32", a.dtype(), b.dtype()));
        }
        if !(0.0..1.0).contains(&rate) {
            return refuse(format!("dropout {rate}; expected at least 0 and below 1"));
        }
        let id = key_of(a.name());
        let factors = Factors::Linear(Linear::plain(&a, rank, k), Linear::plain(&b, n, rank));
        Ok(Self { factors, scale, rate, id })
    }

    /// Returns `A`, with shape `[r, k]`, or `[e, k, r]` for experts.
    pub fn a(&self) -> &Arc<Param> {
        match &self.factors {
            Factors::Linear(a, _) => a.weight(),
            Factors::Experts(a, _) => a.weight(),
        }
    }

    /// Returns `B`, with shape `[n, r]`, or `[e, r, n]` for experts.
    pub fn b(&self) -> &Arc<Param> {
        match &self.factors {
            Factors::Linear(_, b) => b.weight(),
            Factors::Experts(_, b) => b.weight(),
        }
    }

    /// Returns the rank `r`.
    pub fn rank(&self) -> usize {
        match &self.factors {
            Factors::Linear(a, _) => a.n(),
            Factors::Experts(a, _) => a.n(),
        }
    }

    /// Returns the scale `s`, the factor of `B A`.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Returns the shape of the adapted weight.
    pub fn shape(&self) -> Vec<usize> {
        match &self.factors {
            Factors::Linear(a, b) => vec![b.n(), a.k()],
            Factors::Experts(a, b) => vec![a.experts(), a.k(), b.n()],
        }
    }

    /// Merges the adapter into a weight: adds the scaled product of the factors to the values `w`.
    pub fn merge_into(&self, w: &mut [f32]) -> Result<()> {
        let shape = self.shape();
        if w.len() != shape.iter().product::<usize>() {
            let what = format!("merging into {} values, expected {shape:?}", w.len());
            return Err(Error::Weight { name: self.a().name().to_owned(), what });
        }
        let (a, b) = (self.a().read(), self.b().read());
        match &self.factors {
            Factors::Linear(a_layer, b_layer) => {
                let (b, rank) = (b.f32(), a_layer.n());
                // The merge kernel expects `B` column by column.
                let mut by_columns = vec![0.0; b.len()];
                for (i, row) in b.chunks_exact(rank).enumerate() {
                    row.iter().enumerate().for_each(|(r, &x)| by_columns[r * b_layer.n() + i] = x);
                }
                crate::cpu::merge(w, &by_columns, &a.f32(), rank, self.scale);
            }
            Factors::Experts(a_layer, b_layer) => {
                let (k, rank, n) = (a_layer.k(), a_layer.n(), b_layer.n());
                let (a, b) = (a.f32(), b.f32());
                let mut by_columns = vec![0.0; k * rank];
                let experts = w.chunks_exact_mut((k * n).max(1)).zip(a.chunks_exact((k * rank).max(1)));
                for ((w, a), b) in experts.zip(b.chunks_exact((rank * n).max(1))) {
                    for (i, row) in a.chunks_exact(rank).enumerate() {
                        row.iter().enumerate().for_each(|(r, &x)| by_columns[r * k + i] = x);
                    }
                    crate::cpu::merge(w, &by_columns, b, rank, self.scale);
                }
            }
        }
        Ok(())
    }

    /// Returns the factors of an adapter of a linear layer.
    fn linear(&self) -> Result<(&Linear, &Linear)> {
        match &self.factors {
            Factors::Linear(a, b) => Ok((a, b)),
            Factors::Experts(a, _) => Err(self.misplaced(a.weight())),
        }
    }

    /// Returns the factors of an adapter of experts.
    fn experts(&self) -> Result<(&ExpertLinear, &ExpertLinear)> {
        match &self.factors {
            Factors::Experts(a, b) => Ok((a, b)),
            Factors::Linear(a, _) => Err(self.misplaced(a.weight())),
        }
    }

    fn misplaced(&self, a: &Param) -> Error {
        let what = format!("an adapter for {:?} on a layer of another kind", self.shape());
        Error::Weight { name: a.name().to_owned(), what }
    }

    /// Adds `s · x A B` to each place of `y`.
    pub(crate) fn forward_experts(
        &self,
        y: &mut Rows,
        x: &Rows,
        routes: &Routes,
        order: Order,
    ) -> Result<()> {
        let (a, b) = self.experts()?;
        let mut u = a.forward(x, routes, order)?;
        u.scale(self.scale);
        y.add(&b.forward(&u, routes, order)?)
    }

    /// Adds the gradients of `A` and `B` to their buffers, and the gradient of the input to `dx`.
    pub(crate) fn backward_experts(&self, dx: &mut Rows, dy: &Rows, x: &Rows, routes: &Routes) -> Result<()> {
        let (a, b) = self.experts()?;
        let mut u = a.forward(x, routes, Order::Blocked)?;
        u.scale(self.scale);
        let mut t = b.backward(&u, dy, routes)?;
        t.scale(self.scale);
        dx.add(&a.backward(x, &t, routes)?)
    }

    /// Returns the dropout mask for `rows` rows, or `None` without dropout.
    fn mask(&self, dropout: Option<&Dropout>, rows: usize) -> Result<Option<Mask>> {
        let Some(dropout) = dropout.filter(|_| self.rate > 0.0) else { return Ok(None) };
        if let Some(keys) = &dropout.rows
            && keys.len() != rows
        {
            return Err(Error::shape(
                format!("adapter {}", self.a().name()),
                format!("{rows} rows with {} dropout keys", keys.len()),
            ));
        }
        let rows = dropout.rows.clone();
        Ok(Some(Mask { key: mix(dropout.key ^ self.id), rows, rate: self.rate }))
    }

    /// Returns rows in the dtype of the products with the factors.
    pub(crate) fn factor(&self, x: &Rows) -> Rows {
        match &self.factors {
            Factors::Linear(a, _) => x.device().backend().factor(x, std::slice::from_ref(a)),
            Factors::Experts(..) => x.clone(),
        }
    }

    /// Computes `u = s · A x̃ [t, r]`.
    fn inner(&self, a: &Linear, x: &Rows, order: Order) -> Rows {
        let mut u = x.device().backend().linear(x, std::slice::from_ref(a), Onto::Nothing, order);
        u.scale(self.scale);
        u
    }

    /// Adds `s · B A drop(x)` to the columns of `y`, starting at `col`.
    pub(crate) fn forward(
        &self,
        y: Rows,
        col: usize,
        x: &Rows,
        order: Order,
        dropout: Option<&Dropout>,
    ) -> Result<Rows> {
        let dropped = self.mask(dropout, x.rows())?.map(|mask| x.device().backend().dropout(x, &mask));
        let (a, b) = self.linear()?;
        let u = self.inner(a, dropped.as_ref().unwrap_or(x), order);
        Ok(u.device().backend().linear(&u, std::slice::from_ref(b), Onto::Columns(y, col), order))
    }

    /// Adds the gradient of the input to `dx`. The layer's columns of `dy` begin at `col`. [`Self::backward_weights`] takes the
    /// second value.
    pub(crate) fn backward_input(
        &self,
        mut dx: Rows,
        dy: &Rows,
        col: usize,
        dropout: Option<&Dropout>,
    ) -> Result<(Rows, Inner)> {
        let device = dy.device();
        let backend = device.backend();
        let (a, b) = self.linear()?;
        let (of_a, of_b) = (std::slice::from_ref(a), std::slice::from_ref(b));
        let mask = self.mask(dropout, dy.rows())?;
        let mut t = backend.linear_dx(Dx::Like(dy), dy, col, of_b);
        t.scale(self.scale);
        match &mask {
            None => dx = backend.linear_dx(Dx::Onto(dx), &t, 0, of_a),
            Some(mask) => dx.add(&backend.dropout(&backend.linear_dx(Dx::Like(&t), &t, 0, of_a), mask))?,
        }
        Ok((dx, Inner { t, mask }))
    }

    /// Adds the gradients of `A` and `B` to their buffers, given the input `x` of the layer.
    pub(crate) fn backward_weights(&self, x: &Rows, dy: &Rows, col: usize, inner: &Inner) -> Result<()> {
        let device = x.device();
        let backend = device.backend();
        let (a, b) = self.linear()?;
        let dropped = inner.mask.as_ref().map(|mask| backend.dropout(x, mask));
        let x = dropped.as_ref().unwrap_or(x);
        if b.weight().trainable() {
            let u = self.inner(a, x, Order::Blocked);
            backend.linear_dw(&u, dy, col, std::slice::from_ref(b));
        }
        backend.linear_dw(x, &inner.t, 0, std::slice::from_ref(a));
        Ok(())
    }
}
