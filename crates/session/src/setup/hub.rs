//! Lookup of models and datasets by name: a directory, the local cache, the Hugging Face hub.

use std::path::{Path, PathBuf};

use anyhow::Result;
use omnigrpo_data::{MediaFolder, media_folder};
use omnigrpo_fetch::{FetchError, Hub, HubOptions, Step, cached, cached_dataset, has_weights, is_repo_name};
use omnigrpo_guard::{inside, told};
use omnigrpo_models::adapter_base;
use omnigrpo_observe::Console;

use omnigrpo_settings::Settings;
use omnigrpo_settings::environment::HubEnvironment;
use omnigrpo_settings::problem::Problem;

/// Number of names that a message lists.
const SHOWN: usize = 5;
/// Maximum size of the file with the token of the hub, bytes.
const MAX_TOKEN_BYTES: u64 = 4 << 10;

/// Returns the directory of a model given as a directory or by its name on the Hugging Face hub. Downloads a model that is not in
/// the local cache.
pub fn named_dir(what: &str, name: &str, settings: &Settings) -> Result<PathBuf, Problem> {
    let path = PathBuf::from(name);
    if path.is_dir() {
        let adapter = adapter_base(&path).map_err(|e| Problem::from_error(&e))?;
        if let (false, Some(base)) = (path.join("config.json").is_file(), adapter) {
            return Err(Problem::usage("the directory contains an adapter, not a checkpoint")
                .at(path.display().to_string())
                .expected("the checkpoint that it was trained on, and the adapter in its own setting")
                .help(format!("--model_name_or_path {base} --adapter_name_or_path {}", path.display())));
        }
        return Ok(path);
    }
    let hub = &settings.env.hub;
    if let Some(dir) = cached(&hub.cache, name)
        && (hub.offline || has_weights(&dir))
    {
        return Ok(dir);
    }
    let missing = || {
        Problem::failure(format!("{what} was not found")).got(format!("`{name}`")).expected(format!(
            "a checkpoint directory, a model in the local cache {}, or a model on the hub {}",
            hub.cache.display(),
            hub.endpoint
        ))
    };
    if !is_repo_name(name) {
        return Err(missing().help("correct the path"));
    }
    if hub.offline {
        return Err(missing().help(
            "HF_HUB_OFFLINE is set: unset it, or run `hf download` on another machine and copy the \
             files into the local cache",
        ));
    }
    fetch(name, hub).map_err(|error| match error {
        FetchError::NoRepo { .. } | FetchError::Denied { .. } => {
            missing().got(format!("`{name}`: {}", told(&error)))
        }
        _ => missing().help(format!("the download failed: {}", told(&error))),
    })
}

/// Returns the token of the account in the environment: that of the variable, or the one that `hf auth login` has stored.
pub fn token(env: &HubEnvironment) -> Option<String> {
    let kept = || {
        let text = inside::read_named(&env.token_file, MAX_TOKEN_BYTES).ok()?;
        Some(text.trim().to_owned()).filter(|token| !token.is_empty())
    };
    env.token.clone().or_else(kept)
}

/// Returns a client of the hub for the account in the environment.
pub fn hub(env: &HubEnvironment) -> Hub {
    Hub::new(HubOptions { endpoint: env.endpoint.clone(), token: token(env), cache: env.cache.clone() })
}

/// Returns a function that shows a transfer: a line with `what`, then a bar.
pub fn progress<'a>(console: &'a Console, what: &str) -> impl FnMut(Step) + use<'a> {
    const MB: u64 = 1_000_000;
    let what = what.to_owned();
    let (mut bar, mut num_bytes) = (None, 0u64);
    move |step| match step {
        Step::Begin { num_files, num_bytes: all } if num_files > 0 => {
            let (mb, plural) = (all.div_ceil(MB), if num_files == 1 { "" } else { "s" });
            console.line(&format!("{what}: {num_files} large file{plural}, {mb} MB"));
            num_bytes = 0;
            bar = Some(console.progress("transferred, MB", mb));
        }
        Step::Begin { .. } => {}
        Step::Bytes(more) => {
            let before = num_bytes / MB;
            num_bytes += more;
            if let Some(bar) = &mut bar {
                bar.advance(num_bytes / MB - before);
            }
        }
    }
}

/// Downloads a model from the hub into the local cache, or its missing files if some are there.
fn fetch(name: &str, env: &HubEnvironment) -> Result<PathBuf, FetchError> {
    let console = Console::stderr(false);
    hub(env).download(
        name,
        "main",
        &mut progress(&console, &format!("fetching {name} from {}", env.endpoint)),
    )
}

/// Returns the table files of a split in a folder on this machine, or the files of its media with their labels.
pub fn folder_tables(folder: &Path, part: Option<&str>, split: &str) -> Result<Vec<PathBuf>, Problem> {
    let at = folder.display().to_string();
    let tables = omnigrpo_fetch::folder_tables(folder, part, split);
    if let Err(FetchError::NoTables { .. }) = tables
        && let Some(MediaFolder { files, left_out, unread }) =
            media_folder(folder, split).map_err(|error| {
                Problem::from_error(&error)
                    .at(at.clone())
                    .help("`--dataset_train_split` and `--dataset_test_split` select the split")
            })?
    {
        let few = |names: &[String]| {
            let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
            shown + if names.len() > SHOWN { ", …" } else { "" }
        };
        if !left_out.is_empty() {
            tracing::warn!(
                "{at}: left out, because other folders have names of splits: {}; move files into the folder of a split, \
                 rename folders that are classes, or name the folder of the rows",
                few(&left_out)
            );
        }
        if !unread.is_empty() {
            tracing::warn!(
                "{at}: not read beside the media: {}; if a file has the rows, name it instead of the folder",
                few(&unread)
            );
        }
        return Ok(files);
    }
    tables.map_err(|error| match error {
        FetchError::NoTables { .. } if is_saved(folder) => {
            Problem::failure("the folder holds tables of Arrow, as `save_to_disk` of `datasets` writes them")
                .at(at)
                .expected("parquet tables, or a file of rows")
                .help(format!(
                    "write a parquet table and give that one: python3 -c 'import sys, datasets as d; s = d.load_from_disk(sys.argv[1]); \
                     (s if isinstance(s, d.Dataset) else s[sys.argv[2]]).to_parquet(sys.argv[3])' {} {split} {split}.parquet",
                    quoted(folder)
                ))
        }
        FetchError::NoTables { files, .. } => Problem::failure("the folder has no parquet tables and no media")
            .at(at)
            .got(if files.is_empty() { "no files".to_owned() } else { format!("the files {files}") })
            .expected(
                "tables such as `data/train-00000-of-00001.parquet`, media with `metadata.csv` or with a folder for each class, \
                 or a file of rows",
            )
            .help("name the file of rows itself"),
        _ => Problem::failure("the folder does not have the split").at(at).got(format!("`{split}`")).help(format!(
            "{}; `--dataset_config`, `--dataset_train_split` and `--dataset_test_split` select the split",
            told(&error)
        )),
    })
}

/// Returns true for a folder that `save_to_disk` wrote, with one split or several.
fn is_saved(folder: &Path) -> bool {
    folder.join("dataset_dict.json").is_file() || folder.join("state.json").is_file()
}

/// Returns a path as a word of a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', "'\\''"))
}

/// Returns the table files of a dataset's split. Downloads them if they are not in the local cache.
pub fn tables(
    name: &str,
    part: Option<&str>,
    split: &str,
    env: &HubEnvironment,
) -> Result<Vec<PathBuf>, Problem> {
    if let Some(files) = cached_dataset(&env.cache, name, part, split, env.offline) {
        return Ok(files);
    }
    let missing = || {
        Problem::failure("the dataset was not found").got(format!("`{name}`, split `{split}`")).expected(
            format!(
                "a file of rows, a dataset in the local cache {}, or a dataset on the hub {}",
                env.cache.display(),
                env.endpoint
            ),
        )
    };
    if env.offline {
        return Err(
            missing().help(
            "HF_HUB_OFFLINE is set: unset it, name the part with `--dataset_config`, or run `hf download` on another \
             machine and copy the files into the local cache",
        )
        );
    }
    let console = Console::stderr(false);
    let what = format!("fetching {name} ({split}) from {}", env.endpoint);
    hub(env).dataset(name, part, split, &mut progress(&console, &what)).map_err(|error| match error {
        FetchError::NoSplit { .. } => missing().help(format!(
            "{}; `--dataset_config`, `--dataset_train_split` and `--dataset_test_split` select the split",
            told(&error)
        )),
        FetchError::NoRepo { .. } | FetchError::Denied { .. } | FetchError::NoTables { .. } => {
            missing().help(told(&error))
        }
        _ => missing().help(format!("the download failed: {}", told(&error))),
    })
}
