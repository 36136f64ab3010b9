//! Audio that is decoded in this process, with `symphonia`.
//!
//! The decoder is third-party code that may read malicious files. The file is therefore read through a [`Source`] that fails once
//! the time limit has passed, packets are decoded one by one, and a panic becomes an error.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackType};
use symphonia::core::io::{MediaSource, MediaSourceStream};
use symphonia::core::meta::MetadataOptions;

use super::{AudioInfo, Mix};
use crate::limits::{Stopwatch, require_regular_file};
use crate::{Limits, MediaError};

/// An open audio track and its decoder.
pub(super) struct NativeTrack {
    path: PathBuf,
    reader: Box<dyn FormatReader>,
    decoder: Box<dyn AudioDecoder>,
    track_id: u32,
    /// Number of frames stated in the header.
    num_frames: Option<u64>,
    started: Stopwatch,
    pub(super) info: AudioInfo,
}

/// Opens the first audio track. Returns `None` if only ffmpeg can read this kind of file or audio.
pub(super) fn open(path: &Path, limits: &Limits) -> Result<Option<NativeTrack>, MediaError> {
    require_regular_file(path)?;
    let started = Stopwatch::start();
    let read = |source| MediaError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read)?;
    let num_bytes = file.metadata().map_err(read)?.len();
    if num_bytes == 0 {
        return Err(MediaError::decode(path, "the file is empty"));
    }
    if !is_native(path, &file)? {
        return Ok(None);
    }
    let source = Source { file, num_bytes, started, limits: limits.clone() };
    let outcome = guarded(path, || {
        let stream = MediaSourceStream::new(Box::new(source), Default::default());
        let reader = match symphonia::default::get_probe().probe(
            &Hint::new(),
            stream,
            FormatOptions::default(),
            MetadataOptions::default(),
        ) {
            Ok(reader) => reader,
            Err(error) => return unreadable(path, error, started, limits),
        };
        let Some(track) = reader.first_track(TrackType::Audio) else {
            // The container has no audio. If some of its tracks are of an unknown kind, the file is left to ffmpeg.
            let understood = reader.tracks().iter().all(|track| track.codec_params.is_some());
            return if understood && !reader.tracks().is_empty() {
                Err(MediaError::NoAudioTrack { path: path.to_owned() })
            } else {
                Ok(None)
            };
        };
        let (track_id, num_frames) = (track.id, track.num_frames.filter(|&n| n > 0));
        let Some(params) = track.codec_params.as_ref().and_then(|params| params.audio()) else {
            return Ok(None);
        };
        let decoder = match symphonia::default::get_codecs()
            .make_audio_decoder(params, &AudioDecoderOptions::default())
        {
            Ok(decoder) => decoder,
            Err(error) => return unreadable(path, error, started, limits),
        };
        let (Some(sample_rate_hz), Some(channels)) = (params.sample_rate, params.channels.as_ref()) else {
            return Ok(None);
        };
        let num_channels = channels.count() as u32;
        let info = AudioInfo { sample_rate_hz, num_channels, duration_s: duration_s(track, sample_rate_hz) };
        Ok(Some((reader, decoder, track_id, num_frames, info)))
    })?;
    Ok(outcome.map(|(reader, decoder, track_id, num_frames, info)| NativeTrack {
        path: path.to_owned(),
        reader,
        decoder,
        track_id,
        num_frames,
        started,
        info,
    }))
}

/// Returns whether the file begins with the signature of a supported kind. `symphonia` would search the first megabyte for such a
/// signature, and take a FLAC track in another container for a FLAC file.
fn is_native(path: &Path, mut file: &File) -> Result<bool, MediaError> {
    let read = |source| MediaError::Read { path: path.to_owned(), source };
    let mut start = Vec::new();
    file.take(12).read_to_end(&mut start).map_err(read)?;
    file.rewind().map_err(read)?;
    let at = |i: usize, magic: &[u8]| start.get(i..i + magic.len()) == Some(magic);
    let mpeg = matches!(start[..], [0xff, second, ..] if second & 0xe0 == 0xe0);
    let riff = at(0, b"RIFF") && at(8, b"WAVE");
    let aiff = at(0, b"FORM") && (at(8, b"AIFF") || at(8, b"AIFC"));
    Ok(riff || aiff || mpeg || at(0, b"fLaC") || at(0, b"OggS") || at(0, b"ID3") || at(4, b"ftyp"))
}

fn duration_s(track: &Track, sample_rate_hz: u32) -> Option<f64> {
    if let (Some(base), Some(duration)) = (track.time_base, track.duration) {
        return Some(base.calc_duration_saturating(duration).as_secs_f64());
    }
    track.num_frames.map(|n| n as f64 / f64::from(sample_rate_hz.max(1)))
}

impl NativeTrack {
    /// Decodes into `mix` until it is full or the track ends.
    pub(super) fn decode(mut self, mix: &mut Mix<'_>, limits: &Limits) -> Result<(), MediaError> {
        let path = self.path.clone();
        guarded(&path, || self.decode_packets(mix, limits))
    }

    fn decode_packets(&mut self, mix: &mut Mix<'_>, limits: &Limits) -> Result<(), MediaError> {
        let mut interleaved: Vec<f32> = Vec::new();
        while !mix.is_full() {
            self.check_time(limits)?;
            let packet = match self.reader.next_packet() {
                Ok(Some(packet)) if packet.track_id == self.track_id => packet,
                Ok(Some(_)) => continue,
                Ok(None) => break,
                Err(error) => return Err(self.damaged(&error, mix.seen, limits)),
            };
            let buffer = match self.decoder.decode(&packet) {
                Ok(buffer) => buffer,
                Err(error) => return Err(self.damaged(&error, mix.seen, limits)),
            };
            let spec = buffer.spec();
            let got = (spec.rate(), spec.channels().count() as u32);
            let expected = (self.info.sample_rate_hz, self.info.num_channels);
            if got != expected && !buffer.is_empty() {
                return Err(MediaError::decode(
                    &self.path,
                    format!(
                        "{} Hz in {} channels become {} Hz in {} within the file",
                        expected.0, expected.1, got.0, got.1
                    ),
                ));
            }
            buffer.copy_to_vec_interleaved(&mut interleaved);
            mix.push(&interleaved)?;
        }
        match self.num_frames {
            Some(expected) if !mix.is_full() && mix.seen + self.slack() < expected => {
                Err(MediaError::decode(
                    &self.path,
                    format!("the sound ends after {} of {expected} samples", mix.seen),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of samples that may be missing at the end of an intact file. Some encoders include their padding in the
    /// header's count.
    fn slack(&self) -> u64 {
        let codec = self.decoder.codec_info().short_name;
        let lossless = codec.starts_with("pcm") || codec == "flac" || codec == "alac";
        if lossless { 0 } else { 2048 }
    }

    fn check_time(&self, limits: &Limits) -> Result<(), MediaError> {
        omnigrpo_guard::wanted()?;
        if self.started.elapsed() > limits.timeout {
            return Err(timeout(&self.path, limits));
        }
        Ok(())
    }

    fn damaged(&self, error: &Error, seen: u64, limits: &Limits) -> MediaError {
        if self.started.elapsed() > limits.timeout {
            return timeout(&self.path, limits);
        }
        MediaError::decode(&self.path, format!("after {seen} samples: {error}"))
    }
}

/// Returns the error of opening a file, or `None` if ffmpeg should open it.
fn unreadable<T>(
    path: &Path,
    error: Error,
    started: Stopwatch,
    limits: &Limits,
) -> Result<Option<T>, MediaError> {
    if started.elapsed() > limits.timeout {
        return Err(timeout(path, limits));
    }
    match error {
        Error::Unsupported(what) => {
            tracing::debug!(path = %path.display(), what, "left to ffmpeg");
            Ok(None)
        }
        // The probe reached the end of the file without recognising its content.
        Error::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        error => Err(MediaError::decode(path, error)),
    }
}

fn timeout(path: &Path, limits: &Limits) -> MediaError {
    MediaError::Timeout {
        path: path.to_owned(),
        program: "sound decoder",
        limit_secs: limits.timeout.as_secs_f64(),
    }
}

fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T, MediaError>) -> Result<T, MediaError> {
    omnigrpo_guard::guarded(work)
        .unwrap_or_else(|_| Err(MediaError::decode(path, "the sound decoder failed with an internal error")))
}

/// A file whose reads fail once the time limit has passed. This ends every loop of the decoder that reads.
struct Source {
    file: File,
    num_bytes: u64,
    started: Stopwatch,
    limits: Limits,
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        omnigrpo_guard::wanted().map_err(io::Error::other)?;
        if self.started.elapsed() > self.limits.timeout {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the time limit has passed"));
        }
        self.file.read(buffer)
    }
}

impl Seek for Source {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.file.seek(position)
    }
}

impl MediaSource for Source {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.num_bytes)
    }
}
