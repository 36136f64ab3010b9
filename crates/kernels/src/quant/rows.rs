//! Products of few rows with weights of few bits: decoding.
//!
//! Of a group of weights with minimum `m` and step `s`, and of its inputs, the product is `s·Σ q x + m·Σ x`. So codes are multiplied as
//! they are, and scales once a group.
//!
//! Vectors of `f32` widen codes and round nothing. Where the CPU multiplies bytes (AVX512-VNNI), four times as fast, inputs are written
//! as bytes: `x ≈ a·z`, `z` a whole number. With 8 bits a weight `z = 256·h + l` has two bytes and `a = max|x|/32639` for the group;
//! with 4 bits, whose weights are coarser, it has one, and each half of the group its own `a = max|x|/127`. An input that is more than
//! [`bytes::far_out`] times as large as the mean of the others counts as zero in `z` and is multiplied as f32; beside it the others would
//! have few bits. With `c` the middle code, and with the sum of the inputs as they are,
//!
//! `s·Σ q x ≈ s·(a·Σ q z + c·(Σ x − a·Σ z))`,
//!
//! which is off by `s·Σ (q − c)(x − a z)`, at most `s·L/2·Σ a/2`: rounding meets what weights are beside the middle of their range, not
//! beside its end. Sums of bytes are exact.
//!
//! [`keep_inputs`](super::keep_inputs) switches bytes off.

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
        works && simd::allowed(Instructions::Pairs) && !super::super::keeps_inputs()
    }

    /// How many times the mean of the others an input is that is multiplied as f32: with one byte sooner, since all of them go to the
    /// ordinary ones. The largest of 32 normal numbers is three times their mean.
    pub(super) const fn far_out(bits: QuantBits) -> f32 {
        match bits {
            QuantBits::Eight => 32.0,
            QuantBits::Four => 5.0,
        }
    }

    /// Words of a group of a row, four neighbours each: of `h` and of `l`, or of `z`.
    const fn words_of(bits: QuantBits) -> usize {
        match bits {
            QuantBits::Eight => 2 * GROUP / LANE,
            QuantBits::Four => GROUP / LANE,
        }
    }

    /// What the sums of a group of a row are completed with.
    #[derive(Clone, Copy, Default)]
    struct Scales {
        /// `a`, or that of each half.
        steps: [f32; 2],
        /// `c·(Σ x − a·Σ z)` of those that are not far out.
        middle: f32,
        /// `Σ x`.
        sum: f32,
        /// Inputs that are far out, 0 where none is, and their places in the group.
        outliers: [(f32, u32); 2],
    }

    /// Inputs in bytes. Rows that are multiplied together stand together: of each group, and of each four neighbours in it, both bytes
    /// of every row.
    pub(super) struct Inputs {
        z: Vec<i32>,
        /// Of each group those of every row.
        scales: Vec<Scales>,
        m: usize,
        groups: usize,
    }

    /// How many of `rest` rows are multiplied together.
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
            let tiles = z.chunks_mut((ROWS * groups * words).max(1));
            let tiles = tiles.zip(scales.chunks_mut((ROWS * groups).max(1)));
            parallel::map(tiles.enumerate(), m * k, |(tile, (z, scales))| {
                let (first, end) = (tile * ROWS, m.min(tile * ROWS + ROWS));
                let mut i = first;
                while i < end {
                    let side = side(end - i);
                    let (z, scales) =
                        (&mut z[(i - first) * groups * words..], &mut scales[(i - first) * groups..]);
                    for r in 0..side {
                        for (g, x) in x.row(i + r).chunks(GROUP).enumerate() {
                            let mut group = [0.0; GROUP];
                            group[..x.len()].copy_from_slice(x);
                            let z = &mut z[g * side * words..][..side * words];
                            // SAFETY: the instructions exist.
                            scales[g * side + r] = unsafe { round(bits, &mut group, z, (side, r)) };
                        }
                    }
                    i += side;
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
            let mut z = self.z[i * self.groups * words_of(bits_of::<BITS>())..].as_ptr();
            let mut scales = self.scales[i * self.groups..].as_ptr();
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
            for _ in 0..self.groups {
                let mut dots = [[_mm512_setzero_si512(); 2]; R];
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
                            let at = (part * words + t) * R;
                            for r in 0..R {
                                if BITS == 8 {
                                    for p in 0..2 {
                                        let four = _mm512_set1_epi32(*z.add((at + r) * 2 + p));
                                        dots[r][p] = _mm512_dpbusd_epi32(dots[r][p], codes, four);
                                    }
                                } else {
                                    let four = _mm512_set1_epi32(*z.add(at + r));
                                    dots[r][part] = _mm512_dpbusd_epi32(dots[r][part], codes, four);
                                }
                            }
                        }
                    }
                    let step = _mm512_and_si512(scale, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                    let step = _mm512_castsi512_ps(step);
                    let min = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(scale));
                    for r in 0..R {
                        let Scales { steps, middle, sum, outliers } = *scales.add(r);
                        let middle = _mm512_set1_ps(middle);
                        let [first, second] = steps.map(|step| _mm512_set1_ps(step));
                        let mut dot = if BITS == 8 {
                            // At most 64 · 255 · 32639, which is below 2³⁰.
                            let dot = _mm512_add_epi32(_mm512_slli_epi32::<8>(dots[r][0]), dots[r][1]);
                            _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), first, middle)
                        } else {
                            let [a, b] = dots[r].map(|dot| _mm512_cvtepi32_ps(dot));
                            _mm512_fmadd_ps(b, second, _mm512_fmadd_ps(a, first, middle))
                        };
                        for (outlier, at) in outliers {
                            if outlier != 0.0 {
                                let (word, shift) = bits_of::<BITS>().place(at as usize);
                                let word = _mm512_load_si512(line.add(1 + word).cast());
                                let code = _mm512_srlv_epi32(word, _mm512_set1_epi32(shift as i32));
                                let code = _mm512_and_si512(code, _mm512_set1_epi32((1 << BITS) - 1));
                                dot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(outlier), dot);
                            }
                        }
                        acc[r] = _mm512_fmadd_ps(dot, step, acc[r]);
                        acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(sum), min, acc[r]);
                    }
                    line = line.add(1 + words);
                    z = z.add(R * words_of(bits_of::<BITS>()));
                    scales = scales.add(R);
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

    const fn bits_of<const BITS: usize>() -> QuantBits {
        if BITS == 8 { QuantBits::Eight } else { QuantBits::Four }
    }

    /// What [`Inputs`] hold of a group, which goes to row `r` of `side`. Numbers that are not finite make a sum that is none.
    ///
    /// # Safety
    /// The instructions exist.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn round(
        bits: QuantBits,
        x: &mut [f32; GROUP],
        z: &mut [i32],
        (side, r): (usize, usize),
    ) -> Scales {
        let mut out = Scales { sum: sum(x), ..Scales::default() };
        // The largest number of two bytes with signs whose upper one does not overflow when it is rounded, or of one.
        let (most_code, len) = match bits {
            QuantBits::Eight => (32_639.0, GROUP),
            QuantBits::Four => (127.0, GROUP / 2),
        };
        let mut steps = [(0.0, 0.0); 2];
        for (part, x) in x.chunks_exact_mut(len).enumerate() {
            // SAFETY: the instructions exist.
            let (mut most, size) = unsafe { most_and_size(x) };
            if most * (len - 1) as f32 > far_out(bits) * (size - most) {
                let at = x.iter().position(|x| x.abs() == most).unwrap_or(0);
                out.outliers[part] = (std::mem::take(&mut x[at]), (part * len + at) as u32);
                // SAFETY: as above.
                most = unsafe { most_and_size(x) }.0;
            }
            let inverse = most_code / most;
            // Nothing, or so small that this many steps of it are none: what remains is less than rounding is elsewhere.
            steps[part] = if inverse.is_finite() { (most / most_code, inverse) } else { (0.0, 0.0) };
        }
        let mut total = [0; 2];
        for (at, x) in x.as_chunks::<PANEL>().0.iter().enumerate() {
            let (mut high, mut low, part) = ([0i32; LANE], [0i32; LANE], at * PANEL / len);
            // SAFETY: sixteen floats and bytes.
            unsafe {
                let scaled = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_set1_ps(steps[part].1));
                // To nearest, ties to even.
                let rounded = _mm512_cvtps_epi32(scaled);
                total[part] += _mm512_reduce_add_epi32(rounded);
                let upper = _mm512_srai_epi32::<8>(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)));
                let lower = _mm512_sub_epi32(rounded, _mm512_slli_epi32::<8>(upper));
                _mm_storeu_si128(high.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(upper));
                _mm_storeu_si128(low.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(lower));
            }
            for e in 0..LANE {
                let place = (at * LANE + e) * side + r;
                match bits {
                    QuantBits::Eight => z[2 * place..2 * place + 2].copy_from_slice(&[high[e], low[e]]),
                    // Its upper byte is 0.
                    QuantBits::Four => z[place] = low[e],
                }
            }
        }
        let [(first, _), (second, _)] = steps;
        let near = first * total[0] as f32 + second * total[1] as f32;
        out.middle = bits.levels() as f32 / 2.0 * (sum(x) - near);
        out.steps = [first, second];
        out
    }

    /// The largest size of the numbers, sixteen or more, and the sum of all sizes.
    ///
    /// # Safety
    /// The instructions exist.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn most_and_size(x: &[f32]) -> (f32, f32) {
        let (mut most, mut size) = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for x in x.as_chunks::<PANEL>().0 {
            // SAFETY: sixteen floats. Of a number and none, the maximum is its second operand.
            unsafe {
                let x = _mm512_abs_ps(_mm512_loadu_ps(x.as_ptr()));
                (most, size) = (_mm512_max_ps(x, most), _mm512_add_ps(size, x));
            }
        }
        (_mm512_reduce_max_ps(most), _mm512_reduce_add_ps(size))
    }
}
