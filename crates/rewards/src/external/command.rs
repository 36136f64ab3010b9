//! `cmd:"program arguments"`: any program that reads requests as JSON lines and writes answers as JSON lines.
//!
//! Each of the pool's processes is started once and kept. A process that dies or does not answer in time is killed
//! (with the processes it started), started anew, and given the request again, so that a death loses no step. What it
//! writes to stderr goes to the log, and the last lines into the error.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Answer, ExternalOptions, Failure, Request, attempts, excerpt, rows_name, spread, values};
use crate::{Reward, RewardError, RewardInput, RewardOptions};

/// An answer line beyond this is refused instead of read.
const MAX_LINE_BYTES: u64 = 64 << 20;
const STDERR_LINES: usize = 20;
/// How long a process may take to end after its stdin is closed.
const GOODBYE: Duration = Duration::from_millis(300);

struct CommandReward {
    name: String,
    arguments: Vec<String>,
    options: ExternalOptions,
    /// One slot per thread of the pool; empty until used and after a failure.
    workers: Vec<Mutex<Option<Worker>>>,
    next_id: AtomicU64,
}

pub(super) fn reward(
    command: &str,
    name: Option<&str>,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    // A shell may have left the quotes of cmd:"…" in place.
    let command = command.trim();
    let command = command.strip_prefix('"').and_then(|inside| inside.strip_suffix('"')).unwrap_or(command);
    let setting = |what: String| RewardError::Setting { reward: format!("cmd:{command}"), what };
    let arguments = shlex::split(command).filter(|arguments| !arguments.is_empty());
    let arguments =
        arguments.ok_or_else(|| setting("expected a program and its arguments, quotes closed".to_owned()))?;
    let options = options.external.clone();
    let name = name.map_or_else(|| default_name(&arguments), str::to_owned);
    // The first process starts now, so that a program that is not there is found before training.
    let first = Worker::start(&arguments).map_err(|error| {
        setting(format!("cannot start `{}`: {error}; is it installed and on PATH?", arguments[0]))
    })?;
    let workers = (1..options.pool_size.max(1)).map(|_| Mutex::new(None));
    let workers = std::iter::once(Mutex::new(Some(first))).chain(workers).collect();
    Ok(Box::new(CommandReward { name, arguments, options, workers, next_id: AtomicU64::new(0) }))
}

/// "my_reward" for `python my_reward.py`.
fn default_name(arguments: &[String]) -> String {
    let script = arguments.iter().find(|argument| argument.contains('.') && !argument.starts_with('-'));
    let path = std::path::Path::new(script.unwrap_or(&arguments[0]));
    path.file_stem().map_or_else(|| "cmd".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

impl Reward for CommandReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn range(&self) -> (f64, f64) {
        self.options.range.unwrap_or((f64::NEG_INFINITY, f64::INFINITY))
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        spread(batch, self.options.batch_size, self.workers.len(), |worker, range, rows| {
            let mut slot = locked(&self.workers[worker]);
            let named = rows_name(&range, batch);
            attempts(&self.name, &named, &self.options, Duration::ZERO, || {
                let result = self.ask(&mut slot, rows);
                if result.is_err() {
                    // Whatever it is doing, its next line would not be the answer to the next request.
                    *slot = None;
                }
                result
            })
        })
    }
}

impl CommandReward {
    fn ask(&self, slot: &mut Option<Worker>, rows: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, Failure> {
        let worker = match slot {
            Some(worker) => worker,
            None => slot.insert(Worker::start(&self.arguments).map_err(|error| {
                Failure::Passing(format!("cannot start `{}`: {error}", self.arguments[0]))
            })?),
        };
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let line = worker.exchange(&Request::new(id, rows), self.options.timeout)?;
        let answer: Answer = serde_json::from_str(&line).map_err(|error| {
            Failure::Final(format!(
                "not an answer on its stdout ({error}): `{}`; other output belongs on stderr",
                excerpt(line.trim_end())
            ))
        })?;
        if answer.id != Some(id) {
            return Err(Failure::Final(format!("answer to request {:?}, expected {id}", answer.id)));
        }
        values(answer, rows.len())
    }
}

/// A running program, with a thread for each of its pipes: writing to a full pipe, too, must not outlast the limit.
struct Worker {
    child: Child,
    /// The child has not been waited for, so its group's id is still its own.
    group_is_ours: bool,
    requests: Option<Sender<Vec<u8>>>,
    answers: Receiver<std::io::Result<String>>,
    stderr: Arc<Mutex<VecDeque<String>>>,
    /// Reads the child's stderr until it is closed.
    stderr_reader: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    fn start(arguments: &[String]) -> std::io::Result<Self> {
        let mut command = Command::new(&arguments[0]);
        command.args(&arguments[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        {
            // A group of its own: Ctrl-C is for the trainer, which still needs its scorers; and a kill reaches the
            // processes that the program started.
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
        }
        let mut child = command.spawn()?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            return Err(std::io::Error::other("the program has no pipes"));
        };
        let (requests, to_write) = channel();
        let (read, answers) = sync_channel(1);
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let mut worker = Self {
            child,
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
        let reader = thread("stderr").spawn(move || {
            let mut reader = BufReader::new(stderr);
            while let Some(Ok(line)) = next_line(&mut reader) {
                let line = line.trim_end().to_owned();
                tracing::debug!(target: "omnigrpo_rewards::command", "{line}");
                let mut lines = locked(&lines);
                lines.push_back(line);
                while lines.len() > STDERR_LINES {
                    lines.pop_front();
                }
            }
        })?;
        worker.stderr_reader = Some(reader);
        Ok(worker)
    }

    fn exchange(&mut self, request: &Request<'_>, limit: Duration) -> Result<String, Failure> {
        let mut line = serde_json::to_vec(request).map_err(|error| Failure::Final(error.to_string()))?;
        line.push(b'\n');
        let sent = self.requests.as_ref().is_some_and(|requests| requests.send(line).is_ok());
        if !sent {
            return Err(Failure::Passing(self.ended()));
        }
        match self.answers.recv_timeout(limit) {
            Ok(Ok(line)) => Ok(line),
            Ok(Err(error)) => Err(Failure::Final(error.to_string())),
            Err(RecvTimeoutError::Timeout) => Err(Failure::TimedOut),
            Err(RecvTimeoutError::Disconnected) => Err(Failure::Passing(self.ended())),
        }
    }

    /// What is known about a program that closed its pipes.
    fn ended(&mut self) -> String {
        let status = match self.wait(GOODBYE) {
            Some(status) => format!("the program ended ({status})"),
            None => "the program closed its stdout".to_owned(),
        };
        // Its last words may still be in the pipe when its end is known.
        let start = Instant::now();
        while self.stderr_reader.as_ref().is_some_and(|reader| !reader.is_finished())
            && start.elapsed() < GOODBYE
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let lines: Vec<String> = locked(&self.stderr).iter().cloned().collect();
        if lines.is_empty() { status } else { format!("{status}; its last lines: {}", lines.join(" | ")) }
    }
}

impl Worker {
    /// Waits for the program's end; then nothing of what it started is left.
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

    /// Kills the program and what it started. Errors mean that nothing is left to kill.
    fn kill_group(&mut self) {
        if !std::mem::take(&mut self.group_is_ours) {
            return;
        }
        #[cfg(unix)]
        if let Ok(id) = i32::try_from(self.child.id()) {
            // SAFETY: `kill` takes no pointers. The id is that of the group the child was made the leader of; it is
            // called at most once, before the child is waited for or at once after, so the id has no new owner.
            unsafe { libc::kill(-id, libc::SIGKILL) };
        }
        let _ = self.child.kill();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Closing stdin asks it to end; a program that hangs is made to.
        self.requests = None;
        if self.wait(GOODBYE).is_none() {
            self.kill_group();
            let _ = self.child.wait();
        }
    }
}

fn write_requests(mut stdin: ChildStdin, requests: &Receiver<Vec<u8>>) {
    for request in requests {
        // A closed pipe shows as the end of stdout, which is where the failure is reported.
        if stdin.write_all(&request).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// The next line, `None` at the end.
fn next_line(reader: &mut impl BufRead) -> Option<std::io::Result<String>> {
    let mut bytes = Vec::new();
    match reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes) {
        Ok(0) => None,
        Ok(_) if bytes.len() as u64 == MAX_LINE_BYTES && !bytes.ends_with(b"\n") => {
            Some(Err(std::io::Error::other(format!("a line of more than {MAX_LINE_BYTES} bytes"))))
        }
        Ok(_) => Some(Ok(String::from_utf8_lossy(&bytes).into_owned())),
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

    /// A program in plain shell: answers each request of one row by what `$1` makes of `$id` and the line.
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
        // Dies at the second completion, the first time round.
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
        // Once it has written its mark for "3" it sleeps: kill it there.
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
        let set = set(dir.path(), "echo no module named torch >&2; exit 1", |o| o.retries = 1).unwrap();
        let error = scores(&set, &["1"]).unwrap_err().to_string();
        for part in ["`scorer` failed 2 time(s)", "row 0", "exit status: 1", "no module named torch"] {
            assert!(error.contains(part.trim_start_matches("row ")), "{part}: {error}");
        }
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
            // A killed child of a killed parent may linger as a zombie until init reaps it.
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
            (r#"echo "{\"id\":$id,\"rewards\":[NaN]}""#, "not an answer"),
            (r#"echo "{\"id\":999,\"rewards\":[1]}""#, "expected"),
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
