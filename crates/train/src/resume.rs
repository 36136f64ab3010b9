//! Where a run begins: anew, or at a checkpoint whose settings are its own.

use std::path::PathBuf;

use omnigrpo_observe::Console;
use serde_json::Value;

use crate::checkpoint::{self, TrainerState};
use crate::error::{Result, TrainError};
use crate::plan::{ResumeFrom, RunPlan};

/// Finds the checkpoint to resume from; moves checkpoints of other settings aside.
pub(crate) fn find_resume(run: &RunPlan, console: &Console) -> Result<Option<(PathBuf, TrainerState)>> {
    let path = match &run.resume {
        ResumeFrom::Path(path) => path.clone(),
        ResumeFrom::Start | ResumeFrom::Newest => match checkpoint::list(&run.output_dir)?.pop() {
            None => return Ok(None),
            Some((_, path)) if run.resume == ResumeFrom::Newest => path,
            Some(_) => {
                set_aside(run, console, "resume_from_checkpoint is never")?;
                return Ok(None);
            }
        },
    };
    let state = checkpoint::read_state(&path)?;
    let differences: Vec<String> = run
        .fingerprint
        .iter()
        .filter(|(key, value)| state.fingerprint.get(*key) != Some(*value))
        .map(|(key, value)| {
            let old = state.fingerprint.get(key).map_or("unset".to_owned(), Value::to_string);
            format!("{key}: {old} → {value}")
        })
        .collect();
    if differences.is_empty() {
        let abandoned =
            checkpoint::list(&run.output_dir)?.into_iter().filter(|(step, _)| *step > state.global_step);
        move_aside(run, console, abandoned.collect(), "the run goes on from an earlier one")?;
        return Ok(Some((path, state)));
    }
    match &run.resume {
        ResumeFrom::Path(_) => Err(TrainError::Checkpoint {
            what: format!(
                "{} was written with other settings ({}); change them back, or start anew with \
                 --resume_from_checkpoint never",
                path.display(),
                differences.join("; ")
            ),
        }),
        _ => {
            set_aside(run, console, &format!("their settings differ ({})", differences.join("; ")))?;
            Ok(None)
        }
    }
}

fn set_aside(run: &RunPlan, console: &Console, why: &str) -> Result<()> {
    move_aside(run, console, checkpoint::list(&run.output_dir)?, &format!("{why}; starting anew"))
}

/// Moves checkpoints into a directory of their own, with a copy of the metrics that belong to them.
fn move_aside(run: &RunPlan, console: &Console, checkpoints: Vec<(u64, PathBuf)>, why: &str) -> Result<()> {
    if checkpoints.is_empty() {
        return Ok(());
    }
    let mut n = 1;
    let aside = loop {
        let path = run.output_dir.join(format!("superseded-{n}"));
        if !path.exists() {
            break path;
        }
        n += 1;
    };
    std::fs::create_dir_all(&aside).map_err(TrainError::io(&aside))?;
    let metrics = run.output_dir.join("metrics.jsonl");
    if metrics.is_file() {
        std::fs::copy(&metrics, aside.join("metrics.jsonl")).map_err(TrainError::io(&metrics))?;
    }
    for (_, path) in checkpoints {
        if let Some(name) = path.file_name() {
            std::fs::rename(&path, aside.join(name)).map_err(TrainError::io(&path))?;
        }
    }
    console.line(&format!("earlier checkpoints were moved to {}: {why}", aside.display()));
    Ok(())
}
