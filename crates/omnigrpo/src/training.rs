//! [`TrainPlan`] and [`train`], the training of a model from a program.

use std::fmt::Debug;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use omnigrpo_data::Dataset;
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{Console, Metric, RunLock, Trackers};
use omnigrpo_rewards::RewardSet;
use omnigrpo_train::{
    AdamWConfig, Algorithm, EvalOptions, EvalPlan, Evaluation, Observer, Result, Rollouts, RunPlan,
    RunSummary, Selection, TrainSetup,
};

/// Settings of a training run and its directory. All but the directory have a default.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use omnigrpo::{Algorithm, TrainPlan, recipe};
///
/// let mut plan = TrainPlan::in_dir("runs/first");
/// plan.algorithm = Algorithm::of(recipe("dapo").ok_or("no such recipe")?);
/// plan.algorithm.num_generations = 16;
/// plan.run.max_steps = Some(200);
/// // Looks on, and stops when there is nothing left to learn.
/// let plan = plan.on_step(|step| match step.metric("reward") {
///     Some(reward) if reward > 0.99 => ControlFlow::Break(()),
///     _ => ControlFlow::Continue(()),
/// });
/// assert_eq!(plan.algorithm.loss.beta, 0.04);
/// # Ok::<(), &str>(())
/// ```
pub struct TrainPlan {
    /// Run directory, created if it is missing. A run in it is resumed if it has the same plan.
    pub output_dir: PathBuf,
    /// Number of completions per prompt, sampling and loss.
    pub algorithm: Algorithm,
    /// Learning rates.
    pub optimizer: AdamWConfig,
    /// Trained parts. Adapters of the model are always trained.
    pub selection: Selection,
    /// Length, logging and checkpoints of the run.
    pub run: RunPlan,
    /// Rows for evaluations, which run at the times set by `run.eval` and at the end.
    pub held_out: Option<Dataset>,
    /// Options of evaluations.
    pub eval: EvalOptions,
    /// Console of the run; silent by default, [`Console::stderr`] shows progress.
    pub console: Console,
    /// Flag that, once set, ends the run after the current step, with a checkpoint.
    pub stop: Arc<AtomicBool>,
    hooks: Hooks,
}

/// A completed update.
#[derive(Debug)]
pub struct StepReport<'a> {
    /// Number of updates so far, including this one.
    pub step: u64,
    /// Metrics, with their names in `metrics.jsonl`.
    pub metrics: &'a [Metric],
}

impl StepReport<'_> {
    /// Returns a metric by name, or `None` if the update does not have it.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(known, _)| known == name).and_then(|(_, value)| *value)
    }
}

type OnStep = Box<dyn FnMut(&StepReport<'_>) -> ControlFlow<()>>;
type OnRollout = Box<dyn FnMut(&Rollouts)>;
type OnEvaluation = Box<dyn FnMut(u64, &Evaluation)>;

#[derive(Default)]
struct Hooks {
    step: Vec<OnStep>,
    rollout: Vec<OnRollout>,
    evaluation: Vec<OnEvaluation>,
}

impl Observer for Hooks {
    fn rollout(&mut self, _: u64, rollouts: &Rollouts) {
        self.rollout.iter_mut().for_each(|hook| hook(rollouts));
    }

    fn step(&mut self, step: u64, metrics: &[Metric]) -> ControlFlow<()> {
        let report = StepReport { step, metrics };
        // Every function is called, whatever the others return.
        let breaks = self.step.iter_mut().filter_map(|hook| hook(&report).is_break().then_some(())).count();
        if breaks > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn evaluation(&mut self, step: u64, evaluation: &Evaluation) {
        self.evaluation.iter_mut().for_each(|hook| hook(step, evaluation));
    }
}

impl TrainPlan {
    /// Returns the default plan for a run directory: GRPO with the first recipe, one pass over the rows.
    #[must_use]
    pub fn in_dir(output_dir: impl Into<PathBuf>) -> Self {
        Self {
            output_dir: output_dir.into(),
            algorithm: Algorithm::default(),
            optimizer: AdamWConfig::default(),
            selection: Selection::default(),
            run: RunPlan::default(),
            held_out: None,
            eval: EvalOptions::default(),
            console: Console::plain(std::io::sink()),
            stop: Arc::default(),
            hooks: Hooks::default(),
        }
    }

    /// Registers a function to be called after every update. `Break` ends the run after that update, with a checkpoint to resume
    /// from.
    #[must_use]
    pub fn on_step(mut self, hook: impl FnMut(&StepReport<'_>) -> ControlFlow<()> + 'static) -> Self {
        self.hooks.step.push(Box::new(hook));
        self
    }

    /// Registers a function to be called with the scored completions of every rollout, before the model is trained on them.
    #[must_use]
    pub fn on_rollout(mut self, hook: impl FnMut(&Rollouts) + 'static) -> Self {
        self.hooks.rollout.push(Box::new(hook));
        self
    }

    /// Registers a function to be called with the number of updates so far and the result of every evaluation.
    #[must_use]
    pub fn on_evaluation(mut self, hook: impl FnMut(u64, &Evaluation) + 'static) -> Self {
        self.hooks.evaluation.push(Box::new(hook));
        self
    }
}

/// Trains a model on the rows of a dataset.
///
/// Resumes an unfinished run of the same plan, rewards and rows in the run directory, so a killed program can simply be started
/// again. The code of closures and functions cannot be compared.
///
/// ```
/// use std::path::Path;
///
/// use omnigrpo::{
///     Checkpoint, Dataset, LoadOptions, Model, PromptBuilder, PromptSettings, ReadOptions, RewardSet, TrainPlan, demo, reward,
///     train,
/// };
/// use serde_json::json;
///
/// # let place = tempfile::tempdir()?;
/// # let directory = place.path();
/// demo::write_model(&directory.join("model"))?;
/// let checkpoint = Checkpoint::open(&directory.join("model"))?;
/// let model = Model::load_with(&checkpoint, &LoadOptions::default())?;
/// let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;
/// let sums = (0..4).map(|n| json!({ "prompt": format!("What is {n} + 1?") }));
/// let rows = Dataset::from_rows("sums", sums, Path::new("."), &ReadOptions::default())?;
/// let brief = reward("brief", (f64::NEG_INFINITY, 0.0), |row| -(row.completion.len() as f64));
///
/// let mut plan = TrainPlan::in_dir(directory.join("run"));
/// plan.algorithm.num_generations = 2;
/// plan.algorithm.sampling.max_completion_length = 4;
/// plan.run.max_steps = Some(1);
/// let summary = train(model, prompts, rows, RewardSet::new(vec![brief], &[])?, plan)?;
/// assert_eq!(summary.steps, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error if settings cannot work, rows or rewards fail, the loss is not finite, or the disk is full. The newest
/// checkpoint stays usable.
pub fn train(
    model: Model,
    prompts: PromptBuilder,
    dataset: Dataset,
    rewards: RewardSet,
    plan: TrainPlan,
) -> Result<RunSummary> {
    let TrainPlan {
        output_dir,
        algorithm,
        optimizer,
        selection,
        mut run,
        held_out,
        eval,
        console,
        stop,
        hooks,
    } = plan;
    let (prompts, dataset) = (Arc::new(prompts), Arc::new(dataset));
    if run.fingerprint.is_empty() {
        let plans: [(&str, &dyn Debug); 3] =
            [("algorithm", &algorithm), ("optimizer", &optimizer), ("selection", &selection)];
        let plans = plans.into_iter().map(|(name, plan)| (name, format!("{plan:?}")));
        let inputs = [("rewards", rewards.names().join(", ")), ("dataset", dataset.fingerprint()?)];
        run.fingerprint = plans.chain(inputs).map(|(name, text)| (name.to_owned(), text.into())).collect();
    }
    let trackers = Trackers::none(&console);
    let setup = TrainSetup {
        eval: held_out
            .map(|rows| EvalPlan { options: eval, ..EvalPlan::new(Arc::clone(&prompts), Arc::new(rows)) }),
        rows: (0..dataset.len()).collect(),
        lock: RunLock::acquire(&output_dir, &format!("process {}", std::process::id()))?,
        trackers: Box::new(move || trackers),
        observer: Box::new(hooks),
        reference_device: model.device(),
        model,
        prompts,
        shuffled: None,
        dataset,
        rewards,
        algorithm,
        optimizer,
        selection,
        run,
    };
    omnigrpo_train::train(setup, &console, &stop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;

    use omnigrpo_data::ReadOptions;
    use omnigrpo_grpo::{CustomTerm, Surrogate};
    use omnigrpo_models::{Checkpoint, LoadOptions, PromptSettings};
    use omnigrpo_rewards::reward;
    use serde_json::json;

    use super::*;

    /// Trains on rows of an iterator with a closure as reward and a function as loss. Then starts the same run again, and a
    /// different one.
    #[test]
    fn a_run_needs_no_file_but_the_checkpoint_and_is_gone_on_with_only_by_the_same_plan() {
        let dir =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints/qwen2_5_vl_tied");
        let place = tempfile::tempdir().unwrap();
        let start = |max_steps: u64, learning_rate: f64| {
            let checkpoint = Checkpoint::open(&dir).unwrap();
            let model = Model::load_with(&checkpoint, &LoadOptions::default()).unwrap();
            let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default()).unwrap();
            let sums =
                (0..6).map(|n| json!({ "prompt": format!("{n} + {n} ="), "solution": format!("{}", 2 * n) }));
            let rows = Dataset::from_rows("sums", sums, place.path(), &ReadOptions::default()).unwrap();
            let digits = |text: &str| text.chars().filter(char::is_ascii_digit).count() as f64;
            let rewards =
                RewardSet::new(vec![reward("digits", (0.0, 64.0), move |row| digits(row.completion))], &[])
                    .unwrap();

            let mut plan = TrainPlan::in_dir(place.path().join("run"));
            plan.algorithm.num_generations = 3;
            plan.algorithm.sampling.max_completion_length = 6;
            plan.algorithm.loss.surrogate =
                Surrogate::Custom(CustomTerm(|token| -token.logp * token.advantage));
            plan.optimizer.learning_rate = learning_rate;
            (plan.run.prompts_per_step, plan.run.max_steps) = (2, Some(max_steps));
            let (steps, completions) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(0)));
            let (told, counted) = (Arc::clone(&steps), Arc::clone(&completions));
            let plan = plan
                .on_step(move |step| {
                    assert!(step.metric("reward").is_some() && step.metric("rewards/digits/mean").is_some());
                    told.lock().unwrap().push(step.step);
                    ControlFlow::Continue(())
                })
                .on_rollout(move |rollouts| {
                    *counted.lock().unwrap() += rollouts.completions().count();
                });
            let summary = train(model, prompts, rows, rewards, plan).unwrap();
            (summary.steps, steps.lock().unwrap().clone(), *completions.lock().unwrap())
        };
        assert_eq!(start(2, 1e-3), (2, vec![1, 2], 12));
        let weights = || std::fs::read(place.path().join("run/model.safetensors")).unwrap();
        let trained = weights();
        assert!(trained != std::fs::read(dir.join("model.safetensors")).unwrap());
        // Without a checkpoint, the same run starts from the beginning and ends with the same bytes.
        assert_eq!(start(2, 1e-3), (2, vec![1, 2], 12));
        assert!(weights() == trained);
        assert_eq!(start(2, 1e-2), (2, vec![1, 2], 12));
        assert!(weights() != trained);
    }
}
