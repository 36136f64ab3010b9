//! Products of few rows with bf16 weights.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::Dots;
use super::amx::{GROUP, Output, SIDE, STEP, Tiles, transpose};
use crate::gemm;

/// Number of weight rows that are multiplied together: two tiles.
const ROWS: usize = 2 * SIDE;

/// Returns the number of columns in the tiles of `m` rows of `x`. Narrow tiles take less space in the first-level cache.
fn tile_width(m: usize) -> usize {
    if m <= 4 {
        4
    } else if m <= 8 {
        8
    } else {
        SIDE
    }
}

/// Divides `m` rows of `x` into chunks that are multiplied together. Returns the first row, the number of rows and the number of
/// tiles of each chunk.
fn chunks(m: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..m).step_by(ROWS).map(move |i| (i, ROWS.min(m - i), ROWS.min(m - i).div_ceil(SIDE)))
}

/// Packs rows for [`super::pack_rows`]: the rounded tiles of every chunk of rows and every step. Line `p` of a tile has the
/// elements `2 p` and `2 p + 1` of every row.
///
/// # Safety
/// `to` must have the required length, `x` must have all rows, and the CPU must have the instructions.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn pack_rows(to: *mut u32, x: *const f32, stride: usize, m: usize, k: usize) {
    let width = tile_width(m);
    let used = ((1u32 << width) - 1) as __mmask16;
    let mut to = to;
    for (first, rows, tiles) in chunks(m) {
        for p in (0..k).step_by(STEP) {
            let bits = (1u64 << STEP.min(k - p)) - 1;
            let masks = [bits as __mmask16, (bits >> SIDE) as __mmask16];
            for tile in 0..tiles {
                let mut words = [_mm512_setzero_ps(); SIDE];
                for (i, words) in words.iter_mut().enumerate().take(rows - tile * SIDE) {
                    let from = x.wrapping_add((first + tile * SIDE + i) * stride + p);
                    // SAFETY: only elements up to k of a row are read, and the vectors have 64 bytes.
                    *words = unsafe {
                        let low = _mm512_maskz_loadu_ps(masks[0], from);
                        let high = _mm512_maskz_loadu_ps(masks[1], from.wrapping_add(SIDE));
                        std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low))
                    };
                }
                transpose(&mut words);
                for words in words {
                    // SAFETY: the tiles of this step are inside `to`.
                    unsafe { _mm512_mask_storeu_ps(to.cast(), used, words) };
                    to = to.wrapping_add(width);
                }
            }
        }
    }
}

/// Prefetches eight lines of weights.
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

/// Operands and output of a product of weights and packed rows.
struct Product {
    /// Output. For every tile of rows of `x`, it has two tiles of 16 weights by `width` rows.
    out: *mut f32,
    w: *const bf16,
    /// Distance between adjacent weight rows, in bytes.
    w_bytes: usize,
    x: *const u32,
    width: usize,
    steps: usize,
    ahead: *const u8,
}

/// Multiplies 32 weight rows by one tile of rows of `x`, for at least one step. Prefetches 2 KiB at every step.
///
/// # Safety
/// Operands and output must be in bounds, and this thread must have configured tiles of that width.
unsafe fn rows_1(of: &Product) {
    let &Product { out, w, w_bytes, x, width, steps, ahead } = of;
    let tile = SIDE * width;
    // SAFETY: guaranteed by this function's contract.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1",
            "2:",
            "tileloadd tmm5, [{x} + {line}]", ask!(),
            "tileloadd tmm4, [{w} + {w_bytes}]", ask!(),
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm4, [{v} + {w_bytes}]", ask!(),
            "tdpbf16ps tmm1, tmm4, tmm5", ask!(),
            "add {w}, 64", "add {v}, 64", "add {x}, {step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c} + {line}], tmm0",
            "tilestored [{d} + {line}], tmm1",
            w = inout(reg) w => _,
            v = inout(reg) w.byte_add(SIDE * w_bytes) => _,
            w_bytes = in(reg) w_bytes,
            x = inout(reg) x => _,
            line = in(reg) 4 * width,
            step = in(reg) 4 * tile,
            steps = inout(reg) steps => _,
            ahead = inout(reg) ahead => _,
            c = in(reg) out,
            d = in(reg) out.add(tile),
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _,
            options(nostack)
        );
    }
}

/// Multiplies 32 weight rows like [`rows_1`], but by two tiles of 16 rows of `x`.
///
/// # Safety
/// Operands and output must be in bounds, and this thread must have configured full tiles.
unsafe fn rows_2(of: &Product) {
    let &Product { out, w, w_bytes, x, steps, ahead, .. } = of;
    // SAFETY: guaranteed by this function's contract.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            "tileloadd tmm5, [{x} + {line}]", ask!(),
            "tileloadd tmm4, [{w} + {w_bytes}]", ask!(),
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm5, [{x} + {line} + 1024]", ask!(),
            "tdpbf16ps tmm2, tmm4, tmm5",
            "tileloadd tmm4, [{v} + {w_bytes}]", ask!(),
            "tdpbf16ps tmm3, tmm4, tmm5",
            "tileloadd tmm5, [{x} + {line}]",
            "tdpbf16ps tmm1, tmm4, tmm5",
            "add {w}, 64", "add {v}, 64", "add {x}, 2048",
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
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            options(nostack)
        );
    }
}

/// The last elements of 32 weight rows, if they are fewer than a step. They are padded with zeros.
#[repr(C, align(64))]
struct Tail([bf16; ROWS * STEP]);

/// Runs [`Dots`].
///
/// # Safety
/// The requirements of [`Dots::run`] must be met.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn run(of: &Dots) {
    let &Dots { w, m, k, ref columns, after, .. } = of;
    let width = tile_width(m);
    let n = columns.end;
    // If the weight has fewer rows than are multiplied together, a padded copy is read.
    let mut few = Vec::new();
    let w = if n < ROWS {
        few.resize(ROWS * k, bf16::ZERO);
        few[..n * k].copy_from_slice(&w[..n * k]);
        &few[..]
    } else {
        &w[..n * k]
    };
    // SAFETY: the CPU has the instructions.
    let tiles = unsafe { Tiles::narrow(width) };
    let (mut sum, mut more) = (Output([0.0; GROUP * GROUP]), Output([0.0; GROUP * GROUP]));
    let mut tail = Tail([bf16::ZERO; ROWS * STEP]);
    for j in columns.clone().step_by(ROWS) {
        // The last rows are multiplied together with some of the rows before them.
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
            for block in gemm::blocks(k, STEP, gemm::DEPTH) {
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
                    // SAFETY: 32 weight rows and the packed rows are in bounds, and the output has room for four tiles.
                    unsafe { if tiles == 1 { rows_1(&product) } else { rows_2(&product) } };
                    x = x.wrapping_add(steps * tiles * SIDE * width);
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
                // SAFETY: these rows and columns of y are in bounds.
                unsafe { store_rows(of, from, width, rows, first, j..n.min(j + ROWS)) };
            }
        }
    }
    drop(tiles);
}

/// Writes the products of the 32 weights from `first` on. `from` has two tiles, of which only `columns` are written.
///
/// # Safety
/// These rows and columns of the output must be in bounds, and the CPU must have AVX-512.
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
            // SAFETY: `from` has `width` elements.
            *line = unsafe { _mm512_maskz_loadu_ps(used, from.as_ptr()) };
        }
        transpose(&mut lines);
        // Mask of the lanes whose columns are requested.
        let below = |end: usize| (1u32 << end.saturating_sub(column).min(SIDE)) - 1;
        let mask = (below(columns.end) & !below(columns.start)) as __mmask16;
        let bias = match of.bias {
            // SAFETY: the lanes in the mask are weights.
            Some(bias) => unsafe { _mm512_maskz_loadu_ps(mask, bias.as_ptr().wrapping_add(column)) },
            None => _mm512_setzero_ps(),
        };
        for (row, line) in rows.clone().zip(lines) {
            let to = of.y.wrapping_add(row * of.y_stride + column);
            // SAFETY: the lanes in the mask are columns of this row.
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
