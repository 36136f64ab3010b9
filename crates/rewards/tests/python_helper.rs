//! The Python helper of `examples/rewards` with a TRL-style function. Needs `python3`, so it is run on request:
//! `cargo test -p omnigrpo-rewards -- --ignored`.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

use omnigrpo_rewards::{RewardError, RewardInput, RewardOptions, RowKey, Think, build};
use serde_json::{Map, json};

fn scores(spec: &str, rows: &[(&str, Option<&str>)]) -> Result<Vec<Option<f64>>, RewardError> {
    let mut columns = Map::new();
    columns.insert("factor".to_owned(), json!(2));
    let batch: Vec<RewardInput<'_>> = rows
        .iter()
        .enumerate()
        .map(|(i, (completion, solution))| RewardInput {
            prompt: "What colour?",
            completion,
            completion_ids: &[1, 2, 3],
            solution: *solution,
            columns: &columns,
            think: Think::On,
            media_paths: &[],
            key: RowKey { seed: 0, step: 7, row: 0, sample: i as u64 },
            truncated: false,
        })
        .collect();
    Ok(build(&[spec.to_owned()], &RewardOptions::default())?.score(&batch)?.values.remove(0))
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
    assert!(error.contains("not JSON compliant"), "{error}");
}
