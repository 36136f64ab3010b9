//! Runs the tests of the kernels on the code for CPUs without matrix tiles.
// The test files share the helper module, which each includes.
#![allow(missing_docs, clippy::duplicate_mod)]

#[path = "attention.rs"]
mod attention_tests;
#[path = "kernels.rs"]
mod kernel_tests;
#[path = "quant.rs"]
mod quant_tests;

pub const ARITHMETIC: omnigrpo_kernels::Arithmetic =
    omnigrpo_kernels::Arithmetic { bf16_products: None, keeps_inputs: false };

pub fn choose_instructions() -> f64 {
    use omnigrpo_kernels::{Instructions, limit_instructions};
    limit_instructions(Instructions::Vectors);
    // Without tiles, sums are chains of roundings.
    2.0
}
