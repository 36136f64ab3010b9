//! `train` and `sft`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use omnigrpo_observe::{AskedBy, Event};
use omnigrpo_session::Session;
use omnigrpo_session::forecast::Planned;
use omnigrpo_session::ranks::is_ignored;
use omnigrpo_session::training::{once, planned};
use omnigrpo_train::{Objective, ResumeFrom, RunSummary};

use super::print;
use crate::settings::values::Resolved;
use crate::settings::{Problem, Settings};

/// Runs GRPO training.
pub fn train(resolved: &Resolved, session: &Session) -> Result<()> {
    start(resolved, session, Objective::Reinforce)
}

/// Runs supervised fine-tuning.
pub fn sft(resolved: &Resolved, session: &Session) -> Result<()> {
    start(resolved, session, Objective::Imitate)
}

fn start(resolved: &Resolved, session: &Session, objective: Objective) -> Result<()> {
    let settings = &resolved.settings;
    if settings.io.dry_run {
        return show(planned(resolved, session, objective)?, settings, session);
    }
    once(resolved, session, objective, |summary| finish(summary, resolved, session.ranks.is_first()))
        .map(drop)
}

/// Prints the plan of a run, and writes its numbers to the file of `--json`. Returns an error if the run does not fit into memory.
fn show(planned: Planned, settings: &Settings, session: &Session) -> Result<()> {
    if let Some(path) = &settings.io.json {
        let text = serde_json::to_string_pretty(&planned.numbers)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    session.print(&planned.tables)?;
    planned.problem.map_or(Ok(()), |problem| Err(problem.into()))
}

/// Prints the report and the verdict, on the first rank. A stopped run is an error with its own exit code.
pub fn finish(summary: &RunSummary, resolved: &Resolved, first: bool) -> Result<()> {
    if first {
        print(&format!("{}", summary.report))?;
        print(&verdict(Path::new(&summary.report.run_dir)))?;
    }
    if !summary.interrupted {
        return if first {
            print(&next_commands(Path::new(&summary.report.run_dir), &resolved.settings))
        } else {
            Ok(())
        };
    }
    let again = match resolved.settings.run.resume.from {
        ResumeFrom::Newest | ResumeFrom::Must => {
            "start it again to resume from the checkpoint that was just written"
        }
        _ => {
            "start it again with --resume_from_checkpoint auto to resume from the checkpoint that was just written"
        }
    };
    if let Some(collapse) = &summary.collapsed {
        return Err(Problem::failure("the run collapsed and was stopped")
            .got(collapse)
            .expected("a run that keeps learning")
            .help(
                "change that setting; then start from an earlier checkpoint with `--resume_from_checkpoint DIR \
                 --allow_changed_settings`, or from the beginning with `--resume_from_checkpoint never`; to continue \
                 with unchanged settings, repeat the command without --stop_on_collapse",
            )
            .into());
    }
    Err(match &summary.machine {
        Some(how) => Problem::stopped("the machine failed, so the run was stopped before its end")
            .got(how.as_str())
            .expected("a working machine: no row was skipped or lost because of the failure")
            .help(format!("fix the machine, then {again}")),
        None => Problem::stopped("the run was stopped before its end").help(again),
    }
    .into())
}

/// Returns the verdict on a run that has ended; nothing if its files cannot be read, or if it has no rewards.
fn verdict(directory: &Path) -> String {
    let verdict = omnigrpo_watch::verdict(directory).ok();
    let verdict = verdict.filter(|own| own.kind != omnigrpo_watch::Kind::TooEarly);
    verdict.map(|verdict| format!("\n{verdict}")).unwrap_or_default()
}

/// Returns the commands that show, ask and serve what a run has trained; empty if it wrote no model.
fn next_commands(dir: &Path, settings: &Settings) -> String {
    let word =
        |text: &str| shlex::try_quote(text).map_or_else(|_| "''".to_owned(), std::borrow::Cow::into_owned);
    let own = word(&dir.display().to_string());
    let is_adapter = dir.join("adapter_config.json").is_file();
    if !is_adapter && !dir.join("config.json").is_file() {
        return String::new();
    }
    let base = settings.model.name.as_deref().map(word).unwrap_or_default();
    let (model, served) = match is_adapter {
        true => {
            (format!("{base} --adapter_name_or_path {own}"), format!("{base} --adapter_name_or_path {own}"))
        }
        false => (own.clone(), own.clone()),
    };
    format!(
        "\nomnigrpo watch {own}\nomnigrpo generate --model_name_or_path {model} --prompt TEXT\nomnigrpo serve {served}\n"
    )
}

/// Installs signal handlers. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end the run after the current step, with a checkpoint. The
/// program confirms them immediately. A second signal of the first three kinds ends the process immediately, with the exit code
/// that shells use for that signal. SIGUSR1 is a scheduler's warning before SIGTERM, so it counts neither as the first nor as the
/// second signal.
pub fn install_signals(session: &Session) -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
    let unable = "signals cannot be handled";
    session.stop.store(false, Ordering::Relaxed);
    let told = Arc::new(AtomicBool::new(false));
    // A run under `nohup` survives its terminal.
    let handled: Vec<i32> =
        [SIGINT, SIGTERM, SIGUSR1, SIGHUP].into_iter().filter(|&s| s != SIGHUP || !is_ignored(s)).collect();
    for &signal in &handled {
        signal_hook::flag::register(signal, Arc::clone(&session.stop)).context(unable)?;
        if signal != SIGUSR1 {
            // Handlers run in the order of their registration, so this one acts only if an earlier signal has set the flag.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&told))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&told)))
                .context(unable)?;
        }
    }
    let mut signals = signal_hook::iterator::Signals::new(&handled).context(unable)?;
    let console = session.console.clone();
    // This thread runs until the process ends. Signals also work without it.
    let answer = move || {
        for signal in &mut signals {
            let asked_by = if signal == SIGUSR1 { AskedBy::Scheduler } else { AskedBy::Interrupt };
            let within_step = console.activity().step().is_some();
            console.event(None, &Event::Stopping { asked_by, within_step });
        }
    };
    let _ = std::thread::Builder::new().name("signals".to_owned()).spawn(answer);
    Ok(())
}
