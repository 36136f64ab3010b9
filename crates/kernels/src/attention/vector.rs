//! Attention with the vector instructions of any CPU: small products of [`crate::microkernel`] between softmaxes.

use std::cell::RefCell;
use std::ops::Range;

use super::chunks::{Chunk, Seen};
use super::{
    AttentionLayout, Block, Call, Gradients, MIN_PARALLEL, Rows, Saved, Shape, Unit, first_lane, units,
};
use crate::microkernel::Product;
use crate::parallel::{self, Shared};
use crate::simd::{Simd, exp, load, select, store};

/// Lanes processed together, unless one key head has more query heads.
const MAX_LANES: usize = 64;
/// Key rows of one tile.
const TILE: usize = 64;
/// Lanes and head columns in scratch are padded to this, the widest vector.
const PAD: usize = 16;

/// Buffers of one thread; lanes are padded to `width`, head columns to `depth`.
#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    q_t: Vec<f32>,
    dout: Vec<f32>,
    dout_t: Vec<f32>,
    acc: Vec<f32>,
    scores: Vec<f32>,
    dscores: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
    scale: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

fn reset(x: &mut Vec<f32>, len: usize, value: f32) {
    x.clear();
    x.resize(len, value);
}

/// Key rows `key..key + len`; `causal_at` is the offset in the causal range if some lane does not see all of them.
#[derive(Clone, Copy)]
struct Tile {
    key: usize,
    len: usize,
    causal_at: Option<usize>,
}

/// The tiles that a block sees of its key ranges `from..to`, as far as they are `within` these rows.
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

/// Fills `nat [lanes, d]` and `transposed [d, width]` with one key head's query heads of every query.
#[inline(always)]
fn gather_lanes(
    nat: &mut [f32],
    transposed: &mut [f32],
    rows: Rows,
    unit: &[Block],
    width: usize,
    col: usize,
    group: usize,
    d: usize,
) {
    let mut lane = 0;
    for block in unit {
        for i in 0..block.count {
            for g in 0..group {
                let source = rows.part(block.query(i), col + g * d, d);
                for (j, &x) in source.iter().enumerate() {
                    transposed[j * width + lane] = x;
                }
                if !nat.is_empty() {
                    nat[lane * d..(lane + 1) * d].copy_from_slice(source);
                }
                lane += 1;
            }
        }
    }
}

/// Online softmax of one tile for the lanes `lo..hi`: scores become weights, `max`, `sum` and `acc` are updated.
#[inline(always)]
fn forward_tile<S: Simd>(
    simd: S,
    s: &mut Scratch,
    call: &Call,
    kv_head: usize,
    lanes: Range<usize>,
    width: usize,
    depth: usize,
    block: Block,
    tile: Tile,
) {
    let Tile { key, len, causal_at } = tile;
    let d = call.shape.head_dim;
    let n = lanes.len();
    // SAFETY: `tile` checks the key rows; scratch holds TILE × width scores, d × width queries; n ≤ width.
    unsafe {
        Product {
            c: s.scores.as_mut_ptr(),
            ldc: width,
            a: call.k.tile(key, len, kv_head * d, d),
            a_row: call.k.stride,
            a_col: 1,
            b: s.q_t.as_ptr().wrapping_add(lanes.start),
            ldb: width,
            m: len,
            k: d,
            n,
            accumulate: false,
        }
        .run(simd);
    }
    if let Some(at) = causal_at {
        for key in 0..len {
            let hidden = first_lane(block, call.shape.group(), at + key);
            s.scores[key * width..key * width + hidden].fill(f32::NEG_INFINITY);
        }
    }
    let scale = simd.splat_f32s(call.scale);
    let infinite = simd.splat_f32s(f32::NEG_INFINITY);
    let zero = simd.splat_f32s(0.0);
    for lane in (0..n).step_by(S::F32_LANES) {
        let at = lanes.start + lane;
        let mut top = infinite;
        for key in 0..len {
            top = simd.max_f32s(load(simd, &s.scores[..key * width + n], key * width + lane), top);
        }
        let old = load(simd, &s.max[..lanes.end], at);
        let new = simd.max_f32s(simd.mul_f32s(top, scale), old);
        // A lane that has seen nothing yet keeps −∞ as its maximum; any finite stand-in gives it weight 0.
        let base = select(simd, simd.equal_f32s(new, infinite), zero, new);
        let shrink = exp(simd, simd.sub_f32s(old, base));
        let minus = simd.neg_f32s(base);
        let mut sum = simd.mul_f32s(load(simd, &s.sum[..lanes.end], at), shrink);
        for key in 0..len {
            let row = &mut s.scores[..key * width + n];
            let score = load(simd, row, key * width + lane);
            let weight = exp(simd, simd.mul_add_e_f32s(score, scale, minus));
            sum = simd.add_f32s(sum, weight);
            store(simd, row, key * width + lane, weight);
        }
        store(simd, &mut s.max[..lanes.end], at, new);
        store(simd, &mut s.sum[..lanes.end], at, sum);
        store(simd, &mut s.scale[..n], lane, shrink);
    }
    for lane in 0..n {
        if s.scale[lane] != 1.0 {
            let shrink = simd.splat_f32s(s.scale[lane]);
            let row = &mut s.acc[(lanes.start + lane) * depth..][..d];
            for j in (0..d).step_by(S::F32_LANES) {
                let x = simd.mul_f32s(load(simd, row, j), shrink);
                store(simd, row, j, x);
            }
        }
    }
    // SAFETY: as above; `acc` holds one row of `depth ≥ d` per lane.
    unsafe {
        Product {
            c: s.acc.as_mut_ptr().wrapping_add(lanes.start * depth),
            ldc: depth,
            a: s.scores.as_ptr(),
            a_row: 1,
            a_col: width,
            b: call.v.tile(key, len, kv_head * d, d),
            ldb: call.v.stride,
            m: n,
            k: len,
            n: d,
            accumulate: true,
        }
        .run(simd);
    }
}

simd_fn! {
    fn forward_unit<'a>(simd: S, s: &'a mut Scratch, call: Call<'a>, unit: &'a [Block<'a>], kv_head: usize,
                        out: Shared<'a>, lse: Shared<'a>) -> () {
        let Shape { q_heads, head_dim: d, .. } = call.shape;
        let group = call.shape.group();
        let lanes = unit.iter().map(|b| b.count).sum::<usize>() * group;
        let (width, depth) = (lanes.next_multiple_of(PAD), d.next_multiple_of(PAD));
        reset(&mut s.q_t, d * width, 0.0);
        reset(&mut s.scores, TILE * width, 0.0);
        reset(&mut s.acc, lanes * depth, 0.0);
        reset(&mut s.max, width, f32::NEG_INFINITY);
        reset(&mut s.sum, width, 0.0);
        reset(&mut s.scale, width, 0.0);
        gather_lanes(&mut [], &mut s.q_t, call.q, unit, width, kv_head * group * d, group, d);
        let shared = usize::from(unit.len() > 1);
        if shared == 1 {
            for tile in tiles(unit[0], 0, 1, 0..usize::MAX) {
                forward_tile(simd, s, &call, kv_head, 0..lanes, width, depth, unit[0], tile);
            }
        }
        let mut lane = 0;
        for &block in unit {
            let own = lane..lane + block.count * group;
            lane = own.end;
            for tile in tiles(block, shared, usize::MAX, 0..usize::MAX) {
                forward_tile(simd, s, &call, kv_head, own.clone(), width, depth, block, tile);
            }
            for i in 0..block.count {
                for g in 0..group {
                    let lane = own.start + i * group + g;
                    let head = block.query(i) * q_heads + kv_head * group + g;
                    let total = s.sum[lane];
                    let inverse = if total > 0.0 || total.is_nan() { 1.0 / total } else { 0.0 };
                    // SAFETY: every query row is in one unit, and this is the only task of its key head.
                    let (out, lse) = unsafe { (out.part(head * d, d), lse.part(head, 1)) };
                    for (y, x) in out.iter_mut().zip(&s.acc[lane * depth..]) {
                        *y = x * inverse;
                    }
                    lse[0] = s.max[lane] + total.ln();
                }
            }
        }
    }
}

/// Scores of one tile become weights, their gradients become score gradients; lanes `hidden(key)..` only.
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
    let scale = simd.splat_f32s(scale);
    for lane in (0..width).step_by(S::F32_LANES) {
        let minus_lse = simd.neg_f32s(load(simd, &s.lse, lane));
        let delta = load(simd, &s.delta, lane);
        for key in 0..len {
            let at = key * width + lane;
            let weight = exp(simd, simd.mul_add_e_f32s(load(simd, &s.scores, at), scale, minus_lse));
            let d = simd.sub_f32s(load(simd, &s.dscores, at), delta);
            store(simd, &mut s.scores, at, weight);
            store(simd, &mut s.dscores, at, simd.mul_f32s(simd.mul_f32s(weight, d), scale));
        }
    }
    if let Some(at) = causal_at {
        for key in 0..len {
            let hidden = first_lane(block, group, at + key);
            s.scores[key * width..key * width + hidden].fill(0.0);
            s.dscores[key * width..key * width + hidden].fill(0.0);
        }
    }
}

simd_fn! {
    fn backward_block<'a>(simd: S, s: &'a mut Scratch, call: Call<'a>, block: Block<'a>, keys: Range<usize>,
                          seen: &'a Seen<'a>, kv_head: usize, saved: Saved<'a>, grad: Gradients<'a>) -> () {
        let Shape { q_heads, head_dim: d, .. } = call.shape;
        let group = call.shape.group();
        let lanes = block.count * group;
        let (width, depth) = (lanes.next_multiple_of(PAD), d.next_multiple_of(PAD));
        for (x, len) in [
            (&mut s.q, lanes * d),
            (&mut s.q_t, d * width),
            (&mut s.dout, lanes * d),
            (&mut s.dout_t, d * width),
            (&mut s.acc, lanes * depth),
            (&mut s.scores, TILE * width),
            (&mut s.dscores, TILE * width),
            (&mut s.lse, width),
            (&mut s.delta, width),
        ] {
            reset(x, len, 0.0);
        }
        let unit = [block];
        let col = kv_head * group * d;
        gather_lanes(&mut s.q, &mut s.q_t, call.q, &unit, width, col, group, d);
        let dout = Rows { data: saved.dout, stride: q_heads * d, col: 0 };
        gather_lanes(&mut s.dout, &mut s.dout_t, dout, &unit, width, col, group, d);
        for i in 0..block.count {
            for g in 0..group {
                let head = block.query(i) * q_heads + kv_head * group + g;
                let (dout, out) = (&saved.dout[head * d..(head + 1) * d], &saved.out[head * d..(head + 1) * d]);
                let mut sum = simd.splat_f32s(0.0);
                for j in (0..d).step_by(S::F32_LANES) {
                    sum = simd.mul_add_e_f32s(load(simd, dout, j), load(simd, out, j), sum);
                }
                s.delta[i * group + g] = simd.reduce_sum_f32s(sum);
                s.lse[i * group + g] = saved.lse[head];
            }
        }
        for tile in tiles(block, 0, usize::MAX, keys) {
            let Tile { key, len, .. } = tile;
            let (k, v) = (call.k.tile(key, len, kv_head * d, d), call.v.tile(key, len, kv_head * d, d));
            let scores = Product {
                c: s.scores.as_mut_ptr(), ldc: width, a: k, a_row: call.k.stride, a_col: 1, b: s.q_t.as_ptr(),
                ldb: width, m: len, k: d, n: width, accumulate: false,
            };
            let dscores = Product {
                c: s.dscores.as_mut_ptr(), a: v, a_row: call.v.stride, b: s.dout_t.as_ptr(), ..scores
            };
            // SAFETY: `tile` checked the rows of k and v; scratch was sized above.
            unsafe {
                scores.run(simd);
                dscores.run(simd);
            }
            backward_scores(simd, s, call.scale, width, group, block, tile);
            let end = grad.stride * (key + len - 1) + kv_head * d + d;
            // SAFETY: this task alone writes this key head's rows; the calls check the bounds, no reference stays.
            let (dk, dv) = unsafe {
                grad.data.part(end + grad.k_col, 0);
                grad.data.part(end + grad.v_col, 0);
                let at = grad.stride * key + kv_head * d;
                (grad.data.ptr(at + grad.k_col), grad.data.ptr(at + grad.v_col))
            };
            let dv = Product {
                c: dv, ldc: grad.stride, a: s.scores.as_ptr(), a_row: width, a_col: 1, b: s.dout.as_ptr(), ldb: d,
                m: len, k: lanes, n: d, accumulate: true,
            };
            let dk = Product { c: dk, a: s.dscores.as_ptr(), b: s.q.as_ptr(), ..dv };
            let dq = Product {
                c: s.acc.as_mut_ptr(), ldc: depth, a: s.dscores.as_ptr(), a_row: 1, a_col: width, b: k,
                ldb: call.k.stride, m: lanes, k: len, n: d, accumulate: true,
            };
            // SAFETY: as above; padding lanes are left out of all three sums.
            unsafe {
                dv.run(simd);
                dk.run(simd);
                dq.run(simd);
            }
        }
        for i in 0..block.count {
            for g in 0..group {
                // SAFETY: a query row is in one block of the chunk, and this is the only task of its key head.
                let dq = unsafe { grad.dq(seen, block.first + i, col + g * d, d) };
                dq.iter_mut().zip(&s.acc[(i * group + g) * depth..]).for_each(|(to, x)| *to += x);
            }
        }
    }
}

/// Adds what a chunk of keys gives to the gradients of one key head.
pub(super) fn backward(call: Call, chunk: &Chunk, kv_head: usize, saved: Saved, grad: Gradients) {
    let max_queries = (MAX_LANES / call.shape.group().max(1)).max(1);
    let mut scratch = SCRATCH.take();
    for seen in &chunk.seen {
        let range = seen.range;
        for first in (seen.first..range.queries.len()).step_by(max_queries) {
            let block = Block { range, first, count: max_queries.min(range.queries.len() - first) };
            backward_block(&mut scratch, call, block, chunk.keys.clone(), seen, kv_head, saved, grad);
        }
    }
    SCRATCH.set(scratch);
}

/// See the function of the same name outside.
pub(super) fn forward(out: &mut [f32], lse: &mut [f32], call: Call, layout: &AttentionLayout) {
    let shape = call.shape;
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    let run = |(unit, kv_head): (&Unit, usize)| {
        let mut scratch = SCRATCH.take();
        forward_unit(&mut scratch, call, unit, kv_head, out, lse);
        SCRATCH.set(scratch);
    };
    let work = layout.pairs() * (shape.q_heads * shape.head_dim) as u64;
    let threads = rayon::current_num_threads();
    let mut cut = units(layout, shape.group(), MAX_LANES);
    if threads == 1 || work < MIN_PARALLEL {
        cut.iter().for_each(|unit| (0..shape.kv_heads).for_each(|head| run((unit, head))));
        return;
    }
    if cut.len() * shape.kv_heads < 2 * threads {
        cut = units(layout, shape.group(), PAD);
    }
    let tasks: Vec<(&Unit, usize)> =
        cut.iter().flat_map(|unit| (0..shape.kv_heads).map(move |head| (unit, head))).collect();
    parallel::tasks(tasks.len(), usize::MAX, |i| run(tasks[i]));
}
