//! Rewards outside this process: programs that speak JSON lines ([`command`]), HTTP endpoints ([`http`]), judges ([`judge`]) and their
//! rubrics ([`rubric`]).
//!
//! A request contains a batch of rows. Its answer contains a number or null for each row:
//!
//! ```text
//! {"id": 7, "rows": [{"prompt": "…", "turns": […], "completion": "…", "completion_ids": [1, 2], "solution": "…",
//!                     "columns": {…}, "think": true, "media": ["/data/1.png"], "step": 3, "row": 12, "sample": 0,
//!                     "truncated": false, "added_turns": 0}]}
//! {"id": 7, "rewards": [0.5]}        or        {"id": 7, "error": "what went wrong"}
//! ```
//!
//! `prompt` is the text of the last question. `turns` is the complete conversation in the form that TRL passes to a reward
//! (`prepare_multimodal_messages`). In a row without media, each turn is `{"role": "user", "content": "…"}`. In a row with media,
//! each `content` is a list of parts, `{"type": "text", "text": "…"}` or `{"type": "image", "image": "/data/1.png"}`, with paths
//! instead of decoded pictures. The system text of a run, if any, is the first turn. The last `added_turns` of them belong to the
//! completion: earlier turns of the model, each with the answer of an environment. A row has `"is_text": true` if its prompt is a
//! text that the completion continues without a chat template.
//!
//! Besides `rewards`, an answer may have `"metrics": {"name": 1.5}` and `"columns": {"name": ["a value per row"]}`. Metrics
//! become metrics of the step, as means over its requests weighted by rows. Columns go into the records of completions. With
//! `"range": [0, 1]`, a program states the smallest and the largest value of its reward; null is no bound.
//!
//! A request contains all completions of a row, so that a scorer can compare them.
//!
//! The first request of a run is a test: the invented completions of one row, with `"probe": true` after `rows`. It is answered
//! like any other request, and its numbers are ignored.
//!
//! After a death, a time-out or a refused connection, the request is sent again. These failures are final, since they would
//! recur: an error that the scorer reports, an invalid answer, or a program that exits by itself before its first answer.

mod caller;
mod command;
mod http;
mod judge;
mod rubric;
mod unreadable;

pub use caller::{CallError, Caller};

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock};
use std::time::Duration;

use omnigrpo_data::{MediumRef, MediumSource};
use omnigrpo_text::{Part, Turn, with_system};
use regex::Regex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::contract::{Logged, row_name};
use crate::{Reward, RewardError, RewardInput, RewardOptions, Think};

/// Settings for calling programs and endpoints.
#[derive(Debug, Clone)]
pub struct ExternalOptions {
    /// Time limit of one attempt, including the start of a program.
    pub timeout: Duration,
    /// Number of processes per program, and of concurrent requests per endpoint, ≥ 1.
    pub pool_size: usize,
    /// Number of further attempts before a request fails.
    pub retries: u32,
    /// Wait before the second attempt at an endpoint. Doubles with each attempt.
    pub backoff: Duration,
    /// Number of completions per request, ≥ 1. The completions of one row stay together, also if they are more.
    pub batch_size: usize,
    /// Declared range of the values. The default is any finite value, and 0 to 1 for a judge.
    pub range: Option<(f64, f64)>,
    /// Model name that is sent to a judge.
    pub judge_model: String,
    /// Question to a judge. `{prompt}`, `{completion}`, `{answer}` and `{solution}` are replaced with texts, and `{images}` with
    /// the row's pictures.
    pub judge_template: String,
    /// Bearer token for a judge.
    pub judge_api_key: Option<String>,
    /// Interpreter for functions of Python files.
    pub python: String,
    /// System text of the run, which replaces the system text of a row.
    pub system: Option<String>,
}

impl Default for ExternalOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            pool_size: 1,
            retries: 3,
            backoff: Duration::from_millis(500),
            batch_size: 64,
            range: None,
            judge_model: "default".to_owned(),
            judge_template: judge::TEMPLATE.to_owned(),
            judge_api_key: None,
            python: "python3".to_owned(),
            system: None,
        }
    }
}

/// Creates the scorer of a spec such as `cmd:"python reward.py"`, `reward.py:function`, `https://…`, `judge:http://…`,
/// `rubric:care.yaml@http://…`, or one of these after `name=`. Returns `None` if the spec has another form.
pub(crate) fn from_spec(spec: &str, options: &RewardOptions) -> Option<Result<Box<dyn Reward>, RewardError>> {
    let is_external = |text: &str| is_called(text) || python_function(text).is_some();
    let (name, target) = match spec.split_once('=') {
        Some((name, target)) if is_external(target) && !is_called(spec) => (Some(name.trim()), target),
        _ => (None, spec),
    };
    if !is_external(target) {
        return None;
    }
    if target.contains(HIDDEN) {
        return Some(Err(RewardError::Setting {
            reward: target.to_owned(),
            what: format!(
                "`{HIDDEN}` stands for a secret that is not written to files; give the reward again, with it"
            ),
        }));
    }
    let named = |default: &str| name.unwrap_or(default).to_owned();
    Some(if let Some(command) = target.strip_prefix("cmd:") {
        command::reward(command, name, options)
    } else if let (false, Some((file, function))) = (is_called(target), python_function(target)) {
        command::python_reward(file, function, name, options)
    } else if let Some(url) = target.strip_prefix("judge:") {
        judge::reward(url, named("judge"), None, options)
    } else if let Some(target) = target.strip_prefix("rubric:") {
        rubric_reward(target, named("rubric"), options)
    } else {
        http::reward(target, named("http"), options)
    })
}

/// Creates the reward of `rubric:…`.
fn rubric_reward(
    target: &str,
    name: String,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    let problem = |what: String| RewardError::Setting { reward: name.clone(), what };
    let Some((file, url)) = judge::rubric_parts(target) else {
        return Err(problem(format!(
            "got `rubric:{}`, expected the judge's address after the file: `rubric:FILE.yaml@http://host/v1`, or without a file \
             `rubric:http://host/v1`",
            redacted(target)
        )));
    };
    let rubric = rubric::Rubric::read(file).map_err(problem)?;
    judge::reward(url, name.clone(), Some(rubric), options)
}

/// Returns true for a command or an address, which may contain the name of a Python file.
fn is_called(spec: &str) -> bool {
    let address = spec.strip_prefix("judge:").unwrap_or(spec);
    let is_address = ["http://", "https://"].iter().any(|scheme| address.starts_with(scheme));
    is_address || spec.starts_with("cmd:") || spec.starts_with("rubric:")
}

/// Splits `FILE.py:FUNCTION` into file and function.
fn python_function(text: &str) -> Option<(&str, &str)> {
    let (file, function) = text.rsplit_once(':')?;
    let is_name = function.starts_with(|c: char| c.is_alphabetic() || c == '_')
        && function.chars().all(|c| c.is_alphanumeric() || c == '_');
    (is_name && file.ends_with(".py") && file.len() > 3).then_some((file, function))
}

/// Returns the files of a spec that determine its scores. For `FILE.py:FUNCTION` and `rubric:FILE@…` this is the file, for `cmd:…` the
/// first argument that is a file. Further arguments may be logs that the program writes. Files that the program imports are not included.
pub fn spec_files(spec: &str) -> Vec<PathBuf> {
    let target = spec.split_once('=').map_or(spec, |(name, target)| match name.contains(':') {
        true => spec,
        false => target,
    });
    if let Some(target) = target.strip_prefix("rubric:") {
        let file = judge::rubric_parts(target).and_then(|(file, _)| file);
        return file.filter(|path| path.is_file()).map(Path::to_owned).into_iter().collect();
    }
    let words = match target.strip_prefix("cmd:") {
        Some(command) => shlex::split(command.trim().trim_matches('"')).unwrap_or_default(),
        None => python_function(target).map(|(file, _)| file.to_owned()).into_iter().collect(),
    };
    let file = |word: &String| PathBuf::from(python_function(word).map_or(word.as_str(), |(file, _)| file));
    words.iter().map(file).filter(|path| path.is_file()).take(1).collect()
}

/// Replacement of a secret.
const HIDDEN: &str = "***";

/// Returns a spec for files and messages, without secrets: the password of an address, and values of arguments, variables and
/// query parameters with names such as key, token, secret or password.
pub fn redacted(spec: &str) -> String {
    // The expressions are constant. If one did not compile, the first test would fail.
    static IN_ADDRESS: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r#"(https?://)[^/?#\s@"']+@"#).ok());
    static NAMED: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let name = "(?:api[-_]?key|access[-_]?key|token|secret|password|passwd|pwd|auth|authorization|bearer|credentials?)";
        let value = r#"(?:(?:basic|bearer)\s+[^\s&"'-][^\s&"']*|"[^"]*"|'[^']*'|[^\s&"']+)"#;
        Regex::new(&format!(r"(?i)((?:^|[^\pL\pN]){name}(?:=|:\s*|\s+)){value}")).ok()
    });
    let mut text = spec.to_owned();
    for (expression, with) in [(&IN_ADDRESS, format!("${{1}}{HIDDEN}@")), (&NAMED, format!("${{1}}{HIDDEN}"))]
    {
        if let Some(expression) = expression.as_ref() {
            text = expression.replace_all(&text, with).into_owned();
        }
    }
    text
}

/// One row of a request.
#[derive(Debug, Serialize)]
struct RequestRow<'a> {
    prompt: &'a str,
    turns: Vec<Value>,
    completion: &'a str,
    completion_ids: &'a [u32],
    solution: Option<&'a str>,
    columns: &'a Map<String, Value>,
    think: bool,
    media: &'a [PathBuf],
    step: u64,
    row: u64,
    sample: u64,
    truncated: bool,
    added_turns: usize,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_text: bool,
}

#[derive(Debug, Serialize)]
struct Request<'a> {
    id: u64,
    rows: Vec<RequestRow<'a>>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    probe: bool,
}

impl<'a> Request<'a> {
    fn new(id: u64, rows: &[RewardInput<'a>], options: &ExternalOptions, probe: bool) -> Self {
        Self { id, rows: request_rows(rows, options.system.as_deref()), probe }
    }
}

fn request_rows<'a>(rows: &[RewardInput<'a>], system: Option<&str>) -> Vec<RequestRow<'a>> {
    let row = |input: &RewardInput<'a>| RequestRow {
        prompt: input.prompt,
        turns: conversation(input.turns, input.media, system),
        completion: input.completion,
        completion_ids: input.completion_ids,
        solution: input.solution,
        columns: input.columns,
        think: input.think == Think::On,
        media: input.media_paths,
        step: input.key.step,
        row: input.key.row,
        sample: input.key.sample,
        truncated: input.truncated,
        added_turns: input.added_turns,
        is_text: input.is_text,
    };
    rows.iter().map(row).collect()
}

/// Returns completions as the `rows` of a request, in JSON. `system` is the system text of the run, which replaces that of a row.
///
/// # Errors
/// Returns an error if a path is not UTF-8.
pub fn rows_as_json(rows: &[RewardInput<'_>], system: Option<&str>) -> Result<String, serde_json::Error> {
    serde_json::to_string(&request_rows(rows, system))
}

/// Returns a conversation as messages in TRL's form, with paths of the media. `system` replaces the system text of the row.
pub fn conversation(turns: &[Turn], media: &[MediumRef], system: Option<&str>) -> Vec<Value> {
    let path = |medium: &MediumRef| match &medium.source {
        MediumSource::Path(path) => json!(path),
        MediumSource::Frames(paths) => json!(paths),
    };
    let part = |part: &Part| match part {
        Part::Text(text) => json!({ "type": "text", "text": text }),
        Part::Call(call) => json!({ "type": "text", "text": call.to_string() }),
        Part::Medium { kind, index } => {
            let medium = media.iter().filter(|medium| medium.kind == *kind).nth(*index);
            json!({ "type": kind.as_str(), (kind.as_str()): medium.map(path) })
        }
    };
    let message = |turn: &Turn| {
        let content = match media {
            [] => Value::String(turn.written()),
            _ => turn.parts.iter().map(part).collect(),
        };
        json!({ "role": turn.role.as_str(), "content": content })
    };
    with_system(turns, system).iter().map(message).collect()
}

#[derive(Debug, Deserialize)]
struct Answer {
    id: Option<u64>,
    rewards: Option<Vec<Option<f64>>>,
    error: Option<Value>,
    #[serde(default)]
    metrics: BTreeMap<String, f64>,
    #[serde(default)]
    columns: BTreeMap<String, Vec<Value>>,
    range: Option<[Option<f64>; 2]>,
}

/// Range that a program states with its answers, if it does.
#[derive(Debug, Default)]
pub struct StatedRange(OnceLock<(f64, f64)>);

impl StatedRange {
    /// Keeps the first range that is stated. A bound without a number is infinite.
    pub fn take(&self, stated: Option<[Option<f64>; 2]>) {
        let Some([low, high]) = stated else { return };
        let (low, high) = (low.unwrap_or(f64::NEG_INFINITY), high.unwrap_or(f64::INFINITY));
        if low < high {
            self.0.get_or_init(|| (low, high));
        }
    }

    /// Returns the stated range; all numbers before it is known.
    pub fn get(&self) -> (f64, f64) {
        self.0.get().copied().unwrap_or((f64::NEG_INFINITY, f64::INFINITY))
    }
}

/// Records from the answers of a batch, by the rows of their requests.
#[derive(Default)]
struct Log(Mutex<Vec<(Range<usize>, Logged)>>);

impl Log {
    fn entries(&self) -> std::sync::MutexGuard<'_, Vec<(Range<usize>, Logged)>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn add(&self, rows: Range<usize>, logged: Logged) {
        if logged != Logged::default() {
            self.entries().push((rows, logged));
        }
    }

    /// Returns one value per row of the batch, null if the answer had none, and the means of metrics weighted by rows.
    fn take(&self) -> Logged {
        let mut entries = std::mem::take(&mut *self.entries());
        // Answers arrive in any order, and sums must not depend on it.
        entries.sort_by_key(|(rows, _)| rows.start);
        let num_rows = entries.iter().map(|(rows, _)| rows.end).max().unwrap_or(0);
        let mut out = Logged::default();
        let mut weights: BTreeMap<String, f64> = BTreeMap::new();
        for (rows, logged) in entries {
            let weight = rows.len() as f64;
            for (name, value) in logged.metrics {
                *weights.entry(name.clone()).or_default() += weight;
                *out.metrics.entry(name).or_default() += weight * value;
            }
            for (name, values) in logged.columns {
                let column = out.columns.entry(name).or_insert_with(|| vec![Value::Null; num_rows]);
                column[rows.clone()].clone_from_slice(&values);
            }
        }
        for (name, sum) in &mut out.metrics {
            *sum /= weights.get(name).copied().unwrap_or(1.0);
        }
        out
    }
}

/// Failure of one attempt.
#[derive(Debug)]
enum Failure {
    /// Temporary failure. The request is sent again.
    Passing(String),
    /// No answer in time. The request is sent again.
    TimedOut,
    /// Failure that would recur.
    Final(String),
    /// Answer that is too large to be read.
    TooLarge(String),
}

/// Largest number of values in an answer. In memory, a value takes many times the length of its text.
const MAX_VALUES: usize = 1 << 16;

/// Reads an answer. `wrong` describes a text that is not an answer, given the problem.
fn answer_of<T: DeserializeOwned>(text: &str, wrong: impl FnOnce(String) -> String) -> Result<T, Failure> {
    if has_more_values(text, MAX_VALUES) {
        return Err(Failure::TooLarge(format!("an answer of more than {MAX_VALUES} values")));
    }
    serde_json::from_str(text).map_err(|error| Failure::Final(wrong(unreadable::reason(text, &error))))
}

/// Returns true if a JSON text may contain more values than `most`.
fn has_more_values(json: &str, most: usize) -> bool {
    let (mut values, mut in_text, mut escaped) = (1, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b',' | b'[' | b'{' if !in_text => values += 1,
            _ => continue,
        }
        if values > most {
            return true;
        }
    }
    false
}

/// Failure of all attempts.
struct Failed {
    attempts: u32,
    last: Failure,
}

/// Tries until an attempt succeeds, a failure is final, or no attempts remain.
fn tried<T>(
    name: &str,
    what: &str,
    retries: u32,
    mut pause: Duration,
    mut attempt: impl FnMut() -> Result<T, Failure>,
) -> Result<T, Failed> {
    let mut number = 1;
    loop {
        let failure = match attempt() {
            Ok(value) => return Ok(value),
            Err(failure) => failure,
        };
        match &failure {
            Failure::Passing(why) if number <= retries => {
                tracing::warn!(name, what, attempt = number, "{why}; trying again");
            }
            Failure::TimedOut if number <= retries => {
                tracing::warn!(name, what, attempt = number, "no answer in time; trying again");
            }
            _ => return Err(Failed { attempts: number, last: failure }),
        }
        if !pause.is_zero() {
            std::thread::sleep(pause);
            pause *= 2;
        }
        number += 1;
    }
}

/// Calls [`tried`] for a reward.
fn attempts<T>(
    reward: &str,
    rows: &str,
    options: &ExternalOptions,
    backoff: Duration,
    attempt: impl FnMut() -> Result<T, Failure>,
) -> Result<T, RewardError> {
    tried(reward, rows, options.retries, backoff, attempt).map_err(|Failed { attempts, last }| {
        let (reward, rows) = (reward.to_owned(), rows.to_owned());
        match last {
            Failure::TimedOut => RewardError::TimedOut { reward, rows, limit: options.timeout },
            Failure::Passing(what) | Failure::Final(what) | Failure::TooLarge(what) => {
                RewardError::External { reward, rows, attempts, what }
            }
        }
    })
}

/// Returns the rows of a request, for errors.
fn rows_name(range: &Range<usize>, batch: &[RewardInput<'_>]) -> String {
    let name = |index: usize| row_name(index, &batch[index]);
    if range.len() == 1 {
        name(range.start)
    } else {
        format!("{} to {}", name(range.start), name(range.end - 1))
    }
}

/// Splits a batch into requests of about `most` rows. The completions of one dataset row stay together, unless `most` is 1.
fn requests(batch: &[RewardInput<'_>], most: usize) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut from = 0;
    for group in batch.chunk_by(|a, b| most > 1 && a.key.row == b.key.row) {
        let to = from + group.len();
        match ranges.last_mut() {
            Some(last) if to - last.start <= most => last.end = to,
            _ => ranges.push(from..to),
        }
        from = to;
    }
    ranges
}

/// Splits a batch into requests and sends them from `pool_size` threads. `send` receives the number of its thread and the rows.
/// If several requests fail, returns the first error in row order.
fn spread<'a>(
    batch: &[RewardInput<'a>],
    rows_per_request: usize,
    pool_size: usize,
    send: impl Fn(usize, Range<usize>, &[RewardInput<'a>]) -> Result<Vec<Option<f64>>, RewardError> + Sync,
) -> Result<Vec<Option<f64>>, RewardError> {
    type Scored = Result<Vec<Option<f64>>, RewardError>;
    let ranges = requests(batch, rows_per_request);
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Scored)>> = Mutex::new(Vec::with_capacity(ranges.len()));
    let work = |worker: usize| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(range) = ranges.get(index).cloned() else { return };
            let scored = send(worker, range.clone(), &batch[range]);
            if scored.is_err() {
                // The remaining requests are not needed.
                next.store(ranges.len(), Ordering::Relaxed);
            }
            done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((index, scored));
        }
    };
    let threads = pool_size.clamp(1, ranges.len().max(1));
    std::thread::scope(|scope| {
        for worker in 1..threads {
            // If a thread cannot be started, the other threads do its work.
            let thread = std::thread::Builder::new().name(format!("reward {worker}"));
            if thread.spawn_scoped(scope, move || work(worker)).is_err() {
                break;
            }
        }
        work(0);
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    let mut values = Vec::with_capacity(batch.len());
    for (_, scored) in done {
        values.extend(scored?);
    }
    Ok(values)
}

/// Checks that an answer belongs to the request `id`.
fn same_id(got: Option<u64>, id: u64) -> Result<(), Failure> {
    match got {
        Some(got) if got == id => Ok(()),
        Some(got) => Err(Failure::Final(format!("answer to request {got}, expected {id}"))),
        None => Err(Failure::Final(format!("the answer has no `id`, expected {id}"))),
    }
}

/// Returns the values and records of an answer to a request of `expected` rows.
fn values(answer: Answer, expected: usize) -> Result<(Vec<Option<f64>>, Logged), Failure> {
    if let Some((name, values)) = answer.columns.iter().find(|(_, values)| values.len() != expected) {
        return Err(Failure::Final(format!(
            "its column `{name}` has {} value(s) for {expected} completions; expected one value for each",
            values.len()
        )));
    }
    let logged = Logged { metrics: answer.metrics, columns: answer.columns };
    match (answer.rewards, answer.error) {
        (_, Some(error)) => {
            let text = error.as_str().map_or_else(|| error.to_string(), str::to_owned);
            Err(Failure::Final(format!("it reports: {text}")))
        }
        (Some(values), None) if values.len() == expected => Ok((values, logged)),
        (Some(values), None) => Err(Failure::Final(format!(
            "it returned {} value(s) for {expected} completions; expected one value for each",
            values.len()
        ))),
        (None, None) => Err(Failure::Final("the answer has neither `rewards` nor `error`".to_owned())),
    }
}

/// Returns the first characters of an unexpected text.
fn excerpt(text: &str) -> String {
    const LENGTH: usize = 200;
    let mut short: String = text.chars().take(LENGTH).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_written() {
        for (spec, expected) in [
            ("mine=http://user:pw@host:8000/score", "mine=http://***@host:8000/score"),
            ("judge:https://u@host/v1?api_key=abc&model=x", "judge:https://***@host/v1?api_key=***&model=x"),
            (
                "cmd:\"python r.py --hf_token abc --max_tokens 256\"",
                "cmd:\"python r.py --hf_token *** --max_tokens 256\"",
            ),
            ("cmd:env API_KEY='a b' OTHER=1 sh r.sh", "cmd:env API_KEY=*** OTHER=1 sh r.sh"),
            (
                "cmd:r --password=x --tokenizer d --sort_key k",
                "cmd:r --password=*** --tokenizer d --sort_key k",
            ),
            ("cmd:curl -H 'Authorization: Bearer abc'", "cmd:curl -H 'Authorization: ***'"),
            ("http://host/a@b", "http://host/a@b"),
            ("accuracy", "accuracy"),
        ] {
            assert_eq!(redacted(spec), expected);
            assert_eq!(redacted(expected), expected);
        }
        let error = crate::build(&["http://***@host/".to_owned()], &RewardOptions::default()).unwrap_err();
        assert!(error.to_string().contains("a secret that is not written to files"), "{error}");
    }

    #[test]
    fn a_request_has_whole_groups() {
        let sizes = |groups: &[u64], most: usize| {
            let rows: Vec<_> = groups
                .iter()
                .enumerate()
                .flat_map(|(row, &size)| (0..size).map(move |_| row as u64))
                .map(|row| {
                    let mut made = crate::testing::Row::new("q", "c", "s");
                    made.key.row = row;
                    made
                })
                .collect();
            let batch: Vec<_> = rows.iter().map(crate::testing::Row::input).collect();
            requests(&batch, most).into_iter().map(|range| range.len()).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[6, 6, 6], 16), [12, 6]);
        assert_eq!(sizes(&[6, 6, 6], 4), [6, 6, 6]);
        assert_eq!(sizes(&[3, 3, 20, 1], 8), [6, 20, 1]);
        assert_eq!(sizes(&[2, 2], 1), [1, 1, 1, 1]);
        assert_eq!(sizes(&[], 8), Vec::<usize>::new());
    }

    #[test]
    fn functions_of_python_files() {
        assert_eq!(python_function("a/my_rewards.py:mine"), Some(("a/my_rewards.py", "mine")));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("my rewards.py");
        std::fs::write(&file, "").unwrap();
        let path = file.display();
        for spec in
            [format!("{path}:mine"), format!("x={path}:mine"), format!("cmd:\"python '{path}:mine' -v\"")]
        {
            assert_eq!(spec_files(&spec), [file.as_path()], "{spec}");
        }
        assert_eq!(spec_files(&format!("x=cmd:python '{path}' --a=b")), [file.as_path()]);
        for spec in ["accuracy", "http://127.0.0.1:1/?a=b", "cmd:python no-such-file.py", "gone.py:mine"] {
            assert!(spec_files(spec).is_empty(), "{spec}");
        }
        for other in ["my_rewards.py", "my_rewards.py:", "x.sh:f", "a.py:f(x)", "a.py:3", ".py:f"] {
            assert_eq!(python_function(other), None, "{other}");
        }
        for (spec, part) in [("no/such.py:f", "no/such.py"), ("mine=no/such.py:f", "no/such.py")] {
            let error = crate::build(&[spec.to_owned()], &RewardOptions::default()).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("no such file"), "{error}");
        }
    }
}
