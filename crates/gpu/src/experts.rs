//! Mixtures of experts: products grouped by expert, and the weights of places.
//!
//! A place is a pair of a row and one of its experts. Where places are sorted by expert, the product of an expert runs over
//! consecutive rows. If the bits of a place must not depend on other places, one kernel processes all places, in any order.

use std::ops::Range;

use crate::device::{Array, Dtype, Gpu};
use crate::launchers::{Codes, experts as kernels};
use crate::linear::Weight;
use crate::product::{Factor, Product};
use crate::sums::Mixture;

/// Numbers of places and of outputs of a launch of the kernel for few places; lines of a stage, their bytes, and stages.
const MOST_PLACES: usize = 1024;
const OUTPUTS: usize = 64;
const DEPTH: usize = 64;
const LINE_BYTES: usize = 144;
const STAGES: usize = 4;

/// Yields the index and the places of every expert that has places. `offsets` are the bounds of the places.
fn groups(offsets: &[usize]) -> impl Iterator<Item = (usize, Range<usize>)> {
    let places = offsets.windows(2).map(|ends| ends[0]..ends[1]).enumerate();
    places.filter(|(_, places)| !places.is_empty())
}

/// Experts that the device chose, with places in the order of rows and, in a row, of experts.
#[derive(Debug)]
pub struct Chosen {
    /// Expert of each place.
    pub experts: Array,
    /// Row of each place.
    pub rows: Array,
    /// Places of each row, all with weight 1.
    pub sums: Mixture,
}

impl Gpu {
    /// Chooses the `topk` experts with the largest logits `[rows, all]` of each row, the first of equal ones.
    pub fn choose_experts(&self, logits: &Array, [rows, all, topk]: [usize; 3]) -> Chosen {
        let table = |len| self.alloc(len, Dtype::F32);
        let [experts, row_of, in_order] = [table(rows * topk), table(rows * topk), table(rows * topk)];
        let offsets = self.zeros(rows + 1, Dtype::F32);
        let kernel = kernels::choose(&experts, &row_of, &in_order, &offsets, logits, all, topk);
        self.launch(kernel, [rows, 1, 1], 32, 0);
        Chosen { experts, rows: row_of, sums: Mixture::over(offsets, in_order, rows) }
    }

    /// Sets each place of `y [places, n]` to `x W`, where `W` is the matrix of the place's expert in `weight [experts, k, n]`.
    pub fn experts(&self, y: &mut Array, x: &Array, weight: Weight, offsets: &[usize], [k, n]: [usize; 2]) {
        let x = self.held(x, weight.dtype());
        for (expert, rows) in groups(offsets) {
            let w = self.factored(weight, n, expert * k, k);
            self.product(&Product {
                m: rows.len(),
                n,
                k,
                a: Factor::new(&x, rows.start * k, k),
                b: w.factor(n),
                c: y.place(rows.start * n),
                c_dtype: y.dtype(),
                ldc: n,
                plus: None,
            });
        }
    }

    /// Computes the same product as [`Self::experts`], but the bits of a place depend only on its row and its expert. `experts`
    /// lists the expert of each place; places may be in any order.
    pub fn experts_rows(
        &self,
        y: &mut Array,
        x: &Array,
        weight: Weight,
        experts: &Array,
        [k, n]: [usize; 2],
    ) {
        let (x, places) = (self.held(x, weight.dtype()), experts.len());
        // Copies have 16 bytes.
        if let Weight::Dense(w) = weight
            && w.dtype() == Dtype::Bf16
            && k.is_multiple_of(8)
            && n.is_multiple_of(8)
            && k * n > 0
        {
            return self.few_places(y, &x, w, experts, [k, n]);
        }
        let (dense, codes) = match weight {
            Weight::Dense(w) => (Some(w), Codes::default()),
            Weight::Codes(codes) => (None, codes.rows_from(0)),
        };
        self.each(kernels::rows_product(y, &*x, dense, codes, experts, places, k, n), places * n);
    }

    /// Computes [`Self::experts_rows`] on tensor cores. An expert's matrix is read once for up to 8 to 64 of its places: for twice the
    /// mean number. No bit depends on that number.
    fn few_places(&self, y: &mut Array, x: &Array, w: &Array, experts: &Array, [k, n]: [usize; 2]) {
        let all = w.len() / (k * n);
        for begin in (0..experts.len()).step_by(MOST_PLACES) {
            let places = (experts.len() - begin).min(MOST_PLACES);
            let eights = (2 * places).div_ceil(8 * all.max(1)).next_power_of_two().min(8);
            let lines = STAGES * (DEPTH + 8 * eights);
            let (to, from) = (y.element(begin * n), x.element(begin * k));
            let kernel = kernels::few_places(eights, to, from, w, experts.element(begin), places, k, n);
            let grid = [n.div_ceil(OUTPUTS), all, 1];
            self.launch(kernel, grid, 128, lines * LINE_BYTES + 4 * MOST_PLACES);
        }
    }

    /// Sets each place of `dx [places, k]` to `dy Wᵀ`.
    pub fn experts_dx(
        &self,
        dx: &mut Array,
        dy: &Array,
        weight: Weight,
        offsets: &[usize],
        [k, n]: [usize; 2],
    ) {
        let dy = self.held(dy, weight.dtype());
        for (expert, rows) in groups(offsets) {
            let w = self.factored(weight, n, expert * k, k);
            self.product(&Product {
                m: rows.len(),
                n: k,
                k: n,
                a: Factor::new(&dy, rows.start * n, n),
                b: w.factor(n).transposed(),
                c: dx.place(rows.start * k),
                c_dtype: dx.dtype(),
                ldc: k,
                plus: None,
            });
        }
    }

    /// Adds `xᵀ dy` over the places of each expert to the expert's matrix in the f32 gradient `[experts, k, n]`. The factors of
    /// the product are in `dtype`.
    pub fn experts_dw(
        &self,
        dw: &mut Array,
        x: &Array,
        dy: &Array,
        (offsets, dtype): (&[usize], Dtype),
        [k, n]: [usize; 2],
    ) {
        let (x, dy) = (self.held(x, dtype), self.held(dy, dtype));
        for (expert, rows) in groups(offsets) {
            self.product(&Product {
                m: k,
                n,
                k: rows.len(),
                a: Factor::new(&x, rows.start * k, k).transposed(),
                b: Factor::new(&dy, rows.start * n, n),
                c: dw.place(expert * k * n),
                c_dtype: dw.dtype(),
                ldc: n,
                plus: Some(dw.place(expert * k * n)),
            });
        }
    }

    /// Returns the weight of each place, the number of rows, and the number of experts of a row. The weight is the softmax over
    /// the logits `[rows, experts]` of the experts that the place's row has chosen. `places` lists the places of each row, and
    /// `experts` the expert of each place.
    fn place_weights(
        &self,
        logits: &Array,
        places: &Mixture,
        experts: &Array,
        all: usize,
    ) -> (Array, [usize; 2]) {
        let rows = logits.len() / all.max(1);
        let each = experts.len() / rows.max(1);
        let weights = self.alloc(experts.len(), Dtype::F32);
        self.each(kernels::weights(&weights, logits, places.rows(), experts, rows, each, all), rows);
        (weights, [rows, each])
    }

    fn scale_rows(&self, x: &Array, by: &Array) -> Array {
        let (rows, cols) = (by.len(), x.len() / by.len().max(1));
        let y = self.alloc(x.len(), x.dtype());
        self.each_quad(kernels::scale_rows(&y, x, by, rows, cols), rows, cols);
        y
    }

    /// Multiplies each place of `x` by its weight. `all` is the number of experts.
    pub fn weigh(&self, x: &Array, logits: &Array, places: &Mixture, experts: &Array, all: usize) -> Array {
        self.scale_rows(x, &self.place_weights(logits, places, experts, all).0)
    }

    /// Returns the gradients of [`Self::weigh`] with respect to `x` and, in f32, with respect to the logits.
    pub fn weigh_back(
        &self,
        [x, dy]: [&Array; 2],
        logits: &Array,
        places: &Mixture,
        experts: &Array,
        all: usize,
    ) -> [Array; 2] {
        let (weights, [rows, each]) = self.place_weights(logits, places, experts, all);
        let (count, cols) = (experts.len(), x.len() / experts.len().max(1));
        let dots = self.alloc(count, Dtype::F32);
        self.each_row(kernels::row_dots(&dots, dy, x, cols), count, cols);
        let dlogits = self.zeros(logits.len(), Dtype::F32);
        let places = places.rows();
        let kernel = kernels::weights_back(&dlogits, &weights, &dots, places, experts, rows, each, all);
        self.each(kernel, rows);
        [self.scale_rows(dy, &weights), dlogits]
    }
}
