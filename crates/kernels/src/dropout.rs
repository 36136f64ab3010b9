//! Dropout whose mask depends only on three keys: call, row and column.
//!
//! Two columns share one 64-bit number: a counter to which the finaliser of SplitMix64 is applied (Steele, Lea, Flood, 2014,
//! "Fast splittable pseudorandom number generators"). The finaliser is a bijection whose outputs pass tests of randomness.

use std::sync::Arc;

use crate::buffer;
use crate::mat::{Mat, check};
use crate::profile::{Op, span};

/// The keys and the rate that decide which elements of an array a call drops.
#[derive(Clone, Debug)]
pub struct Mask {
    /// Key of the call.
    pub key: u64,
    /// Keys of the rows; `None` means that each row's index is its key.
    pub rows: Option<Arc<[u64]>>,
    /// Fraction of the elements to drop, in `0..1`.
    pub rate: f32,
}

impl Mask {
    /// Returns `1 / (1 − rate)`, the factor of the elements that are kept.
    #[must_use]
    pub fn keep(&self) -> f32 {
        1.0 / (1.0 - self.rate)
    }

    /// Returns the threshold for the 32-bit random numbers: an element is dropped if its number is below the threshold.
    #[must_use]
    pub fn threshold(&self) -> u32 {
        // The product is below 2³² because the rate is below 1.
        (f64::from(self.rate) * 2f64.powi(32)) as u32
    }

    fn row(&self, row: usize) -> Row {
        let key = mix(self.key ^ self.rows.as_ref().map_or(row as u64, |rows| rows[row]));
        Row { key, threshold: self.threshold(), keep: self.keep() }
    }

    /// Returns the number of rows that have a key of their own.
    fn keys(&self) -> Option<usize> {
        self.rows.as_ref().map(|keys| keys.len())
    }

    fn fits(&self, rows: usize) -> bool {
        self.keys().is_none_or(|keys| keys == rows)
    }

    /// Returns the factor of each element of a `[rows, cols]` array: 0 or `1 / (1 − rate)`.
    #[must_use]
    pub fn factors(&self, rows: usize, cols: usize) -> Vec<f32> {
        check!("dropout", self.fits(rows), rows, self.keys());
        let ones = vec![1.0; cols];
        buffer::of_rows(rows, cols, rows * cols, |row, y| drop_row(y, &ones, self.row(row)))
    }
}

/// Multiplies each element of `x [rows, cols]` by its factor. A dropped element becomes 0 even if it was not finite.
#[must_use]
pub fn forward(x: Mat, mask: &Mask) -> Vec<f32> {
    let (rows, cols) = x.dims();
    check!("dropout", mask.fits(rows), rows, mask.keys());
    let _span = span(Op::Activation, || (2 * rows * cols, 8 * rows * cols));
    buffer::of_rows(rows, cols, rows * cols, |row, y| drop_row(y, x.row(row), mask.row(row)))
}

#[derive(Clone, Copy)]
struct Row {
    key: u64,
    threshold: u32,
    keep: f32,
}

/// Number of columns in a block.
const BLOCK: usize = 16;

simd_fn! {
    fn drop_row<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], row: Row) -> () {
        let _ = simd;
        let (blocks, rest) = y.as_chunks_mut::<BLOCK>();
        let (x_blocks, x_rest) = x.as_chunks::<BLOCK>();
        for (at, (y, x)) in blocks.iter_mut().zip(x_blocks).enumerate() {
            drop_block(y, x, at, row);
        }
        if !rest.is_empty() {
            let (mut x, mut y) = ([0.0; BLOCK], [0.0; BLOCK]);
            x[..rest.len()].copy_from_slice(x_rest);
            drop_block(&mut y, &x, x_blocks.len(), row);
            rest.copy_from_slice(&y[..rest.len()]);
        }
    }
}

#[inline(always)]
fn drop_block(y: &mut [f32; BLOCK], x: &[f32; BLOCK], at: usize, row: Row) {
    let mut random = [0u32; BLOCK];
    for (pair, random) in random.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let counter = (at * BLOCK / 2 + pair) as u64;
        let both = mix(row.key.wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        *random = [both as u32, (both >> 32) as u32];
    }
    for ((y, x), random) in y.iter_mut().zip(x).zip(random) {
        *y = if random < row.threshold { 0.0 } else { x * row.keep };
    }
}

/// Applies the finaliser of SplitMix64 to a number.
#[inline(always)]
#[must_use]
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns a number that follows from a name, the same in every run.
#[must_use]
pub fn key_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |key, byte| mix(key ^ u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_drops_its_share_and_keeps_the_mean() {
        let mask = Mask { key: 7, rows: None, rate: 0.3 };
        let (rows, k) = (200, 101);
        let x = mask.factors(rows, k);
        let dropped = x.iter().filter(|x| **x == 0.0).count() as f64 / x.len() as f64;
        // The tolerance is four standard deviations of the dropped fraction in 20,200 draws.
        assert!((dropped - 0.3).abs() < 4.0 * (0.3f64 * 0.7 / 20_200.0).sqrt(), "{dropped}");
        assert!(x.iter().all(|&x| x == 0.0 || x == 1.0 / 0.7));
        // No row and no column repeats another.
        assert!(x.chunks_exact(k).skip(1).all(|row| row != &x[..k]));
        let columns = |j: usize| (0..rows).map(|i| x[i * k + j]).collect::<Vec<_>>();
        assert!((1..k).all(|j| columns(j) != columns(0)));
        // Compare with the definition, element by element.
        for (at, &x) in x.iter().enumerate() {
            let (i, j) = ((at / k) as u64, (at % k) as u64);
            let both = mix(mix(7 ^ i).wrapping_add((j / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            let random = if j % 2 == 0 { both & 0xffff_ffff } else { both >> 32 };
            assert_eq!(x == 0.0, random < u64::from(mask.threshold()), "{i}, {j}");
        }
        let y = forward(Mat::new(&vec![f32::INFINITY; rows * k], rows, k), &mask);
        assert!(y.iter().zip(&x).all(|(y, x)| (*y == 0.0) == (*x == 0.0)));
    }

    #[test]
    fn the_mask_of_a_row_does_not_depend_on_its_position() {
        let of = |keys: &[u64]| Mask { key: 3, rows: Some(keys.into()), rate: 0.5 }.factors(keys.len(), 64);
        let (all, some) = (of(&[5, 9, 11]), of(&[11, 5]));
        assert_eq!((&some[..64], &some[64..]), (&all[128..], &all[..64]));
        assert_ne!(all[..64], all[64..128]);
    }
}
