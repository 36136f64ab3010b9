//! Mixture-of-experts layers: products grouped by expert, and the weighting of expert outputs.
//!
//! A *place* is a pair of a row and one of its experts. Places are sorted by expert, then by row. The places of an expert are
//! therefore consecutive rows, and their product is one [`crate::linear`] call.
//!
//! Weights are `[experts, k, n]`, the layout of published weights: `y = x W` for row vectors. To [`crate::linear`], such a matrix
//! is a layer whose inputs and outputs are exchanged. Our product is therefore the input gradient of that layer, and our input
//! gradient is its product.
//!
//! The bits of a place's result depend only on its row, its expert and the inner size. Experts with few rows have a kernel of their own
//! with the same bits.

mod few;

use std::ops::Range;

use crate::linear::{self, Gradient, Layer};
use crate::mat::{Mat, MatMut, check};
use crate::parallel::tasks;
use crate::paths::Path;
use crate::profile::{self, Op, span};
use crate::{Weight, buffer};

/// Offsets of the places of each expert: expert `e` has the places `offsets[e]..offsets[e + 1]`.
#[derive(Clone, Copy, Debug)]
pub struct Groups<'a>(pub &'a [usize]);

/// Minimum number of experts per thread at which each expert is computed by a single thread. With fewer experts, all threads
/// share the product of every expert.
const ROUNDS: usize = 4;

impl Groups<'_> {
    /// Calls `f(expert, places)` for every expert that has places. `work` is the work of one place.
    ///
    /// With many experts, a product inside `f` runs on the thread that calls `f`, so that small products do not wait for each
    /// other. Large products start first, so that all threads finish at about the same time.
    fn each(&self, work: usize, f: impl Fn(usize, Range<usize>) + Sync) {
        let places = self.0.windows(2).map(|ends| ends[0]..ends[1]).enumerate();
        let mut all: Vec<(usize, Range<usize>)> = places.filter(|(_, places)| !places.is_empty()).collect();
        if all.len() < ROUNDS * rayon::current_num_threads() {
            return all.into_iter().for_each(|(expert, places)| f(expert, places));
        }
        all.sort_by_key(|(_, places)| std::cmp::Reverse(places.len()));
        tasks(all.len(), work * self.0.last().unwrap_or(&0), |i| {
            let _inside = profile::inside();
            let (expert, places) = all[i].clone();
            f(expert, places);
        });
    }

    /// Returns the operations and bytes of the products of all places, for profiles.
    fn product(&self, places: usize, k: usize, w: Weight) -> (usize, usize) {
        let used = self.0.windows(2).filter(|ends| ends[0] < ends[1]).count();
        let (rows, n) = w.dims();
        let bytes = profile::product(0, w).1 * used * k / rows.max(1);
        (2 * places * k * n, bytes + 4 * places * (k + n))
    }

    fn cover(&self, places: usize, rows: usize, k: usize) -> bool {
        let experts = self.0.len().saturating_sub(1);
        self.0.is_sorted()
            && self.0.first() == Some(&0)
            && self.0.last() == Some(&places)
            && rows == experts * k
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// Places of each row, `[rows, experts per row]`, in ascending order within a row.
    pub places: &'a [u32],
    /// Expert of each place.
    pub experts: &'a [u32],
}

impl Choices<'_> {
    /// Returns the numbers of places and of experts that are listed.
    fn dims(&self) -> [usize; 2] {
        [self.places.len(), self.experts.len()]
    }

    fn fit(&self, places: usize, rows: usize, experts: usize) -> bool {
        let all = self.places.len();
        all == self.experts.len()
            && all == places
            && all.is_multiple_of(rows.max(1))
            && self.places.iter().all(|&place| (place as usize) < places)
            && self.experts.iter().all(|&expert| (expert as usize) < experts)
    }

    /// Returns the weight of each place: the softmax over the logits of the experts that its row has chosen.
    fn weights(&self, logits: Mat) -> Vec<f32> {
        let mut weights = vec![0.0; self.places.len()];
        let each = self.places.len() / logits.rows.max(1);
        for (r, places) in self.places.chunks_exact(each.max(1)).enumerate() {
            let logit = |place: u32| logits.row(r)[self.experts[place as usize] as usize];
            let max = places.iter().map(|&place| logit(place)).fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = places.iter().map(|&place| (logit(place) - max).exp()).sum();
            places.iter().for_each(|&place| weights[place as usize] = (logit(place) - max).exp() / sum);
        }
        weights
    }
}

/// Computes `y = x W` for places `x [places, k]`. Each place is multiplied by the matrix of its expert in `w [experts · k, n]`.
/// Returns `[places, n]`.
#[must_use]
pub fn forward(x: Mat, w: Weight, groups: Groups) -> Vec<f32> {
    let ((places, k), n) = (x.dims(), w.dims().1);
    check!("experts", groups.cover(places, w.dims().0, k), x.dims(), w.dims(), groups.0);
    let _span = span(Op::Linear, || groups.product(places, k, w));
    // SAFETY: every place belongs to an expert, and that expert's product overwrites it.
    unsafe {
        buffer::matrix(places, n, |mut y| {
            if few::forward(x, w, groups, &mut y) {
                return;
            }
            groups.each(k * n, |expert, rows| {
                let layer = Layer::new(w.rows(expert * k..(expert + 1) * k));
                linear::backward_input_into(x.row_range(rows.clone()), &[layer], false, y.at_rows(rows));
            });
        })
    }
}

/// Returns the gradient of [`forward`] with respect to `x`: `dy Wᵀ`, `[places, k]`.
#[must_use]
pub fn backward_input(dy: Mat, w: Weight, groups: Groups) -> Vec<f32> {
    let (places, k) = (dy.rows, w.dims().0 / groups.0.len().saturating_sub(1).max(1));
    check!(
        "experts, gradient of the input",
        groups.cover(places, w.dims().0, k) && dy.cols == w.dims().1,
        dy.dims(),
        w.dims(),
        groups.0
    );
    let _span = span(Op::LinearInput, || groups.product(places, k, w));
    // SAFETY: every place belongs to an expert, and that expert's product overwrites it.
    unsafe {
        buffer::matrix(places, k, |dx| {
            groups.each(k * dy.cols, |expert, rows| {
                let layer = Layer::new(w.rows(expert * k..(expert + 1) * k));
                linear::product_into(dy.row_range(rows.clone()), &[layer], false, dx.at_rows(rows));
            });
        })
    }
}

/// Adds the gradient of [`forward`] with respect to `w` to `dw [experts · k, n]`: `xᵀ dy` over the places of each expert.
/// `rounding` is that of the weight ([`Weight::rounding`]).
pub fn backward_weight(dy: Mat, x: Mat, groups: Groups, rounding: Option<Path>, dw: MatMut) {
    let ((places, k), n) = (x.dims(), dy.cols);
    check!(
        "experts, gradient of the weight",
        groups.cover(places, dw.rows, k) && dw.dims().1 == n,
        dy.dims(),
        x.dims(),
        dw.dims(),
        groups.0
    );
    let _span = span(Op::LinearWeight, || (2 * places * k * n, 4 * (2 * dw.rows * n + places * (n + k))));
    groups.each(k * n, |expert, rows| {
        // SAFETY: each expert is computed by one task.
        let dw = unsafe { dw.at_rows(expert * k..(expert + 1) * k) };
        let gradient = Gradient { dw, col: 0, rounding };
        linear::backward_weight(x.row_range(rows.clone()), dy.row_range(rows), &mut [gradient]);
    });
}

/// Multiplies each place of `x [places, i]` by its weight. The weight is the softmax over the logits of the experts that its row
/// has chosen, from `logits [rows, experts]`.
#[must_use]
pub fn weigh_forward(x: Mat, logits: Mat, choices: Choices) -> Vec<f32> {
    check!(
        "experts, weights",
        choices.fit(x.rows, logits.rows, logits.cols),
        x.dims(),
        logits.dims(),
        choices.dims()
    );
    let weights = choices.weights(logits);
    scaled(x, &weights)
}

fn scaled(x: Mat, weights: &[f32]) -> Vec<f32> {
    buffer::of_rows(x.rows, x.cols, x.rows * x.cols, |p, y| {
        y.iter_mut().zip(x.row(p)).for_each(|(y, x)| *y = x * weights[p]);
    })
}

/// Returns the gradients of [`weigh_forward`]: `(dx [places, i], dlogits [rows, experts])`.
#[must_use]
pub fn weigh_backward(dy: Mat, x: Mat, logits: Mat, choices: Choices) -> (Vec<f32>, Vec<f32>) {
    let fits = choices.fit(x.rows, logits.rows, logits.cols) && dy.dims() == x.dims();
    check!("experts, gradient of weights", fits, dy.dims(), x.dims(), logits.dims(), choices.dims());
    let weights = choices.weights(logits);
    // Gradient of the loss with respect to the weight of each place.
    let dots = buffer::of_rows(x.rows, 1, x.rows * x.cols, |p, to| to[0] = dot(dy.row(p), x.row(p)));
    let mut dlogits = vec![0.0; logits.rows * logits.cols];
    let each = choices.places.len() / logits.rows.max(1);
    for (r, places) in choices.places.chunks_exact(each.max(1)).enumerate() {
        let mean: f32 = places.iter().map(|&p| weights[p as usize] * dots[p as usize]).sum();
        for &p in places {
            let p = p as usize;
            dlogits[r * logits.cols + choices.experts[p] as usize] = weights[p] * (dots[p] - mean);
        }
    }
    (scaled(dy, &weights), dlogits)
}

/// Returns `Σ a · b`, summed in an order that depends on the length alone.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    for (a, b) in a.iter().zip(b) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
