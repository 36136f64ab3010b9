//! Media to patches, conversations to prompts with positions on three axes.

use std::sync::Arc;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_text::{MediumKind, MediumTokens, Span};

use super::config::QwenVlConfig;
use super::media::MediaReader;
use super::positions::{MediumAxes, positions};
use crate::decoder::Position;
use crate::error::Result;
use crate::families::{IdleSettings, MediaSettings, MediumInput, MediumPlan, MediumShape, Processor};

pub(super) struct QwenVlProcessor {
    pub(super) config: Arc<QwenVlConfig>,
    pub(super) media: MediaReader,
}

impl QwenVlProcessor {
    fn axes(&self, grid: PatchGrid, seconds_per_grid: f64) -> MediumAxes {
        let temporal_step = match self.config.vision.tokens_per_second {
            Some(rate) => rate as f32 * seconds_per_grid as f32,
            None => 1.0,
        };
        MediumAxes { grid, merge: self.config.vision.merge, temporal_step }
    }
}

impl Processor for QwenVlProcessor {
    fn idle_settings(&self) -> IdleSettings {
        IdleSettings {
            flags: &["max_anyres_num"],
            why: "it does not cut images into tiles, and max_pixels is the most pixels of an image",
        }
    }

    fn shorten(&self, kind: MediumKind) -> Option<&'static str> {
        match kind {
            MediumKind::Video => {
                Some("lower video_max_frames or nframes, video_max_frame_pixels or total_pixels")
            }
            _ => Some("lower max_pixels"),
        }
    }

    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan> {
        self.media.plan(medium, header, settings)
    }

    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        self.media.prepare(medium, settings)
    }

    fn tokens(&self, kind: MediumKind, shape: &MediumShape) -> Result<MediumTokens> {
        let count = shape.patches()?.num_tokens(self.config.vision.merge);
        Ok(match kind {
            MediumKind::Video => {
                MediumTokens::repeated(kind, "<|video_pad|>", self.config.video_token, count)
            }
            _ => MediumTokens::repeated(kind, "<|image_pad|>", self.config.image_token, count),
        })
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        vec![self.config.image_token, self.config.video_token]
    }

    fn positions(
        &self,
        len: usize,
        spans: &[Span],
        media: &[Arc<MediumInput>],
    ) -> Result<(Vec<Position>, u32)> {
        let axes = media
            .iter()
            .map(|m| Ok(self.axes(m.shape.patches()?, m.seconds_per_grid)))
            .collect::<Result<Vec<_>>>()?;
        Ok(positions(len, spans, |m| axes[m]))
    }
}
