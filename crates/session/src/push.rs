//! `push`, and `push_to_hub` during training: upload of a model to a repository on the hub.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result};
use omnigrpo_fetch::{FetchError, Hub, is_repo_name};
use omnigrpo_guard::inside::{read_path, resolve};
use omnigrpo_guard::told;
use omnigrpo_models::COMPANIONS;
use omnigrpo_observe::Console;
use omnigrpo_train::Observer;
use serde_json::Value;

use crate::Session;
use crate::setup::{hub, progress};
use omnigrpo_settings::Settings;
use omnigrpo_settings::names::HubStrategy;
use omnigrpo_settings::problem::Problem;

/// File that lists the weight files of a model.
const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of a text that is searched for names, bytes.
const MAX_TEXT_BYTES: u64 = 256 << 20;
/// Directory of chat templates other than the default one.
const TEMPLATES: &str = "additional_chat_templates";

/// Pushes a directory with a model.
pub fn push(settings: &Settings, session: &Session) -> Result<()> {
    let dir = settings.io.directory.as_deref().unwrap_or(Path::new("."));
    if !["config.json", "adapter_config.json"].iter().any(|name| dir.join(name).is_file()) {
        return Err(Problem::usage("the directory contains no model to push")
            .at(dir.display().to_string())
            .expected("a run directory, checkpoint or adapter: `config.json` or `adapter_config.json` in it")
            .into());
    }
    // The files are listed first, so that a repository is created only if they can be sent.
    let files = model_files(dir)?;
    if settings.io.dry_run {
        return listed(settings, dir, &files).and_then(|text| session.print(&text));
    }
    let pusher = Pusher::to_repository(settings, session, dir)?;
    pusher.send(session, dir, &format!("Model pushed by omnigrpo {}", omnigrpo_observe::version())).map_err(
        |error| {
            let problem = Problem::failure("the model could not be pushed").at(pusher.repo.clone());
            problem.got(told(error.as_ref())).help("run the same command again to continue the upload").into()
        },
    )
}

/// Returns what a push would send: the repository, each file with its size, and the card.
fn listed(settings: &Settings, dir: &Path, files: &[(String, PathBuf)]) -> Result<String> {
    let kind = if settings.push.private { "private" } else { "public" };
    let name = repository(settings, dir)?;
    let mut out = format!("{kind} repository: {name}\n\n");
    for (name, path) in files {
        let bytes = std::fs::metadata(path).with_context(|| path.display().to_string())?.len();
        out.push_str(&format!("{:>9}  {name}\n", omnigrpo_train::room::size(bytes)));
    }
    match read_path(&dir.join("README.md"), MAX_TEXT_BYTES) {
        Ok(card) => out.push_str(&format!("\nREADME.md:\n\n{}", String::from_utf8_lossy(&card))),
        Err(_) => out.push_str("\nno README.md, so the repository has no card\n"),
    }
    Ok(out)
}

/// Returns the name of the repository of a directory.
fn repository(settings: &Settings, dir: &Path) -> Result<String, Problem> {
    let own_name = || Some(std::path::absolute(dir).ok()?.file_name()?.to_string_lossy().into_owned());
    let name = settings.push.model_id.clone().or_else(own_name).unwrap_or_default();
    if is_repo_name(&name) {
        return Ok(name);
    }
    Err(Problem::usage("wrong name for a repository of the hub")
        .at("--hub_model_id")
        .got(format!("`{name}`"))
        .expected("`ORG/NAME` or `NAME`, of letters, digits, `-`, `_` and `.`"))
}

/// Step of the checkpoint being pushed, and the thread that pushes it.
type Beside = Arc<Mutex<Option<(u64, JoinHandle<()>)>>>;

/// Sender of the models of a run to a repository.
pub(crate) struct Pusher {
    hub: Arc<Hub>,
    /// Name of the repository, `ORG/NAME`.
    repo: String,
    /// Run directory.
    dir: PathBuf,
    every_save: bool,
    console: Console,
    /// Running push of a checkpoint.
    beside: Beside,
}

impl Pusher {
    /// Creates the repository, so that a wrong token or name is reported before training. Does nothing without `push_to_hub`.
    pub fn before(settings: &Settings, session: &Session) -> Result<Option<Self>> {
        let Some(dir) = settings.io.output_dir.as_deref().filter(|_| settings.push.enabled) else {
            return Ok(None);
        };
        Self::to_repository(settings, session, dir).map(Some)
    }

    fn to_repository(settings: &Settings, session: &Session, dir: &Path) -> Result<Self> {
        let env = &settings.env.hub;
        if env.offline {
            return Err(Problem::usage("a model cannot be pushed offline")
                .got("HF_HUB_OFFLINE is set")
                .help("unset it, or train without `--push_to_hub` and run `omnigrpo push DIR` later")
                .into());
        }
        let name = repository(settings, dir)?;
        let hub = hub(env);
        let repo = hub.create(&name, settings.push.private).map_err(|error| {
            let problem = Problem::failure("the repository on the hub cannot be created").at(name.clone());
            let problem = problem.got(told(&error));
            match error {
                FetchError::Public { .. } => {
                    problem.help("choose another `--hub_model_id`, or make it private in its settings")
                }
                _ => problem.expected("a name, and a token that may write there"),
            }
        })?;
        Ok(Self {
            hub: Arc::new(hub),
            repo,
            dir: dir.to_owned(),
            every_save: settings.push.strategy == HubStrategy::EverySave,
            console: session.console.clone(),
            beside: Arc::default(),
        })
    }

    /// Returns the observer that pushes each checkpoint, if the settings request it.
    pub fn observer(&self) -> Box<dyn Observer> {
        if !self.every_save {
            return Box::new(());
        }
        Box::new(Saved {
            hub: Arc::clone(&self.hub),
            repo: self.repo.clone(),
            console: self.console.clone(),
            beside: Arc::clone(&self.beside),
        })
    }

    /// Pushes the trained model. The model stays in the run directory if the push fails.
    pub fn last(self, session: &Session, steps: u64) -> Result<()> {
        let beside = self.beside.lock().map(|mut beside| beside.take()).unwrap_or_default();
        // If the thread panicked, the panic has already been reported.
        beside.map_or(Ok(()), |(_, push)| push.join()).unwrap_or_default();
        self.send(session, &self.dir, &format!("Model after step {steps}")).map_err(|error| {
            Problem::failure("the model is trained and saved, but could not be pushed")
                .at(self.repo.clone())
                .got(told(error.as_ref()))
                .help(format!(
                    "`omnigrpo push {} --hub_model_id {}` continues the upload",
                    self.dir.display(),
                    self.repo
                ))
                .into()
        })
    }

    fn send(&self, session: &Session, dir: &Path, message: &str) -> Result<()> {
        let files = model_files(dir)?;
        let mut on = progress(&self.console, &format!("pushing {} to {}", dir.display(), self.repo));
        let pushed = self.hub.push(&self.repo, &files, message, &mut on)?;
        let what = match pushed.num_changed {
            0 => "nothing has changed".to_owned(),
            1 => "1 file".to_owned(),
            several => format!("{several} files"),
        };
        session.print(&format!("pushed to {} ({what}, commit {})\n", pushed.url, pushed.commit))
    }
}

/// Observer that pushes checkpoints during training.
struct Saved {
    hub: Arc<Hub>,
    repo: String,
    console: Console,
    beside: Beside,
}

impl Observer for Saved {
    fn reads(&self) -> Option<u64> {
        let beside = self.beside.lock().ok()?;
        beside.as_ref().filter(|(_, push)| !push.is_finished()).map(|(step, _)| *step)
    }

    fn saved(&mut self, step: u64, checkpoint: &Path) {
        let Ok(mut beside) = self.beside.lock() else { return };
        if beside.as_ref().is_some_and(|(_, push)| !push.is_finished()) {
            self.console.line(&format!(
                "the last push is still running; the checkpoint of step {step} is not pushed"
            ));
            return;
        }
        let (hub, repo, console) = (Arc::clone(&self.hub), self.repo.clone(), self.console.clone());
        let checkpoint = checkpoint.to_owned();
        let work = move || {
            let pushed = model_files(&checkpoint).and_then(|files| {
                Ok(hub.push(&repo, &files, &format!("Model after step {step}"), &mut |_| {})?)
            });
            match pushed {
                Ok(pushed) => {
                    console.line(&format!("pushed the checkpoint of step {step} to {}", pushed.url));
                }
                Err(error) => {
                    let why = told(error.as_ref());
                    console.warning(&format!("the checkpoint of step {step} was not pushed: {why}"));
                }
            }
        };
        match std::thread::Builder::new().name("push".to_owned()).spawn(work) {
            Ok(push) => *beside = Some((step, push)),
            Err(error) => self.console.warning(&format!(
                "the checkpoint of step {step} was not pushed: no thread can be started: {error}"
            )),
        }
    }
}

/// Lists the files of a model in a directory as pairs of name in the repository and path: weights, settings, tokenizer,
/// templates, code, licence, card. Other files are never pushed, because the directory may also contain private files, and a
/// published file cannot be withdrawn. For the same reason, links that point outside the directory are not followed.
fn model_files(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    const WEIGHTS: [&str; 2] = ["model.safetensors", "adapter_model.safetensors"];
    const OTHERS: [&str; 10] = [
        "config.json",
        "adapter_config.json",
        INDEX,
        "vocab.txt",
        "bpe.codes",
        "spiece.model",
        "LICENSE.txt",
        "NOTICE",
        "README.md",
        "metrics.svg",
    ];
    let mut names: BTreeSet<String> = WEIGHTS.iter().chain(&OTHERS).map(|name| (*name).to_owned()).collect();
    names.extend(COMPANIONS.map(str::to_owned));
    names.retain(|name| dir.join(name).is_file());
    // The push fails if the index names a shard that is not in the directory.
    let shards = shards(dir)?;
    if !shards.is_empty() {
        names.remove(WEIGHTS[0]);
    }
    names.extend(shards);
    if !names.iter().any(|name| name.ends_with(".safetensors")) {
        return Err(Problem::usage("the directory contains no model to push")
            .at(dir.display().to_string())
            .expected(format!("weights: `{}` or `{INDEX}`", WEIGHTS.join("`, `")))
            .into());
    }
    names.extend(code(dir));
    let templates = dir.join(TEMPLATES);
    for entry in std::fs::read_dir(&templates).into_iter().flatten() {
        let name = entry.with_context(|| templates.display().to_string())?.file_name();
        let name = name.to_string_lossy();
        if name.ends_with(".jinja") && !name.starts_with('.') && templates.join(&*name).is_file() {
            names.insert(format!("{TEMPLATES}/{name}"));
        }
    }
    let real = |name: String| {
        let path = dir.join(&name);
        // A missing file is kept in the list, so that the push reports its name.
        match path.exists().then(|| resolve(dir, &name)).transpose() {
            Ok(real) => Ok((name, real.unwrap_or(path))),
            Err(error) => Err(Problem::failure("a file of the model cannot be pushed")
                .at(path.display().to_string())
                .got(told(&error))
                .expected("a file of this directory")
                .into()),
        }
    };
    names.into_iter().map(real).collect()
}

/// Returns the weight files named in the index; none without an index.
fn shards(dir: &Path) -> Result<Vec<String>> {
    let path = dir.join(INDEX);
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let bad = |what: String| {
        Problem::failure("the index of the weights cannot be used")
            .at(path.display().to_string())
            .got(what)
            .expected("`weight_map` with the names of safetensors files in this directory")
    };
    let text = read_path(&path, MAX_TEXT_BYTES).map_err(|error| bad(error.to_string()))?;
    let index: Value = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
    let map = index["weight_map"].as_object().ok_or_else(|| bad("no `weight_map`".to_owned()))?;
    let mut shards = Vec::new();
    for value in map.values() {
        match value.as_str() {
            Some(name) if name.ends_with(".safetensors") && !name.contains(['/', '\\']) => {
                shards.push(name.to_owned());
            }
            _ => return Err(bad(format!("the file {value}")).into()),
        }
    }
    Ok(shards)
}

/// Returns the Python files that a model names in `auto_map`, and the files in the same directory that they import.
fn code(dir: &Path) -> BTreeSet<String> {
    const SETTINGS: [&str; 5] = [
        "config.json",
        "tokenizer_config.json",
        "processor_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    ];
    let mut modules = Vec::new();
    for name in SETTINGS {
        let text = read_path(&dir.join(name), MAX_TEXT_BYTES).unwrap_or_default();
        let settings: Value = serde_json::from_slice(&text).unwrap_or_default();
        for value in settings["auto_map"].as_object().into_iter().flat_map(|map| map.values()) {
            // A tokenizer has a slow and a fast class. A class in another repository is written `ORG/NAME--MODULE.CLASS`.
            let classes = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            let own = classes.iter().filter_map(Value::as_str).filter(|class| !class.contains("--"));
            modules.extend(own.filter_map(|class| Some(class.split_once('.')?.0.to_owned())));
        }
    }
    let mut files = BTreeSet::new();
    while let Some(module) = modules.pop() {
        let name = format!("{module}.py");
        let is_name = module.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if is_name && dir.join(&name).is_file() && files.insert(name.clone()) {
            let text = read_path(&dir.join(&name), MAX_TEXT_BYTES).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let imports = text.lines().filter_map(|line| line.trim_start().strip_prefix("from ."));
            modules.extend(imports.filter_map(|rest| Some(rest.split_whitespace().next()?.to_owned())));
        }
    }
    files
}
