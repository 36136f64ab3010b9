//! Sound: files and the audio tracks of videos to mono samples, and on to the log-mel features that Whisper encoders take.
//!
//! WAV, AIFF, FLAC, MP3, AAC and ALAC (bare or in MP4), ADPCM and Vorbis in Ogg are decoded in this process
//! (`symphonia`); Opus and every other kind goes through `ffmpeg`. The content determines the kind, never the name. Channels are mixed
//! to their mean at the source's own rate; [`resample()`] brings the mix to the rate a model hears.
//!
//! | function | gives |
//! |---|---|
//! | [`probe_audio`] | rate, channels, duration, from the headers |
//! | [`read_audio`] | mono samples of a range of seconds |
//! | [`resample()`] | the same sound at another rate |
//! | [`LogMel`] | log-mel features `[mels, frames]` |
//!
//! Refused: sound longer than [`Limits::max_audio_secs`] if no end is given, samples that are not numbers, files that end before
//! their header says, files without an audio track (silence is something a caller has to ask for:
//! [`AudioClip::silence`]).
//!
//! Differences from `decord`, which the published HumanOmni code reads sound with: a failure is an error there turned into ten seconds
//! of zeros; the encoder delay of AAC in MP4 (1024 or 2112 samples) is not cut by the decoder in this process.

mod ffmpeg;
mod mel;
mod native;

use std::path::Path;

pub use mel::{LogMel, MelSpectrogram};

use crate::{Limits, MediaError};

/// Mono sound.
#[derive(Debug, Clone, PartialEq)]
pub struct AudioClip {
    /// Samples, nominally from -1 to 1.
    pub samples: Vec<f32>,
    /// Samples per second.
    pub sample_rate_hz: u32,
}

impl AudioClip {
    /// Silence, for a medium that has no sound of its own.
    pub fn silence(duration_s: f64, sample_rate_hz: u32) -> Self {
        let num_samples = (duration_s.max(0.0) * f64::from(sample_rate_hz)).round() as usize;
        Self { samples: vec![0.0; num_samples], sample_rate_hz }
    }

    /// Length in seconds.
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
        MediaError::setting("resampling", format!("{from} Hz to {sample_rate_hz} Hz ({reason})"), "positive rates")
    })?;
    Ok(AudioClip { samples, sample_rate_hz })
}

/// Which part of a sound to take.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AudioRange {
    /// First second taken; 0 if absent.
    pub start_s: Option<f64>,
    /// Where the range ends, seconds; the end of the sound if absent or later than that.
    pub end_s: Option<f64>,
    /// Most seconds taken from the start of the range on, such as the window of a [`LogMel`]. What comes after is not even
    /// decoded. Open if absent.
    pub keep_s: Option<f64>,
}

impl AudioRange {
    /// Fails for a range that [`read_audio`] would refuse, given the length of the sound as far as it is known.
    ///
    /// # Errors
    /// A range that is empty, lies behind the end, or is too long.
    pub fn check(&self, path: &Path, duration_s: Option<f64>, limits: &Limits) -> Result<(), MediaError> {
        let bad = |what: &str, got: f64, expected: &str| {
            Err(MediaError::setting(
                format!("{}: {what} of the range of seconds", path.display()),
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

/// Header of a sound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AudioInfo {
    /// Samples per second and channel.
    pub sample_rate_hz: u32,
    /// Number of channels.
    pub num_channels: u32,
    /// Length in seconds, where a header says.
    pub duration_s: Option<f64>,
}

/// Reads what the headers of a sound file, or of the first audio track of a video file, say. Damage further on stays unseen.
pub fn probe_audio(path: &Path, limits: &Limits) -> Result<AudioInfo, MediaError> {
    let info = match native::open(path, limits)? {
        Some(track) => track.info,
        None => ffmpeg::probe(path, limits)?,
    };
    check_info(path, &info, limits)?;
    Ok(info)
}

/// Decodes a range of a sound file, or of the first audio track of a video file, to mono (the mean of the channels)
/// at the file's own rate.
///
/// # Errors
/// A file that is missing, damaged, cut off, over a limit, too slow, or without sound; a range outside the sound; `ffmpeg`
/// missing for a kind that needs it.
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
    // Without an end, no more than the limit is ever decoded.
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
                .and(Err(MediaError::decode(path, "the range of seconds holds no sample"))),
        };
    }
    // Where no header told the length, the limit shows only here.
    if range.end_s.is_none() && range.keep_s.is_none() && mix.is_full() {
        too_long(path, limits.max_audio_secs + 1.0, limits)?;
    }
    Ok(AudioClip { samples: mix.samples, sample_rate_hz: info.sample_rate_hz })
}

fn check_info(path: &Path, info: &AudioInfo, limits: &Limits) -> Result<(), MediaError> {
    if info.sample_rate_hz == 0 || info.num_channels == 0 {
        return Err(MediaError::decode(path, "the header gives a sample rate or a number of channels of 0"));
    }
    let rate = u64::from(info.sample_rate_hz);
    Limits::check(path, "sample rate in Hz", rate, u64::from(limits.max_sample_rate_hz))
}

fn too_long(path: &Path, duration_s: f64, limits: &Limits) -> Result<(), MediaError> {
    let (got, max) = (duration_s.ceil() as u64, limits.max_audio_secs as u64);
    Limits::check(path, "length of the sound in seconds (without an end to the part that is used)", got, max)
}

/// Collects the mono mix of a range while interleaved samples arrive.
struct Mix<'a> {
    path: &'a Path,
    num_channels: usize,
    /// Index of the first frame (one sample per channel) wanted.
    first: u64,
    num_wanted: u64,
    /// Frames that have come by.
    seen: u64,
    samples: Vec<f32>,
}

impl Mix<'_> {
    fn is_full(&self) -> bool {
        self.samples.len() as u64 >= self.num_wanted
    }

    /// Takes whole frames, interleaved.
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
