//! Evaluations during a run.

use std::collections::BTreeMap;
use std::time::Instant;

use omnigrpo_guard::{Fault, told};

use super::{Loop, is_due};
use omnigrpo_observe::Event;

use crate::error::{BEST_METRIC, Result, TrainError};
use crate::evaluate::{Batch, Evaluation, evaluate_split};
use crate::plan::{EvalWhen, RunSummary, SaveWhen};

impl Loop {
    pub(super) fn evaluate(&mut self, step: u64, epoch: f64) -> Result<Option<Evaluation>> {
        let Some(plan) = &self.eval else { return Ok(None) };
        self.console.activity().enter("evaluation", Instant::now());
        let mut progress = self.console.progress("evaluating", plan.rows.len() as u64);
        let (model, rewards, split) = (&self.model, &self.rewards, &self.algorithm.split);
        let (observer, records) = (&mut self.observer, &mut self.records);
        let is_recorded = self.place.evaluated_at == Some(step);
        let concluded = |evaluation: &Evaluation| {
            evaluation.usable()?;
            observer.evaluation(step, evaluation);
            if !is_recorded {
                for problem in records.evaluation(step, epoch, evaluation)? {
                    observer.event(step, &Event::Problem(problem));
                }
            }
            Ok(())
        };
        let mut each = |batch: Batch<'_>| {
            progress.advance(batch.num_rows);
            Ok(())
        };
        let evaluation = self
            .lenders
            .of_policy()
            .whole(|| evaluate_split(split, model, rewards, plan, BTreeMap::new(), &mut each, concluded))?;
        drop(progress);
        self.console.activity().leave();
        self.place.evaluated_at = Some(step);
        Ok(Some(evaluation))
    }

    /// Repeats the evaluation that a failure of the machine interrupted before the run resumed.
    pub(super) fn repeat_evaluation(&mut self, summary: &mut RunSummary) -> Result<()> {
        let step = self.place.step;
        if self.place.evaluation_due && step < self.length.total {
            let improved = self.evaluate_step(step, summary)?;
            if improved && self.run.save.when == SaveWhen::Best {
                self.save(!self.run.save.only_model)?;
            }
        }
        Ok(())
    }

    /// Evaluates the model if the plan or another thread asks for it after this step. Returns true if the model is the best so far.
    pub(super) fn evaluate_if_due(
        &mut self,
        asked: bool,
        epoch_done: bool,
        summary: &mut RunSummary,
    ) -> Result<bool> {
        let step = self.place.step;
        let due = match self.run.eval.when {
            EvalWhen::Never => false,
            EvalWhen::Steps(every) => is_due(step, every),
            EvalWhen::Epoch => epoch_done,
        };
        if due || asked || step == self.length.total { self.evaluate_step(step, summary) } else { Ok(false) }
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
        let Some((name, value)) = metrics.iter().find(|(name, _)| *name == self.run.eval.best_metric) else {
            let known: Vec<&str> = metrics.iter().map(|(name, _)| name.as_str()).collect();
            return Err(TrainError::setting(
                BEST_METRIC,
                &self.run.eval.best_metric,
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
}
