//! Every operation at its edges: no rows and no columns, batches beside the buckets, NaN, and more than 2³¹ elements.

use omnigrpo_gpu::{DecodingSize, Pack, Sequences};
use omnigrpo_kernels::recurrent::{DeltaShape, Segments};

use super::*;

/// An operation on `t` rows of `h` columns.
struct Op {
    name: &'static str,
    /// Lengths of the inputs. The operation accepts them in either dtype, except for those of `f32s`.
    inputs: fn(usize, usize) -> Vec<usize>,
    /// Indices of inputs that are always f32.
    f32s: &'static [usize],
    /// Indices of inputs that are not negative.
    magnitudes: &'static [usize],
    run: fn(&Gpu, Vec<Array>, [usize; 2]) -> Vec<Array>,
    /// Number of results, from the first on, of which row `i` depends only on row `i` of the inputs.
    by_row: usize,
    /// Number of results, from the first on, whose end depends only on the last row of the inputs, whatever its index, if all other
    /// rows are zeros. 0 for operations that have a case of their own below, whose sizes only cuBLASLt sees (`linear`,
    /// `linear_dx`, `linear_dw`), that divide their work into pieces of at most 2²⁴ elements (`score`), or that prepare inputs on the
    /// host (the two halves, codes).
    large: usize,
}

/// The fields that most operations share.
const OP: Op = Op {
    name: "",
    inputs: |t, h| vec![t * h],
    f32s: &[],
    magnitudes: &[],
    run: |_, inputs, _| inputs,
    by_row: 0,
    large: 0,
};

fn take<const N: usize>(inputs: Vec<Array>) -> [Array; N] {
    inputs.try_into().unwrap_or_else(|_| unreachable!("an operation declares its inputs"))
}

/// Returns the gradient of a stream, and the same values in bf16.
fn with_low(gpu: &Gpu, dx: Array) -> Vec<Array> {
    let low = dx.rounded().map(|low| gpu.cast(low, low.dtype()));
    [dx].into_iter().chain(low).collect()
}

const KINDS: [Activation; 5] =
    [Activation::GeluErf, Activation::GeluTanh, Activation::QuickGelu, Activation::Silu, Activation::Tanh];
const STEP: Step = Step {
    lr: 0.5,
    betas: [0.9, 0.95],
    eps: 1e-8,
    weight_decay: 0.1,
    grad_scale: 0.5,
    count: 3,
    random: None,
};
/// Number of columns of products, of experts, and of tokens in the vocabulary.
const N: usize = 5;

/// Returns heads with a kernel for tensor cores if rows are bf16.
fn heads(x: &Array) -> Heads {
    Heads { q: 2, kv: 1, d: if x.dtype() == Dtype::Bf16 { 64 } else { 6 } }
}

/// Returns the first `len` elements.
fn packed_rows(gpu: &Gpu, x: &Array, len: usize) -> Array {
    let mut to = gpu.alloc(len, x.dtype());
    gpu.copy_rows(&mut to, Place::new(0, len), x, Place::new(0, len), [1, len]);
    to
}

/// Returns the elements of arrays of one dtype and `cols` columns, one array after the other.
fn joined(gpu: &Gpu, parts: &[Array], cols: usize) -> Array {
    let mut all = gpu.alloc(parts.iter().map(Array::len).sum(), parts[0].dtype());
    let mut first = 0;
    for part in parts {
        let rows = part.len() / cols.max(1);
        gpu.copy_rows(&mut all, Place::new(first, cols), part, Place::new(0, cols), [rows, cols]);
        first += part.len();
    }
    all
}

/// Returns a place of each row, with an expert that it chooses.
fn places(gpu: &Gpu, t: usize) -> (Mixture, Array, [usize; 3]) {
    let [ends, rows] = [t + 1, t].map(|len| (0..len as u32).collect::<Vec<u32>>());
    (Mixture::new(gpu, &ends, &rows, None), gpu.upload_words(&vec![1u32; t]), [0, 0, t])
}

const OPS: &[Op] = &[
    Op {
        name: "rms",
        inputs: |t, h| vec![t * h, h],
        run: |gpu, inputs, _| {
            let [x, w] = take(inputs);
            <[Array; 2]>::from(gpu.rms(&x, &w, 1e-5, x.dtype())).into()
        },
        by_row: 2,
        large: 2,
        ..OP
    },
    Op {
        name: "rms_back",
        inputs: |t, h| vec![t * h, t * h, t * h, t, h],
        f32s: &[0, 3],
        run: |gpu, inputs, _| {
            let [mut dx, dy, x, rstd, w] = take(inputs);
            gpu.rms_back(&mut dx, &dy, &x, &rstd, &w, true);
            with_low(gpu, dx)
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "layer",
        inputs: |t, h| vec![t * h, h, h],
        run: |gpu, inputs, _| {
            let [x, w, b] = take(inputs);
            <[Array; 2]>::from(gpu.layer(&x, &w, &b, 1e-5, x.dtype())).into()
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "layer_back",
        inputs: |t, h| vec![t * h, t * h, t * h, t, t, h],
        f32s: &[0, 3, 4],
        run: |gpu, inputs, _| {
            let [mut dx, dy, x, mean, rstd, w] = take(inputs);
            let stats = joined(gpu, &[mean, rstd], 1);
            gpu.layer_back(&mut dx, &dy, &x, &stats, &w, true);
            with_low(gpu, dx)
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "norm_weight",
        inputs: |t, h| vec![h, t * h, t * h, t, t],
        f32s: &[0, 3, 4],
        run: |gpu, inputs, [t, _]| {
            let [mut dw, dy, x, mean, rstd] = take(inputs);
            let stats = joined(gpu, &[mean, rstd], 1);
            gpu.norm_weight(&mut dw, &dy, &x, Some((&stats, 0)), (&stats, t));
            vec![dw]
        },
        large: 1,
        ..OP
    },
    Op {
        name: "column_sums",
        inputs: |t, h| vec![h, t * h, t * h],
        f32s: &[0],
        run: |gpu, inputs, [t, h]| {
            let [mut to, a, b] = take(inputs);
            gpu.add_column_sums(&mut to, &a, [0, h], Some(&b), t);
            vec![to]
        },
        large: 1,
        ..OP
    },
    Op {
        name: "mix",
        inputs: |t, h| vec![t * h, t * h],
        run: |gpu, inputs, [t, h]| {
            let [mut y, x] = take(inputs);
            gpu.mix(&mut y, &x, &places(gpu, t).0, h, true);
            vec![y]
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "sum_of_squares",
        run: |gpu, inputs, _| vec![gpu.upload(&[gpu.sum_of_squares(&inputs[0]) as f32])],
        large: 1,
        ..OP
    },
    Op {
        name: "swiglu",
        inputs: |t, h| vec![2 * t * h],
        run: |gpu, inputs, [t, h]| vec![gpu.swiglu(&inputs[0], t, h)],
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "swiglu_back",
        inputs: |t, h| vec![2 * t * h, t * h],
        run: |gpu, inputs, [t, h]| {
            let [mut gate_up, dy] = take(inputs);
            let mut y = gpu.alloc(t * h, gate_up.dtype());
            gpu.swiglu_back(&mut gate_up, &dy, Some(&mut y), t, h);
            vec![gate_up, y]
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "activation",
        run: |gpu, inputs, _| KINDS.map(|kind| gpu.activation(&inputs[0], kind)).into(),
        by_row: KINDS.len(),
        large: KINDS.len(),
        ..OP
    },
    Op {
        name: "activation_back",
        inputs: |t, h| vec![t * h, t * h],
        run: |gpu, inputs, _| {
            let [x, dy] = take(inputs);
            let back = |kind| {
                let mut own = gpu.cast(&x, x.dtype());
                gpu.activation_back(&mut own, &dy, kind);
                own
            };
            KINDS.map(back).into()
        },
        by_row: KINDS.len(),
        large: KINDS.len(),
        ..OP
    },
    Op {
        name: "scale_columns",
        inputs: |t, h| vec![t * h, t * h, h],
        run: |gpu, inputs, [t, h]| {
            let [x, residual, scale] = take(inputs);
            let y = gpu.alloc(t * h, residual.dtype());
            gpu.each_quad(elementwise::scale_columns(&y, &x, &residual, &scale, t, h), t, h);
            vec![y]
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "bias_rows",
        inputs: |t, h| vec![t * h, h, t * h],
        run: |gpu, inputs, [t, h]| {
            let [mut y, bias, residual] = take(inputs);
            gpu.bias_rows(&mut y, 0, h, t, &bias, Some(&residual));
            vec![y]
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "copy_rows",
        inputs: |t, h| vec![t * h, t * h],
        run: |gpu, inputs, [t, h]| {
            let [mut to, from] = take(inputs);
            gpu.copy_rows(&mut to, Place::new(0, h), &from, Place::new(0, h), [t, h]);
            vec![to]
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "rotate",
        inputs: |t, h| vec![t * h, t * (h / 2), t * (h / 2)],
        f32s: &[1, 2],
        run: |gpu, inputs, [t, h]| {
            let [mut x, cos, sin] = take(inputs);
            gpu.rotate(&mut x, [t, h], &cos, &sin, [1, 2 * (cos.len() / t.max(1))], false);
            vec![x]
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "dropout",
        run: |gpu, inputs, [t, h]| {
            let keys = gpu.upload_words(&vec![3u64; t]);
            [Some(&keys), None].map(|keys| gpu.dropout(&inputs[0], h, keys, 7, 1 << 30, 1.25)).into()
        },
        by_row: 2,
        large: 1,
        ..OP
    },
    Op {
        name: "add",
        inputs: |t, h| vec![t * h, t * h],
        run: |gpu, inputs, _| {
            let [mut to, from] = take(inputs);
            gpu.add(&mut to, &from);
            vec![to]
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "scale",
        run: |gpu, inputs, _| {
            let [mut x] = take(inputs);
            gpu.scale(&mut x, 3.0);
            vec![x]
        },
        by_row: 1,
        large: 1,
        ..OP
    },
    Op {
        name: "cast",
        run: |gpu, inputs, _| [Dtype::F32, Dtype::Bf16].map(|dtype| gpu.cast(&inputs[0], dtype)).into(),
        by_row: 2,
        large: 2,
        ..OP
    },
    Op {
        name: "adamw",
        inputs: |t, h| vec![t * h; 4],
        f32s: &[1, 2, 3],
        magnitudes: &[2],
        run: |gpu, inputs, _| {
            let [mut weight, mut m, mut v, grad] = take(inputs);
            gpu.adamw(&mut weight, None, [&mut m, &mut v], &grad, &STEP);
            vec![weight, m, v]
        },
        by_row: 3,
        large: 3,
    },
    Op {
        name: "adamw of a weight in two halves",
        inputs: |t, h| vec![t * h; 4],
        f32s: &[0, 1, 2, 3],
        magnitudes: &[2],
        run: |gpu, inputs, _| {
            let [master, mut m, mut v, grad] = take(inputs);
            let (mut weight, mut rest) = gpu.split_master(&master.to_vec());
            gpu.adamw(&mut weight, Some(&mut rest), [&mut m, &mut v], &grad, &STEP);
            let joined = gpu.upload(&gpu.join_master(&weight, &rest));
            vec![weight, joined, m, v]
        },
        by_row: 4,
        ..OP
    },
    Op {
        name: "linear",
        inputs: |t, h| vec![t * h, N * h, t * N],
        run: |gpu, inputs, [_, h]| {
            let [x, w, mut y] = take(inputs);
            let mut plain = gpu.alloc(y.len(), Dtype::F32);
            gpu.linear(&mut plain, [0, N], &x, Weight::Dense(&w), [0, N, h], Onto::Nothing);
            gpu.linear(&mut y, [0, N], &x, Weight::Dense(&w), [0, N, h], Onto::Output);
            vec![plain, y]
        },
        ..OP
    },
    Op {
        name: "linear_rows",
        inputs: |t, h| vec![t * h, N * h, N, t * N],
        run: |gpu, inputs, [_, h]| {
            let [x, w, bias, mut y] = take(inputs);
            let layer = Affine { weight: Weight::Dense(&w), bias: Some(&bias), n: N };
            gpu.linear_rows(&mut y, [0, N], &x, &[layer], h, Onto::Output);
            vec![y]
        },
        by_row: 1,
        ..OP
    },
    Op {
        name: "swiglu_rows",
        inputs: |t, h| vec![t * h, N * h, N * h, N],
        run: |gpu, inputs, [t, h]| {
            let [x, gate, up, bias] = take(inputs);
            let layer = |w, bias| Affine { weight: Weight::Dense(w), bias, n: N };
            vec![gpu.swiglu_rows(&x, [layer(&gate, Some(&bias)), layer(&up, None)], [t, h], x.dtype())]
        },
        by_row: 1,
        ..OP
    },
    Op {
        name: "linear_dx",
        inputs: |t, h| vec![t * h, t * N, N * h],
        run: |gpu, inputs, [_, h]| {
            let [mut dx, dy, w] = take(inputs);
            gpu.linear_dx(&mut dx, &dy, [0, N], Weight::Dense(&w), [0, N, h], true);
            vec![dx]
        },
        ..OP
    },
    Op {
        name: "linear_dw",
        inputs: |t, h| vec![N * h, t * h, t * N],
        f32s: &[0],
        run: |gpu, inputs, [_, h]| {
            let [mut dw, x, dy] = take(inputs);
            let dtype = x.dtype();
            gpu.linear_dw(&mut dw, &x, &dy, [0, N], [0, N, h], dtype);
            vec![dw]
        },
        ..OP
    },
    Op {
        name: "attention",
        inputs: |t, _| vec![t * 256, t * 128],
        run: |gpu, inputs, [t, _]| {
            let [qkv, dout] = take(inputs);
            let heads = heads(&qkv);
            let (qkv, dout) =
                (packed_rows(gpu, &qkv, t * 4 * heads.d), packed_rows(gpu, &dout, t * 2 * heads.d));
            let pattern = Pattern::new(gpu, &AttentionLayout::causal(t), t);
            let (out, lse) = gpu.attention(&qkv, &pattern, heads);
            let back = gpu.attention_back(&qkv, &out, &lse, &dout, &pattern, heads);
            vec![out, lse, back]
        },
        ..OP
    },
    Op {
        name: "attend_cached",
        inputs: |t, _| vec![t * 256, 10 * 128, t * PAGE * 128],
        run: |gpu, inputs, [t, _]| {
            let [qkv, prompt, pages] = take(inputs);
            let page = |row: usize| {
                let mut page = gpu.alloc(PAGE * 128, pages.dtype());
                let from = Place::new(row * PAGE * 128, 128);
                gpu.copy_rows(&mut page, Place::new(0, 128), &pages, from, [PAGE, 128]);
                page
            };
            let pages: Vec<Array> = (0..t).map(page).collect();
            let completions = pages.iter().map(|page| (vec![page], PAGE)).collect();
            let group = CachedGroup { prompt: &prompt, prompt_rows: 10, completions };
            let heads = Heads { q: 2, kv: 1, d: 64 };
            vec![gpu.attend_cached(&qkv, &Decoding::new(gpu, &[group], heads), 0, heads, Turn::default())]
        },
        by_row: 1,
        ..OP
    },
    Op {
        name: "weight_rows",
        run: |gpu, inputs, [t, h]| {
            let rows = |dtype| gpu.weight_rows(Weight::Dense(&inputs[0]), h, None, t, dtype);
            [Dtype::F32, Dtype::Bf16].map(rows).into()
        },
        by_row: 2,
        large: 2,
        ..OP
    },
    Op {
        name: "linear_rows with codes",
        inputs: |t, h| vec![t * h, N, t * N],
        run: |gpu, inputs, [_, h]| {
            let [x, bias, y] = take(inputs);
            let product = |bits| {
                let values = noise(N * h, 9);
                let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&values[i * h..(i + 1) * h]);
                let matrix = QuantMatrix::from_rows(bits, N, h, row).unwrap();
                let (codes, scales) = matrix.by_rows();
                let scales: Vec<_> = scales.iter().map(|scale| [scale.min, scale.step]).collect();
                let codes = Codes::new(gpu, bits, [N, h], &codes, &scales);
                let mut y = gpu.cast(&y, y.dtype());
                let layer = Affine { weight: Weight::Codes(&codes), bias: Some(&bias), n: N };
                gpu.linear_rows(&mut y, [0, N], &x, &[layer], h, Onto::Output);
                y
            };
            [QuantBits::Eight, QuantBits::Four].map(product).into()
        },
        by_row: 2,
        ..OP
    },
    Op {
        name: "unfold",
        run: |gpu, inputs, [t, h]| {
            let sources: Vec<u32> = (0..t as u32).collect();
            let patches = Unfolding::new(gpu, &sources, 1, t);
            let unfolded = gpu.unfold(&inputs[0], &patches, h);
            let [mut dx] = take(inputs);
            gpu.fold(&mut dx, &unfolded, &patches, h);
            vec![unfolded, dx]
        },
        by_row: 2,
        large: 2,
        ..OP
    },
    Op {
        name: "depthwise",
        inputs: |t, h| vec![t * h, 9 * h, 9 * h, t * h],
        f32s: &[2],
        run: |gpu, inputs, _| {
            let [x, w, mut dw, dy] = take(inputs);
            gpu.depthwise_weight(&mut dw, &dy, &x, [1, 1]);
            vec![gpu.depthwise(&x, &w, [1, 1], false), gpu.depthwise(&dy, &w, [1, 1], true), dw]
        },
        by_row: 2,
        large: 2,
        ..OP
    },
    Op {
        name: "gate",
        inputs: |t, h| vec![t * h; 3],
        run: |gpu, inputs, [_, h]| {
            let [x, gate, dy] = take(inputs);
            let y = gpu.gate(&x, &gate, h);
            let [dx, dgate] = gpu.gate_back(&x, &gate, &dy, h);
            vec![y, dx, dgate]
        },
        by_row: 3,
        large: 3,
        ..OP
    },
    Op {
        name: "blend",
        inputs: |t, h| vec![t * h, t * h, t * h, 3, t * h],
        f32s: &[3],
        run: |gpu, inputs, [_, h]| {
            let [a, b, c, logits, dy] = take(inputs);
            let x = joined(gpu, &[a, b, c], h);
            let y = gpu.blend(&x, &logits);
            let [dx, dlogits] = gpu.blend_back(&x, &logits, &dy);
            vec![y, dx, dlogits]
        },
        large: 2,
        ..OP
    },
    Op {
        name: "experts",
        inputs: |t, h| vec![t * h, 2 * h * N, t * N, 2 * h * N],
        f32s: &[3],
        run: |gpu, inputs, [t, h]| {
            let [x, w, dy, mut dw] = take(inputs);
            let (_, experts, offsets) = places(gpu, t);
            let weight = Weight::Dense(&w);
            let [mut by_place, mut by_expert] = [(); 2].map(|()| gpu.alloc(t * N, x.dtype()));
            gpu.experts_rows(&mut by_place, &x, weight, &experts, [h, N]);
            gpu.experts(&mut by_expert, &x, weight, &offsets, [h, N]);
            let mut dx = gpu.alloc(t * h, x.dtype());
            gpu.experts_dx(&mut dx, &dy, weight, &offsets, [h, N]);
            gpu.experts_dw(&mut dw, &x, &dy, (&offsets, x.dtype()), [h, N]);
            vec![by_place, by_expert, dx, dw]
        },
        by_row: 1,
        ..OP
    },
    Op {
        name: "weigh",
        inputs: |t, h| vec![t * h, t * h, 2 * t],
        f32s: &[2],
        run: |gpu, inputs, [t, _]| {
            let [x, dy, logits] = take(inputs);
            let (mixture, experts, _) = places(gpu, t);
            let y = gpu.weigh(&x, &logits, &mixture, &experts, 2);
            let [dx, dlogits] = gpu.weigh_back([&x, &dy], &logits, &mixture, &experts, 2);
            vec![y, dx, dlogits]
        },
        by_row: 3,
        // The gradient of the only logit of a row is zero.
        large: 2,
        ..OP
    },
    Op {
        name: "gated_norm",
        inputs: |t, h| vec![t * h, t * h, t * h, h],
        f32s: &[0],
        run: |gpu, inputs, _| {
            let [x, gate, dy, w] = take(inputs);
            let [y, rstd] = gpu.gated_norm(&x, &gate, &w, 1e-5);
            let [dnormed, dgate] = gpu.gated_norm_back(&dy, &x, &gate, &rstd, &w);
            vec![y, dnormed, dgate]
        },
        by_row: 3,
        large: 3,
        ..OP
    },
    Op {
        name: "delta_gates",
        inputs: |t, h| vec![2 * t * h, 2 * t * h, h, h],
        f32s: &[1],
        run: |gpu, inputs, _| {
            let [x, dy, a_log, dt_bias] = take(inputs);
            let y = gpu.delta_gates(&x, &a_log, &dt_bias);
            let [dx, da] = gpu.delta_gates_back(&dy, &x, &y, &a_log, &dt_bias);
            vec![y, dx, da]
        },
        by_row: 3,
        large: 3,
        ..OP
    },
    // Rows of the first results depend on no later row.
    Op {
        name: "causal",
        inputs: |t, h| vec![t * h, 4 * h, t * h, 4 * h],
        f32s: &[3],
        run: |gpu, inputs, [t, _]| {
            let [x, w, dy, mut dw] = take(inputs);
            let sequences = Sequences::new(gpu, &Segments::one(t));
            let d = gpu.causal_sums(&dy, &x, &w, &sequences);
            gpu.causal_weight(&mut dw, &d, &x, &sequences);
            let dx = gpu.causal_back(&d, &w, &sequences, x.dtype());
            vec![gpu.causal(&x, &w, &sequences), d, dx, dw]
        },
        by_row: 2,
        ..OP
    },
    Op {
        name: "delta",
        inputs: |t, h| vec![3 * t * h, 2 * t, t * h],
        f32s: &[1, 2],
        magnitudes: &[1],
        run: |gpu, inputs, [t, h]| {
            let [qkv, mut gates, dout] = take(inputs);
            // Decays do not grow.
            gpu.scale(&mut gates, -0.1);
            let shape = DeltaShape { key_heads: 1, value_heads: 1, key_dim: h, value_dim: h };
            let sequences = Sequences::new(gpu, &Segments::one(t));
            let [out, states] = gpu.delta(&qkv, &gates, &sequences, shape);
            let [dqkv, dgates] = gpu.delta_back(&dout, &qkv, &gates, &states, &sequences, shape);
            vec![out, states, dqkv, dgates]
        },
        by_row: 1,
        ..OP
    },
    Op {
        name: "score",
        inputs: |t, h| vec![t * h, N * h, N * h, t, t],
        f32s: &[2, 3, 4],
        run: |gpu, inputs, [t, h]| {
            let [x, w, mut dhead, dlogp, dentropy] = take(inputs);
            let offsets: Vec<u32> = (0..=t as u32).collect();
            let marks = Marks::new(gpu, &offsets, &vec![2; t]);
            let head = Head { weight: Weight::Dense(&w), vocab: N, h, temperature: 0.7 };
            let [logp, entropy, lse] = gpu.score(&x, head, &marks);
            let upstream = (&dlogp, Some(&dentropy));
            let dx = gpu.score_back(&x, head, &marks, [&entropy, &lse], upstream, Some(&mut dhead));
            vec![logp, entropy, lse, dx, dhead]
        },
        ..OP
    },
];

impl Op {
    /// Returns the numbers of the inputs, which for more rows begin with those for fewer.
    fn numbers(&self, t: usize, h: usize) -> Vec<Vec<f32>> {
        let numbers = |(i, &len): (usize, &usize)| {
            let numbers = noise(len, i as u64 + 1);
            let sign = |x: f32| if self.magnitudes.contains(&i) { x.abs() } else { x };
            numbers.into_iter().map(sign).collect()
        };
        (self.inputs)(t, h).iter().enumerate().map(numbers).collect()
    }

    fn compute(&self, gpu: &Gpu, inputs: &[Vec<f32>], dtype: Dtype, size: [usize; 2]) -> Vec<Vec<f32>> {
        let upload = |(i, x): (usize, &Vec<f32>)| {
            let dtype = if self.f32s.contains(&i) { Dtype::F32 } else { dtype };
            gpu.cast(&gpu.upload(x), dtype)
        };
        let results = (self.run)(gpu, inputs.iter().enumerate().map(upload).collect(), size);
        let results = results.iter().map(Array::to_vec).collect();
        assert_eq!(gpu.check(), Ok(()), "{}, {dtype:?}, {size:?}", self.name);
        results
    }
}

fn every_op(check: impl Fn(&Op, Dtype)) {
    for op in OPS {
        [Dtype::F32, Dtype::Bf16].iter().for_each(|&dtype| check(op, dtype));
    }
}

/// Launches without rows, without columns, and without both succeed, and leave no element of a result undefined.
#[test]
fn nothing_to_compute() {
    every_op(|op, dtype| {
        for [t, h] in [[0, 8], [3, 0], [0, 0]] {
            let results = op.compute(&gpu(1), &op.numbers(t, h), dtype, [t, h]);
            for (i, x) in results.iter().enumerate() {
                // A mean of no columns is undefined.
                let mean = i == 1 && ["rms", "layer"].contains(&op.name);
                let what = format!("{}, {dtype:?}, {t}×{h}, result {i}: {x:?}", op.name);
                assert!(mean || x.iter().all(|x| !x.is_nan()), "{what}");
            }
        }
    });
}

/// Rows have the same bits in batches that are no multiple of a tile or bucket.
#[test]
fn batches_beside_the_buckets() {
    every_op(|op, dtype| {
        let h = 24;
        let few = op.compute(&gpu(0), &op.numbers(7, h), dtype, [7, h]);
        for (schedule, t) in [(1, 9), (2, 12), (1, 15), (2, 17), (1, 33), (2, 65)] {
            let many = op.compute(&gpu(schedule), &op.numbers(t, h), dtype, [t, h]);
            for (i, (few, many)) in few.iter().zip(&many).take(op.by_row).enumerate() {
                let same = few.iter().zip(many).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{}, {dtype:?}, {t} rows: result {i} differs from that of 7 rows", op.name);
            }
        }
    });
}

/// Every number that depends on an input is NaN if that input is. Dependence is found by changing the input.
#[test]
fn nan_is_never_hidden() {
    every_op(|op, dtype| {
        let size = [3, 8];
        let inputs = op.numbers(3, 8);
        let before = op.compute(&gpu(0), &inputs, dtype, size);
        for (i, input) in inputs.iter().enumerate() {
            for at in [0, input.len() / 2, input.len() - 1] {
                let with = |value: f32| {
                    let mut changed = inputs.clone();
                    changed[i][at] = value;
                    op.compute(&gpu(0), &changed, dtype, size)
                };
                let (after, nan) = (with(input[at] + 1.0), with(f32::NAN));
                for (result, ((before, after), nan)) in before.iter().zip(&after).zip(&nan).enumerate() {
                    for (j, ((before, after), nan)) in before.iter().zip(after).zip(nan).enumerate() {
                        assert!(
                            before.to_bits() == after.to_bits() || nan.is_nan(),
                            "{}, {dtype:?}: element {j} of result {result} is {nan} although element {at} of input {i} is NaN",
                            op.name
                        );
                    }
                }
            }
        }
    });
}

/// Returns whether arrays of more than 2³¹ elements can be computed: on a card, and on the emulator, which runs the first and the
/// last blocks of a launch and maps memory as it is used. The stand-in of a card (tools/gpu/stand-in) runs all blocks on the CPU,
/// which takes hours.
fn has_room(gpu: &Gpu) -> bool {
    gpu.sample_blocks();
    !gpu.name().starts_with("Stand-in")
}

/// Returns zeros that end with the numbers of `end`, and have at least as many elements as `len`.
fn ends_with(gpu: &Gpu, len: usize, end: &Array) -> Array {
    let (mut whole, own) = (gpu.zeros(len, end.dtype()), end.len());
    gpu.copy_rows(&mut whole, Place::new(len - own, own), end, Place::new(0, own), [1, own]);
    whole
}

/// Returns the last elements.
fn last(gpu: &Gpu, x: &Array, len: usize) -> Vec<f32> {
    let mut to = gpu.alloc(len, x.dtype());
    gpu.copy_rows(&mut to, Place::new(0, len), x, Place::new(x.len() - len, len), [1, len]);
    to.to_vec()
}

/// The last row of an array of more than 2³¹ elements equals that row alone.
#[test]
fn more_than_2_31_elements() {
    let [t, h] = [(1 << 16) + 1, 1 << 15];
    for op in OPS.iter().filter(|op| op.large > 0) {
        let gpu = gpu(0);
        let one = op.numbers(1, h);
        let want = op.compute(&gpu, &one, Dtype::F32, [1, h]);
        if !has_room(&gpu) {
            return;
        }
        let inputs = (op.inputs)(t, h);
        let inputs =
            inputs.iter().zip(&one).map(|(&len, own)| ends_with(&gpu, len, &gpu.upload(own))).collect();
        let results = (op.run)(&gpu, inputs, [t, h]);
        for (i, (got, want)) in results.iter().zip(&want).take(op.large).enumerate() {
            // At most so many elements belong to the last blocks of a kernel of single elements.
            let tail = want.len().min(1024);
            let got = last(&gpu, got, tail);
            assert_eq!(gpu.check(), Ok(()), "{}", op.name);
            assert!(got.iter().any(|&x| x != 0.0), "{}, result {i} is zero", op.name);
            assert_eq!(got, want[want.len() - tail..], "{}, result {i}", op.name);
        }
    }
}

/// Products with the last rows of a weight and with the last expert, in weights of more than 2³¹ elements.
#[test]
fn more_than_2_31_elements_of_a_weight() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let gpu = gpu(0);
        if !has_room(&gpu) {
            return;
        }
        let (k, n, own) = (1 << 13, (1 << 18) + 64, 128);
        let ([x, end], hosts) = {
            let all = [1, own].map(|rows| numbers(&gpu, rows * k, dtype, rows as u64));
            let [(x, x_host), (end, end_host)] = all;
            ([x, end], [x_host, end_host])
        };
        let weight = ends_with(&gpu, n * k, &end);
        let mut y = gpu.zeros(n, Dtype::F32);
        let layer = Affine { weight: Weight::Dense(&weight), bias: None, n };
        gpu.linear_rows(&mut y, [0, n], &x, &[layer], k, Onto::Nothing);
        drop(weight);
        let want = twin::linear_forward(Mat::new(&hosts[0], 1, k), Mat::new(&hosts[1], own, k), None);
        assert!(error(&wide(&last(&gpu, &y, own)), &want) < 1e-5, "{dtype:?}");

        let (experts, k, n) = ((1 << 12) + 1, 1 << 10, 1 << 9);
        let [x, end] = [(2 * k, 3), (k * n, 4)].map(|(len, seed)| numbers(&gpu, len, dtype, seed).0);
        let weight = ends_with(&gpu, experts * k * n, &end);
        let product = |weight: &Array, expert: u32| {
            let mut y = gpu.alloc(2 * n, Dtype::F32);
            gpu.experts_rows(&mut y, &x, Weight::Dense(weight), &gpu.upload_words(&[expert; 2]), [k, n]);
            y.to_vec()
        };
        assert_eq!(product(&weight, experts as u32 - 1), product(&end, 0), "{dtype:?}, the last expert");
        gpu.check().unwrap();
    }
}

/// Attention among the last rows of more than 2³¹ elements, and decoding with the last layer of such caches.
#[test]
fn more_than_2_31_elements_of_attention() {
    let heads = Heads { q: 6, kv: 2, d: 64 };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let gpu = gpu(0);
        if !has_room(&gpu) {
            return;
        }
        // A grid has at most 65,535 tiles of 64 rows.
        let (own, all) = (16, 52_429 * 64 + 16);
        let [qkv, dout] = [(640, 1), (384, 2)].map(|(cols, seed)| numbers(&gpu, own * cols, dtype, seed).0);
        let run = |t: usize| {
            let rows = t - own..t;
            let range = QueryRange { queries: rows.clone(), keys: vec![rows], causal: true };
            let pattern = Pattern::new(&gpu, &AttentionLayout { ranges: vec![range] }, t);
            let (qkv, dout) = (ends_with(&gpu, t * 640, &qkv), ends_with(&gpu, t * 384, &dout));
            let (out, lse) = gpu.attention(&qkv, &pattern, heads);
            let back = gpu.attention_back(&qkv, &out, &lse, &dout, &pattern, heads);
            [(out, 384), (lse, 6), (back, 640)].map(|(x, cols)| last(&gpu, &x, own * cols))
        };
        let (large, alone) = (run(all), run(own));
        gpu.check().unwrap();
        assert_eq!(large, alone, "{dtype:?}");

        let layers = (1 << 19) + 1;
        let [qkv, prompt, page] =
            [(640, 3), (16 * 256, 4), (PAGE * 256, 5)].map(|(len, seed)| numbers(&gpu, len, dtype, seed).0);
        let decode = |layers: usize| {
            let [prompt, page] = [&prompt, &page].map(|own| ends_with(&gpu, layers * own.len(), own));
            let completions = vec![(vec![&page], 5)];
            let group = CachedGroup { prompt: &prompt, prompt_rows: 16, completions };
            let decoding = Decoding::new(&gpu, &[group], heads);
            let out = gpu.attend_cached(&qkv, &decoding, layers - 1, heads, Turn::default()).to_vec();
            (out, last(&gpu, &page, PAGE * 256))
        };
        assert_eq!(decode(layers), decode(1), "{dtype:?}, decoding");
        gpu.check().unwrap();
    }
}

/// Two runs give the same bits, in whatever order threads advance.
#[test]
fn the_same_bits_in_every_run() {
    every_op(|op, dtype| {
        let inputs = op.numbers(7, 24);
        let bits = |schedule| {
            let results = op.compute(&gpu(schedule), &inputs, dtype, [7, 24]);
            results.into_iter().flatten().map(f32::to_bits).collect::<Vec<_>>()
        };
        assert_eq!(bits(1), bits(2), "{}, {dtype:?}", op.name);
    });
}

/// Settings that take each way of a draw.
const SAMPLINGS: [Sampling; 4] = [
    PLAIN,
    Sampling { temperature: 0.0, ..PLAIN },
    Sampling { top_p: 0.9, repetition_penalty: 1.5, ..PLAIN },
    Sampling { temperature: 1.25, top_k: 40, min_p: 0.1, ..PLAIN },
];
const FORBIDDEN: [u32; 2] = [5, 17];

/// Returns `n` rows of a draw. Every second one has penalised tokens, and every third one must not draw the forbidden ones.
fn draw_rows(n: usize) -> Vec<Row> {
    let uniforms = noise(n, 8);
    let row = |(i, u): (usize, &f32)| Row {
        uniform: f64::from(u / 4.0 + 0.5),
        seen: if i % 2 == 0 { vec![3, 80] } else { vec![] },
        forbids: i % 3 == 0,
    };
    uniforms.iter().enumerate().map(row).collect()
}

fn draw(gpu: &Gpu, logits: &[f32], vocab: usize, sampling: &Sampling, rows: &[Row]) -> Vec<Drawn> {
    let drawn = gpu.sample(&mut gpu.upload(logits), vocab, sampling, rows, &FORBIDDEN);
    gpu.check().unwrap();
    drawn
}

/// Returns the experts of each row, and the sums of the numbers of its places.
fn choose(gpu: &Gpu, logits: &[f32], [rows, all, each]: [usize; 3]) -> (Vec<u32>, Vec<f32>) {
    let chosen = gpu.choose_experts(&gpu.upload(logits), [rows, all, each]);
    let numbers: Vec<f32> = (0..rows * each).map(|place| place as f32).collect();
    let mut sums = gpu.alloc(rows, Dtype::F32);
    gpu.mix(&mut sums, &gpu.upload(&numbers), &chosen.sums, 1, false);
    gpu.check().unwrap();
    (chosen.experts.to_vec().into_iter().map(f32::to_bits).collect(), sums.to_vec())
}

/// Choices and draws of no rows are empty. A row without a choice has none, and one without a vocabulary has no token.
#[test]
fn nothing_to_choose() {
    let gpu = gpu(1);
    for [rows, all, each] in [[0, 5, 2], [0, 0, 0], [3, 5, 0], [3, 0, 0]] {
        let (experts, sums) = choose(&gpu, &vec![1.0; rows * all], [rows, all, each]);
        assert_eq!((experts, sums), (vec![], vec![0.0; rows]), "{rows} rows, {each} of {all}");
    }
    for sampling in &SAMPLINGS {
        assert!(draw(&gpu, &[], 300, sampling, &[]).is_empty());
        assert!(draw(&gpu, &[], 0, sampling, &[]).is_empty());
        let rows = vec![Row { uniform: 0.5, ..Row::default() }; 2];
        let none = draw(&gpu, &[], 0, sampling, &rows);
        assert!(none.len() == 2 && none.iter().all(|one| one.logprob.is_nan() && one.id == 0), "{none:?}");
        let only = draw(&gpu, &[-7.0, 7.0], 1, sampling, &rows);
        let certain = Drawn { id: 0, logprob: 0.0, sampler_logprob: 0.0, entropy: 0.0 };
        assert_eq!(only, [certain; 2], "{sampling:?}");
    }
}

/// Draws and choices of a row are the same in batches that are no multiple of a bucket.
#[test]
fn choices_beside_the_buckets() {
    let (most, vocab, all, each) = (65, 300, 11, 3);
    let (logits, router, rows) = (noise(most * vocab, 1), noise(most * all, 2), draw_rows(most));
    let few = [(1, 1), (2, 7), (1, 8), (2, 9), (1, 12), (2, 15), (1, 17), (2, 33), (1, 64)];
    for sampling in &SAMPLINGS {
        let whole = draw(&gpu(0), &logits, vocab, sampling, &rows);
        for (row, got) in whole.iter().enumerate() {
            let penalised = sampling.repetition_penalty != 1.0;
            let own = Row { seen: if penalised { rows[row].seen.clone() } else { vec![] }, ..rows[row] };
            let want = drawn(&logits[row * vocab..(row + 1) * vocab], sampling, &own, &FORBIDDEN);
            assert!(got.id == want.id && (got.logprob - want.logprob).abs() < 2e-5, "{got:?} for {want:?}");
        }
        for (schedule, n) in few {
            let some = draw(&gpu(schedule), &logits[..n * vocab], vocab, sampling, &rows[..n]);
            assert_eq!(some, whole[..n], "{sampling:?}, {n} rows");
        }
    }
    let (experts, sums) = choose(&gpu(0), &router, [most, all, each]);
    for (schedule, n) in few {
        let some = choose(&gpu(schedule), &router[..n * all], [n, all, each]);
        assert_eq!(some, (experts[..n * each].to_vec(), sums[..n].to_vec()), "{n} rows");
    }
}

/// A NaN anywhere in a row of logits makes every number of its draw NaN, and its expert is chosen. Other rows stay as they are.
#[test]
fn nan_is_never_hidden_from_a_choice() {
    let (vocab, all, each) = (300, 11, 3);
    let (logits, router, rows) = (noise(3 * vocab, 1), noise(3 * all, 2), draw_rows(3));
    let with = |x: &[f32], at: usize| {
        let mut changed = x.to_vec();
        changed[at] = f32::NAN;
        changed
    };
    for sampling in &SAMPLINGS {
        let before = draw(&gpu(0), &logits, vocab, sampling, &rows);
        // The second of these tokens is forbidden and the third is penalised in some rows.
        for at in [0, 17, 80, vocab - 1] {
            for row in 0..3 {
                let mut after = draw(&gpu(1), &with(&logits, row * vocab + at), vocab, sampling, &rows);
                let Drawn { logprob, sampler_logprob, entropy, .. } = after.remove(row);
                let what = format!("{sampling:?}, token {at} of row {row}");
                assert!([logprob, sampler_logprob, entropy].iter().all(|x| x.is_nan()), "{what}");
                let mut others = before.clone();
                others.remove(row);
                assert_eq!(after, others, "{what}");
            }
        }
    }
    let (before, _) = choose(&gpu(0), &router, [3, all, each]);
    for at in 0..all {
        let (after, _) = choose(&gpu(1), &with(&router, all + at), [3, all, each]);
        assert!(after[each..2 * each].contains(&(at as u32)), "expert {at} is not in {after:?}");
        assert_eq!((&after[..each], &after[2 * each..]), (&before[..each], &before[2 * each..]));
    }
}

/// The last rows of more than 2³¹ logits are drawn from as alone.
#[test]
fn more_than_2_31_logits() {
    let gpu = gpu(0);
    if !has_room(&gpu) {
        return;
    }
    let (vocab, all, own) = (1 << 17, (1 << 14) + 2, 2);
    let (end, rows) = (gpu.upload(&noise(own * vocab, 1)), draw_rows(own));
    for sampling in &SAMPLINGS {
        let logits = |n: usize| ends_with(&gpu, n * vocab, &end);
        let of = |n: usize, rows: &[Row]| gpu.sample(&mut logits(n), vocab, sampling, rows, &FORBIDDEN);
        // The other rows have no penalised tokens, since the sizes of the tables decide nothing here.
        let many = [vec![Row::default(); all - own], rows.clone()].concat();
        let (many, alone) = (of(all, &many), of(own, &rows));
        gpu.check().unwrap();
        assert_eq!(many[all - own..], alone, "{sampling:?}");
    }
    let (rows, experts, each) = ((1 << 25) + 2, 64, 6);
    let end = gpu.upload(&noise(own * experts, 2));
    let of = |n: usize| {
        let chosen = gpu.choose_experts(&ends_with(&gpu, n * experts, &end), [n, experts, each]);
        last(&gpu, &chosen.experts, own * each).into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(of(rows), of(own));
    gpu.check().unwrap();
}

/// A sum of squares whose value in f32 is wrong: 2¹² squared, and ones that an f32 sum of that size loses.
#[test]
fn squares_are_summed_in_f64() {
    let mut x = vec![1.0; 70_000];
    x[0] = 4096.0;
    let gpu = gpu(1);
    let got = gpu.sum_of_squares(&gpu.upload(&x));
    gpu.check().unwrap();
    assert_eq!(got, 16_777_216.0 + 69_999.0);
}

/// Decoding of batches that are padded to a size of a recorded graph: rows have the bits of the batch without padding,
/// and padding rows are zeros, even after memory was used for something else.
#[test]
fn padded_decoding() {
    for (dtype, heads) in
        [(Dtype::Bf16, Heads { q: 2, kv: 1, d: 64 }), (Dtype::F32, Heads { q: 2, kv: 1, d: 6 })]
    {
        let gpu = gpu(1);
        let (width, packed) = (2 * heads.kv * heads.d, (heads.q + 2 * heads.kv) * heads.d);
        let array = |rows: usize, cols: usize, seed: u64| numbers(&gpu, rows * cols, dtype, seed).0;
        let prompt = array(10, width, 3);
        for rows in [1usize, 7, 9, 12, 15, 17] {
            let batch = rows.next_power_of_two().max(8);
            let qkv = array(batch, packed, 5);
            let decode = |padded: usize| {
                // The token is appended to its page, so each run has pages of its own.
                let pages: Vec<Array> = (0..rows as u64).map(|row| array(PAGE, width, 10 + row)).collect();
                let completions = pages.iter().zip(1..).map(|(page, len)| (vec![page], len)).collect();
                let groups = [CachedGroup { prompt: &prompt, prompt_rows: 10, completions }];
                let size = DecodingSize::of(&groups, heads).rounded(padded);
                let mut pack = Pack::default();
                let at = Decoding::pack(&mut pack, &groups, heads, size);
                let decoding = Decoding::over(&pack.upload(&gpu), at, size);
                let own = packed_rows(&gpu, &qkv, padded * packed);
                gpu.attend_cached(&own, &decoding, 0, heads, Turn::default()).to_vec()
            };
            let (alone, padded) = (decode(rows), decode(batch));
            gpu.check().unwrap();
            let (own, rest) = padded.split_at(alone.len());
            assert_eq!(own, alone, "{heads:?}, {rows} rows");
            assert!(rest.iter().all(|&x| x == 0.0), "{heads:?}, {rows} rows: {rest:?}");
        }
    }
}

/// A row with NaN among its logits has no token: its id is 0, and its log-probabilities and its entropy are NaN.
#[test]
fn draws_from_nan() {
    let vocab = 300;
    let mut logits = noise(2 * vocab, 1);
    logits[17] = f32::NAN;
    logits[vocab..].fill(f32::NAN);
    for sampling in [PLAIN, Sampling { top_p: 0.9, ..PLAIN }, Sampling { top_k: 5, min_p: 0.1, ..PLAIN }] {
        let gpu = gpu(2);
        let rows = [0.3, 0.9].map(|uniform| Row { uniform, seen: vec![], forbids: false });
        let mut z = gpu.upload(&logits);
        let drawn = gpu.sample(&mut z, vocab, &sampling, &rows, &[]);
        gpu.check().unwrap();
        // One NaN is enough. A walk to the end of the vocabulary would return its last token.
        for one in drawn {
            assert_eq!(one.id, 0, "{sampling:?}");
            assert!([one.logprob, one.sampler_logprob, one.entropy].iter().all(|x| x.is_nan()), "{one:?}");
        }
    }
}

/// A product over no terms is zero, or leaves what it is added to.
#[test]
fn a_product_of_no_terms() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let gpu = gpu(0);
        let nothing = gpu.alloc(0, dtype);
        // Columns 1..4 of rows of 5.
        let mut y = gpu.upload(&[7.0; 10]);
        gpu.linear(&mut y, [1, 5], &nothing, Weight::Dense(&nothing), [0, 3, 0], Onto::Output);
        assert_eq!(y.to_vec(), [7.0; 10]);
        gpu.linear(&mut y, [1, 5], &nothing, Weight::Dense(&nothing), [0, 3, 0], Onto::Nothing);
        let row = [7.0, 0.0, 0.0, 0.0, 7.0];
        assert_eq!(y.to_vec(), [row, row].concat());
        let mut dw = gpu.upload(&[2.0; 6]);
        gpu.linear_dw(&mut dw, &nothing, &nothing, [0, 3], [0, 3, 2], dtype);
        assert_eq!(dw.to_vec(), [2.0; 6]);
        gpu.check().unwrap();
    }
}

/// Sums that are so long that each of the four stages of copies is filled twice in every part.
#[test]
fn sums_that_use_each_stage_again() {
    let (n, k) = (5, 4360);
    let (x, w) = (noise(17 * k, 1), noise(n * k, 2));
    let all = few(0, &x, &w, [n, k], Dtype::Bf16);
    for (schedule, rows) in [(1, 7), (2, 9), (1, 12), (2, 15)] {
        assert_eq!(few(schedule, &x[..rows * k], &w, [n, k], Dtype::Bf16), all[..rows * (n + 2)]);
    }
}

/// Products of more shapes than plans are kept (512), and the first shape again.
#[test]
fn products_of_many_shapes() {
    let gpu = gpu(0);
    let w = gpu.upload(&[1.0; 24]);
    for rows in (1..=600).chain([1, 2]) {
        let x = gpu.upload(&vec![1.0; rows * 8]);
        let mut y = gpu.alloc(rows * 3, Dtype::F32);
        gpu.linear(&mut y, [0, 3], &x, Weight::Dense(&w), [0, 3, 8], Onto::Nothing);
        assert_eq!(y.to_vec(), vec![8.0; rows * 3], "{rows} rows");
    }
    gpu.check().unwrap();
}
