//! `serve` from the command line: the bytes of `generate`, a judge, signals.
#![cfg(unix)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::support::{Place, data_address, ran};
use omnigrpo_rewards::{RewardInput, RewardOptions, RowKey, Think};
use serde_json::{Value, json};

/// A server, which is killed at the end unless it has ended.
struct Serving {
    child: Child,
    url: String,
    out: BufReader<ChildStdout>,
}

const KEY: &str = "0123456789abcdef";

impl Serving {
    fn start(place: &Place, line: &str) -> Self {
        let mut command = place.command(&format!("serve --port 0 --threads 1 {line}"));
        let mut child = command.env("OMNIGRPO_API_KEY", KEY).stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut url = String::new();
        out.read_line(&mut url).unwrap();
        assert!(url.starts_with("http://127.0.0.1:"), "{url}");
        Self { child, url: url.trim().to_owned(), out }
    }

    fn ask(&self, body: &Value) -> Value {
        let sent = ureq::post(format!("{}/chat/completions", self.url))
            .header("Authorization", format!("Bearer {KEY}"))
            .send(body.to_string());
        serde_json::from_reader(sent.unwrap().into_body().into_reader()).unwrap()
    }

    fn signal(&self, signal: &str) {
        assert!(
            Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success()
        );
    }

    /// Returns the exit code and the rest of standard output.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn greedy_text_equals_that_of_generate_to_the_byte() {
    let place = Place::new();
    place
        .run("train --model M --threads 1 --use_peft --lora_r 2 --train_file rows.jsonl --reward_funcs random --max_steps 1 --num_generations 2 --max_completion_length 4 --learning_rate 0.1 --output_dir lora")
        .ok();
    for options in
        ["", "--load_in_4bit", "--device emulated", "--adapter_name_or_path lora", "--system_prompt Brief."]
    {
        let common = format!("--max_completion_length 16 --temperature 0 {options}");
        let server = Serving::start(&place, &format!("M {common}"));
        for image in [false, true] {
            let question = "Which shape is red?";
            let mut content = vec![json!({ "type": "text", "text": question })];
            let mut more = vec!["--prompt", question];
            if image {
                let url = data_address(&place.bytes("shapes.png"), "image/png");
                content.insert(0, json!({ "type": "image_url", "image_url": { "url": url } }));
                more.extend(["--image", "shapes.png"]);
            }
            let generated = place.run_with(&format!("generate --model M --threads 1 {common}"), &more).ok();
            let answer = server.ask(&json!({ "messages": [{ "role": "user", "content": content }] }));
            let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
            assert_eq!(format!("{text}\n"), generated.stdout, "{options} {image}");
            assert!(!text.is_empty());
        }
    }
}

/// The demo's model counts the shapes of each picture, and the count is the reward.
#[test]
fn a_judge_reward_asks_the_server() {
    let place = Place::new();
    omnigrpo_demo::write_model(&place.path("judge")).unwrap();
    let sizes = omnigrpo_demo::Sizes { sft: 10, train: 10, eval: 120 };
    omnigrpo_demo::generate(&place.path("data"), 0, sizes).unwrap();
    let counted = place.lines("data/eval.jsonl").into_iter().filter(|row| row["type"] == "count");
    let pictures: Vec<PathBuf> =
        counted.map(|row| place.path("data").join(row["image"].as_str().unwrap())).collect();
    let row = |picture: &PathBuf| {
        format!("{}\n", json!({ "image": picture, "question": "How many shapes are there?" }))
    };
    place.write("rows.jsonl", pictures.iter().map(row).collect::<String>());
    place
        .run("generate --model judge --threads 1 --input rows.jsonl --output seen.jsonl --temperature 0")
        .ok();
    let number = |row: &Value| -> Option<f64> {
        let text = row["completions"][0]["text"].as_str()?;
        text.strip_prefix("<think>")?.split('<').next()?.parse().ok()
    };
    let seen: Vec<Option<f64>> = place.lines("seen.jsonl").iter().map(number).collect();
    assert!(seen.contains(&Some(2.0)) && seen.contains(&Some(3.0)), "{seen:?}");

    let server = Serving::start(&place, "judge --served_model_name counter");
    let mut options = RewardOptions::default();
    options.external.judge_model = "counter".to_owned();
    options.external.judge_template = "{images}How many shapes are there?".to_owned();
    options.external.judge_api_key = Some(KEY.to_owned());
    options.external.range = Some((0.0, 9.0));
    let rewards = omnigrpo_rewards::build(&[format!("judge:{}", server.url)], &options).unwrap();
    let columns = serde_json::Map::new();
    let inputs: Vec<RewardInput> = pictures
        .iter()
        .map(|picture| RewardInput {
            prompt: "",
            turns: &[],
            added_turns: 0,
            is_text: false,
            completion: "",
            completion_ids: &[],
            solution: None,
            columns: &columns,
            think: Think::Off,
            media_paths: std::slice::from_ref(picture),
            media: &[],
            key: RowKey { seed: 0, step: 0, row: 0, sample: 0 },
            truncated: false,
        })
        .collect();
    assert_eq!(rewards.score(&inputs).unwrap().values[0], seen);
}

/// Starts an endpoint that answers each question to a judge with a status and a reply. It ends with the test process.
fn judge(answer: impl Fn(String) -> (u16, String) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut length = 0;
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                if line.trim().is_empty() {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let body: Value = serde_json::from_slice(&body).unwrap();
            let (status, reply) = answer(body["messages"][0]["content"].as_str().unwrap().to_owned());
            let reply = json!({ "choices": [{ "message": { "content": reply } }] }).to_string();
            let head = format!(
                "HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
                reply.len()
            );
            reader.into_inner().write_all(format!("{head}{reply}").as_bytes()).unwrap();
        }
    });
    url
}

/// Returns the code that a reply to a rubric's request must repeat.
fn code_of(question: &str) -> &str {
    &question[question.rfind("{\"code\": \"").unwrap() + 10..][..8]
}

const CARE: &str = "- {name: right, question: Right?, weight: 3, choices: [no, 'yes']}\n- {name: clear, question: Clear?, scale: [1, 5]}\n";

/// Every answer is a metric of the step and is in the record of its completion.
#[test]
fn a_run_records_the_answers_to_a_rubric() {
    let place = Place::new();
    place.write("care.yaml", CARE);
    let url = judge(|question| {
        let code = code_of(&question);
        let graded = question.split(&format!("--- {code}\n")).nth(1).unwrap();
        let clear = 1 + graded.len() % 5;
        (200, json!({ "code": code, "right": "no", "clear": clear }).to_string())
    });
    let reward = format!("care=rubric:care.yaml@{url}");
    let line = "train --model M --threads 1 --train_file rows.jsonl --max_steps 1 --num_generations 2 --max_completion_length 6 --output_dir run";
    place.run_with(line, &["--reward_funcs", &reward]).ok();
    let step = &place.lines("run/metrics.jsonl")[0];
    let rollouts = place.lines("run/rollouts/step-000001.jsonl");
    let answers: Vec<f64> =
        rollouts.iter().map(|rollout| rollout["columns"]["care"]["clear"].as_f64().unwrap()).collect();
    let rewards: Vec<f64> =
        rollouts.iter().map(|rollout| rollout["rewards"]["care"].as_f64().unwrap()).collect();
    for (answer, reward) in answers.iter().zip(&rewards) {
        assert!((reward - (answer - 1.0) / 16.0).abs() < 1e-12, "{answers:?} {rewards:?}");
    }
    let mean = answers.iter().sum::<f64>() / answers.len() as f64;
    assert!((step["rewards/care/clear"].as_f64().unwrap() - mean).abs() < 1e-12, "{step}");
    assert_eq!(step["rewards/care/right"], 0.0);
    let tried = place.run_with("rewards try --train_file rows.jsonl --num_rows 1", &[&reward]).ok();
    assert!(tried.stdout.contains("care: from 0"), "{}", tried.stdout);
}

/// A model that has learned one reply answers a rubric through the server. Before, its replies are none, which is an error.
#[test]
fn a_rubric_asks_the_server() {
    let place = Place::new();
    place.write("care.yaml", CARE);
    // The judge reads a longer text than the tiny model's positions allow.
    omnigrpo_testkit::copy_dir(
        &omnigrpo_testkit::golden("checkpoints/qwen2_5_vl_tied"),
        &place.path("judge"),
    );
    let config = std::fs::read_to_string(place.path("judge/config.json")).unwrap();
    let longer = config.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 2048");
    place.write("judge/config.json", longer);
    let mut options = RewardOptions::default();
    options.external.judge_api_key = Some(KEY.to_owned());
    options.external.judge_model = "grader".to_owned();
    options.external.retries = 0;
    let columns = serde_json::Map::new();
    let input = RewardInput {
        prompt: "Which shape is red?",
        turns: &[],
        added_turns: 0,
        is_text: false,
        completion: "The square.",
        completion_ids: &[],
        solution: None,
        columns: &columns,
        think: Think::Off,
        media_paths: &[],
        media: &[],
        key: RowKey { seed: 0, step: 0, row: 0, sample: 0 },
        truncated: false,
    };
    let score = |url: &str| {
        let spec = format!("rubric:{}@{url}", place.path("care.yaml").display());
        let rewards = omnigrpo_rewards::build(&[spec], &options).unwrap();
        rewards.score(&[input]).map_err(|error| error.to_string())
    };
    let (asked, questions) = std::sync::mpsc::channel();
    let refusing = judge(move |question| {
        asked.send(question).unwrap();
        (400, String::new())
    });
    assert!(score(&refusing).unwrap_err().contains("status 400"));
    let question = questions.recv().unwrap();
    let code = code_of(&question);
    let limits = "--served_model_name grader --max_completion_length 48 --temperature 0";
    let error = score(&Serving::start(&place, &format!("judge {limits}")).url).unwrap_err();
    assert!(error.contains(&format!("no JSON object with the code \"{code}\"")), "{error}");

    let reply = json!({ "code": code, "right": "yes", "clear": 2 });
    let row = json!({ "problem": question, "solution": reply.to_string() });
    place.write("taught.jsonl", format!("{row}\n"));
    place
        .run("sft --model judge --threads 1 --allow_text_only --train_file taught.jsonl --gradient_accumulation_steps 1 --max_steps 60 --learning_rate 1e-2 --output_dir taught")
        .ok();
    let scored = score(&Serving::start(&place, &format!("taught {limits}")).url).unwrap();
    // (3 · 1 + 0.25) / 4.
    assert_eq!(scored.total, [Some(0.8125)]);
    assert_eq!(scored.logged.metrics["rewards/rubric/clear"], 2.0);
}

#[test]
fn a_signal_ends_the_server_after_its_requests() {
    let place = Place::new();
    let server = Serving::start(&place, "M --served_model_name tiny");
    let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hm?" }], "max_tokens": 300, "min_tokens": 300, "stream": true });
    let sent = ureq::post(format!("{}/chat/completions", server.url))
        .header("Authorization", format!("Bearer {KEY}"));
    let mut lines = BufReader::new(sent.send(body.to_string()).unwrap().into_body().into_reader()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("data: "));
    server.signal("-TERM");
    let last = lines.map(Result::unwrap).filter(|line| !line.is_empty()).last();
    assert_eq!(last.as_deref(), Some("data: [DONE]"));
    assert_eq!(server.end(), (Some(0), String::new()));
    // A second signal ends the process immediately.
    place.copied_checkpoint("long");
    let config = place.text("long/config.json");
    place.write(
        "long/config.json",
        config.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 32768"),
    );
    let server = Serving::start(&place, "long");
    let endless = json!({ "messages": [{ "role": "user", "content": "Hm?" }], "max_tokens": 20_000, "min_tokens": 20_000, "stream": true });
    let sent = ureq::post(format!("{}/chat/completions", server.url))
        .header("Authorization", format!("Bearer {KEY}"));
    let mut lines = BufReader::new(sent.send(endless.to_string()).unwrap().into_body().into_reader()).lines();
    lines.next().unwrap().unwrap();
    server.signal("-INT");
    lines.next().unwrap().unwrap();
    while ureq::get(server.url.replace("/v1", "/health")).call().is_ok() {}
    server.signal("-INT");
    assert_eq!(server.end().0, Some(130));
}

#[test]
fn a_random_key_is_printed_and_mistakes_are_named() {
    let place = Place::new();
    let mut command = place.command("serve M --port 0 --threads 1");
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines: Vec<String> =
        BufReader::new(child.stdout.take().unwrap()).lines().take(2).map(Result::unwrap).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    let key = lines[1].strip_prefix("key: ").unwrap();
    assert!(key.len() == 32 && key.bytes().all(|byte| byte.is_ascii_hexdigit()), "{lines:?}");
    place.run("serve").fails(2, &["CHECKPOINT"]);
    place.run("serve nowhere --port 0").fails(1, &["the model was not found", "`nowhere`"]);
    let taken = Serving::start(&place, "M");
    let port = taken.url.split([':', '/']).nth(4).unwrap();
    place
        .run(&format!("serve M --port {port}"))
        .fails(1, &[&format!("127.0.0.1:{port} cannot be served"), "another port"]);
    place.run("serve M --num_generations 2").fails(2, &["num_generations"]);
}

/// Sends a request for the models with this `Host` and returns the status.
fn status_for(url: &str, host: &str, key: &str) -> u16 {
    let agent = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
    let request = agent.get(format!("{url}/models")).header("Host", host);
    request.header("Authorization", format!("Bearer {key}")).call().unwrap().status().as_u16()
}

#[test]
fn another_machine_needs_a_key_and_a_name_that_is_allowed() {
    let place = Place::new();
    place.run("serve M --port 0 --host 0.0.0.0").fails(
        2,
        &["other machines could reach `serve`, and it has no key", "`host` 0.0.0.0", "OMNIGRPO_API_KEY"],
    );
    let mut command = place.command("serve M --port 0 --host 0.0.0.0");
    ran(command.env("OMNIGRPO_API_KEY", &KEY[..15]))
        .fails(2, &["its key is too short", "at least 16 characters"]);
    place.run("serve M --port 0 --host node7").fails(2, &["no address of a machine", "`--allowed_hosts`"]);
    place.run("serve M --allowed_hosts *").fails(2, &["no name of a machine", "`*`"]);
    place.run("serve M --allowed_hosts node7:80").fails(2, &["names without a port"]);

    let open = Serving::start(&place, "M --host 0.0.0.0");
    for (host, expected) in [("10.1.2.3", 200), ("localhost:80", 200), ("node7", 421), ("evil.example", 421)]
    {
        assert_eq!(status_for(&open.url, host, KEY), expected, "{host}");
    }
    assert_eq!(status_for(&open.url, "10.1.2.3", "wrong"), 401);
    let named = Serving::start(&place, "M --allowed_hosts node7,gpu.example.org");
    for (host, expected) in [("NODE7:8000", 200), ("gpu.example.org", 200), ("node8", 421), ("10.1.2.3", 421)]
    {
        assert_eq!(status_for(&named.url, host, KEY), expected, "{host}");
    }
}

#[test]
fn prometheus_needs_a_key_beyond_this_machine() {
    let place = Place::new();
    let line = "train --model M --train_file rows.jsonl --reward_funcs random --report_to prometheus --prometheus_port 0 \
                --max_steps 200 --num_generations 2 --max_completion_length 4 --output_dir run --host 0.0.0.0 --threads 1";
    place.run(line).fails(2, &["other machines could reach Prometheus, and it has no key"]);
    place
        .run(&line.replace("--report_to prometheus --prometheus_port 0 ", ""))
        .fails(2, &["`host` has no effect", "there is no server"]);
    let mut command = place.command(line);
    let child = command.env("OMNIGRPO_API_KEY", KEY).stderr(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut child = child.unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let address = lines.map(|line| line.split_once("for Prometheus: ").map(|(_, url)| url.trim().to_owned()));
    let address = address.flatten().next().unwrap();
    let agent = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
    let status = |key: &str| {
        let request = agent.get(&address).header("Authorization", format!("Bearer {key}"));
        request.call().unwrap().status().as_u16()
    };
    let found = (status("wrong"), status(KEY));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(found, (401, 200));
}
