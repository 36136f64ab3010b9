//! The Python helper of `examples/rewards` with a TRL-style function. Needs `python3`, so it is run on request:
//! `cargo test -p omnigrpo-rewards -- --ignored`.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

use omnigrpo_data::{MediumOptions, MediumRef, MediumSource};
use omnigrpo_rewards::{RewardError, RewardInput, RewardOptions, RowKey, Think, build};
use omnigrpo_text::{MediumKind, Part, Role, Turn};
use serde_json::{Map, Value, json};

/// `prompts` is what TRL gives: the whole conversation, with parts where the row has media. So is `completions`: the turns of a
/// completion, with the answers of tools.
#[test]
#[ignore = "needs python3"]
fn prompts_are_whole_conversations() {
    let dir = tempfile::tempdir().unwrap();
    let source = r#"
import json

def told(prompts, completions, log_extra, **columns):
    log_extra("prompts", [json.dumps(prompt) for prompt in prompts])
    log_extra("completions", [json.dumps(completion) for completion in completions])
    return [len(prompt) for prompt in prompts]
"#;
    let path = dir.path().join("mine.py");
    std::fs::write(&path, source).unwrap();
    let mut turns = vec![
        Turn::text(Role::System, "Be brief."),
        Turn::text(Role::User, "Hello."),
        Turn::text(Role::Assistant, "Yes?"),
        Turn::text(Role::User, "What colour?"),
    ];
    let media = [
        medium(MediumKind::Image, MediumSource::Path("/data/1.png".into())),
        medium(MediumKind::Video, MediumSource::Frames(vec!["/data/a.png".into(), "/data/b.png".into()])),
    ];
    let say_with = |turns: &[Turn], added_turns: usize, media: &[MediumRef], system: Option<&str>| {
        let mut options = RewardOptions::default();
        options.external.system = system.map(str::to_owned);
        let set = build(&[format!("{}:told", path.display())], &options).unwrap();
        let matrix =
            on(&[("red", None)], |batch| set.score(&[RewardInput { turns, media, added_turns, ..batch[0] }]))
                .unwrap();
        let logged = |name: &str| -> Value {
            serde_json::from_str(matrix.logged.columns[name][0].as_str().unwrap()).unwrap()
        };
        (matrix.values[0][0], logged("prompts"), logged("completions"))
    };
    let say = |turns: &[Turn], media: &[MediumRef], system: Option<&str>| {
        let (count, prompt, completion) = say_with(turns, 0, media, system);
        assert_eq!(completion, json!([{ "role": "assistant", "content": "red" }]));
        (count, prompt)
    };
    let (count, prompt) = say(&turns, &[], None);
    assert_eq!(count, Some(4.0));
    assert_eq!(
        prompt,
        json!([
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "Hello." },
            { "role": "assistant", "content": "Yes?" },
            { "role": "user", "content": "What colour?" },
        ])
    );
    // The run's own system text is the one that the policy read.
    assert_eq!(say(&turns, &[], Some("Think.")).1[0], json!({ "role": "system", "content": "Think." }));
    assert_eq!(
        say(&turns[3..], &[], Some("Think.")).1[1],
        json!({ "role": "user", "content": "What colour?" })
    );

    turns[3].parts.insert(0, Part::Medium { kind: MediumKind::Video, index: 0 });
    turns[3].parts.insert(0, Part::Medium { kind: MediumKind::Image, index: 0 });
    let (_, prompt) = say(&turns, &media, None);
    assert_eq!(prompt[0], json!({ "role": "system", "content": [{ "type": "text", "text": "Be brief." }] }));
    assert_eq!(
        prompt[3]["content"],
        json!([
            { "type": "image", "image": "/data/1.png" },
            { "type": "video", "video": ["/data/a.png", "/data/b.png"] },
            { "type": "text", "text": "What colour?" },
        ])
    );
    // The last two turns are those of a call and its answer.
    let called =
        [&turns[..2], &[Turn::text(Role::Assistant, "call"), Turn::text(Role::Tool, "answer")]].concat();
    let (_, prompt, completion) = say_with(&called, 2, &[], None);
    assert_eq!(prompt[1], json!({ "role": "user", "content": "Hello." }));
    assert_eq!(prompt.as_array().unwrap().len(), 2);
    assert_eq!(
        completion,
        json!([
            { "role": "assistant", "content": "call" },
            { "role": "tool", "content": "answer" },
            { "role": "assistant", "content": "red" },
        ])
    );
    // A row without turns, as an older program sends it.
    assert_eq!(say(&[], &[], None).1, json!([{ "role": "user", "content": "What colour?" }]));
}

fn medium(kind: MediumKind, source: MediumSource) -> MediumRef {
    MediumRef { kind, source, options: MediumOptions::default() }
}

/// Calls `ask` on rows of a run.
/// An answer that is no number is an error that names the reward and what it is to return.
#[test]
#[ignore = "needs python3"]
fn answers_that_are_no_numbers_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let source = r#"
def mapping(prompts, completions, **columns):
    return {"mine": 1.0}

def nan(prompts, completions, **columns):
    return [1.0, float("nan")]

def metric(prompts, completions, log_metric, **columns):
    log_metric("mine", float("nan"))
    return [1.0, 1.0]
"#;
    let path = dir.path().join("mine.py");
    std::fs::write(&path, source).unwrap();
    for (name, expected) in [
        ("mapping", "the reward `mapping` returned a dict, expected a list with a finite number, or None"),
        ("nan", "the reward `nan` of row 0, completion 1 is nan, expected a finite number"),
        ("metric", "the metric `mine` is nan, expected a finite number"),
    ] {
        let set = build(&[format!("{}:{name}", path.display())], &RewardOptions::default()).unwrap();
        let error = on(&[("red", None), ("blue", None)], |batch| set.score(batch)).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(name), "{error}");
    }
}

fn on<T>(rows: &[(&str, Option<&str>)], ask: impl FnOnce(&[RewardInput<'_>]) -> T) -> T {
    let mut columns = Map::new();
    columns.insert("factor".to_owned(), json!(2));
    with_columns(&columns, rows, ask)
}

/// Calls `ask` on rows that all have these columns.
fn with_columns<T>(
    columns: &Map<String, Value>,
    rows: &[(&str, Option<&str>)],
    ask: impl FnOnce(&[RewardInput<'_>]) -> T,
) -> T {
    let batch: Vec<RewardInput<'_>> = rows
        .iter()
        .enumerate()
        .map(|(i, (completion, solution))| RewardInput {
            prompt: "What colour?",
            turns: &[],
            completion,
            completion_ids: &[1, 2, 3],
            solution: *solution,
            columns,
            think: Think::On,
            media_paths: &[],
            media: &[],
            key: RowKey { seed: 0, step: 7, row: 0, sample: i as u64 },
            truncated: false,
            added_turns: 0,
            is_text: false,
        })
        .collect();
    ask(&batch)
}

fn scores(spec: &str, rows: &[(&str, Option<&str>)]) -> Result<Vec<Option<f64>>, RewardError> {
    let set = build(&[spec.to_owned()], &RewardOptions::default())?;
    Ok(on(rows, |batch| set.score(batch))?.values.remove(0))
}

fn examples() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/rewards").canonicalize().unwrap()
}

#[test]
#[ignore = "needs python3"]
fn a_trl_function_runs_unchanged() {
    let dir = examples();
    let file = |name: &str| dir.join(name).display().to_string();
    let spec =
        format!("cmd:\"python3 {} {}:right_and_short\"", file("omnigrpo_reward.py"), file("my_rewards.py"));
    let long = format!("{}<answer>red</answer>", "x".repeat(400));
    let rows =
        [("<answer> Red </answer>", Some("red")), ("blue", Some("red")), ("red", None), (&long, Some("red"))];
    assert_eq!(scores(&spec, &rows).unwrap(), vec![Some(1.0), Some(0.0), None, Some(0.5)]);
}

#[test]
#[ignore = "needs python3"]
fn printing_async_columns_and_exceptions() {
    let dir = tempfile::tempdir().unwrap();
    let source = r#"
print("loading")
async def reward(prompts, completions, completion_ids, factor, trainer_state, **columns):
    print("scoring")
    assert prompts[0] == "What colour?", prompts
    if completions[0] == "fail":
        raise ValueError("no such colour")
    if completions[0] == "nan":
        return [float("nan")]
    return [f * len(ids) + trainer_state.global_step for f, ids in zip(factor, completion_ids)]
"#;
    let path = dir.path().join("mine.py");
    std::fs::write(&path, source).unwrap();
    let helper = examples().join("omnigrpo_reward.py");
    let spec = format!("cmd:python3 {} --text {}:reward", helper.display(), path.display());
    assert_eq!(scores(&spec, &[("red", None), ("blue", None)]).unwrap(), vec![Some(13.0); 2]);
    let error = scores(&spec, &[("fail", None)]).unwrap_err().to_string();
    assert!(error.contains("ValueError: no such colour"), "{error}");
    let error = scores(&spec, &[("nan", None)]).unwrap_err().to_string();
    let named = "the reward `reward` of row 0, completion 0 is nan, expected a finite number";
    assert!(error.contains(named), "{error}");
}

/// The path and name of a function are a reward by themselves, called after the function.
#[test]
#[ignore = "needs python3"]
fn a_function_of_a_file_is_a_reward() {
    let dir = tempfile::tempdir().unwrap();
    let source = r#"
def length(prompts, completions, log_metric, log_extra, **columns):
    log_metric("chars", sum(len(c[0]["content"]) for c in completions) / len(completions))
    log_extra("shout", [c[0]["content"].upper() for c in completions])
    return [len(c[0]["content"]) for c in completions]

def easy(reward_inputs):
    return [{"overall": r["response_length"], "right": float(r["response"] == r["ground_truth"])} for r in reward_inputs]
"#;
    let path = dir.path().join("mine.py");
    std::fs::write(&path, source).unwrap();
    let spec = |function: &str| format!("{}:{function}", path.display());
    let rows = [("red", Some("red")), ("blue!", Some("red"))];
    let set = build(&[spec("length"), spec("easy")], &RewardOptions::default()).unwrap();
    assert_eq!(set.names(), ["length", "easy"]);
    let matrix = on(&rows, |batch| set.score(batch)).unwrap();
    assert_eq!(matrix.values, [[Some(3.0), Some(5.0)], [Some(3.0), Some(3.0)]]);
    let metrics = [("rewards/length/chars".to_owned(), 4.0), ("rewards/easy/right".to_owned(), 0.5)];
    assert_eq!(matrix.logged.metrics, metrics.into());
    assert_eq!(matrix.logged.columns["shout"], [json!("RED"), json!("BLUE!")]);

    // Found out by a trial, once, with what there is instead.
    let error = |spec: String| {
        let set = build(&[spec], &RewardOptions::default()).unwrap();
        on(&rows[..1], |batch| set.probe(batch)).unwrap_err().to_string()
    };
    let missing = error(spec("nofunc"));
    for part in ["`nofunc` failed 1 time(s)", "has no function `nofunc`; it has: length, easy"] {
        assert!(missing.contains(part), "{part}: {missing}");
    }
    std::fs::write(&path, "import no_such_module\n").unwrap();
    let import = error(spec("length"));
    assert!(
        import.contains("failed 1 time(s)") && import.contains("No module named 'no_such_module'"),
        "{import}"
    );
}

/// Every form in which verl 0.9 calls a reward: per completion, with keywords alone, asynchronous, and per batch.
#[test]
#[ignore = "needs python3"]
fn rewards_of_verl_run_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let source = r#"
import asyncio

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["num_turns"] == 2 and extra_info["index"] == 5, extra_info
    assert isinstance(ground_truth, list), ground_truth
    return {"score": float(solution_str in ground_truth), "acc": solution_str in ground_truth, "pred": solution_str.upper(),
            "source": data_source}

def short(solution_str, ground_truth):
    return 2.0 if solution_str in ground_truth else 0

async def slow(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return {"score": len(solution_str)}

def batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.5):
    assert data_sources == ["geo"] * len(solution_strs)
    return [bonus + (answer in truth) for answer, truth in zip(solution_strs, ground_truths)]

def keyless(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}
"#;
    let path = dir.path().join("verl_rewards.py");
    std::fs::write(&path, source).unwrap();
    let keywords = dir.path().join("keywords.py");
    std::fs::write(
        &keywords,
        "def compute_score(**kwargs):\n    return float(kwargs[\"solution_str\"] == kwargs[\"ground_truth\"])\n",
    )
    .unwrap();
    let columns = json!({
        "data_source": "geo",
        "reward_model": { "style": "rule", "ground_truth": ["red", "crimson"] },
        "extra_info": { "index": 5, "split": "train" },
    });
    let Value::Object(columns) = columns else { panic!() };
    let rows = [("crimson", Some("red")), ("blue", Some("red"))];
    let spec = |path: &Path, function: &str| format!("{}:{function}", path.display());
    let specs = ["compute_score", "short", "slow", "batch"].map(|function| spec(&path, function));
    let set = build(&specs, &RewardOptions::default()).unwrap();
    let matrix = with_columns(&columns, &rows, |batch| set.score(batch)).unwrap();
    assert_eq!(
        matrix.values,
        [[Some(1.0), Some(0.0)], [Some(2.0), Some(0.0)], [Some(7.0), Some(4.0)], [Some(1.5), Some(0.5)]]
    );
    assert_eq!(matrix.logged.metrics, [("rewards/compute_score/acc".to_owned(), 0.5)].into());
    assert_eq!(matrix.logged.columns["pred"], [json!("CRIMSON"), json!("BLUE")]);
    assert_eq!(matrix.logged.columns["source"], [json!("geo"), json!("geo")]);

    // Rows without verl's columns: the solution is the ground truth.
    let rows = [("red", Some("red")), ("blue", Some("red"))];
    assert_eq!(scores(&spec(&keywords, "compute_score"), &rows).unwrap(), [Some(1.0), Some(0.0)]);
    let error = scores(&spec(&path, "keyless"), &rows).unwrap_err().to_string();
    assert!(error.contains("KeyError: 'score'"), "{error}");
}

/// EasyR1 also calls a function per completion, by the name of its parameter or by `REWARD_TYPE` of its file.
#[test]
#[ignore = "needs python3"]
fn sequential_rewards_of_easy_r1_run_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, source: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, source).unwrap();
        path.display().to_string()
    };
    let named = file(
        "named.py",
        "def one(reward_input, weight=0.5):\n    return {'overall': weight * reward_input['response_length']}\n",
    );
    let typed = |kind: &str, body: &str| {
        let source =
            format!("REWARD_NAME = 'r1v'\nREWARD_TYPE = '{kind}'\n\ndef compute_score(it):\n    {body}\n");
        file(&format!("{kind}.py"), &source)
    };
    let each = typed("sequential", "return {'overall': it['response'] == it['ground_truth'], 'format': 1.0}");
    let all = typed("batch", "return [{'overall': len(one['response'])} for one in it]");
    let rows = [("red", Some("red")), ("blue", Some("red"))];
    assert_eq!(scores(&format!("{named}:one"), &rows).unwrap(), [Some(1.5), Some(1.5)]);
    assert_eq!(scores(&format!("{each}:compute_score"), &rows).unwrap(), [Some(1.0), Some(0.0)]);
    assert_eq!(scores(&format!("{all}:compute_score"), &rows).unwrap(), [Some(3.0), Some(4.0)]);
}
