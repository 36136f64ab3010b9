//! Display of runs: a page on this machine, which is live while the run trains and stays available afterwards; a report in one
//! file; and the trackers that receive the numbers of a run.
//!
//! The page reads everything from the files of the run directory. A page that is opened late shows the same as one that was open
//! from the start, and a run serves its own page with the same code.
//!
//! ```text
//! metrics.jsonl ──► /api/curves   (columns, thinned) ─────────┐
//! events.jsonl ──► /api/marks     (checkpoints, problems) ────┤
//! rollouts/, tokens/ ──► /api/steps, groups, group, tokens ──┼──► the page (src/page): charts, viewer, evaluations, settings
//! rollouts/ ──► catalogue ──► /api/catalogue, spread, joint ──┤
//! eval/ ──► /api/evaluations, compare ───────────────────────┤
//! metrics, events, eval/, rollouts/ ──► /api/verdict ─────────┤
//! both ends of metrics, events, eval/ ──► /api/table ─────────┤
//! config.yaml ──► /api/runs ──────────────────────────────────┘
//! growth of metrics.jsonl ──► /api/events (server-sent): the page fetches what is new
//! ```
//!
//! # Security
//! Rows and completions are untrusted text, and a run directory may come from somebody else.
//!
//! - The server listens on loopback unless the caller gives another address, accepts only names of this machine in `Host`, and requires a
//!   random token of 128 bits in each URL. It only reads files, and [`omnigrpo_http`] limits what clients can send to it. A run that serves its own page also takes requests
//!   to stop and to save: a `POST` with the token in a header and the origin of the page.
//! - The page fetches nothing from other servers. Scripts and styles are embedded in the binary, and the content security policy
//!   of the page allows no others. The page sets text, never markup.
//! - A media file is named by its place in a record (`step`, `group`, index), never by a path. The recorded path must be the path
//!   of the file itself (no link, no `..`), and the first bytes of the file must be those of a picture, clip or sound.
//! - Logs are read by line with an index of offsets. The size of a line, the size of a response and the time of a search are
//!   limited.

mod assets;
mod board;
mod catalogue;
mod course;
mod curves;
mod error;
mod evaluations;
mod index;
mod marks;
mod media;
mod package;
mod plot;
mod prometheus;
mod report;
mod rollouts;
mod run;
mod server;
mod stamp;
mod table;
mod tensorboard;
mod terminal;
mod verdict;

pub use board::Board;
pub use error::Error;
pub use omnigrpo_http::Place;
pub use package::{Package, PackageRun, Packaged};
pub use prometheus::Prometheus;
pub use report::{Report, curves, report};
pub use server::{Action, Controls, Server};
pub use tensorboard::TensorBoard;
pub use verdict::{Example, Kind, Measure, Measured, Verdict, verdict, verdicts};
