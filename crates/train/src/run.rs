//! Training loop.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use omnigrpo_data::{Dataset, Order};
use omnigrpo_grpo::CorrectionKind;
use omnigrpo_guard::{Fault, told};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{Aims, Console, Health, Metric, PhaseTimer, RunDir, RunLock, Trackers, write_atomic};
use omnigrpo_rewards::RewardSet;

use crate::buffer::BufferState;
use crate::checkpoint::{self, TrainerState};
use crate::error::{BEST_METRIC, NEWEST, RESUME, Result, TrainError};
use crate::evaluate::{EvalPlan, Evaluation, evaluate_split};
use crate::imitate::{self, ImitationOutcome};
use crate::lender::Lenders;
use crate::length::Length;
use crate::model_card;
use crate::optimizer::AdamW;
use crate::pass::{entropies, old_logprobs, reference_logprobs};
use crate::plan::{EvalWhen, Objective, Observer, RunPlan, RunSummary, SaveWhen, TrainSetup};
use crate::prepare::Trained;
use crate::records::Records;
use crate::replay::replay;
use crate::resume::{Resumed, Start};
use crate::rollouts::Rollouts;
use crate::rows::{Making, PreparedRow, RowSource, SkippedRow};
use crate::schedule::Schedule;
use crate::selection::summary;
use crate::step::{Algorithm, Collector, StepOutcome, UpdateAt, update};
use crate::timing::{gpu_load, timed};

/// Runs GRPO or supervised training, without the checks of [`Run::prepare`](crate::Run::prepare).
///
/// # Errors
/// Returns an error if a setting is invalid, the data are unusable, a loss is not finite, or the disk is full. The last complete
/// checkpoint stays usable. If the machine fails during a step, the run writes a checkpoint and ends without an error
/// ([`RunSummary::machine`]).
pub fn train(setup: TrainSetup, console: &Console, stop: &AtomicBool) -> Result<Trained> {
    let mut this = Loop::begin(setup, console)?;
    let total = this.length.total;
    let mut step = this.place.step;
    let mut summary = RunSummary::default();
    if this.run.eval_on_start && step == 0 {
        summary.before = this.evaluate(0, 0.0)?;
    }
    let mut last_save = Instant::now();
    let shown = console.steps(step, total);
    let _watching = console.activity().machine().watch(gpu_load(this.model.device()));
    let mut asked_to_stop = false;
    if this.place.evaluation_due && step < total {
        let improved = this.evaluate_step(step, &mut summary)?;
        if improved && this.run.save == SaveWhen::Best {
            this.save(!this.run.save_only_model)?;
        }
        asked_to_stop = this.place.evaluation_due;
    }
    let split = this.algorithm.split.clone();
    // All ranks stop if one of them is asked to.
    while step < total && !split.ranks.any(asked_to_stop || stop.load(Ordering::Relaxed))? {
        let mut timer = PhaseTimer::shown(Instant::now(), console.activity());
        let factor = this.schedule.factor(step);
        let at = UpdateAt { step, learning_rate_factor: factor };
        let order = this.source.order().clone();
        let updated = match this.run.objective {
            Objective::Imitate => this.imitate(at, &mut timer).map(|metrics| (metrics, None)),
            Objective::Reinforce => this.reinforce(at, &mut timer),
        };
        let (mut metrics, reward) = match updated {
            // Such an error occurs before the weights change, so restoring the order of rows undoes the step.
            Err(error) if error.fault() == Fault::Machine => {
                *this.source.order_mut() = order;
                summary.machine = Some(told(&error));
                break;
            }
            updated => updated?,
        };
        this.move_reference(step + 1)?;
        metrics.push(("learning_rate".into(), Some(this.optimizer.learning_rate() * factor)));
        metrics.push(("data/skipped".into(), Some(this.source.num_skipped() as f64)));
        let ahead = this.source.take_ahead_time().as_secs_f64();
        metrics.push(("data/ahead_time".into(), Some(ahead)));
        this.records.ahead_secs += ahead;
        metrics.push(("memory/optimizer_mb".into(), Some(this.optimizer.host_bytes() as f64 / 1e6)));
        let kept = this.prompts.media_store().usage();
        if kept.asked > 0 {
            metrics.push(("memory/media_store_mb".into(), Some(kept.bytes as f64 / 1e6)));
            metrics.push(("memory/media_found".into(), Some(kept.found as f64 / kept.asked as f64)));
        }
        step += 1;
        this.place.step = step;
        let epoch = this.source.order().epochs_done();
        shown.advance(&metrics);
        let (metrics, warnings) = split.agree(this.records.step(step, epoch, metrics, reward, timer))?;
        asked_to_stop |= this.observer.step(step, &metrics).is_break();
        warnings.iter().for_each(|warning| this.observer.problem(warning));
        if this.run.stop_on_collapse && step < total {
            // Only the first rank watches the metrics; all of them end alike.
            summary.collapsed = split.by_first(|| Ok(this.records.collapse()))?;
            asked_to_stop |= summary.collapsed.is_some();
        }

        // An epoch is complete after the last update on its rows.
        let epoch_done = this.place.buffer.is_none() && epoch as u64 > this.place.epochs_seen;
        if epoch_done {
            if this.place.epochs_seen == 0 {
                this.records.unreached("row of the first epoch", &this.optimizer.never_reached());
            }
            this.place.epochs_seen = epoch as u64;
        }
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let evaluate_now = match this.run.eval {
            EvalWhen::Never => false,
            EvalWhen::Steps(n) => due(n),
            EvalWhen::Epoch => epoch_done,
        };
        let mut improved = false;
        // The evaluation precedes the checkpoint of the step. The checkpoint's logs are then complete, and a resumed run does not
        // repeat the evaluation.
        if evaluate_now || step == total {
            improved = this.evaluate_step(step, &mut summary)?;
            asked_to_stop |= this.place.evaluation_due;
        }
        asked_to_stop = split.ranks.any(asked_to_stop || stop.load(Ordering::Relaxed))?;
        // A stop during the last step is not an interruption: no work remains.
        let interrupted = step < total && asked_to_stop;
        let asked_to_save = this.run.save_asked.swap(false, Ordering::Relaxed);
        let late = asked_to_save || this.run.save_every.is_some_and(|time| last_save.elapsed() >= time);
        let save_now = interrupted
            || split.ranks.any(late && split.ranks.is_first())?
            || match this.run.save {
                SaveWhen::Never => false,
                SaveWhen::Steps(n) => due(n),
                SaveWhen::Epoch => epoch_done,
                SaveWhen::Best => improved,
            };
        if save_now {
            this.save(interrupted || !this.run.save_only_model)?;
            last_save = Instant::now();
        }
    }
    drop(shown);
    this.end(summary)
}

/// Progress of a run.
#[derive(Default)]
struct Place {
    /// Number of updates done.
    step: u64,
    /// Number of rollouts drawn.
    rollout: u64,
    epochs_seen: u64,
    /// Rollout in progress: its parts, and the number of updates done with it.
    buffer: Option<(Vec<Rollouts>, usize)>,
    /// Best value of the evaluation metric and its step.
    best: Option<(f64, u64)>,
    /// Step whose evaluation is in the records.
    evaluated_at: Option<u64>,
    /// True if the machine failed during the evaluation of this step.
    evaluation_due: bool,
    /// Step of the last checkpoint with the optimizer's state, from which a run can resume.
    saved_at: Option<u64>,
}

impl Place {
    /// Returns the progress stored in a checkpoint, without its rollout in progress.
    fn of(resumed: &Resumed, dir: &Path) -> Self {
        let state = &resumed.state;
        Self {
            step: state.global_step,
            rollout: state.rollout,
            epochs_seen: if resumed.keeps_position() { state.epochs_seen } else { 0 },
            best: state.best,
            evaluation_due: state.evaluation_due,
            saved_at: resumed.is_in(dir).then_some(state.global_step),
            ..Self::default()
        }
    }
}

/// State of the training loop.
struct Loop {
    model: Model,
    reference: Option<Model>,
    prompts: Arc<PromptBuilder>,
    shuffled: Option<Arc<PromptBuilder>>,
    rewards: Arc<RewardSet>,
    algorithm: Algorithm,
    optimizer: AdamW,
    schedule: Schedule,
    length: Length,
    dataset: Arc<Dataset>,
    source: RowSource,
    run: RunPlan,
    eval: Option<EvalPlan>,
    place: Place,
    records: Records,
    observer: Box<dyn Observer>,
    console: Console,
    /// Lock on the run directory. It is the last field, so it is released last.
    lock: RunLock,
}

impl Loop {
    /// Determines the starting point of the run and opens its records.
    fn begin(setup: TrainSetup, console: &Console) -> Result<Self> {
        let TrainSetup {
            mut model,
            prompts,
            shuffled,
            dataset,
            rows,
            eval,
            rewards,
            mut algorithm,
            optimizer,
            selection,
            run,
            lock,
            observer,
            trackers,
            reference_device,
        } = setup;
        let dir = lock.root();
        algorithm.split.validate()?;
        if algorithm.sampling.interaction.is_some() && run.replay {
            let what =
                "an environment cannot answer recorded completions; leave out the replay or the environment";
            return Err(TrainError::Data { what: what.to_owned() });
        }
        algorithm.split.prompts_per_step = Some(run.prompts_per_step);
        let split = algorithm.split.clone();
        split.only_first(|| {
            for name in checkpoint::remove_leftovers(dir)? {
                console.line(&format!("removed {name}, which an earlier process left incomplete"));
            }
            Ok(())
        })?;
        selection.apply(&model)?;
        console.line(summary(&model).trim_end());
        let imitate = run.objective == Objective::Imitate;
        if imitate && !split.is_off() {
            return Err(TrainError::setting(
                "gradient_leaves",
                &split.leaves.to_string(),
                "supervised training runs in one process with one leaf; start it without a launcher".into(),
            ));
        }
        let mut reference = if algorithm.loss.needs_reference() && !imitate {
            Some(match run.lends_reference(reference_device) {
                true => model.reference_in_place()?,
                false => model.reference_on(reference_device)?,
            })
        } else {
            None
        };
        if run.sync_reference.is_some() && !model.adapter_params().is_empty() {
            return Err(TrainError::setting(
                "sync_ref_model",
                "true",
                "unsupported with adapters: the reference is then the model without them, whose weights are fixed; \
                 turn one of the two off"
                    .into(),
            ));
        }
        let mut optimizer = AdamW::new(optimizer, model.params()).over(&split, &model).in_run(dir);

        let bad = run.bad_rows.iter().map(|(row, ..)| *row).collect();
        let order = Order::new(rows, run.data_seed, !run.replay, bad).learning(run.lessons);
        let length = Length::of(&run, order.num_usable())?;
        let rewards = Arc::new(rewards);
        // Supervised examples and rows with recorded rewards are not scored.
        let scoring = (!imitate && !run.replay).then(|| Arc::clone(&rewards));
        let mut source =
            RowSource::new(Arc::clone(&dataset), order, Arc::clone(&prompts), scoring, run.skip.clone())
                .over(&split, algorithm.micro());

        let start = Start::find_together(&split, &run, dir, length.total, &model, &mut optimizer, console)?;
        split.agree(optimizer.reserve())?;
        let mut place = Place::default();
        if let Start::From(resumed) = &start {
            if let (Some(reference), Some(_)) = (&reference, run.sync_reference) {
                split.agree(checkpoint::load_reference(&resumed.path, reference))?;
            }
            place = Place::of(resumed, dir);
            if resumed.keeps_position() {
                source.order_mut().resume(resumed.state.order.clone())?;
            }
            if let Some(saved) = resumed.state.buffer.as_ref().filter(|_| resumed.keeps_rollout()) {
                let moves = reference.is_some() && run.sync_reference.is_some();
                let (per_step, dataset) = (run.prompts_per_step, &dataset);
                let saved = saved.clone().following(dir);
                let parts = saved.restore(&algorithm, &model, &prompts, dataset, per_step, moves)?;
                place.buffer = Some((parts, saved.iteration));
            }
        }
        algorithm.split.lenders = Lenders::cut(&split, &mut model, reference.as_mut())?;
        let scored = !imitate && !run.replay;
        let mut health = Health::new(Aims {
            range: scored.then(|| rewards.range()),
            rewards: rewards
                .names()
                .into_iter()
                .filter(|_| scored)
                .filter_map(|name| Some((name.to_owned(), rewards.range_of(name)?)))
                .collect(),
            corrected: algorithm.loss.correction.kind != CorrectionKind::Off,
        });
        let mut records = None;
        place.evaluated_at = split.by_first(|| {
            // Files are moved only after the checkpoint has been loaded without an error.
            start.make_room(dir, model.dir(), console)?;
            let own = RunDir::open(dir, start.existing())?;
            let mut evaluated_at = None;
            if let Start::From(resumed) = &start {
                evaluated_at = continued(&own, resumed, length.total, console)?;
                own.each_step(|step, metrics| drop(health.add(step, metrics)))?;
            }
            for (name, content) in &run.files {
                write_atomic(&dir.join(name), |out| out.write_all(content))?;
            }
            records = Some(own);
            Ok(evaluated_at)
        })?;
        let first = split.ranks.is_first();
        let trackers = if first { trackers() } else { Trackers::none(console) };
        let observer = if first { observer } else { Box::new(()) };
        let mut records =
            Records::new(&run, records, Arc::clone(&dataset), console, trackers, length.total, health);
        let known = matches!(&start, Start::From(resumed) if resumed.keeps_position());
        if !known {
            let mut bad = run.bad_rows.iter().cloned().map(|(row, id, reason)| SkippedRow {
                row,
                id,
                reason,
                replaced_by: None,
            });
            split.agree(bad.try_for_each(|row| records.skipped(place.step, &row)))?;
        }
        Ok(Self {
            schedule: length.schedule(&run),
            console: console.clone(),
            model,
            reference,
            prompts,
            shuffled,
            rewards,
            algorithm,
            optimizer,
            length,
            dataset,
            source,
            run,
            eval,
            place,
            records,
            observer,
            lock,
        })
    }

    /// Performs a supervised update.
    fn imitate(&mut self, at: UpdateAt, timer: &mut PhaseTimer) -> Result<Vec<Metric>> {
        let (step, length) = (at.step, self.length);
        let drawn = timed(timer, "data", || self.source.draw_sft(length.num_rows(step)));
        self.record_skipped(step + 1)?;
        let examples = drawn?;
        if step + 1 < length.total {
            self.source.prepare_ahead(length.num_rows(step + 1), Making::Example);
        }
        let outcome =
            imitate::imitate(&self.model, &mut self.optimizer, at, &self.algorithm, &examples, timer)?;
        Ok(imitation_metrics(&outcome))
    }

    /// Performs an update from the rollout in progress or from a new one, and returns its metrics and the mean reward.
    fn reinforce(&mut self, at: UpdateAt, timer: &mut PhaseTimer) -> Result<(Vec<Metric>, Option<f64>)> {
        let (mut parts, done) = match self.place.buffer.take() {
            Some(buffered) => buffered,
            None => (self.rollout(at.step, timer)?, 0),
        };
        let (part, updates) = (done % parts.len(), parts.len() * self.run.num_iterations);
        let first_group = parts[..part].iter().map(|part| part.groups.len()).sum();
        let rollouts = &mut parts[part];
        let outcome = update(
            &self.model,
            self.reference.as_ref(),
            &mut self.optimizer,
            at,
            &self.algorithm,
            rollouts,
            timer,
        )
        .map_err(|error| self.records.offending_rows(at.step + 1, rollouts, error))?;
        let mut metrics = reinforcement_metrics(&outcome);
        let reward = outcome.sums.reward();
        let recorded = timed(timer, "records", || {
            let places = (first_group, &*rollouts);
            self.records.tokens(at.step + 1, places, outcome.tokens, self.prompts.tokenizer())
        });
        self.algorithm.split.agree(recorded)?;
        if done == 0 {
            let logged = &rollouts.rewards.logged.metrics;
            metrics.extend(logged.iter().map(|(name, value)| (name.clone(), Some(*value))));
        }
        if done + 1 < updates {
            self.place.buffer = Some((parts, done + 1));
        }
        Ok((metrics, reward))
    }

    /// Moves the reference towards the policy if a sync is due after `step` updates. The new weights are `α π + (1 − α) π_ref`
    /// (TR-DPO, arXiv 2404.09656).
    fn move_reference(&self, step: u64) -> Result<()> {
        let (Some(reference), Some(sync)) = (&self.reference, self.run.sync_reference) else { return Ok(()) };
        if !step.is_multiple_of(sync.every) {
            return Ok(());
        }
        let mixup = sync.mixup as f32;
        self.algorithm.split.lenders.whole(|| {
            for (own, policy) in reference.params().iter().zip(self.model.params()) {
                if own.shares_storage(policy) {
                    continue;
                }
                let mut weights = own.read().f32().into_owned();
                for (own, policy) in weights.iter_mut().zip(policy.read().f32().iter()) {
                    *own = mixup * policy + (1.0 - mixup) * *own;
                }
                own.store(&weights)?;
            }
            Ok(())
        })
    }

    /// Records the rows that were skipped since the last call.
    fn record_skipped(&mut self, step: u64) -> Result<()> {
        let mut rows = self.source.take_skipped().into_iter();
        self.algorithm.split.agree(rows.try_for_each(|row| self.records.skipped(step, &row)))
    }

    /// Samples the next rollout and splits it into one part per update of an iteration.
    fn rollout(&mut self, step: u64, timer: &mut PhaseTimer) -> Result<Vec<Rollouts>> {
        let (index, length) = (self.place.rollout, self.length);
        let drawn = timed(timer, "data", || self.source.draw(length.num_rows(index)));
        self.record_skipped(step + 1)?;
        let epoch = self.source.order().epochs_done();
        let drawn = drawn?;
        let updates = drawn.len().div_ceil(self.run.prompts_per_step) * self.run.num_iterations;
        if step + (updates as u64) < length.total {
            self.source.prepare_ahead(length.num_rows(index + 1), Making::Prompt);
        }
        let collected = self.collect(drawn, step, epoch, timer)?;
        self.record_skipped(step + 1)?;
        let rewards = collected.rewards.total.chunks(self.algorithm.num_generations);
        for (group, rewards) in collected.groups.iter().zip(rewards) {
            let known: Vec<f64> = rewards.iter().copied().flatten().collect();
            if !known.is_empty() {
                let mean = known.iter().sum::<f64>() / known.len() as f64;
                self.source.order_mut().earned(group.row.sample.row, mean);
            }
        }
        self.place.rollout += 1;
        let mut parts = collected.split(self.run.prompts_per_step);
        for (at, part) in parts.iter_mut().enumerate() {
            let (model, algorithm) = (&self.model, &self.algorithm);
            if self.run.replay && algorithm.loss.top_entropy < 1.0 {
                timed(timer, "entropy", || entropies(model, algorithm, part))?;
            }
            part.gate(&algorithm.loss)?;
            if at > 0 && part.completions().any(|c| c.old.is_none()) {
                timed(timer, "old", || old_logprobs(model, algorithm, part))?;
            }
            // A fixed reference can be evaluated later, when an update needs it. A moving one must be evaluated now.
            if let Some(reference) = self.reference.as_ref().filter(|_| self.run.sync_reference.is_some()) {
                timed(timer, "reference", || reference_logprobs(reference, model, algorithm, part))?;
            }
        }
        Ok(parts)
    }

    fn collect(
        &mut self,
        rows: Vec<PreparedRow>,
        step: u64,
        epoch: f64,
        timer: &mut PhaseTimer,
    ) -> Result<Rollouts> {
        let lenders = self.algorithm.split.lenders.of_policy();
        let rollouts = lenders.whole(|| {
            if self.run.replay {
                return replay(&self.model, &self.prompts, &self.algorithm, rows, timer);
            }
            let collector = Collector {
                model: &self.model,
                prompts: &self.prompts,
                shuffled: self.shuffled.as_deref(),
                rewards: &self.rewards,
                algorithm: &self.algorithm,
            };
            let source = &mut self.source;
            collector
                .collect(rows, self.place.rollout, &mut |count| source.draw(count), timer)
                .map_err(|error| self.records.keep_unscored(step + 1, error))
        })?;
        self.observer.rollout(step, &rollouts);
        let recorded = timed(timer, "records", || self.records.rollouts(step + 1, epoch, &rollouts));
        self.algorithm.split.agree(recorded.map(|()| rollouts))
    }

    fn evaluate(&mut self, step: u64, epoch: f64) -> Result<Option<Evaluation>> {
        let Some(plan) = &self.eval else { return Ok(None) };
        self.console.activity().enter("evaluation", Instant::now());
        let mut progress = self.console.progress("evaluating", plan.rows.len() as u64);
        let (model, rewards, split) = (&self.model, &self.rewards, &self.algorithm.split);
        let evaluation = split
            .lenders
            .of_policy()
            .whole(|| evaluate_split(split, model, rewards, plan, &mut |done| progress.advance(done)))?;
        drop(progress);
        self.console.activity().leave();
        evaluation.usable()?;
        self.observer.evaluation(step, &evaluation);
        if self.place.evaluated_at != Some(step) {
            let recorded = self.records.evaluation(step, epoch, &evaluation);
            self.algorithm.split.agree(recorded)?;
            self.place.evaluated_at = Some(step);
        }
        Ok(Some(evaluation))
    }

    /// Evaluates after a step and returns true if the model is the best so far. If the machine fails, the evaluation stays due
    /// and is repeated when the run resumes.
    ///
    /// # Errors
    /// Returns an error if the evaluation fails. A failure of the machine is an error only after the last step, where a
    /// checkpoint is saved first.
    fn evaluate_step(&mut self, step: u64, summary: &mut RunSummary) -> Result<bool> {
        self.place.evaluation_due = true;
        let evaluation = match self.evaluate(step, self.source.order().epochs_done()) {
            Err(error) if error.fault() == Fault::Machine => {
                if step == self.length.total {
                    self.save(true)?;
                    return Err(error);
                }
                summary.machine = Some(told(&error));
                return Ok(false);
            }
            evaluation => evaluation?,
        };
        self.place.evaluation_due = false;
        let improved = self.improved(step, evaluation.as_ref())?;
        summary.after = evaluation.filter(|_| step == self.length.total);
        Ok(improved)
    }

    /// Returns true if an evaluation is the best so far, and false if its metric has no value.
    fn improved(&mut self, step: u64, evaluation: Option<&Evaluation>) -> Result<bool> {
        let Some(evaluation) = evaluation else { return Ok(false) };
        let metrics = &evaluation.summary.metrics;
        let Some((name, value)) = metrics.iter().find(|(name, _)| *name == self.run.best_metric) else {
            let known: Vec<&str> = metrics.iter().map(|(name, _)| name.as_str()).collect();
            return Err(TrainError::setting(
                BEST_METRIC,
                &self.run.best_metric,
                format!("the evaluation has no metric of this name; expected one of {}", known.join(", ")),
            ));
        };
        let Some(value) = *value else {
            self.console.line(&format!(
                "the evaluation after step {step} has no value for {name}, so it is not compared with the best one"
            ));
            return Ok(false);
        };
        let better = self.place.best.is_none_or(|(best, _)| value > best);
        if better {
            self.place.best = Some((value, step));
        }
        Ok(better)
    }

    /// Writes a checkpoint, on the first rank. It includes the optimizer's state if `whole` is true; only then can a run resume from
    /// it.
    fn save(&mut self, whole: bool) -> Result<()> {
        let split = self.algorithm.split.clone();
        if self.optimizer.exchange().is_cut() {
            // The first rank writes the parts of all ranks.
            split.agree(checkpoint::check_moments(&self.optimizer))?;
        }
        // A fixed reference is not saved.
        let lenders = match self.run.sync_reference {
            Some(_) => split.lenders.clone(),
            None => split.lenders.of_policy(),
        };
        lenders.whole(|| {
            split.agree(if split.ranks.is_first() {
                let written = self.write(whole);
                written.and(self.optimizer.end_of_service())
            } else {
                self.optimizer.serve()
            })
        })?;
        if whole {
            self.place.saved_at = Some(self.place.step);
        }
        Ok(())
    }

    fn write(&mut self, whole: bool) -> Result<()> {
        self.console.activity().enter("saving", Instant::now());
        self.records.sync()?;
        let place = &self.place;
        let state = TrainerState {
            global_step: place.step,
            rollout: place.rollout,
            order: self.source.order().state().clone(),
            fingerprint: self.run.fingerprint.clone(),
            best: place.best,
            epochs_seen: place.epochs_seen,
            evaluation_due: place.evaluation_due,
            buffer: place.buffer.as_ref().map(|(rollouts, iteration)| BufferState::of(rollouts, *iteration)),
            ..TrainerState::default()
        };
        let parts = checkpoint::Parts {
            model: &self.model,
            optimizer: whole.then_some(&self.optimizer),
            reference: self.reference.as_ref().filter(|_| self.run.sync_reference.is_some()),
        };
        let best = place.best.map(|(_, step)| step).filter(|_| self.run.save == SaveWhen::Best);
        let keep = [best, self.observer.reads(), self.records.last_good()?];
        let path = checkpoint::save(self.lock.root(), parts, state, self.run.save_limit, &keep)?;
        self.console.activity().leave();
        self.console.line(&format!("saved {}", path.display()));
        self.observer.saved(self.place.step, &path);
        Ok(())
    }

    /// Ends the run: writes the model with its card, or a checkpoint if the run was interrupted, and creates the report.
    fn end(mut self, mut summary: RunSummary) -> Result<Trained> {
        let step = self.place.step;
        self.records.close(step, self.source.order().epochs_done());
        summary.interrupted = step < self.length.total;
        if summary.interrupted {
            if self.place.saved_at != Some(step) {
                self.save(true)?;
            }
            self.console.line(&format!("stopped after step {step}; resume with {RESUME} {NEWEST}"));
        } else {
            if self.place.epochs_seen == 0 && step > 0 {
                self.records.unreached("step", &self.optimizer.never_reached());
            }
            if summary.after.is_none() {
                // The run resumed after its last step, so this process has no evaluation yet.
                summary.after = self.evaluate(step, self.source.order().epochs_done())?;
            }
            self.algorithm.split.lenders.of_policy().gather()?;
            self.algorithm.split.only_first(|| {
                checkpoint::save_final(&self.model, self.lock.root())?;
                self.write_model_card(&summary)
            })?;
        }
        self.algorithm.split.lenders.of_policy().gather()?;
        summary.steps = step;
        summary.steps_here = self.records.steps_timed;
        self.records.finish_trackers();
        summary.report = self.records.report(&summary);
        Ok(Trained { model: self.model, summary })
    }

    fn write_model_card(&self, summary: &RunSummary) -> Result<()> {
        let facts = model_card::Facts {
            run: &self.run,
            model: &self.model,
            dataset: &self.dataset,
            algorithm: &self.algorithm,
            optimizer: self.optimizer.config(),
            rewards: self.rewards.names(),
            num_steps: self.place.step,
            before: summary.before.as_ref(),
            after: summary.after.as_ref(),
        };
        model_card::write(self.lock.root(), facts)
    }
}

/// Reports where the run resumes. Returns the checkpoint's step if its evaluation is in the records.
fn continued(records: &RunDir, resumed: &Resumed, total: u64, console: &Console) -> Result<Option<u64>> {
    let step = resumed.state.global_step;
    let continued = records.continued(step)?;
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
    Ok(continued.evaluated.then_some(step))
}

fn reinforcement_metrics(outcome: &StepOutcome) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = outcome.sums.metrics();
    let mut put = |name: &str, value: f64| metrics.push((name.to_owned(), Some(value)));
    put("grad_norm", outcome.grad_norm);
    put("num_tokens", outcome.num_tokens as f64);
    put("params_without_grad", outcome.params_without_grad as f64);
    if let Some([balance, z]) = outcome.router {
        put("router_aux_loss", balance);
        put("router_z_loss", z);
    }
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
    let router = outcome.router.into_iter().flatten();
    let router = ["router_aux_loss", "router_z_loss"].into_iter().zip(router);
    each.into_iter().chain(router).map(|(name, value)| (name.to_owned(), Some(value))).collect()
}
