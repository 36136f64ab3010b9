//! The protocol of OpenAI's API, with a tiny random model: responses equal those of a generator, wrong requests are refused with a
//! reason, and clients that leave free their place.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base64::Engine as _;
use omnigrpo_data::{Fetch, ReadOptions, RowReader};
use omnigrpo_models::{Checkpoint, LoadOptions, Model, ModelError, PromptBuilder, PromptSettings};
use omnigrpo_rollout::{Completion, GenerateOptions, Generator, Request, SamplingParams};
use omnigrpo_serve::{Options, Place, Server};
use omnigrpo_testkit::{checkpoint, golden};
use serde_json::{Value, json};

const HANGS: Duration = Duration::from_secs(60);

fn open(name: &str) -> (Model, PromptBuilder) {
    // Some completions are long.
    let positions = json!({ "max_position_embeddings": 32_768 }).as_object().unwrap().clone();
    let checkpoint = Checkpoint::open_with(&checkpoint(name), |_| Ok::<_, ModelError>(positions)).unwrap();
    let model = Model::load(&checkpoint, &LoadOptions::default()).unwrap();
    let settings = PromptSettings { max_completion_length: 1, ..PromptSettings::default() };
    (model, PromptBuilder::open(&checkpoint, settings).unwrap())
}

struct Served {
    url: String,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn new(name: &'static str, max_live: usize) -> Self {
        Self::in_room(name, max_live, u64::MAX)
    }

    /// Serves with a limited memory for keys, values and log-probabilities.
    fn in_room(name: &'static str, max_live: usize, max_bytes: u64) -> Self {
        Self::with(name, max_live, max_bytes, ReadOptions::default())
    }

    fn with(name: &'static str, max_live: usize, max_bytes: u64, read: ReadOptions) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (own, (tell, told)) = (Arc::clone(&stop), channel());
        let thread = std::thread::spawn(move || {
            let (model, prompts) = open(name);
            let options = Options {
                name: "tiny".to_owned(),
                place: Place::local(0),
                key: Some("secret".to_owned()),
                sampling: SamplingParams { max_completion_length: 12, ..SamplingParams::default() },
                max_live,
                max_bytes,
                read,
                trim: || (),
            };
            let server = Server::start(prompts, options).unwrap();
            tell.send(server.url()).unwrap();
            server.run(&model, &own).unwrap();
        });
        Self { url: told.recv().unwrap(), stop, thread: Some(thread) }
    }

    fn qwen() -> Self {
        Self::new("qwen2_5_vl_tied", 64)
    }

    fn address(&self) -> &str {
        self.url.strip_prefix("http://").unwrap().strip_suffix("/v1").unwrap()
    }

    fn send(&self, method: &str, path: &str, fields: &str, body: &[u8]) -> (u16, String) {
        self.send_part(method, path, fields, body, body.len())
    }

    /// Sends a body that is announced with another length.
    fn send_part(&self, method: &str, path: &str, fields: &str, body: &[u8], length: usize) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(HANGS)).unwrap();
        let host = self.address();
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{fields}Content-Length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn post(&self, body: &Value) -> (u16, Value) {
        self.post_to("chat/completions", body)
    }

    fn post_to(&self, address: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.send(
            "POST",
            &format!("/v1/{address}"),
            "Authorization: Bearer secret\r\n",
            body.to_string().as_bytes(),
        );
        (status, serde_json::from_str(&body).unwrap())
    }

    fn ok(&self, body: &Value) -> Value {
        let (status, answer) = self.post(body);
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Returns the response to a text to continue.
    fn text(&self, body: &Value) -> Value {
        let (status, answer) = self.post_to("completions", body);
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Returns the chunks of a stream.
    fn stream(&self, body: &Value) -> Vec<Value> {
        self.stream_of("chat/completions", body)
    }

    fn stream_of(&self, address: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let answer = ureq::post(format!("{}/{address}", self.url))
            .header("Authorization", "Bearer secret")
            .send(body.to_string())
            .unwrap();
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        let lines = BufReader::new(answer.into_body().into_reader()).lines().map(Result::unwrap);
        let mut data: Vec<String> = lines
            .filter(|line| !line.is_empty())
            .map(|line| line.strip_prefix("data: ").unwrap().to_owned())
            .collect();
        assert_eq!(data.pop().unwrap(), "[DONE]");
        data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    fn metric(&self, name: &str) -> f64 {
        let (status, page) = self.send("GET", "/metrics", "", b"");
        assert_eq!(status, 200);
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("omnigrpo_serve_{name} ")));
        line.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
    }

    fn wait_for(&self, name: &str, value: f64) {
        let start = Instant::now();
        while self.metric(name) != value {
            assert!(start.elapsed() < HANGS, "{name} is {}", self.metric(name));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(std::thread::panicking() || ended.is_ok());
    }
}

fn asked(text: &str) -> Value {
    json!({ "model": "tiny", "temperature": 0, "messages": [{ "role": "user", "content": text }] })
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn text_of(answer: &Value, choice: usize) -> &str {
    answer["choices"][choice]["message"]["content"].as_str().unwrap()
}

fn media(name: &str) -> PathBuf {
    golden("media").join(name)
}

fn data_address(name: &str, kind: &str) -> String {
    let bytes = std::fs::read(media(name)).unwrap();
    format!("data:{kind};base64,{}", base64::engine::general_purpose::STANDARD.encode(bytes))
}

/// Completions of a generator.
fn generated(row: Value, num_samples: usize, params: &SamplingParams) -> Vec<Completion> {
    let (model, prompts) = open("qwen2_5_vl_tied");
    let folder = golden("media");
    let sample = RowReader::new("row").media_in(&folder).sample(row).unwrap();
    let prompt = prompts.build(&sample).unwrap();
    let features = model.encode_prompt(&prompt).unwrap();
    let request = Request { num_samples, ..Request::new(&prompt, &features) };
    let generator = Generator::new(&model, &prompts, params);
    generator.generate([request], GenerateOptions::default()).unwrap().remove(0).completions
}

fn greedy(max_completion_length: usize) -> SamplingParams {
    SamplingParams { max_completion_length, ..SamplingParams::greedy() }
}

#[test]
fn texts_equal_those_of_a_generator_with_and_without_a_picture() {
    let server = Served::qwen();
    let alone = generated(json!({ "prompt": "Which shape is red?" }), 1, &greedy(24)).remove(0);
    let answer = server.ok(&with(asked("Which shape is red?"), json!({ "max_tokens": 24 })));
    assert_eq!(text_of(&answer, 0), alone.text);
    assert_eq!(answer["usage"]["completion_tokens"], alone.ids.len());
    assert_eq!(answer["object"], "chat.completion");

    let row = json!({ "messages": [{ "role": "user", "content": [
        { "type": "text", "text": "Look: " }, { "type": "image", "image": "shapes.png" }, { "type": "text", "text": "what?" },
    ] }] });
    let alone = generated(row, 1, &greedy(12)).remove(0);
    let parts = json!([
        { "type": "text", "text": "Look: " },
        { "type": "image_url", "image_url": { "url": data_address("shapes.png", "image/png"), "detail": "high" } },
        { "type": "text", "text": "what?" },
    ]);
    let body = json!({ "temperature": 0, "messages": [{ "role": "user", "content": parts }] });
    let answer = server.ok(&body);
    assert_eq!(text_of(&answer, 0), alone.text);
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 20, "the picture is read: {answer}");
    // A clip, too.
    let row = json!({ "messages": [{ "role": "user", "content": [{ "type": "video", "video": "clip.gif", "max_pixels": 12544 }] }] });
    let alone = generated(row, 1, &greedy(12)).remove(0);
    let clip = json!([{ "type": "video_url", "video_url": { "url": data_address("clip.gif", "image/gif") }, "max_pixels": 12544 }]);
    let body = json!({ "temperature": 0, "messages": [{ "role": "user", "content": clip }] });
    assert_eq!(text_of(&server.ok(&body), 0), alone.text);
}

#[test]
fn sound_is_heard_by_models_that_hear() {
    let sound = base64::engine::general_purpose::STANDARD.encode(std::fs::read(media("rise.wav")).unwrap());
    let part = json!([{ "type": "text", "text": "What?" }, { "type": "input_audio", "input_audio": { "data": sound, "format": "wav" } }]);
    let body = json!({ "temperature": 0, "messages": [{ "role": "user", "content": part }] });
    for model in ["humanomni", "omni", "qwen2_audio"] {
        let server = Served::new(model, 8);
        let heard = server.ok(&body)["usage"]["prompt_tokens"].as_u64();
        let plain = server.ok(&asked("What?"))["usage"]["prompt_tokens"].as_u64();
        assert!(heard > plain, "{model}: {heard:?} {plain:?}");
    }
    let (status, answer) = Served::qwen().post(&body);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("messages")), "{answer}");
}

#[test]
fn a_model_that_reads_text_only_answers_texts_and_refuses_pictures() {
    let server = Served::new("qwen3", 8);
    let answer = server.ok(&with(asked("Hm?"), json!({ "temperature": 0, "max_tokens": 6 })));
    assert!(answer["usage"]["completion_tokens"].as_u64() > Some(0), "{answer}");
    let image =
        json!([{ "type": "image_url", "image_url": { "url": data_address("shapes.png", "image/png") } }]);
    let (status, answer) = server.post(&json!({ "messages": [{ "role": "user", "content": image }] }));
    assert_eq!(status, 400, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("this model reads text only"), "{answer}");
}

#[test]
fn several_completions_share_a_prompt_and_a_seed_repeats_them() {
    let server = Served::qwen();
    let params = SamplingParams { seed: 7, max_completion_length: 12, ..SamplingParams::default() };
    let alone = generated(json!({ "prompt": "Hm?" }), 3, &params);
    let body = with(asked("Hm?"), json!({ "temperature": 1, "n": 3, "seed": 7 }));
    let answer = server.ok(&body);
    for (choice, alone) in alone.iter().enumerate() {
        assert_eq!(text_of(&answer, choice), alone.text, "{choice}");
    }
    assert_ne!(text_of(&answer, 0), text_of(&answer, 1));
    let tokens: usize = alone.iter().map(|alone| alone.ids.len()).sum();
    assert_eq!(answer["usage"]["completion_tokens"], tokens);
    let unseeded = with(asked("Hm?"), json!({ "temperature": 1 }));
    assert_ne!(text_of(&server.ok(&unseeded), 0), text_of(&server.ok(&unseeded), 0));
}

#[test]
fn a_stream_has_the_parts_of_the_whole_answer() {
    let server = Served::qwen();
    let body = with(
        asked("Hm?"),
        json!({ "n": 2, "temperature": 1, "seed": 3, "logprobs": true, "top_logprobs": 2 }),
    );
    let whole = server.ok(&body);
    let chunks = server.stream(&with(body, json!({ "stream_options": { "include_usage": true } })));
    let usage = chunks.last().unwrap();
    assert_eq!((&usage["usage"], &usage["choices"]), (&whole["usage"], &json!([])));
    for index in 0..2 {
        let own: Vec<&Value> = chunks
            .iter()
            .flat_map(|chunk| chunk["choices"].as_array().unwrap())
            .filter(|c| c["index"] == index)
            .collect();
        let text: String = own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, text_of(&whole, index));
        assert_eq!(own[0]["delta"]["role"], "assistant");
        let whole = &whole["choices"][index];
        assert_eq!(own.last().unwrap()["finish_reason"], whole["finish_reason"]);
        let logprobs: Vec<&Value> = own
            .iter()
            .flat_map(|choice| choice["logprobs"]["content"].as_array().into_iter().flatten())
            .collect();
        assert_eq!(json!(logprobs), whole["logprobs"]["content"]);
    }
}

#[test]
fn log_probabilities_are_those_of_the_model() {
    let server = Served::qwen();
    // At any temperature, they are those of softmax(logits).
    let params = SamplingParams {
        seed: 5,
        temperature: 0.5,
        logprob_temperature: Some(1.0),
        max_completion_length: 12,
        ..SamplingParams::default()
    };
    let alone = generated(json!({ "prompt": "Hm?" }), 1, &params).remove(0);
    let more = json!({ "temperature": 0.5, "seed": 5, "logprobs": true, "top_logprobs": 20 });
    let answer = server.ok(&with(asked("Hm?"), more));
    let places = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(places.len(), alone.ids.len());
    for (place, logprob) in places.iter().zip(&alone.logprobs) {
        assert_eq!(place["logprob"].as_f64().unwrap() as f32, *logprob);
        let top: Vec<f64> = place["top_logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t["logprob"].as_f64().unwrap())
            .collect();
        assert_eq!(top.len(), 20);
        assert!(
            top.is_sorted_by(|a, b| a >= b) && top.iter().map(|nats| nats.exp()).sum::<f64>() <= 1.0 + 1e-5
        );
        // A drawn token that is among the most probable has the same number there.
        let same =
            place["top_logprobs"].as_array().unwrap().iter().find(|top| top["bytes"] == place["bytes"]);
        if let Some(same) = same {
            assert!((same["logprob"].as_f64().unwrap() - f64::from(*logprob)).abs() < 1e-5, "{place}");
        }
    }
    let bytes: Vec<u8> = places
        .iter()
        .flat_map(|p| p["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(String::from_utf8_lossy(&bytes), text_of(&answer, 0));
    let most_probable = server.ok(&with(asked("Hm?"), json!({ "logprobs": true, "top_logprobs": 1 })));
    for place in most_probable["choices"][0]["logprobs"]["content"].as_array().unwrap() {
        assert_eq!(place["top_logprobs"][0]["bytes"], place["bytes"], "greedy");
    }
}

#[test]
fn stop_strings_and_lengths_end_a_completion() {
    let server = Served::qwen();
    let body = with(asked("Which shape is red?"), json!({ "max_completion_tokens": 24 }));
    let whole = server.ok(&body);
    let text = text_of(&whole, 0).to_owned();
    let chars: Vec<char> = text.chars().collect();
    let stop: String = chars[4..7].iter().collect();
    let before = text.split_once(&stop).unwrap().0;
    let stopped = with(body, json!({ "stop": [&stop] }));
    let answer = server.ok(&stopped);
    assert_eq!((text_of(&answer, 0), &answer["choices"][0]["finish_reason"]), (before, &json!("stop")));
    // No part of the stop string is sent.
    let chunks = server.stream(&stopped);
    let sent: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(sent, before);
    let short = server.ok(&with(asked("Which shape is red?"), json!({ "max_tokens": 2 })));
    assert_eq!(
        (&short["usage"]["completion_tokens"], &short["choices"][0]["finish_reason"]),
        (&json!(2), &json!("length"))
    );
    assert_eq!(server.ok(&asked("Hm?"))["usage"]["completion_tokens"], 12, "the default of the server");
}

#[test]
fn requests_that_decode_together_do_not_change_each_other() {
    let server = Served::new("qwen2_5_vl_tied", 6);
    let body = |n: usize| {
        let more =
            json!({ "temperature": 0.25 * n as f64, "seed": n, "n": 1 + n % 3, "max_tokens": 8 + 3 * n });
        with(asked(&format!("Question {n}?")), more)
    };
    let alone: Vec<Value> = (0..10).map(|n| server.ok(&body(n))["choices"].take()).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let each: Vec<_> = (0..10)
            .map(|n| {
                scope.spawn({
                    let (server, body) = (&server, body(n));
                    move || server.ok(&body)
                })
            })
            .collect();
        each.into_iter().map(|thread| thread.join().unwrap()["choices"].take()).collect()
    });
    assert_eq!(alone, together);
    server.wait_for("requests_total{outcome=\"finished\"}", 20.0);
    assert_eq!(server.metric("requests_running") + server.metric("requests_waiting"), 0.0);
    assert_eq!(server.metric("time_to_first_token_seconds_count"), 20.0);
}

#[test]
fn a_client_that_disconnects_frees_its_place() {
    let server = Served::new("qwen2_5_vl_tied", 4);
    // No completion ends before the limit of positions.
    let endless = json!({ "max_tokens": 20_000, "min_tokens": 20_000, "n": 4 });
    for streams in [false, true] {
        let text = with(asked("Hm?"), with(endless.clone(), json!({ "stream": streams }))).to_string();
        let mut held = TcpStream::connect(server.address()).unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        );
        held.write_all(head.as_bytes()).unwrap();
        server.wait_for("completions_running", 4.0);
        // The next request waits for room, and disconnecting clients leave the queue as well.
        let mut waits = TcpStream::connect(server.address()).unwrap();
        waits.write_all(head.as_bytes()).unwrap();
        server.wait_for("requests_waiting", 1.0);
        drop(waits);
        server.wait_for("requests_waiting", 0.0);
        drop(held);
        server.wait_for("completions_running", 0.0);
    }
    assert_eq!(server.metric("requests_total{outcome=\"disconnected\"}"), 4.0);
    server.ok(&asked("Hm?"));
}

/// Keys and values take 4 bytes per number, and a reported log-probability 1 KiB.
#[test]
fn memory_for_keys_values_and_log_probabilities_is_limited() {
    const NAME: &str = "qwen2_5_vl_tied";
    let config = open(NAME).0.decoder().config().clone();
    let of_token = (8 * config.layers * config.heads.kv_width()) as u64;
    let room = 50_000 * of_token;
    let server = Served::in_room(NAME, 64, room);
    let refused = |more: Value, expected: &str| {
        let (status, answer) = server.post(&with(asked("Hm?"), more));
        let message = answer["error"]["message"].as_str().unwrap();
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("max_tokens")), "{message}");
        assert!(message.contains(expected) && message.contains(&format!("has {room} bytes")), "{message}");
    };
    // Three completions of 17,000 tokens take more than 50,000 rows, and two take less.
    refused(json!({ "n": 3, "max_tokens": 17_000 }), "of 3 completions with 17000 tokens each");
    let most = room / 1024 / 21 + 1;
    refused(
        json!({ "max_tokens": most, "logprobs": true, "top_logprobs": 20 }),
        "log-probabilities of 1 completions",
    );
    // The batch has room for 64 completions, and the memory for two of these.
    let endless = json!({ "max_tokens": 20_000, "min_tokens": 20_000, "n": 2, "stream": true });
    let text = with(asked("Hm?"), endless).to_string();
    let request = |text: &str| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let head =
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n";
        stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{text}", text.len()).as_bytes()).unwrap();
        stream
    };
    let held = request(&text);
    server.wait_for("completions_running", 2.0);
    let waits = request(&text);
    server.wait_for("requests_waiting", 1.0);
    drop(held);
    server.wait_for("requests_waiting", 0.0);
    server.wait_for("completions_running", 2.0);
    drop(waits);
    server.wait_for("completions_running", 0.0);
    server.ok(&asked("Hm?"));
}

#[test]
fn what_cannot_be_done_is_refused_with_a_reason() {
    let server = Served::qwen();
    let message = |content: Value| json!({ "messages": [{ "role": "user", "content": content }] });
    let tool = json!({ "type": "function", "function": { "name": "look" } });
    for (body, param, part) in [
        (json!({}), None, "missing field `messages`"),
        (json!({ "messages": [] }), Some("messages"), "last message"),
        (json!({ "messages": "x" }), None, "expected a list"),
        (
            with(asked("x"), json!({ "messages": [{ "role": "assistant", "content": "x" }] })),
            Some("messages"),
            "last message",
        ),
        (
            with(
                asked("x"),
                json!({ "messages": [{ "role": "bot", "content": "x" }, { "role": "user", "content": "x" }] }),
            ),
            Some("messages"),
            "messages[0]: the role",
        ),
        (with(asked("x"), json!({ "tempreature": 1 })), None, "unknown field `tempreature`"),
        (with(asked("x"), json!({ "temperature": -1 })), None, "temperature is -1"),
        (with(asked("x"), json!({ "temperature": 1e-45 })), None, "expected 0, or from 0.0001 to 100"),
        (with(asked("x"), json!({ "temperature": 1e-38 })), None, "temperature is 0.0000"),
        (with(asked("x"), json!({ "temperature": 1e38 })), None, "temperature is 1000"),
        (with(asked("x"), json!({ "temperature": 1e300 })), None, "temperature is inf"),
        (with(asked("x"), json!({ "temperature": "hot" })), None, "expected a number"),
        (with(asked("x"), json!({ "top_p": 2 })), None, "top_p is 2"),
        (with(asked("x"), json!({ "top_p": 1e-300 })), None, "top_p is 0"),
        (with(asked("x"), json!({ "repetition_penalty": 1e-45 })), None, "expected from 0.01 to 100"),
        (with(asked("x"), json!({ "repetition_penalty": 3e38 })), None, "expected from 0.01 to 100"),
        (with(asked("x"), json!({ "frequency_penalty": 1e308 })), Some("frequency_penalty"), "unsupported"),
        (
            with(asked("x"), json!({ "chat_template_kwargs": { "messages": [] } })),
            Some("chat_template_kwargs"),
            "has `messages`, which follows from the request",
        ),
        (with(asked("x"), json!({ "chat_template_kwargs": "x" })), None, "expected a mapping"),
        (with(asked("x"), json!({ "reasoning_effort": "low" })), Some("reasoning_effort"), "leave it out"),
        (with(asked("x"), json!({ "top_k": -2 })), Some("top_k"), "top_k is -2"),
        (with(asked("x"), json!({ "top_k": i64::MIN })), Some("top_k"), "top_k is -9223372036854775808"),
        (with(asked("x"), json!({ "top_k": 1u64 << 63 })), None, "expected a whole number"),
        (with(asked("x"), json!({ "seed": 0.5 })), None, "expected a whole number"),
        (with(asked("x"), json!({ "max_tokens": -1 })), None, "expected a whole number from 0"),
        (with(asked("x"), json!({ "max_tokens": u64::MAX })), Some("max_tokens"), "expected at most"),
        (with(asked("x"), json!({ "min_tokens": u64::MAX })), None, "min_tokens is 18446744073709551615"),
        (with(asked("x"), json!({ "n": u64::MAX })), Some("n"), "from 1 to 64"),
        (with(asked("x"), json!({ "stop": 5 })), None, "expected a text or a list of texts"),
        (with(asked("x"), json!({ "stream": "yes" })), None, "expected true or false"),
        (with(asked("x"), json!({ "logit_bias": [] })), None, "expected a mapping"),
        (with(asked("x"), json!({ "n": 0 })), Some("n"), "from 1 to 64"),
        (with(asked("x"), json!({ "n": 65 })), Some("n"), "from 1 to 64"),
        (with(asked("x"), json!({ "max_tokens": 0 })), None, "max_tokens is 0"),
        (
            with(asked("x"), json!({ "max_tokens": 1_000_000 })),
            Some("max_tokens"),
            "positions; expected at most",
        ),
        (with(asked("x"), json!({ "stop": "" })), Some("stop"), "stop must be"),
        (with(asked("x"), json!({ "top_logprobs": 3 })), Some("top_logprobs"), "with logprobs true"),
        (with(asked("x"), json!({ "logprobs": true, "top_logprobs": 21 })), Some("top_logprobs"), "0 to 20"),
        (with(asked("x"), json!({ "stream_options": {} })), Some("stream_options"), "needs stream"),
        (with(asked("x"), json!({ "logit_bias": { "1": 3 } })), Some("logit_bias"), "unsupported"),
        (with(asked("x"), json!({ "presence_penalty": 1 })), Some("presence_penalty"), "unsupported"),
        (
            with(asked("x"), json!({ "response_format": { "type": "json_object" } })),
            Some("response_format"),
            "unsupported",
        ),
        (with(asked("x"), json!({ "tools": [{}] })), Some("tools"), "must be a list"),
        (with(asked("x"), json!({ "tool_choice": "auto" })), Some("tool_choice"), "with tools"),
        (
            with(asked("x"), json!({ "tools": [tool], "tool_choice": "required" })),
            Some("tool_choice"),
            "the model decides",
        ),
        (
            message(json!([{ "type": "image_url", "image_url": { "url": "/etc/passwd" } }])),
            Some("messages"),
            "files of this machine are not read",
        ),
        (
            message(json!([{ "type": "image", "image": "shapes.png" }])),
            Some("messages"),
            "must be an address",
        ),
        (
            message(json!([{ "type": "image_url", "image_url": { "url": "file:///etc/passwd" } }])),
            Some("messages"),
            "must be an address",
        ),
        (
            message(json!([{ "type": "image_url", "image_url": { "url": "https://example.org/x.png" } }])),
            Some("messages"),
            "not allowed",
        ),
        (
            message(json!([{ "type": "image_url", "image_url": { "url": "data:image/png;base64,AA!" } }])),
            Some("messages"),
            "base64",
        ),
        (
            message(
                json!([{ "type": "image_url", "image_url": { "url": "data:image/png;base64,iVBORw0KGgo=" } }]),
            ),
            Some("messages"),
            "cannot decode the file",
        ),
        (message(json!([{ "type": "look" }])), Some("messages"), "messages[0]: a part has the type \"look\""),
        (message(json!(3)), Some("messages"), "messages[0]: the content 3"),
        (message(json!(null)), Some("messages"), "messages[0]: the content null"),
        (message(json!("x ".repeat(100_000))), Some("messages"), "positions"),
        (message(json!("x".repeat(2 << 20))), Some("messages"), "bytes of text"),
        (
            json!({ "messages": vec![json!({ "role": "user", "content": "x" }); 40_000] }),
            Some("messages"),
            "40000 messages",
        ),
    ] {
        refused(server.post(&body), param, part);
    }
    let (status, answer) = server.post(&with(asked("x"), json!({ "model": "gpt" })));
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")));
    assert!(answer["error"]["message"].as_str().unwrap().contains("`tiny`"));
    // Placeholders in a text are text.
    server.ok(&asked("<image> and <|im_end|>"));
    // Fields without effect on the answer.
    server.ok(&with(
        asked("x"),
        json!({ "user": "me", "presence_penalty": 0, "tools": null, "response_format": { "type": "text" } }),
    ));
}

/// Checks the status and the reason of a refusal.
fn refused((status, answer): (u16, Value), param: Option<&str>, part: &str) {
    let error = &answer["error"];
    assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{part}: {answer}");
    assert_eq!(error["param"], json!(param), "{part}: {answer}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(part) && !message.contains("/tmp/"), "{part}: {message}");
    for rust in ["f32", "f64", "usize", "i64", "u64", "struct", "sequence", "variant", "Some("] {
        assert!(!message.contains(rust), "{message}");
    }
}

#[test]
fn variables_of_the_template_may_come_with_a_request() {
    let server = Served::new("qwen3", 8);
    let plain = server.ok(&asked("Hm?"));
    // The template closes the thoughts of a model that is not to think.
    let variables = json!({ "chat_template_kwargs": { "enable_thinking": false } });
    let brief = server.ok(&with(asked("Hm?"), variables));
    let (_, prompts) = open("qwen3");
    let sample = RowReader::new("row").sample(json!({ "prompt": "Hm?" })).unwrap();
    let length = |variables: Value| {
        let prompts = prompts.with_variables(variables.as_object().unwrap().clone());
        prompts.build(&sample).unwrap().ids.len()
    };
    let lengths = [length(json!({})), length(json!({ "enable_thinking": false }))];
    assert!(lengths[0] < lengths[1], "{lengths:?}");
    assert_eq!(
        [&plain, &brief].map(|answer| answer["usage"]["prompt_tokens"].clone()),
        lengths.map(Value::from)
    );
    // The next request has its own.
    assert_eq!(server.ok(&asked("Hm?"))["choices"], plain["choices"]);
}

#[test]
fn control_tokens_are_part_of_the_text_if_a_request_wants_them() {
    let server = Served::qwen();
    let params = SamplingParams { seed: 1, max_completion_length: 40, ..SamplingParams::default() };
    let alone = generated(json!({ "prompt": "Hm?" }), 16, &params);
    let (_, prompts) = open("qwen2_5_vl_tied");
    let body = with(asked("Hm?"), json!({ "temperature": 1, "n": 16, "seed": 1, "max_tokens": 40 }));
    let whole = with(body.clone(), json!({ "skip_special_tokens": false }));
    let (plain, chunks, whole) = (server.ok(&body), server.stream(&whole), server.ok(&whole));
    let (mut longer, mut stopped) = (0, 0);
    for (choice, alone) in alone.iter().enumerate() {
        let ends = alone.ids.last().is_some_and(|&id| prompts.stops().is_stop(id));
        let said = &alone.ids[..alone.ids.len() - usize::from(ends)];
        assert_eq!(text_of(&plain, choice), alone.text);
        assert_eq!(text_of(&whole, choice), prompts.tokenizer().decode(said, false).unwrap());
        let own = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|own| own["index"] == choice);
        let streamed: String = own.filter_map(|own| own["delta"]["content"].as_str()).collect();
        assert_eq!(streamed, text_of(&whole, choice));
        longer += usize::from(text_of(&whole, choice).len() > alone.text.len());
        stopped += usize::from(ends);
    }
    assert!(longer > 0 && stopped > 0, "{longer} {stopped}");
}

#[test]
fn texts_and_tokens_are_continued_as_they_stand() {
    let server = Served::qwen();
    let (model, prompts) = open("qwen2_5_vl_tied");
    let text = "<|im_start|>user\nOnce upon";
    let reader =
        RowReader::new("row").options(ReadOptions { continue_text_prompts: true, ..ReadOptions::default() });
    let prompt = prompts.build(&reader.sample(json!({ "prompt": text })).unwrap()).unwrap();
    let (features, params) = (model.encode_prompt(&prompt).unwrap(), greedy(16));
    let generator = Generator::new(&model, &prompts, &params);
    let requests = [Request::new(&prompt, &features)];
    let alone =
        generator.generate(requests, GenerateOptions::default()).unwrap().remove(0).completions.remove(0);
    // Without a limit, there are 16 tokens.
    let body = json!({ "model": "tiny", "prompt": text, "temperature": 0 });
    let answer = server.text(&body);
    let choice = json!({ "index": 0, "text": alone.text, "logprobs": null, "finish_reason": "length" });
    assert_eq!((&answer["object"], &answer["choices"]), (&json!("text_completion"), &json!([choice])));
    assert_eq!(answer["usage"]["prompt_tokens"], prompt.ids.len());
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"), "{answer}");
    for prompt in [json!([text]), json!(prompt.ids), json!([prompt.ids])] {
        let again = server.text(&with(body.clone(), json!({ "prompt": prompt })));
        assert_eq!(again["choices"], answer["choices"]);
    }
    let echoed = server.text(&with(body.clone(), json!({ "echo": true, "n": 2 })));
    for choice in echoed["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], format!("{text}{}", alone.text));
    }
    let stream = |more: Value| server.stream_of("completions", &with(body.clone(), more));
    for (more, begin) in [(json!({}), ""), (json!({ "echo": true, "logprobs": 0 }), text)] {
        let chunks = stream(more);
        let said: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(said, format!("{begin}{}", alone.text));
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
        assert!(chunks.iter().all(|chunk| chunk["object"] == "text_completion"));
    }
    for (body, param, part) in [
        (json!({}), None, "missing field `prompt`"),
        (json!({ "prompt": "" }), Some("prompt"), "is empty"),
        (json!({ "prompt": [] }), Some("prompt"), "is empty"),
        (json!({ "prompt": 3 }), Some("prompt"), "a text or a list of token ids"),
        (json!({ "prompt": [1, -1] }), Some("prompt"), "a text or a list of token ids"),
        (json!({ "prompt": ["x", "y"] }), Some("prompt"), "send a request for each"),
        (json!({ "prompt": [1_000_000] }), Some("prompt"), "token 1000000 cannot be part of a prompt"),
        (json!({ "prompt": "x", "messages": [] }), None, "unknown field `messages`"),
        (json!({ "prompt": "x", "logprobs": 21 }), Some("logprobs"), "from 0 to 20"),
        (json!({ "prompt": "x", "logprobs": true }), None, "expected a whole number"),
        (json!({ "prompt": "x", "max_tokens": 0 }), None, "max_tokens is 0"),
        (json!({ "prompt": "x", "best_of": 3 }), Some("best_of"), "unsupported"),
        (json!({ "prompt": "x", "suffix": "y" }), Some("suffix"), "unsupported"),
        (json!({ "prompt": "x", "presence_penalty": 1 }), Some("presence_penalty"), "unsupported"),
        (json!({ "prompt": "x".repeat(2 << 20) }), Some("prompt"), "bytes of text"),
        (json!({ "prompt": "x ".repeat(100_000) }), Some("prompt"), "positions"),
        (json!({ "prompt": vec![5; 40_000] }), Some("prompt"), "positions"),
    ] {
        refused(server.post_to("completions", &body), param, part);
    }
    // No text and no token stands for a picture.
    let id = prompts.tokenizer().token_id("<|image_pad|>").unwrap();
    refused(server.post_to("completions", &json!({ "prompt": [id] })), Some("prompt"), "stand for media");
}

/// The tokens that decoding has drawn are scored again as a part of the prompt, by another pass of the model.
#[test]
fn log_probabilities_of_a_prompt_are_those_of_decoding() {
    let server = Served::qwen();
    let ids = open("qwen2_5_vl_tied").1.tokenizer().encode_text("Once upon a time").unwrap();
    let ask = |more: Value| server.text(&with(json!({ "prompt": ids, "temperature": 1, "seed": 2 }), more));
    let said = ask(json!({ "max_tokens": 12, "logprobs": 2, "min_tokens": 12 }));
    let echoed = ask(json!({ "max_tokens": 12, "logprobs": 2, "min_tokens": 12, "echo": true }));
    let (said, echoed) = (&said["choices"][0], &echoed["choices"][0]);
    for name in ["tokens", "token_logprobs", "top_logprobs"] {
        let list = echoed["logprobs"][name].as_array().unwrap();
        assert_eq!(list.len(), ids.len() + 12, "{name}");
        assert_eq!(json!(list[ids.len()..]), said["logprobs"][name]);
    }
    assert_eq!(
        (&echoed["logprobs"]["token_logprobs"][0], &echoed["logprobs"]["text_offset"][0]),
        (&json!(null), &json!(0))
    );
    assert_eq!(
        echoed["logprobs"]["text_offset"][1],
        echoed["logprobs"]["tokens"][0].as_str().unwrap().chars().count()
    );
    // The drawn tokens, from the generator.
    let params = SamplingParams {
        seed: 2,
        min_completion_length: 12,
        logprob_temperature: Some(1.0),
        ..SamplingParams { max_completion_length: 12, ..SamplingParams::default() }
    };
    let (model, prompts) = open("qwen2_5_vl_tied");
    let prompt = prompts.continuing_tokens(ids.clone()).unwrap();
    let generator = Generator::new(&model, &prompts, &params);
    let drawn = generator.generate([Request::new(&prompt, &[])], GenerateOptions::default()).unwrap();
    let drawn = &drawn[0].completions[0];
    let whole = [ids.clone(), drawn.ids.clone()].concat();
    let scored = server.text(&json!({ "prompt": whole, "max_tokens": 0, "echo": true, "logprobs": 1 }));
    let choice = &scored["choices"][0];
    assert_eq!(
        (&scored["usage"]["completion_tokens"], &choice["finish_reason"]),
        (&json!(0), &json!("length"))
    );
    assert_eq!(choice["text"], prompts.tokenizer().decode(&whole, false).unwrap());
    let own = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    let top = choice["logprobs"]["top_logprobs"].as_array().unwrap();
    assert_eq!(own.len(), whole.len());
    for (at, expected) in drawn.logprobs.iter().enumerate() {
        let scored = own[ids.len() + at].as_f64().unwrap();
        assert!((scored - f64::from(*expected)).abs() < 1e-4, "{at}: {scored} {expected}");
    }
    // A suite calls a token greedy if it is as probable as the most probable one.
    let greedy =
        |at: usize| top[at].as_object().unwrap().values().all(|other| other.as_f64() <= own[at].as_f64());
    let most_probable = server
        .text(&json!({ "prompt": ids, "temperature": 0, "max_tokens": 1, "echo": true, "logprobs": 1 }));
    let most_probable = most_probable["choices"][0]["logprobs"].clone();
    // The drawn token is always among them, and here it is the most probable one.
    let last = most_probable["token_logprobs"].as_array().unwrap().len() - 1;
    assert_eq!(most_probable["top_logprobs"][last].as_object().unwrap().len(), 1);
    assert!((1..whole.len()).any(|at| !greedy(at)), "a sampled token is not greedy");
    let streamed = server
        .stream_of("completions", &json!({ "prompt": whole, "max_tokens": 0, "echo": true, "logprobs": 1 }));
    assert_eq!(streamed[0]["choices"][0]["logprobs"], choice["logprobs"]);
}

#[test]
fn only_clients_with_the_key_are_answered() {
    let server = Served::qwen();
    let body = asked("Hm?").to_string();
    let key = "Authorization: Bearer secret\r\n";
    let chat = |fields: &str| {
        let (status, answer) = server.send("POST", "/v1/chat/completions", fields, body.as_bytes());
        let answer: Value = serde_json::from_str(&answer).unwrap();
        (status, answer["error"]["type"].as_str().unwrap_or("none").to_owned())
    };
    assert_eq!(chat(""), (401, "authentication_error".to_owned()));
    assert_eq!(chat("Authorization: Bearer other\r\n").0, 401);
    assert_eq!(chat("Authorization: secret\r\n").0, 401);
    assert_eq!(chat(&format!("{key}Origin: http://evil.example\r\n")).0, 403);
    assert_eq!(chat(&format!("{key}Origin: null\r\n")).0, 403);
    assert_eq!(chat(&format!("{key}Origin: \u{e9}\r\n")).0, 403);
    assert_eq!(chat(&format!("{key}{key}")).0, 401);
    // The head is enough: of these bodies, not a byte comes.
    let unsent = |path: &str, fields: &str| server.send_part("POST", path, fields, b"", 60 << 20).0;
    assert_eq!(unsent("/v1/chat/completions", ""), 401);
    assert_eq!(unsent("/v1/chat/completions", &format!("{key}Origin: http://evil.example\r\n")), 403);
    assert_eq!(unsent("/v1/nothing", key), 404);
    assert_eq!(unsent("/v1/models", key), 405);
    assert_eq!(chat(key).0, 200);
    let get = |path: &str, fields: &str| server.send("GET", path, fields, b"");
    assert_eq!(get("/v1/models", "").0, 401);
    let (status, models) = get("/v1/models", key);
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!((status, &models["data"][0]["id"], &models["object"]), (200, &json!("tiny"), &json!("list")));
    assert_eq!(get("/v1/models/tiny", key).0, 200);
    assert_eq!(get("/v1/models/other", key).0, 404);
    assert_eq!(get("/v1/nothing", key).0, 404);
    assert_eq!(get("/v1/chat/completions", key).0, 405);
    assert_eq!(get("/health", ""), (200, "{\"status\":\"ok\"}".to_owned()));
    assert_eq!(server.send("POST", "/v1/models", key, b"").0, 405);
    // The HTTP server refuses in the same form.
    let (status, answer) = server.send("DELETE", "/v1/models", key, b"");
    assert!(status == 405 && answer.contains("\"invalid_request_error\""), "{answer}");
}

/// Eight pictures load for ever. Everything else is answered beside them, and they end when their clients leave.
#[test]
fn slow_pictures_delay_only_each_other() {
    let fetch = |_: &str| {
        while omnigrpo_guard::wanted().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Err("nobody waits".into())
    };
    let read = ReadOptions { fetch: Some(Fetch(Arc::new(fetch))), ..ReadOptions::default() };
    let server = Served::with("qwen2_5_vl_tied", 64, u64::MAX, read);
    let key = "Authorization: Bearer secret\r\n";
    let message = |content: Value| json!({ "messages": [{ "role": "user", "content": content }] });
    let slow = message(json!([{ "type": "image_url", "image_url": { "url": "http://slow.example/x.png" } }]));
    let clients: Vec<TcpStream> = (0..8)
        .map(|at| {
            let body = with(slow.clone(), json!({ "stream": at % 2 == 0 })).to_string();
            let mut stream = TcpStream::connect(server.address()).unwrap();
            let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{key}");
            write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
            stream
        })
        .collect();
    server.wait_for("requests_waiting", 8.0);
    assert_eq!(server.send("GET", "/health", "", b"").0, 200);
    assert_eq!(server.send("GET", "/v1/models", key, b"").0, 200);
    assert_eq!(server.send("POST", "/v1/chat/completions", "", b"{}").0, 401);
    let (status, answer) = server.post(&with(slow, json!({ "temperature": -1 })));
    assert_eq!(status, 400, "{answer}");
    assert_eq!(server.metric("requests_waiting"), 8.0);
    // The threads that prepare are all busy, and so they end.
    drop(clients);
    server.wait_for("requests_waiting", 0.0);
    server.wait_for("requests_total{outcome=\"disconnected\"}", 8.0);
    server.ok(&asked("Hm?"));
}

#[test]
fn hostile_bodies_are_refused() {
    let server = Served::qwen();
    let key = "Authorization: Bearer secret\r\n";
    let post = |body: &[u8]| server.send("POST", "/v1/chat/completions", key, body);
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for body in [
        &b"\xff\xfe"[..],
        b"",
        b"{",
        deep.as_bytes(),
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\"}]}",
    ] {
        let (status, answer) = post(body);
        assert!(status == 400 && answer.contains("invalid_request_error"), "{answer}");
    }
    let (status, answer) = server.send_part("POST", "/v1/chat/completions", key, b"", (64 << 20) + 1);
    assert!(status == 413 && answer.contains("too large"), "{answer}");
    server.ok(&asked("Hm?"));
}

#[test]
fn the_end_completes_requests_in_progress() {
    let server = Served::qwen();
    let body = with(asked("Hm?"), json!({ "max_tokens": 400, "min_tokens": 400 }));
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| server.ok(&body));
        server.wait_for("completions_running", 1.0);
        server.stop.store(true, Relaxed);
        assert_eq!(answer.join().unwrap()["usage"]["completion_tokens"], 400);
    });
    assert!(TcpStream::connect(server.address()).is_err() || server.send("GET", "/health", "", b"").0 == 503);
}
