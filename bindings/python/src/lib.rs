//! The module `omnigrpo._omnigrpo`. Users call the package in `python/omnigrpo`; this module has the parts that need Rust.
//!
//! A command computes on a thread of its own, and Python code runs on the thread that called it. So rewards, callbacks and signal
//! handlers run where users of Python expect them, and other threads of Python run meanwhile. Both sides talk through a channel;
//! the caller waits for it without the GIL. Settings, rows and numbers cross as JSON, so nothing is converted twice.

use std::any::Any;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use omnigrpo::cli::embed::{self, Caller, Loaded};
use omnigrpo::settings::{Problem, Resolved, Verb};
use omnigrpo::{
    Activity, Completion, Console, Evaluation, Logged, Observer, Reward, RewardError, RewardInput, demo,
    rows_as_json,
};
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Time between two looks for signals.
const LOOK: Duration = Duration::from_millis(50);

pyo3::create_exception!(
    omnigrpo,
    OmnigrpoError,
    PyRuntimeError,
    "Failure of a run, with the text that the program prints."
);

/// Converts an error of the library. A mistake in the settings is a `ValueError`.
fn raised(problem: &Problem) -> PyErr {
    let text = problem.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).to_owned();
    if problem.is_usage() { PyValueError::new_err(text) } else { OmnigrpoError::new_err(text) }
}

fn failed(error: impl std::error::Error + 'static) -> PyErr {
    raised(&Problem::from_error(&error))
}

fn parsed(text: &str) -> PyResult<Value> {
    serde_json::from_str(text).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn verb(name: &str) -> PyResult<Verb> {
    let found = Verb::ALL.iter().find(|verb| verb.name() == name);
    found.copied().ok_or_else(|| PyValueError::new_err(format!("unknown command {name:?}")))
}

/// Resolves settings of which some may be missing.
fn checked(verb: Verb, settings: &str) -> PyResult<Resolved> {
    embed::checked(verb, parsed(settings)?).map_err(|problem| raised(&problem))
}

/// Resolves settings of which none is missing.
fn resolved(verb: Verb, settings: &str) -> PyResult<Resolved> {
    embed::given(verb, parsed(settings)?).map_err(|problem| raised(&problem))
}

/// A call of Python: its kind, a name, and JSON. With `reply`, its answer.
struct Call {
    kind: &'static str,
    name: String,
    data: String,
    reply: Option<SyncSender<Option<String>>>,
}

/// The way from a command to Python.
#[derive(Clone)]
struct Line(SyncSender<Call>);

impl Line {
    /// Calls Python and waits for the answer; `None` if Python raised an exception or does not listen any more.
    fn ask(&self, kind: &'static str, name: &str, data: String) -> Option<String> {
        let (reply, answer) = sync_channel(1);
        self.0.send(Call { kind, name: name.to_owned(), data, reply: Some(reply) }).ok()?;
        answer.recv().ok().flatten()
    }

    /// Calls Python without waiting. A caller that has left hears nothing.
    fn tell(&self, kind: &'static str, data: String) {
        let _ = self.0.send(Call { kind, name: String::new(), data, reply: None });
    }
}

/// A reward that is a function of Python.
struct Function {
    name: String,
    system: Option<String>,
    line: Line,
    logged: Mutex<Logged>,
}

/// The answer of a reward.
#[derive(Deserialize)]
struct Scores {
    rewards: Vec<Option<f64>>,
    #[serde(default)]
    metrics: std::collections::BTreeMap<String, f64>,
    #[serde(default)]
    columns: std::collections::BTreeMap<String, Vec<Value>>,
}

impl Function {
    fn error(&self, rows: usize, what: String) -> RewardError {
        RewardError::External {
            reward: self.name.clone(),
            rows: format!("{rows} completions"),
            attempts: 1,
            what,
        }
    }
}

impl Reward for Function {
    fn name(&self) -> &str {
        &self.name
    }

    fn range(&self) -> (f64, f64) {
        (f64::NEG_INFINITY, f64::INFINITY)
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let error = |what: String| self.error(batch.len(), what);
        let rows = rows_as_json(batch, self.system.as_deref()).map_err(|e| error(e.to_string()))?;
        let answer = self.line.ask("score", &self.name, rows);
        let answer = answer.ok_or_else(|| error("it raised an exception, or the run was left".to_owned()))?;
        let scores: Scores = serde_json::from_str(&answer).map_err(|e| error(e.to_string()))?;
        let lengths = scores.columns.values().map(Vec::len).chain([scores.rewards.len()]);
        if let Some(wrong) = lengths.into_iter().find(|length| *length != batch.len()) {
            return Err(error(format!("it returned {wrong} values for {} completions", batch.len())));
        }
        let logged = Logged { metrics: scores.metrics, columns: scores.columns };
        *self.logged.lock().unwrap_or_else(PoisonError::into_inner) = logged;
        Ok(scores.rewards)
    }

    fn take_logged(&self) -> Logged {
        std::mem::take(&mut self.logged.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn probe(&self, row: &RewardInput<'_>) -> Result<Option<f64>, RewardError> {
        let score = self.score(std::slice::from_ref(row));
        drop(self.take_logged());
        Ok(score?.into_iter().next().flatten())
    }
}

/// Observer of a run that reports to Python.
struct Reports(Line);

impl Observer for Reports {
    fn step(&mut self, step: u64, metrics: &[(String, Option<f64>)]) -> ControlFlow<()> {
        let numbers: Map<String, Value> =
            metrics.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        let data = json!({ "step": step, "metrics": numbers }).to_string();
        match self.0.ask("step", "", data).as_deref() {
            Some("true") => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    }

    fn saved(&mut self, step: u64, checkpoint: &Path) {
        self.0.tell("save", json!({ "step": step, "checkpoint": checkpoint }).to_string());
    }

    fn evaluation(&mut self, step: u64, evaluation: &Evaluation) {
        self.0.tell("evaluation", json!({ "step": step, "metrics": numbers(evaluation) }).to_string());
    }
}

fn numbers(evaluation: &Evaluation) -> Value {
    let metrics = evaluation.summary.metrics.iter();
    Value::Object(metrics.map(|(name, value)| (name.clone(), json!(value))).collect())
}

/// Writer that sends lines of the console to Python.
struct Lines(Line, Vec<u8>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.extend_from_slice(bytes);
        while let Some(end) = self.1.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.1.drain(..=end).collect();
            self.0.tell("line", json!(String::from_utf8_lossy(&line).trim_end()).to_string());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs a command on a thread of its own, and answers its calls on this one until it has ended.
///
/// The first exception, Ctrl-C included, asks a run to stop after its step with a checkpoint, and is raised when the run has ended.
/// A second Ctrl-C is raised at once.
fn attended<T: Send + 'static>(
    py: Python<'_>,
    call: &Bound<'_, PyAny>,
    system: Option<String>,
    command: impl FnOnce(Caller) -> Result<T, Problem> + Send + 'static,
) -> PyResult<T> {
    let (sender, calls) = sync_channel(64);
    let line = Line(sender);
    let stop = Arc::new(AtomicBool::new(false));
    let asked_to_stop = Arc::clone(&stop);
    let console = Console::plain(Lines(line.clone(), Vec::new()));
    let activity = console.activity().clone();
    let worker = std::thread::Builder::new().name("omnigrpo".to_owned()).spawn(move || {
        let to_rewards = line.clone();
        let mut caller = Caller::new(move |name| {
            let (name, system, line) = (name.to_owned(), system.clone(), to_rewards.clone());
            Some(Box::new(Function { name, system, line, logged: Mutex::default() }))
        });
        (caller.console, caller.stop) = (console, asked_to_stop);
        caller.observer = Box::new(Reports(line));
        command(caller)
    })?;
    // A mutex, so that the wait can let go of the GIL.
    let calls = Mutex::new(calls);
    let served = serve(py, &calls, call, &stop, &activity);
    // A run that was left gets no answers and ends.
    drop(calls);
    let exception = served?;
    let done = py.detach(|| worker.join());
    match (exception, done) {
        (Some(exception), _) => Err(exception),
        (None, Ok(done)) => done.map_err(|problem| raised(&problem)),
        (None, Err(panic)) => Err(OmnigrpoError::new_err(format!("omnigrpo has a fault: {}", said(&*panic)))),
    }
}

/// Returns the text of a panic.
fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".to_owned())
}

fn serve(
    py: Python<'_>,
    calls: &Mutex<Receiver<Call>>,
    python: &Bound<'_, PyAny>,
    stop: &AtomicBool,
    activity: &Activity,
) -> PyResult<Option<PyErr>> {
    let mut first: Option<PyErr> = None;
    let keep = |first: &mut Option<PyErr>, error: PyErr| {
        stop.store(true, Ordering::SeqCst);
        if error.is_instance_of::<PyKeyboardInterrupt>(py) && first.is_none() {
            // The exception of Ctrl-C is kept; one of the message is not.
            let _ =
                python.call1(("line", "", "\"stopping after this step; interrupt again to stop at once\""));
        }
        first.get_or_insert(error);
    };
    let mut shown = String::new();
    loop {
        let next = py.detach(|| calls.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK));
        if let Err(signal) = py.check_signals() {
            if first.is_some() {
                return Err(signal);
            }
            keep(&mut first, signal);
        }
        match next {
            Ok(Call { kind, name, data, reply }) => {
                let answer =
                    python.call1((kind, name, data)).and_then(|answer| answer.extract::<Option<String>>());
                let answer = answer.unwrap_or_else(|error| {
                    keep(&mut first, error);
                    None
                });
                // The run may have ended meanwhile.
                let _ = reply.map(|reply| reply.send(answer));
            }
            Err(RecvTimeoutError::Timeout) => {
                let now = Instant::now();
                let doing = activity.doing(now);
                let Some((done, total)) = activity.steps() else { continue };
                if doing != shown && first.is_none() {
                    let left = activity.left(now).map(|left| left.as_secs());
                    let data = json!({ "done": done, "total": total, "phase": doing, "left_secs": left });
                    shown = doing;
                    let told = python.call1(("doing", "", data.to_string()));
                    told.map_or_else(|error| keep(&mut first, error), drop);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(first),
        }
    }
}

/// Runs the program with these arguments, of which the first is its name, and returns its exit code.
#[pyfunction]
fn main(py: Python<'_>, arguments: Vec<std::ffi::OsString>) -> u8 {
    py.detach(|| omnigrpo::cli::run(arguments))
}

/// Returns the JSON Schema of all settings: names, kinds, defaults, help with units.
#[pyfunction]
fn schema() -> String {
    omnigrpo::settings::schema().to_string()
}

/// Checks names and values of settings, each alone.
#[pyfunction]
fn read(command: &str, settings: &str) -> PyResult<()> {
    embed::read(verb(command)?, parsed(settings)?).map(drop).map_err(|problem| raised(&problem))
}

/// Checks settings of a command as far as that works without rows and files, and returns all values and notes.
#[pyfunction]
fn check(command: &str, settings: &str) -> PyResult<String> {
    let resolved = checked(verb(command)?, settings)?;
    let values: Map<String, Value> =
        resolved.values.plain().map(|(flag, value)| (flag.name.to_owned(), value)).collect();
    Ok(json!({ "values": values, "notes": resolved.notes }).to_string())
}

/// Trains (`train` or `sft`), and returns the summary and the model. Rewards `caller:NAME` are asked through
/// `call("score", NAME, rows)`.
#[pyfunction]
fn train(
    py: Python<'_>,
    command: &str,
    settings: &str,
    call: &Bound<'_, PyAny>,
) -> PyResult<(String, Model)> {
    let resolved = resolved(verb(command)?, settings)?;
    let system = resolved.settings.prompts.render.system.clone();
    let (done, model) = attended(py, call, system, move |caller| embed::train(resolved, caller))?;
    let of = |evaluation: Option<&Evaluation>| evaluation.map(numbers);
    let summary = json!({
        "steps": done.steps, "interrupted": done.interrupted, "collapsed": done.collapsed, "machine": done.machine,
        "before": of(done.before.as_ref()), "after": of(done.after.as_ref()),
    });
    Ok((summary.to_string(), Model(model)))
}

/// Evaluates a model on rows, and returns the metrics and the result of every row.
#[pyfunction]
fn evaluate(py: Python<'_>, settings: &str, call: &Bound<'_, PyAny>) -> PyResult<String> {
    let resolved = resolved(Verb::Eval, settings)?;
    let system = resolved.settings.prompts.render.system.clone();
    let done = attended(py, call, system, move |caller| embed::evaluate(resolved, caller))?;
    Ok(json!({ "metrics": numbers(&done), "rows": done.rows, "skipped": done.skipped.len() }).to_string())
}

/// Predicts the memory and the time of a run (`plan` or `sft`), as `omnigrpo plan --json` does.
#[pyfunction]
fn plan(py: Python<'_>, command: &str, settings: &str, call: &Bound<'_, PyAny>) -> PyResult<String> {
    let resolved = resolved(verb(command)?, settings)?;
    Ok(attended(py, call, None, move |caller| embed::plan(resolved, caller))?.to_string())
}

/// Writes the embedded demo: a small checkpoint, and questions about generated pictures.
#[pyfunction]
#[pyo3(signature = (folder, train = 2048, eval = 200, seed = 1))]
fn write_demo(py: Python<'_>, folder: PathBuf, train: usize, eval: usize, seed: u64) -> PyResult<()> {
    py.detach(|| {
        demo::write_model(&folder.join("model")).map_err(failed)?;
        demo::generate(&folder.join("data"), seed, demo::Sizes { sft: 0, train, eval }).map_err(failed)?;
        Ok(())
    })
}

/// A checkpoint with its weights in memory.
#[pyclass(frozen, module = "omnigrpo._omnigrpo")]
struct Model(Loaded);

#[pymethods]
impl Model {
    #[new]
    fn load(py: Python<'_>, settings: &str) -> PyResult<Self> {
        let resolved = checked(Verb::Generate, settings)?;
        py.detach(|| Loaded::open(resolved)).map(Self).map_err(|problem| raised(&problem))
    }

    /// Returns completions: a list per row.
    fn generate(&self, py: Python<'_>, rows: &str, settings: &str, folder: PathBuf) -> PyResult<String> {
        let Value::Array(rows) = parsed(rows)? else { return Err(PyValueError::new_err("rows are no list")) };
        let resolved = checked(Verb::Generate, settings)?;
        let done =
            py.detach(|| self.0.generate(resolved, rows, &folder)).map_err(|problem| raised(&problem))?;
        let completion = |c: &Completion| json!({ "text": c.text, "completion_ids": c.ids, "logprobs": c.logprobs, "finish_reason": c.finish_reason });
        Ok(done
            .iter()
            .map(|row| row.iter().map(completion).collect::<Value>())
            .collect::<Value>()
            .to_string())
    }

    /// Returns log-probabilities, nats: a list per completion.
    fn score(
        &self,
        py: Python<'_>,
        row: &str,
        completions: Vec<String>,
        settings: &str,
        folder: PathBuf,
    ) -> PyResult<Vec<Vec<f32>>> {
        let (row, resolved) = (parsed(row)?, checked(Verb::Score, settings)?);
        py.detach(|| self.0.score(resolved, row, &completions, &folder)).map_err(|problem| raised(&problem))
    }

    /// Writes a checkpoint directory.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        py.detach(|| self.0.save(&folder)).map_err(|problem| raised(&problem))
    }
}

#[pymodule]
fn _omnigrpo(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("OmnigrpoError", module.py().get_type::<OmnigrpoError>())?;
    module.add_class::<Model>()?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(schema, module)?)?;
    module.add_function(wrap_pyfunction!(check, module)?)?;
    module.add_function(wrap_pyfunction!(read, module)?)?;
    module.add_function(wrap_pyfunction!(train, module)?)?;
    module.add_function(wrap_pyfunction!(evaluate, module)?)?;
    module.add_function(wrap_pyfunction!(plan, module)?)?;
    module.add_function(wrap_pyfunction!(write_demo, module)?)
}
