//! A medium on its way to a tower: what its header says, what it will become, and its numbers.

use std::fmt;

use omnigrpo_data::{MediumInfo, MediumRef, MediumSource};
use omnigrpo_media::audio::probe_audio;
use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_media::{Limits, MediaError, VideoSource, probe_image, probe_video};
use omnigrpo_text::MediumKind;

use crate::error::{ModelError, Result};

/// Reads what a medium's header says. Depends on the source alone. A file without an audio track has no sample rate; whether
/// that is an error is for `Processor::plan` to say.
///
/// # Errors
/// An unreadable medium, or one over a limit, with its path.
pub fn probe_medium(medium: &MediumRef, limits: &Limits) -> Result<MediumInfo> {
    match (medium.kind, &medium.source) {
        (MediumKind::Image, MediumSource::Path(path)) => {
            let info = probe_image(path, limits)?;
            Ok(MediumInfo {
                width_px: Some(info.width_px),
                height_px: Some(info.height_px),
                ..MediumInfo::default()
            })
        }
        (MediumKind::Video, source) => {
            let source = match source {
                MediumSource::Path(path) => VideoSource::from_path(path),
                MediumSource::Frames(frames) => VideoSource::FrameList(frames.clone()),
            };
            let info = probe_video(&source, None, limits)?;
            Ok(MediumInfo {
                width_px: Some(info.width_px),
                height_px: Some(info.height_px),
                num_frames: Some(info.num_frames as u64),
                fps: Some(info.fps),
                duration_secs: Some(info.duration_s),
                sample_rate_hz: None,
            })
        }
        (MediumKind::Audio, MediumSource::Path(path)) => match probe_audio(path, limits) {
            Ok(info) => Ok(MediumInfo {
                duration_secs: info.duration_s,
                sample_rate_hz: Some(info.sample_rate_hz),
                ..MediumInfo::default()
            }),
            Err(MediaError::NoAudioTrack { .. }) => Ok(MediumInfo::default()),
            Err(error) => Err(error.into()),
        },
        (kind, MediumSource::Frames(_)) => {
            Err(ModelError::Medium { kind, what: "got a list of frames, expected one file" })
        }
    }
}

/// Shape of a prepared medium's numbers. Each family makes and reads the shapes of its own towers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumShape {
    /// Rows of vision patches, `[t · h · w, patch_len]`.
    Patches(PatchGrid),
    /// Pictures of one size, `[count, 3, height, width]`: the tiles of an image, the frames of a video.
    Pictures {
        /// How many.
        count: usize,
        /// Height of each, px.
        height_px: usize,
        /// Width of each, px.
        width_px: usize,
    },
    /// Squares with masks of real pixels, `[count, 4, side, side]`: three colours and the mask.
    Masked {
        /// How many.
        count: usize,
        /// Side of each, px.
        side_px: usize,
    },
    /// A log-mel spectrogram, `[mels, frames]`.
    Mel {
        /// Frequency bands.
        mels: usize,
        /// Steps in time.
        frames: usize,
    },
}

impl MediumShape {
    /// The grid of [`Self::Patches`].
    ///
    /// # Errors
    /// Another shape.
    pub fn patches(&self) -> Result<PatchGrid> {
        match self {
            Self::Patches(grid) => Ok(*grid),
            other => Err(ModelError::shape(format!("this tower reads patches, the medium is {other}"))),
        }
    }

    /// Count, height and width of [`Self::Pictures`].
    ///
    /// # Errors
    /// Another shape.
    pub fn pictures(&self) -> Result<[usize; 3]> {
        match self {
            Self::Pictures { count, height_px, width_px } => Ok([*count, *height_px, *width_px]),
            other => Err(ModelError::shape(format!("this tower reads pictures, the medium is {other}"))),
        }
    }

    /// Bands and frames of [`Self::Mel`].
    ///
    /// # Errors
    /// Another shape.
    pub fn mel(&self) -> Result<[usize; 2]> {
        match self {
            Self::Mel { mels, frames } => Ok([*mels, *frames]),
            other => Err(ModelError::shape(format!("this tower reads spectrograms, the medium is {other}"))),
        }
    }
}

impl fmt::Display for MediumShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Patches(grid) => {
                write!(f, "{}×{}×{} patches (time × height × width)", grid.t, grid.h, grid.w)
            }
            Self::Pictures { count, height_px, width_px } => {
                write!(f, "{count} × {height_px}×{width_px} px (pictures, height × width)")
            }
            Self::Masked { count, side_px } => write!(f, "{count} × {side_px} px (squares with masks)"),
            Self::Mel { mels, frames } => write!(f, "{mels}×{frames} log-mel (bands × frames)"),
        }
    }
}

/// A medium, decoded and resized: the input of a tower. The sound of a clip is a medium of its own, since another tower
/// reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct MediumInput {
    /// Image, video or audio.
    pub kind: MediumKind,
    /// Shape of `data`.
    pub shape: MediumShape,
    /// The numbers, normalised as the tower expects them.
    pub data: Vec<f32>,
    /// Seconds from one temporal patch to the next; 0 where the family has none.
    pub seconds_per_grid: f64,
    /// Times of the frames in the clip, seconds; empty for an image.
    pub frame_times_secs: Vec<f64>,
}

/// Prepared form of a medium, known from its header alone.
#[derive(Clone, Debug, PartialEq)]
pub struct MediumPlan {
    /// Image, video or audio.
    pub kind: MediumKind,
    /// Shape of the prepared medium.
    pub shape: MediumShape,
    /// Tokens in the prompt, counting features only.
    pub tokens: usize,
    /// Times of the frames that will be read, seconds.
    pub frame_times_secs: Vec<f64>,
}

impl MediumPlan {
    /// Returns the parts that a prompt shows: kind, shape, and times of the frames in seconds.
    pub(crate) fn shown(&self) -> (MediumKind, &MediumShape, &[f64]) {
        (self.kind, &self.shape, &self.frame_times_secs)
    }
}
