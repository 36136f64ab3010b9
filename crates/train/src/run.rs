//! The training loop.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use omnigrpo_data::{Dataset, Order};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{
    BeforeAfter, Console, Existing, FinishReason, Metric, PhaseTimer, Report, Rollout, RunDir, Skipped,
    Window,
};
use omnigrpo_rewards::{Category, RewardMatrix, RewardSet};
use serde_json::{Map, Value};

use crate::checkpoint::{self, BufferState, TrainerState};
use crate::error::{Result, TrainError};
use crate::evaluate::{EvalPlan, Evaluation, evaluate};
use crate::optimizer::{AdamW, AdamWConfig};
use crate::rows::{Making, RowSource, SkipPolicy, media_paths};
use crate::schedule::{Schedule, ScheduleKind};
use crate::selection::Selection;
use crate::step::{self, Algorithm, Rollouts, StepOutcome};
use crate::timing::{peak_memory_bytes, timed};

/// When checkpoints are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveWhen {
    /// Only the model at the end.
    Never,
    /// Every so many updates.
    Steps(u64),
    /// After every epoch.
    Epoch,
    /// When the evaluation metric improves.
    Best,
}

/// When the model is evaluated, besides the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalWhen {
    /// Never.
    Never,
    /// Every so many updates.
    Steps(u64),
    /// After every epoch.
    Epoch,
}

/// Where to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeFrom {
    /// Anew.
    Start,
    /// The newest checkpoint of the run directory, if its settings are this run's.
    Newest,
    /// This checkpoint.
    Path(PathBuf),
}

/// What an update does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// GRPO: sample, score, reinforce.
    Reinforce,
    /// Supervised: imitate each row's reference answer.
    Imitate,
}

/// A run's length, records and checkpoints.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// What an update does.
    pub objective: Objective,
    /// The run directory.
    pub output_dir: PathBuf,
    /// Updates; `None` for what the epochs need.
    pub max_steps: Option<u64>,
    /// Passes over the rows.
    pub num_epochs: f64,
    /// Prompts per update.
    pub prompts_per_step: usize,
    /// Updates per rollout.
    pub num_iterations: usize,
    /// The learning-rate schedule's shape.
    pub schedule: ScheduleKind,
    /// Warm-up as a share of all updates.
    pub warmup_ratio: f64,
    /// Warm-up in updates; wins over the share when not 0.
    pub warmup_steps: u64,
    /// When to save.
    pub save: SaveWhen,
    /// Checkpoints to keep.
    pub save_limit: Option<usize>,
    /// Leave the optimizer out of checkpoints.
    pub save_only_model: bool,
    /// Where to start.
    pub resume: ResumeFrom,
    /// When to evaluate.
    pub eval: EvalWhen,
    /// Evaluate before the first update.
    pub eval_on_start: bool,
    /// Metric of `SaveWhen::Best`; higher is better.
    pub best_metric: String,
    /// Console lines are means over this many updates.
    pub logging_steps: u64,
    /// The `grpo/*` metrics get a console line of their own, with means over this many updates, when it differs from
    /// `logging_steps`.
    pub grpo_logging_steps: u64,
    /// Print a group's completions with their rewards at each console line. Files in `rollouts/` have them all.
    pub log_completions: bool,
    /// Name of the run in the model card.
    pub run_name: Option<String>,
    /// Take completions from the rows.
    pub replay: bool,
    /// What to do about unusable rows.
    pub skip: SkipPolicy,
    /// Rows known to be unusable, with the reason, from the check before training.
    pub bad_rows: Vec<(u64, String, String)>,
    /// Order of the rows.
    pub data_seed: u64,
    /// Settings that must agree between a checkpoint and the run that resumes it.
    pub fingerprint: Map<String, Value>,
    /// The resolved configuration, written to `config.yaml`.
    pub config_yaml: String,
}

/// Everything a run needs.
pub struct TrainSetup {
    /// The policy.
    pub model: Model,
    /// Makes prompts.
    pub prompts: Arc<PromptBuilder>,
    /// Makes prompts with shuffled frames, where answers that need their order earn a bonus.
    pub shuffled: Option<Arc<PromptBuilder>>,
    /// Training rows.
    pub dataset: Arc<Dataset>,
    /// Which rows of it are trained on.
    pub rows: Vec<u64>,
    /// Held-out rows.
    pub eval: Option<EvalPlan>,
    /// The rewards.
    pub rewards: RewardSet,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// What is trained.
    pub selection: Selection,
    /// Length, records, checkpoints.
    pub run: RunPlan,
}

/// What a run leaves to say.
#[derive(Debug, Default)]
pub struct RunSummary {
    /// Updates done in all.
    pub steps: u64,
    /// Updates done by this process.
    pub steps_here: u64,
    /// Whether it was asked to stop early.
    pub interrupted: bool,
    /// Evaluation before the first update.
    pub before: Option<Evaluation>,
    /// Evaluation after the last.
    pub after: Option<Evaluation>,
    /// The closing tables.
    pub report: Report,
}

/// Runs GRPO or supervised training.
///
/// # Errors
/// Settings that cannot work, unusable data, non-finite losses, a full disk. The last complete checkpoint stays usable.
pub fn train(setup: TrainSetup, console: &Console, stop: &AtomicBool) -> Result<RunSummary> {
    let TrainSetup {
        model,
        prompts,
        shuffled,
        dataset,
        rows,
        eval,
        rewards,
        algorithm,
        optimizer,
        selection,
        run,
    } = setup;
    selection.apply(&model)?;
    let imitate = run.objective == Objective::Imitate;
    let reference =
        if algorithm.loss.needs_reference() && !imitate { Some(model.reference()?) } else { None };
    let mut optimizer = AdamW::new(optimizer, model.params());

    let bad = run.bad_rows.iter().map(|(row, ..)| *row).collect();
    let order = Order::new(rows, run.data_seed, !run.replay, bad);
    let usable = order.num_usable();
    if usable == 0 {
        return Err(TrainError::Data {
            what: "no usable training row; `omnigrpo data check` lists why".into(),
        });
    }
    let total = run.max_steps.unwrap_or_else(|| {
        let rollouts = (usable as f64 * run.num_epochs / run.prompts_per_step as f64).ceil().max(1.0);
        (rollouts as u64).saturating_mul(run.num_iterations as u64)
    });
    let warmup =
        if run.warmup_steps > 0 { run.warmup_steps } else { (run.warmup_ratio * total as f64).ceil() as u64 };
    let schedule = Schedule { kind: run.schedule, warmup_steps: warmup, total_steps: total };

    let mut source = RowSource::new(Arc::clone(&dataset), order, Arc::clone(&prompts), run.skip.clone());
    let resumed = find_resume(&run, console)?;
    let existing = match &resumed {
        Some((_, state)) => Existing::ResumeAfter(state.global_step),
        None => Existing::Replace,
    };
    if let Some((path, state)) = &resumed {
        // Before the records are cut back: a checkpoint that cannot be loaded must leave them as they are.
        checkpoint::load(path, &model, &mut optimizer, state)?;
    }
    let records = RunDir::open(&run.output_dir, existing)?;
    write_config(&run)?;
    let mut this = Loop {
        best: None,
        records,
        window: Window::default(),
        grpo_window: Window::default(),
        console: console.clone(),
        total,
        rewards_seen: Vec::new(),
        phase_sums: Vec::new(),
        steps_timed: 0,
        ahead_secs: 0.0,
        model,
        reference,
        prompts,
        shuffled,
        rewards,
        algorithm,
        run,
        eval,
    };
    let mut step = 0;
    let mut rollout_index = 0;
    let mut buffer: Option<(Rollouts, usize)> = None;
    match resumed {
        Some((path, state)) => {
            checkpoint::load(&path, &this.model, &mut optimizer, &state)?;
            source
                .order_mut()
                .resume(state.order.clone())
                .map_err(|e| TrainError::Data { what: e.to_string() })?;
            step = state.global_step;
            rollout_index = state.rollout;
            this.best = state.best;
            if let Some(saved) = state.buffer {
                buffer = Some((this.restore_buffer(&dataset, &saved)?, saved.iteration));
            }
            console.line(&format!("resuming from {} at step {step} of {total}", path.display()));
        }
        None => {
            for (row, id, reason) in this.run.bad_rows.clone() {
                this.skipped(0, &crate::rows::SkippedRow { row, id, reason, replaced_by: None })?;
            }
        }
    }

    let mut summary = RunSummary::default();
    if this.run.eval_on_start && step == 0 {
        summary.before = this.evaluate(0, 0.0)?;
    }
    let mut evaluated_at = None;
    let mut saved_at = None;
    let mut epoch_before = source.order().epochs_done().floor();
    while step < total && !stop.load(Ordering::Relaxed) {
        let mut timer = PhaseTimer::start(Instant::now());
        let factor = schedule.factor(step);
        this.model.set_dropout_key(this.algorithm.seed.rotate_left(32) ^ step);
        let mut metrics;
        let mut reward = None;
        if imitate {
            let drawn = timed(&mut timer, "data", || source.draw_sft(this.run.prompts_per_step));
            for row in source.take_skipped() {
                this.skipped(step + 1, &row)?;
            }
            let examples = drawn?;
            if step + 1 < total {
                source.prepare_ahead(this.run.prompts_per_step, Making::Example);
            }
            let outcome =
                step::imitate(&this.model, &mut optimizer, factor, &this.algorithm, &examples, &mut timer)?;
            metrics = imitation_metrics(&outcome);
        } else {
            let (mut rollouts, iteration) = match buffer.take() {
                Some(buffered) => buffered,
                None => {
                    let drawn = timed(&mut timer, "data", || source.draw(this.run.prompts_per_step));
                    for row in source.take_skipped() {
                        this.skipped(step + 1, &row)?;
                    }
                    let epoch = source.order().epochs_done();
                    let drawn = drawn?;
                    if step + (this.run.num_iterations as u64) < total {
                        source.prepare_ahead(this.run.prompts_per_step, Making::Prompt);
                    }
                    let collected = this.collect(drawn, rollout_index, step, epoch, &mut timer)?;
                    rollout_index += 1;
                    (collected, 0)
                }
            };
            let outcome = step::update(
                &this.model,
                this.reference.as_ref(),
                &mut optimizer,
                factor,
                &this.algorithm,
                &mut rollouts,
                &mut timer,
            );
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(error) => return Err(this.offending_rows(step + 1, &rollouts, error)),
            };
            metrics = reinforcement_metrics(&outcome);
            reward = outcome.sums.reward();
            if iteration + 1 < this.run.num_iterations {
                buffer = Some((rollouts, iteration + 1));
            }
        }
        metrics.push(("learning_rate".into(), Some(optimizer.learning_rate() * factor)));
        metrics.push(("data/skipped".into(), Some(source.num_skipped() as f64)));
        let ahead = source.take_ahead_time().as_secs_f64();
        metrics.push(("data/ahead_time".into(), Some(ahead)));
        this.ahead_secs += ahead;
        step += 1;
        let epoch = source.order().epochs_done();
        this.record(step, epoch, metrics, reward, timer)?;

        let epoch_done = epoch.floor() > epoch_before;
        epoch_before = epoch.floor();
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let evaluate_now = match this.run.eval {
            EvalWhen::Never => false,
            EvalWhen::Steps(n) => due(n),
            EvalWhen::Epoch => epoch_done,
        };
        let mut improved = false;
        if evaluate_now && step < total {
            let evaluation = this.evaluate(step, epoch)?;
            evaluated_at = Some(step);
            improved = this.improved(step, evaluation.as_ref())?;
        }
        // A stop on the last step leaves nothing to go on with.
        let interrupted = step < total && stop.load(Ordering::Relaxed);
        let save_now = interrupted
            || match this.run.save {
                SaveWhen::Never => false,
                SaveWhen::Steps(n) => due(n),
                SaveWhen::Epoch => epoch_done,
                SaveWhen::Best => improved,
            };
        if save_now {
            this.save(step, rollout_index, &optimizer, &source, buffer.as_ref())?;
            saved_at = Some(step);
        }
    }
    summary.interrupted = step < total;
    if summary.interrupted {
        if saved_at != Some(step) {
            this.save(step, rollout_index, &optimizer, &source, buffer.as_ref())?;
        }
        console.line(&format!("stopped after step {step}; resume with --resume_from_checkpoint auto"));
    } else {
        if this.eval.is_some() && evaluated_at != Some(step) {
            let epoch = source.order().epochs_done();
            summary.after = this.evaluate(step, epoch)?;
            let improved = this.improved(step, summary.after.as_ref())?;
            if improved && this.run.save == SaveWhen::Best {
                this.save(step, rollout_index, &optimizer, &source, None)?;
            }
        }
        this.save_final()?;
        this.write_model_card(step, summary.after.as_ref())?;
    }
    summary.steps = step;
    summary.steps_here = this.steps_timed;
    summary.report = this.report(&summary);
    Ok(summary)
}

/// The state of a running loop.
struct Loop {
    model: Model,
    reference: Option<Model>,
    prompts: Arc<PromptBuilder>,
    shuffled: Option<Arc<PromptBuilder>>,
    rewards: RewardSet,
    algorithm: Algorithm,
    run: RunPlan,
    eval: Option<EvalPlan>,
    records: RunDir,
    console: Console,
    window: Window,
    grpo_window: Window,
    total: u64,
    best: Option<(f64, u64)>,
    rewards_seen: Vec<f64>,
    phase_sums: Vec<(String, f64)>,
    steps_timed: u64,
    /// Spent on other threads to read and decode rows.
    ahead_secs: f64,
}

impl Loop {
    fn skipped(&mut self, step: u64, row: &crate::rows::SkippedRow) -> Result<()> {
        self.console.line(&format!("row {} ({}) is skipped: {}", row.row, row.id, row.reason));
        let crate::rows::SkippedRow { id, reason, replaced_by, .. } = row.clone();
        Ok(self.records.append_skipped(&Skipped { step, id, reason, replaced_by })?)
    }

    fn collect(
        &mut self,
        rows: Vec<crate::rows::PreparedRow>,
        rollout_index: u64,
        step: u64,
        epoch: f64,
        timer: &mut PhaseTimer,
    ) -> Result<Rollouts> {
        let rollouts = if self.run.replay {
            step::replay(&self.model, &self.prompts, &self.algorithm, rows, timer)?
        } else {
            step::collect(
                &self.model,
                &self.prompts,
                self.shuffled.as_deref(),
                &self.rewards,
                &self.algorithm,
                rows,
                rollout_index,
                timer,
                &mut || {},
            )?
        };
        let lines = rollout_lines(&rollouts, epoch);
        self.records.append_rollouts(step + 1, &lines, jiff::Timestamp::now())?;
        if self.run.log_completions && (step + 1).is_multiple_of(self.run.logging_steps.max(1)) {
            for line in lines.iter().filter(|line| line.group == 0) {
                let reward = line.reward.map_or("none".to_owned(), |r| format!("{r:.3}"));
                self.console
                    .line(&format!("  {} [{}] reward {reward}: {}", line.id, line.sample, line.completion));
            }
        }
        Ok(rollouts)
    }

    fn record(
        &mut self,
        step: u64,
        epoch: f64,
        mut metrics: Vec<Metric>,
        reward: Option<f64>,
        timer: PhaseTimer,
    ) -> Result<()> {
        if let Some(bytes) = peak_memory_bytes() {
            metrics.push(("memory/peak_mb".into(), Some(bytes as f64 / 1e6)));
        }
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
        metrics.extend(times);
        self.records.append_metrics(step, epoch, &metrics)?;
        let (own, others): (Vec<Metric>, Vec<Metric>) =
            metrics.into_iter().partition(|(name, _)| name.starts_with("grpo/"));
        self.window.push(&others);
        self.grpo_window.push(&own);
        if self.run.grpo_logging_steps != self.run.logging_steps
            && step.is_multiple_of(self.run.grpo_logging_steps.max(1))
        {
            let means: Vec<String> = self
                .grpo_window
                .drain()
                .into_iter()
                .filter_map(|(name, value)| Some(format!("{name} {:.4}", value?)))
                .collect();
            self.console.line(&format!("step {step}: {}", means.join(" | ")));
        }
        if step.is_multiple_of(self.run.logging_steps.max(1)) || step == self.total {
            let means = self.window.drain();
            self.console.summary(step, self.total, &means);
        }
        Ok(())
    }

    fn evaluate(&mut self, step: u64, epoch: f64) -> Result<Option<Evaluation>> {
        let Some(plan) = &self.eval else { return Ok(None) };
        let mut progress = self.console.progress("evaluating", plan.rows.len() as u64);
        let evaluation = evaluate(&self.model, &self.rewards, plan, &mut |done| progress.advance(done))?;
        drop(progress);
        for row in &evaluation.skipped {
            self.skipped(step, row)?;
        }
        self.records.append_metrics(step, epoch, &evaluation.summary.metrics)?;
        let lines: Vec<u8> = evaluation
            .rows
            .iter()
            .flat_map(|row| {
                let mut line = serde_json::to_vec(row).unwrap_or_default();
                line.push(b'\n');
                line
            })
            .collect();
        let dir = self.run.output_dir.join("eval");
        std::fs::create_dir_all(&dir).map_err(TrainError::io(&dir))?;
        omnigrpo_observe::write_atomic(&dir.join(format!("step-{step:06}.jsonl")), |out| {
            out.write_all(&lines)
        })?;
        omnigrpo_observe::write_atomic(&dir.join(format!("step-{step:06}.summary.json")), |out| {
            writeln!(out, "{:#}", evaluation.summary.to_json())
        })?;
        let shown: Vec<String> = evaluation
            .summary
            .metrics
            .iter()
            .filter(|(name, _)| is_headline(name))
            .filter_map(|(name, value)| {
                Some(format!("{} {:.3}", name.trim_start_matches("eval_"), (*value)?))
            })
            .collect();
        self.console.line(&format!("evaluation at step {step}: {}", shown.join(" | ")));
        Ok(Some(evaluation))
    }

    fn improved(&mut self, step: u64, evaluation: Option<&Evaluation>) -> Result<bool> {
        let Some(evaluation) = evaluation else { return Ok(false) };
        let Some(value) = evaluation.metric(&self.run.best_metric) else {
            let known: Vec<&str> = evaluation.summary.metrics.iter().map(|(name, _)| name.as_str()).collect();
            return Err(TrainError::setting(
                "metric_for_best_model",
                &self.run.best_metric,
                format!("the evaluation has no such metric; it has {}", known.join(", ")),
            ));
        };
        let better = self.best.is_none_or(|(best, _)| value > best);
        if better {
            self.best = Some((value, step));
        }
        Ok(better)
    }

    fn save(
        &mut self,
        step: u64,
        rollout: u64,
        optimizer: &AdamW,
        source: &RowSource,
        buffer: Option<&(Rollouts, usize)>,
    ) -> Result<()> {
        self.records.sync()?;
        let state = TrainerState {
            global_step: step,
            rollout,
            order: source.order().state().clone(),
            fingerprint: self.run.fingerprint.clone(),
            best: self.best,
            buffer: buffer.map(|(rollouts, iteration)| buffer_state(rollouts, *iteration)),
            ..TrainerState::default()
        };
        let optimizer = (!self.run.save_only_model).then_some(optimizer);
        let keep = self.best.map(|(_, step)| step).filter(|_| self.run.save == SaveWhen::Best);
        let path =
            checkpoint::save(&self.run.output_dir, &self.model, optimizer, state, self.run.save_limit, keep)?;
        self.console.line(&format!("saved {}", path.display()));
        Ok(())
    }

    /// Writes the model beside the run's records: complete in a temporary directory first, then file by file into
    /// place, `config.json` last.
    fn save_final(&self) -> Result<()> {
        let (to, from) = (&self.run.output_dir, self.run.output_dir.join("tmp-final"));
        if from.exists() {
            std::fs::remove_dir_all(&from).map_err(TrainError::io(&from))?;
        }
        self.model.save_trained(&from)?;
        let mut names: Vec<std::ffi::OsString> = Vec::new();
        for entry in std::fs::read_dir(&from).map_err(TrainError::io(&from))? {
            names.push(entry.map_err(TrainError::io(&from))?.file_name());
        }
        names.sort_by_key(|name| name == "config.json");
        // An index of an earlier, sharded save would win over a single file.
        let index = to.join("model.safetensors.index.json");
        if index.exists() {
            std::fs::remove_file(&index).map_err(TrainError::io(&index))?;
        }
        for name in names {
            std::fs::rename(from.join(&name), to.join(&name)).map_err(TrainError::io(to))?;
        }
        std::fs::remove_dir(&from).map_err(TrainError::io(&from))
    }

    fn restore_buffer(&self, dataset: &Dataset, saved: &BufferState) -> Result<Rollouts> {
        let mut rows = Vec::with_capacity(saved.rows.len());
        for &row in &saved.rows {
            let fail = |e: String| TrainError::Checkpoint {
                what: format!("row {row} of a rollout in progress cannot be read any more: {e}"),
            };
            let sample = dataset.get(row).map_err(|e| fail(e.to_string()))?;
            let prompt = self.prompts.build(&sample).map_err(|e| fail(e.to_string()))?;
            rows.push(crate::rows::PreparedRow { sample, prompt: Arc::new(prompt) });
        }
        let rewards = RewardMatrix {
            names: saved.reward_names.clone(),
            values: saved.reward_values.clone(),
            weights: saved.reward_weights.clone(),
            total: saved.reward_totals.clone(),
        };
        let completions = saved.completions();
        step::restore(&self.algorithm, &self.model, rows, completions, rewards, Some(saved.old.clone()))
    }

    /// Keeps the rows behind a loss or gradient that is not finite.
    fn offending_rows(&mut self, step: u64, rollouts: &Rollouts, error: TrainError) -> TrainError {
        let what = match &error {
            TrainError::Loss(e) => e.to_string(),
            TrainError::NonFiniteGradient { .. } => error.to_string(),
            _ => return error,
        };
        let path = self.run.output_dir.join(format!("nonfinite-step-{step}.jsonl"));
        let lines: Vec<u8> = rollout_lines(rollouts, 0.0)
            .iter()
            .flat_map(|line| {
                let mut line = serde_json::to_vec(line).unwrap_or_default();
                line.push(b'\n');
                line
            })
            .collect();
        match omnigrpo_observe::write_atomic(&path, |out| out.write_all(&lines)) {
            Ok(()) => TrainError::NonFiniteLoss { step, what, rows: path },
            Err(e) => e.into(),
        }
    }

    fn write_model_card(&self, steps: u64, after: Option<&Evaluation>) -> Result<()> {
        let base = self.model.dir().display();
        let (tag, how) = match self.run.objective {
            Objective::Imitate => ("sft", "supervised training".to_owned()),
            Objective::Reinforce => {
                let (group, names) = (self.algorithm.num_generations, self.rewards.names().join(", "));
                ("grpo", format!("GRPO, {group} completions per prompt, rewards {names}"))
            }
        };
        let head = if self.model.lora().is_some() {
            format!("library_name: peft\nbase_model: {}", self.model.dir().display())
        } else {
            "library_name: transformers".to_owned()
        };
        let mut text = format!(
            "---\n{head}\ntags: [omnigrpo, {tag}]\n---\n\n# {}\n\nTrained from `{base}` with omnigrpo \
             {}: {steps} steps of {how}.\n\nThe settings are in `config.yaml`, every step's metrics in \
             `metrics.jsonl`.\n",
            self.run.run_name.clone().unwrap_or_else(|| {
                self.run.output_dir.file_name().map_or("model".into(), |n| n.to_string_lossy().into_owned())
            }),
            env!("CARGO_PKG_VERSION"),
        );
        if let Some(after) = after {
            text.push_str("\n| metric | value |\n|---|---|\n");
            for (name, value) in &after.summary.metrics {
                if let Some(value) = value {
                    text.push_str(&format!("| {name} | {value:.4} |\n"));
                }
            }
        }
        let path = self.run.output_dir.join("README.md");
        Ok(omnigrpo_observe::write_atomic(&path, |out| out.write_all(text.as_bytes()))?)
    }

    fn report(&self, summary: &RunSummary) -> Report {
        let names = summary.after.as_ref().map(|e| e.summary.metrics.clone()).unwrap_or_default();
        let before_after = names
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
        let mut before_after: Vec<BeforeAfter> = before_after;
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
            run_dir: self.run.output_dir.display().to_string(),
        }
    }
}

/// Metrics of an evaluation that are worth a line on the console.
fn is_headline(name: &str) -> bool {
    const NAMES: [&str; 5] = ["eval_reward", "eval_accuracy", "eval_war", "eval_uar", "eval_parse_fail_rate"];
    NAMES.contains(&name) || name.starts_with("eval_pass@") || name.ends_with("/mean")
}

fn reinforcement_metrics(outcome: &StepOutcome) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = outcome.sums.metrics();
    let mut put = |name: &str, value: f64| metrics.push((name.to_owned(), Some(value)));
    put("grad_norm", outcome.grad_norm);
    put("num_tokens", outcome.num_tokens as f64);
    put("params_without_grad", outcome.params_without_grad as f64);
    if let Some((max, mean)) = outcome.rollout_gap {
        put("sampling/sampling_logp_difference/max", max);
        put("sampling/sampling_logp_difference/mean", mean);
    }
    metrics
}

fn imitation_metrics(outcome: &step::ImitationOutcome) -> Vec<Metric> {
    let each = [
        ("loss", outcome.loss),
        ("entropy", outcome.entropy),
        ("grad_norm", outcome.grad_norm),
        ("num_tokens", outcome.num_tokens as f64),
        ("params_without_grad", outcome.params_without_grad as f64),
    ];
    each.into_iter().map(|(name, value)| (name.to_owned(), Some(value))).collect()
}

/// Finds the checkpoint to resume from; moves checkpoints of other settings aside.
fn find_resume(run: &RunPlan, console: &Console) -> Result<Option<(PathBuf, TrainerState)>> {
    let path = match &run.resume {
        ResumeFrom::Path(path) => path.clone(),
        ResumeFrom::Start | ResumeFrom::Newest => match checkpoint::list(&run.output_dir)?.pop() {
            None => return Ok(None),
            Some((_, path)) if run.resume == ResumeFrom::Newest => path,
            Some(_) => {
                set_aside(run, console, "resume_from_checkpoint is never")?;
                return Ok(None);
            }
        },
    };
    let state = checkpoint::read_state(&path)?;
    let differences: Vec<String> = run
        .fingerprint
        .iter()
        .filter(|(key, value)| state.fingerprint.get(*key) != Some(*value))
        .map(|(key, value)| {
            let old = state.fingerprint.get(key).map_or("unset".to_owned(), Value::to_string);
            format!("{key}: {old} → {value}")
        })
        .collect();
    if differences.is_empty() {
        let abandoned =
            checkpoint::list(&run.output_dir)?.into_iter().filter(|(step, _)| *step > state.global_step);
        move_aside(run, console, abandoned.collect(), "the run goes on from an earlier one")?;
        return Ok(Some((path, state)));
    }
    match &run.resume {
        ResumeFrom::Path(_) => Err(TrainError::Checkpoint {
            what: format!(
                "{} was written with other settings ({}); change them back, or start anew with \
                 --resume_from_checkpoint never",
                path.display(),
                differences.join("; ")
            ),
        }),
        _ => {
            set_aside(run, console, &format!("their settings differ ({})", differences.join("; ")))?;
            Ok(None)
        }
    }
}

fn set_aside(run: &RunPlan, console: &Console, why: &str) -> Result<()> {
    move_aside(run, console, checkpoint::list(&run.output_dir)?, &format!("{why}; starting anew"))
}

/// Moves checkpoints into a directory of their own, with a copy of the metrics that belong to them.
fn move_aside(run: &RunPlan, console: &Console, checkpoints: Vec<(u64, PathBuf)>, why: &str) -> Result<()> {
    if checkpoints.is_empty() {
        return Ok(());
    }
    let mut n = 1;
    let aside = loop {
        let path = run.output_dir.join(format!("superseded-{n}"));
        if !path.exists() {
            break path;
        }
        n += 1;
    };
    std::fs::create_dir_all(&aside).map_err(TrainError::io(&aside))?;
    let metrics = run.output_dir.join("metrics.jsonl");
    if metrics.is_file() {
        std::fs::copy(&metrics, aside.join("metrics.jsonl")).map_err(TrainError::io(&metrics))?;
    }
    for (_, path) in checkpoints {
        if let Some(name) = path.file_name() {
            std::fs::rename(&path, aside.join(name)).map_err(TrainError::io(&path))?;
        }
    }
    console.line(&format!("earlier checkpoints were moved to {}: {why}", aside.display()));
    Ok(())
}

fn write_config(run: &RunPlan) -> Result<()> {
    let path = run.output_dir.join("config.yaml");
    Ok(omnigrpo_observe::write_atomic(&path, |out| out.write_all(run.config_yaml.as_bytes()))?)
}

fn rollout_lines(rollouts: &Rollouts, epoch: f64) -> Vec<Rollout> {
    let mut lines = Vec::new();
    let mut index = 0;
    for (group, (row, completions)) in rollouts.rows.iter().zip(&rollouts.completions).enumerate() {
        let media: Vec<String> =
            media_paths(&row.sample).iter().map(|path| path.display().to_string()).collect();
        for (sample, completion) in completions.iter().enumerate() {
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
                advantage: rollouts.advantages.values[index],
                length: completion.ids.len(),
                finish_reason: match completion.finish_reason {
                    omnigrpo_rollout::FinishReason::Stop => FinishReason::Stop,
                    omnigrpo_rollout::FinishReason::Length => FinishReason::Length,
                },
                media: media.clone(),
            });
            index += 1;
        }
    }
    lines
}

fn buffer_state(rollouts: &Rollouts, iteration: usize) -> BufferState {
    let each = |f: &dyn Fn(&omnigrpo_rollout::Completion) -> bool| -> Vec<Vec<bool>> {
        rollouts.completions.iter().map(|g| g.iter().map(f).collect()).collect()
    };
    BufferState {
        iteration,
        rows: rollouts.rows.iter().map(|r| r.sample.row).collect(),
        ids: rollouts.completions.iter().map(|g| g.iter().map(|c| c.ids.clone()).collect()).collect(),
        texts: rollouts.completions.iter().map(|g| g.iter().map(|c| c.text.clone()).collect()).collect(),
        truncated: each(&|c| c.finish_reason == omnigrpo_rollout::FinishReason::Length),
        old: rollouts.old.clone().unwrap_or_default(),
        reward_names: rollouts.rewards.names.clone(),
        reward_weights: rollouts.rewards.weights.clone(),
        reward_values: rollouts.rewards.values.clone(),
        reward_totals: rollouts.rewards.total.clone(),
    }
}
