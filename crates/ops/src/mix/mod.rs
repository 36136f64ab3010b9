//! Sparse sums of rows, for pooling and interpolation. The rows may be those of a table: word embeddings, and table rows that are
//! added to a stream (positions, token types, class tokens).

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use std::sync::Arc;

use crate::Param;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::rows::Rows;
use crate::tape::{Op, Tape, Var};

pub use omnigrpo_kernels::conv::RowMix;

/// Sparse sums of rows, which may be the rows of a table.
pub(crate) trait MixOps {
    /// Returns the rows `ids` of a table.
    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows;
    /// Adds weighted sums of the table's rows to `x`.
    fn add_rows(&self, x: &mut Rows, table: &Param, mix: &Mix);
    /// Adds the gradient of [`Self::add_rows`] with respect to the table to the table's buffer.
    fn add_rows_back(&self, table: &Param, mix: &Mix, dy: &Rows);
    /// Computes weighted sums of rows.
    fn mix(&self, x: &Rows, mix: &Mix) -> Rows;
    /// Returns the gradient of [`Self::mix`] with respect to an input of `rows` rows.
    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows;
}

/// Weighted sums of rows, created once per pass.
pub type Mix = Host<RowMix>;

/// Table index for each row of a stream.
pub type Tokens = Host<Vec<u32>>;

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
    dx.device().backend().add_rows_back(table, &RowMix::select(ids.to_vec()).into(), dx);
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
    mix: Arc<Mix>,
}

impl Op for AddRows {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        self.table.usable(x.device())?;
        check(&self.table, x.cols(), self.mix.rows.iter().copied())?;
        if self.mix.len() != x.rows() || !self.mix.is_sound() {
            let what = format!("{} sums for {} rows", self.mix.len(), x.rows());
            return Err(Error::shape(format!("add_rows {}", self.table.name()), what));
        }
        let mut y = x.clone();
        y.device().backend().add_rows(&mut y, &self.table, &self.mix);
        Ok((y, ()))
    }

    fn backward(&self, _: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        dy.device().backend().add_rows_back(&self.table, &self.mix, &dy);
        Ok([Some(dy)])
    }
}

struct MixRows(Arc<Mix>);

impl Op for MixRows {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        if self.0.reads() > x.rows() || !self.0.is_sound() {
            return Err(Error::shape("mix", format!("reads {} of {} rows", self.0.reads(), x.rows())));
        }
        Ok((x.device().backend().mix(x, &self.0), ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        Ok([Some(dy.device().backend().mix_back(&dy, &self.0, x.rows()))])
    }
}

impl Tape {
    /// Adds weighted sums of table rows to `x [t, h]`: row `r` receives row `r` of the mix. The table is read as `[v, h]`, whatever
    /// its published shape. If `x` is zero, this is an embedding lookup whose gradient reaches the table.
    pub fn add_rows(&mut self, x: &Var, table: &Arc<Param>, mix: &Arc<Mix>) -> Result<Var> {
        self.apply(AddRows { table: Arc::clone(table), mix: Arc::clone(mix) }, [x])
    }

    /// Computes weighted sums of rows, `[t, c] → [mix.len(), c]`, for pooling, interpolation and selection.
    pub fn mix(&mut self, x: &Var, mix: &Arc<Mix>) -> Result<Var> {
        self.apply(MixRows(Arc::clone(mix)), [x])
    }
}
