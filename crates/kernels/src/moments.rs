//! Moments of the optimizer in 8 bits.
//!
//! A block of [`BLOCK`] values has a scale, the largest of their absolute values, and a code for each value divided by the scale.
//! Codes are dense near 1 and reach down to 10⁻⁶ (first moment, with a sign) or 10⁻⁷ (second moment): the interval from `10^(b−n−1)` to
//! `10^(b−n)` has `2^b` codes, for `b` from 1 to `n`, at the centres of equal parts. `n` is 6 with a sign and 7 without. Two more codes
//! are 0 and 1. This is the dynamic map of arXiv 2110.02861, except that a negative value can have the code of 1, and that a second
//! moment below all intervals has the first code: with 0, the weight would move by its first moment divided by ε. A block whose values are
//! below 10⁻³⁰ is 0.
//!
//! A value of a code that is encoded again has the same code, so a state that was saved in f32 is restored to the bit.

use std::sync::LazyLock;

use crate::buffer;
use crate::mat::check;

/// Number of values that share a scale.
pub const BLOCK: usize = 256;
/// Scales below this are 0, so that no product with one loses digits.
const LEAST_SCALE: f32 = 1e-30;

/// A moment in 8 bits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Codes {
    /// Code of each value. With a sign, the highest bit is set for a negative value.
    pub codes: Vec<u8>,
    /// Scale of each block; the last block may be shorter.
    pub scales: Vec<f32>,
}

/// A [`Codes`] to change.
#[derive(Debug)]
pub struct CodesMut<'a> {
    /// Codes.
    pub codes: &'a mut [u8],
    /// Scales of their blocks.
    pub scales: &'a mut [f32],
}

/// The form of a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The first moment.
    Signed,
    /// The second moment.
    Unsigned,
}

impl Codes {
    /// Creates the codes of zeros.
    #[must_use]
    pub fn zeros(len: usize) -> Self {
        Self { codes: buffer::zero_bytes(len), scales: buffer::zeros(len.div_ceil(BLOCK)) }
    }

    /// Encodes values.
    #[must_use]
    pub fn encode(x: &[f32], form: Form) -> Self {
        let mut out = Self::zeros(x.len());
        encode(x, out.get_mut(0..x.len()), form);
        out
    }

    /// Returns the values.
    #[must_use]
    pub fn decode(&self, form: Form) -> Vec<f32> {
        let mut out = vec![0.0; self.codes.len()];
        decode(&self.codes, &self.scales, &mut out, form);
        out
    }

    /// Returns the bytes in memory.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.codes.len() + 4 * self.scales.len()
    }

    /// Returns a range of the values, which begins with a block.
    ///
    /// # Panics
    /// Panics if the range is out of bounds or begins inside a block.
    pub fn get_mut(&mut self, range: std::ops::Range<usize>) -> CodesMut<'_> {
        assert!(range.start.is_multiple_of(BLOCK), "{range:?} begins inside a block of {BLOCK} values");
        let scales = range.start / BLOCK..range.end.div_ceil(BLOCK);
        CodesMut { codes: &mut self.codes[range], scales: &mut self.scales[scales] }
    }
}

/// Returns the value of a code without its sign, for `N` intervals.
fn value<const N: u32>(code: u32) -> f32 {
    // Exact: the number has at most 8 bits.
    let number = (code + 1) as f32;
    let b = (number.to_bits() >> 23) - 127;
    if b == 0 || b > N {
        return if b == 0 { 0.0 } else { 1.0 };
    }
    let count = (1 << b) as f32;
    let centre = (number / count - 1.0) + 0.5 / count;
    const TENS: [f32; 7] = [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6];
    (0.1 + 0.9 * centre) * TENS[(N - b) as usize]
}

/// Returns the code of a value of at least 0 and about 1 at most, for `N` intervals. NaN has the code of 0.
#[inline(always)]
fn code<const N: u32>(x: f32) -> u32 {
    const LIMITS: [f32; 6] = [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6];
    const TENS: [f32; 6] = [1e1, 1e2, 1e3, 1e4, 1e5, 1e6];
    let (mut up, mut count) = (1.0, (1 << N) as f32);
    for j in 0..N as usize - 1 {
        let below = x < LIMITS[j];
        up = if below { TENS[j] } else { up };
        count = if below { (1 << (N - 1) >> j) as f32 } else { count };
    }
    let part = (x * up - 0.1) * (1.0 / 0.9) * count;
    let part = if part > 0.0 { part } else { 0.0 };
    let part = if part > count - 1.0 { count - 1.0 } else { part };
    // SAFETY: both numbers are at least 0 and at most 256. The comparisons have removed NaN.
    let (part, first) = unsafe { (part.to_int_unchecked::<i32>(), count.to_int_unchecked::<i32>() - 1) };
    let code = if x >= 1.0 { (2 << N) - 1 } else { part + first };
    let least = if N == 6 { 1e-6 } else { f32::MIN_POSITIVE };
    (if x >= least { code } else { 0 }) as u32
}

/// Values of all codes: with a sign, and without.
static VALUES: LazyLock<[[f32; 256]; 2]> = LazyLock::new(|| {
    let signed = |code: usize| {
        let value = value::<6>(code as u32 & 0x7f);
        if code < 128 { value } else { -value }
    };
    [std::array::from_fn(signed), std::array::from_fn(|code| value::<7>(code as u32))]
});

/// Writes the values of codes.
///
/// # Panics
/// Panics if the lengths do not fit together.
pub fn decode(codes: &[u8], scales: &[f32], to: &mut [f32], form: Form) {
    let n = codes.len();
    check!("moments, decode", to.len() == n && scales.len() == n.div_ceil(BLOCK), n, to.len(), scales.len());
    let values = &VALUES[form as usize];
    for ((to, codes), scale) in to.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(scales) {
        for (to, &code) in to.iter_mut().zip(codes) {
            *to = values[usize::from(code)] * scale;
        }
    }
}

/// Encodes values.
///
/// # Panics
/// Panics if the lengths do not fit together.
pub fn encode(x: &[f32], to: CodesMut, form: Form) {
    let (n, CodesMut { codes, scales }) = (x.len(), to);
    check!(
        "moments, encode",
        codes.len() == n && scales.len() == n.div_ceil(BLOCK),
        n,
        codes.len(),
        scales.len()
    );
    for ((x, codes), scale) in x.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales) {
        *scale = match form {
            Form::Signed => encode_signed(x, codes),
            Form::Unsigned => encode_unsigned(x, codes),
        };
    }
}

/// Returns the largest absolute value that is a number, with at most the largest finite one, or 0 if it is too small for a scale.
#[inline(always)]
fn scale_of(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut most = [0.0f32; 16];
    let (blocks, rest) = x.as_chunks::<16>();
    for block in blocks {
        for i in 0..16 {
            most[i] = larger(block[i].abs(), most[i]);
        }
    }
    let most =
        rest.iter().fold(0.0, |most, x| larger(x.abs(), most)).max(most.into_iter().fold(0.0, f32::max));
    if most < LEAST_SCALE { 0.0 } else { most.min(f32::MAX) }
}

simd_fn! {
    // The body is plain arithmetic, which the compiler vectorises for the chosen instruction set.
    fn encode_signed<'a>(_simd: S, x: &'a [f32], codes: &'a mut [u8]) -> f32 {
        let scale = scale_of(x);
        let by = if scale > 0.0 { scale } else { f32::INFINITY };
        let codes = &mut codes[..x.len()];
        for i in 0..x.len() {
            let magnitude = code::<6>(x[i].abs() / by);
            let sign = if x[i] < 0.0 && magnitude > 0 { 128 } else { 0 };
            codes[i] = (magnitude | sign) as u8;
        }
        scale
    }
}

simd_fn! {
    fn encode_unsigned<'a>(_simd: S, x: &'a [f32], codes: &'a mut [u8]) -> f32 {
        let scale = scale_of(x);
        let by = if scale > 0.0 { scale } else { f32::INFINITY };
        let codes = &mut codes[..x.len()];
        for i in 0..x.len() {
            codes[i] = code::<7>(x[i] / by) as u8;
        }
        scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes rise with their values, and each value has its own code again.
    #[test]
    fn every_code_has_a_value_with_that_code() {
        for form in [Form::Signed, Form::Unsigned] {
            let count = if form == Form::Signed { 128 } else { 256 };
            let values: Vec<f32> = VALUES[form as usize][..count].to_vec();
            assert!(values.windows(2).all(|pair| pair[0] < pair[1]), "{values:?}");
            assert_eq!((values[0], values[count - 1]), (0.0, 1.0));
            for scale in [LEAST_SCALE, 1.2e-7, 0.37, 1.0, 3.3e7, f32::MAX] {
                for sign in [1.0, -1.0] {
                    if sign < 0.0 && form == Form::Unsigned {
                        continue;
                    }
                    for chunk in values.chunks(BLOCK - 1) {
                        // The largest value of the block is the scale.
                        let x: Vec<f32> = chunk.iter().chain([&1.0]).map(|x| sign * x * scale).collect();
                        let codes = Codes::encode(&x, form);
                        assert_eq!(codes.decode(form), x, "{form:?} {scale} {sign}");
                    }
                }
            }
        }
    }

    /// Encoding moves a value by at most half of an interval's part, and what was encoded is encoded as before.
    #[test]
    fn values_are_near_their_codes_and_stay_there() {
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        for len in [1, 255, 256, 257, 4_000] {
            let signed: Vec<f32> = (0..len).map(|_| (random() - 0.5) * 10f32.powf(-8.0 * random())).collect();
            let squares: Vec<f32> = signed.iter().map(|x| x * x).collect();
            for (form, x) in [(Form::Signed, signed), (Form::Unsigned, squares)] {
                let codes = Codes::encode(&x, form);
                let got = codes.decode(form);
                assert_eq!(Codes::encode(&got, form), codes);
                for (x, (got, scale)) in
                    x.iter().zip(got.iter().zip(codes.scales.iter().flat_map(|s| [s; BLOCK])))
                {
                    // The interval of ratio r from 10^-k to 10^(1-k) has 2^(n+1-k) parts. Below all intervals, a first moment is 0,
                    // and a second one has the first code.
                    let (ratio, [n, below]) = (x.abs() / scale, [[6.0, 1e-6], [7.0, 3.26e-7]][form as usize]);
                    let k = (-ratio.log10()).ceil().max(1.0);
                    let part = 0.9 * 10f32.powf(1.0 - k) / 2f32.powf(n + 1.0 - k);
                    let most = if ratio < 10f32.powf(-n) { below } else { 0.501 * part };
                    assert!((x - got).abs() <= most * scale, "{x} became {got}, scale {scale}");
                    assert!(form == Form::Signed || (*x > 0.0) == (*got > 0.0));
                }
            }
        }
    }

    #[test]
    fn numbers_that_are_none_leave_the_others() {
        let codes = Codes::encode(&[f32::NAN, 1.0, f32::INFINITY, -2.0, 0.0], Form::Signed);
        assert_eq!(codes.decode(Form::Signed)[2], f32::MAX);
        assert_eq!(Codes::encode(&[0.0; 300], Form::Signed), Codes::zeros(300));
        // A block of tiny numbers is 0.
        assert_eq!(Codes::encode(&[1e-31; 300], Form::Unsigned), Codes::zeros(300));
        assert!(
            Codes::encode(&[f32::NAN; 3], Form::Unsigned)
                .decode(Form::Unsigned)
                .iter()
                .all(|x| x.is_finite())
        );
    }
}
