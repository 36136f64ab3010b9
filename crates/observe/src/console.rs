//! Progress and one-line summaries for a terminal, or plain lines for a log file.

use std::borrow::Cow;
use std::fs::{File, create_dir_all};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anstyle::{AnsiColor, Style};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use omnigrpo_grpo::metric;
use omnigrpo_guard::inside;

use crate::events::Recorder;
use crate::run_dir::{names, replaced};
use crate::text::{count, escape, fit, now, span, wrap};
use crate::{Activity, Error, Event, Latest, Metric, latest_table};

/// Number of progress lines per stage in a plain log.
const PLAIN_PARTS: u64 = 10;
/// Longest time without a line in a plain log while work is in progress.
const PLAIN_EVERY: Duration = Duration::from_secs(60);
/// Shortest duration that is shown. Shorter times would only be noise.
const WORTH_TELLING: Duration = Duration::from_secs(5);
/// Interval at which bars are redrawn. The clock beside a bar keeps running while a step computes.
const TICK: Duration = Duration::from_millis(500);
/// Assumed width if the terminal does not report one, in columns.
const COLUMNS: usize = 80;

/// Indentation of the lines below the bar.
const INDENT: &str = "  ";
const STAGE: &str = "{prefix} {wide_bar} {pos}/{len}{beside}";
const BLOCK: &str = "{msg}";
const STEPS: &str = "{at} {wide_bar} {left}\n{doing}{numbers}";

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default().bold();
const BOLD: Style = Style::new().bold();

/// User-facing output of a run. Clones write to the same destination.
///
/// Text may come from rows, models and servers, so it is escaped before it reaches the terminal (see [`escape`]). Output errors,
/// such as a closed pipe, are ignored: training continues even if nobody reads the output.
#[derive(Clone)]
pub struct Console(Arc<Inner>);

struct Inner {
    sink: Sink,
    colour: bool,
    log: Mutex<Option<File>>,
    record: Mutex<Recorder>,
    last_line: Mutex<Instant>,
    plain_every: Duration,
    activity: Activity,
}

enum Sink {
    /// Bars, with a fixed width if it differs from that of the terminal.
    Terminal(MultiProgress, Option<usize>),
    Plain(Mutex<Box<dyn Write + Send>>),
    Listener(Mutex<Listener>),
}

type Listener = Box<dyn FnMut(Tone, &str) + Send>;

/// Meaning of a line for the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Course of the work.
    Note,
    /// Something that the user needs now, such as the address of a page.
    Notice,
    /// Something that the user should change.
    Warning,
    /// The reason why the work ended.
    Error,
}

impl Tone {
    /// Returns the name: `note`, `notice`, `warning` or `error`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the width of standard output in columns, if it is a terminal.
pub fn stdout_columns() -> Option<usize> {
    Some(usize::from(terminal_size::terminal_size_of(io::stdout())?.0.0))
}

impl Console {
    /// Writes to standard error: bars if it is a terminal, in colour if requested; plain lines otherwise.
    pub fn stderr(colour: bool) -> Self {
        if io::stderr().is_terminal() {
            let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
            Self::new(Sink::Terminal(bars, None), colour, PLAIN_EVERY)
        } else {
            Self::plain(io::stderr())
        }
    }

    /// Writes plain lines to `writer`.
    pub fn plain(out: impl Write + Send + 'static) -> Self {
        Self::plain_every(out, PLAIN_EVERY)
    }

    /// Passes each line with its meaning to `listener`.
    pub fn listener(listener: impl FnMut(Tone, &str) + Send + 'static) -> Self {
        Self::new(Sink::Listener(Mutex::new(Box::new(listener))), false, PLAIN_EVERY)
    }

    fn plain_every(out: impl Write + Send + 'static, every: Duration) -> Self {
        Self::new(Sink::Plain(Mutex::new(Box::new(out))), false, every)
    }

    fn new(sink: Sink, colour: bool, plain_every: Duration) -> Self {
        let (log, record, last_line) = (Mutex::new(None), Mutex::default(), Mutex::new(Instant::now()));
        let activity = Activity::default();
        Self(Arc::new(Inner { sink, colour, log, record, last_line, plain_every, activity }))
    }

    /// Also appends every later line to this file, with the time at which it was written.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn log_to(&self, path: &Path) -> Result<(), Error> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        dir.map_or(Ok(()), create_dir_all).map_err(|e| Error::io("create the directory of", path, e))?;
        let file = inside::open_to_write(path, File::options().create(true).append(true));
        *locked(&self.0.log) = Some(file.map_err(|e| Error::io("open the log", path, e))?);
        Ok(())
    }

    /// Also records every later [`Event`] in this file, and those before which are not in a file yet. The latter get this step.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn record_to(&self, path: &Path, step: u64) -> Result<(), Error> {
        locked(&self.0.record).open(path, step)
    }

    /// Waits until all events are on disk.
    ///
    /// # Errors
    /// Returns an error if one of them could not be written.
    pub fn sync_record(&self) -> Result<(), Error> {
        locked(&self.0.record).sync()
    }

    /// Ends the record of events. A later run can begin its own.
    pub fn end_record(&self) {
        locked(&self.0.record).close();
    }

    /// Records an event and shows its line. Without a step, it has the step in progress, or else that of the event before.
    pub fn event(&self, step: Option<u64>, event: &Event) {
        let (step, in_place) = locked(&self.0.record).add(step.or_else(|| self.0.activity.step()), event);
        if event.is_shown() {
            self.say(&event.line(step), event.tone());
        }
        if !in_place {
            self.warning(&replaced(names::EVENTS));
        }
    }

    /// Returns the width of the terminal in columns, or 80 without a terminal.
    pub fn width(&self) -> usize {
        let terminal = || Some(usize::from(terminal_size::terminal_size_of(io::stderr())?.0.0));
        match &self.0.sink {
            Sink::Terminal(_, columns) => columns.or_else(terminal).unwrap_or(COLUMNS).max(1),
            Sink::Plain(_) | Sink::Listener(_) => COLUMNS,
        }
    }

    /// Returns the current activity of the run.
    pub fn activity(&self) -> &Activity {
        &self.0.activity
    }

    /// Writes to the log file only, if there is one.
    pub fn log(&self, text: &str) {
        if let Some(log) = locked(&self.0.log).as_mut() {
            let now = now();
            let lines: String = escape(text).lines().map(|line| format!("{now} {line}\n")).collect();
            // Output errors are ignored, as the type documents.
            let _ = log.write_all(lines.as_bytes());
        }
    }

    /// Writes one or more lines, above any bars.
    pub fn line(&self, text: &str) {
        self.say(text, Tone::Note);
    }

    /// Writes a line that the user needs now, even where other lines are hidden.
    pub fn notice(&self, text: &str) {
        self.say(text, Tone::Notice);
    }

    /// Writes a notice without copying it to the log file, because it contains a secret.
    pub fn unlogged(&self, text: &str) {
        self.show(text, Tone::Notice, &[]);
    }

    /// Records a warning, and writes it with the prefix `warning:`.
    pub fn warning(&self, text: &str) {
        self.event(None, &Event::Warning { text: text.to_owned() });
    }

    /// Writes an error. The text already begins with `error:`.
    pub fn error(&self, text: &str) {
        self.say(text, Tone::Error);
    }

    fn say(&self, text: &str, tone: Tone) {
        self.log(text);
        let marks: &[_] = match tone {
            Tone::Note | Tone::Notice => &[],
            Tone::Warning => &[("warning:", YELLOW)],
            Tone::Error => &[("error:", RED)],
        };
        self.show(text, tone, marks);
    }

    /// Writes text. On a colour terminal, the first occurrence of each mark is drawn in its style.
    fn show(&self, text: &str, tone: Tone, marks: &[(&str, Style)]) {
        let text = escape(text);
        *locked(&self.0.last_line) = Instant::now();
        // Output errors are ignored, as the type documents.
        let _ = match &self.0.sink {
            Sink::Terminal(bars, _) => {
                let mut shown = wrap(&text, self.width());
                for (mark, style) in marks.iter().filter(|(mark, _)| self.0.colour && !mark.is_empty()) {
                    let painted = format!("{style}{mark}{style:#}");
                    shown = Cow::Owned(shown.replacen(mark, &painted, 1));
                }
                bars.println(shown)
            }
            Sink::Plain(out) => {
                let mut out = locked(out);
                out.write_all(format!("{text}\n").as_bytes()).and_then(|()| out.flush())
            }
            Sink::Listener(listener) => {
                locked(listener)(tone, &text);
                Ok(())
            }
        };
    }

    /// Starts a block of lines that are redrawn in place; `None` without a terminal.
    #[must_use]
    pub fn block(&self) -> Option<Block> {
        match &self.0.sink {
            Sink::Terminal(bars, _) => {
                Some(Block(bars.add(ProgressBar::new_spinner().with_style(style(BLOCK)))))
            }
            Sink::Plain(_) | Sink::Listener(_) => None,
        }
    }

    /// Starts a stage of `total` parts of about equal work.
    #[must_use]
    pub fn progress(&self, stage: &str, total: u64) -> Progress {
        self.start(stage, total, None)
    }

    /// Starts a stage with a part for each number, which is the work of the part in any unit. The remaining time follows from it.
    #[must_use]
    pub fn progress_of(&self, stage: &str, work: impl IntoIterator<Item = u64>) -> Progress {
        let sums = |sum: &mut u64, part: u64| {
            *sum = sum.saturating_add(part);
            Some(*sum)
        };
        let sums: Arc<[u64]> = work.into_iter().scan(0, sums).collect();
        self.start(stage, sums.len() as u64, Some(sums))
    }

    fn start(&self, stage: &str, total: u64, work: Option<Arc<[u64]>>) -> Progress {
        let (activity, started) = (Activity::default(), Instant::now());
        activity.enter("", started);
        let done = Arc::new(AtomicU64::new(0));
        let beside: Beside = {
            let (activity, done) = (activity.clone(), Arc::clone(&done));
            Arc::new(move || {
                let work = work_done(work.as_deref(), done.load(Ordering::Relaxed), total);
                beside(&activity, work, started.elapsed())
            })
        };
        let shown = match &self.0.sink {
            Sink::Terminal(bars, _) => {
                let beside = Arc::clone(&beside);
                let style = style(STAGE).with_key("beside", key(move || beside()));
                let bar = ProgressBar::new(total).with_style(style).with_prefix(stage.to_owned());
                Shown::bar(bars, bar)
            }
            Sink::Plain(_) | Sink::Listener(_) => {
                let (stage, done, beside) = (stage.to_owned(), Arc::clone(&done), Arc::clone(&beside));
                Shown::lines(self, move || {
                    format!("{stage}: {}/{total}{}", done.load(Ordering::Relaxed), beside())
                })
            }
        };
        Progress { console: self.clone(), stage: stage.to_owned(), total, done, beside, activity, shown }
    }

    /// Shows the progress of a run of `total` steps, of which `done` are complete. Progress within a step comes from
    /// [`Self::activity`].
    #[must_use]
    pub fn steps(&self, done: u64, total: u64) -> Steps {
        let activity = self.0.activity.clone();
        activity.begin(done, total, Instant::now());
        let latest = Arc::new(Mutex::new(Latest::default()));
        let shown = match &self.0.sink {
            Sink::Terminal(bars, _) => {
                let (at, left, doing) = (activity.clone(), activity.clone(), activity.clone());
                let console = Arc::downgrade(&self.0);
                let width = move || console.upgrade().map_or(COLUMNS, |inner| Console(inner).width());
                let (numbers, width_of_numbers) = (Arc::clone(&latest), width.clone());
                let style = style(STEPS)
                    .with_key(
                        "at",
                        key(move || at.step().map_or(String::new(), |s| format!("step {s}/{total}"))),
                    )
                    .with_key("left", key(move || share_and_eta(&left)))
                    .with_key(
                        "doing",
                        key(move || {
                            fit(&format!("{INDENT}{}", doing.doing(Instant::now())), width()).into_owned()
                        }),
                    )
                    .with_key("numbers", key(move || under_bar(&locked(&numbers), width_of_numbers())));
                let bar = ProgressBar::new(total).with_style(style).with_position(done);
                Shown::bar(bars, bar)
            }
            Sink::Plain(_) | Sink::Listener(_) => {
                let activity = activity.clone();
                Shown::lines(self, move || activity.line(Instant::now()))
            }
        };
        Steps { activity, latest, shown }
    }

    /// Writes the summary of one logging window on one line; see [`summary_line`].
    pub fn summary(&self, step: u64, num_steps: u64, metrics: &[Metric]) {
        let eta = self.0.activity.left(Instant::now()).filter(|_| step < num_steps);
        let line = summary_line(step, num_steps, metrics, eta);
        let mut parts = line.split(" | ");
        let at = parts.next().unwrap_or_default();
        let reward = parts.next().filter(|part| part.starts_with("reward")).unwrap_or_default();
        let reward = reward.split(':').next().unwrap_or_default();
        self.log(&line);
        self.show(&line, Tone::Note, &[(at, BOLD), (reward, BOLD)]);
    }
}

/// Lines that are redrawn in place. After a drop, the last lines remain on the screen.
pub struct Block(ProgressBar);

impl Block {
    /// Replaces the displayed lines.
    pub fn show(&self, text: &str) {
        self.0.set_message(escape(text).into_owned());
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// Parses a template and adds the fields that it uses. A test checks that every template parses.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸─")
}

fn key(
    text: impl Fn() -> String + Clone + Send + Sync + 'static,
) -> impl Fn(&ProgressState, &mut dyn std::fmt::Write) + Clone + Send + Sync {
    move |_, out| {
        // Writing to a string cannot fail.
        let _ = out.write_str(&text());
    }
}

fn share_and_eta(activity: &Activity) -> String {
    let Some((done, total)) = activity.steps() else { return String::new() };
    let mut out = format!("{:.0} %", 100.0 * done as f64 / total.max(1) as f64);
    if let Some(left) = activity.left(Instant::now()) {
        out.push_str(&format!(" · eta {}", span(left)));
    }
    out
}

/// Formats the numbers of the last step for display below the bar. Each line begins with a newline.
fn under_bar(latest: &Latest, width: usize) -> String {
    let table = latest_table(&[], &[(Vec::new(), latest)], width.saturating_sub(INDENT.len()));
    table.lines().map(|line| format!("\n{INDENT}{line}")).collect()
}

/// Function that returns the text beside a bar.
type Beside = Arc<dyn Fn() -> String + Send + Sync>;

/// Returns the work that is done, and all work. `sums` are the sums of the work of each part and those before it.
fn work_done(sums: Option<&[u64]>, done: u64, total: u64) -> (u64, u64) {
    let sum = |sums: &[u64], parts: u64| {
        parts.checked_sub(1).and_then(|at| sums.get(usize::try_from(at).ok()?)).copied().unwrap_or(0)
    };
    sums.map_or((done, total), |sums| (sum(sums, done), sum(sums, total)))
}

/// Formats the text beside the bar: ` · 4.1 k tokens · 12 tok/s · 2 min 0 s left`. Parts without a value are left out.
fn beside(activity: &Activity, (done, total): (u64, u64), elapsed: Duration) -> String {
    let mut out = String::new();
    let tokens = activity.tokens();
    if tokens > 0 {
        let rate = tokens as f64 / elapsed.as_secs_f64().max(1e-3);
        out.push_str(&format!(" · {} tokens · {} tok/s", count(tokens as f64), count(rate)));
    }
    if elapsed >= WORTH_TELLING && done < total {
        let left = elapsed.as_secs_f64() / done as f64 * (total - done) as f64;
        match Duration::try_from_secs_f64(left) {
            Ok(left) => out.push_str(&format!(" · {} left", span(left))),
            Err(_) => out.push_str(&format!(" · {}", span(elapsed))),
        }
    }
    out
}

/// Display of work in progress. It ends when the value is dropped.
enum Shown {
    Bar(MultiProgress, ProgressBar),
    /// Thread that writes a line after a period without output.
    Lines(Arc<(Mutex<bool>, Condvar)>, Option<JoinHandle<()>>),
}

impl Shown {
    fn bar(bars: &MultiProgress, bar: ProgressBar) -> Self {
        let bar = bars.add(bar);
        bar.enable_steady_tick(TICK);
        Self::Bar(bars.clone(), bar)
    }

    fn lines(console: &Console, line: impl Fn() -> String + Send + 'static) -> Self {
        let over = Arc::new((Mutex::new(false), Condvar::new()));
        let (console, watched) = (console.clone(), Arc::clone(&over));
        let work = move || {
            let every = console.0.plain_every;
            let mut is_over = locked(&watched.0);
            while !*is_over {
                let quiet = locked(&console.0.last_line).elapsed();
                if quiet >= every {
                    console.line(&line());
                }
                let wait = every.saturating_sub(quiet).max(Duration::from_millis(1));
                let woken = watched.1.wait_timeout(is_over, wait);
                is_over = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
        };
        // If the thread cannot start, only the periodic lines are missing.
        Self::Lines(over, std::thread::Builder::new().name("progress".to_owned()).spawn(work).ok())
    }

    fn set_position(&self, done: u64) {
        if let Self::Bar(_, bar) = self {
            bar.set_position(done);
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        match self {
            Self::Bar(bars, bar) => {
                bar.finish_and_clear();
                bars.remove(bar);
            }
            Self::Lines(over, thread) => {
                *locked(&over.0) = true;
                over.1.notify_all();
                if let Some(thread) = thread.take() {
                    // The thread ends after its current wait. A panic in it has already been reported.
                    let _ = thread.join();
                }
            }
        }
    }
}

/// A stage in progress. Dropping it removes its bar.
pub struct Progress {
    console: Console,
    stage: String,
    total: u64,
    done: Arc<AtomicU64>,
    beside: Beside,
    activity: Activity,
    shown: Shown,
}

impl Progress {
    /// Counts another `parts` parts as done.
    pub fn advance(&mut self, parts: u64) {
        let before = self.done.load(Ordering::Relaxed);
        let done = before.saturating_add(parts).min(self.total);
        self.done.store(done, Ordering::Relaxed);
        self.shown.set_position(done);
        if let Shown::Lines(..) = self.shown {
            let tenth =
                |done: u64| u128::from(done) * u128::from(PLAIN_PARTS) / u128::from(self.total.max(1));
            if tenth(done) > tenth(before) {
                let beside = (self.beside)();
                self.console.line(&format!("{}: {done}/{}{beside}", self.stage, self.total));
            }
        }
    }

    /// Returns the second counter of the stage: the number of sampled tokens.
    pub fn activity(&self) -> &Activity {
        &self.activity
    }
}

/// Step-by-step progress of a run. Dropping it removes its bar.
pub struct Steps {
    activity: Activity,
    latest: Arc<Mutex<Latest>>,
    shown: Shown,
}

impl Steps {
    /// Counts one more step as done and shows its metrics.
    pub fn advance(&self, metrics: &[Metric]) {
        let took = self.activity.step_done(Instant::now());
        if let Shown::Bar(..) = self.shown {
            let time = (metric::STEP_TIME.to_owned(), Some(took.as_secs_f64()));
            locked(&self.latest).add(metrics.iter().cloned().chain([time]).collect());
        }
        if let Some((done, _)) = self.activity.steps() {
            self.shown.set_position(done);
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.activity.end();
    }
}

/// Formats a summary: `step 10/300 | reward 0.697: accuracy 0.41, format 0.98 | zero-variance 38 % | clipped 12 % | kl 0.0031 |
/// length 45.2 | 1.23 s | eta 3 h 12 min`. Without rewards, it shows the loss instead. The loss of GRPO is otherwise not shown,
/// because it stays near 0 whatever the model learns. Values that are missing or `None` are left out.
pub fn summary_line(step: u64, num_steps: u64, metrics: &[Metric], eta: Option<Duration>) -> String {
    let value = |name: &str| metrics.iter().find(|(key, _)| key == name).and_then(|(_, value)| *value);
    let mut parts = vec![format!("step {step}/{num_steps}")];
    if metrics.iter().any(|(key, _)| key == metric::REWARD) {
        let named: Vec<String> = metrics
            .iter()
            .filter_map(|(key, value)| {
                let name = key.strip_prefix("rewards/")?.strip_suffix("/mean")?;
                Some(format!("{name} {:.2}", (*value)?))
            })
            .collect();
        let colon = if named.is_empty() { "" } else { ": " };
        let total = value(metric::REWARD).map_or("none".to_owned(), |v| format!("{v:.3}"));
        parts.push(format!("reward {total}{colon}{}", named.join(", ")));
    } else {
        parts.extend(value(metric::LOSS).map(|v| format!("loss {v:.4}")));
    }
    let percent = |name: &str| value(name).map(|v| format!("{:.0} %", 100.0 * v));
    parts.extend(percent(metric::ZERO_STD).map(|v| format!("zero-variance {v}")));
    parts.extend(percent(metric::CLIPPED).map(|v| format!("clipped {v}")));
    parts.extend(value(metric::KL).map(|v| format!("kl {v:.4}")));
    parts.extend(value(metric::MEAN_LENGTH).map(|v| format!("length {v:.1}")));
    parts.extend(value(metric::STEP_TIME).map(|v| format!("{v:.2} s")));
    parts.extend(eta.map(|eta| format!("eta {}", span(eta))));
    parts.join(" | ")
}

#[cfg(test)]
mod tests {
    use indicatif::InMemoryTerm;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Buffer {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

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
        buffer.text()
    }

    /// Returns an in-memory terminal of the given width, and a console on it.
    fn terminal(columns: u16, colour: bool) -> (InMemoryTerm, Console) {
        let screen = InMemoryTerm::new(20, columns);
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        let sink = Sink::Terminal(MultiProgress::with_draw_target(target), Some(columns.into()));
        (screen, Console::new(sink, colour, PLAIN_EVERY))
    }

    fn metrics(values: &[(&str, Option<f64>)]) -> Vec<Metric> {
        values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    fn of_a_step() -> Vec<Metric> {
        metrics(&[
            ("loss", Some(0.000_01)),
            ("reward", Some(0.6951)),
            ("rewards/accuracy/mean", Some(0.41)),
            ("rewards/accuracy/std", Some(0.5)),
            ("rewards/judge/mean", None),
            ("rewards/format/mean", Some(0.98)),
            ("frac_reward_zero_std", Some(0.375)),
            ("kl", None),
            ("completions/mean_length", Some(45.25)),
            ("completions/clipped_ratio", Some(0.12)),
            ("grad_norm", Some(1.0)),
            ("step_time", Some(1.234)),
        ])
    }

    const LINE: &str = "step 10/300 | reward 0.695: accuracy 0.41, format 0.98 | zero-variance 38 % | clipped 12 % | \
                        length 45.2 | 1.23 s";

    #[test]
    fn a_step_shows_rewards_by_name_and_no_loss_that_says_nothing() {
        assert_eq!(printed(|console| console.summary(10, 300, &of_a_step())), format!("{LINE}\n"));
        let eta = Some(Duration::from_secs(11_520));
        assert_eq!(summary_line(10, 300, &of_a_step(), eta), format!("{LINE} | eta 3 h 12 min"));
        // If no reward applied, the summary states this and does not show the loss instead.
        let none = metrics(&[("loss", Some(0.0)), ("reward", None)]);
        assert_eq!(summary_line(1, 2, &none, None), "step 1/2 | reward none");
        let imitation = metrics(&[("loss", Some(0.012_34)), ("step_time", Some(2.0))]);
        assert_eq!(summary_line(1, 2, &imitation, None), "step 1/2 | loss 0.0123 | 2.00 s");
        assert_eq!(summary_line(1, 2, &[], None), "step 1/2");
    }

    #[test]
    fn step_lines_tell_the_time_left() {
        let buffer = Buffer::default();
        let console = Console::plain(buffer.clone());
        let steps = console.steps(0, 3);
        std::thread::sleep(Duration::from_millis(10));
        steps.advance(&[]);
        console.summary(1, 3, &[]);
        (0..2).for_each(|_| steps.advance(&[]));
        console.summary(3, 3, &[]);
        assert_eq!(buffer.text(), "step 1/3 | eta 0 s\nstep 3/3\n");
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
            progress.advance(1);
            progress.advance(7);
            console.progress("nothing", 0).advance(1);
        });
        assert_eq!(log, "steps: 1/3\nsteps: 3/3\n");
    }

    #[test]
    fn the_remaining_time_follows_the_work_and_not_the_number_of_parts() {
        let sums = [1, 2, 3, 100];
        let left =
            |done| beside(&Activity::default(), work_done(Some(&sums), done, 4), Duration::from_secs(6));
        assert_eq!(left(3), " · 3 min 14 s left");
        assert_eq!((work_done(Some(&sums), 0, 4), work_done(Some(&[]), 0, 0)), ((0, 100), (0, 0)));
        assert_eq!(work_done(None, 3, 4), (3, 4));
        let log = printed(|console| console.progress_of("scoring", [5, 0, 9]).advance(2));
        assert_eq!(log, "scoring: 2/3\n");
    }

    /// A log shows that the run is alive and what it is doing, however long a step takes.
    #[test]
    fn a_plain_log_has_a_line_now_and_then_within_a_step() {
        let buffer = Buffer::default();
        let console = Console::plain_every(buffer.clone(), Duration::from_millis(20));
        let steps = console.steps(12, 300);
        console.activity().enter("rollout", Instant::now());
        console.activity().parts("completions", 36, 64);
        console.activity().token(true);
        std::thread::sleep(Duration::from_millis(200));
        drop(steps);
        let text = buffer.text();
        let first = "step 13/300: rollout · completions 37/64 · 1 token · 0 s in this step";
        assert_eq!(text.lines().next(), Some(first));
        assert!((2..=11).contains(&text.lines().count()), "{text}");

        let console = Console::plain_every(buffer.clone(), Duration::from_millis(20));
        let mut progress = console.progress("evaluating", 100);
        progress.advance(1);
        std::thread::sleep(Duration::from_millis(60));
        drop(progress);
        assert_eq!(buffer.text().lines().last(), Some("evaluating: 1/100"));
        let settled = buffer.text();
        std::thread::sleep(Duration::from_millis(60));
        assert_eq!(buffer.text(), settled, "nothing is written once the stage is over");
    }

    #[test]
    fn bars_show_the_run_the_step_and_what_it_does() {
        let (screen, console) = terminal(80, false);
        let steps = console.steps(75, 300);
        let activity = console.activity();
        activity.enter("rollout", Instant::now());
        activity.parts("completions", 37, 64);
        (0..4100).for_each(|_| activity.token(false));
        console.line("above the bar");
        std::thread::sleep(2 * TICK);
        let shown = screen.contents();
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 3, "{shown}");
        assert_eq!(lines[0], "above the bar");
        assert!(lines[1].starts_with("step 76/300 ━━━") && lines[1].ends_with("─ 25 %"), "{shown}");
        assert!(lines[2].starts_with("  rollout · completions 37/64 · 4.1 k tokens"), "{shown}");
        steps.advance(&of_a_step()[..8]);
        steps.advance(&metrics(&[
            ("reward", Some(0.9)),
            ("kl", Some(0.5)),
            ("completions/mean_length", Some(7.0)),
        ]));
        activity.enter("backward", Instant::now());
        std::thread::sleep(2 * TICK);
        let shown = screen.contents();
        let lines: Vec<&str> = shown.lines().map(str::trim_end).collect();
        assert_eq!(lines.len(), 5, "{shown}");
        assert!(lines[1].starts_with("step 78/300 ━━━") && lines[2].starts_with("  backward · "), "{shown}");
        assert_eq!(lines[3], "  reward  course      kl  length  s/step");
        assert!(lines[4].starts_with("  0.900       ▁█  0.5000     7.0    "), "{shown}");
        console.summary(76, 300, &of_a_step());
        let mut stage = console.progress("evaluating", 4);
        stage.advance(3);
        std::thread::sleep(TICK);
        assert!(
            screen.contents().lines().any(|line| line.starts_with("evaluating ━━") && line.ends_with(" 3/4")),
            "{}",
            screen.contents()
        );
        drop(stage);
        drop(steps);
        // The lines remain. The line of the step is broken between words and is not overwritten by the bars.
        let shown = screen.contents();
        let (first, second) = shown.split_once('\n').unwrap();
        assert_eq!(first, "above the bar");
        assert_eq!(
            second.replace("\n  ", " ").split(" | eta").next(),
            Some(&*LINE.replace("10/300", "76/300"))
        );
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    }

    #[test]
    fn a_block_is_drawn_in_its_place_at_one_go() {
        let (screen, console) = terminal(80, false);
        let block = console.block().unwrap();
        for (text, shown) in [("a\nb\u{1b}", "a\nb\\u{1b}"), ("c\nd", "c\nd"), ("e", "e")] {
            screen.moves_since_last_check();
            block.show(text);
            assert_eq!(screen.contents(), shown);
            assert_eq!(screen.moves_since_last_check().matches("Flush").count(), 1, "{text}");
        }
        drop(block);
        assert_eq!(screen.contents(), "e");
    }

    #[test]
    fn nothing_from_outside_acts_on_the_terminal() {
        let (screen, console) = terminal(80, true);
        console.line("id \u{1b}]0;x\u{7}\u{1b}[2J\r\u{e}end");
        console.warning("from a server: \u{1b}[31m");
        let shown = screen.contents();
        assert_eq!(shown, "id \\u{1b}]0;x\\u{7}\\u{1b}[2J\\r\\u{e}end\nwarning: from a server: \\u{1b}[31m");
        assert_eq!(printed(|console| console.line("\u{1b}[1m")), "\\u{1b}[1m\n");
    }

    #[test]
    fn colour_is_for_terminals_that_want_it() {
        let coloured = |colour| {
            let (screen, console) = terminal(40, colour);
            console.warning("mind");
            console.error("error: no");
            console.summary(1, 2, &metrics(&[("reward", Some(1.0))]));
            assert_eq!(screen.contents(), "warning: mind\nerror: no\nstep 1/2 | reward 1.000");
            String::from_utf8(screen.contents_formatted()).unwrap()
        };
        assert!(coloured(true).contains("33") && coloured(true).contains("31"), "{:?}", coloured(true));
        assert!(!coloured(false).contains("33m") && !coloured(false).contains("31m"));
        assert_eq!(printed(|console| console.warning("mind")), "warning: mind\n");
    }

    #[test]
    fn the_log_has_warnings_too_whoever_holds_the_console() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/log.txt");
        let console = Console::plain(Buffer::default());
        let earlier = console.clone();
        console.log_to(&path).unwrap();
        earlier.warning("again\u{1b}");
        console.unlogged("secret");
        let log = std::fs::read_to_string(&path).unwrap();
        assert!(log.ends_with(" warning: again\\u{1b}\n") && log.starts_with("20"), "{log}");
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
