//! Every kernel except attention, compared with its f64 twin and with PyTorch, and the independence of its bits.

use std::collections::HashMap;

use crate::common::{check_gradient, close, dot, noise, wide, with_threads};
use half::bf16;
use omnigrpo_kernels::activation::{self, Activation};
use omnigrpo_kernels::attention::{AttentionLayout, Qkv, Shape};
use omnigrpo_kernels::conv::RowMix;
use omnigrpo_kernels::experts::{self, Choices, Groups};
use omnigrpo_kernels::linear::{Gradient, Layer};
use omnigrpo_kernels::logprob::{Head, Scores, Statistics, Targets};
use omnigrpo_kernels::moments::{Codes, Form};
use omnigrpo_kernels::optim::{AdamW, Rounding, Updated};
use omnigrpo_kernels::paths::Path;
use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
use omnigrpo_kernels::{
    Mat, MatMut, Stored, Top, Weight, embedding, linear, logprob, norm, optim, rope, scale, twin,
};

const ACTIVATIONS: [Activation; 4] =
    [Activation::Silu, Activation::GeluErf, Activation::GeluTanh, Activation::QuickGelu];

type Case = HashMap<String, Vec<f64>>;

fn torch() -> HashMap<String, Case> {
    serde_json::from_str(include_str!("data/torch.json")).unwrap()
}

/// Returns a bf16 weight with the arithmetic of this program.
fn bf16_weight(w: &[bf16], n: usize, k: usize) -> Weight<'_> {
    Weight::bf16(w, n, k).with(crate::arithmetic())
}

/// Returns the rounding of a gradient, by the dtype of its weight.
fn rounding(bf16: bool) -> Option<Path> {
    bf16.then(|| crate::arithmetic().path())
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

fn close64(got: &[f64], expected: &[f64]) {
    for (g, e) in got.iter().zip(expected) {
        assert!((g - e).abs() <= 1e-12 * e.abs().max(1.0), "{g}, expected {e}");
    }
}

/// Copies contiguous rows to a larger stride; the gaps hold NaN.
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

/// Returns the factors that a product with such a weight multiplies: instructions for bf16 take only bf16.
fn factor(x: &[f32], bf16_weight: bool) -> Vec<f64> {
    if bf16_weight && crate::arithmetic().rounds_bf16() {
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
        let (x_wide, dy_wide) =
            (Mat::new(&x_wide, m, xs).columns(0..k), Mat::new(&dy_wide, m, ys).columns(0..n));
        for (w, values) in [(Weight::f32(&w, n, k), &w), (bf16_weight(&narrow_w, n, k), &rounded)] {
            let bf16 = w.is_bf16();
            let (x64, w64, dy64) = (factor(&x, bf16), wide(values), factor(&dy, bf16));
            let (x64, w64) = (Mat::new(&x64, m, k), Mat::new(&w64, n, k));
            for bias in [None, Some(&bias[..])] {
                let expected = twin::linear_forward(x64, w64, bias.map(wide).as_deref());
                for kernel in [linear::forward_into, linear::forward_rows_into] {
                    let mut y = vec![7.0; m * ys];
                    kernel(x_wide, &[Layer { w, bias }], false, MatMut::new(&mut y, m, ys).columns(0..n));
                    // A chain of up to 512 multiply-adds in f32.
                    close(&unspread(&y, m, n, ys), &expected, 2e-6);
                    assert!((0..m).all(|i| y[i * ys + n..(i + 1) * ys] == [7.0, 7.0]), "gap columns stay");
                    let mut y = vec![0.5; m * ys];
                    kernel(x_wide, &[Layer { w, bias }], true, MatMut::new(&mut y, m, ys).columns(0..n));
                    let added: Vec<f64> = expected.iter().map(|y| y + 0.5).collect();
                    close(&unspread(&y, m, n, ys), &added, 2e-6);
                }
            }
            let (dx64, dw64, _) = twin::linear_backward(Mat::new(&dy64, m, n), x64, w64);
            let db64 = twin::linear_backward(Mat::new(&wide(&dy), m, n), x64, w64).2;
            for accumulate in [false, true] {
                let mut dx = vec![0.5; m * xs];
                let to = MatMut::new(&mut dx, m, xs).columns(0..k);
                linear::backward_input_into(dy_wide, &[Layer::new(w)], accumulate, to);
                let start = if accumulate { 0.5 } else { 0.0 };
                close(&unspread(&dx, m, k, xs), &dx64.iter().map(|d| d + start).collect::<Vec<_>>(), 2e-6);
            }
            let (mut dw, mut db) = (vec![0.25; n * k], vec![0.25; n]);
            let mut gradient =
                [Gradient { dw: MatMut::new(&mut dw, n, k), col: 0, rounding: rounding(bf16) }];
            linear::backward_weight(dy_wide, x_wide, &mut gradient);
            linear::backward_bias(dy_wide, &mut db);
            close(&dw, &dw64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 2e-6);
            close(&db, &db64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 2e-6);
        }
    }
}

#[test]
fn layers_with_one_input_are_one_call() {
    // Different dtypes and widths, outputs side by side, and more rows than one pass of packed gradients holds.
    let (m, k, widths) = (700, 40, [37usize, 8, 3000]);
    let n: usize = widths.iter().sum();
    let (x, dy) = (noise(m * k, 1), noise(m * n, 2));
    let weights: Vec<Vec<f32>> = (3..).zip(widths).map(|(seed, n)| noise(n * k, seed)).collect();
    let narrow_w: Vec<bf16> = weights[1].iter().map(|&w| bf16::from_f32(w)).collect();
    let w = |i: usize| match i {
        1 => bf16_weight(&narrow_w, widths[1], k),
        i => Weight::f32(&weights[i], widths[i], k),
    };
    let bias = noise(37, 9);
    let layers: Vec<Layer> = (0..3).map(|i| Layer { w: w(i), bias: (i == 0).then_some(&bias[..]) }).collect();
    let (x64, x, dy) = (&x, Mat::new(&x, m, k), Mat::new(&dy, m, n));
    for kernel in [linear::forward_into, linear::forward_rows_into] {
        let mut y = vec![0.0; m * n];
        kernel(x, &layers, false, MatMut::new(&mut y, m, n));
        let mut col = 0;
        for (layer, n_own) in layers.iter().zip(widths) {
            let mut alone = vec![0.0; m * n_own];
            kernel(x, std::slice::from_ref(layer), false, MatMut::new(&mut alone, m, n_own));
            let own = Mat::new(&y, m, n).columns(col..col + n_own);
            assert!((0..m).all(|i| alone[i * n_own..(i + 1) * n_own] == *own.row(i)));
            col += n_own;
        }
    }
    let mut dx = vec![0.0; m * k];
    linear::backward_input_into(dy, &layers, false, MatMut::new(&mut dx, m, k));
    let mut dws = widths.map(|n| vec![0.5; n * k]);
    let cols = [0, 37, 45];
    let mut gradients: Vec<Gradient> = dws
        .iter_mut()
        .enumerate()
        .map(|(i, dw)| Gradient {
            dw: MatMut::new(dw, widths[i], k),
            col: cols[i],
            rounding: w(i).rounding(),
        })
        .collect();
    linear::backward_weight(dy, x, &mut gradients);
    let mut dx64 = vec![0.0; m * k];
    for i in 0..3 {
        let bf16 = w(i).is_bf16();
        let own = dy.columns(cols[i]..cols[i] + widths[i]);
        let part: Vec<f64> = (0..m).flat_map(|r| factor(own.row(r), bf16)).collect();
        let w64: Vec<f64> = match w(i).stored() {
            Stored::F32(w) => wide(w),
            Stored::Bf16(w) => w.iter().map(|w| w.to_f64()).collect(),
            Stored::Quantised(_) => unreachable!("not among these"),
        };
        let x64 = factor(x64, bf16);
        let (part, w64) = (Mat::new(&part, m, widths[i]), Mat::new(&w64, widths[i], k));
        let (dx, dw, _) = twin::linear_backward(part, Mat::new(&x64, m, k), w64);
        dx64.iter_mut().zip(dx).for_each(|(sum, d)| *sum += d);
        close(&dws[i], &dw.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 1e-5);
    }
    close(&dx, &dx64, 1e-5);
}

/// More rows than are packed at a time, and a long inner size, which is divided into rounds.
#[test]
fn many_rows_and_long_sums_match_their_twin() {
    let (m, k, n) = (2100, 3300, 24);
    let (x, w, dy, bias) = (noise(m * k, 1), noise(n * k, 2), noise(k * m, 3), noise(n, 4));
    let narrow_w: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
    let rounded: Vec<f32> = narrow_w.iter().map(|w| w.to_f32()).collect();
    for (w, values) in [(Weight::f32(&w, n, k), &w), (bf16_weight(&narrow_w, n, k), &rounded)] {
        let run = |x: Mat| linear::forward(x, &[Layer { w, bias: Some(&bias) }]);
        let all = Mat::new(&x, m, k);
        let y = run(all);
        let (x64, w64) = (factor(&x, w.is_bf16()), wide(values));
        let expected = twin::linear_forward(Mat::new(&x64, m, k), Mat::new(&w64, n, k), Some(&wide(&bias)));
        close(&y, &expected, 6e-6);
        assert_eq!(run(all.row_range(2040..m)), y[2040 * n..], "the last rows alone");
    }
    // Gradient dw [m, n] from m columns of dy, a sum over k rows.
    let x = noise(k * n, 4);
    for bf16 in [false, true] {
        let mut dw = vec![0.0; m * n];
        let mut gradients = [Gradient { dw: MatMut::new(&mut dw, m, n), col: 0, rounding: rounding(bf16) }];
        linear::backward_weight(Mat::new(&dy, k, m), Mat::new(&x, k, n), &mut gradients);
        let (dy, x, w) = (factor(&dy, bf16), factor(&x, bf16), wide(&noise(m * n, 5)));
        let (dy, x, w) = (Mat::new(&dy, k, m), Mat::new(&x, k, n), Mat::new(&w, m, n));
        close(&dw, &twin::linear_backward(dy, x, w).1, 6e-6);
    }
}

/// Few rows whose sums have several blocks, the last of one element or of many.
#[test]
fn few_long_rows_match_their_twin() {
    for (k, n) in [(2049, 13), (4100, 7), (2048, 1)] {
        let (x, w, bias) = (noise(9 * k, 1), noise(n * k, 2), noise(n, 3));
        let narrow_w: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
        let rounded: Vec<f32> = narrow_w.iter().map(|w| w.to_f32()).collect();
        for (w, values) in [(Weight::f32(&w, n, k), &w), (bf16_weight(&narrow_w, n, k), &rounded)] {
            let run = |m: usize| {
                let mut y = vec![0.5; m * n];
                let x = Mat::new(&x[..m * k], m, k);
                let layers = [Layer { w, bias: Some(&bias) }];
                linear::forward_rows_into(x, &layers, true, MatMut::new(&mut y, m, n));
                y
            };
            let (x64, w64) = (factor(&x, w.is_bf16()), wide(values));
            let exact = twin::linear_forward(Mat::new(&x64, 9, k), Mat::new(&w64, n, k), Some(&wide(&bias)));
            let all = run(9);
            close(&all, &exact.iter().map(|y| y + 0.5).collect::<Vec<_>>(), 6e-6);
            for m in [1, 2, 3, 5, 8] {
                assert_eq!(run(m), all[..m * n], "{m} rows of {k}");
            }
        }
    }
}

/// Layers of all kinds in one call, some of them rows of a weight that begin and end inside a panel, have the bits of
/// separate calls.
#[test]
fn layers_of_any_kind_equal_separate_calls() {
    fn part(matrix: &QuantMatrix, from: usize, to: usize) -> Weight<'_> {
        matrix.rows().rows(from, to).into()
    }
    let (k, n) = (640, 83);
    let w = noise(n * k, 1);
    let bias = noise(n, 2);
    let narrow: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
    let [eight, four] = [QuantBits::Eight, QuantBits::Four].map(|bits| quantised(bits, &w, n, k));
    let layers = [
        Layer { w: part(&eight, 0, n), bias: Some(&bias[..]) },
        Layer { w: part(&eight, 5, 37), bias: None },
        Layer { w: Weight::f32(&w, n, k), bias: None },
        Layer { w: bf16_weight(&narrow, n, k), bias: Some(&bias[..]) },
        Layer { w: part(&four, 0, 21), bias: Some(&bias[..21]) },
        Layer { w: part(&four, 21, 32), bias: None },
        Layer { w: part(&four, 32, 33), bias: Some(&bias[..1]) },
        Layer { w: part(&eight, 82, 83), bias: None },
    ];
    let total: usize = layers.iter().map(|layer| layer.w.dims().0).sum();
    for (m, threads) in [(1, 1), (3, 2), (8, 4), (11, 2)] {
        let x = noise(m * k, 3);
        let x = Mat::new(&x, m, k);
        for accumulate in [false, true] {
            let run = |layers: &[Layer], width: usize| {
                // Two more columns, which stay unchanged.
                let mut y = vec![0.25; m * (width + 2)];
                let to = MatMut::new(&mut y, m, width + 2).columns(0..width);
                with_threads(threads, || linear::forward_rows_into(x, layers, accumulate, to));
                y
            };
            let all = run(&layers, total);
            let mut first = 0;
            for (at, layer) in layers.iter().enumerate() {
                let n = layer.w.dims().0;
                let own = run(&[*layer], n);
                for i in 0..m {
                    let of_all = &all[i * (total + 2) + first..][..n];
                    assert_eq!(of_all, &own[i * (n + 2)..][..n], "layer {at}, row {i} of {m}, {accumulate}");
                }
                first += n;
            }
            assert!((0..m).all(|i| all[i * (total + 2) + total..][..2] == [0.25; 2]), "gap columns stay");
        }
    }
}

fn quantised(bits: QuantBits, w: &[f32], n: usize, k: usize) -> QuantMatrix {
    QuantMatrix::from_rows(bits, n, k, |i, row| row.copy_from_slice(&w[i * k..(i + 1) * k])).unwrap()
}

/// Outputs and input gradients in uninitialised memory have the same bits as in given memory full of NaN.
#[test]
fn returned_memory_is_written_completely() {
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
            eight.rows().into(),
            bf16_weight(&narrow_w, widths[1], k),
            Weight::f32(&weights[2], widths[2], k),
            four.rows().into(),
        ];
        let bias = noise(widths[2], 9);
        let layers: Vec<Layer> =
            (0..4).map(|i| Layer { w: of[i], bias: (i == 2).then_some(&bias[..]) }).collect();
        let (x, dy) = (noise(m * k, 1), noise(m * n, 2));
        let (x, dy) = (Mat::new(&x, m, k), Mat::new(&dy, m, n));
        let (mut y, mut dx) = (vec![f32::NAN; m * n], vec![f32::NAN; m * k]);
        linear::forward_into(x, &layers, false, MatMut::new(&mut y, m, n));
        linear::backward_input_into(dy, &layers, false, MatMut::new(&mut dx, m, k));
        assert!(y.iter().chain(&dx).all(|x| x.is_finite()), "{m}x{k}, {widths:?}");
        assert_eq!(linear::forward(x, &layers), y);
        assert_eq!(linear::backward_input(dy, &layers), dx);
    }
}

/// Rows and weights of very different magnitude: the error is relative to the sum of absolute products.
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
    let want = twin::linear_forward(Mat::new(&wide(&x), m, k), Mat::new(&wide(&w), n, k), None);
    let size = twin::linear_forward(Mat::new(&abs(&x), m, k), Mat::new(&abs(&w), n, k), None);
    for kernel in [linear::forward_into, linear::forward_rows_into] {
        let mut y = vec![0.0; m * n];
        let layers = [Layer::new(Weight::f32(&w, n, k))];
        kernel(Mat::new(&x, m, k), &layers, false, MatMut::new(&mut y, m, n));
        for ((y, want), size) in y.iter().zip(&want).zip(&size) {
            let error = (f64::from(*y) - want).abs() / size;
            assert!(error < 1e-6, "{y} for {want}: {error} of {size}");
        }
    }
    // NaN and infinity with any bits make the outputs of their own row non-finite, and no others.
    let narrow_w: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
    for bits in [0x7fc0_0000, 0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0x7f80_0000] {
        let mut x = noise(m * k, 1);
        x[5 * k + 7] = f32::from_bits(bits);
        for w in [Weight::f32(&w, n, k), bf16_weight(&narrow_w, n, k)] {
            for kernel in [linear::forward_into, linear::forward_rows_into] {
                let mut y = vec![0.0; m * n];
                kernel(Mat::new(&x, m, k), &[Layer::new(w)], false, MatMut::new(&mut y, m, n));
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
    for w in [Weight::f32(&w, n, k), bf16_weight(&narrow_w, n, k)] {
        for kernel in [linear::forward_into, linear::forward_rows_into] {
            let run = |first: usize, m: usize| {
                let mut y = vec![0.0; m * n];
                let x = Mat::new(&x, rows, k).row_range(first..first + m);
                kernel(x, &[Layer { w, bias: Some(&bias) }], false, MatMut::new(&mut y, m, n));
                y
            };
            let all = run(0, rows);
            for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 17, 33, 64] {
                for first in [0, rows - m] {
                    assert_eq!(run(first, m), all[first * n..(first + m) * n], "{m} rows from {first}");
                }
            }
        }
    }
}

/// Runs all kernels that may use threads, on sizes that do.
/// Returns what kernels compute from `m` rows of `k` columns, with layers of `n` outputs and a vocabulary of `v`.
pub fn everything(m: usize, k: usize, n: usize, v: usize) -> Vec<Vec<f32>> {
    let (x, w, dy) = (noise(m * k, 1), noise(n * k, 2), noise(m * n, 3));
    let half: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
    let (x, dy) = (Mat::new(&x, m, k), Mat::new(&dy, m, n));
    let mut out = Vec::new();
    for w in [Weight::f32(&w, n, k), bf16_weight(&half, n, k)] {
        let (mut rows, layers) = (vec![0.0; m * n], [Layer::new(w)]);
        linear::forward_rows_into(x, &layers, false, MatMut::new(&mut rows, m, n));
        out.extend([linear::forward(x, &layers), rows, linear::backward_input(dy, &layers)]);
    }
    for bf16 in [false, true] {
        let mut dw = vec![0.0; n * k];
        let gradient = Gradient { dw: MatMut::new(&mut dw, n, k), col: 0, rounding: rounding(bf16) };
        linear::backward_weight(dy, x, &mut [gradient]);
        out.push(dw);
    }
    let mut db = vec![0.0; n];
    linear::backward_bias(dy, &mut db);
    out.push(db);
    let weight = noise(k, 4);
    let mut dx = vec![0.0; m * k];
    let [mut dw, mut db] = [0; 2].map(|_| vec![0.0; k]);
    let (y, stats) = norm::layer_forward(x, &weight, &weight, 1e-5);
    let to = MatMut::new(&mut dx, m, k);
    norm::layer_backward(Mat::new(&y, m, k), x, &weight, &stats, to, Some(&mut dw), Some(&mut db));
    let a = activation::forward(&noise(m * k, 1), Activation::GeluErf);
    out.extend([y, dx, dw, db, a]);
    let head = noise(v * k, 5);
    let tokens: Vec<u32> = (0..m as u32).map(|i| i * 9 % v as u32).collect();
    let offsets: Vec<usize> = (0..=m).collect();
    let targets = Targets { tokens: &tokens, offsets: &offsets };
    let own = Head { weight: Weight::f32(&head, v, k), temperature: 0.9 };
    let (Scores { logp, entropy, lse }, most) =
        logprob::forward_top(x, own, targets, Top { k: 20, below: v });
    out.push(most.into_iter().flat_map(|(id, logp)| [id as f32, logp]).collect());
    let gradient = logprob::Gradient { logp: &noise(m, 3), entropy: None };
    let (stats, mut dhead) = (Statistics { entropy: &entropy, lse: &lse }, vec![0.0; v * k]);
    let dh = logprob::backward(gradient, x, own, targets, stats, Some(MatMut::new(&mut dhead, v, k)));
    let mut table = vec![0.0; 500 * k];
    let ids = RowMix::select(tokens.iter().map(|t| t % 7).collect());
    embedding::add_rows_backward(x, &ids, &mut table);
    let squares = optim::sum_of_squares(&head);
    out.extend([logp, entropy, lse, dh, dhead, table, vec![squares as f32]]);
    out
}

/// The most probable tokens come with the log-probabilities that targets have, and change no bit of those.
#[test]
fn the_most_probable_tokens_match_their_twin() {
    for (rows, h, vocab, k, below) in [
        (1, 8, 5, 5, 5),
        (3, 24, 3000, 64, 3000),
        (600, 16, 1030, 7, 1030),
        (2, 4, 9, 1, 9),
        (5, 8, 3000, 40, 1025),
    ] {
        let top = Top { k, below };
        let (x, head) = (noise(rows * h, 1), noise(vocab * h, 2));
        let (hidden, own) =
            (Mat::new(&x, rows, h), Head { weight: Weight::f32(&head, vocab, h), temperature: 0.8 });
        let offsets: Vec<usize> = (0..=rows).collect();
        let tokens: Vec<u32> = (0..rows as u32).map(|i| i * 9 % vocab as u32).collect();
        let plain = logprob::forward(hidden, own, Targets { tokens: &tokens, offsets: &offsets });
        let (scores, most) =
            logprob::forward_top(hidden, own, Targets { tokens: &tokens, offsets: &offsets }, top);
        assert_eq!((&scores.logp, &scores.entropy, &scores.lse), (&plain.logp, &plain.entropy, &plain.lse));
        assert_eq!(most.len(), rows * k);
        assert!(most.iter().all(|(id, _)| (*id as usize) < below));
        // The tokens have the same log-probabilities as targets.
        let (ids, logp): (Vec<u32>, Vec<f32>) = most.iter().copied().unzip();
        let each: Vec<usize> = (0..=rows).map(|row| row * k).collect();
        let targets = Targets { tokens: &ids, offsets: &each };
        assert_eq!(logprob::forward(hidden, own, targets).logp, logp);
        let (x, head) = (wide(&x), wide(&head));
        let twin = twin::most_probable(Mat::new(&x, rows, h), Mat::new(&head, vocab, h), 0.8, top);
        for (at, (got, want)) in most.iter().zip(twin).enumerate() {
            // Tokens that are almost equally probable may change places.
            let far = (f64::from(got.1) - want.1).abs();
            assert!(far <= 2e-5 * crate::choose_instructions(), "{vocab} tokens, {at}: {got:?} for {want:?}");
        }
    }
}

#[test]
fn threads_do_not_change_bits() {
    let of = |threads| with_threads(threads, || everything(300, 160, 192, 3000));
    let one = of(1);
    assert_eq!(one, of(2));
    assert_eq!(one, of(5));
}

#[test]
fn norms_match_their_twins() {
    for (rows, dim) in [(1, 1), (3, 17), (5, 64), (40, 515), (0, 8)] {
        let (x, dy) = (noise(rows * dim, 1), noise(rows * dim, 2));
        let (weight, bias) = (noise(dim, 3), noise(dim, 4));
        let [x64, dy64, w64, b64] = [&x, &dy, &weight, &bias].map(|x| wide(x));
        let [x, dy] = [&x, &dy].map(|x| Mat::new(x, rows, dim));
        let [x64, dy64] = [&x64, &dy64].map(|x| Mat::new(x, rows, dim));
        let mut dx = vec![0.25; rows * dim];
        let more = |dx: &[f64]| dx.iter().map(|d| d + 0.25).collect::<Vec<_>>();
        let [mut dw, mut db] = [0; 2].map(|_| vec![0.5; dim]);
        let eps = 1e-3;

        let (y64, stats64) = twin::rms_forward(x64, &w64, f64::from(eps));
        let (y, stats) = norm::rms_forward(x, &weight, eps);
        close(&y, &y64, 1e-6);
        close(&stats, &stats64, 1e-6);
        let (dx64, dw64) = twin::rms_backward(dy64, x64, &w64, &stats64);
        norm::rms_backward(dy, x, &weight, &stats, MatMut::new(&mut dx, rows, dim), Some(&mut dw));
        close(&dx, &more(&dx64), 2e-6);
        close(&dw, &dw64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
        dx.fill(0.25);

        let (y64, stats64) = twin::layer_forward(x64, &w64, &b64, f64::from(eps));
        let (y, stats) = norm::layer_forward(x, &weight, &bias, eps);
        close(&y, &y64, 2e-6);
        close(&stats[..rows], &stats64[..rows], 1e-6);
        close(&stats[rows..], &stats64[rows..], 1e-6);
        let (dx64, dw64, db64) = twin::layer_backward(dy64, x64, &w64, &stats64);
        let mut dw = vec![0.5; dim];
        let to = MatMut::new(&mut dx, rows, dim);
        norm::layer_backward(dy, x, &weight, &stats, to, Some(&mut dw), Some(&mut db));
        close(&dx, &more(&dx64), 3e-6);
        close(&dw, &dw64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
        close(&db, &db64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
    }
}

#[test]
fn norm_twins_match_central_differences() {
    let eps = 1e-3;
    let [x, dy] = [1, 2].map(|seed| wide(&noise(10, seed)));
    let [w, b] = [3, 4].map(|seed| wide(&noise(5, seed)));
    fn rows(x: &[f64]) -> Mat<'_, f64> {
        Mat::new(x, 2, 5)
    }
    let rms = |x: &[f64], w: &[f64]| dot(&twin::rms_forward(rows(x), w, eps).0, &dy);
    let (_, stats) = twin::rms_forward(rows(&x), &w, eps);
    let (dx, dw) = twin::rms_backward(rows(&dy), rows(&x), &w, &stats);
    check_gradient(&x, &dx, |x| rms(x, &w));
    check_gradient(&w, &dw, |w| rms(&x, w));
    let layer = |x: &[f64], w: &[f64], b: &[f64]| dot(&twin::layer_forward(rows(x), w, b, eps).0, &dy);
    let (_, stats) = twin::layer_forward(rows(&x), &w, &b, eps);
    let (dx, dw, db) = twin::layer_backward(rows(&dy), rows(&x), &w, &stats);
    check_gradient(&x, &dx, |x| layer(x, &w, &b));
    check_gradient(&w, &dw, |w| layer(&x, w, &b));
    check_gradient(&b, &db, |b| layer(&x, &w, b));
}

/// Rotation of whole heads, and of the first six of ten columns of each head.
#[test]
fn rope_rotates_and_its_inverse_is_the_transpose() {
    let (rows, heads, d, stride, col) = (3, 2, 10, 27, 4);
    for half in [5, 3] {
        let angles = noise(rows * half, 1);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        let x = noise(rows * stride, 2);
        let columns = col..col + heads * d;
        let (cos64, sin64, x64) = (wide(&cos), wide(&sin), wide(&x));
        let [c64, s64] = [&cos64, &sin64].map(|x| Mat::new(x, rows, half));
        let [cos, sin] = [&cos, &sin].map(|x| Mat::new(x, rows, half));
        for inverse in [false, true] {
            let mut y = x.clone();
            rope::apply(cos, sin, inverse, MatMut::new(&mut y, rows, stride).columns(columns.clone()), d);
            let got = Mat::new(&y, rows, stride).columns(columns.clone());
            let window: Vec<f32> = (0..rows).flat_map(|r| got.row(r)).copied().collect();
            let x64 = Mat::new(&x64, rows, stride).columns(columns.clone());
            close(&window, &twin::rope(c64, s64, inverse, x64, d), 1e-6);
            for r in 0..rows {
                for i in 0..stride {
                    let in_head = columns.contains(&i) && (i - col) % d < 2 * half;
                    assert!(in_head || y[r * stride + i] == x[r * stride + i], "column {i} is outside");
                }
            }
        }
        // The inverse is the transpose: ⟨g, R x⟩ = ⟨Rᵀ g, x⟩.
        let [x, g] = [3, 4].map(|seed| wide(&noise(rows * heads * d, seed)));
        let turned = |x: &[f64], inverse| twin::rope(c64, s64, inverse, Mat::new(x, rows, heads * d), d);
        assert!((dot(&g, &turned(&x, false)) - dot(&x, &turned(&g, true))).abs() < 1e-12);
    }
    // One rotation by a right angle, computed by hand: (a, b) → (−b, a). The last column is not rotated.
    let mut y = [1.0, 2.0, 3.0, 4.0, 5.0];
    let (cos, sin) = (Mat::new(&[0.0, 1.0], 1, 2), Mat::new(&[1.0, 0.0], 1, 2));
    rope::apply(cos, sin, false, MatMut::new(&mut y, 1, 5), 5);
    assert_eq!(y, [-3.0, 2.0, 1.0, 4.0, 5.0]);
}

#[test]
fn activations_match_their_twins() {
    let mut x: Vec<f32> = (0..4001).map(|i| (i as f32 - 2000.0) / 160.0).collect();
    x.extend([0.0, -0.0, 1e-20, -1e-20, 40.0, -40.0, 90.0, -90.0, 1e4, -1e4]);
    let dy = noise(x.len(), 1);
    for act in ACTIVATIONS {
        let mut dx = x.clone();
        let y = activation::forward(&x, act);
        activation::backward(&dy, act, &mut dx);
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
        assert!(activation::forward(&[f32::NAN], act)[0].is_nan());
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
        let y = activation::swiglu_forward(Mat::new(&x, rows, 2 * i));
        activation::swiglu_backward(Mat::new(&dy, rows, i), MatMut::new(&mut d, rows, 2 * i));
        let mut both = x.clone();
        let again = activation::swiglu_both(Mat::new(&dy, rows, i), MatMut::new(&mut both, rows, 2 * i));
        assert_eq!((&again, &both), (&y, &d), "{rows}×{i}");
        let (x64, dy64) = (wide(&x), wide(&dy));
        let (x64, dy64) = (Mat::new(&x64, rows, 2 * i), Mat::new(&dy64, rows, i));
        close(&y, &twin::swiglu_forward(x64), 1e-6);
        close(&d, &twin::swiglu_backward(dy64, x64), 1e-6);
    }
    let (x, dy) = (wide(&noise(12, 1)), wide(&noise(6, 2)));
    let d = twin::swiglu_backward(Mat::new(&dy, 2, 3), Mat::new(&x, 2, 6));
    check_gradient(&x, &d, |x| dot(&twin::swiglu_forward(Mat::new(x, 2, 6)), &dy));
}

#[test]
fn log_probabilities_match_their_twin() {
    // Several blocks of rows and of the vocabulary; rows with no, one and several targets.
    for (rows, h, v) in [(1, 4, 1), (3, 8, 37), (5, 16, 2500), (530, 12, 1025)] {
        let counts = |r: usize| [1, 3, 0, 1][r % 4];
        let mut offsets = vec![0];
        (0..rows).for_each(|r| offsets.push(offsets[r] + counts(r)));
        let n = offsets[rows];
        let tokens: Vec<u32> = (0..n).map(|t| (t * 911 % v) as u32).collect();
        let targets = Targets { tokens: &tokens, offsets: &offsets };
        let (hidden, head) = (noise(rows * h, 1), noise(v * h, 2));
        let narrow_head: Vec<bf16> = head.iter().map(|&w| bf16::from_f32(w)).collect();
        let rounded: Vec<f32> = narrow_head.iter().map(|w| w.to_f32()).collect();
        let (dlogp, dentropy) = (noise(n, 3), noise(rows, 4));
        let (dlogp64, dentropy64) = (wide(&dlogp), wide(&dentropy));
        let temperature = 0.6;
        let t64 = f64::from(temperature);
        for (weight, values) in
            [(Weight::f32(&head, v, h), &head), (bf16_weight(&narrow_head, v, h), &rounded)]
        {
            let (head, bf16) = (Head { weight, temperature }, weight.is_bf16());
            let (hidden64, head64) = (factor(&hidden, bf16), wide(values));
            let (hidden, hidden64) = (Mat::new(&hidden, rows, h), Mat::new(&hidden64, rows, h));
            let head64 = Mat::new(&head64, v, h);
            let Scores { logp, entropy, lse } = logprob::forward(hidden, head, targets);
            let want = twin::logprob_forward(hidden64, head64, targets, t64);
            close(&logp, &want.logp, 2e-6);
            close(&entropy, &want.entropy, 2e-6);
            close(&lse, &want.lse, 2e-6);
            for with_entropy in [false, true] {
                let own = with_entropy.then_some(&dentropy[..]);
                let gradient = logprob::Gradient { logp: &dlogp, entropy: own };
                let (stats, mut dhead) = (Statistics { entropy: &entropy, lse: &lse }, vec![0.5; v * h]);
                let to = Some(MatMut::new(&mut dhead, v, h));
                let dhidden = logprob::backward(gradient, hidden, head, targets, stats, to);
                let own = with_entropy.then_some(&dentropy64[..]);
                let gradient = logprob::Gradient { logp: &dlogp64, entropy: own };
                let mut dlogits = twin::logit_gradients(gradient, hidden64, head64, targets, t64);
                let mut bound = 5e-6;
                if bf16 && crate::arithmetic().rounds_bf16() {
                    // The gradient is a factor too. Some elements are so near the middle of two bf16 that the kernel
                    // takes the other one.
                    dlogits = factor(&narrow(&dlogits), true);
                    bound = 2e-4;
                }
                let (d, e, _) = twin::linear_backward(Mat::new(&dlogits, rows, v), hidden64, head64);
                close(&dhidden, &d, bound);
                close(&dhead, &e.iter().map(|d| d + 0.5).collect::<Vec<_>>(), bound);
            }
        }
    }
}

#[test]
fn log_probability_twin_matches_central_differences() {
    let targets = Targets { tokens: &[1, 5, 0, 5], offsets: &[0, 1, 1, 4] };
    let (hidden, head) = (wide(&noise(12, 1)), wide(&noise(24, 2)));
    let (dlogp, dentropy) = (wide(&noise(4, 3)), wide(&noise(3, 4)));
    let f = |hidden: &[f64], head: &[f64]| {
        let (hidden, head) = (Mat::new(hidden, 3, 4), Mat::new(head, 6, 4));
        let scores = twin::logprob_forward(hidden, head, targets, 0.7);
        dot(&scores.logp, &dlogp) + dot(&scores.entropy, &dentropy)
    };
    let gradient = logprob::Gradient { logp: &dlogp, entropy: Some(&dentropy) };
    let (rows, weight) = (Mat::new(&hidden, 3, 4), Mat::new(&head, 6, 4));
    let (dhidden, dhead) = twin::logprob_backward(gradient, rows, weight, targets, 0.7);
    check_gradient(&hidden, &dhidden, |x| f(x, &head));
    check_gradient(&head, &dhead, |w| f(&hidden, w));
}

#[test]
fn linear_twin_matches_central_differences() {
    let [x, w, b, dy] = [(6, 1), (12, 2), (4, 3), (8, 4)].map(|(n, seed)| wide(&noise(n, seed)));
    fn operands<'a>(x: &'a [f64], w: &'a [f64]) -> (Mat<'a, f64>, Mat<'a, f64>) {
        (Mat::new(x, 2, 3), Mat::new(w, 4, 3))
    }
    let f = |x: &[f64], w: &[f64], b: &[f64]| {
        let (x, w) = operands(x, w);
        dot(&twin::linear_forward(x, w, Some(b)), &dy)
    };
    let (rows, weight) = operands(&x, &w);
    let (dx, dw, db) = twin::linear_backward(Mat::new(&dy, 2, 4), rows, weight);
    check_gradient(&x, &dx, |x| f(x, &w, &b));
    check_gradient(&w, &dw, |w| f(&x, w, &b));
    check_gradient(&b, &db, |b| f(&x, &w, b));
}

/// Experts without places, with one and with many; the bits of a place do not depend on other places, nor on whether an expert has few
/// rows or many.
#[test]
fn experts_match_their_twins() {
    for (counts, k, n) in [
        (vec![0, 1, 0], 1, 1),
        (vec![3, 0, 1, 7], 5, 9),
        (vec![40, 17, 0, 1, 25], 33, 70),
        (vec![0, 0], 4, 4),
        (vec![130, 6], 545, 35),
        (vec![20, 3], 1700, 67),
        (vec![16, 9, 1], 70, 600),
    ] {
        let mut offsets = vec![0];
        counts.iter().for_each(|count| offsets.push(offsets[offsets.len() - 1] + count));
        let (e, places, groups) = (counts.len(), offsets[counts.len()], Groups(&offsets));
        let (x, w, dy) = (noise(places * k, 1), noise(e * k * n, 2), noise(places * n, 3));
        let narrow_w: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
        let rounded: Vec<f32> = narrow_w.iter().map(|w| w.to_f32()).collect();
        let eight = quantised(QuantBits::Eight, &w, e * k, n);
        let mut widened = vec![0.0; w.len()];
        eight.rows().widen(&mut widened);
        let weights = [
            (Weight::f32(&w, e * k, n), &w),
            (bf16_weight(&narrow_w, e * k, n), &rounded),
            (Weight::from(eight.rows()).with(crate::arithmetic()), &widened),
        ];
        let (x32, dy32) = (Mat::new(&x, places, k), Mat::new(&dy, places, n));
        for (weight, values) in weights {
            let bf16 = weight.is_bf16();
            // Weights of few bits are widened to the dtype that the CPU multiplies.
            let narrow = !matches!(weight.stored(), Stored::F32(_));
            let (x64, w64, dy64) = (factor(&x, narrow), factor(values, narrow), factor(&dy, narrow));
            let (x64, dy64) = (Mat::new(&x64, places, k), Mat::new(&dy64, places, n));
            let w64 = Mat::new(&w64, e * k, n);
            let y = experts::forward(x32, weight, groups);
            close(&y, &twin::experts_forward(x64, w64, groups), 2e-6);
            let (dx64, _) = twin::experts_backward(dy64, x64, w64, groups);
            // A gradient is rounded where its weight is bf16.
            let (x64, dy64) = (factor(&x, bf16), factor(&dy, bf16));
            let (_, dw64) =
                twin::experts_backward(Mat::new(&dy64, places, n), Mat::new(&x64, places, k), w64, groups);
            close(&experts::backward_input(dy32, weight, groups), &dx64, 2e-6);
            let mut dw = vec![0.25; e * k * n];
            experts::backward_weight(dy32, x32, groups, weight.rounding(), MatMut::new(&mut dw, e * k, n));
            close(&dw, &dw64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 2e-6);
            // Compute the last place of the first expert that has places alone.
            if let Some(own) = counts.iter().position(|&count| count > 0) {
                let place = offsets[own + 1] - 1;
                let alone: Vec<usize> = (0..=e).map(|expert| usize::from(expert > own)).collect();
                let y_alone = experts::forward(x32.row_range(place..place + 1), weight, Groups(&alone));
                assert_eq!(y_alone, y[place * n..(place + 1) * n]);
            }
        }
    }
}

#[test]
fn weights_of_experts_match_their_twin() {
    // Two experts of each of three rows: 0 and 3, 0 and 4, 1 and 3.
    let choices = Choices { places: &[0, 3, 1, 5, 2, 4], experts: &[0, 0, 1, 3, 3, 4] };
    for i in [1, 5, 40] {
        let (x, logits, dy) = (noise(6 * i, 1), noise(3 * 5, 2), noise(6 * i, 3));
        let [x64, logits64, dy64] = [&x, &logits, &dy].map(|x| wide(x));
        fn of(x: &[f64], rows: usize) -> Mat<'_, f64> {
            Mat::new(x, rows, x.len() / rows)
        }
        let y = twin::weigh_forward(of(&x64, 6), of(&logits64, 3), choices);
        let weight = |own: usize, other: usize| 1.0 / (1.0 + (logits64[other] - logits64[own]).exp());
        assert!((y[0] - x64[0] * weight(0, 3)).abs() < 1e-12);
        assert!((y[4 * i] - x64[4 * i] * weight(10 + 3, 10 + 1)).abs() < 1e-12);
        let (dx, dlogits) = twin::weigh_backward(of(&dy64, 6), of(&x64, 6), of(&logits64, 3), choices);
        check_gradient(&x64, &dx, |x| dot(&twin::weigh_forward(of(x, 6), of(&logits64, 3), choices), &dy64));
        check_gradient(&logits64, &dlogits, |l| {
            dot(&twin::weigh_forward(of(&x64, 6), of(l, 3), choices), &dy64)
        });
        let (x, logits, dy) = (Mat::new(&x, 6, i), Mat::new(&logits, 3, 5), Mat::new(&dy, 6, i));
        close(&experts::weigh_forward(x, logits, choices), &y, 2e-6);
        let (dx32, dlogits32) = experts::weigh_backward(dy, x, logits, choices);
        close(&dx32, &dx, 2e-6);
        close(&dlogits32, &dlogits, 2e-6);
    }
}

#[test]
fn embeddings_gather_and_scatter() {
    let (vocab, h) = (9, 21);
    let ids = [3, 0, 3, 8, 3];
    let table = noise(vocab * h, 1);
    let narrow_table: Vec<bf16> = table.iter().map(|&w| bf16::from_f32(w)).collect();
    let y = embedding::gather(Weight::f32(&table, vocab, h), &ids);
    assert_eq!(wide(&y), twin::gather(Mat::new(&wide(&table), vocab, h), &ids));
    let y = embedding::gather(bf16_weight(&narrow_table, vocab, h), &ids);
    assert_eq!(y[h], narrow_table[0].to_f32());
    let dy = noise(ids.len() * h, 2);
    let mut d = vec![0.5; vocab * h];
    let mix = RowMix::select(ids.to_vec());
    embedding::add_rows_backward(Mat::new(&dy, ids.len(), h), &mix, &mut d);
    let expected = twin::mix_backward(Mat::new(&wide(&dy), ids.len(), h), &mix, vocab);
    close(&d, &expected.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 1e-6);
    assert!(embedding::gather(Weight::f32(&table, vocab, h), &[]).is_empty());
}

#[test]
fn scaled_residuals_match_their_twin() {
    for (rows, dim) in [(1, 1), (3, 7), (0, 4), (70, 65)] {
        let [x, r, dy] = [1, 2, 4].map(|seed| noise(rows * dim, seed));
        let s = noise(dim, 3);
        let (x64, r64, s64, dy64) = (wide(&x), wide(&r), wide(&s), wide(&dy));
        let [x, r, dy] = [&x, &r, &dy].map(|x| Mat::new(x, rows, dim));
        let [residual, upstream] = [&r64, &dy64].map(|x| Mat::new(x, rows, dim));
        let forward = |x: &[f64], s: &[f64]| twin::residual_forward(Mat::new(x, rows, dim), residual, s);
        close(&scale::residual_forward(x, r, &s), &forward(&x64, &s64), 1e-6);
        let (dx64, ds64) = twin::residual_backward(upstream, Mat::new(&x64, rows, dim), &s64);
        close(&scale::residual_backward_input(dy, &s), &dx64, 1e-6);
        let mut ds = vec![0.25; dim];
        scale::residual_backward_scale(dy, x, &mut ds);
        close(&ds, &ds64.iter().map(|d| d + 0.25).collect::<Vec<_>>(), 2e-6);
        check_gradient(&x64, &dx64, |x| dot(&dy64, &forward(x, &s64)));
        check_gradient(&s64, &ds64, |s| dot(&dy64, &forward(&x64, s)));
    }
}

#[test]
fn mixed_rows_are_added_and_their_gradient_is_the_transpose() {
    let (vocab, h) = (5, 3);
    let table = noise(vocab * h, 1);
    let mix = RowMix::of_terms([vec![(4, 1.0)], vec![], vec![(0, 0.25), (2, -0.5), (0, 1.5)]]);
    let mut y = vec![1.0; 3 * h];
    embedding::add_rows(Weight::f32(&table, vocab, h), &mix, MatMut::new(&mut y, 3, h));
    for j in 0..h {
        assert_eq!(y[j], 1.0 + table[4 * h + j]);
        assert_eq!(y[h + j], 1.0);
        assert!((y[2 * h + j] - (1.0 + 1.75 * table[j] - 0.5 * table[2 * h + j])).abs() <= 1e-6);
    }
    let half: Vec<bf16> = table.iter().map(|&x| bf16::from_f32(x)).collect();
    let mut y16 = vec![0.0; 3 * h];
    embedding::add_rows(bf16_weight(&half, vocab, h), &mix, MatMut::new(&mut y16, 3, h));
    assert_eq!(y16[..h], half[4 * h..].iter().map(|x| x.to_f32()).collect::<Vec<_>>()[..]);

    let dy = noise(3 * h, 2);
    let mut dtable = vec![0.5; vocab * h];
    embedding::add_rows_backward(Mat::new(&dy, 3, h), &mix, &mut dtable);
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
    for step in 1..=5 {
        let g = noise(n, 10 + step as u32);
        let by = AdamW { lr: 0.01, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, grad_scale: 0.3, step };
        optim::adamw(&g, &by, &mut w, [&mut m, &mut v]);
        twin::adamw(&wide(&g), &by.wide(), &mut w64, &mut m64, &mut v64);
    }
    close(&w, &w64, 1e-6);
    close(&m, &m64, 1e-6);
    close(&v, &v64, 1e-6);
}

/// Moments in 8 bits are updated in f32 and encoded again, whatever the number of threads and the range of a call.
#[test]
fn moments_in_8_bits_are_updated_in_f32_and_encoded() {
    for n in [0, 1, 255, 256, 257, 1025, 70_001] {
        let mut weight = noise(n, 1);
        let mut wide = weight.clone();
        let (mut m, mut v) = (Codes::zeros(n), Codes::zeros(n));
        let [mut m2, mut v2] = [m.clone(), v.clone()];
        let mut apart = (weight.clone(), m.clone(), v.clone());
        for step in 1..=4 {
            // Numbers of many sizes.
            let g: Vec<f32> = noise(n, 10 + step as u32).iter().map(|x| x * x * x * 0.01).collect();
            let by =
                AdamW { lr: 0.01, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, grad_scale: 0.3, step };
            let moments = optim::Moments::Codes([&mut m, &mut v].map(|x| x.get_mut(0..n)));
            optim::adamw(&g, &by, &mut weight, moments);

            let [mut m3, mut v3] = [m2.decode(Form::Signed), v2.decode(Form::Unsigned)];
            optim::adamw(&g, &by, &mut wide, [&mut m3, &mut v3]);
            (m2, v2) = (Codes::encode(&m3, Form::Signed), Codes::encode(&v3, Form::Unsigned));
            assert_eq!((&weight, &m, &v), (&wide, &m2, &v2), "{n} values, step {step}");

            let (weight, m, v) = &mut apart;
            for first in (0..n).step_by(512) {
                let part = first..n.min(first + 512);
                let moments = optim::Moments::Codes([&mut *m, v].map(|x| x.get_mut(part.clone())));
                optim::adamw(&g[part.clone()], &by, &mut weight[part], moments);
            }
        }
        assert_eq!(apart, (weight, m, v), "{n} values in parts");
    }
}

/// A value is rounded to one of its neighbours, with the value as the mean; the key decides, and the element's number, not the call.
#[test]
fn random_rounding_keeps_the_mean() {
    let n = 40_000;
    // The step adds 1 to 2 · (1 − 1/1024), and the neighbours of the sum are 1/64 apart.
    let by =
        AdamW { lr: 1.0, betas: [0.0, 0.0], eps: 0.0, weight_decay: 1.0 / 1024.0, grad_scale: 1.0, step: 1 };
    let (start, g) = (bf16::from_f32(2.0), vec![-0.5; n]);
    let run = |range: std::ops::Range<usize>, rounding: Rounding| {
        let mut weight = vec![start; range.len()];
        let mut moments = [vec![0.0; range.len()], vec![0.0; range.len()]];
        let [m, v] = &mut moments;
        optim::adamw(&g[range], &by, Updated::Bf16(&mut weight, rounding), [m, v]);
        weight.into_iter().map(bf16::to_f32).collect::<Vec<_>>()
    };
    let random = Rounding::random("a weight", 3);
    let got = run(0..n, random);
    let (exact, [low, high]) = (2.0 * (1.0 - 1.0 / 1024.0) + 1.0, [2.984_375, 3.0]);
    assert!(got.iter().all(|x| *x == low || *x == high), "{:?}", &got[..8]);
    let mean = got.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
    // Five standard deviations.
    let spread = (exact - low) * (high - exact);
    assert!(
        (mean - f64::from(exact)).abs() < 5.0 * (f64::from(spread) / n as f64).sqrt(),
        "{mean} for {exact}"
    );
    assert_eq!(run(0..n, random), got);
    assert_eq!([run(0..1_000, random), run(1_000..n, random.after(1_000))].concat(), got);
    for other in [Rounding::random("a weight", 4), Rounding::random("another weight", 3)] {
        let same = run(0..n, other).iter().zip(&got).filter(|(a, b)| a == b).count();
        assert!(same < 9 * n / 10, "{same} of {n} are equal");
    }
    assert!(run(0..n, Rounding::Nearest).iter().all(|x| *x == high));
}

/// The update of a bf16 weight has the bits of the f32 update, and rounds to nearest even like `half`, in ranges of any length.
#[test]
fn adamw_of_bf16_weights_is_adamw_that_is_rounded() {
    for n in [0, 1, 63, 1023, 1024, 1025, 70_001] {
        let [mut master, mut m, mut v] = [noise(n, 1), vec![0.0; n], vec![0.0; n]];
        let [mut master2, mut m2, mut v2] = [master.clone(), m.clone(), v.clone()];
        let mut weight = vec![bf16::ONE; n];
        for step in 1..=3 {
            let mut g = noise(n, 10 + step as u32);
            // A master that is not a number, and one that exceeds the largest bf16 number.
            if n > 100 {
                (g[7], master[9], master2[9]) = (f32::NAN, f32::MAX, f32::MAX);
            }
            let by =
                AdamW { lr: 0.01, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.0, grad_scale: 0.3, step };
            optim::adamw(&g, &by, &mut master2, [&mut m2, &mut v2]);
            optim::adamw(&g, &by, Updated::Master(&mut weight, &mut master), [&mut m, &mut v]);
            // Without a master, the weight itself is the value.
            let (mut narrow, mut wide) =
                (weight.clone(), weight.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
            let ([mut a, mut b], [mut c, mut d]) = ([m.clone(), v.clone()], [m.clone(), v.clone()]);
            optim::adamw(&g, &by, Updated::Bf16(&mut narrow, Rounding::Nearest), [&mut a, &mut b]);
            optim::adamw(&g, &by, &mut wide, [&mut c, &mut d]);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(
                [&master, &m, &v, &a, &b].map(|x| bits(x)),
                [&master2, &m2, &v2, &c, &d].map(|x| bits(x))
            );
            let rounded = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x).to_bits()).collect::<Vec<_>>();
            let got = [&weight, &narrow].map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            assert_eq!(got, [rounded(&master), rounded(&wide)]);
        }
    }
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
    fn of<'a>(case: &'a Case, name: &str, cols: usize) -> Mat<'a, f64> {
        Mat::new(&case[name], case[name].len() / cols, cols)
    }
    let case = &torch["layer_norm"];
    let (x, dy) = (of(case, "x", 10), of(case, "dout", 10));
    let (y, stats) = twin::layer_forward(x, &case["w"], &case["b"], 1e-5);
    close64(&y, &case["out"]);
    let (dx, dw, db) = twin::layer_backward(dy, x, &case["w"], &stats);
    close64(&dx, &case["dx"]);
    close64(&dw, &case["dw"]);
    close64(&db, &case["db"]);

    let case = &torch["rms_norm"];
    let (x, dy) = (of(case, "x", 10), of(case, "dout", 10));
    let (y, stats) = twin::rms_forward(x, &case["w"], 1e-6);
    close64(&y, &case["out"]);
    let (dx, dw) = twin::rms_backward(dy, x, &case["w"], &stats);
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
    let qkv = Qkv { q: of(case, "q", 24), k: of(case, "k", 12), v: of(case, "v", 12) };
    let (out, _) = twin::attention_forward(qkv, &layout, shape, 0.4);
    close64(&out, &case["out"]);
    let (dq, dk, dv) = twin::attention_backward(of(case, "dout", 24), qkv, &layout, shape, 0.4);
    close64(&dq, &case["dq"]);
    close64(&dk, &case["dk"]);
    close64(&dv, &case["dv"]);

    let case = &torch["logprob"];
    let (hidden, head) = (of(case, "hidden", 8), of(case, "head", 8));
    let targets = Targets { tokens: &[4, 0, 10], offsets: &[0, 1, 2, 3] };
    let Scores { logp, entropy, .. } = twin::logprob_forward(hidden, head, targets, 0.7);
    close64(&[logp, entropy].concat(), &case["out"]);
    let (dlogp, dentropy) = case["dout"].split_at(3);
    let gradient = logprob::Gradient { logp: dlogp, entropy: Some(dentropy) };
    let (dhidden, dhead) = twin::logprob_backward(gradient, hidden, head, targets, 0.7);
    close64(&dhidden, &case["dhidden"]);
    close64(&dhead, &case["dhead"]);

    let case = &torch["adamw"];
    let (mut w, mut m, mut v) = (case["w"].clone(), vec![0.0; 7], vec![0.0; 7]);
    let [mut w32, mut m32, mut v32] = [&w, &m, &v].map(|x| narrow(x));
    for (step, g) in (1..).zip(case["grads"].chunks_exact(7)) {
        let by = AdamW { lr: 0.01, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, grad_scale: 1.0, step };
        twin::adamw(g, &by, &mut w, &mut m, &mut v);
        let by = AdamW { lr: 0.01, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, grad_scale: 1.0, step };
        optim::adamw(&narrow(g), &by, &mut w32, [&mut m32, &mut v32]);
    }
    close64(&w, &case["out"]);
    close(&w32, &case["out"], 1e-6);
}
