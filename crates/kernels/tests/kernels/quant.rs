//! Quantised weights: the error bounds of a weight and of a product, tiles compared with rows, bits of a row.

use crate::common::{close, dot, noise, wide, with_threads};
use half::bf16;
use omnigrpo_kernels::linear::Layer;
use omnigrpo_kernels::quant::{GROUP, QuantBits, QuantMatrix, QuantRows};
use omnigrpo_kernels::{Arithmetic, Mat, MatMut, Weight, embedding, linear, twin};

const BITS: [QuantBits; 2] = [QuantBits::Eight, QuantBits::Four];

const DEFAULT: Arithmetic = Arithmetic { bf16_products: None, keeps_inputs: false };

fn quantised(bits: QuantBits, w: &[f32], n: usize, k: usize) -> QuantMatrix {
    QuantMatrix::from_rows(bits, n, k, |i, row| row.copy_from_slice(&w[i * k..(i + 1) * k])).unwrap()
}

fn widened(w: QuantRows) -> Vec<f32> {
    let mut out = vec![f32::NAN; w.len()];
    w.widen(&mut out);
    out
}

/// Returns the promised error bound of each weight: half a step plus the rounding of the result.
fn bounds(w: QuantRows, values: &[f32], n: usize, k: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(n * k);
    for i in 0..n {
        out.extend((0..k).map(|p| {
            w.scale(i, p / GROUP).step.to_f64() / 2.0 + 2f64.powi(-24) * f64::from(values[i * k + p].abs())
        }));
    }
    out
}

#[test]
fn every_weight_is_within_half_a_step() {
    let mut w = noise(7 * 200, 1);
    w[..64].fill(0.3);
    w[200..264].fill(0.0);
    w[400] = 1e4;
    w[600..800].iter_mut().for_each(|w| *w *= 1e-6);
    w[800..1000].iter_mut().for_each(|w| *w = 5.0 + *w * 1e-3);
    for bits in BITS {
        let matrix = quantised(bits, &w, 7, 200);
        let got = widened(matrix.rows());
        let bounds = bounds(matrix.rows(), &got, 7, 200);
        for (i, ((&got, &want), bound)) in got.iter().zip(&w).zip(&bounds).enumerate() {
            let error = (f64::from(got) - f64::from(want)).abs();
            assert!(error <= *bound, "{bits:?}, element {i}: {got} for {want}, bound {bound:e}");
        }
        // The step itself is as documented.
        for i in 0..7 {
            for (g, group) in w[i * 200..(i + 1) * 200].chunks(GROUP).enumerate() {
                let scale = matrix.rows().scale(i, g);
                let (min, max) = group.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
                assert!(scale.min.to_f32() <= min && min - scale.min.to_f32() <= min.abs() / 128.0);
                let range = f64::from(max) - scale.min.to_f64();
                assert!(scale.step.to_f64() <= 1.01 * range / f64::from(bits.levels()) + 1e-38, "{scale:?}");
            }
        }
    }
    let bytes = |bits| quantised(bits, &noise(16 * 1024, 2), 16, 1024).num_bytes() as f64 / (16.0 * 1024.0);
    assert_eq!((bytes(QuantBits::Eight) * 8.0, bytes(QuantBits::Four) * 8.0), (8.5, 4.5));
    assert!(QuantMatrix::from_rows(QuantBits::Four, 1, 2, |_, row| row.fill(f32::INFINITY)).is_none());
}

/// Returns a group of inputs as decoding encodes them when it multiplies bytes: 16 bits per number beside weights of 8
/// bits; 8 bits in quarters of a group beside weights of 4 bits. An outlier keeps its value.
fn bytes(bits: QuantBits, group: &[f32]) -> Vec<f64> {
    let (len, most_code, far_out) = match bits {
        QuantBits::Eight => (GROUP, 32_639.0, 32.0),
        QuantBits::Four => (GROUP / 4, 127.0, 3.5),
    };
    let most_of = |x: &[f32]| x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let of_part = |x: &[f32]| {
        let (mut rest, most) = (x.to_vec(), most_of(x));
        let others = x.iter().map(|x| x.abs()).sum::<f32>() - most;
        let outlier = x.iter().position(|x| x.abs() == most);
        let outlier = outlier.filter(|_| most * (len - 1) as f32 > far_out * others);
        outlier.into_iter().for_each(|at| rest[at] = 0.0);
        let most = most_of(&rest);
        let (step, inverse) = if most > 0.0 { (most / most_code, most_code / most) } else { (0.0, 0.0) };
        let mut near: Vec<f64> =
            rest.iter().map(|x| f64::from(step) * f64::from((x * inverse).round_ties_even())).collect();
        outlier.into_iter().for_each(|at| near[at] = f64::from(x[at]));
        near
    };
    group.chunks(len).flat_map(of_part).collect()
}

/// Computes `x Wᵀ + b` as decoding does when it multiplies bytes: `Σ ŵ x` less `s·Σ (q − c)(x − x̂)` of each group.
fn rounded(x: Mat, w: QuantRows, bits: QuantBits, bias: &[f32]) -> Vec<f64> {
    let (m, middle) = (x.dims().0, f64::from(bits.levels()) / 2.0);
    let mut y = Vec::new();
    for i in 0..m {
        let x = x.row(i);
        for (j, &bias) in bias.iter().enumerate() {
            let of_group = |(g, x): (usize, &[f32])| {
                let (min, step) = (w.scale(j, g).min.to_f64(), w.scale(j, g).step.to_f64());
                let of_element = |(e, (&x, near)): (usize, (&f32, f64))| {
                    let from_middle = f64::from(w.code(j, g * GROUP + e)) - middle;
                    step * from_middle * near + (min + middle * step) * f64::from(x)
                };
                x.iter().zip(bytes(bits, x)).enumerate().map(of_element).sum::<f64>()
            };
            y.push(f64::from(bias) + x.chunks(GROUP).enumerate().map(of_group).sum::<f64>());
        }
    }
    y
}

/// Few rows hold what their kernel promises: exact inputs, or inputs in bytes with only their own rounding error.
#[test]
fn few_rows_multiply_exact_inputs_or_bytes() {
    for (m, k, n) in [(1, 64, 16), (2, 65, 7), (3, 200, 33), (8, 1024, 48), (13, 320, 5)] {
        let (mut x, w, bias) = (noise(m * k, 1), noise(n * k, 2), noise(n, 3));
        // A group of zeros and one with an outlier.
        x[..k.min(64)].fill(0.0);
        x[m * k - 1] = 60.0;
        let rows = Mat::new(&x, m, k);
        for bits in BITS {
            let matrix = quantised(bits, &w, n, k);
            let (x64, w64) = (wide(&x), wide(&widened(matrix.rows())));
            let exact = twin::linear_forward(Mat::new(&x64, m, k), Mat::new(&w64, n, k), Some(&wide(&bias)));
            let want = if DEFAULT.rounds_inputs() {
                rounded(rows, matrix.rows(), bits, &bias)
            } else {
                exact.clone()
            };
            let layers = [Layer { w: matrix.rows().into(), bias: Some(&bias) }];
            let mut y = vec![0.25; m * n];
            linear::forward_rows_into(rows, &layers, true, MatMut::new(&mut y, m, n));
            close(&y, &want.iter().map(|y| y + 0.25).collect::<Vec<_>>(), 4e-6);
            let size = (dot(&exact, &exact) / exact.len() as f64).sqrt();
            let error = want.iter().zip(&exact).map(|(want, exact)| (want - exact).abs() / size);
            let bound = if bits == QuantBits::Eight { 1e-4 } else { 0.03 };
            assert!(error.fold(0.0, f64::max) < bound, "{bits:?} {m}×{k}×{n}");
            // Some rows of a weight that begin inside a panel.
            let part = 3.min(n - 1)..n - 1;
            let layers = [Layer {
                w: matrix.rows().rows(part.start, part.end).into(),
                bias: Some(&bias[part.clone()]),
            }];
            let mut some = vec![0.0; m * part.len()];
            linear::forward_rows_into(rows, &layers, false, MatMut::new(&mut some, m, part.len()));
            let mut all = vec![0.0; m * n];
            let layers = [Layer { w: matrix.rows().into(), bias: Some(&bias) }];
            linear::forward_rows_into(rows, &layers, false, MatMut::new(&mut all, m, n));
            for i in 0..m {
                assert_eq!(some[i * part.len()..(i + 1) * part.len()], all[i * n..][part.clone()]);
            }
            let mut nothing = x.clone();
            nothing[0] = f32::NAN;
            let rows = Mat::new(&nothing, m, k);
            linear::forward_rows_into(rows, &layers, false, MatMut::new(&mut all, m, n));
            assert!(all[..n].iter().all(|y| y.is_nan()) && all[n..].iter().all(|y| y.is_finite()));
        }
    }
}

/// With inputs of which some are far larger than the others, the others contribute as exactly as without them, and a
/// row has the same bits whether or not another row has such inputs.
#[test]
fn outliers_cost_no_other_input_its_bits() {
    let (m, k, n) = (8, 320, 33);
    let (plain, usual) = (noise(n * k, 2), noise(m * k, 3));
    for (factor, every) in [(1.0, 1), (30.0, 320), (100.0, 320), (30.0, 64), (300.0, 64), (1e4, 64)] {
        // The weights that multiply outliers are smaller by the same factor, so that the sum stays as large as without
        // them.
        let far_out = |at: usize| if at % k % every == 3 % every { factor } else { 1.0 };
        let x: Vec<f32> = usual.iter().enumerate().map(|(at, x)| x * far_out(at)).collect();
        let w: Vec<f32> = plain.iter().enumerate().map(|(at, w)| w / far_out(at)).collect();
        for bits in BITS {
            let matrix = quantised(bits, &w, n, k);
            let (x64, w64) = (wide(&x), wide(&widened(matrix.rows())));
            let exact = twin::linear_forward(Mat::new(&x64, m, k), Mat::new(&w64, n, k), None);
            let layers = [Layer::new(matrix.rows().into())];
            let run = |x: &[f32]| {
                let rows = x.len() / k;
                let mut y = vec![0.0; rows * n];
                linear::forward_rows_into(Mat::new(x, rows, k), &layers, false, MatMut::new(&mut y, rows, n));
                y
            };
            let y = run(&x);
            let size = (dot(&exact, &exact) / exact.len() as f64).sqrt();
            let error: f64 = y.iter().zip(&exact).map(|(&y, want)| (f64::from(y) - want).powi(2)).sum();
            let error = (error / exact.len() as f64).sqrt() / size;
            let bound = if bits == QuantBits::Eight { 2e-4 } else { 7e-3 };
            assert!(error < bound, "{bits:?}, one in {every} × {factor}: {error:e}");
            let mixed = [&usual[..k], &x[k..]].concat();
            assert_eq!(run(&mixed)[..n], run(&usual[..k]));
        }
    }
}

/// With inputs that are tiny or not finite: products of tiny inputs stay right, a row with a non-finite input gives NaN
/// or infinity, and other rows are unchanged.
#[test]
fn inputs_of_any_size() {
    let (k, n) = (128, 17);
    let w = noise(n * k, 2);
    for bits in BITS {
        let matrix = quantised(bits, &w, n, k);
        let run = |x: &[f32]| {
            let (m, layers) = (x.len() / k, [Layer::new(matrix.rows().into())]);
            let mut y = vec![7.0; m * n];
            linear::forward_rows_into(Mat::new(x, m, k), &layers, false, MatMut::new(&mut y, m, n));
            y
        };
        let usual = noise(k, 3);
        for size in [1e-38f32, 1e-42, 3e-37, 1e-30] {
            let x: Vec<f32> = usual.iter().map(|x| x * size).collect();
            let most = k as f32 * 4.0 * 4.0 * size;
            assert!(run(&x).iter().all(|y| y.abs() <= most), "{bits:?} {size:e}");
        }
        for not_finite in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut x = [&usual[..], &usual].concat();
            x[70] = not_finite;
            let y = run(&x);
            assert!(y[..n].iter().all(|y| !y.is_finite()), "{bits:?} {not_finite}");
            assert_eq!(y[n..], run(&usual));
        }
    }
}

/// The layout for GPUs holds the same numbers.
#[test]
fn codes_by_rows_are_the_same() {
    let (n, k) = (19, 200);
    for bits in BITS {
        let matrix = quantised(bits, &noise(n * k, 5), n, k);
        let (codes, scales) = matrix.by_rows();
        let block = 512 / bits.bits();
        let blocks = k.div_ceil(block);
        assert_eq!((codes.len(), scales.len()), (n * blocks * 16, n * blocks * block / GROUP));
        for (i, p) in [(0, 0), (7, 63), (7, 64), (16, 129), (18, 199)] {
            let word = codes[(i * blocks + p / block) * 16 + p % 16];
            let code = word >> (p % block / 16 * bits.bits()) & bits.levels();
            assert_eq!(code, matrix.rows().code(i, p), "{bits:?} {i} {p}");
            assert_eq!(scales[i * blocks * block / GROUP + p / GROUP], matrix.rows().scale(i, p / GROUP));
        }
    }
}

/// Products stay within `Σ |x|·bound` for the weights, `2⁻⁸·Σ|x ŵ|` for factors that are rounded to bf16, and `(k +
/// 2)·2⁻²⁴·Σ|x ŵ|` for summing `k` products and a bias in f32 in any order.
#[test]
fn products_are_within_the_bound_of_their_weights() {
    for (m, k, n) in [(1, 64, 3), (5, 200, 9), (8, 1024, 33), (3, 65, 2), (70, 192, 40), (0, 64, 4)] {
        let (x, w, bias) = (noise(m * k, 1), noise(n * k, 2), noise(n, 3));
        let (xs, ys) = (k + 3, n + 2);
        let mut x_wide = vec![f32::NAN; m * xs];
        (0..m).for_each(|i| x_wide[i * xs..i * xs + k].copy_from_slice(&x[i * k..(i + 1) * k]));
        let rows = Mat::new(&x_wide, m, xs).columns(0..k);
        let (x64, w64) = (wide(&x), wide(&w));
        let x64 = Mat::new(&x64, m, k);
        let exact = twin::linear_forward(x64, Mat::new(&w64, n, k), Some(&wide(&bias)));
        for bits in BITS {
            let matrix = quantised(bits, &w, n, k);
            let values = widened(matrix.rows());
            let bounds = bounds(matrix.rows(), &values, n, k);
            for kernel in [linear::forward_into, linear::forward_rows_into] {
                let mut y = vec![7.0; m * ys];
                let layer = Layer { w: matrix.rows().into(), bias: Some(&bias) };
                kernel(rows, &[layer], false, MatMut::new(&mut y, m, ys).columns(0..n));
                for i in 0..m {
                    assert_eq!(y[i * ys + n..(i + 1) * ys], [7.0, 7.0], "gap columns stay");
                    for j in 0..n {
                        let terms = || (0..k).map(|p| (f64::from(x[i * k + p].abs()), j * k + p));
                        let weights: f64 = terms().map(|(x, at)| x * bounds[at]).sum();
                        let size: f64 = terms().map(|(x, at)| x * f64::from(values[at].abs())).sum();
                        let rounding = if DEFAULT.rounds_bf16() { 2f64.powi(-8) * size } else { 0.0 };
                        let sums = (k + 2) as f64 * 2f64.powi(-24) * (size + f64::from(bias[j].abs()));
                        let error = (f64::from(y[i * ys + j]) - exact[i * n + j]).abs();
                        assert!(
                            error <= weights + rounding + sums,
                            "{bits:?} {m}×{k}×{n}: {error:e} at {i},{j}"
                        );
                    }
                }
            }
            // The gradient is that of the widened weights, which are rounded if the CPU multiplies bf16.
            let factor = |x: &[f32]| match DEFAULT.rounds_bf16() {
                true => x.iter().map(|&x| bf16::from_f32(x).to_f64()).collect(),
                false => wide(x),
            };
            let dy = noise(m * n, 4);
            let mut dx = vec![0.5; m * k];
            let layers = [Layer::new(matrix.rows().into())];
            linear::backward_input_into(Mat::new(&dy, m, n), &layers, true, MatMut::new(&mut dx, m, k));
            let (dy64, values64) = (factor(&dy), factor(&values));
            let (want, ..) = twin::linear_backward(Mat::new(&dy64, m, n), x64, Mat::new(&values64, n, k));
            close(&dx, &want.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
        }
    }
}

#[test]
fn rows_have_the_same_bits_in_any_batch_and_with_any_number_of_threads() {
    let (k, n) = (320, 190);
    let (x, w) = (noise(17 * k, 1), noise(n * k, 2));
    for bits in BITS {
        let matrix = quantised(bits, &w, n, k);
        let run = |first: usize, m: usize| {
            let mut y = vec![0.0; m * n];
            let (rows, layers) = (first..first + m, [Layer::new(matrix.rows().into())]);
            let x = Mat::new(&x, 17, k).row_range(rows);
            linear::forward_rows_into(x, &layers, false, MatMut::new(&mut y, m, n));
            y
        };
        let all = with_threads(1, || run(0, 17));
        assert_eq!(all, with_threads(4, || run(0, 17)));
        for (first, m) in [(0, 1), (16, 1), (2, 3), (9, 8)] {
            assert_eq!(run(first, m), all[first * n..(first + m) * n], "{m} rows from {first}");
        }
    }
}

/// Products of many rows have the bits of decoding, also if the rows are more than one block.
#[test]
fn many_rows_have_the_bits_of_few() {
    let (m, k, n) = (150, 1030, 37);
    let (mut x, w, bias) = (noise(m * k, 1), noise(n * k, 2), noise(n, 3));
    x.iter_mut().skip(3).step_by(64).for_each(|x| *x *= 300.0);
    for bits in BITS {
        let matrix = quantised(bits, &w, n, k);
        let layers = [Layer { w: matrix.rows().into(), bias: Some(&bias) }];
        let run = |kernel: fn(Mat, &[Layer], bool, MatMut), rows: std::ops::Range<usize>| {
            let mut y = vec![0.5; rows.len() * n];
            let to = MatMut::new(&mut y, rows.len(), n);
            kernel(Mat::new(&x, m, k).row_range(rows), &layers, true, to);
            y
        };
        let many = run(linear::forward_into, 0..m);
        let few: Vec<f32> = (0..m).flat_map(|row| run(linear::forward_rows_into, row..row + 1)).collect();
        if DEFAULT.one_kernel() {
            assert_eq!(many, few, "{bits:?}");
        } else {
            let exact: Vec<f64> = wide(&few);
            close(&many, &exact, if DEFAULT.rounds_bf16() || DEFAULT.rounds_inputs() { 3e-2 } else { 1e-5 });
        }
    }
}

/// Weights of two arithmetics have their own bits: in one call, and in calls on two threads. Inputs that are kept are not rounded,
/// in few rows and in many.
#[test]
fn each_weight_has_its_arithmetic() {
    let (m, k, n) = (40, 192, 37);
    let (x, w) = (noise(m * k, 1), noise(n * k, 2));
    let kept = Arithmetic { keeps_inputs: true, ..DEFAULT };
    for bits in BITS {
        let matrix = quantised(bits, &w, n, k);
        let [own, other] =
            [kept, DEFAULT].map(|arithmetic| Layer::new(Weight::from(matrix.rows()).with(arithmetic)));
        let (x64, w64) = (wide(&x), wide(&widened(matrix.rows())));
        let exact = twin::linear_forward(Mat::new(&x64, m, k), Mat::new(&w64, n, k), None);
        for kernel in [linear::forward_into, linear::forward_rows_into] {
            let run = |layers: &[Layer]| {
                let mut y = vec![0.0; m * n * layers.len()];
                kernel(Mat::new(&x, m, k), layers, false, MatMut::new(&mut y, m, n * layers.len()));
                y
            };
            let (kept, rounded) = (run(&[own]), run(&[other]));
            close(&kept, &exact, 2e-6);
            assert_eq!(kept != rounded, DEFAULT.rounds_inputs() || DEFAULT.rounds_bf16(), "{bits:?}");
            let both: Vec<f32> =
                kept.chunks(n).zip(rounded.chunks(n)).flat_map(|(a, b)| [a, b].concat()).collect();
            assert_eq!(run(&[own, other]), both, "{bits:?} in one call");
            std::thread::scope(|threads| {
                let beside = threads.spawn(|| (0..50).all(|_| run(&[other]) == rounded));
                assert!((0..50).all(|_| run(&[own]) == kept), "{bits:?} beside another");
                assert!(beside.join().unwrap(), "{bits:?}, the other");
            });
        }
    }
}

#[test]
fn widened_pieces_equal_one_product() {
    // More elements than one widened chunk.
    let (k, n) = (1100, 1000);
    let w = noise(n * k, 3);
    let matrix = quantised(QuantBits::Four, &w, n, k);
    let values = widened(matrix.rows());
    assert_eq!(widened(matrix.rows().rows(7, 9)), values[7 * k..9 * k]);
    let y = embedding::gather(matrix.rows().into(), &[999, 0]);
    assert_eq!((&y[..k], &y[k..]), (&values[999 * k..], &values[..k]));
    let (x, mut y) = (noise(2 * k, 4), vec![1.0; 2 * n]);
    let ones = vec![1.0; n];
    let (x64, values64) = (wide(&x), wide(&values));
    let expected = twin::linear_forward(Mat::new(&x64, 2, k), Mat::new(&values64, n, k), Some(&ones));
    y.fill(1.0);
    let layers = [Layer::new(matrix.rows().into())];
    linear::forward_into(Mat::new(&x, 2, k), &layers, true, MatMut::new(&mut y, 2, n));
    let bound = if DEFAULT.one_kernel() { 0.03 } else { 1e-2 };
    close(&y, &expected, if DEFAULT.rounds_bf16() || DEFAULT.one_kernel() { bound } else { 1e-5 });
    let (dy, mut dx) = (noise(2 * n, 5), vec![0.0; 2 * k]);
    linear::backward_input_into(
        Mat::new(&dy, 2, n),
        &[Layer::new(matrix.rows().into())],
        false,
        MatMut::new(&mut dx, 2, k),
    );
    let (dy64, x64, values64) = (wide(&dy), Mat::new(&x64, 2, k), Mat::new(&values64, n, k));
    let (expected, ..) = twin::linear_backward(Mat::new(&dy64, 2, n), x64, values64);
    close(&dx, &expected, if DEFAULT.rounds_bf16() { 1e-2 } else { 1e-5 });
}
