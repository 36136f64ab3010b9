//! The rate of reading memory, with which the kernels of decoding are compared.

use crate::parallel;
use crate::simd::{load_ptr, prefetch, store_ptr};

/// Bytes that no CPU keeps in its caches. A shared machine may have hundreds of megabytes of them.
pub const BEYOND_CACHES: usize = 1 << 30;

/// Elements that a thread reads before it takes the next part.
const PART: usize = 1 << 18;
/// Distance of a prefetch in bytes. It exceeds a page: at the start of a page, the CPU's own prefetching begins anew.
const AHEAD: usize = 8 << 10;
/// Vectors that are added side by side.
const LANES: usize = 8;

/// Reads all numbers once on all threads and returns their sum, in an order that depends on the CPU. It is only good for being timed.
#[must_use]
pub fn read(data: &[f32]) -> f32 {
    parallel::map(data.chunks(PART), data.len(), sum).iter().sum()
}

simd_fn! {
    fn sum<'a>(simd: S, data: &'a [f32]) -> f32 {
        let lanes = S::F32_LANES;
        let mut sums = [simd.splat_f32s(0.0); LANES];
        let mut blocks = data.chunks_exact(LANES * lanes);
        for block in &mut blocks {
            let from = block.as_ptr();
            for (at, sum) in sums.iter_mut().enumerate() {
                let from = from.wrapping_add(at * lanes);
                prefetch(from.cast::<u8>().wrapping_add(AHEAD));
                // SAFETY: a block has this many whole vectors.
                *sum = simd.add_f32s(*sum, unsafe { load_ptr(simd, from, lanes) });
            }
        }
        let mut total: f32 = blocks.remainder().iter().sum();
        for sum in sums {
            let mut values = [0.0; 64];
            // SAFETY: no CPU has vectors of more than 64 numbers.
            unsafe { store_ptr(simd, values.as_mut_ptr(), lanes, sum) };
            total += values.iter().sum::<f32>();
        }
        total
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_number_is_read_once() {
        for len in [0, 1, 127, 1000, super::PART + 77] {
            let data: Vec<f32> = (0..len).map(|at| (at % 8) as f32).collect();
            assert_eq!(super::read(&data), data.iter().sum::<f32>());
        }
    }
}
