//! HTTP/1.1 server of the page of runs, of Prometheus and of models. It uses one thread for connections, whatever clients send.
//!
//! Any program on this machine, and any page in its browser, can send bytes to a loopback port, and any machine to other ports. So everything that a client
//! controls is bounded before it is read: the size of head and body, the size of all bodies together, the number of connections, and
//! the duration of a request. Only `GET` and `HEAD` are answered, and `POST` if a body is allowed; other bodies stay unread. `Host`
//! must name this machine by an address, as `localhost` or by a name that the server is given, so a page of another origin cannot reach
//! the server under its own host name.
//!
//! A [`Service`] sees a request twice. [`Service::at_head`] refuses it or answers it from the head alone, before a byte of the body is
//! read. It runs on the thread of the connections, so it answers while all handlers are busy.
//! Handlers run on a few other threads. If a handler panics, the response has status 500; a handler that hangs keeps its thread.
//! A handler that needs long returns a response that another thread completes ([`Answer::later`], [`Answer::fed`]). That thread
//! learns when the client disconnects. When a server is dropped, it does not wait for handlers or connections.

mod body;
pub mod head;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener as Listener, ToSocketAddrs};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use futures_util::future::select;
use futures_util::stream::unfold;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Body as _, Bytes, Frame, Incoming};
use hyper::header::{
    ALLOW, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderName, HeaderValue, ORIGIN, RETRY_AFTER,
};
use hyper::http::request::Parts as Head;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc as parts, oneshot};
use tokio::task::{AbortHandle, spawn_blocking, yield_now};
use tokio::time::{Instant, sleep, timeout_at};

use body::{Body, Budget};
use head::{Origin, is_bearer, names_machine, origin};

/// Largest number of header fields in a request.
const MAX_FIELDS: usize = 64;
/// Pause after a failed accept, if no idle connection could be closed.
const RETRY: Duration = Duration::from_millis(100);
/// Longest duration of a stream of unknown length. The client then connects again.
const STREAM_TIME: Duration = Duration::from_secs(3600);
/// Time after which a client may send a body again for which there was no room, in seconds.
const RETRY_AFTER_SECS: &str = "5";
/// Interval at which the deadline of a connection is checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Longest wait for the server thread at a drop. The thread normally ends at once; the limit is for an overloaded machine.
const PATIENCE: Duration = Duration::from_secs(1);

/// Limits of a server.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest number of simultaneous connections. When another one arrives, the server closes the oldest one whose request is
    /// incomplete. If all requests are complete, it closes the new one.
    pub connections: usize,
    /// Largest size of the head of a request, in bytes; at least 8192.
    pub head_bytes: usize,
    /// Longest time until the head of a request is complete.
    pub head_time: Duration,
    /// Largest size of the body of a `POST`, in bytes; 0 disables `POST`.
    pub body_bytes: usize,
    /// Largest size of the bodies of all requests together, in bytes. A request whose body does not fit gets 503, with the time after
    /// which it may be sent again.
    pub bodies_bytes: u64,
    /// Longest time from the last byte of the request to the response.
    pub answer_time: Duration,
    /// Longest time from the head to the last byte of the body, and again from the response to its last byte.
    pub transfer_time: Duration,
    /// Slowest accepted transfer: a body and a response get one extra second for every so many bytes.
    pub slowest_bytes_per_sec: u64,
    /// Largest number of handlers that run at the same time.
    pub handlers: usize,
    /// Header fields of every response.
    pub fields: &'static [(HeaderName, &'static str)],
    /// Function that creates the response to a request that the server refuses, from its status and the reason.
    pub refusal: fn(StatusCode, &str) -> Answer,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 64,
            head_bytes: 16 << 10,
            head_time: Duration::from_secs(10),
            body_bytes: 0,
            bodies_bytes: 1 << 30,
            answer_time: Duration::from_secs(30),
            transfer_time: Duration::from_secs(30),
            slowest_bytes_per_sec: 64 << 10,
            handlers: 4,
            fields: &[],
            refusal: Answer::refusal,
        }
    }
}

/// Address of a server, and the names by which clients may call it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Address at which the server listens.
    pub host: IpAddr,
    /// Port; 0 selects a free one.
    pub port: u16,
    /// Names that a request may have in `Host`, beside addresses of this machine and `localhost`.
    pub names: Vec<String>,
}

impl Place {
    /// Returns the place of a server that only this machine reaches.
    pub fn local(port: u16) -> Self {
        Self { host: IpAddr::V4(Ipv4Addr::LOCALHOST), port, names: Vec::new() }
    }

    /// Returns true if only this machine reaches the server.
    pub fn is_local(&self) -> bool {
        self.host.is_loopback()
    }

    /// Returns the address for clients of a server with this port: under the first of its names, or else by an address. A server on all
    /// addresses has that of loopback.
    pub fn address(&self, port: u16) -> String {
        match (self.names.first(), self.host.is_unspecified()) {
            (Some(name), _) if !self.is_local() => format!("{name}:{port}"),
            (_, true) => format!("127.0.0.1:{port}"),
            _ => SocketAddr::new(self.host, port).to_string(),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        SocketAddr::new(self.host, self.port).fmt(f)
    }
}

/// A request within the limits.
#[derive(Debug)]
pub struct Request {
    head: Head,
    body: Body,
}

impl Request {
    /// Returns the path of the URL, with its percent escapes.
    pub fn path(&self) -> &str {
        self.head.uri.path()
    }

    /// Returns the query of the URL, without the `?`; empty if there is none.
    pub fn query(&self) -> &str {
        self.head.uri.query().unwrap_or_default()
    }

    /// Returns true for a `POST`.
    pub fn is_post(&self) -> bool {
        self.head.method == Method::POST
    }

    /// Returns a header field if it is text.
    pub fn field(&self, name: &HeaderName) -> Option<&str> {
        self.head.headers.get(name)?.to_str().ok()
    }

    /// Returns true if the request has one header field `Authorization`, with this key as `Bearer`.
    pub fn has_key(&self, key: &str) -> bool {
        is_bearer(self.values(&AUTHORIZATION), key)
    }

    /// Returns the origin of the page that sends the request.
    pub fn origin(&self) -> Origin {
        let host = self.head.headers.get(HOST).map_or(&[][..], HeaderValue::as_bytes);
        origin(host, self.values(&ORIGIN))
    }

    /// Returns the body of a `POST`; it is empty until the head is accepted.
    pub fn body(&self) -> &[u8] {
        self.body.bytes()
    }

    fn values(&self, name: &HeaderName) -> impl Iterator<Item = &[u8]> {
        self.head.headers.get_all(name).iter().map(HeaderValue::as_bytes)
    }

    /// Returns true if `Host`, and the authority of an absolute URL, name this machine.
    fn is_meant(&self, bound: IpAddr, own: &[String]) -> bool {
        let mut hosts = self.values(&HOST);
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
        let names = |authority: &[u8]| names_machine(authority, bound, own);
        names(host) && self.head.uri.authority().is_none_or(|authority| names(authority.as_str().as_bytes()))
    }
}

/// Answers the requests of a server. A function of a complete request is a service that accepts every head.
pub trait Service: Send + Sync + 'static {
    /// Refuses a request, or answers it, from its head alone. With `None`, the body is read and passed to [`Self::answer`]. This runs
    /// on the thread of all connections, so it must not wait for anything.
    fn at_head(&self, head: &Request) -> Option<Answer> {
        let _ = head;
        None
    }

    /// Answers a complete request, on the thread of a handler.
    fn answer(&self, request: &Request) -> Answer;
}

impl<F: Fn(&Request) -> Answer + Send + Sync + 'static> Service for F {
    fn answer(&self, request: &Request) -> Answer {
        self(request)
    }
}

/// Successive parts of a stream. Empty parts are not sent.
pub type Parts = Box<dyn Iterator<Item = io::Result<Vec<u8>>> + Send>;

/// Response to a request.
pub struct Answer {
    status: u16,
    fields: Vec<(HeaderName, String)>,
    content: Content,
    begin: Option<Begin>,
}

/// Call that is made when this value is dropped.
struct Begin(Option<Box<dyn FnOnce() + Send>>);

impl Drop for Begin {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|call| call());
    }
}

enum Content {
    Bytes(Vec<u8>),
    Stream { bytes: Option<u64>, every: Duration, parts: Parts },
    Later(oneshot::Receiver<Answer>),
    Fed(parts::UnboundedReceiver<Vec<u8>>),
}

impl Answer {
    fn of(status: u16, content: Content) -> Self {
        Self { status, fields: Vec::new(), content, begin: None }
    }

    /// Creates a response with this status and media type.
    pub fn new(status: u16, kind: &str, content: impl Into<Vec<u8>>) -> Self {
        Self::of(status, Content::Bytes(content.into())).with(CONTENT_TYPE, kind)
    }

    /// Creates a response whose parts are produced while it is sent, with a pause of `every` after each. `bytes` is the total size;
    /// without it, the response ends after the last part.
    pub fn stream(status: u16, kind: &str, bytes: Option<u64>, every: Duration, parts: Parts) -> Self {
        let answer = Self::of(status, Content::Stream { bytes, every, parts }).with(CONTENT_TYPE, kind);
        match bytes {
            Some(bytes) => answer.with(CONTENT_LENGTH, bytes.to_string()),
            None => answer,
        }
    }

    /// Creates a response that another thread sends. If the sender is dropped, the response has status 500; if it is closed, the
    /// client has disconnected.
    pub fn later() -> (Self, oneshot::Sender<Self>) {
        let (sender, answer) = oneshot::channel();
        (Self::of(200, Content::Later(answer)), sender)
    }

    /// Creates a response whose parts another thread sends. It ends when the sender is dropped; if the sender is closed, the
    /// client has disconnected.
    pub fn fed(status: u16, kind: &str) -> (Self, parts::UnboundedSender<Vec<u8>>) {
        let (sender, parts) = parts::unbounded_channel();
        (Self::of(status, Content::Fed(parts)).with(CONTENT_TYPE, kind), sender)
    }

    /// Makes a call when the response begins, or when the client disconnects before, on the thread of all connections.
    #[must_use]
    pub fn at_begin(mut self, call: impl FnOnce() + Send + 'static) -> Self {
        self.begin = Some(Begin(Some(Box::new(call))));
        self
    }

    /// Adds a header field.
    #[must_use]
    pub fn with(mut self, name: HeaderName, value: impl Into<String>) -> Self {
        self.fields.push((name, value.into()));
        self
    }

    /// Creates a response that gives a reason as text.
    pub fn refusal(status: StatusCode, why: &str) -> Self {
        Self::new(status.as_u16(), "text/plain", format!("{why}\n"))
    }

    /// Returns the size of the content in bytes, if it is known.
    fn bytes(&self) -> Option<u64> {
        match &self.content {
            Content::Bytes(bytes) => Some(bytes.len() as u64),
            Content::Stream { bytes, .. } => *bytes,
            Content::Later(_) | Content::Fed(_) => None,
        }
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("status", &self.status).finish_non_exhaustive()
    }
}

/// Creates a random token of 128 bits, in hexadecimal.
///
/// # Errors
/// Returns an error if the system provides no random numbers.
pub fn token() -> io::Result<String> {
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(io::Error::other)?;
    Ok(secret.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// HTTP server that runs until it is dropped.
pub struct Http {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    over: mpsc::Receiver<Infallible>,
}

impl Http {
    /// Starts a server on an address; port 0 selects a free port. The threads are named `name`.
    ///
    /// # Errors
    /// Returns an error if the address is in use or does not belong to this machine, or if no thread or descriptor is available.
    pub fn start(
        name: &str,
        address: impl ToSocketAddrs,
        limits: Limits,
        service: impl Service,
    ) -> io::Result<Self> {
        Self::on(Listener::bind(address)?, name, Vec::new(), limits, service)
    }

    /// Like [`Self::start`], at a place whose names are accepted too.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_at(name: &str, place: &Place, limits: Limits, service: impl Service) -> io::Result<Self> {
        Self::on(Listener::bind((place.host, place.port))?, name, place.names.clone(), limits, service)
    }

    fn on(
        listener: Listener,
        name: &str,
        names: Vec<String>,
        limits: Limits,
        service: impl Service,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(limits.handlers)
            .thread_name(name)
            .build()?;
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let shared = Arc::new(Shared {
            limits,
            bound: address.ip(),
            names,
            service: Box::new(service),
            budget: Budget::new(limits.bodies_bytes),
            pool: Arc::new(Semaphore::new(limits.handlers)),
            open: Mutex::default(),
        });
        let own = Arc::clone(&shared);
        let (stop, stopped) = oneshot::channel();
        let (ended, over) = mpsc::channel();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let accepting = async { drop(select(pin!(own.accept(&listener)), stopped).await) };
            runtime.block_on(accepting);
            drop(listener);
            runtime.shutdown_background();
            drop(ended);
        })?;
        Ok(Self { address, shared, stop: Some(stop), over })
    }

    /// Returns the address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        locked(&self.shared.open).len()
    }
}

impl std::fmt::Debug for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        // If the thread has already ended, nothing receives this signal.
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.over.recv_timeout(PATIENCE);
    }
}

type Sent = UnsyncBoxBody<Bytes, io::Error>;

struct Shared {
    limits: Limits,
    bound: IpAddr,
    names: Vec<String>,
    service: Box<dyn Service>,
    /// Room for the bodies of all requests.
    budget: Arc<Budget>,
    /// Permits for running handlers. A connection that is closed while it waits for a permit releases its place.
    pool: Arc<Semaphore>,
    /// Open connections in order of arrival.
    open: Mutex<BTreeMap<u64, Open>>,
}

struct Open {
    task: AbortHandle,
    /// True if the request is complete, with its body.
    has_asked: bool,
    until: Instant,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    async fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for id in 0.. {
            match listener.accept().await {
                Ok((stream, _)) if self.has_room() || self.cut_idle() => {
                    let task = tokio::spawn(Arc::clone(self).serve(id, stream)).abort_handle();
                    let until = Instant::now() + self.limits.head_time;
                    locked(&self.open).insert(id, Open { task, has_asked: false, until });
                }
                Ok(_) => {}
                // The accept failed, for example because no descriptors are left.
                Err(_) if self.cut_idle() => {}
                Err(_) => sleep(RETRY).await,
            }
            // Lets the closed connections finish before the next one is accepted.
            yield_now().await;
        }
    }

    fn has_room(&self) -> bool {
        locked(&self.open).len() < self.limits.connections
    }

    /// Closes the oldest connection whose request is incomplete. Returns false if there is none.
    fn cut_idle(&self) -> bool {
        let cut = {
            let mut open = locked(&self.open);
            let oldest = open.iter().find(|(_, own)| !own.has_asked).map(|(id, _)| *id);
            oldest.and_then(|id| open.remove(&id))
        };
        cut.is_some_and(|cut| {
            cut.task.abort();
            true
        })
    }

    async fn serve(self: Arc<Self>, id: u64, stream: TcpStream) {
        let _entry = Entry { shared: &self, id };
        let service = service_fn(|request| self.answer(id, request));
        let mut builder = http1::Builder::new();
        builder.keep_alive(false).max_buf_size(self.limits.head_bytes).max_headers(MAX_FIELDS);
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        while let Some(until) = self.until(id).filter(|until| *until > Instant::now()) {
            // The result does not matter: the client may have disconnected.
            if timeout_at(until.min(Instant::now() + LOOK_EVERY), connection.as_mut()).await.is_ok() {
                return;
            }
        }
    }

    fn until(&self, id: u64) -> Option<Instant> {
        locked(&self.open).get(&id).map(|own| own.until)
    }

    /// Moves the deadline of a connection to `time` from now.
    fn give(&self, id: u64, time: Duration, has_asked: bool) {
        if let Some(own) = locked(&self.open).get_mut(&id) {
            (own.until, own.has_asked) = (Instant::now() + time, has_asked);
        }
    }

    /// Returns the longest time of a transfer of so many bytes.
    fn transfer(&self, bytes: u64) -> Duration {
        self.limits.transfer_time + Duration::from_secs(bytes / self.limits.slowest_bytes_per_sec.max(1))
    }

    async fn answer(
        self: &Arc<Self>,
        id: u64,
        request: hyper::Request<Incoming>,
    ) -> Result<Response<Sent>, Infallible> {
        let mut answer = self.ask(id, request).await.unwrap_or_else(|refusal| refusal);
        if let Content::Later(sent) = answer.content {
            // Dropped with this future if the client disconnects.
            let _begin = answer.begin.take();
            answer = sent.await.unwrap_or_else(|_| self.broken());
        }
        self.give(id, answer.bytes().map_or(STREAM_TIME, |bytes| self.transfer(bytes)), true);
        Ok(self.response(answer))
    }

    fn broken(&self) -> Answer {
        (self.limits.refusal)(StatusCode::INTERNAL_SERVER_ERROR, "the server failed to handle this request")
    }

    async fn ask(self: &Arc<Self>, id: u64, request: hyper::Request<Incoming>) -> Result<Answer, Answer> {
        let (head, body) = request.into_parts();
        let mut request = Request { head, body: Body::new(&self.budget) };
        let refusal = self.limits.refusal;
        if !request.is_meant(self.bound, &self.names) {
            let why = "this server only accepts requests to an address of this machine, to localhost, or to a name of --allowed_hosts";
            return Err(refusal(StatusCode::MISDIRECTED_REQUEST, why));
        }
        let limit = self.limits.body_bytes;
        let has_body = match request.head.method {
            Method::GET | Method::HEAD => false,
            Method::POST if limit > 0 => true,
            _ => {
                let allowed = if limit > 0 { "GET, HEAD, POST" } else { "GET, HEAD" };
                let refusal = refusal(StatusCode::METHOD_NOT_ALLOWED, "this method is not allowed");
                return Err(refusal.with(ALLOW, allowed));
            }
        };
        if let Some(answer) = self.service.at_head(&request) {
            return Ok(answer);
        }
        if has_body {
            self.read(id, body, &mut request.body).await?;
        }
        self.give(id, self.limits.answer_time, true);
        let permit = Arc::clone(&self.pool).acquire_owned().await.map_err(|_| self.broken())?;
        let shared = Arc::clone(self);
        let work = move || {
            let _permit = permit;
            shared.service.answer(&request)
        };
        spawn_blocking(work).await.map_err(|_| self.broken())
    }

    /// Reads the body of a request.
    async fn read(&self, id: u64, mut from: Incoming, to: &mut Body) -> Result<(), Answer> {
        let (limit, refusal) = (self.limits.body_bytes, self.limits.refusal);
        let too_much = || {
            let why = format!("the body is too large; at most {limit} bytes are accepted");
            refusal(StatusCode::PAYLOAD_TOO_LARGE, &why)
        };
        let announced = usize::try_from(from.size_hint().lower()).unwrap_or(usize::MAX);
        if announced > limit {
            return Err(too_much());
        }
        self.give(id, self.transfer(announced as u64), false);
        while let Some(frame) = from.frame().await {
            let broken = |_| refusal(StatusCode::BAD_REQUEST, "the body ends early");
            let Ok(bytes) = frame.map_err(broken)?.into_data() else { continue };
            if to.bytes().len() + bytes.len() > limit {
                return Err(too_much());
            }
            to.push(&bytes, announced).map_err(|_| {
                let why = "the server has no room for the body of this request now; send it again later";
                refusal(StatusCode::SERVICE_UNAVAILABLE, why).with(RETRY_AFTER, RETRY_AFTER_SECS)
            })?;
        }
        Ok(())
    }

    fn response(&self, answer: Answer) -> Response<Sent> {
        let body = match answer.content {
            Content::Bytes(bytes) => {
                Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync()
            }
            Content::Stream { every, parts, .. } => self.stream(every, parts),
            Content::Fed(parts) => StreamBody::new(unfold(parts, |mut parts| async move {
                let part = parts.recv().await?;
                Some((Ok(Frame::data(part.into())), parts))
            }))
            .boxed_unsync(),
            // It was awaited before.
            Content::Later(_) => Full::new(Bytes::new()).map_err(|never| match never {}).boxed_unsync(),
        };
        let mut response = Response::new(body);
        *response.status_mut() =
            StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let own = self.limits.fields.iter().map(|(name, value)| (name.clone(), (*value).to_owned()));
        for (name, value) in own.chain(answer.fields) {
            // An invalid value cannot occur, because the server itself writes all of them.
            if let Ok(value) = HeaderValue::try_from(value) {
                response.headers_mut().insert(name, value);
            }
        }
        response
    }

    fn stream(&self, every: Duration, parts: Parts) -> Sent {
        let start = (Arc::clone(&self.pool), parts, Duration::ZERO);
        let frames = unfold(start, move |(pool, mut parts, mut pause)| async move {
            loop {
                if !pause.is_zero() {
                    sleep(pause).await;
                }
                pause = every;
                let permit = Arc::clone(&pool).acquire_owned().await.ok()?;
                let work = move || {
                    let _permit = permit;
                    (parts.next(), parts)
                };
                // A panic ends the stream.
                let (part, rest) = spawn_blocking(work).await.ok()?;
                parts = rest;
                match part? {
                    Ok(bytes) if bytes.is_empty() => {}
                    part => {
                        return Some((part.map(|bytes| Frame::data(bytes.into())), (pool, parts, pause)));
                    }
                }
            }
        });
        StreamBody::new(frames).boxed_unsync()
    }
}

/// Guard that removes a connection from the table, however the connection ends.
struct Entry<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        locked(&self.shared.open).remove(&self.id);
    }
}
