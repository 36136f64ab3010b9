//! HumanOmni from its flags to its files: rows with video, sound, image or text in one batch, towers from flags,
//! the preset, evaluation by emotion.

use crate::support::{Place, golden, numbers};
use serde_json::{Value, json};

const SMALL: &str =
    "--threads 1 --max_steps 2 --gradient_accumulation_steps 1 --save_strategy no --torch_dtype float32";

/// Writes one row per combination of media. `<audio>` without a file would mean the sound of the video.
fn place() -> Place {
    let place = Place::new();
    for name in ["shapes.png", "rise.wav"] {
        std::fs::copy(golden("media").join(name), place.path(name)).unwrap();
    }
    std::fs::create_dir(place.path("frames")).unwrap();
    for t in 0..8 {
        let name = format!("frames/{t:04}.png");
        std::fs::copy(golden("media").join(&name), place.path(&name)).unwrap();
    }
    let row = |id: &str, media: Value, question: &str, label: &str| {
        let mut row = json!({"id": id, "label": label, "conversations": [
            {"from": "human", "value": question},
            {"from": "gpt", "value": format!("<think>So.</think><answer>{label}</answer>")},
        ]});
        row.as_object_mut().unwrap().extend(media.as_object().unwrap().clone());
        row.to_string() + "\n"
    };
    let rows = [
        row("va", json!({"video": "frames", "audio": "rise.wav"}), "<video>\n<audio>\nWhich emotion?", "sad"),
        row("v", json!({"video": "frames"}), "<video>\nWhich emotion?", "happy"),
        row("a", json!({"audio": "rise.wav"}), "<audio>\nWhich emotion?", "sad"),
        row("i", json!({"image": "shapes.png"}), "Which emotion?", "fear"),
        row("t", json!({}), "Which emotion is the most obvious?", "angry"),
    ];
    place.write("omni.jsonl", rows.concat());
    place
}

fn model(name: &str) -> String {
    golden("checkpoints").join(name).display().to_string()
}

/// The source truncates prompts before features replace media, so each medium counts as one token.
#[test]
fn the_limit_on_prompts_counts_a_medium_as_one_token() {
    let place = place();
    let base = model("humanomni");
    let row = place.text("omni.jsonl").lines().next().unwrap().to_owned();
    place.write("one.jsonl", row);
    let check = |limit: usize| {
        place.run(&format!("data check --model {base} --train_file one.jsonl --max_prompt_length {limit}"))
    };
    let refused = check(1).stdout;
    let counted: usize =
        refused.split_once("got ").unwrap().1.split_once(" tokens").unwrap().0.parse().unwrap();
    check(counted - 1).fails(1, &["1 of 1 rows cannot be used"]);
    check(counted).ok();
    // The clip and its sound have more features than the limit allows tokens.
    let shown = place.run(&format!("data show --model {base} --train_file one.jsonl")).ok().stdout;
    let total: usize = shown
        .split(|c: char| !c.is_ascii_alphanumeric())
        .collect::<Vec<_>>()
        .windows(2)
        .filter(|pair| pair[1] == "tokens")
        .filter_map(|pair| pair[0].parse::<usize>().ok())
        .max()
        .unwrap();
    assert!(total > counted + 2, "{total} and {counted} in\n{shown}");
}

#[test]
fn the_recipe_runs_on_rows_of_every_kind() {
    let place = place();
    let base = model("humanomni");
    let check = place.run(&format!("data check --model {base} --train_file omni.jsonl")).ok();
    assert!(check.stdout.contains("5 rows"), "{}", check.stdout);

    place
        .run(&format!(
            "sft --model {base} --train_file omni.jsonl --output_dir sft {SMALL} --tune_mm_vision true --tune_bert true \
             --per_device_train_batch_size 5 --learning_rate 1e-3"
        ))
        .ok();
    let losses: Vec<f64> =
        place.lines("sft/metrics.jsonl").iter().filter_map(|row| row["loss"].as_f64()).collect();
    assert!(losses.len() == 2 && losses[1] < losses[0], "{losses:?}");

    // The fixed question of the preset replaces those of the rows. The projector and the language model are trained.
    place
        .run(&format!(
            "train --preset humanomni --model sft --train_file omni.jsonl --output_dir rl {SMALL} --nframes 4 \
             --num_generations 2 --max_completion_length 5 --per_device_train_batch_size 5 --reward_funcs random"
        ))
        .ok();
    let steps: Vec<Value> =
        place.lines("rl/metrics.jsonl").into_iter().filter(|row| row["step_time"].is_number()).collect();
    assert_eq!(steps.len(), 2);
    assert!(steps.iter().all(|row| row["grad_norm"].as_f64().unwrap() > 0.0), "{steps:?}");
    assert!(steps[0]["kl"].as_f64().unwrap().abs() < 1e-6, "{}", steps[0]["kl"]);

    place
        .run(
            "eval --model rl --eval_file omni.jsonl --output eval.jsonl --threads 1 --max_completion_length 5 \
             --reward_funcs accuracy --accuracy_mode emotion --label_set auto",
        )
        .ok();
    assert_eq!(place.lines("eval.jsonl").len(), 5);
}

/// The preset works with other families: Qwen2-VL and Qwen2.5-VL take its question, its frames and its rewards.
#[test]
fn the_preset_serves_qwen_checkpoints() {
    let place = Place::new();
    let row = |id: &str, media: Value| {
        let mut row = json!({"id": id, "conversations": [
            {"from": "human", "value": "Which emotion?"}, {"from": "gpt", "value": "sad"},
        ]});
        row.as_object_mut().unwrap().extend(media.as_object().unwrap().clone());
        row.to_string() + "\n"
    };
    let rows = [
        row("v", json!({"video": "clip.gif"})),
        row("i", json!({"image": "shapes.png"})),
        row("t", json!({})),
    ];
    place.write("rows.jsonl", rows.concat());
    for name in ["qwen2_vl_tied", "qwen2_5_vl_tied"] {
        // The fixtures allow few tokens.
        let small = "--nframes 4 --max_pixels 12544 --max_completion_length 4 --num_generations 2";
        let train = format!("train --preset humanomni --model {} --train_file rows.jsonl", model(name));
        place
            .run(&format!("{train} --output_dir {name} {SMALL} {small} --per_device_train_batch_size 3"))
            .ok();
        let made = place.lines(&format!("{name}/rollouts/step-000001.jsonl"));
        assert_eq!(made.len(), 6);
        assert!(
            made.iter()
                .all(|row| row["rewards"]["accuracy"].is_number() && row["rewards"]["format"].is_number())
        );
    }
}

/// Flags name towers outside of the checkpoint. A trained tower is saved inside, the others are found again.
#[test]
fn towers_come_from_flags_and_go_where_they_belong() {
    let place = place();
    let base = model("humanomni_large");
    let alone = place.path("alone");
    std::fs::create_dir(&alone).unwrap();
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        std::fs::copy(format!("{base}/{file}"), alone.join(file)).unwrap();
    }
    place.run("doctor --model alone").fails(1, &["--vision_tower", "siglip"]);
    let towers = format!("--vision_tower {base}/siglip --audio_tower {base}/whisper --bert {base}/bert");
    place.run(&format!("doctor --model alone {towers}")).ok();
    place
        .run(&format!(
            "sft --model alone {towers} --train_file omni.jsonl --output_dir out {SMALL} --tune_mm_vision true"
        ))
        .ok();
    let greedy = "--image shapes.png --temperature 0 --max_completion_length 4";
    let made = place.run_with(&format!("generate --model out {greedy}"), &["--prompt", "What is it?"]).ok();
    assert!(!made.stdout.is_empty());

    place.run(&format!("doctor --model M --bert {base}/bert")).fails(2, &["`bert` has no effect"]);
    place
        .run(&format!(
            "generate --model alone {} --prompt Hi",
            towers.replace(&format!("{base}/bert"), "nowhere")
        ))
        .fails(1, &["the tower was not found"]);
}

/// Every command makes the same prompt: `score` returns the log-probabilities that sampling recorded for greedy tokens.
#[test]
fn generate_and_score_see_the_same_prompt() {
    let place = place();
    let base = model("humanomni");
    let common = format!("--model {base} --torch_dtype float32 --threads 1");
    place
        .run(&format!("generate {common} --input omni.jsonl --output made.jsonl --temperature 0 --max_completion_length 6"))
        .ok();
    let made = place.lines("made.jsonl");
    let mut rows = place.lines("omni.jsonl");
    for (row, made) in rows.iter_mut().zip(&made) {
        row["completion_ids"] = json!([made["completions"][0]["completion_ids"]]);
    }
    place.write("again.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    place.run(&format!("score {common} --input again.jsonl --output scored.jsonl")).ok();
    for (made, scored) in made.iter().zip(place.lines("scored.jsonl")) {
        assert_eq!(made["prompt_tokens"], scored["prompt_tokens"]);
        let [a, b] = [made, &scored].map(|row| numbers(&row["completions"][0]["logprobs"]));
        assert!(a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "{a:?} {b:?}");
    }
}
