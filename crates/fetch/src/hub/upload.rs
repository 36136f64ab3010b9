//! Uploader of a trained model to a repository of the hub, in one commit.
//!
//! The requests follow `huggingface_hub` without its second store (`_commit_api.py`, `lfs.py` there), in this order:
//!
//! | request | answer |
//! |---|---|
//! | `POST /api/repos/create` | a new repository, or a notice that it exists |
//! | `POST /api/models/NAME/preupload/main` | for each file: git or large file storage, and its present hash |
//! | `POST /NAME.git/info/lfs/objects/batch` | for each large content: upload addresses, or a notice that it is stored already |
//! | `PUT` to those addresses, whole or in parts; `POST` to complete parts and to verify | |
//! | `POST /api/models/NAME/commit/main` | the commit |
//!
//! After an interruption the push is repeated. It skips contents that the storage already has, and unchanged files make no
//! commit. The commit also deletes weights and settings of an earlier form of the checkpoint (a different number of files, an
//! adapter), because readers would load them.

use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use omnigrpo_guard::inside;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::{Hub, Kind, MAX_FILES, MAX_LISTING_BYTES, MAX_TEXT_BYTES, Patience, Step, hash_of};
use crate::{FetchError, check_scheme};

/// Longest wait for the answer to a request that takes the hub some time.
const PATIENCE: Duration = Duration::from_secs(300);
/// Maximum number of files per `preupload` request, set by the hub.
const FILES_PER_REQUEST: usize = 256;
/// Length of each file's beginning that is sent to the hub, bytes. The hub uses it to recognise text files.
const SAMPLE_BYTES: u64 = 512;
/// Largest part of a file sent at once, bytes.
const MAX_PART_BYTES: u64 = 5 << 30;
/// Address of the public hub, which a mirror may use in its answers.
const PUBLIC: &str = "https://huggingface.co/";
const LFS_JSON: &str = "application/vnd.git-lfs+json";

/// Result of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Address of the repository's web page.
    pub url: String,
    /// Commit that contains the files.
    pub commit: String,
    /// Number of new or changed files.
    pub num_changed: usize,
}

/// File to push, with its properties.
struct Item {
    /// Name in the repository.
    name: String,
    path: PathBuf,
    num_bytes: u64,
    /// SHA-256 of the content, once computed.
    sha256: Option<String>,
}

/// Part of a file that is sent in one request.
struct Piece<'a> {
    item: &'a Item,
    from: u64,
    len: u64,
}

/// Upload mode of a file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mode {
    path: String,
    upload_mode: String,
    #[serde(default)]
    should_ignore: bool,
    /// Hash of the repository's present file of this name.
    oid: Option<String>,
}

/// Large content in an answer of the storage.
#[derive(Deserialize)]
struct Object {
    oid: String,
    actions: Option<Actions>,
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: Map<String, Value>,
}

impl Hub {
    /// Creates a repository for a model, unless it exists, and returns its full name. `NAME` alone refers to the account's own
    /// repository.
    ///
    /// # Errors
    /// Returns an error if the token is missing, the connection fails or the account has no write access. Also returns an error
    /// if the repository is public but a private one is required.
    pub fn create(&self, name: &str, private: bool) -> Result<String, FetchError> {
        let endpoint = &self.options.endpoint;
        check_scheme(endpoint)?;
        if self.options.token.is_none() {
            return Err(FetchError::NoToken { endpoint: endpoint.clone() });
        }
        #[derive(Deserialize)]
        struct Account {
            name: String,
        }
        let full = if name.contains('/') {
            name.to_owned()
        } else {
            let url = format!("{endpoint}/api/whoami-v2");
            let account: Account = self.answer(&url, self.get(&url, 0)?)?;
            format!("{}/{name}", account.name)
        };
        let (organization, short) = full.split_once('/').unwrap_or(("", &full));
        let url = format!("{endpoint}/api/repos/create");
        let body = json!({"type": "model", "name": short, "organization": organization, "private": private});
        let refused = self.with_patience(|| {
            match self.answer::<Value>(&url, self.post(&url, "application/json", &body.to_string())?) {
                // The same account is creating another repository at the moment.
                Err(FetchError::Refused { status: 409, what, url }) if what.contains("in progress") => {
                    Err(FetchError::Refused { status: 409, what, url })
                }
                Err(error @ FetchError::Refused { status: 401..=403 | 409, .. }) => Ok(Some(error)),
                other => other.map(|_| None),
            }
        })?;
        if let Some(error) = refused {
            // An account that may not create repositories may still have write access to an existing one.
            let exists = match self.listing(Kind::Model, &full, "main") {
                Ok(listing) => listing,
                Err(_) => return Err(error),
            };
            if private && !exists.private {
                return Err(FetchError::Public { endpoint: endpoint.clone(), name: full });
            }
        }
        Ok(full)
    }

    /// Pushes files, given by name in the repository and local path, to an existing model repository as one commit.
    ///
    /// # Errors
    /// Returns an error if the token is missing, the connection fails after several attempts, the account has no write access, a
    /// file cannot be read, or an answer is invalid. No local file changes; the same call resumes the push.
    pub fn push(
        &self,
        name: &str,
        files: &[(String, PathBuf)],
        message: &str,
        on: &mut dyn FnMut(Step),
    ) -> Result<Pushed, FetchError> {
        check_scheme(&self.options.endpoint)?;
        if self.options.token.is_none() {
            return Err(FetchError::NoToken { endpoint: self.options.endpoint.clone() });
        }
        let mut items = Vec::with_capacity(files.len());
        for (name, path) in files {
            let num_bytes = inside::open_path(path)
                .and_then(|file| file.metadata())
                .map_err(FetchError::read(path))?
                .len();
            items.push(Item { name: name.clone(), path: path.clone(), num_bytes, sha256: None });
        }
        let mut patience = self.patience();
        loop {
            match self.push_once(name, &mut items, message, &mut patience, on) {
                Err(error) => patience.wait(error)?,
                done => return done,
            }
        }
    }

    fn push_once(
        &self,
        name: &str,
        items: &mut [Item],
        message: &str,
        patience: &mut Patience,
        on: &mut dyn FnMut(Step),
    ) -> Result<Pushed, FetchError> {
        let endpoint = &self.options.endpoint;
        let modes = self.modes(name, items)?;
        let mut lines = Vec::new();
        let mut large = Vec::new();
        for (item, mode) in items.iter_mut().zip(modes) {
            if mode.should_ignore {
                continue;
            }
            // The storage does not accept empty files.
            let is_large = mode.upload_mode == "lfs" && item.num_bytes > 0;
            let mut file = inside::open_path(&item.path).map_err(FetchError::read(&item.path))?;
            let hash = match &item.sha256 {
                Some(known) if is_large => known.clone(),
                _ => hash_of(&mut file, !is_large).map_err(FetchError::read(&item.path))?,
            };
            if is_large {
                item.sha256 = Some(hash.clone());
            }
            if mode.oid.as_ref() == Some(&hash) {
                continue;
            }
            if is_large {
                let value = json!({"path": item.name, "algo": "sha256", "oid": hash, "size": item.num_bytes});
                lines.push(json!({"key": "lfsFile", "value": value}));
                large.push(&*item);
            } else if item.num_bytes <= MAX_TEXT_BYTES {
                let content =
                    inside::read_path(&item.path, MAX_TEXT_BYTES).map_err(FetchError::read(&item.path))?;
                let content = BASE64_STANDARD.encode(content);
                let value = json!({"path": item.name, "encoding": "base64", "content": content});
                lines.push(json!({"key": "file", "value": value}));
            } else {
                return Err(FetchError::TooLarge { url: item.name.clone(), limit_bytes: MAX_TEXT_BYTES });
            }
        }
        let num_changed = lines.len();
        self.send_large(name, &large, patience, on)?;
        let listing = self.listing(Kind::Model, name, "main")?;
        let ours = |name: &str| items.iter().any(|item| item.name == name);
        if items.iter().any(|item| decides_weights(&item.name)) {
            let old = listing.siblings.iter().map(|entry| &entry.rfilename);
            lines.extend(
                old.filter(|old| decides_weights(old) && !ours(old))
                    .map(|old| json!({"key": "deletedFile", "value": {"path": old}})),
            );
        }
        let pushed = |commit| Pushed { url: format!("{endpoint}/{name}"), commit, num_changed };
        if lines.is_empty() {
            return Ok(pushed(listing.sha));
        }
        let header = json!({"key": "header", "value": {"summary": message, "description": ""}});
        let body: String = std::iter::once(&header).chain(&lines).map(|line| format!("{line}\n")).collect();
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Commit {
            commit_oid: String,
        }
        let url = format!("{endpoint}/api/models/{name}/commit/main");
        let commit: Commit = self.answer(&url, self.post(&url, "application/x-ndjson", &body)?)?;
        Ok(pushed(commit.commit_oid))
    }

    /// Requests the upload mode of each file.
    fn modes(&self, name: &str, items: &[Item]) -> Result<Vec<Mode>, FetchError> {
        #[derive(Deserialize)]
        struct Answer {
            files: Vec<Mode>,
        }
        let url = format!("{}/api/models/{name}/preupload/main", self.options.endpoint);
        let mut modes = Vec::with_capacity(items.len());
        for items in items.chunks(FILES_PER_REQUEST) {
            let mut files = Vec::with_capacity(items.len());
            for Item { name, path, num_bytes, .. } in items {
                let mut sample = Vec::new();
                inside::open_path(path)
                    .and_then(|file| file.take(SAMPLE_BYTES).read_to_end(&mut sample))
                    .map_err(FetchError::read(path))?;
                files
                    .push(json!({"path": name, "sample": BASE64_STANDARD.encode(sample), "size": num_bytes}));
            }
            let body = json!({"files": files}).to_string();
            let mut answer: Answer = self.answer(&url, self.post(&url, "application/json", &body)?)?;
            for item in items {
                let at = answer.files.iter().position(|mode| mode.path == item.name);
                let at = at.ok_or_else(|| FetchError::Answer {
                    url: url.clone(),
                    what: format!("the answer does not mention the file `{}`", item.name),
                })?;
                modes.push(answer.files.swap_remove(at));
            }
        }
        Ok(modes)
    }

    /// Sends the contents that the storage lacks. Each sent content resets the `patience` of the push.
    fn send_large(
        &self,
        name: &str,
        items: &[&Item],
        patience: &mut Patience,
        on: &mut dyn FnMut(Step),
    ) -> Result<(), FetchError> {
        #[derive(Deserialize)]
        struct Answer {
            objects: Vec<Object>,
        }
        let url = format!("{}/{name}.git/info/lfs/objects/batch", self.options.endpoint);
        let mut todo: Vec<(&Item, Actions)> = Vec::new();
        for items in items.chunks(FILES_PER_REQUEST) {
            let objects: Vec<Value> =
                items.iter().map(|item| json!({"oid": item.sha256, "size": item.num_bytes})).collect();
            let body = json!({
                "operation": "upload", "transfers": ["basic", "multipart"], "objects": objects,
                "hash_algo": "sha256", "ref": {"name": "main"},
            });
            let answer: Answer = self.answer(&url, self.post(&url, LFS_JSON, &body.to_string())?)?;
            for object in answer.objects {
                let item = items.iter().find(|item| item.sha256.as_ref() == Some(&object.oid));
                let bad = |what: String| FetchError::Answer { url: url.clone(), what };
                let item =
                    item.ok_or_else(|| bad(format!("got object {}, which was not requested", object.oid)))?;
                if let Some(error) = object.error {
                    return Err(bad(format!("`{}` is rejected: {}", item.name, error.message)));
                }
                // An object without actions is stored already.
                todo.extend(object.actions.map(|actions| (*item, actions)));
            }
        }
        let num_bytes = todo.iter().map(|(item, _)| item.num_bytes).sum();
        on(Step::Begin { num_files: todo.len(), num_bytes });
        for (item, actions) in todo {
            if let Some(upload) = &actions.upload {
                self.send(item, upload, patience, on)?;
            }
            if let Some(verify) = &actions.verify {
                let url = self.at_endpoint(&verify.href);
                let body = json!({"oid": item.sha256, "size": item.num_bytes}).to_string();
                self.accepted(&url, self.post(&url, LFS_JSON, &body)?)?;
            }
            *patience = self.patience();
        }
        Ok(())
    }

    /// Sends one content, whole or in parts.
    fn send(
        &self,
        item: &Item,
        upload: &Action,
        patience: &mut Patience,
        on: &mut dyn FnMut(Step),
    ) -> Result<(), FetchError> {
        let url = self.at_endpoint(&upload.href);
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let Some(size) = upload.header.get("chunk_size") else {
            let headers: Vec<(&str, String)> =
                upload.header.iter().map(|(name, value)| (name.as_str(), text(value))).collect();
            let piece = Piece { item, from: 0, len: item.num_bytes };
            return self.put_patiently(&url, &headers, &piece, patience, on).map(drop);
        };
        let bad = |what: String| FetchError::Answer { url: without_query(&url), what };
        let size = text(size).parse().ok().filter(|size| (1..=MAX_PART_BYTES).contains(size));
        let size: u64 = size.ok_or_else(|| {
            bad(format!("got `chunk_size` {}, expected a number of bytes", upload.header["chunk_size"]))
        })?;
        let mut urls: Vec<(u64, String)> = upload
            .header
            .iter()
            .filter_map(|(number, url)| Some((number.parse().ok()?, self.at_endpoint(url.as_str()?))))
            .collect();
        urls.sort_unstable();
        let expected = item.num_bytes.div_ceil(size);
        if urls.len() as u64 != expected || urls.len() > MAX_FILES {
            return Err(bad(format!("got {} addresses for {expected} parts", urls.len())));
        }
        let mut parts = Vec::with_capacity(urls.len());
        for (at, (_, part_url)) in urls.iter().enumerate() {
            let from = at as u64 * size;
            let len = size.min(item.num_bytes - from);
            let piece = Piece { item, from, len };
            let etag = self.put_patiently(part_url, &[], &piece, patience, on)?;
            let etag = etag.ok_or_else(|| bad(format!("part {} has no etag", at + 1)))?;
            parts.push(json!({"partNumber": at + 1, "etag": etag}));
        }
        let body = json!({"oid": item.sha256, "parts": parts}).to_string();
        self.accepted(&url, self.post(&url, LFS_JSON, &body)?)
    }

    /// Sends a piece, with retries. An expired address is not retried. If the retries of a piece are used up, the push fails too.
    fn put_patiently(
        &self,
        url: &str,
        headers: &[(&str, String)],
        piece: &Piece,
        patience: &mut Patience,
        on: &mut dyn FnMut(Step),
    ) -> Result<Option<String>, FetchError> {
        let (mut own, mut num_told) = (self.patience(), 0);
        loop {
            match self.put(url, headers, piece, &mut num_told, on) {
                Err(error @ FetchError::Expired { .. }) => return Err(error),
                Err(error) => {
                    if let Err(error) = own.wait(error) {
                        *patience = own;
                        return Err(error);
                    }
                }
                done => return done,
            }
        }
    }

    /// Sends a piece of a file to the storage, without the token, and returns its entity tag. `num_told` counts the bytes that
    /// earlier attempts have reported as progress.
    fn put(
        &self,
        url: &str,
        headers: &[(&str, String)],
        piece: &Piece,
        num_told: &mut u64,
        on: &mut dyn FnMut(Step),
    ) -> Result<Option<String>, FetchError> {
        let Piece { item, from, len } = *piece;
        check_scheme(url)?;
        let mut file = inside::open_path(&item.path).map_err(FetchError::read(&item.path))?;
        file.seek(SeekFrom::Start(from)).map_err(FetchError::read(&item.path))?;
        let mut request = self.agent.put(url).config().timeout_recv_response(Some(PATIENCE)).build();
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let mut body = Counted { inner: file.take(len), num_read: 0, num_told, on };
        let sent = request.header("Content-Length", len).send(ureq::SendBody::from_reader(&mut body));
        let url = without_query(url);
        let response = sent.map_err(|error| FetchError::of(&url, error))?;
        match response.status().as_u16() {
            200..=299 => {
                Ok(response.headers().get("etag").and_then(|tag| Some(tag.to_str().ok()?.to_owned())))
            }
            // Addresses expire after a while; the next attempt requests new ones.
            status @ (400 | 401 | 403) => Err(FetchError::Expired { url, status }),
            status => Err(FetchError::Status { url, status }),
        }
    }

    /// Sends a POST request to the hub with the token, or to another host without it.
    fn post(
        &self,
        url: &str,
        kind: &str,
        body: &str,
    ) -> Result<ureq::http::Response<ureq::Body>, FetchError> {
        check_scheme(url)?;
        let config = self.agent.post(url).config().timeout_recv_response(Some(PATIENCE));
        let mut request = config.build().header("Content-Type", kind).header("Accept", kind_of_answer(kind));
        if let Some(authorization) = self.authorization_at(url) {
            request = request.header("Authorization", authorization);
        }
        request.send(body).map_err(|error| FetchError::of(&without_query(url), error))
    }

    /// Rewrites an address to this client's endpoint. A mirror may return addresses of the public hub.
    fn at_endpoint(&self, url: &str) -> String {
        match url.strip_prefix(PUBLIC) {
            Some(path) => format!("{}/{path}", self.options.endpoint),
            None => url.to_owned(),
        }
    }

    /// Turns an error status into an error with the hub's reason.
    fn accepted(&self, url: &str, mut response: ureq::http::Response<ureq::Body>) -> Result<(), FetchError> {
        self.text_of(url, &mut response).map(drop)
    }

    /// Parses an answer of the hub.
    fn answer<T: DeserializeOwned>(
        &self,
        url: &str,
        mut response: ureq::http::Response<ureq::Body>,
    ) -> Result<T, FetchError> {
        let text = self.text_of(url, &mut response)?;
        serde_json::from_str(&text).map_err(|error| FetchError::Answer {
            url: without_query(url),
            what: format!("unexpected answer: {error}"),
        })
    }

    fn text_of(
        &self,
        url: &str,
        response: &mut ureq::http::Response<ureq::Body>,
    ) -> Result<String, FetchError> {
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(MAX_LISTING_BYTES);
        let text = body.read_to_string().map_err(|error| FetchError::of(&without_query(url), error));
        if (200..300).contains(&status) {
            return text;
        }
        #[derive(Deserialize)]
        struct Reason {
            error: String,
        }
        let reason = text.ok().and_then(|text| serde_json::from_str::<Reason>(&text).ok());
        let mut what: String = reason
            .map_or_else(|| "no reason is given".to_owned(), |reason| reason.error)
            .chars()
            .take(500)
            .collect();
        if let Some(token) = &self.options.token {
            what = what.replace(token, "…");
        }
        Err(FetchError::Refused { url: without_query(url), status, what })
    }
}

fn kind_of_answer(kind: &str) -> &str {
    if kind == LFS_JSON { LFS_JSON } else { "application/json" }
}

/// Removes the query of an address, which may contain a signature.
fn without_query(url: &str) -> String {
    url.split('?').next().unwrap_or(url).to_owned()
}

/// Reports whether a file at the top of a repository affects which weights a reader loads.
fn decides_weights(name: &str) -> bool {
    name == "adapter_config.json"
        || name == "model.safetensors.index.json"
        || name == "adapter_model.safetensors"
        || (name.starts_with("model") && name.ends_with(".safetensors") && !name.contains('/'))
}

/// Reader that reports progress for bytes read for the first time.
struct Counted<'a, R> {
    inner: R,
    num_read: u64,
    /// Number of bytes reported so far, in this attempt or an earlier one.
    num_told: &'a mut u64,
    on: &'a mut dyn FnMut(Step),
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let len = self.inner.read(buffer)?;
        self.num_read += len as u64;
        if self.num_read > *self.num_told {
            (self.on)(Step::Bytes(self.num_read - *self.num_told));
            *self.num_told = self.num_read;
        }
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{ATTEMPTS, HubOptions};
    use super::*;
    use omnigrpo_testkit::hub::StandIn;

    fn client(hub: &StandIn, token: Option<&str>) -> Hub {
        let cache = PathBuf::from("/nowhere");
        let options = HubOptions { endpoint: hub.endpoint(), token: token.map(str::to_owned), cache };
        Hub { pause: Duration::from_millis(1), ..Hub::new(options) }
    }

    /// Returns the files of a model, one of each kind: small, large in one piece, large in parts, empty.
    fn model(dir: &Path) -> Vec<(String, PathBuf)> {
        let files: [(&str, Vec<u8>); 5] = [
            ("README.md", b"---\ntags: [a]\n---\n".to_vec()),
            ("config.json", b"{}".to_vec()),
            ("empty.txt", Vec::new()),
            ("model-00001-of-00002.safetensors", (0..2500u32).map(|i| i as u8).collect()),
            ("model-00002-of-00002.safetensors", vec![7; 600]),
        ];
        let mut list = Vec::new();
        for (name, bytes) in files {
            std::fs::write(dir.join(name), bytes).unwrap();
            list.push((name.to_owned(), dir.join(name)));
        }
        list
    }

    fn uploads(requests: &[String]) -> Vec<&str> {
        requests.iter().filter(|line| line.starts_with("PUT")).map(|line| &line[4..9]).collect()
    }

    #[test]
    fn a_model_becomes_one_commit_and_is_sent_once() {
        let (hub, dir) = (StandIn::start(), tempfile::tempdir().unwrap());
        let files = model(dir.path());
        let me = client(&hub, Some(StandIn::TOKEN));
        assert_eq!(me.create("tiny", true).unwrap(), "me/tiny");
        assert!(hub.look("me/tiny", |repo| repo.private).unwrap());
        let mut steps = Vec::new();
        let pushed = me.push("me/tiny", &files, "step 5", &mut |step| steps.push(step)).unwrap();
        assert_eq!(pushed.url, format!("{}/me/tiny", hub.endpoint()));
        assert_eq!(pushed.num_changed, 5);
        hub.look("me/tiny", |repo| {
            for (name, path) in &files {
                assert_eq!(repo.files[name], std::fs::read(path).unwrap(), "{name}");
            }
            assert_eq!(repo.messages, ["step 5"]);
        });
        assert_eq!(steps[0], Step::Begin { num_files: 2, num_bytes: 3100 });
        let bytes: u64 = steps.iter().map(|step| if let Step::Bytes(n) = step { *n } else { 0 }).sum();
        assert_eq!(bytes, 3100);
        assert_eq!(uploads(&hub.requests()), ["/part", "/part", "/part", "/whol"]);

        // An identical push makes no commit; a changed file makes a commit with that file alone.
        let again = me.push("me/tiny", &files, "again", &mut |_| {}).unwrap();
        assert_eq!((again.num_changed, &again.commit), (0, &pushed.commit));
        std::fs::write(dir.path().join("model-00002-of-00002.safetensors"), [8; 600]).unwrap();
        assert_eq!(me.create("me/tiny", false).unwrap(), "me/tiny");
        let changed = me.push("me/tiny", &files, "step 6", &mut |_| {}).unwrap();
        assert_eq!((changed.num_changed, changed.commit != pushed.commit), (1, true));
        assert_eq!(uploads(&hub.requests()), ["/whol"]);
        assert_eq!(hub.look("me/tiny", |repo| repo.messages.clone()).unwrap(), ["step 5", "step 6"]);
    }

    #[test]
    fn a_push_that_broke_off_goes_on_with_what_is_missing() {
        let (hub, dir) = (StandIn::start(), tempfile::tempdir().unwrap());
        let files = model(dir.path());
        let me = client(&hub, Some(StandIn::TOKEN));
        me.create("me/tiny", false).unwrap();
        // The last large file never arrives, as if the client had been killed there.
        hub.fail("PUT /whole", 0, ATTEMPTS);
        let error = me.push("me/tiny", &files, "a", &mut |_| {}).unwrap_err();
        assert!(matches!(error, FetchError::Network { .. }), "{error}");
        assert!(!error.to_string().contains("signature"), "{error}");
        hub.look("me/tiny", |repo| {
            assert!(repo.messages.is_empty() && !repo.files.contains_key("config.json"))
        });
        let requests = hub.requests();
        let num = |kind: &str| uploads(&requests).iter().filter(|put| **put == kind).count();
        assert_eq!((num("/part"), num("/whol")), (3, ATTEMPTS));
        let mut steps = Vec::new();
        me.push("me/tiny", &files, "b", &mut |step| steps.push(step)).unwrap();
        assert_eq!(steps[0], Step::Begin { num_files: 1, num_bytes: 600 });
        assert_eq!(uploads(&hub.requests()), ["/whol"]);
    }

    #[test]
    fn what_may_pass_is_tried_again() {
        let (hub, dir) = (StandIn::start(), tempfile::tempdir().unwrap());
        let files = model(dir.path());
        let me = client(&hub, Some(StandIn::TOKEN));
        let fail = |each: &[(&str, u16)]| each.iter().for_each(|(part, status)| hub.fail(part, *status, 1));
        fail(&[
            ("repos/create", 503),
            ("preupload", 500),
            ("objects/batch", 502),
            ("/complete/", 504),
            ("/verify/", 429),
        ]);
        me.create("me/tiny", false).unwrap();
        me.push("me/tiny", &files[3..], "weights", &mut |_| {}).unwrap();
        // Only the failed part is sent again, and it is reported once. If the address has expired, a new one is requested at
        // once.
        std::fs::write(&files[3].1, vec![9; 2500]).unwrap();
        std::fs::write(&files[4].1, [8; 600]).unwrap();
        fail(&[("PUT /part", 500), ("PUT /whole", 403)]);
        hub.requests();
        let mut steps = Vec::new();
        me.push("me/tiny", &files[3..], "weights", &mut |step| steps.push(step)).unwrap();
        assert_eq!(uploads(&hub.requests()), ["/part", "/part", "/part", "/part", "/whol", "/whol"]);
        let second = steps.iter().rposition(|step| matches!(step, Step::Begin { .. })).unwrap();
        let bytes = |steps: &[Step]| -> u64 {
            steps.iter().map(|step| if let Step::Bytes(num) = step { *num } else { 0 }).sum()
        };
        assert_eq!((bytes(&steps[..second]), bytes(&steps[second..])), (3100, 600));
        // Another client committed first; then the connection broke.
        fail(&[("commit/main", 412), ("commit/main", 0)]);
        assert_eq!(me.push("me/tiny", &files, "a", &mut |_| {}).unwrap().num_changed, 3);
        assert_eq!(hub.look("me/tiny", |repo| repo.messages.len()).unwrap(), 3);
    }

    #[test]
    fn refusals_come_with_the_hubs_reason_and_without_the_token() {
        let (hub, dir) = (StandIn::start(), tempfile::tempdir().unwrap());
        let files = model(dir.path());
        let me = client(&hub, Some(StandIn::TOKEN));
        let check = |error: FetchError, expected: &str| {
            let text = format!("{error} {error:?}");
            assert!(text.contains(expected) && !text.contains("secret"), "{text}");
        };
        check(client(&hub, None).create("me/tiny", false).unwrap_err(), "set HF_TOKEN");
        check(client(&hub, None).push("me/tiny", &files, "a", &mut |_| {}).unwrap_err(), "set HF_TOKEN");
        check(
            client(&hub, Some("secret")).create("tiny", false).unwrap_err(),
            "status 401: Invalid username",
        );
        check(client(&hub, Some("secret")).create("me/tiny", false).unwrap_err(), "status 401");
        check(me.create("others/tiny", false).unwrap_err(), "status 403: You don't have the rights");
        check(me.push("me/none", &files, "a", &mut |_| {}).unwrap_err(), "status 404: Repository not found");
        // A push that must stay private does not go to a public repository.
        hub.hold("me/open", &[("config.json", b"{}")]);
        check(me.create("me/open", true).unwrap_err(), "public, expected a private one");
        // An account that may not create repositories may have write access to one.
        hub.fail("repos/create", 403, 1);
        assert_eq!(me.create("me/open", false).unwrap(), "me/open");
        let gone = dir.path().join("gone.json");
        let gone = [("gone.json".to_owned(), gone)];
        check(me.push("me/open", &gone, "a", &mut |_| {}).unwrap_err(), "cannot read");
        hub.fail("commit/main", 500, ATTEMPTS);
        check(me.push("me/open", &files, "a", &mut |_| {}).unwrap_err(), "status 500: it fails on purpose");
    }

    #[test]
    fn weights_of_another_form_go_with_the_same_commit() {
        let (hub, dir) = (StandIn::start(), tempfile::tempdir().unwrap());
        hub.hold(
            "me/tiny",
            &[
                ("adapter_config.json", b"{}"),
                ("adapter_model.safetensors", b"a"),
                ("model.safetensors.index.json", b"{}"),
                ("model-00001-of-00003.safetensors", b"b"),
                ("figures/model.safetensors", b"c"),
                ("notes.md", b"mine"),
            ],
        );
        let path = dir.path().join("model.safetensors");
        std::fs::write(&path, b"new").unwrap();
        let files = [("model.safetensors".to_owned(), path)];
        client(&hub, Some(StandIn::TOKEN)).push("me/tiny", &files, "one file", &mut |_| {}).unwrap();
        let left = hub.look("me/tiny", |repo| repo.files.keys().cloned().collect::<Vec<_>>()).unwrap();
        assert_eq!(left, ["figures/model.safetensors", "model.safetensors", "notes.md"]);
    }

    #[test]
    fn a_mirror_is_asked_where_the_public_hub_is_named() {
        let hub = StandIn::start();
        let me = client(&hub, None);
        assert_eq!(me.at_endpoint("https://huggingface.co/a?b=c"), format!("{}/a?b=c", hub.endpoint()));
        assert_eq!(me.at_endpoint("https://other.co/a"), "https://other.co/a");
    }

    /// The Python library and this client see the same test hub, pushes and downloads.
    #[test]
    #[ignore = "needs a Python with huggingface_hub: OMNIGRPO_PYTHON=PROGRAM"]
    fn the_python_library_agrees() {
        let python = std::env::var("OMNIGRPO_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let (hub, place) = (StandIn::start(), tempfile::tempdir().unwrap());
        let run = |offline: &str, args: &[&str]| {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/agrees.py");
            let mut command = std::process::Command::new(&python);
            command.arg(script).args(args).env("HF_ENDPOINT", hub.endpoint()).env("HF_TOKEN", StandIn::TOKEN);
            command.env("HF_HUB_DISABLE_XET", "1").env("HF_HUB_OFFLINE", offline);
            let output = command.env("HF_HUB_CACHE", place.path().join("cache")).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        let folder = place.path().join("model");
        std::fs::create_dir(&folder).unwrap();
        let files = model(&folder);
        let me = client(&hub, Some(StandIn::TOKEN));

        // Files pushed by one client need no push by the other.
        let commit = run("0", &["push", &folder.to_string_lossy(), "me/theirs"]);
        let ours = me.push("me/theirs", &files, "by us", &mut |_| {}).unwrap();
        assert_eq!((ours.num_changed, ours.commit), (0, commit));
        me.create("me/ours", true).unwrap();
        let pushed = me.push("me/ours", &files, "by us", &mut |_| {}).unwrap();
        assert_eq!(run("0", &["push", &folder.to_string_lossy(), "me/ours"]), pushed.commit);
        let down = place.path().join("down");
        run("0", &["pull", "me/ours", &down.to_string_lossy()]);
        for (name, path) in &files {
            assert_eq!(std::fs::read(down.join(name)).unwrap(), std::fs::read(path).unwrap(), "{name}");
        }

        // The official client finds the files that this client has downloaded.
        let options = HubOptions { cache: place.path().join("cache"), ..me.options.clone() };
        let fetching = Hub::new(options);
        let dir = fetching.download("me/ours", "main", &mut |_| {}).unwrap();
        assert_eq!(run("1", &["cached", "me/ours"]), dir.to_string_lossy());
        hub.hold("datasets/me/rows", &[("data/train-00000-of-00001.parquet", b"rows")]);
        let tables = fetching.dataset("me/rows", None, "train", &mut |_| {}).unwrap();
        let dir = run("1", &["cached", "me/rows", "dataset"]);
        assert!(tables[0].starts_with(&dir), "{tables:?} {dir}");
    }
}
