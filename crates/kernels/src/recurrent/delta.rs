//! The gated delta rule in chunks, its gradients, and single steps.
//!
//! A value head has a state `S [key_dim, value_dim]`, which starts at zero. Row `t` with log-decay `g ≤ 0` and weight `β` does
//!
//! ```text
//! S ← exp(g) S;   S ← S + k ⊗ β (v − Sᵀ k);   o = Sᵀ q
//! ```
//!
//! with `q / sqrt(Σ q² + 1e-6) / sqrt(key_dim)` for `q` and `k / sqrt(Σ k² + 1e-6)` for `k`. A key head serves consecutive value
//! heads. Source: arXiv 2412.06464 (gated delta networks); the chunked form follows arXiv 2406.06484, with the decays between two
//! rows always as one exponential of a difference, which cannot overflow.
//!
//! A chunk of `C` rows with the state `S₀` before it, and `c` the running sum of `g` in the chunk:
//!
//! ```text
//! L[t, s] = exp(c_t − c_s) for s ≤ t
//! A = strictly lower part of β_t L[t, s] (k_t · k_s)      M = L ∘ (q kᵀ)
//! (I + A) U = β ∘ (V − exp(c) ∘ (K S₀))
//! O = exp(c) ∘ (Q S₀) + M U      S₁ = exp(c_C) S₀ + Kᵀ (exp(c_C − c) ∘ U)
//! ```
//!
//! The forward pass keeps the states between chunks. The backward pass computes everything else of a chunk again. A task is a
//! segment and a key head. Chunks are counted from the start of each segment, and every sum has an order that depends on the
//! place in the chunk alone. Therefore the bits of a row depend on the rows before it in its sequence, and on nothing else.

use super::{Continued, Segment, Segments, covers};
use crate::Stored;
use crate::buffer;
use crate::gemm::{Left, Multiply, Pack, PackLeft};
use crate::mat::{Mat, MatMut, check};
use crate::microkernel::Product;
use crate::parallel::{self, Shared};
use crate::profile::{Op, span};
use crate::simd::{Simd, exp, load, load_ptr, prefetch, store, store_ptr};
use crate::workspace::{DELTA, LINE, Line, reserve};

/// Number of rows of a chunk.
pub const CHUNK: usize = 64;
/// Number of rows that are solved by products before the next rows.
const BLOCK: usize = 16;
/// Constant added to the sum of squares of a query or key.
const EPS: f32 = 1e-6;
/// Number of rows of the largest register tile, to which a packed left factor is padded.
const TILE: usize = 12;

/// Heads of the gated delta rule. A row is `[queries | keys | values]`, and a row of gates is `[g | β]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    pub key_heads: usize,
    /// Number of value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl DeltaShape {
    /// Returns the number of columns of queries, keys and values together.
    #[must_use]
    pub fn packed_width(self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// Returns the number of columns of the values, which is also that of the output.
    #[must_use]
    pub fn value_width(self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the number of elements of the states of all heads, `[value_heads, key_dim, value_dim]`.
    #[must_use]
    pub fn state_len(self) -> usize {
        self.value_heads * self.one()
    }

    /// Returns the number of elements of the state of one head.
    fn one(self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Returns the number of value heads of a key head.
    fn group(self) -> usize {
        self.value_heads / self.key_heads.max(1)
    }

    /// Returns the first column of a value head in the packed rows.
    fn value_column(self, head: usize) -> usize {
        2 * self.key_heads * self.key_dim + head * self.value_dim
    }

    /// Returns the multiply-adds of a row in one value head, of the forward pass.
    fn row_cost(self) -> usize {
        3 * self.one() + CHUNK * (self.key_dim + 2 * self.value_dim)
    }

    fn fits(self, qkv: Mat, gates: Mat) -> bool {
        self.value_heads.is_multiple_of(self.key_heads.max(1))
            && qkv.cols == self.packed_width()
            && gates.dims() == (qkv.rows, 2 * self.value_heads)
    }
}

/// Scratch memory of one task. Matrices of queries have those of keys below them.
#[derive(Default)]
pub(crate) struct Scratch {
    packs: Packs,
    /// Normalised queries and keys, `[2c, key_dim]`.
    qk: Vec<Line>,
    /// Reciprocal norms of these rows, `[2c]`. Those of queries contain the scale.
    norms: Vec<Line>,
    /// `Q Kᵀ` and `K Kᵀ`, `[2c, c]`.
    pairs: Vec<Line>,
    /// Keys times the decay from their row to the end of the chunk, `[c, key_dim]`.
    fading: Vec<Line>,
    /// `Q S₀` and `K S₀`, `[2c, value_dim]`.
    read: Vec<Line>,
    decays: Decays,
    /// `M`, and `−A`, `[c, c]` each.
    m: Vec<Line>,
    n: Vec<Line>,
    /// `V − exp(c) ∘ (K S₀)` and `U`, `[c, value_dim]` each.
    e: Vec<Line>,
    u: Vec<Line>,
    back: BackScratch,
}

/// Scratch memory of the backward pass.
#[derive(Default)]
struct BackScratch {
    /// Gradient of the states of the key head's value heads.
    state: Vec<Line>,
    /// Gradients of `O` and of `U`; then those of `O` and of `E`, `[2c, value_dim]`.
    x: Vec<Line>,
    /// Gradients of `M` and of `A`; then the factors of the gradients of queries and keys, `[2c, c]`.
    p: Vec<Line>,
    /// Products with states, `[2c, key_dim]`.
    z: Vec<Line>,
    /// Gradients of normalised queries and keys, `[2c, key_dim]`.
    dqk: Vec<Line>,
}

/// Packed factors of a product.
#[derive(Default)]
struct Packs {
    left: Vec<Line>,
    right: Vec<Line>,
}

/// A factor: element `(i, p)` is `data[i · stride + p]`, or `data[p · stride + i]` if `turned`.
#[derive(Clone, Copy)]
struct Factor<'a> {
    data: &'a [f32],
    stride: usize,
    turned: bool,
}

/// Returns a matrix of contiguous rows.
fn rows(data: &[f32], stride: usize) -> Factor<'_> {
    Factor { data, stride, turned: false }
}

/// Returns the transpose of a matrix of contiguous rows.
fn turned(data: &[f32], stride: usize) -> Factor<'_> {
    Factor { data, stride, turned: true }
}

/// A right factor `[depth, width]` in packed form.
struct Right<'a> {
    panels: *const f32,
    depth: usize,
    width: usize,
    left: &'a mut Vec<Line>,
}

impl Packs {
    fn right(&mut self, b: Factor, depth: usize, width: usize) -> Right<'_> {
        let (inner, column) = if b.turned { (1, b.stride) } else { (b.stride, 1) };
        let pack = Pack { from: Stored::F32(b.data), inner, column, depth, width };
        Right { panels: pack.run(&mut self.right), depth, width, left: &mut self.left }
    }
}

impl Right<'_> {
    /// Computes `c [m, width] = a · right`, or `c += a · right` if `old`.
    fn times(&mut self, a: Factor, m: usize, c: &mut [f32], old: bool) {
        let (depth, n) = (self.depth, self.width);
        let (outer, inner) = if a.turned { (depth, m) } else { (m, depth) };
        assert!(
            c.len() == m * n && a.data.len() >= (outer.max(1) - 1) * a.stride + inner,
            "product of a chunk"
        );
        if m == 0 || n == 0 {
            return;
        }
        let left = if a.turned {
            let to = reserve(self.left, m.next_multiple_of(TILE) * depth).as_mut_ptr();
            // SAFETY: the memory has room for complete groups of rows.
            unsafe { PackLeft { to, from: a.data, inner: a.stride, depth, rows: m }.run() };
            Left::Packed(to)
        } else {
            Left::Rows { data: a.data.as_ptr(), stride: a.stride }
        };
        let c = c.as_mut_ptr();
        let product = Multiply { c, ldc: n, left, panels: self.panels, m, depth, n, old, bias: None };
        // SAFETY: the assertion above checks the sizes, and `c` is borrowed mutably.
        unsafe { product.run() };
    }
}

/// Decays of the rows of a chunk.
struct Decays {
    /// Running sum of the log-decays. Its differences are exact enough only in f64.
    sum: [f64; CHUNK],
    beta: [f32; CHUNK],
    /// Decay from the start of the chunk to each row.
    since: [f32; CHUNK],
    /// Decay from each row to the end of the chunk.
    until: [f32; CHUNK],
    /// Decay over the whole chunk.
    whole: f32,
}

impl Default for Decays {
    fn default() -> Self {
        let zeros = [0.0; CHUNK];
        Self { sum: [0.0; CHUNK], beta: zeros, since: zeros, until: zeros, whole: 0.0 }
    }
}

impl Decays {
    fn read(&mut self, gates: Mat, first: usize, c: usize, head: usize, heads: usize) {
        let mut sum = 0.0;
        for t in 0..c {
            let row = gates.row(first + t);
            sum += f64::from(row[head]);
            (self.sum[t], self.beta[t]) = (sum, row[heads + head]);
        }
        for t in 0..c {
            self.since[t] = (self.sum[t] as f32).exp();
            self.until[t] = ((sum - self.sum[t]) as f32).exp();
        }
        self.whole = self.since[c - 1];
    }
}

simd_fn! {
    /// Writes the normalised rows of one head, and returns nothing. `norms` receives the factors of the rows.
    fn normalise<'a>(simd: S, to: &'a mut [f32], norms: &'a mut [f32], x: Mat<'a>, first: usize, scale: f32) -> () {
        let d = x.cols;
        for (t, norm) in norms.iter_mut().enumerate() {
            let (from, to) = (x.row(first + t), &mut to[t * d..(t + 1) * d]);
            fetch_row(x, first + t);
            *norm = scale / (dot(simd, from, from) + EPS).sqrt();
            let by = simd.splat_f32s(*norm);
            for i in (0..d).step_by(S::F32_LANES) {
                store(simd, to, i, simd.mul_f32s(load(simd, from, i), by));
            }
        }
    }
}

/// Prefetches a row that is read soon after row `t`. Rows are far apart in memory, so the machine does not foresee them.
#[inline(always)]
fn fetch_row(x: Mat, t: usize) {
    /// Number of rows by which prefetching runs ahead.
    const AHEAD: usize = 12;
    let row = x.data.as_ptr().wrapping_add((t + AHEAD) * x.stride);
    for line in (0..x.cols).step_by(LINE) {
        prefetch(row.wrapping_add(line));
    }
}

/// Returns `Σ x · y`, summed in an order that depends on the length alone.
#[inline(always)]
fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let mut acc = [simd.splat_f32s(0.0); 4];
    for (p, i) in (0..x.len()).step_by(S::F32_LANES).enumerate() {
        acc[p % 4] = simd.mul_add_e_f32s(load(simd, x, i), load(simd, y, i), acc[p % 4]);
    }
    simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(acc[0], acc[1]), simd.add_f32s(acc[2], acc[3])))
}

/// Writes the decays `L[t, ..]` of row `t`, and returns the number of columns in complete vectors that contain those of rows up to `t`.
/// The decays of the others are zero.
#[inline(always)]
fn decay_row<S: Simd>(simd: S, to: &mut [f32], sum: &[f64; CHUNK], t: usize) -> usize {
    let end = (t + 1).next_multiple_of(S::F32_LANES).min(to.len());
    let (own, later) = to[..end].split_at_mut(t + 1);
    let last = sum[t];
    own.iter_mut().zip(sum).for_each(|(to, sum)| *to = (last - sum) as f32);
    // The exponential of minus infinity is zero.
    later.fill(f32::NEG_INFINITY);
    for i in (0..end).step_by(S::F32_LANES) {
        let e = exp(simd, load(simd, to, i));
        store(simd, to, i, e);
    }
    end
}

simd_fn! {
    /// Writes `M` and `−A` of a chunk of `c` rows. `pairs` has `Q Kᵀ` and `K Kᵀ`.
    fn weigh_pairs<'a>(simd: S, m: &'a mut [f32], n: &'a mut [f32], pairs: &'a [f32], by: &'a Decays, c: usize) -> () {
        let (qk, kk) = pairs.split_at(c * c);
        let mut decays = [0.0; CHUNK];
        for t in 0..c {
            let row = t * c..(t + 1) * c;
            let decays = &mut decays[..c];
            let end = decay_row(simd, decays, &by.sum, t);
            let (m, n, qk, kk) = (&mut m[row.clone()], &mut n[row.clone()], &qk[row.clone()], &kk[row]);
            let minus = simd.splat_f32s(-by.beta[t]);
            m[end..].fill(0.0);
            n[end..].fill(0.0);
            for i in (0..end).step_by(S::F32_LANES) {
                let l = load(simd, decays, i);
                store(simd, m, i, simd.mul_f32s(l, load(simd, qk, i)));
                store(simd, n, i, simd.mul_f32s(simd.mul_f32s(l, minus), load(simd, kk, i)));
            }
            n[t] = 0.0;
        }
    }
}

simd_fn! {
    /// Computes `e = v − since ∘ ks` and `u = β ∘ e`. Without `ks`, `e = v`.
    fn begin_solution<'a>(simd: S, e: &'a mut [f32], u: &'a mut [f32], v: Mat<'a>, first: usize, ks: Option<&'a [f32]>,
                          by: &'a Decays) -> () {
        let d = v.cols;
        for (t, (e, u)) in e.chunks_exact_mut(d).zip(u.chunks_exact_mut(d)).enumerate() {
            fetch_row(v, first + t);
            let v = v.row(first + t);
            let (minus, beta) = (simd.splat_f32s(-by.since[t]), simd.splat_f32s(by.beta[t]));
            for i in (0..d).step_by(S::F32_LANES) {
                let mut x = load(simd, v, i);
                if let Some(ks) = ks {
                    x = simd.mul_add_e_f32s(load(simd, &ks[t * d..(t + 1) * d], i), minus, x);
                }
                store(simd, e, i, x);
                store(simd, u, i, simd.mul_f32s(x, beta));
            }
        }
    }
}

simd_fn! {
    /// Computes `to[t] = by[t] · from[t]` for rows of `d` elements.
    fn scale_rows<'a>(simd: S, to: &'a mut [f32], from: &'a [f32], by: &'a [f32], d: usize) -> () {
        for (t, (to, from)) in to.chunks_exact_mut(d).zip(from.chunks_exact(d)).enumerate() {
            let by = simd.splat_f32s(by[t]);
            for i in (0..d).step_by(S::F32_LANES) {
                store(simd, to, i, simd.mul_f32s(load(simd, from, i), by));
            }
        }
    }
}

simd_fn! {
    /// Writes `by · from` to the elements from `at` on, which may be uninitialised. No other reference to them may be alive.
    fn scale_to<'a>(simd: S, to: Shared<'a>, at: usize, from: &'a [f32], by: f32) -> () {
        assert!(at <= to.len() && from.len() <= to.len() - at, "a state out of bounds");
        let by = simd.splat_f32s(by);
        for i in (0..from.len()).step_by(S::F32_LANES) {
            let width = S::F32_LANES.min(from.len() - i);
            // SAFETY: the elements are in bounds, and this is the only task that refers to them.
            unsafe { store_ptr(simd, to.ptr(at + i), width, simd.mul_f32s(load(simd, from, i), by)) };
        }
    }
}

simd_fn! {
    /// Computes `x[t] *= by[t]` for rows of `d` elements.
    fn scale_in_place<'a>(simd: S, x: &'a mut [f32], by: &'a [f32], d: usize) -> () {
        for (t, x) in x.chunks_exact_mut(d).enumerate() {
            let by = simd.splat_f32s(by[t]);
            for i in (0..d).step_by(S::F32_LANES) {
                let y = simd.mul_f32s(load(simd, x, i), by);
                store(simd, x, i, y);
            }
        }
    }
}

simd_fn! {
    /// Solves `(I − N) X = B` in place for the strictly lower triangular `N [c, c]`, with `B` in `x [c, d]`. If `transposed`,
    /// solves `(I − Nᵀ) X = B`.
    ///
    /// Rows are solved in blocks: a product subtracts the rows of other blocks, and the rows of a block follow one by one.
    fn solve<'a>(simd: S, n: &'a [f32], x: &'a mut [f32], c: usize, transposed: bool) -> () {
        let d = x.len() / c.max(1);
        let blocks = c.div_ceil(BLOCK);
        for b in 0..blocks {
            let b = if transposed { blocks - 1 - b } else { b };
            let (start, end) = (b * BLOCK, c.min((b + 1) * BLOCK));
            let (known, other) = if transposed { (end, c - end) } else { (0, start) };
            if other > 0 {
                let at = if transposed { known * c + start } else { start * c };
                let (a_row, a_col) = if transposed { (1, c) } else { (c, 1) };
                let from = x.as_mut_ptr();
                // SAFETY: the product reads the elements of `n` in these rows and columns, and other rows of `x` than it writes.
                unsafe {
                    Product {
                        c: from.add(start * d),
                        ldc: d,
                        a: n.as_ptr().add(at),
                        a_row,
                        a_col,
                        b: from.add(known * d),
                        ldb: d,
                        m: end - start,
                        k: other,
                        n: d,
                        accumulate: true,
                    }
                    .run(simd);
                }
            }
            let block = Triangle { n, c, start, end, transposed };
            let mut i = 0;
            while i + 4 * S::F32_LANES <= d {
                block.columns::<S, 4>(simd, x, d, i);
                i += 4 * S::F32_LANES;
            }
            while i < d {
                block.columns::<S, 1>(simd, x, d, i);
                i += S::F32_LANES;
            }
        }
    }
}

/// The rows `start..end` of a triangular system, whose rows follow one by one.
#[derive(Clone, Copy)]
struct Triangle<'a> {
    n: &'a [f32],
    c: usize,
    start: usize,
    end: usize,
    transposed: bool,
}

impl Triangle<'_> {
    /// Solves the columns from `at` on: `V` vectors, which are complete if there are several.
    #[inline(always)]
    fn columns<S: Simd, const V: usize>(self, simd: S, x: &mut [f32], d: usize, at: usize) {
        let Self { n, c, start, end, transposed } = self;
        for t in 0..end - start {
            let t = if transposed { end - 1 - t } else { start + t };
            let (first, last) = if transposed { (t + 1, end) } else { (start, t) };
            let mut acc = [simd.splat_f32s(0.0); V];
            for s in first..last {
                let a = simd.splat_f32s(if transposed { n[s * c + t] } else { n[t * c + s] });
                let row = load_vectors::<S, V>(simd, &x[s * d..(s + 1) * d], at);
                for v in 0..V {
                    acc[v] = simd.mul_add_e_f32s(a, row[v], acc[v]);
                }
            }
            let row = &mut x[t * d..(t + 1) * d];
            let old = load_vectors::<S, V>(simd, row, at);
            for v in 0..V {
                acc[v] = simd.add_f32s(old[v], acc[v]);
            }
            store_vectors(simd, row, at, acc);
        }
    }
}

/// Loads the `V` vectors from column `at` on. A single vector may end beyond the row.
#[inline(always)]
fn load_vectors<S: Simd, const V: usize>(simd: S, row: &[f32], at: usize) -> [S::f32s; V] {
    let mut vectors = [simd.splat_f32s(0.0); V];
    if V == 1 {
        vectors[0] = load(simd, row, at);
        return vectors;
    }
    let row = &row[at..at + V * S::F32_LANES];
    for v in 0..V {
        // SAFETY: the slice has `V` complete vectors.
        vectors[v] = unsafe { load_ptr(simd, row.as_ptr().add(v * S::F32_LANES), S::F32_LANES) };
    }
    vectors
}

/// Writes `V` vectors from column `at` on, as [`load_vectors`] loads them.
#[inline(always)]
fn store_vectors<S: Simd, const V: usize>(simd: S, row: &mut [f32], at: usize, vectors: [S::f32s; V]) {
    if V == 1 {
        return store(simd, row, at, vectors[0]);
    }
    let row = &mut row[at..at + V * S::F32_LANES];
    for v in 0..V {
        // SAFETY: the slice has `V` complete vectors.
        unsafe { store_ptr(simd, row.as_mut_ptr().add(v * S::F32_LANES), S::F32_LANES, vectors[v]) };
    }
}

/// Inputs that all tasks share.
#[derive(Clone, Copy)]
struct Call<'a> {
    qkv: Mat<'a>,
    gates: Mat<'a>,
    segments: &'a Segments,
    shape: DeltaShape,
}

/// Rows `first..first + c` of the stream, which are a chunk, and a key head.
#[derive(Clone, Copy)]
struct Place {
    first: usize,
    c: usize,
    key_head: usize,
}

impl<'a> Call<'a> {
    /// Calls `f` for every pair of a segment and a key head, level by level. `first` goes first.
    fn tasks(self, forward: bool, cost: usize, f: impl Fn(usize, usize) + Sync) {
        let mut levels = self.segments.levels();
        if !forward {
            levels.reverse();
        }
        let heads = self.shape.key_heads;
        for level in levels {
            let rows: usize = level.iter().map(|&s| self.segments.all()[s].rows.len()).sum();
            parallel::tasks(level.len() * heads, rows * cost, |i| f(level[i / heads], i % heads));
        }
    }

    fn values(self, head: usize) -> Mat<'a> {
        let at = self.shape.value_column(head);
        self.qkv.columns(at..at + self.shape.value_dim)
    }

    /// Normalises the queries and keys of a chunk, and multiplies them by the keys.
    fn begin(self, s: &mut Scratch, Place { first, c, key_head }: Place) {
        let DeltaShape { key_heads, key_dim: d, .. } = self.shape;
        let (qk, norms) = (reserve(&mut s.qk, 2 * c * d), reserve(&mut s.norms, 2 * c));
        let scale = 1.0 / (d as f32).sqrt();
        for (i, scale) in [scale, 1.0].into_iter().enumerate() {
            let at = (i * key_heads + key_head) * d;
            let (to, norms) = (&mut qk[i * c * d..(i + 1) * c * d], &mut norms[i * c..(i + 1) * c]);
            normalise(to, norms, self.qkv.columns(at..at + d), first, scale);
        }
        let pairs = reserve(&mut s.pairs, 2 * c * c);
        s.packs.right(turned(&qk[c * d..], d), d, c).times(rows(qk, d), 2 * c, pairs, false);
    }

    /// Computes `M`, `−A`, `E` and `U` of a chunk in one value head. `Q S₀`, not yet decayed, is in `read` if there is a state.
    fn solve(self, s: &mut Scratch, Place { first, c, .. }: Place, head: usize, state: Option<&[f32]>) {
        let DeltaShape { key_dim, value_dim, value_heads, .. } = self.shape;
        let (qk, pairs) = (reserve(&mut s.qk, 2 * c * key_dim), reserve(&mut s.pairs, 2 * c * c));
        s.decays.read(self.gates, first, c, head, value_heads);
        let (m, n) = (reserve(&mut s.m, c * c), reserve(&mut s.n, c * c));
        weigh_pairs(m, n, pairs, &s.decays, c);
        let read = reserve(&mut s.read, 2 * c * value_dim);
        if let Some(state) = state {
            let mut right = s.packs.right(rows(state, value_dim), key_dim, value_dim);
            right.times(rows(qk, key_dim), 2 * c, read, false);
        }
        let (e, u) = (reserve(&mut s.e, c * value_dim), reserve(&mut s.u, c * value_dim));
        let of_keys = state.map(|_| &read[c * value_dim..]);
        begin_solution(e, u, self.values(head), first, of_keys, &s.decays);
        solve(n, u, c, false);
        scale_rows(reserve(&mut s.fading, c * key_dim), &qk[c * key_dim..], &s.decays.until, key_dim);
    }
}

/// Computes the gated delta rule of packed rows `[t, packed_width]` with the gates `[t, 2 · value_heads]`.
///
/// Returns the output `[t, value_width]` and the kept states `[segments.states(), state_len]` ([`Segments::states`]). The kept
/// states are all that the backward pass needs besides the arguments.
#[must_use]
pub fn delta_forward(qkv: Mat, gates: Mat, segments: &Segments, shape: DeltaShape) -> (Vec<f32>, Vec<f32>) {
    let t = qkv.rows;
    check!(
        "delta rule",
        shape.fits(qkv, gates) && segments.rows() == t,
        qkv.dims(),
        gates.dims(),
        segments.rows(),
        shape
    );
    let cost = shape.row_cost() * shape.value_heads;
    let of_states = segments.states() * shape.state_len();
    let _span =
        span(Op::Delta, || (2 * t * cost, 4 * (qkv.data.len() + t * shape.value_width() + of_states)));
    let call = Call { qkv, gates, segments, shape };
    let mut states = Vec::new();
    let fill = |out: MatMut| {
        let fill = |states: Shared| {
            call.tasks(true, cost / shape.key_heads.max(1), |segment, key_head| {
                let mut scratch = DELTA.take();
                forward_task(call, &mut scratch, &segments.all()[segment], key_head, &out, states);
                DELTA.set(scratch);
            });
        };
        // SAFETY: every kept state of every head is written, after which others read it.
        states = unsafe { buffer::written(of_states, fill) };
    };
    // SAFETY: the segments contain every row, and the tasks of their key heads write all columns.
    let out = unsafe { buffer::matrix(t, shape.value_width(), fill) };
    (out, states)
}

fn forward_task(
    call: Call,
    s: &mut Scratch,
    segment: &Segment,
    key_head: usize,
    out: &MatMut,
    states: Shared,
) {
    let shape = call.shape;
    let (one, d) = (shape.one(), shape.value_dim);
    for (chunk, first) in segment.rows.clone().step_by(CHUNK).enumerate() {
        let place = Place { first, c: CHUNK.min(segment.rows.end - first), key_head };
        let c = place.c;
        call.begin(s, place);
        let [before, after] =
            [call.segments.state_before(segment, chunk), Segments::state_after(segment, chunk)];
        for head in key_head * shape.group()..(key_head + 1) * shape.group() {
            let at = |state: usize| state * shape.state_len() + head * one;
            // SAFETY: the state before was written by this task, or by the task of the previous segment and this key head. Nothing
            // writes to it any more. It is in bounds.
            let before =
                before.map(|state| unsafe { &*std::ptr::slice_from_raw_parts(states.ptr(at(state)), one) });
            call.solve(s, place, head, before);
            let (m, u) = (reserve(&mut s.m, c * c), reserve(&mut s.u, c * d));
            let read = &mut reserve(&mut s.read, 2 * c * d)[..c * d];
            if before.is_some() {
                scale_in_place(read, &s.decays.since, d);
            }
            let mut right = s.packs.right(rows(u, d), c, d);
            right.times(rows(m, c), c, read, before.is_some());
            for (t, from) in read.chunks_exact(d.max(1)).enumerate() {
                // SAFETY: this is the only task of the row and the head. The memory is writable, and it is written before it is
                // read, through the pointer.
                unsafe {
                    out.data
                        .ptr((first + t) * out.stride + head * d)
                        .copy_from_nonoverlapping(from.as_ptr(), d)
                };
            }
            if let Some(after) = after {
                match before {
                    None => states.clear(at(after), one),
                    // The states differ, and this is the only task that refers to the second.
                    Some(before) => scale_to(states, at(after), before, s.decays.whole),
                }
                // SAFETY: the elements have just been written, and this is the only reference to them.
                let after = unsafe { states.part(at(after), one) };
                let fading = reserve(&mut s.fading, c * shape.key_dim);
                right.times(turned(fading, shape.key_dim), shape.key_dim, after, true);
            }
        }
    }
}

/// Returns the gradients of [`delta_forward`] with respect to the packed rows and the gates.
///
/// `dout [t, value_width]` is the gradient of the output; `states` are the kept states. The other arguments are those of
/// [`delta_forward`].
#[must_use]
pub fn delta_backward(
    dout: Mat,
    qkv: Mat,
    gates: Mat,
    states: &[f32],
    segments: &Segments,
    shape: DeltaShape,
) -> (Vec<f32>, Vec<f32>) {
    let t = qkv.rows;
    let of_states = segments.states() * shape.state_len();
    check!(
        "delta rule, backward",
        shape.fits(qkv, gates)
            && segments.rows() == t
            && dout.dims() == (t, shape.value_width())
            && states.len() == of_states,
        dout.dims(),
        qkv.dims(),
        gates.dims(),
        states.len(),
        shape
    );
    let cost = 3 * shape.row_cost() * shape.value_heads;
    let _span = span(Op::DeltaBackward, || {
        (2 * t * cost, 4 * (2 * qkv.data.len() + t * shape.value_width() + of_states))
    });
    let call = Call { qkv, gates, segments, shape };
    // Gradients of the states that segments start with, by segment.
    let mut starts = buffer::zeros(segments.all().len() * shape.state_len());
    let starts = Shared::new(&mut starts);
    let mut dgates = Vec::new();
    let fill = |dqkv: MatMut| {
        let fill = |dgates: MatMut| {
            call.tasks(false, cost / shape.key_heads.max(1), |segment, key_head| {
                let mut scratch = DELTA.take();
                let task = BackTask { call, dout, states, segment, key_head, starts };
                task.run(&mut scratch, &dqkv, &dgates);
                DELTA.set(scratch);
            });
        };
        // SAFETY: the segments contain every row, and the tasks of their key heads write all columns.
        dgates = unsafe { buffer::matrix(t, 2 * shape.value_heads, fill) };
    };
    // SAFETY: as above.
    let dqkv = unsafe { buffer::matrix(t, shape.packed_width(), fill) };
    (dqkv, dgates)
}

simd_fn! {
    /// Replaces `p`, the gradients of `M` and of `A`, by the factors `∂M ∘ L` and `∂A ∘ L ∘ β` of the gradients of queries and
    /// keys. Adds the gradients of the running sums and of `β`.
    fn back_pairs<'a>(simd: S, p: &'a mut [f32], pairs: &'a [f32], by: &'a Decays, c: usize, dsum: &'a mut [f64; CHUNK],
                      dbeta: &'a mut [f32; CHUNK]) -> () {
        let ((dm, da), (qk, kk)) = (p.split_at_mut(c * c), pairs.split_at(c * c));
        let (mut decays, mut columns) = ([0.0; CHUNK], [0.0; CHUNK]);
        let columns = &mut columns[..c];
        for t in 0..c {
            let row = t * c..(t + 1) * c;
            let decays = &mut decays[..c];
            let end = decay_row(simd, decays, &by.sum, t);
            let (dm, da, qk, kk) = (&mut dm[row.clone()], &mut da[row.clone()], &qk[row.clone()], &kk[row]);
            da[t] = 0.0;
            dm[end..].fill(0.0);
            da[end..].fill(0.0);
            let (minus, beta) = (simd.splat_f32s(-1.0), simd.splat_f32s(by.beta[t]));
            let [mut along, mut own] = [simd.splat_f32s(0.0); 2];
            for i in (0..end).step_by(S::F32_LANES) {
                let l = load(simd, decays, i);
                let dm_l = simd.mul_f32s(load(simd, dm, i), l);
                let da_l = simd.mul_f32s(simd.mul_f32s(load(simd, da, i), minus), l);
                let of_beta = simd.mul_f32s(da_l, load(simd, kk, i));
                let da_b = simd.mul_f32s(da_l, beta);
                store(simd, dm, i, dm_l);
                store(simd, da, i, da_b);
                own = simd.add_f32s(own, of_beta);
                let x = simd.mul_add_e_f32s(dm_l, load(simd, qk, i), simd.mul_f32s(of_beta, beta));
                along = simd.add_f32s(along, x);
                let sum = simd.add_f32s(load(simd, columns, i), x);
                store(simd, columns, i, sum);
            }
            dbeta[t] += simd.reduce_sum_f32s(own);
            dsum[t] += f64::from(simd.reduce_sum_f32s(along));
        }
        for t in 0..c {
            dsum[t] -= f64::from(columns[t]);
        }
    }
}

simd_fn! {
    /// Computes `to[t] += Σ a[t] · b[t]` for rows of `d` elements.
    fn add_dots<'a>(simd: S, to: &'a mut [f32], a: &'a [f32], b: &'a [f32], d: usize) -> () {
        for (t, (a, b)) in a.chunks_exact(d).zip(b.chunks_exact(d)).enumerate() {
            to[t] += dot(simd, a, b);
        }
    }
}

simd_fn! {
    /// Computes `to[t] += by[t] · from[t]` for rows of `d` elements, and `dots[t] = by[t] · Σ from[t] · x[t]`.
    fn add_scaled<'a>(simd: S, to: &'a mut [f32], from: &'a [f32], by: &'a [f32], x: &'a [f32], d: usize,
                      dots: &'a mut [f32; CHUNK]) -> () {
        for (t, (to, from)) in to.chunks_exact_mut(d).zip(from.chunks_exact(d)).enumerate() {
            dots[t] = by[t] * dot(simd, from, &x[t * d..(t + 1) * d]);
            let by = simd.splat_f32s(by[t]);
            for i in (0..d).step_by(S::F32_LANES) {
                let sum = simd.mul_add_e_f32s(load(simd, from, i), by, load(simd, to, i));
                store(simd, to, i, sum);
            }
        }
    }
}

simd_fn! {
    /// Returns the sum of the products of two matrices' elements, with `d` columns.
    fn inner_product<'a>(simd: S, a: &'a [f32], b: &'a [f32], d: usize) -> f64 {
        let mut sum = 0.0;
        for (a, b) in a.chunks_exact(d).zip(b.chunks_exact(d)) {
            sum += f64::from(dot(simd, a, b));
        }
        sum
    }
}

simd_fn! {
    /// Replaces the gradient `dy` of a normalised row `y = norm · x` by that of `x`. The norm is `scale / sqrt(Σ x² + ε)`.
    fn through_norm<'a>(simd: S, dy: &'a mut [f32], y: &'a [f32], norm: f32, scale: f32) -> () {
        // With the unscaled row ŷ = y / scale, the gradient is norm · (dy − ŷ (ŷ · dy)).
        let along = dot(simd, dy, y) / (scale * scale);
        let (pull, norm) = (simd.splat_f32s(-along), simd.splat_f32s(norm));
        for i in (0..dy.len()).step_by(S::F32_LANES) {
            let d = simd.mul_f32s(simd.mul_add_e_f32s(load(simd, y, i), pull, load(simd, dy, i)), norm);
            store(simd, dy, i, d);
        }
    }
}

/// A task of the backward pass.
struct BackTask<'a> {
    call: Call<'a>,
    dout: Mat<'a>,
    states: &'a [f32],
    segment: usize,
    key_head: usize,
    starts: Shared<'a>,
}

impl BackTask<'_> {
    fn run(&self, s: &mut Scratch, dqkv: &MatMut, dgates: &MatMut) {
        let Self { call, key_head, .. } = *self;
        let (shape, segment) = (call.shape, &call.segments.all()[self.segment]);
        let (one, group, d) = (shape.one(), shape.group(), shape.key_dim);
        let mut dstate = std::mem::take(&mut s.back.state);
        let own = reserve(&mut dstate, group * one);
        let mut reached = self.gather_starts(own);
        let chunks: Vec<usize> = segment.rows.clone().step_by(CHUNK).collect();
        for (chunk, &first) in chunks.iter().enumerate().rev() {
            let place = Place { first, c: CHUNK.min(segment.rows.end - first), key_head };
            let c = place.c;
            call.begin(s, place);
            reserve(&mut s.back.dqk, 2 * c * d).fill(0.0);
            let before = call.segments.state_before(segment, chunk);
            for (i, dstate) in own.chunks_exact_mut(one.max(1)).enumerate() {
                let head = key_head * group + i;
                let at = |state: usize| state * shape.state_len() + head * one;
                let before = before.map(|state| &self.states[at(state)..][..one]);
                self.chunk(s, place, head, before, dstate, reached, [dqkv, dgates]);
            }
            reached = true;
            self.finish(s, place, dqkv);
        }
        if segment.after.is_some() {
            let at = self.segment * shape.state_len() + key_head * group * one;
            // SAFETY: this is the only task of the segment and the key head.
            unsafe { self.starts.part(at, group * one) }.copy_from_slice(own);
        }
        s.back.state = dstate;
    }

    /// Writes the gradient of the segment's last state in the value heads of this task. Returns false if nothing continues the
    /// segment, so that the gradient is zero.
    fn gather_starts(&self, to: &mut [f32]) -> bool {
        to.fill(0.0);
        let (shape, all) = (self.call.shape, self.call.segments.all());
        let mut reached = false;
        for (next, _) in all.iter().enumerate().filter(|(_, next)| next.after == Some(self.segment)) {
            let at = next * shape.state_len() + self.key_head * to.len();
            // SAFETY: the tasks of the next segments have ended, and only this task reads their part of the key head.
            let from = unsafe { self.starts.part(at, to.len()) };
            to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
            reached = true;
        }
        reached
    }

    /// Computes the gradients of a chunk in one value head. `dstate` is the gradient of the state after the chunk if `reached`,
    /// and becomes that of the state before it.
    #[allow(clippy::too_many_arguments, reason = "the arguments of one step of a loop")]
    fn chunk(
        &self,
        s: &mut Scratch,
        place: Place,
        head: usize,
        before: Option<&[f32]>,
        dstate: &mut [f32],
        reached: bool,
        [dqkv, dgates]: [&MatMut; 2],
    ) {
        let (call, Place { first, c, .. }) = (self.call, place);
        let DeltaShape { key_dim: dk, value_dim: dv, value_heads, .. } = call.shape;
        call.solve(s, place, head, before);
        let (by, mut dsum, mut dbeta) = (&s.decays, [0.0; CHUNK], [0.0; CHUNK]);
        let (qk, pairs) = (reserve(&mut s.qk, 2 * c * dk), reserve(&mut s.pairs, 2 * c * c));
        let (m, n) = (reserve(&mut s.m, c * c), reserve(&mut s.n, c * c));
        let (e, u) = (reserve(&mut s.e, c * dv), reserve(&mut s.u, c * dv));
        let fading = reserve(&mut s.fading, c * dk);
        let (x, p) = (reserve(&mut s.back.x, 2 * c * dv), reserve(&mut s.back.p, 2 * c * c));
        let (z, dqk) = (reserve(&mut s.back.z, 2 * c * dk), reserve(&mut s.back.dqk, 2 * c * dk));
        for (t, to) in x.chunks_exact_mut(dv.max(1)).enumerate().take(c) {
            to.copy_from_slice(self.dout.part(first + t, head * dv, dv));
        }
        // The gradient of U, then R = (I + A)⁻ᵀ ∂U.
        let (dout, r) = x.split_at_mut(c * dv);
        s.packs.right(rows(dout, dv), c, dv).times(turned(m, c), c, r, false);
        if reached {
            s.packs.right(rows(dstate, dv), dk, dv).times(rows(fading, dk), c, r, true);
        }
        solve(n, r, c, true);
        add_dots(&mut dbeta, r, e, dv);
        // The gradients of M and of A.
        s.packs.right(turned(u, dv), dv, c).times(rows(x, dv), 2 * c, p, false);
        back_pairs(p, pairs, by, c, &mut dsum, &mut dbeta);
        // R becomes the gradient of E, which is that of V.
        let de = &mut x[c * dv..];
        scale_in_place(de, &by.beta, dv);
        for (t, from) in de.chunks_exact(dv.max(1)).enumerate() {
            let to = dqkv.data.ptr((first + t) * dqkv.stride + call.shape.value_column(head));
            // SAFETY: this is the only task of the row and the head, and the memory is writable.
            unsafe { to.copy_from_nonoverlapping(from.as_ptr(), dv) };
        }
        let mut dots = [0.0; CHUNK];
        if let Some(before) = before {
            s.packs.right(turned(before, dv), dv, dk).times(rows(x, dv), 2 * c, z, false);
            let minus: [f32; CHUNK] = std::array::from_fn(|t| -by.since[t]);
            for (i, by) in [&by.since, &minus].into_iter().enumerate() {
                let of = i * c * dk..(i + 1) * c * dk;
                add_scaled(&mut dqk[of.clone()], &z[of.clone()], by, &qk[of], dk, &mut dots);
                dsum.iter_mut().zip(dots).take(c).for_each(|(sum, dot)| *sum += f64::from(dot));
            }
        }
        s.packs.right(rows(&qk[c * dk..], dk), c, dk).times(rows(p, c), 2 * c, dqk, true);
        let dk_part = &mut dqk[c * dk..];
        s.packs.right(rows(qk, dk), 2 * c, dk).times(turned(p, c), c, dk_part, true);
        if reached {
            let z = &mut z[..c * dk];
            s.packs.right(turned(dstate, dv), dv, dk).times(rows(u, dv), c, z, false);
            add_scaled(dk_part, z, &by.until, &qk[c * dk..], dk, &mut dots);
            for t in 0..c {
                dsum[t] -= f64::from(dots[t]);
                dsum[c - 1] += f64::from(dots[t]);
            }
            if let Some(before) = before {
                dsum[c - 1] += f64::from(by.whole) * inner_product(dstate, before, dv);
            }
        }
        if before.is_some() {
            // The gradient of the state before the chunk.
            let (dout, de) = x.split_at_mut(c * dv);
            let minus: [f32; CHUNK] = std::array::from_fn(|t| -by.since[t]);
            scale_in_place(dout, &by.since, dv);
            scale_in_place(de, &minus, dv);
            scale_in_place(dstate, &[by.whole], dk * dv);
            s.packs.right(rows(x, dv), 2 * c, dv).times(turned(qk, dk), dk, dstate, true);
        } else {
            dstate.fill(0.0);
        }
        let mut sum = 0.0;
        for t in (0..c).rev() {
            sum += dsum[t];
            // SAFETY: this is the only task of the row and the head, and the memory is writable.
            unsafe {
                let row = (first + t) * dgates.stride + head;
                dgates.data.ptr(row).write(sum as f32);
                dgates.data.ptr(row + value_heads).write(dbeta[t]);
            }
        }
    }

    /// Writes the gradients of the queries and keys of a chunk.
    fn finish(&self, s: &mut Scratch, Place { first, c, key_head }: Place, dqkv: &MatMut) {
        let DeltaShape { key_heads, key_dim: d, .. } = self.call.shape;
        let (qk, dqk) = (reserve(&mut s.qk, 2 * c * d), reserve(&mut s.back.dqk, 2 * c * d));
        let norms = reserve(&mut s.norms, 2 * c);
        let scales = [1.0 / (d as f32).sqrt(), 1.0];
        for (t, (dy, y)) in dqk.chunks_exact_mut(d.max(1)).zip(qk.chunks_exact(d.max(1))).enumerate() {
            through_norm(dy, y, norms[t], scales[t / c]);
            let column = (t / c * key_heads + key_head) * d;
            let to = dqkv.data.ptr((first + t % c) * dqkv.stride + column);
            // SAFETY: this is the only task of the row and the key head, and the memory is writable.
            unsafe { to.copy_from_nonoverlapping(dy.as_ptr(), d) };
        }
    }
}

/// Inputs of one row in one value head.
#[derive(Clone, Copy)]
struct StepInput<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    g: f32,
    beta: f32,
}

simd_fn! {
    /// Moves the state of one head on by one row, and writes the output.
    fn step<'a>(simd: S, state: &'a mut [f32], x: StepInput<'a>, out: &'a mut [f32], keys: &'a mut [f32]) -> () {
        let d = out.len();
        let (q, k) = keys.split_at_mut(x.k.len());
        let scale = 1.0 / (x.q.len() as f32).sqrt();
        for (to, from, scale) in [(&mut *q, x.q, scale), (&mut *k, x.k, 1.0)] {
            let by = simd.splat_f32s(scale / (dot(simd, from, from) + EPS).sqrt());
            for i in (0..to.len()).step_by(S::F32_LANES) {
                store(simd, to, i, simd.mul_f32s(load(simd, from, i), by));
            }
        }
        let (decay, beta) = (simd.splat_f32s(x.g.exp()), simd.splat_f32s(x.beta));
        let along = simd.splat_f32s(dot(simd, q, k));
        let row = StepRow { q, k, v: x.v, decay, beta, along };
        let mut at = 0;
        // With AVX-512, a row of 128 columns is read in memory order.
        while S::F32_LANES >= 16 && at + 8 * S::F32_LANES <= d {
            row.columns::<8>(simd, state, out, at);
            at += 8 * S::F32_LANES;
        }
        while at + 4 * S::F32_LANES <= d {
            row.columns::<4>(simd, state, out, at);
            at += 4 * S::F32_LANES;
        }
        while at < d {
            row.columns::<1>(simd, state, out, at);
            at += S::F32_LANES;
        }
    }
}

/// Normalised inputs of one row in one value head.
#[derive(Clone, Copy)]
struct StepRow<'a, S: Simd> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decay: S::f32s,
    beta: S::f32s,
    /// `q · k` in every lane.
    along: S::f32s,
}

impl<S: Simd> StepRow<'_, S> {
    /// Moves on the columns of the state from `at` on: `V` vectors, which are complete if there are several.
    #[inline(always)]
    fn columns<const V: usize>(self, simd: S, state: &mut [f32], out: &mut [f32], at: usize) {
        let d = out.len();
        let [mut of_q, mut of_k] = [[simd.splat_f32s(0.0); V]; 2];
        for i in 0..self.k.len() {
            let s = load_vectors::<S, V>(simd, &state[i * d..(i + 1) * d], at);
            let (q, k) = (simd.splat_f32s(self.q[i]), simd.splat_f32s(self.k[i]));
            for v in 0..V {
                of_q[v] = simd.mul_add_e_f32s(q, s[v], of_q[v]);
                of_k[v] = simd.mul_add_e_f32s(k, s[v], of_k[v]);
            }
        }
        let values = load_vectors::<S, V>(simd, self.v, at);
        for v in 0..V {
            let rest = simd.sub_f32s(values[v], simd.mul_f32s(self.decay, of_k[v]));
            of_k[v] = simd.mul_f32s(self.beta, rest);
            of_q[v] = simd.mul_add_e_f32s(self.along, of_k[v], simd.mul_f32s(self.decay, of_q[v]));
        }
        store_vectors(simd, out, at, of_q);
        for i in 0..self.k.len() {
            let row = &mut state[i * d..(i + 1) * d];
            let mut s = load_vectors::<S, V>(simd, row, at);
            let k = simd.splat_f32s(self.k[i]);
            for v in 0..V {
                s[v] = simd.mul_add_e_f32s(k, of_k[v], simd.mul_f32s(self.decay, s[v]));
            }
            store_vectors(simd, row, at, s);
        }
    }
}

/// Computes the gated delta rule of rows that continue sequences, and moves their states `[state_len]` on. Returns the output
/// `[t, value_width]`. Every row is in one part, in order.
///
/// The bits of a row depend on its part alone. They differ from those of [`delta_forward`], which sums in another order.
#[must_use]
pub fn delta_steps(qkv: Mat, gates: Mat, parts: &mut [Continued], shape: DeltaShape) -> Vec<f32> {
    let t = qkv.rows;
    let lengths: Vec<usize> = parts.iter().map(|part| part.state.len()).collect();
    check!(
        "delta rule, decode",
        shape.fits(qkv, gates) && covers(parts, t) && lengths.iter().all(|len| *len == shape.state_len()),
        qkv.dims(),
        gates.dims(),
        lengths,
        shape
    );
    let (one, dv, dk) = (shape.one(), shape.value_dim, shape.key_dim);
    let _span = span(Op::DeltaDecode, || {
        let moved = 2 * parts.len() * shape.state_len() + t * (shape.packed_width() + shape.value_width());
        (8 * t * shape.state_len(), 4 * moved)
    });
    let mut out = buffer::zeros(t * shape.value_width());
    let to = MatMut::new(&mut out, t, shape.value_width());
    let states: Vec<_> = parts.iter_mut().map(|part| (part.rows.clone(), Shared::new(part.state))).collect();
    let heads = shape.value_heads;
    parallel::tasks(states.len() * heads, 4 * t * shape.state_len(), |i| {
        let ((rows, state), head) = (&states[i / heads], i % heads);
        // SAFETY: this is the only task of the part and the head.
        let state = unsafe { state.part(head * one, one) };
        let mut scratch = DELTA.take();
        let keys = reserve(&mut scratch.qk, 2 * dk);
        let key_head = head / shape.group().max(1);
        for row in rows.clone() {
            let gates = gates.row(row);
            let input = StepInput {
                q: qkv.part(row, key_head * dk, dk),
                k: qkv.part(row, (shape.key_heads + key_head) * dk, dk),
                v: qkv.part(row, shape.value_column(head), dv),
                g: gates[head],
                beta: gates[heads + head],
            };
            // SAFETY: this is the only task of the row and the head.
            step(state, input, unsafe { to.part(row, head * dv..(head + 1) * dv) }, keys);
        }
        DELTA.set(scratch);
    });
    out
}
