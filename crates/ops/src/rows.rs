//! The one value type of activations.

use std::ops::Range;
use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::Host;

/// A contiguous array `[rows, cols]` on a device: every activation, gradient and statistic.
///
/// A clone shares the numbers; writing to one of two clones copies them first. Zero rows keep their width.
#[derive(Clone, Debug)]
pub struct Rows {
    pub(crate) data: Data,
    rows: usize,
    cols: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum Data {
    Cpu(Arc<Vec<f32>>),
    Twin(Arc<Vec<f64>>),
    Gpu(crate::gpu::Card, Arc<omnigrpo_gpu::Array>),
    Outline(Arc<crate::outline::Span>),
}

/// Which rows of an array, in which order.
pub type Index = Host<Vec<usize>>;

impl Rows {
    pub(crate) fn over(data: Data, rows: usize, cols: usize) -> Self {
        Self { data, rows, cols }
    }

    pub(crate) fn on_cpu(data: Vec<f32>, rows: usize, cols: usize) -> Self {
        debug_assert_eq!(data.len(), rows * cols);
        Self { data: Data::Cpu(Arc::new(data)), rows, cols }
    }

    pub(crate) fn on_twin(data: Vec<f64>, rows: usize, cols: usize) -> Self {
        debug_assert_eq!(data.len(), rows * cols);
        Self { data: Data::Twin(Arc::new(data)), rows, cols }
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

    /// Zeros.
    #[must_use]
    pub fn zeros(device: Device, rows: usize, cols: usize) -> Self {
        device.backend().zeros(rows, cols)
    }

    /// Rows on the CPU that take ownership of `data`, row by row.
    ///
    /// # Errors
    /// `data.len() != rows · cols`.
    pub fn from_vec(data: Vec<f32>, rows: usize, cols: usize) -> Result<Self> {
        Self::upload(Device::Cpu, data, rows, cols)
    }

    /// Rows on `device` from host numbers, row by row.
    ///
    /// # Errors
    /// `data.len() != rows · cols`.
    pub fn upload(device: Device, data: Vec<f32>, rows: usize, cols: usize) -> Result<Self> {
        if data.len() != rows * cols {
            return Err(Error::shape("rows", format!("{} numbers for {rows}×{cols}", data.len())));
        }
        Ok(device.backend().upload(data, rows, cols))
    }

    /// Where the numbers are.
    #[must_use]
    pub fn device(&self) -> Device {
        match &self.data {
            Data::Cpu(_) => Device::Cpu,
            Data::Twin(_) => Device::Twin,
            Data::Gpu(card, _) => Device::Gpu(*card),
            Data::Outline(_) => Device::Outline,
        }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Width of a row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows and columns.
    #[must_use]
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory of the numbers, bytes.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.data {
            Data::Cpu(data) => size_of_val(&data[..]),
            Data::Twin(data) => size_of_val(&data[..]),
            Data::Gpu(_, data) => data.len() * data.dtype().size(),
            Data::Outline(span) => span.num_bytes(),
        }
    }

    /// The numbers, row by row, as f32. Rows on the CPU that nobody shares are not copied.
    #[must_use]
    pub fn into_vec(self) -> Vec<f32> {
        match self.data {
            Data::Cpu(data) => {
                Arc::try_unwrap(data).unwrap_or_else(|shared| omnigrpo_kernels::buffer::copy(&shared))
            }
            _ => self.device().backend().download(&self),
        }
    }

    /// A copy of the numbers, row by row, as f32.
    #[must_use]
    pub fn to_vec(&self) -> Vec<f32> {
        self.device().backend().download(self)
    }

    /// A copy of the numbers, row by row, without rounding.
    #[must_use]
    pub fn to_f64(&self) -> Vec<f64> {
        self.device().backend().download_f64(self)
    }

    /// The numbers where the host can read them as f32.
    #[must_use]
    pub fn host(&self) -> Option<&[f32]> {
        match &self.data {
            Data::Cpu(data) => Some(data),
            _ => None,
        }
    }

    /// Returns the same numbers in rows of another width.
    ///
    /// # Errors
    /// Another number of elements.
    pub fn reshape(self, rows: usize, cols: usize) -> Result<Self> {
        if rows * cols != self.len() {
            return Err(Error::shape("reshape", format!("{}×{} to {rows}×{cols}", self.rows, self.cols)));
        }
        Ok(Self { data: self.data, rows, cols })
    }

    /// The rows `index`, in that order.
    ///
    /// # Errors
    /// A row that is not there.
    pub fn select(&self, index: &Index) -> Result<Self> {
        self.check_index("select", index, self.rows)?;
        Ok(self.device().backend().select(self, index))
    }

    /// The reverse of [`Self::select`] for distinct rows: `rows` rows, zeros in those that `index` does not name.
    ///
    /// # Errors
    /// Another number of rows than `index` has, a row beyond `rows`.
    pub fn spread(&self, index: &Index, rows: usize) -> Result<Self> {
        if index.len() != self.rows {
            return Err(Error::shape("spread", format!("{} rows for {} places", self.rows, index.len())));
        }
        self.check_index("spread", index, rows)?;
        Ok(self.device().backend().spread(self, index, rows))
    }

    fn check_index(&self, op: &'static str, index: &Index, rows: usize) -> Result<()> {
        match index.iter().find(|&&row| row >= rows) {
            Some(row) => Err(Error::shape(op, format!("row {row} of {rows}"))),
            None => Ok(()),
        }
    }

    /// Some columns of every row.
    ///
    /// # Errors
    /// Columns that are not there.
    pub fn columns(&self, columns: Range<usize>) -> Result<Self> {
        if columns.start > columns.end || columns.end > self.cols {
            return Err(Error::shape("columns", format!("{columns:?} of {}", self.cols)));
        }
        Ok(self.device().backend().columns(self, columns))
    }

    /// Replaces the columns from `first` on by those of `from`.
    ///
    /// # Errors
    /// Shapes that do not fit, another device.
    pub fn set_columns(&mut self, first: usize, from: &Self) -> Result<()> {
        self.device().check("set_columns", from)?;
        if from.rows != self.rows || first + from.cols > self.cols {
            return Err(Error::shape(
                "set_columns",
                format!("{}×{} at column {first} of {}×{}", from.rows, from.cols, self.rows, self.cols),
            ));
        }
        self.device().backend().set_columns(self, first, from);
        Ok(())
    }

    /// Replaces the rows from `first` on by the rows `range` of `from`.
    ///
    /// # Errors
    /// Rows that are not there, another width or device.
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
        self.device().backend().set_rows(self, first, from, range);
        Ok(())
    }

    /// A copy of some rows.
    ///
    /// # Errors
    /// Rows that are not there.
    pub fn row_range(&self, range: Range<usize>) -> Result<Self> {
        let mut rows = Self::zeros(self.device(), range.len(), self.cols);
        rows.set_rows(0, self, range)?;
        Ok(rows)
    }

    /// Replaces some rows by zeros.
    ///
    /// # Errors
    /// Rows that are not there.
    pub fn clear_rows(&mut self, range: Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.rows {
            return Err(Error::shape("clear_rows", format!("rows {range:?} of {}", self.rows)));
        }
        self.device().backend().clear_rows(self, range);
        Ok(())
    }

    /// Arrays of one width, one below the other.
    ///
    /// # Errors
    /// No array, different widths or devices.
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

    /// Adds `from` elementwise.
    ///
    /// # Errors
    /// Another shape or device.
    pub fn add(&mut self, from: &Self) -> Result<()> {
        self.device().check("add", from)?;
        if self.dims() != from.dims() {
            return Err(Error::shape("add", format!("{:?} to {:?}", from.dims(), self.dims())));
        }
        self.device().backend().add(self, from);
        Ok(())
    }

    /// Multiplies every element.
    pub fn scale(&mut self, by: f32) {
        self.device().backend().scale(self, by);
    }

    /// The sum of squares of all elements.
    #[must_use]
    pub fn sum_of_squares(&self) -> f64 {
        self.device().backend().sum_of_squares(self)
    }

    /// Returns the same numbers on another device.
    #[must_use]
    pub fn to_device(&self, device: Device) -> Self {
        if device == self.device() {
            return self.clone();
        }
        device.backend().upload(self.to_vec(), self.rows, self.cols)
    }
}
