//! Models by name: a directory, the local cache, the Hugging Face hub.

use std::path::PathBuf;

use anyhow::Result;
use omnigrpo_fetch::{FetchError, Hub, HubOptions, Step, cached, has_weights, is_model_name};
use omnigrpo_models::adapter_base;
use omnigrpo_observe::Console;

use crate::environment::HubEnvironment;
use crate::problem::Problem;
use crate::settings::Settings;

/// A directory, or a model of the Hugging Face hub, which is fetched unless it is in the local cache.
pub fn named_dir(what: &str, name: &str, settings: &Settings) -> Result<PathBuf, Problem> {
    let path = PathBuf::from(name);
    if path.is_dir() {
        let adapter = adapter_base(&path).map_err(|e| Problem::from_error(&e.into()))?;
        if let (false, Some(base)) = (path.join("config.json").is_file(), adapter) {
            return Err(Problem::usage("the directory holds an adapter, not a checkpoint")
                .at(path.display().to_string())
                .expected("the checkpoint it was trained on, and the adapter beside it")
                .help(format!("--model_name_or_path {base} --adapter_name_or_path {}", path.display())));
        }
        return Ok(path);
    }
    let hub = &settings.env.hub;
    if let Some(dir) = cached(&hub.cache, name)
        && (hub.offline || has_weights(&dir))
    {
        return Ok(dir);
    }
    let missing = || {
        Problem::failure(format!("{what} was not found")).got(format!("`{name}`")).expected(format!(
            "a checkpoint directory, a model in the local cache {}, or one of the hub {}",
            hub.cache.display(),
            hub.endpoint
        ))
    };
    if !is_model_name(name) {
        return Err(missing().help("correct the path"));
    }
    if hub.offline {
        return Err(
            missing().help("HF_HUB_OFFLINE is set: unset it, or copy what `hf download` fetched elsewhere")
        );
    }
    fetch(name, hub).map_err(|error| match error {
        FetchError::NoModel { .. } | FetchError::Denied { .. } => missing().help(error.to_string()),
        _ => missing().help(format!("it could not be fetched: {error}")),
    })
}

/// Fetches a model of the hub into the local cache. What is missing of one that is partly there is added.
fn fetch(name: &str, hub: &HubEnvironment) -> Result<PathBuf, FetchError> {
    let kept = || {
        let text = std::fs::read_to_string(&hub.token_file).ok()?;
        Some(text.trim().to_owned()).filter(|token| !token.is_empty())
    };
    let client = Hub::new(HubOptions {
        endpoint: hub.endpoint.clone(),
        token: hub.token.clone().or_else(kept),
        cache: hub.cache.clone(),
    });
    let console = Console::stderr(false);
    let (mut bar, mut num_bytes) = (None, 0u64);
    client.download(name, "main", &mut |step| match step {
        Step::Begin { num_files, num_bytes } if num_files > 0 => {
            let mb = num_bytes.div_ceil(MB);
            console
                .line(&format!("fetching {name} from {}: {num_files} weight files, {mb} MB", hub.endpoint));
            bar = Some(console.progress("fetching, MB", mb));
        }
        Step::Begin { .. } => {}
        Step::Bytes(more) => {
            let before = num_bytes / MB;
            num_bytes += more;
            if let Some(bar) = &mut bar {
                bar.advance(num_bytes / MB - before);
            }
        }
    })
}

const MB: u64 = 1_000_000;
