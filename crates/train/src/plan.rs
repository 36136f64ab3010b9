//! Plan of a run and its summary.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use omnigrpo_data::{Dataset, Lessons};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{DebugLog, Metric, Report, RunLock, Trackers};
use omnigrpo_ops::Device;
use omnigrpo_rewards::RewardSet;
use serde_json::{Map, Value};

use crate::error::Result;
use crate::evaluate::{EvalPlan, Evaluation};
use crate::length::Length;
use crate::optimizer::AdamWConfig;
use crate::rollouts::Rollouts;
use crate::rows::SkipPolicy;
use crate::schedule::ScheduleKind;
use crate::selection::Selection;
use crate::step::Algorithm;

/// Condition for writing checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalWhen {
    /// Never.
    Never,
    /// Every given number of updates.
    Steps(u64),
    /// After every epoch.
    Epoch,
}

/// Starting point of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeFrom {
    /// Start without a checkpoint.
    Start,
    /// Newest loadable checkpoint of the run directory, if its settings match; otherwise a start without a checkpoint.
    Newest,
    /// Newest checkpoint; it is an error if there is none.
    Must,
    /// Checkpoint at this path.
    Path(PathBuf),
}

/// Objective of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// GRPO: sample and score completions, then reinforce them.
    Reinforce,
    /// Supervised training on each row's reference answer.
    Imitate,
}

/// Settings of a reference that follows the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
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

/// Length, records and checkpoints of a run.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// Objective of an update.
    pub objective: Objective,
    /// Number of updates; `None` for as many as the epochs need.
    pub max_steps: Option<u64>,
    /// Passes over the rows. A step can span two passes. The last step takes the remaining rows of the last pass.
    pub num_epochs: f64,
    /// Prompts per update.
    pub prompts_per_step: usize,
    /// Updates of each prompt of a rollout.
    pub num_iterations: usize,
    /// Updates that share a rollout, each with prompts of its own.
    pub steps_per_generation: usize,
    /// How the reference follows the policy; `None`: not at all.
    pub sync_reference: Option<SyncReference>,
    /// How rewards of earlier passes decide which rows come, and in which order.
    pub lessons: Lessons,
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
    /// Also save when this much time has gone by since the last checkpoint.
    pub save_every: Option<Duration>,
    /// Leave the optimizer out of checkpoints, but for the one of an interruption.
    pub save_only_model: bool,
    /// Where to start.
    pub resume: ResumeFrom,
    /// Resume from a checkpoint whose settings differ from this run's.
    pub allow_changed: bool,
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
    /// Where completions are also written as the source systems log them.
    pub debug_log: Option<DebugLog>,
    /// Name of the run in the model card.
    pub run_name: Option<String>,
    /// Take completions from the rows.
    pub replay: bool,
    /// Treatment of unusable rows.
    pub skip: SkipPolicy,
    /// Rows known to be unusable, with the reason, from the check before training.
    pub bad_rows: Vec<(u64, String, String)>,
    /// Order of the rows.
    pub data_seed: u64,
    /// Settings and inputs that must agree between a checkpoint and the run that resumes it.
    pub fingerprint: Map<String, Value>,
    /// Command line that the model card shows. It names no place on this machine.
    pub command: Option<String>,
    /// Draws the metrics of a run directory as SVG, for the model card; `None` where there is nothing to draw.
    pub curves: Option<fn(&Path) -> Option<String>>,
    /// End the run, with a checkpoint, when its policy runs away or its entropy collapses
    /// ([`Rule::collapse`](omnigrpo_observe::Rule)).
    pub stop_on_collapse: bool,
    /// Files written beside the records at the start, by name: the resolved configuration, and what rewards keep.
    pub files: Vec<(&'static str, Vec<u8>)>,
}

impl RunPlan {
    /// Whether a reference that runs there may stay in the checkpoint's files ([`Model::reference_in_place`]): one that moves is
    /// written to.
    #[must_use]
    pub fn lends_reference(&self, device: Device) -> bool {
        device == Device::Cpu && self.sync_reference.is_none()
    }

    /// Returns the updates of the run with so many usable rows.
    ///
    /// # Errors
    /// No usable row.
    pub fn num_steps(&self, usable: usize) -> Result<u64> {
        Ok(Length::of(self, usable)?.total)
    }

    /// Returns the updates of an epoch with so many usable rows.
    #[must_use]
    pub fn steps_per_epoch(&self, usable: usize) -> u64 {
        usable.div_ceil(self.prompts_per_step.max(1)) as u64 * self.num_iterations as u64
    }

    /// Returns the evaluations of a run of so many updates, if there are rows to evaluate on.
    #[must_use]
    pub fn num_evaluations(&self, steps: u64, steps_per_epoch: u64) -> u64 {
        let every = match self.eval {
            EvalWhen::Never => return u64::from(self.eval_on_start),
            EvalWhen::Steps(every) => every,
            EvalWhen::Epoch => steps_per_epoch,
        };
        // The last update is evaluated in any case.
        u64::from(self.eval_on_start) + steps.div_ceil(every.max(1))
    }
}

impl Default for RunPlan {
    /// One pass over the rows, eight prompts an update, a checkpoint every hundred updates, no evaluation.
    fn default() -> Self {
        Self {
            objective: Objective::Reinforce,
            max_steps: None,
            num_epochs: 1.0,
            prompts_per_step: 8,
            num_iterations: 1,
            steps_per_generation: 1,
            sync_reference: None,
            lessons: Lessons::default(),
            schedule: ScheduleKind::default(),
            warmup_ratio: 0.0,
            warmup_steps: 0,
            save: SaveWhen::Steps(100),
            save_limit: None,
            save_every: None,
            save_only_model: false,
            resume: ResumeFrom::Newest,
            allow_changed: false,
            eval: EvalWhen::Never,
            eval_on_start: false,
            best_metric: "eval_reward".into(),
            logging_steps: 1,
            grpo_logging_steps: 1,
            log_completions: false,
            debug_log: None,
            run_name: None,
            replay: false,
            skip: SkipPolicy::default(),
            bad_rows: Vec::new(),
            data_seed: 42,
            fingerprint: Map::new(),
            command: None,
            curves: None,
            stop_on_collapse: false,
            files: Vec::new(),
        }
    }
}

/// Looks on while a run trains, from inside its process. Every method does nothing unless it is written.
pub trait Observer {
    /// The scored completions that the update after `step` others learns from, when they are new.
    fn rollout(&mut self, step: u64, rollouts: &Rollouts) {
        let _ = (step, rollouts);
    }

    /// The `step`th update is done; its numbers are those of the line in `metrics.jsonl`. `Break` ends the run here, with a
    /// checkpoint to resume from.
    fn step(&mut self, step: u64, metrics: &[Metric]) -> ControlFlow<()> {
        let _ = (step, metrics);
        ControlFlow::Continue(())
    }

    /// The model after `step` updates lies in `checkpoint`, until checkpoints over the limit are removed.
    fn saved(&mut self, step: u64, checkpoint: &Path) {
        let _ = (step, checkpoint);
    }

    /// The step of a checkpoint that is still being read: it outlasts the limit until a later checkpoint is saved.
    fn reads(&self) -> Option<u64> {
        None
    }

    /// The model after `step` updates has been evaluated.
    fn evaluation(&mut self, step: u64, evaluation: &Evaluation) {
        let _ = (step, evaluation);
    }
}

/// Nobody looks on.
impl Observer for () {}

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
    /// Trained weights.
    pub selection: Selection,
    /// Where the reference runs.
    pub reference_device: Device,
    /// Length, records, checkpoints.
    pub run: RunPlan,
    /// The run directory, which no other process may write meanwhile.
    pub lock: RunLock,
    /// Who looks on.
    pub observer: Box<dyn Observer>,
    /// Starts the trackers, after files of an earlier run have been moved away.
    pub trackers: Box<dyn FnOnce() -> Trackers>,
}

/// Summary of a run.
#[derive(Debug, Default)]
pub struct RunSummary {
    /// Updates done in all.
    pub steps: u64,
    /// Updates done by this process.
    pub steps_here: u64,
    /// Whether it was asked to stop early, or the machine failed; it is saved and can go on.
    pub interrupted: bool,
    /// How the machine failed, where that is what stopped it.
    pub machine: Option<String>,
    /// Collapse that ended the run ([`RunPlan::stop_on_collapse`]), with what to do.
    pub collapsed: Option<String>,
    /// Evaluation before the first update.
    pub before: Option<Evaluation>,
    /// Evaluation after the last.
    pub after: Option<Evaluation>,
    /// The closing tables.
    pub report: Report,
}
