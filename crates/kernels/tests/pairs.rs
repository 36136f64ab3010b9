//! Runs the tests of the kernels on the code for CPUs that multiply bf16 in vectors but not in tiles.
// The test files share the helper module, which each includes.
#![allow(missing_docs, clippy::duplicate_mod)]

#[path = "kernels.rs"]
mod kernel_tests;

use omnigrpo_kernels::Arithmetic;
use omnigrpo_kernels::paths::Path;

// Also on CPUs whose model would widen. CPUs without the instructions can only widen.
pub const ARITHMETIC: Arithmetic = Arithmetic { bf16_products: Some(Path::Dot), keeps_inputs: false };

pub fn choose_instructions() -> f64 {
    use omnigrpo_kernels::{Instructions, limit_instructions};
    limit_instructions(Instructions::Pairs);
    // Without tiles, sums are chains of roundings.
    2.0
}
