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

use crate::mat::{Mat, MatMut};
use crate::parallel::ranges;
use crate::simd::{Simd, store_ptr};

use super::{GROUP, LANE, Line, PANEL, QuantBits, QuantRows};

/// `y [m, n] = x [m, k] Wᵀ + b`, or that added to `y`; bits of a row depend on it, its weights and `k` alone.
pub(crate) fn forward_rows(x: Mat, w: QuantRows, bias: Option<&[f32]>, accumulate: bool, y: MatMut) {
    let ((m, k), n) = (x.dims(), w.n);
    let groups = k.div_ceil(GROUP);
    // Inputs in whole groups; beyond k there are zeros.
    let mut padded = vec![0.0; m * groups * GROUP];
    for (i, to) in padded.chunks_exact_mut((groups * GROUP).max(1)).enumerate() {
        to[..k].copy_from_slice(x.row(i));
    }
    let inputs = Inputs::new(&padded, m, groups, w.bits);
    let panels = (w.first + n).div_ceil(PANEL);
    ranges(panels, 1, m * n * k / 8, |panels| {
        for panel in panels {
            let lines = &w.lines[panel * w.panel_lines()..][..w.panel_lines()];
            // The first column of the panel, which may stand before the first of the weight.
            let to = Columns { y: &y, bias, first: panel * PANEL, skip: w.first, n, accumulate };
            inputs.multiply(lines, w.bits, &to);
        }
    });
}

/// Rows of inputs as a kernel reads them.
enum Inputs<'a> {
    Wide(Sums<'a>),
    #[cfg(target_arch = "x86_64")]
    Bytes(bytes::Inputs),
}

/// Inputs `[m, groups · GROUP]` and the sums of their groups.
struct Sums<'a> {
    x: &'a [f32],
    sums: Vec<f32>,
    m: usize,
    groups: usize,
}

impl<'a> Inputs<'a> {
    fn new(x: &'a [f32], m: usize, groups: usize, bits: QuantBits) -> Self {
        #[cfg(target_arch = "x86_64")]
        if bytes::available() {
            return Self::Bytes(bytes::Inputs::new(x, m, groups, bits));
        }
        let _ = bits;
        let sums = x.as_chunks::<GROUP>().0.iter().map(sum).collect();
        Self::Wide(Sums { x, sums, m, groups })
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
    /// Row of the panels that is the first of this one, and the one that is column 0.
    first: usize,
    skip: usize,
    n: usize,
    accumulate: bool,
}

impl Columns<'_> {
    /// Row `i` of `lanes` columns, from lane `lane` of the panel on.
    #[inline(always)]
    fn store(&self, i: usize, lane: usize, sums: &[f32]) {
        for (at, &sum) in sums.iter().enumerate() {
            let row = self.first + lane + at;
            if row < self.skip || row - self.skip >= self.n {
                continue;
            }
            let j = row - self.skip;
            let sum = sum + self.bias.map_or(0.0, |bias| bias[j]);
            // SAFETY: row i and column j of y; a panel is one task's.
            unsafe {
                let y = self.y.data.ptr(i * self.y.stride + j);
                *y = if self.accumulate { *y + sum } else { sum };
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
    fn wide<'a>(simd: S, inputs: &'a Sums<'a>, lines: &'a [Line], bits: QuantBits, to: &'a Columns<'a>) -> () {
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

impl Sums<'_> {
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
    use crate::probe;
    use crate::simd::{self, Instructions};

    /// Rows that are multiplied together.
    const ROWS: usize = 8;
    /// Lines that are asked for ahead.
    const AHEAD: usize = 24;

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
        pub(super) fn new(x: &[f32], m: usize, groups: usize, bits: QuantBits) -> Self {
            let mut this = Self { z: vec![0; x.len()], scales: vec![[0.0; 3]; m * groups], m, groups };
            round(&mut this, x, bits.levels() as f32 / 2.0);
            this
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
            let half = _mm512_set1_epi8(0x0f);
            let mut acc = [_mm512_setzero_ps(); R];
            let mut line = lines.as_ptr();
            for g in 0..self.groups {
                let mut dots = [_mm512_setzero_si512(); R];
                // SAFETY: `groups` groups of lines, inputs and scales.
                unsafe {
                    let scale = _mm512_load_si512(line.cast());
                    for t in 0..words {
                        simd::prefetch(line.wrapping_add(1 + t + AHEAD).cast::<f32>());
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

    simd_fn! {
        /// Fills in what [`Inputs`] hold of each group of `x`, with `c` the middle code.
        fn round<'a>(simd: S, inputs: &'a mut Inputs, x: &'a [f32], c: f32) -> () {
            let _ = simd;
            let groups = x.as_chunks::<GROUP>().0.iter().zip(inputs.z.as_chunks_mut::<GROUP>().0);
            for ((x, z), scales) in groups.zip(&mut inputs.scales) {
                let mut most = [0.0f32; PANEL];
                for x in x.as_chunks::<PANEL>().0 {
                    most.iter_mut().zip(x).for_each(|(most, x)| *most = most.max(x.abs()));
                }
                let most = most.iter().fold(0.0f32, |most, &x| most.max(x));
                // Numbers that are not finite make a sum that is none.
                let (a, inverse) = if most > 0.0 { (most / 127.0, 127.0 / most) } else { (0.0, 0.0) };
                let mut total = 0i32;
                for (z, x) in z.iter_mut().zip(x) {
                    // Adding 1.5·2²³ rounds to a whole number, ties to even.
                    let rounded = (x * inverse + 12_582_912.0) - 12_582_912.0;
                    *z = rounded as i8;
                    total += i32::from(*z);
                }
                let sum = sum(x);
                *scales = [a, c * (sum - a * total as f32), sum];
            }
        }
    }
}
