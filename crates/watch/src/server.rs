//! Server of the page.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use hyper::header::{self, HeaderName};
use omnigrpo_guard::{inside, told};
use omnigrpo_http::head::{Origin, is_secret};
use omnigrpo_http::{Answer, Http, Limits, Place, Request, Service, token};
use omnigrpo_observe::{Activity, Load};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::Error;
use crate::assets;
use crate::catalogue::Catalogues;
use crate::curves::AllCurves;
use crate::evaluations::{Comparison, Evaluations};
use crate::marks::Marks;
use crate::media::Medium;
use crate::rollouts::{Filter, Records};
use crate::run::{MAX_RUNS, MAX_STEPS, Metrics, Run};
use crate::table::Table;
use crate::verdict::Verdicts;

/// Interval at which the files of the runs are checked while a page is open.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Longest time without a message to an open page.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
/// Largest number of pages that receive events at the same time.
const MAX_LISTENERS: usize = 32;
/// Largest number of prompts in one response.
const MAX_GROUPS: usize = 500;
/// Largest body of a request. Requests to stop or save have none.
const MAX_BODY_BYTES: usize = 64;
/// Interval at which an open page hears of the phase under way, at most.
const DOING_EVERY: Duration = Duration::from_secs(1);
/// Longer side of a preview, in pixels.
const PREVIEW_PX: u32 = 160;
/// Largest part of a media file in one response to a player, in bytes. A player stops reading when it has enough. A response that
/// does not fit into the buffers would then block one of the browser's few connections.
const PART_BYTES: u64 = 1 << 20;
/// Number of bytes of a media file that are read at a time.
const CHUNK_BYTES: u64 = 64 << 10;

/// Content security policy: everything comes from this server, text is never markup, and no other page may frame this page or learn
/// its URL.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src 'self'; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Header fields of every response.
static FIELDS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// Request of a page to a run in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Finish the step under way, write a checkpoint and end.
    Stop,
    /// Write a checkpoint after the step under way.
    Save,
}

/// Connection between the page and the run that serves it.
pub struct Controls {
    /// Passes a request to the run and returns a sentence about what happens next.
    pub act: Box<dyn Fn(Action) -> String + Send + Sync>,
    /// Step and phase under way.
    pub activity: Activity,
}

/// Server of the page for some runs. It runs until it is dropped.
pub struct Server {
    url: String,
    /// File with the URL of a run in progress.
    address_file: Option<PathBuf>,
    runs_left_out: usize,
    app: Arc<App>,
    _http: Http,
}

pub(crate) struct App {
    token: String,
    runs: Vec<Run>,
    records: Records,
    catalogues: Catalogues,
    curves: AllCurves,
    marks: Marks,
    verdicts: Verdicts,
    table: Table,
    evaluations: Evaluations,
    listeners: Arc<AtomicUsize>,
    /// Connection to the run in progress; `None` if this server only shows runs.
    controls: Option<Controls>,
    /// Outcome of the run, once it has ended.
    ended: OnceLock<String>,
    /// Number of pages that have received the outcome.
    told: AtomicUsize,
}

impl Server {
    /// Name of the file in a run directory that contains the URL of the run's page. Only the owner can read it.
    pub const ADDRESS_FILE: &str = "page.url";
    /// Largest number of runs of a directory.
    pub const MOST_RUNS: usize = MAX_RUNS;

    /// Serves existing runs. Each directory is a run directory or contains run directories. A single run gets the URL stored in
    /// [`Self::ADDRESS_FILE`], so that open pages reconnect. It gets a different URL if that port is in use or the caller
    /// requests another one.
    ///
    /// # Errors
    /// Returns an error if a directory contains no run, or if the requested port is in use.
    pub fn start(directories: &[PathBuf], place: &Place) -> Result<Self, Error> {
        let (runs, runs_left_out) = Run::newest(directories, MAX_RUNS)?;
        let kept = if let [run] = runs.as_slice() { Address::kept(&run.dir) } else { None };
        Ok(Self { runs_left_out, ..Self::serve(runs, place, kept, None)? })
    }

    /// Serves a run that is about to begin. `directory` exists and contains no links. [`Self::ADDRESS_FILE`] then contains the URL
    /// of the page. This is the URL of an earlier start if its port is free. With `controls`, the page can stop the run and save a
    /// checkpoint.
    ///
    /// # Errors
    /// Returns an error if the requested port is in use or the directory cannot be written.
    pub fn start_live(directory: PathBuf, place: &Place, controls: Option<Controls>) -> Result<Self, Error> {
        let path = directory.join(Self::ADDRESS_FILE);
        let kept = Address::kept(&directory);
        let mut server = Self::serve(vec![Run { dir: directory }], place, kept, controls)?;
        write_address(&path, &server.url).map_err(Error::io("write", &path))?;
        server.address_file = Some(path);
        Ok(server)
    }

    fn serve(
        runs: Vec<Run>,
        place: &Place,
        kept: Option<Address>,
        controls: Option<Controls>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Serve { place: place.to_string(), source };
        let (wanted, token) = match kept {
            Some(address) => (address.port, address.token),
            None => (0, token().map_err(failed)?),
        };
        let has_controls = controls.is_some();
        let app = Arc::new(App { token: token.clone(), controls, ..App::of(runs) });
        let start = |port: u16| {
            let app = Arc::clone(&app);
            // Only a run in progress takes requests that change something.
            let body_bytes = if has_controls { MAX_BODY_BYTES } else { 0 };
            let limits = Limits { fields: &FIELDS, body_bytes, ..Limits::default() };
            Http::start_at("watch", &Place { port, ..place.clone() }, limits, Page(app))
        };
        let http = match place.port {
            0 => start(wanted).or_else(|_| start(0)),
            port => start(port),
        };
        let http = http.map_err(failed)?;
        let url = format!("http://{}/{token}/", place.address(http.address().port()));
        Ok(Self { url, address_file: None, runs_left_out: 0, app, _http: http })
    }

    /// Sends the outcome of the run to the open pages and waits a few seconds at most until all of them have received it.
    pub fn end(&self, how: &str) {
        const PATIENCE: Duration = Duration::from_secs(3);
        let began = Instant::now();
        // Only the first outcome counts.
        let _ = self.app.ended.set(how.to_owned());
        let left = || self.app.told.load(Ordering::Relaxed) < self.app.listeners.load(Ordering::Relaxed);
        while left() && began.elapsed() < PATIENCE {
            std::thread::sleep(LOOK_EVERY / 10);
        }
    }

    /// Returns the URL of the page. Anyone who knows it can read the runs.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the number of older runs that the page does not show, because their directory has more than [`Self::MOST_RUNS`].
    pub fn runs_left_out(&self) -> usize {
        self.runs_left_out
    }

    /// Returns the path of the file with the URL of a run in progress.
    pub fn address_file(&self) -> Option<&Path> {
        self.address_file.as_deref()
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

/// Port and token of an earlier server.
#[derive(Debug, PartialEq, Eq)]
struct Address {
    port: u16,
    token: String,
}

impl Address {
    /// Reads the URL stored in a run directory; `None` if there is none or if anyone but its owner could know it.
    fn kept(directory: &Path) -> Option<Self> {
        let file = inside::open(directory, Server::ADDRESS_FILE).ok()?;
        let found = file.metadata().ok()?;
        let mut text = String::new();
        file.take(256).read_to_string(&mut text).ok()?;
        let mut lines = text.lines();
        let (address, mark) = (lines.next()?, lines.next()?);
        // The file belongs to another account, is readable by others, or is a copy. In a copied directory, the person who packed it
        // would know the token.
        if mark != mark_of(&found)? {
            return None;
        }
        let (host, token) = address.strip_prefix("http://")?.strip_suffix('/')?.split_once('/')?;
        let (_, port) = host.rsplit_once(':')?;
        let is_token =
            token.len() == 32 && token.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        Some(Self { port: port.parse().ok()?, token: token.to_owned() }).filter(|_| is_token)
    }
}

/// Returns a text that identifies this very file, because it contains its device and inode. `None` if other accounts own or can
/// read the file, or if the system does not report this.
fn mark_of(file: &fs::Metadata) -> Option<String> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let is_own = file.uid() == rustix::process::geteuid().as_raw() && file.mode() & 0o077 == 0;
        is_own.then(|| format!("# {}:{}", file.dev(), file.ino()))
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        None
    }
}

/// Writes the URL of a page and the mark of the file to a new file that only its owner can read. An existing file is replaced.
fn write_address(path: &Path, url: &str) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    let mark = mark_of(&file.metadata()?).unwrap_or_default();
    file.write_all(format!("{url}\n{mark}\n").as_bytes())
}

/// The page as a service of the HTTP server.
struct Page(Arc<App>);

impl Service for Page {
    fn at_head(&self, head: &Request) -> Option<Answer> {
        match self.0.path(head) {
            None => Some(Answer::new(404, "text/plain", "not found\n")),
            Some(path) if head.is_post() => self.0.action(path, head).err(),
            Some(_) => None,
        }
    }

    fn answer(&self, request: &Request) -> Answer {
        let path = self.0.path(request).unwrap_or_default();
        if request.is_post() {
            return match self.0.action(path, request) {
                Ok((action, controls)) => json_answer(&json!({ "told": (controls.act)(action) })),
                Err(refusal) => refusal,
            };
        }
        match path {
            "api/events" => self.0.listen(),
            path => self.0.answer(path, request.query(), request).unwrap_or_else(|error| refusal(&error)),
        }
    }
}

fn json_answer(value: &Value) -> Answer {
    Answer::new(200, "application/json", value.to_string())
}

fn refusal(error: &Error) -> Answer {
    let status = match error {
        Error::Missing(_) | Error::NoRun { .. } | Error::Query(_) => 404,
        _ => 500,
    };
    Answer::new(status, "application/json", json!({ "error": told(error) }).to_string())
}

fn asked<T: DeserializeOwned>(query: &str) -> Result<T, Error> {
    Ok(serde_urlencoded::from_str(query)?)
}

#[derive(Deserialize)]
struct Asked {
    #[serde(default)]
    run: usize,
    /// Offset: a byte in the metrics, or an index in a list.
    #[serde(default)]
    from: u64,
    #[serde(default)]
    limit: Option<usize>,
    #[serde(default)]
    step: u64,
    /// Group index of a rollout.
    group: Option<usize>,
    sample: Option<usize>,
    /// Row index of an evaluation.
    row: Option<usize>,
    #[serde(default)]
    at: usize,
    /// Number of frames in a preview.
    frames: Option<usize>,
    /// Prompts by step and index.
    #[serde(default)]
    places: String,
}

impl App {
    /// Creates the answers about runs, without a server.
    pub(crate) fn of(runs: Vec<Run>) -> Self {
        Self {
            token: String::new(),
            runs,
            records: Records::default(),
            catalogues: Catalogues::default(),
            curves: AllCurves::default(),
            marks: Marks::default(),
            verdicts: Verdicts::default(),
            table: Table::default(),
            evaluations: Evaluations::default(),
            listeners: Arc::default(),
            controls: None,
            ended: OnceLock::new(),
            told: AtomicUsize::new(0),
        }
    }

    /// Returns the path of a request after the token; `None` if the client does not know the token.
    fn path<'a>(&self, request: &'a Request) -> Option<&'a str> {
        let (token, path) = request.path().strip_prefix('/')?.split_once('/')?;
        is_secret(token.as_bytes(), &self.token).then_some(path)
    }

    /// Returns the action that a `POST` asks for. Only this page can send it: another page does not know the token, cannot set a
    /// header without the permission of this server, and has another origin.
    ///
    /// # Errors
    /// Returns the refusal of a request from anywhere else.
    fn action(&self, path: &str, request: &Request) -> Result<(Action, &Controls), Answer> {
        let (action, controls) = match (path, &self.controls) {
            ("api/stop", Some(controls)) => (Action::Stop, controls),
            ("api/save", Some(controls)) => (Action::Save, controls),
            _ => {
                let refusal = Answer::refusal(StatusCode::METHOD_NOT_ALLOWED, "this method is not allowed");
                return Err(refusal.with(header::ALLOW, "GET, HEAD"));
            }
        };
        let field = |name| request.field(&HeaderName::from_static(name));
        let has_token = field("x-token").is_some_and(|token| is_secret(token.as_bytes(), &self.token));
        let is_own_site = field("sec-fetch-site").is_none_or(|site| site == "same-origin");
        match request.origin() == Origin::Own && has_token && is_own_site {
            true => Ok((action, controls)),
            false => Err(Answer::refusal(StatusCode::FORBIDDEN, "only the page of the run can ask for this")),
        }
    }

    fn run(&self, at: usize) -> Result<&Run, Error> {
        self.runs.get(at).ok_or_else(|| Error::missing(format!("there is no run {at}")))
    }

    fn answer(&self, path: &str, query: &str, request: &Request) -> Result<Answer, Error> {
        if path.is_empty() {
            return Ok(Answer::new(200, "text/html; charset=utf-8", assets::PAGE));
        }
        if let Some(name) = path.strip_prefix("page/") {
            let file = assets::FILES.iter().find(|(own, ..)| *own == name);
            let (_, kind, content) = file.ok_or_else(|| Error::missing("not found"))?;
            return Ok(Answer::new(200, kind, *content));
        }
        let given: Asked = asked(query)?;
        let run = self.run(given.run)?;
        let group = given.group.unwrap_or(0);
        Ok(match path {
            "api/metrics" => rows(run, given.from)?,
            "api/text" => {
                let text = self.records.text(run, given.step, group, given.sample)?;
                Answer::new(200, "text/plain; charset=utf-8", text)
            }
            "api/tokens" => {
                let line = self.records.tokens(run, given.step, group, given.sample.unwrap_or(0))?;
                Answer::new(200, "application/json", line)
            }
            "api/preview" => {
                let frames = given.frames.unwrap_or(1);
                let made = self.records.preview(run, (given.step, group, given.at), frames, PREVIEW_PX)?;
                Answer::new(200, made.mime, made.bytes.clone())
            }
            "api/media" => {
                let medium = match (given.group, given.row) {
                    (Some(group), _) => self.records.medium(run, given.step, group, given.at)?,
                    (None, Some(row)) => self.evaluations.medium(run, given.step, row, given.at)?,
                    (None, None) => {
                        return Err(Error::missing("the request names no record; expected `group` or `row`"));
                    }
                };
                file(&medium, request)?
            }
            _ => json_answer(&self.value(path, query)?),
        })
    }

    /// Returns the answer to a request whose answer is JSON.
    pub(crate) fn value(&self, path: &str, query: &str) -> Result<Value, Error> {
        let given: Asked = asked(query)?;
        let run = self.run(given.run)?;
        Ok(match path {
            "api/runs" => {
                let mut all: Value = self.runs.iter().zip(Run::names(&self.runs)).map(described).collect();
                if let (Some(_), Some(own)) = (&self.controls, all.get_mut(0).and_then(Value::as_object_mut))
                {
                    own.insert("controls".to_owned(), true.into());
                }
                all
            }
            "api/curves" => self.curves.of(run, &asked(query)?)?,
            "api/marks" => json!(self.marks.of(run)?),
            "api/table" => json!(self.table.of(&self.runs)),
            "api/verdict" => json!(self.verdicts.of(run)?),
            "api/steps" => {
                let (steps, capped) = run.last_steps("rollouts", MAX_STEPS)?;
                json!({ "steps": steps, "capped": capped, "tokens": run.steps("tokens")? })
            }
            "api/groups" => {
                let limit = given.limit.unwrap_or(MAX_GROUPS).min(MAX_GROUPS);
                self.records.groups(run, given.step, given.from as usize, limit)?
            }
            "api/lines" => self.records.lines(run, &given.places)?,
            "api/catalogue" => self.catalogues.with(run, |own| own.groups(&asked(query)?))?,
            "api/spread" => self.catalogues.with(run, |own| own.spread(&asked(query)?))?,
            "api/joint" => self.catalogues.with(run, |own| own.joint(&asked(query)?))?,
            "api/group" => self.records.group(run, given.step, given.group.unwrap_or(0))?,
            "api/find" => self.records.find(run, &asked::<Filter>(query)?)?,
            "api/evaluations" => Evaluations::summaries(run)?,
            "api/compare" => {
                let asked = asked::<Comparison>(query)?;
                let before = asked.other.map_or(Ok(run), |other| self.run(other))?;
                self.evaluations.compare(before, run, &asked)?
            }
            _ => return Err(Error::missing("not found")),
        })
    }

    /// Opens a medium of a prompt of the first run.
    pub(crate) fn rollout_medium(&self, step: u64, group: usize, at: usize) -> Result<Medium, Error> {
        self.records.medium(self.run(0)?, step, group, at)
    }

    /// Opens a medium of a question of the first run.
    pub(crate) fn evaluation_medium(&self, step: u64, row: usize, at: usize) -> Result<Medium, Error> {
        self.evaluations.medium(self.run(0)?, step, row, at)
    }
}

fn described((run, name): (&Run, String)) -> Value {
    json!({
        "name": name, "dir": run.dir, "settings": run.settings(), "metrics": run.metrics_now(), "ended": run.last_written(),
    })
}

fn rows(run: &Run, from: u64) -> Result<Answer, Error> {
    let slice = run.metrics(from)?;
    let out = Answer::new(200, "application/x-ndjson; charset=utf-8", slice.rows);
    let out = out.with(HeaderName::from_static("x-file"), slice.id.to_string());
    Ok(out.with(HeaderName::from_static("x-next"), slice.next.to_string()))
}

/// Responds with a media file, or with the part that a player requests.
fn file(medium: &Medium, request: &Request) -> Result<Answer, Error> {
    let failed = |error| Error::io("read", &medium.path)(error);
    let mut file = File::open(&medium.path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let range = request.field(&header::RANGE).and_then(|asked| range(asked, length));
    let (status, from, until) =
        range.map_or((200, 0, length), |(from, until)| (206, from, until.min(from + PART_BYTES)));
    file.seek(SeekFrom::Start(from)).map_err(failed)?;
    // Never sends more than the announced size, even if the file grows.
    let mut rest = file.take(until - from);
    let parts = std::iter::from_fn(move || {
        let mut part = Vec::new();
        match rest.by_ref().take(CHUNK_BYTES).read_to_end(&mut part) {
            Ok(0) => None,
            read => Some(read.map(|_| part)),
        }
    });
    let answer = Answer::stream(status, medium.mime, Some(until - from), Duration::ZERO, Box::new(parts))
        .with(header::ACCEPT_RANGES, "bytes");
    Ok(match status {
        206 => answer.with(header::CONTENT_RANGE, format!("bytes {from}-{}/{length}", until - 1)),
        _ => answer,
    })
}

/// Parses `bytes=a-b`, `bytes=a-` or `bytes=-n` and returns the first byte and the end. Returns `None` if the whole file is to be
/// sent.
fn range(text: &str, length: u64) -> Option<(u64, u64)> {
    let (from, to) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (from, until) = match (from.parse::<u64>(), to.parse::<u64>()) {
        (Ok(from), Ok(to)) => (from, to.saturating_add(1).min(length)),
        (Ok(from), Err(_)) if to.is_empty() => (from, length),
        (Err(_), Ok(last)) if from.is_empty() => (length.saturating_sub(last), length),
        _ => return None,
    };
    (from < until).then_some((from, until))
}

impl App {
    /// Returns the step and phase under way if they differ from what a page has heard, at most once a second.
    fn doing(&self, last: &str, at: Option<Instant>) -> Option<String> {
        let controls = self.controls.as_ref()?;
        if at.is_some_and(|at| at.elapsed() < DOING_EVERY) || self.ended.get().is_some() {
            return None;
        }
        Some(controls.activity.line(Instant::now())).filter(|now| now != last)
    }

    /// Returns the load of the machine on which the run trains.
    fn machine(&self) -> Option<Load> {
        Some(self.controls.as_ref()?.activity.machine().now())
    }

    /// Streams the state of each run's metrics to a page: once at the start, and again after each change.
    fn listen(self: &Arc<Self>) -> Answer {
        let Some(listener) = Listener::enter(&self.listeners) else {
            return Answer::new(503, "text/plain", "too many pages are open\n");
        };
        let app = Arc::clone(self);
        let seen = |all: &[Metrics]| {
            all.iter().map(|own| (own.id, own.bytes, own.events, own.done)).collect::<Vec<_>>()
        };
        let (mut last, mut spoken, mut heard) = (None, Instant::now(), false);
        let (mut doing, mut doing_at) = (String::new(), None::<Instant>);
        let parts = std::iter::from_fn(move || {
            let _listens = &listener;
            let now: Vec<Metrics> = app.runs.iter().map(Run::metrics_now).collect();
            let text = if last.as_ref() != Some(&seen(&now)) {
                last = Some(seen(&now));
                format!("data: {}\n\n", json!(now))
            } else if let (false, Some(how)) = (heard, app.ended.get()) {
                heard = true;
                app.told.fetch_add(1, Ordering::Relaxed);
                format!("event: end\ndata: {}\n\n", json!({ "how": how }))
            } else if let Some(now) = app.doing(&doing, doing_at) {
                doing_at = Some(Instant::now());
                doing = now;
                format!("event: doing\ndata: {}\n\n", json!({ "doing": doing, "machine": app.machine() }))
            } else if spoken.elapsed() > ALIVE_EVERY {
                ":\n\n".to_owned()
            } else {
                return Some(Ok(Vec::new()));
            };
            spoken = Instant::now();
            Some(Ok(text.into_bytes()))
        });
        Answer::stream(200, "text/event-stream", None, LOOK_EVERY, Box::new(parts))
    }
}

/// An open page that receives events. It is counted until it is dropped.
struct Listener(Arc<AtomicUsize>);

impl Listener {
    fn enter(all: &Arc<AtomicUsize>) -> Option<Self> {
        let own = Self(Arc::clone(all));
        // If there is no room, dropping `own` corrects the count.
        (all.fetch_add(1, Ordering::Relaxed) < MAX_LISTENERS).then_some(own)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead as _, BufReader};
    use std::net::TcpStream;

    use super::*;

    const PNG: &[u8] = b"\x89PNG\r\n\x1a\n-and-the-rest";
    const SCRIPT: &str = "<script>alert(1)</script>";

    /// Creates a run with two steps and two evaluations. Each step has two prompts with two completions; the first prompt has a
    /// picture.
    fn run() -> (tempfile::TempDir, Server) {
        let directory = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(directory.path()).unwrap();
        ["rollouts", "tokens", "eval"].iter().for_each(|name| fs::create_dir(root.join(name)).unwrap());
        fs::write(root.join("metrics.jsonl"), "{\"step\":1,\"reward\":0.5}\n").unwrap();
        fs::write(root.join("dot.png"), PNG).unwrap();
        fs::write(root.join("config.yaml"), "run_name: mine   # flag\ncategory_column: kind   # flag\n")
            .unwrap();
        for step in 1..=2 {
            let mut lines = Vec::new();
            for (group, sample) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let media =
                    if group == 0 { vec![root.join("dot.png"), "/etc/passwd".into()] } else { Vec::new() };
                let answer =
                    if sample == 1 { SCRIPT.to_owned() } else { format!("<answer>{group}</answer>") };
                let mut line = json!({
                    "step": step, "timestamp": "", "epoch": 0.5, "id": format!("r{group}"), "group": group, "sample": sample,
                    "prompt": "x".repeat(30_000), "completion": answer, "solution": "B", "rewards": {"accuracy": sample},
                    "reward": sample as f64, "advantage": 1.0, "length": 3, "media": media,
                    "finish_reason": if (step, group, sample) == (2, 1, 1) { "length" } else { "stop" },
                });
                if sample == 0 {
                    line["row"] = json!({ "kind": format!("k{group}") });
                }
                lines.extend(format!("{line}\n").into_bytes());
            }
            // An invalid line or invalid UTF-8 does not hide the other lines.
            lines.extend(b"{\"not\": a rollout\n");
            let bad = String::from_utf8_lossy(&lines).replace("<answer>1</answer>", "<answer>\u{1}</answer>");
            let bad: Vec<u8> = bad.bytes().map(|byte| if byte == 1 { 0xff } else { byte }).collect();
            fs::write(root.join(format!("rollouts/step-{step:06}.jsonl")), bad).unwrap();
            let reward = f64::from(step - 1);
            let row = json!({
                "id": "e", "dataset": "d", "prompt": "?", "solution": "B", "media": [root.join("dot.png")], "category": "c",
                "completions": [SCRIPT], "answers": [null], "rewards": {"accuracy": [reward]}, "reward": [reward],
            });
            fs::write(root.join(format!("eval/step-{step:06}.jsonl")), format!("{row}\n{row}\n")).unwrap();
            fs::write(root.join(format!("eval/step-{step:06}.summary.json")), "{\"eval_reward\":1}").unwrap();
        }
        fs::write(root.join("tokens/step-000001.jsonl"), "{\"group\":1,\"sample\":0,\"tokens\":[\"a\"]}\n")
            .unwrap();
        let server = Server::start(&[root], &Place::local(0)).unwrap();
        (directory, server)
    }

    /// Returns the status and the body of a response.
    fn get(url: &str, headers: &[(&str, &str)]) -> (u16, Vec<u8>) {
        let agent =
            ureq::Agent::new_with_config(ureq::Agent::config_builder().http_status_as_error(false).build());
        let request =
            headers.iter().fold(agent.get(url), |request, (name, value)| request.header(*name, *value));
        let mut response = request.call().unwrap();
        (response.status().as_u16(), response.body_mut().read_to_vec().unwrap())
    }

    fn value(server: &Server, path: &str) -> Value {
        let (status, body) = get(&format!("{}api/{path}", server.url()), &[]);
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
        serde_json::from_slice(&body).unwrap()
    }

    fn refused(server: &Server, path: &str) -> String {
        let (status, body) = get(&format!("{}api/{path}", server.url()), &[]);
        assert_eq!(status, 404, "{}", String::from_utf8_lossy(&body));
        serde_json::from_slice::<Value>(&body).unwrap()["error"].as_str().unwrap().to_owned()
    }

    #[test]
    fn only_who_knows_the_address_is_answered_and_only_on_this_machine() {
        let (_directory, server) = run();
        let url = server.url();
        let (status, page) = get(url, &[]);
        assert_eq!(status, 200);
        let page = String::from_utf8(page).unwrap();
        assert!(page.contains("page/app.js") && !page.contains("://"), "everything is from here");
        for (name, ..) in assets::FILES {
            assert_eq!(get(&format!("{url}page/{name}"), &[]).0, 200, "{name}");
        }
        let root = &url[..url.len() - 33];
        let (last, other) = url.trim_end_matches('/').split_at(url.len() - 2);
        let wrong = format!("{last}{}/", if other == "0" { "1" } else { "0" });
        for elsewhere in
            [root, &format!("{root}api/runs"), &wrong, &format!("{wrong}api/runs"), &format!("{url}../x")]
        {
            assert_eq!(get(elsewhere, &[]).0, 404, "{elsewhere}");
        }
        assert_eq!(get(url, &[("Host", "evil.example")]).0, 421);
        assert_eq!(get(url, &[("Host", "localhost:1")]).0, 200);
        assert_eq!(ureq::post(url).send("x").unwrap_err().to_string(), "http status: 405");
        let response = ureq::get(url).call().unwrap();
        assert_eq!(response.headers()["content-security-policy"].to_str().unwrap(), POLICY);
        assert_eq!(response.headers()["x-content-type-options"], "nosniff");
        let another = Server::start(&[_directory.path().to_owned()], &Place::local(0)).unwrap();
        assert_ne!(
            another.url()[another.url().len() - 33..],
            url[url.len() - 33..],
            "each has its own token"
        );
    }

    #[test]
    fn metrics_come_as_they_stand_and_news_is_told() {
        let (directory, server) = run();
        assert_eq!(value(&server, "runs")[0]["name"], "mine");
        let rows = |from: usize| get(&format!("{}api/metrics?run=0&from={from}", server.url()), &[]).1;
        let first = b"{\"step\":1,\"reward\":0.5}\n";
        assert_eq!(rows(0), first);
        let address = server.url().trim_start_matches("http://");
        let (host, path) = address.split_once('/').unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        write!(stream, "GET /{path}api/events HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
        let mut lines =
            BufReader::new(stream).lines().map(Result::unwrap).filter(|line| line.starts_with("data: "));
        let mut told = || serde_json::from_str::<Value>(&lines.next().unwrap()["data: ".len()..]).unwrap();
        assert_eq!(told()[0]["bytes"], first.len());
        let log = fs::OpenOptions::new().append(true).open(directory.path().join("metrics.jsonl"));
        log.unwrap().write_all(b"{\"step\":2}\n").unwrap();
        assert_eq!(told()[0]["bytes"], first.len() + 11);
        assert_eq!(rows(first.len()), b"{\"step\":2}\n");
        // A page that receives events does not delay the end.
        let end = Instant::now();
        drop(server);
        assert!(end.elapsed() < Duration::from_secs(5));
    }

    #[cfg(unix)]
    #[test]
    fn the_page_of_a_run_keeps_its_address_and_open_pages_hear_of_the_end() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(directory.path()).unwrap();
        fs::write(root.join("metrics.jsonl"), "{\"step\":1}\n").unwrap();
        let live = Server::start_live(root.clone(), &Place::local(0), None).unwrap();
        let (url, file) = (live.url().to_owned(), root.join(Server::ADDRESS_FILE));
        assert_eq!(fs::read_to_string(&file).unwrap().lines().next(), Some(&*url));
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        // While the run serves its page, a second server gets the same token and a different port.
        let second = Server::start(std::slice::from_ref(&root), &Place::local(0)).unwrap();
        let token = |url: &str| url.trim_end_matches('/').rsplit_once('/').unwrap().1.to_owned();
        assert_eq!(token(second.url()), token(&url));
        assert_ne!(second.url(), url);
        drop(second);

        let mut events =
            BufReader::new(ureq::get(format!("{url}api/events")).call().unwrap().into_body().into_reader());
        let mut line = String::new();
        let mut next = || {
            line.clear();
            while line.trim().is_empty() {
                line.clear();
                assert!(events.read_line(&mut line).unwrap() > 0);
            }
            line.clone()
        };
        assert!(next().starts_with("data: ["));
        live.end("all 7 steps are done");
        assert_eq!([next(), next()], ["event: end\n", "data: {\"how\":\"all 7 steps are done\"}\n"]);
        drop(events);
        drop(live);
        let again = Server::start(std::slice::from_ref(&root), &Place::local(0)).unwrap();
        assert_eq!(again.url(), url);
        drop(again);
        assert_eq!(
            Server::start_live(root.clone(), &Place::local(0), None).unwrap().url(),
            url,
            "a run that goes on, too"
        );

        // A URL file that others can read, or that contains no valid URL, is not used.
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        assert_ne!(
            token(Server::start(std::slice::from_ref(&root), &Place::local(0)).unwrap().url()),
            token(&url)
        );
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let copy = directory.path().join("copy");
        fs::create_dir(&copy).unwrap();
        fs::copy(&file, copy.join(Server::ADDRESS_FILE)).unwrap();
        assert!(Address::kept(&root).is_some());
        assert_eq!(Address::kept(&copy), None, "a copy may come from anybody");
        for text in [
            "",
            "http://127.0.0.1:80/",
            "http://127.0.0.1:80/../",
            "http://127.0.0.1:x/00000000000000000000000000000000/",
        ] {
            fs::write(&file, text).unwrap();
            assert_eq!(Address::kept(&root), None, "{text}");
        }
    }

    #[test]
    fn problems_are_served_among_the_events() {
        let (directory, server) = run();
        assert_eq!(value(&server, "marks"), json!([]));
        let problem = "\"rule\":\"ran_away\",\"begins\":true,\"since\":2,\"text\":\"x\"}";
        let row = format!("{{\"step\":6,\"time\":\"\",\"kind\":\"problem\",{problem}\n");
        fs::write(directory.path().join("events.jsonl"), &row).unwrap();
        let served: Value = serde_json::from_str(&format!("{{{problem}")).unwrap();
        let mark = json!({ "kind": "warning", "step": 6, "text": "warning: x", "problem": served });
        assert_eq!(value(&server, "marks"), json!([mark]));
        assert_eq!(value(&server, "runs")[0]["metrics"]["events"], row.len());
    }

    #[test]
    fn completions_are_found_and_shown() {
        let (_directory, server) = run();
        assert_eq!(value(&server, "steps?run=0"), json!({ "steps": [1, 2], "capped": false, "tokens": [1] }));
        let groups = value(&server, "groups?run=0&step=2&limit=1&from=1");
        assert_eq!(groups["all"], 2);
        assert_eq!((&groups["groups"][0]["id"], &groups["groups"][0]["cut"]), (&json!("r1"), &json!(1)));
        assert_eq!(groups["groups"][0]["category"], "k1");
        let group = value(&server, "group?run=0&step=1&group=1");
        assert_eq!(group["samples"][1]["completion"]["text"], SCRIPT);
        assert_eq!(
            group["samples"][0]["completion"]["text"], "<answer>\u{fffd}</answer>",
            "bytes that are no text"
        );
        assert_eq!(
            (&group["samples"][0]["tokens"], &group["samples"][1]["tokens"]),
            (&json!(true), &json!(false))
        );
        assert_eq!(group["prompt"]["text"].as_str().unwrap().len(), 20_000, "cut, with a way to see all:");
        assert_eq!(group["prompt"]["chars"], 30_000);
        assert_eq!(get(&format!("{}api/text?run=0&step=1&group=1", server.url()), &[]).1.len(), 30_000);
        assert_eq!(value(&server, "tokens?run=0&step=1&group=1&sample=0")["tokens"], json!(["a"]));
        assert!(refused(&server, "tokens?run=0&step=1&group=0&sample=0").contains("log_token_stats"));

        let places = |query: &str| -> Vec<(u64, u64, u64)> {
            let found = value(&server, &format!("find?run=0&limit=100&{query}"));
            assert_eq!(found["next"], Value::Null);
            let place = |own: &Value| ["step", "group", "sample"].map(|name| own[name].as_u64().unwrap());
            found["found"].as_array().unwrap().iter().map(place).map(|[a, b, c]| (a, b, c)).collect()
        };
        assert_eq!(places("text=ALERT").len(), 4);
        assert_eq!(places("text=alert&category=k1"), [(1, 1, 1), (2, 1, 1)]);
        assert_eq!(places("cut=true"), [(2, 1, 1)]);
        assert_eq!(places("unparsed=true&max=0"), []);
        assert_eq!(places("min=0.5&text=r1"), [(1, 1, 1), (2, 1, 1)]);
        let first = value(&server, "find?run=0&limit=1");
        assert_eq!(first["found"].as_array().unwrap().len(), 1);
        let (step, byte) = (&first["next"]["step"], &first["next"]["byte"]);
        let rest = value(&server, &format!("find?run=0&limit=100&step={step}&byte={byte}"));
        assert_eq!(rest["found"].as_array().unwrap().len(), 7, "it goes on where it ended");
        // Results are fetched one at a time: the category is also known in the middle of a prompt.
        let (mut next, mut one_by_one) = (json!({ "step": 0, "byte": 0 }), Vec::new());
        while !next.is_null() {
            let found = value(
                &server,
                &format!("find?run=0&limit=1&category=k1&step={}&byte={}", next["step"], next["byte"]),
            );
            one_by_one
                .extend(found["found"].as_array().unwrap().iter().map(|own| own["sample"].as_u64().unwrap()));
            next = found["next"].clone();
            assert!(one_by_one.len() < 9, "no end");
        }
        assert_eq!(one_by_one, [0, 1, 0, 1]);

        for path in [
            "group?run=0&step=1&group=9",
            "group?run=0&step=9&group=0",
            "group?run=1",
            "steps?run=x",
            "nothing",
        ] {
            refused(&server, path);
        }
    }

    #[test]
    fn media_are_served_by_their_place_in_a_record() {
        let (directory, server) = run();
        let group = value(&server, "group?run=0&step=1&group=0");
        // The run has no settings that name an orientation, so it is of a program that did not turn pictures.
        assert_eq!(
            group["media"][0],
            json!({ "name": "dot.png", "mime": "image/png", "times": null, "heard": false, "stored": true })
        );
        assert!(group["media"][1]["error"].as_str().unwrap().contains("it is not a picture, clip or sound"));
        let url = format!("{}api/media?run=0&step=1&group=0&at=0", server.url());
        assert_eq!(get(&url, &[]), (200, PNG.to_vec()));
        assert_eq!(get(&url, &[("Range", "bytes=1-3")]), (206, b"PNG".to_vec()));
        let response = ureq::get(&url).header("Range", "bytes=8-").call().unwrap();
        assert_eq!(response.headers()["content-range"].to_str().unwrap(), "bytes 8-20/21");
        assert_eq!(response.headers()["content-type"], "image/png");
        assert_eq!(response.headers()["connection"], "close");
        let clip = [&b"\0\0\0\x18ftypmp42"[..], &vec![7; 3 << 20]].concat();
        fs::write(directory.path().join("dot.png"), &clip).unwrap();
        let response = ureq::get(&url).header("Range", "bytes=5-").call().unwrap();
        assert_eq!(
            response.headers()["content-range"].to_str().unwrap(),
            format!("bytes 5-{}/{}", PART_BYTES + 4, clip.len())
        );
        assert_eq!(response.into_body().read_to_vec().unwrap(), clip[5..5 + PART_BYTES as usize]);
        assert_eq!(get(&url, &[]).1.len(), clip.len(), "a request without a range gets all");
        assert!(refused(&server, "media?run=0&step=1&group=0&at=1").contains("/etc/passwd is not served"));
        refused(&server, "media?run=0&step=1&group=0&at=2");
        refused(&server, "media?run=0&step=1&at=0");
        assert_eq!(get(&format!("{}api/media?run=0&step=1&row=1&at=0", server.url()), &[]).0, 200);
    }

    #[test]
    fn questions_are_compared_before_and_after() {
        let (directory, server) = run();
        // An evaluation whose summary has not been written yet.
        fs::write(directory.path().join("eval/step-000003.jsonl"), "{}\n").unwrap();
        let found = value(&server, "evaluations?run=0");
        assert_eq!((found["evaluations"].as_array().unwrap().len(), &found["capped"]), (2, &json!(false)));
        assert_eq!(found["evaluations"][1], json!({ "step": 2, "summary": { "eval_reward": 1 } }));
        let found = value(&server, "compare?run=0&before=1&after=2&limit=1");
        assert_eq!(found["counts"], json!({ "better": 2, "worse": 0, "same": 0 }));
        assert_eq!((&found["all"], found["rows"].as_array().unwrap().len()), (&json!(2), 1));
        assert_eq!(found["gain"], json!({ "count": 2, "mean": 1.0, "deviation": 0.0 }));
        // Two evaluations of different runs are compared in the same way.
        let (other, _server) = run();
        let both =
            Server::start(&[directory.path().to_owned(), other.path().to_owned()], &Place::local(0)).unwrap();
        let found = value(&both, "compare?run=1&other=0&before=2&after=1&limit=1");
        assert_eq!((&found["counts"]["worse"], &found["gain"]["mean"]), (&json!(2), &json!(-1.0)));
        assert!(refused(&both, "compare?run=1&other=2&before=2&after=1").contains("there is no run 2"));
        assert_eq!(found["rows"][0]["after"]["completions"], json!([SCRIPT]));
        let worse = value(&server, "compare?run=0&before=2&after=1&change=worse&from=1&limit=5");
        assert_eq!(worse["rows"][0]["gain"], -1.0);
        assert_eq!(value(&server, "compare?run=0&before=1&after=2&category=other")["all"], 0);
    }

    #[test]
    fn a_run_that_begins_after_its_page_gets_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(directory.path()).unwrap();
        let server = Server::start_live(root.clone(), &Place::local(0), None).unwrap();
        let own = root.file_name().unwrap().to_str().unwrap();
        assert_eq!(value(&server, "runs")[0]["name"], own);
        assert_eq!(get(&format!("{}api/metrics?run=0", server.url()), &[]), (200, Vec::new()));
        fs::write(root.join("config.yaml"), "run_name: mine   # flag\n").unwrap();
        assert_eq!(value(&server, "runs")[0]["name"], "mine");
        assert_eq!(value(&server, "runs")[0]["settings"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_port_that_is_taken_is_named() {
        let (directory, server) = run();
        let port =
            server.url().trim_start_matches("http://127.0.0.1:").split('/').next().unwrap().parse().unwrap();
        let error =
            Server::start(&[directory.path().to_owned()], &Place::local(port)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot serve the page on 127.0.0.1:{port}; ")), "{error}");
    }

    #[test]
    fn parts_of_files_are_read_as_players_ask_for_them() {
        let cases = [
            ("bytes=0-", Some((0, 10))),
            ("bytes=2-4", Some((2, 5))),
            ("bytes=2-400", Some((2, 10))),
            ("bytes=-3", Some((7, 10))),
            ("bytes=-30", Some((0, 10))),
            ("bytes=10-", None),
            ("bytes=5-4", None),
            ("bytes=0-1,3-4", None),
            ("bytes=18446744073709551615-18446744073709551615", None),
            ("items=0-1", None),
        ];
        cases.into_iter().for_each(|(text, expected)| assert_eq!(range(text, 10), expected, "{text}"));
    }
}
