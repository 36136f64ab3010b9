//! Attention on the f64 twin.

use omnigrpo_kernels::attention::{Qkv, QueryRange};
use omnigrpo_kernels::{Mat, twin};

use crate::rows::{RowOps, Window, moves};
use crate::twin::Twin;

use super::*;

impl AttentionOps for Twin {
    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        let shape = heads.shape();
        let parts = Qkv::packed(qkv.mat64(), shape);
        let (out, lse) = twin::attention_forward(parts, layout, shape, scale(heads));
        (Rows::on_twin(out, qkv.rows(), heads.q_width()), Rows::on_twin(lse, qkv.rows(), heads.q))
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
        let shape = heads.shape();
        let parts = Qkv::packed(qkv.mat64(), shape);
        let (dq, dk, dv) = twin::attention_backward(dout.mat64(), parts, layout, shape, scale(heads));
        let mut dqkv = self.zeros(qkv.rows(), qkv.cols(), None);
        let (wide, narrow) = (heads.q_width(), heads.kv_width());
        for (first, width, data) in [(0, wide, dq), (wide, narrow, dk), (wide + narrow, narrow, dv)] {
            let data = Rows::on_twin(data, qkv.rows(), width);
            self.set_part(&mut dqkv, Window::at(0, first), &data, Window::default(), [qkv.rows(), width]);
        }
        dqkv
    }

    fn cache(&self, layers: usize, _: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
        Ok(Store::Twin(vec![vec![0.0; rows * 2 * heads.kv_width()]; layers]))
    }

    fn cache_prompt(&self, cache: &mut GroupCache, layer: usize, qkv: &Rows, heads: AttentionHeads) {
        if let Store::Twin(layers) = &mut cache.store {
            let (of, size) = (Window::at(0, heads.q_width()), [qkv.rows(), 2 * heads.kv_width()]);
            let kv = moves::part(qkv.twin(), qkv.cols(), of, size);
            layers[layer][..kv.len()].copy_from_slice(&kv);
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
        let (kv, q_width) = (heads.kv_width(), heads.q_width());
        let mut out = Vec::with_capacity(qkv.rows() * q_width);
        let mut lse = Vec::with_capacity(qkv.rows() * heads.q);
        let mut row = 0;
        for group in &mut batch.groups {
            for &slot in &group.slots {
                let packed = qkv.mat64().row_range(row..row + 1);
                let ((start, len), prompt) = (group.cache.slot(slot), group.cache.prompt_rows);
                let Store::Twin(layers) = &mut group.cache.store else { continue };
                let data = &mut layers[layer];
                data[(start + len) * 2 * kv..][..2 * kv].copy_from_slice(&packed.row(0)[q_width..]);
                let cached = Mat::new(data, data.len() / (2 * kv).max(1), 2 * kv);
                let keys = vec![0..prompt, start..start + len + 1];
                let layout =
                    AttentionLayout { ranges: vec![QueryRange { queries: 0..1, keys, causal: false }] };
                let (k, v) = (cached.columns(0..kv), cached.columns(kv..2 * kv));
                let parts = Qkv { q: packed.columns(0..q_width), k, v };
                let (own, of_own) = twin::attention_forward(parts, &layout, heads.shape(), scale(heads));
                out.extend(own);
                lse.extend(of_own);
                row += 1;
            }
        }
        (Rows::on_twin(out, qkv.rows(), q_width), Rows::on_twin(lse, qkv.rows(), heads.q))
    }
}

fn scale(heads: AttentionHeads) -> f64 {
    1.0 / (heads.dim as f64).sqrt()
}
