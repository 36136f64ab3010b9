//! The blocked matrix product on tiles.

use std::ops::Range;

use super::amx::{
    Element, GROUP, Output, Packed, SIDE, STEP, Tiles, multiply_rounded, multiply_wide, pack, panel_len,
    store, words,
};
use super::{Left, Right, pairs};
use crate::Stored;
use crate::gemm;
use crate::parallel::{Strips, part, tasks};
use crate::simd;
use crate::workspace::{LEFT, RIGHT};

/// Maximum number of groups of the left operand that are packed at a time. They take at most [`PACKED_LEN`] words, or consist of
/// a single block.
const GROUPS: usize = 64;
/// Maximum number of words in packed groups (16 MiB).
const PACKED_LEN: usize = 4 << 20;
/// Number of words of the right operand that a thread packs at a time. They stay in its second-level cache (1 MiB of 2).
const PANELS_LEN: usize = 1 << 18;
/// Number of elements of the inner dimension that are summed at a time. Outputs are read and written once per block. That costs
/// more than reading the left operand for fewer panels.
const DEPTH: usize = 1536;

/// Returns the blocks of the inner dimension. They depend on `k` alone.
pub(super) fn blocks(k: usize) -> impl Iterator<Item = Range<usize>> {
    gemm::blocks(k, STEP, DEPTH)
}

/// Number of groups of the left operand that a task packs.
const RUN: usize = 4;

/// Packs groups or panels. Each item gives the destination, the source, and the number of rows or columns.
///
/// If elements are not contiguous along the inner dimension, all items are packed together step by step. A line of memory is then
/// read only once, and each visit of a row reads more than a few elements.
///
/// # Safety
/// The requirements of [`pack`] must be met for each item.
unsafe fn pack_run<T: Element, const N: usize>(
    run: impl Iterator<Item = (*mut u32, *const T, usize)> + Clone,
    outer: usize,
    inner: usize,
    left: bool,
    depth: usize,
) {
    let step = if inner == 1 { depth } else { STEP };
    for p in (0..depth).step_by(step) {
        for (to, from, count) in run.clone() {
            let (to, from) = (to.wrapping_add(panel_len(N, p)), from.wrapping_add(p * inner));
            // SAFETY: guaranteed by this function's contract.
            unsafe { pack::<T, N>(to, from, outer, inner, left, count, step.min(depth - p)) };
        }
    }
}

/// Multiplies for [`super::multiply`]. `N` is the number of parts. It is one function, because the tasks that pack and those that
/// multiply share the places of the packed operands.
///
/// # Safety
/// The requirements of [`super::multiply`] must be met. The CPU must have the instructions, including tiles if `tiled` or if
/// there are several parts.
pub(super) unsafe fn multiply<const N: usize>(
    lefts: &[Left],
    rights: &[Right],
    k: usize,
    ldc: usize,
    old: bool,
    tiled: bool,
) {
    // The operand and the first row of every group.
    let groups: Vec<(usize, usize)> = lefts
        .iter()
        .enumerate()
        .flat_map(|(at, left)| (0..left.rows).step_by(GROUP).map(move |row| (at, row)))
        .collect();
    let blocks: Vec<Range<usize>> = blocks(k).collect();
    // The first block is the longest.
    let most = PANELS_LEN / panel_len(N, blocks.first().map_or(STEP, ExactSizeIterator::len));
    let widths: Vec<usize> = rights.iter().map(|right| right.columns).collect();
    let mut packed = LEFT.take();
    for groups in groups.chunks(GROUPS) {
        let mut rest = &blocks[..];
        while let Some(first) = rest.first() {
            let fit = PACKED_LEN / (groups.len() * N * GROUP / 2);
            let take = rest.iter().take_while(|block| block.end - first.start <= fit).count().max(1);
            let (now, later) = rest.split_at(take);
            rest = later;
            let depth: usize = now.iter().map(ExactSizeIterator::len).sum();
            // Blocks begin at multiples of a step.
            let place = |block: &Range<usize>, group: usize| {
                panel_len(N, block.start - first.start) * groups.len() + panel_len(N, block.len()) * group
            };
            let left = Packed(words(&mut packed, panel_len(N, depth) * groups.len()));
            let runs = groups.len().div_ceil(RUN);
            tasks(now.len() * runs, depth * groups.len() * GROUP, |i| {
                let (block, run) = (&now[i / runs], i % runs * RUN..groups.len().min((i % runs + 1) * RUN));
                // All left operands have these strides, as the contract requires.
                let Left { outer, inner, .. } = lefts[0];
                let group = |group: usize| {
                    let (at, row) = groups[group];
                    let Left { from, rows, .. } = lefts[at];
                    let from = from[row * outer + block.start * inner..].as_ptr();
                    (left.at(place(block, group)), from, GROUP.min(rows - row))
                };
                // SAFETY: tasks write different groups; this function's contract guarantees the rest.
                unsafe { pack_run::<_, N>(run.map(group), outer, inner, true, block.len()) };
            });
            let strips = Strips::even(&widths, groups.len() * GROUP, GROUP, most);
            let work = depth * groups.len() * widths.iter().sum::<usize>();
            tasks(strips.len(), work, |i| {
                let (at, columns, row_part) = strips.get(i);
                let right = &rights[at];
                let mut scratch = RIGHT.take();
                // SAFETY: the CPU has the instructions.
                let tiles = tiled.then(|| unsafe { Tiles::new() });
                let mut output = Output([0.0; GROUP * GROUP]);
                for block in now {
                    let len = panel_len(N, block.len());
                    let panels = words(&mut scratch, len * columns.len().div_ceil(GROUP));
                    let Right { outer, inner, .. } = *right;
                    let panel = |(j, column): (usize, usize)| {
                        let start = column * outer + block.start * inner;
                        (panels.wrapping_add(j * len), start, GROUP.min(columns.end - column))
                    };
                    let run = columns.clone().step_by(GROUP).enumerate().map(panel);
                    // SAFETY: guaranteed by this function's contract.
                    unsafe {
                        match right.from {
                            Stored::F32(w) => {
                                let run = run.map(|(to, start, count)| (to, w[start..].as_ptr(), count));
                                pack_run::<_, N>(run, outer, inner, false, block.len());
                            }
                            Stored::Bf16(w) => {
                                let run = run.map(|(to, start, count)| (to, w[start..].as_ptr(), count));
                                pack_run::<_, N>(run, outer, inner, false, block.len());
                            }
                            // The caller has already widened quantised weights.
                            Stored::Quantised(_) => {}
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
                            // Prefetch the output during the product of tiles.
                            for i in 0..rows {
                                simd::prefetch(c.wrapping_add(i * ldc));
                                simd::prefetch(c.wrapping_add(i * ldc + SIDE));
                            }
                            // Complete tiles to which nothing is added are stored directly in the output.
                            let whole = rows == GROUP && count == GROUP && bias.is_none() && !old;
                            let (to, stride) = if whole { (c, ldc) } else { (output.0.as_mut_ptr(), GROUP) };
                            // SAFETY: the operands were packed above, and tasks write different columns or rows of the outputs.
                            unsafe {
                                match (N, &tiles) {
                                    (1, None) => pairs::multiply(to, stride, a, b, block.len(), rows),
                                    (1, Some(_)) => multiply_rounded(to, stride, a, b, steps),
                                    _ => multiply_wide(to, stride, a, b, steps),
                                }
                                if !whole {
                                    store(c, ldc, &output, rows, count, bias, old);
                                }
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
