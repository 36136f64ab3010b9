//! A sum over the bytes of a tensor that finds every difference of two neighbouring words, computed in the pass that searches for numbers that
//! are not finite.
//!
//! The pass over mapped weights waits for memory, so what it also computes must need no second pass and few instructions. The sum is a
//! multilinear one, as in NH (Black et al., *UMAC*, 1999) and XXH3: a word of 64 bits is mixed with a key that depends on its place, and
//! the product of its halves is added to one of 16 lanes. Adding the word itself makes a change of one half certain to show: if
//! `v = hi · 2^32 + lo` becomes another word with the same `lo` or the same `hi`, then `lo · hi + v` becomes another number modulo 2^64.
//! Two random contents have equal sums with a chance of about 2^-64. The sum does not resist an attacker who chooses the contents.

use half::bf16;

/// Number of lanes, two registers of eight words.
const LANES: usize = 16;

/// Bytes of one step: a word for each lane.
const STEP: usize = 8 * LANES;

/// Step between the keys of neighbouring places, an odd number without a pattern (2^64 divided by the golden ratio).
const STRIDE: u64 = 0x9E37_79B9_7F4A_7C15;

/// Bits of the exponents in a word of four bf16 numbers, and the number that carries out of them where all of them are set.
const BF16: [u64; 2] = [0x7f80_7f80_7f80_7f80, 0x0080_0080_0080_0080];

/// Both words for two f32 numbers.
const F32: [u64; 2] = [0x7f80_0000_7f80_0000, 0x0080_0000_0080_0000];

/// Numbers whose file and memory have the same bytes.
pub trait Floats: Sized {
    /// Returns the sum of the bytes, and whether all numbers are finite.
    fn checksum(numbers: &[Self]) -> (u64, bool);
}

impl Floats for bf16 {
    fn checksum(numbers: &[Self]) -> (u64, bool) {
        sum(bytemuck::cast_slice(numbers), BF16)
    }
}

impl Floats for f32 {
    fn checksum(numbers: &[Self]) -> (u64, bool) {
        sum(bytemuck::cast_slice(numbers), F32)
    }
}

/// Returns the sum of bytes.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    sum(bytes, BF16).0
}

simd_fn! {
    fn sum<'a>(simd: S, bytes: &'a [u8], exponents: [u64; 2]) -> (u64, bool) {
        let _ = simd;
        sum_of(bytes, exponents)
    }
}

/// Returns the sum of bytes, and whether no number in them has an exponent of ones.
#[inline(always)]
fn sum_of(bytes: &[u8], [mask, carry]: [u64; 2]) -> (u64, bool) {
    let mut keys = [0; LANES];
    for (key, i) in keys.iter_mut().zip(1..) {
        *key = mixed(i);
    }
    let (mut sums, mut carries) = ([0u64; LANES], [0u64; LANES]);
    let (steps, rest) = bytes.as_chunks::<STEP>();
    let mut last = [0; STEP];
    for (to, from) in last.iter_mut().zip(rest) {
        *to = *from;
    }
    for step in steps.iter().chain((!rest.is_empty()).then_some(&last)) {
        let words = step.as_chunks::<8>().0;
        for i in 0..LANES {
            let word = u64::from_le_bytes(words[i]);
            carries[i] |= (word & mask) + carry;
            let v = word ^ keys[i];
            sums[i] = sums[i].wrapping_add((v & 0xffff_ffff) * (v >> 32)).wrapping_add(v);
            keys[i] = keys[i].wrapping_add(STRIDE);
        }
    }
    let (mut all, mut carried) = (mixed(bytes.len() as u64), 0);
    for i in 0..LANES {
        all = mixed(all ^ sums[i]);
        carried |= carries[i];
    }
    (all, carried & !mask & (mask << 1) == 0)
}

/// Mixes the bits of a word. Different words stay different (the last step of SplitMix64).
#[inline(always)]
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(STRIDE);
    let word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes around a step and a word.
    const SIZES: [usize; 9] = [0, 1, 7, 8, STEP - 1, STEP, STEP + 1, 3 * STEP + 5, 5000];

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u64).map(|i| mixed(i) as u8).collect()
    }

    #[test]
    fn every_changed_byte_and_every_other_length_changes_the_sum() {
        for len in SIZES {
            let mut content = bytes(len);
            let before = checksum(&content);
            for at in 0..len {
                for bit in 0..8 {
                    content[at] ^= 1 << bit;
                    assert_ne!(checksum(&content), before, "byte {at} of {len}, bit {bit}");
                    content[at] ^= 1 << bit;
                }
            }
            content.push(0);
            assert_ne!(checksum(&content), before, "a zero after {len} bytes");
        }
    }

    #[test]
    fn exchanged_words_and_steps_change_the_sum() {
        let content = bytes(8 * STEP);
        for size in [2, 4, 8, STEP] {
            for to in (size..content.len()).step_by(size) {
                let mut changed = content.clone();
                let (first, rest) = changed.split_at_mut(to);
                first[..size].swap_with_slice(&mut rest[..size]);
                assert!(
                    changed == content || checksum(&changed) != checksum(&content),
                    "{size} bytes at {to}"
                );
            }
        }
    }

    #[test]
    fn all_instructions_give_one_sum() {
        for len in SIZES {
            let content = bytes(len);
            for exponents in [BF16, F32] {
                assert_eq!(sum(&content, exponents), sum_of(&content, exponents), "{len} bytes");
            }
        }
    }

    #[test]
    fn a_number_that_is_not_finite_is_found_at_every_place() {
        fn check<T: Floats + Copy + Default>(bad: [T; 3], good: [T; 4]) {
            for len in [1, 3, 64, 67, 500] {
                let mut numbers = vec![T::default(); len];
                for at in 0..len {
                    for good in good {
                        numbers[at] = good;
                        assert!(T::checksum(&numbers).1);
                    }
                    for bad in bad {
                        numbers[at] = bad;
                        assert!(!T::checksum(&numbers).1, "{at} of {len}");
                    }
                    numbers[at] = T::default();
                }
            }
        }
        let (bad, good) = ([f32::NAN, f32::INFINITY, f32::NEG_INFINITY], [f32::MAX, f32::MIN, -0.0, 1e-40]);
        check(bad, good);
        check(bad.map(bf16::from_f32), [bf16::MAX, bf16::MIN, bf16::NEG_ZERO, bf16::from_bits(1)]);
    }
}
