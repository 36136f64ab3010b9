//! Training loop.

mod begin;
mod evaluation;
mod save;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use omnigrpo_data::Dataset;
use omnigrpo_grpo::metric;
use omnigrpo_guard::{Fault, told};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{Console, Event, Metric, PhaseTimer, RunLock};
use omnigrpo_rewards::RewardSet;
use omnigrpo_rollout::Interaction;

use crate::error::Result;
use crate::evaluate::EvalPlan;
use crate::imitate;
use crate::length::Length;
use crate::optimizer::AdamW;
use crate::pass::{entropies, old_logprobs, reference_logprobs};
use crate::plan::{Asked, Curves, Objective, Observer, RunPlan, RunSummary, TrainSetup};
use crate::prepare::Trained;
use crate::records::Records;
use crate::replay::replay;
use crate::resume::Resumed;
use crate::returned::Returned;
use crate::rollouts::Rollouts;
use crate::rounding::Rounding;
use crate::rows::{Making, PreparedRow, RowSource};
use crate::schedule::Schedule;
use crate::step::{Algorithm, Collector, UpdateAt, update};
use crate::timing::{gpu_load, timed};

/// Runs GRPO or supervised training, without the checks of [`Run::prepare`](crate::Run::prepare).
///
/// # Errors
/// Returns an error if a setting is invalid, the data are unusable, a loss is not finite, or the disk is full. The last complete
/// checkpoint stays usable. If the machine fails during a step, the run writes a checkpoint and ends without an error
/// ([`RunSummary::machine`]).
pub fn train(setup: TrainSetup, console: &Console, stop: &AtomicBool) -> Result<Trained> {
    let trained = train_to_the_end(setup, console, stop);
    if let Err(error) = &trained {
        console.event(None, &Event::Failed { why: told(error) });
    }
    console.end_record();
    trained
}

fn train_to_the_end(setup: TrainSetup, console: &Console, stop: &AtomicBool) -> Result<Trained> {
    let mut this = Loop::begin(setup, console)?;
    let total = this.length.total;
    let mut summary = RunSummary::default();
    if this.run.eval.on_start && this.place.step == 0 {
        summary.before = this.evaluate(0, 0.0)?;
    }
    this.last_save = Instant::now();
    let shown = console.steps(this.place.step, total);
    let _watching = console.activity().machine().watch(gpu_load(this.model.device()));
    this.repeat_evaluation(&mut summary)?;
    let ranks = this.algorithm.split.ranks.clone();
    let mut ends = this.place.evaluation_due;
    // All ranks stop if one of them is asked to.
    while this.place.step < total && !ranks.any(ends || stop.load(Ordering::Relaxed))? {
        let mut timer = PhaseTimer::shown(Instant::now(), console.activity());
        let (mut metrics, reward) = match this.update(&mut timer) {
            Err(error) if error.fault() == Fault::Machine => {
                summary.machine = Some(told(&error));
                break;
            }
            updated => updated?,
        };
        this.move_reference()?;
        this.measure(&mut metrics);
        this.place.step += 1;
        shown.advance(&metrics);
        ends = this.report(metrics, reward, timer, &mut summary)?;
        let epoch_done = this.end_epoch();
        // The evaluation precedes the checkpoint of the step. The checkpoint's logs are then complete, and a resumed run does not
        // repeat the evaluation.
        let improved = this.evaluate_if_due(epoch_done, &mut summary)?;
        ends = ranks.any(ends || this.place.evaluation_due || stop.load(Ordering::Relaxed))?;
        this.save_if_due(ends, epoch_done, improved)?;
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
    interaction: Option<Interaction>,
    algorithm: Algorithm,
    optimizer: AdamW,
    schedule: Schedule,
    length: Length,
    dataset: Arc<Dataset>,
    source: RowSource,
    run: RunPlan,
    eval: Option<EvalPlan>,
    place: Place,
    /// Values of the settings that change results by rounding.
    rounding: Rounding,
    returned: Returned,
    records: Records,
    observer: Box<dyn Observer>,
    asked: Asked,
    curves: Option<Curves>,
    console: Console,
    /// Time of the last checkpoint, or of the start.
    last_save: Instant,
    /// Lock on the run directory. It is the last field, so it is released last.
    lock: RunLock,
}

impl Loop {
    /// Performs the next update. Returns its metrics and the mean reward. After a failure of the machine, the order of rows is that
    /// before the update.
    fn update(&mut self, timer: &mut PhaseTimer) -> Result<(Vec<Metric>, Option<f64>)> {
        let step = self.place.step;
        let at = UpdateAt { step, learning_rate_factor: self.schedule.factor(step) };
        let order = self.source.order().clone();
        let updated = match self.run.objective {
            Objective::Imitate => self.imitate(at, timer).map(|metrics| (metrics, None)),
            Objective::Reinforce => self.reinforce(at, timer),
        };
        if updated.as_ref().is_err_and(|error| error.fault() == Fault::Machine) {
            // Such an error occurs before the weights change, so restoring the order of rows undoes the step.
            *self.source.order_mut() = order;
        }
        updated
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
        Ok(outcome.metrics())
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
        let mut metrics = outcome.metrics();
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
        // The other parts were encoded with the weights before this update, too.
        parts.iter_mut().for_each(|part| part.updated = true);
        if done + 1 < updates {
            self.place.buffer = Some((parts, done + 1));
        }
        Ok((metrics, reward))
    }

    /// Moves the reference towards the policy if a sync is due after the present update. The new weights are `α π + (1 − α) π_ref`
    /// (TR-DPO, arXiv 2404.09656).
    fn move_reference(&self) -> Result<()> {
        let (Some(reference), Some(sync)) = (&self.reference, self.run.sync_reference) else { return Ok(()) };
        if !(self.place.step + 1).is_multiple_of(sync.every) {
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
        self.look_at_rewards(step + 1, &collected)?;
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
            if self.run.rows.replay && algorithm.loss.top_entropy < 1.0 {
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

    /// Warns of rewards that teach nothing, and ends the run if one of them applies to no row.
    fn look_at_rewards(&mut self, step: u64, collected: &Rollouts) -> Result<()> {
        if self.run.rows.replay {
            return Ok(());
        }
        let names = self.rewards.names();
        let warnings = self.returned.add(step, &collected.rewards, names.len());
        if self.algorithm.split.ranks.is_first() {
            warnings.iter().for_each(|warning| self.console.warning(warning));
        }
        let is_pass = self.source.order().epochs_done() >= 1.0;
        self.returned.refusal(&names, is_pass).map_or(Ok(()), |refusal| Err(refusal.into()))
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
            if self.run.rows.replay {
                return replay(&self.model, &self.prompts, &self.algorithm, rows, timer);
            }
            let collector = Collector {
                model: &self.model,
                prompts: &self.prompts,
                shuffled: self.shuffled.as_deref(),
                rewards: &self.rewards,
                interaction: self.interaction.as_ref(),
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

    /// Adds the metrics of the loop to those of the present update.
    fn measure(&mut self, metrics: &mut Vec<Metric>) {
        let factor = self.schedule.factor(self.place.step);
        let ahead = self.source.take_ahead_time().as_secs_f64();
        self.records.ahead_secs += ahead;
        let mut put = |name: &str, value: f64| metrics.push((name.to_owned(), Some(value)));
        put(metric::LEARNING_RATE, self.optimizer.learning_rate() * factor);
        put("data/skipped", self.source.num_skipped() as f64);
        put("data/ahead_time", ahead);
        put("memory/optimizer_mb", self.optimizer.host_bytes() as f64 / 1e6);
        let kept = self.prompts.media_store().usage();
        if kept.asked > 0 {
            put("memory/media_store_mb", kept.bytes as f64 / 1e6);
            put("memory/media_found", kept.found as f64 / kept.asked as f64);
        }
    }

    /// Records a completed step and tells the observer. Returns true if the run should end.
    fn report(
        &mut self,
        metrics: Vec<Metric>,
        reward: Option<f64>,
        timer: PhaseTimer,
        summary: &mut RunSummary,
    ) -> Result<bool> {
        let (step, split) = (self.place.step, &self.algorithm.split);
        let epoch = self.source.order().epochs_done();
        let (metrics, problems) = split.agree(self.records.step(step, epoch, metrics, reward, timer))?;
        let mut ends = self.observer.step(step, &metrics).is_break();
        problems.into_iter().for_each(|problem| self.observer.event(step, &Event::Problem(problem)));
        if self.run.stop_on_collapse && step < self.length.total {
            // Only the first rank watches the metrics; all of them end alike.
            summary.collapsed = split.by_first(|| Ok(self.records.collapse()))?;
            ends |= summary.collapsed.is_some();
        }
        Ok(ends)
    }

    /// Counts an epoch after the last update on its rows, and warns of weights that no row of it reached. Returns true if this step
    /// has completed an epoch.
    fn end_epoch(&mut self) -> bool {
        let epoch = self.source.order().epochs_done() as u64;
        let done = self.place.buffer.is_none() && epoch > self.place.epochs_seen;
        if done {
            if self.place.epochs_seen == 0 {
                self.records.unreached("row of the first epoch", &self.optimizer.never_reached());
            }
            self.place.epochs_seen = epoch;
        }
        done
    }

    /// Records and shows an event after the present step, and passes it to the observer.
    fn event(&mut self, event: &Event) {
        self.console.event(Some(self.place.step), event);
        self.observer.event(self.place.step, event);
    }
}

/// Returns true if something that happens every `every` steps happens after `step`.
fn is_due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
