//! An endpoint for OpenAI's clients: chat completions of a model, with pictures, clips, sounds and calls of tools.
//!
//! Handlers of the HTTP server check a request, decode its media and render its prompt. The thread that calls [`Server::run`]
//! decodes the completions of all requests in one [`Session`]: a request joins while others decode, and leaves when it is complete
//! or its client disconnects. Its bits do not depend on other requests.
//!
//! # Security
//! The server listens on loopback and requires a key in the header `Authorization`. It refuses requests that a web page of another
//! origin sends. Media are given as `data:` addresses, or by address if downloads are allowed; no file of this machine is read.
//! [`omnigrpo_http`] limits what clients can send, and the number and size of waiting requests are limited here.

mod error;
mod metrics;
mod reply;
mod request;

use std::collections::{BTreeMap, VecDeque};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hyper::StatusCode;
use hyper::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, HOST, HeaderName, ORIGIN, X_CONTENT_TYPE_OPTIONS};
use omnigrpo_data::ReadOptions;
use omnigrpo_guard::{guarded, told};
use omnigrpo_http::{Answer, Http, Limits, Request, token};
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_rollout::{Job, RolloutError, SamplingParams, Session, Step, Token};
use serde_json::{Value, json};

pub use error::Error;
use error::Refusal;
use metrics::Metrics;
use reply::{Reply, Sink};
use request::ChatRequest;

/// Largest body of a request, bytes.
const MAX_BODY_BYTES: usize = 64 << 20;
/// Largest number of connections.
const CONNECTIONS: usize = 256;
/// Number of requests that are prepared at the same time.
const HANDLERS: usize = 4;
/// Longest time of a request that is not streamed.
const ANSWER_TIME: Duration = Duration::from_secs(3600);
/// Largest number of requests that wait for their prefill, and of the bytes of their media.
const MAX_WAITING: (u64, u64) = (128, 1 << 30);
/// Interval at which an idle server looks for the request to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Longest time in which requests in progress are completed after the request to stop.
const LAST: Duration = Duration::from_secs(20);

/// Header fields of every response.
static FIELDS: [(HeaderName, &str); 2] = [(X_CONTENT_TYPE_OPTIONS, "nosniff"), (CACHE_CONTROL, "no-store")];

/// Settings of a server.
pub struct Options {
    /// Name of the model in requests and responses.
    pub name: String,
    /// Port on 127.0.0.1; 0 selects a free one.
    pub port: u16,
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
}

/// A server of one model.
pub struct Server {
    http: Http,
    app: Arc<App>,
    arrivals: Receiver<Arrival>,
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
    arrivals: Mutex<Sender<Arrival>>,
    metrics: Metrics,
    waiting_bytes: AtomicU64,
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
        let Options { name, port, key, sampling, max_live, max_bytes, read } = options;
        let (sender, arrivals) = channel();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let app = Arc::new(App {
            name,
            key: key.map_or_else(token, Ok).map_err(Error::Random)?,
            settings: request::Settings { prompts, read, sampling, max_live, max_bytes },
            arrivals: Mutex::new(sender),
            metrics: Metrics::default(),
            waiting_bytes: AtomicU64::new(0),
            is_stopping: AtomicBool::new(false),
            started: since.as_secs(),
        });
        let limits = Limits {
            connections: CONNECTIONS,
            body_bytes: MAX_BODY_BYTES,
            answer_time: ANSWER_TIME,
            slowest_bytes_per_sec: 1 << 20,
            handlers: HANDLERS,
            fields: &FIELDS,
            refusal: Refusal::of_server,
            ..Limits::default()
        };
        let own = Arc::clone(&app);
        let work = move |request: &Request| own.respond(request);
        let http = Http::start("serve", (Ipv4Addr::LOCALHOST, port), limits, work)
            .map_err(|source| Error::Listen { port, source })?;
        Ok(Self { http, app, arrivals })
    }

    /// Returns the address for clients, such as `http://127.0.0.1:8000/v1`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}/v1", self.http.address())
    }

    /// Returns the key that clients must send.
    #[must_use]
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
        let result = loop {
            if stop.load(Relaxed) && end.is_none() {
                self.app.is_stopping.store(true, Relaxed);
                end = Some(Instant::now() + LAST);
            }
            engine.receive(&self.arrivals);
            if end.is_some_and(|end| engine.is_idle() || Instant::now() > end) {
                break Ok(());
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
                app.metrics.disconnected.fetch_add(1, Relaxed);
            }
            goes_on
        });
        running.retain(|job, reply| {
            let goes_on = !reply.is_unwanted();
            if !goes_on {
                session.cancel(*job);
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
        // A panic concerns this request alone: its job is not in the session yet.
        let admitted = guarded(|| self.session.admit(job));
        match admitted {
            Ok(Ok((number, step))) => {
                self.app.metrics.prompt_tokens.fetch_add(reply.prompt_tokens as u64, Relaxed);
                self.app.metrics.first_token(reply.since.elapsed());
                self.running.insert(number, reply);
                self.deliver(step);
            }
            Ok(Err(error)) => self.app.fail(&mut reply, &error),
            Err(_) => self.app.fail(&mut reply, &Panicked),
        }
    }

    /// Passes tokens to their responses.
    fn deliver(&mut self, Step { tokens, failed }: Step) {
        let prompts = &self.app.settings.prompts;
        for token in &tokens {
            let Token { job, id, .. } = *token;
            let Some(reply) = self.running.get_mut(&job) else { continue };
            reply.take(prompts.tokenizer(), token, token.end.is_some() && prompts.stops().is_stop(id));
            self.app.metrics.completion_tokens.fetch_add(1, Relaxed);
            if reply.is_complete() {
                reply.finish();
                self.app.metrics.finish(reply.since.elapsed());
                self.running.remove(&job);
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
        let waiting = self.waiting.into_iter().map(|arrival| arrival.reply);
        self.running.into_values().chain(waiting).for_each(|mut reply| reply.fail(&refusal));
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the prompt cannot be computed: the program has a fault")]
struct Panicked;

impl App {
    fn respond(&self, request: &Request) -> Answer {
        let answered = match request.path() {
            "/health" => return self.health(),
            "/metrics" => return Answer::new(200, Metrics::KIND, self.metrics.page()),
            path => self.admitted(request).and_then(|()| self.answer(path, request)),
        };
        answered.unwrap_or_else(|refusal| {
            self.metrics.refused.fetch_add(u64::from(request.is_post()), Relaxed);
            refusal.answer()
        })
    }

    fn health(&self) -> Answer {
        let (status, word) = if self.is_stopping.load(Relaxed) { (503, "stopping") } else { (200, "ok") };
        Answer::new(status, "application/json", json!({ "status": word }).to_string())
    }

    /// Checks the key, and that no page of another origin sends the request.
    fn admitted(&self, request: &Request) -> Result<(), Refusal> {
        let own = request.field(&HOST).map(|host| format!("http://{host}"));
        if request.field(&ORIGIN).is_some_and(|origin| own.as_deref() != Some(origin)) {
            let why = "requests of web pages of another origin are refused";
            return Err(Refusal::new(StatusCode::FORBIDDEN, why));
        }
        let key = request.field(&AUTHORIZATION).and_then(|given| given.strip_prefix("Bearer "));
        if key != Some(self.key.as_str()) {
            let why = "the key is missing or wrong; send the key that the server printed at its start as `Authorization: Bearer KEY`";
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, why));
        }
        Ok(())
    }

    fn answer(&self, path: &str, request: &Request) -> Result<Answer, Refusal> {
        let read = |value: Value| match request.is_post() {
            true => Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes GET")),
            false => Ok(Answer::new(200, "application/json", value.to_string())),
        };
        match path {
            "/v1/chat/completions" if request.is_post() => self.chat(request.body()),
            "/v1/chat/completions" => {
                let refusal = Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes POST");
                Ok(refusal.answer().with(ALLOW, "POST"))
            }
            "/v1/models" => read(json!({ "object": "list", "data": [self.model()] })),
            _ if path
                .strip_prefix("/v1/models/")
                .is_some_and(|name| name.replace("%2F", "/") == self.name) =>
            {
                read(self.model())
            }
            _ => Err(Refusal::new(StatusCode::NOT_FOUND, format!("there is nothing at {path}"))),
        }
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

    fn chat(&self, body: &[u8]) -> Result<Answer, Refusal> {
        let full = || Refusal::new(StatusCode::TOO_MANY_REQUESTS, "too many requests wait; try again later");
        let stopping = || Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the server stops");
        if self.is_stopping.load(Relaxed) {
            return Err(stopping());
        }
        if self.metrics.waiting.load(Relaxed) >= MAX_WAITING.0
            || self.waiting_bytes.load(Relaxed) > MAX_WAITING.1
        {
            return Err(full());
        }
        let chat = ChatRequest::parse(body)?;
        if let Some(model) = chat.model.as_ref().filter(|model| **model != self.name) {
            let why = format!("the model `{model}` does not exist; this server has `{}`", self.name);
            return Err(Refusal { status: StatusCode::NOT_FOUND, ..Refusal::of("model", why) });
        }
        let random = || token().map_err(|e| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, e.to_string()));
        let seed = random()?.bytes().fold(0u64, |seed, byte| seed.rotate_left(5) ^ u64::from(byte));
        let (job, form, bytes) = chat.job(&self.settings, seed)?;
        let (answer, sink) = if form.streams {
            let (answer, sender) = Answer::fed(200, "text/event-stream");
            (answer, Sink::Stream(sender))
        } else {
            let (answer, sender) = Answer::later();
            (answer, Sink::Whole(Some(sender)))
        };
        let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let reply = Reply::new(
            (form, sink),
            format!("chatcmpl-{}", random()?),
            (self.name.clone(), created),
            (job.prompt.ids.len(), bytes),
            (job.num_samples, job.stops.strings.clone()),
        );
        let media_bytes = job.prompt.media.iter().map(|medium| 4 * medium.data.len() as u64).sum();
        self.metrics.waiting.fetch_add(1, Relaxed);
        self.waiting_bytes.fetch_add(media_bytes, Relaxed);
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.send(Arrival { job, reply, media_bytes }).map_err(|_| stopping())?;
        Ok(answer)
    }

    fn leave_queue(&self, arrival: &Arrival) {
        self.metrics.waiting.fetch_sub(1, Relaxed);
        self.waiting_bytes.fetch_sub(arrival.media_bytes, Relaxed);
    }

    fn fail(&self, reply: &mut Reply, error: &(dyn std::error::Error + 'static)) {
        self.metrics.failed.fetch_add(1, Relaxed);
        reply.fail(&Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, told(error)));
    }
}
