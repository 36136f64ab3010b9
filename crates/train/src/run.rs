//! Training loop.

mod begin;
mod evaluation;
mod save;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use omnigrpo_data::Dataset;
use omnigrpo_grpo::{Covariance, metric};
use omnigrpo_guard::{Fault, told};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{Console, Event, Metric, PhaseTimer, RunLock};
use omnigrpo_rewards::RewardSet;
use omnigrpo_rollout::Interaction;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::evaluate::EvalPlan;
use crate::imitate::imitate;
use crate::lender::{Lenders, Models};
use crate::length::Length;
use crate::optimizer::AdamW;
use crate::pass::{entropies, old_logprobs, reference_logprobs};
use crate::plan::{Curves, Objective, Observer, RunPlan, RunSummary, Signals, TrainSetup};
use crate::records::Records;
use crate::replay::replay;
use crate::resume::Resumed;
use crate::returned::Returned;
use crate::rollouts::Rollouts;
use crate::rounding::Rounding;
use crate::rows::{Making, PreparedRow, RowSource};
use crate::schedule::Schedule;
use crate::step::{Collector, Divided, UpdateAt, update};
use crate::timing::{gpu_load, timed};

/// A trained model and the summary of its run.
pub struct Trained {
    /// Model after the last update.
    pub model: Model,
    /// Summary of the run.
    pub summary: RunSummary,
}

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
    let mut ends = this.place.evaluation_due;
    while this.place.step < total && !this.meet(Ok(Asked::to_end(ends, stop)))?.ends {
        let mut timer = PhaseTimer::shown(Instant::now(), console.activity());
        let mut updated = match this.update(&mut timer) {
            Err(error) if error.fault() == Fault::Machine => {
                summary.machine = Some(told(&error));
                break;
            }
            updated => updated?,
        };
        this.move_reference()?;
        this.measure(&mut updated.metrics);
        this.place.step += 1;
        shown.advance(&updated.metrics);
        let mut asked = this.report(updated, timer, &mut summary)?;
        let epoch_done = this.end_epoch();
        // The evaluation precedes the checkpoint of the step. The checkpoint's logs are then complete, and a resumed run does not
        // repeat the evaluation.
        let improved = this.evaluate_if_due(asked.evaluate, epoch_done, &mut summary)?;
        let own = Asked::to_end(asked.ends || this.place.evaluation_due, stop);
        asked = this.meet(Ok(Asked { save: this.is_late(), ..own }))?;
        this.save_if_due(&asked, epoch_done, improved)?;
        ends = asked.ends;
    }
    drop(shown);
    this.end(summary)
}

/// Requests of a rank, and after [`Loop::meet`] the decisions of all ranks.
#[derive(Default, Serialize, Deserialize)]
struct Asked {
    /// True to end the run.
    ends: bool,
    /// Training problem for which the run ends.
    collapsed: Option<String>,
    /// True for an evaluation.
    evaluate: bool,
    /// True for a checkpoint.
    save: bool,
}

impl Asked {
    /// Asks to end the run if `ends`, or if the process has to stop.
    fn to_end(ends: bool, stop: &AtomicBool) -> Self {
        Self { ends: ends || stop.load(Ordering::Relaxed), ..Self::default() }
    }
}

/// Result of an update.
struct Updated {
    metrics: Vec<Metric>,
    /// Mean reward.
    reward: Option<f64>,
    /// Result of recording the numbers of tokens, on this rank.
    recorded: Result<()>,
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

/// Returns the models of a step. A policy that is its own teacher is its own reference.
fn models<'m>(
    policy: &'m Model,
    reference: Option<&'m Model>,
    teaches_itself: bool,
    lenders: &'m Lenders,
) -> Models<'m> {
    Models::from((policy, reference.or(teaches_itself.then_some(policy)))).lent(lenders)
}

/// State of the training loop.
struct Loop {
    model: Model,
    reference: Option<Model>,
    /// True if the policy is its own teacher. There is no `reference` then.
    teaches_itself: bool,
    prompts: Arc<PromptBuilder>,
    shuffled: Option<Arc<PromptBuilder>>,
    rewards: Arc<RewardSet>,
    interaction: Option<Interaction>,
    algorithm: Divided,
    /// Weights that are cut.
    lenders: Lenders,
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
    signals: Signals,
    curves: Option<Curves>,
    console: Console,
    /// Time of the last checkpoint, or of the start.
    last_save: Instant,
    /// Lock on the run directory. It is the last field, so it is released last.
    lock: RunLock,
}

impl Loop {
    /// Ends a phase on all ranks: returns what one of them asks for, or the failure of one. `own` is the result of this rank.
    fn meet(&self, own: Result<Asked>) -> Result<Asked> {
        let all = self.algorithm.split.share(own)?.into_iter();
        Ok(all.fold(Asked::default(), |all, own| Asked {
            ends: all.ends || own.ends,
            collapsed: all.collapsed.or(own.collapsed),
            evaluate: all.evaluate || own.evaluate,
            save: all.save || own.save,
        }))
    }

    /// Returns the models of a step.
    fn models(&self) -> Models<'_> {
        models(&self.model, self.reference.as_ref(), self.teaches_itself, &self.lenders)
    }

    /// Returns true if the weights of the reference or teacher change during the run.
    fn reference_moves(&self) -> bool {
        self.teaches_itself || self.reference.is_some() && self.run.sync_reference.is_some()
    }

    /// Performs the next update. After a failure of the machine, the order of rows is that before the update.
    fn update(&mut self, timer: &mut PhaseTimer) -> Result<Updated> {
        let step = self.place.step;
        let at = UpdateAt { step, learning_rate_factor: self.schedule.factor(step) };
        let order = self.source.order().clone();
        let updated = match self.run.objective {
            Objective::Imitate => self.imitate(at, timer),
            Objective::Reinforce => self.reinforce(at, timer),
        };
        if updated.as_ref().is_err_and(|error| error.fault() == Fault::Machine) {
            // Such an error occurs before the weights change, so restoring the order of rows undoes the step.
            *self.source.order_mut() = order;
        }
        updated
    }

    /// Performs a supervised update.
    fn imitate(&mut self, at: UpdateAt, timer: &mut PhaseTimer) -> Result<Updated> {
        let (step, length) = (at.step, self.length);
        let drawn = timed(timer, "data", || self.source.draw_sft(length.num_rows(step)));
        let recorded = self.record_skipped(step + 1);
        let examples = drawn?;
        if step + 1 < length.total {
            self.source.prepare_ahead(length.num_rows(step + 1), Making::Example);
        }
        let models = models(&self.model, None, false, &self.lenders);
        let examples = (recorded, examples.as_slice());
        let outcome = imitate(models, &mut self.optimizer, at, &self.algorithm, examples, timer)?;
        Ok(Updated { metrics: outcome.metrics(), reward: None, recorded: Ok(()) })
    }

    /// Performs an update from the rollout in progress or from a new one.
    fn reinforce(&mut self, at: UpdateAt, timer: &mut PhaseTimer) -> Result<Updated> {
        let (mut parts, done) = match self.place.buffer.take() {
            Some(buffered) => buffered,
            None => (self.rollout(at.step, timer)?, 0),
        };
        let (part, updates) = (done % parts.len(), parts.len() * self.run.num_iterations);
        let first_group = parts[..part].iter().map(|part| part.groups.len()).sum();
        let rollouts = &mut parts[part];
        // Only these fields are borrowed, because the optimizer changes.
        let models = models(&self.model, self.reference.as_ref(), self.teaches_itself, &self.lenders);
        let outcome = update(models, &mut self.optimizer, at, &self.algorithm, rollouts, timer)
            .map_err(|error| self.records.offending_rows(at.step + 1, rollouts, error))?;
        let mut metrics = outcome.metrics();
        let reward = outcome.sums.reward();
        let recorded = timed(timer, "records", || {
            let places = (first_group, &*rollouts);
            self.records.tokens(at.step + 1, places, outcome.tokens, self.prompts.tokenizer())
        });
        if done == 0 {
            let logged = &rollouts.rewards.logged.metrics;
            metrics.extend(logged.iter().map(|(name, value)| (name.clone(), Some(*value))));
        }
        // The other parts were encoded with the weights before this update, too.
        parts.iter_mut().for_each(|part| part.updated = true);
        if done + 1 < updates {
            self.place.buffer = Some((parts, done + 1));
        }
        Ok(Updated { metrics, reward, recorded })
    }

    /// Moves the reference towards the policy if a sync is due after the present update. The new weights are `α π + (1 − α) π_ref`
    /// (TR-DPO, arXiv 2404.09656).
    fn move_reference(&self) -> Result<()> {
        let (Some(reference), Some(sync)) = (&self.reference, self.run.sync_reference) else { return Ok(()) };
        if !(self.place.step + 1).is_multiple_of(sync.every) {
            return Ok(());
        }
        let mixup = sync.mixup as f32;
        self.lenders.whole(|| {
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

    /// Records the rows that were skipped since the last call, on the first rank.
    fn record_skipped(&mut self, step: u64) -> Result<()> {
        let mut rows = self.source.take_skipped().into_iter();
        rows.try_for_each(|row| self.records.skipped(step, &row))
    }

    /// Samples the next rollout and splits it into one part per update of an iteration.
    fn rollout(&mut self, step: u64, timer: &mut PhaseTimer) -> Result<Vec<Rollouts>> {
        let (index, length) = (self.place.rollout, self.length);
        let drawn = timed(timer, "data", || self.source.draw(length.num_rows(index)));
        let recorded = self.record_skipped(step + 1);
        let epoch = self.source.order().epochs_done();
        let drawn = drawn?;
        let updates = drawn.len().div_ceil(self.run.prompts_per_step) * self.run.num_iterations;
        if step + (updates as u64) < length.total {
            self.source.prepare_ahead(length.num_rows(index + 1), Making::Prompt);
        }
        let collected = self.collect(drawn, step, epoch, timer);
        let recorded = recorded.and(self.record_skipped(step + 1));
        // A failure of one rank ends the rollout on all of them.
        let collected = self.algorithm.split.agree(recorded.and(collected))?;
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
            let (models, algorithm) = (self.models(), &self.algorithm);
            if self.run.rows.replay && algorithm.loss.top_entropy < 1.0 {
                timed(timer, "entropy", || entropies(models, algorithm, part))?;
            }
            part.gate(&algorithm.loss)?;
            if algorithm.loss.covariance != Covariance::Off {
                // Recorded completions may have no log-probabilities.
                if part.completions().any(|c| c.at_first().is_none()) {
                    timed(timer, "old", || old_logprobs(models, algorithm, part))?;
                }
                part.choose(&algorithm.loss, algorithm.seed, step)?;
            }
            if at > 0 && part.completions().any(|c| c.old.is_none()) {
                timed(timer, "old", || old_logprobs(models, algorithm, part))?;
            }
            // A fixed reference can be evaluated later, when an update needs it. A moving one must be evaluated now.
            if self.reference_moves() {
                timed(timer, "reference", || reference_logprobs(models, algorithm, Ok(()), part))?;
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

    /// Collects and records a rollout. The failure may be on this rank alone.
    fn collect(
        &mut self,
        rows: Vec<PreparedRow>,
        step: u64,
        epoch: f64,
        timer: &mut PhaseTimer,
    ) -> Result<Rollouts> {
        let rollouts = self.lenders.of_policy().whole(|| {
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
        timed(timer, "records", || self.records.rollouts(step + 1, epoch, &rollouts))?;
        Ok(rollouts)
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

    /// Records a completed step and tells the observer. Returns what the ranks do after it.
    fn report(&mut self, updated: Updated, timer: PhaseTimer, summary: &mut RunSummary) -> Result<Asked> {
        let (step, epoch) = (self.place.step, self.source.order().epochs_done());
        let Updated { metrics, reward, recorded } = updated;
        let recorded = recorded.and_then(|()| self.records.step(step, epoch, metrics, reward, timer));
        // Only the first rank watches the metrics and is asked for evaluations; all ranks do the same.
        let is_first = self.algorithm.split.ranks.is_first();
        let evaluate = self.signals.evaluate.swap(false, Ordering::Relaxed) && is_first;
        let own = recorded.map(|(metrics, problems)| {
            let ends = self.observer.step(step, &metrics).is_break();
            problems.into_iter().for_each(|problem| self.observer.event(step, &Event::Problem(problem)));
            let watches = is_first && self.run.stop_on_collapse && step < self.length.total;
            let collapsed = if watches { self.records.collapse() } else { None };
            Asked { ends: ends || collapsed.is_some(), collapsed, evaluate, save: false }
        });
        let asked = self.meet(own)?;
        summary.collapsed.clone_from(&asked.collapsed);
        Ok(asked)
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
