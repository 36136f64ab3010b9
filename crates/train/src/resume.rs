//! Choice of the starting point of a run, and treatment of the files of an earlier run in its directory.
//!
//! A run resumes from a checkpoint with the same settings and inputs, or starts from the beginning. A run never deletes or
//! overwrites the files of another run: it moves them to `superseded-N` in the same directory and reports this on the console. It
//! also moves files that no run wrote if it would overwrite them. A run that resumes from its newest checkpoint drops the log
//! entries after it, because the same steps write them again. Nothing is moved before the checkpoint has been loaded.

use std::path::{Path, PathBuf};

use omnigrpo_guard::{inside, told};
use omnigrpo_models::{COMPANIONS, Model};
use omnigrpo_observe::{Console, Existing, names, step_files};
use omnigrpo_rewards::Corpus;
use serde_json::{Map, Value};

use crate::alike::{self, Difference};
use crate::checkpoint::{self, TrainerState};
use crate::error::{
    ALLOW_CHANGED, LOCK, MAX_STEPS, NEWEST, RESUME, Refusal, Result, SAVE_ONLY_MODEL, START, TrainError,
};
use crate::inputs::JOINED;
use crate::optimizer::AdamW;
use crate::plan::{ResumeFrom, ResumePlan, RunPlan};
use crate::rounding::{self, Rounding};
use crate::split::Split;

/// Settings on which a position in the data depends.
const POSITION: [&str; 5] = ["dataset", "data_seed", "seed", "val_split_ratio", "replay"];
/// Files that a run writes at its end besides the weights.
const AT_THE_END: [&str; 5] =
    ["README.md", "metrics.svg", "config.json", "adapter_config.json", "additional_chat_templates"];
/// Files that a run writes at its start: its settings and the data of its rewards.
const AT_THE_START: [&str; 2] = ["config.yaml", Corpus::FILE];

/// Name of the number of prompts of a step.
pub const PROMPTS: &str = "prompts_per_step";

/// Name of the size of micro-batches, on which some losses depend.
pub const MICRO_BATCHES: &str = "prompts_per_micro_batch";

/// Starting point of a run.
pub(crate) enum Start {
    /// Start at step 0.
    Anew {
        /// Reason for not resuming.
        why: String,
    },
    /// Start from a checkpoint, which has been loaded into the model and the optimizer.
    From(Box<Resumed>),
}

/// Loaded checkpoint.
pub(crate) struct Resumed {
    pub(crate) path: PathBuf,
    pub(crate) state: TrainerState,
    /// Names of the settings that differ from those of the checkpoint; empty unless differences are allowed.
    changed: Vec<String>,
}

impl Resumed {
    /// Returns true if the run continues with the row after the last one of the checkpoint.
    pub(crate) fn keeps_position(&self) -> bool {
        !self.changed.iter().any(|name| POSITION.contains(&name.as_str()))
    }

    /// Returns true if the settings of this run give the same rollout as the one in progress in the checkpoint.
    pub(crate) fn keeps_rollout(&self) -> bool {
        self.changed.is_empty()
    }

    /// Returns true if the checkpoint is in this run directory.
    pub(crate) fn is_in(&self, dir: &Path) -> bool {
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        real(&self.path).and_then(|path| real(path.parent()?)) == real(dir)
    }
}

/// Search for the starting point of a run.
pub(crate) struct Search<'a> {
    pub(crate) run: &'a RunPlan,
    pub(crate) dir: &'a Path,
    pub(crate) total_steps: u64,
    pub(crate) rounding: &'a Rounding,
    pub(crate) model: &'a Model,
    /// Reference whose weights move.
    pub(crate) reference: Option<&'a Model>,
    pub(crate) optimizer: &'a mut AdamW,
    pub(crate) console: &'a Console,
}

impl Search<'_> {
    /// Chooses the starting point of all ranks: the first rank decides, and the others load the same checkpoint. Each rank has then
    /// loaded the state of the optimizer and of a moving reference. `ready` is the result of the first rank's preparation.
    pub(crate) fn over(mut self, split: &Split, ready: Result<()>) -> Result<Start> {
        let mut start = None;
        let chosen = split.by_first(|| {
            ready?;
            let found = self.start()?;
            let chosen = match &found {
                Start::Anew { .. } => None,
                Start::From(resumed) => Some((resumed.path.clone(), resumed.changed.clone())),
            };
            start = Some(found);
            Ok(chosen)
        })?;
        let load = || -> Result<Start> {
            let start = match (start, chosen) {
                (Some(start), _) => start,
                (None, None) => Start::Anew { why: String::new() },
                (None, Some((path, changed))) => {
                    let state = checkpoint::read_state(&path)?;
                    checkpoint::load(&path, self.model, self.optimizer, &state)?;
                    Start::From(Box::new(Resumed { path, state, changed }))
                }
            };
            self.optimizer.reserve(self.model.device(), self.console)?;
            if let (Start::From(resumed), Some(reference)) = (&start, self.reference) {
                checkpoint::load_reference(&resumed.path, reference)?;
            }
            Ok(start)
        };
        // Each rank has compared its own files with their sums.
        alike::same(&split.ranks, "the checkpoint to resume from", load(), |start| {
            let Start::From(resumed) = start else { return Ok(Map::new()) };
            let path = &resumed.path;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok(std::iter::once((name, checkpoint::digest(path)?.into())).collect())
        })
    }

    /// Chooses the starting point and loads the checkpoint, if there is one.
    fn start(&mut self) -> Result<Start> {
        let path = match &self.run.resume.from {
            ResumeFrom::Start => return Ok(Start::Anew { why: format!("{RESUME} is {START}") }),
            ResumeFrom::Path(path) => path.clone(),
            from => {
                say_incomplete(self.dir, self.console)?;
                let newest = checkpoint::list(self.dir)?.pop();
                match (from == &ResumeFrom::Must, newest) {
                    (false, _) => return self.newest(),
                    (true, Some((_, path))) => path,
                    (true, None) => {
                        let what = format!("no checkpoint to resume from in {}", self.dir.display());
                        return Err(TrainError::Checkpoint { what });
                    }
                }
            }
        };
        let state = checkpoint::read_state(&path)?;
        match differing(self.run, &state) {
            Some(differing) => Err(written_otherwise(self.run, &path, &state, &differing)),
            None => self.load(path, state),
        }
    }

    /// Loads the newest checkpoint that is complete and has the same settings.
    fn newest(&mut self) -> Result<Start> {
        let mut why = "it left no checkpoint to resume from".to_owned();
        // After a failed load, the model may have weights of that checkpoint, so the run cannot start from the beginning.
        let mut failed = None;
        for (_, path) in checkpoint::list(self.dir)?.into_iter().rev() {
            let found = match checkpoint::read_state(&path) {
                Ok(state) if state.model_only => {
                    why = format!("its checkpoints have no optimizer state ({SAVE_ONLY_MODEL})");
                    continue;
                }
                Ok(state) if failed.is_none() && repeats(self.run, self.dir, &state, self.total_steps) => {
                    return Ok(Start::Anew { why: "it is complete".to_owned() });
                }
                Ok(state) => match (differing(self.run, &state), &failed) {
                    (None, _) => self.load(path, state),
                    (Some(_), Some(_)) => continue,
                    (Some(differing), None) if starts_again(self.run, &state) => {
                        why = format!("its settings differ ({differing})");
                        return Ok(Start::Anew { why });
                    }
                    (Some(differing), None) => {
                        return Err(written_otherwise(self.run, &path, &state, &differing));
                    }
                },
                Err(error) => Err(error),
            };
            match found {
                Err(error) if !matches!(error, TrainError::Setting { .. }) => {
                    self.console.line(&format!("{}; looking for an earlier one", told(&error)));
                    failed.get_or_insert(error);
                }
                found => return found,
            }
        }
        failed.map_or_else(|| Ok(Start::Anew { why }), Err)
    }

    /// Loads a checkpoint into the model and the optimizer.
    fn load(&mut self, path: PathBuf, state: TrainerState) -> Result<Start> {
        if state.global_step > self.total_steps {
            return Err(TrainError::setting(
                MAX_STEPS,
                &self.total_steps.to_string(),
                format!(
                    "{} is already at step {}; increase the number of steps, name an earlier checkpoint, or start \
                     from the beginning with {RESUME} {START}",
                    path.display(),
                    state.global_step
                ),
            ));
        }
        checkpoint::load(&path, self.model, self.optimizer, &state)?;
        let differences = differences(self.run, &state);
        if !differences.is_empty() {
            let all: Vec<&str> = differences.iter().map(|(_, text)| text.as_str()).collect();
            self.console.notice(&format!("resuming with changed settings: {}", all.join("; ")));
        }
        if let Some(rounded) = rounding::differing(&state.rounding, self.rounding) {
            self.console.notice(&format!(
                "resuming with {rounded}; the results differ by rounding from those of a run without this change"
            ));
        }
        let changed = differences.into_iter().map(|(name, _)| name).collect();
        Ok(Start::From(Box::new(Resumed { path, state, changed })))
    }
}

impl Start {
    /// Returns how to treat existing logs.
    pub(crate) fn existing(&self) -> Existing {
        match self {
            Self::Anew { .. } => Existing::Refuse,
            Self::From(resumed) => Existing::ResumeAfter(resumed.state.global_step),
        }
    }

    /// Moves away the files that do not belong to this run. `model` is the directory from which checkpoints copy the tokenizer
    /// and the configuration.
    pub(crate) fn make_room(&self, dir: &Path, model: &Path, console: &Console) -> Result<()> {
        let (mut paths, mut what, mut why) = match self {
            Self::Anew { why } => (
                earlier_run(dir, model)?,
                "the files of the earlier run",
                format!("{why}; starting from the beginning"),
            ),
            Self::From(resumed) if !resumed.is_in(dir) => (
                earlier_run(dir, model)?,
                "files of an earlier run",
                format!("the run resumes from {}", resumed.path.display()),
            ),
            Self::From(resumed) => (
                behind(dir, resumed.state.global_step)?,
                "files of an earlier run",
                "the run resumes from an earlier checkpoint".to_owned(),
            ),
        };
        if paths.is_empty() && !matches!(self, Self::From(resumed) if resumed.is_in(dir)) {
            paths = strangers(dir, model)?;
            let names = paths.iter().filter_map(|path| path.file_name()?.to_str());
            why = format!("{}; this run writes files with these names", names.collect::<Vec<_>>().join(", "));
            what = "files that no run wrote";
        }
        if paths.is_empty() {
            return Ok(());
        }
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        let holds_model =
            |path: &&PathBuf| real(path).zip(real(model)).is_some_and(|(a, b)| b.starts_with(a));
        if let Some(path) = paths.iter().find(holds_model) {
            return Err(TrainError::setting(
                LOCK,
                &dir.display().to_string(),
                format!(
                    "{} would be moved, but it contains the model to train; choose another directory",
                    path.display()
                ),
            ));
        }
        let aside = move_aside(dir, paths)?;
        console.notice(&format!("{what} in {} were moved to {}: {why}", dir.display(), aside.display()));
        Ok(())
    }
}

/// Moves files of a run directory to `superseded-N` in it. Logs that the run continues are copied there. Returns the new directory.
fn move_aside(dir: &Path, paths: Vec<PathBuf>) -> Result<PathBuf> {
    let aside = (1..)
        .map(|n| dir.join(format!("superseded-{n}")))
        .find(|path| !path.exists())
        .unwrap_or_else(|| dir.join("superseded"));
    std::fs::create_dir_all(&aside).map_err(TrainError::io(&aside))?;
    for name in names::LOGS {
        let (from, to) = (dir.join(name), aside.join(name));
        if from.is_file() && !paths.contains(&from) {
            let copied = inside::open(dir, name)
                .and_then(|mut log| std::io::copy(&mut log, &mut std::fs::File::create(to)?));
            copied.map_err(TrainError::io(&from))?;
        }
    }
    for path in paths {
        let to = aside.join(path.strip_prefix(dir).unwrap_or(&path));
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent).map_err(TrainError::io(parent))?;
        }
        std::fs::rename(&path, &to).map_err(TrainError::io(&path))?;
    }
    Ok(aside)
}

/// Returns an error if the checkpoint that the plan names is missing.
pub(crate) fn find_requested(resume: &ResumeFrom, dir: &Path) -> Result<()> {
    let absent = |place: &Path| -> Result<()> {
        let found = checkpoint::list(dir)?;
        let found: Vec<String> = found.iter().map(|(_, path)| path.display().to_string()).collect();
        Err(Refusal::failure("no checkpoint to resume from was found")
            .at(place.display())
            .got(if found.is_empty() { "none in the run directory".into() } else { found.join(", ") })
            .expected("a directory `checkpoint-N` with `trainer_state.json`")
            .help(format!("`{RESUME} {NEWEST}` starts from the beginning if there is none"))
            .into())
    };
    match resume {
        ResumeFrom::Must if checkpoint::list(dir)?.is_empty() => absent(dir),
        ResumeFrom::Path(path) if !path.is_dir() => absent(path),
        _ => Ok(()),
    }
}

/// Returns the checkpoint from which a run will resume, and its step. If it turns out to be damaged when it is loaded, the run
/// resumes from an earlier one.
pub(crate) fn expected(run: &RunPlan, dir: &Path, total_steps: u64) -> Result<Option<(PathBuf, u64)>> {
    let newest_first = || -> Result<Vec<PathBuf>> {
        Ok(checkpoint::list(dir)?.into_iter().rev().map(|(_, path)| path).collect())
    };
    let (candidates, named) = match &run.resume.from {
        ResumeFrom::Start => return Ok(None),
        ResumeFrom::Path(path) => (vec![path.clone()], true),
        ResumeFrom::Must => (newest_first()?.into_iter().take(1).collect(), true),
        ResumeFrom::Newest => (newest_first()?, false),
    };
    for path in candidates {
        let state = match checkpoint::read_state(&path) {
            Err(error) if named => return Err(error),
            Err(_) => continue,
            Ok(state) if state.model_only && !named => continue,
            Ok(state) if !named && repeats(run, dir, &state, total_steps) => return Ok(None),
            Ok(state) => state,
        };
        return match differing(run, &state) {
            None => Ok(Some((path, state.global_step))),
            Some(_) if !named && starts_again(run, &state) => Ok(None),
            Some(differing) => Err(written_otherwise(run, &path, &state, &differing)),
        };
    }
    Ok(None)
}

/// Returns true if the run of this checkpoint is complete and starts from the beginning again.
fn repeats(run: &RunPlan, dir: &Path, state: &TrainerState, total_steps: u64) -> bool {
    // A run writes its card after the trained model.
    run.resume.repeat_complete && state.global_step >= total_steps && dir.join("README.md").is_file()
}

/// Returns true if a run with other settings than this checkpoint's starts from the beginning instead of ending with an error. A checkpoint of
/// an earlier version, which read less of the rows, is always an error.
fn starts_again(run: &RunPlan, state: &TrainerState) -> bool {
    run.resume.repeat_complete && newly_joined(run, state).is_none()
}

/// Returns the columns of the rows that are part of the prompts now and were not when the checkpoint was written, if nothing else
/// differs: an earlier version, which did not read them, has written it.
fn newly_joined<'a>(run: &'a RunPlan, state: &TrainerState) -> Option<&'a str> {
    let alone = || differences(run, state).iter().all(|(name, _)| name == JOINED);
    let columns = run.resume.fingerprint.get(JOINED)?.as_str()?;
    (!state.fingerprint.contains_key(JOINED) && alone()).then_some(columns)
}

fn written_otherwise(run: &RunPlan, path: &Path, state: &TrainerState, differing: &str) -> TrainError {
    let path = path.display();
    let what = match newly_joined(run, state) {
        Some(columns) => format!(
            "{path} was written by an earlier version, which did not read {columns} of the rows; they are part of the \
             prompts now; resume with the new prompts with {ALLOW_CHANGED}, or start from the beginning with {RESUME} {START}"
        ),
        None => format!(
            "{path} was written with other settings ({differing}); restore the old settings, use the new ones with \
             {ALLOW_CHANGED}, or start from the beginning with {RESUME} {START}"
        ),
    };
    TrainError::Checkpoint { what }
}

/// Returns the name and a description of each setting that differs from the checkpoint's.
fn differences(run: &RunPlan, state: &TrainerState) -> Vec<(String, String)> {
    let ResumePlan { fingerprint: new, before, free, .. } = &run.resume;
    let mut old = in_prompts(state.fingerprint.clone());
    // Earlier versions also stored settings that bind nothing, and may have had some that are gone.
    let is_idle = |name: &str, value: &Value| free.contains(&name) || before.get(name) == Some(value);
    old.retain(|name, value| new.contains_key(name) || !is_idle(name, value));
    for (name, value) in before.iter().filter(|(name, _)| new.contains_key(*name)) {
        old.entry(name).or_insert_with(|| value.clone());
    }
    // Older checkpoints do not name it, and mostly had the same.
    if let Some(same) = new.get(MICRO_BATCHES) {
        old.entry(MICRO_BATCHES).or_insert_with(|| same.clone());
    }
    let each = alike::differences(&old, new).into_iter();
    each.map(|Difference { name, values }| {
        let text = match values {
            Some([old, new]) => format!("{name}: {old} → {new}"),
            None => format!("{name}: content has changed"),
        };
        (name, text)
    })
    .collect()
}

/// Returns the settings of a checkpoint with its batch counted in prompts, as checkpoints store it now. Version 0.2.0 stored its parts.
fn in_prompts(mut old: Map<String, Value>) -> Map<String, Value> {
    let number = |name: &str| old.get(name).and_then(Value::as_u64);
    let parts = number("per_device_train_batch_size").zip(number("gradient_accumulation_steps"));
    if let (Some((each, batches)), None) = (parts, old.get(PROMPTS)) {
        let group = match old.get("batch_unit").and_then(Value::as_str) {
            Some("completions") => number("num_generations").unwrap_or(1).max(1),
            _ => 1,
        };
        old.insert(PROMPTS.into(), (each * batches / group).into());
    }
    old
}

/// Returns all differences that prevent a resume in one text; `None` without such differences.
fn differing(run: &RunPlan, state: &TrainerState) -> Option<String> {
    let texts: Vec<String> = differences(run, state).into_iter().map(|(_, text)| text).collect();
    (!run.resume.allow_changed && !texts.is_empty()).then(|| texts.join("; "))
}

fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(TrainError::io(dir))? {
        let path = entry.map_err(TrainError::io(dir))?.path();
        if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
            all.push((name.to_owned(), path.clone()));
        }
    }
    all.sort();
    Ok(all)
}

/// Returns true if a run writes weights under this name.
fn is_weights(name: &str) -> bool {
    const WHOLE: [&str; 3] =
        ["model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"];
    let shard = || {
        let (number, of) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
        Some([number, of].iter().all(|part| part.parse::<u32>().is_ok()))
    };
    WHOLE.contains(&name) || shard() == Some(true)
}

/// Reports the incomplete checkpoints, which a resume ignores.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub(crate) fn say_incomplete(dir: &Path, console: &Console) -> Result<()> {
    for (_, path) in checkpoint::incomplete(dir)? {
        console.line(&format!(
            "{} is ignored: it contains no trainer_state.json, so the checkpoint is incomplete (was a copy interrupted?)",
            path.display()
        ));
    }
    Ok(())
}

/// Returns true if the model's directory or a checkpoint of the run has a code file with this name.
fn is_code(dir: &Path, model: &Path, name: &str) -> Result<bool> {
    if !name.ends_with(".py") {
        return Ok(false);
    }
    let mut places = checkpoint::list(dir)?.into_iter().map(|(_, path)| path).chain([model.to_owned()]);
    Ok(places.any(|place| place != dir && place.join(name).is_file()))
}

/// Returns files that no run wrote and that this run would overwrite.
fn strangers(dir: &Path, model: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for (name, path) in entries(dir)? {
        // A run that failed before its first step has already written its `config.yaml`.
        let mine = || std::fs::read(&path).is_ok_and(|text| text.starts_with(b"# omnigrpo "));
        let hit = AT_THE_END.contains(&name.as_str())
            || COMPANIONS.contains(&name.as_str())
            || name == "config.yaml" && !mine()
            || is_code(dir, model, &name)?;
        if hit {
            found.push(path);
        }
    }
    Ok(found)
}

/// Returns the files of an earlier run in a directory; an empty list if no run has started there.
fn earlier_run(dir: &Path, model: &Path) -> Result<Vec<PathBuf>> {
    let all = entries(dir)?;
    let checkpoints: Vec<PathBuf> = checkpoint::list(dir)?
        .into_iter()
        .chain(checkpoint::incomplete(dir)?)
        .map(|(_, path)| path)
        .collect();
    let is_checkpoint = |path: &Path| checkpoints.iter().any(|checkpoint| checkpoint == path);
    let filled = |name: &str, path: &Path| match name {
        names::METRICS | names::SKIPPED => path.metadata().is_ok_and(|meta| meta.len() > 0),
        names::ROLLOUTS | names::EVALUATIONS => {
            std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some())
        }
        name => is_checkpoint(path) || is_weights(name),
    };
    if !all.iter().any(|(name, path)| filled(name, path)) {
        return Ok(Vec::new());
    }
    if let Some((name, _)) = all.iter().find(|(name, _)| is_weights(name))
        && !all.iter().any(|(name, _)| name == "config.yaml" || name == names::METRICS)
    {
        return Err(TrainError::setting(
            LOCK,
            &dir.display().to_string(),
            format!("the directory contains a model ({name}) that no run wrote; choose another directory"),
        ));
    }
    let records = [&names::LOGS[..], &names::BY_STEP, &names::OF_TRACKERS, &AT_THE_START, &AT_THE_END];
    let records = records.concat();
    let ours = |name: &str, path: &Path| {
        records.contains(&name)
            || COMPANIONS.contains(&name)
            || is_checkpoint(path)
            || is_weights(name)
            || name.starts_with("nonfinite-step-")
    };
    let mut paths = Vec::new();
    for (name, path) in all {
        if ours(&name, &path) || is_code(dir, model, &name)? {
            paths.push(path);
        }
    }
    Ok(paths)
}

/// Returns the checkpoints after `step` with the later rollouts and evaluations and the final model. The result is empty if
/// `step` is the newest checkpoint.
fn behind(dir: &Path, step: u64) -> Result<Vec<PathBuf>> {
    let all = checkpoint::list(dir)?.into_iter().chain(checkpoint::incomplete(dir)?);
    let mut paths: Vec<PathBuf> = all.filter(|(newer, _)| *newer > step).map(|(_, path)| path).collect();
    if paths.is_empty() {
        return Ok(paths);
    }
    for logs in names::BY_STEP.map(|name| dir.join(name)) {
        if logs.is_dir() {
            paths.extend(step_files(&logs)?.into_iter().filter(|(at, _)| *at > step).map(|(_, path)| path));
        }
    }
    let is_final = |name: &str| is_weights(name) || ["README.md", "metrics.svg"].contains(&name);
    paths.extend(entries(dir)?.into_iter().filter(|(name, _)| is_final(name)).map(|(_, path)| path));
    Ok(paths)
}
