//! CPU kernels over plain slices: the arithmetic of every op, without tensors, tapes or files.
//!
//! Kernels read row-major `f32` and accumulate in `f32`; weights may also be stored as `bf16` or quantised ([`Weight`]).
//!
//! # How kernels are called
//!
//! * **A matrix is a [`Mat`]**: a borrowed `[rows, cols]` whose rows may be slices of longer rows. A vector, or
//!   anything processed element by element, is a slice. Sizes come from the operands; an argument states a size only
//!   when no operand does.
//! * **Arguments** come in this order: inputs (in backward passes the incoming gradient first), the description of the
//!   operation (layout, heads, epsilon), outputs.
//! * **Results are returned** in memory that is written once, together with any statistics that the backward pass
//!   needs. A kernel writes to an argument only if that memory already exists: gradients of weights and inputs that it
//!   **adds to**, a buffer that it **replaces** with its gradient, and outputs that are part of a larger matrix
//!   (functions that end in `_into`). Such an argument comes last, as a [`MatMut`] or a `&mut` slice.
//! * **Scratch memory is not an argument.** Each thread reuses its own, all of it in the module `workspace`.
//! * **Related scalars** form one structure ([`attention::Shape`], [`optim::AdamW`], [`logprob::Targets`]). No function
//!   has more than seven arguments.
//! * **Mismatched operands** are a bug of the caller and panic at the start of the call. The `ops` crate checks shapes
//!   and reports errors.
//!
//! [`twin`] implements every op again as plain `f64` loops with the same interface; the tests compare the two.
//!
//! Two promises hold for all kernels:
//!
//! * **The number of threads does not change bits.** Work is split over outputs, or over parts of a sum that depend on
//!   sizes alone and are added in order.
//! * **One body serves all vector lengths.** Kernels choose AVX-512, AVX2 or portable code at run time. Matrix products
//!   and attention have a second body, for CPUs with matrix tiles. Results may differ between these in the last bits,
//!   and with bf16 weights by the rounding of tiles (see [`linear`]), so results repeat exactly only on the same CPU
//!   model.

#[macro_use]
mod simd;
mod arithmetic;
mod gemm;
mod mat;
mod microkernel;
mod team;
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
mod tiles;
mod top;
mod workspace;

pub mod activation;
pub mod attention;
pub mod buffer;
pub mod checksum;
pub mod conv;
pub mod dropout;
pub mod embedding;
pub mod experts;
pub mod linear;
pub mod logprob;
pub mod memory;
pub mod moments;
pub mod norm;
pub mod optim;
pub mod parallel;
pub mod paths;
pub mod probe;
pub mod profile;
pub mod quant;
pub mod recurrent;
pub mod rope;
pub mod sample;
pub mod scale;
pub mod twin;

use std::ops::Range;

use half::bf16;

use paths::Path;

pub use arithmetic::Arithmetic;
pub use mat::{Mat, MatMut};
pub use simd::{Instructions, limit_instructions};
pub use top::{Top, largest};

/// The elements of a weight in row-major order, in the dtype in which they are stored.
#[derive(Clone, Copy, Debug)]
pub enum Stored<'a> {
    F32(&'a [f32]),
    /// bfloat16 elements, summed in `f32`. See [`linear`] for the values that are rounded.
    Bf16(&'a [bf16]),
    /// Weights of 8 or 4 bits, which are widened tile by tile.
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

    /// Returns the elements from index `start` to the end. A quantised weight is returned unchanged, because its elements have no
    /// address.
    fn from(self, start: usize) -> Self {
        match self {
            Self::F32(w) => Self::F32(&w[start..]),
            Self::Bf16(w) => Self::Bf16(&w[start..]),
            Self::Quantised(w) => Self::Quantised(w),
        }
    }
}

/// A weight matrix `[n, k]`, and how a CPU multiplies with it.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    stored: Stored<'a>,
    n: usize,
    k: usize,
    arithmetic: Arithmetic,
}

impl<'a> Weight<'a> {
    /// Creates a weight of `n` rows of `k` elements, with the default arithmetic.
    ///
    /// # Panics
    /// Panics if `stored` does not have `n · k` elements.
    #[must_use]
    #[track_caller]
    pub fn new(stored: Stored<'a>, n: usize, k: usize) -> Self {
        assert!(stored.len() == n * k, "{} elements for a weight of {n}×{k}", stored.len());
        Self { stored, n, k, arithmetic: Arithmetic::default() }
    }

    /// Multiplies with this weight by this arithmetic.
    #[must_use]
    pub fn with(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    #[must_use]
    #[track_caller]
    pub fn f32(w: &'a [f32], n: usize, k: usize) -> Self {
        Self::new(Stored::F32(w), n, k)
    }

    #[must_use]
    #[track_caller]
    pub fn bf16(w: &'a [bf16], n: usize, k: usize) -> Self {
        Self::new(Stored::Bf16(w), n, k)
    }

    #[must_use]
    pub fn stored(self) -> Stored<'a> {
        self.stored
    }

    #[must_use]
    pub fn dims(self) -> (usize, usize) {
        (self.n, self.k)
    }

    #[must_use]
    pub fn is_bf16(self) -> bool {
        matches!(self.stored, Stored::Bf16(_))
    }

    #[must_use]
    pub fn arithmetic(self) -> Arithmetic {
        self.arithmetic
    }

    /// Returns the path of products with this weight if it is stored as bf16, else `None`. Such products round both factors to
    /// bf16, unless the path widens.
    #[must_use]
    pub fn rounding(self) -> Option<Path> {
        self.is_bf16().then(|| self.arithmetic.path())
    }

    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        let elements = rows.start * self.k..rows.end * self.k;
        let stored = match self.stored {
            Stored::F32(w) => Stored::F32(&w[elements]),
            Stored::Bf16(w) => Stored::Bf16(&w[elements]),
            Stored::Quantised(w) => Stored::Quantised(w.rows(rows.start, rows.end)),
        };
        Self { stored, n: rows.len(), ..self }
    }
}

impl<'a> From<quant::QuantRows<'a>> for Weight<'a> {
    fn from(w: quant::QuantRows<'a>) -> Self {
        let (n, k) = w.dims();
        Self { stored: Stored::Quantised(w), n, k, arithmetic: Arithmetic::default() }
    }
}
