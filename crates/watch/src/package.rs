//! Trackers that are Python packages: Weights & Biases and Trackio. The package runs in a child process, which reads lines of JSON.
//!
//! The child inherits the environment, so `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_API_KEY`, `TRACKIO_SPACE_ID` and similar variables have
//! their usual meaning. Its stderr is written to `wandb.log` or `trackio.log` in the run directory, without the values of variables
//! that are keys by their names, and without the stored token of the hub.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use omnigrpo_media::Orientation;
use omnigrpo_observe::{Tracked, Tracker, names};
use serde_json::{Map, Value, json};

use crate::media;

const HELPER: &str = include_str!("package.py");
/// Longest line of stderr that is kept, in bytes. Longer lines are cut.
const MAX_LINE_BYTES: u64 = 4096;
/// Largest number of characters of a completion in the table.
const MAX_CELL_CHARS: usize = 20_000;

/// A Python package that tracks runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Package {
    /// Weights & Biases.
    Wandb,
    /// Trackio, which stores runs on this machine or in a Space of the Hugging Face Hub.
    Trackio,
}

impl Package {
    /// Returns the name of the package.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wandb => "wandb",
            Self::Trackio => "trackio",
        }
    }

    /// Returns the file with its messages.
    fn log(self) -> &'static str {
        match self {
            Self::Wandb => names::WANDB_LOG,
            Self::Trackio => names::TRACKIO_LOG,
        }
    }
}

/// Configuration of a run for a package.
#[derive(Debug, Clone)]
pub struct PackageRun {
    /// Python interpreter to start.
    pub python: String,
    /// Run directory. Weights & Biases stores its files in its subdirectory `wandb/`.
    pub directory: PathBuf,
    /// Name of the run. Without it, `WANDB_NAME` or the name of the directory is used.
    pub name: Option<String>,
    /// All settings of the run.
    pub settings: Map<String, Value>,
    /// Keys and tokens that the child may print. They are never shown.
    pub secrets: Vec<String>,
}

/// Tracker with a running child process.
pub struct Packaged {
    package: Package,
    child: Arc<Mutex<Child>>,
    stdin: Option<ChildStdin>,
    stderr: Option<JoinHandle<String>>,
}

impl Packaged {
    /// Starts the child process and the run.
    ///
    /// # Errors
    /// Returns an error if Python cannot be started or the directory cannot be written.
    pub fn start(package: Package, run: PackageRun) -> Result<Self, String> {
        // The log moves aside with the other files of a run that starts anew here.
        let resumes = run.directory.join(package.log()).exists();
        let mut command = Command::new(&run.python);
        command
            .args(["-c", HELPER, package.name()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // An interrupt at the terminal is for this program only: it still has to report how the run ends.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(|error| {
            format!("`{}` cannot be started: {error}; set another Python interpreter", run.python)
        })?;
        let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
        let stderr = stderr.and_then(|stderr| {
            let (log, secrets) = (run.directory.join(package.log()), run.secrets);
            let thread = std::thread::Builder::new().name(format!("tracker-{}-log", package.name()));
            // If this thread does not start, only the output of the child is lost.
            thread.spawn(move || keep(stderr, &log, &secrets)).ok()
        });
        let mut this = Self { package, child: Arc::new(Mutex::new(child)), stdin, stderr };
        let own = run.directory.file_name().unwrap_or_default().to_string_lossy();
        let (name, settings) = (run.name, run.settings);
        this.tell(&json!({
            "init": {
                "dir": run.directory, "name": name, "directory_name": own, "config": settings, "resumes": resumes
            }
        }))?;
        Ok(this)
    }

    fn tell(&mut self, line: &Value) -> Result<(), String> {
        let written = match &mut self.stdin {
            Some(stdin) => stdin.write_all(format!("{line}\n").as_bytes()).and_then(|()| stdin.flush()),
            None => Ok(()),
        };
        written.map_err(|_| self.why())
    }

    /// Returns the last line of the child's stderr, once the child has ended.
    fn why(&mut self) -> String {
        let said = self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        if said.is_empty() { "its Python process ended without a message".to_owned() } else { said }
    }
}

impl Tracker for Packaged {
    fn name(&self) -> &'static str {
        self.package.name()
    }

    fn take(&mut self, event: &Tracked) -> Result<(), String> {
        match event {
            Tracked::Metrics { step, epoch, metrics } => {
                let values =
                    metrics.iter().filter_map(|(name, value)| Some((name.clone(), json!((*value)?))));
                let mut values: Map<String, Value> = values.collect();
                values.insert("epoch".to_owned(), json!(epoch));
                self.tell(&json!({ "step": step, "metrics": values }))
            }
            Tracked::Completions { step, rollouts } => {
                let rows = rollouts.iter().map(|own| {
                    let media = (0..own.media.len())
                        .filter_map(|at| media::open(&own.media, at, Orientation::default()).ok());
                    let media: Vec<Value> =
                        media.map(|medium| json!({ "path": medium.path, "type": medium.mime })).collect();
                    json!({
                        "id": own.id,
                        "prompt": own.prompt.chars().take(MAX_CELL_CHARS).collect::<String>(),
                        "completion": own.completion.chars().take(MAX_CELL_CHARS).collect::<String>(),
                        "reward": own.reward,
                        "advantage": own.advantage,
                        "rewards": own.rewards,
                        "media": media,
                    })
                });
                let rows: Vec<Value> = rows.collect();
                self.tell(&json!({ "step": step, "completions": rows }))
            }
        }
    }

    fn finish(&mut self) -> Result<(), String> {
        self.stdin = None;
        // This loop polls the child, so that a caller can abandon a hanging child.
        loop {
            let ended = self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait();
            match ended.map_err(|error| error.to_string())? {
                Some(status) if status.success() => return Ok(()),
                Some(_) => return Err(self.why()),
                None => std::thread::sleep(std::time::Duration::from_millis(20)),
            }
        }
    }

    fn abandon(&self) -> Box<dyn FnOnce() + Send> {
        let child = Arc::clone(&self.child);
        // If the child has already ended, the kill fails, which is fine.
        Box::new(move || drop(child.lock().unwrap_or_else(PoisonError::into_inner).kill()))
    }
}

impl Drop for Packaged {
    fn drop(&mut self) {
        self.stdin = None;
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Copies the stderr of the child to a log, without the secrets, and returns its last line.
fn keep(stderr: impl Read, log: &Path, secrets: &[String]) -> String {
    let mut log = std::fs::File::options().create(true).append(true).open(log).ok();
    let mut reader = BufReader::new(stderr);
    let (mut line, mut last) = (Vec::new(), String::new());
    loop {
        line.clear();
        let read = (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
        if !matches!(read, Ok(1..)) {
            return last;
        }
        let mut text = String::from_utf8_lossy(&line).trim_end().to_owned();
        for secret in secrets.iter().filter(|secret| !secret.is_empty()) {
            text = text.replace(secret, "***");
        }
        if let Some(log) = &mut log {
            // The log is optional. A full disk is reported elsewhere.
            let _ = writeln!(log, "{text}");
        }
        if !text.is_empty() {
            last = text;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_tokens_are_shown_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("trackio.log");
        let secrets = ["sekret", "hf_token"].map(str::to_owned);
        let last = keep(&b"key sekret is wrong, hf_token too\n\n"[..], &log, &secrets);
        assert_eq!(last, "key *** is wrong, *** too");
        assert_eq!(std::fs::read_to_string(log).unwrap(), "key *** is wrong, *** too\n\n");
    }

    #[test]
    fn a_python_that_is_not_there_is_named() {
        let run = PackageRun {
            python: "/nowhere/python3".to_owned(),
            directory: PathBuf::from("."),
            name: None,
            settings: Map::new(),
            secrets: Vec::new(),
        };
        let error = Packaged::start(Package::Trackio, run).err().unwrap();
        assert!(error.starts_with("`/nowhere/python3` cannot be started"), "{error}");
    }
}
