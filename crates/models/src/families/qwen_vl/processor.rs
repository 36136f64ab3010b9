//! Converts media to patches, and conversations to prompts with positions on three axes.

use std::sync::Arc;

use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_text::{Form, MediumKind, MediumSegment, MediumTokens, Span};

use super::config::QwenVlConfig;
use super::media::MediaReader;
use super::positions::{MediumAxes, positions};
use crate::decoder::Position;
use crate::error::*;
use crate::families::reader::ReadMedia;
use crate::families::{IdleSettings, MediumInput, MediumShape, Processor};

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

    fn chooses_frames(&self) -> bool {
        self.config.rules.chooses_frames
    }

    fn shorten(&self, kind: MediumKind) -> Option<String> {
        match kind.form() {
            Form::Clip => Some(format!(
                "lower {VIDEO_MAX_FRAMES} or {VIDEO_NFRAMES}, {VIDEO_MAX_PIXELS} or {VIDEO_TOTAL_PIXELS}"
            )),
            _ => Some(format!("lower {IMAGE_MAX_PIXELS}")),
        }
    }

    fn patch_len(&self) -> usize {
        self.config.vision.patch_len()
    }

    fn tokens(&self, kind: MediumKind, shape: &MediumShape, times_secs: &[f64]) -> Result<MediumTokens> {
        let grid = shape.patches()?;
        let count = grid.num_tokens(self.config.vision.merge);
        let is_clip = kind.form() == Form::Clip;
        let (marker, token) = match is_clip {
            true => ("<|video_pad|>", self.config.video_token),
            false => ("<|image_pad|>", self.config.image_token),
        };
        if !is_clip || !self.config.rules.times_as_text {
            return Ok(MediumTokens::repeated(kind, marker, token, count));
        }
        // Each slice of frames follows its time, inside the text that the template writes around the whole video.
        let text = |text: String| MediumSegment::Text(text);
        let slices = times_secs.chunks(self.config.vision.temporal_patch);
        if slices.len() != grid.t {
            let (frames, slices) = (times_secs.len(), grid.t);
            return Err(ModelError::shape(format!(
                "a video has {slices} slices, but times of {frames} frames"
            )));
        }
        let segments = slices.flat_map(|slice| {
            [
                text(format!("<{:.1} seconds><|vision_start|>", middle_secs(slice))),
                MediumSegment::Features { token, count: count / grid.t },
                text("<|vision_end|>".into()),
            ]
        });
        Ok(MediumTokens { kind, marker: marker.into(), segments: segments.collect() })
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
            .map(|m| {
                let grid = m.shape.patches()?;
                // If the times of slices are text, each slice is a separate picture.
                let t = if self.config.rules.times_as_text { 1 } else { grid.t };
                Ok(self.axes(PatchGrid { t, ..grid }, m.seconds_per_grid))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(positions(len, spans, |m| axes[m]))
    }
}

/// Returns the time of a slice of frames, halfway between its first and its last.
fn middle_secs(frames: &[f64]) -> f64 {
    match frames {
        [first, .., last] => (first + last) / 2.0,
        [only] => *only,
        [] => 0.0,
    }
}
