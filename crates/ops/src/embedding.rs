//! Tables: word embeddings, and table rows added to a stream (positions, token types, class tokens).

use std::sync::Arc;

use crate::Param;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::rows::Rows;
use crate::tape::{Op, Tape, Var};

/// Table index for each row of a stream.
pub type Tokens = Host<Vec<u32>>;

/// Optional table index for each row of a stream. The table row with that index is added to the stream's row.
pub type Ids = Host<Vec<Option<u32>>>;

/// Table indices with weights, for each row of a stream.
pub type Taps = Host<Vec<Vec<(u32, f32)>>>;

/// Returns the rows `ids` of `table [v, h]`, with shape `[ids.len(), h]`.
pub fn embed(device: Device, table: &Param, ids: &Tokens) -> Result<Rows> {
    let h = table.shape().last().copied().unwrap_or(0);
    table.usable(device)?;
    check(table, h, ids.iter().copied())?;
    Ok(device.backend().embed(table, ids, h))
}

/// Adds `dx [ids.len(), h]` to the rows `ids` of the table's gradient.
pub fn embed_backward(table: &Param, ids: &[u32], dx: &Rows) -> Result<()> {
    check(table, dx.cols(), ids.iter().copied())?;
    if ids.len() != dx.rows() {
        let what = format!("{} ids for {} rows", ids.len(), dx.rows());
        return Err(Error::shape(format!("embedding {}", table.name()), what));
    }
    dx.device().backend().embed_back(table, ids, dx);
    Ok(())
}

fn check(table: &Param, h: usize, mut ids: impl Iterator<Item = u32>) -> Result<()> {
    let op = || format!("embedding {}", table.name());
    if h == 0 || !table.len().is_multiple_of(h) {
        return Err(Error::shape(
            op(),
            format!("the table has {} elements, expected a multiple of {h}", table.len()),
        ));
    }
    let rows = table.len() / h;
    match ids.find(|&id| id as usize >= rows) {
        Some(id) => Err(Error::shape(op(), format!("id {id}, but the table has {rows} rows"))),
        None => Ok(()),
    }
}

struct AddRows {
    table: Arc<Param>,
    ids: Arc<Ids>,
}

impl Op for AddRows {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        self.table.usable(x.device())?;
        check(&self.table, x.cols(), self.ids.iter().flatten().copied())?;
        if self.ids.len() != x.rows() {
            let what = format!("{} ids for {} rows", self.ids.len(), x.rows());
            return Err(Error::shape(format!("add_rows {}", self.table.name()), what));
        }
        let mut y = x.clone();
        y.device().backend().add_rows(&mut y, &self.table, &self.ids);
        Ok((y, ()))
    }

    fn backward(&self, _: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        dy.device().backend().add_rows_back(&self.table, &self.ids, &dy);
        Ok([Some(dy)])
    }
}

struct AddMixed {
    table: Arc<Param>,
    taps: Arc<Taps>,
}

impl Op for AddMixed {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        self.table.usable(x.device())?;
        check(&self.table, x.cols(), self.taps.iter().flatten().map(|tap| tap.0))?;
        if self.taps.len() != x.rows() {
            let what = format!("{} taps for {} rows", self.taps.len(), x.rows());
            return Err(Error::shape(format!("add_mixed {}", self.table.name()), what));
        }
        let mut y = x.clone();
        y.device().backend().add_mixed(&mut y, &self.table, &self.taps);
        Ok((y, ()))
    }

    fn backward(&self, _: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        dy.device().backend().add_mixed_back(&self.table, &self.taps, &dy);
        Ok([Some(dy)])
    }
}

impl Tape {
    /// Computes `y[i] = x[i] + table[ids[i]]`, `[t, h] → [t, h]`. A row without an id is unchanged. The table is read as `[v,
    /// h]`, whatever its published shape. If `x` is zero, this is an embedding lookup whose gradient reaches the table.
    pub fn add_rows(&mut self, x: &Var, table: &Arc<Param>, ids: &Arc<Ids>) -> Result<Var> {
        self.apply(AddRows { table: Arc::clone(table), ids: Arc::clone(ids) }, [x])
    }

    /// Adds a weighted sum of table rows to each row of `x [t, h]`: row `r` receives the sum of `weight · table[id]` over
    /// `taps[r]`.
    pub fn add_mixed(&mut self, x: &Var, table: &Arc<Param>, taps: &Arc<Taps>) -> Result<Var> {
        self.apply(AddMixed { table: Arc::clone(table), taps: Arc::clone(taps) }, [x])
    }
}
