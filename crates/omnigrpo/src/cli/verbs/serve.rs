//! `serve`: an endpoint for OpenAI's clients.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result};
use omnigrpo_data::{ColumnNames, ReadOptions};
use omnigrpo_serve::{Options, Place, Server};
use omnigrpo_train::room;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use super::print;
use crate::settings::Settings;
use omnigrpo_session::heap;
use omnigrpo_session::ranks::is_ignored;
use omnigrpo_session::{Session, setup};

/// Serves a model until a signal ends the program.
pub fn serve(settings: &Settings, session: &Session) -> Result<()> {
    let checkpoint = session.checkpoint()?;
    let model = setup::model(settings, checkpoint, session.device()?)?;
    // The rest is left for the passes of the model and for decoded media.
    let max_bytes = room::free_on(session.device()?).map_or(u64::MAX, |(free, _)| free / 2);
    // Each request has its own limit, so a prompt must only leave room for one token.
    let mut open = settings.clone();
    open.prompts.max_completion_length = 1;
    let prompts = session.prompts(&open, checkpoint, false)?;
    let name = settings.serve.name.clone().or_else(|| settings.model.name.clone());
    let given = settings.env.api_key.is_some();
    let options = Options {
        name: name.unwrap_or_default(),
        place: Place {
            host: settings.network.host,
            port: settings.serve.port,
            names: settings.network.allowed_hosts.clone(),
        },
        key: settings.env.api_key.clone(),
        sampling: settings.algorithm.sampling.clone(),
        max_live: settings.algorithm.max_live,
        max_bytes,
        read: ReadOptions { columns: ColumnNames::default(), ..setup::read_options(settings) },
        trim: heap::trim,
    };
    stop_on_signals(&session.stop)?;
    let server = Server::start(prompts, options)?;
    print(&format!("{}\n", server.url()))?;
    if !given {
        print(&format!("key: {}\n", server.key()))?;
    }
    let (host, names) = (settings.network.host, &settings.network.allowed_hosts);
    let whom = match host.is_loopback() {
        true => "only on this machine".to_owned(),
        false if names.is_empty() => format!("at {host}, by address; `--allowed_hosts` adds names"),
        false => format!("at {host}, by address or as {}", names.join(", ")),
    };
    session.console.line(&format!("the server answers {whom}; press Ctrl-C to stop"));
    server.run(&model, &session.stop).context("the model cannot answer any more")
}

/// Lets the first signal end the server, which completes the requests in progress, and the second one end the process.
fn stop_on_signals(stop: &Arc<AtomicBool>) -> Result<()> {
    let unable = "signals cannot be handled";
    for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&s| s != SIGHUP || !is_ignored(s)) {
        // Handlers run in the order of their registration, so this one acts only if an earlier signal has set the flag.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(stop)).context(unable)?;
        flag::register(signal, Arc::clone(stop)).context(unable)?;
    }
    Ok(())
}
