//! Linear layers.
//!
//! With a bf16 weight, the other factor is rounded to bf16 as well, and sums are f32. The same holds for a quantised weight,
//! whose values are bf16: it is widened before a product of many rows, and within one of few rows. With an f32 weight,
//! everything is f32.

use half::bf16;
use omnigrpo_kernels::quant::QuantBits;

use crate::device::{Array, COUNTERS, Dtype, Gpu};
use crate::driver::Limits;
use crate::launchers::{self, Element, Layer, linear as kernels};
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
    pub fn new(gpu: &Gpu, bits: QuantBits, [n, k]: [usize; 2], codes: &[u32], scales: &[[bf16; 2]]) -> Self {
        let row = [codes.len() / n.max(1), scales.len() / n.max(1)];
        Self { bits, k, codes: gpu.upload_words(codes), scales: gpu.upload_words(scales), row }
    }

    /// Returns the structure of the kernels for the rows from `first` on.
    pub(crate) fn rows_from(&self, first: usize) -> launchers::Codes<'_> {
        let [row_words, row_groups] = self.row;
        launchers::Codes {
            codes: self.codes.element(first * row_words),
            scales: self.scales.element(first * row_groups),
            bits: self.bits.bits(),
            row_words,
            row_groups,
        }
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

/// Number of input rows in a block of the kernels for few rows, for all weights and for those without codes on a card with enough
/// shared memory; number of weight rows in a block, and number of stages.
const FEW_ROWS: usize = 64;
const MOST_FEW_ROWS: usize = 2 * FEW_ROWS;
const WEIGHT_ROWS: usize = 64;
const STAGES: usize = 4;
/// Bytes of a weight that travel to the second-level cache early, at most half of it. An H100 has 50 MB.
const AHEAD: usize = 24 << 20;
/// Number of columns by which a sum is divided into parts, the same for weights of 4, 8 and 16 bits.
const DEPTH: usize = 128;
/// Number of blocks that is enough to keep a GPU of 132 multiprocessors busy.
const BLOCKS: usize = 264;
// Tiles of a single part need no counter.
const _: () = assert!(BLOCKS / 2 <= COUNTERS);
/// Number of weights in one launch.
const JOINED: usize = 3;

/// The columns of a stage of the kernels for few rows, and the bytes of a weight's row in it, without and with padding.
#[derive(Clone, Copy)]
struct FewRows {
    depth: usize,
    bytes: usize,
    line: usize,
}

impl FewRows {
    fn of(weight: Weight) -> Self {
        match weight {
            Weight::Dense(_) => Self { depth: 64, bytes: 128, line: 144 },
            Weight::Codes(Codes { bits: QuantBits::Eight, .. }) => Self { depth: 64, bytes: 64, line: 96 },
            Weight::Codes(Codes { bits: QuantBits::Four, .. }) => Self { depth: 128, bytes: 64, line: 96 },
        }
    }

    /// Returns the number of rows that a launch takes. No bit depends on it.
    fn most_rows(self, weight: Weight, limits: Limits) -> usize {
        let [_, shared] = self.sizes(MOST_FEW_ROWS);
        match weight {
            Weight::Dense(_) if limits.blocks(shared) >= 2 => MOST_FEW_ROWS,
            _ => FEW_ROWS,
        }
    }

    /// Returns the number of stages that each of `blocks` blocks lets travel to the cache early.
    fn ahead(self, blocks: usize, limits: Limits) -> usize {
        AHEAD.min(limits.cache / 2) / (blocks.max(1) * WEIGHT_ROWS * self.bytes)
    }

    /// Returns the number of the kernel for this many rows, and its bytes of shared memory.
    fn sizes(self, rows: usize) -> [usize; 2] {
        let eights = rows.div_ceil(8).next_power_of_two();
        [eights, STAGES * (WEIGHT_ROWS * self.line + 8 * eights * (self.depth + 8) * 2)]
    }
}

/// Returns the dtype of a layer's products, and the number of bits of its codes.
fn kind(layer: &Affine) -> (Dtype, Option<QuantBits>) {
    match layer.weight {
        Weight::Dense(array) => (array.dtype(), None),
        Weight::Codes(codes) => (Dtype::Bf16, Some(codes.bits)),
    }
}

/// Returns the number of parts of a sum over `k` in a launch of `tiles` tiles, and the number of pieces of [`DEPTH`] columns in
/// each. It must not depend on the rows.
fn parts_of(tiles: usize, k: usize) -> [usize; 2] {
    let pieces = k.div_ceil(DEPTH).max(1);
    let each = pieces.div_ceil((BLOCKS / tiles.max(1)).clamp(1, pieces.min(16)));
    [pieces.div_ceil(each), each]
}

/// Returns the number of f32 values that a launch over up to 128 rows and layers with `n` outputs in all needs besides its result.
pub fn few_rows_scratch(rows: usize, n: usize, k: usize) -> usize {
    let tiles = n.div_ceil(WEIGHT_ROWS);
    match parts_of(tiles, k) {
        [1, _] => 0,
        [parts, _] => tiles * parts * rows.min(MOST_FEW_ROWS) * WEIGHT_ROWS,
    }
}

/// Returns true if the kernels for few rows compute products of this dtype over `k`.
fn on_tensor_cores(dtype: Dtype, k: usize) -> bool {
    dtype == Dtype::Bf16 && k.is_multiple_of(8)
}

/// Returns the number of rows of `x`, whose rows have `width` elements. Rows without elements are as many as the `others`.
fn rows(x: &Array, width: usize, others: usize) -> usize {
    x.len().checked_div(width).unwrap_or(others)
}

impl Gpu {
    /// Returns rows of a weight in the dtype of its product: either the rows with the given indices, or `rows` rows from the
    /// first on.
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
                self.copy_matrix((&y).into(), array.into(), [None, index], [rows, k], [k, k]);
            }
            Weight::Codes(codes) => self.widen(&y, codes, 0, index, rows),
        }
        y
    }

    fn widen(&self, y: &Array, codes: &Codes, first: usize, index: Option<&Array>, rows: usize) {
        self.each(kernels::widen(y, codes.rows_from(first), index, rows, codes.k), rows * codes.k);
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
        let alike = layers.chunk_by(|a, b| kind(a) == kind(b));
        for layers in alike.flat_map(|alike| alike.chunks(JOINED)) {
            let x = self.held(x, kind(&layers[0]).0);
            let t = rows(&x, k, y.len() / width.max(1));
            let fast = on_tensor_cores(x.dtype(), k);
            let few = FewRows::of(layers[0].weight);
            let most = if fast { few.most_rows(layers[0].weight, self.limits()) } else { 32_768 };
            for begin in (0..t).step_by(most) {
                let (rows, at) = ((t - begin).min(most), begin * width + col);
                let residual = match onto {
                    Onto::Nothing => Element::default(),
                    Onto::Output => y.element(at),
                    Onto::Residual(residual) => residual.element(at),
                };
                let out = (y.element(at), residual, width);
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
        let out = |at| Element::new(at, p.c_dtype);
        let (from, stride) = match p.plus {
            Some(at) if at == p.c => return,
            Some(at) => (out(at), p.ldc),
            None => (zeros.element(0), 0),
        };
        self.copy_matrix(out(p.c), from, [None, None], [p.m, p.n], [p.ldc, stride]);
    }

    /// Computes a product in f32 and rounds it.
    pub(crate) fn rounded_product(&self, p: &Product) {
        let sums = self.alloc(p.m * p.n, Dtype::F32);
        let (own, out, size) = (sums.element(0), |at| Element::new(at, p.c_dtype), [p.m, p.n]);
        if let Some(at) = p.plus {
            self.copy_matrix(own, out(at), [None, None], size, [p.n, p.ldc]);
        }
        let plus = p.plus.map(|_| own.at);
        self.product(&Product { c: own.at, c_dtype: Dtype::F32, ldc: p.n, plus, ..*p });
        self.copy_matrix(out(p.c), own, [None, None], size, [p.ldc, p.n]);
    }

    /// Returns the structures of the kernels for the layers. Codes are widened if `widened` has arrays for them.
    fn layers<'a>(layers: &[Affine<'a>], widened: &'a [Factored]) -> [Layer<'a>; JOINED] {
        let low = |dtype| usize::from(dtype == Dtype::Bf16);
        std::array::from_fn(|i| {
            let Some(layer) = layers.get(i) else { return Layer::default() };
            let (at, scales) = match (layer.weight, widened.get(i)) {
                (_, Some(factored)) => (factored.array().into(), Element::default()),
                (Weight::Dense(array), None) => (array.into(), Element::default()),
                (Weight::Codes(codes), None) => ((&codes.codes).into(), (&codes.scales).into()),
            };
            let lows = low(layer.weight.dtype()) + 2 * layer.bias.map_or(0, |bias| low(bias.dtype()));
            Layer { at, scales, bias: layer.bias.into(), n: layer.n, low: lows }
        })
    }

    fn few_rows(
        &self,
        (y, residual, stride): (Element<'_>, Element<'_>, usize),
        x: &Array,
        [begin, rows]: [usize; 2],
        layers: &[Affine],
        k: usize,
    ) {
        let tiles = layers.iter().map(|layer| layer.n.div_ceil(WEIGHT_ROWS)).sum();
        let [parts, pieces] = parts_of(tiles, k);
        let few = FewRows::of(layers[0].weight);
        let [size, shared] = few.sizes(rows);
        let partial = if parts == 1 { 0 } else { tiles * parts * rows * WEIGHT_ROWS };
        let partial = self.alloc(partial, Dtype::F32);
        let ([l0, l1, l2], counters) = (Self::layers(layers, &[]), self.counters());
        let (x, steps) = (x.element(begin * k), pieces * DEPTH / few.depth);
        let kernel = match layers[0].weight {
            Weight::Dense(_) => kernels::few_rows,
            Weight::Codes(Codes { bits: QuantBits::Eight, .. }) => kernels::few_rows_of_8_bits,
            Weight::Codes(Codes { bits: QuantBits::Four, .. }) => kernels::few_rows_of_4_bits,
        };
        let ahead = few.ahead(tiles * parts, self.limits());
        let kernel =
            kernel(size, y, residual, stride, &partial, counters, x, l0, l1, l2, rows, k, steps, ahead);
        self.launch(kernel, [tiles, parts, 1], 128, shared);
    }

    /// Computes `silu(gate) · up`, `[t, k] → [t, n]` in `dtype`, of two layers with n outputs each. The bits are those of
    /// [`Self::linear_rows`], whose output has `dtype`, and of [`Self::swiglu`].
    pub fn swiglu_rows(&self, x: &Array, layers: [Affine; 2], [t, k]: [usize; 2], dtype: Dtype) -> Array {
        let [n, tiles] = [layers[0].n, layers[0].n.div_ceil(WEIGHT_ROWS) * 2];
        let [parts, pieces] = parts_of(tiles, k);
        let alike = kind(&layers[0]) == kind(&layers[1]) && n == layers[1].n;
        let low = [x.dtype(), dtype, layers[0].weight.dtype()] == [Dtype::Bf16; 3];
        // Only the sum of all parts has an activation.
        if parts > 1 || !alike || !low || !on_tensor_cores(x.dtype(), k) {
            let mut gate_up = self.alloc(t * 2 * n, dtype);
            self.linear_rows(&mut gate_up, [0, 2 * n], x, &layers, k, Onto::Nothing);
            return self.swiglu(&gate_up, t, n);
        }
        let y = self.alloc(t * n, dtype);
        let few = FewRows::of(layers[0].weight);
        let kernel = match layers[0].weight {
            Weight::Dense(_) => kernels::few_swiglu,
            Weight::Codes(Codes { bits: QuantBits::Eight, .. }) => kernels::few_swiglu_of_8_bits,
            Weight::Codes(Codes { bits: QuantBits::Four, .. }) => kernels::few_swiglu_of_4_bits,
        };
        let most = few.most_rows(layers[0].weight, self.limits());
        for begin in (0..t).step_by(most) {
            let rows = (t - begin).min(most);
            let [size, shared] = few.sizes(rows);
            let [gate, up, _] = Self::layers(&layers, &[]);
            let (to, x) = (y.element(begin * n), x.element(begin * k));
            let (steps, ahead) = (pieces * DEPTH / few.depth, few.ahead(tiles, self.limits()));
            let kernel = kernel(size, to, n, x, gate, up, rows, k, steps, ahead);
            self.launch(kernel, [n.div_ceil(WEIGHT_ROWS / 2), 1, 1], 128, shared);
        }
        y
    }

    fn rows_product(
        &self,
        (y, residual, stride): (Element<'_>, Element<'_>, usize),
        x: &Array,
        [begin, rows]: [usize; 2],
        layers: &[Affine],
        k: usize,
    ) {
        let widened: Vec<_> = layers.iter().map(|layer| self.factored(layer.weight, k, 0, layer.n)).collect();
        let n: usize = layers.iter().map(|layer| layer.n).sum();
        let [l0, l1, l2] = Self::layers(layers, &widened);
        let kernel = kernels::rows_product(y, residual, stride, x.element(begin * k), l0, l1, l2, k);
        self.launch(kernel, [n.div_ceil(4), rows, 1], 128, 0);
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
