//! Progress and one-line summaries for a person at a terminal, or plain lines for a log file.

use std::fs::{File, OpenOptions, create_dir_all};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{Error, Metric};

/// A progress line of a plain log appears each time another such part is done.
const PLAIN_PARTS: u64 = 10;
const TEMPLATE: &str = "{prefix} {bar:30} {pos}/{len} {msg} [{elapsed} < {eta}]";

/// Where a run talks to its user. Clones write to the same place.
///
/// Output that fails (a closed pipe) is dropped: training does not stop because nobody watches.
#[derive(Clone)]
pub struct Console {
    sink: Sink,
    log: Option<Arc<Mutex<File>>>,
}

#[derive(Clone)]
enum Sink {
    Terminal(MultiProgress),
    Plain(Arc<Mutex<dyn Write + Send>>),
}

impl Console {
    /// Standard error: bars if it is a terminal, plain lines otherwise.
    #[must_use]
    pub fn stderr() -> Self {
        if io::stderr().is_terminal() {
            let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
            Self { sink: Sink::Terminal(bars), log: None }
        } else {
            Self::plain(io::stderr())
        }
    }

    /// Plain lines to a writer.
    #[must_use]
    pub fn plain(out: impl Write + Send + 'static) -> Self {
        Self { sink: Sink::Plain(Arc::new(Mutex::new(out))), log: None }
    }

    /// The same console, whose lines are also appended to a file, each with the time it was written.
    ///
    /// # Errors
    /// A file that cannot be made.
    pub fn with_log(&self, path: &Path) -> Result<Self, Error> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        dir.map_or(Ok(()), create_dir_all).map_err(|e| Error::io("create the directory of", path, e))?;
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|e| Error::io("open the log", path, e))?;
        Ok(Self { sink: self.sink.clone(), log: Some(Arc::new(Mutex::new(file))) })
    }

    /// Writes to the log alone, if there is one.
    pub fn log(&self, text: &str) {
        if let Some(log) = &self.log {
            let now = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap_or_default();
            let lines: String = text.lines().map(|line| format!("{now} {line}\n")).collect();
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            // See the type: output is best effort.
            let _ = log.write_all(lines.as_bytes());
        }
    }

    /// Writes a line (or several), above the bars where there are any.
    pub fn line(&self, text: &str) {
        self.log(text);
        // See the type: output is best effort.
        let _ = match &self.sink {
            Sink::Terminal(bars) => bars.println(text),
            Sink::Plain(out) => {
                let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
                out.write_all(format!("{text}\n").as_bytes()).and_then(|()| out.flush())
            }
        };
    }

    /// Starts a stage of `total` parts.
    #[must_use]
    pub fn progress(&self, stage: &str, total: u64) -> Progress {
        let bar = match &self.sink {
            Sink::Terminal(bars) => {
                let style = ProgressStyle::with_template(TEMPLATE);
                // A test shows that the template parses.
                let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
                Some(bars.add(ProgressBar::new(total).with_style(style).with_prefix(stage.to_owned())))
            }
            Sink::Plain(_) => None,
        };
        Progress { console: self.clone(), stage: stage.to_owned(), total, done: 0, bar }
    }

    /// One line for a logging window; see [`summary_line`].
    pub fn summary(&self, step: u64, num_steps: u64, metrics: &[Metric]) {
        self.line(&summary_line(step, num_steps, metrics));
    }
}

/// A running stage. Dropping it removes its bar.
pub struct Progress {
    console: Console,
    stage: String,
    total: u64,
    done: u64,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Counts `parts` more as done.
    pub fn advance(&mut self, parts: u64) {
        let before = self.done;
        self.done = self.done.saturating_add(parts).min(self.total);
        match &self.bar {
            Some(bar) => bar.set_position(self.done),
            None => {
                let tenth =
                    |done: u64| u128::from(done) * u128::from(PLAIN_PARTS) / u128::from(self.total.max(1));
                if tenth(self.done) > tenth(before) {
                    self.console.line(&format!("{}: {}/{}", self.stage, self.done, self.total));
                }
            }
        }
    }

    /// Shows a short text beside the bar; a plain log leaves it out.
    pub fn message(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(text.to_owned());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            if let Sink::Terminal(bars) = &self.console.sink {
                bars.remove(bar);
            }
        }
    }
}

/// `step 10/300 | loss 0.0123 | reward 0.512 | kl 0.0031 | length 45.2 | 1.23 s`; metrics that are missing or `None`
/// are left out.
#[must_use]
pub fn summary_line(step: u64, num_steps: u64, metrics: &[Metric]) -> String {
    let value = |name: &str| metrics.iter().find(|(key, _)| key == name).and_then(|(_, value)| *value);
    let mut parts = vec![format!("step {step}/{num_steps}")];
    let shown = [("loss", "loss", 4), ("reward", "reward", 3), ("kl", "kl", 4)];
    for (name, label, digits) in shown {
        parts.extend(value(name).map(|v| format!("{label} {v:.digits$}")));
    }
    parts.extend(value("completions/mean_length").map(|v| format!("length {v:.1}")));
    parts.extend(value("step_time").map(|v| format!("{v:.2} s")));
    parts.join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn printed(use_console: impl FnOnce(&Console)) -> String {
        let buffer = Buffer::default();
        use_console(&Console::plain(buffer.clone()));
        String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn summary_shows_what_there_is() {
        let metrics: Vec<Metric> = [
            ("loss", Some(0.012_34)),
            ("reward", Some(0.5125)),
            ("kl", None),
            ("completions/mean_length", Some(45.25)),
            ("grad_norm", Some(1.0)),
            ("step_time", Some(1.234)),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        let expected = "step 10/300 | loss 0.0123 | reward 0.512 | length 45.2 | 1.23 s\n";
        assert_eq!(printed(|console| console.summary(10, 300, &metrics)), expected);
        assert_eq!(summary_line(1, 2, &[]), "step 1/2");
    }

    #[test]
    fn a_plain_log_gets_ten_lines_per_stage_however_many_parts() {
        let log = printed(|console| {
            let mut progress = console.progress("data check", 1000);
            (0..1000).for_each(|_| progress.advance(1));
        });
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines.len(), 10);
        assert_eq!((lines[0], lines[9]), ("data check: 100/1000", "data check: 1000/1000"));

        let log = printed(|console| {
            let mut progress = console.progress("steps", 3);
            progress.message("not in a log");
            progress.advance(1);
            progress.advance(7);
            console.progress("nothing", 0).advance(1);
        });
        assert_eq!(log, "steps: 1/3\nsteps: 3/3\n");
    }

    #[test]
    fn the_bar_template_parses_and_bars_count() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
        let hidden = MultiProgress::with_draw_target(ProgressDrawTarget::hidden());
        let mut progress = Console { log: None, sink: Sink::Terminal(hidden) }.progress("steps", 4);
        progress.advance(3);
        progress.message("reward 0.5");
        let bar = progress.bar.clone().unwrap();
        assert_eq!((bar.position(), bar.length(), bar.message()), (3, Some(4), "reward 0.5".to_owned()));
        drop(progress);
        assert!(bar.is_finished());
    }

    #[test]
    fn a_closed_pipe_does_not_stop_the_run() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::from(io::ErrorKind::BrokenPipe))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        Console::plain(Closed).line("text");
    }
}
