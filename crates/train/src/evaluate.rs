//! Evaluation: completions on held-out rows, scored by the same rewards.

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
    /// Makes prompts. Not those of training, where rows may draw their number of frames.
    pub prompts: Arc<PromptBuilder>,
    /// Rows.
    pub dataset: Arc<Dataset>,
    /// Which of them.
    pub rows: Vec<u64>,
    /// How.
    pub options: EvalOptions,
}

impl EvalPlan {
    /// All rows of a dataset, one greedy completion each.
    #[must_use]
    pub fn new(prompts: Arc<PromptBuilder>, dataset: Arc<Dataset>) -> Self {
        let rows = (0..dataset.len()).collect();
        Self { prompts, dataset, rows, options: EvalOptions::default() }
    }
}

/// How completions are sampled in an evaluation and what is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalOptions {
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
    /// Measures beside the rewards.
    pub measures: Measures,
}

impl Default for EvalOptions {
    /// One greedy completion a row.
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

/// A row that has been evaluated. It can be written down and taken up again: numbers come back as they were.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Judged {
    line: EvalRow,
    references: Vec<String>,
    tokens: usize,
    truncated: usize,
    /// The line's numbers, bit for bit, since reading decimals may miss the last one.
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
/// `progress` is called with the number of rows just done.
///
/// # Errors
/// As the rollout and the rewards; a row that cannot be used is left out and reported.
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

/// Rows that were just evaluated.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Rows of the dataset, those that could not be used included.
    pub num_rows: u64,
    /// Usable rows, by number.
    pub judged: &'a [(u64, Judged)],
}

/// Evaluates as [`evaluate`] does, without the rows that are done already. `each` sees every batch of the others as soon as it is scored.
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

/// A row of the result, without the columns it was made from: `span` of the scores are those of its completions.
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

/// Keys evaluation's random numbers apart from every rollout of training.
const EVAL_ROLLOUT: u64 = u64::MAX;

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
