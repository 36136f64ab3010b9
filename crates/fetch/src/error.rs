//! Errors of downloads and uploads.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use omnigrpo_guard::Unwanted;

use crate::UrlOptions;

omnigrpo_guard::settings! {
    struct UrlOptions { ALLOW_PRIVATE = allow_private }
}

/// Error of a download or upload. No message contains a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// Address that cannot be used.
    #[error("{url}: not a usable address: {what}")]
    Address {
        /// Requested address.
        url: String,
        /// Problem of the address.
        what: String,
    },
    /// Host outside the public network.
    #[error(
        "`{host}` resolves to {address}, an address of this machine or its local network; set {ALLOW_PRIVATE} to allow it"
    )]
    NotPublic {
        /// Host of the request or of a redirect.
        host: String,
        /// One of the host's IP addresses.
        address: IpAddr,
    },
    /// Failed or broken connection.
    #[error("{url}: the connection failed")]
    Network {
        /// Requested address.
        url: String,
        /// Error of the connection.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Answer with an error status.
    #[error("{url}: the server answers with status {status}")]
    Status {
        /// Requested address.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// Upload address that has expired. The hub can issue a new one.
    #[error("{url}: the storage answers with status {status}")]
    Expired {
        /// Requested address.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// Answer above the size limit.
    #[error("{url}: larger than {limit_bytes} bytes")]
    TooLarge {
        /// Requested address.
        url: String,
        /// Maximum size, bytes.
        limit_bytes: u64,
    },
    /// File that nobody waits for any more.
    #[error(transparent)]
    Unwanted(#[from] Unwanted),
    /// Failure to write to the cache.
    #[error("cannot write {}", path.display())]
    Io {
        /// Path in the cache.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Failure to read a file for an upload.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Repository that does not exist or is not visible.
    #[error("the hub {endpoint} has no {kind} `{name}` at revision `{revision}`")]
    NoRepo {
        /// Address of the hub.
        endpoint: String,
        /// Kind of the repository: model or dataset.
        kind: &'static str,
        /// Name of the repository.
        name: String,
        /// Requested branch, tag or commit.
        revision: String,
    },
    /// Push without a token.
    #[error(
        "the hub {endpoint} accepts models only from accounts; set HF_TOKEN to a token with write access"
    )]
    NoToken {
        /// Address of the hub.
        endpoint: String,
    },
    /// Request rejected by the hub, with the hub's reason.
    #[error("{url}: the hub answers with status {status}: {what}")]
    Refused {
        /// Requested address.
        url: String,
        /// HTTP status.
        status: u16,
        /// Reason given by the hub.
        what: String,
    },
    /// Public repository where a private one was expected.
    #[error("the repository `{name}` of the hub {endpoint} exists and is public, expected a private one")]
    Public {
        /// Address of the hub.
        endpoint: String,
        /// Name of the repository.
        name: String,
    },
    /// Missing access rights: the hub requires an account, or a different one.
    #[error(
        "the hub {endpoint} denies access to `{name}` (status {status}): {}",
        if *with_token { "the token's account has no read access; request access on its page" }
        else { "it does not exist or requires an account; set HF_TOKEN to a token with read access" }
    )]
    Denied {
        /// Address of the hub.
        endpoint: String,
        /// Name of the model.
        name: String,
        /// HTTP status.
        status: u16,
        /// True if a token was sent.
        with_token: bool,
    },
    /// Invalid answer of the hub.
    #[error("{url}: {what}")]
    Answer {
        /// Requested address.
        url: String,
        /// Problem of the answer.
        what: String,
    },
    /// Dataset without parquet files.
    #[error(
        "the dataset `{name}` has no parquet tables (its files: {files}); download it and pass its files as rows"
    )]
    NoTables {
        /// Name of the dataset.
        name: String,
        /// Files of the repository.
        files: String,
    },
    /// Dataset that lacks the requested split, or has several of that name.
    #[error("the dataset `{name}` does not have exactly one split `{wanted}`; available: {found}")]
    NoSplit {
        /// Name of the dataset.
        name: String,
        /// Requested part or split.
        wanted: String,
        /// Available splits, as `PART/SPLIT`.
        found: String,
    },
    /// Model without safetensors weights.
    #[error(
        "the model `{name}` has no safetensors weights (its files: {files}); pickled weights are unsupported"
    )]
    NoWeights {
        /// Name of the model.
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

    /// Converts an error of the HTTP client, which may contain a [`FetchError`].
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

    /// Reports whether the same request may succeed after a pause.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Network { .. } | Self::Expired { .. } => true,
            // 409 and 412: another client has changed the repository in the meantime.
            Self::Status { status, .. } | Self::Refused { status, .. } => {
                matches!(status, 408 | 409 | 412 | 429 | 500..)
            }
            _ => false,
        }
    }
}
