//! The one error type of this crate.

use std::io;
use std::path::{Path, PathBuf};

/// Why something of a run cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// Attempted action.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// The answer of the operating system.
        source: io::Error,
    },
    /// No run where one should be.
    #[error(
        "{path} holds no run: expected a run directory with `metrics.jsonl`, or a directory of such \
         directories"
    )]
    NoRun {
        /// The directory that was named.
        path: PathBuf,
    },
    /// The page cannot be served.
    #[error("cannot serve the page on 127.0.0.1:{port}; choose another port, or 0 for a free one")]
    Serve {
        /// The port asked for.
        port: u16,
        /// The answer of the operating system.
        source: io::Error,
    },
    /// A file of a run, or one made of it, could not be read or written.
    #[error(transparent)]
    Files(#[from] omnigrpo_observe::Error),
    /// The page asked for something in words that mean nothing.
    #[error("the address asks for nothing")]
    Query(#[from] serde_urlencoded::de::Error),
    /// Something the page asked for is not there.
    #[error("{0}")]
    Missing(String),
    /// A line of a log cannot be read.
    #[error(
        "{path}, byte {offset}: no row that can be read; the file was changed or damaged after it was written"
    )]
    Damaged {
        /// The log.
        path: PathBuf,
        /// Where the line begins.
        offset: u64,
        /// Problem of the file.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::Missing(format!("{} is not there", path.display())),
            _ => Self::Io { action, path: path.to_owned(), source },
        }
    }

    pub(crate) fn missing(what: impl Into<String>) -> Self {
        Self::Missing(what.into())
    }
}
