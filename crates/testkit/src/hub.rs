//! Test hub on the loopback interface: accounts, repositories, large file storage, commits. The storage has a different host name
//! from the hub, as on the real one, and rejects requests that contain the token.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use sha1::Digest as _;

/// Repository. Its key is its name, with the prefix `datasets/` for a dataset and the suffix `@BRANCH` for a branch other than
/// `main`.
#[derive(Default)]
pub struct Repo {
    pub private: bool,
    pub files: BTreeMap<String, Vec<u8>>,
    pub messages: Vec<String>,
}

#[derive(Default)]
struct State {
    repos: BTreeMap<String, Repo>,
    /// Large contents, by hash.
    stored: BTreeMap<String, Vec<u8>>,
    parts: BTreeMap<(String, usize), Vec<u8>>,
    requests: Vec<String>,
    /// Failures to inject into requests whose line contains a text, as (text, status, number of times).
    failures: Vec<(String, u16, usize)>,
}

struct Asked {
    line: String,
    method: String,
    path: String,
    authorized: bool,
    range: Option<usize>,
    body: Vec<u8>,
}

impl Asked {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

struct Answer(u16, Vec<(&'static str, String)>, Vec<u8>);

fn json_answer(status: u16, value: Value) -> Answer {
    Answer(status, vec![("Content-Type", "application/json".to_owned())], value.to_string().into_bytes())
}

fn refusal(status: u16, why: &str) -> Answer {
    json_answer(status, json!({"error": why}))
}

pub fn sha256(bytes: &[u8]) -> String {
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn git_hash(bytes: &[u8]) -> String {
    let all = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    sha1::Sha1::digest(all).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reports whether a file goes to the large file storage, judged by its name, as in the hub's `.gitattributes`.
fn is_large(name: &str) -> bool {
    [".safetensors", ".parquet", ".bin"].iter().any(|end| name.ends_with(end))
}

/// Returns the commit hash of a repository's state.
fn commit_of(repo: &Repo) -> String {
    git_hash(format!("{:?}{:?}", repo.files, repo.messages).as_bytes())
}

/// Server that ends with the test process.
#[derive(Clone)]
pub struct StandIn {
    hub: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl StandIn {
    pub const TOKEN: &str = "hf_secret-token";
    /// Size of a part, bytes. Larger contents are sent in several parts.
    pub const PART_BYTES: usize = 1000;

    pub fn start() -> Self {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (hub, storage) = (listen(), listen());
        let (address, port) = (hub.local_addr().unwrap(), storage.local_addr().unwrap().port());
        let this = Self { hub: address, state: Arc::default() };
        for (listener, is_hub) in [(hub, true), (storage, false)] {
            let this = this.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let this = this.clone();
                    std::thread::spawn(move || serve(stream.unwrap(), &this, is_hub, port));
                }
            });
        }
        this
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.hub)
    }

    /// Adds a repository.
    pub fn hold(&self, name: &str, files: &[(&str, &[u8])]) {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        let mut state = self.state.lock().unwrap();
        state.repos.insert(name.to_owned(), Repo { files, ..Repo::default() });
    }

    /// Answers the next `times` requests whose line (`METHOD /path`) contains `part` with `status`. Status 0 closes the
    /// connection in the middle, and status 1 never answers.
    pub fn fail(&self, part: &str, status: u16, times: usize) {
        self.state.lock().unwrap().failures.push((part.to_owned(), status, times));
    }

    /// Calls `at` with a repository.
    pub fn look<T>(&self, name: &str, at: impl FnOnce(&Repo) -> T) -> Option<T> {
        self.state.lock().unwrap().repos.get(name).map(at)
    }

    /// Returns `METHOD /path` of the requests since the last call.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    fn answer(&self, asked: &Asked, is_hub: bool, storage: u16) -> Answer {
        let mut state = self.state.lock().unwrap();
        state.requests.push(asked.line.clone());
        let failure =
            state.failures.iter_mut().find(|(part, _, times)| asked.line.contains(part) && *times > 0);
        if let Some((_, status, times)) = failure {
            *times -= 1;
            return refusal(*status, "it fails on purpose");
        }
        if is_hub {
            of_hub(&mut state, asked, &self.endpoint(), storage)
        } else {
            of_storage(&mut state, asked)
        }
    }
}

fn serve(stream: std::net::TcpStream, this: &StandIn, is_hub: bool, storage: u16) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let mut words = line.split(' ');
        let (method, path) =
            (words.next().unwrap_or("").to_owned(), words.next().unwrap_or("").replace("%2F", "/"));
        let (mut len, mut authorized, mut range) = (0, false, None);
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header).unwrap_or(0) == 0 || header.trim().is_empty() {
                break;
            }
            let (name, value) = header.split_once(':').unwrap();
            let value = value.trim();
            match name.to_lowercase().as_str() {
                "content-length" => len = value.parse().unwrap(),
                "authorization" => {
                    assert!(is_hub, "the token left the hub");
                    authorized = value == format!("Bearer {}", StandIn::TOKEN);
                }
                "range" => {
                    range = value
                        .trim_start_matches("bytes=")
                        .split('-')
                        .next()
                        .and_then(|from| from.parse().ok());
                }
                _ => {}
            }
        }
        let line = format!("{method} {path}");
        {
            let mut state = this.state.lock().unwrap();
            let hang_up = state
                .failures
                .iter_mut()
                .find(|(part, status, times)| *status < 2 && line.contains(part) && *times > 0);
            if let Some((_, status, times)) = hang_up {
                *times -= 1;
                let stalls = *status == 1;
                state.requests.push(line);
                drop(state);
                if stalls {
                    std::thread::sleep(std::time::Duration::from_secs(600));
                }
                return;
            }
        }
        let mut body = vec![0; len];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        let asked = Asked { line, path, authorized, range, body, method };
        let Answer(status, headers, body) = this.answer(&asked, is_hub, storage);
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let head = format!("HTTP/1.1 {status} X\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
        let body = if asked.method == "HEAD" { &[] } else { &body[..] };
        let stream = reader.get_mut();
        if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).is_err() {
            return;
        }
    }
}

fn of_hub(state: &mut State, asked: &Asked, endpoint: &str, storage: u16) -> Answer {
    let path = asked.path.split('?').next().unwrap();
    if asked.method == "POST" && !asked.authorized && !path.starts_with("/complete/") {
        return refusal(401, "Invalid username or password.");
    }
    match path {
        "/api/whoami-v2" if asked.authorized => {
            return json_answer(200, json!({"type": "user", "name": "me", "orgs": []}));
        }
        "/api/whoami-v2" => return refusal(401, "Invalid username or password."),
        "/api/validate-yaml" => return json_answer(200, json!({"errors": [], "warnings": []})),
        "/api/repos/create" => return create(state, &asked.json(), endpoint),
        _ => {}
    }
    if let Some(rest) = path.strip_prefix("/api/models/").or(path.strip_prefix("/api/")) {
        if let Some(name) = rest.strip_suffix("/preupload/main") {
            return preupload(state, name, &asked.json());
        }
        if let Some(name) = rest.strip_suffix("/commit/main") {
            return commit(state, name, &asked.body, endpoint);
        }
        if let Some((name, _)) = rest.split_once("/tree/") {
            return tree(state, name);
        }
        let (name, revision) = rest.split_once("/revision/").unwrap_or((rest, "main"));
        return listing(state, name, revision, asked.authorized);
    }
    if let Some(name) = path.strip_suffix(".git/info/lfs/objects/batch") {
        assert!(state.repos.contains_key(&name[1..]), "{name}");
        let batch = asked.json();
        let objects = batch["objects"].as_array().unwrap().iter();
        let objects: Vec<Value> =
            objects.map(|object| large_object(state, object, endpoint, storage)).collect();
        return json_answer(200, json!({"transfer": "basic", "objects": objects}));
    }
    if let Some(oid) = path.strip_prefix("/complete/") {
        assert!(!asked.authorized || endpoint.starts_with("http://127"), "{path}");
        return complete(state, oid, &asked.json());
    }
    if let Some(oid) = path.strip_prefix("/verify/") {
        let known = state
            .stored
            .get(oid)
            .is_some_and(|bytes| asked.json() == json!({"oid": oid, "size": bytes.len()}));
        return if known { json_answer(200, json!({})) } else { refusal(404, "no such object") };
    }
    if let Some((name, rest)) = path[1..].split_once("/resolve/") {
        return resolve(state, name, rest, asked, storage);
    }
    refusal(404, "Not found")
}

fn create(state: &mut State, body: &Value, endpoint: &str) -> Answer {
    let name =
        format!("{}/{}", body["organization"].as_str().unwrap_or("me"), body["name"].as_str().unwrap());
    let url = format!("{endpoint}/{name}");
    if name.starts_with("others/") {
        return refusal(403, "You don't have the rights to create a model under the namespace \"others\"");
    }
    if state.repos.contains_key(&name) {
        return json_answer(409, json!({"error": "You already created this model repo", "url": url}));
    }
    let private = body["private"] == true || body["visibility"] == "private";
    let files = [(".gitattributes".to_owned(), b"*.safetensors filter=lfs".to_vec())].into();
    state.repos.insert(name, Repo { private, files, ..Repo::default() });
    json_answer(200, json!({"url": url}))
}

fn preupload(state: &State, name: &str, body: &Value) -> Answer {
    let Some(repo) = state.repos.get(name) else { return refusal(404, "Repository not found") };
    let mode = |file: &Value| {
        let path = file["path"].as_str().unwrap();
        let hash = |bytes: &Vec<u8>| if is_large(path) { sha256(bytes) } else { git_hash(bytes) };
        json!({"path": path, "uploadMode": if is_large(path) { "lfs" } else { "regular" },
               "shouldIgnore": path == "ignored.txt", "oid": repo.files.get(path).map(hash)})
    };
    let files: Vec<Value> = body["files"].as_array().unwrap().iter().map(mode).collect();
    json_answer(200, json!({"files": files}))
}

/// Answers where an object is uploaded, unless it is stored.
fn large_object(state: &State, object: &Value, endpoint: &str, storage: u16) -> Value {
    let at = format!("http://localhost:{storage}");
    let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
    let mut answer = json!({"oid": oid, "size": size});
    if !state.stored.contains_key(oid) {
        let upload = if size > StandIn::PART_BYTES {
            let parts = (1..=size.div_ceil(StandIn::PART_BYTES))
                .map(|part| (format!("{part:05}"), json!(format!("{at}/part/{oid}/{part}?signature=abc"))));
            let mut header: serde_json::Map<String, Value> = parts.collect();
            header.insert("chunk_size".to_owned(), json!(StandIn::PART_BYTES.to_string()));
            json!({"href": format!("{endpoint}/complete/{oid}?signature=abc"), "header": header})
        } else {
            json!({"href": format!("{at}/whole/{oid}?signature=abc")})
        };
        answer["actions"] = json!({"upload": upload, "verify": {"href": format!("{endpoint}/verify/{oid}")}});
    }
    answer
}

/// Joins the uploaded parts of an object.
fn complete(state: &mut State, oid: &str, body: &Value) -> Answer {
    let mut whole = Vec::new();
    for (i, part) in body["parts"].as_array().unwrap().iter().enumerate() {
        let bytes = state.parts.remove(&(oid.to_owned(), i + 1)).unwrap();
        assert_eq!(
            (part["partNumber"].as_u64(), part["etag"].as_str().unwrap()),
            (Some(i as u64 + 1), sha256(&bytes).as_str())
        );
        whole.extend(bytes);
    }
    assert_eq!((sha256(&whole).as_str(), body["oid"].as_str()), (oid, Some(oid)));
    state.stored.insert(oid.to_owned(), whole);
    json_answer(200, json!({}))
}

fn listing(state: &State, name: &str, revision: &str, authorized: bool) -> Answer {
    let branch = if revision == "main" { name.to_owned() } else { format!("{name}@{revision}") };
    let by_commit = || {
        state
            .repos
            .iter()
            .find(|(key, repo)| key.split('@').next() == Some(name) && commit_of(repo) == revision)
    };
    let repo = state.repos.get(&branch).or_else(|| by_commit().map(|(_, repo)| repo));
    let Some(repo) = repo.filter(|repo| !repo.private || authorized) else {
        return if authorized {
            refusal(404, "Repository not found")
        } else {
            refusal(401, "Invalid username or password.")
        };
    };
    let siblings: Vec<Value> = repo
        .files
        .iter()
        .map(|(name, bytes)| {
            let mut entry = json!({"rfilename": name, "size": bytes.len(), "blobId": git_hash(bytes)});
            if is_large(name) {
                entry["lfs"] = json!({"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 100});
            }
            entry
        })
        .collect();
    json_answer(
        200,
        json!({"id": name.trim_start_matches("datasets/"), "sha": commit_of(repo), "private": repo.private, "siblings": siblings,
        "tags": [], "downloads": 0, "likes": 0}),
    )
}

/// Returns the files of a repository in the form that the Python library requests.
fn tree(state: &State, name: &str) -> Answer {
    let Some(repo) = state.repos.get(name) else { return refusal(404, "Repository not found") };
    let files: Vec<Value> = repo
        .files
        .iter()
        .map(|(name, bytes)| {
            let size = bytes.len();
            let mut entry = json!({"type": "file", "path": name, "size": size, "oid": git_hash(bytes)});
            if is_large(name) {
                entry["lfs"] = json!({"oid": sha256(bytes), "size": size, "pointerSize": 100});
            }
            entry
        })
        .collect();
    json_answer(200, json!(files))
}

fn commit(state: &mut State, name: &str, body: &[u8], endpoint: &str) -> Answer {
    if !state.repos.contains_key(name) {
        return refusal(404, "Repository not found");
    }
    let text = std::str::from_utf8(body).unwrap();
    for line in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let (key, value) = (line["key"].as_str().unwrap(), &line["value"]);
        let of = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        let content = match key {
            "file" => Some(BASE64_STANDARD.decode(of("content")).unwrap()),
            "lfsFile" => match state.stored.get(&of("oid")) {
                Some(bytes) => Some(bytes.clone()),
                None => return refusal(400, "the content of a file is not in the storage"),
            },
            _ => None,
        };
        let repo = state.repos.get_mut(name).unwrap();
        match (key, content) {
            ("header", _) => repo.messages.push(of("summary")),
            ("deletedFile", _) => drop(repo.files.remove(&of("path")).unwrap()),
            (_, Some(content)) => drop(repo.files.insert(of("path"), content)),
            (key, None) => return refusal(400, key),
        }
    }
    let oid = commit_of(&state.repos[name]);
    let url = format!("{endpoint}/{name}/commit/{oid}");
    json_answer(200, json!({"success": true, "commitOid": oid, "commitUrl": url}))
}

fn resolve(state: &State, name: &str, rest: &str, asked: &Asked, storage: u16) -> Answer {
    let branches = state.repos.iter().filter(|(key, _)| key.split('@').next() == Some(name));
    for (key, repo) in branches {
        let commit = commit_of(repo);
        let branch = key.split_once('@').map_or("main", |(_, branch)| branch);
        let file = [commit.as_str(), branch].iter().find_map(|at| rest.strip_prefix(&format!("{at}/")));
        let Some((file, bytes)) = file.and_then(|file| Some((file, repo.files.get(file)?))) else { continue };
        if repo.private && !asked.authorized {
            return refusal(401, "Invalid username or password.");
        }
        let hash = if is_large(file) { sha256(bytes) } else { git_hash(bytes) };
        let mut headers = vec![("X-Repo-Commit", commit), ("ETag", format!("\"{hash}\""))];
        if is_large(file) {
            headers.extend([
                ("X-Linked-Etag", format!("\"{hash}\"")),
                ("X-Linked-Size", bytes.len().to_string()),
                ("Location", format!("http://localhost:{storage}/get/{key}/{file}")),
            ]);
            return Answer(302, headers, Vec::new());
        }
        return Answer(200, headers, bytes.clone());
    }
    refusal(404, "Entry not found")
}

fn of_storage(state: &mut State, asked: &Asked) -> Answer {
    let path = asked.path.split('?').next().unwrap();
    if asked.method != "PUT" {
        let found = path.strip_prefix("/get/").and_then(|path| {
            state
                .repos
                .iter()
                .find_map(|(key, repo)| repo.files.get(path.strip_prefix(key)?.strip_prefix('/')?))
        });
        return match (found, asked.range) {
            (Some(bytes), Some(from)) => Answer(206, Vec::new(), bytes[from..].to_vec()),
            (Some(bytes), None) => Answer(200, Vec::new(), bytes.clone()),
            (None, _) => refusal(404, "Not found"),
        };
    }
    assert!(asked.path.ends_with("?signature=abc"), "{}", asked.path);
    let tag = sha256(&asked.body);
    if let Some(oid) = path.strip_prefix("/whole/") {
        assert_eq!(tag, oid);
        state.stored.insert(oid.to_owned(), asked.body.clone());
    } else if let Some((oid, part)) = path.strip_prefix("/part/").and_then(|rest| rest.split_once('/')) {
        state.parts.insert((oid.to_owned(), part.parse().unwrap()), asked.body.clone());
    }
    Answer(200, vec![("ETag", tag)], Vec::new())
}
