//! Media of HumanOmni: a fixed number of square frames, thirty seconds of sound.
//!
//! Source: HumanMLLM/HumanOmni `humanomni/mm_utils.py`. Each frame is the middle of one of several equal parts of the clip. The
//! sound of a clip is a separate medium beside its frames, as another tower reads it. Differences: training, evaluation and
//! generation prepare frames in the same way (the original stretches them at inference). Unreadable sound is an error of the row,
//! unless the run replaces it by silence.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_data::MediumInfo;
use omnigrpo_media::audio::LogMel;
use omnigrpo_media::siglip::{SiglipProcessor, Squaring};
use omnigrpo_media::{FrameSampling, FrameSize, Rgb8Image, VideoFrames};
use omnigrpo_text::MediumKind;

use super::config::HumanOmniConfig;
use super::projector::{audio_tokens, num_tokens};
use crate::error::*;
use crate::families::frames::FramePlan;
use crate::families::reader::{Reader, Request, Values};
use crate::families::{IdleSettings, MediumShape};

/// Ignored settings: pictures of these models are squares of the tower's size, and a clip has a fixed number of them.
pub(super) const IDLE: IdleSettings = IdleSettings {
    fields: IdleSettings::SIZES,
    why: || {
        format!(
            "its pictures always have the size of its tower, and {VIDEO_NFRAMES} sets the number of frames of a clip"
        )
    },
};

/// Returns the error of a checkpoint without an audio tower for sound.
pub(super) fn no_audio_tower() -> ModelError {
    ModelError::MediumKind {
        kind: MediumKind::Audio,
        what: "the checkpoint has no audio tower (mm_audio_tower in config.json)",
    }
}

/// A reader that prepares media for one checkpoint's towers.
pub(super) struct MediaReader {
    config: Arc<HumanOmniConfig>,
    pictures: SiglipProcessor,
    mel: Option<LogMel>,
}

impl MediaReader {
    /// Reads the processor files of the towers. A missing file is replaced by the published processor.
    pub(super) fn open(config: &Arc<HumanOmniConfig>) -> Result<Self> {
        let file = |dir: &Option<std::path::PathBuf>| {
            dir.as_deref()
                .map(|dir: &Path| dir.join("preprocessor_config.json"))
                .filter(|path| path.is_file())
        };
        let side_px = config.vision.config.picture.side_px as u32;
        let squaring = if config.pad { Squaring::Pad } else { Squaring::Stretch };
        let pictures = match file(&config.vision.dir) {
            Some(path) => SiglipProcessor::from_config(&path, side_px, squaring)?,
            None => SiglipProcessor::new(side_px, squaring),
        };
        let mel = config
            .audio
            .as_ref()
            .map(|audio| {
                let mel = match file(&audio.dir) {
                    Some(path) => LogMel::from_config(&path)?,
                    None => LogMel::whisper(audio.config.num_mels)?,
                };
                let got = (mel.num_mels(), mel.num_frames());
                let expected = (audio.config.num_mels, 2 * audio.config.num_positions);
                if got != expected {
                    return Err(ModelError::shape(format!(
                        "the audio processor produces {}×{} spectrograms, but the audio tower expects {}×{} (bands × frames)",
                        got.0, got.1, expected.0, expected.1
                    )));
                }
                Ok(mel)
            })
            .transpose()?;
        Ok(Self { config: Arc::clone(config), pictures, mel })
    }

    fn shape_of(&self, count: usize) -> MediumShape {
        let side = self.pictures.side_px as usize;
        MediumShape::Pictures { count, height_px: side, width_px: side }
    }
}

impl Reader for MediaReader {
    fn supported(&self) -> (&'static [MediumKind], &'static str) {
        (
            &[MediumKind::Image, MediumKind::Video, MediumKind::Audio],
            "this model supports only images, videos and sounds",
        )
    }

    fn sound(&self) -> Result<&LogMel> {
        self.mel.as_ref().ok_or_else(no_audio_tower)
    }

    /// Requests `nframes` of the row or the run, or else the checkpoint's number of frames. A frame rate is unsupported, because
    /// these models were not trained with one.
    fn frames(&self, of: Request) -> Result<FramePlan> {
        let (plan, own, kind) = (FramePlan::new(of.medium, of.settings), &of.medium.options, of.medium.kind);
        if own.fps.is_some() && plan.listed_fps.is_none() {
            return Err(ModelError::MediumOptions {
                kind,
                what: "fps requests frames at a rate; this family reads a fixed number of frames, nframes",
            });
        }
        if own.video_start.or(own.video_end).is_some() {
            return Err(ModelError::MediumOptions {
                kind,
                what: "video_start and video_end request a part of the clip; this family reads only whole clips",
            });
        }
        let num_frames =
            own.nframes.or(of.settings.video.nframes).map_or(self.config.num_frames, |n| n as usize);
        Ok(FramePlan { sampling: FrameSampling::Midpoints { num_frames }, ..plan })
    }

    fn frame_size(&self, _: Request, _: &FramePlan) -> Result<FrameSize> {
        Ok(FrameSize::Native)
    }

    fn shape(&self, _: Request, _: &MediumInfo, frames: Option<usize>) -> Result<MediumShape> {
        Ok(self.shape_of(frames.unwrap_or(1)))
    }

    fn tokens(&self, shape: &MediumShape) -> Result<usize> {
        match shape {
            MediumShape::Mel { frames, .. } => Ok(audio_tokens(frames / 2)),
            other => Ok(num_tokens(&self.config.projector, other.pictures()?[0])),
        }
    }

    fn picture(&self, _: Request, picture: Rgb8Image) -> Result<Values> {
        Ok((self.shape_of(1), self.pictures.process(&[picture])?))
    }

    fn clip(&self, _: Request, video: &VideoFrames) -> Result<Values> {
        Ok((self.shape_of(video.frames.len()), self.pictures.process(&video.frames)?))
    }
}
