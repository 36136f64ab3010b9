//! Log-probabilities and entropies of `softmax(hidden · headᵀ / temperature)` without the logits matrix.
//!
//! Logits exist for a block of rows and a chunk of the vocabulary at a time (at most 2 MiB); the softmax is accumulated
//! over the chunks, in `f64` between chunks. The backward pass computes the logits again.

use std::cell::RefCell;
use std::ops::Range;

use crate::Weight;
use crate::linear::{self, Gradient, Layer};
use crate::parallel::{Shared, ranges};
use crate::profile::{self, Op, span};
use crate::simd::{exp, load, select, store};

/// Rows of one block of logits.
const ROWS: usize = 512;
/// Vocabulary entries of one chunk.
const CHUNK: usize = 1024;

thread_local! {
    static LOGITS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f(rows, vocabulary chunk, logits [rows, chunk] at stride CHUNK)` for all blocks, chunks innermost.
fn for_logits(
    hidden: &[f32],
    head: Weight,
    rows: usize,
    h: usize,
    v: usize,
    mut f: impl FnMut(Range<usize>, Range<usize>, &mut [f32]),
) {
    // Taken out of its cell, which kernels called meanwhile may use.
    let mut logits = LOGITS.take();
    logits.resize(ROWS.min(rows) * CHUNK, 0.0);
    for first in (0..rows).step_by(ROWS) {
        let block = first..rows.min(first + ROWS);
        let x = &hidden[block.start * h..block.end * h];
        for start in (0..v).step_by(CHUNK) {
            let chunk = start..v.min(start + CHUNK);
            let w = head.rows(chunk.start, chunk.end, h);
            linear::forward(&mut logits, CHUNK, x, h, &[Layer::new(w, chunk.len())], block.len(), h, false);
            f(block.clone(), chunk, &mut logits);
        }
    }
    LOGITS.set(logits);
}

simd_fn! {
    /// Maximum `m` of `scale · logits`, `Σ e^(z − m)` and `Σ e^(z − m) (z − m)`.
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
    /// `e^z` with `z = scale · logit − max`; `Σ e^z` and `Σ e^z z`.
    fn row_weights<'a>(simd: S, weights: &'a mut [f32], logits: &'a [f32], scale: f32, max: f32) -> (f32, f32) {
        let (times, minus) = (simd.splat_f32s(scale), simd.splat_f32s(-max));
        let (mut sum, mut weighted) = (simd.splat_f32s(0.0), simd.splat_f32s(0.0));
        // A token that is excluded has z = −∞ and adds 0, which the product alone would not give.
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

/// Entries of a row of logits whose weights have one sum in [`Weights`].
pub const WEIGHTS_CHUNK: usize = 1024;

/// What a token is drawn from: `e^(z − max z)` of every logit `z`, divided by a temperature.
#[derive(Clone, Debug)]
pub struct Weights {
    /// One per logit.
    pub weights: Vec<f32>,
    /// Sums of [`WEIGHTS_CHUNK`] weights each.
    pub sums: Vec<f64>,
    /// Sum of all.
    pub total: f64,
    /// Log-sum-exp of the divided logits.
    pub lse: f64,
    /// Entropy of the distribution, in nats.
    pub entropy: f64,
    /// What logits are multiplied by: one over the temperature.
    pub scale: f32,
}

impl Weights {
    /// `None` if a logit is NaN or +∞, or all are −∞.
    #[must_use]
    pub fn new(logits: &[f32], temperature: f32) -> Option<Self> {
        let scale = 1.0 / temperature;
        // Of the rounded product, as the weights: the largest is 1.
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

/// Log-probability of every target, entropy and log-sum-exp of every row.
///
/// `hidden [rows, h]`, `head [v, h]`. Row `r` has the targets `targets[offsets[r]..offsets[r + 1]]` (none, one or
/// several), so `offsets` has `rows + 1` elements. Written: `logp` per target, `entropy [rows]` (nats), `lse [rows]`, the
/// log-sum-exp of the logits divided by `temperature`.
pub fn forward(
    hidden: &[f32],
    head: Weight,
    rows: usize,
    h: usize,
    v: usize,
    targets: &[u32],
    offsets: &[usize],
    temperature: f32,
    logp: &mut [f32],
    entropy: &mut [f32],
    lse: &mut [f32],
) {
    let _span = span(Op::Head, || profile::product(rows, h, v, head));
    debug_assert!(offsets.len() == rows + 1 && targets.len() == logp.len() && head.len() == v * h);
    let scale = 1.0 / temperature;
    // Per row: maximum, Σ e^(z − max), Σ e^(z − max) (z − max).
    let mut state = vec![(f64::NEG_INFINITY, 0.0f64, 0.0f64); rows];
    let mut sums = vec![0.0; ROWS * 3];
    for_logits(hidden, head, rows, h, v, |block, chunk, logits| {
        let shared = Shared::new(&mut sums);
        ranges(block.len(), 1, block.len() * chunk.len() * 2, |range| {
            for i in range {
                let (max, sum, weighted) = row_sums(&logits[i * CHUNK..i * CHUNK + chunk.len()], scale);
                // SAFETY: every row is visited once.
                unsafe { shared.part(i * 3, 3) }.copy_from_slice(&[max, sum, weighted]);
            }
        });
        for (i, r) in block.enumerate() {
            for t in offsets[r]..offsets[r + 1] {
                let id = targets[t] as usize;
                if chunk.contains(&id) {
                    logp[t] = logits[i * CHUNK + id - chunk.start] * scale;
                }
            }
            let [max, sum, weighted] = [0, 1, 2].map(|j| f64::from(sums[i * 3 + j]));
            state[r] = merge(state[r], (max, sum, weighted));
        }
    });
    for (r, (max, sum, weighted)) in state.into_iter().enumerate() {
        lse[r] = (max + sum.ln()) as f32;
        entropy[r] = (sum.ln() - weighted / sum) as f32;
        for t in offsets[r]..offsets[r + 1] {
            logp[t] = (f64::from(logp[t]) - max - sum.ln()) as f32;
        }
    }
}

/// Joins the softmax sums of two disjoint sets of logits, rebasing both to the larger maximum.
fn merge(a: (f64, f64, f64), b: (f64, f64, f64)) -> (f64, f64, f64) {
    // A NaN maximum must survive.
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
    /// Turns a row of logits into its gradient, except for the targets' own terms:
    /// `−p · (total + d_entropy · (log p + entropy)) · scale`, with `log p = scale · logit − lse`.
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

/// Gradients of [`forward`]: `dhidden [rows, h]` is overwritten, `dhead [v, h]` is added to.
///
/// `dlogp` is the gradient per target, `dentropy` per row; `lse` and `entropy` are what [`forward`] wrote. With
/// `p = softmax`, a logit gets `Σ dlogp (1[target] − p) − dentropy · p (log p + entropy)`, divided by the temperature.
pub fn backward(
    dhidden: &mut [f32],
    mut dhead: Option<&mut [f32]>,
    hidden: &[f32],
    head: Weight,
    rows: usize,
    h: usize,
    v: usize,
    targets: &[u32],
    offsets: &[usize],
    lse: &[f32],
    entropy: &[f32],
    dlogp: &[f32],
    dentropy: Option<&[f32]>,
    temperature: f32,
) {
    // The logits are computed a second time, which is not useful work; a frozen head has no gradient of its own.
    let products = 1 + usize::from(dhead.is_some());
    let _span = span(Op::HeadBackward, || (2 * products * rows * h * v, 4 * (1 + 2 * products) * h * v));
    debug_assert!(offsets.len() == rows + 1 && targets.len() == dlogp.len() && head.len() == v * h);
    let scale = 1.0 / temperature;
    dhidden[..rows * h].fill(0.0);
    for_logits(hidden, head, rows, h, v, |block, chunk, logits| {
        let shared = Shared::new(logits);
        ranges(block.len(), 1, block.len() * chunk.len() * 2, |range| {
            for i in range {
                let r = block.start + i;
                // SAFETY: every row is visited once.
                let row = unsafe { shared.part(i * CHUNK, chunk.len()) };
                let own = offsets[r]..offsets[r + 1];
                let total: f32 = dlogp[own.clone()].iter().sum();
                row_gradient(row, scale, lse[r], entropy[r], total, dentropy.map_or(0.0, |d| d[r]));
                for t in own {
                    let id = targets[t] as usize;
                    if chunk.contains(&id) {
                        row[id - chunk.start] += dlogp[t] * scale;
                    }
                }
            }
        });
        let (m, n) = (block.len(), chunk.len());
        let w = head.rows(chunk.start, chunk.end, h);
        let hidden_block = block.start * h..block.end * h;
        linear::backward_input(
            &mut dhidden[hidden_block.clone()],
            h,
            logits,
            CHUNK,
            &[Layer::new(w, n)],
            m,
            h,
            true,
        );
        if let Some(dhead) = dhead.as_deref_mut() {
            let dw = &mut dhead[chunk.start * h..chunk.end * h];
            linear::backward_weight(
                &mut [Gradient { dw, col: 0, n, bf16: head.is_bf16() }],
                logits,
                CHUNK,
                &hidden[hidden_block],
                h,
                m,
                h,
            );
        }
    });
}

/// `logits [rows, v] = hidden [rows, h] · headᵀ` with batch-invariant bits, for sampling.
pub fn logits_rows(logits: &mut [f32], hidden: &[f32], head: Weight, rows: usize, h: usize, v: usize) {
    let _span = span(Op::Head, || profile::product(rows, h, v, head));
    linear::forward_rows(logits, v, hidden, h, &[Layer::new(head, v)], rows, h, false);
}
