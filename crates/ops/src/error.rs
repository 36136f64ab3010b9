//! Errors of operations.

/// An error of an operation. Nothing has been written to the arguments when one is returned.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Sizes that do not fit each other.
    #[error("{op}: {what}")]
    Shape {
        /// The operation, with the weight's name where there is one.
        op: String,
        /// Actual and expected values.
        what: String,
    },
    /// Operands on different devices.
    #[error("{op}: one operand is on {got}, the others are on {expected}; move it first")]
    Device {
        /// The operation.
        op: &'static str,
        /// Where the operand is.
        got: crate::Device,
        /// Where the operation runs.
        expected: crate::Device,
    },
    /// A weight that cannot do what was asked of it.
    #[error("weight {name}: {what}")]
    Weight {
        /// Published name.
        name: String,
        /// Request, and what is possible.
        what: String,
    },
    /// A failure of a card or its driver.
    #[error(transparent)]
    Gpu(#[from] omnigrpo_gpu::Error),
    /// A tape that was used against its order.
    #[error("tape: {what}")]
    Tape {
        /// Actual and expected values.
        what: String,
    },
}

/// The result of an operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn shape(op: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Shape { op: op.into(), what: what.into() }
    }
}
