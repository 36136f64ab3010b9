//! Checkpoints: the complete state of a run, so that a resumed run gives the same results as an uninterrupted one.
//!
//! `checkpoint-N/` contains these files:
//! - The model in the layout in which it was published. If the model has an adapter, only the adapter in PEFT's layout and every
//!   other tensor that is fully trained. The base model stays where the run found it.
//! - `optimizer.safetensors`: moments and masters by weight name.
//! - `trainer_state.json`: the remaining state.
//! - `reference/`: the reference model, only if it follows the policy. Otherwise it is the model the run started from.
//! - `SHA256SUMS` over all of these files, in the format of `sha256sum -c`.
//!
//! A checkpoint is written under a temporary name, synced, and renamed. A `checkpoint-N/` with a `trainer_state.json` is
//! therefore always complete. Loading checks every file against its sum first and refuses a mismatch. Random numbers need no
//! state: they are keyed by seed and step.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use omnigrpo_data::OrderState;
use omnigrpo_guard::inside;
use omnigrpo_models::{Model, WeightDtype, WeightFiles};
use omnigrpo_observe::sync_directory;
use omnigrpo_ops::{Numbers, Values};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, View};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::buffer::BufferState;
use crate::error::{Result, SAVE_ONLY_MODEL, TrainError};
use crate::optimizer::{AdamW, StateArray};

const STATE: &str = "trainer_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const REFERENCE: &str = "reference";
const SUMS: &str = "SHA256SUMS";
/// Name prefixes of checkpoints and models that are being written or removed.
const UNFINISHED: [&str; 3] = ["tmp-checkpoint-", "tmp-old-checkpoint-", "tmp-final"];

/// State of a run, except for weights and moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Version of the program that wrote the checkpoint; empty up to 0.2.0.
    #[serde(default)]
    pub version: String,
    /// Number of optimizer updates done.
    pub global_step: u64,
    /// Number of rollouts done.
    pub rollout: u64,
    /// Position in the data.
    pub order: OrderState,
    /// Settings that must match when a run resumes.
    pub fingerprint: serde_json::Map<String, serde_json::Value>,
    /// Settings that change results by rounding alone. A run that resumes with other values reports them.
    #[serde(default)]
    pub rounding: BTreeMap<String, String>,
    /// Best value of the evaluation metric so far, and the step that reached it.
    pub best: Option<(f64, u64)>,
    /// True if the checkpoint has no optimizer state.
    pub model_only: bool,
    /// Number of updates of each weight.
    pub optimizer_steps: BTreeMap<String, u64>,
    /// Number of epochs whose end was recorded. If drawing `buffer` completed an epoch, the epoch ends after the last update of
    /// `buffer`.
    pub epochs_seen: u64,
    /// Rollout that still has updates to come.
    pub buffer: Option<BufferState>,
    /// True if the evaluation of this step must be repeated because the machine failed during it.
    #[serde(default)]
    pub evaluation_due: bool,
}

/// Parts of a checkpoint other than the state.
#[derive(Clone, Copy)]
pub struct Parts<'a> {
    /// Model to save.
    pub model: &'a Model,
    /// Optimizer; `None` for a checkpoint that stores the model alone.
    pub optimizer: Option<&'a AdamW>,
    /// Reference model, if it follows the policy.
    pub reference: Option<&'a Model>,
}

/// Writes `checkpoint-N` into `output_dir`, then removes the oldest checkpoints over `limit`. Checkpoints in `keep` are never
/// removed.
///
/// # Errors
/// Returns an error if a weight or moment is not finite, or if the disk is full or read-only. An incomplete checkpoint never has
/// the final name.
pub fn save(
    output_dir: &Path,
    Parts { model, optimizer, reference }: Parts,
    mut state: TrainerState,
    limit: Option<usize>,
    keep: &[Option<u64>],
) -> Result<PathBuf> {
    let name = format!("checkpoint-{}", state.global_step);
    let (target, temporary) = (output_dir.join(&name), output_dir.join(format!("tmp-{name}")));
    check_weights(model)?;
    optimizer.map_or(Ok(()), check_moments)?;
    state.model_only = optimizer.is_none();
    let written: Result<()> = (|| {
        if temporary.exists() {
            fs::remove_dir_all(&temporary).map_err(TrainError::io(&temporary))?;
        }
        model.save_trained(&temporary)?;
        if let Some(reference) = reference {
            reference.save_trained(&temporary.join(REFERENCE))?;
        }
        if let Some(optimizer) = optimizer {
            state.optimizer_steps = save_moments(&temporary, optimizer)?;
        }
        let path = temporary.join(STATE);
        let text = serde_json::to_vec(&state).map_err(std::io::Error::from).map_err(TrainError::io(&path))?;
        fs::write(&path, text).map_err(TrainError::io(&path))?;
        write_sums(&temporary)?;
        sync_tree(&temporary)?;
        if target.exists() {
            // `discard` renames the old checkpoint first, so an interruption leaves no half-removed checkpoint that a resume
            // could load.
            discard(&target)?;
        }
        fs::rename(&temporary, &target).map_err(TrainError::io(&target))?;
        Ok(sync_directory(output_dir)?)
    })();
    if written.is_err() {
        // The cleanup may fail: the caller gets the first error.
        let _ = fs::remove_dir_all(&temporary);
    }
    written?;
    if let Some(limit) = limit {
        let mut all = list(output_dir)?;
        all.retain(|(step, path)| !keep.contains(&Some(*step)) && *path != target);
        // The new checkpoint counts towards the limit and is never removed.
        let surplus = all.len().saturating_sub(limit.max(1) - 1);
        for (_, path) in &all[..surplus] {
            discard(path)?;
        }
    }
    Ok(target)
}

/// Loads the weights of a moving reference from a checkpoint. If the checkpoint has none, because the reference of that run was
/// fixed, the reference keeps its initial weights.
///
/// # Errors
/// Returns an error if the weights cannot be read or do not fit.
pub(crate) fn load_reference(checkpoint: &Path, reference: &Model) -> Result<()> {
    let dir = checkpoint.join(REFERENCE);
    if dir.is_dir() {
        inside::resolve(checkpoint, REFERENCE).map_err(TrainError::io(&dir))?;
        reference.load_weights(&dir)?;
    }
    Ok(())
}

/// Writes the trained model into `to`, next to the records of the run. The files are completed in a temporary directory and then
/// moved one by one, `config.json` last.
///
/// # Errors
/// Returns an error if a weight is not finite, or if the disk is full or read-only.
pub fn save_final(model: &Model, to: &Path) -> Result<()> {
    let from = to.join("tmp-final");
    if from.exists() {
        fs::remove_dir_all(&from).map_err(TrainError::io(&from))?;
    }
    check_weights(model)?;
    model.save_trained(&from)?;
    // A power failure must not leave files without content.
    sync_tree(&from)?;
    let mut names: Vec<std::ffi::OsString> = Vec::new();
    for entry in fs::read_dir(&from).map_err(TrainError::io(&from))? {
        names.push(entry.map_err(TrainError::io(&from))?.file_name());
    }
    names.sort_by_key(|name| name == "config.json");
    // Loaders would prefer the index of an earlier, sharded save over the new single file.
    let index = to.join("model.safetensors.index.json");
    if index.exists() {
        fs::remove_file(&index).map_err(TrainError::io(&index))?;
    }
    for name in names {
        let (new, old) = (from.join(&name), to.join(&name));
        // A directory cannot replace a non-empty directory by renaming.
        if new.is_dir() && old.is_dir() {
            fs::remove_dir_all(&old).map_err(TrainError::io(&old))?;
        }
        fs::rename(new, old).map_err(TrainError::io(to))?;
    }
    fs::remove_dir(&from).map_err(TrainError::io(&from))?;
    Ok(sync_directory(to)?)
}

/// Removes a checkpoint. It is renamed first, so that no incomplete checkpoint ever has its name.
fn discard(checkpoint: &Path) -> Result<()> {
    let mut name = std::ffi::OsString::from("tmp-old-");
    name.push(checkpoint.file_name().unwrap_or_default());
    let aside = checkpoint.with_file_name(name);
    if aside.exists() {
        fs::remove_dir_all(&aside).map_err(TrainError::io(&aside))?;
    }
    fs::rename(checkpoint, &aside).map_err(TrainError::io(checkpoint))?;
    fs::remove_dir_all(&aside).map_err(TrainError::io(&aside))
}

/// Returns the complete checkpoints of a run directory, oldest first.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn list(output_dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = named(output_dir)?;
    found.retain(|(_, path)| path.join(STATE).is_file());
    Ok(found)
}

/// Returns the last checkpoint with a sound policy if `step` is the first step whose metrics show a problem. These metrics
/// describe completions of the policy before `step`, so the checkpoint of step `step - 1` may already have the problem and is not
/// returned.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub(crate) fn before(output_dir: &Path, step: u64) -> Result<Option<(u64, PathBuf)>> {
    Ok(list(output_dir)?.into_iter().rfind(|(own, _)| *own + 1 < step))
}

/// Returns the directories that are named like checkpoints but lack `trainer_state.json`, oldest first. The program leaves no
/// such directories; an interrupted copy does.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn incomplete(output_dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = named(output_dir)?;
    found.retain(|(_, path)| path.is_dir() && !path.join(STATE).is_file());
    Ok(found)
}

/// Returns every entry with the name of a checkpoint, sorted by step.
fn named(output_dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    if !output_dir.is_dir() {
        return Ok(found);
    }
    for entry in fs::read_dir(output_dir).map_err(TrainError::io(output_dir))? {
        let path = entry.map_err(TrainError::io(output_dir))?.path();
        found.extend(step_of(&path).map(|step| (step, path)));
    }
    found.sort_unstable();
    Ok(found)
}

/// Parses the step from the name of a checkpoint.
fn step_of(checkpoint: &Path) -> Option<u64> {
    checkpoint.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse().ok()
}

/// Returns a digest of all files of a checkpoint: that of their sums.
pub(crate) fn digest(checkpoint: &Path) -> Result<String> {
    let sums = inside::read(checkpoint, SUMS, u64::MAX).map_err(TrainError::io(checkpoint.join(SUMS)))?;
    Ok(Sha256::digest(&sums).iter().take(16).map(|byte| format!("{byte:02x}")).collect())
}

/// Reads the state of a checkpoint.
///
/// # Errors
/// Returns an error if the directory is not a checkpoint, or if the state is damaged or inconsistent.
pub fn read_state(checkpoint: &Path) -> Result<TrainerState> {
    let path = checkpoint.join(STATE);
    if !path.is_file() {
        return Err(TrainError::Checkpoint {
            what: format!("{} is not a checkpoint: it contains no {STATE}", checkpoint.display()),
        });
    }
    check_sums(checkpoint, Some(STATE))?;
    let text = inside::read(checkpoint, STATE, u64::MAX).map_err(TrainError::io(&path))?;
    let damaged = |what: &dyn std::fmt::Display| damaged(checkpoint, &format!("{STATE}: {what}"));
    let state: TrainerState =
        serde_json::from_slice(&text).map_err(|e| unreadable(checkpoint, STATE, e.into()))?;
    if state.buffer.as_ref().is_some_and(|buffer| !buffer.is_whole()) {
        return Err(damaged(&"the lists of its rollout in progress differ in length"));
    }
    let step = state.global_step;
    if step_of(checkpoint).is_some_and(|named| named != step) {
        return Err(damaged(&format!("it is from step {step}, but the directory's name gives another step")));
    }
    if state.rollout > step || state.best.is_some_and(|(_, best)| best > step) {
        return Err(damaged(&format!("its number of rollouts or its best step exceeds step {step}")));
    }
    if let Some((name, had)) = state.optimizer_steps.iter().find(|(_, had)| **had > step || **had == 0) {
        return Err(damaged(&format!("{name} had {had} updates, expected 1 to {step}")));
    }
    Ok(state)
}

/// Loads weights and moments of a checkpoint. If a file is damaged, nothing is changed.
///
/// # Errors
/// Returns an error if a file is damaged, a tensor does not fit the model, or a moment is not finite.
pub fn load(checkpoint: &Path, model: &Model, optimizer: &mut AdamW, state: &TrainerState) -> Result<()> {
    if state.model_only {
        return Err(TrainError::Checkpoint {
            what: format!(
                "{} was saved with {SAVE_ONLY_MODEL}, without the optimizer's state; a run can start from it \
                 but cannot resume from it",
                checkpoint.display()
            ),
        });
    }
    check_sums(checkpoint, None)?;
    model.load_trained(checkpoint)?;
    // The tensors are read one at a time: a second copy of the optimizer's state would exceed the peak memory of the run.
    let file = WeightFiles::open_file(&checkpoint.join(OPTIMIZER))?;
    let damaged = |what: &str| damaged(checkpoint, &format!("{OPTIMIZER}: {what}"));
    let floats = |name: &str| -> Result<Vec<f32>> {
        if file.shape(name).is_none() {
            return Ok(Vec::new());
        }
        let Values::F32(values) = file.read(name, WeightDtype::Auto)?.map_err(|what| damaged(what.trim()))?
        else {
            return Err(damaged(&format!("tensor {name} is BF16, expected F32")));
        };
        let least = if name.ends_with(".v") { 0.0 } else { f32::NEG_INFINITY };
        match values.iter().position(|x| *x < least) {
            Some(i) => {
                Err(damaged(&format!("tensor {name}: element {i} is {}, expected at least 0", values[i])))
            }
            None => Ok(values),
        }
    };
    let mut read = 0;
    let mut moments = HashMap::new();
    for (name, &step) in &state.optimizer_steps {
        let [m, v, master] = ["m", "v", "master"].map(|array| floats(&format!("{name}.{array}")));
        let numbers = Numbers { m: m?, v: v?, master: master? };
        read += 2 + usize::from(!numbers.master.is_empty());
        moments.insert(name.clone(), optimizer.own_state(name, step, numbers)?);
    }
    let found = file.names().count();
    if found != read {
        return Err(damaged(&format!(
            "got {found} tensors, expected {read} for the weights listed in {STATE}"
        )));
    }
    optimizer.restore(moments);
    Ok(())
}

fn save_moments(dir: &Path, optimizer: &AdamW) -> Result<BTreeMap<String, u64>> {
    /// Array of the state of a weight. If it is on a card or on other ranks, it is copied to main memory only when it is written.
    struct Named<'a> {
        optimizer: &'a AdamW,
        weight: usize,
        array: StateArray,
        shape: [usize; 1],
        failure: &'a RefCell<Option<TrainError>>,
    }
    impl View for Named<'_> {
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }
        fn shape(&self) -> &[usize] {
            &self.shape
        }
        fn data(&self) -> Cow<'_, [u8]> {
            match self.optimizer.whole(self.weight, self.array) {
                Ok(Cow::Borrowed(data)) => bytemuck::cast_slice(data).into(),
                Ok(Cow::Owned(data)) => bytemuck::cast_slice(&data).to_vec().into(),
                Err(error) => {
                    self.failure.borrow_mut().get_or_insert(error);
                    vec![0; self.data_len()].into()
                }
            }
        }
        fn data_len(&self) -> usize {
            4 * self.shape[0]
        }
    }
    let failure = RefCell::default();
    let mut tensors = Vec::new();
    let mut steps = BTreeMap::new();
    for (weight, param, moments) in optimizer.numbered() {
        steps.insert(param.name().to_owned(), moments.step);
        for array in optimizer.arrays(param) {
            let name = format!("{}.{}", param.name(), array.name());
            let (shape, failure) = ([param.len()], &failure);
            tensors.push((name, Named { optimizer, weight, array, shape, failure }));
        }
    }
    let path = dir.join(OPTIMIZER);
    safetensors::serialize_to_file(tensors, None, &path).map_err(|e| match e {
        safetensors::SafeTensorError::IoError(source) => TrainError::Io { path, source },
        source => TrainError::Safetensors { path, source },
    })?;
    failure.into_inner().map_or(Ok(()), Err)?;
    omnigrpo_models::share(&dir.join(OPTIMIZER))?;
    Ok(steps)
}

/// Syncs the files of a directory tree, then the directories.
fn sync_tree(dir: &Path) -> Result<()> {
    for path in files_in(dir)? {
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            File::open(&path).and_then(|f| f.sync_all()).map_err(TrainError::io(&path))?;
        }
    }
    Ok(sync_directory(dir)?)
}

fn files_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(TrainError::io(dir))? {
        paths.push(entry.map_err(TrainError::io(dir))?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Returns the files of a directory and its subdirectories.
fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in files_in(dir)? {
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

/// Writes `SHA256SUMS` for all files of a directory.
fn write_sums(dir: &Path) -> Result<()> {
    let sums: Result<Vec<String>> = files_below(dir)?
        .par_iter()
        .map(|path| {
            let name = path.strip_prefix(dir).unwrap_or(path);
            Ok(format!("{}  {}\n", sum(dir, name)?, name.display()))
        })
        .collect();
    let path = dir.join(SUMS);
    fs::write(&path, sums?.concat()).map_err(TrainError::io(path))
}

/// Compares the files of a checkpoint with their sums: the file `only`, or all files.
fn check_sums(checkpoint: &Path, only: Option<&str>) -> Result<()> {
    let text = inside::open(checkpoint, SUMS).and_then(std::io::read_to_string);
    let text = text.map_err(|e| unreadable(checkpoint, SUMS, e.into()))?;
    let mut listed = Vec::new();
    for line in text.lines() {
        let stays =
            |name: &str| Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        let Some((expected, name)) = line.split_once("  ").filter(|(_, name)| stays(name)) else {
            return Err(damaged(checkpoint, &format!("{SUMS} has the invalid line {line:?}")));
        };
        listed.push((expected, name));
    }
    for name in [STATE].into_iter().chain(only) {
        if !listed.iter().any(|(_, listed)| *listed == name) {
            return Err(damaged(checkpoint, &format!("{SUMS} has no line for {name}")));
        }
    }
    listed.retain(|(_, name)| only.is_none_or(|only| only == *name));
    listed.par_iter().try_for_each(|(expected, name)| match sum(checkpoint, Path::new(name)) {
        Ok(got) if got == *expected => Ok(()),
        Ok(_) => {
            Err(damaged(checkpoint, &format!("{name} has changed since it was saved (its checksum differs)")))
        }
        Err(e) => Err(unreadable(checkpoint, name, e.into())),
    })
}

fn sum(dir: &Path, name: &Path) -> Result<String> {
    let path = &dir.join(name);
    let mut file = inside::open(dir, name).map_err(TrainError::io(path))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(TrainError::io(path))? {
            0 => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            n => hash.update(&buffer[..n]),
        }
    }
}

fn damaged(checkpoint: &Path, what: &dyn std::fmt::Display) -> TrainError {
    TrainError::Damaged { checkpoint: checkpoint.to_owned(), what: what.to_string(), source: None }
}

fn unreadable(checkpoint: &Path, name: &str, source: Box<dyn std::error::Error + Send + Sync>) -> TrainError {
    let what = format!("its {name} cannot be read");
    TrainError::Damaged { checkpoint: checkpoint.to_owned(), what, source: Some(source) }
}

/// Returns an error if a weight is not finite. Training cannot continue with such a model, and it must not replace a sound one.
fn check_weights(model: &Model) -> Result<()> {
    for param in model.params().iter().filter(|p| p.trainable()) {
        if !param.read().f32().iter().all(|x| x.is_finite()) {
            return Err(TrainError::NonFiniteState { name: param.name().to_owned(), what: "the value" });
        }
    }
    Ok(())
}

/// Returns an error if a moment of this rank is not finite. A checkpoint with such a moment could not be loaded.
pub(crate) fn check_moments(optimizer: &AdamW) -> Result<()> {
    for (param, moments) in optimizer.state() {
        for array in optimizer.arrays(param) {
            if !array.of(moments, param).iter().all(|x| x.is_finite()) {
                return Err(TrainError::NonFiniteState { name: param.name().to_owned(), what: array.what() });
            }
        }
    }
    Ok(())
}

/// Removes files and directories that an earlier process left behind when it was interrupted, and returns their names.
///
/// # Errors
/// Returns an error if one of them cannot be removed.
pub(crate) fn remove_leftovers(output_dir: &Path) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for dir in [output_dir.to_owned(), output_dir.join("eval")] {
        if !dir.is_dir() {
            continue;
        }
        for path in files_in(&dir)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let result = if path.is_dir() && UNFINISHED.iter().any(|start| name.starts_with(start)) {
                fs::remove_dir_all(&path)
            } else if path.is_file() && name.starts_with('.') && name.ends_with(".tmp") {
                fs::remove_file(&path)
            } else {
                continue;
            };
            result.map_err(TrainError::io(&path))?;
            removed.push(name);
        }
    }
    Ok(removed)
}
