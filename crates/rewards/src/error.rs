//! Errors of this crate: what failed, what came, what was expected, and what to do.

use std::time::Duration;

/// Why completions could not be scored, or rewards not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RewardError {
    /// A name that no reward has.
    #[error(
        "unknown reward `{name}`{hint}; known: {known}, or the directory of a reward model, cmd:\"program arguments\", FILE.py:FUNCTION, http(s)://…, judge:http(s)://…"
    )]
    UnknownReward {
        /// Requested name.
        name: String,
        /// " (did you mean `x`?)", or empty.
        hint: String,
        /// Every name there is.
        known: String,
    },
    /// A value that an option does not have.
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
    /// A file that keeps the counts of a run's references cannot be read.
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
    /// Two rewards would share a metric name.
    #[error("reward `{name}` is given twice; give one of them another name with `name=spec`")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// Weights that do not fit the rewards.
    #[error("reward weights {weights:?} do not fit the rewards [{}]: one finite number for each is needed", names.join(", "))]
    Weights {
        /// Received weights.
        weights: Vec<f64>,
        /// The rewards.
        names: Vec<String>,
    },
    /// A setting that a reward cannot work with.
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
        /// The system's reason.
        source: std::io::Error,
    },
    /// A reward's own model or files failed.
    #[error("reward `{reward}` failed")]
    Failed {
        /// The reward.
        reward: String,
        /// With what.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The wrong number of values.
    #[error(
        "reward `{reward}` returned {got} value(s) for {expected} completions; it must return exactly one each"
    )]
    Count {
        /// The reward.
        reward: String,
        /// Values returned.
        got: usize,
        /// Completions given.
        expected: usize,
    },
    /// A value that is not finite or leaves the declared range.
    #[error("reward `{reward}`, row {row}: got {value}, expected a finite number in {low}..={high} or none")]
    Value {
        /// The reward.
        reward: String,
        /// The row.
        row: String,
        /// Received value.
        value: f64,
        /// Smallest value declared.
        low: f64,
        /// Largest value declared.
        high: f64,
    },
    /// The reward panicked.
    #[error("reward `{reward}` panicked at row {row}: {what}")]
    Panicked {
        /// The reward.
        reward: String,
        /// The row.
        row: String,
        /// Message of the panic.
        what: String,
    },
    /// A program or endpoint did not answer in time.
    #[error(
        "reward `{reward}`: no answer within {limit:?} for rows {rows}; raise the time limit or make it faster"
    )]
    TimedOut {
        /// The reward.
        reward: String,
        /// Rows of the request.
        rows: String,
        /// The limit.
        limit: Duration,
    },
    /// A program or endpoint failed for good.
    #[error("reward `{reward}` failed {attempts} time(s) for rows {rows}; the last time: {what}")]
    External {
        /// The reward.
        reward: String,
        /// Rows of the request.
        rows: String,
        /// Attempts made.
        attempts: u32,
        /// The last failure.
        what: String,
    },
}

/// " (did you mean `x`?)" for the known name nearest to `got`, if any is near.
pub(crate) fn suggestion<'a>(got: &str, known: impl Iterator<Item = &'a str>) -> String {
    let score = |name: &&str| strsim::jaro_winkler(&got.to_lowercase(), &name.to_lowercase());
    known
        .map(|name| (score(&name), name))
        .filter(|(score, _)| *score > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map_or_else(String::new, |(_, name)| format!(" (did you mean `{name}`?)"))
}
