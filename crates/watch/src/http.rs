//! The HTTP/1.1 server of this crate: one thread, whatever is sent to it.
//!
//! Any program of this machine, and any page in its browser, can send bytes to a port of loopback. So each thing that a peer
//! decides is bounded before it is read: the bytes of a head and of a body, the connections, and the time of a request. Only
//! `GET` and `HEAD` are answered, and `POST` where a body is allowed; other bodies stay unread. `Host` has to name this machine
//! by an address or as `localhost`, so a page of another origin cannot reach the server under a name of its own.
//!
//! Handlers run on a few threads beside it. A handler that panics is answered with 500, and one that hangs holds its thread.
//! The end of a server waits for neither handlers nor connections.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as Listener, ToSocketAddrs};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use futures_util::future::select;
use futures_util::stream::unfold;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, Limited, StreamBody};
use hyper::body::{Body as _, Bytes, Frame, Incoming};
use hyper::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::http::request::Parts as Head;
use hyper::http::uri::Authority;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{AbortHandle, spawn_blocking, yield_now};
use tokio::time::{Instant, sleep, timeout_at};

/// Header fields of a request.
const MAX_FIELDS: usize = 64;
/// After a connection could not be accepted, and there was none to cut.
const RETRY: Duration = Duration::from_millis(100);
/// A stream without a known length ends after this long; its listener asks again.
const STREAM_TIME: Duration = Duration::from_secs(3600);
/// The thread has nothing to wait for when it ends; this is for a machine that does not run it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Bounds of a server.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at a time. When there is another, the one that has waited longest without a whole head is cut; where all
    /// have asked, the new one is closed.
    pub connections: usize,
    /// Bytes of the head of a request; at least 8192.
    pub head_bytes: usize,
    /// Time until the head of a request is there.
    pub head_time: Duration,
    /// Bytes of the body of a `POST`; with 0 there is no `POST`.
    pub body_bytes: usize,
    /// Time from the head to the answer, and again from there to its last byte.
    pub answer_time: Duration,
    /// A long answer gets a second more per so many bytes.
    pub slowest_bytes_per_sec: u64,
    /// Handlers that run at a time.
    pub handlers: usize,
    /// Fields of every answer.
    pub fields: &'static [(HeaderName, &'static str)],
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 64,
            head_bytes: 16 << 10,
            head_time: Duration::from_secs(10),
            body_bytes: 0,
            answer_time: Duration::from_secs(30),
            slowest_bytes_per_sec: 64 << 10,
            handlers: 4,
            fields: &[],
        }
    }
}

/// A request, whole and within its bounds.
#[derive(Debug)]
pub struct Request {
    head: Head,
    body: Bytes,
}

impl Request {
    /// Path of the address, with its escapes.
    #[must_use]
    pub fn path(&self) -> &str {
        self.head.uri.path()
    }

    /// Query of the address, behind the `?`.
    #[must_use]
    pub fn query(&self) -> &str {
        self.head.uri.query().unwrap_or_default()
    }

    /// A field of the head, where it is text.
    #[must_use]
    pub fn field(&self, name: &HeaderName) -> Option<&str> {
        self.head.headers.get(name)?.to_str().ok()
    }

    /// Body of a `POST`.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        &self.body
    }
}

/// Bytes of a stream, one part after the other. An empty part is not sent.
pub type Parts = Box<dyn Iterator<Item = io::Result<Vec<u8>>> + Send>;

/// Reply to a request.
pub struct Answer {
    status: u16,
    fields: Vec<(HeaderName, String)>,
    content: Content,
}

enum Content {
    Bytes(Vec<u8>),
    Stream { bytes: Option<u64>, every: Duration, parts: Parts },
}

impl Answer {
    /// An answer of this status and media type.
    #[must_use]
    pub fn new(status: u16, kind: &str, content: impl Into<Vec<u8>>) -> Self {
        Self { status, fields: Vec::new(), content: Content::Bytes(content.into()) }.with(CONTENT_TYPE, kind)
    }

    /// An answer whose parts are made while it is sent: so many bytes in all, or as long as there are parts, with a pause
    /// after each.
    #[must_use]
    pub fn stream(status: u16, kind: &str, bytes: Option<u64>, every: Duration, parts: Parts) -> Self {
        let content = Content::Stream { bytes, every, parts };
        let answer = Self { status, fields: Vec::new(), content }.with(CONTENT_TYPE, kind);
        match bytes {
            Some(bytes) => answer.with(CONTENT_LENGTH, bytes.to_string()),
            None => answer,
        }
    }

    /// Adds a field.
    #[must_use]
    pub fn with(mut self, name: HeaderName, value: impl Into<String>) -> Self {
        self.fields.push((name, value.into()));
        self
    }

    fn refusal(status: StatusCode, why: &'static str) -> Self {
        Self::new(status.as_u16(), "text/plain", why)
    }

    /// Bytes of the content, where they are known.
    fn bytes(&self) -> Option<u64> {
        match &self.content {
            Content::Bytes(bytes) => Some(bytes.len() as u64),
            Content::Stream { bytes, .. } => *bytes,
        }
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("status", &self.status).finish_non_exhaustive()
    }
}

/// A server that answers until it is dropped.
pub struct Http {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    over: mpsc::Receiver<Infallible>,
}

impl Http {
    /// Begins to answer on an address; port 0 takes a free one. The threads have this name.
    ///
    /// # Errors
    /// An address that is taken or not of this machine, or no thread or descriptor to serve with.
    pub fn start(
        name: &str,
        address: impl ToSocketAddrs,
        limits: Limits,
        handler: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = Listener::bind(address)?;
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
            handler: Box::new(handler),
            pool: Arc::new(Semaphore::new(limits.handlers)),
            open: Mutex::default(),
        });
        let (stop, stopped) = oneshot::channel();
        let (ended, over) = mpsc::channel();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let accepting = async { drop(select(pin!(shared.accept(&listener)), stopped).await) };
            runtime.block_on(accepting);
            drop(listener);
            runtime.shutdown_background();
            drop(ended);
        })?;
        Ok(Self { address, stop: Some(stop), over })
    }

    /// The address it answers on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl std::fmt::Debug for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        // Nobody hears it where the thread has ended.
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.over.recv_timeout(PATIENCE);
    }
}

type Body = UnsyncBoxBody<Bytes, io::Error>;

struct Shared {
    limits: Limits,
    bound: IpAddr,
    handler: Box<dyn Fn(&Request) -> Answer + Send + Sync>,
    /// Handlers that may begin. Who waits for one and is cut leaves nothing behind.
    pool: Arc<Semaphore>,
    /// Connections in the order they came in.
    open: Mutex<BTreeMap<u64, Open>>,
}

struct Open {
    task: AbortHandle,
    /// Whether the head of its request is there.
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
                // Descriptors ran out, say.
                Err(_) if self.cut_idle() => {}
                Err(_) => sleep(RETRY).await,
            }
            // Connections that were cut are closed before the next is taken.
            yield_now().await;
        }
    }

    fn has_room(&self) -> bool {
        locked(&self.open).len() < self.limits.connections
    }

    /// Cuts the connection that has waited longest without a whole head, if there is one.
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
        let mut last = None;
        while let Some(until) = self.until(id).filter(|until| last != Some(*until)) {
            // The peer may be gone: nothing depends on the answer.
            if timeout_at(until, connection.as_mut()).await.is_ok() {
                return;
            }
            last = Some(until);
        }
    }

    fn until(&self, id: u64) -> Option<Instant> {
        locked(&self.open).get(&id).map(|own| own.until)
    }

    /// Gives a connection that has asked this much time from now.
    fn give(&self, id: u64, time: Duration) {
        if let Some(own) = locked(&self.open).get_mut(&id) {
            own.has_asked = true;
            own.until = own.until.max(Instant::now() + time);
        }
    }

    async fn answer(
        self: &Arc<Self>,
        id: u64,
        request: hyper::Request<Incoming>,
    ) -> Result<Response<Body>, Infallible> {
        self.give(id, self.limits.answer_time);
        let answer = self.ask(request).await.unwrap_or_else(|refusal| refusal);
        let slowest = self.limits.slowest_bytes_per_sec.max(1);
        let more = answer.bytes().map_or(STREAM_TIME, |bytes| Duration::from_secs(bytes / slowest));
        self.give(id, self.limits.answer_time + more);
        Ok(self.response(answer))
    }

    async fn ask(self: &Arc<Self>, request: hyper::Request<Incoming>) -> Result<Answer, Answer> {
        let (head, body) = request.into_parts();
        if !self.is_meant(&head) {
            let why = "this is served to addresses of this machine and localhost\n";
            return Err(Answer::refusal(StatusCode::MISDIRECTED_REQUEST, why));
        }
        let limit = self.limits.body_bytes;
        let body = match head.method {
            Method::GET | Method::HEAD => Bytes::new(),
            Method::POST if limit > 0 => {
                let too_much = |_| Answer::refusal(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large\n");
                if body.size_hint().lower() > limit as u64 {
                    return Err(too_much(()));
                }
                Limited::new(body, limit).collect().await.map_err(|_| too_much(()))?.to_bytes()
            }
            _ => {
                let allowed = if limit > 0 { "GET, HEAD, POST" } else { "GET, HEAD" };
                let refusal = Answer::refusal(StatusCode::METHOD_NOT_ALLOWED, "this is only read\n");
                return Err(refusal.with(ALLOW, allowed));
            }
        };
        let broken = || Answer::refusal(StatusCode::INTERNAL_SERVER_ERROR, "this request failed here\n");
        let permit = Arc::clone(&self.pool).acquire_owned().await.map_err(|_| broken())?;
        let shared = Arc::clone(self);
        let work = move || {
            let _permit = permit;
            (shared.handler)(&Request { head, body })
        };
        spawn_blocking(work).await.map_err(|_| broken())
    }

    /// Whether `Host`, and the address where it is a whole one, name this machine in a way that no page can make up.
    fn is_meant(&self, head: &Head) -> bool {
        let mut hosts = head.headers.get_all(HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
        let host = Authority::try_from(host.as_bytes());
        host.is_ok_and(|host| self.is_own(host.host()))
            && head.uri.host().is_none_or(|host| self.is_own(host))
    }

    fn is_own(&self, host: &str) -> bool {
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        host.eq_ignore_ascii_case("localhost")
            || address.is_ok_and(|ip| ip.is_loopback() || ip == self.bound || self.bound.is_unspecified())
    }

    fn response(&self, answer: Answer) -> Response<Body> {
        let body = match answer.content {
            Content::Bytes(bytes) => {
                Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync()
            }
            Content::Stream { every, parts, .. } => self.stream(every, parts),
        };
        let mut response = Response::new(body);
        *response.status_mut() =
            StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let own = self.limits.fields.iter().map(|(name, value)| (name.clone(), (*value).to_owned()));
        for (name, value) in own.chain(answer.fields) {
            // All values are ours.
            if let Ok(value) = HeaderValue::try_from(value) {
                response.headers_mut().insert(name, value);
            }
        }
        response
    }

    fn stream(&self, every: Duration, parts: Parts) -> Body {
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
                // A stream that panics ends.
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

/// Takes a connection from the table when it ends, however it ends.
struct Entry<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        locked(&self.shared.open).remove(&self.id);
    }
}
