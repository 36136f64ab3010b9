//! The elementwise update of the optimizer, and the sum of squares for the gradient norm.

use half::bf16;

use crate::dropout::{key_of, mix};
use crate::mat::check;
use crate::moments::{BLOCK, CodesMut, Form, decode, encode};
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
    // Adds a random number below the last bit that is kept, and cuts. NaN stays NaN. The hash is `lowbias32` of C. Wellons. Of a
    // weight with more than 2³² elements, elements share numbers.
    fn round_randomly<'a>(_simd: S, from: &'a [f32], to: &'a mut [bf16], key: u32, first: usize) -> () {
        let mut at = (first as u32).wrapping_mul(0x9e37_79b9);
        for (&x, y) in from.iter().zip(to) {
            let mut hash = at ^ key;
            at = at.wrapping_add(0x9e37_79b9);
            hash = (hash ^ hash >> 16).wrapping_mul(0x7feb_352d);
            hash = (hash ^ hash >> 15).wrapping_mul(0x846c_a68b);
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(hash >> 16) >> 16;
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

/// A weight to update.
#[derive(Debug)]
pub enum Updated<'a> {
    /// An f32 weight.
    F32(&'a mut [f32]),
    /// A bf16 weight with an f32 master, which is updated. The weight receives it, rounded to nearest even.
    Master(&'a mut [bf16], &'a mut [f32]),
    /// A bf16 weight that is updated in f32 and rounded.
    Bf16(&'a mut [bf16], Rounding),
}

/// How an updated f32 value becomes bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest even.
    #[default]
    Nearest,
    /// Up or down at random, with the value as the mean. The random number of an element follows from `key` and from the number of the
    /// element, `first` for the first one.
    Random { key: u32, first: usize },
}

impl Rounding {
    /// Returns the random rounding of a weight at its update number `step`.
    #[must_use]
    pub fn random(name: &str, step: u64) -> Self {
        let mixed = mix(key_of(name) ^ mix(step));
        Self::Random { key: (mixed >> 32) as u32, first: 0 }
    }

    /// Returns the rounding of the elements from element `by` on.
    #[must_use]
    pub fn after(self, by: usize) -> Self {
        match self {
            Self::Nearest => Self::Nearest,
            Self::Random { key, first } => Self::Random { key, first: first + by },
        }
    }
}

impl<'a> From<&'a mut [f32]> for Updated<'a> {
    fn from(weight: &'a mut [f32]) -> Self {
        Self::F32(weight)
    }
}

impl<'a> From<&'a mut Vec<f32>> for Updated<'a> {
    fn from(weight: &'a mut Vec<f32>) -> Self {
        Self::F32(weight)
    }
}

impl Updated<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(weight) => weight.len(),
            Self::Master(weight, _) | Self::Bf16(weight, _) => weight.len(),
        }
    }
}

/// First and second moment of a weight.
#[derive(Debug)]
pub enum Moments<'a> {
    /// In f32.
    F32([&'a mut [f32]; 2]),
    /// In 8 bits.
    Codes([CodesMut<'a>; 2]),
}

impl<'a> From<[&'a mut [f32]; 2]> for Moments<'a> {
    fn from(moments: [&'a mut [f32]; 2]) -> Self {
        Self::F32(moments)
    }
}

impl<'a> From<[&'a mut Vec<f32>; 2]> for Moments<'a> {
    fn from(moments: [&'a mut Vec<f32>; 2]) -> Self {
        Self::F32(moments.map(|x| &mut x[..]))
    }
}

impl Moments<'_> {
    /// Returns the lengths of both moments, and whether scales fit.
    fn lens(&self) -> ([usize; 2], bool) {
        match self {
            Self::F32(each) => (each.each_ref().map(|x| x.len()), true),
            Self::Codes(each) => (
                each.each_ref().map(|x| x.codes.len()),
                each.iter().all(|x| x.scales.len() == x.codes.len().div_ceil(BLOCK)),
            ),
        }
    }
}

/// Number of values that are updated before they are rounded, so that they are still in the cache.
const TOGETHER: usize = 4 * BLOCK;

/// Applies one step in place, following `torch.optim.AdamW` (decoupled weight decay, bias-corrected moments).
///
/// Updates a weight and its moments from `grad`. All have the same length. Moments in 8 bits become f32 for the update, and are encoded
/// after it.
pub fn adamw<'a>(grad: &[f32], by: &AdamW, weight: impl Into<Updated<'a>>, moments: impl Into<Moments<'a>>) {
    let (weight, moments) = (weight.into(), moments.into());
    let n = weight.len();
    let has_master =
        if let Updated::Master(weight, master) = &weight { weight.len() == master.len() } else { true };
    let (lens, has_scales) = moments.lens();
    let moved = match &weight {
        Updated::F32(_) => 8,
        Updated::Master(..) => 10,
        Updated::Bf16(..) => 4,
    } + if matches!(moments, Moments::F32(_)) { 20 } else { 8 };
    let _span = span(Op::Optimizer, || (12 * n, moved * n));
    check!(
        "adamw",
        has_master && has_scales && lens == [n; 2] && grad.len() == n && by.step > 0,
        n,
        lens,
        grad.len(),
        by.step
    );
    let u = by.update();
    let weight = Places::of(weight);
    let moments = match moments {
        Moments::F32(each) => Err(each.map(Shared::new)),
        Moments::Codes(each) => Ok(each.map(|x| (Shared::new(x.codes), Shared::new(x.scales)))),
    };
    ranges(n, BLOCK, n * 4, |range| {
        let mut wide = [0.0; TOGETHER];
        let mut decoded = [[0.0; TOGETHER]; 2];
        for first in range.clone().step_by(TOGETHER) {
            let len = TOGETHER.min(range.end - first);
            let grad = &grad[first..first + len];
            // SAFETY: the ranges are disjoint and begin with blocks.
            let value = unsafe { weight.value(first, len, &mut wide) };
            match &moments {
                // SAFETY: as above.
                Err(each) => unsafe {
                    let [m, v] = each.map(|s| s.part(first, len));
                    update(u, value, m, v, grad);
                },
                Ok(each) => {
                    let forms = [Form::Signed, Form::Unsigned];
                    // SAFETY: as above.
                    let mut parts = each.map(|(codes, scales)| unsafe {
                        (codes.part(first, len), scales.part(first / BLOCK, len.div_ceil(BLOCK)))
                    });
                    for ((to, (codes, scales)), form) in decoded.iter_mut().zip(&parts).zip(forms) {
                        decode(codes, scales, &mut to[..len], form);
                    }
                    let [m, v] = decoded.each_mut().map(|x| &mut x[..len]);
                    update(u, value, m, v, grad);
                    for ((from, (codes, scales)), form) in decoded.iter().zip(&mut parts).zip(forms) {
                        encode(&from[..len], CodesMut { codes, scales }, form);
                    }
                }
            }
            // SAFETY: as above.
            unsafe { weight.round(first, len, &wide) };
        }
    });
}

/// The arrays of a [`Updated`], for several threads.
#[derive(Clone, Copy)]
struct Places<'a> {
    /// Updated or master in f32.
    wide: Option<Shared<'a>>,
    narrow: Option<Shared<'a, bf16>>,
    rounding: Rounding,
}

impl<'a> Places<'a> {
    fn of(weight: Updated<'a>) -> Self {
        let (wide, narrow, rounding) = match weight {
            Updated::F32(weight) => (Some(weight), None, Rounding::Nearest),
            Updated::Master(weight, master) => (Some(master), Some(weight), Rounding::Nearest),
            Updated::Bf16(weight, rounding) => (None, Some(weight), rounding),
        };
        Self { wide: wide.map(Shared::new), narrow: narrow.map(Shared::new), rounding }
    }

    /// Returns values to update: in place, or widened in `to`.
    ///
    /// # Safety
    /// No other reference to these values may be alive.
    unsafe fn value<'b>(self, first: usize, len: usize, to: &'b mut [f32]) -> &'b mut [f32]
    where
        'a: 'b,
    {
        match (self.wide, self.narrow) {
            // SAFETY: guaranteed by this function's contract.
            (Some(wide), _) => unsafe { wide.part(first, len) },
            (None, narrow) => {
                // SAFETY: as above.
                let narrow = narrow.map(|narrow| unsafe { narrow.part(first, len) }).unwrap_or_default();
                to.iter_mut().zip(narrow).for_each(|(to, w)| *to = w.to_f32());
                &mut to[..len]
            }
        }
    }

    /// Rounds the updated values, which are in place or in `wide`.
    ///
    /// # Safety
    /// No other reference to these values may be alive.
    unsafe fn round(self, first: usize, len: usize, wide: &[f32]) {
        let Some(narrow) = self.narrow else { return };
        // SAFETY: guaranteed by this function's contract.
        let (to, from) = unsafe {
            (narrow.part(first, len), self.wide.map_or(&wide[..len], |wide| &*wide.part(first, len)))
        };
        match self.rounding {
            Rounding::Nearest => round(from, to),
            Rounding::Random { key, first: start } => round_randomly(from, to, key, start + first),
        }
    }
}

/// Rounds values to nearest even.
#[must_use]
pub fn narrow(x: &[f32]) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; x.len()];
    let to = Shared::new(&mut out);
    ranges(x.len(), BLOCK, x.len(), |range| {
        // SAFETY: the ranges are disjoint.
        let to = unsafe { to.part(range.start, range.len()) };
        round(&x[range], to);
    });
    out
}

/// Returns bf16 values in f32.
#[must_use]
pub fn widen(x: &[bf16]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    let to = Shared::new(&mut out);
    ranges(x.len(), BLOCK, x.len(), |range| {
        // SAFETY: the ranges are disjoint.
        let to = unsafe { to.part(range.start, range.len()) };
        to.iter_mut().zip(&x[range]).for_each(|(to, x)| *to = x.to_f32());
    });
    out
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
