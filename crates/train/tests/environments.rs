//! Environments outside this process: one contract for programs and endpoints, and every way to get it wrong.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use omnigrpo_data::{RowReader, Sample};
use omnigrpo_media::Rgb8Image;
use omnigrpo_models::{
    Checkpoint, Limits, MediaSettings, ModelError, Opening, Orientation, PromptBuilder, PromptSettings,
};
use omnigrpo_rewards::ExternalOptions;
use omnigrpo_rollout::{Answer, AnswerPart, Environment, Episode, EpisodeKey, ModelTurn, append};
use omnigrpo_testkit::golden;
use omnigrpo_text::{MediumKind, Role, tool_calls};
use omnigrpo_train::{environment, prepare};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A program that answers by the text of the model's turn, and writes every request to a file.
const PROGRAM: &str = r#"
import json, os, sys
log = open(sys.argv[1], "a")
open(sys.argv[1] + ".pids", "a").write(f"{os.getpid()}\n")
for line in sys.stdin:
    request = json.loads(line)
    log.write(line)
    log.flush()
    answer = {"id": request["id"]}
    text = request.get("text", "")
    if request.get("probe"):
        answer["tools"] = [{"type": "function", "function": {"name": "look"}}]
    elif "crop" in text:
        answer["answer"] = [{"type": "image", "image": request["media"][0]}, {"type": "text", "text": "here"}]
    elif "data" in text:
        answer["answer"] = [{"type": "image", "image": request["columns"]["picture"]}]
    elif "gone" in text:
        answer["answer"] = [{"type": "image", "image": "/nonexistent/picture.png"}]
    elif "mistake" in text:
        answer["error"] = "no such place"
    elif "enough" in text:
        answer["stop"] = True
    elif "broken" in text:
        answer["fault"] = "the simulator is gone"
    elif "die" in text and not os.path.exists(sys.argv[1] + ".died"):
        open(sys.argv[1] + ".died", "w")
        os._exit(3)
    elif "hang" in text:
        import time
        time.sleep(60)
    elif "flood" in text:
        sys.stdout.write("x" * (70 << 20))
    elif "many pictures" in text:
        answer["answer"] = [{"type": "image", "image": request["media"][0]}] * int(text.split()[-1])
    elif "many parts" in text:
        answer["answer"] = [{"type": "text", "text": "x"}] * int(text.split()[-1])
    elif "letters" in text:
        answer["answer"] = "x" * int(text.split()[-1])
    elif "mistakes" in text:
        answer["error"] = "x" * int(text.split()[-1])
    elif "bare" in text:
        sys.stdout.write("[" * int(text.split()[-1]))
    elif "wrong" in text:
        answer["answer"] = [{"type": "smell"}]
    else:
        answer.update(answer=request["turns"][-1]["content"] if isinstance(request["turns"][-1]["content"], str) else "?", role="user")
    print(json.dumps(answer), flush=True)
"#;

/// Passes each request to the program, and its answer back.
const SERVER: &str = r#"
import http.server, json, subprocess, sys
program = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        program.stdin.write(json.dumps(request).encode() + b"\n")
        program.stdin.flush()
        answer = program.stdout.readline()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"#;

/// Ends with the test.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Place {
    dir: TempDir,
    environment: Arc<dyn Environment>,
    row: Sample,
}

fn options() -> ExternalOptions {
    ExternalOptions {
        timeout: Duration::from_secs(20),
        pool_size: 2,
        retries: 1,
        ..ExternalOptions::default()
    }
}

impl Place {
    fn new(options: &ExternalOptions) -> Self {
        let dir = TempDir::new().unwrap();
        let program = dir.path().join("program.py");
        std::fs::write(&program, PROGRAM).unwrap();
        let spec = format!("cmd:python3 {} {}", program.display(), dir.path().join("log").display());
        let environment =
            environment(&spec, dir.path().join("media"), &MediaSettings::default(), options).unwrap();
        let png = Rgb8Image::filled(30, 40, [1, 2, 3]).unwrap().to_png().unwrap();
        let row = json!({
            "prompt": "<image>where?",
            "image": golden("media/shapes.png"),
            "answer": "there",
            "picture": format!("data:image/png;base64,{}", base64::Engine::encode(&base64::engine::general_purpose::STANDARD, png)),
        });
        let row = RowReader::new("rows").media_in(golden("media")).sample(row).unwrap();
        Self { dir, environment, row }
    }

    fn ask(&self, texts: &[&str]) -> Result<Answer, String> {
        let key = EpisodeKey { seed: 42, rollout: 3, row: 12, sample: 5 };
        let mut episode = self.environment.begin(&self.row, key).unwrap();
        let mut last = Ok(Answer::Stop);
        for (number, text) in texts.iter().enumerate() {
            let calls = tool_calls(text);
            let turn = ModelTurn {
                text,
                ids: &[1, 2],
                calls: &calls,
                number: number + 1,
                tokens_left: 99,
                media_left: 4,
            };
            last = episode.answer(&turn).map_err(|cause| cause.to_string());
        }
        last
    }

    fn requests(&self) -> Vec<Value> {
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap();
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn call(name: &str) -> String {
    format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{\"at\": [1, 2]}}}}</tool_call>")
}

fn size(path: &Path) -> (u32, u32) {
    let picture = omnigrpo_media::load_image(path, Orientation::Upright, &Limits::default()).unwrap();
    (picture.width_px, picture.height_px)
}

#[test]
fn a_program_answers_with_text_and_pictures() {
    let place = Place::new(&options());
    assert_eq!(place.environment.tools()[0]["function"]["name"], "look");
    assert!(!place.environment.answers_text());
    let Ok(Answer::Say { role: Role::Tool, parts, failed: 0 }) = place.ask(&[&call("crop")]) else {
        panic!()
    };
    let [AnswerPart::Medium { kind: MediumKind::Image, path }, AnswerPart::Text(text)] = &parts[..] else {
        panic!("{parts:?}")
    };
    assert_eq!(text, "here");
    // The picture is a copy in the run's folder.
    assert!(path.starts_with(place.dir.path().join("media")));
    assert_eq!(size(path), size(&golden("media/shapes.png")));
    let Ok(Answer::Say { parts, .. }) = place.ask(&["data"]) else { panic!() };
    let [AnswerPart::Medium { path, .. }] = &parts[..] else { panic!("{parts:?}") };
    assert_eq!(size(path), (30, 40));
    assert_eq!(place.ask(&["enough"]), Ok(Answer::Stop));
    let mistake = AnswerPart::Text(json!({ "error": "no such place" }).to_string());
    // No call was made, so none has failed.
    assert_eq!(
        place.ask(&["mistake"]),
        Ok(Answer::Say { role: Role::Tool, parts: vec![mistake], failed: 0 })
    );

    // The model may have named a picture that does not exist.
    let Ok(Answer::Say { role: Role::Tool, parts, failed: 1 }) = place.ask(&[&call("gone")]) else {
        panic!()
    };
    let [AnswerPart::Text(text)] = &parts[..] else { panic!("{parts:?}") };
    assert!(text.starts_with("{\"error\":") && text.contains("/nonexistent/picture.png"), "{text}");

    let requests = place.requests();
    assert_eq!(requests[0], json!({ "id": 0, "probe": true }));
    let request = &requests[1];
    assert_eq!(request["episode"], "42-3-12-5");
    assert_eq!(
        [&request["turn"], &request["row"], &request["tokens_left"]],
        [&json!(1), &json!(12), &json!(99)]
    );
    assert_eq!(request["calls"], json!([{ "name": "crop", "arguments": { "at": [1, 2] } }]));
    assert_eq!((&request["solution"], &request["columns"]["answer"]), (&json!("there"), &json!("there")));
    assert_eq!(
        request["turns"][0]["content"][0]["image"],
        json!(golden("media/shapes.png").canonicalize().unwrap())
    );
}

/// A class of a Python file in TRL's form, and a function beside it.
const CLASS: &str = r#"
class Shelf:
    def reset(self, answer, **columns):
        self.taken = []
        return f" Find {answer}."

    def take(self, box: int) -> str:
        '''Takes a box.

        Args:
            box: Number of the box.
        '''
        self.taken.append(10 // box)
        return self.taken

    async def look(self, path: str) -> list:
        '''Looks at a picture.

        Args:
            path: Where it is.
        '''
        return [{"type": "image", "image": path}]

class Judged(Shelf):
    def get_reward(self):
        return 1.0

def double(x: int) -> int:
    '''Doubles a number.

    Args:
        x: The number.
    '''
    return 2 * x

def bare(x):
    return x
"#;

/// Starts an environment of the Python file.
fn class(name: &str) -> (TempDir, Result<Arc<dyn Environment>, String>) {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("mine.py");
    std::fs::write(&file, CLASS).unwrap();
    let spec = format!("{}:{name}", file.display());
    let environment = environment(&spec, dir.path().join("media"), &MediaSettings::default(), &options());
    (dir, environment)
}

/// Returns the parts of an answer to calls, and how many calls failed.
fn told(episode: &mut dyn Episode, number: usize, said: &str) -> (Vec<AnswerPart>, usize) {
    let calls = tool_calls(said);
    let turn = ModelTurn { text: said, ids: &[], calls: &calls, number, tokens_left: 99, media_left: 4 };
    let Ok(Answer::Say { role: Role::Tool, parts, failed }) = episode.answer(&turn) else { panic!("{said}") };
    (parts, failed)
}

#[test]
fn a_class_of_python_is_an_environment() {
    let (dir, environment) = class("Shelf");
    let environment = environment.unwrap();
    let tools = environment.tools();
    let names: Vec<&Value> = tools.iter().map(|tool| &tool["function"]["name"]).collect();
    assert_eq!(names, ["look", "take"]);
    assert_eq!(
        tools[1]["function"]["parameters"],
        json!({
            "type": "object",
            "properties": { "box": { "type": "integer", "description": "Number of the box." } },
            "required": ["box"],
        })
    );
    let mut row = Place::new(&options()).row;
    environment.open(&mut row).unwrap();
    assert!(row.question().ends_with("where? Find there."), "{}", row.question());
    assert_eq!(row.media.len(), 1);

    let begin =
        |sample| environment.begin(&row, EpisodeKey { seed: 1, rollout: 0, row: row.row, sample }).unwrap();
    let call = |name: &str, arguments: Value| {
        format!("<tool_call>{}</tool_call>", json!({ "name": name, "arguments": arguments }))
    };
    let text = |text: &str| AnswerPart::Text(text.to_owned());
    let (mut first, mut second) = (begin(0), begin(1));
    // Each completion has a state of its own.
    assert_eq!(told(&mut *first, 1, &call("take", json!({ "box": 2 }))), (vec![text("[5]")], 0));
    assert_eq!(told(&mut *second, 1, &call("take", json!({ "box": 1 }))), (vec![text("[10]")], 0));
    let both =
        call("take", json!({ "box": 5 })) + &call("take", json!({ "box": 0 })) + &call("drop", json!({}));
    let (parts, failed) = told(&mut *first, 2, &both);
    let wanted = [
        "[5, 2]",
        "\n",
        "{'error': 'integer division or modulo by zero'}",
        "\n",
        "{'error': 'Tool drop not found.'}",
    ];
    assert_eq!((parts, failed), (wanted.map(text).to_vec(), 2));
    let shapes = golden("media/shapes.png");
    let (parts, _) = told(&mut *second, 2, &call("look", json!({ "path": shapes })));
    let [AnswerPart::Medium { path, .. }] = &parts[..] else { panic!("{parts:?}") };
    assert!(path.starts_with(dir.path().join("media")) && size(path) == size(&shapes));
}

#[test]
fn a_function_of_python_is_a_tool() {
    let (_dir, environment) = class("double");
    let environment = environment.unwrap();
    let mut row = Place::new(&options()).row;
    let question = row.question();
    environment.open(&mut row).unwrap();
    assert_eq!(row.question(), question);
    let mut episode = environment.begin(&row, EpisodeKey { seed: 1, rollout: 0, row: 0, sample: 0 }).unwrap();
    let said = r#"<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>"#;
    assert_eq!(told(&mut *episode, 1, said), (vec![AnswerPart::Text("8".to_owned())], 0));
}

#[test]
fn unusable_objects_of_python_say_why() {
    let why = |name| class(name).1.err().unwrap();
    assert!(why("bare").contains("the tool `bare` has no docstring"), "{}", why("bare"));
    assert!(why("Judged").contains("`get_reward`, which needs the Python module"), "{}", why("Judged"));
    let missing = why("nothing");
    assert!(missing.contains("no function `nothing`; it has: Shelf, Judged, double, bare"), "{missing}");
    let file = environment("no/such.py:f", std::env::temp_dir(), &MediaSettings::default(), &options())
        .err()
        .unwrap();
    assert!(file.contains("no such file: no/such.py"), "{file}");
}

/// A later request has the earlier turns, so that a program needs no memory.
#[test]
fn requests_carry_the_conversation() {
    let place = Place::new(&options());
    let bad = "<tool_call>{</tool_call>";
    place.ask(&["first", bad, "second"]).unwrap();
    let requests = place.requests();
    // A call that cannot be read is answered without the program.
    assert_eq!(requests.len(), 3);
    let turns = requests[2]["turns"].as_array().unwrap();
    let said: Vec<&Value> = turns[1..].iter().map(|turn| &turn["role"]).collect();
    assert_eq!(said, ["assistant", "user", "assistant", "tool"]);
    assert_eq!(turns[1]["content"], "first");
    assert!(turns[4]["content"].as_str().unwrap().contains("is not JSON"), "{}", turns[4]);
}

/// Requests and answers are the same over HTTP.
#[test]
fn an_endpoint_answers_like_a_program() {
    let (program, endpoint) = (Place::new(&options()), Place::new(&options()));
    let server = endpoint.dir.path().join("server.py");
    std::fs::write(&server, SERVER).unwrap();
    let log = endpoint.dir.path().join("log");
    std::fs::remove_file(&log).unwrap();
    let mut command = std::process::Command::new("python3");
    command.args([server, endpoint.dir.path().join("program.py"), log]).stdout(std::process::Stdio::piped());
    let mut server = Server(command.spawn().unwrap());
    let mut port = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(server.0.stdout.take().unwrap()), &mut port)
        .unwrap();
    let spec = format!("http://127.0.0.1:{}/", port.trim());
    let media = endpoint.dir.path().join("media");
    let environment = environment(&spec, media, &MediaSettings::default(), &options()).unwrap();
    assert_eq!(environment.tools(), program.environment.tools());
    let endpoint = Place { environment, ..endpoint };
    for texts in [&["crop"][..], &["data"], &["mistake"], &["enough"], &[&call("gone")], &["x", "y"]] {
        let said = |place: &Place| {
            let answer = place.ask(texts).unwrap();
            format!("{answer:?}").replace(&*place.dir.path().to_string_lossy(), "")
        };
        assert_eq!(said(&endpoint), said(&program));
    }
    let fault = endpoint.ask(&["broken"]).unwrap_err();
    assert!(fault.contains("the simulator is gone"), "{fault}");
    let without_ids = |place: &Place| -> Vec<Value> {
        let mut requests = place.requests();
        requests.truncate(8);
        requests.iter_mut().for_each(|request| drop(request.as_object_mut().unwrap().remove("id")));
        requests
    };
    assert_eq!(without_ids(&endpoint), without_ids(&program));
}

#[test]
fn a_program_that_dies_is_asked_again() {
    let place = Place::new(&options());
    assert!(matches!(place.ask(&["die"]), Ok(Answer::Say { role: Role::User, .. })));
    let asked: Vec<Value> = place.requests().into_iter().filter(|request| request["text"] == "die").collect();
    assert_eq!(asked.len(), 2);
}

/// An answer is counted before a picture is opened. What is too much ends the completion, and the next request is answered.
#[test]
fn an_answer_may_say_too_much() {
    let place = Place::new(&options());
    let stored = || std::fs::read_dir(place.dir.path().join("media")).map_or(0, Iterator::count);
    for (text, why) in [
        ("many pictures 5", "5 media, expected at most 4"),
        ("many pictures 1025", "1025 texts and media, expected at most 1024"),
        ("many pictures 100000", "an answer of more than 65536 values"),
        ("many parts 1025", "1025 texts and media, expected at most 1024"),
        ("many parts 100000", "an answer of more than 65536 values"),
        ("letters 1048577", "1048577 bytes of text, expected at most 1048576"),
        ("flood", "a line of more than 67108864 bytes"),
        ("bare 4000000", "an answer of more than 65536 values"),
    ] {
        let key = EpisodeKey { seed: 42, rollout: 3, row: 12, sample: 5 };
        let mut episode = place.environment.begin(&place.row, key).unwrap();
        let turn = ModelTurn { text, ids: &[1], calls: &[], number: 1, tokens_left: 99, media_left: 4 };
        let cause = episode.answer(&turn).unwrap_err();
        assert!(matches!(cause.downcast_ref(), Some(ModelError::SaysTooMuch { .. })), "{text}: {cause}");
        assert!(cause.to_string().contains(why), "{text}: {cause}");
        assert_eq!(stored(), 0, "{text}");
        let turn = ModelTurn { text: "crop", ..turn };
        assert!(matches!(episode.answer(&turn), Ok(Answer::Say { .. })), "after {text}");
        std::fs::remove_dir_all(place.dir.path().join("media")).unwrap();
    }
    let Ok(Answer::Say { parts, .. }) = place.ask(&["many pictures 4"]) else { panic!() };
    assert_eq!((parts.len(), stored()), (4, 1), "the same picture, stored once");
    let Ok(Answer::Say { parts, .. }) = place.ask(&["many parts 1024"]) else { panic!() };
    assert_eq!(parts.len(), 1024);
    let Ok(Answer::Say { parts, .. }) = place.ask(&["letters 1048576"]) else { panic!() };
    assert!(matches!(&parts[..], [AnswerPart::Text(text)] if text.len() == 1 << 20));
}

/// Opens each row with what its column `opening` describes.
const OPENS: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request["id"]}
    if request.get("probe"):
        answer.update(answers_text=True, opens=True)
    else:
        kind, count = request["columns"]["opening"].split()
        picture = {"type": "image", "image": request["columns"]["picture"]}
        one = {"text": {"type": "text", "text": "x"}, "picture": picture}.get(kind)
        answer["answer"] = "x" * int(count) if one is None else [one] * int(count)
    print(json.dumps(answer), flush=True)
"#;

/// A row whose opening is too long is unusable with the reason; the next one is used.
#[test]
fn an_opening_has_the_bound_of_a_turn() {
    let dir = TempDir::new().unwrap();
    let program = dir.path().join("opens.py");
    std::fs::write(&program, OPENS).unwrap();
    let spec = format!("cmd:python3 {}", program.display());
    let media = dir.path().join("media");
    let opens = environment(&spec, media, &MediaSettings::default(), &options()).unwrap();
    let cases = [
        ("letters 100", None),
        ("letters 1048577", Some("1048577 bytes of text, expected at most 1048576")),
        ("letters 10000000", Some("10000000 bytes of text, expected at most 1048576")),
        ("text 1025", Some("1025 texts and media, expected at most 1024")),
        ("picture 2000", Some("2000 texts and media, expected at most 1024")),
        ("text 100000", Some("an answer of more than 65536 values")),
        ("picture 1", None),
    ];
    let row = |(opening, _): &(&str, _)| json!({ "prompt": "where?", "opening": opening, "picture": golden("media/shapes.png") });
    let rows = RowReader::new("rows").dataset(cases.iter().map(row)).unwrap();
    let opening = Opening(Arc::new(move |row: &mut Sample| opens.open(row)));
    let checkpoint = Checkpoint::open(&golden("checkpoints/qwen2_vl_untied")).unwrap();
    let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default()).unwrap().with_opening(opening);
    for (row, (opening, why)) in cases.iter().enumerate() {
        match (prepare(&rows, &prompts, None, row as u64, 0).unwrap(), why) {
            (Ok(_), None) => {}
            (Err(unusable), Some(why)) => assert!(unusable.reason.contains(why), "{opening}: {unusable:?}"),
            (made, _) => panic!("{opening}: {:?}", made.err()),
        }
    }

    // An environment in this program has the same bound.
    let grows = |bytes: usize| {
        let text = move || vec![AnswerPart::Text("x".repeat(bytes))];
        let add = move |row: &mut Sample| {
            append(row, text());
            Ok(())
        };
        let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default()).unwrap();
        let prompts = prompts.with_opening(Opening(Arc::new(add)));
        prompts.add_opening(&mut RowReader::new("rows").sample(json!({ "prompt": "where?" })).unwrap())
    };
    grows(1 << 20).unwrap();
    let error = grows((1 << 20) + 1).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(ModelError::SaysTooMuch { .. })), "{error}");
}

#[test]
fn failures_say_what_happened() {
    let place = Place::new(&options());
    assert_eq!(place.ask(&["broken"]).unwrap_err(), "it reports: the simulator is gone");
    let wrong = place.ask(&["wrong"]).unwrap_err();
    assert!(wrong.starts_with("a part of its answer is {\"type\":\"smell\"}; expected"), "{wrong}");
    let quick = Place::new(&ExternalOptions { timeout: Duration::from_secs(2), retries: 0, ..options() });
    let hung = quick.ask(&["hang"]).unwrap_err();
    assert!(hung.contains("turn 1: attempt 1 failed: no answer within 2 s"), "{hung}");
    let patient = Place::new(&ExternalOptions { retries: 0, ..options() });
    let flood = patient.ask(&["flood"]).unwrap_err();
    assert!(flood.contains("a line of more than 67108864 bytes"), "{flood}");
    // Every program has ended and left no zombie when its environment is gone.
    for Place { dir, environment, .. } in [place, quick, patient] {
        drop(environment);
        let pids = std::fs::read_to_string(dir.path().join("log.pids")).unwrap();
        assert!(pids.lines().count() > 0);
        for pid in pids.lines() {
            assert!(!Path::new("/proc").join(pid).exists(), "program {pid} is left");
        }
    }

    let start = |spec: &str| {
        let folder = std::env::temp_dir();
        environment(spec, folder, &MediaSettings::default(), &ExternalOptions { retries: 0, ..options() })
            .err()
            .unwrap()
    };
    assert!(start("cmd:no-program-of-this-name").contains("is it installed and on PATH?"));
    assert!(
        start("cmd:false").contains("the first request: attempt 1 failed: the program ended"),
        "{}",
        start("cmd:false")
    );
    let unknown = start("zom");
    assert!(unknown.contains("expected zoom") && unknown.contains("cmd:"), "{unknown}");
    assert!(start("http://127.0.0.1:1/").contains("http://127.0.0.1:1/"));
    assert!(start("cmd:x --token=***").contains("stands for a secret"));
}
