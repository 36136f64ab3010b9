//! Rows, the only type of activations.

mod cpu;
mod gpu;
pub(crate) mod moves;
mod outline;
mod tape;
#[cfg(feature = "twin")]
mod twin;

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_gpu::Dtype;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::Host;

/// Memory, copies and sums of rows.
pub(crate) trait RowOps {
    /// Returns `[rows, cols]` zeros, in the dtype of `like` if given and otherwise in f32.
    fn zeros(&self, rows: usize, cols: usize, like: Option<&Rows>) -> Rows;
    /// Creates rows from host values in row-major order. `data.len()` must be `rows · cols`.
    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows;
    /// Returns the values in row-major order, rounded to f32.
    fn download(&self, x: &Rows) -> Vec<f32>;
    /// Computes `to += from`.
    fn add(&self, to: &mut Rows, from: &Rows);
    /// Computes `x *= by`.
    fn scale(&self, x: &mut Rows, by: f32);
    /// Returns a copy of `[rows, cols]` values of `x`.
    fn part(&self, x: &Rows, of: Window, size: [usize; 2]) -> Rows;
    /// Replaces `size = [rows, cols]` values of `to` with values of `from`.
    fn set_part(&self, to: &mut Rows, at: Window, from: &Rows, of: Window, size: [usize; 2]);
}

/// A contiguous array `[rows, cols]` on a device. Every activation, gradient and statistic is such an array.
///
/// Clones share their values, and a write to a clone copies them first. An array of zero rows keeps its width.
#[derive(Clone, Debug)]
pub struct Rows {
    pub(crate) data: Data,
    rows: usize,
    cols: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum Data {
    Cpu(Arc<Vec<f32>>),
    #[cfg(feature = "twin")]
    Twin(Arc<Vec<f64>>),
    Gpu(crate::gpu::Card, Arc<omnigrpo_gpu::Array>),
    Outline(Arc<crate::outline::Span>),
}

/// Rows that are stored in bf16. A device without this form keeps its own.
#[derive(Debug)]
pub(crate) enum Narrow {
    Cpu(Vec<half::bf16>, [usize; 2]),
    Other(Rows),
}

impl Narrow {
    /// Rounds rows to nearest even.
    pub fn of(rows: Rows) -> Self {
        let size = [rows.rows, rows.cols];
        match &rows.data {
            Data::Cpu(data) => Self::Cpu(omnigrpo_kernels::optim::narrow(data), size),
            _ => Self::Other(rows.cast(Dtype::Bf16)),
        }
    }

    /// Returns rows of the same values: on a GPU the stored ones, in bf16.
    pub fn in_place(&self) -> Rows {
        match self {
            Self::Cpu(..) => self.wide(),
            Self::Other(rows) => rows.clone(),
        }
    }

    /// Returns the values in f32.
    pub fn wide(&self) -> Rows {
        match self {
            Self::Cpu(data, [rows, cols]) => Rows::on_cpu(omnigrpo_kernels::optim::widen(data), *rows, *cols),
            Self::Other(rows) => rows.cast(Dtype::F32),
        }
    }
}

/// Indices of rows of an array, in order.
pub type Index = Host<Vec<usize>>;

/// Position of the values of a copy in an array: row `r` of the copy is row `row + index[r]` of the array, or `row + r` without an
/// index. Its values begin at column `col`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Window<'a> {
    pub row: usize,
    pub col: usize,
    pub index: Option<&'a Index>,
}

impl<'a> Window<'a> {
    /// Begins at a row and a column.
    pub fn at(row: usize, col: usize) -> Self {
        Self { row, col, index: None }
    }

    /// Lists complete rows.
    pub fn of(index: &'a Index) -> Self {
        Self { row: 0, col: 0, index: Some(index) }
    }

    /// Returns the offset of row `r` in an array of `cols` columns.
    pub fn start(self, r: usize, cols: usize) -> usize {
        (self.row + self.index.map_or(r, |index| index[r])) * cols + self.col
    }
}

/// Ends an operation that did not check the device of its operands.
#[cold]
#[track_caller]
#[allow(clippy::panic, reason = "an operation without this check would compute with no values")]
pub(crate) fn misplaced(got: Device, expected: &str) -> ! {
    panic!("an operation on {expected} got rows on {got}")
}

impl Rows {
    pub(crate) fn over(data: Data, rows: usize, cols: usize) -> Self {
        Self { data, rows, cols }
    }

    pub(crate) fn on_cpu(data: Vec<f32>, rows: usize, cols: usize) -> Self {
        debug_assert_eq!(data.len(), rows * cols);
        Self { data: Data::Cpu(Arc::new(data)), rows, cols }
    }

    pub(crate) fn on_gpu(
        card: crate::gpu::Card,
        data: omnigrpo_gpu::Array,
        rows: usize,
        cols: usize,
    ) -> Self {
        debug_assert_eq!(data.len(), rows * cols);
        Self { data: Data::Gpu(card, Arc::new(data)), rows, cols }
    }

    /// Creates rows of zeros.
    pub fn zeros(device: Device, rows: usize, cols: usize) -> Self {
        device.backend().zeros(rows, cols, None)
    }

    /// Creates rows on the CPU from `data` in row-major order, without copying. `data.len()` must be `rows · cols`.
    pub fn from_vec(data: Vec<f32>, rows: usize, cols: usize) -> Result<Self> {
        Self::upload(Device::Cpu, data, rows, cols)
    }

    /// Creates rows on `device` from host values in row-major order. `data.len()` must be `rows · cols`.
    pub fn upload(device: Device, data: Vec<f32>, rows: usize, cols: usize) -> Result<Self> {
        if data.len() != rows * cols {
            return Err(Error::shape("rows", format!("{} values for {rows}×{cols}", data.len())));
        }
        Ok(device.backend().upload(data, rows, cols))
    }

    /// Returns a copy in a dtype on a GPU or an outline, and otherwise the rows.
    pub(crate) fn cast(&self, dtype: Dtype) -> Self {
        match &self.data {
            Data::Gpu(card, data) => card.rows(card.gpu.cast(data, dtype), self.rows, self.cols),
            Data::Outline(_) => Self::on_outline(dtype, self.rows, self.cols),
            _ => self.clone(),
        }
    }

    pub fn device(&self) -> Device {
        match &self.data {
            Data::Cpu(_) => Device::Cpu,
            #[cfg(feature = "twin")]
            Data::Twin(_) => Device::Twin,
            Data::Gpu(card, _) => Device::Gpu(*card),
            Data::Outline(_) => Device::Outline,
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size of the values in bytes.
    pub fn num_bytes(&self) -> usize {
        match &self.data {
            Data::Cpu(data) => size_of_val(&data[..]),
            #[cfg(feature = "twin")]
            Data::Twin(data) => size_of_val(&data[..]),
            Data::Gpu(_, data) => data.len() * data.dtype().size(),
            Data::Outline(span) => span.num_bytes(),
        }
    }

    /// Converts to a vector of the values in row-major order, as f32. Unshared rows on the CPU are not copied.
    pub fn into_vec(self) -> Vec<f32> {
        match self.data {
            Data::Cpu(data) => {
                Arc::try_unwrap(data).unwrap_or_else(|shared| omnigrpo_kernels::buffer::copy(&shared))
            }
            _ => self.device().backend().download(&self),
        }
    }

    /// Returns a copy of the values in row-major order, as f32.
    pub fn to_vec(&self) -> Vec<f32> {
        self.device().backend().download(self)
    }

    /// Returns a copy of the values in row-major order, without rounding.
    pub fn to_f64(&self) -> Vec<f64> {
        match &self.data {
            #[cfg(feature = "twin")]
            Data::Twin(data) => data.to_vec(),
            _ => self.to_vec().into_iter().map(f64::from).collect(),
        }
    }

    /// Returns the values if the host can read them as f32, and `None` otherwise.
    pub fn host(&self) -> Option<&[f32]> {
        match &self.data {
            Data::Cpu(data) => Some(data),
            _ => None,
        }
    }

    /// Reinterprets the values as an array with another number of rows and columns.
    pub fn reshape(self, rows: usize, cols: usize) -> Result<Self> {
        if rows * cols != self.len() {
            return Err(Error::shape("reshape", format!("{}×{} to {rows}×{cols}", self.rows, self.cols)));
        }
        Ok(Self { data: self.data, rows, cols })
    }

    /// Returns the rows listed in `index`, in that order.
    pub fn select(&self, index: &Index) -> Result<Self> {
        self.check_index("select", index, self.rows)?;
        Ok(self.device().backend().part(self, Window::of(index), [index.len(), self.cols]))
    }

    /// Reverses [`Self::select`] for distinct rows: returns `rows` rows, which are zero except at `index`.
    pub fn spread(&self, index: &Index, rows: usize) -> Result<Self> {
        if index.len() != self.rows {
            return Err(Error::shape("spread", format!("{} rows for {} places", self.rows, index.len())));
        }
        self.check_index("spread", index, rows)?;
        let device = self.device();
        let mut y = device.backend().zeros(rows, self.cols, Some(self));
        device.backend().set_part(&mut y, Window::of(index), self, Window::default(), [self.rows, self.cols]);
        Ok(y)
    }

    fn check_index(&self, op: &'static str, index: &Index, rows: usize) -> Result<()> {
        match index.iter().find(|&&row| row >= rows) {
            Some(row) => Err(Error::shape(op, format!("row {row} of {rows}"))),
            None => Ok(()),
        }
    }

    /// Returns a range of columns of every row.
    pub fn columns(&self, columns: Range<usize>) -> Result<Self> {
        if columns.start > columns.end || columns.end > self.cols {
            return Err(Error::shape("columns", format!("{columns:?} of {}", self.cols)));
        }
        Ok(self.device().backend().part(self, Window::at(0, columns.start), [self.rows, columns.len()]))
    }

    /// Replaces columns with the columns of `from`, starting at column `first`.
    pub fn set_columns(&mut self, first: usize, from: &Self) -> Result<()> {
        self.device().check("set_columns", from)?;
        if from.rows != self.rows || first + from.cols > self.cols {
            return Err(Error::shape(
                "set_columns",
                format!("{}×{} at column {first} of {}×{}", from.rows, from.cols, self.rows, self.cols),
            ));
        }
        let (at, size) = (Window::at(0, first), [from.rows, from.cols]);
        self.device().backend().set_part(self, at, from, Window::default(), size);
        Ok(())
    }

    /// Replaces rows with the rows `range` of `from`, starting at row `first`.
    pub fn set_rows(&mut self, first: usize, from: &Self, range: Range<usize>) -> Result<()> {
        self.device().check("set_rows", from)?;
        if from.cols != self.cols || range.end > from.rows || first + range.len() > self.rows {
            return Err(Error::shape(
                "set_rows",
                format!(
                    "rows {range:?} of {}×{} at row {first} of {}×{}",
                    from.rows, from.cols, self.rows, self.cols
                ),
            ));
        }
        let (at, of, size) = (Window::at(first, 0), Window::at(range.start, 0), [range.len(), self.cols]);
        self.device().backend().set_part(self, at, from, of, size);
        Ok(())
    }

    /// Returns a copy of a range of rows.
    pub fn row_range(&self, range: Range<usize>) -> Result<Self> {
        let mut rows = Self::zeros(self.device(), range.len(), self.cols);
        rows.set_rows(0, self, range)?;
        Ok(rows)
    }

    /// Concatenates arrays of the same width along the rows.
    pub fn concat(parts: &[&Self]) -> Result<Self> {
        let Some(first) = parts.first() else { return Err(Error::shape("concat", "no array")) };
        let rows = parts.iter().map(|part| part.rows).sum();
        let mut all = Self::zeros(first.device(), rows, first.cols);
        let mut at = 0;
        for part in parts {
            all.set_rows(at, part, 0..part.rows)?;
            at += part.rows;
        }
        Ok(all)
    }

    /// Adds `from` to these rows, elementwise.
    pub fn add(&mut self, from: &Self) -> Result<()> {
        self.device().check("add", from)?;
        if self.dims() != from.dims() {
            return Err(Error::shape("add", format!("{:?} to {:?}", from.dims(), self.dims())));
        }
        self.device().backend().add(self, from);
        Ok(())
    }

    pub fn scale(&mut self, by: f32) {
        self.device().backend().scale(self, by);
    }

    pub fn sum_of_squares(&self) -> f64 {
        self.device().backend().sum_of_squares(self)
    }

    /// Copies the values to another device.
    pub fn to_device(&self, device: Device) -> Self {
        if device == self.device() {
            return self.clone();
        }
        device.backend().upload(self.to_vec(), self.rows, self.cols)
    }
}
