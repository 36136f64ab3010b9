//! The training loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use omnigrpo_data::{Dataset, Order};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{Console, Metric, PhaseTimer, RunDir, RunLock, write_atomic};
use omnigrpo_rewards::RewardSet;

use crate::buffer::BufferState;
use crate::checkpoint::{self, TrainerState};
use crate::error::{Result, TrainError};
use crate::evaluate::{EvalPlan, Evaluation, evaluate};
use crate::imitate::{self, ImitationOutcome};
use crate::model_card;
use crate::optimizer::AdamW;
use crate::plan::{EvalWhen, Objective, RunPlan, RunSummary, SaveWhen, TrainSetup};
use crate::records::Records;
use crate::replay::replay;
use crate::resume::Start;
use crate::rollouts::Rollouts;
use crate::rows::{Making, PreparedRow, RowSource, SkippedRow};
use crate::schedule::Schedule;
use crate::selection::summary;
use crate::step::{Algorithm, Collector, StepOutcome, UpdateAt, update};
use crate::timing::timed;

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
        lock,
    } = setup;
    let dir = lock.root();
    for name in checkpoint::remove_leftovers(dir)? {
        console.line(&format!("removed {name}, which an earlier process had not finished"));
    }
    selection.apply(&model)?;
    console.line(summary(&model).trim_end());
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
    let per_step = run.prompts_per_step as u64;
    // A product that should be whole may lie a little above.
    let all = (usable as f64 * run.num_epochs - 1e-6).ceil().max(1.0) as u64;
    let total =
        run.max_steps.unwrap_or_else(|| all.div_ceil(per_step).saturating_mul(run.num_iterations as u64));
    let by_epochs = run.max_steps.is_none();
    // Rows of the rollout or batch with this number. A run that went on with changed settings can have more of them than the
    // epochs need; none is empty.
    let num_rows = move |index: u64| {
        let left = all.saturating_sub(index.saturating_mul(per_step));
        (if by_epochs && left > 0 { per_step.min(left) } else { per_step }) as usize
    };
    let warmup =
        if run.warmup_steps > 0 { run.warmup_steps } else { (run.warmup_ratio * total as f64).ceil() as u64 };
    let schedule = Schedule { kind: run.schedule, warmup_steps: warmup, total_steps: total };

    let rewards = Arc::new(rewards);
    // Supervised examples and recorded rewards are not scored.
    let scoring = (!imitate && !run.replay).then(|| Arc::clone(&rewards));
    let mut source =
        RowSource::new(Arc::clone(&dataset), order, Arc::clone(&prompts), scoring, run.skip.clone());
    let start = Start::find(&run, dir, total, &model, &mut optimizer, console)?;
    let mut step = 0;
    let mut rollout_index = 0;
    let mut epochs_seen = 0;
    let mut best = None;
    let mut buffer: Option<(Rollouts, usize)> = None;
    // Of a step whose checkpoint another start can go on from.
    let mut saved_at = None;
    let mut bad_rows_of = Some(0);
    if let Start::From(resumed) = &start {
        let state = &resumed.state;
        (step, rollout_index, best) = (state.global_step, state.rollout, state.best);
        saved_at = resumed.is_in(dir).then_some(step);
        bad_rows_of = (!resumed.keeps_position()).then_some(step);
        if resumed.keeps_position() {
            epochs_seen = state.epochs_seen;
            source
                .order_mut()
                .resume(state.order.clone())
                .map_err(|e| TrainError::Data { what: e.to_string() })?;
        }
        if let Some(saved) = state.buffer.as_ref().filter(|_| resumed.keeps_rollout()) {
            let rollouts = saved.restore(&algorithm, &model, &prompts, &dataset)?;
            buffer = Some((rollouts, saved.iteration));
        }
    }
    // Everything that can be wrong with the checkpoint has been seen: now things may move.
    start.make_room(dir, model.dir(), console)?;
    let records = RunDir::open(dir, start.existing())?;
    let mut evaluated_at = None;
    if let Start::From(resumed) = &start {
        let continued = records.continued(step)?;
        evaluated_at = continued.evaluated.then_some(step);
        console.line(&format!("resuming from {} at step {step} of {total}", resumed.path.display()));
        if step == total {
            console.line("all steps are done; nothing is left to train");
        }
        let logged = continued.last_step.unwrap_or(0);
        if logged < step {
            console.line(&format!(
                "warning: metrics.jsonl ends at step {logged}; the rows up to step {step} are missing"
            ));
        }
    }
    for (name, content) in &run.files {
        write_atomic(&dir.join(name), |out| out.write_all(content))?;
    }
    let mut this = Loop {
        best,
        evaluated_at,
        records: Records::new(&run, records, Arc::clone(&dataset), console, total),
        console: console.clone(),
        lock: &lock,
        model,
        reference,
        prompts,
        shuffled,
        rewards,
        algorithm,
        run,
        eval,
    };
    for (row, id, reason) in this.run.bad_rows.clone() {
        if let Some(step) = bad_rows_of {
            this.records.skipped(step, &SkippedRow { row, id, reason, replaced_by: None })?;
        }
    }

    let mut summary = RunSummary::default();
    if this.run.eval_on_start && step == 0 {
        summary.before = this.evaluate(0, 0.0)?;
    }
    let mut last_save = Instant::now();
    let shown = console.steps(step, total);
    while step < total && !stop.load(Ordering::Relaxed) {
        let mut timer = PhaseTimer::shown(Instant::now(), console.activity());
        let factor = schedule.factor(step);
        let at = UpdateAt { step, learning_rate_factor: factor };
        let mut metrics;
        let mut reward = None;
        if imitate {
            let drawn = timed(&mut timer, "data", || source.draw_sft(num_rows(step)));
            for row in source.take_skipped() {
                this.records.skipped(step + 1, &row)?;
            }
            let examples = drawn?;
            if step + 1 < total {
                source.prepare_ahead(num_rows(step + 1), Making::Example);
            }
            let outcome =
                imitate::imitate(&this.model, &mut optimizer, at, &this.algorithm, &examples, &mut timer)?;
            metrics = imitation_metrics(&outcome);
        } else {
            let (mut rollouts, iteration) = match buffer.take() {
                Some(buffered) => buffered,
                None => {
                    let drawn = timed(&mut timer, "data", || source.draw(num_rows(rollout_index)));
                    for row in source.take_skipped() {
                        this.records.skipped(step + 1, &row)?;
                    }
                    let epoch = source.order().epochs_done();
                    let drawn = drawn?;
                    if step + (this.run.num_iterations as u64) < total {
                        source.prepare_ahead(num_rows(rollout_index + 1), Making::Prompt);
                    }
                    let collected = this.collect(drawn, rollout_index, step, epoch, &mut timer)?;
                    rollout_index += 1;
                    (collected, 0)
                }
            };
            let outcome = update(
                &this.model,
                this.reference.as_ref(),
                &mut optimizer,
                at,
                &this.algorithm,
                &mut rollouts,
                &mut timer,
            );
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(error) => return Err(this.records.offending_rows(step + 1, &rollouts, error)),
            };
            metrics = reinforcement_metrics(&outcome);
            if iteration == 0 {
                let logged = &rollouts.rewards.logged.metrics;
                metrics.extend(logged.iter().map(|(name, value)| (name.clone(), Some(*value))));
            }
            reward = outcome.sums.reward();
            if iteration + 1 < this.run.num_iterations {
                buffer = Some((rollouts, iteration + 1));
            }
        }
        metrics.push(("learning_rate".into(), Some(optimizer.learning_rate() * factor)));
        metrics.push(("data/skipped".into(), Some(source.num_skipped() as f64)));
        let ahead = source.take_ahead_time().as_secs_f64();
        metrics.push(("data/ahead_time".into(), Some(ahead)));
        this.records.ahead_secs += ahead;
        step += 1;
        let epoch = source.order().epochs_done();
        shown.advance();
        this.records.step(step, epoch, metrics, reward, timer)?;

        // What an epoch's last rows have to teach is learned with the last update of their rollout.
        let epoch_done = buffer.is_none() && epoch as u64 > epochs_seen;
        if epoch_done {
            if epochs_seen == 0 {
                this.records.unreached(&optimizer.never_reached());
            }
            epochs_seen = epoch as u64;
        }
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let evaluate_now = match this.run.eval {
            EvalWhen::Never => false,
            EvalWhen::Steps(n) => due(n),
            EvalWhen::Epoch => epoch_done,
        };
        let mut improved = false;
        // Before the checkpoint of the step: its logs are then complete, and going on from it evaluates nothing twice.
        if evaluate_now || step == total {
            let evaluation = this.evaluate(step, epoch)?;
            improved = this.improved(step, evaluation.as_ref())?;
            summary.after = evaluation.filter(|_| step == total);
        }
        // A stop on the last step leaves nothing to go on with.
        let interrupted = step < total && stop.load(Ordering::Relaxed);
        let save_now = interrupted
            || this.run.save_every.is_some_and(|time| last_save.elapsed() >= time)
            || match this.run.save {
                SaveWhen::Never => false,
                SaveWhen::Steps(n) => due(n),
                SaveWhen::Epoch => epoch_done,
                SaveWhen::Best => improved,
            };
        if save_now {
            let whole = interrupted || !this.run.save_only_model;
            let kept = whole.then_some(&optimizer);
            this.save(step, rollout_index, kept, &source, buffer.as_ref(), epochs_seen)?;
            saved_at = whole.then_some(step).or(saved_at);
            last_save = Instant::now();
        }
    }
    drop(shown);
    this.records.close(step);
    summary.interrupted = step < total;
    if summary.interrupted {
        if saved_at != Some(step) {
            this.save(step, rollout_index, Some(&optimizer), &source, buffer.as_ref(), epochs_seen)?;
        }
        console.line(&format!("stopped after step {step}; resume with --resume_from_checkpoint auto"));
    } else {
        if summary.after.is_none() {
            // Resumed at the last step.
            summary.after = this.evaluate(step, source.order().epochs_done())?;
        }
        checkpoint::save_final(&this.model, dir)?;
        this.write_model_card(step, &dataset, summary.after.as_ref())?;
    }
    summary.steps = step;
    summary.steps_here = this.records.steps_timed;
    summary.report = this.records.report(&summary);
    Ok(summary)
}

/// The state of a running loop.
struct Loop<'a> {
    lock: &'a RunLock,
    model: Model,
    reference: Option<Model>,
    prompts: Arc<PromptBuilder>,
    shuffled: Option<Arc<PromptBuilder>>,
    rewards: Arc<RewardSet>,
    algorithm: Algorithm,
    run: RunPlan,
    eval: Option<EvalPlan>,
    records: Records,
    console: Console,
    best: Option<(f64, u64)>,
    /// The step whose evaluation is in the records.
    evaluated_at: Option<u64>,
}

impl Loop<'_> {
    fn collect(
        &mut self,
        rows: Vec<PreparedRow>,
        rollout_index: u64,
        step: u64,
        epoch: f64,
        timer: &mut PhaseTimer,
    ) -> Result<Rollouts> {
        let rollouts = if self.run.replay {
            replay(&self.model, &self.prompts, &self.algorithm, rows, timer)?
        } else {
            let collector = Collector {
                model: &self.model,
                prompts: &self.prompts,
                shuffled: self.shuffled.as_deref(),
                rewards: &self.rewards,
                algorithm: &self.algorithm,
            };
            collector
                .collect(rows, rollout_index, timer)
                .map_err(|error| self.records.keep_unscored(step + 1, error))?
        };
        self.records.rollouts(step + 1, epoch, &rollouts)?;
        Ok(rollouts)
    }

    fn evaluate(&mut self, step: u64, epoch: f64) -> Result<Option<Evaluation>> {
        let Some(plan) = &self.eval else { return Ok(None) };
        self.console.activity().enter("evaluation", Instant::now());
        let mut progress = self.console.progress("evaluating", plan.rows.len() as u64);
        let evaluation = evaluate(&self.model, &self.rewards, plan, &mut |done| progress.advance(done))?;
        drop(progress);
        self.console.activity().leave();
        if self.evaluated_at != Some(step) {
            self.records.evaluation(step, epoch, &evaluation)?;
            self.evaluated_at = Some(step);
        }
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
        optimizer: Option<&AdamW>,
        source: &RowSource,
        buffer: Option<&(Rollouts, usize)>,
        epochs_seen: u64,
    ) -> Result<()> {
        self.console.activity().enter("saving", Instant::now());
        self.records.sync()?;
        let state = TrainerState {
            global_step: step,
            rollout,
            order: source.order().state().clone(),
            fingerprint: self.run.fingerprint.clone(),
            best: self.best,
            epochs_seen,
            buffer: buffer.map(|(rollouts, iteration)| BufferState::of(rollouts, *iteration)),
            ..TrainerState::default()
        };
        let keep = self.best.map(|(_, step)| step).filter(|_| self.run.save == SaveWhen::Best);
        let path =
            checkpoint::save(self.lock.root(), &self.model, optimizer, state, self.run.save_limit, keep)?;
        self.console.activity().leave();
        self.console.line(&format!("saved {}", path.display()));
        Ok(())
    }

    fn write_model_card(&self, steps: u64, dataset: &Dataset, after: Option<&Evaluation>) -> Result<()> {
        let how = match self.run.objective {
            Objective::Imitate => "supervised training".to_owned(),
            Objective::Reinforce => {
                let (group, names) = (self.algorithm.num_generations, self.rewards.names().join(", "));
                format!("GRPO, {group} completions per prompt, rewards {names}")
            }
        };
        model_card::write(self.lock.root(), &self.run, &self.model, dataset, &how, steps, after)
    }
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
    if let Some((max, mean)) = outcome.sampler_gap {
        put("sampling/distribution_logp_difference/max", max);
        put("sampling/distribution_logp_difference/mean", mean);
    }
    metrics
}

fn imitation_metrics(outcome: &ImitationOutcome) -> Vec<Metric> {
    let each = [
        ("loss", outcome.loss),
        ("entropy", outcome.entropy),
        ("grad_norm", outcome.grad_norm),
        ("num_tokens", outcome.num_tokens as f64),
        ("params_without_grad", outcome.params_without_grad as f64),
    ];
    each.into_iter().map(|(name, value)| (name.to_owned(), Some(value))).collect()
}
