//! Logs in the output directory of a run.
//!
//! | file | one line per | written |
//! |---|---|---|
//! | `metrics.jsonl` | optimizer step, or evaluation | when the step is done |
//! | `rollouts/step-000123.jsonl` | completion | when its group is scored |
//! | `tokens/step-000123.jsonl` | completion | after the update, if enabled |
//! | `skipped.jsonl` | dataset row that was not used | when it is found |
//! | `events.jsonl` | [`Event`](crate::Event): start, warning, problem, checkpoint, evaluation, end | when it happens |
//! | `eval/step-000123.jsonl` | completion of an evaluation | by the evaluation, as a whole |
//!
//! Every line or file name contains the step, so that a resumed run can truncate all logs to its checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::atomic::sync_directory;
use crate::jsonl::{JsonLines, each_row, truncate_after};
use crate::{Error, Metric};

use names::{EVALUATIONS, LOGS, METRICS, ROLLOUTS, SKIPPED, TOKENS};

/// Names of the files and directories in a run directory that record the run.
pub mod names {
    /// Metrics of each step.
    pub const METRICS: &str = "metrics.jsonl";
    /// Rows that were skipped, with the reason.
    pub const SKIPPED: &str = "skipped.jsonl";
    /// Events of the run.
    pub const EVENTS: &str = "events.jsonl";
    /// Problems of the training in runs of version 0.2.0. Later runs have them among the events.
    pub const WARNINGS: &str = "warnings.jsonl";
    /// Completions of each step.
    pub const ROLLOUTS: &str = "rollouts";
    /// Completions of evaluations.
    pub const EVALUATIONS: &str = "eval";
    /// Numbers of each token, if they are recorded.
    pub const TOKENS: &str = "tokens";
    /// Event files of TensorBoard.
    pub const TENSORBOARD: &str = "tensorboard";
    /// Directory in which the package `wandb` writes.
    pub const WANDB: &str = "wandb";
    /// Messages of the package `wandb`.
    pub const WANDB_LOG: &str = "wandb.log";
    /// Messages of the package `trackio`.
    pub const TRACKIO_LOG: &str = "trackio.log";
    /// Report on the run.
    pub const REPORT: &str = "report.html";
    /// Plots of the report.
    pub const PLOTS: &str = "plots";
    /// Logs with a line for each step or row.
    pub const LOGS: [&str; 4] = [METRICS, SKIPPED, EVENTS, WARNINGS];
    /// Directories with a file for each step.
    pub const BY_STEP: [&str; 3] = [ROLLOUTS, EVALUATIONS, TOKENS];
    /// Files of trackers and of the report.
    pub const OF_TRACKERS: [&str; 6] = [TENSORBOARD, WANDB, WANDB_LOG, TRACKIO_LOG, REPORT, PLOTS];
}

/// Handling of logs that an earlier run left in the same directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Existing logs are an error unless they are empty.
    Refuse,
    /// Logs are continued after this step; everything written for later steps is removed.
    ResumeAfter(u64),
}

/// Reason why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model emitted a stop token or stop string.
    Stop,
    /// The completion reached the length limit.
    Length,
}

/// One completion with its scores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// Position in the training data, in epochs.
    pub epoch: f64,
    /// Id of the dataset row.
    pub id: String,
    /// Index of the prompt within the step.
    pub group: usize,
    /// Index of the completion within its group.
    pub sample: usize,
    /// The rendered prompt.
    pub prompt: String,
    /// The sampled text.
    pub completion: String,
    /// Solution of the row, as the dataset contains it.
    pub solution: Option<Value>,
    /// Value of each reward function, unweighted; `None` if it does not apply.
    pub rewards: BTreeMap<String, Option<f64>>,
    /// Weighted total; `None` if no reward applied.
    pub reward: Option<f64>,
    /// Advantage used in the loss.
    pub advantage: f64,
    /// Number of tokens in the completion, including the stop token.
    pub length: usize,
    /// Reason why the completion ended.
    pub finish_reason: FinishReason,
    /// Paths of the prompt's media, in order.
    pub media: Vec<String>,
    /// Times of the sampled frames for each path in `media`, in seconds; empty without clips.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frame_times_secs: Vec<Vec<f64>>,
    /// Turns that an environment added to the completion, in order. `completion` is then the model's last turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<EnvironmentTurn>,
    /// Notes that the user's reward functions recorded about the completion.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub columns: BTreeMap<String, Value>,
    /// Columns of the dataset row, present only with the first completion of a prompt. With them, other commands can read the log
    /// as rows with completions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row: Option<Map<String, Value>>,
}

/// Turn of an environment in a completion, after a turn of the model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EnvironmentTurn {
    /// Text of the model's turn before it.
    pub model: String,
    /// Number of tokens of the model's turn, including its stop token.
    pub model_tokens: usize,
    /// Text of the turn, without its media.
    pub text: String,
    /// Number of tokens of the turn.
    pub tokens: usize,
    /// Paths of the turn's media, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<String>,
    /// Speaker of the turn; absent if it is a tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Parts of the turn in the form of a message; absent if they are pictures, then one text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Value>,
}

/// Per-token numbers of a completion at an update. They are rounded to four decimals when written.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tokens {
    /// Index of the prompt within the step.
    pub group: usize,
    /// Index of the completion within its group.
    pub sample: usize,
    /// Text of each token. If a character spans several tokens, the last of them has it.
    pub tokens: Vec<String>,
    /// Log-probability of each token under the policy before the update, in nats.
    #[serde(serialize_with = "rounded")]
    pub logprobs: Vec<f32>,
    /// Entropy of the policy at each token, in nats.
    #[serde(serialize_with = "rounded")]
    pub entropies: Vec<f32>,
    /// Log-probability of each token when it was sampled. Empty for completions that were not sampled, and in later updates of a
    /// rollout.
    #[serde(serialize_with = "rounded", skip_serializing_if = "Vec::is_empty")]
    pub sampled_logprobs: Vec<f32>,
    /// Log-probability of each token in the denominator of the ratio; empty if it is the policy's own.
    #[serde(serialize_with = "rounded", skip_serializing_if = "Vec::is_empty")]
    pub old_logprobs: Vec<f32>,
    /// Log-probability of each token under the reference model; empty without one.
    #[serde(serialize_with = "rounded", skip_serializing_if = "Vec::is_empty")]
    pub reference_logprobs: Vec<f32>,
    /// True for each token that the entropy gate keeps in the policy term; empty without a gate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<bool>,
}

fn rounded<S: serde::Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(values.iter().map(|value| (value * 1e4).round() / 1e4))
}

/// A dataset row that was not used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Step at which the row was skipped; 0 before the first step.
    pub step: u64,
    /// Id of the dataset row.
    pub id: String,
    /// Reason for skipping it.
    pub reason: String,
    /// Row that replaced it, if any.
    pub replaced_by: Option<String>,
}

#[derive(Serialize)]
struct RolloutLine<'a> {
    step: u64,
    timestamp: &'a str,
    #[serde(flatten)]
    rollout: &'a Rollout,
}

/// The open logs of a run.
#[derive(Debug)]
pub struct RunDir {
    root: PathBuf,
    metrics: JsonLines,
    skipped: JsonLines,
    /// Rollout logs that may not be on disk yet.
    unsynced: BTreeSet<PathBuf>,
}

/// Extent of the logs that a resumed run continues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Continued {
    /// Step of the last row in the metrics.
    pub last_step: Option<u64>,
    /// True if the metrics contain an evaluation of the resumed step.
    pub evaluated: bool,
}

impl RunDir {
    /// Creates or opens the output directory and its logs.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be written, if it contains another run ([`Existing::Refuse`]), or if a log to be
    /// continued is damaged before its last line.
    pub fn open(root: &Path, existing: Existing) -> Result<Self, Error> {
        let rollouts = root.join(ROLLOUTS);
        fs::create_dir_all(&rollouts).map_err(|source| Error::io("create the directory", root, source))?;
        let (metrics, skipped) = (root.join(METRICS), root.join(SKIPPED));
        let logged = step_files(&rollouts)?;
        match existing {
            Existing::Refuse => {
                // A run that failed before its first step leaves empty logs, which can be overwritten.
                let filled = |path: &Path| fs::metadata(path).is_ok_and(|meta| meta.len() > 0);
                let found = [&metrics, &skipped].into_iter().find(|path| filled(path));
                if let Some(found) = found.or_else(|| logged.first().map(|(_, path)| path)) {
                    let found = found.strip_prefix(root).unwrap_or(found).display().to_string();
                    return Err(Error::Occupied { path: root.to_owned(), found });
                }
            }
            Existing::ResumeAfter(step) => {
                LOGS.iter().try_for_each(|name| truncate_after(&root.join(name), step))?;
                let of = |name: &str| {
                    let directory = root.join(name);
                    if directory.is_dir() { step_files(&directory) } else { Ok(Vec::new()) }
                };
                let (evaluated, tokens) = (of(EVALUATIONS)?, of(TOKENS)?);
                for (_, path) in
                    logged.iter().chain(&evaluated).chain(&tokens).filter(|(logged, _)| *logged > step)
                {
                    remove(path)?;
                }
            }
        }
        Ok(Self {
            metrics: JsonLines::open(&metrics)?,
            skipped: JsonLines::open(&skipped)?,
            root: root.to_owned(),
            unsynced: BTreeSet::new(),
        })
    }

    /// Returns the extent of the metrics that a run resumed at `step` continues.
    ///
    /// # Errors
    /// Returns an error if the log cannot be read.
    pub fn continued(&self, step: u64) -> Result<Continued, Error> {
        let mut continued = Continued::default();
        each_row(&self.root.join(METRICS), |row: Map<String, Value>| {
            let at = row.get("step").and_then(Value::as_u64);
            continued.last_step = at;
            continued.evaluated |= at == Some(step) && is_evaluation(&row);
        })?;
        Ok(continued)
    }

    /// Passes the metrics of every logged step and evaluation to `take`, in order, with true for an evaluation.
    ///
    /// # Errors
    /// Returns an error if the log cannot be read.
    pub fn each_step(&self, mut take: impl FnMut(u64, &[Metric], bool)) -> Result<(), Error> {
        let path = self.root.join(METRICS);
        each_row(&path, |row: Map<String, Value>| {
            let step = row.get("step").and_then(Value::as_u64);
            let of_evaluation = is_evaluation(&row);
            if let Some(step) = step {
                let metrics: Vec<Metric> =
                    row.into_iter().map(|(name, value)| (name, value.as_f64())).collect();
                take(step, &metrics, of_evaluation);
            }
        })
    }

    /// Returns the output directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Appends one row to `metrics.jsonl`. Returns false if the log has been removed or replaced since the last row; it is then
    /// created again. Append the evaluation of a checkpoint's step before the checkpoint becomes visible, because a resumed run
    /// keeps all rows of that step and does not repeat the evaluation. If a name occurs twice, the later value is kept.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn append_metrics(&mut self, step: u64, epoch: f64, metrics: &[Metric]) -> Result<bool, Error> {
        let mut row = Map::new();
        row.insert("step".to_owned(), step.into());
        row.insert("epoch".to_owned(), epoch.into());
        for (name, value) in metrics {
            row.insert(name.clone(), (*value).into());
        }
        self.metrics.append([Value::Object(row)])
    }

    /// Appends completions to the rollout log of the step.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn append_rollouts(
        &mut self,
        step: u64,
        rollouts: &[Rollout],
        now: jiff::Timestamp,
    ) -> Result<(), Error> {
        let timestamp = now.to_string();
        let path = self.root.join(ROLLOUTS).join(format!("step-{step:06}.jsonl"));
        let lines = rollouts.iter().map(|rollout| RolloutLine { step, timestamp: &timestamp, rollout });
        JsonLines::open(&path)?.append(lines)?;
        self.unsynced.insert(path);
        Ok(())
    }

    /// Writes the per-token numbers of a step.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write_tokens(&mut self, step: u64, tokens: &[Tokens]) -> Result<(), Error> {
        let directory = self.root.join(TOKENS);
        fs::create_dir_all(&directory)
            .map_err(|source| Error::io("create the directory", &directory, source))?;
        let path = directory.join(format!("step-{step:06}.jsonl"));
        JsonLines::open(&path)?.append(tokens)?;
        self.unsynced.insert(path);
        Ok(())
    }

    /// Appends a row to `skipped.jsonl`. Returns false in the same case as [`Self::append_metrics`].
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn append_skipped(&mut self, skipped: &Skipped) -> Result<bool, Error> {
        self.skipped.append([skipped])
    }

    /// Waits until all appended rows are on disk. Call this before a checkpoint becomes visible, so that a resumed run finds every
    /// row up to it.
    ///
    /// # Errors
    /// Returns an error if the data cannot be synced to disk.
    pub fn sync(&mut self) -> Result<(), Error> {
        self.metrics.sync()?;
        self.skipped.sync()?;
        // New files are on disk only after their directories are synced.
        let mut directories = BTreeSet::from([self.root.clone(), self.root.join(ROLLOUTS)]);
        for path in &self.unsynced {
            match File::open(path).and_then(|file| file.sync_all()) {
                // Someone has removed the file; that is not an error.
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                other => {
                    other.map_err(|source| Error::io("sync", path, source))?;
                    directories.extend(path.parent().map(Path::to_owned));
                }
            }
        }
        self.unsynced.clear();
        directories.iter().try_for_each(|path| sync_directory(path))
    }
}

/// Returns the warning about a log that was removed or replaced while the run wrote it.
pub fn replaced(log: &str) -> String {
    format!("{log} was removed or replaced while the run wrote it; the new file lacks the earlier rows")
}

/// Lists the step files in a directory of rollout logs or evaluations, ordered by step. Other files are ignored.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn step_files(directory: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let read = |source| Error::io("read the directory", directory, source);
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if let Some(step) = step_of(&path) {
            files.push((step, path));
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the step in the name of a file `step-N.jsonl` or `step-N.summary.json`.
pub fn step_of(path: &Path) -> Option<u64> {
    let rest = path.file_name()?.to_str()?.strip_prefix("step-")?;
    rest.strip_suffix(".jsonl").or_else(|| rest.strip_suffix(".summary.json"))?.parse().ok()
}

fn is_evaluation(row: &Map<String, Value>) -> bool {
    row.keys().any(|name| name.starts_with("eval_"))
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, source)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metric(name: &str, value: f64) -> Metric {
        (name.to_owned(), Some(value))
    }

    fn rollout(sample: usize) -> Rollout {
        Rollout {
            epoch: 0.25,
            id: "row-7".to_owned(),
            group: 0,
            sample,
            prompt: "What?\n".to_owned(),
            completion: "<answer>(B)</answer>".to_owned(),
            solution: Some(Value::from("B")),
            rewards: BTreeMap::from([("accuracy".to_owned(), Some(1.0)), ("judge".to_owned(), None)]),
            reward: Some(1.0),
            advantage: 0.5,
            length: 9,
            finish_reason: FinishReason::Stop,
            media: vec!["a.png".to_owned()],
            frame_times_secs: Vec::new(),
            turns: Vec::new(),
            columns: BTreeMap::new(),
            row: None,
        }
    }

    fn read(run: &RunDir, name: &str) -> String {
        fs::read_to_string(run.root().join(name)).unwrap()
    }

    #[test]
    fn rows_have_step_first_and_null_for_what_json_cannot_say() {
        let directory = tempfile::tempdir().unwrap();
        let mut run = RunDir::open(directory.path(), Existing::Refuse).unwrap();
        let metrics = [metric("loss", 0.1), metric("reward", f64::NAN), ("kl".to_owned(), None)];
        run.append_metrics(3, 0.5, &metrics).unwrap();
        let line = "{\"step\":3,\"epoch\":0.5,\"loss\":0.1,\"reward\":null,\"kl\":null}\n";
        assert_eq!(read(&run, METRICS), line, "on disk without any further call");
    }

    #[test]
    fn rollout_lines_carry_every_field() {
        let directory = tempfile::tempdir().unwrap();
        let mut run = RunDir::open(directory.path(), Existing::Refuse).unwrap();
        let now = jiff::Timestamp::from_second(1_700_000_000).unwrap();
        run.append_rollouts(12, &[rollout(0)], now).unwrap();
        run.append_rollouts(12, &[rollout(1), rollout(2)], now).unwrap();
        let log = read(&run, "rollouts/step-000012.jsonl");
        assert_eq!(log.lines().count(), 3);
        let expected = concat!(
            r#"{"step":12,"timestamp":"2023-11-14T22:13:20Z","epoch":0.25,"id":"row-7","group":0,"sample":0,"#,
            r#""prompt":"What?\n","completion":"<answer>(B)</answer>","solution":"B","#,
            r#""rewards":{"accuracy":1.0,"judge":null},"reward":1.0,"advantage":0.5,"length":9,"#,
            r#""finish_reason":"stop","media":["a.png"]}"#
        );
        assert_eq!(log.lines().next().unwrap(), expected);
        let back: Rollout = serde_json::from_str(log.lines().nth(2).unwrap()).unwrap();
        assert_eq!(back, rollout(2));
    }

    #[test]
    fn resuming_cuts_every_log_back_to_the_checkpoint() {
        let directory = tempfile::tempdir().unwrap();
        let mut run = RunDir::open(directory.path(), Existing::Refuse).unwrap();
        for step in 1..=5 {
            run.append_rollouts(step, &[rollout(0)], jiff::Timestamp::UNIX_EPOCH).unwrap();
            let skipped =
                Skipped { step, id: format!("row-{step}"), reason: "torn".into(), replaced_by: None };
            run.append_skipped(&skipped).unwrap();
            run.append_metrics(step, 0.0, &[metric("loss", step as f64)]).unwrap();
        }
        run.sync().unwrap();
        let (metrics, skipped) = (read(&run, METRICS), read(&run, SKIPPED));
        drop(run);
        fs::write(directory.path().join("rollouts/notes.txt"), "mine").unwrap();
        fs::create_dir(directory.path().join(EVALUATIONS)).unwrap();
        for step in [3, 5] {
            for name in [format!("step-{step:06}.jsonl"), format!("step-{step:06}.summary.json")] {
                fs::write(directory.path().join(EVALUATIONS).join(name), "{}").unwrap();
            }
        }
        fs::write(directory.path().join(METRICS), format!("{metrics}{{\"step\":6,\"lo")).unwrap();

        let mut run = RunDir::open(directory.path(), Existing::ResumeAfter(3)).unwrap();
        let first = |text: &str, lines: usize| text.split_inclusive('\n').take(lines).collect::<String>();
        assert_eq!(read(&run, METRICS), first(&metrics, 3));
        assert_eq!(read(&run, SKIPPED), first(&skipped, 3));
        let steps: Vec<u64> =
            step_files(&run.root().join(ROLLOUTS)).unwrap().iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, [1, 2, 3]);
        assert!(run.root().join("rollouts/notes.txt").exists());
        let left = step_files(&run.root().join(EVALUATIONS)).unwrap();
        assert_eq!(left.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 3]);
        assert_eq!(run.continued(3).unwrap(), Continued { last_step: Some(3), evaluated: false });
        // Repeated steps produce the same bytes as an uninterrupted run.
        for step in 4..=5 {
            run.append_metrics(step, 0.0, &[metric("loss", step as f64)]).unwrap();
        }
        assert_eq!(read(&run, METRICS), metrics);
    }

    #[test]
    fn what_is_continued_says_how_far_it_reaches() {
        let directory = tempfile::tempdir().unwrap();
        let mut run = RunDir::open(directory.path(), Existing::Refuse).unwrap();
        assert_eq!(run.continued(0).unwrap(), Continued::default());
        run.append_metrics(1, 0.0, &[metric("loss", 1.0)]).unwrap();
        run.append_metrics(2, 0.0, &[metric("loss", 1.0)]).unwrap();
        run.append_metrics(2, 0.0, &[metric("eval_reward", 1.0)]).unwrap();
        assert_eq!(run.continued(2).unwrap(), Continued { last_step: Some(2), evaluated: true });
        assert_eq!(run.continued(5).unwrap(), Continued { last_step: Some(2), evaluated: false });
    }

    #[test]
    fn another_run_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        drop(RunDir::open(directory.path(), Existing::Refuse).unwrap());
        let mut run = RunDir::open(directory.path(), Existing::Refuse).unwrap();
        run.append_metrics(1, 0.0, &[]).unwrap();
        let error = RunDir::open(directory.path(), Existing::Refuse).unwrap_err();
        assert!(error.to_string().contains("already contains a run (metrics.jsonl)"), "{error}");
        assert_eq!(
            fs::read_to_string(directory.path().join(METRICS)).unwrap(),
            "{\"step\":1,\"epoch\":0.0}\n"
        );
    }

    #[test]
    fn a_file_in_place_of_the_directory_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run");
        fs::write(&path, "").unwrap();
        let error = RunDir::open(&path, Existing::Refuse).unwrap_err().to_string();
        assert!(error.contains("a file is in the place of a directory"), "{error}");
    }
}
