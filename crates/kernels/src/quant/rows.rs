//! Products of few rows with weights of few bits: decoding.
//!
//! Of a group of weights with minimum `m` and step `s`, and of its inputs, the product is `s·Σ q x + m·Σ x`. So codes are multiplied as
//! they are, and scales once a group.
//!
//! Vectors of `f32` widen codes and round nothing. Where the CPU multiplies bytes (AVX512-VNNI), four times as fast, inputs are rounded
//! to 8 bits a group: `x ≈ a·z`, `a = max|x|/127`, `z` a whole number. With `c` the middle code, and with the sum of the
//! inputs as they are,
//!
//! `s·Σ q x ≈ s·(a·Σ q z + c·(Σ x − a·Σ z))`,
//!
//! which is off by `s·Σ (q − c)(x − a z)`, at most `s·L/2·Σ a/2`: rounding meets what weights are beside the middle of their range, not
//! beside its end. `Σ q z` is exact.

use crate::mat::{Mat, MatMut, check};
use crate::parallel::ranges;
use crate::simd::{Simd, store_ptr};

use super::{GROUP, LANE, Line, PANEL, QuantBits, QuantRows};

/// `y [m, Σ n] = x [m, k] Wᵀ + b` of layers whose weights have the same number of bits, or that added to `y`; bits of a row depend on
/// it, its weights and `k` alone.
pub(crate) fn forward_rows(x: Mat, layers: &[(QuantRows, Option<&[f32]>)], accumulate: bool, y: MatMut) {
    let ((m, k), n) = (x.dims(), y.cols);
    let Some((first, _)) = layers.first() else { return };
    let bits = first.bits;
    let alike = layers.iter().all(|(w, _)| w.bits == bits && w.k == k);
    let columns: usize = layers.iter().map(|(w, _)| w.n).sum();
    check("linear, weights of few bits", alike && y.dims() == (m, columns));
    let inputs = Inputs::new(x, bits);
    let of = |w: &QuantRows| (w.first + w.n).div_ceil(PANEL);
    let panels = layers.iter().map(|(w, _)| of(w)).sum();
    ranges(panels, 1, m * n * k / 8, |panels| {
        // The first panel of a layer and its first column.
        let (mut before, mut column) = (0, 0);
        for &(w, bias) in layers {
            let own = panels.start.max(before)..panels.end.min(before + of(&w));
            for panel in own.start - before..own.end.max(own.start) - before {
                let lines = &w.lines[panel * w.panel_lines()..][..w.panel_lines()];
                // The first column of the panel, which may stand before the first of the weight.
                let (first, skip) = (panel * PANEL, w.first);
                inputs.multiply(
                    lines,
                    bits,
                    &Columns { y: &y, bias, column, first, skip, n: w.n, accumulate },
                );
            }
            (before, column) = (before + of(&w), column + w.n);
        }
    });
}

/// Rows of inputs as a kernel reads them.
enum Inputs {
    Wide(Sums),
    #[cfg(target_arch = "x86_64")]
    Bytes(bytes::Inputs),
}

/// Inputs `[m, groups · GROUP]`, zero beyond `k`, and the sums of their groups.
struct Sums {
    x: Vec<f32>,
    sums: Vec<f32>,
    m: usize,
    groups: usize,
}

impl Inputs {
    fn new(x: Mat, bits: QuantBits) -> Self {
        #[cfg(target_arch = "x86_64")]
        if bytes::available() {
            return Self::Bytes(bytes::Inputs::new(x, bits));
        }
        let _ = bits;
        let ((m, k), groups) = (x.dims(), x.cols.div_ceil(GROUP));
        let mut padded = vec![0.0; m * groups * GROUP];
        for (i, to) in padded.chunks_exact_mut((groups * GROUP).max(1)).enumerate() {
            to[..k].copy_from_slice(x.row(i));
        }
        let sums = padded.as_chunks::<GROUP>().0.iter().map(sum).collect();
        Self::Wide(Sums { x: padded, sums, m, groups })
    }

    /// The columns of a panel.
    fn multiply(&self, lines: &[Line], bits: QuantBits, to: &Columns) {
        match self {
            Self::Wide(inputs) => wide(inputs, lines, bits, to),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: made where the instructions exist.
            Self::Bytes(inputs) => unsafe { inputs.multiply(lines, bits, to) },
        }
    }
}

/// `Σ x` in a fixed order.
#[inline(always)]
fn sum(x: &[f32; GROUP]) -> f32 {
    let mut sums = [0.0f32; PANEL];
    for x in x.as_chunks::<PANEL>().0 {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
    }
    sums.iter().sum()
}

/// Where the sums of a panel go.
struct Columns<'a> {
    y: &'a MatMut<'a>,
    bias: Option<&'a [f32]>,
    /// Column of `y` that is the layer's first.
    column: usize,
    /// Row of the panels that is the first of this one, and the one that is column 0 of the layer.
    first: usize,
    skip: usize,
    n: usize,
    accumulate: bool,
}

impl Columns<'_> {
    /// Row `i` of columns from lane `lane` of the panel on.
    #[inline(always)]
    fn store(&self, i: usize, lane: usize, sums: &[f32]) {
        let row = self.first + lane;
        // Lanes that are columns of the layer.
        let start = self.skip.saturating_sub(row).min(sums.len());
        let end = (self.skip + self.n).saturating_sub(row).min(sums.len());
        if start == 0 && end == sums.len() {
            self.write(i, row - self.skip, sums);
        } else if start < end {
            self.write(i, row + start - self.skip, &sums[start..end]);
        }
    }

    /// Row `i`, columns from `j` on.
    #[inline(always)]
    fn write(&self, i: usize, j: usize, sums: &[f32]) {
        let y = self.y.data.ptr(i * self.y.stride + self.column + j);
        let bias = self.bias.map(|bias| &bias[j..j + sums.len()]);
        for (at, sum) in sums.iter().enumerate() {
            let sum = sum + bias.map_or(0.0, |bias| bias[at]);
            // SAFETY: row i and columns j.. < n of the layer in y; a panel is one task's.
            unsafe {
                let y = y.wrapping_add(at);
                y.write(if self.accumulate { *y + sum } else { sum });
            }
        }
    }
}

/// A vector of a line, from word `first` on.
#[inline(always)]
fn load<S: Simd>(line: &Line, first: usize) -> S::u32s {
    let words = &line.0[first..first + S::F32_LANES];
    // SAFETY: as many words as a vector has lanes.
    unsafe { words.as_ptr().cast::<S::u32s>().read_unaligned() }
}

simd_fn! {
    fn wide<'a>(simd: S, inputs: &'a Sums, lines: &'a [Line], bits: QuantBits, to: &'a Columns<'a>) -> () {
        let mut i = 0;
        while i < inputs.m {
            let rows = inputs.m - i;
            macro_rules! tile {
                ($rows:literal) => {{
                    match bits {
                        QuantBits::Eight => inputs.tile::<S, 8, $rows>(simd, lines, i, to),
                        QuantBits::Four => inputs.tile::<S, 4, $rows>(simd, lines, i, to),
                    }
                    i += $rows;
                }};
            }
            match rows {
                4.. => tile!(4),
                2.. => tile!(2),
                _ => tile!(1),
            }
        }
    }
}

impl Sums {
    /// `R` rows from `i` on. Sums are made in the order of groups and of elements.
    #[inline(always)]
    fn tile<S: Simd, const BITS: usize, const R: usize>(
        &self,
        simd: S,
        lines: &[Line],
        i: usize,
        to: &Columns,
    ) {
        let (lanes, words) = (S::F32_LANES, GROUP * BITS / 32);
        let mask = simd.splat_u32s((1 << BITS) - 1);
        // 2²³ + q has q in its low bits.
        let (magic, offset) = (simd.splat_u32s(0x4b00_0000), simd.splat_f32s(8_388_608.0));
        for first in (0..PANEL).step_by(lanes) {
            let mut acc = [simd.splat_f32s(0.0); R];
            for g in 0..self.groups {
                let lines = &lines[g * (1 + words)..][..1 + words];
                let mut dots = [simd.splat_f32s(0.0); R];
                for part in 0..8 / BITS {
                    for t in 0..words {
                        let word = load::<S>(&lines[1 + t], first);
                        for b in 0..LANE {
                            let shift = simd.splat_u32s((8 * b + BITS * part) as u32);
                            let code = simd.and_u32s(simd.wrapping_dyn_shr_u32s(word, shift), mask);
                            let code = simd.transmute_f32s_u32s(simd.or_u32s(code, magic));
                            let code = simd.sub_f32s(code, offset);
                            for r in 0..R {
                                let at = ((i + r) * self.groups + g) * GROUP;
                                let x = self.x[at + (part * words + t) * LANE + b];
                                dots[r] = simd.mul_add_e_f32s(simd.splat_f32s(x), code, dots[r]);
                            }
                        }
                    }
                }
                let scale = load::<S>(&lines[0], first);
                let min = simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(scale, simd.splat_u32s(16)));
                let step = simd.transmute_f32s_u32s(simd.and_u32s(scale, simd.splat_u32s(0xffff_0000)));
                for r in 0..R {
                    acc[r] = simd.mul_add_e_f32s(dots[r], step, acc[r]);
                    let sum = simd.splat_f32s(self.sums[(i + r) * self.groups + g]);
                    acc[r] = simd.mul_add_e_f32s(sum, min, acc[r]);
                }
            }
            let mut out = [[0.0; PANEL]; R];
            for r in 0..R {
                // SAFETY: a panel has room for a vector.
                unsafe { store_ptr(simd, out[r].as_mut_ptr(), lanes, acc[r]) };
            }
            for r in 0..R {
                to.store(i + r, first, &out[r][..lanes]);
            }
        }
    }
}

/// Products of bytes.
#[cfg(target_arch = "x86_64")]
pub(crate) mod bytes {
    use std::arch::x86_64::*;

    use super::{Columns, GROUP, LANE, Line, PANEL, QuantBits, sum};
    use crate::mat::Mat;
    use crate::simd::{self, Instructions};
    use crate::{parallel, probe};

    /// Rows that are multiplied together.
    const ROWS: usize = 8;
    /// Lines that are asked for ahead, into the first-level cache and, since that has few requests on their way, before into the
    /// second.
    const NEAR: usize = 24;
    const FAR: usize = 320;

    /// Whether the instructions work here and are not switched off.
    pub(crate) fn available() -> bool {
        let works = probe::vnni().works && is_x86_feature_detected!("avx512bw");
        works && simd::allowed(Instructions::Pairs)
    }

    /// Inputs in 8 bits, and of each group of a row what its sums are completed with.
    pub(super) struct Inputs {
        /// `z`, `[m, groups · GROUP]`.
        z: Vec<i8>,
        /// `[m, groups]`: `a`, `c·(Σ x − a·Σ z)` and `Σ x`.
        scales: Vec<[f32; 3]>,
        m: usize,
        groups: usize,
    }

    impl Inputs {
        pub(super) fn new(x: Mat, bits: QuantBits) -> Self {
            let ((m, k), groups) = (x.dims(), x.cols.div_ceil(GROUP));
            let (mut z, mut scales) = (vec![0; m * groups * GROUP], vec![[0.0; 3]; m * groups]);
            let middle = bits.levels() as f32 / 2.0;
            let rows = z.chunks_mut((groups * GROUP).max(1)).zip(scales.chunks_mut(groups.max(1)));
            parallel::map(rows.enumerate(), m * k, |(i, (z, scales))| {
                let (whole, rest) = x.row(i).as_chunks::<GROUP>();
                let mut last = [0.0; GROUP];
                last[..rest.len()].copy_from_slice(rest);
                for ((x, z), scales) in
                    whole.iter().chain([&last]).zip(z.as_chunks_mut::<GROUP>().0).zip(scales)
                {
                    // SAFETY: the instructions exist.
                    *scales = unsafe { round(x, z, middle) };
                }
            });
            Self { z, scales, m, groups }
        }

        /// The columns of a panel.
        ///
        /// # Safety
        /// The instructions exist.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        pub(super) unsafe fn multiply(&self, lines: &[Line], bits: QuantBits, to: &Columns) {
            let mut i = 0;
            while i < self.m {
                // SAFETY: rows that exist.
                unsafe {
                    i += match (self.m - i, bits) {
                        (ROWS.., QuantBits::Eight) => self.tile::<8, ROWS>(lines, i, to),
                        (ROWS.., QuantBits::Four) => self.tile::<4, ROWS>(lines, i, to),
                        (4.., QuantBits::Eight) => self.tile::<8, 4>(lines, i, to),
                        (4.., QuantBits::Four) => self.tile::<4, 4>(lines, i, to),
                        (2.., QuantBits::Eight) => self.tile::<8, 2>(lines, i, to),
                        (2.., QuantBits::Four) => self.tile::<4, 2>(lines, i, to),
                        (_, QuantBits::Eight) => self.tile::<8, 1>(lines, i, to),
                        (_, QuantBits::Four) => self.tile::<4, 1>(lines, i, to),
                    };
                }
            }
        }

        /// `R` rows from `i` on, which are there.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn tile<const BITS: usize, const R: usize>(
            &self,
            lines: &[Line],
            i: usize,
            to: &Columns,
        ) -> usize {
            let words = GROUP * BITS / 32;
            debug_assert!(lines.len() == self.groups * (1 + words) && i + R <= self.m);
            let (mut z, mut scales) = ([std::ptr::null::<i8>(); R], [std::ptr::null::<[f32; 3]>(); R]);
            for r in 0..R {
                z[r] = self.z[(i + r) * self.groups * GROUP..].as_ptr();
                scales[r] = self.scales[(i + r) * self.groups..].as_ptr();
            }
            // Other rows find the panel where the first ones left it.
            let ask = |line: *const Line| {
                if i == 0 {
                    simd::prefetch(line.wrapping_add(NEAR));
                    simd::prefetch_far(line.wrapping_add(FAR));
                }
            };
            let half = _mm512_set1_epi8(0x0f);
            let mut acc = [_mm512_setzero_ps(); R];
            let mut line = lines.as_ptr();
            for g in 0..self.groups {
                let mut dots = [_mm512_setzero_si512(); R];
                // SAFETY: `groups` groups of lines, inputs and scales.
                unsafe {
                    ask(line);
                    let scale = _mm512_load_si512(line.cast());
                    for t in 0..words {
                        ask(line.wrapping_add(1 + t));
                        let word = _mm512_load_si512(line.add(1 + t).cast());
                        for part in 0..8 / BITS {
                            let codes = match (BITS, part) {
                                (8, _) => word,
                                (_, 0) => _mm512_and_si512(word, half),
                                _ => _mm512_and_si512(_mm512_srli_epi32::<4>(word), half),
                            };
                            let at = g * GROUP + (part * words + t) * LANE;
                            for r in 0..R {
                                let four = _mm512_set1_epi32(z[r].add(at).cast::<i32>().read_unaligned());
                                dots[r] = _mm512_dpbusd_epi32(dots[r], codes, four);
                            }
                        }
                    }
                    let step = _mm512_and_si512(scale, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                    let step = _mm512_castsi512_ps(step);
                    let min = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(scale));
                    for r in 0..R {
                        let [a, middle, sum] = *scales[r].add(g);
                        let dot = _mm512_cvtepi32_ps(dots[r]);
                        let dot = _mm512_fmadd_ps(dot, _mm512_set1_ps(a), _mm512_set1_ps(middle));
                        acc[r] = _mm512_fmadd_ps(dot, step, acc[r]);
                        acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(sum), min, acc[r]);
                    }
                    line = line.add(1 + words);
                }
            }
            let mut out = [[0.0f32; PANEL]; R];
            for r in 0..R {
                // SAFETY: sixteen floats.
                unsafe { _mm512_storeu_ps(out[r].as_mut_ptr(), acc[r]) };
            }
            for r in 0..R {
                to.store(i + r, 0, &out[r]);
            }
            R
        }
    }

    /// What [`Inputs`] hold of a group, with `c` the middle code. Numbers that are not finite make a sum that is none.
    ///
    /// # Safety
    /// The instructions exist.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn round(x: &[f32; GROUP], z: &mut [i8; GROUP], c: f32) -> [f32; 3] {
        let mut most = _mm512_setzero_ps();
        for x in x.as_chunks::<PANEL>().0 {
            // SAFETY: sixteen floats. Of a number and none, the instruction gives its second operand.
            most = unsafe { _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x.as_ptr())), most) };
        }
        let most = _mm512_reduce_max_ps(most);
        let inverse = 127.0 / most;
        // Nothing, or so small that 127 steps of it are none: what remains is less than rounding is elsewhere.
        let (a, inverse) = if inverse.is_finite() { (most / 127.0, inverse) } else { (0.0, 0.0) };
        let mut total = _mm512_setzero_si512();
        for (x, z) in x.as_chunks::<PANEL>().0.iter().zip(z.as_chunks_mut::<PANEL>().0) {
            // SAFETY: sixteen floats and bytes.
            unsafe {
                let scaled = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_set1_ps(inverse));
                // To nearest, ties to even.
                let rounded = _mm512_cvtps_epi32(scaled);
                total = _mm512_add_epi32(total, rounded);
                _mm_storeu_si128(z.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(rounded));
            }
        }
        let (sum, total) = (sum(x), _mm512_reduce_add_epi32(total));
        [a, c * (sum - a * total as f32), sum]
    }
}
