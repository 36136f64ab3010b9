//! AdamW.

use crate::device::{Arg, Array, Dtype, Gpu};

/// What one step needs besides the arrays (`torch.optim.AdamW`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Learning rate.
    pub lr: f32,
    /// Decay of both moments.
    pub betas: [f32; 2],
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled decay.
    pub weight_decay: f32,
    /// Factor of the gradient: clipping.
    pub grad_scale: f32,
    /// Which step of this weight it is, from 1.
    pub count: u64,
}

impl Gpu {
    /// One step in place. A bf16 weight with `rest` is updated as the f32 number of which it is the rounded upper half and `rest`
    /// (16 bits an element) the lower half; without, it is rounded after each step.
    pub fn adamw(
        &self,
        weight: &mut Array,
        rest: Option<&mut Array>,
        [m, v]: [&mut Array; 2],
        grad: &Array,
        step: &Step,
    ) {
        // Corrections in f64, as powers of numbers near 1 lose digits.
        let correction = |beta: f32| (1.0 / (1.0 - f64::from(beta).powf(step.count as f64))) as f32;
        let Step { lr, betas: [beta1, beta2], eps, weight_decay, grad_scale, .. } = *step;
        let constants =
            [lr, beta1, beta2, eps, weight_decay, correction(beta1), correction(beta2), grad_scale];
        let args = [
            weight.arg(),
            rest.map_or(Arg::NULL, |rest| rest.pointer()),
            m.pointer(),
            v.pointer(),
            grad.pointer(),
            Arg::Long(weight.len() as i64),
            Arg::fields(&constants.map(f32::to_bits)),
        ];
        self.each("elementwise/adamw", weight.len(), &args);
    }

    /// The lower halves for which [`Self::adamw`] sees f32 numbers in bf16 weights: `(weight, rest)`.
    #[must_use]
    pub fn split_master(&self, master: &[f32]) -> (Array, Array) {
        let whole = |x: &f32| x.to_bits().wrapping_add(0x8000);
        let half = |bits: u32| half::bf16::from_bits(bits as u16);
        let upper: Vec<_> = master.iter().map(|x| half(whole(x) >> 16)).collect();
        let lower: Vec<_> = master.iter().map(|x| half(whole(x) & 0xffff)).collect();
        (self.upload_bf16(&upper), self.upload_bf16(&lower))
    }

    /// The f32 numbers that [`Self::adamw`] sees in a bf16 weight and its lower half.
    #[must_use]
    pub fn join_master(&self, weight: &Array, rest: &Array) -> Vec<f32> {
        debug_assert_eq!(weight.dtype(), Dtype::Bf16);
        let (upper, lower): (Vec<u16>, Vec<u16>) = (weight.words(), rest.words());
        let join = |(upper, lower): (u16, u16)| {
            f32::from_bits((u32::from(upper) << 16).wrapping_add(u32::from(lower)).wrapping_sub(0x8000))
        };
        upper.into_iter().zip(lower).map(join).collect()
    }
}
