//! Digests of everything on which the result of a run depends: weights, rows, media, files of rewards.

use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;

use omnigrpo_data::Dataset;
use omnigrpo_models::{Model, source_digest, source_digests};
use omnigrpo_ops::{Device, ParamDtype};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::error::{Result, TrainError};
use crate::policy::{ModelPlan, Policy};

/// Maximum number of bytes that are read of a reward's file. Programs are small texts.
const MAX_REWARD_FILE_BYTES: u64 = 16 << 20;

/// Name of the columns beside the conversation that are part of prompts ([`Dataset::joined_columns`]). Rows without them have no entry.
pub(crate) const JOINED: &str = "columns in the prompts";

/// Returns digests of rows, media and the given files, and the columns that are part of prompts. Does not read files that a reward's
/// file imports.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub fn digests(dataset: &Dataset, files: &[PathBuf]) -> Result<Map<String, Value>> {
    let mut out = Map::new();
    out.insert("dataset".into(), dataset.fingerprint()?.into());
    out.insert("media".into(), dataset.media_digest().into());
    let joined = dataset.joined_columns().into_iter().collect::<Vec<_>>().join(" and ");
    if !joined.is_empty() {
        out.insert(JOINED.into(), joined.into());
    }
    for path in files {
        let content = File::open(path).and_then(|file| {
            let mut content = file.metadata()?.len().to_le_bytes().to_vec();
            file.take(MAX_REWARD_FILE_BYTES).read_to_end(&mut content)?;
            Ok(content)
        });
        let content = content.map_err(TrainError::io(path))?;
        let digest: String = Sha256::digest(&content).iter().take(16).map(|b| format!("{b:02x}")).collect();
        out.insert(format!("content of {}", path.display()), digest.into());
    }
    Ok(out)
}

/// Returns what must be the same on all ranks that sample from a model: digests of its files, of rows and media, and of the given files.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub fn described(plan: &ModelPlan, dataset: &Dataset, files: &[PathBuf]) -> Result<Map<String, Value>> {
    let mut out = of_model(&Policy::Planned(Box::new(plan.clone())), None, &plan.outline_to_read()?)?;
    out.extend(digests(dataset, files)?);
    Ok(out)
}

/// Returns the directories of a model with their names in messages.
fn sources(policy: &Policy, reference: Option<&Policy>) -> Vec<(&'static str, PathBuf)> {
    let checkpoint = policy.checkpoint();
    let mut sources = vec![("the model", checkpoint.dir().to_owned())];
    if let Policy::Planned(plan) = policy {
        sources.extend(plan.adapter.clone().map(|dir| ("the adapter", dir)));
    }
    sources.extend(reference.map(|own| ("the reference", own.checkpoint().dir().to_owned())));
    for companion in checkpoint.family().format().companions() {
        sources.extend(companion.dir.map(|dir| (companion.option, dir)));
    }
    sources
}

/// Returns what [`of_model`] and [`digests`] cover, with a digest of each file and of each tensor's ends. It reads everything again, so it
/// serves only to say where inputs differ.
pub(crate) fn in_parts(
    policy: &Policy,
    reference: Option<&Policy>,
    dataset: &Dataset,
) -> Result<Map<String, Value>> {
    let mut out = Map::new();
    for (name, dir) in sources(policy, reference) {
        out.extend(
            source_digests(&dir)?
                .into_iter()
                .map(|(part, digest)| (format!("{part} of {name}"), digest.into())),
        );
    }
    for (number, (name, rows, digest)) in (1..).zip(dataset.fingerprints()?) {
        out.insert(format!("name of training file {number}"), name.into());
        out.insert(format!("rows of training file {number}"), rows.into());
        out.insert(format!("content of training file {number}"), digest.into());
    }
    Ok(out)
}

/// Returns digests of the files of a model, and the way in which the CPU multiplies with its weights.
pub(crate) fn of_model(
    policy: &Policy,
    reference: Option<&Policy>,
    outline: &Model,
) -> Result<Map<String, Value>> {
    let random = matches!(policy, Policy::Planned(plan) if plan.random.is_some());
    let mut out = Map::new();
    for (name, dir) in sources(policy, reference) {
        let digest = source_digest(&dir)?;
        // Random weights need no digest, because the seed determines them.
        if let (Some(weights), false) = (digest.weights, random) {
            out.insert(format!("weights of {name}"), weights.into());
        }
        out.insert(format!("files of {name}"), digest.files.into());
    }
    let params = || outline.params().iter().filter(|_| policy.device() == Device::Cpu);
    if let Some(param) = params().find(|param| param.dtype() != ParamDtype::F32) {
        out.insert("path of bf16 products".into(), param.arithmetic().path().name().into());
    }
    if let Some(param) = params().find(|param| matches!(param.dtype(), ParamDtype::Quantised(_))) {
        let inputs = if param.arithmetic().rounds_inputs() { "bytes" } else { "float32" };
        out.insert("activations of products with few bits".into(), inputs.into());
    }
    Ok(out)
}
