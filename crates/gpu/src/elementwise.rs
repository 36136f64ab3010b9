//! Copies, sums and elementwise functions.

use omnigrpo_kernels::activation::Activation;

use crate::device::{Array, Dtype, Gpu};
use crate::launchers::{Element, elementwise};

/// The position of rows in memory.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Index of the element in the first column of row 0.
    pub first: usize,
    /// Distance between adjacent rows, in elements.
    pub stride: usize,
    /// Row indices, as words; `None` for 0, 1, 2, ….
    pub index: Option<&'a Array>,
}

impl<'a> Place<'a> {
    /// Addresses rows of `stride` elements. The first row begins at element `first`.
    pub fn new(first: usize, stride: usize) -> Self {
        Self { first, stride, index: None }
    }

    /// Selects rows by index.
    #[must_use]
    pub fn of(self, index: &'a Array) -> Self {
        Self { index: Some(index), ..self }
    }
}

/// An array in the requested dtype: the array itself, or a converted copy.
pub(crate) enum Held<'a> {
    Same(&'a Array),
    Cast(Array),
}

impl std::ops::Deref for Held<'_> {
    type Target = Array;

    fn deref(&self) -> &Array {
        match self {
            Self::Same(array) => array,
            Self::Cast(array) => array,
        }
    }
}

/// Returns the number of an activation in the kernels.
fn kind(act: Activation) -> usize {
    match act {
        Activation::GeluErf => 0,
        Activation::GeluTanh => 1,
        Activation::QuickGelu => 2,
        Activation::Silu => 3,
        Activation::Tanh => 4,
    }
}

impl Gpu {
    /// Returns a copy of an array, converted to a dtype.
    pub fn cast(&self, x: &Array, dtype: Dtype) -> Array {
        let y = self.alloc(x.len(), dtype);
        self.each(elementwise::cast(&y, x, x.len()), x.len().div_ceil(4));
        y
    }

    pub(crate) fn held<'a>(&self, x: &'a Array, dtype: Dtype) -> Held<'a> {
        match x.dtype() == dtype {
            true => Held::Same(x),
            false => Held::Cast(self.cast(x, dtype)),
        }
    }

    /// Computes `to += from` for every element.
    pub fn add(&self, to: &mut Array, from: &Array) {
        let len = to.len();
        self.each(elementwise::add(to, from, len), len.div_ceil(4));
    }

    /// Computes `x *= by` for every element.
    pub fn scale(&self, x: &mut Array, by: f32) {
        let len = x.len();
        self.each(elementwise::scale(x, by, len), len.div_ceil(4));
    }

    /// Copies a rectangle of `rows × cols` values from one place to another.
    pub fn copy_rows(
        &self,
        to: &mut Array,
        to_place: Place,
        from: &Array,
        from_place: Place,
        [rows, cols]: [usize; 2],
    ) {
        let (to, from) = (to.element(to_place.first), from.element(from_place.first));
        let strides = [to_place, from_place].map(|place| place.stride);
        self.copy_matrix(to, from, [to_place, from_place].map(|place| place.index), [rows, cols], strides);
    }

    /// Copies a rectangle whose first elements are `to` and `from`, with rows in the order of `indices`.
    pub(crate) fn copy_matrix(
        &self,
        to: Element,
        from: Element,
        [to_rows, from_rows]: [Option<&Array>; 2],
        [rows, cols]: [usize; 2],
        [to_stride, from_stride]: [usize; 2],
    ) {
        let kernel = elementwise::copy_rows(to, from, to_rows, from_rows, rows, cols, to_stride, from_stride);
        self.each_quad(kernel, rows, cols);
    }

    /// Sets the columns `first..first + bias.len()` of rows of `stride` elements to the bias. If `residual` is given, its values
    /// in these columns are added.
    pub fn bias_rows(
        &self,
        y: &mut Array,
        first: usize,
        stride: usize,
        rows: usize,
        bias: &Array,
        residual: Option<&Array>,
    ) {
        let (residual, cols) = (residual.map(|residual| residual.element(first)), bias.len());
        let kernel = elementwise::bias_rows(y.element(first), bias, residual, rows, cols, stride);
        self.each_quad(kernel, rows, cols);
    }

    /// Computes `act(x)` for every element.
    pub fn activation(&self, x: &Array, act: Activation) -> Array {
        let y = self.alloc(x.len(), x.dtype());
        self.each(elementwise::activation(&y, x, kind(act), x.len()), x.len().div_ceil(4));
        y
    }

    /// Replaces `x` with the gradient with respect to the input of the activation.
    pub fn activation_back(&self, x: &mut Array, dy: &Array, act: Activation) {
        let len = x.len();
        self.each(elementwise::activation_back(x, dy, kind(act), len), len.div_ceil(4));
    }

    /// Computes `silu(gate) · up` from `[t, 2i]` to `[t, i]`.
    pub fn swiglu(&self, gate_up: &Array, t: usize, i: usize) -> Array {
        let y = self.alloc(t * i, gate_up.dtype());
        self.each_quad(elementwise::swiglu(&y, gate_up, t, i), t, i);
        y
    }

    /// Replaces `gate_up` with its gradient, and sets `y`, if given, to [`Self::swiglu`] of the previous values.
    pub fn swiglu_back(&self, gate_up: &mut Array, dy: &Array, y: Option<&mut Array>, t: usize, i: usize) {
        self.each_quad(elementwise::swiglu_back(gate_up, dy, y.as_deref(), t, i), t, i);
    }

    /// Returns `x + by` in f32.
    pub fn shifted(&self, x: &Array, by: f32) -> Array {
        let y = self.alloc(x.len(), Dtype::F32);
        self.each(elementwise::shifted(&y, x, x.len(), by), x.len());
        y
    }

    /// Rotates, in place, the first `2 · half` columns of the first heads of each row. `heads` states their number and width.
    /// `cos` and `sin` are f32 `[rows, half]`.
    pub fn rotate(
        &self,
        x: &mut Array,
        [rows, cols]: [usize; 2],
        cos: &Array,
        sin: &Array,
        [heads, dim]: [usize; 2],
        inverse: bool,
    ) {
        let half = cos.len() / rows.max(1);
        let sign = if inverse { -1.0 } else { 1.0 };
        let kernel = elementwise::rotate(x, cos, sin, rows, cols, heads, dim, half, sign);
        self.each(kernel, rows * heads * half);
    }

    /// Zeroes dropped elements of `x [rows, cols]` and multiplies the others by `keep`.
    ///
    /// Each pair of elements draws its random bits from SplitMix64 of `key`, the key of the row (without `row_keys`, its index)
    /// and the column of the pair. An element is dropped if its value is below `threshold`.
    pub fn dropout(
        &self,
        x: &Array,
        cols: usize,
        row_keys: Option<&Array>,
        key: u64,
        threshold: u64,
        keep: f32,
    ) -> Array {
        let rows = x.len() / cols.max(1);
        let y = self.alloc(x.len(), x.dtype());
        let kernel = elementwise::dropout(&y, x, row_keys, key, threshold, keep, rows, cols);
        self.each(kernel, rows * cols.div_ceil(2));
        y
    }
}
