//! Bounds on what one file may cost.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use crate::MediaError;

/// Size of a processor's configuration; published ones have a few kilobytes, and 2 MB with mel filters.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Bounds on memory and time per medium. Files come from outside, so every decode runs under these.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Largest image or animation file, bytes. Video and sound are streamed and not bound by it. 256 MiB.
    pub max_file_bytes: u64,
    /// Largest picture or video frame, pixels. Pillow's own error threshold, 178 956 970.
    pub max_pixels: u64,
    /// Largest sum of buffers while decoding one picture, bytes. 1 GiB.
    pub max_alloc_bytes: u64,
    /// Largest number of frames in an animation, a directory or a list. 100 000.
    pub max_frames: u64,
    /// Largest sum of the frames kept of one video (after resizing), bytes. 2 GiB.
    pub max_video_bytes: u64,
    /// Longest sound that is read without a range in seconds that picks a part of it, seconds. 1800.
    pub max_audio_secs: f64,
    /// Highest sample rate of sound, Hz. 768 000.
    pub max_sample_rate_hz: u32,
    /// Processor time for one run of `ffprobe` or `ffmpeg`, and for decoding one animation or sound. 120 s.
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
    /// Fails unless `got <= max`, naming the quantity.
    pub(crate) fn check(path: &Path, what: &'static str, got: u64, max: u64) -> Result<(), MediaError> {
        if got > max {
            return Err(MediaError::TooLarge { path: path.to_owned(), what, got, max });
        }
        Ok(())
    }

    /// Fails unless a picture may be resized to this size. Rows can ask for any.
    ///
    /// # Errors
    /// [`MediaError::Setting`] for more than `max_pixels`.
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

    /// Opens a regular file of at most `max_file_bytes`. Pipes and devices are refused before they are opened,
    /// since opening or reading one may never return.
    pub(crate) fn open(&self, path: &Path) -> Result<File, MediaError> {
        require_regular_file(path)?;
        let read = |source| MediaError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(read)?;
        let num_bytes = file.metadata().map_err(read)?.len();
        Self::check(path, "file size in bytes", num_bytes, self.max_file_bytes)?;
        Ok(file)
    }

    /// Reads a whole file of at most `max_file_bytes`.
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

/// Processor time of the thread that asks, so that a loaded machine makes no file a bad one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch(Duration);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(thread_time())
    }

    /// Since the start, which was on this thread.
    pub(crate) fn elapsed(self) -> Duration {
        thread_time().saturating_sub(self.0)
    }
}

#[cfg(unix)]
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one value of the type that it is given. Where it fails, no time passes.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(not(unix))]
fn thread_time() -> Duration {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed()
}

/// Fails unless `path` is (or links to) a regular file.
pub(crate) fn require_regular_file(path: &Path) -> Result<(), MediaError> {
    let read = |source| MediaError::Read { path: path.to_owned(), source };
    if !std::fs::metadata(path).map_err(read)?.is_file() {
        return Err(read(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
    }
    Ok(())
}
