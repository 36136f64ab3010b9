//! Small matrix products whose summation order is fixed by the inner dimension alone.
//!
//! An element of a product has the same bits wherever it stands in the output and however many rows and columns are
//! computed with it: one accumulator per element ([`Product`]) or one vector of accumulators ([`Dots`]), filled in
//! order. The `gemm` crate does not promise that (it changes kernels with the number of rows), so attention and
//! decoding use these.

use half::bf16;
use pulp::WithSimd;

use crate::simd::{Simd, load_ptr, store_ptr};

/// `c [m, n] = a [m, k] · b [k, n]`, or `+=` if `accumulate`, single-threaded.
///
/// `a` is read element by element at any two strides; rows of `b` and `c` are contiguous, `ldb` and `ldc` apart.
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
    /// Runs the product in a function of its own, so that it is compiled once per instruction set.
    ///
    /// # Safety
    /// All elements named by the strides and sizes are in bounds, those of `c` are not referenced elsewhere.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Simd>(self, simd: S) {
        simd.vectorize(self);
    }

    /// One tile of `ROWS` rows and `VECS` vectors (of the last, `tail` lanes if `TAIL`) at row `i`, column `j`.
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
                // SAFETY: row p < k and columns j.. < n of `b`.
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
        // SAFETY: every tile lies inside m rows; columns by the caller.
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
        // SAFETY: the tiles partition the n columns; the rest is the contract of `run`.
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

/// Storage of the weight side of [`Dots`].
#[derive(Clone, Copy)]
pub(crate) enum WeightPtr {
    F32(*const f32),
    Bf16(*const bf16),
}

/// `y [m, n] = x [m, k] · wᵀ + bias` for few rows, single-threaded; `w [n, k]` contiguous.
///
/// For bf16 weights `x` is in the order written by [`deinterleave`].
pub(crate) struct Dots<'a> {
    pub y: *mut f32,
    pub y_stride: usize,
    pub x: *const f32,
    pub x_stride: usize,
    pub w: WeightPtr,
    pub bias: Option<&'a [f32]>,
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

/// Lane count of the instruction set that [`Dots`] will run with.
pub(crate) fn lanes() -> usize {
    struct Lanes;
    impl WithSimd for Lanes {
        type Output = usize;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> usize {
            S::F32_LANES
        }
    }
    pulp::Arch::new().dispatch(Lanes)
}

/// Reorders a row for [`Dots`] with bf16 weights: in every block of `2 · lanes` the even elements come first, since two
/// neighbouring bf16 are widened as the low and the high half of one 32-bit lane. `to` is zero beyond `from`.
pub(crate) fn deinterleave(to: &mut [f32], from: &[f32], lanes: usize) {
    for (to, from) in to.chunks_exact_mut(2 * lanes).zip(from.chunks(2 * lanes)) {
        for (p, &x) in from.iter().enumerate() {
            to[p % 2 * lanes + p / 2] = x;
        }
    }
}

impl Dots<'_> {
    /// # Safety
    /// All elements named by the strides and sizes are in bounds, those of `y` are not referenced elsewhere. For bf16
    /// every row of `x` has `k` rounded up to a multiple of `2 · lanes` elements.
    pub(crate) unsafe fn run(self) {
        pulp::Arch::new().dispatch(self);
    }

    #[inline(always)]
    unsafe fn tile_f32<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        w: *const f32,
        i: usize,
        j: usize,
    ) {
        let lanes = S::F32_LANES;
        let mut acc = [[simd.splat_f32s(0.0); N]; M];
        let mut p = 0;
        let x = self.x.wrapping_add(i * self.x_stride);
        let w = w.wrapping_add(j * self.k);
        while p < self.k {
            let width = lanes.min(self.k - p);
            let mut w_vec = [simd.splat_f32s(0.0); N];
            for c in 0..N {
                // SAFETY: row j + c < n, columns p..p + width of `w`.
                w_vec[c] = unsafe { load_ptr(simd, w.wrapping_add(c * self.k + p), width) };
            }
            for r in 0..M {
                // SAFETY: row i + r < m, columns p..p + width of `x`.
                let x = unsafe { load_ptr(simd, x.wrapping_add(r * self.x_stride + p), width) };
                for c in 0..N {
                    acc[r][c] = simd.mul_add_e_f32s(x, w_vec[c], acc[r][c]);
                }
            }
            p += lanes;
        }
        // SAFETY: rows i.. and columns j.. are inside y.
        unsafe { self.finish(simd, acc, i, j) };
    }

    #[inline(always)]
    unsafe fn tile_bf16<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        w: *const bf16,
        i: usize,
        j: usize,
    ) {
        let lanes = S::F32_LANES;
        let high = simd.splat_u32s(0xffff_0000);
        let sixteen = simd.splat_u32s(16);
        let mut acc = [[simd.splat_f32s(0.0); N]; M];
        let x = self.x.wrapping_add(i * self.x_stride);
        let w = w.wrapping_add(j * self.k);
        let mut p = 0;
        while p < self.k {
            let width = (2 * lanes).min(self.k - p);
            let mut pairs = [sixteen; N];
            for c in 0..N {
                let source = w.wrapping_add(c * self.k + p);
                // SAFETY: row j + c < n, columns p..p + width of `w`; the copy is at most 2·16 elements long.
                pairs[c] = unsafe {
                    if width == 2 * lanes {
                        source.cast::<S::u32s>().read_unaligned()
                    } else {
                        let mut tail = [bf16::ZERO; 32];
                        source.copy_to_nonoverlapping(tail.as_mut_ptr(), width);
                        tail.as_ptr().cast::<S::u32s>().read_unaligned()
                    }
                };
            }
            let mut even = [simd.splat_f32s(0.0); N];
            for c in 0..N {
                even[c] = simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(pairs[c], sixteen));
            }
            for r in 0..M {
                // SAFETY: rows of `x` are padded to whole blocks.
                let x = unsafe { load_ptr(simd, x.wrapping_add(r * self.x_stride + p), lanes) };
                for c in 0..N {
                    acc[r][c] = simd.mul_add_e_f32s(x, even[c], acc[r][c]);
                }
            }
            for c in 0..N {
                even[c] = simd.transmute_f32s_u32s(simd.and_u32s(pairs[c], high));
            }
            for r in 0..M {
                // SAFETY: as above.
                let x = unsafe { load_ptr(simd, x.wrapping_add(r * self.x_stride + p + lanes), lanes) };
                for c in 0..N {
                    acc[r][c] = simd.mul_add_e_f32s(x, even[c], acc[r][c]);
                }
            }
            p += 2 * lanes;
        }
        // SAFETY: rows i.. and columns j.. are inside y.
        unsafe { self.finish(simd, acc, i, j) };
    }

    #[inline(always)]
    unsafe fn finish<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        acc: [[S::f32s; N]; M],
        i: usize,
        j: usize,
    ) {
        for r in 0..M {
            for c in 0..N {
                let dot = simd.reduce_sum_f32s(acc[r][c]);
                let bias = self.bias.map_or(0.0, |bias| bias[j + c]);
                // SAFETY: by the caller.
                unsafe { *self.y.wrapping_add((i + r) * self.y_stride + j + c) = dot + bias };
            }
        }
    }

    #[inline(always)]
    unsafe fn column_f32<S: Simd, const N: usize>(&self, simd: S, w: *const f32, j: usize) {
        let mut i = 0;
        // SAFETY: the tiles lie inside m rows; columns by the caller.
        unsafe {
            while i + 4 <= self.m {
                self.tile_f32::<S, 4, N>(simd, w, i, j);
                i += 4;
            }
            if i + 2 <= self.m {
                self.tile_f32::<S, 2, N>(simd, w, i, j);
                i += 2;
            }
            if i < self.m {
                self.tile_f32::<S, 1, N>(simd, w, i, j);
            }
        }
    }

    #[inline(always)]
    unsafe fn column_bf16<S: Simd, const N: usize>(&self, simd: S, w: *const bf16, j: usize) {
        let mut i = 0;
        // SAFETY: as in `column_f32`.
        unsafe {
            while i + 4 <= self.m {
                self.tile_bf16::<S, 4, N>(simd, w, i, j);
                i += 4;
            }
            if i + 2 <= self.m {
                self.tile_bf16::<S, 2, N>(simd, w, i, j);
                i += 2;
            }
            if i < self.m {
                self.tile_bf16::<S, 1, N>(simd, w, i, j);
            }
        }
    }
}

impl WithSimd for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut j = 0;
        // SAFETY: the tiles partition the n columns; the rest is the contract of `run`.
        unsafe {
            match self.w {
                // 4 × 3 accumulators, three weights and one input fill the 16 registers of AVX2; widening needs two more.
                WeightPtr::F32(w) => {
                    while j + 3 <= self.n {
                        self.column_f32::<S, 3>(simd, w, j);
                        j += 3;
                    }
                    while j < self.n {
                        self.column_f32::<S, 1>(simd, w, j);
                        j += 1;
                    }
                }
                WeightPtr::Bf16(w) => {
                    while j + 2 <= self.n {
                        self.column_bf16::<S, 2>(simd, w, j);
                        j += 2;
                    }
                    if j < self.n {
                        self.column_bf16::<S, 1>(simd, w, j);
                    }
                }
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
                    // Multiples of 1/128 with few bits: exact in f32.
                    let dot: f32 = (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum();
                    assert_eq!(c[i * n + j], 1.0 + dot, "{m}x{k}x{n} at {i},{j}");
                }
            }
            assert_eq!(c, c_t);
        }
    }
}
