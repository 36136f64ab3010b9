//! The elementwise update of the optimizer, and the sum of squares for the gradient norm.

use half::bf16;

use crate::mat::check;
use crate::parallel::{Shared, map, ranges};
use crate::profile::{Op, span};

/// Scalar parameters of one update.
#[derive(Clone, Copy)]
struct Update {
    beta1: f32,
    beta2: f32,
    eps: f32,
    decay: f32,
    grad_scale: f32,
    /// Learning rate divided by the first bias correction.
    step_size: f32,
    /// Inverse square root of the second bias correction.
    root: f32,
}

simd_fn! {
    // The body is plain arithmetic, which the compiler vectorises for the chosen instruction set.
    fn update<'a>(_simd: S, u: Update, weight: &'a mut [f32], m: &'a mut [f32], v: &'a mut [f32],
                  grad: &'a [f32]) -> () {
        for (((w, m), v), g) in weight.iter_mut().zip(m).zip(v).zip(grad) {
            let g = g * u.grad_scale;
            *m += (g - *m) * (1.0 - u.beta1);
            *v = *v * u.beta2 + g * g * (1.0 - u.beta2);
            *w = *w * u.decay - u.step_size * *m / (v.sqrt() * u.root + u.eps);
        }
    }
}

simd_fn! {
    // Rounds to nearest even. NaN stays NaN.
    fn round<'a>(_simd: S, from: &'a [f32], to: &'a mut [bf16]) -> () {
        for (&x, y) in from.iter().zip(to) {
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            *y = bf16::from_bits(if x.is_nan() { (bits >> 16 | 0x40) as u16 } else { rounded as u16 });
        }
    }
}

simd_fn! {
    fn block_sum<'a>(_simd: S, x: &'a [f32]) -> f64 {
        let mut acc = [0.0f64; 16];
        for part in x.chunks(16) {
            for (a, &x) in acc.iter_mut().zip(part) {
                *a += f64::from(x) * f64::from(x);
            }
        }
        acc.iter().sum()
    }
}

/// Scalar parameters of one AdamW step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW<T = f32> {
    /// Learning rate.
    pub lr: T,
    /// Decay rates of the first and the second moment.
    pub betas: [T; 2],
    /// Term added to the square root of the second moment.
    pub eps: T,
    /// Decoupled weight decay.
    pub weight_decay: T,
    /// Factor that multiplies the gradient (clipping, averaging).
    pub grad_scale: T,
    /// Number of the step, counted from 1.
    pub step: u64,
}

impl AdamW {
    /// Converts the scalars to `f64` for [`crate::twin`].
    #[must_use]
    pub fn wide(&self) -> AdamW<f64> {
        AdamW {
            lr: self.lr.into(),
            betas: self.betas.map(f64::from),
            eps: self.eps.into(),
            weight_decay: self.weight_decay.into(),
            grad_scale: self.grad_scale.into(),
            step: self.step,
        }
    }

    /// Returns the factors of the update. Bias corrections are computed in `f64`.
    fn update(&self) -> Update {
        let Self { lr, betas: [beta1, beta2], eps, weight_decay, grad_scale, step } = *self;
        let power = i32::try_from(step).unwrap_or(i32::MAX);
        let correction = |beta: f32| 1.0 - f64::from(beta).powi(power);
        let decay = (1.0 - f64::from(lr) * f64::from(weight_decay)) as f32;
        let step_size = (f64::from(lr) / correction(beta1)) as f32;
        let root = correction(beta2).sqrt().recip() as f32;
        Update { beta1, beta2, eps, decay, grad_scale, step_size, root }
    }
}

/// Applies one step in place, following `torch.optim.AdamW` (decoupled weight decay, bias-corrected moments).
///
/// Updates `weight`, its first moment `m` and its second moment `v` from `grad`. All have the same length.
pub fn adamw(grad: &[f32], by: &AdamW, weight: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    let n = weight.len();
    let _span = span(Op::Optimizer, || (12 * n, 28 * n));
    check!(
        "adamw",
        m.len() == n && v.len() == n && grad.len() == n && by.step > 0,
        n,
        m.len(),
        v.len(),
        grad.len(),
        by.step
    );
    let u = by.update();
    let [weight, m, v] = [weight, m, v].map(Shared::new);
    ranges(n, 64, n * 4, |range| {
        // SAFETY: the ranges are disjoint.
        let [weight, m, v] = [weight, m, v].map(|s| unsafe { s.part(range.start, range.len()) });
        update(u, weight, m, v, &grad[range]);
    });
}

/// Number of values that are updated before they are rounded, so that they are still in the cache.
const ROUNDED_TOGETHER: usize = 1 << 10;

/// Applies one step of [`adamw`] to a bf16 weight, which receives the updated f32 `master`, rounded to nearest even. Without a
/// master, the weight itself is updated in f32 and rounded. All have the same length.
pub fn adamw_bf16(
    grad: &[f32],
    by: &AdamW,
    weight: &mut [bf16],
    master: Option<&mut [f32]>,
    m: &mut [f32],
    v: &mut [f32],
) {
    let n = weight.len();
    let has_master = master.is_some();
    let _span = span(Op::Optimizer, || (12 * n, if has_master { 30 * n } else { 24 * n }));
    let fits = master.as_ref().is_none_or(|master| master.len() == n);
    check!(
        "adamw_bf16",
        fits && m.len() == n && v.len() == n && grad.len() == n && by.step > 0,
        n,
        m.len(),
        v.len(),
        grad.len(),
        by.step
    );
    let u = by.update();
    let (weight, master, [m, v]) = (Shared::new(weight), master.map(Shared::new), [m, v].map(Shared::new));
    ranges(n, 64, n * 4, |range| {
        let mut wide = [0.0; ROUNDED_TOGETHER];
        for first in range.clone().step_by(ROUNDED_TOGETHER) {
            let len = ROUNDED_TOGETHER.min(range.end - first);
            // SAFETY: the ranges are disjoint.
            let (weight, [m, v]) = unsafe { (weight.part(first, len), [m, v].map(|s| s.part(first, len))) };
            let master = match master {
                // SAFETY: as above.
                Some(master) => unsafe { master.part(first, len) },
                None => {
                    wide.iter_mut().zip(&*weight).for_each(|(wide, w)| *wide = w.to_f32());
                    &mut wide[..len]
                }
            };
            update(u, master, m, v, &grad[first..first + len]);
            round(master, weight);
        }
    });
}

/// Number of elements whose squares are summed together by [`block_squares`].
pub const SQUARES_BLOCK: usize = 4096;

/// Returns the sum of squares in `f64`. Blocks of fixed length are summed separately and added in order.
#[must_use]
pub fn sum_of_squares(x: &[f32]) -> f64 {
    block_squares(x).iter().sum()
}

/// Returns the sum of squares of each [`SQUARES_BLOCK`] elements in `f64`.
#[must_use]
pub fn block_squares(x: &[f32]) -> Vec<f64> {
    let _span = span(Op::Optimizer, || (2 * x.len(), 4 * x.len()));
    let sums = |part: &[f32]| part.chunks(SQUARES_BLOCK).map(block_sum).collect::<Vec<f64>>();
    map(x.chunks(16 * SQUARES_BLOCK), x.len(), sums).concat()
}
