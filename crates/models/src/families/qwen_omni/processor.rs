//! Converts media to patches and spectrograms, and conversations to prompts with positions on three axes.

use std::sync::Arc;

use omnigrpo_data::MediumInfo;
use omnigrpo_media::audio::LogMel;
use omnigrpo_media::{FrameSize, Rgb8Image, VideoFrames};
use omnigrpo_text::{Form, MediumKind, MediumSegment, MediumTokens, Span};

use super::config::OmniConfig;
use super::positions::{positions, stretches};
use crate::decoder::Position;
use crate::encoders::whisper::WhisperConfig;
use crate::error::*;
use crate::families::frames::FramePlan;
use crate::families::qwen_vl::media::MediaReader as PixelReader;
use crate::families::qwen_vl::positions::grid_positions;
use crate::families::reader::{ReadMedia, Reader, Request, Values};
use crate::families::sound::num_features;
use crate::families::{IdleSettings, MediumInput, MediumShape, Processor, Shown};

/// Tokens around a sound inside a clip.
const SOUND: [&str; 2] = ["<|audio_bos|>", "<|audio_eos|>"];

/// A reader that prepares pictures and clips as Qwen2.5-VL does, and sounds without the silence after them.
pub(super) struct MediaReader {
    pub(super) pixels: PixelReader,
    pub(super) mel: LogMel,
    pub(super) audio: WhisperConfig,
}

impl Reader for MediaReader {
    fn supported(&self) -> (&'static [MediumKind], &'static str) {
        (&MediumKind::ALL, "this model supports all media")
    }

    fn sound(&self) -> Result<&LogMel> {
        Ok(&self.mel)
    }

    fn frame_size(&self, of: Request, plan: &FramePlan) -> Result<FrameSize> {
        self.pixels.frame_size(of, plan)
    }

    fn shape(&self, of: Request, header: &MediumInfo, frames: Option<usize>) -> Result<MediumShape> {
        self.pixels.shape(of, header, frames)
    }

    fn tokens(&self, shape: &MediumShape) -> Result<usize> {
        match *shape {
            MediumShape::Mel { heard, .. } => num_features(&self.audio, heard),
            _ => self.pixels.tokens(shape),
        }
    }

    fn picture(&self, of: Request, picture: Rgb8Image) -> Result<Values> {
        self.pixels.picture(of, picture)
    }

    fn clip(&self, of: Request, video: &VideoFrames) -> Result<Values> {
        self.pixels.clip(of, video)
    }

    fn seconds_per_grid(&self, sampled_fps: f64) -> f64 {
        self.pixels.seconds_per_grid(sampled_fps)
    }
}

pub(super) struct OmniProcessor {
    pub(super) config: Arc<OmniConfig>,
    pub(super) media: MediaReader,
}

impl OmniProcessor {
    /// Returns the positions of the features of a medium that begins at `start`.
    fn features(&self, medium: Shown, start: u32) -> Result<Vec<Position>> {
        if let MediumShape::Mel { .. } = medium.shape {
            let count = self.media.tokens(medium.shape)? as u32;
            return Ok((start..start + count).map(|p| [p; 3]).collect());
        }
        let (grid, merge) = (medium.shape.patches()?, self.config.vision.merge);
        // In the order and the precision of the reference.
        let time = |t: usize| {
            (t as f32 * medium.seconds_per_grid as f32 * self.config.positions_per_second).floor() as u32
        };
        Ok(grid_positions(start, [grid.t, grid.h / merge, grid.w / merge], time).collect())
    }
}

impl Processor for OmniProcessor {
    fn reader(&self) -> Option<&dyn ReadMedia> {
        Some(&self.media)
    }

    fn idle_settings(&self) -> IdleSettings {
        IdleSettings {
            fields: &[MAX_TILES],
            why: || {
                format!(
                    "it does not cut images into tiles, and {IMAGE_MAX_PIXELS} limits the pixels of an image"
                )
            },
        }
    }

    fn shorten(&self, kind: MediumKind) -> Option<String> {
        match kind.form() {
            Form::Clip => Some(format!(
                "lower {VIDEO_MAX_FRAMES} or {VIDEO_NFRAMES}, {VIDEO_MAX_PIXELS} or {VIDEO_TOTAL_PIXELS}"
            )),
            Form::Picture => Some(format!("lower {IMAGE_MAX_PIXELS}")),
            Form::Sound => Some("give the sound an end in the row (video_end)".to_owned()),
        }
    }

    fn patch_len(&self) -> usize {
        self.config.vision.patch_len()
    }

    fn tokens(&self, kind: MediumKind, shape: &MediumShape, _: &[f64]) -> Result<MediumTokens> {
        let count = self.media.tokens(shape)?;
        let [image, video, audio] = self.config.tokens;
        let (marker, token) = match kind.form() {
            Form::Picture => ("<|IMAGE|>", image),
            Form::Clip => ("<|VIDEO|>", video),
            Form::Sound => ("<|AUDIO|>", audio),
        };
        Ok(MediumTokens::repeated(kind, marker, token, count))
    }

    /// Returns stretches of the clip's features and of the sound's by turns, between the marks of a sound.
    fn tokens_with_sound(&self, clip: Shown, sound: Shown) -> Result<Option<MediumTokens>> {
        let times = |medium| -> Result<Vec<u32>> {
            Ok(self.features(medium, 0)?.into_iter().map(|[time, ..]| time).collect())
        };
        let [seen, heard] =
            [stretches(&times(clip)?, self.config.stretch), stretches(&times(sound)?, self.config.stretch)];
        let [_, video, audio] = self.config.tokens;
        let mut segments = vec![MediumSegment::Text(SOUND[0].to_owned())];
        for at in 0..seen.len().max(heard.len()) {
            segments.extend(seen.get(at).map(|&count| MediumSegment::Features { token: video, count }));
            segments.extend(heard.get(at).map(|&count| MediumSegment::Inner { token: audio, count }));
        }
        segments.push(MediumSegment::Text(SOUND[1].to_owned()));
        let marker = self.tokens(clip.kind, clip.shape, clip.times_secs)?.marker;
        Ok(Some(MediumTokens { kind: clip.kind, marker, segments }))
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        self.config.tokens.to_vec()
    }

    fn positions(
        &self,
        len: usize,
        spans: &[Span],
        media: &[Arc<MediumInput>],
    ) -> Result<(Vec<Position>, u32)> {
        // The shapes are checked once, so that the positions of each are known to be computable.
        for medium in media {
            self.features(medium.shown(), 0)?;
        }
        let features = |m: usize, start| self.features(media[m].shown(), start).unwrap_or_default();
        Ok(positions(len, spans, features, |m| media[m].of_clip.is_some()))
    }
}
