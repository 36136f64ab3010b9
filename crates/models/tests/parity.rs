//! Every model path against `transformers` 5.23 on tiny checkpoints: positions, tower stages, logits, log-probabilities,
//! every gradient, greedy text. Data and scripts: `tests/golden/README.md`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "parity/aria.rs"]
mod aria;
#[path = "parity/blocks.rs"]
mod blocks;
#[path = "parity/decoders.rs"]
mod decoders;
#[path = "parity/emulated.rs"]
mod emulated;
#[path = "parity/networks.rs"]
mod networks;
#[path = "parity/omni.rs"]
mod omni;
#[path = "parity/qwen3_5.rs"]
mod qwen3_5;
#[path = "parity/qwen3_vl.rs"]
mod qwen3_vl;
#[path = "parity/smolvlm.rs"]
mod smolvlm;
#[path = "parity/turns.rs"]
mod turns;

use omnigrpo_models::{
    Checkpoint, ConfigJson, GroupStream, LoadOptions, Memories, Model, ModelError, PackedStream, Prompt,
    Rope, RopeScaling, TextDefaults, Training, WeightDtype,
};
use omnigrpo_testkit::{
    CHECKPOINTS, Golden, QWENS, TEXTS, assert_close, backward, case_prompt, causal_logits, check_gradients,
    check_reach, checkpoint, golden, max_diff, model_of, rows, take_gradients, train_all, training,
};
use serde_json::{Map, Value, json};

const CASES: [&str; 6] = ["A", "B", "C", "D1", "D2", "E"];

#[test]
fn positions_logits_and_logprobs_equal_transformers() {
    let untied = ["qwen2_vl_untied", "qwen2_5_vl_untied"].map(|c| (c, vec!["E"]));
    let tied = CHECKPOINTS.map(|c| (c, CASES.to_vec()));
    let texts = TEXTS.map(|c| (c, vec!["B"]));
    for (name, cases) in tied.into_iter().chain(untied).chain(texts) {
        let model = model_of(name);
        for case in cases {
            let expected = Golden::read(&format!("cases/{case}.{name}.safetensors"));
            let inputs = Golden::read(&format!("cases/{case}.safetensors"));
            let prompt = case_prompt(case, &model);
            let positions = &expected.i["position_ids"];
            let len = prompt.ids.len();
            for (axis, want) in positions.chunks(positions.len() / 3).enumerate() {
                let got: Vec<i64> = prompt.positions.iter().map(|p| i64::from(p[axis])).collect();
                assert_eq!(got, want[..len], "{name} {case} axis {axis}");
                if let Some(&next) = want.get(len) {
                    assert_eq!(i64::from(prompt.next_position), next);
                }
            }
            let completion = inputs.ids("completion_ids");
            let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
            let stream = PackedStream::new(&groups).unwrap();
            let features = vec![model.encode_prompt(&prompt).unwrap()];
            let (logp, entropy) = model.score(&stream, &features, 1.0).unwrap();
            let delta = max_diff(&logp, &expected.f["logp"]);
            assert!(delta <= 1e-4, "{name} {case}: log-probabilities differ by {delta}");
            assert!(entropy.iter().all(|e| *e > 0.0 && *e < 320f32.ln()));
        }
    }
}

#[test]
fn logits_equal_transformers() {
    for name in CHECKPOINTS {
        let model = model_of(name);
        let expected = Golden::read(&format!("cases/A.{name}.safetensors"));
        let prompt = case_prompt("A", &model);
        let features = model.encode_prompt(&prompt).unwrap();
        let x = model.embed_prompt(&prompt, &features).unwrap();
        let embeds = max_diff(&x.x.rows().to_vec(), &expected.f["inputs_embeds"]);
        assert!(embeds <= 1e-4, "{name}: embeddings differ by {embeds}");
        let rows: Vec<usize> = (0..prompt.ids.len()).collect();
        let logits = causal_logits(&model, x, &prompt.positions, &rows);
        let delta = max_diff(&logits, &expected.f["logits"][..logits.len()]);
        assert!(delta <= 1e-4, "{name}: logits differ by {delta}");
    }
    for name in TEXTS {
        let model = model_of(name);
        let expected = Golden::read(&format!("cases/B.{name}.safetensors"));
        let prompt = case_prompt("B", &model);
        let x = model.embed_prompt(&prompt, &[]).unwrap();
        // Every eighth row of the prompt and its completion.
        let rows: Vec<usize> = (0..prompt.ids.len()).step_by(8).collect();
        let logits = causal_logits(&model, x, &prompt.positions, &rows);
        let delta = max_diff(&logits, &expected.f["logits"][..logits.len()]);
        assert!(logits.len() >= 8 * 320 && delta <= 1e-4, "{name}: logits differ by {delta}");
    }
}

#[test]
fn features_equal_transformers() {
    for name in CHECKPOINTS {
        let model = model_of(name);
        for case in ["A", "C", "D1", "E"] {
            let expected = Golden::read(&format!("cases/{case}.{name}.safetensors"));
            let prompt = case_prompt(case, &model);
            for (kind, key) in [
                (omnigrpo_text::MediumKind::Image, "image.merger"),
                (omnigrpo_text::MediumKind::Video, "video.merger"),
            ] {
                let mut rows = Vec::new();
                for medium in prompt.media.iter().filter(|m| m.kind == kind) {
                    let features = model.encode(medium, &[]).unwrap();
                    rows.extend(features.rows.to_vec());
                }
                match expected.f.get(key) {
                    Some(want) => {
                        let delta = max_diff(&rows, want);
                        assert!(delta <= 1e-4, "{name} {case} {key}: features differ by {delta}");
                    }
                    None => assert!(rows.is_empty()),
                }
            }
        }
    }
}

#[test]
fn every_gradient_equals_transformers() {
    let qwens =
        [("qwen2_vl_tied", &CASES[..]), ("qwen2_5_vl_tied", &CASES[..]), ("qwen2_5_vl_untied", &["E"][..])];
    for (name, cases) in qwens.into_iter().chain(TEXTS.map(|name| (name, &["B"][..]))) {
        let model = model_of(name);
        for case in cases {
            for recompute in [false, true] {
                let expected = Golden::read(&format!("cases/{case}.{name}.safetensors"));
                let inputs = Golden::read(&format!("cases/{case}.safetensors"));
                let prompt = case_prompt(case, &model);
                let completion = inputs.ids("completion_ids");
                backward(&model, &prompt, &completion, &inputs.f["coefficients"], training(recompute));
                let compared = check_gradients(&model, &expected, "", 1e-3);
                assert!(compared >= 20, "{name} {case}: only {compared} gradients");
            }
        }
    }
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// A checkpoint under another `rope_scaling`.
fn rescaled(name: &str, scaling: &Value) -> Model {
    let text = std::fs::read_to_string(checkpoint(name).join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let section = ["text_config", "llm_config"].into_iter().find(|key| config.get(*key).is_some());
    let mut overrides = Map::new();
    let mut scaling = scaling.clone();
    if name.starts_with("qwen") {
        scaling["mrope_section"] = json!([2, 3, 3]);
    }
    match section {
        Some(key) => {
            let mut section = config[key].clone();
            section["rope_scaling"] = scaling;
            overrides.insert(key.into(), section);
        }
        None => _ = overrides.insert("rope_scaling".into(), scaling),
    }
    let opened = Checkpoint::open_with(&checkpoint(name), |_| Ok::<_, ModelError>(overrides)).unwrap();
    // In f32, as the numbers it is compared with: some CPUs round what a bf16 weight is multiplied with.
    let options = LoadOptions { dtype: WeightDtype::Float32, ..LoadOptions::default() };
    Model::load(&opened, &options).unwrap()
}

/// A prompt of the ids 20 to 39.
fn counting() -> Prompt {
    Prompt {
        ids: (20..40).collect(),
        spans: Vec::new(),
        positions: (0..20).map(|i| [i; 3]).collect(),
        next_position: 20,
        media: Vec::new(),
        instruction: Vec::new(),
        text: String::new(),
    }
}

#[test]
fn scaled_rotary_positions_equal_transformers() {
    let want: Value = serde_json::from_slice(&std::fs::read(golden("rope.json")).unwrap()).unwrap();
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("config.json");
    for row in want["frequencies"].as_array().unwrap() {
        let kind = row["kind"].as_str().unwrap();
        let config = json!({
            "rope_scaling": want["scalings"][kind],
            "rope_theta": row["theta"],
            "max_position_embeddings": row["max_position_embeddings"],
        });
        std::fs::write(&path, config.to_string()).unwrap();
        let dim = row["dim"].as_u64().unwrap() as usize;
        let rope = Rope::parse(&ConfigJson::read(&path).unwrap(), dim, &TextDefaults::QWEN2).unwrap();
        for (i, (got, want)) in rope.frequencies(dim).iter().zip(numbers(&row["frequencies"])).enumerate() {
            assert!((got - want).abs() <= 2e-6 * want, "{kind} of {dim}, pair {i}: {got} for {want}");
        }
        let attention = row["attention"].as_f64().unwrap();
        assert!((f64::from(rope.attention()) - attention).abs() < 1e-6, "{kind}: {}", rope.attention());
    }
    let completion: Vec<u32> = (40..60).collect();
    for (key, want_logp) in want["logp"].as_object().unwrap() {
        let (name, kind) = key.split_once('.').unwrap();
        let model = rescaled(name, &want["scalings"][kind]);
        let (prompt, completion) = match name.starts_with("qwen") {
            true => (case_prompt("E", &model), Golden::read("cases/E.safetensors").ids("completion_ids")),
            false => (counting(), completion.clone()),
        };
        let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
        let features = vec![model.encode_prompt(&prompt).unwrap()];
        let (logp, _) = model.score(&PackedStream::new(&groups).unwrap(), &features, 1.0).unwrap();
        let delta = max_diff(&logp, &numbers(want_logp));
        assert!(delta <= 1e-4, "{key}: log-probabilities differ by {delta}");
    }
}

#[test]
fn what_a_pass_would_reach_is_known_without_it() {
    for name in QWENS {
        let model = model_of(name);
        let prompts = ["A", "B", "C", "D1"].map(|case| case_prompt(case, &model));
        let counts = check_reach(&model, &prompts, &[7, 9, 100]);
        assert!(counts[0] == counts[2] && counts[2] == counts[3] && counts[1] < counts[0], "{counts:?}");
    }
}

/// Rotated queries and keys that are stretched by `a` are queries that are `a²` as long.
#[test]
fn stretched_rotations_carry_their_gradients() {
    let model = |attention: f64| {
        let scaling = json!({"type": "yarn", "factor": 4.0, "attention_factor": attention});
        let model = rescaled("qwen2_5_vl_tied", &scaling);
        assert!(
            matches!(model.decoder().config().rope.scaling, RopeScaling::Yarn { attention: a, .. } if a == attention)
        );
        model
    };
    let (stretched, longer) = (model(1.3), model(1.0));
    let is_query = |name: &str| name.contains("self_attn.q_proj") && !name.starts_with("visual");
    for param in longer.params().iter().filter(|p| is_query(p.name())) {
        param.update(|w| w.iter_mut().for_each(|w| *w *= 1.69)).unwrap();
    }
    let run = |model: &Model| {
        let (prompt, completion) =
            (case_prompt("C", model), Golden::read("cases/C.safetensors").ids("completion_ids"));
        let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
        let stream = PackedStream::new(&groups).unwrap();
        train_all(model);
        let features = [model.encode_prompt(&prompt).unwrap()];
        let pass = model.train_pass(&stream, &features, Training::default(), None).unwrap();
        let logp = pass.logprobs.clone();
        let d: Vec<f32> = (0..logp.len()).map(|i| (i as f32 * 1.3).cos()).collect();
        let gradients = pass.backward(&d, None).unwrap();
        model
            .backward_media(&[&prompt], &features, Memories::default(), gradients, Training::default())
            .unwrap();
        (logp, take_gradients(model))
    };
    let ((logp, got), (want_logp, mut want)) = (run(&stretched), run(&longer));
    assert!(max_diff(&logp, &want_logp) <= 1e-4);
    for (_, gradient) in want.iter_mut().filter(|(name, _)| is_query(name)) {
        gradient.iter_mut().for_each(|g| *g *= 1.69);
    }
    assert_close(&got, &want, 1e-4, "stretched");
}
