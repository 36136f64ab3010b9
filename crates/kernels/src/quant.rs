//! Weight matrices of 8 or 4 bits a weight, for weights that are not trained.
//!
//! A row is cut into groups of [`GROUP`] weights. A group keeps its minimum `m` and a step `s` in bf16, a weight its
//! place `q` on that scale: `ŵ = q·s + m`, `q` in `0..=L` with `L` 255 or 15. `m` is rounded down and `s` up, so the scale
//! covers the group, and with `q` rounded to nearest
//!
//! `|ŵ − w| ≤ s/2 + 2⁻²⁴·|ŵ|`, `s ≤ 1.01·(max − m)/L`, `m ≥ min·(1 ± 2⁻⁷)`:
//!
//! half a step, plus the rounding of `ŵ` itself (`q·s` is exact in f32). Memory is 8.5 or 4.5 bits a weight. The scheme is
//! the affine one of Jacob et al. (arXiv 1712.05877) per group; for normal weights its 4 bits have the error of NF4
//! (Dettmers et al., arXiv 2305.14314) at the same size, and widening needs no table.
//!
//! Words of codes are laid out for vectors: a block is 16 words, and word `i` holds the elements `i`, `i + 16`,
//! `i + 32`, … of the block from its low bits up. Shifting a vector of words therefore gives neighbouring weights.

use half::bf16;

use crate::mat::{Mat, MatMut};
use crate::parallel::{Shared, ranges};
use crate::simd::{Simd, load_ptr};

/// Weights that share a minimum and a step.
pub const GROUP: usize = 64;

/// Words of a block.
const WORDS: usize = 16;

/// Bits of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantBits {
    /// 256 levels.
    Eight,
    /// 16 levels.
    Four,
}

impl QuantBits {
    /// Bits of a code.
    #[must_use]
    pub const fn bits(self) -> usize {
        match self {
            Self::Eight => 8,
            Self::Four => 4,
        }
    }

    /// The largest code.
    #[must_use]
    pub const fn levels(self) -> u32 {
        (1 << self.bits()) - 1
    }

    /// Elements of a block.
    const fn block(self) -> usize {
        WORDS * 32 / self.bits()
    }

    fn blocks(self, k: usize) -> usize {
        k.div_ceil(self.block())
    }

    fn row_words(self, k: usize) -> usize {
        self.blocks(k) * WORDS
    }

    fn row_groups(self, k: usize) -> usize {
        self.blocks(k) * self.block() / GROUP
    }

    /// Memory of a row of `k` weights, bytes.
    #[must_use]
    pub fn row_bytes(self, k: usize) -> usize {
        4 * self.row_words(k) + size_of::<Scale>() * self.row_groups(k)
    }
}

/// Minimum and step of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Scale {
    /// `m`: what code 0 stands for.
    pub min: bf16,
    /// `s`: the distance of neighbouring codes.
    pub step: bf16,
}

/// A quantised matrix `[n, k]`.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantMatrix {
    bits: QuantBits,
    n: usize,
    k: usize,
    codes: Vec<u32>,
    scales: Vec<Scale>,
}

/// Rows of a [`QuantMatrix`].
#[derive(Clone, Copy, Debug)]
pub struct QuantRows<'a> {
    bits: QuantBits,
    n: usize,
    k: usize,
    codes: &'a [u32],
    scales: &'a [Scale],
}

impl QuantMatrix {
    /// Quantises rows that `row(i, buffer of k)` fills in one at a time, so that the whole matrix never exists in f32.
    /// `None` if a group's range is not finite.
    #[must_use]
    pub fn from_rows(
        bits: QuantBits,
        n: usize,
        k: usize,
        mut row: impl FnMut(usize, &mut [f32]),
    ) -> Option<Self> {
        let (words, groups) = (bits.row_words(k), bits.row_groups(k));
        let mut this =
            Self { bits, n, k, codes: vec![0; n * words], scales: vec![Scale::default(); n * groups] };
        let mut buffer = vec![0.0; k];
        for i in 0..n {
            row(i, &mut buffer);
            let codes = &mut this.codes[i * words..(i + 1) * words];
            let scales = &mut this.scales[i * groups..(i + 1) * groups];
            if !encode(bits, &buffer, codes, scales) {
                return None;
            }
        }
        Some(this)
    }

    /// The whole matrix, for kernels.
    #[must_use]
    pub fn rows(&self) -> QuantRows<'_> {
        QuantRows { bits: self.bits, n: self.n, k: self.k, codes: &self.codes, scales: &self.scales }
    }

    /// Bits of a code.
    #[must_use]
    pub fn bits(&self) -> QuantBits {
        self.bits
    }

    /// The codes of all rows, as the module's head lays them out.
    #[must_use]
    pub fn codes(&self) -> &[u32] {
        &self.codes
    }

    /// The scales of all rows, one for each group.
    #[must_use]
    pub fn scales(&self) -> &[Scale] {
        &self.scales
    }

    /// Memory of codes and scales, bytes.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.rows().num_bytes()
    }
}

/// The largest bf16 that is not above `x`.
fn round_down(x: f32) -> bf16 {
    let cut = (x.to_bits() >> 16) as u16;
    // Cutting bits moves towards zero: up for a negative number.
    bf16::from_bits(if x < 0.0 && x.to_bits() & 0xffff != 0 { cut + 1 } else { cut })
}

/// The smallest bf16 that is not below `x ≥ 0`.
fn round_up(x: f32) -> bf16 {
    let cut = (x.to_bits() >> 16) as u16;
    bf16::from_bits(if x.to_bits() & 0xffff != 0 { cut + 1 } else { cut })
}

fn encode(bits: QuantBits, row: &[f32], codes: &mut [u32], scales: &mut [Scale]) -> bool {
    let (block, levels) = (bits.block(), bits.levels());
    for (g, group) in row.chunks(GROUP).enumerate() {
        let min = group.iter().copied().fold(f32::INFINITY, f32::min);
        let max = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let min = round_down(min);
        let step = round_up((max - min.to_f32()) / levels as f32);
        if !(min.is_finite() && step.is_finite() && max.is_finite()) {
            return false;
        }
        scales[g] = Scale { min, step };
        let (min, step) = (min.to_f64(), step.to_f64());
        for (i, &w) in group.iter().enumerate() {
            let code = if step > 0.0 { ((f64::from(w) - min) / step).round() } else { 0.0 };
            let code = (code as u32).min(levels);
            let (b, p) = ((g * GROUP + i) / block, (g * GROUP + i) % block);
            codes[b * WORDS + p % WORDS] |= code << (p / WORDS * bits.bits());
        }
    }
    true
}

impl<'a> QuantRows<'a> {
    /// Elements, `n · k`.
    #[must_use]
    pub fn len(self) -> usize {
        self.n * self.k
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Rows and columns.
    #[must_use]
    pub fn dims(self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// Memory of codes and scales, bytes.
    #[must_use]
    pub fn num_bytes(self) -> usize {
        size_of_val(self.codes) + size_of_val(self.scales)
    }

    /// Rows `start..end`.
    #[must_use]
    pub fn rows(self, start: usize, end: usize) -> Self {
        let (words, groups) = (self.bits.row_words(self.k), self.bits.row_groups(self.k));
        Self {
            n: end - start,
            codes: &self.codes[start * words..end * words],
            scales: &self.scales[start * groups..end * groups],
            ..self
        }
    }

    /// The scale of each group of a row; the last ones may stand for padding.
    #[must_use]
    pub fn row_scales(self, row: usize) -> &'a [Scale] {
        let groups = self.bits.row_groups(self.k);
        &self.scales[row * groups..(row + 1) * groups]
    }

    /// Writes all rows as f32 to `out [n, k]`. For tiles: a product with a whole weight goes through bounded pieces.
    pub fn widen(self, out: &mut [f32]) {
        let out = Shared::new(&mut out[..self.len()]);
        ranges(self.n, 1, self.len() / 4, |rows| {
            // SAFETY: the row ranges are disjoint.
            let part = unsafe { out.part(rows.start * self.k, rows.len() * self.k) };
            widen_rows(part, self.rows(rows.start, rows.end));
        });
    }
}

simd_fn! {
    /// Every row of `w` as f32; the loop over a block is compiled for the instruction set and vectorised.
    fn widen_rows<'a>(simd: S, out: &'a mut [f32], w: QuantRows<'a>) -> () {
        let _ = simd;
        match w.bits {
            QuantBits::Eight => widen_blocks::<8>(out, w),
            QuantBits::Four => widen_blocks::<4>(out, w),
        }
    }
}

#[inline(always)]
fn widen_blocks<const BITS: usize>(out: &mut [f32], w: QuantRows) {
    let (block, words, groups) = (w.bits.block(), w.bits.row_words(w.k), w.bits.row_groups(w.k));
    let mask = (1u32 << BITS) - 1;
    for row in 0..w.n {
        let out = &mut out[row * w.k..(row + 1) * w.k];
        let codes = &w.codes[row * words..(row + 1) * words];
        let scales = &w.scales[row * groups..(row + 1) * groups];
        for (at, codes) in codes.chunks_exact(WORDS).enumerate() {
            let mut wide = [0.0f32; 128];
            for b in 0..32 / BITS {
                let scale = scales[(at * block + b * WORDS) / GROUP];
                let (min, step) = (scale.min.to_f32(), scale.step.to_f32());
                for i in 0..WORDS {
                    // q · s is exact, so this has the bits of a fused multiply-add.
                    wide[b * WORDS + i] = ((codes[i] >> (b * BITS)) & mask) as f32 * step + min;
                }
            }
            let len = block.min(w.k - at * block);
            out[at * block..at * block + len].copy_from_slice(&wide[..len]);
        }
    }
}

/// `y = x Wᵀ + b` with batch-invariant bits; promise as of [`crate::linear::forward_rows_into`].
pub(crate) fn forward_rows(x: Mat, w: QuantRows, bias: Option<&[f32]>, y: MatMut) {
    let ((m, k), n) = (x.dims(), w.n);
    let whole = w.bits.blocks(k) * w.bits.block();
    let padded;
    // Codes go in whole blocks; beyond k they meet zeros.
    let x = if whole == k {
        x
    } else {
        let mut to = vec![0.0; m * whole];
        for i in 0..m {
            to[i * whole..i * whole + k].copy_from_slice(x.row(i));
        }
        padded = to;
        Mat::new(&padded, m, whole)
    };
    ranges(n, 2, m * n * k / 4, |cols| {
        let (w, bias) = (w.rows(cols.start, cols.end), bias.map(|bias| &bias[cols.clone()]));
        dots(Dots { y: y.data.ptr(cols.start), y_stride: y.stride, x, w, bias });
    });
}

simd_fn! {
    fn dots<'a>(simd: S, dots: Dots<'a>) -> () {
        match dots.w.bits {
            QuantBits::Eight => dots.columns::<S, 8>(simd),
            QuantBits::Four => dots.columns::<S, 4>(simd),
        }
    }
}

/// `y [m, n] = x · wᵀ + bias` for rows of `x` padded to whole blocks.
struct Dots<'a> {
    y: *mut f32,
    y_stride: usize,
    x: Mat<'a>,
    w: QuantRows<'a>,
    bias: Option<&'a [f32]>,
}

impl Dots<'_> {
    #[inline(always)]
    fn columns<S: Simd, const BITS: usize>(&self, simd: S) {
        let mut j = 0;
        while j + 2 <= self.w.n {
            self.rows::<S, BITS, 2>(simd, j);
            j += 2;
        }
        if j < self.w.n {
            self.rows::<S, BITS, 1>(simd, j);
        }
    }

    #[inline(always)]
    fn rows<S: Simd, const BITS: usize, const N: usize>(&self, simd: S, j: usize) {
        let (m, mut i) = (self.x.rows, 0);
        while i + 4 <= m {
            self.tile::<S, BITS, 4, N>(simd, i, j);
            i += 4;
        }
        if i + 2 <= m {
            self.tile::<S, BITS, 2, N>(simd, i, j);
            i += 2;
        }
        if i < m {
            self.tile::<S, BITS, 1, N>(simd, i, j);
        }
    }

    /// One accumulator per element, filled in the order block, vector of words, code: fixed by `k`.
    #[inline(always)]
    fn tile<S: Simd, const BITS: usize, const M: usize, const N: usize>(&self, simd: S, i: usize, j: usize) {
        const { assert!(32 % BITS == 0) };
        let lanes = S::F32_LANES;
        let block = self.w.bits.block();
        let (row_words, row_groups) = (self.w.bits.row_words(self.w.k), self.w.bits.row_groups(self.w.k));
        let mask = simd.splat_u32s((1 << BITS) - 1);
        // 2²³ + q has q in its low bits.
        let (magic, offset) = (simd.splat_u32s(0x4b00_0000), simd.splat_f32s(8_388_608.0));
        let mut acc = [[simd.splat_f32s(0.0); N]; M];
        for at in 0..self.w.bits.blocks(self.w.k) {
            for v in (0..WORDS).step_by(lanes) {
                let mut words = [mask; N];
                for c in 0..N {
                    let first = (j + c) * row_words + at * WORDS + v;
                    let part = &self.w.codes[first..first + lanes];
                    // SAFETY: `part` has as many words as a vector has lanes.
                    words[c] = unsafe { part.as_ptr().cast::<S::u32s>().read_unaligned() };
                }
                for b in 0..32 / BITS {
                    let shift = simd.splat_u32s((b * BITS) as u32);
                    let mut wide = [offset; N];
                    for c in 0..N {
                        let scale = self.w.scales[(j + c) * row_groups + (at * block + b * WORDS) / GROUP];
                        let (min, step) = (scale.min.to_f32(), scale.step.to_f32());
                        let code = simd.and_u32s(simd.wrapping_dyn_shr_u32s(words[c], shift), mask);
                        let code = simd.transmute_f32s_u32s(simd.or_u32s(code, magic));
                        let code = simd.sub_f32s(code, offset);
                        wide[c] = simd.mul_add_e_f32s(code, simd.splat_f32s(step), simd.splat_f32s(min));
                    }
                    for r in 0..M {
                        let x = self.x.part(i + r, at * block + b * WORDS + v, lanes);
                        // SAFETY: `x` has as many elements as a vector has lanes.
                        let x = unsafe { load_ptr(simd, x.as_ptr(), lanes) };
                        for c in 0..N {
                            acc[r][c] = simd.mul_add_e_f32s(x, wide[c], acc[r][c]);
                        }
                    }
                }
            }
        }
        for r in 0..M {
            for c in 0..N {
                let bias = self.bias.map_or(0.0, |bias| bias[j + c]);
                let dot = simd.reduce_sum_f32s(acc[r][c]) + bias;
                // SAFETY: rows i.. and columns j.. are inside y, which the caller of `forward_rows` checked.
                unsafe { *self.y.wrapping_add((i + r) * self.y_stride + j + c) = dot };
            }
        }
    }
}
