//! The tests of the kernels once more, on the code for CPUs that multiply bf16 in vectors alone.
// Both files include the same helpers.
#![allow(missing_docs, clippy::duplicate_mod)]

#[path = "kernels.rs"]
mod kernel_tests;

pub fn choose_instructions() -> f64 {
    use omnigrpo_kernels::{Instructions, limit_instructions, paths};
    limit_instructions(Instructions::Pairs);
    // On CPUs that widen by themselves, too; those without the instructions can only widen.
    let _ = paths::choose(Some(paths::Path::Dot));
    // Without tiles, sums are chains of roundings.
    2.0
}
