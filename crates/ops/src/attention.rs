//! Grouped-query attention over an [`AttentionLayout`].

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use omnigrpo_kernels::attention::{self as kernel, AttentionLayout, Rows};
use omnigrpo_kernels::buffer;

use crate::slices::{f32_of, rows_from_vec, with_f32};

/// Heads of one attention layer. A packed row is `[q heads | k heads | v heads]`, each head `head_dim` columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionHeads {
    /// Query heads.
    pub q: usize,
    /// Key and value heads; each serves `q / kv` query heads.
    pub kv: usize,
    /// Columns of one head.
    pub dim: usize,
}

impl AttentionHeads {
    /// Columns of a packed row.
    #[must_use]
    pub fn packed_width(self) -> usize {
        (self.q + 2 * self.kv) * self.dim
    }

    /// Columns of the keys (and of the values).
    #[must_use]
    pub fn kv_width(self) -> usize {
        self.kv * self.dim
    }

    /// Columns of the queries and of the output.
    #[must_use]
    pub fn q_width(self) -> usize {
        self.q * self.dim
    }

    /// `1 / sqrt(head_dim)`.
    #[must_use]
    pub fn scale(self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// The kernel's form.
    #[must_use]
    pub fn shape(self) -> kernel::Shape {
        kernel::Shape { q_heads: self.q, kv_heads: self.kv, head_dim: self.dim }
    }

    /// Queries, keys and values of packed rows.
    #[must_use]
    pub fn views(self, packed: &[f32]) -> [Rows<'_>; 3] {
        let stride = self.packed_width();
        [0, self.q * self.dim, (self.q + self.kv) * self.dim].map(|col| Rows { data: packed, stride, col })
    }
}

/// Softmax attention of a packed stream with itself: `[t, (q + 2 kv) · d] → [t, q · d]`.
///
/// Only the log-sum-exp of each query survives the forward pass; the backward pass recomputes the weights.
/// Gradient: the packed input. Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
///
/// # Errors
/// A width other than the heads', or a layout that reaches outside the stream.
pub fn attention(packed: &Tensor, heads: AttentionHeads, layout: &Arc<AttentionLayout>) -> Result<Tensor> {
    packed.apply_op1(Attention { heads, layout: Arc::clone(layout), lse: Mutex::new(Vec::new()) })
}

struct Attention {
    heads: AttentionHeads,
    layout: Arc<AttentionLayout>,
    lse: Mutex<Vec<f32>>,
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = layout.shape().dims2()?;
        let heads = self.heads;
        if width != heads.packed_width() {
            bail!(
                "attention: input is {rows}×{width}, expected {} columns for {heads:?}",
                heads.packed_width()
            );
        }
        if let Err(error) = self.layout.validate(rows, rows) {
            bail!("attention: {error}");
        }
        let [q, k, v] = heads.views(f32_of("attention", storage, layout)?);
        let mut out = buffer::zeros(rows * heads.q_width());
        let mut lse = self.lse.lock().unwrap_or_else(PoisonError::into_inner);
        lse.resize(rows * heads.q, 0.0);
        kernel::forward(&mut out, &mut lse, q, k, v, &self.layout, heads.shape(), heads.scale());
        Ok((CpuStorage::F32(out), Shape::from((rows, heads.q_width()))))
    }

    fn bwd(&self, packed: &Tensor, out: &Tensor, dout: &Tensor) -> Result<Option<Tensor>> {
        let (rows, width) = packed.dims2()?;
        let heads = self.heads;
        let mut dqkv = buffer::zeros(rows * width);
        let lse = self.lse.lock().unwrap_or_else(PoisonError::into_inner);
        let dout = dout.contiguous()?;
        with_f32(packed, |packed| {
            with_f32(out, |out| {
                with_f32(&dout, |dout| {
                    let [q, k, v] = heads.views(packed);
                    let cols = [q.col, k.col, v.col];
                    kernel::backward(
                        &mut dqkv,
                        width,
                        cols[0],
                        cols[1],
                        cols[2],
                        dout,
                        out,
                        &lse,
                        q,
                        k,
                        v,
                        &self.layout,
                        heads.shape(),
                        heads.scale(),
                    );
                })
            })
        })???;
        Ok(Some(rows_from_vec(dqkv, rows, width)?))
    }
}
