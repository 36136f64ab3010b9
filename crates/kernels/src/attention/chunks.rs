//! Division of the backward pass into tasks: the layout is divided into components, and the keys of each component into chunks.
//!
//! A task computes the rows of dk and dv of its chunk. A query that sees keys of several chunks receives a part of its dq from
//! each of them. The first chunk writes to dq. The other chunks write to rows of a buffer, which are added in the order of the
//! chunks. The division follows from layout and shape alone, so the bits do not depend on the number of threads.

use std::ops::Range;

use super::{AttentionLayout, QueryRange, Shape};

/// Maximum number of chunks in a component.
const MAX_CHUNKS: usize = 8;
/// Minimum number of keys of a chunk that a query of the component must see on average.
const MIN_KEYS: u64 = 256;
/// Number of tasks beyond which more tasks do not help.
const ENOUGH_TASKS: usize = 32;
/// Maximum number of floats in all partial sums of dq (128 MiB). If dq is larger than that, the maximum is twice the size of dq.
const MAX_PARTIAL: usize = 32 << 20;
/// Alignment of chunk bounds, counted from the start of a key range.
const ATOM: usize = 64;
/// Minimum distance between recorded starts of key ranges. A start that is closer to the previous one is dropped.
const NEAR: usize = 32;

/// A query range that sees keys of a chunk.
pub(super) struct Seen<'a> {
    pub range: &'a QueryRange,
    /// First query that sees a key of the chunk.
    pub first: usize,
    /// Row of the partial sums that belongs to `first`; the following queries have the following rows. `None` means that the
    /// chunk writes to dq itself.
    pub partial: Option<usize>,
}

/// Key rows whose gradients are computed by one task per key head, and the query ranges that see these rows.
pub(super) struct Chunk<'a> {
    pub keys: Range<usize>,
    pub seen: Vec<Seen<'a>>,
}

/// Partial sums to add: the `count` rows that start at `from` are added to the query rows that start at `to`.
#[derive(Clone, Copy)]
pub(super) struct Sum {
    pub to: usize,
    pub from: usize,
    pub count: usize,
}

/// The tasks of a backward pass.
#[derive(Default)]
pub(super) struct Plan<'a> {
    pub chunks: Vec<Chunk<'a>>,
    pub partial_rows: usize,
    /// Sums to add to each query range, in the order of addition.
    pub sums: Vec<Vec<Sum>>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(layout: &'a AttentionLayout, shape: Shape) -> Self {
        let components = components(layout);
        let tasks = components.len() * shape.kv_heads;
        let total: usize = layout.ranges.iter().map(|range| range.queries.len()).sum();
        let fit = 1 + (MAX_PARTIAL / (total * shape.q_heads * shape.head_dim).max(1)).max(2);
        let most = MAX_CHUNKS.min(ENOUGH_TASKS / tasks.max(1)).min(fit);
        let mut plan = Self::default();
        for component in components {
            let keys = cut(&component, most);
            let mut sums: Vec<Vec<Sum>> = component.iter().map(|_| Vec::new()).collect();
            let mut written = vec![false; component.len()];
            for keys in keys {
                let mut seen = Vec::new();
                for (at, &range) in component.iter().enumerate() {
                    let Some(first) = first_query(range, &keys) else { continue };
                    let mut partial = None;
                    if std::mem::replace(&mut written[at], true) {
                        let (from, count) = (plan.partial_rows, range.queries.len() - first);
                        sums[at].push(Sum { to: range.queries.start + first, from, count });
                        partial = Some(from);
                        plan.partial_rows += count;
                    }
                    seen.push(Seen { range, first, partial });
                }
                plan.chunks.push(Chunk { keys, seen });
            }
            plan.sums.extend(sums.into_iter().filter(|sums| !sums.is_empty()));
        }
        plan
    }
}

/// Returns the first query of `range` that sees a key in `keys`.
pub(super) fn first_query(range: &QueryRange, keys: &Range<usize>) -> Option<usize> {
    let last = range.keys.len().wrapping_sub(1);
    let of = |(at, own): (usize, &Range<usize>)| {
        let start = own.start.max(keys.start);
        if start >= own.end.min(keys.end) {
            return None;
        }
        let causal = range.causal && at == last;
        Some(if causal { range.first_to_see(start - own.start) } else { 0 })
    };
    range.keys.iter().enumerate().filter_map(of).min().filter(|&first| first < range.queries.len())
}

/// Splits `keys` where key ranges begin, except shortly after another split.
pub(super) fn pieces<'a>(
    ranges: impl Iterator<Item = &'a QueryRange>,
    keys: &Range<usize>,
) -> Vec<Range<usize>> {
    let within = |start: &usize| keys.contains(start);
    let mut starts: Vec<usize> = ranges.flat_map(|r| &r.keys).map(|k| k.start).filter(within).collect();
    starts.push(keys.start);
    starts.sort_unstable();
    let mut kept: Vec<usize> = Vec::new();
    for start in starts {
        if kept.last().is_none_or(|last| start >= last + NEAR) {
            kept.push(start);
        }
    }
    let ends = kept.iter().skip(1).chain([&keys.end]);
    kept.iter().zip(ends).map(|(&start, &end)| start..end).collect()
}

/// Divides the keys of a component into at most `most` chunks of nearly equal work.
fn cut(component: &[&QueryRange], most: usize) -> Vec<Range<usize>> {
    let hulls = || component.iter().map(|range| hull(range));
    let keys = hulls().map(|k| k.0).min().unwrap_or(0)..hulls().map(|k| k.1).max().unwrap_or(0);
    if most < 2 {
        return vec![keys];
    }
    let of_piece = |piece: Range<usize>| {
        let end = piece.end;
        piece.step_by(ATOM).map(move |start| start..end.min(start + ATOM))
    };
    let atoms: Vec<Range<usize>> =
        pieces(component.iter().copied(), &keys).into_iter().flat_map(of_piece).collect();
    let work: Vec<u64> = atoms.iter().map(|atom| pairs(component, atom)).collect();
    let (total, queries) = (work.iter().sum::<u64>(), component.iter().map(|r| r.queries.len() as u64).sum());
    let wanted = (total / u64::max(queries, 1) + MIN_KEYS / 2) / MIN_KEYS;
    let count = wanted.clamp(1, most as u64);
    let (mut chunks, mut start, mut done) = (Vec::new(), keys.start, 0);
    for (atom, work) in atoms.iter().zip(work) {
        // An atom belongs to the chunk that contains its middle.
        if (done + work / 2) * count >= total * (chunks.len() as u64 + 1) && atom.start > start {
            chunks.push(start..atom.start);
            start = atom.start;
        }
        done += work;
    }
    chunks.push(start..keys.end);
    chunks
}

/// Estimates the number of query-key pairs: the queries that see each key, summed over the keys.
fn pairs(component: &[&QueryRange], keys: &Range<usize>) -> u64 {
    let mut pairs = 0;
    for range in component {
        let last = range.keys.len().wrapping_sub(1);
        for (at, own) in range.keys.iter().enumerate() {
            let (start, end) = (own.start.max(keys.start), own.end.min(keys.end));
            if start < end {
                let middle = (start + end) / 2 - own.start;
                let hidden = if range.causal && at == last { range.first_to_see(middle) } else { 0 };
                pairs += (end - start) * range.queries.len().saturating_sub(hidden);
            }
        }
    }
    pairs as u64
}

fn hull(range: &QueryRange) -> (usize, usize) {
    let keys = || range.keys.iter().filter(|keys| !keys.is_empty());
    (keys().map(|k| k.start).min().unwrap_or(0), keys().map(|k| k.end).max().unwrap_or(0))
}

/// Groups the query ranges so that different groups share no key row.
fn components(layout: &AttentionLayout) -> Vec<Vec<&QueryRange>> {
    let mut ranges: Vec<(usize, usize, &QueryRange)> = Vec::new();
    for range in layout.ranges.iter().filter(|range| !range.queries.is_empty()) {
        let (start, end) = hull(range);
        ranges.push((start, end, range));
    }
    ranges.sort_by_key(|r| r.0);
    let mut components: Vec<Vec<&QueryRange>> = Vec::new();
    let mut reach = 0;
    for (start, end, range) in ranges {
        match components.last_mut() {
            Some(component) if start < reach => component.push(range),
            _ => components.push(vec![range]),
        }
        reach = reach.max(end);
    }
    components
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { q_heads: 4, kv_heads: 2, head_dim: 64 };

    #[test]
    fn chunks_cover_the_keys_once_and_every_pair_is_theirs() {
        let layouts = [
            AttentionLayout::causal(5000),
            AttentionLayout::full_blocks(&[1500, 7, 64]),
            AttentionLayout::prefix_suffixes(1000, &[100, 33, 700]),
            AttentionLayout::causal(5),
        ];
        for layout in &layouts {
            let plan = Plan::new(layout, SHAPE);
            let mut end = 0;
            for chunk in &plan.chunks {
                assert_eq!(chunk.keys.start, end);
                end = chunk.keys.end;
            }
            assert_eq!(end, layout.ranges.last().map_or(0, |range| range.queries.end));
            for range in &layout.ranges {
                for key in range.keys.iter().cloned().flatten() {
                    let chunk = plan.chunks.iter().find(|chunk| chunk.keys.contains(&key));
                    assert!(chunk.is_some_and(|c| c.seen.iter().any(|seen| std::ptr::eq(seen.range, range))));
                }
            }
            let rows: usize = plan.sums.iter().flatten().map(|sum| sum.count).sum();
            assert_eq!(rows, plan.partial_rows);
        }
        let work = |layout: &AttentionLayout| -> Vec<u64> {
            let all: Vec<&QueryRange> = layout.ranges.iter().collect();
            Plan::new(layout, SHAPE).chunks.iter().map(|chunk| pairs(&all, &chunk.keys)).collect()
        };
        let causal = work(&layouts[0]);
        assert_eq!(causal.len(), MAX_CHUNKS);
        assert!(causal.iter().max() < causal.iter().min().map(|least| least * 2).as_ref(), "{causal:?}");
        assert_eq!(Plan::new(&layouts[3], SHAPE).partial_rows, 0);
    }
}
