//! Whole tiny networks with the kernels of a GPU, on the emulator: two training steps of each family are those of the CPU.

use omnigrpo_models::{Checkpoint, GroupStream, LoadOptions, Model, PackedStream, Prompt, WeightDtype};
use omnigrpo_ops::{Device, Moments, Step};

use crate::support::{
    Golden, Gradients, assert_close, case_prompt, checkpoint, max_diff, omni_prompt, take_gradients,
    train_all, training,
};

const COMPLETIONS: [&[u32]; 2] = [&[17, 3, 250, 9], &[5, 6]];

struct Run {
    model: Model,
    moments: Vec<Moments>,
}

impl Run {
    fn new(name: &str, dtype: WeightDtype, device: Device) -> Self {
        let options = LoadOptions { dtype, device, ..LoadOptions::default() };
        let model = Model::load_with(&Checkpoint::open(&checkpoint(name)).unwrap(), &options).unwrap();
        let moments = model.params().iter().map(|_| Moments::default()).collect();
        Self { model, moments }
    }

    /// Log-probabilities, gradients, and the weights after one update.
    fn step(&mut self, prompt: &Prompt) -> (Vec<f32>, Gradients, Gradients) {
        let model = &self.model;
        train_all(model);
        let groups = [GroupStream { prompt, completions: COMPLETIONS.to_vec() }];
        let stream = PackedStream::new(&groups).unwrap();
        let (features, memories) = model.encode_for_training([prompt]).unwrap();
        let pass = model.train_pass(&stream, &features, 1.0, training(false)).unwrap();
        let logprobs = pass.logprobs.clone();
        let d: Vec<f32> = (0..logprobs.len()).map(|i| (i as f32 * 1.3).sin()).collect();
        let gradients = pass.backward(&d, Some(&vec![0.25; d.len()])).unwrap();
        model.backward_media(&[prompt], &features, memories, gradients, training(false)).unwrap();
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
            offload: false,
        };
        for (param, moments) in model.params().iter().zip(&mut self.moments) {
            param.adamw(moments, &step).unwrap();
        }
        model.device().finish().unwrap();
        assert!(take_gradients(model).is_empty());
        let weights = model.params().iter().map(|p| (p.name().to_owned(), p.read().f32().into_owned()));
        (logprobs, gradients, weights.collect())
    }
}

/// Two steps on both devices. `bounds` are of log-probabilities (absolute), gradients and weights (relative).
fn compare(name: &str, dtype: WeightDtype, prompt: impl Fn(&Model) -> Prompt, bounds: [f64; 3]) {
    let [mut cpu, mut gpu] =
        [Device::Cpu, crate::support::card()].map(|device| Run::new(name, dtype, device));
    for step in 0..2 {
        let want = cpu.step(&prompt(&cpu.model));
        let got = gpu.step(&prompt(&gpu.model));
        let far = max_diff(&got.0, &want.0);
        assert!(f64::from(far) <= bounds[0], "{name}, step {step}: log-probabilities differ by {far}");
        assert_close(&got.1, &want.1, bounds[1], &format!("{name}, step {step}, gradients"));
        assert_close(&got.2, &want.2, bounds[2], &format!("{name}, step {step}, weights"));
    }
}

/// f32 throughout: rounding alone.
const F32: [f64; 3] = [2e-4, 1e-3, 1e-3];

#[test]
fn steps_of_qwen_on_the_emulator() {
    for (name, case) in [("qwen2_vl_tied", "C"), ("qwen2_5_vl_untied", "E"), ("qwen3_vl", "E")] {
        compare(name, WeightDtype::Float32, |model| case_prompt(case, model), F32);
    }
}

#[test]
fn steps_of_internvl_on_the_emulator() {
    for name in ["internvl_hf", "internvl_rms_hf", "internvl3_5_hf"] {
        compare(name, WeightDtype::Float32, |_| crate::rows::prompt(&checkpoint(name), "C"), F32);
    }
}

#[test]
fn steps_of_humanomni_on_the_emulator() {
    let prompt = |_: &Model| omni_prompt(&Golden::read("humanomni/va.humanomni.safetensors"));
    compare("humanomni", WeightDtype::Float32, prompt, F32);
}

/// bf16 weights: activations between them are bf16 as well, which the CPU keeps in f32. The second step's differences are those of the
/// first one's gradients too.
#[test]
fn steps_in_bf16_on_the_emulator() {
    for name in ["qwen2_5_vl_tied", "qwen3_vl"] {
        compare(name, WeightDtype::BFloat16, |model| case_prompt("E", model), [0.15, 0.2, 1e-2]);
    }
}
