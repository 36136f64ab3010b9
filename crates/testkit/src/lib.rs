//! Support for the tests of several crates: goldens of `transformers` ([`models`], [`rows`]), numerical derivatives
//! ([`differences`]) and a stand-in of the Hugging Face hub ([`hub`]).
//!
//! Only tests depend on this crate. A function fails the test by a panic instead of returning an error.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

pub mod differences;
mod golden;
pub mod hub;
pub mod models;
pub mod rows;

pub use golden::golden;
pub use models::*;
