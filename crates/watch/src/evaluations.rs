//! Evaluations of a run: their results, and a comparison of each question between two evaluations.

use std::collections::HashMap;
use std::io::Read as _;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Error;
use crate::index::{Entry, Index, Indices, line_at};
use crate::media::{self, Medium};
use crate::run::Run;

const DIRECTORY: &str = "eval";
const MAX_SUMMARY_BYTES: u64 = 8 << 20;
/// Largest number of evaluations of a run in a response. Earlier ones are left out, except for the first.
const MAX_EVALUATIONS: usize = 200;
/// Largest number of characters of a text in a response.
const SHOWN_CHARS: usize = 4_000;
/// Largest number of completions of a row in a response.
const MAX_SAMPLES: usize = 64;

/// A row of an evaluation.
#[derive(Debug, Deserialize)]
struct Row {
    id: String,
    prompt: String,
    solution: Option<String>,
    #[serde(default)]
    media: Vec<String>,
    #[serde(default)]
    category: Option<String>,
    completions: Vec<String>,
    #[serde(default)]
    answers: Vec<Option<String>>,
    #[serde(default)]
    rewards: std::collections::BTreeMap<String, Vec<Option<f64>>>,
    reward: Vec<Option<f64>>,
}

#[derive(Debug)]
struct Brief {
    id: String,
    category: Option<String>,
    /// Mean over the scored completions.
    reward: Option<f64>,
}

/// Evaluations of all runs.
#[derive(Debug, Default)]
pub(crate) struct Evaluations(Indices<Brief>);

/// Change of a question's reward between two evaluations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Change {
    Better,
    Worse,
    #[default]
    Same,
}

/// Request to compare the questions of two evaluations.
#[derive(Debug, Deserialize)]
pub(crate) struct Comparison {
    /// Index of the run of the first evaluation; `None` for the run of the second one.
    pub(crate) other: Option<usize>,
    before: u64,
    after: u64,
    change: Option<Change>,
    #[serde(default)]
    category: Option<String>,
    #[serde(default)]
    from: usize,
    #[serde(default)]
    limit: usize,
}

impl Evaluations {
    /// Returns the summaries of a run's evaluations, ordered by step.
    pub(crate) fn summaries(run: &Run) -> Result<Value, Error> {
        let path = |step: u64| run.dir.join(DIRECTORY).join(format!("step-{step:06}.summary.json"));
        let mut steps = run.steps(DIRECTORY)?;
        // The summary is written after the rows, so an evaluation without one is incomplete.
        steps.retain(|step| path(*step).exists());
        let capped = steps.len() > MAX_EVALUATIONS;
        if capped {
            steps.drain(1..=steps.len() - MAX_EVALUATIONS);
        }
        let mut out = Vec::new();
        for step in steps {
            let path = path(step);
            let mut text = Vec::new();
            let file = run.open(&path)?;
            file.take(MAX_SUMMARY_BYTES).read_to_end(&mut text).map_err(Error::io("read", &path))?;
            let damaged = |error: serde_json::Error| Error::Damaged { path, offset: 0, source: error.into() };
            let summary: Value = serde_json::from_slice(&text).map_err(damaged)?;
            out.push(json!({ "step": step, "summary": summary }));
        }
        Ok(json!({ "evaluations": out, "capped": capped }))
    }

    fn index(&self, run: &Run, step: u64) -> Result<(PathBuf, Index<Brief>), Error> {
        let path = run.step_file(DIRECTORY, step);
        let index = self.0.of(run, &path, |line| {
            let row = parsed(line).ok()?;
            let scored: Vec<f64> = row.reward.iter().copied().flatten().collect();
            let reward = (!scored.is_empty()).then(|| scored.iter().sum::<f64>() / scored.len() as f64);
            Some(Brief { id: row.id, category: row.category, reward })
        })?;
        Ok((path, index))
    }

    /// Returns the questions that two evaluations contain, with their change. The largest changes come first. `gain` has the
    /// moments of the changes of all questions of the category, from which an interval follows.
    pub(crate) fn compare(&self, before_run: &Run, run: &Run, asked: &Comparison) -> Result<Value, Error> {
        let (before_path, before) = self.index(before_run, asked.before)?;
        let (after_path, after) = self.index(run, asked.after)?;
        // Ids need not be unique. The n-th row with an id is compared with the n-th row with that id.
        let mut seen: HashMap<&str, usize> = HashMap::new();
        let mut places: HashMap<(&str, usize), usize> = HashMap::new();
        for (at, entry) in before.iter().enumerate() {
            let nth = seen.entry(&entry.brief.id).or_default();
            places.insert((&entry.brief.id, *nth), at);
            *nth += 1;
        }
        seen.clear();
        let (mut pairs, mut gains) = (Vec::new(), Vec::new());
        for (at, entry) in after.iter().enumerate() {
            let nth = seen.entry(&entry.brief.id).or_default();
            let earlier = places.get(&(entry.brief.id.as_str(), *nth)).copied();
            *nth += 1;
            let Some(earlier) = earlier else { continue };
            let named = asked.category.as_deref().filter(|name| !name.is_empty());
            if named.is_some_and(|name| entry.brief.category.as_deref() != Some(name)) {
                continue;
            }
            let gain = match (before[earlier].brief.reward, entry.brief.reward) {
                (Some(before), Some(after)) => {
                    gains.push(after - before);
                    after - before
                }
                _ => 0.0,
            };
            let change = match gain {
                gain if gain > 1e-9 => Change::Better,
                gain if gain < -1e-9 => Change::Worse,
                _ => Change::Same,
            };
            pairs.push((earlier, at, gain, change));
        }
        let count = |change| pairs.iter().filter(|(.., own)| *own == change).count();
        let counts = json!({ "better": count(Change::Better), "worse": count(Change::Worse), "same": count(Change::Same) });
        pairs.retain(|(.., own)| asked.change.is_none_or(|change| change == *own));
        pairs.sort_by(|a, b| b.2.abs().total_cmp(&a.2.abs()));
        let all = pairs.len();
        let mut rows = Vec::new();
        for (earlier, later, gain, change) in
            pairs.into_iter().skip(asked.from).take(asked.limit.clamp(1, 100))
        {
            let old = row_at(before_run, &before_path, &before[earlier])?;
            let new = row_at(run, &after_path, &after[later])?;
            rows.push(json!({
                "id": new.id,
                "row": later,
                "prompt": cut(&new.prompt),
                "solution": new.solution.as_deref().map(cut),
                "category": new.category,
                "media": media::listed(&new.media, &[], run.orientation()),
                "gain": gain,
                "change": change,
                "before": side(&old),
                "after": side(&new),
            }));
        }
        Ok(json!({ "counts": counts, "all": all, "gain": moments(&gains), "rows": rows }))
    }

    /// Opens a media file of a row.
    pub(crate) fn medium(&self, run: &Run, step: u64, row: usize, at: usize) -> Result<Medium, Error> {
        let (path, index) = self.index(run, step)?;
        let entry = index.get(row).ok_or_else(|| Error::missing("this row does not exist"))?;
        media::open(&row_at(run, &path, entry)?.media, at, run.orientation())
    }
}

/// Returns the number, the mean and the standard deviation of values. The deviation divides by n − 1.
fn moments(values: &[f64]) -> Value {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|own| (own - mean).powi(2)).sum();
    let deviation = (values.len() > 1).then(|| (squares / (count - 1.0)).sqrt());
    json!({ "count": values.len(), "mean": (!values.is_empty()).then_some(mean), "deviation": deviation })
}

fn parsed(line: &[u8]) -> Result<Row, serde_json::Error> {
    serde_json::from_str(&String::from_utf8_lossy(line))
}

fn row_at(run: &Run, path: &std::path::Path, entry: &Entry<Brief>) -> Result<Row, Error> {
    let damaged = |error: serde_json::Error| Error::Damaged {
        path: path.to_owned(),
        offset: entry.offset,
        source: error.into(),
    };
    parsed(&line_at(run, path, entry)?).map_err(damaged)
}

fn side(row: &Row) -> Value {
    let completions: Vec<String> = row.completions.iter().take(MAX_SAMPLES).map(|text| cut(text)).collect();
    json!({ "completions": completions, "answers": row.answers, "reward": row.reward, "rewards": row.rewards })
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}
