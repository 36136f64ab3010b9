//! Checkpoints: everything a run needs to go on as if it had never stopped.
//!
//! `checkpoint-N/` holds the model in the published layout, or in PEFT's the adapter of a model that has one (and every
//! tensor that is trained whole beside it; the base is where the run found it), `optimizer.safetensors` (moments and masters by weight name)
//! and `trainer_state.json`. It is written under a temporary name, synced, and renamed, so a directory of that name with
//! a `trainer_state.json` is always complete. The reference model is not stored: it is the checkpoint the run started
//! from. Random numbers need no state; they are keyed by seed and step.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use omnigrpo_data::OrderState;
use omnigrpo_models::Model;
use omnigrpo_rollout::Completion;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, View};
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::optimizer::{AdamW, Moments};
use crate::step::Rollouts;

const STATE: &str = "trainer_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";

/// State of a run beside weights and moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Optimizer updates done.
    pub global_step: u64,
    /// Rollouts done.
    pub rollout: u64,
    /// Where in the data.
    pub order: OrderState,
    /// Settings that decide whether resuming makes sense.
    pub fingerprint: serde_json::Map<String, serde_json::Value>,
    /// Best value of the evaluation metric so far, and its step.
    pub best: Option<(f64, u64)>,
    /// Updates each weight has had.
    pub optimizer_steps: HashMap<String, u64>,
    /// Epochs whose end has been seen. An epoch that ends with the drawing of `buffer` ends after its last update.
    pub epochs_seen: u64,
    /// A rollout that still has updates to come.
    pub buffer: Option<BufferState>,
}

/// A rollout in the middle of its `num_iterations` updates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BufferState {
    /// Updates done with it.
    pub iteration: usize,
    /// Dataset rows.
    pub rows: Vec<u64>,
    /// The pass over the data that drew each.
    pub epochs: Vec<u64>,
    /// Token ids per row and completion.
    pub ids: Vec<Vec<Vec<u32>>>,
    /// Text per row and completion.
    pub texts: Vec<Vec<String>>,
    /// Whether each ran into the length limit.
    pub truncated: Vec<Vec<bool>>,
    /// Old log-probabilities per row, completion and token; f32 survives JSON exactly.
    pub old: Vec<Vec<Vec<f32>>>,
    /// Reward names.
    pub reward_names: Vec<String>,
    /// Reward weights.
    pub reward_weights: Vec<f64>,
    /// Reward values, one list per name.
    pub reward_values: Vec<Vec<Option<f64>>>,
    /// Weighted totals.
    pub reward_totals: Vec<Option<f64>>,
}

impl BufferState {
    /// The state of a rollout after `iteration` of its updates.
    pub(crate) fn of(rollouts: &Rollouts, iteration: usize) -> Self {
        let each = |f: &dyn Fn(&Completion) -> bool| -> Vec<Vec<bool>> {
            rollouts.completions.iter().map(|g| g.iter().map(f).collect()).collect()
        };
        Self {
            iteration,
            rows: rollouts.rows.iter().map(|r| r.sample.row).collect(),
            epochs: rollouts.rows.iter().map(|r| r.epoch).collect(),
            ids: rollouts.completions.iter().map(|g| g.iter().map(|c| c.ids.clone()).collect()).collect(),
            texts: rollouts.completions.iter().map(|g| g.iter().map(|c| c.text.clone()).collect()).collect(),
            truncated: each(&|c| c.finish_reason == omnigrpo_rollout::FinishReason::Length),
            old: rollouts.old.clone().unwrap_or_default(),
            reward_names: rollouts.rewards.names.clone(),
            reward_weights: rollouts.rewards.weights.clone(),
            reward_values: rollouts.rewards.values.clone(),
            reward_totals: rollouts.rewards.total.clone(),
        }
    }

    /// Whether every list has an entry per row, completion and token; a damaged file may not.
    fn is_whole(&self) -> bool {
        let rows = self.rows.len();
        let completions: usize = self.ids.iter().map(Vec::len).sum();
        let groups = |g: usize| {
            let (ids, old) = (&self.ids[g], &self.old[g]);
            let fits = |(ids, old): (&Vec<u32>, &Vec<f32>)| ids.len() == old.len();
            self.texts[g].len() == ids.len()
                && self.truncated[g].len() == ids.len()
                && old.len() == ids.len()
                && ids.iter().zip(old).all(fits)
        };
        let lists =
            [self.epochs.len(), self.ids.len(), self.texts.len(), self.truncated.len(), self.old.len()];
        lists.iter().all(|&n| n == rows)
            && (0..rows).all(groups)
            && self.reward_totals.len() == completions
            && self.reward_values.len() == self.reward_names.len()
            && self.reward_weights.len() == self.reward_names.len()
            && self.reward_values.iter().all(|values| values.len() == completions)
    }

    /// The completions, as the rollout had them.
    #[must_use]
    pub fn completions(&self) -> Vec<Vec<Completion>> {
        use omnigrpo_rollout::FinishReason::{Length, Stop};
        let group = |r: usize| {
            let each = self.ids[r].iter().zip(&self.texts[r]).zip(&self.truncated[r]);
            each.map(|((ids, text), &cut)| {
                Completion::recorded(ids.clone(), if cut { Length } else { Stop }, text.clone())
            })
            .collect()
        };
        (0..self.ids.len()).map(group).collect()
    }
}

/// Writes `checkpoint-N` into `output_dir` and removes the oldest ones over `limit`.
///
/// # Errors
/// A full or read-only disk; no incomplete checkpoint is left under its final name.
pub fn save(
    output_dir: &Path,
    model: &Model,
    optimizer: Option<&AdamW>,
    mut state: TrainerState,
    limit: Option<usize>,
    keep: Option<u64>,
) -> Result<PathBuf> {
    let name = format!("checkpoint-{}", state.global_step);
    let (target, temporary) = (output_dir.join(&name), output_dir.join(format!("tmp-{name}")));
    let written = (|| {
        if temporary.exists() {
            fs::remove_dir_all(&temporary).map_err(TrainError::io(&temporary))?;
        }
        model.save_trained(&temporary)?;
        if let Some(optimizer) = optimizer {
            state.optimizer_steps = save_moments(&temporary, optimizer.state())?;
        }
        let path = temporary.join(STATE);
        let text = serde_json::to_vec(&state).map_err(|e| TrainError::Checkpoint { what: e.to_string() })?;
        fs::write(&path, text).map_err(TrainError::io(&path))?;
        sync_tree(&temporary)?;
        if target.exists() {
            // Out of the way under a name that no resume looks at, so that an end in the middle leaves no half of it.
            discard(&target)?;
        }
        fs::rename(&temporary, &target).map_err(TrainError::io(&target))?;
        sync(output_dir)
    })();
    if written.is_err() {
        // Best effort: the error that counts is the one above.
        let _ = fs::remove_dir_all(&temporary);
    }
    written?;
    if let Some(limit) = limit {
        let mut all = list(output_dir)?;
        all.retain(|(step, path)| Some(*step) != keep && *path != target);
        // The one just written counts, and stays.
        let surplus = all.len().saturating_sub(limit.max(1) - 1);
        for (_, path) in &all[..surplus] {
            discard(path)?;
        }
    }
    Ok(target)
}

/// Writes the trained model into `to`, beside a run's records: complete in a temporary directory first, then file by
/// file into place, `config.json` last.
///
/// # Errors
/// A full or read-only disk.
pub fn save_final(model: &Model, to: &Path) -> Result<()> {
    let from = to.join("tmp-final");
    if from.exists() {
        fs::remove_dir_all(&from).map_err(TrainError::io(&from))?;
    }
    model.save_trained(&from)?;
    let mut names: Vec<std::ffi::OsString> = Vec::new();
    for entry in fs::read_dir(&from).map_err(TrainError::io(&from))? {
        names.push(entry.map_err(TrainError::io(&from))?.file_name());
    }
    names.sort_by_key(|name| name == "config.json");
    // An index of an earlier, sharded save would win over a single file.
    let index = to.join("model.safetensors.index.json");
    if index.exists() {
        fs::remove_file(&index).map_err(TrainError::io(&index))?;
    }
    for name in names {
        fs::rename(from.join(&name), to.join(&name)).map_err(TrainError::io(to))?;
    }
    fs::remove_dir(&from).map_err(TrainError::io(&from))
}

/// Removes a checkpoint so that it is never seen incomplete.
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

/// Complete checkpoints of a run directory, oldest first.
///
/// # Errors
/// An unreadable directory.
pub fn list(output_dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    if !output_dir.is_dir() {
        return Ok(found);
    }
    for entry in fs::read_dir(output_dir).map_err(TrainError::io(output_dir))? {
        let path = entry.map_err(TrainError::io(output_dir))?.path();
        let step = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_prefix("checkpoint-"))
            .and_then(|digits| digits.parse::<u64>().ok());
        if let Some(step) = step
            && path.join(STATE).is_file()
        {
            found.push((step, path));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Reads the state of a checkpoint.
///
/// # Errors
/// No checkpoint, or one that is damaged.
pub fn read_state(checkpoint: &Path) -> Result<TrainerState> {
    let path = checkpoint.join(STATE);
    let text = fs::read(&path).map_err(TrainError::io(&path))?;
    let damaged = |what: &dyn std::fmt::Display| TrainError::Checkpoint {
        what: format!("{} is damaged: {what}; resume from an earlier checkpoint", path.display()),
    };
    let state: TrainerState = serde_json::from_slice(&text).map_err(|e| damaged(&e))?;
    match &state.buffer {
        Some(buffer) if !buffer.is_whole() => {
            Err(damaged(&"its rollout in progress has lists of other lengths"))
        }
        _ => Ok(state),
    }
}

/// Loads weights and moments of a checkpoint.
///
/// # Errors
/// Tensors that do not fit the model.
pub fn load(checkpoint: &Path, model: &Model, optimizer: &mut AdamW, state: &TrainerState) -> Result<()> {
    model.load_trained(checkpoint)?;
    let path = checkpoint.join(OPTIMIZER);
    if !path.is_file() {
        return Err(TrainError::Checkpoint {
            what: format!(
                "{} has no {OPTIMIZER}: it was saved with save_only_model and can start a run, not resume one",
                checkpoint.display()
            ),
        });
    }
    let bytes = fs::read(&path).map_err(TrainError::io(&path))?;
    let damaged =
        |e: &dyn std::fmt::Display| TrainError::Checkpoint { what: format!("{}: {e}", path.display()) };
    let file = SafeTensors::deserialize(&bytes).map_err(|e| damaged(&e))?;
    let floats = |name: &str| -> Result<Vec<f32>> {
        match file.tensor(name) {
            Ok(view) if view.dtype() != Dtype::F32 => {
                Err(damaged(&format!("tensor {name} is {:?}, expected F32", view.dtype())))
            }
            Ok(view) => Ok(view.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()),
            Err(_) => Ok(Vec::new()),
        }
    };
    let mut moments = HashMap::new();
    for (name, &step) in &state.optimizer_steps {
        let entry = Moments {
            step,
            m: floats(&format!("{name}.m"))?,
            v: floats(&format!("{name}.v"))?,
            master: floats(&format!("{name}.master"))?,
        };
        moments.insert(name.clone(), entry);
    }
    optimizer.restore(moments)
}

fn save_moments(dir: &Path, state: &HashMap<String, Moments>) -> Result<HashMap<String, u64>> {
    struct Named<'a> {
        data: &'a [f32],
        shape: [usize; 1],
    }
    impl View for Named<'_> {
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }
        fn shape(&self) -> &[usize] {
            &self.shape
        }
        fn data(&self) -> Cow<'_, [u8]> {
            Cow::Borrowed(bytemuck::cast_slice(self.data))
        }
        fn data_len(&self) -> usize {
            4 * self.data.len()
        }
    }
    let mut tensors = Vec::new();
    for (name, moments) in state {
        for (suffix, data) in [("m", &moments.m), ("v", &moments.v), ("master", &moments.master)] {
            if !data.is_empty() {
                tensors.push((format!("{name}.{suffix}"), Named { data, shape: [data.len()] }));
            }
        }
    }
    let path = dir.join(OPTIMIZER);
    safetensors::serialize_to_file(tensors, None, &path).map_err(|e| match e {
        safetensors::SafeTensorError::IoError(source) => TrainError::Io { path, source },
        other => TrainError::Checkpoint { what: other.to_string() },
    })?;
    Ok(state.iter().map(|(name, m)| (name.clone(), m.step)).collect())
}

fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|f| f.sync_all()).map_err(TrainError::io(path))
}

fn sync_tree(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(TrainError::io(dir))? {
        sync(&entry.map_err(TrainError::io(dir))?.path())?;
    }
    sync(dir)
}
