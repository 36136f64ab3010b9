//! Converts media to frames and spectrograms, conversations to prompts, and questions to the input of BERT.

use std::sync::Arc;

use omnigrpo_text::{Form, MediumKind, MediumSegment, MediumTokens, Part as TurnPart, Role, Tokenizer, Turn};

use super::config::{HumanOmniConfig, PromptForm};
use super::{MARKERS, media};
use crate::error::{ModelError, Result, VIDEO_NFRAMES};
use crate::families::reader::{ReadMedia, Reader};
use crate::families::{IdleSettings, MediumShape, Processor};

/// Token id at the positions of features.
const FEATURE_ID: u32 = 0;

/// Text that the original GRPO trainer's template leaves before the media: a video of Qwen2-VL without features.
const EMPTY_QWEN_VIDEO: &str = "<|vision_start|><|video_pad|><|vision_end|>";

pub(super) struct HumanOmniProcessor {
    pub(super) config: Arc<HumanOmniConfig>,
    pub(super) media: media::MediaReader,
    /// Tokenizer of BERT, if its directory has one.
    pub(super) tokenizer: Option<Tokenizer>,
}

impl Processor for HumanOmniProcessor {
    fn counts_medium_as_one(&self) -> bool {
        true
    }

    fn reader(&self) -> Option<&dyn ReadMedia> {
        Some(&self.media)
    }

    fn idle_settings(&self) -> IdleSettings {
        media::IDLE
    }

    fn shorten(&self, kind: MediumKind) -> Option<String> {
        (kind.form() == Form::Clip).then(|| format!("lower {VIDEO_NFRAMES}"))
    }

    fn tokens(&self, kind: MediumKind, shape: &MediumShape, _: &[f64]) -> Result<MediumTokens> {
        let mut segments =
            vec![MediumSegment::Features { token: FEATURE_ID, count: self.media.tokens(shape)? }];
        if let Some((_, marks)) = MARKERS.iter().find(|(known, _)| self.config.markers && *known == kind) {
            let [open, close] = marks.map(str::to_owned);
            segments.insert(0, MediumSegment::Text(open));
            segments.push(MediumSegment::Text(close));
        }
        if self.config.form == PromptForm::R1OmniGrpo && kind.form() == Form::Clip {
            segments.insert(0, MediumSegment::Text(EMPTY_QWEN_VIDEO.into()));
        }
        Ok(MediumTokens { kind, marker: kind.placeholder().into(), segments })
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Adds a line break between a medium and the next part, unless the row already has white space there.
    fn arrange(&self, turns: &[Turn]) -> Vec<Turn> {
        let mut turns = turns.to_vec();
        for turn in &mut turns {
            let mut parts: Vec<TurnPart> = Vec::with_capacity(turn.parts.len());
            for part in turn.parts.drain(..) {
                let after_medium = matches!(parts.last(), Some(TurnPart::Medium { .. }));
                match part {
                    TurnPart::Text(text) if after_medium && !text.starts_with(char::is_whitespace) => {
                        parts.push(TurnPart::Text(format!("\n{text}")));
                    }
                    part @ TurnPart::Medium { .. } if after_medium => {
                        parts.push(TurnPart::Text("\n".into()));
                        parts.push(part);
                    }
                    part => parts.push(part),
                }
            }
            turn.parts = parts;
        }
        turns
    }

    fn reads_question(&self) -> bool {
        true
    }

    /// Encodes the text of the last user turn with BERT's special tokens, truncated to the length that BERT supports.
    fn instruction_ids(&self, turns: &[Turn]) -> Result<Vec<u32>> {
        let Some(turn) = turns.iter().rev().find(|turn| turn.role == Role::User) else {
            return Ok(Vec::new());
        };
        let shows = |part: &TurnPart| match part {
            TurnPart::Medium { kind, .. } => kind.form() != Form::Sound,
            TurnPart::Text(_) | TurnPart::Call(_) => false,
        };
        if !turns.iter().flat_map(|turn| &turn.parts).any(shows) {
            return Ok(Vec::new());
        }
        let Some(tokenizer) = &self.tokenizer else {
            return Err(ModelError::NoCompanion {
                what: "the projector's question",
                missing: "tokenizer.json or vocab.txt of BERT",
                option: "bert",
            });
        };
        let text: String = turn
            .parts
            .iter()
            .filter_map(|part| match part {
                TurnPart::Text(text) => Some(text.as_str()),
                TurnPart::Medium { .. } | TurnPart::Call(_) => None,
            })
            .collect();
        let mut ids = tokenizer.encode_framed(text.trim())?;
        let longest = self.config.text.config.max_tokens();
        if let (true, Some(&end)) = (ids.len() > longest, ids.last()) {
            ids.truncate(longest - 1);
            ids.push(end);
        }
        Ok(ids)
    }
}
