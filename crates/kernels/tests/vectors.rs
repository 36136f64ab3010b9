//! The tests of the kernels once more, on the code for CPUs without matrix tiles.
// The same helpers are part of both files, which are read as they are.
#![allow(missing_docs, clippy::duplicate_mod)]

#[path = "attention.rs"]
mod attention_tests;
#[path = "kernels.rs"]
mod kernel_tests;
#[path = "quant.rs"]
mod quant_tests;

pub fn choose_instructions() -> f64 {
    use omnigrpo_kernels::{Instructions, limit_instructions};
    limit_instructions(Instructions::Vectors);
    // Without tiles, sums are chains of roundings.
    2.0
}
