//! Rows of a table added to rows of a stream: positions, token types, class tokens, words.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use omnigrpo_kernels::embedding as kernel;

use crate::Param;
use crate::slices::{f32_of, with_f32};

/// `y[i] = x[i] + table[ids[i]]`, `[t, h] → [t, h]`; a row without id passes unchanged. The table's elements are read as
/// `[v, h]`, whatever its published shape.
///
/// With zeros as `x` this is an embedding whose gradient goes to the table. Gradient: input, table.
///
/// # Errors
/// Another number of ids than rows, a table that is not whole rows of `h`, an id beyond its end.
pub fn add_rows(x_th: &Tensor, table: &Arc<Param>, ids: &Arc<[Option<u32>]>) -> Result<Tensor> {
    x_th.apply_op1(AddRows { table: Arc::clone(table), ids: Arc::clone(ids) })
}

struct AddRows {
    table: Arc<Param>,
    ids: Arc<[Option<u32>]>,
}

impl CustomOp1 for AddRows {
    fn name(&self) -> &'static str {
        "add_rows"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, h) = layout.shape().dims2()?;
        let len = self.table.len();
        if self.ids.len() != rows || h == 0 || !len.is_multiple_of(h) {
            bail!(
                "add_rows {}: {} ids for an input of {rows}×{h} and a table of {len} elements",
                self.table.name(),
                self.ids.len()
            );
        }
        if let Some(id) = self.ids.iter().flatten().find(|&&id| id as usize >= len / h) {
            bail!("add_rows {}: id {id}, but the table has {} rows", self.table.name(), len / h);
        }
        let mut y = f32_of("add_rows", storage, layout)?.to_vec();
        self.table.with_weight(|table| kernel::add_rows(&mut y, table, &self.ids, h))?;
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x_th: &Tensor, _y: &Tensor, dy_th: &Tensor) -> Result<Option<Tensor>> {
        let h = x_th.dim(1)?;
        let dy_th = dy_th.contiguous()?;
        with_f32(&dy_th, |dy| {
            self.table.accumulate(|dtable| kernel::add_rows_backward(dtable, dy, &self.ids, h));
        })?;
        Ok(Some(dy_th))
    }
}

/// `x [t, h]` plus, in row `r`, the sum of `weight · table[id]` over `taps[r]`. The table is a weight of `[.., h]` whatever its
/// published shape. Gradient: input, table.
///
/// # Errors
/// Another number of taps than rows, an id outside the table.
pub fn add_mixed(x_th: &Tensor, table: &Arc<Param>, taps: &Arc<Vec<Vec<(u32, f32)>>>) -> Result<Tensor> {
    x_th.apply_op1(AddMixed { table: Arc::clone(table), taps: Arc::clone(taps) })
}

struct AddMixed {
    table: Arc<Param>,
    taps: Arc<Vec<Vec<(u32, f32)>>>,
}

impl CustomOp1 for AddMixed {
    fn name(&self) -> &'static str {
        "add_mixed"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, h) = layout.shape().dims2()?;
        let vocab = self.table.len().checked_div(h).unwrap_or(0);
        let largest = self.taps.iter().flatten().map(|tap| tap.0 as usize).max();
        if self.taps.len() != rows || vocab * h != self.table.len() || largest.is_some_and(|id| id >= vocab) {
            bail!(
                "add_mixed {}: input is {rows}×{h}, table has {} elements, {} taps up to row {largest:?}",
                self.table.name(),
                self.table.len(),
                self.taps.len()
            );
        }
        let mut y = f32_of("add_mixed", x, layout)?.to_vec();
        self.table.with_weight(|table| kernel::add_mixed(&mut y, table, &self.taps, h))?;
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let h = x.dim(1)?;
        let dy = dy.contiguous()?;
        with_f32(&dy, |dy| {
            self.table.accumulate(|dtable| kernel::add_mixed_backward(dtable, dy, &self.taps, h));
        })?;
        Ok(Some(dy))
    }
}
