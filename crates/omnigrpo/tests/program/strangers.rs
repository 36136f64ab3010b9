//! A training run whose ports are attacked without the token gives the same result as an undisturbed run.
#![cfg(unix)]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::support::Place;
use omnigrpo_http::{Answer, Http, Limits, Request};
use serde_json::{Value, json};

const TRAIN: &str = "train --model M --train_file rows.jsonl --learning_rate 1e-3 --num_generations 4 --gradient_accumulation_steps 2 --max_completion_length 24 --min_completion_length 24 --threads 1 --max_steps 6";
/// Time limit that only a failing program reaches.
const HANGS: Duration = Duration::from_secs(300);

/// Returns the exit code, and kills a program that does not end.
fn end(mut child: Child) -> Option<i32> {
    let start = Instant::now();
    while start.elapsed() < HANGS {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    panic!("the program does not end");
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(HANGS)).unwrap();
    stream
}

/// Returns the answer, up to the end of the connection.
fn ask(port: u16, text: &str) -> String {
    let mut stream = connect(port);
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Opens connections that stay open while the result lives.
fn attack(port: u16) -> Vec<TcpStream> {
    for length in ["50000000000", "99999999999999"] {
        let answer =
            ask(port, &format!("POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n"));
        let refused = ["HTTP/1.1 404 ", "HTTP/1.1 405 ", "HTTP/1.1 413 "];
        assert!(refused.iter().any(|start| answer.starts_with(start)), "{answer}");
    }
    let evil = ask(port, "GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n");
    assert!(evil.starts_with("HTTP/1.1 421 "), "{evil}");
    let mut line = connect(port);
    let _ = line.write_all(b"GET / HTTP/1.1\r\nX: ");
    let part = vec![b'a'; 1 << 20];
    let sent = (0..300).take_while(|_| line.write_all(&part).is_ok()).count();
    assert!(sent < 64, "{sent} MB of an endless line were taken");
    let mut held: Vec<TcpStream> = (0..6).map(|_| connect(port)).collect();
    for stream in &mut held {
        let _ = stream.write_all(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5000\r\n\r\n");
    }
    held.extend((0..100).map(|_| connect(port)));
    for stream in &mut held[6..50] {
        // Some were closed in favour of others.
        let _ = stream.write_all(b"GET / HT");
    }
    held
}

/// Serves a reward. It reports its third request and answers it when the run may continue, so the run is in its middle.
fn reward(gate: Option<(Sender<()>, Receiver<()>)>) -> Http {
    let state = Mutex::new((0, gate));
    let work = move |request: &Request| {
        let mut state = state.lock().unwrap();
        state.0 += 1;
        if state.0 == 3
            && let Some((reached, go)) = state.1.take()
        {
            reached.send(()).unwrap();
            let _ = go.recv_timeout(HANGS);
        }
        let body: Value = serde_json::from_slice(request.body()).unwrap();
        let length = |row: &Value| row["completion"].as_str().unwrap_or_default().len() % 5;
        let rewards: Vec<usize> = body["rows"].as_array().unwrap().iter().map(length).collect();
        Answer::new(200, "application/json", json!({ "id": body["id"], "rewards": rewards }).to_string())
    };
    let limits = Limits { body_bytes: 1 << 20, ..Limits::default() };
    Http::start("reward", "127.0.0.1:0", limits, work).unwrap()
}

fn number_after(text: &str, mark: &str) -> Option<u16> {
    let digits: String = text.split(mark).nth(1)?.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[test]
fn a_run_ends_as_it_should_whoever_holds_its_ports() {
    let place = Place::new();
    let own = reward(None);
    let train = |reward: &Http| format!("{TRAIN} --reward_funcs mine=http://{}", reward.address());
    place.run(&format!("{} --output_dir alone", train(&own))).ok();
    let ((reached, in_the_middle), (go, wait)) = (channel(), channel());
    let own = reward(Some((reached, wait)));
    let ports = "--dashboard --report_to prometheus --prometheus_port 0";
    let mut command = place.command(&format!("{} {ports} --output_dir run", train(&own)));
    let said = place.path("said");
    let file = File::create(&said).unwrap();
    file.set_permissions(std::fs::Permissions::from_mode(0o644)).unwrap();
    let child = command.stderr(Stdio::from(file)).stdout(Stdio::null()).spawn().unwrap();
    let pid = child.id();
    in_the_middle.recv_timeout(HANGS).unwrap();

    let address = || place.text("run/page.url").lines().next().unwrap().to_owned();
    let url = address();
    let mode = std::fs::metadata(place.path("run/page.url")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{mode:o}");
    let page = number_after(&url, "http://127.0.0.1:").unwrap();
    let metrics = number_after(&place.text("said"), "Prometheus: http://127.0.0.1:").unwrap();
    let memory = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let of = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name));
            line.map_or(0, |line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap())
        };
        (of("VmHWM:"), of("Threads:"))
    };
    let before = memory();
    let held = (attack(page), attack(metrics));
    let after = memory();
    if cfg!(target_os = "linux") {
        assert!(after.0 < before.0 + (64 << 10), "kB: {before:?} became {after:?}");
        assert!(after.1 < before.1 + 16, "threads: {before:?} became {after:?}");
    }
    // While the connections are open, the owner's page is answered.
    let path = url.trim().rsplit_once(':').unwrap().1.split_once('/').unwrap().1;
    let answer = ask(page, &format!("GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    drop(go);
    assert_eq!(end(child), Some(0), "{}", place.text("said"));
    drop(held);
    assert!(place.bytes("run/model.safetensors") == place.bytes("alone/model.safetensors"));
    // It stays for `watch`, and for its owner alone.
    assert_eq!(address(), url);
    let mode = std::fs::metadata(place.path("run/page.url")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{mode:o}");

    // Neither the log nor a file of standard error, which others may read, contains the token.
    let token = url.trim().trim_end_matches('/').rsplit_once('/').unwrap().1;
    assert_eq!(token.len(), 32);
    for file in ["said", "run/log.txt", "run/config.yaml"] {
        assert!(!place.text(file).contains(token), "{file}");
    }
    assert!(place.text("said").contains("the address of the run's page is in "));
}

#[test]
fn a_page_goes_on_when_it_is_out_of_descriptors() {
    let place = Place::new();
    std::fs::create_dir(place.path("run")).unwrap();
    place.write("run/metrics.jsonl", "{\"step\":1,\"reward\":0.5}\n");
    let mut shell = place.limited("-n 40", "watch run --dashboard_port 0");
    let mut child = shell.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut url = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut url)
        .unwrap();
    let port = number_after(&url, "http://127.0.0.1:").unwrap();
    let path = url.trim().rsplit_once(':').unwrap().1.split_once('/').unwrap().1;
    let held: Vec<TcpStream> = (0..120).map(|_| connect(port)).collect();
    let answer = ask(port, &format!("GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    drop(held);
    child.kill().unwrap();
    child.wait().unwrap();
}
