//! The measured cases: every kernel at the sizes of a model of 28 M parameters (width 512, feed-forward 1408, 8 query and
//! 2 key heads of 64, a prompt of 340 tokens with 8 completions of 64), and plain code for the same result.

use std::hint::black_box;

use half::bf16;
use omnigrpo_kernels::activation::{self, Activation};
use omnigrpo_kernels::attention::{self, AttentionLayout, Qkv, QueryRange, Shape};
use omnigrpo_kernels::checksum::Floats;
use omnigrpo_kernels::conv::RowMix;
use omnigrpo_kernels::dropout::{self, Mask};
use omnigrpo_kernels::experts::{self, Groups};
use omnigrpo_kernels::linear::{self, Gradient, Layer};
use omnigrpo_kernels::logprob::{Head, Statistics, Targets};
use omnigrpo_kernels::moments::{Codes, Form};
use omnigrpo_kernels::optim::{AdamW, Rounding};
use omnigrpo_kernels::paths::Path;
use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
use omnigrpo_kernels::recurrent::{self, CHUNK, Continued, DeltaShape, Segments};
use omnigrpo_kernels::{
    Arithmetic, Mat, MatMut, Weight, buffer, embedding, logprob, memory, norm, optim, parallel, rope,
};

/// Unit of which a call does 10⁹: operations or bytes.
#[derive(Clone, Copy)]
pub enum Amount {
    Flops(f64),
    Bytes(f64),
}

/// A kernel at one size. `make` allocates its buffers; the result is called again and again.
pub struct Case {
    pub name: String,
    pub amount: Amount,
    pub make: Box<dyn Fn() -> Box<dyn FnMut()>>,
}

fn case<F: FnMut() + 'static>(
    name: impl Into<String>,
    amount: Amount,
    make: impl Fn() -> F + 'static,
) -> Case {
    Case { name: name.into(), amount, make: Box::new(move || Box::new(make())) }
}

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

/// A weight `[n, k]` of one's own.
struct Own {
    dims: (usize, usize),
    wide: Vec<f32>,
    narrow: Vec<bf16>,
    few: Option<QuantMatrix>,
}

impl Own {
    fn new(n: usize, k: usize, narrow: bool) -> Self {
        let (wide, dims) = (noise(n * k, 2), (n, k));
        if narrow {
            return Self {
                narrow: wide.iter().map(|&w| bf16::from_f32(w)).collect(),
                wide: Vec::new(),
                few: None,
                dims,
            };
        }
        Self { wide, narrow: Vec::new(), few: None, dims }
    }

    fn quantised(n: usize, k: usize, bits: QuantBits) -> Self {
        let wide = noise(n * k, 2);
        let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&wide[i * k..(i + 1) * k]);
        let few = QuantMatrix::from_rows(bits, n, k, row);
        Self { wide: Vec::new(), narrow: Vec::new(), few, dims: (n, k) }
    }

    fn weight(&self) -> Weight<'_> {
        let (n, k) = self.dims;
        if let Some(few) = &self.few {
            return few.rows().into();
        }
        if self.wide.is_empty() { Weight::bf16(&self.narrow, n, k) } else { Weight::f32(&self.wide, n, k) }
    }
}

/// Returns the rounding of a gradient, by the dtype of its weight.
fn rounding(bf16: bool) -> Option<Path> {
    bf16.then(|| Arithmetic::default().path())
}

const DTYPES: [(&str, bool); 2] = [("f32", false), ("bf16", true)];

/// The gated delta rule with the heads of a model of 0.8 B parameters, over one sequence of 4,096 rows and in decoding. The states
/// of decoding exceed the last cache.
fn delta_cases(all: &mut Vec<Case>) {
    let shape = DeltaShape { key_heads: 16, value_heads: 16, key_dim: 128, value_dim: 128 };
    let (rows, width) = (4096, shape.packed_width());
    let gates =
        |rows: usize| -> Vec<f32> { (0..rows * 32).map(|i| if i % 32 < 16 { -0.1 } else { 0.5 }).collect() };
    // Multiply-adds of a row in one head: products with the state, and products between the rows of a chunk.
    let (states, pairs) = (128 * 128, CHUNK * 128);
    let flops = |states: usize, pairs: usize| Amount::Flops((2 * rows * 16 * (states + pairs)) as f64);
    all.push(case("delta rule forward 4096x16x128", flops(3 * states, 3 * pairs), move || {
        let (qkv, gates, segments) = (noise(rows * width, 1), gates(rows), Segments::one(rows));
        move || {
            let (qkv, gates) = (Mat::new(&qkv, rows, width), Mat::new(&gates, rows, 32));
            drop(black_box(recurrent::delta_forward(qkv, gates, &segments, shape)));
        }
    }));
    all.push(case("delta rule backward 4096x16x128", flops(7 * states, 10 * pairs), move || {
        let (qkv, gates, segments) = (noise(rows * width, 1), gates(rows), Segments::one(rows));
        let parts = (Mat::new(&qkv, rows, width), Mat::new(&gates, rows, 32));
        let (out, kept) = recurrent::delta_forward(parts.0, parts.1, &segments, shape);
        move || {
            let (qkv, gates) = (Mat::new(&qkv, rows, width), Mat::new(&gates, rows, 32));
            let dout = Mat::new(&out, rows, shape.value_width());
            drop(black_box(recurrent::delta_backward(dout, qkv, gates, &kept, &segments, shape)));
        }
    }));
    for batch in [1, 8] {
        let layers = 64;
        let bytes = Amount::Bytes((8 * layers * batch * shape.state_len()) as f64);
        all.push(case(format!("delta rule decode, {batch} rows of {layers} layers"), bytes, move || {
            let (qkv, gates) = (noise(batch * width, 1), gates(batch));
            let mut states = vec![0.1f32; layers * batch * shape.state_len()];
            move || {
                for layer in states.chunks_exact_mut(batch * shape.state_len()) {
                    let mut parts: Vec<Continued> = layer
                        .chunks_exact_mut(shape.state_len())
                        .enumerate()
                        .map(|(i, state)| Continued { rows: i..i + 1, state })
                        .collect();
                    let (qkv, gates) = (Mat::new(&qkv, batch, width), Mat::new(&gates, batch, 32));
                    drop(black_box(recurrent::delta_steps(qkv, gates, &mut parts, shape)));
                }
            }
        }));
    }
}

fn linear_cases(all: &mut Vec<Case>) {
    for (m, k, n) in [
        (852, 512, 1408),
        (852, 1408, 512),
        (1700, 512, 1408),
        (1024, 256, 512),
        (780, 2048, 11008),
        (780, 11008, 2048),
    ] {
        let flops = Amount::Flops((2 * m * k * n) as f64);
        for (dtype, narrow) in DTYPES {
            all.push(case(format!("linear forward {m}x{k}x{n} {dtype}"), flops, move || {
                let (w, x, mut y) = (Own::new(n, k, narrow), noise(m * k, 1), vec![0.0; m * n]);
                move || {
                    let (x, y) = (Mat::new(&x, m, k), MatMut::new(&mut y, m, n));
                    linear::forward_into(x, &[Layer::new(w.weight())], false, y);
                }
            }));
            all.push(case(format!("linear dx {m}x{k}x{n} {dtype}"), flops, move || {
                let (w, dy, mut dx) = (Own::new(n, k, narrow), noise(m * n, 1), vec![0.0; m * k]);
                move || {
                    let (dy, dx) = (Mat::new(&dy, m, n), MatMut::new(&mut dx, m, k));
                    linear::backward_input_into(dy, &[Layer::new(w.weight())], false, dx);
                }
            }));
        }
        for (dtype, bits) in [("8 bits", QuantBits::Eight), ("4 bits", QuantBits::Four)] {
            all.push(case(format!("linear forward {m}x{k}x{n} {dtype}"), flops, move || {
                let (w, x, mut y) = (Own::quantised(n, k, bits), noise(m * k, 1), vec![0.0; m * n]);
                move || {
                    let (x, y) = (Mat::new(&x, m, k), MatMut::new(&mut y, m, n));
                    linear::forward_into(x, &[Layer::new(w.weight())], false, y);
                }
            }));
        }
        for (dtype, bf16) in DTYPES {
            all.push(case(format!("linear dw {m}x{k}x{n} {dtype}"), flops, move || {
                let (x, dy, mut dw) = (noise(m * k, 1), noise(m * n, 2), vec![0.0; n * k]);
                move || {
                    let gradient =
                        Gradient { dw: MatMut::new(&mut dw, n, k), col: 0, rounding: rounding(bf16) };
                    linear::backward_weight(Mat::new(&dy, m, n), Mat::new(&x, m, k), &mut [gradient]);
                }
            }));
        }
    }
    // All layers of a decoder in turn, so that weights come from memory as they do in decoding: two small ones, and two layers
    // of 3B parameters.
    let small = [(768, 512), (512, 512), (2816, 512), (512, 1408)];
    let large = [(2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)];
    let smollm = [(960, 576), (576, 576), (3072, 576), (576, 1536)];
    for (sizes, count, name) in [(small, 8, ""), (smollm, 30, " of SmolLM2-135M"), (large, 2, " of 3B")] {
        let per: usize = sizes.iter().map(|(n, k)| n * k).sum();
        let dtypes = [("f32", 32.0), ("bf16", 16.0), ("8 bits", 8.5), ("4 bits", 4.5)];
        for ((dtype, bits), m) in dtypes.into_iter().flat_map(|dtype| [1, 8, 16, 32].map(|m| (dtype, m))) {
            let bytes = Amount::Bytes((count * per) as f64 * bits / 8.0);
            all.push(case(
                format!("linear decode, {count} layers{name}, {m} rows {dtype}"),
                bytes,
                move || {
                    let own = |(n, k)| match dtype {
                        "8 bits" => Own::quantised(n, k, QuantBits::Eight),
                        "4 bits" => Own::quantised(n, k, QuantBits::Four),
                        _ => Own::new(n, k, dtype == "bf16"),
                    };
                    let layers: Vec<Own> = (0..count).flat_map(|_| sizes.map(own)).collect();
                    let (x, mut y) = (noise(m * 11008, 1), vec![0.0; m * 22016]);
                    move || {
                        for layer in &layers {
                            let (n, k) = layer.dims;
                            let (x, y) = (Mat::new(&x[..m * k], m, k), MatMut::new(&mut y[..m * n], m, n));
                            linear::forward_rows_into(x, &[Layer::new(layer.weight())], false, y);
                        }
                    }
                },
            ));
        }
    }
    let len = memory::BEYOND_CACHES / size_of::<f32>();
    all.push(case("memory read", Amount::Bytes(memory::BEYOND_CACHES as f64), move || {
        let x = noise(len, 3);
        move || {
            black_box(memory::read(&x));
        }
    }));
    // Loading does this with mapped weights: the search for numbers that are not finite, alone and with the sum of all bytes.
    let mut load = |name: &str, pass: fn(&[bf16]) -> (u64, bool)| {
        all.push(case(format!("weights {name}"), Amount::Bytes((len * 4) as f64), move || {
            let x = vec![bf16::ONE; len * 2];
            move || drop(black_box(parallel::map(x.chunks(1 << 17), 2 * x.len(), pass)))
        }));
    };
    load("finite", |x| (0, x.iter().fold(true, |all, x| all & x.is_finite())));
    load("finite and checksum", Floats::checksum);
}

fn row_cases(all: &mut Vec<Case>) {
    let (rows, dim, inner) = (852, 512, 1408);
    let bytes = |per: usize, width: usize| Amount::Bytes((4 * per * rows * width) as f64);
    all.push(case("rms_norm forward 852x512", bytes(2, dim), move || {
        let (x, w) = (noise(rows * dim, 1), noise(dim, 2));
        move || drop(black_box(norm::rms_forward(Mat::new(&x, rows, dim), &w, 1e-6)))
    }));
    all.push(case("rms_norm forward 852x512, plain", bytes(2, dim), move || {
        let (x, w, mut y) = (noise(rows * dim, 1), noise(dim, 2), vec![0.0; rows * dim]);
        move || {
            for (y, x) in y.chunks_exact_mut(dim).zip(x.chunks_exact(dim)) {
                let rstd = (x.iter().map(|x| x * x).sum::<f32>() / dim as f32 + 1e-6).sqrt().recip();
                y.iter_mut().zip(x).zip(&w).for_each(|((y, x), w)| *y = x * rstd * w);
            }
            black_box(&mut y);
        }
    }));
    all.push(case("rms_norm backward 852x512", bytes(4, dim), move || {
        let (x, dy, w, rstd) = (noise(rows * dim, 1), noise(rows * dim, 3), noise(dim, 2), vec![1.7; rows]);
        let (mut dx, mut dw) = (vec![0.0; rows * dim], vec![0.0; dim]);
        move || {
            let [dy, x] = [&dy, &x].map(|x| Mat::new(x, rows, dim));
            norm::rms_backward(dy, x, &w, &rstd, MatMut::new(&mut dx, rows, dim), Some(&mut dw));
        }
    }));
    all.push(case("layer_norm forward 852x512", bytes(2, dim), move || {
        let (x, w) = (noise(rows * dim, 1), noise(dim, 2));
        move || drop(black_box(norm::layer_forward(Mat::new(&x, rows, dim), &w, &w, 1e-6)))
    }));
    all.push(case("layer_norm backward 852x512", bytes(4, dim), move || {
        let (x, dy, w) = (noise(rows * dim, 1), noise(rows * dim, 3), noise(dim, 2));
        let stats = [vec![0.0; rows], vec![1.7; rows]].concat();
        let (mut dx, mut dw, mut db) = (vec![0.0; rows * dim], vec![0.0; dim], vec![0.0; dim]);
        move || {
            let [dy, x] = [&dy, &x].map(|x| Mat::new(x, rows, dim));
            let dx = MatMut::new(&mut dx, rows, dim);
            norm::layer_backward(dy, x, &w, &stats, dx, Some(&mut dw), Some(&mut db));
        }
    }));
    all.push(case("dropout 852x1408", bytes(2, inner), move || {
        let x = noise(rows * inner, 1);
        let mask = Mask { key: 3, rows: None, rate: 0.05 };
        move || drop(black_box(dropout::forward(Mat::new(&x, rows, inner), &mask)))
    }));
    all.push(case("rope 852x10x64", bytes(2, 640), move || {
        let (mut x, cos, sin) = (noise(rows * 640, 1), noise(rows * 32, 2), noise(rows * 32, 3));
        move || {
            let [cos, sin] = [&cos, &sin].map(|x| Mat::new(x, rows, 32));
            rope::apply(cos, sin, false, MatMut::new(&mut x, rows, 640), 64);
        }
    }));
    all.push(case("swiglu forward 852x1408", bytes(3, inner), move || {
        let x = noise(rows * 2 * inner, 1);
        move || drop(black_box(activation::swiglu_forward(Mat::new(&x, rows, 2 * inner))))
    }));
    all.push(case("swiglu forward 852x1408, plain", bytes(3, inner), move || {
        let (x, mut y) = (noise(rows * 2 * inner, 1), vec![0.0; rows * inner]);
        move || {
            for (y, x) in y.chunks_exact_mut(inner).zip(x.chunks_exact(2 * inner)) {
                let (gate, up) = x.split_at(inner);
                y.iter_mut().zip(gate).zip(up).for_each(|((y, g), u)| *y = g / (1.0 + (-g).exp()) * u);
            }
            black_box(&mut y);
        }
    }));
    all.push(case("swiglu backward 852x1408", bytes(9, inner), move || {
        let (x, dy) = (noise(rows * 2 * inner, 1), noise(rows * inner, 2));
        // The input is replaced by its gradient, so a copy is.
        move || {
            let mut gate_up = buffer::copy(&x);
            let gate_up = MatMut::new(&mut gate_up, rows, 2 * inner);
            activation::swiglu_backward(Mat::new(&dy, rows, inner), gate_up);
        }
    }));
    all.push(case("gelu forward 852x1408", bytes(2, inner), move || {
        let x = noise(rows * inner, 1);
        move || drop(black_box(activation::forward(&x, Activation::GeluErf)))
    }));
    all.push(case("gelu backward 852x1408", bytes(5, inner), move || {
        // As above, with the copy among the bytes.
        let (x, dy) = (noise(rows * inner, 1), noise(rows * inner, 2));
        move || activation::backward(&dy, Activation::GeluErf, &mut buffer::copy(&x))
    }));
    let ids: Vec<u32> = (0..rows as u32).map(|i| i * 577 % 2048).collect();
    for (dtype, narrow) in DTYPES {
        let ids = ids.clone();
        all.push(case(format!("embedding forward 852x512 {dtype}"), bytes(2, dim), move || {
            let (table, ids) = (Own::new(2048, dim, narrow), ids.clone());
            move || drop(black_box(embedding::gather(table.weight(), &ids)))
        }));
    }
    all.push(case("embedding backward 852x512", bytes(3, dim), move || {
        let (dy, mut dtable) = (noise(rows * dim, 1), vec![0.0; 2048 * dim]);
        let ids = RowMix::select(ids.clone());
        move || embedding::add_rows_backward(Mat::new(&dy, rows, dim), &ids, &mut dtable)
    }));
    let n = 8 << 20;
    all.push(case("adamw 8Mi", Amount::Bytes((28 * n) as f64), move || {
        let [mut w, mut m, g] = [1, 2, 3].map(|seed| noise(n, seed));
        let mut v = vec![1e-3; n];
        let by =
            AdamW { lr: 1e-6, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, grad_scale: 1.0, step: 1 };
        move || optim::adamw(&g, &by, &mut w, [&mut m, &mut v])
    }));
    all.push(case("adamw of bf16 weights 8Mi", Amount::Bytes((30 * n) as f64), move || {
        let [mut master, mut m, g] = [1, 2, 3].map(|seed| noise(n, seed));
        let (mut v, mut w) = (vec![1e-3; n], vec![bf16::ZERO; n]);
        let by =
            AdamW { lr: 1e-6, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, grad_scale: 1.0, step: 1 };
        move || optim::adamw(&g, &by, optim::Updated::Master(&mut w, &mut master), [&mut m, &mut v])
    }));
    all.push(case("adamw of bf16 weights, 8-bit moments 8Mi", Amount::Bytes((12 * n) as f64), move || {
        let [m, g] = [2, 3].map(|seed| noise(n, seed));
        let v: Vec<f32> = m.iter().map(|m| m * m).collect();
        let (mut m, mut v) = (Codes::encode(&m, Form::Signed), Codes::encode(&v, Form::Unsigned));
        let mut w = vec![bf16::ONE; n];
        let by =
            AdamW { lr: 1e-6, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, grad_scale: 1.0, step: 1 };
        move || {
            let moments = optim::Moments::Codes([&mut m, &mut v].map(|x| x.get_mut(0..n)));
            optim::adamw(&g, &by, optim::Updated::Bf16(&mut w, Rounding::random("w", 1)), moments);
        }
    }));
    all.push(case("gradient norm 8Mi", Amount::Bytes((4 * n) as f64), move || {
        let g = noise(n, 3);
        move || {
            black_box(optim::sum_of_squares(&g));
        }
    }));
}

/// Operations of one pass; `products` is 2 forward, 5 backward.
fn attention_flops(layout: &AttentionLayout, shape: Shape, products: u64) -> Amount {
    Amount::Flops((2 * products * layout.pairs() * (shape.q_heads * shape.head_dim) as u64) as f64)
}

fn attention_cases(all: &mut Vec<Case>) {
    let decoder = Shape { q_heads: 8, kv_heads: 2, head_dim: 64 };
    let tower = Shape { q_heads: 4, kv_heads: 4, head_dim: 64 };
    for (name, layout, shape, t) in [
        ("shared prefix 340 + 8x64", AttentionLayout::prefix_suffixes(340, &[64; 8]), decoder, 852),
        ("causal 852", AttentionLayout::causal(852), decoder, 852),
        ("windows 16x64", AttentionLayout::full_blocks(&[64; 16]), tower, 1024),
        ("full 1024", AttentionLayout::full_blocks(&[1024]), tower, 1024),
    ] {
        let (wq, wk) = (shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let width = wq + 2 * wk;
        let flops = attention_flops(&layout, shape, 2);
        let own = layout.clone();
        all.push(case(format!("attention forward {name}"), flops, move || {
            let (x, layout) = (noise(t * width, 6), own.clone());
            move || {
                let qkv = Qkv::packed(Mat::new(&x, t, width), shape);
                drop(black_box(attention::forward(qkv, &layout, shape, 0.125)));
            }
        }));
        let flops = attention_flops(&layout, shape, 5);
        all.push(case(format!("attention backward {name}"), flops, move || {
            let (x, dout, layout) = (noise(t * width, 6), noise(t * wq, 7), layout.clone());
            let (out, lse) =
                attention::forward(Qkv::packed(Mat::new(&x, t, width), shape), &layout, shape, 0.125);
            move || {
                let qkv = Qkv::packed(Mat::new(&x, t, width), shape);
                let [dout, out] = [&dout, &out].map(|x| Mat::new(x, t, wq));
                drop(black_box(attention::backward(dout, qkv, out, &lse, &layout, shape, 0.125)));
            }
        }));
    }
    let keys = |i| vec![0..340, 340 + 64 * i..404 + 64 * i];
    let ranges = (0..8).map(|i| QueryRange { queries: i..i + 1, keys: keys(i), causal: false });
    let layout = AttentionLayout { ranges: ranges.collect() };
    all.push(case(
        "attention decode 8 rows, 340 + 64 keys",
        attention_flops(&layout, decoder, 2),
        move || {
            let (x, layout) = (noise(852 * 768, 6), layout.clone());
            let (mut out, mut lse) = (vec![0.0; 8 * 512], vec![0.0; 8 * decoder.q_heads]);
            move || {
                let qkv = Qkv::packed(Mat::new(&x, 852, 768), decoder);
                let (qkv, out) = (Qkv { q: qkv.q.row_range(0..8), ..qkv }, MatMut::new(&mut out, 8, 512));
                attention::forward_decode_into(qkv, &layout, decoder, 0.125, out, &mut lse);
            }
        },
    ));
}

fn head_cases(all: &mut Vec<Case>) {
    let (rows, h) = (505, 512);
    for v in [2048, 16_384] {
        for (dtype, narrow) in DTYPES {
            let flops = (2 * rows * h * v) as f64;
            let tokens: Vec<u32> = (0..rows as u32).map(|i| i * 31 % v as u32).collect();
            let offsets: Vec<usize> = (0..=rows).collect();
            let (t, o) = (tokens.clone(), offsets.clone());
            all.push(case(
                format!("token_logprob forward {rows}x{h}x{v} {dtype}"),
                Amount::Flops(flops),
                move || {
                    let (hidden, weight) = (noise(rows * h, 8), Own::new(v, h, narrow));
                    let (tokens, offsets) = (t.clone(), o.clone());
                    move || {
                        let head = Head { weight: weight.weight(), temperature: 1.0 };
                        let targets = Targets { tokens: &tokens, offsets: &offsets };
                        drop(black_box(logprob::forward(Mat::new(&hidden, rows, h), head, targets)));
                    }
                },
            ));
            all.push(case(
                format!("token_logprob backward {rows}x{h}x{v} {dtype}"),
                Amount::Flops(3.0 * flops),
                move || {
                    let (hidden, weight) = (noise(rows * h, 8), Own::new(v, h, narrow));
                    let (tokens, offsets) = (tokens.clone(), offsets.clone());
                    let (dlogp, lse, entropy) = (noise(rows, 10), vec![8.0; rows], vec![7.0; rows]);
                    let mut dhead = vec![0.0; v * h];
                    move || {
                        drop(black_box(logprob::backward(
                            logprob::Gradient { logp: &dlogp, entropy: None },
                            Mat::new(&hidden, rows, h),
                            Head { weight: weight.weight(), temperature: 1.0 },
                            Targets { tokens: &tokens, offsets: &offsets },
                            Statistics { entropy: &entropy, lse: &lse },
                            Some(MatMut::new(&mut dhead, v, h)),
                        )));
                    }
                },
            ));
        }
        let flops = Amount::Flops((2 * rows * h * v) as f64);
        all.push(case(format!("token_logprob forward {rows}x{h}x{v} f32, plain"), flops, move || {
            let (hidden, head, mut logp) = (noise(rows * h, 8), noise(v * h, 9), vec![0.0; rows]);
            move || {
                let layers = [Layer::new(Weight::f32(&head, v, h))];
                let logits = linear::forward(Mat::new(&hidden, rows, h), &layers);
                for (r, z) in logits.chunks_exact(v).enumerate() {
                    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let sum: f32 = z.iter().map(|z| (z - max).exp()).sum();
                    logp[r] = z[r * 31 % v] - max - sum.ln();
                }
                black_box(&mut logp);
            }
        }));
    }
}

/// Rows, experts, experts of a row, width of the stream and of an expert.
const EXPERTS: [usize; 5] = [4096, 64, 8, 1024, 768];

/// Pairs of a mixture of experts and a layer as wide as a row's experts together.
pub fn expert_pairs() -> Vec<[Case; 2]> {
    let [t, e, topk, h, i] = EXPERTS;
    let wide = topk * i;
    // Popular and idle experts, as routers make them.
    let weight = |expert: usize| 1 + expert * 29 % 7;
    let all: usize = (0..e).map(weight).sum();
    let mut offsets = vec![0];
    for expert in 0..e {
        let before: usize = (0..=expert).map(weight).sum();
        offsets.push(t * topk * before / all);
    }
    let mut pairs = Vec::new();
    for (dtype, narrow) in DTYPES {
        for pass in ["forward", "gradient of the input", "gradient of weights"] {
            let flops = Amount::Flops((2 * t * topk * 3 * h * i) as f64);
            let offsets = offsets.clone();
            let mixture = case(format!("experts {pass} {t}x{e}/{topk}x{h}x{i} {dtype}"), flops, move || {
                let offsets = offsets.clone();
                let places = t * topk;
                let [fc1, fc2] = [(h, 2 * i), (i, h)].map(|(k, n)| Own::new(e * k, n, narrow));
                let [x, inner, gate_up] = [h, i, 2 * i].map(|cols| noise(places * cols, 1));
                let mut dw = [(h, 2 * i), (i, h)].map(|(k, n)| match pass {
                    "gradient of weights" => vec![0.0; e * k * n],
                    _ => Vec::new(),
                });
                move || {
                    let groups = Groups(&offsets);
                    let of = |data, cols| Mat::new(data, places, cols);
                    let (x, inner, gate_up) = (of(&x, h), of(&inner, i), of(&gate_up, 2 * i));
                    match pass {
                        "forward" => {
                            drop(black_box(experts::forward(x, fc1.weight(), groups)));
                            drop(black_box(experts::forward(inner, fc2.weight(), groups)));
                        }
                        "gradient of the input" => {
                            drop(black_box(experts::backward_input(x, fc2.weight(), groups)));
                            drop(black_box(experts::backward_input(gate_up, fc1.weight(), groups)));
                        }
                        _ => {
                            let [dw1, dw2] = &mut dw;
                            let dw1 = MatMut::new(dw1, e * h, 2 * i);
                            experts::backward_weight(gate_up, x, groups, rounding(narrow), dw1);
                            let dw2 = MatMut::new(dw2, e * i, h);
                            experts::backward_weight(x, inner, groups, rounding(narrow), dw2);
                        }
                    }
                }
            });
            let dense = case(format!("dense {pass} {t}x{h}x{wide} {dtype}"), flops, move || {
                let [fc1, fc2] = [(2 * wide, h), (h, wide)].map(|(n, k)| Own::new(n, k, narrow));
                let [x, inner, gate_up] = [h, wide, 2 * wide].map(|cols| noise(t * cols, 1));
                let mut dw = [(2 * wide, h), (h, wide)].map(|(n, k)| vec![0.0; n * k]);
                move || {
                    let of = |data, cols| Mat::new(data, t, cols);
                    let (x, inner, gate_up) = (of(&x, h), of(&inner, wide), of(&gate_up, 2 * wide));
                    match pass {
                        "forward" => {
                            drop(black_box(linear::forward(x, &[Layer::new(fc1.weight())])));
                            drop(black_box(linear::forward(inner, &[Layer::new(fc2.weight())])));
                        }
                        "gradient of the input" => {
                            drop(black_box(linear::backward_input(x, &[Layer::new(fc2.weight())])));
                            drop(black_box(linear::backward_input(gate_up, &[Layer::new(fc1.weight())])));
                        }
                        _ => {
                            let [dw1, dw2] = &mut dw;
                            let of = |dw, col| Gradient { dw, col, rounding: rounding(narrow) };
                            let dw1 = of(MatMut::new(dw1, 2 * wide, h), 0);
                            linear::backward_weight(gate_up, x, &mut [dw1]);
                            let dw2 = of(MatMut::new(dw2, h, wide), 0);
                            linear::backward_weight(x, inner, &mut [dw2]);
                        }
                    }
                }
            });
            pairs.push([mixture, dense]);
        }
    }
    pairs
}

/// Experts while decoding, in bytes of the experts that are used, at the widths of Qwen3-VL-30B-A3B: one row, and eight rows that use
/// the experts of a router without preferences. Calls take turns with layers that together are larger than the last cache.
fn expert_rows(all: &mut Vec<Case>) {
    let (topk, h, i) = (8, 2048, 768);
    for (rows, used) in [(1, 8), (8, 52)] {
        let places = rows * topk;
        let offsets: Vec<usize> = (0..=used).map(|expert| places * expert / used).collect();
        for (dtype, narrow) in DTYPES {
            let size = if narrow { 2 } else { 4 };
            let len = used * 3 * h * i;
            let bytes = Amount::Bytes((len * size) as f64);
            let offsets = offsets.clone();
            all.push(case(format!("experts rows {rows}x{used}/{topk}x{h}x{i} {dtype}"), bytes, move || {
                let offsets = offsets.clone();
                let layer = || [(h, 2 * i), (i, h)].map(|(k, n)| Own::new(used * k, n, narrow));
                let layers: Vec<_> =
                    (0..memory::BEYOND_CACHES.div_ceil(len * size) + 1).map(|_| layer()).collect();
                let (x, inner) = (noise(places * h, 1), noise(places * i, 1));
                let mut turn = 0;
                move || {
                    turn = (turn + 1) % layers.len();
                    let [fc1, fc2] = &layers[turn];
                    let groups = Groups(&offsets);
                    drop(black_box(experts::forward(Mat::new(&x, places, h), fc1.weight(), groups)));
                    drop(black_box(experts::forward(Mat::new(&inner, places, i), fc2.weight(), groups)));
                }
            }));
        }
    }
}

/// Everything, in the order of the tables.
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    linear_cases(&mut all);
    delta_cases(&mut all);
    row_cases(&mut all);
    attention_cases(&mut all);
    head_cases(&mut all);
    all.extend(expert_pairs().into_iter().flatten());
    expert_rows(&mut all);
    all
}
