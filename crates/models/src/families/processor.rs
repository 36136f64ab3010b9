//! Reading of media and writing of prompts. It needs neither weights nor a device.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_text::{ChatTemplate, MediumKind, MediumTokens, Span, Turn};

use super::{IdleSettings, MediaSettings, MediumInput, MediumPlan, MediumShape};
use crate::decoder::Position;
use crate::error::Result;

/// The half of a family that prepares its input: media become numbers, conversations become ids with positions.
pub trait Processor: Send + Sync {
    /// Media settings that this family does not read.
    fn idle_settings(&self) -> IdleSettings;

    /// Whether the published video processor chooses and sizes frames ([`super::FrameRule::Processor`]).
    fn chooses_frames(&self) -> bool {
        false
    }

    /// Returns true if the family takes sound.
    fn hears(&self) -> bool {
        false
    }

    /// Returns advice to shorten a medium of this kind, for prompts that are too long. `None`: its length is fixed.
    fn shorten(&self, kind: MediumKind) -> Option<&'static str>;

    /// Whether a limit on the length of prompts counts a medium as one token, as the family's own trainer does, which
    /// cuts its prompts before features take the place of media.
    fn counts_medium_as_one(&self) -> bool {
        false
    }

    /// Plans a medium from its header (see [`super::probe_medium`]).
    ///
    /// # Errors
    /// Options that exclude every choice, a kind this family does not take.
    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan>;

    /// Decodes a medium: a function of its files' content, its kind and options, and the settings. Their key may count through the
    /// number of frames and their order alone, and the path may not count, for the result is kept for other rows and later passes
    /// over the data ([`MediaStore`](crate::MediaStore)).
    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput>;

    /// Returns how many numbers a prepared medium of this shape has.
    fn numbers(&self, shape: &MediumShape) -> usize {
        match *shape {
            MediumShape::Patches(grid) => grid.t * grid.h * grid.w * self.patch_len(),
            MediumShape::Pictures { count, height_px, width_px } => 3 * count * height_px * width_px,
            MediumShape::Masked { count, side_px } => 4 * count * side_px * side_px,
            MediumShape::Mel { mels, frames } => mels * frames,
        }
    }

    /// Returns the numbers of a row of [`MediumShape::Patches`]; 0 for families without patches.
    fn patch_len(&self) -> usize {
        0
    }

    /// How a medium of this shape, with frames at these times, appears in the prompt.
    ///
    /// # Errors
    /// A shape that is not this family's.
    fn tokens(&self, kind: MediumKind, shape: &MediumShape, times_secs: &[f64]) -> Result<MediumTokens>;

    /// Ids that only media may produce: a completion containing one is plain text.
    fn placeholder_ids(&self) -> Vec<u32>;

    /// Positions of a rendered prompt of `len` tokens, and the position of the token after it. Plain counting unless a
    /// family has axes of its own.
    ///
    /// # Errors
    /// Media whose shape is not this family's.
    fn positions(
        &self,
        len: usize,
        _spans: &[Span],
        _media: &[Arc<MediumInput>],
    ) -> Result<(Vec<Position>, u32)> {
        Ok(((0..len as u32).map(|p| [p; 3]).collect(), len as u32))
    }

    /// The conversation as it is rendered: a family may put white space around media that the row does not place.
    fn arrange(&self, turns: &[Turn]) -> Vec<Turn> {
        turns.to_vec()
    }

    /// Returns the ids of the question that the projector reads (see [`super::Encoder::project`]), in a vocabulary of its own. Most
    /// projectors do not read the question.
    ///
    /// # Errors
    /// Text that cannot be encoded.
    fn instruction_ids(&self, _turns: &[Turn]) -> Result<Vec<u32>> {
        Ok(Vec::new())
    }

    /// The chat template of the checkpoint in `dir`.
    ///
    /// # Errors
    /// Unreadable files, a template that does not compile.
    fn chat_template(&self, dir: &Path) -> Result<ChatTemplate> {
        Ok(ChatTemplate::from_dir(dir)?)
    }

    /// Tokens that end a completion, whatever the checkpoint's files say. One that the vocabulary does not have ends it as a
    /// string.
    fn stop_tokens(&self) -> &'static [&'static str] {
        &[]
    }
}
