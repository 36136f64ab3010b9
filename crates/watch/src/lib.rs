//! A run to look at: one page on this machine, live while the run trains and the same afterwards; a report in one file; and the
//! trackers that a run tells its numbers to.
//!
//! Everything is read from the files of the run directory, so a page that is opened late, or again, shows what one that was
//! open all the time shows; a run serves itself with the same code.
//!
//! ```text
//! metrics.jsonl ──► /api/metrics  (raw rows from an offset) ─┐
//! rollouts/, tokens/ ──► /api/steps, groups, group, tokens ──┼──► the page (src/page): charts, viewer, evaluations, settings
//! eval/ ──► /api/evaluations, compare ───────────────────────┤
//! config.yaml, warnings.jsonl ──► /api/runs, warnings ────────┘
//! growth of metrics.jsonl ──► /api/events (server-sent): the page fetches what is new
//! ```
//!
//! # What it is safe against
//! Rows and completions are hostile text, and a run directory may come from somebody else.
//!
//! - The server listens on loopback, answers only names of loopback in `Host`, and has a random token of 128 bits in each
//!   address. It only reads, and [`http`] bounds what anybody can send to it.
//! - Nothing is fetched from elsewhere: scripts and styles are in the binary, and the page's content security policy allows no
//!   other. The page sets text, never markup.
//! - A medium is named by its place in a record (`step`, `group`, index), never by a path. Its recorded path has to be that of
//!   the file itself (no link, no `..`), and the file has to begin as a picture, clip or sound does.
//! - Logs are read by line with an index of offsets; a line, an answer and the time of a search are bounded.

mod assets;
mod board;
mod error;
mod evaluations;
pub mod http;
mod index;
mod media;
mod plot;
mod prometheus;
mod report;
mod rollouts;
mod run;
mod server;
mod tensorboard;
mod wandb;

pub use board::Board;
pub use error::Error;
pub use prometheus::Prometheus;
pub use report::{Report, curves, report};
pub use server::Server;
pub use tensorboard::TensorBoard;
pub use wandb::{Wandb, WandbRun};
