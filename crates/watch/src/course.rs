//! The course of a run: its rewards by step, its evaluations and its events, as far as a verdict needs them.

use std::collections::BTreeMap;
use std::io::Read as _;

use omnigrpo_observe::{Event, EventRecord, TrainingProblem, names};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::Error;
use crate::index::{Followed, Lines, Stamp};
use crate::run::Run;

/// Largest number of steps that are kept. Later ones are left out.
const MAX_STEPS: usize = 1 << 20;
/// Largest number of reward functions.
const MAX_REWARDS: usize = 64;
/// Largest size of the summary of an evaluation, in bytes.
const MAX_SUMMARY_BYTES: u64 = 8 << 20;

/// Rewards of a run by step, and its evaluations. It grows with `metrics.jsonl`.
#[derive(Debug, Default)]
pub(crate) struct Course {
    file: u64,
    next: u64,
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

    fn add(&mut self, mut row: Map<String, Value>) {
        let Some(step) = row.get("step").and_then(Value::as_u64) else { return };
        if row.contains_key("eval_rows") {
            row.retain(|name, value| name.starts_with("eval_") && value.is_number());
            self.evaluations.push((step, row));
            return;
        }
        self.step = step;
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
            let Ok(EventRecord { event, .. }) = serde_json::from_slice(line) else { continue };
            happened.add(event);
        }
        Ok(happened)
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
        let path = run.dir.join(names::EVALUATIONS).join(format!("step-{step:06}.summary.json"));
        let Ok(file) = run.open(&path) else { return Self::default() };
        let mut text = Vec::new();
        let read = file.take(MAX_SUMMARY_BYTES).read_to_end(&mut text);
        read.ok().and_then(|_| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }
}
