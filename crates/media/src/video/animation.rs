//! GIF and WebP animations as videos.
//!
//! The rate is the number of frames divided by the sum of their delays. A delay of 10 ms or less counts as 100 ms, as in
//! browsers. Frames are composited on white, like pictures. The frames of a GIF equal those of Pillow. The frames of a WebP that
//! blends frames may differ by 1 of 255 levels. A WebP is turned upright by its orientation tag, like a picture.

use std::io::Cursor;
use std::path::Path;

use image::codecs::gif::GifDecoder;
use image::codecs::webp::WebPDecoder;
use image::{AnimationDecoder, DynamicImage, Frames, ImageDecoder, ImageFormat, ImageResult};

use super::{Plan, VideoFrames, VideoInfo, VideoRequest};
use crate::image::{check_size, decoder_limits, guarded, rgb_from_dynamic, source};
use crate::limits::Stopwatch;
use crate::{Limits, MediaError, Turn};

const PROGRAM: &str = "animation decoder";

/// Frame size and turn, start time of every frame and end time of the animation, in seconds.
struct Timing {
    size: (u32, u32),
    turn: Turn,
    starts_s: Vec<f64>,
    end_s: f64,
}

impl Timing {
    fn info(&self) -> VideoInfo {
        VideoInfo {
            width_px: self.size.0,
            height_px: self.size.1,
            turn: self.turn,
            num_frames: self.starts_s.len(),
            fps: self.starts_s.len() as f64 / self.end_s,
            duration_s: self.end_s,
        }
    }
}

/// Opens an animation and returns its size and frames. Limits apply before the first frame is decoded. A still WebP picture has
/// no frames.
fn open<'a>(
    bytes: &'a [u8],
    format: ImageFormat,
    limits: &Limits,
) -> ImageResult<((u32, u32), Option<Frames<'a>>)> {
    let limits = decoder_limits(limits);
    Ok(if format == ImageFormat::Gif {
        let mut decoder = GifDecoder::new(source(Cursor::new(bytes)))?;
        decoder.set_limits(limits)?;
        (decoder.dimensions(), Some(decoder.into_frames()))
    } else {
        let mut decoder = WebPDecoder::new(source(Cursor::new(bytes)))?;
        decoder.set_limits(limits)?;
        let animated = decoder.has_animation();
        (decoder.dimensions(), animated.then(|| decoder.into_frames()))
    })
}

/// Decodes the frames, within the limits of time and number, until `visit` returns false. A still picture has one frame.
fn walk(
    path: &Path,
    bytes: &[u8],
    format: ImageFormat,
    limits: &Limits,
    mut visit: impl FnMut(usize, image::Frame) -> Result<bool, MediaError>,
) -> Result<(u32, u32), MediaError> {
    let started = Stopwatch::start();
    guarded(path, || {
        let (size, frames) = open(bytes, format, limits).map_err(|e| MediaError::decode(path, e))?;
        check_size(path, size.0, size.1, limits)?;
        let Some(frames) = frames else {
            let still = image::load_from_memory_with_format(bytes, format)
                .map_err(|e| MediaError::decode(path, e))?;
            visit(0, image::Frame::new(still.into_rgba8()))?;
            return Ok(size);
        };
        for (i, frame) in frames.enumerate() {
            omnigrpo_guard::wanted()?;
            if started.elapsed() > limits.timeout {
                return Err(MediaError::Timeout {
                    path: path.to_owned(),
                    program: PROGRAM,
                    limit_secs: limits.timeout.as_secs_f64(),
                });
            }
            Limits::check(path, "number of frames", i as u64 + 1, limits.max_frames)?;
            if !visit(i, frame.map_err(|e| MediaError::decode(path, e))?)? {
                break;
            }
        }
        Ok(size)
    })
}

fn timing(path: &Path, bytes: &[u8], format: ImageFormat, limits: &Limits) -> Result<Timing, MediaError> {
    let (mut starts_s, mut end_s) = (Vec::new(), 0.0);
    let size = walk(path, bytes, format, limits, |_, frame| {
        let (numerator, denominator) = frame.delay().numer_denom_ms();
        let delay_ms = f64::from(numerator) / f64::from(denominator);
        starts_s.push(end_s);
        end_s += if delay_ms > 10.0 { delay_ms } else { 100.0 } / 1000.0;
        Ok(true)
    })?;
    if starts_s.is_empty() {
        return Err(MediaError::decode(path, "the animation has no frames"));
    }
    let turn = Turn::of_picture(&mut Cursor::new(bytes), format);
    Ok(Timing { size, turn, starts_s, end_s })
}

pub(super) fn probe(path: &Path, format: ImageFormat, limits: &Limits) -> Result<VideoInfo, MediaError> {
    Ok(timing(path, &limits.read(path)?, format, limits)?.info())
}

pub(super) fn decode(
    path: &Path,
    format: ImageFormat,
    request: &VideoRequest,
    limits: &Limits,
) -> Result<VideoFrames, MediaError> {
    let bytes = limits.read(path)?;
    let timing = timing(path, &bytes, format, limits)?;
    let info = timing.info();
    let choice = request.sampling.choose(info.num_frames, info.fps)?;
    let plan = Plan::new(path, &info, choice, request, limits)?;
    let mut frames = Vec::with_capacity(plan.distinct.len());
    walk(path, &bytes, format, limits, |i, frame| {
        if plan.distinct.get(frames.len()) == Some(&i) {
            let rgba = DynamicImage::ImageRgba8(frame.into_buffer());
            let frame = info.turn.given(request.orientation).apply(rgb_from_dynamic(path, rgba)?);
            frames.push(plan.resize(frame)?);
        }
        Ok(frames.len() < plan.distinct.len())
    })?;
    plan.finish(path, frames, info.fps, |i| timing.starts_s[i])
}
