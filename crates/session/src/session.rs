//! A command has resources besides its settings; this module opens them and prepares its process.

use std::cell::{OnceCell, RefCell};
use std::error::Error as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context as _, Result};
use omnigrpo_models::{Checkpoint, FrozenWeights, Orientation, PromptBuilder};
use omnigrpo_observe::Console;
use omnigrpo_ops::Device;
use omnigrpo_ranks::Ranks;
use omnigrpo_rewards::{Corpus, RewardSet};
use omnigrpo_rollout::Interaction;
use omnigrpo_settings::values::Resolved;
use omnigrpo_settings::{Problem, Settings};
use omnigrpo_train::{Observer, room};

use crate::setup::{self, Functions};
use crate::{family, ranks};

/// Resources of a command: console, device, checkpoint, environment, ranks. Each is opened when it is first asked for.
pub struct Session {
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
    host: Host,
    /// Observer of a run.
    observer: RefCell<Box<dyn Observer>>,
    /// The environment, and the form in which it opens pictures.
    interaction: RefCell<Option<(Orientation, Interaction)>>,
    /// Settings that name the checkpoint.
    settings: Settings,
    checkpoint: OnceCell<Checkpoint>,
    device: Arc<OnceLock<Device>>,
}

/// Settings of a command that the command line and the process of another program choose differently.
#[derive(Clone, Copy, Default)]
pub struct Host {
    /// Prints a table or a report; `None` for the console.
    pub print: Option<fn(&str) -> Result<()>>,
    /// Called when everything is checked, before a run loads its weights.
    pub starts: Option<fn(&Session) -> Result<()>>,
}

impl Session {
    /// Creates the session of a command of one process.
    pub fn new(settings: &Settings, console: Console, stop: Arc<AtomicBool>, host: Host) -> Self {
        Self {
            console,
            stop,
            ranks: Ranks::default(),
            local_ranks: 1,
            functions: Functions::default(),
            host,
            observer: RefCell::new(Box::new(())),
            interaction: RefCell::default(),
            settings: settings.clone(),
            checkpoint: OnceCell::new(),
            device: Arc::default(),
        }
    }

    /// Returns the session with several processes. A failure of their engine is reported by the next exchange.
    #[must_use]
    pub fn with_ranks(self, ranks: Ranks) -> Self {
        let local_ranks = ranks.local().map_or(1, |local| local.size);
        Self { ranks, local_ranks, ..self }
    }

    /// Returns the session with functions and the observer of a run.
    #[must_use]
    pub fn with_functions(self, functions: Functions, observer: Box<dyn Observer>) -> Self {
        Self { functions, observer: RefCell::new(observer), ..self }
    }

    /// Returns the observer. A second call returns one that does nothing.
    pub fn observer(&self) -> Box<dyn Observer> {
        self.observer.replace(Box::new(()))
    }

    /// Prints a table or a report.
    ///
    /// # Errors
    /// Returns an error if the output cannot be written.
    pub fn print(&self, text: &str) -> Result<()> {
        match self.host.print {
            Some(print) => print(text),
            None => {
                text.lines().for_each(|line| self.console.line(line));
                Ok(())
            }
        }
    }

    /// Tells the host that everything is checked.
    pub(crate) fn starts(&self) -> Result<()> {
        self.host.starts.map_or(Ok(()), |starts| starts(self))
    }

    /// Returns the session of a command within this one, with its own settings and checkpoint, on the same device.
    #[must_use]
    pub fn with(&self, settings: &Settings) -> Self {
        let device = Arc::clone(&self.device);
        Self { device, ..Self::new(settings, self.console.clone(), Arc::clone(&self.stop), self.host) }
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

/// Returns the settings of one rank: of several on a machine, each has its own card.
pub fn of_rank(resolved: &Resolved, ranks: &Ranks) -> Result<Resolved> {
    let (mut resolved, local) = (resolved.clone(), ranks.local()?);
    if local.size > 1 {
        resolved.settings.model.device = setup::card_of(resolved.settings.model.device, local);
    }
    Ok(resolved)
}

/// Prepares the process for a command, and returns its settings without those that have no effect on its model.
pub fn ready(resolved: &Resolved, session: &Session) -> Result<Resolved> {
    let ranks = &session.ranks;
    // All ranks exchange their cores, also those with a number of threads of their own.
    let share =
        if ranks.size() > 1 { Some(ranks::threads(ranks, ranks.local()?, &session.console)?) } else { None };
    ranks::together(ranks, prepare_process(resolved, session, resolved.settings.threads.or(share)))
}

/// Prepares the process of a rank with this number of threads.
fn prepare_process(resolved: &Resolved, session: &Session, threads: Option<usize>) -> Result<Resolved> {
    // This must precede the start of threads, because instructions are tried in a child process.
    let doubts = omnigrpo_kernels::probe::doubts();
    setup::arithmetic(&resolved.settings).check().map_err(|error| {
        Problem::failure(error.to_string())
            .help("`doctor` shows the ways that work; `--bf16_products auto` takes one of them")
    })?;
    // The pool is built here because at its first use a thread that cannot be started would cause a panic. 0 means one thread per
    // core.
    // A caller may run several commands, which share it, or may have used it before.
    static STARTED: AtomicBool = AtomicBool::new(false);
    let is_there = STARTED.swap(true, Ordering::SeqCst) || {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0)).build_global();
        // Only an error of the system has a source.
        let is_there = pool.as_ref().is_err_and(|error| error.source().is_none());
        if !is_there {
            pool.context("the threads of the pool could not be started")?;
        }
        is_there
    };
    if is_there && let Some(threads) = threads.filter(|threads| *threads != rayon::current_num_threads()) {
        let started = rayon::current_num_threads();
        return Err(Problem::usage("the number of threads cannot change within a process")
            .got(format!("`threads` {threads}, and {started} threads that this process has"))
            .expected("the same number in every command of the process")
            .into());
    }
    let mut resolved = family::without_idle(resolved, session)?;
    resolved.notes.extend(doubts);
    let patience = resolved.settings.ranks.patience_secs;
    if session.ranks.size() > 1 && patience > 60 {
        resolved.notes.push(format!(
            "`ddp_timeout`: a process that hangs is noticed only after {patience} s; a long step needs no more than the default"
        ));
    }
    session.interaction(&resolved.settings)?;
    Ok(resolved)
}
