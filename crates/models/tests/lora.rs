//! Adapters and quantised bases: against `peft` 0.21 on tiny checkpoints, against the same weights merged, widened or
//! bare, and through files. Data and scripts: `tests/golden/README.md`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::path::Path;

use omnigrpo_guard::told;
use omnigrpo_models::{
    Arithmetic, Checkpoint, GroupStream, LoadOptions, LoraConfig, Memories, Model, PackedStream, Prompt,
    Quantization, ReferencePlace, Training, WeightDtype, whole_tensors,
};
use omnigrpo_ops::{Device, ParamDtype, Part, QuantBits};
use omnigrpo_testkit::{
    Golden, Gradients, assert_close, case_prompt, check_gradients, checkpoint, golden, max_diff, model_of,
    take_gradients, training, weight_bits,
};
use safetensors::SafeTensors;

/// Adapter, checkpoint, trained tensors.
const ADAPTERS: [(&str, &str, usize); 11] = [
    ("everywhere", "qwen2_5_vl_tied", 44),
    ("attention", "qwen2_vl_untied", 14),
    ("tiles_hf", "internvl_hf", 26),
    ("tiles_original", "internvl_original", 14),
    ("experts", "aria", 32),
    ("connector", "smolvlm", 38),
    ("hearing", "omni_thinker", 38),
    ("experts_down", "aria", 4),
    ("mergers", "qwen3_vl", 32),
    ("experts_alone", "qwen3_vl_moe", 32),
    ("delta", "qwen3_5", 46),
];

fn adapted(adapter: &str, name: &str) -> Model {
    let mut model = model_of(name);
    model.load_adapter(&golden("lora").join(adapter)).unwrap();
    model
}

fn config(targets: &[&str]) -> LoraConfig {
    let targets = targets.iter().map(|&t| t.to_owned()).collect();
    LoraConfig { rank: 4, alpha: 8.0, dropout: 0.0, rslora: false, targets, seed: 3 }
}

/// `B` is no longer 0.
fn fill(model: &Model) {
    for (i, (_, adapter)) in model.adapted().enumerate() {
        adapter
            .b()
            .update(|b| {
                b.iter_mut().enumerate().for_each(|(j, b)| *b = ((i * 31 + j) as f32 * 0.7).sin() * 0.2)
            })
            .unwrap();
    }
}

fn train_adapters(model: &Model) {
    for param in model.params() {
        param.set_trainable(false);
        param.clear_grad();
    }
    model.adapter_params().iter().for_each(|p| p.set_trainable(true));
}

const COMPLETIONS: [&[u32]; 3] = [&[5, 9, 200, 31], &[5, 9, 17], &[88]];

fn score(model: &Model, case: &str) -> Vec<f32> {
    let prompt = case_prompt(case, model);
    let stream =
        PackedStream::new(&[GroupStream { prompt: &prompt, completions: COMPLETIONS.to_vec() }]).unwrap();
    model.score(&stream, &[model.encode_prompt(&prompt).unwrap()], 1.0).unwrap().0
}

/// Log-probabilities and gradients with the completions in one stream or in streams of their own.
fn pass(model: &Model, prompt: &Prompt, packed: bool, recompute: bool) -> (Vec<f32>, Gradients) {
    pass_of(model, prompt, packed, recompute, 0)
}

/// Returns the pass of the update that `dropout_key` names.
fn pass_of(
    model: &Model,
    prompt: &Prompt,
    packed: bool,
    recompute: bool,
    dropout_key: u64,
) -> (Vec<f32>, Gradients) {
    take_gradients(model);
    let streams: Vec<Vec<&[u32]>> =
        if packed { vec![COMPLETIONS.to_vec()] } else { COMPLETIONS.iter().map(|c| vec![*c]).collect() };
    let plain = model.encode_prompt(prompt).unwrap();
    let training = Training { recompute, dropout_key, ..Training::default() };
    let features = [model.features_in_training(prompt, &plain, training).unwrap()];
    let mut logprobs = Vec::new();
    for completions in streams {
        let stream = PackedStream::new(&[GroupStream { prompt, completions }]).unwrap();
        let pass = model.train_pass(&stream, &features, training, None).unwrap();
        let first = logprobs.len();
        logprobs.extend_from_slice(&pass.logprobs);
        let d: Vec<f32> = (first..logprobs.len()).map(|i| (i as f32 * 1.3).cos()).collect();
        let gradients = pass.backward(&d, None).unwrap();
        model.backward_media(&[prompt], &features, Memories::default(), gradients, training).unwrap();
    }
    (logprobs, take_gradients(model))
}

#[test]
fn values_and_gradients_equal_peft() {
    for (adapter, name, trained) in ADAPTERS {
        // The goldens drop nothing.
        let dir = tempfile::TempDir::new().unwrap();
        omnigrpo_testkit::copy_dir(&golden("lora").join(adapter), dir.path());
        let path = dir.path().join("adapter_config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, config.replace("\"lora_dropout\": 0.1", "\"lora_dropout\": 0.0")).unwrap();
        let mut model = model_of(name);
        model.load_adapter(dir.path()).unwrap();
        assert_eq!(model.lora().unwrap().dropout, 0.0);
        let expected = Golden::read(&format!("lora/{adapter}.safetensors"));
        let (folder, case) = match name {
            "aria" => ("aria", "C"),
            "smolvlm" => ("smolvlm", "C"),
            "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" => ("qwen3_vl", "E"),
            "omni_thinker" => ("qwen_omni", "C"),
            name if name.starts_with("internvl") => ("internvl", "C"),
            _ => ("cases", "E"),
        };
        let inputs = Golden::read(&format!("{folder}/{case}.safetensors"));
        let prompt = case_prompt(case, &model);
        let completion = match name {
            "smolvlm" => Golden::read("smolvlm/C.smolvlm.safetensors").ids("completion_ids"),
            "omni_thinker" => Golden::read("qwen_omni/C.omni_thinker.safetensors").ids("completion_ids"),
            _ => inputs.ids("completion_ids"),
        };
        let whole = whole_tensors(&golden("lora").join(adapter), model.family().format()).unwrap();
        for recompute in [false, true] {
            train_adapters(&model);
            model
                .base_params()
                .iter()
                .filter(|p| whole.contains(p.name()))
                .for_each(|p| p.set_trainable(true));
            let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
            let stream = PackedStream::new(&groups).unwrap();
            let features = [model.encode_prompt(&prompt).unwrap()];
            let pass = model.train_pass(&stream, &features, training(recompute), None).unwrap();
            let d = max_diff(&pass.logprobs, &expected.f["logp"]);
            assert!(d <= 1e-4, "{adapter}: log-probabilities differ by {d}");
            let gradients = pass.backward(&inputs.f["coefficients"], None).unwrap();
            model
                .backward_media(&[&prompt], &features, Memories::default(), gradients, training(recompute))
                .unwrap();
            let compared = check_gradients(&model, &expected, "", 1e-3);
            assert_eq!(compared, trained, "{adapter}");
        }
    }
}

fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, v)| (name, (v.shape().to_vec(), v.data().to_vec()))).collect()
}

#[test]
fn files_are_those_of_peft() {
    for (adapter, name, _) in ADAPTERS {
        let (from, dir) = (golden("lora").join(adapter), tempfile::TempDir::new().unwrap());
        let model = adapted(adapter, name);
        model.save_adapter(dir.path()).unwrap();
        let file = "adapter_model.safetensors";
        assert_eq!(tensors(&dir.path().join(file)), tensors(&from.join(file)), "{adapter}");
        let read = |dir: &Path| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(dir.join("adapter_config.json")).unwrap()).unwrap()
        };
        let (ours, theirs) = (read(dir.path()), read(&from));
        for key in ["peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias"] {
            assert_eq!(ours[key], theirs[key], "{adapter}: {key}");
        }
        // `AutoPeftModel` loads the base by its class and its path, and only without a task.
        let class = &model.checkpoint().config().get("architectures").unwrap()[0];
        assert_eq!(
            (&ours["auto_mapping"]["base_model_class"], &ours["task_type"]),
            (class, &serde_json::Value::Null)
        );
        assert!(Path::new(ours["base_model_name_or_path"].as_str().unwrap()).is_dir(), "{adapter}");
        // And back.
        let mut again = model_of(name);
        again.load_adapter(dir.path()).unwrap();
        assert_eq!(score(&again, "E"), score(&model, "E"));
        fill(&again);
        assert_ne!(score(&again, "E"), score(&model, "E"));
        again.reload_adapter(dir.path()).unwrap();
        assert_eq!(weight_bits(&again), weight_bits(&model));
        assert_eq!(score(&again, "E"), score(&model, "E"));
    }
}

/// Layers with ranks and alphas of their own: PEFT's patterns are read, and written so that what is saved is what was loaded.
#[test]
fn ranks_and_alphas_of_single_layers_survive_saving() {
    let dir = tempfile::TempDir::new().unwrap();
    let (given, saved) = (dir.path().join("given"), dir.path().join("saved"));
    let config_of = |dir: &Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(dir.join("adapter_config.json")).unwrap()).unwrap()
    };
    omnigrpo_testkit::copy_dir(&golden("lora/attention"), &given);
    let plain = adapted("attention", "qwen2_vl_untied");
    let mut config = config_of(&given);
    let alpha = config["lora_alpha"].as_f64().unwrap();
    config["alpha_pattern"] = serde_json::json!({"layers.0.*.v_proj": 3.0 * alpha, "k_proj": alpha});
    config["r"] = 7.into();
    config["lora_alpha"] = (alpha * 7.0 / plain.lora().unwrap().rank as f64).into();
    std::fs::write(given.join("adapter_config.json"), config.to_string()).unwrap();

    let mut model = model_of("qwen2_vl_untied");
    model.load_adapter(&given).unwrap();
    let rank = plain.lora().unwrap().rank;
    let mut ranks = serde_json::Map::new();
    for ((base, own), (_, before)) in model.adapted().zip(plain.adapted()) {
        let wanted = match base.name() {
            name if name.contains("layers.0.") && name.contains("v_proj") => 3.0 * alpha,
            name if name.contains("k_proj") => alpha,
            _ => config["lora_alpha"].as_f64().unwrap(),
        };
        let mut weights = (vec![0.0; base.len()], vec![0.0; base.len()]);
        own.merge_into(&mut weights.0).unwrap();
        before.merge_into(&mut weights.1).unwrap();
        let ratio = (wanted / alpha) as f32;
        weights.1.iter_mut().for_each(|w| *w *= ratio);
        let largest = weights.1.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        assert!(max_diff(&weights.0, &weights.1) <= 1e-6 * largest, "{}", base.name());
        let module = model.family().format().module_name(base.name().strip_suffix(".weight").unwrap());
        ranks.insert(module, rank.into());
    }

    model.save_adapter(&saved).unwrap();
    let written = config_of(&saved);
    assert_eq!(written["rank_pattern"], serde_json::Value::Object(ranks));
    assert_eq!(written["r"], 7);
    assert_eq!(
        written["alpha_pattern"]["model.language_model.layers.0.self_attn.v_proj"].as_f64(),
        Some(3.0 * alpha)
    );
    let mut again = model_of("qwen2_vl_untied");
    again.load_adapter(&saved).unwrap();
    assert_eq!(score(&again, "E"), score(&model, "E"));
    assert_ne!(score(&again, "E"), score(&plain, "E"));
    // Without such layers both patterns are empty.
    plain.save_adapter(&saved).unwrap();
    let written = config_of(&saved);
    assert_eq!(
        (&written["rank_pattern"], &written["alpha_pattern"]),
        (&serde_json::json!({}), &serde_json::json!({}))
    );
}

#[test]
fn a_new_adapter_changes_no_bit_and_the_reference_has_none() {
    for name in ["qwen2_vl_untied", "qwen2_5_vl_tied"] {
        let plain = model_of(name);
        let expected = score(&plain, "E");
        let mut model = model_of(name);
        model.add_lora(&config(&["all-linear", "visual.blocks.0.attn.qkv", "merger.mlp.0"])).unwrap();
        assert_eq!(score(&model, "E"), expected);
        fill(&model);
        let moved = score(&model, "E");
        assert!(max_diff(&moved, &expected) > 1e-2);
        // A module trained whole beside the adapters is copied, everything else is shared.
        train_adapters(&model);
        let norm = model.base_params().iter().find(|p| p.name() == "model.norm.weight").unwrap();
        norm.set_trainable(true);
        let reference = model.reference(ReferencePlace::Memory(model.device())).unwrap();
        norm.update(|w| w[0] += 1.0).unwrap();
        assert_eq!(score(&reference, "E"), expected);
        assert!(reference.params().iter().all(|p| p.adapter().is_none() && !p.trainable()));
        for param in model.base_params() {
            let own = reference.base_params().iter().find(|p| p.name() == param.name()).unwrap();
            let shared = param.shares_storage(own);
            assert_eq!(shared, param.name() != "model.norm.weight", "{}", param.name());
        }
    }
}

#[test]
fn merged_equals_adapted() {
    for (adapter, name, _) in ADAPTERS {
        let mut model = adapted(adapter, name);
        let expected = score(&model, "E");
        model.merge_adapters().unwrap();
        assert!(model.lora().is_none() && model.adapter_params().is_empty());
        // Merging rounds every weight once more.
        let d = max_diff(&score(&model, "E"), &expected);
        assert!(d <= 2e-5, "{adapter}: {d}");
        let dir = tempfile::TempDir::new().unwrap();
        model.save_pretrained(dir.path()).unwrap();
        let saved = omnigrpo_testkit::load(dir.path(), WeightDtype::Auto).unwrap();
        assert_eq!(weight_bits(&saved), weight_bits(&model));
    }
}

#[test]
fn packed_equals_separate_and_masks_belong_to_rows() {
    for (dropout, name, projector) in [
        (0.0, "qwen2_vl_untied", "merger.mlp.2"),
        (0.3, "qwen2_vl_untied", "merger.mlp.2"),
        (0.3, "qwen2_5_vl_tied", "merger.mlp.2"),
        (0.3, "qwen3_5", "merger.linear_fc2"),
    ] {
        let mut model = model_of(name);
        let targets = ["all-linear", "visual.blocks.1.attn.qkv", projector];
        model.add_lora(&LoraConfig { dropout, ..config(&targets) }).unwrap();
        fill(&model);
        train_adapters(&model);
        let prompt = case_prompt("C", &model);
        let separate = pass(&model, &prompt, false, false);
        for recompute in [false, true] {
            let packed = pass(&model, &prompt, true, recompute);
            let d = max_diff(&packed.0, &separate.0);
            assert!(d <= 1e-5, "{name}, dropout {dropout}: log-probabilities differ by {d}");
            assert_close(&packed.1, &separate.1, 5e-5, name);
        }
        assert_eq!(separate.1.len(), model.adapter_params().len());
        // Outside of training nothing is dropped; another update drops something else.
        let scored = score(&model, "C");
        assert_eq!(dropout == 0.0, max_diff(&scored, &separate.0) <= 1e-5);
        let other = pass_of(&model, &prompt, true, false, 1);
        assert_eq!(dropout == 0.0, max_diff(&other.0, &separate.0) <= 1e-5);
    }
}

/// Experts that are named get adapters, each of them; without a name they get none, and they drop nothing.
#[test]
fn experts_get_adapters_where_they_are_named() {
    for name in ["aria", "qwen3_vl_moe"] {
        experts_get_adapters(name);
    }
}

fn experts_get_adapters(name: &str) {
    let adapted = |targets: &[&str], dropout: f64| {
        let mut model = model_of(name);
        let config = LoraConfig { dropout, ..config(targets) };
        let options = LoadOptions { device: Device::Outline, ..LoadOptions::default() };
        let mut outline = Model::load(model.checkpoint(), &LoadOptions { outline: true, ..options }).unwrap();
        let outlined = outline.add_lora(&config);
        model.add_lora(&config)?;
        outlined.unwrap();
        let facts = |model: &Model| -> Vec<_> {
            let adapters = model.adapter_params().iter();
            adapters.map(|p| (p.name().to_owned(), p.shape().to_vec(), p.num_bytes())).collect()
        };
        assert_eq!(facts(&outline), facts(&model));
        Ok::<_, omnigrpo_models::ModelError>(model)
    };
    let names = |model: &Model, of: &str| model.adapted().filter(|(p, _)| p.name().contains(of)).count();
    let plain = adapted(&["all-linear"], 0.3).unwrap();
    let shared = if name == "aria" { 6 } else { 0 };
    let routers = names(&plain, "router") + names(&plain, "mlp.gate.");
    assert_eq!((names(&plain, ".experts."), routers, names(&plain, ".mlp.shared")), (0, 0, shared));
    let layers = plain.decoder().config().layers;
    for (target, each) in [("experts", 2), ("experts.down_proj", 1), ("gate_up_proj", 1)] {
        let count = each * layers;
        let model = adapted(&["all-linear", target], 0.0).unwrap();
        assert_eq!(names(&model, ".experts."), count, "{target}");
        fill(&model);
        train_adapters(&model);
        let prompt = case_prompt("E", &model);
        let separate = pass(&model, &prompt, false, false);
        for recompute in [false, true] {
            let packed = pass(&model, &prompt, true, recompute);
            assert!(max_diff(&packed.0, &separate.0) <= 1e-5, "{target}");
            assert_close(&packed.1, &separate.1, 5e-5, target);
        }
        assert_eq!(separate.1.len(), model.adapter_params().len(), "{target}");
    }
    let error = told(&adapted(&["experts"], 0.05).err().unwrap());
    assert!(error.contains("LoraConfig::dropout") && error.contains("set it to 0"), "{error}");
}

/// Adapters of towers and projectors drop inputs too, the same ones forward and backward.
#[test]
fn adapters_of_media_drop_inputs() {
    for targets in [&["visual.blocks.1.attn.qkv", "merger.mlp.2"][..], &["merger.mlp.0", "merger.mlp.2"]] {
        let mut model = model_of("qwen2_5_vl_tied");
        model.add_lora(&LoraConfig { dropout: 0.3, ..config(targets) }).unwrap();
        fill(&model);
        train_adapters(&model);
        let prompt = case_prompt("C", &model);
        let (logprobs, gradients) = pass(&model, &prompt, true, false);
        assert!(max_diff(&score(&model, "C"), &logprobs) > 1e-3, "{targets:?}: nothing is dropped");
        assert_eq!(gradients.len(), model.adapter_params().len());
        // Along its own direction the gradient is the change of the loss.
        let square: f64 = gradients.values().flatten().map(|g| f64::from(*g).powi(2)).sum();
        let moved = |step: f32| {
            let walk = |step: f32| {
                for param in model.adapter_params() {
                    let g = &gradients[param.name()];
                    param.update(|w| w.iter_mut().zip(g).for_each(|(w, g)| *w += step * g)).unwrap();
                }
            };
            walk(step);
            let (logprobs, _) = pass(&model, &prompt, true, false);
            walk(-step);
            let loss = logprobs.iter().enumerate().map(|(i, x)| f64::from((i as f32 * 1.3).cos() * x));
            loss.sum::<f64>()
        };
        let step = 3e-3 / square.sqrt() as f32;
        let slope = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
        assert!((slope / square - 1.0).abs() < 1e-2, "{targets:?}: {slope} for {square}");
    }
}

/// Loads the weights of a folder, or random ones.
fn in_f32(dir: &Path, random: Option<u64>, bits: Option<QuantBits>) -> Model {
    let keep = |_: &str, part: Part| part == Part::Projector;
    let options = LoadOptions {
        dtype: WeightDtype::Float32,
        quantization: bits.map(|bits| Quantization { bits, keep: &keep }),
        random,
        // With float32 inputs, a quantised model and its widened weights multiply the same numbers.
        arithmetic: Arithmetic { keeps_inputs: true, ..Arithmetic::default() },
        ..LoadOptions::default()
    };
    Model::load(&Checkpoint::open(dir).unwrap(), &options).unwrap()
}

#[test]
fn a_quantised_base_is_its_widened_weights() {
    quantised_equals_widened(&checkpoint("qwen2_5_vl_tied"), None, 14);
    // Rows of the tiny Qwen3.5 are shorter than a group of weights.
    quantised_equals_widened(omnigrpo_testkit::larger_checkpoint("qwen3_5").path(), Some(7), 23);
}

fn quantised_equals_widened(dir: &Path, random: Option<u64>, layers: usize) {
    let mut errors = Vec::new();
    for bits in [QuantBits::Eight, QuantBits::Four] {
        let mut model = in_f32(dir, random, Some(bits));
        let [mut dense, plain] = [(); 2].map(|()| in_f32(dir, random, None));
        let name = model.family().name().to_owned();
        let mut few = 0;
        for (param, wide) in model.base_params().iter().zip(dense.base_params()) {
            let linear = param.part() == Part::Llm && param.is_linear();
            assert_eq!(param.dtype() == ParamDtype::Quantised(bits), linear, "{}", param.name());
            if linear {
                wide.store(&param.read().f32()).unwrap();
                few += 1;
            }
        }
        assert_eq!(few, layers, "{name}");
        for model in [&mut model, &mut dense] {
            model.add_lora(&config(&["all-linear"])).unwrap();
            fill(model);
            train_adapters(model);
        }
        let prompt = case_prompt("C", &model);
        let (got, want) = (pass(&model, &prompt, true, false), pass(&dense, &prompt, true, false));
        assert!(max_diff(&got.0, &want.0) <= 1e-5, "{name}: {}", max_diff(&got.0, &want.0));
        assert_close(&got.1, &want.1, 5e-5, &name);
        // The reference shares the few bits.
        let off = score(&model.reference(ReferencePlace::Memory(model.device())).unwrap(), "C");
        errors.push(max_diff(&off, &score(&plain, "C")));
        let dir = tempfile::TempDir::new().unwrap();
        let why = told(&model.save_pretrained(dir.path()).unwrap_err());
        assert!(why.contains("is quantised"), "{why}");
        assert!(model.merge_adapters().is_err());
        model.save_adapter(dir.path()).unwrap();
    }
    // The steps differ by a factor of 17.
    assert!(errors[0] > 0.0 && 5.0 * errors[0] < errors[1], "{errors:?}");
}

#[test]
fn targets_are_found_by_their_ends_in_the_language_model_first() {
    let chosen = |targets: &[&str]| -> Vec<String> {
        let mut model = model_of("qwen2_5_vl_tied");
        model.add_lora(&config(targets)).unwrap();
        model.adapted().map(|(p, _)| p.name().trim_end_matches(".weight").to_owned()).collect()
    };
    let all = chosen(&["all-linear"]);
    assert_eq!(all.len(), 14);
    assert!(all.iter().all(|n| n.starts_with("model.layers.")), "no tower, projector or head: {all:?}");
    assert_eq!(chosen(&["gate_proj"]), ["model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj"]);
    assert_eq!(chosen(&["attn.qkv"]).len(), 4);
    assert_eq!(chosen(&["visual.blocks.2.mlp.gate_proj"]), ["visual.blocks.2.mlp.gate_proj"]);
    assert_eq!(chosen(&[r"model\.language_model\.layers\.1\..*_proj"]).len(), 7);
    assert_eq!(chosen(&["q_proj", "layers.0.self_attn.q_proj"]).len(), 2);
    let fails = |targets: &[&str], part: &str| {
        let why = told(&model_of("qwen2_5_vl_tied").add_lora(&config(targets)).unwrap_err());
        assert!(why.contains(part), "{why}");
    };
    fails(&["q_proj", "query"], "\"query\": names no linear layer");
    fails(&["query"], "q_proj");
    fails(&["lm_head"], "output head");
    fails(&["(q_proj"], "LoraConfig::targets");
    fails(&["embed_tokens"], "names no linear layer");
    let mut model = model_of("qwen2_5_vl_tied");
    let layer = model.base_params().iter().find(|p| p.name().ends_with("q_proj.weight")).unwrap();
    layer.set_trainable(true);
    assert!(model.add_lora(&config(&["q_proj"])).unwrap_err().to_string().contains("trained weight"));
}

#[test]
fn start_values_are_uniform_and_keyed_by_seed_and_layer() {
    let start = |seed: u64| {
        let mut model = model_of("qwen2_5_vl_tied");
        model.add_lora(&LoraConfig { seed, ..config(&["q_proj"]) }).unwrap();
        let of = |(_, a): (_, &std::sync::Arc<omnigrpo_ops::Adapter>)| a.a().read().f32().into_owned();
        model.adapted().map(of).collect::<Vec<_>>()
    };
    let (one, two) = (start(1), start(2));
    assert_eq!(one, start(1));
    assert!(one[0] != one[1] && one[0] != two[0]);
    // ±1/√64, and the variance of a uniform number.
    let bound = 0.125f32;
    assert!(one.iter().flatten().all(|x| x.abs() <= bound));
    let variance = one.iter().flatten().map(|x| x * x).sum::<f32>() / (2.0 * 256.0);
    assert!((variance / (bound * bound / 3.0) - 1.0).abs() < 0.2, "{variance}");
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let from = golden("lora/attention");
    let fails = |change: &dyn Fn(&Path), part: &str| {
        let dir = tempfile::TempDir::new().unwrap();
        omnigrpo_testkit::copy_dir(&from, dir.path());
        change(dir.path());
        let why = told(&model_of("qwen2_vl_untied").load_adapter(dir.path()).unwrap_err());
        assert!(why.contains(part), "`{part}` is not in: {why}");
    };
    let set = |key: &'static str, value: serde_json::Value| {
        move |dir: &Path| {
            let path = dir.join("adapter_config.json");
            let mut config: serde_json::Value =
                serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            config[key] = value.clone();
            std::fs::write(path, config.to_string()).unwrap();
        }
    };
    fails(&set("peft_type", "IA3".into()), "expected LORA");
    fails(&set("use_dora", true.into()), "use_dora");
    fails(&set("bias", "all".into()), "bias");
    fails(&set("alpha_pattern", serde_json::json!({"q_proj": "4"})), "q_proj is \"4\"");
    fails(&set("alpha_pattern", serde_json::json!({"q(": 4})), "alpha_pattern \"q(\"");
    fails(&set("layer_replication", serde_json::json!([[0, 2], [1, 2]])), "layer_replication is set");
    fails(&set("use_rslora", "yes".into()), "use_rslora is \"yes\"; expected true or false");
    fails(&set("init_lora_weights", "pissa_niter_16".into()), "pissa");
    fails(&set("r", 0.into()), "r is 0");
    fails(&set("r", 20_000.into()), "1 to 16384");
    fails(&set("lora_dropout", 1.0.into()), "lora_dropout is 1");
    fails(
        &|dir| std::fs::write(dir.join("adapter_config.json"), "{").unwrap(),
        "does not contain the expected JSON",
    );
    fails(&|dir| std::fs::remove_file(dir.join("adapter_config.json")).unwrap(), "adapter_config.json");
    let weights = |dir: &Path| dir.join("adapter_model.safetensors");
    fails(&|dir| std::fs::write(weights(dir), "oops").unwrap(), "cannot be read as safetensors");
    fails(&|dir| std::fs::rename(weights(dir), dir.join("adapter_model.bin")).unwrap(), "pickle");
    type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;
    let rewrite = |change: &'static dyn Fn(&mut Tensors)| {
        move |dir: &Path| {
            let path = dir.join("adapter_model.safetensors");
            let mut all = tensors(&path);
            change(&mut all);
            let views: Vec<_> = all
                .iter()
                .map(|(name, (shape, data))| {
                    (
                        name,
                        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data)
                            .unwrap(),
                    )
                })
                .collect();
            safetensors::serialize_to_file(views, None, &path).unwrap();
        }
    };
    const A: &str = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight";
    fails(&rewrite(&|t| drop(t.remove(A))), "lacks lora_A or lora_B");
    fails(&rewrite(&|t| drop(t.insert(A.replace("q_proj", "z_proj"), t[A].clone()))), "not a linear layer");
    fails(&rewrite(&|t| t.get_mut(A).unwrap().0 = vec![64, 3]), "expected [r, 64]");
    fails(&rewrite(&|t| t.get_mut(A).unwrap().1[..4].copy_from_slice(&f32::NAN.to_le_bytes())), "finite");
    fails(
        &rewrite(&|t| drop(t.insert("base_model.model.extra.weight".into(), (vec![1], vec![0; 4])))),
        "extra.weight",
    );
    fails(
        &rewrite(&|t| drop(t.insert(A.replace("lora_A.weight", "lora_embedding_A"), (vec![1], vec![0; 4])))),
        "only lora_A and lora_B",
    );
    // Another family.
    let why = told(&model_of("qwen2_5_vl_tied").load_adapter(&from).unwrap_err());
    assert!(why.contains("merger") || why.contains("shape"), "{why}");
    assert!(Checkpoint::open(&checkpoint("qwen2_vl_untied")).is_ok());
}
