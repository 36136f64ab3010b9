//! Threads that render a template.
//!
//! A template needs a large stack, and starting a thread with one costs more than a render. Threads are therefore reused: each
//! compiles the template once and then renders any number of conversations. Their number is the largest number of simultaneous
//! callers. They start on demand and end with the template. A thread whose render panics ends, and the next call starts a new
//! one.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::{Environment, Error, Template, Value};
use omnigrpo_guard::{MachineFailure, guarded};

use super::bounds::Budget;
use super::{MAX_OUTPUT_BYTES, invalid};

/// Stack size of a template thread, bytes. It suffices for the longest permitted tag and for the deepest permitted values. Only
/// the touched part takes memory.
pub(super) const STACK_BYTES: usize = 64 << 20;

/// Reason why a render failed.
pub(super) enum Failure {
    /// Error of the template.
    Template(Error),
    /// Panic of the template engine.
    Engine,
    /// Failure to start a thread.
    NoThread(MachineFailure),
}

type Rendered = Result<String, Failure>;

/// Budget and the context to render. Without a context the template is only compiled.
type Job = (Budget, Option<Value>);

/// Source of a template, with the environment for each budget.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) envs: [Environment<'static>; 2],
    pub(super) source: String,
    /// The source with bounds, which the engine gets.
    pub(super) bounded: String,
}

/// Thread that waits for jobs. It ends when the `Worker` is dropped.
#[derive(Debug)]
struct Worker {
    jobs: Sender<Job>,
    answers: Receiver<Rendered>,
}

/// [`Engine`] with its threads.
#[derive(Debug)]
pub(super) struct Threads {
    engine: Arc<Engine>,
    /// Idle threads.
    idle: Mutex<Vec<Worker>>,
}

impl Threads {
    pub(super) fn new(engine: Engine) -> Self {
        Self { engine: Arc::new(engine), idle: Mutex::new(Vec::new()) }
    }

    pub(super) fn source(&self) -> &str {
        &self.engine.source
    }

    /// Parses and compiles the template.
    pub(super) fn compile(&self) -> Result<(), Failure> {
        self.ask((Budget::Trial, None)).map(drop)
    }

    pub(super) fn render(&self, budget: Budget, context: Value) -> Rendered {
        self.ask((budget, Some(context)))
    }

    fn ask(&self, job: Job) -> Rendered {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = idle().pop();
        let worker = match waiting {
            Some(worker) => worker,
            None => Worker::start(&self.engine).map_err(|e| Failure::NoThread(MachineFailure(e)))?,
        };
        // A thread that has ended does not answer.
        let answer = worker.jobs.send(job).ok().and_then(|()| worker.answers.recv().ok());
        match answer {
            Some(answer) if !matches!(answer, Err(Failure::Engine)) => {
                idle().push(worker);
                answer
            }
            _ => Err(Failure::Engine),
        }
    }

    #[cfg(test)]
    pub(super) fn num_idle(&self) -> usize {
        self.idle.lock().unwrap().len()
    }
}

impl Worker {
    fn start(engine: &Arc<Engine>) -> io::Result<Self> {
        let ((jobs, asked), (answer, answers)) = (channel(), channel());
        let engine = Arc::clone(engine);
        let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || engine.serve(&asked, &answer))?;
        Ok(Self { jobs, answers })
    }
}

impl Engine {
    fn serve(&self, jobs: &Receiver<Job>, answer: &Sender<Rendered>) {
        let mut compiled = [None, None];
        for (budget, context) in jobs {
            let (env, compiled) = (&self.envs[budget as usize], &mut compiled[budget as usize]);
            let rendered = guarded(|| {
                if compiled.is_none() {
                    *compiled = Some(env.template_from_named_str("template", &self.bounded)?);
                }
                match (compiled, context) {
                    (Some(compiled), Some(context)) => render(compiled, context),
                    _ => Ok(String::new()),
                }
            });
            let (rendered, usable) = match rendered {
                Ok(rendered) => (rendered.map_err(Failure::Template), true),
                Err(_) => (Err(Failure::Engine), false),
            };
            if answer.send(rendered).is_err() || !usable {
                return;
            }
        }
    }
}

fn render(template: &Template<'_, '_>, context: Value) -> Result<String, Error> {
    let text = template.render(context)?;
    match text.len() {
        len if len > MAX_OUTPUT_BYTES => {
            Err(invalid(format!("writes {len} bytes, more than {MAX_OUTPUT_BYTES}")))
        }
        _ => Ok(text),
    }
}
