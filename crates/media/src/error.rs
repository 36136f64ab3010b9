//! Errors of media files, worded so that the owner of the file can act on them.

use std::path::{Path, PathBuf};

use omnigrpo_guard::MachineFailure;

/// Failure of reading, checking, decoding or laying out one medium.
///
/// Every variant concerns one medium (or one setting), but for those with a [`MachineFailure`] as their source, which
/// [`omnigrpo_guard::fault`] tells apart. None of them poisons the process, so a caller may skip the row and go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The file is missing, unreadable, or not a regular file.
    #[error("cannot read {}; check that the path exists and is readable", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A size goes over the limit in [`crate::Limits`].
    #[error("{}: {what} is {got}, the limit is {max}; shrink the file or raise the limit", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The quantity, with its unit.
        what: &'static str,
        /// Value of the file.
        got: u64,
        /// The limit.
        max: u64,
    },
    /// The content is no format that is read here.
    #[error("{}: {got}; expected {expected}; convert the file", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Description of the content.
        got: String,
        /// Accepted kinds.
        expected: &'static str,
    },
    /// The content is damaged.
    #[error("{}: cannot decode; the file is damaged or incomplete, replace it", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// Error of the decoder.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file holds fewer frames than its header promises.
    #[error("{}: got {got} frames, expected {expected}; the video is truncated or damaged, replace it", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Frames found.
        got: u64,
        /// Frames announced or asked for.
        expected: u64,
    },
    /// Sound was asked for and there is none.
    #[error("{}: the file has no audio track; remove the audio from the row or ask for silence in its place", path.display())]
    NoAudioTrack {
        /// The file.
        path: PathBuf,
    },
    /// `ffmpeg` or `ffprobe` is not installed.
    #[error(
        "{}: this file needs the program `{program}`, which was not found; install ffmpeg (Debian/Ubuntu: \
         `apt install ffmpeg`, macOS: `brew install ffmpeg`, conda: `conda install ffmpeg`) and put it on PATH",
        path.display()
    )]
    ProgramMissing {
        /// The file.
        path: PathBuf,
        /// The program.
        program: &'static str,
        /// The answer of the system.
        source: MachineFailure,
    },
    /// `ffmpeg` or `ffprobe` is there and could not be started, or not be watched over.
    #[error("{}: the program `{program}` could not be started", path.display())]
    ProgramNotStarted {
        /// The file.
        path: PathBuf,
        /// The program.
        program: &'static str,
        /// The answer of the system.
        source: MachineFailure,
    },
    /// `ffmpeg` or `ffprobe` lived long and computed little, and was killed.
    #[error(
        "{}: `{program}` was killed after {waited_secs} s in which it hardly computed; the machine is overloaded or its disk does not answer",
        path.display()
    )]
    ProgramWaits {
        /// The file.
        path: PathBuf,
        /// The program.
        program: &'static str,
        /// How long it lived, in seconds.
        waited_secs: f64,
        /// The likely reason.
        source: MachineFailure,
    },
    /// `ffmpeg` or `ffprobe` ended with an error.
    #[error("{}: `{program}` failed ({status}): {stderr_tail}; the file is damaged or of an unsupported kind", path.display())]
    ProgramFailed {
        /// The file.
        path: PathBuf,
        /// The program.
        program: &'static str,
        /// Exit status of the program.
        status: String,
        /// The end of what it wrote to standard error.
        stderr_tail: String,
    },
    /// `ffmpeg` or `ffprobe` took more processor time than it may and was killed; or a decoder of this program took more.
    #[error("{}: `{program}` did not finish within {limit_secs} s of processor time; shorten the file or raise the limit", path.display())]
    Timeout {
        /// The file.
        path: PathBuf,
        /// The program.
        program: &'static str,
        /// The limit in seconds.
        limit_secs: f64,
    },
    /// A picture of a shape the model cannot take.
    #[error("{what}: got {got}, expected {expected}; crop or pad the picture")]
    Shape {
        /// Name of the value.
        what: &'static str,
        /// The value found.
        got: String,
        /// The values accepted.
        expected: String,
    },
    /// A setting (processor file, sampling rule, limits) that makes no sense.
    #[error("{what}: got {got}, expected {expected}")]
    Setting {
        /// The setting.
        what: String,
        /// The value found.
        got: String,
        /// The values accepted.
        expected: String,
    },
}

impl MediaError {
    pub(crate) fn decode(path: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Decode { path: path.to_owned(), source: source.into() }
    }

    pub(crate) fn setting(what: impl Into<String>, got: impl ToString, expected: impl Into<String>) -> Self {
        Self::Setting { what: what.into(), got: got.to_string(), expected: expected.into() }
    }
}
