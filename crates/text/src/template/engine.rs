//! Where a template runs: on a thread with a large stack.
//!
//! A template needs a large stack, and starting a thread with one costs more than a render. Threads are therefore reused: each
//! renders any number of conversations. Their number is the largest number of simultaneous callers. They start on demand and end
//! with the template. A thread whose render panics ends, and the next call starts a new one.
//!
//! Going to another thread and back costs more than most renders. A caller that renders many conversations therefore gives its own
//! threads a large stack ([`RENDER_STACK_BYTES`]) and says so ([`render_on_this_thread`]).

use std::cell::Cell;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::{Environment, Error, ErrorKind, Value};
use omnigrpo_guard::{MachineFailure, guarded};

use super::MAX_OUTPUT_BYTES;
use super::bounds::{self, Budget};

/// Stack that a template may need, bytes. It suffices for the longest permitted tag and for the deepest permitted values. Only the
/// touched part takes memory.
pub(super) const STACK_BYTES: usize = 64 << 20;
/// Stack that a caller may have used on its own thread when a template begins, bytes.
const USED_BYTES: usize = 8 << 20;

/// Stack of a thread that renders templates itself ([`render_on_this_thread`]), bytes. Only the touched part takes memory.
pub const RENDER_STACK_BYTES: usize = STACK_BYTES + 2 * USED_BYTES;

thread_local! {
    /// Address in the first frame of this thread, if it renders templates itself.
    static START: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Declares that this thread has just started with a stack of [`RENDER_STACK_BYTES`], so that templates run on it.
pub fn render_on_this_thread() {
    START.set(Some(place_in_stack()));
}

/// Returns an address in the frame of the caller.
#[inline(never)]
fn place_in_stack() -> usize {
    let place = 0u8;
    std::ptr::from_ref(std::hint::black_box(&place)).addr()
}

/// Returns true if the rest of this thread's stack suffices for a template.
fn has_room() -> bool {
    START.get().is_some_and(|start| start.abs_diff(place_in_stack()) <= USED_BYTES)
}

/// Reason why a render failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Error of the template.
    Template(Error),
    /// Panic of the template engine.
    Engine,
    /// Failure to start a thread.
    NoThread(MachineFailure),
}

type Rendered = Result<String, Failure>;

/// Budget and the context to render.
type Job = (Budget, Value);

/// Name of the template in its environment.
const NAME: &str = "template";

/// A compiled template.
#[derive(Debug)]
struct Engine {
    /// Environment with the template for each budget.
    envs: [Environment<'static>; 2],
}

/// Thread that waits for jobs. It ends when the `Worker` is dropped.
#[derive(Debug)]
struct Worker {
    jobs: Sender<Job>,
    answers: Receiver<Rendered>,
}

/// A compiled template with its threads.
#[derive(Debug)]
pub(super) struct Threads {
    engine: Arc<Engine>,
    source: String,
    /// Idle threads.
    idle: Mutex<Vec<Worker>>,
}

impl Threads {
    /// Compiles a template. `bounded` is the source with bounds, which the engine gets.
    pub(super) fn compile(
        env: Environment<'static>,
        source: String,
        bounded: String,
    ) -> Result<Self, Failure> {
        let compile = || Engine::compile(env, bounded);
        let engine = match has_room() {
            true => compile(),
            false => {
                let started = thread().spawn(compile).map_err(|e| Failure::NoThread(MachineFailure(e)))?;
                started.join().unwrap_or(Err(Failure::Engine))
            }
        };
        Ok(Self { engine: Arc::new(engine?), source, idle: Mutex::new(Vec::new()) })
    }

    pub(super) fn source(&self) -> &str {
        &self.source
    }

    pub(super) fn render(&self, budget: Budget, context: Value) -> Rendered {
        if has_room() {
            return self.engine.render(budget, context);
        }
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = idle().pop();
        let worker = match waiting {
            Some(worker) => worker,
            None => Worker::start(&self.engine).map_err(|e| Failure::NoThread(MachineFailure(e)))?,
        };
        // A thread that has ended does not answer.
        let answer = worker.jobs.send((budget, context)).ok().and_then(|()| worker.answers.recv().ok());
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

    /// Removes the idle threads, so that the next call starts one.
    #[cfg(test)]
    pub(super) fn take_idle(&self) -> Vec<impl Sized + use<>> {
        std::mem::take(&mut *self.idle.lock().unwrap())
    }
}

fn thread() -> std::thread::Builder {
    std::thread::Builder::new().name("template".to_owned()).stack_size(STACK_BYTES)
}

impl Worker {
    fn start(engine: &Arc<Engine>) -> io::Result<Self> {
        let ((jobs, asked), (answer, answers)) = (channel(), channel());
        let engine = Arc::clone(engine);
        thread().spawn(move || engine.serve(&asked, &answer))?;
        Ok(Self { jobs, answers })
    }
}

impl Engine {
    fn compile(mut env: Environment<'static>, source: String) -> Result<Self, Failure> {
        let compiled = guarded(|| env.add_template_owned(NAME, source).map(|()| bounds::by_budget(&env)));
        match compiled {
            Ok(envs) => Ok(Self { envs: envs.map_err(Failure::Template)? }),
            Err(_) => Err(Failure::Engine),
        }
    }

    fn serve(&self, jobs: &Receiver<Job>, answer: &Sender<Rendered>) {
        for (budget, context) in jobs {
            let rendered = self.render(budget, context);
            let usable = !matches!(rendered, Err(Failure::Engine));
            if answer.send(rendered).is_err() || !usable {
                return;
            }
        }
    }

    fn render(&self, budget: Budget, context: Value) -> Rendered {
        let rendered = guarded(|| self.envs[budget as usize].get_template(NAME)?.render(context))
            .map_err(|_| Failure::Engine)?;
        match rendered.map_err(Failure::Template)? {
            text if text.len() > MAX_OUTPUT_BYTES => {
                let what = format!("{} bytes, more than {MAX_OUTPUT_BYTES}", text.len());
                Err(Failure::Template(Error::new(ErrorKind::OutOfFuel, what)))
            }
            text => Ok(text),
        }
    }
}
