//! Media of HumanOmni: a fixed number of square frames, thirty seconds of sound.
//!
//! Source: HumanMLLM/HumanOmni `humanomni/mm_utils.py`. Each frame is the middle of one of several equal parts of the clip. The
//! sound of a clip is a separate medium beside its frames, as another tower reads it. Differences: training, evaluation and
//! generation prepare frames in the same way (the original stretches them at inference). Unreadable sound is an error of the row,
//! unless the run replaces it by silence.

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumRef, MediumSource};
use omnigrpo_media::audio::LogMel;
use omnigrpo_media::siglip::{SiglipProcessor, Squaring};
use omnigrpo_media::{
    FrameSampling, FrameSize, LISTED_FPS, VideoRequest, VideoSource, decode_video, load_image,
};
use omnigrpo_text::MediumKind;

use super::config::HumanOmniConfig;
use crate::error::*;
use crate::families::frames::file;
use crate::families::{IdleSettings, MediaSettings, MediumInput, MediumShape, sound};

/// Ignored settings: pictures of these models are squares of the tower's size, and a clip has a fixed number of them.
pub(super) const IDLE: IdleSettings = IdleSettings {
    fields: &[
        MAX_TILES,
        IMAGE_MIN_PIXELS,
        IMAGE_MAX_PIXELS,
        VIDEO_MIN_PIXELS,
        VIDEO_MAX_PIXELS,
        VIDEO_TOTAL_PIXELS,
        VIDEO_FPS,
        VIDEO_MIN_FRAMES,
        VIDEO_MAX_FRAMES,
        RULE,
        BASE_INTERVAL_SECS,
    ],
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
    pictures: SiglipProcessor,
    mel: Option<LogMel>,
    num_frames: usize,
}

impl MediaReader {
    /// Reads the processor files of the towers. A missing file is replaced by the published processor.
    pub(super) fn open(config: &HumanOmniConfig) -> Result<Self> {
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
        Ok(Self { pictures, mel, num_frames: config.num_frames })
    }

    /// Plans a medium from its header.
    pub(super) fn plan(
        &self,
        medium: &MediumRef,
        header: &MediumInfo,
        settings: &MediaSettings,
    ) -> Result<(MediumShape, Vec<f64>)> {
        Ok(match medium.kind {
            MediumKind::Image => (self.shape(1), Vec::new()),
            MediumKind::Video => {
                let (request, source) = self.video_request(medium, settings)?;
                let fps = match source {
                    VideoSource::File(_) => header.fps.unwrap_or_default(),
                    _ => request.listed_fps.unwrap_or(LISTED_FPS),
                };
                let choice = request.sampling.choose(header.num_frames.unwrap_or_default() as usize, fps)?;
                let times = choice.indices.iter().map(|&i| i as f64 / fps).collect();
                (self.shape(choice.indices.len()), times)
            }
            MediumKind::Audio => (sound::plan(medium, header, self.mel()?, settings)?, Vec::new()),
        })
    }

    /// Decodes a medium.
    pub(super) fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        let (shape, data, frame_times_secs) = match medium.kind {
            MediumKind::Image => {
                let picture = load_image(file(medium)?, &settings.limits)?;
                (self.shape(1), self.pictures.process(&[picture])?, Vec::new())
            }
            MediumKind::Video => {
                let (request, source) = self.video_request(medium, settings)?;
                let mut video = decode_video(&source, &request, &settings.limits)?;
                settings.order(&mut video.frames);
                let data = self.pictures.process(&video.frames)?;
                (self.shape(video.frames.len()), data, video.timestamps_s)
            }
            MediumKind::Audio => return sound::prepare(medium, self.mel()?, settings),
        };
        Ok(MediumInput { kind: medium.kind, shape, data, seconds_per_grid: 0.0, frame_times_secs })
    }

    fn shape(&self, count: usize) -> MediumShape {
        let side = self.pictures.side_px as usize;
        MediumShape::Pictures { count, height_px: side, width_px: side }
    }

    fn mel(&self) -> Result<&LogMel> {
        self.mel.as_ref().ok_or_else(no_audio_tower)
    }

    /// Requests `nframes` of the row or the run, or else the checkpoint's number of frames. A frame rate is unsupported, because
    /// these models were not trained with one.
    fn video_request(
        &self,
        medium: &MediumRef,
        settings: &MediaSettings,
    ) -> Result<(VideoRequest, VideoSource)> {
        let source = match &medium.source {
            MediumSource::Path(path) => VideoSource::from_path(path),
            MediumSource::Frames(frames) => VideoSource::FrameList(frames.clone()),
        };
        let listed = !matches!(source, VideoSource::File(_));
        let own = &medium.options;
        if own.fps.is_some() && !listed {
            return Err(ModelError::MediumOptions {
                kind: medium.kind,
                what: "fps requests frames at a rate; this family reads a fixed number of frames, nframes",
            });
        }
        if own.video_start.or(own.video_end).is_some() {
            return Err(ModelError::MediumOptions {
                kind: medium.kind,
                what: "video_start and video_end request a part of the clip; this family reads only whole clips",
            });
        }
        let num_frames = own.nframes.or(settings.video.nframes).map_or(self.num_frames, |n| n as usize);
        let request = VideoRequest {
            sampling: FrameSampling::Midpoints { num_frames },
            size: FrameSize::Native,
            listed_fps: own.fps.filter(|_| listed),
        };
        Ok((request, source))
    }
}
