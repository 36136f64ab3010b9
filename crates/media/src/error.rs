//! Errors of media files, worded so that the user can act on them.

use std::path::{Path, PathBuf};

use omnigrpo_guard::{MachineFailure, Unwanted};

/// Failure to read, check, decode or process one medium.
///
/// Every variant concerns one medium or one setting. The exceptions are variants with a [`MachineFailure`] as their source, which
/// [`omnigrpo_guard::fault`] distinguishes. After any of these errors, the process is still usable, so a caller may skip the row
/// and continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// Missing or unreadable file, or a path that is not a regular file.
    #[error("cannot read {}; check that the path exists and is readable", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A size above a limit in [`crate::Limits`].
    #[error("{}: {what} is {got}, the limit is {max}; shrink the file or raise the limit", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// Name of the quantity, with its unit.
        what: &'static str,
        /// Size found in the file.
        got: u64,
        /// The limit.
        max: u64,
    },
    /// Content in an unsupported format.
    #[error("{}: {got}; expected {expected}; convert the file", path.display())]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// Description of the content.
        got: String,
        /// Supported formats.
        expected: &'static str,
    },
    /// Damaged content.
    #[error("{}: cannot decode the file, which is damaged or incomplete; replace it", path.display())]
    Decode {
        /// Path of the file.
        path: PathBuf,
        /// Error of the decoder.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Video with fewer frames than expected.
    #[error("{}: got {got} frames, expected {expected}; replace the video, which is truncated or damaged", path.display())]
    Truncated {
        /// Path of the file.
        path: PathBuf,
        /// Number of frames found.
        got: u64,
        /// Number of frames announced or requested.
        expected: u64,
    },
    /// File without the audio track that was requested.
    #[error("{}: the file has no audio track; remove the audio from the row or request silence instead", path.display())]
    NoAudioTrack {
        /// Path of the file.
        path: PathBuf,
    },
    /// Missing program `ffmpeg` or `ffprobe`.
    #[error(
        "{}: this file needs the program `{program}`, which was not found; install ffmpeg (Debian/Ubuntu: \
         `apt install ffmpeg`, macOS: `brew install ffmpeg`, conda: `conda install ffmpeg`) and put it on PATH",
        path.display()
    )]
    ProgramMissing {
        /// Path of the file.
        path: PathBuf,
        /// Name of the program.
        program: &'static str,
        /// Error of the system.
        source: MachineFailure,
    },
    /// Failure to start or monitor an installed `ffmpeg` or `ffprobe`.
    #[error("{}: the program `{program}` could not be started", path.display())]
    ProgramNotStarted {
        /// Path of the file.
        path: PathBuf,
        /// Name of the program.
        program: &'static str,
        /// Error of the system.
        source: MachineFailure,
    },
    /// `ffmpeg` or `ffprobe` killed after a long time in which it used little processor time.
    #[error(
        "{}: `{program}` was killed after {waited_secs} s in which it used hardly any processor time; the machine is overloaded or its disk does not respond",
        path.display()
    )]
    ProgramWaits {
        /// Path of the file.
        path: PathBuf,
        /// Name of the program.
        program: &'static str,
        /// Time for which the program ran, in seconds.
        waited_secs: f64,
        /// Likely cause.
        source: MachineFailure,
    },
    /// Error reported by `ffmpeg` or `ffprobe`.
    #[error("{}: `{program}` failed ({status}): {stderr_tail}; the file is damaged or its format is unsupported", path.display())]
    ProgramFailed {
        /// Path of the file.
        path: PathBuf,
        /// Name of the program.
        program: &'static str,
        /// Exit status of the program.
        status: String,
        /// End of the program's standard error.
        stderr_tail: String,
    },
    /// Processor time above the limit, used by `ffmpeg`, by `ffprobe` or by a decoder in this process. A child program is killed.
    #[error("{}: `{program}` did not finish within {limit_secs} s of processor time; shorten the file or raise the limit", path.display())]
    Timeout {
        /// Path of the file.
        path: PathBuf,
        /// Name of the program or decoder.
        program: &'static str,
        /// Limit on processor time, in seconds.
        limit_secs: f64,
    },
    /// Picture or video whose shape the model does not support.
    #[error("{what}: got {got}, expected {expected}; crop or pad the picture")]
    Shape {
        /// Name of the quantity.
        what: &'static str,
        /// Value found.
        got: String,
        /// Accepted values.
        expected: String,
    },
    /// Medium that nobody waits for any more.
    #[error(transparent)]
    Unwanted(#[from] Unwanted),
    /// Invalid setting (processor file, sampling rule, limits).
    #[error("{what}: got {got}, expected {expected}")]
    Setting {
        /// Name of the setting.
        what: String,
        /// Value found.
        got: String,
        /// Accepted values.
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
