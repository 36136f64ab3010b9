//! Output of a run: logs, console lines, evaluations, and the report at its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use omnigrpo_data::{Dataset, MediumRef, MediumSource, content};
use omnigrpo_guard::told;
use omnigrpo_models::AddedTurn;
use omnigrpo_observe::{
    BeforeAfter, Console, DebugLog, EnvironmentTurn, Event, FinishReason, Metric, PhaseTimer, Report,
    Rollout, RunDir, Skipped, Tokens, Tracked, Trackers, TrainingProblem, Window, best_and_worst,
    is_headline, names, replaced, write_atomic,
};
use omnigrpo_rewards::Category;
use omnigrpo_rollout::Completion;
use omnigrpo_text::{MediumKind, Part, Role, StreamDecoder, Tokenizer};
use serde::Serialize;
use serde_json::Value;

use crate::checkpoint;
use crate::error::{Result, TrainError};
use crate::evaluate::Evaluation;
use crate::health::Health;
use crate::plan::{RunPlan, RunSummary};
use crate::rollouts::{Group, Rollouts, Scored};
use crate::rows::{PreparedRow, SkippedRow, media_paths};
use crate::step::TokenNumbers;
use crate::timing::peak_memory_bytes;

/// Maximum number of groups per step that are sent to trackers and, with `log_completions`, shown on the console.
const SHOWN_GROUPS: usize = 2;
/// Maximum time that the end of a run waits for its trackers.
const TRACKERS_PATIENCE: Duration = Duration::from_secs(60);

/// Records of a running loop.
pub(crate) struct Records {
    /// Logs of the run; `None` on ranks other than the first, which record nothing.
    pub(crate) dir: Option<RunDir>,
    dataset: Arc<Dataset>,
    console: Console,
    pub(crate) trackers: Trackers,
    debug_log: Option<DebugLog>,
    logging_steps: u64,
    grpo_logging_steps: u64,
    log_completions: bool,
    total_steps: u64,
    window: Window,
    grpo_window: Window,
    pub(crate) health: Health,
    rewards_seen: Vec<f64>,
    phase_sums: Vec<(String, f64)>,
    /// Number of updates done by this process.
    pub(crate) steps_timed: u64,
    /// Seconds that other threads spent on reading and decoding rows.
    pub(crate) ahead_secs: f64,
}

impl Records {
    /// Creates records without logs and trackers.
    pub(crate) fn new(
        run: &RunPlan,
        dataset: Arc<Dataset>,
        console: &Console,
        total_steps: u64,
        health: Health,
    ) -> Self {
        Self {
            dir: None,
            dataset,
            console: console.clone(),
            trackers: Trackers::none(console),
            debug_log: run.records.debug_log.clone(),
            logging_steps: run.records.logging_steps.max(1),
            grpo_logging_steps: run.records.grpo_logging_steps.max(1),
            log_completions: run.records.log_completions,
            total_steps,
            window: Window::default(),
            grpo_window: Window::default(),
            health,
            rewards_seen: Vec::new(),
            phase_sums: Vec::new(),
            steps_timed: 0,
            ahead_secs: 0.0,
        }
    }

    /// Waits until everything written so far is on disk.
    pub(crate) fn sync(&mut self) -> Result<()> {
        let Some(dir) = &mut self.dir else { return Ok(()) };
        self.console.sync_record()?;
        Ok(dir.sync()?)
    }

    pub(crate) fn skipped(&mut self, step: u64, row: &SkippedRow) -> Result<()> {
        let Some(dir) = &mut self.dir else { return Ok(()) };
        self.console.line(&row.to_string());
        let SkippedRow { id, reason, replaced_by, .. } = row.clone();
        let in_place = dir.append_skipped(&Skipped { step, id, reason, replaced_by })?;
        self.notice(in_place, names::SKIPPED);
        Ok(())
    }

    fn metrics(&mut self, step: u64, epoch: f64, metrics: &[Metric]) -> Result<()> {
        let Some(dir) = &mut self.dir else { return Ok(()) };
        let in_place = dir.append_metrics(step, epoch, metrics)?;
        self.notice(in_place, names::METRICS);
        Ok(())
    }

    fn notice(&self, in_place: bool, log: &str) {
        if !in_place {
            self.console.warning(&replaced(log));
        }
    }

    /// Writes the completions of a step to a file after their scoring failed.
    pub(crate) fn keep_unscored(&self, step: u64, error: TrainError) -> TrainError {
        let Some(dir) = &self.dir else { return error };
        let TrainError::Unscored { source, rows } = error else { return error };
        let path = dir.root().join(format!("rollouts/unscored-step-{step:06}.jsonl"));
        match write_atomic(&path, |out| rows.iter().try_for_each(|row| writeln!(out, "{row}"))) {
            Ok(()) => TrainError::UnscoredKept { source, rows: path },
            // The error of the reward matters more than the failure to write the file.
            Err(_) => TrainError::Unscored { source, rows },
        }
    }

    /// Records the completions that `step` is about to train on.
    pub(crate) fn rollouts(&mut self, step: u64, epoch: f64, rollouts: &Rollouts) -> Result<()> {
        let Some(dir) = &mut self.dir else { return Ok(()) };
        let lines = rollout_lines(&self.dataset, rollouts, epoch);
        dir.append_rollouts(step, &lines, jiff::Timestamp::now())?;
        if let Some(log) = &self.debug_log {
            log.append(&lines, &jiff::Zoned::now())?;
        }
        if self.log_completions && step.is_multiple_of(self.logging_steps) {
            let groups = lines.chunk_by(|a, b| a.group == b.group).zip(&rollouts.groups);
            for (group, of) in groups.take(SHOWN_GROUPS) {
                let shown = best_and_worst(&of.row.sample.question(), group, self.console.width());
                self.console.line(&shown.join("\n"));
            }
        }
        if !self.trackers.is_empty() && step.is_multiple_of(self.logging_steps) {
            let mut rollouts = lines;
            rollouts.retain(|line| line.group < SHOWN_GROUPS);
            self.trackers.tell(Tracked::Completions { step, rollouts });
        }
        Ok(())
    }

    /// Records the numbers of an update's tokens.
    pub(crate) fn tokens(
        &mut self,
        step: u64,
        (first_group, rollouts): (usize, &Rollouts),
        numbers: Vec<TokenNumbers>,
        tokenizer: &Tokenizer,
    ) -> Result<()> {
        let Some(dir) = self.dir.as_mut().filter(|_| !numbers.is_empty()) else { return Ok(()) };
        let places = rollouts.groups.iter().enumerate().flat_map(|(group, of)| {
            of.completions.iter().enumerate().map(move |(sample, scored)| (group, sample, &scored.completion))
        });
        let lines: Vec<Tokens> = places
            .zip(numbers)
            .map(|((group, sample, completion), own)| {
                let mut decoder = StreamDecoder::new(false);
                let mut tokens: Vec<String> =
                    completion.sampled_ids().into_iter().map(|id| decoder.push(tokenizer, id)).collect();
                // The last token also gets the remaining bytes that do not form a character.
                if let Some(last) = tokens.last_mut() {
                    last.push_str(&decoder.finish());
                }
                // Later updates compare with the log-probabilities in `old`, so only the first update records the sampled ones.
                let is_first = own.old.is_empty();
                Tokens {
                    group: first_group + group,
                    sample,
                    tokens,
                    logprobs: own.logprobs,
                    entropies: own.entropies,
                    sampled_logprobs: if is_first { completion.logprobs.clone() } else { Vec::new() },
                    old_logprobs: own.old,
                    reference_logprobs: own.reference,
                    kept: own.kept,
                }
            })
            .collect();
        Ok(dir.write_tokens(step, &lines)?)
    }

    /// Records the metrics of an update. Returns all numbers of its line in `metrics.jsonl`, and the problems that begin or end with it.
    pub(crate) fn step(
        &mut self,
        step: u64,
        epoch: f64,
        mut metrics: Vec<Metric>,
        reward: Option<f64>,
        timer: PhaseTimer,
    ) -> Result<(Vec<Metric>, Vec<TrainingProblem>)> {
        if self.dir.is_none() {
            self.steps_timed += 1;
            return Ok((metrics, Vec::new()));
        }
        if let Some(bytes) = peak_memory_bytes() {
            metrics.push(("memory/peak_mb".into(), Some(bytes as f64 / 1e6)));
        }
        metrics.extend(self.console.activity().machine().step());
        let times = timer.finish(Instant::now());
        for (name, value) in &times {
            let value = value.unwrap_or(0.0);
            match self.phase_sums.iter_mut().find(|(n, _)| n == name) {
                Some((_, sum)) => *sum += value,
                None => self.phase_sums.push((name.clone(), value)),
            }
        }
        self.steps_timed += 1;
        self.rewards_seen.extend(reward);
        let problems = self.health.add(step, &metrics);
        let problems = self.problems(step, problems)?;
        metrics.extend(times);
        self.metrics(step, epoch, &metrics)?;
        let (own, others): (Vec<Metric>, Vec<Metric>) =
            metrics.iter().cloned().partition(|(name, _)| name.starts_with("grpo/"));
        self.window.push(&others);
        self.grpo_window.push(&own);
        if step.is_multiple_of(self.grpo_logging_steps) {
            self.show_grpo_window(step, epoch);
        }
        if step.is_multiple_of(self.logging_steps) {
            self.show_window(step, epoch);
        }
        metrics.insert(0, ("epoch".to_owned(), Some(epoch)));
        Ok((metrics, problems))
    }

    /// Shows, records and returns the problems that begin or end after a step.
    fn problems(&mut self, step: u64, mut problems: Vec<TrainingProblem>) -> Result<Vec<TrainingProblem>> {
        let Some(dir) = &self.dir else { return Ok(Vec::new()) };
        for problem in &mut problems {
            if problem.begins && !problem.good {
                let good = checkpoint::before(dir.root(), problem.since)?;
                let good = good.map_or("No checkpoint precedes the problem".to_owned(), |(_, path)| {
                    format!("The last checkpoint before the problem is {}", path.display())
                });
                problem.text = format!("{}. {good}", problem.text);
            }
            self.console.event(Some(step), &Event::Problem(problem.clone()));
        }
        Ok(problems)
    }

    /// Returns the message of a collapse that is still in progress.
    pub(crate) fn collapse(&self) -> Option<String> {
        let (rule, since) = self.health.collapse()?;
        Some(format!("{} (since step {since}). {}", rule.title, (rule.advice)()))
    }

    /// Returns the step of the last checkpoint from before the current problems.
    pub(crate) fn last_good(&self) -> Result<Option<u64>> {
        let (Some(since), Some(dir)) = (self.health.since(), &self.dir) else { return Ok(None) };
        Ok(checkpoint::before(dir.root(), since)?.map(|(step, _)| step))
    }

    /// Shows the metrics of incomplete logging windows when the run ends after `step`.
    pub(crate) fn close(&mut self, step: u64, epoch: f64) {
        self.show_grpo_window(step, epoch);
        self.show_window(step, epoch);
    }

    /// Waits up to [`TRACKERS_PATIENCE`] for trackers to send their remaining events.
    pub(crate) fn finish_trackers(&mut self) {
        self.trackers.finish(TRACKERS_PATIENCE);
    }

    fn track(&mut self, step: u64, epoch: f64, metrics: &[Metric]) {
        if !metrics.is_empty() {
            self.trackers.tell(Tracked::Metrics { step, epoch, metrics: metrics.to_vec() });
        }
    }

    fn show_grpo_window(&mut self, step: u64, epoch: f64) {
        let means = self.grpo_window.drain();
        self.track(step, epoch, &means);
        let shown: Vec<String> =
            means.into_iter().filter_map(|(name, value)| Some(format!("{name} {:.4}", value?))).collect();
        if self.grpo_logging_steps != self.logging_steps && !shown.is_empty() {
            self.console.line(&format!("step {step}: {}", shown.join(" | ")));
        }
    }

    fn show_window(&mut self, step: u64, epoch: f64) {
        let means = self.window.drain();
        self.track(step, epoch, &means);
        if !means.is_empty() {
            self.console.summary(step, self.total_steps, &means);
        }
    }

    /// Warns about selected weights that no `what` (a row, a step) reached, by name.
    pub(crate) fn unreached(&self, what: &str, names: &[&str]) {
        const SHOWN: usize = 5;
        if names.is_empty() {
            return;
        }
        let shown = names[..names.len().min(SHOWN)].join(", ");
        let more =
            if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() };
        self.console.warning(&format!(
            "no {what} reached {shown}{more}. These weights are selected for training but stay unchanged: no \
             row has the kind of medium that they process, or the model does not use them"
        ));
    }

    /// Records the result of an evaluation: its metrics, its completions and its tables. Returns the problems that it
    /// shows.
    pub(crate) fn evaluation(
        &mut self,
        step: u64,
        epoch: f64,
        evaluation: &Evaluation,
    ) -> Result<Vec<TrainingProblem>> {
        for row in &evaluation.skipped {
            self.skipped(step, row)?;
        }
        let Some(dir) = &self.dir else { return Ok(Vec::new()) };
        let lines = json_lines(&evaluation.rows);
        let dir = dir.root().join(names::EVALUATIONS);
        std::fs::create_dir_all(&dir).map_err(TrainError::io(&dir))?;
        write_atomic(&dir.join(format!("step-{step:06}.jsonl")), |out| out.write_all(&lines))?;
        write_atomic(&dir.join(format!("step-{step:06}.summary.json")), |out| {
            writeln!(out, "{:#}", evaluation.summary.to_json())
        })?;
        // The metrics are written last, so their row shows that the evaluation is complete.
        self.metrics(step, epoch, &evaluation.summary.metrics)?;
        self.track(step, epoch, &evaluation.summary.metrics);
        self.console.event(Some(step), &Event::evaluation(&evaluation.summary.metrics));
        let problems = self.health.evaluated(step, &evaluation.summary.metrics);
        self.problems(step, problems)
    }

    /// Writes the rows that led to a loss or gradient that is not finite.
    pub(crate) fn offending_rows(&self, step: u64, rollouts: &Rollouts, error: TrainError) -> TrainError {
        let what = match &error {
            TrainError::Loss(e) => told(e),
            TrainError::NonFiniteGradient { .. } => told(&error),
            _ => return error,
        };
        let Some(dir) = &self.dir else { return error };
        let path = dir.root().join(format!("nonfinite-step-{step}.jsonl"));
        let lines = json_lines(&rollout_lines(&self.dataset, rollouts, 0.0));
        match write_atomic(&path, |out| out.write_all(&lines)) {
            Ok(()) => TrainError::NonFiniteLoss { step, what, rows: path },
            Err(e) => e.into(),
        }
    }

    /// Returns the tables for the end of the run.
    pub(crate) fn report(&self, summary: &RunSummary) -> Report {
        let names = summary.after.as_ref().map(|e| e.summary.metrics.clone()).unwrap_or_default();
        let mut before_after: Vec<BeforeAfter> = names
            .into_iter()
            .filter(|(name, _)| is_headline(name))
            .map(|(name, after)| BeforeAfter {
                before: summary.before.as_ref().and_then(|e| e.metric(&name)),
                after,
                name: name.trim_start_matches("eval_").to_owned(),
            })
            .collect();
        let by_category = |evaluation: &Evaluation, category: &str| {
            let found = evaluation.summary.categories.iter().find(|c| c.name == category);
            found.and_then(|c| c.accuracy.or_else(|| c.means.first().copied().flatten()))
        };
        for Category { name: category, .. } in summary.after.iter().flat_map(|e| &e.summary.categories) {
            before_after.push(BeforeAfter {
                name: format!("  {category}"),
                before: summary.before.as_ref().and_then(|e| by_category(e, category)),
                after: summary.after.as_ref().and_then(|e| by_category(e, category)),
            });
        }
        let per_step = |sum: f64| sum / self.steps_timed.max(1) as f64;
        let secs =
            |name: &str| self.phase_sums.iter().find(|(n, _)| n == name).map_or(0.0, |(_, s)| per_step(*s));
        Report {
            before_after,
            phase_secs: self
                .phase_sums
                .iter()
                .filter_map(|(name, sum)| Some((name.strip_prefix("time/")?.to_owned(), per_step(*sum))))
                .collect(),
            step_secs: secs("step_time"),
            ahead_secs: per_step(self.ahead_secs),
            rewards: self.rewards_seen.clone(),
            run_dir: self.dir.as_ref().map(|dir| dir.root().display().to_string()).unwrap_or_default(),
        }
    }
}

fn json_lines<T: Serialize>(rows: &[T]) -> Vec<u8> {
    let mut lines = Vec::new();
    for row in rows {
        lines.extend(serde_json::to_vec(row).unwrap_or_default());
        lines.push(b'\n');
    }
    lines
}

fn rollout_lines(dataset: &Dataset, rollouts: &Rollouts, epoch: f64) -> Vec<Rollout> {
    let mut lines = Vec::new();
    let mut index = 0;
    let columns = &rollouts.rewards.logged.columns;
    for (group, Group { row, completions, .. }) in rollouts.groups.iter().enumerate() {
        let media: Vec<String> =
            media_paths(&row.sample).iter().map(|path| path.display().to_string()).collect();
        let frame_times_secs = frame_times(row, media.len());
        for (sample, Scored { completion, advantage, .. }) in completions.iter().enumerate() {
            let names = rollouts.rewards.names.iter().zip(&rollouts.rewards.values);
            lines.push(Rollout {
                epoch,
                id: row.sample.id.clone(),
                group,
                sample,
                prompt: row.prompt.text.clone(),
                completion: completion.text.clone(),
                solution: row.sample.solution.clone().map(Value::String),
                rewards: names.map(|(name, values)| (name.clone(), values[index])).collect(),
                reward: rollouts.rewards.total[index],
                advantage: *advantage,
                length: completion.num_sampled(),
                turns: environment_turns(completion),
                finish_reason: match completion.finish_reason {
                    omnigrpo_rollout::FinishReason::Stop => FinishReason::Stop,
                    omnigrpo_rollout::FinishReason::Length => FinishReason::Length,
                },
                media: media.clone(),
                frame_times_secs: frame_times_secs.clone(),
                columns: columns
                    .iter()
                    .filter_map(|(name, values)| Some((name.clone(), values.get(index)?.clone())))
                    .collect(),
                row: (sample == 0).then(|| dataset.portable_row(&row.sample)),
            });
            index += 1;
        }
    }
    lines
}

/// Returns the turns of an environment in a completion, for records; empty without one.
pub fn environment_turns(completion: &Completion) -> Vec<EnvironmentTurn> {
    let each = completion.turns.iter().zip(completion.model_turns()).zip(&completion.earlier);
    let turn = |((turn, ids), model): ((&AddedTurn, &[u32]), &String)| {
        let path = |source: &MediumRef| match &source.source {
            MediumSource::Path(path) => vec![path.clone()],
            MediumSource::Frames(frames) => frames.clone(),
        };
        let said = &turn.said;
        let pictures_first = match said.parts.as_slice() {
            [pictures @ .., Part::Text(_)] => is_pictures(pictures),
            parts => is_pictures(parts),
        };
        EnvironmentTurn {
            role: (said.role != Role::Tool).then(|| said.role.as_str().to_owned()),
            content: (!pictures_first).then(|| content(said, &turn.sources)),
            model: model.clone(),
            model_tokens: ids.len(),
            text: turn.said.written(),
            tokens: turn.turn.ids.len(),
            media: turn.sources.iter().flat_map(path).map(|path| path.display().to_string()).collect(),
        }
    };
    each.map(turn).collect()
}

fn is_pictures(parts: &[Part]) -> bool {
    parts.iter().all(|part| matches!(part, Part::Medium { kind: MediumKind::Image, .. }))
}

/// Returns the times of the sampled frames in seconds for each media path of a row. The result is empty if the row has no clip.
fn frame_times(row: &PreparedRow, num_paths: usize) -> Vec<Vec<f64>> {
    let media = &row.prompt.media;
    // Media of an environment follow those of the row.
    let media = &media[..media.len().min(row.sample.media.len().max(num_paths))];
    // The media do not correspond to the paths if a clip is a list of frames or if its audio is also read.
    if media.len() != num_paths || media.iter().all(|medium| medium.frame_times_secs.is_empty()) {
        return Vec::new();
    }
    media.iter().map(|medium| medium.frame_times_secs.clone()).collect()
}
