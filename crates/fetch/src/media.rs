//! Downloader of media by `http(s)` address into the cache.
//!
//! `urls/<hash of the address>` contains the name of a file in `media/`, which starts with the hash of its content. A cached
//! medium is not requested again. These are errors: other schemes, more bytes or time than the limits, and hosts outside the
//! public network unless they are allowed. Proxies are not used, because a proxy would contact hosts without this check.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use omnigrpo_data::medium_extension;
use omnigrpo_guard::cache::own_folder;
use omnigrpo_guard::{Errand, inside, wanted};
use sha2::{Digest, Sha256};
use ureq::unversioned::transport::DefaultConnector;

use crate::public::PublicOnly;
use crate::{FetchError, check_scheme, config, hex};

/// Maximum length of a file name in the cache, bytes.
const MAX_NAME_BYTES: u64 = 1 << 10;

/// Options for fetching media.
#[derive(Debug, Clone)]
pub struct UrlOptions {
    /// Folder of the cache.
    pub cache_dir: PathBuf,
    /// Permission to contact hosts of this machine and its local network.
    pub allow_private: bool,
    /// Maximum size of a medium, bytes.
    pub max_bytes: u64,
    /// Longest time for one medium.
    pub timeout: Duration,
}

/// Client that fetches media into a cache.
#[derive(Debug)]
pub struct UrlMedia {
    agent: ureq::Agent,
    options: UrlOptions,
}

impl UrlMedia {
    /// Creates a client without fetching anything.
    pub fn new(options: UrlOptions) -> Self {
        Self { agent: agent(&options), options }
    }

    /// Returns the local file with the medium at `url`.
    ///
    /// # Errors
    /// Returns an error if the host is not allowed, does not answer or returns a status other than 200, if the medium is too
    /// large, or if the cache cannot be written.
    pub fn fetch(&self, url: &str) -> Result<PathBuf, FetchError> {
        check_scheme(url)?;
        let key = self.options.cache_dir.join("urls").join(hex(&Sha256::digest(url)));
        let folder = self.options.cache_dir.join("media");
        for folder in [key.parent().unwrap_or(&key), &folder] {
            own_folder(folder).map_err(FetchError::io(folder))?;
        }
        if let Ok(name) = inside::read_path(&key, MAX_NAME_BYTES)
            && let Ok(name) = std::str::from_utf8(&name)
            && let Some(name) = Path::new(name).file_name()
            && inside::open(&folder, name).is_ok()
        {
            return Ok(folder.join(name));
        }
        let path = match self.download(url, &folder) {
            Err(error) if error.may_pass() && wanted().is_ok() => self.download(url, &folder)?,
            other => other?,
        };
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        place(&key, |file| file.write_all(name))?;
        Ok(path)
    }

    fn download(&self, url: &str, folder: &Path) -> Result<PathBuf, FetchError> {
        let limit_bytes = self.options.max_bytes;
        let too_large = || FetchError::TooLarge { url: url.to_owned(), limit_bytes };
        // The end of an errand closes all connections of its client, so it gets one of its own.
        let errand = Errand::current();
        let agent = errand.as_ref().map_or_else(|| self.agent.clone(), |_| agent(&self.options));
        let _wait = errand.map(|errand| {
            let agent = agent.clone();
            errand.at_end(move || agent.shutdown())
        });
        let mut response = agent.get(url).call().map_err(|error| FetchError::of(url, error))?;
        let status = response.status().as_u16();
        if status != 200 {
            return Err(FetchError::Status { url: url.to_owned(), status });
        }
        let expected = response.body().content_length();
        if expected.is_some_and(|bytes| bytes > limit_bytes) {
            return Err(too_large());
        }
        let mut body = response.body_mut().with_config().limit(u64::MAX).reader();
        let mut file = tempfile::NamedTempFile::new_in(folder).map_err(FetchError::io(folder))?;
        let (mut hash, mut num_bytes, mut start) = (Sha256::new(), 0u64, Vec::new());
        let mut buffer = vec![0; 1 << 16];
        loop {
            let broken =
                |error: std::io::Error| FetchError::Network { url: url.to_owned(), source: error.into() };
            let piece = match body.read(&mut buffer).map_err(broken)? {
                0 => break,
                len => &buffer[..len],
            };
            num_bytes += piece.len() as u64;
            if num_bytes > limit_bytes {
                return Err(too_large());
            }
            if start.len() < 16 {
                start.extend_from_slice(&piece[..piece.len().min(16)]);
            }
            hash.update(piece);
            file.write_all(piece).map_err(FetchError::io(file.path()))?;
        }
        // A connection that this program has closed may look like the end of the file.
        wanted()?;
        let name = url.split(['?', '#']).next().unwrap_or(url);
        let path =
            folder.join(format!("{}.{}", hex(&hash.finalize()[..16]), medium_extension(&start, Some(name))));
        file.persist(&path).map_err(|error| FetchError::io(&path)(error.error))?;
        Ok(path)
    }
}

/// Creates a client without connecting.
fn agent(options: &UrlOptions) -> ureq::Agent {
    let config = config().proxy(None).timeout_global(Some(options.timeout)).build();
    if options.allow_private {
        ureq::Agent::new_with_config(config)
    } else {
        ureq::Agent::with_parts(config, DefaultConnector::default(), PublicOnly::default())
    }
}

/// Writes a file atomically.
pub(crate) fn place(
    path: &Path,
    write: impl FnOnce(&mut std::fs::File) -> std::io::Result<()>,
) -> Result<(), FetchError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(FetchError::io(folder))?;
    let mut builder = tempfile::Builder::new();
    // The file gets the usual mode, because several users of a machine may share a cache of the hub.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder).map_err(FetchError::io(folder))?;
    write(file.as_file_mut()).map_err(FetchError::io(path))?;
    file.persist(path).map_err(|error| FetchError::io(path)(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::testing::{Answer, server};

    fn client(folder: &Path, allow_private: bool) -> UrlMedia {
        UrlMedia::new(UrlOptions {
            cache_dir: folder.to_owned(),
            allow_private,
            max_bytes: 1000,
            timeout: Duration::from_secs(5),
        })
    }

    const PNG: &[u8] = b"\x89PNG\r\n\x1a\nand so on, long enough";

    #[test]
    fn a_medium_is_asked_for_once_and_kept_by_content() {
        let folder = tempfile::tempdir().unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        let address = server(move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
            Answer::new(200, PNG)
        });
        let media = client(folder.path(), true);
        let first = media.fetch(&format!("http://{address}/a.png?x=1")).unwrap();
        assert_eq!(std::fs::read(&first).unwrap(), PNG);
        assert_eq!(first.extension().unwrap(), "png");
        assert_eq!(media.fetch(&format!("http://{address}/a.png?x=1")).unwrap(), first);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        assert_eq!(media.fetch(&format!("http://{address}/same")).unwrap(), first);
        assert_eq!(std::fs::read_dir(folder.path().join("media")).unwrap().count(), 1);
    }

    #[test]
    fn answers_that_are_no_medium_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let media = client(folder.path(), true);
        let address = server(|request| match request.path.as_str() {
            "/large" => Answer::new(200, &[0; 1001]),
            // The answer does not state its length.
            "/endless" => Answer { headers: "X-Unknown: 1".to_owned(), ..Answer::new(200, &[0; 5000]) },
            "/gone" => Answer::new(404, b""),
            "/circle" => Answer { headers: "Location: /circle".to_owned(), ..Answer::new(302, b"") },
            _ => Answer::new(500, b""),
        });
        let error = |path: &str| media.fetch(&format!("http://{address}{path}")).unwrap_err();
        assert!(matches!(error("/large"), FetchError::TooLarge { limit_bytes: 1000, .. }));
        assert!(matches!(error("/endless"), FetchError::TooLarge { .. }));
        assert!(matches!(error("/gone"), FetchError::Status { status: 404, .. }));
        assert!(matches!(error("/broken"), FetchError::Status { status: 500, .. }));
        let circle = omnigrpo_guard::told(&error("/circle"));
        assert!(circle.contains("redirect"), "{circle}");
        assert!(matches!(media.fetch("file:///etc/passwd"), Err(FetchError::Address { .. })));
        assert!(matches!(media.fetch("http://"), Err(FetchError::Address { .. })));
        let left = std::fs::read_dir(folder.path().join("media")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "pieces of refused media are left");
    }

    #[test]
    fn this_machine_is_reached_only_where_it_is_allowed_also_by_redirect() {
        let folder = tempfile::tempdir().unwrap();
        let inner = server(|_| Answer::new(200, b"secret"));
        let refused = client(folder.path(), false).fetch(&format!("http://{inner}/")).unwrap_err();
        assert!(matches!(refused, FetchError::NotPublic { .. }), "{refused}");
        assert!(refused.to_string().contains("UrlOptions::allow_private"), "{refused}");
        for host in ["localhost", "127.1", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]"] {
            let url = format!("http://{host}:{}/", inner.port());
            assert!(client(folder.path(), false).fetch(&url).is_err(), "{host}");
        }
        // An allowed server redirects to one that is not allowed.
        let outer = server(move |_| Answer {
            headers: format!("Location: http://{inner}/"),
            ..Answer::new(302, b"")
        });
        let mut media = client(folder.path(), false);
        let only = PublicOnly { except: vec![outer.port()], ..PublicOnly::default() };
        media.agent = ureq::Agent::with_parts(config().build(), DefaultConnector::default(), only);
        let refused = media.fetch(&format!("http://{outer}/")).unwrap_err();
        assert!(matches!(refused, FetchError::NotPublic { .. }), "{refused}");
    }

    /// The server sends a file that ends when the connection does, so a download that this program ends looks complete.
    #[test]
    fn a_download_that_nobody_waits_for_ends_and_is_not_kept() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let errand = Errand::default();
        let ends = errand.clone();
        let drips = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(b"HTTP/1.1 200 X\r\nConnection: close\r\n\r\n\x89PNG").unwrap();
            std::thread::sleep(Duration::from_millis(50));
            ends.end();
            // Ends when the client closes the connection.
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).map(drop)
        });
        let folder = tempfile::tempdir().unwrap();
        let options = UrlOptions { timeout: Duration::from_secs(60), ..client(folder.path(), true).options };
        let media = UrlMedia::new(options);
        let start = std::time::Instant::now();
        let url = format!("http://{address}/x.png");
        let error = errand.run(|| media.fetch(&url)).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(20), "{error}");
        let _ = drips.join().unwrap();
        let files = std::fs::read_dir(folder.path().join("media")).unwrap().count();
        let keys = std::fs::read_dir(folder.path().join("urls")).unwrap().count();
        assert_eq!((files, keys), (0, 0));
    }

    #[test]
    fn a_server_that_says_nothing_costs_bounded_time() {
        let folder = tempfile::tempdir().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut media = client(folder.path(), true);
        media.agent =
            ureq::Agent::new_with_config(config().timeout_global(Some(Duration::from_millis(50))).build());
        let error = media.fetch(&format!("http://{}/", listener.local_addr().unwrap())).unwrap_err();
        assert!(omnigrpo_guard::told(&error).contains("timeout"), "{error:?}");
    }
}
