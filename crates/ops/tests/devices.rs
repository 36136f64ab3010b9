//! Every operation on every device: outputs and gradients equal those of the f64 twin, whose gradients are checked by
//! central differences.
#![allow(clippy::unwrap_used, missing_docs)]

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use omnigrpo_ops::{
    Activation, Adapter, Arithmetic, AttentionHeads, AttentionLayout, Card, CausalConv, DecodeBatch,
    DecodeRows, DeltaGates, DeltaHeads, Device, DrawFrom, Dropout, ExpertLinear, GatedNorm, GroupCache, Held,
    Linear, Moments, Norm, Numbers, OUTSIDE, Op, Order, PackedLinear, Param, ParamDtype, Part, Pass, Patches,
    QuantBits, QuantMatrix, Result, RopeTable, RouterLoss, Routes, RowMix, Rows, Sampler, StateSizes, Step,
    Tape, Targets, Top, Turn, Values, Var, embed, embed_backward, footprint, squares,
};

/// Opens the emulator, or the GPU that `OMNIGRPO_TEST_CARD` names (tools/gpu/first-contact).
fn card() -> Device {
    let Ok(card) = std::env::var("OMNIGRPO_TEST_CARD") else { return Device::emulator().unwrap() };
    static OPEN: std::sync::OnceLock<Card> = std::sync::OnceLock::new();
    let folders = ["/usr/local/cuda", "/usr/local", "/usr"].map(Into::into);
    let cache = std::env::temp_dir().join("omnigrpo-kernels");
    let open = || Card::open(card.parse().unwrap(), &folders, &cache).unwrap();
    Device::Gpu(*OPEN.get_or_init(open))
}

fn devices() -> Vec<Device> {
    let mut all = Device::all();
    if std::env::var_os("OMNIGRPO_TEST_CARD").is_some() {
        all.push(card());
    }
    all
}

/// Returns multiples of 2⁻¹⁰, so that a step of that size is exact in f32.
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

/// Returns the derivative at 0 by a central difference of fourth order.
fn slope(f: impl Fn(f32) -> f64) -> f64 {
    (8.0 * (f(STEP) - f(-STEP)) - (f(2.0 * STEP) - f(-2.0 * STEP))) / (12.0 * f64::from(STEP))
}

fn param(name: &str, shape: &[usize], seed: u32) -> Arc<Param> {
    let param = Param::new(name, Part::Llm, shape, Values::F32(noise(shape.iter().product(), seed))).unwrap();
    param.set_trainable(true);
    Arc::new(param)
}

type Run<'a> = dyn Fn(&mut Tape, &Pass, &[Var]) -> Result<Var> + 'a;

/// An operation on some inputs, with its weights.
struct Case<'a> {
    name: String,
    /// Rows and columns of each input.
    inputs: &'a [(usize, usize)],
    params: Vec<Arc<Param>>,
    run: &'a Run<'a>,
}

struct Outcome {
    output: Vec<f64>,
    /// Gradients of inputs, then of weights.
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
        // Without rows there is no gradient.
        let of_params = self.params.iter().map(|p| match p.with_grad(|g| g.map(|g| g.to_f64())) {
            None if rows == 0 => vec![0.0; p.len()],
            grad => grad.unwrap(),
        });
        Outcome { output: y.rows().to_f64(), gradients: of_inputs.chain(of_params).collect() }
    }

    /// Computes Σ c·y on the twin.
    fn loss(&self, data: &[Vec<f32>]) -> f64 {
        let y = self.forward(Device::Twin, data, &mut Tape::off()).1.into_rows().to_f64();
        y.iter().zip(noise(y.len(), 99)).map(|(y, c)| y * f64::from(c)).sum()
    }

    /// Compares these devices with the twin, and the twin with central differences.
    fn check(&self, devices: Vec<Device>) {
        let name = &self.name;
        let twin = self.outcome(Device::Twin);
        // Compare central differences for a few elements of each.
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
        for device in devices {
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
    run: impl Fn(&mut Tape, &Pass, &[Var]) -> Result<Var>,
) {
    let params = params.iter().map(|&p| Arc::clone(p)).collect();
    Case { name: name.into(), inputs, params, run: &run }.check(devices());
}

/// Widths: one, a pair, odd ones, more than a vector and more than a cache line of values.
const SIZES: [usize; 5] = [1, 2, 5, 33, 200];
/// Row counts: none, one, several, more than a block.
const ROWS: [usize; 4] = [0, 1, 4, 70];

/// Yields pairs of small sizes, and the largest pair.
fn sizes() -> impl Iterator<Item = (usize, usize)> {
    let widths = SIZES.iter().map(|&c| (4, c));
    widths.chain(ROWS.iter().map(|&t| (t, 33))).chain([(70, 200)])
}

/// An operation given by its two functions.
struct Of<F, B>(F, B);

impl<const N: usize, F, B> Op<N> for Of<F, B>
where
    F: Fn([&Rows; N]) -> Result<Rows>,
    B: Fn([&Rows; N], &Rows) -> Result<[Rows; N]>,
{
    type Kept = ();

    fn forward(&self, x: [&Rows; N]) -> Result<(Rows, ())> {
        Ok((self.0(x)?, ()))
    }

    fn backward(&self, x: [&Rows; N], (): (), dy: Rows, _: [bool; N]) -> Result<[Option<Rows>; N]> {
        Ok(self.1(x, &dy)?.map(Some))
    }
}

#[test]
fn linear_layers() {
    for (t, k, n) in [(0, 5, 7), (1, 1, 1), (3, 5, 7), (17, 33, 40), (70, 530, 90)] {
        let (w, b, v) = (param("w", &[n, k], 1), param("b", &[n], 2), param("v", &[3, k], 3));
        let (first, second) = (
            Linear::new(Arc::clone(&w), Some(Arc::clone(&b))).unwrap(),
            Linear::new(Arc::clone(&v), None).unwrap(),
        );
        check(format!("linear {t}×{k}×{n}"), &[(t, k)], &[&w, &b, &v], |tape, pass, x| {
            tape.apply(PackedLinear::new(&[&first, &second], pass), [&x[0]])
        });
        check(
            format!("linear {t}×{k}×{n} onto a residual"),
            &[(t, k), (t, n)],
            &[&w, &b],
            |tape, pass, x| {
                let (layer, again) = (PackedLinear::new(&[&first], pass), PackedLinear::new(&[&first], pass));
                let forward = move |[x, residual]: [&Rows; 2]| layer.forward_onto(residual, x);
                let backward = move |[x, _]: [&Rows; 2], dy: &Rows| Ok([again.backward(x, dy)?, dy.clone()]);
                tape.apply(Of(forward, backward), [&x[0], &x[1]])
            },
        );
    }
}

/// Layers side by side, one of which has an adapter, without and with dropout.
#[test]
fn adapters() {
    for (t, k, n, rank) in [(0, 4, 3, 2), (1, 1, 1, 1), (5, 12, 7, 3), (70, 530, 40, 8)] {
        for rate in [0.0, 0.5] {
            let (w, v) = (param("w", &[n, k], 1), param("v", &[3, k], 2));
            let (a, b) = (param("a", &[rank, k], 3), param("b", &[n, rank], 4));
            let (plain, adapted) =
                (Linear::new(Arc::clone(&v), None).unwrap(), Linear::new(w, None).unwrap());
            adapted.weight().set_trainable(false);
            let adapter = Adapter::new(Arc::clone(&a), Arc::clone(&b), 0.75, rate).unwrap();
            adapted.weight().attach(Arc::new(adapter)).unwrap();
            let keys: Arc<[u64]> = (0..t as u64).map(|row| row * row + 3).collect();
            let name = format!("adapter of rank {rank} on {t}×{k}×{n}, dropping {rate}");
            check(name, &[(t, k)], &[&v, &a, &b], |tape, pass, x| {
                let pass = pass.clone().dropping(Some(Dropout::new(9, Some(Arc::clone(&keys)))));
                tape.apply(PackedLinear::new(&[&plain, &adapted], &pass), [&x[0]])
            });
        }
    }
}

/// The layer of experts and the softmax over chosen logits; cases list rows, experts, experts per row, inputs, outputs.
#[test]
fn experts() {
    for (t, e, topk, k, n) in [
        (0, 3, 2, 5, 7),
        (1, 1, 1, 1, 1),
        (3, 5, 2, 5, 7),
        (1, 9, 3, 33, 6),
        (70, 4, 2, 40, 33),
        (9, 3, 3, 4, 4),
    ] {
        let w = param("w", &[e, k, n], 1);
        let layer = ExpertLinear::new(Arc::clone(&w)).unwrap();
        check(format!("{topk} of {e} experts, {t}×{k}×{n}"), &[(t, k), (t, e)], &[&w], |tape, pass, x| {
            let (own, again, order) = (layer.clone(), layer.clone(), pass.order);
            let forward = move |[x, logits]: [&Rows; 2]| {
                let routes = Routes::choose(logits, topk, order)?;
                let y = own.forward(&routes.scatter(x)?, &routes, order)?;
                routes.gather(&routes.weigh(&y, logits)?)
            };
            let backward = move |[x, logits]: [&Rows; 2], dy: &Rows| {
                let routes = Routes::choose(logits, topk, Order::Blocked)?;
                let x = routes.scatter(x)?;
                let y = again.forward(&x, &routes, order)?;
                let [dy, dlogits] = routes.weigh_back(&y, logits, &routes.scatter(dy)?)?;
                Ok([routes.gather(&again.backward(&x, &dy, &routes)?)?, dlogits])
            };
            tape.apply(Of(forward, backward), [&x[0], &x[1]])
        });
    }
}

#[test]
fn routes_choose_the_largest_logits_and_of_equal_ones_the_first() {
    for device in devices() {
        let logits = [
            [0.5, 2.0, 2.0, -1.0], // 1 and 2
            [0.0, -0.0, 0.0, 0.0], // 0 and 1: zeros are equal
            [3.0, 1.0, 3.0, 3.0],  // 0 and 2
        ];
        let x = Rows::upload(device, logits.concat(), 3, 4).unwrap();
        let routes = Routes::choose(&x, 2, Order::Blocked).unwrap();
        assert_eq!((routes.places(), routes.rows(), routes.counts()), (6, 3, vec![2, 2, 2, 0]), "{device}");
        // Places by expert, then by row.
        let rows = Rows::upload(device, vec![0.0, 1.0, 2.0], 3, 1).unwrap();
        assert_eq!(routes.scatter(&rows).unwrap().to_vec(), [1.0, 2.0, 0.0, 1.0, 0.0, 2.0]);
        let places = Rows::upload(device, vec![1.0, 10.0, 2.0, 20.0, 4.0, 40.0], 6, 1).unwrap();
        assert_eq!(routes.gather(&places).unwrap().to_vec(), [6.0, 21.0, 50.0]);
        let weights = routes.weigh(&Rows::upload(device, vec![1.0; 6], 6, 1).unwrap(), &x).unwrap();
        assert_eq!(weights.to_vec(), [0.5; 6], "{device}: equal logits share equally");
    }
    let nan = Rows::from_vec(vec![f32::NAN, 1.0, f32::NAN, f32::NEG_INFINITY], 1, 4).unwrap();
    assert_eq!(Routes::choose(&nan, 2, Order::Blocked).unwrap().places(), 2);
    for topk in [0, 5] {
        assert!(Routes::choose(&nan, topk, Order::Blocked).unwrap_err().to_string().contains("of 4 experts"));
    }
}

/// While tokens are decoded, a GPU chooses the experts. The outputs equal those for the host's choice bit for bit.
#[test]
fn a_gpu_chooses_the_experts_that_the_host_chooses() {
    let special =
        [f32::NAN, -f32::NAN, f32::from_bits(0x7fff_ffff), f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0];
    for device in devices().into_iter().filter(|device| matches!(device, Device::Gpu(_))) {
        for (t, e, topk) in [(0, 4, 2), (1, 1, 1), (1, 70, 8), (3, 5, 5), (9, 64, 6), (17, 33, 1)] {
            let (k, n) = (8, 6);
            let layer = ExpertLinear::new(param("w", &[e, k, n], 1)).unwrap();
            for special in [&special[..0], &special[5..], &special] {
                let mut logits: Vec<f32> = noise(t * e, 2).iter().map(|x| (x * 4.0).round()).collect();
                for (i, logit) in logits.iter_mut().enumerate().filter(|(i, _)| i % 3 == 0) {
                    *logit = special.get(i / 3 % 9).copied().unwrap_or(*logit);
                }
                let logits = Rows::upload(device, logits, t, e).unwrap();
                let x = Rows::upload(device, noise(t * k, 3), t, k).unwrap();
                let run = |order| {
                    let routes = Routes::choose(&logits, topk, order).unwrap();
                    let y = layer.forward(&routes.scatter(&x).unwrap(), &routes, Order::PerRow).unwrap();
                    let mixed = routes.gather(&y).unwrap().to_vec();
                    let weighed = routes.gather(&routes.weigh(&y, &logits).unwrap()).unwrap().to_vec();
                    (
                        routes,
                        [mixed, weighed].map(|rows| rows.into_iter().map(f32::to_bits).collect::<Vec<_>>()),
                    )
                };
                let ((_, of_host), (routes, of_gpu)) = (run(Order::Blocked), run(Order::PerRow));
                assert_eq!(of_host, of_gpu, "{device}: {topk} of {e} experts, {t} rows, {special:?}");
                let (x, dy) = (routes.scatter(&x).unwrap(), Rows::zeros(device, t * topk, n));
                let refused = layer.backward(&x, &dy, &routes).unwrap_err().to_string();
                assert!(refused.contains("experts that the GPU chose"), "{refused}");
            }
        }
    }
}

/// Two rows that belong to three sequences and to one, computed by hand; and gradients with a fixed choice of experts.
#[test]
fn losses_of_routers() {
    // These rows have half of a step's weights.
    let logits = [0.0, 3f32.ln(), 3f32.ln(), 0.0];
    for device in devices() {
        let x = Rows::upload(device, logits.to_vec(), 2, 2).unwrap();
        let routes = Routes::choose(&x, 1, Order::Blocked).unwrap();
        // f = [1/4, 3/4], P = [(3·1/4 + 3/4) / 4, (3·3/4 + 1/4) / 4] = [3/8, 5/8]; 2 (1/4 · 3/8 + 3/4 · 5/8) = 9/8.
        let lse = 4f64.ln();
        let of = |aux, z| {
            let loss = RouterLoss::new(aux, z, [8, 1], vec![3.0, 1.0]);
            let gradient = loss.gradient(&x, &routes, None).unwrap().to_f64();
            let [balance, own] = loss.losses();
            assert!(
                (balance - 0.5 * 9.0 / 8.0).abs() < 1e-6 && (own - 0.5 * lse * lse).abs() < 1e-6,
                "{device}"
            );
            gradient
        };
        // d balance / d logit: e · w/W · p (f − Σ f p), for row 0: 2 · 3/4 · 1/4 (1/4 − 5/8); times the share.
        let row_0 = 0.5 * 2.0 * 0.75 * 0.25 * (0.25 - 0.625);
        let row_1 = 0.5 * 2.0 * 0.25 * 0.75 * (0.25 - 0.375);
        let z = |w: f64, p: f64| 0.5 * 2.0 * lse * w * p;
        for (got, want) in [
            (of(1.0, 0.0), [row_0, -row_0, row_1, -row_1]),
            (of(0.0, 1.0), [z(0.75, 0.25), z(0.75, 0.75), z(0.25, 0.75), z(0.25, 0.25)]),
        ] {
            let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-6, "{device}: {got:?} for {want:?}");
        }
    }
    // Rows by index, and central differences of the losses with the routes of the centre.
    let (t, e, data) = (5, 6, noise(30, 3));
    let at = |data: &[f32]| Rows::upload(Device::Twin, data.to_vec(), t, e).unwrap();
    let routes = Routes::choose(&at(&data), 2, Order::Blocked).unwrap();
    let rows = [0, 2, 3, 6, 7];
    let loss = |data: &[f32]| {
        let loss = RouterLoss::new(0.7, 0.3, [1, 92], (0..8).map(|i| 1.0 + i as f32).collect());
        let gradient = loss.gradient(&at(data), &routes, Some(&rows)).unwrap().to_f64();
        let [balance, z] = loss.losses();
        (0.7 * balance + 0.3 * z, gradient)
    };
    let gradient = loss(&data).1;
    for i in 0..data.len() {
        let want = slope(|by| {
            let mut data = data.clone();
            data[i] += by;
            loss(&data).0
        });
        assert!((gradient[i] - want).abs() < 1e-6, "{i}: {} for {want}", gradient[i]);
    }
    assert!(RouterLoss::new(1.0, 1.0, [1, 1], vec![1.0; 4]).gradient(&at(&data), &routes, None).is_err());
    assert!(
        RouterLoss::new(1.0, 1.0, [1, 1], vec![1.0; 4]).gradient(&at(&data), &routes, Some(&rows)).is_err()
    );
}

/// Frozen experts of every dtype: devices agree with the twin, experts get no gradient, and with per-row products the
/// bits of a place do not depend on the others.
#[test]
fn frozen_experts_of_every_dtype() {
    let (t, e, topk, k, n) = (20, 5, 2, 64, 70);
    let values: Vec<f32> = noise(e * k * n, 4).iter().map(|w| w / 8.0).collect();
    let quantised = |bits| {
        let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&values[i * n..(i + 1) * n]);
        let matrix = QuantMatrix::from_rows(bits, e * k, n, row).unwrap();
        Param::quantised("w", Part::Llm, &[e, k, n], matrix).unwrap()
    };
    let dense = |bf16: bool| {
        let values = Values::F32(values.clone());
        Param::new("w", Part::Llm, &[e, k, n], if bf16 { values.into_bf16() } else { values }).unwrap()
    };
    for weight in [dense(false), dense(true), quantised(QuantBits::Eight), quantised(QuantBits::Four)] {
        let what = format!("{:?}", weight.dtype());
        let exact = weight.dtype() == ParamDtype::F32;
        let layer = ExpertLinear::new(Arc::new(weight)).unwrap();
        let run = |device: Device, order: Order, rows: std::ops::Range<usize>| {
            let logits =
                Rows::upload(device, noise(t * e, 6), t, e).unwrap().row_range(rows.clone()).unwrap();
            let routes = Routes::choose(&logits, topk, Order::Blocked).unwrap();
            let x = Rows::upload(device, noise(t * k, 5), t, k).unwrap().row_range(rows).unwrap();
            let x = routes.scatter(&x).unwrap();
            let y = layer.forward(&x, &routes, order).unwrap();
            let dx = layer.backward(&x, &y, &routes).unwrap();
            assert!(layer.weight().grad().is_none(), "{what}: a gradient of frozen experts");
            [routes.gather(&y).unwrap().to_f64(), routes.gather(&dx).unwrap().to_f64()]
        };
        let twin = run(Device::Twin, Order::Blocked, 0..t);
        for device in devices() {
            let bound = if exact { 1e-5 } else { 8e-3 };
            for order in [Order::Blocked, Order::PerRow] {
                let own = run(device, order, 0..t);
                for (got, want) in own.iter().zip(&twin) {
                    let size = want.iter().fold(1.0f64, |a, x| a.max(x.abs()));
                    let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(far <= bound * size, "{what} on {device}, {order:?}: {far} of {size}");
                }
                if order == Order::PerRow {
                    for (first, last) in [(0, 1), (7, 8), (3, 9)] {
                        let some = run(device, order, first..last);
                        assert_eq!(
                            some[0],
                            own[0][first * n..last * n],
                            "{what} on {device}, {first}..{last}"
                        );
                    }
                }
            }
        }
    }
}

/// Frozen, rounded or quantised weights: devices agree with the twin on the values that the kernels read.
#[test]
fn frozen_weights_of_every_dtype() {
    let (t, n, k) = (5, 24, 64);
    let values = noise(n * k, 4);
    let quantised = |bits| {
        let row = |i: usize, row: &mut [f32]| row.copy_from_slice(&values[i * k..(i + 1) * k]);
        Param::quantised("w", Part::Llm, &[n, k], QuantMatrix::from_rows(bits, n, k, row).unwrap()).unwrap()
    };
    let bf16 = Param::new("w", Part::Llm, &[n, k], Values::F32(values.clone()).into_bf16()).unwrap();
    // A GPU rounds both factors to bf16 for any weight of less than 32 bits. A CPU does so if it multiplies bf16; with
    // weights of few bits, it encodes inputs if it multiplies bytes.
    let rounds = |device: Device, param: &Param| match device {
        Device::Cpu if param.dtype() == ParamDtype::Bf16 => param.arithmetic().rounds_bf16(),
        Device::Cpu => param.arithmetic().rounds_bf16() || param.arithmetic().rounds_inputs(),
        Device::Twin => false,
        _ => true,
    };
    for param in [bf16, quantised(QuantBits::Eight), quantised(QuantBits::Four)] {
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
        for device in devices() {
            let pass = Pass::on(device).per_row();
            let x = Rows::upload(device, noise(t * k, 5), t, k).unwrap();
            let all = PackedLinear::new(&[&layer], &pass).forward(&x).unwrap();
            for row in 0..t {
                let alone =
                    PackedLinear::new(&[&layer], &pass).forward(&x.row_range(row..row + 1).unwrap()).unwrap();
                let among = all.row_range(row..row + 1).unwrap();
                assert_eq!(alone.to_f64(), among.to_f64(), "{what} on {device}: row {row} depends on others");
            }
            let bound = if rounds(device, layer.weight()) { 2e-2 } else { 1e-5 };
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
    for (t, h) in sizes() {
        let (weight, bias) = (param("w", &[h], 1), param("b", &[h], 2));
        let rms = Norm::Rms { weight: Arc::clone(&weight), eps: 1e-2 };
        check(format!("rms norm of {t}×{h}"), &[(t, h)], &[&weight], |tape, _, x| tape.norm(&x[0], &rms));
        let around_one = Norm::AroundOne { weight: Arc::clone(&weight), eps: 1e-2 };
        check(format!("rms norm around one of {t}×{h}"), &[(t, h)], &[&weight], |tape, _, x| {
            tape.norm(&x[0], &around_one)
        });
        let layer = Norm::Layer { weight: Arc::clone(&weight), bias: Arc::clone(&bias), eps: 1e-1 };
        check(format!("layer norm of {t}×{h}"), &[(t, h)], &[&weight, &bias], |tape, _, x| {
            tape.norm(&x[0], &layer)
        });
    }
}

/// Returns the root-mean-square difference, relative to that of the twin's values if it is more than 0.1.
fn far(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square: f64 = got.iter().zip(want).map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f64 = want.iter().map(|b| b * b).sum();
    assert!(!square.is_nan(), "not a number");
    (square / size.max(1e-2 * want.len() as f64)).sqrt()
}

fn bf16_param(name: &str, shape: &[usize], seed: u32) -> Arc<Param> {
    let values = Values::F32(noise(shape.iter().product(), seed)).into_bf16();
    let param = Param::new(name, Part::Llm, shape, values).unwrap();
    param.set_trainable(true);
    Arc::new(param)
}

/// Two norms with bf16 weights: the first of f32 rows, the second of the first's output, which is bf16 on a GPU.
#[test]
fn norms_with_bf16_weights() {
    for (t, h) in [(1, 5), (3, 40), (9, 257), (2, 1030)] {
        let [a, b, c, d] = [1, 2, 3, 4].map(|seed| bf16_param("w", &[h], seed));
        let rms = |weight: &Arc<Param>| Norm::Rms { weight: Arc::clone(weight), eps: 1e-2 };
        let layer = |weight: &Arc<Param>, bias: &Arc<Param>| Norm::Layer {
            weight: Arc::clone(weight),
            bias: Arc::clone(bias),
            eps: 1e-1,
        };
        for (kind, first, second) in [
            ("rms", rms(&a), rms(&b)),
            ("layer", layer(&a, &c), layer(&b, &d)),
            ("both", layer(&a, &c), rms(&b)),
            ("around one", Norm::AroundOne { weight: Arc::clone(&a), eps: 1e-2 }, rms(&b)),
        ] {
            let run = |device: Device| {
                [&a, &b, &c, &d].iter().for_each(|param| param.clear_grad());
                let x = Rows::upload(device, noise(t * h, 5), t, h).unwrap();
                let (y, stats_y) = first.forward(&x).unwrap();
                let (z, stats_z) = second.forward(&y).unwrap();
                let dz = Rows::upload(device, noise(t * h, 6), t, h).unwrap();
                let (mut dy, mut dx) = (Rows::zeros(device, t, h), Rows::zeros(device, t, h));
                second.backward(&mut dy, &y, &stats_z, &dz).unwrap();
                first.backward(&mut dx, &x, &stats_y, &dy).unwrap();
                device.finish().unwrap();
                let sizes = [&y, &z, &dx].map(|rows| rows.num_bytes() / rows.len());
                let weights =
                    [&a, &b, &c, &d].into_iter().filter_map(|p| p.with_grad(|g| g.map(|g| g.to_f64())));
                let results =
                    [&y, &z, &dy, &dx].map(Rows::to_f64).into_iter().chain(weights).collect::<Vec<_>>();
                (sizes, results)
            };
            let (_, want) = run(Device::Twin);
            for device in devices() {
                let (sizes, got) = run(device);
                let narrow = matches!(device, Device::Gpu(_));
                if narrow {
                    assert_eq!(sizes, [2, 2, 4], "bytes of a number");
                }
                let bound = if narrow { 8e-3 } else { 1e-5 };
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let far = far(got, want);
                    assert!(far <= bound, "{kind} norms of {t}×{h} on {device}, result {i}: {far}");
                }
            }
        }
    }
}

/// Rows of a bf16 table equal its values exactly, and sums of gradients are f32.
#[test]
fn bf16_tables() {
    for h in [1, 3, 40, 257] {
        let table = bf16_param("table", &[7, h], 1);
        let (ids, terms) =
            ([6u32, 0, 6, 3], vec![vec![(0, 0.5), (5, -1.25)], vec![], vec![(2, 1.0)], vec![(2, 3.0)]]);
        let some = Arc::new(RowMix::of_ids([Some(3), None, Some(5), Some(3)]).into());
        let terms = Arc::new(RowMix::of_terms(terms).into());
        let run = |device: Device| {
            table.clear_grad();
            let mut tape = Tape::recording(false);
            let x = tape.input(embed(device, &table, &ids.to_vec().into()).unwrap());
            let y = tape.add_rows(&x, &table, &some).unwrap();
            let z = tape.add_rows(&y, &table, &terms).unwrap();
            let dz = Rows::upload(device, noise(4 * h, 2), 4, h).unwrap();
            let dx = tape.backward(&z, dz).unwrap().take(&x).unwrap();
            embed_backward(&table, &ids, &dx).unwrap();
            device.finish().unwrap();
            [x.rows().to_f64(), z.rows().to_f64(), table.with_grad(|g| g.unwrap().to_f64())]
        };
        let want = run(Device::Twin);
        for device in devices() {
            let got = run(device);
            assert_eq!(got[0], want[0], "{device}");
            assert!(far(&got[1], &want[1]) < 1e-6 && far(&got[2], &want[2]) < 1e-6, "{h} on {device}");
        }
    }
}

/// Attention with rotation as an operation of the tape.
#[derive(Clone)]
struct Attend {
    heads: AttentionHeads,
    layout: Arc<omnigrpo_ops::Layout>,
    table: Arc<RopeTable>,
}

impl Op for Attend {
    type Kept = ();

    fn forward(&self, [x]: [&Rows; 1]) -> Result<(Rows, ())> {
        let mut qkv = x.clone();
        self.heads.rotate(&mut qkv, &self.table, false)?;
        Ok((self.heads.forward(&qkv, &self.layout)?.0, ()))
    }

    fn backward(&self, [x]: [&Rows; 1], (): (), dy: Rows, _: [bool; 1]) -> Result<[Option<Rows>; 1]> {
        let mut qkv = x.clone();
        self.heads.rotate(&mut qkv, &self.table, false)?;
        let (out, lse) = self.heads.forward(&qkv, &self.layout)?;
        let mut dqkv = self.heads.backward(&qkv, &out, &lse, &dy, &self.layout)?;
        self.heads.rotate(&mut dqkv, &self.table, true)?;
        Ok([Some(dqkv)])
    }
}

/// Builds attention of `t` rows under a layout.
fn attend(heads: AttentionHeads, layout: AttentionLayout, t: usize) -> Attend {
    attend_turning(heads, layout, t, heads.dim / 2)
}

/// Builds attention that rotates the first `half` pairs of a head.
fn attend_turning(heads: AttentionHeads, layout: AttentionLayout, t: usize, half: usize) -> Attend {
    let table = RopeTable::from_angles(t, half, |row, angles| {
        angles.iter_mut().enumerate().for_each(|(i, a)| *a = row as f32 * 0.3 + i as f32);
    });
    Attend { heads, layout: Arc::new(layout.into()), table: Arc::new(table) }
}

#[test]
fn attention_over_every_kind_of_layout() {
    let layouts = [
        ("causal", AttentionLayout::causal(7), 7),
        ("blocks", AttentionLayout::full_blocks(&[3, 1, 4]), 8),
        ("groups", AttentionLayout::groups(&[(3, vec![2, 1]), (2, Vec::new())]), 8),
        ("one row", AttentionLayout::causal(1), 1),
        ("no row", AttentionLayout::default(), 0),
    ];
    for (what, layout, t) in layouts {
        for heads in [AttentionHeads { q: 1, kv: 1, dim: 4 }, AttentionHeads { q: 4, kv: 2, dim: 6 }] {
            let op = attend(heads, layout.clone(), t);
            check(format!("{what}, {heads:?}"), &[(t, heads.packed_width())], &[], |tape, _, x| {
                tape.apply(op.clone(), [&x[0]])
            });
        }
    }
}

/// Attention that rotates a part of each head, or none of it.
#[test]
fn attention_with_partial_rotation() {
    for (heads, half) in [
        (AttentionHeads { q: 4, kv: 2, dim: 6 }, 2),
        (AttentionHeads { q: 1, kv: 1, dim: 16 }, 2),
        (AttentionHeads { q: 2, kv: 1, dim: 5 }, 0),
    ] {
        let op = attend_turning(heads, AttentionLayout::groups(&[(3, vec![2, 1])]), 6, half);
        let name = format!("{half} pairs of {heads:?}");
        check(name, &[(6, heads.packed_width())], &[], |tape, _, x| tape.apply(op.clone(), [&x[0]]));
    }
}

/// Attention with queries of only some rows, as in a last layer.
#[test]
fn attention_of_chosen_rows() {
    let heads = AttentionHeads { q: 4, kv: 2, dim: 6 };
    let rows = vec![1, 2, 4, 7];
    let op = attend(heads, AttentionLayout::groups(&[(3, vec![2, 1]), (2, Vec::new())]).only(&rows), 8);
    let index = Arc::new(rows.into());
    check("chosen rows", &[(8, heads.packed_width())], &[], |tape, _, x| {
        let all = tape.apply(op.clone(), [&x[0]])?;
        tape.select(&all, &index)
    });
}

/// Every head width of published models, over more rows than a tile.
#[test]
fn attention_of_every_published_width() {
    for (dim, t) in [(64, 150), (72, 9), (80, 70), (128, 33), (256, 17)] {
        for (q, kv) in [(1, 1), (3, 1)] {
            let heads = AttentionHeads { q, kv, dim };
            let op = attend(heads, AttentionLayout::groups(&[(t - 5, vec![3, 2])]), t);
            check(format!("{t} rows, {heads:?}"), &[(t, heads.packed_width())], &[], |tape, _, x| {
                tape.apply(op.clone(), [&x[0]])
            });
        }
    }
}

/// Decoding over caches of two groups equals attention over the prompt and each completion's rows.
#[test]
fn attention_over_a_cache() {
    let steps = 3u32;
    for (heads, prompts) in [
        (AttentionHeads { q: 4, kv: 2, dim: 8 }, [5, 1]),
        (AttentionHeads { q: 1, kv: 1, dim: 2 }, [1, 3]),
        (AttentionHeads { q: 3, kv: 1, dim: 64 }, [150, 33]),
    ] {
        for device in devices() {
            let rows = |n: usize, seed: u32| {
                let data = noise(n * heads.packed_width(), seed);
                Rows::upload(device, data, n, heads.packed_width()).unwrap()
            };
            let mut caches = prompts.map(|prompt| {
                let mut cache = GroupCache::new(device, 1, heads, prompt, 2, steps as usize).unwrap();
                cache.write_prompt(0, &rows(prompt, prompt as u32), heads).unwrap();
                cache
            });
            // In the second group, only one completion continues.
            let slots = [vec![1, 0], vec![1]];
            let mut got = Vec::new();
            for step in 0..steps {
                let caches_and_slots = caches.iter_mut().zip(&slots);
                let groups: Vec<DecodeRows> = caches_and_slots
                    .map(|(cache, slots)| DecodeRows { cache, slots: slots.clone() })
                    .collect();
                let mut batch = DecodeBatch::new(groups);
                got.push(heads.attend_cached(&rows(3, 10 + step), 0, &mut batch, Turn::default()).unwrap());
                batch.advance();
            }
            let mut full = DecodeBatch::new(vec![DecodeRows { cache: &mut caches[0], slots: vec![0] }]);
            assert!(heads.attend_cached(&rows(1, 1), 0, &mut full, Turn::default()).is_err());
            assert!(caches[1].check_room(1, 1).is_err() && caches[1].check_room(0, 3).is_ok());
            assert!(caches[1].check_room(0, 4).is_err());
            for (row, prompt) in [(0, prompts[0]), (1, prompts[0]), (2, prompts[1])] {
                let own: Vec<Rows> =
                    (0..steps).map(|step| rows(3, 10 + step).row_range(row..row + 1).unwrap()).collect();
                let prompt_rows = rows(prompt, prompt as u32);
                let all: Vec<&Rows> = std::iter::once(&prompt_rows).chain(&own).collect();
                let whole = Rows::concat(&all).unwrap();
                let layout = AttentionLayout::causal(whole.rows()).into();
                let (out, lse) = heads.forward(&whole, &layout).unwrap();
                for (step, (got, got_lse)) in got.iter().enumerate() {
                    let far = |got: &Rows, all: &Rows| {
                        let want = all.row_range(prompt + step..prompt + step + 1).unwrap().to_f64();
                        let got = got.row_range(row..row + 1).unwrap().to_f64();
                        got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
                    };
                    let far_out = far(got, &out);
                    assert!(far_out <= 1e-5, "{heads:?} on {device}, row {row}, step {step}: {far_out}");
                    if device.remembers_decoding() {
                        let far = far(got_lse, &lse);
                        assert!(far <= 1e-5, "{heads:?}, row {row}, step {step}: log-sum-exps {far} apart");
                    }
                }
            }
        }
    }
}

/// Consecutive rows that extend a slot attend as in a sequence of prompt, slot and rows. The slot continues after them, and the
/// other slot does not change.
#[test]
fn rows_that_extend_a_cache() {
    for (heads, prompt, turn) in [
        (AttentionHeads { q: 4, kv: 2, dim: 8 }, 5, 3),
        (AttentionHeads { q: 1, kv: 1, dim: 2 }, 1, 1),
        (AttentionHeads { q: 3, kv: 1, dim: 64 }, 33, 70),
    ] {
        for device in devices() {
            let rows = |n: usize, seed: u32| {
                let data = noise(n * heads.packed_width(), seed);
                Rows::upload(device, data, n, heads.packed_width()).unwrap()
            };
            let mut cache = GroupCache::new(device, 2, heads, prompt, 2, turn + 2).unwrap();
            let mut got: [Vec<(Rows, Rows)>; 2] = [Vec::new(), Vec::new()];
            for layer in 0..2 {
                cache.write_prompt(layer, &rows(prompt, layer as u32), heads).unwrap();
            }
            let decode = |cache: &mut GroupCache, slot: usize, seed: u32| {
                let mut batch = DecodeBatch::new(vec![DecodeRows { cache, slots: vec![slot] }]);
                let each = [0, 1].map(|layer| {
                    heads
                        .attend_cached(&rows(1, seed + layer), layer as usize, &mut batch, Turn::default())
                        .unwrap()
                });
                batch.advance();
                each
            };
            for (got, own) in got.iter_mut().zip(decode(&mut cache, 1, 10)) {
                got.push(own);
            }
            for (layer, got) in got.iter_mut().enumerate() {
                got.push(
                    heads.attend_extended(&rows(turn, 20 + layer as u32), layer, &mut cache, 1).unwrap(),
                );
            }
            cache.extend(1, turn);
            for (got, own) in got.iter_mut().zip(decode(&mut cache, 1, 30)) {
                got.push(own);
            }
            assert!(heads.attend_extended(&rows(2, 1), 0, &mut cache, 1).is_err());
            let others = decode(&mut cache, 0, 10);
            for (layer, got) in got.iter().enumerate() {
                let seed = layer as u32;
                let parts =
                    [rows(prompt, seed), rows(1, 10 + seed), rows(turn, 20 + seed), rows(1, 30 + seed)];
                let whole = Rows::concat(&parts.each_ref()).unwrap();
                let layout = AttentionLayout::causal(whole.rows()).into();
                let (out, lse) = heads.forward(&whole, &layout).unwrap();
                let far = |got: Vec<&Rows>, all: &Rows| {
                    let want = all.row_range(prompt..whole.rows()).unwrap().to_f64();
                    let got = Rows::concat(&got).unwrap().to_f64();
                    assert_eq!(got.len(), want.len());
                    got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
                };
                let far_out = far(got.iter().map(|(out, _)| out).collect(), &out);
                assert!(far_out <= 1e-5, "{heads:?} on {device}, layer {layer}: {far_out}");
                if device.remembers_decoding() {
                    let far = far(got.iter().map(|(_, lse)| lse).collect(), &lse);
                    assert!(far <= 1e-5, "{heads:?}, layer {layer}: log-sum-exps {far} apart");
                }
                // The first row of slot 0 has the same keys and values as that of slot 1.
                assert_eq!(others[layer].0.to_f64(), got[0].0.to_f64(), "{heads:?} on {device}");
            }
        }
    }
}

#[test]
fn elementwise_operations() {
    use Activation::{GeluErf, GeluTanh, QuickGelu, Silu, Tanh};
    for act in [GeluErf, GeluTanh, QuickGelu, Silu, Tanh] {
        for (t, n) in sizes() {
            check(format!("{act:?} of {t}×{n}"), &[(t, n)], &[], |tape, _, x| tape.activation(&x[0], act));
        }
    }
    for (t, n) in sizes() {
        check(format!("swiglu of {t}×{n}"), &[(t, 2 * n)], &[], |tape, _, x| {
            let backward = |[x]: [&Rows; 1], dy: &Rows| {
                let mut dx = x.clone();
                dx.swiglu_back(dy)?;
                let mut both = x.clone();
                let y = both.swiglu_and_back(dy)?;
                assert_eq!([y, both].map(|rows| rows.to_f64()), [x.swiglu()?.to_f64(), dx.to_f64()]);
                Ok([dx])
            };
            tape.apply(Of(|[x]: [&Rows; 1]| x.swiglu(), backward), [&x[0]])
        });
        let scale = param("scale", &[n], 5);
        check(format!("scaled residual of {t}×{n}"), &[(t, n), (t, n)], &[&scale], |tape, _, x| {
            let (scale, again) = (Arc::clone(&scale), Arc::clone(&scale));
            let forward = move |[x, residual]: [&Rows; 2]| x.scaled_onto(residual, &scale);
            let backward =
                move |[x, _]: [&Rows; 2], dy: &Rows| Ok([x.scaled_onto_back(dy, &again)?, dy.clone()]);
            tape.apply(Of(forward, backward), [&x[0], &x[1]])
        });
        check(format!("sum of {t}×{n}"), &[(t, n), (t, n)], &[], |tape, _, x| tape.add(&x[0], &x[1]));
    }
    check("a value used twice", &[(3, 5)], &[], |tape, _, x| {
        let y = tape.activation(&x[0], Silu)?;
        tape.add(&y, &x[0])
    });
    check("reshape", &[(3, 8)], &[], |tape, _, x| tape.reshape(&x[0], 6, 4));
    check("concat", &[(3, 4), (2, 4)], &[], |tape, _, x| tape.concat([&x[0], &x[1]]));
    let index = Arc::new(vec![4, 0, 2].into());
    check("select", &[(5, 4)], &[], |tape, _, x| tape.select(&x[0], &index));
    check("spread", &[(3, 4)], &[], |tape, _, x| tape.spread(&x[0], &index, 6));
    let (none, many) =
        (Arc::new(Vec::new().into()), Arc::new((0..70).map(|i| i * 7 % 71).collect::<Vec<_>>().into()));
    check("select nothing", &[(5, 4)], &[], |tape, _, x| tape.select(&x[0], &none));
    check("spread nothing", &[(0, 4)], &[], |tape, _, x| tape.spread(&x[0], &none, 3));
    check("select many", &[(71, 33)], &[], |tape, _, x| tape.select(&x[0], &many));
    check("spread many", &[(70, 33)], &[], |tape, _, x| tape.spread(&x[0], &many, 71));
}

#[test]
fn tables_and_sums_of_rows() {
    for h in SIZES {
        let table = param("table", &[6, h], 1);
        let ids = Arc::new(RowMix::of_ids([Some(3), None, Some(5), Some(3)]).into());
        check(format!("add_rows of {h}"), &[(4, h)], &[&table], |tape, _, x| {
            tape.add_rows(&x[0], &table, &ids)
        });
        let terms = RowMix::of_terms([vec![(0, 0.5), (5, -1.25)], Vec::new(), vec![(2, 1.0)]]);
        let terms = Arc::new(terms.into());
        check(format!("add_rows with weights of {h}"), &[(3, h)], &[&table], |tape, _, x| {
            tape.add_rows(&x[0], &table, &terms)
        });
        let mix = Arc::new(RowMix::means([vec![0, 1, 2], vec![4], vec![1, 4]]).into());
        check(format!("mix of {h}"), &[(5, h)], &[], |tape, _, x| tape.mix(&x[0], &mix));
        check_embedding(&table, vec![5, 0, 5, 2]);
    }
    let (table, h) = (param("table", &[90, 33], 2), 33);
    for t in ROWS {
        let ids: Vec<u32> = (0..t as u32).map(|i| i * 11 % 40).collect();
        check_embedding(&table, ids.clone());
        let some = Arc::new(RowMix::of_ids(ids.iter().map(|&id| (id % 3 > 0).then_some(id))).into());
        check(format!("add_rows to {t}"), &[(t, h)], &[&table], |tape, _, x| {
            tape.add_rows(&x[0], &table, &some)
        });
        let terms = RowMix::of_terms(ids.iter().map(|&id| [(id, 0.5), (id + 1, -0.25)]));
        let terms = Arc::new(terms.into());
        check(format!("add_rows with weights to {t}"), &[(t, h)], &[&table], |tape, _, x| {
            tape.add_rows(&x[0], &table, &terms)
        });
        let mix = Arc::new(RowMix::means(ids.iter().map(|&id| vec![id, 41])).into());
        check(format!("mix to {t}"), &[(42, h)], &[], |tape, _, x| tape.mix(&x[0], &mix));
    }
}

/// Checks rows of a table added to a value of the tape.
fn check_embedding(table: &Arc<Param>, ids: Vec<u32>) {
    let h = table.shape()[1];
    check(format!("embedding of {} ids in {h}", ids.len()), &[(ids.len(), h)], &[table], |tape, _, x| {
        let (to, from, own, again) = (Arc::clone(table), Arc::clone(table), ids.clone(), ids.clone());
        let forward = move |[x]: [&Rows; 1]| {
            let mut y = embed(x.device(), &to, &own.clone().into())?;
            y.add(x)?;
            Ok(y)
        };
        let backward = move |_: [&Rows; 1], dy: &Rows| {
            embed_backward(&from, &again, dy)?;
            Ok([dy.clone()])
        };
        tape.apply(Of(forward, backward), [&x[0]])
    });
}

#[test]
fn convolutions_and_gates() {
    for c in [1, 3, 20, 130] {
        let (w, b) = (param("w", &[4, c, 2], 1), param("b", &[4], 2));
        let layer = Linear::reshaped(Arc::clone(&w), Some(Arc::clone(&b)), 4, 2 * c).unwrap();
        let patches = Arc::new(Patches { sources: vec![0, 1, OUTSIDE, 2, 3, 3], taps: 2 });
        check(format!("convolution of {c}"), &[(4, c)], &[&w, &b], |tape, _, x| {
            tape.convolution(&x[0], &layer, &patches)
        });
        let nothing = Arc::new(Patches { sources: Vec::new(), taps: 2 });
        check(format!("convolution of no row of {c}"), &[(0, c)], &[&w, &b], |tape, _, x| {
            tape.convolution(&x[0], &layer, &nothing)
        });
        let weight = param("k", &[c, 1, 3, 3], 3);
        for (n, [high, wide]) in [(0, [2, 3]), (1, [1, 1]), (2, [2, 3]), (1, [9, 11])] {
            let name = format!("depthwise of {n} pictures {high}×{wide}×{c}");
            check(name, &[(n * high * wide, c)], &[&weight], |tape, _, x| {
                tape.depthwise3(&x[0], &weight, [high, wide])
            });
        }
        for t in [1, 6, 70] {
            let gated = |x: usize, gate: usize| [(x, c), (gate, c)];
            check(format!("gate of {t}×{c}"), &gated(t * 3, t), &[], |tape, _, x| tape.gate(&x[0], &x[1]));
            check(format!("own gate of {t}×{c}"), &gated(t, t), &[], |tape, _, x| tape.gate(&x[0], &x[1]));
            check(format!("one gate of {t}×{c}"), &gated(t, 1), &[], |tape, _, x| tape.gate(&x[0], &x[1]));
            for k in [1, 3] {
                check(format!("blend of {k} of {t}×{c}"), &[(t * k, c), (1, k)], &[], |tape, _, x| {
                    tape.blend(&x[0], &x[1])
                });
            }
        }
    }
}

/// The head: log-probabilities of targets and entropies of rows, weighted.
#[test]
fn the_head() {
    for (rows, h, vocab) in [(0, 9, 37), (1, 1, 1), (3, 9, 37), (2, 33, 2100), (600, 3, 5)] {
        check_head(rows, h, vocab);
    }
    let head = param("head", &[37, 9], 1);
    assert!(omnigrpo_ops::score(&Rows::zeros(Device::Cpu, 2, 9), &head, &Targets::default(), 1.0).is_err());
}

/// The most probable tokens of each row are those of the twin, and as targets they have the same log-probabilities.
#[test]
fn the_most_probable_tokens() {
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    for (rows, h, vocab, top, below) in [
        (1, 1, 1, 3, 9),
        (3, 9, 37, 5, 37),
        (4, 33, 2100, 60, 2100),
        (3, 9, 37, 100, 37),
        (3, 9, 37, 100, 30),
    ] {
        let head = param("head", &[vocab, h], 1);
        let k = top.min(below).min(vocab);
        let targets = |tokens: Vec<u32>| {
            let each = tokens.len() / rows.max(1);
            Targets { rows: (0..rows).collect(), offsets: (0..=rows).map(|row| row * each).collect(), tokens }
        };
        let normed = |device: Device| Rows::upload(device, noise(rows * h, 2), rows, h).unwrap();
        let run = |device: Device| {
            let one = targets(vec![0; rows]);
            let scores =
                omnigrpo_ops::score_top(&normed(device), &head, &one, 0.75, Top { k: top, below }).unwrap();
            let (ids, logp): (Vec<u32>, Vec<f32>) = scores.top.into_iter().unzip();
            let again = omnigrpo_ops::score(&normed(device), &head, &targets(ids.clone()), 0.75).unwrap();
            let far = far(&again.logprobs.to_f64(), &wide(&logp));
            assert!(far <= 1e-5, "{top} of {vocab} on {device}: {far}");
            (ids, logp)
        };
        let (ids, want) = run(Device::Twin);
        assert_eq!(ids.len(), rows * k);
        for device in devices() {
            let (own, got) = run(device);
            assert_eq!(own, ids, "{top} of {vocab} on {device}");
            let far = far(&wide(&got), &wide(&want));
            assert!(far <= 1e-5, "{top} of {vocab} on {device}: {far}");
        }
    }
}

/// A bf16 head after a bf16 norm, so that all factors are bf16 on a GPU. The test above covers central differences,
/// since the twin computes both alike.
#[test]
fn a_bf16_head() {
    for (rows, h, vocab) in [(1, 8, 1), (3, 9, 37), (5, 72, 700)] {
        let (weight, head) = (bf16_param("w", &[h], 1), bf16_param("head", &[vocab, h], 2));
        let norm = Norm::Rms { weight: Arc::clone(&weight), eps: 1e-2 };
        let (offsets, tokens) =
            ((0..=rows).collect(), (0..rows).map(|i| (i * 31 + 5) as u32 % vocab as u32).collect());
        let targets = Targets { rows: (0..rows).collect(), offsets, tokens };
        let run = |device: Device| {
            head.clear_grad();
            let x = Rows::upload(device, noise(rows * h, 3), rows, h).unwrap();
            let (normed, _) = norm.forward(&x).unwrap();
            let scores = omnigrpo_ops::score(&normed, &head, &targets, 0.75).unwrap();
            let (dlogp, dentropy) = (noise(rows, 4), noise(rows, 5));
            let back =
                omnigrpo_ops::score_backward(&normed, &head, &targets, &scores, &dlogp, Some(&dentropy));
            let logits = omnigrpo_ops::logits(&normed, &head).unwrap();
            device.finish().unwrap();
            let dhead = head.with_grad(|g| g.unwrap().to_f64());
            [
                scores.logprobs.to_f64(),
                scores.entropies.to_f64(),
                back.unwrap().to_f64(),
                dhead,
                logits.to_f64(),
            ]
        };
        let want = run(Device::Twin);
        for device in devices() {
            let bound =
                if device == Device::Cpu && !Arithmetic::default().rounds_bf16() { 1e-5 } else { 1.5e-2 };
            for (i, (got, want)) in run(device).iter().zip(&want).enumerate() {
                let far = far(got, want);
                assert!(far <= bound, "head of {rows}×{h}×{vocab} on {device}, result {i}: {far}");
            }
        }
    }
}

fn check_head(rows: usize, h: usize, vocab: usize) {
    let (what, temperature) = (format!("head of {rows}×{h}×{vocab}"), 0.75);
    let head = param("head", &[vocab, h], 1);
    // Number of targets: two, one, none, two, …
    let counts: Vec<usize> = (0..rows).map(|row| [2, 1, 0][row % 3]).collect();
    let offsets = counts.iter().scan(0, |end, n| {
        *end += n;
        Some(*end)
    });
    let offsets: Vec<usize> = std::iter::once(0).chain(offsets).collect();
    let count = offsets[rows];
    let tokens = (0..count).map(|i| ((i * 31 + 5) % vocab) as u32).collect();
    let targets = Targets { rows: (0..rows).map(|row| row + row / 2).collect(), offsets, tokens };
    let (dlogp, dentropy) = (noise(count, 3), noise(rows, 4));
    let run = |device: Device, x: &[f32]| {
        let normed = Rows::upload(device, x.to_vec(), rows, h).unwrap();
        let scores = omnigrpo_ops::score(&normed, &head, &targets, temperature).unwrap();
        head.clear_grad();
        let backward = |dentropy| {
            omnigrpo_ops::score_backward(&normed, &head, &targets, &scores, &dlogp, dentropy)
                .unwrap()
                .to_f64()
        };
        let dx = backward(Some(&dentropy[..]));
        let dhead = head.with_grad(|g| g.map_or_else(|| vec![0.0; vocab * h], |g| g.to_f64()));
        let without = backward(None);
        let logits = omnigrpo_ops::logits(&normed, &head).unwrap().to_f64();
        [scores.logprobs.to_f64(), scores.entropies.to_f64(), dx, dhead, without, logits]
    };
    let x = noise(rows * h, 2);
    let twin = run(Device::Twin, &x);
    // Without entropy weights, the loss has no entropy term.
    let loss = |x: &[f32], with_entropy: bool| {
        let [logp, entropy, ..] = run(Device::Twin, x);
        let weighed = |a: &[f64], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum::<f64>();
        weighed(&logp, &dlogp) + if with_entropy { weighed(&entropy, &dentropy) } else { 0.0 }
    };
    for at in (0..x.len()).step_by(1 + x.len() / 30) {
        for (result, with_entropy) in [(2, true), (4, false)] {
            let want = slope(|by: f32| {
                let mut x = x.clone();
                x[at] += by;
                loss(&x, with_entropy)
            });
            let got = twin[result][at];
            assert!((got - want).abs() <= 1e-6, "{what}: {got} for {want}");
        }
    }
    for at in (0..head.len()).step_by(1 + head.len() / 30) {
        let want = slope(|by: f32| {
            head.update(|w| w[at] += by).unwrap();
            let loss = loss(&x, true);
            head.update(|w| w[at] -= by).unwrap();
            loss
        });
        assert!((twin[3][at] - want).abs() <= 1e-6, "{what}: {} for {want}", twin[3][at]);
    }
    for device in devices() {
        for (i, (got, want)) in run(device, &x).iter().zip(&twin).enumerate() {
            assert_eq!(got.len(), want.len(), "{what} on {device}, result {i}");
            let size = want.iter().fold(1.0f64, |a, x| a.max(x.abs()));
            let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far <= 1e-5 * size, "{what} on {device}, result {i}: {far}");
        }
    }
}

/// Three steps of `torch.optim.AdamW`, written out.
#[test]
fn the_optimizer() {
    let step = |master: bool, offload: bool| Step {
        lr: 0.125,
        betas: [0.875, 0.96875],
        eps: 1e-3,
        weight_decay: 0.25,
        grad_scale: 0.5,
        master,
        random: false,
        eight_bits: false,
        offload,
    };
    for n in [1, 5, 33, 5000] {
        for (bf16, master) in [(false, true), (true, true), (true, false)] {
            for (device, offload) in
                devices().into_iter().flat_map(|device| [(device, false), (device, true)])
            {
                let what =
                    format!("{n} weights, bf16 {bf16}, master {master}, on {device}, offload {offload}");
                let values = Values::F32(noise(n, 1));
                let values = if bf16 { values.into_bf16() } else { values };
                let param = Param::new("w", Part::Llm, &[n], values).unwrap();
                param.set_trainable(true);
                let Step { lr, betas, eps, weight_decay, grad_scale, .. } = step(master, offload);
                let [lr, b1, b2, eps, decay, scale] =
                    [lr, betas[0], betas[1], eps, weight_decay, grad_scale].map(f64::from);
                let mut want: Vec<[f64; 3]> =
                    param.read().f32().iter().map(|&w| [f64::from(w), 0.0, 0.0]).collect();
                let mut moments = Moments::default();
                assert!(
                    !param.adamw(&mut moments, &step(master, offload)).unwrap(),
                    "{what}: nothing reached it"
                );
                for t in 1..=3 {
                    let gradient = noise(n, 10 + t as u32);
                    param.reach(device);
                    param.with_grad(|g| *g.unwrap() = Rows::upload(device, gradient.clone(), 1, n).unwrap());
                    assert!(param.adamw(&mut moments, &step(master, offload)).unwrap());
                    assert!(param.grad().is_none(), "{what}: the gradient is consumed");
                    for ([w, m, v], g) in want.iter_mut().zip(gradient) {
                        let g = f64::from(g) * scale;
                        *m += (1.0 - b1) * (g - *m);
                        *v += (1.0 - b2) * (g * g - *v);
                        let (m, v) = (*m / (1.0 - b1.powi(t)), *v / (1.0 - b2.powi(t)));
                        *w -= lr * (decay * *w + m / (v.sqrt() + eps));
                    }
                }
                assert_eq!(moments.step, 3);
                assert_eq!(moments.master(&param).len(), if bf16 && master { n } else { 0 }, "{what}");
                assert_eq!(moments.has_master(), bf16 && master, "{what}");
                let exact = match bf16 && master {
                    true => moments.master(&param).into_owned(),
                    false => param.read().f32().into_owned(),
                };
                // Without a master, each step rounds to eight bits.
                let bound = if bf16 && !master { 3.0 / 256.0 } else { 1e-5 };
                for (i, [w, m, v]) in want.iter().enumerate() {
                    let far = (f64::from(exact[i]) - w).abs();
                    assert!(far <= bound * w.abs().max(1.0), "{what}: weight {i} differs by {far}");
                    let far = (f64::from(moments.m()[i]) - m).abs() + (f64::from(moments.v()[i]) - v).abs();
                    assert!(far <= 1e-6, "{what}: moments {i} differ by {far}");
                }
            }
        }
    }
}

/// A gradient in bf16 is rounded after each addition, on every device. A weight of few values keeps f32.
#[test]
fn gradients_in_bf16_are_rounded_after_each_addition() {
    for device in [Device::Cpu, card()] {
        let rounded = |x: &[f32]| -> Vec<f32> { x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect() };
        for n in [5000, 100] {
            let rounded = |x: Vec<f32>| if n < 4096 { x } else { rounded(&x) };
            let param = Param::new("w", Part::Llm, &[n], Values::F32(noise(n, 1))).unwrap();
            param.set_trainable(true);
            param.keep_grad_in_bf16(true);
            assert!(param.grad().is_none() && param.take_grad().is_none());
            let (first, second) = (noise(n, 2), noise(n, 3));
            let rows = |x: &[f32]| Rows::upload(device, x.to_vec(), 1, n).unwrap();
            param.reach(device);
            param.with_grad(|grad| grad.unwrap().add(&rows(&first))).unwrap();
            param.reach(device);
            let want = rounded(first.clone());
            assert_eq!(param.grad().unwrap(), want);
            param.with_grad(|grad| grad.unwrap().add(&rows(&second))).unwrap();
            let want = rounded(want.iter().zip(&second).map(|(a, b)| a + b).collect());
            let squares = omnigrpo_ops::squares(&[&param], false)[0].unwrap().sum;
            let exact: f64 = want.iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!((squares - exact).abs() < 1e-9 * exact, "{squares} for {exact}");
            assert_eq!(param.grad().unwrap(), want);
            let taken = param.take_grad().unwrap();
            assert_eq!((taken.device(), taken.to_vec()), (device, want));
            param.set_grad(Some(rows(&first))).unwrap();
            param.clear_grad();
            assert!(param.grad().is_none());
        }
    }
    // On an outline, a weight takes 4 bytes for each value while something is added, and 2 after that.
    let n = 10_000;
    let params = [(); 4].map(|()| {
        let param = Param::outline("w", Part::Llm, &[n], ParamDtype::Bf16);
        param.set_trainable(true);
        param.keep_grad_in_bf16(true);
        param
    });
    let ((), seen) = footprint(|| params.iter().for_each(|param| param.reach(Device::Outline)));
    assert_eq!(seen.of(Held::Gradients), (3 * 2 + 4 + 2) * n as u64);
    // A second addition to the first one.
    let add = || params[0].with_grad(|grad| assert_eq!(grad.unwrap().num_bytes(), 4 * n));
    let ((), seen) = footprint(add);
    assert_eq!(seen.of(Held::Gradients), (4 * 2 + 4) * n as u64);
}

/// The state is stored next to the weight on a GPU or in main memory, moves between devices, and gives the same bits everywhere, in
/// few bits too; a bf16 weight is its master rounded to nearest even. (A GPU stores the lower neighbour of a master that is half-way
/// between two weights and is rounded down. None of these is.)
#[test]
fn the_optimizers_state_moves() {
    for (n, master, few) in [(333, true, false), (5000, true, true), (5000, false, true)] {
        the_state_moves(n, master, few);
    }
}

fn the_state_moves(n: usize, master: bool, few: bool) {
    let step = |offload: bool| Step {
        lr: 1e-3,
        betas: [0.9, 0.99],
        eps: 1e-6,
        weight_decay: 0.1,
        grad_scale: 0.5,
        master,
        random: few,
        eight_bits: few,
        offload,
    };
    let from = |devices: &[(Device, bool)], reserved: bool| {
        let param = bf16_param("w", &[n], 1);
        param.keep_grad_in_bf16(few);
        let mut moments = Moments::default();
        if reserved {
            param.reserve_grad();
            moments = Moments::in_memory(&param, 0..n, master, few).unwrap();
            assert!(moments.host_bytes() >= if few { 2 } else { 8 } * n + if master { 4 * n } else { 0 });
        }
        for (t, &(device, offload)) in devices.iter().enumerate() {
            param.reach(device);
            let gradient = Rows::upload(device, noise(n, 20 + t as u32), 1, n).unwrap();
            param.with_grad(|g| *g.unwrap() = gradient);
            assert!(param.adamw(&mut moments, &step(offload)).unwrap());
            device.finish().unwrap();
        }
        let own = moments.master(&param).into_owned();
        let Values::Bf16(weight) = param.values().unwrap() else { unreachable!("the weight is in bf16") };
        if master {
            let rounded: Vec<bf16> = own.iter().map(|&x| bf16::from_f32(x)).collect();
            assert_eq!(weight, rounded);
        }
        assert_eq!(own.is_empty(), !master);
        if few {
            let (m, v) = (moments.m().into_owned(), moments.v().into_owned());
            let numbers = Numbers { m, v, master: own.clone() };
            let again = Moments::new(moments.step, numbers, true);
            assert_eq!((again.m(), again.v()), (moments.m(), moments.v()), "a state that was saved");
            assert!(again.host_bytes() < 3 * n + if master { 4 * n } else { 0 });
        }
        (weight, moments.m().into_owned(), moments.v().into_owned(), own)
    };
    let run = |devices: &[(Device, bool)]| from(devices, false);
    let [card, other] = [(); 2].map(|()| card());
    let cpu = run(&[(Device::Cpu, false); 4]);
    assert_eq!(run(&[(Device::Cpu, true); 4]), cpu);
    assert_eq!(run(&[(card, false); 4]), cpu);
    assert_eq!(run(&[(card, true); 4]), cpu);
    assert_eq!(from(&[(card, true); 4], true), cpu, "a state that was reserved");
    assert_eq!(run(&[(card, true), (card, false), (other, false), (other, true)]), cpu);
    assert_eq!(run(&[(card, false), (Device::Cpu, false), (card, true), (Device::Cpu, true)]), cpu);
}

/// Parts of the state, as ranks hold them, give the bits of the complete state. A copy of the weight on a card changes with it.
#[test]
fn the_optimizer_updates_a_range() {
    let n = 5000;
    let step = Step {
        lr: 1e-2,
        betas: [0.9, 0.99],
        eps: 1e-6,
        weight_decay: 0.1,
        grad_scale: 0.5,
        master: true,
        random: false,
        eight_bits: false,
        offload: true,
    };
    let card = card();
    let run = |cuts: &[usize], device: Device| {
        let parts: Vec<Range<usize>> = cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
        let param = bf16_param("w", &[1, n], 1);
        let on_device = || embed(device, &param, &vec![0].into()).unwrap().to_vec();
        let mut moments: Vec<Moments> = parts.iter().map(|_| Moments::default()).collect();
        for t in 0..3 {
            on_device();
            let grad = noise(n, 20 + t);
            for (part, moments) in parts.iter().zip(&mut moments) {
                moments.step += 1;
                param.adamw_range(part.clone(), &grad[part.clone()], moments, &step).unwrap();
            }
        }
        assert_eq!(on_device(), &*param.read().f32());
        let masters = moments.iter().map(|moments| moments.master(&param).into_owned()).collect::<Vec<_>>();
        (on_device(), masters.concat())
    };
    let whole = run(&[0, n], Device::Cpu);
    assert_eq!(run(&[0, n], card), whole);
    assert_eq!(run(&[0, 1, 2100, n], card), whole);
    assert_eq!(run(&[0, 2100, n], Device::Cpu), whole);
    let told = param("w", &[3], 1).adamw_range(1..4, &[0.0; 3], &mut Moments::default(), &step).unwrap_err();
    assert!(told.to_string().contains("3 gradients for elements 1..4 of 3"), "{told}");
}

/// A weight of several pieces: its last gradient of a step travels to main memory while the pass continues. The norm and the
/// update have the bits of a step on the card, and only gradient and weight move.
#[test]
fn gradients_travel_during_the_pass() {
    // With this size, no master is half-way between two weights; see `the_optimizers_state_moves`.
    let (n, k) = (70, 62);
    let card = card();
    let step = |offload| Step {
        lr: 1e-2,
        betas: [0.9, 0.99],
        eps: 1e-6,
        weight_decay: 0.1,
        grad_scale: 0.25,
        master: true,
        random: false,
        eight_bits: false,
        offload,
    };
    let run = |offload: bool, in_bf16: bool| {
        let weight = Arc::new(bf16_param("w", &[n, k], 1));
        weight.keep_grad_in_bf16(in_bf16);
        let other = Arc::new(param("other", &[n], 2));
        let layer = Linear::new(Arc::clone(&weight), Some(Arc::clone(&other))).unwrap();
        let pass = Pass { device: card, ..Pass::default() };
        let linear = PackedLinear::new(&[&layer], &pass);
        let x = Rows::upload(card, noise(3 * k, 3), 3, k).unwrap();
        let mut moments = [Moments::default(), Moments::default()];
        let mut norms = Vec::new();
        for t in 0..3 {
            // Gradients of two passes are summed, and the last one travels.
            for last in [false, true] {
                if offload && last {
                    weight.send_next_grad();
                }
                let dy = Rows::upload(card, noise(3 * n, 10 + t), 3, n).unwrap();
                linear.backward(&x, &dy).unwrap();
            }
            // Nothing reached the gradient since, so it stays in main memory.
            weight.reach(card);
            let params: [&Param; 2] = [&weight, &other];
            norms.extend(squares(&params, offload).into_iter().map(|s| s.unwrap().sum));
            for (param, moments) in params.iter().zip(&mut moments) {
                assert!(param.adamw(moments, &step(offload)).unwrap());
            }
            assert!(squares(&params, offload).iter().all(Option::is_none));
        }
        card.finish().unwrap();
        let [m, v] = [moments[0].m().into_owned(), moments[0].v().into_owned()];
        (norms, m, v, moments[0].master(&weight).into_owned(), weight.values().unwrap().into_bf16())
    };
    let bits = |values: &Values| match values {
        Values::Bf16(data) => data.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        Values::F32(_) => panic!(),
    };
    // A gradient in bf16 is rounded before it travels, too.
    for in_bf16 in [false, true] {
        let (here, away) = (run(false, in_bf16), run(true, in_bf16));
        assert_eq!((&away.0, &away.1, &away.2, &away.3), (&here.0, &here.1, &here.2, &here.3), "{in_bf16}");
        assert_eq!(bits(&away.4), bits(&here.4), "{in_bf16}");
    }
    assert_ne!(run(false, false).0, run(false, true).0, "rounding shows in the norm");
}

/// A gradient after the announced last one brings the sum back to the device.
#[test]
fn a_gradient_that_was_sent_too_early_comes_back() {
    let card = card();
    let table = param("table", &[3, 2], 1);
    let add = || {
        let dx = Rows::upload(card, vec![1.0, 2.0], 1, 2).unwrap();
        embed_backward(&table, &[1], &dx).unwrap();
    };
    table.send_next_grad();
    add();
    assert_eq!(table.with_grad(|grad| grad.unwrap().device()), Device::Cpu);
    add();
    assert_eq!(table.grad().unwrap(), [0.0, 0.0, 2.0, 4.0, 0.0, 0.0]);
    assert_eq!(squares(&[&table], true)[0].unwrap().sum, 20.0);
    table.clear_grad();
    assert!(table.grad().is_none());
}

/// Passes on two devices add to the gradient of one weight.
#[test]
fn a_gradient_moves_to_the_device_that_adds_to_it() {
    let table = param("table", &[3, 2], 1);
    let devices = devices();
    for &device in &devices {
        let dx = Rows::upload(device, vec![1.0, 2.0], 1, 2).unwrap();
        embed_backward(&table, &[1], &dx).unwrap();
    }
    let n = devices.len() as f32;
    assert_eq!(table.grad().unwrap(), [0.0, 0.0, n, 2.0 * n, 0.0, 0.0]);
}

/// Copies compared with plain loops.
#[test]
fn memory_of_every_size() {
    for (rows, cols) in [(0, 3), (1, 1), (1, 5), (4, 3), (130, 67)] {
        for device in devices() {
            let host = noise(rows * cols, 1);
            let at = |r: usize, c: usize| host[r * cols + c];
            let x = Rows::upload(device, host.clone(), rows, cols).unwrap();
            assert!(x.to_vec() == host && x.clone().into_vec() == host, "{rows}×{cols} on {device}");
            assert!(x.to_f64().iter().zip(&host).all(|(a, b)| *a == f64::from(*b)));
            assert!(Rows::zeros(device, rows, cols).to_vec() == vec![0.0; rows * cols]);
            let columns = cols / 3..cols;
            let some = x.columns(columns.clone()).unwrap();
            let want: Vec<f32> =
                (0..rows).flat_map(|r| columns.clone().map(move |c| (r, c))).map(|(r, c)| at(r, c)).collect();
            assert_eq!(some.to_vec(), want);
            let mut y = Rows::zeros(device, rows, cols);
            y.set_columns(cols / 3, &some).unwrap();
            let want = |r: usize, c: usize| if c < cols / 3 { 0.0 } else { at(r, c) };
            let all = |f: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
                (0..rows * cols).map(|i| f(i / cols, i % cols)).collect()
            };
            assert_eq!(y.to_vec(), all(&want));
            let half = rows / 2;
            y.set_rows(0, &x, half..rows).unwrap();
            let moved = |r: usize, c: usize| if r < rows - half { at(r + half, c) } else { want(r, c) };
            assert_eq!(y.to_vec(), all(&moved));
            y.add(&x).unwrap();
            y.scale(-0.5);
            let sum = |r: usize, c: usize| -0.5 * (at(r, c) + moved(r, c));
            assert_eq!(y.to_vec(), all(&sum));
            let squares: f64 = host.iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!((x.sum_of_squares() - squares).abs() <= 1e-6 * squares, "{rows}×{cols} on {device}");
            for other in devices() {
                assert!(x.to_device(other).to_vec() == host && x.to_device(other).device() == other);
            }
        }
    }
}

/// The own part of a cut weight is in main memory. The GPU has the values from their first use until they are released.
#[test]
fn a_cut_weight_is_on_the_gpu_while_it_is_complete() {
    let gpu = Card::emulated(Some(1 << 20));
    let free = || gpu.memory().unwrap()[0];
    let (w, before) = (param("w", &[64, 128], 1), free());
    w.set_trainable(false);
    let row = || embed(Device::Gpu(gpu), &w, &vec![63].into()).unwrap().to_vec();
    let (last, used) = (row(), before - free());
    assert!(used >= 4 * w.len(), "{used}");
    w.cut(0..4096).unwrap();
    assert_eq!(free(), before);
    for _ in 0..2 {
        w.complete();
        w.store_bytes(4096, bytemuck::cast_slice(&noise(64 * 128, 1)[4096..])).unwrap();
        assert_eq!((row(), before - free()), (last.clone(), used));
        w.release();
        assert_eq!(free(), before);
    }
}

#[test]
fn memory_operations() {
    for device in devices() {
        let x = Rows::upload(device, noise(12, 1), 4, 3).unwrap();
        let host = x.to_vec();
        let mut y = x.clone();
        y.scale(2.0);
        assert_eq!(x.to_vec(), host, "a clone is not written through");
        assert_eq!(y.columns(1..2).unwrap().to_vec(), [1, 4, 7, 10].map(|i| 2.0 * host[i]));
        y.set_columns(0, &x.columns(2..3).unwrap()).unwrap();
        y.set_rows(2, &x, 0..1).unwrap();
        assert_eq!(y.to_vec()[..3], [host[2], 2.0 * host[1], 2.0 * host[2]]);
        assert_eq!(y.to_vec()[6..9], host[..3]);
        assert_eq!(Rows::zeros(device, 0, 5).select(&Vec::new().into()).unwrap().dims(), (0, 5));
        assert!(x.select(&vec![4].into()).is_err() && x.columns(2..4).is_err() && x.row_range(3..5).is_err());
        let squares: f64 = host.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((x.sum_of_squares() - squares).abs() < 1e-9);
        // Another emulator is another device: a second GPU.
        for other in devices().into_iter().filter(|&other| other != device) {
            let error = y.clone().add(&x.to_device(other)).unwrap_err().to_string();
            assert!(error.contains(&other.to_string()) && error.contains("move it"), "{error}");
        }
    }
}

/// A block of bf16 weights: norms of an f32 residual give bf16, attention runs on tensor cores, and outputs and all
/// gradients equal those of the twin up to the rounding of bf16.
#[test]
fn a_block_of_bf16_weights_on_the_emulator() {
    let heads = AttentionHeads { q: 2, kv: 1, dim: 64 };
    let (t, h, i) = (21, 48, 40);
    let layout: omnigrpo_ops::Layout = AttentionLayout::groups(&[(9, vec![5, 7])]).into();
    let table = RopeTable::from_angles(t, 32, |row, angles| {
        angles.iter_mut().enumerate().for_each(|(i, a)| *a = row as f32 / (1.0 + i as f32));
    });
    let param = |name: &str, shape: &[usize], seed| {
        let scale = 1.0 / (shape[shape.len() - 1] as f32).sqrt();
        let values = noise(shape.iter().product(), seed).into_iter().map(|x| x * scale).collect();
        let param = Param::new(name, Part::Llm, shape, Values::F32(values).into_bf16()).unwrap();
        param.set_trainable(true);
        Arc::new(param)
    };
    let params = [
        param("norm", &[h], 1),
        param("qkv", &[heads.packed_width(), h], 2),
        param("qkv bias", &[heads.packed_width()], 3),
        param("o", &[h, heads.q_width()], 4),
        param("norm 2", &[h], 5),
        param("gate and up", &[2 * i, h], 6),
        param("down", &[h, i], 7),
    ];
    let [norm, qkv, bias, o, norm2, up, down] = params.clone();
    let norm = Norm::Rms { weight: norm, eps: 1e-6 };
    let norm2 = Norm::Rms { weight: norm2, eps: 1e-6 };
    let qkv = Linear::new(qkv, Some(bias)).unwrap();
    let [o, up, down] = [o, up, down].map(|weight| Linear::new(weight, None).unwrap());
    let run = |device: Device| {
        params.iter().for_each(|p| p.clear_grad());
        let pass = Pass::on(device);
        let packed = |layer: &Linear| PackedLinear::new(&[layer], &pass);
        let x = Rows::upload(device, noise(t * h, 8), t, h).unwrap();
        let (a, stats) = norm.forward(&x).unwrap();
        let mut packed_rows = packed(&qkv).forward(&a).unwrap();
        heads.rotate(&mut packed_rows, &table, false).unwrap();
        let (out, lse) = heads.forward(&packed_rows, &layout).unwrap();
        let y = packed(&o).forward_onto(&x, &out).unwrap();
        let (b, stats2) = norm2.forward(&y).unwrap();
        let gate_up = packed(&up).forward(&b).unwrap();
        let act = gate_up.swiglu().unwrap();
        let z = packed(&down).forward_onto(&y, &act).unwrap();
        let bytes = [&x, &a, &packed_rows, &out, &y, &gate_up, &z].map(|rows| rows.num_bytes() / rows.len());
        let dz = Rows::upload(device, noise(t * h, 9), t, h).unwrap();
        let mut dgate_up = gate_up;
        dgate_up.swiglu_back(&packed(&down).backward(&act, &dz).unwrap()).unwrap();
        let mut dy = dz;
        norm2.backward(&mut dy, &y, &stats2, &packed(&up).backward(&b, &dgate_up).unwrap()).unwrap();
        let dout = packed(&o).backward(&out, &dy).unwrap();
        let mut dqkv = heads.backward(&packed_rows, &out, &lse, &dout, &layout).unwrap();
        heads.rotate(&mut dqkv, &table, true).unwrap();
        norm.backward(&mut dy, &x, &stats, &packed(&qkv).backward(&a, &dqkv).unwrap()).unwrap();
        let gradients = params.iter().map(|p| p.with_grad(|g| g.unwrap().to_f64()));
        device.finish().unwrap();
        (bytes, [z.to_f64(), dy.to_f64()].into_iter().chain(gradients).collect::<Vec<_>>())
    };
    let card = card();
    let (bytes, got) = run(card);
    assert_eq!(bytes, [4, 2, 2, 2, 4, 2, 4]);
    let want = run(Device::Twin).1;
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let square = |x: f64| x * x;
        let far: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
        let size: f64 = want.iter().map(|b| square(*b)).sum();
        assert!((far / size).sqrt() < 1.2e-2, "result {i}: {}", (far / size).sqrt());
    }
    assert_eq!(run(card).1, got, "the same bits again");
}

#[test]
fn mismatches_are_errors_not_panics() {
    let rows = |n: usize, cols: usize| Rows::zeros(Device::Cpu, n, cols);
    let heads = AttentionHeads { q: 2, kv: 1, dim: 4 };
    // Three pairs do not fit into a head of four columns; they would rotate columns of the next head.
    let table = RopeTable::from_angles(3, 3, |_, _| ());
    let message = heads.rotate(&mut rows(3, 16), &table, false).unwrap_err().to_string();
    assert!(message.contains("heads of 4"), "{message}");
    // A layout of more rows than exist.
    let layout = AttentionLayout::causal(4).into();
    let message = heads.forward(&rows(3, 16), &layout).unwrap_err().to_string();
    assert!(message.contains("queries 0..4") && message.contains("of 3 rows"), "{message}");
    let (out, lse) = (rows(3, 8), rows(3, 2));
    assert!(heads.backward(&rows(3, 16), &out, &lse, &out, &layout).is_err());
    // Offsets that skip, decrease, or end early.
    let head = Param::new("head", Part::Llm, &[5, 2], Values::F32(vec![0.5; 10])).unwrap();
    let targets =
        |offsets: &[usize]| Targets { rows: vec![0, 1], offsets: offsets.to_vec(), tokens: vec![1, 2, 3] };
    for offsets in [&[0, 1][..], &[0, 1, 2], &[1, 2, 3], &[0, 4, 3], &[0, 2, 1, 3]] {
        let message =
            omnigrpo_ops::score(&rows(2, 2), &head, &targets(offsets), 1.0).unwrap_err().to_string();
        assert!(message.contains("3 tokens among 2 rows"), "{offsets:?}: {message}");
    }
    let good = targets(&[0, 1, 3]);
    let scores = omnigrpo_ops::score(&rows(2, 2), &head, &good, 1.0).unwrap();
    assert!(omnigrpo_ops::score_backward(&rows(2, 2), &head, &good, &scores, &[0.0; 3], None).is_ok());
    assert!(omnigrpo_ops::score_backward(&rows(1, 2), &head, &good, &scores, &[0.0; 3], None).is_err());
    // Scores, or a cache, on another device than the rows; a layer that the cache lacks, or has with other heads.
    let there = Rows::zeros(Device::Twin, 2, 2);
    let message = omnigrpo_ops::score_backward(&there, &head, &good, &scores, &[0.0; 3], None);
    assert!(message.unwrap_err().to_string().contains("one operand is on cpu"));
    let mut cache = GroupCache::new(Device::Twin, 2, heads, 3, 1, 1).unwrap();
    let twin = |n: usize| Rows::zeros(Device::Twin, n, 16);
    let message = cache.write_prompt(0, &rows(3, 16), heads).unwrap_err().to_string();
    assert!(message.contains("one operand is on cpu, the others are on twin"), "{message}");
    let message = cache.write_prompt(2, &twin(3), heads).unwrap_err().to_string();
    assert!(message.contains("layer 2") && message.contains("a cache of 2"), "{message}");
    cache.write_prompt(1, &twin(3), heads).unwrap();
    let other = AttentionHeads { q: 2, kv: 3, dim: 2 };
    for (heads, layer, x) in [(heads, 0, rows(1, 16)), (heads, 2, twin(1)), (other, 1, twin(1))] {
        let mut group = DecodeBatch::new(vec![DecodeRows { cache: &mut cache, slots: vec![0] }]);
        assert!(
            heads.attend_cached(&x, layer, &mut group, Turn::default()).is_err(),
            "layer {layer} of {heads:?}"
        );
    }
    // Weights that are only outlines.
    let outline = |shape: &[usize]| Arc::new(Param::outline("w", Part::Llm, shape, ParamDtype::F32));
    let (x, matrix, vector) = (rows(2, 2), outline(&[5, 2]), outline(&[2]));
    let ids = Arc::new(RowMix::of_ids([Some(1), None]).into());
    let depthwise = Tape::off().depthwise3(&Var::constant(x.clone()), &outline(&[2, 1, 3, 3]), [1, 2]);
    for message in [
        omnigrpo_ops::score(&x, &matrix, &good, 1.0).unwrap_err(),
        embed(Device::Cpu, &matrix, &vec![1].into()).unwrap_err(),
        Norm::Rms { weight: Arc::clone(&vector), eps: 0.0 }.forward(&x).unwrap_err(),
        x.scaled_onto(&x, &vector).unwrap_err(),
        Tape::off().add_rows(&Var::constant(x.clone()), &matrix, &ids).unwrap_err(),
        depthwise.unwrap_err(),
    ] {
        assert!(message.to_string().contains("only its outline is loaded"), "{message}");
    }
}

/// Operations of several arrays refuse one on another device, at each position.
#[test]
fn rows_of_another_device_are_an_error() {
    let [one, two] = [card(), card()];
    let [cpu, twin] = [Device::Cpu, Device::Twin];
    let pairs = [[cpu, twin], [twin, cpu], [cpu, one], [one, cpu], [one, two]];
    // A card that is not emulated is the same each time.
    pairs.into_iter().filter(|[own, other]| own != other).for_each(mixed_devices);
}

fn mixed_devices([own, other]: [Device; 2]) {
    let heads = AttentionHeads { q: 2, kv: 1, dim: 2 };
    let param = |shape: &[usize]| {
        let values = Values::F32(vec![0.5; shape.iter().product()]);
        Arc::new(Param::new("w", Part::Llm, shape, values).unwrap())
    };
    let layer = Linear::new(param(&[4, 4]), None).unwrap();
    let pass = Pass::on(own);
    let linear = PackedLinear::new(&[&layer], &pass);
    let experts = ExpertLinear::new(param(&[4, 4, 4])).unwrap();
    let (norm, scale, table) = (Norm::Rms { weight: param(&[4]), eps: 1e-6 }, param(&[4]), param(&[4, 4]));
    let layout: omnigrpo_ops::Layout = AttentionLayout::causal(4).into();
    let targets = Targets { rows: vec![0, 1, 2, 3], offsets: vec![0, 1, 1, 1, 1], tokens: vec![2] };
    let rows = |device: Device, cols: usize| Rows::zeros(device, 4, cols);
    let scores = |device: Device| omnigrpo_ops::score(&rows(device, 4), &table, &targets, 1.0).unwrap();
    type Case<'a> = (&'a str, usize, Box<dyn Fn(&dyn Fn(usize) -> Device) -> omnigrpo_ops::Result<()> + 'a>);
    let cases: Vec<Case> = vec![
        ("add", 2, Box::new(|on| rows(on(0), 4).add(&rows(on(1), 4)))),
        ("set_columns", 2, Box::new(|on| rows(on(0), 4).set_columns(1, &rows(on(1), 2)))),
        ("set_rows", 2, Box::new(|on| rows(on(0), 4).set_rows(1, &rows(on(1), 4), 0..2))),
        ("concat", 2, Box::new(|on| Rows::concat(&[&rows(on(0), 4), &rows(on(1), 4)]).map(drop))),
        ("activation", 2, Box::new(|on| rows(on(0), 4).activation_back(&rows(on(1), 4), Activation::Silu))),
        ("swiglu", 2, Box::new(|on| rows(on(0), 4).swiglu_back(&rows(on(1), 2)))),
        ("scale", 2, Box::new(|on| rows(on(0), 4).scaled_onto(&rows(on(1), 4), &scale).map(drop))),
        ("scale back", 2, Box::new(|on| rows(on(0), 4).scaled_onto_back(&rows(on(1), 4), &scale).map(drop))),
        (
            "experts",
            2,
            Box::new(|on| {
                let routes = Routes::choose(&rows(on(0), 4), 1, Order::PerRow)?;
                if matches!(on(0), Device::Gpu(_)) || on(0) == on(1) {
                    return experts.forward(&rows(on(1), 4), &routes, Order::PerRow).map(drop);
                }
                // The host knows its routes, so they serve every device.
                experts.forward(&rows(on(1), 4), &routes, Order::PerRow)?;
                Rows::zeros(on(0), 1, 1).add(&Rows::zeros(on(1), 1, 1))
            }),
        ),
        ("linear", 2, Box::new(|on| linear.forward_onto(&rows(on(0), 4), &rows(on(1), 4)).map(drop))),
        ("linear back", 2, Box::new(|on| linear.backward(&rows(on(0), 4), &rows(on(1), 4)).map(drop))),
        (
            "experts back",
            2,
            Box::new(|on| {
                let routes = Routes::choose(&rows(on(0), 4), 1, Order::Blocked)?;
                experts.backward(&rows(on(0), 4), &rows(on(1), 4), &routes).map(drop)
            }),
        ),
        (
            "weigh",
            2,
            Box::new(|on| {
                let routes = Routes::choose(&rows(on(0), 4), 1, Order::Blocked)?;
                routes.weigh(&rows(on(0), 4), &rows(on(1), 4)).map(drop)
            }),
        ),
        (
            "weigh back",
            3,
            Box::new(|on| {
                let routes = Routes::choose(&rows(own, 4), 1, Order::Blocked)?;
                routes.weigh_back(&rows(on(0), 4), &rows(on(1), 4), &rows(on(2), 4)).map(drop)
            }),
        ),
        (
            "norm",
            4,
            Box::new(|on| {
                let stats = Rows::zeros(on(2), 1, 4);
                norm.backward(&mut rows(on(0), 4), &rows(on(1), 4), &stats, &rows(on(3), 4))
            }),
        ),
        (
            "attention",
            4,
            Box::new(|on| {
                let (qkv, out) = (rows(on(0), heads.packed_width()), rows(on(1), 4));
                heads.backward(&qkv, &out, &rows(on(2), 2), &rows(on(3), 4), &layout).map(drop)
            }),
        ),
        (
            "score",
            3,
            Box::new(|on| {
                let omnigrpo_ops::Scores { logprobs, .. } = scores(own);
                let of = |i: usize| scores(on(i));
                let scores = omnigrpo_ops::Scores {
                    logprobs,
                    entropies: of(1).entropies,
                    lse: of(2).lse,
                    temperature: 1.0,
                    top: Vec::new(),
                };
                omnigrpo_ops::score_backward(&rows(on(0), 4), &table, &targets, &scores, &[0.0], None)
                    .map(drop)
            }),
        ),
        (
            "cache",
            2,
            Box::new(|on| {
                let mut cache = GroupCache::new(on(0), 1, heads, 4, 1, 1).unwrap();
                cache.write_prompt(0, &rows(on(1), heads.packed_width()), heads)
            }),
        ),
        (
            "attention over a cache",
            2,
            Box::new(|on| {
                let mut cache = GroupCache::new(on(0), 1, heads, 4, 4, 1).unwrap();
                cache.write_prompt(0, &rows(on(0), heads.packed_width()), heads)?;
                let group = DecodeRows { cache: &mut cache, slots: vec![0, 1, 2, 3] };
                let mut batch = DecodeBatch::new(vec![group]);
                heads
                    .attend_cached(&rows(on(1), heads.packed_width()), 0, &mut batch, Turn::default())
                    .map(drop)
            }),
        ),
        (
            "tokens",
            2,
            Box::new(|on| {
                let mut cache = GroupCache::new(on(0), 1, heads, 4, 1, 1).unwrap();
                cache.write_prompt(0, &rows(on(0), heads.packed_width()), heads)?;
                let groups = vec![DecodeRows { cache: &mut cache, slots: vec![0] }];
                let mut next = omnigrpo_ops::NextTokens::new(on(1), Sampler::default(), 3);
                let rope = Arc::new(RopeTable::from_angles(1, 1, |_, out| out.fill(0.0)));
                let from = [DrawFrom { seen: [&[], &[]], forbids: false, uniform: 0.5 }];
                let drawn = next.next(vec![0], rope, groups, &from, |pass| {
                    pass.draw(Rows::zeros(on(1), pass.ids.len(), 3))
                });
                drawn.map(drop)
            }),
        ),
        (
            "gate",
            2,
            Box::new(|on| {
                let [x, gate] = [0, 1].map(|i| Var::constant(rows(on(i), 4)));
                Tape::off().gate(&x, &gate).map(drop)
            }),
        ),
        (
            "blend",
            2,
            Box::new(|on| {
                let (x, logits) = (rows(on(0), 4), Rows::zeros(on(1), 1, 2));
                Tape::off().blend(&Var::constant(x), &Var::constant(logits)).map(drop)
            }),
        ),
        (
            "convolution",
            2,
            Box::new(|on| {
                let mut tape = Tape::recording(false);
                let x = tape.input(rows(on(0), 4));
                let patches = Arc::new(Patches { sources: vec![0, 1, 2, 3], taps: 1 });
                let y = tape.convolution(&x, &layer, &patches)?;
                tape.backward(&y, rows(on(1), 4)).map(drop)
            }),
        ),
        (
            "tape",
            2,
            Box::new(|on| {
                let mut tape = Tape::recording(false);
                let x = tape.input(rows(on(0), 4));
                let y = tape.norm(&x, &norm)?;
                tape.backward(&y, rows(on(1), 4)).map(drop)
            }),
        ),
    ];
    for (name, count, run) in &cases {
        let alone = run(&|_| own);
        assert!(alone.is_ok(), "{name} on {own}: {alone:?}");
        for place in 0..*count {
            let done = run(&|i| if i == place { other } else { own });
            assert!(
                matches!(done, Err(omnigrpo_ops::Error::Device { .. })),
                "{name}, operand {place} on {other}, the others on {own}: {done:?}"
            );
        }
    }
}

/// One uniform number draws the same token on every device.
#[test]
fn tokens_are_drawn() {
    let plain = Sampler { forbidden: &[5, 6], ..Sampler::default() };
    let ways = [
        plain,
        Sampler { temperature: 0.0, ..plain },
        Sampler { temperature: 0.7, scoring_temperature: 1.3, ..plain },
        Sampler { top_k: 7, ..plain },
        Sampler { top_p: 0.6, ..plain },
        Sampler { min_p: 0.1, repetition_penalty: 1.7, ..plain },
        Sampler { temperature: 1.4, top_k: 30, top_p: 0.9, min_p: 0.02, repetition_penalty: 0.8, ..plain },
    ];
    let seen: Vec<u32> = (0..40).step_by(3).collect();
    for vocab in [1, 2, 37, 1500] {
        let numbers: Vec<f32> = noise(5 * vocab, 3).iter().map(|x| 5.0 * x).collect();
        for how in &ways {
            let draws = |device: Device| {
                let logits = Rows::upload(device, numbers.clone(), 5, vocab).unwrap();
                let from = [0.0, 0.123, 0.5, 0.789, 0.999].map(|uniform| DrawFrom {
                    seen: [&seen, &[1]],
                    forbids: uniform > 0.7,
                    uniform,
                });
                logits.draw(how, &from).unwrap()
            };
            let expected = draws(Device::Twin);
            for device in devices() {
                for (got, want) in draws(device).into_iter().zip(&expected) {
                    let (got, want) = (got.unwrap(), want.unwrap());
                    assert_eq!(got.id, want.id, "{device}, {vocab}, {how:?}");
                    for (a, b) in [
                        (got.logprob, want.logprob),
                        (got.sampler_logprob, want.sampler_logprob),
                        (got.entropy, want.entropy),
                    ] {
                        assert!(
                            (a - b).abs() <= 1e-5 * (1.0 + b.abs()),
                            "{device}, {vocab}, {how:?}: {a} for {b}"
                        );
                    }
                }
            }
        }
    }
    for device in devices() {
        let draw = |numbers: [f32; 3], forbidden: &[u32]| {
            let logits = Rows::upload(device, numbers.to_vec(), 1, 3).unwrap();
            let from = DrawFrom { seen: [&[], &[]], forbids: true, uniform: 0.5 };
            logits.draw(&Sampler { forbidden, ..plain }, &[from]).unwrap()[0]
        };
        assert_eq!(draw([0.0, f32::NAN, 1.0], &[]), None, "{device}");
        assert_eq!(draw([0.0, f32::INFINITY, 1.0], &[]), None, "{device}");
        assert_eq!(draw([0.0, 2.0, 1.0], &[0, 1, 2]), None, "{device}");
        let only = draw([0.0, 2.0, -200.0], &[1]).unwrap();
        assert_eq!((only.id, only.sampler_logprob), (0, 0.0), "{device}");
        let two = Rows::upload(device, vec![0.0; 6], 2, 3).unwrap();
        assert!(two.draw(&plain, &[]).unwrap_err().to_string().contains("0 draws from 2 rows"));
    }
}

/// Groups of sequences in one stream, with their number of rows: a chunk has 64 rows.
fn sequences() -> Vec<(Arc<omnigrpo_ops::Layout>, usize)> {
    let groups = [vec![(1, vec![])], vec![(3, vec![2, 0, 1]), (2, vec![])], vec![(66, vec![3, 65])]];
    let of = |groups: &Vec<(usize, Vec<usize>)>| {
        let rows = groups.iter().map(|(prompt, own)| prompt + own.iter().sum::<usize>()).sum();
        (Arc::new(AttentionLayout::groups(groups).into()), rows)
    };
    groups.iter().map(of).collect()
}

#[test]
fn causal_convolutions() {
    for (layout, t) in sequences() {
        for (c, taps) in [(1, 1), (5, 4), (33, 3)] {
            let weight = param("conv", &[c, 1, taps], 1);
            let layer = CausalConv::new(Arc::clone(&weight)).unwrap();
            let name = format!("causal convolution of {t}×{c} under {taps} taps");
            check(name, &[(t, c)], &[&weight], |tape, _, x| {
                let (layer, layout) =
                    ((layer.clone(), layer.clone()), (Arc::clone(&layout), Arc::clone(&layout)));
                let forward = move |[x]: [&Rows; 1]| layer.0.forward(x, &layout.0);
                let backward = move |[x]: [&Rows; 1], dy: &Rows| Ok([layer.1.backward(x, dy, &layout.1)?]);
                tape.apply(Of(forward, backward), [&x[0]])
            });
        }
    }
}

#[test]
fn gates_of_the_delta_rule() {
    for (t, heads) in [(1, 1), (5, 3), (70, 16)] {
        let layer = DeltaGates { a_log: param("a", &[heads], 1), dt_bias: param("dt", &[heads], 2) };
        let params = [&layer.a_log, &layer.dt_bias];
        check(format!("{heads} gates of {t} rows"), &[(t, 2 * heads)], &params, |tape, _, x| {
            let (own, again) = (layer.clone(), layer.clone());
            let forward = move |[x]: [&Rows; 1]| own.forward(x);
            let backward =
                move |[x]: [&Rows; 1], dy: &Rows| Ok([again.backward(x, &again.forward(x)?, dy)?]);
            tape.apply(Of(forward, backward), [&x[0]])
        });
    }
}

/// Gates whose decays are neither 0 nor 1, from rows of noise.
fn gates_of(rows: &Rows, heads: usize) -> Rows {
    let mut gates = rows.clone();
    let strong = rows.columns(0..heads).unwrap();
    let mut weaker = strong.clone();
    weaker.scale(0.5);
    gates.set_columns(0, &weaker).unwrap();
    gates
}

#[test]
fn delta_rules() {
    for (layout, t) in sequences() {
        for heads in [
            DeltaHeads { key: 1, value: 1, key_dim: 1, value_dim: 1 },
            DeltaHeads { key: 1, value: 2, key_dim: 6, value_dim: 5 },
            DeltaHeads { key: 2, value: 4, key_dim: 4, value_dim: 7 },
        ] {
            let inputs = [(t, heads.packed_width()), (t, 2 * heads.value)];
            check(format!("{heads:?} over {t} rows"), &inputs, &[], |tape, _, x| {
                let (own, again) = (Arc::clone(&layout), Arc::clone(&layout));
                let forward = move |[qkv, gates]: [&Rows; 2]| {
                    Ok(heads.forward(qkv, &gates_of(gates, heads.value), &own)?.0)
                };
                let backward = move |[qkv, gates]: [&Rows; 2], dy: &Rows| {
                    let gates = gates_of(gates, heads.value);
                    let states = heads.forward(qkv, &gates, &again)?.1;
                    let [dqkv, dgates] = heads.backward(qkv, &gates, &states, dy, &again)?;
                    Ok([dqkv, gates_of(&dgates, heads.value)])
                };
                tape.apply(Of(forward, backward), [&x[0], &x[1]])
            });
        }
    }
}

#[test]
fn gated_norms() {
    for (t, heads, d) in [(0, 2, 3), (1, 1, 1), (5, 3, 7), (70, 2, 33)] {
        let norm = GatedNorm { weight: param("w", &[d], 1), eps: 1e-2 };
        let (n, params) = (heads * d, [&norm.weight]);
        check(format!("gated norm of {t}×{heads}×{d}"), &[(t, n), (t, n)], &params, |tape, _, x| {
            let (own, again) = (norm.clone(), norm.clone());
            let forward = move |[x, gate]: [&Rows; 2]| Ok(own.forward(x, gate)?.0);
            let backward = move |[x, gate]: [&Rows; 2], dy: &Rows| {
                let stats = again.forward(x, gate)?.1;
                again.backward(x, gate, &stats, dy)
            };
            tape.apply(Of(forward, backward), [&x[0], &x[1]])
        });
    }
}

/// Decoding continues the state of a prompt: rows of several slots in any order, and several rows of one slot, equal the complete
/// stream. No completion changes another one.
#[test]
fn decoding_continues_the_state_of_a_prompt() {
    let heads = DeltaHeads { key: 1, value: 2, key_dim: 6, value_dim: 20 };
    let (prompt, own, taps, layers) = (66, 5, 4, 2);
    let (c, n) = (heads.packed_width(), 2 * heads.value);
    let layer = CausalConv::new(param("conv", &[c, 1, taps], 1)).unwrap();
    let t = prompt + 3 * own;
    let layout: omnigrpo_ops::Layout = AttentionLayout::groups(&[(prompt, vec![own; 3])]).into();
    let sizes = StateSizes::new(c, taps, heads);
    let attention = AttentionHeads { q: 1, kv: 1, dim: 2 };
    for device in devices() {
        let cache = GroupCache::new(device, 1, attention, prompt, 3, own).unwrap();
        let mut cache = cache.with_states(layers, sizes).unwrap();
        let x = Rows::upload(device, noise(t * c, 2), t, c).unwrap();
        let gates = gates_of(&Rows::upload(device, noise(t * n, 3), t, n).unwrap(), heads.value);
        let whole = |x: &Rows, gates: &Rows, layout: &omnigrpo_ops::Layout| {
            let qkv = layer.forward(x, layout).unwrap();
            (qkv.clone(), heads.forward(&qkv, gates, layout).unwrap().0)
        };
        let expected = whole(&x, &gates, &layout);
        let first = |rows: &Rows| rows.row_range(0..prompt).unwrap();
        let alone: omnigrpo_ops::Layout = AttentionLayout::causal(prompt).into();
        let qkv = layer.forward(&first(&x), &alone).unwrap();
        let (_, kept) = heads.forward_prompt(&qkv, &first(&gates)).unwrap();
        for index in 0..layers {
            cache.write_prompt_state(index, &first(&x), &kept).unwrap();
        }
        let row_of = |slot: usize, step: usize| prompt + slot * own + step;
        let near = |got: &Rows, rows: Range<usize>, want: &Rows| {
            let want = want.row_range(rows.clone()).unwrap().to_f64();
            assert!(far(&got.to_f64(), &want) < 1e-5, "{device}, rows {rows:?}");
        };
        // Slots 2 and 0 decode three rows side by side; then slot 0 appends two rows at once, and slot 1 all of its rows.
        for step in 0..3 {
            let slots = vec![2, 0];
            let pick = |rows: &Rows| {
                let of = |slot: &usize| rows.row_range(row_of(*slot, step)..row_of(*slot, step) + 1).unwrap();
                let rows: Vec<Rows> = slots.iter().map(of).collect();
                Rows::concat(&rows.iter().collect::<Vec<_>>()).unwrap()
            };
            let (own_x, own_gates) = (pick(&x), pick(&gates));
            let mut batch = DecodeBatch::new(vec![DecodeRows { cache: &mut cache, slots: slots.clone() }]);
            for index in 0..layers {
                let qkv = layer.forward_cached(&own_x, index, &mut batch).unwrap();
                let out = heads.forward_cached(&qkv, &own_gates, index, &mut batch).unwrap();
                for (i, &slot) in slots.iter().enumerate() {
                    let row = row_of(slot, step)..row_of(slot, step) + 1;
                    near(&qkv.row_range(i..i + 1).unwrap(), row.clone(), &expected.0);
                    near(&out.row_range(i..i + 1).unwrap(), row, &expected.1);
                }
            }
            batch.advance();
        }
        for (slot, from) in [(0, 3), (1, 0)] {
            let rows = row_of(slot, from)..row_of(slot, own);
            let (own_x, own_gates) =
                (x.row_range(rows.clone()).unwrap(), gates.row_range(rows.clone()).unwrap());
            let qkv = layer.forward_extended(&own_x, 1, &mut cache, slot).unwrap();
            let out = heads.forward_extended(&qkv, &own_gates, 1, &mut cache, slot).unwrap();
            near(&qkv, rows.clone(), &expected.0);
            near(&out, rows, &expected.1);
        }
        // A layer without memory, and rows of another width, are errors.
        let mut batch = DecodeBatch::new(vec![DecodeRows { cache: &mut cache, slots: vec![0] }]);
        let one = x.row_range(0..1).unwrap();
        assert!(layer.forward_cached(&one, layers, &mut batch).unwrap_err().to_string().contains("layer 2"));
        assert!(
            layer.forward_cached(&first(&x), 0, &mut batch).unwrap_err().to_string().contains("for 1 slots")
        );
    }
}

#[test]
fn sizes_of_recurrent_layers_are_checked() {
    let heads = DeltaHeads { key: 2, value: 3, key_dim: 4, value_dim: 4 };
    let of = |t, c| Rows::zeros(Device::Cpu, t, c);
    let layout: omnigrpo_ops::Layout = AttentionLayout::causal(3).into();
    // Three value heads cannot share two key heads.
    assert!(heads.forward(&of(3, heads.packed_width()), &of(3, 6), &layout).is_err());
    let heads = DeltaHeads { value: 4, ..heads };
    let qkv = of(3, heads.packed_width());
    assert!(heads.forward(&qkv, &of(3, 8), &layout).is_ok());
    assert!(heads.forward(&qkv, &of(2, 8), &layout).is_err());
    let full: omnigrpo_ops::Layout = AttentionLayout::full_blocks(&[3]).into();
    let message = heads.forward(&qkv, &of(3, 8), &full).unwrap_err().to_string();
    assert!(message.contains("gated delta rule: recurrent layer: query rows 0..3"), "{message}");
    for shape in [vec![4, 2], vec![4, 1, 9], vec![4, 2, 3]] {
        assert!(CausalConv::new(param("conv", &shape, 1)).is_err(), "{shape:?}");
    }
}

/// Returns rows like the output of a norm: in bf16 on a GPU if `low`.
fn normed(device: Device, low: bool, rows: usize, cols: usize) -> Rows {
    let x = Rows::upload(device, noise(rows * cols, 4), rows, cols).unwrap();
    let values = Values::F32(vec![1.0; cols]);
    let values = if low { values.into_bf16() } else { values };
    let weight = Arc::new(Param::new("norm", Part::Llm, &[cols], values).unwrap());
    Norm::Rms { weight, eps: 1e-6 }.forward(&x).unwrap().0
}

fn plain_step(master: bool) -> Step {
    Step {
        lr: 0.1,
        betas: [0.9, 0.99],
        eps: 1e-3,
        weight_decay: 0.1,
        grad_scale: 1.0,
        master,
        random: false,
        eight_bits: false,
        offload: false,
    }
}

/// The weights of layers with one input become neighbours at the first product of many rows, which is then one for all of them. They
/// stay neighbours while steps change them. Weights whose rows would not be aligned keep their products.
#[test]
fn layers_with_one_input_are_one_product() {
    let device = card();
    let Device::Gpu(gpu) = device else { unreachable!("the card of tests") };
    let kernels = || gpu.traffic().map_or(0, |[_, _, kernels]| kernels);
    for (low, has_bias, k, sizes) in [
        (false, true, 8, [16, 8, 24]),
        (true, true, 8, [16, 8, 24]),
        // The biases begin at no multiple of 16 bytes.
        (true, true, 8, [4, 12, 8]),
        (true, false, 16, [8, 8, 8]),
        (true, true, 7, [3, 5, 2]),
    ] {
        let what = format!("bf16: {low}, biases: {has_bias}, {sizes:?} of {k}");
        let weight = |shape: &[usize], seed| {
            let values = Values::F32(noise(shape.iter().product(), seed));
            let values = if low { values.into_bf16() } else { values };
            let param = Arc::new(Param::new("w", Part::Llm, shape, values).unwrap());
            param.set_trainable(true);
            param
        };
        let layers = [0, 1, 2].map(|i| {
            let bias = has_bias.then(|| weight(&[sizes[i]], 10 + i as u32));
            Linear::new(weight(&[sizes[i], k], i as u32), bias).unwrap()
        });
        let (pass, rows, width) = (Pass::on(device), 5, sizes.iter().sum::<usize>());
        let x = normed(device, low, rows, k);
        let dy = noise(rows * width, 5);
        // A frozen copy, in other memory: its output, and the gradient of its input given its columns of `dy`.
        let alone = |layer: &Linear, first: usize| {
            let copy = |param: &Arc<Param>| Arc::new(param.frozen_copy());
            let layer = Linear::new(copy(layer.weight()), layer.bias().map(copy)).unwrap();
            let packed = PackedLinear::new(&[&layer], &pass);
            let own = dy.chunks(width).flat_map(|row| &row[first..first + layer.n()]).copied().collect();
            let dy = Rows::upload(device, own, rows, layer.n()).unwrap();
            [packed.forward(&x).unwrap(), packed.backward(&x, &dy).unwrap()].map(|rows| rows.to_f64())
        };
        let packed = PackedLinear::new(&layers.iter().collect::<Vec<_>>(), &pass);
        let is_joined = k % 8 == 0;
        let mut moments: Vec<Moments> =
            layers.iter().flat_map(Linear::params).map(|_| Moments::default()).collect();
        for step in 0..3 {
            let before = kernels();
            let y = packed.forward(&x).unwrap();
            let count = kernels() - before;
            // The first product copies weights.
            if (step > 0 || !is_joined) && gpu.ordinal().is_none() {
                assert_eq!(count, if has_bias { 3 } else { 0 }, "{what}, step {step}");
            }
            let dx = packed.backward(&x, &Rows::upload(device, dy.clone(), rows, width).unwrap()).unwrap();
            let size = if low && is_joined { 2 } else { 4 };
            assert_eq!(dx.num_bytes(), size * dx.len(), "{what}");
            let (y, dx) = (y.to_f64(), dx.to_f64());
            let (mut first, mut sum) = (0, vec![0.0; rows * k]);
            for layer in &layers {
                let [own, of_input] = alone(layer, first);
                let got: Vec<f64> =
                    y.chunks(width).flat_map(|row| &row[first..first + layer.n()]).copied().collect();
                // Other sizes may have other kernels on a card.
                let bound = if gpu.ordinal().is_none() { 0.0 } else { 1e-2 };
                assert!(got.iter().zip(&own).all(|(a, b)| (a - b).abs() <= bound), "{what}, step {step}");
                sum.iter_mut().zip(of_input).for_each(|(sum, x)| *sum += x);
                first += layer.n();
            }
            let bound = if low { 0.03 } else { 1e-5 };
            assert!(dx.iter().zip(&sum).all(|(a, b)| (a - b).abs() <= bound), "{what}: {dx:?} {sum:?}");
            for (param, moments) in layers.iter().flat_map(Linear::params).zip(&mut moments) {
                assert!(param.adamw(moments, &plain_step(low)).unwrap());
                param.clear_grad();
            }
        }
        device.finish().unwrap();
    }
}

/// A norm's gradient leaves the gradient of the stream in bf16, too. What is added to the stream afterwards is in what layers read.
#[test]
fn layers_read_the_present_gradient_of_a_stream() {
    let device = card();
    let (rows, cols, n) = (6, 16, 8);
    let bf16s = |shape: &[usize], seed| {
        let values = Values::F32(noise(shape.iter().product(), seed)).into_bf16();
        Arc::new(Param::new("w", Part::Llm, shape, values).unwrap())
    };
    let norm = Norm::Rms { weight: bf16s(&[cols], 1), eps: 1e-6 };
    let layer = Linear::new(bf16s(&[cols, n], 2), None).unwrap();
    let packed = PackedLinear::new(&[&layer], &Pass::on(device));
    let input = normed(device, true, rows, n);
    let upload = |seed| Rows::upload(device, noise(rows * cols, seed), rows, cols).unwrap();
    let (x, dy) = (upload(3), upload(5));
    let stats = norm.forward(&x).unwrap().1;
    let mut dx = upload(6);
    norm.backward(&mut dx, &x, &stats, &dy).unwrap();
    let back = |dx: &Rows| packed.backward(&input, dx).unwrap().to_f64();
    let again = |dx: &Rows| back(&Rows::upload(device, dx.to_vec(), rows, cols).unwrap());
    let first = back(&dx);
    assert_eq!(first, again(&dx));
    let shared = dx.clone();
    dx.add(&upload(7)).unwrap();
    assert_eq!(back(&dx), again(&dx));
    assert_ne!(back(&dx), first);
    assert_eq!(back(&shared), first);
    device.finish().unwrap();
}
