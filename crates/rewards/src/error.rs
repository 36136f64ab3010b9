//! Errors of this crate: the failure, the received value, the expected value and advice.

use std::time::Duration;

use omnigrpo_guard::names::nearest;

use crate::RewardOptions;

omnigrpo_guard::settings! {
    struct RewardOptions {
        ACCURACY_MODE = accuracy_mode, FORMAT_MODE = format_mode, MAX_COMPLETION_TOKENS = max_completion_tokens,
    }
}

/// Reason why completions could not be scored or rewards could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RewardError {
    /// Unknown name of a reward.
    #[error(
        "unknown reward `{name}`{hint}; known: {known}, or the directory of a reward model, cmd:\"program arguments\", FILE.py:FUNCTION, http(s)://…, judge:http(s)://…, rubric:FILE@http(s)://…"
    )]
    UnknownReward {
        /// Requested name.
        name: String,
        /// " (did you mean `x`?)", or empty.
        hint: String,
        /// All known names.
        known: String,
    },
    /// Unknown value of an option.
    #[error("{option}: unknown value `{value}`{hint}; known: {known}")]
    UnknownValue {
        /// The option.
        option: &'static str,
        /// Received value.
        value: String,
        /// " (did you mean `x`?)", or empty.
        hint: String,
        /// Available names.
        known: String,
    },
    /// Unreadable file of the counts of a run's references.
    #[error(
        "the run's document frequencies cannot be read from {}; remove the file to count the references of the \
         evaluated rows instead", path.display()
    )]
    Corpus {
        /// The file.
        path: std::path::PathBuf,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No reward was named.
    #[error("no reward given; name at least one, for example `accuracy`")]
    NoRewards,
    /// Two rewards with the same metric name.
    #[error("reward `{name}` is given twice; rename one of them with `name=spec`")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// Weights that do not match the rewards.
    #[error("reward weights {weights:?} do not match the rewards [{}]; expected one finite number for each reward", names.join(", "))]
    Weights {
        /// Received weights.
        weights: Vec<f64>,
        /// The rewards.
        names: Vec<String>,
    },
    /// A setting that a reward cannot use.
    #[error("reward `{reward}`: {what}")]
    Setting {
        /// The reward.
        reward: String,
        /// Problem and advice.
        what: String,
    },
    /// A row that a reward cannot score.
    #[error("reward `{reward}`, row {row}: {what}")]
    Row {
        /// The reward.
        reward: String,
        /// The row.
        row: String,
        /// Problem and advice.
        what: String,
    },
    /// The program of a reward cannot be started.
    #[error("reward `{reward}`: cannot start `{program}`; is it installed and on PATH?")]
    NotStarted {
        /// The reward.
        reward: String,
        /// Program of the reward.
        program: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Failure of a reward's own model or files.
    #[error("reward `{reward}` failed")]
    Failed {
        /// The reward.
        reward: String,
        /// Cause of the failure.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Wrong number of values.
    #[error(
        "reward `{reward}` returned {got} value(s) for {expected} completions; expected one value for each"
    )]
    Count {
        /// The reward.
        reward: String,
        /// Number of returned values.
        got: usize,
        /// Number of completions.
        expected: usize,
    },
    /// A value that is not finite or is outside the declared range.
    #[error("reward `{reward}`, row {row}: got {value}, expected a finite number in {low}..={high} or none")]
    Value {
        /// The reward.
        reward: String,
        /// The row.
        row: String,
        /// Received value.
        value: f64,
        /// Lower end of the declared range.
        low: f64,
        /// Upper end of the declared range.
        high: f64,
    },
    /// A panic in a reward.
    #[error("reward `{reward}` panicked at row {row}: {what}")]
    Panicked {
        /// The reward.
        reward: String,
        /// The row.
        row: String,
        /// Message of the panic.
        what: String,
    },
    /// A program or endpoint that did not answer in time.
    #[error(
        "reward `{reward}`: no answer within {limit:?} for rows {rows}; increase the time limit or make the reward faster"
    )]
    TimedOut {
        /// The reward.
        reward: String,
        /// Rows of the request.
        rows: String,
        /// Time limit.
        limit: Duration,
    },
    /// A program or endpoint that failed in all attempts.
    #[error("reward `{reward}` failed {attempts} time(s) for rows {rows}; last failure: {what}")]
    External {
        /// The reward.
        reward: String,
        /// Rows of the request.
        rows: String,
        /// Number of attempts.
        attempts: u32,
        /// Last failure.
        what: String,
    },
}

/// Returns " (did you mean `x`?)" with the known name most similar to `got`, or an empty text if none is similar.
pub(crate) fn suggestion<'a>(got: &str, known: impl Iterator<Item = &'a str>) -> String {
    nearest(got, known).map_or_else(String::new, |name| format!(" (did you mean `{name}`?)"))
}
