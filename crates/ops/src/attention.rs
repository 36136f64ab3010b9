//! Grouped-query attention over an [`AttentionLayout`].

use std::ops::Range;

use omnigrpo_kernels::attention::{self as kernel, AttentionLayout};

use crate::decode::DecodeBatch;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::rope::RopeTable;
use crate::rows::Rows;

/// Which rows see which, made once for a stream.
pub type Layout = Host<AttentionLayout>;

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
    pub(crate) fn shape(self) -> kernel::Shape {
        kernel::Shape { q_heads: self.q, kv_heads: self.kv, head_dim: self.dim }
    }

    /// Softmax attention of packed rows `[t, (q + 2 kv) · d]` with themselves: the output `[t, q · d]` and `[t, q]`, the
    /// log-sum-exp of each query, which is all that the backward pass needs beside them. Source: FlashAttention-2 (arXiv
    /// 2307.08691), algorithms 1 and 2.
    ///
    /// # Errors
    /// Another width, a layout for other rows.
    pub fn forward(self, qkv: &Rows, layout: &Layout) -> Result<(Rows, Rows)> {
        self.check(qkv)?;
        check_layout(layout, qkv)?;
        Ok(qkv.device().backend().attention(qkv, layout, self))
    }

    /// The gradient of the packed rows from that of the output, `dout [t, q · d]`; the rest as [`Self::forward`] had it.
    ///
    /// # Errors
    /// Shapes that differ.
    pub fn backward(self, qkv: &Rows, out: &Rows, lse: &Rows, dout: &Rows, layout: &Layout) -> Result<Rows> {
        self.check(qkv)?;
        for operand in [out, lse, dout] {
            qkv.device().check("attention backward", operand)?;
        }
        let expected = (qkv.rows(), self.q_width());
        if out.dims() != expected || dout.dims() != expected || lse.dims() != (qkv.rows(), self.q) {
            let what = format!("output {:?}, gradient {:?}; expected {expected:?}", out.dims(), dout.dims());
            return Err(Error::shape("attention backward", what));
        }
        check_layout(layout, qkv)?;
        Ok(qkv.device().backend().attention_back(qkv, out, lse, dout, layout, self))
    }

    /// Decoding: appends the keys and values of each row to its slot and gives its attention over prompt and slot, with its
    /// log-sum-exps as [`Self::forward`] gives them where [`Device::remembers_decoding`](crate::Device::remembers_decoding),
    /// elsewhere without rows.
    ///
    /// # Errors
    /// Another width, another number of rows than slots, a full slot, a cache of another device or without this layer.
    pub fn attend_cached(self, qkv: &Rows, layer: usize, batch: &mut DecodeBatch) -> Result<(Rows, Rows)> {
        self.check(qkv)?;
        let rows = batch.rows();
        if rows != qkv.rows() {
            return Err(Error::shape(
                "attention over a cache",
                format!("{} rows for {rows} slots", qkv.rows()),
            ));
        }
        for group in &batch.groups {
            group.cache.check(layer, qkv, self)?;
            group.slots.iter().try_for_each(|&slot| group.cache.check_room(slot))?;
        }
        Ok(qkv.device().backend().attend_cached(qkv, layer, batch, self))
    }

    /// Turns queries and keys of packed rows in place.
    ///
    /// # Errors
    /// A table for other rows or heads.
    pub fn rotate(self, qkv: &mut Rows, table: &RopeTable, inverse: bool) -> Result<()> {
        self.check(qkv)?;
        if table.rows() != qkv.rows() || 2 * table.half != self.dim {
            let what = format!(
                "{} rows of {} angles for {} rows and heads of {}",
                table.rows(),
                table.half,
                qkv.rows(),
                self.dim
            );
            return Err(Error::shape("rotation", what));
        }
        qkv.device().backend().rotate(qkv, table, self.q + self.kv, inverse);
        Ok(())
    }

    fn check(self, qkv: &Rows) -> Result<()> {
        match qkv.cols() == self.packed_width() {
            true => Ok(()),
            false => {
                Err(Error::shape("attention", format!("packed rows of {} columns for {self:?}", qkv.cols())))
            }
        }
    }
}

/// Kernels follow a layout's ranges without looking; a wrong one would read elsewhere.
fn check_layout(layout: &Layout, qkv: &Rows) -> Result<()> {
    let rows = qkv.rows();
    let within = |range: &Range<usize>| range.start <= range.end && range.end <= rows;
    match layout.ranges.iter().find(|range| !within(&range.queries) || !range.keys.iter().all(within)) {
        None => Ok(()),
        Some(range) => {
            let what = format!("queries {:?} with keys {:?}, of {rows} rows", range.queries, range.keys);
            Err(Error::shape("attention", what))
        }
    }
}
