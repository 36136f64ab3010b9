//! Events of a run: the records of `events.jsonl`, and the line that reports each of them.
//!
//! A run passes each [`Event`] to its [`Console`](crate::Console) once. The console writes the record and shows the line. Pages,
//! messages and callers of the library read the fields, never the line.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::jsonl::JsonLines;
use crate::text::now;
use crate::{Error, Metric, Tone, evaluation_line};

/// Largest number of events that wait for a file of records. Later ones are only shown.
const MAX_WAITING: usize = 100;

/// Something that happened in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// The run starts from the beginning.
    Started {
        /// Number of steps of the run.
        num_steps: u64,
    },
    /// The run resumes.
    Resumed {
        /// Path of the checkpoint.
        checkpoint: String,
        /// Number of steps of the run.
        num_steps: u64,
    },
    /// The user should know or change something.
    Warning {
        /// Message for the user.
        text: String,
    },
    /// A training problem begins or ends.
    Problem(TrainingProblem),
    /// A checkpoint is complete.
    Checkpoint {
        /// Path of the checkpoint.
        path: String,
    },
    /// An evaluation is recorded.
    Evaluation {
        /// Numbers of the evaluation by name; null without a value.
        metrics: Map<String, Value>,
    },
    /// The run is asked to stop after the step in progress.
    Stopping {
        /// Source of the request.
        asked_by: AskedBy,
        /// True if a step is in progress, false before and after the steps.
        within_step: bool,
    },
    /// The run ended before its last step, with a checkpoint.
    Stopped {
        /// Failure of the machine, if it was the reason.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        why: Option<String>,
    },
    /// The run ended with a checkpoint, because its training collapsed.
    Collapsed {
        /// Problem and advice.
        why: String,
    },
    /// All steps are done, and the model is written.
    Finished,
    /// The run failed.
    Failed {
        /// Error.
        why: String,
    },
}

/// Source of the request to stop a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AskedBy {
    /// Ctrl-C, or a signal with the same meaning. A second one ends the process.
    Interrupt,
    /// The warning of a scheduler, SIGUSR1.
    Scheduler,
    /// The page of the run.
    Page,
}

/// Begin or end of a training problem.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainingProblem {
    /// Name of the rule that found the problem.
    pub rule: String,
    /// True if the problem begins, false if it ends.
    pub begins: bool,
    /// True if it is no problem but the aim of the run: nothing is left to learn.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub good: bool,
    /// First step that the rule read when the problem began.
    pub since: u64,
    /// Message for the user.
    pub text: String,
    /// Short description of the problem; empty for an end.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub title: String,
    /// Numbers that show the problem; empty for an end.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub what: String,
    /// Advice in whole sentences without the last full stop; empty for an end.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

/// Line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Step that is complete, or in progress for a warning. 0 before the first step.
    pub step: u64,
    /// Time of the event in UTC, to the second, as in `log.txt`.
    pub time: String,
    /// The event itself.
    #[serde(flatten)]
    pub event: Event,
}

impl Event {
    /// Returns the event of an evaluation.
    pub fn evaluation(metrics: &[Metric]) -> Self {
        Self::Evaluation {
            metrics: metrics.iter().map(|(name, value)| (name.clone(), (*value).into())).collect(),
        }
    }

    /// Returns the line that reports the event at a step.
    pub fn line(&self, step: u64) -> String {
        match self {
            Self::Started { num_steps } => format!("starting a run of {num_steps} steps"),
            Self::Resumed { checkpoint, num_steps } => {
                format!("resuming from {checkpoint} at step {step} of {num_steps}")
            }
            Self::Warning { text }
            | Self::Problem(TrainingProblem { text, begins: true, good: false, .. }) => {
                format!("warning: {text}")
            }
            Self::Problem(TrainingProblem { text, .. }) => text.clone(),
            Self::Checkpoint { path } => format!("saved {path}"),
            Self::Evaluation { metrics } => {
                let metrics: Vec<Metric> =
                    metrics.iter().map(|(name, value)| (name.clone(), value.as_f64())).collect();
                evaluation_line(step, &metrics)
            }
            Self::Stopping { asked_by, within_step } => {
                let more = match asked_by {
                    AskedBy::Interrupt => "; press Ctrl-C again to stop now",
                    AskedBy::Scheduler => "",
                    AskedBy::Page => " and stopping, as the page asked",
                };
                match within_step {
                    true => format!("finishing step {step}, then saving{more}"),
                    false => format!("finishing the current work{more}"),
                }
            }
            Self::Stopped { why: None } => format!("stopped after step {step}"),
            Self::Stopped { why: Some(why) } | Self::Collapsed { why } => {
                format!("stopped after step {step}: {why}")
            }
            Self::Finished => format!("all {step} steps are done"),
            Self::Failed { why } => format!("it failed: {why}"),
        }
    }

    pub(crate) fn tone(&self) -> Tone {
        match self {
            Self::Warning { .. } | Self::Problem(TrainingProblem { begins: true, good: false, .. }) => {
                Tone::Warning
            }
            Self::Resumed { .. } | Self::Problem(TrainingProblem { begins: true, .. }) => Tone::Notice,
            _ => Tone::Note,
        }
    }

    /// Returns true if a console shows the line. The tables and the error that follow report the other events.
    pub(crate) fn is_shown(&self) -> bool {
        !matches!(self, Self::Started { .. } | Self::Collapsed { .. } | Self::Finished | Self::Failed { .. })
    }
}

/// Writer of `events.jsonl`.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    /// Events before the file was opened.
    waiting: Vec<(String, Event)>,
    file: Option<JsonLines>,
    /// Step of the last event that has one.
    step: u64,
    failure: Option<Error>,
}

impl Recorder {
    /// Opens the file and writes the events that wait for it.
    pub(crate) fn open(&mut self, path: &Path, step: u64) -> Result<(), Error> {
        let waiting = std::mem::take(&mut self.waiting);
        *self = Self { file: Some(JsonLines::open(path)?), step, ..Self::default() };
        for (time, event) in waiting {
            self.write(time, event);
        }
        self.sync()
    }

    /// Adds an event. Without a step, it has that of the last event. Returns its step, and false if the file has been removed or replaced.
    pub(crate) fn add(&mut self, step: Option<u64>, event: &Event) -> (u64, bool) {
        self.step = step.unwrap_or(self.step);
        let now = now();
        if self.file.is_none() {
            if self.waiting.len() < MAX_WAITING {
                self.waiting.push((now, event.clone()));
            }
            return (self.step, true);
        }
        (self.step, self.write(now, event.clone()))
    }

    fn write(&mut self, time: String, event: Event) -> bool {
        let Some(file) = &mut self.file else { return true };
        let written = file.append([EventRecord { step: self.step, time, event }]);
        written.unwrap_or_else(|error| {
            // The caller of `sync` gets the error.
            self.failure.get_or_insert(error);
            true
        })
    }

    /// Waits until all records are on disk.
    pub(crate) fn sync(&mut self) -> Result<(), Error> {
        match (self.failure.take(), &self.file) {
            (Some(failure), _) => Err(failure),
            (None, file) => file.as_ref().map_or(Ok(()), JsonLines::sync),
        }
    }

    /// Closes the file.
    pub(crate) fn close(&mut self) {
        *self = Self::default();
    }
}
