//! A medium before it enters a tower: its header, its prepared shape and its values.

use std::fmt;

use omnigrpo_data::{MediumInfo, MediumRef, MediumSource};
use omnigrpo_media::audio::probe_audio;
use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_media::{Limits, MediaError, VideoSource, probe_image, probe_video};
use omnigrpo_text::{Form, MediumKind};

use crate::error::{ModelError, Result};

/// Reads the header of a medium. The result depends only on the source. A file without an audio track has no sample rate;
/// `Processor::plan` decides whether that is an error.
///
/// # Errors
/// Returns an error with the path if the medium is unreadable or exceeds a limit.
pub fn probe_medium(medium: &MediumRef, limits: &Limits) -> Result<MediumInfo> {
    match (medium.kind.form(), &medium.source) {
        (Form::Picture, MediumSource::Path(path)) => {
            let info = probe_image(path, limits)?;
            Ok(MediumInfo {
                width_px: Some(info.width_px),
                height_px: Some(info.height_px),
                turn: info.turn.exif(),
                ..MediumInfo::default()
            })
        }
        (Form::Clip, source) => {
            let source = match source {
                MediumSource::Path(path) => VideoSource::from_path(path),
                MediumSource::Frames(frames) => VideoSource::FrameList(frames.clone()),
            };
            let info = probe_video(&source, None, limits)?;
            Ok(MediumInfo {
                width_px: Some(info.width_px),
                height_px: Some(info.height_px),
                turn: info.turn.exif(),
                num_frames: Some(info.num_frames as u64),
                fps: Some(info.fps),
                duration_secs: Some(info.duration_s),
                sample_rate_hz: None,
            })
        }
        (Form::Sound, MediumSource::Path(path)) => match probe_audio(path, limits) {
            Ok(info) => Ok(MediumInfo {
                duration_secs: info.duration_s,
                sample_rate_hz: Some(info.sample_rate_hz),
                ..MediumInfo::default()
            }),
            Err(MediaError::NoAudioTrack { .. }) => Ok(MediumInfo::default()),
            Err(error) => Err(error.into()),
        },
        (_, MediumSource::Frames(_)) => {
            Err(ModelError::Medium { kind: medium.kind, what: "got a list of frames, expected one file" })
        }
    }
}

/// Shape of the values of a prepared medium. Each family uses the shapes of its own towers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumShape {
    /// Rows of vision patches, `[t · h · w, patch_len]`.
    Patches(PatchGrid),
    /// Pictures of one size, `[count, 3, height, width]`: the tiles of an image, the frames of a video.
    Pictures {
        /// Number of pictures.
        count: usize,
        /// Height of each, px.
        height_px: usize,
        /// Width of each, px.
        width_px: usize,
    },
    /// Squares with masks of real pixels, `[count, 4, side, side]`: three colours and the mask.
    Masked {
        /// Number of squares.
        count: usize,
        /// Side of each, px.
        side_px: usize,
    },
    /// Square tiles of an image row by row, then the whole image as one square, `[rows · columns + 1, 3, side, side]`. An image
    /// with one row and column is that square alone.
    Tiles {
        /// Number of rows of tiles.
        rows: usize,
        /// Number of tiles in a row.
        columns: usize,
        /// Side of each, px.
        side_px: usize,
    },
    /// Square frames of a clip, `[count, 3, side, side]`, for families whose prompts tell the length of the clip.
    Frames {
        /// Number of frames.
        count: usize,
        /// Side of each, px.
        side_px: usize,
        /// Length of the clip, in whole seconds.
        clip_secs: usize,
    },
    /// A log-mel spectrogram, `[mels, frames]`.
    Mel {
        /// Number of frequency bands.
        mels: usize,
        /// Number of time steps.
        frames: usize,
        /// Number of leading time steps that the tower hears. It reads the others only in its convolutions.
        heard: usize,
    },
}

impl MediumShape {
    /// Returns the grid of [`Self::Patches`].
    ///
    /// # Errors
    /// Returns an error for another shape.
    pub fn patches(&self) -> Result<PatchGrid> {
        match self {
            Self::Patches(grid) => Ok(*grid),
            other => Err(ModelError::shape(format!("this tower expects patches, but the medium is {other}"))),
        }
    }

    /// Returns count, height and width of [`Self::Pictures`].
    ///
    /// # Errors
    /// Returns an error for another shape.
    pub fn pictures(&self) -> Result<[usize; 3]> {
        match self {
            Self::Pictures { count, height_px, width_px } => Ok([*count, *height_px, *width_px]),
            other => {
                Err(ModelError::shape(format!("this tower expects pictures, but the medium is {other}")))
            }
        }
    }

    /// Returns the number and the side in px of the squares of [`Self::Tiles`] and [`Self::Frames`].
    ///
    /// # Errors
    /// Returns an error for another shape.
    pub fn squares(&self) -> Result<[usize; 2]> {
        match *self {
            Self::Tiles { rows: 1, columns: 1, side_px } => Ok([1, side_px]),
            Self::Tiles { rows, columns, side_px } => Ok([rows * columns + 1, side_px]),
            Self::Frames { count, side_px, .. } => Ok([count, side_px]),
            other => Err(ModelError::shape(format!("this tower expects squares, but the medium is {other}"))),
        }
    }

    /// Returns bands, frames and heard frames of [`Self::Mel`].
    ///
    /// # Errors
    /// Returns an error for another shape.
    pub fn mel(&self) -> Result<[usize; 3]> {
        match self {
            Self::Mel { mels, frames, heard } => Ok([*mels, *frames, *heard]),
            other => {
                Err(ModelError::shape(format!("this tower expects spectrograms, but the medium is {other}")))
            }
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
            Self::Tiles { rows, columns, side_px } => {
                write!(f, "{rows}×{columns} tiles of {side_px} px (rows × columns)")
            }
            Self::Frames { count, side_px, clip_secs } => {
                write!(f, "{count} × {side_px} px (square frames) of {clip_secs} s")
            }
            Self::Mel { mels, frames, .. } => write!(f, "{mels}×{frames} log-mel (bands × frames)"),
        }
    }
}

/// A decoded and resized medium, the input of a tower. The sound of a clip is a separate medium, since another tower
/// reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct MediumInput {
    /// Image, video or audio.
    pub kind: MediumKind,
    /// Shape of `data`.
    pub shape: MediumShape,
    /// Values, normalised as the tower expects them.
    pub data: Vec<f32>,
    /// Seconds from one temporal patch to the next; 0 if the family has no temporal patches.
    pub seconds_per_grid: f64,
    /// Times of the frames in the clip, in seconds; empty for an image.
    pub frame_times_secs: Vec<f64>,
    /// Index, among the clips of the row, of the clip whose sound this is ([`MediumOptions::of_clip`]).
    ///
    /// [`MediumOptions::of_clip`]: omnigrpo_data::MediumOptions::of_clip
    pub of_clip: Option<usize>,
}

/// The prepared form of a medium, known from its header only.
#[derive(Clone, Debug, PartialEq)]
pub struct MediumPlan {
    /// Image, video or audio.
    pub kind: MediumKind,
    /// Shape of the prepared medium.
    pub shape: MediumShape,
    /// Number of tokens in the prompt, counting features only.
    pub tokens: usize,
    /// Times of the frames that will be read, in seconds.
    pub frame_times_secs: Vec<f64>,
    /// Seconds from one temporal patch to the next, as in [`MediumInput`].
    pub seconds_per_grid: f64,
    /// Index of the clip whose sound this is, as in [`MediumInput`].
    pub of_clip: Option<usize>,
}

/// Values that determine the tokens of a medium in the prompt.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'m> {
    /// Image, video or audio.
    pub kind: MediumKind,
    /// Shape of the prepared medium.
    pub shape: &'m MediumShape,
    /// Times of the frames in the clip, in seconds.
    pub times_secs: &'m [f64],
    /// Seconds from one temporal patch to the next.
    pub seconds_per_grid: f64,
    /// Index of the clip whose sound this is.
    pub of_clip: Option<usize>,
}

impl MediumInput {
    pub(crate) fn shown(&self) -> Shown<'_> {
        Shown {
            kind: self.kind,
            shape: &self.shape,
            times_secs: &self.frame_times_secs,
            seconds_per_grid: self.seconds_per_grid,
            of_clip: self.of_clip,
        }
    }
}

impl MediumPlan {
    pub(crate) fn shown(&self) -> Shown<'_> {
        Shown {
            kind: self.kind,
            shape: &self.shape,
            times_secs: &self.frame_times_secs,
            seconds_per_grid: self.seconds_per_grid,
            of_clip: self.of_clip,
        }
    }
}
