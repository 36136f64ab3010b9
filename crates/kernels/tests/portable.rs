//! Runs the tests of the kernels on the code for CPUs without known vector instructions.
// The test files share the helper module, which each includes.
#![allow(missing_docs, clippy::duplicate_mod)]

mod common;

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
    limit_instructions(Instructions::Portable);
    4.0
}

/// Shapes are so small that the interpreter Miri can check every access, and odd, so that rows end within a vector. Only under Miri
/// is work of this size divided among threads, so that it finds races.
#[test]
fn small_shapes_do_not_depend_on_threads() {
    use common::{noise, with_threads};
    use omnigrpo_kernels::attention::{AttentionLayout, Shape};
    let shape = Shape { q_heads: 2, kv_heads: 1, head_dim: 9 };
    let layout = AttentionLayout::groups(&[(5, vec![2, 3]), (1, vec![1])]);
    let all = || {
        let attention = attention_tests::run(&noise(12 * 4 * 9, 3), 12, &layout, shape);
        (kernel_tests::everything(7, 19, 21, 37), attention)
    };
    assert!(with_threads(1, all) == with_threads(2, all));
}
