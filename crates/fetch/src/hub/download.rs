//! Downloader of checkpoints from the hub into the local cache.
//!
//! The cache has the layout of `huggingface_hub`, so that each program finds the models that the other has fetched:
//!
//! ```text
//! models--ORG--NAME/refs/main                  the commit of a branch
//! models--ORG--NAME/snapshots/COMMIT/FILE      a link to
//! models--ORG--NAME/blobs/HASH                 the content; HASH.incomplete during the transfer
//! ```
//!
//! Two addresses of the hub are used. `/api/models/NAME/revision/REVISION?blobs=true` returns the commit, the files and their
//! hashes. `/NAME/resolve/COMMIT/FILE` returns a file, whose content is compared with its hash. A broken transfer resumes where
//! it stopped. Only the files of a checkpoint are fetched: safetensors, and the text files beside them. Pickled weights are never
//! fetched, because reading them can run code.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Entry, Hub, Kind, Listing, MAX_TEXT_BYTES, Step, escaped, hash_of, is_hash, stays_inside};
use crate::FetchError;
use crate::media::place;

/// File that lists the weight files of a checkpoint.
const INDEX: &str = "model.safetensors.index.json";

/// Returns the directory of a model in a cache shared with `huggingface_hub`, according to the reference `main`. Any program may
/// have written it.
pub fn cached(cache: &Path, name: &str) -> Option<PathBuf> {
    snapshot(&Kind::Model.folder(cache, name), "main")
}

/// Returns the directory of the commit that a repository's reference last pointed to.
pub(super) fn snapshot(repo: &Path, reference: &str) -> Option<PathBuf> {
    let revision = std::fs::read_to_string(repo.join("refs").join(reference)).ok()?;
    Some(repo.join("snapshots").join(revision.trim())).filter(|dir| dir.is_dir())
}

/// Reports whether a directory has all its weights. Another program may have fetched only a tokenizer, or one file of several.
pub fn has_weights(dir: &Path) -> bool {
    if dir.join(INDEX).is_file() {
        return indexed(dir)
            .is_some_and(|files| !files.is_empty() && files.iter().all(|file| dir.join(file).is_file()));
    }
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|file| file.file_name());
    let names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    let mut weights = names.iter().filter_map(|name| name.strip_suffix(".safetensors"));
    // Several weight files need an index.
    weights.any(|stem| !stem.contains("-of-") && dir.join(format!("{stem}.safetensors")).is_file())
}

fn is_weights(entry: &Entry) -> bool {
    entry.rfilename.ends_with(".safetensors")
}

/// Commit of a repository, with its place in the cache.
pub(super) struct Source<'a> {
    kind: Kind,
    name: &'a str,
    commit: &'a str,
    /// Cache folder of the repository.
    repo: PathBuf,
    /// Cache folder of this commit.
    pub(super) snapshot: PathBuf,
}

impl<'a> Source<'a> {
    pub(super) fn new(cache: &Path, kind: Kind, name: &'a str, commit: &'a str) -> Self {
        let repo = kind.folder(cache, name);
        Self { kind, name, commit, snapshot: repo.join("snapshots").join(commit), repo }
    }

    /// Returns the entries that the snapshot lacks. A link to a removed blob counts as missing.
    pub(super) fn missing(&self, entries: Vec<Entry>) -> Vec<Entry> {
        entries.into_iter().filter(|entry| !self.snapshot.join(&entry.rfilename).is_file()).collect()
    }

    /// Returns the number of bytes that earlier attempts have not fetched.
    pub(super) fn bytes_left(&self, entries: &[Entry]) -> u64 {
        let partial = |entry: &Entry| {
            let path =
                entry.blob().map(|blob| self.repo.join("blobs").join(blob).with_extension("incomplete"));
            path.and_then(|path| std::fs::metadata(path).ok()).map_or(0, |metadata| metadata.len())
        };
        entries.iter().map(|entry| entry.num_bytes().unwrap_or(0).saturating_sub(partial(entry))).sum()
    }

    /// Writes the commit of a reference. This is the last step, so that a partial download does not count as complete.
    pub(super) fn refer(&self, reference: &str) -> Result<(), FetchError> {
        if reference == self.commit {
            return Ok(());
        }
        place(&self.repo.join("refs").join(reference), |file| file.write_all(self.commit.as_bytes()))
    }
}

/// Returns an error if an entry would be written outside the snapshot or cannot be verified.
pub(super) fn check(entry: &Entry, max_bytes: u64) -> Result<(), FetchError> {
    let (blob, bytes) = (entry.blob().filter(|blob| is_hash(blob)), entry.num_bytes());
    if stays_inside(&entry.rfilename) && blob.is_some() && bytes.is_some_and(|bytes| bytes <= max_bytes) {
        return Ok(());
    }
    Err(FetchError::Answer {
        url: entry.rfilename.clone(),
        what: format!(
            "got {} and {}, expected a name inside the repository, a hash and a size (texts up to {MAX_TEXT_BYTES} bytes)",
            entry.blob().map_or_else(|| "no hash".to_owned(), |hash| format!("the hash `{hash}`")),
            bytes.map_or_else(|| "no size".to_owned(), |bytes| format!("{bytes} bytes")),
        ),
    })
}

impl Hub {
    /// Fetches the missing files of a model into the cache and returns the model's directory.
    ///
    /// # Errors
    /// Returns an error in these cases: the connection fails, the model does not exist or is not accessible to this account, the
    /// model has no safetensors weights, the content differs from what the hub announced, or the cache cannot be written.
    pub fn download(
        &self,
        name: &str,
        revision: &str,
        on: &mut dyn FnMut(Step),
    ) -> Result<PathBuf, FetchError> {
        let listing = self.listing(Kind::Model, name, revision)?;
        let source = Source::new(&self.options.cache, Kind::Model, name, &listing.sha);
        let (weights, texts): (Vec<Entry>, Vec<Entry>) = listing
            .siblings
            .iter()
            .filter(|entry| is_wanted(&entry.rfilename))
            .cloned()
            .partition(is_weights);
        if weights.is_empty() {
            let files: Vec<_> =
                listing.siblings.iter().take(20).map(|entry| entry.rfilename.as_str()).collect();
            return Err(FetchError::NoWeights { name: name.to_owned(), files: files.join(", ") });
        }
        weights.iter().try_for_each(|entry| check(entry, u64::MAX))?;
        texts.iter().try_for_each(|entry| check(entry, MAX_TEXT_BYTES))?;
        let texts_missing = source.missing(texts);
        // The index is one of the text files. It lists the weight files of the checkpoint.
        let all_weights_missing = source.missing(weights);
        for entry in &texts_missing {
            self.file(&source, entry, &mut |_| {})?;
        }
        let wanted = indexed(&source.snapshot);
        let weights_missing: Vec<Entry> = all_weights_missing
            .into_iter()
            .filter(|entry| belongs(&entry.rfilename, wanted.as_ref(), &listing))
            .collect();
        on(Step::Begin { num_files: weights_missing.len(), num_bytes: source.bytes_left(&weights_missing) });
        for entry in &weights_missing {
            self.file(&source, entry, &mut |bytes| on(Step::Bytes(bytes)))?;
        }
        source.refer(revision)?;
        Ok(source.snapshot)
    }

    /// Fetches one file into its blob and links it.
    pub(super) fn file(
        &self,
        source: &Source,
        entry: &Entry,
        on: &mut dyn FnMut(u64),
    ) -> Result<(), FetchError> {
        let (Some(blob), Some(expected)) = (entry.blob(), entry.num_bytes()) else { return Ok(()) };
        let Source { kind, name, commit, repo, snapshot } = source;
        let path = repo.join("blobs").join(blob);
        let file_name = escaped(&entry.rfilename);
        let url = format!("{}/{}{name}/resolve/{commit}/{file_name}", self.options.endpoint, kind.prefix());
        if !path.is_file() {
            let incomplete = path.with_extension("incomplete");
            std::fs::create_dir_all(repo.join("blobs")).map_err(FetchError::io(repo))?;
            let mut file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true)
                .open(&incomplete)
                .map_err(FetchError::io(&incomplete))?;
            // If another process is fetching the same file, this call waits and then finds it complete.
            file.lock().map_err(FetchError::io(&incomplete))?;
            if !path.is_file() {
                let have = |file: &File| file.metadata().map_or(0, |metadata| metadata.len());
                let (mut patience, mut most) = (self.patience(), have(&file));
                while let Err(error) = self.transfer(&url, name, &mut file, &incomplete, expected, on) {
                    // The transfer of a long file may be interrupted many times, as long as each attempt makes progress.
                    if have(&file) > most {
                        (patience, most) = (self.patience(), have(&file));
                    }
                    patience.wait(error)?;
                }
                let got = hash_of(&mut file, entry.lfs.is_none()).map_err(FetchError::io(&incomplete))?;
                if got != blob {
                    // The damaged part is unknown, so the file is discarded.
                    let _ = std::fs::remove_file(&incomplete);
                    let what = format!("got content with the hash {got}, expected {blob}");
                    return Err(FetchError::Answer { url, what });
                }
                file.sync_all()
                    .and_then(|()| std::fs::rename(&incomplete, &path))
                    .map_err(FetchError::io(&path))?;
            }
        }
        link(&path, &snapshot.join(&entry.rfilename), blob, entry.rfilename.split('/').count())
    }

    /// Appends the missing part of a file.
    fn transfer(
        &self,
        url: &str,
        name: &str,
        file: &mut File,
        path: &Path,
        expected: u64,
        on: &mut dyn FnMut(u64),
    ) -> Result<(), FetchError> {
        let mut have = file.seek(SeekFrom::End(0)).map_err(FetchError::io(path))?;
        if have > expected {
            have = 0;
        }
        if have < expected {
            let mut response = self.get(url, have)?;
            match response.status().as_u16() {
                206 if have > 0 => {}
                // A server without range support sends the whole file again.
                200 => have = 0,
                status @ (401 | 403) => return Err(self.denied(name, status)),
                status => return Err(FetchError::Status { url: url.to_owned(), status }),
            }
            file.set_len(have).map_err(FetchError::io(path))?;
            file.seek(SeekFrom::Start(have)).map_err(FetchError::io(path))?;
            let mut body = response.body_mut().with_config().limit(u64::MAX).reader();
            let mut buffer = vec![0; 1 << 17];
            loop {
                let broken =
                    |error: std::io::Error| FetchError::Network { url: url.to_owned(), source: error.into() };
                let len = body.read(&mut buffer).map_err(broken)?;
                if len == 0 {
                    break;
                }
                have += len as u64;
                if have > expected {
                    return Err(FetchError::TooLarge { url: url.to_owned(), limit_bytes: expected });
                }
                file.write_all(&buffer[..len]).map_err(FetchError::io(path))?;
                on(len as u64);
            }
        } else {
            file.set_len(have).map_err(FetchError::io(path))?;
        }
        if have < expected {
            let source = format!("got {have} bytes, expected {expected}").into();
            return Err(FetchError::Network { url: url.to_owned(), source });
        }
        Ok(())
    }
}

/// Reports whether a file is fetched: weights in safetensors and the text files beside them. These are settings, tokenizers,
/// templates, the licence, the model card, and the code of models that include some. The code is copied and never run, and so are the
/// voices of Qwen2.5-Omni, a pickle file.
fn is_wanted(name: &str) -> bool {
    const ENDINGS: [&str; 7] = [".safetensors", ".json", ".txt", ".jinja", ".model", ".py", ".codes"];
    let file = name.rsplit('/').next().unwrap_or(name);
    // Exports for other programs are often as large as the model.
    let foreign =
        ["onnx/", "openvino/", "coreml/", "original/"].iter().any(|folder| name.starts_with(folder));
    let hidden = name.split('/').any(|part| part.starts_with('.') && part != "..");
    !foreign
        && !hidden
        && (["LICENSE", "README.md", "spk_dict.pt"].contains(&file)
            || ENDINGS.iter().any(|ending| file.ends_with(ending)))
}

/// Returns the weight files listed in the snapshot's index, if it has one.
fn indexed(snapshot: &Path) -> Option<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let text = std::fs::read(snapshot.join(INDEX)).ok()?;
    let index: Index = serde_json::from_slice(&text).ok()?;
    Some(index.weight_map.into_values().collect())
}

/// Reports whether a weight file is part of the checkpoint. Some models are published twice, in a different number of files or
/// another precision.
fn belongs(name: &str, indexed: Option<&BTreeSet<String>>, listing: &Listing) -> bool {
    const WHOLE: &str = "model.safetensors";
    match indexed {
        _ if name.contains('/') => true,
        Some(indexed) => indexed.contains(name),
        None => name == WHOLE || listing.siblings.iter().all(|entry| entry.rfilename != WHOLE),
    }
}

/// Makes `to` a relative link to the blob, so that the cache can be moved.
fn link(blob: &Path, to: &Path, name: &str, depth: usize) -> Result<(), FetchError> {
    let folder = to.parent().unwrap_or(to);
    std::fs::create_dir_all(folder).map_err(FetchError::io(folder))?;
    #[cfg(unix)]
    let made = {
        let _ = blob;
        // The link is renamed into place atomically, because another process may have fetched the same file and be reading it.
        let new = folder.join(format!(".{name}.{}.tmp", std::process::id()));
        let _ = std::fs::remove_file(&new);
        std::os::unix::fs::symlink(format!("{}blobs/{name}", "../".repeat(depth + 1)), &new)
            .and_then(|()| std::fs::rename(&new, to))
    };
    #[cfg(not(unix))]
    let made = {
        let _ = (name, depth);
        std::fs::copy(blob, to).map(drop)
    };
    made.map_err(FetchError::io(to))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};

    use sha2::{Digest, Sha256};

    use super::super::HubOptions;
    use super::*;
    use crate::hex;
    use crate::testing::{Answer, Request, server};

    const PAUSE: Duration = Duration::from_millis(5);
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// Returns the files of a model on the hub.
    fn model() -> Vec<(&'static str, Vec<u8>)> {
        let index = json!({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}});
        vec![
            ("config.json", b"{}".to_vec()),
            ("model.safetensors.index.json", index.to_string().into_bytes()),
            ("model-1.safetensors", vec![1; 300_000]),
            ("model-2.safetensors", vec![2; 1000]),
            ("consolidated.safetensors", vec![3; 1000]),
            ("pytorch_model.bin", vec![4; 1000]),
            ("sub/tokenizer.json", b"{\"t\": 1}".to_vec()),
            ("spk_dict.pt", b"v".to_vec()),
            (".gitattributes", b"x".to_vec()),
        ]
    }

    fn listing(files: &[(&str, Vec<u8>)]) -> Value {
        let siblings: Vec<Value> = files
            .iter()
            .map(|(name, bytes)| {
                let sha = hex(&Sha256::digest(bytes));
                let git =
                    hex(&sha1::Sha1::digest([format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat()));
                let mut entry = json!({"rfilename": name, "size": bytes.len(), "blobId": git});
                if name.ends_with(".safetensors") || name.ends_with(".bin") {
                    entry["lfs"] = json!({"sha256": sha, "size": bytes.len(), "pointerSize": 100});
                }
                entry
            })
            .collect();
        json!({"id": "me/tiny", "sha": COMMIT, "siblings": siblings})
    }

    /// Starts a hub with one model and records every request. Weights have a different address, as on the real hub.
    fn hub(
        change: impl Fn(&Request, Answer) -> Answer + Send + 'static,
    ) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&asked);
        let storage = server(|request| {
            assert!(!request.headers.contains("authorization"), "the token left the hub");
            let files = model();
            let name = request.path.trim_start_matches('/');
            let (_, bytes) = files.iter().find(|(file, _)| *file == name).unwrap();
            let range = request.headers.lines().find_map(|line| line.strip_prefix("range: bytes="));
            match range.map(|range| range.trim().trim_end_matches('-').parse::<usize>().unwrap()) {
                Some(from) => Answer::new(206, &bytes[from..]),
                None => Answer::new(200, bytes),
            }
        });
        let address = server(move |request| {
            let files = model();
            let authorized = request.headers.contains("authorization: bearer secret-token");
            record.lock().unwrap().push(format!(
                "{}{}",
                request.path,
                if authorized { " +token" } else { "" }
            ));
            let prefix = format!("/me/tiny/resolve/{COMMIT}/");
            let answer = match request.path.as_str() {
                "/api/models/me/tiny/revision/main?blobs=true" => {
                    Answer::new(200, listing(&files).to_string().as_bytes())
                }
                path => match path.strip_prefix(&prefix) {
                    Some(name) if name.ends_with(".safetensors") => {
                        let headers = format!(
                            "Location: http://{}:{}/{name}\r\nContent-Length: 0",
                            // A different host, and a different port of the same host.
                            if name == "model-1.safetensors" { "localhost" } else { "127.0.0.1" },
                            storage.port()
                        );
                        Answer { headers, ..Answer::new(302, b"") }
                    }
                    Some(name) => {
                        let (_, bytes) = files.iter().find(|(file, _)| *file == name).unwrap();
                        Answer::new(200, bytes)
                    }
                    None => Answer::new(404, b""),
                },
            };
            change(request, answer)
        });
        (address, asked)
    }

    fn client(address: SocketAddr, cache: &Path, token: Option<&str>) -> Hub {
        let (endpoint, token) = (format!("http://{address}/"), token.map(str::to_owned));
        let hub = Hub::new(HubOptions { endpoint, token, cache: cache.to_owned() });
        Hub { pause: PAUSE, ..hub }
    }

    #[test]
    fn the_token_follows_redirects_within_the_endpoint_alone() {
        let folder = tempfile::tempdir().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let record = |asked: &Arc<Mutex<Vec<String>>>, request: &Request, at: &str| {
            let with = request.headers.contains("secret-token");
            asked.lock().unwrap().push(format!("{at}{} {with}", request.path));
        };
        let other = server({
            let asked = Arc::clone(&asked);
            move |request| {
                record(&asked, request, "other");
                Answer::new(200, b"elsewhere")
            }
        });
        let home = server({
            let asked = Arc::clone(&asked);
            move |request| {
                record(&asked, request, "home");
                let location = match request.path.as_str() {
                    "/renamed" => "/new/name".to_owned(),
                    "/away" => format!("http://{other}/x"),
                    "/circle" => "circle".to_owned(),
                    _ => return Answer::new(200, b"here"),
                };
                Answer {
                    headers: format!("Location: {location}\r\nContent-Length: 0"),
                    ..Answer::new(307, b"")
                }
            }
        });
        assert_eq!(home.ip(), other.ip(), "one host, two ports");
        let client = client(home, folder.path(), Some("secret-token"));
        let get = |path: &str| client.get(&format!("http://{home}{path}"), 0);
        assert_eq!(get("/renamed").unwrap().body_mut().read_to_string().unwrap(), "here");
        assert_eq!(get("/away").unwrap().body_mut().read_to_string().unwrap(), "elsewhere");
        let expected = ["home/renamed true", "home/new/name true", "home/away true", "other/x false"];
        assert_eq!(*asked.lock().unwrap(), expected);
        let error = omnigrpo_guard::told(&get("/circle").unwrap_err());
        assert!(error.contains("more than 10 redirects"), "{error}");
    }

    #[test]
    fn a_model_is_fetched_into_the_layout_of_the_python_library() {
        let folder = tempfile::tempdir().unwrap();
        let (address, asked) = hub(|_, answer| answer);
        let mut steps = Vec::new();
        let fetch = |steps: &mut Vec<Step>| {
            client(address, folder.path(), Some("secret-token"))
                .download("me/tiny", "main", &mut |step| steps.push(step))
        };
        let dir = fetch(&mut steps).unwrap();
        let repo = folder.path().join("models--me--tiny");
        assert_eq!(dir, repo.join("snapshots").join(COMMIT));
        assert_eq!(std::fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
        let files = model();
        for (name, bytes) in &files {
            let wanted = !["pytorch_model.bin", "consolidated.safetensors", ".gitattributes"].contains(name);
            assert_eq!(std::fs::read(dir.join(name)).ok(), wanted.then(|| bytes.clone()), "{name}");
        }
        let target = std::fs::read_link(dir.join("sub/tokenizer.json")).unwrap();
        assert!(target.starts_with("../../../blobs"), "{target:?}");
        let weights = std::fs::read_link(dir.join("model-2.safetensors")).unwrap();
        assert_eq!(weights, Path::new("../../blobs").join(hex(&Sha256::digest(&files[3].1))));
        assert_eq!(steps[0], Step::Begin { num_files: 2, num_bytes: 301_000 });
        let bytes: u64 =
            steps.iter().map(|step| if let Step::Bytes(bytes) = step { *bytes } else { 0 }).sum();
        assert_eq!(bytes, 301_000);
        let first = std::mem::take(&mut *asked.lock().unwrap());
        assert_eq!(first.len(), 7);
        assert!(first.iter().all(|request| request.ends_with("+token")), "{first:?}");

        // The second call requests only the listing.
        steps.clear();
        fetch(&mut steps).unwrap();
        assert_eq!(asked.lock().unwrap().len(), 1);
        assert_eq!(steps, [Step::Begin { num_files: 0, num_bytes: 0 }]);
    }

    #[test]
    fn a_broken_transfer_goes_on_where_it_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let (address, _) = hub(|_, answer| answer);
        let files = model();
        let blob = folder.path().join("models--me--tiny/blobs").join(hex(&Sha256::digest(&files[2].1)));
        std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
        std::fs::write(blob.with_extension("incomplete"), &files[2].1[..200_000]).unwrap();
        let mut steps = Vec::new();
        let dir = client(address, folder.path(), None)
            .download("me/tiny", "main", &mut |step| steps.push(step))
            .unwrap();
        assert_eq!(steps[0], Step::Begin { num_files: 2, num_bytes: 101_000 });
        assert_eq!(std::fs::read(dir.join("model-1.safetensors")).unwrap(), files[2].1);
        assert!(!blob.with_extension("incomplete").exists());
    }

    #[test]
    fn a_busy_hub_gets_time_and_a_bad_line_as_many_attempts_as_it_comes_further() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let (pieces, busy) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (sent, asked) = (Arc::clone(&pieces), Arc::clone(&busy));
        // The hub is busy four times; the file arrives in twelve pieces, each of which is interrupted.
        let (address, _) = hub(move |request, answer| {
            if request.path.contains("revision") && asked.fetch_add(1, Ordering::SeqCst) < 4 {
                return Answer::new(429, b"");
            }
            if !request.path.ends_with("model-1.safetensors") {
                return answer;
            }
            let range = request.headers.lines().find_map(|line| line.strip_prefix("range: bytes="));
            let from = range.map_or(0, |range| range.trim().trim_end_matches('-').parse().unwrap());
            sent.fetch_add(1, Ordering::SeqCst);
            let headers = format!("Content-Length: {}", 300_000 - from);
            let body = model()[2].1[from..300_000.min(from + 25_000)].to_vec();
            Answer { status: if from > 0 { 206 } else { 200 }, headers, body }
        });
        let folder = tempfile::tempdir().unwrap();
        let began = Instant::now();
        let dir = client(address, folder.path(), None).download("me/tiny", "main", &mut |_| {}).unwrap();
        assert_eq!(std::fs::read(dir.join("model-1.safetensors")).unwrap(), model()[2].1);
        assert_eq!((pieces.load(Ordering::SeqCst), busy.load(Ordering::SeqCst)), (12, 5));
        // Pauses of 1, 2, 4 and 8 units, and one unit before each further piece.
        assert!(began.elapsed() >= PAUSE * (15 + 11), "{:?}", began.elapsed());

        // A transfer without progress is abandoned after five attempts.
        let (address, asked) = hub(|request, answer| match request.path.ends_with("model-1.safetensors") {
            true => Answer::new(503, b""),
            false => answer,
        });
        let folder = tempfile::tempdir().unwrap();
        let began = Instant::now();
        let error =
            client(address, folder.path(), None).download("me/tiny", "main", &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains("status 503"), "{error}");
        let asked = asked.lock().unwrap();
        assert_eq!(asked.iter().filter(|path| path.ends_with("model-1.safetensors")).count(), 5);
        assert!(began.elapsed() >= PAUSE * 15);
    }

    #[test]
    fn content_that_is_not_what_was_announced_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (address, _) = hub(|request, answer| match request.path.ends_with("model-2.safetensors") {
            true => Answer::new(200, &[9; 1000]),
            false => answer,
        });
        let error =
            client(address, folder.path(), None).download("me/tiny", "main", &mut |_| {}).unwrap_err();
        assert!(omnigrpo_guard::told(&error).contains("expected"), "{error:?}");
        let repo = folder.path().join("models--me--tiny");
        assert!(!repo.join("refs/main").exists());
        let left = std::fs::read_dir(repo.join("blobs")).unwrap();
        assert!(left.flatten().all(|file| !file.file_name().to_string_lossy().ends_with("incomplete")));
    }

    #[test]
    fn refusals_say_what_to_do_and_never_the_token() {
        let folder = tempfile::tempdir().unwrap();
        for (status, token, expected) in [
            (404, None, "has no model `me/tiny`"),
            (401, None, "set HF_TOKEN"),
            (403, Some("secret-token"), "no read access"),
            (500, Some("secret-token"), "status 500"),
        ] {
            let (address, _) = hub(move |_, _| Answer::new(status, b""));
            let error =
                client(address, folder.path(), token).download("me/tiny", "main", &mut |_| {}).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
        }
        let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = client(gone, folder.path(), None).download("me/tiny", "main", &mut |_| {}).unwrap_err();
        assert!(matches!(error, FetchError::Network { .. }), "{error}");
    }

    #[test]
    fn listings_that_would_write_elsewhere_or_have_no_weights_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let entry = |name: &str, blob: &str| json!({"rfilename": name, "size": 3, "blobId": blob});
        let weights = entry("model.safetensors", "0123456789");
        let cases = [
            (json!([weights, entry("../../evil.json", "0123456789")]), "../../evil.json"),
            (json!([weights, entry("/etc/evil.json", "0123456789")]), "/etc/evil.json"),
            (json!([weights, entry("a.json", "../../../evil")]), "a.json"),
            (
                json!([weights, {"rfilename": "big.json", "size": 1u64 << 40, "blobId": "0123456789"}]),
                "big.json",
            ),
            (json!([entry("pytorch_model.bin", "0123456789")]), "no safetensors weights"),
            (json!({"no": "list"}), "not a model"),
        ];
        for (siblings, expected) in cases {
            let text = json!({"sha": COMMIT, "siblings": siblings}).to_string();
            let (address, _) = hub(move |_, _| Answer::new(200, text.as_bytes()));
            let error =
                client(address, folder.path(), None).download("me/tiny", "main", &mut |_| {}).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert!(!folder.path().join("models--me--tiny/blobs").exists());
    }

    #[test]
    fn a_cache_is_looked_up_as_the_python_library_keeps_it() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cached(folder.path(), "me/tiny"), None);
        let repo = folder.path().join("models--me--tiny");
        let snapshot = repo.join("snapshots/abc");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repo.join("refs")).unwrap();
        assert_eq!(cached(folder.path(), "me/tiny"), None);
        std::fs::write(repo.join("refs/main"), "abc\n").unwrap();
        assert_eq!(cached(folder.path(), "me/tiny"), Some(snapshot.clone()));
        assert!(!has_weights(&snapshot) && !has_weights(&snapshot.join("none")));
        std::fs::write(snapshot.join("model.safetensors"), b"").unwrap();
        assert!(has_weights(&snapshot));

        // One of two files is not a complete model, with or without the index that names both.
        std::fs::remove_file(snapshot.join("model.safetensors")).unwrap();
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        std::fs::write(snapshot.join(shards[0]), b"").unwrap();
        assert!(!has_weights(&snapshot));
        let index = json!({"weight_map": {"a": shards[0], "b": shards[1]}});
        std::fs::write(snapshot.join(INDEX), index.to_string()).unwrap();
        assert!(!has_weights(&snapshot));
        std::fs::write(snapshot.join(shards[1]), b"").unwrap();
        assert!(has_weights(&snapshot));
    }
}
