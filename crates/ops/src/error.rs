//! Errors of operations.

/// An error of an operation, which has then written nothing to its arguments.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Sizes that do not fit each other.
    #[error("{op}: {what}")]
    Shape {
        /// Name of the operation, with the weight's name if it has one.
        op: String,
        /// Sizes, got and expected.
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
        /// Request, and what the weight supports.
        what: String,
    },
    /// Failure of a GPU or its driver.
    #[error(transparent)]
    Gpu(#[from] omnigrpo_gpu::Error),
    /// Misuse of a tape.
    #[error("tape: {what}")]
    Tape {
        /// Cause, got and expected.
        what: String,
    },
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn shape(op: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Shape { op: op.into(), what: what.into() }
    }
}
