//! Every operation on every device: outputs and gradients are those of the f64 twin, whose gradients are central differences.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use omnigrpo_ops::{
    Activation, AttentionHeads, AttentionLayout, DecodeRows, Device, GroupCache, Linear, Norm, OUTSIDE, Op,
    Order, PackedLinear, Param, Part, Pass, Patches, QuantBits, QuantMatrix, RopeTable, RowMix, Rows, Tape,
    Targets, Values, Var,
};

/// Numbers that are multiples of 2⁻¹⁰, so that a step of that size is exact in f32.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        ((state >> 21) as f32 - 1024.0) / 1024.0
    };
    (0..n).map(next).collect()
}

const STEP: f32 = 1.0 / 1024.0;

/// The derivative at 0 by a central difference of fourth order.
fn slope(f: impl Fn(f32) -> f64) -> f64 {
    (8.0 * (f(STEP) - f(-STEP)) - (f(2.0 * STEP) - f(-2.0 * STEP))) / (12.0 * f64::from(STEP))
}

fn param(name: &str, shape: &[usize], seed: u32) -> Arc<Param> {
    let param = Param::new(name, Part::Llm, shape, Values::F32(noise(shape.iter().product(), seed))).unwrap();
    param.set_trainable(true);
    Arc::new(param)
}

type Run<'a> = dyn Fn(&mut Tape, &Pass, &[Var]) -> omnigrpo_ops::Result<Var> + 'a;

/// An operation from some inputs, with its weights.
struct Case<'a> {
    name: String,
    /// Rows and columns of each input.
    inputs: &'a [(usize, usize)],
    params: Vec<Arc<Param>>,
    run: &'a Run<'a>,
}

struct Outcome {
    output: Vec<f64>,
    /// Of inputs, then of weights.
    gradients: Vec<Vec<f64>>,
}

impl Case<'_> {
    fn data(&self) -> Vec<Vec<f32>> {
        self.inputs.iter().enumerate().map(|(i, (r, c))| noise(r * c, 7 + i as u32)).collect()
    }

    fn forward(&self, device: Device, data: &[Vec<f32>], tape: &mut Tape) -> (Vec<Var>, Var) {
        let inputs = self.inputs.iter().zip(data);
        let inputs: Vec<Var> = inputs
            .map(|(&(r, c), data)| tape.input(Rows::upload(device, data.clone(), r, c).unwrap()))
            .collect();
        let y = (self.run)(tape, &Pass::on(device), &inputs).unwrap();
        assert_eq!(y.rows().device(), device);
        (inputs, y)
    }

    fn outcome(&self, device: Device) -> Outcome {
        self.params.iter().for_each(|p| p.clear_grad());
        let mut tape = Tape::recording(false);
        let (inputs, y) = self.forward(device, &self.data(), &mut tape);
        let (rows, cols) = y.rows().dims();
        let dy = Rows::upload(device, noise(rows * cols, 99), rows, cols).unwrap();
        let mut gradients = tape.backward(&y, dy).unwrap();
        let of_inputs = inputs.iter().map(|x| gradients.take(x).unwrap().to_f64());
        let of_params = self.params.iter().map(|p| p.with_grad(|g| g.map(|g| g.to_f64())).unwrap());
        Outcome { output: y.rows().to_f64(), gradients: of_inputs.chain(of_params).collect() }
    }

    /// Σ c·y on the twin.
    fn loss(&self, data: &[Vec<f32>]) -> f64 {
        let y = self.forward(Device::Twin, data, &mut Tape::off()).1.into_rows().to_f64();
        y.iter().zip(noise(y.len(), 99)).map(|(y, c)| y * f64::from(c)).sum()
    }

    fn check(&self) {
        let name = &self.name;
        let twin = self.outcome(Device::Twin);
        // Central differences of a few elements of everything.
        for (i, gradient) in twin.gradients.iter().enumerate() {
            let size = gradient.iter().fold(1.0f64, |a, g| a.max(g.abs()));
            for at in (0..gradient.len()).step_by(1 + gradient.len() / 7) {
                let moved = |by: f32| {
                    let mut data = self.data();
                    match i.checked_sub(data.len()) {
                        None => {
                            data[i][at] += by;
                            self.loss(&data)
                        }
                        Some(p) => {
                            self.params[p].update(|w| w[at] += by).unwrap();
                            let loss = self.loss(&data);
                            self.params[p].update(|w| w[at] -= by).unwrap();
                            loss
                        }
                    }
                };
                let want = slope(moved);
                assert!(
                    (gradient[at] - want).abs() <= 1e-6 * size,
                    "{name}, gradient {i}: {} for {want}",
                    gradient[at]
                );
            }
        }
        for &device in Device::ALL {
            let own = self.outcome(device);
            let near = |got: &[f64], want: &[f64], what: &str| {
                assert_eq!(got.len(), want.len(), "{name} on {device}: {what}");
                let size = want.iter().fold(1.0f64, |a, g| a.max(g.abs()));
                let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(far <= 1e-5 * size, "{name} on {device}: {what} differs by {far}");
            };
            near(&own.output, &twin.output, "output");
            for (i, (got, want)) in own.gradients.iter().zip(&twin.gradients).enumerate() {
                near(got, want, &format!("gradient {i}"));
            }
        }
    }
}

fn check(
    name: impl Into<String>,
    inputs: &[(usize, usize)],
    params: &[&Arc<Param>],
    run: impl Fn(&mut Tape, &Pass, &[Var]) -> omnigrpo_ops::Result<Var>,
) {
    let params = params.iter().map(|&p| Arc::clone(p)).collect();
    Case { name: name.into(), inputs, params, run: &run }.check();
}

const SIZES: [usize; 4] = [1, 2, 5, 33];

#[test]
fn linear_layers() {
    for (t, k, n) in [(1, 1, 1), (3, 5, 7), (17, 33, 40)] {
        let (w, b, v) = (param("w", &[n, k], 1), param("b", &[n], 2), param("v", &[3, k], 3));
        let (first, second) = (
            Linear::new(Arc::clone(&w), Some(Arc::clone(&b))).unwrap(),
            Linear::new(Arc::clone(&v), None).unwrap(),
        );
        check(format!("linear {t}×{k}×{n}"), &[(t, k)], &[&w, &b, &v], |tape, pass, x| {
            tape.apply(PackedLinear::new(&[&first, &second], pass), [&x[0]])
        });
    }
}

/// Weights that are frozen, rounded or quantised: devices agree with the twin on what the kernels read.
#[test]
fn frozen_weights_of_every_dtype() {
    let (t, n, k) = (5, 24, 64);
    let values = noise(n * k, 4);
    let quantised = |bits| {
        let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&values[i * k..(i + 1) * k]);
        Param::quantised("w", Part::Llm, &[n, k], QuantMatrix::from_rows(bits, n, k, row).unwrap()).unwrap()
    };
    let bf16 = Param::new("w", Part::Llm, &[n, k], Values::F32(values.clone()).into_bf16()).unwrap();
    let rounds = omnigrpo_kernels::has_tiles();
    for (param, bound) in [
        (bf16, if rounds { 2e-2 } else { 1e-5 }),
        (quantised(QuantBits::Eight), 1e-5),
        (quantised(QuantBits::Four), 1e-5),
    ] {
        let what = format!("{:?}", param.dtype());
        let layer = Linear::new(Arc::new(param), None).unwrap();
        let run = |device: Device, order: Order| {
            let pass = Pass { order, ..Pass::on(device) };
            let x = Rows::upload(device, noise(t * k, 5), t, k).unwrap();
            let packed = PackedLinear::new(&[&layer], &pass);
            let y = packed.forward(&x).unwrap();
            let dx = packed.backward(&x, &y).unwrap();
            assert!(layer.weight().grad().is_none());
            [y.to_f64(), dx.to_f64()]
        };
        let twin = run(Device::Twin, Order::Blocked);
        for &device in Device::ALL {
            for order in [Order::Blocked, Order::PerRow] {
                for (got, want) in run(device, order).iter().zip(&twin) {
                    let size = want.iter().fold(1.0f64, |a, x| a.max(x.abs()));
                    let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(far <= bound * size, "{what} on {device}, {order:?}: {far}");
                }
            }
        }
    }
}

#[test]
fn norms() {
    for h in SIZES {
        let (weight, bias) = (param("w", &[h], 1), param("b", &[h], 2));
        let rms = Norm::Rms { weight: Arc::clone(&weight), eps: 1e-2 };
        check(format!("rms norm of {h}"), &[(4, h)], &[&weight], |tape, _, x| tape.norm(&x[0], &rms));
        let layer = Norm::Layer { weight: Arc::clone(&weight), bias: Arc::clone(&bias), eps: 1e-1 };
        check(format!("layer norm of {h}"), &[(4, h)], &[&weight, &bias], |tape, _, x| {
            tape.norm(&x[0], &layer)
        });
    }
}

/// Attention with rotation as an operation of the tape.
struct Attend {
    heads: AttentionHeads,
    layout: Arc<omnigrpo_ops::Layout>,
    table: Arc<RopeTable>,
}

impl Op for Attend {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> omnigrpo_ops::Result<(Rows, ())> {
        let mut qkv = x.clone();
        self.heads.rotate(&mut qkv, &self.table, false)?;
        Ok((self.heads.forward(&qkv, &self.layout)?.0, ()))
    }

    fn backward(
        &self,
        [x]: [&Rows; 1],
        (): (),
        dy: Rows,
        _: [bool; 1],
    ) -> omnigrpo_ops::Result<[Option<Rows>; 1]> {
        let mut qkv = x.clone();
        self.heads.rotate(&mut qkv, &self.table, false)?;
        let (out, lse) = self.heads.forward(&qkv, &self.layout)?;
        let mut dqkv = self.heads.backward(&qkv, &out, &lse, &dy, &self.layout)?;
        self.heads.rotate(&mut dqkv, &self.table, true)?;
        Ok([Some(dqkv)])
    }
}

#[test]
fn attention_over_every_kind_of_layout() {
    let layouts = [
        ("causal", AttentionLayout::causal(7), 7),
        ("blocks", AttentionLayout::full_blocks(&[3, 1, 4]), 8),
        ("groups", AttentionLayout::groups(&[(3, vec![2, 1]), (2, Vec::new())]), 8),
        ("one row", AttentionLayout::causal(1), 1),
    ];
    for (what, layout, t) in layouts {
        for heads in [AttentionHeads { q: 1, kv: 1, dim: 4 }, AttentionHeads { q: 4, kv: 2, dim: 6 }] {
            let layout = Arc::new(layout.clone().into());
            let table = Arc::new(RopeTable::from_angles(t, heads.dim / 2, |row, angles| {
                angles.iter_mut().enumerate().for_each(|(i, a)| *a = row as f32 * 0.3 + i as f32);
            }));
            check(format!("{what}, {heads:?}"), &[(t, heads.packed_width())], &[], |tape, _, x| {
                let op = Attend { heads, layout: Arc::clone(&layout), table: Arc::clone(&table) };
                tape.apply(op, [&x[0]])
            });
        }
    }
}

/// Decoding over a cache is attention over the prompt and the completion's own rows.
#[test]
fn attention_over_a_cache() {
    let heads = AttentionHeads { q: 4, kv: 2, dim: 8 };
    let (prompt, steps) = (5, 3);
    for &device in Device::ALL {
        let rows = |n: usize, seed: u32| {
            Rows::upload(device, noise(n * heads.packed_width(), seed), n, heads.packed_width()).unwrap()
        };
        let mut cache = GroupCache::new(device, 1, heads, prompt, 2, steps).unwrap();
        cache.write_prompt(0, &rows(prompt, 1), heads).unwrap();
        let mut got = Vec::new();
        for step in 0..steps as u32 {
            let slots = vec![1, 0];
            let mut groups = [DecodeRows { cache: &mut cache, slots: slots.clone() }];
            got.push(heads.attend_cached(&rows(2, 10 + step), 0, &mut groups).unwrap());
            cache.advance(&slots);
        }
        assert!(cache.check_room(0).is_err());
        for (row, slot) in [(0, 1), (1, 0)] {
            let own: Vec<Rows> =
                (0..steps as u32).map(|step| rows(2, 10 + step).row_range(row..row + 1).unwrap()).collect();
            let prompt_rows = rows(prompt, 1);
            let all: Vec<&Rows> = std::iter::once(&prompt_rows).chain(&own).collect();
            let whole = Rows::concat(&all).unwrap();
            let layout = AttentionLayout::causal(prompt + steps).into();
            let out = heads.forward(&whole, &layout).unwrap().0;
            for (step, got) in got.iter().enumerate() {
                let want = out.row_range(prompt + step..prompt + step + 1).unwrap().to_f64();
                let got = got.row_range(row..row + 1).unwrap().to_f64();
                let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(far <= 1e-5, "{device}, slot {slot}, step {step}: {far}");
            }
        }
    }
}

#[test]
fn elementwise_operations() {
    use Activation::{GeluErf, GeluTanh, QuickGelu, Silu, Tanh};
    for act in [GeluErf, GeluTanh, QuickGelu, Silu, Tanh] {
        for n in SIZES {
            check(format!("{act:?}"), &[(3, n)], &[], |tape, _, x| tape.activation(&x[0], act));
        }
    }
    check("sum", &[(3, 5), (3, 5)], &[], |tape, _, x| tape.add(&x[0], &x[1]));
    check("a value used twice", &[(3, 5)], &[], |tape, _, x| {
        let y = tape.activation(&x[0], Silu)?;
        tape.add(&y, &x[0])
    });
    check("reshape", &[(3, 8)], &[], |tape, _, x| tape.reshape(&x[0], 6, 4));
    check("concat", &[(3, 4), (2, 4)], &[], |tape, _, x| tape.concat([&x[0], &x[1]]));
    let index = Arc::new(vec![4, 0, 2].into());
    check("select", &[(5, 4)], &[], |tape, _, x| tape.select(&x[0], &index));
    check("spread", &[(3, 4)], &[], |tape, _, x| tape.spread(&x[0], &index, 6));
}

#[test]
fn tables_and_sums_of_rows() {
    for h in SIZES {
        let table = param("table", &[6, h], 1);
        let ids = Arc::new(vec![Some(3), None, Some(5), Some(3)].into());
        check(format!("add_rows of {h}"), &[(4, h)], &[&table], |tape, _, x| {
            tape.add_rows(&x[0], &table, &ids)
        });
        let taps = Arc::new(vec![vec![(0, 0.5), (5, -1.25)], Vec::new(), vec![(2, 1.0)]].into());
        check(format!("add_mixed of {h}"), &[(3, h)], &[&table], |tape, _, x| {
            tape.add_mixed(&x[0], &table, &taps)
        });
        let mix = Arc::new(RowMix::means([vec![0, 1, 2], vec![4], vec![1, 4]]).into());
        check(format!("mix of {h}"), &[(5, h)], &[], |tape, _, x| tape.mix(&x[0], &mix));
    }
}

#[test]
fn convolutions_and_gates() {
    for c in [1, 3, 20] {
        let (w, b) = (param("w", &[4, c, 2], 1), param("b", &[4], 2));
        let layer = Linear::reshaped(Arc::clone(&w), Some(Arc::clone(&b)), 4, 2 * c).unwrap();
        let patches = Arc::new(Patches { sources: vec![0, 1, OUTSIDE, 2, 3, 3], taps: 2 });
        check(format!("convolution of {c}"), &[(4, c)], &[&w, &b], |tape, _, x| {
            tape.convolution(&x[0], &layer, &patches)
        });
        let weight = param("k", &[c, 1, 3, 3], 3);
        check(format!("depthwise of {c}"), &[(2 * 6, c)], &[&weight], |tape, _, x| {
            tape.depthwise3(&x[0], &weight, [2, 3])
        });
        check(format!("gate of {c}"), &[(6, c), (2, c)], &[], |tape, _, x| tape.gate(&x[0], &x[1]));
        check(format!("blend of {c}"), &[(6, c), (1, 3)], &[], |tape, _, x| tape.blend(&x[0], &x[1]));
    }
}

/// The head as an operation of the tape: log-probabilities of targets, weighed.
#[test]
fn the_head() {
    let (h, vocab, temperature) = (9, 37, 0.7);
    let head = param("head", &[vocab, h], 1);
    let targets = Targets { rows: vec![0, 2, 3], offsets: vec![0, 2, 3, 3], tokens: vec![5, 36, 0] };
    let (dlogp, dentropy) = ([0.5f32, -1.0, 2.0], [0.25f32, 0.0, -0.5]);
    let run = |device: Device, x: &[f32]| {
        let normed = Rows::upload(device, x.to_vec(), 3, h).unwrap();
        let scores = omnigrpo_ops::score(&normed, &head, &targets, temperature).unwrap();
        head.clear_grad();
        let dx =
            omnigrpo_ops::score_backward(&normed, &head, &targets, &scores, &dlogp, Some(&dentropy)).unwrap();
        let dhead = head.with_grad(|g| g.unwrap().to_f64());
        let logits = omnigrpo_ops::logits(&normed, &head).unwrap().to_f64();
        [scores.logprobs.to_f64(), scores.entropies.to_f64(), dx.to_f64(), dhead, logits]
    };
    let x = noise(3 * h, 2);
    let twin = run(Device::Twin, &x);
    let loss = |x: &[f32]| {
        let [logp, entropy, ..] = run(Device::Twin, x);
        let weighed = |a: &[f64], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum::<f64>();
        weighed(&logp, &dlogp) + weighed(&entropy, &dentropy)
    };
    for at in 0..x.len() {
        let moved = |by: f32| {
            let mut x = x.clone();
            x[at] += by;
            loss(&x)
        };
        let want = slope(moved);
        assert!((twin[2][at] - want).abs() <= 1e-6, "{} for {want}", twin[2][at]);
    }
    for &device in Device::ALL {
        for (i, (got, want)) in run(device, &x).iter().zip(&twin).enumerate() {
            let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far <= 1e-5, "{device}, result {i}: {far}");
        }
    }
    assert!(omnigrpo_ops::score(&Rows::zeros(Device::Cpu, 2, h), &head, &targets, 1.0).is_err());
}

#[test]
fn memory_operations() {
    for &device in Device::ALL {
        let x = Rows::upload(device, noise(12, 1), 4, 3).unwrap();
        let host = x.to_vec();
        let mut y = x.clone();
        y.scale(2.0);
        assert_eq!(x.to_vec(), host, "a clone is not written through");
        assert_eq!(y.columns(1..2).unwrap().to_vec(), [1, 4, 7, 10].map(|i| 2.0 * host[i]));
        y.set_columns(0, &x.columns(2..3).unwrap()).unwrap();
        y.clear_rows(1..2).unwrap();
        y.set_rows(2, &x, 0..1).unwrap();
        assert_eq!(
            y.to_vec()[..9],
            [host[2], 2.0 * host[1], 2.0 * host[2], 0.0, 0.0, 0.0, host[0], host[1], host[2]]
        );
        assert_eq!(Rows::zeros(device, 0, 5).select(&Vec::new().into()).unwrap().dims(), (0, 5));
        assert!(x.select(&vec![4].into()).is_err() && x.columns(2..4).is_err() && x.row_range(3..5).is_err());
        let squares: f64 = host.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((x.sum_of_squares() - squares).abs() < 1e-9);
        for &other in Device::ALL.iter().filter(|&&other| other != device) {
            let error = y.clone().add(&x.to_device(other)).unwrap_err().to_string();
            assert!(error.contains(&other.to_string()) && error.contains("move it"), "{error}");
        }
    }
}
