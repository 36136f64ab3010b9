//! Errors of downloads and uploads.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Why something could not be fetched or sent. No message holds a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// Not an address that can be asked.
    #[error("{url}: not a usable address: {what}")]
    Address {
        /// The address.
        url: String,
        /// Problem of the address.
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
    #[error("{url}: no connection, or it broke")]
    Network {
        /// The address.
        url: String,
        /// Error of the system.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An answer that says no.
    #[error("{url}: the server answers with status {status}")]
    Status {
        /// The address.
        url: String,
        /// The status.
        status: u16,
    },
    /// An address to send to that holds no longer; a new one can be asked for.
    #[error("{url}: the storage answers with status {status}")]
    Expired {
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
    #[error("cannot write {}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A file to send cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Where.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The hub has no such repository, or does not show it.
    #[error("the hub {endpoint} has no {kind} `{name}` at revision `{revision}`")]
    NoRepo {
        /// The hub.
        endpoint: String,
        /// Model or dataset.
        kind: &'static str,
        /// The repository.
        name: String,
        /// The branch, tag or commit.
        revision: String,
    },
    /// Nobody is named who could push.
    #[error("the hub {endpoint} takes models from accounts only; set HF_TOKEN to a token that may write")]
    NoToken {
        /// The hub.
        endpoint: String,
    },
    /// The hub refuses, with its reason.
    #[error("{url}: the hub answers with status {status}: {what}")]
    Refused {
        /// The address.
        url: String,
        /// The status.
        status: u16,
        /// The hub's words.
        what: String,
    },
    /// Everybody can read what only some should.
    #[error("the repository `{name}` of the hub {endpoint} is there and public, expected a private one")]
    Public {
        /// The hub.
        endpoint: String,
        /// The repository.
        name: String,
    },
    /// The hub wants an account, or another one.
    #[error(
        "the hub {endpoint} does not give `{name}` (status {status}): {}",
        if *with_token { "the account of the token may not read it; ask for access on its page" }
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
        /// Problem of the answer.
        what: String,
    },
    /// A dataset in another form.
    #[error(
        "the dataset `{name}` has no parquet tables (its files: {files}); fetch it and give its files as rows"
    )]
    NoTables {
        /// The dataset.
        name: String,
        /// Files of the repository.
        files: String,
    },
    /// A dataset without the split that was asked for, or with several of that name.
    #[error("the dataset `{name}` has no single split `{wanted}`; it has {found}")]
    NoSplit {
        /// The dataset.
        name: String,
        /// Requested part or split.
        wanted: String,
        /// Available ones, as `PART/SPLIT`.
        found: String,
    },
    /// A model without weights in the one format that is read.
    #[error(
        "the model `{name}` has no safetensors weights (its files: {files}); pickled weights are not read"
    )]
    NoWeights {
        /// The model.
        name: String,
        /// Files of the repository.
        files: String,
    },
}

impl FetchError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn read(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Read { path, source }
    }

    /// An error of the client, which may carry one of ours.
    pub(crate) fn of(url: &str, error: ureq::Error) -> Self {
        let source = match error {
            ureq::Error::Other(inner) => match inner.downcast::<Self>() {
                Ok(ours) => return *ours,
                Err(other) => other,
            },
            ureq::Error::BadUri(what) => return Self::Address { url: url.to_owned(), what },
            ureq::Error::Http(error) => {
                return Self::Address { url: url.to_owned(), what: error.to_string() };
            }
            other => other.into(),
        };
        Self::Network { url: url.to_owned(), source }
    }

    /// Whether the same request may work a moment later.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Network { .. } | Self::Expired { .. } => true,
            // 409 and 412: somebody else has changed the repository meanwhile.
            Self::Status { status, .. } | Self::Refused { status, .. } => {
                matches!(status, 408 | 409 | 412 | 429 | 500..)
            }
            _ => false,
        }
    }
}
