//! The embedded demo: a small checkpoint and a generated visual task, so that users can try training without downloading
//! anything.
//!
//! - [`generate`] writes a dataset of pictures and short clips with questions; the same seed gives the same bytes.
//! - [`talking`] writes clips of a speaking face, for models that also hear.
//! - [`write_model`] writes the embedded checkpoint (Qwen2.5-VL architecture) as a directory in the published layout.
//!
//! This crate does not depend on tensors or training. Other crates read its files like any user's checkpoint and dataset.

mod dataset;
mod draw;
mod error;
mod model;
mod question;
mod random;
pub mod talking;

pub use dataset::{Manifest, Sizes, Split, generate};
pub use error::DemoError;
pub use model::{MODEL_FILES, write_model};
pub use question::{Form, Kind};
