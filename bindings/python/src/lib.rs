//! The module `omnigrpo._omnigrpo`. Users call the package in `python/omnigrpo`; this module has the parts that need Rust.
//!
//! A command computes on a thread of its own, and Python code runs on the thread that called it. So rewards, callbacks and signal
//! handlers run where users of Python expect them, and other threads of Python run meanwhile. Both sides talk through a channel;
//! the caller waits for it without the GIL. Settings, rows and numbers cross as JSON, so nothing is converted twice.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use omnigrpo::session::{self, Caller, Loaded};
use omnigrpo::settings::{Problem, Resolved, Verb};
use omnigrpo::{
    Activity, Cause, Completion, Console, Evaluation, Logged, Observer, Peer, Reward, RewardError,
    RewardInput, StatedRange, Tone, demo, rows_as_json,
};
use omnigrpo_guard::MachineFailure;
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError, PySystemExit, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyCFunction;
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

/// Exit code of a program that was stopped and can be resumed, as that of the command line.
const STOPPED: u8 = 75;

/// Handlers of the signals that end a run with a checkpoint, in place of Python's default ones. They are removed when the value is
/// dropped. Handlers of the script stay.
struct Stops<'py> {
    signal: Bound<'py, PyModule>,
    numbers: Vec<Bound<'py, PyAny>>,
    /// True after SIGUSR1.
    warned: Arc<AtomicBool>,
}

impl<'py> Stops<'py> {
    /// Installs the handlers, on the main thread only. SIGTERM and SIGHUP raise `SystemExit`. SIGUSR1 only sets `stop`, because a
    /// scheduler sends it as a warning, and the SIGTERM that follows must not interrupt the step.
    fn install(py: Python<'py>, stop: &Arc<AtomicBool>) -> PyResult<Self> {
        let signal = py.import("signal")?;
        let mut this = Self { signal, numbers: Vec::new(), warned: Arc::default() };
        for (name, warns) in [("SIGTERM", false), ("SIGHUP", false), ("SIGUSR1", true)] {
            // Not every system has all of them.
            let Some(number) = this.signal.getattr_opt(name)? else { continue };
            if !this.signal.call_method1("getsignal", (&number,))?.eq(this.signal.getattr("SIG_DFL")?)? {
                continue;
            }
            let (stop, warned) = (Arc::clone(stop), Arc::clone(&this.warned));
            let handler = PyCFunction::new_closure(py, None, None, move |_, _| {
                if !warns {
                    return Err(PySystemExit::new_err(STOPPED));
                }
                warned.store(true, Ordering::SeqCst);
                stop.store(true, Ordering::SeqCst);
                Ok(())
            })?;
            match this.signal.call_method1("signal", (&number, handler)) {
                Ok(_) => this.numbers.push(number),
                // Only the main thread may install handlers.
                Err(error) if error.is_instance_of::<PyValueError>(py) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(this)
    }

    /// Returns `SystemExit` if the run was asked to stop by a warning.
    fn end(&self) -> PyResult<()> {
        if self.warned.load(Ordering::SeqCst) { Err(PySystemExit::new_err(STOPPED)) } else { Ok(()) }
    }
}

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        for number in &self.numbers {
            // The main thread has installed them, and it removes them.
            let default = self.signal.getattr("SIG_DFL");
            let _ = default.and_then(|default| self.signal.call_method1("signal", (number, default)));
        }
    }
}

/// Does work of the library without the GIL. A panic becomes an error, as on the thread of a command.
fn free<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, Problem> + Send) -> PyResult<T> {
    let done = py.detach(|| catch_unwind(AssertUnwindSafe(work)));
    done.unwrap_or_else(|panic| Err(of_panic(&*panic))).map_err(|problem| raised(&problem))
}

/// Converts the value of a panic.
fn of_panic(panic: &(dyn Any + Send)) -> Problem {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    Problem::failure(format!("omnigrpo has a fault: {}", text.unwrap_or_else(|| "a panic".to_owned())))
}

fn failed(error: &(impl std::error::Error + 'static)) -> Problem {
    Problem::from_error(error)
}

fn parsed(text: &str) -> PyResult<Value> {
    serde_json::from_str(text).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn verb(name: &str) -> PyResult<Verb> {
    let found = Verb::ALL.iter().find(|verb| verb.name() == name);
    found.copied().ok_or_else(|| PyValueError::new_err(format!("unknown command {name:?}")))
}

/// Resolves settings of which some may be missing.
fn checked(py: Python<'_>, verb: Verb, settings: &str) -> PyResult<Resolved> {
    let settings = parsed(settings)?;
    free(py, || session::checked(verb, settings))
}

/// Resolves settings of which none is missing.
fn resolved(py: Python<'_>, verb: Verb, settings: &str) -> PyResult<Resolved> {
    let settings = parsed(settings)?;
    free(py, || session::given(verb, settings))
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
    fn tell(&self, kind: &'static str, name: &str, data: String) {
        let _ = self.0.send(Call { kind, name: name.to_owned(), data, reply: None });
    }
}

/// A reward that is a function of Python.
struct Function {
    name: String,
    system: Option<String>,
    line: Line,
    logged: Mutex<Logged>,
    stated: StatedRange,
}

/// The answer of a reward.
#[derive(Deserialize)]
struct Scores {
    rewards: Vec<Option<f64>>,
    #[serde(default)]
    metrics: std::collections::BTreeMap<String, f64>,
    #[serde(default)]
    columns: std::collections::BTreeMap<String, Vec<Value>>,
    range: Option<[Option<f64>; 2]>,
}

/// The tools and environments of Python.
struct Environments(Line);

impl Peer for Environments {
    fn name(&self) -> &str {
        "the environment of Python"
    }

    fn call(
        &self,
        _what: &str,
        _place: u64,
        request: &Map<String, Value>,
    ) -> Result<Map<String, Value>, Cause> {
        let answer = self.0.ask("environment", "", serde_json::to_string(request)?);
        Ok(serde_json::from_str(&answer.ok_or_else(|| raised_exception("the environment"))?)?)
    }
}

/// Failure of a call that raised an exception of Python. The run undoes the step and ends with a checkpoint, as after a failure of
/// the machine; then the exception is raised.
fn raised_exception(what: &str) -> MachineFailure {
    MachineFailure(io::Error::other(format!("{what} of Python raised an exception")))
}

/// Returns a batch as JSON. What the completions of a prompt share is there once, in the row of the first of them.
fn packed(batch: &[RewardInput<'_>], system: Option<&str>) -> Result<String, serde_json::Error> {
    let mut prompts: Vec<RewardInput<'_>> = Vec::new();
    let mut completions = Vec::with_capacity(batch.len());
    for input in batch {
        // Completions with turns of an environment have conversations of their own.
        let same = |last: &RewardInput<'_>| {
            std::ptr::eq(last.columns, input.columns) && std::ptr::eq(last.turns, input.turns)
        };
        if !prompts.last().is_some_and(same) {
            prompts.push(*input);
        }
        let sample = input.key.sample;
        completions.push((
            prompts.len() - 1,
            input.completion,
            input.completion_ids,
            sample,
            input.truncated,
            input.added_turns,
        ));
    }
    let (prompts, completions) = (rows_as_json(&prompts, system)?, serde_json::to_string(&completions)?);
    Ok(format!(r#"{{"prompts": {prompts}, "completions": {completions}}}"#))
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
        self.stated.get()
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let error = |what: String| self.error(batch.len(), what);
        let rows = packed(batch, self.system.as_deref()).map_err(|e| error(e.to_string()))?;
        let answer = self.line.ask("score", &self.name, rows);
        let answer = answer.ok_or_else(|| RewardError::Failed {
            reward: self.name.clone(),
            source: Box::new(raised_exception("the function")),
        })?;
        let scores: Scores = serde_json::from_str(&answer).map_err(|e| error(e.to_string()))?;
        self.stated.take(scores.range);
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

    fn probe(&self, group: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let scores = self.score(group);
        drop(self.take_logged());
        scores
    }
}

/// Observer of a run that reports to Python, and what callbacks there ask for.
struct Reports {
    line: Line,
    stop: Arc<AtomicBool>,
    save: Arc<AtomicBool>,
    evaluate: Arc<AtomicBool>,
}

/// Requests of callbacks after a report.
#[derive(Deserialize)]
struct Asked {
    stop: bool,
    save: bool,
    evaluate: bool,
}

impl Reports {
    /// Reports to Python and notes what callbacks ask for. Returns false if a callback has raised.
    fn report(&self, kind: &'static str, data: String) -> bool {
        let answer = self.line.ask(kind, "", data);
        let asked = answer.and_then(|answer| serde_json::from_str::<Asked>(&answer).ok());
        let Some(asked) = asked else { return false };
        for (flag, asked) in
            [(&self.stop, asked.stop), (&self.save, asked.save), (&self.evaluate, asked.evaluate)]
        {
            flag.fetch_or(asked, Ordering::SeqCst);
        }
        true
    }
}

impl Observer for Reports {
    fn step(&mut self, step: u64, metrics: &[(String, Option<f64>)]) -> ControlFlow<()> {
        let numbers: Map<String, Value> =
            metrics.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        let data = json!({ "step": step, "metrics": numbers }).to_string();
        match self.report("step", data) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }

    fn saved(&mut self, step: u64, checkpoint: &Path) {
        self.line.tell("save", "", json!({ "step": step, "checkpoint": checkpoint }).to_string());
    }

    fn evaluation(&mut self, step: u64, evaluation: &Evaluation) {
        self.report("evaluation", json!({ "step": step, "metrics": numbers(evaluation) }).to_string());
    }
}

fn numbers(evaluation: &Evaluation) -> Value {
    let metrics = evaluation.summary.metrics.iter();
    Value::Object(metrics.map(|(name, value)| (name.clone(), json!(value))).collect())
}

/// Runs a command on a thread of its own, and answers its calls on this one until it has ended.
///
/// The first exception, that of Ctrl-C or SIGTERM included, asks a run to stop with a checkpoint, and is raised when the run has ended. The
/// run ends after its step, or before it if a reward has raised.
/// A second Ctrl-C or SIGTERM is raised at once.
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
    let stops = Stops::install(py, &stop)?;
    let lines = line.clone();
    let console =
        Console::listener(move |tone, text| lines.tell("line", tone.name(), json!(text).to_string()));
    let activity = console.activity().clone();
    let worker = std::thread::Builder::new().name("omnigrpo".to_owned()).spawn(move || {
        let to_rewards = line.clone();
        let mut caller = Caller::new(move |name| {
            let (name, system, line) = (name.to_owned(), system.clone(), to_rewards.clone());
            Some(Box::new(Function {
                name,
                system,
                line,
                logged: Mutex::default(),
                stated: StatedRange::default(),
            }))
        });
        (caller.console, caller.stop) = (console, asked_to_stop);
        caller.functions.environment = Some(Arc::new(Environments(line.clone())));
        let (stop, asked) = (caller.stop.clone(), caller.functions.signals.clone());
        let (save, evaluate) = (asked.save, asked.evaluate);
        caller.observer = Box::new(Reports { line, stop, save, evaluate });
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
        (None, done) => {
            let done =
                done.unwrap_or_else(|panic| Err(of_panic(&*panic))).map_err(|problem| raised(&problem))?;
            stops.end().map(|()| done)
        }
    }
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
        let is_signal =
            error.is_instance_of::<PyKeyboardInterrupt>(py) || error.is_instance_of::<PySystemExit>(py);
        if is_signal && first.is_none() {
            // The exception of the signal is kept; one of the message is not.
            let text = json!("stopping with a checkpoint; interrupt again to stop at once").to_string();
            let _ = python.call1(("line", Tone::Notice.name(), text));
        }
        first.get_or_insert(error);
    };
    let mut shown = (0, String::new());
    loop {
        let next = py.detach(|| calls.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK));
        if let Err(signal) = py.check_signals() {
            if first.is_some() {
                return Err(signal);
            }
            keep(&mut first, signal);
        }
        let is_reward = next.as_ref().is_ok_and(|call| call.kind == "score");
        let is_time = is_reward || matches!(next, Err(RecvTimeoutError::Timeout));
        let (now, steps) = (Instant::now(), activity.steps());
        if let (Some((done, total)), true) = (steps, is_time && first.is_none()) {
            let (doing, left) = (activity.doing(now), activity.left(now).map(|left| left.as_secs()));
            if (done, &doing) != (shown.0, &shown.1) {
                let data = json!({ "done": done, "total": total, "phase": doing, "left_secs": left, "is_reward": is_reward });
                shown = (done, doing);
                let told = python.call1(("doing", "", data.to_string()));
                told.map_or_else(|error| keep(&mut first, error), drop);
            }
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
            Err(RecvTimeoutError::Timeout) => (),
            Err(RecvTimeoutError::Disconnected) => return Ok(first),
        }
    }
}

/// Runs the program with these arguments, of which the first is its name, and returns its exit code. `again` is the command that
/// runs it once more.
#[pyfunction]
fn main(py: Python<'_>, arguments: Vec<OsString>, again: Vec<OsString>) -> PyResult<u8> {
    free(py, || Ok(omnigrpo::cli::run(arguments, &again)))
}

/// Connects this process with the ranks of its launcher, and returns its number. If the command `again` was run as ranks instead,
/// raises `SystemExit` with their code.
#[pyfunction]
fn connect(py: Python<'_>, command: &str, settings: &str, again: Vec<OsString>) -> PyResult<usize> {
    let resolved = resolved(py, verb(command)?, settings)?;
    free(py, || session::connect(&resolved, &again))?.map_err(PySystemExit::new_err)
}

/// Leaves the other ranks.
#[pyfunction]
fn leave(py: Python<'_>) -> PyResult<()> {
    free(py, || {
        session::leave();
        Ok(())
    })
}

/// Panics, within a command or without one, so that a test sees what becomes of a panic.
#[cfg(debug_assertions)]
#[pyfunction]
#[allow(clippy::panic)]
fn fault(py: Python<'_>, call: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    match call {
        None => free(py, || panic!("planted")),
        Some(call) => attended(py, call, None, |_| panic!("planted {}", 2)),
    }
}

/// Returns the JSON Schema of all settings: names, kinds, defaults, help with units.
#[pyfunction]
fn schema() -> String {
    omnigrpo::settings::schema().to_string()
}

/// Writes a medium into a folder, unless it exists, and returns its file name.
#[pyfunction]
fn keep(py: Python<'_>, folder: PathBuf, content: &[u8]) -> PyResult<String> {
    free(py, || omnigrpo::store_medium(&folder, content, None).map_err(|error| failed(&error)))
}

/// Checks names and values of settings, each alone.
#[pyfunction]
fn read(py: Python<'_>, command: &str, settings: &str) -> PyResult<()> {
    let (verb, settings) = (verb(command)?, parsed(settings)?);
    free(py, || session::read(verb, settings).map(drop))
}

/// Checks settings of a command as far as that works without rows and files, and returns notes about them.
#[pyfunction]
fn check(py: Python<'_>, command: &str, settings: &str) -> PyResult<Vec<String>> {
    Ok(checked(py, verb(command)?, settings)?.notes)
}

/// Trains (`train` or `sft`), and returns the summary and the model. Rewards `caller:NAME` are asked through
/// `call("score", NAME, rows)`. `digests` are those of the functions' code, by name. If
/// `repeat` is true, a complete run starts from the beginning.
#[pyfunction]
fn train(
    py: Python<'_>,
    command: &str,
    settings: &str,
    digests: BTreeMap<String, String>,
    repeat: bool,
    call: &Bound<'_, PyAny>,
) -> PyResult<(String, Model)> {
    let resolved = resolved(py, verb(command)?, settings)?;
    let system = resolved.settings.prompts.render.system.clone();
    let (done, model) = attended(py, call, system, move |mut caller| {
        (caller.functions.digests, caller.functions.repeat_complete) = (digests, repeat);
        session::train(resolved, caller)
    })?;
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
    let resolved = resolved(py, Verb::Eval, settings)?;
    let system = resolved.settings.prompts.render.system.clone();
    let done = attended(py, call, system, move |caller| session::evaluate(resolved, caller))?;
    Ok(json!({ "metrics": numbers(&done), "rows": done.rows, "skipped": done.skipped.len() }).to_string())
}

/// Predicts the memory and the time of a run (`plan` or `sft`), as `omnigrpo plan --json` does.
#[pyfunction]
fn plan(py: Python<'_>, command: &str, settings: &str, call: &Bound<'_, PyAny>) -> PyResult<String> {
    let resolved = resolved(py, verb(command)?, settings)?;
    Ok(attended(py, call, None, move |caller| session::plan(resolved, caller))?.to_string())
}

/// Writes the embedded demo: a small checkpoint, and questions about generated pictures.
#[pyfunction]
#[pyo3(signature = (folder, train = 2048, eval = 200, seed = 1))]
fn write_demo(py: Python<'_>, folder: PathBuf, train: usize, eval: usize, seed: u64) -> PyResult<()> {
    free(py, || {
        demo::write_model(&folder.join("model")).map_err(|error| failed(&error))?;
        let sizes = demo::Sizes { sft: 0, train, eval };
        demo::generate(&folder.join("data"), seed, sizes).map(drop).map_err(|error| failed(&error))
    })
}

/// A checkpoint with its weights in memory.
#[pyclass(frozen, module = "omnigrpo._omnigrpo")]
struct Model(Loaded);

#[pymethods]
impl Model {
    #[new]
    fn load(py: Python<'_>, settings: &str) -> PyResult<Self> {
        let resolved = checked(py, Verb::Generate, settings)?;
        free(py, || Loaded::open(resolved)).map(Self)
    }

    /// Returns completions: a list per row.
    fn generate(&self, py: Python<'_>, rows: &str, settings: &str, folder: PathBuf) -> PyResult<String> {
        let Value::Array(rows) = parsed(rows)? else { return Err(PyValueError::new_err("rows are no list")) };
        let resolved = checked(py, Verb::Generate, settings)?;
        let done = free(py, || self.0.generate(resolved, rows, &folder))?;
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
        let (row, resolved) = (parsed(row)?, checked(py, Verb::Score, settings)?);
        free(py, || self.0.score(resolved, row, &completions, &folder))
    }

    /// Writes a checkpoint directory.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        free(py, || self.0.save(&folder))
    }
}

#[pymodule]
fn _omnigrpo(module: &Bound<'_, PyModule>) -> PyResult<()> {
    omnigrpo::settings::name_flags();
    omnigrpo::cli::name_commit();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("OmnigrpoError", module.py().get_type::<OmnigrpoError>())?;
    module.add_class::<Model>()?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(connect, module)?)?;
    module.add_function(wrap_pyfunction!(leave, module)?)?;
    #[cfg(debug_assertions)]
    module.add_function(wrap_pyfunction!(fault, module)?)?;
    module.add_function(wrap_pyfunction!(keep, module)?)?;
    module.add_function(wrap_pyfunction!(schema, module)?)?;
    module.add_function(wrap_pyfunction!(check, module)?)?;
    module.add_function(wrap_pyfunction!(read, module)?)?;
    module.add_function(wrap_pyfunction!(train, module)?)?;
    module.add_function(wrap_pyfunction!(evaluate, module)?)?;
    module.add_function(wrap_pyfunction!(plan, module)?)?;
    module.add_function(wrap_pyfunction!(write_demo, module)?)
}
