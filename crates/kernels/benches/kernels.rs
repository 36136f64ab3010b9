//! Speed of the kernels at the sizes of a small language model: best and median time, GFLOP/s or GB/s.
//!
//! `cargo bench -p omnigrpo-kernels -- linear` runs the lines whose name contains `linear`.
#![allow(missing_docs, clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::bf16;
use omnigrpo_kernels::attention::{self, AttentionLayout, QueryRange, Rows, Shape};
use omnigrpo_kernels::{Weight, linear, logprob};

/// Times `f` and prints a line, unless the filter excludes it. `amount` is in `unit` · 10⁹ per call.
fn measure(name: &str, amount: f64, unit: &str, mut f: impl FnMut()) {
    let filter: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    if !filter.is_empty() && !filter.iter().any(|part| name.contains(part.as_str())) {
        return;
    }
    f();
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 5 || (start.elapsed() < Duration::from_millis(600) && times.len() < 1000) {
        let t = Instant::now();
        f();
        times.push(t.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let (best, median) = (times[0], times[times.len() / 2]);
    println!(
        "{name:<58} best {:>9.3} ms  median {:>9.3} ms  {:>7.1} {unit}",
        best * 1e3,
        median * 1e3,
        amount / best
    );
}

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

fn linear_layers() {
    let (m, k, n) = (852, 512, 1408);
    let (x, w) = (noise(m * k, 1), noise(n * k, 2));
    let mut y = vec![0.0; m * n];
    let flops = 2e-9 * (m * k * n) as f64;
    measure("linear forward 852x512x1408", flops, "GFLOP/s", || {
        linear::forward(&mut y, n, &x, k, Weight::F32(&w), None, m, k, n);
    });
    let mut dx = vec![0.0; m * k];
    measure("linear backward_input 852x512x1408", flops, "GFLOP/s", || {
        linear::backward_input(&mut dx, k, &y, n, Weight::F32(&w), m, k, n, false);
    });
    let mut dw = vec![0.0; n * k];
    measure("linear backward_weight 852x512x1408", flops, "GFLOP/s", || {
        linear::backward_weight(&mut dw, &y, n, &x, k, m, k, n);
    });
    let big = noise(64 << 20, 3);
    measure("memory read, 256 MiB, 2 threads", 268.4e-3, "GB/s", || {
        let half = big.len() / 2;
        let sum = |x: &[f32]| {
            x.chunks_exact(64).fold([0.0f32; 64], |mut a, c| {
                a.iter_mut().zip(c).for_each(|(a, c)| *a += c);
                a
            })
        };
        black_box(rayon::join(|| sum(&big[..half]), || sum(&big[half..])));
    });
    for (n, k) in [(1408, 512), (2048, 512), (8192, 2048)] {
        let w = noise(n * k, 4);
        let wide = w.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        for m in [1, 8, 16] {
            let x = noise(m * k, 5);
            let mut y = vec![0.0; m * n];
            for (dtype, w, bytes) in [("f32", Weight::F32(&w), 4), ("bf16", Weight::Bf16(&wide), 2)] {
                let amount = 1e-9 * (n * k * bytes) as f64;
                measure(&format!("linear forward_rows m={m} {n}x{k} {dtype}"), amount, "GB/s", || {
                    linear::forward_rows(&mut y, n, &x, k, w, None, m, k, n);
                });
            }
        }
        let x = noise(8 * k, 5);
        let mut y = vec![0.0; 8 * n];
        measure(&format!("linear forward (gemm) m=8 {n}x{k} f32"), 4e-9 * (n * k) as f64, "GB/s", || {
            linear::forward(&mut y, n, &x, k, Weight::F32(&w), None, 8, k, n);
        });
    }
}

/// Floating-point operations of one pass; `products` is 2 forward, 5 backward.
fn attention_flops(layout: &AttentionLayout, shape: Shape, products: u64) -> f64 {
    1e-9 * (2 * products * layout.pairs() * (shape.q_heads * shape.head_dim) as u64) as f64
}

fn attention_layers() {
    let shape = Shape { q_heads: 8, kv_heads: 2, head_dim: 64 };
    let (t, wq, wk) = (852, 512, 128);
    let stride = wq + 2 * wk;
    let x = noise(t * stride, 6);
    let [q, k, v] = [0, wq, wq + wk].map(|col| Rows { data: &x, stride, col });
    for (name, layout) in [
        ("prefix 340 + 8x64", AttentionLayout::prefix_suffixes(340, &[64; 8])),
        ("causal 852", AttentionLayout::causal(t)),
    ] {
        let (mut out, mut lse) = (vec![0.0; t * wq], vec![0.0; t * 8]);
        let flops = attention_flops(&layout, shape, 2);
        measure(&format!("attention forward {name}"), flops, "GFLOP/s", || {
            attention::forward(&mut out, &mut lse, q, k, v, &layout, shape, 0.125);
        });
        let (dout, mut d) = (noise(t * wq, 7), vec![0.0; t * stride]);
        let flops = attention_flops(&layout, shape, 5);
        measure(&format!("attention backward {name}"), flops, "GFLOP/s", || {
            let (kc, vc) = (wq, wq + wk);
            attention::backward(&mut d, stride, 0, kc, vc, &dout, &out, &lse, q, k, v, &layout, shape, 0.125);
        });
    }
    let range =
        |i| QueryRange { queries: i..i + 1, keys: vec![0..340, 340 + 64 * i..404 + 64 * i], causal: false };
    let layout = AttentionLayout { ranges: (0..8).map(range).collect() };
    let mut out = vec![0.0; 8 * wq];
    measure("attention decode 8 rows, 340 + 64 keys", attention_flops(&layout, shape, 2), "GFLOP/s", || {
        attention::forward_decode(&mut out, q, k, v, &layout, shape, 0.125);
    });
}

fn logprob_head() {
    let (rows, h, v) = (512, 512, 16_384);
    let (hidden, head) = (noise(rows * h, 8), noise(v * h, 9));
    let targets: Vec<u32> = (0..rows as u32).map(|i| i * 31).collect();
    let offsets: Vec<usize> = (0..=rows).collect();
    let [mut logp, mut entropy, mut lse] = [0; 3].map(|_| vec![0.0; rows]);
    let flops = 2e-9 * (rows * h * v) as f64;
    let weight = Weight::F32(&head);
    measure("logprob forward 512x512x16384", flops, "GFLOP/s", || {
        logprob::forward(
            &hidden,
            weight,
            rows,
            h,
            v,
            &targets,
            &offsets,
            1.0,
            &mut logp,
            &mut entropy,
            &mut lse,
        );
    });
    let mut logits = vec![0.0; rows * v];
    measure("logprob plain: gemm + log-softmax, 512x512x16384", flops, "GFLOP/s", || {
        linear::forward(&mut logits, v, &hidden, h, weight, None, rows, h, v);
        for (r, z) in logits.chunks_exact(v).enumerate() {
            let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = z.iter().map(|z| (z - max).exp()).sum();
            logp[r] = z[targets[r] as usize] - max - sum.ln();
        }
    });
    let (mut dhidden, mut dhead) = (vec![0.0; rows * h], vec![0.0; v * h]);
    let dlogp = noise(rows, 10);
    measure("logprob backward 512x512x16384", 3.0 * flops, "GFLOP/s", || {
        logprob::backward(
            &mut dhidden,
            Some(&mut dhead),
            &hidden,
            weight,
            rows,
            h,
            v,
            &targets,
            &offsets,
            &lse,
            &entropy,
            &dlogp,
            None,
            1.0,
        );
    });
}

fn main() {
    linear_layers();
    attention_layers();
    logprob_head();
}
