//! Every model path against `transformers` 5.23 on tiny checkpoints: positions, tower stages, logits, log-probabilities,
//! every gradient, greedy text. Data and scripts: `tests/golden/README.md`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod support;

use omnigrpo_models::{GroupStream, Model, PackedStream, WeightDtype};
use omnigrpo_ops::with_f32;
use support::{CHECKPOINTS, Golden, case_prompt, check_gradients, checkpoint, max_diff, train_all};

const CASES: [&str; 6] = ["A", "B", "C", "D1", "D2", "E"];

fn load(name: &str) -> Model {
    Model::load(&checkpoint(name), WeightDtype::Auto).unwrap()
}

#[test]
fn positions_logits_and_logprobs_equal_transformers() {
    let untied = ["qwen2_vl_untied", "qwen2_5_vl_untied"].map(|c| (c, vec!["E"]));
    let tied = CHECKPOINTS.map(|c| (c, CASES.to_vec()));
    for (name, cases) in tied.into_iter().chain(untied) {
        let model = load(name);
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
        let model = load(name);
        let expected = Golden::read(&format!("cases/A.{name}.safetensors"));
        let prompt = case_prompt("A", &model);
        let features = model.encode_prompt(&prompt).unwrap();
        let x = model.embed_prompt(&prompt, &features).unwrap();
        let embeds = with_f32(&x, |x| max_diff(x, &expected.f["inputs_embeds"])).unwrap();
        assert!(embeds <= 1e-4, "{name}: embeddings differ by {embeds}");
        let decoder = model.decoder();
        let layout = std::sync::Arc::new(omnigrpo_ops::AttentionLayout::causal(prompt.ids.len()));
        let rows: Vec<usize> = (0..prompt.ids.len()).collect();
        let hidden =
            decoder.forward(x, &decoder.rope_table(&prompt.positions), &layout, &rows, None).unwrap();
        let logits = decoder.logits(&omnigrpo_ops::to_vec(&hidden).unwrap()).unwrap();
        let delta = max_diff(&logits, &expected.f["logits"][..logits.len()]);
        assert!(delta <= 1e-4, "{name}: logits differ by {delta}");
    }
}

#[test]
fn features_equal_transformers() {
    for name in CHECKPOINTS {
        let model = load(name);
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
                    rows.extend(omnigrpo_ops::to_vec(&features.rows).unwrap());
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
    for (name, cases) in
        [("qwen2_vl_tied", &CASES[..]), ("qwen2_5_vl_tied", &CASES[..]), ("qwen2_5_vl_untied", &["E"][..])]
    {
        let model = load(name);
        for case in cases {
            for recompute in [false, true] {
                let expected = Golden::read(&format!("cases/{case}.{name}.safetensors"));
                let inputs = Golden::read(&format!("cases/{case}.safetensors"));
                let prompt = case_prompt(case, &model);
                let completion = inputs.ids("completion_ids");
                let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
                let stream = PackedStream::new(&groups).unwrap();
                train_all(&model);
                let features = [model.encode_prompt(&prompt).unwrap()];
                let pass = model.train_pass(&stream, &features, 1.0, recompute).unwrap();
                let gradients = pass.backward(&inputs.f["coefficients"], None).unwrap();
                model.backward_media(&[&prompt], &features, gradients, recompute).unwrap();
                let compared = check_gradients(&model, &expected, "", 1e-3);
                assert!(compared >= 20, "{name} {case}: only {compared} gradients");
            }
        }
    }
}
