//! Checkpoints of a run, and its end.

use std::sync::atomic::Ordering;
use std::time::Instant;

use omnigrpo_observe::Event;

use super::{Asked, Loop, is_due};
use crate::buffer::BufferState;
use crate::checkpoint::{self, TrainerState};
use crate::error::{NEWEST, RESUME, Result};
use crate::model_card;
use crate::plan::{RunSummary, SaveWhen};
use crate::run::Trained;

impl Loop {
    /// Returns true on the first rank if another thread asks for a checkpoint, or if the last one is too old.
    pub(super) fn is_late(&self) -> bool {
        let plan = &self.run.save;
        let asked = self.signals.save.swap(false, Ordering::Relaxed);
        let late = asked || plan.every.is_some_and(|time| self.last_save.elapsed() >= time);
        late && self.algorithm.split.ranks.is_first()
    }

    /// Writes a checkpoint if the plan or a rank asks for one after this step, or if the run ends here.
    pub(super) fn save_if_due(&mut self, asked: &Asked, epoch_done: bool, improved: bool) -> Result<()> {
        let (step, plan) = (self.place.step, &self.run.save);
        // A stop during the last step is not an interruption: no work remains.
        let interrupted = step < self.length.total && asked.ends;
        let due = interrupted
            || asked.save
            || match plan.when {
                SaveWhen::Never => false,
                SaveWhen::Steps(every) => is_due(step, every),
                SaveWhen::Epoch => epoch_done,
                SaveWhen::Best => improved,
            };
        if due {
            self.save(interrupted || !plan.only_model)?;
            self.last_save = Instant::now();
        }
        Ok(())
    }

    /// Writes a checkpoint, on the first rank. It includes the optimizer's state if `whole` is true; only then can a run resume from
    /// it.
    pub(super) fn save(&mut self, whole: bool) -> Result<()> {
        if self.optimizer.exchange().is_cut() {
            // The first rank writes the parts of all ranks.
            let checked = checkpoint::check_moments(&self.optimizer);
            self.meet(checked.map(|()| Asked::default()))?;
        }
        // A fixed reference is not saved.
        let lenders = match self.run.sync_reference {
            Some(_) => self.lenders.clone(),
            None => self.lenders.of_policy(),
        };
        lenders.whole(|| {
            let written = match self.algorithm.split.ranks.is_first() {
                true => self.write(whole).and(self.optimizer.end_of_service()),
                false => self.optimizer.serve(),
            };
            self.meet(written.map(|()| Asked::default()))
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
            version: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint: self.run.resume.fingerprint.clone(),
            rounding: self.rounding.clone(),
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
        let best = place.best.map(|(_, step)| step).filter(|_| self.run.save.when == SaveWhen::Best);
        let keep = [best, self.observer.reads(), self.records.last_good()?];
        let path = checkpoint::save(self.lock.root(), parts, state, self.run.save.limit, &keep)?;
        self.console.activity().leave();
        self.event(&Event::Checkpoint { path: path.display().to_string() });
        self.observer.saved(self.place.step, &path);
        Ok(())
    }

    /// Ends the run: writes the model with its card, or a checkpoint if the run was interrupted, and creates the report.
    pub(super) fn end(mut self, mut summary: RunSummary) -> Result<Trained> {
        let step = self.place.step;
        self.records.close(step, self.source.order().epochs_done());
        summary.interrupted = step < self.length.total;
        if summary.interrupted {
            if self.place.saved_at != Some(step) {
                self.save(true)?;
            }
        } else {
            if self.place.epochs_seen == 0 && step > 0 {
                self.records.unreached("step", &self.optimizer.never_reached());
            }
            if summary.after.is_none() {
                // The run resumed after its last step, so this process has no evaluation yet.
                summary.after = self.evaluate(step, self.source.order().epochs_done())?;
            }
            self.lenders.of_policy().gather()?;
            let written = match self.algorithm.split.ranks.is_first() {
                true => self.write_final(&summary),
                false => Ok(()),
            };
            self.meet(written.map(|()| Asked::default()))?;
        }
        self.lenders.of_policy().gather()?;
        summary.steps = step;
        summary.steps_here = self.records.steps_timed;
        self.records.finish_trackers();
        summary.report = self.records.report(&summary);
        if self.algorithm.split.ranks.is_first() {
            self.event(&summary.end());
            self.console.sync_record()?;
            if summary.interrupted {
                self.console.line(&format!("{RESUME} {NEWEST} resumes the run"));
            }
        }
        Ok(Trained { model: self.model, summary })
    }

    /// Writes the trained model and its card.
    fn write_final(&self, summary: &RunSummary) -> Result<()> {
        checkpoint::save_final(&self.model, self.lock.root())?;
        let facts = model_card::Facts {
            run: &self.run,
            curves: self.curves,
            model: &self.model,
            dataset: &self.dataset,
            algorithm: &self.algorithm,
            rewards: self.rewards.names(),
            num_steps: self.place.step,
            before: summary.before.as_ref(),
            after: summary.after.as_ref(),
        };
        model_card::write(self.lock.root(), facts)
    }
}
