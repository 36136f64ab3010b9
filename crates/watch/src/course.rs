//! The course of a run: its rewards by step, its evaluations and its events, as far as a verdict needs them.

use std::collections::BTreeMap;
use std::io::Read as _;

use omnigrpo_observe::{Event, EventRecord, TrainingProblem, names};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::Error;
use crate::index::{Followed, Lines};
use crate::run::Run;
use crate::stamp::Stamp;

/// Largest number of steps that are kept. Later ones are left out.
const MAX_STEPS: usize = 1 << 20;
/// Largest number of reward functions.
const MAX_REWARDS: usize = 64;
/// Largest size of the summary of an evaluation, in bytes.
const MAX_SUMMARY_BYTES: u64 = 8 << 20;
/// Largest number of first and of last steps whose rewards are compared. The span is at most a third of the steps.
pub(crate) const SPAN: usize = 20;
/// Smallest number of bytes that are read from the end of a long run. They double until they contain [`SPAN`] steps.
const END_BYTES: u64 = 64 << 10;
/// Largest number of bytes that are read from an end of a long run.
const MAX_END_BYTES: u64 = 16 << 20;

/// Rewards of a run by step, and its evaluations. It grows with `metrics.jsonl`.
#[derive(Debug, Default)]
pub(crate) struct Course {
    file: u64,
    next: u64,
    /// Number of updates that were read.
    updates: usize,
    /// Step and mean reward of each update.
    rewards: Vec<(u64, f64)>,
    /// Step and mean of the first reward function of each update.
    first_reward: Vec<(u64, f64)>,
    /// Number of completions of all steps; 0 if it is not recorded.
    pub(crate) completions: f64,
    /// Smallest and largest value of each reward function over all steps.
    pub(crate) ranges: BTreeMap<String, (f64, f64)>,
    /// Last step that is complete.
    pub(crate) step: u64,
    /// Step and metrics of each evaluation.
    pub(crate) evaluations: Vec<(u64, Map<String, Value>)>,
    /// True if steps between the ends of the run were not read.
    pub(crate) has_gap: bool,
}

impl Followed for Course {
    const MOST: usize = 64 << 20;

    fn size(&self) -> usize {
        16 * (self.rewards.len() + self.first_reward.len()) + 4096 * self.evaluations.len()
    }

    fn read(&mut self, run: &Run) -> Result<(), Error> {
        let path = run.dir.join(names::METRICS);
        if !path.exists() {
            *self = Self::default();
            return Ok(());
        }
        let file = run.open(&path)?;
        let stamp = Stamp::of(&file.metadata().map_err(Error::io("look at", &path))?);
        if stamp.id != self.file || stamp.bytes < self.next {
            *self = Self { file: stamp.id, ..Self::default() };
        }
        let mut lines = Lines::from(file, self.next).map_err(Error::io("read", &path))?;
        while let Some((offset, line)) = lines.next().map_err(Error::io("read", &path))? {
            self.next = offset + line.len() as u64 + 1;
            // A damaged line is reported by the charts.
            let Ok(row) = serde_json::from_slice::<Map<String, Value>>(line) else { continue };
            self.add(row);
        }
        Ok(())
    }
}

impl Course {
    /// Reads both ends of a run: as many steps as decide the results of its first and its last steps, and its first and its last
    /// evaluation. The results are those of the whole course, but nothing between the ends is known.
    pub(crate) fn ends(run: &Run) -> Result<Self, Error> {
        let path = run.dir.join(names::METRICS);
        let mut course = Self::default();
        if !path.exists() {
            return Ok(course);
        }
        let file = run.open(&path)?;
        let bytes = file.metadata().map_err(Error::io("look at", &path))?.len();
        let mut lines = Lines::new(file);
        let failed = || Error::io("read", &path);
        // With so many steps, each end has SPAN of them.
        while course.updates < 3 * SPAN && course.next < MAX_END_BYTES {
            let Some((offset, line)) = lines.next().map_err(failed())? else { return Ok(course) };
            course.next = offset + line.len() as u64 + 1;
            if let Ok(row) = serde_json::from_slice::<Map<String, Value>>(line) {
                course.add(row);
            }
        }
        let mut size = END_BYTES;
        let end = loop {
            let from = bytes.saturating_sub(size).max(course.next);
            course.has_gap = from > course.next;
            let mut lines = Lines::from(run.open(&path)?, from).map_err(failed())?;
            if course.has_gap {
                // It is the end of a line.
                lines.next().map_err(failed())?;
            }
            let mut end = Self::default();
            while let Some((_, line)) = lines.next().map_err(failed())? {
                if let Ok(row) = serde_json::from_slice::<Map<String, Value>>(line) {
                    end.add(row);
                }
            }
            if !course.has_gap || end.updates >= SPAN || size >= MAX_END_BYTES {
                break end;
            }
            size *= 2;
        };
        course.step = course.step.max(end.step);
        course.updates += end.updates;
        course.rewards.extend(end.rewards);
        course.first_reward.extend(end.first_reward);
        course.evaluations.extend(end.evaluations);
        if course.has_gap {
            let steps = run.steps(names::EVALUATIONS)?;
            let of_step = |step: &u64| Some((*step, metrics_of(summary(run, *step))?));
            course.evaluations.extend(steps.iter().find_map(of_step));
            course.evaluations.extend(steps.iter().rev().find_map(of_step));
            course.evaluations.sort_by_key(|own| own.0);
        }
        Ok(course)
    }

    /// Returns the step and the mean reward of each update. If all are 0, as with a teacher and rewards of weight 0, the first reward
    /// function stands for the total.
    pub(crate) fn rewards(&self) -> &[(u64, f64)] {
        let is_zero = self.rewards.iter().all(|(_, reward)| *reward == 0.0);
        if is_zero && self.first_reward.len() == self.rewards.len() {
            &self.first_reward
        } else {
            &self.rewards
        }
    }

    fn add(&mut self, row: Map<String, Value>) {
        let Some(step) = row.get("step").and_then(Value::as_u64) else { return };
        if row.contains_key("eval_rows") {
            self.evaluations.extend(metrics_of(row).map(|metrics| (step, metrics)));
            return;
        }
        (self.step, self.updates) = (step, self.updates + 1);
        let number = |name: &str| row.get(name).and_then(Value::as_f64);
        let Some(reward) = number("reward").filter(|_| self.rewards.len() < MAX_STEPS) else { return };
        self.rewards.push((step, reward));
        let is_mean = |name: &str| name.starts_with("rewards/") && name.ends_with("/mean");
        let mut means = row.iter().filter(|(name, _)| is_mean(name)).filter_map(|(_, value)| value.as_f64());
        self.first_reward.extend(means.next().map(|mean| (step, mean)));
        self.completions += number("completions/count").unwrap_or(0.0);
        for (name, value) in &row {
            let reward = name.strip_prefix("rewards/").and_then(|name| name.strip_suffix("/min"));
            let Some(reward) = reward else { continue };
            let Some((least, most)) = value.as_f64().zip(number(&format!("rewards/{reward}/max"))) else {
                continue;
            };
            if let Some(own) = self.ranges.get_mut(reward) {
                *own = (own.0.min(least), own.1.max(most));
            } else if self.ranges.len() < MAX_REWARDS {
                self.ranges.insert(reward.to_owned(), (least, most));
            }
        }
    }
}

/// End of a run, or the lack of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum End {
    /// The run goes on, or was killed.
    #[default]
    None,
    /// All steps are done.
    Finished,
    /// It ended before its last step, with a checkpoint.
    Stopped,
    /// It failed.
    Failed(String),
}

/// Events of a run that a verdict reads.
#[derive(Debug, Default)]
pub(crate) struct Happened {
    pub(crate) num_steps: Option<u64>,
    /// Problems that began and have not ended, in order.
    pub(crate) lasting: Vec<TrainingProblem>,
    pub(crate) end: End,
    /// Times of the first and the last event of each part of the run, from its start or a resumption on, in seconds since 1970.
    parts: Vec<(i64, i64)>,
}

impl Happened {
    pub(crate) fn of(run: &Run) -> Result<Self, Error> {
        let path = run.dir.join(names::EVENTS);
        let mut happened = Self::default();
        if !path.exists() {
            return Ok(happened);
        }
        let mut lines = Lines::new(run.open(&path)?);
        while let Some((_, line)) = lines.next().map_err(Error::io("read", &path))? {
            let Ok(EventRecord { event, time, .. }) = serde_json::from_slice(line) else { continue };
            let begins = matches!(event, Event::Started { .. } | Event::Resumed { .. });
            happened.add(event);
            let Ok(time) = time.parse::<jiff::Timestamp>().map(jiff::Timestamp::as_second) else { continue };
            match happened.parts.last_mut().filter(|_| !begins) {
                Some(part) => part.1 = time,
                None => happened.parts.push((time, time)),
            }
        }
        Ok(happened)
    }

    /// Returns the time for which the run has run, in seconds, without the pauses before it resumed. A part that was killed ends with its
    /// last event, and the last one with the last step.
    pub(crate) fn seconds(&self, run: &Run) -> f64 {
        let mut parts = self.parts.clone();
        let written = std::fs::metadata(run.dir.join(names::METRICS)).and_then(|meta| meta.modified());
        let written = written.ok().and_then(|time| jiff::Timestamp::try_from(time).ok());
        if let (End::None, Some((_, until)), Some(written)) = (&self.end, parts.last_mut(), written) {
            *until = written.as_second().max(*until);
        }
        parts.iter().map(|(from, until)| (until - from).max(0) as f64).sum()
    }

    fn add(&mut self, event: Event) {
        match event {
            Event::Started { num_steps } => *self = Self { num_steps: Some(num_steps), ..Self::default() },
            // The problems of the steps before it are still told.
            Event::Resumed { num_steps, .. } => {
                (self.num_steps, self.end) = (Some(num_steps), End::None);
            }
            Event::Problem(problem) => {
                self.lasting.retain(|own| own.rule != problem.rule);
                if problem.begins {
                    self.lasting.push(problem);
                }
            }
            Event::Finished => self.end = End::Finished,
            Event::Stopped { .. } | Event::Collapsed { .. } => self.end = End::Stopped,
            Event::Failed { why } => self.end = End::Failed(why),
            _ => {}
        }
    }
}

/// Intervals in the summary of an evaluation.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Intervals {
    #[serde(default)]
    pub(crate) accuracy_interval: Option<(f64, f64)>,
    #[serde(default)]
    pub(crate) reward_interval: Option<(f64, f64)>,
    #[serde(default)]
    pub(crate) reward_is_share: bool,
}

impl Intervals {
    /// Reads the intervals of an evaluation; none if its summary is missing.
    pub(crate) fn of(run: &Run, step: u64) -> Self {
        serde_json::from_value(Value::Object(summary(run, step))).unwrap_or_default()
    }
}

/// Reads the summary of an evaluation; empty if it is missing or damaged.
fn summary(run: &Run, step: u64) -> Map<String, Value> {
    let path = run.dir.join(names::EVALUATIONS).join(format!("step-{step:06}.summary.json"));
    let Ok(file) = run.open(&path) else { return Map::new() };
    let mut text = Vec::new();
    let read = file.take(MAX_SUMMARY_BYTES).read_to_end(&mut text);
    read.ok().and_then(|_| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// Returns the metrics of an evaluation in a row or a summary; `None` if it is not of an evaluation.
fn metrics_of(mut row: Map<String, Value>) -> Option<Map<String, Value>> {
    row.retain(|name, value| name.starts_with("eval_") && value.is_number());
    row.contains_key("eval_rows").then_some(row)
}
