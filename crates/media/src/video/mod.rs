//! Videos to frames: files through `ffmpeg`, animations, directories and lists of pictures.
//!
//! Only the frames a [`FrameSampling`] picks are kept, and each is resized as it arrives, so memory is bounded by the frames
//! kept. What one file may cost is in [`Limits`]; a file that ends early, is damaged, or takes too long is an error.

mod animation;
mod ffmpeg;
mod frames;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use image::ImageFormat;

use crate::limits::require_regular_file;
use crate::sampling::{ClipBudget, FrameChoice, FrameSampling, PixelBudget};
use crate::{Limits, MediaError, Rgb8Image, resize_bicubic};

/// Rate a list or directory of pictures counts as, frames per second (qwen-vl-utils).
pub const LISTED_FPS: f64 = 2.0;

/// Where a video comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VideoSource {
    /// A video file, or a GIF or WebP animation (told apart by content). An animation's own delays give its rate.
    File(PathBuf),
    /// A directory of pictures, in the order of their names with numbers compared as numbers.
    FrameDir(PathBuf),
    /// Pictures in the given order.
    FrameList(Vec<PathBuf>),
}

impl VideoSource {
    /// A directory is a [`FrameDir`](Self::FrameDir), anything else a [`File`](Self::File).
    pub fn from_path(path: &Path) -> Self {
        if path.is_dir() { Self::FrameDir(path.to_owned()) } else { Self::File(path.to_owned()) }
    }

    /// The files it is made of, in time order.
    ///
    /// # Errors
    /// A directory that cannot be read, has no pictures, or more than the limits allow.
    pub fn files(&self, limits: &Limits) -> Result<Vec<PathBuf>, MediaError> {
        match self {
            Self::File(path) => Ok(vec![path.clone()]),
            Self::FrameDir(dir) => frames::list(dir, limits),
            Self::FrameList(paths) => Ok(paths.clone()),
        }
    }
}

/// Frames and sizes to take from a video.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoRequest {
    /// Which frames.
    pub sampling: FrameSampling,
    /// How large.
    pub size: FrameSize,
    /// Rate of a list or directory of pictures, frames per second; [`LISTED_FPS`] if absent. An error with
    /// any other source, which has a rate of its own.
    pub listed_fps: Option<f64>,
}

/// How large the frames become.
#[derive(Debug, Clone, PartialEq)]
pub enum FrameSize {
    /// The sizes of the file.
    Native,
    /// This size, whatever the shape was.
    Exact {
        /// Width in pixels.
        width_px: u32,
        /// Height in pixels.
        height_px: u32,
    },
    /// Multiples of `factor` within a budget; see [`PixelBudget::frame_size`].
    Budget {
        /// The budget.
        budget: PixelBudget,
        /// Side of a token in pixels; see [`crate::qwen_vl::ImageProcessor::factor`].
        factor: u32,
    },
    /// Multiples of `factor` within a budget of all frames; see [`ClipBudget::frame_size`].
    Clip {
        /// The budget.
        budget: ClipBudget,
        /// Side of a token in pixels.
        factor: u32,
    },
}

impl FrameSize {
    /// `(width, height)` of `num_frames` frames that were `width x height`.
    pub fn resolve(&self, num_frames: usize, width: u32, height: u32) -> Result<(u32, u32), MediaError> {
        match self {
            Self::Native => Ok((width, height)),
            Self::Exact { width_px, height_px } => Ok((*width_px, *height_px)),
            Self::Budget { budget, factor } => {
                budget.frame_size(num_frames, height, width, *factor).map(|(h, w)| (w, h))
            }
            Self::Clip { budget, factor } => {
                budget.frame_size(num_frames, height, width, *factor).map(|(h, w)| (w, h))
            }
        }
    }
}

/// Extent of a video as far as its headers tell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VideoInfo {
    /// Width in pixels, before any rotation the file asks for (none is applied).
    pub width_px: u32,
    /// Height in pixels.
    pub height_px: u32,
    /// Number of frames.
    pub num_frames: usize,
    /// Average frames per second.
    pub fps: f64,
    /// `num_frames / fps`, seconds.
    pub duration_s: f64,
}

/// Frames of a video.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoFrames {
    /// The frames, all of one size, in time order.
    pub frames: Vec<Rgb8Image>,
    /// Index of each frame in the source.
    pub indices: Vec<usize>,
    /// Time of each frame in the source, seconds: `index / source_fps`, for an animation the sum of the delays before.
    pub timestamps_s: Vec<f64>,
    /// Average rate of the source, frames per second.
    pub source_fps: f64,
    /// Frames taken per second of source.
    pub sampled_fps: f64,
}

impl VideoFrames {
    /// Seconds per time slice of `temporal_patch_size` frames, which sets the temporal positions of Qwen2.5-VL.
    pub fn second_per_grid_t(&self, temporal_patch_size: u32) -> f64 {
        f64::from(temporal_patch_size) / self.sampled_fps
    }
}

/// Reads the extent of a video from its headers. Cheap for video files whose header holds the frame count; others
/// are scanned, animations decoded. Damage further on stays unseen.
pub fn probe_video(
    source: &VideoSource,
    listed_fps: Option<f64>,
    limits: &Limits,
) -> Result<VideoInfo, MediaError> {
    check_listed_fps(source, listed_fps)?;
    match source {
        VideoSource::File(path) => match kind_of(path)? {
            Kind::Animation(format) => animation::probe(path, format, limits),
            Kind::Stream => ffmpeg::probe(path, limits),
        },
        VideoSource::FrameDir(dir) => frames::probe(&frames::list(dir, limits)?, listed_fps, limits),
        VideoSource::FrameList(paths) => frames::probe(paths, listed_fps, limits),
    }
}

/// Decodes the frames of a video that `request` asks for.
///
/// # Errors
/// Files that are missing, damaged, truncated, over a limit or too slow; `ffmpeg` missing; a choice of frames the video
/// cannot give.
pub fn decode_video(
    source: &VideoSource,
    request: &VideoRequest,
    limits: &Limits,
) -> Result<VideoFrames, MediaError> {
    check_listed_fps(source, request.listed_fps)?;
    match source {
        VideoSource::File(path) => match kind_of(path)? {
            Kind::Animation(format) => animation::decode(path, format, request, limits),
            Kind::Stream => ffmpeg::decode(path, request, limits),
        },
        VideoSource::FrameDir(dir) => frames::decode(&frames::list(dir, limits)?, request, limits),
        VideoSource::FrameList(paths) => frames::decode(paths, request, limits),
    }
}

fn check_listed_fps(source: &VideoSource, listed_fps: Option<f64>) -> Result<(), MediaError> {
    match (source, listed_fps) {
        (VideoSource::File(_), Some(fps)) => {
            Err(MediaError::setting("rate of a frame list", fps, "none for a file, which has its own rate"))
        }
        (_, Some(fps)) if !(fps.is_finite() && fps > 0.0) => {
            Err(MediaError::setting("rate of a frame list", fps, "a positive number of frames per second"))
        }
        _ => Ok(()),
    }
}

enum Kind {
    Animation(ImageFormat),
    Stream,
}

fn kind_of(path: &Path) -> Result<Kind, MediaError> {
    require_regular_file(path)?;
    let mut start = Vec::new();
    File::open(path)
        .and_then(|file| file.take(64).read_to_end(&mut start))
        .map_err(|source| MediaError::Read { path: path.to_owned(), source })?;
    match image::guess_format(&start) {
        Ok(format @ (ImageFormat::Gif | ImageFormat::WebP)) => Ok(Kind::Animation(format)),
        Ok(format @ (ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::Bmp | ImageFormat::Tiff)) => {
            Err(MediaError::Format {
                path: path.to_owned(),
                got: format!("the content is a still image ({format:?})"),
                expected: "a video, an animation, or a directory or list of images",
            })
        }
        _ => Ok(Kind::Stream),
    }
}

/// The frames a request picks, once the extent of the source is known.
struct Plan {
    choice: FrameChoice,
    /// `choice.indices` without repeats: what has to be decoded, in this order.
    distinct: Vec<usize>,
    native: (u32, u32),
    size: (u32, u32),
}

impl Plan {
    fn new(
        path: &Path,
        info: &VideoInfo,
        choice: FrameChoice,
        size: &FrameSize,
        limits: &Limits,
    ) -> Result<Self, MediaError> {
        let native = (info.width_px, info.height_px);
        crate::image::check_size(path, native.0, native.1, limits)?;
        let size = size.resolve(choice.indices.len(), native.0, native.1)?;
        crate::image::check_size(path, size.0, size.1, limits)?;
        let num_bytes = u64::from(size.0) * u64::from(size.1) * 3 * choice.indices.len() as u64;
        Limits::check(path, "size of the frames kept in bytes", num_bytes, limits.max_video_bytes)?;
        let mut distinct = choice.indices.clone();
        distinct.dedup();
        Ok(Self { choice, distinct, native, size })
    }

    fn resize(&self, frame: Rgb8Image) -> Result<Rgb8Image, MediaError> {
        if (frame.width_px, frame.height_px) == self.size {
            return Ok(frame);
        }
        resize_bicubic(&frame, self.size.0, self.size.1)
    }

    /// The result, from the decoded distinct frames.
    fn finish(
        self,
        path: &Path,
        decoded: Vec<Rgb8Image>,
        source_fps: f64,
        time_of: impl Fn(usize) -> f64,
    ) -> Result<VideoFrames, MediaError> {
        if decoded.len() != self.distinct.len() {
            return Err(MediaError::Truncated {
                path: path.to_owned(),
                got: decoded.len() as u64,
                expected: self.distinct.len() as u64,
            });
        }
        let FrameChoice { indices, sampled_fps } = self.choice;
        let frames = if indices.len() == decoded.len() {
            decoded
        } else {
            indices
                .iter()
                .filter_map(|i| Some(decoded[self.distinct.binary_search(i).ok()?].clone()))
                .collect()
        };
        let timestamps_s = indices.iter().map(|&i| time_of(i)).collect();
        Ok(VideoFrames { frames, indices, timestamps_s, source_fps, sampled_fps })
    }
}
