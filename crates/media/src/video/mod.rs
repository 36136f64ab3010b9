//! Decoding of videos to frames: files (through `ffmpeg`), animations, directories and lists of pictures.
//!
//! Only the frames that a [`FrameSampling`] chooses are kept. Each frame is resized as soon as it is decoded, so memory is
//! bounded by the frames kept. [`Limits`] bounds the resources for one file. A file that is truncated, damaged or too slow to
//! decode is an error.

mod animation;
mod ffmpeg;
mod frames;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use image::ImageFormat;

use crate::limits::require_regular_file;
use crate::sampling::{ClipBudget, FrameChoice, FrameSampling, PixelBudget};
use crate::{Limits, MediaError, Orientation, Rgb8Image, Turn, resize_bicubic};

/// Default rate of a list or directory of pictures, in frames per second, as in qwen-vl-utils.
pub const LISTED_FPS: f64 = 2.0;

/// Source of a video.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VideoSource {
    /// A video file, or a GIF or WebP animation (distinguished by content). The rate of an animation follows from its delays.
    File(PathBuf),
    /// A directory of pictures, sorted by name with numbers compared as numbers.
    FrameDir(PathBuf),
    /// A list of pictures, in the given order.
    FrameList(Vec<PathBuf>),
}

impl VideoSource {
    /// Creates a [`FrameDir`](Self::FrameDir) if the path is a directory, and a [`File`](Self::File) otherwise.
    pub fn from_path(path: &Path) -> Self {
        if path.is_dir() { Self::FrameDir(path.to_owned()) } else { Self::File(path.to_owned()) }
    }

    /// Returns the files of the source, in time order.
    ///
    /// # Errors
    /// Returns an error if a directory cannot be read, has no pictures, or has more pictures than the limits allow.
    pub fn files(&self, limits: &Limits) -> Result<Vec<PathBuf>, MediaError> {
        match self {
            Self::File(path) => Ok(vec![path.clone()]),
            Self::FrameDir(dir) => frames::list(dir, limits),
            Self::FrameList(paths) => Ok(paths.clone()),
        }
    }
}

/// Frames to take from a video, and their size.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoRequest {
    /// Rule for choosing frames.
    pub sampling: FrameSampling,
    /// Size of the frames.
    pub size: FrameSize,
    /// Rate of a list or directory of pictures, in frames per second; [`LISTED_FPS`] if absent. For a file, which has its own
    /// rate, a value is an error.
    pub listed_fps: Option<f64>,
    /// Form in which the frames are given.
    pub orientation: Orientation,
}

/// Size to which frames are resized.
#[derive(Debug, Clone, PartialEq)]
pub enum FrameSize {
    /// Size of the frames in the file.
    Native,
    /// Fixed size, whatever the aspect ratio of the frames.
    Exact {
        /// Width in pixels.
        width_px: u32,
        /// Height in pixels.
        height_px: u32,
    },
    /// Multiples of `factor` within a budget for each frame; see [`PixelBudget::frame_size`].
    Budget {
        /// Budget for each frame.
        budget: PixelBudget,
        /// Side of a token in pixels; see [`crate::qwen_vl::ImageProcessor::factor`].
        factor: u32,
    },
    /// Multiples of `factor` within a budget for all frames together; see [`ClipBudget::frame_size`].
    Clip {
        /// Budget for all frames together.
        budget: ClipBudget,
        /// Side of a token in pixels.
        factor: u32,
    },
    /// Squares of `side_px`, in the two steps of [`crate::smolvlm::square`].
    Square {
        /// Longest edge of a frame after the first step, in pixels.
        longest_px: u32,
        /// Side of the square, in pixels.
        side_px: u32,
    },
}

impl FrameSize {
    /// Returns the size `(width, height)` to which `num_frames` frames of `width x height` are resized.
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
            Self::Square { side_px, .. } => Ok((*side_px, *side_px)),
        }
    }
}

/// Size, number of frames and rate of a video, as stated in its headers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VideoInfo {
    /// Width of the stored pixels.
    pub width_px: u32,
    /// Height of the stored pixels.
    pub height_px: u32,
    /// Turn that brings the frames upright; of a list or directory of pictures, that of the first.
    pub turn: Turn,
    /// Number of frames.
    pub num_frames: usize,
    /// Average frames per second.
    pub fps: f64,
    /// Duration in seconds, `num_frames / fps`.
    pub duration_s: f64,
}

impl VideoInfo {
    /// Returns width and height of the frames as [`decode_video`] returns them without resizing.
    pub fn size_px(&self, orientation: Orientation) -> [u32; 2] {
        self.turn.given(orientation).size([self.width_px, self.height_px])
    }
}

/// Decoded frames of a video.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoFrames {
    /// Frames in time order, all of the same size.
    pub frames: Vec<Rgb8Image>,
    /// Index of each frame in the source.
    pub indices: Vec<usize>,
    /// Time of each frame in the source, in seconds. It is `index / source_fps`, or for an animation the sum of the delays of the
    /// earlier frames.
    pub timestamps_s: Vec<f64>,
    /// Average rate of the source, in frames per second.
    pub source_fps: f64,
    /// Number of frames taken per second of the source.
    pub sampled_fps: f64,
    /// Duration of the source, in seconds.
    pub duration_s: f64,
}

/// Reads the size, number of frames and rate of a video from its headers. This is fast for video files whose header states the
/// number of frames. Other video files are scanned, and animations are decoded. Damage after the headers is not detected.
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

/// Decodes the frames of a video that `request` selects.
///
/// # Errors
/// Returns an error if a file is missing, damaged, truncated, over a limit or too slow to decode, if `ffmpeg` is missing, or if
/// the requested frames do not exist in the video.
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
                got: format!("the content is a still image ({})", format.to_mime_type()),
                expected: "a video, an animation, or a directory or list of images",
            })
        }
        _ => Ok(Kind::Stream),
    }
}

/// Frames and sizes selected by a request for a source with known properties.
struct Plan {
    choice: FrameChoice,
    /// Indices to decode, in this order: `choice.indices` without repeats.
    distinct: Vec<usize>,
    /// Width and height of the frames before resizing.
    native: (u32, u32),
    size: (u32, u32),
    /// Longest edge of the first step of [`FrameSize::Square`], in pixels.
    longest_px: Option<u32>,
    duration_s: f64,
}

impl Plan {
    fn new(
        path: &Path,
        info: &VideoInfo,
        choice: FrameChoice,
        request: &VideoRequest,
        limits: &Limits,
    ) -> Result<Self, MediaError> {
        let native: (u32, u32) = info.size_px(request.orientation).into();
        crate::image::check_size(path, native.0, native.1, limits)?;
        let size = request.size.resolve(choice.indices.len(), native.0, native.1)?;
        crate::image::check_size(path, size.0, size.1, limits)?;
        let num_bytes = u64::from(size.0) * u64::from(size.1) * 3 * choice.indices.len() as u64;
        Limits::check(path, "size of the frames kept in bytes", num_bytes, limits.max_video_bytes)?;
        let mut distinct = choice.indices.clone();
        distinct.dedup();
        let longest_px = match request.size {
            FrameSize::Square { longest_px, .. } => Some(longest_px),
            _ => None,
        };
        Ok(Self { choice, distinct, native, size, longest_px, duration_s: info.duration_s })
    }

    fn resize(&self, frame: Rgb8Image) -> Result<Rgb8Image, MediaError> {
        if let Some(longest_px) = self.longest_px {
            return crate::smolvlm::square(&frame, longest_px, self.size.0);
        }
        if (frame.width_px, frame.height_px) == self.size {
            return Ok(frame);
        }
        resize_bicubic(&frame, self.size.0, self.size.1)
    }

    /// Builds the result from the distinct frames, which have been decoded.
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
        let duration_s = self.duration_s;
        Ok(VideoFrames { frames, indices, timestamps_s, source_fps, sampled_fps, duration_s })
    }
}
