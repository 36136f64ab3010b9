//! Sums of gradients over leaves and ranks, and the division of the optimizer's work.
//!
//! Source of the division: ZeRO (Rajbhandari et al., arXiv 1910.02054). The trained weights are grouped into buckets of
//! neighbouring weights. Each bucket is cut into a part for every rank, at a multiple of [`SQUARES_BLOCK`] elements of a weight or
//! at its beginning. The blocks in which squares are summed are therefore never cut, and the norm of the gradient has the same
//! bits on any number of ranks. A bucket is exchanged in pieces, so no buffer is much larger than `Division::bucket`.
//!
//! | [`Shard`] | complete on each rank | cut into parts |
//! |---|---|---|
//! | `None` | weights, gradients, moments, masters | |
//! | `Optimizer` | weights, gradients | moments, masters |
//! | `Gradients` | weights | gradients, moments, masters |
//! | `Weights` | weights of towers, adapters and small weights | other weights ([`crate::lender`]), gradients, moments, masters |
//!
//! With `Optimizer`, the gradients of an update are exchanged after its last pass. With `Gradients`, the last backward pass of a leaf
//! hands over each bucket as soon as the gradients of its weights are complete, and frees it. All ranks exchange the buckets in
//! the same order. A rank that has no such pass, or fails in it, hands over the rest at the end of the leaf, and takes part in the
//! exchanges of its later leaves.

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_models::Model;
use omnigrpo_ops::{Blocks, Device, Param, Part, Rows, SQUARES_BLOCK, Squares, block_squares, squares};
use omnigrpo_ranks::Cascade;

use crate::bucket::{Bucket, segments, starts};
use crate::error::{Result, TrainError};
use crate::lender::is_lent;
use crate::split::{Shard, Split};

/// Gradient of each trained weight; `None` for a weight that was not reached.
type Gradients = Vec<Option<Rows>>;

/// This rank's part of the sum of each weight's gradients; `None` for a weight that was not reached.
type Parts = Vec<Option<Vec<f32>>>;

/// Gradients of a step on their way from the passes to the optimizer.
#[derive(Default)]
pub(crate) struct Exchange {
    split: Split,
    params: Vec<Arc<Param>>,
    regime: Regime,
    /// Memory for the exchange after the last leaf.
    blocks: Option<Blocks>,
}

/// Gradients that the ranks exchange, and the time of the exchange.
#[derive(Default)]
enum Regime {
    /// Nothing: one process sums all gradients in the weights.
    #[default]
    Off,
    /// All gradients after the last leaf. Every rank gets all sums.
    Whole(Cascade<Gradients>),
    /// All gradients after the last leaf. Each rank gets the sums of its part.
    Cut(Cut, Cascade<Gradients>),
    /// Each bucket in the last backward pass of a leaf. Each rank gets the sums of its part.
    Eager(Cut, Box<Eager>),
}

/// Division of the weights into parts.
struct Cut {
    buckets: Vec<Bucket>,
    /// Sum of the gradients of this rank's part.
    own: Parts,
}

/// State of the exchange of a leaf during its backward pass.
struct Eager {
    /// Buckets in the order of their exchange. Each has the number of the block after whose backward pass its gradients are
    /// complete, or `None` if they are complete at the end of the leaf only.
    order: Vec<(Option<usize>, usize)>,
    /// Number of buckets of the leaf that were exchanged.
    done: usize,
    /// Weights whose gradient in this leaf is 0 if no pass has computed it.
    zeros: Vec<bool>,
    /// Weights that a leaf of this rank has reached.
    reached: Vec<bool>,
    /// Sums of the present leaf of all ranks.
    sums: Parts,
    /// Sums of the earlier leaves.
    leaves: Cascade<Parts>,
    /// Device of the model.
    device: Device,
    blocks: Option<Blocks>,
    failed: Option<TrainError>,
}

impl Exchange {
    /// Prepares the exchange of gradients of trained weights in one process.
    pub(crate) fn alone(params: Vec<Arc<Param>>) -> Self {
        Self { params, ..Self::default() }
    }

    /// Divides the exchange over ranks.
    pub(crate) fn over(self, split: &Split, model: &Model) -> Self {
        let mut this = Self { split: split.clone(), ..self };
        if split.settings.shard == Shard::None || split.ranks.size() == 1 || this.params.is_empty() {
            return this;
        }
        // A weight that is cut has the same parts as its state.
        let layers: Vec<_> = model.decoder().layers().into_iter().flatten().collect();
        let is_alone =
            |param: &Arc<Param>| is_lent(split, param) && layers.iter().any(|own| Arc::ptr_eq(own, param));
        let cut = Cut { buckets: Bucket::all(&this.params, split, is_alone), own: Vec::new() };
        this.regime = match split.settings.shard >= Shard::Gradients {
            true => {
                let order = order(&cut.buckets, &this.params, model);
                Regime::Eager(cut, Box::new(Eager::new(order, model.device(), this.params.len())))
            }
            false => Regime::Cut(cut, Cascade::default()),
        };
        this
    }

    fn cut(&self) -> Option<&Cut> {
        match &self.regime {
            Regime::Off | Regime::Whole(_) => None,
            Regime::Cut(cut, _) | Regime::Eager(cut, _) => Some(cut),
        }
    }

    /// Returns true if each rank has the state of a part of the weights only.
    pub(crate) fn is_cut(&self) -> bool {
        self.cut().is_some()
    }

    /// Returns the elements of a weight whose state is on `rank`.
    pub(crate) fn part(&self, rank: usize, weight: usize) -> Range<usize> {
        let bucket = self.cut().and_then(|cut| cut.buckets.iter().find(|own| own.weights.contains(&weight)));
        bucket.map_or_else(|| 0..self.params[weight].len(), |bucket| bucket.part(rank, weight))
    }

    /// Returns the elements of a weight whose state is on this rank.
    pub(crate) fn own_part(&self, weight: usize) -> Range<usize> {
        self.part(self.split.ranks.rank(), weight)
    }

    /// Begins an update, without the gradients of an earlier one that has failed.
    pub(crate) fn begin(&mut self, split: &Split) {
        self.split = split.clone();
        self.blocks = None;
        self.regime = match std::mem::take(&mut self.regime) {
            Regime::Off | Regime::Whole(_) if split.is_off() => Regime::Off,
            Regime::Off | Regime::Whole(_) => Regime::Whole(Cascade::default()),
            Regime::Cut(Cut { buckets, .. }, _) => {
                Regime::Cut(Cut { buckets, own: Vec::new() }, Cascade::default())
            }
            Regime::Eager(Cut { buckets, .. }, eager) => {
                let eager = Eager::new(eager.order, eager.device, self.params.len());
                Regime::Eager(Cut { buckets, own: Vec::new() }, Box::new(eager))
            }
        };
    }

    /// Exchanges the gradients that are complete after the backward pass of a block. Does nothing unless gradients are cut.
    pub(crate) fn block_done(&mut self, block: usize) {
        let Self { split, params, regime: Regime::Eager(cut, eager), .. } = self else { return };
        eager.exchange_until(split, params, &cut.buckets, |ready| ready.is_some_and(|ready| ready >= block));
    }

    /// Gives the weights of the decoder without a gradient in this leaf a gradient of zeros.
    pub(crate) fn reach_decoder(&mut self, model: &Model) {
        let Regime::Eager(_, eager) = &mut self.regime else { return model.reach_decoder() };
        for (zero, param) in eager.zeros.iter_mut().zip(&self.params) {
            *zero |= param.part() == Part::Llm;
        }
    }

    /// Ends a leaf: takes its gradients out of the weights, unless it is the only leaf of a single process. `leaf` is the result of
    /// its passes, and the result of the leaf.
    pub(crate) fn end_leaf(&mut self, leaf: Result<()>) -> Result<()> {
        let Self { split, params, regime, .. } = self;
        match regime {
            Regime::Off => leaf,
            Regime::Whole(leaves) | Regime::Cut(_, leaves) => {
                leaf?;
                let grads = params.iter().map(|param| param.take_grad()).collect();
                leaves.push(Some(grads), |to, from| merge(to, from, add_rows))
            }
            Regime::Eager(cut, eager) => {
                eager.exchange_until(split, params, &cut.buckets, |_| true);
                let sums = eager.begin_leaf();
                eager.failed.take().map_or(Ok(()), Err)?;
                leaf?;
                if let Some(late) = params.iter().find(|param| param.with_grad(|grad| grad.is_some())) {
                    let what = format!("a gradient of {} came after its sum", late.name());
                    return Err(TrainError::Data { what });
                }
                eager.leaves.push(Some(sums), merge_parts)
            }
        }
    }

    /// Allocates the memory of [`Self::sum`]. A GPU that has failed, perhaps for lack of memory, takes part in no exchange, so all
    /// ranks must succeed before one of them begins it.
    pub(crate) fn reserve(&mut self, device: Device) -> Result<()> {
        if let Regime::Whole(_) | Regime::Cut(..) = &self.regime
            && self.split.ranks.size() > 1
        {
            let mut blocks = Blocks::new(&self.split.ranks, device);
            blocks.begin(self.split.piece().min(self.params.iter().map(|param| param.len()).sum()));
            device.finish()?;
            self.blocks = Some(blocks);
        }
        Ok(())
    }

    /// Sums the gradients of the leaves of all ranks. The sums are then in the weights, or in [`Self::take_own`] if the state is cut.
    /// A weight that no leaf has reached gets no gradient.
    pub(crate) fn sum(&mut self) -> Result<()> {
        let blocks = self.blocks.take();
        let (leaves, blocks) = match &mut self.regime {
            Regime::Off => return Ok(()),
            Regime::Eager(cut, eager) => {
                let sums = std::mem::take(&mut eager.leaves).finish(merge_parts)?;
                let reached = reached_by_any(&self.split, &eager.reached)?;
                let sums = sums.unwrap_or_default().into_iter().zip(reached);
                cut.own = sums.map(|(sum, reached)| sum.filter(|_| reached)).collect();
                return Ok(());
            }
            Regime::Whole(leaves) | Regime::Cut(_, leaves) => (std::mem::take(leaves), blocks),
        };
        let sums = leaves.finish(|to, from| merge(to, from, add_rows))?;
        let mut sums = sums.unwrap_or_else(|| vec![None; self.params.len()]);
        if self.split.ranks.size() == 1 {
            return self.params.iter().zip(sums).try_for_each(|(param, grad)| Ok(param.set_grad(grad)?));
        }
        let mut blocks = blocks.ok_or_else(|| TrainError::Data {
            what: "the gradients have no memory for their exchange".to_owned(),
        })?;
        let reached = reached_by_any(&self.split, &sums.iter().map(Option::is_some).collect::<Vec<_>>())?;
        let Regime::Cut(Cut { buckets, own }, _) = &mut self.regime else {
            return self.sum_whole(sums, &reached, blocks);
        };
        *own = vec![None; self.params.len()];
        for bucket in &*buckets {
            let weights = bucket.weights.clone();
            let grads: Gradients = sums[weights.clone()].iter_mut().map(Option::take).collect();
            if !reached[weights.clone()].contains(&true) {
                continue;
            }
            let parts = bucket.reduce(&self.split, &grads, &mut blocks)?;
            for (weight, part) in weights.zip(parts) {
                own[weight] = reached[weight].then_some(part);
            }
        }
        Ok(())
    }

    /// Sums the gradients of the reached weights, which form one array, piece by piece, and stores them in the weights.
    fn sum_whole(&self, mut sums: Gradients, reached: &[bool], mut blocks: Blocks) -> Result<()> {
        let weights: Vec<usize> = (0..reached.len()).filter(|&weight| reached[weight]).collect();
        let starts = starts(weights.iter().map(|&weight| self.params[weight].len()));
        let len = starts.last().copied().unwrap_or(0);
        let size = self.split.ranks.size();
        let most = self.split.piece() * size;
        for at in (0..len).step_by(most) {
            let piece = at..(at + most).min(len);
            blocks.begin(piece.len().div_ceil(size));
            let mut fill = 0;
            for (index, range) in segments(&starts, piece.clone()) {
                let weight = weights[index];
                if sums[weight].is_none() {
                    sums[weight] = Some(blocks.absent(self.params[weight].len()));
                }
                if let Some(grad) = &sums[weight] {
                    blocks.put(fill, grad, range.clone())?;
                }
                fill += range.len();
            }
            blocks.sum(self.split.settings.sum)?;
            let mut from = 0;
            for (index, range) in segments(&starts, piece) {
                let (weight, count) = (weights[index], range.len());
                let is_complete = range.end == self.params[weight].len();
                if let Some(grad) = &mut sums[weight] {
                    blocks.get(from, grad, range)?;
                }
                if is_complete {
                    self.params[weight].set_grad(sums[weight].take())?;
                }
                from += count;
            }
        }
        Ok(())
    }

    /// Returns the sum of squares of each weight's gradient; `None` for a weight without one. The sums have the same bits on all
    /// ranks.
    pub(crate) fn squares(&self, offload: bool) -> Result<Vec<Option<Squares>>> {
        let Some(cut) = self.cut() else {
            let params: Vec<&Param> = self.params.iter().map(|param| &**param).collect();
            return Ok(squares(&params, offload));
        };
        let own: Vec<f64> = cut.own.iter().flatten().flat_map(|grad| block_squares(grad)).collect();
        let all = self.split.ranks.gather_each(bytemuck::cast_slice(&own))?;
        let mut all: Vec<_> = all.iter().map(|own| own.chunks_exact(8)).collect();
        let mut sums = vec![None; self.params.len()];
        for bucket in &cut.buckets {
            for weight in bucket.weights.clone() {
                if cut.own.get(weight).is_none_or(Option::is_none) {
                    continue;
                }
                let blocks = (0..all.len()).flat_map(|rank| {
                    let blocks = bucket.part(rank, weight).len().div_ceil(SQUARES_BLOCK);
                    all[rank].by_ref().take(blocks).map(bytemuck::pod_read_unaligned).collect::<Vec<f64>>()
                });
                sums[weight] = Some(Squares { device: Device::Cpu, sum: blocks.sum() });
            }
        }
        Ok(sums)
    }

    /// Removes and returns this rank's part of the gradient of a weight; `None` for a weight that was not reached, or if the state
    /// is not cut.
    pub(crate) fn take_own(&mut self, weight: usize) -> Option<Vec<f32>> {
        match &mut self.regime {
            Regime::Off | Regime::Whole(_) => None,
            Regime::Cut(cut, _) | Regime::Eager(cut, _) => cut.own.get_mut(weight)?.take(),
        }
    }

    /// Ends an update: all ranks learn of the failure of one. `done` is the result of this rank, with the weights that were updated.
    /// If the state is cut, copies each rank's part of these weights to all ranks.
    pub(crate) fn end<T>(&self, done: Result<(T, Vec<bool>)>) -> Result<T> {
        let (done, updated) = self.split.agree(done)?;
        let mut all = Vec::new();
        let buckets = self.cut().into_iter().flat_map(|cut| &cut.buckets);
        for bucket in buckets.filter(|bucket| updated[bucket.weights.clone()].contains(&true)) {
            // The next pass completes a weight that is cut.
            if !self.params[bucket.weights.start].is_cut() {
                bucket.gather(&self.split, &self.params, true, &mut all)?;
            }
        }
        Ok(done)
    }
}

/// Collection of the state for a checkpoint. The first rank asks for one array after the other, in the order in which it writes
/// them.
impl Exchange {
    /// Sends the numbers of an array to the other ranks, or that no array follows. Does nothing if the state is not cut.
    pub(crate) fn ask(&self, wanted: Option<(usize, usize)>) -> Result<()> {
        if self.is_cut() {
            let (weight, array) = wanted.unwrap_or((usize::MAX, 0));
            self.split.ranks.broadcast(0, &mut [weight as u64, array as u64])?;
        }
        Ok(())
    }

    /// Receives the numbers that the first rank sends with [`Self::ask`].
    pub(crate) fn asked(&self) -> Result<Option<(usize, usize)>> {
        if !self.is_cut() {
            return Ok(None);
        }
        let mut wanted = [0u64; 2];
        self.split.ranks.broadcast(0, &mut wanted)?;
        let [weight, array] = wanted.map(|number| number as usize);
        Ok((weight < self.params.len()).then_some((weight, array)))
    }

    /// Returns the values of a weight's array, of which each rank has the `own` of its part.
    pub(crate) fn collect(&self, weight: usize, own: &[f32]) -> Result<Vec<f32>> {
        let ranks = &self.split.ranks;
        let mut all = Vec::new();
        for rank in 0..ranks.size() {
            let len = self.part(rank, weight).len();
            // A part without values is that of a weight that was not updated on its rank.
            let mut part = if rank == ranks.rank() { own.to_vec() } else { Vec::new() };
            part.resize(len, 0.0);
            if len > 0 {
                ranks.broadcast(rank, &mut part)?;
            }
            all.extend(part);
        }
        Ok(all)
    }
}

impl Eager {
    fn new(order: Vec<(Option<usize>, usize)>, device: Device, weights: usize) -> Self {
        Self {
            order,
            done: 0,
            zeros: vec![false; weights],
            reached: vec![false; weights],
            sums: vec![None; weights],
            leaves: Cascade::default(),
            device,
            blocks: None,
            failed: None,
        }
    }

    /// Begins a leaf and returns the sums of the previous one.
    fn begin_leaf(&mut self) -> Parts {
        self.done = 0;
        self.zeros.fill(false);
        let weights = self.sums.len();
        std::mem::replace(&mut self.sums, vec![None; weights])
    }

    /// Exchanges the next buckets of the leaf while `is_ready` returns true.
    fn exchange_until(
        &mut self,
        split: &Split,
        params: &[Arc<Param>],
        buckets: &[Bucket],
        is_ready: impl Fn(Option<usize>) -> bool,
    ) {
        while let Some(&(ready, bucket)) = self.order.get(self.done) {
            if self.failed.is_some() || !is_ready(ready) {
                return;
            }
            self.done += 1;
            self.failed = self.exchange(split, params, &buckets[bucket]).err();
        }
    }

    /// Takes the gradients of a bucket out of its weights and stores the sum of this rank's part.
    fn exchange(&mut self, split: &Split, params: &[Arc<Param>], bucket: &Bucket) -> Result<()> {
        let weights = bucket.weights.clone();
        let device = self.device;
        let zero = |weight: usize| self.zeros[weight].then(|| Rows::zeros(device, 1, params[weight].len()));
        let take = |weight: usize| params[weight].take_grad().or_else(|| zero(weight));
        let grads: Gradients = weights.clone().map(take).collect();
        self.reached[weights.clone()].iter_mut().zip(&grads).for_each(|(to, grad)| *to |= grad.is_some());
        if split.ranks.any(grads.iter().any(Option::is_some))? {
            let blocks = self.blocks.get_or_insert_with(|| Blocks::new(&split.ranks, device));
            let own = bucket.reduce(split, &grads, blocks)?;
            self.sums[weights].iter_mut().zip(own).for_each(|(to, own)| *to = Some(own));
        }
        Ok(())
    }
}

/// Returns for each weight whether a rank has reached it.
fn reached_by_any(split: &Split, own: &[bool]) -> Result<Vec<bool>> {
    let own: Vec<u8> = own.iter().copied().map(u8::from).collect();
    let all = split.ranks.all_gather(&own)?;
    let of = |weight: usize| all.iter().skip(weight).step_by(own.len()).any(|&there| there == 1);
    Ok((0..own.len()).map(of).collect())
}

/// Returns the order in which the buckets are exchanged: that in which a backward pass completes the gradients of their weights.
fn order(buckets: &[Bucket], params: &[Arc<Param>], model: &Model) -> Vec<(Option<usize>, usize)> {
    let blocks = model.decoder().block_params();
    let ready = |param: &Arc<Param>| {
        let own = blocks.iter().position(|block| block.iter().any(|other| Arc::ptr_eq(other, param)));
        // The head and the final norm come before all blocks. The gradient of an embedding comes after them, and those of towers
        // after all streams.
        let is_last = param.part() == Part::Llm && !Arc::ptr_eq(param, model.decoder().embedding());
        own.or(is_last.then_some(blocks.len()))
    };
    let of_bucket = |bucket: &Bucket| params[bucket.weights.clone()].iter().map(ready).min().flatten();
    let mut order: Vec<_> = buckets.iter().map(of_bucket).zip(0..).collect();
    order.sort_by_key(|&(ready, _)| std::cmp::Reverse(ready));
    order
}

/// Adds the gradients of another leaf, weight by weight.
fn merge<T>(
    to: &mut [Option<T>],
    from: Vec<Option<T>>,
    add: impl Fn(&mut T, &T) -> Result<()>,
) -> Result<()> {
    for (to, from) in to.iter_mut().zip(from) {
        match (to.as_mut(), from) {
            (Some(to), Some(from)) => add(to, &from)?,
            (None, from) => *to = from,
            (Some(_), None) => {}
        }
    }
    Ok(())
}

fn add_rows(to: &mut Rows, from: &Rows) -> Result<()> {
    Ok(to.add(from)?)
}

fn merge_parts(to: &mut Parts, from: Parts) -> Result<()> {
    merge(to, from, |to, from| {
        to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        Ok(())
    })
}
