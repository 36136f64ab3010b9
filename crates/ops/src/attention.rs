//! Grouped-query attention over an [`AttentionLayout`].

use omnigrpo_kernels::attention::{self as kernel, AttentionLayout, Rows};

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

    /// Softmax attention of packed rows `[t, (q + 2 kv) · d]` with themselves: `out [t, q · d]`, and `lse [t, q]`, the
    /// log-sum-exp of each query, which is all that the backward pass needs beside them. The layout is valid for `t`
    /// rows. Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
    pub fn forward(self, packed: &[f32], out: &mut [f32], lse: &mut [f32], layout: &AttentionLayout) {
        let [q, k, v] = self.views(packed);
        kernel::forward(out, lse, q, k, v, layout, self.shape(), self.scale());
    }

    /// The gradient of the packed rows from that of the output, `dout [t, q · d]`; the rest as [`Self::forward`] had it.
    #[must_use]
    pub fn backward(
        self,
        packed: &[f32],
        out: &[f32],
        lse: &[f32],
        dout: &[f32],
        layout: &AttentionLayout,
    ) -> Vec<f32> {
        let [q, k, v] = self.views(packed);
        let rows = packed.len() / self.packed_width().max(1);
        kernel::backward(rows, dout, out, lse, q, k, v, layout, self.shape(), self.scale())
    }
}
