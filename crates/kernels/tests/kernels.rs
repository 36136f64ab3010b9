//! Every kernel except attention: against its f64 twin, against PyTorch, and for the independence of its bits.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

/// The best of this CPU, and the factor of all tolerances; `portable.rs` runs the same tests with another choice.
#[allow(dead_code)]
pub fn choose_instructions() -> f64 {
    1.0
}

use std::collections::HashMap;

use common::{check_gradient, close, dot, noise, wide, with_threads};
use half::bf16;
use omnigrpo_kernels::activation::{self, Activation};
use omnigrpo_kernels::attention::{AttentionLayout, Shape};
use omnigrpo_kernels::linear::{Gradient, Layer};
use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
use omnigrpo_kernels::{Weight, embedding, has_tiles, linear, logprob, norm, optim, rope, scale, twin};

const ACTIVATIONS: [Activation; 4] =
    [Activation::Silu, Activation::GeluErf, Activation::GeluTanh, Activation::QuickGelu];

type Case = HashMap<String, Vec<f64>>;

fn torch() -> HashMap<String, Case> {
    serde_json::from_str(include_str!("data/torch.json")).unwrap()
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

fn close64(got: &[f64], expected: &[f64]) {
    for (g, e) in got.iter().zip(expected) {
        assert!((g - e).abs() <= 1e-12 * e.abs().max(1.0), "{g}, expected {e}");
    }
}

/// Spreads contiguous rows to a larger stride; the gaps hold NaN.
fn spread(x: &[f32], rows: usize, width: usize, stride: usize) -> Vec<f32> {
    let mut y = vec![f32::NAN; rows * stride];
    for r in 0..rows {
        y[r * stride..r * stride + width].copy_from_slice(&x[r * width..(r + 1) * width]);
    }
    y
}

fn unspread(y: &[f32], rows: usize, width: usize, stride: usize) -> Vec<f32> {
    (0..rows).flat_map(|r| y[r * stride..r * stride + width].to_vec()).collect()
}

/// The numbers that a product with such a weight multiplies: tiles take bf16 alone.
fn factor(x: &[f32], bf16_weight: bool) -> Vec<f64> {
    if bf16_weight && has_tiles() {
        return x.iter().map(|&x| bf16::from_f32(x).to_f64()).collect();
    }
    wide(x)
}

#[test]
fn linear_matches_its_twin() {
    for (m, k, n) in [
        (1, 1, 1),
        (3, 5, 7),
        (17, 33, 20),
        (70, 64, 96),
        (2, 1128, 3),
        (1, 300, 40),
        (300, 17, 35),
        (0, 4, 5),
        (2, 0, 3),
        (5, 545, 70),
        (40, 72, 33),
        (33, 20, 31),
        (64, 9, 13),
    ] {
        let (x, w, bias, dy) = (noise(m * k, 1), noise(n * k, 2), noise(n, 3), noise(m * n, 4));
        let narrow_w: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
        let rounded: Vec<f32> = narrow_w.iter().map(|w| w.to_f32()).collect();
        let (xs, ys) = (k + 3, n + 2);
        let (x_wide, dy_wide) = (spread(&x, m, k, xs), spread(&dy, m, n, ys));
        for (w, values) in [(Weight::F32(&w), &w), (Weight::Bf16(&narrow_w), &rounded)] {
            let bf16 = w.is_bf16();
            let (x64, w64, dy64) = (factor(&x, bf16), wide(values), factor(&dy, bf16));
            for bias in [None, Some(&bias[..])] {
                let expected = twin::linear_forward(&x64, &w64, bias.map(wide).as_deref(), m, k, n);
                for kernel in [linear::forward, linear::forward_rows] {
                    let mut y = vec![7.0; m * ys];
                    kernel(&mut y, ys, &x_wide, xs, &[Layer { w, bias, n }], m, k, false);
                    // A chain of up to 512 multiply-adds in f32.
                    close(&unspread(&y, m, n, ys), &expected, 2e-6);
                    assert!((0..m).all(|i| y[i * ys + n..(i + 1) * ys] == [7.0, 7.0]), "gap columns stay");
                    let mut y = vec![0.5; m * ys];
                    kernel(&mut y, ys, &x_wide, xs, &[Layer { w, bias, n }], m, k, true);
                    let added: Vec<f64> = expected.iter().map(|y| y + 0.5).collect();
                    close(&unspread(&y, m, n, ys), &added, 2e-6);
                }
            }
            let (dx64, dw64, _) = twin::linear_backward(&dy64, &x64, &w64, m, k, n);
            let db64 = twin::linear_backward(&wide(&dy), &x64, &w64, m, k, n).2;
            for accumulate in [false, true] {
                let mut dx = vec![0.5; m * xs];
                linear::backward_input(&mut dx, xs, &dy_wide, ys, &[Layer::new(w, n)], m, k, accumulate);
                let start = if accumulate { 0.5 } else { 0.0 };
                close(&unspread(&dx, m, k, xs), &dx64.iter().map(|d| d + start).collect::<Vec<_>>(), 2e-6);
            }
            let (mut dw, mut db) = (vec![0.25; n * k], vec![0.25; n]);
            let mut gradient = [Gradient { dw: &mut dw, col: 0, n, bf16 }];
            linear::backward_weight(&mut gradient, &dy_wide, ys, &x_wide, xs, m, k);
            linear::backward_bias(&mut db, &dy_wide, ys, m, n);
            close(&dw, &dw64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 2e-6);
            close(&db, &db64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 2e-6);
        }
    }
}

#[test]
fn layers_with_one_input_are_one_call() {
    // Different dtypes and widths, outputs side by side; more rows than one pass of packed gradients holds.
    let (m, k, widths) = (700, 40, [37usize, 8, 3000]);
    let n: usize = widths.iter().sum();
    let (x, dy) = (noise(m * k, 1), noise(m * n, 2));
    let weights: Vec<Vec<f32>> = (3..).zip(widths).map(|(seed, n)| noise(n * k, seed)).collect();
    let narrow_w: Vec<bf16> = weights[1].iter().map(|&w| bf16::from_f32(w)).collect();
    let w = |i: usize| if i == 1 { Weight::Bf16(&narrow_w) } else { Weight::F32(&weights[i]) };
    let bias = noise(37, 9);
    let layers: Vec<Layer> =
        (0..3).map(|i| Layer { w: w(i), bias: (i == 0).then_some(&bias[..]), n: widths[i] }).collect();
    for kernel in [linear::forward, linear::forward_rows] {
        let mut y = vec![0.0; m * n];
        kernel(&mut y, n, &x, k, &layers, m, k, false);
        let mut col = 0;
        for layer in &layers {
            let mut alone = vec![0.0; m * layer.n];
            kernel(&mut alone, layer.n, &x, k, std::slice::from_ref(layer), m, k, false);
            assert!(
                (0..m)
                    .all(|i| alone[i * layer.n..(i + 1) * layer.n] == y[i * n + col..i * n + col + layer.n])
            );
            col += layer.n;
        }
    }
    let mut dx = vec![0.0; m * k];
    linear::backward_input(&mut dx, k, &dy, n, &layers, m, k, false);
    let mut dws = widths.map(|n| vec![0.5; n * k]);
    let cols = [0, 37, 45];
    let mut gradients: Vec<Gradient> = dws
        .iter_mut()
        .enumerate()
        .map(|(i, dw)| Gradient { dw, col: cols[i], n: widths[i], bf16: w(i).is_bf16() })
        .collect();
    linear::backward_weight(&mut gradients, &dy, n, &x, k, m, k);
    let mut dx64 = vec![0.0; m * k];
    for i in 0..3 {
        let bf16 = w(i).is_bf16();
        let part: Vec<f64> =
            (0..m).flat_map(|r| factor(&dy[r * n + cols[i]..r * n + cols[i] + widths[i]], bf16)).collect();
        let w64: Vec<f64> = match w(i) {
            Weight::F32(w) => wide(w),
            Weight::Bf16(w) => w.iter().map(|w| w.to_f64()).collect(),
            Weight::Quantised(_) => unreachable!("not among these"),
        };
        let (dx, dw, _) = twin::linear_backward(&part, &factor(&x, bf16), &w64, m, k, widths[i]);
        dx64.iter_mut().zip(dx).for_each(|(sum, d)| *sum += d);
        close(&dws[i], &dw.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 1e-5);
    }
    close(&dx, &dx64, 1e-5);
}

/// More rows than are packed at a time, and a long inner size, which is cut into rounds.
#[test]
fn many_rows_and_long_sums_match_their_twin() {
    let (m, k, n) = (2100, 3300, 24);
    let (x, w, dy, bias) = (noise(m * k, 1), noise(n * k, 2), noise(k * m, 3), noise(n, 4));
    let narrow_w: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
    let rounded: Vec<f32> = narrow_w.iter().map(|w| w.to_f32()).collect();
    for (w, values) in [(Weight::F32(&w), &w), (Weight::Bf16(&narrow_w), &rounded)] {
        let run = |x: &[f32], m: usize| {
            let mut y = vec![0.0; m * n];
            linear::forward(&mut y, n, x, k, &[Layer { w, bias: Some(&bias), n }], m, k, false);
            y
        };
        let y = run(&x, m);
        let x64 = factor(&x, w.is_bf16());
        close(&y, &twin::linear_forward(&x64, &wide(values), Some(&wide(&bias)), m, k, n), 6e-6);
        assert_eq!(run(&x[2040 * k..], 60), y[2040 * n..], "the last rows alone");
    }
    // dw [m, n] from m columns of dy and a sum over k rows.
    let x = noise(k * n, 4);
    for bf16 in [false, true] {
        let mut dw = vec![0.0; m * n];
        linear::backward_weight(&mut [Gradient { dw: &mut dw, col: 0, n: m, bf16 }], &dy, m, &x, n, k, n);
        let (dy, x) = (factor(&dy, bf16), factor(&x, bf16));
        close(&dw, &twin::linear_backward(&dy, &x, &wide(&noise(m * n, 5)), k, n, m).1, 6e-6);
    }
}

fn quantised(bits: QuantBits, w: &[f32], n: usize, k: usize) -> QuantMatrix {
    QuantMatrix::from_rows(bits, n, k, |i, row| row.copy_from_slice(&w[i * k..(i + 1) * k])).unwrap()
}

/// Outputs and input gradients in memory that was not cleared: the same bits as in memory full of NaN that is given.
#[test]
fn memory_of_their_own_is_written_whole() {
    for (m, k, widths) in [
        (7, 70, [33, 5, 64, 17]),
        (40, 64, [0, 32, 0, 8]),
        (1, 600, [3, 0, 1, 70]),
        (0, 3, [2; 4]),
        (3, 0, [4; 4]),
    ] {
        let n: usize = widths.iter().sum();
        let weights: Vec<Vec<f32>> = (3..).zip(widths).map(|(seed, n)| noise(n * k, seed)).collect();
        let narrow_w: Vec<bf16> = weights[1].iter().map(|&w| bf16::from_f32(w)).collect();
        let (eight, four) = (
            quantised(QuantBits::Eight, &weights[0], widths[0], k),
            quantised(QuantBits::Four, &weights[3], widths[3], k),
        );
        let of = [
            Weight::Quantised(eight.rows()),
            Weight::Bf16(&narrow_w),
            Weight::F32(&weights[2]),
            Weight::Quantised(four.rows()),
        ];
        let bias = noise(widths[2], 9);
        let layers: Vec<Layer> =
            (0..4).map(|i| Layer { w: of[i], bias: (i == 2).then_some(&bias[..]), n: widths[i] }).collect();
        let (x, dy) = (noise(m * k, 1), noise(m * n, 2));
        let (mut y, mut dx) = (vec![f32::NAN; m * n], vec![f32::NAN; m * k]);
        linear::forward(&mut y, n, &x, k, &layers, m, k, false);
        linear::backward_input(&mut dx, k, &dy, n, &layers, m, k, false);
        assert!(y.iter().chain(&dx).all(|x| x.is_finite()), "{m}x{k}, {widths:?}");
        assert_eq!(linear::output(&x, k, &layers, m, k), y);
        assert_eq!(linear::input_gradient(&dy, n, &layers, m, k), dx);
    }
}

/// Rows and weights of very different size: the error is relative to the sum of absolute products.
#[test]
fn linear_holds_its_precision_at_all_sizes() {
    let (m, k, n) = (33, 200, 40);
    let scale = |x: &mut [f32], width: usize| {
        for (i, row) in x.chunks_mut(width).enumerate() {
            row.iter_mut().for_each(|x| *x *= 10f32.powi((i as i32 * 7) % 31 - 15));
        }
    };
    let (mut x, mut w) = (noise(m * k, 1), noise(n * k, 2));
    scale(&mut x, k);
    scale(&mut w, k);
    let abs = |x: &[f32]| x.iter().map(|x| f64::from(x.abs())).collect::<Vec<f64>>();
    let want = twin::linear_forward(&wide(&x), &wide(&w), None, m, k, n);
    let size = twin::linear_forward(&abs(&x), &abs(&w), None, m, k, n);
    for kernel in [linear::forward, linear::forward_rows] {
        let mut y = vec![0.0; m * n];
        kernel(&mut y, n, &x, k, &[Layer::new(Weight::F32(&w), n)], m, k, false);
        for ((y, want), size) in y.iter().zip(&want).zip(&size) {
            let error = (f64::from(*y) - want).abs() / size;
            assert!(error < 1e-6, "{y} for {want}: {error} of {size}");
        }
    }
    // What is no number stays none, whatever its bits, and reaches its own row alone.
    let narrow_w: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
    for bits in [0x7fc0_0000, 0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0x7f80_0000] {
        let mut x = noise(m * k, 1);
        x[5 * k + 7] = f32::from_bits(bits);
        for w in [Weight::F32(&w), Weight::Bf16(&narrow_w)] {
            for kernel in [linear::forward, linear::forward_rows] {
                let mut y = vec![0.0; m * n];
                kernel(&mut y, n, &x, k, &[Layer::new(w, n)], m, k, false);
                for (i, y) in y.iter().enumerate() {
                    assert_eq!(y.is_finite(), i / n != 5, "{bits:x} at {i}: {y}");
                }
            }
        }
    }
}

#[test]
fn rows_do_not_depend_on_the_batch() {
    let (k, n) = (603, 77);
    let rows = 70;
    let (x, w, bias) = (noise(rows * k, 1), noise(n * k, 2), noise(n, 3));
    let narrow_w: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
    for w in [Weight::F32(&w), Weight::Bf16(&narrow_w)] {
        for kernel in [linear::forward, linear::forward_rows] {
            let run = |first: usize, m: usize| {
                let mut y = vec![0.0; m * n];
                kernel(&mut y, n, &x[first * k..], k, &[Layer { w, bias: Some(&bias), n }], m, k, false);
                y
            };
            let all = run(0, rows);
            for m in [1, 3, 6, 8, 12, 17, 33, 64] {
                for first in [0, rows - m] {
                    assert_eq!(run(first, m), all[first * n..(first + m) * n], "{m} rows from {first}");
                }
            }
        }
    }
}

/// All kernels that may use threads, on sizes that do.
fn everything() -> Vec<Vec<f32>> {
    let (m, k, n) = (300, 160, 192);
    let (x, w, dy) = (noise(m * k, 1), noise(n * k, 2), noise(m * n, 3));
    let half: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
    let mut out = Vec::new();
    for w in [Weight::F32(&w), Weight::Bf16(&half)] {
        let (mut y, mut rows, mut dx) = (vec![0.0; m * n], vec![0.0; m * n], vec![0.0; m * k]);
        let layers = [Layer::new(w, n)];
        linear::forward(&mut y, n, &x, k, &layers, m, k, false);
        linear::forward_rows(&mut rows, n, &x, k, &layers, m, k, false);
        linear::backward_input(&mut dx, k, &dy, n, &layers, m, k, false);
        out.extend([y, rows, dx]);
    }
    for bf16 in [false, true] {
        let mut dw = vec![0.0; n * k];
        linear::backward_weight(&mut [Gradient { dw: &mut dw, col: 0, n, bf16 }], &dy, n, &x, k, m, k);
        out.push(dw);
    }
    let mut db = vec![0.0; n];
    linear::backward_bias(&mut db, &dy, n, m, n);
    out.push(db);
    let weight = noise(k, 4);
    let mut dx = vec![0.0; m * k];
    let [mut mean, mut rstd] = [0; 2].map(|_| vec![0.0; m]);
    let [mut dw, mut db] = [0; 2].map(|_| vec![0.0; k]);
    let y = norm::layer_forward(&mut mean, &mut rstd, &x, &weight, &weight, m, k, 1e-5);
    norm::layer_backward(&mut dx, Some(&mut dw), Some(&mut db), &y, &x, &weight, &mean, &rstd, m, k);
    let a = activation::forward(Activation::GeluErf, &x);
    out.extend([y, dx, dw, db, a]);
    let v = 3000;
    let head = noise(v * k, 5);
    let targets: Vec<u32> = (0..m as u32).map(|i| i * 9).collect();
    let offsets: Vec<usize> = (0..=m).collect();
    let [mut logp, mut entropy, mut lse] = [0; 3].map(|_| vec![0.0; m]);
    let (mut dh, mut dhead) = (vec![0.0; m * k], vec![0.0; v * k]);
    let w = Weight::F32(&head);
    logprob::forward(&x, w, m, k, v, &targets, &offsets, 0.9, &mut logp, &mut entropy, &mut lse);
    logprob::backward(
        &mut dh,
        Some(&mut dhead),
        &x,
        w,
        m,
        k,
        v,
        &targets,
        &offsets,
        &lse,
        &entropy,
        &dy[..m],
        None,
        0.9,
    );
    let mut table = vec![0.0; 500 * k];
    embedding::scatter_add(&mut table, &x, &targets.iter().map(|t| t % 7).collect::<Vec<_>>(), k);
    let squares = optim::sum_of_squares(&head);
    out.extend([logp, entropy, lse, dh, dhead, table, vec![squares as f32]]);
    out
}

#[test]
fn threads_do_not_change_bits() {
    let one = with_threads(1, everything);
    assert_eq!(one, with_threads(2, everything));
    assert_eq!(one, with_threads(5, everything));
}

#[test]
fn norms_match_their_twins() {
    for (rows, dim) in [(1, 1), (3, 17), (5, 64), (40, 515), (0, 8)] {
        let (x, dy) = (noise(rows * dim, 1), noise(rows * dim, 2));
        let (weight, bias) = (noise(dim, 3), noise(dim, 4));
        let [x64, dy64, w64, b64] = [&x, &dy, &weight, &bias].map(|x| wide(x));
        let mut dx = vec![0.25; rows * dim];
        let more = |dx: &[f64]| dx.iter().map(|d| d + 0.25).collect::<Vec<_>>();
        let [mut mean, mut rstd] = [0; 2].map(|_| vec![9.0; rows]);
        let [mut dw, mut db] = [0; 2].map(|_| vec![0.5; dim]);
        let eps = 1e-3;

        let (y64, rstd64) = twin::rms_forward(&x64, &w64, rows, dim, f64::from(eps));
        let y = norm::rms_forward(&mut rstd, &x, &weight, rows, dim, eps);
        close(&y, &y64, 1e-6);
        close(&rstd, &rstd64, 1e-6);
        let (dx64, dw64) = twin::rms_backward(&dy64, &x64, &w64, &rstd64, rows, dim);
        norm::rms_backward(&mut dx, Some(&mut dw), &dy, &x, &weight, &rstd, rows, dim);
        close(&dx, &more(&dx64), 2e-6);
        close(&dw, &dw64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
        dx.fill(0.25);

        let (y64, mean64, rstd64) = twin::layer_forward(&x64, &w64, &b64, rows, dim, f64::from(eps));
        let y = norm::layer_forward(&mut mean, &mut rstd, &x, &weight, &bias, rows, dim, eps);
        close(&y, &y64, 2e-6);
        close(&mean, &mean64, 1e-6);
        close(&rstd, &rstd64, 1e-6);
        let (dx64, dw64, db64) = twin::layer_backward(&dy64, &x64, &w64, &mean64, &rstd64, rows, dim);
        let mut dw = vec![0.5; dim];
        norm::layer_backward(
            &mut dx,
            Some(&mut dw),
            Some(&mut db),
            &dy,
            &x,
            &weight,
            &mean,
            &rstd,
            rows,
            dim,
        );
        close(&dx, &more(&dx64), 3e-6);
        close(&dw, &dw64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
        close(&db, &db64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
    }
}

#[test]
fn norm_twins_match_central_differences() {
    let (rows, dim, eps) = (2, 5, 1e-3);
    let [x, dy] = [1, 2].map(|seed| wide(&noise(rows * dim, seed)));
    let [w, b] = [3, 4].map(|seed| wide(&noise(dim, seed)));
    let rms = |x: &[f64], w: &[f64]| dot(&twin::rms_forward(x, w, rows, dim, eps).0, &dy);
    let (_, rstd) = twin::rms_forward(&x, &w, rows, dim, eps);
    let (dx, dw) = twin::rms_backward(&dy, &x, &w, &rstd, rows, dim);
    check_gradient(&x, &dx, |x| rms(x, &w));
    check_gradient(&w, &dw, |w| rms(&x, w));
    let layer = |x: &[f64], w: &[f64], b: &[f64]| dot(&twin::layer_forward(x, w, b, rows, dim, eps).0, &dy);
    let (_, mean, rstd) = twin::layer_forward(&x, &w, &b, rows, dim, eps);
    let (dx, dw, db) = twin::layer_backward(&dy, &x, &w, &mean, &rstd, rows, dim);
    check_gradient(&x, &dx, |x| layer(x, &w, &b));
    check_gradient(&w, &dw, |w| layer(&x, w, &b));
    check_gradient(&b, &db, |b| layer(&x, &w, b));
}

#[test]
fn rope_rotates_and_its_inverse_is_the_transpose() {
    let (rows, heads, d, stride, col) = (3, 2, 10, 27, 4);
    let angles = noise(rows * d / 2, 1);
    let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
    let x = noise(rows * stride, 2);
    let window = |x: &[f32]| -> Vec<f32> {
        (0..rows).flat_map(|r| x[r * stride + col..r * stride + col + heads * d].to_vec()).collect()
    };
    for inverse in [false, true] {
        let mut y = x.clone();
        rope::apply(&mut y, stride, col, heads, d, &cos, &sin, rows, inverse);
        close(
            &window(&y),
            &twin::rope(&wide(&window(&x)), heads, d, &wide(&cos), &wide(&sin), rows, inverse),
            1e-6,
        );
        assert_eq!(y[..col], x[..col], "columns outside of the heads stay");
        assert_eq!(y[col + heads * d..stride], x[col + heads * d..stride]);
    }
    // One rotation by a right angle, by hand: (a, b) → (−b, a).
    let mut y = [1.0, 2.0, 3.0, 4.0];
    rope::apply(&mut y, 4, 0, 1, 4, &[0.0, 1.0], &[1.0, 0.0], 1, false);
    assert_eq!(y, [-3.0, 2.0, 1.0, 4.0]);
    // ⟨g, R x⟩ = ⟨Rᵀ g, x⟩.
    let [c64, s64] = [&cos, &sin].map(|x| wide(x));
    let [x, g] = [3, 4].map(|seed| wide(&noise(rows * heads * d, seed)));
    let forward = dot(&g, &twin::rope(&x, heads, d, &c64, &s64, rows, false));
    let backward = dot(&x, &twin::rope(&g, heads, d, &c64, &s64, rows, true));
    assert!((forward - backward).abs() < 1e-12);
}

#[test]
fn activations_match_their_twins() {
    let mut x: Vec<f32> = (0..4001).map(|i| (i as f32 - 2000.0) / 160.0).collect();
    x.extend([0.0, -0.0, 1e-20, -1e-20, 40.0, -40.0, 90.0, -90.0, 1e4, -1e4]);
    let dy = noise(x.len(), 1);
    for act in ACTIVATIONS {
        let mut dx = x.clone();
        let y = activation::forward(act, &x);
        activation::backward(act, &mut dx, &dy);
        for i in 0..x.len() {
            let (value, slope) = twin::activation(act, f64::from(x[i]));
            let size = f64::from(x[i]).abs().max(1.0);
            assert!(
                (f64::from(y[i]) - value).abs() <= 2e-7 * size,
                "{act:?}({}) = {}, expected {value}",
                x[i],
                y[i]
            );
            let expected = slope * f64::from(dy[i]);
            assert!(
                (f64::from(dx[i]) - expected).abs() <= 6e-7,
                "{act:?}'({}): {}, expected {expected}",
                x[i],
                dx[i]
            );
        }
        assert!(activation::forward(act, &[f32::NAN])[0].is_nan());
        for x in [-3.1, -0.7, 0.0, 0.4, 2.3] {
            let h = 1e-5;
            let numeric = (twin::activation(act, x + h).0 - twin::activation(act, x - h).0) / (2.0 * h);
            assert!((numeric - twin::activation(act, x).1).abs() < 1e-8, "{act:?} at {x}");
        }
    }
}

#[test]
fn swiglu_matches_its_twin() {
    for (rows, i) in [(1, 1), (3, 19), (30, 700), (0, 4)] {
        let (x, dy) = (noise(rows * 2 * i, 1), noise(rows * i, 2));
        let mut d = x.clone();
        let y = activation::swiglu_forward(&x, rows, i);
        activation::swiglu_backward(&mut d, &dy, rows, i);
        close(&y, &twin::swiglu_forward(&wide(&x), rows, i), 1e-6);
        close(&d, &twin::swiglu_backward(&wide(&dy), &wide(&x), rows, i), 1e-6);
    }
    let (x, dy) = (wide(&noise(12, 1)), wide(&noise(6, 2)));
    let d = twin::swiglu_backward(&dy, &x, 2, 3);
    check_gradient(&x, &d, |x| dot(&twin::swiglu_forward(x, 2, 3), &dy));
}

#[test]
fn log_probabilities_match_their_twin() {
    // Several blocks of rows and of the vocabulary; rows with no, one and several targets.
    for (rows, h, v) in [(1, 4, 1), (3, 8, 37), (5, 16, 2500), (530, 12, 1025)] {
        let counts = |r: usize| [1, 3, 0, 1][r % 4];
        let mut offsets = vec![0];
        (0..rows).for_each(|r| offsets.push(offsets[r] + counts(r)));
        let n = offsets[rows];
        let targets: Vec<u32> = (0..n).map(|t| (t * 911 % v) as u32).collect();
        let (hidden, head) = (noise(rows * h, 1), noise(v * h, 2));
        let narrow_head: Vec<bf16> = head.iter().map(|&w| bf16::from_f32(w)).collect();
        let rounded: Vec<f32> = narrow_head.iter().map(|w| w.to_f32()).collect();
        let (dlogp, dentropy) = (noise(n, 3), noise(rows, 4));
        let t = 0.6;
        for (head, values) in [(Weight::F32(&head), &head), (Weight::Bf16(&narrow_head), &rounded)] {
            let (hidden64, head64) = (factor(&hidden, head.is_bf16()), wide(values));
            let (mut logp, mut entropy, mut lse) = (vec![9.0; n], vec![9.0; rows], vec![9.0; rows]);
            logprob::forward(
                &hidden,
                head,
                rows,
                h,
                v,
                &targets,
                &offsets,
                t,
                &mut logp,
                &mut entropy,
                &mut lse,
            );
            let t64 = f64::from(t);
            let (a, b, c) = twin::logprob_forward(&hidden64, &head64, rows, h, v, &targets, &offsets, t64);
            close(&logp, &a, 2e-6);
            close(&entropy, &b, 2e-6);
            close(&lse, &c, 2e-6);
            for dentropy in [None, Some(&dentropy[..])] {
                let (mut dhidden, mut dhead) = (vec![9.0; rows * h], vec![0.5; v * h]);
                logprob::backward(
                    &mut dhidden,
                    Some(&mut dhead),
                    &hidden,
                    head,
                    rows,
                    h,
                    v,
                    &targets,
                    &offsets,
                    &lse,
                    &entropy,
                    &dlogp,
                    dentropy,
                    t,
                );
                let mut dlogits = twin::logit_gradients(
                    &hidden64,
                    &head64,
                    rows,
                    h,
                    v,
                    &targets,
                    &offsets,
                    &wide(&dlogp),
                    dentropy.map(wide).as_deref(),
                    t64,
                );
                let mut bound = 5e-6;
                if head.is_bf16() && has_tiles() {
                    // A factor as well. Some of them lie so near the middle of two bf16 that the kernel takes the other.
                    dlogits = factor(&narrow(&dlogits), true);
                    bound = 2e-4;
                }
                let (d, e, _) = twin::linear_backward(&dlogits, &hidden64, &head64, rows, h, v);
                close(&dhidden, &d, bound);
                close(&dhead, &e.iter().map(|d| d + 0.5).collect::<Vec<_>>(), bound);
            }
        }
    }
}

#[test]
fn log_probability_twin_matches_central_differences() {
    let (rows, h, v, t) = (3, 4, 6, 0.7);
    let (targets, offsets) = ([1, 5, 0, 5], [0, 1, 1, 4]);
    let (hidden, head) = (wide(&noise(rows * h, 1)), wide(&noise(v * h, 2)));
    let (dlogp, dentropy) = (wide(&noise(4, 3)), wide(&noise(rows, 4)));
    let f = |hidden: &[f64], head: &[f64]| {
        let (logp, entropy, _) = twin::logprob_forward(hidden, head, rows, h, v, &targets, &offsets, t);
        dot(&logp, &dlogp) + dot(&entropy, &dentropy)
    };
    let (dhidden, dhead) =
        twin::logprob_backward(&hidden, &head, rows, h, v, &targets, &offsets, &dlogp, Some(&dentropy), t);
    check_gradient(&hidden, &dhidden, |x| f(x, &head));
    check_gradient(&head, &dhead, |w| f(&hidden, w));
}

#[test]
fn linear_twin_matches_central_differences() {
    let (m, k, n) = (2, 3, 4);
    let [x, w, b, dy] = [(6, 1), (12, 2), (4, 3), (8, 4)].map(|(n, seed)| wide(&noise(n, seed)));
    let f = |x: &[f64], w: &[f64], b: &[f64]| dot(&twin::linear_forward(x, w, Some(b), m, k, n), &dy);
    let (dx, dw, db) = twin::linear_backward(&dy, &x, &w, m, k, n);
    check_gradient(&x, &dx, |x| f(x, &w, &b));
    check_gradient(&w, &dw, |w| f(&x, w, &b));
    check_gradient(&b, &db, |b| f(&x, &w, b));
}

#[test]
fn embeddings_gather_and_scatter() {
    let (vocab, h) = (9, 21);
    let ids = [3, 0, 3, 8, 3];
    let table = noise(vocab * h, 1);
    let narrow_table: Vec<bf16> = table.iter().map(|&w| bf16::from_f32(w)).collect();
    let mut y = vec![0.0; ids.len() * h];
    embedding::gather(&mut y, Weight::F32(&table), &ids, h);
    assert_eq!(wide(&y), twin::gather(&wide(&table), &ids, h));
    embedding::gather(&mut y, Weight::Bf16(&narrow_table), &ids, h);
    assert_eq!(y[h], narrow_table[0].to_f32());
    let dy = noise(ids.len() * h, 2);
    let mut d = vec![0.5; vocab * h];
    embedding::scatter_add(&mut d, &dy, &ids, h);
    let expected: Vec<f64> = twin::scatter_add(&wide(&dy), &ids, vocab, h).iter().map(|d| d + 0.5).collect();
    close(&d, &expected, 1e-6);
    embedding::gather(&mut [], Weight::F32(&table), &[], h);
}

#[test]
fn scaled_residuals_match_their_twin() {
    for (rows, dim) in [(1, 1), (3, 7), (0, 4), (70, 65)] {
        let (x, r, s, dy) = (noise(rows * dim, 1), noise(rows * dim, 2), noise(dim, 3), noise(rows * dim, 4));
        let (x64, r64, s64, dy64) = (wide(&x), wide(&r), wide(&s), wide(&dy));
        let mut y = vec![0.0; rows * dim];
        scale::residual_forward(&mut y, &x, &r, &s);
        close(&y, &twin::scale_residual_forward(&x64, &r64, &s64), 1e-6);
        let (dx64, ds64) = twin::scale_residual_backward(&dy64, &x64, &s64);
        let (mut dx, mut ds) = (vec![0.0; rows * dim], vec![0.25; dim]);
        scale::residual_backward_input(&mut dx, &dy, &s);
        scale::residual_backward_scale(&mut ds, &dy, &x);
        close(&dx, &dx64, 1e-6);
        close(&ds, &ds64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 2e-6);
        let loss = |x: &[f64], s: &[f64]| dot(&dy64, &twin::scale_residual_forward(x, &r64, s));
        check_gradient(&x64, &dx64, |x| loss(x, &s64));
        check_gradient(&s64, &ds64, |s| loss(&x64, s));
    }
}

#[test]
fn mixed_rows_are_added_and_their_gradient_is_the_transpose() {
    let (vocab, h) = (5, 3);
    let table = noise(vocab * h, 1);
    let taps = vec![vec![(4, 1.0)], vec![], vec![(0, 0.25), (2, -0.5), (0, 1.5)]];
    let mut y = vec![1.0; 3 * h];
    embedding::add_mixed(&mut y, Weight::F32(&table), &taps, h);
    for j in 0..h {
        assert_eq!(y[j], 1.0 + table[4 * h + j]);
        assert_eq!(y[h + j], 1.0);
        assert!((y[2 * h + j] - (1.0 + 1.75 * table[j] - 0.5 * table[2 * h + j])).abs() <= 1e-6);
    }
    let half: Vec<bf16> = table.iter().map(|&x| bf16::from_f32(x)).collect();
    let mut y16 = vec![0.0; 3 * h];
    embedding::add_mixed(&mut y16, Weight::Bf16(&half), &taps, h);
    assert_eq!(y16[..h], half[4 * h..].iter().map(|x| x.to_f32()).collect::<Vec<_>>()[..]);

    let dy = noise(3 * h, 2);
    let mut dtable = vec![0.5; vocab * h];
    embedding::add_mixed_backward(&mut dtable, &dy, &taps, h);
    for j in 0..h {
        let expected = [1.75 * dy[2 * h + j], 0.0, -0.5 * dy[2 * h + j], 0.0, dy[j]];
        for (row, expected) in expected.iter().enumerate() {
            assert!((dtable[row * h + j] - 0.5 - expected).abs() <= 1e-6);
        }
    }
}

#[test]
fn adamw_matches_its_twin() {
    let n = 1003;
    let [mut w, mut m, mut v] = [noise(n, 1), vec![0.0; n], vec![0.0; n]];
    let [mut w64, mut m64, mut v64] = [&w, &m, &v].map(|x| wide(x));
    let f = |x: f32| f64::from(x);
    for step in 1..=5 {
        let g = noise(n, 10 + step as u32);
        optim::adamw(&mut w, &mut m, &mut v, &g, 0.01, 0.9, 0.99, 1e-8, 0.1, step, 0.3);
        twin::adamw(
            &mut w64,
            &mut m64,
            &mut v64,
            &wide(&g),
            f(0.01),
            f(0.9),
            f(0.99),
            f(1e-8),
            f(0.1),
            step,
            f(0.3),
        );
    }
    close(&w, &w64, 1e-6);
    close(&m, &m64, 1e-6);
    close(&v, &v64, 1e-6);
}

#[test]
fn sums_of_squares_are_exact_in_double_precision() {
    let x = noise(300_001, 1);
    let expected: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    assert!((optim::sum_of_squares(&x) / expected - 1.0).abs() < 1e-12);
    assert_eq!(optim::sum_of_squares(&[3.0, 4.0]), 25.0);
    assert_eq!(optim::sum_of_squares(&[]), 0.0);
}

#[test]
fn twins_match_pytorch() {
    let torch = torch();
    let case = &torch["layer_norm"];
    let (y, mean, rstd) = twin::layer_forward(&case["x"], &case["w"], &case["b"], 3, 10, 1e-5);
    close64(&y, &case["out"]);
    let (dx, dw, db) = twin::layer_backward(&case["dout"], &case["x"], &case["w"], &mean, &rstd, 3, 10);
    close64(&dx, &case["dx"]);
    close64(&dw, &case["dw"]);
    close64(&db, &case["db"]);

    let case = &torch["rms_norm"];
    let (y, rstd) = twin::rms_forward(&case["x"], &case["w"], 3, 10, 1e-6);
    close64(&y, &case["out"]);
    let (dx, dw) = twin::rms_backward(&case["dout"], &case["x"], &case["w"], &rstd, 3, 10);
    close64(&dx, &case["dx"]);
    close64(&dw, &case["dw"]);

    for act in ACTIVATIONS {
        let case = &torch[&format!("{act:?}")];
        let (y, dx): (Vec<f64>, Vec<f64>) = case["x"]
            .iter()
            .zip(&case["dout"])
            .map(|(&x, g)| (twin::activation(act, x).0, g * twin::activation(act, x).1))
            .unzip();
        close64(&y, &case["out"]);
        close64(&dx, &case["dx"]);
    }

    let case = &torch["attention"];
    let shape = Shape { q_heads: 4, kv_heads: 2, head_dim: 6 };
    let layout = AttentionLayout::causal(5);
    let (out, _) = twin::attention_forward(&case["q"], &case["k"], &case["v"], &layout, shape, 0.4);
    close64(&out, &case["out"]);
    let (dq, dk, dv) =
        twin::attention_backward(&case["dout"], &case["q"], &case["k"], &case["v"], &layout, shape, 0.4);
    close64(&dq, &case["dq"]);
    close64(&dk, &case["dk"]);
    close64(&dv, &case["dv"]);

    let case = &torch["logprob"];
    let (hidden, head) = (&case["hidden"], &case["head"]);
    let (targets, offsets) = ([4, 0, 10], [0, 1, 2, 3]);
    let (logp, entropy, _) = twin::logprob_forward(hidden, head, 3, 8, 11, &targets, &offsets, 0.7);
    close64(&[logp, entropy].concat(), &case["out"]);
    let (dlogp, dentropy) = case["dout"].split_at(3);
    let (dhidden, dhead) =
        twin::logprob_backward(hidden, head, 3, 8, 11, &targets, &offsets, dlogp, Some(dentropy), 0.7);
    close64(&dhidden, &case["dhidden"]);
    close64(&dhead, &case["dhead"]);

    let case = &torch["adamw"];
    let (mut w, mut m, mut v) = (case["w"].clone(), vec![0.0; 7], vec![0.0; 7]);
    let [mut w32, mut m32, mut v32] = [&w, &m, &v].map(|x| narrow(x));
    for (step, g) in (1..).zip(case["grads"].chunks_exact(7)) {
        twin::adamw(&mut w, &mut m, &mut v, g, 0.01, 0.9, 0.95, 1e-8, 0.1, step, 1.0);
        optim::adamw(&mut w32, &mut m32, &mut v32, &narrow(g), 0.01, 0.9, 0.95, 1e-8, 0.1, step, 1.0);
    }
    close64(&w, &case["out"]);
    close(&w32, &case["out"], 1e-6);
}
