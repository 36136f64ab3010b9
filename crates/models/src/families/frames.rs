//! Media files, and the choice of the frames of a video; shared by the families.

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumRef, MediumSource};
use omnigrpo_media::{
    FrameChoice, FrameSampling, FrameSize, LISTED_FPS, QwenSampling, VideoFrames, VideoRequest, VideoSource,
    decode_video,
};

use super::{FrameRule, MediaSettings};
use crate::error::{ModelError, Result};

/// Returns the file of a picture or sound.
///
/// # Errors
/// Returns an error if the medium is a list of frames.
pub(crate) fn file(medium: &MediumRef) -> Result<&Path> {
    match &medium.source {
        MediumSource::Path(path) => Ok(path),
        MediumSource::Frames(_) => {
            Err(ModelError::Medium { kind: medium.kind, what: "got a list of frames, expected one file" })
        }
    }
}

/// A video and the choice of its frames.
pub(crate) struct FramePlan {
    pub source: VideoSource,
    pub sampling: FrameSampling,
    /// Frame rate of a list or folder of pictures, if the row gives it.
    pub listed_fps: Option<f64>,
}

impl FramePlan {
    /// Combines the options of a row with the settings for videos.
    pub fn new(medium: &MediumRef, settings: &MediaSettings) -> Self {
        let source = match &medium.source {
            MediumSource::Path(path) => VideoSource::from_path(path),
            MediumSource::Frames(frames) => VideoSource::FrameList(frames.clone()),
        };
        let own = &medium.options;
        let listed = !matches!(source, VideoSource::File(_));
        let options = own.or(&settings.video);
        let count = |n: Option<u32>| n.map(|n| n as usize);
        let qwen = FrameSampling::Qwen(QwenSampling {
            // The rate of a list is the rate at which its pictures were taken. It does not select frames.
            fps: options.fps.filter(|_| !listed),
            nframes: count(options.nframes),
            // A number of frames from the run's settings is a target that short clips may miss. A number in the row is exact.
            as_many_as_there_are: own.nframes.is_none(),
            min_frames: count(options.min_frames),
            max_frames: count(options.max_frames),
            video_start: options.video_start,
            video_end: options.video_end,
        });
        let row_decides = own.nframes.is_some()
            || (own.fps.is_some() && !listed)
            || own.video_start.or(own.video_end).is_some();
        let interval = || FrameSampling::BaseInterval {
            interval_secs: settings.base_interval_secs,
            min_frames: count(options.min_frames).unwrap_or(4),
            max_frames: count(options.max_frames).unwrap_or(8),
        };
        let sampling = match (&settings.rule, &own.segments) {
            _ if row_decides => qwen,
            (FrameRule::Segments, Some(segments)) => {
                let num_frames = settings.drawn(medium).unwrap_or(segments.max_frames) as usize;
                FrameSampling::Segments {
                    frame_counts: segments.frame_counts.iter().map(|&n| f64::from(n)).collect(),
                    num_frames,
                }
            }
            (FrameRule::Qwen, _) => qwen,
            (FrameRule::Processor, _) => FrameSampling::Rate {
                fps: settings.video.fps.unwrap_or(2.0),
                min_frames: count(options.min_frames).unwrap_or(4),
                max_frames: count(options.max_frames).unwrap_or(768),
            },
            (FrameRule::BaseInterval | FrameRule::Segments, _) => interval(),
        };
        Self { source, sampling, listed_fps: if listed { own.fps } else { None } }
    }

    /// Reads the frames at a size, in the order that the settings determine.
    ///
    /// # Errors
    /// Returns an error if the video is unreadable or does not allow the choice of frames.
    pub fn decode(self, settings: &MediaSettings, size: FrameSize) -> Result<VideoFrames> {
        let request = VideoRequest {
            sampling: self.sampling,
            size,
            listed_fps: self.listed_fps,
            orientation: settings.orientation,
        };
        let mut video = decode_video(&self.source, &request, &settings.limits)?;
        settings.order(&mut video.frames);
        Ok(video)
    }

    /// Returns the duration of the video in seconds, given the header.
    pub fn duration_secs(&self, header: &MediumInfo) -> f64 {
        let frames = header.num_frames.unwrap_or_default() as f64;
        match self.source {
            VideoSource::File(_) => header.duration_secs.unwrap_or_default(),
            _ => frames / self.listed_fps.unwrap_or(LISTED_FPS),
        }
    }

    /// Returns the times of the frames that will be read, in seconds, and the number of frames per second, given the header.
    ///
    /// # Errors
    /// Returns an error if the video does not allow the choice of frames.
    pub fn times_secs(&self, header: &MediumInfo) -> Result<(Vec<f64>, f64)> {
        let frames = header.num_frames.unwrap_or_default() as usize;
        let (FrameChoice { indices, sampled_fps }, fps) = match self.source {
            VideoSource::File(_) => {
                let fps = header.fps.unwrap_or_default();
                (self.sampling.choose(frames, fps)?, fps)
            }
            _ => {
                let fps = self.listed_fps.unwrap_or(LISTED_FPS);
                (self.sampling.choose_listed(frames, fps)?, fps)
            }
        };
        Ok((indices.iter().map(|&i| i as f64 / fps).collect(), sampled_fps))
    }
}
