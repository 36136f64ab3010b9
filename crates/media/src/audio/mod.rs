//! Audio: decodes files and the audio tracks of videos to mono samples, and computes the log-mel features for Whisper encoders.
//!
//! WAV, AIFF, FLAC, MP3, AAC and ALAC (bare or in MP4), ADPCM and Vorbis in Ogg are decoded in this process (`symphonia`). Opus
//! and all other kinds are decoded by `ffmpeg`. The kind is determined from the content, never from the file name. Channels are
//! mixed to their mean at the sample rate of the source. [`resample()`] converts the mix to the rate that a model expects.
//!
//! | function | result |
//! |---|---|
//! | [`probe_audio`] | rate, channels and duration, from the headers |
//! | [`read_audio`] | mono samples of a range of seconds |
//! | [`resample()`] | the same audio at another rate |
//! | [`LogMel`] | log-mel features `[mels, frames]` |
//!
//! These inputs are errors: audio longer than [`Limits::max_audio_secs`] if no end is given, samples that are not numbers, files
//! that end earlier than their header states, and files without an audio track. A caller that needs silence must request it:
//! [`AudioClip::silence`].
//!
//! Differences from `decord`, with which the published HumanOmni code reads audio: a failure is an error, whereas that code
//! substitutes ten seconds of zeros; the decoder in this process does not remove the encoder delay of AAC in MP4 (1024 or 2112
//! samples).

mod ffmpeg;
mod mel;
mod native;

use std::path::Path;

pub use mel::{LogMel, MelSpectrogram};

use crate::{Limits, MediaError};

/// Mono audio.
#[derive(Debug, Clone, PartialEq)]
pub struct AudioClip {
    /// Samples, nominally between -1 and 1.
    pub samples: Vec<f32>,
    /// Samples per second.
    pub sample_rate_hz: u32,
}

impl AudioClip {
    /// Creates silence, for a medium without audio.
    pub fn silence(duration_s: f64, sample_rate_hz: u32) -> Self {
        let num_samples = (duration_s.max(0.0) * f64::from(sample_rate_hz)).round() as usize;
        Self { samples: vec![0.0; num_samples], sample_rate_hz }
    }

    /// Returns the length in seconds.
    pub fn duration_s(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.sample_rate_hz.max(1))
    }
}

/// Returns the same sound at another rate, with `ceil(n · new rate / old rate)` samples.
///
/// # Errors
/// Returns an error if a rate is 0.
pub fn resample(clip: &AudioClip, sample_rate_hz: u32) -> Result<AudioClip, MediaError> {
    let from = clip.sample_rate_hz;
    let samples = omnigrpo_resample::resample(&clip.samples, from, sample_rate_hz).map_err(|reason| {
        MediaError::setting(
            "resampling",
            format!("{from} Hz to {sample_rate_hz} Hz ({reason})"),
            "positive rates",
        )
    })?;
    Ok(AudioClip { samples, sample_rate_hz })
}

/// Part of the audio to read.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AudioRange {
    /// Start of the range in seconds; 0 if absent.
    pub start_s: Option<f64>,
    /// End of the range in seconds. If it is absent or beyond the end of the audio, the range ends with the audio.
    pub end_s: Option<f64>,
    /// Maximum length in seconds from the start of the range, such as the window of a [`LogMel`]. Later audio is not decoded.
    /// Unlimited if absent.
    pub keep_s: Option<f64>,
}

impl AudioRange {
    /// Checks that [`read_audio`] would accept the range, given the length of the audio if it is known.
    ///
    /// # Errors
    /// Returns an error if the range is empty, starts beyond the end of the audio, or is too long.
    pub fn check(&self, path: &Path, duration_s: Option<f64>, limits: &Limits) -> Result<(), MediaError> {
        let bad = |what: &str, got: f64, expected: &str| {
            Err(MediaError::setting(
                format!("{}: {what} of the range in seconds", path.display()),
                got,
                expected,
            ))
        };
        let start_s = self.start_s.unwrap_or(0.0);
        if !(start_s.is_finite() && start_s >= 0.0) {
            return bad("start", start_s, "at least 0");
        }
        if let Some(end_s) = self.end_s.filter(|end_s| !(end_s.is_finite() && *end_s > start_s)) {
            return bad("end", end_s, "a time after the start");
        }
        if let Some(keep_s) = self.keep_s.filter(|keep_s| !(keep_s.is_finite() && *keep_s > 0.0)) {
            return bad("length", keep_s, "more than 0");
        }
        match duration_s {
            Some(duration_s) if start_s > 0.0 && start_s >= duration_s => {
                bad("start", start_s, &format!("a time within the sound of {duration_s:.3} s"))
            }
            Some(duration_s) if self.end_s.is_none() => too_long(path, duration_s - start_s, limits),
            _ => Ok(()),
        }
    }
}

impl AudioRange {
    /// Returns the number of samples in the range of audio that is `duration_s` seconds long.
    pub fn num_samples(&self, duration_s: f64, sample_rate_hz: u32) -> usize {
        let samples = |secs: f64| (secs * f64::from(sample_rate_hz)).round() as usize;
        let start_s = self.start_s.unwrap_or(0.0);
        let end_s = self.end_s.unwrap_or(f64::INFINITY).min(start_s + self.keep_s.unwrap_or(f64::INFINITY));
        let all = samples(duration_s);
        all.min(samples(end_s.min(duration_s.max(start_s)))).saturating_sub(samples(start_s)).max(1)
    }
}

/// Properties of audio, as stated in a file's headers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AudioInfo {
    /// Samples per second in each channel.
    pub sample_rate_hz: u32,
    /// Number of channels.
    pub num_channels: u32,
    /// Length in seconds, if a header states it.
    pub duration_s: Option<f64>,
}

/// Reads the headers of an audio file, or of the first audio track of a video file. Damage after the headers is not detected.
pub fn probe_audio(path: &Path, limits: &Limits) -> Result<AudioInfo, MediaError> {
    let info = match native::open(path, limits)? {
        Some(track) => track.info,
        None => ffmpeg::probe(path, limits)?,
    };
    check_info(path, &info, limits)?;
    Ok(info)
}

/// Decodes a range of an audio file, or of the first audio track of a video file. The result is mono (the mean of the channels)
/// at the sample rate of the file.
///
/// # Errors
/// Returns an error if the file is missing, damaged, truncated, over a limit, too slow to decode or without audio, if the range
/// is outside the audio, or if `ffmpeg` is required but missing.
pub fn read_audio(path: &Path, range: &AudioRange, limits: &Limits) -> Result<AudioClip, MediaError> {
    range.check(path, None, limits)?;
    let native = native::open(path, limits)?;
    let info = match &native {
        Some(track) => track.info,
        None => ffmpeg::probe(path, limits)?,
    };
    check_info(path, &info, limits)?;
    let rate = f64::from(info.sample_rate_hz);
    range.check(path, info.duration_s, limits)?;
    let start_s = range.start_s.unwrap_or(0.0);
    // If no end is given, the length that is decoded is limited.
    let mut end_s = range.end_s.unwrap_or(start_s + limits.max_audio_secs);
    end_s = range.keep_s.map_or(end_s, |keep_s| end_s.min(start_s + keep_s));
    let first = (start_s * rate).round() as u64;
    let num_wanted = ((end_s * rate).round() as u64).saturating_sub(first).max(1);
    Limits::check(
        path,
        "size of the samples kept in bytes",
        num_wanted.saturating_mul(4),
        limits.max_alloc_bytes,
    )?;

    let mut mix = Mix {
        path,
        num_channels: info.num_channels as usize,
        first,
        num_wanted,
        seen: 0,
        samples: Vec::new(),
    };
    match native {
        Some(track) => track.decode(&mut mix, limits)?,
        None => ffmpeg::decode(&mut mix, &info, limits)?,
    }
    if mix.samples.is_empty() {
        return match mix.seen {
            0 => Err(MediaError::decode(path, "the audio track is empty")),
            seen => range
                .check(path, Some(seen as f64 / rate), limits)
                .and(Err(MediaError::decode(path, "the range of seconds contains no samples"))),
        };
    }
    // If no header states the length, the limit can only be checked after decoding.
    if range.end_s.is_none() && range.keep_s.is_none() && mix.is_full() {
        too_long(path, limits.max_audio_secs + 1.0, limits)?;
    }
    Ok(AudioClip { samples: mix.samples, sample_rate_hz: info.sample_rate_hz })
}

fn check_info(path: &Path, info: &AudioInfo, limits: &Limits) -> Result<(), MediaError> {
    if info.sample_rate_hz == 0 || info.num_channels == 0 {
        return Err(MediaError::decode(path, "the header states a sample rate or a number of channels of 0"));
    }
    let rate = u64::from(info.sample_rate_hz);
    Limits::check(path, "sample rate in Hz", rate, u64::from(limits.max_sample_rate_hz))
}

fn too_long(path: &Path, duration_s: f64, limits: &Limits) -> Result<(), MediaError> {
    let (got, max) = (duration_s.ceil() as u64, limits.max_audio_secs as u64);
    Limits::check(path, "length of the sound in seconds (the range has no end)", got, max)
}

/// Mono mix of a range, built up from interleaved samples as they are decoded.
struct Mix<'a> {
    path: &'a Path,
    num_channels: usize,
    /// Index of the first frame in the range (a frame is one sample per channel).
    first: u64,
    num_wanted: u64,
    /// Number of frames received so far.
    seen: u64,
    samples: Vec<f32>,
}

impl Mix<'_> {
    fn is_full(&self) -> bool {
        self.samples.len() as u64 >= self.num_wanted
    }

    /// Adds complete frames of interleaved samples.
    fn push(&mut self, interleaved: &[f32]) -> Result<(), MediaError> {
        for frame in interleaved.chunks_exact(self.num_channels) {
            if self.seen >= self.first && !self.is_full() {
                let mean = frame.iter().map(|&x| f64::from(x)).sum::<f64>() / self.num_channels as f64;
                if !mean.is_finite() {
                    return Err(MediaError::decode(
                        self.path,
                        format!("sample {} is {mean}, expected a finite number", self.seen),
                    ));
                }
                self.samples.push(mean as f32);
            }
            self.seen += 1;
        }
        Ok(())
    }
}
