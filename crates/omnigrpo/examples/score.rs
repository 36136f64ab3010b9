//! Computes log-probabilities of given answers: `cargo run --release --example score -- runs/score`
#![allow(clippy::print_stdout)]

use std::path::PathBuf;

use omnigrpo::{Checkpoint, LoadOptions, Model, PromptBuilder, PromptSettings, RowReader, demo, logprobs};
use serde_json::json;

fn main() -> anyhow::Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "runs/score".into()));
    demo::write_model(&dir.join("model"))?;
    let checkpoint = Checkpoint::open(&dir.join("model"))?;
    let model = Model::load(&checkpoint, &LoadOptions::default())?;
    let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;

    // Rows need no file.
    let sums =
        (1..4).map(|n| json!({ "prompt": format!("What is {n} + {n}?"), "solution": format!("{}", 2 * n) }));
    let rows = RowReader::new("sums").dataset(sums)?;
    for row in 0..rows.len() {
        let sample = rows.get(row)?;
        let prompt = prompts.build(&sample)?;
        let answers = [sample.solution.clone().unwrap_or_default(), "no idea".to_owned()];
        let ids = answers.iter().map(|text| prompts.completion_ids(text)).collect::<Result<Vec<_>, _>>()?;
        let scored = logprobs(&model, &prompt, &ids, 1.0, None)?;
        for (answer, logprobs) in answers.iter().zip(scored) {
            let nats: f32 = logprobs.iter().sum();
            println!("row {row}: {answer:?} {nats:.3} nats over {} tokens", logprobs.len());
        }
    }
    Ok(())
}
