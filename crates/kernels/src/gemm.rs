//! The blocked matrix product for many rows on CPUs without matrix tiles. Linear layers, their gradients and the output head use
//! it.
//!
//! A task computes a strip of output columns. For each block of the inner dimension, it packs its part of the right operand into
//! panels of two vectors (widening bf16). It then multiplies all rows by these panels, in register tiles of `6 × 2` vectors (`12
//! × 2` with the 32 registers of AVX-512). Every element of the right operand is therefore packed once per call, into
//! thread-local scratch that stays in the second-level cache, and tasks never wait for each other.
//!
//! An output element is the sum of its blocks of the inner dimension, added in order. Each block is a chain of multiply-adds in
//! order. The blocks depend on the inner size alone. The bits of an element therefore do not depend on the number of threads, on
//! its position in the output or on other elements of the call.

use std::ops::Range;

use half::bf16;
use pulp::WithSimd;

use crate::Stored;
use crate::simd::{self, Simd, Wide, load, load_ptr, prefetch, store_ptr, transpose};
use crate::workspace::{LINE, Line, reserve};

/// Length of the longest block of the inner dimension. With this length, a panel (32 KiB with AVX2) streams from the second-level
/// cache, and outputs are rarely read again.
pub(crate) const DEPTH: usize = 512;
/// Elements of the inner dimension that a loop iteration processes.
pub(crate) const STEP: usize = 8;
/// Number of rows that are multiplied by a panel before the next panel. The elements of these rows in a block stay in the
/// second-level cache.
const ROWS: usize = 96;

/// Divides the inner dimension into blocks of nearly equal length, made of complete steps and about `depth` elements long. The
/// blocks depend on `k` alone.
pub(crate) fn blocks(k: usize, step: usize, depth: usize) -> impl Iterator<Item = Range<usize>> {
    let step = k.div_ceil(k.div_ceil(depth).max(1)).next_multiple_of(step);
    (0..k).step_by(step.max(1)).map(move |start| start..k.min(start + step))
}

/// Number of rows of the largest register tile.
const MAX_ROWS: usize = 12;

/// Returns the number of rows of a register tile.
const fn tile_rows<S: Simd>() -> usize {
    if S::F32_LANES >= 16 { 12 } else { 6 }
}

/// Number of columns of a panel with the widest vectors.
const MAX_PANEL: usize = 32;

/// Returns the number of columns of a panel.
const fn panel<S: Simd>() -> usize {
    2 * S::F32_LANES
}

/// Returns the number of rows of a register tile and of columns of a panel, for the instruction set in use.
pub(crate) fn tile_shape() -> (usize, usize) {
    struct Shape;
    impl WithSimd for Shape {
        type Output = (usize, usize);
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> (usize, usize) {
            (tile_rows::<S>(), panel::<S>())
        }
    }
    simd::arch().dispatch(Shape)
}

/// A `depth × width` block of a right operand that is packed into panels.
///
/// Panel `j` holds the columns from `j · panel` on, row by row, padded with zeros beyond `width`.
#[derive(Clone, Copy)]
pub(crate) struct Pack<'a> {
    /// The elements of the matrix, starting at the first element of the block. They are not quantised.
    pub from: Stored<'a>,
    /// Distance between adjacent elements of the inner dimension.
    pub inner: usize,
    /// Distance between adjacent columns. Either `column` or `inner` is 1.
    pub column: usize,
    pub depth: usize,
    pub width: usize,
}

impl Pack<'_> {
    pub(crate) fn run(self, scratch: &mut Vec<Line>) -> *const f32 {
        // Reserve complete panels, whatever their width.
        let to = reserve(scratch, self.depth * self.width.next_multiple_of(MAX_PANEL)).as_mut_ptr();
        simd::arch().dispatch(Packing { pack: self, to });
        to
    }
}

/// A [`Pack`] and its destination, which has room for `depth` times `width` elements, with `width` rounded up to complete panels.
struct Packing<'a> {
    pack: Pack<'a>,
    to: *mut f32,
}

impl Packing<'_> {
    #[inline(always)]
    fn pack<S: Simd, T: Wide>(&self, from: &[T]) {
        let Pack { column, depth, width: columns, .. } = self.pack;
        let width = panel::<S>();
        if depth == 0 {
            return;
        }
        if column == 1 {
            return self.copy::<S, T>(from);
        }
        for j in (0..columns).step_by(width) {
            let columns = width.min(columns - j);
            let from = &from[j * column..][..(columns - 1) * column + depth];
            // SAFETY: panel `j / width` is inside `to`, and the columns of `depth` elements are inside `from`.
            unsafe {
                let to = self.to.add(j * depth);
                if columns < width {
                    to.write_bytes(0, depth * width);
                }
                transpose(to, width, from.as_ptr(), column, columns, depth);
            }
        }
    }

    /// Copies the rows in memory order: a row is copied to all panels before the next row is read.
    #[inline(always)]
    fn copy<S: Simd, T: Wide>(&self, from: &[T]) {
        /// Number of rows by which prefetching runs ahead.
        const AHEAD: usize = 8;
        let Pack { inner, depth, width: columns, .. } = self.pack;
        let width = panel::<S>();
        let whole = columns / width * width;
        for p in 0..depth {
            let row = &from[p * inner..][..columns];
            let ahead = row.as_ptr().wrapping_add(AHEAD * inner);
            for j in (0..whole).step_by(width) {
                for line in (0..width).step_by(LINE) {
                    prefetch(ahead.wrapping_add(j + line));
                }
                // A slice of fixed length lets the compiler copy two vectors.
                let from = &row[j..j + width];
                // SAFETY: row p of panel j / width is inside `to`.
                let to = unsafe { std::slice::from_raw_parts_mut(self.to.add(j * depth + p * width), width) };
                for c in 0..width {
                    to[c] = from[c].wide();
                }
            }
            if whole < columns {
                // SAFETY: as above.
                let to =
                    unsafe { std::slice::from_raw_parts_mut(self.to.add(whole * depth + p * width), width) };
                to.fill(0.0);
                to.iter_mut().zip(&row[whole..]).for_each(|(to, x)| *to = x.wide());
            }
        }
    }
}

impl WithSimd for Packing<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        match self.pack.from {
            Stored::F32(from) => self.pack::<S, f32>(from),
            Stored::Bf16(from) => self.pack::<S, bf16>(from),
            // The caller has already widened quantised weights.
            Stored::Quantised(_) => {}
        }
    }
}

/// Packs a left operand whose rows are adjacent in memory, `from[p · inner + i]`, into groups of a tile's rows.
///
/// Row `i` of group `g` at depth `p` is written to `to[(g · depth + p) · tile_rows + i]`. Rows beyond `rows` are zeros.
pub(crate) struct PackLeft<'a> {
    pub to: *mut f32,
    pub from: &'a [f32],
    pub inner: usize,
    pub depth: usize,
    pub rows: usize,
}

impl PackLeft<'_> {
    /// Packs the operand.
    ///
    /// # Safety
    /// `to` must be writable for complete groups, and nothing else may refer to it.
    pub(crate) unsafe fn run(self) {
        simd::arch().dispatch(self);
    }
}

impl WithSimd for PackLeft<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        /// Number of rows that stay in the first-level cache while one group after the other copies its elements of them.
        const NEAR: usize = 32;
        let (side, lanes) = (tile_rows::<S>(), S::F32_LANES);
        for start in (0..self.depth).step_by(NEAR) {
            let end = self.depth.min(start + NEAR);
            for first in (0..self.rows).step_by(side) {
                let width = side.min(self.rows - first);
                for p in start..end {
                    let from = &self.from[p * self.inner + first..];
                    if first % LINE < side {
                        prefetch(from.as_ptr().wrapping_add(NEAR * self.inner));
                    }
                    let at = first * self.depth + p * side;
                    // SAFETY: group and depth are inside `to`, as the contract of `run` requires. A vector wider than the group
                    // ends before the last row of the group does, and that row overwrites the excess.
                    unsafe {
                        let to = self.to.add(at);
                        if width == side && lanes >= side && p + 1 < self.depth && from.len() >= lanes {
                            store_ptr(simd, to, lanes, load_ptr(simd, from.as_ptr(), lanes));
                            continue;
                        }
                        let to = std::slice::from_raw_parts_mut(to, side);
                        to[..width].copy_from_slice(&from[..width]);
                        to[width..].fill(0.0);
                    }
                }
            }
        }
    }
}

/// The left operand of a [`Multiply`].
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// Rows in place: element `(i, p)` is `data[i · stride + p]`.
    Rows { data: *const f32, stride: usize },
    /// Rows packed by [`PackLeft`].
    Packed(*const f32),
}

/// A product that runs on the calling thread: `c [m, n] = left [m, depth] · panels [depth, n]`.
///
/// If `old`, the previous `c` is added. `bias [n]` is added if it is given.
pub(crate) struct Multiply<'a> {
    pub c: *mut f32,
    pub ldc: usize,
    pub left: Left,
    /// Panels packed by [`Pack`].
    pub panels: *const f32,
    pub m: usize,
    pub depth: usize,
    pub n: usize,
    pub old: bool,
    pub bias: Option<&'a [f32]>,
}

/// Adds one step of the inner dimension: multiplies `M` values of the left operand, which are `row` elements apart, by one row of
/// a panel.
///
/// # Safety
/// All of these elements must be readable.
#[inline(always)]
unsafe fn step<S: Simd, const M: usize>(
    simd: S,
    acc: &mut [[S::f32s; 2]; M],
    a: *const f32,
    row: usize,
    b: *const f32,
) {
    // SAFETY: guaranteed by this function's contract.
    let b = unsafe {
        [
            b.cast::<S::f32s>().read_unaligned(),
            b.wrapping_add(S::F32_LANES).cast::<S::f32s>().read_unaligned(),
        ]
    };
    for r in 0..M {
        // SAFETY: guaranteed by this function's contract.
        let x = simd.splat_f32s(unsafe { *a.wrapping_add(r * row) });
        for v in 0..2 {
            acc[r][v] = simd.mul_add_e_f32s(x, b[v], acc[r][v]);
        }
    }
}

impl Multiply<'_> {
    /// Runs the product.
    ///
    /// # Safety
    /// All elements that sizes and strides address must be in bounds, and nothing else may refer to `c`.
    pub(crate) unsafe fn run(self) {
        simd::arch().dispatch(self);
    }

    /// Computes the tile of `M` rows that begins at row `i` and at the panel of column `j`. It is one function, because all steps
    /// use the accumulators, which stay in registers.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const PACKED: bool>(
        &self,
        simd: S,
        data: *const f32,
        stride: usize,
        i: usize,
        j: usize,
    ) {
        let lanes = S::F32_LANES;
        let width = panel::<S>();
        let side = tile_rows::<S>();
        let (mut a, row, step_a) = if PACKED {
            (data.wrapping_add(i / side * side * self.depth + i % side), 1, side)
        } else {
            (data.wrapping_add(i * stride), stride, 1)
        };
        let mut b = self.panels.wrapping_add(j * self.depth);
        let mut acc = [[simd.splat_f32s(0.0); 2]; M];
        if self.old {
            // Prefetch the output, which comes from a more distant cache than the operands.
            for r in 0..M {
                prefetch(self.c.wrapping_add((i + r) * self.ldc + j));
            }
        }
        // SAFETY: the loop reads `depth` steps of the tile's rows and of the panel, which are in bounds by the contract of `run`.
        unsafe {
            for _ in 0..self.depth / 4 {
                // The loop is unrolled by hand: the compiler would unroll it too late to keep the accumulators in registers.
                step::<S, M>(simd, &mut acc, a, row, b);
                step::<S, M>(simd, &mut acc, a.wrapping_add(step_a), row, b.wrapping_add(width));
                step::<S, M>(simd, &mut acc, a.wrapping_add(2 * step_a), row, b.wrapping_add(2 * width));
                step::<S, M>(simd, &mut acc, a.wrapping_add(3 * step_a), row, b.wrapping_add(3 * width));
                a = a.wrapping_add(4 * step_a);
                b = b.wrapping_add(4 * width);
            }
            for _ in 0..self.depth % 4 {
                step::<S, M>(simd, &mut acc, a, row, b);
                a = a.wrapping_add(step_a);
                b = b.wrapping_add(width);
            }
        }
        let columns = self.n - j;
        let c = self.c.wrapping_add(i * self.ldc + j);
        // Only short loops of fixed length may touch the accumulators. Otherwise the compiler would keep them in memory.
        if columns < width {
            let mut rest = [0.0f32; 2 * MAX_ROWS * 16];
            for r in 0..M {
                for v in 0..2 {
                    // SAFETY: `M` rows of a panel's width are in bounds.
                    unsafe {
                        store_ptr(simd, rest.as_mut_ptr().add(r * width + v * lanes), lanes, acc[r][v])
                    };
                }
            }
            for r in 0..M {
                for q in 0..columns {
                    let sum = rest[r * width + q] + self.bias.map_or(0.0, |bias| bias[j + q]);
                    // SAFETY: row i + r < m, column j + q < n.
                    unsafe {
                        let c = c.wrapping_add(r * self.ldc + q);
                        *c = if self.old { *c + sum } else { sum };
                    }
                }
            }
            return;
        }
        if let Some(bias) = self.bias {
            let bias = &bias[j..j + width];
            let bias = [load(simd, &bias[..lanes], 0), load(simd, &bias[lanes..], 0)];
            for r in 0..M {
                for v in 0..2 {
                    acc[r][v] = simd.add_f32s(acc[r][v], bias[v]);
                }
            }
        }
        if self.old {
            for r in 0..M {
                for v in 0..2 {
                    let c = c.wrapping_add(r * self.ldc + v * lanes);
                    // SAFETY: row i + r < m, and the vectors are complete and end before column n.
                    acc[r][v] = simd.add_f32s(acc[r][v], unsafe { load_ptr(simd, c, lanes) });
                }
            }
        }
        for r in 0..M {
            for v in 0..2 {
                // SAFETY: as above.
                unsafe { store_ptr(simd, c.wrapping_add(r * self.ldc + v * lanes), lanes, acc[r][v]) };
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Simd, const M: usize, const PACKED: bool>(
        &self,
        simd: S,
        data: *const f32,
        stride: usize,
    ) {
        for first in (0..self.m).step_by(ROWS) {
            let end = self.m.min(first + ROWS);
            for j in (0..self.n).step_by(panel::<S>()) {
                let mut i = first;
                // SAFETY: every tile is inside the m rows, and the caller ensures that the columns are in bounds.
                unsafe {
                    while i + M <= end {
                        self.tile::<S, M, PACKED>(simd, data, stride, i, j);
                        i += M;
                    }
                    if M > 8 && i + 8 <= end {
                        self.tile::<S, 8, PACKED>(simd, data, stride, i, j);
                        i += 8;
                    }
                    if i + 4 <= end {
                        self.tile::<S, 4, PACKED>(simd, data, stride, i, j);
                        i += 4;
                    }
                    if i + 2 <= end {
                        self.tile::<S, 2, PACKED>(simd, data, stride, i, j);
                        i += 2;
                    }
                    if i < end {
                        self.tile::<S, 1, PACKED>(simd, data, stride, i, j);
                    }
                }
            }
        }
    }
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: guaranteed by the contract of `run`.
        unsafe {
            match (self.left, tile_rows::<S>()) {
                (Left::Rows { data, stride }, 12) => self.rows::<S, 12, false>(simd, data, stride),
                (Left::Rows { data, stride }, _) => self.rows::<S, 6, false>(simd, data, stride),
                (Left::Packed(data), 12) => self.rows::<S, 12, true>(simd, data, 0),
                (Left::Packed(data), _) => self.rows::<S, 6, true>(simd, data, 0),
            }
        }
    }
}
