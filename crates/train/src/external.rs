//! Environments outside this process: a program that speaks JSON lines (`cmd:…`) or an HTTP endpoint (`http://…`, `https://…`),
//! with the time limits, retries and processes of rewards.
//!
//! ```text
//! {"id": 0, "probe": true}
//!       -> {"id": 0, "tools": [{"type": "function", …}], "answers_text": false, "opens": false}
//! {"id": 1, "episode": "42-3-12-5", "turn": 1, "seed": 42, "rollout": 3, "row": 12, "sample": 5, "columns": {…}, "solution": "…",
//!  "media": ["/data/1.png"], "turns": [{"role": "user", "content": [{"type": "image", "image": "/data/1.png"}, …]}],
//!  "text": "…", "calls": [{"name": "zoom", "arguments": {…}}], "tokens_left": 180}
//!       -> {"id": 1, "answer": [{"type": "image", "image": "/data/crop.png"}, {"type": "text", "text": "…"}], "role": "tool",
//!           "failed": 0}
//!       or {"id": 1, "stop": true}        the completion ends
//!       or {"id": 1, "error": "…"}        an answer that the model reads; its calls count as failed
//!       or {"id": 1, "fault": "…"}        ends the run
//! ```
//!
//! `turns` is the conversation before the model's turn `text`, with earlier answers, so a program needs no memory. The requests of an
//! episode go to one process as long as it lives, so it may have one. `failed` is the number of its calls that failed. `answer` is a text or a list of parts. A picture is a path or
//! a `data:` address with base64. It is copied into the folder of the run. A clip or a sound is a path.
//!
//! If `opens` is true, each row is a request before its prompt is built: `{"id": 2, "open": true, "row": 12, "columns": {…}, …}`. Its
//! `answer` is appended to the last turn of the row, for all completions.
//!
//! `FILE.py:NAME` is such a program too: Python with a helper that serves a tool or an environment in TRL's form.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use omnigrpo_data::{Cause, Sample};
use omnigrpo_guard::names::shown;
use omnigrpo_guard::{Fault, fault, told};
use omnigrpo_media::MediaError;
use omnigrpo_models::{MAX_SAID_PARTS, MediaSettings, ModelError, check_said};
use omnigrpo_rewards::{CallError, Caller, ExternalOptions, conversation};
use omnigrpo_rollout::{
    Answer, AnswerPart, ENVIRONMENTS, Environment, Episode, EpisodeKey, ModelTurn, answer_calls, append,
    store_picture,
};
use omnigrpo_text::{MediumKind, Role};
use serde_json::{Map, Value, json};

use crate::rows::media_paths;

/// A program that answers one JSON object with another.
pub trait Peer: Send + Sync {
    /// Returns the name in errors and records.
    fn name(&self) -> &str;

    /// Sends a request and returns the answer. Requests with the same `place` go to the same process. `what` names the request in
    /// errors.
    ///
    /// # Errors
    /// Returns an error if there is no answer.
    fn call(&self, what: &str, place: u64, request: &Map<String, Value>)
    -> Result<Map<String, Value>, Cause>;
}

impl Peer for Caller {
    fn name(&self) -> &str {
        self.name()
    }

    fn call(
        &self,
        what: &str,
        place: u64,
        request: &Map<String, Value>,
    ) -> Result<Map<String, Value>, Cause> {
        Ok(self.call(what, place, request)?)
    }
}

/// Creates the environment of a spec: a name, `cmd:"program arguments"`, `FILE.py:NAME`, or `http(s)://…`. Pictures of its answers
/// are stored in `folder`.
///
/// # Errors
/// Returns a description of the problem if the spec is unknown, or the environment does not answer a first request.
pub fn environment(
    spec: &str,
    folder: PathBuf,
    media: &MediaSettings,
    options: &ExternalOptions,
) -> Result<Arc<dyn Environment>, String> {
    let Some(caller) = Caller::from_spec(spec, options) else {
        return omnigrpo_rollout::environment(spec, folder, media).map_err(|_| {
            format!(
                "unknown environment `{spec}`; expected {ENVIRONMENTS}, cmd:\"program arguments\", FILE.py:NAME, or http(s)://…"
            )
        });
    };
    environment_of(Arc::new(caller?), folder, media, options.system.clone())
        .map_err(|cause| cause.to_string())
}

/// Creates the environment of a program. Pictures of its answers are stored in `folder`. `system` is the system text of the run,
/// which replaces that of a row.
///
/// # Errors
/// Returns an error if the program does not answer a first request.
pub fn environment_of(
    peer: Arc<dyn Peer>,
    folder: PathBuf,
    media: &MediaSettings,
    system: Option<String>,
) -> Result<Arc<dyn Environment>, Cause> {
    // An error before the first step is not a temporary problem.
    let probe = Map::from_iter([("probe".to_owned(), true.into())]);
    let about = peer.call("the first request", 0, &probe)?;
    if let Some(fault) = about.get("fault").filter(|fault| !fault.is_null()) {
        return Err(format!("{}: {}", peer.name(), plain(fault)).into());
    }
    let tools = match about.get("tools") {
        None => Vec::new(),
        Some(Value::Array(tools)) => tools.clone(),
        Some(other) => return Err(format!("{}: `tools` is {other}; expected a list", peer.name()).into()),
    };
    let flag = |name: &str| about.get(name).and_then(Value::as_bool);
    let answers_text = flag("answers_text").unwrap_or(tools.is_empty());
    let opens = flag("opens").unwrap_or_default();
    let outside = Outside { peer, folder, media: media.clone(), system };
    Ok(Arc::new(External { outside: Arc::new(outside), tools, answers_text, opens }))
}

/// A program, and how to read its answers.
struct Outside {
    peer: Arc<dyn Peer>,
    folder: PathBuf,
    media: MediaSettings,
    system: Option<String>,
}

struct External {
    outside: Arc<Outside>,
    tools: Vec<Value>,
    answers_text: bool,
    opens: bool,
}

/// Returns the process that gets the requests of a key.
fn place(key: impl Hash) -> u64 {
    let mut hash = DefaultHasher::new();
    key.hash(&mut hash);
    hash.finish()
}

impl Environment for External {
    fn name(&self) -> &str {
        self.outside.peer.name()
    }

    fn tools(&self) -> Vec<Value> {
        self.tools.clone()
    }

    fn answers_text(&self) -> bool {
        self.answers_text
    }

    fn open(&self, row: &mut Sample) -> Result<(), Cause> {
        if !self.opens {
            return Ok(());
        }
        let mut request = self.outside.row(row);
        request.extend([("open".to_owned(), true.into()), ("row".to_owned(), row.row.into())]);
        let answer = self.outside.ask("the start", place(row.row), &request)?;
        if let Some(content) = answer.get("answer").filter(|content| !content.is_null()) {
            append(row, self.outside.parts(content, MAX_SAID_PARTS)?);
        }
        Ok(())
    }

    fn begin(&self, row: &Sample, key: EpisodeKey) -> Result<Box<dyn Episode>, Cause> {
        let EpisodeKey { seed, rollout, row: number, sample } = key;
        let mut request = self.outside.row(row);
        for (name, value) in [
            ("episode", json!(format!("{seed}-{rollout}-{number}-{sample}"))),
            ("seed", json!(seed)),
            ("rollout", json!(rollout)),
            ("row", json!(number)),
            ("sample", json!(sample)),
        ] {
            request.insert(name.to_owned(), value);
        }
        let place = place((seed, rollout, number, sample));
        Ok(Box::new(Asking { outside: Arc::clone(&self.outside), place, request }))
    }
}

struct Asking {
    outside: Arc<Outside>,
    /// Process that gets the requests of the episode.
    place: u64,
    /// Request of the next turn, without the turn.
    request: Map<String, Value>,
}

impl Episode for Asking {
    fn answer(&mut self, turn: &ModelTurn<'_>) -> Result<Answer, Cause> {
        let (answer, content) = if !turn.calls.is_empty() && turn.calls.iter().all(Result::is_err) {
            let answer = answer_calls(turn, |_| Ok(Vec::new()));
            let content = spoken(&answer);
            (answer, content)
        } else {
            self.ask(turn)?
        };
        if let Some(Value::Array(turns)) = self.request.get_mut("turns") {
            turns.push(json!({ "role": "assistant", "content": turn.text }));
            if let Answer::Say { role, .. } = &answer {
                turns.push(json!({ "role": role.as_str(), "content": content }));
            }
        }
        Ok(answer)
    }
}

/// Returns the text of an answer.
fn spoken(answer: &Answer) -> Value {
    let Answer::Say { parts, .. } = answer else { return Value::Null };
    let text = parts.iter().map(|part| match part {
        AnswerPart::Text(text) => text.as_str(),
        AnswerPart::Medium { .. } => "",
    });
    Value::String(text.collect())
}

/// Returns an answer that lets the model read why its calls failed, and its content as a message.
fn failed(what: &str, turn: &ModelTurn<'_>) -> (Answer, Value) {
    let answer = Answer::failed(what, turn.calls.len());
    let content = spoken(&answer);
    (answer, content)
}

impl Asking {
    /// Returns the answer, and its content as a message.
    fn ask(&self, turn: &ModelTurn<'_>) -> Result<(Answer, Value), Cause> {
        let call = |call: &Result<omnigrpo_text::ToolCall, String>| match call {
            Ok(call) => json!({ "name": call.name, "arguments": call.arguments }),
            Err(error) => json!({ "error": error }),
        };
        let mut request = self.request.clone();
        for (name, value) in [
            ("turn", json!(turn.number)),
            ("text", json!(turn.text)),
            ("calls", turn.calls.iter().map(call).collect()),
            ("tokens_left", json!(turn.tokens_left)),
        ] {
            request.insert(name.to_owned(), value);
        }
        let mut answer = self.outside.ask(&format!("turn {}", turn.number), self.place, &request)?;
        if answer.get("stop").and_then(Value::as_bool) == Some(true) {
            return Ok((Answer::Stop, Value::Null));
        }
        if let Some(error) = answer.get("error").filter(|error| !error.is_null()) {
            return Ok(failed(&plain(error), turn));
        }
        let role = match answer.get("role").and_then(Value::as_str) {
            None | Some("tool") => Role::Tool,
            Some("user") => Role::User,
            Some(other) => {
                return Err(format!("its answer has the role `{other}`; expected tool or user").into());
            }
        };
        let unread = turn.calls.iter().filter(|call| call.is_err()).count();
        let failed = match answer.get("failed") {
            None | Some(Value::Null) => unread,
            Some(count) => {
                count.as_u64().filter(|count| *count <= turn.calls.len() as u64).ok_or_else(|| {
                    format!(
                        "`failed` is {count}; expected the number of failed calls, at most {}",
                        turn.calls.len()
                    )
                })? as usize
            }
        };
        let content = answer
            .remove("answer")
            .ok_or("its answer lacks `answer`, `stop`, `error` and `fault`; expected one of them")?;
        match self.outside.parts(&content, turn.media_left) {
            // The model may have asked for a picture that does not exist: it reads why.
            Err(cause) if cause.is::<MediaError>() && fault(&*cause, Fault::Row) == Fault::Row => {
                Ok(self::failed(&told(&*cause), turn))
            }
            parts => Ok((Answer::Say { role, parts: parts?, failed }, content)),
        }
    }
}

impl Outside {
    /// Returns what a request tells about a row.
    fn row(&self, row: &Sample) -> Map<String, Value> {
        let turns = conversation(&row.turns, &row.media, self.system.as_deref());
        let about = [
            ("columns", json!(row.columns)),
            ("solution", json!(row.solution)),
            ("media", json!(media_paths(row))),
            ("turns", json!(turns)),
        ];
        about.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn ask(&self, what: &str, place: u64, request: &Map<String, Value>) -> Result<Map<String, Value>, Cause> {
        let answer = self.peer.call(what, place, request).map_err(|cause| match cause.downcast_ref() {
            Some(CallError { is_too_large: true, .. }) => {
                ModelError::SaysTooMuch { what: cause.to_string() }.into()
            }
            _ => cause,
        })?;
        match answer.get("fault").filter(|fault| !fault.is_null()) {
            Some(fault) => Err(format!("it reports: {}", plain(fault)).into()),
            None => Ok(answer),
        }
    }

    /// Reads a text or a list of parts. It is measured before a picture is opened.
    fn parts(&self, content: &Value, max_media: usize) -> Result<Vec<AnswerPart>, Cause> {
        let text = |part: &Value| part.get("type").is_some_and(|kind| kind == "text");
        match content {
            Value::String(text) => {
                check_said(1, text.len())?;
                Ok(vec![AnswerPart::Text(text.clone())])
            }
            Value::Array(parts) => {
                let texts = parts.iter().filter(|part| text(part));
                let bytes = texts.clone().filter_map(|part| part.get("text")?.as_str()).map(str::len).sum();
                check_said(parts.len(), bytes)?;
                let media = parts.len() - texts.count();
                if media > max_media {
                    let what = format!("{media} media, expected at most {max_media}");
                    return Err(ModelError::SaysTooMuch { what }.into());
                }
                parts.iter().map(|part| self.part(part)).collect()
            }
            other => {
                Err(format!("`answer` is {}; expected a text or a list of parts", shown(&other.to_string()))
                    .into())
            }
        }
    }

    fn part(&self, part: &Value) -> Result<AnswerPart, Cause> {
        let wrong = || -> Cause {
            let shown: String = part.to_string().chars().take(200).collect();
            format!(
                "a part of its answer is {shown}; expected {{\"type\": \"text\", \"text\": …}} or {{\"type\": \"image\", \"image\": …}}"
            )
            .into()
        };
        let kind = part.get("type").and_then(Value::as_str).ok_or_else(wrong)?;
        let value = part.get(kind).and_then(Value::as_str).ok_or_else(wrong)?;
        let kind = match kind {
            "text" => return Ok(AnswerPart::Text(value.to_owned())),
            "image" => {
                let (orientation, limits) = (self.media.orientation, &self.media.limits);
                let picture = match value.strip_prefix("data:") {
                    Some(data) => {
                        let (_, data) = data.split_once(";base64,").ok_or_else(wrong)?;
                        let bytes = base64::engine::general_purpose::STANDARD.decode(data)?;
                        omnigrpo_media::load_image_bytes(
                            "a picture of an answer",
                            &bytes,
                            orientation,
                            limits,
                        )?
                    }
                    None => omnigrpo_media::load_image(Path::new(value), orientation, limits)?,
                };
                let path = store_picture(&self.folder, &picture)?;
                return Ok(AnswerPart::Medium { kind: MediumKind::Image, path });
            }
            kind => MediumKind::named(kind).ok_or_else(wrong)?,
        };
        Ok(AnswerPart::Medium { kind, path: PathBuf::from(value) })
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
