//! Plan of a run and its summary.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use omnigrpo_data::{Dataset, Lessons};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{DebugLog, Event, Metric, Report, RunLock, Trackers};
use omnigrpo_ops::Device;
use omnigrpo_rewards::RewardSet;
use omnigrpo_rollout::Interaction;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::Result;
use crate::evaluate::{EvalPlan, Evaluation};
use crate::length::Length;
use crate::optimizer::AdamWConfig;
use crate::rollouts::Rollouts;
use crate::rows::SkipPolicy;
use crate::schedule::ScheduleKind;
use crate::selection::Selection;
use crate::step::{Algorithm, Divided};

/// Condition for writing checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum SaveWhen {
    /// No checkpoints, only the model at the end.
    Never,
    /// Every given number of updates.
    Steps(u64),
    /// After every epoch.
    Epoch,
    /// On every improvement of the evaluation metric.
    Best,
}

/// Condition for evaluating the model, in addition to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum EvalWhen {
    /// Never.
    Never,
    /// Every given number of updates.
    Steps(u64),
    /// After every epoch.
    Epoch,
}

/// Starting point of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub enum ResumeFrom {
    /// Start without a checkpoint.
    Start,
    /// Newest loadable checkpoint of the run directory, or a start without a checkpoint if there is none. It is an error if its settings
    /// differ.
    #[default]
    Newest,
    /// Newest checkpoint; it is an error if there is none.
    Must,
    /// Checkpoint at this path.
    Path(PathBuf),
}

/// Objective of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Objective {
    /// GRPO: sample and score completions, then reinforce them.
    Reinforce,
    /// Supervised training on each row's reference answer.
    Imitate,
}

/// Settings of a reference that follows the policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SyncReference {
    /// Updates between two syncs.
    pub every: u64,
    /// Weight of the policy in the mixture after a sync.
    pub mixup: f64,
}

impl Default for SyncReference {
    /// Returns TRL's defaults.
    fn default() -> Self {
        Self { every: 512, mixup: 0.6 }
    }
}

/// Shape of the learning-rate schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SchedulePlan {
    /// Shape after the warm-up.
    pub kind: ScheduleKind,
    /// Warm-up as a share of all updates.
    pub warmup_ratio: f64,
    /// Warm-up in updates; takes precedence over `warmup_ratio` unless it is 0.
    pub warmup_steps: u64,
}

/// Order and treatment of the rows of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowPlan {
    /// Seed for the order of the rows.
    pub seed: u64,
    /// Rules that select and order rows by the rewards of earlier passes.
    pub lessons: Lessons,
    /// True to use the completions in the rows instead of sampling.
    pub replay: bool,
    /// True to accept rows that are all text for a model that sees or hears, and columns that look like media and are not read.
    pub text_only: bool,
    /// Treatment of unusable rows.
    pub skip: SkipPolicy,
    /// Unusable rows found by the check before training: row number, id and reason.
    pub bad: Vec<(u64, String, String)>,
}

impl Default for RowPlan {
    /// Returns a plan with shuffled rows, all of which are sampled.
    fn default() -> Self {
        let (lessons, skip) = (Lessons::default(), SkipPolicy::default());
        Self { seed: 42, lessons, replay: false, text_only: false, skip, bad: Vec::new() }
    }
}

/// Checkpoints of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SavePlan {
    /// Condition for writing checkpoints.
    pub when: SaveWhen,
    /// Maximum number of checkpoints to keep.
    pub limit: Option<usize>,
    /// Maximum time between checkpoints, in addition to `when`.
    pub every: Option<Duration>,
    /// True to leave the optimizer out of checkpoints, except for the one written on an interruption.
    pub only_model: bool,
}

impl Default for SavePlan {
    /// Returns a plan with a checkpoint every hundred updates, of which all are kept.
    fn default() -> Self {
        let when = SaveWhen::Steps(100);
        Self { when, limit: None, every: None, only_model: false }
    }
}

/// Starting point of a run, and what must match there.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ResumePlan {
    /// Starting point of the run.
    pub from: ResumeFrom,
    /// True to resume from a checkpoint even if its settings differ from this run's.
    pub allow_changed: bool,
    /// True to start a run from the beginning if its newest checkpoint is the last one and the trained model was written, or was written with
    /// other settings. Otherwise nothing is left to do, or the run ends with an error.
    pub repeat_complete: bool,
    /// Settings and inputs that must match between a checkpoint and the run that resumes it.
    pub fingerprint: Map<String, Value>,
    /// Values of settings in checkpoints that do not name them: what an earlier version did that lacked the setting.
    pub before: Map<String, Value>,
    /// Names of settings that never bind a checkpoint, although it may name them.
    pub free: Vec<&'static str>,
}

/// Times of evaluations, and use of their results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalSchedule {
    /// Condition for evaluations.
    pub when: EvalWhen,
    /// True to evaluate before the first update.
    pub on_start: bool,
    /// Metric of `SaveWhen::Best`; higher is better.
    pub best_metric: String,
}

impl Default for EvalSchedule {
    /// Returns a schedule without evaluations.
    fn default() -> Self {
        Self { when: EvalWhen::Never, on_start: false, best_metric: "eval_reward".into() }
    }
}

/// Lines of the console and files in the run directory, besides checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecordPlan {
    /// Updates per console line; the line shows means over them.
    pub logging_steps: u64,
    /// Updates per console line of the `grpo/*` metrics. If the value differs from `logging_steps`, these metrics get a separate
    /// line.
    pub grpo_logging_steps: u64,
    /// True to print the completions and rewards of a few groups with each console line. The files in `rollouts/` contain all of
    /// them.
    pub log_completions: bool,
    /// Additional log of the completions in the format of the original systems.
    pub debug_log: Option<DebugLog>,
    /// Names and contents of files written next to the records at the start: the resolved configuration and data stored by
    /// rewards.
    pub files: Vec<(&'static str, Vec<u8>)>,
}

impl Default for RecordPlan {
    /// Returns a plan with a console line for each update.
    fn default() -> Self {
        Self {
            logging_steps: 1,
            grpo_logging_steps: 1,
            log_completions: false,
            debug_log: None,
            files: Vec::new(),
        }
    }
}

/// Content of the model card that the run does not know itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CardPlan {
    /// Name of the run.
    pub run_name: Option<String>,
    /// Command line, without paths of this machine.
    pub command: Option<String>,
    /// Names and values of the settings that determine the result.
    pub settings: Map<String, Value>,
}

/// Length of a run, and its plans by subject.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunPlan {
    /// Objective of an update.
    pub objective: Objective,
    /// Number of updates; `None` for as many as the epochs need.
    pub max_steps: Option<u64>,
    /// Passes over the rows. A step can span two passes. The last step takes the remaining rows of the last pass.
    pub num_epochs: f64,
    /// Prompts per update.
    pub prompts_per_step: usize,
    /// Updates per prompt of a rollout.
    pub num_iterations: usize,
    /// Number of updates that share a rollout, each with different prompts.
    pub steps_per_generation: usize,
    /// Settings of a reference that follows the policy; `None` for a fixed reference.
    pub sync_reference: Option<SyncReference>,
    /// True to end the run with a checkpoint if the policy diverges or its entropy collapses
    /// ([`Rule::collapse`](crate::Rule)).
    pub stop_on_collapse: bool,
    /// Learning rate over the run.
    pub schedule: SchedulePlan,
    /// Order and treatment of the rows.
    pub rows: RowPlan,
    /// Checkpoints.
    pub save: SavePlan,
    /// Starting point.
    pub resume: ResumePlan,
    /// Times of evaluations.
    pub eval: EvalSchedule,
    /// Console lines and files.
    pub records: RecordPlan,
    /// Content of the model card.
    pub card: CardPlan,
}

impl RunPlan {
    /// Returns true if a reference on `device` can stay in the checkpoint's files ([`ReferencePlace::Files`](omnigrpo_models::ReferencePlace)). A reference
    /// that follows the policy cannot, because its weights change.
    pub fn lends_reference(&self, device: Device) -> bool {
        device == Device::Cpu && self.sync_reference.is_none()
    }

    /// Returns true if the policy is its own teacher, with the weights that sample and more in its prompt. A teacher that is another
    /// model, or that follows the policy, is a reference instead. `is_alone` is true if no reference model is given.
    pub(crate) fn teaches_itself(
        &self,
        algorithm: &Algorithm,
        prompts: &PromptBuilder,
        is_alone: bool,
    ) -> bool {
        self.objective == Objective::Reinforce
            && algorithm.loss.needs_reference()
            && prompts.settings().privileged_context.is_some()
            && is_alone
            && self.sync_reference.is_none()
    }

    /// Returns the number of updates of the run for `usable` rows.
    ///
    /// # Errors
    /// Returns an error if no row is usable.
    pub fn num_steps(&self, usable: usize) -> Result<u64> {
        Ok(Length::of(self, usable)?.total)
    }

    /// Returns the number of updates per epoch for `usable` rows.
    pub fn steps_per_epoch(&self, usable: usize) -> u64 {
        usable.div_ceil(self.prompts_per_step.max(1)) as u64 * self.num_iterations as u64
    }

    /// Returns the number of evaluations in a run of `steps` updates, provided that there are rows to evaluate.
    pub fn num_evaluations(&self, steps: u64, steps_per_epoch: u64) -> u64 {
        let every = match self.eval.when {
            EvalWhen::Never => return u64::from(self.eval.on_start),
            EvalWhen::Steps(every) => every,
            EvalWhen::Epoch => steps_per_epoch,
        };
        // The model is always evaluated after the last update.
        u64::from(self.eval.on_start) + steps.div_ceil(every.max(1))
    }
}

impl Default for RunPlan {
    /// Returns a plan with one pass over the rows, eight prompts per update, a checkpoint every hundred updates and no
    /// evaluation.
    fn default() -> Self {
        Self {
            objective: Objective::Reinforce,
            max_steps: None,
            num_epochs: 1.0,
            prompts_per_step: 8,
            num_iterations: 1,
            steps_per_generation: 1,
            sync_reference: None,
            stop_on_collapse: false,
            schedule: SchedulePlan::default(),
            rows: RowPlan::default(),
            save: SavePlan::default(),
            resume: ResumePlan::default(),
            eval: EvalSchedule::default(),
            records: RecordPlan::default(),
            card: CardPlan::default(),
        }
    }
}

/// Requests of other threads to a run. The run clears the flags.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    /// A checkpoint after the step under way.
    pub save: Arc<AtomicBool>,
    /// An evaluation after the step under way.
    pub evaluate: Arc<AtomicBool>,
}

/// Function that draws the metrics of a run directory as SVG. It returns `None` if there is nothing to draw.
pub type Curves = fn(&Path) -> Option<String>;

/// Callbacks of a training run, called inside its process. The default implementations do nothing.
pub trait Observer: Send {
    /// Receives newly scored completions. The update after the first `step` updates trains on them.
    fn rollout(&mut self, step: u64, rollouts: &Rollouts) {
        let _ = (step, rollouts);
    }

    /// Receives the numbers of update number `step`: those of its line in `metrics.jsonl`, in the same order. `Break` ends the run with a
    /// checkpoint from which it can resume.
    fn step(&mut self, step: u64, metrics: &[Metric]) -> ControlFlow<()> {
        let _ = (step, metrics);
        ControlFlow::Continue(())
    }

    /// Receives the path of the checkpoint after `step` updates. The run may remove it later to respect the limit of checkpoints.
    fn saved(&mut self, step: u64, checkpoint: &Path) {
        let _ = (step, checkpoint);
    }

    /// Returns the step of a checkpoint that the observer is still reading. The run keeps that checkpoint when it next removes
    /// old ones.
    fn reads(&self) -> Option<u64> {
        None
    }

    /// Receives the evaluation of the model after `step` updates.
    fn evaluation(&mut self, step: u64, evaluation: &Evaluation) {
        let _ = (step, evaluation);
    }

    /// Receives an event of the training loop after `step` updates. Warnings and the failure of a run do not come here.
    fn event(&mut self, step: u64, event: &Event) {
        let _ = (step, event);
    }
}

/// Calls every observer, in order.
impl Observer for Vec<Box<dyn Observer>> {
    fn rollout(&mut self, step: u64, rollouts: &Rollouts) {
        self.iter_mut().for_each(|one| one.rollout(step, rollouts));
    }

    fn step(&mut self, step: u64, metrics: &[Metric]) -> ControlFlow<()> {
        // Every observer is called, whatever the others return.
        let breaks =
            self.iter_mut().filter_map(|one| one.step(step, metrics).is_break().then_some(())).count();
        if breaks > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn saved(&mut self, step: u64, checkpoint: &Path) {
        self.iter_mut().for_each(|one| one.saved(step, checkpoint));
    }

    fn reads(&self) -> Option<u64> {
        self.iter().filter_map(|one| one.reads()).min()
    }

    fn evaluation(&mut self, step: u64, evaluation: &Evaluation) {
        self.iter_mut().for_each(|one| one.evaluation(step, evaluation));
    }

    fn event(&mut self, step: u64, event: &Event) {
        self.iter_mut().for_each(|one| one.event(step, event));
    }
}

/// Observer that does nothing.
impl Observer for () {}

/// Inputs and settings of a training run.
pub struct TrainSetup {
    /// Policy to train.
    pub model: Model,
    /// Builder of prompts.
    pub prompts: Arc<PromptBuilder>,
    /// Builder of prompts with shuffled frames; set if answers that need the order of the frames earn a bonus.
    pub shuffled: Option<Arc<PromptBuilder>>,
    /// Dataset with the training rows.
    pub dataset: Arc<Dataset>,
    /// Row numbers to train on.
    pub rows: Vec<u64>,
    /// Evaluation on held-out rows.
    pub eval: Option<EvalPlan>,
    /// Rewards that score the completions.
    pub rewards: RewardSet,
    /// Environment that answers completions.
    pub interaction: Option<Interaction>,
    /// Settings of the algorithm.
    pub algorithm: Divided,
    /// Settings of the optimizer.
    pub optimizer: AdamWConfig,
    /// Trained weights.
    pub selection: Selection,
    /// Reference or teacher, if it is another model than the policy at the start of the run.
    pub reference_model: Option<Model>,
    /// Device of the reference.
    pub reference_device: Device,
    /// Length, records and checkpoints of the run.
    pub run: RunPlan,
    /// Lock on the run directory, so that no other process writes to it.
    pub lock: RunLock,
    /// Observer of the run.
    pub observer: Box<dyn Observer>,
    /// Function that starts the trackers. It is called after files of an earlier run have been moved away.
    pub trackers: Box<dyn FnOnce() -> Trackers + Send>,
    /// Requests of other threads.
    pub signals: Signals,
    /// Function that draws the picture of the model card; `None` for a card without one.
    pub curves: Option<Curves>,
}

/// Summary of a run.
#[derive(Debug, Default)]
pub struct RunSummary {
    /// Total number of updates done.
    pub steps: u64,
    /// Number of updates done by this process.
    pub steps_here: u64,
    /// True if the run stopped early, on request or because the machine failed. A checkpoint was saved, so the run can resume.
    pub interrupted: bool,
    /// Failure of the machine, if it stopped the run.
    pub machine: Option<String>,
    /// Collapse that ended the run ([`RunPlan::stop_on_collapse`]), with advice.
    pub collapsed: Option<String>,
    /// Evaluation before the first update.
    pub before: Option<Evaluation>,
    /// Evaluation after the last update.
    pub after: Option<Evaluation>,
    /// Tables for the end of the run.
    pub report: Report,
}

impl RunSummary {
    /// Returns the event with which the run ended.
    pub fn end(&self) -> Event {
        match (&self.collapsed, &self.machine) {
            (Some(why), _) => Event::Collapsed { why: why.clone() },
            (None, why) if self.interrupted => Event::Stopped { why: why.clone() },
            (None, _) => Event::Finished,
        }
    }
}
