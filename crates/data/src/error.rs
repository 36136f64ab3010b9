//! What can go wrong: with a dataset as a whole ([`DataError`], fatal) or with one of its rows ([`RowError`], costs
//! that row).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_guard::MachineFailure;
use omnigrpo_text::{MediumKind, TextError};
use serde_json::Value;

/// A dataset that cannot be used at all: a setting, a missing file, a file that is not what it should be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// Reading or writing failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// Neither the file's name nor its first character tells a known format.
    #[error("{}: unknown dataset format: got {got}, expected a .jsonl file (one JSON object per line), a .json file (an array of objects, or as .jsonl), a .parquet file, or a .yaml list of such files; convert it (`data convert`) or rename it", path.display())]
    UnknownFile {
        /// The file.
        path: PathBuf,
        /// What it is or begins with.
        got: String,
    },
    /// The file's frame is broken, so that its rows cannot be told apart.
    #[error("{}:{line}: {problem}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// What is wrong and what was expected.
        problem: String,
    },
    /// The machine failed while rows were checked, and went on failing. The rows may be good.
    #[error(
        "the machine failed at {}:{line}; this is no fault of the row, and the same command can succeed once the machine is well",
        path.display()
    )]
    Machine {
        /// The annotation file.
        path: PathBuf,
        /// Line of the row that was being checked, from 1.
        line: u64,
        /// How it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file that was written to while in use.
    #[error("{}:{line}: the row is not the one that stood there when the file was opened, so the file was written to while in use; nothing of the new text was used. Put the file back as it was and start again to resume, or start a new run with the new rows", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Line of the first row that was found changed, from 1.
        line: u64,
    },
    /// Nothing to train on.
    #[error(
        "the dataset is empty: got 0 rows in {files}, expected at least one; check the file and its sampling rate"
    )]
    Empty {
        /// The files, as a list.
        files: String,
    },
    /// A name that is not in a table.
    #[error("unknown {what} `{got}`{}; known: {known}", suggestion.as_ref().map(|name| format!(", did you mean `{name}`?")).unwrap_or_default())]
    UnknownName {
        /// Of what kind of thing.
        what: &'static str,
        /// The name.
        got: String,
        /// The closest known name.
        suggestion: Option<String>,
        /// All known names.
        known: String,
    },
    /// A column that was named and that no row looked at has.
    #[error("no row of {} has the column ColumnNames::{column}: got `{name}`, expected one of [{seen}]", path.display())]
    NoSuchColumn {
        /// The field that names it.
        column: &'static str,
        /// Its name.
        name: String,
        /// The annotation file.
        path: PathBuf,
        /// The columns that are there.
        seen: String,
    },
    /// A setting with an impossible value.
    #[error("{setting}: got `{got}`, expected {expected}")]
    Setting {
        /// Which.
        setting: &'static str,
        /// Its value.
        got: String,
        /// What is possible.
        expected: &'static str,
    },
    /// A registry or list file that does not have the expected keys.
    #[error("{}: neither a registry of datasets nor a list of files that can be read", path.display())]
    Registry {
        /// The file.
        path: PathBuf,
        /// What the parser failed with, with line and column.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A registry or list file that is too large to be one.
    #[error("{}: got {bytes} bytes, expected at most {limit_bytes}; is this an annotation file?", path.display())]
    RegistryTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
}

impl DataError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn unknown_name<'a>(
        what: &'static str,
        got: &str,
        known: impl Iterator<Item = &'a str> + Clone,
    ) -> Self {
        let distance = |name: &&str| strsim::damerau_levenshtein(name, got);
        let closest = known.clone().min_by_key(distance);
        let suggestion = closest.filter(|name| distance(name) <= name.len().max(3) / 3).map(str::to_owned);
        Self::UnknownName {
            what,
            got: got.to_owned(),
            suggestion,
            known: known.collect::<Vec<_>>().join(", "),
        }
    }
}

/// A row that cannot be used. The rows around it can.
#[derive(Debug, thiserror::Error)]
#[error("row {row} ({}:{line}) cannot be used", file.display())]
pub struct RowError {
    /// Index in the dataset.
    pub row: u64,
    /// The annotation file.
    pub file: Arc<Path>,
    /// Line of the row's first character, from 1.
    pub line: u64,
    /// What is wrong with it.
    #[source]
    pub problem: RowProblem,
}

/// What is wrong with a row.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RowProblem {
    /// The dataset has no such row.
    #[error("no such row: the dataset has {len}")]
    OutOfRange {
        /// Number of rows.
        len: u64,
    },
    /// The file could not be read at this place.
    #[error("cannot read the row")]
    Io(#[from] std::io::Error),
    /// Something else stands where the row stood when the file was opened.
    #[error(
        "the row is not the one that stood there when the file was opened; the file was written to while in use"
    )]
    Changed,
    /// Longer than a row may be.
    #[error("the row is longer than {limit_bytes} bytes; refer to media by path instead of embedding them")]
    TooLong {
        /// The limit.
        limit_bytes: u32,
    },
    /// Not JSON, or nested too deeply.
    #[error("not a JSON row")]
    Json(#[from] serde_json::Error),
    /// A JSON value with a type that cannot be used.
    #[error("column `{column}`: got {got}, expected {expected}")]
    Column {
        /// Which column, with the place inside it.
        column: String,
        /// What stands there.
        got: String,
        /// What is possible.
        expected: &'static str,
    },
    /// None of the known formats.
    #[error("unknown row format: got columns [{columns}], expected one of {expected}")]
    UnknownFormat {
        /// The row's columns.
        columns: String,
        /// The columns that tell a format.
        expected: String,
    },
    /// The prompt does not end with a question.
    #[error(
        "the prompt has no {missing}: got turns [{roles}], expected a user turn last, before the answer if there is one"
    )]
    NoPrompt {
        /// What it lacks.
        missing: &'static str,
        /// The roles of its turns.
        roles: String,
    },
    /// `<image>`, `<video>`, `<audio>` do not fit the row's media.
    #[error(transparent)]
    Placeholders(#[from] TextError),
    /// Media parts do not fit the row's media columns.
    #[error(
        "got {got} {kind} parts without a path and {expected} entries in column `{kind}`/`{kind}s`, expected equal numbers"
    )]
    MediaParts {
        /// Which kind.
        kind: MediumKind,
        /// Parts without their own path.
        got: usize,
        /// Media in the columns.
        expected: usize,
    },
    /// A medium that cannot be used.
    #[error("{kind} `{path}` cannot be used")]
    Medium {
        /// Which kind.
        kind: MediumKind,
        /// As the row names it.
        path: String,
        /// Why not.
        #[source]
        problem: PathProblem,
    },
}

/// Why a medium's path cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PathProblem {
    /// `..`, a link or an absolute path leads out of the roots.
    #[error("the path leaves its root {}; give the folder it lies in as Roots::{kind}s", roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(" or "))]
    LeavesRoot {
        /// Which kind's roots.
        kind: MediumKind,
        /// The roots.
        roots: Vec<PathBuf>,
    },
    /// A folder of frames has a link out of the root.
    #[error("its link {} leads out of {}; copy the file, or give a folder around both as Roots::{kind}s", link.display(), root.display())]
    LinkLeavesRoot {
        /// Which kind's root.
        kind: MediumKind,
        /// The link.
        link: PathBuf,
        /// The root.
        root: PathBuf,
    },
    /// No such file under any root.
    #[error("no such file; looked for {}", tried.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "))]
    NotFound {
        /// Where it was looked for.
        tried: Vec<PathBuf>,
    },
    /// The folder it lies in was there before and is not now: a drive that is away.
    #[error("its folder {} held media before and is missing or empty now; is its drive mounted?", folder.display())]
    FolderAway {
        /// The folder.
        folder: PathBuf,
        /// The answer of the system.
        source: MachineFailure,
    },
    /// The system refused.
    #[error("it cannot be read")]
    Io(#[source] std::io::Error),
    /// By address, which the run does not allow.
    #[error("media by address are off; ReadOptions::fetch fetches them, or download the file")]
    UrlNotAllowed,
    /// By address or as bytes, and there is no file of it.
    #[error("there is no file of it")]
    Fetch(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// `data:`, `s3:` and the like, or bytes inside the row.
    #[error(
        "got {got}, expected a path, an http(s) address with ReadOptions::fetch, or `data:` with base64; write the medium to a file"
    )]
    Unsupported {
        /// What it is instead.
        got: String,
    },
}

/// A value for a message: its type and its beginning.
pub(crate) fn describe(value: &Value) -> String {
    let kind = match value {
        Value::Null => return "null".to_owned(),
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "text",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    };
    let text = match value {
        Value::Array(list) => return format!("a list of {}", list.len()),
        Value::Object(map) => {
            return format!(
                "an object with keys [{}]",
                shorten(&map.keys().cloned().collect::<Vec<_>>().join(", "))
            );
        }
        other => other.to_string(),
    };
    format!("{kind} {}", shorten(&text))
}

/// The first 80 characters.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
