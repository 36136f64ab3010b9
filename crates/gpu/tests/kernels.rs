//! Kernels on the emulator against the f64 twin, under several schedules.
#![allow(clippy::unwrap_used, missing_docs)]

use half::bf16;
use omnigrpo_gpu::{Array, Cached, Dtype, Gpu, Heads, Pattern, Step, Weight};
use omnigrpo_kernels::attention::{AttentionLayout, QueryRange, Shape};
use omnigrpo_kernels::twin;

/// Schedules: all threads together, and two in which warps run ahead and copies come early or late.
const SCHEDULES: [u64; 3] = [0, 1, 2];

/// The emulator, with kernels in which a fault has been planted where the test of the tests asks for it.
fn gpu(schedule: u64) -> Gpu {
    match std::env::var_os("OMNIGRPO_PLANTED_KERNELS") {
        Some(library) => Gpu::emulated_from(library.as_ref(), schedule).unwrap(),
        None => Gpu::emulated(schedule),
    }
}

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

/// Numbers that are exact in `dtype`, on the device and for the twin.
fn numbers(gpu: &Gpu, n: usize, dtype: Dtype, seed: u64) -> (Array, Vec<f64>) {
    let array = gpu.cast(&gpu.upload(&noise(n, seed)), dtype);
    let host = wide(&array.to_vec());
    (array, host)
}

fn columns(x: &[f64], stride: usize, from: usize, width: usize) -> Vec<f64> {
    x.chunks(stride).flat_map(|row| &row[from..from + width]).copied().collect()
}

/// Relative error in the root mean square.
fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let d: f64 = got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum();
    let n: f64 = want.iter().map(|b| b * b).sum();
    assert!(!d.is_nan(), "not a number");
    (d / n.max(1e-30)).sqrt()
}

/// Forward and backward pass of one layout; the bits of all results.
fn attention(schedule: u64, layout: &AttentionLayout, t: usize, heads: Heads, dtype: Dtype) -> Vec<f32> {
    let gpu = gpu(schedule);
    let Heads { q, kv, d } = heads;
    let stride = (q + 2 * kv) * d;
    let (qkv, host) = numbers(&gpu, t * stride, dtype, 3);
    let (dout, dhost) = numbers(&gpu, t * q * d, dtype, 4);
    let pattern = Pattern::new(&gpu, layout, t);
    let (out, lse) = gpu.attention(&qkv, &pattern, heads);
    let dqkv = gpu.attention_back(&qkv, &out, &lse, &dout, &pattern, heads);
    gpu.check().unwrap();
    let [qh, kh, vh] = [(0, q * d), (q * d, kv * d), ((q + kv) * d, kv * d)]
        .map(|(from, width)| columns(&host, stride, from, width));
    let shape = Shape { q_heads: q, kv_heads: kv, head_dim: d };
    let scale = 1.0 / (d as f64).sqrt();
    let (want, want_lse) = twin::attention_forward(&qh, &kh, &vh, layout, shape, scale);
    let (dq, dk, dv) = twin::attention_backward(&dhost, &qh, &kh, &vh, layout, shape, scale);
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
    let what =
        format!("{heads:?} {dtype:?} {layout:?}, schedule {schedule}: {errors:?}, log-sum-exp {far:.1e}");
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

/// More than one tile of queries and of keys, ragged ends, shared prefixes, grouped queries.
fn groups() -> (AttentionLayout, usize) {
    (AttentionLayout::groups(&[(70, vec![37, 1]), (3, vec![30])]), 141)
}

#[test]
fn attention_with_shared_prefixes() {
    let (layout, t) = groups();
    attention_under_every_schedule(&layout, t, Heads { q: 2, kv: 1, d: 64 }, Dtype::Bf16);
}

#[test]
fn attention_in_windows() {
    let layout = AttentionLayout::full_blocks(&[64, 5, 70]);
    attention(5, &layout, 139, Heads { q: 1, kv: 1, d: 72 }, Dtype::Bf16);
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
        // Rows that are in no range stay zero, and later queries over earlier rows.
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

/// Decoding over caches: as attention over prompt and own rows, and the same bits in every batch.
#[test]
fn decoding_does_not_depend_on_the_batch() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let heads = Heads { q: 4, kv: 2, d: 40 };
        let (stride, width) = (8 * 40, 4 * 40);
        let run = |rows: &[usize], schedule: u64| {
            let gpu = gpu(schedule);
            // Row r: a prompt of 300 − 100 r rows, the own region after 10 unused rows, 3 + r tokens.
            let caches: Vec<(Array, Vec<f64>)> =
                (0..3).map(|r| numbers(&gpu, 400 * width, dtype, 20 + r)).collect();
            let packed: Vec<f32> = rows.iter().flat_map(|&r| noise(stride, 30 + r as u64)).collect();
            let qkv = gpu.cast(&gpu.upload(&packed), dtype);
            let cached: Vec<Cached> = rows
                .iter()
                .map(|&r| Cached {
                    cache: &caches[r].0,
                    prompt: 300 - 100 * r,
                    start: 310 - 100 * r,
                    len: 3 + r,
                })
                .collect();
            let out = gpu.attend_cached(&qkv, &cached, heads).to_vec();
            gpu.check().unwrap();
            let qkv = wide(&qkv.to_vec());
            for (i, &r) in rows.iter().enumerate() {
                let (prompt, start, len) = (300 - 100 * r, 310 - 100 * r, 3 + r);
                let mut all = caches[r].1.clone();
                all[(start + len - 1) * width..(start + len) * width]
                    .copy_from_slice(&qkv[(i + 1) * stride - width..(i + 1) * stride]);
                assert_eq!(wide(&caches[r].0.to_vec()), all, "the token is appended, and nothing else");
                let keys = vec![0..prompt, start..start + len];
                let layout =
                    AttentionLayout { ranges: vec![QueryRange { queries: 0..1, keys, causal: false }] };
                let shape = Shape { q_heads: 4, kv_heads: 2, head_dim: 40 };
                let q = &qkv[i * stride..][..160];
                let [k, v] = [0, 80].map(|from| columns(&all, width, from, 80));
                let want = twin::attention_forward(q, &k, &v, &layout, shape, 1.0 / 40f64.sqrt()).0;
                let bound = if dtype == Dtype::Bf16 { 4e-3 } else { 1e-5 };
                assert!(error(&wide(&out[i * 160..][..160]), &want) < bound);
            }
            out
        };
        let all = run(&[0, 1, 2], 0);
        assert_eq!(run(&[2, 0], 1), [&all[320..], &all[..160]].concat());
        assert_eq!(run(&[1], 2), all[160..320]);
    }
}

fn few(schedule: u64, x: &[f32], w: &[f32], [n, k]: [usize; 2], dtype: Dtype) -> Vec<f32> {
    let gpu = gpu(schedule);
    let (x, w) = (gpu.cast(&gpu.upload(x), dtype), gpu.cast(&gpu.upload(w), dtype));
    let bias = gpu.upload(&noise(n, 9));
    let t = x.len() / k;
    let mut y = gpu.zeros(t * (n + 2), Dtype::F32);
    gpu.linear_rows(&mut y, [1, n + 2], &x, Weight::Dense(&w), [n, k], Some(&bias), None, false);
    gpu.linear_rows(&mut y, [1, n + 2], &x, Weight::Dense(&w), [n, k], None, None, true);
    gpu.check().unwrap();
    let y = y.to_vec();
    let (x, w, bias) = (wide(&x.to_vec()), wide(&w.to_vec()), wide(&bias.to_vec()));
    let want: Vec<f64> = twin::linear_forward(&x, &w, None, t, k, n)
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

/// The optimizer against the twin over several steps; bf16 weights keep f32 values in two halves.
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
        let step =
            Step { lr: 0.01, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, grad_scale: 0.5, count };
        let on_device = gpu.upload(&grad);
        gpu.adamw(&mut weight, Some(&mut rest), [&mut m, &mut v], &on_device, &step);
        gpu.adamw(&mut single, None, [&mut m2, &mut v2], &on_device, &step);
        let f = f64::from;
        twin::adamw(
            &mut wide_weight,
            &mut wide_m,
            &mut wide_v,
            &wide(&grad),
            f(step.lr),
            f(0.9f32),
            f(0.95f32),
            f(step.eps),
            f(step.weight_decay),
            count,
            0.5,
        );
    }
    gpu.check().unwrap();
    let joined = gpu.join_master(&weight, &rest);
    assert_eq!(joined, single.to_vec());
    assert!(error(&wide(&joined), &wide_weight) < 1e-6);
    // To nearest, except that a tie goes up.
    let rounded: Vec<f32> = joined.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    assert_eq!(weight.to_vec(), rounded);
}

/// What fails stays with the device, and nothing is computed after it.
#[test]
fn a_failure_is_told_once_and_read_as_nan() {
    let gpu = gpu(0);
    let x = gpu.upload(&[1.0, 2.0]);
    assert_eq!(x.to_vec(), [1.0, 2.0]);
    let _huge = gpu.alloc(usize::MAX / 8, Dtype::F32);
    let error = gpu.check().unwrap_err().to_string();
    assert!(error.contains("out of GPU memory") && error.contains("lower"), "{error}");
    assert!(x.to_vec().iter().all(|x| x.is_nan()));
    assert!(gpu.zeros(3, Dtype::Bf16).to_vec().iter().all(|x| x.is_nan()));
}
