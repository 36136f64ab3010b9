//! What can go wrong while something is fetched.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Why something could not be fetched. No message holds a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// Not an address that can be asked.
    #[error("{url}: not a usable address: {what}")]
    Address {
        /// The address.
        url: String,
        /// What is wrong with it.
        what: String,
    },
    /// A host that is not on the public network.
    #[error(
        "`{host}` is {address}, an address of this machine or its network; UrlOptions::allow_private allows it"
    )]
    NotPublic {
        /// The host that was asked for, or that an answer led to.
        host: String,
        /// One of its addresses.
        address: IpAddr,
    },
    /// No connection, or it broke.
    #[error("{url}: {what}")]
    Network {
        /// The address.
        url: String,
        /// What the system answered.
        what: String,
    },
    /// An answer that says no.
    #[error("{url}: the server answers with status {status}")]
    Status {
        /// The address.
        url: String,
        /// The status.
        status: u16,
    },
    /// More bytes than are accepted.
    #[error("{url}: larger than {limit_bytes} bytes")]
    TooLarge {
        /// The address.
        url: String,
        /// The limit.
        limit_bytes: u64,
    },
    /// The cache cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// The hub has no such model, or does not show it.
    #[error("the hub {endpoint} has no model `{name}` at revision `{revision}`")]
    NoModel {
        /// The hub.
        endpoint: String,
        /// The model.
        name: String,
        /// The branch, tag or commit.
        revision: String,
    },
    /// The hub wants an account, or another one.
    #[error(
        "the hub {endpoint} does not give `{name}` (status {status}): {}",
        if *with_token { "the account of the token may not read it; ask for access on the model's page" }
        else { "it does not exist, or needs an account; set HF_TOKEN to a token of one that may read it" }
    )]
    Denied {
        /// The hub.
        endpoint: String,
        /// The model.
        name: String,
        /// The status.
        status: u16,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// An answer of the hub that makes no sense.
    #[error("{url}: {what}")]
    Answer {
        /// The address.
        url: String,
        /// What is wrong with the answer.
        what: String,
    },
    /// A model without weights in the one format that is read.
    #[error(
        "the model `{name}` has no safetensors weights (its files: {files}); pickled weights are not read"
    )]
    NoWeights {
        /// The model.
        name: String,
        /// What it has.
        files: String,
    },
}

impl FetchError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    /// An error of the client, which may carry one of ours.
    pub(crate) fn of(url: &str, error: ureq::Error) -> Self {
        let what = match error {
            ureq::Error::Other(inner) => match inner.downcast::<Self>() {
                Ok(ours) => return *ours,
                Err(other) => other.to_string(),
            },
            ureq::Error::BadUri(what) => return Self::Address { url: url.to_owned(), what },
            ureq::Error::Http(error) => {
                return Self::Address { url: url.to_owned(), what: error.to_string() };
            }
            other => other.to_string(),
        };
        Self::Network { url: url.to_owned(), what }
    }

    /// Whether the same request may work a moment later.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Network { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 429 | 500..),
            _ => false,
        }
    }
}
