//! Linear layers.
//!
//! With a bf16 weight, the other factor is rounded to bf16 as well, and sums are f32. The same holds for a quantised weight,
//! which is widened to bf16. With an f32 weight, everything is f32.

use half::bf16;
use omnigrpo_kernels::quant::QuantBits;

use crate::device::{Arg, Array, Dtype, Gpu, Launch};
use crate::product::{Factor, Product};

/// A weight of 8 or 4 bits on a device, in the layout that `QuantMatrix::by_rows` in `omnigrpo_kernels` returns.
#[derive(Debug)]
pub struct Codes {
    bits: QuantBits,
    k: usize,
    codes: Array,
    scales: Array,
    /// Number of words of codes per row, and number of scales per row.
    row: [usize; 2],
}

impl Codes {
    /// Uploads the codes and scales (`{min, step}`) of `n` rows of `k` elements.
    #[must_use]
    pub fn new(gpu: &Gpu, bits: QuantBits, [n, k]: [usize; 2], codes: &[u32], scales: &[[bf16; 2]]) -> Self {
        let row = [codes.len() / n.max(1), scales.len() / n.max(1)];
        Self { bits, k, codes: gpu.upload_words(codes), scales: gpu.upload_words(scales), row }
    }
}

/// A weight `[n, k]` on a device.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// Values in f32 or bf16.
    Dense(&'a Array),
    /// Codes of 8 or 4 bits.
    Codes(&'a Codes),
}

/// Terms added to a product.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plus<'a> {
    /// Bias, with one number per column.
    pub bias: Option<&'a Array>,
    /// Rows of the same width as the output's rows. They are added at the same columns.
    pub residual: Option<&'a Array>,
    /// True if the product is added to the output's previous values, instead of a residual.
    pub output: bool,
}

/// A weight, or a piece of it, in the form that products read.
pub(crate) enum Factored<'a> {
    Part(&'a Array, usize),
    Widened(Array),
}

impl Weight<'_> {
    /// Returns the dtype of both factors in a product with this weight.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::Dense(array) => array.dtype(),
            Self::Codes(_) => Dtype::Bf16,
        }
    }
}

impl Factored<'_> {
    pub(crate) fn array(&self) -> &Array {
        match self {
            Self::Part(array, _) => array,
            Self::Widened(array) => array,
        }
    }

    fn first(&self) -> usize {
        match self {
            Self::Part(_, first) => *first,
            Self::Widened(_) => 0,
        }
    }

    pub(crate) fn factor(&self, k: usize) -> Factor {
        Factor::new(self.array(), self.first(), k)
    }
}

/// Number of input rows in a block of the kernel for few rows. The constants below are its weight rows per block, the columns of
/// a stage and the number of stages.
const FEW_ROWS: usize = 64;
const WEIGHT_ROWS: usize = 64;
const DEPTH: usize = 64;
const STAGES: usize = 4;
/// Number of blocks that is enough to keep a GPU of 132 multiprocessors busy.
const BLOCKS: usize = 264;

impl Gpu {
    /// Returns rows of a weight in the dtype of its product: either the rows with the given indices, or `rows` rows from the
    /// first on.
    #[must_use]
    pub fn weight_rows(
        &self,
        weight: Weight,
        k: usize,
        index: Option<&Array>,
        rows: usize,
        dtype: Dtype,
    ) -> Array {
        let y = self.alloc(rows * k, dtype);
        match weight {
            Weight::Dense(array) => {
                let index = index.map_or(Arg::NULL, Array::pointer);
                let (rows_arg, k_arg) = (Arg::Long(rows as i64), Arg::Long(k as i64));
                let args =
                    [y.arg(), array.arg(), Arg::NULL, index, rows_arg, Arg::Int(k as i32), k_arg, k_arg];
                self.each("elementwise/copy_rows", rows * k.div_ceil(4), &args);
            }
            Weight::Codes(codes) => self.widen(&y, codes, 0, index, rows),
        }
        y
    }

    fn widen(&self, y: &Array, codes: &Codes, first: usize, index: Option<&Array>, rows: usize) {
        let [words, groups] = codes.row;
        let args = [
            y.arg(),
            Arg::Pointer(codes.codes.place(first * words)),
            Arg::Pointer(codes.scales.place(first * groups)),
            index.map_or(Arg::NULL, Array::pointer),
            Arg::Long(rows as i64),
            Arg::Int(codes.k as i32),
            Arg::Int(codes.bits.bits() as i32),
            Arg::Int(words as i32),
            Arg::Int(groups as i32),
        ];
        self.each("linear/widen", rows * codes.k, &args);
    }

    /// Returns rows `first..first + rows` of a weight.
    pub(crate) fn factored<'a>(
        &self,
        weight: Weight<'a>,
        k: usize,
        first: usize,
        rows: usize,
    ) -> Factored<'a> {
        match weight {
            Weight::Dense(array) => Factored::Part(array, first * k),
            Weight::Codes(codes) => {
                let y = self.alloc(rows * k, Dtype::Bf16);
                self.widen(&y, codes, first, None, rows);
                Factored::Widened(y)
            }
        }
    }

    /// Sets the columns `col..col + n` of `y`, whose rows have `width` elements, to `x Wᵀ`, or adds the product to them. `W` is
    /// rows `first..first + n` of the weight.
    pub fn linear(
        &self,
        y: &mut Array,
        [col, width]: [usize; 2],
        x: &Array,
        weight: Weight,
        [first, n, k]: [usize; 3],
        adds: bool,
    ) {
        let x = self.held(x, weight.dtype());
        let w = self.factored(weight, k, first, n);
        self.product(&Product {
            m: x.len() / k.max(1),
            n,
            k,
            a: Factor::new(&x, 0, k),
            b: w.factor(k).transposed(),
            c: y.place(col),
            c_dtype: y.dtype(),
            ldc: width,
            adds,
        });
    }

    /// Computes the same product as [`Self::linear`] with all rows of the weight, but the bits of a row depend only on that row
    /// and the weight.
    pub fn linear_rows(
        &self,
        y: &mut Array,
        [col, width]: [usize; 2],
        x: &Array,
        weight: Weight,
        [n, k]: [usize; 2],
        plus: Plus,
    ) {
        let x = self.held(x, weight.dtype());
        let w = self.factored(weight, k, 0, n);
        let t = x.len() / k.max(1);
        let fast = weight.dtype() == Dtype::Bf16 && k.is_multiple_of(8);
        for begin in (0..t).step_by(if fast { FEW_ROWS } else { 32_768 }) {
            let rows = (t - begin).min(if fast { FEW_ROWS } else { 32_768 });
            let (partial, parts) = match fast {
                true => self.few_rows(&x, begin, rows, &w, [n, k]),
                false => {
                    let partial = self.alloc(rows * n, Dtype::F32);
                    let grid = [n.div_ceil(4), rows, 1];
                    let (n_arg, k_arg) = (Arg::Int(n as i32), Arg::Int(k as i32));
                    let args =
                        [partial.pointer(), x.arg_at(begin * k), w.array().arg_at(w.first()), n_arg, k_arg];
                    self.launch(
                        Launch { kernel: "linear/rows_product", grid, threads: 128, shared: 0 },
                        &args,
                    );
                    (partial, 1)
                }
            };
            let at = begin * width + col;
            let own = if plus.output { y.arg_at(at) } else { Arg::NO_ARRAY };
            let args = [
                y.arg_at(at),
                Arg::Long(width as i64),
                partial.pointer(),
                plus.bias.map_or(Arg::NO_ARRAY, Array::arg),
                plus.residual.map_or(own, |residual| residual.arg_at(at)),
                Arg::Long(width as i64),
                Arg::Int(parts as i32),
                Arg::Long(rows as i64),
                Arg::Int(n as i32),
            ];
            self.each("linear/few_rows_finish", rows * n, &args);
        }
    }

    fn few_rows(
        &self,
        x: &Array,
        begin: usize,
        rows: usize,
        w: &Factored,
        [n, k]: [usize; 2],
    ) -> (Array, usize) {
        let (tiles, depth) = (n.div_ceil(WEIGHT_ROWS), k.div_ceil(DEPTH));
        let parts = (BLOCKS / tiles.max(1)).clamp(1, depth.clamp(1, 16));
        let steps = depth.div_ceil(parts);
        let parts = depth.div_ceil(steps.max(1)).max(1);
        let (kernel, blocks) = match rows {
            0..=8 => ("linear/few_rows_1", 1),
            9..=16 => ("linear/few_rows_2", 2),
            17..=32 => ("linear/few_rows_4", 4),
            _ => ("linear/few_rows_8", 8),
        };
        let partial = self.alloc(parts * rows * n, Dtype::F32);
        let shared = STAGES * (WEIGHT_ROWS + 8 * blocks) * (DEPTH + 8) * 2;
        let args = [
            partial.pointer(),
            Arg::Pointer(x.place(begin * k)),
            Arg::Pointer(w.array().place(w.first())),
            Arg::Int(rows as i32),
            Arg::Int(n as i32),
            Arg::Int(k as i32),
            Arg::Int(steps as i32),
        ];
        self.launch(Launch { kernel, grid: [tiles, parts, 1], threads: 128, shared }, &args);
        (partial, parts)
    }

    /// Sets `dx [t, k]` to `dy W`, or adds the product to it. `W` is rows `first..first + n` of the weight. The columns of these
    /// rows begin at `col` in `dy`, whose rows have `width` elements.
    pub fn linear_dx(
        &self,
        dx: &mut Array,
        dy: &Array,
        [col, width]: [usize; 2],
        weight: Weight,
        [first, n, k]: [usize; 3],
        adds: bool,
    ) {
        let dy = self.held(dy, weight.dtype());
        let w = self.factored(weight, k, first, n);
        self.product(&Product {
            m: dy.len() / width.max(1),
            n: k,
            k: n,
            a: Factor::new(&dy, col, width),
            b: w.factor(k),
            c: dx.place(0),
            c_dtype: dx.dtype(),
            ldc: k,
            adds,
        });
    }

    /// Adds `dyᵀ x` to rows `first..first + n` of an f32 gradient `[_, k]`. The factors of the product are in `dtype`.
    pub fn linear_dw(
        &self,
        dw: &mut Array,
        x: &Array,
        dy: &Array,
        [col, width]: [usize; 2],
        [first, n, k]: [usize; 3],
        dtype: Dtype,
    ) {
        let (x, dy) = (self.held(x, dtype), self.held(dy, dtype));
        self.product(&Product {
            m: n,
            n: k,
            k: x.len() / k.max(1),
            a: Factor::new(&dy, col, width).transposed(),
            b: Factor::new(&x, 0, k),
            c: dw.place(first * k),
            c_dtype: dw.dtype(),
            ldc: k,
            adds: true,
        });
    }
}
