//! Log-probabilities and entropies of `softmax(hidden · headᵀ / temperature)` without the logits matrix.

use crate::{Weight, linear};

fn wide(w: Weight) -> Vec<f64> {
    match w {
        Weight::F32(w) => w.iter().map(|&x| f64::from(x)).collect(),
        Weight::Bf16(w) => w.iter().map(|x| x.to_f64()).collect(),
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
    let hidden: Vec<f64> = hidden.iter().map(|&x| f64::from(x)).collect();
    let (a, b, c) = crate::twin::logprob_forward(
        &hidden,
        &wide(head),
        rows,
        h,
        v,
        targets,
        offsets,
        f64::from(temperature),
    );
    logp.iter_mut().zip(a).for_each(|(y, x)| *y = x as f32);
    entropy.iter_mut().zip(b).for_each(|(y, x)| *y = x as f32);
    lse.iter_mut().zip(c).for_each(|(y, x)| *y = x as f32);
}

/// Gradients of [`forward`]: `dhidden [rows, h]` is overwritten, `dhead [v, h]` is added to.
///
/// `dlogp` is the gradient per target, `dentropy` per row; `lse` and `entropy` are what [`forward`] wrote. With
/// `p = softmax`, a logit gets `Σ dlogp (1[target] − p) − dentropy · p (log p + entropy)`, divided by the temperature.
pub fn backward(
    dhidden: &mut [f32],
    dhead: Option<&mut [f32]>,
    hidden: &[f32],
    head: Weight,
    rows: usize,
    h: usize,
    v: usize,
    targets: &[u32],
    offsets: &[usize],
    _lse: &[f32],
    _entropy: &[f32],
    dlogp: &[f32],
    dentropy: Option<&[f32]>,
    temperature: f32,
) {
    let hidden: Vec<f64> = hidden.iter().map(|&x| f64::from(x)).collect();
    let dlogp: Vec<f64> = dlogp.iter().map(|&x| f64::from(x)).collect();
    let dentropy: Option<Vec<f64>> = dentropy.map(|d| d.iter().map(|&x| f64::from(x)).collect());
    let (a, b) = crate::twin::logprob_backward(
        &hidden,
        &wide(head),
        rows,
        h,
        v,
        targets,
        offsets,
        &dlogp,
        dentropy.as_deref(),
        f64::from(temperature),
    );
    dhidden.iter_mut().zip(a).for_each(|(y, x)| *y = x as f32);
    if let Some(dhead) = dhead {
        dhead.iter_mut().zip(b).for_each(|(y, x)| *y += x as f32);
    }
}

/// `logits [rows, v] = hidden [rows, h] · headᵀ` with batch-invariant bits, for sampling.
pub fn logits_rows(logits: &mut [f32], hidden: &[f32], head: Weight, rows: usize, h: usize, v: usize) {
    linear::forward_rows(logits, v, hidden, h, head, None, rows, h, v);
}
