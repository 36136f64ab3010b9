//! One step of each source's launch script with the numbers that it publishes: lengths, batches, generations, rates. Only the
//! model is a tiny one, the data are a few rows, the run has one step, and nothing is sent to the hub.

use std::fs;
use std::path::Path;

use crate::support::published::{
    ACTIONS, ADAPTERS, INTERNVL, NO_THINK, R1_OMNI, R1_V, VIDEO_R1, VLM_R1, VLM_R1_GUI,
};
use crate::support::{Place, golden};
use serde_json::{Value, json};

/// Copies a directory.
fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let file = entry.unwrap().path();
        let target = to.join(file.file_name().unwrap());
        if file.is_dir() {
            copy(&file, &target);
        } else {
            fs::copy(&file, target).unwrap();
        }
    }
}

/// Copies a tiny checkpoint to `model`, with room for the published lengths, and the files that the scripts name.
fn place(checkpoint: &str) -> Place {
    let place = Place::new();
    copy(&golden("checkpoints").join(checkpoint), &place.path("model"));
    let config = place.text("model/config.json");
    let roomy = config.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 4096");
    assert_ne!(config, roomy, "{checkpoint}");
    place.write("model/config.json", roomy);
    fs::create_dir(place.path("local_scripts")).unwrap();
    for name in ["zero2.json", "zero3.json"] {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/deepspeed/");
        fs::copy(format!("{file}{name}"), place.path("local_scripts").join(name)).unwrap();
    }
    fs::create_dir(place.path("frames")).unwrap();
    for t in 0..8 {
        let name = format!("frames/{t:04}.png");
        fs::copy(golden("media").join(&name), place.path(&name)).unwrap();
    }
    fs::copy(golden("media/rise.wav"), place.path("rise.wav")).unwrap();
    place
}

/// Numbers of a script: prompts of a step, completions of a prompt, most tokens of a completion.
struct Numbers {
    prompts: usize,
    generations: usize,
    length: u64,
}

/// Replaces the model, and the number of steps if the script has one.
fn shortened(line: &str) -> String {
    let mut words: Vec<&str> = line.split_whitespace().collect();
    let mut set = |name: &str, value: &'static str| {
        let at = words.iter().position(|word| *word == name)?;
        words[at + 1] = value;
        Some(())
    };
    set("--model_name_or_path", "model").unwrap();
    set("--push_to_hub", "false");
    let has_steps = set("--max_steps", "1").is_some();
    // A run that is not pushed takes no repository.
    if let Some(at) = words.iter().position(|word| *word == "--hub_model_id") {
        words.drain(at..at + 2);
    }
    let more = if has_steps { "" } else { " --max_steps 1" };
    format!("{}{more}", words.join(" "))
}

/// Runs the script and compares the step with its numbers.
fn one_step(place: &Place, preset: &str, line: &str, numbers: &Numbers) -> Vec<Value> {
    let line = shortened(line);
    let dir = line.split_once("--output_dir ").unwrap().1.split(' ').next().unwrap().to_owned();
    let ran = place.run(&format!("train --preset {preset} {line} --threads 2")).ok();
    let steps: Vec<Value> = place.lines(&format!("{dir}/metrics.jsonl"));
    let step =
        steps.iter().find(|row| row["step_time"].is_number()).unwrap_or_else(|| panic!("{}", ran.stderr));
    for name in ["loss", "grad_norm", "reward"] {
        assert!(step[name].as_f64().unwrap().is_finite(), "{name} of {step}");
    }
    let rollouts = place.lines(&format!("{dir}/rollouts/step-000001.jsonl"));
    assert_eq!(rollouts.len(), numbers.prompts * numbers.generations, "{}", ran.stderr);
    let lengths: Vec<u64> = rollouts.iter().map(|row| row["length"].as_u64().unwrap()).collect();
    let longest = *lengths.iter().max().unwrap();
    // A model of random weights ends a completion after 320 tokens on average, so one of several is long.
    assert!(longest <= numbers.length && longest > numbers.length / 4, "{lengths:?}");
    assert!(
        place.exists(&format!("{dir}/model.safetensors"))
            || place.exists(&format!("{dir}/adapter_model.safetensors"))
    );
    rollouts
}

/// Writes rows in the form of R1-Omni's annotations.
fn emotions(media: &Value) -> String {
    let question = "As an emotional recognition expert; throughout the video, which emotion conveyed by the characters is \
                    the most obvious to you?";
    let row = |label: &str| {
        let mut row = json!({"conversations": [
            {"from": "human", "value": format!("<video>\n{question}")},
            {"from": "gpt", "value": label},
        ]});
        row.as_object_mut().unwrap().extend(media.as_object().unwrap().clone());
        row
    };
    json!([row("sad"), row("happy"), row("angry")]).to_string()
}

#[test]
fn r1_omni_on_humanomni() {
    let place = place("humanomni");
    place.write("DFEW_all", emotions(&json!({"video": "frames", "audio": "rise.wav"})));
    // The limit on prompts of 512 tokens counts a clip and its sound as one token each.
    one_step(&place, "humanomni", R1_OMNI, &Numbers { prompts: 2, generations: 8, length: 512 });
}

#[test]
fn r1_v_on_qwen2_vl() {
    let place = place("qwen2_vl_tied");
    place.write("DFEW_all", emotions(&json!({"video": "clip.gif", "max_pixels": 12544, "min_pixels": 3136})));
    one_step(&place, "r1-v", R1_OMNI, &Numbers { prompts: 2, generations: 8, length: 512 });
}

/// Writes rows about the actions in a clip, and their registry.
fn actions(place: &Place, name: &str) {
    place.write(
        "dataset_registry.yaml",
        format!("{name}:\n  annotation_path: actions.json\n  data_path: .\n"),
    );
    let row = |answer: &str| {
        json!({"video": "clip.gif", "conversations": [
            {"from": "human", "value": "<video>\nWhich actions do you see?"},
            {"from": "gpt", "value": format!("<answer>{answer}</answer>")},
        ]})
    };
    place.write("actions.json", json!([row("A"), row("B,C"), row("D")]).to_string());
}

#[test]
fn qwen_video_on_qwen2_5_vl() {
    let place = place("qwen2_5_vl_tied");
    actions(&place, "assy07_grpo");
    one_step(&place, "qwen-video", &ACTIONS.line(), &Numbers { prompts: 8, generations: 1, length: 50 });
}

#[test]
fn qwen_mcq_on_qwen2_5_vl() {
    let place = place("qwen2_5_vl_tied");
    actions(&place, "assy07_grpo_no_think");
    let numbers = Numbers { prompts: 16, generations: 4, length: 128 };
    one_step(&place, "qwen-mcq", &NO_THINK.line(), &numbers);
}

/// Writes rows of the converted ViVQA-X, and pictures with COCO's names.
fn vivqa(place: &Place) {
    fs::create_dir_all(place.path("COCO_Images/train2014")).unwrap();
    fs::create_dir(place.path("data")).unwrap();
    let row = |i: usize, question: &str, answer: &str| {
        let image = format!("COCO_train2014_{i:012}.jpg");
        fs::copy(golden("media/shapes.png"), place.path("COCO_Images/train2014").join(&image)).unwrap();
        json!({"id": i, "image": image, "explanations": [format!("vì ta thấy {answer}")], "conversations": [
            {"from": "human", "value": format!("<image>{question}")},
            {"from": "gpt", "value": format!("<answer>{answer}</answer><explain>vì ta thấy {answer}</explain>")},
        ]})
        .to_string()
            + "\n"
    };
    let rows = [
        row(0, "hình này màu gì?", "màu đỏ"),
        row(1, "có mấy hình?", "hai"),
        row(2, "có hình tròn không?", "không"),
    ];
    place.write("data/ViVQA-X_train_grpo.jsonl", rows.concat());
}

/// The script counts completions: 3 of a batch, 5 batches, 3 generations are 5 prompts.
#[test]
fn vlm_r1_on_internvl() {
    let place = place("internvl_original");
    vivqa(&place);
    let numbers = Numbers { prompts: 5, generations: 3, length: 1024 };
    let rollouts = one_step(&place, "vivqa-x", INTERNVL, &numbers);
    assert!(rollouts.iter().all(|row| row["rewards"].as_object().unwrap().len() == 2), "accuracy and format");
}

#[test]
fn vlm_r1_with_adapters_on_qwen2_5_vl() {
    let place = place("qwen2_5_vl_tied");
    vivqa(&place);
    let numbers = Numbers { prompts: 2, generations: 3, length: 2048 };
    one_step(&place, "vivqa-x", ADAPTERS, &numbers);
}

/// Pasted lines of other sources train two steps, with short completions.
fn two_steps(place: &Place, preset: &str, line: &str, more: &str) -> Vec<Value> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let value = |name: &str| words.iter().position(|word| *word == name).map(|at| words[at + 1]);
    let mut line = line.replace(value("--model_name_or_path").unwrap(), "model");
    for (name, own) in [("--max_completion_length", "8"), ("--max_steps", "2")] {
        line = match value(name) {
            Some(value) => line.replace(&format!("{name} {value}"), &format!("{name} {own}")),
            None => format!("{line} {name} {own}"),
        };
    }
    let ran = place.run(&format!("train --preset {preset} {line} {more} --threads 2")).ok();
    let steps: Vec<Value> = place.lines(&format!("{}/metrics.jsonl", value("--output_dir").unwrap()));
    let steps: Vec<Value> = steps.into_iter().filter(|row| row["step_time"].is_number()).collect();
    assert_eq!(steps.len(), 2, "{}", ran.stderr);
    for step in &steps {
        assert!(step["loss"].as_f64().unwrap().is_finite(), "{step}");
    }
    steps
}

#[test]
fn r1_v_and_vlm_r1_as_they_stand() {
    let place = place("qwen2_vl_tied");
    two_steps(&place, "r1-v", R1_V, "");
    let place = self::place("qwen2_5_vl_tied");
    let box_row = json!({"image": "shapes.png", "solution": [4, 4, 20, 20], "conversations": [
        {"from": "human", "value": "<image>Where is the square?"}, {"from": "gpt", "value": "[4, 4, 20, 20]"},
    ]});
    place.write("rows.jsonl", format!("{box_row}\n").repeat(3));
    let steps = two_steps(&place, "vlm-r1", VLM_R1, "");
    assert!(steps[0]["rewards/accuracy/mean"].is_number(), "{}", steps[0]);
}

/// Alone, the line says that the processes of the launcher are missing.
#[test]
fn vlm_r1_gui_needs_its_processes() {
    let place = place("qwen2_5_vl_tied");
    let row = json!({"image": "shapes.png", "conversations": [
        {"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "a square"},
    ]});
    place.write("rows.jsonl", format!("{row}\n").repeat(3));
    let alone = VLM_R1_GUI.replace("Qwen/Qwen2.5-VL-3B-Instruct", "model");
    place.run(&format!("train --preset vlm-r1 {alone}")).fails(
        2,
        &[
            "the batch is not a multiple of `num_generations`",
            "4 completions, `num_generations` 8",
            "give `--nproc_per_node 8`",
        ],
    );
    two_steps(&place, "vlm-r1", VLM_R1_GUI, "--nproc_per_node 2");
}

#[test]
fn video_r1_as_it_stands() {
    let place = place("qwen2_5_vl_tied");
    let row = json!({"video": "clip.gif", "problem": "Which way?", "solution": "<answer>right</answer>"});
    place.write("rows.jsonl", format!("{row}\n").repeat(3));
    let steps = two_steps(&place, "r1-v", VIDEO_R1, "");
    for name in ["rewards/temporal_order/mean", "rewards/length_control/mean"] {
        assert!(steps[1][name].is_number(), "{name} of {}", steps[1]);
    }
    // Without a reward that checks answers, no answer is known to be right.
    let line = VIDEO_R1.replace("Qwen/Qwen2.5-VL-7B-Instruct", "model").replace("--temporal true", "");
    place
        .run(&format!("train --preset r1-v {line} --reward_funcs format"))
        .fails(2, &["no answer is known to be right", "--length_bonus"]);
}

/// All weights of the published 7B, with 8 completions of 1,024 tokens, fit on a GPU with 80 GB in few bits, and not without.
#[test]
fn all_weights_of_a_7b_fit_on_80_gb_in_few_bits() {
    let place = Place::new();
    copy(&golden("checkpoints/qwen2_5_vl_untied"), &place.path("model"));
    let own: Value = serde_json::from_str(&place.text("model/config.json")).unwrap();
    let path = golden("published/qwen2_5_vl_7B/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    // The tokenizer is the tiny one, with its ids of control tokens.
    let ids = own.as_object().unwrap().iter().filter(|(key, _)| key.ends_with("token_id"));
    ids.for_each(|(key, id)| config[key] = id.clone());
    place.write("model/config.json", config.to_string());
    fs::copy(golden("media/frames/0000.png"), place.path("one.png")).unwrap();
    place.write("rows.jsonl", r#"{"image": "one.png", "problem": "How many?", "solution": "1"}"#);
    let line = "plan --model model --train_file rows.jsonl --reward_funcs random --init_weights 1 --torch_dtype bfloat16 \
                --num_generations 8 --max_completion_length 1024 --per_device_train_batch_size 1 --gradient_accumulation_steps 1 \
                --max_steps 1 --beta 0 --gradient_checkpointing --device cuda --gpu_memory 80GB --json plan.json";
    let total = |flags: &str| {
        let ran = place.run(&format!("{line} {flags}"));
        let plan: Value = serde_json::from_str(&place.text("plan.json")).unwrap();
        let total = plan["total"].as_u64().unwrap();
        assert_eq!(
            (&plan["fits"], ran.code),
            (&json!(total <= 80_000_000_000), Some(i32::from(total > 80_000_000_000))),
            "{flags}"
        );
        (total, ran.stdout.clone() + &ran.stderr)
    };
    let (moments, gradients) = ("--optim adamw_8bit", "--grad_dtype bfloat16");
    let masters = "--pure_bf16 --stochastic_rounding";
    let (without, told) = total("");
    assert!(
        told.contains("--optim adamw_8bit --grad_dtype bfloat16 --pure_bf16 --stochastic_rounding"),
        "{told}"
    );
    assert!(
        told.contains("16 bytes a trained weight: 2 for itself, 4 gradient, 8 moments, 2 rest of its master"),
        "{told}"
    );
    let each = [moments, gradients, masters].map(|flags| without - total(flags).0);
    let (all, told) = total(&format!("{moments} {gradients} {masters}"));
    assert!(told.contains("6 bytes a trained weight: 2 for itself, 2 gradient, 2 moments\n"), "{told}");
    // The 7.6 · 10⁹ weights of the language model save 6, 2 and 2 bytes; one gradient is in f32 while something is added.
    for (saved, bytes) in each.into_iter().zip([6.0, 2.0, 2.0]) {
        assert!((saved as f64 / 7.62e9 - bytes).abs() < 0.12 * bytes, "{saved} for {bytes} bytes a weight");
    }
    assert!(without > 80_000_000_000 && all < 60_000_000_000, "{without} and {all}");
}
