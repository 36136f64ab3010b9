//! Grouped-query attention over an [`AttentionLayout`].

mod cache;
mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

pub use cache::GroupCache;
pub(crate) use cache::Store;
pub(crate) use gpu::Pages;

use std::ops::Range;

use omnigrpo_kernels::attention::{self as kernel, AttentionLayout};

use crate::decode::{DecodeBatch, DecodeRows};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::norm::Norm;
use crate::rope::RopeTable;
use crate::rows::Rows;

/// Attention. A packed row is `[queries | keys | values]`.
pub(crate) trait AttentionOps {
    /// Computes self-attention of packed rows. Returns the output `[t, q · d]` and the log-sum-exp values `[t, q]`.
    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows);
    /// Returns the gradient of the packed rows, given the gradient of the output.
    fn attention_back(
        &self,
        qkv: &Rows,
        out: &Rows,
        lse: &Rows,
        dout: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows;
    /// Creates a cache for the keys and values of all layers: those of a prompt of `rows` tokens, and those of `slots`
    /// completions of equal maximum length.
    fn cache(
        &self,
        layers: usize,
        slots: usize,
        rows: usize,
        heads: AttentionHeads,
    ) -> std::io::Result<Store>;
    /// Writes the keys and values of packed rows to the first rows of a layer's cache.
    fn cache_prompt(&self, cache: &mut GroupCache, layer: usize, qkv: &Rows, heads: AttentionHeads);
    /// Returns true if [`Self::attend_cached`] normalises and rotates the heads of such rows.
    fn turns_cached(&self, _qkv: &Rows, _heads: AttentionHeads) -> bool {
        false
    }
    /// Appends each row to the cache of its slot and returns its attention over prompt and slot. Also returns the log-sum-exp
    /// values if [`Device::remembers_decoding`](crate::Device::remembers_decoding) is true. `turn` is empty without
    /// [`Self::turns_cached`].
    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
        turn: Turn,
    ) -> (Rows, Rows);
    /// Appends consecutive rows to one slot and returns as [`Self::attend_cached`] does. Each row also sees the rows before it.
    /// Returns `None` if the device appends rows only one by one.
    fn attend_extended(
        &self,
        _qkv: &Rows,
        _layer: usize,
        _cache: &mut GroupCache,
        _slot: usize,
        _heads: AttentionHeads,
    ) -> Option<(Rows, Rows)> {
        None
    }
}

/// Norms and rotation of the queries and keys of packed rows, before attention.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turn<'a> {
    /// RMS norms of each query head and of each key head, of one kind and with one constant.
    pub norms: Option<[&'a Norm; 2]>,
    /// Angles of each row.
    pub rope: Option<&'a RopeTable>,
}

/// Attention layout of a stream, created once per stream.
pub type Layout = Host<AttentionLayout>;

/// Heads of one attention layer. A packed row is `[q heads | k heads | v heads]`, with `head_dim` columns per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionHeads {
    pub q: usize,
    /// Number of key heads and of value heads; each serves `q / kv` query heads.
    pub kv: usize,
    pub dim: usize,
}

impl std::fmt::Display for AttentionHeads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} query and {} key heads of {} numbers", self.q, self.kv, self.dim)
    }
}

impl AttentionHeads {
    /// Returns the number of columns of a packed row.
    pub fn packed_width(self) -> usize {
        (self.q + 2 * self.kv) * self.dim
    }

    /// Returns the number of columns of the keys, which is also that of the values.
    pub fn kv_width(self) -> usize {
        self.kv * self.dim
    }

    /// Returns the number of columns of the queries, which is also that of the output.
    pub fn q_width(self) -> usize {
        self.q * self.dim
    }

    /// Returns the scale of the attention scores, `1 / sqrt(head_dim)`.
    pub fn scale(self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// Converts to the kernel's structure.
    pub(crate) fn shape(self) -> kernel::Shape {
        kernel::Shape { q_heads: self.q, kv_heads: self.kv, head_dim: self.dim }
    }

    /// Computes softmax self-attention of packed rows `[t, (q + 2 kv) · d]`. Returns the output `[t, q · d]` and the log-sum-exp
    /// of each query `[t, q]`. The backward pass needs only these two and the packed rows. Source: FlashAttention-2 (arXiv
    /// 2307.08691), algorithms 1 and 2.
    pub fn forward(self, qkv: &Rows, layout: &Layout) -> Result<(Rows, Rows)> {
        self.check(qkv)?;
        check_layout(layout, qkv)?;
        Ok(qkv.device().backend().attention(qkv, layout, self))
    }

    /// Returns the gradient of the packed rows, given the gradient `dout [t, q · d]` of the output. The other arguments are the
    /// arguments and results of [`Self::forward`].
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

    /// Appends the keys and values of each row to its slot. Returns the attention of each row over its prompt and slot, for
    /// decoding. Also returns the log-sum-exp values of [`Self::forward`] if
    /// [`Device::remembers_decoding`](crate::Device::remembers_decoding) is true, and otherwise an array without rows. `turn` is
    /// empty without [`Self::turns_cached`].
    pub fn attend_cached(
        self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        turn: Turn,
    ) -> Result<(Rows, Rows)> {
        self.check(qkv)?;
        if let Some(table) = turn.rope {
            self.check_angles(qkv, table)?;
        }
        for norm in turn.norms.into_iter().flatten() {
            norm.weight().usable(qkv.device())?;
            if norm.width() != self.dim {
                let what = format!("norms of {} columns for {self}", norm.width());
                return Err(Error::shape("attention over a cache", what));
            }
        }
        if (turn.rope.is_some() || turn.norms.is_some()) && !self.turns_cached(qkv) {
            return Err(Error::shape("attention over a cache", format!("rows to turn on {}", qkv.device())));
        }
        let rows = batch.rows();
        if rows != qkv.rows() {
            return Err(Error::shape(
                "attention over a cache",
                format!("{} rows for {rows} slots", qkv.rows()),
            ));
        }
        for group in &batch.groups {
            group.cache.check(layer, qkv, self)?;
            group.slots.iter().try_for_each(|&slot| group.cache.check_room(slot, 1))?;
        }
        Ok(qkv.device().backend().attend_cached(qkv, layer, batch, self, turn))
    }

    /// Returns true if [`Self::attend_cached`] normalises and rotates the heads of such rows, so that nothing else has to.
    pub fn turns_cached(self, qkv: &Rows) -> bool {
        qkv.device().backend().turns_cached(qkv, self)
    }

    /// Appends the keys and values of consecutive rows to one slot. Returns the attention of each row over the prompt, the slot
    /// and the rows before it. Also returns log-sum-exp values as [`Self::attend_cached`] does. [`GroupCache::extend`] must follow
    /// once all layers have appended the rows.
    pub fn attend_extended(
        self,
        qkv: &Rows,
        layer: usize,
        cache: &mut GroupCache,
        slot: usize,
    ) -> Result<(Rows, Rows)> {
        self.check(qkv)?;
        cache.check(layer, qkv, self)?;
        cache.check_room(slot, qkv.rows())?;
        if let Some(attended) = qkv.device().backend().attend_extended(qkv, layer, cache, slot, self) {
            return Ok(attended);
        }
        let mut attended = Vec::with_capacity(qkv.rows());
        let mut appended = Ok(());
        for row in 0..qkv.rows() {
            let mut batch = DecodeBatch::new(vec![DecodeRows { cache: &mut *cache, slots: vec![slot] }]);
            let own = qkv.row_range(row..row + 1);
            appended =
                own.and_then(|own| self.attend_cached(&own, layer, &mut batch, Turn::default())).map(|own| {
                    attended.push(own);
                    batch.advance();
                });
            if appended.is_err() {
                break;
            }
        }
        // The next layer appends to the same rows.
        cache.retract(slot, attended.len());
        appended?;
        let (out, lse): (Vec<&Rows>, Vec<&Rows>) = attended.iter().map(|(out, lse)| (out, lse)).unzip();
        Ok((Rows::concat(&out)?, Rows::concat(&lse)?))
    }

    /// Applies rotary positions to the queries and keys of packed rows, in place. The columns of a head beyond the pairs of the table
    /// are not rotated.
    pub fn rotate(self, qkv: &mut Rows, table: &RopeTable, inverse: bool) -> Result<()> {
        self.check(qkv)?;
        self.check_angles(qkv, table)?;
        qkv.device().backend().rotate(qkv, table, [self.q + self.kv, self.dim], inverse);
        Ok(())
    }

    fn check_angles(self, qkv: &Rows, table: &RopeTable) -> Result<()> {
        if table.rows() == qkv.rows() && 2 * table.half <= self.dim {
            return Ok(());
        }
        let what = format!(
            "{} rows of {} angles for {} rows and heads of {}",
            table.rows(),
            table.half,
            qkv.rows(),
            self.dim
        );
        Err(Error::shape("rotation", what))
    }

    fn check(self, qkv: &Rows) -> Result<()> {
        match qkv.cols() == self.packed_width() {
            true => Ok(()),
            false => {
                Err(Error::shape("attention", format!("packed rows of {} columns for {self}", qkv.cols())))
            }
        }
    }
}

/// Checks the ranges of a layout. Kernels do not check them, and a wrong range would read out of bounds.
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
