//! Qwen3.5, from rows to gradients, against `transformers` 5.23: blocks of both kinds, a last block of each kind, tied and untied
//! heads, and the language model alone. Prompts cross borders between chunks of the delta rule.

use omnigrpo_models::{Checkpoint, ModelError, Prompt, WeightDtype, WeightFiles};
use omnigrpo_ops::Part;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::rows::{QWEN3_5, cases_of, prompt_of};
use omnigrpo_testkit::{
    Golden, backward, check_forward, check_gradients, checkpoint, copy_dir, model_of, training,
};

fn cases() -> impl Iterator<Item = (&'static str, String)> {
    cases_of(&QWEN3_5)
}

fn prompt(name: &str, case: &str) -> Prompt {
    prompt_of("qwen3_vl", &checkpoint(name), case)
}

fn inputs(case: &str) -> Golden {
    Golden::read(&format!("qwen3_vl/{case}.safetensors"))
}

fn expected(name: &str, case: &str) -> Golden {
    Golden::read(&format!("qwen3_5/{case}.{name}.safetensors"))
}

#[test]
fn ids_positions_features_logits_and_logprobs_equal_the_reference() {
    for (name, case) in cases() {
        let (want, prompt) = (expected(name, &case), prompt(name, &case));
        assert_eq!(prompt.ids, want.ids("prompt_ids"), "{name} {case}");
        for (axis, want) in want.i["position_ids"].chunks(prompt.ids.len()).enumerate() {
            let got: Vec<i64> = prompt.positions.iter().map(|p| i64::from(p[axis])).collect();
            assert_eq!(got, want, "{name} {case} axis {axis}");
        }
        let completion = inputs(&case).ids("completion_ids");
        check_forward(&format!("{name} {case}"), &model_of(name), prompt, &completion, &want);
    }
}

#[test]
fn every_gradient_equals_the_reference() {
    for (name, case) in cases() {
        let model = model_of(name);
        let (want, inputs, prompt) = (expected(name, &case), inputs(&case), prompt(name, &case));
        let completion = inputs.ids("completion_ids");
        for recompute in [false, true] {
            backward(&model, &prompt, &completion, &inputs.f["coefficients"], training(recompute));
            let compared = check_gradients(&model, &want, "", 1e-3);
            let all = model.params().len();
            let llm = model.params().iter().filter(|p| p.part() == Part::Llm).count();
            assert_eq!(compared, if case == "B" { llm } else { all }, "{name} {case}");
        }
    }
}

/// The kinds of blocks are those of `layer_types`, or every fourth block attends if the key is absent.
#[test]
fn blocks_are_of_two_kinds() {
    for (name, delta) in [
        ("qwen3_5", vec![true, false, true]),
        ("qwen3_5_untied", vec![true, true, true, false]),
        ("qwen3_5_text", vec![false, true, true, false, true]),
    ] {
        let config = model_of(name).decoder().config().clone();
        assert_eq!((0..config.layers).map(|l| config.is_delta(l)).collect::<Vec<_>>(), delta, "{name}");
        assert_eq!((config.heads.dim, config.rotary), (16, 8));
    }
}

#[test]
fn what_a_configuration_cannot_mean_is_an_error() {
    type Change = (fn(&mut Value), &'static str);
    let refused: [Change; 7] = [
        (|c| c["layer_types"] = json!(["linear_attention"]), "layer_types has 1 entries"),
        (|c| c["layer_types"][1] = json!("sliding_attention"), "\"full_attention\" and \"linear_attention\""),
        (|c| c["linear_num_value_heads"] = 3.into(), "expected a multiple"),
        (|c| c["linear_num_key_heads"] = 0.into(), "linear_num_key_heads is 0"),
        (|c| c["linear_conv_kernel_dim"] = 9.into(), "linear_conv_kernel_dim is 9; expected 1 to 8"),
        (|c| c["rope_parameters"]["partial_rotary_factor"] = 0.2.into(), "which is 3 of 16 columns"),
        (|c| c["rope_parameters"]["mrope_section"] = json!([4, 2, 2]), "three sizes that sum to 4"),
    ];
    for (change, expected) in refused {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint("qwen3_5"), dir.path());
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        change(&mut config["text_config"]);
        std::fs::write(&path, config.to_string()).unwrap();
        let error = Checkpoint::open(dir.path()).err().map(|error: ModelError| error.to_string());
        let error = error.unwrap_or_default();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// Weights for speculative decoding are not part of the model, and are the same in a saved copy.
#[test]
fn tensors_that_the_model_does_not_use_are_kept_in_a_saved_copy() {
    let (from, dir) = (checkpoint("qwen3_5"), TempDir::new().unwrap());
    model_of("qwen3_5").save_pretrained(dir.path()).unwrap();
    let all = |dir: &std::path::Path| {
        let files = WeightFiles::open(dir, |key| Some(key.to_owned())).unwrap();
        let names: Vec<String> = files.names().map(str::to_owned).collect();
        let read = |name: &String| (name.clone(), files.read(name, WeightDtype::Float32).unwrap().unwrap());
        names.iter().map(read).map(|(name, value)| format!("{name} {value:?}")).collect::<Vec<_>>()
    };
    let (mut before, mut after) = (all(&from), all(dir.path()));
    before.sort_unstable();
    after.sort_unstable();
    assert!(before == after && before.iter().any(|tensor| tensor.starts_with("mtp.fc.weight")));
}
