//! Serves a reward and asks it from the same process: `cargo run --example serve_reward`. Called with
//! `serve ADDRESS` it only serves, for `omnigrpo train --reward_funcs http://ADDRESS`.
#![allow(clippy::print_stdout)]

use omnigrpo::{RewardInput, RewardOptions, RowKey, Think, build_rewards};
use omnigrpo_http::{Answer, Http, Limits, Request};
use serde_json::{Map, Value, json};

/// Returns the share of the completion's words that are also in the solution.
fn overlap(item: &Value) -> Option<f64> {
    let words = |key: &str| item[key].as_str().map(|text| text.split_whitespace().collect::<Vec<_>>());
    let (answer, solution) = (words("completion")?, words("solution")?);
    let shared = answer.iter().filter(|word| solution.contains(word)).count();
    Some(shared as f64 / answer.len().max(1) as f64)
}

/// Answers a request in the protocol of docs/rewards.md: a list of rows becomes a list of numbers, null for none.
fn answer(request: &Request) -> Answer {
    let Ok(body) = serde_json::from_slice::<Value>(request.body()) else {
        return Answer::new(400, "text/plain", "this is no JSON\n");
    };
    let rows = body["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
    let rewards: Vec<Option<f64>> = rows.iter().map(overlap).collect();
    Answer::new(200, "application/json", json!({ "id": body["id"], "rewards": rewards }).to_string())
}

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let limits = Limits { body_bytes: 64 << 20, ..Limits::default() };
    if args.next().as_deref() == Some("serve") {
        let address = args.next().unwrap_or_else(|| "127.0.0.1:8000".to_owned());
        let _server = Http::start("reward", address, limits, answer)?;
        loop {
            std::thread::park();
        }
    }
    let server = Http::start("reward", "127.0.0.1:0", limits, answer)?;
    let address = server.address();

    let rewards = build_rewards(&[format!("overlap=http://{address}")], &RewardOptions::default())?;
    let row = RewardInput {
        prompt: "What is in the picture?",
        turns: &[],
        completion: "a red boat",
        completion_ids: &[],
        solution: Some("a red house"),
        columns: &Map::new(),
        think: Think::Off,
        media_paths: &[],
        media: &[],
        key: RowKey { seed: 0, step: 0, row: 0, sample: 0 },
        truncated: false,
        added_turns: 0,
        is_text: false,
    };
    let scores = rewards.score(&[row])?;
    println!("{}: {:.3}", scores.names[0], scores.values[0][0].unwrap_or(f64::NAN));
    Ok(())
}
