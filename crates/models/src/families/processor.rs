//! Reads media and writes prompts, without weights or a device.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_text::{ChatTemplate, MediumKind, MediumTokens, Span, TemplateOrigin, Turn};

use super::reader::ReadMedia;
use super::{IdleSettings, MediaSettings, MediumInput, MediumPlan, MediumShape, Shown};
use crate::decoder::Position;
use crate::error::{ModelError, Result};

/// Support that a model without an encoder lacks, for [`ModelError::MediumKind`].
pub(crate) const TEXT_ONLY: &str = "this model reads text only";

fn no_media<T>(kind: MediumKind) -> Result<T> {
    Err(ModelError::MediumKind { kind, what: TEXT_ONLY })
}

/// The role of a family that prepares its input: it converts media to values, and conversations to ids with positions. The default
/// methods are those of a family that reads text only.
pub trait Processor: Send + Sync {
    /// Returns the reader of media; `None` for a family that reads text only.
    fn reader(&self) -> Option<&dyn ReadMedia> {
        None
    }

    /// Returns the kinds of media that this family supports. A family that reads text only has none.
    fn kinds(&self) -> &'static [MediumKind] {
        self.reader().map_or(&[], ReadMedia::kinds)
    }

    /// Returns the media settings that this family does not read.
    fn idle_settings(&self) -> IdleSettings {
        IdleSettings { fields: IdleSettings::SIZES, why: || "it reads text only".into() }
    }

    /// Returns whether the published video processor chooses and sizes frames ([`super::FrameRule::Processor`]).
    fn chooses_frames(&self) -> bool {
        false
    }

    /// Returns advice on how to shorten a medium of this kind, for prompts that are too long, or `None` if its length is fixed.
    fn shorten(&self, _kind: MediumKind) -> Option<String> {
        None
    }

    /// Returns whether a limit on the length of prompts counts a medium as one token. The family's own trainer then truncates
    /// prompts before it replaces media by their features.
    fn counts_medium_as_one(&self) -> bool {
        false
    }

    /// Plans a medium from its header (see [`super::probe_medium`]).
    ///
    /// # Errors
    /// Returns an error if no choice satisfies the options or the family does not support this kind.
    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan> {
        self.reader().map_or_else(|| no_media(medium.kind), |reader| reader.plan(medium, header, settings))
    }

    /// Decodes a medium. The result must depend only on the content of its files, its kind and options, and the settings. The key
    /// in the settings may affect only the number and order of frames, and the path must have no effect. The reason is that the
    /// result is stored for other rows and later passes over the data ([`MediaStore`](crate::MediaStore)).
    ///
    /// # Errors
    /// Returns an error if the medium is unreadable, no choice satisfies the options or the family does not support this kind.
    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        self.reader().map_or_else(|| no_media(medium.kind), |reader| reader.prepare(medium, settings))
    }

    /// Returns the number of values in a prepared medium of this shape.
    fn numbers(&self, shape: &MediumShape) -> usize {
        match *shape {
            MediumShape::Patches(grid) => grid.t * grid.h * grid.w * self.patch_len(),
            MediumShape::Pictures { count, height_px, width_px } => 3 * count * height_px * width_px,
            MediumShape::Masked { count, side_px } => 4 * count * side_px * side_px,
            MediumShape::Tiles { rows, columns, side_px } => {
                3 * (rows * columns + usize::from(rows * columns > 1)) * side_px * side_px
            }
            MediumShape::Frames { count, side_px, .. } => 3 * count * side_px * side_px,
            MediumShape::Mel { mels, frames, .. } => mels * frames,
        }
    }

    /// Returns the number of values in a row of [`MediumShape::Patches`]; 0 for families without patches.
    fn patch_len(&self) -> usize {
        0
    }

    /// Returns the tokens in the prompt for a medium of this shape with frames at these times.
    ///
    /// # Errors
    /// Returns an error if the family does not use this shape.
    fn tokens(&self, kind: MediumKind, _shape: &MediumShape, _times_secs: &[f64]) -> Result<MediumTokens> {
        no_media(kind)
    }

    /// Returns the tokens of a clip that is interleaved with its own sound, or `None` if the family shows the two one after the
    /// other.
    ///
    /// # Errors
    /// Returns an error if the family does not use these shapes.
    fn tokens_with_sound(&self, _clip: Shown, _sound: Shown) -> Result<Option<MediumTokens>> {
        Ok(None)
    }

    /// Returns the ids that only media may produce. In the text of a completion, such a placeholder is encoded as plain text.
    fn placeholder_ids(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Returns the positions of a rendered prompt of `len` tokens, and the position of the token after it. Positions count up
    /// from 0 unless a family has its own axes.
    ///
    /// # Errors
    /// Returns an error if the family does not use the shape of a medium.
    fn positions(
        &self,
        len: usize,
        _spans: &[Span],
        _media: &[Arc<MediumInput>],
    ) -> Result<(Vec<Position>, u32)> {
        Ok(((0..len as u32).map(|p| [p; 3]).collect(), len as u32))
    }

    /// Returns the conversation in the form to be rendered. A family may add white space around media that the row does not
    /// place.
    fn arrange(&self, turns: &[Turn]) -> Vec<Turn> {
        turns.to_vec()
    }

    /// Returns true if the projector reads the question ([`Self::instruction_ids`]).
    fn reads_question(&self) -> bool {
        false
    }

    /// Returns the ids of the question that the projector reads (see [`super::Encoder::project`]), in a separate vocabulary. Most
    /// projectors do not read the question.
    ///
    /// # Errors
    /// Returns an error if the text cannot be encoded.
    fn instruction_ids(&self, _turns: &[Turn]) -> Result<Vec<u32>> {
        Ok(Vec::new())
    }

    /// Reads the chat template of the checkpoint in `dir`.
    ///
    /// # Errors
    /// Returns an error if files are unreadable or the template does not compile.
    fn chat_template(&self, dir: &Path) -> Result<ChatTemplate> {
        Ok(ChatTemplate::from_dir(dir)?)
    }

    /// Returns tokens that always end a completion, in addition to those of the checkpoint's files. A token that the vocabulary
    /// does not have ends it as a string.
    fn stop_tokens(&self) -> &'static [&'static str] {
        &[]
    }
}

/// Returns the chat template of a checkpoint as the family changes it, or `own` if the checkpoint has none. `changed` returns `None` to keep
/// a template.
pub(super) fn chat_template(
    dir: &Path,
    own: &str,
    changed: impl FnOnce(&str) -> Option<String>,
) -> Result<ChatTemplate> {
    let template = ChatTemplate::from_dir(dir)?;
    if template.origin() == TemplateOrigin::BuiltIn {
        return Ok(ChatTemplate::from_source(own)?);
    }
    match changed(template.source()).filter(|source| source != template.source()) {
        Some(source) => Ok(ChatTemplate::from_source(&source)?),
        None => Ok(template),
    }
}
