//! `watch` and `report`, and the page and trackers of a run.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use omnigrpo_guard::told;
use omnigrpo_observe::{AskedBy, Event, Tracker, Trackers};
use omnigrpo_watch::{
    Action, Board, Controls, Error, Package, PackageRun, Packaged, Place, Prometheus, Server, TensorBoard,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::emulate_default_handler;

use super::{Context, print, print_data};
use crate::settings::problem::Problem;
use crate::settings::values::Resolved;
use crate::settings::{Network, Settings, names};

/// Serves runs until the program is stopped.
pub fn watch(settings: &Settings, context: &Context) -> Result<()> {
    let directories: Vec<PathBuf> = settings.io.run_dirs.iter().map(PathBuf::from).collect();
    if settings.log.tui {
        return terminal(&directories);
    }
    let place = place(settings, settings.log.dashboard_port);
    let server = Server::start(&directories, &place).map_err(problem)?;
    print(&format!("{}\n", server.url()))?;
    if server.runs_left_out() > 0 {
        context.console.line(&format!(
            "the page shows the newest {} runs of a directory and leaves out {}; name directories to show others",
            Server::MOST_RUNS,
            server.runs_left_out(),
        ));
    }
    let whom = if place.is_local() { "only on this machine" } else { "for anyone who knows its address" };
    context.console.line(&format!("the page opens {whom}; press Ctrl-C to stop"));
    loop {
        std::thread::park();
    }
}

/// Shows runs in the terminal until the user quits. In a pipe, prints a line per step until all runs have ended.
fn terminal(directories: &[PathBuf]) -> Result<()> {
    const EVERY: Duration = Duration::from_secs(1);
    if std::io::stdout().is_terminal() {
        let signal = Arc::new(AtomicUsize::new(0));
        for number in [SIGINT, SIGTERM, SIGHUP] {
            flag::register_usize(number, Arc::clone(&signal), number as usize)?;
        }
        let caught = || signal.load(Ordering::Relaxed);
        Board::show(directories, || caught() != 0).map_err(problem)?;
        // The terminal is restored, so the signal may now have its usual effect.
        return match caught() {
            0 => Ok(()),
            number => Ok(emulate_default_handler(number as i32)?),
        };
    }
    let mut board = Board::open(directories).map_err(problem)?;
    loop {
        board.look().map_err(problem)?.iter().try_for_each(|line| print(&format!("{line}\n")))?;
        if board.is_over() {
            return Ok(());
        }
        std::thread::sleep(EVERY);
    }
}

/// Writes each run as one file.
pub fn report(settings: &Settings, context: &Context) -> Result<()> {
    let written = |directory: &String| omnigrpo_watch::report(Path::new(directory)).map_err(problem);
    let reports = settings.io.run_dirs.iter().map(written).collect::<Result<Vec<_>>>()?;
    for report in reports.into_iter().flatten() {
        print(&format!("{}\n", report.path.display()))?;
        let folders: Vec<_> =
            report.media_folders.iter().map(|folder| folder.display().to_string()).collect();
        if !folders.is_empty() {
            context.console.line(&format!(
                "it contains pictures or sounds of {}: check them before you share it",
                folders.join(", ")
            ));
        }
    }
    Ok(())
}

/// Prints or writes the verdict on runs. Several runs give a list in JSON.
pub fn diagnose(settings: &Settings) -> Result<()> {
    let directories: Vec<PathBuf> = settings.io.run_dirs.iter().map(PathBuf::from).collect();
    let verdicts = omnigrpo_watch::verdicts(&directories).map_err(problem)?;
    let Some(path) = &settings.io.json else {
        let several = verdicts.len() > 1;
        let told =
            verdicts.iter().map(
                |(name, verdict)| {
                    if several { format!("{name}\n{verdict}\n") } else { verdict.to_string() }
                },
            );
        return print(&told.collect::<String>());
    };
    let told = match verdicts.as_slice() {
        [(_, one)] => serde_json::to_string_pretty(one)?,
        several => {
            let named =
                several.iter().map(|(name, verdict)| serde_json::json!({ "run": name, "verdict": verdict }));
            serde_json::to_string_pretty(&named.collect::<Vec<_>>())?
        }
    };
    match path == Path::new("-") {
        true => print_data(&format!("{told}\n")),
        false => super::infer::write_lines(path, [told]),
    }
}

/// Starts the trackers of a run. Leaves out a tracker that cannot start, with a warning.
pub fn trackers(
    resolved: &Resolved,
    directory: &Path,
    context: &Context,
) -> Box<dyn FnOnce() -> Trackers + Send> {
    use names::Tracker::{All, Prometheus as Scraped, Tensorboard, Trackio, Wandb};
    let settings = &resolved.settings;
    let chosen = settings.log.report_to.clone();
    let given = settings.run.card.run_name.clone();
    let own = || directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = given.clone().unwrap_or_else(own);
    let (place, may_send) = (place(settings, settings.log.prometheus_port), !settings.env.wandb_disabled);
    // Anyone who reaches this machine could read the numbers, so a client needs the key.
    let key = settings.env.api_key.clone().filter(|_| !place.is_local());
    let run = PackageRun {
        python: settings.rewards.options.external.python.clone(),
        directory: directory.to_owned(),
        name: given,
        settings: resolved.values.plain().map(|(flag, value)| (flag.name.to_owned(), value)).collect(),
        secret: settings.env.wandb_api_key.clone(),
    };
    let console = context.console.clone();
    Box::new(move || {
        let wanted = |one| chosen.contains(&one) || chosen.contains(&All);
        let mut all: Vec<Box<dyn Tracker>> = Vec::new();
        let mut add = |name: &str, made: Result<Box<dyn Tracker>, String>| match made {
            Ok(tracker) => all.push(tracker),
            Err(why) => console.warning(&format!("{name} gets no metrics: {why}")),
        };
        if wanted(Tensorboard) {
            let made = TensorBoard::begin(
                &run.directory.join(omnigrpo_observe::names::TENSORBOARD),
                &name,
                &run.settings,
            );
            add("tensorboard", made.map(|one| Box::new(one) as _));
        }
        if wanted(Scraped) {
            let made = Prometheus::start(&place, key, &name).inspect(|one| {
                console.notice(&format!("for Prometheus: http://{}/metrics", place.address(one.port())));
            });
            add("prometheus", made.map(|one| Box::new(one) as _));
        }
        let packages = [(Package::Wandb, wanted(Wandb) && may_send), (Package::Trackio, wanted(Trackio))];
        for (package, _) in packages.into_iter().filter(|(_, wanted)| *wanted) {
            add(package.name(), Packaged::start(package, run.clone()).map(|one| Box::new(one) as _));
        }
        Trackers::start(all, &console)
    })
}

/// Serves the page of a run that is about to begin, if the settings request it. Through the page, the run can be stopped as with
/// Ctrl-C, and asked for a checkpoint.
pub fn beside(settings: &Settings, directory: &Path, context: &Context) -> Result<Option<Server>> {
    if !settings.log.dashboard {
        return Ok(None);
    }
    let directory = std::fs::canonicalize(directory)?;
    let (console, stop) = (context.console.clone(), Arc::clone(&context.stop));
    let save = Arc::clone(&context.functions.signals.save);
    let act = move |action| {
        let Some(step) = console.activity().step() else {
            return "the run has not begun its first step: ask again then, or press Ctrl-C in its terminal"
                .to_owned();
        };
        match action {
            Action::Stop => {
                stop.store(true, Ordering::Relaxed);
                let event = Event::Stopping { asked_by: AskedBy::Page, within_step: true };
                console.event(None, &event);
                event.line(step)
            }
            Action::Save => {
                save.store(true, Ordering::Relaxed);
                let what = format!("saving a checkpoint after step {step}, as the page asked");
                console.line(&what);
                what
            }
        }
    };
    let controls = Controls { act: Box::new(act), activity: context.console.activity().clone() };
    let place = place(settings, settings.log.dashboard_port);
    let server = Server::start_live(directory, &place, Some(controls)).map_err(problem)?;
    // The address contains a token, and other users may read the log.
    let file = server.address_file().unwrap_or(Path::new("")).display().to_string();
    context.console.log(&format!("the address of the run's page is in {file}"));
    match is_read_by_others(std::io::stderr()) {
        true => context.console.unlogged(&format!("the address of the run's page is in {file}")),
        false => context.console.unlogged(&format!("the run as a page: {}", server.url())),
    }
    Ok(Some(server))
}

/// Returns the place of a server with this port, as the settings give it.
fn place(settings: &Settings, port: u16) -> Place {
    let Network { host, allowed_hosts } = settings.network.clone();
    Place { host, port, names: allowed_hosts }
}

/// Returns true if an output goes to a file that other accounts may read, such as the log of a batch system.
fn is_read_by_others(output: impl std::os::fd::AsFd) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let file = output.as_fd().try_clone_to_owned().map(std::fs::File::from);
    let about = file.and_then(|file| file.metadata());
    about.is_ok_and(|about| about.is_file() && about.mode() & 0o077 != 0)
}

fn problem(error: Error) -> anyhow::Error {
    match &error {
        Error::NoRun { .. } | Error::Missing(_) => Problem::failure("no run to show was found")
            .got(told(&error))
            .expected("the `--output_dir` of a run")
            .into(),
        _ => error.into(),
    }
}
