//! Mixtures of experts: the choice of experts for each row, and products grouped by expert.
//!
//! For each row, the `topk` experts with the largest router logits `[t, experts]` are chosen. If logits are equal, the expert
//! with the lower index is chosen. A *place* is a pair of a row and one of its experts. The host chooses the experts: a device
//! sends the logits once and receives indices. Places are then sorted by expert, then by row, so that an expert's product runs
//! over consecutive rows. While tokens are decoded, a GPU chooses the experts itself, so that the step can be recorded; places are
//! then sorted by row, then by expert, and the host does not know the experts. NaN logits are ordered by `f64::total_cmp`;
//! everything computed from them is NaN.
//!
//! Source: `transformers` 5.23 `models/aria/modeling_aria.py`. Differences: places are sorted, instead of masked expert by
//! expert; the output of an expert is weighted before its last product (which is linear) instead of after it; a row sums its
//! experts in the order of their index.
//!
//! Shapes: `t` rows, `e` experts, `p = t · topk` places, `k` inputs and `n` outputs of an expert.

mod cpu;
mod gpu;
mod outline;
mod same;
#[cfg(feature = "twin")]
mod twin;

use std::sync::{Arc, Mutex, PoisonError};

use omnigrpo_gpu::Chosen;
use omnigrpo_kernels::conv::RowMix;
use omnigrpo_kernels::experts::{Choices, Groups};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::mix::Mix;
use crate::order::Order;
use crate::param::Param;
use crate::rows::{Index, Rows};

pub use same::SameExperts;

/// Layers of experts. Arrays have one row per place.
pub(crate) trait ExpertOps {
    /// Multiplies each place by the matrix of its expert, `[p, k] → [p, n]`.
    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, order: Order) -> Rows;
    /// Computes `dy Wᵀ` with the matrix of each place's expert, `[p, n] → [p, k]`.
    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows;
    /// Adds `xᵀ dy`, over the places of each expert, to the gradient of the expert's matrix.
    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes);
}

/// Routing of the rows of one pass.
#[derive(Debug)]
pub struct Routes {
    /// Row of each place.
    rows: Index,
    /// Places of each row, all with weight 1.
    sums: Mix,
    /// Expert of each place. The numbers on the host are unset if a GPU chose the experts.
    experts: Host<Vec<u32>>,
    /// Offsets of the experts' places: expert `i` has the places `offsets[i]..offsets[i + 1]`. Empty if a GPU chose the experts.
    offsets: Vec<usize>,
    /// Number of experts.
    of: usize,
    /// GPU that chose the experts and alone knows them; `None` if the host chose.
    only_on: Option<Device>,
}

impl Routes {
    /// Chooses `topk` experts for each row of `logits [t, experts]`, for a pass with the given order of sums. A GPU chooses for
    /// [`Order::PerRow`]; such routes have no gradients. Returns an error if `topk` is 0 or exceeds the number of experts.
    pub fn choose(logits: &Rows, topk: usize, order: Order) -> Result<Self> {
        let (t, e) = logits.dims();
        if topk == 0 || topk > e {
            return Err(Error::shape("router", format!("{topk} of {e} experts")));
        }
        let of_rows = |rows: Vec<u32>| RowMix {
            offsets: (0..=t).map(|row| row * topk).collect(),
            weights: vec![1.0; rows.len()],
            rows,
        };
        if let (Device::Gpu(card), Order::PerRow) = (logits.device(), order) {
            let Chosen { experts, rows, sums } = card.choose_experts(logits, topk);
            let device = logits.device();
            let places = 0..t * topk;
            return Ok(Self {
                rows: Host::given(places.clone().map(|place| place / topk).collect(), device, rows),
                sums: Host::given(of_rows(places.map(|place| place as u32).collect()), device, sums),
                experts: Host::given(vec![u32::MAX; t * topk], device, experts),
                offsets: Vec::new(),
                of: e,
                only_on: Some(device),
            });
        }
        let numbers = logits.to_f64();
        let (mut chosen, mut order) = (Vec::with_capacity(t * topk), Vec::with_capacity(e));
        for row in numbers.chunks_exact(e) {
            order.clear();
            order.extend(0..e);
            // Adding 0 turns -0 into 0, so that `total_cmp` treats both as equal.
            order.sort_unstable_by(|&a, &b| (row[b] + 0.0).total_cmp(&(row[a] + 0.0)).then(a.cmp(&b)));
            chosen.extend_from_slice(&order[..topk]);
        }
        let mut offsets = vec![0; e + 1];
        chosen.iter().for_each(|&expert| offsets[expert + 1] += 1);
        (0..e).for_each(|expert| offsets[expert + 1] += offsets[expert]);
        let mut next = offsets.clone();
        let (mut rows, mut experts) = (vec![0; t * topk], vec![0; t * topk]);
        let mut places = Vec::with_capacity(t * topk);
        for (row, chosen) in chosen.chunks_exact(topk).enumerate() {
            let start = places.len();
            for &expert in chosen {
                let place = next[expert];
                next[expert] += 1;
                (rows[place], experts[place]) = (row, expert as u32);
                places.push(place as u32);
            }
            places[start..].sort_unstable();
        }
        let sums = of_rows(places);
        Ok(Self {
            rows: rows.into(),
            sums: sums.into(),
            experts: experts.into(),
            offsets,
            of: e,
            only_on: None,
        })
    }

    /// Returns the number of places.
    pub fn places(&self) -> usize {
        self.experts.len()
    }

    /// Returns the number of routed rows.
    pub fn rows(&self) -> usize {
        self.sums.len()
    }

    /// Returns the number of places of each expert, or nothing if a GPU chose the experts.
    pub fn counts(&self) -> Vec<usize> {
        self.offsets.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }

    /// Returns the bytes that this routing occupies in memory.
    pub fn num_bytes(&self) -> usize {
        self.places() * (size_of::<usize>() + 3 * size_of::<u32>()) + size_of_val(&self.offsets[..])
    }

    /// Returns the offsets of the experts' places; see the field.
    pub(crate) fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Returns the places of each row, as sums with weights of 1.
    pub(crate) fn of_rows(&self) -> &Mix {
        &self.sums
    }

    /// Returns the expert of each place.
    pub(crate) fn experts(&self) -> &Host<Vec<u32>> {
        &self.experts
    }

    pub(crate) fn groups(&self) -> Groups<'_> {
        Groups(&self.offsets)
    }

    pub(crate) fn choices(&self) -> Choices<'_> {
        Choices { places: &self.sums.rows, experts: &self.experts }
    }

    /// Copies each row to its places: `[t, h] → [p, h]`. This is the gradient of [`Self::gather`].
    pub fn scatter(&self, x: &Rows) -> Result<Rows> {
        match x.rows() == self.rows() {
            true => x.select(&self.rows),
            false => Err(self.error("scatter", x)),
        }
    }

    /// Puts the places of each row side by side, in the order of their experts: `[p, w] → [t, topk · w]`. Rows in this form do not
    /// depend on each other, and [`Self::by_place`] of the same choice reverses it.
    pub fn by_row(&self, x: &Rows) -> Result<Rows> {
        let (places, width) = x.dims();
        let order: Vec<usize> = self.sums.rows.iter().map(|&place| place as usize).collect();
        match places == self.places() {
            true => x.select(&order.into())?.reshape(self.rows(), places / self.rows().max(1) * width),
            false => Err(self.error("experts by row", x)),
        }
    }

    /// Reverses [`Self::by_row`]: `[t, topk · w] → [p, w]`.
    pub fn by_place(&self, x: &Rows) -> Result<Rows> {
        let each = self.places() / self.rows().max(1);
        if x.rows() != self.rows() || !x.cols().is_multiple_of(each.max(1)) {
            return Err(self.error("experts by place", x));
        }
        let mut order = vec![0; self.places()];
        self.sums.rows.iter().enumerate().for_each(|(at, &place)| order[place as usize] = at);
        let width = x.cols() / each.max(1);
        x.clone().reshape(self.places(), width)?.select(&order.into())
    }

    /// Sums the places of each row: `[p, h] → [t, h]`. This is the gradient of [`Self::scatter`].
    pub fn gather(&self, x: &Rows) -> Result<Rows> {
        match x.rows() == self.places() {
            true => Ok(x.device().backend().mix(x, &self.sums)),
            false => Err(self.error("gather", x)),
        }
    }

    /// Returns an error if another device chose the experts.
    fn check_device(&self, op: &'static str, x: &Rows) -> Result<()> {
        self.only_on.map_or(Ok(()), |device| device.check(op, x))
    }

    pub(crate) fn check(&self, op: &'static str, x: &Rows, logits: &Rows) -> Result<()> {
        self.check_device(op, x)?;
        x.device().check(op, logits)?;
        let (rows, experts) = (self.rows(), self.of);
        match x.rows() == self.places() && logits.dims() == (rows, experts) {
            true => Ok(()),
            false => Err(self.error(op, x)),
        }
    }

    pub(crate) fn error(&self, op: &'static str, x: &Rows) -> Error {
        let what = format!("{:?} for {} places of {} rows", x.dims(), self.places(), self.rows());
        Error::shape(op, what)
    }
}

/// Auxiliary losses of the routers in one pass. One loss balances the use of experts; the other keeps logits small. Each router
/// adds to both.
///
/// For the rows `r` of a router, with weights `w` that sum to `W`, probabilities `p = softmax(logits)` and `k` of `e` experts per
/// row, let `f_j = Σ w_r [r uses j] / (k W)` be the fraction of expert `j` and `P_j = Σ w_r p_rj / W` its mean probability:
///
/// ```text
/// balance = e Σ_j f_j P_j                 1 if all experts are used equally
/// z       = Σ w_r logsumexp(logits_r)² / W
/// ```
///
/// The gradient added is that of `share · (aux · balance + z · z-loss)`. Here `share` is `W` divided by the total weight of this
/// router's rows in a complete step, and the fractions `f` are treated as constants. The weight of a row is the number of
/// sequences to which it belongs, which is more than 1 for a shared prompt. Source: rhymes-ai/Aria `moe_lm.py`; Switch
/// Transformers, arXiv 2101.03961 §2.2; ST-MoE, arXiv 2202.08906 §2.
#[derive(Debug)]
pub struct RouterLoss {
    aux: f64,
    z: f64,
    step: [f64; 2],
    weights: Vec<f32>,
    sums: Mutex<[f64; 2]>,
}

impl RouterLoss {
    /// Creates losses with the coefficients `aux` and `z`. `step` contains the total weight of all rows of a step, and of its
    /// scored rows, to which the last block is limited. `weights` contains the number of sequences to which each row of this pass
    /// belongs.
    pub fn new(aux: f64, z: f64, step: [usize; 2], weights: Vec<f32>) -> Self {
        let step = step.map(|tokens| tokens.max(1) as f64);
        Self { aux, z, step, weights, sums: Mutex::default() }
    }

    /// Returns the balance loss and z-loss accumulated in this pass: sums over routers, multiplied by their shares but not by the
    /// coefficients.
    pub fn losses(&self) -> [f64; 2] {
        *self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the gradient of a router's logits and adds the router's losses to the sums. `rows` lists the routed rows of the
    /// pass; `None` means all rows.
    pub fn gradient(&self, logits: &Rows, routes: &Routes, rows: Option<&[usize]>) -> Result<Rows> {
        let (t, e) = logits.dims();
        let weight = |r: usize| self.weights.get(rows.map_or(Some(r), |rows| rows.get(r).copied())?);
        let weights: Option<Vec<f64>> = (0..t).map(|r| Some(f64::from(*weight(r)?))).collect();
        let counted = rows.is_some() || self.weights.len() == t;
        let Some(weights) = weights.filter(|_| counted && routes.rows() == t) else {
            let what = format!("{t} routed rows of a pass of {}", self.weights.len());
            return Err(Error::shape("router loss", what));
        };
        let total: f64 = weights.iter().sum();
        if total <= 0.0 {
            return Ok(Rows::zeros(logits.device(), t, e));
        }
        let share = total / self.step[usize::from(rows.is_some())];
        let mut shares = vec![0.0; e];
        let each = routes.places() as f64 / t as f64 * total;
        for (place, &expert) in routes.experts.iter().enumerate() {
            shares[expert as usize] += weights[routes.rows[place]] / each;
        }
        let logits_f64 = logits.to_f64();
        let (mut gradient, mut sums) = (vec![0.0f32; t * e], [0.0; 2]);
        for (r, row) in logits_f64.chunks_exact(e).enumerate() {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|l| (l - max).exp()).sum();
            let lse = max + sum.ln();
            let p = |j: usize| (row[j] - lse).exp();
            let mean: f64 = (0..e).map(|j| shares[j] * p(j)).sum();
            let part = weights[r] / total;
            sums[0] += e as f64 * part * mean;
            sums[1] += part * lse * lse;
            for j in 0..e {
                let balance = self.aux * e as f64 * (shares[j] - mean);
                gradient[r * e + j] = (share * part * p(j) * (balance + 2.0 * self.z * lse)) as f32;
            }
        }
        let mut all = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter_mut().zip(sums).for_each(|(all, own)| *all += share * own);
        drop(all);
        Rows::upload(logits.device(), gradient, t, e)
    }
}

/// A layer with a separate weight for each expert, `y = x W` with weights `[experts, k, n]`. An [`Adapter`](crate::Adapter) on
/// the weight adds a low-rank term.
#[derive(Clone, Debug)]
pub struct ExpertLinear {
    weight: Arc<Param>,
    k: usize,
    n: usize,
}

impl ExpertLinear {
    /// Creates the layer from a weight of rank 3.
    pub fn new(weight: Arc<Param>) -> Result<Self> {
        let &[_, k, n] = weight.shape() else {
            let what = format!("a layer of experts of shape {:?}; expected rank 3", weight.shape());
            return Err(Error::Weight { name: weight.name().to_owned(), what });
        };
        weight.mark_experts();
        Ok(Self { weight, k, n })
    }

    pub fn weight(&self) -> &Arc<Param> {
        &self.weight
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.weight.shape()[0]
    }

    /// Returns the number of inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Returns the number of outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Computes `[p, k] → [p, n]`. For either order, the bits of a place depend only on its row and its expert.
    pub fn forward(&self, x: &Rows, routes: &Routes, order: Order) -> Result<Rows> {
        self.check(x, routes)?;
        let order = if routes.offsets.is_empty() { Order::PerRow } else { order };
        let mut y = x.device().backend().experts(x, self, routes, order);
        if let Some(adapter) = self.weight.adapter() {
            adapter.forward_experts(&mut y, x, routes, order)?;
        }
        Ok(y)
    }

    /// Returns `dx [p, k]`, given the input `x` of the forward pass and the gradient `dy [p, n]` of the output. Adds the gradient
    /// of the weight to its buffer.
    pub fn backward(&self, x: &Rows, dy: &Rows, routes: &Routes) -> Result<Rows> {
        self.check(x, routes)?;
        x.device().check("experts backward", dy)?;
        if routes.offsets.is_empty() {
            return Err(self.error("the host does not know the experts that the GPU chose".to_owned()));
        }
        if dy.dims() != (x.rows(), self.n) {
            return Err(self.error(format!("a gradient of {:?} for {} places", dy.dims(), x.rows())));
        }
        let mut dx = dy.device().backend().experts_dx(dy, self, routes);
        if self.weight.trainable() && x.rows() > 0 {
            dy.device().backend().experts_dw(x, dy, self, routes);
        }
        if let Some(adapter) = self.weight.adapter() {
            adapter.backward_experts(&mut dx, dy, x, routes)?;
        }
        Ok(dx)
    }

    fn check(&self, x: &Rows, routes: &Routes) -> Result<()> {
        self.weight.usable(x.device())?;
        routes.check_device("experts", x)?;
        let experts = routes.of;
        if x.cols() != self.k || x.rows() != routes.places() || experts != self.experts() {
            let places = routes.places();
            return Err(self.error(format!("input is {:?} for {places} places of {experts}", x.dims())));
        }
        Ok(())
    }

    fn error(&self, what: String) -> Error {
        let (shape, name) = (self.weight.shape(), self.weight.name());
        Error::shape(format!("experts {name}"), format!("{what}, weight is {shape:?}"))
    }
}
