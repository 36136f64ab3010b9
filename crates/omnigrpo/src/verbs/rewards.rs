//! `rewards list` and `rewards run`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, DatasetSpec};
use omnigrpo_rollout::{Completion, FinishReason};

use super::{Context, print, setup};
use crate::explain::Problem;
use crate::settings::Settings;

/// The table of rewards.
pub fn list() -> Result<()> {
    let mut out = String::new();
    let width = omnigrpo_rewards::table().iter().map(|row| row.name.len()).max().unwrap_or(0);
    for row in omnigrpo_rewards::table() {
        out.push_str(&format!("{:width$}  {} [{}]\n", row.name, row.doc, row.source));
    }
    out.push_str("\nAlso `cmd:PROGRAM …` and `http(s)://ADDRESS`: see examples/rewards.\n");
    print(&out)
}

/// Scores rows that carry completions.
pub fn run(settings: &Settings, context: &Context) -> Result<()> {
    let (Some(input), Some(output)) = (&settings.io.input, &settings.io.output) else {
        return Err(Problem::usage("nothing to score")
            .expected("`rewards run --input rows.jsonl --output out.jsonl`")
            .into());
    };
    super::infer::can_write(output)?;
    let specs = DatasetSpec::from_files(std::slice::from_ref(input), &setup::roots(settings))?;
    let dataset = Dataset::open(&specs, &setup::read_options(settings))?;
    let rewards = setup::rewards(settings, &dataset)?;
    let mut progress = context.console.progress("scoring", dataset.len());
    let mut lines = Vec::new();
    let mut failed = 0u64;
    for row in 0..dataset.len() {
        let line = match score_row(&dataset, row, &rewards, settings.run.seed) {
            Ok(line) => line,
            Err(error) => {
                failed += 1;
                serde_json::json!({ "id": dataset.id(row), "error": format!("{error:#}") })
            }
        };
        lines.push(line.to_string());
        progress.advance(1);
    }
    super::infer::write_lines(output, &lines)?;
    super::infer::all_rows(failed, dataset.len())
}

fn score_row(
    dataset: &Dataset,
    row: u64,
    rewards: &omnigrpo_rewards::RewardSet,
    seed: u64,
) -> Result<serde_json::Value> {
    let sample = dataset.get(row)?;
    let recorded = sample.completions.as_ref().context("the row has no `completions`")?;
    let completions: Vec<Completion> = recorded
        .iter()
        .map(|c| Completion {
            ids: c.completion_ids.clone().unwrap_or_default(),
            logprobs: Vec::new(),
            sampler_logprobs: Vec::new(),
            finish_reason: if c.finish_reason.as_deref() == Some("length") {
                FinishReason::Length
            } else {
                FinishReason::Stop
            },
            text: c.text.clone().unwrap_or_default(),
        })
        .collect();
    let matrix = omnigrpo_train::score(rewards, &[(&sample, &completions)], seed, 0)?;
    let named: BTreeMap<_, _> = matrix.names.iter().zip(&matrix.values).collect();
    Ok(serde_json::json!({ "id": sample.id, "rewards": named, "reward": matrix.total }))
}
