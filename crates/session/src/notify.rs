//! `--notify`: one message when a run ends, is stopped or fails, and when a training problem begins.
//!
//! A message is a JSON object. A program reads it from standard input and is started without a shell; a webhook gets it as a POST.
//! Each delivery has its own thread and a time limit. A delivery that fails is a warning and has no effect on the run. Redirects
//! are not followed. Messages of this program name a webhook only by its host, because the rest of its address is often the key.

use std::io::{ErrorKind, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use omnigrpo_observe::{Console, Event, TrainingProblem, fit, now};
use omnigrpo_train::Observer;
use serde_json::{Map, Value, json};

use omnigrpo_settings::explain::{HIDDEN, host, redacted_target};
use omnigrpo_settings::{Problem, Settings};

/// Longest time of a delivery.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });
/// Largest number of messages about training problems in one run.
const MAX_PROBLEMS: usize = 20;
/// Longest text of a message, in characters. Chat services refuse longer ones.
const MAX_CHARS: usize = 1500;

/// Returns the name of the message about an event; `None` without a message.
fn reason(event: &Event) -> Option<&'static str> {
    match event {
        Event::Finished => Some("done"),
        Event::Stopped { .. } => Some("stopped"),
        Event::Collapsed { .. } | Event::Failed { .. } => Some("failed"),
        Event::Problem(TrainingProblem { begins: true, good: false, .. }) => Some("problem"),
        _ => None,
    }
}

/// Destination of messages.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    /// Program and its arguments.
    Program(Vec<String>),
    /// Address.
    Webhook(String),
}

impl Target {
    fn parse(spec: &str) -> Result<Self, Problem> {
        let wrong = |got: String| {
            let expected = "`cmd:PROGRAM ARGUMENTS`, or an address that begins with https:// or http://";
            Problem::usage("wrong destination of messages").at("--notify").got(got).expected(expected)
        };
        if spec.contains(HIDDEN) {
            return Err(wrong(redacted_target(spec)).help(format!(
                "`{HIDDEN}` stands for a part that was not written to the file: give it again"
            )));
        }
        if spec.starts_with("https://") || spec.starts_with("http://") {
            if host(spec).is_empty() {
                return Err(wrong("an address without a host".into()));
            }
            if spec.starts_with("https://") && !cfg!(feature = "https") {
                return Err(wrong(redacted_target(spec))
                    .help("this build supports only http; build with the feature `https`"));
            }
            return Ok(Self::Webhook(spec.to_owned()));
        }
        let Some(command) = spec.strip_prefix("cmd:") else { return Err(wrong(redacted_target(spec))) };
        match shlex::split(command.trim_matches('"')) {
            Some(words) if !words.is_empty() => Ok(Self::Program(words)),
            _ => Err(wrong(redacted_target(spec))),
        }
    }

    /// Returns the destination without secrets.
    fn shown(&self) -> String {
        match self {
            Self::Program(words) => words[0].clone(),
            Self::Webhook(address) => host(address).to_owned(),
        }
    }

    fn deliver(&self, body: &[u8]) -> Result<(), String> {
        match self {
            Self::Program(words) => run(words, body),
            Self::Webhook(address) => post(address, body),
        }
    }
}

/// Runs a program with the message on its standard input. Ends it and its children at the time limit.
fn run(words: &[String], body: &[u8]) -> Result<(), String> {
    let mut command = Command::new(&words[0]);
    // With its own group of processes, Ctrl-C does not reach it.
    command
        .args(&words[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    let mut child = command.spawn().map_err(|error| format!("it could not be started: {error}"))?;
    let group = child.id() as i32;
    // The message is shorter than the buffer of a pipe, so this does not wait for the program.
    match child.stdin.take().map_or(Ok(()), |mut input| input.write_all(body)) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            // SAFETY: the call has no preconditions. The child is not yet waited for, so its number is still its own.
            unsafe { libc::kill(-group, libc::SIGKILL) };
            let _ = child.wait();
            return Err(error.to_string());
        }
        // A program need not read the message.
        _ => {}
    }
    let end = Instant::now() + PATIENCE;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("it ended with {status}")),
            Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
            Ok(None) => {
                // SAFETY: the call has no preconditions. The child is not yet waited for, so its number is still its own.
                unsafe { libc::kill(-group, libc::SIGKILL) };
                let _ = child.wait();
                return Err(format!("it had not ended after {} s and was stopped", PATIENCE.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn post(address: &str, body: &[u8]) -> Result<(), String> {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false);
    let agent: ureq::Agent = config.build().into();
    let sent = agent.post(address).header("Content-Type", "application/json").send(body);
    match sent {
        Ok(answer) if answer.status().is_success() => Ok(()),
        Ok(answer) if answer.status().is_redirection() => {
            Err(format!("status {}: redirects are not followed", answer.status().as_u16()))
        }
        Ok(answer) => Err(format!("status {}", answer.status().as_u16())),
        // The error would repeat the address.
        Err(ureq::Error::BadUri(_)) => Err("the address is malformed".into()),
        Err(ureq::Error::Timeout(_)) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
        Err(error) => Err(error.to_string()),
    }
}

/// Sender of a run's messages. Clones share their threads.
#[derive(Clone)]
pub struct Notifier {
    targets: Arc<[Target]>,
    /// Fields that all messages of the run have.
    run: Arc<Map<String, Value>>,
    console: Console,
    problems: usize,
    sending: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Notifier {
    /// Returns the sender of a run. It sends nothing without `--notify`.
    ///
    /// # Errors
    /// Returns an error if a destination is neither a program nor an address.
    pub fn new(
        settings: &Settings,
        directory: &Path,
        host: &str,
        console: &Console,
    ) -> Result<Self, Problem> {
        let targets = settings.log.notify.iter().map(|spec| Target::parse(spec)).collect::<Result<_, _>>()?;
        let path = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
        let own_name = || path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let run = [
            ("run", settings.run.card.run_name.clone().unwrap_or_else(own_name)),
            ("directory", path.display().to_string()),
            ("host", host.to_owned()),
        ];
        let run = run.map(|(name, value)| (name.to_owned(), value.into())).into_iter().collect();
        let (console, sending) = (console.clone(), Arc::default());
        Ok(Self { targets, run: Arc::new(run), console, problems: 0, sending })
    }

    /// Sends a message about an event, if it has one, without waiting for the delivery.
    fn tell(&self, event: &Event, step: Option<u64>) {
        let Some(reason) = reason(event) else { return };
        let body = format!("{}\n", self.body(reason, event, step)).into_bytes();
        for target in self.targets.iter() {
            let (target, console, body) = (target.clone(), self.console.clone(), body.clone());
            let delivery = std::thread::Builder::new().spawn(move || {
                if let Err(why) = target.deliver(&body) {
                    console.warning(&format!(
                        "the message `{}` did not reach `{}`: {why}",
                        reason,
                        target.shown()
                    ));
                }
            });
            match delivery {
                Ok(delivery) => self.sending.lock().unwrap_or_else(PoisonError::into_inner).push(delivery),
                Err(error) => self.console.warning(&format!("no message was sent: {error}")),
            }
        }
    }

    fn body(&self, reason: &str, event: &Event, step: Option<u64>) -> Value {
        let (text, rule) = match event {
            Event::Problem(problem) => (problem.text.clone(), Some(&problem.rule)),
            event => (event.line(step.unwrap_or(0)), None),
        };
        let message = fit(&text, MAX_CHARS);
        let field = |name: &str| self.run.get(name).and_then(Value::as_str).unwrap_or_default();
        let text = format!("{} on {}: {message}", field("run"), field("host"));
        let mut body = json!({ "event": reason, "message": message, "step": step, "rule": rule });
        if let Some(fields) = body.as_object_mut() {
            fields.extend((*self.run).clone());
            fields.insert("time".into(), now().into());
            // Slack, Mattermost and others show `text`; Discord shows `content`.
            fields.insert("text".into(), text.clone().into());
            fields.insert("content".into(), text.into());
        }
        body
    }

    /// Sends the message about the end of the run, and waits for all deliveries. Each of them has a time limit.
    pub fn end(self, event: &Event, step: Option<u64>) {
        self.tell(event, step);
        let sending = std::mem::take(&mut *self.sending.lock().unwrap_or_else(PoisonError::into_inner));
        for delivery in sending {
            // A panic of the thread has been reported already.
            let _ = delivery.join();
        }
    }
}

impl Observer for Notifier {
    fn event(&mut self, step: u64, event: &Event) {
        // `end` sends the other messages, after the model has been pushed.
        if reason(event) == Some("problem") && self.problems < MAX_PROBLEMS {
            self.problems += 1;
            self.tell(event, Some(step));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _};
    use std::net::TcpListener;
    use std::sync::mpsc::channel;

    use super::*;

    fn notifier(targets: &[&str], out: &Arc<Mutex<Vec<u8>>>) -> Notifier {
        struct Shared(Arc<Mutex<Vec<u8>>>);
        impl std::io::Write for Shared {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let fields = [("run", "mine"), ("directory", "/runs/mine"), ("host", "a")];
        Notifier {
            targets: targets.iter().map(|spec| Target::parse(spec).unwrap()).collect(),
            run: Arc::new(fields.map(|(name, value)| (name.to_owned(), value.into())).into_iter().collect()),
            console: Console::plain(Shared(Arc::clone(out))),
            problems: 0,
            sending: Arc::default(),
        }
    }

    fn shown(out: &Arc<Mutex<Vec<u8>>>) -> String {
        String::from_utf8(out.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_program_reads_the_message_and_no_shell_sees_it() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("got; touch oops");
        let out = Arc::default();
        let spec = format!("cmd:tee '{}'", to.display());
        notifier(&[&spec], &out).end(&Event::Finished, Some(8));
        let body: Value = serde_json::from_slice(&std::fs::read(&to).unwrap()).unwrap();
        assert!(body["time"].as_str().unwrap().ends_with('Z'));
        let expected = json!({
            "event": "done", "message": "all 8 steps are done", "step": 8, "rule": null, "run": "mine",
            "directory": "/runs/mine", "host": "a", "time": body["time"],
            "text": "mine on a: all 8 steps are done", "content": "mine on a: all 8 steps are done",
        });
        assert_eq!(body, expected);
        assert_eq!((shown(&out), std::fs::read_dir(dir.path()).unwrap().count()), (String::new(), 1));
    }

    #[test]
    fn a_webhook_gets_the_message_as_a_post() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let (sender, received) = channel();
        std::thread::spawn(move || {
            for (status, stream) in
                ["200 OK", "302 Found\r\nLocation: /other"].into_iter().zip(server.incoming())
            {
                let mut stream = BufReader::new(stream.unwrap());
                let (mut head, mut length) = (String::new(), 0);
                while !head.ends_with("\r\n\r\n") {
                    let from = head.len();
                    stream.read_line(&mut head).unwrap();
                    let line = head[from..].to_ascii_lowercase();
                    length =
                        line.strip_prefix("content-length:").map_or(length, |n| n.trim().parse().unwrap());
                }
                let mut body = vec![0; length];
                stream.read_exact(&mut body).unwrap();
                let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
                sender.send((head, serde_json::from_slice::<Value>(&body).unwrap())).unwrap();
            }
        });
        let (out, address) = (Arc::default(), format!("http://127.0.0.1:{port}/services/KEY"));
        let mut sender = notifier(&[&address], &out);
        let problem = |begins| {
            let (rule, text) = ("cut_off".into(), "all are cut off".into());
            Event::Problem(TrainingProblem { rule, begins, since: 3, text, ..TrainingProblem::default() })
        };
        sender.event(7, &problem(true));
        let (head, body) = received.recv().unwrap();
        assert!(head.starts_with("POST /services/KEY HTTP/1.1\r\n"), "{head}");
        assert!(head.to_ascii_lowercase().contains("content-type: application/json"), "{head}");
        assert_eq!(
            (&body["event"], &body["rule"], &body["step"]),
            (&json!("problem"), &json!("cut_off"), &json!(7))
        );
        // The end of a problem is no message. A redirect is not followed, and the warning does not contain the key.
        sender.event(8, &problem(false));
        sender.end(&Event::Stopped { why: None }, Some(9));
        assert_eq!(received.recv().unwrap().1["event"], "stopped");
        assert_eq!(
            shown(&out),
            format!(
                "warning: the message `stopped` did not reach `127.0.0.1:{port}`: status 302: redirects are not followed\n"
            )
        );
    }

    #[test]
    fn a_failed_delivery_is_a_warning() {
        let out = Arc::default();
        let failed = Event::Failed { why: "no".into() };
        notifier(&["cmd:false --token abc", "cmd:no-such-program-here"], &out).end(&failed, None);
        let text = shown(&out);
        assert!(
            text.contains("the message `failed` did not reach `false`: it ended with exit status: 1"),
            "{text}"
        );
        assert!(text.contains("did not reach `no-such-program-here`") && !text.contains("abc"), "{text}");
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_its_children() {
        let started = Instant::now();
        let error = run(&["sh".into(), "-c".into(), "sleep 600 & wait".into()], b"{}").unwrap_err();
        assert!(error.contains("had not ended after 2 s"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn problems_are_limited_and_long_texts_are_cut() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("log");
        let out = Arc::default();
        let mut sender = notifier(&[&format!("cmd:tee -a '{}'", to.display())], &out);
        for step in 0..30 {
            let (rule, text) = ("cut_off".into(), "x".repeat(9000));
            sender.event(
                step,
                &Event::Problem(TrainingProblem { rule, begins: true, text, ..TrainingProblem::default() }),
            );
        }
        sender.end(&Event::Finished, None);
        let text = std::fs::read_to_string(&to).unwrap();
        assert_eq!(text.matches("\"event\":\"problem\"").count(), MAX_PROBLEMS);
        assert!(text.len() < (MAX_PROBLEMS + 1) * 3 * (MAX_CHARS + 200));
    }

    #[test]
    fn destinations_are_checked_and_shown_without_secrets() {
        for wrong in ["mail me", "cmd:", "cmd:'open", "https://", "ftp://a/b", "https://hooks.slack.com/***"]
        {
            assert!(Target::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            redacted_target("https://me:pw@hooks.slack.com/services/T/B/KEY?x=1"),
            "https://hooks.slack.com/***"
        );
        assert_eq!(redacted_target("cmd:tell --token abc"), "cmd:tell ***");
        assert_eq!(
            redacted_target("cmd:curl -d @- https://hooks.slack.com/services/T/B/KEY"),
            "cmd:curl ***"
        );
        assert_eq!(redacted_target("cmd:ring"), "cmd:ring");
    }
}
