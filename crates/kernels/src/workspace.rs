//! Scratch memory that a thread keeps from one kernel to the next.
//!
//! A kernel takes a buffer out of its cell while it runs, and puts it back afterwards. A nested kernel finds an empty buffer.

use std::cell::Cell;

use crate::{attention, recurrent};

/// Number of floats in a cache line.
pub(crate) const LINE: usize = 16;

/// A cache line. Its alignment also aligns panels.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([f32; LINE]);

/// Returns the first `len` floats of `scratch`, after growing it if necessary.
pub(crate) fn reserve(scratch: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let lines = len.div_ceil(LINE);
    if scratch.len() < lines {
        scratch.resize(lines, Line([0.0; LINE]));
    }
    // SAFETY: a line consists of 16 floats without padding, and there are enough lines.
    unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), len) }
}

thread_local! {
    /// Panels of the right operand of a blocked product, for one task.
    pub(crate) static PANELS: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// Groups of the left operand of a blocked product, for all tasks; in decoding, packed rows.
    pub(crate) static GROUPS: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// A widened piece of a quantised weight.
    pub(crate) static WIDE: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// Logits of a block of rows and a chunk of the vocabulary.
    pub(crate) static LOGITS: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// Partial sums of the gradient with respect to the queries.
    pub(crate) static PARTIAL: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// Groups of the left operand of a product on tiles. `RIGHT` holds the panels of the right operand.
    pub(crate) static LEFT: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    pub(crate) static RIGHT: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// Keys and values that are packed for tiles, for all tasks.
    pub(crate) static PACKED: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// Scratch memory of one task of attention in vectors.
    pub(crate) static VECTOR: Cell<attention::vector::Scratch> = Cell::default();
    /// Scratch memory of one task of the gated delta rule.
    pub(crate) static DELTA: Cell<recurrent::DeltaScratch> = Cell::default();
    /// Scratch memory of one task of attention on tiles.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    pub(crate) static TILED: Cell<attention::tiled::Scratch> = Cell::default();
}
