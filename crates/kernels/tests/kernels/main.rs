//! The kernels, compared with their f64 twins, on the best instructions of this CPU and on fewer. A process has one choice of
//! instructions, so the tests of another choice run in another process of this program.
#![allow(clippy::unwrap_used, clippy::panic, clippy::single_range_in_vec_init, missing_docs)]

mod attention;
mod common;
mod conv;
mod products;
mod quant;
mod recurrent;

use omnigrpo_kernels::paths::Path;
use omnigrpo_kernels::{Arithmetic, Instructions, limit_instructions};

/// Variable with the limit of the instructions of a process.
const LIMIT: &str = "OMNIGRPO_TEST_INSTRUCTIONS";

/// Returns the limit of this process, and the factor of all tolerances under it.
fn limit() -> Option<(Instructions, f64)> {
    // Without tiles, sums are chains of roundings. Portable code adds elements one by one and rounds products, too.
    match std::env::var(LIMIT).ok()?.as_str() {
        "portable" => Some((Instructions::Portable, 4.0)),
        "vectors" => Some((Instructions::Vectors, 2.0)),
        "pairs" => Some((Instructions::Pairs, 2.0)),
        other => panic!("{LIMIT}={other}"),
    }
}

/// Selects the instructions of this process, and returns the factor of all tolerances.
fn choose_instructions() -> f64 {
    limit().map_or(1.0, |(limit, factor)| {
        limit_instructions(limit);
        factor
    })
}

/// Returns how the tests multiply with weights of fewer than 32 bits. CPUs without instructions for pairs can only widen.
fn arithmetic() -> Arithmetic {
    let pairs = limit().is_some_and(|(limit, _)| limit == Instructions::Pairs);
    Arithmetic { bf16_products: pairs.then_some(Path::Dot), keeps_inputs: false }
}

/// Runs the tests of some modules in a process with fewer instructions.
fn run_with(limit: &str, modules: &[&str]) {
    let mut tests = std::process::Command::new(std::env::current_exe().unwrap());
    let ran = tests.env(LIMIT, limit).args(modules).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert!(!said.contains("running 0 tests"), "{said}");
}

/// Code for CPUs without known vector instructions.
#[test]
fn portable_code() {
    run_with("portable", &["attention::", "products::", "quant::"]);
}

/// Code for CPUs without matrix tiles.
#[test]
fn vectors() {
    run_with("vectors", &["attention::", "products::", "quant::"]);
}

/// Code for CPUs that multiply bf16 in vectors but not in tiles.
#[test]
fn pairs() {
    run_with("pairs", &["products::"]);
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
        let attention = attention::run(&noise(12 * 4 * 9, 3), 12, &layout, shape);
        (products::everything(7, 19, 21, 37), attention)
    };
    assert!(with_threads(1, all) == with_threads(2, all));
}
