//! Checks that any bytes on a connection of `serve` are answered as HTTP or closed, and that no request is a fault of the server. A body
//! alone (it begins with `{`) is sent as a request for a completion: of a text if it has a `prompt`, otherwise of a conversation.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use omnigrpo_data::ReadOptions;
use omnigrpo_fuzz::let_guarded_panics_pass;
use omnigrpo_models::{Checkpoint, LoadOptions, Model, PromptBuilder, PromptSettings};
use omnigrpo_rollout::SamplingParams;
use omnigrpo_serve::{Options, Place, Server};

static ADDRESS: LazyLock<SocketAddr> = LazyLock::new(|| {
    let_guarded_panics_pass();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/models/tests/golden/checkpoints/qwen2_5_vl_tied");
        let checkpoint = Checkpoint::open(&folder).expect("a checkpoint");
        let model = Model::load(&checkpoint, &LoadOptions::default()).expect("a model");
        let settings = PromptSettings { max_completion_length: 1, ..PromptSettings::default() };
        let options = Options {
            name: "tiny".to_owned(),
            place: Place::local(0),
            key: Some("secret".to_owned()),
            sampling: SamplingParams { max_completion_length: 2, ..SamplingParams::default() },
            max_live: 8,
            // Room for some hundred tokens, so that every answer is short.
            max_bytes: 1 << 18,
            read: ReadOptions::default(),
            trim: || (),
        };
        let server = Server::start(PromptBuilder::open(&checkpoint, settings).expect("prompts"), options).expect("a server");
        let address = server.url().trim_start_matches("http://").trim_end_matches("/v1").parse().expect("an address");
        tell.send(address).expect("a receiver");
        server.run(&model, &AtomicBool::new(false)).expect("no failure of the device");
    });
    told.recv().expect("an address")
});

fuzz_target!(|bytes: &[u8]| {
    let mut stream = TcpStream::connect(*ADDRESS).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(15))).expect("a time limit");
    let is_body = bytes.first() == Some(&b'{');
    if is_body {
        let is_text = bytes.windows(8).any(|part| part == b"\"prompt\"");
        let path = if is_text { "/v1/completions" } else { "/v1/chat/completions" };
        let head = "HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n";
        // The server may close the connection first.
        let _ = write!(stream, "POST {path} {head}Content-Length: {}\r\n\r\n", bytes.len());
    }
    let _ = stream.write_all(bytes);
    if !is_body {
        // The rest of an incomplete request never comes.
        let _ = stream.shutdown(Shutdown::Write);
    }
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    if is_body {
        read.expect("an answer in time");
        assert!(!answer.is_empty(), "no answer");
    }
    let status = answer.get(..13).map(String::from_utf8_lossy);
    assert!(answer.is_empty() || status.as_deref().is_some_and(|status| status.starts_with("HTTP/1.")), "{status:?}");
    // A response with status 500 is a fault of the server, or of its model, which is a good one.
    assert!(!status.is_some_and(|status| status.contains(" 500")), "{}", String::from_utf8_lossy(&answer));
});
