//! Sums of gradients over leaves and ranks, and the division of the optimizer's work.
//!
//! Source of the division: ZeRO (Rajbhandari et al., arXiv 1910.02054). The trained weights are grouped into buckets of
//! neighbouring weights. Each bucket is cut into a part for every rank, at a multiple of [`SQUARES_BLOCK`] elements of a weight or
//! at its beginning. The blocks in which squares are summed are therefore never cut, and the norm of the gradient has the same
//! bits on any number of ranks. A bucket is exchanged in pieces, so no buffer is much larger than `Split::bucket`.
//!
//! | [`Shard`] | complete on each rank | cut into parts |
//! |---|---|---|
//! | `None` | weights, gradients, moments, masters | |
//! | `Optimizer` | weights, gradients | moments, masters |

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_ops::{Blocks, Device, Param, ParamDtype, Rows, SQUARES_BLOCK, Squares, block_squares, squares};
use omnigrpo_ranks::Cascade;

use crate::error::Result;
use crate::split::Split;

/// State of a run that is cut into a part for each rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shard {
    /// Nothing.
    #[default]
    None,
    /// Moments and masters of the optimizer (ZeRO stage 1). The state is in main memory.
    Optimizer,
}

/// Gradient of each trained weight; `None` for a weight that was not reached.
type Gradients = Vec<Option<Rows>>;

/// Gradients of a step on their way from the passes to the optimizer.
#[derive(Default)]
pub(crate) struct Exchange {
    split: Split,
    params: Vec<Arc<Param>>,
    leaves: Cascade<Gradients>,
    /// Buckets of the weights, if the state is cut into parts.
    buckets: Vec<Bucket>,
    /// Sum of the gradients, if the state is cut into parts.
    own: Vec<Option<Vec<f32>>>,
}

impl Exchange {
    /// Prepares the exchange of gradients of trained weights.
    pub(crate) fn new(split: &Split, params: Vec<Arc<Param>>) -> Self {
        let buckets = match split.shard {
            Shard::Optimizer if split.ranks.size() > 1 => Bucket::all(&params, split),
            _ => Vec::new(),
        };
        Self { split: split.clone(), params, buckets, ..Self::default() }
    }

    /// Returns true if each rank has the state of a part of the weights only.
    pub(crate) fn is_cut(&self) -> bool {
        !self.buckets.is_empty()
    }

    /// Returns the elements of a weight whose state is on `rank`.
    pub(crate) fn part(&self, rank: usize, weight: usize) -> Range<usize> {
        match self.buckets.iter().find(|bucket| bucket.weights.contains(&weight)) {
            Some(bucket) => bucket.part(rank, weight),
            None => 0..self.params[weight].len(),
        }
    }

    /// Returns the elements of a weight whose state is on this rank.
    pub(crate) fn own_part(&self, weight: usize) -> Range<usize> {
        self.part(self.split.ranks.rank(), weight)
    }

    /// Begins an update, without the gradients of an earlier one that has failed.
    pub(crate) fn begin(&mut self, split: &Split) {
        self.split = split.clone();
        self.leaves = Cascade::default();
        self.own.clear();
    }

    /// Takes the gradients of a leaf out of the weights. A single leaf stays there.
    pub(crate) fn end_leaf(&mut self) -> Result<()> {
        if self.split.is_off() {
            return Ok(());
        }
        self.leaves.push(Some(self.params.iter().map(|param| param.take_grad()).collect()), add)
    }

    /// Sums the gradients of the leaves of all ranks. The sums are then in the weights, or in [`Self::own`] if the state is cut. A
    /// weight that no leaf has reached gets no gradient.
    pub(crate) fn sum(&mut self, device: Device) -> Result<()> {
        if self.split.is_off() {
            return Ok(());
        }
        let sums = std::mem::take(&mut self.leaves).finish(add)?;
        let mut sums = sums.unwrap_or_else(|| vec![None; self.params.len()]);
        if self.split.ranks.size() == 1 {
            return self.params.iter().zip(sums).try_for_each(|(param, grad)| Ok(param.set_grad(grad)?));
        }
        let mut blocks = Blocks::new(&self.split.ranks, device);
        blocks.begin(self.split.piece().min(self.params.iter().map(|param| param.len()).sum()));
        // A GPU that has failed, perhaps for lack of memory, takes part in no exchange.
        self.split.agree(device.finish().map_err(Into::into))?;
        let reached: Vec<u8> = sums.iter().map(|grad| u8::from(grad.is_some())).collect();
        let all = self.split.ranks.all_gather(&reached)?;
        let count = self.params.len();
        let reached: Vec<bool> = (0..count)
            .map(|weight| all.iter().skip(weight).step_by(count).any(|&there| there == 1))
            .collect();
        if !self.is_cut() {
            return self.sum_whole(sums, &reached, blocks);
        }
        self.own = vec![None; count];
        for bucket in &self.buckets {
            let weights = bucket.weights.clone();
            let grads: Gradients = sums[weights.clone()].iter_mut().map(Option::take).collect();
            if !reached[weights.clone()].contains(&true) {
                continue;
            }
            let own = bucket.reduce(&self.split, &grads, &mut blocks)?;
            for (weight, own) in weights.zip(own) {
                self.own[weight] = reached[weight].then_some(own);
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
            blocks.sum(self.split.sum)?;
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
        if !self.is_cut() {
            let params: Vec<&Param> = self.params.iter().map(|param| &**param).collect();
            return Ok(squares(&params, offload));
        }
        let own: Vec<f64> = self.own.iter().flatten().flat_map(|grad| block_squares(grad)).collect();
        let all = self.split.ranks.gather_each(bytemuck::cast_slice(&own))?;
        let mut all: Vec<_> = all.iter().map(|own| own.chunks_exact(8)).collect();
        let mut sums = vec![None; self.params.len()];
        for bucket in &self.buckets {
            for weight in bucket.weights.clone() {
                if self.own.get(weight).is_none_or(Option::is_none) {
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

    /// Removes and returns this rank's part of the gradient of a weight; `None` for a weight that was not reached.
    pub(crate) fn take_own(&mut self, weight: usize) -> Option<Vec<f32>> {
        self.own.get_mut(weight)?.take()
    }

    /// Copies each rank's part of the updated weights to all ranks. `done` is the result of this rank's update.
    pub(crate) fn gather_weights(&self, done: Result<()>, updated: &[bool]) -> Result<()> {
        self.split.agree(done)?;
        let (ranks, piece) = (&self.split.ranks, self.split.piece());
        let mut all = Vec::new();
        for bucket in self.buckets.iter().filter(|b| updated[b.weights.clone()].contains(&true)) {
            let parts: Vec<Range<usize>> = bucket.cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
            let longest = parts.iter().map(Range::len).max().unwrap_or(0);
            for at in (0..longest).step_by(piece) {
                let of = |rank: usize| bucket.segments(cut(&parts[rank], at, piece));
                let size = |rank: usize| {
                    of(rank).map(|(weight, range)| range.len() * bytes(&self.params[weight])).sum::<usize>()
                };
                let block = (0..ranks.size()).map(size).max().unwrap_or(0);
                let mut own = Vec::with_capacity(block);
                of(ranks.rank())
                    .for_each(|(weight, range)| self.params[weight].append_bytes(range, &mut own));
                own.resize(block, 0);
                all.resize(block * ranks.size(), 0);
                ranks.all_gather_into(&own, &mut all)?;
                for rank in (0..ranks.size()).filter(|&rank| rank != ranks.rank()) {
                    let mut from = &all[rank * block..][..block];
                    for (weight, range) in of(rank) {
                        let param = &self.params[weight];
                        let (own, rest) = from.split_at(range.len() * bytes(param));
                        param.store_bytes(range.start, own)?;
                        from = rest;
                    }
                }
            }
        }
        Ok(())
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

/// Neighbouring weights that are exchanged together.
#[derive(Debug)]
struct Bucket {
    weights: Range<usize>,
    /// First element of each weight in the bucket, and the number of elements.
    starts: Vec<usize>,
    /// First element of the part of each rank, and the number of elements.
    cuts: Vec<usize>,
}

impl Bucket {
    /// Groups all weights.
    fn all(params: &[Arc<Param>], split: &Split) -> Vec<Self> {
        let mut buckets = Vec::new();
        let mut first = 0;
        while first < params.len() {
            let mut len = 0;
            let fits = params[first..].iter().take_while(|param| {
                len += param.len();
                len <= split.bucket
            });
            let next = first + fits.count().max(1);
            buckets.push(Self::of(first..next, params, split.ranks.size()));
            first = next;
        }
        buckets
    }

    fn of(weights: Range<usize>, params: &[Arc<Param>], ranks: usize) -> Self {
        let starts = starts(params[weights.clone()].iter().map(|param| param.len()));
        let len = starts.last().copied().unwrap_or(0);
        let bounds = starts.windows(2).flat_map(|own| (own[0]..own[1]).step_by(SQUARES_BLOCK)).chain([len]);
        let bounds: Vec<usize> = bounds.collect();
        let cut = |rank: usize| {
            let at = len * rank / ranks;
            bounds[bounds.partition_point(|&bound| bound < at).min(bounds.len() - 1)]
        };
        Self { weights, cuts: (0..=ranks).map(cut).collect(), starts }
    }

    /// Returns the elements of a weight that belong to a rank.
    fn part(&self, rank: usize, weight: usize) -> Range<usize> {
        let at = weight - self.weights.start;
        let (start, end) = (self.starts[at], self.starts[at + 1]);
        self.cuts[rank].clamp(start, end) - start..self.cuts[rank + 1].clamp(start, end) - start
    }

    /// Returns the weights in a range of the bucket's elements, each with its elements in the range.
    fn segments(&self, range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        segments(&self.starts, range).map(|(at, range)| (self.weights.start + at, range))
    }

    /// Sums the gradients of the bucket over all ranks and returns this rank's part of each weight's sum.
    fn reduce(&self, split: &Split, grads: &[Option<Rows>], blocks: &mut Blocks) -> Result<Vec<Vec<f32>>> {
        let (rank, piece) = (split.ranks.rank(), split.piece());
        let parts: Vec<Range<usize>> = self.cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
        let longest = parts.iter().map(Range::len).max().unwrap_or(0);
        let mut own: Vec<Vec<f32>> =
            self.weights.clone().map(|weight| Vec::with_capacity(self.part(rank, weight).len())).collect();
        for at in (0..longest).step_by(piece) {
            let share = piece.min(longest - at);
            blocks.begin(share);
            for (block, part) in parts.iter().enumerate() {
                let mut fill = block * share;
                for (weight, range) in self.segments(cut(part, at, piece)) {
                    let count = range.len();
                    if let Some(grad) = &grads[weight - self.weights.start] {
                        blocks.put(fill, grad, range)?;
                    }
                    fill += count;
                }
            }
            let sum = blocks.sum_own(split.sum)?;
            let mut sum = sum.as_slice();
            for (weight, range) in self.segments(cut(&parts[rank], at, piece)) {
                let (of_weight, rest) = sum.split_at(range.len());
                own[weight - self.weights.start].extend_from_slice(of_weight);
                sum = rest;
            }
        }
        Ok(own)
    }
}

/// Returns the beginnings of arrays that follow each other, and the end of the last one.
fn starts(lens: impl Iterator<Item = usize>) -> Vec<usize> {
    let ends = lens.scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}

/// Returns the arrays that have elements in a range, each with its elements in the range. `starts` is the result of [`starts`].
fn segments(starts: &[usize], range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
    let first = starts.partition_point(|&start| start <= range.start).saturating_sub(1);
    let own = starts[first..].windows(2).enumerate().map(|(at, own)| {
        let (start, end) = (range.start.clamp(own[0], own[1]), range.end.clamp(own[0], own[1]));
        (first + at, start - own[0]..end - own[0])
    });
    let own = own.skip_while(|(_, range)| range.is_empty()).take_while(|(_, range)| !range.is_empty());
    own.collect::<Vec<_>>().into_iter()
}

/// Returns the piece of a part that starts `at` elements after its beginning.
fn cut(part: &Range<usize>, at: usize, piece: usize) -> Range<usize> {
    (part.start + at).min(part.end)..(part.start + at + piece).min(part.end)
}

/// Returns the size of a value of a trained weight.
fn bytes(param: &Param) -> usize {
    if param.dtype() == ParamDtype::F32 { 4 } else { 2 }
}

fn add(to: &mut Gradients, from: Gradients) -> Result<()> {
    for (to, from) in to.iter_mut().zip(from) {
        match (to.as_mut(), from) {
            (Some(to), Some(from)) => to.add(&from)?,
            (None, from) => *to = from,
            (Some(_), None) => {}
        }
    }
    Ok(())
}
