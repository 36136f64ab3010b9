//! Start of a run: checks of its setup, the state of an earlier run, and the records.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use omnigrpo_data::Order;
use omnigrpo_grpo::CorrectionKind;
use omnigrpo_models::{Model, ReferencePlace};
use omnigrpo_observe::{Console, Event, RunDir, Trackers, names, write_atomic};
use omnigrpo_ops::Device;
use omnigrpo_rewards::RewardSet;

use super::{Asked, Loop, Place};
use crate::checkpoint;
use crate::error::{Result, SYNC_REFERENCE, TrainError};
use crate::health::{Aims, Health};
use crate::lender::Lenders;
use crate::length::Length;
use crate::optimizer::AdamW;
use crate::plan::{Objective, RunPlan, TrainSetup};
use crate::records::Records;
use crate::resume::{Resumed, Search, Start};
use crate::returned::Returned;
use crate::rounding;
use crate::rows::{RowSource, SkippedRow};
use crate::selection::summary;
use crate::step::Algorithm;

impl Loop {
    /// Determines the starting point of the run and opens its records.
    pub(super) fn begin(setup: TrainSetup, console: &Console) -> Result<Self> {
        check(&setup)?;
        let rounding = rounding::of(&setup);
        let TrainSetup { model, prompts, shuffled, dataset, eval, mut algorithm, run, lock, .. } = setup;
        let dir = lock.root();
        algorithm.split.prompts_per_step = Some(run.prompts_per_step);
        let split = algorithm.split.clone();
        let ready = if split.ranks.is_first() { remove_leftovers(dir, console) } else { Ok(()) };
        setup.selection.apply(&model)?;
        console.line(summary(&model).trim_end());
        let teaches_itself = run.teaches_itself(&algorithm, &prompts, setup.reference_model.is_none());
        let reference = match setup.reference_model {
            Some(own) => Some(own),
            None if teaches_itself => None,
            None => reference(&model, &algorithm, &run, setup.reference_device)?,
        };
        let optimizer = AdamW::new(setup.optimizer, model.params()).over(&split, &model)?.in_run(dir);

        let bad = run.rows.bad.iter().map(|(row, ..)| *row).collect();
        let order = Order::new(setup.rows, run.rows.seed, !run.rows.replay, bad).learning(run.rows.lessons);
        let length = Length::of(&run, order.num_usable())?;
        let rewards = Arc::new(setup.rewards);
        // Supervised examples and rows with recorded rewards are not scored.
        let scored =
            (run.objective == Objective::Reinforce && !run.rows.replay).then(|| Arc::clone(&rewards));
        let health = Health::new(aims(scored.as_deref(), &algorithm));
        let source =
            RowSource::new(Arc::clone(&dataset), order, Arc::clone(&prompts), scored, run.rows.skip.clone())
                .over(&split, algorithm.micro());
        let mut this = Self {
            schedule: length.schedule(&run),
            records: Records::new(&run, Arc::clone(&dataset), console, length.total, health),
            interaction: setup.interaction,
            signals: setup.signals,
            curves: setup.curves,
            observer: if split.ranks.is_first() { setup.observer } else { Box::new(()) },
            console: console.clone(),
            place: Place::default(),
            rounding,
            returned: Returned::default(),
            last_save: Instant::now(),
            model,
            reference,
            teaches_itself,
            prompts,
            shuffled,
            rewards,
            algorithm,
            lenders: Lenders::default(),
            optimizer,
            length,
            dataset,
            source,
            run,
            eval,
            lock,
        };
        this.start(ready, setup.trackers)?;
        Ok(this)
    }

    /// Loads the state from which the run resumes, if there is one, and opens the records. `ready` is the result of this rank's
    /// preparation.
    fn start(&mut self, ready: Result<()>, trackers: Box<dyn FnOnce() -> Trackers + Send>) -> Result<()> {
        let split = self.algorithm.split.clone();
        let search = Search {
            run: &self.run,
            dir: self.lock.root(),
            total_steps: self.length.total,
            rounding: &self.rounding,
            model: &self.model,
            reference: self.reference.as_ref().filter(|_| self.run.sync_reference.is_some()),
            optimizer: &mut self.optimizer,
            console: &self.console,
        };
        let start = search.over(&split, ready)?;
        let resumed = match &start {
            Start::From(resumed) => self.resume(resumed),
            Start::Anew { .. } => Ok(()),
        };
        self.lenders = Lenders::cut(&split, &mut self.model, self.reference.as_mut())?;
        let opened = resumed.and_then(|()| match split.ranks.is_first() {
            true => self.open_records(&start, trackers),
            false => Ok(()),
        });
        self.meet(opened.map(|()| Asked::default())).map(drop)
    }

    /// Restores the place and the rollout in progress from a checkpoint. The failure may be on this rank alone.
    fn resume(&mut self, resumed: &Resumed) -> Result<()> {
        let dir = self.lock.root();
        let moves = self.reference_moves();
        self.place = Place::of(resumed, dir);
        if resumed.keeps_position() {
            self.source.order_mut().resume(resumed.state.order.clone())?;
        }
        if let Some(saved) = resumed.state.buffer.as_ref().filter(|_| resumed.keeps_rollout()) {
            let saved = saved.clone().following(dir);
            let (model, per_step) = (&self.model, self.run.prompts_per_step);
            let (prompts, dataset) = (&self.prompts, &self.dataset);
            let parts = saved.restore(&self.algorithm, model, prompts, dataset, per_step, moves)?;
            let updates = parts.len() * self.run.num_iterations;
            if saved.iteration >= updates {
                return Err(TrainError::Checkpoint {
                    what: format!(
                        "its rollout in progress has had {} updates, expected less than {updates}; resume from another checkpoint",
                        saved.iteration
                    ),
                });
            }
            self.place.buffer = Some((parts, saved.iteration));
        }
        Ok(())
    }

    /// Opens the logs of the run and the trackers, and records the rows that cannot be used.
    fn open_records(&mut self, start: &Start, trackers: Box<dyn FnOnce() -> Trackers + Send>) -> Result<()> {
        let (dir, console) = (self.lock.root(), &self.console);
        // Files are moved only after the checkpoint has been loaded without an error.
        start.make_room(dir, self.model.dir(), console)?;
        let own = RunDir::open(dir, start.existing())?;
        let (step, num_steps) = (self.place.step, self.length.total);
        console.record_to(&dir.join(names::EVENTS), step)?;
        let event = match start {
            Start::From(resumed) => {
                let health = &mut self.records.health;
                own.each_step(|step, metrics, of_evaluation| {
                    drop(if of_evaluation {
                        health.evaluated(step, metrics)
                    } else {
                        health.add(step, metrics)
                    });
                })?;
                let continued = own.continued(step)?;
                self.place.evaluated_at = continued.evaluated.then_some(step);
                let logged = continued.last_step.unwrap_or(0);
                if logged < step {
                    console.warning(&format!(
                        "metrics.jsonl ends at step {logged}; the rows up to step {step} are missing"
                    ));
                }
                Event::Resumed { checkpoint: resumed.path.display().to_string(), num_steps }
            }
            Start::Anew { .. } => Event::Started { num_steps },
        };
        for (name, content) in &self.run.records.files {
            write_atomic(&dir.join(name), |out| out.write_all(content))?;
        }
        self.records.dir = Some(own);
        self.event(&event);
        if step == num_steps {
            self.console.line("all steps are done; nothing is left to train");
        }
        self.records.trackers = trackers();
        if matches!(start, Start::From(resumed) if resumed.keeps_position()) {
            return Ok(());
        }
        let mut bad = self.run.rows.bad.iter().cloned().map(|(row, id, reason)| SkippedRow {
            row,
            id,
            reason,
            replaced_by: None,
        });
        bad.try_for_each(|row| self.records.skipped(self.place.step, &row))
    }
}

/// Returns an error if parts of the setup exclude each other.
fn check(setup: &TrainSetup) -> Result<()> {
    let TrainSetup { model, algorithm, run, .. } = setup;
    algorithm.split.validate()?;
    if algorithm.sampling.turns.is_some() && run.rows.replay {
        let what =
            "an environment cannot answer recorded completions; leave out the replay or the environment";
        return Err(TrainError::Data { what: what.to_owned() });
    }
    if run.sync_reference.is_some() && !model.adapter_params().is_empty() {
        return Err(TrainError::setting(
            SYNC_REFERENCE,
            "true",
            "unsupported with adapters: the reference is then the model without them, whose weights are fixed; \
             turn one of the two off"
                .into(),
        ));
    }
    Ok(())
}

fn remove_leftovers(dir: &Path, console: &Console) -> Result<()> {
    for name in checkpoint::remove_leftovers(dir)? {
        console.line(&format!("removed {name}, which an earlier process left incomplete"));
    }
    Ok(())
}

/// Builds the reference, if the loss needs one.
fn reference(model: &Model, algorithm: &Algorithm, run: &RunPlan, device: Device) -> Result<Option<Model>> {
    if !algorithm.loss.needs_reference() || run.objective == Objective::Imitate {
        return Ok(None);
    }
    Ok(Some(match run.lends_reference(device) {
        true => model.reference(ReferencePlace::Files)?,
        false => model.reference(ReferencePlace::Memory(device))?,
    }))
}

/// Returns what is known about good numbers of the run. `rewards` score its completions.
fn aims(rewards: Option<&RewardSet>, algorithm: &Algorithm) -> Aims {
    let each = |rewards: &RewardSet| -> Vec<_> {
        let names = rewards.names().into_iter();
        names.filter_map(|name| Some((name.to_owned(), rewards.range_of(name)?))).collect()
    };
    Aims {
        range: rewards.map(RewardSet::range),
        rewards: rewards.map(each).unwrap_or_default(),
        corrected: algorithm.loss.correction.kind != CorrectionKind::Off,
        taught: algorithm.loss.distillation != 0.0,
    }
}
