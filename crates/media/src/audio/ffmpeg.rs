//! Audio decoded by `ffprobe` and `ffmpeg` (see [`crate::program`]): Opus, and the audio track of any file that they read.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;

use super::{AudioInfo, Mix};
use crate::program::{TRUNCATION_SIGNS, ffprobe, input_args, run};
use crate::{Limits, MediaError};

/// Maximum number of bytes read from the pipe at a time.
const CHUNK_BYTES: usize = 1 << 16;

#[derive(Deserialize)]
struct Probe {
    #[serde(default)]
    streams: Vec<Stream>,
    format: Option<Format>,
}

#[derive(Deserialize)]
struct Stream {
    sample_rate: Option<String>,
    channels: Option<u32>,
    duration: Option<String>,
}

#[derive(Deserialize)]
struct Format {
    duration: Option<String>,
}

pub(super) fn probe(path: &Path, limits: &Limits) -> Result<AudioInfo, MediaError> {
    let args =
        ["-select_streams", "a:0", "-show_entries", "stream=sample_rate,channels,duration:format=duration"];
    let (probe, _): (Probe, _) = ffprobe(path, &args, limits)?;
    let Some(stream) = probe.streams.first() else {
        return Err(MediaError::NoAudioTrack { path: path.to_owned() });
    };
    let seconds =
        |text: &Option<String>| text.as_deref()?.parse::<f64>().ok().filter(|s| s.is_finite() && *s > 0.0);
    Ok(AudioInfo {
        sample_rate_hz: stream.sample_rate.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0),
        num_channels: stream.channels.unwrap_or(0),
        duration_s: seconds(&stream.duration).or_else(|| seconds(&probe.format?.duration)),
    })
}

/// Decodes into `mix` until it is full or the track ends.
pub(super) fn decode(mix: &mut Mix<'_>, info: &AudioInfo, limits: &Limits) -> Result<(), MediaError> {
    let path = mix.path;
    // The file is decoded from its start, so that the range begins at the same sample even if seeking in the container is
    // inexact. The time limit of `ffmpeg` is not exact to a sample, so a little more than the range is decoded.
    let end_s = mix.first.saturating_add(mix.num_wanted) as f64 / f64::from(info.sample_rate_hz) + 0.1;
    let mut args: Vec<OsString> =
        ["-v", "error", "-nostdin", "-xerror", "-threads", "1"].map(Into::into).into();
    args.extend(input_args(path));
    let (end, rate, channels) =
        (format!("{end_s:.6}"), info.sample_rate_hz.to_string(), info.num_channels.to_string());
    args.extend(["-map", "0:a:0", "-t", &end, "-ar", &rate, "-ac", &channels].map(OsString::from));
    args.extend(["-c:a", "pcm_f32le", "-f", "f32le", "pipe:1"].map(OsString::from));

    let frame_bytes = 4 * mix.num_channels;
    let output = run("ffmpeg", &args, path, limits.timeout, |stdout| {
        let mut bytes = vec![0u8; CHUNK_BYTES];
        let mut filled = 0;
        loop {
            match stdout.read(&mut bytes[filled..]) {
                Ok(0) => return Ok(Ok(())),
                Ok(n) => filled += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            }
            let whole = filled - filled % frame_bytes;
            let samples: Vec<f32> = bytes[..whole]
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            bytes.copy_within(whole..filled, 0);
            filled -= whole;
            if let Err(error) = mix.push(&samples) {
                return Ok(Err(error));
            }
        }
    })?;
    output.require_success(path, "ffmpeg")?;
    if TRUNCATION_SIGNS.iter().any(|sign| output.stderr_tail.contains(sign)) {
        return Err(MediaError::decode(path, output.stderr_tail));
    }
    output.value
}
