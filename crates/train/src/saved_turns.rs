//! Turns of an environment in a checkpoint, and on the way to other ranks. Their tokens are stored. The rank that trains on them
//! reads their media again from the same files, so a resumed run does not ask the environment again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_data::{MediumOptions, MediumRef, MediumSource};
use omnigrpo_models::{AddedTurn, MediumInput, Prompt, PromptBuilder};
use omnigrpo_rollout::Completion;
use omnigrpo_text::{MediumKind, Part, RenderedPrompt, Role, Span, Turn};
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};

/// Folder of a run directory with the pictures of an environment's answers.
const MEDIA: &str = "media";

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
    /// Kind and file of a medium, as a map with one entry.
    #[serde(untagged)]
    Medium(BTreeMap<MediumKind, PathBuf>),
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
            Part::Call(call) => SavedPart::Text(call.to_string()),
            Part::Medium { kind, .. } => {
                SavedPart::Medium(BTreeMap::from([(*kind, paths.next().unwrap_or_default())]))
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

    /// Looks for files of media that are gone in `media` of the run directory `dir`, which may have been moved.
    pub(crate) fn follow(&mut self, dir: &Path) {
        let media = self.parts.iter_mut().filter_map(|part| match part {
            SavedPart::Text(_) => None,
            SavedPart::Medium(medium) => Some(medium),
        });
        for path in media.flat_map(BTreeMap::values_mut) {
            let here = path.file_name().map(|name| dir.join(MEDIA).join(name));
            if let Some(here) = here.filter(|here| !path.exists() && here.is_file()) {
                *path = here;
            }
        }
    }

    /// Returns the turn without the content of its media.
    fn distant(&self) -> AddedTurn {
        let mut sources: Vec<MediumRef> = Vec::new();
        let mut medium = |kind: MediumKind, path: &PathBuf| {
            let index = sources.iter().filter(|source| source.kind == kind).count();
            let (source, options) = (MediumSource::Path(path.clone()), MediumOptions::default());
            sources.push(MediumRef { kind, source, options });
            Part::Medium { kind, index }
        };
        let part = |part: &SavedPart| match part {
            SavedPart::Text(text) => vec![Part::Text(text.clone())],
            SavedPart::Medium(media) => media.iter().map(|(kind, path)| medium(*kind, path)).collect(),
        };
        let parts = self.parts.iter().flat_map(part).collect();
        let span = |&[medium, start, len]: &[usize; 3]| Span { medium, start, len };
        let turn = Prompt {
            ids: self.ids.clone(),
            spans: self.spans.iter().map(span).collect(),
            positions: Vec::new(),
            next_position: 0,
            media: Vec::new(),
            instruction: Vec::new(),
            text: self.text.clone(),
        };
        let role = if self.by_tool { Role::Tool } else { Role::User };
        let (media, said) = (self.media.clone(), Turn { role, parts });
        AddedTurn { start: self.start, turn: Arc::new(turn), media, sources, said }
    }
}

/// Returns completions with their turns in a form for other ranks.
pub(crate) fn sent(completions: Vec<Completion>) -> Vec<(Completion, Vec<SavedTurn>)> {
    let sent = |completion| {
        let saved = SavedTurn::of(&completion);
        (completion, saved)
    };
    completions.into_iter().map(sent).collect()
}

/// Returns the completions that [`sent`] returned, with turns whose media have no content.
pub(crate) fn received(sent: Vec<(Completion, Vec<SavedTurn>)>) -> Vec<Completion> {
    let completion = |(mut completion, saved): (Completion, Vec<SavedTurn>)| {
        give_back(&mut completion, &saved);
        completion
    };
    sent.into_iter().map(completion).collect()
}

/// Gives a completion its turns back. Their media have no content until [`bring_here`] reads them.
pub(crate) fn give_back(completion: &mut Completion, saved: &[SavedTurn]) {
    completion.turns = saved.iter().map(SavedTurn::distant).collect();
    completion.earlier = saved.iter().map(|turn| turn.model.clone()).collect();
}

/// Reads the media of turns that have no content yet. Returns the media that the turns add to `own`, those of the prompt.
///
/// # Errors
/// Returns an error if a medium cannot be read.
pub(crate) fn bring_here<'c>(
    completions: impl IntoIterator<Item = &'c mut Completion>,
    prompts: &PromptBuilder,
    own: &[Arc<MediumInput>],
) -> Result<Vec<Arc<MediumInput>>> {
    let mut media: Vec<Option<Arc<MediumInput>>> = Vec::new();
    for added in completions.into_iter().flat_map(|completion| &mut completion.turns) {
        let Prompt { ids, spans, positions, text, .. } = &*added.turn;
        if positions.len() == ids.len() {
            continue;
        }
        let rendered = RenderedPrompt { ids: ids.clone(), spans: spans.clone(), text: text.clone() };
        let turn = prompts.restored_turn(rendered, &added.sources)?;
        for (&place, medium) in added.media.iter().zip(&turn.media) {
            match (own.get(place), place.checked_sub(own.len())) {
                // The answer shows a medium of the prompt.
                (Some(own), _) if own == medium => {}
                (None, Some(at)) if at < MOST_MEDIA => {
                    media.resize(media.len().max(at + 1), None);
                    media[at] = Some(Arc::clone(medium));
                }
                _ => return Err(damaged()),
            }
        }
        added.turn = Arc::new(turn);
    }
    media.into_iter().collect::<Option<_>>().ok_or_else(damaged)
}

/// Largest number of media that the completions of one prompt can add, to bound what a damaged file allocates.
const MOST_MEDIA: usize = 1 << 20;

fn damaged() -> TrainError {
    TrainError::Checkpoint {
        what:
            "the media of turns in its rollout in progress are incomplete or have changed; resume from an earlier checkpoint"
                .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_stored_under_the_name_of_their_kind() {
        let image = SavedPart::Medium(BTreeMap::from([(MediumKind::Image, "/a.png".into())]));
        for (part, json) in
            [(SavedPart::Text("a".into()), r#"{"text":"a"}"#), (image, r#"{"image":"/a.png"}"#)]
        {
            assert_eq!(serde_json::to_string(&part).unwrap(), json);
            assert_eq!(serde_json::from_str::<SavedPart>(json).unwrap(), part);
        }
    }
}
