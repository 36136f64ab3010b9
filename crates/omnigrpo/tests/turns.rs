//! `--environment` from the command line: training, evaluation and generation, with what they record.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod support;

use serde_json::{Value, json};
use support::Place;

/// A program that answers every turn with the picture of the row, or a word.
const PROGRAM: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request["id"]}
    if request.get("probe"):
        answer["answers_text"] = True
    else:
        media = [path for path in request["media"] if path.endswith(".png")]
        answer["answer"] = [{"type": "image", "image": media[0]}] if media else "look"
    print(json.dumps(answer), flush=True)
"#;

/// Nearly uniform draws end some turns of a random model.
const SAMPLED: &str =
    "--threads 1 --temperature 8 --logprob_temperature 1 --max_completion_length 160 --max_turns 2";

fn place() -> Place {
    let place = Place::new();
    place.write("environment.py", PROGRAM);
    place
}

const ENVIRONMENT: [&str; 2] = ["--environment", "cmd:python3 environment.py"];

fn turns(row: &Value) -> Vec<Value> {
    row["turns"].as_array().cloned().unwrap_or_default()
}

#[test]
fn a_program_answers_in_training_generation_and_evaluation() {
    let place = place();
    for (run, more) in [
        ("plain", ""),
        ("lora", "--use_peft --lora_r 2"),
        ("few_bits", "--use_peft --lora_r 2 --load_in_4bit"),
        ("resampled", "--max_resample_times 1 --num_iterations 2"),
        ("emulated", "--device emulated"),
    ] {
        let line = format!(
            "train --model M {SAMPLED} --num_generations 6 --gradient_accumulation_steps 1 --train_file rows.jsonl --reward_funcs random --save_steps 1 \
             --max_steps 2 --output_dir {run} {more}"
        );
        place.run_with(&line, &ENVIRONMENT).ok();
        let metrics = place.lines(&format!("{run}/metrics.jsonl"));
        let number = |name: &str| metrics[0][name].as_f64().unwrap();
        // A rollout rounds activations to bytes before it multiplies them with weights of few bits, and the update does not.
        let most = if run == "few_bits" { 0.5 } else { 2e-4 };
        assert!(number("sampling/sampling_logp_difference/max") <= most, "{run}: {}", metrics[0]);
        assert_eq!(number("tools/failure_frequency"), 0.0);
        let folder = format!("{run}/rollouts");
        let files = place.names(&folder);
        let rollouts: Vec<Value> =
            files.iter().flat_map(|name| place.lines(&format!("{folder}/{name}"))).collect();
        let added: Vec<Value> = rollouts.iter().flat_map(turns).collect();
        assert!(!added.is_empty(), "{run}: no turn ended");
        assert!(added.iter().all(|turn| turn["tokens"].as_u64() > Some(3)), "{added:?}");
        for path in added.iter().flat_map(|turn| turn["media"].as_array().cloned().unwrap_or_default()) {
            // Copies, named by their content, in the run directory.
            let path = path.as_str().unwrap();
            assert!(
                path.contains(&format!("{run}/media/")) && std::path::Path::new(path).is_file(),
                "{path}"
            );
        }
        // The file of settings names the environment, and the run resumes.
        assert!(place.text(&format!("{run}/config.yaml")).contains("cmd:python3 environment.py"));
        let resumed = place.run_with(&line.replace("--max_steps 2", "--max_steps 3"), &ENVIRONMENT).ok();
        assert!(resumed.stderr.contains("resuming from"), "{}", resumed.stderr);
    }
    let generate =
        format!("generate --model M {SAMPLED} --num_generations 12 --input rows.jsonl --output out.jsonl");
    place.run_with(&generate, &ENVIRONMENT).ok();
    let rows = place.lines("out.jsonl");
    let completions: Vec<&Value> =
        rows.iter().flat_map(|row| row["completions"].as_array().unwrap()).collect();
    let with: Vec<&&Value> = completions.iter().filter(|c| !turns(c).is_empty()).collect();
    assert!(!with.is_empty());
    for completion in with {
        let added: u64 = turns(completion).iter().map(|turn| turn["tokens"].as_u64().unwrap()).sum();
        let (ids, numbers) = (&completion["completion_ids"], &completion["logprobs"]);
        assert_eq!(ids.as_array().unwrap().len() as u64, added + numbers.as_array().unwrap().len() as u64);
    }
    let eval =
        format!("eval --model M {SAMPLED} --num_generations 2 --reward_funcs random --eval_file rows.jsonl");
    place.run_with(&eval, &ENVIRONMENT).ok();
}

/// The prompt describes the tool, and the run does not need a program.
#[test]
fn zoom_is_described_in_the_prompt() {
    let place = place();
    // The description is long in the characters of a tiny tokenizer.
    place.copied_checkpoint("model");
    let mut config: Value = serde_json::from_str(&place.text("model/config.json")).unwrap();
    config["max_position_embeddings"] = json!(8192);
    place.write("model/config.json", config.to_string());
    let line = "train --model model --threads 1 --max_completion_length 4 --num_generations 2 --gradient_accumulation_steps 1 \
                --train_file rows.jsonl --reward_funcs random --max_steps 1 --output_dir run --environment zoom:1000";
    place.run(line).ok();
    let prompt = place.lines("run/rollouts/step-000001.jsonl")[0]["prompt"].as_str().unwrap().to_owned();
    assert!(prompt.contains("# Tools") && prompt.contains("\"image_zoom_in_tool\""), "{prompt}");
    assert!(prompt.contains("thousandths of the picture's width and height"), "{prompt}");
    assert_eq!(place.lines("run/metrics.jsonl")[0]["tools/call_frequency"], json!(0.0));
}

#[test]
fn wrong_environments_are_refused() {
    let place = place();
    let line = "train --model M --train_file rows.jsonl --output_dir run --environment";
    place
        .run(&format!("{line} zom"))
        .fails(2, &["unknown environment `zom`", "expected zoom", "--environment"]);
    place.run_with(line, &["cmd:python3 missing.py"]).fails(2, &["the first request", "the program ended"]);
    place
        .run("train --model M --train_file rows.jsonl --output_dir run --max_turns 3")
        .fails(2, &["there is no `environment`"]);
    place.write(
        "broken.py",
        PROGRAM.replace("answer[\"answer\"] =", "answer[\"fault\"] = \"gone\"\n        _ ="),
    );
    let line = format!(
        "train --model M {SAMPLED} --num_generations 6 --gradient_accumulation_steps 1 --train_file rows.jsonl --reward_funcs random --max_steps 2 \
         --output_dir run"
    );
    place
        .run_with(&line, &["--environment", "cmd:python3 broken.py"])
        .fails(1, &["it reports: gone", "of row"]);
}
