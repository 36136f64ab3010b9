//! The commands. Each converts settings to plans of the libraries and calls one function there.

mod bench;
mod data;
pub mod demo;
mod doctor;
mod export;
mod infer;
mod init;
mod rates;
mod rewards;
mod serve;
mod shell;
mod summary;
mod train;
mod translate;
mod watch;

use std::io::IsTerminal as _;

use anyhow::{Context as _, Result};
use omnigrpo_observe::{Console, escape, stdout_columns, wrap};
use omnigrpo_ranks::Ranks;
use omnigrpo_session::{Host, Session, of_rank, ready};

use crate::settings::flags::Verb;
use crate::settings::values::Resolved;

/// Runs a command.
///
/// # Errors
/// Returns the failure of the command.
pub fn run(resolved: &Resolved, console: &Console, ranks: Ranks) -> Result<()> {
    omnigrpo_session::ranks::check_settings(resolved, &ranks)?;
    let resolved = of_rank(resolved, &ranks)?;
    let host = Host { print: Some(print), starts: Some(train::install_signals) };
    let session =
        Session::new(&resolved.settings, console.clone(), Default::default(), host).with_ranks(ranks);
    let resolved = &ready(&resolved, &session)?;
    for note in &resolved.notes {
        session.console.line(note);
    }
    match resolved.verb {
        Verb::Train | Verb::Plan => train::train(resolved, &session),
        Verb::Init => init::init(resolved, &session),
        Verb::Sft => train::sft(resolved, &session),
        Verb::Generate => infer::generate(resolved, &session),
        Verb::Score => infer::score(&resolved.settings, &session),
        Verb::Eval => infer::eval(resolved, &session),
        Verb::DataCheck => data::check(resolved, &session),
        Verb::DataShow => data::show(&resolved.settings, &session),
        Verb::DataConvert => data::convert(&resolved.settings, &session),
        Verb::RewardsList => rewards::list(),
        Verb::RewardsRun => rewards::run(&resolved.settings, &session),
        Verb::RewardsTry => rewards::try_out(&resolved.settings, &session),
        Verb::Convert => export::convert(&resolved.settings, &session),
        Verb::Export => export::export(&resolved.settings, &session),
        Verb::Push => omnigrpo_session::push::push(&resolved.settings, &session),
        Verb::Doctor => doctor::doctor(&resolved.settings, &session),
        Verb::Demo => demo::demo(resolved, &session),
        Verb::Bench => bench::bench(&resolved.settings, &session),
        Verb::Serve => serve::serve(&resolved.settings, &session),
        Verb::Watch => watch::watch(&resolved.settings, &session),
        Verb::Diagnose => watch::diagnose(&resolved.settings),
        Verb::Report => watch::report(&resolved.settings, &session),
        Verb::Translate => translate::run(&resolved.settings, &session),
        Verb::Schema => print_data(&format!("{:#}\n", crate::settings::schema())),
        Verb::Completions => shell::completions(&resolved.settings),
        Verb::Man => shell::man(&resolved.settings),
    }
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
