//! Evaluation of scored completions: accuracy with its interval, pass@k, means of the rewards, share of unreadable answers,
//! tables by category, classification by labels, and scores of explanations.
//!
//! Rows come from a model (`eval`, or during training) or from a file of completions (`rewards run`). Both give the same numbers.

mod explanations;
mod labels;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::answer::{MAX_ANSWER_CHARS, golds, marked, said, same_label};
use crate::latex::bare;
use crate::tags::content;
use crate::{AnswerPolicy, RewardError, RewardSet};

pub use explanations::{Explained, ExplanationReport, MEASURES, TextScores, explanations};
pub use labels::{Confusion, LabelSet};

/// Rewards that judge the correctness of an answer. The first one that a run uses counts.
const ANSWER_REWARDS: &[&str] = &[
    "accuracy",
    "label",
    "emotion",
    "mcq",
    "mcq_iou",
    "yes_no",
    "short_text",
    "math",
    "iou",
    "temporal_iou",
    "od_ap",
    "od_ap50",
    "odLength",
    "weighted_sum",
    "all_match",
    "fuzzy",
];

/// Measures of an evaluation, in addition to the rewards.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Measures {
    /// Choice among several answer tags.
    pub answer_policy: AnswerPolicy,
    /// Share of the accuracy reward's largest value from which an answer is correct.
    pub accuracy_threshold: f64,
    /// Labels of the classification, if any.
    pub labels: Labels,
}

impl Default for Measures {
    fn default() -> Self {
        Self { answer_policy: AnswerPolicy::Last, accuracy_threshold: 1.0, labels: Labels::None }
    }
}

/// The labels of a classification.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub enum Labels {
    /// No classification.
    None,
    /// Labels that occur as ground truths of the rows.
    OfGroundTruths,
    /// Given labels.
    Given(LabelSet),
}

/// A row with its scored completions, which is a line of the result file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EvalRow {
    /// Id of the row.
    pub id: String,
    /// Dataset of the row.
    pub dataset: String,
    /// The question.
    pub prompt: String,
    /// Ground truth.
    pub solution: Option<String>,
    /// Media files of the row.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<PathBuf>,
    /// Value of the category column.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<String>,
    /// Sampled texts.
    pub completions: Vec<String>,
    /// Turns of an environment in each completion, in the form of rollout logs; empty if no completion has any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub completion_turns: Vec<Value>,
    /// Answer that each completion marks with a tag or `\boxed{…}`; `None` without an answer.
    pub answers: Vec<Option<String>>,
    /// Value of each reward per completion.
    pub rewards: BTreeMap<String, Vec<Option<f64>>>,
    /// Weighted sum per completion.
    pub reward: Vec<Option<f64>>,
    /// Columns of the row. Other commands use them to read this line as the row with its completions.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub row: Map<String, Value>,
    /// References of the row's explanation.
    #[serde(skip)]
    pub references: Vec<String>,
}

impl EvalRow {
    /// Returns the values of a reward where it applies.
    fn values(&self, reward: &str) -> impl Iterator<Item = f64> + '_ {
        self.rewards.get(reward).into_iter().flatten().flatten().copied()
    }
}

/// Returns the answer that a completion marks with a tag or with `\\boxed{…}`, without LaTeX around it, or `None` if it is empty.
pub fn answer(completion: &str, policy: AnswerPolicy) -> Option<Cow<'_, str>> {
    marked(completion, policy).filter(|text| !text.is_empty())
}

/// One line of the table by category.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Category {
    /// The category.
    pub name: String,
    /// Number of rows.
    pub rows: usize,
    /// Share of correct answers.
    pub accuracy: Option<f64>,
    /// Share of completions without an answer.
    pub parse_fail_rate: Option<f64>,
    /// Mean of each reward, in the order of the rewards.
    pub means: Vec<Option<f64>>,
}

/// Results of an evaluation.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Metrics by name; `None` if there is nothing to measure.
    pub metrics: Vec<(String, Option<f64>)>,
    /// Names of the rewards, in order.
    pub reward_names: Vec<String>,
    /// Results by category, sorted.
    pub categories: Vec<Category>,
    /// Results by label.
    pub confusion: Option<Confusion>,
    /// Scores of explanations.
    pub explanations: Option<ExplanationReport>,
    /// 95 % interval of `eval_accuracy`.
    pub accuracy_interval: Option<(f64, f64)>,
    /// 95 % interval of `eval_reward` over rows; `None` with fewer than two rows.
    pub reward_interval: Option<(f64, f64)>,
    /// True if the reward of each row is 0 or 1, so that `eval_reward` is a share of the rows.
    pub reward_is_share: bool,
}

impl Summary {
    /// Returns a metric by name.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(n, _)| n == name).and_then(|(_, v)| *v)
    }

    /// Returns everything as a JSON object: the metrics, the tables under `categories` and `confusion`, and the intervals under
    /// `accuracy_interval` and `reward_interval`.
    pub fn to_json(&self) -> serde_json::Value {
        let mut out: serde_json::Map<String, serde_json::Value> =
            self.metrics.iter().map(|(name, value)| (name.clone(), serde_json::json!(value))).collect();
        if let Some((low, high)) = self.accuracy_interval {
            out.insert("accuracy_interval".to_owned(), serde_json::json!([low, high]));
        }
        if let Some((low, high)) = self.reward_interval {
            out.insert("reward_interval".to_owned(), serde_json::json!([low, high]));
            out.insert("reward_is_share".to_owned(), self.reward_is_share.into());
        }
        if !self.categories.is_empty() {
            let table = self.categories.iter().map(|category| {
                let means: BTreeMap<_, _> = self.reward_names.iter().zip(&category.means).collect();
                serde_json::json!({
                    "category": category.name, "rows": category.rows, "accuracy": category.accuracy,
                    "parse_fail_rate": category.parse_fail_rate, "rewards": means,
                })
            });
            out.insert("categories".to_owned(), table.collect());
        }
        if let Some(confusion) = &self.confusion {
            out.insert("confusion".to_owned(), serde_json::json!(confusion));
        }
        serde_json::Value::Object(out)
    }
}

/// Summarises scored rows. If they come from several datasets, there are also metrics of each, `eval_{dataset}_reward` and so on.
///
/// # Errors
/// Returns an error if the labels do not form a valid set.
pub fn summarize(rows: &[EvalRow], rewards: &RewardSet, measures: &Measures) -> Result<Summary, RewardError> {
    let names: Vec<String> = rewards.names().iter().map(|&name| name.to_owned()).collect();
    let judge = Judge::new(rewards, measures.accuracy_threshold);
    let total = mean(rows.iter().flat_map(|row| row.reward.iter().copied().flatten()));
    let mut metrics: Vec<(String, Option<f64>)> = vec![
        ("eval_rows".into(), Some(rows.len() as f64)),
        ("eval_reward".into(), total),
        ("eval_total_reward".into(), total),
        ("eval_parse_fail_rate".into(), parse_fail_rate(rows)),
    ];
    let mut accuracy_interval = None;
    if let Some(judge) = &judge {
        let counts: Vec<(usize, usize)> = rows.iter().filter_map(|row| judge.count(row)).collect();
        let accuracy = judge.accuracy(rows);
        metrics.push(("eval_accuracy".into(), accuracy));
        accuracy_interval = accuracy.map(|p| wilson_interval(p, counts.len()));
        // Rows may have different numbers of completions. The smallest number limits k.
        let samples = counts.iter().map(|&(n, _)| n).min().unwrap_or(0);
        let mut k = 1;
        while samples > 1 && k <= samples {
            let all = counts.iter().map(|&(n, right)| pass_at_k(n, right, k));
            metrics.push((format!("eval_pass@{k}"), mean(all)));
            k = if k < samples { (2 * k).min(samples) } else { k + 1 };
        }
    }
    let many = rows.iter().any(|row| row.completions.len() > 1);
    for name in &names {
        let values = || rows.iter().flat_map(|row| row.values(name));
        metrics.push((format!("eval_rewards/{name}/mean"), mean(values())));
        if ["accuracy", "format"].contains(&name.as_str()) {
            // These are the names of qwen-vl-finetune's GRPO trainer, like `eval_total_reward` above.
            metrics.push((format!("eval_{name}_reward"), mean(values())));
        }
        if many {
            let best = rows.iter().filter_map(|row| row.values(name).reduce(f64::max));
            metrics.push((format!("eval_rewards/{name}/best_of_n"), mean(best)));
        }
    }
    let datasets: BTreeSet<&str> = rows.iter().map(|row| row.dataset.as_str()).collect();
    // These three are names of metrics above.
    let is_taken = |dataset: &str| ["accuracy", "format", "total"].contains(&dataset);
    for dataset in datasets.iter().filter(|dataset| datasets.len() > 1 && !is_taken(dataset)) {
        let own = || rows.iter().filter(|row| row.dataset == **dataset);
        let mut add = |name: &str, value| metrics.push((format!("eval_{dataset}_{name}"), value));
        add("rows", Some(own().count() as f64));
        add("reward", mean(own().flat_map(|row| row.reward.iter().copied().flatten())));
        if let Some(judge) = &judge {
            add("accuracy", judge.accuracy(own()));
        }
        for name in &names {
            add(&format!("rewards/{name}/mean"), mean(own().flat_map(|row| row.values(name))));
        }
    }
    let confusion = confusion(rows, measures)?;
    if let Some(confusion) = &confusion {
        metrics.push(("eval_war".into(), confusion.war()));
        metrics.push(("eval_uar".into(), confusion.uar()));
    }
    let of_row = |row: &EvalRow| mean(row.reward.iter().copied().flatten());
    let row_rewards: Vec<f64> = rows.iter().filter_map(of_row).collect();
    let explanations = explained(rows);
    for (view, scores) in explanations.iter().flat_map(ExplanationReport::views) {
        for (measure, score) in MEASURES.iter().zip(scores) {
            metrics.push((format!("eval_explanation/{view}/{measure}"), *score));
        }
    }
    Ok(Summary {
        metrics,
        categories: by_category(rows, &names, judge.as_ref()),
        reward_names: names,
        confusion,
        explanations,
        accuracy_interval,
        reward_interval: mean_interval(&row_rewards),
        reward_is_share: is_share(&row_rewards),
    })
}

fn is_share(values: &[f64]) -> bool {
    values.iter().all(|value| [0.0, 1.0].contains(value))
}

/// Returns the 95 % interval of the mean of numbers: Wilson's if all are 0 or 1, otherwise the normal approximation. `None` with fewer
/// than two numbers.
pub fn mean_interval(values: &[f64]) -> Option<(f64, f64)> {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    if values.len() < 2 {
        return None;
    }
    if is_share(values) {
        return Some(wilson_interval(mean, values.len()));
    }
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let half = Z * (squares / (count - 1.0) / count).sqrt();
    Some((mean - half, mean + half))
}

/// Quantile of the normal distribution for 95 %.
const Z: f64 = 1.959_963_984_540_054;

/// Returns the reward of a run that judges answers, and its value for a correct one. The value is the upper end of the range, or
/// 1 for a program or endpoint that declares no bound. Of several such rewards, the first of the table wins.
pub fn answer_reward(rewards: &RewardSet) -> Option<(&'static str, f64)> {
    let names = rewards.names();
    let name = ANSWER_REWARDS.iter().copied().find(|name| names.contains(name))?;
    let (_, best) = rewards.range_of(name)?;
    Some((name, if best.is_finite() { best } else { 1.0 }))
}

/// Rule that decides which completions are correct.
struct Judge<'a> {
    reward: &'a str,
    from: f64,
}

impl<'a> Judge<'a> {
    /// Uses the first reward that judges answers, if there is one.
    fn new(rewards: &RewardSet, threshold: f64) -> Option<Judge<'static>> {
        let (reward, best) = answer_reward(rewards)?;
        Some(Judge { reward, from: threshold * best - 1e-9 })
    }

    /// Returns the number of judged and of correct completions, or `None` if the reward does not apply.
    fn count(&self, row: &EvalRow) -> Option<(usize, usize)> {
        let judged: Vec<f64> = row.values(self.reward).collect();
        let right = judged.iter().filter(|&&value| value >= self.from).count();
        (!judged.is_empty()).then_some((judged.len(), right))
    }

    /// Returns the mean over the rows of their share of correct completions.
    fn accuracy<'r>(&self, rows: impl IntoIterator<Item = &'r EvalRow>) -> Option<f64> {
        mean(rows.into_iter().filter_map(|row| self.count(row)).map(|(n, right)| right as f64 / n as f64))
    }
}

fn confusion(rows: &[EvalRow], measures: &Measures) -> Result<Option<Confusion>, RewardError> {
    let truth = |row: &'_ EvalRow| -> Option<String> {
        let solution = row.solution.as_deref()?;
        // The first accepted answer stands for all of them.
        let text =
            golds(solution, measures.answer_policy).and_then(|all| all.into_iter().next()).unwrap_or_else(
                || bare(content(solution, "answer", measures.answer_policy).unwrap_or(solution)).into_owned(),
            );
        // Longer texts are not labels, and comparing them would waste time.
        (text.len() <= MAX_ANSWER_CHARS).then_some(text)
    };
    let found;
    let labels = match &measures.labels {
        Labels::None => return Ok(None),
        Labels::Given(labels) => labels,
        Labels::OfGroundTruths => {
            let texts: Vec<String> = rows.iter().filter_map(truth).collect();
            found = LabelSet::of_ground_truths(texts.iter().map(String::as_str))?;
            &found
        }
    };
    let mut confusion = Confusion::new(labels);
    for row in rows {
        let truth = truth(row).unwrap_or_default();
        let golds = row.solution.as_deref().and_then(|solution| golds(solution, measures.answer_policy));
        for completion in &row.completions {
            let said = said(completion, measures.answer_policy);
            let accepted = golds.iter().flatten().any(|gold| same_label(&said, gold));
            confusion.add(labels, &truth, if accepted { &truth } else { &said });
        }
    }
    Ok(Some(confusion))
}

/// Name of the reward that is reported with the measures of explanations.
const BERT_SCORE: &str = "bertscore";

fn explained(rows: &[EvalRow]) -> Option<ExplanationReport> {
    let of_row = |row: &'_ EvalRow, sample: usize| *row.rewards.get(BERT_SCORE)?.get(sample)?;
    let items: Vec<Explained<'_>> = rows
        .iter()
        .filter(|row| !row.references.is_empty())
        .flat_map(|row| {
            row.completions.iter().enumerate().map(move |(sample, completion)| Explained {
                completion,
                references: &row.references,
                solution: row.solution.as_deref().unwrap_or_default(),
                bert_score: of_row(row, sample),
            })
        })
        .collect();
    explanations(&items)
}

fn by_category(rows: &[EvalRow], names: &[String], judge: Option<&Judge<'_>>) -> Vec<Category> {
    let mut groups: BTreeMap<&str, Vec<&EvalRow>> = BTreeMap::new();
    for row in rows {
        if let Some(category) = &row.category {
            groups.entry(category).or_default().push(row);
        }
    }
    let line = |(name, rows): (&str, Vec<&EvalRow>)| Category {
        name: name.to_owned(),
        rows: rows.len(),
        accuracy: judge.and_then(|judge| judge.accuracy(rows.iter().copied())),
        parse_fail_rate: parse_fail_rate(rows.iter().copied()),
        means: names.iter().map(|name| mean(rows.iter().flat_map(|row| row.values(name)))).collect(),
    };
    groups.into_iter().map(line).collect()
}

fn parse_fail_rate<'r>(rows: impl IntoIterator<Item = &'r EvalRow>) -> Option<f64> {
    mean(rows.into_iter().flat_map(|row| &row.answers).map(|answer| f64::from(answer.is_none())))
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut num) = (0.0, 0usize);
    for value in values {
        sum += value;
        num += 1;
    }
    (num > 0).then(|| sum / num as f64)
}

/// Returns the probability that a draw of `k` from `n` completions, of which `right` are correct, contains a correct one:
/// 1 - C(n-right, k) / C(n, k). This is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374). `k` is at most `n`.
pub fn pass_at_k(n: usize, right: usize, k: usize) -> f64 {
    if n < right + k {
        return 1.0;
    }
    1.0 - ((n - right + 1)..=n).map(|i| 1.0 - k as f64 / i as f64).product::<f64>()
}

/// Returns the 95 % Wilson interval of a share `p` that was observed in `n` trials.
pub fn wilson_interval(p: f64, n: usize) -> (f64, f64) {
    if n == 0 {
        return (0.0, 1.0);
    }
    let n = n as f64;
    let centre = (p + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z / (1.0 + Z * Z / n) * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    ((centre - half).max(0.0), (centre + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;
    use crate::{RewardInput, RewardOptions, RowKey, Think, build, references};

    fn rows(rewards: &RewardSet, given: &[(&str, &str, serde_json::Value, &[&str])]) -> Vec<EvalRow> {
        let row = |(i, (category, solution, columns, completions)): (
            usize,
            &(&str, &str, serde_json::Value, &[&str]),
        )| {
            let columns: Map<String, serde_json::Value> = columns.as_object().cloned().unwrap_or_default();
            let inputs: Vec<RewardInput<'_>> = completions
                .iter()
                .map(|completion| RewardInput {
                    prompt: "q",
                    turns: &[],
                    completion,
                    completion_ids: &[],
                    solution: Some(solution),
                    columns: &columns,
                    think: Think::On,
                    media_paths: &[],
                    media: &[],
                    key: RowKey { seed: 0, step: 0, row: i as u64, sample: 0 },
                    truncated: false,
                    added_turns: 0,
                    is_text: false,
                })
                .collect();
            let matrix = rewards.score(&inputs).unwrap();
            EvalRow {
                id: i.to_string(),
                dataset: "d".into(),
                prompt: "q".into(),
                solution: Some((*solution).to_owned()),
                media: vec![],
                category: Some((*category).to_owned()),
                completions: completions.iter().map(|&c| c.to_owned()).collect(),
                answers: completions
                    .iter()
                    .map(|c| answer(c, AnswerPolicy::Last).map(Cow::into_owned))
                    .collect(),
                rewards: matrix.names.iter().cloned().zip(matrix.values).collect(),
                reward: matrix.total,
                row: Map::new(),
                completion_turns: Vec::new(),
                references: references(&columns, Some(solution)).into_iter().map(str::to_owned).collect(),
            }
        };
        given.iter().enumerate().map(row).collect()
    }

    fn near(summary: &Summary, name: &str, expected: f64) {
        let got = summary.metric(name).unwrap_or_else(|| panic!("no {name} in {:?}", summary.metrics));
        assert!((got - expected).abs() < 1e-9, "{name}: {got} {expected}");
    }

    #[test]
    fn several_samples_give_pass_at_k_and_means() {
        let rewards = build(&["accuracy", "format"], &RewardOptions::default()).unwrap();
        let good = "<think>t</think><answer>cat</answer>";
        let rows = rows(
            &rewards,
            &[
                ("a", "cat", json!({}), &[good, "<answer>dog</answer>", "<answer>cat</answer>", "cat"]),
                ("a", "dog", json!({}), &[good, good, good, "<answer></answer>"]),
                ("b", "cat", json!({}), &[good; 4]),
            ],
        );
        let summary = summarize(&rows, &rewards, &Measures::default()).unwrap();
        // Correct: 3 of 4 (an answer without a tag is read from the text), 0 of 4, 4 of 4.
        near(&summary, "eval_accuracy", (0.75 + 0.0 + 1.0) / 3.0);
        near(&summary, "eval_pass@1", (0.75 + 0.0 + 1.0) / 3.0);
        // 1 - C(1, 2)/C(4, 2) is 1.
        near(&summary, "eval_pass@2", 2.0 / 3.0);
        near(&summary, "eval_pass@4", 2.0 / 3.0);
        assert_eq!(summary.metric("eval_pass@3"), None);
        near(&summary, "eval_parse_fail_rate", 2.0 / 12.0);
        near(&summary, "eval_rewards/format/mean", 8.0 / 12.0);
        near(&summary, "eval_format_reward", 8.0 / 12.0);
        near(&summary, "eval_rewards/accuracy/best_of_n", 2.0 / 3.0);
        near(&summary, "eval_total_reward", (7.0 + 8.0) / 12.0);
        let [a, b] = &summary.categories[..] else { panic!("{:?}", summary.categories) };
        assert_eq!(
            (a.name.as_str(), a.rows, a.accuracy, a.parse_fail_rate),
            ("a", 2, Some(0.375), Some(0.25))
        );
        assert_eq!((b.rows, b.accuracy, b.parse_fail_rate), (1, Some(1.0), Some(0.0)));
        assert_eq!(b.means, [Some(1.0), Some(1.0)]);
        let json = summary.to_json();
        assert_eq!(json["categories"][1]["rewards"]["format"], 1.0);
        assert_eq!(json["accuracy_interval"].as_array().map(Vec::len), Some(2));
    }

    #[test]
    fn a_threshold_makes_overlaps_right() {
        let rewards = build(&["iou"], &RewardOptions::default()).unwrap();
        let rows = rows(
            &rewards,
            &[
                ("", "[0,0,10,10]", json!({}), &["<answer>[0,0,10,8]</answer>"]),
                ("", "[0,0,10,10]", json!({}), &["<answer>[0,0,10,4]</answer>"]),
                ("", "no box", json!({}), &["<answer>[0,0,10,4]</answer>"]),
            ],
        );
        let with = |accuracy_threshold| {
            summarize(&rows, &rewards, &Measures { accuracy_threshold, ..Measures::default() }).unwrap()
        };
        near(&with(0.5), "eval_accuracy", 0.5);
        near(&with(1.0), "eval_accuracy", 0.0);
        near(&with(0.5), "eval_rewards/iou/mean", 0.6);
        assert_eq!(with(0.5).metric("eval_iou_reward"), None);
    }

    #[test]
    fn labels_and_explanations_are_measured_where_there_are_any() {
        let rewards = build(&["emotion"], &RewardOptions::default()).unwrap();
        let rows = rows(
            &rewards,
            &[
                (
                    "",
                    "<answer>happy</answer>",
                    json!({"explanations": ["she smiles", "a wide smile"]}),
                    &["<answer>joy</answer><explain>she smiles</explain>"],
                ),
                ("", "sad", json!({}), &["<answer>happy</answer>"]),
            ],
        );
        let measures = Measures { labels: Labels::OfGroundTruths, ..Measures::default() };
        let summary = summarize(&rows, &rewards, &measures).unwrap();
        assert_eq!(summary.confusion.as_ref().unwrap().labels, ["happy", "sad"]);
        assert_eq!(summary.confusion.as_ref().unwrap().counts, [vec![1, 0, 0], vec![1, 0, 0]]);
        near(&summary, "eval_war", 0.5);
        near(&summary, "eval_uar", 0.5);
        near(&summary, "eval_explanation/unfiltered/ROUGE_L", 100.0);
        // By the source's exact rule, "joy" is not "happy".
        near(&summary, "eval_explanation/filtered/ROUGE_L", 0.0);
        assert_eq!(summary.metric("eval_explanation/filtered/BERTScore_F1"), None);
        let none = summarize(&rows[1..], &rewards, &Measures::default()).unwrap();
        assert!(none.confusion.is_none() && none.explanations.is_none());
    }

    /// Every metric reads an answer without a tag in the same way as the accuracy.
    #[test]
    fn accuracy_and_recall_read_answers_alike() {
        let rewards = build(&["accuracy"], &RewardOptions::default()).unwrap();
        let rows = rows(
            &rewards,
            &[
                ("", "yes", json!({}), &["yes"]),
                ("", "no", json!({}), &["<think>yes?</think>No."]),
                ("", "yes", json!({}), &["<answer></answer>yes"]),
                ("", "no", json!({}), &["<answer>no</answer>"]),
            ],
        );
        let measures = Measures { labels: Labels::OfGroundTruths, ..Measures::default() };
        let summary = summarize(&rows, &rewards, &measures).unwrap();
        near(&summary, "eval_accuracy", 0.75);
        near(&summary, "eval_war", 0.75);
        near(&summary, "eval_uar", 0.75);
        near(&summary, "eval_parse_fail_rate", 0.75);
    }

    /// Values of the estimator's paper's formula with exact fractions.
    #[test]
    fn pass_at_k_is_unbiased() {
        for (n, right, k, expected) in [
            (4, 1, 1, 0.25),
            (4, 1, 2, 0.5),
            (5, 2, 3, 0.9),
            (10, 3, 4, 1.0 - 35.0 / 210.0),
            (3, 0, 3, 0.0),
            (3, 3, 1, 1.0),
            (200, 5, 100, 1.0 - 9_034_502_400.0 / 304_278_004_800.0),
        ] {
            let got = pass_at_k(n, right, k);
            assert!((got - expected).abs() < 1e-12, "{n} {right} {k}: {got}");
        }
    }

    /// Newcombe (1998), table I: 15 of 148.
    #[test]
    fn the_interval_of_a_mean_goes_by_its_values() {
        assert_eq!(mean_interval(&[0.0, 1.0, 1.0, 0.0]), Some(wilson_interval(0.5, 4)));
        // Mean 2, deviation 1, error 1/√3.
        let (low, high) = mean_interval(&[1.0, 2.0, 3.0]).unwrap();
        assert!((high - 2.0 - 1.959_964 / 3f64.sqrt()).abs() < 1e-6 && (low + high - 4.0).abs() < 1e-12);
        assert_eq!((mean_interval(&[1.0]), mean_interval(&[])), (None, None));
    }

    #[test]
    fn the_interval_is_wilsons() {
        let (low, high) = wilson_interval(15.0 / 148.0, 148);
        assert!((low - 0.0624).abs() < 5e-5 && (high - 0.1605).abs() < 5e-5, "{low} {high}");
    }
}
