//! A reward as a service, asked by a reward set in the same process: `cargo run --example serve_reward`. Called with
//! `serve ADDRESS` it only serves, for `omnigrpo train --reward_funcs http://ADDRESS`.
#![allow(clippy::print_stdout)]

use std::io::Read as _;

use omnigrpo::{RewardInput, RewardOptions, RowKey, Think, build_rewards};
use serde_json::{Map, Value, json};

/// The share of the completion's words that the solution has, too.
fn overlap(item: &Value) -> Option<f64> {
    let words = |key: &str| item[key].as_str().map(|text| text.split_whitespace().collect::<Vec<_>>());
    let (answer, solution) = (words("completion")?, words("solution")?);
    let shared = answer.iter().filter(|word| solution.contains(word)).count();
    Some(shared as f64 / answer.len().max(1) as f64)
}

/// Answers requests as docs/rewards.md has them: a list of rows becomes a list of numbers, null where there is none.
fn serve(server: &tiny_http::Server) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    for mut request in server.incoming_requests() {
        let mut body = String::new();
        request.as_reader().take(64 << 20).read_to_string(&mut body)?;
        let body: Value = serde_json::from_str(&body)?;
        let rows = body["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
        let rewards: Vec<Option<f64>> = rows.iter().map(overlap).collect();
        request.respond(tiny_http::Response::from_string(
            json!({ "id": body["id"], "rewards": rewards }).to_string(),
        ))?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some("serve") {
        return serve(&tiny_http::Server::http(args.next().as_deref().unwrap_or("127.0.0.1:8000"))?);
    }
    let server = tiny_http::Server::http("127.0.0.1:0")?;
    let address = server.server_addr();
    std::thread::spawn(move || serve(&server));

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
    };
    let scores = rewards.score(&[row])?;
    println!("{}: {:.3}", scores.names[0], scores.values[0][0].unwrap_or(f64::NAN));
    Ok(())
}
