//! Softmax attention over an [`AttentionLayout`]. An online softmax makes it unnecessary to store the matrix of scores.
//!
//! A *lane* is one query row of one query head. Lanes that share a key head are processed together, one tile of key rows after
//! the other. Tiles are counted from the start of each key range. Scores are stored transposed, `[keys, lanes]`, so that the
//! softmax runs along vectors without horizontal sums. On CPUs with AMX, [`forward`] and [`backward`] use its tiles for their
//! products.
//!
//! The bits of a lane's result depend only on its query, on the keys that it sees and on the division of these keys into key
//! ranges. They do not depend on other lanes. Results for any batch of sequences therefore agree bit for bit among calls of
//! [`forward`], and among calls of [`forward_decode_into`]. The two functions agree with each other bit for bit on CPUs without
//! AMX, and up to `f32` rounding on CPUs with AMX.
//!
//! The backward pass recomputes the weights from the log-sum-exp (FlashAttention-2, arXiv 2307.08691), and adds to dk and dv in
//! query order. Each chunk of keys is a task. If several chunks contribute to a row of dq, their parts are added in the order of
//! the chunks.

mod chunks;
#[allow(clippy::single_range_in_vec_init)] // one key range is common, a list of key rows never meant
mod layout;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod tiled;
pub(crate) mod vector;

use std::ops::Range;

use chunks::{Chunk, Plan, Seen, Sum};
pub use layout::{AttentionLayout, LayoutError, QueryRange};

use crate::buffer;
use crate::mat::{Mat, MatMut, check};
use crate::parallel::{self, Shared};
use crate::profile::{Op, span};
use crate::workspace::{PARTIAL, reserve};

/// Number of multiply-adds below which a call stays on its thread.
const MIN_PARALLEL: u64 = if cfg!(miri) { 1 } else { 1 << 16 };
/// Maximum number of floats in partial sums for which a thread keeps its buffer (16 MiB).
const KEPT_PARTIAL: usize = 4 << 20;

/// Queries `[tq, q_heads · d]`, and keys and values `[tk, kv_heads · d]`. The heads of a row are side by side.
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a, T = f32> {
    pub q: Mat<'a, T>,
    pub k: Mat<'a, T>,
    pub v: Mat<'a, T>,
}

impl<'a, T> Qkv<'a, T> {
    /// Splits a matrix whose rows are `[q | k | v]` into the three inputs.
    ///
    /// # Panics
    /// Panics if the rows have another width.
    #[must_use]
    pub fn packed(rows: Mat<'a, T>, shape: Shape) -> Self
    where
        T: Copy,
    {
        let (q, kv) = (shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        check!("packed rows of attention", rows.cols == q + 2 * kv, rows.dims(), shape);
        let [q, k, v] = [0..q, q..q + kv, q + kv..rows.cols].map(|columns| rows.columns(columns));
        Self { q, k, v }
    }

    /// Returns the shapes of queries, keys and values.
    fn dims(&self) -> [(usize, usize); 3] {
        [self.q.dims(), self.k.dims(), self.v.dims()]
    }

    /// Returns true if the matrices have heads of this shape.
    fn fit(&self, shape: Shape) -> bool {
        let Shape { q_heads, kv_heads, head_dim: d } = shape;
        let kv = (self.k.rows, kv_heads * d);
        q_heads.is_multiple_of(kv_heads.max(1))
            && self.q.cols == q_heads * d
            && self.k.dims() == kv
            && self.v.dims() == kv
    }
}

/// Returns a pointer to key row `r` of the head whose columns begin at `at`. Panics if rows `r..r + n` are out of bounds.
#[inline(always)]
fn key_rows(rows: Mat, r: usize, n: usize, at: usize, width: usize) -> *const f32 {
    rows.part(r + n - 1, at, width);
    rows.part(r, at, width).as_ptr()
}

/// Numbers and size of the heads of an attention call. `q_heads` is a multiple of `kv_heads`; query head `h` uses key head `h /
/// (q_heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Shape {
    fn group(self) -> usize {
        self.q_heads / self.kv_heads.max(1)
    }
}

/// The queries `first..first + count` of `range`, counted from the start of the range.
#[derive(Clone, Copy)]
struct Block<'a> {
    range: &'a QueryRange,
    first: usize,
    count: usize,
}

impl Block<'_> {
    fn query(&self, i: usize) -> usize {
        self.range.queries.start + self.first + i
    }
}

/// Blocks whose lanes are processed together: either one block, or several blocks with the same first key range.
type Unit<'a> = Vec<Block<'a>>;

/// Divides the layout into units of at most `max_lanes` lanes. A unit has at least one query.
fn units(layout: &AttentionLayout, group: usize, max_lanes: usize) -> Vec<Unit<'_>> {
    let max_queries = (max_lanes / group.max(1)).max(1);
    let mut units: Vec<Unit> = Vec::new();
    for range in layout.ranges.iter().filter(|range| !range.queries.is_empty()) {
        let shares = |unit: &Unit| {
            let total: usize = unit.iter().map(|b| b.count).sum();
            range.keys.len() > 1
                && total + range.queries.len() <= max_queries
                && unit.iter().all(|b| b.range.keys.len() > 1 && b.range.keys[0] == range.keys[0])
        };
        let whole = Block { range, first: 0, count: range.queries.len() };
        match units.last_mut() {
            Some(unit) if shares(unit) => unit.push(whole),
            _ => {
                for first in (0..range.queries.len()).step_by(max_queries) {
                    let count = max_queries.min(range.queries.len() - first);
                    units.push(vec![Block { range, first, count }]);
                }
            }
        }
    }
    units
}

/// Inputs that all units share.
#[derive(Clone, Copy)]
struct Call<'a> {
    q: Mat<'a>,
    k: Mat<'a>,
    v: Mat<'a>,
    shape: Shape,
    scale: f32,
}

impl<'a> Call<'a> {
    fn new(Qkv { q, k, v }: Qkv<'a>, shape: Shape, scale: f32) -> Self {
        Self { q, k, v, shape, scale }
    }
}

/// Outputs of the forward pass: `out` with rows of `q_heads · d` elements, and `lse` with rows of `q_heads` elements.
#[derive(Clone, Copy)]
struct Results<'a> {
    out: Shared<'a>,
    lse: Shared<'a>,
}

/// Returns the first lane of the block that sees key `at` of the causal range. Earlier lanes do not see this key.
#[inline(always)]
fn first_lane(block: Block, group: usize, at: usize) -> usize {
    block.range.first_to_see(at).saturating_sub(block.first).min(block.count) * group
}

/// Returns `softmax(scale · q kᵀ) v` as `[tq, q_heads · d]`, and the log-sum-exp of the scaled scores as `[tq, q_heads]`.
///
/// The layout must be valid for the rows ([`AttentionLayout::validate`]). A query row outside all ranges gives zeros. `scale`
/// must be positive.
#[must_use]
pub fn forward(qkv: Qkv, layout: &AttentionLayout, shape: Shape, scale: f32) -> (Vec<f32>, Vec<f32>) {
    let _span = span(Op::Attention, || work(layout, shape, 4));
    check!("attention", qkv.fit(shape), qkv.dims(), shape);
    let rows = qkv.q.rows;
    let (mut out, mut lse) = (buffer::zeros(rows * qkv.q.cols), buffer::zeros(rows * shape.q_heads));
    let results = Results { out: Shared::new(&mut out), lse: Shared::new(&mut lse) };
    let call = Call::new(qkv, shape, scale);
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if tiled::available(shape) {
        tiled::forward(call, layout, results);
        return (out, lse);
    }
    vector::forward(call, layout, results);
    (out, lse)
}

/// Writes the results of [`forward`] to `out [tq, q_heads · d]` and `lse [tq, q_heads]`. The function is meant for decoding,
/// where few queries see many keys. A query row outside all ranges is not written.
///
/// Single queries that share their first key range are processed together, so a prefix shared by many sequences is read once.
/// This function always uses vector instructions: a few lanes do not fill a tile, and packed keys would be read only once.
pub fn forward_decode_into(
    qkv: Qkv,
    layout: &AttentionLayout,
    shape: Shape,
    scale: f32,
    out: MatMut,
    lse: &mut [f32],
) {
    let _span = span(Op::AttentionDecode, || work(layout, shape, 4));
    let whole = out.dims() == qkv.q.dims() && out.stride == out.cols;
    check!(
        "attention, decode",
        qkv.fit(shape) && whole && lse.len() == out.rows * shape.q_heads,
        qkv.dims(),
        out.dims(),
        out.stride,
        lse.len(),
        shape
    );
    let results = Results { out: out.data, lse: Shared::new(lse) };
    vector::forward(Call::new(qkv, shape, scale), layout, results);
}

/// Returns the useful operations of a call and the bytes of its rows, for profiles.
fn work(layout: &AttentionLayout, shape: Shape, per_pair: usize) -> (usize, usize) {
    let Shape { q_heads, kv_heads, head_dim: d } = shape;
    let queries: usize = layout.ranges.iter().map(|range| range.queries.len()).sum();
    // A key range that several queries share, such as a prefix, is read only once.
    let mut seen: Vec<_> = layout.ranges.iter().flat_map(|r| &r.keys).map(|k| (k.start, k.end)).collect();
    seen.sort_unstable();
    seen.dedup();
    let keys: usize = seen.iter().map(|(start, end)| end - start).sum();
    let flops = layout.pairs() as usize * q_heads * d * per_pair;
    (flops, 4 * d * per_pair / 2 * (queries * q_heads + keys * kv_heads))
}

/// Outputs of [`backward`], shared by all its tasks.
#[derive(Clone, Copy)]
struct Gradients<'a> {
    data: Shared<'a>,
    stride: usize,
    k_col: usize,
    v_col: usize,
    /// Partial sums of dq, in rows of `width` elements.
    partial: Shared<'a>,
    width: usize,
}

impl<'a> Gradients<'a> {
    /// Returns `len` columns, starting at `col`, of the row to which a chunk adds its part of dq for query `i` of a range.
    ///
    /// # Safety
    /// No other reference to these elements may be alive.
    #[inline(always)]
    unsafe fn dq(self, seen: &Seen, i: usize, col: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: guaranteed by this function's contract.
        unsafe {
            match seen.partial {
                Some(row) => self.partial.part((row + i - seen.first) * self.width + col, len),
                None => self.data.part((seen.range.queries.start + i) * self.stride + col, len),
            }
        }
    }
}

/// Results of the forward pass, and the incoming gradient.
#[derive(Clone, Copy)]
struct Saved<'a> {
    dout: Mat<'a>,
    out: Mat<'a>,
    lse: &'a [f32],
}

/// Inputs that all tasks of a backward pass share.
#[derive(Clone, Copy)]
struct Back<'a> {
    call: Call<'a>,
    saved: Saved<'a>,
    grad: Gradients<'a>,
}

/// Returns the gradients of [`forward`] with respect to q, k and v, side by side: `[rows, (q_heads + 2 kv_heads) · d]`.
///
/// The layout must be valid for `rows` queries and keys. `out` and `lse` are the results of [`forward`] for the same arguments,
/// and `dout [rows, q_heads · d]` is the incoming gradient. Each pair of a key head and a chunk of keys is a task.
#[must_use]
pub fn backward(
    dout: Mat,
    qkv: Qkv,
    out: Mat,
    lse: &[f32],
    layout: &AttentionLayout,
    shape: Shape,
    scale: f32,
) -> Vec<f32> {
    let dims = qkv.q.dims();
    let (rows, width) = (dims.0, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim);
    let saved_fit = dout.dims() == dims && out.dims() == dims && lse.len() == rows * shape.q_heads;
    check!(
        "attention, backward",
        qkv.fit(shape) && qkv.k.rows == rows && saved_fit,
        qkv.dims(),
        dout.dims(),
        out.dims(),
        lse.len(),
        shape
    );
    let (saved, call) = (Saved { dout, out, lse }, Call::new(qkv, shape, scale));
    // SAFETY: the function first zeroes all elements.
    unsafe { buffer::matrix(rows, width, |d| write_backward(call, saved, layout, d)) }
}

/// Returns the number of elements of scratch memory that [`backward`] needs in addition to its result.
#[must_use]
pub fn backward_space(layout: &AttentionLayout, shape: Shape) -> usize {
    Plan::new(layout, shape).partial_rows * shape.q_heads * shape.head_dim
}

/// Zeroes the rows, then adds the gradients to them.
fn write_backward(call: Call, saved: Saved, layout: &AttentionLayout, to: MatMut) {
    let shape = call.shape;
    let _span = span(Op::AttentionBackward, || work(layout, shape, 8));
    let Shape { q_heads, kv_heads, head_dim: d } = shape;
    let width = q_heads * d;
    let work = if layout.pairs() * (width as u64) < MIN_PARALLEL { 0 } else { usize::MAX };
    let (rows, stride, data) = (to.rows, to.stride, to.data);
    parallel::ranges(rows, 1, data.len(), |rows| data.clear(rows.start * stride, rows.len() * stride));
    let plan = Plan::new(layout, shape);
    let mut scratch = PARTIAL.take();
    let partial_len = plan.partial_rows * width;
    let partial = Shared::new(reserve(&mut scratch, partial_len));
    let grad = Gradients { data, stride, k_col: width, v_col: width + kv_heads * d, partial, width };
    let back = Back { call, saved, grad };
    let head_width = shape.group() * d;
    let tasks: Vec<(&Chunk, usize)> =
        plan.chunks.iter().flat_map(|chunk| (0..kv_heads).map(move |head| (chunk, head))).collect();
    parallel::tasks(tasks.len(), work, |i| {
        let (chunk, kv_head) = tasks[i];
        for seen in chunk.seen.iter().filter(|seen| seen.partial.is_some()) {
            for i in seen.first..seen.range.queries.len() {
                // SAFETY: this is the only task of the chunk and the key head.
                unsafe { grad.dq(seen, i, kv_head * head_width, head_width) }.fill(0.0);
            }
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if tiled::available(shape) {
            return tiled::backward(back, chunk, kv_head);
        }
        vector::backward(back, chunk, kv_head);
    });
    let pieces: Vec<(&Vec<Sum>, Range<usize>)> = plan.sums.iter().flat_map(sum_pieces).collect();
    parallel::tasks(pieces.len(), partial_len, |i| {
        let (sums, rows) = &pieces[i];
        for sum in sums.iter() {
            for row in rows.start.max(sum.to)..rows.end.min(sum.to + sum.count) {
                // SAFETY: every query row is in one range and in one piece of the range, and its partial sums are complete.
                let (to, from) = unsafe {
                    let from = grad.partial.part((sum.from + row - sum.to) * width, width);
                    (grad.data.part(row * stride, width), from)
                };
                to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
            }
        }
    });
    if partial_len <= KEPT_PARTIAL {
        PARTIAL.set(scratch);
    }
}

/// Divides the query rows of partial sums into pieces. Each piece comes with all the sums that are added to it.
fn sum_pieces(sums: &Vec<Sum>) -> impl Iterator<Item = (&Vec<Sum>, Range<usize>)> {
    const ROWS: usize = 64;
    let start = sums.iter().map(|sum| sum.to).min().unwrap_or(0);
    let end = sums.iter().map(|sum| sum.to + sum.count).max().unwrap_or(0);
    (start..end).step_by(ROWS).map(move |row| (sums, row..end.min(row + ROWS)))
}
