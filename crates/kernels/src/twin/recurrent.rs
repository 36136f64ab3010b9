//! Layers that carry a state, row by row.

use crate::activation::Activation;
use crate::recurrent::{DeltaShape, Segments};

use super::{Mat64, activation, dot};

/// Returns the log-decays and weights `[g | β]` of rows `[a | b]`: `g = −exp(a_log) · ln(1 + exp(a + dt_bias))`, `β = sigmoid(b)`.
#[must_use]
pub fn gates_forward(x: Mat64, a_log: &[f64], dt_bias: &[f64]) -> Vec<f64> {
    let heads = a_log.len();
    let at = |r: usize, i: usize| match i.checked_sub(heads) {
        None => -a_log[i].exp() * (x.row(r)[i] + dt_bias[i]).exp().ln_1p(),
        Some(_) => 1.0 / (1.0 + (-x.row(r)[i]).exp()),
    };
    (0..x.rows * x.cols).map(|p| at(p / x.cols, p % x.cols)).collect()
}

/// Returns the gradients of [`gates_forward`]: `(dx, da_log, ddt_bias)`.
#[must_use]
pub fn gates_backward(dy: Mat64, x: Mat64, a_log: &[f64], dt_bias: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (heads, y) = (a_log.len(), gates_forward(x, a_log, dt_bias));
    let (mut dx, mut da_log, mut ddt_bias) = (vec![0.0; x.rows * x.cols], vec![0.0; heads], vec![0.0; heads]);
    for r in 0..x.rows {
        for h in 0..heads {
            let (g, b) = (r * x.cols + h, r * x.cols + heads + h);
            dx[g] = -dy.at(g) * a_log[h].exp() / (1.0 + (-x.at(g) - dt_bias[h]).exp());
            dx[b] = dy.at(b) * y[b] * (1.0 - y[b]);
            da_log[h] += dy.at(g) * y[g];
            ddt_bias[h] += dx[g];
        }
    }
    (dx, da_log, ddt_bias)
}

/// Calls `f(row, tap, source)` for every tap of a causal convolution that reads a row of the sequence.
fn causal_terms(segments: &Segments, taps: usize, mut f: impl FnMut(usize, usize, usize)) {
    let mut sequences: Vec<Vec<usize>> = Vec::new();
    for segment in segments.all() {
        let mut rows = segment.after.map_or_else(Vec::new, |after| sequences[after].clone());
        let before = rows.len();
        rows.extend(segment.rows.clone());
        for (i, &row) in rows.iter().enumerate().skip(before) {
            for tap in (0..taps).filter(|tap| i + tap + 1 >= taps) {
                f(row, tap, rows[i + tap + 1 - taps]);
            }
        }
        sequences.push(rows);
    }
}

/// Returns the sums of a causal convolution, before SiLU.
fn causal_sums(x: Mat64, weight: &[f64], segments: &Segments) -> Vec<f64> {
    let (c, taps) = (x.cols, weight.len() / x.cols);
    let mut y = vec![0.0; x.rows * c];
    causal_terms(segments, taps, |row, tap, source| {
        (0..c).for_each(|ch| y[row * c + ch] += weight[ch * taps + tap] * x.row(source)[ch]);
    });
    y
}

/// Returns a causal depthwise convolution along each sequence, followed by SiLU; see [`crate::recurrent::causal_forward`].
#[must_use]
pub fn causal_forward(x: Mat64, weight: &[f64], segments: &Segments) -> Vec<f64> {
    causal_sums(x, weight, segments).into_iter().map(|y| activation(Activation::Silu, y).0).collect()
}

/// Returns the gradients of [`causal_forward`]: `(dx, dweight)`.
#[must_use]
pub fn causal_backward(dy: Mat64, x: Mat64, weight: &[f64], segments: &Segments) -> (Vec<f64>, Vec<f64>) {
    let (c, taps) = (x.cols, weight.len() / x.cols);
    let sums = causal_sums(x, weight, segments);
    let (mut dx, mut dw) = (vec![0.0; x.rows * c], vec![0.0; weight.len()]);
    causal_terms(segments, taps, |row, tap, source| {
        for ch in 0..c {
            let d = dy.row(row)[ch] * activation(Activation::Silu, sums[row * c + ch]).1;
            dx[source * c + ch] += d * weight[ch * taps + tap];
            dw[ch * taps + tap] += d * x.row(source)[ch];
        }
    });
    (dx, dw)
}

/// Constant added to the sum of squares of a query or key.
const EPS: f64 = 1e-6;

/// Returns `x · scale / sqrt(Σ x² + ε)`.
fn normalised(x: &[f64], scale: f64) -> Vec<f64> {
    let norm = scale / (dot(x, x) + EPS).sqrt();
    x.iter().map(|x| x * norm).collect()
}

/// Adds the gradient of [`normalised`] to `dx`.
fn normalised_back(dx: &mut [f64], dy: &[f64], x: &[f64], scale: f64) {
    let norm = 1.0 / (dot(x, x) + EPS).sqrt();
    let along = dot(dy, x) * norm * norm;
    for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
        *dx += scale * norm * (dy - along * x);
    }
}

/// A value head of the gated delta rule, with its inputs.
struct Head<'a> {
    qkv: Mat64<'a>,
    gates: Mat64<'a>,
    shape: DeltaShape,
    head: usize,
}

/// One row of a head: normalised query and key, value, decay and weight.
struct Row<'a> {
    q: Vec<f64>,
    k: Vec<f64>,
    v: &'a [f64],
    decay: f64,
    beta: f64,
}

impl<'a> Head<'a> {
    /// Returns the columns of queries, keys and values.
    fn columns(&self) -> [usize; 3] {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim } = self.shape;
        let key = self.head / (value_heads / key_heads);
        [key * key_dim, (key_heads + key) * key_dim, 2 * key_heads * key_dim + self.head * value_dim]
    }

    fn scale(&self) -> f64 {
        1.0 / (self.shape.key_dim as f64).sqrt()
    }

    fn row(&self, t: usize) -> Row<'a> {
        let [q, k, v] = self.columns();
        let (gates, dk) = (self.gates.row(t), self.shape.key_dim);
        Row {
            q: normalised(self.qkv.part(t, q, dk), self.scale()),
            k: normalised(self.qkv.part(t, k, dk), 1.0),
            v: self.qkv.part(t, v, self.shape.value_dim),
            decay: gates[self.head].exp(),
            beta: gates[self.shape.value_heads + self.head],
        }
    }

    /// Moves the state `[key_dim, value_dim]` on by row `t`, and returns the output.
    fn step(&self, state: &mut [f64], t: usize) -> Vec<f64> {
        let Row { q, k, v, decay, beta } = self.row(t);
        let d = v.len();
        state.iter_mut().for_each(|s| *s *= decay);
        let along =
            |state: &[f64], x: &[f64], j: usize| (0..x.len()).map(|i| x[i] * state[i * d + j]).sum::<f64>();
        let added: Vec<f64> = (0..d).map(|j| beta * (v[j] - along(state, &k, j))).collect();
        for (i, s) in state.iter_mut().enumerate() {
            *s += k[i / d] * added[i % d];
        }
        (0..d).map(|j| along(state, &q, j)).collect()
    }
}

/// Returns the output of the gated delta rule; see [`crate::recurrent::delta_forward`].
#[must_use]
pub fn delta_forward(qkv: Mat64, gates: Mat64, segments: &Segments, shape: DeltaShape) -> Vec<f64> {
    delta_forward_states(qkv, gates, segments, shape).0
}

/// Returns [`delta_forward`], and the states of all heads at the end of each segment.
#[must_use]
pub fn delta_forward_states(
    qkv: Mat64,
    gates: Mat64,
    segments: &Segments,
    shape: DeltaShape,
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let (width, d) = (shape.value_width(), shape.value_dim);
    let mut out = vec![0.0; qkv.rows * width];
    let mut states = vec![Vec::new(); segments.all().len()];
    for head in 0..shape.value_heads {
        let of = Head { qkv, gates, shape, head };
        let mut ends: Vec<Vec<f64>> = Vec::new();
        for segment in segments.all() {
            let zero = || vec![0.0; shape.key_dim * d];
            let mut state = segment.after.map_or_else(zero, |after| ends[after].clone());
            for t in segment.rows.clone() {
                out[t * width + head * d..][..d].copy_from_slice(&of.step(&mut state, t));
            }
            ends.push(state);
        }
        states.iter_mut().zip(ends).for_each(|(states, end)| states.extend(end));
    }
    (out, states)
}

/// Returns the output of the gated delta rule of rows that continue a sequence, and moves its state on.
pub fn delta_steps(qkv: Mat64, gates: Mat64, state: &mut [f64], shape: DeltaShape) -> Vec<f64> {
    let (width, d) = (shape.value_width(), shape.value_dim);
    let mut out = vec![0.0; qkv.rows * width];
    for (head, state) in state.chunks_exact_mut(shape.key_dim * d).enumerate() {
        let of = Head { qkv, gates, shape, head };
        for t in 0..qkv.rows {
            out[t * width + head * d..][..d].copy_from_slice(&of.step(state, t));
        }
    }
    out
}

/// Returns the gradients of [`delta_forward`]: `(dqkv, dgates)`. All states are in memory at once.
#[must_use]
pub fn delta_backward(
    dout: Mat64,
    qkv: Mat64,
    gates: Mat64,
    segments: &Segments,
    shape: DeltaShape,
) -> (Vec<f64>, Vec<f64>) {
    let (dk, d) = (shape.key_dim, shape.value_dim);
    let (mut dqkv, mut dgates) = (vec![0.0; qkv.rows * qkv.cols], vec![0.0; gates.rows * gates.cols]);
    for head in 0..shape.value_heads {
        let of = Head { qkv, gates, shape, head };
        let zero = vec![0.0; dk * d];
        // The state before each row, and at the end of each segment.
        let (mut before, mut ends) = (vec![Vec::new(); qkv.rows], Vec::new());
        for segment in segments.all() {
            let mut state: Vec<f64> =
                segment.after.map_or_else(|| zero.clone(), |after: usize| Vec::clone(&ends[after]));
            for t in segment.rows.clone() {
                before[t].clone_from(&state);
                of.step(&mut state, t);
            }
            ends.push(state);
        }
        let mut dends = vec![zero.clone(); segments.all().len()];
        for (s, segment) in segments.all().iter().enumerate().rev() {
            let mut dstate = std::mem::take(&mut dends[s]);
            for t in segment.rows.clone().rev() {
                let [at_q, at_k, at_v] = of.columns();
                let Row { q, k, v, decay, beta } = of.row(t);
                let faded: Vec<f64> = before[t].iter().map(|s| s * decay).collect();
                let rest: Vec<f64> =
                    (0..d).map(|j| v[j] - (0..dk).map(|i| k[i] * faded[i * d + j]).sum::<f64>()).collect();
                let dout = dout.part(t, head * d, d);
                // o = Sᵀ q, with S = faded + k ⊗ β rest.
                let after = |i: usize, j: usize| faded[i * d + j] + k[i] * beta * rest[j];
                let dq: Vec<f64> = (0..dk).map(|i| (0..d).map(|j| after(i, j) * dout[j]).sum()).collect();
                for (i, ds) in dstate.iter_mut().enumerate() {
                    *ds += q[i / d] * dout[i % d];
                }
                let dadded: Vec<f64> =
                    (0..d).map(|j| (0..dk).map(|i| dstate[i * d + j] * k[i]).sum()).collect();
                let dk_row: Vec<f64> = (0..dk)
                    .map(|i| {
                        let through = |j: usize| dstate[i * d + j] * rest[j] - dadded[j] * faded[i * d + j];
                        (0..d).map(|j| beta * through(j)).sum()
                    })
                    .collect();
                let mut ddecay = 0.0;
                for (i, ds) in dstate.iter_mut().enumerate() {
                    *ds -= beta * k[i / d] * dadded[i % d];
                    ddecay += *ds * before[t][i];
                    *ds *= decay;
                }
                let (row, gate) = (t * qkv.cols, t * gates.cols + head);
                for j in 0..d {
                    dqkv[row + at_v + j] = beta * dadded[j];
                }
                dgates[gate] = ddecay * decay;
                dgates[gate + shape.value_heads] = dot(&dadded, &rest);
                for (at, dy, scale) in [(at_q, dq, of.scale()), (at_k, dk_row, 1.0)] {
                    normalised_back(&mut dqkv[row + at..][..dk], &dy, qkv.part(t, at, dk), scale);
                }
            }
            if let Some(after) = segment.after {
                dends[after].iter_mut().zip(dstate).for_each(|(sum, d)| *sum += d);
            }
        }
    }
    (dqkv, dgates)
}

/// Returns `weight · rms(x) · silu(gate)` for heads side by side; see [`crate::norm::gated_forward`].
#[must_use]
pub fn gated_norm_forward(x: Mat64, gate: Mat64, weight: &[f64], eps: f64) -> Vec<f64> {
    let heads = Mat64::new(x.data, x.rows * x.cols / weight.len(), weight.len());
    let (normed, _) = super::rms_forward(heads, weight, eps);
    normed.into_iter().enumerate().map(|(i, y)| y * activation(Activation::Silu, gate.at(i)).0).collect()
}

/// Returns the gradients of [`gated_norm_forward`]: `(dx, dgate, dweight)`.
#[must_use]
pub fn gated_norm_backward(
    dy: Mat64,
    x: Mat64,
    gate: Mat64,
    weight: &[f64],
    eps: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let d = weight.len();
    let heads = |data| Mat64::new(data, x.rows * x.cols / d, d);
    let (normed, stats) = super::rms_forward(heads(x.data), weight, eps);
    let opened: Vec<(f64, f64)> =
        (0..normed.len()).map(|i| activation(Activation::Silu, gate.at(i))).collect();
    let dnormed: Vec<f64> = opened.iter().enumerate().map(|(i, open)| dy.at(i) * open.0).collect();
    let dgate = opened.iter().enumerate().map(|(i, open)| dy.at(i) * normed[i] * open.1).collect();
    let (dx, dw) = super::rms_backward(heads(&dnormed), heads(x.data), weight, &stats);
    (dx, dgate, dw)
}
