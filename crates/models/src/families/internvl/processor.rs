//! Converts media to tiles and frames, and conversations to prompts.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_text::{ChatTemplate, Form, MediumKind, MediumSegment, MediumTokens};

use super::{CLOSE, InternVl, OPEN, media, template};
use crate::error::{MAX_TILES, Result, VIDEO_MAX_FRAMES, VIDEO_NFRAMES};
use crate::families::reader::ReadMedia;
use crate::families::{IdleSettings, MediumShape, Processor, processor};

pub(super) struct InternVlProcessor {
    pub(super) model: Arc<InternVl>,
    pub(super) media: media::MediaReader,
}

impl Processor for InternVlProcessor {
    fn reader(&self) -> Option<&dyn ReadMedia> {
        Some(&self.media)
    }

    fn idle_settings(&self) -> IdleSettings {
        media::IDLE
    }

    fn shorten(&self, kind: MediumKind) -> Option<String> {
        match kind.form() {
            Form::Clip => Some(format!("lower {VIDEO_MAX_FRAMES} or {VIDEO_NFRAMES}")),
            _ => Some(format!("lower {MAX_TILES}")),
        }
    }

    /// Returns all tiles of an image between one pair of tags. A video has a numbered line per frame.
    fn tokens(&self, kind: MediumKind, shape: &MediumShape, _: &[f64]) -> Result<MediumTokens> {
        let [count, ..] = shape.pictures()?;
        let features = |tiles: usize| MediumSegment::Features {
            token: self.model.context_token,
            count: tiles * self.model.config.tokens_per_tile(),
        };
        let text = |text: String| MediumSegment::Text(text);
        let segments = match kind.form() {
            Form::Clip => (1..=count)
                .flat_map(|i| {
                    let line = if i == 1 { "" } else { "\n" };
                    [text(format!("{line}Frame{i}: {OPEN}")), features(1), text(CLOSE.into())]
                })
                .collect(),
            _ => vec![text(OPEN.into()), features(count), text(CLOSE.into())],
        };
        let marker = match kind.form() {
            Form::Clip => "<video>",
            _ => self.model.config.layout.rules().marker,
        };
        Ok(MediumTokens { kind, marker: marker.into(), segments })
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        vec![self.model.context_token]
    }

    /// Reads the chat template: the original layout names it in `config.json`, the hf layout has a file.
    fn chat_template(&self, dir: &Path) -> Result<ChatTemplate> {
        if let Some(source) = &self.model.config.template {
            return Ok(ChatTemplate::from_source(source)?);
        }
        processor::chat_template(dir, template::HF, |_| None)
    }

    fn stop_tokens(&self) -> &'static [&'static str] {
        &["<|im_end|>"]
    }
}
