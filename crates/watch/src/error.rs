//! The one error type of this crate.

use std::io;
use std::path::{Path, PathBuf};

/// Reason why part of a run cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation.
    #[error("cannot {action} {path}")]
    Io {
        /// Operation that was attempted.
        action: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A directory contains no run.
    #[error(
        "{path} contains no run: expected a run directory with `metrics.jsonl`, or a directory of such \
         directories"
    )]
    NoRun {
        /// Directory that the user named.
        path: PathBuf,
    },
    /// The page cannot be served.
    #[error("cannot serve the page on {place}; choose another port, or 0 for a free one")]
    Serve {
        /// Requested address.
        place: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file of a run, or a file created from it, could not be read or written.
    #[error(transparent)]
    Files(#[from] omnigrpo_observe::Error),
    /// The query of a request cannot be parsed.
    #[error("the query of the address is invalid")]
    Query(#[from] serde_urlencoded::de::Error),
    /// The requested item does not exist.
    #[error("{0}")]
    Missing(String),
    /// A line of a log cannot be parsed.
    #[error(
        "{path}, byte {offset}: the row cannot be read; the file was changed or damaged after it was written"
    )]
    Damaged {
        /// Path of the log.
        path: PathBuf,
        /// Byte offset of the line.
        offset: u64,
        /// Parse error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::Missing(format!("{} does not exist", path.display())),
            _ => Self::Io { action, path: path.to_owned(), source },
        }
    }

    pub(crate) fn missing(what: impl Into<String>) -> Self {
        Self::Missing(what.into())
    }
}
