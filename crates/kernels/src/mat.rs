//! Borrowed matrices that kernels read and write.

use std::ops::Range;

use crate::parallel::Shared;

/// Panics with the given shapes if the operands of a kernel do not fit together. Such a mismatch is a bug of the caller: the `ops`
/// crate checks shapes and reports errors.
macro_rules! check {
    ($op:literal, $fits:expr, $($shape:expr),+ $(,)?) => {
        if !$fits {
            let shapes = [$(format!("{} is {:?}", stringify!($shape), $shape)),+].join(", ");
            panic!("{}: operands do not fit together: {shapes}", $op);
        }
    };
}
pub(crate) use check;

/// A `[rows, cols]` matrix to read.
///
/// Row `r` begins at element `r · stride` of the data. Every element of the matrix is inside the data.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a, T = f32> {
    pub(crate) data: &'a [T],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Creates a matrix of contiguous rows.
    ///
    /// # Panics
    /// Panics if `data` does not have `rows · cols` elements.
    #[must_use]
    #[track_caller]
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert!(data.len() == rows * cols, "{} elements for {rows}×{cols}", data.len());
        Self { data, rows, cols, stride: cols }
    }

    /// Returns the given columns of every row.
    ///
    /// # Panics
    /// Panics if `columns` is out of range.
    #[must_use]
    #[track_caller]
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols, "{columns:?} of {}", self.cols);
        let data = self.data.get(columns.start..).unwrap_or_default();
        Self { data, cols: columns.len(), ..self }
    }

    /// Returns the given rows.
    ///
    /// # Panics
    /// Panics if `rows` is out of range.
    #[must_use]
    #[track_caller]
    pub fn row_range(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let data = self.data.get(rows.start * self.stride..).unwrap_or_default();
        Self { data, rows: rows.len(), ..self }
    }

    #[must_use]
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    #[inline(always)]
    #[must_use]
    pub fn row(&self, r: usize) -> &'a [T] {
        self.part(r, 0, self.cols)
    }

    /// Returns `len` elements of row `r`, starting at column `at`.
    #[inline(always)]
    pub(crate) fn part(&self, r: usize, at: usize, len: usize) -> &'a [T] {
        &self.data[r * self.stride + at..][..len]
    }
}

/// A `[rows, cols]` matrix to write, laid out like [`Mat`]. The memory of a kernel's own output may be uninitialised.
#[derive(Debug)]
pub struct MatMut<'a> {
    pub(crate) data: Shared<'a>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
}

impl Mat<'_, f64> {
    /// Returns element `i` in row-major order.
    pub(crate) fn at(&self, i: usize) -> f64 {
        self.row(i / self.cols)[i % self.cols]
    }
}

impl<'a> MatMut<'a> {
    /// Creates a matrix of contiguous rows.
    ///
    /// # Panics
    /// Panics if `data` does not have `rows · cols` elements.
    #[must_use]
    #[track_caller]
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::over(Shared::new(data), rows, cols)
    }

    /// Creates a matrix of contiguous rows over memory that may be uninitialised.
    #[track_caller]
    pub(crate) fn over(data: Shared<'a>, rows: usize, cols: usize) -> Self {
        assert!(data.len() == rows * cols, "{} elements for {rows}×{cols}", data.len());
        Self { data, rows, cols, stride: cols }
    }

    /// Reborrows the matrix for another call.
    #[must_use]
    pub fn again(&mut self) -> MatMut<'_> {
        MatMut { data: self.data, rows: self.rows, cols: self.cols, stride: self.stride }
    }

    /// Returns the given columns of every row.
    ///
    /// # Panics
    /// Panics if `columns` is out of range.
    #[must_use]
    #[track_caller]
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols, "{columns:?} of {}", self.cols);
        let data = self.data.from(columns.start.min(self.data.len()));
        Self { data, cols: columns.len(), ..self }
    }

    /// Returns the given rows.
    ///
    /// # Panics
    /// Panics if `rows` is out of range.
    #[must_use]
    #[track_caller]
    pub fn row_range(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let data = self.data.from((rows.start * self.stride).min(self.data.len()));
        Self { data, rows: rows.len(), ..self }
    }

    /// Returns the given rows, so that several threads can write disjoint rows.
    ///
    /// # Safety
    /// While the result is alive, nothing else may read or write these rows.
    #[track_caller]
    pub(crate) unsafe fn at_rows(&self, rows: Range<usize>) -> Self {
        Self { data: self.data, ..*self }.row_range(rows)
    }

    #[must_use]
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Returns row `r`.
    ///
    /// # Safety
    /// The row must be initialised, and no other reference to it may be alive.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, r: usize) -> &'a mut [f32] {
        // SAFETY: guaranteed by this function's contract.
        unsafe { self.data.part(r * self.stride, self.cols) }
    }

    /// Returns the given columns of row `r`.
    ///
    /// # Safety
    /// These elements must be initialised, and no other reference to them may be alive.
    #[inline(always)]
    pub(crate) unsafe fn part(&self, r: usize, columns: Range<usize>) -> &'a mut [f32] {
        // SAFETY: guaranteed by this function's contract.
        unsafe { self.data.part(r * self.stride + columns.start, columns.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(
        expected = "rms norm: operands do not fit together: x.dims() is (2, 3), weight.len() is 4"
    )]
    fn a_mismatch_is_told_with_the_shapes() {
        let _ = crate::norm::rms_forward(Mat::new(&[0.0; 6], 2, 3), &[1.0; 4], 1e-6);
    }
}
