//! Attention against its f64 twin, and the independence of its bits.

use crate::common::{check_gradient, close, dot, noise, wide, with_threads};
use omnigrpo_kernels::attention::{self, AttentionLayout, Qkv, QueryRange, Shape};
use omnigrpo_kernels::{Mat, MatMut, twin};

/// Splits rows into queries, keys and values whose columns begin at `cols`.
fn parts<T: Copy>(x: Mat<T>, cols: [usize; 3], shape: Shape) -> Qkv<T> {
    let (q, kv) = (shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let [q, k, v] = [(cols[0], q), (cols[1], kv), (cols[2], kv)].map(|(at, n)| x.columns(at..at + n));
    Qkv { q, k, v }
}

struct Case {
    rows: usize,
    layout: AttentionLayout,
    shape: Shape,
}

/// Builds runs of `step` queries, each of which sees up to `window` keys before its run: ranges whose starts are close
/// together.
fn sliding(rows: usize, step: usize, window: usize) -> AttentionLayout {
    let range = |start: usize| {
        let end = rows.min(start + step);
        QueryRange { queries: start..end, keys: vec![start.saturating_sub(window)..end], causal: true }
    };
    AttentionLayout { ranges: (0..rows).step_by(step).map(range).collect() }
}

/// Builds key ranges in descending order, one of them empty, with more queries than keys in the causal range.
fn backwards() -> AttentionLayout {
    let range = |queries, keys, causal| QueryRange { queries, keys, causal };
    AttentionLayout {
        ranges: vec![
            range(100..190, vec![170..190, 40..40, 0..150], true),
            range(0..40, vec![130..170], false),
            range(40..100, vec![60..70, 3..33], true),
        ],
    }
}

fn cases() -> Vec<Case> {
    let heads = |q_heads, kv_heads, head_dim| Shape { q_heads, kv_heads, head_dim };
    let case = |layout: AttentionLayout, shape| {
        let rows = layout.ranges.iter().map(|r| r.queries.end).max().unwrap_or(0);
        layout.validate(rows, rows).unwrap();
        Case { rows, layout, shape }
    };
    vec![
        case(AttentionLayout::causal(1), heads(1, 1, 16)),
        case(AttentionLayout::causal(130), heads(4, 2, 20)),
        case(AttentionLayout::full_blocks(&[70, 1, 9]), heads(3, 3, 80)),
        case(AttentionLayout::full_blocks(&[40, 66]), heads(2, 2, 72)),
        case(AttentionLayout::prefix_suffixes(100, &[1, 1, 5, 70, 1]), heads(8, 2, 64)),
        case(AttentionLayout::prefix_suffixes(0, &[3, 4]), heads(2, 1, 33)),
        case(AttentionLayout::groups(&[(7, vec![2, 1]), (65, vec![64])]), heads(14, 2, 64)),
        case(AttentionLayout::causal(70), heads(128, 1, 8)),
        // Several chunks of keys in the backward pass.
        case(AttentionLayout::causal(700), heads(2, 1, 24)),
        case(AttentionLayout::full_blocks(&[600, 33]), heads(1, 1, 40)),
        case(AttentionLayout::groups(&[(400, vec![3, 150, 37]), (5, vec![9])]), heads(6, 2, 72)),
        case(sliding(150, 3, 40), heads(4, 2, 33)),
        case(backwards(), heads(3, 1, 48)),
        // One range of more keys and values than are packed at a time, and more ranges.
        case(one_long(700, 20), heads(8, 8, 256)),
        // More keys and values than are packed at a time.
        case(AttentionLayout::full_blocks(&[64; 90]), heads(8, 8, 16)),
    ]
}

/// Builds a layout whose first `n` queries see all rows, and whose others see their own block of `n`.
fn one_long(rows: usize, n: usize) -> AttentionLayout {
    let range = |start: usize| {
        let own = start..rows.min(start + n);
        QueryRange { queries: own.clone(), keys: vec![if start == 0 { 0..rows } else { own }], causal: false }
    };
    AttentionLayout { ranges: (0..rows).step_by(n).map(range).collect() }
}

#[test]
fn matches_the_twin_forward_and_backward() {
    for Case { rows, layout, shape } in cases() {
        let Shape { q_heads, kv_heads, head_dim: d } = shape;
        let (wq, wk) = (q_heads * d, kv_heads * d);
        // Odd gaps between the windows: a packed stream with strided columns.
        let (stride, cols) = (wq + 2 * wk + 5, [1, wq + 2, wq + wk + 4]);
        let x = noise(rows * stride, 7);
        let qkv = parts(Mat::new(&x, rows, stride), cols, shape);
        let scale = 1.0 / (d as f32).sqrt() * 2.0;
        let (out, lse) = attention::forward(qkv, &layout, shape, scale);
        let x64 = wide(&x);
        let qkv64 = parts(Mat::new(&x64, rows, stride), cols, shape);
        let (out64, lse64) = twin::attention_forward(qkv64, &layout, shape, f64::from(scale));
        // The tolerance for vectors: one chain per score adds up 256 products.
        close(&out, &out64, 4e-6);
        close(&lse, &lse64, 1e-6);

        let dout = noise(rows * wq, 8);
        let (dout, dout64) = (Mat::new(&dout, rows, wq), wide(&dout));
        let dqkv = attention::backward(dout, qkv, Mat::new(&out, rows, wq), &lse, &layout, shape, scale);
        let dout64 = Mat::new(&dout64, rows, wq);
        let (dq, dk, dv) = twin::attention_backward(dout64, qkv64, &layout, shape, f64::from(scale));
        for (d64, (col, width)) in [(dq, (0, wq)), (dk, (wq, wk)), (dv, (wq + wk, wk))] {
            let got: Vec<f32> =
                dqkv.chunks_exact(wq + 2 * wk).flat_map(|row| row[col..col + width].to_vec()).collect();
            close(&got, &d64, 1e-5);
        }
    }
}

#[test]
fn twin_gradient_is_the_central_difference() {
    let layout = AttentionLayout::prefix_suffixes(3, &[2, 1]);
    let shape = Shape { q_heads: 2, kv_heads: 1, head_dim: 4 };
    let [q, k, v] = [(48, 1), (24, 2), (24, 3)].map(|(n, seed)| wide(&noise(n, seed)));
    let dout = wide(&noise(48, 4));
    fn qkv<'a>(q: &'a [f64], k: &'a [f64], v: &'a [f64]) -> Qkv<'a, f64> {
        Qkv { q: Mat::new(q, 6, 8), k: Mat::new(k, 6, 4), v: Mat::new(v, 6, 4) }
    }
    let (dq, dk, dv) = twin::attention_backward(Mat::new(&dout, 6, 8), qkv(&q, &k, &v), &layout, shape, 0.5);
    let f = |q: &[f64], k: &[f64], v: &[f64]| {
        dot(&twin::attention_forward(qkv(q, k, v), &layout, shape, 0.5).0, &dout)
    };
    check_gradient(&q, &dq, |q| f(q, &k, &v));
    check_gradient(&k, &dk, |k| f(&q, k, &v));
    check_gradient(&v, &dv, |v| f(&q, &k, v));
}

/// Returns attention of packed queries, keys and values, and their gradient.
pub fn run(x: &[f32], rows: usize, layout: &AttentionLayout, shape: Shape) -> (Vec<f32>, Vec<f32>) {
    let Shape { q_heads, kv_heads, head_dim: d } = shape;
    let (width, packed) = (q_heads * d, (q_heads + 2 * kv_heads) * d);
    let qkv = Qkv::packed(Mat::new(&x[..rows * packed], rows, packed), shape);
    let (out, lse) = attention::forward(qkv, layout, shape, 0.2);
    let dout = noise(rows * width, 9);
    let [dout, y] = [&dout, &out].map(|x| Mat::new(x, rows, width));
    let dx = attention::backward(dout, qkv, y, &lse, layout, shape, 0.2);
    (out, dx)
}

#[test]
fn threads_do_not_change_bits() {
    let shape = Shape { q_heads: 4, kv_heads: 2, head_dim: 32 };
    let layout = AttentionLayout::groups(&[(90, vec![30, 1, 40]), (33, vec![8, 8])]);
    let x = noise(210 * 8 * 32, 3);
    let one = with_threads(1, || run(&x, 210, &layout, shape));
    assert_eq!(one, with_threads(2, || run(&x, 210, &layout, shape)));
    assert_eq!(one, with_threads(5, || run(&x, 210, &layout, shape)));
    // Several chunks of keys.
    let (shape, layout) = (Shape { q_heads: 2, kv_heads: 2, head_dim: 16 }, AttentionLayout::causal(900));
    let x = noise(900 * 6 * 16, 3);
    let one = with_threads(1, || run(&x, 900, &layout, shape));
    assert_eq!(one, with_threads(2, || run(&x, 900, &layout, shape)));
    assert_eq!(one, with_threads(5, || run(&x, 900, &layout, shape)));
}

#[test]
fn other_queries_do_not_change_bits() {
    let shape = Shape { q_heads: 6, kv_heads: 2, head_dim: 40 };
    let width = 10 * 40;
    let x = noise(200 * width, 5);
    let (whole, _) = run(&x, 200, &AttentionLayout::causal(200), shape);
    for n in [1, 17, 64, 65, 199] {
        let (part, _) = run(&x, n, &AttentionLayout::causal(n), shape);
        assert_eq!(part, whole[..n * 240], "first {n} rows");
    }
    // A suffix has the same bits alone and among other suffixes.
    let (several, _) = run(&x, 200, &AttentionLayout::prefix_suffixes(80, &[20, 1, 99]), shape);
    let (first, _) = run(&x, 100, &AttentionLayout::prefix_suffixes(80, &[20]), shape);
    assert_eq!(first, several[..100 * 240]);
}

#[test]
fn decode_agrees_with_prefill_and_has_the_same_bits_in_any_batch() {
    let shape = Shape { q_heads: 6, kv_heads: 2, head_dim: 40 };
    let (q_width, width) = (240, 400);
    let suffixes = [20, 1, 99, 7];
    let x = noise(207 * width, 6);
    let packed = Qkv::packed(Mat::new(&x, 207, width), shape);
    let (all, all_lse) =
        attention::forward(packed, &AttentionLayout::prefix_suffixes(80, &suffixes), shape, 0.2);
    // Decode the last rows of all suffixes together.
    let (mut start, mut ranges, mut q, mut expected) = (80, Vec::new(), Vec::new(), Vec::new());
    let mut expected_lse = Vec::new();
    for (i, len) in suffixes.iter().enumerate() {
        let end = start + len;
        ranges.push(QueryRange { queries: i..i + 1, keys: vec![0..80, start..end], causal: false });
        q.extend_from_slice(&x[(end - 1) * width..(end - 1) * width + q_width]);
        expected.extend_from_slice(&all[(end - 1) * q_width..end * q_width]);
        expected_lse.extend_from_slice(&all_lse[(end - 1) * shape.q_heads..end * shape.q_heads]);
        start = end;
    }
    let layout = AttentionLayout { ranges };
    layout.validate(4, 207).unwrap();
    let qkv = Qkv { q: Mat::new(&q, 4, q_width), ..packed };
    let mut together = Vec::new();
    for only in [0..4, 2..3, 1..4] {
        let part = AttentionLayout { ranges: layout.ranges[only.clone()].to_vec() };
        let (mut out, mut lse) = (vec![0.0; 4 * q_width], vec![0.0; 4 * shape.q_heads]);
        let to = MatMut::new(&mut out, 4, q_width);
        attention::forward_decode_into(qkv, &part, shape, 0.2, to, &mut lse);
        let rows = only.start * q_width..only.end * q_width;
        if only == (0..4) {
            close(&out, &wide(&expected), 2e-6);
            close(&lse, &wide(&expected_lse), 2e-6);
            together.clone_from(&out);
        }
        assert_eq!(out[rows.clone()], together[rows]);
    }
}

/// The more threads there are, the narrower are the units of a decoding step.
#[test]
fn decoding_has_the_same_bits_on_any_number_of_threads() {
    let (prompt, own, count) = (300, 7, 20);
    let keys = prompt + own * count;
    for (q_heads, kv_heads, head_dim) in [(9, 3, 64), (4, 4, 64), (12, 1, 64)] {
        let shape = Shape { q_heads, kv_heads, head_dim };
        let [q_width, kv_width] = [q_heads, kv_heads].map(|heads| heads * head_dim);
        let [q, k, v] = [(count, q_width), (keys, kv_width), (keys, kv_width)]
            .map(|(rows, width)| noise(rows * width, 7));
        let range = |i: usize| {
            let start = prompt + i * own;
            QueryRange { queries: i..i + 1, keys: vec![0..prompt, start..start + own], causal: false }
        };
        let layout = AttentionLayout { ranges: (0..count).map(range).collect() };
        let run = || {
            let qkv = Qkv {
                q: Mat::new(&q, count, q_width),
                k: Mat::new(&k, keys, kv_width),
                v: Mat::new(&v, keys, kv_width),
            };
            let (mut out, mut lse) = (vec![0.0; count * q_width], vec![0.0; count * q_heads]);
            let to = MatMut::new(&mut out, count, q_width);
            attention::forward_decode_into(qkv, &layout, shape, 0.2, to, &mut lse);
            (out, lse)
        };
        let one = with_threads(1, run);
        for threads in [2, 3, 8, 40] {
            assert!(one == with_threads(threads, run), "{shape:?}, {threads} threads");
        }
    }
}

#[test]
fn not_a_number_is_not_hidden() {
    let shape = Shape { q_heads: 1, kv_heads: 1, head_dim: 8 };
    let mut x = noise(5 * 24, 1);
    x[2 * 24 + 8] = f32::NAN;
    let (out, _) = run(&x, 5, &AttentionLayout::causal(5), shape);
    assert!(out[..2 * 8].iter().all(|x| x.is_finite()));
    assert!(out[2 * 8..].iter().all(|x| x.is_nan()));
}
