//! Evaluation: samples completions for held-out rows and scores them with the rewards of training.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use omnigrpo_data::{Dataset, Sample};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_rewards::{EvalRow, Measures, RewardMatrix, RewardSet, Summary, answer, references, summarize};
use omnigrpo_rollout::{Completion, FinishReason, Generator, SamplingParams};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::Result;
use crate::rows::{Ready, SkippedRow, Unusable, media_paths, prepare_all, requests};
use crate::scoring;
use crate::step::MAX_LIVE;

/// Rows and settings of an evaluation.
#[derive(Clone)]
pub struct EvalPlan {
    /// Builder of the prompts. It differs from the one for training, where the number of frames can be random.
    pub prompts: Arc<PromptBuilder>,
    /// Dataset with the rows.
    pub dataset: Arc<Dataset>,
    /// Row numbers to evaluate.
    pub rows: Vec<u64>,
    /// Sampling settings and measures.
    pub options: EvalOptions,
}

impl EvalPlan {
    /// Creates a plan for all rows of a dataset with one greedy completion each.
    #[must_use]
    pub fn new(prompts: Arc<PromptBuilder>, dataset: Arc<Dataset>) -> Self {
        let rows = (0..dataset.len()).collect();
        Self { prompts, dataset, rows, options: EvalOptions::default() }
    }
}

/// Settings for sampling completions in an evaluation, and the quantities to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalOptions {
    /// Completions per row.
    pub num_generations: usize,
    /// Sampling settings; greedy by default.
    pub sampling: SamplingParams,
    /// Number of rows that are prepared and decoded together. It affects memory and speed but not the result.
    pub batch_rows: usize,
    /// Maximum number of completions decoded at the same time.
    pub max_live: usize,
    /// Column by whose values results are also reported.
    pub category: Option<String>,
    /// Measures in addition to the rewards.
    pub measures: Measures,
}

impl Default for EvalOptions {
    /// Returns settings for one greedy completion per row.
    fn default() -> Self {
        Self {
            num_generations: 1,
            sampling: SamplingParams::greedy(),
            batch_rows: 8,
            max_live: MAX_LIVE,
            category: None,
            measures: Measures::default(),
        }
    }
}

/// Result of an evaluation.
#[derive(Clone, Debug, Default)]
pub struct Evaluation {
    /// `eval_*` metrics and tables.
    pub summary: Summary,
    /// Results by row.
    pub rows: Vec<EvalRow>,
    /// Rows that could not be used.
    pub skipped: Vec<SkippedRow>,
}

impl Evaluation {
    /// Returns the metric with this name.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.summary.metric(name)
    }
}

/// Evaluated row. It can be serialized and restored without changing any number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Judged {
    line: EvalRow,
    references: Vec<String>,
    tokens: usize,
    truncated: usize,
    /// Bit patterns of the line's numbers. Parsing decimals may change the last digit.
    bits: Vec<Option<u64>>,
}

impl Judged {
    fn new(line: EvalRow, completions: &[Completion]) -> Self {
        let numbers = line.rewards.values().flatten().chain(&line.reward);
        Self {
            bits: numbers.map(|number| number.map(f64::to_bits)).collect(),
            references: line.references.clone(),
            tokens: completions.iter().map(|c| c.ids.len()).sum(),
            truncated: completions.iter().filter(|c| c.finish_reason == FinishReason::Length).count(),
            line,
        }
    }

    fn into_line(self) -> EvalRow {
        let Self { mut line, references, bits, .. } = self;
        line.references = references;
        let numbers = line.rewards.values_mut().flatten().chain(&mut line.reward);
        numbers.zip(bits).for_each(|(number, bits)| *number = bits.map(f64::from_bits));
        line
    }
}

/// Evaluates a model.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use omnigrpo_data::Dataset;
/// use omnigrpo_models::{Model, PromptBuilder};
/// use omnigrpo_rewards::{RewardOptions, build};
/// use omnigrpo_train::{EvalPlan, TrainError, evaluate};
///
/// fn accuracy(model: &Model, prompts: PromptBuilder, rows: Dataset) -> Result<Option<f64>, TrainError> {
///     let rewards = build(&["accuracy"], &RewardOptions::default())?;
///     let plan = EvalPlan::new(Arc::new(prompts), Arc::new(rows));
///     Ok(evaluate(model, &rewards, &plan, &mut |_| {})?.metric("eval_rewards/accuracy/mean"))
/// }
/// ```
///
/// `progress` is called after every batch with the number of its rows. Unusable rows are left out and reported.
///
/// # Errors
/// Returns an error if sampling or a reward fails.
pub fn evaluate(
    model: &Model,
    rewards: &RewardSet,
    plan: &EvalPlan,
    progress: &mut dyn FnMut(u64),
) -> Result<Evaluation> {
    evaluate_rest(model, rewards, plan, BTreeMap::new(), &mut |batch| {
        progress(batch.num_rows);
        Ok(())
    })
}

/// Batch of rows that were just evaluated.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Number of rows in the batch, including unusable rows.
    pub num_rows: u64,
    /// Usable rows with their row numbers.
    pub judged: &'a [(u64, Judged)],
}

/// Evaluates like [`evaluate`] but skips the rows in `done`. `each` is called with every batch of the remaining rows once it is
/// scored.
pub fn evaluate_rest(
    model: &Model,
    rewards: &RewardSet,
    plan: &EvalPlan,
    mut done: BTreeMap<u64, Judged>,
    each: &mut dyn FnMut(Batch<'_>) -> Result<()>,
) -> Result<Evaluation> {
    let (prompts, options) = (&plan.prompts, &plan.options);
    let mut out = Evaluation::default();
    let rest: Vec<u64> = plan.rows.iter().copied().filter(|row| !done.contains_key(row)).collect();
    for batch in rest.chunks(options.batch_rows.max(1)) {
        let Ready { rows, features, unusable } =
            prepare_all(model, prompts, &plan.dataset, Some(rewards), batch)?;
        let skip = |(row, Unusable { id, reason })| SkippedRow { row, id, reason, replaced_by: None };
        out.skipped.extend(unusable.into_iter().map(skip));
        let requests = requests(&rows, &features, options.num_generations, EVAL_ROLLOUT);
        let generator = Generator::new(model, prompts, &options.sampling, options.max_live);
        let completions = generator.generate(&requests, |_| {})?;
        let matrix = scoring::score(rewards, &scoring::pairs(&rows, &completions), options.sampling.seed, 0)?;
        let mut judged = Vec::with_capacity(rows.len());
        for (r, (row, completions)) in rows.iter().zip(&completions).enumerate() {
            let span = r * options.num_generations..(r + 1) * options.num_generations;
            let texts = completions.iter().map(|c| c.text.clone()).collect();
            let mut line =
                eval_row(&row.sample, texts, &matrix, span, options.category.as_deref(), &options.measures);
            line.row = plan.dataset.portable_row(&row.sample);
            judged.push((row.sample.row, Judged::new(line, completions)));
        }
        each(Batch { num_rows: batch.len() as u64, judged: &judged })?;
        done.extend(judged);
    }
    let (mut tokens, mut truncated, mut completions) = (0, 0, 0);
    for judged in plan.rows.iter().filter_map(|row| done.remove(row)) {
        tokens += judged.tokens;
        truncated += judged.truncated;
        completions += judged.line.completions.len();
        out.rows.push(judged.into_line());
    }
    out.summary = summarize(&out.rows, rewards, &options.measures)?;
    let metrics = &mut out.summary.metrics;
    metrics.insert(1, ("eval_skipped".into(), Some(out.skipped.len() as f64)));
    let share = |n: usize| (completions > 0).then(|| n as f64 / completions as f64);
    metrics.push(("eval_completions/mean_length".into(), share(tokens)));
    metrics.push(("eval_completions/clipped_ratio".into(), share(truncated)));
    Ok(out)
}

/// Returns the result of a row without the columns of its dataset. `span` is the range of its completions in `scores`.
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
        row: Map::new(),
        completions,
    }
}

/// Rollout number of evaluations. It separates their random numbers from those of every rollout in training.
const EVAL_ROLLOUT: u64 = u64::MAX;

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
