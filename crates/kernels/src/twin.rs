//! A second implementation of every op in plain `f64` loops: no SIMD, no threads, no tiling.
//!
//! This module defines what the kernels compute. Tests check its gradients by central differences, and compare the fast kernels
//! with it. The arguments are those of the kernels. Functions return all their results; a gradient is that of a single call,
//! without a previous sum.

mod recurrent;

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::Mat;
use crate::activation::Activation;
use crate::attention::{AttentionLayout, Qkv, Shape};
use crate::conv::{OUTSIDE, RowMix};
use crate::experts::{Choices, Groups};
use crate::logprob::{Gradient, Scores, Targets};
use crate::optim::AdamW;
use crate::sample::{Draw, DrawFrom, Sampler};
use crate::top::Top;

pub use recurrent::*;

type Mat64<'a> = Mat<'a, f64>;
type Qkv64<'a> = Qkv<'a, f64>;

/// Returns `y [m, n] = x [m, k] · Wᵀ + b`, for a weight `W [n, k]`.
#[must_use]
pub fn linear_forward(x: Mat64, w: Mat64, bias: Option<&[f64]>) -> Vec<f64> {
    let (m, n) = (x.rows, w.rows);
    let mut y = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            let dot: f64 = x.row(i).iter().zip(w.row(j)).map(|(x, w)| x * w).sum();
            y[i * n + j] = dot + bias.map_or(0.0, |b| b[j]);
        }
    }
    y
}

/// Returns the gradients of [`linear_forward`]: `(dx [m, k], dw [n, k], db [n])`.
#[must_use]
pub fn linear_backward(dy: Mat64, x: Mat64, w: Mat64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let ((m, n), k) = (dy.dims(), x.cols);
    let (mut dx, mut dw, mut db) = (vec![0.0; m * k], vec![0.0; n * k], vec![0.0; n]);
    for i in 0..m {
        let (x, dx) = (x.row(i), &mut dx[i * k..(i + 1) * k]);
        for (j, &g) in dy.row(i).iter().enumerate() {
            db[j] += g;
            let (w, dw) = (w.row(j), &mut dw[j * k..(j + 1) * k]);
            for p in 0..k {
                dx[p] += g * w[p];
                dw[p] += g * x[p];
            }
        }
    }
    (dx, dw, db)
}

/// Returns the RMS norm and its statistics: `(y, rstd [1, rows])`, with `y = x · rstd · weight` and `rstd = 1 / sqrt(mean(x²) +
/// eps)`.
#[must_use]
pub fn rms_forward(x: Mat64, weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let (rows, dim) = x.dims();
    let (mut y, mut rstd) = (vec![0.0; rows * dim], vec![0.0; rows]);
    for r in 0..rows {
        let x = x.row(r);
        rstd[r] = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / dim as f64 + eps).sqrt();
        for j in 0..dim {
            y[r * dim + j] = x[j] * rstd[r] * weight[j];
        }
    }
    (y, rstd)
}

/// Returns the gradients of [`rms_forward`]: `(dx, dw)`.
#[must_use]
pub fn rms_backward(dy: Mat64, x: Mat64, weight: &[f64], rstd: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (rows, dim) = x.dims();
    let (mut dx, mut dw) = (vec![0.0; rows * dim], vec![0.0; dim]);
    for r in 0..rows {
        let (dy, x, rstd) = (dy.row(r), x.row(r), rstd[r]);
        let dot: f64 = (0..dim).map(|j| dy[j] * weight[j] * x[j]).sum();
        for j in 0..dim {
            dw[j] += dy[j] * x[j] * rstd;
            dx[r * dim + j] = rstd * (dy[j] * weight[j] - x[j] * dot * rstd * rstd / dim as f64);
        }
    }
    (dx, dw)
}

/// Returns the layer norm, whose variance is the biased one, as `(y, stats [2, rows])`. The statistics are `mean` and `rstd`.
#[must_use]
pub fn layer_forward(x: Mat64, weight: &[f64], bias: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let (rows, dim) = x.dims();
    let (mut y, mut stats) = (vec![0.0; rows * dim], vec![0.0; 2 * rows]);
    for r in 0..rows {
        let x = x.row(r);
        let mean = x.iter().sum::<f64>() / dim as f64;
        let var = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / dim as f64;
        let rstd = 1.0 / (var + eps).sqrt();
        for j in 0..dim {
            y[r * dim + j] = (x[j] - mean) * rstd * weight[j] + bias[j];
        }
        (stats[r], stats[rows + r]) = (mean, rstd);
    }
    (y, stats)
}

/// Returns the gradients of [`layer_forward`]: `(dx, dw, db)`.
#[must_use]
pub fn layer_backward(dy: Mat64, x: Mat64, weight: &[f64], stats: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (rows, dim) = x.dims();
    let (mut dx, mut dw, mut db) = (vec![0.0; rows * dim], vec![0.0; dim], vec![0.0; dim]);
    for r in 0..rows {
        let (dy, x, mean, rstd) = (dy.row(r), x.row(r), stats[r], stats[rows + r]);
        let hat = |j: usize| (x[j] - mean) * rstd;
        let g = |j: usize| dy[j] * weight[j];
        let mean_g = (0..dim).map(g).sum::<f64>() / dim as f64;
        let mean_gx = (0..dim).map(|j| g(j) * hat(j)).sum::<f64>() / dim as f64;
        for j in 0..dim {
            dw[j] += dy[j] * hat(j);
            db[j] += dy[j];
            dx[r * dim + j] = rstd * (g(j) - mean_g - hat(j) * mean_gx);
        }
    }
    (dx, dw, db)
}

/// Applies rotary position embedding to `x [rows, heads · head_dim]`; see [`crate::rope::apply`].
#[must_use]
pub fn rope(cos: Mat64, sin: Mat64, inverse: bool, x: Mat64, head_dim: usize) -> Vec<f64> {
    let half = cos.cols;
    let mut y = vec![0.0; x.rows * x.cols];
    for r in 0..x.rows {
        let (cos, sin, x, y) = (cos.row(r), sin.row(r), x.row(r), &mut y[r * x.cols..(r + 1) * x.cols]);
        y.copy_from_slice(x);
        for head in (0..x.len()).step_by(head_dim) {
            for i in 0..half {
                let (a, b) = (head + i, head + half + i);
                let s = if inverse { -sin[i] } else { sin[i] };
                y[a] = x[a] * cos[i] - x[b] * s;
                y[b] = x[b] * cos[i] + x[a] * s;
            }
        }
    }
    y
}

/// Returns the error function, computed with its Taylor series near 0 and with the continued fraction of `erfc` elsewhere. The
/// error is below 1e-14.
#[must_use]
pub fn erf(x: f64) -> f64 {
    let z = x.abs();
    let value = if z < 2.5 {
        let (mut term, mut sum) = (z, z);
        for n in 1..80 {
            term *= -z * z / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / PI.sqrt()
    } else {
        let mut tail = 0.0;
        for n in (1..=120).rev() {
            tail = f64::from(n) / 2.0 / (z + tail);
        }
        1.0 - (-z * z).exp() / PI.sqrt() / (z + tail)
    };
    value.copysign(x)
}

/// Returns the activation at one point, and its derivative there.
#[must_use]
pub fn activation(act: Activation, x: f64) -> (f64, f64) {
    let gated = |u: f64, du: f64| {
        let s = 1.0 / (1.0 + (-u).exp());
        (x * s, s + x * s * (1.0 - s) * du)
    };
    match act {
        Activation::Tanh => (x.tanh(), 1.0 - x.tanh().powi(2)),
        Activation::Silu => gated(x, 1.0),
        Activation::QuickGelu => gated(1.702 * x, 1.702),
        Activation::GeluTanh => {
            let c = 2.0 * (2.0 / PI).sqrt();
            gated(c * (x + 0.044_715 * x.powi(3)), c * (1.0 + 3.0 * 0.044_715 * x * x))
        }
        Activation::GeluErf => {
            let phi = 0.5 * (1.0 + erf(x * FRAC_1_SQRT_2));
            (x * phi, phi + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt())
        }
    }
}

/// Returns `silu(gate) · up` for `[rows, 2i]`, with the gate in the first `i` columns.
#[must_use]
pub fn swiglu_forward(gate_up: Mat64) -> Vec<f64> {
    let i = gate_up.cols / 2;
    let at = |r: usize, j: usize| {
        let (gate, up) = gate_up.row(r).split_at(i);
        activation(Activation::Silu, gate[j]).0 * up[j]
    };
    (0..gate_up.rows * i).map(|p| at(p / i, p % i)).collect()
}

/// Returns the gradient of [`swiglu_forward`], `[rows, 2i]`.
#[must_use]
pub fn swiglu_backward(dy: Mat64, gate_up: Mat64) -> Vec<f64> {
    let (rows, i) = dy.dims();
    let mut d = vec![0.0; rows * 2 * i];
    for r in 0..rows {
        let (dy, (gate, up)) = (dy.row(r), gate_up.row(r).split_at(i));
        for j in 0..i {
            let (silu, slope) = activation(Activation::Silu, gate[j]);
            d[r * 2 * i + j] = dy[j] * up[j] * slope;
            d[r * 2 * i + i + j] = dy[j] * silu;
        }
    }
    d
}

/// Draws a token from one row of logits, with the steps of [`crate::sample::draw`].
#[must_use]
pub fn draw(logits: &[f64], how: &Sampler, from: &DrawFrom) -> Option<Draw> {
    let largest = |z: &[f64]| z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if logits.iter().any(|z| z.is_nan()) || !largest(logits).is_finite() {
        return None;
    }
    let t = f64::from(how.scoring_temperature);
    let lse =
        logits.iter().map(|z| ((z - largest(logits)) / t).exp()).sum::<f64>().ln() + largest(logits) / t;
    let scored = |id: usize| logits[id] / t - lse;
    let possible = (0..logits.len()).map(scored).filter(|l| l.is_finite());
    let entropy = possible.map(|l| -l * l.exp()).sum::<f64>();
    let (mut z, penalty) = (logits.to_vec(), f64::from(how.repetition_penalty));
    for id in from.present() {
        if let Some(z) = z.get_mut(id as usize) {
            *z = if *z > 0.0 { *z / penalty } else { *z * penalty };
        }
    }
    for &id in from.forbidden(how) {
        if let Some(z) = z.get_mut(id as usize) {
            *z = f64::NEG_INFINITY;
        }
    }
    if largest(&z) == f64::NEG_INFINITY {
        return None;
    }
    let mut ids: Vec<usize> = (0..z.len()).collect();
    if how.temperature == 0.0 || how.truncates() {
        ids.sort_by(|&a, &b| z[b].total_cmp(&z[a]).then(a.cmp(&b)));
    }
    let drawn = |id: usize, sampler_logprob: f64| Draw {
        id: id as u32,
        logprob: scored(id) as f32,
        sampler_logprob: sampler_logprob as f32,
        entropy: entropy as f32,
    };
    if how.temperature == 0.0 {
        return Some(drawn(ids[0], 0.0));
    }
    if how.top_k > 0 {
        ids.truncate(how.top_k);
    }
    let t = f64::from(how.temperature);
    let weight = |&id: &usize| ((z[id] - largest(&z)) / t).exp();
    if how.top_p < 1.0 {
        let bound = f64::from(how.top_p) * ids.iter().map(weight).sum::<f64>();
        let mut sum = 0.0;
        ids.retain(|id| {
            let kept = sum < bound;
            sum += weight(id);
            kept
        });
    }
    if how.min_p > 0.0 {
        ids.retain(|id| weight(id) >= f64::from(how.min_p));
    }
    let total: f64 = ids.iter().map(weight).sum();
    let mut sum = 0.0;
    let mut possible = ids.iter().filter(|id| weight(id) > 0.0);
    let reached = possible.clone().find(|id| {
        sum += weight(id);
        sum > from.uniform * total
    });
    let id = reached.or_else(|| possible.next_back())?;
    Some(drawn(*id, (weight(id) / total).ln()))
}

/// Yields every query row of `layout` together with the key rows that it sees, in order.
fn visible(layout: &AttentionLayout) -> impl Iterator<Item = (usize, Vec<usize>)> + '_ {
    layout.ranges.iter().flat_map(|range| {
        range.queries.clone().enumerate().map(move |(i, query)| {
            let mut keys: Vec<usize> = range.keys.iter().flat_map(Clone::clone).collect();
            if let (true, Some(last)) = (range.causal, range.keys.last()) {
                let seen = (i + 1 + last.len()).saturating_sub(range.queries.len());
                keys.truncate(keys.len() - last.len() + seen);
            }
            (query, keys)
        })
    })
}

/// Returns softmax attention and its log-sum-exp: `(out [tq, q_heads · d], lse [tq, q_heads])`.
#[must_use]
pub fn attention_forward(
    qkv: Qkv64,
    layout: &AttentionLayout,
    shape: Shape,
    scale: f64,
) -> (Vec<f64>, Vec<f64>) {
    let Shape { q_heads, kv_heads, head_dim: d } = shape;
    let rows = qkv.q.rows;
    let (mut out, mut lse) = (vec![0.0; rows * q_heads * d], vec![f64::NEG_INFINITY; rows * q_heads]);
    for (query, keys) in visible(layout) {
        for head in 0..q_heads {
            let kv = head / (q_heads / kv_heads) * d;
            let q = qkv.q.part(query, head * d, d);
            let s: Vec<f64> = keys.iter().map(|&key| scale * dot(q, qkv.k.part(key, kv, d))).collect();
            let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if keys.is_empty() {
                continue;
            }
            let total: f64 = s.iter().map(|s| (s - max).exp()).sum();
            lse[query * q_heads + head] = max + total.ln();
            let out = &mut out[(query * q_heads + head) * d..][..d];
            for (&key, s) in keys.iter().zip(&s) {
                let p = (s - max).exp() / total;
                out.iter_mut().zip(qkv.v.part(key, kv, d)).for_each(|(out, v)| *out += p * v);
            }
        }
    }
    (out, lse)
}

/// Returns the gradients of [`attention_forward`]: `(dq, dk, dv)`.
#[must_use]
pub fn attention_backward(
    dout: Mat64,
    qkv: Qkv64,
    layout: &AttentionLayout,
    shape: Shape,
    scale: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let Shape { q_heads, kv_heads, head_dim: d } = shape;
    let (out, lse) = attention_forward(qkv, layout, shape, scale);
    let [mut dq, mut dk, mut dv] = [qkv.q, qkv.k, qkv.v].map(|x| vec![0.0; x.rows * x.cols]);
    for (query, keys) in visible(layout) {
        for head in 0..q_heads {
            let (kv, at) = (head / (q_heads / kv_heads) * d, (query * q_heads + head) * d);
            let (q, dout) = (qkv.q.part(query, head * d, d), dout.part(query, head * d, d));
            let delta = dot(dout, &out[at..at + d]);
            for &key in &keys {
                let (k, v) = (qkv.k.part(key, kv, d), qkv.v.part(key, kv, d));
                let p = (scale * dot(q, k) - lse[query * q_heads + head]).exp();
                let ds = p * (dot(dout, v) - delta) * scale;
                let to = key * kv_heads * d + kv;
                for j in 0..d {
                    dv[to + j] += p * dout[j];
                    dq[at + j] += ds * k[j];
                    dk[to + j] += ds * q[j];
                }
            }
        }
    }
    (dq, dk, dv)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns the log-probabilities of the targets; see [`crate::logprob::forward`].
#[must_use]
pub fn logprob_forward(hidden: Mat64, head: Mat64, targets: Targets, temperature: f64) -> Scores<f64> {
    let (rows, v) = (hidden.rows, head.rows);
    let logits = linear_forward(hidden, head, None);
    let mut logp = vec![0.0; targets.tokens.len()];
    let (mut entropy, mut lse) = (vec![0.0; rows], vec![0.0; rows]);
    for r in 0..rows {
        let z: Vec<f64> = logits[r * v..(r + 1) * v].iter().map(|l| l / temperature).collect();
        let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        lse[r] = max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
        entropy[r] = z.iter().map(|z| (z - lse[r]).exp() * (lse[r] - z)).sum();
        for t in targets.of(r) {
            logp[t] = z[targets.tokens[t] as usize] - lse[r];
        }
    }
    Scores { logp, entropy, lse }
}

/// Returns the most probable tokens of each row with their log-probabilities, `[rows, k]`.
#[must_use]
pub fn most_probable(hidden: Mat64, head: Mat64, temperature: f64, top: Top) -> Vec<(u32, f64)> {
    let of_row = |logits: &[f64]| {
        let lse = logits.iter().map(|z| (z / temperature).exp()).sum::<f64>().ln();
        let logits = &logits[..top.below];
        let mut each: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|z| z / temperature - lse)).collect();
        each.sort_by(|a, b| b.1.total_cmp(&a.1));
        each.truncate(top.k);
        each
    };
    linear_forward(hidden, head, None).chunks(head.rows.max(1)).flat_map(of_row).collect()
}

/// Returns the gradient with respect to the logits in [`logprob_forward`], `[rows, v]`.
#[must_use]
pub fn logit_gradients(
    gradient: Gradient<f64>,
    hidden: Mat64,
    head: Mat64,
    targets: Targets,
    temperature: f64,
) -> Vec<f64> {
    let (rows, v) = (hidden.rows, head.rows);
    let logits = linear_forward(hidden, head, None);
    let Scores { entropy, lse, .. } = logprob_forward(hidden, head, targets, temperature);
    let mut dlogits = vec![0.0; rows * v];
    for r in 0..rows {
        let total: f64 = gradient.logp[targets.of(r)].iter().sum();
        let d_entropy = gradient.entropy.map_or(0.0, |d| d[r]);
        for j in 0..v {
            let log_p = logits[r * v + j] / temperature - lse[r];
            dlogits[r * v + j] -= log_p.exp() * (total + d_entropy * (log_p + entropy[r])) / temperature;
        }
        for t in targets.of(r) {
            dlogits[r * v + targets.tokens[t] as usize] += gradient.logp[t] / temperature;
        }
    }
    dlogits
}

/// Returns the gradients of [`logprob_forward`]: `(dhidden, dhead)`.
#[must_use]
pub fn logprob_backward(
    gradient: Gradient<f64>,
    hidden: Mat64,
    head: Mat64,
    targets: Targets,
    temperature: f64,
) -> (Vec<f64>, Vec<f64>) {
    let dlogits = logit_gradients(gradient, hidden, head, targets, temperature);
    let (dhidden, dhead, _) = linear_backward(Mat::new(&dlogits, hidden.rows, head.rows), hidden, head);
    (dhidden, dhead)
}

#[must_use]
pub fn gather(table: Mat64, ids: &[u32]) -> Vec<f64> {
    ids.iter().flat_map(|&id| table.row(id as usize)).copied().collect()
}

/// Applies one AdamW step in place; see [`crate::optim::adamw`].
pub fn adamw(grad: &[f64], by: &AdamW<f64>, weight: &mut [f64], m: &mut [f64], v: &mut [f64]) {
    let AdamW { lr, betas: [beta1, beta2], eps, weight_decay, grad_scale, step } = *by;
    for i in 0..weight.len() {
        let g = grad[i] * grad_scale;
        weight[i] -= lr * weight_decay * weight[i];
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        let m_hat = m[i] / (1.0 - beta1.powf(step as f64));
        let v_hat = v[i] / (1.0 - beta2.powf(step as f64));
        weight[i] -= lr * m_hat / (v_hat.sqrt() + eps);
    }
}

/// Returns `residual + x · scale`, `scale [dim]`.
#[must_use]
pub fn residual_forward(x: Mat64, residual: Mat64, scale: &[f64]) -> Vec<f64> {
    let row = |r: usize| x.row(r).iter().zip(residual.row(r)).zip(scale).map(|((x, r), s)| r + x * s);
    (0..x.rows).flat_map(row).collect()
}

/// Returns the gradients of [`residual_forward`]: `(dx, dscale)`. The gradient with respect to the residual is `dy`.
#[must_use]
pub fn residual_backward(dy: Mat64, x: Mat64, scale: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dscale) = (Vec::new(), vec![0.0; scale.len()]);
    for r in 0..x.rows {
        for (j, (dy, x)) in dy.row(r).iter().zip(x.row(r)).enumerate() {
            dx.push(dy * scale[j]);
            dscale[j] += dy * x;
        }
    }
    (dx, dscale)
}

/// Returns weighted sums of rows; see [`crate::conv::mix_forward`].
#[must_use]
pub fn mix_forward(x: Mat64, mix: &RowMix) -> Vec<f64> {
    let c = x.cols;
    let mut y = vec![0.0; mix.len() * c];
    for (r, row, weight) in mix.terms() {
        let y = y[r * c..(r + 1) * c].iter_mut();
        y.zip(x.row(row as usize)).for_each(|(y, x)| *y += f64::from(weight) * x);
    }
    y
}

/// Returns the gradient of [`mix_forward`] for an input of `rows` rows.
#[must_use]
pub fn mix_backward(dy: Mat64, mix: &RowMix, rows: usize) -> Vec<f64> {
    let c = dy.cols;
    let mut dx = vec![0.0; rows * c];
    for (r, row, weight) in mix.terms() {
        let dx = dx[row as usize * c..][..c].iter_mut();
        dx.zip(dy.row(r)).for_each(|(dx, dy)| *dx += f64::from(weight) * dy);
    }
    dx
}

/// Calls `f(output, input, weight)` with the three indices of every product in a depthwise 3×3 convolution of `[rows, c]` with
/// padding 1.
fn depthwise3_terms((rows, c): (usize, usize), [h, w]: [usize; 2], mut f: impl FnMut(usize, usize, usize)) {
    for (p, y, x, ch) in (0..rows * c).map(|i| (i / (h * w * c), i / (w * c) % h, i / c % w, i % c)) {
        for (a, b) in (0..9).map(|tap| (tap / 3, tap % 3)) {
            if (1..=h).contains(&(y + a)) && (1..=w).contains(&(x + b)) {
                let at = |y: usize, x: usize| ((p * h + y) * w + x) * c + ch;
                f(at(y, x), at(y + a - 1, x + b - 1), ch * 9 + a * 3 + b);
            }
        }
    }
}

/// Computes a depthwise 3×3 convolution; see [`crate::conv::depthwise3`].
#[must_use]
pub fn depthwise3_forward(x: Mat64, weight: &[f64], side: [usize; 2]) -> Vec<f64> {
    let mut y = vec![0.0; x.rows * x.cols];
    depthwise3_terms(x.dims(), side, |to, from, k| y[to] += weight[k] * x.at(from));
    y
}

/// Returns the gradients of [`depthwise3_forward`]: `(dx, dweight)`.
#[must_use]
pub fn depthwise3_backward(dy: Mat64, x: Mat64, weight: &[f64], side: [usize; 2]) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw) = (vec![0.0; x.rows * x.cols], vec![0.0; weight.len()]);
    depthwise3_terms(x.dims(), side, |to, from, k| {
        dx[from] += weight[k] * dy.at(to);
        dw[k] += x.at(from) * dy.at(to);
    });
    (dx, dw)
}

/// Gathers patches into rows; see [`crate::conv::unfold`].
#[must_use]
pub fn unfold(x: Mat64, sources: &[u32], taps: usize) -> Vec<f64> {
    let c = x.cols;
    let mut y = vec![0.0; sources.len() * c];
    for (i, &source) in sources.iter().enumerate().filter(|(_, source)| **source != OUTSIDE) {
        for (j, x) in x.row(source as usize).iter().enumerate() {
            y[(i / taps * c + j) * taps + i % taps] = *x;
        }
    }
    y
}

/// Returns the gradient of [`unfold`] for an input of `rows` rows.
#[must_use]
pub fn fold(dy: Mat64, sources: &[u32], taps: usize, rows: usize) -> Vec<f64> {
    let c = dy.cols / taps;
    let mut dx = vec![0.0; rows * c];
    for (i, &source) in sources.iter().enumerate().filter(|(_, source)| **source != OUTSIDE) {
        for j in 0..c {
            dx[source as usize * c + j] += dy.row(i / taps)[j * taps + i % taps];
        }
    }
    dx
}

/// Returns `x · sigmoid(gate)`; see [`crate::conv::gate_forward`].
#[must_use]
pub fn gate_forward(x: Mat64, gate: Mat64) -> Vec<f64> {
    let (n, c) = gate.dims();
    let gate = |i: usize| gate.at(i / c / (x.rows / n) * c + i % c);
    (0..x.rows * c).map(|i| x.at(i) / (1.0 + (-gate(i)).exp())).collect()
}

/// Returns the gradients of [`gate_forward`]: `(dx, dgate)`.
#[must_use]
pub fn gate_backward(dy: Mat64, x: Mat64, gate: Mat64) -> (Vec<f64>, Vec<f64>) {
    let (n, c) = gate.dims();
    let mut dgate = vec![0.0; n * c];
    for i in 0..x.rows * c {
        let at = i / c / (x.rows / n) * c + i % c;
        let open = 1.0 / (1.0 + (-gate.at(at)).exp());
        dgate[at] += dy.at(i) * x.at(i) * open * (1.0 - open);
    }
    (gate_forward(dy, gate), dgate)
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|l| l.exp()).sum();
    logits.iter().map(|l| l.exp() / sum).collect()
}

/// Returns `Σ softmax(logits)ᵢ · x[i]`; see [`crate::conv::blend_forward`].
#[must_use]
pub fn blend_forward(x: Mat64, logits: &[f64]) -> Vec<f64> {
    let p = softmax(logits);
    (0..x.cols).map(|j| (0..p.len()).map(|i| p[i] * x.row(i)[j]).sum()).collect()
}

/// Returns the gradients of [`blend_forward`]: `(dx, dlogits)`.
#[must_use]
pub fn blend_backward(dy: &[f64], x: Mat64, logits: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let p = softmax(logits);
    let dx = p.iter().flat_map(|p| dy.iter().map(move |dy| p * dy)).collect();
    let dp: Vec<f64> = (0..p.len()).map(|i| dot(dy, x.row(i))).collect();
    let mean: f64 = p.iter().zip(&dp).map(|(p, d)| p * d).sum();
    (dx, p.iter().zip(&dp).map(|(p, d)| p * (d - mean)).collect())
}

/// Returns `y = x W` for each place; see [`crate::experts::forward`].
#[must_use]
pub fn experts_forward(x: Mat64, w: Mat64, groups: Groups) -> Vec<f64> {
    let (k, n) = (x.cols, w.cols);
    let mut y = vec![0.0; x.rows * n];
    for (e, ends) in groups.0.windows(2).enumerate() {
        for p in ends[0]..ends[1] {
            for (i, x) in x.row(p).iter().enumerate() {
                (0..n).for_each(|j| y[p * n + j] += x * w.row(e * k + i)[j]);
            }
        }
    }
    y
}

/// Returns the gradients of [`experts_forward`]: `(dx [places, k], dw [experts · k, n])`.
#[must_use]
pub fn experts_backward(dy: Mat64, x: Mat64, w: Mat64, groups: Groups) -> (Vec<f64>, Vec<f64>) {
    let (k, n) = (x.cols, w.cols);
    let (mut dx, mut dw) = (vec![0.0; x.rows * k], vec![0.0; w.rows * n]);
    for (e, ends) in groups.0.windows(2).enumerate() {
        for p in ends[0]..ends[1] {
            for i in 0..k {
                for (j, dy) in dy.row(p).iter().enumerate() {
                    dx[p * k + i] += dy * w.row(e * k + i)[j];
                    dw[(e * k + i) * n + j] += dy * x.row(p)[i];
                }
            }
        }
    }
    (dx, dw)
}

/// Returns the weight of each place.
fn expert_weights(logits: Mat64, choices: Choices) -> Vec<f64> {
    let mut weights = vec![0.0; choices.places.len()];
    let each = choices.places.len() / logits.rows.max(1);
    for (r, places) in choices.places.chunks_exact(each.max(1)).enumerate() {
        let exp = |place: u32| logits.row(r)[choices.experts[place as usize] as usize].exp();
        let sum: f64 = places.iter().map(|&place| exp(place)).sum();
        places.iter().for_each(|&place| weights[place as usize] = exp(place) / sum);
    }
    weights
}

/// Multiplies places by their weights; see [`crate::experts::weigh_forward`].
#[must_use]
pub fn weigh_forward(x: Mat64, logits: Mat64, choices: Choices) -> Vec<f64> {
    let weights = expert_weights(logits, choices);
    (0..x.rows).flat_map(|p| x.row(p).iter().map(|x| x * weights[p]).collect::<Vec<_>>()).collect()
}

/// Returns the gradients of [`weigh_forward`]: `(dx [places, i], dlogits [rows, experts])`.
#[must_use]
pub fn weigh_backward(dy: Mat64, x: Mat64, logits: Mat64, choices: Choices) -> (Vec<f64>, Vec<f64>) {
    let weights = expert_weights(logits, choices);
    let dot = |p: usize| dy.row(p).iter().zip(x.row(p)).map(|(dy, x)| dy * x).sum::<f64>();
    let mut dlogits = vec![0.0; logits.rows * logits.cols];
    let each = choices.places.len() / logits.rows.max(1);
    for (r, places) in choices.places.chunks_exact(each.max(1)).enumerate() {
        let mean: f64 = places.iter().map(|&p| weights[p as usize] * dot(p as usize)).sum();
        for &p in places {
            let p = p as usize;
            dlogits[r * logits.cols + choices.experts[p] as usize] = weights[p] * (dot(p) - mean);
        }
    }
    (weigh_forward(dy, logits, choices), dlogits)
}
