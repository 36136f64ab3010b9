//! Turns of an environment in a checkpoint. Their tokens are stored, and their media are read again from the same files, so a
//! resumed run does not ask the environment again.

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo_data::{MediumOptions, MediumRef, MediumSource};
use omnigrpo_models::{AddedTurn, MediumInput, PromptBuilder};
use omnigrpo_rollout::Completion;
use omnigrpo_text::{MediumKind, Part, RenderedPrompt, Role, Span, Turn};
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};

/// Stored turn of an environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedTurn {
    start: usize,
    ids: Vec<u32>,
    /// Medium, first token and number of tokens of each span.
    spans: Vec<[usize; 3]>,
    /// Rendered text.
    text: String,
    /// Text of the model's turn before it.
    model: String,
    by_tool: bool,
    parts: Vec<SavedPart>,
    /// Place of each medium among those of the group.
    media: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SavedPart {
    Text(String),
    Image(PathBuf),
    Video(PathBuf),
    Audio(PathBuf),
}

impl SavedTurn {
    /// Returns the turns of a completion.
    pub(crate) fn of(completion: &Completion) -> Vec<Self> {
        let each = completion.turns.iter().zip(&completion.earlier);
        each.map(|(turn, model)| Self::new(turn, model.clone())).collect()
    }

    fn new(added: &AddedTurn, model: String) -> Self {
        // An environment gives a medium as a file.
        let mut paths = added.sources.iter().map(|source| match &source.source {
            MediumSource::Path(path) => path.clone(),
            MediumSource::Frames(frames) => frames.first().cloned().unwrap_or_default(),
        });
        let part = |part: &Part| match part {
            Part::Text(text) => SavedPart::Text(text.clone()),
            Part::Medium { kind, .. } => {
                let path = paths.next().unwrap_or_default();
                match kind {
                    MediumKind::Image => SavedPart::Image(path),
                    MediumKind::Video => SavedPart::Video(path),
                    MediumKind::Audio => SavedPart::Audio(path),
                }
            }
        };
        Self {
            start: added.start,
            ids: added.turn.ids.clone(),
            spans: added.turn.spans.iter().map(|span| [span.medium, span.start, span.len]).collect(),
            text: added.turn.text.clone(),
            model,
            by_tool: added.said.role == Role::Tool,
            parts: added.said.parts.iter().map(part).collect(),
            media: added.media.clone(),
        }
    }

    /// Returns the number of tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Returns true if the turn is inside a completion, after token `end`, which becomes the end of the turn.
    pub(crate) fn is_in(&self, completion: &[u32], end: &mut usize) -> bool {
        let next = self.start.checked_add(self.ids.len()).filter(|&next| next < completion.len());
        let is_own = next.is_some_and(|next| self.start > *end && completion[self.start..next] == self.ids);
        *end = next.unwrap_or(*end);
        is_own
    }

    fn restored(&self, prompts: &PromptBuilder) -> Result<AddedTurn> {
        let mut sources: Vec<MediumRef> = Vec::new();
        let mut medium = |kind: MediumKind, path: &PathBuf| {
            let index = sources.iter().filter(|source| source.kind == kind).count();
            let (source, options) = (MediumSource::Path(path.clone()), MediumOptions::default());
            sources.push(MediumRef { kind, source, options });
            Part::Medium { kind, index }
        };
        let part = |part: &SavedPart| match part {
            SavedPart::Text(text) => Part::Text(text.clone()),
            SavedPart::Image(path) => medium(MediumKind::Image, path),
            SavedPart::Video(path) => medium(MediumKind::Video, path),
            SavedPart::Audio(path) => medium(MediumKind::Audio, path),
        };
        let parts = self.parts.iter().map(part).collect();
        let span = |&[medium, start, len]: &[usize; 3]| Span { medium, start, len };
        let (ids, spans) = (self.ids.clone(), self.spans.iter().map(span).collect());
        let turn = prompts.restored_turn(RenderedPrompt { ids, spans, text: self.text.clone() }, &sources)?;
        let role = if self.by_tool { Role::Tool } else { Role::User };
        let media = self.media.clone();
        let said = Turn { role, parts };
        Ok(AddedTurn { start: self.start, turn: Arc::new(turn), media, sources, said })
    }
}

/// Gives the turns of a row's completions back, one list per completion. Returns the media that they add to those of the prompt,
/// which has `first` media.
///
/// # Errors
/// Returns an error if a medium cannot be read again.
pub(crate) fn restore(
    saved: &[Vec<SavedTurn>],
    completions: &mut [&mut Completion],
    prompts: &PromptBuilder,
    first: usize,
) -> Result<Vec<Arc<MediumInput>>> {
    let mut media: Vec<Option<Arc<MediumInput>>> = Vec::new();
    for (completion, turns) in completions.iter_mut().zip(saved) {
        for saved in turns {
            let turn = saved.restored(prompts)?;
            for (&place, medium) in turn.media.iter().zip(&turn.turn.media) {
                let at = place.checked_sub(first).filter(|&at| at < MOST_MEDIA).ok_or_else(damaged)?;
                media.resize(media.len().max(at + 1), None);
                media[at] = Some(Arc::clone(medium));
            }
            completion.earlier.push(saved.model.clone());
            completion.turns.push(turn);
        }
    }
    media.into_iter().collect::<Option<_>>().ok_or_else(damaged)
}

/// Largest number of media that the completions of one prompt can add, to bound what a damaged file allocates.
const MOST_MEDIA: usize = 1 << 20;

fn damaged() -> TrainError {
    TrainError::Checkpoint {
        what:
            "the media of turns in its rollout in progress are incomplete; resume from an earlier checkpoint"
                .to_owned(),
    }
}
