//! Rewards that need models, in `rewards run`, `train` and `eval` with tiny checkpoints.

use std::path::Path;

use crate::support::Place;
use serde_json::{Value, json};

/// Returns a directory of the `scorers` tests.
fn scorer(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scorers/tests/golden").join(name).display().to_string()
}

/// Writes two rows with pictures, references and completions.
fn place() -> Place {
    let place = Place::new();
    let row = |id: &str, image: &str, references: &[&str], texts: &[&str]| {
        let completions: Vec<_> = texts
            .iter()
            .map(|text| json!({ "text": format!("<answer>x</answer><explain>{text}</explain>") }))
            .collect();
        json!({
            "id": id, "image": image, "problem": "<image>\nVì sao?", "explanations": references,
            "solution": format!("<answer>x</answer><explain>{}</explain>", references[0]), "completions": completions,
        })
    };
    let rows = [
        row(
            "a",
            "shapes.png",
            &["trong ảnh có một vòi sen", "vòi sen"],
            &["trong ảnh có một vòi sen", "con mèo", ""],
        ),
        row("b", "noise.png", &["con mèo"], &["A cat, on THE  mat!"]),
    ];
    place.write("explained.jsonl", rows.map(|row| row.to_string()).join("\n"));
    place
}

fn rewards(lines: &[Value], row: usize, name: &str) -> Vec<f64> {
    crate::support::numbers(&lines[row]["rewards"][name])
}

#[test]
fn completions_are_scored_by_models() {
    let place = place();
    let (clip, text, roberta) = (scorer("clip"), scorer("multilingual"), scorer("roberta"));
    let run = |more: &str| {
        let line = format!("rewards run --input explained.jsonl --output out.jsonl {more}");
        place.run(&line).ok();
        place.lines("out.jsonl")
    };
    let all =
        run(&format!("--reward_funcs explanation bertscore --clip_model {clip} --bertscore_model {roberta}"));
    // The cosine is 0.666, beyond the end of the range; the text is the first reference and shares "vòi sen" with the second. A
    // missing explanation earns 0.
    let cider = rewards(&run("--reward_funcs cider"), 0, "cider");
    let explanation = rewards(&all, 0, "explanation");
    assert!((explanation[0] - (0.5 + 0.5 * cider[0])).abs() < 1e-6, "{explanation:?} {cider:?}");
    assert!((explanation[1] - 0.5 * cider[1]).abs() < 1e-6 && explanation[2] == 0.0, "{explanation:?}");
    // A cosine of 0.0758 is a CLIP score below 15.
    assert_eq!(rewards(&all, 1, "explanation"), [0.0]);
    let bertscore = rewards(&all, 0, "bertscore");
    assert!(
        (bertscore[0] - 1.0).abs() < 1e-5 && bertscore[1] < 0.999 && bertscore[2] == 0.0,
        "{bertscore:?}"
    );
    assert!((all[0]["reward"][0].as_f64().unwrap() - (explanation[0] + bertscore[0])).abs() < 1e-9);

    let pictures = format!("--reward_funcs explanation --explanation_clip_weight 1 --clip_model {clip}");
    let own = rewards(&run(&pictures), 0, "explanation");
    assert_eq!(own, [1.0, 0.0, 0.0]);
    // The other text tower gives smaller cosines, those of transformers.
    let goldens: Value =
        serde_json::from_str(&std::fs::read_to_string(scorer("goldens.json")).unwrap()).unwrap();
    let part = |text: usize| {
        let cosine = goldens["multilingual"]["cosines"][text][1].as_f64().unwrap();
        ((100.0 * cosine - 15.0) / 20.0).clamp(0.0, 1.0)
    };
    let other = rewards(&run(&format!("{pictures} --clip_text_model {text}")), 0, "explanation");
    for (got, want) in other.iter().zip([part(0), part(4), 0.0]) {
        assert!((got - want).abs() < 1e-3, "{other:?}, expected {want}");
    }
    assert!(part(0) > 0.2);
    let words = run("--reward_funcs explanation --explanation_clip_weight 0");
    assert_eq!(rewards(&words, 0, "explanation"), cider);
    let stretched = run(&format!("--reward_funcs explanation --clip_model {clip} --compat s4_explanation"));
    assert_eq!(rewards(&stretched, 0, "explanation")[0], 1.0);
    let line =
        format!("--reward_funcs bertscore --bertscore_model {roberta} --bertscore_layer 2 --bertscore_idf");
    assert_ne!(rewards(&run(&line), 0, "bertscore")[1], bertscore[1]);
}

#[test]
fn a_model_that_is_missing_is_named_by_its_flag() {
    let place = place();
    let run =
        |more: &str| place.run(&format!("rewards run --input explained.jsonl --output out.jsonl {more}"));
    // Without a CLIP setting the published one is used.
    run("--reward_funcs explanation")
        .fails(1, &["--clip_model", "openai/clip-vit-base-patch16", "HF_HUB_OFFLINE"]);
    run("--reward_funcs bertscore").fails(2, &["--bertscore_model DIR"]);
    for (flag, more) in [
        ("--clip_model", "--reward_funcs explanation".to_owned()),
        ("--clip_text_model", format!("--reward_funcs explanation --clip_model {}", scorer("clip"))),
        ("--bertscore_model", "--reward_funcs bertscore".to_owned()),
    ] {
        run(&format!("{more} {flag} nowhere/model"))
            .fails(1, &[flag, "nowhere/model", "checkpoint directory"]);
    }
    run(&format!("--reward_funcs explanation --clip_model {}", scorer("roberta")))
        .fails(1, &["vision_config is missing"]);
    run(&format!("--reward_funcs accuracy --clip_model {}", scorer("clip")))
        .fails(2, &["`clip_model`", "no explanation"]);
    run(&format!("--reward_funcs bertscore --bertscore_model {} --bertscore_layer 9", scorer("roberta")))
        .fails(1, &["layer 9", "has 3"]);
}

/// The preset of the Vietnamese pipeline uses the complete reward if a CLIP is given.
#[test]
fn the_preset_trains_and_evaluates_with_a_clip() {
    let place = place();
    let clip = format!("--clip_model {} --clip_text_model {}", scorer("clip"), scorer("multilingual"));
    let shown = place.run(&format!("train --preset vivqa-x --print_config {clip}")).ok().stdout;
    assert!(shown.contains("explanation") && !shown.contains("cider"), "{shown}");
    let line = format!("train --preset vivqa-x --print_config --reward_funcs cider {clip}");
    place.run(&line).fails(2, &["`clip_model`", "no explanation"]);

    place.run(&format!(
        "train --model M --preset vivqa-x --train_file explained.jsonl --max_steps 1 --max_completion_length 6 \
         --gradient_accumulation_steps 1 --max_pixels 12544 --save_strategy no --output_dir run --threads 1 {clip}"
    ))
    .ok();
    let rollouts = place.lines("run/rollouts/step-000001.jsonl");
    assert_eq!(rollouts.len(), 3);
    for rollout in rollouts {
        let names: Vec<_> = rollout["rewards"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(names, ["accuracy", "explanation", "format"]);
        // The random model writes no tags.
        assert_eq!(rollout["rewards"]["explanation"], 0.0);
    }
    let eval = place
        .run(&format!(
            "eval --model M --preset vivqa-x --eval_file explained.jsonl --max_completion_length 6 --max_pixels 12544 \
             --output eval.jsonl --threads 1 {clip}"
        ))
        .ok();
    assert!(eval.stdout.contains("rewards/explanation"), "{}", eval.stdout);
}

/// Plain texts have nothing that a reward of explanations reads, and the program says so.
#[test]
fn a_reward_that_applies_to_no_row_is_named() {
    let place = place();
    place.write(
        "said.jsonl",
        json!({ "prompt": "Why?", "solution": "3", "completions": [{ "text": "It is 3." }] }).to_string(),
    );
    let line = format!(
        "rewards run --input said.jsonl --output out.jsonl --reward_funcs accuracy bertscore --bertscore_model {}",
        scorer("roberta")
    );
    let ran = place.run(&line).ok();
    let told = "the reward `bertscore` applies to no row, so all of its scores are null; it is the BERTScore F1 of the <explain> text";
    assert!(ran.stderr.contains(told) && !ran.stderr.contains("`accuracy` applies"), "{}", ran.stderr);
}

/// A reward model by its directory, together with a reward of the table.
#[test]
fn a_reward_model_is_named_by_its_directory() {
    let place = place();
    let model = scorer("reward_models/qwen2");
    let run = |more: &str| {
        place
            .run(&format!("rewards run --input said.jsonl --output out.jsonl --reward_funcs accuracy {more}"))
    };
    // The first rows of the goldens, whose prompts are messages and a text.
    let goldens: Value =
        serde_json::from_str(&std::fs::read_to_string(scorer("reward_models/goldens.json")).unwrap())
            .unwrap();
    let row = |i: usize| {
        let completions: Vec<Value> = goldens["completions"][i]
            .as_array()
            .unwrap()
            .iter()
            .map(|text| json!({ "text": text }))
            .collect();
        json!({ "prompt": goldens["prompts"][i], "solution": "3", "completions": completions }).to_string()
    };
    place.write("said.jsonl", [row(0), row(1), row(2)].join("\n"));
    run(&format!("{model} --reward_weights 1 0.5")).ok();
    let lines = place.lines("out.jsonl");
    for (i, group) in goldens["qwen2"].as_array().unwrap().iter().enumerate() {
        let got = rewards(&lines, i, "qwen2");
        let want = crate::support::numbers(&group["scores"]);
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-4), "{got:?}, transformers {want:?}");
        let accuracy = rewards(&lines, i, "accuracy");
        let total = crate::support::numbers(&lines[i]["reward"]);
        for ((total, accuracy), score) in total.iter().zip(&accuracy).zip(&got) {
            assert!((total - (accuracy + 0.5 * score)).abs() < 1e-9);
        }
    }
    // By its name in the local cache, and with another name.
    let hub = place.path(".cache/huggingface/hub/models--org--judge");
    std::fs::create_dir_all(hub.join("refs")).unwrap();
    std::fs::write(hub.join("refs/main"), "abc").unwrap();
    std::fs::create_dir_all(hub.join("snapshots/abc")).unwrap();
    for file in std::fs::read_dir(&model).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, hub.join("snapshots/abc").join(path.file_name().unwrap())).unwrap();
    }
    run("x=org/judge").ok();
    assert_eq!(rewards(&place.lines("out.jsonl"), 1, "x"), rewards(&lines, 1, "qwen2"));

    run("nowhere/at/all").fails(1, &["the reward model was not found", "nowhere/at/all", "--reward_funcs"]);
    run(&scorer("roberta")).fails(1, &["no classifier.out_proj.weight", "num_labels=1"]);
    run("acuracy").fails(2, &["unknown reward", "did you mean `accuracy`"]);

    // In training, on rows with pictures.
    place
        .run(&format!(
            "train --model M --train_file explained.jsonl --max_steps 1 --max_completion_length 6 --max_pixels 12544 \
             --save_strategy no --output_dir run --threads 1 --num_generations 2 --gradient_accumulation_steps 1 \
             --reward_funcs judge={model}"
        ))
        .ok();
    let rollouts = place.lines("run/rollouts/step-000001.jsonl");
    assert!(rollouts.iter().all(|rollout| rollout["rewards"]["judge"].as_f64().unwrap() != 0.0));
}

/// The limit of a reward is compared with the settings before the run. A completion that is still too long has no value, and the
/// run continues.
#[test]
fn a_reward_model_with_a_limit_does_not_end_a_run() {
    let place = place();
    let model = scorer("reward_models/bert");
    let line = |longest: usize| {
        format!(
            "train --model M --train_file rows.jsonl --max_steps 2 --max_completion_length {longest} --min_completion_length {longest} \
             --max_pixels 12544 --output_dir run{longest} --threads 1 --allow_text_only --num_generations 2 --gradient_accumulation_steps 1 \
             --reward_funcs judge={model}"
        )
    };
    place.write("rows.jsonl", r#"{"prompt": "What is 2+3?", "solution": "5"}"#);
    let parts = [
        "a reward cannot read the longest completions",
        "`judge`",
        "reads at most ",
        "--max_completion_length 400",
    ];
    let told = place.run(&line(400)).fails(2, &parts);
    assert!(told.stderr.contains("lower --max_completion_length to "), "{}", told.stderr);
    assert!(!place.exists("run400/rollouts/step-000001.jsonl"));
    // It is within the limit in tokens of the policy; the reward's tokenizer makes more.
    let room = told.stderr.split("lower --max_completion_length to ").nth(1).unwrap();
    let room: usize = room.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
    let ran = place.run(&line(room)).ok();
    let steps = place.lines(&format!("run{room}/metrics.jsonl"));
    assert_eq!(steps.len(), 2);
    let too_long: f64 = steps.iter().filter_map(|step| step["rewards/judge/too_long"].as_f64()).sum();
    let rollouts: Vec<_> = [1, 2]
        .iter()
        .flat_map(|step| place.lines(&format!("run{room}/rollouts/step-{step:06}.jsonl")))
        .collect();
    let without = rollouts.iter().filter(|rollout| rollout["rewards"]["judge"].is_null()).count();
    assert!(without > 0 && too_long == without as f64, "{too_long} {without}");
    assert!(ran.stderr.contains("completions have no value"), "{}", ran.stderr);
}

/// A reward model with vision scores the rows of a run; a row that it cannot read is skipped before anything is sampled.
#[test]
fn a_reward_model_that_sees_judges_training() {
    let place = place();
    std::fs::create_dir(place.path("judge")).unwrap();
    for file in std::fs::read_dir(crate::support::golden("checkpoints/qwen3_vl")).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, place.path("judge").join(path.file_name().unwrap())).unwrap();
    }
    let head = scorer("media_reward/qwen3_vl/value_head.safetensors");
    std::fs::copy(head, place.path("judge/value_head.safetensors")).unwrap();
    let clip = |id: &str, more: Value| {
        let mut row = json!({
            "id": id, "video": "clip.gif", "min_pixels": 3136, "max_pixels": 12544, "problem": "<video>Which way?",
            "solution": "right",
        });
        row.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        row["completions"] = json!([{ "text": "right" }]);
        row.to_string()
    };
    place.write(
        "clips.jsonl",
        [clip("whole", json!({})), clip("part", json!({ "video_start": 0.5, "video_end": 2.0 }))].join("\n"),
    );
    place.run("rewards run --input clips.jsonl --output out.jsonl --reward_funcs judge").ok();
    let lines = place.lines("out.jsonl");
    let (whole, part) = (rewards(&lines, 0, "judge")[0], rewards(&lines, 1, "judge")[0]);
    assert!((whole - part).abs() > 1e-4, "{whole} {part}");

    // The settings of the run shrink the clip only for the policy.
    let long =
        json!({ "id": "long", "video": "clip.gif", "problem": "<video>Which way?", "solution": "right" });
    let row = json!({ "id": "short", "image": "shapes.png", "problem": "<image>How many?", "solution": "5" });
    place.write("rows.jsonl", format!("{row}\n{long}\n"));
    let model = crate::support::golden("checkpoints/qwen2_5_vl_tied").display().to_string();
    place
        .run(&format!(
            "train --model {model} --train_file rows.jsonl --max_steps 1 --max_completion_length 6 --max_pixels 12544 \
             --save_strategy no --output_dir run --threads 1 --num_generations 2 --gradient_accumulation_steps 1 \
             --video_min_frame_pixels 3136 --video_max_frame_pixels 12544 --max_skipped 0.9 --reward_funcs ./judge"
        ))
        .ok();
    let rollouts = place.lines("run/rollouts/step-000001.jsonl");
    assert_eq!(rollouts.len(), 2);
    let skipped = place.text("run/skipped.jsonl");
    assert!(skipped.contains("reward `judge`") && skipped.contains("at most 512"), "{skipped}");
    assert!(rollouts.iter().all(|rollout| rollout["rewards"]["judge"].as_f64().unwrap() != 0.0));
}
