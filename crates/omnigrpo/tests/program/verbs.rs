//! Every command on a tiny checkpoint, from its flags to its files.

use std::io::Write as _;
use std::process::Stdio;

use crate::support::{Place, golden, numbers, ran, server};
use omnigrpo_testkit::copy_dir;
use omnigrpo_testkit::hub::{self, StandIn, sha256};
use serde_json::{Value, json};

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

/// `score` returns the log-probabilities that greedy decoding records.
#[test]
fn generate_and_score_agree() {
    let place = Place::new();
    let shown = place
        .run("generate --model M --input rows.jsonl --output made.jsonl --temperature 0 --max_completion_length 6 --profile")
        .ok();
    // Seconds of a phase, which include those of its kernels.
    let secs = |name: &str| -> f64 {
        let line = shown.stdout.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    assert!(secs("prefill ") > 0.0 && secs("decode ") >= secs("  linear, decode "), "{}", shown.stdout);
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
    // One question on the terminal gives the same prompt.
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
    // In each category no output of a random model can be read as an answer.
    assert_eq!(summary["eval_parse_fail_rate"], 1.0);
    assert_eq!(summary["categories"][0]["category"], "number");
    assert_eq!(summary["categories"][0]["parse_fail_rate"], 1.0);
    assert!(shown.contains("eval_accuracy") && shown.contains("(95 % interval 0.000 to 0.56"), "{shown}");
    assert!(summary.get("eval_pass@1").is_none() && summary.get("eval_war").is_none());

    // Several samples, for any number of prompts processed at a time.
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
    assert_eq!((number("eval_parse_fail_rate"), number("eval_war"), number("eval_uar")), (0.25, 0.75, 0.75));
    assert_eq!(summary["confusion"]["counts"], json!([[2, 0, 0], [1, 1, 0]]));
    // The file also has the names of another program, the terminal shows one name per number.
    assert_eq!(number("eval_total_reward"), number("eval_reward"));
    assert!(shown.contains("eval_reward ") && !shown.contains("eval_total_reward"), "{shown}");
    assert_eq!(number("eval_explanation/filtered/ROUGE_L"), 50.0);
    assert!(summary["eval_explanation/unfiltered/BERTScore_F1"].is_null());
    for part in
        ["truth \\ answer", "unfiltered (4)", "filtered (2)", "BERTScore needs --bertscore_model", "x "]
    {
        assert!(shown.contains(part), "`{part}` is not in\n{shown}");
    }
    // Given labels, in their order.
    place.run(&line.replace("auto", "không,có,đúng")).ok();
    let summary: Value = serde_json::from_str(&place.text("out.summary.json")).unwrap();
    assert_eq!(summary["confusion"]["counts"], json!([[1, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0]]));
    place.run(&line.replace("auto", "có")).fails(2, &["got 1 labels, expected 2 to 64", "--label_set"]);
}

#[test]
fn sft_and_train_leave_a_model_that_runs() {
    let place = Place::new();
    let sft = place.run("sft --model M --train_file rows.jsonl --gradient_accumulation_steps 1 --max_steps 2 --learning_rate 1e-3 --output_dir sft").ok();
    assert!(sft.stderr.contains("a step takes 1 answer"), "{}", sft.stderr);
    let table = sft.stderr.lines().skip_while(|line| !line.starts_with("part ")).take(5);
    assert!(table.clone().all(|line| line.len() <= 80) && table.count() == 5, "{}", sft.stderr);
    // Imitation has a loss and no rewards.
    assert!(sft.stderr.contains("step 2/2 | loss ") && !sft.stderr.contains("reward"), "{}", sft.stderr);
    place.write(
        "half.sh",
        r#"while read -r line; do id=${line#*\"id\":}; case $line in *\"probe\":true*) r=0.5,0.5;; *) r=0.5,0.25;; esac; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [$r]}"; done"#,
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

/// A family with experts, whose turns end in a string: every command, on rows with one image, several, and a clip as frames.
#[test]
fn every_command_runs_on_aria() {
    let place = Place::new();
    place.write(
        "rows.jsonl",
        r#"{"id": "one", "image": "shapes.png", "problem": "<image>\nWhich shape is red?", "solution": "<answer>square</answer>"}
{"id": "two", "image": ["shapes.png", "noise.png"], "problem": "<image> and <image>: equal?", "solution": "<answer>no</answer>"}
{"id": "clip", "video": "clip.gif", "problem": "<video>Which way?", "solution": "<answer>right</answer>"}
"#,
    );
    let aria = golden("checkpoints/aria").display().to_string();
    place.run(&format!("data check --train_file rows.jsonl --model {aria}")).ok();
    place
        .run(&format!("generate --model {aria} --input rows.jsonl --output made.jsonl --temperature 0 --max_completion_length 6"))
        .ok();
    let made = place.lines("made.jsonl");
    // A square of 8 tokens, two of them, and eight frames of 4.
    let prompts: Vec<u64> = made.iter().map(|row| row["prompt_tokens"].as_u64().unwrap()).collect();
    assert!(prompts[1] > prompts[0] && prompts[2] > prompts[0], "{prompts:?}");
    let mut rows = place.lines("rows.jsonl");
    for (row, made) in rows.iter_mut().zip(&made) {
        row["completion_ids"] = json!([made["completions"][0]["completion_ids"]]);
    }
    place.write("again.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    place.run(&format!("score --model {aria} --input again.jsonl --output scored.jsonl")).ok();
    for (made, scored) in made.iter().zip(place.lines("scored.jsonl")) {
        let [a, b] = [made, &scored].map(|row| numbers(&row["completions"][0]["logprobs"]));
        assert!(a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "{a:?} {b:?}");
    }
    place
        .run(&format!(
            "eval --model {aria} --eval_file rows.jsonl --output e.jsonl --max_completion_length 4"
        ))
        .ok();
    assert_eq!(place.lines("e.jsonl").len(), 3);

    // Losses of routers: two blocks, 1 each if all experts are used equally.
    let losses = "--router_aux_loss_coef 0.01 --router_z_loss_coef 0.001";
    place
        .run(&format!("sft --model {aria} --train_file rows.jsonl --gradient_accumulation_steps 1 --max_steps 2 --learning_rate 1e-3 --output_dir sft {losses}"))
        .ok();
    let line = format!(
        "train --model sft --train_file rows.jsonl --output_dir run {SMALL} --reward_funcs format {losses}"
    );
    place.run(&line).ok();
    for step in ["sft", "run"].iter().flat_map(|run| place.lines(&format!("{run}/metrics.jsonl"))) {
        let [balance, z] = ["router_aux_loss", "router_z_loss"].map(|name| step[name].as_f64().unwrap());
        assert!((1.5..8.0).contains(&balance) && z > 0.0, "{step}");
        // No answer has the format, so all advantages are 0; routers still learn.
        assert!(step["grad_norm"].as_f64().unwrap() > 0.0, "{step}");
    }
    place.write("sum.jsonl", r#"{"problem": "What is 2+3?", "solution": "<answer>5</answer>"}"#);
    let line = line.replace("--model sft --train_file rows", "--model M --train_file sum");
    place.run(&line).fails(2, &["router_aux_loss_coef", "no experts"]);

    // Adapters on experts, merged.
    let lora = "--use_peft true --lora_dropout 0 --lora_r 2 --lora_target_modules all-linear experts";
    place
        .run(&format!(
            "train --model sft --train_file rows.jsonl --output_dir lora {SMALL} --reward_funcs random {lora}"
        ))
        .ok();
    let config: Value = serde_json::from_str(&place.text("lora/adapter_config.json")).unwrap();
    assert_eq!(config["target_parameters"].as_array().unwrap().len(), 4);
    place.run("export --model sft --adapter_name_or_path lora --merge --output_dir merged").ok();
    for (model, out) in [("sft --adapter_name_or_path lora", "a.jsonl"), ("merged", "b.jsonl")] {
        place.run(&format!("score --model {model} --input again.jsonl --output {out}")).ok();
    }
    for (a, b) in place.lines("a.jsonl").iter().zip(place.lines("b.jsonl")) {
        let [a, b] = [a, &b].map(|row| numbers(&row["completions"][0]["logprobs"]));
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "{a:?} {b:?}");
    }
    let shown = place.run(&format!("doctor --model {aria}")).ok().stdout;
    for part in ["aria: 2 layers, width 32", "LoRA, 4 bit: ", "<|im_end|>"] {
        assert!(shown.contains(part), "`{part}` is not in\n{shown}");
    }
}

/// A family whose media have features for several blocks, InternVL on Qwen3, and SmolVLM: every command, on rows with one image,
/// several, and a clip.
#[test]
fn every_command_runs_on_families_with_media() {
    let rows = |clip: &str| {
        r#"{"id": "one", "image": "shapes.png", "problem": "<image>\nWhich shape is red?", "solution": "<answer>square</answer>"}
{"id": "two", "image": ["shapes.png", "noise.png"], "problem": "<image> and <image>: equal?", "solution": "<answer>no</answer>"}
{"id": "clip", "video": "clip.gif", CLIP, "problem": "<video>Which way?", "solution": "<answer>right</answer>"}
"#
        .replace("CLIP", clip)
    };
    let small = rows(r#""min_pixels": 3136, "max_pixels": 12544"#);
    every_command("qwen3_vl", &small, "linear_fc1", "qwen3_vl: 4 layers, width 48");
    every_command("qwen3_vl_moe", &small, "linear_fc1", "qwen3_vl_moe: 4 layers, width 48");
    let few = rows(r#""max_frames": 4"#);
    every_command("internvl3_5_original", &few, "fc1", "internvl: 2 layers, width 32");
    let place = every_command("smolvlm", &few, "proj", "smolvlm: 2 layers, width 48");
    let model = golden("checkpoints/smolvlm").display().to_string();
    for bits in ["load_in_8bit", "load_in_4bit"] {
        let line =
            format!("train --model {model} --train_file rows.jsonl --{bits} --use_peft --lora_r 2 {SMALL}");
        place.run(&format!("{line} --reward_funcs random --output_dir {bits}")).ok();
        assert!(place.exists(&format!("{bits}/adapter_model.safetensors")));
    }
}

/// Models that hear: every command, on rows with sound, with a picture and sound, and with a clip and sound.
#[test]
fn every_command_runs_on_models_that_hear() {
    let rows = r#"{"id": "one", "image": "shapes.png", "audio": "rise.wav", "problem": "<image>\n<audio>\nWhich shape is red?", "solution": "<answer>square</answer>"}
{"id": "two", "audio": ["rise.wav", "rise.wav"], "problem": "<audio> and <audio>: equal?", "solution": "<answer>yes</answer>"}
{"id": "clip", "video": "clip.gif", "audio": "rise.wav", "max_frames": 4, "min_pixels": 3136, "max_pixels": 12544, "problem": "<video><audio>Which way?", "solution": "<answer>right</answer>"}
"#;
    let place = every_command("omni", rows, "fc1", "qwen2_5_omni: 2 layers, width 48");
    let model = golden("checkpoints/omni").display().to_string();
    // What a run saves speaks, and so does a merged adapter.
    let names = |file: &std::path::Path| -> Vec<String> {
        let bytes = std::fs::read(file).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        header.into_iter().map(|(name, _)| name).filter(|name| name != "__metadata__").collect()
    };
    let original = names(&golden("checkpoints/omni/model.safetensors"));
    assert!(original.iter().any(|name| name.starts_with("talker.")));
    for saved in ["sft", "run", "merged"] {
        assert_eq!(names(&place.path(saved).join("model.safetensors")).len(), original.len(), "{saved}");
        assert!(place.exists(&format!("{saved}/spk_dict.pt")));
    }
    for bits in ["load_in_8bit", "load_in_4bit"] {
        let line =
            format!("train --model {model} --train_file rows.jsonl --{bits} --use_peft --lora_r 2 {SMALL}");
        place.run(&format!("{line} --reward_funcs random --output_dir {bits}")).ok();
        assert!(place.exists(&format!("{bits}/adapter_model.safetensors")));
    }
    // Towers that are frozen leave the projections to be trained.
    let line = format!("train --model {model} --train_file rows.jsonl {SMALL} --reward_funcs random");
    place.run(&format!("{line} --tune_mm_vision false --output_dir frozen")).ok();
    let talking = json!({"video": "clip.gif", "audio": "rise.wav", "problem": "<video>\n<audio>\nWhich emotion?", "solution": "angry"});
    place.write("talking.jsonl", talking.to_string());
    for preset in ["humanomni", "humanomni-v2"] {
        let line = format!("train --model {model} --train_file talking.jsonl {SMALL} --preset {preset}");
        place.run(&format!("{line} --output_dir {preset}")).ok();
    }

    let heard = r#"{"id": "one", "audio": "rise.wav", "problem": "<audio>\nWhat is it?", "solution": "<answer>a tone</answer>"}
{"id": "two", "audio": ["rise.wav", "rise.wav"], "problem": "<audio> and <audio>: equal?", "solution": "<answer>yes</answer>"}
"#;
    every_command("qwen2_audio", heard, "out_proj", "qwen2_audio: 2 layers, width 48");
}

/// A family with a state in place of keys and values in some blocks: every command, and adapters on few bits.
#[test]
fn every_command_runs_on_qwen3_5() {
    let rows = r#"{"id": "one", "image": "shapes.png", "min_pixels": 3136, "max_pixels": 12544, "problem": "<image>\nWhich shape is red?", "solution": "<answer>square</answer>"}
{"id": "two", "image": ["shapes.png", "noise.png"], "min_pixels": 3136, "max_pixels": 12544, "problem": "<image> and <image>: equal?", "solution": "<answer>no</answer>"}
{"id": "clip", "video": "clip.gif", "min_pixels": 3136, "max_pixels": 12544, "problem": "<video>Which way?", "solution": "<answer>right</answer>"}
"#;
    let place = every_command("qwen3_5", rows, "in_proj_qkv", "qwen3_5: 3 layers, width 48");
    let model = golden("checkpoints/qwen3_5").display().to_string();
    for bits in ["load_in_8bit", "load_in_4bit"] {
        let line =
            format!("train --model {model} --train_file rows.jsonl --{bits} --use_peft --lora_r 2 {SMALL}");
        place.run(&format!("{line} --reward_funcs random --output_dir {bits}")).ok();
        assert!(place.exists(&format!("{bits}/adapter_model.safetensors")));
    }
    place.run(&format!("plan --model {model} --train_file rows.jsonl --gpu_memory 24GB {SMALL}")).ok();
    place.run(&format!("init --model {model} --train_file rows.jsonl --device cuda --gpu_memory 24GB")).ok();
    assert!(place.text("omnigrpo.yaml").contains("device: cuda"));
    every_command("qwen3_5_text", TEXTS, "out_proj", "qwen3_5_text: 5 layers, width 48");
}

/// The shape of a published step, in small: lengths vary around their mean, and phases add up to the step.
#[test]
fn a_published_step_is_measured() {
    let place = Place::new();
    let sizes = "--num_prompts 6 --num_generations 4 --prompt_tokens 16 --completion_tokens 6 --image_px 56 --threads 1 --device cpu";
    let line = format!("bench --workload easyr1-3b --model M {sizes}");
    let ran = place.run(&format!("{line} --json step.json")).ok();
    assert!(
        ran.stdout.contains("lengths: geometric with a mean of 6 tokens, at most 24 (an assumption)"),
        "{}",
        ran.stdout
    );
    let step: Value = serde_json::from_str(&place.text("step.json")).unwrap();
    let number = |name: &str| step[name].as_f64().unwrap();
    // 24 completions of 1 to 24 tokens.
    assert!((40.0..400.0).contains(&number("completion_tokens")), "{step}");
    assert!(
        (number("tokens_per_sec") * number("step_secs") - number("completion_tokens")).abs() < 1e-6,
        "{step}"
    );
    let phases: f64 = step["phases"].as_object().unwrap().values().map(|secs| secs.as_f64().unwrap()).sum();
    assert!(phases > 0.5 * number("step_secs") && phases <= 1.01 * number("step_secs"), "{step}");
    assert_eq!((&step["num_prompts"], &step["num_generations"]), (&json!(6), &json!(4)));
    // On the emulator of a GPU, with other rounding.
    let small =
        sizes.replace("--num_prompts 6", "--num_prompts 2").replace("--device cpu", "--device emulated");
    place.run(&format!("bench --workload easyr1-3b --model M {small} --json card.json")).ok();
    let card: Value = serde_json::from_str(&place.text("card.json")).unwrap();
    assert!(card["device"] != step["device"] && card["num_prompts"] == 2, "{card}");
    place.run(&format!("bench {sizes}")).fails(2, &["device", "the workload `own` runs on the CPU"]);
}

/// Rows of GSM8K, of TRL (a prompt with its completion, as text and as messages) and of verl.
const TEXTS: &str = r####"{"question": "Tom has 6 apples and buys 7. How many has he?", "answer": "He has 6 + 7 = <<6+7=13>>13 apples.\n#### 13"}
{"prompt": "The sky is", "completion": " blue."}
{"prompt": [{"role": "user", "content": "What is 2+3?"}], "completion": [{"role": "assistant", "content": "5"}]}
{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "What is 3+4?"}], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"index": 0}}
"####;

/// Families without media: every command, on rows without media, with no setting that says so.
#[test]
fn every_command_runs_on_text_models() {
    every_command("qwen2", TEXTS, "up_proj", "qwen2: 2 layers, width 32");
    every_command("qwen3", TEXTS, "q_proj", "qwen3: 2 layers, width 32");
    every_command("qwen3_moe", TEXTS, "o_proj", "qwen3_moe: 2 layers, width 32");
    let place = every_command("llama", TEXTS, "down_proj", "llama: 2 layers, width 96");
    let model = golden("checkpoints/llama").display().to_string();

    let bench = "--num_prompts 1 --num_generations 2 --prompt_tokens 16 --completion_tokens 4 --num_steps 1 --threads 1";
    place.run(&format!("bench --model {model} {bench} --json bench.json")).ok();
    let bench: Value = serde_json::from_str(&place.text("bench.json")).unwrap();
    assert!(bench["num_images"] == 0 && bench["prompt_tokens"].as_u64() >= Some(16), "{bench}");
    for bits in ["load_in_8bit", "load_in_4bit"] {
        let line = format!(
            "train --model {model} --train_file rows.jsonl --{bits} --use_peft --lora_r 2 {SMALL} --save_steps 1"
        );
        place.run(&format!("{line} --reward_funcs random --output_dir {bits}")).ok();
        assert!(place.exists(&format!("{bits}/adapter_model.safetensors")));
    }
    let hub = StandIn::start();
    let mut command = place.command("push sft --hub_model_id me/text");
    command.env("HF_HUB_OFFLINE", "").env("HF_ENDPOINT", hub.endpoint()).env("HF_TOKEN", StandIn::TOKEN);
    ran(&mut command).ok();
    let card = hub.look("me/text", |repo| repo.files["README.md"].clone()).unwrap();
    assert!(String::from_utf8(card).unwrap().contains("pipeline_tag: text-generation\n"));
    // A row with a medium, and a medium beside a prompt, are refused with the reason.
    place.write("seen.jsonl", r#"{"image": "shapes.png", "problem": "<image>Which?", "solution": "x"}"#);
    let why = "the row has a medium of kind image, but this model reads text only; remove it from the row";
    let checked = place.run(&format!("data check --model {model} --train_file seen.jsonl"));
    assert!(checked.stdout.contains(why), "{}", checked.stdout);
    checked.fails(1, &["1 of 1 rows cannot be used"]);
    place
        .run(&format!("generate --model {model} --prompt What? --image shapes.png"))
        .fails(1, &["reads text only"]);
}

/// Runs every command on these rows. `linear` is a linear layer, for some families outside of the language model, `told` a line of
/// `doctor`.
fn every_command(name: &str, rows: &str, linear: &str, told: &str) -> Place {
    let place = Place::new();
    place.write("rows.jsonl", rows);
    let model = golden("checkpoints").join(name).display().to_string();
    place.run(&format!("data check --train_file rows.jsonl --model {model}")).ok();
    place
        .run(&format!("generate --model {model} --input rows.jsonl --output made.jsonl --temperature 0 --max_completion_length 6"))
        .ok();
    let made = place.lines("made.jsonl");
    let mut rows = place.lines("rows.jsonl");
    for (row, made) in rows.iter_mut().zip(&made) {
        row["completion_ids"] = json!([made["completions"][0]["completion_ids"]]);
    }
    place.write("again.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    let scored = |model: &str, out: &str| -> Vec<Vec<f64>> {
        place.run(&format!("score --model {model} --input again.jsonl --output {out}")).ok();
        place.lines(out).iter().map(|row| numbers(&row["completions"][0]["logprobs"])).collect()
    };
    let close = |a: &[Vec<f64>], b: &[Vec<f64>]| {
        let (a, b) = (a.concat(), b.concat());
        a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4)
    };
    let recorded: Vec<_> = made.iter().map(|row| numbers(&row["completions"][0]["logprobs"])).collect();
    let before = scored(&model, "scored.jsonl");
    assert!(close(&recorded, &before), "{recorded:?} {before:?}");
    place
        .run(&format!(
            "eval --model {model} --eval_file rows.jsonl --output e.jsonl --max_completion_length 4"
        ))
        .ok();
    assert_eq!(place.lines("e.jsonl").len(), rows.len());
    place.run(&format!("plan --model {model} --train_file rows.jsonl --reward_funcs random {SMALL}")).ok();
    place
        .run(&format!("sft --model {model} --train_file rows.jsonl --gradient_accumulation_steps 1 --max_steps 2 --learning_rate 1e-3 --output_dir sft"))
        .ok();
    assert!(!close(&scored("sft", "sft.jsonl"), &before));
    place
        .run(&format!(
            "train --model sft --train_file rows.jsonl --output_dir run {SMALL} --reward_funcs random"
        ))
        .ok();
    for step in place.lines("run/metrics.jsonl") {
        assert!(step["grad_norm"].as_f64().unwrap() > 0.0, "{step}");
        // Only a mixture has experts to compare.
        let others = name.ends_with("_moe").then_some(0.0);
        assert_eq!(step["sampling/rows_with_other_experts"].as_f64(), others, "{step}");
    }

    // Adapters everywhere, merged; PEFT's names are those of the tensors.
    place
        .run(&format!(
            "train --model sft --train_file rows.jsonl --output_dir lora {SMALL} --reward_funcs random --use_peft true \
             --lora_dropout 0 --lora_r 2 --lora_target_modules all-linear {linear}"
        ))
        .ok();
    let config: Value = serde_json::from_str(&place.text("lora/adapter_config.json")).unwrap();
    assert!(config["target_modules"].to_string().contains(linear), "{config}");
    place.run("export --model sft --adapter_name_or_path lora --merge --output_dir merged").ok();
    let adapted = scored("sft --adapter_name_or_path lora", "a.jsonl");
    assert!(close(&adapted, &scored("merged", "b.jsonl")));
    let shown = place.run(&format!("doctor --model {model}")).ok().stdout;
    assert!(shown.contains(told), "{shown}");
    place
}

/// Rows held out by share or named by a registry are evaluated during the run, with the frames of `eval`, and the best
/// checkpoint is kept.
#[test]
fn training_evaluates_held_out_rows() {
    let place = Place::new();
    let rows: String = (0..10)
        .map(|i| {
            format!("{{\"id\": \"{i}\", \"problem\": \"{i}?\", \"solution\": \"<answer>{i}</answer>\"}}\n")
        })
        .collect();
    place.write("ten.jsonl", rows);
    place
        .run(&format!(
            "train --model M --train_file ten.jsonl --allow_text_only --val_split_ratio 0.3 --eval_steps 1 --save_strategy best \
             --metric_for_best_model eval_rewards/random/mean --reward_funcs random,accuracy --output_dir split {SMALL}"
        ))
        .ok();
    let held_out = |step: &str| -> Vec<Value> {
        place.lines(&format!("split/eval/step-{step}.jsonl")).iter().map(|row| row["id"].clone()).collect()
    };
    assert_eq!(held_out("000001").len(), 3);
    assert_eq!(held_out("000001"), held_out("000002"));
    for step in ["000001", "000002"] {
        for row in place.lines(&format!("split/rollouts/step-{step}.jsonl")) {
            assert!(!held_out("000001").contains(&row["id"]), "{row}");
        }
    }
    let metrics = place.lines("split/metrics.jsonl");
    let evaluated: Vec<&Value> = metrics.iter().filter(|row| row.get("eval_reward").is_some()).collect();
    assert_eq!(evaluated.iter().map(|row| &row["step"]).collect::<Vec<_>>(), [&json!(1), &json!(2)]);
    let best = |row: &Value| row["eval_rewards/random/mean"].as_f64().unwrap();
    let kept = if best(evaluated[1]) > best(evaluated[0]) { "checkpoint-2" } else { "checkpoint-1" };
    assert!(place.names("split").contains(&kept.to_owned()), "{:?}", place.names("split"));

    // Clips of two segments whose rows draw their number of frames in training: evaluations take the largest.
    let clip = |i: usize| {
        std::fs::copy(golden("media/clip.gif"), place.path(&format!("{i}.gif"))).unwrap();
        let meta = json!({"frame_cnts": [4, 4], "min_frames": 1, "max_frames": 4, "dynamic_sample": true});
        json!({"id": format!("clip {i}"), "video": format!("{i}.gif"), "problem": "<video>Which way?", "solution": "right",
            "min_pixels": 3136, "max_pixels": 12544, "meta": meta})
    };
    place.write("clips.json", json!((0..6).map(clip).collect::<Vec<_>>()).to_string());
    place.write(
        "registry.yaml",
        "clips: {annotation_path: clips.json}\nten: {annotation_path: ten.jsonl, columns: {kind: number}}\n",
    );
    let names = "--dataset_registry registry.yaml --eval_dataset_use clips,ten%20 --frame_sampling meta";
    let greedy = "--max_completion_length 4 --category_column kind --threads 1";
    place
        .run(&format!(
            "train --model M --dataset_use ten%50 --allow_text_only {names} --eval_on_start --eval_steps 2 --num_generations 2 \
             --gradient_accumulation_steps 1 --max_steps 2 --output_dir named {greedy}"
        ))
        .ok();
    place.run(&format!("eval --model M {names} --output alone.jsonl {greedy}")).ok();
    assert_eq!(place.text("named/eval/step-000000.jsonl"), place.text("alone.jsonl"));
    let alone = place.lines("alone.jsonl");
    assert_eq!((alone.len(), &alone[6]["category"]), (8, &json!("number")));
    assert_eq!(place.lines("named/eval/step-000002.jsonl").len(), 8);
}

/// T-GRPO: rows with a video are also answered on shuffled frames, and right answers earn the bonus.
#[test]
fn right_answers_that_need_the_order_of_frames_earn_a_bonus() {
    let place = Place::new();
    place.write(
        "judge.sh",
        // After the trial, the first request has the completions of all rows, the second those on shuffled frames: right, then wrong.
        r#"n=0; while read -r line; do id=${line#*\"id\":}
case $line in *\"probe\":true*) echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [0,0,0,0]}"; continue;; esac
r=1; [ $((n%2)) = 1 ] && r=0; n=$((n+1))
k=$(grep -o '"completion":' <<< "$line" | wc -l); list=$(printf "$r,%.0s" $(seq $k)); echo "$k $r" >> asked
echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [${list%,}]}"; done"#,
    );
    let line = "train --model M --train_file rows.jsonl --output_dir run --temporal_order_bonus --num_generations 4 \
                --gradient_accumulation_steps 3 --max_steps 2 --max_completion_length 4 --threads 1";
    place.run_with(line, &["--reward_funcs", "accuracy=cmd:bash judge.sh"]).ok();
    assert_eq!(place.text("asked"), "12 1\n2 0\n12 1\n2 0\n");
    for row in place.lines("run/metrics.jsonl") {
        assert_eq!(row["rewards/temporal_order/mean"], 0.3, "{row}");
        assert_eq!(row["rewards/accuracy/mean"], 1.0);
        assert!((row["reward"].as_f64().unwrap() - 1.1).abs() < 1e-9, "{row}");
    }
    for row in place.lines("run/rollouts/step-000001.jsonl") {
        let expected = if row["id"] == "clip" { json!(0.3) } else { Value::Null };
        assert_eq!(row["rewards"]["temporal_order"], expected, "{row}");
    }
    place
        .run_with(line, &["--reward_funcs", "format"])
        .fails(2, &["--temporal_order_bonus", "the rewards format"]);
}

/// A file of settings, the output of `--print_config` for it, and the record of the run give the same run.
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

/// Recorded log-probabilities equal to those of the policy change nothing at the first step: the ratio is 1 in both cases.
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

/// Completions are sampled, scored, selected and trained on: each command reads the output of the others, from any directory.
#[test]
fn commands_read_what_others_wrote() {
    let place = Place::new();
    std::fs::create_dir(place.path("out")).unwrap();
    place
        .run("generate --model M --input rows.jsonl --output out/made.jsonl --num_generations 3 --temperature 1 --max_completion_length 4")
        .ok();
    let (rows, made) = (place.lines("rows.jsonl"), place.lines("out/made.jsonl"));
    let picture = place.path("shapes.png").canonicalize().unwrap();
    assert_eq!(made[0]["image"], json!(picture), "the file of rows lies elsewhere now");
    for (row, made) in rows.iter().zip(&made) {
        for name in ["id", "problem", "solution", "kind"] {
            assert_eq!(row[name], made[name]);
        }
    }

    place.run("score --model M --input out/made.jsonl --output out/scored.jsonl").ok();
    let scored = place.lines("out/scored.jsonl");
    for (made, scored) in made.iter().zip(&scored) {
        assert_eq!((&made["prompt_tokens"], &made["image"]), (&scored["prompt_tokens"], &scored["image"]));
        for (a, b) in
            made["completions"].as_array().unwrap().iter().zip(scored["completions"].as_array().unwrap())
        {
            assert_eq!(
                (&a["text"], &a["completion_ids"], &a["finish_reason"]),
                (&b["text"], &b["completion_ids"], &b["finish_reason"])
            );
            let (a, b) = (numbers(&a["logprobs"]), numbers(&b["logprobs"]));
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "{a:?} {b:?}");
        }
    }

    let judge = |input: &str, output: &str, more: &str| {
        place.run(&format!("rewards run --input {input} --output {output} {more}"))
    };
    judge("out/scored.jsonl", "out/judged.jsonl", "--reward_funcs random").ok();
    let judged = place.lines("out/judged.jsonl");
    assert_eq!(judged[2]["completions"], scored[2]["completions"]);
    let rewards: Vec<Vec<f64>> = judged.iter().map(|row| numbers(&row["reward"])).collect();
    place
        .run("train --model M --replay out/judged.jsonl --num_generations 3 --gradient_accumulation_steps 3 --max_steps 1 --threads 1 --output_dir replayed")
        .ok();
    let mean = rewards.iter().flatten().sum::<f64>() / 9.0;
    let reward = place.lines("replayed/metrics.jsonl")[0]["rewards/random/mean"].as_f64().unwrap();
    assert!((reward - mean).abs() < 1e-6, "{reward} {mean}");

    judge("out/scored.jsonl", "out/best.jsonl", "--reward_funcs random --keep best").ok();
    let best = place.lines("out/best.jsonl");
    assert_eq!(best.len(), 3);
    for (i, row) in best.iter().enumerate() {
        let most = (0..3).max_by(|&a, &b| rewards[i][a].total_cmp(&rewards[i][b])).unwrap();
        assert_eq!(row["completion"], made[i]["completions"][most]["text"]);
        assert_eq!(
            (&row["solution"], row["reward"].as_f64()),
            (&rows[i]["solution"], Some(rewards[i][most]))
        );
        assert!(row.get("completions").is_none(), "{row}");
    }
    let shown = judge("out/scored.jsonl", "out/half.jsonl", "--reward_funcs random --keep 0.5").ok().stderr;
    let good = rewards.iter().flatten().filter(|&&reward| reward >= 0.5).count();
    assert_eq!(place.lines("out/half.jsonl").len(), good);
    assert!(shown.contains(&format!("kept {good} of 9 completions of 3 rows")), "{shown}");
    judge("out/scored.jsonl", "x", "--reward_funcs random --keep passed").fails(2, &["--keep", "`accuracy`"]);
    judge("out/scored.jsonl", "x", "--reward_funcs random --keep good").fails(2, &["`best`, `passed`"]);
    place.write(
        "said.jsonl",
        r#"{"problem": "2+3?", "solution": "5", "completions": ["4", "5", "five", "5"]}"#,
    );
    judge("said.jsonl", "out/passed.jsonl", "--reward_funcs accuracy --keep passed").ok();
    assert_eq!(place.lines("out/passed.jsonl").iter().filter(|row| row["completion"] == "5").count(), 2);

    place
        .run("sft --model M --train_file out/best.jsonl --gradient_accumulation_steps 3 --max_steps 12 --learning_rate 1e-2 --threads 1 --output_dir taught")
        .ok();
    let losses: Vec<f64> =
        place.lines("taught/metrics.jsonl").iter().map(|row| row["loss"].as_f64().unwrap()).collect();
    assert!(losses[11] < 0.7 * losses[0], "{losses:?}");

    // An evaluation, and the rollouts of a run, one completion per line.
    place.run("eval --model M --eval_file rows.jsonl --output out/e.jsonl --max_completion_length 4 --reward_funcs format").ok();
    place.run("score --model M --input out/e.jsonl --output out/e-scored.jsonl").ok();
    judge("out/e.jsonl", "out/e-judged.jsonl", "--reward_funcs format").ok();
    let evaluated = place.lines("out/e.jsonl");
    place
        .run("train --model M --train_file rows.jsonl --output_dir run --reward_funcs format --threads 1 --num_generations 2 --gradient_accumulation_steps 3 --max_steps 1 --max_completion_length 4")
        .ok();
    let log = "run/rollouts/step-000001.jsonl";
    place.run(&format!("score --model M --input {log} --output out/r-scored.jsonl")).ok();
    judge(log, "out/r-judged.jsonl", "--reward_funcs format").ok();
    let rolled = place.lines(log);
    for (i, row) in rows.iter().enumerate() {
        let find = |name: &str| {
            place
                .lines(name)
                .into_iter()
                .find(|line| line["id"] == row["id"])
                .unwrap_or_else(|| panic!("{name}"))
        };
        // The media are read again: the prompt has the same length.
        assert_eq!(find("out/e-scored.jsonl")["prompt_tokens"], made[i]["prompt_tokens"]);
        assert_eq!(find("out/r-scored.jsonl")["prompt_tokens"], made[i]["prompt_tokens"]);
        assert_eq!(find("out/e-judged.jsonl")["rewards"], evaluated[i]["rewards"]);
        let own: Vec<&Value> = rolled.iter().filter(|line| line["id"] == row["id"]).collect();
        let texts: Vec<Value> = own.iter().map(|line| line["completion"].clone()).collect();
        let again = find("out/r-judged.jsonl");
        let read: Vec<Value> =
            again["completions"].as_array().unwrap().iter().map(|c| c["text"].clone()).collect();
        assert_eq!((own.len(), texts), (2, read));
        assert_eq!(
            again["rewards"]["format"],
            json!([own[0]["rewards"]["format"], own[1]["rewards"]["format"]])
        );
    }
}

#[test]
fn data_check_and_show() {
    let place = Place::new();
    let check = place.run("data check --model M --train_file rows.jsonl").ok().stdout;
    assert!(
        check.contains("3 rows: 1 images, 1 videos, 0 sounds, 1 rows of text only, 0 without a solution"),
        "{check}"
    );
    assert!(check.contains("solutions from "), "{check}");
    place.write("gt.jsonl", r#"{"ask": "2+3?", "gt": "5", "meta": {"ask": "1+1?"}}"#);
    let files = "--model M --train_file gt.jsonl --allow_text_only";
    let check = place.run(&format!("data check {files} --prompt_column ask")).ok().stdout;
    assert!(
        check.contains("1 without a solution") && check.contains("columns of the rows: ask, gt, meta;"),
        "{check}"
    );
    let check = place.run(&format!("data check {files} --prompt_key meta.ask --answer_key gt")).ok().stdout;
    assert!(check.contains("0 without a solution\nsolutions from gt (1)"), "{check}");
    place
        .run(&format!("data check {files} --prompt_column ask --solution_column truth"))
        .fails(1, &["gt.jsonl", "--solution_column: got `truth`, expected one of [ask, gt, meta]"]);
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
        .fails(2, &["row 7 does not exist", "0 to 2"]);
}

#[test]
fn rewards_list_and_run() {
    let place = Place::new();
    let list = place.run("rewards list").ok().stdout;
    for name in ["accuracy ", "format ", "random "] {
        assert!(list.lines().any(|line| line.starts_with(name)), "{list}");
    }
    assert!(list.lines().all(|line| line.chars().count() <= 80), "{list}");
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

/// Rewards of texts do not need the media; other rewards find them through the folders.
#[test]
fn rewards_of_rows_whose_media_are_elsewhere() {
    let place = Place::new();
    std::fs::create_dir(place.path("there")).unwrap();
    std::fs::rename(place.path("shapes.png"), place.path("there/shapes.png")).unwrap();
    place.write(
        "said.jsonl",
        r#"{"id": "a", "image": "shapes.png", "problem": "<image>?", "solution": "5", "completions": ["<answer>5</answer>"]}
{"id": "b", "video": "https://example.org/a.mp4", "problem": "<video>?", "solution": "5", "completions": ["6"]}"#,
    );
    let line = "rewards run --input said.jsonl --output out.jsonl";
    place.run(&format!("{line} --reward_funcs accuracy")).ok();
    assert_eq!(
        (&place.lines("out.jsonl")[0]["reward"], &place.lines("out.jsonl")[1]["reward"]),
        (&json!([1.0]), &json!([0.0]))
    );
    place.write("media.sh", r#"while read -r line; do case $line in *there/shapes.png*) r=1;; *) r=0;; esac; case $line in *\"probe\"*) more=;; *) more=", 0";; esac; id=${line#*\"id\":}; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [$r$more]}"; done"#);
    place.run_with(&format!("{line} --image_folders there"), &["--reward_funcs", "cmd:bash media.sh"]).ok();
    assert_eq!(place.lines("out.jsonl")[0]["reward"], json!([1.0]));
}

/// Rows share the requests to a program and its workers. A row that cannot be scored does not affect others.
#[test]
fn rewards_of_many_rows_are_asked_together() {
    let place = Place::new();
    let rows: Vec<String> = (0..150)
        .map(|i| match i {
            70 => r#"{"id": 70, "problem": "?", "completions": ["bad"]}"#.to_owned(),
            71 => r#"{"id": 71, "problem": "?"}"#.to_owned(),
            _ => format!(r#"{{"id": {i}, "problem": "?", "completions": ["{i}", "x"]}}"#),
        })
        .collect();
    place.write("said.jsonl", rows.join("\n"));
    place.write(
        "count.sh",
        r#"while read -r line; do id=${line#*\"id\":}; id=${id%%[,\}]*}; k=$(grep -o '"completion":' <<< "$line" | wc -l)
echo "$$ $k" >> asked; list=$(printf "0.5,%.0s" $(seq $k))
case $line in *'"completion":"bad"'*) echo "{\"id\": $id, \"error\": \"a bad text\"}";;
*) echo "{\"id\": $id, \"rewards\": [${list%,}]}";; esac; done"#,
    );
    let line = "rewards run --input said.jsonl --output out.jsonl --reward_workers 2 --reward_funcs";
    place.run_with(line, &["half=cmd:bash count.sh"]).fails(1, &["2 of 150 rows failed"]);
    let out = place.lines("out.jsonl");
    assert_eq!(out.len(), 150);
    for (i, row) in out.iter().enumerate() {
        let error = row["error"].as_str().unwrap_or_default();
        match i {
            70 => assert!(error.contains("a bad text") && error.contains("dataset row 70"), "{error}"),
            71 => assert!(error.contains("no `completions`"), "{error}"),
            _ => assert_eq!(row["rewards"]["half"], json!([0.5, 0.5])),
        }
    }
    let asked = place.text("asked");
    assert!(asked.lines().any(|line| line.ends_with(" 64")), "{asked}");
    let processes: std::collections::BTreeSet<&str> =
        asked.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(processes.len() >= 2, "{asked}");
}

#[test]
fn doctor_looks_at_a_checkpoint() {
    let place = Place::new();
    let shown = place.run("doctor --model M").ok().stdout;
    // Instructions that were tried on this CPU, with the reason.
    for feature in ["AVX512-BF16", "AVX512-VNNI", "AVX512-FP16", "AMX"] {
        let line = shown.lines().find(|line| line.trim_start().starts_with(feature)).unwrap();
        assert!(line.contains("works: ") || line.contains("not used: "), "{line}");
        assert_eq!(line.contains("works: "), shown.contains(&format!(", {feature}")), "{shown}");
    }
    // Rates of every path; one of them is used.
    for name in ["float32", "bfloat16 widened", "bfloat16 dot", "bfloat16 amx", "8 bits", "4 bits"] {
        let line = shown.lines().find(|line| line.trim_start().starts_with(&format!("{name} "))).unwrap();
        assert!(line.contains(" GFLOP/s") || line.ends_with("does not work here"), "{line}");
    }
    assert_eq!(shown.matches(" GFLOP/s, used").count(), 1, "{shown}");
    let widened = place.run("doctor --bf16_products widened").ok().stdout;
    assert!(
        widened.lines().any(|line| line.contains("bfloat16 widened") && line.ends_with("used")),
        "{widened}"
    );
    // 112,848 values in f32. In `sft`, moments take 8 bytes per trained weight and gradients 4; one weight of a reference is held.
    let memory = [
        "without training: 0.5 MB (weights 0.5 MB)",
        "full: ",
        "weights 0.5 MB, reference 0.1 MB, moments and masters 0.7 MB, gradients 0.2 MB, activations ",
        "LoRA, 4 bit: ",
    ];
    let model = ["qwen2_5_vl: 2 layers, width 64", "80 tensors", "<|im_end|>", "embeddings tied"];
    for part in model.iter().chain(&memory) {
        assert!(shown.contains(part), "`{part}` is not in\n{shown}");
    }
}

#[test]
fn doctor_says_once_what_an_unknown_family_is() {
    let place = Place::new();
    place.checkpoint("other", |_, _| ());
    let config = place.text("other/config.json");
    place.write(
        "other/config.json",
        config
            .replace("qwen2_5_vl", "llava_next")
            .replace("Qwen2_5_VLForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    );
    let ran = place.run("doctor --model other").fails(
        1,
        &[
            "model_type \"llava_next\"",
            "use a checkpoint of one of these families: ",
            "qwen2_5_vl (such as Qwen/Qwen2.5-VL-3B-Instruct)",
        ],
    );
    let all = format!("{}{}", ran.stdout, ran.stderr);
    assert_eq!(all.matches("is unsupported; use a checkpoint of one of these families").count(), 1, "{all}");
    assert_eq!(all.matches("PROBLEM").count(), 1, "{all}");
}

/// A run whose weights and moments exceed the memory fails before anything is loaded, with settings that would fit.
#[cfg(target_os = "linux")]
#[test]
fn a_run_too_large_for_the_memory_is_an_error_before_it_begins() {
    let place = Place::new();
    place.checkpoint("large", |_, _| {});
    let config = place.text("large/config.json");
    let limited = |vocab: usize| {
        let mut config: Value = serde_json::from_str(&config).unwrap();
        let text = config.get_mut("text_config").filter(|text| text.get("vocab_size").is_some());
        match text {
            Some(text) => text["vocab_size"] = json!(vocab),
            None => config["vocab_size"] = json!(vocab),
        }
        place.write("large/config.json", config.to_string());
        // 64 numbers of 4 bytes for each token, and an address space of 3 GB.
        let line = "train --model large --init_weights 1 --train_file rows.jsonl --output_dir run --max_steps 1 --threads 1 \
                    --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 2";
        ran(&mut place.limited("-v 3000000", line))
    };
    let refused = limited(16_000_000).fails(
        1,
        &[
            "this run does not fit into memory",
            "(program and rows ",
            "weights 4.1 GB, reference 4.1 GB",
            "at most the free ",
        ],
    );
    assert!(refused.stderr.contains("no flag that `omnigrpo plan` tries makes it fit"), "{}", refused.stderr);
    assert!(!place.exists("run/metrics.jsonl"));
}

/// `plan` and `--dry_run` print the same numbers, without a run directory; with adapters frozen weights have no moments.
#[test]
fn a_plan_says_what_a_run_takes_and_begins_none() {
    let place = Place::new();
    let flags = format!("--model M --train_file rows.jsonl --reward_funcs random {SMALL}");
    let planned = place.run(&format!("plan {flags}")).ok().stdout;
    let dry = place.run(&format!("train {flags} --output_dir run --dry_run --json plan.json")).ok().stdout;
    let line = |text: &str, start: &str| {
        let found = text.lines().find(|line| line.starts_with(start));
        found.unwrap_or_else(|| panic!("no {start} in {text}")).to_owned()
    };
    for part in
        ["weights", "reference", "moments and masters", "gradients", "activations", "cache of completions"]
    {
        assert_eq!(line(&planned, part), line(&dry, part));
    }
    assert!(line(&planned, "free, memory").ends_with("it fits"), "{planned}");
    assert!(!place.exists("run"));
    let json: Value = serde_json::from_str(&place.text("plan.json")).unwrap();
    let sum: u64 = json["parts"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!((json["total"].as_u64(), json["fits"].as_bool()), (Some(sum), Some(true)));

    // Shorter completions take less time; an epoch has all of its steps.
    line(&planned, "time on this machine");
    let time = &json["time"];
    let [longest, half] = &time["with_completions"].as_array().unwrap()[..] else { panic!("{time}") };
    let number = |of: &Value, name: &str| of[name].as_f64().unwrap();
    assert_eq!(number(longest, "completion_tokens"), 2.0 * number(half, "completion_tokens"));
    let phases = longest["phases"].as_object().unwrap();
    for phase in ["rollout", "reference", "forward", "backward", "optimizer"] {
        assert!(phases[phase].as_f64().unwrap() > 0.0, "{phase}: {time}");
    }
    let (step, epoch) = (number(longest, "step_secs"), number(longest, "epoch_secs"));
    assert!((epoch - step * number(time, "steps_per_epoch")).abs() < 1e-9 * epoch, "{time}");
    assert!(number(&longest["phases"], "rollout") > number(&half["phases"], "rollout"), "{time}");

    // The reference stays in the files and is read one weight after the other, unless it moves or the files have another precision.
    let reference = |more: &str| {
        place.run(&format!("plan {flags} {more} --json plan.json")).ok();
        let json: Value = serde_json::from_str(&place.text("plan.json")).unwrap();
        (json["parts"]["reference"].as_u64().unwrap(), json["parts"]["weights"].as_u64().unwrap())
    };
    let (lent, weights) = reference("");
    assert!(lent > 0 && lent < weights / 4, "{lent} of {weights}");
    for (more, share) in [("--sync_ref_model", 1), ("--init_weights 1", 1), ("--torch_dtype bfloat16", 2)] {
        let (copied, all) = reference(more);
        assert!(copied > all / 2 && copied <= all && all == weights / share, "{more}: {copied} of {all}");
    }

    let adapted = place.run(&format!("plan {flags} --use_peft --lora_r 2")).ok().stdout;
    line(&adapted, "adapters");
    assert!(!adapted.lines().any(|line| line.starts_with("reference")), "{adapted}");
    place.run("sft --dry_run --model M --train_file rows.jsonl --gradient_accumulation_steps 1").ok();
    place
        .run(&format!("train {flags} --output_dir run --json plan.json"))
        .fails(2, &["`json` has no effect in this run", "--dry_run"]);
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
    place
        .run("export --model M --layout original --output_dir no")
        .fails(1, &["have only the layout", "\"hf\""]);
    assert!(!place.exists("no"));
    place.run("export --model run --layout gguf --output_dir no").fails(2, &["gguf", "original"]);
    place
        .run(&format!("score --model {model} --input replay.jsonl --output e.jsonl --max_pixels 10000"))
        .fails(2, &["max_anyres_num"]);
}

/// A trained text model goes to llama.cpp and back. The file that comes back is the same one.
#[test]
fn a_text_model_is_exported_as_gguf_and_converted_back() {
    let place = Place::new();
    place.write("rows.jsonl", "{\"problem\": \"What is 2+3?\", \"solution\": \"5\"}\n");
    let model = golden("checkpoints/llama").display().to_string();
    place
        .run(&format!(
            "sft --model {model} --train_file rows.jsonl --output_dir run --threads 1 --use_peft --lora_dropout 0 \
             --learning_rate 0.01 --max_steps 1 --max_completion_length 8"
        ))
        .ok();
    let merged = format!("export --model {model} --adapter_name_or_path run --merge");
    place.run(&format!("{merged} --output_dir whole")).ok();
    let ran = place.run(&format!("{merged} --format gguf --output_dir file")).ok();
    assert!(ran.stderr.contains("wrote file/model.gguf, adapters of 14 layers merged"), "{}", ran.stderr);
    for outtype in ["f16", "q8_0"] {
        place
            .run(&format!("export --model whole --format gguf --outtype {outtype} --output_dir {outtype}"))
            .ok();
        let ran = place.run(&format!("convert {outtype}/model.gguf back-{outtype}/whole")).ok();
        assert!(
            ran.stderr.contains("wrote back-") && ran.stderr.contains("20 weights of llama"),
            "{}",
            ran.stderr
        );
        place
            .run(&format!("export --model back-{outtype}/whole --format gguf --outtype {outtype} --output_dir again-{outtype}"))
            .ok();
    }
    let file = |dir: &str| std::fs::read(place.path(&format!("{dir}/model.gguf"))).unwrap();
    assert!(file("f16") == file("again-f16"), "F16 values change on the way");
    // The merged weights are in the file, and not those of the base.
    place.run(&format!("export --model {model} --format gguf --output_dir base")).ok();
    assert!(file("base") != file("file") && file("base").len() == file("file").len());
    place.run("convert file/model.gguf base").fails(2, &["not empty"]);
    place.run("convert rows.jsonl new").fails(1, &["rows.jsonl", "expected the letters GGUF"]);
    assert!(!place.exists("new") && !place.exists("new.tmp"));
    place.run("convert file/model.gguf").fails(2, &["needs `DIRECTORY`"]);
    place
        .run(&format!("export --model {model} --outtype q8_0 --output_dir no"))
        .fails(2, &["outtype", "no effect"]);
    place
        .run(&format!("export --model {model} --format gguf --layout hf --output_dir no"))
        .fails(2, &["`layout` has no effect"]);
    place
        .run(&format!("export --model {model} --output_dir no"))
        .fails(2, &["nothing to export", "--format gguf"]);
    place
        .run("export --model M --format gguf --output_dir no")
        .fails(1, &["cannot be written as GGUF; expected one of qwen2, qwen3, llama"]);
}

#[test]
fn rows_come_from_pipes_tables_and_a_registry_here() {
    let place = Place::new();
    let said =
        r#"{"problem": "2+3?", "solution": "<answer>5</answer>", "completions": ["<answer>5</answer>"]}"#;
    let mut command = place.command("rewards run --input - --output out.jsonl --reward_funcs accuracy");
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(said.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(place.lines("out.jsonl")[0]["rewards"]["accuracy"], json!([1.0]));
    // The standard input of the test is no pipe.
    place.run("rewards run --input - --output out.jsonl").fails(1, &["neither a regular file nor a pipe"]);

    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/data/hub.parquet");
    std::fs::copy(table, place.path("hub.parquet")).unwrap();
    std::fs::copy(place.path("shapes.png"), place.path("kept.png")).unwrap();
    let check = place.run("data check --train_file hub.parquet").ok().stdout;
    assert!(check.contains("3 rows: 4 images") && check.contains("solutions from "), "{check}");

    place
        .run("data check --dataset_use shapes")
        .fails(2, &["--dataset_registry FILE", "dataset_registry.yaml"]);
    place.write("dataset_registry.yaml", "shapes: {annotation_path: rows.jsonl}\n");
    place.run("data check --dataset_use shapes").ok();
    // Advice for one dataset does not appear for another.
    let missing =
        place.run("data check --train_file gone.jsonl").fails(1, &["gone.jsonl", "correct the path"]);
    assert!(!missing.stderr.contains("vivqa"), "{}", missing.stderr);
}

#[test]
fn media_by_address_are_fetched_where_they_are_allowed() {
    let place = Place::new();
    let picture = place.bytes("shapes.png");
    let (address, asked) = server(move |path| (path == "/shapes.png").then(|| picture.clone()));
    let question = &["--prompt", "<image>\nWhich shape is red?"];
    let line = "generate --model M --temperature 0 --max_completion_length 6 --image";
    let local = place.run_with(&format!("{line} shapes.png"), question).ok().stdout;
    let by_address = format!("{line} http://{address}/shapes.png");
    place
        .run_with(&by_address, question)
        .fails(1, &["media by address are not allowed", "--allow_urls public"]);
    let refused = place.run_with(&format!("{by_address} --allow_urls public"), question);
    refused.fails(1, &["an address of this machine", "--allow_urls all"]);
    assert!(asked.lock().unwrap().is_empty());
    for _ in 0..2 {
        let fetched = place.run_with(&format!("{by_address} --allow_urls all"), question).ok();
        assert_eq!(fetched.stdout, local);
    }
    assert_eq!(*asked.lock().unwrap(), ["/shapes.png"]);
    let gone = format!("http://{address}/gone.png");
    place.write("rows.jsonl", json!({"prompt": "Q", "image": gone}).to_string());
    place
        .run("data check --train_file rows.jsonl --allow_urls all")
        .fails(1, &["1 of 1 rows cannot be used"]);
}

/// A model that is not in the cache is fetched from the hub (a stand-in here), and its outputs name it as the hub does.
#[test]
fn a_model_of_the_hub_is_fetched_and_named() {
    let place = Place::new();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let dir = golden("checkpoints/qwen2_5_vl_tied");
    let names: Vec<String> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    let siblings: Vec<Value> = names
        .iter()
        .map(|name| {
            let bytes = std::fs::read(dir.join(name)).unwrap();
            json!({"rfilename": name, "lfs": {"sha256": sha256(&bytes), "size": bytes.len()}})
        })
        .collect();
    let listing = json!({"sha": commit, "siblings": siblings}).to_string();
    let (address, asked) = server(move |path| match path {
        "/api/models/me/tiny/revision/main?blobs=true" => Some(listing.clone().into_bytes()),
        path => std::fs::read(dir.join(path.strip_prefix(&format!("/me/tiny/resolve/{commit}/"))?)).ok(),
    });
    let endpoint = format!("http://{address}");
    let run = |line: &str, offline: &str| {
        let mut command = place.command(line);
        command.env("HF_HUB_OFFLINE", offline).env("HF_ENDPOINT", &endpoint).env("HF_TOKEN", "very-secret");
        let ran = ran(&mut command);
        assert!(!format!("{}{}", ran.stdout, ran.stderr).contains("very-secret"));
        ran
    };
    let sft = "sft --train_file rows.jsonl --max_steps 2 --threads 1 --run_name first-try --output_dir";
    run(&format!("{sft} run --model me/tiny"), "1")
        .fails(1, &["HF_HUB_OFFLINE is set", ".cache/huggingface/hub"]);
    run(&format!("{sft} run --model me/other"), "").fails(1, &["`me/other`", "has no model"]);
    assert!(run(&format!("{sft} run --model me/tiny"), "").ok().stderr.contains("fetching me/tiny"));
    let first = asked.lock().unwrap().len();
    run(&format!("{sft} lora --model me/tiny --use_peft"), "").ok();
    assert_eq!(asked.lock().unwrap().len(), first, "a model of the cache is asked for again");

    let card = place.text("run/README.md");
    let fields = "---\nbase_model: me/tiny\nbase_model_relation: finetune\nlibrary_name: transformers\npipeline_tag: image-text-to-text\n";
    assert!(card.starts_with(fields) && card.contains("](metrics.svg)"), "{card}");
    assert!(place.text("run/metrics.svg").contains("Loss"));
    assert!(
        card.contains(commit) && card.contains("2 steps of") && card.contains("`rows` (3 rows)"),
        "{card}"
    );
    assert!(place.text("run/log.txt").contains("run first-try"));
    let config: Value = serde_json::from_str(&place.text("lora/adapter_config.json")).unwrap();
    assert_eq!(
        (&config["base_model_name_or_path"], &config["revision"]),
        (&json!("me/tiny"), &json!(commit))
    );
    // A card names a directory without its path. The directory's own card names its base, which an adapter to it does not need.
    place.run(&format!("{sft} on --model run")).ok();
    let card = place.text("on/README.md");
    assert!(card.contains("base_model: me/tiny\n") && card.contains("Trained from `run` with"), "{card}");
    place.run(&format!("{sft} adapter --model run --use_peft")).ok();
    let card = place.text("adapter/README.md");
    assert!(card.starts_with("---\nlibrary_name: peft\n") && !card.contains("base_model"), "{card}");
    assert!(!place.text("on/README.md").contains(&*place.path("").to_string_lossy()));
}

/// A table of the hub is fetched once and read as rows; the card names it.
#[test]
fn rows_of_the_hub_are_tables_of_a_split() {
    let place = Place::new();
    let hub = StandIn::start();
    let table =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/data/hub.parquet")).unwrap();
    hub.hold(
        "datasets/me/rows",
        &[
            ("data/train-00000-of-00002.parquet", &table),
            ("data/train-00001-of-00002.parquet", &table),
            ("data/test-00000-of-00001.parquet", &table),
        ],
    );
    let run = |line: &str, offline: &str| {
        ran(place.command(line).env("HF_ENDPOINT", hub.endpoint()).env("HF_HUB_OFFLINE", offline))
    };
    let check = "data check --train_file me/rows";
    run(check, "1").fails(1, &["HF_HUB_OFFLINE is set", "`me/rows`, split `train`"]);
    run(&format!("{check} --dataset_train_split dev"), "").fails(
        1,
        &["does not have exactly one split `dev`", "default/test, default/train", "--dataset_train_split"],
    );
    run("data check --train_file rows.jsonl --dataset_train_split dev", "")
        .fails(2, &["names a dataset of the hub"]);
    std::fs::copy(place.path("shapes.png"), place.path("kept.png")).unwrap();
    let check = format!("{check} --image_folders .");
    hub.requests();
    let both = run(&format!("{check} --eval_file me/rows"), "").ok();
    assert!(
        both.stderr.contains("fetching me/rows (train)") && both.stderr.contains("fetching me/rows (test)")
    );
    // The three files have the same content.
    assert_eq!(hub.requests().iter().filter(|line| line.contains("/get/")).count(), 1);
    let again = run(&check, "1").ok().stdout;
    assert!(hub.requests().is_empty() && again.contains("6 rows: 8 images"), "{again}");
}

/// No verb overwrites its input, under any name.
#[test]
fn no_output_replaces_its_input() {
    let place = Place::new();
    let rows = r#"[{"question": "q", "image_name": "a.jpg", "answer": "x", "explanation": ["y"], "completions": ["x"]}]"#;
    std::fs::write(place.path("rows.json"), rows).unwrap();
    let mut names = vec!["rows.json", "./rows.json"];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("rows.json", place.path("soft.json")).unwrap();
        std::fs::hard_link(place.path("rows.json"), place.path("hard.json")).unwrap();
        names.extend(["soft.json", "hard.json"]);
    }
    for name in names {
        for line in ["data convert vivqa-x", "data convert parquet", "rewards run --reward_funcs format"] {
            place
                .run(&format!("{line} --input rows.json --output {name}"))
                .fails(2, &["the output would overwrite the input", name]);
        }
        assert_eq!(std::fs::read_to_string(place.path("rows.json")).unwrap(), rows, "{name}");
    }
    // The summary beside the rows is an output too.
    std::fs::rename(place.path("rows.json"), place.path("out.summary.json")).unwrap();
    place
        .run("rewards run --reward_funcs format --input out.summary.json --output out.jsonl")
        .fails(2, &["the output would overwrite the input", "out.summary.json"]);
}

/// A trained model is pushed to the hub (a stand-in here). If that fails, it stays on disk and can be pushed later.
#[test]
fn a_trained_model_is_pushed_to_the_hub() {
    let place = Place::new();
    let hub = StandIn::start();
    let run_as = |token: &str, line: &str| {
        let mut command = place.command(line);
        command.env("HF_HUB_OFFLINE", "").env("HF_ENDPOINT", hub.endpoint()).env("HF_TOKEN", token);
        let ran = ran(&mut command);
        assert!(!format!("{}{}", ran.stdout, ran.stderr).contains("secret"), "{}", ran.stderr);
        ran
    };
    let run = |line: &str| run_as(StandIn::TOKEN, line);
    let sft = "sft --model M --train_file rows.jsonl --max_steps 2 --threads 1";

    // Settings that cannot work are found before training.
    place.run(&format!("{sft} --output_dir no --push_to_hub")).fails(2, &["cannot be pushed offline"]);
    run_as("", &format!("{sft} --output_dir no --push_to_hub")).fails(1, &["set HF_TOKEN"]);
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = place.command("push M --hub_model_id x");
    command.env("HF_HUB_OFFLINE", "").env("HF_ENDPOINT", format!("http://{closed}")).env("HF_TOKEN", "x");
    let refused = ran(&mut command).fails(1, &["the connection failed", "Connection refused"]);
    assert!(!refused.stdout.contains("pushed"));
    run(&format!("{sft} --output_dir no --push_to_hub --hub_model_id others/x"))
        .fails(1, &["status 403", "the rights"]);
    run(&format!("{sft} --output_dir no --hub_model_id x")).fails(2, &["`push_to_hub` is off"]);
    run("push .").fails(2, &["no model to push"]);
    assert!(!place.exists("no"));

    let done = run(&format!("{sft} --output_dir run --push_to_hub --hub_private_repo")).ok();
    assert!(done.stdout.contains(&format!("pushed to {}/me/run", hub.endpoint())), "{}", done.stdout);
    let names = |repo: &hub::Repo| repo.files.keys().cloned().collect::<Vec<_>>();
    let (private, files) = hub.look("me/run", |repo| (repo.private, names(repo))).unwrap();
    assert!(
        private && files.contains(&"model.safetensors".to_owned()) && files.contains(&"README.md".to_owned())
    );
    for file in files.iter().filter(|file| *file != ".gitattributes") {
        assert_eq!(
            hub.look("me/run", |repo| repo.files[file].clone()).unwrap(),
            place.bytes(&format!("run/{file}"))
        );
    }
    for record in ["log.txt", "metrics.jsonl", "config.yaml"] {
        assert!(place.exists(&format!("run/{record}")) && !files.contains(&record.to_owned()), "{record}");
    }
    assert!(run("push run").ok().stdout.contains("nothing has changed"));

    // A model among private files: those are not pushed.
    place.checkpoint("project", |_, data| data[0] ^= 2);
    let config = place.text("project/config.json").replacen(
        '{',
        "{\"auto_map\": {\"AutoConfig\": \"configuration_own.Own\", \"AutoModel\": \"org/x--secrets.X\"},",
        1,
    );
    for (name, text) in [
        ("config.json", config.as_str()),
        ("configuration_own.py", "from .layers import Layer\nimport secrets\n"),
        ("layers.py", ""),
        ("secrets.py", "KEY = 1\n"),
        ("rows.json", "[]"),
        ("notes.txt", "mine"),
        ("judge.safetensors", "x"),
        ("prompt.jinja", "x"),
    ] {
        std::fs::write(place.path(&format!("project/{name}")), text).unwrap();
    }
    run("push project").ok();
    let pushed = hub.look("me/project", names).unwrap();
    for name in ["config.json", "model.safetensors", "configuration_own.py", "layers.py"] {
        assert!(pushed.contains(&name.to_owned()), "{name}: {pushed:?}");
    }
    for name in ["secrets.py", "rows.json", "notes.txt", "judge.safetensors", "prompt.jinja"] {
        assert!(!pushed.contains(&name.to_owned()), "{name}: {pushed:?}");
    }
    // A link to a private file is reported, and nothing is sent.
    #[cfg(unix)]
    for name in ["LICENSE", "vocab.json", "additional_chat_templates/rag.jinja"] {
        let link = place.path(&format!("project/{name}"));
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        run("push project --hub_model_id me/linked").fails(1, &[name, "leads to /etc/passwd", "outside of"]);
        assert!(hub.look("me/linked", |_| ()).is_none(), "{name}");
        std::fs::remove_file(&link).unwrap();
    }
    // Settings without weights are no model, and no repository is created.
    std::fs::remove_file(place.path("project/model.safetensors")).unwrap();
    run("push project --hub_model_id me/empty").fails(2, &["no model to push", "model.safetensors"]);
    assert!(hub.look("me/empty", |_| ()).is_none());

    // The hub refuses at the end: the model stays on disk, and the printed command sends it.
    hub.fail("commit/main", 403, 1);
    let failed = run(&format!("{sft} --output_dir lora --use_peft --push_to_hub --hub_model_id me/lora"))
        .fails(
            1,
            &["trained and saved, but could not be pushed", "omnigrpo push lora --hub_model_id me/lora"],
        );
    assert!(!failed.stdout.is_empty() && place.exists("lora/adapter_model.safetensors"));
    hub.requests();
    run("push lora --hub_model_id me/lora").ok();
    assert!(!hub.requests().iter().any(|line| line.starts_with("PUT")), "weights are sent twice");
    assert!(hub.look("me/lora", |repo| repo.files.contains_key("adapter_config.json")).unwrap());

    // The process is killed while it sends.
    place.checkpoint("changed", |_, data| data[0] ^= 1);
    hub.fail("PUT /", 1, 1);
    let mut child = {
        let mut command = place.command("push changed --hub_model_id killed");
        command.env("HF_HUB_OFFLINE", "").env("HF_ENDPOINT", hub.endpoint()).env("HF_TOKEN", StandIn::TOKEN);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    for _ in 0..4000 {
        if hub.look("me/killed", |_| ()).is_some()
            && hub.requests().iter().any(|line| line.starts_with("PUT"))
        {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(hub.look("me/killed", |repo| repo.messages.is_empty()).unwrap());
    run("push changed --hub_model_id killed").ok();
    let pushed = hub.look("me/killed", |repo| repo.files["model.safetensors"].clone()).unwrap();
    assert!(pushed == place.bytes("changed/model.safetensors"));
}

/// Checkpoints are pushed during training.
#[test]
fn checkpoints_are_pushed_beside_training() {
    let place = Place::new();
    let hub = StandIn::start();
    let line = "sft --model M --train_file rows.jsonl --max_steps 3 --threads 1 --save_steps 1 --output_dir run --push_to_hub \
                --hub_model_id me/each --hub_strategy every_save";
    let mut command = place.command(line);
    command.env("HF_HUB_OFFLINE", "").env("HF_ENDPOINT", hub.endpoint()).env("HF_TOKEN", StandIn::TOKEN);
    let done = ran(&mut command).ok();
    let messages = hub.look("me/each", |repo| repo.messages.clone()).unwrap();
    assert_eq!(messages.first().map(String::as_str), Some("Model after step 1"), "{}", done.stderr);
    assert_eq!(messages.last().map(String::as_str), Some("Model after step 3"));
    let pushed = hub.look("me/each", |repo| repo.files["model.safetensors"].clone()).unwrap();
    assert!(pushed == place.bytes("run/model.safetensors"));
    assert!(!hub.look("me/each", |repo| repo.files.contains_key("optimizer.safetensors")).unwrap());
}

/// A training step with its evaluation, and rollouts, of a tiny model of each family with the kernels of a GPU, on the emulator: with
/// f32 weights the same tokens are drawn as on the CPU and numbers agree up to rounding; with bf16 weights log-probabilities of given
/// completions agree within 0.05 and 2 %, since activations between them are bf16 there and f32 on the CPU.
#[test]
fn families_on_the_emulator_of_a_gpu() {
    for (name, more) in [
        ("qwen2_vl_tied", ""),
        ("qwen2_5_vl_untied", "--reference_device cpu --offload_optimizer"),
        ("internvl_hf", "--use_peft --lora_r 4 --lora_dropout 0"),
        ("internvl3_5_hf", ""),
        ("aria", "--use_peft --lora_target_modules all-linear,experts --lora_r 4 --lora_dropout 0"),
        ("smolvlm", "--use_peft --lora_r 4 --lora_dropout 0"),
        ("humanomni", "--gradient_checkpointing"),
        ("omni", "--gradient_checkpointing"),
        ("qwen3_vl", "--gradient_checkpointing"),
        ("qwen3_vl_moe", "--use_peft --lora_target_modules all-linear,experts --lora_r 4 --lora_dropout 0"),
        ("qwen3_5", "--gradient_checkpointing"),
        ("qwen3_5_text", "--use_peft --lora_r 4 --lora_dropout 0"),
        ("qwen2", "--gradient_checkpointing"),
        ("qwen3", "--use_peft --lora_r 4 --lora_dropout 0"),
        ("llama", "--offload_optimizer"),
    ] {
        let place = Place::new();
        let model = golden("checkpoints").join(name).display().to_string();
        let mut rounded = model.clone();
        if name.starts_with("qwen3_5") {
            // Rounding to bf16 changes this tiny model as little as others if 1 is added to mean squares of outputs near 0.
            copy_dir(&golden("checkpoints").join(name), &place.path(name));
            let config = place.text(&format!("{name}/config.json"));
            let changed = config.replace("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1.0");
            assert!(changed != config);
            place.write(&format!("{name}/config.json"), changed);
            rounded = name.to_owned();
        }
        let mut rows = [
            json!({"id": "shapes", "image": "shapes.png", "problem": "Which shape is red?", "solution": "<answer>square</answer>"}),
            json!({"id": "sum", "problem": "What is 2+3?", "solution": "<answer>5</answer>"}),
        ];
        if !name.contains("vl") && !["aria", "smolvlm", "humanomni", "omni", "qwen3_5"].contains(&name) {
            rows[0].as_object_mut().unwrap().remove("image");
        }
        place.write("few.jsonl", rows.clone().map(|row| format!("{row}\n")).concat());
        let run = |device: &str| {
            // Settings without effect on the CPU are errors there.
            let more =
                if device == "cpu" { more.replace("--offload_optimizer", "") } else { more.to_owned() };
            let ran = place.run(&format!(
                "train --model {model} --device {device} {more} --train_file few.jsonl --eval_file few.jsonl --output_dir {device} \
                 --threads 1 --num_generations 2 --gradient_accumulation_steps 2 --max_steps 1 --max_completion_length 4 \
                 --torch_dtype float32 --reward_funcs random --learning_rate 1e-4 --adam_epsilon 1e-3 --save_steps 1"
            ));
            assert!(ran.ok().stderr.contains(&format!("device: {device}")));
            place.lines(&format!("{device}/metrics.jsonl"))
        };
        let (cpu, gpu) = (run("cpu"), run("emulated"));
        assert_eq!(cpu.len(), gpu.len(), "{name}");
        let mut compared = 0;
        for (cpu, gpu) in cpu.iter().zip(&gpu) {
            for (key, want) in cpu.as_object().unwrap() {
                let timed = key.contains("time")
                    || key.starts_with("machine/")
                    || key.contains("per_sec")
                    || key.contains("memory")
                    || key.contains("bytes");
                // A GPU alone knows the experts of decoded tokens.
                if key == "sampling/rows_with_other_experts" {
                    assert!(gpu[key].is_null(), "{name}");
                    continue;
                }
                if let (false, Some(want)) = (timed, want.as_f64()) {
                    let got = gpu[key].as_f64().unwrap();
                    assert!(
                        (got - want).abs() <= 2e-3 * want.abs() + 1e-5,
                        "{name}, {key}: {got} for {want}"
                    );
                    compared += 1;
                }
            }
        }
        assert!(compared > 20, "{name}: {compared} numbers compared");
        // Greedy rollouts alone, and an evaluation of the checkpoint.
        let said = |device: &str| {
            let of =
                format!("--model {model} --device {device} --torch_dtype float32 --max_completion_length 4");
            place.run(&format!("generate {of} --input few.jsonl --output g-{device} --temperature 0")).ok();
            place
                .run(&format!(
                    "eval {of} --eval_file few.jsonl --output e-{device}.jsonl --reward_funcs random"
                ))
                .ok();
            let summary: Value =
                serde_json::from_str(&place.text(&format!("e-{device}.summary.json"))).unwrap();
            (place.lines(&format!("g-{device}")), summary["eval_reward"].clone())
        };
        let (cpu, gpu) = (said("cpu"), said("emulated"));
        assert!(cpu.1.is_f64() && cpu.1 == gpu.1, "{name}: {} for {}", gpu.1, cpu.1);
        for (cpu, gpu) in cpu.0.iter().zip(&gpu.0) {
            let [cpu, gpu] = [cpu, gpu].map(|row| &row["completions"][0]);
            assert_eq!(cpu["completion_ids"], gpu["completion_ids"], "{name}");
            let [cpu, gpu] = [cpu, gpu].map(|completion| numbers(&completion["logprobs"]));
            assert!(
                cpu.len() == 4 && cpu.iter().zip(&gpu).all(|(a, b)| (a - b).abs() < 1e-3),
                "{name}: {gpu:?} for {cpu:?}"
            );
        }
        let mut rows = rows;
        for row in &mut rows {
            row["completions"] = json!(["<answer>square</answer>", "So it is 5."]);
        }
        place.write("given.jsonl", rows.map(|row| format!("{row}\n")).concat());
        let score = |device: &str| {
            place
                .run(&format!("score --model {rounded} --device {device} --torch_dtype bfloat16 --input given.jsonl --output s-{device}"))
                .ok();
            let lines = place.lines(&format!("s-{device}"));
            let all = lines.iter().flat_map(|row| row["completions"].as_array().unwrap());
            all.flat_map(|completion| numbers(&completion["logprobs"])).collect::<Vec<_>>()
        };
        let (cpu, gpu) = (score("cpu"), score("emulated"));
        assert!(cpu.len() > 8 && cpu.len() == gpu.len());
        for (got, want) in gpu.iter().zip(&cpu) {
            assert!((got - want).abs() <= 0.05 + 0.02 * want.abs(), "{name}: {got} for {want}");
        }
    }
}

/// Each divergence of a teacher with the kernels of a GPU, on the emulator, has the numbers of the CPU up to rounding.
#[test]
fn a_teacher_on_the_emulator_of_a_gpu() {
    let place = Place::new();
    let [model, teacher] =
        ["qwen2", "qwen3"].map(|name| golden("checkpoints").join(name).display().to_string());
    place.write("few.jsonl", "{\"problem\": \"What is 2+3?\", \"solution\": \"<answer>5</answer>\"}\n");
    for more in [
        "reverse_kl",
        "reverse_kl --teacher_top_k 20",
        "forward_kl --teacher_top_k 20",
        "jsd --teacher_top_k 20",
    ] {
        let run = |device: &str| {
            let out = format!("{device}-{}", more.replace(' ', ""));
            place
                .run(&format!(
                    "train --model {model} --teacher_model_name_or_path {teacher} --teacher_divergence {more} --device {device} \
                     --train_file few.jsonl --output_dir {out} --threads 1 --num_generations 2 --gradient_accumulation_steps 1 \
                     --max_steps 2 --max_completion_length 4 --torch_dtype float32 --reward_funcs random --reward_weights 0"
                ))
                .ok();
            let lines = place.lines(&format!("{out}/metrics.jsonl"));
            let keys = ["loss", "grad_norm", if more == "reverse_kl" { "kl" } else { "teacher_divergence" }];
            lines.iter().map(|line| keys.map(|key| line[key].as_f64().unwrap())).collect::<Vec<_>>()
        };
        let (cpu, gpu) = (run("cpu"), run("emulated"));
        assert!(cpu.len() == 2 && gpu.len() == 2, "{more}");
        for (want, got) in cpu.iter().flatten().zip(gpu.iter().flatten()) {
            assert!(want.abs() > 1e-2 && (got - want).abs() <= 2e-3 * want.abs(), "{more}: {got} for {want}");
        }
    }
}

/// Adapters on weights of 8 and 4 bits with the kernels of a GPU, on the emulator, which multiplies the same weights as bf16.
#[test]
fn few_bits_on_the_emulator_of_a_gpu() {
    let place = Place::new();
    for (bits, more) in
        [("load_in_8bit", ""), ("load_in_4bit", "--gradient_checkpointing --offload_optimizer")]
    {
        let run = |device: &str| {
            let more =
                if device == "cpu" { more.replace("--offload_optimizer", "") } else { more.to_owned() };
            place
                .run(&format!(
                    "sft --model M --device {device} --{bits} --use_peft --lora_r 4 --lora_dropout 0 {more} --train_file rows.jsonl \
                     --threads 1 --gradient_accumulation_steps 2 --max_steps 2 --learning_rate 1e-3 --adam_epsilon 1e-3 \
                     --output_dir {bits}-{device}"
                ))
                .ok();
            let metrics = place.lines(&format!("{bits}-{device}/metrics.jsonl"));
            metrics
                .iter()
                .map(|row| ["loss", "grad_norm"].map(|key| row[key].as_f64().unwrap()))
                .collect::<Vec<_>>()
        };
        let (cpu, gpu) = (run("cpu"), run("emulated"));
        assert_eq!((cpu.len(), gpu.len()), (2, 2));
        for (got, want) in gpu.iter().flatten().zip(cpu.iter().flatten()) {
            assert!((got - want).abs() <= 2e-2 * want.abs(), "{bits}: {gpu:?} for {cpu:?}");
        }
    }
}

/// A plan for a GPU of another machine opens none. Its parts include the workspace of the libraries there.
#[test]
fn a_plan_for_a_gpu_needs_no_gpu() {
    let place = Place::new();
    let line = |memory: &str| {
        format!(
            "{SMALL} --model M --train_file rows.jsonl --reward_funcs random --device cuda --gpu_memory {memory}"
        )
    };
    let ran = place.run(&format!("plan {} --json plan.json", line("24GB"))).ok();
    assert!(ran.stderr.contains("device: a GPU with 24.0 GB, which is not opened"), "{}", ran.stderr);
    let plan: Value = serde_json::from_str(&place.text("plan.json")).unwrap();
    assert_eq!((&plan["limit"], &plan["fits"]), (&json!(24_000_000_000u64), &json!(true)));
    let parts = plan["parts"].as_object().unwrap();
    assert_eq!(parts["workspace_of_libraries"], json!(32 << 20));
    assert_eq!(parts["program_and_rows"], json!(0), "main memory is not counted");
    let sum: u64 = parts.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(plan["total"], json!(sum));
    place
        .run(&format!("plan {}", line("33MB")))
        .fails(1, &["this run does not fit into the GPU's memory", "33.0 MB"]);
    place.run(&format!("plan {}", line("24"))).fails(2, &["this is no amount of memory", "`24GB`"]);
    place
        .run(&format!("train {} --output_dir out", line("24GB")))
        .fails(2, &["gpu_memory", "only `plan`, `init` and `--dry_run` assume a GPU"]);
}

/// Main memory has a copy of the weights, and with offload the state, the gradients and the buffers of their copies.
#[test]
fn a_plan_for_a_gpu_lists_main_memory() {
    let place = Place::new();
    let plan = |more: &str| -> Value {
        let line =
            format!("{SMALL} --model M --train_file rows.jsonl --reward_funcs random --torch_dtype bfloat16");
        place.run(&format!("plan {line} --device cuda --gpu_memory 24GB {more} --json plan.json")).ok();
        serde_json::from_str(&place.text("plan.json")).unwrap()
    };
    let part = |plan: &Value, of: &str, name: &str| match of {
        "card" => plan["parts"][name].as_u64().unwrap(),
        _ => plan["main_memory"]["parts"][name].as_u64().unwrap(),
    };
    let (here, away) = (plan(""), plan("--offload_optimizer"));
    let weights = part(&here, "card", "weights");
    // On the GPU, the state has 10 bytes for each trained weight; main memory has 12, and 4 for the gradient.
    let trained = part(&here, "card", "moments_and_masters") / 10;
    let names = ["weights", "moments_and_masters", "gradients", "pinned_buffers"];
    let main = |plan: &Value| names.map(|name| part(plan, "main", name));
    // Weights travel through pinned buffers, too.
    assert_eq!(main(&here), [weights, 0, 0, 32 << 20]);
    assert_eq!(main(&away), [weights, 12 * trained, 4 * trained, 64 << 20]);
    assert_eq!(part(&away, "card", "moments_and_masters"), 0);
    let disk = plan("--offload_optimizer file");
    assert_eq!(main(&disk), [weights, 0, 4 * trained, 64 << 20]);
    assert_eq!(disk["main_memory"]["disk"], 12 * trained);
    assert!(part(&here, "main", "program_and_rows") > 0 && part(&here, "main", "decoded_media") > 0);
    // The gradient of a separate output head is sent at once, so it is not held at the peak, in the blocks.
    let untied = golden("checkpoints/qwen2_5_vl_untied");
    let line = format!(
        "plan --model {} --train_file rows.jsonl --reward_funcs random --torch_dtype bfloat16 --max_steps 2 --num_generations 4 \
         --gradient_accumulation_steps 1 --max_completion_length 64",
        untied.display()
    );
    place.run(&format!("{line} --device cuda --gpu_memory 24GB --offload_optimizer --json untied.json")).ok();
    let untied: Value = serde_json::from_str(&place.text("untied.json")).unwrap();
    assert_eq!(part(&untied, "card", "gradients"), 0);
    // The GPU is on another machine, whose main memory is unknown.
    assert_eq!((&away["main_memory"]["limit"], &away["main_memory"]["fits"]), (&Value::Null, &json!(true)));
    let ran = place
        .run("plan --model M --train_file rows.jsonl --reward_funcs random --device cpu --json plan.json")
        .ok();
    let plan: Value = serde_json::from_str(&place.text("plan.json")).unwrap();
    assert!(plan["main_memory"].is_null() && !ran.stdout.contains("its main memory"), "{}", ran.stdout);
    // On a CPU, a state in files changes nothing but its place.
    let line = "plan --model M --train_file rows.jsonl --reward_funcs random --device cpu --offload_optimizer file --json disk.json";
    let ran = place.run(line).ok();
    let mut disk: Value = serde_json::from_str(&place.text("disk.json")).unwrap();
    let state = plan["parts"]["moments_and_masters"].clone();
    assert!(state.as_u64() > Some(0) && disk["disk"] == state && plan["disk"] == 0, "{disk}");
    assert!(ran.stdout.contains("moments and masters, on a disk"), "{}", ran.stdout);
    disk["parts"]["moments_and_masters"] = state;
    disk["parts"]["program_and_rows"] = plan["parts"]["program_and_rows"].clone();
    assert_eq!(disk["parts"], plan["parts"]);
    let ways = plan["with_other_flags"].as_array().unwrap();
    assert!(
        ways.iter().any(|way| way["flags"].as_str().unwrap().contains("--offload_optimizer file")),
        "{ways:?}"
    );
}

/// A machine with a stand-in for the driver, and with libraries of several versions of CUDA.
struct CudaMachine {
    place: Place,
}

impl CudaMachine {
    fn new() -> Self {
        let this = Self { place: Place::new() };
        this.compile("driver.c", 0, "driver/libcuda.so");
        this
    }

    fn compile(&self, source: &str, major: u32, to: &str) {
        let to = self.place.path(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        let source =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/support").join(source);
        let compiled = std::process::Command::new("g++")
            .args(["-x", "c", "-shared", "-fPIC", &format!("-DMAJOR={major}")])
            .arg(source)
            .arg("-o")
            .arg(to)
            .status();
        assert!(compiled.unwrap().success());
    }

    /// Adds NVRTC and cuBLASLt of a version of CUDA, with this ending of their names.
    fn libraries(&self, major: u32, folder: &str, ending: &str) {
        for name in ["libnvrtc", "libcublasLt"] {
            self.compile("libraries.c", major, &format!("{folder}/{name}{ending}"));
        }
    }

    fn run(&self, line: &str, variables: &[(&str, &str)]) -> crate::support::Ran {
        let mut command = self.place.command(line);
        for name in ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES"] {
            command.env_remove(name);
        }
        command
            .env("LD_LIBRARY_PATH", self.place.path("driver"))
            .envs(variables.iter().copied())
            .env("HOME", self.place.path(""));
        ran(&mut command)
    }

    fn doctor(&self, variables: &[(&str, &str)], parts: &[&str]) {
        let shown = self.run("doctor", variables).ok().stdout;
        for part in parts {
            assert!(shown.contains(part), "`{part}` is not in\n{shown}");
        }
    }
}

/// `libnvrtc.so` on the loader's path often belongs to another version of CUDA than the libraries of Python's packages.
#[test]
fn cuda_libraries_are_those_that_doctor_names() {
    let machine = CudaMachine::new();
    machine.libraries(12, "driver", ".so");
    machine.libraries(13, "home/lib", ".so.13");
    let home = machine.place.path("home").display().to_string();
    let at = |name: &str, major: u32| format!("{name:<16} {major}.4, {home}/lib/{name}.so.{major}");
    let both = |major: u32| [at("libnvrtc", major), at("libcublasLt", major)];
    machine.doctor(&[("CUDA_HOME", &home)], &both(13).each_ref().map(String::as_str));
    // A driver for CUDA 12 needs libraries of CUDA 12.
    let old = [("CUDA_HOME", home.as_str()), ("DRIVER_VERSION", "12080")];
    let too_new =
        "libnvrtc.so.13 is version 13.0, expected at most 12, since the NVIDIA driver supports CUDA 12.8";
    let install = "pip install 'nvidia-cuda-nvrtc-cu12'";
    machine.doctor(&old, &[too_new, install, "none: `--device auto` fails"]);
    machine
        .run("score --model M --input rows.jsonl --output out.jsonl --device cuda", &old)
        .fails(1, &["the GPU cannot be used", too_new, install]);
    machine.libraries(12, "home/lib", ".so.12");
    machine.doctor(&old, &[&both(12)[0], &both(12)[1], "cuda:0, which `--device auto` takes"]);
    // The name of a file is no proof of its version.
    machine.libraries(14, "home/lib", ".so.13");
    machine.doctor(
        &[("CUDA_HOME", &home)],
        &["libcublasLt.so.13 is version 14.4, expected at most 13", "'nvidia-cublas>=13,<14'"],
    );
    // An empty file.
    machine.place.write("home/lib/libnvrtc.so.13", "");
    std::fs::remove_file(machine.place.path("home/lib/libnvrtc.so.12")).unwrap();
    machine
        .doctor(&[("CUDA_HOME", &home)], &["libnvrtc.so.13 cannot be used: ", "install the library again"]);
}

/// Messages about an unusable GPU, with a stand-in for the driver. No other device replaces it.
#[test]
fn gpus_that_cannot_be_used_are_errors() {
    let machine = CudaMachine::new();
    let place = &machine.place;
    let run = |line: &str, variables: &[(&str, &str)]| machine.run(line, variables);
    let doctor = |variables: &[(&str, &str)], parts: &[&str]| machine.doctor(variables, parts);
    let score = "score --model M --input rows.jsonl --output out.jsonl";
    let cuda = |n: &str| format!("{score} --device {n}");
    let cannot = "the GPU cannot be used";
    run(&cuda("cuda:3"), &[("DRIVER_CARDS", "2")])
        .fails(1, &[cannot, "GPU 3 does not exist: the driver reports 2", "CUDA_VISIBLE_DEVICES"]);
    let old = ["the NVIDIA driver supports CUDA 11.8, expected 12.0 or newer", "update the driver"];
    run(&cuda("cuda"), &[("DRIVER_VERSION", "11080")])
        .fails(1, &[&[cannot, "--device cuda:0"], &old[..]].concat());
    run(&cuda("auto"), &[("DRIVER_VERSION", "11080")])
        .fails(1, &[&[cannot, "`--device cpu` needs no GPU"], &old[..]].concat());
    run(&cuda("cuda"), &[("DRIVER_MAJOR", "7")])
        .fails(1, &[cannot, "Stand-in has compute capability 7.0, expected 8.0"]);
    run(&cuda("cuda"), &[("DRIVER_INIT", "999")]).fails(1, &[cannot, "cuInit"]);
    if omnigrpo_gpu::libraries(&[], None).iter().all(|library| library.found.is_err()) {
        run(&cuda("cuda"), &[])
            .fails(1, &[cannot, "libnvrtc was not found", "pip install 'nvidia-cuda-nvrtc>=13,<14'"]);
    }
    // No card: the driver reports it in two ways.
    for none in [("DRIVER_CARDS", "0"), ("DRIVER_INIT", "100")] {
        let ran = run(&cuda("auto"), &[none, ("CUDA_VISIBLE_DEVICES", "7")]);
        assert!(
            ran.stderr.contains("device: cpu (the NVIDIA driver shows no GPU, with CUDA_VISIBLE_DEVICES=7)"),
            "{}",
            ran.stderr
        );
        run(&cuda("cuda:0"), &[none]).fails(1, &[cannot, "GPU 0 does not exist: the driver reports 0"]);
    }
    run(&cuda("gpu"), &[]).fails(2, &["no device has this name", "`gpu`", "`cuda:N`", "--device"]);
    let shown = run(&cuda("auto"), &[("DRIVER_CARDS", "0"), ("CUDA_VISIBLE_DEVICES", "")]).stderr;
    assert!(
        shown.contains("device: cpu (the NVIDIA driver shows no GPU, since CUDA_VISIBLE_DEVICES is empty"),
        "{shown}"
    );
    let fails = "none: `--device auto` fails until the GPU can be used";
    let card = "Stand-in, 151.4 GB, compute capability 7.0";
    doctor(
        &[("DRIVER_CARDS", "2"), ("DRIVER_MAJOR", "7")],
        &["NVIDIA, supports CUDA 13.0", "cuda:1", card, "libcublasLt", fails],
    );
    doctor(&[("DRIVER_VERSION", "11080")], &["supports CUDA 11.8", "update the driver", fails]);
    doctor(&[("DRIVER_INIT", "999")], &["cuInit", fails]);
    doctor(&[("DRIVER_CARDS", "0")], &["shows no GPU", "cpu, which `--device auto` takes"]);
    // The libraries exist, and another program uses the card.
    machine.libraries(13, "driver", ".so.13");
    doctor(&[], &["cuda:0, which `--device auto` takes"]);
    for (code, what) in [("2", "out of memory"), ("46", "busy or unavailable")] {
        run(&cuda("cuda"), &[("DRIVER_OPEN", code)]).fails(
            1,
            &[cannot, "Stand-in cannot be opened", what, "another program uses this GPU (`nvidia-smi`"],
        );
    }
    if omnigrpo_gpu::libraries(&[], None)[0].found.is_err() && omnigrpo_gpu::survey().is_err() {
        // This machine itself.
        let none = "no NVIDIA driver was found (libcuda)";
        place.run(&cuda("cuda")).fails(1, &[cannot, none]);
        // Without a card only `doctor` names the driver.
        let shown = place.run(&cuda("auto")).stderr;
        assert!(shown.contains("device: cpu\n") && !shown.contains("driver"), "{shown}");
        let shown = place.run("doctor").ok().stdout;
        assert!(shown.contains("cpu, which `--device auto` takes"), "{shown}");
        // A machine with a card lacks the driver and the libraries. Another needs none of them.
        let lacks = [none, "libnvrtc was not found", "pip install 'nvidia-cublas>=13,<14'"];
        let is_needless = shown.contains("not needed: no NVIDIA card is found");
        assert!(lacks.iter().all(|part| shown.contains(part) != is_needless), "{shown}");
    }
}

/// `rewards run` scores the rollouts in a run directory again, in the order of its steps.
#[test]
fn rollouts_of_a_run_are_scored_again() {
    let place = Place::new();
    place
        .run(&format!(
            "train --model M --train_file rows.jsonl --output_dir run --reward_funcs random {SMALL}"
        ))
        .ok();
    let ids: Vec<Value> = (1..=2)
        .flat_map(|step| place.lines(&format!("run/rollouts/step-{step:06}.jsonl")))
        .filter(|row| row["sample"] == 0)
        .map(|row| row["id"].clone())
        .collect();
    assert_eq!(ids.len(), 2);
    for input in ["run", "run/rollouts"] {
        place.run(&format!("rewards run --input {input} --output out.jsonl --reward_funcs format")).ok();
        let scored = place.lines("out.jsonl");
        assert_eq!(scored.iter().map(|row| row["id"].clone()).collect::<Vec<_>>(), ids, "{input}");
        for row in scored {
            assert_eq!(numbers(&row["rewards"]["format"]).len(), 2, "{row}");
        }
    }
    std::fs::create_dir(place.path("empty")).unwrap();
    place
        .run("rewards run --input empty --output none.jsonl --reward_funcs format")
        .fails(1, &["the directory has no rollouts", "empty", "rollouts/step-N.jsonl"]);

    let card = place.text("run/README.md");
    for part in [
        "Trained on 1 thread of ",
        "; the steps took ",
        "omnigrpo train \\\n",
        "--train_file rows.jsonl",
        "| lr_scheduler_type | `linear` |",
        "| epsilon | `0.2` |",
        "| seed | `42` |",
    ] {
        assert!(card.contains(part), "{part} is not in\n{card}");
    }
    assert!(!card.contains("Clip {") && !card.contains(&*place.path("").to_string_lossy()), "{card}");
}

/// One question finds a judge that is not served, and a reward that goes away ends the command after three rows.
#[test]
fn a_reward_that_gives_no_answer_ends_the_command() {
    let place = Place::new();
    let row = |id: usize| json!({"id": id, "prompt": "2+3?", "completions": ["5"]}).to_string() + "\n";
    place.write("said.jsonl", (0..40).map(row).collect::<String>());
    let run = |funcs: &str| {
        place.run(&format!(
            "rewards run --input said.jsonl --output out.jsonl --reward_timeout_secs 5 --reward_funcs {funcs}"
        ))
    };
    let refused = run("judge:http://127.0.0.1:1/v1")
        .fails(1, &["judge", "the reward had to score the completions of one row"]);
    assert!(refused.stderr.lines().count() < 12, "{}", refused.stderr);
    // It answers the trial and ends; each process after it ends before its first answer.
    place.write(
        "once.sh",
        "if [ -e asked ]; then echo gone >&2; exit 3; fi\ntouch asked\nread line\necho '{\"id\":0,\"rewards\":[1]}'\n",
    );
    let script = place.path("once.sh").display().to_string();
    place.write("asker", format!("#!/bin/sh\n. {script}\n"));
    std::fs::set_permissions(place.path("asker"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let gone = run("cmd:./asker")
        .fails(1, &["3 consecutive rows failed in the same way", "`asker`", "no more rows are scored"]);
    assert!(gone.stderr.lines().count() < 30, "{}", gone.stderr);
    assert!(!place.exists("out.jsonl"));
}

/// The console states the default temperature, a batch of one completion, and rows by their number.
#[test]
fn the_console_says_what_is_not_obvious() {
    let place = Place::new();
    let line = "generate --model M --prompt Hm? --max_completion_length 2 --threads 1";
    let shown = place.run(line).ok().stderr;
    assert!(
        shown.contains("sampling at temperature 1; `--temperature 0` always takes the most likely token"),
        "{shown}"
    );
    assert!(!place.run(&format!("{line} --temperature 1")).ok().stderr.contains("sampling at"));

    let shown = place.run("data check --model M --train_file rows.jsonl").ok().stdout;
    assert!(shown.contains("(--row 0, id shapes)") && !shown.contains("count from"), "{shown}");
    let train = "train --model M --train_file rows.jsonl --reward_funcs random --max_steps 1 --max_completion_length 2 --threads 1";
    let shown = place
        .run(&format!("{train} --output_dir one --num_generations 1 --gradient_accumulation_steps 2"))
        .ok()
        .stderr;
    assert!(shown.contains("a step takes 2 prompts of 1 completion: 2 answers of at most "), "{shown}");
    assert!(shown.contains("device: cpu"), "{shown}");

    // Settings about sound need a family that takes it.
    for flags in ["--use_audio_in_video true", "--missing_audio silence", "--audio_folders sounds"] {
        let name = flags.split(' ').next().unwrap().trim_start_matches("--");
        place
            .run(&format!("{train} --output_dir two {flags}"))
            .fails(2, &[&format!("`{name}` has no effect on qwen2_5_vl"), "takes no sound"]);
    }
    place
        .run(&format!("{train} --output_dir two --tune_gate true"))
        .fails(1, &["--tune_gate", "the projector of this family has no gate"]);
    let shown = place.run(&format!("{train} --output_dir two --device cpu --offload_optimizer true"));
    shown.fails(2, &["`offload_optimizer` has no effect", "`device` is cpu"]);
}

/// Metrics of a run, one list for each step.
fn of_steps(place: &Place, run: &str, name: &str) -> Vec<f64> {
    let lines = place.lines(&format!("{run}/metrics.jsonl"));
    lines.iter().filter_map(|line| line.get(name)?.as_f64()).collect()
}

/// A reference of its own in another directory, which computes its own features of pictures, changes no bit if it has the weights of the
/// model. Another one does, and its content belongs to the run.
#[test]
fn a_reference_of_its_own_is_that_of_the_kl_term() {
    let place = Place::new();
    place.copied_checkpoint("copy");
    place.checkpoint("other", |header, data| {
        let [from, to] = ["model.norm.weight", "lm_head.weight"]
            .iter()
            .find_map(|name| {
                header.get(*name).map(|t| [0, 1].map(|at| t["data_offsets"][at].as_u64().unwrap() as usize))
            })
            .unwrap();
        data[from..to].chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&0.5_f32.to_le_bytes()));
    });
    let line = "train --model M --threads 1 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 4 \
                --train_file rows.jsonl --reward_funcs random --learning_rate 1e-2 --save_steps 1 --max_pixels 12544";
    let run = |dir: &str, more: &str| place.run(&format!("{line} --output_dir {dir} {more}"));
    let two = |dir: &str, more: &str| run(dir, &format!("--beta 0.5 --max_steps 2 {more}")).ok();
    two("plain", "");
    let told = two("same", "--ref_model_name_or_path copy").stderr;
    assert!(told.contains("reference copy (qwen2_5_vl)"), "{told}");
    assert!(place.bytes("plain/model.safetensors") == place.bytes("same/model.safetensors"));
    two("differs", "--ref_model_name_or_path other");
    assert!(place.bytes("plain/model.safetensors") != place.bytes("differs/model.safetensors"));
    assert!(of_steps(&place, "differs", "kl")[0] > 1e-3 && of_steps(&place, "plain", "kl")[0].abs() < 1e-9);
    // A run resumes with the same reference alone.
    std::fs::remove_dir_all(place.path("copy")).unwrap();
    std::fs::rename(place.path("other"), place.path("copy")).unwrap();
    run("same", "--beta 0.5 --ref_model_name_or_path copy --max_steps 3")
        .fails(1, &["weights of the reference"]);

    run("x", "--beta 0 --ref_model_name_or_path copy").fails(2, &["ref_model_name_or_path", "`beta` is 0"]);
    run("x", "--beta 0.5 --sync_ref_model true --ref_model_name_or_path copy").fails(2, &["stays as it is"]);
    let text = golden("checkpoints/qwen2").display().to_string();
    run("x", &format!("--beta 0.5 --ref_model_name_or_path {text}"))
        .fails(2, &["of another family", "qwen2", "qwen2_5_vl"]);
}

/// A teacher of another family with the same tokens trains alone, and the policy comes nearer to it. A model with other tokens cannot teach.
#[test]
fn a_teacher_scores_every_token() {
    let place = Place::new();
    let model = |name: &str| golden("checkpoints").join(name).display().to_string();
    place.write(
        "few.jsonl",
        "{\"id\": \"sum\", \"problem\": \"What is 2+3?\", \"solution\": \"<answer>5</answer>\"}\n".repeat(4),
    );
    let line = format!(
        "--model_name_or_path {} --threads 1 --num_generations 16 --gradient_accumulation_steps 2 --max_completion_length 8 --train_file few.jsonl \
         --reward_funcs random --learning_rate 1e-2 --num_train_epochs 99",
        model("qwen2")
    );
    let teacher = model("qwen3");
    let run = |dir: &str, more: &str| place.run(&format!("train {line} --output_dir {dir} {more}"));
    let told =
        run("alone", &format!("--teacher_model_name_or_path {teacher} --reward_weights 0 --max_steps 60"))
            .ok()
            .stderr;
    assert!(told.contains(&format!("teacher {teacher} (qwen3)")), "{told}");
    let kl = of_steps(&place, "alone", "kl");
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    assert!(mean(&kl[50..]) < 0.6 * mean(&kl[..10]), "KL to the teacher by step: {kl:?}");
    // A policy that is its own teacher, without rewards, has nothing to learn in its first update.
    let own = model("qwen2");
    run("own", &format!("--teacher_model_name_or_path {own} --reward_weights 0 --max_steps 1")).ok();
    assert!(of_steps(&place, "own", "grad_norm")[0] < 1e-6);
    // The teacher is a part of the forecast, and smaller in 8 bits.
    let bytes = |more: &str| {
        place.run(&format!("plan {line} --json plan.json {more}")).ok();
        let plan: Value = serde_json::from_str(&place.text("plan.json")).unwrap();
        let found = plan.pointer("/parts/reference").and_then(Value::as_u64);
        found.unwrap_or_else(|| panic!("{plan:#}"))
    };
    let whole = bytes(&format!("--teacher_model_name_or_path {teacher}"));
    assert!(whole > bytes(&format!("--teacher_model_name_or_path {teacher} --ref_load_in_8bit true")));

    let swapped = place.path("swapped");
    std::fs::create_dir(&swapped).unwrap();
    for entry in std::fs::read_dir(&teacher).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, swapped.join(file.file_name().unwrap())).unwrap();
    }
    let tokens = place.text("swapped/tokenizer.json");
    let mut changed: Value = serde_json::from_str(&tokens).unwrap();
    let vocabulary = changed.pointer_mut("/model/vocab").and_then(Value::as_object_mut).unwrap();
    let (a, b) = (vocabulary["a"].clone(), vocabulary["b"].clone());
    (vocabulary["a"], vocabulary["b"]) = (b, a);
    place.write("swapped/tokenizer.json", changed.to_string());
    let refused = |more: &str, parts: &[&str]| drop(run("x", more).fails(2, parts));
    refused(
        "--teacher_model_name_or_path swapped",
        &["has other tokens than the policy", "\"b\" with the number", "\"a\""],
    );
    refused(
        &format!("--teacher_model_name_or_path {teacher} --ref_load_in_8bit true --ref_load_in_4bit true"),
        &["`ref_load_in_8bit` and `ref_load_in_4bit` both true"],
    );
    refused("--teacher_coef 2", &["teacher_coef", "there is no teacher"]);
    refused(
        &format!("--teacher_model_name_or_path {teacher} --beta 0.1"),
        &["two more models", "`beta` 0.1"],
    );
    refused(
        &format!("--teacher_model_name_or_path {teacher} --loss_type gmpo"),
        &["teacher_coef", "one advantage per completion"],
    );
}

/// A policy that reads the solution teaches itself, by each divergence. Its rows need the column, and evaluations do not.
#[test]
fn a_policy_teaches_itself_with_more_in_its_prompt() {
    let place = Place::new();
    let row = |id: usize, hint: &str| json!({ "id": format!("sum-{id}"), "problem": format!("What is {id}+3?"), "hint": hint, "solution": "5" });
    place.write("rows.jsonl", (0..4).map(|id| format!("{}\n", row(id, "It is 5."))).collect::<String>());
    place.write("held.jsonl", "{\"problem\": \"What is 1+1?\", \"solution\": \"2\"}\n");
    let model = golden("checkpoints").join("qwen2");
    let line = format!(
        "--model_name_or_path {} --threads 1 --num_generations 4 --gradient_accumulation_steps 2 --max_completion_length 8 \
         --train_file rows.jsonl --reward_funcs random --reward_weights 0 --max_steps 2",
        model.display()
    );
    let run = |dir: &str, more: &str| place.run(&format!("train {line} --output_dir {dir} {more}"));
    let told = run("own", "--teacher_prompt_column hint --eval_file held.jsonl").ok().stderr;
    assert!(told.contains("teacher: the policy itself, which also reads the column `hint`"), "{told}");
    assert!(of_steps(&place, "own", "kl")[0] > 0.0 && of_steps(&place, "own", "grad_norm")[0] > 0.0);
    for more in [
        "--teacher_divergence forward_kl --teacher_prompt_column solution",
        "--teacher_divergence jsd --teacher_beta 0.9 --teacher_top_k 4 --teacher_prompt_column hint",
        "--teacher_top_k 4 --teacher_prompt_column hint --teacher_prompt_template {prompt}({privileged_context})",
        "--teacher_divergence jsd --teacher_prompt_column hint --sync_ref_model true",
    ] {
        let dir = format!("by-{}", more.len());
        run(&dir, more).ok();
        let [divergence, norm] = ["teacher_divergence", "grad_norm"].map(|name| of_steps(&place, &dir, name));
        assert!(divergence[0] > 0.0 && norm[0] > 0.0, "{more}: {divergence:?} {norm:?}");
    }
    // The plan counts the teacher's tokens, and no weights.
    let parts = |more: &str| {
        place.run(&format!("plan {line} --teacher_prompt_column hint --json plan.json {more}")).ok();
        let plan: Value = serde_json::from_str(&place.text("plan.json")).unwrap();
        ["tokens_of_the_teacher", "reference"].map(|part| plan["parts"][part].as_u64().unwrap_or(0))
    };
    assert_eq!(parts(""), [0, 0]);
    // Two prompts with 4 completions of 8 tokens: 8 bytes for a rollout, and 48 for a stream.
    assert_eq!(parts("--teacher_top_k 10"), [10 * 2 * 4 * 8 * (8 + 48), 0]);

    let refused = |code: i32, more: &str, parts: &[&str]| drop(run("x", more).fails(code, parts));
    refused(
        1,
        "--teacher_prompt_column advice",
        &["reads the column `advice`", "the row has no value in it"],
    );
    refused(
        2,
        "--teacher_prompt_column hint --teacher_prompt_template hint:{privileged_context}",
        &["teacher_prompt_template", "begins with `{prompt}`"],
    );
    refused(
        2,
        "--teacher_prompt_template {prompt}{privileged_context}x",
        &["`teacher_prompt_column` is not given"],
    );
    refused(2, "--teacher_prompt_column hint --beta 0.1", &["two more models", "`beta` 0.1"]);
    refused(2, "--teacher_prompt_column hint --reference_device cpu", &["the policy is its own teacher"]);
    refused(2, "--teacher_top_k 5", &["there is no teacher"]);
    refused(2, "--teacher_prompt_column hint --teacher_beta 0.2", &["`teacher_divergence` is not jsd"]);
    refused(
        2,
        "--teacher_prompt_column hint --teacher_divergence jsd --teacher_top_k 0",
        &["`teacher_top_k`", "at least 1 token"],
    );
}

/// Rewards are tried before a run: on the solution itself and on texts that are wrong, on samples of a model, and on recorded completions.
#[test]
fn rewards_are_tried_before_a_run() {
    let place = Place::new();
    let rows = [("a", "What is 2+3?", "<answer>5</answer>"), ("b", "What is 2+5?", "<answer>7</answer>")]
        .map(|(id, problem, solution)| json!({ "id": id, "problem": problem, "solution": solution }));
    place.write("two.jsonl", rows.clone().map(|row| format!("{row}\n")).concat());
    let made_up = place.run("rewards try accuracy format --train_file two.jsonl --num_rows 1").ok().stdout;
    let want = [
        "row a: What is 2+3?",
        "accuracy 1, format 1, total 2  the solution in tags: <think></think><answer>5</answer>",
        "accuracy 1, format 0, total 1  the solution alone: 5",
        "accuracy 0, format 0, total 0  an empty text:",
        "accuracy 0, format 1, total 1  the solution of another row: <think></think><answer>7</answer>",
        "accuracy: from 0 to 1 over 4 completions; 1 of 1 rows vary",
    ];
    for line in want {
        assert!(made_up.contains(line), "{line}\n{made_up}");
    }
    assert!(!made_up.contains("row b"), "{made_up}");

    let model = golden("checkpoints/qwen2").display().to_string();
    let line = format!(
        "rewards try accuracy --train_file two.jsonl --model_name_or_path {model} --max_completion_length 4"
    );
    let sampled = place.run(&line).ok().stdout;
    assert_eq!(sampled.lines().filter(|line| line.starts_with("  accuracy 0  ")).count(), 16, "{sampled}");
    assert!(
        sampled.contains("accuracy: 0 for all 16 completions. Training learns nothing from equal rewards"),
        "{sampled}"
    );

    let mut recorded = rows[0].clone();
    recorded["completions"] = json!([{ "text": "<answer>5</answer>" }, { "text": "6" }]);
    place.write("recorded.jsonl", recorded.to_string());
    let scored = place.run("rewards try accuracy --input recorded.jsonl").ok().stdout;
    assert!(scored.contains("  accuracy 1  <answer>5</answer>\n  accuracy 0  6\n"), "{scored}");
    place.run("rewards try accuracy").fails(2, &["no rows to try the rewards on", "--train_file rows.jsonl"]);
}

/// A newcomer types these first: nothing, a topic, and the settings of the demo.
#[test]
fn help_answers_without_a_command_and_for_topics() {
    let place = Place::new();
    let none = place.run("").ok();
    assert!(none.stdout.contains("Usage: omnigrpo") && none.stdout.contains("  train "), "{}", none.stdout);
    let group = place.run("data").ok();
    assert!(group.stdout.contains("convert") && group.stdout.contains("check"), "{}", group.stdout);
    let topic = place.run("help lora").ok().stdout;
    for part in ["Settings about `lora`:", "--lora_r ", "--use_peft "] {
        assert!(topic.contains(part), "{part}: {topic}");
    }
    assert!(place.run("help host").ok().stdout.starts_with("--host TEXT\n"));
    place.run("help zzzzz").fails(2, &["no command and no setting is named `zzzzz`"]);
    let script = place.run("completions bash").ok().stdout;
    assert!(script.contains("entropy_coef"));
    assert!(place.run("completions zsh").ok().stdout.contains("entropy_coef"));

    let printed = place.run("demo --print_config --max_steps 7").ok().stdout;
    let value = |name: &str| {
        let line = printed.lines().find_map(|line| line.strip_prefix(&format!("{name}: "))).unwrap();
        line.split(" # ").next().unwrap().trim().to_owned()
    };
    for (name, expected) in [
        ("learning_rate", "0.0003"),
        ("max_steps", "7"),
        ("beta", "0.01"),
        ("seed", "1"),
        ("lr_scheduler_type", "constant_with_warmup"),
    ] {
        assert_eq!(value(name), expected, "{printed}");
    }
    let help = place.run("demo --help").ok().stdout;
    assert!(help.contains("[default: 0.0003]") && !help.contains("[default: 1e-6]"), "{help}");
}

#[test]
fn a_push_is_shown_before_it_is_sent() {
    let place = Place::new();
    place.copied_checkpoint("mine");
    place.write("mine/README.md", "---\nlicense: mit\n---\n# Mine\n");
    place.write("mine/secret.txt", "no");
    // There is no hub at this address.
    let mut command = place.command("push mine --dry_run --hub_private_repo --hub_model_id me/mine");
    let shown = ran(command.env("HF_ENDPOINT", "http://127.0.0.1:9")).ok().stdout;
    for part in
        ["private repository: me/mine", "  config.json\n", "  model.safetensors\n", "README.md:", "# Mine"]
    {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(!shown.contains("secret"), "{shown}");
    let mut command = place.command("push mine --dry_run --hub_model_id a/b/c");
    ran(command.env("HF_ENDPOINT", "http://127.0.0.1:9")).fails(2, &["wrong name for a repository"]);
}

#[test]
fn a_run_ends_with_the_next_commands() {
    let place = Place::new();
    let line = format!("train --model M --train_file rows.jsonl --reward_funcs random {SMALL}");
    let whole = place.run(&format!("{line} --output_dir whole")).ok().stdout;
    let expected = "\nomnigrpo watch whole\nomnigrpo generate --model_name_or_path whole --prompt TEXT\nomnigrpo serve whole\n";
    assert!(whole.ends_with(expected), "{whole}");
    let adapter = place.run(&format!("{line} --use_peft --lora_r 2 --output_dir adapter")).ok().stdout;
    let served = adapter.lines().last().unwrap();
    assert!(
        served.starts_with("omnigrpo serve ") && served.ends_with(" --adapter_name_or_path adapter"),
        "{served}"
    );
}
