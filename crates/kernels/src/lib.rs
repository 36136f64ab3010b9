//! CPU kernels over plain slices: the arithmetic of every op, without tensors, tapes or files.
//!
//! Every kernel works on row-major `f32` slices and accumulates in `f32`; weights may also be stored as `bf16`
//! ([`Weight`]). Sizes are arguments. A slice that is shorter than its documented length is a bug of the caller: the
//! kernels check lengths with `debug_assert!` and slice indexing, the crate above checks shapes and reports errors.
//!
//! Two promises hold for all kernels:
//!
//! * **Threads do not change bits.** Work is split over outputs, or over parts of a sum that sizes alone determine and that
//!   are added in order, so the number of threads of the rayon pool has no influence on a result.
//! * **One body for all vector lengths.** The best of AVX-512, AVX2 and portable code is chosen at run time. Matrix
//!   products and attention have a second body, for CPUs with matrix tiles. Results may differ between them in the last bits
//!   (with bf16 weights by what tiles round, see [`linear`]),
//!   so exact repeatability is per CPU model.
//!
//! [`twin`] holds every op once more in plain `f64` loops; the tests compare the two.

#[macro_use]
mod simd;
mod gemm;
mod microkernel;
mod team;
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
mod tiles;

pub mod activation;
pub mod attention;
pub mod buffer;
pub mod conv;
pub mod embedding;
pub mod linear;
pub mod logprob;
pub mod norm;
pub mod optim;
pub mod parallel;
pub mod probe;
pub mod profile;
pub mod quant;
pub mod rope;
pub mod scale;
pub mod twin;

use half::bf16;

pub use simd::{Instructions, limit_instructions};
pub use tiles::available as has_tiles;

/// A weight matrix `[n, k]`, row-major, in its storage dtype.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// bfloat16; sums are `f32`. See [`linear`] for what is rounded.
    Bf16(&'a [bf16]),
    /// 8 or 4 bits a weight, widened tile by tile.
    Quantised(quant::QuantRows<'a>),
}

impl<'a> Weight<'a> {
    /// Number of elements, `n · k`.
    #[must_use]
    pub fn len(self) -> usize {
        match self {
            Self::F32(w) => w.len(),
            Self::Bf16(w) => w.len(),
            Self::Quantised(w) => w.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether it is stored as bfloat16.
    #[must_use]
    pub fn is_bf16(self) -> bool {
        matches!(self, Self::Bf16(_))
    }

    /// Rows `start..end` of a matrix with `k` columns.
    #[must_use]
    pub fn rows(self, start: usize, end: usize, k: usize) -> Weight<'a> {
        match self {
            Self::F32(w) => Self::F32(&w[start * k..end * k]),
            Self::Bf16(w) => Self::Bf16(&w[start * k..end * k]),
            Self::Quantised(w) => Self::Quantised(w.rows(start, end)),
        }
    }

    /// Everything from element `start` on; not for quantised weights, whose elements have no place of their own.
    fn from(self, start: usize) -> Weight<'a> {
        match self {
            Self::F32(w) => Self::F32(&w[start..]),
            Self::Bf16(w) => Self::Bf16(&w[start..]),
            Self::Quantised(w) => Self::Quantised(w),
        }
    }
}
