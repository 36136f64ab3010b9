//! `push`, and what `push_to_hub` does beside a training run: a model to a repository of the hub.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result};
use omnigrpo_fetch::{FetchError, Hub, is_repo_name};
use omnigrpo_observe::Console;
use omnigrpo_rewards::Corpus;
use omnigrpo_train::Observer;

use super::setup::{hub, progress};
use super::{Context, print};
use crate::names::HubStrategy;
use crate::problem::Problem;
use crate::settings::Settings;

/// Pushes a directory with a model.
pub fn push(settings: &Settings, context: &Context) -> Result<()> {
    let dir = settings.io.directory.as_deref().unwrap_or(Path::new("."));
    if !["config.json", "adapter_config.json"].iter().any(|name| dir.join(name).is_file()) {
        return Err(Problem::usage("there is no model to push")
            .at(dir.display().to_string())
            .expected("a run directory, checkpoint or adapter: `config.json` or `adapter_config.json` in it")
            .into());
    }
    let pusher = Pusher::to_repository(settings, context, dir)?;
    pusher.send(dir, concat!("Model pushed by omnigrpo ", env!("CARGO_PKG_VERSION"))).map_err(|error| {
        let problem = Problem::failure("the model could not be pushed").at(pusher.repo.clone());
        problem.got(error.to_string()).help("the same command goes on where this one broke off").into()
    })
}

/// Sends what a run makes to a repository.
pub struct Pusher {
    hub: Arc<Hub>,
    /// `ORG/NAME`.
    repo: String,
    /// The run directory.
    dir: PathBuf,
    every_save: bool,
    console: Console,
    /// The push of a checkpoint that goes on beside training.
    beside: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Pusher {
    /// Makes the repository, so that a wrong token or name is found out before training; nothing without `push_to_hub`.
    pub fn before(settings: &Settings, context: &Context) -> Result<Option<Self>> {
        let Some(dir) = settings.io.output_dir.as_deref().filter(|_| settings.push.enabled) else {
            return Ok(None);
        };
        Self::to_repository(settings, context, dir).map(Some)
    }

    fn to_repository(settings: &Settings, context: &Context, dir: &Path) -> Result<Self> {
        let env = &settings.env.hub;
        if env.offline {
            return Err(Problem::usage("a model cannot be pushed offline")
                .got("HF_HUB_OFFLINE is set")
                .help("unset it; or train without `--push_to_hub`, and `omnigrpo push DIR` later")
                .into());
        }
        let own_name = || Some(std::path::absolute(dir).ok()?.file_name()?.to_string_lossy().into_owned());
        let name = settings.push.model_id.clone().or_else(own_name).unwrap_or_default();
        if !is_repo_name(&name) {
            return Err(Problem::usage("this is no name for a repository of the hub")
                .at("--hub_model_id")
                .got(format!("`{name}`"))
                .expected("`ORG/NAME` or `NAME`, of letters, digits, `-`, `_` and `.`")
                .into());
        }
        let hub = hub(env);
        let repo = hub.create(&name, settings.push.private).map_err(|error| {
            let problem = Problem::failure("the repository on the hub cannot be made").at(name.clone());
            let problem = problem.got(error.to_string());
            match error {
                FetchError::Public { .. } => {
                    problem.help("choose another `--hub_model_id`, or make it private in its settings")
                }
                _ => problem.expected("a name and a token that may write there"),
            }
        })?;
        Ok(Self {
            hub: Arc::new(hub),
            repo,
            dir: dir.to_owned(),
            every_save: settings.push.strategy == HubStrategy::EverySave,
            console: context.console.clone(),
            beside: Arc::default(),
        })
    }

    /// Who pushes each checkpoint of the run, where that is wanted.
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

    /// Pushes the trained model. It lies in the run directory whatever comes of it.
    pub fn last(self, steps: u64) -> Result<()> {
        let beside = self.beside.lock().map(|mut beside| beside.take()).unwrap_or_default();
        // One that panicked has told.
        beside.map_or(Ok(()), JoinHandle::join).unwrap_or_default();
        self.send(&self.dir, &format!("Model after step {steps}")).map_err(|error| {
            Problem::failure("the model is trained and saved, but could not be pushed")
                .at(self.repo.clone())
                .got(error.to_string())
                .help(format!(
                    "`omnigrpo push {} --hub_model_id {}` goes on where this broke off",
                    self.dir.display(),
                    self.repo
                ))
                .into()
        })
    }

    fn send(&self, dir: &Path, message: &str) -> Result<()> {
        let files = model_files(dir)?;
        let mut on = progress(&self.console, &format!("pushing {} to {}", dir.display(), self.repo));
        let pushed = self.hub.push(&self.repo, &files, message, &mut on)?;
        let what = match pushed.num_changed {
            0 => "nothing has changed".to_owned(),
            1 => "1 file".to_owned(),
            several => format!("{several} files"),
        };
        print(&format!("pushed to {} ({what}, commit {})\n", pushed.url, pushed.commit))
    }
}

/// Pushes checkpoints beside training.
struct Saved {
    hub: Arc<Hub>,
    repo: String,
    console: Console,
    beside: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Observer for Saved {
    fn saved(&mut self, step: u64, checkpoint: &Path) {
        let Ok(mut beside) = self.beside.lock() else { return };
        if beside.as_ref().is_some_and(|push| !push.is_finished()) {
            self.console.line(&format!("the last push goes on; the checkpoint of step {step} is not pushed"));
            return;
        }
        let (hub, repo, console) = (Arc::clone(&self.hub), self.repo.clone(), self.console.clone());
        let checkpoint = checkpoint.to_owned();
        *beside = Some(std::thread::spawn(move || {
            let pushed = model_files(&checkpoint).and_then(|files| {
                Ok(hub.push(&repo, &files, &format!("Model after step {step}"), &mut |_| {})?)
            });
            console.line(&match pushed {
                Ok(pushed) => format!("pushed the checkpoint of step {step} to {}", pushed.url),
                Err(error) => format!("warning: the checkpoint of step {step} was not pushed: {error:#}"),
            });
        }));
    }
}

/// Files of a directory that make up a model, by name in a repository and path: weights, settings, tokenizer, templates, code,
/// licence, card. Records of a run stay here: they hold rows of the dataset and paths of this machine.
fn model_files(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    const ENDINGS: [&str; 7] = ["safetensors", "json", "txt", "jinja", "model", "py", "codes"];
    const OTHERS: [&str; 3] = ["LICENSE", "README.md", "metrics.svg"];
    const OF_A_RUN: [&str; 4] = ["optimizer.safetensors", "trainer_state.json", "log.txt", Corpus::FILE];
    let mut files = Vec::new();
    for within in ["", "additional_chat_templates"] {
        let folder = dir.join(within);
        if !folder.is_dir() {
            continue;
        }
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry.with_context(|| folder.display().to_string())?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let ends = path.extension().is_some_and(|end| ENDINGS.iter().any(|known| end == *known));
            let belongs = (ends || OTHERS.contains(&name.as_str())) && !OF_A_RUN.contains(&name.as_str());
            if belongs && !name.starts_with('.') && path.is_file() {
                let name = if within.is_empty() { name } else { format!("{within}/{name}") };
                files.push((name, path));
            }
        }
    }
    files.sort_unstable();
    Ok(files)
}
