//! Small matrix products whose summation order depends on the inner dimension alone.
//!
//! An element of a product has the same bits at any position in the output, however many rows and columns are computed with it.
//! The reason is that a single accumulator per element ([`Product`]) or a single vector of accumulators ([`Dots`]) takes the
//! terms in order. Attention and decoding use these products when they do not use matrix tiles.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m512, __m512bh, _mm512_dpbf16_ps};

use half::bf16;
use half::slice::HalfFloatSliceExt;
use pulp::WithSimd;
#[cfg(target_arch = "x86_64")]
use pulp::x86::V4;

use crate::mat::Mat;
use crate::simd::{self, Simd, load_ptr, prefetch, prefetch_far, store_ptr};

/// A single-threaded product: `c [m, n] = a [m, k] · b [k, n]`, or `c += a · b` if `accumulate`.
///
/// Both strides of `a` are arbitrary. Rows of `b` and `c` are contiguous and begin `ldb` and `ldc` elements apart.
pub(crate) struct Product {
    pub c: *mut f32,
    pub ldc: usize,
    pub a: *const f32,
    pub a_row: usize,
    pub a_col: usize,
    pub b: *const f32,
    pub ldb: usize,
    pub m: usize,
    pub k: usize,
    pub n: usize,
    pub accumulate: bool,
}

impl Product {
    /// Runs the product. This is a separate function so that it is compiled once per instruction set.
    ///
    /// # Safety
    /// All elements that strides and sizes address must be in bounds, and nothing else may refer to the elements of `c`.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Simd>(self, simd: S) {
        simd.vectorize(self);
    }

    /// Computes the tile of `ROWS` rows and `VECS` vectors at row `i` and column `j`. If `TAIL`, the last vector has `tail`
    /// lanes.
    #[inline(always)]
    unsafe fn tile<S: Simd, const ROWS: usize, const VECS: usize, const TAIL: bool>(
        &self,
        simd: S,
        i: usize,
        j: usize,
        tail: usize,
    ) {
        let lanes = S::F32_LANES;
        let width = |v: usize| if TAIL && v == VECS - 1 { tail } else { lanes };
        let mut acc = [[simd.splat_f32s(0.0); VECS]; ROWS];
        let mut a = self.a.wrapping_add(i * self.a_row);
        let mut b = self.b.wrapping_add(j);
        for _ in 0..self.k {
            let mut b_vec = [simd.splat_f32s(0.0); VECS];
            for v in 0..VECS {
                // SAFETY: row p < k, and the columns from j on are below n, in `b`.
                b_vec[v] = unsafe { load_ptr(simd, b.wrapping_add(v * lanes), width(v)) };
            }
            for r in 0..ROWS {
                // SAFETY: row i + r < m, column p < k of `a`.
                let x = simd.splat_f32s(unsafe { *a.wrapping_add(r * self.a_row) });
                for v in 0..VECS {
                    acc[r][v] = simd.mul_add_e_f32s(x, b_vec[v], acc[r][v]);
                }
            }
            a = a.wrapping_add(self.a_col);
            b = b.wrapping_add(self.ldb);
        }
        for r in 0..ROWS {
            for v in 0..VECS {
                let c = self.c.wrapping_add((i + r) * self.ldc + j + v * lanes);
                // SAFETY: row i + r < m, columns < n of `c`.
                unsafe {
                    let old =
                        if self.accumulate { load_ptr(simd, c, width(v)) } else { simd.splat_f32s(0.0) };
                    store_ptr(simd, c, width(v), simd.add_f32s(old, acc[r][v]));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Simd, const VECS: usize, const TAIL: bool>(&self, simd: S, j: usize, tail: usize) {
        let mut i = 0;
        // SAFETY: every tile is inside the m rows, and the caller ensures that the columns are in bounds.
        unsafe {
            while i + 6 <= self.m {
                self.tile::<S, 6, VECS, TAIL>(simd, i, j, tail);
                i += 6;
            }
            if i + 4 <= self.m {
                self.tile::<S, 4, VECS, TAIL>(simd, i, j, tail);
                i += 4;
            }
            if i + 2 <= self.m {
                self.tile::<S, 2, VECS, TAIL>(simd, i, j, tail);
                i += 2;
            }
            if i < self.m {
                self.tile::<S, 1, VECS, TAIL>(simd, i, j, tail);
            }
        }
    }
}

impl WithSimd for Product {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let lanes = S::F32_LANES;
        let mut j = 0;
        // SAFETY: the tiles partition the n columns; the contract of `run` guarantees the rest.
        unsafe {
            while j + 2 * lanes <= self.n {
                self.rows::<S, 2, false>(simd, j, 0);
                j += 2 * lanes;
            }
            match self.n - j {
                0 => {}
                rest if rest == lanes => self.rows::<S, 1, false>(simd, j, 0),
                rest if rest > lanes => self.rows::<S, 2, true>(simd, j, rest - lanes),
                rest => self.rows::<S, 1, true>(simd, j, rest),
            }
        }
    }
}

/// Pointer to the weights of [`Dots`], by storage type.
#[derive(Clone, Copy)]
pub(crate) enum WeightPtr {
    F32(*const f32),
    Bf16(*const bf16),
    /// bf16 weights that are multiplied without widening ([`crate::paths::Path::Dot`]).
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only AVX-512 multiplies pairs"))]
    Pairs(*const bf16),
}

/// A single-threaded product for few rows: `y [m, n] = x [m, k] · wᵀ + bias`; `w [n, k]` is contiguous.
///
/// The speed is limited by reading the weights from memory. They are therefore read in memory order and prefetched, while the
/// packed rows of `x` stay in the caches.
pub(crate) struct Dots<'a> {
    pub y: *mut f32,
    pub y_stride: usize,
    /// Rows that [`pack_rows`] has packed for the dtype of the weights.
    pub x: *const f32,
    pub w: WeightPtr,
    pub bias: Option<&'a [f32]>,
    pub m: usize,
    pub k: usize,
    pub n: usize,
    /// Row of `w`, at or beyond the end of this part, that this thread will probably need next.
    pub after: usize,
    /// True if the product is added to the previous `y`.
    pub old: bool,
}

/// Maximum number of rows of `x` that are multiplied at the same time.
const ROWS: usize = 8;
/// Length of the longest block of the inner dimension. Blocks are summed separately. The weights of a tile in a block stay in the
/// first-level cache while further rows of `x` are multiplied by them.
const DEPTH: usize = 2048;
/// Padding of columns in packed rows: two of the widest vectors.
const PAD: usize = 32;
/// Bytes by which weights are prefetched into the second-level cache, in addition to the other rows of a tile. The second-level
/// cache can have more requests in flight than the first-level cache. With few requests, memory would be idle during products.
const FAR: usize = 16 * 1024;
/// Bytes of a row by which weights are prefetched from the second-level cache into the first-level cache.
const NEAR: usize = 1024;

/// Lanes of the vectors that multiply pairs of bf16.
const PAIRED_LANES: usize = 16;

/// Returns the number of elements that [`pack_rows`] writes.
pub(crate) fn packed_len(m: usize, k: usize) -> usize {
    m.next_multiple_of(ROWS) * k.next_multiple_of(PAD)
}

/// Returns how many of the `rest` remaining rows are multiplied at the same time: up to four, or eight with the 32 registers of
/// AVX-512. Rows beyond `rest` are zeros.
#[inline(always)]
fn side(lanes: usize, rest: usize) -> usize {
    match rest {
        5.. if lanes >= 16 => ROWS,
        3.. => 4,
        rest => rest,
    }
}

/// Packs rows of `x` for [`Dots`]. Rows that are multiplied at the same time are interleaved vector by vector, and padded with
/// zeros beyond `m` and `k`.
///
/// For bf16 weights, the even elements come first in every block of two vectors: two adjacent bf16 numbers are the low and the
/// high half of one 32-bit lane, and are widened separately. For [`WeightPtr::Pairs`] see [`round_rows`].
pub(crate) fn pack_rows(x: Mat, bf16: bool, to: &mut [f32]) {
    simd::arch().dispatch(PackRows { to, x, bf16 });
}

/// Packs rows for bf16 weights that are multiplied without widening. The rows are rounded to bf16, with 32 elements per vector,
/// and use half of `to`.
pub(crate) fn round_rows(x: Mat, to: &mut [f32]) {
    let (m, k) = x.dims();
    let padded = k.next_multiple_of(PAD);
    // SAFETY: the memory of each f32 has room for two bf16, and any bits are valid for both types.
    let to = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast::<bf16>(), 2 * to.len()) };
    let mut i = 0;
    while i < m {
        let rows = side(PAIRED_LANES, m - i);
        for (at, to) in to[i * padded..(i + rows) * padded].chunks_exact_mut(rows * PAD).enumerate() {
            for (r, to) in to.chunks_exact_mut(PAD).enumerate() {
                let x = if i + r < m { &x.row(i + r)[at * PAD..k.min((at + 1) * PAD)] } else { &[] };
                let (whole, rest) = to.split_at_mut(x.len());
                whole.convert_from_f32_slice(x);
                rest.fill(bf16::ZERO);
            }
        }
        i += rows;
    }
}

struct PackRows<'a> {
    to: &'a mut [f32],
    x: Mat<'a>,
    bf16: bool,
}

impl PackRows<'_> {
    /// Packs two vectors of columns of one row: the two halves, or for bf16 the even and the odd elements.
    #[inline(always)]
    fn block(x: &[f32], first: &mut [f32], second: &mut [f32], bf16: bool) {
        if bf16 {
            for ((pair, even), odd) in x.chunks_exact(2).zip(first).zip(second) {
                (*even, *odd) = (pair[0], pair[1]);
            }
        } else {
            let (a, b) = x.split_at(first.len());
            first.copy_from_slice(a);
            second.copy_from_slice(b);
        }
    }
}

impl WithSimd for PackRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let (lanes, (m, k)) = (S::F32_LANES, self.x.dims());
        let padded = k.next_multiple_of(PAD);
        let mut i = 0;
        while i < m {
            let rows = side(lanes, m - i);
            let to = &mut self.to[i * padded..(i + rows) * padded];
            for r in 0..rows {
                let blocks = to.chunks_exact_mut(2 * rows * lanes).map(|to| {
                    let (first, second) = to.split_at_mut(rows * lanes);
                    (&mut first[r * lanes..(r + 1) * lanes], &mut second[r * lanes..(r + 1) * lanes])
                });
                if i + r >= m {
                    blocks.for_each(|(first, second)| {
                        first.fill(0.0);
                        second.fill(0.0);
                    });
                    continue;
                }
                let x = self.x.row(i + r);
                for (at, (first, second)) in blocks.enumerate() {
                    let x = &x[k.min(at * 2 * lanes)..];
                    if x.len() >= 2 * lanes {
                        Self::block(&x[..2 * lanes], first, second, self.bf16);
                    } else {
                        let mut rest = [0.0; PAD];
                        rest[..x.len()].copy_from_slice(x);
                        Self::block(&rest[..2 * lanes], first, second, self.bf16);
                    }
                }
            }
            i += rows;
        }
    }
}

/// One block of the inner dimension: its start, its length and a flag that is true if the output already has a value.
#[derive(Clone, Copy)]
struct Part {
    start: usize,
    len: usize,
    old: bool,
}

/// Position of a tile: its first row of `x`, its first row of `w`, its number among the tiles that multiply these rows of `w`, and how many
/// such tiles there are.
#[derive(Clone, Copy)]
struct Place {
    i: usize,
    j: usize,
    turn: usize,
    turns: usize,
}

/// A storage type of weights. [`Dots`] reads it in units of as many elements as two f32 vectors have.
trait Stored: Copy {
    /// Vector registers that hold a unit.
    type Vecs<S: Simd>: Copy;
    /// Number of vectors that the same elements take in a packed row of `x`.
    const OF_X: usize;
    /// Loads a unit that starts at `w`.
    unsafe fn whole<S: Simd>(simd: S, w: *const Self) -> Self::Vecs<S>;
    /// Loads the first `width` elements of a unit; the others are zero.
    unsafe fn partial<S: Simd>(simd: S, w: *const Self, width: usize) -> Self::Vecs<S>;
    /// Adds the products of a unit and `R` packed rows that start at `x`.
    unsafe fn add<S: Simd, const R: usize, const N: usize>(
        simd: S,
        acc: &mut [[S::f32s; N]; R],
        x: *const f32,
        w: [Self::Vecs<S>; N],
    );
}

/// Units of two f32 vectors whose elements are f32 numbers.
pub(crate) trait Units: Copy {
    /// Loads a unit.
    ///
    /// # Safety
    /// A unit must be readable.
    unsafe fn unit<S: Simd>(simd: S, w: *const Self) -> [S::f32s; 2];
    /// Loads the first `width` elements of a unit; the others are zero.
    ///
    /// # Safety
    /// `width` elements must be readable, fewer than a unit has.
    unsafe fn columns<S: Simd>(simd: S, w: *const Self, width: usize) -> [S::f32s; 2];
    /// Returns where element `i` is in a unit of `lanes` lanes each.
    fn place(i: usize, lanes: usize) -> usize;
}

impl Units for f32 {
    #[inline(always)]
    unsafe fn unit<S: Simd>(simd: S, w: *const Self) -> [S::f32s; 2] {
        // SAFETY: guaranteed by this function's contract.
        unsafe { <Self as Stored>::whole(simd, w) }
    }

    #[inline(always)]
    unsafe fn columns<S: Simd>(simd: S, w: *const Self, width: usize) -> [S::f32s; 2] {
        // SAFETY: guaranteed by this function's contract.
        unsafe { <Self as Stored>::partial(simd, w, width) }
    }

    fn place(i: usize, _: usize) -> usize {
        i
    }
}

impl Units for bf16 {
    #[inline(always)]
    unsafe fn unit<S: Simd>(simd: S, w: *const Self) -> [S::f32s; 2] {
        // SAFETY: guaranteed by this function's contract.
        unsafe { <Self as Stored>::whole(simd, w) }
    }

    #[inline(always)]
    unsafe fn columns<S: Simd>(simd: S, w: *const Self, width: usize) -> [S::f32s; 2] {
        // SAFETY: guaranteed by this function's contract.
        unsafe { <Self as Stored>::partial(simd, w, width) }
    }

    /// The even elements come first.
    fn place(i: usize, lanes: usize) -> usize {
        i / 2 + i % 2 * lanes
    }
}

/// Implements [`Stored::add`] for widened weights.
#[inline(always)]
unsafe fn add_wide<S: Simd, const R: usize, const N: usize>(
    simd: S,
    acc: &mut [[S::f32s; N]; R],
    x: *const f32,
    w: [[S::f32s; 2]; N],
) {
    for half in 0..2 {
        for r in 0..R {
            // SAFETY: packed rows contain two vectors of every row.
            let x = unsafe { x.add((half * R + r) * S::F32_LANES).cast::<S::f32s>().read_unaligned() };
            for c in 0..N {
                acc[r][c] = simd.mul_add_e_f32s(x, w[c][half], acc[r][c]);
            }
        }
    }
}

impl Stored for f32 {
    type Vecs<S: Simd> = [S::f32s; 2];
    const OF_X: usize = 2;

    #[inline(always)]
    unsafe fn whole<S: Simd>(_: S, w: *const Self) -> [S::f32s; 2] {
        // SAFETY: two vectors are readable.
        unsafe {
            [w.cast::<S::f32s>().read_unaligned(), w.add(S::F32_LANES).cast::<S::f32s>().read_unaligned()]
        }
    }

    #[inline(always)]
    unsafe fn partial<S: Simd>(simd: S, w: *const Self, width: usize) -> [S::f32s; 2] {
        let first = width.min(S::F32_LANES);
        // SAFETY: `width` elements are readable.
        unsafe { [load_ptr(simd, w, first), load_ptr(simd, w.wrapping_add(first), width - first)] }
    }

    #[inline(always)]
    unsafe fn add<S: Simd, const R: usize, const N: usize>(
        simd: S,
        acc: &mut [[S::f32s; N]; R],
        x: *const f32,
        w: [[S::f32s; 2]; N],
    ) {
        // SAFETY: guaranteed by this function's contract.
        unsafe { add_wide(simd, acc, x, w) }
    }
}

impl Stored for bf16 {
    type Vecs<S: Simd> = [S::f32s; 2];
    const OF_X: usize = 2;

    #[inline(always)]
    unsafe fn whole<S: Simd>(simd: S, w: *const Self) -> [S::f32s; 2] {
        // SAFETY: two vectors of 16-bit elements have the size of one vector of 32-bit lanes.
        let pairs = unsafe { w.cast::<S::u32s>().read_unaligned() };
        let even = simd.wrapping_dyn_shl_u32s(pairs, simd.splat_u32s(16));
        let odd = simd.and_u32s(pairs, simd.splat_u32s(0xffff_0000));
        [simd.transmute_f32s_u32s(even), simd.transmute_f32s_u32s(odd)]
    }

    #[inline(always)]
    unsafe fn partial<S: Simd>(simd: S, w: *const Self, width: usize) -> [S::f32s; 2] {
        let mut tail = [bf16::ZERO; PAD];
        // SAFETY: `width` elements are readable, and `width` is less than `PAD`.
        unsafe {
            w.copy_to_nonoverlapping(tail.as_mut_ptr(), width);
            Self::whole(simd, tail.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn add<S: Simd, const R: usize, const N: usize>(
        simd: S,
        acc: &mut [[S::f32s; N]; R],
        x: *const f32,
        w: [[S::f32s; 2]; N],
    ) {
        // SAFETY: guaranteed by this function's contract.
        unsafe { add_wide(simd, acc, x, w) }
    }
}

/// A bf16 number that is multiplied without widening. Vectors on both sides have 16 lanes, each with a pair of adjacent elements.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Paired(bf16);

#[cfg(target_arch = "x86_64")]
impl Stored for Paired {
    type Vecs<S: Simd> = __m512bh;
    const OF_X: usize = 1;

    #[inline(always)]
    unsafe fn whole<S: Simd>(_: S, w: *const Self) -> __m512bh {
        // SAFETY: 32 elements are readable.
        unsafe { w.cast::<__m512bh>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn partial<S: Simd>(simd: S, w: *const Self, width: usize) -> __m512bh {
        let mut tail = [Self(bf16::ZERO); PAD];
        // SAFETY: `width` elements are readable, and `width` is less than `PAD`.
        unsafe {
            w.copy_to_nonoverlapping(tail.as_mut_ptr(), width);
            Self::whole(simd, tail.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn add<S: Simd, const R: usize, const N: usize>(
        _: S,
        acc: &mut [[S::f32s; N]; R],
        x: *const f32,
        w: [__m512bh; N],
    ) {
        for r in 0..R {
            // SAFETY: packed rows contain a vector of every row. Only `Dots::run_pairs` runs this code; there the vectors of `S`
            // are those of AVX-512, and the CPU has the instruction.
            unsafe {
                let x = x.add(r * S::F32_LANES).cast::<__m512bh>().read_unaligned();
                for c in 0..N {
                    let sum = std::mem::transmute_copy::<S::f32s, __m512>(&acc[r][c]);
                    let sum = _mm512_dpbf16_ps(sum, x, w[c]);
                    acc[r][c] = std::mem::transmute_copy::<__m512, S::f32s>(&sum);
                }
            }
        }
    }
}

impl Dots<'_> {
    /// Runs the product.
    ///
    /// # Safety
    /// All elements that strides and sizes address must be in bounds, and nothing else may refer to the elements of `y`.
    pub(crate) unsafe fn run(self) {
        #[cfg(target_arch = "x86_64")]
        if let (WeightPtr::Pairs(w), Some(simd)) = (self.w, V4::try_new()) {
            // SAFETY: guaranteed by this function's contract. Such weights are chosen only if the CPU has the instruction.
            return unsafe { self.run_pairs(simd, w.cast()) };
        }
        simd::arch().dispatch(self);
    }

    /// Computes products of bf16 pairs.
    ///
    /// # Safety
    /// The requirements of [`Self::run`] must be met, and the CPU must have the instructions.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16")]
    unsafe fn run_pairs(&self, simd: V4, w: *const Paired) {
        // SAFETY: guaranteed by this function's contract.
        unsafe { self.tiles::<V4, Paired, ROWS, 3>(simd, w) }
    }

    /// Processes all weights, in tiles of `R × N` and then in smaller ones.
    #[inline(always)]
    unsafe fn tiles<S: Simd, T: Stored, const R: usize, const N: usize>(&self, simd: S, w: *const T) {
        let mut j = 0;
        // SAFETY: the groups partition the n columns; the contract of `run` guarantees the rest.
        unsafe {
            while j + N <= self.n {
                self.group::<S, T, R, N>(simd, w, j);
                j += N;
            }
            while j < self.n {
                self.group::<S, T, R, 1>(simd, w, j);
                j += 1;
            }
        }
    }

    /// Multiplies all rows of `x` by the `N` rows of `w` from row `j` on. These rows of `w` stay in the first-level cache for a
    /// block of the inner dimension.
    #[inline(always)]
    unsafe fn group<S: Simd, T: Stored, const R: usize, const N: usize>(
        &self,
        simd: S,
        w: *const T,
        j: usize,
    ) {
        for start in (0..self.k.max(1)).step_by(DEPTH) {
            let part = Part { start, len: DEPTH.min(self.k - start), old: self.old || start > 0 };
            let turns = self.m.div_ceil(side(S::F32_LANES, ROWS));
            let (mut i, mut turn) = (0, 0);
            while i < self.m {
                let (at, first) = (Place { i, j, turn, turns }, i == 0);
                // SAFETY: these rows were packed together.
                i += unsafe {
                    match side(S::F32_LANES, self.m - i) {
                        1 if first => self.tile::<S, T, 1, N, true>(simd, w, part, at),
                        1 => self.tile::<S, T, 1, N, false>(simd, w, part, at),
                        2 if first => self.tile::<S, T, 2, N, true>(simd, w, part, at),
                        2 => self.tile::<S, T, 2, N, false>(simd, w, part, at),
                        4 if first => self.tile::<S, T, 4, N, true>(simd, w, part, at),
                        4 => self.tile::<S, T, 4, N, false>(simd, w, part, at),
                        _ if first => self.tile::<S, T, R, N, true>(simd, w, part, at),
                        _ => self.tile::<S, T, R, N, false>(simd, w, part, at),
                    }
                };
                turn += 1;
            }
        }
    }

    /// Returns the address from which a tile prefetches weights. Prefetching follows memory order, and the tiles of
    /// the same rows together prefetch as many bytes as one of them reads. A tile reads its rows side by side. It therefore prefetches its last row one row length early,
    /// while it reads its first row.
    #[inline(always)]
    fn far<T, const N: usize>(&self, w: *const T, part: Part, j: usize) -> *const T {
        let done = j * self.k + part.start * N;
        let ahead = done + FAR / size_of::<T>() + (N - 1) * self.k;
        let own = self.n * self.k;
        w.wrapping_add(if ahead < own {
            ahead
        } else if self.after > self.n {
            // Prefetch the row that this thread will probably need next.
            ahead + (self.after - self.n) * self.k
        } else {
            // Prefetch the tile's own rows again, which costs nothing.
            done
        })
    }

    /// Multiplies `R` rows of `x` by `N` rows of `w`, and returns `R`. The tiles of these rows of `w` take turns to prefetch weights from
    /// memory, so memory is as busy during the last tile as during the first. Only the first tile is `STREAMED`: it reads weights that are
    /// not in the first-level cache.
    #[inline(always)]
    unsafe fn tile<S: Simd, T: Stored, const R: usize, const N: usize, const STREAMED: bool>(
        &self,
        simd: S,
        w: *const T,
        part: Part,
        Place { i, j, turn, turns }: Place,
    ) -> usize {
        let both = 2 * S::F32_LANES;
        let line = 64 / size_of::<T>();
        let mut acc = [[simd.splat_f32s(0.0); N]; R];
        let mut x = self.x.wrapping_add((i * self.k.next_multiple_of(PAD) + part.start * R) * T::OF_X / 2);
        let mut far = self.far::<T, N>(w, part, j);
        let mut steps_to_prefetch = turn;
        // With one or two rows, a tile finishes a line before the next one arrives, so the hardware prefetcher is enough.
        let nearby = STREAMED && R > 2;
        // The next address to prefetch, in this tile or a later one, and the number of elements left in its row.
        let ahead = part.start + NEAR / size_of::<T>();
        let (tiles, at) = (ahead / self.k.max(1), ahead % self.k.max(1));
        let (mut near, mut left) = (w.wrapping_add((tiles * N + j) * self.k + at), self.k - at);
        let mut w = w.wrapping_add(j * self.k + part.start);
        for _ in 0..part.len / both {
            if steps_to_prefetch == 0 {
                for at in (0..N * both).step_by(line) {
                    prefetch_far(far.wrapping_add(at));
                }
                steps_to_prefetch = turns;
            }
            steps_to_prefetch -= 1;
            far = far.wrapping_add(N * both);
            if nearby {
                for c in 0..N {
                    for at in (0..both).step_by(line) {
                        prefetch(near.wrapping_add(c * self.k + at));
                    }
                }
                if left > both {
                    (near, left) = (near.wrapping_add(both), left - both);
                } else {
                    (near, left) = (near.wrapping_add(left + (N - 1) * self.k), self.k);
                }
            }
            // SAFETY: row j + c < n, these elements are in bounds, and `x` is packed.
            unsafe {
                let mut w_vec = [T::whole(simd, w); N];
                for c in 1..N {
                    w_vec[c] = T::whole(simd, w.wrapping_add(c * self.k));
                }
                T::add(simd, &mut acc, x, w_vec);
            }
            x = x.wrapping_add(T::OF_X * S::F32_LANES * R);
            w = w.wrapping_add(both);
        }
        if !part.len.is_multiple_of(both) {
            // SAFETY: row j + c < n, its remaining elements are in bounds, and `x` is packed.
            unsafe {
                let mut w_vec = [T::partial(simd, w, part.len % both); N];
                for c in 1..N {
                    w_vec[c] = T::partial(simd, w.wrapping_add(c * self.k), part.len % both);
                }
                T::add(simd, &mut acc, x, w_vec);
            }
        }
        // With a separate array, the compiler keeps the accumulators in registers rather than in memory.
        let mut dots = [[0.0; N]; R];
        for r in 0..R {
            for c in 0..N {
                dots[r][c] = simd.reduce_sum_f32s(acc[r][c]);
            }
        }
        for (r, dots) in dots.iter().enumerate().take(self.m - i) {
            for (c, dot) in dots.iter().enumerate() {
                let bias = if part.start == 0 { self.bias.map_or(0.0, |bias| bias[j + c]) } else { 0.0 };
                // SAFETY: row i + r < m and column j + c < n.
                unsafe {
                    let y = self.y.wrapping_add((i + r) * self.y_stride + j + c);
                    *y = if part.old { *y + (dot + bias) } else { dot + bias };
                }
            }
        }
        R
    }
}

impl WithSimd for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: guaranteed by the contract of `run`.
        unsafe {
            // On AVX2, 4 × 3 accumulators, three weights and one input fill the 16 registers. On AVX-512, 8 × 3 accumulators fill
            // most of the 32 registers. bf16 has only 8 × 2 accumulators, because widening needs registers too.
            match (self.w, S::F32_LANES >= 16) {
                (WeightPtr::F32(w), true) => self.tiles::<S, f32, ROWS, 3>(simd, w),
                (WeightPtr::F32(w), false) => self.tiles::<S, f32, 4, 3>(simd, w),
                (WeightPtr::Bf16(w), true) => self.tiles::<S, bf16, ROWS, 2>(simd, w),
                (WeightPtr::Bf16(w), false) => self.tiles::<S, bf16, 4, 2>(simd, w),
                // Pairs are handled by `run_pairs`.
                (WeightPtr::Pairs(_), _) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    simd_fn! {
        fn product<'a>(simd: S, c: &'a mut [f32], a: &'a [f32], b: &'a [f32], m: usize, k: usize, n: usize,
                       transposed: bool) -> () {
            let (a_row, a_col) = if transposed { (1, m) } else { (k, 1) };
            let (c, a, b) = (c.as_mut_ptr(), a.as_ptr(), b.as_ptr());
            // SAFETY: the caller passes contiguous matrices of these sizes.
            unsafe { Product { c, ldc: n, a, a_row, a_col, b, ldb: n, m, k, n, accumulate: true }.run(simd) }
        }
    }

    #[test]
    fn products_match_plain_sums_and_each_other() {
        for (m, k, n) in [(1, 1, 1), (7, 5, 3), (6, 9, 16), (13, 4, 24), (3, 0, 5), (64, 72, 41), (4, 80, 8)]
        {
            let a: Vec<f32> = (0..m * k).map(|i| ((i * 37 % 19) as f32 - 9.0) / 8.0).collect();
            let b: Vec<f32> = (0..k * n).map(|i| ((i * 23 % 29) as f32 - 14.0) / 16.0).collect();
            let a_t: Vec<f32> = (0..m * k).map(|p| a[p % m.max(1) * k + p / m.max(1)]).collect();
            let (mut c, mut c_t) = (vec![1.0; m * n], vec![1.0; m * n]);
            product(&mut c, &a, &b, m, k, n, false);
            product(&mut c_t, &a_t, &b, m, k, n, true);
            for i in 0..m {
                for j in 0..n {
                    // The values are multiples of 1/128 with few bits, so that the sums are exact in f32.
                    let dot: f32 = (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum();
                    assert_eq!(c[i * n + j], 1.0 + dot, "{m}x{k}x{n} at {i},{j}");
                }
            }
            assert_eq!(c, c_t);
        }
    }
}
