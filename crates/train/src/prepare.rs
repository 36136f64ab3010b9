//! The start of a run: [`Run::prepare`] checks everything that can be checked without a model, and [`Prepared::train`] trains.
//!
//! Before a weight is loaded, the check reads every row and every medium's header, asks the rewards whether they can score the
//! rows, lets each external reward score one made-up completion, digests all inputs, decides about resuming, and forecasts memory.
//! A run that cannot work is refused in seconds, and not after hours.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use omnigrpo_data::Dataset;
use omnigrpo_models::{Model, ModelError, PromptBuilder, TensorDigests};
use omnigrpo_observe::{Console, RunLock, Trackers};
use omnigrpo_ops::{Card, Device, Param};
use omnigrpo_rewards::{Corpus, RewardSet, answer_reward};
use omnigrpo_rollout::{Interaction, MAX_LIVE};
use omnigrpo_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::alike;
use crate::card::{Speed, step_time_on};
use crate::checks::{self, LONGEST};
use crate::error::{LENGTH_BONUS, ORDER_BONUS, REWARDS, Refusal, Result, SYNC_REFERENCE};
use crate::evaluate::EvalPlan;
use crate::forecast::{StepTime, step_time};
use crate::inputs;
use crate::lender::is_lent;
use crate::length::Length;
use crate::longest::{Longest, PREPARED, TYPICAL};
use crate::memory::{Memory, MemoryOf, MemoryPlan, ReferenceKept, memory};
use crate::optimizer::AdamWConfig;
use crate::plan::{Curves, Objective, Observer, RunPlan, Signals, TrainSetup};
use crate::policy::{ModelPlan, Policy};
use crate::resume;
use crate::room;
use crate::run::{Trained, train};
use crate::selection::Selection;
use crate::split::{GradientSum, Shard, Split};
use crate::step::{Algorithm, Divided};
use crate::survey::{RowCheck, Survey};

/// Numbers of completions that a GPU decodes at once instead of [`MAX_LIVE`], the best first, and the share of its memory that the
/// run may take with them.
const WIDER: [usize; 2] = [256, 128];
const WIDE_SHARE: f64 = 0.9;
/// Names of the kinds of rows in messages.
const TRAINING: &str = "rows";
const EVALUATION: &str = "evaluation rows";

/// A run before its checks: model, rows, rewards and settings.
pub struct Run {
    /// Model to train.
    pub model: Policy,
    /// Builder of training prompts.
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
    /// References of the rows on which rewards were built. They are stored in the run directory for later evaluations.
    pub corpus: Option<Corpus>,
    /// Memory of reward models, bytes.
    pub reward_bytes: u64,
    /// Files that determine the scores of rewards.
    pub reward_files: Vec<PathBuf>,
    /// Digests of the weights of reward models, which several ranks compare.
    pub reward_weights: TensorDigests,
    /// Settings of the algorithm.
    pub algorithm: Divided,
    /// Settings of the optimizer.
    pub optimizer: AdamWConfig,
    /// Trained weights.
    pub selection: Selection,
    /// Reference or teacher, if it is another model than the policy at the start of the run. It has the same tokens.
    pub reference_model: Option<Policy>,
    /// Device of the reference.
    pub reference_device: Device,
    /// Length, records and checkpoints of the run. Its fingerprint has the settings; [`Run::prepare`] adds the inputs.
    pub plan: RunPlan,
    /// False to trust the rows instead of reading all of them first.
    pub check_rows: bool,
    /// Directory that caches the headers of media for the next check.
    pub cache_dir: Option<PathBuf>,
    /// Maximum memory of decoded media that are kept for later passes, bytes; `None` for a share of the free memory.
    pub media_bytes: Option<u64>,
    /// Memory of a GPU that is assumed and not opened, bytes; `None` for the free memory of the model's device.
    pub gpu_memory: Option<u64>,
    /// Directory of the run, in which checkpoints to resume from are looked for; `None` to only plan the run.
    pub output_dir: Option<PathBuf>,
}

/// A checked run.
pub struct Prepared {
    run: Run,
    /// Rows that must never be drawn: number, id and reason.
    bad_rows: Vec<(u64, String, String)>,
    longest: Longest,
    typical: Longest,
    /// Mean memory of a row's decoded media, bytes, of training and of held-out rows; `None` if the rows were not checked.
    row_media_bytes: [Option<f64>; 2],
    /// Memory that decoding the largest medium takes, bytes; 0 if the rows were not checked.
    decoding_bytes: u64,
    resumes: Option<(PathBuf, u64)>,
    /// Outline of the reference, if it is another model.
    reference: Option<Arc<Model>>,
    forecast: Forecast,
    /// Digests of the inputs.
    inputs: Map<String, Value>,
}

/// Results of the check of the rows.
#[derive(Default)]
struct CheckedData {
    /// Rows that must never be drawn: number, id and reason.
    bad_rows: Vec<(u64, String, String)>,
    /// Numbers of the longest rows.
    longest: Vec<u64>,
    /// Mean memory of a row, as [`Prepared::row_media_bytes`].
    row_media_bytes: [Option<f64>; 2],
    decoding_bytes: u64,
}

/// Memory that a run takes, with the longest rows and completions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Need {
    /// Memory of the model's device.
    pub memory: Memory,
    /// Main memory, if the model is on a card.
    pub main: Option<Memory>,
    /// Capacity of the store of decoded media, bytes.
    pub media_store: u64,
}

/// Bytes that this process may use, and the name of that memory; `None` if they are unknown.
pub type Limit = Option<(u64, &'static str)>;

/// Memory of a run, and its limits.
#[derive(Clone, Debug, Default)]
pub struct Forecast {
    /// Memory that the run takes.
    pub need: Need,
    /// Limit of the memory of the model's device.
    pub limit: Limit,
    /// Limit of main memory, if the model is on a card.
    pub main_limit: Limit,
}

impl Forecast {
    /// Returns each kind of memory of a run, with its limit.
    fn each(&self, need: &Need) -> impl Iterator<Item = (Memory, Limit)> + use<> {
        let main = need.main.map(|main| (main, self.main_limit));
        std::iter::once((need.memory, self.limit)).chain(main)
    }

    /// Returns true if this memory is within the limits.
    pub fn allows(&self, need: &Need) -> bool {
        self.each(need).all(|(memory, limit)| fits(&memory, limit))
    }

    /// Returns true if the memory that is in use all the time exceeds a limit, so that the run cannot work.
    pub fn is_hopeless(&self) -> bool {
        self.each(&self.need).any(|(memory, limit)| limit.is_some_and(|(limit, _)| memory.lasting() > limit))
    }

    /// Returns the refusal of a run that exceeds a limit.
    pub fn refusal(&self) -> Option<Refusal> {
        let (memory, limit) = self.each(&self.need).find(|(memory, limit)| !fits(memory, *limit))?;
        let (limit, whose) = limit?;
        Some(
            Refusal::failure(format!("this run does not fit into {whose}"))
                .got(format!("{} ({memory})", room::size(memory.total())))
                .expected(format!("at most the free {}", room::size(limit))),
        )
    }
}

/// Returns true if this memory is within the limit.
pub fn fits(memory: &Memory, limit: Limit) -> bool {
    limit.is_none_or(|(limit, _)| memory.total() <= limit)
}

/// Settings on which the memory of a run depends, to forecast it for other values.
#[derive(Clone)]
pub struct Variant<'a> {
    /// Model to train; `None` for that of the run.
    pub model: Option<&'a ModelPlan>,
    /// Trained weights.
    pub selection: &'a Selection,
    /// Settings of the algorithm.
    pub algorithm: &'a Divided,
    /// Settings of the optimizer.
    pub optimizer: &'a AdamWConfig,
    /// Length of the run and prompts per step.
    pub plan: &'a RunPlan,
    /// Maximum memory of decoded media that are kept.
    pub media_bytes: Option<u64>,
    /// Longest rows with these settings.
    pub longest: &'a Longest,
}

/// Places to which a run writes.
pub struct Output {
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

impl Run {
    /// Returns a run on all rows with default settings, without evaluation and without a directory: it is only planned.
    #[must_use]
    pub fn new(
        model: Policy,
        prompts: Arc<PromptBuilder>,
        dataset: Arc<Dataset>,
        rewards: RewardSet,
    ) -> Self {
        Self {
            reference_device: model.device(),
            reference_model: None,
            model,
            prompts,
            shuffled: None,
            rows: (0..dataset.len()).collect(),
            dataset,
            eval: None,
            rewards,
            interaction: None,
            corpus: None,
            reward_bytes: 0,
            reward_files: Vec::new(),
            reward_weights: TensorDigests::new(),
            algorithm: Algorithm::default().into(),
            optimizer: AdamWConfig::default(),
            selection: Selection::default(),
            plan: RunPlan::default(),
            check_rows: true,
            cache_dir: None,
            media_bytes: None,
            gpu_memory: None,
            output_dir: None,
        }
    }

    /// Checks everything that can be checked before the model is loaded, and prints what it found.
    ///
    /// # Errors
    /// Returns [`TrainError::Refused`](crate::TrainError::Refused) if the run cannot work: too many unusable rows, a reward that
    /// applies to no row or does not answer, a missing checkpoint, or one that was written with other settings or inputs. Returns
    /// another error if files cannot be read.
    pub fn prepare(self, console: &Console) -> Result<Prepared> {
        self.check_router()?;
        let reference = self.check_reference()?.map(Arc::new);
        self.check_shuffled()?;
        if let Some(dir) = &self.output_dir {
            resume::find_requested(&self.plan.resume.from, dir)?;
        }
        let CheckedData { bad_rows, longest, row_media_bytes, decoding_bytes } = self.check_data(console)?;
        let objective = self.plan.objective;
        let bad: HashSet<u64> = bad_rows.iter().map(|(row, ..)| *row).collect();
        let usable: Vec<u64> = self.rows.iter().copied().filter(|row| !bad.contains(row)).collect();
        let some = usable.len().min(TYPICAL);
        let typical: Vec<u64> = (0..some).map(|at| usable[at * usable.len() / some]).collect();
        let outlines = |rows: &[u64]| {
            let rows = Longest::prepare(&self.prompts, &self.dataset, rows, objective);
            rows.answered(&self.prompts, &self.algorithm.sampling)
        };
        let (longest, typical) = (outlines(&longest), outlines(&typical));
        let (resumes, forecast, inputs) = (None, Forecast::default(), Map::new());
        let mut prepared = Prepared {
            run: self,
            bad_rows,
            longest,
            typical,
            row_media_bytes,
            decoding_bytes,
            resumes,
            reference,
            forecast,
            inputs,
        };
        prepared.foresee()?;
        prepared.find_start()?;
        Ok(prepared)
    }

    /// Returns true if the policy is its own teacher ([`RunPlan::teaches_itself`]).
    fn teaches_itself(&self) -> bool {
        self.plan.teaches_itself(&self.algorithm, &self.prompts, self.reference_model.is_none())
    }

    /// Returns true if rewards score sampled completions.
    fn scores(&self) -> bool {
        self.plan.objective == Objective::Reinforce && !self.plan.rows.replay
    }

    /// Checks that the settings for routers apply to the model.
    fn check_router(&self) -> Result<()> {
        let family = self.model.checkpoint().family();
        if family.architecture().decoder_config().experts.is_some() || self.algorithm.router.is_off() {
            return Ok(());
        }
        Err(Refusal::usage("router_aux_loss_coef and router_z_loss_coef have no effect on this model")
            .got(format!("{}, which has no experts", family.name()))
            .expected("a family with experts, such as aria; otherwise remove the two settings")
            .into())
    }

    /// Checks that a reference of its own can score the policy's completions, and returns its outline.
    fn check_reference(&self) -> Result<Option<Model>> {
        let Some(own) = self.reference_model.as_ref().filter(|_| self.algorithm.loss.needs_reference())
        else {
            return Ok(None);
        };
        let (checkpoint, policy) = (own.checkpoint(), self.model.checkpoint());
        let [theirs, ours] = [checkpoint.family(), policy.family()];
        let refused = |what: &str| Refusal::usage(what).at(checkpoint.dir().display());
        if self.plan.sync_reference.is_some() {
            return Err(refused("a reference of its own stays as it is")
                .got(format!("{SYNC_REFERENCE}"))
                .expected("one of the two")
                .into());
        }
        // Towers read the media as the policy's processor prepares them, and positions follow the family's rule.
        if theirs.name() != ours.name() && !(theirs.reads_text_only() && ours.reads_text_only()) {
            return Err(refused("the reference or teacher is of another family")
                .got(theirs.name())
                .expected(format!(
                    "{}, as the policy; any two families that read text alone go together",
                    ours.name()
                ))
                .into());
        }
        let (own_tokens, tokens) =
            (Tokenizer::from_dir(checkpoint.dir()).map_err(ModelError::from)?, self.prompts.tokenizer());
        let each = 0..tokens.vocab_size() as u32;
        if let Some(id) = each.into_iter().find(|&id| own_tokens.token(id) != tokens.token(id)) {
            let shown = |token: Option<String>| {
                token.map_or_else(|| "no token".to_owned(), |token| format!("{token:?}"))
            };
            return Err(refused("the reference or teacher has other tokens than the policy")
                .got(format!("{} with the number {id}", shown(own_tokens.token(id))))
                .expected(shown(tokens.token(id)))
                .help("take a model with the same tokens, such as another size of the same family")
                .into());
        }
        own.outline_to_read().map(Some)
    }

    /// Checks that a reward can tell whether an answer depends on the order of frames.
    fn check_shuffled(&self) -> Result<()> {
        let length_bonus = self.algorithm.length_bonus;
        if self.shuffled.is_none() && !length_bonus || answer_reward(&self.rewards).is_some() {
            return Ok(());
        }
        if length_bonus {
            return Err(Refusal::usage("no reward compares answers, so no answer is known to be right")
                .at(LENGTH_BONUS)
                .got(format!("the rewards {}", self.rewards.names().join(" ")))
                .expected(format!("`accuracy` or one of its rules in {REWARDS}"))
                .into());
        }
        Err(Refusal::usage("no reward compares answers, so no answer can depend on the order of frames")
            .at(ORDER_BONUS)
            .got(format!("the rewards {}", self.rewards.names().join(" ")))
            .expected(format!("`accuracy` or one of its rules in {REWARDS}"))
            .into())
    }

    /// Checks rows and rewards.
    fn check_data(&self, console: &Console) -> Result<CheckedData> {
        let CheckedData { mut bad_rows, mut longest, mut row_media_bytes, mut decoding_bytes } =
            CheckedData::default();
        // Held-out rows of the same dataset are checked with it.
        let held_out = self.eval.as_ref().filter(|eval| !Arc::ptr_eq(&eval.dataset, &self.dataset));
        let evaluated = held_out.map(|eval| (EVALUATION, &eval.dataset));
        for (which, dataset) in std::iter::once((TRAINING, &self.dataset)).chain(evaluated) {
            let (warnings, refusal) = checks::unread_media(dataset, which, self.plan.rows.text_only);
            warnings.iter().for_each(|line| console.warning(line));
            if let Some(refusal) = refusal {
                return Err(refusal.into());
            }
        }
        // An environment may show media that no row has.
        if !self.plan.rows.text_only
            && !self.prompts.family().reads_text_only()
            && self.interaction.is_none()
            && self.dataset.is_text_only()
        {
            return Err(checks::text_only(&self.dataset, TRAINING).into());
        }
        if self.check_rows {
            let survey = self.scores().then(|| Survey::new(&self.rewards));
            if let Some(eval) = held_out {
                let which = (EVALUATION, Objective::Reinforce);
                let report = self.check(which, &eval.dataset, &eval.prompts, None, console)?;
                row_media_bytes[1] = Some(checks::mean_media_bytes(&report));
                decoding_bytes = report.decoding_bytes;
            }
            let which = (TRAINING, self.plan.objective);
            let report = self.check(which, &self.dataset, &self.prompts, survey.as_ref(), console)?;
            if let Some(survey) = &survey {
                if let Some(refusal) = checks::idle(&survey.seen(), &self.dataset) {
                    return Err(refusal.into());
                }
                let system = self.prompts.settings().render.system.as_deref();
                checks::warnings(&survey.seen(), system).iter().for_each(|line| console.notice(line));
            }
            row_media_bytes[0] = Some(checks::mean_media_bytes(&report));
            row_media_bytes[1] = row_media_bytes[1].or(row_media_bytes[0]);
            decoding_bytes = decoding_bytes.max(report.decoding_bytes);
            longest.extend(report.longest.iter().map(|prompt| prompt.row));
            bad_rows.extend(report.problems.into_iter().map(|p| {
                (p.row, self.dataset.id(p.row), format!("{}:{}: {}", p.file.display(), p.line, p.what))
            }));
        } else {
            let seen = || Survey::new(&self.rewards).ask_until_none_is_idle(&self.dataset, &self.rows);
            if let Some(refusal) =
                self.scores().then(seen).and_then(|seen| checks::idle(&seen, &self.dataset))
            {
                return Err(refusal.into());
            }
            // Without a check of the rows, the longest ones are unknown.
            longest.extend(self.rows.iter().copied().take(PREPARED));
        }
        self.check_rewards(&bad_rows, console)?;
        Ok(CheckedData { bad_rows, longest, row_media_bytes, decoding_bytes })
    }

    /// Reads every row of a dataset, and the header of every medium.
    fn check(
        &self,
        (which, objective): (&str, Objective),
        dataset: &Dataset,
        prompts: &PromptBuilder,
        survey: Option<&Survey<'_>>,
        console: &Console,
    ) -> Result<omnigrpo_data::Report> {
        let check = RowCheck {
            prompts: Some(prompts),
            objective,
            media: &prompts.settings().media,
            survey,
            num_longest: LONGEST,
            cache_dir: self.cache_dir.as_deref(),
            console,
        };
        checks::tolerable(which, &check, dataset, &self.plan.rows.skip, console)
    }

    /// Lets the rewards score one completion, and asks them about the evaluation rows.
    fn check_rewards(&self, bad_rows: &[(u64, String, String)], console: &Console) -> Result<()> {
        let (scores, first) = (self.scores(), self.algorithm.split.ranks.is_first());
        // The first rank scores for all.
        if scores && first {
            let bad: HashSet<u64> = bad_rows.iter().map(|(row, ..)| *row).collect();
            let usable = self.rows.iter().copied().filter(|row| !bad.contains(row));
            checks::probe_rewards(
                &self.rewards,
                &self.dataset,
                usable,
                &self.prompts,
                self.algorithm.num_generations,
                console,
            )?;
        }
        if let Some(eval) = &self.eval {
            if let Some(refusal) =
                checks::ask_before_evaluation(console, &eval.dataset, &eval.rows, &self.rewards)
            {
                console.line(&format!("in evaluations: {refusal}"));
            }
            if !scores && first {
                let rows = eval.rows.iter().copied();
                let each = eval.options.num_generations;
                checks::probe_rewards(&self.rewards, &eval.dataset, rows, &self.prompts, each, console)?;
            }
        }
        if scores || self.eval.is_some() {
            checks::rewards_read_all(&self.rewards, self.algorithm.sampling.max_completion_length)?;
        }
        match &self.eval {
            Some(eval) if !self.check_rows => {
                checks::any_usable(&eval.dataset, &eval.rows, &eval.prompts, &self.rewards)
            }
            _ => Ok(()),
        }
    }
}

impl Prepared {
    /// Returns the number of rows that can be drawn.
    pub fn usable_rows(&self) -> usize {
        let bad: HashSet<u64> = self.bad_rows.iter().map(|(row, ..)| *row).collect();
        self.run.rows.iter().filter(|row| !bad.contains(row)).count()
    }

    /// Returns the rows that will never be drawn: number, id and reason.
    pub fn bad_rows(&self) -> &[(u64, String, String)] {
        &self.bad_rows
    }

    /// Returns the checkpoint from which the run will resume, and its step; `None` if it starts from the beginning.
    pub fn resumes_from(&self) -> Option<(&Path, u64)> {
        self.resumes.as_ref().map(|(path, step)| (path.as_path(), *step))
    }

    /// Returns the memory that the run takes, and the limits.
    pub fn forecast(&self) -> &Forecast {
        &self.forecast
    }

    /// Returns the outlines of the longest rows.
    pub fn longest(&self) -> &Longest {
        &self.longest
    }

    /// Returns the device of the model and that of the reference.
    pub fn devices(&self) -> [Device; 2] {
        [self.run.model.device(), self.run.reference_device]
    }

    /// Returns the plan of evaluations.
    pub fn eval(&self) -> Option<&EvalPlan> {
        self.run.eval.as_ref()
    }

    /// Returns the settings of the run on which its memory depends.
    pub fn variant(&self) -> Variant<'_> {
        Variant {
            model: None,
            selection: &self.run.selection,
            algorithm: &self.run.algorithm,
            optimizer: &self.run.optimizer,
            plan: &self.run.plan,
            media_bytes: self.run.media_bytes,
            longest: &self.longest,
        }
    }

    /// Forecasts the memory of the run.
    fn foresee(&mut self) -> Result<()> {
        let device = self.run.model.device();
        let main = self.main_memory().map(|bytes| (bytes, "memory"));
        // The memory that this process already uses is added on both sides.
        let of_card = |(free, whose)| (free + Card::OWN_BYTES as u64, whose);
        (self.forecast.limit, self.forecast.main_limit) = match (self.run.gpu_memory, device) {
            // The run is for another machine.
            (Some(bytes), _) => (Some((bytes, "the GPU's memory")), None),
            (None, Device::Cpu) => (main, None),
            (None, _) => (room::free_on(device).map(of_card), main.map(|(bytes, _)| (bytes, "main memory"))),
        };
        self.forecast.need = self.memory(&self.variant())?;
        self.widen_rollouts();
        Ok(())
    }

    /// Lets rollouts on a GPU decode more completions at once than by default, if its memory has room. No bit of a completion depends on it.
    fn widen_rollouts(&mut self) {
        let (run, plan) = (&self.run, &self.run.plan);
        let (Some((limit, _)), MAX_LIVE) = (self.forecast.limit, run.algorithm.max_live) else {
            return;
        };
        if run.model.device() == Device::Cpu || plan.objective == Objective::Imitate {
            return;
        }
        let each = run.algorithm.num_generations.max(1);
        let rows = self.prompts_here(plan) * plan.steps_per_generation * each;
        // Groups are never divided.
        let whole = |live: usize| ((live / each).max(1) * each).min(rows);
        let fits = |need: &Need| need.memory.total() as f64 <= limit as f64 * WIDE_SHARE;
        for live in WIDER.map(whole) {
            if live <= whole(MAX_LIVE) || !fits(&self.forecast.need) {
                break;
            }
            let mut algorithm = self.run.algorithm.clone();
            algorithm.max_live = live;
            let need = self.memory(&Variant { algorithm: &algorithm, ..self.variant() });
            if let Some(need) = need.ok().filter(fits) {
                (self.run.algorithm, self.forecast.need) = (algorithm, need);
                break;
            }
        }
    }

    /// Returns the bytes of main memory that this rank may use, with those that it already uses. The ranks of a machine share
    /// main memory.
    fn main_memory(&self) -> Option<u64> {
        room::free().map(|free| free / self.run.algorithm.split.local.max(1) as u64 + room::resident())
    }

    /// Adds the contents of all inputs to the fingerprint, and looks for the checkpoint to resume from. This reads all weights, so a
    /// run that is only planned or cannot work does without it.
    fn find_start(&mut self) -> Result<()> {
        let Some(dir) = self.run.output_dir.clone().filter(|_| !self.forecast.is_hopeless()) else {
            return Ok(());
        };
        let run = &self.run;
        let of_model =
            inputs::of_model(&run.model, run.reference_model.as_ref(), &self.outline(&self.variant())?)?;
        let digests = inputs::digests(&self.run.dataset, &self.run.reward_files)?;
        self.inputs = of_model.into_iter().chain(digests).collect();
        self.run.plan.resume.fingerprint.extend(self.inputs.clone());
        let total_steps = Length::of(&self.run.plan, self.usable_rows())?.total;
        self.resumes = resume::expected(&self.run.plan, &dir, total_steps)?;
        Ok(())
    }

    /// Returns the memory that the run takes with other settings.
    ///
    /// # Errors
    /// Returns an error if the settings cannot be used with this model.
    pub fn memory(&self, variant: &Variant<'_>) -> Result<Need> {
        let outline = self.outline(variant)?;
        let plan = self.memory_plan(variant, variant.longest, 0);
        let of_device = memory(&outline, &plan)?;
        let mut main = match plan.of {
            MemoryOf::Host => of_device,
            _ => memory(&outline, &self.plan_beside_card(variant, plan))?,
        };
        let (policy, split) = (&self.run.model, &self.run.algorithm.split);
        if matches!(policy, Policy::Planned(_)) && policy.device() == Device::Cpu && split.shares_base() {
            let shared = outline.sharable_bytes();
            main.weights -= shared - shared / split.local as u64;
        }
        // A model in memory is part of the process already.
        let loaded = if let Policy::Loaded(_) = self.run.model { main.weights + main.adapters } else { 0 };
        main.program = room::resident().saturating_sub(self.run.reward_bytes + loaded);
        main.rewards = self.run.reward_bytes;
        main.decoding = self.decoding_bytes;
        // The ranks of a machine share its main memory.
        let given = variant.media_bytes.map(|given| given / self.run.algorithm.split.local.max(1) as u64);
        let left = self.main_memory().map(|bytes| bytes.saturating_sub(main.total()));
        let media_store = room::for_media(given, left);
        // Other settings of media are assumed to change all rows in the same proportion as the longest one.
        let of_longest = |longest: &Longest| longest.media_bytes().max(1) as f64;
        let scale = of_longest(variant.longest) / of_longest(&self.longest);
        let all = self.media_bytes(variant.plan) as f64 * scale;
        main.media_store = room::kept(all as u64, media_store, main.media);
        Ok(match self.run.model.device() {
            Device::Cpu => Need { memory: main, main: None, media_store },
            _ => Need { memory: of_device, main: Some(main), media_store },
        })
    }

    /// Predicts the time of a step and of an evaluation batch on this machine's CPU or on a card, for completions of the given length in
    /// tokens.
    ///
    /// # Errors
    /// Returns an error if the settings cannot be used with this model.
    pub fn step_time(&self, completion_tokens: usize, speed: &mut Speed) -> Result<StepTime> {
        self.step_time_of(&self.variant(), &self.typical, completion_tokens, speed)
    }

    /// Returns the rows by which the time of a step is predicted.
    pub fn typical(&self) -> &Longest {
        &self.typical
    }

    /// Like [`Self::step_time`], for a run that differs in some settings, with `typical` rows.
    ///
    /// # Errors
    /// As [`Self::step_time`].
    pub fn step_time_of(
        &self,
        variant: &Variant<'_>,
        typical: &Longest,
        completion_tokens: usize,
        speed: &mut Speed,
    ) -> Result<StepTime> {
        let mut algorithm = variant.algorithm.clone();
        let sampling = &mut algorithm.sampling;
        (sampling.min_completion_length, sampling.max_completion_length) = (0, completion_tokens);
        let variant = Variant { algorithm: &algorithm, ..*variant };
        let outline = self.outline(&variant)?;
        let plan = variant.plan;
        let rollout = self.prompts_here(plan) * plan.steps_per_generation;
        // The steps together use every row once.
        let steps = typical.len().div_ceil(rollout).max(1);
        let plans: Vec<MemoryPlan<'_>> =
            (0..steps).map(|step| self.memory_plan(&variant, typical, step * rollout)).collect();
        match speed {
            Speed::Measured(rates) => step_time(&outline, &plans, plan.num_iterations, rates),
            Speed::Card(rates) => Ok(step_time_on(*rates, &outline, &plans, plan.num_iterations)),
        }
    }

    /// Returns the bytes that each rank sends in a step: its share of the gradients in f32, and of the sums or of the updated
    /// weights. If gradients are cut, it sends them after each leaf. If weights are cut, all ranks exchange them for the rollout, and
    /// for the forward and the backward pass of each micro-batch.
    ///
    /// # Errors
    /// Returns an error if the settings cannot be used with this model.
    pub fn exchanged_bytes(&self) -> Result<u64> {
        let (split, algorithm) = (&self.run.algorithm.split, &self.run.algorithm);
        let outline = self.outline(&self.variant())?;
        let lent: Vec<_> = outline.decoder().layers().into_iter().flatten().collect();
        let is_cut =
            |param: &Arc<Param>| is_lent(split, param) && lent.iter().any(|own| Arc::ptr_eq(own, param));
        let size = split.ranks.size();
        let leaves = if split.settings.shard >= Shard::Gradients {
            split.num_leaves().div_ceil(size).max(1)
        } else {
            1
        };
        let micro_batches = self.prompts_here(&self.run.plan).div_ceil(algorithm.micro());
        // The reference of an adapter has the same weights; another one is in the checkpoint's files or is cut, too.
        let lends = self.run.plan.lends_reference(self.run.model.device()) && !self.run.teaches_itself();
        let scores = algorithm.loss.needs_reference() && !lends;
        let gathers = 1 + micro_batches * (2 + usize::from(scores));
        let each = outline.params().iter().map(|param| {
            let gathered = if is_cut(param) { gathers * param.num_bytes() } else { 0 };
            if !param.trainable() {
                return gathered;
            }
            let gradient = 4 * param.len();
            let has_parts = split.settings.shard != Shard::None;
            // The engine's sum arrives whole on every rank, also where each rank needs a part of it only.
            let is_whole = !has_parts || split.settings.sum == GradientSum::Engine;
            let updated = if has_parts && !is_cut(param) { param.num_bytes() } else { 0 };
            gathered + leaves * (gradient + if is_whole { gradient } else { 0 }) + updated
        });
        let (all, ranks) = (each.sum::<usize>() as u64, size as u64);
        Ok(all * (ranks - 1) / ranks)
    }

    /// Returns the division of the run over ranks.
    pub fn split(&self) -> &Split {
        &self.run.algorithm.split
    }

    fn outline(&self, variant: &Variant<'_>) -> Result<Model> {
        match variant.model {
            Some(plan) => plan.outline(variant.selection),
            None => self.run.model.outline(variant.selection),
        }
    }

    /// Returns the number of prompts of a step that this process computes.
    fn prompts_here(&self, plan: &RunPlan) -> usize {
        plan.prompts_per_step.div_ceil(self.run.algorithm.split.ranks.size())
    }

    /// Returns the plan of the main memory of a run on a card, from the plan of the card's memory.
    fn plan_beside_card<'v>(&self, variant: &Variant<'v>, plan: MemoryPlan<'v>) -> MemoryPlan<'v> {
        // A reference on the card has a copy in main memory, as all weights have.
        let reference = match self.run.reference_device {
            Device::Cpu => self.reference(variant, Device::Cpu),
            _ => plan.reference,
        };
        MemoryPlan { of: MemoryOf::BesideCard, reference, ..plan }
    }

    /// Returns how a reference on a device stores the weights that it does not share with the policy.
    fn reference(&self, variant: &Variant<'_>, device: Device) -> ReferenceKept {
        let needed =
            variant.plan.objective == Objective::Reinforce && variant.algorithm.loss.needs_reference();
        // True if the weights at the start of the run are those in the checkpoint's files.
        let of_files = |plan: &ModelPlan| plan.random.is_none() && plan.adapter.is_none();
        let published = match (variant.model, &self.run.model) {
            (Some(plan), _) => of_files(plan),
            (None, Policy::Planned(plan)) => of_files(plan),
            (None, Policy::Loaded(model)) => model.adapter_params().is_empty(),
        };
        if !needed {
            ReferenceKept::No
        } else if self.run.teaches_itself() {
            ReferenceKept::Policy
        } else if device != self.run.reference_device {
            ReferenceKept::No
        } else if self.reference.is_some() {
            ReferenceKept::Own
        } else if published && variant.plan.lends_reference(device) {
            ReferenceKept::InPlace
        } else {
            ReferenceKept::Copied
        }
    }

    /// Returns the memory plan of a step with the rows from index `first`.
    fn memory_plan<'v>(&self, variant: &Variant<'v>, longest: &Longest, first: usize) -> MemoryPlan<'v> {
        let (objective, device) = (variant.plan.objective, self.run.model.device());
        let prompts = self.prompts_here(variant.plan);
        let rows = match objective {
            Objective::Imitate => prompts,
            Objective::Reinforce => prompts * variant.plan.steps_per_generation,
        };
        let evaluation = self.run.eval.as_ref().map(|plan| {
            let rows = plan.rows.len().min(plan.options.batch_rows);
            let prompts: Vec<_> = longest.prompts().map(|p| Arc::new(p.clone())).collect();
            (prompts.into_iter().cycle().take(rows).collect(), plan.options.num_generations)
        });
        MemoryPlan {
            algorithm: variant.algorithm,
            optimizer: variant.optimizer,
            work: longest.work(first, rows, objective),
            answer: longest.answer(),
            prompts_per_step: prompts,
            evaluation,
            reference: self.reference(variant, device),
            own_reference: self.reference.clone().filter(|_| objective == Objective::Reinforce),
            of: if device == Device::Cpu { MemoryOf::Host } else { MemoryOf::Card },
        }
    }

    /// Returns an upper bound of the bytes of all decoded media of a run: the sum found by the check, times the number of
    /// versions that may be stored.
    fn media_bytes(&self, plan: &RunPlan) -> u64 {
        let rows = self.run.rows.len() as u64;
        let by_epochs = (rows as f64 * plan.num_epochs).ceil() as u64;
        let draws =
            plan.max_steps.map_or(by_epochs, |steps| steps.saturating_mul(plan.prompts_per_step as u64));
        let orders = 1 + u64::from(self.run.shuffled.is_some());
        let kept = kept_rows([rows, draws], self.longest.versions(), orders);
        let [trained, held_out] =
            self.row_media_bytes.map(|mean| mean.unwrap_or(self.longest.media_bytes() as f64));
        let evaluated = self.run.eval.as_ref().map_or(0, |plan| plan.rows.len());
        (kept as f64 * trained + evaluated as f64 * held_out) as u64
    }

    /// Checks that the run fits into memory on all ranks, and that they have the same rows, files, plan and division of a step.
    fn check_ranks(&self) -> Result<()> {
        let ranks = &self.run.algorithm.split.ranks;
        let hopeless = self.forecast.refusal().filter(|_| self.forecast.is_hopeless());
        let fits = hopeless.map_or(Ok(()), |refusal| Err(refusal.into()));
        if ranks.size() == 1 {
            return fits;
        }
        let what = "their inputs";
        let mut own = Map::new();
        let described = fits.and_then(|()| self.described()).inspect(|described| own.clone_from(described));
        let Some(first) = alike::differing(ranks, what, described)? else { return Ok(()) };
        // All ranks know that one differs. Its parts say where.
        let whole =
            |name: &str| ["dataset", "files of ", "weights of "].iter().any(|own| name.starts_with(own));
        let parts = inputs::in_parts(&self.run.model, self.run.reference_model.as_ref(), &self.run.dataset);
        let own = own.into_iter().filter(|(name, _)| !whole(name));
        alike::check(ranks, what, parts.map(|parts| own.chain(parts).collect()))?;
        Err(first.into())
    }

    /// Returns what must be the same on all ranks, by name, with digests of the contents.
    fn described(&self) -> Result<Map<String, Value>> {
        let Run { plan, algorithm: Divided { split, .. }, .. } = &self.run;
        let mut own = Map::new();
        let bad: Vec<u64> = self.bad_rows.iter().map(|(row, ..)| *row).collect();
        own.insert("training rows".into(), self.run.rows.len().into());
        own.insert("rows that cannot be used".into(), bad.into());
        if let Some(eval) = &self.run.eval {
            own.insert("evaluation rows".into(), eval.rows.len().into());
            own.insert("content of the evaluation rows".into(), eval.dataset.fingerprint()?.into());
            own.insert("media of the evaluation rows".into(), eval.dataset.media_digest().into());
        }
        let plan = [
            ("objective", json!(plan.objective)),
            ("prompts_per_step", json!(plan.prompts_per_step)),
            ("num_iterations", json!(plan.num_iterations)),
            ("steps_per_generation", json!(plan.steps_per_generation)),
            ("sync_reference", json!(plan.sync_reference)),
            ("lessons", json!(plan.rows.lessons)),
            ("schedule", json!(plan.schedule)),
            ("replay", json!(plan.rows.replay)),
            ("data_seed", json!(plan.rows.seed)),
            ("max_steps", json!(plan.max_steps)),
            ("num_train_epochs", json!(plan.num_epochs)),
            ("gradient_leaves", json!(split.num_leaves())),
            ("gradient_sum", json!(split.settings.sum)),
            ("shard", json!(split.settings.shard)),
            ("shard_min_elements", json!(split.settings.least_cut)),
            ("reduce_bucket_size", json!(split.settings.bucket)),
            ("save_strategy", json!(plan.save.when)),
        ];
        own.extend(plan.map(|(name, value)| (name.to_owned(), value)));
        own.extend(self.inputs.clone());
        let of_rewards = self.run.reward_weights.iter();
        own.extend(
            of_rewards.map(|(name, digest)| (format!("tensor {name}, a model of rewards"), shown(*digest))),
        );
        Ok(own)
    }

    /// Loads the model if it is not in memory, and trains. Returns the trained model with the summary of the run. Several ranks compare
    /// their inputs first, and their weights when these are loaded.
    ///
    /// # Errors
    /// Returns an error if the lasting part of the run's memory exceeds what is free, if a rank differs from the first one, and the errors of
    /// training ([`train`](crate::train())).
    pub fn train(self, output: Output, console: &Console, stop: &AtomicBool) -> Result<Trained> {
        self.check_ranks()?;
        let usable = self.usable_rows();
        let Self { run, bad_rows, longest, typical, forecast, .. } = self;
        // If kept, they would hold their decoded media during the complete run.
        drop((longest, typical));
        run.prompts.media_store().set_max_bytes(forecast.need.media_store);
        let (split, teaches_itself) = (&run.algorithm.split, run.teaches_itself());
        let model = match run.model {
            Policy::Loaded(model) => Ok(*model),
            Policy::Planned(plan) => plan.load_on(split, &run.selection),
        };
        let model = alike::same(&split.ranks, "their weights", model, |model| {
            let each = model.tensor_digests().into_iter();
            Ok(each.map(|(name, digest)| (name, shown(digest))).collect())
        })?;
        if let Some(context) = run.prompts.settings().privileged_context.as_ref().filter(|_| teaches_itself) {
            console.line(&format!(
                "teacher: the policy itself, which also reads the column `{}`",
                context.column
            ));
        }
        let reference_model = match run.reference_model.filter(|_| run.algorithm.loss.needs_reference()) {
            Some(own) => {
                let own = own.load_to_read()?;
                let role = if run.algorithm.loss.distillation > 0.0 { "teacher" } else { "reference" };
                console.line(&format!("{role} {} ({})", own.dir().display(), own.family().name()));
                Some(own)
            }
            None => None,
        };
        if let Some(name) = &run.plan.card.run_name {
            console.line(&format!("run {name}"));
        }
        console.line(&format!("model {} ({})", model.dir().display(), model.family().name()));
        console.line(&format!("training on {usable} of {} rows", run.dataset.len()));
        console.line(&step_takes(&run.plan, &run.algorithm));
        let mut plan = run.plan;
        plan.rows.bad = bad_rows;
        plan.records.files.extend(run.corpus.map(|corpus| (Corpus::FILE, corpus.kept())));
        let Output { lock, observer, trackers, signals, curves } = output;
        let setup = TrainSetup {
            model,
            prompts: run.prompts,
            shuffled: run.shuffled,
            dataset: run.dataset,
            rows: run.rows,
            eval: run.eval,
            rewards: run.rewards,
            interaction: run.interaction,
            algorithm: run.algorithm,
            optimizer: run.optimizer,
            selection: run.selection,
            reference_model,
            reference_device: run.reference_device,
            run: plan,
            lock,
            observer,
            trackers,
            signals,
            curves,
        };
        train(setup, console, stop)
    }
}

/// Returns a digest as the comparison of ranks expects it.
fn shown(digest: u64) -> Value {
    format!("{digest:032x}").into()
}

/// Returns a line about the work of a step.
fn step_takes(plan: &RunPlan, algorithm: &Divided) -> String {
    let many = |number: usize, one: &str| format!("{number} {one}{}", if number == 1 { "" } else { "s" });
    let (prompts, each, ranks) = (plan.prompts_per_step, algorithm.num_generations, &algorithm.split.ranks);
    let on = match ranks.size() {
        1 => String::new(),
        size => format!(", on {size} ranks ({})", ranks.engine()),
    };
    let at_once = match algorithm.max_live {
        MAX_LIVE => String::new(),
        live => format!(", up to {live} at once"),
    };
    match plan.objective {
        Objective::Imitate => format!("a step takes {}{on}", many(prompts, "answer")),
        Objective::Reinforce => format!(
            "a step takes {} of {}{on}: {} of at most {}{at_once}",
            many(prompts, "prompt"),
            many(each, "completion"),
            many(prompts * each, "answer"),
            many(algorithm.sampling.max_completion_length, "token"),
        ),
    }
}

/// Returns the maximum number of stored media, given the rows and the draws. A row with `meta.dynamic_sample` may be drawn with
/// another number of frames, out of `versions`, in each pass, and each of these in several orders.
fn kept_rows([rows, draws]: [u64; 2], versions: u64, orders: u64) -> u64 {
    let drawn = rows.min(draws);
    let each = versions.min(draws.div_ceil(drawn.max(1)));
    each.saturating_mul(orders).saturating_mul(drawn)
}

#[cfg(test)]
mod tests {
    use super::kept_rows;

    #[test]
    fn media_are_kept_for_what_is_drawn() {
        for (of, versions, orders, kept) in [
            ([10, 4], 1, 1, 4),
            ([10, 30], 1, 1, 10),
            // Three passes use three of five numbers of frames, or both of two.
            ([10, 30], 5, 1, 30),
            ([10, 30], 2, 1, 20),
            ([10, 30], 2, 2, 40),
            ([10, u64::MAX], 7, 1, 70),
            ([0, 0], 3, 2, 0),
        ] {
            assert_eq!(kept_rows(of, versions, orders), kept, "{of:?}, {versions}, {orders}");
        }
    }
}
