//! Attention on the CPU.

use memmap2::MmapMut;
use omnigrpo_kernels::attention::{Qkv, QueryRange};
use omnigrpo_kernels::{Mat, MatMut, attention, parallel, profile};

use crate::cpu::Cpu;
use crate::rows::RowOps;

use super::*;

impl AttentionOps for Cpu {
    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        let (rows, shape) = (qkv.rows(), heads.shape());
        let (out, lse) = attention::forward(Qkv::packed(qkv.mat(), shape), layout, shape, heads.scale());
        (Rows::on_cpu(out, rows, heads.q_width()), Rows::on_cpu(lse, rows, heads.q))
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
        let (shape, scale) = (heads.shape(), heads.scale());
        let parts = Qkv::packed(qkv.mat(), shape);
        let dqkv = attention::backward(dout.mat(), parts, out.mat(), lse.cpu(), layout, shape, scale);
        Rows::on_cpu(dqkv, qkv.rows(), qkv.cols())
    }

    fn cache(&self, layers: usize, _: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
        let bytes = rows * 2 * heads.kv_width() * size_of::<f32>();
        Ok(Store::Cpu((0..layers).map(|_| MmapMut::map_anon(bytes.max(1))).collect::<std::io::Result<_>>()?))
    }

    fn cache_prompt(&self, cache: &mut GroupCache, layer: usize, qkv: &Rows, heads: AttentionHeads) {
        if let Store::Cpu(layers) = &mut cache.store {
            copy_kv(floats_mut(&mut layers[layer]), 0, qkv.cpu(), heads);
        }
    }

    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
        _: Turn,
    ) -> (Rows, Rows) {
        let mut out = self.zeros(qkv.rows(), heads.q_width(), None);
        let groups = &mut batch.groups;
        let _span = profile::span(profile::Op::AttentionDecode, || {
            let (queries, head_bytes) = (qkv.rows(), 4 * heads.dim);
            let own = |group: &DecodeRows| {
                group.slots.iter().map(|&slot| group.cache.slot(slot).1 + 1).sum::<usize>()
            };
            let prompts = |group: &DecodeRows| group.cache.prompt_rows * group.slots.len();
            let pairs: usize = groups.iter().map(|group| own(group) + prompts(group)).sum();
            let keys: usize = groups.iter().map(|group| own(group) + group.cache.prompt_rows).sum();
            (4 * pairs * heads.q_width(), 2 * head_bytes * (queries * heads.q + keys * heads.kv))
        });
        let mut lse = self.zeros(qkv.rows(), heads.q, None);
        let (mut rest, mut rest_lse, mut row) = (out.cpu_mut(), lse.cpu_mut(), 0);
        let each: Vec<_> = groups
            .iter_mut()
            .map(|group| {
                let count = group.slots.len();
                let own = rest.split_off_mut(..count * heads.q_width()).unwrap_or_default();
                let lse = rest_lse.split_off_mut(..count * heads.q).unwrap_or_default();
                let packed = qkv.mat().row_range(row..row + count);
                row += count;
                (group, packed, MatMut::new(own, count, heads.q_width()), lse)
            })
            .collect();
        // If there are many groups, each thread processes complete groups, however small. If there are few, all threads share
        // each group.
        let work = if each.len() < GROUPS_PER_THREAD * parallel::threads() { 0 } else { usize::MAX };
        parallel::map(each, work, |(group, packed, out, lse)| {
            attend_group(group, layer, packed, heads, out, lse);
        });
        (out, lse)
    }

    fn attend_extended(
        &self,
        qkv: &Rows,
        layer: usize,
        cache: &mut GroupCache,
        slot: usize,
        heads: AttentionHeads,
    ) -> Option<(Rows, Rows)> {
        let (rows, prompt_rows) = (qkv.rows(), cache.prompt_rows);
        let (start, len) = cache.slot(slot);
        let Store::Cpu(layers) = &mut cache.store else { return None };
        let buffer = floats_mut(&mut layers[layer]);
        copy_kv(buffer, start + len, qkv.cpu(), heads);
        let keys = vec![0..prompt_rows, start..start + len + rows];
        let layout = AttentionLayout { ranges: vec![QueryRange { queries: 0..rows, keys, causal: true }] };
        let kv = heads.kv_width();
        let cached = Mat::new(buffer, buffer.len() / (2 * kv).max(1), 2 * kv);
        let q = qkv.mat().columns(0..heads.q_width());
        let qkv = Qkv { q, k: cached.columns(0..kv), v: cached.columns(kv..2 * kv) };
        let (out, lse) = attention::forward(qkv, &layout, heads.shape(), heads.scale());
        Some((Rows::on_cpu(out, rows, heads.q_width()), Rows::on_cpu(lse, rows, heads.q)))
    }
}

/// Minimum number of groups per thread for which each thread computes the attention of complete groups.
const GROUPS_PER_THREAD: usize = 4;

/// Appends the keys and values of `packed` to the group's slots. Writes the attention of each query over the prompt and its slot.
fn attend_group(
    group: &mut DecodeRows,
    layer: usize,
    packed: Mat,
    heads: AttentionHeads,
    out: MatMut,
    lse: &mut [f32],
) {
    let cache = &mut *group.cache;
    let slots: Vec<(usize, usize)> = group.slots.iter().map(|&slot| cache.slot(slot)).collect();
    let prompt_rows = cache.prompt_rows;
    let Store::Cpu(layers) = &mut cache.store else { return };
    let buffer = floats_mut(&mut layers[layer]);
    let mut ranges = Vec::with_capacity(slots.len());
    for (i, &(start, len)) in slots.iter().enumerate() {
        copy_kv(buffer, start + len, packed.row(i), heads);
        let keys = vec![0..prompt_rows, start..start + len + 1];
        ranges.push(QueryRange { queries: i..i + 1, keys, causal: false });
    }
    let (q, kv) = (packed.columns(0..heads.q_width()), heads.kv_width());
    let cached = Mat::new(buffer, buffer.len() / (2 * kv).max(1), 2 * kv);
    let qkv = Qkv { q, k: cached.columns(0..kv), v: cached.columns(kv..2 * kv) };
    attention::forward_decode_into(qkv, &AttentionLayout { ranges }, heads.shape(), heads.scale(), out, lse);
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
