//! Copies, sums and elementwise functions.

use omnigrpo_kernels::activation::Activation;

use crate::device::{Arg, Array, Dtype, Gpu};

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
    #[must_use]
    pub fn new(first: usize, stride: usize) -> Self {
        Self { first, stride, index: None }
    }

    /// Selects rows by index.
    #[must_use]
    pub fn of(self, index: &'a Array) -> Self {
        Self { index: Some(index), ..self }
    }

    fn index(self) -> Arg {
        self.index.map_or(Arg::NULL, Array::pointer)
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

fn quads(rows: usize, cols: usize) -> usize {
    rows * cols.div_ceil(4)
}

fn kind(act: Activation) -> Arg {
    Arg::Int(match act {
        Activation::GeluErf => 0,
        Activation::GeluTanh => 1,
        Activation::QuickGelu => 2,
        Activation::Silu => 3,
        Activation::Tanh => 4,
    })
}

impl Gpu {
    /// Returns a copy of an array, converted to a dtype.
    #[must_use]
    pub fn cast(&self, x: &Array, dtype: Dtype) -> Array {
        let y = self.alloc(x.len(), dtype);
        self.each("elementwise/cast", x.len().div_ceil(4), &[y.arg(), x.arg(), Arg::Long(x.len() as i64)]);
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
        let args = [to.arg(), from.arg(), Arg::Long(to.len() as i64)];
        self.each("elementwise/add", to.len().div_ceil(4), &args);
    }

    /// Computes `x *= by` for every element.
    pub fn scale(&self, x: &mut Array, by: f32) {
        let args = [x.arg(), Arg::Float(by), Arg::Long(x.len() as i64)];
        self.each("elementwise/scale", x.len().div_ceil(4), &args);
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
        let args = [
            to.arg_at(to_place.first),
            from.arg_at(from_place.first),
            to_place.index(),
            from_place.index(),
            Arg::Long(rows as i64),
            Arg::Size(cols),
            Arg::Long(to_place.stride as i64),
            Arg::Long(from_place.stride as i64),
        ];
        self.each("elementwise/copy_rows", quads(rows, cols), &args);
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
        let args = [
            y.arg_at(first),
            bias.arg(),
            residual.map_or(Arg::NO_ARRAY, |r| r.arg_at(first)),
            Arg::Long(rows as i64),
            Arg::Size(bias.len()),
            Arg::Long(stride as i64),
        ];
        self.each("elementwise/bias_rows", quads(rows, bias.len()), &args);
    }

    /// Computes `act(x)` for every element.
    #[must_use]
    pub fn activation(&self, x: &Array, act: Activation) -> Array {
        let y = self.alloc(x.len(), x.dtype());
        let args = [y.arg(), x.arg(), kind(act), Arg::Long(x.len() as i64)];
        self.each("elementwise/activation", x.len().div_ceil(4), &args);
        y
    }

    /// Replaces `x` with the gradient with respect to the input of the activation.
    pub fn activation_back(&self, x: &mut Array, dy: &Array, act: Activation) {
        let args = [x.arg(), dy.arg(), kind(act), Arg::Long(x.len() as i64)];
        self.each("elementwise/activation_back", x.len().div_ceil(4), &args);
    }

    /// Computes `silu(gate) · up` from `[t, 2i]` to `[t, i]`.
    #[must_use]
    pub fn swiglu(&self, gate_up: &Array, t: usize, i: usize) -> Array {
        let y = self.alloc(t * i, gate_up.dtype());
        let args = [y.arg(), gate_up.arg(), Arg::Long(t as i64), Arg::Size(i)];
        self.each("elementwise/swiglu", quads(t, i), &args);
        y
    }

    /// Replaces `gate_up` with its gradient.
    pub fn swiglu_back(&self, gate_up: &mut Array, dy: &Array, t: usize, i: usize) {
        let args = [gate_up.arg(), dy.arg(), Arg::Long(t as i64), Arg::Size(i)];
        self.each("elementwise/swiglu_back", quads(t, i), &args);
    }

    /// Computes `x · scale (+ residual)` with one scale per column. The result has the dtype of the residual, or of `x` if there
    /// is no residual.
    #[must_use]
    pub fn scale_columns(&self, x: &Array, residual: Option<&Array>, scale: &Array) -> Array {
        let (rows, cols) = (x.len() / scale.len().max(1), scale.len());
        let y = self.alloc(x.len(), residual.unwrap_or(x).dtype());
        let residual = residual.map_or(Arg::NO_ARRAY, Array::arg);
        let args = [y.arg(), x.arg(), residual, scale.arg(), Arg::Long(rows as i64), Arg::Size(cols)];
        self.each("elementwise/scale_columns", quads(rows, cols), &args);
        y
    }

    /// Rotates, in place, the first `heads` heads of `2 · half` columns in each row. `cos` and `sin` are f32 `[rows, half]`.
    pub fn rotate(
        &self,
        x: &mut Array,
        [rows, cols]: [usize; 2],
        cos: &Array,
        sin: &Array,
        heads: usize,
        inverse: bool,
    ) {
        let half = cos.len() / rows.max(1);
        let args = [
            x.arg(),
            cos.pointer(),
            sin.pointer(),
            Arg::Long(rows as i64),
            Arg::Size(cols),
            Arg::Size(heads),
            Arg::Size(half),
            Arg::Float(if inverse { -1.0 } else { 1.0 }),
        ];
        self.each("elementwise/rotate", rows * heads * half, &args);
    }

    /// Zeroes dropped elements of `x [rows, cols]` and multiplies the others by `keep`.
    ///
    /// Each pair of elements draws its random bits from SplitMix64 of `key`, the key of the row (without `row_keys`, its index)
    /// and the column of the pair. An element is dropped if its value is below `threshold`.
    #[must_use]
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
        let args = [
            y.arg(),
            x.arg(),
            row_keys.map_or(Arg::NULL, Array::pointer),
            Arg::Word(key),
            Arg::Word(threshold),
            Arg::Float(keep),
            Arg::Long(rows as i64),
            Arg::Size(cols),
        ];
        self.each("elementwise/dropout", rows * cols.div_ceil(2), &args);
        y
    }
}
