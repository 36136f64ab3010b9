//! `rewards list` and `rewards run`.

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, DatasetSpec};
use omnigrpo_rewards::{EvalRow, Measures, RewardSet, summarize};
use omnigrpo_rollout::{Completion, FinishReason};
use serde_json::json;

use super::{Context, print, setup};
use crate::explain::Problem;
use crate::settings::Settings;

/// The table of rewards.
pub fn list() -> Result<()> {
    let mut out = String::new();
    let rewards = omnigrpo_rewards::table().iter().map(|row| (row.name, row.doc, row.source));
    let scorers = omnigrpo_scorers::table().iter().map(|row| (row.name, row.doc, row.source));
    let rows: Vec<_> = rewards.chain(scorers).collect();
    let width = rows.iter().map(|row| row.0.len()).max().unwrap_or(0);
    for (name, doc, source) in rows {
        out.push_str(&format!("{name:width$}  {doc} [{source}]\n"));
    }
    out.push_str(
        "\nAlso `cmd:PROGRAM …`, `http(s)://ADDRESS` and `judge:http(s)://ADDRESS`: see docs/rewards.md.\n",
    );
    print(&out)
}

/// Scores rows that carry completions, and sums them up as an evaluation.
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
    let measures = setup::measures(settings);
    let category = settings.eval.category_column.as_deref();
    let mut progress = context.console.progress("scoring", dataset.len());
    let mut lines = Vec::new();
    let mut rows = Vec::new();
    for row in 0..dataset.len() {
        let line = match score_row(&dataset, row, &rewards, settings.run.seed, category, &measures) {
            Ok(row) => {
                let line = json!({ "id": row.id, "rewards": row.rewards, "reward": row.reward });
                rows.push(row);
                line
            }
            Err(error) => json!({ "id": dataset.id(row), "error": format!("{error:#}") }),
        };
        lines.push(line.to_string());
        progress.advance(1);
    }
    drop(progress);
    super::infer::write_lines(output, &lines)?;
    let summary = summarize(&rows, &rewards, &measures)?;
    super::summary::write(output, &summary)?;
    print(&super::summary::tables(&summary))?;
    super::infer::all_rows(dataset.len() - rows.len() as u64, dataset.len())
}

fn score_row(
    dataset: &Dataset,
    row: u64,
    rewards: &RewardSet,
    seed: u64,
    category: Option<&str>,
    measures: &Measures,
) -> Result<EvalRow> {
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
    let scores = omnigrpo_train::score(rewards, &[(&sample, &completions)], seed, 0)?;
    let texts: Vec<String> = completions.into_iter().map(|c| c.text).collect();
    let all = 0..texts.len();
    Ok(omnigrpo_train::eval_row(&sample, texts, &scores, all, category, measures))
}
