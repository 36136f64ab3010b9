//! Commands in the process of another program, such as an interpreter of Python.

use std::ffi::OsString;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use anyhow::{Context as _, Result};
use omnigrpo_data::{RowReader, Sample};
use omnigrpo_models::{Model, Prompt, PromptBuilder, PromptSettings};
use omnigrpo_observe::Console;
use omnigrpo_ranks::Ranks;
use omnigrpo_rewards::Reward;
use omnigrpo_rollout::{Completion, GenerateOptions, Generator, Request};
use omnigrpo_train::{Algorithm, Evaluation, Objective, Observer, RunSummary, Trained, logprobs};
use serde_json::Value;

use omnigrpo_settings::explain::yaml;
use omnigrpo_settings::{
    Environment, Flag, Layer, Problem, Resolved, Section, Settings, Values, Verb, name_flags, needs, resolve,
};

use crate::evaluation::evaluation;
use crate::heap::Trim;
use crate::logging::{quiet_guarded_panics, warnings};
use crate::ranks::{self, Rank, Started};
use crate::session::{Host, Session, of_rank, ready};
use crate::setup::{self, Functions};
use crate::training::{once, planned};

/// The program in whose process a command runs.
pub struct Caller {
    /// Console for the lines of the command; silent by default.
    pub console: Console,
    /// Flag that, once set, ends a run after its step, with a checkpoint.
    pub stop: Arc<AtomicBool>,
    /// Observer of a run.
    pub observer: Box<dyn Observer>,
    /// Rewards and environment of the settings' `caller:NAME`, and what other threads ask of a run.
    pub functions: Functions,
}

impl Caller {
    /// Creates a silent caller. `rewards` returns the reward for `NAME` if the settings have the reward `caller:NAME`.
    pub fn new(rewards: impl Fn(&str) -> Option<Box<dyn Reward>> + Send + Sync + 'static) -> Self {
        Self {
            functions: Functions { rewards: Some(Arc::new(rewards)), ..Functions::default() },
            ..Self::default()
        }
    }
}

impl Default for Caller {
    /// Creates a silent caller that hands nothing in.
    fn default() -> Self {
        let console = Console::plain(std::io::sink());
        Self { console, stop: Arc::default(), observer: Box::new(()), functions: Functions::default() }
    }
}

/// Reads names and values of settings, which are given as a JSON object.
///
/// # Errors
/// Returns all unknown names and wrong values together.
pub fn read(verb: Verb, settings: Value) -> Result<Layer, Problem> {
    let Value::Object(settings) = settings else {
        return Err(Problem::usage("settings are no object").got(settings.to_string()));
    };
    let mut layer = Layer::of(verb, settings);
    Problem::all(std::mem::take(&mut layer.problems)).map(|()| layer)
}

/// Resolves settings in this process's environment. Some may still be missing, such as rows.
///
/// # Errors
/// Returns all mistakes together.
pub fn checked(verb: Verb, settings: Value) -> Result<Resolved, Problem> {
    resolve(verb, read(verb, settings)?, Environment::read(|name| std::env::var(name).ok()))
}

/// Resolves settings like [`checked`], and checks that none is missing.
///
/// # Errors
/// Returns all mistakes together.
pub fn given(verb: Verb, settings: Value) -> Result<Resolved, Problem> {
    let resolved = checked(verb, settings)?;
    Problem::all(needs(verb, &resolved.settings))?;
    Ok(resolved)
}

/// This process as a rank, from [`connect`] to [`leave`]. MPI connects a process only once.
static RANK: Mutex<Option<Rank>> = Mutex::new(None);

fn own_rank() -> MutexGuard<'static, Option<Rank>> {
    RANK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects this process with the other ranks, and returns its number among them. The later runs of this process are divided among
/// them, until [`leave`].
///
/// For `nproc_per_node`, and under `torchrun`, the command `again` is run as ranks. The error is then the code with which they have
/// ended, and this process has to end with it. `again` is empty if this program cannot be run again.
///
/// # Errors
/// Returns an error if the ranks cannot be started or connected.
pub fn connect(resolved: &Resolved, again: &[OsString]) -> Result<Result<usize, u8>, Problem> {
    let mut own = own_rank();
    if own.is_none() {
        match ranks::start(resolved, again).map_err(|error| Problem::from_error(error.as_ref()))? {
            Started::Ended(code) => return Ok(Err(code)),
            Started::Rank(rank) if rank.ranks.size() == 1 => return Ok(Ok(0)),
            Started::Rank(rank) => *own = Some(rank),
        }
    }
    Ok(Ok(own.as_ref().map_or(0, |rank| rank.ranks.rank())))
}

/// Leaves the other ranks. A rank has to call it before its process ends.
pub fn leave() {
    let own = own_rank().take();
    if let Some(rank) = own {
        rank.end(None);
    }
}

/// Trains by reinforcement ([`Verb::Train`]) or by imitation ([`Verb::Sft`]), and returns the trained model.
///
/// # Errors
/// Returns the failure of the run. A run that was asked to stop is not a failure; its summary says so. After a failure, the process
/// is no rank any more.
pub fn train(resolved: Resolved, caller: Caller) -> Result<(RunSummary, Loaded), Problem> {
    let objective = objective_of(resolved.verb);
    let ranks = own_rank().as_ref().map_or_else(Ranks::default, |rank| rank.ranks.clone());
    let done = run_as(ranks, resolved, caller, |resolved, session| {
        let Trained { model, summary } = once(resolved, session, objective, |_| Ok(()))?;
        Ok((summary, Loaded::of(model, resolved)))
    });
    if let Err(problem) = &done {
        let own = own_rank().take();
        if let Some(rank) = own {
            rank.end(Some(problem));
        }
    }
    done
}

/// Evaluates a model on the rows of the settings.
///
/// # Errors
/// Returns an error if the model or the rows cannot be used.
pub fn evaluate(resolved: Resolved, caller: Caller) -> Result<Evaluation, Problem> {
    run(resolved, caller, evaluation)
}

/// Predicts the memory and the time of a run ([`Verb::Plan`] or [`Verb::Sft`]). The result is what `plan --json` writes.
///
/// # Errors
/// Returns an error if the run cannot work.
pub fn plan(mut resolved: Resolved, caller: Caller) -> Result<Value, Problem> {
    resolved.settings.io.dry_run = true;
    run(resolved, caller, |resolved, session| {
        let objective = objective_of(resolved.verb);
        let planned = planned(resolved, session, objective)?;
        planned.tables.lines().for_each(|line| session.console.line(line));
        planned.problem.map_or(Ok(planned.numbers), |problem| Err(problem.into()))
    })
}

fn objective_of(verb: Verb) -> Objective {
    if verb == Verb::Sft { Objective::Imitate } else { Objective::Reinforce }
}

/// A model in memory, for questions and scores.
pub struct Loaded {
    model: Model,
    /// Settings of the command that loaded the model.
    loaded_with: Values,
    /// The latest builder of prompts and its settings, since reading a tokenizer takes long.
    prompts: Mutex<Option<(PromptSettings, Arc<PromptBuilder>)>>,
    _trim: Trim,
}

impl Loaded {
    fn of(model: Model, resolved: &Resolved) -> Self {
        Self { model, loaded_with: resolved.values.clone(), prompts: Mutex::default(), _trim: Trim }
    }

    /// Refuses settings of a call that act only while a model is loaded, unless the model was loaded with them.
    fn check(&self, resolved: &Resolved) -> Result<(), Problem> {
        let acts_at_loading =
            |flag: &&Flag| flag.place.field.starts_with("model.") && flag.name != "model_name_or_path";
        for flag in Section::Model.rows().iter().filter(acts_at_loading) {
            let loaded = self.loaded_with.lookup(flag.name).map(|(value, _)| value);
            match resolved.values.lookup(flag.name) {
                Some((value, origin)) if origin.is_users() && loaded != Some(value) => {
                    return Err(Problem::usage(format!("`{}` acts when a model is loaded", flag.name))
                        .got(yaml(value))
                        .expected(loaded.map_or_else(|| "no value, as then".to_owned(), yaml))
                        .help("load the model again with this setting"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads the model of the settings.
    ///
    /// # Errors
    /// Returns an error if the checkpoint cannot be used or does not fit into memory.
    pub fn open(resolved: Resolved) -> Result<Self, Problem> {
        run(resolved, Caller::default(), |resolved, session| {
            let settings = &resolved.settings;
            let checkpoint = setup::checkpoint(settings)?;
            Ok(Self::of(setup::model(settings, &checkpoint, session.device()?)?, resolved))
        })
    }

    /// Samples completions of rows, which are JSON objects as in a file of rows. Paths of media start from `folder`.
    ///
    /// # Errors
    /// Returns an error if a row cannot be read or its prompt is too long.
    pub fn generate(
        &self,
        resolved: Resolved,
        rows: Vec<Value>,
        folder: &Path,
    ) -> Result<Vec<Vec<Completion>>, Problem> {
        self.check(&resolved)?;
        run(resolved, Caller::default(), |resolved, session| {
            let settings = &resolved.settings;
            let builder = self.prompts(settings, session)?;
            let (samples, prompts) = built(settings, &builder, rows, folder)?;
            let features = prompts.iter().map(|prompt| self.model.encode_prompt(prompt));
            let features = features.collect::<Result<Vec<_>, _>>()?;
            let num_samples = settings.algorithm.num_generations;
            let numbered = samples.iter().zip(&prompts).zip(&features).zip(0..);
            let requests = numbered.map(|(((sample, prompt), features), row)| Request {
                num_samples,
                row,
                sample: Some(sample),
                ..Request::new(prompt, features)
            });
            let Algorithm { sampling, max_live, .. } = &settings.algorithm;
            let interaction = session.interaction(settings)?;
            let generator = Generator::new(&self.model, &builder, sampling)
                .with_max_live(*max_live)
                .with_interaction(interaction.as_ref());
            let generated = generator.generate(requests, GenerateOptions::default())?;
            Ok(generated.into_iter().map(|of| of.completions).collect())
        })
    }

    /// Returns the log-probabilities, in nats, of the tokens of given completions of one row.
    ///
    /// # Errors
    /// Returns an error if the row cannot be read, or if it is too long with a completion.
    pub fn score(
        &self,
        resolved: Resolved,
        row: Value,
        completions: &[String],
        folder: &Path,
    ) -> Result<Vec<Vec<f32>>, Problem> {
        self.check(&resolved)?;
        run(resolved, Caller::default(), |resolved, session| {
            let mut settings = resolved.settings.clone();
            // Given completions have their own lengths.
            settings.prompts.max_completion_length = 0;
            let builder = self.prompts(&settings, session)?;
            let (_, prompts) = built(&settings, &builder, vec![row], folder)?;
            let ids = completions.iter().map(|text| builder.completion_ids(text));
            let ids = ids.collect::<Result<Vec<_>, _>>()?;
            let temperature = settings.algorithm.sampling.scoring_temperature();
            Ok(logprobs(&self.model, &prompts[0], &ids, temperature, settings.algorithm.max_stream_tokens)?)
        })
    }

    /// Writes the model as a checkpoint in the layout of the Hugging Face hub.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be written.
    pub fn save(&self, directory: &Path) -> Result<(), Problem> {
        self.model.save_pretrained(directory).map_err(|error| Problem::from_error(&error))
    }

    fn prompts(&self, settings: &Settings, session: &Session) -> Result<Arc<PromptBuilder>> {
        let mut kept = self.prompts.lock().unwrap_or_else(PoisonError::into_inner);
        // An environment begins anew with each command.
        let alone = settings.turns.environment.is_none();
        if let Some((_, prompts)) = kept.as_ref().filter(|(known, _)| alone && *known == settings.prompts) {
            return Ok(Arc::clone(prompts));
        }
        let prompts = Arc::new(session.prompts(settings, self.model.checkpoint(), false)?);
        if alone {
            *kept = Some((settings.prompts.clone(), Arc::clone(&prompts)));
        }
        Ok(prompts)
    }
}

/// Reads rows and builds their prompts.
fn built(
    settings: &Settings,
    builder: &PromptBuilder,
    rows: Vec<Value>,
    folder: &Path,
) -> Result<(Vec<Sample>, Vec<Prompt>)> {
    let reader = RowReader::new("rows").media_in(folder).options(setup::read_options(settings));
    let each = |(number, row)| {
        let at = || format!("row {number}");
        let mut sample = reader.sample(row).with_context(at)?;
        builder.add_opening(&mut sample).map_err(anyhow::Error::from_boxed).with_context(at)?;
        let prompt = builder.build(&sample).with_context(at)?;
        Ok((sample, prompt))
    };
    rows.into_iter().enumerate().map(each).collect()
}

/// Runs a command in this process alone.
fn run<T>(
    resolved: Resolved,
    caller: Caller,
    command: impl FnOnce(&Resolved, &Session) -> Result<T>,
) -> Result<T, Problem> {
    run_as(Ranks::default(), resolved, caller, command)
}

/// Prepares the process at the first call, and runs a command.
fn run_as<T>(
    ranks: Ranks,
    resolved: Resolved,
    Caller { console, stop, observer, functions }: Caller,
    command: impl FnOnce(&Resolved, &Session) -> Result<T>,
) -> Result<T, Problem> {
    static HOOK: Once = Once::new();
    not_forked()?;
    HOOK.call_once(quiet_guarded_panics);
    name_flags();
    let warnings = warnings(&console);
    let work = || {
        ranks::check_settings(&resolved, &ranks)?;
        let resolved = of_rank(&resolved, &ranks)?;
        let session = Session::new(&resolved.settings, console, stop, Host::default())
            .with_ranks(ranks)
            .with_functions(functions, observer);
        let resolved = ready(&resolved, &session)?;
        command(&resolved, &session)
    };
    tracing::subscriber::with_default(warnings, work).map_err(|error| Problem::from_error(error.as_ref()))
}

/// Returns an error in a process that was forked from one that had started the threads. They do not exist here, so that a command
/// would wait for them for ever.
fn not_forked() -> Result<(), Problem> {
    static PROCESS: AtomicU32 = AtomicU32::new(0);
    let own = std::process::id();
    match PROCESS.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst) {
        Err(first) if first != own => {
            Err(Problem::failure("this process is a fork of one that uses omnigrpo")
                .got(format!("process {own}, forked from process {first}, whose threads do not exist here"))
                .expected("a process of its own")
                .help("in Python, use `multiprocessing.get_context(\"spawn\")`"))
        }
        _ => Ok(()),
    }
}
