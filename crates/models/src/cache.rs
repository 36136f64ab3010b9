//! Keys and values of a group: the prompt's once, then one region for each completion.
//!
//! Memory is anonymous and mapped lazily: a region for the longest allowed completion costs address space, not
//! memory, until rows are written.

use candle_core::bail;
use memmap2::MmapMut;
use omnigrpo_kernels::attention::{self, AttentionLayout, QueryRange, Rows};
use omnigrpo_ops::AttentionHeads;

use crate::error::{ModelError, Result};

/// The cache of one group. Row layout of each layer's buffer: `prompt | slot 0 | slot 1 | …`, a row holding the keys
/// and then the values of one token, `2 · kv_width` f32.
pub struct GroupCache {
    layers: Vec<MmapMut>,
    prompt_rows: usize,
    slot_rows: usize,
    /// Rows written so far in each slot.
    lengths: Vec<usize>,
}

impl GroupCache {
    /// An empty cache for a prompt of `prompt_rows` tokens and `slots` completions of at most `slot_rows` tokens.
    ///
    /// # Errors
    /// No address space.
    pub fn new(
        layers: usize,
        heads: AttentionHeads,
        prompt_rows: usize,
        slots: usize,
        slot_rows: usize,
    ) -> Result<Self> {
        let bytes = (prompt_rows + slots * slot_rows) * 2 * heads.kv_width() * size_of::<f32>();
        let layers = (0..layers)
            .map(|_| MmapMut::map_anon(bytes.max(1)).map_err(ModelError::io("key-value cache")))
            .collect::<Result<_>>()?;
        Ok(Self { layers, prompt_rows, slot_rows, lengths: vec![0; slots] })
    }

    /// Tokens written in `slot` so far.
    #[must_use]
    pub fn slot_len(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    pub(crate) fn write_prompt(&mut self, layer: usize, packed: &[f32], heads: AttentionHeads) {
        let buffer = floats_mut(&mut self.layers[layer]);
        copy_kv(buffer, 0, packed, heads);
    }

    /// Appends the keys and values of `packed` to their slots and writes each query's attention over prompt and own
    /// slot into `out`.
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        packed: &[f32],
        slots: &[usize],
        heads: AttentionHeads,
        out: &mut [f32],
    ) {
        let width = heads.packed_width();
        let mut ranges = Vec::with_capacity(slots.len());
        let buffer = floats_mut(&mut self.layers[layer]);
        for (i, &slot) in slots.iter().enumerate() {
            let start = self.prompt_rows + slot * self.slot_rows;
            let len = self.lengths[slot];
            copy_kv(buffer, start + len, &packed[i * width..(i + 1) * width], heads);
            ranges.push(QueryRange {
                queries: i..i + 1,
                keys: vec![0..self.prompt_rows, start..start + len + 1],
                causal: false,
            });
        }
        let stride = 2 * heads.kv_width();
        let buffer = floats_mut(&mut self.layers[layer]);
        attention::forward_decode(
            out,
            Rows { data: packed, stride: width, col: 0 },
            Rows { data: buffer, stride, col: 0 },
            Rows { data: buffer, stride, col: heads.kv_width() },
            &AttentionLayout { ranges },
            heads.shape(),
            heads.scale(),
        );
    }

    pub(crate) fn advance(&mut self, slots: &[usize]) {
        for &slot in slots {
            self.lengths[slot] += 1;
        }
    }

    /// Checks that `slot` can take another token.
    ///
    /// # Errors
    /// A full slot.
    pub fn check_room(&self, slot: usize) -> candle_core::Result<()> {
        if self.lengths.get(slot).is_none_or(|&len| len >= self.slot_rows) {
            bail!(
                "key-value cache: slot {slot} of {} is full at {} tokens",
                self.lengths.len(),
                self.slot_rows
            );
        }
        Ok(())
    }
}

fn floats_mut(map: &mut MmapMut) -> &mut [f32] {
    bytemuck::cast_slice_mut(&mut map[..])
}

fn copy_kv(buffer: &mut [f32], first_row: usize, packed: &[f32], heads: AttentionHeads) {
    let kv = 2 * heads.kv_width();
    for (row, from) in packed.chunks_exact(heads.packed_width()).enumerate() {
        let at = (first_row + row) * kv;
        buffer[at..at + kv].copy_from_slice(&from[heads.q_width()..]);
    }
}
