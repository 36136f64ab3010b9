//! Log-probabilities and entropies of `softmax(hidden · headᵀ / temperature)`, computed without storing the matrix of logits.
//!
//! Only the logits of one block of rows and one chunk of the vocabulary exist at a time (at most 2 MiB). The softmax is
//! accumulated over the chunks, in `f64` from one chunk to the next. The backward pass recomputes the logits.

use std::ops::Range;

use crate::Weight;
use crate::linear::{self, Layer};
use crate::mat::{Mat, MatMut, check};
use crate::parallel::{Shared, ranges};
use crate::profile::{self, Op, span};
use crate::simd::{exp, load, select, store};
use crate::top::{self, Top};
use crate::workspace::{LOGITS, reserve};

/// Number of rows in a block of logits.
const ROWS: usize = 512;
/// Number of vocabulary entries in a chunk.
const CHUNK: usize = 1024;

/// Tokens to score at each row. Row `r` has the targets `tokens[offsets[r]..offsets[r + 1]]` (none, one or several).
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// Token ids. Each is below the size of the vocabulary.
    pub tokens: &'a [u32],
    /// Offsets into `tokens`; one more entry than there are rows.
    pub offsets: &'a [usize],
}

impl Targets<'_> {
    /// Returns the range of `tokens` that holds a row's targets.
    pub(crate) fn of(self, row: usize) -> Range<usize> {
        self.offsets[row]..self.offsets[row + 1]
    }

    /// Returns whether the offsets match `rows` and cover all tokens.
    fn fit(self, rows: usize) -> bool {
        self.offsets.len() == rows + 1 && self.offsets.last() == Some(&self.tokens.len())
    }
}

/// An output head: a weight and a temperature.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// Weight of the head, `[v, h]`.
    pub weight: Weight<'a>,
    /// Temperature, by which the logits are divided.
    pub temperature: f32,
}

/// Result of [`forward`].
#[derive(Clone, Debug)]
pub struct Scores<T = f32> {
    /// Log-probability of each target, in nats.
    pub logp: Vec<T>,
    /// Entropy of each row, in nats.
    pub entropy: Vec<T>,
    /// Log-sum-exp of each row's logits after division by the temperature.
    pub lse: Vec<T>,
}

/// The per-row statistics of [`Scores`] that [`backward`] needs.
#[derive(Clone, Copy, Debug)]
pub struct Statistics<'a> {
    pub entropy: &'a [f32],
    pub lse: &'a [f32],
}

#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a, T = f32> {
    /// Gradient of the loss with respect to the log-probability of each target.
    pub logp: &'a [T],
    /// Gradient of the loss with respect to the entropy of each row; `None` means 0.
    pub entropy: Option<&'a [T]>,
}

/// Calls `f(rows, vocabulary chunk, logits [rows, CHUNK])` for every block of rows and every chunk; the inner loop runs over the
/// chunks. Columns beyond the chunk have undefined values.
fn for_logits(hidden: Mat, head: Weight, mut f: impl FnMut(Range<usize>, Range<usize>, &mut [f32])) {
    let (rows, v) = (hidden.rows, head.dims().0);
    let mut scratch = LOGITS.take();
    for first in (0..rows).step_by(ROWS) {
        let block = first..rows.min(first + ROWS);
        let (x, m) = (hidden.row_range(block.clone()), block.len());
        let logits = reserve(&mut scratch, m * CHUNK);
        for start in (0..v).step_by(CHUNK) {
            let chunk = start..v.min(start + CHUNK);
            let layers = [Layer::new(head.rows(chunk.clone()))];
            let y = MatMut::new(logits, m, CHUNK).columns(0..chunk.len());
            linear::forward_into(x, &layers, false, y);
            f(block.clone(), chunk, logits);
        }
    }
    LOGITS.set(scratch);
}

simd_fn! {
    /// Returns `m = max z`, `Σ e^(z − m)` and `Σ e^(z − m) (z − m)`, with `z = scale · logits`.
    fn row_sums<'a>(simd: S, logits: &'a [f32], scale: f32) -> (f32, f32, f32) {
        let lanes = S::F32_LANES;
        let whole = logits.len() / lanes * lanes;
        let mut top = simd.splat_f32s(f32::NEG_INFINITY);
        for i in (0..whole).step_by(lanes) {
            top = simd.max_f32s(load(simd, logits, i), top);
        }
        let mut max = simd.reduce_max_f32s(top);
        for &z in &logits[whole..] {
            max = max.max(z);
        }
        max *= scale;
        let minus = simd.splat_f32s(-max);
        let times = simd.splat_f32s(scale);
        let (mut sum, mut weighted) = (simd.splat_f32s(0.0), simd.splat_f32s(0.0));
        for i in (0..logits.len()).step_by(lanes) {
            let z = simd.mul_add_e_f32s(load(simd, logits, i), times, minus);
            let mut weight = exp(simd, z);
            if i == whole {
                let tail = simd.mask_between_m32s(0, (logits.len() - whole) as u32).mask();
                weight = select(simd, tail, weight, simd.splat_f32s(0.0));
            }
            sum = simd.add_f32s(sum, weight);
            weighted = simd.mul_add_e_f32s(weight, z, weighted);
        }
        (max, simd.reduce_sum_f32s(sum), simd.reduce_sum_f32s(weighted))
    }
}

simd_fn! {
    /// Writes `e^z` with `z = scale · logit − max`, and returns `Σ e^z` and `Σ e^z z`.
    fn row_weights<'a>(simd: S, weights: &'a mut [f32], logits: &'a [f32], scale: f32, max: f32) -> (f32, f32) {
        let (times, minus) = (simd.splat_f32s(scale), simd.splat_f32s(-max));
        let (mut sum, mut weighted) = (simd.splat_f32s(0.0), simd.splat_f32s(0.0));
        // An excluded token has z = −∞ and must add 0. The product `e^z z` alone would be NaN.
        let lowest = simd.splat_f32s(f32::MIN);
        let whole = logits.len() / S::F32_LANES * S::F32_LANES;
        for i in (0..logits.len()).step_by(S::F32_LANES) {
            let z = simd.mul_add_e_f32s(load(simd, logits, i), times, minus);
            let weight = exp(simd, z);
            store(simd, weights, i, weight);
            if i < whole {
                sum = simd.add_f32s(sum, weight);
                weighted = simd.mul_add_e_f32s(weight, simd.max_f32s(z, lowest), weighted);
            }
        }
        let tail = weights[whole..logits.len()].iter().zip(&logits[whole..]);
        let tail: f32 = tail.map(|(w, x)| w * (x * scale - max).max(f32::MIN)).sum();
        (
            simd.reduce_sum_f32s(sum) + weights[whole..logits.len()].iter().sum::<f32>(),
            simd.reduce_sum_f32s(weighted) + tail,
        )
    }
}

/// Number of weights that each partial sum in [`Weights`] covers.
pub const WEIGHTS_CHUNK: usize = 1024;

/// Unnormalised probabilities from which a token is drawn: `e^(z − max z)` of every logit `z` after division by a temperature.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Weight of each logit.
    pub weights: Vec<f32>,
    /// Partial sums, each of [`WEIGHTS_CHUNK`] weights.
    pub sums: Vec<f64>,
    /// Sum of all weights.
    pub total: f64,
    /// Log-sum-exp of the logits after division by the temperature.
    pub lse: f64,
    /// Entropy of the distribution, in nats.
    pub entropy: f64,
    /// Factor that multiplies the logits: one over the temperature.
    pub scale: f32,
}

impl Weights {
    /// Computes the weights of `logits / temperature`. Returns `None` if a logit is NaN or +∞, or if all are −∞.
    #[must_use]
    pub fn new(logits: &[f32], temperature: f32) -> Option<Self> {
        let scale = 1.0 / temperature;
        // The maximum is scaled and rounded in the same way as the weights, so that the largest weight is 1.
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) * scale;
        if !max.is_finite() {
            return None;
        }
        let mut weights = vec![0.0; logits.len()];
        let chunks = weights.chunks_mut(WEIGHTS_CHUNK).zip(logits.chunks(WEIGHTS_CHUNK));
        let mut weighted = 0.0;
        let sum = |(w, x)| {
            let (sum, own) = row_weights(w, x, scale, max);
            weighted += f64::from(own);
            f64::from(sum)
        };
        let sums: Vec<f64> = chunks.map(sum).collect();
        let total: f64 = sums.iter().sum();
        let (lse, entropy) = (f64::from(max) + total.ln(), total.ln() - weighted / total);
        (!total.is_nan()).then_some(Self { weights, sums, total, lse, entropy, scale })
    }
}

/// Returns the log-probability of every target, and the entropy and log-sum-exp of every row of `hidden [rows, h]`.
#[must_use]
pub fn forward(hidden: Mat, head: Head, targets: Targets) -> Scores {
    forward_top(hidden, head, targets, Top::NONE).0
}

/// Returns what [`forward`] does, and the most probable tokens of each row with their log-probabilities: `[rows, k]`, the most
/// probable first. Their number is at most that of the ids, and these are in the vocabulary.
#[must_use]
pub fn forward_top(hidden: Mat, head: Head, targets: Targets, top: Top) -> (Scores, Vec<(u32, f32)>) {
    let (rows, Top { k, below }) = (hidden.rows, top);
    check!("most probable tokens", top == top.within(head.weight.dims().0), top, head.weight.dims());
    let (each, mut kept) = (top::room(k), vec![top::NONE; if k == 0 { 0 } else { rows }]);
    let mut candidates = vec![(0.0, 0); rows * each];
    let _span = span(Op::Head, || profile::product(rows, head.weight));
    check!("log-probabilities", targets.fit(rows), rows, targets.tokens.len(), targets.offsets.len());
    let scale = 1.0 / head.temperature;
    let [mut entropy, mut lse] = [0; 2].map(|_| vec![0.0; rows]);
    let mut logp = vec![0.0; targets.tokens.len()];
    // Per row: the maximum, Σ e^(z − max) and Σ e^(z − max) (z − max).
    let mut state = vec![(f64::NEG_INFINITY, 0.0f64, 0.0f64); rows];
    let mut sums = vec![0.0; ROWS * 3];
    for_logits(hidden, head.weight, |block, chunk, logits| {
        let shared = Shared::new(&mut sums);
        let (all_candidates, all_kept) = (Shared::new(&mut candidates), Shared::new(&mut kept));
        ranges(block.len(), 1, block.len() * chunk.len() * 2, |range| {
            for i in range {
                let row = &logits[i * CHUNK..i * CHUNK + chunk.len()];
                let (max, sum, weighted) = row_sums(row, scale);
                // SAFETY: each row is visited exactly once.
                unsafe { shared.part(i * 3, 3) }.copy_from_slice(&[max, sum, weighted]);
                if k > 0 {
                    let r = block.start + i;
                    // SAFETY: as above.
                    let (own, kept) = unsafe { (all_candidates.part(r * each, each), all_kept.part(r, 1)) };
                    let row = &row[..below.saturating_sub(chunk.start).min(row.len())];
                    top::offer(own, &mut kept[0], chunk.start, row);
                }
            }
        });
        for (i, r) in block.enumerate() {
            for t in targets.of(r) {
                let id = targets.tokens[t] as usize;
                if chunk.contains(&id) {
                    logp[t] = logits[i * CHUNK + id - chunk.start] * scale;
                }
            }
            let [max, sum, weighted] = [0, 1, 2].map(|j| f64::from(sums[i * 3 + j]));
            state[r] = merge(state[r], (max, sum, weighted));
        }
    });
    let mut most = Vec::with_capacity(rows * k);
    for (r, (max, sum, weighted)) in state.into_iter().enumerate() {
        if k > 0 {
            let found = top::sorted(&mut candidates[r * each..][..each], kept[r]).iter();
            most.extend(found.map(|&(z, id)| (id, (f64::from(z * scale) - max - sum.ln()) as f32)));
        }
        lse[r] = (max + sum.ln()) as f32;
        entropy[r] = (sum.ln() - weighted / sum) as f32;
        for t in targets.of(r) {
            logp[t] = (f64::from(logp[t]) - max - sum.ln()) as f32;
        }
    }
    (Scores { logp, entropy, lse }, most)
}

/// Merges the softmax sums of two disjoint sets of logits. Both are first rescaled to the larger maximum.
fn merge(a: (f64, f64, f64), b: (f64, f64, f64)) -> (f64, f64, f64) {
    // If a maximum is NaN, the result must be NaN.
    let max = if a.0 > b.0 { a.0 } else { b.0 };
    let rebase = |(m, sum, weighted): (f64, f64, f64)| {
        if sum == 0.0 {
            return (0.0, 0.0);
        }
        let shrink = (m - max).exp();
        (sum * shrink, (weighted + sum * (m - max)) * shrink)
    };
    let (x, y) = (rebase(a), rebase(b));
    (max, x.0 + y.0, x.1 + y.1)
}

simd_fn! {
    /// Replaces a row of logits with its gradient, without the terms of the targets themselves.
    ///
    /// The gradient is `−p · (total + d_entropy · (log p + entropy)) · scale`, with `log p = scale · logit − lse`.
    fn row_gradient<'a>(simd: S, logits: &'a mut [f32], scale: f32, lse: f32, entropy: f32, total: f32,
                        d_entropy: f32) -> () {
        let [times, minus_lse, slope, minus] = [scale, -lse, d_entropy, -scale].map(|x| simd.splat_f32s(x));
        let base = simd.splat_f32s(total + d_entropy * entropy);
        for i in (0..logits.len()).step_by(S::F32_LANES) {
            let log_p = simd.mul_add_e_f32s(load(simd, logits, i), times, minus_lse);
            let weight = simd.mul_f32s(exp(simd, log_p), minus);
            let y = simd.mul_f32s(weight, simd.mul_add_e_f32s(slope, log_p, base));
            store(simd, logits, i, y);
        }
    }
}

/// Returns the gradient of [`forward`] with respect to `hidden`, `[rows, h]`, and adds the gradient with respect to the head to
/// `dhead [v, h]`.
///
/// `stats` come from [`forward`]. With `p = softmax`, the gradient of a logit is `Σ dlogp (1[target] − p) − dentropy · p (log p +
/// entropy)`, divided by the temperature.
#[must_use]
pub fn backward(
    gradient: Gradient,
    hidden: Mat,
    head: Head,
    targets: Targets,
    stats: Statistics,
    mut dhead: Option<MatMut>,
) -> Vec<f32> {
    let ((rows, h), v) = (hidden.dims(), head.weight.dims().0);
    // The profile does not count the recomputation of logits as useful work. A frozen head needs no product for its gradient.
    let products = 1 + usize::from(dhead.is_some());
    let _span = span(Op::HeadBackward, || (2 * products * rows * h * v, 4 * (1 + 2 * products) * h * v));
    let (dlogp, dentropy) = (gradient.logp, gradient.entropy);
    let mut of_rows = [Some(stats.entropy), Some(stats.lse), dentropy].into_iter().flatten();
    let fits = targets.fit(rows) && targets.tokens.len() == dlogp.len();
    check!(
        "log-probabilities, backward",
        fits && of_rows.all(|x| x.len() == rows),
        hidden.dims(),
        targets.tokens.len(),
        targets.offsets.len(),
        dlogp.len(),
        [stats.entropy.len(), stats.lse.len()],
        dentropy.map(<[f32]>::len),
    );
    let scale = 1.0 / head.temperature;
    let mut dhidden = vec![0.0; rows * h];
    let mut sum = MatMut::new(&mut dhidden, rows, h);
    for_logits(hidden, head.weight, |block, chunk, logits| {
        let shared = Shared::new(logits);
        ranges(block.len(), 1, block.len() * chunk.len() * 2, |range| {
            for i in range {
                let r = block.start + i;
                // SAFETY: each row is visited exactly once.
                let row = unsafe { shared.part(i * CHUNK, chunk.len()) };
                let total: f32 = dlogp[targets.of(r)].iter().sum();
                let slope = dentropy.map_or(0.0, |d| d[r]);
                row_gradient(row, scale, stats.lse[r], stats.entropy[r], total, slope);
                for t in targets.of(r) {
                    let id = targets.tokens[t] as usize;
                    if chunk.contains(&id) {
                        row[id - chunk.start] += dlogp[t] * scale;
                    }
                }
            }
        });
        let dlogits = Mat::new(logits, block.len(), CHUNK).columns(0..chunk.len());
        let layers = [Layer::new(head.weight.rows(chunk.clone()))];
        linear::backward_input_into(dlogits, &layers, true, sum.again().row_range(block.clone()));
        if let Some(dhead) = &mut dhead {
            let (dw, rounding) = (dhead.again().row_range(chunk), head.weight.rounding());
            linear::backward_weight(
                dlogits,
                hidden.row_range(block),
                &mut [linear::Gradient { dw, col: 0, rounding }],
            );
        }
    });
    dhidden
}

/// Returns the logits `[rows, v]` of `hidden [rows, h]` for sampling. The bits of a row do not depend on the other rows of the
/// batch.
#[must_use]
pub fn logits_rows(hidden: Mat, head: Weight) -> Vec<f32> {
    let (rows, v) = (hidden.rows, head.dims().0);
    let _span = span(Op::Head, || profile::product(rows, head));
    let mut logits = vec![0.0; rows * v];
    linear::forward_rows_into(hidden, &[Layer::new(head)], false, MatMut::new(&mut logits, rows, v));
    logits
}
