//! The layers that carry a state, compared with their f64 twins, which follow the recurrence row by row and whose
//! gradients are checked by central differences. Bits of a row depend on its own sequence alone.

use crate::common::{check_gradient, close, dot, noise, wide, with_threads};
use omnigrpo_kernels::attention::AttentionLayout;
use omnigrpo_kernels::recurrent::{
    self, CHUNK, Continued, DeltaShape, Segments, causal_steps, delta_backward, delta_forward, delta_steps,
};
use omnigrpo_kernels::{Mat, norm, twin};

/// Kinds of decays: near 0, near 1, of every size, and so strong that the state vanishes from one row to the next.
#[derive(Clone, Copy, Debug)]
enum Decay {
    Strong,
    Weak,
    Mixed,
    Erasing,
}

const DECAYS: [Decay; 4] = [Decay::Strong, Decay::Weak, Decay::Mixed, Decay::Erasing];

/// Returns gates `[g | β]` of `rows` rows.
fn gates(rows: usize, heads: usize, decay: Decay, seed: u32) -> Vec<f32> {
    let mut gates = noise(rows * 2 * heads, seed);
    for (i, x) in gates.iter_mut().enumerate() {
        let unit = (*x + 1.0) / 2.0;
        *x = match decay {
            _ if i % (2 * heads) >= heads => unit,
            Decay::Strong => -5.0 - 20.0 * unit,
            Decay::Weak => -1e-3 * unit,
            Decay::Mixed => -(10.0 * (unit - 0.7)).exp(),
            Decay::Erasing => {
                if i % 5 == 0 {
                    -1e4 * unit
                } else {
                    -0.01 * unit
                }
            }
        };
    }
    gates
}

/// Returns the root of the sum of squared differences, relative to that of the expected values.
fn far(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let squares: f64 = got.iter().zip(expected).map(|(g, e)| (f64::from(*g) - e).powi(2)).sum();
    assert!(squares.is_finite(), "not a number");
    (squares / dot(expected, expected).max(1e-30)).sqrt()
}

fn layout(groups: &[(usize, Vec<usize>)]) -> (Segments, usize) {
    let rows = groups.iter().map(|(prompt, own)| prompt + own.iter().sum::<usize>()).sum();
    (Segments::of(&AttentionLayout::groups(groups), rows).unwrap(), rows)
}

const fn shape(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaShape {
    DeltaShape { key_heads, value_heads, key_dim, value_dim }
}

fn mat(x: &[f64], rows: usize, cols: usize) -> Mat<'_, f64> {
    Mat::new(x, rows, cols)
}

#[test]
fn gradients_of_the_twins_are_derivatives() {
    let (segments, rows) = layout(&[(3, vec![2, 1]), (1, vec![2])]);
    let shape = shape(1, 2, 3, 2);
    let width = shape.packed_width();
    let (qkv, own) = (wide(&noise(rows * width, 1)), wide(&gates(rows, 2, Decay::Mixed, 2)));
    let dout = wide(&noise(rows * 4, 3));
    let run = |qkv: &[f64], own: &[f64]| {
        let (qkv, own) = (Mat::new(qkv, rows, width), Mat::new(own, rows, 4));
        dot(&twin::delta_forward(qkv, own, &segments, shape), &dout)
    };
    let (dqkv, dgates) = twin::delta_backward(
        Mat::new(&dout, rows, 4),
        Mat::new(&qkv, rows, width),
        Mat::new(&own, rows, 4),
        &segments,
        shape,
    );
    check_gradient(&qkv, &dqkv, |qkv| run(qkv, &own));
    check_gradient(&own, &dgates, |own| run(&qkv, own));

    let (c, taps) = (3, 4);
    let (x, weight, dy) = (wide(&noise(rows * c, 4)), wide(&noise(c * taps, 5)), wide(&noise(rows * c, 6)));
    let (dx, dw) = twin::causal_backward(mat(&dy, rows, c), mat(&x, rows, c), &weight, &segments);
    check_gradient(&x, &dx, |x| dot(&twin::causal_forward(mat(x, rows, c), &weight, &segments), &dy));
    check_gradient(&weight, &dw, |w| dot(&twin::causal_forward(mat(&x, rows, c), w, &segments), &dy));

    let (x, a, b) = (wide(&noise(rows * 4, 7)), wide(&noise(2, 8)), wide(&noise(2, 9)));
    let (dx, da, db) = twin::gates_backward(mat(&dout, rows, 4), mat(&x, rows, 4), &a, &b);
    check_gradient(&x, &dx, |x| dot(&twin::gates_forward(mat(x, rows, 4), &a, &b), &dout));
    check_gradient(&a, &da, |a| dot(&twin::gates_forward(mat(&x, rows, 4), a, &b), &dout));
    check_gradient(&b, &db, |b| dot(&twin::gates_forward(mat(&x, rows, 4), &a, b), &dout));

    let (z, w) = (wide(&noise(rows * 4, 10)), wide(&noise(2, 11)));
    let (dx, dz, dw) =
        twin::gated_norm_backward(mat(&dout, rows, 4), mat(&x, rows, 4), mat(&z, rows, 4), &w, 0.1);
    check_gradient(&x, &dx, |x| {
        dot(&twin::gated_norm_forward(mat(x, rows, 4), mat(&z, rows, 4), &w, 0.1), &dout)
    });
    check_gradient(&z, &dz, |z| {
        dot(&twin::gated_norm_forward(mat(&x, rows, 4), mat(z, rows, 4), &w, 0.1), &dout)
    });
    check_gradient(&w, &dw, |w| {
        dot(&twin::gated_norm_forward(mat(&x, rows, 4), mat(&z, rows, 4), w, 0.1), &dout)
    });
}

/// A row by hand: without a state, the output is β v (k · q), with q and k of length one and q scaled.
#[test]
fn one_row_by_hand() {
    let qkv = [3.0, 4.0, 4.0, 3.0, 10.0];
    let (out, states) = delta_forward(
        Mat::new(&qkv, 1, 5),
        Mat::new(&[-7.0, 0.5], 1, 2),
        &Segments::one(1),
        shape(1, 1, 2, 1),
    );
    let expected = [0.5 * 10.0 * (24.0 / 25.0) / 2f64.sqrt()];
    close(&out, &expected, 1e-6);
    close(&states, &[5.0 * 0.8, 5.0 * 0.6], 1e-6);
}

/// The chunked form equals the recurrence at lengths around a chunk, and at 8192 rows.
#[test]
fn chunks_equal_the_recurrence() {
    let wide_heads = shape(1, 1, 128, 128);
    for (rows, shape) in [
        (1, shape(2, 4, 16, 24)),
        (63, shape(1, 3, 33, 5)),
        (64, wide_heads),
        (65, wide_heads),
        (1000, shape(1, 2, 64, 40)),
        (8192, shape(1, 1, 24, 32)),
    ] {
        for decay in DECAYS {
            let width = shape.packed_width();
            let (qkv, own) = (noise(rows * width, 1), gates(rows, shape.value_heads, decay, 2));
            let (qkv64, own64) = (wide(&qkv), wide(&own));
            let segments = Segments::one(rows);
            let (out, states) = delta_forward(
                Mat::new(&qkv, rows, width),
                Mat::new(&own, rows, 2 * shape.value_heads),
                &segments,
                shape,
            );
            let want = twin::delta_forward(
                Mat::new(&qkv64, rows, width),
                Mat::new(&own64, rows, 2 * shape.value_heads),
                &segments,
                shape,
            );
            let far = far(&out, &want);
            assert!(far <= 1e-5, "{rows} rows of {shape:?}, {decay:?}: {far:.1e}");
            // States exist between chunks only.
            assert_eq!(states.len(), rows.div_ceil(CHUNK) * shape.state_len());
        }
    }
}

type Run = (Vec<f32>, Vec<f32>, Vec<f32>);

fn run(qkv: &[f32], own: &[f32], dout: &[f32], segments: &Segments, shape: DeltaShape) -> Run {
    let rows = segments.rows();
    let qkv = Mat::new(qkv, rows, shape.packed_width());
    let own = Mat::new(own, rows, 2 * shape.value_heads);
    let (out, states) = delta_forward(qkv, own, segments, shape);
    let dout = Mat::new(dout, rows, shape.value_width());
    let (dqkv, dgates) = delta_backward(dout, qkv, own, &states, segments, shape);
    (out, dqkv, dgates)
}

/// Prompts whose completions begin and end inside a chunk, on its border and after several.
#[test]
fn groups_equal_the_recurrence_and_its_gradients() {
    for (groups, shape) in [
        (vec![(1, vec![])], shape(1, 1, 1, 1)),
        (vec![(64, vec![63, 1]), (65, vec![64])], shape(2, 4, 16, 9)),
        (vec![(100, vec![3, 65, 0, 130])], shape(1, 2, 24, 40)),
        (vec![(5, vec![7, 8]), (70, vec![]), (2, vec![90])], shape(2, 2, 7, 33)),
    ] {
        let (segments, rows) = layout(&groups);
        let (width, heads, out_width) = (shape.packed_width(), shape.value_heads, shape.value_width());
        for decay in DECAYS {
            let (qkv, own) = (noise(rows * width, 1), gates(rows, heads, decay, 2));
            let dout = noise(rows * out_width, 3);
            let (out, dqkv, dgates) = run(&qkv, &own, &dout, &segments, shape);
            let [qkv, own, dout] = [&qkv, &own, &dout].map(|x| wide(x));
            let (qkv, own) = (Mat::new(&qkv, rows, width), Mat::new(&own, rows, 2 * heads));
            let want = twin::delta_forward(qkv, own, &segments, shape);
            let (want_qkv, want_gates) =
                twin::delta_backward(Mat::new(&dout, rows, out_width), qkv, own, &segments, shape);
            for (what, got, want) in
                [("output", out, want), ("rows", dqkv, want_qkv), ("gates", dgates, want_gates)]
            {
                let far = far(&got, &want);
                assert!(far <= 1e-5, "{groups:?}, {shape:?}, {decay:?}, {what}: {far:.1e}");
            }
        }
    }
}

/// Gradients of a group equal those of its sequences, each with its own copy of the prompt.
#[test]
fn a_group_equals_separate_sequences() {
    let (shape, prompt, completions) = (shape(1, 2, 16, 24), 70, [5, 64, 40]);
    let (width, heads, out_width) = (shape.packed_width(), shape.value_heads, shape.value_width());
    let (segments, rows) = layout(&[(prompt, completions.to_vec())]);
    let (qkv, own) = (noise(rows * width, 1), gates(rows, heads, Decay::Weak, 2));
    let mut dout = noise(rows * out_width, 3);
    // Each copy of the prompt would get the gradient of its output, so there is none.
    dout[..prompt * out_width].fill(0.0);
    let (out, dqkv, dgates) = run(&qkv, &own, &dout, &segments, shape);
    let [mut sum_qkv, mut sum_gates] = [width, 2 * heads].map(|n| vec![0.0; prompt * n]);
    let mut start = prompt;
    for len in completions {
        let of = |x: &[f32], n: usize| [&x[..prompt * n], &x[start * n..(start + len) * n]].concat();
        let (alone, own_qkv, own_gates) = run(
            &of(&qkv, width),
            &of(&own, 2 * heads),
            &of(&dout, out_width),
            &Segments::one(prompt + len),
            shape,
        );
        let after = |x: &[f32], n: usize| wide(&x[start * n..(start + len) * n]);
        assert!(far(&alone[prompt * out_width..], &after(&out, out_width)) < 1e-5);
        assert!(far(&own_qkv[prompt * width..], &after(&dqkv, width)) < 5e-5);
        assert!(far(&own_gates[prompt * 2 * heads..], &after(&dgates, 2 * heads)) < 5e-5);
        sum_qkv.iter_mut().zip(&own_qkv).for_each(|(sum, d)| *sum += f64::from(*d));
        sum_gates.iter_mut().zip(&own_gates).for_each(|(sum, d)| *sum += f64::from(*d));
        start += len;
    }
    assert!(far(&dqkv[..prompt * width], &sum_qkv) < 5e-5);
    assert!(far(&dgates[..prompt * 2 * heads], &sum_gates) < 5e-5);
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The bits of a completion's output and gradients do not depend on the other completions, on other groups or on threads.
#[test]
fn bits_of_a_sequence_depend_on_it_alone() {
    let shape = shape(2, 4, 24, 40);
    let (width, heads, out_width) = (shape.packed_width(), shape.value_heads, shape.value_width());
    let groups = [(70, vec![65, 30]), (3, vec![1])];
    let (segments, rows) = layout(&groups);
    let (qkv, own) = (noise(rows * width, 1), gates(rows, heads, Decay::Mixed, 2));
    let dout = noise(rows * out_width, 3);
    let of = |threads| with_threads(threads, || run(&qkv, &own, &dout, &segments, shape));
    let one = of(1);
    assert!(one == of(2) && one == of(5), "threads change bits");
    // Other numbers in the first completion, which has the rows 70..135.
    let other = |x: &[f32], n: usize| {
        let mut x = x.to_vec();
        x[70 * n..135 * n].iter_mut().for_each(|x| *x *= 0.5);
        x
    };
    let changed =
        run(&other(&qkv, width), &other(&own, 2 * heads), &other(&dout, out_width), &segments, shape);
    let after = |x: &[f32], n: usize| bits(&x[135 * n..]);
    let prompt = |x: &[f32], n: usize| bits(&x[..70 * n]);
    assert_ne!(bits(&changed.0), bits(&one.0));
    assert_eq!(prompt(&changed.0, out_width), prompt(&one.0, out_width));
    assert_eq!(after(&changed.0, out_width), after(&one.0, out_width));
    assert_eq!(after(&changed.1, width), after(&one.1, width));
    assert_eq!(after(&changed.2, 2 * heads), after(&one.2, 2 * heads));
    // The group without the first completion.
    let (fewer, count) = layout(&[(70, vec![30])]);
    let of = |x: &[f32], n: usize| [&x[..70 * n], &x[135 * n..165 * n]].concat();
    let alone = run(&of(&qkv, width), &of(&own, 2 * heads), &of(&dout, out_width), &fewer, shape);
    assert_eq!(count, 100);
    assert_eq!(bits(&alone.0), bits(&of(&one.0, out_width)));
    assert_eq!(bits(&alone.1[70 * width..]), bits(&one.1[135 * width..165 * width]));
    // A row does not depend on later rows.
    let (first, _) = delta_forward(
        Mat::new(&qkv[..66 * width], 66, width),
        Mat::new(&own[..66 * 2 * heads], 66, 2 * heads),
        &Segments::one(66),
        shape,
    );
    assert_eq!(bits(&first), bits(&one.0[..66 * out_width]));
}

/// Single rows after a prompt equal the recurrence; their bits depend on their sequence alone, and not on how rows are divided
/// into calls.
#[test]
fn steps_continue_a_prompt() {
    for shape in [shape(1, 2, 16, 24), shape(2, 2, 128, 128), shape(1, 3, 5, 37)] {
        let (prompt, own_rows, count) = (70, 9, 3);
        let (width, heads, out_width) = (shape.packed_width(), shape.value_heads, shape.value_width());
        let (segments, rows) = layout(&[(prompt, vec![own_rows; count])]);
        for decay in DECAYS {
            let (qkv, own) = (noise(rows * width, 1), gates(rows, heads, decay, 2));
            let of = |x: &[f32], n: usize, from: usize, len: usize| x[from * n..(from + len) * n].to_vec();
            let (first, states) = delta_forward(
                Mat::new(&qkv[..prompt * width], prompt, width),
                Mat::new(&own[..prompt * 2 * heads], prompt, 2 * heads),
                &Segments::one(prompt),
                shape,
            );
            let last = &states[states.len() - shape.state_len()..];
            let mut got = first;
            let mut all = vec![last.to_vec(); count];
            let mut by_row = Vec::new();
            for t in 0..own_rows {
                let rows = |x: &[f32], n: usize| {
                    (0..count).flat_map(|c| of(x, n, prompt + c * own_rows + t, 1)).collect::<Vec<_>>()
                };
                let (x, g) = (rows(&qkv, width), rows(&own, 2 * heads));
                let mut parts: Vec<Continued> = all
                    .iter_mut()
                    .enumerate()
                    .map(|(i, state)| Continued { rows: i..i + 1, state })
                    .collect();
                let (x, g) = (Mat::new(&x, count, width), Mat::new(&g, count, 2 * heads));
                by_row.push(delta_steps(x, g, &mut parts, shape));
            }
            for c in 0..count {
                let own_bits: Vec<u32> =
                    by_row.iter().flat_map(|out| bits(&out[c * out_width..(c + 1) * out_width])).collect();
                // All rows of one completion in one call, alone.
                let (x, g) = (
                    of(&qkv, width, prompt + c * own_rows, own_rows),
                    of(&own, 2 * heads, prompt + c * own_rows, own_rows),
                );
                let mut state = last.to_vec();
                let out = delta_steps(
                    Mat::new(&x, own_rows, width),
                    Mat::new(&g, own_rows, 2 * heads),
                    &mut [Continued { rows: 0..own_rows, state: &mut state }],
                    shape,
                );
                assert_eq!(bits(&out), own_bits, "{shape:?}, completion {c}");
                assert_eq!(bits(&state), bits(&all[c]));
                got.extend(out);
            }
            let (qkv, own) = (wide(&qkv), wide(&own));
            let want = twin::delta_forward(
                Mat::new(&qkv, rows, width),
                Mat::new(&own, rows, 2 * heads),
                &segments,
                shape,
            );
            let far = far(&got, &want);
            assert!(far <= 1e-5, "{shape:?}, {decay:?}: {far:.1e}");
        }
    }
}

#[test]
fn causal_convolution_matches_its_twin_and_its_steps() {
    for (groups, c, taps) in [
        (vec![(1, vec![])], 1, 1),
        (vec![(2, vec![1, 5]), (7, vec![3])], 5, 4),
        (vec![(40, vec![2, 30])], 130, 4),
    ] {
        let (segments, rows) = layout(&groups);
        let (x, weight, dy) = (noise(rows * c, 1), noise(c * taps, 2), noise(rows * c, 3));
        let [x64, weight64, dy64] = [&x, &weight, &dy].map(|x| wide(x));
        let mat = Mat::new(&x, rows, c);
        let y = recurrent::causal_forward(mat, &weight, &segments);
        close(&y, &twin::causal_forward(Mat::new(&x64, rows, c), &weight64, &segments), 2e-6);
        let (dx64, dw64) =
            twin::causal_backward(Mat::new(&dy64, rows, c), Mat::new(&x64, rows, c), &weight64, &segments);
        let run = |threads| {
            let mut dw = vec![0.5; c * taps];
            let dx = with_threads(threads, || {
                recurrent::causal_backward(Mat::new(&dy, rows, c), mat, &weight, &segments, Some(&mut dw))
            });
            (dx, dw)
        };
        let (dx, dw) = run(1);
        close(&dx, &dx64, 2e-6);
        close(&dw, &dw64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 5e-6);
        assert!((dx, dw) == run(3));
        // The rows of the second segment, one by one and all at once, continue the first.
        let Some(next) = segments.all().get(1) else { continue };
        let mut state = vec![0.0; (taps - 1) * c];
        recurrent::causal_state(mat, &segments, 0, &mut state);
        let (mut once, own) = (state.clone(), next.rows.clone());
        let expected = bits(&y[own.start * c..own.end * c]);
        let of = |rows: std::ops::Range<usize>| mat.row_range(rows);
        let mut got = Vec::new();
        for row in own.clone() {
            let part = Continued { rows: 0..1, state: &mut state };
            got.extend(causal_steps(of(row..row + 1), &weight, &mut [part]));
        }
        assert_eq!(bits(&got), expected);
        let part = Continued { rows: 0..own.len(), state: &mut once };
        assert_eq!(bits(&causal_steps(of(own), &weight, &mut [part])), expected);
        assert_eq!(once, state);
        let mut last = vec![0.0; (taps - 1) * c];
        recurrent::causal_state(mat, &segments, 1, &mut last);
        assert_eq!(last, state);
    }
}

#[test]
fn gates_and_gated_norms_match_their_twins() {
    for (rows, heads, d) in [(1, 1, 1), (3, 2, 5), (70, 4, 33)] {
        let x: Vec<f32> = noise(rows * 2 * heads, 1).iter().map(|x| x * 30.0).collect();
        let (a, b, dy) = (noise(heads, 2), noise(heads, 3), noise(rows * 2 * heads, 4));
        let [x64, a64, b64, dy64] = [&x, &a, &b, &dy].map(|x| wide(x));
        let mat = |x| Mat::new(x, rows, 2 * heads);
        let y = recurrent::gates_forward(mat(&x), &a, &b);
        let wide_mat = |x| Mat::<f64>::new(x, rows, 2 * heads);
        close(&y, &twin::gates_forward(wide_mat(&x64), &a64, &b64), 1e-6);
        let (dx, da, db) = recurrent::gates_backward(mat(&dy), mat(&x), mat(&y), &a, &b);
        let (dx64, da64, db64) = twin::gates_backward(wide_mat(&dy64), wide_mat(&x64), &a64, &b64);
        close(&dx, &dx64, 1e-6);
        close(&da, &da64, 2e-6);
        close(&db, &db64, 2e-6);

        let n = heads * d;
        let [x, z, dy] = [5, 6, 7].map(|seed| noise(rows * n, seed));
        let w = noise(d, 8);
        let [x64, z64, dy64, w64] = [&x, &z, &dy, &w].map(|x| wide(x));
        let mat = |x| Mat::new(x, rows, n);
        let (y, stats) = norm::gated_forward(mat(&x), mat(&z), &w, 1e-6);
        let wide_mat = |x| Mat::<f64>::new(x, rows, n);
        close(&y, &twin::gated_norm_forward(wide_mat(&x64), wide_mat(&z64), &w64, 1e-6), 2e-6);
        let mut dw = vec![0.5; d];
        let (dx, dz) = norm::gated_backward(mat(&dy), mat(&x), mat(&z), &w, &stats, Some(&mut dw));
        let (dx64, dz64, dw64) =
            twin::gated_norm_backward(wide_mat(&dy64), wide_mat(&x64), wide_mat(&z64), &w64, 1e-6);
        close(&dx, &dx64, 5e-6);
        close(&dz, &dz64, 2e-6);
        close(&dw, &dw64.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 5e-6);
    }
}
