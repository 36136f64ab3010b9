//! The rows of a command: files, reading options, and media given by address.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use omnigrpo_data::{DataError, Dataset, DatasetSpec, Fetch, ReadOptions, Registry, Roots};
use omnigrpo_fetch::{UrlMedia, UrlOptions};

use super::hub::{folder_tables, tables};
use omnigrpo_settings::names::AllowUrls;
use omnigrpo_settings::problem::Problem;
use omnigrpo_settings::{REGISTRY, Settings, is_on_hub};

/// Returns the options for reading rows.
pub fn read_options(settings: &Settings) -> ReadOptions {
    ReadOptions {
        fetch: fetch_media(settings),
        cache_dir: Some(settings.env.cache_dir.clone()),
        // A system turn and tools need a template.
        continue_text_prompts: settings.continues_text_prompts(),
        ..settings.read.clone()
    }
}

/// Maximum size of a downloaded medium, bytes.
const MAX_URL_BYTES: u64 = 1 << 30;

/// Returns the function that downloads media by address, if the settings allow it.
fn fetch_media(settings: &Settings) -> Option<Fetch> {
    let allow_private = match settings.data.allow_urls {
        AllowUrls::Off => return None,
        AllowUrls::Public => false,
        AllowUrls::All => true,
    };
    let media = UrlMedia::new(UrlOptions {
        cache_dir: settings.env.cache_dir.clone(),
        allow_private,
        max_bytes: MAX_URL_BYTES,
        timeout: settings.prompts.media.limits.timeout,
    });
    Some(Fetch(Arc::new(move |url| Ok(media.fetch(url)?))))
}

/// Returns the rows of `--input`: `-` is standard input, and a run directory means its rollouts. With
/// `missing_media`, rows with missing media are also read.
pub fn input_rows(settings: &Settings, input: &Path, missing_media: bool) -> Result<Arc<Dataset>> {
    let input = if input == Path::new("-") { PathBuf::from("/dev/stdin") } else { input.to_owned() };
    let options = ReadOptions { missing_media, ..read_options(settings) };
    let files = if input.is_dir() { rollout_logs(&input)? } else { vec![input] };
    open_with(&DatasetSpec::from_files(&files, &settings.data.roots)?, &options)
}

/// Returns the rollout logs in a run directory, or in its directory `rollouts`, in the order of their steps.
fn rollout_logs(dir: &Path) -> Result<Vec<PathBuf>> {
    let step = |path: &Path| -> Option<u64> {
        path.file_name()?.to_str()?.strip_prefix("step-")?.strip_suffix(".jsonl")?.parse().ok()
    };
    for dir in [dir.to_owned(), dir.join("rollouts")] {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        let files = entries.flatten().filter_map(|entry| Some((step(&entry.path())?, entry.path())));
        let mut files: Vec<(u64, PathBuf)> = files.collect();
        files.sort();
        if !files.is_empty() {
            return Ok(files.into_iter().map(|(_, path)| path).collect());
        }
    }
    Err(Problem::failure("the directory has no rollouts")
        .at(dir.display().to_string())
        .expected("a file of rows, or a run directory with `rollouts/step-N.jsonl`")
        .into())
}

/// Opens the training rows.
pub fn train_data(settings: &Settings) -> Result<Arc<Dataset>> {
    let data = &settings.data;
    let roots = &data.roots;
    let mut specs = if let Some(replay) = &data.replay {
        DatasetSpec::from_files(std::slice::from_ref(replay), roots)?
    } else if !data.train_file.is_empty() {
        from_files(settings, &data.train_file, &data.train_split)?
    } else if !data.data_file_paths.is_empty() {
        DatasetSpec::from_files(&data.data_file_paths, roots)?
    } else {
        from_registry(settings, &data.dataset_use, roots)?
    };
    let modes = &settings.rewards.accuracy_modes;
    if modes.len() > 1 {
        if modes.len() != specs.len() {
            return Err(Problem::usage(
                "`accuracy_mode` and the list of training files have different lengths",
            )
            .got(format!("{} rules for {} files", modes.len(), specs.len()))
            .expected("one rule for all, or one per file, in the same order")
            .into());
        }
        for (spec, mode) in specs.iter_mut().zip(modes) {
            spec.columns.entry("reward_method").or_insert_with(|| mode.name().into());
        }
    }
    open(&specs, settings)
}

/// Returns the specs of files of rows. A dataset on the hub and a folder are replaced by their tables.
fn from_files(settings: &Settings, files: &[PathBuf], split: &str) -> Result<Vec<DatasetSpec>> {
    let roots = &settings.data.roots;
    let mut specs = Vec::new();
    for (spec, file) in DatasetSpec::from_each(files, roots)?.into_iter().zip(files) {
        let part = settings.data.config.as_deref();
        let (name, tables) = match file.to_str().filter(|_| is_on_hub(file)) {
            Some(name) => (name.to_owned(), tables(name, part, split, &settings.env.hub)?),
            None if file.is_dir() => {
                let name =
                    file.canonicalize().ok().and_then(|file| Some(file.file_name()?.to_str()?.to_owned()));
                (name.unwrap_or_default(), folder_tables(file, part, split)?)
            }
            None => {
                specs.extend(spec);
                continue;
            }
        };
        for table in tables {
            let of_table =
                |spec: &DatasetSpec| DatasetSpec { name: name.clone(), file: table.clone(), ..spec.clone() };
            specs.extend(spec.iter().map(of_table));
        }
    }
    Ok(specs)
}

/// Opens rows with the usual options.
fn open(specs: &[DatasetSpec], settings: &Settings) -> Result<Arc<Dataset>> {
    open_with(specs, &read_options(settings))
}

/// Opens rows. For a missing file, the error suggests `data convert` if that command writes such a file.
fn open_with(specs: &[DatasetSpec], options: &ReadOptions) -> Result<Arc<Dataset>> {
    let dataset = Dataset::open(specs, options).map_err(|e| match &e {
        DataError::Io { path, source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            let problem = Problem::failure("the dataset does not exist")
                .at(path.display().to_string())
                .got(source.to_string())
                .expected("a file of rows");
            let is_vivqa = path.to_string_lossy().to_lowercase().contains("vivqa");
            match is_vivqa {
                true => problem.help(format!(
                    "correct the path; rows of ViVQA-X are made by `omnigrpo data convert vivqa-x --input \
                     ViVQA-X_train.json --output {}`",
                    path.display()
                )),
                false => problem.help("correct the path"),
            }
            .into()
        }
        _ => anyhow::Error::from(e),
    })?;
    Ok(Arc::new(dataset))
}

/// Opens the evaluation rows, if any are given separately from the training rows.
pub fn eval_data(settings: &Settings) -> Result<Option<Arc<Dataset>>> {
    let data = &settings.data;
    let roots = &data.roots;
    let specs = if !data.eval_file.is_empty() {
        from_files(settings, &data.eval_file, &data.test_split)?
    } else if !data.eval_dataset_use.is_empty() {
        from_registry(settings, &data.eval_dataset_use, roots)?
    } else {
        return Ok(None);
    };
    open(&specs, settings).map(Some)
}

fn from_registry(settings: &Settings, names: &[String], roots: &Roots) -> Result<Vec<DatasetSpec>> {
    let path = settings.data.registry.as_deref().unwrap_or(Path::new(REGISTRY));
    Ok(Registry::open(path)?.select(&names.join(","), roots)?)
}
