//! Errors of this crate.

/// Reason why an advantage or a loss could not be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Group size of 0.
    #[error("advantage: got 0 completions per prompt, expected at least 1")]
    EmptyGroups,
    /// Number of rows that is not a multiple of the group size.
    #[error("{what}: got {rows} rows, expected a multiple of the group size {group_size}")]
    PartialGroup { what: &'static str, rows: usize, group_size: usize },
    /// Slice with the wrong number of entries.
    #[error("{what}: got {got} entries, expected {expected} ({per})")]
    Length {
        /// Name of the slice.
        what: &'static str,
        got: usize,
        expected: usize,
        /// Meaning of one entry.
        per: &'static str,
    },
    /// Reward or weight that is NaN or infinite.
    #[error(
        "{what}: got {value} at row {row}, expected a finite number; a reward that does not apply is None"
    )]
    NonFiniteReward {
        /// Name of the reward or weight.
        what: String,
        /// Row (prompt-major), or index of the weight.
        row: usize,
        value: f64,
    },
    /// Per-token or per-completion input of the loss that is NaN or infinite.
    #[error(
        "loss: {what} of completion {completion}, token {token} is {value}, expected a finite number; \
         the forward pass that produced it has overflowed or its weights are damaged"
    )]
    NonFinite {
        /// Name of the input.
        what: &'static str,
        /// Completion within the batch, from 0.
        completion: usize,
        /// Token within the completion, from 0.
        token: usize,
        value: f64,
    },
    /// Loss term or gradient that overflowed although every input was finite.
    #[error(
        "loss: the {what} of completion {completion} is {value} with finite inputs; lower beta or the rewards"
    )]
    Overflow {
        /// Name of the term.
        what: &'static str,
        /// Completion within the batch, from 0.
        completion: usize,
        value: f64,
    },
    /// Input that the recipe needs and the batch lacks.
    #[error("loss: {needed_by} needs {what}, but the batch has none; {remedy}")]
    MissingInput {
        /// Name of the missing slice.
        what: &'static str,
        /// Setting that needs it.
        needed_by: &'static str,
        remedy: &'static str,
    },
    /// Setting outside its range.
    #[error("loss: {setting} is {value}, expected {expected}")]
    Setting {
        /// Name of the setting, such as `surrogate.high`.
        setting: &'static str,
        value: f64,
        /// Accepted range.
        expected: &'static str,
    },
    /// Batch with more tokens or completions than its normalizer was created for.
    #[error(
        "loss: the batch has {got} {unit}, but the normalizer was created for {expected}; create it from all \
         completions of the optimizer step"
    )]
    Normalizer {
        /// `"tokens"`, `"tokens kept"` or `"completions"`.
        unit: &'static str,
        got: usize,
        expected: usize,
    },
}
