//! Sends the servers what a stranger on this machine can send: it takes no memory, threads or places for good.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use omnigrpo_http::{Answer, Http, Limits, Request, Service};
use omnigrpo_watch::{Action, Controls, Place, Prometheus, Server};

/// Longer than any limit here; only a server that fails lets a test wait so long.
const HANGS: Duration = Duration::from_secs(60);

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANGS)).unwrap();
    stream.set_write_timeout(Some(HANGS)).unwrap();
    stream
}

/// All that comes until the other side closes.
fn rest(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
            panic!("the connection is still open: {error}")
        }
        // Closed, with bytes of ours unread or without.
        _ => String::from_utf8(bytes).unwrap(),
    }
}

fn ask(address: SocketAddr, text: &str) -> String {
    let mut stream = connect(address);
    stream.write_all(text.as_bytes()).unwrap();
    rest(stream)
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or("closed")
}

/// Address and a path that is answered with 200.
fn served() -> (tempfile::TempDir, (Server, Prometheus), [(SocketAddr, String); 2]) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("metrics.jsonl"), "{\"step\":1}\n").unwrap();
    let page = Server::start(&[directory.path().to_owned()], &Place::local(0)).unwrap();
    let (host, path) = page.url().strip_prefix("http://").unwrap().split_once('/').unwrap();
    let own = (host.parse().unwrap(), format!("/{path}"));
    let prometheus = Prometheus::start(&Place::local(0), None, "run").unwrap();
    let scraped = (SocketAddr::from(([127, 0, 0, 1], prometheus.port())), "/metrics".to_owned());
    (directory, (page, prometheus), [own, scraped])
}

fn hello(_: &Request) -> Answer {
    Answer::new(200, "text/plain", "hello")
}

#[test]
fn a_body_is_refused_before_it_is_looked_at() {
    let (_directory, _servers, both) = served();
    for (address, path) in both {
        for length in ["5000", "50000000000", "99999999999999"] {
            let fields = format!("Host: {address}\r\nContent-Length: {length}\r\n\r\n");
            assert_eq!(status(&ask(address, &format!("POST / HTTP/1.1\r\n{fields}"))), "405", "{length}");
            let get = ask(address, &format!("GET {path} HTTP/1.1\r\n{fields}"));
            assert_eq!(status(&get), "200", "{length}");
        }
        let chunks = "Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\nabc";
        let chunked = ask(address, &format!("POST / HTTP/1.1\r\nHost: {address}\r\n{chunks}"));
        assert_eq!(status(&chunked), "405");
    }
}

#[test]
fn a_body_that_is_allowed_has_a_bound() {
    let echo = |request: &Request| Answer::new(200, "text/plain", request.body());
    let limits = Limits { body_bytes: 10, ..Limits::default() };
    let server = Http::start("test", "127.0.0.1:0", limits, echo).unwrap();
    let post = |more: &str| ask(server.address(), &format!("POST / HTTP/1.1\r\nHost: localhost\r\n{more}"));
    assert!(post("Content-Length: 10\r\n\r\n0123456789").ends_with("\r\n\r\n0123456789"));
    assert!(post("Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n").ends_with("\r\n\r\nabc"));
    assert_eq!(status(&post("Content-Length: 11\r\n\r\n")), "413");
    assert_eq!(status(&post("Content-Length: 99999999999999\r\n\r\n")), "413");
    assert_eq!(status(&post("Transfer-Encoding: chunked\r\n\r\nb\r\n0123456789a\r\n0\r\n\r\n")), "413");
}

/// Refuses requests without a key by their heads, and answers `/health` at once. Others wait until the sender is dropped.
struct Guarded(Mutex<Receiver<()>>);

impl Service for Guarded {
    fn at_head(&self, head: &Request) -> Option<Answer> {
        match head.path() {
            "/health" => Some(Answer::new(200, "text/plain", "well")),
            _ => (!head.has_key("secret")).then(|| Answer::new(401, "text/plain", "no key")),
        }
    }

    fn answer(&self, request: &Request) -> Answer {
        let _ = self.0.lock().unwrap().recv();
        Answer::new(200, "text/plain", request.body().len().to_string())
    }
}

#[test]
fn a_head_is_answered_before_the_body_and_while_all_handlers_are_busy() {
    let (go, wait) = channel();
    let limits = Limits { body_bytes: 1 << 20, handlers: 2, ..Limits::default() };
    let server = Http::start("test", "127.0.0.1:0", limits, Guarded(Mutex::new(wait))).unwrap();
    let key = "Authorization: Bearer secret\r\n";
    let post = |path: &str, more: &str| format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n");
    let busy: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream = connect(server.address());
            stream.write_all(post("/", &format!("{key}Content-Length: 3\r\n")).as_bytes()).unwrap();
            stream.write_all(b"abc").unwrap();
            stream
        })
        .collect();
    for _ in 0..20 {
        let refused = ask(server.address(), &post("/", "Content-Length: 1000\r\n"));
        assert!(status(&refused) == "401" && refused.ends_with("no key"), "{refused}");
        assert!(ask(server.address(), &post("/health", "Content-Length: 1000\r\n")).ends_with("well"));
        let wrong = ask(server.address(), &post("/", "Authorization: Bearer secre\r\nContent-Length: 9\r\n"));
        assert_eq!(status(&wrong), "401");
    }
    drop(go);
    busy.into_iter().for_each(|stream| assert!(rest(stream).ends_with("\r\n\r\n3")));
}

#[test]
fn bodies_of_all_requests_have_a_bound() {
    let (go, wait) = channel::<()>();
    let limits = Limits { body_bytes: 1000, bodies_bytes: 1500, ..Limits::default() };
    let server = Http::start("test", "127.0.0.1:0", limits, Guarded(Mutex::new(wait))).unwrap();
    let head = "POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n";
    let send = |announced: usize, sent: usize| {
        let mut stream = connect(server.address());
        let text = format!("{head}Content-Length: {announced}\r\n\r\n{}", "x".repeat(sent));
        stream.write_all(text.as_bytes()).unwrap();
        stream
    };
    // One body is half sent, and one waits for a handler that hangs: 900 bytes of each have come, which is too much.
    let complete = send(900, 900);
    let half = send(1000, 900);
    let answer = rest(half);
    assert!(status(&answer) == "503" && answer.contains("retry-after: 5\r\n"), "{answer}");
    let half = send(1000, 500);
    // An announced body takes no room before it comes.
    let silent: Vec<TcpStream> = (0..20).map(|_| send(1000, 0)).collect();
    drop(go);
    assert!(rest(complete).ends_with("\r\n\r\n900"));
    drop(half);
    drop(silent);
    // Everything was given back, for a body in one piece and for a chunked one.
    let start = std::time::Instant::now();
    while !rest(send(1000, 1000)).ends_with("\r\n\r\n1000") {
        assert!(start.elapsed() < HANGS);
    }
    let chunk = format!("{:x}\r\n{}\r\n", 500, "x".repeat(500));
    let chunked =
        ask(server.address(), &format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n"));
    assert!(chunked.ends_with("\r\n\r\n1000"), "{chunked}");
}

#[test]
fn a_head_has_a_bound() {
    let (_directory, _servers, both) = served();
    for (address, path) in both {
        let mut stream = connect(address);
        stream.write_all(b"GET / HTTP/1.1\r\nX: ").unwrap();
        // No more is taken than the buffers of the system hold on both sides.
        let part = [b'a'; 65536];
        let sent = (0..4096).take_while(|_| stream.write_all(&part).is_ok()).count();
        assert!(sent < 1024, "{sent} parts of an endless line were taken");
        let fields: String = (0..1000).map(|at| format!("x-{at}: 1\r\n")).collect();
        let many = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n");
        assert_eq!(status(&ask(address, &format!("{many}{fields}\r\n"))), "431");
        assert_eq!(status(&ask(address, &format!("{many}\r\n"))), "200");
    }
}

#[test]
fn idle_connections_make_room() {
    let (_directory, _servers, both) = served();
    for (address, path) in both {
        let open = || {
            let mut stream = connect(address);
            stream.write_all(b"GET / HT").unwrap();
            stream
        };
        let mut idle: Vec<TcpStream> = (0..200).map(|_| open()).collect();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        assert_eq!(status(&ask(address, &request)), "200");
        assert_eq!(rest(idle.swap_remove(0)), "", "the oldest was cut");
        // The newest was not.
        let mut newest = idle.pop().unwrap();
        newest.write_all(format!("TP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).unwrap();
        assert_eq!(status(&rest(newest)), "404");
    }
}

#[test]
fn incomplete_bodies_make_room() {
    let limits = Limits { connections: 4, body_bytes: 10, ..Limits::default() };
    let server = Http::start("test", "127.0.0.1:0", limits, hello).unwrap();
    let held: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = connect(server.address());
            // The server may have closed it already.
            let _ =
                stream.write_all(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n01234");
            stream
        })
        .collect();
    assert!(ask(server.address(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").ends_with("hello"));
    drop(held);
}

/// A response that another thread sends arrives complete, and the thread learns of a client that leaves.
#[test]
fn a_response_may_come_later_or_in_parts() {
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let work = move |request: &Request| {
        let (whole, later) = Answer::later();
        let (streamed, feed) = Answer::fed(200, "text/plain");
        let answer = if request.path() == "/later" { whole } else { streamed };
        tell.lock().unwrap().send((later, feed)).unwrap();
        answer
    };
    let server = Http::start("test", "127.0.0.1:0", Limits::default(), work).unwrap();
    let get = |path: &str| {
        let mut stream = connect(server.address());
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
        let senders = told.recv_timeout(HANGS).unwrap();
        (stream, senders)
    };
    let (stream, (later, _)) = get("/later");
    later.send(Answer::new(201, "text/plain", "late")).unwrap();
    assert!(rest(stream).ends_with("late"));
    let (stream, (later, _)) = get("/later");
    drop(later);
    assert_eq!(status(&rest(stream)), "500");
    let (stream, (_, feed)) = get("/fed");
    feed.send(b"one ".to_vec()).unwrap();
    feed.send(b"two".to_vec()).unwrap();
    drop(feed);
    let answer = rest(stream);
    assert!(answer.contains("one ") && answer.contains("two"), "{answer}");
    for path in ["/later", "/fed"] {
        let (stream, (later, feed)) = get(path);
        let is_closed = || if path == "/later" { later.is_closed() } else { feed.is_closed() };
        assert!(!is_closed());
        drop(stream);
        let start = std::time::Instant::now();
        while !is_closed() {
            assert!(start.elapsed() < HANGS, "{path}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Starts a server whose handler of `/stuck` hangs until the sender is dropped.
fn stuck(limits: Limits) -> (Http, Sender<()>) {
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let work = move |request: &Request| {
        if request.path() == "/stuck" {
            let _ = wait.lock().unwrap().recv();
        }
        hello(request)
    };
    (Http::start("test", "127.0.0.1:0", limits, work).unwrap(), go)
}

#[test]
fn a_full_server_closes_what_is_too_much_and_recovers() {
    let (server, go) = stuck(Limits { connections: 2, handlers: 2, ..Limits::default() });
    let address = server.address();
    let asked: Vec<TcpStream> = (0..2)
        .map(|_| {
            let mut stream = connect(address);
            stream.write_all(b"GET /stuck HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            stream
        })
        .collect();
    // A new one can take the place of a connection whose head is not read yet, so the first may get through.
    let refused = (0..1000).any(|_| rest(connect_and_ask(address)).is_empty());
    assert!(refused);
    drop(go);
    asked.into_iter().for_each(|stream| drop(rest(stream)));
    assert_eq!(status(&ask(address, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")), "200");
}

fn connect_and_ask(address: SocketAddr) -> TcpStream {
    let mut stream = connect(address);
    // It may be closed already.
    let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream
}

fn hasty() -> Limits {
    let second = Duration::from_secs(1);
    Limits {
        head_time: second,
        answer_time: second,
        transfer_time: second,
        slowest_bytes_per_sec: 1 << 40,
        ..Limits::default()
    }
}

#[test]
fn a_head_that_drips_is_cut() {
    let server = Http::start("test", "127.0.0.1:0", hasty(), hello).unwrap();
    let mut stream = connect(server.address());
    let silent = connect(server.address());
    let drip = b"GET / HTTP/1.1\r\nX: ".iter().chain(std::iter::repeat(&b'a')).take(10_000);
    let taken = drip
        .take_while(|byte| {
            std::thread::sleep(Duration::from_millis(10));
            stream.write_all(&[**byte]).is_ok()
        })
        .count();
    assert!(taken < 10_000, "the server waits for a head for ever");
    assert_eq!(rest(silent), "");
}

#[test]
fn a_body_that_does_not_come_is_cut() {
    let limits = Limits { body_bytes: 10, ..hasty() };
    let server = Http::start("test", "127.0.0.1:0", limits, hello).unwrap();
    assert_eq!(ask(server.address(), "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"), "");
}

/// Parts of a megabyte that end when the answer does; the receiver hears that.
fn flood(bytes: Option<u64>) -> (impl Fn(&Request) -> Answer + Send + Sync + 'static, Receiver<()>) {
    let (held, dropped) = channel::<()>();
    let held = Mutex::new(Some(held));
    let work = move |_: &Request| {
        let held = held.lock().unwrap().take();
        let parts = std::iter::from_fn(move || {
            let _ = &held;
            Some(Ok(vec![0; 1 << 20]))
        });
        Answer::stream(200, "text/plain", bytes, Duration::ZERO, Box::new(parts))
    };
    (work, dropped)
}

#[test]
fn a_reader_that_does_not_read_is_cut() {
    let (work, dropped) = flood(Some(1 << 40));
    let server = Http::start("test", "127.0.0.1:0", hasty(), work).unwrap();
    let _held = connect_and_ask(server.address());
    assert_eq!(dropped.recv_timeout(HANGS), Err(RecvTimeoutError::Disconnected));
}

#[test]
fn a_stream_ends_with_its_reader() {
    let (work, dropped) = flood(None);
    let server = Http::start("test", "127.0.0.1:0", Limits::default(), work).unwrap();
    drop(connect_and_ask(server.address()));
    assert_eq!(dropped.recv_timeout(HANGS), Err(RecvTimeoutError::Disconnected));
}

#[test]
fn only_names_of_this_machine_are_answered() {
    let (_directory, _servers, both) = served();
    for (address, path) in both {
        let asked = |target: &str, hosts: &str| {
            let answer = ask(address, &format!("GET {target} HTTP/1.1\r\n{hosts}\r\n"));
            status(&answer).to_owned()
        };
        for host in ["127.0.0.1", "localhost", "LOCALHOST:1", "[::1]:80", &address.to_string()] {
            assert_eq!(asked(&path, &format!("Host: {host}\r\n")), "200", "{host}");
        }
        let evil = [
            "evil.example",
            "127.0.0.1.evil.example",
            "evil.example:80",
            "evil.example@127.0.0.1",
            "8.8.8.8",
            "localhost.",
            "",
        ];
        for host in evil {
            assert_eq!(asked(&path, &format!("Host: {host}\r\n")), "421", "{host}");
        }
        assert_eq!(asked(&path, ""), "421");
        assert_eq!(asked(&path, "Host: localhost\r\nHost: evil.example\r\n"), "421");
        assert_eq!(asked(&format!("http://evil.example{path}"), "Host: localhost\r\n"), "421");
        assert_eq!(asked(&format!("http://evil.example@localhost{path}"), "Host: localhost\r\n"), "421");
        assert_eq!(asked(&format!("http://localhost{path}"), "Host: localhost\r\n"), "200");
    }
}

#[test]
fn only_reading_is_answered() {
    let (_directory, _servers, both) = served();
    for (address, path) in both {
        let asked =
            |method: &str| ask(address, &format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\n\r\n"));
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "get"] {
            let answer = asked(method);
            assert_eq!(status(&answer), "405", "{method}");
            assert!(answer.contains("allow: GET, HEAD\r\n"), "{answer}");
        }
        let (head, get) = (asked("HEAD"), asked("GET"));
        assert_eq!((status(&head), status(&get)), ("200", "200"));
        assert!(head.ends_with("\r\n\r\n"), "{head}");
        assert!(!asked("G E T").contains(" 200 "));
    }
}

#[test]
fn only_the_page_of_the_run_stops_it() {
    let directory = tempfile::tempdir().unwrap();
    let (tell, heard) = channel();
    let tell = Mutex::new(tell);
    let act = move |action: Action| {
        tell.lock().unwrap().send(action).unwrap();
        "finishing step 3".to_owned()
    };
    let controls = Controls { act: Box::new(act), activity: omnigrpo_observe::Activity::default() };
    let root = std::fs::canonicalize(directory.path()).unwrap();
    let server = Server::start_live(root, &Place::local(0), Some(controls)).unwrap();
    let (host, path) = server.url().strip_prefix("http://").unwrap().split_once('/').unwrap();
    let (address, token) = (host.parse().unwrap(), path.trim_end_matches('/'));
    let post = |method: &str, path: &str, fields: &str| {
        let answer =
            ask(address, &format!("{method} /{token}/{path} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n"));
        status(&answer).to_owned()
    };
    let (origin, own) = (format!("Origin: http://{host}\r\n"), format!("X-Token: {token}\r\n"));
    let other = if token.starts_with('0') { "1" } else { "0" };
    for (fields, why) in [
        (String::new(), "neither"),
        (own.clone(), "no origin"),
        (origin.clone(), "no token in a header"),
        (format!("{origin}X-Token: {other}{}\r\n", &token[1..]), "another token"),
        (format!("{own}Origin: http://evil.example\r\n"), "another origin"),
        (format!("{own}Origin: null\r\n"), "a page without an origin"),
        (format!("{own}Origin: http://{host}\r\nOrigin: http://evil.example\r\n"), "two origins"),
        (format!("{own}Origin: https://{host}\r\n"), "another scheme"),
        (format!("{own}Origin: http://localhost:1\r\n"), "another port"),
        (format!("{own}{origin}Sec-Fetch-Site: cross-site\r\n"), "another site"),
        (format!("{own}{origin}Sec-Fetch-Site: same-site\r\n"), "another origin of the site"),
    ] {
        assert_eq!(post("POST", "api/stop", &fields), "403", "{why}");
        assert_eq!(post("POST", "api/save", &fields), "403", "{why}");
    }
    let both = format!("{own}{origin}");
    assert_eq!(post("GET", "api/stop", &both), "404");
    assert_eq!(post("OPTIONS", "api/stop", &both), "405");
    assert_eq!(post("POST", "", &both), "405");
    assert_eq!(post("POST", "api/runs", &both), "405");
    assert_eq!(post("POST", "api/stop", &format!("{both}Content-Length: 99\r\n")), "413");
    // Others are refused before a byte of their bodies has come.
    assert_eq!(post("POST", "api/stop", "Content-Length: 9\r\n"), "403");
    let elsewhere = ask(address, &format!("POST /api/stop HTTP/1.1\r\nHost: {host}\r\n{both}\r\n"));
    assert_eq!(status(&elsewhere), "404");
    assert!(heard.try_recv().is_err(), "nothing was passed on");
    assert_eq!(post("POST", "api/save", &both), "200");
    assert_eq!(post("POST", "api/stop", &format!("{both}Sec-Fetch-Site: same-origin\r\n")), "200");
    assert_eq!([heard.recv(), heard.recv()], [Ok(Action::Save), Ok(Action::Stop)]);
    // A server that only shows runs takes no such request.
    let (_other, (shown, _), [(address, path), _]) = served();
    let token = path.trim_matches('/');
    let text = format!(
        "POST {path}api/stop HTTP/1.1\r\nHost: {address}\r\nOrigin: http://{address}\r\nX-Token: {token}\r\n\r\n"
    );
    assert_eq!(status(&ask(address, &text)), "405");
    drop(shown);
}

#[test]
fn a_handler_that_panics_is_answered_for() {
    let work = |request: &Request| match request.path() {
        "/broken" => panic!("as it should"),
        _ => hello(request),
    };
    let server = Http::start("test", "127.0.0.1:0", Limits::default(), work).unwrap();
    for _ in 0..20 {
        let get =
            |path: &str| ask(server.address(), &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        assert_eq!(status(&get("/broken")), "500");
        assert_eq!(status(&get("/")), "200");
    }
}

#[test]
fn the_end_waits_for_nobody() {
    let (server, go) = stuck(Limits::default());
    let address = server.address();
    let mut held: Vec<TcpStream> = (0..8).map(|_| connect(address)).collect();
    for stream in &mut held {
        stream.write_all(b"GET /stuck HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    }
    held.extend((0..8).map(|_| connect(address)));
    drop(server);
    // The handlers still hang. A `drop` that waited for them would never return.
    held.into_iter().for_each(|stream| assert_eq!(rest(stream), ""));
    assert!(TcpStream::connect(address).is_err());
    drop(go);
    let again = Http::start("test", address, Limits::default(), hello);
    again.unwrap();
}
