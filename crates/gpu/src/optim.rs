//! The update of weights by AdamW.

use half::bf16;

use crate::device::{Array, Dtype, Gpu};
use crate::launchers::{AdamW, elementwise};

/// Scalar parameters of one step (`torch.optim.AdamW`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Learning rate.
    pub lr: f32,
    /// Decay rates of the first and the second moment.
    pub betas: [f32; 2],
    /// Term added to the square root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Factor that multiplies the gradient, for clipping.
    pub grad_scale: f32,
    /// Number of this step of the weight, counted from 1.
    pub count: u64,
    /// Key with which a bf16 weight without `rest` is rounded at random; `None` rounds to nearest even.
    pub random: Option<u32>,
}

/// A moment in 8 bits, in the form of `omnigrpo_kernels::moments`.
#[derive(Debug)]
pub struct MomentCodes {
    /// Codes, four in a word. Those beyond the weight's end are 0.
    pub codes: Array,
    /// Scale of each 256 values.
    pub scales: Array,
}

/// First and second moment.
#[derive(Debug)]
pub enum Moments<'a> {
    /// In f32.
    F32([&'a mut Array; 2]),
    /// In 8 bits.
    Codes([&'a mut MomentCodes; 2]),
}

impl MomentCodes {
    /// Returns the codes, of which those beyond the weight's end are 0, and the scales.
    pub fn read(&self) -> (Vec<u8>, Vec<f32>) {
        (self.codes.words(), self.scales.to_vec())
    }
}

impl<'a> From<[&'a mut Array; 2]> for Moments<'a> {
    fn from(moments: [&'a mut Array; 2]) -> Self {
        Self::F32(moments)
    }
}

impl Gpu {
    /// Uploads a moment in 8 bits.
    pub fn upload_codes(&self, codes: &[u8], scales: &[f32]) -> MomentCodes {
        let mut words = codes.to_vec();
        words.resize(words.len().next_multiple_of(4), 0);
        MomentCodes { codes: self.upload_words(&words), scales: self.upload(scales) }
    }

    /// Applies one step in place.
    ///
    /// A bf16 weight with `rest` (16 bits per element) is updated as the f32 value from which it was rounded; see
    /// [`Self::split_master`]. Without `rest`, the weight is rounded after each step.
    pub fn adamw<'a>(
        &self,
        weight: &mut Array,
        rest: Option<&mut Array>,
        moments: impl Into<Moments<'a>>,
        grad: &Array,
        step: &Step,
    ) {
        // Corrections are computed in f64, in the order of `omnigrpo_kernels::optim`.
        let power = i32::try_from(step.count).unwrap_or(i32::MAX);
        let correction = |beta: f32| 1.0 - f64::from(beta).powi(power);
        let Step { lr, betas: [beta1, beta2], eps, weight_decay, grad_scale, .. } = *step;
        let decay = (1.0 - f64::from(lr) * f64::from(weight_decay)) as f32;
        let step_size = (f64::from(lr) / correction(beta1)) as f32;
        let root = correction(beta2).sqrt().recip() as f32;
        let (rest1, rest2, scale) = (1.0 - beta1, 1.0 - beta2, grad_scale);
        let constants = AdamW { step_size, rest1, beta2, rest2, eps, decay, root, scale };
        let len = weight.len();
        let random = step.random.filter(|_| weight.dtype() == Dtype::Bf16);
        let random = random.map_or(0, |key| 1 << 32 | u64::from(key));
        match moments.into() {
            Moments::F32([m, v]) => {
                let kernel = elementwise::adamw(weight, rest, m, v, grad, len, random, constants);
                self.each(kernel, len.div_ceil(4));
            }
            Moments::Codes([MomentCodes { codes: m, scales: ms }, MomentCodes { codes: v, scales: vs }]) => {
                let kernel =
                    elementwise::adamw_8bit(weight, rest, m, ms, v, vs, grad, len, random, constants);
                // A warp updates the values of a scale.
                self.each(kernel, len.div_ceil(256) * 32);
            }
        }
    }

    /// Splits f32 values into the two parts that [`Self::adamw`] stores for a bf16 weight: the weight, rounded to nearest even,
    /// and the difference of the bits. If a value is half-way between two weights and is rounded down, its lower neighbour is
    /// stored instead.
    pub fn split_master(&self, master: &[f32]) -> (Array, Array) {
        let exact = |x: &f32| x.to_bits() - u32::from(x.to_bits() & 0x1_ffff == 0x8000);
        let upper = |bits: u32| bf16::from_f32(f32::from_bits(bits));
        let rest = |bits: u32| bits.wrapping_sub(u32::from(upper(bits).to_bits()) << 16) as u16;
        let uppers: Vec<_> = master.iter().map(|x| upper(exact(x))).collect();
        let rests: Vec<_> = master.iter().map(|x| bf16::from_bits(rest(exact(x)))).collect();
        (self.upload_bf16(&uppers), self.upload_bf16(&rests))
    }

    /// Returns the f32 values that [`Self::adamw`] reconstructs from a bf16 weight and its `rest`.
    pub fn join_master(&self, weight: &Array, rest: &Array) -> Vec<f32> {
        debug_assert_eq!(weight.dtype(), Dtype::Bf16);
        let (upper, rest): (Vec<u16>, Vec<i16>) = (weight.words(), rest.words());
        let join = |(upper, rest): (u16, i16)| {
            f32::from_bits((u32::from(upper) << 16).wrapping_add_signed(i32::from(rest)))
        };
        upper.into_iter().zip(rest).map(join).collect()
    }
}
