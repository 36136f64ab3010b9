//! AMX tiles: packing of operands and products of packed operands.

use std::arch::asm;
use std::arch::x86_64::*;

use half::bf16;

use crate::simd::{Simd, prefetch};
use crate::workspace::{Line, reserve};

/// Number of elements of the inner dimension that one instruction processes.
pub(super) const STEP: usize = 32;
/// Number of rows or columns in a tile.
pub(super) const SIDE: usize = 16;
/// Number of 32-bit words in a tile. Each word is a pair of bf16.
pub(super) const TILE: usize = SIDE * SIDE;
/// Number of rows in a group and of columns in a panel: two tiles each, so that a product has four tiles.
pub(crate) const GROUP: usize = 2 * SIDE;
/// Number of bf16 parts into which an `f32` is split.
pub(crate) const PARTS: usize = 3;
/// Number of words in two tiles: one part of 32 rows (or columns) at one step of the inner dimension.
pub(crate) const PART: usize = 2 * TILE;
/// Number of words in all parts of 32 rows (or columns) at one step.
pub(crate) const BLOCK: usize = PARTS * PART;

/// Operand of `ldtilecfg`: the shape of each tile.
#[repr(C, align(64))]
pub(crate) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    pub(crate) row_bytes: [u16; 16],
    pub(crate) rows: [u8; 16],
}

impl Default for Config {
    /// Returns palette 1, the only palette with tiles. No tile is in use.
    fn default() -> Self {
        Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] }
    }
}

/// The tile configuration of this thread during a product. All tiles have 16 rows of 64 bytes, except that tiles of the right
/// operand and of the output may be narrower.
///
/// The kernels use six of the eight tiles. When the other hyperthread of a core is busy, there seem to be hardly more tile
/// registers than the program names: an instruction that writes a tile waits for a free register, unless few tiles have been
/// written since the configuration. In this state, products on Sapphire Rapids take 20 ns with six tiles instead of 30 to 40 ns,
/// and 16 ns with prefetched operands. When the core is free, they take 8 ns in any case.
pub(crate) struct Tiles;

impl Tiles {
    /// Configures complete tiles.
    ///
    /// # Safety
    /// The CPU must have the instructions.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: guaranteed by this function's contract.
        unsafe { Self::narrow(SIDE) }
    }

    /// Configures tiles for right operands of `columns` columns.
    ///
    /// # Safety
    /// The CPU must have the instructions.
    pub(super) unsafe fn narrow(columns: usize) -> Self {
        let mut config = Config::default();
        config.row_bytes[..6].fill(4 * columns as u16);
        config.row_bytes[LEFT] = 64;
        config.rows[..6].fill(16);
        // SAFETY: the instruction reads the 64 bytes of `config`.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a `Tiles` exists only if the CPU has tiles.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// An element type of an operand in memory.
pub(crate) trait Element: Copy {
    /// Loads the elements, starting at `from`, whose bits are set in `mask`. The others are zero.
    ///
    /// # Safety
    /// These elements must be readable, and the CPU must have AVX-512.
    unsafe fn load(from: *const Self, mask: __mmask16) -> __m512;
}

impl Element for f32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const Self, mask: __mmask16) -> __m512 {
        // SAFETY: guaranteed by this function's contract.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

impl Element for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(from: *const Self, mask: __mmask16) -> __m512 {
        // SAFETY: guaranteed by this function's contract.
        let narrow = unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)))
    }
}

/// Transposes a square of 16 × 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(rows: &mut [__m512; SIDE]) {
    let mut half = *rows;
    for i in (0..SIDE).step_by(2) {
        half[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        half[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    // In the next array, element `4 q + c` holds column `4 · lane + c` of rows `4 q..4 q + 4`.
    let mut quarter = half;
    for i in (0..SIDE).step_by(4) {
        for j in 0..2 {
            let (a, b) = (_mm512_castps_pd(half[i + j]), _mm512_castps_pd(half[i + j + 2]));
            quarter[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            quarter[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    for c in 0..4 {
        let [a, b, d, e] = [quarter[c], quarter[4 + c], quarter[8 + c], quarter[12 + c]];
        let (ab_even, ab_odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        let (de_even, de_odd) = (_mm512_shuffle_f32x4::<0x88>(d, e), _mm512_shuffle_f32x4::<0xdd>(d, e));
        rows[c] = _mm512_shuffle_f32x4::<0x88>(ab_even, de_even);
        rows[4 + c] = _mm512_shuffle_f32x4::<0x88>(ab_odd, de_odd);
        rows[8 + c] = _mm512_shuffle_f32x4::<0xdd>(ab_even, de_even);
        rows[12 + c] = _mm512_shuffle_f32x4::<0xdd>(ab_odd, de_odd);
    }
}

/// Computes `to [columns, rows] = fromᵀ`. Both are contiguous, and `rows` and `columns` are multiples of 16.
///
/// # Safety
/// All elements must be in bounds, and the CPU must have AVX-512.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn turn(to: *mut f32, from: *const f32, rows: usize, columns: usize) {
    for i in (0..rows).step_by(SIDE) {
        for j in (0..columns).step_by(SIDE) {
            let mut block = [_mm512_setzero_ps(); SIDE];
            for (r, x) in block.iter_mut().enumerate() {
                // SAFETY: row i + r and columns j to j + 16 are in bounds.
                *x = unsafe { _mm512_loadu_ps(from.add((i + r) * columns + j)) };
            }
            transpose(&mut block);
            for (r, x) in block.into_iter().enumerate() {
                // SAFETY: the transposed elements are in bounds too.
                unsafe { _mm512_storeu_ps(to.add((j + r) * rows + i), x) };
            }
        }
    }
}

/// Writes `value` to the elements of `to [bits.len(), 32]` whose bit is not set.
///
/// # Safety
/// All elements must be in bounds, and the CPU must have AVX-512.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn hide(to: *mut f32, bits: &[u32], value: f32) {
    let value = _mm512_set1_ps(value);
    for (i, &bits) in bits.iter().enumerate().filter(|(_, bits)| **bits != u32::MAX) {
        // SAFETY: row i is in bounds.
        unsafe {
            let to = to.add(i * GROUP);
            _mm512_mask_storeu_ps(to, !bits as __mmask16, value);
            _mm512_mask_storeu_ps(to.add(SIDE), (!bits >> SIDE) as __mmask16, value);
        }
    }
}

/// Splits 16 numbers into parts for [`store_line`]. Each part is in the upper halves of the words.
#[inline(always)]
pub(crate) fn cut<S: Simd>(simd: S, x: S::f32s) -> [S::u32s; PARTS] {
    let (top, half) = (simd.splat_u32s(0xffff_0000), simd.splat_u32s(0x8000));
    let bits = |x| simd.transmute_u32s_f32s(x);
    let first = simd.and_u32s(simd.add_u32s(bits(x), half), top);
    let rest = simd.sub_f32s(x, simd.transmute_f32s_u32s(first));
    let second = simd.and_u32s(bits(rest), top);
    let rest = simd.sub_f32s(rest, simd.transmute_f32s_u32s(second));
    [first, second, simd.and_u32s(bits(rest), top)]
}

/// Writes a line of a tile for every part, from the elements `p` and `p + 16` of the inner dimension.
///
/// # Safety
/// `to` must be the line in the tile of the first part, and vectors must have 16 lanes.
#[inline(always)]
pub(crate) unsafe fn store_line<S: Simd>(
    simd: S,
    to: *mut u32,
    low: [S::u32s; PARTS],
    high: [S::u32s; PARTS],
) {
    let half = simd.splat_u32s(16);
    for q in 0..PARTS {
        let pair = simd.or_u32s(simd.wrapping_dyn_shr_u32s(low[q], half), high[q]);
        // SAFETY: guaranteed by this function's contract.
        unsafe { to.add(q * PART).cast::<S::u32s>().write_unaligned(pair) };
    }
}

/// Writes a line of a tile for every part, from the words `(low, high)`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn split_line(to: *mut u32, low: __m512, high: __m512) {
    let top = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let half = _mm512_set1_epi32(0x8000);
    let mut rest = [low, high];
    for q in 0..PARTS {
        let (mut a, mut b) = (_mm512_castps_si512(rest[0]), _mm512_castps_si512(rest[1]));
        // The remainder after the first part has 16 bits, so its parts need no rounding.
        if q == 0 {
            (a, b) = (_mm512_add_epi32(a, half), _mm512_add_epi32(b, half));
        }
        let (a_top, b_top) = (_mm512_and_si512(a, top), _mm512_and_si512(b, top));
        let pair = _mm512_or_si512(_mm512_srli_epi32::<16>(a), b_top);
        // SAFETY: the tile of part `q` is writable.
        unsafe { _mm512_storeu_si512(to.add(q * PART).cast(), pair) };
        rest[0] = _mm512_sub_ps(rest[0], _mm512_castsi512_ps(a_top));
        rest[1] = _mm512_sub_ps(rest[1], _mm512_castsi512_ps(b_top));
    }
}

/// Rounds both arguments to bf16 and packs them into words. `low` is in the lower halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round(low: __m512, high: __m512) -> __m512i {
    const fn order() -> [u16; 2 * SIDE] {
        let mut order = [0; 2 * SIDE];
        let mut i = 0;
        while i < SIDE {
            (order[2 * i], order[2 * i + 1]) = (i as u16, (SIDE + i) as u16);
            i += 1;
        }
        order
    }
    const ORDER: [u16; 2 * SIDE] = order();
    // SAFETY: both types are plain vectors of 64 bytes.
    unsafe {
        let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER.as_ptr().cast()), both)
    }
}

/// The part of 16 lines of memory that exists: the number of lines, and a mask of the elements in each line.
#[derive(Clone, Copy)]
struct Lines {
    count: usize,
    mask: __mmask16,
}

/// Position in memory of the 16 lines that fill one half of a tile's words.
#[derive(Clone, Copy)]
struct Half<T> {
    from: *const T,
    /// Distance between adjacent lines.
    line: usize,
    /// Prefetch distance.
    ahead: usize,
    lines: Lines,
}

impl<T: Element> Half<T> {
    /// Loads line `i`. If `WHOLE`, all lines and elements exist.
    ///
    /// # Safety
    /// The part that `lines` describes must be readable, and the CPU must have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load<const WHOLE: bool>(&self, i: usize) -> __m512 {
        if !WHOLE && i >= self.lines.count {
            return _mm512_setzero_ps();
        }
        let from = self.from.wrapping_add(i * self.line);
        prefetch(from.wrapping_add(self.ahead));
        // SAFETY: guaranteed by this function's contract.
        unsafe { T::load(from, if WHOLE { !0 } else { self.lines.mask }) }
    }
}

/// Writes the tiles of 16 rows (or columns) of an operand at one step of the inner dimension. If `turn`, lines of memory become
/// columns of the tile; otherwise they become lines. If `WHOLE`, all lines and elements exist.
///
/// Loops are unrolled in the source, because closures would be compiled without the instructions.
///
/// # Safety
/// The requirements of [`pack`] must be met.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn split<T: Element, const N: usize, const WHOLE: bool>(
    to: *mut u32,
    low: &Half<T>,
    high: &Half<T>,
    turn: bool,
) {
    // SAFETY: guaranteed by this function's contract.
    unsafe {
        if !turn {
            for i in 0..SIDE {
                let (low, high) = (low.load::<WHOLE>(i), high.load::<WHOLE>(i));
                let to = to.add(i * SIDE);
                if N == 1 {
                    _mm512_storeu_si512(to.cast(), round(low, high))
                } else {
                    split_line(to, low, high)
                }
            }
            return;
        }
        let (mut a, mut b) = ([_mm512_setzero_ps(); SIDE], [_mm512_setzero_ps(); SIDE]);
        if N == 1 {
            for i in 0..SIDE {
                a[i] = _mm512_castsi512_ps(round(low.load::<WHOLE>(i), high.load::<WHOLE>(i)));
            }
            transpose(&mut a);
            for i in 0..SIDE {
                _mm512_storeu_ps(to.add(i * SIDE).cast(), a[i]);
            }
            return;
        }
        for i in 0..SIDE {
            a[i] = low.load::<WHOLE>(i);
        }
        transpose(&mut a);
        for i in 0..SIDE {
            b[i] = high.load::<WHOLE>(i);
        }
        transpose(&mut b);
        for i in 0..SIDE {
            split_line(to.add(i * SIDE), a[i], b[i]);
        }
    }
}

/// Returns the number of words in a group or panel of `depth` elements of the inner dimension.
pub(super) fn panel_len(parts: usize, depth: usize) -> usize {
    depth.div_ceil(STEP) * parts * PART
}

/// Packs `count ≤ 32` rows (or columns) of `depth` elements each, padded with zeros. Every step of the inner dimension has `N`
/// parts of two tiles each. If `N = 1`, the part is the rounded element.
///
/// # Safety
/// `to` must have [`panel_len`] words, all elements of `from` must be in bounds, and the CPU must have the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn pack<T: Element, const N: usize>(
    to: *mut u32,
    from: *const T,
    outer: usize,
    inner: usize,
    left: bool,
    count: usize,
    depth: usize,
) {
    let along = inner == 1;
    let (line, other) = if along { (outer, SIDE) } else { (inner, SIDE * inner) };
    let lanes = |count: usize| ((1u32 << count.min(SIDE)) - 1) as __mmask16;
    // Prefetch, because the rows are too short and too many for the hardware prefetcher.
    let ahead = 2 * STEP * inner;
    for p in (0..depth).step_by(STEP) {
        let deep = depth - p;
        for first in [0, SIDE] {
            let to = to.wrapping_add(p / STEP * N * PART + first / SIDE * TILE);
            let from = from.wrapping_add(p * inner + first * outer);
            let wide = count.saturating_sub(first);
            let half = |at: usize| {
                let deep = deep.saturating_sub(at * SIDE);
                let (count, mask) = if along { (wide, lanes(deep)) } else { (deep, lanes(wide)) };
                Half { from: from.wrapping_add(at * other), line, ahead, lines: Lines { count, mask } }
            };
            let (low, high) = (half(0), half(1));
            // SAFETY: guaranteed by this function's contract; `lines` describes the part that exists.
            unsafe {
                if deep >= STEP && wide >= SIDE {
                    split::<T, N, true>(to, &low, &high, along != left);
                } else {
                    split::<T, N, false>(to, &low, &high, along != left);
                }
            }
        }
    }
}

#[repr(C, align(64))]
pub(crate) struct Output(pub [f32; GROUP * GROUP]);

/// Tile number of the left operand. The next tile holds the right operand.
const LEFT: usize = 4;

/// Loads tile 0 or 1 of one part of the rows.
macro_rules! a {
    ($part:literal, $i:literal) => {
        concat!("tileloadd tmm4, [{a} + {line} + 2048 * ", $part, " + 1024 * ", $i, "]")
    };
}
/// Loads tile 0 or 1 of one part of the columns.
macro_rules! b {
    ($part:literal, $j:literal) => {
        concat!("tileloadd tmm5, [{b} + {line} + 2048 * ", $part, " + 1024 * ", $j, "]")
    };
}
/// Adds the product of the loaded tiles to an accumulator.
macro_rules! add {
    ($c:literal) => {
        concat!("tdpbf16ps tmm", $c, ", tmm4, tmm5")
    };
}
/// Prefetches lines of a later step.
macro_rules! ask {
    ($of:literal, $at:literal) => {
        concat!(
            "prefetcht0 [{",
            $of,
            "} + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $of,
            "} + 64 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $of,
            "} + 128 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $of,
            "} + 192 + ",
            $at,
            "]"
        )
    };
}
macro_rules! kernel {
    ($name:ident, $size:literal, $($step:expr),*) => {
        /// Computes `c [32, 32] = a · b` for a packed group and a packed panel of `steps ≥ 1` steps. Rows of `c` begin `ldc`
        /// elements apart.
        ///
        /// # Safety
        /// All elements must be in bounds, and this thread must have configured its tiles.
        pub(crate) unsafe fn $name(c: *mut f32, ldc: usize, a: *const u32, b: *const u32, steps: usize) {
            // SAFETY: guaranteed by this function's contract.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "2:",
                    $($step,)*
                    concat!("add {a}, ", $size),
                    concat!("add {b}, ", $size),
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{c} + {c_line}], tmm0",
                    "tilestored [{c} + {c_line} + 64], tmm1",
                    "tilestored [{d} + {c_line}], tmm2",
                    "tilestored [{d} + {c_line} + 64], tmm3",
                    a = inout(reg) a => _,
                    b = inout(reg) b => _,
                    steps = inout(reg) steps => _,
                    c = in(reg) c,
                    d = in(reg) c.add(SIDE * ldc),
                    line = in(reg) 64usize,
                    c_line = in(reg) 4 * ldc,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                    options(nostack)
                );
            }
        }
    };
}
// Part `p` of the rows or columns begins at byte `2048 p`. Consecutive products share a factor. The comments give the parts of
// rows and columns.
kernel!(
    multiply_wide,
    "6144",
    // Product of parts 0 and 2.
    a!(0, 0),
    b!(2, 0),
    add!(0),
    ask!("a", "6144 + 256 * 0"),
    ask!("b", "6144 + 256 * 0"),
    b!(2, 1),
    add!(1),
    ask!("a", "6144 + 256 * 1"),
    ask!("b", "6144 + 256 * 1"),
    a!(0, 1),
    add!(3),
    ask!("a", "6144 + 256 * 2"),
    ask!("b", "6144 + 256 * 2"),
    b!(2, 0),
    add!(2),
    ask!("a", "6144 + 256 * 3"),
    ask!("b", "6144 + 256 * 3"),
    // Product of parts 0 and 1.
    b!(1, 0),
    add!(2),
    ask!("a", "6144 + 256 * 4"),
    ask!("b", "6144 + 256 * 4"),
    a!(0, 0),
    add!(0),
    ask!("a", "6144 + 256 * 5"),
    ask!("b", "6144 + 256 * 5"),
    b!(1, 1),
    add!(1),
    ask!("a", "6144 + 256 * 6"),
    ask!("b", "6144 + 256 * 6"),
    a!(0, 1),
    add!(3),
    ask!("a", "6144 + 256 * 7"),
    ask!("b", "6144 + 256 * 7"),
    // Product of parts 1 and 1.
    a!(1, 0),
    add!(1),
    ask!("a", "6144 + 256 * 8"),
    ask!("b", "6144 + 256 * 8"),
    b!(1, 0),
    add!(0),
    ask!("a", "6144 + 256 * 9"),
    ask!("b", "6144 + 256 * 9"),
    a!(1, 1),
    add!(2),
    ask!("a", "6144 + 256 * 10"),
    ask!("b", "6144 + 256 * 10"),
    b!(1, 1),
    add!(3),
    ask!("a", "6144 + 256 * 11"),
    ask!("b", "6144 + 256 * 11"),
    // Product of parts 1 and 0.
    b!(0, 0),
    add!(2),
    ask!("a", "6144 + 256 * 12"),
    ask!("b", "6144 + 256 * 12"),
    a!(1, 0),
    add!(0),
    ask!("a", "6144 + 256 * 13"),
    ask!("b", "6144 + 256 * 13"),
    b!(0, 1),
    add!(1),
    ask!("a", "6144 + 256 * 14"),
    ask!("b", "6144 + 256 * 14"),
    a!(1, 1),
    add!(3),
    ask!("a", "6144 + 256 * 15"),
    ask!("b", "6144 + 256 * 15"),
    // Product of parts 2 and 0.
    a!(2, 0),
    add!(1),
    ask!("a", "6144 + 256 * 16"),
    ask!("b", "6144 + 256 * 16"),
    b!(0, 0),
    add!(0),
    ask!("a", "6144 + 256 * 17"),
    ask!("b", "6144 + 256 * 17"),
    a!(2, 1),
    add!(2),
    ask!("a", "6144 + 256 * 18"),
    ask!("b", "6144 + 256 * 18"),
    b!(0, 1),
    add!(3),
    ask!("a", "6144 + 256 * 19"),
    ask!("b", "6144 + 256 * 19"),
    // Product of parts 0 and 0.
    a!(0, 0),
    add!(1),
    ask!("a", "6144 + 256 * 20"),
    ask!("b", "6144 + 256 * 20"),
    b!(0, 0),
    add!(0),
    ask!("a", "6144 + 256 * 21"),
    ask!("b", "6144 + 256 * 21"),
    a!(0, 1),
    add!(2),
    ask!("a", "6144 + 256 * 22"),
    ask!("b", "6144 + 256 * 22"),
    b!(0, 1),
    add!(3),
    ask!("a", "6144 + 256 * 23"),
    ask!("b", "6144 + 256 * 23")
);
kernel!(
    multiply_rounded,
    "2048",
    a!(0, 0),
    b!(0, 0),
    add!(0),
    ask!("b", "4096"),
    ask!("b", "4096 + 256"),
    b!(0, 1),
    add!(1),
    ask!("b", "4096 + 512"),
    ask!("b", "4096 + 768"),
    a!(0, 1),
    add!(3),
    ask!("b", "4096 + 1024"),
    ask!("b", "4096 + 1280"),
    b!(0, 0),
    add!(2),
    ask!("b", "4096 + 1536"),
    ask!("b", "4096 + 1792")
);

/// Writes the first `rows × columns` elements of a kernel's output.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn store(
    c: *mut f32,
    ldc: usize,
    from: &Output,
    rows: usize,
    columns: usize,
    bias: Option<&[f32]>,
    old: bool,
) {
    let masks = [0, SIDE].map(|first| {
        let lanes = SIDE.min(columns.saturating_sub(first));
        ((1u32 << lanes) - 1) as __mmask16
    });
    for (v, mask) in masks.into_iter().enumerate() {
        if mask == 0 {
            continue;
        }
        let bias = match bias {
            // SAFETY: `bias` has one number per column.
            Some(bias) => unsafe { _mm512_maskz_loadu_ps(mask, bias.as_ptr().add(v * SIDE)) },
            None => _mm512_setzero_ps(),
        };
        for i in 0..rows {
            // SAFETY: row i and the columns in the mask are in bounds.
            unsafe {
                let to = c.add(i * ldc + v * SIDE);
                let mut sum = _mm512_load_ps(from.0.as_ptr().add(i * GROUP + v * SIDE));
                sum = _mm512_add_ps(sum, bias);
                if old {
                    sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to));
                }
                _mm512_mask_storeu_ps(to, mask, sum);
            }
        }
    }
}

/// Returns a scratch buffer of 32-bit words that is aligned to cache lines.
pub(crate) fn words(scratch: &mut Vec<Line>, len: usize) -> *mut u32 {
    reserve(scratch, len).as_mut_ptr().cast()
}

/// Destination of packed words, which several threads write.
#[derive(Clone, Copy)]
pub(crate) struct Packed(pub *mut u32);
// SAFETY: tasks write disjoint groups, and read only after all groups are written.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

impl Packed {
    pub(crate) fn at(self, offset: usize) -> *mut u32 {
        self.0.wrapping_add(offset)
    }
}
