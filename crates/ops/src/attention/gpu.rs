//! Attention on a GPU.

use std::sync::Arc;

use omnigrpo_gpu::{Array, CachedGroup, Decoding, Dtype, Gpu, PAGE, Pattern, Place};

use crate::gpu::{Card, heads_of};
use crate::rows::RowOps;

use super::*;

impl AttentionOps for Card {
    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        let rows = qkv.rows();
        let pattern = layout.on(self.device(), |layout| Pattern::new(self.gpu, layout, rows));
        let (out, lse) = self.gpu.attention(self.of(qkv), &pattern, heads_of(heads));
        (self.rows(out, rows, heads.q_width()), self.rows(lse, rows, heads.q))
    }

    fn attention_back(
        &self,
        qkv: &Rows,
        out: &Rows,
        lse: &Rows,
        dout: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows {
        let rows = qkv.rows();
        let pattern = layout.on(self.device(), |layout| Pattern::new(self.gpu, layout, rows));
        let [qkv, out, lse, dout] = [qkv, out, lse, dout].map(|rows| self.of(rows));
        let dqkv = self.gpu.attention_back(qkv, out, lse, dout, &pattern, heads_of(heads));
        self.rows(dqkv, rows, heads.packed_width())
    }

    fn cache(&self, layers: usize, slots: usize, _: usize, _: AttentionHeads) -> std::io::Result<Store> {
        Ok(Store::Gpu(Pages::new(layers, slots)))
    }

    fn cache_prompt(&self, cache: &mut GroupCache, layer: usize, qkv: &Rows, heads: AttentionHeads) {
        let (from, width, rows) = (self.of(qkv), 2 * heads.kv_width(), qkv.rows());
        if let Store::Gpu(pages) = &mut cache.store {
            let prompt = pages.prompt(self.gpu, rows, width, from.dtype());
            if Arc::get_mut(prompt).is_none() {
                *prompt = Arc::new(self.gpu.cast(prompt, prompt.dtype()));
            }
            let Some(to) = Arc::get_mut(prompt) else { return };
            let (target, source) =
                (Place::new(layer * rows * width, width), Place::new(heads.q_width(), heads.packed_width()));
            self.gpu.copy_rows(to, target, from, source, [rows, width]);
        }
    }

    fn turns_cached(&self, qkv: &Rows, heads: AttentionHeads) -> bool {
        Gpu::turns_cached(self.of(qkv).dtype(), heads_of(heads))
    }

    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
        turn: Turn,
    ) -> (Rows, Rows) {
        let packed = self.of(qkv);
        let tables = match &batch.tables {
            Some(tables) => Arc::clone(tables),
            None => {
                let heads = heads_of(heads);
                let tables = Arc::new(self.continued(&mut batch.groups, packed.dtype(), |cached| {
                    Decoding::new(self.gpu, cached, heads)
                }));
                batch.tables = Some(Arc::clone(&tables));
                tables
            }
        };
        let waves = turn.rope.map(|table| self.waves(table));
        let waves = waves.as_ref().map(|waves| waves.each_ref());
        let attend =
            |turn: omnigrpo_gpu::Turn| self.gpu.attend_cached(packed, &tables, layer, heads_of(heads), turn);
        let out = match turn.norms {
            Some(norms) => self.both(norms, |norms| attend(omnigrpo_gpu::Turn { waves, norms: Some(norms) })),
            None => attend(omnigrpo_gpu::Turn { waves, norms: None }),
        };
        (self.rows(out, qkv.rows(), heads.q_width()), self.zeros(0, heads.q, None))
    }
}

/// Keys and values of a group on a GPU, for all layers: one array for the prompt, and pages for each completion that are
/// allocated as it grows. The dtype is that of the first rows written.
#[derive(Debug)]
pub(crate) struct Pages {
    layers: usize,
    prompt: Option<Arc<Array>>,
    own: Vec<Vec<Array>>,
}

impl Pages {
    fn new(layers: usize, slots: usize) -> Self {
        Self { layers, prompt: None, own: (0..slots).map(|_| Vec::new()).collect() }
    }

    fn of<'a>(group: &'a DecodeRows) -> Option<&'a Self> {
        match &group.cache.store {
            Store::Gpu(pages) => Some(pages),
            _ => None,
        }
    }

    /// Returns the dtype of a group's cache, or `None` if the prompt has not been written.
    pub(crate) fn dtype(group: &DecodeRows) -> Option<Dtype> {
        Some(Self::of(group)?.prompt.as_ref()?.dtype())
    }

    /// Returns the array of the prompt's rows of `width` values in all layers, allocated at first use.
    fn prompt(&mut self, gpu: &Gpu, rows: usize, width: usize, dtype: Dtype) -> &mut Arc<Array> {
        self.prompt.get_or_insert_with(|| Arc::new(gpu.alloc(self.layers * rows * width, dtype)))
    }

    /// Allocates pages until a slot has room for `len` tokens.
    fn grow(&mut self, gpu: &Gpu, slot: usize, len: usize, width: usize, dtype: Dtype) {
        while self.own[slot].len() * PAGE < len {
            self.own[slot].push(gpu.alloc(self.layers * PAGE * width, dtype));
        }
    }
}

impl Card {
    /// Allocates room for the next token of each row and runs `f` on the rows' cache positions.
    pub(crate) fn continued<T>(
        &self,
        groups: &mut [DecodeRows],
        dtype: Dtype,
        f: impl FnOnce(&[CachedGroup]) -> T,
    ) -> T {
        for group in groups.iter_mut() {
            let GroupCache { store, prompt_rows, lengths, heads, .. } = &mut *group.cache;
            let (Store::Gpu(pages), width) = (store, 2 * heads.kv_width()) else { continue };
            pages.prompt(self.gpu, *prompt_rows, width, dtype);
            for &slot in &group.slots {
                pages.grow(self.gpu, slot, lengths[slot] + 1, width, dtype);
            }
        }
        let cached = |group| -> Option<CachedGroup> {
            let group: &DecodeRows = group;
            let Pages { prompt, own, .. } = Pages::of(group)?;
            let completion = |&slot: &usize| (own[slot].iter().collect(), group.cache.lengths[slot] + 1);
            Some(CachedGroup {
                prompt: prompt.as_ref()?,
                prompt_rows: group.cache.prompt_rows,
                completions: group.slots.iter().map(completion).collect(),
            })
        };
        f(&groups.iter().filter_map(cached).collect::<Vec<_>>())
    }
}
