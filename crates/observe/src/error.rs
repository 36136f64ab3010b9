//! The one error type of this crate.

use std::io;
use std::path::{Path, PathBuf};

/// Reason why a file of the run could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation.
    #[error("cannot {action} {path}; {remedy}")]
    Io {
        /// Operation that was attempted.
        action: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
        /// Advice for the user.
        remedy: &'static str,
    },
    /// A value cannot be written as JSON.
    #[error("cannot write a row of {path} as JSON")]
    Json {
        /// The file.
        path: PathBuf,
        /// Error of the serializer.
        source: serde_json::Error,
    },
    /// The output directory contains the files of another run.
    #[error(
        "the output directory {path} already contains a run ({found}); resume it, move it away, or name another directory"
    )]
    Occupied {
        /// The output directory.
        path: PathBuf,
        /// File that belongs to that run.
        found: String,
    },
    /// Another process is writing to the output directory.
    #[error("the run directory {path} is in use by {holder}; two runs cannot write one directory")]
    Locked {
        /// The output directory.
        path: PathBuf,
        /// Description of the process that uses it.
        holder: String,
    },
    /// A line in the middle of a log is damaged. An incomplete last line is expected after a crash and is not an error.
    #[error(
        "{path}:{line} is not a valid row; the file was changed or damaged after it was written; repair or remove that line"
    )]
    Damaged {
        /// Path of the log.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        /// Parse error of the line.
        source: serde_json::Error,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        let remedy = match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "choose an output directory that you may write to"
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space on that disk",
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                "a file is in the place of a directory; move it or choose another output directory"
            }
            _ => "check the path and the disk",
        };
        Self::Io { action, path: path.to_owned(), source, remedy }
    }
}
