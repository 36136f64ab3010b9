//! Key-value cache of a group: one region for the shared prompt, followed by one region for each completion.

use memmap2::MmapMut;

use crate::attention::AttentionHeads;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::recurrent::States;
use crate::rows::Rows;

/// The cache of one group. The buffer of each layer has the rows `prompt | slot 0 | slot 1 | …`. A row contains the keys of one
/// token, followed by the values: `2 · kv_width` numbers.
pub struct GroupCache {
    pub(crate) store: Store,
    /// States of recurrent layers, if the model has such layers.
    pub(crate) states: Option<States>,
    pub(crate) device: Device,
    layers: usize,
    pub(crate) heads: AttentionHeads,
    pub(crate) prompt_rows: usize,
    pub(crate) slot_rows: usize,
    /// Number of rows written in each slot.
    pub(crate) lengths: Vec<usize>,
}

/// Storage of a cache, by layer.
pub(crate) enum Store {
    /// Anonymous memory that is mapped lazily. The region for the longest allowed completion occupies address space, but it uses
    /// no memory until rows are written.
    Cpu(Vec<MmapMut>),
    #[cfg(feature = "twin")]
    Twin(Vec<Vec<f64>>),
    Gpu(super::Pages),
    /// Size of a full cache, which is counted but not allocated.
    Outline(#[allow(dead_code)] crate::outline::Span),
}

impl GroupCache {
    /// Creates an empty cache for a prompt of `prompt_rows` tokens and `slots` completions of at most `slot_rows` tokens. Returns
    /// an error if address space is unavailable.
    pub fn new(
        device: Device,
        layers: usize,
        heads: AttentionHeads,
        prompt_rows: usize,
        slots: usize,
        slot_rows: usize,
    ) -> std::io::Result<Self> {
        let store = device.backend().cache(layers, slots, prompt_rows + slots * slot_rows, heads)?;
        Ok(Self {
            store,
            states: None,
            device,
            layers,
            heads,
            prompt_rows,
            slot_rows,
            lengths: vec![0; slots],
        })
    }

    /// Writes the keys and values of a prompt, given its packed rows.
    pub fn write_prompt(&mut self, layer: usize, qkv: &Rows, heads: AttentionHeads) -> Result<()> {
        if qkv.rows() != self.prompt_rows || qkv.cols() != heads.packed_width() {
            let what = format!("{:?} for a prompt of {} rows", qkv.dims(), self.prompt_rows);
            return Err(Error::shape("key-value cache", what));
        }
        self.check(layer, qkv, heads)?;
        qkv.device().backend().cache_prompt(self, layer, qkv, heads);
        Ok(())
    }

    /// Returns an error unless the cache is on the device of `qkv` and has this layer with these heads.
    pub(crate) fn check(&self, layer: usize, qkv: &Rows, heads: AttentionHeads) -> Result<()> {
        self.device.check("key-value cache", qkv)?;
        if layer >= self.layers || heads != self.heads {
            let what = format!(
                "layer {layer} with {heads} in a cache of {} layers with {}",
                self.layers, self.heads
            );
            return Err(Error::shape("key-value cache", what));
        }
        Ok(())
    }

    /// Returns an error if the cache is on another device.
    pub(crate) fn check_device(&self, expected: Device) -> Result<()> {
        match self.device {
            got if got == expected => Ok(()),
            got => Err(Error::Device { op: "key-value cache", got, expected }),
        }
    }

    /// Returns the first row and the current length of a slot.
    pub(crate) fn slot(&self, slot: usize) -> (usize, usize) {
        (self.prompt_rows + slot * self.slot_rows, self.lengths[slot])
    }

    /// Increments the length of each slot, after all layers have appended the token.
    pub fn advance(&mut self, slots: &[usize]) {
        for &slot in slots {
            self.lengths[slot] += 1;
        }
    }

    /// Increases the length of a slot by `rows`, after all layers have appended them.
    pub fn extend(&mut self, slot: usize, rows: usize) {
        self.lengths[slot] += rows;
    }

    /// Decreases the length of a slot by `rows`, which the next layer appends.
    pub(crate) fn retract(&mut self, slot: usize, rows: usize) {
        self.lengths[slot] -= rows;
    }

    /// Checks that `slot` has room for `rows` more tokens, and returns an error otherwise.
    pub fn check_room(&self, slot: usize, rows: usize) -> Result<()> {
        if self.lengths.get(slot).is_none_or(|&len| len + rows > self.slot_rows) {
            let what = format!(
                "slot {slot} of {} has no room for {rows} more tokens; it holds {} of at most {}",
                self.lengths.len(),
                self.lengths.get(slot).copied().unwrap_or_default(),
                self.slot_rows
            );
            return Err(Error::shape("key-value cache", what));
        }
        Ok(())
    }
}
