//! The commands. Each converts settings to plans of the libraries and calls one function there.

mod bench;
mod data;
pub mod demo;
mod doctor;
mod export;
mod family;
pub(super) mod infer;
mod init;
mod notify;
mod options;
mod plan;
mod profile;
mod push;
mod rates;
mod resume;
mod rewards;
mod serve;
pub(super) mod setup;
mod shell;
mod summary;
pub(super) mod train;
mod translate;
mod watch;

use std::cell::{OnceCell, RefCell};
use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context as _, Result};
use omnigrpo_models::{Checkpoint, FrozenWeights, Orientation, PromptBuilder};
use omnigrpo_observe::{Console, escape, stdout_columns, wrap};
use omnigrpo_ops::Device;
use omnigrpo_ranks::Ranks;
use omnigrpo_rewards::{Corpus, RewardSet};
use omnigrpo_rollout::Interaction;
use omnigrpo_train::{Observer, room};

use setup::Functions;

use crate::settings::Settings;
use crate::settings::flags::Verb;
use crate::settings::problem::Problem;
use crate::settings::values::Resolved;

/// Context of a command besides its settings.
pub struct Context {
    /// Console for progress and messages.
    pub console: Console,
    /// Flag that is set when the user or the system requests the program to stop.
    pub stop: Arc<AtomicBool>,
    /// Processes of the run.
    pub ranks: Ranks,
    /// Number of these processes on this machine.
    pub local_ranks: usize,
    /// Functions and signals of the program in whose process the command runs.
    pub functions: Functions,
    /// Observer of that program; `None` in a process of its own.
    caller: Option<RefCell<Box<dyn Observer>>>,
    /// The environment, and the form in which it opens pictures.
    interaction: RefCell<Option<(Orientation, Interaction)>>,
    /// Settings that name the checkpoint.
    settings: Settings,
    checkpoint: OnceCell<Checkpoint>,
    device: Arc<OnceLock<Device>>,
}

impl Context {
    fn new(settings: &Settings, console: Console, stop: Arc<AtomicBool>) -> Self {
        let (checkpoint, device) = (OnceCell::new(), Arc::default());
        let ranks = Ranks::default();
        Self {
            console,
            stop,
            ranks,
            local_ranks: 1,
            functions: Functions::default(),
            caller: None,
            interaction: RefCell::default(),
            settings: settings.clone(),
            checkpoint,
            device,
        }
    }

    /// Returns the context of a command in the process of another program.
    pub fn within(
        settings: &Settings,
        ranks: Ranks,
        console: Console,
        stop: Arc<AtomicBool>,
        observer: Box<dyn Observer>,
        functions: Functions,
    ) -> Self {
        // A failure of the engine is reported by the next exchange.
        let local_ranks = ranks.local().map_or(1, |local| local.size);
        let caller = Some(RefCell::new(observer));
        Self { ranks, local_ranks, caller, functions, ..Self::new(settings, console, stop) }
    }

    /// Returns true if the command runs in the process of another program, which handles signals and shows what is printed.
    pub fn is_called(&self) -> bool {
        self.caller.is_some()
    }

    /// Returns the caller's observer. A second call returns one that does nothing.
    pub fn observer(&self) -> Box<dyn Observer> {
        self.caller
            .as_ref()
            .map_or_else(|| Box::new(()) as Box<dyn Observer>, |own| own.replace(Box::new(())))
    }

    /// Prints a table or a report: to standard output, or to the console of the caller.
    pub fn print(&self, text: &str) -> Result<()> {
        if self.is_called() {
            text.lines().for_each(|line| self.console.line(line));
            return Ok(());
        }
        print(text)
    }

    /// Returns the context of a command within this one, with its own settings and checkpoint, on the same device.
    fn with(&self, settings: &Settings) -> Self {
        let device = Arc::clone(&self.device);
        Self { device, ..Self::new(settings, self.console.clone(), Arc::clone(&self.stop)) }
    }

    /// Returns the device of the model. The first call opens it and prints it.
    pub fn device(&self) -> Result<Device> {
        if let Some(opened) = self.device.get() {
            return Ok(*opened);
        }
        if let Some(bytes) = self.settings.model.gpu_memory {
            self.console.line(&format!("device: a GPU with {}, which is not opened", room::size(bytes)));
            // It has sizes but no numbers, which suffices for a plan.
            return Ok(*self.device.get_or_init(|| Device::Outline));
        }
        let (opened, why) = setup::open_device(self.settings.model.device, "--device", &self.settings)?;
        self.console.line(&format!("device: {opened}{}", in_brackets(&why)));
        Ok(*self.device.get_or_init(|| opened))
    }

    /// Returns the device of the reference.
    pub fn reference_device(&self) -> Result<Device> {
        let model = &self.settings.model;
        let device = self.device()?;
        let Some(choice) = model.reference_device.filter(|choice| *choice != model.device) else {
            return Ok(device);
        };
        if setup::is_at(device, choice) {
            return Ok(device);
        }
        let (opened, why) = setup::open_device(choice, "--reference_device", &self.settings)?;
        self.console.line(&format!("device of the reference: {opened}{}", in_brackets(&why)));
        Ok(opened)
    }

    /// Returns the environment of the settings, if they name one. The first call starts it, and so does a call with another orientation of
    /// pictures.
    pub fn interaction(&self, settings: &Settings) -> Result<Option<Interaction>> {
        let Some(name) = &settings.turns.environment else { return Ok(None) };
        let orientation = settings.prompts.media.orientation;
        let mut kept = self.interaction.borrow_mut();
        if let Some((_, interaction)) = kept.as_ref().filter(|(own, _)| *own == orientation) {
            return Ok(Some(interaction.clone()));
        }
        let environment = setup::environment(name, settings, &self.functions)?;
        Ok(Some(kept.insert((orientation, Interaction::new(environment))).1.clone()))
    }

    /// Returns the builder of prompts for a checkpoint. With `training`, the number of frames of a row may be random.
    pub fn prompts(
        &self,
        settings: &Settings,
        checkpoint: &Checkpoint,
        training: bool,
    ) -> Result<PromptBuilder> {
        setup::prompts(settings, checkpoint, (training, false), self.interaction(settings)?)
    }

    /// Builds the rewards. `prompts` tells `format` which tag the chat template opens.
    pub fn rewards(
        &self,
        settings: &Settings,
        corpus: Option<&Corpus>,
        prompts: Option<&PromptBuilder>,
    ) -> Result<RewardSet> {
        setup::rewards(settings, corpus, prompts, (&self.functions, FrozenWeights::default()))
    }

    /// Returns the checkpoint that the settings name. The first call opens it.
    pub fn checkpoint(&self) -> Result<&Checkpoint> {
        if let Some(opened) = self.checkpoint.get() {
            return Ok(opened);
        }
        let opened = setup::checkpoint(&self.settings)?;
        Ok(self.checkpoint.get_or_init(|| opened))
    }
}

fn in_brackets(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(" ({why})") }
}

/// Runs a command.
///
/// # Errors
/// Returns the failure of the command.
pub fn run(resolved: &Resolved, console: &Console, ranks: Ranks) -> Result<()> {
    super::ranks::check_settings(resolved, &ranks)?;
    let resolved = of_rank(resolved, &ranks)?;
    let local_ranks = ranks.local()?.size;
    let context = Context::new(&resolved.settings, console.clone(), Arc::default());
    let context = Context { ranks, local_ranks, ..context };
    let resolved = &ready(&resolved, &context)?;
    for note in &resolved.notes {
        context.console.line(note);
    }
    match resolved.verb {
        Verb::Train | Verb::Plan => train::train(resolved, &context),
        Verb::Init => init::init(resolved, &context),
        Verb::Sft => train::sft(resolved, &context),
        Verb::Generate => infer::generate(resolved, &context),
        Verb::Score => infer::score(&resolved.settings, &context),
        Verb::Eval => infer::eval(resolved, &context),
        Verb::DataCheck => data::check(resolved, &context),
        Verb::DataShow => data::show(&resolved.settings, &context),
        Verb::DataConvert => data::convert(&resolved.settings, &context),
        Verb::RewardsList => rewards::list(),
        Verb::RewardsRun => rewards::run(&resolved.settings, &context),
        Verb::RewardsTry => rewards::try_out(&resolved.settings, &context),
        Verb::Convert => export::convert(&resolved.settings, &context),
        Verb::Export => export::export(&resolved.settings, &context),
        Verb::Push => push::push(&resolved.settings, &context),
        Verb::Doctor => doctor::doctor(&resolved.settings, &context),
        Verb::Demo => demo::demo(resolved, &context),
        Verb::Bench => bench::bench(&resolved.settings, &context),
        Verb::Serve => serve::serve(&resolved.settings, &context),
        Verb::Watch => watch::watch(&resolved.settings, &context),
        Verb::Diagnose => watch::diagnose(&resolved.settings),
        Verb::Report => watch::report(&resolved.settings, &context),
        Verb::Translate => translate::run(&resolved.settings, &context),
        Verb::Schema => print_data(&format!("{:#}\n", crate::settings::schema())),
        Verb::Completions => shell::completions(&resolved.settings),
        Verb::Man => shell::man(&resolved.settings),
    }
}

/// Returns the settings of one rank: of several on a machine, each has its own card.
pub fn of_rank(resolved: &Resolved, ranks: &Ranks) -> Result<Resolved> {
    let (mut resolved, local) = (resolved.clone(), ranks.local()?);
    if local.size > 1 {
        resolved.settings.model.device = setup::card_of(resolved.settings.model.device, local);
    }
    Ok(resolved)
}

/// Prepares the process for a command, and returns its settings without those that have no effect on its model.
pub fn ready(resolved: &Resolved, context: &Context) -> Result<Resolved> {
    let ranks = &context.ranks;
    // All ranks exchange their cores, also those with a number of threads of their own.
    let share = if ranks.size() > 1 {
        Some(super::ranks::threads(ranks, ranks.local()?, &context.console)?)
    } else {
        None
    };
    super::ranks::together(ranks, prepare_process(resolved, context, resolved.settings.threads.or(share)))
}

/// Prepares the process of a rank with this number of threads.
fn prepare_process(resolved: &Resolved, context: &Context, threads: Option<usize>) -> Result<Resolved> {
    // This must precede the start of threads, because instructions are tried in a child process.
    let doubts = omnigrpo_kernels::probe::doubts();
    setup::arithmetic(&resolved.settings).check().map_err(|error| {
        Problem::failure(error.to_string())
            .help("`doctor` shows the ways that work; `--bf16_products auto` takes one of them")
    })?;
    // The pool is built here because at its first use a thread that cannot be started would cause a panic. 0 means one thread per
    // core.
    // A caller may run several commands, which share it.
    static STARTED: AtomicBool = AtomicBool::new(false);
    if !STARTED.swap(true, Ordering::SeqCst) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0)).build_global();
        pool.context("the threads of the pool could not be started")?;
    } else if let Some(threads) = threads.filter(|threads| *threads != rayon::current_num_threads()) {
        let started = rayon::current_num_threads();
        return Err(Problem::usage("the number of threads cannot change within a process")
            .got(format!("`threads` {threads}, and {started} threads that an earlier command started"))
            .expected("the same number in every command of the process")
            .into());
    }
    let mut resolved = family::without_idle(resolved, context)?;
    resolved.notes.extend(doubts);
    let patience = resolved.settings.ranks.patience_secs;
    if context.ranks.size() > 1 && patience > 60 {
        resolved.notes.push(format!(
            "`ddp_timeout`: a process that hangs is noticed only after {patience} s; a long step needs no more than the default"
        ));
    }
    context.interaction(&resolved.settings)?;
    Ok(resolved)
}

/// Writes a table or a report to standard output. Escapes control characters; on a terminal, breaks lines between words.
pub(crate) fn print(text: &str) -> Result<()> {
    let text = escape(text);
    match stdout_columns() {
        Some(columns) => {
            let end = if text.ends_with('\n') { "\n" } else { "" };
            print_raw(&format!("{}{end}", wrap(&text, columns).trim_end_matches('\n')))
        }
        None => print_raw(&text),
    }
}

/// Writes text of a model to standard output: unchanged to a pipe, escaped to a terminal.
pub(crate) fn print_data(text: &str) -> Result<()> {
    if std::io::stdout().is_terminal() { print_raw(&escape(text)) } else { print_raw(text) }
}

/// Writes to standard output; a closed pipe (`| head`) ends the program quietly.
fn print_raw(text: &str) -> Result<()> {
    use std::io::Write as _;
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => other.context("writing to standard output"),
    }
}
