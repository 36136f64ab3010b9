//! Products with weights of 8 or 4 bits that multiply codes: of few rows (decoding), and of many if
//! [`Arithmetic::one_kernel`].
//!
//! A group of weights has a minimum `m` and a step `s`. Its product with the inputs is `s·Σ q x + m·Σ x`. Codes are therefore
//! multiplied without conversion to weights, and the scales are applied once per group.
//!
//! `f32` vectors widen the codes and round nothing. CPUs that multiply bytes (AVX512-VNNI) do so four times as fast, so there the
//! inputs are converted to bytes: `x ≈ a·z`, where `z` is an integer. With 8-bit weights, `z = 256·h + l` has two bytes, and `a =
//! max|x|/32639` for the group. With 4-bit weights, which are coarser, `z` has one byte, and each quarter of the group has its
//! own `a = max|x|/127`.
//!
//! An input that is more than [`bytes::far_out`] times as large as the mean of the others would leave few bits for the others.
//! Such an input counts as zero in `z` and is multiplied as f32. With `c` the middle code, and with the sum of the unrounded
//! inputs,
//!
//! `s·Σ q x ≈ s·(Σ a q z + c·(Σ x − Σ a z))`.
//!
//! The error is `s·Σ (q − c)(x − a z)`, at most `s·L/2·Σ a/2`. Sums of bytes are exact.
//!
//! With [`Arithmetic::keeps_inputs`], inputs are not converted to bytes.

use crate::Arithmetic;
use crate::mat::{Mat, MatMut, check};
use crate::parallel::ranges;
use crate::simd::{Simd, store_ptr};

use super::{GROUP, LANE, Line, PANEL, QuantBits, QuantRows};

/// Computes `y [m, Σ n] = x [m, k] Wᵀ + b` for layers whose weights have the same number of bits. Adds to `y` if `accumulate`.
///
/// The bits of a row depend only on its inputs, the weights, the arithmetic and `k`.
pub(crate) fn forward_rows(
    x: Mat,
    layers: &[(QuantRows, Option<&[f32]>)],
    arithmetic: Arithmetic,
    accumulate: bool,
    mut y: MatMut,
) {
    let (m, k) = x.dims();
    let Some((first, _)) = layers.first() else { return };
    let bits = first.bits;
    let alike = layers.iter().all(|(w, _)| w.bits == bits && w.k == k);
    let columns: usize = layers.iter().map(|(w, _)| w.n).sum();
    check!(
        "linear, weights of few bits",
        alike && y.dims() == (m, columns),
        x.dims(),
        y.dims(),
        layers.iter().map(|(w, _)| (w.bits, w.n, w.k)).collect::<Vec<_>>()
    );
    // Rows that are multiplied by a panel one after the other stay in the second-level cache.
    let block = (BLOCK_LEN / k.max(1) / 8 * 8).max(32);
    for start in (0..m).step_by(block) {
        let rows = start..m.min(start + block);
        let y = y.again().row_range(rows.clone());
        multiply(&Inputs::new(x.row_range(rows), bits, arithmetic), layers, bits, accumulate, y);
    }
}

/// Multiplies rows whose inputs stay in the cache.
fn multiply(
    inputs: &Inputs,
    layers: &[(QuantRows, Option<&[f32]>)],
    bits: QuantBits,
    accumulate: bool,
    y: MatMut,
) {
    let ((m, n), k) = (y.dims(), layers.first().map_or(0, |(w, _)| w.k));
    let of = |w: &QuantRows| (w.first + w.n).div_ceil(PANEL);
    let panels = layers.iter().map(|(w, _)| of(w)).sum();
    ranges(panels, 1, m * n * k / 8, |panels| {
        // For each layer: its first panel and its first column.
        let (mut before, mut column) = (0, 0);
        for &(w, bias) in layers {
            let own = panels.start.max(before)..panels.end.min(before + of(&w));
            for panel in own.start - before..own.end.max(own.start) - before {
                let lines = &w.lines[panel * w.panel_lines()..][..w.panel_lines()];
                // First column of the panel. It may be before the first column of the weight.
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

/// Number of inputs that are multiplied by a panel one after the other.
const BLOCK_LEN: usize = 1 << 17;

/// Rows of inputs, in the format that a kernel reads.
enum Inputs {
    Wide(Sums),
    #[cfg(target_arch = "x86_64")]
    Bytes(bytes::Inputs),
}

/// Inputs `[m, groups · GROUP]`, which are zero beyond `k`, and the sum of each group.
struct Sums {
    x: Vec<f32>,
    sums: Vec<f32>,
    m: usize,
    groups: usize,
}

impl Inputs {
    fn new(x: Mat, bits: QuantBits, arithmetic: Arithmetic) -> Self {
        #[cfg(target_arch = "x86_64")]
        if arithmetic.rounds_inputs() {
            return Self::Bytes(bytes::Inputs::new(x, bits));
        }
        let _ = (bits, arithmetic);
        let ((m, k), groups) = (x.dims(), x.cols.div_ceil(GROUP));
        let mut padded = vec![0.0; m * groups * GROUP];
        for (i, to) in padded.chunks_exact_mut((groups * GROUP).max(1)).enumerate() {
            to[..k].copy_from_slice(x.row(i));
        }
        let sums = padded.as_chunks::<GROUP>().0.iter().map(sum).collect();
        Self::Wide(Sums { x: padded, sums, m, groups })
    }

    /// Computes the columns of a panel.
    fn multiply(&self, lines: &[Line], bits: QuantBits, to: &Columns) {
        match self {
            Self::Wide(inputs) => wide(inputs, lines, bits, to),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this variant is created only if the CPU has the instructions.
            Self::Bytes(inputs) => unsafe { inputs.multiply(lines, bits, to) },
        }
    }
}

/// Returns `Σ x`, summed in a fixed order.
#[inline(always)]
fn sum(x: &[f32; GROUP]) -> f32 {
    let mut sums = [0.0f32; PANEL];
    for x in x.as_chunks::<PANEL>().0 {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
    }
    sums.iter().sum()
}

/// Destination of the sums of a panel.
struct Columns<'a> {
    y: &'a MatMut<'a>,
    bias: Option<&'a [f32]>,
    /// Index of the layer's first column in a row of `y`.
    column: usize,
    /// Row of the panels at which this panel begins, and row that is column 0 of the layer.
    first: usize,
    skip: usize,
    n: usize,
    accumulate: bool,
}

impl Columns<'_> {
    /// Writes sums of row `i` for the columns that begin at lane `lane` of the panel. Ignores lanes that are not columns of the
    /// layer.
    #[inline(always)]
    fn store(&self, i: usize, lane: usize, sums: &[f32]) {
        let row = self.first + lane;
        // Only the lanes `start..end` are columns of the layer.
        let start = self.skip.saturating_sub(row).min(sums.len());
        let end = (self.skip + self.n).saturating_sub(row).min(sums.len());
        if start == 0 && end == sums.len() {
            self.write(i, row - self.skip, sums);
        } else if start < end {
            self.write(i, row + start - self.skip, &sums[start..end]);
        }
    }

    /// Writes sums of row `i` for the columns that start at `j`.
    #[inline(always)]
    fn write(&self, i: usize, j: usize, sums: &[f32]) {
        let y = self.y.data.ptr(i * self.y.stride + self.column + j);
        let bias = self.bias.map(|bias| &bias[j..j + sums.len()]);
        for (at, sum) in sums.iter().enumerate() {
            let sum = sum + bias.map_or(0.0, |bias| bias[at]);
            // SAFETY: row i and the columns from j to n of the layer are in y, and each panel belongs to one task.
            unsafe {
                let y = y.wrapping_add(at);
                y.write(if self.accumulate { *y + sum } else { sum });
            }
        }
    }
}

/// Loads a vector of a line, starting at word `first`.
#[inline(always)]
fn load<S: Simd>(line: &Line, first: usize) -> S::u32s {
    let words = &line.0[first..first + S::F32_LANES];
    // SAFETY: `words` has as many words as a vector has lanes.
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
    /// Computes the `R` rows that start at `i`. The order of summation is that of the groups and of their elements.
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
        // The number 2²³ + q has q in its low bits.
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

/// Products of codes and inputs in bytes.
#[cfg(target_arch = "x86_64")]
pub(crate) mod bytes {
    use std::arch::x86_64::*;

    use super::{Columns, GROUP, LANE, Line, PANEL, QuantBits, sum};
    use crate::mat::Mat;
    use crate::simd::{self, Instructions};
    use crate::{parallel, probe};

    /// Number of rows that are multiplied together.
    const ROWS: usize = 8;
    /// Number of lines by which prefetching into the first-level cache runs ahead. This cache allows few outstanding requests,
    /// so lines are prefetched into the second-level cache earlier, by `FAR` lines.
    const NEAR: usize = 24;
    const FAR: usize = 320;

    /// Returns true if the instructions work on this machine and are not disabled.
    pub(crate) fn available() -> bool {
        let works = probe::vnni().works && is_x86_feature_detected!("avx512bw");
        works && simd::allowed(Instructions::Pairs)
    }

    /// Returns the ratio of an input to the mean of the others above which the input is multiplied as f32.
    ///
    /// The ratio is smaller with one byte, because the other inputs then need all values of the byte. The largest of 16 normally
    /// distributed numbers is two to three times their mean.
    pub(super) const fn far_out(bits: QuantBits) -> f32 {
        match bits {
            QuantBits::Eight => 32.0,
            QuantBits::Four => 3.5,
        }
    }

    /// Returns the number of inputs that share a step.
    pub(super) const fn part_len(bits: QuantBits) -> usize {
        match bits {
            QuantBits::Eight => GROUP,
            QuantBits::Four => GROUP / 4,
        }
    }

    /// Returns the number of words that a group of a row takes. A word has four adjacent bytes: of `h` and of `l`, or of `z`.
    const fn words_of(bits: QuantBits) -> usize {
        match bits {
            QuantBits::Eight => 2 * GROUP / LANE,
            QuantBits::Four => GROUP / LANE,
        }
    }

    /// Numbers that complete the sums of a group of a row.
    #[derive(Clone, Copy, Default)]
    struct Scales {
        /// The step `a` of the group, or of each quarter of it.
        steps: [f32; 4],
        /// The term `c·(Σ x − Σ a z)`, over the inputs that `z` represents.
        middle: f32,
        /// Sum `Σ x` over the same inputs.
        sum: f32,
    }

    /// An input that is multiplied as f32.
    struct Outlier {
        group: usize,
        /// Position in the group.
        at: usize,
        x: f32,
    }

    /// Inputs in bytes. Rows that are multiplied together are stored together: for each group, and for each four adjacent inputs
    /// in it, the bytes of every row follow each other.
    pub(super) struct Inputs {
        z: Vec<i32>,
        /// Scales of each row for each group.
        scales: Vec<Scales>,
        /// Outliers of each row, in the order of groups.
        outliers: Vec<Vec<Outlier>>,
        m: usize,
        groups: usize,
    }

    /// Returns how many of the `rest` remaining rows are multiplied together.
    const fn side(rest: usize) -> usize {
        match rest {
            ROWS.. => ROWS,
            4.. => 4,
            2.. => 2,
            _ => 1,
        }
    }

    impl Inputs {
        pub(super) fn new(x: Mat, bits: QuantBits) -> Self {
            let ((m, k), groups) = (x.dims(), x.cols.div_ceil(GROUP));
            let words = words_of(bits);
            let (mut z, mut scales) = (vec![0; m * groups * words], vec![Scales::default(); m * groups]);
            let mut outliers: Vec<Vec<Outlier>> = (0..m).map(|_| Vec::new()).collect();
            let tiles = z.chunks_mut((ROWS * groups * words).max(1));
            let tiles = tiles.zip(scales.chunks_mut((ROWS * groups).max(1))).zip(outliers.chunks_mut(ROWS));
            parallel::map(tiles.enumerate(), m * k, |(tile, ((z, scales), outliers))| {
                let (first, rows) = (tile * ROWS, outliers.len());
                let mut i = 0;
                while i < rows {
                    let side = side(rows - i);
                    let (z, scales) = (&mut z[i * groups * words..], &mut scales[i * groups..]);
                    for r in 0..side {
                        let found = &mut outliers[i + r];
                        for (g, x) in x.row(first + i + r).chunks(GROUP).enumerate() {
                            let mut group = [0.0; GROUP];
                            group[..x.len()].copy_from_slice(x);
                            let z = &mut z[g * side * words..][..side * words];
                            let far = |at, x| found.push(Outlier { group: g, at, x });
                            // SAFETY: the CPU has the instructions.
                            scales[g * side + r] = unsafe { round(bits, &mut group, z, (side, r), far) };
                        }
                    }
                    i += side;
                }
            });
            Self { z, scales, outliers, m, groups }
        }

        /// Computes the columns of a panel.
        ///
        /// # Safety
        /// The CPU must have the instructions.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        pub(super) unsafe fn multiply(&self, lines: &[Line], bits: QuantBits, to: &Columns) {
            let mut i = 0;
            while i < self.m {
                // SAFETY: the rows are in bounds.
                unsafe {
                    i += match (side(self.m - i), bits) {
                        (ROWS, QuantBits::Eight) => self.tile::<8, ROWS>(lines, i, to),
                        (ROWS, QuantBits::Four) => self.tile::<4, ROWS>(lines, i, to),
                        (4, QuantBits::Eight) => self.tile::<8, 4>(lines, i, to),
                        (4, QuantBits::Four) => self.tile::<4, 4>(lines, i, to),
                        (2, QuantBits::Eight) => self.tile::<8, 2>(lines, i, to),
                        (2, QuantBits::Four) => self.tile::<4, 2>(lines, i, to),
                        (_, QuantBits::Eight) => self.tile::<8, 1>(lines, i, to),
                        (_, QuantBits::Four) => self.tile::<4, 1>(lines, i, to),
                    };
                }
            }
        }

        /// Computes the `R` rows that start at `i`, and returns `R`. It is one function, because all steps use the sums of the
        /// rows, which stay in registers.
        ///
        /// # Safety
        /// The rows must be in bounds, and the CPU must have the instructions.
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
            let mut z = self.z[i * self.groups * words_of(bits_of::<BITS>())..].as_ptr();
            let mut scales = self.scales[i * self.groups..].as_ptr();
            // Only the first rows prefetch: later rows find the panel in the cache.
            let prefetch = |line: *const Line| {
                if i == 0 {
                    simd::prefetch(line.wrapping_add(NEAR));
                    simd::prefetch_far(line.wrapping_add(FAR));
                }
            };
            let half = _mm512_set1_epi8(0x0f);
            let mut acc = [_mm512_setzero_ps(); R];
            let mut line = lines.as_ptr();
            for _ in 0..self.groups {
                // SAFETY: lines, inputs and scales are available for `groups` groups.
                unsafe {
                    prefetch(line);
                    // Each row has two sums. With 8 bits, they are the sum of `h` and the sum of `l`. With 4 bits, they are the
                    // sum of the current quarter and the sum of the group.
                    let mut first = [_mm512_setzero_si512(); R];
                    let mut second = [_mm512_setzero_si512(); R];
                    if BITS == 8 {
                        for t in 0..words {
                            prefetch(line.wrapping_add(1 + t));
                            let codes = _mm512_load_si512(line.add(1 + t).cast());
                            for r in 0..R {
                                let four = z.add((t * R + r) * 2);
                                first[r] = _mm512_dpbusd_epi32(first[r], codes, _mm512_set1_epi32(*four));
                                second[r] =
                                    _mm512_dpbusd_epi32(second[r], codes, _mm512_set1_epi32(*four.add(1)));
                            }
                        }
                        for r in 0..R {
                            // The result is at most 64 · 255 · 32639, which is below 2³⁰.
                            let dot = _mm512_add_epi32(_mm512_slli_epi32::<8>(first[r]), second[r]);
                            let Scales { steps, middle, .. } = *scales.add(r);
                            let (a, middle) = (_mm512_set1_ps(steps[0]), _mm512_set1_ps(middle));
                            let dot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), a, middle);
                            second[r] = _mm512_castps_si512(dot);
                        }
                    } else {
                        for r in 0..R {
                            second[r] = _mm512_castps_si512(_mm512_set1_ps((*scales.add(r)).middle));
                        }
                        for quarter in 0..4 {
                            first = [_mm512_setzero_si512(); R];
                            for t in 0..words / 2 {
                                let at = quarter % 2 * (words / 2) + t;
                                let word = _mm512_load_si512(line.add(1 + at).cast());
                                if quarter < 2 {
                                    prefetch(line.wrapping_add(1 + at));
                                }
                                let codes = if quarter < 2 { word } else { _mm512_srli_epi32::<4>(word) };
                                let codes = _mm512_and_si512(codes, half);
                                for r in 0..R {
                                    let four = _mm512_set1_epi32(*z.add((quarter * (words / 2) + t) * R + r));
                                    first[r] = _mm512_dpbusd_epi32(first[r], codes, four);
                                }
                            }
                            for r in 0..R {
                                let a = _mm512_set1_ps((*scales.add(r)).steps[quarter]);
                                let dot = _mm512_castsi512_ps(second[r]);
                                let dot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(first[r]), a, dot);
                                second[r] = _mm512_castps_si512(dot);
                            }
                        }
                    }
                    let (min, step) = scale_of(_mm512_load_si512(line.cast()));
                    for r in 0..R {
                        acc[r] = _mm512_fmadd_ps(_mm512_castsi512_ps(second[r]), step, acc[r]);
                        acc[r] = _mm512_fmadd_ps(_mm512_set1_ps((*scales.add(r)).sum), min, acc[r]);
                    }
                    line = line.add(1 + words);
                    z = z.add(R * words_of(bits_of::<BITS>()));
                    scales = scales.add(R);
                }
            }
            for r in 0..R {
                let mut sums = acc[r];
                for outlier in &self.outliers[i + r] {
                    let group = &lines[outlier.group * (1 + words)..][..1 + words];
                    let (word, shift) = bits_of::<BITS>().place(outlier.at);
                    // SAFETY: the lines belong to one group.
                    unsafe {
                        let (min, step) = scale_of(_mm512_load_si512(group.as_ptr().cast()));
                        let word = _mm512_load_si512(group[1 + word..].as_ptr().cast());
                        let code = _mm512_srlv_epi32(word, _mm512_set1_epi32(shift as i32));
                        let code = _mm512_and_si512(code, _mm512_set1_epi32((1 << BITS) - 1));
                        let weight = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), step, min);
                        sums = _mm512_fmadd_ps(weight, _mm512_set1_ps(outlier.x), sums);
                    }
                }
                let mut out = [0.0f32; PANEL];
                // SAFETY: `out` has sixteen floats.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
                to.store(i + r, 0, &out);
            }
            R
        }
    }

    const fn bits_of<const BITS: usize>() -> QuantBits {
        if BITS == 8 { QuantBits::Eight } else { QuantBits::Four }
    }

    /// Returns the minimum and the step from a line of scales.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn scale_of(line: __m512i) -> (__m512, __m512) {
        let step = _mm512_and_si512(line, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(line)), _mm512_castsi512_ps(step))
    }

    /// Writes a group of inputs as bytes for row `r` of `side`, and passes outliers to `far`. If an input is not finite, the sum
    /// is not finite either.
    ///
    /// # Safety
    /// The CPU must have the instructions.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn round(
        bits: QuantBits,
        x: &mut [f32; GROUP],
        z: &mut [i32],
        (side, r): (usize, usize),
        mut far: impl FnMut(usize, f32),
    ) -> Scales {
        let mut out = Scales::default();
        // With two signed bytes, the largest number whose upper byte does not overflow when it is rounded; with one byte, the
        // largest number.
        let most_code = if bits == QuantBits::Eight { 32_639.0 } else { 127.0 };
        let len = part_len(bits);
        let mut inverses = [0.0; 4];
        for (part, x) in x.chunks_exact_mut(len).enumerate() {
            // SAFETY: the CPU has the instructions.
            let (mut most, size) = unsafe { most_and_size(x) };
            if most * (len - 1) as f32 > far_out(bits) * (size - most) {
                let at = x.iter().position(|x| x.abs() == most).unwrap_or(0);
                far(part * len + at, std::mem::take(&mut x[at]));
                // SAFETY: as above.
                most = unsafe { most_and_size(x) }.0;
            }
            let inverse = most_code / most;
            // If the inverse is not finite, all inputs are zero or very small. They are then treated as zero, because the
            // remainder is below the rounding of other inputs.
            if inverse.is_finite() {
                (out.steps[part], inverses[part]) = (most / most_code, inverse);
            }
        }
        let mut near = 0.0;
        for (at, x) in x.as_chunks::<PANEL>().0.iter().enumerate() {
            let (mut high, mut low, part) = ([0i32; LANE], [0i32; LANE], at * PANEL / len);
            // SAFETY: the arrays have sixteen floats and sixteen bytes.
            unsafe {
                let scaled = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_set1_ps(inverses[part]));
                // This conversion rounds to nearest, ties to even.
                let rounded = _mm512_cvtps_epi32(scaled);
                near += out.steps[part] * _mm512_reduce_add_epi32(rounded) as f32;
                let upper = _mm512_srai_epi32::<8>(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)));
                let lower = _mm512_sub_epi32(rounded, _mm512_slli_epi32::<8>(upper));
                _mm_storeu_si128(high.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(upper));
                _mm_storeu_si128(low.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(lower));
            }
            for e in 0..LANE {
                let place = (at * LANE + e) * side + r;
                match bits {
                    QuantBits::Eight => z[2 * place..2 * place + 2].copy_from_slice(&[high[e], low[e]]),
                    // With 4-bit weights, the upper byte is 0.
                    QuantBits::Four => z[place] = low[e],
                }
            }
        }
        out.sum = sum(x);
        out.middle = bits.levels() as f32 / 2.0 * (out.sum - near);
        out
    }

    /// Returns the largest absolute value of at least sixteen numbers, and the sum of all absolute values.
    ///
    /// # Safety
    /// The CPU must have the instructions.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn most_and_size(x: &[f32]) -> (f32, f32) {
        let (mut most, mut size) = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for x in x.as_chunks::<PANEL>().0 {
            // SAFETY: `x` has sixteen floats. If one operand is NaN, the maximum is the second operand.
            unsafe {
                let x = _mm512_abs_ps(_mm512_loadu_ps(x.as_ptr()));
                (most, size) = (_mm512_max_ps(x, most), _mm512_add_ps(size, x));
            }
        }
        (_mm512_reduce_max_ps(most), _mm512_reduce_add_ps(size))
    }
}
