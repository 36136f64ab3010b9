//! Errors of operations.

/// Error of an operation. An operation that fails has not written to its arguments.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Sizes that do not match.
    #[error("{op}: {what}")]
    Shape {
        /// Name of the operation, with the name of the weight if there is one.
        op: String,
        /// Actual and expected sizes.
        what: String,
    },
    /// Operands on different devices.
    #[error("{op}: one operand is on {got}, the others are on {expected}; move it first")]
    Device {
        op: &'static str,
        /// Device of the operand.
        got: crate::Device,
        /// Device on which the operation runs.
        expected: crate::Device,
    },
    /// A weight that does not support the requested operation.
    #[error("weight {name}: {what}")]
    Weight {
        name: String,
        /// The request, and what the weight supports instead.
        what: String,
    },
    /// Failure of a GPU or its driver.
    #[error(transparent)]
    Gpu(#[from] omnigrpo_gpu::Error),
    /// Failure of the engine between ranks.
    #[error(transparent)]
    Ranks(#[from] omnigrpo_ranks::Error),
    /// File for the optimizer's state that could not be created.
    #[error("a file of {bytes} bytes for the optimizer's state could not be created in {}: {source}", .folder.display())]
    StateFile {
        /// Folder of the file.
        folder: std::path::PathBuf,
        /// Size of the file.
        bytes: u64,
        source: std::io::Error,
    },
    /// Invalid use of a tape.
    #[error("tape: {what}")]
    Tape {
        /// Cause, with the actual and expected state.
        what: String,
    },
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn shape(op: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Shape { op: op.into(), what: what.into() }
    }
}
