//! Speed of the kernels: `cargo bench -p omnigrpo-kernels -- linear` measures those whose name contains `linear`.
//!
//! With `--serve` it reads names from its input instead and answers each with the seconds of the fastest of the calls
//! that fit a fifth of a second, which is how `bench/ops/compare.py` measures in turn with PyTorch. With `--experts` it prints
//! the rate of a mixture of experts as a share of that of one layer with its active parameters.
#![allow(missing_docs, clippy::print_stdout)]

mod cases;

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use cases::{Amount, Case, cases, expert_pairs};
use criterion::{Criterion, Throughput};

fn best(case: &Case) -> f64 {
    let mut run = (case.make)();
    run();
    let (mut best, start) = (f64::INFINITY, Instant::now());
    while start.elapsed() < Duration::from_millis(200) {
        let one = Instant::now();
        run();
        best = best.min(one.elapsed().as_secs_f64());
    }
    best
}

fn serve() {
    let cases = cases();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        if line == "?" {
            for case in &cases {
                let _ = writeln!(out, "{}", case.name);
            }
            let _ = writeln!(out);
        } else {
            let found = cases.iter().find(|case| case.name == line);
            let _ = writeln!(out, "{}", found.map_or(f64::NAN, best));
        }
        let _ = out.flush();
    }
}

/// Keeps freed memory, as the program does (crates/omnigrpo/src/cli/heap.rs). Otherwise, page faults of results would be measured.
fn keep_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: no thread has started; this only sets tuning parameters.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
}

fn main() {
    keep_memory();
    // The calling thread is one of the pool, as in the program.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let _ = if threads > 1 { pool.use_current_thread().build_global() } else { pool.build_global() };
    if std::env::args().any(|arg| arg == "--serve") {
        return serve();
    }
    if std::env::args().any(|arg| arg == "--experts") {
        for [mixture, dense] in expert_pairs() {
            println!("{}: {:.0} % of {}", mixture.name, 100.0 * best(&dense) / best(&mixture), dense.name);
        }
        return;
    }
    let mut criterion = Criterion::default()
        .without_plots()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
        .configure_from_args();
    let mut group = criterion.benchmark_group("kernels");
    for case in cases() {
        group.throughput(match case.amount {
            Amount::Flops(amount) => Throughput::Elements(amount as u64),
            Amount::Bytes(amount) => Throughput::BytesDecimal(amount as u64),
        });
        let mut run = None;
        group.bench_function(&case.name, |bencher| {
            // Buffers exist only for a case that is measured.
            let run = run.get_or_insert_with(|| (case.make)());
            bencher.iter(run);
        });
    }
    group.finish();
    criterion.final_summary();
}
