//! The embedded default: a small checkpoint and a generated visual task, so that training can be watched without
//! downloading anything.
//!
//! - [`generate`]: a dataset of pictures and short clips with questions, the same bytes for the same seed.
//! - [`talking`]: clips of a face that speaks, for models that also hear.
//! - [`write_model`]: the embedded Qwen2.5-VL-architecture checkpoint as a directory in the published layout.
//!
//! Knows no tensors and no training: what it writes is read back like any user's checkpoint and dataset.

mod dataset;
mod draw;
mod error;
mod model;
mod question;
pub mod talking;

pub use dataset::{Manifest, Sizes, Split, generate};
pub use error::DemoError;
pub use model::{MODEL_FILES, write_model};
pub use question::{Form, Kind};
