//! Weight matrices of 8 or 4 bits per weight, for weights that are not trained.
//!
//! A row is divided into groups of [`GROUP`] weights. A group stores its minimum `m` and a step `s` in bf16, and for each weight
//! a code `q`. The stored weight is `ŵ = q·s + m`, with `q` in `0..=L`, where `L` is 255 or 15. Because `m` is rounded down and
//! `s` up, the codes cover the group. If `q` is rounded to nearest,
//!
//! `|ŵ − w| ≤ s/2 + 2⁻²⁴·|ŵ|`, `s ≤ 1.01·(max − m)/L`, `m ≥ min·(1 ± 2⁻⁷)`:
//!
//! the error is half a step, plus the rounding of `ŵ` itself (`q·s` is exact in f32). A weight takes 8.5 or 4.5 bits of memory.
//! The scheme is the affine one of Jacob et al. (arXiv 1712.05877), applied per group. For normally distributed weights, 4 bits
//! have the error of NF4 (Dettmers et al., arXiv 2305.14314) at the same size, and widening needs no table.
//!
//! The layout is designed for decoding, which reads the complete matrix for a few rows of inputs. [`PANEL`] rows are stored
//! together. Each group begins with the scales of all rows. The codes follow, four elements of every row at a time. A vector of
//! 32-bit lanes therefore holds adjacent rows, whose sums need no addition across lanes, and memory is read from start to end.
//! With 4 bits, the low half of a byte holds an element, and the high half holds the element 32 positions later.

mod rows;

use half::bf16;

use crate::parallel;

pub(crate) use rows::forward_rows;

/// Returns true if the CPU has fast products of bytes and the user has not disabled them.
pub(crate) fn multiplies_bytes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return rows::bytes::available();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Number of weights in a group, which share a minimum and a step.
pub const GROUP: usize = 64;
/// Number of rows in a panel, which are stored together.
pub const PANEL: usize = 16;
/// Number of elements of a row in a word of codes. With 8 bits, each element is one byte.
const LANE: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantBits {
    /// 8-bit codes with 256 levels.
    Eight,
    /// 4-bit codes with 16 levels.
    Four,
}

impl QuantBits {
    /// Returns the number of bits in a code.
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

    /// Returns the number of words that the codes of a row's group take.
    const fn words(self) -> usize {
        GROUP * self.bits() / 32
    }

    /// Returns the number of lines that a group of a panel takes: scales and codes.
    const fn lines(self) -> usize {
        1 + self.words()
    }

    /// Returns the index of the word that contains element `e` of a group, and the position of the element's low bit.
    const fn place(self, e: usize) -> (usize, usize) {
        let span = LANE * self.words();
        (e % span / LANE, e % LANE * 8 + e / span * self.bits())
    }

    /// Returns the number of bytes that a matrix `[n, k]` takes.
    #[must_use]
    pub const fn matrix_bytes(self, n: usize, k: usize) -> usize {
        n.div_ceil(PANEL) * k.div_ceil(GROUP) * self.lines() * size_of::<Line>()
    }
}

/// One 32-bit word for each row of a panel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C, align(64))]
struct Line([u32; PANEL]);

/// The minimum and the step of a group.
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

/// Consecutive rows of a [`QuantMatrix`].
#[derive(Clone, Copy, Debug)]
pub struct QuantRows<'a> {
    bits: QuantBits,
    n: usize,
    k: usize,
    /// Index of the first of these rows within its panel.
    first: usize,
    /// Lines of all panels from the first row's panel to the last row's panel.
    lines: &'a [Line],
}

impl QuantMatrix {
    /// Quantises rows on several threads. `row(i, buffer of k)` writes row `i`, so that the complete matrix never exists in f32.
    /// Returns `None` if the range of a group is not finite.
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

    /// Returns the number of bytes of the codes and scales.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Returns codes and scales row by row, in the layout that GPUs read.
    ///
    /// A block consists of 16 words. Word `i` holds the elements `i`, `i + 16`, `i + 32`, … of the block, starting at its low
    /// bits. A row consists of complete blocks, and has a scale for each group in them.
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

/// Returns the largest bf16 that is at most `x`.
fn round_down(x: f32) -> bf16 {
    let cut = (x.to_bits() >> 16) as u16;
    // Truncation rounds towards zero, so it rounds a negative number up.
    bf16::from_bits(if x < 0.0 && x.to_bits() & 0xffff != 0 { cut + 1 } else { cut })
}

/// Returns the smallest bf16 that is at least `x`, for `x ≥ 0`.
fn round_up(x: f32) -> bf16 {
    let cut = (x.to_bits() >> 16) as u16;
    bf16::from_bits(if x.to_bits() & 0xffff != 0 { cut + 1 } else { cut })
}

/// Encodes row `r` of a panel. Returns `false` if the range of a group is not finite.
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

    /// Returns the number of bytes of the codes and scales. If a panel also contains other rows, only the share of these rows
    /// counts.
    #[must_use]
    pub fn num_bytes(self) -> usize {
        self.n * self.k.div_ceil(GROUP) * self.bits.lines() * size_of::<u32>()
    }

    /// Returns the number of lines in a panel.
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

    /// Writes all rows as f32 to `out [n, k]`. The function is meant for pieces of bounded size: products never widen a complete
    /// weight.
    pub fn widen(self, out: &mut [f32]) {
        self.each_part(out, |out, w| widen_f32(out, w));
    }

    /// Widens all rows like [`Self::widen`], but rounds them to bf16.
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

/// A number type to which weights are widened.
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
    /// Rounds to nearest, ties to even. The value must be finite, as weights are.
    #[inline(always)]
    fn of(x: f32) -> Self {
        let bits = x.to_bits();
        Self::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }
}

simd_fn! {
    /// Widens every row of `w` to f32. The loop is compiled for each instruction set, and vectorised.
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
        // The rows of this panel that were requested.
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
                    // `q · s` is exact, so the result has the same bits as a fused multiply-add.
                    *wide = T::of(f32::from(code) * step + min);
                }
                let out = &mut out[(row - w.first) * w.k + g * GROUP..];
                let len = GROUP.min(w.k - g * GROUP);
                out[..len].copy_from_slice(&wide[..len]);
            }
        }
    }
}
