//! Whole tiny networks with the kernels of a GPU, on the emulator: logits, three training steps and a step of adapters on few bits are
//! those of the CPU, of each family.

use std::sync::Arc;

use omnigrpo_models::{Checkpoint, GroupStream, LoadOptions, Model, PackedStream, Quantization, WeightDtype};
use omnigrpo_ops::{Device, Moments, Param, ParamDtype, Part, QuantBits, Step};

use tempfile::TempDir;

use omnigrpo_testkit::{
    FAMILIES, Gradients, card, case_prompt, causal_logits, checkpoint, copy_dir, max_diff, norm,
    take_gradients, train_adapters, train_all, training,
};

const COMPLETIONS: [&[u32]; 2] = [&[17, 3, 250, 9], &[5, 6]];

struct Run {
    model: Model,
    moments: Vec<Moments>,
    case: &'static str,
    /// Whether activations are computed again and the optimizer's state lies in main memory.
    spares_memory: bool,
}

impl Run {
    fn new(model: Model, case: &'static str, spares_memory: bool) -> Self {
        let moments = model.params().iter().map(|_| Moments::default()).collect();
        Self { model, moments, case, spares_memory }
    }

    /// Logits of each of the prompt's tokens.
    fn logits(&self) -> Vec<f32> {
        let prompt = case_prompt(self.case, &self.model);
        let x = self.model.embed_prompt(&prompt, &self.model.encode_prompt(&prompt).unwrap()).unwrap();
        let rows: Vec<usize> = (0..prompt.ids.len()).collect();
        causal_logits(&self.model, x, &prompt.positions, &rows)
    }

    /// Log-probabilities, gradients, and the weights after one update.
    fn step(&mut self) -> (Vec<f32>, Gradients, Gradients) {
        let (model, how) = (&self.model, training(self.spares_memory));
        let prompt = &case_prompt(self.case, model);
        let groups = [GroupStream { prompt, completions: COMPLETIONS.to_vec() }];
        let stream = PackedStream::new(&groups).unwrap();
        let (features, memories) = model.encode_for_training([prompt]).unwrap();
        let pass = model.train_pass(&stream, &features, how, None).unwrap();
        let logprobs = pass.logprobs.clone();
        let d: Vec<f32> = (0..logprobs.len()).map(|i| (i as f32 * 1.3).sin()).collect();
        let gradients = pass.backward(&d, Some(&vec![0.25; d.len()])).unwrap();
        model.backward_media(&[prompt], &features, memories, gradients, how).unwrap();
        let gradients: Gradients =
            model.params().iter().filter_map(|p| Some((p.name().to_owned(), p.grad()?))).collect();
        let step = Step {
            lr: 1e-3,
            betas: [0.9, 0.99],
            // Some gradients are 0 but for rounding (a key's bias moves all scores of a query alike), so AdamW must not divide by
            // them alone.
            eps: 1e-3,
            weight_decay: 0.01,
            grad_scale: 1.0,
            master: true,
            // On the CPU, a setting without effect is an error.
            random: false,
            eight_bits: false,
            offload: self.spares_memory && model.device() != Device::Cpu,
        };
        for (param, moments) in model.params().iter().zip(&mut self.moments) {
            param.adamw(moments, &step).unwrap();
        }
        model.device().finish().unwrap();
        assert!(take_gradients(model).is_empty());
        let trained = model.params().iter().filter(|p| p.trainable());
        let weights = trained.map(|p| (p.name().to_owned(), p.read().f32().into_owned()));
        (logprobs, gradients, weights.collect())
    }
}

/// Bounds of differences: logits by norm, log-probabilities each, gradients and weights by norm of a tensor. The last number says how much
/// more the gradients of later steps may differ, since their weights do.
type Bounds = [f64; 5];

/// f32 throughout: rounding alone.
const F32: Bounds = [1e-5, 1e-4, 1e-3, 1e-4, 1.0];
/// Activations between bf16 weights are bf16 as well, and so are some of their gradients, which the CPU keeps in f32.
const BF16: Bounds = [0.03, 0.2, 0.15, 0.02, 1.5];
/// Weights of few bits are widened to bf16, and what they are multiplied with is rounded to it.
const FEW_BITS: Bounds = [0.03, 0.2, 0.1, 0.03, 1.0];

/// Logits and `steps` steps on both devices.
fn compare([mut cpu, mut gpu]: [Run; 2], steps: usize, bounds: Bounds, what: &str) {
    let distance = |got: &[f32], want: &[f32]| {
        assert_eq!(got.len(), want.len(), "{what}");
        norm(&got.iter().zip(want).map(|(a, b)| a - b).collect::<Vec<f32>>())
    };
    let (got, want) = (gpu.logits(), cpu.logits());
    let far = distance(&got, &want) / norm(&want);
    assert!(far <= bounds[0], "{what}: logits differ by {far}");
    // Against the tensor's norm and a tenth of what is usual: some gradients are 0 but for rounding.
    let tensors = |got: &Gradients, want: &Gradients, bound: f64, what: &str| {
        assert!(!want.is_empty() && got.keys().eq(want.keys()), "{what}: other tensors");
        let squares: f64 = want.values().map(|x| norm(x).powi(2)).sum();
        let usual = (squares / want.len() as f64).sqrt();
        for (name, want) in want {
            let far = distance(&got[name], want) / (norm(want) + usual / 10.0);
            assert!(far <= bound, "{what}: {name} differs by {far}");
        }
    };
    for step in 0..steps {
        let (want, got) = (cpu.step(), gpu.step());
        let far = f64::from(max_diff(&got.0, &want.0));
        assert!(far <= bounds[1], "{what}, step {step}: log-probabilities differ by {far}");
        let bound = bounds[2] * if step == 0 { 1.0 } else { bounds[4] };
        tensors(&got.1, &want.1, bound, &format!("{what}, step {step}, gradients"));
        tensors(&got.2, &want.2, bounds[3], &format!("{what}, step {step}, weights"));
    }
}

/// Opens a checkpoint whose numbers rounding cannot change much. With numbers that are rounded in another way, a row could choose other
/// experts, so each row of Qwen's mixture uses all of them if weights are `rounded`. In a tiny model with the delta rule, outputs near 0
/// are normalised, so 1 is added to their mean squares. With bf16 activations, logits of `transformers` are then off by 1.3 % of their
/// norm, as those of the tiny Llama are, and by 6.5 % without.
fn opened(name: &str, rounded: bool) -> (Option<TempDir>, Checkpoint) {
    let change: fn(&mut serde_json::Value) = match name {
        "qwen3_vl_moe" if rounded => |text| text["num_experts_per_tok"] = text["num_experts"].clone(),
        "qwen3_5" | "qwen3_5_text" => |text| text["rms_norm_eps"] = 1.0.into(),
        _ => return (None, Checkpoint::open(&checkpoint(name)).unwrap()),
    };
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint(name), dir.path());
    let path = dir.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let is_whole = json.get("text_config").is_some();
    change(if is_whole { &mut json["text_config"] } else { &mut json });
    std::fs::write(&path, json.to_string()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (Some(dir), checkpoint)
}

fn steps_of((name, case): (&str, &'static str), dtype: WeightDtype, spares_memory: bool, bounds: Bounds) {
    let runs = [Device::Cpu, card()].map(|device| {
        let options = LoadOptions { dtype, device, ..LoadOptions::default() };
        let (_dir, opened) = opened(name, dtype == WeightDtype::BFloat16);
        let model = Model::load(&opened, &options).unwrap();
        train_all(&model);
        Run::new(model, case, spares_memory)
    });
    compare(runs, 3, bounds, &format!("{name}, {dtype:?}"));
}

#[test]
fn steps_on_the_emulator() {
    FAMILIES.into_iter().for_each(|family| steps_of(family, WeightDtype::Float32, false, F32));
}

/// With all that spares a card's memory.
#[test]
fn steps_in_bf16_on_the_emulator() {
    FAMILIES.into_iter().for_each(|family| steps_of(family, WeightDtype::BFloat16, true, BF16));
}

/// Adapters on frozen weights of 8 and 4 bits. The tiny Aria is narrower than a block of such weights; `aria.rs` has a wider one.
#[test]
fn adapters_on_few_bits_on_the_emulator() {
    for bits in [QuantBits::Eight, QuantBits::Four] {
        for (name, case) in FAMILIES.into_iter().filter(|(name, _)| *name != "aria") {
            let runs = [Device::Cpu, card()].map(|device| {
                let keep = |_: &str, _: Part| false;
                let options = LoadOptions {
                    dtype: WeightDtype::BFloat16,
                    device,
                    quantization: Some(Quantization { bits, keep: &keep }),
                    ..LoadOptions::default()
                };
                let (_dir, opened) = opened(name, true);
                let mut model = Model::load(&opened, &options).unwrap();
                let is_quantised = |p: &Arc<Param>| p.dtype() == ParamDtype::Quantised(bits);
                assert!(model.params().iter().any(is_quantised), "{name}");
                train_adapters(&mut model, &["all-linear"]);
                Run::new(model, case, false)
            });
            compare(runs, 1, FEW_BITS, &format!("{name}, {bits:?}"));
        }
    }
}
