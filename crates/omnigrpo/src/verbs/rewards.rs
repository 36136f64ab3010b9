//! `rewards list` and `rewards run`.

use anyhow::{Context as _, Result};
use omnigrpo_data::{Dataset, Sample};
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
        "\nAlso `FILE.py:FUNCTION`, `cmd:PROGRAM …`, `http(s)://ADDRESS` and `judge:http(s)://ADDRESS`: see docs/rewards.md.\n",
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
    // A reward that looks at media says itself what it cannot open.
    let dataset = setup::input_rows(settings, input, true)?;
    let rewards = setup::rewards(settings, &setup::Corpus::of(settings, &dataset, 0..dataset.len()))?;
    let measures = setup::measures(settings);
    let category = settings.eval.category_column.as_deref();
    let mut progress = context.console.progress("scoring", dataset.len());
    let mut lines = Vec::new();
    let mut rows = Vec::new();
    let all: Vec<u64> = (0..dataset.len()).collect();
    for numbers in all.chunks(BATCH_ROWS) {
        let read: Vec<_> = numbers.iter().map(|&row| read_row(&dataset, row)).collect();
        let good: Vec<Scored<'_>> = read.iter().flatten().map(|(s, c)| (s, c.as_slice())).collect();
        let mut scored = score_rows(&good, &rewards, settings.run.seed, category, &measures).into_iter();
        for (&number, read) in numbers.iter().zip(&read) {
            let row = match read {
                Ok(_) => scored.next().context("a row was not scored").flatten(),
                Err(error) => Err(anyhow::anyhow!("{error:#}")),
            };
            let line = match row {
                Ok(row) => {
                    let line = json!({ "id": row.id, "rewards": row.rewards, "reward": row.reward });
                    rows.push(row);
                    line
                }
                Err(error) => json!({ "id": dataset.id(number), "error": format!("{error:#}") }),
            };
            lines.push(line.to_string());
        }
        progress.advance(numbers.len() as u64);
    }
    drop(progress);
    super::infer::write_lines(output, &lines)?;
    let summary = summarize(&rows, &rewards, &measures)?;
    super::summary::write(output, &summary)?;
    print(&super::summary::tables(&summary))?;
    super::infer::all_rows(dataset.len() - rows.len() as u64, dataset.len())
}

/// Rows that are scored together, so that a program or an endpoint gets its requests filled and spread over its
/// workers.
const BATCH_ROWS: usize = 64;

type Scored<'a> = (&'a Sample, &'a [Completion]);

fn read_row(dataset: &Dataset, row: u64) -> Result<(Sample, Vec<Completion>)> {
    let sample = dataset.get(row)?;
    let recorded = sample.completions.as_ref().context("the row has no `completions`")?;
    let completions = recorded
        .iter()
        .map(|c| {
            let finish_reason = match c.finish_reason.as_deref() {
                Some("length") => FinishReason::Length,
                _ => FinishReason::Stop,
            };
            let ids = c.completion_ids.clone().unwrap_or_default();
            Completion::recorded(ids, finish_reason, c.text.clone().unwrap_or_default())
        })
        .collect();
    Ok((sample, completions))
}

/// Scores rows together; where that fails each alone, so that an error is that of its row.
fn score_rows(
    rows: &[Scored<'_>],
    rewards: &RewardSet,
    seed: u64,
    category: Option<&str>,
    measures: &Measures,
) -> Vec<Result<EvalRow>> {
    match omnigrpo_train::score(rewards, rows, seed, 0) {
        Ok(scores) => {
            let mut from = 0;
            let each = |(sample, completions): &Scored<'_>| {
                let span = from..from + completions.len();
                from = span.end;
                let texts = completions.iter().map(|c| c.text.clone()).collect();
                Ok(omnigrpo_train::eval_row(sample, texts, &scores, span, category, measures))
            };
            rows.iter().map(each).collect()
        }
        Err(error) if rows.len() == 1 => vec![Err(error.into())],
        Err(_) => rows.chunks(1).flat_map(|row| score_rows(row, rewards, seed, category, measures)).collect(),
    }
}
