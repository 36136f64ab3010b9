//! Converts media to squares, and conversations to prompts.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_text::{ChatTemplate, Form, MediumKind, MediumSegment, MediumTokens};

use super::{AriaConfig, media};
use crate::error::{IMAGE_MAX_PIXELS, MAX_TILES, ModelError, Result, VIDEO_MAX_FRAMES, VIDEO_NFRAMES};
use crate::families::reader::ReadMedia;
use crate::families::{IdleSettings, MediumShape, Processor, processor};

/// Text that a template writes for a picture.
const MARKER: &str = "<|img|>";
/// Text between the frames of a video.
const BETWEEN: &str = "<fim_suffix><fim_prefix>";

/// Template for a checkpoint that does not contain one.
const TEMPLATE: &str = include_str!("template.jinja");

pub(super) struct AriaPrompts {
    pub(super) config: Arc<AriaConfig>,
    pub(super) media: media::MediaReader,
}

impl Processor for AriaPrompts {
    fn reader(&self) -> Option<&dyn ReadMedia> {
        Some(&self.media)
    }

    fn idle_settings(&self) -> IdleSettings {
        media::IDLE
    }

    fn shorten(&self, kind: MediumKind) -> Option<String> {
        match kind.form() {
            Form::Clip => Some(format!("lower {VIDEO_MAX_FRAMES} or {VIDEO_NFRAMES}")),
            _ => Some(format!("lower {IMAGE_MAX_PIXELS}, or set {MAX_TILES} 1")),
        }
    }

    /// Returns all squares of an image between one pair of tags. Each frame of a video has its own pair.
    fn tokens(&self, kind: MediumKind, shape: &MediumShape, _: &[f64]) -> Result<MediumTokens> {
        let [count, side] = shape.masked()?;
        let tokens = self.media.tokens_of(side)?;
        let features = |count| MediumSegment::Features { token: self.config.image_token, count };
        let segments = match kind.form() {
            Form::Clip => {
                let frame = |i| (i > 0).then(|| MediumSegment::Text(BETWEEN.into()));
                (0..count).flat_map(|i| frame(i).into_iter().chain([features(tokens)])).collect()
            }
            _ => vec![features(count * tokens)],
        };
        Ok(MediumTokens { kind, marker: MARKER.into(), segments })
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        vec![self.config.image_token]
    }

    /// Reads the chat template. The published template supports only images and writes nothing for a video. It is changed to
    /// write the same text for a video as for an image.
    fn chat_template(&self, dir: &Path) -> Result<ChatTemplate> {
        processor::chat_template(dir, TEMPLATE, |source| {
            let both = ["'", "\""].iter().fold(source.to_owned(), |source, quote| {
                let images = format!("['type'] == {quote}image{quote}");
                source.replace(&images, "['type'] in ['image', 'video']")
            });
            (!source.contains("video")).then_some(both)
        })
    }

    /// Returns the end of a turn, which is ordinary text in published vocabularies and stops as a string.
    fn stop_tokens(&self) -> &'static [&'static str] {
        &["<|im_end|>"]
    }
}

impl MediumShape {
    /// Returns count and side of [`Self::Masked`].
    ///
    /// # Errors
    /// Returns an error for another shape.
    pub(super) fn masked(&self) -> Result<[usize; 2]> {
        match self {
            Self::Masked { count, side_px } => Ok([*count, *side_px]),
            other => Err(ModelError::shape(format!(
                "this tower expects squares with masks, but the medium is {other}"
            ))),
        }
    }
}
