//! Output of a run: `metrics.jsonl`, rollout logs, progress, one line per logging window, and final tables.
//!
//! The training loop passes names and numbers, and events. The one-line summary knows a few of the names; the rest of the crate treats
//! them as opaque.
//!
//! ```text
//! step ─► PhaseTimer ─► (name, value) ─┬─► RunDir: metrics.jsonl, rollouts/, skipped.jsonl   every step
//!                                      └─► Window ─► Console, Trackers                       every logging window
//! Event ─► Console ─► events.jsonl, terminal, log.txt                                         when it happens
//! ```
//!
//! The trackers themselves, and the page that shows a run, are in a separate crate, which reads the files written here.

mod activity;
mod atomic;
mod completions;
mod console;
mod debug_log;
mod error;
mod events;
mod jsonl;
mod latest;
mod lock;
mod machine;
mod partial;
mod phase;
mod report;
mod run_dir;
mod table;
mod text;
mod trackers;
mod window;

pub use activity::{Activity, StepProgress};
pub use atomic::{sync_directory, write_atomic};
pub use completions::best_and_worst;
pub use console::{Block, Console, Progress, Steps, Tone, stdout_columns, summary_line};
pub use debug_log::DebugLog;
pub use error::Error;
pub use events::{AskedBy, Event, EventRecord, TrainingProblem};
pub use latest::{Latest, latest_table};
pub use lock::RunLock;
pub use machine::{Gpu, GpuLoad, Load, Machine, Watching};
pub use partial::{Found, Partial};
pub use phase::PhaseTimer;
pub use report::{BeforeAfter, Report, sparkline};
pub use run_dir::names;
pub use run_dir::{
    Continued, EnvironmentTurn, Existing, FinishReason, Rollout, RunDir, Skipped, Tokens, replaced,
    step_files, step_of,
};
pub use table::columns;
pub use text::{escape, escape_line, fit, now, span, wrap};
pub use trackers::{Tracked, Tracker, Trackers};
pub use window::Window;

/// Commit from which the program was built.
static COMMIT: std::sync::OnceLock<&str> = std::sync::OnceLock::new();

/// Names the commit from which the program was built. The first call counts.
pub fn name_commit(commit: &'static str) {
    let _ = COMMIT.set(commit);
}

/// Returns the version of the program, with the commit from which it was built if that is known.
pub fn version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    match COMMIT.get().filter(|commit| !commit.is_empty()) {
        Some(commit) => format!("{version} ({commit})"),
        None => version.to_owned(),
    }
}

/// Name and value of a metric. The value is `None` if there was nothing to measure; `None`, NaN and infinities are written as
/// `null`.
pub type Metric = (String, Option<f64>);

/// Returns true if a number of an evaluation only repeats another one under the name that a different program uses for it.
pub fn is_alias(name: &str) -> bool {
    ["eval_accuracy_reward", "eval_format_reward", "eval_total_reward"].contains(&name)
}

/// Returns true for an evaluation metric that is shown where there is room for few numbers.
pub fn is_headline(name: &str) -> bool {
    const NAMES: [&str; 5] = ["eval_reward", "eval_accuracy", "eval_war", "eval_uar", "eval_parse_fail_rate"];
    NAMES.contains(&name) || name.starts_with("eval_pass@") || name.ends_with("/mean")
}

/// Formats the main numbers of an evaluation in one line.
pub fn evaluation_line(step: u64, metrics: &[Metric]) -> String {
    let shown = metrics
        .iter()
        .filter(|(name, _)| is_headline(name))
        .filter_map(|(name, value)| Some(format!("{} {:.3}", name.trim_start_matches("eval_"), (*value)?)));
    format!("evaluation at step {step}: {}", shown.collect::<Vec<_>>().join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_names_the_commit_of_the_build() {
        assert_eq!(version(), env!("CARGO_PKG_VERSION"));
        name_commit("0123456789ab");
        assert_eq!(version(), concat!(env!("CARGO_PKG_VERSION"), " (0123456789ab)"));
    }
}
