//! Kernels on the emulator compared with the f64 twin, under several schedules.
#![allow(clippy::unwrap_used, missing_docs)]

mod edges;
mod faults;
mod recurrent;
mod step;

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use omnigrpo_gpu::launchers::elementwise;
use omnigrpo_gpu::{
    Affine, Array, CachedGroup, Codes, Decoding, Drawn, Dtype, Gpu, Head, Heads, Marks, Mixture, Moments,
    Onto, PAGE, Pattern, Place, Row, Sampling, Step, Transfers, Turn, Unfolding, Weight,
};
use omnigrpo_kernels::activation::Activation;
use omnigrpo_kernels::attention::{AttentionLayout, Qkv, QueryRange, Shape};
use omnigrpo_kernels::experts::{Choices, Groups};
use omnigrpo_kernels::moments as codes;
use omnigrpo_kernels::optim::{self, AdamW, Rounding};
use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
use omnigrpo_kernels::{Mat, logprob, twin};

/// Schedules: all threads together, and two in which warps run ahead and copies arrive early or late.
const SCHEDULES: [u64; 3] = [0, 1, 2];

/// Opens the emulator, with the kernels of a library that `OMNIGRPO_TEST_KERNELS` names (the PTX of `tools/gpu/ptx`, or a
/// planted fault), or the GPU that `OMNIGRPO_TEST_CARD` names (tools/gpu/first-contact).
fn gpu(schedule: u64) -> Gpu {
    if let Ok(card) = std::env::var("OMNIGRPO_TEST_CARD") {
        static OPEN: std::sync::OnceLock<Gpu> = std::sync::OnceLock::new();
        let folders = ["/usr/local/cuda", "/usr/local", "/usr"].map(Into::into);
        let cache = std::env::temp_dir().join("omnigrpo-kernels");
        let open = || Gpu::cuda(card.parse().unwrap(), &folders, &cache).unwrap();
        return OPEN.get_or_init(open).clone();
    }
    match std::env::var_os("OMNIGRPO_TEST_KERNELS") {
        Some(library) => Gpu::emulated_from(library.as_ref(), schedule).unwrap(),
        None => Gpu::emulated(schedule),
    }
}

/// Draws from the softmax of all logits.
const PLAIN: Sampling = Sampling {
    temperature: 1.0,
    top_p: 1.0,
    top_k: 0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    scoring_temperature: 1.0,
};

fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next() + next()).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Returns numbers that are exact in `dtype`, on the device and for the twin.
fn numbers(gpu: &Gpu, n: usize, dtype: Dtype, seed: u64) -> (Array, Vec<f64>) {
    let array = gpu.cast(&gpu.upload(&noise(n, seed)), dtype);
    let host = wide(&array.to_vec());
    (array, host)
}

fn columns(x: &[f64], stride: usize, from: usize, width: usize) -> Vec<f64> {
    x.chunks(stride).flat_map(|row| &row[from..from + width]).copied().collect()
}

/// Returns the relative error in the root mean square.
fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let d: f64 = got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum();
    let n: f64 = want.iter().map(|b| b * b).sum();
    assert!(!d.is_nan(), "not a number");
    (d / n.max(1e-30)).sqrt()
}

/// Runs the same work under every schedule, checks that the bits are equal, and returns them.
fn under_every_schedule(run: impl Fn(&Gpu) -> Vec<Array>) -> Vec<Vec<f64>> {
    let bits = |schedule: u64| {
        let gpu = gpu(schedule);
        let results: Vec<Vec<f32>> = run(&gpu).iter().map(Array::to_vec).collect();
        gpu.check().unwrap();
        results
    };
    let first = bits(SCHEDULES[0]);
    for schedule in &SCHEDULES[1..] {
        for (i, (a, b)) in bits(*schedule).iter().zip(&first).enumerate() {
            let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "result {i} has other bits under schedule {schedule}");
        }
    }
    first.iter().map(|x| wide(x)).collect()
}

fn near(got: &[Vec<f64>], want: &[Vec<f64>], bounds: &[f64], what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, ((got, want), bound)) in got.iter().zip(want).zip(bounds).enumerate() {
        let far = error(got, want);
        assert!(far < *bound, "{what}, result {i}: {far:.1e}");
    }
}

/// Runs the forward and backward pass of one layout; returns the bits of all results.
fn attention(schedule: u64, layout: &AttentionLayout, t: usize, heads: Heads, dtype: Dtype) -> Vec<f32> {
    attention_on(&gpu(schedule), layout, t, heads, dtype)
}

fn attention_on(gpu: &Gpu, layout: &AttentionLayout, t: usize, heads: Heads, dtype: Dtype) -> Vec<f32> {
    let Heads { q, kv, d } = heads;
    let stride = (q + 2 * kv) * d;
    let (qkv, host) = numbers(gpu, t * stride, dtype, 3);
    let (dout, dhost) = numbers(gpu, t * q * d, dtype, 4);
    let pattern = Pattern::new(gpu, layout, t);
    let (out, lse) = gpu.attention(&qkv, &pattern, heads);
    let dqkv = gpu.attention_back(&qkv, &out, &lse, &dout, &pattern, heads);
    gpu.check().unwrap();
    let shape = Shape { q_heads: q, kv_heads: kv, head_dim: d };
    let scale = 1.0 / (d as f64).sqrt();
    let parts = Qkv::packed(Mat::new(&host, t, stride), shape);
    let (want, want_lse) = twin::attention_forward(parts, layout, shape, scale);
    let dhost = Mat::new(&dhost, t, q * d);
    let (dq, dk, dv) = twin::attention_backward(dhost, parts, layout, shape, scale);
    let dqkv_host = wide(&dqkv.to_vec());
    let lse_host = lse.to_vec();
    let far = lse_host
        .iter()
        .zip(&want_lse)
        .filter(|(_, want)| want.is_finite())
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, f64::max);
    let errors = [
        error(&wide(&out.to_vec()), &want),
        error(&columns(&dqkv_host, stride, 0, q * d), &dq),
        error(&columns(&dqkv_host, stride, q * d, kv * d), &dk),
        error(&columns(&dqkv_host, stride, (q + kv) * d, kv * d), &dv),
    ];
    let bound = if dtype == Dtype::Bf16 { 5e-3 } else { 1e-5 };
    let what = format!("{heads:?} {dtype:?} {layout:?}, {}: {errors:?}, log-sum-exp {far:.1e}", gpu.name());
    assert!(far < 1e-4 && errors.iter().all(|&e| e < bound), "{what}");
    [out.to_vec(), lse_host, dqkv.to_vec()].concat()
}

fn attention_under_every_schedule(layout: &AttentionLayout, t: usize, heads: Heads, dtype: Dtype) {
    let first = attention(SCHEDULES[0], layout, t, heads, dtype);
    for schedule in &SCHEDULES[1..] {
        let same = attention(*schedule, layout, t, heads, dtype)
            .iter()
            .zip(&first)
            .all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{heads:?}: other bits under schedule {schedule}");
    }
}

/// Builds a layout with more than one tile of queries and of keys, ragged ends, shared prefixes and grouped queries.
fn groups() -> (AttentionLayout, usize) {
    (AttentionLayout::groups(&[(70, vec![37, 1]), (3, vec![30])]), 141)
}

#[test]
fn attention_with_shared_prefixes() {
    let (layout, t) = groups();
    attention_under_every_schedule(&layout, t, Heads { q: 2, kv: 1, d: 64 }, Dtype::Bf16);
}

/// A card with few multiprocessors and much shared memory gets tiles of 128 queries and steps of 64 keys, a card with less shared
/// memory other kernels. The bits are the same.
fn attention_has_the_same_bits_on_every_card_with(d: usize) {
    let layout = AttentionLayout::groups(&[(130, vec![66, 65])]);
    let heads = Heads { q: 2, kv: 1, d };
    let run = |schedule, multiprocessors, kib: [usize; 2]| {
        let gpu = gpu(schedule);
        gpu.choose_as_on(Some([multiprocessors, kib[0] << 10, kib[1] << 10]));
        let got = attention_on(&gpu, &layout, 261, heads, Dtype::Bf16);
        gpu.choose_as_on(None);
        got.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    let first = run(SCHEDULES[0], 132, [99, 100]);
    for schedule in SCHEDULES {
        assert!(run(schedule, 2, [227, 228]) == first, "{heads:?} under schedule {schedule}");
    }
    assert!(run(2, 132, [227, 228]) == first, "{heads:?}");
}

#[test]
fn attention_has_the_same_bits_on_every_card() {
    attention_has_the_same_bits_on_every_card_with(64);
}

#[test]
fn attention_of_wide_heads_has_the_same_bits_on_every_card() {
    attention_has_the_same_bits_on_every_card_with(128);
}

#[test]
fn attention_in_windows() {
    let layout = AttentionLayout::full_blocks(&[64, 5, 70]);
    attention(5, &layout, 139, Heads { q: 1, kv: 1, d: 72 }, Dtype::Bf16);
}

/// Query heads that share a key head have blocks of their own, and their gradients are added afterwards.
#[test]
fn attention_of_every_group_size() {
    let layout = AttentionLayout::groups(&[(9, vec![4, 1]), (2, vec![3])]);
    for group in [1, 2, 7, 8, 16, 32] {
        for (d, dtype) in [(64, Dtype::Bf16), (6, Dtype::F32)] {
            attention(group as u64, &layout, 19, Heads { q: 2 * group, kv: 2, d }, dtype);
        }
    }
}

#[test]
#[ignore = "slow"]
fn slow_attention_of_every_width() {
    let (layout, t) = groups();
    for d in [64, 72, 80, 128] {
        attention_under_every_schedule(&layout, t, Heads { q: 4, kv: 2, d }, Dtype::Bf16);
        let windows = AttentionLayout::full_blocks(&[64, 64, 16, 48]);
        attention(7, &windows, 192, Heads { q: 2, kv: 2, d }, Dtype::Bf16);
        attention(8, &AttentionLayout::causal(129), 129, Heads { q: 3, kv: 1, d }, Dtype::Bf16);
        // Rows in no range stay zero; later queries see earlier rows.
        attention(
            9,
            &AttentionLayout::causal(130).only(&[0, 63, 64, 65, 129]),
            130,
            Heads { q: 2, kv: 1, d },
            Dtype::Bf16,
        );
        let cached = QueryRange { queries: 0..100, keys: vec![100..150, 0..100], causal: true };
        let rest = QueryRange { queries: 100..150, keys: vec![100..140, 140..150], causal: false };
        attention(
            10,
            &AttentionLayout { ranges: vec![cached, rest] },
            150,
            Heads { q: 2, kv: 2, d },
            Dtype::Bf16,
        );
    }
}

#[test]
fn plain_attention_of_any_width() {
    let layout = AttentionLayout::groups(&[(9, vec![4, 1]), (2, vec![3])]);
    for d in [6, 130] {
        attention_under_every_schedule(&layout, 19, Heads { q: 2, kv: 1, d }, Dtype::F32);
    }
    attention(3, &AttentionLayout::causal(131), 131, Heads { q: 1, kv: 1, d: 4 }, Dtype::F32);
    attention(3, &AttentionLayout::causal(20), 20, Heads { q: 1, kv: 1, d: 24 }, Dtype::Bf16);
}

/// Decoding over paged caches of completions that share prompts: equals attention over prompt and completion, with the
/// same bits in every batch. Covers widths with and without a kernel for tensor cores, more pairs of rows and heads
/// than a tile has, prompts and completions of several parts, and pages that are just full.
#[test]
fn decoding_does_not_depend_on_the_batch() {
    let cases = [
        (Dtype::F32, Heads { q: 4, kv: 2, d: 40 }),
        (Dtype::Bf16, Heads { q: 4, kv: 2, d: 40 }),
        (Dtype::Bf16, Heads { q: 32, kv: 2, d: 64 }),
        (Dtype::Bf16, Heads { q: 2, kv: 2, d: 72 }),
    ];
    for (dtype, heads) in cases {
        decoding(dtype, heads);
    }
}

/// Query heads that share a key head, in less than a tile, a whole one and several.
#[test]
fn decoding_of_every_group_size() {
    for group in [2, 7, 8, 20, 32] {
        decoding(Dtype::Bf16, Heads { q: group, kv: 1, d: 64 });
    }
}

#[test]
#[ignore = "slow"]
fn slow_decoding_of_every_width() {
    for heads in [Heads { q: 6, kv: 2, d: 80 }, Heads { q: 7, kv: 1, d: 128 }, Heads { q: 16, kv: 2, d: 128 }]
    {
        decoding(Dtype::Bf16, heads);
    }
}

/// The pages of a completion, and their expected content.
type Pages = Vec<(Array, Vec<f64>)>;

fn decoding(dtype: Dtype, heads: Heads) {
    let Heads { q, kv, d } = heads;
    let (stride, width, layers, layer) = ((q + 2 * kv) * d, 2 * kv * d, 2, 1);
    // Rows of each prompt, and tokens of each of its completions.
    let groups: [(usize, &[usize]); 3] = [(300, &[3, 130, 1, 2, 64]), (64, &[65]), (1, &[300, 7])];
    let run = |chosen: &[(usize, &[usize])], schedule: u64| {
        let gpu = gpu(schedule);
        let array = |rows: usize, seed: u64| numbers(&gpu, layers * rows * width, dtype, seed);
        let prompts: Vec<_> = (0..3).map(|g| array(groups[g].0, 20 + g as u64)).collect();
        let pages: Vec<Vec<Pages>> = (0..3)
            .map(|g| {
                let completion = |(c, len): (usize, &usize)| {
                    let page = |i: usize| array(PAGE, (1000 * g + 100 * c + i) as u64);
                    (0..len.div_ceil(PAGE)).map(page).collect()
                };
                groups[g].1.iter().enumerate().map(completion).collect()
            })
            .collect();
        let rows: Vec<(usize, usize)> =
            chosen.iter().flat_map(|&(g, slots)| slots.iter().map(move |&slot| (g, slot))).collect();
        let packed: Vec<f32> =
            rows.iter().flat_map(|&(g, slot)| noise(stride, (40 + 10 * g + slot) as u64)).collect();
        let qkv = gpu.cast(&gpu.upload(&packed), dtype);
        let cached: Vec<CachedGroup> = chosen
            .iter()
            .map(|&(g, slots)| CachedGroup {
                prompt: &prompts[g].0,
                prompt_rows: groups[g].0,
                completions: slots
                    .iter()
                    .map(|&slot| (pages[g][slot].iter().map(|page| &page.0).collect(), groups[g].1[slot]))
                    .collect(),
            })
            .collect();
        let decoding = Decoding::new(&gpu, &cached, heads);
        let out = gpu.attend_cached(&qkv, &decoding, layer, heads, Turn::default()).to_vec();
        gpu.check().unwrap();
        let qkv = wide(&qkv.to_vec());
        for (i, &(g, slot)) in rows.iter().enumerate() {
            let (prompt_rows, len) = (groups[g].0, groups[g].1[slot]);
            let new = &qkv[(i + 1) * stride - width..(i + 1) * stride];
            let mut all = prompts[g].1[layer * prompt_rows * width..].to_vec();
            for (p, (page, before)) in pages[g][slot].iter().enumerate() {
                let mut after = before.clone();
                if (len - 1) / PAGE == p {
                    let at = (layer * PAGE + (len - 1) % PAGE) * width;
                    after[at..at + width].copy_from_slice(new);
                }
                assert_eq!(wide(&page.to_vec()), after, "the token is appended, and nothing else");
                let rows = (len - p * PAGE).min(PAGE);
                all.extend_from_slice(&after[layer * PAGE * width..][..rows * width]);
            }
            let keys = vec![0..prompt_rows, prompt_rows..prompt_rows + len];
            let layout = AttentionLayout { ranges: vec![QueryRange { queries: 0..1, keys, causal: false }] };
            let shape = Shape { q_heads: q, kv_heads: kv, head_dim: d };
            let own = Mat::new(&qkv[i * stride..][..q * d], 1, q * d);
            let cached = Mat::new(&all, all.len() / width, width);
            let parts = Qkv { q: own, k: cached.columns(0..kv * d), v: cached.columns(kv * d..width) };
            let want = twin::attention_forward(parts, &layout, shape, 1.0 / (d as f64).sqrt()).0;
            let far = error(&wide(&out[i * q * d..][..q * d]), &want);
            assert!(far < if dtype == Dtype::Bf16 { 4e-3 } else { 1e-5 }, "{heads:?}, row {i}: {far}");
        }
        out.chunks(q * d).map(<[f32]>::to_vec).zip(rows).map(|(out, row)| (row, out)).collect::<Vec<_>>()
    };
    let all = run(&[(0, &[0, 1, 2, 3, 4]), (1, &[0]), (2, &[0, 1])], 0);
    for (chosen, schedule) in [(&[(2, &[1][..]), (0, &[4, 1])][..], 1), (&[(1, &[0])], 2), (&[(0, &[2])], 1)]
    {
        for (row, out) in run(chosen, schedule) {
            let (_, among) = all.iter().find(|(other, _)| *other == row).unwrap();
            assert_eq!(&out, among, "{heads:?}, {row:?}");
        }
    }
}

fn few(schedule: u64, x: &[f32], w: &[f32], [n, k]: [usize; 2], dtype: Dtype) -> Vec<f32> {
    let gpu = gpu(schedule);
    let (x, w) = (gpu.cast(&gpu.upload(x), dtype), gpu.cast(&gpu.upload(w), dtype));
    let bias = gpu.upload(&noise(n, 9));
    let t = x.len() / k;
    let mut y = gpu.zeros(t * (n + 2), Dtype::F32);
    let layer = |bias| Affine { weight: Weight::Dense(&w), bias, n };
    gpu.linear_rows(&mut y, [1, n + 2], &x, &[layer(Some(&bias))], k, Onto::Nothing);
    gpu.linear_rows(&mut y, [1, n + 2], &x, &[layer(None)], k, Onto::Output);
    gpu.check().unwrap();
    let y = y.to_vec();
    let (x, w, bias) = (wide(&x.to_vec()), wide(&w.to_vec()), wide(&bias.to_vec()));
    let want: Vec<f64> = twin::linear_forward(Mat::new(&x, t, k), Mat::new(&w, n, k), None)
        .chunks(n)
        .flat_map(|row| {
            let own = row.iter().zip(&bias).map(|(y, b)| 2.0 * y + b);
            std::iter::once(0.0).chain(own).chain([0.0]).collect::<Vec<_>>()
        })
        .collect();
    assert!(error(&wide(&y), &want) < 1e-5, "{t}×{n}×{k}");
    y
}

#[test]
fn a_row_has_the_same_bits_in_every_batch() {
    for (n, k, dtype) in [(70, 328, Dtype::Bf16), (5, 33, Dtype::Bf16), (5, 33, Dtype::F32)] {
        let (x, w) = (noise(70 * k, 1), noise(n * k, 2));
        let all = few(0, &x, &w, [n, k], dtype);
        for (schedule, rows) in [(1, 1), (2, 9), (3, 25)] {
            assert_eq!(few(schedule, &x[..rows * k], &w, [n, k], dtype), all[..rows * (n + 2)]);
        }
    }
}

/// Layers that share a launch: their outputs are neighbouring columns, added to those of a residual. More than three
/// layers take several launches. The bits of a row are the same in every batch. A row with a NaN harms no other.
#[test]
fn layers_share_a_launch() {
    let (ns, t) = ([70, 5, 64, 1], 40);
    for (k, dtype, bound) in [(520, Dtype::Bf16, 4e-3), (24, Dtype::F32, 1e-6)] {
        let width: usize = ns.iter().sum::<usize>() + 2;
        let run = |rows: std::ops::Range<usize>, schedule: u64| {
            let gpu = gpu(schedule);
            let mut x = noise(t * k, 1);
            x[3 * k] = f32::NAN;
            let x = gpu.cast(&gpu.upload(&x[rows.start * k..rows.end * k]), dtype);
            let residual = &noise(t * width, 2)[rows.start * width..rows.end * width];
            let residual = gpu.cast(&gpu.upload(residual), dtype);
            let weights = ns.map(|n| numbers(&gpu, n * k, dtype, n as u64).0);
            let biases = ns.map(|n| numbers(&gpu, n, [dtype, Dtype::F32][n % 2], 50 + n as u64).0);
            let layers: Vec<Affine> = (0..4)
                .map(|i| {
                    let bias = (i % 3 == 0).then_some(&biases[i]);
                    Affine { weight: Weight::Dense(&weights[i]), bias, n: ns[i] }
                })
                .collect();
            let mut y = gpu.cast(&residual, dtype);
            gpu.linear_rows(&mut y, [1, width], &x, &layers, k, Onto::Residual(&residual));
            gpu.check().unwrap();
            let x = wide(&x.to_vec());
            let mut want = wide(&residual.to_vec());
            let mut col = 1;
            for (i, n) in ns.into_iter().enumerate() {
                let (w, bias) = (wide(&weights[i].to_vec()), wide(&biases[i].to_vec()));
                let bias = (i % 3 == 0).then_some(&bias[..]);
                let own = twin::linear_forward(Mat::new(&x, rows.len(), k), Mat::new(&w, n, k), bias);
                for (row, own) in own.chunks(n).enumerate() {
                    own.iter().enumerate().for_each(|(j, own)| want[row * width + col + j] += own);
                }
                col += n;
            }
            (y.to_vec(), want)
        };
        let (all, want) = run(0..t, 0);
        for (row, (own, want)) in all.chunks(width).zip(want.chunks(width)).enumerate() {
            match row {
                3 => assert!(own[1..width - 1].iter().all(|x| x.is_nan())),
                _ => assert!(error(&wide(own), want) < bound, "{dtype:?}, row {row}"),
            }
        }
        for (rows, schedule) in [(0..1, 1), (2..11, 2), (20..40, 3)] {
            let (some, _) = run(rows.clone(), schedule);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let among = &all[rows.start * width..rows.end * width];
            assert_eq!(bits(&some), bits(among), "{dtype:?}, {rows:?}");
        }
    }
}

/// Products with codes of 8 and 4 bits have the bits of products with the widened weight: whole and partial tiles, blocks
/// of codes and groups of a scale, one part and several, and widths that tensor cores do not support.
#[test]
fn products_with_codes_equal_those_with_widened_weights() {
    for bits in [QuantBits::Eight, QuantBits::Four] {
        for (n, k, rows) in [(70, 200, 9), (3, 64, 1), (64, 8, 20), (130, 520, 40), (5, 33, 2), (1, 128, 8)] {
            let gpu = gpu(rows as u64);
            let values = noise(n * k, 1);
            let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&values[i * k..(i + 1) * k]);
            let (codes, scales) = QuantMatrix::from_rows(bits, n, k, row).unwrap().by_rows();
            let scales: Vec<_> = scales.iter().map(|scale| [scale.min, scale.step]).collect();
            let codes = Codes::new(&gpu, bits, [n, k], &codes, &scales);
            let widened = gpu.weight_rows(Weight::Codes(&codes), k, None, n, Dtype::Bf16);
            let x = gpu.cast(&gpu.upload(&noise(rows * k, 2)), Dtype::Bf16);
            let [of_codes, of_widened] = [Weight::Codes(&codes), Weight::Dense(&widened)].map(|weight| {
                let mut y = gpu.alloc(2 * rows * n, Dtype::F32);
                let layer = Affine { weight, bias: None, n };
                gpu.linear_rows(&mut y, [0, 2 * n], &x, &[layer; 2], k, Onto::Nothing);
                y.to_vec()
            });
            gpu.check().unwrap();
            assert_eq!(of_codes, of_widened, "{bits:?}, {n}×{k}, {rows} rows");
            let (x, w) = (wide(&x.to_vec()), wide(&widened.to_vec()));
            let want = twin::linear_forward(Mat::new(&x, rows, k), Mat::new(&w, n, k), None);
            let want: Vec<f64> = want.chunks(n).flat_map(|row| [row, row].concat()).collect();
            assert!(error(&wide(&of_codes), &want) < 1e-5, "{bits:?}, {n}×{k}, {rows} rows");
        }
    }
}

/// Gate, up and SwiGLU in one kernel have the bits of a product and of the activation, for weights of every form: whole and partial
/// tiles, more rows than one launch has, and a width at which a sum of many stages has one part. What one kernel cannot do, two do.
#[test]
fn swiglu_of_few_rows_has_the_bits_of_two_kernels() {
    let of = |bits: Option<QuantBits>, [n, k, t]: [usize; 3], dtype: Dtype| {
        let gpu = gpu((n + t) as u64);
        let x = gpu.cast(&gpu.upload(&noise(t * k, 2)), dtype);
        let values = [noise(n * k, 3), noise(n * k, 4)];
        let dense = [0, 1].map(|i| gpu.cast(&gpu.upload(&values[i]), dtype));
        let codes = bits.map(|bits| {
            [0, 1].map(|of: usize| {
                let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&values[of][i * k..(i + 1) * k]);
                let (codes, scales) = QuantMatrix::from_rows(bits, n, k, row).unwrap().by_rows();
                let scales: Vec<_> = scales.iter().map(|scale| [scale.min, scale.step]).collect();
                Codes::new(&gpu, bits, [n, k], &codes, &scales)
            })
        });
        let biases = [numbers(&gpu, n, Dtype::F32, 5).0, numbers(&gpu, n, dtype, 6).0];
        let layers = [0, 1].map(|i| Affine {
            weight: codes.as_ref().map_or(Weight::Dense(&dense[i]), |codes| Weight::Codes(&codes[i])),
            bias: (n % 3 != i).then_some(&biases[i]),
            n,
        });
        let kernels = |f: &dyn Fn() -> Array| {
            let count = || gpu.traffic().map_or(0, |[_, _, kernels]| kernels);
            let before = count();
            let y = f();
            (y.to_vec().iter().map(|y| y.to_bits()).collect::<Vec<_>>(), count() - before)
        };
        let (joined, launches) = kernels(&|| gpu.swiglu_rows(&x, layers, [t, k], dtype));
        let (apart, of_two) = kernels(&|| {
            let mut gate_up = gpu.alloc(t * 2 * n, dtype);
            gpu.linear_rows(&mut gate_up, [0, 2 * n], &x, &layers, k, Onto::Nothing);
            gpu.swiglu(&gate_up, t, n)
        });
        gpu.check().unwrap();
        assert_eq!(joined, apart, "{bits:?}, {n}×{k}, {t} rows, {dtype:?}");
        [launches, of_two]
    };
    for bits in [None, Some(QuantBits::Eight), Some(QuantBits::Four)] {
        for sizes in [[70, 72, 9], [3, 64, 1], [32, 128, 70], [33, 120, 40], [33, 120, 20], [4290, 136, 3]] {
            let [joined, apart] = of(bits, sizes, Dtype::Bf16);
            assert!(joined < apart || apart == 0, "{bits:?}, {sizes:?}: {joined} kernels");
        }
        for sizes in [[70, 520, 9], [5, 33, 2]] {
            let [joined, apart] = of(bits, sizes, Dtype::Bf16);
            assert_eq!(joined, apart, "{bits:?}, {sizes:?}");
        }
    }
    of(None, [4290, 648, 9], Dtype::Bf16);
    of(None, [5, 24, 2], Dtype::F32);
}

/// A product is added to other rows, whose values stay, and to its output's.
#[test]
fn products_are_added_to_a_residual() {
    let (t, n, k, width) = (3, 5, 7, 9);
    for (dtype, bound) in [(Dtype::F32, 1e-6), (Dtype::Bf16, 4e-3)] {
        let gpu = gpu(1);
        let [(x, xs), (w, ws), (residual, rs)] =
            [(t * k, 1), (n * k, 2), (t * width, 3)].map(|(n, seed)| numbers(&gpu, n, dtype, seed));
        let mut y = gpu.zeros(t * width, dtype);
        let sizes = [0, n, k];
        gpu.linear(&mut y, [2, width], &x, Weight::Dense(&w), sizes, Onto::Residual(&residual));
        gpu.linear(&mut y, [2, width], &x, Weight::Dense(&w), sizes, Onto::Output);
        gpu.check().unwrap();
        let product = twin::linear_forward(Mat::new(&xs, t, k), Mat::new(&ws, n, k), None);
        let want: Vec<f64> = (0..t * width)
            .map(|i| match i % width {
                col @ 2..7 => rs[i] + 2.0 * product[i / width * n + col - 2],
                _ => 0.0,
            })
            .collect();
        assert!(error(&wide(&y.to_vec()), &want) < bound, "{dtype:?}");
        assert_eq!(wide(&residual.to_vec()), rs);
    }
}

/// Returns step number `count` for a GPU and for the CPU.
fn step_of(count: u64, random: Option<u32>) -> (Step, AdamW) {
    let (lr, betas, eps, weight_decay, grad_scale) = (0.01, [0.9, 0.95], 1e-8, 0.1, 0.5);
    let on_cpu = AdamW { lr, betas, eps, weight_decay, grad_scale, step: count };
    (Step { lr, betas, eps, weight_decay, grad_scale, count, random }, on_cpu)
}

/// The optimizer compared with the twin over several steps; bf16 weights store f32 values in two halves.
#[test]
fn adamw_in_two_halves_is_adamw_in_f32() {
    let gpu = gpu(1);
    let n = 70;
    let start = noise(n, 1);
    let (mut wide_weight, mut wide_m, mut wide_v) = (wide(&start), vec![0.0; n], vec![0.0; n]);
    let (mut weight, mut rest) = gpu.split_master(&start);
    assert_eq!(gpu.join_master(&weight, &rest), start);
    let mut single = gpu.upload(&start);
    let [mut m, mut v, mut m2, mut v2] = [(); 4].map(|()| gpu.zeros(n, Dtype::F32));
    for count in 1..=4 {
        let grad = noise(n, 10 + count);
        let (step, by) = step_of(count, None);
        let on_device = gpu.upload(&grad);
        gpu.adamw(&mut weight, Some(&mut rest), [&mut m, &mut v], &on_device, &step);
        gpu.adamw(&mut single, None, [&mut m2, &mut v2], &on_device, &step);
        twin::adamw(&wide(&grad), &by.wide(), &mut wide_weight, &mut wide_m, &mut wide_v);
    }
    gpu.check().unwrap();
    let joined = gpu.join_master(&weight, &rest);
    assert_eq!(joined, single.to_vec());
    assert!(error(&wide(&joined), &wide_weight) < 1e-6);
    let rounded: Vec<f32> = joined.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    assert_eq!(weight.to_vec(), rounded);
}

/// Moments in 8 bits, and weights that are rounded at random, have the bits of the CPU in every form of the weight.
#[test]
fn updates_in_few_bits_are_those_of_the_cpu() {
    let mut seen = [0; 256];
    for (schedule, n) in [(0, 1), (1, 255), (2, 256), (1, 259), (0, 20_000)] {
        let gpu = gpu(schedule);
        let start = noise(n, 1);
        let narrow: Vec<bf16> = start.iter().map(|&x| bf16::from_f32(x)).collect();
        for (random, form) in [(None, "f32"), (None, "bf16"), (Some(0x9234_5678), "bf16"), (None, "rest")] {
            let (mut weight, mut rest) = match form {
                "f32" => (gpu.upload(&start), None),
                "bf16" => (gpu.upload_bf16(&narrow), None),
                _ => (gpu.upload_bf16(&narrow), Some(gpu.zeros(n, Dtype::Bf16))),
            };
            let mut single = gpu.upload_bf16(&narrow);
            let (mut wide, mut host) = (start.clone(), narrow.clone());
            let mut host_single = narrow.clone();
            let mut master: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
            let zeros = codes::Codes::zeros(n);
            let [mut m, mut v] = [(); 2].map(|()| gpu.upload_codes(&zeros.codes, &zeros.scales));
            let [mut host_m, mut host_v] = [zeros.clone(), zeros];
            let [mut m2, mut v2] = [(); 2].map(|()| gpu.zeros(n, Dtype::F32));
            let [mut host_m2, mut host_v2] = [vec![0.0; n], vec![0.0; n]];
            for count in 1..=4 {
                // Numbers of many sizes, and some zeros.
                let grad: Vec<f32> =
                    noise(n, 10 + count).iter().map(|x| x.powi(9) * f32::from(*x > -0.7)).collect();
                let (step, by) = step_of(count, random);
                let on_device = gpu.upload(&grad);
                gpu.adamw(&mut weight, rest.as_mut(), Moments::Codes([&mut m, &mut v]), &on_device, &step);
                gpu.adamw(&mut single, None, [&mut m2, &mut v2], &on_device, &step);
                let rounding = random.map_or(Rounding::Nearest, |key| Rounding::Random { key, first: 0 });
                let moments = optim::Moments::Codes([&mut host_m, &mut host_v].map(|x| x.get_mut(0..n)));
                match form {
                    "f32" => optim::adamw(&grad, &by, &mut wide, moments),
                    "bf16" => optim::adamw(&grad, &by, optim::Updated::Bf16(&mut host, rounding), moments),
                    _ => optim::adamw(&grad, &by, optim::Updated::Master(&mut host, &mut master), moments),
                }
                optim::adamw(
                    &grad,
                    &by,
                    optim::Updated::Bf16(&mut host_single, rounding),
                    [&mut host_m2, &mut host_v2],
                );
            }
            gpu.check().unwrap();
            let what = format!("{n} values, {form}, {random:?}");
            for (got, want) in [(&m, &host_m), (&v, &host_v)] {
                let (codes, scales) = got.read();
                assert_eq!((&codes[..n], &scales), (&want.codes[..], &want.scales), "{what}");
                assert!(codes[n..].iter().all(|code| *code == 0));
                codes.iter().for_each(|&code| seen[usize::from(code)] += 1);
            }
            match (form, &rest) {
                ("f32", _) => assert_eq!(weight.to_vec(), wide, "{what}"),
                (_, Some(rest)) => {
                    // A tie that is rounded down has no rest of its own.
                    let joined = gpu.join_master(&weight, rest);
                    let far = joined
                        .iter()
                        .zip(&master)
                        .filter(|(a, b)| a.to_bits().abs_diff(b.to_bits()) > 1)
                        .count();
                    assert_eq!(far, 0, "{what}");
                }
                _ => assert_eq!(weight.to_bf16(), host, "{what}"),
            }
            assert_eq!(single.to_bf16(), host_single, "{what}");
        }
    }
    // The codes of the smallest numbers are rare.
    let unseen = seen.iter().filter(|count| **count == 0).count();
    assert!(unseen < 60, "{unseen} codes did not occur");
}

/// Every kind of lower half below even and odd upper halves: the weight is rounded to nearest even as on the CPU, and
/// the value is stored exactly, except for a tie that is rounded down. A kernel step with a learning rate of 0 agrees
/// with the host.
#[test]
fn masters_round_to_even() {
    let gpu = gpu(0);
    let mut master = Vec::new();
    for upper in [0x3f80u32, 0x3f81, 0xbf7f, 0xc002, 0x0001, 0x0080] {
        let lowers = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        master.extend(lowers.map(|lower| f32::from_bits(upper << 16 | lower)));
    }
    let kept: Vec<f32> = master
        .iter()
        .map(|x| f32::from_bits(x.to_bits() - u32::from(x.to_bits() & 0x1_ffff == 0x8000)))
        .collect();
    let rounded: Vec<u16> = master.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
    let (mut weight, mut rest) = gpu.split_master(&master);
    let [mut m, mut v] = [(); 2].map(|()| gpu.zeros(master.len(), Dtype::F32));
    let zeros = gpu.zeros(master.len(), Dtype::F32);
    let step = Step {
        lr: 0.0,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0.0,
        grad_scale: 1.0,
        count: 1,
        random: None,
    };
    for _ in 0..2 {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&gpu.join_master(&weight, &rest)), bits(&kept));
        let got: Vec<u16> = weight.to_bf16().iter().map(|x| x.to_bits()).collect();
        assert_eq!(got, rounded);
        gpu.adamw(&mut weight, Some(&mut rest), [&mut m, &mut v], &zeros, &step);
        gpu.check().unwrap();
    }
}

/// A step that ends half-way between two bf16 numbers: 0.75 · 348 = 261 rounds down to 260, which is even; 0.75 · 356 =
/// 267 rounds up to 268.
#[test]
fn a_step_to_a_tie_rounds_to_even() {
    let gpu = gpu(0);
    let (mut weight, mut rest) = gpu.split_master(&[348.0, 356.0]);
    let [mut m, mut v, grad] = [(); 3].map(|()| gpu.zeros(2, Dtype::F32));
    let step = Step {
        lr: 1.0,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0.25,
        grad_scale: 1.0,
        count: 1,
        random: None,
    };
    gpu.adamw(&mut weight, Some(&mut rest), [&mut m, &mut v], &grad, &step);
    gpu.check().unwrap();
    assert_eq!(weight.to_vec(), [260.0, 268.0]);
    assert_eq!(gpu.join_master(&weight, &rest), [261f32.next_down(), 267.0]);
}

/// The product of an f32 weight, such as that of an adapter, is added to columns of bf16 rows and rounded once. cuBLASLt has no
/// such product.
#[test]
fn an_f32_product_is_added_to_bf16_rows() {
    let gpu = gpu(1);
    let (t, k, n, width) = (3, 6, 5, 9);
    let (x, w) = (noise(t * k, 1), noise(n * k, 2));
    let y0: Vec<bf16> = noise(t * width, 3).into_iter().map(bf16::from_f32).collect();
    let mut y = gpu.upload_bf16(&y0);
    let weight = gpu.upload(&w);
    gpu.linear(&mut y, [2, width], &gpu.upload(&x), Weight::Dense(&weight), [0, n, k], Onto::Output);
    let want = |i: usize| {
        let (row, col) = (i / width, i % width);
        let terms = (0..k).filter(|_| (2..2 + n).contains(&col));
        let product: f64 = terms.map(|j| f64::from(x[row * k + j]) * f64::from(w[(col - 2) * k + j])).sum();
        bf16::from_f64(f64::from(y0[i]) + product).to_f32()
    };
    let got = y.to_vec();
    gpu.check().unwrap();
    // A sum in f32 may be on the other side of a tie.
    assert!(got.iter().enumerate().all(|(i, &x)| (x - want(i)).abs() <= want(i).abs() / 128.0));
    assert!(got.iter().enumerate().filter(|(i, x)| **x == want(*i)).count() > t * width - 2);
}

/// Arrays of several sizes travel to main memory and back beside other work. A pinned buffer of the emulator has 4 KiB.
#[test]
fn transfers() {
    let gpu = gpu(1);
    let transfers = Transfers::new(&gpu);
    let sizes = [0, 1, 1023, 1024, 1025, 5000, 3, 4096];
    let arriving: Vec<_> = (sizes.iter().zip(1..))
        .map(|(&n, seed)| transfers.download(Arc::new(gpu.upload(&noise(n, seed))), vec![7.0; 11]))
        .collect();
    for ((&n, seed), arriving) in sizes.iter().zip(1..).zip(arriving) {
        assert_eq!(arriving.wait().unwrap(), noise(n, seed), "{n} elements");
    }
    for &n in &sizes {
        let (values, narrow) = (noise(n, 2), gpu.upload_bf16(&vec![bf16::ONE; n]));
        let before = gpu.sum_of_squares(&narrow);
        let mut covered = 0;
        transfers.upload(&narrow, 0..n, |range, to| {
            assert_eq!(range.start, covered);
            covered = range.end;
            let some: Vec<bf16> = values[range].iter().map(|&x| bf16::from_f32(x)).collect();
            to.copy_from_slice(bytemuck::cast_slice(&some));
        });
        // A kernel that follows reads the new values.
        let rounded: Vec<f32> = values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_eq!((covered, before, gpu.cast(&narrow, Dtype::F32).to_vec()), (n, n as f64, rounded));
    }
    // More than one buffer of a GPU, and a part of an array.
    let n = if std::env::var_os("OMNIGRPO_TEST_CARD").is_some() { (8 << 20) + 77 } else { 8077 };
    let array = gpu.zeros(n, Dtype::F32);
    let value = |i: usize| (i % 1_000_003) as f32;
    transfers.upload(&array, 5..n - 9, |range, to| {
        let some: Vec<f32> = range.map(value).collect();
        to.copy_from_slice(bytemuck::cast_slice(&some));
    });
    let got = transfers.download(Arc::new(array), Vec::new()).wait().unwrap();
    let want = |i| if (5..n - 9).contains(&i) { value(i) } else { 0.0 };
    assert!(got.len() == n && got.iter().enumerate().all(|(i, &x)| x == want(i)));
    gpu.check().unwrap();
    // A kernel that was queued just before computes the values.
    let wide = gpu.cast(&gpu.upload_bf16(&vec![bf16::ONE; 3000]), Dtype::F32);
    assert_eq!(transfers.download(Arc::new(wide), Vec::new()).wait().unwrap(), vec![1.0; 3000]);
    // A result that nobody waits for.
    drop(transfers.download(Arc::new(gpu.upload(&noise(3000, 1))), Vec::new()));
}

/// After a failure, values arrive as NaN, and an upload still calls the function that makes the values.
#[test]
fn transfers_after_a_failure() {
    if std::env::var_os("OMNIGRPO_TEST_CARD").is_some() {
        return;
    }
    let gpu = Gpu::emulated_with(0, 1 << 12);
    let transfers = Transfers::new(&gpu);
    let array = Arc::new(gpu.upload(&[1.0; 10]));
    drop(gpu.zeros(1 << 12, Dtype::F32));
    assert!(transfers.download(Arc::clone(&array), Vec::new()).wait().unwrap().iter().all(|x| x.is_nan()));
    let mut made = 0;
    transfers.upload(&array, 0..10, |range, _| made += range.len());
    assert_eq!(made, 10);
    assert!(matches!(gpu.check(), Err(omnigrpo_gpu::Error::Memory { .. })));
}

/// Checks the bf16 values that a kernel left.
fn is_rounded(x: &Array) {
    assert_eq!(x.rounded().unwrap().to_vec(), x.gpu().cast(x, Dtype::Bf16).to_vec());
}

/// Norms of rows shorter and longer than a block of threads handles at a time, f32 and bf16.
#[test]
fn norms() {
    for (h, dtype) in [(33, Dtype::F32), (1100, Dtype::F32), (70, Dtype::Bf16)] {
        let t = 300;
        let t = if h > 1000 { 3 } else { t };
        let bound = if dtype == Dtype::Bf16 { 4e-3 } else { 2e-6 };
        let gpu = gpu(0);
        let inputs = [t * h, h, h, t * h, t * h];
        let host: Vec<Vec<f64>> =
            inputs.iter().zip(1..).map(|(&n, seed)| numbers(&gpu, n, dtype, seed).1).collect();
        let got = under_every_schedule(|gpu| {
            let [x, w, b, dy, dx] = std::array::from_fn(|i| numbers(gpu, inputs[i], dtype, i as u64 + 1).0);
            let (y, rstd) = gpu.rms(&x, &w, 1e-5, dtype);
            let mut to = gpu.cast(&dx, Dtype::F32);
            gpu.rms_back(&mut to, &dy, &x, &rstd, &w, true);
            is_rounded(&to);
            let mut dw = gpu.zeros(h, Dtype::F32);
            gpu.norm_weight(&mut dw, &dy, &x, None, (&rstd, 0));
            let (z, stats) = gpu.layer(&x, &w, &b, 1e-5, dtype);
            let mut to2 = gpu.cast(&dx, Dtype::F32);
            gpu.layer_back(&mut to2, &dy, &x, &stats, &w, true);
            is_rounded(&to2);
            let mut dw2 = gpu.zeros(h, Dtype::F32);
            gpu.norm_weight(&mut dw2, &dy, &x, Some((&stats, 0)), (&stats, t));
            let mut db = gpu.cast(&b, Dtype::F32);
            gpu.add_column_sums(&mut db, &dy, [0, h], None, t);
            vec![y, to, dw, z, to2, dw2, db]
        });
        let [x, w, b, dy, dx0] = &host[..] else { unreachable!() };
        let [x, dy] = [x, dy].map(|x| Mat::new(x, t, h));
        let (y, stats) = twin::rms_forward(x, w, 1e-5);
        let (dx, dw) = twin::rms_backward(dy, x, w, &stats);
        let (z, stats) = twin::layer_forward(x, w, b, 1e-5);
        let (dx2, dw2, db) = twin::layer_backward(dy, x, w, &stats);
        let plus = |a: &[f64]| a.iter().zip(dx0).map(|(a, b)| a + b).collect::<Vec<f64>>();
        let db = db.iter().zip(b).map(|(db, b)| db + b).collect();
        near(&got, &[y, plus(&dx), dw, z, plus(&dx2), dw2, db], &[bound; 7], &format!("{h} {dtype:?}"));
    }
}

/// Sums over all elements, of more than one block; sums of rows and their transpose.
#[test]
fn sums() {
    let n = 66_001;
    let got = under_every_schedule(|gpu| {
        let x = gpu.upload(&noise(n, 1));
        let squares = gpu.sum_of_squares(&x);
        let (rows, cols) = (5, 7);
        let x = gpu.upload(&noise(rows * cols, 2));
        let mut y = gpu.upload(&noise(3 * cols, 3));
        gpu.mix(
            &mut y,
            &x,
            &Mixture::new(gpu, &[0, 2, 2, 3], &[4, 0, 1], Some(&[0.5, -1.0, 2.0])),
            cols,
            true,
        );
        let mut back = gpu.zeros(rows * cols, Dtype::F32);
        let reversed = Mixture::reversed(gpu, vec![(4, 0, 0.5), (0, 0, -1.0), (4, 2, 2.0)]);
        gpu.mix(&mut back, &y, &reversed, cols, true);
        // Columns 2..5 of wider rows, of more than one part.
        let (wide, b) = (gpu.upload(&noise(300 * cols, 4)), gpu.upload(&noise(300 * 3, 5)));
        let mut columns = gpu.upload(&noise(3, 6));
        gpu.add_column_sums(&mut columns, &wide, [2, cols], Some(&b), 300);
        vec![gpu.upload(&[squares as f32]), y, back, columns]
    });
    let squares: f64 = noise(n, 1).iter().map(|&x| f64::from(x).powi(2)).sum();
    let (x, y0) = (noise(35, 2), noise(21, 3));
    let y: Vec<f64> = (0..21)
        .map(|i| {
            let at = |row: usize| f64::from(x[row * 7 + i % 7]);
            f64::from(y0[i]) + [0.5 * at(4) - at(0), 0.0, 2.0 * at(1)][i / 7]
        })
        .collect();
    let back = (0..35)
        .map(|i| match i / 7 {
            4 => 0.5 * y[i % 7] + 2.0 * y[14 + i % 7],
            0 => -y[i % 7],
            _ => 0.0,
        })
        .collect();
    let (wide, b) = (noise(300 * 7, 4), noise(300 * 3, 5));
    let term = |row: usize, j: usize| f64::from(wide[row * 7 + 2 + j]) * f64::from(b[row * 3 + j]);
    let columns =
        (0..3).map(|j| f64::from(noise(3, 6)[j]) + (0..300).map(|row| term(row, j)).sum::<f64>()).collect();
    near(&got, &[vec![squares], y, back, columns], &[1e-6; 4], "sums");
}

/// The head in pieces of rows and of the vocabulary, with repeated tokens and a row without targets.
#[test]
fn the_head() {
    let (rows, h, vocab, temperature) = (6, 20, 613, 0.7f32);
    let (offsets, tokens) = ([0u32, 3, 3, 4, 4, 4, 6], [7u32, 612, 7, 0, 300, 5]);
    let (dlogp, dentropy) = (noise(6, 5), noise(6, 6));
    let got = under_every_schedule(|gpu| {
        let (x, w) = (gpu.upload(&noise(rows * h, 1)), gpu.upload(&noise(vocab * h, 2)));
        let marks = Marks::new(gpu, &offsets, &tokens);
        let head = Head { weight: Weight::Dense(&w), vocab, h, temperature };
        let [logp, entropy, lse] = gpu.score(&x, head, &marks);
        let mut dhead = gpu.zeros(vocab * h, Dtype::F32);
        let upstream = (&gpu.upload(&dlogp), Some(&gpu.upload(&dentropy)));
        let dx = gpu.score_back(&x, head, &marks, [&entropy, &lse], upstream, Some(&mut dhead));
        vec![logp, entropy, lse, dx, dhead]
    });
    let (x, w) = (wide(&noise(rows * h, 1)), wide(&noise(vocab * h, 2)));
    let (offsets, t) = (offsets.map(|o| o as usize), f64::from(temperature));
    let (x, w) = (Mat::new(&x, rows, h), Mat::new(&w, vocab, h));
    let targets = logprob::Targets { tokens: &tokens, offsets: &offsets };
    let logprob::Scores { logp, entropy, lse } = twin::logprob_forward(x, w, targets, t);
    let (dlogp, dentropy) = (wide(&dlogp), wide(&dentropy));
    let gradient = logprob::Gradient { logp: &dlogp, entropy: Some(&dentropy) };
    let (dx, dw) = twin::logprob_backward(gradient, x, w, targets, t);
    near(&got, &[logp, entropy, lse, dx, dw], &[2e-6, 2e-5, 2e-6, 1e-5, 1e-5], "head");
}

/// Single elements at odd widths, where vectors do not fit, and between dtypes.
#[test]
fn elements() {
    let (t, i) = (5, 7);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let bound = if dtype == Dtype::Bf16 { 5e-3 } else { 1e-6 };
        let got = under_every_schedule(|gpu| {
            let (mut gate_up, _) = numbers(gpu, t * 2 * i, dtype, 1);
            let (dy, _) = numbers(gpu, t * i, dtype, 2);
            let y = gpu.swiglu(&gate_up, t, i);
            let (mut again, mut both) = (gpu.alloc(t * i, dtype), gpu.cast(&gate_up, dtype));
            gpu.swiglu_back(&mut both, &dy, Some(&mut again), t, i);
            gpu.swiglu_back(&mut gate_up, &dy, None, t, i);
            assert_eq!([both, again].map(|x| x.to_vec()), [&gate_up, &y].map(|x| x.to_vec()));
            let act = gpu.activation(&dy, Activation::GeluErf);
            let (scale, _) = numbers(gpu, i, dtype, 3);
            let scaled = gpu.alloc(t * i, y.dtype());
            gpu.each_quad(elementwise::scale_columns(&scaled, &dy, &y, &scale, t, i), t, i);
            // Columns 1..6 of rows 4 and 0 into columns 2..7 of rows 1 and 2, as bf16.
            let mut to = gpu.zeros(3 * i, Dtype::Bf16);
            let [rows, from] = [[1u32, 2], [4, 0]].map(|rows| gpu.upload_words(&rows));
            let [target, source] = [Place::new(2, i).of(&rows), Place::new(1, i).of(&from)];
            gpu.copy_rows(&mut to, target, &dy, source, [2, 5]);
            let (cos, sin) = (gpu.upload(&noise(t * 3, 4)), gpu.upload(&noise(t * 3, 5)));
            let mut turned = gpu.cast(&dy, dtype);
            gpu.rotate(&mut turned, [t, i], &cos, &sin, [1, 6], true);
            vec![y, gate_up, act, scaled, to, turned]
        });
        let gpu = gpu(0);
        let [gate_up, dy, scale] =
            [(t * 2 * i, 1), (t * i, 2), (i, 3)].map(|(n, seed)| numbers(&gpu, n, dtype, seed).1);
        let (gate_up, rows) = (Mat::new(&gate_up, t, 2 * i), Mat::new(&dy, t, i));
        let y = twin::swiglu_forward(gate_up);
        let act = dy.iter().map(|&x| twin::activation(Activation::GeluErf, x).0).collect();
        let scaled = twin::residual_forward(rows, Mat::new(&y, t, i), &scale);
        let mut to = vec![0.0; 21];
        to[9..14].copy_from_slice(&dy[29..34]);
        to[16..21].copy_from_slice(&dy[1..6]);
        let mut turned = dy.clone();
        for r in 0..t {
            let own = rows.columns(0..6).row_range(r..r + 1);
            let [c, s] = [4, 5].map(|seed| wide(&noise(t * 3, seed)[r * 3..r * 3 + 3]));
            let [c, s] = [&c, &s].map(|x| Mat::new(x, 1, 3));
            turned[r * i..r * i + 6].copy_from_slice(&twin::rope(c, s, true, own, 6));
        }
        let back = twin::swiglu_backward(rows, gate_up);
        near(
            &got,
            &[y, back, act, scaled, to, turned],
            &[bound, bound, bound, bound, 4e-3, bound],
            "elements",
        );
    }
}

/// Images of 2×3 with more rows than one part of a sum, and patches that read a row twice or read none.
#[test]
fn convolutions() {
    let (c, side, many) = (5, [2, 3], 300);
    let got = under_every_schedule(|gpu| {
        let [x, dy] = [1, 2].map(|seed| gpu.upload(&noise(12 * c, seed)));
        let w = gpu.upload(&noise(9 * c, 3));
        let mut dw = gpu.upload(&noise(9 * c, 7));
        let [pictures, dpictures] = [8, 9].map(|seed| gpu.upload(&noise(many * c, seed)));
        gpu.depthwise_weight(&mut dw, &dpictures, &pictures, side);
        let patches = Unfolding::new(gpu, &[3, u32::MAX, 3, 0], 2, 12);
        let unfolded = gpu.unfold(&x, &patches, c);
        let mut dx = gpu.upload(&noise(12 * c, 6));
        gpu.fold(&mut dx, &unfolded, &patches, c);
        let gate = gpu.upload(&noise(2 * c, 4));
        let [gx, dgate] = gpu.gate_back(&x, &gate, &dy, c);
        let logits = gpu.upload(&noise(3, 5));
        let blended = gpu.blend(&x, &logits);
        let [bx, dlogits] = gpu.blend_back(&x, &logits, &blended);
        let out = [gpu.depthwise(&x, &w, side, false), gpu.depthwise(&dy, &w, side, true)];
        let [y, back] = out;
        vec![y, back, dw, unfolded, dx, gx, dgate, blended, bx, dlogits]
    });
    let [x, dy, w] = [(12 * c, 1), (12 * c, 2), (9 * c, 3)].map(|(n, seed)| wide(&noise(n, seed)));
    let (gate, logits) = (wide(&noise(2 * c, 4)), wide(&noise(3, 5)));
    let (host, dhost) = (x, dy);
    let [x, dy] = [&host, &dhost].map(|x| Mat::new(x, 12, c));
    let y = twin::depthwise3_forward(x, &w, side);
    let (back, _) = twin::depthwise3_backward(dy, x, &w, side);
    let plus = |a: Vec<f64>, seed: u64| {
        let before = noise(a.len(), seed);
        a.iter().zip(before).map(|(a, b)| a + f64::from(b)).collect::<Vec<f64>>()
    };
    let [pictures, dpictures] = [8, 9].map(|seed| wide(&noise(many * c, seed)));
    let [pictures, dpictures] = [&pictures, &dpictures].map(|x| Mat::new(x, many, c));
    let dw = plus(twin::depthwise3_backward(dpictures, pictures, &w, side).1, 7);
    let sources = [3, u32::MAX, 3, 0];
    let unfolded = twin::unfold(x, &sources, 2);
    let dx = plus(twin::fold(Mat::new(&unfolded, 2, 2 * c), &sources, 2, 12), 6);
    let (gx, dgate) = twin::gate_backward(dy, x, Mat::new(&gate, 2, c));
    let alternatives = Mat::new(&host, 3, 4 * c);
    let blended = twin::blend_forward(alternatives, &logits);
    let (bx, dlogits) = twin::blend_backward(&blended, alternatives, &logits);
    let want = [y, back, dw, unfolded, dx, gx, dgate, blended, bx, dlogits];
    near(&got, &want, &[2e-6; 10], "convolutions");
}

/// The gradient of a blend's logits is a sum of more than one part if alternatives are long.
#[test]
fn a_blend_of_several_parts() {
    let n = (1 << 16) + 5;
    let gpu = gpu(1);
    let (host, dhost, logits) = (noise(2 * n, 1), noise(n, 2), [0.5, -0.25]);
    let [x, dy] = [&host, &dhost].map(|x| gpu.upload(x));
    let [_, dlogits] = gpu.blend_back(&x, &gpu.upload(&logits), &dy);
    gpu.check().unwrap();
    let (_, want) = twin::blend_backward(&wide(&dhost), Mat::new(&wide(&host), 2, n), &wide(&logits));
    near(&[wide(&dlogits.to_vec())], &[want], &[1e-5], "blend");
}

/// Experts, one of which has no place: products by place and by expert, weights of places with large logits, and
/// gradients. Rows are longer than a block of threads handles at a time, and products are longer than a bf16 sum keeps
/// exact. The bits of a place do not depend on other places.
#[test]
fn experts() {
    // On tensor cores, with 8, 16, 32 and 64 places at a time, which are fewer than some experts have, and in two launches.
    let sizes = [(31, 40, 200, 136), (31, 12, 72, 64), (31, 6, 64, 8), (110, 5, 64, 72), (520, 5, 8, 8)];
    for sizes in std::iter::once((31, 5, 67, 33)).chain(sizes) {
        experts_of(sizes);
    }
}

fn experts_of((t, all, k, n): (usize, usize, usize, usize)) {
    let (each, h) = (2, if t > 100 { 40 } else { 1030 });
    let choices = [[0, 4], [3, 4], [1, 0]];
    let mut placed: Vec<(u32, usize)> =
        (0..t).flat_map(|row| choices[row % 3].map(|expert| (expert, row))).collect();
    placed.sort_unstable();
    let experts: Vec<u32> = placed.iter().map(|place| place.0).collect();
    let count = placed.len();
    let offsets: Vec<usize> =
        (0..=all as u32).map(|expert| experts.partition_point(|&own| own < expert)).collect();
    let mut places: Vec<u32> = (0..count as u32).collect();
    places.sort_by_key(|&place| placed[place as usize].1);
    let logits: Vec<f32> =
        noise(t * all, 3).iter().enumerate().map(|(i, x)| x + (i / all % 90 * 7) as f32).collect();
    for (dtype, bound) in [(Dtype::F32, 2e-6), (Dtype::Bf16, 4e-3)] {
        let sizes = [count * k, all * k * n, count * n, count * h, count * h];
        let got = under_every_schedule(|gpu| {
            let [x, w, dy, wide, dwide] =
                std::array::from_fn(|i| numbers(gpu, sizes[i], dtype, i as u64 + 5).0);
            let on_device = gpu.upload_words(&experts);
            let weight = Weight::Dense(&w);
            let [mut by_place, mut by_expert] = [(); 2].map(|()| gpu.alloc(count * n, dtype));
            gpu.experts_rows(&mut by_place, &x, weight, &on_device, [k, n]);
            gpu.experts(&mut by_expert, &x, weight, &offsets, [k, n]);
            let (mut dx, mut dw) = (gpu.alloc(count * k, dtype), gpu.upload(&noise(all * k * n, 4)));
            gpu.experts_dx(&mut dx, &dy, weight, &offsets, [k, n]);
            gpu.experts_dw(&mut dw, &x, &dy, (&offsets, dtype), [k, n]);
            // Compute the second expert with places alone.
            let (first, last) = (offsets[1], offsets[2]);
            let some = gpu.cast(&gpu.upload(&x.to_vec()[first * k..last * k]), dtype);
            let mut alone = gpu.alloc((last - first) * n, dtype);
            let expert = gpu.upload_words(&experts[first..last]);
            gpu.experts_rows(&mut alone, &some, weight, &expert, [k, n]);
            assert_eq!(alone.to_vec(), by_place.to_vec()[first * n..last * n], "others decide");
            let logits = gpu.upload(&logits);
            let ends: Vec<u32> = (0..=t as u32).map(|row| row * each as u32).collect();
            let mixture = Mixture::new(gpu, &ends, &places, None);
            let weighed = gpu.weigh(&wide, &logits, &mixture, &on_device, all);
            let [back, dlogits] = gpu.weigh_back([&wide, &dwide], &logits, &mixture, &on_device, all);
            vec![by_place, by_expert, dx, dw, weighed, back, dlogits]
        });
        let gpu = gpu(0);
        let host: Vec<Vec<f64>> =
            sizes.iter().zip(5..).map(|(&n, seed)| numbers(&gpu, n, dtype, seed).1).collect();
        let [x, w, dy, wide_rows, dwide] = &host[..] else { unreachable!() };
        let (x, w, dy) = (Mat::new(x, count, k), Mat::new(w, all * k, n), Mat::new(dy, count, n));
        let y = twin::experts_forward(x, w, Groups(&offsets));
        let (dx, mut dw) = twin::experts_backward(dy, x, w, Groups(&offsets));
        dw.iter_mut().zip(noise(all * k * n, 4)).for_each(|(dw, before)| *dw += f64::from(before));
        let logits = wide(&logits);
        let (logits, choices) = (Mat::new(&logits, t, all), Choices { places: &places, experts: &experts });
        let [rows, drows] = [wide_rows, dwide].map(|x| Mat::new(x, count, h));
        let weighed = twin::weigh_forward(rows, logits, choices);
        let (back, dlogits) = twin::weigh_backward(drows, rows, logits, choices);
        let want = [y.clone(), y, dx, dw, weighed, back, dlogits];
        near(&got, &want, &[bound, bound, bound, 1e-5, bound, bound, 1e-5], &format!("{dtype:?}"));
    }
}

/// The chosen experts are the first of the sorted logits, in the order of their indices; more experts than a warp has
/// lanes. Zeros are equal whatever their sign, and NaN with a positive sign comes first.
#[test]
fn a_router_chooses_the_largest_logits() {
    for (all, each) in [(1, 1), (4, 2), (33, 33), (70, 6)] {
        let t = 9;
        let mut logits: Vec<f32> = noise(t * all, 3).iter().map(|x| (x * 3.0).round()).collect();
        for (i, special) in
            [f32::from_bits(0x7fff_ffff), -f32::NAN, f32::INFINITY, -0.0, 0.0].iter().enumerate()
        {
            logits.iter_mut().skip(2 * i + 1).step_by(7 + i).for_each(|logit| *logit = *special);
        }
        if all == 4 {
            // The last choice is between two zeros.
            logits[..4].copy_from_slice(&[-1.0, -0.0, 0.0, 1.0]);
        }
        let want: Vec<u32> = logits
            .chunks(all)
            .flat_map(|row| {
                let mut order: Vec<u32> = (0..all as u32).collect();
                let of = |expert: &u32| row[*expert as usize] + 0.0;
                order.sort_by(|a, b| of(b).total_cmp(&of(a)));
                order.truncate(each);
                order.sort_unstable();
                order
            })
            .collect();
        let identity: Vec<f32> = (0..t * each).map(|place| place as f32).collect();
        let got = under_every_schedule(|gpu| {
            let chosen = gpu.choose_experts(&gpu.upload(&logits), [t, all, each]);
            let words = |array: &Array| array.to_vec().into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(words(&chosen.experts), want, "{each} of {all}");
            let rows: Vec<u32> = (0..t * each).map(|place| (place / each) as u32).collect();
            assert_eq!(words(&chosen.rows), rows, "{each} of {all}");
            let mut sums = gpu.alloc(t, Dtype::F32);
            gpu.mix(&mut sums, &gpu.upload(&identity), &chosen.sums, 1, false);
            vec![sums]
        });
        let sums: Vec<f64> = wide(&identity).chunks(each).map(|own| own.iter().sum()).collect();
        assert_eq!(got, [sums], "sums over the places of a row");
    }
}

/// Weights of 8 and 4 bits, all rows and some; the values are those of the CPU, rounded to bf16.
#[test]
fn quantised_weights_are_widened() {
    let (n, k) = (3, 200);
    let values = noise(n * k, 1);
    for bits in [QuantBits::Eight, QuantBits::Four] {
        let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&values[i * k..(i + 1) * k]);
        let matrix = QuantMatrix::from_rows(bits, n, k, row).unwrap();
        let mut want = vec![0.0; n * k];
        matrix.rows().widen(&mut want);
        let gpu = gpu(1);
        let (codes, scales) = matrix.by_rows();
        let scales: Vec<_> = scales.iter().map(|scale| [scale.min, scale.step]).collect();
        let codes = Codes::new(&gpu, bits, [n, k], &codes, &scales);
        let index = gpu.upload_words(&[2u32, 0]);
        let all = gpu.weight_rows(Weight::Codes(&codes), k, None, n, Dtype::F32).to_vec();
        let some = gpu.weight_rows(Weight::Codes(&codes), k, Some(&index), 2, Dtype::Bf16).to_bf16();
        gpu.check().unwrap();
        assert_eq!(all, want);
        let rows = [&want[2 * k..], &want[..k]].concat();
        assert_eq!(some, rows.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>());
    }
}

/// Draws from one row by sorting, in f64.
fn drawn(logits: &[f32], sampling: &Sampling, row: &Row, forbidden: &[u32]) -> Drawn {
    let softmax = |z: &[f64]| {
        let top = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = z.iter().map(|z| (z - top).exp()).sum();
        top + sum.ln()
    };
    let scored: Vec<f64> =
        logits.iter().map(|&x| f64::from(x) / f64::from(sampling.scoring_temperature)).collect();
    let lse = softmax(&scored);
    let entropy: f64 = scored.iter().map(|z| (z - lse).exp() * (lse - z)).sum();
    let mut z = logits.to_vec();
    for &id in &row.seen {
        let x = &mut z[id as usize];
        *x = if *x > 0.0 { *x / sampling.repetition_penalty } else { *x * sampling.repetition_penalty };
    }
    if row.forbids {
        forbidden.iter().for_each(|&id| z[id as usize] = f32::NEG_INFINITY);
    }
    let mut order: Vec<usize> = (0..z.len()).collect();
    order.sort_by(|&a, &b| z[b].total_cmp(&z[a]).then(a.cmp(&b)));
    let record = |id: usize, sampler: f64| Drawn {
        id: id as u32,
        logprob: (scored[id] - lse) as f32,
        sampler_logprob: sampler as f32,
        entropy: entropy as f32,
    };
    if sampling.temperature == 0.0 {
        return record(order[0], 0.0);
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let weight = |id: usize| f64::from((z[id] - z[order[0]]) / sampling.temperature).exp();
    let mut kept = order.clone();
    if sampling.top_p < 1.0 {
        let bound = f64::from(sampling.top_p) * kept.iter().map(|&id| weight(id)).sum::<f64>();
        let mut sum = 0.0;
        let n = kept.iter().take_while(|&&id| {
            let open = sum < bound;
            sum += weight(id);
            open
        });
        let n = n.count();
        kept.truncate(n);
    }
    kept.retain(|&id| weight(id) >= f64::from(sampling.min_p));
    if sampling.top_k == 0 && sampling.top_p == 1.0 && sampling.min_p == 0.0 {
        kept.sort_unstable();
    }
    let total: f64 = kept.iter().map(|&id| weight(id)).sum();
    let mut sum = 0.0;
    let place = kept.iter().position(|&id| {
        sum += weight(id);
        sum > row.uniform * total
    });
    let id = kept[place.unwrap()];
    record(id, (weight(id) / total).ln())
}

#[test]
fn draws_are_those_of_a_sorted_row() {
    // Multiples of 1/8, of which many are equal; three segments, of which the last one is no multiple of four columns. In the last row, nearly all are equal, so
    // they are too many for a list.
    let vocab = 701;
    let mut logits: Vec<f32> = noise(4 * vocab, 1).iter().map(|x| (x * 16.0).round() / 8.0).collect();
    logits[3 * vocab + 9..].fill(1.5);
    let cases = [
        PLAIN,
        Sampling { temperature: 0.0, ..PLAIN },
        Sampling { temperature: 0.7, scoring_temperature: 0.7, top_k: 9, ..PLAIN },
        Sampling { top_p: 0.6, repetition_penalty: 1.5, ..PLAIN },
        Sampling { temperature: 1.25, top_k: 40, top_p: 0.9, min_p: 0.2, repetition_penalty: 0.8, ..PLAIN },
        // The tokens of the cut have no weight.
        Sampling { temperature: 0.01, scoring_temperature: 0.01, top_k: 300, ..PLAIN },
        Sampling { top_k: 600, top_p: 0.5, ..PLAIN },
        Sampling { top_p: 0.001, ..PLAIN },
        Sampling { top_k: 1, ..PLAIN },
        Sampling { min_p: 0.05, ..PLAIN },
    ];
    let forbidden = [5, 17];
    for (i, sampling) in cases.iter().enumerate() {
        let uniforms = noise(4, 10 + i as u64);
        let rows: Vec<Row> = (0..4)
            .map(|r| Row {
                uniform: f64::from(uniforms[r] / 4.0 + 0.5),
                seen: if sampling.repetition_penalty == 1.0 { vec![] } else { vec![5, 80 + r as u32, 200] },
                forbids: r % 2 == 1,
            })
            .collect();
        for schedule in SCHEDULES {
            let gpu = gpu(schedule);
            let mut z = gpu.upload(&logits);
            let got = gpu.sample(&mut z, vocab, sampling, &rows, &forbidden);
            gpu.check().unwrap();
            for (r, got) in got.iter().enumerate() {
                let want = drawn(&logits[r * vocab..(r + 1) * vocab], sampling, &rows[r], &forbidden);
                let far = [
                    (got.logprob - want.logprob).abs(),
                    (got.sampler_logprob - want.sampler_logprob).abs(),
                    (got.entropy - want.entropy).abs(),
                ];
                assert!(
                    got.id == want.id && far.iter().all(|&far| far < 2e-5),
                    "case {i}, row {r}: {got:?} for {want:?}"
                );
            }
        }
    }
}

/// A row with NaN or +∞, or without any possible token, has no finite numbers, and harms no other row.
#[test]
fn a_row_without_a_distribution_has_no_token() {
    let vocab = 300;
    let greedy = Sampling { temperature: 0.0, ..PLAIN };
    for sampling in [PLAIN, greedy, Sampling { top_p: 0.5, top_k: 20, min_p: 0.1, ..PLAIN }] {
        let mut logits = noise(4 * vocab, 1);
        logits[7] = f32::NAN;
        logits[vocab + 299] = f32::INFINITY;
        logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
        let rows = vec![Row { uniform: 0.5, ..Row::default() }; 4];
        let gpu = gpu(1);
        let got = gpu.sample(&mut gpu.upload(&logits), vocab, &sampling, &rows, &[]);
        gpu.check().unwrap();
        assert!(got[..3].iter().all(|drawn| drawn.logprob.is_nan()), "{got:?}");
        let want = drawn(&logits[3 * vocab..], &sampling, &rows[3], &[]);
        assert!(got[3].id == want.id && (got[3].logprob - want.logprob).abs() < 2e-5, "{got:?} for {want:?}");
    }
}

/// The check of a device has a result for each file of kernels, for products and for rates, and no problem. On a card, all kernels
/// are compiled within its time.
#[test]
fn a_checkup_finds_no_problem() {
    let found = gpu(1).checkup(Duration::from_secs(600));
    for finding in &found {
        println!("{} {:?}", finding.name, finding.result);
        assert!(finding.result.is_ok(), "{finding:?}");
    }
    let files = omnigrpo_gpu::sources::FILES.iter().map(|(file, _)| format!("{file}.cu"));
    let others = ["products in f32", "products in bf16", "copy to the gpu", "copy in its memory"];
    for name in files.chain(others.map(String::from)) {
        let count = found.iter().filter(|finding| finding.name.to_lowercase() == name).count();
        assert_eq!(count, 1, "{name} in {found:?}");
    }
}

/// The device stores its failure and computes nothing afterwards.
#[test]
fn a_failure_is_reported_once_and_read_as_nan() {
    // A separate device, which keeps the failure.
    let gpu = Gpu::emulated(0);
    let x = gpu.upload(&[1.0, 2.0]);
    assert_eq!(x.to_vec(), [1.0, 2.0]);
    let _huge = gpu.alloc(usize::MAX / 8, Dtype::F32);
    let error = gpu.check().unwrap_err().to_string();
    assert!(error.contains("out of GPU memory") && error.contains("lower"), "{error}");
    assert!(x.to_vec().iter().all(|x| x.is_nan()));
    assert!(gpu.zeros(3, Dtype::Bf16).to_vec().iter().all(|x| x.is_nan()));
}
