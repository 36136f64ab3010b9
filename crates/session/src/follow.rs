//! The page of a run and its trackers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::Result;
use omnigrpo_guard::{inside, told};
use omnigrpo_observe::{AskedBy, Event, Tracker, Trackers};
use omnigrpo_settings::environment::{passwords, secrets};
use omnigrpo_settings::values::Resolved;
use omnigrpo_settings::{Network, Problem, Settings, names};
use omnigrpo_watch::{
    Action, Controls, Error, Package, PackageRun, Packaged, Place, Prometheus, Server, TensorBoard,
};

use crate::Session;
use crate::setup::token;

/// Largest file of passwords that is read.
const MAX_NETRC_BYTES: u64 = 64 << 10;

/// Starts the trackers of a run. Leaves out a tracker that cannot start, with a warning.
pub(crate) fn trackers(
    resolved: &Resolved,
    directory: &Path,
    session: &Session,
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
    let netrc = settings.env.netrc.as_ref().and_then(|file| inside::read_named(file, MAX_NETRC_BYTES).ok());
    let run = PackageRun {
        python: settings.rewards.options.external.python.clone(),
        directory: directory.to_owned(),
        name: given,
        settings: resolved.values.plain().map(|(flag, value)| (flag.name.to_owned(), value)).collect(),
        secrets: secrets(
            std::env::vars_os(),
            token(&settings.env.hub).into_iter().chain(netrc.iter().flat_map(|text| passwords(text))),
        ),
    };
    let console = session.console.clone();
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
pub(crate) fn beside(settings: &Settings, directory: &Path, session: &Session) -> Result<Option<Server>> {
    if !settings.log.dashboard {
        return Ok(None);
    }
    let directory = std::fs::canonicalize(directory)?;
    let (console, stop) = (session.console.clone(), Arc::clone(&session.stop));
    let save = Arc::clone(&session.functions.signals.save);
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
    let controls = Controls { act: Box::new(act), activity: session.console.activity().clone() };
    let place = place(settings, settings.log.dashboard_port);
    let server = Server::start_live(directory, &place, Some(controls)).map_err(problem)?;
    // The address contains a token, and other users may read the log.
    let file = server.address_file().unwrap_or(Path::new("")).display().to_string();
    session.console.log(&format!("the address of the run's page is in {file}"));
    match is_read_by_others(std::io::stderr()) {
        true => session.console.unlogged(&format!("the address of the run's page is in {file}")),
        false => session.console.unlogged(&format!("the run as a page: {}", server.url())),
    }
    Ok(Some(server))
}

/// Returns the place of a server with this port, as the settings give it.
pub fn place(settings: &Settings, port: u16) -> Place {
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

/// Returns the message about a run that cannot be shown.
pub fn problem(error: Error) -> anyhow::Error {
    match &error {
        Error::NoRun { .. } | Error::Missing(_) => Problem::failure("no run to show was found")
            .got(told(&error))
            .expected("the `--output_dir` of a run")
            .into(),
        _ => error.into(),
    }
}
