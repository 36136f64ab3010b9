//! Limits on the resources used for one file.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use omnigrpo_guard::wanted;

use crate::MediaError;

/// Maximum size of a processor's configuration. Published files have a few kilobytes, or 2 MB with mel filters.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Limits on memory and time per medium. Files may be malicious, so every decode runs under these limits.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Limits {
    /// Maximum size of an image or animation file, in bytes. It does not apply to video and audio, which are streamed. Default
    /// 256 MiB.
    pub max_file_bytes: u64,
    /// Maximum number of pixels of a picture or video frame. Default 178 956 970, above which Pillow reports an error.
    pub max_pixels: u64,
    /// Maximum memory of all buffers for decoding one picture, in bytes. Default 1 GiB.
    pub max_alloc_bytes: u64,
    /// Maximum number of frames in an animation, a directory or a list. Default 100 000.
    pub max_frames: u64,
    /// Maximum memory of the frames kept of one video (after resizing), in bytes. Default 2 GiB.
    pub max_video_bytes: u64,
    /// Maximum length of audio that is read without a range of seconds, in seconds. Default 1800.
    pub max_audio_secs: f64,
    /// Maximum sample rate of audio, in Hz. Default 768 000.
    pub max_sample_rate_hz: u32,
    /// Maximum processor time for one run of `ffprobe` or `ffmpeg`, and for decoding one animation or audio file. Default 120 s.
    pub timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_file_bytes: 256 << 20,
            max_pixels: 178_956_970,
            max_alloc_bytes: 1 << 30,
            max_frames: 100_000,
            max_video_bytes: 2 << 30,
            max_audio_secs: 1800.0,
            max_sample_rate_hz: 768_000,
            timeout: Duration::from_secs(120),
        }
    }
}

impl Limits {
    /// Returns an error that names the quantity if `got > max`.
    pub(crate) fn check(path: &Path, what: &'static str, got: u64, max: u64) -> Result<(), MediaError> {
        if got > max {
            return Err(MediaError::TooLarge { path: path.to_owned(), what, got, max });
        }
        Ok(())
    }

    /// Checks a size to which a picture is to be resized. Rows can request any size.
    ///
    /// # Errors
    /// Returns [`MediaError::Setting`] for more than `max_pixels`.
    pub fn check_resized(&self, width_px: u32, height_px: u32) -> Result<(), MediaError> {
        if u64::from(width_px) * u64::from(height_px) > self.max_pixels {
            return Err(MediaError::setting(
                "size after resizing",
                format!("{width_px}x{height_px}"),
                format!(
                    "at most {} pixels; lower resized_width and resized_height, or min_pixels",
                    self.max_pixels
                ),
            ));
        }
        Ok(())
    }

    /// Opens a regular file of at most `max_file_bytes`. Pipes and devices are refused before they are opened, because opening or
    /// reading one may block forever.
    pub(crate) fn open(&self, path: &Path) -> Result<File, MediaError> {
        wanted()?;
        require_regular_file(path)?;
        let read = |source| MediaError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(read)?;
        let num_bytes = file.metadata().map_err(read)?.len();
        Self::check(path, "file size in bytes", num_bytes, self.max_file_bytes)?;
        Ok(file)
    }

    /// Reads a complete file of at most `max_file_bytes`.
    pub(crate) fn read(&self, path: &Path) -> Result<Vec<u8>, MediaError> {
        let mut bytes = Vec::new();
        self.open(path)?
            .take(self.max_file_bytes.saturating_add(1))
            .read_to_end(&mut bytes)
            .map_err(|source| MediaError::Read { path: path.to_owned(), source })?;
        Self::check(path, "file size in bytes", bytes.len() as u64, self.max_file_bytes)?;
        Ok(bytes)
    }
}

/// Stopwatch for the processor time of the current thread. On a busy machine, a file is therefore not rejected as too slow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch(Duration);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(thread_time())
    }

    /// Returns the processor time since the start, which must have been on the same thread.
    pub(crate) fn elapsed(self) -> Duration {
        thread_time().saturating_sub(self.0)
    }
}

#[cfg(unix)]
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one value of the type that it receives. If the call fails, the time stays 0.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(not(unix))]
fn thread_time() -> Duration {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed()
}

/// Returns an error unless `path` is a regular file or a link to one.
pub(crate) fn require_regular_file(path: &Path) -> Result<(), MediaError> {
    let read = |source| MediaError::Read { path: path.to_owned(), source };
    if !std::fs::metadata(path).map_err(read)?.is_file() {
        return Err(read(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
    }
    Ok(())
}
