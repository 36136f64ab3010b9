//! Evaluation: completions on held-out rows, scored by the same rewards.

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_data::{Dataset, Sample};
use omnigrpo_models::{Features, Model, PromptBuilder};
use omnigrpo_rewards::{EvalRow, Measures, RewardMatrix, RewardSet, Summary, answer, references, summarize};
use omnigrpo_rollout::{Completion, FinishReason, Generator, Request, SamplingParams};
use serde_json::Value;

use crate::error::Result;
use crate::rows::{PreparedRow, SkippedRow, media_paths, reason};
use crate::scoring;

/// What is evaluated and how.
#[derive(Clone)]
pub struct EvalPlan {
    /// Makes prompts. Not those of training, where rows may draw their number of frames.
    pub prompts: Arc<PromptBuilder>,
    /// Rows.
    pub dataset: Arc<Dataset>,
    /// Which of them.
    pub rows: Vec<u64>,
    /// Completions per row.
    pub num_generations: usize,
    /// How they are sampled; greedy for one completion per row.
    pub sampling: SamplingParams,
    /// Rows that are prepared and decoded together; changes memory and speed, never the result.
    pub batch_rows: usize,
    /// Completions decoded at once.
    pub max_live: usize,
    /// Rows are also reported by the value of this column.
    pub category: Option<String>,
    /// What is measured besides the rewards.
    pub measures: Measures,
}

/// The result of an evaluation.
#[derive(Clone, Debug, Default)]
pub struct Evaluation {
    /// The `eval_*` metrics and the tables.
    pub summary: Summary,
    /// Every row.
    pub rows: Vec<EvalRow>,
    /// Rows that could not be used.
    pub skipped: Vec<SkippedRow>,
}

impl Evaluation {
    /// A metric by name.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.summary.metric(name)
    }
}

/// Evaluates a model. `progress` is called with the number of rows just done.
///
/// # Errors
/// As the rollout and the rewards; a row that cannot be used is left out and reported.
pub fn evaluate(
    model: &Model,
    rewards: &RewardSet,
    plan: &EvalPlan,
    progress: &mut dyn FnMut(u64),
) -> Result<Evaluation> {
    let prompts = &plan.prompts;
    let mut out = Evaluation::default();
    let mut tally = Tally::default();
    for batch in plan.rows.chunks(plan.batch_rows.max(1)) {
        let mut rows = Vec::with_capacity(batch.len());
        for &row in batch {
            let made = match plan.dataset.get(row) {
                Ok(sample) => match scoring::applies(rewards, &sample)
                    .and_then(|_| prompts.build(&sample).map_err(|e| e.to_string()))
                {
                    Ok(prompt) => Ok(PreparedRow { sample, prompt: Arc::new(prompt), epoch: 0 }),
                    Err(what) => Err((sample.id, what)),
                },
                Err(e) => Err((plan.dataset.id(row), reason(&e))),
            };
            match made {
                Ok(prepared) => rows.push(prepared),
                Err((id, reason)) => out.skipped.push(SkippedRow { row, id, reason, replaced_by: None }),
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
                first_sample: 0,
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
            tally.add(completions);
            let texts = completions.iter().map(|c| c.text.clone()).collect();
            out.rows.push(eval_row(
                &row.sample,
                texts,
                &matrix,
                span,
                plan.category.as_deref(),
                &plan.measures,
            ));
        }
        progress(batch.len() as u64);
    }
    out.summary = summarize(&out.rows, rewards, &plan.measures)?;
    let metrics = &mut out.summary.metrics;
    metrics.insert(1, ("eval_skipped".into(), Some(out.skipped.len() as f64)));
    metrics.extend(tally.metrics());
    Ok(out)
}

/// A row of the result: `span` of the scores are those of its completions.
#[must_use]
pub fn eval_row(
    sample: &Sample,
    completions: Vec<String>,
    scores: &RewardMatrix,
    span: Range<usize>,
    category: Option<&str>,
    measures: &Measures,
) -> EvalRow {
    let policy = measures.answer_policy;
    let values = scores.names.iter().zip(&scores.values);
    EvalRow {
        id: sample.id.clone(),
        dataset: sample.dataset.to_string(),
        prompt: sample.question(),
        solution: sample.solution.clone(),
        media: media_paths(sample),
        category: category.and_then(|column| sample.columns.get(column)).filter(|v| !v.is_null()).map(plain),
        answers: completions.iter().map(|text| answer(text, policy).map(str::to_owned)).collect(),
        rewards: values.map(|(name, values)| (name.clone(), values[span.clone()].to_vec())).collect(),
        reward: scores.total[span].to_vec(),
        references: references(&sample.columns, sample.solution.as_deref())
            .into_iter()
            .map(str::to_owned)
            .collect(),
        completions,
    }
}

/// Keys evaluation's random numbers apart from every rollout of training.
const EVAL_ROLLOUT: u64 = u64::MAX;

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Lengths of the completions, which the texts do not show.
#[derive(Default)]
struct Tally {
    tokens: usize,
    completions: usize,
    truncated: usize,
}

impl Tally {
    fn add(&mut self, completions: &[Completion]) {
        for completion in completions {
            self.completions += 1;
            self.tokens += completion.ids.len();
            self.truncated += usize::from(completion.finish_reason == FinishReason::Length);
        }
    }

    fn metrics(&self) -> [(String, Option<f64>); 2] {
        let share = |n: usize| (self.completions > 0).then(|| n as f64 / self.completions as f64);
        [
            ("eval_completions/mean_length".into(), share(self.tokens)),
            ("eval_completions/clipped_ratio".into(), share(self.truncated)),
        ]
    }
}
