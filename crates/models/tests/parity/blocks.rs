//! The one block in every shape that a family uses: its gradients are central differences on the f64 twin, every device
//! agrees with the twin, and every way to keep activations gives the same bits.

use std::sync::Arc;

use omnigrpo_models::{Block, BlockPass, Experts, Mixer, Mlp, NormOrder, QkNorm};
use omnigrpo_ops::{
    Activation, Adapter, AttentionHeads, AttentionLayout, Device, Dropout, ExpertLinear, Index, Layout,
    Linear, Norm, Param, Part, Pass, RopeTable, Rows, Tape, Values, Var,
};

use omnigrpo_testkit::differences::{STEP, check_weights, signs, slope, snap};

/// Rows of the stream.
const T: usize = 9;

#[derive(Clone)]
struct Case {
    what: &'static str,
    width: usize,
    heads: AttentionHeads,
    order: NormOrder,
    rms: bool,
    qk_norm: Option<Together>,
    scales: bool,
    /// Whether queries, keys and values are one layer.
    fused: bool,
    /// Whether queries, keys, values, attention's output layer, the feed-forward layer have biases.
    biases: [bool; 5],
    /// `None` for SwiGLU.
    plain: Option<Activation>,
    /// Experts, and how many of them a row uses.
    experts: Option<(usize, usize)>,
    /// Whether the experts replace the feed-forward layer.
    alone: bool,
    /// Axes of the rotation.
    axes: usize,
    layout: AttentionLayout,
    rows: Option<Vec<usize>>,
    /// Rank of adapters on every layer, and the share of their inputs that they drop.
    lora: Option<(usize, f32)>,
}

#[derive(Clone, Copy)]
struct Together(bool);

/// Returns Qwen2's decoder; the other cases differ from it.
fn qwen2() -> Case {
    Case {
        what: "qwen2",
        width: 12,
        heads: AttentionHeads { q: 4, kv: 2, dim: 4 },
        order: NormOrder::Pre,
        rms: true,
        qk_norm: None,
        scales: false,
        fused: false,
        biases: [true, true, true, false, false],
        plain: None,
        experts: None,
        alone: false,
        axes: 1,
        layout: AttentionLayout::causal(T),
        rows: None,
        lora: None,
    }
}

/// SigLIP's tower.
fn siglip() -> Case {
    Case {
        what: "siglip",
        heads: AttentionHeads { q: 3, kv: 3, dim: 4 },
        rms: false,
        biases: [true; 5],
        plain: Some(Activation::GeluTanh),
        axes: 0,
        layout: AttentionLayout::full_blocks(&[4, 5]),
        ..qwen2()
    }
}

fn cases() -> Vec<Case> {
    let groups = AttentionLayout::groups(&[(3, vec![2, 1]), (2, vec![1])]);
    let windows = AttentionLayout::full_blocks(&[4, 2, 3]);
    let rows = Some(vec![2, 3, 5, 7]);
    let qwen3 = Case { what: "qwen3", qk_norm: Some(Together(false)), biases: [false; 5], ..qwen2() };
    let llama = Case { what: "llama", biases: [false; 5], ..qwen2() };
    let intern = Case {
        what: "intern, layer norms",
        scales: true,
        fused: true,
        plain: Some(Activation::GeluErf),
        ..siglip()
    };
    let bert = Case { what: "bert", order: NormOrder::Post, plain: Some(Activation::GeluErf), ..siglip() };
    let lora = |what, case: Case, rate| Case { what, lora: Some((2, rate)), ..case };
    let mut cases = vec![
        qwen2(),
        Case { what: "qwen2, groups", layout: groups.clone(), ..qwen2() },
        Case { what: "qwen2, chosen rows", layout: groups.clone(), rows: rows.clone(), ..qwen2() },
        Case { what: "qwen2-vl, three axes", axes: 3, layout: groups.clone(), ..qwen2() },
        qwen3.clone(),
        Case { what: "qwen3, chosen rows", layout: groups.clone(), rows: rows.clone(), ..qwen3.clone() },
        llama.clone(),
        Case { what: "llama, all four biases", biases: [true, true, true, true, false], ..llama.clone() },
        Case { what: "llama, one key head", heads: AttentionHeads { q: 3, kv: 1, dim: 6 }, ..llama.clone() },
        siglip(),
        Case { what: "whisper", biases: [true, false, true, true, true], ..siglip() },
        Case {
            what: "clip, causal",
            plain: Some(Activation::QuickGelu),
            layout: AttentionLayout::causal(T),
            ..siglip()
        },
        bert.clone(),
        Case {
            what: "bert, scaled, chosen rows",
            scales: true,
            rows: rows.clone(),
            layout: windows.clone(),
            ..bert.clone()
        },
        intern.clone(),
        Case {
            what: "intern, rms norms",
            rms: true,
            qk_norm: Some(Together(true)),
            biases: [false, false, false, true, true],
            ..intern.clone()
        },
        Case {
            what: "qwen2-vl's tower",
            fused: true,
            axes: 2,
            plain: Some(Activation::QuickGelu),
            layout: windows.clone(),
            ..siglip()
        },
        Case {
            what: "qwen2.5-vl's tower",
            rms: true,
            fused: true,
            axes: 2,
            plain: None,
            layout: windows,
            ..siglip()
        },
        Case { what: "aria", experts: Some((5, 2)), ..llama.clone() },
        Case { what: "aria, groups", experts: Some((5, 2)), layout: groups.clone(), ..llama.clone() },
        Case {
            what: "aria, chosen rows, most experts idle",
            experts: Some((16, 1)),
            layout: groups.clone(),
            rows: rows.clone(),
            ..llama.clone()
        },
        Case { what: "all of the experts", experts: Some((3, 3)), ..llama.clone() },
        Case {
            what: "qwen3, experts alone",
            experts: Some((5, 2)),
            alone: true,
            layout: groups.clone(),
            ..qwen3.clone()
        },
        Case {
            what: "qwen3, experts alone, chosen rows",
            experts: Some((5, 3)),
            alone: true,
            layout: groups.clone(),
            rows: rows.clone(),
            ..qwen3.clone()
        },
        Case {
            what: "experts alone, scaled, norms behind",
            experts: Some((4, 2)),
            alone: true,
            scales: true,
            ..bert.clone()
        },
        Case { what: "experts, scaled, norms behind", experts: Some((4, 2)), scales: true, ..bert.clone() },
        lora("adapters", Case { layout: groups.clone(), ..qwen2() }, 0.0),
        lora("adapters that drop", Case { layout: groups.clone(), ..qwen2() }, 0.5),
        lora("adapters that drop, chosen rows", Case { layout: groups, rows, ..qwen3 }, 0.5),
        lora("adapters on a tower", intern, 0.5),
    ];
    for act in [Activation::Silu, Activation::Tanh] {
        cases.push(Case { what: "another activation", plain: Some(act), ..siglip() });
    }
    cases
}

/// A block, with its trained weights.
struct Built {
    case: Case,
    block: Arc<Block>,
    params: Vec<Arc<Param>>,
    rope: Option<Arc<RopeTable>>,
    layout: Arc<Layout>,
    rows: Option<Arc<Index>>,
}

/// Numbers in -1..1 that are multiples of 2⁻¹⁰.
fn noise(n: usize, seed: usize) -> Vec<f32> {
    let mut bits = signs(seed);
    let mut number = || (0..11).fold(0.0, |x, _| 2.0 * x + bits.next().unwrap()) / 2048.0;
    (0..n).map(|_| f32::round(1024.0 * number()) / 1024.0).collect()
}

impl Built {
    fn new(case: Case) -> Self {
        let mut params: Vec<Arc<Param>> = Vec::new();
        let mut make = |name: &str, shape: &[usize], mean: f32, spread: f32| {
            let n = shape.iter().product();
            let values = noise(n, 31 * params.len() + 7).iter().map(|x| mean + spread * x).collect();
            let param = Arc::new(Param::new(name, Part::Llm, shape, Values::F32(values)).unwrap());
            params.push(Arc::clone(&param));
            param
        };
        let (h, heads, i) = (case.width, case.heads, 10);
        let mut linear = |name: &str, n: usize, k: usize, bias: bool| {
            let weight = make(&format!("{name}.weight"), &[n, k], 0.0, 1.0);
            let bias = bias.then(|| make(&format!("{name}.bias"), &[n], 0.0, 0.5));
            Linear::new(weight, bias).unwrap()
        };
        let [q, k, v, o, mlp] = case.biases;
        let qkv = match case.fused {
            true => vec![linear("qkv", heads.packed_width(), h, q)],
            false => vec![
                linear("q", heads.q_width(), h, q),
                linear("k", heads.kv_width(), h, k),
                linear("v", heads.kv_width(), h, v),
            ],
        };
        let proj = linear("proj", h, heads.q_width(), o);
        let router = case.experts.map(|(e, _)| linear("router", e, h, false));
        let mut mlp = || match case.plain {
            Some(act) => Mlp::Plain { fc1: linear("fc1", i, h, mlp), act, fc2: linear("fc2", h, i, mlp) },
            None => Mlp::SwiGlu {
                gate: linear("gate", i, h, mlp),
                up: linear("up", i, h, mlp),
                down: linear("down", h, i, mlp),
            },
        };
        let mlp = (!case.alone).then(&mut mlp);
        let experts = case.experts.zip(router).map(|((e, topk), router)| {
            let mut layer = |name: &str, k, n| ExpertLinear::new(make(name, &[e, k, n], 0.0, 1.0)).unwrap();
            Experts { router, fc1: layer("experts.fc1", h, 2 * i), fc2: layer("experts.fc2", i, h), topk }
        });
        let mut norm = |name: &str, width: usize| {
            let weight = make(&format!("{name}.weight"), &[width], 1.0, 0.5);
            match case.rms {
                true => Norm::Rms { weight, eps: 1e-2 },
                false => {
                    Norm::Layer { weight, bias: make(&format!("{name}.bias"), &[width], 0.0, 0.5), eps: 1e-2 }
                }
            }
        };
        let norms = [norm("norm1", h), norm("norm2", h)];
        let qk_norm = case.qk_norm.map(|Together(together)| match together {
            true => QkNorm::Together([norm("q_norm", heads.q_width()), norm("k_norm", heads.kv_width())]),
            false => QkNorm::PerHead([norm("q_norm", heads.dim), norm("k_norm", heads.dim)]),
        });
        let scales = case.scales.then(|| [make("ls1", &[h], 0.5, 0.5), make("ls2", &[h], 0.5, 0.5)]);
        params.iter().for_each(|p| p.set_trainable(true));
        if let Some((rank, rate)) = case.lora {
            for weight in params.clone().iter().filter(|p| p.is_linear()) {
                let (n, k) = (weight.shape()[0], weight.shape()[1]);
                let low = |which: &str, shape: &[usize], seed| {
                    let values = Values::F32(noise(shape.iter().product(), seed));
                    let param =
                        Param::new(format!("{}.{which}", weight.name()), Part::Llm, shape, values).unwrap();
                    param.set_trainable(true);
                    Arc::new(param)
                };
                let (a, b) = (low("A", &[rank, k], params.len()), low("B", &[n, rank], params.len() + 100));
                params.extend([Arc::clone(&a), Arc::clone(&b)]);
                weight.set_trainable(false);
                weight.attach(Arc::new(Adapter::new(a, b, 0.5, rate).unwrap())).unwrap();
            }
            params.retain(|p| p.trainable());
        }
        snap(&params);
        let half = heads.dim / 2;
        // Pairs belong to the axes in turn, and positions go differently along each.
        let rope = (case.axes > 0).then(|| {
            let axes = case.axes;
            let table = RopeTable::from_angles(T, half, move |row, angles| {
                for (pair, angle) in angles.iter_mut().enumerate() {
                    let position = [row, row / 2, 7 * row % 5][pair % axes];
                    *angle = position as f32 / (1 + pair) as f32;
                }
            });
            Arc::new(table.scaled(1.125))
        });
        let layout = match &case.rows {
            Some(rows) => case.layout.only(rows),
            None => case.layout.clone(),
        };
        let rows = case.rows.clone().map(|rows| Arc::new(rows.into()));
        let mixer = Mixer::Attention;
        let block =
            Block { order: case.order, norms, qk_norm, scales, mixer, qkv, proj, mlp, experts, heads };
        Self { block: Arc::new(block), params, rope, layout: Arc::new(layout.into()), rows, case }
    }

    fn input(&self) -> Vec<f32> {
        noise(T * self.case.width, 1)
    }

    fn run(&self, device: Device, x: &[f32], tape: &mut Tape) -> (Var, Var) {
        let keys: Arc<[u64]> = (0..T as u64).map(|row| row * row + 3).collect();
        let pass = Pass::on(device).dropping(Some(Dropout::new(5, Some(keys))));
        let x = tape.input(Rows::upload(device, x.to_vec(), T, self.case.width).unwrap());
        let block = BlockPass::new(&self.block, &pass, self.rope.as_ref(), &self.layout, self.rows.as_ref());
        let y = tape.apply(block, [&x]).unwrap();
        (x, y)
    }

    /// Output, gradient of the input, gradients of the weights, which they keep. `tape` records, or remembers for one that
    /// does.
    fn outcome(&self, device: Device, mut tape: Tape, remembers: bool) -> Vec<Vec<f64>> {
        let x = self.input();
        self.params.iter().for_each(|p| p.clear_grad());
        if remembers {
            self.run(device, &x, &mut tape);
            tape = Tape::recalling(tape.into_memory().unwrap().0, false);
        }
        let (x, y) = self.run(device, &x, &mut tape);
        let (n, h) = y.rows().dims();
        let dy = Rows::upload(device, noise(n * h, 2), n, h).unwrap();
        let dx = tape.backward(&y, dy).unwrap().take(&x).unwrap();
        let own = [y.rows().to_f64(), dx.to_f64()].into_iter();
        own.chain(self.params.iter().map(|p| p.with_grad(|g| g.unwrap().to_f64()))).collect()
    }

    /// Σ c·y on the twin.
    fn loss(&self, x: &[f32]) -> f64 {
        let y = self.run(Device::Twin, x, &mut Tape::off()).1.into_rows().to_f64();
        y.iter().zip(noise(y.len(), 2)).map(|(y, c)| y * f64::from(c)).sum()
    }
}

#[test]
fn gradients_of_every_shape_are_central_differences() {
    for case in cases() {
        let (what, built) = (case.what, Built::new(case));
        let twin = built.outcome(Device::Twin, Tape::recording(false), false);
        let (dx, x) = (&twin[1], built.input());
        let size = dx.iter().map(|d| d * d).sum::<f64>().sqrt();
        for at in 0..x.len() {
            let want = slope(STEP, |by| {
                let mut x = x.clone();
                x[at] += by;
                built.loss(&x)
            });
            let got = dx[at];
            assert!((got - want).abs() <= 1e-6 * size, "{what}, input {at}: {got} for {want}");
        }
        check_weights(what, &built.params, (1, STEP), &|| built.loss(&x));
        // Single elements too, where signs of all could hide a swap.
        for (p, gradient) in built.params.iter().zip(&twin[2..]) {
            let size = gradient.iter().map(|d| d * d).sum::<f64>().sqrt();
            for at in (0..gradient.len()).step_by(1 + gradient.len() / 5) {
                let want = slope(STEP, |by| {
                    p.update(|w| w[at] += by).unwrap();
                    let loss = built.loss(&x);
                    p.update(|w| w[at] -= by).unwrap();
                    loss
                });
                let (got, name) = (gradient[at], p.name());
                assert!((got - want).abs() <= 1e-6 * size + 1e-10, "{what}, {name} {at}: {got} for {want}");
            }
        }
    }
}

#[test]
fn every_tape_gives_the_same_bits_on_every_device() {
    for case in cases() {
        let (what, built) = (case.what, Built::new(case));
        let twin = built.outcome(Device::Twin, Tape::recording(false), false);
        for device in Device::all() {
            let kept = built.outcome(device, Tape::recording(false), false);
            for (i, (got, want)) in kept.iter().zip(&twin).enumerate() {
                let size = want.iter().fold(1.0f64, |a, x| a.max(x.abs()));
                let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(far <= 1e-5 * size, "{what} on {device}, result {i} differs by {far}");
            }
            let recomputed = built.outcome(device, Tape::recording(true), false);
            let remembered = built.outcome(device, Tape::remembering(usize::MAX), true);
            assert!(recomputed == kept, "{what} on {device}: recomputed");
            assert!(remembered == kept, "{what} on {device}: remembered");
        }
    }
}
