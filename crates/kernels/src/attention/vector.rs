//! Attention with the vector instructions of any CPU: small products of [`crate::microkernel`], with the softmax between them.

use std::f32::consts::{LN_2, LOG2_E};
use std::mem::take;
use std::ops::Range;

use super::chunks::{Chunk, Seen};
use super::{
    AttentionLayout, Back, Block, Call, MIN_PARALLEL, Results, Shape, Unit, first_lane, key_rows, units,
};
use crate::mat::Mat;
use crate::microkernel::Product;
use crate::parallel;
use crate::simd::{Simd, exp2, load, load_ptr, prefetch_far, select, store, store_ptr, transpose};
use crate::workspace::{LINE, Line, VECTOR, reserve};

/// Maximum number of lanes that are processed together. The only exception is a key head that more query heads share.
const MAX_LANES: usize = 64;
/// Number of key rows in a tile.
const TILE: usize = 64;
/// Number of elements to which lanes and head columns are padded in scratch: the lanes of the widest vector.
const PAD: usize = 16;

/// Minimum number of lanes at which the rows of values are gathered before they are multiplied.
const GATHER: usize = 32;
/// Powers of two by which a score may exceed its lane's reference before the sums are rescaled. A weight is at most 2⁸.
const SLACK: f32 = 8.0;

/// Buffers of one thread. Lanes are padded to `width`, and head columns to `depth`.
#[derive(Default)]
pub(crate) struct Scratch {
    q: Vec<Line>,
    q_t: Vec<Line>,
    dout: Vec<Line>,
    dout_t: Vec<Line>,
    rows: Vec<Line>,
    acc: Vec<Line>,
    scores: Vec<Line>,
    dscores: Vec<Line>,
    /// Reference of each lane's scores (times log₂ e), sum of weights, and factor that previous sums are multiplied by.
    max: Vec<f32>,
    sum: Vec<f32>,
    shrink: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
}

fn reset(x: &mut Vec<f32>, len: usize, value: f32) {
    x.clear();
    x.resize(len, value);
}

/// A tile of key rows `key..key + len`. `causal_at` is its offset in the causal range if at least one lane does not see all of
/// the rows.
#[derive(Clone, Copy)]
struct Tile {
    key: usize,
    len: usize,
    causal_at: Option<usize>,
}

/// Returns the tiles of the key ranges `from..to` that a block sees. They are clipped to the rows `within`.
fn tiles(block: Block, from: usize, to: usize, within: Range<usize>) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let last = block.range.keys.len().wrapping_sub(1);
    for (at, keys) in block.range.keys.iter().enumerate().take(to).skip(from) {
        let causal = block.range.causal && at == last;
        let seen = |i: usize| if causal { block.range.seen_of_last(block.first + i) } else { keys.len() };
        let end = seen(block.count - 1).min(within.end.saturating_sub(keys.start));
        for start in (within.start.saturating_sub(keys.start)..end).step_by(TILE) {
            let len = TILE.min(end - start);
            tiles.push(Tile {
                key: keys.start + start,
                len,
                causal_at: (start + len > seen(0)).then_some(start),
            });
        }
    }
    tiles
}

/// Gathers the query heads of one key head (the columns of `rows`), for every query, to `[lanes, d]` and `[d, width]`. Elements
/// beyond the lanes are padded with zeros.
fn gather_lanes<'a>(
    rows: Mat,
    unit: &[Block],
    d: usize,
    width: usize,
    plain: &'a mut Vec<Line>,
    transposed: &'a mut Vec<Line>,
) -> (&'a [f32], &'a [f32]) {
    let group = rows.cols / d.max(1);
    let lanes = unit.iter().map(|block| block.count).sum::<usize>() * group;
    let (plain, transposed) = (reserve(plain, lanes * d), reserve(transposed, d * width));
    let mut lane = 0;
    for block in unit {
        for i in 0..block.count {
            plain[lane * d..][..group * d].copy_from_slice(rows.row(block.query(i)));
            lane += group;
        }
    }
    if lanes < width {
        transposed.fill(0.0);
    }
    // SAFETY: the buffers have `lanes` rows of `d` elements, and `d` rows of `width` elements; `width` is at least `lanes`.
    unsafe { transpose(transposed.as_mut_ptr(), width, plain.as_ptr(), d, lanes, d) };
    (plain, transposed)
}

/// Copies the rows of a head so that they are adjacent. In their matrix, rows are a power of two apart, and few of them fit in
/// the first-level cache at the same time.
fn gather_rows(rows: Mat, keys: Range<usize>, at: usize, d: usize, to: &mut Vec<Line>) -> *const f32 {
    let to = reserve(to, keys.len() * d);
    for (to, key) in to.chunks_exact_mut(d.max(1)).zip(keys) {
        to.copy_from_slice(rows.part(key, at, d));
    }
    to.as_ptr()
}

/// Prefetches the rows of a head, if they are in bounds.
#[inline(always)]
fn ask(rows: Mat, keys: Range<usize>, at: usize, d: usize) {
    for key in keys.start..keys.end.min(rows.rows) {
        for line in (at..at + d).step_by(LINE) {
            prefetch_far(rows.data.as_ptr().wrapping_add(key * rows.stride + line));
        }
    }
}

/// Applies the online softmax to one tile, for the first `n` lanes of `s.scores [len, width]`. These lanes start at lane `first`
/// of the unit.
///
/// Scores become weights, `max` and `sum` are updated, and `shrink` becomes the factor that previous sums are multiplied by. The
/// reference of a lane's scores changes only when they exceed it by more than [`SLACK`], so that rescaling is rare.
#[inline(always)]
fn softmax<S: Simd>(simd: S, s: &mut Scratch, scale: f32, len: usize, width: usize, first: usize, n: usize) {
    let scores = reserve(&mut s.scores, len * width).as_mut_ptr();
    let scale = simd.splat_f32s(scale * LOG2_E);
    let infinite = simd.splat_f32s(f32::NEG_INFINITY);
    let zero = simd.splat_f32s(0.0);
    let slack = simd.splat_f32s(SLACK);
    for lane in (0..n).step_by(S::F32_LANES) {
        let (at, end) = (first + lane, first + n);
        let column = scores.wrapping_add(lane);
        let mut top = [infinite; 2];
        for key in (0..len).step_by(2) {
            let (first, second) = (column.wrapping_add(key * width), (key + 1).min(len - 1) * width);
            // SAFETY: all vectors are complete, because `width` is padded.
            unsafe {
                top[0] = simd.max_f32s(load_ptr(simd, first, S::F32_LANES), top[0]);
                top[1] = simd.max_f32s(load_ptr(simd, column.wrapping_add(second), S::F32_LANES), top[1]);
            }
        }
        let old = load(simd, &s.max[..end], at);
        let new = simd.max_f32s(simd.mul_f32s(simd.max_f32s(top[0], top[1]), scale), old);
        let new = select(simd, simd.greater_than_f32s(new, simd.add_f32s(old, slack)), new, old);
        // A lane that has seen no key yet keeps −∞. Any finite substitute gives the key weight 0.
        let base = select(simd, simd.equal_f32s(new, infinite), zero, new);
        let shrink = exp2(simd, simd.sub_f32s(old, base));
        let minus = simd.neg_f32s(base);
        let mut sum = simd.mul_f32s(load(simd, &s.sum[..end], at), shrink);
        for key in 0..len {
            let place = column.wrapping_add(key * width);
            // SAFETY: as above.
            unsafe {
                let score = load_ptr(simd, place, S::F32_LANES);
                let weight = exp2(simd, simd.mul_add_e_f32s(score, scale, minus));
                sum = simd.add_f32s(sum, weight);
                store_ptr(simd, place, S::F32_LANES, weight);
            }
        }
        store(simd, &mut s.max[..end], at, new);
        store(simd, &mut s.sum[..end], at, sum);
        store(simd, &mut s.shrink[..n], lane, shrink);
    }
}

/// Inputs that the tiles of a unit share.
#[derive(Clone, Copy)]
struct Pass<'a> {
    call: Call<'a>,
    kv_head: usize,
    /// Transposed queries, with `head_dim · width` elements and one vector more.
    q_t: *const f32,
    acc: *mut f32,
    width: usize,
    depth: usize,
}

/// Processes one tile for some lanes of a unit. `seen` is true if these lanes have seen another tile before.
#[inline(always)]
fn forward_tile<S: Simd>(
    simd: S,
    s: &mut Scratch,
    pass: Pass,
    lanes: Range<usize>,
    block: Block,
    tile: Tile,
    seen: bool,
) {
    let Pass { call, kv_head, q_t, acc, width, depth } = pass;
    let Tile { key, len, causal_at } = tile;
    let d = call.shape.head_dim;
    let n = lanes.len();
    if n < GATHER {
        // With few lanes, a row is finished faster than memory delivers the next: during decoding, rows of caches come from
        // memory.
        ask(call.v, key..key + len, kv_head * d, d);
        ask(call.k, key + len..key + len + TILE, kv_head * d, d);
    }
    let scores = reserve(&mut s.scores, TILE * width);
    // SAFETY: `key_rows` checks the key rows. Scratch has room for TILE × width scores, and for queries in complete vectors of
    // lanes.
    unsafe {
        Product {
            c: scores.as_mut_ptr(),
            ldc: width,
            a: key_rows(call.k, key, len, kv_head * d, d),
            a_row: call.k.stride,
            a_col: 1,
            b: q_t.wrapping_add(lanes.start),
            ldb: width,
            m: len,
            k: d,
            n: n.next_multiple_of(S::F32_LANES),
            accumulate: false,
        }
        .run(simd);
    }
    if let Some(at) = causal_at {
        for key in 0..len {
            let hidden = first_lane(block, call.shape.group(), at + key);
            scores[key * width..key * width + hidden].fill(f32::NEG_INFINITY);
        }
    }
    softmax(simd, s, call.scale, len, width, lanes.start, n);
    let acc = acc.wrapping_add(lanes.start * depth);
    for lane in 0..if seen { n } else { 0 } {
        if s.shrink[lane] != 1.0 {
            let shrink = simd.splat_f32s(s.shrink[lane]);
            for j in (0..d).step_by(S::F32_LANES) {
                // SAFETY: `acc` has one row of `depth ≥ d` elements per lane, in complete vectors.
                unsafe {
                    let to = acc.wrapping_add(lane * depth + j);
                    let x = simd.mul_f32s(load_ptr(simd, to, S::F32_LANES), shrink);
                    store_ptr(simd, to, S::F32_LANES, x);
                }
            }
        }
    }
    let (b, ldb) = if n >= GATHER {
        (gather_rows(call.v, key..key + len, kv_head * d, d, &mut s.rows), d)
    } else {
        (key_rows(call.v, key, len, kv_head * d, d), call.v.stride)
    };
    let a = reserve(&mut s.scores, TILE * width).as_ptr();
    // SAFETY: as above.
    unsafe {
        Product {
            c: acc,
            ldc: depth,
            a,
            a_row: 1,
            a_col: width,
            b,
            ldb,
            m: n,
            k: len,
            n: d,
            accumulate: seen,
        }
        .run(simd);
    }
}

simd_fn! {
    fn forward_unit<'a>(simd: S, s: &'a mut Scratch, call: Call<'a>, unit: &'a [Block<'a>], kv_head: usize,
                        results: Results<'a>) -> () {
        let Shape { q_heads, head_dim: d, .. } = call.shape;
        let group = call.shape.group();
        let lanes = unit.iter().map(|b| b.count).sum::<usize>() * group;
        let (width, depth) = (lanes.next_multiple_of(PAD), d.next_multiple_of(PAD));
        // These buffers are moved out of the scratch because the tiles use the scratch.
        let (mut q, mut q_t, mut acc) = (take(&mut s.q), take(&mut s.q_t), take(&mut s.acc));
        // Extra room, because the last lanes are read as a complete vector.
        reserve(&mut q_t, d * width + PAD);
        let col = kv_head * group * d;
        gather_lanes(call.q.columns(col..col + group * d), unit, d, width, &mut q, &mut q_t);
        let sums = reserve(&mut acc, lanes * depth);
        reset(&mut s.max, width, f32::NEG_INFINITY);
        reset(&mut s.sum, width, 0.0);
        reset(&mut s.shrink, width, 0.0);
        let pass = Pass { call, kv_head, q_t: q_t.as_ptr().cast(), acc: sums.as_mut_ptr(), width, depth };
        let shared = usize::from(unit.len() > 1);
        let mut all_seen = false;
        if shared == 1 {
            for tile in tiles(unit[0], 0, 1, 0..usize::MAX) {
                forward_tile(simd, s, pass, 0..lanes, unit[0], tile, all_seen);
                all_seen = true;
            }
        }
        let mut lane = 0;
        for &block in unit {
            let own = lane..lane + block.count * group;
            lane = own.end;
            let mut seen = all_seen;
            for tile in tiles(block, shared, usize::MAX, 0..usize::MAX) {
                forward_tile(simd, s, pass, own.clone(), block, tile, seen);
                seen = true;
            }
            for i in 0..block.count {
                for g in 0..group {
                    let lane = own.start + i * group + g;
                    let head = block.query(i) * q_heads + kv_head * group + g;
                    let total = s.sum[lane];
                    let inverse = if total > 0.0 || total.is_nan() { 1.0 / total } else { 0.0 };
                    // SAFETY: every query row is in one unit, and this is the only task of its key head.
                    let (out, lse) = unsafe { (results.out.part(head * d, d), results.lse.part(head, 1)) };
                    if seen {
                        // SAFETY: the row of this lane has been written, and no tile uses it any more.
                        let sums = unsafe { std::slice::from_raw_parts(pass.acc.add(lane * depth), d) };
                        out.iter_mut().zip(sums).for_each(|(y, x)| *y = x * inverse);
                    } else {
                        out.fill(0.0);
                    }
                    lse[0] = (s.max[lane] + total.log2()) * LN_2;
                }
            }
        }
        (s.q, s.q_t, s.acc) = (q, q_t, acc);
    }
}

/// Converts the scores of one tile to weights, and the gradients of weights to gradients of scores. Key `key` is processed only
/// for the lanes from `hidden(key)` on.
#[inline(always)]
fn backward_scores<S: Simd>(
    simd: S,
    s: &mut Scratch,
    scale: f32,
    width: usize,
    group: usize,
    block: Block,
    tile: Tile,
) {
    let Tile { len, causal_at, .. } = tile;
    let (scores, dscores) = (reserve(&mut s.scores, len * width), reserve(&mut s.dscores, len * width));
    let binary = simd.splat_f32s(scale * LOG2_E);
    let scale = simd.splat_f32s(scale);
    for lane in (0..width).step_by(S::F32_LANES) {
        let minus_lse = simd.neg_f32s(load(simd, &s.lse, lane));
        let delta = load(simd, &s.delta, lane);
        for at in (lane..len * width).step_by(width) {
            let (score, change) =
                (scores.as_mut_ptr().wrapping_add(at), dscores.as_mut_ptr().wrapping_add(at));
            // SAFETY: the vectors of both are complete, because `width` is padded.
            unsafe {
                let x = load_ptr(simd, score, S::F32_LANES);
                let weight = exp2(simd, simd.mul_add_e_f32s(x, binary, minus_lse));
                let d = simd.sub_f32s(load_ptr(simd, change, S::F32_LANES), delta);
                store_ptr(simd, score, S::F32_LANES, weight);
                let d = simd.mul_f32s(simd.mul_f32s(weight, d), scale);
                store_ptr(simd, change, S::F32_LANES, d);
            }
        }
    }
    if let Some(at) = causal_at {
        for key in 0..len {
            let hidden = first_lane(block, group, at + key);
            scores[key * width..key * width + hidden].fill(0.0);
            dscores[key * width..key * width + hidden].fill(0.0);
        }
    }
}

simd_fn! {
    // One function, because its steps share the pointers into the scratch.
    fn backward_block<'a>(simd: S, s: &'a mut Scratch, back: Back<'a>, block: Block<'a>, keys: Range<usize>,
                          seen: &'a Seen<'a>, kv_head: usize) -> () {
        let Back { call, saved, grad } = back;
        let Shape { q_heads, head_dim: d, .. } = call.shape;
        let group = call.shape.group();
        let lanes = block.count * group;
        let (width, depth) = (lanes.next_multiple_of(PAD), d.next_multiple_of(PAD));
        reset(&mut s.lse, width, 0.0);
        reset(&mut s.delta, width, 0.0);
        let unit = [block];
        let col = kv_head * group * d;
        let heads = |rows: Mat<'a>| rows.columns(col..col + group * d);
        let (q, q_t) = gather_lanes(heads(call.q), &unit, d, width, &mut s.q, &mut s.q_t);
        let (q, q_t) = (q.as_ptr(), q_t.as_ptr());
        let (dout, dout_t) = gather_lanes(heads(saved.dout), &unit, d, width, &mut s.dout, &mut s.dout_t);
        for i in 0..block.count {
            for g in 0..group {
                let (lane, query) = (i * group + g, block.query(i));
                let (dout, out) = (&dout[lane * d..(lane + 1) * d], saved.out.part(query, col + g * d, d));
                let mut sum = simd.splat_f32s(0.0);
                for j in (0..d).step_by(S::F32_LANES) {
                    sum = simd.mul_add_e_f32s(load(simd, dout, j), load(simd, out, j), sum);
                }
                s.delta[lane] = simd.reduce_sum_f32s(sum);
                s.lse[lane] = saved.lse[query * q_heads + kv_head * group + g] * LOG2_E;
            }
        }
        let (dout, dout_t) = (dout.as_ptr(), dout_t.as_ptr());
        let acc = reserve(&mut s.acc, lanes * depth).as_mut_ptr();
        let mut any = false;
        for tile in tiles(block, 0, usize::MAX, keys) {
            let Tile { key, len, .. } = tile;
            let k = gather_rows(call.k, key..key + len, kv_head * d, d, &mut s.rows);
            let scores = Product {
                c: reserve(&mut s.scores, TILE * width).as_mut_ptr(), ldc: width, a: k, a_row: d, a_col: 1, b: q_t,
                ldb: width, m: len, k: d, n: width, accumulate: false,
            };
            let dscores = Product {
                c: reserve(&mut s.dscores, TILE * width).as_mut_ptr(), a: key_rows(call.v, key, len, kv_head * d, d),
                a_row: call.v.stride, b: dout_t, ..scores
            };
            // SAFETY: `key_rows` has checked the rows of v, and scratch was sized above.
            unsafe {
                scores.run(simd);
                dscores.run(simd);
            }
            backward_scores(simd, s, call.scale, width, group, block, tile);
            let (weights, changes) = (s.scores.as_ptr().cast(), s.dscores.as_ptr().cast());
            let end = grad.stride * (key + len - 1) + kv_head * d + d;
            // SAFETY: only this task writes the rows of this key head. The calls check the bounds and keep no reference.
            let (dk, dv) = unsafe {
                grad.data.part(end + grad.k_col, 0);
                grad.data.part(end + grad.v_col, 0);
                let at = grad.stride * key + kv_head * d;
                (grad.data.ptr(at + grad.k_col), grad.data.ptr(at + grad.v_col))
            };
            let dv = Product {
                c: dv, ldc: grad.stride, a: weights, a_row: width, a_col: 1, b: dout, ldb: d, m: len, k: lanes, n: d,
                accumulate: true,
            };
            let dk = Product { c: dk, a: changes, b: q, ..dv };
            let dq = Product {
                c: acc, ldc: depth, a: changes, a_row: 1, a_col: width, b: k, ldb: d, m: lanes, k: len, n: d,
                accumulate: any,
            };
            any = true;
            // SAFETY: in bounds for the same reasons as above. All three sums exclude padding lanes.
            unsafe {
                dv.run(simd);
                dk.run(simd);
                dq.run(simd);
            }
        }
        for lane in 0..if any { lanes } else { 0 } {
            // SAFETY: each query row is in only one block of the chunk, and this is the only task of its key head. The sums of
            // the lane have been written.
            let (dq, sums) = unsafe {
                let dq = grad.dq(seen, block.first + lane / group, col + lane % group * d, d);
                (dq, std::slice::from_raw_parts(acc.add(lane * depth), d))
            };
            dq.iter_mut().zip(sums).for_each(|(to, x)| *to += x);
        }
    }
}

/// Adds the contribution of a chunk of keys to the gradients of one key head.
pub(super) fn backward(back: Back, chunk: &Chunk, kv_head: usize) {
    let max_queries = (MAX_LANES / back.call.shape.group().max(1)).max(1);
    let mut scratch = VECTOR.take();
    for seen in &chunk.seen {
        let range = seen.range;
        for first in (seen.first..range.queries.len()).step_by(max_queries) {
            let block = Block { range, first, count: max_queries.min(range.queries.len() - first) };
            backward_block(&mut scratch, back, block, chunk.keys.clone(), seen, kv_head);
        }
    }
    VECTOR.set(scratch);
}

/// Runs [`super::forward`] with vectors.
pub(super) fn forward(call: Call, layout: &AttentionLayout, results: Results) {
    let shape = call.shape;
    let run = |(unit, kv_head): (&Unit, usize)| {
        let mut scratch = VECTOR.take();
        forward_unit(&mut scratch, call, unit, kv_head, results);
        VECTOR.set(scratch);
    };
    let work = layout.pairs() * (shape.q_heads * shape.head_dim) as u64;
    let threads = rayon::current_num_threads();
    let mut cut = units(layout, shape.group(), MAX_LANES);
    if threads == 1 || work < MIN_PARALLEL {
        cut.iter().for_each(|unit| (0..shape.kv_heads).for_each(|head| run((unit, head))));
        return;
    }
    // Wide units read keys and values less often. Narrow units keep more threads busy.
    let rounds = if layout.ranges.iter().all(|range| range.queries.len() <= 1) { 2 } else { 1 };
    for (lanes, least) in [(MAX_LANES / 2, 2 * threads), (PAD, rounds * threads)] {
        if cut.len() * shape.kv_heads < least {
            cut = units(layout, shape.group(), lanes);
        }
    }
    let tasks = cut.len() * shape.kv_heads;
    if tasks > 0 && 2 * tasks <= threads {
        // A unit of few lanes takes as long as one of a whole vector, so there are no more units than threads.
        cut = units(layout, shape.group(), PAD / (threads / tasks));
    }
    let tasks: Vec<(&Unit, usize)> =
        cut.iter().flat_map(|unit| (0..shape.kv_heads).map(move |head| (unit, head))).collect();
    parallel::tasks(tasks.len(), usize::MAX, |i| run(tasks[i]));
}
