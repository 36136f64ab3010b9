//! `cmd:"program arguments"`: a program that reads requests as JSON lines and writes answers as JSON lines.
//!
//! Each process of the pool is started once and kept. If a process dies or does not answer in time, it is killed with its child
//! processes, started again, and given the request again, so that no step is lost. Its stderr goes to the log, and the last lines
//! go into the error. The process ends with this process.
//!
//! `FILE.py:FUNCTION` is also such a program: Python with a helper that serves the function.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{
    Answer, ExternalOptions, Failure, Log, Request, StatedRange, answer_of, attempts, excerpt,
    python_function, redacted, rows_name, same_id, spread, values,
};
use crate::contract::Logged;
use crate::{Reward, RewardError, RewardInput, RewardOptions};

/// Maximum length of an answer line in bytes. Longer lines are refused.
const MAX_LINE_BYTES: u64 = 64 << 20;
const STDERR_LINES: usize = 20;
/// Maximum length of a line of stderr. The rest of the line is dropped.
const STDERR_LINE_BYTES: usize = 4096;
/// Text of the helper that serves a function of a Python file: `python3 -c HELPER FILE.py:FUNCTION`.
const PYTHON_HELPER: &str = include_str!("../../assets/omnigrpo_reward.py");
/// Time that a process gets to exit after its stdin is closed.
const GOODBYE: Duration = Duration::from_millis(300);

struct CommandReward {
    name: String,
    options: ExternalOptions,
    program: Program,
    log: Log,
    stated: StatedRange,
}

/// Processes of one program, each started when it is first needed and kept.
pub(super) struct Program {
    arguments: Vec<String>,
    timeout: Duration,
    /// One slot per process. A slot is empty before its first use and after a failure.
    workers: Vec<Mutex<Option<Worker>>>,
    next_id: AtomicU64,
}

impl Program {
    /// Starts the first process, so that a missing program is found before training.
    pub(super) fn start(arguments: Vec<String>, options: &ExternalOptions) -> std::io::Result<Self> {
        let first = Worker::start(&arguments)?;
        let workers = (1..options.pool_size.max(1)).map(|_| Mutex::new(None));
        let workers = std::iter::once(Mutex::new(Some(first))).chain(workers).collect();
        Ok(Self { arguments, timeout: options.timeout, workers, next_id: AtomicU64::new(0) })
    }

    /// Sends the request with a new id to the process at `place`, and reads its answer line. After a failure, the process ends.
    pub(super) fn exchange<R: Serialize, T>(
        &self,
        place: usize,
        request: impl FnOnce(u64) -> R,
        read: impl FnOnce(&str, u64) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut slot = locked(&self.workers[place % self.workers.len()]);
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let worker = match &mut *slot {
            Some(worker) => worker,
            None => slot.insert(Worker::start(&self.arguments).map_err(|error| {
                Failure::Passing(format!("cannot start `{}`: {error}", self.arguments[0]))
            })?),
        };
        let answered = worker.exchange(&request(id), self.timeout).and_then(|line| read(&line, id));
        if answered.is_err() {
            // The next line of this process may belong to the failed request.
            *slot = None;
        }
        answered
    }
}

/// Reads an answer line.
pub(super) fn parsed<T: DeserializeOwned>(line: &str) -> Result<T, Failure> {
    answer_of(line, |error| {
        format!(
            "not an answer on its stdout ({error}): `{}`; other output belongs on stderr",
            excerpt(line.trim_end())
        )
    })
}

/// Splits the command of `cmd:…` into the program and its arguments.
pub(super) fn split(command: &str) -> Option<Vec<String>> {
    // A shell may have kept the quotes of cmd:"…".
    let command = command.trim();
    let command = command.strip_prefix('"').and_then(|inside| inside.strip_suffix('"')).unwrap_or(command);
    shlex::split(command).filter(|arguments| !arguments.is_empty())
}

pub(super) fn reward(
    command: &str,
    name: Option<&str>,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    let spec = redacted(&format!("cmd:{}", command.trim().trim_matches('"')));
    let arguments = split(command).ok_or_else(|| {
        let what = "expected a program and its arguments, with closed quotes".to_owned();
        RewardError::Setting { reward: spec.clone(), what }
    })?;
    let name = name.map_or_else(|| default_name(&arguments), str::to_owned);
    started(spec, name, arguments, options)
}

/// Creates a reward from a function of a Python file with TRL's signature.
pub(super) fn python_reward(
    file: &str,
    function: &str,
    name: Option<&str>,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    let spec = format!("{file}:{function}");
    match python_program(file, function, &options.external) {
        Ok(arguments) => started(spec, name.unwrap_or(function).to_owned(), arguments, options),
        Err(what) => Err(RewardError::Setting { reward: spec, what }),
    }
}

/// Returns the arguments that start Python with the helper for a function or a class of a file.
///
/// # Errors
/// Returns a description of the problem if there is no such file.
pub(super) fn python_program(
    file: &str,
    name: &str,
    options: &ExternalOptions,
) -> Result<Vec<String>, String> {
    if !std::path::Path::new(file).is_file() {
        return Err(format!(
            "no such file: {file}; expected FILE.py:NAME, the path from the working directory"
        ));
    }
    Ok([&options.python, "-c", PYTHON_HELPER, &format!("{file}:{name}")].map(str::to_owned).to_vec())
}

fn started(
    spec: String,
    name: String,
    arguments: Vec<String>,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    let (options, program) = (options.external.clone(), arguments[0].clone());
    let program = Program::start(arguments, &options).map_err(|source| RewardError::NotStarted {
        reward: spec,
        program,
        source,
    })?;
    Ok(Box::new(CommandReward {
        name,
        options,
        program,
        log: Log::default(),
        stated: StatedRange::default(),
    }))
}

/// Returns "my_reward" for `python my_reward.py`, or the name of the function if an argument contains it.
fn default_name(arguments: &[String]) -> String {
    if let Some((_, function)) = arguments.iter().find_map(|argument| python_function(argument)) {
        return function.to_owned();
    }
    let script = arguments.iter().find(|argument| argument.contains('.') && !argument.starts_with('-'));
    let path = std::path::Path::new(script.unwrap_or(&arguments[0]));
    path.file_stem().map_or_else(|| "cmd".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

impl Reward for CommandReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn range(&self) -> (f64, f64) {
        self.options.range.unwrap_or_else(|| self.stated.get())
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        self.log.take();
        spread(batch, self.options.batch_size, self.program.workers.len(), |worker, range, rows| {
            let named = rows_name(&range, batch);
            let ask = || self.ask(worker, rows, false);
            let (values, logged) = attempts(&self.name, &named, &self.options, Duration::ZERO, ask)?;
            self.log.add(range, logged);
            Ok(values)
        })
    }

    fn take_logged(&self) -> Logged {
        self.log.take()
    }

    fn probe(&self, group: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        // An error before the first step is not a temporary problem.
        let once = ExternalOptions { retries: 0, ..self.options.clone() };
        let named = rows_name(&(0..group.len()), group);
        Ok(attempts(&self.name, &named, &once, Duration::ZERO, || self.ask(0, group, true))?.0)
    }
}

impl CommandReward {
    fn ask(
        &self,
        worker: usize,
        rows: &[RewardInput<'_>],
        probe: bool,
    ) -> Result<(Vec<Option<f64>>, Logged), Failure> {
        let read = |line: &str, id: u64| {
            let answer: Answer = parsed(line)?;
            same_id(answer.id, id)?;
            self.stated.take(answer.range);
            values(answer, rows.len())
        };
        self.program.exchange(worker, |id| Request::new(id, rows, &self.options, probe), read)
    }
}

/// A running program. Each pipe has a thread, so that the time limit also applies when a write blocks on a full pipe.
struct Worker {
    child: Child,
    /// True after the first answer.
    answered: bool,
    /// True until the child has been waited for. Until then, no other process group can have its id.
    group_is_ours: bool,
    requests: Option<Sender<Vec<u8>>>,
    answers: Receiver<std::io::Result<String>>,
    stderr: Arc<Mutex<VecDeque<String>>>,
    /// Thread that reads the child's stderr until it is closed.
    stderr_reader: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    fn start(arguments: &[String]) -> std::io::Result<Self> {
        let mut command = Command::new(&arguments[0]);
        command.args(&arguments[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        {
            // The child gets its own process group. Ctrl-C then reaches only the trainer, which still needs its scorers, and a
            // kill also reaches the processes that the program started.
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
        }
        let mut child = spawn(command)?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            return Err(std::io::Error::other("the program has no pipes"));
        };
        let (requests, to_write) = channel();
        let (read, answers) = sync_channel(1);
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let mut worker = Self {
            child,
            answered: false,
            group_is_ours: true,
            requests: Some(requests),
            answers,
            stderr: Arc::clone(&lines),
            stderr_reader: None,
        };
        let thread = |name: &str| std::thread::Builder::new().name(format!("reward {name}"));
        thread("stdin").spawn(move || write_requests(stdin, &to_write))?;
        thread("stdout").spawn(move || {
            let mut reader = BufReader::new(stdout);
            while let Some(line) = next_line(&mut reader) {
                if read.send(line).is_err() {
                    return;
                }
            }
        })?;
        let reader = thread("stderr").spawn(move || read_stderr(BufReader::new(stderr), &lines))?;
        worker.stderr_reader = Some(reader);
        Ok(worker)
    }

    fn exchange(&mut self, request: &impl Serialize, limit: Duration) -> Result<String, Failure> {
        let mut line = serde_json::to_vec(request).map_err(|error| Failure::Final(error.to_string()))?;
        line.push(b'\n');
        let sent = self.requests.as_ref().is_some_and(|requests| requests.send(line).is_ok());
        if !sent {
            return Err(self.ended());
        }
        match self.answers.recv_timeout(limit) {
            Ok(Ok(line)) => {
                self.answered = true;
                Ok(line)
            }
            Ok(Err(error)) if error.kind() == ErrorKind::FileTooLarge => {
                Err(Failure::TooLarge(error.to_string()))
            }
            Ok(Err(error)) => Err(Failure::Final(error.to_string())),
            Err(RecvTimeoutError::Timeout) => Err(Failure::TimedOut),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
        }
    }

    /// Describes the failure of a program that closed its pipes. If it exits before its first answer (because of a failed import,
    /// for example), another attempt would fail too.
    fn ended(&mut self) -> Failure {
        let status = self.wait(GOODBYE);
        let gave_up = !self.answered && status.is_some_and(|status| status.code().is_some());
        let status = match status {
            Some(status) => format!("the program ended ({status})"),
            None => "the program closed its stdout".to_owned(),
        };
        // The pipe may still contain the last lines after the process has exited.
        let start = Instant::now();
        while self.stderr_reader.as_ref().is_some_and(|reader| !reader.is_finished())
            && start.elapsed() < GOODBYE
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let lines: Vec<String> = locked(&self.stderr).iter().cloned().collect();
        let what = if lines.is_empty() {
            status
        } else {
            format!("{status}; its last output: {}", lines.join(" | "))
        };
        if gave_up { Failure::Final(what) } else { Failure::Passing(what) }
    }
}

impl Worker {
    /// Waits until the program and its child processes have exited.
    fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.kill_group();
                return Some(status);
            }
            if start.elapsed() >= limit {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the program and its child processes. An error means that no process is left.
    fn kill_group(&mut self) {
        if !std::mem::take(&mut self.group_is_ours) {
            return;
        }
        #[cfg(unix)]
        if let Ok(id) = i32::try_from(self.child.id()) {
            // SAFETY: `kill` takes no pointers. The id belongs to the group that the child leads. The call happens at most once,
            // before the child is waited for or immediately after, so no other group can have the id.
            unsafe { libc::kill(-id, libc::SIGKILL) };
        }
        let _ = self.child.kill();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A closed stdin asks the program to exit. A program that does not exit is killed.
        self.requests = None;
        if self.wait(GOODBYE).is_none() {
            self.kill_group();
            let _ = self.child.wait();
        }
    }
}

/// Starts a program that the system kills when this process ends for any reason. That rule depends on the thread that starts the
/// program, so one thread, which never ends, starts all programs.
fn spawn(command: Command) -> std::io::Result<Child> {
    type Order = (Command, Sender<std::io::Result<Child>>);
    static STARTER: OnceLock<Sender<Order>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (orders, to_do) = channel::<Order>();
        let start_all = move || {
            for (mut command, answer) in to_do {
                die_with_parent(&mut command);
                // The sender of the order waits for the answer.
                let _ = answer.send(command.spawn());
            }
        };
        // If the thread cannot be started, its end of the channel is dropped, and the order below fails.
        let _ = std::thread::Builder::new().name("reward starter".to_owned()).spawn(start_all);
        orders
    });
    let gone = || std::io::Error::other("the thread that starts programs has ended");
    let (answer, started) = channel();
    starter.send((command, answer)).map_err(|_| gone())?;
    started.recv().map_err(|_| gone())?
}

#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let ask = move || {
        // SAFETY: `prctl` with these arguments takes no pointers.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // The parent may have exited before the request.
        if std::os::unix::process::parent_id() == parent {
            Ok(())
        } else {
            Err(std::io::Error::from_raw_os_error(libc::ESRCH))
        }
    };
    // SAFETY: between fork and exec, `ask` makes two system calls and does not allocate.
    unsafe { std::os::unix::process::CommandExt::pre_exec(command, ask) };
}

#[cfg(not(target_os = "linux"))]
fn die_with_parent(_: &mut Command) {}

/// Stores the last lines until stderr is closed. A carriage return also ends a line, since progress bars use it.
fn read_stderr(mut reader: impl BufRead, lines: &Mutex<VecDeque<String>>) {
    let mut line: Vec<u8> = Vec::new();
    let keep = |line: &mut Vec<u8>| {
        let text = String::from_utf8_lossy(&std::mem::take(line)).trim_end().to_owned();
        if text.is_empty() {
            return;
        }
        tracing::debug!(target: "omnigrpo_rewards::command", "{text}");
        let mut lines = locked(lines);
        lines.push_back(text);
        while lines.len() > STDERR_LINES {
            lines.pop_front();
        }
    };
    loop {
        let chunk = match reader.fill_buf() {
            Ok([]) => break,
            Ok(chunk) => chunk,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let end = chunk.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
        let part = &chunk[..end.unwrap_or(chunk.len())];
        line.extend_from_slice(&part[..part.len().min(STDERR_LINE_BYTES - line.len())]);
        let used = end.map_or(chunk.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            keep(&mut line);
        }
    }
    keep(&mut line);
}

fn write_requests(mut stdin: ChildStdin, requests: &Receiver<Vec<u8>>) {
    for request in requests {
        // A closed pipe appears as the end of stdout, where the failure is reported.
        if stdin.write_all(&request).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// Returns the next line, or `None` at the end.
fn next_line(reader: &mut impl BufRead) -> Option<std::io::Result<String>> {
    let mut bytes = Vec::new();
    match reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes) {
        Ok(0) => None,
        Ok(_) if bytes.len() as u64 == MAX_LINE_BYTES && !bytes.ends_with(b"\n") => {
            let what = format!("a line of more than {MAX_LINE_BYTES} bytes");
            Some(Err(std::io::Error::new(ErrorKind::FileTooLarge, what)))
        }
        Ok(_) => Some(Ok(match String::from_utf8(bytes) {
            Ok(line) => line,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        })),
        Err(error) => Some(Err(error)),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use crate::testing::Row;
    use crate::{RewardSet, build};

    /// A shell program that answers each request of one row. `$1` computes the answer from `$id` and the line.
    const ANSWER: &str = r#"while read -r line; do
id=${line#*:}; id=${id%%,*}
case $line in *'"completion":"'*) c=${line#*'"completion":"'}; c=${c%%'"'*};; esac
eval "$1"
done"#;

    fn set(
        dir: &std::path::Path,
        body: &str,
        change: impl Fn(&mut ExternalOptions),
    ) -> Result<RewardSet, RewardError> {
        let script = dir.join("scorer.sh");
        std::fs::write(&script, ANSWER).unwrap();
        let mut options = RewardOptions::default();
        options.external.batch_size = 1;
        options.external.timeout = Duration::from_secs(20);
        change(&mut options.external);
        let spec = format!("cmd:\"sh {} {}\"", script.display(), shlex::try_quote(body).unwrap());
        build(&[spec], &options)
    }

    fn scores(set: &RewardSet, completions: &[&str]) -> Result<Vec<Option<f64>>, RewardError> {
        let rows: Vec<Row> = completions
            .iter()
            .enumerate()
            .map(|(i, text)| Row::new("q", text, "s").sample(i as u64))
            .collect();
        let batch: Vec<_> = rows.iter().map(Row::input).collect();
        Ok(set.score(&batch)?.values.remove(0))
    }

    const ECHO: &str = r#"echo "{\"id\":$id,\"rewards\":[$c]}""#;

    #[test]
    fn rewards_come_back_in_order_from_a_pool() {
        let dir = tempfile::tempdir().unwrap();
        for pool_size in [1, 3] {
            let set = set(dir.path(), ECHO, |o| o.pool_size = pool_size).unwrap();
            assert_eq!(set.names(), ["scorer"]);
            let got = scores(&set, &["0.5", "null", "-2", "4", "1e1"]).unwrap();
            assert_eq!(got, vec![Some(0.5), None, Some(-2.0), Some(4.0), Some(10.0)]);
            assert_eq!(scores(&set, &[]).unwrap(), vec![]);
            assert_eq!(scores(&set, &["7"]).unwrap(), vec![Some(7.0)]);
        }
    }

    #[test]
    fn a_death_loses_no_step() {
        let dir = tempfile::tempdir().unwrap();
        // The program dies at the second completion of its first run.
        let mark = dir.path().join("died");
        let body = format!(
            r#"if [ "$c" = 2 ] && [ ! -e {0} ]; then touch {0}; echo boom >&2; exit 3; fi; {ECHO}"#,
            mark.display()
        );
        let set = set(dir.path(), &body, |_| ()).unwrap();
        assert_eq!(scores(&set, &["1", "2", "3"]).unwrap(), vec![Some(1.0), Some(2.0), Some(3.0)]);
        assert!(mark.exists());
    }

    #[test]
    fn killed_between_and_during_requests() {
        let dir = tempfile::tempdir().unwrap();
        let pids = dir.path().join("pids");
        let body = format!("echo $$ >> {}; sleep 0.2; {ECHO}", pids.display());
        let set = Arc::new(set(dir.path(), &body, |o| o.retries = 5).unwrap());
        let last_pid =
            || std::fs::read_to_string(&pids).unwrap_or_default().lines().last().map(str::to_owned);
        let kill = |pid: &str| Command::new("kill").args(["-9", pid]).status().unwrap();
        assert_eq!(scores(&set, &["1"]).unwrap(), vec![Some(1.0)]);
        kill(&last_pid().unwrap());
        assert_eq!(scores(&set, &["2"]).unwrap(), vec![Some(2.0)]);
        let before = last_pid().unwrap();
        let running = {
            let set = Arc::clone(&set);
            std::thread::spawn(move || scores(&set, &["3", "4"]).unwrap())
        };
        // The program sleeps after it has written its mark for "3". The test kills it there.
        let lines = || std::fs::read_to_string(&pids).unwrap().lines().count();
        let start = Instant::now();
        while lines() < 3 && start.elapsed().as_secs() < 10 {
            std::thread::sleep(Duration::from_millis(5));
        }
        kill(&before);
        assert_eq!(running.join().unwrap(), vec![Some(3.0), Some(4.0)]);
    }

    #[test]
    fn gives_up_with_the_last_lines_of_stderr() {
        let dir = tempfile::tempdir().unwrap();
        let set_of = |body: &str| set(dir.path(), body, |o| o.retries = 1).unwrap();
        // A program that exits by itself would do so again. A program that is killed gets another attempt.
        for (end, times) in [("exit 1", 1), ("kill -9 $$", 2)] {
            let set = set_of(&format!("echo no module named torch >&2; {end}"));
            let error = scores(&set, &["1"]).unwrap_err().to_string();
            let failed = format!("`scorer` failed {times} time(s)");
            for part in [&failed, "rows 0 (", "the program ended (", "no module named torch"] {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn a_trial_finds_what_would_fail_later() {
        let dir = tempfile::tempdir().unwrap();
        let probe = |body: &str, range| {
            let set = set(dir.path(), body, |o| o.range = range).unwrap();
            let row = Row::new("q", "1", "s");
            set.probe(&[row.input()]).map(drop).map_err(|error| error.to_string())
        };
        // The answer is marked, and the process is kept.
        let marked =
            r#"case $line in *'"probe":true}') echo "{\"id\":$id,\"rewards\":[$$]}";; *) exit 3;; esac"#;
        assert_eq!(probe(marked, None), Ok(()));
        let error = probe("exit 3", None).unwrap_err();
        assert!(error.contains("failed 1 time(s)") && error.contains("exit status: 3"), "{error}");
        assert!(
            probe(ECHO, Some((2.0, 3.0))).unwrap_err().contains("got 1, expected a finite number in 2..=3")
        );
    }

    #[test]
    fn a_flood_without_a_newline_does_not_stop_a_program() {
        let dir = tempfile::tempdir().unwrap();
        let body = format!(r#"head -c 70000000 /dev/zero >&2; printf 'a\rb\r' >&2; {ECHO}"#);
        let set = set(dir.path(), &body, |o| o.retries = 0).unwrap();
        assert_eq!(scores(&set, &["1", "2"]).unwrap(), vec![Some(1.0), Some(2.0)]);
        let lines = Mutex::default();
        read_stderr(&b"10%\r20%\r\n\nlast"[..], &lines);
        assert_eq!(*locked(&lines), ["10%", "20%", "last"]);
    }

    #[test]
    fn metrics_and_columns_are_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let body =
            r#"echo "{\"id\":$id,\"rewards\":[0],\"metrics\":{\"m\":$c},\"columns\":{\"said\":[\"<$c>\"]}}""#;
        let set = set(dir.path(), body, |o| o.pool_size = 2).unwrap();
        let rows = ["1", "2", "6"].map(|text| Row::new("q", text, "s"));
        let batch: Vec<_> = rows.iter().map(Row::input).collect();
        for _ in 0..2 {
            let logged = set.score(&batch).unwrap().logged;
            assert_eq!(logged.metrics, [("rewards/scorer/m".to_owned(), 3.0)].into());
            assert_eq!(
                logged.columns,
                [("said".to_owned(), vec!["<1>".into(), "<2>".into(), "<6>".into()])].into()
            );
        }
        let few = r#"echo "{\"id\":$id,\"rewards\":[0],\"columns\":{\"said\":[]}}""#;
        let set = self::set(dir.path(), few, |_| ()).unwrap();
        let error = scores(&set, &["1"]).unwrap_err().to_string();
        assert!(error.contains("column `said` has 0 value(s) for 1 completions"), "{error}");
    }

    #[test]
    fn a_function_gives_its_name() {
        let name = |command: &str| default_name(&shlex::split(command).unwrap());
        assert_eq!(name("python omnigrpo_reward.py dir/my_rewards.py:right"), "right");
        assert_eq!(name("python dir/my_reward.py --x"), "my_reward");
        assert_eq!(name("sh -c 'exit 1'"), "sh");
    }

    #[test]
    fn a_hang_is_killed_with_its_children_and_reported() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let body = format!("sleep 1000 & echo $! > {}; wait", pid.display());
        let set = set(dir.path(), &body, |o| {
            o.retries = 0;
            o.timeout = Duration::from_millis(500);
        })
        .unwrap();
        let start = Instant::now();
        let error = scores(&set, &["1"]).unwrap_err();
        assert!(matches!(error, RewardError::TimedOut { .. }), "{error}");
        assert!(error.to_string().contains("rows 0 (dataset row 0, sample 0)"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10));
        let pid = std::fs::read_to_string(pid).unwrap();
        let alive = || {
            // A killed child of a killed parent may remain a zombie until init reaps it.
            std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()))
                .is_ok_and(|stat| !stat.contains(") Z "))
        };
        let start = Instant::now();
        while alive() && start.elapsed().as_secs() < 5 {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!alive());
    }

    #[test]
    fn wrong_answers_are_errors_at_once() {
        let dir = tempfile::tempdir().unwrap();
        for (body, part) in [
            (r#"echo "{\"id\":$id,\"rewards\":[1,2]}""#, "2 value(s) for 1"),
            (r#"echo "{\"id\":$id,\"rewards\":[NaN]}""#, "`rewards[0]` is NaN, expected a finite number"),
            (r#"echo "{\"id\":999,\"rewards\":[1]}""#, "answer to request 999, expected"),
            (r#"echo "{\"id\":$id,\"error\":\"bad row\"}""#, "it reports: bad row"),
            (r#"echo "{\"id\":$id}""#, "neither"),
            ("echo loading model", "other output belongs on stderr"),
        ] {
            let set = set(dir.path(), body, |_| ()).unwrap();
            let error = scores(&set, &["1"]).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("failed 1 time"), "{part}: {error}");
        }
    }

    #[test]
    fn a_request_larger_than_the_pipe_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let long = "x".repeat(3 << 20);
        let set = set(dir.path(), r#"echo "{\"id\":$id,\"rewards\":[${#c}]}""#, |_| ()).unwrap();
        assert_eq!(scores(&set, &[&long]).unwrap(), vec![Some(3.0 * f64::from(1 << 20))]);
    }

    #[test]
    fn programs_that_are_not_there() {
        let missing = build(&["cmd:no-such-program-here x".to_owned()], &RewardOptions::default());
        let error = missing.unwrap_err().to_string();
        assert!(error.contains("no-such-program-here") && error.contains("PATH"), "{error}");
        assert!(build(&["cmd:".to_owned()], &RewardOptions::default()).is_err());
        assert!(build(&["cmd:\"sh 'x\"".to_owned()], &RewardOptions::default()).is_err());
    }
}
