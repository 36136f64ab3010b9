//! The optimizer's elementwise update and the gradient norm.

use crate::parallel::{Shared, ranges};

/// One AdamW step in place, as `torch.optim.AdamW` does it (decoupled weight decay, bias-corrected moments).
///
/// `step` counts from 1. The gradient is multiplied by `grad_scale` first (clipping, averaging). All slices have the
/// length of `weight`. Bias corrections are computed in `f64`.
pub fn adamw(
    weight: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    grad: &[f32],
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    step: u64,
    grad_scale: f32,
) {
    debug_assert!(
        m.len() == weight.len() && v.len() == weight.len() && grad.len() == weight.len() && step > 0
    );
    let power = i32::try_from(step).unwrap_or(i32::MAX);
    let step_size = (f64::from(lr) / (1.0 - f64::from(beta1).powi(power))) as f32;
    let root = (1.0 - f64::from(beta2).powi(power)).sqrt().recip() as f32;
    let decay = 1.0 - lr * weight_decay;
    let n = weight.len();
    let (weight, m, v) = (Shared::new(weight), Shared::new(m), Shared::new(v));
    ranges(n, 64, n * 4, |range| {
        // SAFETY: the ranges are disjoint.
        let [weight, m, v] = [weight, m, v].map(|s| unsafe { s.part(range.start, range.len()) });
        for (((w, m), v), g) in weight.iter_mut().zip(m).zip(v).zip(&grad[range.clone()]) {
            let g = g * grad_scale;
            *m += (g - *m) * (1.0 - beta1);
            *v = *v * beta2 + g * g * (1.0 - beta2);
            *w = *w * decay - step_size * *m / (v.sqrt() * root + eps);
        }
    });
}

/// The sum of squares, in `f64`, over blocks of fixed length added in order.
#[must_use]
pub fn sum_of_squares(x: &[f32]) -> f64 {
    x.chunks(4096).map(|block| block.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>()).sum()
}
