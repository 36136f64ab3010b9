//! The one error type of this crate.

/// Why an advantage or a loss could not be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Groups without a completion.
    #[error("advantage: got 0 completions per prompt, expected at least 1")]
    EmptyGroups,
    /// The rows do not divide into whole groups.
    #[error("{what}: got {rows} rows, expected a multiple of the group size {group_size}")]
    PartialGroup {
        /// The computation that failed.
        what: &'static str,
        /// Number of rows given.
        rows: usize,
        /// Rows per group.
        group_size: usize,
    },
    /// A slice has the wrong number of entries.
    #[error("{what}: got {got} entries, expected {expected} ({per})")]
    Length {
        /// The slice.
        what: &'static str,
        /// Number of its entries.
        got: usize,
        /// The number it should have.
        expected: usize,
        /// Unit of one entry.
        per: &'static str,
    },
    /// A reward or weight is NaN or infinite.
    #[error(
        "{what}: got {value} at row {row}, expected a finite number; a reward that does not apply is None"
    )]
    NonFiniteReward {
        /// Which reward or weight.
        what: String,
        /// Row (prompt-major), or index of the weight.
        row: usize,
        /// The value.
        value: f64,
    },
    /// A per-token or per-completion input of the loss is NaN or infinite.
    #[error(
        "loss: {what} of completion {completion}, token {token} is {value}, expected a finite number; \
         the forward pass that produced it has overflowed or its weights are damaged"
    )]
    NonFinite {
        /// Which input.
        what: &'static str,
        /// Completion within the batch, from 0.
        completion: usize,
        /// Token within the completion, from 0.
        token: usize,
        /// The value.
        value: f64,
    },
    /// The loss itself overflowed although every input was finite.
    #[error(
        "loss: the {what} of completion {completion} is {value} with finite inputs; lower beta or the rewards"
    )]
    Overflow {
        /// Which term.
        what: &'static str,
        /// Completion within the batch, from 0.
        completion: usize,
        /// The value.
        value: f64,
    },
    /// The recipe needs an input that the batch does not carry.
    #[error("loss: {needed_by} needs {what}, but the batch has none; {remedy}")]
    MissingInput {
        /// The slice that is missing.
        what: &'static str,
        /// The field that needs it.
        needed_by: &'static str,
        /// Advice.
        remedy: &'static str,
    },
    /// A number of the loss plan is outside its range.
    #[error("loss: {setting} is {value}, expected {expected}")]
    Setting {
        /// The field of the plan, such as `surrogate.high`.
        setting: &'static str,
        /// The value given.
        value: f64,
        /// The range.
        expected: &'static str,
    },
    /// The tokens or completions of one batch exceed those its normalizer was made for.
    #[error(
        "loss: the batch has {got} {unit}, but the normalizer was made for {expected}; make it from all completions \
         of the optimizer step"
    )]
    Normalizer {
        /// Tokens or completions.
        unit: &'static str,
        /// Number in the batch.
        got: usize,
        /// Number in the normalizer.
        expected: usize,
    },
}
