//! Client of the Hugging Face hub. It fetches checkpoints and tables into the local cache ([`Hub::download`], [`Hub::dataset`])
//! and pushes a trained model to a repository ([`Hub::push`]).
//!
//! The official client sends large files through a second protocol with a separate store. That protocol would require an
//! asynchronous runtime, a second HTTP client and a second TLS implementation, about 300 crates. The hub's older protocol, which
//! serves git and all other clients, needs none of them.

mod dataset;
mod download;
mod upload;

pub use dataset::{cached_dataset, folder_tables};
pub use download::{cached, has_weights};
pub use upload::Pushed;

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use ureq::http::Uri;

use crate::{FetchError, PATIENCE, check_scheme, config, hex};

/// Maximum size of an answer about a repository, bytes.
const MAX_LISTING_BYTES: u64 = 32 << 20;
/// Maximum size of a file other than weights, bytes.
const MAX_TEXT_BYTES: u64 = 256 << 20;
/// Maximum number of files in a repository.
const MAX_FILES: usize = 10_000;
/// Maximum number of redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// Number of attempts at one transfer. Each attempt resumes the previous one.
const ATTEMPTS: usize = 5;

/// Connection options of a [`Hub`]: endpoint, account and cache.
#[derive(Clone)]
pub struct HubOptions {
    /// Address of the hub, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Token of an account, for pushing and for models that require one. It is sent only to the endpoint.
    pub token: Option<String>,
    /// Folder of the cache, which contains `models--ORG--NAME`.
    pub cache: PathBuf,
}

/// Progress of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Start of the transfer.
    Begin {
        /// Number of files to transfer.
        num_files: usize,
        /// Number of bytes to transfer, without those of earlier attempts.
        num_bytes: u64,
    },
    /// Number of bytes transferred since the last report.
    Bytes(u64),
}

/// Client of the hub.
pub struct Hub {
    agent: ureq::Agent,
    options: HubOptions,
    /// Pause before the second attempt. Each further pause is twice as long.
    pause: Duration,
}

/// Kind of a repository.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model,
    Dataset,
}

impl Kind {
    /// Returns the plural used in paths of the hub's API.
    fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }

    fn singular(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        }
    }

    /// Returns the prefix of the repository's name in file addresses.
    fn prefix(self) -> &'static str {
        match self {
            Self::Model => "",
            Self::Dataset => "datasets/",
        }
    }

    /// Returns the folder of a repository in a cache shared with `huggingface_hub`.
    fn folder(self, cache: &Path, name: &str) -> PathBuf {
        cache.join(format!("{}--{}", self.plural(), name.replace('/', "--")))
    }
}

/// Description of a repository by the hub.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Entry>,
    #[serde(default)]
    private: bool,
}

#[derive(Deserialize, Clone)]
struct Entry {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize, Clone)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Entry {
    fn blob(&self) -> Option<&str> {
        self.lfs.as_ref().map(|lfs| lfs.sha256.as_str()).or(self.blob_id.as_deref())
    }

    fn num_bytes(&self) -> Option<u64> {
        self.lfs.as_ref().map(|lfs| lfs.size).or(self.size)
    }
}

/// Counter of consecutive failures, with a limit.
struct Patience {
    pause: Duration,
    num_failures: usize,
}

impl Patience {
    /// Waits before another attempt, longer each time. Returns the error after the last attempt, or if another attempt would not
    /// help.
    fn wait(&mut self, error: FetchError) -> Result<(), FetchError> {
        self.num_failures += 1;
        if !error.may_pass() || self.num_failures >= ATTEMPTS {
            return Err(error);
        }
        std::thread::sleep(self.pause * (1 << (self.num_failures - 1)));
        Ok(())
    }
}

/// Reports whether `text` can name a repository of the hub: `NAME` or `ORG/NAME`.
pub fn is_repo_name(text: &str) -> bool {
    let part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
            && part.len() <= 96
            && !part.contains("..")
            && !part.ends_with(['.', '-'])
    };
    text.split('/').count() <= 2 && text.split('/').all(part)
}

impl Hub {
    /// Creates a client without contacting the hub.
    pub fn new(options: HubOptions) -> Self {
        // Redirects are followed in this module: the token depends on scheme, host and port, which the client's own rules ignore.
        let config = config().max_redirects(0).timeout_per_write(Some(PATIENCE));
        let agent = ureq::Agent::new_with_config(config.build());
        let endpoint = options.endpoint.trim_end_matches('/').to_owned();
        Self { agent, options: HubOptions { endpoint, ..options }, pause: Duration::from_secs(1) }
    }

    /// Returns a counter without failures.
    fn patience(&self) -> Patience {
        Patience { pause: self.pause, num_failures: 0 }
    }

    /// Repeats an attempt if that may help, with growing pauses.
    fn with_patience<T>(&self, mut attempt: impl FnMut() -> Result<T, FetchError>) -> Result<T, FetchError> {
        let mut patience = self.patience();
        loop {
            match attempt() {
                Err(error) => patience.wait(error)?,
                done => return done,
            }
        }
    }

    /// Returns the value of the `Authorization` header.
    fn authorization(&self) -> Option<String> {
        self.options.token.as_ref().map(|token| format!("Bearer {token}"))
    }

    /// Returns the header value with the token if the address has the scheme, host and port of the endpoint.
    fn authorization_at(&self, url: &str) -> Option<String> {
        let origin = |url: &str| Origin::of(&url.parse().ok()?);
        let known = origin(&self.options.endpoint).is_some_and(|home| origin(url) == Some(home));
        self.authorization().filter(|_| known)
    }

    fn get(&self, url: &str, from: u64) -> Result<ureq::http::Response<ureq::Body>, FetchError> {
        let mut at = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            check_scheme(&at)?;
            let mut request = self.agent.get(&at);
            if let Some(authorization) = self.authorization_at(&at) {
                request = request.header("Authorization", authorization);
            }
            if from > 0 {
                request = request.header("Range", format!("bytes={from}-"));
            }
            let response = request.call().map_err(|error| FetchError::of(url, error))?;
            let to = response.headers().get("location").filter(|_| response.status().is_redirection());
            let Some(to) = to else { return Ok(response) };
            at = to.to_str().ok().and_then(|to| resolved(&at, to)).ok_or_else(|| FetchError::Answer {
                url: url.to_owned(),
                what: format!("got a redirect to {to:?}, expected an address"),
            })?;
        }
        let what = format!("got more than {MAX_REDIRECTS} redirects");
        Err(FetchError::Answer { url: url.to_owned(), what })
    }

    /// Requests the content of a repository at a revision.
    fn listing(&self, kind: Kind, name: &str, revision: &str) -> Result<Listing, FetchError> {
        let endpoint = &self.options.endpoint;
        check_scheme(endpoint)?;
        let absent = || FetchError::NoRepo {
            endpoint: endpoint.clone(),
            kind: kind.singular(),
            name: name.to_owned(),
            revision: revision.to_owned(),
        };
        if !stays_inside(revision) {
            return Err(absent());
        }
        let at = revision.replace('/', "%2F");
        let url = format!("{endpoint}/api/{}/{name}/revision/{at}?blobs=true", kind.plural());
        // A busy hub is retried patiently; a hub that does not answer is reported soon.
        let mut response = self.with_patience(|| {
            let answer = match self.get(&url, 0) {
                Err(error) if error.may_pass() => self.get(&url, 0),
                other => other,
            };
            match answer.as_ref().map(|response| response.status().as_u16()) {
                Ok(status @ (429 | 500..)) => Err(FetchError::Status { url: url.clone(), status }),
                _ => Ok(answer),
            }
        })??;
        match response.status().as_u16() {
            200 => {}
            404 => return Err(absent()),
            status @ (401 | 403) => return Err(self.denied(name, status)),
            status => return Err(FetchError::Status { url, status }),
        }
        let body = response.body_mut().with_config().limit(MAX_LISTING_BYTES);
        let text = body.read_to_string().map_err(|error| FetchError::of(&url, error))?;
        let bad = |what: String| FetchError::Answer { url: url.clone(), what };
        let listing: Listing = serde_json::from_str(&text)
            .map_err(|error| bad(format!("not a {}: {error}", kind.singular())))?;
        let num = listing.siblings.len();
        if !is_hash(&listing.sha) || num > MAX_FILES {
            return Err(bad(format!(
                "got commit `{}` with {num} files, expected a hash and at most {MAX_FILES}",
                listing.sha
            )));
        }
        Ok(listing)
    }

    fn denied(&self, name: &str, status: u16) -> FetchError {
        FetchError::Denied {
            endpoint: self.options.endpoint.clone(),
            name: name.to_owned(),
            status,
            with_token: self.options.token.is_some(),
        }
    }
}

/// Receiver of a request: scheme, host and port.
#[derive(PartialEq, Eq)]
struct Origin {
    scheme: String,
    host: String,
    port: u16,
}

impl Origin {
    fn of(uri: &Uri) -> Option<Self> {
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let default = if scheme == "https" { 443 } else { 80 };
        let host = uri.host()?.to_ascii_lowercase();
        Some(Self { scheme, host, port: uri.port_u16().unwrap_or(default) })
    }
}

/// Resolves a `Location` header against the address of the request.
fn resolved(at: &str, location: &str) -> Option<String> {
    let at: Uri = at.parse().ok()?;
    let (scheme, authority) = (at.scheme_str()?, at.authority()?);
    let location = location.split('#').next().unwrap_or_default();
    let folder = || at.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    Some(match location {
        _ if location.starts_with("http://") || location.starts_with("https://") => location.to_owned(),
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ if location.is_empty() || location.contains("://") => return None,
        _ if location.starts_with('?') => format!("{scheme}://{authority}{}{location}", at.path()),
        _ => format!("{scheme}://{authority}{}/{location}", folder()),
    })
}

fn is_hash(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn stays_inside(name: &str) -> bool {
    !name.is_empty()
        && !name.contains(['\\', '\0'])
        && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Returns the hash of a file's content in lower case: SHA-256, or with `git` the SHA-1 of the git blob.
fn hash_of(file: &mut File, git: bool) -> std::io::Result<String> {
    fn of<D: Digest>(mut hash: D, file: &mut File) -> std::io::Result<String> {
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hex(&hash.finalize())),
                len => hash.update(&buffer[..len]),
            }
        }
    }
    file.rewind()?;
    if git {
        let header = format!("blob {}\0", file.metadata()?.len());
        of(sha1::Sha1::new().chain_update(header), file)
    } else {
        of(Sha256::new(), file)
    }
}

/// Escapes a path for use in an address.
fn escaped(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte);
    name.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_resolved_as_browsers_do() {
        for (at, location, expected) in [
            ("http://a:1/x/y?z", "/b?c#d", Some("http://a:1/b?c")),
            ("https://a/x/y?z", "w", Some("https://a/x/w")),
            ("https://a/x/y?z", "?w", Some("https://a/x/y?w")),
            ("https://a/x", "//b:2/w", Some("https://b:2/w")),
            ("https://a/x", "http://b/w", Some("http://b/w")),
            ("https://a/x", "file:///etc/passwd", None),
            ("https://a/x", "", None),
        ] {
            assert_eq!(resolved(at, location).as_deref(), expected, "{at} {location}");
        }
    }

    #[test]
    fn the_token_is_for_one_origin() {
        let hub = |endpoint: &str| {
            let (endpoint, token) = (endpoint.to_owned(), Some("hf_secret".to_owned()));
            Hub::new(HubOptions { endpoint, token, cache: PathBuf::new() })
        };
        for (endpoint, url, expected) in [
            ("https://hub.example", "https://hub.example/api", true),
            ("https://hub.example", "https://HUB.example:443/api", true),
            ("https://hub.example", "http://hub.example/api", false),
            ("https://hub.example", "https://hub.example:8443/api", false),
            ("https://hub.example", "https://cdn.hub.example/api", false),
            ("https://hub.example", "https://hub.example.evil/api", false),
            ("https://hub.example", "https://hub.example@evil/api", false),
            ("http://hub.example:81/mirror", "http://hub.example:81/other", true),
            ("http://hub.example:81/mirror", "http://hub.example:80/mirror", false),
        ] {
            assert_eq!(hub(endpoint).authorization_at(url).is_some(), expected, "{endpoint} {url}");
        }
    }

    #[test]
    fn names_of_repositories() {
        for name in ["gpt2", "Qwen/Qwen2.5-VL-3B-Instruct", "a_b/c-d.e"] {
            assert!(is_repo_name(name), "{name}");
        }
        for name in ["", "a/b/c", "./a", "../a", "/a", "a/", "a b", "a/..", "-a", "a..b", "~/x"] {
            assert!(!is_repo_name(name), "{name}");
        }
    }
}
