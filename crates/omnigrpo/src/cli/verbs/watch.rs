//! `watch`, `report` and `diagnose`.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use omnigrpo_session::files;
use omnigrpo_session::follow::{place, problem};
use omnigrpo_watch::{Board, Server};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::emulate_default_handler;

use super::{print, print_data};
use crate::settings::Settings;
use omnigrpo_session::Session;

/// Serves runs until the program is stopped.
pub fn watch(settings: &Settings, session: &Session) -> Result<()> {
    let directories: Vec<PathBuf> = settings.io.run_dirs.iter().map(PathBuf::from).collect();
    if settings.log.tui {
        return terminal(&directories);
    }
    let place = place(settings, settings.log.dashboard_port);
    let server = Server::start(&directories, &place).map_err(problem)?;
    print(&format!("{}\n", server.url()))?;
    if server.runs_left_out() > 0 {
        session.console.line(&format!(
            "the page shows the newest {} runs of a directory and leaves out {}; name directories to show others",
            Server::MOST_RUNS,
            server.runs_left_out(),
        ));
    }
    let whom = if place.is_local() { "only on this machine" } else { "for anyone who knows its address" };
    session.console.line(&format!("the page opens {whom}; press Ctrl-C to stop"));
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
pub fn report(settings: &Settings, session: &Session) -> Result<()> {
    let written = |directory: &String| omnigrpo_watch::report(Path::new(directory)).map_err(problem);
    let reports = settings.io.run_dirs.iter().map(written).collect::<Result<Vec<_>>>()?;
    for report in reports.into_iter().flatten() {
        print(&format!("{}\n", report.path.display()))?;
        let folders: Vec<_> =
            report.media_folders.iter().map(|folder| folder.display().to_string()).collect();
        if !folders.is_empty() {
            session.console.line(&format!(
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
        false => files::write_lines(path, [told]),
    }
}
