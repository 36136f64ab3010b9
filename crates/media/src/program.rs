//! The programs `ffprobe` and `ffmpeg`, run as child processes on one file.
//!
//! A child gets no standard input. It may open only this file (`-protocol_whitelist file,pipe`), which must be one of the usual
//! containers; playlists and scripts that refer to other files are refused. Its address space is limited. When its time is up, it
//! is killed together with its own children.
//!
//! The limit applies to processor time, so that a busy machine does not make a file fail. A child is also killed after
//! [`WALL_FACTOR`] times the limit in real time. Such a child has been waiting for a disk or for the processor, which is a
//! failure of the machine. A program that is missing or cannot be started is also a failure of the machine. If the system does
//! not report the processor time of a child, real time counts. A child is killed as well when nobody waits for its output any more.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use omnigrpo_guard::{Errand, MachineFailure, Unwanted};
use serde::de::DeserializeOwned;

use crate::{Limits, MediaError};

/// Containers that contain their streams, instead of referring to other files.
const FORMATS: &str = "mov,matroska,webm,avi,flv,mpegts,mpeg,mpegvideo,m4v,ogg,asf,h264,hevc,ivf,nut,mxf,rm,swf,3gp,\
     wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,dts,amr,amrnb,amrwb,ape,wv,tta";

/// Maximum address space of a child. It is far above the memory that 8K video needs, and prevents a malicious file from using all
/// memory.
#[cfg(target_os = "linux")]
const MAX_ADDRESS_SPACE: u64 = 8 << 30;

/// Limit on the real time of a child, as a multiple of the limit on its processor time.
const WALL_FACTOR: u32 = 10;

/// Minimum time between two checks of a child's processor time.
const SHORTEST_LOOK: Duration = Duration::from_millis(10);

/// Longest time between two checks whether somebody waits for the output.
const LONGEST_LOOK: Duration = Duration::from_millis(100);

/// Number of bytes kept from the end of a child's standard error.
const STDERR_TAIL_BYTES: usize = 2048;

/// Maximum number of bytes read from the output of ffprobe, which is usually a few hundred bytes.
const MAX_PROBE_BYTES: u64 = 1 << 20;

/// Messages of the demuxers of ffmpeg 4 to 7 for a file that ends inside a sample.
pub(crate) const TRUNCATION_SIGNS: [&str; 2] = ["partial file", "File ended prematurely"];

/// Returns the arguments that name the input file and restrict the files that may be opened.
pub(crate) fn input_args(path: &Path) -> Vec<OsString> {
    // The prefix `file:` prevents a name with a colon or a leading dash from being read as a protocol or a flag.
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

/// Runs ffprobe on `path` and parses its JSON output. Also returns the end of its standard error.
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
        .map_err(|e| MediaError::decode(path, format!("cannot parse the output of ffprobe: {e}")))?;
    Ok((answer, output.stderr_tail))
}

/// Reason for killing a child.
#[derive(Clone, Copy, PartialEq)]
enum Killed {
    /// Processor time above the limit.
    Computed,
    /// Too much real time, without too much processor time.
    Waited,
    /// Nobody waits for the output any more.
    Unwanted,
}

/// Runs a program on `path` and passes its standard output to `consume`. Kills the program when its processor time reaches
/// `limit`.
pub(crate) fn run<T>(
    program: &'static str,
    args: &[OsString],
    path: &Path,
    limit: Duration,
    consume: impl FnOnce(&mut dyn Read) -> io::Result<T>,
) -> Result<Output<T>, MediaError> {
    let mut child = start(program, args, path)?;
    bound_memory(&child);
    let (Some(mut stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(failed(path, program, "could not be started", &"no pipes"));
    };
    let child = &Mutex::new(child);
    let deadline = Instant::now() + limit.saturating_mul(WALL_FACTOR);
    let errand = Errand::current();
    let (done, is_done) = mpsc::channel::<()>();

    let ran = std::thread::scope(|scope| {
        let thread = |name: &str| std::thread::Builder::new().name(format!("{program} {name}"));
        let threads = thread("stderr").spawn_scoped(scope, move || read_tail(&mut stderr)).and_then(|tail| {
            Ok((
                tail,
                thread("time")
                    .spawn_scoped(scope, move || watch(child, limit, deadline, errand, &is_done))?,
            ))
        });
        let (tail, watchdog) = threads.inspect_err(|_| {
            // Without the watchdog, nothing would limit the child. Killing it also closes its pipes.
            kill(&mut child.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
            let _ = wait(child, Instant::now() + Duration::from_secs(5));
        })?;
        let value = consume(&mut stdout);
        drop(stdout); // a child that still writes ends on the closed pipe
        let ended = wait(child, deadline + Duration::from_secs(5));
        drop(done);
        let mut killed = watchdog.join().unwrap_or(None);
        // A child with several threads may exceed its limit between two checks.
        if killed.is_none()
            && ended.as_ref().is_ok_and(|(_, computed)| computed.is_some_and(|time| time >= limit))
        {
            killed = Some(Killed::Computed);
        }
        Ok((value, ended.map(|(status, _)| status), killed, tail.join().unwrap_or_default()))
    });
    let (value, status, killed, stderr_tail) = ran.map_err(|e: io::Error| not_started(path, program, e))?;
    if let Some(killed) = killed {
        return Err(stopped(killed, program, path, limit));
    }
    let value = value.map_err(|e| failed(path, program, "its output could not be read", &e))?;
    let status = status.map_err(|e| failed(path, program, "its exit status could not be read", &e))?;
    Ok(Output { value, status, stderr_tail })
}

fn start(program: &'static str, args: &[OsString], path: &Path) -> Result<Child, MediaError> {
    let mut command = Command::new(program);
    // The child gets its own process group, so that its children can be killed with it. They would otherwise keep the pipes open.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(
        |e| match e.kind() {
            ErrorKind::NotFound => {
                MediaError::ProgramMissing { path: path.to_owned(), program, source: MachineFailure(e) }
            }
            // The command line is too long for the system because of the row's request, so this is not a failure of the machine.
            ErrorKind::ArgumentListTooLong => failed(path, program, "could not be started", &e),
            _ => not_started(path, program, e),
        },
    )
}

fn stopped(killed: Killed, program: &'static str, path: &Path, limit: Duration) -> MediaError {
    let path = path.to_owned();
    match killed {
        Killed::Unwanted => MediaError::Unwanted(Unwanted),
        Killed::Computed => MediaError::Timeout { path, program, limit_secs: limit.as_secs_f64() },
        Killed::Waited => {
            let source =
                io::Error::new(ErrorKind::TimedOut, "it was waiting for the processor or for its file");
            let waited_secs = limit.saturating_mul(WALL_FACTOR).as_secs_f64();
            MediaError::ProgramWaits { path, program, waited_secs, source: MachineFailure(source) }
        }
    }
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

/// Kills the child once its processor time reaches `limit`, the `deadline` has passed or the `errand` has ended. Stops early when
/// the sender of `is_done` is dropped.
fn watch(
    child: &Mutex<Child>,
    limit: Duration,
    deadline: Instant,
    errand: Option<Errand>,
    is_done: &mpsc::Receiver<()>,
) -> Option<Killed> {
    let started = Instant::now();
    loop {
        // The child is reaped under the same lock, so its process id is still valid here.
        let mut child = child.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let computed = match processor_time(&child) {
            Some(time) => time,
            None if cfg!(target_os = "linux") => return None,
            None => started.elapsed(),
        };
        let killed = match (computed >= limit, Instant::now() >= deadline) {
            (true, _) => Some(Killed::Computed),
            (_, true) => Some(Killed::Waited),
            _ if errand.as_ref().is_some_and(|errand| errand.check().is_err()) => Some(Killed::Unwanted),
            _ => None,
        };
        if killed.is_some() {
            kill(&mut child);
            return killed;
        }
        drop(child);
        // A child with one decoding thread cannot reach its limit earlier.
        let next = (limit - computed).min(deadline.saturating_duration_since(Instant::now()));
        let next = if errand.is_some() { next.min(LONGEST_LOOK) } else { next };
        match is_done.recv_timeout(next.max(SHORTEST_LOOK)) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return None,
        }
    }
}

/// Returns the processor time of a child, or `None` if the system does not report it or the child has been reaped.
#[cfg(target_os = "linux")]
fn processor_time(child: &Child) -> Option<Duration> {
    let pid = libc::pid_t::try_from(child.id()).ok()?;
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: each call writes one value of the type that it receives, and keeps no reference to it. If the process no longer
    // exists, the calls return an error.
    let known = unsafe {
        libc::clock_getcpuclockid(pid, &mut clock) == 0 && libc::clock_gettime(clock, &mut time) == 0
    };
    known.then(|| {
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    })
}

/// Returns true if the child has ended and has not been reaped.
#[cfg(target_os = "linux")]
fn has_ended(child: &Child) -> bool {
    // SAFETY: all zeros are a valid value of this plain structure.
    let mut ended: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one `siginfo_t`, and `WNOWAIT` does not reap the child. A failure means that there is no child to
    // wait for, which `try_wait` will report.
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
    // The child may already have ended, which is also fine.
    #[cfg(unix)]
    if let Ok(group) = libc::pid_t::try_from(child.id()) {
        // SAFETY: a plain system call. The child is reaped only after its output has ended. While its output is still being read,
        // the process group is therefore that of the child.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
    let _ = child.kill();
}

/// Waits for the end of the child without holding the lock that the watchdog needs. Also returns its processor time, if the
/// system reports it. After `deadline`, the child is abandoned: killing it had no effect, for example because of an unreachable
/// network drive.
fn wait(child: &Mutex<Child>, deadline: Instant) -> io::Result<(ExitStatus, Option<Duration>)> {
    loop {
        {
            let mut child = child.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if has_ended(&child) {
                // The processor time is available only until the child is reaped.
                let computed = processor_time(&child);
                if let Some(status) = child.try_wait()? {
                    return Ok((status, computed));
                }
            }
        }
        if Instant::now() > deadline {
            return Err(io::Error::new(ErrorKind::TimedOut, "the process has not ended"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reads the stream to its end and returns the last bytes.
fn read_tail(stream: &mut dyn Read) -> String {
    let mut tail = VecDeque::with_capacity(2 * STDERR_TAIL_BYTES);
    let mut buffer = [0u8; 1024];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        tail.extend(&buffer[..n]);
        tail.drain(..tail.len().saturating_sub(STDERR_TAIL_BYTES));
    }
    String::from_utf8_lossy(tail.make_contiguous()).trim().to_owned()
}

/// Limits the child's address space. The limit is set from outside after the start. Setting it between fork and exec would make
/// the start copy the page tables of this process, which may be large.
#[cfg(target_os = "linux")]
fn bound_memory(child: &Child) {
    let Ok(pid) = libc::pid_t::try_from(child.id()) else { return };
    let limit = libc::rlimit {
        rlim_cur: MAX_ADDRESS_SPACE as libc::rlim_t,
        rlim_max: MAX_ADDRESS_SPACE as libc::rlim_t,
    };
    // SAFETY: `limit` outlives the call, the old limit is not requested, and the child has not been reaped, so the process id is
    // that of the child. If the call fails, the child keeps the system's limit.
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
        // A directory cannot be executed, even by root.
        let error = run("/", &[], Path::new("clip.mp4"), Duration::from_secs(1), |_| Ok(())).err().unwrap();
        assert!(matches!(error, MediaError::ProgramNotStarted { .. }), "{error}");
        assert_eq!(fault(&error, Fault::Row), Fault::Machine);
    }

    /// The child waits for longer than the limit and then computes for a short time. If the limit applied to real time, the child
    /// would be killed.
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

    /// The processor time of a child that has ended is still counted.
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
    #[cfg(unix)]
    fn a_child_whose_output_nobody_waits_for_is_killed() {
        let started = Instant::now();
        let read = |stdout: &mut dyn Read| stdout.read_to_end(&mut Vec::new());
        let errand = Errand::default();
        let ends = errand.clone();
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            ends.end();
        });
        let args = ["-c".into(), "sleep 60 & sleep 60".into()];
        let run = || run("sh", &args, Path::new("clip.mp4"), Duration::from_secs(60), read).err().unwrap();
        let error = errand.run(run);
        assert!(matches!(error, MediaError::Unwanted(Unwanted)), "{error}");
        assert!(started.elapsed() < Duration::from_secs(10));
        later.join().unwrap();
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
