//! Threads that render a template.
//!
//! A template needs a large stack, and starting a thread with one costs more than a render. Threads are therefore reused: each
//! compiles the template once and then renders any number of conversations. Their number is the largest number of simultaneous
//! callers. They start on demand and end with the template. A thread whose render panics ends, and the next call starts a new
//! one.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::machinery::{self, CompiledTemplate, TemplateConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, Value};
use omnigrpo_guard::{MachineFailure, guarded};

use super::{MAX_OUTPUT_BYTES, guard, invalid};

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

/// Bounds and the context to render. Without a context the template is only compiled.
type Job = (guard::Bounds, Option<Value>);

/// Source of a template, with the environment and the syntax for it.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) env: Environment<'static>,
    pub(super) syntax: SyntaxConfig,
    pub(super) source: String,
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
        self.ask((guard::RENDER, None)).map(drop)
    }

    pub(super) fn render(&self, bounds: guard::Bounds, context: Value) -> Rendered {
        self.ask((bounds, Some(context)))
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
        let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(guard::STACK_BYTES);
        thread.spawn(move || engine.serve(&asked, &answer))?;
        Ok(Self { jobs, answers })
    }
}

impl Engine {
    fn serve(&self, jobs: &Receiver<Job>, answer: &Sender<Rendered>) {
        let mut compiled = None;
        for (bounds, context) in jobs {
            guard::begin(bounds);
            let rendered = guarded(|| {
                if compiled.is_none() {
                    compiled = Some(self.compiled()?);
                }
                match (&compiled, context) {
                    (Some(compiled), Some(context)) => self.render(compiled, context),
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

    /// Parses the source and compiles it with bounds.
    fn compiled(&self) -> Result<CompiledTemplate<'_>, Error> {
        guard::check_source(&self.source, &self.syntax)?;
        let config = TemplateConfig {
            syntax_config: self.syntax.clone(),
            default_auto_escape: Arc::new(|_| AutoEscape::None),
        };
        let mut compiled = CompiledTemplate::new("template", &self.source, &config)?;
        compiled.instructions = guard::guarded(&compiled.instructions)?;
        for block in compiled.blocks.values_mut() {
            *block = guard::guarded(block)?;
        }
        Ok(compiled)
    }

    fn render(&self, compiled: &CompiledTemplate<'_>, context: Value) -> Result<String, Error> {
        let mut text = String::new();
        {
            let CompiledTemplate { instructions, blocks, initial_auto_escape, .. } = compiled;
            let mut output = machinery::make_string_output(&mut text);
            machinery::eval(
                &self.env,
                instructions,
                context,
                blocks,
                &mut output,
                initial_auto_escape.clone(),
            )?;
        }
        match text.len() {
            len if len > MAX_OUTPUT_BYTES => {
                Err(invalid(format!("writes {len} bytes, more than {MAX_OUTPUT_BYTES}")))
            }
            _ => Ok(text),
        }
    }
}
