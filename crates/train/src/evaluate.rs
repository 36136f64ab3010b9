//! Evaluation: completions on held-out rows, scored by the same rewards.

use std::collections::BTreeMap;
use std::sync::Arc;

use omnigrpo_data::Dataset;
use omnigrpo_models::{Features, Model, PromptBuilder};
use omnigrpo_observe::Metric;
use omnigrpo_rewards::RewardSet;
use omnigrpo_rollout::{Completion, Generator, Request, SamplingParams};
use serde::Serialize;
use serde_json::Value;

use crate::error::Result;
use crate::rows::{PreparedRow, SkippedRow};
use crate::scoring;

/// What is evaluated and how.
#[derive(Clone)]
pub struct EvalPlan {
    /// Rows.
    pub dataset: Arc<Dataset>,
    /// Which of them.
    pub rows: Vec<u64>,
    /// Completions per row.
    pub num_generations: usize,
    /// How they are sampled; greedy for one completion per row.
    pub sampling: SamplingParams,
    /// Completions decoded at once.
    pub max_live: usize,
    /// Rows are also reported by the value of this column.
    pub category: Option<String>,
}

/// One evaluated row.
#[derive(Clone, Debug, Serialize)]
pub struct EvalRow {
    /// The row's id.
    pub id: String,
    /// The question.
    pub prompt: String,
    /// Ground truth.
    pub solution: Option<String>,
    /// Value of the category column.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<String>,
    /// Sampled texts.
    pub completions: Vec<String>,
    /// Each reward's value per completion.
    pub rewards: BTreeMap<String, Vec<Option<f64>>>,
}

/// The result of an evaluation.
#[derive(Clone, Debug, Default)]
pub struct Evaluation {
    /// `eval_*` metrics.
    pub metrics: Vec<Metric>,
    /// Every row.
    pub rows: Vec<EvalRow>,
    /// Rows that could not be used.
    pub skipped: Vec<SkippedRow>,
    /// Mean of each reward by category: (category, rows, means in the order of the rewards).
    pub categories: Vec<(String, usize, Vec<Option<f64>>)>,
    /// Reward names, in order.
    pub reward_names: Vec<String>,
}

impl Evaluation {
    /// A metric by name.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(n, _)| n == name).and_then(|(_, v)| *v)
    }
}

/// Rows that are prepared and decoded together.
const BATCH_ROWS: usize = 32;

/// Evaluates a model. `progress` is called with the number of rows just done.
///
/// # Errors
/// As the rollout and the rewards; a row that cannot be used is left out and reported.
pub fn evaluate(
    model: &Model,
    prompts: &PromptBuilder,
    rewards: &RewardSet,
    plan: &EvalPlan,
    progress: &mut dyn FnMut(u64),
) -> Result<Evaluation> {
    let mut out = Evaluation {
        reward_names: rewards.names().iter().map(|&n| n.to_owned()).collect(),
        ..Evaluation::default()
    };
    let mut tally = Tally::default();
    for batch in plan.rows.chunks(BATCH_ROWS) {
        let mut rows = Vec::with_capacity(batch.len());
        for &row in batch {
            let made = match plan.dataset.get(row) {
                Ok(sample) => match prompts.build(&sample) {
                    Ok(prompt) => Ok(PreparedRow { sample, prompt: Arc::new(prompt) }),
                    Err(e) => Err((sample.id, e.to_string())),
                },
                Err(e) => Err((plan.dataset.id(row), e.to_string())),
            };
            match made {
                Ok(prepared) => rows.push(prepared),
                Err((id, reason)) => out.skipped.push(SkippedRow { row, id, reason }),
            }
        }
        let features: Vec<Vec<Features>> =
            rows.iter().map(|r| model.encode_prompt(&r.prompt)).collect::<omnigrpo_models::Result<_>>()?;
        let requests: Vec<Request> = rows
            .iter()
            .zip(&features)
            .map(|(row, features)| Request {
                prompt: &row.prompt,
                features,
                num_samples: plan.num_generations,
                rollout: EVAL_ROLLOUT,
                row: row.sample.row,
            })
            .collect();
        let generator = Generator {
            model,
            tokenizer: prompts.tokenizer(),
            stops: prompts.stops(),
            params: &plan.sampling,
            max_live: plan.max_live,
        };
        let completions = generator.generate(&requests, |_| {})?;
        let scored: Vec<_> = rows.iter().zip(&completions).map(|(r, c)| (&r.sample, c.as_slice())).collect();
        let matrix = scoring::score(rewards, &scored, plan.sampling.seed, 0)?;
        for (r, (row, completions)) in rows.iter().zip(&completions).enumerate() {
            let span = r * plan.num_generations..(r + 1) * plan.num_generations;
            tally.add(completions, &matrix.total[span.clone()]);
            let values = matrix.names.iter().zip(&matrix.values);
            out.rows.push(EvalRow {
                id: row.sample.id.clone(),
                prompt: row.sample.question(),
                solution: row.sample.solution.clone(),
                category: plan.category.as_ref().and_then(|c| row.sample.columns.get(c)).map(plain),
                completions: completions.iter().map(|c| c.text.clone()).collect(),
                rewards: values.map(|(n, v)| (n.clone(), v[span.clone()].to_vec())).collect(),
            });
        }
        progress(batch.len() as u64);
    }
    out.metrics = tally.metrics(&out);
    out.categories = by_category(&out);
    Ok(out)
}

/// Keys evaluation's random numbers apart from every rollout of training.
const EVAL_ROLLOUT: u64 = u64::MAX;

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[derive(Default)]
struct Tally {
    tokens: usize,
    completions: usize,
    truncated: usize,
    answered: usize,
    total: f64,
    totals: usize,
}

impl Tally {
    fn add(&mut self, completions: &[Completion], totals: &[Option<f64>]) {
        for completion in completions {
            self.completions += 1;
            self.tokens += completion.ids.len();
            self.truncated += usize::from(completion.finish_reason == omnigrpo_rollout::FinishReason::Length);
            let text = completion.text.to_ascii_lowercase();
            self.answered += usize::from(match (text.rfind("<answer>"), text.rfind("</answer>")) {
                (Some(open), Some(close)) => open + "<answer>".len() < close,
                _ => false,
            });
        }
        for total in totals.iter().flatten() {
            self.total += total;
            self.totals += 1;
        }
    }

    fn metrics(&self, evaluation: &Evaluation) -> Vec<Metric> {
        let share = |n: f64, of: usize| (of > 0).then(|| n / of as f64);
        let mut out: Vec<Metric> = vec![
            ("eval_rows".into(), Some(evaluation.rows.len() as f64)),
            ("eval_skipped".into(), Some(evaluation.skipped.len() as f64)),
            ("eval_reward".into(), share(self.total, self.totals)),
            ("eval_completions/mean_length".into(), share(self.tokens as f64, self.completions)),
            ("eval_completions/clipped_ratio".into(), share(self.truncated as f64, self.completions)),
            (
                "eval_parse_fail_rate".into(),
                share((self.completions - self.answered) as f64, self.completions),
            ),
        ];
        for name in &evaluation.reward_names {
            let all: Vec<Option<f64>> =
                evaluation.rows.iter().flat_map(|r| r.rewards[name].clone()).collect();
            out.push((format!("eval_rewards/{name}/mean"), mean(&all)));
            // The names of the evaluation of qwen-vl-finetune's GRPO trainer.
            out.push((format!("eval_{name}_reward"), mean(&all)));
            let pass: Vec<Option<f64>> = evaluation
                .rows
                .iter()
                .map(|r| r.rewards[name].iter().flatten().copied().reduce(f64::max))
                .collect();
            if evaluation.rows.iter().any(|r| r.completions.len() > 1) {
                out.push((format!("eval_rewards/{name}/best_of_n"), mean(&pass)));
            }
        }
        out.push(("eval_total_reward".into(), share(self.total, self.totals)));
        out
    }
}

fn mean(values: &[Option<f64>]) -> Option<f64> {
    let given: Vec<f64> = values.iter().flatten().copied().collect();
    (!given.is_empty()).then(|| given.iter().sum::<f64>() / given.len() as f64)
}

fn by_category(evaluation: &Evaluation) -> Vec<(String, usize, Vec<Option<f64>>)> {
    let mut groups: BTreeMap<&str, Vec<&EvalRow>> = BTreeMap::new();
    for row in &evaluation.rows {
        if let Some(category) = &row.category {
            groups.entry(category).or_default().push(row);
        }
    }
    groups
        .into_iter()
        .map(|(category, rows)| {
            let means = evaluation
                .reward_names
                .iter()
                .map(|name| mean(&rows.iter().flat_map(|r| r.rewards[name].clone()).collect::<Vec<_>>()))
                .collect();
            (category.to_owned(), rows.len(), means)
        })
        .collect()
}

/// The 95 % Wilson interval of a share that was observed as `p` in `n` trials.
#[must_use]
pub fn wilson_interval(p: f64, n: usize) -> (f64, f64) {
    if n == 0 {
        return (0.0, 1.0);
    }
    const Z: f64 = 1.959_963_984_540_054;
    let n = n as f64;
    let centre = (p + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z / (1.0 + Z * Z / n) * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    ((centre - half).max(0.0), (centre + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Newcombe (1998), table I: 15 of 148.
    #[test]
    fn the_interval_is_wilsons() {
        let (low, high) = wilson_interval(15.0 / 148.0, 148);
        assert!((low - 0.0624).abs() < 5e-5 && (high - 0.1605).abs() < 5e-5, "{low} {high}");
    }
}
