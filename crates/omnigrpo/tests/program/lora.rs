//! Adapters from the command line: training, resuming, use, merging, quantised weights, and refused settings.

use crate::support::{Place, numbers};
use omnigrpo::session::{Loaded, checked};
use omnigrpo::settings::Verb;
use serde_json::{Value, json};

const TRAIN: &str = "--threads 1 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 4 \
                     --train_file rows.jsonl --reward_funcs random --learning_rate 1e-2";
const LORA: &str = "--use_peft --lora_r 4 --lora_alpha 8";

fn scores(place: &Place, model: &str, output: &str) -> Vec<f64> {
    let mut rows = place.lines("rows.jsonl");
    rows.iter_mut().for_each(|row| row["completions"] = json!(["one", "two 2"]));
    place.write("scored-rows.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    place.run(&format!("score {model} --input scored-rows.jsonl --output {output} --threads 1")).ok();
    let all = place.lines(output);
    let completions = all.iter().flat_map(|row| row["completions"].as_array().unwrap().clone());
    completions.flat_map(|c| numbers(&c["logprobs"])).collect()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn an_adapter_is_trained_resumed_used_and_merged() {
    let place = Place::new();
    let run = format!("train --model M {TRAIN} {LORA} --tune_mm_mlp true --save_steps 1 --output_dir run");
    let ran = place.run(&format!("{run} --max_steps 2")).ok();
    assert!(ran.stderr.contains("of adapters"), "{}", ran.stderr);
    for dir in ["run", "run/checkpoint-1", "run/checkpoint-2"] {
        let names = place.names(dir);
        let has = |name: &str| names.iter().any(|n| n == name);
        assert!(has("adapter_config.json") && has("adapter_model.safetensors"), "{dir}: {names:?}");
        assert!(!has("model.safetensors") && !has("config.json"), "{dir}: {names:?}");
    }
    let config: Value = serde_json::from_str(&place.text("run/adapter_config.json")).unwrap();
    assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(4), &json!(8)));
    assert_eq!(config["target_modules"].as_array().unwrap().len(), 14);
    assert!(config["modules_to_save"].as_array().unwrap().contains(&json!("model.visual.merger.mlp.0")));
    assert!(place.text("run/README.md").contains("library_name: peft"));
    // The first update reuses the rollout's numbers, which differ from the reference's by rounding.
    assert!(place.lines("run/metrics.jsonl")[0]["kl"].as_f64().unwrap().abs() < 1e-9);
    let ran = place.run(&format!("{run} --max_steps 3")).ok();
    assert!(ran.stderr.contains("resuming from run/checkpoint-2"), "{}", ran.stderr);

    let plain = scores(&place, "--model M", "plain.jsonl");
    let adapted = scores(&place, "--model M --adapter_path run", "adapted.jsonl");
    assert!(distance(&plain, &adapted) > 1e-3);
    let merge = "export --model M --adapter_name_or_path run --merge --output_dir merged";
    place.run(merge).ok();
    let merged = scores(&place, "--model merged", "merged.jsonl");
    assert!(distance(&merged, &adapted) <= 2e-5, "{}", distance(&merged, &adapted));
    place.run(merge).fails(2, &["is not empty"]);
    // Quantised weights change the answer a little; the adapter is added to them.
    let eight = scores(&place, "--model M --adapter_path run --load_in_8bit", "eight.jsonl");
    assert!((1e-7..0.3).contains(&distance(&eight, &adapted)), "{}", distance(&eight, &adapted));

    place
        .run("eval --model M --adapter_path run --eval_file rows.jsonl --max_completion_length 4 --threads 1")
        .ok();
    // Training continues with the rank and scale of the adapter.
    let go_on =
        "sft --model M --adapter_path run --train_file rows.jsonl --max_steps 1 --threads 1 --output_dir on";
    place.run(go_on).ok();
    let config: Value = serde_json::from_str(&place.text("on/adapter_config.json")).unwrap();
    assert_eq!(config["r"], json!(4));
    // The projector that came with the adapter stays, although it is no longer trained.
    assert!(config["modules_to_save"].as_array().unwrap().contains(&json!("model.visual.merger.mlp.0")));
    place.run(&format!("{go_on} --lora_r 8")).fails(2, &["lora_r", "has its own"]);
    place.run("score --model run --input rows.jsonl --output x.jsonl").fails(2, &["contains an adapter"]);
}

#[test]
fn four_bits_under_adapters_and_patterns() {
    let place = Place::new();
    let line = format!("train --model M {TRAIN} {LORA} --max_steps 1");
    place.run(&format!("{line} --load_in_4bit --output_dir four")).ok();
    assert!(place.exists("four/adapter_model.safetensors"));
    place
        .run(&format!(
            "train --model M {TRAIN} --max_steps 1 --trainable_patterns layers.1.mlp --output_dir few"
        ))
        .ok();
    assert!(place.exists("few/model.safetensors"));
    let fails = |flags: &str, code: i32, parts: &[&str]| {
        place
            .run(&format!("train --model M {TRAIN} --max_steps 1 --output_dir no {flags}"))
            .fails(code, parts);
    };
    fails("--load_in_4bit", 2, &["quantised weights cannot be trained", "--use_peft"]);
    fails("--use_peft --load_in_4bit --load_in_8bit", 2, &["8 and 4 bits"]);
    fails("--lora_r 8", 2, &["lora_r", "`use_peft` is false"]);
    fails("--use_peft --lora_target_modules nothing_here", 1, &["nothing_here", "names no linear layer"]);
    fails("--trainable_patterns nothing_here", 1, &["nothing_here", "matches no weight"]);
    fails("--use_peft --trainable_patterns mlp", 2, &["no part is trained as a whole"]);
    fails("--use_peft --tune_mm_llm true", 1, &["also has an adapter"]);
    fails("--lora_modules_to_save merger", 2, &["tune_mm_mlp"]);
    place.run("export --model M --output_dir out").fails(2, &["nothing to export"]);
}

/// A run keeps two choices that change bits: the path of bf16 products, and the activations of products with quantised weights.
#[test]
fn a_run_is_resumed_with_the_products_it_began_with() {
    let place = Place::new();
    let line = |steps: u32, more: &str| {
        format!(
            "train --model M {TRAIN} {LORA} --load_in_8bit --output_dir out --max_steps {steps} --save_steps 1 {more}"
        )
    };
    place.run(&line(1, "--bf16_products widened --quantized_activations float32")).ok();
    let refused = place.run(&line(2, "--bf16_products widened --resume_from_checkpoint must"));
    refused.fails(1, &["was written with other settings", "quantized_activations: \"float32\" → \"auto\""]);
    let path = "out/checkpoint-1/trainer_state.json";
    let state = place.text(path);
    let other = state.replace("\"path of bf16 products\":\"widened\"", "\"path of bf16 products\":\"dot\"");
    let other = other.replace("\"path of bf16 products\": \"widened\"", "\"path of bf16 products\": \"dot\"");
    assert_ne!(state, other);
    place.rewrite_of_checkpoint("out/checkpoint-1", "trainer_state.json", &other);
    place
        .run(&line(
            2,
            "--bf16_products widened --quantized_activations float32 --resume_from_checkpoint must",
        ))
        .fails(1, &["was written with other settings", "path of bf16 products: \"dot\" → \"widened\""]);
}

/// Two models in one process, which multiply in different ways on two threads, keep their own numbers.
#[test]
fn two_models_do_not_change_each_others_numbers() {
    let settings = |form: &str| {
        let dir = crate::support::golden("checkpoints/qwen2_5_vl_tied");
        json!({ "model_name_or_path": dir, "load_in_8bit": true, "quantized_activations": form, "device": "cpu" })
    };
    let score = |model: &Loaded, form: &str| -> Vec<u32> {
        let row = json!({ "prompt": "What is 1 + 1? Which colour is the circle on the left?" });
        let given = checked(Verb::Score, settings(form)).unwrap();
        let all = model.score(given, row, &["red circle blue".to_owned()], ".".as_ref()).unwrap();
        all[0].iter().map(|x| x.to_bits()).collect()
    };
    let forms = ["float32", "auto"];
    let models = forms.map(|form| Loaded::open(checked(Verb::Generate, settings(form)).unwrap()).unwrap());
    let alone = [0, 1].map(|at| score(&models[at], forms[at]));
    let auto = omnigrpo::Arithmetic::default();
    assert_eq!(alone[0] != alone[1], auto.rounds_inputs() || auto.rounds_bf16());
    let score = &score;
    std::thread::scope(|threads| {
        for ((model, form), alone) in models.iter().zip(forms).zip(&alone) {
            threads.spawn(move || (0..20).for_each(|_| assert_eq!(score(model, form), *alone, "{form}")));
        }
    });
}
