//! Downloads into local caches, and uploads.
//!
//! - [`UrlMedia`]: media of rows that are named by `http(s)` address.
//! - [`Hub`]: checkpoints and tables of the Hugging Face hub, in the layout that its Python library reads and writes, and uploads
//!   of models.
//!
//! Sizes and times are bounded. Downloaded files are never run, and no weight file is parsed here.

mod error;
mod hub;
mod media;
mod public;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testing;

pub use error::{FetchError, SETTINGS};
pub use hub::{
    Hub, HubOptions, Pushed, Step, cached, cached_dataset, folder_tables, has_weights, is_repo_name,
};
pub use media::{UrlMedia, UrlOptions};

use std::time::Duration;

/// Longest wait for a connection, and for each further piece of an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the common configuration of all clients.
fn config() -> ureq::config::ConfigBuilder<ureq::typestate::AgentScope> {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_resolve(Some(PATIENCE))
        .timeout_connect(Some(PATIENCE))
        .timeout_recv_response(Some(PATIENCE))
        .timeout_per_read(Some(PATIENCE))
        .user_agent(concat!("omnigrpo/", env!("CARGO_PKG_VERSION")))
}

/// Checks that this build supports the scheme of an address.
fn check_scheme(url: &str) -> Result<(), FetchError> {
    let what = match url.split_once("://") {
        Some(("https", _)) if !cfg!(feature = "https") => {
            "this build supports only http; build with the feature `https`"
        }
        Some(("http" | "https", _)) => return Ok(()),
        _ => "expected http:// or https://",
    };
    Err(FetchError::Address { url: url.to_owned(), what: what.to_owned() })
}

/// Formats bytes in hexadecimal, lower case.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
