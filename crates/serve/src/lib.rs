//! An endpoint for OpenAI's clients: answers of a model to conversations, with pictures, clips, sounds and calls of tools, and texts
//! that it continues.
//!
//! The HTTP server refuses requests by their heads. Its handlers check bodies, and threads that prepare requests load media and render
//! prompts. The thread that calls [`Server::run`] decodes the completions of all requests in one [`Session`]: a request joins while
//! others decode, and leaves when it is complete or its client disconnects. Its bits do not depend on other requests.
//!
//! # Security
//! The server listens on loopback, unless the caller gives another address, and requires a key in the header `Authorization`. It refuses requests that a web page of another
//! origin sends. Media are given as `data:` addresses, or by address if downloads are allowed; no file of this machine is read.
//! [`omnigrpo_http`] limits what clients can send, and the number and size of waiting requests are limited here.

mod error;
mod metrics;
mod prepare;
mod reply;
mod request;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use hyper::StatusCode;
use hyper::header::{ALLOW, CACHE_CONTROL, HeaderName, X_CONTENT_TYPE_OPTIONS};
use omnigrpo_data::ReadOptions;
use omnigrpo_guard::{Errand, guarded, told};
pub use omnigrpo_http::Place;
use omnigrpo_http::head::Origin;
use omnigrpo_http::{Answer, Http, Limits, Request, Service, token};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_rollout::{Job, RolloutError, SamplingParams, Session, Step, Token};
use serde_json::{Value, json};

pub use error::Error;
use error::Refusal;
use metrics::Metrics;
use prepare::{Queue, Room, Unprepared};
use reply::{Reply, Sink};
use request::{Body, Kind};

/// Largest body of a request, and of the bodies of all requests together, bytes.
const MAX_BODY_BYTES: (usize, u64) = (64 << 20, 1 << 30);
/// Largest number of connections.
const CONNECTIONS: usize = 256;
/// Number of bodies that are checked at the same time.
const HANDLERS: usize = 4;
/// Number of requests that are prepared at the same time.
const PREPARATIONS: usize = 4;
/// Longest time of a request that is not streamed.
const ANSWER_TIME: Duration = Duration::from_secs(3600);
/// Largest number of requests that wait for their preparation or prefill, and of the bytes of their media.
const MAX_WAITING: (u64, u64) = (128, 1 << 30);
/// Interval at which an idle server looks for the request to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Smallest body of a large request, bytes.
const LARGE_BYTES: usize = 1 << 20;
/// Shortest time between two calls that return memory to the system.
const TRIM_EVERY: Duration = Duration::from_secs(2);
/// Longest time in which requests in progress are completed after the request to stop.
const LAST: Duration = Duration::from_secs(20);

/// Addresses of completions.
const CHATS: &str = "/v1/chat/completions";
const TEXTS: &str = "/v1/completions";

/// Header fields of every response.
static FIELDS: [(HeaderName, &str); 2] = [(X_CONTENT_TYPE_OPTIONS, "nosniff"), (CACHE_CONTROL, "no-store")];

/// Settings of a server.
pub struct Options {
    /// Name of the model in requests and responses.
    pub name: String,
    /// Address at which the server listens. Beyond this machine, give a key.
    pub place: Place,
    /// Key that requests must have; `None` creates a random one.
    pub key: Option<String>,
    /// Sampling parameters of a request that does not give them.
    pub sampling: SamplingParams,
    /// Maximum number of completions in flight.
    pub max_live: usize,
    /// Largest number of bytes that requests in progress may take for keys, values and log-probabilities. A request waits while
    /// others leave it no room, and is refused if it has no room alone.
    pub max_bytes: u64,
    /// Options for reading messages as rows: the question template, and whether media are downloaded.
    pub read: ReadOptions,
    /// Function that returns freed memory to the system. It is called at most every two seconds, after large requests and media.
    pub trim: fn(),
}

/// A server of one model.
pub struct Server {
    url: String,
    http: Http,
    app: Arc<App>,
    arrivals: Receiver<Arrival>,
    trim: fn(),
}

/// A request on its way to the thread that decodes.
struct Arrival {
    job: Job,
    reply: Reply,
    media_bytes: u64,
}

struct App {
    name: String,
    key: String,
    settings: request::Settings,
    unprepared: Queue,
    arrivals: Sender<Arrival>,
    metrics: Metrics,
    waiting_bytes: Arc<AtomicU64>,
    /// True if a large request or its media were freed since memory was last returned to the system.
    has_freed: AtomicBool,
    is_stopping: AtomicBool,
    started: u64,
}

impl Server {
    /// Starts to accept requests. They wait until [`Self::run`] is called. `prompts` builds prompts of any length that leaves room
    /// for one token.
    ///
    /// # Errors
    /// Returns an error if the port cannot be served or the system gives no random numbers.
    pub fn start(prompts: PromptBuilder, options: Options) -> Result<Self, Error> {
        let Options { name, place, key, sampling, max_live, max_bytes, read, trim } = options;
        let (sender, arrivals) = channel();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let app = Arc::new(App {
            name,
            key: key.map_or_else(token, Ok).map_err(Error::Random)?,
            settings: request::Settings { prompts, read, sampling, max_live, max_bytes },
            unprepared: Queue::default(),
            arrivals: sender,
            metrics: Metrics::default(),
            waiting_bytes: Arc::default(),
            has_freed: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            started: since.as_secs(),
        });
        let limits = Limits {
            connections: CONNECTIONS,
            body_bytes: MAX_BODY_BYTES.0,
            bodies_bytes: MAX_BODY_BYTES.1,
            answer_time: ANSWER_TIME,
            slowest_bytes_per_sec: 1 << 20,
            handlers: HANDLERS,
            fields: &FIELDS,
            refusal: Refusal::of_server,
            ..Limits::default()
        };
        let serving = Serving(Arc::clone(&app));
        for _ in 0..PREPARATIONS {
            let own = Arc::clone(&app);
            let work = move || while own.prepare_next() {};
            std::thread::Builder::new().name("prepare".to_owned()).spawn(work).map_err(Error::Thread)?;
        }
        let http = Http::start_at("serve", &place, limits, serving)
            .map_err(|source| Error::Listen { place: place.to_string(), source })?;
        let url = format!("http://{}/v1", place.address(http.address().port()));
        Ok(Self { url, http, app, arrivals, trim })
    }

    /// Returns the address for clients, such as `http://127.0.0.1:8000/v1`.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Returns the key that clients must send.
    pub fn key(&self) -> &str {
        &self.app.key
    }

    /// Decodes until `stop` is true. Then new requests are refused, and those in progress are completed, for 20 seconds at most.
    ///
    /// # Errors
    /// Returns the error of a device that cannot compute.
    pub fn run(&self, model: &Model, stop: &AtomicBool) -> Result<(), RolloutError> {
        let mut engine = Engine {
            app: &self.app,
            session: Session::new(model, self.app.settings.prompts.tokenizer()),
            waiting: VecDeque::new(),
            running: BTreeMap::new(),
        };
        let mut end: Option<Instant> = None;
        let mut trimmed = Instant::now();
        let result = loop {
            if stop.load(Relaxed) && end.is_none() {
                self.app.is_stopping.store(true, Relaxed);
                end = Some(Instant::now() + LAST);
            }
            engine.receive(&self.arrivals);
            if end.is_some_and(|end| engine.is_done() || Instant::now() > end) {
                break Ok(());
            }
            if trimmed.elapsed() >= TRIM_EVERY && self.app.has_freed.swap(false, Relaxed) {
                (self.trim)();
                trimmed = Instant::now();
            }
            if let Err(error) = engine.advance() {
                break Err(error);
            }
        };
        self.app.is_stopping.store(true, Relaxed);
        engine.end(result.as_ref().err());
        // The last responses reach their clients.
        let end = Instant::now() + LAST / 10;
        while self.http.connections() > 0 && Instant::now() < end {
            std::thread::sleep(LOOK_EVERY);
        }
        result
    }
}

/// The requests of the thread that decodes.
struct Engine<'a> {
    app: &'a App,
    session: Session<'a>,
    waiting: VecDeque<Arrival>,
    running: BTreeMap<u64, Reply>,
}

impl Engine<'_> {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Returns true if no request is left, not even one that is being prepared.
    fn is_done(&self) -> bool {
        self.is_idle() && self.app.metrics.waiting.load(Relaxed) == 0
    }

    /// Takes new requests, and waits a moment for one if there is nothing else to do. Drops requests whose client has gone.
    fn receive(&mut self, arrivals: &Receiver<Arrival>) {
        if self.is_idle() {
            match arrivals.recv_timeout(LOOK_EVERY) {
                Ok(arrival) => self.waiting.push_back(arrival),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
        self.waiting.extend(arrivals.try_iter());
        let Self { app, session, waiting, running } = self;
        waiting.retain(|arrival| {
            let goes_on = !arrival.reply.is_unwanted();
            if !goes_on {
                app.leave_queue(arrival);
                app.has_freed.fetch_or(arrival.reply.is_large, Relaxed);
                app.metrics.disconnected.fetch_add(1, Relaxed);
            }
            goes_on
        });
        running.retain(|job, reply| {
            let goes_on = !reply.is_unwanted();
            if !goes_on {
                session.cancel(*job);
                app.has_freed.fetch_or(reply.is_large, Relaxed);
                app.metrics.disconnected.fetch_add(1, Relaxed);
            }
            goes_on
        });
    }

    /// Admits the next request if there is room, and draws a token of each completion. One prefill at a time keeps the streams of
    /// other requests going.
    fn advance(&mut self) -> Result<(), RolloutError> {
        let in_flight = self.session.in_flight();
        let bytes: u64 = self.running.values().map(|reply| reply.bytes).sum();
        let request::Settings { max_live, max_bytes, .. } = self.app.settings;
        let has_room = |next: &Arrival| {
            let fits = in_flight + next.job.num_samples <= max_live && bytes + next.reply.bytes <= max_bytes;
            in_flight == 0 || fits
        };
        if let Some(arrival) = self.waiting.pop_front_if(|next| has_room(next)) {
            self.admit(arrival);
        }
        if self.session.in_flight() > 0 {
            let step = self.session.step()?;
            self.deliver(step);
        }
        let metrics = &self.app.metrics;
        metrics.running.store(self.running.len() as u64, Relaxed);
        metrics.in_flight.store(self.session.in_flight() as u64, Relaxed);
        Ok(())
    }

    fn admit(&mut self, arrival: Arrival) {
        self.app.leave_queue(&arrival);
        let Arrival { job, mut reply, .. } = arrival;
        let (tokenizer, prompt) = (self.app.settings.prompts.tokenizer(), Arc::clone(&job.prompt));
        let form = &reply.form;
        let (scored, wanted) = (form.echo && form.logprobs, !form.echo_only);
        // A panic concerns this request alone: its job is not in the session yet.
        let admitted = guarded(|| {
            let scores = if scored { self.session.score(&prompt, job.top_logprobs)? } else { Vec::new() };
            let admitted = if wanted { Some(self.session.admit(job)?) } else { None };
            Ok::<_, RolloutError>((scores, admitted))
        });
        match admitted {
            Ok(Ok((scores, admitted))) => {
                self.app.metrics.prompt_tokens.fetch_add(reply.prompt_tokens as u64, Relaxed);
                self.app.metrics.first_token(reply.since.elapsed());
                if reply.form.echo {
                    reply.begin_with(tokenizer, &prompt, &scores);
                }
                match admitted {
                    Some((number, step)) => {
                        self.running.insert(number, reply);
                        self.deliver(step);
                    }
                    None => {
                        reply.end();
                        self.complete(&mut reply);
                    }
                }
            }
            Ok(Err(error)) => self.app.fail(&mut reply, &error),
            Err(_) => self.app.fail(&mut reply, &Panicked),
        }
    }

    fn complete(&self, reply: &mut Reply) {
        reply.finish();
        self.app.has_freed.fetch_or(reply.is_large, Relaxed);
        self.app.metrics.finish(reply.since.elapsed());
    }

    /// Passes tokens to their responses.
    fn deliver(&mut self, Step { tokens, failed }: Step) {
        let prompts = &self.app.settings.prompts;
        for token in &tokens {
            let Token { job, id, .. } = *token;
            let Some(reply) = self.running.get_mut(&job) else { continue };
            reply.take(prompts.tokenizer(), token, token.end.is_some() && prompts.stops().is_stop(id));
            self.app.metrics.completion_tokens.fetch_add(1, Relaxed);
            if reply.is_complete()
                && let Some(mut reply) = self.running.remove(&job)
            {
                self.complete(&mut reply);
            }
        }
        for (job, error) in failed {
            if let Some(mut reply) = self.running.remove(&job) {
                self.app.fail(&mut reply, &error);
            }
        }
    }

    /// Ends the requests in progress.
    fn end(self, error: Option<&RolloutError>) {
        let why = error.map_or_else(|| "the server stops".to_owned(), |error| told(error));
        let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why);
        for request in self.app.unprepared.close() {
            // If the client has disconnected, nobody receives the response.
            let _ = request.sender.send(refusal.answer());
        }
        let waiting = self.waiting.into_iter().map(|arrival| arrival.reply);
        self.running.into_values().chain(waiting).for_each(|mut reply| reply.fail(&refusal));
    }
}

fn stopping() -> Refusal {
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the server stops")
}

#[derive(Debug, thiserror::Error)]
#[error("the prompt cannot be computed: the program has a fault")]
struct Panicked;

/// The endpoint as a service of the HTTP server. When it is dropped, preparations end.
struct Serving(Arc<App>);

impl Service for Serving {
    fn at_head(&self, head: &Request) -> Option<Answer> {
        match self.0.at_head(head) {
            Ok(answer) => answer,
            Err(refusal) => Some(self.0.refuse(head, &refusal)),
        }
    }

    fn answer(&self, request: &Request) -> Answer {
        let kind = if request.path() == TEXTS { Kind::Text } else { Kind::Chat };
        let answer = self.0.complete(kind, request.body());
        let answer = answer.unwrap_or_else(|refusal| self.0.refuse(request, &refusal));
        self.0.has_freed.fetch_or(request.body().len() >= LARGE_BYTES, Relaxed);
        answer
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.unprepared.close();
    }
}

impl App {
    /// Answers what needs no body. Only a request for a completion remains.
    fn at_head(&self, head: &Request) -> Result<Option<Answer>, Refusal> {
        match head.path() {
            "/health" => return Ok(Some(self.health())),
            "/metrics" => return Ok(Some(Answer::new(200, Metrics::KIND, self.metrics.page()))),
            _ => self.check_client(head)?,
        }
        let read = |value: Value| match head.is_post() {
            true => Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes GET")),
            false => Ok(Some(Answer::new(200, "application/json", value.to_string()))),
        };
        match head.path() {
            CHATS | TEXTS if head.is_post() => self.check_room().map(|()| None),
            CHATS | TEXTS => {
                let refusal = Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes POST");
                Ok(Some(refusal.answer().with(ALLOW, "POST")))
            }
            "/v1/models" => read(json!({ "object": "list", "data": [self.model()] })),
            path if path
                .strip_prefix("/v1/models/")
                .is_some_and(|name| name.replace("%2F", "/") == self.name) =>
            {
                read(self.model())
            }
            path => Err(Refusal::new(StatusCode::NOT_FOUND, format!("there is nothing at {path}"))),
        }
    }

    fn refuse(&self, request: &Request, refusal: &Refusal) -> Answer {
        self.metrics.refused.fetch_add(u64::from(request.is_post()), Relaxed);
        refusal.answer()
    }

    fn health(&self) -> Answer {
        let (status, word) = if self.is_stopping.load(Relaxed) { (503, "stopping") } else { (200, "ok") };
        Answer::new(status, "application/json", json!({ "status": word }).to_string())
    }

    /// Checks the key, and that no page of another origin sends the request.
    fn check_client(&self, head: &Request) -> Result<(), Refusal> {
        if head.origin() == Origin::Other {
            let why = "requests of web pages of another origin are refused";
            return Err(Refusal::new(StatusCode::FORBIDDEN, why));
        }
        if !head.has_key(&self.key) {
            let why = "the key is missing or wrong; send the key that the server printed at its start as `Authorization: Bearer KEY`";
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, why));
        }
        Ok(())
    }

    /// Checks that one more request may wait.
    fn check_room(&self) -> Result<(), Refusal> {
        if self.is_stopping.load(Relaxed) {
            return Err(stopping());
        }
        let (requests, bytes) = MAX_WAITING;
        if self.metrics.waiting.load(Relaxed) >= requests || self.waiting_bytes.load(Relaxed) > bytes {
            let why = "too many requests wait; try again later";
            return Err(Refusal::new(StatusCode::TOO_MANY_REQUESTS, why));
        }
        Ok(())
    }

    fn model(&self) -> Value {
        let positions = self.settings.prompts.family().architecture().decoder_config().max_positions;
        json!({
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "omnigrpo",
            "max_model_len": positions,
        })
    }

    /// Checks the body of a request, and leaves its media to the threads that prepare.
    fn complete(self: &Arc<Self>, kind: Kind, body: &[u8]) -> Result<Answer, Refusal> {
        let since = Instant::now();
        self.check_room()?;
        let asked = Body::parse(kind, body)?;
        if let Some(model) = asked.model().filter(|model| *model != self.name) {
            let why = format!("the model `{model}` does not exist; this server has `{}`", self.name);
            return Err(Refusal { status: StatusCode::NOT_FOUND, ..Refusal::of("model", why) });
        }
        let random = || token().map_err(|e| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, e.to_string()));
        let seed = random()?.bytes().fold(0u64, |seed, byte| seed.rotate_left(5) ^ u64::from(byte));
        let (id, plan) = (random()?, asked.plan(&self.settings, seed)?);
        let is_large = body.len() >= LARGE_BYTES || plan.has_media();
        let ((answer, sender), errand) = (Answer::later(), Errand::default());
        let (own, ends) = (Arc::clone(self), errand.clone());
        let answer = answer.at_begin(move || {
            ends.end();
            let left = own.unprepared.remove_unwanted() as u64;
            own.metrics.waiting.fetch_sub(left, Relaxed);
            own.metrics.disconnected.fetch_add(left, Relaxed);
        });
        self.metrics.waiting.fetch_add(1, Relaxed);
        let room = Room::take(&self.waiting_bytes, body.len() as u64);
        self.unprepared.push(Unprepared { plan, sender, errand, id, since, is_large, room });
        Ok(answer)
    }

    /// Prepares the next request; returns false if there will be none.
    fn prepare_next(&self) -> bool {
        // The body counts among the waiting bytes until its media do.
        let Some(Unprepared { plan, sender, errand, id, since, is_large, room: _room }) =
            self.unprepared.pop()
        else {
            return false;
        };
        // A panic concerns this request alone.
        let prepared = guarded(|| errand.run(|| plan.job(&self.settings)));
        let prepared = prepared
            .unwrap_or_else(|_| Err(Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, Panicked.to_string())));
        self.has_freed.fetch_or(is_large, Relaxed);
        let (job, form, bytes) = match prepared {
            Ok(prepared) if !sender.is_closed() => prepared,
            other => {
                let outcome =
                    if sender.is_closed() { &self.metrics.disconnected } else { &self.metrics.refused };
                outcome.fetch_add(1, Relaxed);
                self.metrics.waiting.fetch_sub(1, Relaxed);
                // If the client has disconnected, nobody receives the response.
                let _ = other.map_err(|refusal| sender.send(refusal.answer()));
                return true;
            }
        };
        let sink = if form.streams {
            let (answer, feed) = Answer::fed(200, "text/event-stream");
            // If the client has disconnected, the feed is closed.
            let _ = sender.send(answer);
            Sink::Stream(feed)
        } else {
            Sink::Whole(Some(sender))
        };
        let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let prefix = if form.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let mut reply = Reply::new(
            (form, sink),
            format!("{prefix}-{id}"),
            (self.name.clone(), created),
            (job.prompt.ids.len(), bytes),
            (job.num_samples, job.stops.strings.clone()),
        );
        let media_bytes = job.prompt.media.iter().map(|medium| 4 * medium.data.len() as u64).sum();
        self.waiting_bytes.fetch_add(media_bytes, Relaxed);
        (reply.since, reply.is_large) = (since, is_large);
        let arrival = Arrival { job, reply, media_bytes };
        // After the end of the server, nobody receives it, and its connection is closed.
        self.arrivals.send(arrival).is_ok()
    }

    fn leave_queue(&self, arrival: &Arrival) {
        self.metrics.waiting.fetch_sub(1, Relaxed);
        self.waiting_bytes.fetch_sub(arrival.media_bytes, Relaxed);
    }

    fn fail(&self, reply: &mut Reply, error: &(dyn std::error::Error + 'static)) {
        self.has_freed.fetch_or(reply.is_large, Relaxed);
        self.metrics.failed.fetch_add(1, Relaxed);
        reply.fail(&Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, told(error)));
    }
}
