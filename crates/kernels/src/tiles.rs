//! Matrix products on AMX tiles: the blocked product of `gemm` for CPUs that multiply 16 × 32 by 32 × 16 bf16 numbers in
//! one instruction.
//!
//! The instruction has 32 times the rate of `f32` multiply-adds and sums in `f32`, but its factors are bf16. So a factor
//! is written as the sum of three bf16 numbers, `x = x₁ + x₂ + x₃`, each the rounded rest of the ones before. They hold
//! all 24 bits of an `f32`. Of the nine products of two such sums those below 2⁻²⁶ of the whole are left out:
//!
//! `x y ≈ x₁y₁ + x₁y₂ + x₂y₁ + x₂y₂ + x₁y₃ + x₃y₁`
//!
//! A bf16 weight is one number, which leaves three products, and those are exact. The error of a sum is that of adding up
//! in `f32`, as elsewhere; the tests compare with `f64`. Different from `f32` arithmetic: numbers below 2⁻¹²⁶ count as zero,
//! what a number has below that is lost, and a factor that rounds to infinity as bf16 (from 3.39·10³⁸) gives NaN. (Henry, Tang, Heinecke 2019, "Leveraging the
//! bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", arXiv 1904.06376.)
//!
//! Both operands are cut into tiles by `split` when they are packed. Pairs that the instruction adds up are elements `p`
//! and `p + 16` of 32 neighbours of the inner dimension, on both sides: so nothing has to be interleaved.
//!
//! Decoding multiplies few rows with weights that are read once, which packing would make dearer. [`Dots`] takes bf16 weights
//! as the left operand, whose tiles are rows as they stand in memory, and packs the rows of `x` as the right one, with
//! neighbours as pairs. `f32` weights would have to be split on the way, and vectors are as fast as that.
//!
//! An output element is the sum, in order, of the blocks of its inner dimension, each computed from zero in the same
//! order whatever stands beside it: its bits depend on the inner size alone.

use std::ops::Range;

use half::bf16;

use crate::Weight;
use crate::parallel::Shared;

/// Whether products run on matrix tiles: CPU and system have them, and they are not switched off.
#[must_use]
pub fn available() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return amx::available();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

/// Rows of the left operand, and where their products go.
pub(crate) struct Left<'a> {
    /// Element `(i, p)` is `from[i · outer + p · inner]`; one of the two is 1.
    pub from: &'a [f32],
    pub outer: usize,
    pub inner: usize,
    pub rows: usize,
    /// Row `i` begins at element `i · ldc`.
    pub c: Shared<'a>,
}

/// Columns of the right operand, and which columns of the output they make.
pub(crate) struct Right<'a> {
    /// Element `(p, j)` is `from[p · inner + j · outer]`; one of the two is 1. Not quantised.
    pub from: Weight<'a>,
    pub outer: usize,
    pub inner: usize,
    pub columns: usize,
    /// First column in a row of the output.
    pub at: usize,
    /// Added once if nothing is kept of what the output held.
    pub bias: Option<&'a [f32]>,
}

/// `c = left · right (+ bias)` for every left and every right operand, with `k` the inner size; plus what `c` held if
/// `old`. Returns whether this CPU can; if not, nothing has been written.
///
/// # Safety
/// The operands have all elements that sizes and strides name, and so have the outputs, which do not overlap.
#[inline]
pub(crate) unsafe fn multiply(lefts: &[Left], rights: &[Right], k: usize, ldc: usize, old: bool) -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if k > 0 && amx::available() {
        // SAFETY: the contract of this function, and the instructions exist.
        unsafe { amx::multiply(lefts, rights, k, ldc, old) };
        return true;
    }
    let _ = (lefts, rights, k, ldc, old);
    false
}

/// Elements that [`pack_rows`] writes.
pub(crate) fn packed_len(m: usize, k: usize) -> usize {
    // At most three parts of 16 or 32 rows, in words of two bf16.
    m.next_multiple_of(16) * k.next_multiple_of(32) * 3 / 2
}

/// Packs rows of `x` for [`Dots`]; only for CPUs with tiles.
pub(crate) fn pack_rows(to: &mut [f32], x: &[f32], stride: usize, m: usize, k: usize) {
    assert!(available() && to.len() >= packed_len(m, k));
    assert!(m == 0 || k == 0 || (m - 1) * stride + k <= x.len());
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    // SAFETY: the assertions.
    unsafe {
        amx::pack_rows(to.as_mut_ptr().cast(), x.as_ptr(), stride, m, k);
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    let _ = (to, x, stride);
}

/// Columns of `y [m, n] = x [m, k] · wᵀ + bias` for few rows and bf16 weights, single-threaded; only for CPUs with tiles.
///
/// The weights are the left operand, so that they come as they are, straight from memory: 32 of their rows at a time,
/// while the next 32 are asked for. The rows of `x` are the columns of the right operand.
pub(crate) struct Dots<'a> {
    /// Element `(0, 0)`.
    pub y: *mut f32,
    pub y_stride: usize,
    /// What [`pack_rows`] wrote.
    pub x: *const f32,
    /// `[n, k]`.
    pub w: &'a [bf16],
    pub bias: Option<&'a [f32]>,
    pub m: usize,
    pub k: usize,
    pub columns: Range<usize>,
    /// Row of `w` that this thread will probably need when it is done.
    pub after: usize,
    /// Whether the product is added to what `y` held.
    pub old: bool,
}

impl Dots<'_> {
    /// # Safety
    /// `w` and `bias` have all rows up to the end of the columns, `y` has these columns of `m` rows, and nothing else
    /// refers to them; [`available`], and `k > 0`.
    pub(crate) unsafe fn run(self) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        // SAFETY: by the contract.
        unsafe {
            amx::dots(&self);
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod amx {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::cell::RefCell;
    use std::ops::Range;
    use std::sync::OnceLock;

    use half::bf16;

    use super::{Dots, Left, Right};
    use crate::Weight;
    use crate::gemm::{self, Line};
    use crate::parallel::{Strips, part, tasks};
    use crate::simd::{self, Instructions, Simd};

    /// Elements of the inner dimension that one instruction takes.
    const STEP: usize = 32;
    /// Rows or columns of a tile.
    const SIDE: usize = 16;
    /// 32-bit words of a tile, each a pair of bf16.
    const TILE: usize = SIDE * SIDE;
    /// Rows of a group and columns of a panel: two tiles of either, which makes four tiles of the output.
    pub(crate) const GROUP: usize = 2 * SIDE;
    /// Parts of an `f32`.
    pub(crate) const PARTS: usize = 3;
    /// Words of two tiles: a part of 32 rows (or columns) at one step of the inner dimension.
    pub(crate) const PART: usize = 2 * TILE;
    /// Words of all parts of that.
    pub(crate) const BLOCK: usize = PARTS * PART;
    /// Groups of the left operand that are packed at a time, and words of them (16 MiB).
    const GROUPS: usize = 64;
    const PACKED_LEN: usize = 4 << 20;

    thread_local! {
        static LEFT: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
        static RIGHT: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    }

    /// Whether CPU and kernel have tiles for bf16, and portable code is not asked for.
    pub(crate) fn available() -> bool {
        static FOUND: OnceLock<bool> = OnceLock::new();
        *FOUND.get_or_init(detect) && simd::allowed(Instructions::Best)
    }

    fn detect() -> bool {
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        if !is_x86_feature_detected!("avx512f") || __cpuid(0).eax < 0x1d {
            return false;
        }
        let palette = __cpuid_count(0x1d, 1);
        __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
            // Eight tiles of 16 rows of 64 bytes.
            && palette.ebx >> 16 >= 8 && palette.ebx & 0xffff >= 64 && palette.ecx & 0xffff >= 16
            // SAFETY: asks that this process may use the tiles; changes nothing else.
            && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
    }

    /// The tiles of this thread while it multiplies: all eight have 16 rows, of 64 bytes, but those of the right operand
    /// and of the output may be narrower.
    pub(crate) struct Tiles;

    impl Tiles {
        /// # Safety
        /// The instructions exist.
        pub(crate) unsafe fn new() -> Self {
            // SAFETY: by the contract.
            unsafe { Self::narrow(SIDE) }
        }

        /// For right operands of `columns` columns in [`rows_1`].
        ///
        /// # Safety
        /// The instructions exist.
        unsafe fn narrow(columns: usize) -> Self {
            #[repr(C, align(64))]
            struct Config {
                palette: u8,
                start_row: u8,
                reserved: [u8; 14],
                row_bytes: [u16; 16],
                rows: [u8; 16],
            }
            let mut config =
                Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
            config.row_bytes[..8].fill(4 * columns as u16);
            config.row_bytes[4..6].fill(64);
            config.rows[..8].fill(16);
            // SAFETY: reads the 64 bytes of `config`.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
            Self
        }
    }

    impl Drop for Tiles {
        fn drop(&mut self) {
            // SAFETY: there are tiles if there is a `Tiles`.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }

    /// An element of an operand in memory.
    pub(crate) trait Element: Copy {
        /// How many bf16 numbers it is the sum of.
        const PARTS: usize;
        fn wide(self) -> f32;
        /// # Safety
        /// 16 elements are readable, and there is AVX-512.
        unsafe fn load(from: *const Self) -> __m512;
    }

    impl Element for f32 {
        const PARTS: usize = PARTS;
        fn wide(self) -> f32 {
            self
        }
        #[inline]
        #[target_feature(enable = "avx512f")]
        unsafe fn load(from: *const Self) -> __m512 {
            // SAFETY: by the contract.
            unsafe { _mm512_loadu_ps(from) }
        }
    }

    impl Element for bf16 {
        const PARTS: usize = 1;
        fn wide(self) -> f32 {
            self.to_f32()
        }
        #[inline]
        #[target_feature(enable = "avx512f")]
        unsafe fn load(from: *const Self) -> __m512 {
            // SAFETY: by the contract.
            let narrow = unsafe { _mm256_loadu_si256(from.cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)))
        }
    }

    /// Rows become columns.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn transpose(rows: &mut [__m512; SIDE]) {
        let mut half = *rows;
        for i in (0..SIDE).step_by(2) {
            half[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
            half[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
        }
        // Element `4 q + c` of what follows: column `4 · lane + c` of rows `4 q..4 q + 4`.
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

    /// `to [columns, rows] = fromᵀ`, both contiguous; `rows` and `columns` are multiples of 16.
    ///
    /// # Safety
    /// All elements are there, and AVX-512 is.
    #[target_feature(enable = "avx512f")]
    pub(crate) unsafe fn turn(to: *mut f32, from: *const f32, rows: usize, columns: usize) {
        for i in (0..rows).step_by(SIDE) {
            for j in (0..columns).step_by(SIDE) {
                let mut block = [_mm512_setzero_ps(); SIDE];
                for (r, x) in block.iter_mut().enumerate() {
                    // SAFETY: row i + r, columns j to j + 16.
                    *x = unsafe { _mm512_loadu_ps(from.add((i + r) * columns + j)) };
                }
                transpose(&mut block);
                for (r, x) in block.into_iter().enumerate() {
                    // SAFETY: as above, the other way round.
                    unsafe { _mm512_storeu_ps(to.add((j + r) * rows + i), x) };
                }
            }
        }
    }

    /// Writes `value` to the elements of `to [bits.len(), 32]` whose bit is not set.
    ///
    /// # Safety
    /// All elements are there, and AVX-512 is.
    #[target_feature(enable = "avx512f")]
    pub(crate) unsafe fn hide(to: *mut f32, bits: &[u32], value: f32) {
        let value = _mm512_set1_ps(value);
        for (i, &bits) in bits.iter().enumerate().filter(|(_, bits)| **bits != u32::MAX) {
            // SAFETY: row i.
            unsafe {
                let to = to.add(i * GROUP);
                _mm512_mask_storeu_ps(to, !bits as __mmask16, value);
                _mm512_mask_storeu_ps(to.add(SIDE), (!bits >> SIDE) as __mmask16, value);
            }
        }
    }

    /// The parts of 16 numbers, each in the upper halves of the words, for [`store_line`].
    #[inline(always)]
    pub(crate) fn cut<S: Simd>(simd: S, x: S::f32s) -> [S::u32s; PARTS] {
        let (top, half) = (simd.splat_u32s(0xffff_0000), simd.splat_u32s(0x8000));
        let bits = |x| simd.transmute_u32s_f32s(x);
        let first = simd.and_u32s(simd.add_u32s(bits(x), half), top);
        let rest = simd.sub_f32s(x, simd.transmute_f32s_u32s(first));
        let second = simd.and_u32s(simd.add_u32s(bits(rest), half), top);
        let rest = simd.sub_f32s(rest, simd.transmute_f32s_u32s(second));
        [first, second, simd.and_u32s(bits(rest), top)]
    }

    /// Writes a line of a tile for every part, of elements `p` and `p + 16` of the inner dimension.
    ///
    /// # Safety
    /// `to` is the line in the tile of the first part; vectors have 16 lanes.
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
            // SAFETY: by the contract.
            unsafe { to.add(q * PART).cast::<S::u32s>().write_unaligned(pair) };
        }
    }

    /// Writes a line of a tile of every part, part `q` to `to + q · part`: of the words `(low, high)` those of the mask.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn split_line<T: Element>(to: *mut u32, part: usize, mask: __mmask16, low: __m512, high: __m512) {
        let top = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let half = _mm512_set1_epi32(0x8000);
        let mut rest = [low, high];
        for q in 0..T::PARTS {
            let (mut a, mut b) = (_mm512_castps_si512(rest[0]), _mm512_castps_si512(rest[1]));
            // The last part has few enough bits to be taken as it is.
            if q + 1 < T::PARTS {
                (a, b) = (_mm512_add_epi32(a, half), _mm512_add_epi32(b, half));
            }
            let (a_top, b_top) = (_mm512_and_si512(a, top), _mm512_and_si512(b, top));
            let pair = _mm512_or_si512(_mm512_srli_epi32::<16>(a), b_top);
            // SAFETY: the tile of part `q` is writable.
            unsafe { _mm512_mask_storeu_epi32(to.add(q * part).cast(), mask, pair) };
            rest[0] = _mm512_sub_ps(rest[0], _mm512_castsi512_ps(a_top));
            rest[1] = _mm512_sub_ps(rest[1], _mm512_castsi512_ps(b_top));
        }
    }

    /// Writes the tiles of 16 rows (or columns) of an operand at one step of the inner dimension. Lines of memory are `line`
    /// apart, and the second element of a pair is `other` behind the first. With `turn`, lines of memory become columns of
    /// the tile, else lines.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn split<T: Element>(to: *mut u32, from: *const T, line: usize, other: usize, turn: bool) {
        // SAFETY: 16 lines of 32 elements, or 32 lines of 16, by the caller.
        unsafe {
            if !turn {
                for i in 0..SIDE {
                    let from = from.add(i * line);
                    split_line::<T>(to.add(i * SIDE), 2 * TILE, !0, T::load(from), T::load(from.add(other)));
                }
                return;
            }
            let (mut low, mut high) = ([_mm512_setzero_ps(); SIDE], [_mm512_setzero_ps(); SIDE]);
            for i in 0..SIDE {
                low[i] = T::load(from.add(i * line));
            }
            transpose(&mut low);
            for i in 0..SIDE {
                high[i] = T::load(from.add(i * line + other));
            }
            transpose(&mut high);
            for i in 0..SIDE {
                split_line::<T>(to.add(i * SIDE), 2 * TILE, !0, low[i], high[i]);
            }
        }
    }

    /// Words that a group or panel of `depth` elements of the inner dimension takes.
    fn panel_len(parts: usize, depth: usize) -> usize {
        depth.div_ceil(STEP) * parts * 2 * TILE
    }

    /// Packs `count ≤ 32` rows (or columns) with `depth` elements each, zero beyond: for every step of the inner dimension
    /// its parts, of each the two tiles.
    ///
    /// # Safety
    /// `to` has [`panel_len`] words, aligned; `from` all elements; AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(crate) unsafe fn pack<T: Element>(
        to: *mut u32,
        from: *const T,
        outer: usize,
        inner: usize,
        left: bool,
        count: usize,
        depth: usize,
    ) {
        let along = inner == 1;
        for p in (0..depth).step_by(STEP) {
            let steps = STEP.min(depth - p);
            for first in [0, SIDE] {
                let to = to.wrapping_add(p / STEP * T::PARTS * 2 * TILE + first / SIDE * TILE);
                let from = from.wrapping_add(p * inner + first * outer);
                let lines = SIDE.min(count.saturating_sub(first));
                // SAFETY: by the contract; of a tile that is not whole the elements that exist are copied.
                unsafe {
                    if steps == STEP && lines == SIDE {
                        let (line, other) = if along { (outer, SIDE) } else { (inner, SIDE * inner) };
                        split(to, from, line, other, along != left);
                        continue;
                    }
                    let mut whole = [0.0f32; SIDE * STEP];
                    let (o, i) = if along { (STEP, 1) } else { (1, SIDE) };
                    for line in 0..lines {
                        for p in 0..steps {
                            whole[line * o + p * i] = (*from.add(line * outer + p * inner)).wide();
                        }
                    }
                    let mut tiles = Tile3([0; PARTS * 2 * TILE]);
                    let (line, other) = if along { (STEP, SIDE) } else { (SIDE, SIDE * SIDE) };
                    split(tiles.0.as_mut_ptr(), whole.as_ptr(), line, other, along != left);
                    for q in 0..T::PARTS {
                        let at = q * 2 * TILE;
                        tiles.0.as_ptr().add(at).copy_to_nonoverlapping(to.add(at), TILE);
                    }
                }
            }
        }
    }

    #[repr(C, align(64))]
    struct Tile3([u32; PARTS * 2 * TILE]);

    #[repr(C, align(64))]
    pub(crate) struct Output(pub [f32; GROUP * GROUP]);

    /// Adds the product of tile `$i` (0 or 1) of the rows and tile `$j` of the columns to its accumulator.
    macro_rules! add {
        (0, 0) => {
            "tdpbf16ps tmm0, tmm4, tmm6"
        };
        (0, 1) => {
            "tdpbf16ps tmm1, tmm4, tmm7"
        };
        (1, 0) => {
            "tdpbf16ps tmm2, tmm5, tmm6"
        };
        (1, 1) => {
            "tdpbf16ps tmm3, tmm5, tmm7"
        };
    }
    /// Loads a tile of the rows (`a`) or columns (`b`) at an offset in bytes.
    macro_rules! load {
        (a 0, $at:literal) => {
            concat!("tileloadd tmm4, [{a} + {line} + ", $at, "]")
        };
        (a 1, $at:literal) => {
            concat!("tileloadd tmm5, [{a} + {line} + ", $at, " + 1024]")
        };
        (b 0, $at:literal) => {
            concat!("tileloadd tmm6, [{b} + {line} + ", $at, "]")
        };
        (b 1, $at:literal) => {
            concat!("tileloadd tmm7, [{b} + {line} + ", $at, " + 1024]")
        };
    }
    macro_rules! kernel {
        ($name:ident, $b_step:literal, before: [$($before:expr),*], step: [$($step:expr),*], next: [$($next:expr),*], last: [$($last:expr),*]) => {
            /// `c [32, 32] = a · b` for a packed group and a packed panel of `steps ≥ 1` steps.
            ///
            /// # Safety
            /// All of them are there, and this thread has its tiles.
            pub(crate) unsafe fn $name(c: *mut f32, a: *const u32, b: *const u32, steps: usize) {
                // SAFETY: by the contract.
                unsafe {
                    asm!(
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                        $($before,)*
                        "dec {steps}",
                        "jz 3f",
                        "2:",
                        $($step,)*
                        $($next,)*
                        "add {a}, 6144",
                        concat!("add {b}, ", $b_step),
                        "dec {steps}",
                        "jnz 2b",
                        "3:",
                        $($step,)*
                        $($last,)*
                        "tilestored [{c} + {c_line}], tmm0",
                        "tilestored [{c} + {c_line} + 64], tmm1",
                        "tilestored [{c} + {c_line} + 2048], tmm2",
                        "tilestored [{c} + {c_line} + 2048 + 64], tmm3",
                        a = inout(reg) a => _,
                        b = inout(reg) b => _,
                        steps = inout(reg) steps => _,
                        c = in(reg) c,
                        line = in(reg) 64usize,
                        c_line = in(reg) 4 * GROUP,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack)
                    );
                }
            }
        };
    }
    // Part `p` of the rows or columns stands at `2048 p`, the next step 6144 (2048 for one part) further. A pair of parts
    // shares an operand with the one before, and a tile is loaded as soon as its register is free. Of 44 such orders for three
    // parts, drawn at random, this was the fastest where two hyperthreads share a core; elsewhere they are alike.
    kernel!(
        multiply_wide, "6144",
        before: [load!(a 0, "0"), load!(b 1, "4096"), load!(a 1, "0"), load!(b 0, "4096")],
        step: [
            // Parts 0 and 2.
            add!(0, 1), add!(1, 1), load!(b 1, "2048"), add!(1, 0), add!(0, 0), load!(b 0, "2048"),
            // 0 and 1.
            add!(0, 0), add!(1, 0), add!(1, 1), load!(a 1, "2048"), add!(0, 1), load!(a 0, "2048"),
            // 1 and 1.
            add!(0, 0), add!(1, 0), load!(b 0, "0"), add!(1, 1), add!(0, 1), load!(b 1, "0"),
            // 1 and 0.
            add!(1, 1), add!(1, 0), load!(a 1, "4096"), add!(0, 1), add!(0, 0), load!(a 0, "4096"),
            // 2 and 0.
            add!(1, 1), add!(1, 0), load!(a 1, "0"), add!(0, 1), add!(0, 0), load!(a 0, "0")
        ],
        // 0 and 0, with the first tiles of the next step or without.
        next: [
            add!(0, 1), add!(1, 1), load!(b 1, "6144 + 4096"), add!(0, 0), load!(a 0, "6144"), add!(1, 0),
            load!(a 1, "6144"), load!(b 0, "6144 + 4096")
        ],
        last: [add!(0, 1), add!(1, 1), add!(0, 0), add!(1, 0)]
    );
    kernel!(
        multiply_narrow, "2048",
        before: [load!(a 0, "0"), load!(b 0, "0"), load!(b 1, "0"), load!(a 1, "0")],
        step: [
            add!(0, 0), add!(0, 1), load!(a 0, "2048"), add!(1, 0), add!(1, 1), load!(a 1, "2048"),
            add!(0, 0), add!(0, 1), load!(a 0, "4096"), add!(1, 0), add!(1, 1), load!(a 1, "4096")
        ],
        next: [
            add!(0, 0), add!(0, 1), load!(a 0, "6144"), add!(1, 0), load!(b 0, "2048"), add!(1, 1),
            load!(b 1, "2048"), load!(a 1, "6144")
        ],
        last: [add!(0, 0), add!(0, 1), add!(1, 0), add!(1, 1)]
    );

    /// Writes `rows × columns` of what a kernel computed.
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
                // SAFETY: one number per column.
                Some(bias) => unsafe { _mm512_maskz_loadu_ps(mask, bias.as_ptr().add(v * SIDE)) },
                None => _mm512_setzero_ps(),
            };
            for i in 0..rows {
                // SAFETY: row i, and of its columns those of the mask.
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

    fn parts(of: Weight) -> usize {
        if matches!(of, Weight::Bf16(_)) { 1 } else { PARTS }
    }

    /// A buffer of 32-bit words in lines.
    pub(crate) fn words(scratch: &mut Vec<Line>, len: usize) -> *mut u32 {
        gemm::reserve(scratch, len).as_mut_ptr().cast()
    }

    /// Where packed words go that several threads write.
    #[derive(Clone, Copy)]
    pub(crate) struct Packed(pub *mut u32);
    // SAFETY: tasks write disjoint groups, and read when all are written.
    unsafe impl Send for Packed {}
    // SAFETY: as above.
    unsafe impl Sync for Packed {}

    impl Packed {
        pub(crate) fn at(self, offset: usize) -> *mut u32 {
            self.0.wrapping_add(offset)
        }
    }

    /// See the function of the same name outside.
    ///
    /// # Safety
    /// Its contract, and [`available`].
    pub(super) unsafe fn multiply(lefts: &[Left], rights: &[Right], k: usize, ldc: usize, old: bool) {
        // Operand and first row of every group.
        let groups: Vec<(usize, usize)> = lefts
            .iter()
            .enumerate()
            .flat_map(|(at, left)| (0..left.rows).step_by(GROUP).map(move |row| (at, row)))
            .collect();
        let blocks: Vec<Range<usize>> = gemm::blocks(k, STEP).collect();
        let widths: Vec<usize> = rights.iter().map(|right| right.columns).collect();
        let mut packed = LEFT.take();
        for groups in groups.chunks(GROUPS) {
            let mut rest = &blocks[..];
            while let Some(first) = rest.first() {
                let fit = PACKED_LEN / (groups.len() * PARTS * GROUP / 2);
                let take = rest.iter().take_while(|block| block.end - first.start <= fit).count().max(1);
                let (now, later) = rest.split_at(take);
                rest = later;
                let depth: usize = now.iter().map(ExactSizeIterator::len).sum();
                // Blocks begin at multiples of a step.
                let place = |block: &Range<usize>, group: usize| {
                    panel_len(PARTS, block.start - first.start) * groups.len()
                        + panel_len(PARTS, block.len()) * group
                };
                let left = Packed(words(&mut packed, panel_len(PARTS, depth) * groups.len()));
                tasks(now.len() * groups.len(), depth * groups.len() * GROUP, |i| {
                    let (block, group) = (&now[i / groups.len()], i % groups.len());
                    let (at, row) = groups[group];
                    let Left { from, outer, inner, rows, .. } = lefts[at];
                    let count = GROUP.min(rows - row);
                    let from = from[row * outer + block.start * inner..].as_ptr();
                    // SAFETY: tasks write different groups; the rest is the contract.
                    unsafe {
                        pack(left.at(place(block, group)), from, outer, inner, true, count, block.len())
                    };
                });
                let strips = Strips::even(&widths, groups.len() * GROUP, GROUP);
                let work = depth * groups.len() * widths.iter().sum::<usize>();
                tasks(strips.len(), work, |i| {
                    let (at, columns, row_part) = strips.get(i);
                    let right = &rights[at];
                    let parts = parts(right.from);
                    let mut scratch = RIGHT.take();
                    // SAFETY: the instructions exist.
                    let tiles = unsafe { Tiles::new() };
                    let mut output = Output([0.0; GROUP * GROUP]);
                    for block in now {
                        let len = panel_len(parts, block.len());
                        let panels = words(&mut scratch, len * columns.len().div_ceil(GROUP));
                        for (j, column) in columns.clone().step_by(GROUP).enumerate() {
                            let (to, count) = (panels.wrapping_add(j * len), GROUP.min(columns.end - column));
                            let start = column * right.outer + block.start * right.inner;
                            // SAFETY: the contract.
                            unsafe {
                                let (outer, inner, depth) = (right.outer, right.inner, block.len());
                                match right.from {
                                    Weight::F32(w) => {
                                        pack(to, w[start..].as_ptr(), outer, inner, false, count, depth);
                                    }
                                    Weight::Bf16(w) => {
                                        pack(to, w[start..].as_ptr(), outer, inner, false, count, depth);
                                    }
                                    // Widened by the caller.
                                    Weight::Quantised(_) => {}
                                }
                            }
                        }
                        let old = old || block.start > 0;
                        for group in part(groups.len(), strips.row_parts, row_part) {
                            let (at, row) = groups[group];
                            let rows = GROUP.min(lefts[at].rows - row);
                            for (j, column) in columns.clone().step_by(GROUP).enumerate() {
                                let a = left.at(place(block, group)).cast_const();
                                let b = panels.wrapping_add(j * len).cast_const();
                                let c = lefts[at].c.ptr(row * ldc + right.at + column);
                                let count = GROUP.min(columns.end - column);
                                let bias = right.bias.filter(|_| block.start == 0);
                                let bias = bias.map(|bias| &bias[column..column + count]);
                                let steps = block.len().div_ceil(STEP);
                                // What is written comes while the tiles are multiplied.
                                for i in 0..rows {
                                    simd::prefetch(c.wrapping_add(i * ldc));
                                    simd::prefetch(c.wrapping_add(i * ldc + SIDE));
                                }
                                // SAFETY: packed above; tasks write different columns or rows of the outputs.
                                unsafe {
                                    if parts == 1 {
                                        multiply_narrow(output.0.as_mut_ptr(), a, b, steps);
                                    } else {
                                        multiply_wide(output.0.as_mut_ptr(), a, b, steps);
                                    }
                                    store(c, ldc, &output, rows, count, bias, old);
                                }
                            }
                        }
                    }
                    drop(tiles);
                    RIGHT.set(scratch);
                });
            }
        }
        LEFT.set(packed);
    }
    /// Rows of weights that are multiplied together: two tiles.
    const ROWS: usize = 2 * SIDE;

    /// Columns of the tiles of `m` rows of `x`: narrow ones take less of the first-level cache.
    fn tile_width(m: usize) -> usize {
        if m <= 4 {
            4
        } else if m <= 8 {
            8
        } else {
            SIDE
        }
    }

    /// Rows of `x` that are multiplied together: first, number, and how many tiles they take.
    fn chunks(m: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..m).step_by(ROWS).map(move |i| (i, ROWS.min(m - i), ROWS.min(m - i).div_ceil(SIDE)))
    }

    /// See the function of the same name outside: for every chunk of rows and every step its parts, of each the tiles. Line
    /// `p` of a tile holds elements `2 p` and `2 p + 1` of every row.
    ///
    /// # Safety
    /// `to` has the length, `x` all rows; AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn pack_rows(to: *mut u32, x: *const f32, stride: usize, m: usize, k: usize) {
        let width = tile_width(m);
        let lane = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let next = _mm512_add_epi32(lane, _mm512_set1_epi32(1));
        let mut to = to;
        for (first, rows, tiles) in chunks(m) {
            for p in (0..k).step_by(STEP) {
                let bits = (1u64 << STEP.min(k - p)) - 1;
                let masks = [bits as __mmask16, (bits >> SIDE) as __mmask16];
                for tile in 0..tiles {
                    let (mut low, mut high) = ([_mm512_setzero_ps(); SIDE], [_mm512_setzero_ps(); SIDE]);
                    for i in 0..SIDE.min(rows - tile * SIDE) {
                        let from = x.wrapping_add((first + tile * SIDE + i) * stride + p);
                        // SAFETY: elements up to k of a row.
                        let (a, b) = unsafe {
                            (
                                _mm512_maskz_loadu_ps(masks[0], from),
                                _mm512_maskz_loadu_ps(masks[1], from.wrapping_add(SIDE)),
                            )
                        };
                        low[i] = _mm512_permutex2var_ps(a, lane, b);
                        high[i] = _mm512_permutex2var_ps(a, next, b);
                    }
                    transpose(&mut low);
                    transpose(&mut high);
                    let size = SIDE * width;
                    let mask = ((1u32 << width) - 1) as __mmask16;
                    for i in 0..SIDE {
                        let to = to.wrapping_add(tile * size + i * width);
                        // SAFETY: the tiles of this step lie inside `to`.
                        unsafe { split_line::<f32>(to, tiles * size, mask, low[i], high[i]) };
                    }
                }
                to = to.wrapping_add(PARTS * tiles * SIDE * width);
            }
        }
    }

    /// Asks for eight lines of weights.
    macro_rules! ask {
        () => {
            "prefetcht0 [{ahead}]
            prefetcht0 [{ahead} + 64]
            prefetcht0 [{ahead} + 128]
            prefetcht0 [{ahead} + 192]
            prefetcht0 [{ahead} + 256]
            prefetcht0 [{ahead} + 320]
            prefetcht0 [{ahead} + 384]
            prefetcht0 [{ahead} + 448]
            add {ahead}, 512"
        };
    }

    /// What a product of weights and packed rows reads and writes.
    struct Product {
        /// For every tile of rows of `x` two of 16 weights by `width` rows.
        out: *mut f32,
        w: *const bf16,
        /// Distance of two rows of the weights.
        w_bytes: usize,
        x: *const u32,
        width: usize,
        steps: usize,
        ahead: *const u8,
    }

    /// 32 rows of weights times one tile of rows of `x`, for at least one step. Asks for 2 KiB at every step.
    ///
    /// # Safety
    /// Operands and output are there, and this thread has tiles of that width.
    unsafe fn rows_1(of: &Product) {
        let &Product { out, w, w_bytes, x, width, steps, ahead } = of;
        let tile = SIDE * width;
        // SAFETY: by the contract.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1",
                "2:",
                "tileloadd tmm4, [{w} + {w_bytes}]", ask!(),
                "tileloadd tmm6, [{x2} + {line}]", ask!(),
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{v} + {w_bytes}]",
                "tdpbf16ps tmm1, tmm5, tmm6",
                "tileloadd tmm7, [{x1} + {line}]", ask!(),
                "tdpbf16ps tmm0, tmm4, tmm7", "tdpbf16ps tmm1, tmm5, tmm7",
                "tileloadd tmm3, [{x0} + {line}]", ask!(),
                "tdpbf16ps tmm0, tmm4, tmm3", "tdpbf16ps tmm1, tmm5, tmm3",
                "add {w}, 64", "add {v}, 64",
                "add {x0}, {step}", "add {x1}, {step}", "add {x2}, {step}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {line}], tmm0",
                "tilestored [{d} + {line}], tmm1",
                w = inout(reg) w => _,
                v = inout(reg) w.byte_add(SIDE * w_bytes) => _,
                w_bytes = in(reg) w_bytes,
                x0 = inout(reg) x => _,
                x1 = inout(reg) x.add(tile) => _,
                x2 = inout(reg) x.add(2 * tile) => _,
                line = in(reg) 4 * width,
                step = in(reg) 4 * PARTS * tile,
                steps = inout(reg) steps => _,
                ahead = inout(reg) ahead => _,
                c = in(reg) out,
                d = in(reg) out.add(tile),
                out("tmm0") _, out("tmm1") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }

    /// As [`rows_1`] for two tiles of 16 rows of `x`.
    ///
    /// # Safety
    /// Operands and output are there, and this thread has whole tiles.
    unsafe fn rows_2(of: &Product) {
        let &Product { out, w, w_bytes, x, steps, ahead, .. } = of;
        // SAFETY: by the contract.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{w} + {w_bytes}]", ask!(),
                "tileloadd tmm6, [{x} + {line} + 4096]", ask!(),
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{v} + {w_bytes}]",
                "tdpbf16ps tmm1, tmm5, tmm6",
                "tileloadd tmm7, [{x} + {line} + 5120]",
                "tdpbf16ps tmm2, tmm4, tmm7", "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm6, [{x} + {line} + 2048]", ask!(),
                "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm5, tmm6",
                "tileloadd tmm7, [{x} + {line} + 3072]",
                "tdpbf16ps tmm2, tmm4, tmm7", "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm6, [{x} + {line}]", ask!(),
                "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm5, tmm6",
                "tileloadd tmm7, [{x} + {line} + 1024]",
                "tdpbf16ps tmm2, tmm4, tmm7", "tdpbf16ps tmm3, tmm5, tmm7",
                "add {w}, 64", "add {v}, 64", "add {x}, 6144",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {line}], tmm0",
                "tilestored [{c} + {line} + 1024], tmm1",
                "tilestored [{c} + {line} + 2048], tmm2",
                "tilestored [{c} + {line} + 3072], tmm3",
                w = inout(reg) w => _,
                v = inout(reg) w.byte_add(SIDE * w_bytes) => _,
                w_bytes = in(reg) w_bytes,
                x = inout(reg) x => _,
                line = in(reg) 64usize,
                steps = inout(reg) steps => _,
                ahead = inout(reg) ahead => _,
                c = in(reg) out,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }

    /// The last elements of 32 rows of weights, fewer than a step, zero beyond.
    #[repr(C, align(64))]
    struct Tail([bf16; ROWS * STEP]);

    /// See [`Dots`].
    ///
    /// # Safety
    /// The contract of its `run`.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn dots(of: &Dots) {
        let &Dots { w, m, k, ref columns, after, .. } = of;
        let width = tile_width(m);
        let n = columns.end;
        // Of fewer rows than are multiplied together a copy is read.
        let mut few = Vec::new();
        let w = if n < ROWS {
            few.resize(ROWS * k, bf16::ZERO);
            few[..n * k].copy_from_slice(&w[..n * k]);
            &few[..]
        } else {
            &w[..n * k]
        };
        // SAFETY: the instructions exist.
        let tiles = unsafe { Tiles::narrow(width) };
        let (mut sum, mut more) = (Output([0.0; GROUP * GROUP]), Output([0.0; GROUP * GROUP]));
        let mut tail = Tail([bf16::ZERO; ROWS * STEP]);
        for j in columns.clone().step_by(ROWS) {
            // The last rows are multiplied with some before them.
            let first = j.min(n.max(ROWS) - ROWS);
            let rows = &w[first * k..(first + ROWS) * k];
            let next = of.w.as_ptr().wrapping_add(if j + ROWS < n { j + ROWS } else { after } * k);
            if !k.is_multiple_of(STEP) {
                for (to, row) in tail.0.chunks_exact_mut(STEP).zip(rows.chunks_exact(k)) {
                    to[..k % STEP].copy_from_slice(&row[k - k % STEP..]);
                }
            }
            let mut x = of.x.cast::<u32>();
            for (i, count, tiles) in chunks(m) {
                let mut ahead = next.cast::<u8>();
                for block in gemm::blocks(k, STEP) {
                    let parts = [
                        (rows[block.start..].as_ptr(), 2 * k, block.len() / STEP),
                        (tail.0.as_ptr(), 2 * STEP, usize::from(!block.len().is_multiple_of(STEP))),
                    ];
                    for (at, (w, w_bytes, steps)) in parts.into_iter().enumerate() {
                        if steps == 0 {
                            continue;
                        }
                        let begins = block.start == 0 && (at == 0 || block.len() < STEP);
                        let to = if begins { &mut sum } else { &mut more };
                        let out = to.0.as_mut_ptr();
                        let product = Product { out, w, w_bytes, x, width, steps, ahead };
                        // SAFETY: 32 rows of weights, what was packed, and room for four tiles.
                        unsafe { if tiles == 1 { rows_1(&product) } else { rows_2(&product) } };
                        x = x.wrapping_add(steps * PARTS * tiles * SIDE * width);
                        ahead = ahead.wrapping_add(steps * ROWS * 2 * STEP);
                        if !begins {
                            let len = 2 * tiles * SIDE * width;
                            sum.0[..len].iter_mut().zip(&more.0[..len]).for_each(|(sum, more)| *sum += more);
                        }
                    }
                }
                for tile in 0..tiles {
                    let from = &sum.0[tile * 2 * SIDE * width..];
                    let rows = i + tile * SIDE..i + count.min((tile + 1) * SIDE);
                    // SAFETY: these rows and columns of y.
                    unsafe { store_rows(of, from, width, rows, first, j..n.min(j + ROWS)) };
                }
            }
        }
        drop(tiles);
    }

    /// Writes the products of 32 weights from `first` on: two tiles in `from`, of which those of `columns` count.
    ///
    /// # Safety
    /// These rows and columns of the output are there, and AVX-512.
    #[target_feature(enable = "avx512f")]
    unsafe fn store_rows(
        of: &Dots,
        from: &[f32],
        width: usize,
        rows: Range<usize>,
        first: usize,
        columns: Range<usize>,
    ) {
        let used = ((1u32 << width) - 1) as __mmask16;
        for (half, from) in from.chunks_exact(SIDE * width).take(2).enumerate() {
            let column = first + half * SIDE;
            let mut lines = [_mm512_setzero_ps(); SIDE];
            for (line, from) in lines.iter_mut().zip(from.chunks_exact(width)) {
                // SAFETY: `width` elements.
                *line = unsafe { _mm512_maskz_loadu_ps(used, from.as_ptr()) };
            }
            transpose(&mut lines);
            // Lanes of columns that are asked for.
            let below = |end: usize| (1u32 << end.saturating_sub(column).min(SIDE)) - 1;
            let mask = (below(columns.end) & !below(columns.start)) as __mmask16;
            let bias = match of.bias {
                // SAFETY: the lanes of the mask are weights.
                Some(bias) => unsafe { _mm512_maskz_loadu_ps(mask, bias.as_ptr().wrapping_add(column)) },
                None => _mm512_setzero_ps(),
            };
            for (row, line) in rows.clone().zip(lines) {
                let to = of.y.wrapping_add(row * of.y_stride + column);
                // SAFETY: the lanes of the mask are columns of this row.
                unsafe {
                    let mut sum = _mm512_add_ps(line, bias);
                    if of.old {
                        sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum);
                    }
                    _mm512_mask_storeu_ps(to, mask, sum);
                }
            }
        }
    }
}
