//! Every command on a tiny checkpoint, from its flags to its files.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod support;

use serde_json::{Value, json};
use support::{Place, golden, numbers};

const SMALL: &str =
    "--threads 1 --num_generations 2 --gradient_accumulation_steps 1 --max_steps 2 --max_completion_length 4";

fn replay_rows(place: &Place) {
    std::fs::create_dir(place.path("media")).unwrap();
    for name in ["shapes.png", "clip.gif"] {
        std::fs::copy(golden("media").join(name), place.path("media").join(name)).unwrap();
    }
    std::fs::copy(golden("replay/rows.jsonl"), place.path("replay.jsonl")).unwrap();
}

#[test]
fn score_takes_text_or_ids() {
    let place = Place::new();
    replay_rows(&place);
    place.run("score --model M --input replay.jsonl --output text.jsonl").ok();
    let scored = place.lines("text.jsonl");
    assert_eq!(scored[1]["completions"][0]["completion_ids"], json!([20, 298]));
    let mut rows = place.lines("replay.jsonl");
    for (row, scored) in rows.iter_mut().zip(&scored) {
        let ids: Vec<&Value> =
            scored["completions"].as_array().unwrap().iter().map(|c| &c["completion_ids"]).collect();
        row["completion_ids"] = json!(ids);
        row.as_object_mut().unwrap().remove("completions");
    }
    place.write("ids.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    place.run("score --model M --input ids.jsonl --output ids-out.jsonl").ok();
    assert_eq!(place.lines("ids-out.jsonl"), scored);
}

/// What greedy decoding records is what `score` gives for the same tokens.
#[test]
fn generate_and_score_agree() {
    let place = Place::new();
    place
        .run("generate --model M --input rows.jsonl --output made.jsonl --temperature 0 --max_completion_length 6")
        .ok();
    let made = place.lines("made.jsonl");
    let ids: Vec<_> = made.iter().map(|row| row["id"].clone()).collect();
    assert_eq!(ids, ["shapes", "sum", "clip"]);
    let mut rows = place.lines("rows.jsonl");
    for (row, made) in rows.iter_mut().zip(&made) {
        row["completion_ids"] = json!([made["completions"][0]["completion_ids"]]);
    }
    place.write("again.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    place.run("score --model M --input again.jsonl --output scored.jsonl").ok();
    for (made, scored) in made.iter().zip(place.lines("scored.jsonl")) {
        assert_eq!(made["prompt_tokens"], scored["prompt_tokens"]);
        let (a, b) =
            (numbers(&made["completions"][0]["logprobs"]), numbers(&scored["completions"][0]["logprobs"]));
        assert_eq!(a.len(), b.len());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "{a:?} {b:?}");
    }
    // One question on the terminal is the same prompt.
    let line = "generate --model M --image shapes.png --temperature 0 --max_completion_length 6";
    let shown = place.run_with(line, &["--prompt", "<image>\nWhich shape is red?"]).ok();
    assert_eq!(shown.stdout.trim_end_matches('\n'), made[0]["completions"][0]["text"].as_str().unwrap());
}

#[test]
fn eval_writes_rows_a_summary_and_a_table() {
    let place = Place::new();
    let line = "eval --model M --eval_file rows.jsonl --output e.jsonl --max_completion_length 4 --category_column kind";
    let shown = place.run(line).ok().stdout;
    let summary: Value = serde_json::from_str(&place.text("e.summary.json")).unwrap();
    assert_eq!((&summary["eval_rows"], &summary["eval_completions/mean_length"]), (&json!(3.0), &json!(4.0)));
    let category =
        |name: &str| shown.lines().find(|line| line.starts_with(name)).unwrap().split_whitespace().nth(1);
    assert_eq!((category("shape "), category("number ")), (Some("2"), Some("1")));
    let rows = place.lines("e.jsonl");
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[1]["rewards"]["format"], json!([0.0]));
    assert_eq!((&rows[1]["answers"], &rows[1]["dataset"]), (&json!([null]), &json!("rows")));
    // Nothing that a random model says can be read as an answer, in each category.
    assert_eq!(summary["eval_parse_fail_rate"], 1.0);
    assert_eq!(summary["categories"][0]["category"], "number");
    assert_eq!(summary["categories"][0]["parse_fail_rate"], 1.0);
    assert!(shown.contains("eval_accuracy") && shown.contains("(95 % interval 0.000 to 0.56"), "{shown}");
    assert!(summary.get("eval_pass@1").is_none() && summary.get("eval_war").is_none());

    // Several samples, whatever the number of prompts worked on at a time.
    let line = |batch: usize, out: &str| {
        format!(
            "eval --model M --eval_file rows.jsonl --output {out}.jsonl --max_completion_length 4 --num_generations 3 --temperature 1 --reward_funcs random --batch_size {batch}"
        )
    };
    place.run(&line(1, "one")).ok();
    place.run(&line(8, "all")).ok();
    assert_eq!(place.text("one.jsonl"), place.text("all.jsonl"));
    let row = &place.lines("one.jsonl")[0];
    assert_eq!(row["completions"].as_array().unwrap().len(), 3);
    let summary: Value = serde_json::from_str(&place.text("one.summary.json")).unwrap();
    assert!(summary["eval_rewards/random/best_of_n"].as_f64() > summary["eval_rewards/random/mean"].as_f64());
}

#[test]
fn recorded_completions_are_summed_up_like_an_evaluation() {
    let place = Place::new();
    place.write(
        "said.jsonl",
        r#"{"id": "a", "problem": "?", "kind": "x", "solution": "<answer>có</answer>", "explanations": ["trời đang mưa", "mặt đường ướt"], "completions": ["<answer>Có.</answer><explain>vì trời đang mưa</explain>", "có"]}
{"id": "b", "problem": "?", "kind": "y", "solution": "<answer>không</answer>", "explanations": ["cô ấy cười"], "completions": ["<answer>có</answer><explain>cô ấy đang cười</explain>", "<answer>không</answer>"]}"#,
    );
    let line = "rewards run --input said.jsonl --output out.jsonl --reward_funcs label --label_set auto --category_column kind";
    let shown = place.run(line).ok().stdout;
    let summary: Value = serde_json::from_str(&place.text("out.summary.json")).unwrap();
    let number = |name: &str| summary[name].as_f64().unwrap_or_else(|| panic!("{name}: {summary:#}"));
    assert_eq!((number("eval_accuracy"), number("eval_pass@1"), number("eval_pass@2")), (0.75, 0.75, 1.0));
    assert_eq!((number("eval_parse_fail_rate"), number("eval_war"), number("eval_uar")), (0.25, 0.5, 0.5));
    assert_eq!(summary["confusion"]["counts"], json!([[1, 0, 1], [1, 1, 0]]));
    assert_eq!(number("eval_explanation/filtered/ROUGE_L"), 50.0);
    assert!(summary["eval_explanation/unfiltered/BERTScore_F1"].is_null());
    for part in
        ["truth \\ answer", "unfiltered (4)", "filtered (2)", "BERTScore needs --bertscore_model", "x "]
    {
        assert!(shown.contains(part), "`{part}` is not in\n{shown}");
    }
    // Labels that are given, in their order.
    place.run(&line.replace("auto", "không,có,đúng")).ok();
    let summary: Value = serde_json::from_str(&place.text("out.summary.json")).unwrap();
    assert_eq!(summary["confusion"]["counts"], json!([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]));
    place.run(&line.replace("auto", "có")).fails(2, &["got 1 labels, expected 2 to 64", "--label_set"]);
}

#[test]
fn sft_and_train_leave_a_model_that_runs() {
    let place = Place::new();
    let sft = place.run("sft --model M --train_file rows.jsonl --gradient_accumulation_steps 1 --max_steps 2 --learning_rate 1e-3 --output_dir sft").ok();
    assert!(sft.stderr.contains("a step takes 1 answer"), "{}", sft.stderr);
    place.write(
        "half.sh",
        r#"while read -r line; do id=${line#*\"id\":}; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [0.5, 0.25]}"; done"#,
    );
    let line = format!("train --model sft --train_file rows.jsonl --output_dir run {SMALL}");
    place.run_with(&line, &["--reward_funcs", "accuracy", "format", "cmd:bash half.sh"]).ok();
    let steps = place.lines("run/metrics.jsonl");
    assert_eq!(steps.len(), 2);
    for step in &steps {
        assert_eq!((&step["rewards/half/mean"], &step["reward"]), (&json!(0.375), &json!(0.375)));
    }
    place.run("generate --model run --input rows.jsonl --output made.jsonl --max_completion_length 2").ok();
    assert_eq!(place.lines("made.jsonl").len(), 3);
}

/// A file of settings, what `--print_config` shows of it, and the run's own record give the same run.
#[test]
fn settings_from_files_give_the_same_run() {
    let place = Place::new();
    place.write(
        "run.yaml",
        "train_file: [rows.jsonl]\nreward_funcs: [random]\nnum_generations: 2\ngradient_accumulation_steps: 1\nmax_steps: 2\nlearning_rate: 1e-3\nmax_completion_length: 4\nthreads: 1\n",
    );
    place.run("train --model M --config run.yaml --output_dir a").ok();
    let printed = place.run("train --model M --config run.yaml --output_dir b --print_config").ok().stdout;
    place.write("printed.yaml", printed);
    place.run("train --config printed.yaml").ok();
    place.run("train --config a/config.yaml --output_dir c").ok();
    for other in ["b", "c"] {
        assert!(place.bytes("a/model.safetensors") == place.bytes(&format!("{other}/model.safetensors")));
    }
}

/// Recorded log-probabilities equal to the policy's change nothing at the first step: the ratio is 1 either way.
#[test]
fn replay_with_and_without_log_probabilities() {
    let place = Place::new();
    replay_rows(&place);
    place.run("score --model M --input replay.jsonl --output scored.jsonl").ok();
    let mut rows = place.lines("replay.jsonl");
    for (row, scored) in rows.iter_mut().zip(place.lines("scored.jsonl")) {
        row["completions"] = scored["completions"].clone();
    }
    place.write("old.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    let line = |file: &str, out: &str| {
        format!(
            "train --model M --replay {file} --output_dir {out} --threads 1 --num_generations 3 --gradient_accumulation_steps 3 --max_steps 1 --learning_rate 1e-3"
        )
    };
    place.run(&line("replay.jsonl", "on")).ok();
    place.run(&line("old.jsonl", "off")).ok();
    let (on, off) = (&place.lines("on/metrics.jsonl")[0], &place.lines("off/metrics.jsonl")[0]);
    for name in ["loss", "grad_norm", "reward"] {
        let (a, b) = (on[name].as_f64().unwrap(), off[name].as_f64().unwrap());
        assert!((a - b).abs() < 1e-5 * (1.0 + a.abs()), "{name}: {a} {b}");
    }
    // (1 + 0 + 0.25 + 1 + 0.5 + 0 + 0 + 1 + 1) / 9
    assert!((on["reward"].as_f64().unwrap() - 4.75 / 9.0).abs() < 1e-6);
    assert!(on["grad_norm"].as_f64().unwrap() > 0.0);
}

#[test]
fn data_check_and_show() {
    let place = Place::new();
    let check = place.run("data check --model M --train_file rows.jsonl").ok().stdout;
    assert!(
        check.contains("3 rows: 1 images, 1 videos, 0 sounds, 1 rows of text only, 0 without a solution"),
        "{check}"
    );
    let show = place.run("data show --model M --train_file rows.jsonl --row 0 --num_rows 3").ok().stdout;
    for part in [
        "row 0 (shapes), 44 tokens",
        "image 0: 8 tokens, 1×8×4 patches",
        "| Which shape is red?",
        "frames at ",
    ] {
        assert!(show.contains(part), "`{part}` is not in\n{show}");
    }
    place
        .run("data show --model M --train_file rows.jsonl --row 7")
        .fails(2, &["there is no row 7", "0 to 2"]);
}

#[test]
fn rewards_list_and_run() {
    let place = Place::new();
    let list = place.run("rewards list").ok().stdout;
    for name in ["accuracy ", "format ", "random "] {
        assert!(list.lines().any(|line| line.starts_with(name)), "{list}");
    }
    place.write(
        "said.jsonl",
        r#"{"id": "q", "problem": "2+3?", "solution": "<answer>5</answer>", "completions": ["<think>sum</think><answer>5</answer>", "5", "<think>a</think><answer>6</answer>"]}"#,
    );
    place.run("rewards run --input said.jsonl --output out.jsonl --reward_funcs accuracy,format --reward_weights 2,1").ok();
    let row = &place.lines("out.jsonl")[0];
    assert_eq!(row["id"], "q");
    assert_eq!(row["rewards"]["format"], json!([1.0, 0.0, 1.0]));
    assert_eq!(row["rewards"]["accuracy"][0], 1.0);
    assert_eq!(row["rewards"]["accuracy"][2], 0.0);
    assert_eq!(row["reward"][0], 3.0);
    assert_eq!(row["reward"][2], 1.0);
}

#[test]
fn doctor_looks_at_a_checkpoint() {
    let place = Place::new();
    let shown = place.run("doctor --model M").ok().stdout;
    for part in ["qwen2_5_vl: 2 layers, width 64", "80 tensors", "<|im_end|>", "embeddings tied"] {
        assert!(shown.contains(part), "`{part}` is not in\n{shown}");
    }
}

/// A checkpoint of the original InternVL layout is trained, exported for `transformers`, and answers as before.
#[test]
fn a_checkpoint_is_exported_in_another_layout() {
    let place = Place::new();
    replay_rows(&place);
    let model = golden("checkpoints/internvl_original").display().to_string();
    place
        .run(&format!(
            "train --model {model} --replay replay.jsonl --output_dir run --threads 1 --num_generations 3 \
             --gradient_accumulation_steps 1 --max_steps 1 --max_completion_length 32 --max_anyres_num 2"
        ))
        .ok();
    assert!(place.text("run/config.json").contains("InternVLChatModel"));
    place.run("export --model run --layout hf --output_dir hf").ok();
    assert!(place.text("hf/config.json").contains("InternVLForConditionalGeneration"));
    for name in ["processor_config.json", "preprocessor_config.json", "chat_template.jinja", "tokenizer.json"]
    {
        assert!(place.exists(&format!("hf/{name}")), "{name}");
    }
    let score = |model: &str, output: &str| {
        place.run(&format!("score --model {model} --input replay.jsonl --output {output} --threads 1")).ok();
        let rows = place.lines(output);
        rows.iter().map(|row| row["completions"].clone()).collect::<Vec<Value>>()
    };
    assert_eq!(score("run", "a.jsonl"), score("hf", "b.jsonl"));
    place.run("export --model hf --layout original --output_dir back").ok();
    assert_eq!(score("back", "c.jsonl"), score("hf", "d.jsonl"));
    place.run("export --model M --layout original --output_dir no").fails(1, &["have one layout", "\"hf\""]);
    assert!(!place.exists("no"));
    place.run("export --model run --layout gguf --output_dir no").fails(2, &["gguf", "original"]);
    place
        .run(&format!("score --model {model} --input replay.jsonl --output e.jsonl --max_pixels 10000"))
        .fails(1, &["max_anyres_num"]);
}
