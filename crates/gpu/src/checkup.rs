//! A check of an opened GPU in a few seconds: its health, a kernel of each file, products, and rates.
//!
//! Each kernel and product is compared with f64 on the CPU. The inputs are small, so that the check also runs on an emulator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use omnigrpo_kernels::attention::{AttentionLayout, Qkv, Shape};
use omnigrpo_kernels::experts::Groups;
use omnigrpo_kernels::recurrent::{DeltaShape, Segments};
use omnigrpo_kernels::{Mat, logprob, twin};

use crate::attention::{Heads, Pattern};
use crate::device::{Array, Dtype, Gpu};
use crate::driver::{Checked, Finding};
use crate::elementwise::Place;
use crate::error::Error;
use crate::head::{Head, Marks};
use crate::linear::{Affine, Onto, Weight};
use crate::product::{Factor, Product};
use crate::recurrent::Sequences;
use crate::sample::{Row, Sampling};
use crate::sources::FILES;

/// Time after which a rate is measured precisely enough.
const LONG_ENOUGH: Duration = Duration::from_millis(20);

/// File of kernels that copy and round arrays.
const FIRST: &str = "elementwise";
/// Fraction of the time of a check until which kernels are compiled. A compilation ends up to a second late, and the compiled kernels
/// run afterwards.
const COMPILING: f64 = 0.8;

/// The largest relative error of a comparison.
type Compared = std::result::Result<f64, String>;

/// Formats a number with at least three digits. An emulator's rates are millionths of a GPU's.
fn three_digits(x: f64) -> String {
    let decimals = (2.0 - x.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{x:.decimals$}")
}

/// Returns numbers between −1 and 1, which are exact in bf16.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        ((state >> 24) as f32 - 128.0) / 128.0
    };
    (0..n).map(next).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Compares results with f64. Returns the relative error in the root mean square, or the problem.
fn near(got: &[f32], want: &[f64], bound: f64) -> std::result::Result<f64, String> {
    if got.len() != want.len() {
        return Err(format!("{} numbers, expected {}", got.len(), want.len()));
    }
    let far: f64 = got.iter().zip(want).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
    let all: f64 = want.iter().map(|b| b * b).sum();
    let error = (far / all.max(1e-30)).sqrt();
    match error <= bound {
        true => Ok(error),
        // This includes an error that is not a number.
        false => Err(format!("relative error {error:.1e}, expected at most {bound:.0e}")),
    }
}

impl Gpu {
    /// Checks this GPU. A problem does not end the check, except that a failed GPU computes nothing more.
    ///
    /// The check lasts about as long as `limit`, or less. Health, products and rates come first. If the time is over before all
    /// files of kernels are compiled, the kernels of the others are not checked.
    pub fn checkup(&self, limit: Duration) -> Vec<Finding> {
        let began = Instant::now();
        let mut all = self.driver().health();
        // The following checks use its kernels.
        all.push(self.file(FIRST));
        for dtype in [Dtype::F32, Dtype::Bf16] {
            all.push(Finding::new(
                &format!("products in {dtype:?}").to_lowercase(),
                self.checked(|| self.products(dtype)),
            ));
        }
        let gigabytes = |rate: f64| Ok(format!("{} GB/s", three_digits(rate / 1e9)));
        all.push(Finding::new("copy to the GPU", self.checked(|| gigabytes(self.upload_rate()))));
        all.push(Finding::new("copy in its memory", self.checked(|| gigabytes(self.copy_rate()))));
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let rate = || Ok(format!("{} TFLOP/s", three_digits(self.product_rate(dtype) / 1e12)));
            all.push(Finding::new(&format!("products, {dtype:?}").to_lowercase(), self.checked(rate)));
        }
        let (compilation, files) = self.compiled(began + limit.mul_f64(COMPILING));
        all.push(compilation);
        all.extend(files.into_iter().filter(|file| *file != FIRST).map(|file| self.file(file)));
        all.push(Finding::new("time", Ok(format!("{:.1} s", began.elapsed().as_secs_f64()))));
        all
    }

    /// Compiles all kernels, until `until` at most. Returns the finding, and the files that are compiled.
    fn compiled(&self, until: Instant) -> (Finding, Vec<&'static str>) {
        let began = Instant::now();
        let results = self.driver().compile_all(until);
        let (mut files, mut late, mut problem) = (Vec::new(), Vec::new(), None);
        for (result, (file, _)) in results.into_iter().zip(FILES) {
            match result {
                Ok(()) => files.push(*file),
                Err(Error::Late { .. }) => late.push(*file),
                Err(error) => problem = problem.or(Some(error.to_string())),
            }
        }
        let mut text =
            format!("{} of {} files, {:.1} s", files.len(), FILES.len(), began.elapsed().as_secs_f64());
        if !late.is_empty() {
            text +=
                &format!("; not in time, so not checked: {} (the first run compiles them)", late.join(", "));
        }
        (Finding::new("compilation", problem.map_or(Ok(text), Err)), files)
    }

    fn file(&self, file: &str) -> Finding {
        Finding::new(&format!("{file}.cu"), self.checked(|| self.kernel_of(file)))
    }

    /// Runs a check. An error of the GPU replaces its result.
    fn checked(&self, check: impl FnOnce() -> Checked) -> Checked {
        self.check().map_err(|error| error.to_string())?;
        let result = check();
        self.check().map_err(|error| error.to_string()).and(result)
    }

    /// Runs a kernel of a file and compares its result.
    fn kernel_of(&self, file: &str) -> Checked {
        let error = match file {
            "attention" => self.attention_check(Dtype::Bf16, 64, 5e-3),
            "plain_attention" => self.attention_check(Dtype::F32, 20, 1e-5),
            "conv" => self.conv_check(),
            "delta" => self.delta_check(),
            "elementwise" => self.elementwise_check(),
            "experts" => self.experts_check(),
            "head" => self.head_check(),
            "linear" => self.linear_check(),
            "norms" => self.norms_check(),
            "recurrent" => self.recurrent_check(),
            "sample" => self.sample_check(),
            "sums" => self.sums_check(),
            _ => Err("this check has no case for the file".into()),
        }?;
        Ok(format!("relative error {error:.0e}"))
    }

    fn conv_check(&self) -> Compared {
        let (c, side) = (5, [2, 3]);
        let (x, w) = (noise(12 * c, 1), noise(9 * c, 2));
        let y = self.depthwise(&self.upload(&x), &self.upload(&w), side, false);
        near(&y.to_vec(), &twin::depthwise3_forward(Mat::new(&wide(&x), 12, c), &wide(&w), side), 2e-6)
    }

    fn delta_check(&self) -> Compared {
        let (rows, shape) = (70, DeltaShape { key_heads: 1, value_heads: 1, key_dim: 20, value_dim: 12 });
        let qkv = self.cast(&self.upload(&noise(rows * shape.packed_width(), 1)), Dtype::Bf16);
        let gates: Vec<f32> = noise(rows * 2, 2).iter().map(|x| -0.1 * x.abs()).collect();
        let segments = Segments::one(rows);
        let [out, _] = self.delta(&qkv, &self.upload(&gates), &Sequences::new(self, &segments), shape);
        let (qkv, gates) = (wide(&qkv.to_vec()), wide(&gates));
        let (qkv, gates) = (Mat::new(&qkv, rows, shape.packed_width()), Mat::new(&gates, rows, 2));
        near(&out.to_vec(), &twin::delta_forward(qkv, gates, &segments, shape), 1e-4)
    }

    fn recurrent_check(&self) -> Compared {
        let (rows, c, taps) = (9, 37, 4);
        let (x, w, segments) = (noise(rows * c, 1), noise(c * taps, 2), Segments::one(rows));
        let y = self.causal(&self.upload(&x), &self.upload(&w), &Sequences::new(self, &segments));
        let want = twin::causal_forward(Mat::new(&wide(&x), rows, c), &wide(&w), &segments);
        near(&y.to_vec(), &want, 2e-6)
    }

    fn elementwise_check(&self) -> Compared {
        // Ties between two bf16 numbers, and numbers just beside them.
        let x: Vec<f32> = (0..999).map(|i| f32::from_bits(0x3f80_0000 + 0x4000 * i + i % 3)).collect();
        let want: Vec<f64> = x.iter().map(|&x| f64::from(bf16::from_f32(x))).collect();
        near(&self.cast(&self.upload(&x), Dtype::Bf16).to_vec(), &want, 0.0)
    }

    fn experts_check(&self) -> Compared {
        self.experts_of(Dtype::F32, [19, 7])?;
        // On tensor cores.
        self.experts_of(Dtype::Bf16, [72, 64])
    }

    fn experts_of(&self, dtype: Dtype, [k, n]: [usize; 2]) -> Compared {
        let (offsets, experts) = ([0, 2, 2, 5], [0u32, 0, 2, 2, 2]);
        let [x, w] =
            [(5 * k, 1), (3 * k * n, 2)].map(|(len, seed)| self.cast(&self.upload(&noise(len, seed)), dtype));
        let mut y = self.alloc(5 * n, Dtype::F32);
        self.experts_rows(&mut y, &x, Weight::Dense(&w), &self.upload_words(&experts), [k, n]);
        let (x, w) = (wide(&x.to_vec()), wide(&w.to_vec()));
        let want = twin::experts_forward(Mat::new(&x, 5, k), Mat::new(&w, 3 * k, n), Groups(&offsets));
        near(&y.to_vec(), &want, 2e-6)
    }

    fn head_check(&self) -> Compared {
        let (rows, h, vocab) = (3, 20, 613);
        let (x, w, offsets, tokens) = (noise(rows * h, 1), noise(vocab * h, 2), [0, 1, 1, 3], [7, 612, 300]);
        let weight = self.upload(&w);
        let head = Head { weight: Weight::Dense(&weight), vocab, h, temperature: 0.7 };
        let [logp, ..] = self.score(&self.upload(&x), head, &Marks::new(self, &offsets, &tokens));
        let (x, w) = (wide(&x), wide(&w));
        let offsets = offsets.map(|at| at as usize);
        let targets = logprob::Targets { tokens: &tokens, offsets: &offsets };
        let temperature = f64::from(0.7f32);
        let want = twin::logprob_forward(Mat::new(&x, rows, h), Mat::new(&w, vocab, h), targets, temperature);
        near(&logp.to_vec(), &want.logp, 2e-6)
    }

    fn linear_check(&self) -> Compared {
        let (rows, k, n) = (5, 136, 40);
        let (x, w) = (noise(rows * k, 1), noise(n * k, 2));
        let [on_x, on_w] = [&x, &w].map(|x| self.cast(&self.upload(x), Dtype::Bf16));
        let mut y = self.alloc(rows * n, Dtype::F32);
        let layer = Affine { weight: Weight::Dense(&on_w), bias: None, n };
        self.linear_rows(&mut y, [0, n], &on_x, &[layer], k, Onto::Nothing);
        near(&y.to_vec(), &product([&x, &w], [rows, n, k], [false, true], [k, k]), 1e-5)
    }

    fn norms_check(&self) -> Compared {
        let (t, h) = (9, 70);
        let (x, w) = (noise(t * h, 1), noise(h, 2));
        let (y, _) = self.rms(&self.upload(&x), &self.upload(&w), 1e-5, Dtype::F32);
        near(&y.to_vec(), &twin::rms_forward(Mat::new(&wide(&x), t, h), &wide(&w), 1e-5).0, 2e-6)
    }

    fn sample_check(&self) -> Compared {
        let (vocab, best) = (1000, [17u32, 999]);
        let mut logits = noise(2 * vocab, 1);
        best.iter().enumerate().for_each(|(row, &id)| logits[row * vocab + id as usize] = 3.0);
        let greedy = Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            scoring_temperature: 1.0,
        };
        let drawn =
            self.sample(&mut self.upload(&logits), vocab, &greedy, &[Row::default(), Row::default()], &[]);
        let drawn: Vec<f32> = drawn.iter().map(|drawn| drawn.id as f32).collect();
        near(&drawn, &best.map(f64::from), 0.0)
    }

    fn sums_check(&self) -> Compared {
        let x = noise(66_001, 1);
        let want = wide(&x).iter().map(|x| x * x).sum();
        near(&[self.sum_of_squares(&self.upload(&x)) as f32], &[want], 1e-6)
    }

    fn attention_check(&self, dtype: Dtype, d: usize, bound: f64) -> Compared {
        let (layout, t) = (AttentionLayout::groups(&[(70, vec![7, 1])]), 78);
        let heads = Heads { q: 2, kv: 1, d };
        let host = noise(t * 4 * d, 1);
        let qkv = self.cast(&self.upload(&host), dtype);
        let (out, _) = self.attention(&qkv, &Pattern::new(self, &layout, t), heads);
        let shape = Shape { q_heads: 2, kv_heads: 1, head_dim: d };
        let host = wide(&host);
        let parts = Qkv::packed(Mat::new(&host, t, 4 * d), shape);
        near(&out.to_vec(), &twin::attention_forward(parts, &layout, shape, 1.0 / (d as f64).sqrt()).0, bound)
    }

    /// Compares products of all transpositions, alone and added to the output or to another matrix, with odd leading dimensions
    /// and sizes.
    fn products(&self, dtype: Dtype) -> Checked {
        let (mut count, mut most) = (0, 0f64);
        let outputs = if dtype == Dtype::Bf16 { &[Dtype::Bf16, Dtype::F32][..] } else { &[Dtype::F32] };
        for [m, n, k] in [[64, 48, 32], [33, 17, 13], [1, 9, 5]] {
            for transposed in [[false, false], [true, false], [false, true], [true, true]] {
                let forms =
                    outputs.iter().flat_map(|c| [("alone", 0, c), ("onto c", 3, c), ("onto d", 3, c)]);
                for (form, gap, &c_dtype) in forms {
                    let rows_and_cols =
                        |rows, cols, transposed| if transposed { [cols, rows] } else { [rows, cols] };
                    let [a_rows, a_cols] = rows_and_cols(m, k, transposed[0]);
                    let [b_rows, b_cols] = rows_and_cols(k, n, transposed[1]);
                    let (lda, ldb, ldc) = (a_cols + gap, b_cols + gap, n + gap);
                    let (a, b) = (noise(a_rows * lda, 1), noise(b_rows * ldb, 2));
                    let (c, d) = (noise(m * ldc, 3), noise(m * ldc, 4));
                    let on = |x: &[f32], dtype| self.cast(&self.upload(x), dtype);
                    let (on_a, on_b) = (on(&a, dtype), on(&b, dtype));
                    let (on_c, on_d) = (on(&c, c_dtype), on(&d, c_dtype));
                    let (plus, terms) = match form {
                        "alone" => (None, vec![0.0; m * ldc]),
                        "onto c" => (Some(on_c.place(0)), wide(&c)),
                        _ => (Some(on_d.place(0)), wide(&d)),
                    };
                    let factor =
                        |array: &Array, ld, transposed| Factor { transposed, ..Factor::new(array, 0, ld) };
                    self.product(&Product {
                        m,
                        n,
                        k,
                        a: factor(&on_a, lda, transposed[0]),
                        b: factor(&on_b, ldb, transposed[1]),
                        c: on_c.place(0),
                        c_dtype,
                        ldc,
                        plus,
                    });
                    let sums = product([&a, &b], [m, n, k], transposed, [lda, ldb]);
                    // The columns behind the product keep their values.
                    let mut want = wide(&c);
                    for (i, row) in want.chunks_mut(ldc).enumerate() {
                        row[..n]
                            .iter_mut()
                            .enumerate()
                            .for_each(|(j, c)| *c = terms[i * ldc + j] + sums[i * n + j]);
                    }
                    let bound = if c_dtype == Dtype::Bf16 { 4e-3 } else { 1e-5 };
                    let what = |error| {
                        format!("{m}×{n}×{k}, transposed {transposed:?}, {form}, output {c_dtype:?}: {error}")
                    };
                    most = most.max(near(&on_c.to_vec(), &want, bound).map_err(what)?);
                    count += 1;
                }
            }
        }
        Ok(format!("{count} kinds, relative error at most {most:.0e}"))
    }

    /// Repeats work of growing size until it takes long enough. `work` receives a size and returns its amount. Returns the amount
    /// per second.
    fn rate(
        &self,
        sizes: std::ops::RangeInclusive<u32>,
        work: impl Fn(usize) -> Box<dyn FnMut() -> f64>,
    ) -> f64 {
        let mut rate = 0.0;
        for size in sizes {
            let mut run = work(1 << size);
            // The first run loads the kernel.
            run();
            if self.check().is_err() {
                return f64::NAN;
            }
            let began = Instant::now();
            let amount = run();
            let _ = self.check();
            let took = began.elapsed();
            rate = amount / took.as_secs_f64();
            if took > LONG_ENOUGH {
                break;
            }
        }
        rate
    }

    fn upload_rate(&self) -> f64 {
        let gpu = self.clone();
        self.rate(16..=28, move |bytes| {
            let (gpu, host) = (gpu.clone(), vec![0f32; bytes / 4]);
            Box::new(move || {
                drop(gpu.upload(&host));
                bytes as f64
            })
        })
    }

    /// Measures bytes read and written.
    fn copy_rate(&self) -> f64 {
        let gpu = self.clone();
        self.rate(16..=30, move |bytes| {
            let (gpu, cols) = (gpu.clone(), 1 << 12);
            let rows = bytes / 4 / cols;
            let [from, mut to] = [(); 2].map(|()| gpu.zeros(rows * cols, Dtype::F32));
            let place = Place::new(0, cols);
            Box::new(move || {
                gpu.copy_rows(&mut to, place, &from, place, [rows, cols]);
                2.0 * bytes as f64
            })
        })
    }

    /// Measures floating-point operations per second of square products.
    fn product_rate(&self, dtype: Dtype) -> f64 {
        let gpu = self.clone();
        self.rate(6..=13, move |n| {
            let gpu = gpu.clone();
            let [a, b, c] = [(); 3].map(|()| Arc::new(gpu.zeros(n * n, dtype)));
            Box::new(move || {
                gpu.product(&Product {
                    m: n,
                    n,
                    k: n,
                    a: Factor::new(&a, 0, n),
                    b: Factor::new(&b, 0, n).transposed(),
                    c: c.place(0),
                    c_dtype: dtype,
                    ldc: n,
                    plus: None,
                });
                2.0 * (n as f64).powi(3)
            })
        })
    }
}

/// Computes `a [m, k] · b [k, n]` in f64, row-major.
fn product(
    [a, b]: [&[f32]; 2],
    [m, n, k]: [usize; 3],
    transposed: [bool; 2],
    [lda, ldb]: [usize; 2],
) -> Vec<f64> {
    let at = |x: &[f32], row: usize, col: usize, ld: usize, transposed: bool| {
        f64::from(if transposed { x[col * ld + row] } else { x[row * ld + col] })
    };
    let one = |i: usize, j: usize| -> f64 {
        (0..k).map(|p| at(a, i, p, lda, transposed[0]) * at(b, p, j, ldb, transposed[1])).sum()
    };
    (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| one(i, j)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits() {
        let rates = [712.34, 71.234, 3.0, 0.000_012_345, 0.0, f64::NAN].map(three_digits);
        assert_eq!(rates, ["712", "71.2", "3.00", "0.0000123", "0.000000000", "NaN"]);
    }
}
