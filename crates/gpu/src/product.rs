//! Matrix products: cuBLASLt computes them on a GPU, plain loops on the emulator.

use crate::device::{Array, Dtype};

/// A factor of a product: a matrix in memory whose rows begin `ld` elements apart, or its transpose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factor {
    pub at: u64,
    pub dtype: Dtype,
    pub ld: usize,
    pub transposed: bool,
}

impl Factor {
    /// Selects the columns that start at `col` in a matrix whose rows have `ld` elements.
    pub(crate) fn new(array: &Array, col: usize, ld: usize) -> Self {
        Self { at: array.place(col), dtype: array.dtype(), ld, transposed: false }
    }

    pub(crate) fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }
}

/// A product `c [m, n] = a [m, k] · b [k, n] (+ plus [m, n])` of row-major matrices. Both factors have the same dtype, and sums are
/// f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Factor,
    pub b: Factor,
    pub c: u64,
    pub c_dtype: Dtype,
    pub ldc: usize,
    /// Matrix that is added, in the dtype and with the row length of `c`. It may be `c` itself.
    pub plus: Option<u64>,
}
