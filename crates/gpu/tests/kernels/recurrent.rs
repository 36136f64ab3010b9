//! Layers that carry a state, compared with the f64 twin, which follows the recurrence row by row.

use omnigrpo_gpu::{Sequences, continued};
use omnigrpo_kernels::recurrent::{CHUNK, DeltaShape, Segments};

use super::*;

fn shape(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaShape {
    DeltaShape { key_heads, value_heads, key_dim, value_dim }
}

/// Kinds of decays: near 0, near 1, of every size, and so strong that the state vanishes from one row to the next.
#[derive(Clone, Copy, Debug)]
enum Decay {
    Strong,
    Weak,
    Mixed,
    Erasing,
}

const DECAYS: [Decay; 4] = [Decay::Strong, Decay::Weak, Decay::Mixed, Decay::Erasing];

/// Returns gates `[g | β]` of `rows` rows, on the device and for the twin.
fn gates(gpu: &Gpu, rows: usize, heads: usize, decay: Decay) -> (Array, Vec<f64>) {
    let mut gates = noise(rows * 2 * heads, 2);
    for (i, x) in gates.iter_mut().enumerate() {
        let unit = (*x + 2.0) / 4.0;
        *x = match decay {
            _ if i % (2 * heads) >= heads => unit,
            Decay::Strong => -5.0 - 20.0 * unit,
            Decay::Weak => -1e-3 * unit,
            Decay::Mixed => -(10.0 * (unit - 0.7)).exp(),
            Decay::Erasing if i % 5 == 0 => -1e4 * unit,
            Decay::Erasing => -0.01 * unit,
        };
    }
    (gpu.upload(&gates), wide(&gates))
}

/// Rows, gates and gradients of a stream, on the device and for the twin.
struct Stream {
    segments: Segments,
    shape: DeltaShape,
    qkv: (Array, Vec<f64>),
    gates: (Array, Vec<f64>),
    dout: (Array, Vec<f64>),
}

impl Stream {
    fn new(gpu: &Gpu, segments: &Segments, shape: DeltaShape, decay: Decay, dtype: Dtype) -> Self {
        let rows = segments.rows();
        Self {
            qkv: numbers(gpu, rows * shape.packed_width(), dtype, 1),
            gates: gates(gpu, rows, shape.value_heads, decay),
            dout: numbers(gpu, rows * shape.value_width(), Dtype::F32, 3),
            segments: segments.clone(),
            shape,
        }
    }

    /// Returns the output and the kept states, and, if `back`, the gradients of rows and gates.
    fn run(&self, gpu: &Gpu, back: bool) -> Vec<Array> {
        let sequences = Sequences::new(gpu, &self.segments);
        let [out, states] = gpu.delta(&self.qkv.0, &self.gates.0, &sequences, self.shape);
        let (dout, qkv, gates) = (&self.dout.0, &self.qkv.0, &self.gates.0);
        let gradients = back.then(|| gpu.delta_back(dout, qkv, gates, &states, &sequences, self.shape));
        [out, states].into_iter().chain(gradients.into_iter().flatten()).collect()
    }

    /// Returns what the twin computes, without the states.
    fn want(&self, back: bool) -> Vec<Vec<f64>> {
        let (rows, shape) = (self.segments.rows(), self.shape);
        let qkv = Mat::new(&self.qkv.1, rows, shape.packed_width());
        let gates = Mat::new(&self.gates.1, rows, 2 * shape.value_heads);
        let mut want = vec![twin::delta_forward(qkv, gates, &self.segments, shape)];
        if back {
            let dout = Mat::new(&self.dout.1, rows, shape.value_width());
            let (dqkv, dgates) = twin::delta_backward(dout, qkv, gates, &self.segments, shape);
            want.extend([dqkv, dgates]);
        }
        want
    }
}

/// Bounds of the relative errors of the output and of the gradients of rows and gates. With rows in bf16, factors of products lose up
/// to 2⁻¹⁶, and gradients of rows are bf16.
fn bounds(dtype: Dtype) -> [f64; 3] {
    match dtype {
        Dtype::F32 => [1e-5; 3],
        Dtype::Bf16 => [1e-4, 4e-3, 1e-4],
    }
}

/// The chunked form equals the recurrence at lengths around a chunk, and at 8,192 rows.
#[test]
fn chunks_equal_the_recurrence() {
    for (rows, shape) in [
        (1, shape(2, 4, 16, 24)),
        (63, shape(1, 3, 33, 5)),
        (64, shape(1, 1, 128, 128)),
        (65, shape(1, 1, 128, 128)),
        (1000, shape(1, 2, 64, 40)),
        (8192, shape(1, 1, 24, 32)),
    ] {
        for (decay, dtype) in DECAYS.into_iter().flat_map(|d| [(d, Dtype::F32), (d, Dtype::Bf16)]) {
            let gpu = gpu(1);
            let stream = Stream::new(&gpu, &Segments::one(rows), shape, decay, dtype);
            let got: Vec<Vec<f64>> = stream.run(&gpu, false).iter().map(|x| wide(&x.to_vec())).collect();
            gpu.check().unwrap();
            let what = format!("{rows} rows of {shape:?}, {decay:?}, {dtype:?}");
            near(&got[..1], &stream.want(false), &bounds(dtype), &what);
            // States exist between chunks only.
            assert_eq!(got[1].len(), rows.div_ceil(CHUNK) * shape.state_len());
        }
    }
}

/// Prompts whose completions begin and end inside a chunk, on its border and after several.
#[test]
fn groups_equal_the_recurrence_and_its_gradients() {
    for (groups, shape) in [
        (vec![(1, vec![])], shape(1, 1, 1, 1)),
        (vec![(64, vec![63, 1]), (65, vec![64])], shape(2, 4, 16, 9)),
        (vec![(100, vec![3, 65, 0, 130])], shape(1, 2, 24, 40)),
        (vec![(5, vec![7, 8]), (70, vec![]), (2, vec![90])], shape(2, 2, 7, 33)),
        (vec![(70, vec![9, 5])], shape(1, 2, 72, 130)),
    ] {
        let layout = AttentionLayout::groups(&groups);
        let rows = groups.iter().map(|(prompt, own)| prompt + own.iter().sum::<usize>()).sum();
        let segments = Segments::of(&layout, rows).unwrap();
        // The dtype of the rows matters at the borders of the kernels alone.
        let each = DECAYS.into_iter().map(|decay| (decay, Dtype::F32)).chain([(Decay::Mixed, Dtype::Bf16)]);
        for (decay, dtype) in each {
            let stream = |gpu: &Gpu| Stream::new(gpu, &segments, shape, decay, dtype);
            let mut got = match decay {
                Decay::Mixed => under_every_schedule(|gpu| stream(gpu).run(gpu, true)),
                _ => stream(&gpu(2)).run(&gpu(2), true).iter().map(|x| wide(&x.to_vec())).collect(),
            };
            got.remove(1);
            let what = format!("{groups:?}, {shape:?}, {decay:?}, {dtype:?}");
            near(&got, &stream(&gpu(0)).want(true), &bounds(dtype), &what);
        }
    }
}

/// The bits of a sequence do not depend on the others in its stream.
#[test]
fn a_sequence_has_the_same_bits_in_every_stream() {
    let shape = shape(1, 2, 24, 40);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let gpu = gpu(1);
        let run = |groups: &[(usize, Vec<usize>)], first: usize, rows: usize| {
            let all = groups.iter().map(|(prompt, own)| prompt + own.iter().sum::<usize>()).sum();
            let segments = Segments::of(&AttentionLayout::groups(groups), all).unwrap();
            let part = |x: &[f32], width: usize| {
                let mut part = vec![0.25; first * width];
                part.extend_from_slice(&x[..rows * width]);
                part.resize(all * width, 0.5);
                part
            };
            let (width, heads) = (shape.packed_width(), 2 * shape.value_heads);
            let qkv = gpu.cast(&gpu.upload(&part(&noise(rows * width, 1), width)), dtype);
            let gates: Vec<f32> = part(&noise(rows * heads, 2), heads).iter().map(|x| -x.abs()).collect();
            let dout = gpu.upload(&part(&noise(rows * shape.value_width(), 3), shape.value_width()));
            let (gates, sequences) = (gpu.upload(&gates), Sequences::new(&gpu, &segments));
            let [out, states] = gpu.delta(&qkv, &gates, &sequences, shape);
            let [dqkv, dgates] = gpu.delta_back(&dout, &qkv, &gates, &states, &sequences, shape);
            gpu.check().unwrap();
            let own = |x: &Array| {
                let width = x.len() / all;
                x.to_vec()[first * width..][..rows * width].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            [out, dqkv, dgates].map(|x| own(&x))
        };
        let alone = run(&[(100, vec![70])], 0, 170);
        assert!(run(&[(3, vec![65]), (100, vec![70]), (64, vec![])], 68, 170) == alone, "{dtype:?}");
    }
}

/// Convolutions, gates and norms, and their gradients.
#[test]
fn convolutions_gates_and_norms() {
    let groups = [(3, vec![2, 0, 1]), (2, vec![]), (66, vec![3, 65])];
    let rows = groups.iter().map(|(prompt, own)| prompt + own.iter().sum::<usize>()).sum();
    let segments = Segments::of(&AttentionLayout::groups(&groups), rows).unwrap();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        // Results in the dtype of the rows, and results in f32.
        let [own, f32s] = if dtype == Dtype::Bf16 { [4e-3, 1e-5] } else { [2e-6; 2] };
        for (c, taps) in [(5, 1), (33, 4), (64, 8)] {
            let inputs = |gpu: &Gpu| {
                [(rows * c, 1), (c * taps, 2), (rows * c, 3)].map(|(n, seed)| numbers(gpu, n, dtype, seed))
            };
            let got = under_every_schedule(|gpu| {
                let [x, w, dy] = inputs(gpu).map(|x| x.0);
                let sequences = Sequences::new(gpu, &segments);
                let d = gpu.causal_sums(&dy, &x, &w, &sequences);
                let mut dw = gpu.zeros(c * taps, Dtype::F32);
                gpu.causal_weight(&mut dw, &d, &x, &sequences);
                let dx = gpu.causal_back(&d, &w, &sequences, dtype);
                vec![gpu.causal(&x, &w, &sequences), dx, dw]
            });
            let [x, w, dy] = inputs(&gpu(0)).map(|x| x.1);
            let x = Mat::new(&x, rows, c);
            let (dx, dw) = twin::causal_backward(Mat::new(&dy, rows, c), x, &w, &segments);
            let want = [twin::causal_forward(x, &w, &segments), dx, dw];
            near(
                &got,
                &want,
                &[own, own, f32s],
                &format!("convolution, {c} channels, {taps} taps, {dtype:?}"),
            );
        }
        for heads in [1, 16] {
            let inputs = |gpu: &Gpu| {
                let x = numbers(gpu, rows * 2 * heads, dtype, 1);
                let dy = numbers(gpu, rows * 2 * heads, Dtype::F32, 2);
                [x, dy, numbers(gpu, heads, dtype, 3), numbers(gpu, heads, dtype, 4)]
            };
            let got = under_every_schedule(|gpu| {
                let [x, dy, a_log, dt_bias] = inputs(gpu).map(|x| x.0);
                let y = gpu.delta_gates(&x, &a_log, &dt_bias);
                let [dx, each] = gpu.delta_gates_back(&dy, &x, &y, &a_log, &dt_bias);
                let mut da = gpu.zeros(heads, Dtype::F32);
                gpu.add_column_sums(&mut da, &each, [0, heads], None, rows);
                vec![y, dx, da]
            });
            let [x, dy, a_log, dt_bias] = inputs(&gpu(0)).map(|x| x.1);
            let [x, dy] = [&x, &dy].map(|x| Mat::new(x, rows, 2 * heads));
            let (dx, da, _) = twin::gates_backward(dy, x, &a_log, &dt_bias);
            let want = [twin::gates_forward(x, &a_log, &dt_bias), dx, da];
            near(&got, &want, &[f32s; 3], &format!("{heads} gates, {dtype:?}"));
        }
        for (heads, d) in [(3, 7), (2, 130)] {
            let n = rows * heads * d;
            let inputs = |gpu: &Gpu| {
                let [gate, dy] = [1, 2].map(|seed| numbers(gpu, n, dtype, seed));
                [numbers(gpu, n, Dtype::F32, 3), gate, dy, numbers(gpu, d, dtype, 4)]
            };
            let got = under_every_schedule(|gpu| {
                let [x, gate, dy, w] = inputs(gpu).map(|x| x.0);
                let [y, rstd] = gpu.gated_norm(&x, &gate, &w, 1e-5);
                let [dnormed, dgate] = gpu.gated_norm_back(&dy, &x, &gate, &rstd, &w);
                let (mut dx, mut dw) = (gpu.zeros(n, Dtype::F32), gpu.zeros(d, Dtype::F32));
                gpu.rms_back(&mut dx, &dnormed, &x, &rstd, &w, false);
                gpu.norm_weight(&mut dw, &dnormed, &x, None, (&rstd, 0));
                vec![y, dx, dgate, dw]
            });
            let [x, gate, dy, w] = inputs(&gpu(0)).map(|x| x.1);
            let [x, gate, dy] = [&x, &gate, &dy].map(|x| Mat::new(x, rows, heads * d));
            let (dx, dgate, dw) = twin::gated_norm_backward(dy, x, gate, &w, 1e-5);
            let want = [twin::gated_norm_forward(x, gate, &w, 1e-5), dx, dgate, dw];
            near(&got, &want, &[own, f32s, own, f32s], &format!("gated norm, {heads}×{d}, {dtype:?}"));
        }
    }
}

/// Steps continue states that they read in one place and write in another or in the same one. The bits of a row depend neither on the
/// batch nor on how many rows a step has. A padding row has no states.
#[test]
fn steps_continue_states() {
    let (taps, layers, layer) = (4, 2, 1);
    for (shape, dtype) in [
        (shape(2, 4, 16, 9), Dtype::F32),
        (shape(1, 1, 128, 128), Dtype::Bf16),
        (shape(1, 2, 256, 33), Dtype::F32),
    ] {
        let c = shape.packed_width();
        let (conv, both) = ((taps - 1) * c, (taps - 1) * c + shape.state_len());
        let states: Vec<f32> = noise(2 * layers * both, 1).iter().map(|x| x / 8.0).collect();
        let rows = 3;
        let run = |gpu: &Gpu| {
            let (x, _) = numbers(gpu, 2 * rows * c, dtype, 2);
            let (gates, _) = gates(gpu, 2 * rows, shape.value_heads, Decay::Mixed);
            let (w, _) = numbers(gpu, c * taps, dtype, 3);
            let first = layer * both;
            let [from, other] = [0, 1].map(|i| gpu.upload(&states[i * layers * both..][..layers * both]));
            let [to, all, alone] = [(); 3].map(|()| gpu.zeros(layers * both, Dtype::F32));
            let part = |x: &Array, row: usize, count: usize| {
                let mut to = gpu.alloc(count * (x.len() / (2 * rows)), x.dtype());
                let width = x.len() / (2 * rows);
                gpu.copy_rows(
                    &mut to,
                    Place::new(0, width),
                    x,
                    Place::new(row * width, width),
                    [count, width],
                );
                to
            };
            let step = |entries: &[[&Array; 2]], padded: usize, x: &Array, gates: &Array, each: usize| {
                let table = gpu.upload_words(&continued(entries, padded));
                let qkv = gpu.causal_steps(x, &w, &table, first, each);
                let out = gpu.delta_steps(&qkv, gates, &table, first + conv, each, shape);
                [qkv, out]
            };
            // Three rows at once.
            let [qkv, out] = step(&[[&from, &all]], 1, &part(&x, 0, rows), &part(&gates, 0, rows), rows);
            // Row by row, beside another sequence and a padding row.
            let mut bits = Vec::new();
            for row in 0..rows {
                let pick = |x: &Array| {
                    let width = x.len() / (2 * rows);
                    let mut to = gpu.zeros(3 * width, x.dtype());
                    for (i, row) in [rows + row, row].into_iter().enumerate() {
                        let place = Place::new(row * width, width);
                        gpu.copy_rows(&mut to, Place::new(i * width, width), x, place, [1, width]);
                    }
                    to
                };
                let begin = if row == 0 { [&from, &other] } else { [&to, &alone] };
                let entries = [[begin[1], &alone], [begin[0], &to]];
                for y in step(&entries, 3, &pick(&x), &pick(&gates), 1) {
                    let width = y.len() / 3;
                    bits.push(y.to_vec()[width..2 * width].to_vec());
                }
            }
            for (i, whole) in [&qkv, &out].into_iter().enumerate() {
                let each: Vec<f32> = bits.iter().skip(i).step_by(2).flatten().copied().collect();
                let same = whole.to_vec().iter().zip(&each).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{shape:?}, result {i}");
            }
            assert!(all.to_vec() == to.to_vec(), "{shape:?}");
            vec![qkv, out, all]
        };
        let got = under_every_schedule(run);
        // The twin reads the output of the convolution that the device has rounded.
        let gpu = gpu(0);
        let gates = gates(&gpu, 2 * rows, shape.value_heads, Decay::Mixed).1;
        let (x, w) = (numbers(&gpu, 2 * rows * c, dtype, 2).1, numbers(&gpu, c * taps, dtype, 3).1);
        let state = wide(&states[layer * both..][..both]);
        let mut stream = state[..conv].to_vec();
        stream.extend_from_slice(&x[..rows * c]);
        let window = taps - 1 + rows;
        let convolved = twin::causal_forward(Mat::new(&stream, window, c), &w, &Segments::one(window));
        let mut end = state[conv..].to_vec();
        let heads = 2 * shape.value_heads;
        let (qkv, gates) = (Mat::new(&got[0], rows, c), Mat::new(&gates[..rows * heads], rows, heads));
        let out = twin::delta_steps(qkv, gates, &mut end, shape);
        let bound = if dtype == Dtype::Bf16 { 4e-3 } else { 2e-6 };
        let what = format!("{shape:?}, {dtype:?}");
        near(&got[..2], &[convolved[conv..].to_vec(), out], &[bound, 2e-6], &what);
        let (inputs, states) = got[2][layer * both..].split_at(conv);
        near(&[states.to_vec()], &[end], &[2e-6], &format!("{what}, states"));
        assert!(inputs == &stream[rows * c..], "{what}: inputs of the convolution");
    }
}
