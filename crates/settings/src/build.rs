//! The one place where a plan and its inputs become a [`Run`].

use std::path::{Path, PathBuf};

use omnigrpo_train::{AdamWConfig, Divided, Run, RunPlan, Selection};
use serde_json::{Map, Value};

use crate::binding::{binding, earlier, free, shaping};
use crate::values::Values;
use crate::{Settings, Verb};

/// Plan of a run, and the settings that stand for it.
pub struct Plan<'a> {
    /// Algorithm, divided over the ranks of the run.
    pub algorithm: Divided,
    /// Learning rates.
    pub optimizer: AdamWConfig,
    /// Trained parts.
    pub selection: Selection,
    /// Length, records and checkpoints. What binds a checkpoint to the run is added here.
    pub run: RunPlan,
    /// False to trust the rows instead of reading all of them first.
    pub check_rows: bool,
    /// Files that determine the scores of rewards.
    pub reward_files: Vec<PathBuf>,
    /// Maximum memory of decoded media that are kept for later passes, bytes.
    pub media_bytes: Option<u64>,
    /// This plan as settings, by name and in their types.
    pub settings: (&'a Values, &'a Settings, Verb),
    /// Further entries that bind a checkpoint to the run, such as digests of functions.
    pub code: Map<String, Value>,
}

/// Returns the run of a plan. `inputs` has what is live: the model, the rows, the rewards; `directory` is its
/// directory, or `None` to only plan it.
pub fn run(inputs: Run, plan: Plan<'_>, directory: Option<&Path>) -> Run {
    let (values, settings, verb) = plan.settings;
    let mut run = plan.run;
    run.resume.fingerprint.extend(binding(values, settings, verb, plan.algorithm.split.num_leaves()));
    run.resume.fingerprint.extend(plan.code);
    (run.resume.before, run.resume.free) = (earlier(verb), free(verb));
    run.card.settings = shaping(values, settings, verb);
    Run {
        algorithm: plan.algorithm,
        optimizer: plan.optimizer,
        selection: plan.selection,
        plan: run,
        check_rows: plan.check_rows,
        reward_files: plan.reward_files,
        media_bytes: plan.media_bytes,
        cache_dir: Some(
            directory.map_or_else(|| settings.env.check_cache(), |directory| directory.join(".cache")),
        ),
        output_dir: directory.map(Path::to_owned),
        ..inputs
    }
}
