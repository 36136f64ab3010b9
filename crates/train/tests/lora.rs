//! Runs with adapters: what is trained and saved, exact resuming, the reference, quantised bases, selections.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod setup;

use std::collections::BTreeSet;
use std::path::Path;

use omnigrpo_guard::told;
use omnigrpo_models::{
    Checkpoint, LoadOptions, LoraConfig, Model, Part, QuantBits, Quantization, WeightDtype,
};
use omnigrpo_testkit::weight_bits;
use omnigrpo_train::{AdamW, AdamWConfig, Objective, SaveWhen, ScheduleKind, Selection, TrainSetup, summary};
use setup::{checkpoint, lines, number, optimizer, questions, raw_tensors, run, tensors, timeless};
use tempfile::TempDir;

const NAME: &str = "qwen2_5_vl_tied";
const PROJECTOR: Selection = Selection {
    llm: false,
    projector: true,
    towers: false,
    instruction: false,
    gate: None,
    patterns: Vec::new(),
};

fn lora(dropout: f64) -> LoraConfig {
    LoraConfig { rank: 4, alpha: 8.0, dropout, rslora: false, targets: vec!["all-linear".into()], seed: 5 }
}

/// Six updates with adapters and a wholly trained projector.
fn adapted(place: &TempDir, name: &str, dropout: f64) -> TrainSetup {
    let file = questions(place.path());
    let mut setup = setup::setup(NAME, &file, place.path(), &place.path().join(name));
    setup.model.add_lora(&lora(dropout)).unwrap();
    setup.selection = PROJECTOR;
    setup.run.save.when = SaveWhen::Steps(3);
    setup
}

fn names(dir: &Path) -> BTreeSet<String> {
    std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn checkpoints_hold_adapter_and_optimizer_and_resume_exactly() {
    for (dropout, recompute) in [(0.0, false), (0.2, true)] {
        let place = TempDir::new().unwrap();
        let new = |name: &str| {
            let mut setup = adapted(&place, name, dropout);
            // The checkpoint at 3 is in the middle of a rollout.
            setup.run.num_iterations = 2;
            setup.algorithm.recompute = recompute;
            setup
        };
        run(new("whole")).unwrap();
        let (whole, part) = (place.path().join("whole"), place.path().join("part"));
        let files = names(&whole.join("checkpoint-3"));
        for file in [
            "adapter_config.json",
            "adapter_model.safetensors",
            "optimizer.safetensors",
            "trainer_state.json",
        ] {
            assert!(files.contains(file), "{files:?}");
        }
        assert!(!files.contains("model.safetensors") && !files.contains("config.json"), "{files:?}");
        let moments = raw_tensors(&whole.join("checkpoint-3/optimizer.safetensors"));
        // Two matrices for each of 14 layers, and the five tensors of the projector; two moments each.
        assert_eq!(moments.len(), 2 * (2 * 14 + 5));
        assert!(moments.keys().all(|name| name.contains(".lora_") || name.starts_with("visual.merger.")));

        omnigrpo_testkit::copy_dir(&whole.join("checkpoint-3"), &part.join("checkpoint-3"));
        let metrics = std::fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
        let cut: String = metrics.lines().take(3).map(|line| format!("{line}\n")).collect();
        std::fs::write(part.join("metrics.jsonl"), cut).unwrap();
        assert_eq!(run(new("part")).unwrap().steps, 6);
        assert_eq!(timeless(&part), timeless(&whole));
        for file in [
            "adapter_model.safetensors",
            "checkpoint-6/adapter_model.safetensors",
            "checkpoint-6/optimizer.safetensors",
        ] {
            assert!(raw_tensors(&part.join(file)) == raw_tensors(&whole.join(file)), "{file} differs");
        }
        let (three, six) = (
            tensors(&whole.join("checkpoint-3/adapter_model.safetensors")),
            tensors(&whole.join("adapter_model.safetensors")),
        );
        assert_eq!(six.len(), 2 * 14 + 5);
        assert!(six.iter().all(|(name, data)| three[name] != *data), "something has not moved");
        // The files start another run, too.
        let mut again = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::Auto).unwrap();
        again.load_adapter(&whole).unwrap();
        assert_eq!(again.lora().unwrap().dropout, dropout);
    }
}

#[test]
fn the_reference_is_the_model_without_adapters() {
    let place = TempDir::new().unwrap();
    let mut setup = adapted(&place, "run", 0.0);
    // Decoding and scoring are different kernels.
    setup.algorithm.recall = false;
    setup.run.max_steps = Some(2);
    setup.run.schedule.kind = ScheduleKind::Constant;
    setup.optimizer.learning_rate = 1e-2;
    run(setup).unwrap();
    let rows = lines(&place.path().join("run/metrics.jsonl"));
    // Before the first update nothing differs, not even in the last bit; after it something does.
    assert_eq!(number(&rows[0], "kl"), 0.0);
    assert!(number(&rows[1], "kl") > 1e-6, "{}", rows[1]);
}

#[test]
fn frozen_weights_have_no_gradient_no_state_and_keep_their_bits() {
    let place = TempDir::new().unwrap();
    let mut setup = adapted(&place, "run", 0.1);
    setup.selection = Selection::NONE;
    setup.run.objective = Objective::Imitate;
    setup.run.max_steps = Some(3);
    run(setup).unwrap();
    let base = raw_tensors(&checkpoint(NAME).join("model.safetensors"));
    assert!(base.len() > 40);
    let saved = tensors(&place.path().join("run/adapter_model.safetensors"));
    assert!(saved.len() == 28 && saved.keys().all(|name| name.contains(".lora_")));
    let losses: Vec<f64> =
        lines(&place.path().join("run/metrics.jsonl")).iter().map(|row| number(row, "loss")).collect();
    assert!(losses[2] < losses[0], "{losses:?}");

    let mut model = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::Auto).unwrap();
    model.add_lora(&lora(0.0)).unwrap();
    Selection::NONE.apply(&model).unwrap();
    let adamw = AdamW::new(optimizer(), model.params());
    let few: usize = model.adapter_params().iter().map(|p| p.len()).sum();
    assert_eq!(adamw.bytes(), 12 * few);
    // 4 · (n + k) numbers for each layer: q, k, v, o, gate, up, down.
    let per_layer = [(64, 64), (32, 64), (32, 64), (64, 64), (80, 64), (80, 64), (64, 80)];
    assert_eq!(few, 2 * 4 * per_layer.iter().map(|(n, k)| n + k).sum::<usize>());
}

#[test]
fn a_quantised_base_is_trained_through_its_adapters() {
    let projector = PROJECTOR;
    for bits in [QuantBits::Eight, QuantBits::Four] {
        let place = TempDir::new().unwrap();
        let mut setup = adapted(&place, "run", 0.0);
        let keep = projector.matcher().unwrap();
        let options =
            LoadOptions { quantization: Some(Quantization { bits, keep: &keep }), ..LoadOptions::default() };
        setup.model = Model::load(&Checkpoint::open(&checkpoint(NAME)).unwrap(), &options).unwrap();
        setup.model.add_lora(&lora(0.0)).unwrap();
        setup.run.max_steps = Some(4);
        setup.optimizer.learning_rate = 3e-3;
        setup.run.objective = Objective::Imitate;
        run(setup).unwrap();
        let rows = lines(&place.path().join("run/metrics.jsonl"));
        assert!(number(&rows[3], "loss") < number(&rows[0], "loss"), "{rows:?}");
        assert!(place.path().join("run/adapter_model.safetensors").is_file());

        let model = Model::load(&Checkpoint::open(&checkpoint(NAME)).unwrap(), &options).unwrap();
        let why = told(&Selection::ALL.apply(&model).unwrap_err());
        assert!(why.contains("is selected for full training, but quantised"), "{why}");
    }
}

#[test]
fn patterns_select_within_parts_and_must_match() {
    let model = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::Auto).unwrap();
    let pick = |patterns: &[&str]| Selection {
        patterns: patterns.iter().map(|&p| p.to_owned()).collect(),
        ..Selection::ALL
    };
    pick(&[r"layers\.1\..*norm", "^visual.merger.mlp.2.bias$"]).apply(&model).unwrap();
    let on: Vec<&str> = model.params().iter().filter(|p| p.trainable()).map(|p| p.name()).collect();
    assert_eq!(
        on,
        [
            "visual.merger.mlp.2.bias",
            "model.layers.1.input_layernorm.weight",
            "model.layers.1.post_attention_layernorm.weight"
        ]
    );
    let fails = |selection: &Selection, parts: &[&str]| {
        let why = told(&selection.apply(&model).unwrap_err());
        assert!(parts.iter().all(|part| why.contains(part)), "{why}");
    };
    fails(&pick(&["norm", "layer\\.7"]), &["layer\\\\.7", "matches no weight", "visual.patch_embed"]);
    fails(
        &Selection { patterns: vec!["visual".into()], projector: false, towers: false, ..Selection::ALL },
        &["matches no weight"],
    );
    fails(&pick(&["("]), &["Selection::patterns"]);
    fails(&Selection::NONE, &["nothing is left to train"]);

    let mut model = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::Auto).unwrap();
    model.add_lora(&lora(0.0)).unwrap();
    // The bias beside an adapted weight belongs to its module.
    let why = told(&pick(&["q_proj.bias"]).apply(&model).unwrap_err());
    assert!(why.contains("q_proj.bias") && why.contains("also has an adapter"), "{why}");
}

#[test]
fn every_part_moves_at_its_own_rate() {
    let model = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::Auto).unwrap();
    Selection::ALL.apply(&model).unwrap();
    let config = AdamWConfig {
        learning_rate: 1e-3,
        projector_lr: Some(1e-2),
        tower_lr: Some(1e-4),
        weight_decay: 0.0,
        max_grad_norm: 0.0,
        ..optimizer()
    };
    let mut adamw = AdamW::new(config, model.params());
    let before = weight_bits(&model);
    for param in model.params() {
        let half = omnigrpo_ops::Rows::from_vec(vec![0.5; param.len()], 1, param.len()).unwrap();
        param.reach(omnigrpo_ops::Device::Cpu);
        param.with_grad(|grad| grad.unwrap().add(&half)).unwrap();
    }
    adamw.step(1.0).unwrap();
    for param in model.params() {
        let rate = match param.part() {
            Part::Llm => 1e-3,
            Part::Projector => 1e-2,
            Part::Vision | Part::Audio | Part::Instruction => 1e-4,
        };
        // The first update of AdamW is the rate itself, against the gradient's sign.
        for (after, before) in param.read().f32().iter().zip(&before[param.name()]) {
            let moved = f32::from_bits(*before) - after;
            assert!((moved / rate - 1.0).abs() < 0.01 + 1e-6 / rate, "{}: {moved}", param.name());
        }
    }
}

#[test]
fn the_table_counts_parameters_adapters_and_memory() {
    let mut model = omnigrpo_testkit::load(&checkpoint("qwen2_5_vl_tied_bf16"), WeightDtype::Auto).unwrap();
    model.add_lora(&lora(0.0)).unwrap();
    PROJECTOR.apply(&model).unwrap();
    let table = summary(&model);
    let row = |part: &str| -> Vec<String> {
        let line = table.lines().find(|line| line.starts_with(part)).unwrap();
        line.split_whitespace().map(str::to_owned).collect()
    };
    let count = |part: Option<Part>, trained: bool| -> usize {
        let own = model.params().iter().filter(|p| part.is_none_or(|part| p.part() == part));
        own.filter(|p| !trained || p.trainable()).map(|p| p.len()).sum()
    };
    for (name, part) in [
        ("llm", Some(Part::Llm)),
        ("projector", Some(Part::Projector)),
        ("vision", Some(Part::Vision)),
        ("total", None),
    ] {
        assert_eq!(row(name)[2], count(part, false).to_string(), "{table}");
        assert_eq!(row(name)[3], count(part, true).to_string(), "{table}");
    }
    let adapters: usize = model.adapter_params().iter().map(|p| p.len()).sum();
    assert_eq!((row("llm")[4].as_str(), row("projector")[4].as_str()), (adapters.to_string().as_str(), "0"));
    // Adapters are f32 and need 12 bytes, a bf16 projector 16 with its master.
    let bytes = 12 * adapters + 16 * count(Some(Part::Projector), true);
    assert_eq!(row("total")[7], format!("{:.1}", bytes as f64 / 1e6), "{table}");
}

#[test]
fn a_gate_is_trained_apart_from_its_projector() {
    let model = omnigrpo_testkit::load(&checkpoint("humanomni"), WeightDtype::Auto).unwrap();
    let none =
        Selection { llm: false, projector: false, towers: false, instruction: false, ..Selection::ALL };
    let trained = |selection: Selection| -> Vec<bool> {
        selection.apply(&model).unwrap();
        model.params().iter().filter(|p| p.trainable()).map(|p| p.name().contains("bert_gate")).collect()
    };
    let gate = trained(Selection { gate: Some(true), ..none.clone() });
    assert!(!gate.is_empty() && gate.iter().all(|is_gate| *is_gate));
    let rest = trained(Selection { projector: true, gate: Some(false), ..none.clone() });
    assert!(!rest.is_empty() && rest.iter().all(|is_gate| !is_gate));
    assert_eq!(trained(Selection { projector: true, ..none.clone() }).len(), gate.len() + rest.len());
    let qwen = omnigrpo_testkit::load(&checkpoint(NAME), WeightDtype::Auto).unwrap();
    let error = told(&Selection { gate: Some(true), ..Selection::ALL }.apply(&qwen).unwrap_err());
    assert!(error.contains("Selection::gate") && error.contains("no gate"), "{error}");
}
