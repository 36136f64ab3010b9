//! Weight matrices of 8 or 4 bits per weight, for weights that are not trained.
//!
//! A row is cut into groups of [`GROUP`] weights. A group stores its minimum `m` and a step `s` in bf16, and each
//! weight a code `q`: `ŵ = q·s + m`, `q` in `0..=L` with `L` 255 or 15. `m` is rounded down and `s` up, so the codes
//! cover the group, and with `q` rounded to nearest
//!
//! `|ŵ − w| ≤ s/2 + 2⁻²⁴·|ŵ|`, `s ≤ 1.01·(max − m)/L`, `m ≥ min·(1 ± 2⁻⁷)`:
//!
//! half a step, plus the rounding of `ŵ` itself (`q·s` is exact in f32). Memory is 8.5 or 4.5 bits per weight. The
//! scheme is the affine one of Jacob et al. (arXiv 1712.05877) per group. For normally distributed weights, 4 bits have
//! the error of NF4 (Dettmers et al., arXiv 2305.14314) at the same size, and widening needs no table.
//!
//! The layout serves decoding, which reads the complete matrix for a few rows of inputs. [`PANEL`] rows are stored
//! together: for each group first their scales, then their codes, four elements of every row at a time. A vector of
//! 32-bit lanes therefore holds adjacent rows, whose sums need no addition across lanes, and memory is read from start
//! to end. With 4 bits, a byte holds an element in its low half and the element 32 further on in its high half.

mod rows;

use std::sync::atomic::{AtomicBool, Ordering};

use half::bf16;

use crate::parallel;

pub(crate) use rows::forward_rows;

static KEEP_INPUTS: AtomicBool = AtomicBool::new(false);

/// Keeps the inputs of products with these weights in f32, for many rows and for few, so that the two differ only in
/// the order of sums. By default, products of many rows round inputs if [`crate::rounds_bf16`], and those of few rows
/// if [`rounds_inputs`]. Do not call this while a kernel runs.
pub fn keep_inputs(keep: bool) {
    KEEP_INPUTS.store(keep, Ordering::Relaxed);
}

pub(crate) fn keeps_inputs() -> bool {
    KEEP_INPUTS.load(Ordering::Relaxed)
}

/// Returns whether products of few rows with these weights write their inputs as bytes, because this CPU
/// multiplies bytes faster.
#[must_use]
pub fn rounds_inputs() -> bool {
    #[cfg(target_arch = "x86_64")]
    return rows::bytes::available();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Number of weights that share a minimum and a step.
pub const GROUP: usize = 64;
/// Number of rows that are stored together.
pub const PANEL: usize = 16;
/// Elements of a row in a word of codes; with 8 bits each is a byte.
const LANE: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantBits {
    /// 256 levels.
    Eight,
    /// 16 levels.
    Four,
}

impl QuantBits {
    /// Returns the bits of a code.
    #[must_use]
    pub const fn bits(self) -> usize {
        match self {
            Self::Eight => 8,
            Self::Four => 4,
        }
    }

    /// Returns the largest code.
    #[must_use]
    pub const fn levels(self) -> u32 {
        (1 << self.bits()) - 1
    }

    /// Returns the words of codes of a row's group.
    const fn words(self) -> usize {
        GROUP * self.bits() / 32
    }

    /// Returns the lines of a panel's group: scales and codes.
    const fn lines(self) -> usize {
        1 + self.words()
    }

    /// Returns the word of element `e` of a group and the position of its low bit.
    const fn place(self, e: usize) -> (usize, usize) {
        let span = LANE * self.words();
        (e % span / LANE, e % LANE * 8 + e / span * self.bits())
    }

    /// Returns the bytes of a matrix `[n, k]`.
    #[must_use]
    pub const fn matrix_bytes(self, n: usize, k: usize) -> usize {
        n.div_ceil(PANEL) * k.div_ceil(GROUP) * self.lines() * size_of::<Line>()
    }
}

/// A word of each row of a panel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C, align(64))]
struct Line([u32; PANEL]);

/// Minimum and step of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scale {
    /// Value `m` of code 0.
    pub min: bf16,
    /// Distance `s` between adjacent codes.
    pub step: bf16,
}

impl Scale {
    fn word(self) -> u32 {
        u32::from(self.step.to_bits()) << 16 | u32::from(self.min.to_bits())
    }

    fn of(word: u32) -> Self {
        Self { min: bf16::from_bits(word as u16), step: bf16::from_bits((word >> 16) as u16) }
    }
}

/// A quantised matrix `[n, k]`.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantMatrix {
    bits: QuantBits,
    n: usize,
    k: usize,
    lines: Vec<Line>,
}

/// Rows of a [`QuantMatrix`].
#[derive(Clone, Copy, Debug)]
pub struct QuantRows<'a> {
    bits: QuantBits,
    n: usize,
    k: usize,
    /// Index of the first row within its panel.
    first: usize,
    /// Lines from the panel of the first row to that of the last.
    lines: &'a [Line],
}

impl QuantMatrix {
    /// Quantises rows on several threads; `row(i, buffer of k)` fills in row `i`, so that the complete matrix never
    /// exists in f32. Returns `None` if a group's range is not finite.
    #[must_use]
    pub fn from_rows(
        bits: QuantBits,
        n: usize,
        k: usize,
        row: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Option<Self> {
        let panel_lines = k.div_ceil(GROUP) * bits.lines();
        let mut lines = vec![Line::default(); n.div_ceil(PANEL) * panel_lines];
        let panels = lines.chunks_mut(panel_lines.max(1)).enumerate();
        let fits = parallel::map(panels, n * k, |(at, lines)| {
            let mut buffer = vec![0.0; k];
            (0..PANEL.min(n - at * PANEL)).all(|r| {
                row(at * PANEL + r, &mut buffer);
                encode(bits, &buffer, r, lines)
            })
        });
        fits.into_iter().all(|fits| fits).then_some(Self { bits, n, k, lines })
    }

    /// Returns all rows, for kernels.
    #[must_use]
    pub fn rows(&self) -> QuantRows<'_> {
        QuantRows { bits: self.bits, n: self.n, k: self.k, first: 0, lines: &self.lines }
    }

    #[must_use]
    pub fn bits(&self) -> QuantBits {
        self.bits
    }

    /// Returns the bytes of codes and scales.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Returns codes and scales row by row, the layout that GPUs read. A block is 16 words; word `i` holds the elements
    /// `i`, `i + 16`, `i + 32`, … of the block from its low bits up. A row has complete blocks, and a scale for each
    /// group in them.
    #[must_use]
    pub fn by_rows(&self) -> (Vec<u32>, Vec<Scale>) {
        const WORDS: usize = 16;
        let block = WORDS * 32 / self.bits.bits();
        let blocks = self.k.div_ceil(block);
        let mut codes = vec![0; self.n * blocks * WORDS];
        let mut scales = vec![Scale::default(); self.n * blocks * block / GROUP];
        for i in 0..self.n {
            let row = &mut codes[i * blocks * WORDS..][..blocks * WORDS];
            for p in 0..self.k {
                let code = self.rows().code(i, p);
                row[p / block * WORDS + p % WORDS] |= code << (p % block / WORDS * self.bits.bits());
            }
            let of_row = blocks * block / GROUP;
            for (g, scale) in scales[i * of_row..][..self.k.div_ceil(GROUP)].iter_mut().enumerate() {
                *scale = self.rows().scale(i, g);
            }
        }
        (codes, scales)
    }
}

/// Returns the largest bf16 that is not above `x`.
fn round_down(x: f32) -> bf16 {
    let cut = (x.to_bits() >> 16) as u16;
    // Truncation rounds towards zero, which is up for a negative number.
    bf16::from_bits(if x < 0.0 && x.to_bits() & 0xffff != 0 { cut + 1 } else { cut })
}

/// Returns the smallest bf16 that is not below `x ≥ 0`.
fn round_up(x: f32) -> bf16 {
    let cut = (x.to_bits() >> 16) as u16;
    bf16::from_bits(if x.to_bits() & 0xffff != 0 { cut + 1 } else { cut })
}

/// Encodes row `r` of a panel; returns `false` if a group's range is not finite.
fn encode(bits: QuantBits, row: &[f32], r: usize, panel: &mut [Line]) -> bool {
    let levels = bits.levels();
    for (group, lines) in row.chunks(GROUP).zip(panel.chunks_exact_mut(bits.lines())) {
        let min = group.iter().copied().fold(f32::INFINITY, f32::min);
        let max = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let min = round_down(min);
        let step = round_up((max - min.to_f32()) / levels as f32);
        if !(min.is_finite() && step.is_finite() && max.is_finite()) {
            return false;
        }
        lines[0].0[r] = Scale { min, step }.word();
        let (min, step) = (min.to_f64(), step.to_f64());
        for (e, &w) in group.iter().enumerate() {
            let code = if step > 0.0 { ((f64::from(w) - min) / step).round() } else { 0.0 };
            let (word, shift) = bits.place(e);
            lines[1 + word].0[r] |= (code as u32).min(levels) << shift;
        }
    }
    true
}

impl<'a> QuantRows<'a> {
    /// Returns the number of elements, `n · k`.
    #[must_use]
    pub fn len(self) -> usize {
        self.n * self.k
    }

    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    #[must_use]
    pub fn dims(self) -> (usize, usize) {
        (self.n, self.k)
    }

    #[must_use]
    pub fn bits(self) -> QuantBits {
        self.bits
    }

    /// Returns the bytes of codes and scales; a panel shared with other rows counts in part.
    #[must_use]
    pub fn num_bytes(self) -> usize {
        self.n * self.k.div_ceil(GROUP) * self.bits.lines() * size_of::<u32>()
    }

    /// Returns the lines of a panel.
    fn panel_lines(self) -> usize {
        self.k.div_ceil(GROUP) * self.bits.lines()
    }

    /// Returns rows `start..end`.
    #[must_use]
    pub fn rows(self, start: usize, end: usize) -> Self {
        assert!(start <= end && end <= self.n, "rows {start}..{end} of {}", self.n);
        let (start, n) = (self.first + start, end - start);
        let panels = start / PANEL..(start + n).div_ceil(PANEL);
        let lines = panels.start * self.panel_lines()..panels.end.max(panels.start) * self.panel_lines();
        Self { n, first: start % PANEL, lines: &self.lines[lines], ..self }
    }

    /// Returns the word of row `i` in line `at` of its group `g`.
    fn word(self, i: usize, g: usize, at: usize) -> u32 {
        let i = self.first + i;
        self.lines[i / PANEL * self.panel_lines() + g * self.bits.lines() + at].0[i % PANEL]
    }

    /// Returns the scale of group `g` of row `i`.
    #[must_use]
    pub fn scale(self, i: usize, g: usize) -> Scale {
        Scale::of(self.word(i, g, 0))
    }

    /// Returns the code of element `p` of row `i`.
    #[must_use]
    pub fn code(self, i: usize, p: usize) -> u32 {
        let (word, shift) = self.bits.place(p % GROUP);
        self.word(i, p / GROUP, 1 + word) >> shift & self.bits.levels()
    }

    /// Writes all rows as f32 to `out [n, k]`. Meant for pieces of bounded size: products never widen a complete
    /// weight.
    pub fn widen(self, out: &mut [f32]) {
        self.each_part(out, |out, w| widen_f32(out, w));
    }

    /// Widens like [`Self::widen`], rounded to bf16.
    pub(crate) fn widen_bf16(self, out: &mut [bf16]) {
        self.each_part(out, |out, w| widen_bf16(out, w));
    }

    fn each_part<T: Send>(self, out: &mut [T], widen: impl Fn(&mut [T], Self) + Sync) {
        let rows = self.n.div_ceil(4 * rayon::current_num_threads()).next_multiple_of(PANEL);
        let parts = out[..self.len()].chunks_mut((rows * self.k).max(1)).enumerate();
        parallel::map(parts, self.len() / 4, |(at, out)| {
            widen(out, self.rows(at * rows, self.n.min((at + 1) * rows)));
        });
    }
}

/// A number type that weights are widened to.
trait Widened: Copy + Default {
    fn of(x: f32) -> Self;
}

impl Widened for f32 {
    #[inline(always)]
    fn of(x: f32) -> Self {
        x
    }
}

impl Widened for bf16 {
    /// Rounds to nearest, ties to even; weights are finite.
    #[inline(always)]
    fn of(x: f32) -> Self {
        let bits = x.to_bits();
        Self::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }
}

simd_fn! {
    /// Widens every row of `w` to f32, compiled for each instruction set and vectorised.
    fn widen_f32<'a>(simd: S, out: &'a mut [f32], w: QuantRows<'a>) -> () {
        let _ = simd;
        widen_rows(out, w);
    }
}

simd_fn! {
    /// Widens every row of `w` to bf16.
    fn widen_bf16<'a>(simd: S, out: &'a mut [bf16], w: QuantRows<'a>) -> () {
        let _ = simd;
        widen_rows(out, w);
    }
}

#[inline(always)]
fn widen_rows<T: Widened>(out: &mut [T], w: QuantRows) {
    match w.bits {
        QuantBits::Eight => widen_panels::<T, 8>(out, w),
        QuantBits::Four => widen_panels::<T, 4>(out, w),
    }
}

#[inline(always)]
fn widen_panels<T: Widened, const BITS: usize>(out: &mut [T], w: QuantRows) {
    let words = GROUP * BITS / 32;
    for (at, panel) in w.lines.chunks_exact(w.panel_lines().max(1)).enumerate() {
        // Requested rows of this panel.
        let rows = (at * PANEL).max(w.first)..((at + 1) * PANEL).min(w.first + w.n);
        for (g, lines) in panel.chunks_exact(1 + words).enumerate() {
            let mut codes = [[0u8; GROUP]; PANEL];
            for (t, line) in lines[1..].iter().enumerate() {
                for (codes, word) in codes.iter_mut().zip(line.0) {
                    for part in 0..8 / BITS {
                        let word = if BITS == 8 { word } else { word >> (part * BITS) & 0x0f0f_0f0f };
                        let to = part * LANE * words + t * LANE;
                        codes[to..to + LANE].copy_from_slice(&word.to_le_bytes());
                    }
                }
            }
            for row in rows.clone() {
                let scale = Scale::of(lines[0].0[row % PANEL]);
                let (min, step) = (scale.min.to_f32(), scale.step.to_f32());
                let mut wide = [T::default(); GROUP];
                for (wide, code) in wide.iter_mut().zip(codes[row % PANEL]) {
                    // q · s is exact, so this has the bits of a fused multiply-add.
                    *wide = T::of(f32::from(code) * step + min);
                }
                let out = &mut out[(row - w.first) * w.k + g * GROUP..];
                let len = GROUP.min(w.k - g * GROUP);
                out[..len].copy_from_slice(&wide[..len]);
            }
        }
    }
}
