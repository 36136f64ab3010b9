//! Linear layers.
//!
//! With a bf16 weight, the other factor is rounded to bf16 as well, and sums are f32. The same holds for a quantised weight,
//! whose values are bf16: it is widened before a product of many rows, and within one of few rows. With an f32 weight,
//! everything is f32.

use half::bf16;
use omnigrpo_kernels::quant::QuantBits;

use crate::device::{Arg, Array, COUNTERS, Dtype, Field, Gpu, Launch};
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

    /// Returns the structure `Codes` of prim.cuh, from row `first` on.
    pub(crate) fn arg(&self, first: usize) -> Arg {
        let [words, groups] = self.row;
        let [codes, scales] =
            [self.codes.place(first * words), self.scales.place(first * groups)].map(Field::Pointer);
        let [bits, words, groups] = [self.bits.bits(), words, groups].map(Field::Size);
        Arg::fields(&[codes, scales, bits, words, groups, Field::Flag(0)])
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

/// Rows to which a product is added.
#[derive(Clone, Copy, Debug)]
pub enum Onto<'a> {
    /// None: the product replaces the output's previous values.
    Nothing,
    /// The output's previous values.
    Output,
    /// Rows in the dtype of the output and of the same width. They are added at the same columns.
    Residual(&'a Array),
}

/// A linear layer: a weight `[n, k]` and an optional bias `[n]`.
#[derive(Clone, Copy, Debug)]
pub struct Affine<'a> {
    pub weight: Weight<'a>,
    pub bias: Option<&'a Array>,
    pub n: usize,
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

/// Number of input rows in a block of the kernels for few rows, number of weight rows in a block, and number of stages.
const FEW_ROWS: usize = 64;
const WEIGHT_ROWS: usize = 64;
const STAGES: usize = 4;
/// Number of columns by which a sum is divided into parts, the same for weights of 4, 8 and 16 bits.
const DEPTH: usize = 128;
/// Number of blocks that is enough to keep a GPU of 132 multiprocessors busy.
const BLOCKS: usize = 264;
// Tiles of a single part need no counter.
const _: () = assert!(BLOCKS / 2 <= COUNTERS);
/// Number of weights in one launch.
const JOINED: usize = 3;

/// The kernels of a kind of weight for up to 8, 16, 32 and 64 rows, the columns of a stage, and the bytes of a weight's row in it.
struct FewRows {
    kernels: [&'static str; 4],
    depth: usize,
    line: usize,
}

impl FewRows {
    fn of(weight: Weight) -> Self {
        match weight {
            Weight::Dense(_) => Self {
                kernels: ["linear/few_rows_1", "linear/few_rows_2", "linear/few_rows_4", "linear/few_rows_8"],
                depth: 64,
                line: 144,
            },
            Weight::Codes(Codes { bits: QuantBits::Eight, .. }) => Self {
                kernels: [
                    "linear/few_rows_of_8_bits_1",
                    "linear/few_rows_of_8_bits_2",
                    "linear/few_rows_of_8_bits_4",
                    "linear/few_rows_of_8_bits_8",
                ],
                depth: 64,
                line: 96,
            },
            Weight::Codes(Codes { bits: QuantBits::Four, .. }) => Self {
                kernels: [
                    "linear/few_rows_of_4_bits_1",
                    "linear/few_rows_of_4_bits_2",
                    "linear/few_rows_of_4_bits_4",
                    "linear/few_rows_of_4_bits_8",
                ],
                depth: 128,
                line: 96,
            },
        }
    }
}

/// Returns the number of parts of a sum over `k` in a launch of `tiles` tiles, and the number of pieces of [`DEPTH`] columns in
/// each. It must not depend on the rows.
fn parts_of(tiles: usize, k: usize) -> [usize; 2] {
    let pieces = k.div_ceil(DEPTH).max(1);
    let each = pieces.div_ceil((BLOCKS / tiles.max(1)).clamp(1, pieces.min(16)));
    [pieces.div_ceil(each), each]
}

/// Returns the number of f32 values that a launch over up to 64 rows and layers with `n` outputs in all needs besides its result.
#[must_use]
pub fn few_rows_scratch(rows: usize, n: usize, k: usize) -> usize {
    let tiles = n.div_ceil(WEIGHT_ROWS);
    match parts_of(tiles, k) {
        [1, _] => 0,
        [parts, _] => tiles * parts * rows.min(FEW_ROWS) * WEIGHT_ROWS,
    }
}

/// Returns the number of rows of `x`, whose rows have `width` elements. Rows without elements are as many as the `others`.
fn rows(x: &Array, width: usize, others: usize) -> usize {
    x.len().checked_div(width).unwrap_or(others)
}

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
                let args = [y.arg(), array.arg(), Arg::NULL, index, rows_arg, Arg::Size(k), k_arg, k_arg];
                self.each("elementwise/copy_rows", rows * k.div_ceil(4), &args);
            }
            Weight::Codes(codes) => self.widen(&y, codes, 0, index, rows),
        }
        y
    }

    fn widen(&self, y: &Array, codes: &Codes, first: usize, index: Option<&Array>, rows: usize) {
        let args = [
            y.arg(),
            codes.arg(first),
            index.map_or(Arg::NULL, Array::pointer),
            Arg::Long(rows as i64),
            Arg::Size(codes.k),
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

    /// Sets the columns `col..col + n` of `y`, whose rows have `width` elements, to `x Wᵀ`, added to `onto`. `W` is rows
    /// `first..first + n` of the weight.
    pub fn linear(
        &self,
        y: &mut Array,
        [col, width]: [usize; 2],
        x: &Array,
        weight: Weight,
        [first, n, k]: [usize; 3],
        onto: Onto,
    ) {
        let x = self.held(x, weight.dtype());
        let w = self.factored(weight, k, first, n);
        let plus = match onto {
            Onto::Nothing => None,
            Onto::Output => Some(y.place(col)),
            Onto::Residual(residual) => Some(residual.place(col)),
        };
        self.product(&Product {
            m: rows(&x, k, y.len() / width.max(1)),
            n,
            k,
            a: Factor::new(&x, 0, k),
            b: w.factor(k).transposed(),
            c: y.place(col),
            c_dtype: y.dtype(),
            ldc: width,
            plus,
        });
    }

    /// Computes the outputs of layers with the same input, with all rows of their weights, in neighbouring columns from `col` on.
    /// The bits of a row depend only on that row and the layers. Neighbours of one kind, up to three, share a launch.
    pub fn linear_rows(
        &self,
        y: &mut Array,
        [mut col, width]: [usize; 2],
        x: &Array,
        layers: &[Affine],
        k: usize,
        onto: Onto,
    ) {
        let kind = |layer: &Affine| match layer.weight {
            Weight::Dense(array) => (array.dtype(), None),
            Weight::Codes(codes) => (Dtype::Bf16, Some(codes.bits)),
        };
        let alike = layers.chunk_by(|a, b| kind(a) == kind(b));
        for layers in alike.flat_map(|alike| alike.chunks(JOINED)) {
            let x = self.held(x, kind(&layers[0]).0);
            let t = rows(&x, k, y.len() / width.max(1));
            let fast = x.dtype() == Dtype::Bf16 && k.is_multiple_of(8);
            let most = if fast { FEW_ROWS } else { 32_768 };
            for begin in (0..t).step_by(most) {
                let (rows, at) = ((t - begin).min(most), begin * width + col);
                let residual = match onto {
                    Onto::Nothing => Arg::NO_ARRAY,
                    Onto::Output => y.arg_at(at),
                    Onto::Residual(residual) => residual.arg_at(at),
                };
                let out = [y.arg_at(at), residual, Arg::Long(width as i64)];
                match fast {
                    true => self.few_rows(out, &x, [begin, rows], layers, k),
                    false => self.rows_product(out, &x, [begin, rows], layers, k),
                }
            }
            col += layers.iter().map(|layer| layer.n).sum::<usize>();
        }
    }

    /// Computes a product over no terms: zeros, or what is added to them.
    pub(crate) fn sum_of_nothing(&self, p: &Product) {
        let zeros = self.zeros(p.n, p.c_dtype);
        let (from, stride) = match p.plus {
            Some(at) if at == p.c => return,
            Some(at) => (Arg::Array(at, p.c_dtype), p.ldc),
            None => (zeros.arg(), 0),
        };
        self.copy_matrix((Arg::Array(p.c, p.c_dtype), p.ldc), (from, stride), [p.m, p.n]);
    }

    /// Computes a product in f32 and rounds it.
    pub(crate) fn rounded_product(&self, p: &Product) {
        let sums = self.alloc(p.m * p.n, Dtype::F32);
        let (out, size) = (|at| (Arg::Array(at, p.c_dtype), p.ldc), [p.m, p.n]);
        if let Some(at) = p.plus {
            self.copy_matrix((sums.arg(), p.n), out(at), size);
        }
        let at = sums.place(0);
        self.product(&Product { c: at, c_dtype: Dtype::F32, ldc: p.n, plus: p.plus.map(|_| at), ..*p });
        self.copy_matrix(out(p.c), (sums.arg(), p.n), size);
    }

    /// Copies a matrix `[rows, cols]` between arrays whose rows are this far apart.
    fn copy_matrix(
        &self,
        (to, to_stride): (Arg, usize),
        (from, stride): (Arg, usize),
        [rows, cols]: [usize; 2],
    ) {
        let [long_rows, to_stride, stride] = [rows, to_stride, stride].map(|n| Arg::Long(n as i64));
        let args = [to, from, Arg::NULL, Arg::NULL, long_rows, Arg::Size(cols), to_stride, stride];
        self.each("elementwise/copy_rows", rows * cols.div_ceil(4), &args);
    }

    /// Returns the structure `Layer` of linear.cu of each layer. Codes are widened if `widened` has arrays for them.
    fn layer_args(layers: &[Affine], widened: &[Factored]) -> [Arg; JOINED] {
        let arg = |(layer, factored): (&Affine, Option<&Factored>)| {
            let low = |array: &Array| u32::from(array.dtype() == Dtype::Bf16);
            let [at, scales] = match (layer.weight, factored) {
                (_, Some(factored)) => [factored.array().place(0), 0],
                (Weight::Dense(array), None) => [array.place(0), 0],
                (Weight::Codes(codes), None) => [codes.codes.place(0), codes.scales.place(0)],
            };
            let bias = layer.bias.map_or(0, |bias| bias.place(0));
            let lows = u32::from(layer.weight.dtype() == Dtype::Bf16) + 2 * layer.bias.map_or(0, low);
            let [at, scales, bias] = [at, scales, bias].map(Field::Pointer);
            Arg::fields(&[at, scales, bias, Field::Size(layer.n), Field::Flag(lows)])
        };
        std::array::from_fn(|i| layers.get(i).map_or(Arg::NO_FIELDS, |layer| arg((layer, widened.get(i)))))
    }

    fn few_rows(&self, out: [Arg; 3], x: &Array, [begin, rows]: [usize; 2], layers: &[Affine], k: usize) {
        let tiles = layers.iter().map(|layer| layer.n.div_ceil(WEIGHT_ROWS)).sum();
        let [parts, pieces] = parts_of(tiles, k);
        let FewRows { kernels, depth, line } = FewRows::of(layers[0].weight);
        let size = rows.div_ceil(8).next_power_of_two().trailing_zeros() as usize;
        let partial = if parts == 1 { 0 } else { tiles * parts * rows * WEIGHT_ROWS };
        let partial = self.alloc(partial, Dtype::F32);
        let shared = STAGES * (WEIGHT_ROWS * line + (8 << size) * (depth + 8) * 2);
        let [a, b, c] = Self::layer_args(layers, &[]);
        let [y, residual, stride] = out;
        let args = [
            y,
            residual,
            stride,
            partial.pointer(),
            self.counters(),
            Arg::Pointer(x.place(begin * k)),
            a,
            b,
            c,
            Arg::Size(rows),
            Arg::Size(k),
            Arg::Size(pieces * DEPTH / depth),
        ];
        self.launch(Launch { kernel: kernels[size], grid: [tiles, parts, 1], threads: 128, shared }, &args);
    }

    fn rows_product(&self, out: [Arg; 3], x: &Array, [begin, rows]: [usize; 2], layers: &[Affine], k: usize) {
        let widened: Vec<_> = layers.iter().map(|layer| self.factored(layer.weight, k, 0, layer.n)).collect();
        let n: usize = layers.iter().map(|layer| layer.n).sum();
        let [a, b, c] = Self::layer_args(layers, &widened);
        let [y, residual, stride] = out;
        let args = [y, residual, stride, x.arg_at(begin * k), a, b, c, Arg::Size(k)];
        let grid = [n.div_ceil(4), rows, 1];
        self.launch(Launch { kernel: "linear/rows_product", grid, threads: 128, shared: 0 }, &args);
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
            m: rows(&dy, width, dx.len() / k.max(1)),
            n: k,
            k: n,
            a: Factor::new(&dy, col, width),
            b: w.factor(k),
            c: dx.place(0),
            c_dtype: dx.dtype(),
            ldc: k,
            plus: adds.then(|| dx.place(0)),
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
            plus: Some(dw.place(first * k)),
        });
    }
}
