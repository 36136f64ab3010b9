//! `--environment` from the command line: training, evaluation and generation, with what they record.

use crate::support::{Place, golden};
use serde_json::{Value, json};

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

/// Gives all completions of two of the three rows the same reward.
const FLAT: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    rewards = [sum(row["completion_ids"]) % 97 if "5" in row["solution"] else 0 for row in request["rows"]]
    print(json.dumps({"id": request["id"], "rewards": rewards}), flush=True)
"#;

fn place() -> Place {
    let place = Place::new();
    place.write("environment.py", PROGRAM);
    place
}

const ENVIRONMENT: [&str; 2] = ["--environment", "cmd:python3 environment.py"];

fn turns(row: &Value) -> Vec<Value> {
    row["turns"].as_array().cloned().unwrap_or_default()
}

/// Trains with a program that answers, and resumes. A run has a name and settings of its own.
fn a_program_answers_in(runs: &[(&str, &str)]) {
    let place = place();
    place.write("flat.py", FLAT);
    place.write("text.jsonl", r#"{"question": "What is 2+3?", "answer": "5"}"#);
    place.write(
        "heard.jsonl",
        r#"{"image": "shapes.png", "audio": "rise.wav", "problem": "<image><audio>Which shape?", "solution": "a square"}"#,
    );
    for &(run, more) in runs {
        let published = |name: &str| golden("checkpoints").join(name).display().to_string();
        let (model, rows) = match run {
            "text" => (published("qwen3"), "text.jsonl"),
            "heard" => (published("omni"), "heard.jsonl"),
            _ => ("M".to_owned(), "rows.jsonl"),
        };
        let line = format!(
            "train --model {model} {SAMPLED} --num_generations 6 --gradient_accumulation_steps 1 --train_file {rows} --save_steps 1 \
             --max_steps 2 --output_dir {run} {more}"
        );
        let reward = if run == "resampled" { "cmd:python3 flat.py" } else { "random" };
        let options = [&ENVIRONMENT[..], &["--reward_funcs", reward]].concat();
        place.run_with(&line, &options).ok();
        let metrics = place.lines(&format!("{run}/metrics.jsonl"));
        let number = |name: &str| metrics[0][name].as_f64().unwrap();
        let dropped = metrics.iter().filter_map(|line| line["sampling/resampled_prompts"].as_f64());
        assert_eq!(dropped.sum::<f64>() > 0.0, run == "resampled", "{run}");
        // Turns add nothing to the difference between sampling and training. In few bits and in adapters after an update, a rollout
        // rounds more than the update does.
        let difference = |metrics: &[Value], what: &str| {
            let name = format!("sampling/sampling_logp_difference/{what}");
            metrics.iter().filter_map(|line| line[&name].as_f64()).fold(0.0, f64::max)
        };
        let with_turns: Vec<Value> =
            metrics.iter().filter(|line| line["turns/mean"].as_f64() > Some(1.0)).cloned().collect();
        assert!(!with_turns.is_empty(), "{run}: no step has turns");
        let most = if more.contains("lora") {
            let single = line.replace(&format!("_dir {run}"), &format!("_dir {run}_single"));
            place.run_with(&single.replace("--max_turns 2", ""), &options[2..]).ok();
            difference(&place.lines(&format!("{run}_single/metrics.jsonl")), "mean")
        } else {
            2e-6
        };
        assert!(difference(&with_turns, "mean") <= 2.0 * most, "{run}: {with_turns:?}");
        assert!(difference(&with_turns, "max") <= 20.0 * most, "{run}: {with_turns:?}");
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
        let resumed = place.run_with(&line.replace("--max_steps 2", "--max_steps 3"), &options).ok();
        assert!(resumed.stderr.contains("resuming from"), "{}", resumed.stderr);
    }
}

#[test]
fn a_program_answers_in_training() {
    a_program_answers_in(&[("plain", ""), ("emulated", "--device emulated"), ("text", ""), ("heard", "")]);
}

#[test]
fn a_program_answers_with_adapters_and_resampled_prompts() {
    a_program_answers_in(&[
        ("lora", "--use_peft --lora_r 2"),
        ("few_bits", "--use_peft --lora_r 2 --load_in_4bit"),
        ("resampled", "--max_resample_times 16 --num_iterations 2"),
    ]);
}

#[test]
fn a_program_answers_in_generation_and_evaluation() {
    let place = place();
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

/// Encodes in a reward how many turns it was given and how many tokens were sampled.
const REWARD: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    answers = [[row["added_turns"], len(row["turns"]), len(row["completion_ids"])] for row in request["rows"]]
    print(json.dumps({"id": request["id"], "rewards": [100 * a + 10 * b + 0.001 * c for a, b, c in answers]}), flush=True)
"#;

fn all_turns(row: &Value) -> Vec<Value> {
    row["completions"].as_array().unwrap().iter().flat_map(turns).collect()
}

fn floats(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// `score`, `rewards run`, `sft` and `train --replay` read conversations that `generate`, `eval` and `train` have written.
#[test]
fn recorded_conversations_are_read_back() {
    let place = place();
    place.write("reward.py", REWARD);
    let generate =
        format!("generate --model M {SAMPLED} --num_generations 6 --input rows.jsonl --output made.jsonl");
    place.run_with(&generate, &ENVIRONMENT).ok();
    let made = place.lines("made.jsonl");
    assert!(made.iter().any(|row| !all_turns(row).is_empty()), "no turn ended");

    // The log-probabilities are those of sampling.
    place.run("score --model M --input made.jsonl --output scored.jsonl").ok();
    let scored = place.lines("scored.jsonl");
    for (made, scored) in made.iter().zip(&scored) {
        assert_eq!(all_turns(made), all_turns(scored));
        for (a, b) in
            made["completions"].as_array().unwrap().iter().zip(scored["completions"].as_array().unwrap())
        {
            assert_eq!((&a["text"], &a["completion_ids"]), (&b["text"], &b["completion_ids"]));
            let (a, b) = (floats(&a["logprobs"]), floats(&b["logprobs"]));
            assert_eq!(a.len(), b.len());
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 2e-4), "{a:?} {b:?}");
        }
    }

    // Rewards get the conversation and the sampled tokens.
    let run = "rewards run --input made.jsonl --output judged.jsonl --reward_funcs";
    place.run_with(run, &["cmd:python3 reward.py"]).ok();
    for row in place.lines("judged.jsonl") {
        let rewards = floats(&row["reward"]);
        for (completion, reward) in row["completions"].as_array().unwrap().iter().zip(rewards) {
            let (added, sampled) =
                (turns(completion).len(), completion["logprobs"].as_array().unwrap().len());
            let expected = 200.0 * added as f64 + 10.0 * (1 + 2 * added) as f64 + 0.001 * sampled as f64;
            assert!((reward - expected).abs() < 1e-9, "{reward} {expected}");
        }
    }

    // A replay trains on the sampled tokens with their log-probabilities.
    let replay = "train --model M --threads 1 --replay judged.jsonl --num_generations 6 --temperature 1 \
                  --per_device_train_batch_size 3 --gradient_accumulation_steps 1 --max_steps 1 --output_dir replayed";
    place.run(replay).ok();
    let metrics = &place.lines("replayed/metrics.jsonl")[0];
    let sampled = |row: &Value| -> usize {
        let each = row["completions"].as_array().unwrap().iter();
        each.map(|completion| completion["logprobs"].as_array().unwrap().len()).sum()
    };
    let mean = made.iter().map(sampled).sum::<usize>() as f64 / 18.0;
    assert!((metrics["completions/mean_length"].as_f64().unwrap() - mean).abs() < 1e-6, "{metrics}");
    assert!(metrics["grad_norm"].as_f64().unwrap() > 0.0);
    let again: Vec<Value> = place.lines("replayed/rollouts/step-000001.jsonl");
    assert_eq!(
        again.iter().flat_map(turns).collect::<Vec<_>>(),
        made.iter().flat_map(all_turns).collect::<Vec<_>>()
    );
    // A log of a run has texts, which are tokenised again.
    let log = replay.replace("--replay judged.jsonl", "--replay replayed/rollouts/step-000001.jsonl");
    place.run(&log.replace("--output_dir replayed", "--output_dir logged")).ok();
    let logged = place.lines("logged/rollouts/step-000001.jsonl");
    let texts = |lines: &[Value]| -> Vec<String> {
        lines
            .iter()
            .flat_map(turns)
            .map(|turn| format!("{}{}{}", turn["model"], turn["text"], turn["media"]))
            .collect()
    };
    assert_eq!(texts(&logged), texts(&again));

    // The best completions become rows for supervised training: turns of the model, and turns of the tool in between.
    let keep = "rewards run --input made.jsonl --output best.jsonl --keep best --reward_funcs";
    place.run_with(keep, &["cmd:python3 reward.py"]).ok();
    let best = place.lines("best.jsonl");
    let roles: Vec<&str> =
        best[0]["completion"].as_array().unwrap().iter().map(|turn| turn["role"].as_str().unwrap()).collect();
    assert!(roles.starts_with(&["assistant", "tool", "assistant"]), "{roles:?}");
    let picture = best[0]["completion"][1]["content"][0]["image"].as_str().unwrap();
    assert!(picture.ends_with(".png"), "{picture}");
    place
        .run(
            "sft --model M --threads 1 --train_file best.jsonl --per_device_train_batch_size 3 --gradient_accumulation_steps 1 \
             --max_steps 1 --output_dir tuned",
        )
        .ok();
    // All rows are read, with the answers of the environment.
    let tokens = place.lines("tuned/metrics.jsonl")[0]["num_tokens"].as_f64().unwrap();
    let prompts: f64 = made.iter().map(|row| row["prompt_tokens"].as_f64().unwrap()).sum();
    let added: f64 = best
        .iter()
        .zip(&made)
        .map(|(best, made)| {
            let texts = |completion: &Value| match best["completion"].as_array() {
                Some(messages) => completion["text"] == messages[messages.len() - 1]["content"],
                None => completion["text"] == best["completion"],
            };
            let kept =
                made["completions"].as_array().unwrap().iter().find(|completion| texts(completion)).unwrap();
            turns(kept).iter().map(|turn| turn["tokens"].as_f64().unwrap()).sum::<f64>()
        })
        .sum();
    assert!(tokens > prompts + added, "{tokens} {prompts} {added}");
}

/// The output of `eval` has the turns in the form of a rollout log.
#[test]
fn evaluations_write_their_turns() {
    let place = place();
    let eval = format!(
        "eval --model M {SAMPLED} --num_generations 6 --reward_funcs random --eval_file rows.jsonl --output eval.jsonl"
    );
    place.run_with(&eval, &ENVIRONMENT).ok();
    let rows = place.lines("eval.jsonl");
    let added: Vec<&Value> = rows
        .iter()
        .filter_map(|row| row["completion_turns"].as_array())
        .inspect(|turns| assert_eq!(turns.len(), 6))
        .flatten()
        .flat_map(|turns| turns.as_array().unwrap())
        .collect();
    assert!(!added.is_empty(), "no turn ended");
    assert!(
        added.iter().all(|turn| turn["model_tokens"].as_u64() > Some(0) && turn["tokens"].as_u64() > Some(3))
    );
    // Other commands read them.
    place.run("score --model M --input eval.jsonl --output scored.jsonl").ok();
    let scored = place.lines("scored.jsonl");
    let text = |turn: &Value| (turn["model"].clone(), turn["text"].clone(), turn["media"].clone());
    let read: Vec<_> = scored.iter().flat_map(all_turns).map(|turn| text(&turn)).collect();
    assert_eq!(read, added.into_iter().map(text).collect::<Vec<_>>());
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
