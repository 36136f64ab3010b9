//! Errors of a whole dataset ([`DataError`], fatal) and of a single row ([`RowError`], which only loses that row).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_guard::names::{nearest, shown};
use omnigrpo_guard::{MachineFailure, Setting};
use omnigrpo_text::{MediumKind, TextError};
use serde_json::Value;

use crate::{ColumnNames, ReadOptions, Roots};

omnigrpo_guard::settings! {
    struct ColumnNames { PROMPT = prompt, SOLUTION = solution, IMAGE = image, VIDEO = video, AUDIO = audio }
    struct ReadOptions { FETCH = fetch, QUESTION = question }
    struct Roots { IMAGES = images, VIDEOS = videos, AUDIOS = audios }
}

/// Error that makes a whole dataset unusable, such as a wrong setting, a missing file or a file of the wrong kind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// Failure to read or write.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// Attempted action.
        action: &'static str,
        /// File on which the action failed.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// File whose name and first character match no known format.
    #[error("{}: unknown dataset format: got {got}, expected a .jsonl file (one JSON object per line), a .json file (an array of objects, or as .jsonl), a .csv, .tsv or .parquet file, a folder of media, or a .yaml list of such files; rename the file or write its rows as one of these", path.display())]
    UnknownFile {
        /// Path of the file.
        path: PathBuf,
        /// Type or beginning of the content.
        got: String,
    },
    /// Broken structure of a file, so that its rows cannot be separated.
    #[error("{}:{line}: {problem}", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// Problem and expected value.
        problem: String,
    },
    /// Repeated failure of the machine while rows were checked. The rows may be fine.
    #[error(
        "the machine failed while {}:{line} was checked; the row may be fine, so fix the machine and run the same command again",
        path.display()
    )]
    Machine {
        /// Annotation file.
        path: PathBuf,
        /// Line of the row that was being checked, from 1.
        line: u64,
        /// Error of the machine.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// File that was changed while in use.
    #[error("{}:{line}: the row has changed since the file was opened, so the file was written to while in use; no changed row was used. Restore the file and start again to resume, or start a new run with the new rows", path.display())]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// Line of the first changed row that was detected, from 1.
        line: u64,
    },
    /// Dataset without rows.
    #[error(
        "the dataset is empty: got 0 rows in {files}, expected at least one; check the file and its sampling rate"
    )]
    Empty {
        /// List of the files.
        files: String,
    },
    /// Name that is missing from its table.
    #[error("unknown {what} `{got}`{}; known: {known}", suggestion.as_ref().map(|name| format!(", did you mean `{name}`?")).unwrap_or_default())]
    UnknownName {
        /// Kind of the name.
        what: &'static str,
        /// Unknown name.
        got: String,
        /// Closest known name.
        suggestion: Option<String>,
        /// All known names.
        known: String,
    },
    /// Column named by the user that none of the searched rows has.
    #[error("no row of {} has the column {column}: got `{name}`, expected one of [{seen}]", path.display())]
    NoSuchColumn {
        /// Setting that names the column.
        column: Setting,
        /// Name of the column.
        name: String,
        /// Annotation file.
        path: PathBuf,
        /// Existing columns.
        seen: String,
    },
    /// Setting with an invalid value.
    #[error("{setting}: got `{got}`, expected {expected}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// Value of the setting.
        got: String,
        /// Allowed values.
        expected: &'static str,
    },
    /// Registry or list file without the expected keys.
    #[error("{}: cannot be read as a registry of datasets or a list of files", path.display())]
    Registry {
        /// Path of the file.
        path: PathBuf,
        /// Error of the parser, with line and column.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Registry or list file that is too large to be one.
    #[error("{} is too large for a list of datasets; is it an annotation file?", path.display())]
    RegistryTooLarge {
        /// Path of the file.
        path: PathBuf,
        /// Size of the file and maximum size.
        source: std::io::Error,
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
        let suggestion = nearest(got, known.clone()).map(str::to_owned);
        Self::UnknownName {
            what,
            got: shown(got).into_owned(),
            suggestion,
            known: known.collect::<Vec<_>>().join(", "),
        }
    }
}

/// Error of a single row. The other rows are not affected.
#[derive(Debug, thiserror::Error)]
#[error("row {row} ({}:{line}) cannot be used", file.display())]
pub struct RowError {
    /// Index of the row in the dataset.
    pub row: u64,
    /// Annotation file.
    pub file: Arc<Path>,
    /// Line of the row's first character, from 1.
    pub line: u64,
    /// Problem of the row.
    #[source]
    pub problem: RowProblem,
}

/// Problem of a row.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RowProblem {
    /// Index beyond the end of the dataset.
    #[error("the row does not exist: the dataset has {len} rows")]
    OutOfRange {
        /// Number of rows.
        len: u64,
    },
    /// Failure to read the row from the file.
    #[error("cannot read the row")]
    Io(#[from] std::io::Error),
    /// Row whose content changed after the file was opened.
    #[error("the row has changed since the file was opened; the file was written to while in use")]
    Changed,
    /// Row above the size limit.
    #[error("the row is longer than {limit_bytes} bytes; refer to media by path instead of embedding them")]
    TooLong {
        /// Maximum size of a row, bytes.
        limit_bytes: u32,
    },
    /// Row that is not JSON or is nested too deeply.
    #[error("not a JSON row")]
    Json(#[from] serde_json::Error),
    /// Row with a number that JSON does not have.
    #[error(
        "not a JSON row: got {word}, which JSON does not have (`json.dumps` of Python writes it for such a float); write a number or null"
    )]
    NoNumber {
        /// `NaN`, `Infinity` or `-Infinity`.
        word: &'static str,
    },
    /// JSON value of an unusable type.
    #[error("column `{column}`: got {got}, expected {expected}")]
    Column {
        /// Name of the column, with the path to the value inside it.
        column: String,
        /// Value in the row.
        got: String,
        /// Allowed values.
        expected: &'static str,
    },
    /// Row that matches none of the known formats.
    #[error("unknown row format: got columns [{columns}], expected one of {expected}")]
    UnknownFormat {
        /// Columns of the row.
        columns: String,
        /// Columns that identify a format.
        expected: String,
    },
    /// Prompt that does not end with a question.
    #[error(
        "the prompt has no {missing}: got turns [{roles}], expected a user turn at the end, or before the final answer"
    )]
    NoPrompt {
        /// Missing part.
        missing: &'static str,
        /// Roles of the prompt's turns.
        roles: String,
    },
    /// Mismatch between the placeholders `<image>`, `<video>`, `<audio>` and the row's media.
    #[error(transparent)]
    Placeholders(#[from] TextError),
    /// Mismatch between the row's media parts and its media columns.
    #[error(
        "got {got} {kind} parts without a path and {expected} entries in column `{kind}`/`{}`, expected equal numbers",
        kind.plural()
    )]
    MediaParts {
        /// Kind of the media.
        kind: MediumKind,
        /// Number of parts without their own path.
        got: usize,
        /// Number of media in the columns.
        expected: usize,
    },
    /// Medium that cannot be used.
    #[error("{kind} `{path}` cannot be used")]
    Medium {
        /// Kind of the medium.
        kind: MediumKind,
        /// Path as written in the row.
        path: String,
        /// Reason for the failure.
        #[source]
        problem: PathProblem,
    },
}

/// Reason why a medium's path cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PathProblem {
    /// Path that leaves its root through `..`, a link or an absolute path.
    #[error("the path leaves its root {}; add its folder to {}", roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(" or "), Roots::setting(*kind))]
    LeavesRoot {
        /// Kind of media that the roots are for.
        kind: MediumKind,
        /// Roots for this kind of media.
        roots: Vec<PathBuf>,
    },
    /// Folder of frames with a link that leaves the root.
    #[error("its link {} leaves the root {}; copy the linked file, or set {} to a folder that contains both", link.display(), root.display(), Roots::setting(*kind))]
    LinkLeavesRoot {
        /// Kind of media that the root is for.
        kind: MediumKind,
        /// Path of the link.
        link: PathBuf,
        /// Path of the root.
        root: PathBuf,
    },
    /// File that exists under none of the roots.
    #[error("the file does not exist; paths tried: {}", tried.iter().map(|path| shorten_path(path)).collect::<Vec<_>>().join(", "))]
    NotFound {
        /// Paths that were tried.
        tried: Vec<PathBuf>,
    },
    /// Folder that held media before and is missing now, for example because its drive is not mounted.
    #[error("its folder {} held media before and is missing or empty now; is its drive mounted?", folder.display())]
    FolderAway {
        /// Path of the folder.
        folder: PathBuf,
        /// Error of the operating system.
        source: MachineFailure,
    },
    /// Read error of the operating system.
    #[error("it cannot be read")]
    Io(#[source] std::io::Error),
    /// Medium named by an address, which the run does not allow.
    #[error("media by address are not allowed; set {FETCH}, or download the file")]
    UrlNotAllowed,
    /// Medium given by address or as bytes that could not be turned into a file.
    #[error("the medium could not be stored as a file")]
    Fetch(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Unsupported source: a `data:`, `s3:` or similar address, or bytes inside the row.
    #[error(
        "got {got}, expected a path, an http(s) address with {FETCH}, or `data:` with base64; write the medium to a file"
    )]
    Unsupported {
        /// Description of the value.
        got: String,
    },
}

/// Describes a value for a message: its type and its beginning.
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

/// Returns the start of a path that is longer than any usual one, and other paths as they are.
fn shorten_path(path: &Path) -> String {
    const USUAL: usize = 240;
    let text = path.display().to_string();
    let mut chars = text.char_indices();
    match (text.len() > USUAL).then(|| chars.nth(USUAL / 2)).flatten() {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.chars().count()),
        None => text,
    }
}

/// Returns the first 80 characters.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
