//! CPU kernels over plain slices: the arithmetic of every op, without tensors, tapes or files.
//!
//! Kernels read row-major `f32` and accumulate in `f32`; weights may also be stored as `bf16` or quantised ([`Weight`]).
//!
//! # How kernels are called
//!
//! * **A matrix is a [`Mat`]**, a borrowed `[rows, cols]` whose rows may be parts of longer ones; a vector, or what is taken
//!   element by element, is a slice. Sizes come from the operands; an argument says only what they cannot.
//! * **Arguments** are the inputs, in backward passes the incoming gradient first; then what describes the operation (a
//!   layout, heads, epsilon); then what is written.
//! * **Results are returned**, statistics for the backward pass beside them, in memory that is written once. An argument is
//!   written only where memory exists that the result joins, and it stands last, a [`MatMut`] or a `&mut` slice: gradients of
//!   weights and inputs that are **added** to what is there, a buffer that is **replaced** by its gradient, and outputs that
//!   are a part of a larger matrix (functions that end in `_into`).
//! * **Work space is no argument.** A thread keeps what kernels need from one call to the next, all of it in the module
//!   `workspace`.
//! * **Scalars that go together** are one structure ([`attention::Shape`], [`optim::AdamW`], [`logprob::Targets`]). No
//!   function has more than seven arguments.
//! * **Operands that do not fit together** are a bug of the caller, and end the call at its start. The crate above checks
//!   shapes and reports errors.
//!
//! [`twin`] holds every op once more in plain `f64` loops, called in the same way; the tests compare the two.
//!
//! Two promises hold for all kernels:
//!
//! * **Threads do not change bits.** Work is split over outputs, or over parts of a sum that sizes alone determine and that
//!   are added in order, so the number of threads of the rayon pool has no influence on a result.
//! * **One body for all vector lengths.** The best of AVX-512, AVX2 and portable code is chosen at run time. Matrix
//!   products and attention have a second body, for CPUs with matrix tiles. Results may differ between them in the last bits
//!   (with bf16 weights by what tiles round, see [`linear`]),
//!   so exact repeatability is per CPU model.

#[macro_use]
mod simd;
mod gemm;
mod mat;
mod microkernel;
mod team;
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
mod tiles;
mod workspace;

pub mod activation;
pub mod attention;
pub mod buffer;
pub mod conv;
pub mod dropout;
pub mod embedding;
pub mod experts;
pub mod linear;
pub mod logprob;
pub mod norm;
pub mod optim;
pub mod parallel;
pub mod paths;
pub mod probe;
pub mod profile;
pub mod quant;
pub mod rope;
pub mod sample;
pub mod scale;
pub mod twin;

use std::ops::Range;

use half::bf16;

pub use mat::{Mat, MatMut};
pub use simd::{Instructions, limit_instructions};
pub use tiles::rounds_bf16;

/// The elements of a weight, row by row, in their storage dtype.
#[derive(Clone, Copy, Debug)]
pub enum Stored<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// bfloat16; sums are `f32`. See [`linear`] for what is rounded.
    Bf16(&'a [bf16]),
    /// 8 or 4 bits a weight, widened tile by tile.
    Quantised(quant::QuantRows<'a>),
}

impl<'a> Stored<'a> {
    fn len(self) -> usize {
        match self {
            Self::F32(w) => w.len(),
            Self::Bf16(w) => w.len(),
            Self::Quantised(w) => w.len(),
        }
    }

    /// Everything from element `start` on; not for quantised weights, whose elements have no place of their own.
    fn from(self, start: usize) -> Self {
        match self {
            Self::F32(w) => Self::F32(&w[start..]),
            Self::Bf16(w) => Self::Bf16(&w[start..]),
            Self::Quantised(w) => Self::Quantised(w),
        }
    }
}

/// A weight matrix `[n, k]`.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    stored: Stored<'a>,
    n: usize,
    k: usize,
}

impl<'a> Weight<'a> {
    /// `n` rows of `k` elements.
    ///
    /// # Panics
    /// Another number of elements.
    #[must_use]
    #[track_caller]
    pub fn new(stored: Stored<'a>, n: usize, k: usize) -> Self {
        assert!(stored.len() == n * k, "{} elements for a weight of {n}×{k}", stored.len());
        Self { stored, n, k }
    }

    /// 32-bit floats; see [`Self::new`].
    #[must_use]
    #[track_caller]
    pub fn f32(w: &'a [f32], n: usize, k: usize) -> Self {
        Self::new(Stored::F32(w), n, k)
    }

    /// bfloat16; see [`Self::new`].
    #[must_use]
    #[track_caller]
    pub fn bf16(w: &'a [bf16], n: usize, k: usize) -> Self {
        Self::new(Stored::Bf16(w), n, k)
    }

    /// Returns the elements.
    #[must_use]
    pub fn stored(self) -> Stored<'a> {
        self.stored
    }

    /// Rows and columns.
    #[must_use]
    pub fn dims(self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// Whether it is stored as bfloat16.
    #[must_use]
    pub fn is_bf16(self) -> bool {
        matches!(self.stored, Stored::Bf16(_))
    }

    /// Some of its rows.
    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        let elements = rows.start * self.k..rows.end * self.k;
        let stored = match self.stored {
            Stored::F32(w) => Stored::F32(&w[elements]),
            Stored::Bf16(w) => Stored::Bf16(&w[elements]),
            Stored::Quantised(w) => Stored::Quantised(w.rows(rows.start, rows.end)),
        };
        Self { stored, n: rows.len(), k: self.k }
    }
}

impl<'a> From<quant::QuantRows<'a>> for Weight<'a> {
    fn from(w: quant::QuantRows<'a>) -> Self {
        let (n, k) = w.dims();
        Self { stored: Stored::Quantised(w), n, k }
    }
}
