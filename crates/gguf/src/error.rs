//! The error of this crate.

use std::io;
use std::path::PathBuf;

/// Result of this crate.
pub type Result<T, E = GgufError> = std::result::Result<T, E>;

/// A file that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The system could not open, read or write the file.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is malformed or unsupported.
    #[error("{path}: {what}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Failure, with got and expected.
        what: String,
    },
    /// Values cannot be written as requested.
    #[error("{path}: tensor {tensor}: {what}", path = path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Failure, with got and expected.
        what: String,
    },
}

impl GgufError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.into(), source }
    }
}
