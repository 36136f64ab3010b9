//! The programs `ffprobe` and `ffmpeg`, run as children on one file.
//!
//! A child gets no standard input, may open only this file (`-protocol_whitelist file,pipe`) as one of the usual
//! containers (playlists and scripts that name other files are refused), runs under a bound on its address space, and is
//! killed together with what it started when its time is up.
//!
//! The limit counts processor time, so that a loaded machine makes no file a bad one. A child that lives [`WALL_FACTOR`] times as
//! long without having used that time waits for something, a disk or its turn: this is a failure of the machine, and so is a
//! program that is missing or cannot be started. Where the system does not tell the processor time of a child, its
//! lifetime counts.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use omnigrpo_guard::MachineFailure;
use serde::de::DeserializeOwned;

use crate::{Limits, MediaError};

/// Containers that hold their own streams.
const FORMATS: &str = "mov,matroska,webm,avi,flv,mpegts,mpeg,mpegvideo,m4v,ogg,asf,h264,hevc,ivf,nut,mxf,rm,swf,3gp,\
     wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,dts,amr,amrnb,amrwb,ape,wv,tta";

/// Address space of a child. Far above what 8K video takes; keeps a hostile file from taking the machine's memory.
#[cfg(target_os = "linux")]
const MAX_ADDRESS_SPACE: u64 = 8 << 30;

/// A child may live this many times as long as it may compute.
const WALL_FACTOR: u32 = 10;

/// How long a look at the processor time of a child takes effect at least.
const SHORTEST_LOOK: Duration = Duration::from_millis(10);

/// Kept of a child's standard error.
const STDERR_TAIL_BYTES: usize = 2048;

/// Largest answer of ffprobe that is read; a few hundred bytes are usual.
const MAX_PROBE_BYTES: u64 = 1 << 20;

/// Messages of the demuxers of ffmpeg 4 to 7 about a file that ends inside a sample.
pub(crate) const TRUNCATION_SIGNS: [&str; 2] = ["partial file", "File ended prematurely"];

/// Names the input file, and what may be opened.
pub(crate) fn input_args(path: &Path) -> Vec<OsString> {
    // `file:` keeps a name with a colon or a leading dash from being read as a protocol or a flag.
    let mut url = OsString::from("file:");
    url.push(path);
    let mut args: Vec<OsString> =
        ["-protocol_whitelist", "file,pipe", "-format_whitelist", FORMATS, "-i"].map(Into::into).into();
    args.push(url);
    args
}

/// Output of a child process.
pub(crate) struct Output<T> {
    pub(crate) value: T,
    status: ExitStatus,
    pub(crate) stderr_tail: String,
}

impl<T> Output<T> {
    pub(crate) fn require_success(&self, path: &Path, program: &'static str) -> Result<(), MediaError> {
        if self.status.success() {
            return Ok(());
        }
        Err(MediaError::ProgramFailed {
            path: path.to_owned(),
            program,
            status: self.status.to_string(),
            stderr_tail: self.stderr_tail.clone(),
        })
    }
}

/// Asks ffprobe about `path` in JSON; also gives the end of what it wrote to standard error.
pub(crate) fn ffprobe<T: DeserializeOwned>(
    path: &Path,
    args: &[&str],
    limits: &Limits,
) -> Result<(T, String), MediaError> {
    let mut all: Vec<OsString> = ["-v", "error", "-of", "json"].map(Into::into).into();
    all.extend(args.iter().map(OsString::from));
    all.extend(input_args(path));
    let output = run("ffprobe", &all, path, limits.timeout, |stdout| {
        let mut text = String::new();
        stdout.take(MAX_PROBE_BYTES).read_to_string(&mut text).map(|_| text)
    })?;
    output.require_success(path, "ffprobe")?;
    let answer = serde_json::from_str(&output.value)
        .map_err(|e| MediaError::decode(path, format!("ffprobe gave an unreadable answer: {e}")))?;
    Ok((answer, output.stderr_tail))
}

/// Why a child was killed.
#[derive(Clone, Copy, PartialEq)]
enum Killed {
    /// It had computed as long as it may.
    Computed,
    /// It had lived too long without computing so much.
    Waited,
}

/// Runs a program on `path`, hands its standard output to `consume`, and kills it when it has computed for `limit`.
pub(crate) fn run<T>(
    program: &'static str,
    args: &[OsString],
    path: &Path,
    limit: Duration,
    consume: impl FnOnce(&mut dyn Read) -> io::Result<T>,
) -> Result<Output<T>, MediaError> {
    let mut command = Command::new(program);
    // A group of its own, so that what the child starts dies with it: such a process would hold the pipes open.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| match e.kind() {
            ErrorKind::NotFound => {
                MediaError::ProgramMissing { path: path.to_owned(), program, source: MachineFailure(e) }
            }
            // A request that is longer than the system takes, which the row asked for.
            ErrorKind::ArgumentListTooLong => failed(path, program, "could not be started", &e),
            _ => not_started(path, program, e),
        })?;
    bound_memory(&child);
    let (Some(mut stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(failed(path, program, "could not be started", &"no pipes"));
    };
    let child = &Mutex::new(child);
    let longest = limit.saturating_mul(WALL_FACTOR);
    let deadline = Instant::now() + longest;
    let (done, is_done) = mpsc::channel::<()>();

    let ran = std::thread::scope(|scope| {
        let thread = |name: &str| std::thread::Builder::new().name(format!("{program} {name}"));
        let threads = thread("stderr").spawn_scoped(scope, move || read_tail(&mut stderr)).and_then(|tail| {
            Ok((tail, thread("time").spawn_scoped(scope, move || watch(child, limit, deadline, &is_done))?))
        });
        let (tail, watchdog) = threads.inspect_err(|_| {
            // Nobody would bound it. The pipes that it holds end with it.
            kill(&mut child.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
            let _ = wait(child, Instant::now() + Duration::from_secs(5));
        })?;
        let value = consume(&mut stdout);
        drop(stdout); // a child that still writes ends on the closed pipe
        let ended = wait(child, deadline + Duration::from_secs(5));
        drop(done);
        let mut killed = watchdog.join().unwrap_or(None);
        // A child of several threads may compute too long between two looks.
        if killed.is_none()
            && ended.as_ref().is_ok_and(|(_, computed)| computed.is_some_and(|time| time >= limit))
        {
            killed = Some(Killed::Computed);
        }
        Ok((value, ended.map(|(status, _)| status), killed, tail.join().unwrap_or_default()))
    });
    let (value, status, killed, stderr_tail) = ran.map_err(|e: io::Error| not_started(path, program, e))?;
    match killed {
        Some(Killed::Computed) => {
            let limit_secs = limit.as_secs_f64();
            return Err(MediaError::Timeout { path: path.to_owned(), program, limit_secs });
        }
        Some(Killed::Waited) => {
            let source = io::Error::new(ErrorKind::TimedOut, "it waited for its turn or for its file");
            return Err(MediaError::ProgramWaits {
                path: path.to_owned(),
                program,
                waited_secs: longest.as_secs_f64(),
                source: MachineFailure(source),
            });
        }
        None => {}
    }
    let value = value.map_err(|e| failed(path, program, "its output could not be read", &e))?;
    let status = status.map_err(|e| failed(path, program, "its end could not be awaited", &e))?;
    Ok(Output { value, status, stderr_tail })
}

fn failed(path: &Path, program: &'static str, status: &str, reason: &dyn std::fmt::Display) -> MediaError {
    MediaError::ProgramFailed {
        path: path.to_owned(),
        program,
        status: status.into(),
        stderr_tail: reason.to_string(),
    }
}

fn not_started(path: &Path, program: &'static str, source: io::Error) -> MediaError {
    MediaError::ProgramNotStarted { path: path.to_owned(), program, source: MachineFailure(source) }
}

/// Kills the child once it has computed for `limit` or lives at the `deadline`, unless `is_done` ends before.
fn watch(
    child: &Mutex<Child>,
    limit: Duration,
    deadline: Instant,
    is_done: &mpsc::Receiver<()>,
) -> Option<Killed> {
    let started = Instant::now();
    loop {
        // It is reaped under the same lock, so its number is its own in here.
        let mut child = child.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let computed = match processor_time(&child) {
            Some(time) => time,
            None if cfg!(target_os = "linux") => return None,
            None => started.elapsed(),
        };
        let killed = match (computed >= limit, Instant::now() >= deadline) {
            (true, _) => Some(Killed::Computed),
            (_, true) => Some(Killed::Waited),
            _ => None,
        };
        if killed.is_some() {
            kill(&mut child);
            return killed;
        }
        drop(child);
        // A child with one decoding thread cannot reach its limit before.
        let next = (limit - computed).min(deadline.saturating_duration_since(Instant::now()));
        match is_done.recv_timeout(next.max(SHORTEST_LOOK)) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return None,
        }
    }
}

/// How long a child has computed. `None` where the system does not tell, or no longer.
#[cfg(target_os = "linux")]
fn processor_time(child: &Child) -> Option<Duration> {
    let pid = libc::pid_t::try_from(child.id()).ok()?;
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: both calls write one value of the type that they are given, and outlive neither. A number that is no process's any more
    // is an error of theirs.
    let known = unsafe {
        libc::clock_getcpuclockid(pid, &mut clock) == 0 && libc::clock_gettime(clock, &mut time) == 0
    };
    known.then(|| {
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    })
}

/// Returns true if the child has ended and waits to be reaped.
#[cfg(target_os = "linux")]
fn has_ended(child: &Child) -> bool {
    // SAFETY: all zeros is a value of this plain structure.
    let mut ended: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one `siginfo_t`, and `WNOWAIT` leaves the child to be reaped. A failure means that nobody has to
    // wait for it, which `try_wait` will report.
    unsafe {
        libc::waitid(libc::P_PID, child.id(), &mut ended, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT) != 0
            || ended.si_pid() != 0
    }
}

#[cfg(not(target_os = "linux"))]
fn has_ended(_: &Child) -> bool {
    true
}

#[cfg(not(target_os = "linux"))]
fn processor_time(_: &Child) -> Option<Duration> {
    None
}

fn kill(child: &mut Child) {
    // It may have ended by itself meanwhile, which is as good.
    #[cfg(unix)]
    if let Ok(group) = libc::pid_t::try_from(child.id()) {
        // SAFETY: a plain system call. The child is reaped only once its output has ended, so while somebody still waits for
        // that output the group is its own.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
    let _ = child.kill();
}

/// Waits for the end of the child without holding the lock that the watchdog needs. Also returns how long it computed, if the
/// system tells. After `deadline` (the kill has not worked, for instance on a dead network drive) the child is left alone.
fn wait(child: &Mutex<Child>, deadline: Instant) -> io::Result<(ExitStatus, Option<Duration>)> {
    loop {
        {
            let mut child = child.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if has_ended(&child) {
                // Only until it is reaped.
                let computed = processor_time(&child);
                if let Some(status) = child.try_wait()? {
                    return Ok((status, computed));
                }
            }
        }
        if Instant::now() > deadline {
            return Err(io::Error::new(ErrorKind::TimedOut, "the process does not end"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reads to the end and keeps the last bytes.
fn read_tail(stream: &mut dyn Read) -> String {
    let mut tail = VecDeque::with_capacity(2 * STDERR_TAIL_BYTES);
    let mut buffer = [0u8; 1024];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        tail.extend(&buffer[..n]);
        tail.drain(..tail.len().saturating_sub(STDERR_TAIL_BYTES));
    }
    String::from_utf8_lossy(tail.make_contiguous()).trim().to_owned()
}

/// Bounds the child's address space. Done from outside after the start: a limit set between fork and exec would
/// make the start copy the page tables of this process, which may be large.
#[cfg(target_os = "linux")]
fn bound_memory(child: &Child) {
    let Ok(pid) = libc::pid_t::try_from(child.id()) else { return };
    let limit = libc::rlimit {
        rlim_cur: MAX_ADDRESS_SPACE as libc::rlim_t,
        rlim_max: MAX_ADDRESS_SPACE as libc::rlim_t,
    };
    // SAFETY: `limit` outlives the call, the old limit is not asked for, and the child is not reaped yet, so the pid is its own.
    // Failure leaves the child with the system's own limit.
    unsafe { libc::prlimit(pid, libc::RLIMIT_AS, &limit, std::ptr::null_mut()) };
}

#[cfg(not(target_os = "linux"))]
fn bound_memory(_: &Child) {}

#[cfg(test)]
mod tests {
    use omnigrpo_guard::{Fault, fault};

    use super::*;

    #[test]
    fn a_missing_program_is_explained() {
        let error =
            run("omnigrpo-no-such-program", &[], Path::new("clip.mp4"), Duration::from_secs(1), |_| Ok(()))
                .err()
                .unwrap();
        let text = error.to_string();
        assert!(matches!(error, MediaError::ProgramMissing { .. }), "{text}");
        assert_eq!(fault(&error, Fault::Row), Fault::Machine);
        assert!(text.contains("clip.mp4") && text.contains("apt install ffmpeg"), "{text}");
    }

    #[test]
    #[cfg(unix)]
    fn a_program_that_cannot_be_started_is_the_machines_failure() {
        // A directory cannot be run, by root neither.
        let error = run("/", &[], Path::new("clip.mp4"), Duration::from_secs(1), |_| Ok(())).err().unwrap();
        assert!(matches!(error, MediaError::ProgramNotStarted { .. }), "{error}");
        assert_eq!(fault(&error, Fault::Row), Fault::Machine);
    }

    /// The child computes for a short time after a long wait: with a limit of lifetime it would be a bad file.
    #[test]
    #[cfg(target_os = "linux")]
    fn time_spent_waiting_is_not_counted() {
        let read = |stdout: &mut dyn Read| stdout.read_to_end(&mut Vec::new());
        let args = ["-c".into(), "sleep 1; echo done".into()];
        let output = run("sh", &args, Path::new("clip.mp4"), Duration::from_millis(500), read).unwrap();
        assert_eq!(output.value, 5);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_child_that_computes_too_long_is_killed_and_its_file_is_bad() {
        let read = |stdout: &mut dyn Read| stdout.read_to_end(&mut Vec::new());
        let args = ["-c".into(), "while :; do :; done".into()];
        let error = run("sh", &args, Path::new("clip.mp4"), Duration::from_millis(100), read).err().unwrap();
        assert!(matches!(error, MediaError::Timeout { limit_secs: 0.1, .. }), "{error}");
        assert_eq!(fault(&error, Fault::Row), Fault::Row);
    }

    /// Between two looks it computes in four processes, so only its end shows how long.
    #[test]
    #[cfg(target_os = "linux")]
    fn the_time_of_a_child_that_ended_counts() {
        let child = Command::new("sh")
            .args(["-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"])
            .spawn()
            .unwrap();
        let (status, computed) = wait(&Mutex::new(child), Instant::now() + Duration::from_secs(60)).unwrap();
        assert!(status.success());
        assert!(computed.unwrap() > Duration::from_millis(1), "{computed:?}");
    }

    #[test]
    fn a_child_that_hangs_is_killed() {
        let started = Instant::now();
        let limit = Duration::from_millis(50);
        let read = |stdout: &mut dyn Read| stdout.read_to_end(&mut Vec::new());
        let error = run("sleep", &["60".into()], Path::new("clip.mp4"), limit, read).err().unwrap();
        assert!(matches!(error, MediaError::ProgramWaits { waited_secs: 0.5, .. }), "{error}");
        assert_eq!(fault(&error, Fault::Row), Fault::Machine);
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn the_end_of_standard_error_is_kept() {
        let script = "i=0; while [ $i -lt 3000 ]; do echo line $i >&2; i=$((i+1)); done; exit 3";
        let args = ["-c".into(), script.into()];
        let output = run("sh", &args, Path::new("clip.mp4"), Duration::from_secs(20), |_| Ok(())).unwrap();
        assert!(output.stderr_tail.len() <= STDERR_TAIL_BYTES && output.stderr_tail.ends_with("line 2999"));
        let error = output.require_success(Path::new("clip.mp4"), "sh").unwrap_err();
        assert!(error.to_string().contains("exit status: 3"), "{error}");
    }

    #[test]
    #[cfg(unix)]
    fn what_a_hanging_child_started_is_killed_too() {
        let started = Instant::now();
        let limit = Duration::from_millis(100);
        let read = |stdout: &mut dyn Read| stdout.read_to_end(&mut Vec::new());
        let script = "sleep 60 & sleep 60";
        let error =
            run("sh", &["-c".into(), script.into()], Path::new("clip.mp4"), limit, read).err().unwrap();
        assert!(matches!(error, MediaError::ProgramWaits { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}
