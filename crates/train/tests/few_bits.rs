//! Bounds on differences between log-probabilities: of rollouts and training with frozen weights in 8 and 4 bits, where activations
//! have outliers, and of two ways to multiply by bf16 weights.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod setup;

use std::path::Path;
use std::sync::Mutex;

use omnigrpo_kernels::{Instructions, limit_instructions};
use omnigrpo_models::{
    Arithmetic, Bf16Path, Checkpoint, LoadOptions, LoraConfig, Model, QuantBits, Quantization,
    ReferencePlace, WeightDtype,
};
use omnigrpo_observe::Console;
use omnigrpo_rollout::SamplingParams;
use omnigrpo_train::{EvalOptions, Selection, generate, logprobs, train};
use serde_json::{Value, json};
use setup::{checkpoint, lines, number, questions};
use tempfile::TempDir;

const WIDTH: usize = 96;
const FEED_FORWARD: usize = 160;

/// Which activations are made larger, by which factor. What reads them is made as much smaller, so that the model computes the same.
#[derive(Clone, Copy, Debug)]
enum Outliers {
    None,
    /// One of all inputs of attention and feed-forward.
    OneChannel(f32),
    /// One in each group of 64 of them.
    EachGroup(f32),
    /// One in 64 of the inputs of `down_proj`.
    Down(f32),
    /// Both of the two above.
    Both(f32),
}

/// A test limits the instructions of the process.
static CHOICE: Mutex<()> = Mutex::new(());

/// Returns numbers that are nearly normal: sums of twelve even ones.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut even = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..len).map(|_| (0..12).map(|_| even()).sum::<f32>() - 6.0).collect()
}

/// Multiplies column `at` of rows of `width`.
fn scale_column(w: &mut [f32], width: usize, at: usize, factor: f32) {
    w.iter_mut().skip(at).step_by(width).for_each(|w| *w *= factor);
}

/// A model of width 96 with random weights in a directory, with the other settings of a tiny checkpoint.
fn write_model(name: &str, dir: &Path, outliers: Outliers) {
    let source = checkpoint(name);
    let plan = dir.with_extension("plan");
    std::fs::create_dir(&plan).unwrap();
    for file in std::fs::read_dir(&source).unwrap() {
        let file = file.unwrap().path();
        let name = file.file_name().unwrap();
        if !name.to_string_lossy().starts_with("model") {
            std::fs::write(plan.join(name), std::fs::read(&file).unwrap()).unwrap();
        }
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    for (key, value) in
        [("hidden_size", WIDTH), ("intermediate_size", FEED_FORWARD), ("num_attention_heads", 6)]
    {
        match config.get_mut("text_config") {
            Some(text) => text[key] = json!(value),
            None => config[key] = json!(value),
        }
    }
    config["vision_config"]["out_hidden_size"] = json!(WIDTH);
    std::fs::write(plan.join("config.json"), config.to_string()).unwrap();

    let options = LoadOptions { dtype: WeightDtype::Float32, ..LoadOptions::default() };
    let model =
        Model::load(&Checkpoint::open(&plan).unwrap(), &LoadOptions { random: Some(1), ..options }).unwrap();
    for (at, param) in model.params().iter().enumerate() {
        let name = param.name();
        let mut w = noise(param.len(), at as u64 + 1);
        let width = param.shape().last().copied().unwrap();
        let (mean, deviation) = match param.shape() {
            [_] if name.contains("norm") || name.contains("ln_q") => (1.0, 0.2),
            [_] => (0.0, 0.1),
            _ if name.contains("embed_tokens") || name.contains("lm_head") => (0.0, 0.35),
            [n, ..] => (0.0, 1.2 / (param.len() as f32 / *n as f32).sqrt()),
            [] => (0.0, 0.0),
        };
        w.iter_mut().for_each(|w| *w = mean + deviation * *w);
        let norm =
            name.ends_with("input_layernorm.weight") || name.ends_with("post_attention_layernorm.weight");
        let readers =
            ["q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight"];
        let reads = name.contains("layers.") && readers.iter().any(|end| name.ends_with(end));
        let channels = |every: usize| (3..WIDTH).step_by(every);
        if let Outliers::OneChannel(f) | Outliers::EachGroup(f) | Outliers::Both(f) = outliers {
            let every = if matches!(outliers, Outliers::OneChannel(_)) { WIDTH } else { 64 };
            for c in channels(every) {
                if norm {
                    w[c] *= f;
                } else if reads {
                    scale_column(&mut w, width, c, 1.0 / f);
                }
            }
        }
        if let Outliers::Down(f) | Outliers::Both(f) = outliers {
            for c in (5..FEED_FORWARD).step_by(64) {
                if name.ends_with("up_proj.weight") && reads {
                    w[c * width..(c + 1) * width].iter_mut().for_each(|w| *w *= f);
                } else if name.ends_with("mlp.down_proj.weight") && name.contains("layers.") {
                    scale_column(&mut w, width, c, 1.0 / f);
                }
            }
        }
        param.store(&w).unwrap();
    }
    model.save_pretrained(dir).unwrap();
}

/// Mean and largest difference of log-probabilities between rollout and training, over 640 tokens of a policy that is not moved.
fn gap(place: &TempDir, dir: &Path, bits: QuantBits, keeps_inputs: bool, name: &str) -> (f64, f64) {
    let out = place.path().join(name);
    let mut setup = setup::setup("qwen2_5_vl_untied", &questions(place.path()), place.path(), &out);
    let quantization = Some(Quantization { bits, keep: &|_, _| false });
    let arithmetic = Arithmetic { keeps_inputs, ..Arithmetic::default() };
    let dtype = WeightDtype::Float32;
    let options = LoadOptions { quantization, dtype, arithmetic, ..LoadOptions::default() };
    setup.model = Model::load(&Checkpoint::open(dir).unwrap(), &options).unwrap();
    let targets = vec!["all-linear".into()];
    setup
        .model
        .add_lora(&LoraConfig { rank: 2, alpha: 4.0, dropout: 0.0, rslora: false, targets, seed: 5 })
        .unwrap();
    setup.prompts = std::sync::Arc::new(setup::prompts(dir, 40));
    setup.selection = Selection::NONE;
    setup.algorithm = setup::algorithm(8, 40);
    setup.algorithm.sampling.min_completion_length = 40;
    setup.optimizer.learning_rate = 0.0;
    setup.run.max_steps = Some(1);
    train(setup, &Console::plain(std::io::sink()), &Default::default()).unwrap();
    let row = lines(&out.join("metrics.jsonl")).remove(0);
    let of = |what: &str| number(&row, &format!("sampling/sampling_logp_difference/{what}"));
    (of("mean"), of("max"))
}

#[test]
fn outliers_do_not_part_rollout_and_training() {
    let _own = CHOICE.lock().unwrap();
    let (qwen25, qwen3) = ("qwen2_5_vl_untied", "qwen3_vl");
    let cases = [
        (qwen25, Outliers::None),
        (qwen25, Outliers::OneChannel(10.0)),
        (qwen25, Outliers::OneChannel(30.0)),
        (qwen25, Outliers::OneChannel(100.0)),
        (qwen25, Outliers::EachGroup(30.0)),
        (qwen25, Outliers::EachGroup(300.0)),
        (qwen25, Outliers::Both(300.0)),
        (qwen3, Outliers::OneChannel(30.0)),
        (qwen3, Outliers::OneChannel(100.0)),
        (qwen3, Outliers::Both(300.0)),
        (qwen25, Outliers::Down(30.0)),
    ];
    let (mut told, mut far) = (Vec::new(), false);
    for (at, (model, outliers)) in cases.into_iter().enumerate() {
        // Training on matrix tiles rounds otherwise than decoding in bytes. Nothing bounds the effect of the largest outliers.
        let arithmetic = Arithmetic::default();
        let tiles = arithmetic.rounds_inputs() && !arithmetic.one_kernel();
        if tiles && matches!(outliers, Outliers::Both(_)) {
            continue;
        }
        let place = TempDir::new().unwrap();
        let dir = place.path().join("model");
        write_model(model, &dir, outliers);
        for (bits, bound) in [(QuantBits::Eight, 0.02), (QuantBits::Four, 0.04)] {
            let (mean, max) = gap(&place, &dir, bits, false, &format!("{}", bits.bits()));
            told.push(format!("{model}, {outliers:?}, {bits:?}: mean {mean:.1e}, largest {max:.1e}"));
            // With one kernel, only the order of sums in attention differs, and what it moves across a step of the inputs.
            far |= if tiles { mean > 1.5 * bound } else { mean > 0.1 * bound || max > 0.3 };
        }
        // With f32 inputs, by choice or because the CPU does not multiply bytes, only the order of sums differs.
        if at + 1 == cases.len() {
            let kept = gap(&place, &dir, QuantBits::Eight, true, "kept");
            limit_instructions(Instructions::Vectors);
            let vectors = [QuantBits::Eight, QuantBits::Four]
                .map(|bits| gap(&place, &dir, bits, false, &format!("vectors-{}", bits.bits())));
            limit_instructions(Instructions::Best);
            for (mean, max) in [kept, vectors[0], vectors[1]] {
                assert!(mean < 1e-5 && max < 1e-3, "f32 inputs: mean {mean:.1e}, largest {max:.1e}");
            }
        }
    }
    assert!(!far, "{told:#?}");
}

/// With pairs of bf16, the inputs of products are rounded too. On CPUs without the instruction, both ways are the same.
#[test]
fn products_of_bf16_pairs_stay_close_to_widened_ones() {
    let _own = CHOICE.lock().unwrap();
    let other = if Bf16Path::Dot.works() { Bf16Path::Dot } else { Bf16Path::Widened };
    let place = TempDir::new().unwrap();
    let dataset = setup::dataset(&questions(place.path()), place.path());
    for (name, temperature) in [("qwen2_5_vl_untied", 1.0), ("qwen3_vl", 0.7)] {
        let dir = place.path().join(name);
        write_model(name, &dir, Outliers::None);
        let load = |bf16_products| {
            let arithmetic = Arithmetic { bf16_products, ..Arithmetic::default() };
            let options = LoadOptions { dtype: WeightDtype::BFloat16, arithmetic, ..LoadOptions::default() };
            Model::load(&Checkpoint::open(&dir).unwrap(), &options).unwrap()
        };
        let (model, by_path) = (load(None), [Bf16Path::Widened, other].map(|path| load(Some(path))));
        let sampling = SamplingParams {
            max_completion_length: 40,
            min_completion_length: 40,
            temperature,
            ..SamplingParams::default()
        };
        let options = EvalOptions { sampling, num_generations: 8, ..EvalOptions::default() };
        let (mut sum, mut tokens, mut most) = (0.0, 0, 0.0f32);
        generate(
            &model,
            &setup::prompts(&dir, 40),
            (&dataset, &[0, 1]),
            (&options, None),
            &mut |_| {},
            &mut |batch| {
                for (row, completions) in batch.rows.iter().zip(batch.completions) {
                    let ids: Vec<Vec<u32>> = completions.iter().map(|c| c.ids.clone()).collect();
                    let [widened, other] = by_path
                        .each_ref()
                        .map(|model| logprobs(model, &row.prompt, &ids, temperature, None).unwrap().concat());
                    for (a, b) in widened.iter().zip(&other) {
                        (sum, tokens) = (sum + f64::from((a - b).abs()), tokens + 1);
                        most = most.max((a - b).abs());
                    }
                }
                Ok(())
            },
        )
        .unwrap();
        let mean = sum / f64::from(tokens);
        assert!(tokens > 500 && mean <= 0.03 && most <= 0.5, "{name}: {tokens} tokens, mean {mean}, {most}");
        assert_eq!(mean > 1e-4, other == Bf16Path::Dot, "{name}: {mean}");
    }
}

/// Two models that multiply in different ways, on two threads: each has the numbers that it has alone. This is true of weights in 8 bits
/// with rounded and with unchanged inputs, of weights in bf16 by two paths, and of references, also of one that stays in its files.
#[test]
fn models_of_one_process_keep_their_own_numbers() {
    let _own = CHOICE.lock().unwrap();
    let place = TempDir::new().unwrap();
    let dir = place.path().join("model");
    write_model("qwen2_5_vl_untied", &dir, Outliers::None);
    let dataset = setup::dataset(&questions(place.path()), place.path());
    let prompt = setup::prompts(&dir, 40).build(&dataset.get(0).unwrap()).unwrap();
    let ids: Vec<Vec<u32>> = (0..4).map(|at| (at..at + 12).map(|id| 7 * id + 11).collect()).collect();
    let bits = |model: &Model| -> Vec<u32> {
        let all = logprobs(model, &prompt, &ids, 1.0, None).unwrap().concat();
        all.iter().map(|x| x.to_bits()).collect()
    };
    let load = |dtype, few: bool, arithmetic| {
        let quantization = few.then_some(Quantization { bits: QuantBits::Eight, keep: &|_, _| false });
        let options = LoadOptions { dtype, quantization, arithmetic, ..LoadOptions::default() };
        Model::load(&Checkpoint::open(&dir).unwrap(), &options).unwrap()
    };
    let auto = Arithmetic::default();
    let kept = Arithmetic { keeps_inputs: true, ..auto };
    let widened = Arithmetic { bf16_products: Some(Bf16Path::Widened), ..auto };
    let rounds = (auto.rounds_inputs() || auto.rounds_bf16(), auto.rounds_bf16());
    for (dtype, few, other, differs) in
        [(WeightDtype::Float32, true, kept, rounds.0), (WeightDtype::BFloat16, false, widened, rounds.1)]
    {
        let models = [auto, other].map(|arithmetic| load(dtype, few, arithmetic));
        let alone = models.each_ref().map(bits);
        assert_eq!(alone[0] != alone[1], differs, "{dtype:?}");
        let bits = &bits;
        std::thread::scope(|threads| {
            for (model, alone) in models.iter().zip(&alone) {
                threads.spawn(move || (0..20).for_each(|_| assert_eq!(bits(model), *alone, "{dtype:?}")));
            }
        });
        for (model, alone) in models.iter().zip(&alone) {
            model.params().iter().filter(|_| !few).for_each(|param| param.set_trainable(true));
            for place in [ReferencePlace::Memory(model.device()), ReferencePlace::Files] {
                assert_eq!(bits(&model.reference(place).unwrap()), *alone, "{dtype:?}, {place:?}");
            }
        }
    }
}
