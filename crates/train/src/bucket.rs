//! Buckets: neighbouring weights that the ranks exchange together, cut into a part for each rank.

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_ops::{Blocks, Param, ParamDtype, Rows, SQUARES_BLOCK};

use crate::error::Result;
use crate::split::Split;

/// Neighbouring weights that are exchanged together.
#[derive(Debug)]
pub(crate) struct Bucket {
    /// Numbers of the weights.
    pub(crate) weights: Range<usize>,
    /// First element of each weight in the bucket, and the number of elements.
    starts: Vec<usize>,
    /// First element of the part of each rank, and the number of elements.
    cuts: Vec<usize>,
}

impl Bucket {
    /// Groups all weights. Weights for which `is_alone` returns true have a bucket of their own.
    pub(crate) fn all(
        params: &[Arc<Param>],
        split: &Split,
        is_alone: impl Fn(&Arc<Param>) -> bool,
    ) -> Vec<Self> {
        let mut buckets = Vec::new();
        let mut first = 0;
        while first < params.len() {
            let mut len = 0;
            let fits = params[first..].iter().take_while(|param| {
                len += param.len();
                len <= split.settings.bucket && !is_alone(param)
            });
            let next = first + fits.count().max(1);
            buckets.push(Self::of(first..next, params, split.ranks.size()));
            first = next;
        }
        buckets
    }

    /// Groups weights and cuts them into a part for each rank.
    pub(crate) fn of(weights: Range<usize>, params: &[Arc<Param>], ranks: usize) -> Self {
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
    pub(crate) fn part(&self, rank: usize, weight: usize) -> Range<usize> {
        let at = weight - self.weights.start;
        let (start, end) = (self.starts[at], self.starts[at + 1]);
        self.cuts[rank].clamp(start, end) - start..self.cuts[rank + 1].clamp(start, end) - start
    }

    /// Returns the weights in a range of the bucket's elements, each with its elements in the range.
    pub(crate) fn segments(&self, range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        segments(&self.starts, range).map(|(at, range)| (self.weights.start + at, range))
    }

    /// Sums the gradients of the bucket over all ranks and returns this rank's part of each weight's sum.
    pub(crate) fn reduce(
        &self,
        split: &Split,
        grads: &[Option<Rows>],
        blocks: &mut Blocks,
    ) -> Result<Vec<Vec<f32>>> {
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
            let sum = blocks.sum_own(split.settings.sum)?;
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

impl Bucket {
    /// Sends this rank's part of the bucket's values to all ranks, and receives those of the others. With `keep`, stores them.
    /// `all` is a buffer.
    pub(crate) fn gather(
        &self,
        split: &Split,
        params: &[Arc<Param>],
        keep: bool,
        all: &mut Vec<u8>,
    ) -> Result<()> {
        let (ranks, piece) = (&split.ranks, split.piece());
        let parts: Vec<Range<usize>> = self.cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
        let longest = parts.iter().map(Range::len).max().unwrap_or(0);
        for at in (0..longest).step_by(piece) {
            let of = |rank: usize| self.segments(cut(&parts[rank], at, piece));
            let size = |rank: usize| {
                of(rank).map(|(weight, range)| range.len() * bytes(&params[weight])).sum::<usize>()
            };
            let block = (0..ranks.size()).map(size).max().unwrap_or(0);
            let mut own = Vec::with_capacity(block);
            of(ranks.rank()).for_each(|(weight, range)| params[weight].append_bytes(range, &mut own));
            own.resize(block, 0);
            all.resize(block * ranks.size(), 0);
            ranks.all_gather_into(&own, all)?;
            for rank in (0..ranks.size()).filter(|&rank| keep && rank != ranks.rank()) {
                let mut from = &all[rank * block..][..block];
                for (weight, range) in of(rank) {
                    let (own, rest) = from.split_at(range.len() * bytes(&params[weight]));
                    params[weight].store_bytes(range.start, own)?;
                    from = rest;
                }
            }
        }
        Ok(())
    }
}

/// Returns the beginnings of arrays that follow each other, and the end of the last one.
pub(crate) fn starts(lens: impl Iterator<Item = usize>) -> Vec<usize> {
    let ends = lens.scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}

/// Returns the arrays that have elements in a range, each with its elements in the range. `starts` is the result of [`starts`].
pub(crate) fn segments(
    starts: &[usize],
    range: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
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
