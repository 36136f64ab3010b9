//! Evaluation: samples completions for held-out rows and scores them with the rewards of training.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use omnigrpo_data::{Dataset, Sample};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_rewards::{EvalRow, Measures, RewardMatrix, RewardSet, Summary, answer, references, summarize};
use omnigrpo_rollout::{
    Completion, FinishReason, GenerateOptions, Generator, Interaction, MAX_LIVE, SamplingParams,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Result, TrainError};
use crate::records::environment_turns;
use crate::rows::{PreparedRow, Ready, SkippedRow, Unusable, media_paths, prepare_all, requests, unreadable};
use crate::saved_turns;
use crate::scoring;
use crate::split::Split;

/// Rows and settings of an evaluation.
#[derive(Clone)]
pub struct EvalPlan {
    /// Builder of the prompts. It differs from the one for training, where the number of frames can be random.
    pub prompts: Arc<PromptBuilder>,
    /// Dataset with the rows.
    pub dataset: Arc<Dataset>,
    /// Row numbers to evaluate.
    pub rows: Vec<u64>,
    /// Environment that answers completions.
    pub interaction: Option<Interaction>,
    /// Sampling settings and measures.
    pub options: EvalOptions,
}

impl EvalPlan {
    /// Creates a plan for all rows of a dataset with one greedy completion each.
    pub fn new(prompts: Arc<PromptBuilder>, dataset: Arc<Dataset>) -> Self {
        let rows = (0..dataset.len()).collect();
        let prompts = match prompts.settings().privileged_context {
            Some(_) => Arc::new(prompts.without_teacher()),
            None => prompts,
        };
        Self { prompts, dataset, rows, interaction: None, options: EvalOptions::default() }
    }
}

/// Settings for sampling completions in an evaluation, and the quantities to measure.
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    /// Returns an error if there are rows and none of them is usable.
    pub(crate) fn usable(&self) -> Result<()> {
        let (true, Some(first)) = (self.rows.is_empty(), self.skipped.first()) else { return Ok(()) };
        Err(TrainError::Data {
            what: format!(
                "none of the {} evaluation rows can be used; row {} (id {}): {}; correct the rows, or run without an \
                 evaluation",
                self.skipped.len(),
                first.row,
                first.id,
                first.reason
            ),
        })
    }

    /// Returns the metric with this name.
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
    /// Number of answered calls of tools, and of those that failed.
    #[serde(default)]
    calls: [usize; 2],
    /// Bit patterns of the line's numbers. Parsing decimals may change the last digit.
    bits: Vec<Option<u64>>,
}

impl Judged {
    fn new(line: EvalRow, completions: &[Completion]) -> Self {
        let numbers = line.rewards.values().flatten().chain(&line.reward);
        Self {
            bits: numbers.map(|number| number.map(f64::to_bits)).collect(),
            references: line.references.clone(),
            tokens: completions.iter().map(Completion::num_sampled).sum(),
            truncated: completions.iter().filter(|c| c.finish_reason == FinishReason::Length).count(),
            calls: [
                completions.iter().map(|c| c.calls).sum(),
                completions.iter().map(|c| c.failed_calls).sum(),
            ],
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
fn evaluate_rest(
    model: &Model,
    rewards: &RewardSet,
    plan: &EvalPlan,
    mut done: BTreeMap<u64, Judged>,
    each: &mut dyn FnMut(Batch<'_>) -> Result<()>,
) -> Result<Evaluation> {
    let mut skipped = Vec::new();
    let rest: Vec<u64> = plan.rows.iter().copied().filter(|row| !done.contains_key(row)).collect();
    for batch in rest.chunks(plan.options.batch_rows.max(1)) {
        let completed = complete(model, rewards, plan, batch)?;
        let samples: Vec<&Sample> = completed.rows.iter().map(|row| &row.sample).collect();
        let judged = judge(rewards, plan, &samples, &completed.completions)?;
        skipped.extend(completed.skipped);
        each(Batch { num_rows: batch.len() as u64, judged: &judged })?;
        done.extend(judged);
    }
    conclude(rewards, plan, done, skipped)
}

/// Evaluates like [`evaluate`] over ranks, without the rows in `done`, which the first rank has. Each rank completes its batches of rows.
/// The first one scores all of them, as one process would. It calls `each` with every batch, and `concluded` with the evaluation. The other
/// ranks get the metrics only.
///
/// # Errors
/// Returns the same error on all ranks if one of them fails, also in `each` or `concluded`.
pub fn evaluate_split(
    split: &Split,
    model: &Model,
    rewards: &RewardSet,
    plan: &EvalPlan,
    mut done: BTreeMap<u64, Judged>,
    each: &mut dyn FnMut(Batch<'_>) -> Result<()>,
    concluded: impl FnOnce(&Evaluation) -> Result<()>,
) -> Result<Evaluation> {
    if split.ranks.size() == 1 {
        let evaluation = evaluate_rest(model, rewards, plan, done, each)?;
        concluded(&evaluation)?;
        return Ok(evaluation);
    }
    let is_done = |row: &u64| done.contains_key(row);
    let rest =
        split.by_first(|| Ok(plan.rows.iter().copied().filter(|row| !is_done(row)).collect::<Vec<_>>()))?;
    let mut skipped = Vec::new();
    // A failure of the first rank reaches the other ranks with the next batch, or at the end.
    let scored = in_batches(
        split,
        &rest,
        plan.options.batch_rows,
        &mut |own| {
            let own = complete(model, rewards, plan, own)?;
            let rows: Vec<u64> = own.rows.iter().map(|row| row.sample.row).collect();
            let completions = own.completions.into_iter().map(saved_turns::sent);
            Ok((rows, completions.collect::<Vec<_>>(), own.skipped))
        },
        &mut |(rows, completions, unusable)| {
            let num_rows = (rows.len() + unusable.len()) as u64;
            let read = |row: u64| plan.dataset.get(row).map_err(|e| unreadable(row, &e));
            let samples = rows.into_iter().map(read).collect::<Result<Vec<_>>>()?;
            let completions: Vec<_> = completions.into_iter().map(saved_turns::received).collect();
            let judged = judge(rewards, plan, &samples.iter().collect::<Vec<_>>(), &completions)?;
            skipped.extend(unusable);
            each(Batch { num_rows, judged: &judged })?;
            done.extend(judged);
            Ok(())
        },
    )?;
    let mut evaluation = None;
    let metrics = split.by_first(|| {
        scored?;
        let own = conclude(rewards, plan, done, skipped)?;
        concluded(&own)?;
        let metrics = own.summary.metrics.clone();
        evaluation = Some(own);
        Ok(metrics)
    })?;
    let others =
        || Evaluation { summary: Summary { metrics, ..Summary::default() }, ..Evaluation::default() };
    Ok(evaluation.unwrap_or_else(others))
}

/// Makes something of rows over ranks, a batch of each rank at a time: `make` on the rank of a batch, then `take` on the first rank, in the
/// order of the rows. Returns the result of the last batches of this rank, which the others do not know of yet.
pub(crate) fn in_batches<T: Serialize + DeserializeOwned>(
    split: &Split,
    rows: &[u64],
    batch_rows: usize,
    make: &mut dyn FnMut(&[u64]) -> Result<T>,
    take: &mut dyn FnMut(T) -> Result<()>,
) -> Result<Result<()>> {
    let (size, ranks) = (batch_rows.max(1), &split.ranks);
    let mut taken = Ok(());
    for batches in rows.chunks(size * ranks.size()) {
        let own = batches.chunks(size).nth(ranks.rank());
        let made = taken.and_then(|()| own.map(&mut *make).transpose()).map(Vec::from_iter);
        let all = split.share(made)?;
        let mut of_all = all.into_iter().flatten().filter(|_| ranks.is_first());
        taken = of_all.try_for_each(&mut *take);
    }
    Ok(taken)
}

/// Rows of a batch with their completions.
struct Completed {
    rows: Vec<PreparedRow>,
    completions: Vec<Vec<Completion>>,
    skipped: Vec<SkippedRow>,
}

/// Samples completions of a batch of rows.
fn complete(model: &Model, rewards: &RewardSet, plan: &EvalPlan, batch: &[u64]) -> Result<Completed> {
    let (prompts, options) = (&plan.prompts, &plan.options);
    let Ready { rows, features, unusable } =
        prepare_all(model, prompts, &plan.dataset, Some(rewards), batch)?;
    let skip = |(row, Unusable { id, reason })| SkippedRow { row, id, reason, replaced_by: None };
    let skipped = unusable.into_iter().map(skip).collect();
    let requests = requests(&rows, &features, options.num_generations, EVAL_ROLLOUT);
    let generator = Generator::new(model, prompts, &options.sampling)
        .with_max_live(options.max_live)
        .with_interaction(plan.interaction.as_ref());
    let generated = generator.generate(requests, GenerateOptions::default())?;
    let completions = generated.into_iter().map(|of| of.completions).collect();
    Ok(Completed { rows, completions, skipped })
}

/// Scores the completions of a batch.
fn judge(
    rewards: &RewardSet,
    plan: &EvalPlan,
    samples: &[&Sample],
    completions: &[Vec<Completion>],
) -> Result<Vec<(u64, Judged)>> {
    let options = &plan.options;
    let pairs: Vec<_> = samples.iter().copied().zip(completions.iter().map(Vec::as_slice)).collect();
    let matrix = scoring::score(rewards, &pairs, options.sampling.seed, 0)?;
    let mut judged = Vec::with_capacity(pairs.len());
    for (r, (sample, completions)) in pairs.into_iter().enumerate() {
        let span = r * options.num_generations..(r + 1) * options.num_generations;
        let texts = completions.iter().map(|c| c.text.clone()).collect();
        let mut line = eval_row(sample, texts, &matrix, span, options.category.as_deref(), &options.measures);
        line.row = plan.dataset.portable_row(sample);
        if completions.iter().any(|completion| !completion.turns.is_empty()) {
            line.completion_turns = completions.iter().map(|own| json!(environment_turns(own))).collect();
        }
        judged.push((sample.row, Judged::new(line, completions)));
    }
    Ok(judged)
}

/// Computes the metrics of all rows.
fn conclude(
    rewards: &RewardSet,
    plan: &EvalPlan,
    mut done: BTreeMap<u64, Judged>,
    skipped: Vec<SkippedRow>,
) -> Result<Evaluation> {
    let options = &plan.options;
    let mut out = Evaluation { skipped, ..Evaluation::default() };
    let (mut tokens, mut truncated, mut completions, mut calls) = (0, 0, 0, [0; 2]);
    for judged in plan.rows.iter().filter_map(|row| done.remove(row)) {
        tokens += judged.tokens;
        truncated += judged.truncated;
        calls.iter_mut().zip(judged.calls).for_each(|(sum, own)| *sum += own);
        completions += judged.line.completions.len();
        out.rows.push(judged.into_line());
    }
    out.summary = summarize(&out.rows, rewards, &options.measures)?;
    let metrics = &mut out.summary.metrics;
    metrics.insert(1, ("eval_skipped".into(), Some(out.skipped.len() as f64)));
    let share = |n: usize| (completions > 0).then(|| n as f64 / completions as f64);
    metrics.push(("eval_completions/mean_length".into(), share(tokens)));
    metrics.push(("eval_completions/clipped_ratio".into(), share(truncated)));
    if options.sampling.turns.is_some() {
        metrics.push(("eval_tools/call_frequency".into(), share(calls[0])));
        let failed = calls[1] as f64 / calls[0].max(1) as f64;
        metrics.push(("eval_tools/failure_frequency".into(), Some(failed)));
    }
    Ok(out)
}

/// Returns the result of a row without the columns of its dataset. `span` is the range of its completions in `scores`.
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
        answers: completions.iter().map(|text| answer(text, policy).map(Cow::into_owned)).collect(),
        rewards: values.map(|(name, values)| (name.clone(), values[span.clone()].to_vec())).collect(),
        reward: scores.total[span].to_vec(),
        references: references(&sample.columns, sample.solution.as_deref())
            .into_iter()
            .map(str::to_owned)
            .collect(),
        row: Map::new(),
        completion_turns: Vec::new(),
        completions,
    }
}

/// Rollout number of evaluations. It separates their random numbers from those of every rollout in training.
const EVAL_ROLLOUT: u64 = u64::MAX;

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
