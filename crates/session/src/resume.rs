//! Resuming of `generate` and `eval` after they were stopped; see [`Partial`].

use std::path::Path;
use std::time::UNIX_EPOCH;

use anyhow::Result;
use omnigrpo_data::Dataset;
use omnigrpo_observe::{Found, Partial};
use serde_json::{Map, Value, json};

use crate::{Session, setup};
use omnigrpo_settings::values::Resolved;

/// Opens the stored rows of an earlier attempt at this output, and prints how many it found.
pub fn open(
    resolved: &Resolved,
    session: &Session,
    output: &Path,
    model: &Path,
    dataset: &Dataset,
) -> Result<Partial> {
    let (partial, found) = Partial::open(output, &made_with(resolved, model, dataset)?)?;
    let beside = format!("{}.partial", output.display());
    match found {
        Found::Nothing => {}
        Found::Rows(rows) => session
            .console
            .line(&format!("resuming after {rows} of {} rows, which are in {beside}", dataset.len())),
        Found::Other { differences, moved_to } => {
            let kept =
                moved_to.map_or(String::new(), |path| format!("; its rows are now in {}", path.display()));
            session.console.line(&format!(
                "{beside} was written with other settings ({}){kept}; starting again",
                differences.join("; ")
            ));
        }
    }
    Ok(partial)
}

/// Returns everything on which the rows of an output depend.
fn made_with(resolved: &Resolved, model: &Path, dataset: &Dataset) -> Result<Map<String, Value>> {
    let settings = &resolved.settings;
    let mut out = Map::new();
    out.insert("command".into(), resolved.verb.name().into());
    out.extend(resolved.values.binding(resolved.verb).map(|(flag, value)| (flag.name.to_owned(), value)));
    out.extend(omnigrpo_train::digests(dataset, &setup::reward_files(settings))?);
    let files = settings.io.input.iter().chain(&settings.data.eval_file).map(|path| stamp(path));
    out.insert("files of rows".into(), files.collect());
    let weights = [Some(model), settings.model.adapter.as_deref()];
    out.insert("files of weights".into(), weights.into_iter().flatten().flat_map(weight_files).collect());
    Ok(out)
}

/// Returns the length of a file and the time of its last change.
fn stamp(path: &Path) -> Value {
    let Ok(metadata) = std::fs::metadata(path) else { return Value::Null };
    let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    json!([path.display().to_string(), metadata.len(), changed.map(|time| time.as_nanos().to_string())])
}

fn weight_files(dir: &Path) -> Vec<Value> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|ending| ending == "safetensors")).collect();
    files.sort();
    files.iter().map(|path| stamp(path)).collect()
}
