//! [`TrainPlan`] and [`train`], the training of a model from a program.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use omnigrpo_data::Dataset;
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_observe::{Console, Metric, RunLock, StepProgress, Trackers};
use omnigrpo_rewards::{Corpus, RewardSet};
use omnigrpo_rollout::Interaction;
use omnigrpo_settings::binding::verb_of;
use omnigrpo_settings::build;
use omnigrpo_settings::{Settings, Values};
use omnigrpo_train::{
    AdamWConfig, Algorithm, EvalOptions, EvalPlan, Evaluation, Observer, Output, Policy, Result, Rollouts,
    Run, RunPlan, Selection, Signals, Trained,
};

/// Settings of a training run and its directory. All but the directory have a default.
///
/// ```
/// use omnigrpo::{Algorithm, TrainPlan, recipe};
///
/// let mut plan = TrainPlan::in_dir("runs/first");
/// plan.algorithm = Algorithm::of(recipe("dapo").ok_or("no such recipe")?);
/// plan.algorithm.num_generations = 16;
/// plan.run.max_steps = Some(200);
/// assert_eq!(plan.algorithm.loss.beta, 0.04);
/// assert_eq!(serde_json::to_value(&plan)?["algorithm"]["num_generations"], 16);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
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
    /// Options of evaluations, which run at the times set by `run.eval.when` and at the end.
    pub eval: EvalOptions,
    /// False to trust the rows instead of reading all of them before the first update.
    pub check_rows: bool,
    /// Files that determine the scores of rewards, such as programs. A run resumes only if their content is the same.
    pub reward_files: Vec<PathBuf>,
    /// Maximum memory of decoded media that are kept for later passes, bytes; `None` for a share of the free memory.
    pub media_bytes: Option<u64>,
}

/// Model, rows and rewards of a run.
pub struct Inputs {
    /// Model to train.
    pub model: Model,
    /// Builder of its prompts.
    pub prompts: PromptBuilder,
    /// Rows to train on.
    pub rows: Dataset,
    /// Rewards that score the completions.
    pub rewards: RewardSet,
    /// Rows for evaluations.
    pub held_out: Option<Dataset>,
    /// Environment that answers completions; [`SamplingParams::turns`](omnigrpo_rollout::SamplingParams::turns) limits its answers.
    pub interaction: Option<Interaction>,
    /// References for rewards that weigh words by their frequency ([`corpus`](omnigrpo_train::checks::corpus)). They are stored in the
    /// run directory.
    pub corpus: Option<Corpus>,
    /// Reference of the KL term, or teacher (`LossPlan::distillation`), with the same tokens; `None` for the model as it is at the start.
    pub reference: Option<Model>,
}

impl Inputs {
    /// Returns inputs without held-out rows.
    #[must_use]
    pub fn new(model: Model, prompts: PromptBuilder, rows: Dataset, rewards: RewardSet) -> Self {
        Self {
            model,
            prompts,
            rows,
            rewards,
            held_out: None,
            interaction: None,
            corpus: None,
            reference: None,
        }
    }
}

/// Console, flags and functions by which a program observes and stops a run.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use omnigrpo::{Front, metric};
///
/// // Looks on, and stops when there is nothing left to learn.
/// let front = Front::default().on_step(|step| match step.metric(metric::REWARD) {
///     Some(reward) if reward > 0.99 => ControlFlow::Break(()),
///     _ => ControlFlow::Continue(()),
/// });
/// ```
pub struct Front {
    /// Console of the run; silent by default, [`Console::stderr`] shows progress.
    pub console: Console,
    /// Flag that, once set, ends the run after the current step, with a checkpoint.
    pub stop: Arc<AtomicBool>,
    /// Requests of other threads to the run.
    pub signals: Signals,
    hooks: Hooks,
}

impl Default for Front {
    fn default() -> Self {
        let console = Console::plain(std::io::sink());
        Self { console, stop: Arc::default(), signals: Signals::default(), hooks: Hooks::default() }
    }
}

/// A completed update.
#[derive(Debug)]
pub struct StepReport<'a> {
    /// Number of updates so far, including this one.
    pub step: u64,
    /// Numbers of the line of this update in `metrics.jsonl`, in its order.
    pub metrics: &'a [Metric],
}

impl StepReport<'_> {
    /// Returns a metric by name ([`metric`](omnigrpo_grpo::metric) lists those that programs read), or `None` if the update does not have it.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(known, _)| known == name).and_then(|(_, value)| *value)
    }
}

type OnStep = Box<dyn FnMut(&StepReport<'_>) -> ControlFlow<()> + Send>;
type OnProgress = Box<dyn FnMut(&StepProgress) + Send>;
type OnRollout = Box<dyn FnMut(&Rollouts) + Send>;
type OnEvaluation = Box<dyn FnMut(u64, &Evaluation) + Send>;

#[derive(Default)]
struct Hooks {
    step: Vec<OnStep>,
    progress: Vec<OnProgress>,
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
            eval: EvalOptions::default(),
            check_rows: true,
            reward_files: Vec::new(),
            media_bytes: None,
        }
    }
}

impl Front {
    /// Registers a function to be called after every update. `Break` ends the run after that update, with a checkpoint to resume
    /// from.
    #[must_use]
    pub fn on_step(mut self, hook: impl FnMut(&StepReport<'_>) -> ControlFlow<()> + Send + 'static) -> Self {
        self.hooks.step.push(Box::new(hook));
        self
    }

    /// Registers a function to be called whenever a step goes on: at each phase, at each part of it (a completion, a prompt), and after
    /// each sampled token. It runs on the thread that trains, so it must be quick.
    #[must_use]
    pub fn on_progress(mut self, hook: impl FnMut(&StepProgress) + Send + 'static) -> Self {
        self.hooks.progress.push(Box::new(hook));
        self
    }

    /// Registers a function to be called with the scored completions of every rollout, before the model is trained on them.
    #[must_use]
    pub fn on_rollout(mut self, hook: impl FnMut(&Rollouts) + Send + 'static) -> Self {
        self.hooks.rollout.push(Box::new(hook));
        self
    }

    /// Registers a function to be called with the number of updates so far and the result of every evaluation.
    #[must_use]
    pub fn on_evaluation(mut self, hook: impl FnMut(u64, &Evaluation) + Send + 'static) -> Self {
        self.hooks.evaluation.push(Box::new(hook));
        self
    }
}

/// Trains a model on the rows of a dataset, and returns it with the summary of the run.
///
/// Like the program, it first checks everything that can be checked: all rows and the headers of their media, whether the rewards
/// can score them, one made-up completion by each external reward, and the memory. Then it resumes an unfinished run of the same
/// plan, rewards, rows and weights in the run directory, so a killed program can simply be started again. Inputs are compared by
/// content, but the code of closures and functions cannot be compared.
///
/// ```
/// use omnigrpo::{
///     Checkpoint, Front, Inputs, LoadOptions, Model, PromptBuilder, PromptSettings, RewardSet, RowReader, TrainPlan, demo, reward, train,
/// };
/// use serde_json::json;
///
/// # let place = tempfile::tempdir()?;
/// # let directory = place.path();
/// demo::write_model(&directory.join("model"))?;
/// let checkpoint = Checkpoint::open(&directory.join("model"))?;
/// let model = Model::load(&checkpoint, &LoadOptions::default())?;
/// let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;
/// let sums = (0..4).map(|n| json!({ "prompt": format!("What is {n} + 1?") }));
/// let rows = RowReader::new("sums").dataset(sums)?;
/// let brief = reward("brief", (f64::NEG_INFINITY, 0.0), |row| -(row.completion.len() as f64));
///
/// let rewards = RewardSet::new(vec![brief], &[])?;
///
/// let mut plan = TrainPlan::in_dir(directory.join("run"));
/// plan.algorithm.num_generations = 2;
/// plan.algorithm.sampling.max_completion_length = 4;
/// plan.run.max_steps = Some(1);
/// plan.run.rows.text_only = true;
/// let trained = train(Inputs::new(model, prompts, rows, rewards), plan, Front::default())?;
/// assert_eq!(trained.summary.steps, 1);
/// assert!(trained.model.params().iter().any(|weight| weight.trainable()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns [`TrainError::Refused`](omnigrpo_train::TrainError::Refused) if a check fails, and another error if settings cannot work,
/// rows or rewards fail later, the loss is not finite, or the disk is full. The newest checkpoint stays usable.
pub fn train(inputs: Inputs, plan: TrainPlan, front: Front) -> Result<Trained> {
    let Inputs { model, prompts, rows, rewards, held_out, interaction, corpus, reference } = inputs;
    let Front { console, stop, signals, mut hooks } = front;
    let (prompts, dataset) = (Arc::new(prompts), Arc::new(rows));
    let lock = RunLock::acquire(&plan.output_dir, &format!("process {}", std::process::id()))?;
    let (names, verb) =
        (rewards.names().into_iter().map(str::to_owned).collect(), verb_of(plan.run.objective));
    let settings = Settings::of_plans(
        &plan.algorithm,
        &plan.optimizer,
        &plan.selection,
        &plan.run,
        prompts.settings(),
        (names, rewards.weights()),
    );
    let values = Values::of(&settings);
    let eval = held_out.map(|rows| EvalPlan {
        options: plan.eval,
        interaction: interaction.clone(),
        ..EvalPlan::new(Arc::clone(&prompts), Arc::new(rows))
    });
    let device = reference.as_ref().map_or(model.device(), Model::device);
    let model = Policy::Loaded(Box::new(model));
    let inputs = Run {
        reference_device: device,
        reference_model: reference.map(|own| Policy::Loaded(Box::new(own))),
        eval,
        interaction,
        corpus,
        ..Run::new(model, prompts, dataset, rewards)
    };
    let plan = build::Plan {
        algorithm: plan.algorithm.into(),
        optimizer: plan.optimizer,
        selection: plan.selection,
        run: plan.run,
        check_rows: plan.check_rows,
        reward_files: plan.reward_files,
        media_bytes: plan.media_bytes,
        settings: (&values, &settings, verb),
        code: serde_json::Map::new(),
    };
    let run = build::run(inputs, plan, Some(lock.root()));
    let mut progress = std::mem::take(&mut hooks.progress);
    if !progress.is_empty() {
        let tell = move |now: &StepProgress| progress.iter_mut().for_each(|hook| hook(now));
        console.activity().listen(tell);
    }
    let prepared = run.prepare(&console)?;
    let trackers = Trackers::none(&console);
    let trackers = Box::new(move || trackers);
    let output = Output { lock, observer: Box::new(hooks), trackers, signals, curves: None };
    prepared.train(output, &console, &stop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;

    use omnigrpo_data::RowReader;
    use omnigrpo_grpo::{CustomTerm, Surrogate};
    use omnigrpo_models::{Checkpoint, LoadOptions, PromptSettings};
    use omnigrpo_rewards::reward;
    use omnigrpo_train::TrainError;
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
            let model = Model::load(&checkpoint, &LoadOptions::default()).unwrap();
            let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default()).unwrap();
            let sums =
                (0..6).map(|n| json!({ "prompt": format!("{n} + {n} ="), "solution": format!("{}", 2 * n) }));
            let rows = RowReader::new("sums").media_in(place.path()).dataset(sums).unwrap();
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
            plan.run.rows.text_only = true;
            let (steps, completions) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(0)));
            let (told, counted) = (Arc::clone(&steps), Arc::clone(&completions));
            let phases = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
            let heard = Arc::clone(&phases);
            let front = Front::default()
                .on_progress(move |now| {
                    assert!(now.done <= now.of && now.num_steps == max_steps, "{now:?}");
                    heard.lock().unwrap().insert((now.step, now.phase));
                })
                .on_step(move |step| {
                    assert!(step.metric("reward").is_some() && step.metric("rewards/digits/mean").is_some());
                    told.lock().unwrap().push(step.step);
                    ControlFlow::Continue(())
                })
                .on_rollout(move |rollouts| {
                    *counted.lock().unwrap() += rollouts.completions().count();
                });
            let summary = train(Inputs::new(model, prompts, rows, rewards), plan, front).unwrap().summary;
            let phases = phases.lock().unwrap();
            assert!(
                [(1, "rollout"), (2, "backward")].iter().all(|phase| phases.contains(phase)),
                "{phases:?}"
            );
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

    #[test]
    fn plans_models_and_options_may_be_sent_to_a_thread() {
        fn is_send<T: Send>() {}
        fn is_sync<T: Sync>() {}
        is_send::<TrainPlan>();
        is_send::<Front>();
        is_send::<Run>();
        is_send::<Trained>();
        is_send::<LoadOptions<'static>>();
        is_sync::<LoadOptions<'static>>();
    }

    /// The library checks a run as the program does: an unusable row, and a reward by name beside a closure that applies to no row.
    #[test]
    fn a_run_that_cannot_work_is_refused_before_its_first_step() {
        let dir =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints/qwen2_5_vl_tied");
        let place = tempfile::tempdir().unwrap();
        let refused = |row: serde_json::Value, names: &[&str], text_only: bool| {
            let checkpoint = Checkpoint::open(&dir).unwrap();
            let model = Model::load(&checkpoint, &LoadOptions::default()).unwrap();
            let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default()).unwrap();
            let rows = RowReader::new("rows").media_in(place.path()).dataset([row]).unwrap();
            let brief = reward("brief", (-1e4, 0.0), |row| -(row.completion.len() as f64));
            let rewards = omnigrpo_rewards::build_with(names, &Default::default(), vec![brief]).unwrap();
            let mut plan = TrainPlan::in_dir(place.path().join("run"));
            plan.run.rows.text_only = text_only;
            let front = Front::default().on_step(|_| panic!("a step was taken"));
            match train(Inputs::new(model, prompts, rows, rewards), plan, front) {
                Err(TrainError::Refused(refusal)) => refusal,
                Err(error) => panic!("{error}"),
                Ok(_) => panic!("the run was not refused"),
            }
        };
        let missing = json!({ "prompt": "<image>What?", "image": "missing.png", "solution": "x" });
        let refusal = refused(missing, &["brief", "accuracy"], false);
        assert_eq!(refusal.what, "too many rows cannot be used");
        assert_eq!(refusal.got.as_deref(), Some("1 of 1 rows"));
        let text = || json!({ "prompt": "1 + 1 =" });
        let refusal = refused(text(), &["brief"], false);
        assert_eq!(refusal.what, "all rows are text only, but the model sees or hears");
        let refusal = refused(text(), &["brief", "accuracy"], true);
        assert_eq!(refusal.what, "the reward `accuracy` applies to no row");
        assert!(!place.path().join("run/metrics.jsonl").exists());
    }
}
