//! Every op again in plain `f64` loops: no SIMD, no threads, no tiling, contiguous arrays.
//!
//! This is the meaning of the kernels. Gradients here are checked by central differences, the fast kernels are checked
//! against this module.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::activation::Activation;
use crate::attention::{AttentionLayout, Shape};
use crate::conv::{OUTSIDE, RowMix};

/// `y [m, n] = x [m, k] · Wᵀ + b`, weight `[n, k]`.
#[must_use]
pub fn linear_forward(x: &[f64], w: &[f64], bias: Option<&[f64]>, m: usize, k: usize, n: usize) -> Vec<f64> {
    let mut y = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            let dot: f64 = (0..k).map(|p| x[i * k + p] * w[j * k + p]).sum();
            y[i * n + j] = dot + bias.map_or(0.0, |b| b[j]);
        }
    }
    y
}

/// Gradients of [`linear_forward`]: `(dx [m, k], dw [n, k], db [n])`.
#[must_use]
pub fn linear_backward(
    dy: &[f64],
    x: &[f64],
    w: &[f64],
    m: usize,
    k: usize,
    n: usize,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw, mut db) = (vec![0.0; m * k], vec![0.0; n * k], vec![0.0; n]);
    for i in 0..m {
        for j in 0..n {
            let g = dy[i * n + j];
            db[j] += g;
            for p in 0..k {
                dx[i * k + p] += g * w[j * k + p];
                dw[j * k + p] += g * x[i * k + p];
            }
        }
    }
    (dx, dw, db)
}

/// RMS norm: `y = x · rstd · weight`, `rstd = 1 / sqrt(mean(x²) + eps)`. Returns `(y, rstd [rows])`.
#[must_use]
pub fn rms_forward(x: &[f64], weight: &[f64], rows: usize, dim: usize, eps: f64) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut rstd) = (vec![0.0; rows * dim], vec![0.0; rows]);
    for r in 0..rows {
        let x = &x[r * dim..(r + 1) * dim];
        rstd[r] = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / dim as f64 + eps).sqrt();
        for j in 0..dim {
            y[r * dim + j] = x[j] * rstd[r] * weight[j];
        }
    }
    (y, rstd)
}

/// Gradients of [`rms_forward`]: `(dx, dw)`.
#[must_use]
pub fn rms_backward(
    dy: &[f64],
    x: &[f64],
    weight: &[f64],
    rstd: &[f64],
    rows: usize,
    dim: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw) = (vec![0.0; rows * dim], vec![0.0; dim]);
    for r in 0..rows {
        let at = |j: usize| r * dim + j;
        let dot: f64 = (0..dim).map(|j| dy[at(j)] * weight[j] * x[at(j)]).sum();
        for j in 0..dim {
            dw[j] += dy[at(j)] * x[at(j)] * rstd[r];
            dx[at(j)] = rstd[r] * (dy[at(j)] * weight[j] - x[at(j)] * dot * rstd[r] * rstd[r] / dim as f64);
        }
    }
    (dx, dw)
}

/// Layer norm with biased variance. Returns `(y, mean [rows], rstd [rows])`.
#[must_use]
pub fn layer_forward(
    x: &[f64],
    weight: &[f64],
    bias: &[f64],
    rows: usize,
    dim: usize,
    eps: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut y, mut mean, mut rstd) = (vec![0.0; rows * dim], vec![0.0; rows], vec![0.0; rows]);
    for r in 0..rows {
        let x = &x[r * dim..(r + 1) * dim];
        mean[r] = x.iter().sum::<f64>() / dim as f64;
        let var = x.iter().map(|v| (v - mean[r]).powi(2)).sum::<f64>() / dim as f64;
        rstd[r] = 1.0 / (var + eps).sqrt();
        for j in 0..dim {
            y[r * dim + j] = (x[j] - mean[r]) * rstd[r] * weight[j] + bias[j];
        }
    }
    (y, mean, rstd)
}

/// Gradients of [`layer_forward`]: `(dx, dw, db)`.
#[must_use]
pub fn layer_backward(
    dy: &[f64],
    x: &[f64],
    weight: &[f64],
    mean: &[f64],
    rstd: &[f64],
    rows: usize,
    dim: usize,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw, mut db) = (vec![0.0; rows * dim], vec![0.0; dim], vec![0.0; dim]);
    for r in 0..rows {
        let at = |j: usize| r * dim + j;
        let hat = |j: usize| (x[at(j)] - mean[r]) * rstd[r];
        let g = |j: usize| dy[at(j)] * weight[j];
        let mean_g = (0..dim).map(g).sum::<f64>() / dim as f64;
        let mean_gx = (0..dim).map(|j| g(j) * hat(j)).sum::<f64>() / dim as f64;
        for j in 0..dim {
            dw[j] += dy[at(j)] * hat(j);
            db[j] += dy[at(j)];
            dx[at(j)] = rstd[r] * (g(j) - mean_g - hat(j) * mean_gx);
        }
    }
    (dx, dw, db)
}

/// Rotary embedding of contiguous `[rows, heads · head_dim]`; see [`crate::rope::apply`].
#[must_use]
pub fn rope(
    x: &[f64],
    heads: usize,
    head_dim: usize,
    cos: &[f64],
    sin: &[f64],
    rows: usize,
    inverse: bool,
) -> Vec<f64> {
    let half = head_dim / 2;
    let mut y = vec![0.0; x.len()];
    for r in 0..rows {
        for head in 0..heads {
            for i in 0..half {
                let at = (r * heads + head) * head_dim + i;
                let c = cos[r * half + i];
                let s = if inverse { -sin[r * half + i] } else { sin[r * half + i] };
                y[at] = x[at] * c - x[at + half] * s;
                y[at + half] = x[at + half] * c + x[at] * s;
            }
        }
    }
    y
}

/// The error function, by its Taylor series near 0 and the continued fraction of `erfc` elsewhere; error below 1e-14.
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

/// The activation at one point and its derivative.
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

/// `silu(gate) · up` of `[rows, 2i]` (gate first).
#[must_use]
pub fn swiglu_forward(gate_up: &[f64], rows: usize, i: usize) -> Vec<f64> {
    let at = |r: usize, j: usize| gate_up[r * 2 * i + j];
    (0..rows * i).map(|p| activation(Activation::Silu, at(p / i, p % i)).0 * at(p / i, i + p % i)).collect()
}

/// Gradient of [`swiglu_forward`], `[rows, 2i]`.
#[must_use]
pub fn swiglu_backward(dy: &[f64], gate_up: &[f64], rows: usize, i: usize) -> Vec<f64> {
    let mut d = vec![0.0; rows * 2 * i];
    for r in 0..rows {
        for j in 0..i {
            let (silu, slope) = activation(Activation::Silu, gate_up[r * 2 * i + j]);
            d[r * 2 * i + j] = dy[r * i + j] * gate_up[r * 2 * i + i + j] * slope;
            d[r * 2 * i + i + j] = dy[r * i + j] * silu;
        }
    }
    d
}

/// For every query row of `layout`: the query row and the key rows it sees, in order.
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

/// Softmax attention; `q [tq, q_heads·d]`, `k`, `v [tk, kv_heads·d]`. Returns `(out [tq, q_heads·d], lse [tq, q_heads])`.
#[must_use]
pub fn attention_forward(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    layout: &AttentionLayout,
    shape: Shape,
    scale: f64,
) -> (Vec<f64>, Vec<f64>) {
    let Shape { q_heads, kv_heads, head_dim: d } = shape;
    let (mut out, mut lse) = (vec![0.0; q.len()], vec![f64::NEG_INFINITY; q.len() / d]);
    for (query, keys) in visible(layout) {
        for head in 0..q_heads {
            let at = (query * q_heads + head) * d;
            let kv = |key: usize| (key * kv_heads + head / (q_heads / kv_heads)) * d;
            let s: Vec<f64> = keys
                .iter()
                .map(|&key| scale * (0..d).map(|j| q[at + j] * k[kv(key) + j]).sum::<f64>())
                .collect();
            let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if keys.is_empty() {
                continue;
            }
            let total: f64 = s.iter().map(|s| (s - max).exp()).sum();
            lse[query * q_heads + head] = max + total.ln();
            for (&key, s) in keys.iter().zip(&s) {
                for j in 0..d {
                    out[at + j] += (s - max).exp() / total * v[kv(key) + j];
                }
            }
        }
    }
    (out, lse)
}

/// Gradients of [`attention_forward`]: `(dq, dk, dv)`.
#[must_use]
pub fn attention_backward(
    dout: &[f64],
    q: &[f64],
    k: &[f64],
    v: &[f64],
    layout: &AttentionLayout,
    shape: Shape,
    scale: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let Shape { q_heads, kv_heads, head_dim: d } = shape;
    let (out, lse) = attention_forward(q, k, v, layout, shape, scale);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for (query, keys) in visible(layout) {
        for head in 0..q_heads {
            let at = (query * q_heads + head) * d;
            let delta: f64 = (0..d).map(|j| dout[at + j] * out[at + j]).sum();
            for &key in &keys {
                let kv = (key * kv_heads + head / (q_heads / kv_heads)) * d;
                let s = scale * (0..d).map(|j| q[at + j] * k[kv + j]).sum::<f64>();
                let p = (s - lse[query * q_heads + head]).exp();
                let dp: f64 = (0..d).map(|j| dout[at + j] * v[kv + j]).sum();
                let ds = p * (dp - delta) * scale;
                for j in 0..d {
                    dv[kv + j] += p * dout[at + j];
                    dq[at + j] += ds * k[kv + j];
                    dk[kv + j] += ds * q[at + j];
                }
            }
        }
    }
    (dq, dk, dv)
}

/// Log-probabilities of targets; see [`crate::logprob`]. Returns `(logp per target, entropy [rows], lse [rows])`.
#[must_use]
pub fn logprob_forward(
    hidden: &[f64],
    head: &[f64],
    rows: usize,
    h: usize,
    v: usize,
    targets: &[u32],
    offsets: &[usize],
    temperature: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let logits = linear_forward(hidden, head, None, rows, h, v);
    let (mut logp, mut entropy, mut lse) = (vec![0.0; targets.len()], vec![0.0; rows], vec![0.0; rows]);
    for r in 0..rows {
        let z: Vec<f64> = logits[r * v..(r + 1) * v].iter().map(|l| l / temperature).collect();
        let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        lse[r] = max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
        entropy[r] = z.iter().map(|z| (z - lse[r]).exp() * (lse[r] - z)).sum();
        for t in offsets[r]..offsets[r + 1] {
            logp[t] = z[targets[t] as usize] - lse[r];
        }
    }
    (logp, entropy, lse)
}

/// Gradients of the logits of [`logprob_forward`], `[rows, v]`.
#[must_use]
pub fn logit_gradients(
    hidden: &[f64],
    head: &[f64],
    rows: usize,
    h: usize,
    v: usize,
    targets: &[u32],
    offsets: &[usize],
    dlogp: &[f64],
    dentropy: Option<&[f64]>,
    temperature: f64,
) -> Vec<f64> {
    let logits = linear_forward(hidden, head, None, rows, h, v);
    let (_, entropy, lse) = logprob_forward(hidden, head, rows, h, v, targets, offsets, temperature);
    let mut dlogits = vec![0.0; rows * v];
    for r in 0..rows {
        let total: f64 = dlogp[offsets[r]..offsets[r + 1]].iter().sum();
        for j in 0..v {
            let log_p = logits[r * v + j] / temperature - lse[r];
            let d_entropy = dentropy.map_or(0.0, |d| d[r]);
            dlogits[r * v + j] -= log_p.exp() * (total + d_entropy * (log_p + entropy[r])) / temperature;
        }
        for t in offsets[r]..offsets[r + 1] {
            dlogits[r * v + targets[t] as usize] += dlogp[t] / temperature;
        }
    }
    dlogits
}

/// Gradients of [`logprob_forward`]: `(dhidden, dhead)`.
#[must_use]
pub fn logprob_backward(
    hidden: &[f64],
    head: &[f64],
    rows: usize,
    h: usize,
    v: usize,
    targets: &[u32],
    offsets: &[usize],
    dlogp: &[f64],
    dentropy: Option<&[f64]>,
    temperature: f64,
) -> (Vec<f64>, Vec<f64>) {
    let dlogits = logit_gradients(hidden, head, rows, h, v, targets, offsets, dlogp, dentropy, temperature);
    let (dhidden, dhead, _) = linear_backward(&dlogits, hidden, head, rows, h, v);
    (dhidden, dhead)
}

/// Rows `ids` of `table [_, h]`.
#[must_use]
pub fn gather(table: &[f64], ids: &[u32], h: usize) -> Vec<f64> {
    ids.iter().flat_map(|&id| table[id as usize * h..(id as usize + 1) * h].iter().copied()).collect()
}

/// Gradient of [`gather`], `[vocab, h]`.
#[must_use]
pub fn scatter_add(dy: &[f64], ids: &[u32], vocab: usize, h: usize) -> Vec<f64> {
    let mut d = vec![0.0; vocab * h];
    for (i, &id) in ids.iter().enumerate() {
        for j in 0..h {
            d[id as usize * h + j] += dy[i * h + j];
        }
    }
    d
}

/// One AdamW step in place; see [`crate::optim::adamw`].
pub fn adamw(
    weight: &mut [f64],
    m: &mut [f64],
    v: &mut [f64],
    grad: &[f64],
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    step: u64,
    grad_scale: f64,
) {
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

/// `y [rows, dim] = residual + x · scale`, `scale [dim]`.
#[must_use]
pub fn scale_residual_forward(x: &[f64], residual: &[f64], scale: &[f64]) -> Vec<f64> {
    let dim = scale.len();
    x.iter().zip(residual).enumerate().map(|(i, (x, r))| r + x * scale[i % dim]).collect()
}

/// Gradients of [`scale_residual_forward`]: `(dx, dscale)`; that of the residual is `dy`.
#[must_use]
pub fn scale_residual_backward(dy: &[f64], x: &[f64], scale: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let dim = scale.len();
    let mut dscale = vec![0.0; dim];
    for (i, (dy, x)) in dy.iter().zip(x).enumerate() {
        dscale[i % dim] += dy * x;
    }
    (dy.iter().enumerate().map(|(i, dy)| dy * scale[i % dim]).collect(), dscale)
}

/// Rows as weighted sums; see [`crate::conv::mix_forward`].
#[must_use]
pub fn mix_forward(x: &[f64], mix: &RowMix, c: usize) -> Vec<f64> {
    let mut y = vec![0.0; mix.len() * c];
    for r in 0..mix.len() {
        for i in mix.offsets[r]..mix.offsets[r + 1] {
            for j in 0..c {
                y[r * c + j] += f64::from(mix.weights[i]) * x[mix.rows[i] as usize * c + j];
            }
        }
    }
    y
}

/// Gradient of [`mix_forward`] for an input of `rows` rows.
#[must_use]
pub fn mix_backward(dy: &[f64], mix: &RowMix, rows: usize, c: usize) -> Vec<f64> {
    let mut dx = vec![0.0; rows * c];
    for r in 0..mix.len() {
        for i in mix.offsets[r]..mix.offsets[r + 1] {
            for j in 0..c {
                dx[mix.rows[i] as usize * c + j] += f64::from(mix.weights[i]) * dy[r * c + j];
            }
        }
    }
    dx
}

/// Calls `f(output, input, weight)` with the indices of every product of a depthwise 3×3 convolution with padding 1.
fn depthwise3_terms(n: usize, h: usize, w: usize, c: usize, mut f: impl FnMut(usize, usize, usize)) {
    for (p, y, x, ch) in (0..n * h * w * c).map(|i| (i / (h * w * c), i / (w * c) % h, i / c % w, i % c)) {
        for (a, b) in (0..9).map(|tap| (tap / 3, tap % 3)) {
            if (1..=h).contains(&(y + a)) && (1..=w).contains(&(x + b)) {
                let at = |y: usize, x: usize| ((p * h + y) * w + x) * c + ch;
                f(at(y, x), at(y + a - 1, x + b - 1), ch * 9 + a * 3 + b);
            }
        }
    }
}

/// Depthwise 3×3 convolution; see [`crate::conv::depthwise3`].
#[must_use]
pub fn depthwise3_forward(x: &[f64], weight: &[f64], n: usize, h: usize, w: usize, c: usize) -> Vec<f64> {
    let mut y = vec![0.0; n * h * w * c];
    depthwise3_terms(n, h, w, c, |to, from, k| y[to] += weight[k] * x[from]);
    y
}

/// Gradients of [`depthwise3_forward`]: `(dx, dweight)`.
#[must_use]
pub fn depthwise3_backward(
    dy: &[f64],
    x: &[f64],
    weight: &[f64],
    n: usize,
    h: usize,
    w: usize,
    c: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; 9 * c]);
    depthwise3_terms(n, h, w, c, |to, from, k| {
        dx[from] += weight[k] * dy[to];
        dw[k] += x[from] * dy[to];
    });
    (dx, dw)
}

/// Patches as rows; see [`crate::conv::unfold`].
#[must_use]
pub fn unfold(x: &[f64], sources: &[u32], taps: usize, c: usize) -> Vec<f64> {
    let mut y = vec![0.0; sources.len() * c];
    for (i, &source) in sources.iter().enumerate().filter(|(_, source)| **source != OUTSIDE) {
        for j in 0..c {
            y[(i / taps * c + j) * taps + i % taps] = x[source as usize * c + j];
        }
    }
    y
}

/// Gradient of [`unfold`] for an input of `rows` rows.
#[must_use]
pub fn fold(dy: &[f64], sources: &[u32], taps: usize, rows: usize, c: usize) -> Vec<f64> {
    let mut dx = vec![0.0; rows * c];
    for (i, &source) in sources.iter().enumerate().filter(|(_, source)| **source != OUTSIDE) {
        for j in 0..c {
            dx[source as usize * c + j] += dy[(i / taps * c + j) * taps + i % taps];
        }
    }
    dx
}

/// `x · sigmoid(gate)`; see [`crate::conv::gate_forward`].
#[must_use]
pub fn gate_forward(x: &[f64], gate: &[f64], s: usize, c: usize) -> Vec<f64> {
    x.iter().enumerate().map(|(i, x)| x / (1.0 + (-gate[i / (s * c) * c + i % c]).exp())).collect()
}

/// Gradients of [`gate_forward`]: `(dx, dgate)`.
#[must_use]
pub fn gate_backward(dy: &[f64], x: &[f64], gate: &[f64], s: usize, c: usize) -> (Vec<f64>, Vec<f64>) {
    let mut dgate = vec![0.0; gate.len()];
    for i in 0..x.len() {
        let at = i / (s * c) * c + i % c;
        let open = 1.0 / (1.0 + (-gate[at]).exp());
        dgate[at] += dy[i] * x[i] * open * (1.0 - open);
    }
    (gate_forward(dy, gate, s, c), dgate)
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|l| l.exp()).sum();
    logits.iter().map(|l| l.exp() / sum).collect()
}

/// `Σ softmax(logits)ᵢ · x[i]`; see [`crate::conv::blend_forward`].
#[must_use]
pub fn blend_forward(x: &[f64], logits: &[f64]) -> Vec<f64> {
    let (p, len) = (softmax(logits), x.len() / logits.len());
    (0..len).map(|j| (0..p.len()).map(|i| p[i] * x[i * len + j]).sum()).collect()
}

/// Gradients of [`blend_forward`]: `(dx, dlogits)`.
#[must_use]
pub fn blend_backward(dy: &[f64], x: &[f64], logits: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (p, len) = (softmax(logits), dy.len());
    let dx = (0..x.len()).map(|i| p[i / len] * dy[i % len]).collect();
    let dp: Vec<f64> = (0..p.len()).map(|i| (0..len).map(|j| dy[j] * x[i * len + j]).sum()).collect();
    let mean: f64 = p.iter().zip(&dp).map(|(p, d)| p * d).sum();
    (dx, p.iter().zip(&dp).map(|(p, d)| p * (d - mean)).collect())
}
