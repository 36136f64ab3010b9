//! A program or endpoint that answers other requests than those of a reward, such as an environment.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value};

use super::command::{Program, parsed, python_program, split};
use super::http::Client;
use super::{ExternalOptions, Failed, Failure, HIDDEN, is_called, python_function, redacted, same_id, tried};

/// A program (`cmd:…`), a tool or an environment of a Python file (`FILE.py:NAME`), or an HTTP endpoint (`http://…`, `https://…`)
/// that answers one JSON object with another, with the time limits, retries and processes of rewards.
pub struct Caller {
    name: String,
    options: ExternalOptions,
    target: Target,
}

/// Failure of a call after all attempts.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct CallError {
    what: String,
    /// Whether there is an answer, and it is too large to be read.
    pub is_too_large: bool,
}

enum Target {
    Program(Program),
    Endpoint { url: String, client: Client, next_id: AtomicU64 },
}

/// Returns the arguments that start the program of a spec, or the problem; `None` if the spec is no program.
fn program(spec: &str, options: &ExternalOptions) -> Option<Result<Vec<String>, String>> {
    if let Some(command) = spec.strip_prefix("cmd:") {
        let unclosed = || "expected a program and its arguments, with closed quotes".to_owned();
        return Some(split(command).ok_or_else(unclosed));
    }
    let (file, name) = python_function(spec).filter(|_| !is_called(spec))?;
    Some(python_program(file, name, options))
}

impl Caller {
    /// Starts the program of a spec or creates a client of its endpoint. Returns `None` if the spec has another form.
    pub fn from_spec(spec: &str, options: &ExternalOptions) -> Option<Result<Self, String>> {
        let (name, options) = (redacted(spec), options.clone());
        if spec.contains(HIDDEN) {
            return Some(Err(format!(
                "{name}: `{HIDDEN}` stands for a secret that is not written to files; give the address again, with it"
            )));
        }
        if let Some(arguments) = program(spec, &options) {
            let started = arguments.and_then(|arguments| {
                let program = arguments[0].clone();
                Program::start(arguments, &options).map_err(|error| {
                    format!("cannot start `{program}` ({error}); is it installed and on PATH?")
                })
            });
            let caller = started.map_err(|what| format!("{name}: {what}"));
            return Some(caller.map(|program| Self { name, options, target: Target::Program(program) }));
        }
        if !spec.starts_with("http://") && !spec.starts_with("https://") {
            return None;
        }
        let client = Client::new(spec, &name, &options, None).map_err(|error| error.to_string());
        Some(client.map(|client| {
            let target = Target::Endpoint { url: spec.to_owned(), client, next_id: AtomicU64::new(0) };
            Self { name, options, target }
        }))
    }

    /// Returns the spec without secrets.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends a request and returns the answer. An `id` is added to the request, which the answer of a program must repeat. Calls
    /// with the same `place` go to the same process as long as it lives. `what` names the request in errors.
    ///
    /// # Errors
    /// Returns the failure of the last attempt.
    pub fn call(
        &self,
        what: &str,
        place: u64,
        request: &Map<String, Value>,
    ) -> Result<Map<String, Value>, CallError> {
        let with_id = |id: u64| {
            let mut request = request.clone();
            request.insert("id".to_owned(), id.into());
            request
        };
        let read = |answer: Map<String, Value>, id: u64, repeats: bool| {
            match answer.get("id") {
                None if !repeats => {}
                got => same_id(got.and_then(Value::as_u64), id)?,
            }
            Ok(answer)
        };
        let mut pause = self.options.backoff;
        if matches!(self.target, Target::Program(_)) {
            pause = std::time::Duration::ZERO;
        }
        tried(&self.name, what, self.options.retries, pause, || match &self.target {
            Target::Program(program) => {
                program.exchange(place as usize, with_id, |line, id| read(parsed(line)?, id, true))
            }
            Target::Endpoint { url, client, next_id } => {
                let id = next_id.fetch_add(1, Ordering::Relaxed);
                read(client.post(url, &with_id(id))?, id, false)
            }
        })
        .map_err(|Failed { attempts, last }| {
            let is_too_large = matches!(last, Failure::TooLarge(_));
            let why = match last {
                Failure::TimedOut => format!("no answer within {} s", self.options.timeout.as_secs_f64()),
                Failure::Passing(why) | Failure::Final(why) | Failure::TooLarge(why) => why,
            };
            CallError {
                what: format!("{}, {what}: attempt {attempts} failed: {why}", self.name),
                is_too_large,
            }
        })
    }
}
