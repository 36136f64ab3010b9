//! Matrices in memory that belongs to somebody else: what kernels read and write.

use std::ops::Range;

use crate::parallel::Shared;

/// Ends a call whose operands do not fit together, which is a bug of the caller: the crate above checks and reports.
#[track_caller]
pub(crate) fn check(op: &str, fits: bool) {
    assert!(fits, "{op}: operands do not fit together");
}

/// `[rows, cols]` to be read: row `r` begins at element `r · stride` of the data. All elements are there.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a, T = f32> {
    pub(crate) data: &'a [T],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Rows one after the other.
    ///
    /// # Panics
    /// Another number of elements than `rows · cols`.
    #[must_use]
    #[track_caller]
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert!(data.len() == rows * cols, "{} elements for {rows}×{cols}", data.len());
        Self { data, rows, cols, stride: cols }
    }

    /// Some columns of every row.
    ///
    /// # Panics
    /// Columns that are not there.
    #[must_use]
    #[track_caller]
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols, "{columns:?} of {}", self.cols);
        let data = self.data.get(columns.start..).unwrap_or_default();
        Self { data, cols: columns.len(), ..self }
    }

    /// Some rows.
    ///
    /// # Panics
    /// Rows that are not there.
    #[must_use]
    #[track_caller]
    pub fn row_range(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let data = self.data.get(rows.start * self.stride..).unwrap_or_default();
        Self { data, rows: rows.len(), ..self }
    }

    /// Rows and columns.
    #[must_use]
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Row `r`.
    #[inline(always)]
    #[must_use]
    pub fn row(&self, r: usize) -> &'a [T] {
        self.part(r, 0, self.cols)
    }

    /// `len` elements of row `r`, from column `at` on.
    #[inline(always)]
    pub(crate) fn part(&self, r: usize, at: usize, len: usize) -> &'a [T] {
        &self.data[r * self.stride + at..][..len]
    }
}

/// `[rows, cols]` to be written; otherwise a [`Mat`]. What a kernel makes itself may hold nothing before.
#[derive(Debug)]
pub struct MatMut<'a> {
    pub(crate) data: Shared<'a>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
}

impl Mat<'_, f64> {
    /// Element `i` in the order of rows.
    pub(crate) fn at(&self, i: usize) -> f64 {
        self.row(i / self.cols)[i % self.cols]
    }
}

impl<'a> MatMut<'a> {
    /// Rows one after the other.
    ///
    /// # Panics
    /// Another number of elements than `rows · cols`.
    #[must_use]
    #[track_caller]
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::over(Shared::new(data), rows, cols)
    }

    /// Makes a matrix over memory that may be uninitialised.
    #[track_caller]
    pub(crate) fn over(data: Shared<'a>, rows: usize, cols: usize) -> Self {
        assert!(data.len() == rows * cols, "{} elements for {rows}×{cols}", data.len());
        Self { data, rows, cols, stride: cols }
    }

    /// Returns the same matrix for one more call.
    #[must_use]
    pub fn again(&mut self) -> MatMut<'_> {
        MatMut { data: self.data, rows: self.rows, cols: self.cols, stride: self.stride }
    }

    /// Some columns of every row.
    ///
    /// # Panics
    /// Columns that are not there.
    #[must_use]
    #[track_caller]
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols, "{columns:?} of {}", self.cols);
        let data = self.data.from(columns.start.min(self.data.len()));
        Self { data, cols: columns.len(), ..self }
    }

    /// Some rows.
    ///
    /// # Panics
    /// Rows that are not there.
    #[must_use]
    #[track_caller]
    pub fn row_range(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let data = self.data.from((rows.start * self.stride).min(self.data.len()));
        Self { data, rows: rows.len(), ..self }
    }

    /// Some rows, for one of several threads.
    ///
    /// # Safety
    /// Nobody else writes or reads them meanwhile.
    #[track_caller]
    pub(crate) unsafe fn at_rows(&self, rows: Range<usize>) -> Self {
        Self { data: self.data, ..*self }.row_range(rows)
    }

    /// Rows and columns.
    #[must_use]
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Row `r`.
    ///
    /// # Safety
    /// It holds numbers, and no other reference to it is alive.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, r: usize) -> &'a mut [f32] {
        // SAFETY: by the contract.
        unsafe { self.data.part(r * self.stride, self.cols) }
    }

    /// Some elements of row `r`.
    ///
    /// # Safety
    /// They hold numbers, and no other reference to them is alive.
    #[inline(always)]
    pub(crate) unsafe fn part(&self, r: usize, columns: Range<usize>) -> &'a mut [f32] {
        // SAFETY: by the contract.
        unsafe { self.data.part(r * self.stride + columns.start, columns.len()) }
    }
}
