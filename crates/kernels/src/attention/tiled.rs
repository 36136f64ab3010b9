//! Attention on AMX tiles ([`crate::tiles`]): all products have 32 × 32 outputs, and the softmax runs between them.
//!
//! A unit has up to 128 lanes in panels of 32, and is multiplied by tiles of up to 128 keys. Scores are transposed, `[keys,
//! lanes]`. Keys are therefore a left operand in their memory order, and the weights, `[keys, lanes]`, are a right operand that
//! needs no transposition. Outputs accumulate as `[head_dim, lanes]` and are rescaled along vectors. The softmax writes its
//! weights split into parts and in the order of the operand. Packing transposes only three things: lanes once per unit, values
//! once per call (forward), and keys once per task (backward, for dq). Outputs and dq are transposed once at the end.
//!
//! A panel skips blocks of 32 keys that none of its lanes sees. Other hidden keys get weight 0, which adds an exact zero. The
//! bits of a lane therefore depend on the keys that it sees and not on other lanes, as in [`super::vector`]. The bits differ
//! between the two modules.
//!
//! The softmax takes about a third of the time. On Sapphire Rapids its vector instructions do not overlap with tile instructions
//! (a mix takes the sum of both times), so they are not interleaved.

use std::collections::BTreeMap;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::chunks::{Chunk, first_query, pieces};
use super::{
    AttentionLayout, Back, Block, Call, MIN_PARALLEL, Results, Shape, Unit, first_lane, key_rows, units,
};
use crate::mat::Mat;
use crate::parallel;
use crate::simd::{Simd, exp2, load, load_ptr, select, store, store_ptr};
use crate::tiles::amx::{
    self, BLOCK, GROUP, Output, PART, PARTS, Packed, Tiles, cut, hide, multiply_wide, pack, store_line, turn,
    words,
};
use crate::workspace::{Line, PACKED, TILED, reserve};

/// Maximum number of lanes that are processed together. The only exception is a key head that more query heads share.
const MAX_LANES: usize = 128;
/// Number of key rows in a tile.
const KEYS: usize = 128;
/// Number of key rows whose operands the backward pass packs at a time.
const PASS: usize = 512;
/// Maximum number of words of packed keys and values (16 MiB). If there are more, the forward pass processes the units in several
/// rounds.
const MAX_PACKED: usize = 4 << 20;
/// Number of floats in a kernel's output, which is a panel of scores.
const SQUARE: usize = GROUP * GROUP;
/// Number of lanes in a vector.
const LANES: usize = 16;

#[derive(Default)]
pub(crate) struct Scratch {
    rows: Vec<Line>,
    more_rows: Vec<Line>,
    q: Vec<Line>,
    q_rows: Vec<Line>,
    dout: Vec<Line>,
    dout_rows: Vec<Line>,
    k: Vec<Line>,
    k_turned: Vec<Line>,
    v: Vec<Line>,
    acc: Vec<Line>,
    scores: Vec<Line>,
    dscores: Vec<Line>,
    weights: Vec<Line>,
    dscores_left: Vec<Line>,
    dscores_right: Vec<Line>,
    /// Running maximum (times log₂ e) and sum of each lane. In the backward pass, log-sum-exp (times log₂ e) and `delta`.
    max: Vec<f32>,
    sum: Vec<f32>,
}

simd_fn! {
    fn vector_lanes<>(simd: S,) -> usize {
        let _ = simd;
        S::F32_LANES
    }
}

/// Returns true if this CPU has tiles and the vector instructions that go with them, and the heads are not empty.
pub(super) fn available(shape: Shape) -> bool {
    shape.head_dim > 0 && crate::tiles::available() && vector_lanes() == LANES
}

/// A block and the position of its lanes in a unit.
struct Placed<'a> {
    block: Block<'a>,
    lanes: Range<usize>,
    /// Index of the block's query range among the ranges that see the chunk.
    seen: usize,
}

fn place<'a>(blocks: impl Iterator<Item = (usize, Block<'a>)>, group: usize) -> Vec<Placed<'a>> {
    let mut end = 0;
    let place = |(seen, block): (usize, Block<'a>)| {
        let start = end;
        end += block.count * group;
        Placed { block, lanes: start..end, seen }
    };
    blocks.map(place).collect()
}

/// The keys of a tile that the lanes of a panel see.
struct Sight {
    /// Visibility, with one word per key and one bit per lane.
    bits: [u32; KEYS],
    /// End of the keys that at least one lane sees.
    end: usize,
}

impl Sight {
    /// Returns the words up to `end`, rounded up to a complete block of 32 keys.
    fn bits(&self) -> &[u32] {
        &self.bits[..self.end.next_multiple_of(GROUP)]
    }

    fn look(&mut self, blocks: &[Placed], group: usize, panel: usize, keys: &Range<usize>) {
        let from = panel * GROUP;
        let of = |lanes: Range<usize>| ((1u64 << (lanes.end - from)) - (1u64 << (lanes.start - from))) as u32;
        let mut all = 0;
        self.end = 0;
        self.bits.fill(0);
        for Placed { block, lanes: own, .. } in blocks {
            let lanes = own.start.max(from)..own.end.min(from + GROUP);
            if lanes.is_empty() {
                continue;
            }
            let last = block.range.keys.len() - 1;
            for (at, range) in block.range.keys.iter().enumerate() {
                let (start, mut end) = (range.start.max(keys.start), range.end.min(keys.end));
                let causal = block.range.causal && at == last;
                if causal {
                    let query = block.first + (lanes.end - 1 - own.start) / group;
                    end = end.min(range.start + block.range.seen_of_last(query));
                }
                if start >= end {
                    continue;
                }
                self.end = self.end.max(end - keys.start);
                let first = |key: usize| {
                    let hidden = if causal { first_lane(*block, group, key - range.start) } else { 0 };
                    lanes.start.max(own.start + hidden)
                };
                if (start, end) == (keys.start, keys.end) && first(end - 1) == lanes.start {
                    all |= of(lanes.clone());
                } else {
                    for key in start..end {
                        self.bits[key - keys.start] |= of(first(key)..lanes.end);
                    }
                }
            }
        }
        if all != 0 {
            self.bits[..keys.len()].iter_mut().for_each(|bits| *bits |= all);
        }
    }
}

/// Copies the query heads of one key head (the columns of `rows`), for every query, to `[lanes, width]`, padded with zeros.
fn gather<'a>(
    rows: Mat,
    blocks: &[Placed],
    d: usize,
    lanes: usize,
    width: usize,
    to: &'a mut Vec<Line>,
) -> &'a mut [f32] {
    let to = reserve(to, lanes * width);
    let mut lane = 0;
    for Placed { block, .. } in blocks {
        for i in 0..block.count {
            for source in rows.row(block.query(i)).chunks_exact(d) {
                let row = &mut to[lane * width..(lane + 1) * width];
                row[..d].copy_from_slice(source);
                row[d..].fill(0.0);
                lane += 1;
            }
        }
    }
    to[lane * width..].fill(0.0);
    to
}

/// Packs lanes `[lanes, width]` as columns. The inner dimension is the head dimension.
///
/// # Safety
/// `to` must have room, both sizes must be multiples of 32, and the CPU must have AVX-512.
unsafe fn pack_lanes(to: *mut u32, from: &[f32], lanes: usize, width: usize) {
    for panel in 0..lanes / GROUP {
        let (to, from) =
            (to.wrapping_add(panel * width / GROUP * BLOCK), from[panel * GROUP * width..].as_ptr());
        // SAFETY: 32 rows of `width` elements are in bounds.
        unsafe { pack::<_, PARTS>(to, from, width, 1, false, GROUP, width) };
    }
}

/// Packs lanes `[lanes, width]` with the head dimension as columns. The inner dimension is the lanes.
///
/// # Safety
/// The requirements of [`pack_lanes`] must be met.
unsafe fn pack_heads(to: *mut u32, from: &[f32], lanes: usize, width: usize) {
    for panel in 0..width / GROUP {
        let (to, from) = (to.wrapping_add(panel * lanes / GROUP * BLOCK), from[panel * GROUP..].as_ptr());
        // SAFETY: 32 columns of `lanes` rows are in bounds.
        unsafe { pack::<_, PARTS>(to, from, 1, width, false, GROUP, lanes) };
    }
}

/// Packs the key rows of a head in groups of 32. The inner dimension is the head dimension.
///
/// # Safety
/// `to` must have room, and the CPU must have AVX-512.
unsafe fn pack_keys(to: *mut u32, rows: Mat, keys: Range<usize>, at: usize, d: usize) {
    let deep = d.div_ceil(GROUP);
    for (i, key) in keys.clone().step_by(GROUP).enumerate() {
        let count = GROUP.min(keys.end - key);
        let (to, from) = (to.wrapping_add(i * deep * BLOCK), key_rows(rows, key, count, at, d));
        // SAFETY: `key_rows` has checked the rows.
        unsafe { pack::<_, PARTS>(to, from, rows.stride, 1, true, count, d) };
    }
}

/// Packs the transposed key rows of a head in groups of 32 columns of the head. Groups begin `group` words apart. The inner
/// dimension is the keys.
///
/// # Safety
/// `to` must have room, and the CPU must have AVX-512.
unsafe fn pack_turned(to: *mut u32, group: usize, rows: Mat, keys: Range<usize>, at: usize, d: usize) {
    let from = key_rows(rows, keys.start, keys.len(), at, d);
    for (i, column) in (0..d).step_by(GROUP).enumerate() {
        let (to, from) = (to.wrapping_add(i * group), from.wrapping_add(column));
        // SAFETY: `key_rows` has checked the rows.
        unsafe { pack::<_, PARTS>(to, from, 1, rows.stride, true, GROUP.min(d - column), keys.len()) };
    }
}

/// Length and start of a packed key range.
#[derive(Clone, Copy)]
struct Place {
    len: usize,
    at: usize,
}

impl Place {
    /// Returns the number of words of the range's keys. Its values take the same number.
    fn words(self, deep: usize) -> usize {
        self.len.div_ceil(GROUP) * deep * BLOCK
    }
}

/// Packed keys and values of several heads, one head after the other.
struct Kept {
    words: Packed,
    /// Packed ranges, keyed by their first row.
    places: BTreeMap<usize, Place>,
    /// Number of words per head.
    head: usize,
}

/// Plans a round of as many units from the start of `units` as fit. Returns the key ranges of these units, the words that the
/// ranges take, and the number of units.
fn places(units: &[Unit], shape: Shape) -> (BTreeMap<usize, Place>, usize, usize) {
    let deep = shape.head_dim.div_ceil(GROUP);
    let mut places: BTreeMap<usize, Place> = BTreeMap::new();
    let (mut rows, mut count) = (0, 0);
    for unit in units {
        // The ranges of this unit that no earlier unit has.
        let mut more: BTreeMap<usize, usize> = BTreeMap::new();
        for keys in unit.iter().flat_map(|block| &block.range.keys).filter(|keys| !keys.is_empty()) {
            if places.get(&keys.start).is_none_or(|place| place.len < keys.len()) {
                let len = more.entry(keys.start).or_default();
                *len = keys.len().max(*len);
            }
        }
        let old = |start: &usize| places.get(start).map_or(0, |place| place.len.next_multiple_of(GROUP));
        let added: usize = more.iter().map(|(start, len)| len.next_multiple_of(GROUP) - old(start)).sum();
        if count > 0 && added > 0 && (rows + added) / GROUP * deep * 2 * BLOCK * shape.kv_heads > MAX_PACKED {
            break;
        }
        rows += added;
        places.extend(more.into_iter().map(|(start, len)| (start, Place { len, at: 0 })));
        count += 1;
    }
    let mut end = 0;
    for place in places.values_mut() {
        place.at = end;
        end += 2 * place.words(deep);
    }
    (places, end, count)
}

/// Runs [`super::forward`] on tiles.
pub(super) fn forward(call: Call, layout: &AttentionLayout, results: Results) {
    let Shape { q_heads, kv_heads, head_dim: d } = call.shape;
    let deep = d.div_ceil(GROUP);
    let small = layout.pairs() * ((q_heads * d) as u64) < MIN_PARALLEL;
    let work = if small { 0 } else { usize::MAX };
    let threads = rayon::current_num_threads();
    let mut all = units(layout, call.shape.group(), MAX_LANES);
    if threads > 1 && !small && all.len() * kv_heads < 2 * threads {
        all = units(layout, call.shape.group(), GROUP);
    }
    let mut scratch = PACKED.take();
    let mut rest = &all[..];
    while !rest.is_empty() {
        let (places, head, count) = places(rest, call.shape);
        let (now, later) = rest.split_at(count);
        rest = later;
        // If a range exceeds the maximum that is packed at a time, the heads are processed one by one.
        let together = (MAX_PACKED / head.max(1)).clamp(1, kv_heads);
        let kept = Kept { words: Packed(words(&mut scratch, head * together)), places, head };
        let parts: Vec<(usize, Place, usize)> = kept
            .places
            .iter()
            .flat_map(|(&start, &place)| (0..place.len).step_by(KEYS).map(move |first| (start, place, first)))
            .collect();
        for first_head in (0..kv_heads).step_by(together) {
            let heads = together.min(kv_heads - first_head);
            parallel::tasks(parts.len() * heads, work, |i| {
                let (at, (start, place, first)) = (i / parts.len(), parts[i % parts.len()]);
                let column = (first_head + at) * d;
                let keys = start + first..start + place.len.min(first + KEYS);
                let (to, step) = (kept.words.at(at * head + place.at), first / GROUP);
                // SAFETY: the buffer has room, and no other task writes these keys of this head.
                unsafe {
                    pack_keys(to.wrapping_add(step * deep * BLOCK), call.k, keys.clone(), column, d);
                    let to = to.wrapping_add(place.words(deep) + step * BLOCK);
                    pack_turned(to, place.len.div_ceil(GROUP) * BLOCK, call.v, keys, column, d);
                }
            });
            // The units of one key head are consecutive, so that their operands stay in the cache. Later units see more keys.
            parallel::tasks(now.len() * heads, work, |i| {
                let (at, unit) = (i / now.len(), &now[now.len() - 1 - i % now.len()]);
                let mut scratch = TILED.take();
                forward_unit(&mut scratch, call, &kept, at, unit, first_head + at, results);
                TILED.set(scratch);
            });
        }
    }
    if scratch.len() * LANES <= 2 * MAX_PACKED {
        PACKED.set(scratch);
    }
}

/// The state of the softmax for the lanes of a panel.
struct Running<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    /// Factor that each lane's previous sums are multiplied by.
    shrink: &'a mut [f32; GROUP],
}

/// Replaces the scores of complete blocks of keys with weights that are split into parts, and updates the running state of the
/// panel's lanes.
///
/// # Safety
/// `scores` must be `[32 · steps, 32]`, and there must be room for the weights.
#[inline(always)]
unsafe fn softmax<S: Simd>(
    simd: S,
    scores: *const f32,
    steps: usize,
    scale: f32,
    weights: *mut u32,
    running: Running,
) {
    let Running { max, sum, shrink } = running;
    let scale = simd.splat_f32s(scale);
    let infinite = simd.splat_f32s(f32::NEG_INFINITY);
    let zero = simd.splat_f32s(0.0);
    for v in 0..GROUP / LANES {
        let at = v * LANES;
        // SAFETY: guaranteed by this function's contract.
        let score = |key: usize| unsafe { load_ptr(simd, scores.add(key * GROUP + at), LANES) };
        let mut top = [infinite; 4];
        for key in (0..steps * GROUP).step_by(4) {
            for (i, top) in top.iter_mut().enumerate() {
                *top = simd.max_f32s(score(key + i), *top);
            }
        }
        let top = simd.max_f32s(simd.max_f32s(top[0], top[1]), simd.max_f32s(top[2], top[3]));
        let old = load(simd, &max[..at + LANES], at);
        let new = simd.max_f32s(simd.mul_f32s(top, scale), old);
        // A lane that has seen no key yet keeps −∞ as its maximum. Any finite substitute gives the key weight 0.
        let base = select(simd, simd.equal_f32s(new, infinite), zero, new);
        let factor = exp2(simd, simd.sub_f32s(old, base));
        let minus = simd.neg_f32s(base);
        let mut sums = [zero; 2];
        for step in 0..steps {
            for p in 0..LANES {
                let key = step * GROUP + p;
                let low = exp2(simd, simd.mul_add_e_f32s(score(key), scale, minus));
                let high = exp2(simd, simd.mul_add_e_f32s(score(key + LANES), scale, minus));
                sums = [simd.add_f32s(sums[0], low), simd.add_f32s(sums[1], high)];
                let to = weights.wrapping_add(step * BLOCK + v * PART / 2 + p * LANES);
                // SAFETY: one line of the operand is in bounds.
                unsafe { store_line(simd, to, cut(simd, low), cut(simd, high)) };
            }
        }
        let kept = simd.mul_f32s(load(simd, &sum[..at + LANES], at), factor);
        store(simd, &mut max[..at + LANES], at, new);
        store(simd, &mut sum[..at + LANES], at, simd.add_f32s(kept, simd.add_f32s(sums[0], sums[1])));
        store(simd, &mut shrink[..at + LANES], at, factor);
    }
}

/// Computes `acc = acc · shrink + new`, `[32, 32]`, with one factor per column.
///
/// # Safety
/// All elements of `acc` must be in bounds.
#[inline(always)]
unsafe fn accumulate<S: Simd>(simd: S, acc: *mut f32, shrink: Option<&[f32; GROUP]>, new: &Output) {
    for v in (0..GROUP).step_by(LANES) {
        let shrink = shrink.map_or(simd.splat_f32s(1.0), |shrink| load(simd, &shrink[..v + LANES], v));
        for i in (v..SQUARE).step_by(GROUP) {
            // SAFETY: guaranteed by this function's contract.
            unsafe {
                let old = load_ptr(simd, acc.add(i), LANES);
                let new = load_ptr(simd, new.0.as_ptr().add(i), LANES);
                store_ptr(simd, acc.add(i), LANES, simd.mul_add_e_f32s(old, shrink, new));
            }
        }
    }
}

fn reset(x: &mut Vec<f32>, len: usize, value: f32) {
    x.clear();
    x.resize(len, value);
}

simd_fn! {
    // One function, because its steps share a dozen pointers into the scratch.
    fn forward_unit<'a>(simd: S, s: &'a mut Scratch, call: Call<'a>, kept: &'a Kept, slot: usize, unit: &'a [Block<'a>],
                        kv_head: usize, results: Results<'a>) -> () {
        let Shape { q_heads, head_dim: d, .. } = call.shape;
        let (group, deep) = (call.shape.group(), d.div_ceil(GROUP));
        let blocks = place(unit.iter().map(|&block| (0, block)), group);
        let panels = blocks.last().map_or(0, |placed| placed.lanes.end).div_ceil(GROUP);
        let (lanes, width) = (panels * GROUP, deep * GROUP);
        let col = kv_head * group * d;
        let rows = gather(call.q.columns(col..col + group * d), &blocks, d, lanes, width, &mut s.rows);
        let q = words(&mut s.q, panels * deep * BLOCK);
        // SAFETY: the buffer has room, and the CPU has the instructions.
        unsafe { pack_lanes(q, rows, lanes, width) };
        let acc = reserve(&mut s.acc, lanes * width);
        acc.fill(0.0);
        reset(&mut s.max, lanes, f32::NEG_INFINITY);
        reset(&mut s.sum, lanes, 0.0);
        let scores = reserve(&mut s.scores, KEYS * GROUP).as_mut_ptr();
        let weights = words(&mut s.weights, KEYS / GROUP * BLOCK);
        let mut product = Output([0.0; SQUARE]);
        let mut shrink = [0.0; GROUP];
        let mut sight = Sight { bits: [0; KEYS], end: 0 };
        let shared = usize::from(unit.len() > 1);
        let mut visits: Vec<(&[Placed], &Range<usize>)> = Vec::new();
        if shared == 1 {
            visits.push((&blocks, &unit[0].range.keys[0]));
        }
        for placed in &blocks {
            let own = &placed.block.range.keys[shared..];
            visits.extend(own.iter().map(|keys| (std::slice::from_ref(placed), keys)));
        }
        // SAFETY: the CPU has the instructions.
        let tiles = unsafe { Tiles::new() };
        for (blocks, range) in visits {
            let Some(place) = kept.places.get(&range.start) else { continue };
            let keys = kept.words.at(slot * kept.head + place.at).cast_const();
            let values = keys.wrapping_add(place.words(deep));
            let values_group = place.len.div_ceil(GROUP) * BLOCK;
            let (first, last) = (blocks[0].lanes.start / GROUP, blocks[blocks.len() - 1].lanes.end.div_ceil(GROUP));
            for start in (0..range.len()).step_by(KEYS) {
                let tile = range.start + start..range.end.min(range.start + start + KEYS);
                for panel in first..last {
                    sight.look(blocks, group, panel, &tile);
                    let steps = sight.end.div_ceil(GROUP);
                    if steps == 0 {
                        continue;
                    }
                    let lanes = panel * GROUP..(panel + 1) * GROUP;
                    // SAFETY: scratch was sized above, and the range is packed in `steps` blocks of 32 from `start` on.
                    unsafe {
                        for step in 0..steps {
                            let keys = keys.add((start / GROUP + step) * deep * BLOCK);
                            multiply_wide(scores.add(step * SQUARE), GROUP, keys, q.add(panel * deep * BLOCK), deep);
                        }
                        hide(scores, sight.bits(), f32::NEG_INFINITY);
                        let (max, sum) = (&mut s.max[lanes.clone()], &mut s.sum[lanes]);
                        let running = Running { max, sum, shrink: &mut shrink };
                        softmax(simd, scores, steps, call.scale * LOG2_E, weights, running);
                        for g in 0..deep {
                            let values = values.add(g * values_group + start / GROUP * BLOCK);
                            multiply_wide(product.0.as_mut_ptr(), GROUP, values, weights, steps);
                            let acc = acc.as_mut_ptr().add((panel * deep + g) * SQUARE);
                            accumulate(simd, acc, Some(&shrink), &product);
                        }
                    }
                }
            }
        }
        drop(tiles);
        for panel in 0..panels {
            let at = panel * GROUP * width;
            // SAFETY: there is a panel of accumulators, and room for its transpose.
            unsafe { turn(rows[at..].as_mut_ptr(), acc[at..].as_ptr(), width, GROUP) };
        }
        for Placed { block, lanes, .. } in &blocks {
            for i in 0..block.count {
                for g in 0..group {
                    let lane = lanes.start + i * group + g;
                    let head = block.query(i) * q_heads + kv_head * group + g;
                    let total = s.sum[lane];
                    let inverse = if total > 0.0 || total.is_nan() { 1.0 / total } else { 0.0 };
                    // SAFETY: every query row is in one unit, and this is the only task of its key head.
                    let (out, lse) = unsafe { (results.out.part(head * d, d), results.lse.part(head, 1)) };
                    for (y, x) in out.iter_mut().zip(&rows[lane * width..]) {
                        *y = x * inverse;
                    }
                    lse[0] = (s.max[lane] + total.log2()) * LN_2;
                }
            }
        }
    }
}

/// A tile of the backward pass: its keys, and the positions of its packed operands.
struct KeyTile {
    keys: Range<usize>,
    /// Number of groups of 32 keys before this tile.
    group: usize,
    /// Number of words before the tile's transposed keys, and number of words between groups of columns.
    turned: usize,
    turned_group: usize,
}

/// Inputs that the units of a chunk share.
#[derive(Clone, Copy)]
struct Pass<'a> {
    back: Back<'a>,
    chunk: &'a Chunk<'a>,
    kv_head: usize,
    tiles: &'a [KeyTile],
}

/// Adds the contribution of a chunk of keys to the gradients of one key head.
pub(super) fn backward(back: Back, chunk: &Chunk, kv_head: usize) {
    let call = back.call;
    let (group, d) = (call.shape.group(), call.shape.head_dim);
    let deep = d.div_ceil(GROUP);
    let max_queries = (MAX_LANES / group.max(1)).max(1);
    let mut scratch = TILED.take();
    let s = &mut scratch;
    let passes = chunk.keys.len().div_ceil(PASS).max(1);
    let step = chunk.keys.len().div_ceil(passes).next_multiple_of(GROUP).max(GROUP);
    for start in chunk.keys.clone().step_by(step) {
        let keys = start..chunk.keys.end.min(start + step);
        let pieces = pieces(chunk.seen.iter().map(|seen| seen.range), &keys);
        let groups: usize = pieces.iter().map(|piece| piece.len().div_ceil(GROUP)).sum();
        let [k, v, k_turned] =
            [&mut s.k, &mut s.v, &mut s.k_turned].map(|to| words(to, groups * deep * BLOCK));
        let (mut tiles, mut group_at) = (Vec::new(), 0);
        for piece in pieces {
            let (at, count) = (group_at * deep * BLOCK, piece.len().div_ceil(GROUP));
            // SAFETY: there is room for all groups of all pieces, and the CPU has the instructions.
            unsafe {
                pack_keys(k.wrapping_add(at), call.k, piece.clone(), kv_head * d, d);
                pack_keys(v.wrapping_add(at), call.v, piece.clone(), kv_head * d, d);
                pack_turned(k_turned.wrapping_add(at), count * BLOCK, call.k, piece.clone(), kv_head * d, d);
            }
            tiles.extend((0..piece.len()).step_by(KEYS).map(|first| KeyTile {
                keys: piece.start + first..piece.end.min(piece.start + first + KEYS),
                group: group_at + first / GROUP,
                turned: at + first / GROUP * BLOCK,
                turned_group: count * BLOCK,
            }));
            group_at += count;
        }
        let pass = Pass { back, chunk, kv_head, tiles: &tiles };
        let (mut unit, mut room) = (Vec::new(), max_queries);
        for (at, seen) in chunk.seen.iter().enumerate() {
            let range = seen.range;
            let Some(mut first) = first_query(range, &keys) else { continue };
            while first < range.queries.len() {
                let count = room.min(range.queries.len() - first);
                unit.push((at, Block { range, first, count }));
                (first, room) = (first + count, room - count);
                if room == 0 {
                    backward_unit(s, pass, &place(unit.drain(..), group));
                    room = max_queries;
                }
            }
        }
        if !unit.is_empty() {
            backward_unit(s, pass, &place(unit.drain(..), group));
        }
    }
    TILED.set(scratch);
}

/// Operands for a block of 32 keys and a panel, written by [`backward_scores`].
struct Operands {
    /// Weights, packed as a left operand with keys as rows.
    weights: *mut u32,
    /// Score gradients, packed as a left operand with keys as rows.
    left: *mut u32,
    /// Score gradients, packed as a right operand with keys as the inner dimension.
    right: *mut u32,
}

/// Converts the scores of a block of 32 keys and a panel to weights, and the gradients of weights to gradients of scores.
///
/// # Safety
/// All operands must be in bounds.
#[inline(always)]
unsafe fn backward_scores<S: Simd>(
    simd: S,
    scores: *const f32,
    dscores: *const f32,
    scale: f32,
    lse: &[f32],
    delta: &[f32],
    to: Operands,
) {
    let Operands { weights, left, right } = to;
    let factor = simd.splat_f32s(scale);
    let binary = simd.splat_f32s(scale * LOG2_E);
    let minus_lse = [0, LANES].map(|at| simd.neg_f32s(load(simd, &lse[..at + LANES], at)));
    let delta = [0, LANES].map(|at| load(simd, &delta[..at + LANES], at));
    for p in 0..LANES {
        let mut changes = [[simd.splat_f32s(0.0); 2]; 2];
        for half in 0..2 {
            let mut of_key = [simd.splat_f32s(0.0); 2];
            for v in 0..2 {
                let at = (p + half * LANES) * GROUP + v * LANES;
                // SAFETY: guaranteed by this function's contract.
                let (score, change) = unsafe {
                    (load_ptr(simd, scores.add(at), LANES), load_ptr(simd, dscores.add(at), LANES))
                };
                of_key[v] = exp2(simd, simd.mul_add_e_f32s(score, binary, minus_lse[v]));
                let change = simd.sub_f32s(change, delta[v]);
                changes[half][v] = simd.mul_f32s(simd.mul_f32s(of_key[v], change), factor);
            }
            let to = weights.wrapping_add(half * PART / 2 + p * LANES);
            // SAFETY: one line of the operand is in bounds.
            unsafe { store_line(simd, to, cut(simd, of_key[0]), cut(simd, of_key[1])) };
        }
        let [[a, b], [c, d]] = changes;
        let [a, b, c, d] = [cut(simd, a), cut(simd, b), cut(simd, c), cut(simd, d)];
        // SAFETY: these lines of the operands are in bounds.
        unsafe {
            store_line(simd, left.wrapping_add(p * LANES), a, b);
            store_line(simd, left.wrapping_add(PART / 2 + p * LANES), c, d);
            store_line(simd, right.wrapping_add(p * LANES), a, c);
            store_line(simd, right.wrapping_add(PART / 2 + p * LANES), b, d);
        }
    }
}

simd_fn! {
    // One function, because its steps share a dozen pointers into the scratch.
    fn backward_unit<'a>(simd: S, s: &'a mut Scratch, pass: Pass<'a>, blocks: &'a [Placed<'a>]) -> () {
        let Pass { back: Back { call, saved, grad }, chunk, kv_head, tiles } = pass;
        let Shape { q_heads, head_dim: d, .. } = call.shape;
        let (group, deep) = (call.shape.group(), d.div_ceil(GROUP));
        let panels = blocks.last().map_or(0, |placed| placed.lanes.end).div_ceil(GROUP);
        let (lanes, width) = (panels * GROUP, deep * GROUP);
        let col = kv_head * group * d;
        let size = panels * deep * BLOCK;
        let heads = |rows: Mat<'a>| rows.columns(col..col + group * d);
        let rows = gather(heads(call.q), blocks, d, lanes, width, &mut s.rows);
        let more = gather(heads(saved.dout), blocks, d, lanes, width, &mut s.more_rows);
        let (q, q_rows) = (words(&mut s.q, size), words(&mut s.q_rows, size));
        let (dout, dout_rows) = (words(&mut s.dout, size), words(&mut s.dout_rows, size));
        // SAFETY: the buffer has room, and the CPU has the instructions.
        unsafe {
            pack_lanes(q, rows, lanes, width);
            pack_heads(q_rows, rows, lanes, width);
            pack_lanes(dout, more, lanes, width);
            pack_heads(dout_rows, more, lanes, width);
        }
        // This maximum gives padding lanes weight 0.
        reset(&mut s.max, lanes, f32::INFINITY);
        reset(&mut s.sum, lanes, 0.0);
        for Placed { block, lanes, .. } in blocks {
            for i in 0..block.count {
                for g in 0..group {
                    let (lane, query) = (lanes.start + i * group + g, block.query(i));
                    let (dout, out) = (&more[lane * width..][..d], saved.out.part(query, col + g * d, d));
                    let mut sum = simd.splat_f32s(0.0);
                    for j in (0..d).step_by(LANES) {
                        sum = simd.mul_add_e_f32s(load(simd, dout, j), load(simd, out, j), sum);
                    }
                    s.sum[lane] = simd.reduce_sum_f32s(sum);
                    s.max[lane] = saved.lse[query * q_heads + kv_head * group + g] * LOG2_E;
                }
            }
        }
        let acc = reserve(&mut s.acc, lanes * width);
        acc.fill(0.0);
        let scores = reserve(&mut s.scores, KEYS * GROUP).as_mut_ptr();
        let dscores = reserve(&mut s.dscores, KEYS * GROUP).as_mut_ptr();
        let weights = words(&mut s.weights, KEYS / GROUP * panels * BLOCK);
        let left = words(&mut s.dscores_left, KEYS / GROUP * panels * BLOCK);
        let right = words(&mut s.dscores_right, KEYS / GROUP * BLOCK);
        let [k, v, k_turned] = [&mut s.k, &mut s.v, &mut s.k_turned].map(|of| of.as_ptr().cast::<u32>());
        let mut product = Output([0.0; SQUARE]);
        let mut sight = Sight { bits: [0; KEYS], end: 0 };
        // SAFETY: the CPU has the instructions.
        let configured = unsafe { Tiles::new() };
        for KeyTile { keys, group: at, turned, turned_group } in tiles {
            // The panels that see each block of 32 keys.
            let mut seeing = [const { 0..0 }; KEYS / GROUP];
            for panel in 0..panels {
                sight.look(blocks, group, panel, keys);
                let steps = sight.end.div_ceil(GROUP);
                let at = at * deep * BLOCK;
                // SAFETY: scratch was sized above, and the tile is packed.
                unsafe {
                    for step in 0..steps {
                        let at = at + step * deep * BLOCK;
                        multiply_wide(scores.add(step * SQUARE), GROUP, k.add(at), q.add(panel * deep * BLOCK), deep);
                        multiply_wide(dscores.add(step * SQUARE), GROUP, v.add(at), dout.add(panel * deep * BLOCK), deep);
                    }
                    hide(scores, sight.bits(), f32::NEG_INFINITY);
                    hide(dscores, sight.bits(), 0.0);
                    for (step, seeing) in seeing.iter_mut().enumerate().take(steps) {
                        let of = |panel: usize| (step * panels + panel) * BLOCK;
                        if seeing.start == seeing.end {
                            *seeing = panel..panel;
                        }
                        // Panels between the first and the last that do not see the block.
                        for hole in seeing.end..panel {
                            weights.add(of(hole)).write_bytes(0, BLOCK);
                            left.add(of(hole)).write_bytes(0, BLOCK);
                        }
                        seeing.end = panel + 1;
                        let lanes = panel * GROUP..(panel + 1) * GROUP;
                        backward_scores(
                            simd,
                            scores.add(step * SQUARE),
                            dscores.add(step * SQUARE),
                            call.scale,
                            &s.max[lanes.clone()],
                            &s.sum[lanes],
                            Operands {
                                weights: weights.add(of(panel)),
                                left: left.add(of(panel)),
                                right: right.add(step * BLOCK),
                            },
                        );
                    }
                    for g in 0..if steps == 0 { 0 } else { deep } {
                        let k_turned = k_turned.add(turned + g * turned_group);
                        multiply_wide(product.0.as_mut_ptr(), GROUP, k_turned, right, steps);
                        let acc = acc.as_mut_ptr().add((panel * deep + g) * SQUARE);
                        accumulate(simd, acc, None, &product);
                    }
                }
            }
            let end = grad.stride * (keys.end - 1) + kv_head * d + d;
            // SAFETY: only this task writes these rows of the key head. The calls check the bounds and keep no reference.
            unsafe {
                grad.data.part(end + grad.k_col, 0);
                grad.data.part(end + grad.v_col, 0);
            }
            for (step, seeing) in seeing.into_iter().enumerate().filter(|(_, seeing)| !seeing.is_empty()) {
                let from = (step * panels + seeing.start) * BLOCK;
                let row = keys.start + step * GROUP;
                let count = GROUP.min(keys.end - row);
                for g in 0..deep {
                    let to = grad.stride * row + kv_head * d + g * GROUP;
                    let columns = GROUP.min(d - g * GROUP);
                    let lanes = (g * panels + seeing.start) * BLOCK;
                    // SAFETY: as above.
                    unsafe {
                        for (col, left, right) in
                            [(grad.v_col, weights, dout_rows), (grad.k_col, left, q_rows)]
                        {
                            multiply_wide(product.0.as_mut_ptr(), GROUP, left.add(from), right.add(lanes), seeing.len());
                            let to = grad.data.ptr(to + col);
                            amx::store(to, grad.stride, &product, count, columns, None, true);
                        }
                    }
                }
            }
        }
        drop(configured);
        for panel in 0..panels {
            let at = panel * GROUP * width;
            // SAFETY: there is a panel of accumulators, and room for its transpose.
            unsafe { turn(rows[at..].as_mut_ptr(), acc[at..].as_ptr(), width, GROUP) };
        }
        for Placed { block, lanes, seen } in blocks {
            for i in 0..block.count {
                for g in 0..group {
                    let lane = lanes.start + i * group + g;
                    // SAFETY: each query row is in only one block of the chunk, and this is the only task of its key head.
                    let dq = unsafe { grad.dq(&chunk.seen[*seen], block.first + i, col + g * d, d) };
                    dq.iter_mut().zip(&rows[lane * width..]).for_each(|(to, x)| *to += x);
                }
            }
        }
    }
}
