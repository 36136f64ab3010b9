//! Answers a question about a picture: `cargo run --release --example generate -- runs/generate`
#![allow(clippy::print_stdout)]

use std::path::PathBuf;

use anyhow::Context as _;
use omnigrpo::{
    Checkpoint, GenerateOptions, Generator, LoadOptions, Model, PromptBuilder, PromptSettings, Request,
    RowReader, SamplingParams, demo,
};
use serde_json::json;

fn main() -> anyhow::Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "runs/generate".into()));
    demo::write_model(&dir.join("model"))?;
    demo::generate(&dir.join("data"), 1, demo::Sizes { sft: 0, train: 0, eval: 8 })?;

    let checkpoint = Checkpoint::open(&dir.join("model"))?;
    let model = Model::load(&checkpoint, &LoadOptions::default())?;
    let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;

    // A question about a picture of the generated task. Paths start in the given directory.
    let folder = dir.join("data");
    let rows = std::fs::read_to_string(folder.join("eval.jsonl"))?;
    let picture = rows.lines().filter_map(|row| serde_json::from_str::<serde_json::Value>(row).ok());
    let picture =
        picture.into_iter().find_map(|row| Some(row.get("image")?.clone())).context("no picture")?;
    let row =
        json!({ "prompt": "<image>Which colour is it? Give the answer in <answer> tags.", "image": picture });
    let sample = RowReader::new("mine").media_in(&folder).sample(row)?;

    let prompt = prompts.build(&sample)?;
    let features = model.encode_prompt(&prompt)?;
    let params = SamplingParams { max_completion_length: 24, ..SamplingParams::greedy() };
    let generator = Generator::new(&model, &prompts, &params);
    let generated = generator.generate([Request::new(&prompt, &features)], GenerateOptions::default())?;
    for completion in &generated[0].completions {
        println!("{} prompt tokens; {} tokens: {}", prompt.ids.len(), completion.ids.len(), completion.text);
    }
    Ok(())
}
