//! Attention on an outline.

use omnigrpo_gpu::{Dtype, Gpu, cached_scratch};
use omnigrpo_kernels::attention;

use crate::gpu::heads_of;
use crate::outline::{Held, Outline, Span, card, dtype, holding, in_f32, like, same};
use crate::work::{note_attention, note_cached};

use super::*;

impl AttentionOps for Outline {
    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        note_attention(qkv.rows(), layout, heads, false);
        (like(qkv, qkv.rows(), heads.q_width()), in_f32(qkv.rows(), heads.q))
    }

    fn attention_back(
        &self,
        qkv: &Rows,
        _: &Rows,
        _: &Rows,
        dout: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows {
        note_attention(qkv.rows(), layout, heads, true);
        let dqkv = same(qkv);
        let q = heads.q_width();
        let partial = match card() {
            None => attention::backward_space(layout, heads.shape()),
            // Query heads that share a key head write their parts of its gradient.
            Some(_) => qkv.rows() * (heads.q + if heads.q == heads.kv { 0 } else { 2 * q }),
        };
        let _partial = Span::new(partial, Dtype::F32);
        // Tensor cores read both gradients in bf16.
        let _dout = (dtype(qkv) != dtype(dout)).then(|| Span::new(dout.len(), dtype(qkv)));
        dqkv
    }

    fn cache(&self, layers: usize, _: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
        let elements = layers * rows * 2 * heads.kv_width();
        let span = || Span::new(elements, card().unwrap_or(Dtype::F32));
        Ok(Store::Outline(holding(Held::Cache, span)))
    }

    fn cache_prompt(&self, _: &mut GroupCache, _: usize, _: &Rows, _: AttentionHeads) {}

    fn turns_cached(&self, qkv: &Rows, heads: AttentionHeads) -> bool {
        card().is_some() && Gpu::turns_cached(dtype(qkv), heads_of(heads))
    }

    fn attend_cached(
        &self,
        qkv: &Rows,
        _: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
        _: Turn,
    ) -> (Rows, Rows) {
        note_cached(batch, heads);
        if card().is_some() {
            let prompt = batch.groups.iter().map(|group| group.cache.prompt_rows).max().unwrap_or(0);
            let own = batch.groups.iter().map(|group| group.cache.slot_rows).max().unwrap_or(0);
            drop(Span::new(cached_scratch(qkv.rows(), [prompt, own], heads_of(heads)), Dtype::F32));
        }
        (like(qkv, qkv.rows(), heads.q_width()), in_f32(qkv.rows(), heads.q))
    }
}
