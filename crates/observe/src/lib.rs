//! What a run shows and leaves behind: `metrics.jsonl`, rollout logs, progress, one line per logging window, final tables.
//!
//! The training loop hands over names and numbers. The one-line summary and the rules of [`Health`] know a few of the names;
//! nothing else here knows what they mean.
//!
//! ```text
//! step ─► PhaseTimer ─► (name, value) ─┬─► RunDir: metrics.jsonl, rollouts/, skipped.jsonl   every step
//!                                      └─► Window ─► Console, Trackers                       every logging window
//! ```
//!
//! The trackers themselves, and the page that shows a run, read what is here and live in a crate of their own.

mod activity;
mod atomic;
mod completions;
mod console;
mod debug_log;
mod error;
mod health;
mod jsonl;
mod latest;
mod lock;
mod partial;
mod phase;
mod report;
mod run_dir;
mod table;
mod text;
mod trackers;
mod window;

pub use activity::Activity;
pub use atomic::{sync_directory, write_atomic};
pub use completions::best_and_worst;
pub use console::{Block, Console, Progress, Steps, stdout_columns, summary_line};
pub use debug_log::DebugLog;
pub use error::Error;
pub use health::{Aims, Health, RULES, Rule, Warning};
pub use latest::{Latest, latest_table};
pub use lock::RunLock;
pub use partial::{Found, Partial};
pub use phase::PhaseTimer;
pub use report::{BeforeAfter, Report, sparkline};
pub use run_dir::{Continued, Existing, FinishReason, Rollout, RunDir, Skipped, Tokens, step_files};
pub use table::columns;
pub use text::{escape, escape_line, fit, span, wrap};
pub use trackers::{Event, Tracker, Trackers};
pub use window::Window;

/// A metric's name and value; `None` if there was nothing to measure. Written as `null`, as are NaN and infinities.
pub type Metric = (String, Option<f64>);

/// Whether the number of an evaluation repeats another one under another program's name.
#[must_use]
pub fn is_alias(name: &str) -> bool {
    name.starts_with("eval_") && name.ends_with("_reward") && name != "eval_reward"
}
