//! Model families.
//!
//! A new family needs a folder here with a [`Processor`], an [`Architecture`] and a [`Format`], and a row in [`FAMILIES`]. The
//! loader, the parity suite and the documentation iterate over the table.

mod architecture;
mod aria;
mod format;
pub(crate) mod frames;
pub mod humanomni;
mod internvl;
mod medium;
mod processor;
mod qwen_audio;
mod qwen_omni;
mod qwen_vl;
mod reader;
mod settings;
mod smolvlm;
pub mod sound;
mod table;
mod text;

use std::path::Path;
use std::sync::Arc;

use omnigrpo_text::{StopSet, Tokenizer};

pub use architecture::{Architecture, Encoder, Network};
pub use format::{Companion, Converted, Format};
pub use medium::{MediumInput, MediumPlan, MediumShape, Shown, probe_medium};
pub use processor::Processor;
pub(crate) use processor::TEXT_ONLY;
pub use settings::{FrameRule, IdleSettings, MediaSettings, MediumKey, MissingAudio};
pub use table::{FAMILIES, FamilyOption, FamilyRow, OptionKind};

use crate::config_json::ConfigJson;
use crate::error::{ModelError, RULE, Result};
pub(crate) use table::family_of;
pub(crate) use text::TextClass;

/// Roles of a family, which share one configuration.
pub struct Roles {
    /// Role that reads media and writes prompts.
    pub processor: Box<dyn Processor>,
    /// Role that builds networks.
    pub architecture: Arc<dyn Architecture>,
    /// Role that knows the files.
    pub format: Arc<dyn Format>,
}

/// A model family with the configuration of one checkpoint, without weights.
pub struct Family {
    row: &'static FamilyRow,
    roles: Roles,
}

impl Family {
    pub(crate) fn open(row: &'static FamilyRow, dir: &Path, json: &ConfigJson) -> Result<Self> {
        Ok(Self { row, roles: (row.open)(dir, json)? })
    }

    /// Returns the family's row in the table.
    pub fn row(&self) -> &'static FamilyRow {
        self.row
    }

    /// Returns the name that messages use.
    pub fn name(&self) -> &'static str {
        self.row.name
    }

    /// Returns the role that reads media and writes prompts.
    pub fn processor(&self) -> &dyn Processor {
        self.roles.processor.as_ref()
    }

    /// Returns true if the family reads text only.
    pub fn reads_text_only(&self) -> bool {
        self.processor().kinds().is_empty()
    }

    /// Returns the role that builds networks.
    pub fn architecture(&self) -> &dyn Architecture {
        self.roles.architecture.as_ref()
    }

    /// Returns the role that knows the files.
    pub fn format(&self) -> &dyn Format {
        self.roles.format.as_ref()
    }

    /// Returns the stop rules of the checkpoint in `dir`: those of its files, the tokens of the family, and further strings. A
    /// token that the vocabulary does not have stops as a string.
    ///
    /// # Errors
    /// Returns an error if files are malformed or a string is empty.
    pub fn stops(&self, dir: &Path, tokenizer: &Tokenizer, strings: &[String]) -> Result<StopSet> {
        let mut stops = StopSet::from_dir(dir, tokenizer, strings)?;
        for &stop in self.processor().stop_tokens() {
            match tokenizer.token_id(stop) {
                Some(id) => stops.ids.push(id),
                None if stops.strings.iter().any(|known| known == stop) => {}
                None => stops.strings.push(stop.to_owned()),
            }
        }
        stops.ids.sort_unstable();
        stops.ids.dedup();
        Ok(stops)
    }

    /// Checks that this family supports the settings. The check runs once, before any medium is read.
    ///
    /// # Errors
    /// Returns an error if a setting has no effect.
    pub fn check_settings(&self, settings: &MediaSettings) -> Result<()> {
        let IdleSettings { fields, why } = self.processor().idle_settings();
        if let Some(setting) = settings.given().find(|setting| fields.contains(setting)) {
            return Err(ModelError::IdleSetting { setting, family: self.name(), why: why() });
        }
        if settings.rule == FrameRule::Processor && !self.processor().chooses_frames() {
            let why = "its video processor does not choose frames".into();
            return Err(ModelError::IdleSetting { setting: RULE, family: self.name(), why });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use omnigrpo_data::{MediumOptions, MediumRef, MediumSource};
    use omnigrpo_text::MediumKind;

    use super::*;
    use crate::checkpoint::Checkpoint;

    /// Prepares a clip as the tower of this checkpoint reads it.
    fn clip(checkpoint: &str, shuffle_frames: bool, seed: u64) -> MediumInput {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let checkpoint = Checkpoint::open(&golden.join("checkpoints").join(checkpoint)).unwrap();
        let medium = MediumRef {
            kind: MediumKind::Video,
            source: MediumSource::Path(golden.join("media/clip.gif")),
            options: MediumOptions { max_pixels: Some(12_544), ..MediumOptions::default() },
        };
        let settings = MediaSettings { shuffle_frames, seed, ..MediaSettings::default() };
        checkpoint.family().processor().prepare(&medium, &settings).unwrap()
    }

    #[test]
    fn shuffled_frames_keep_their_number_and_times() {
        for checkpoint in ["qwen2_5_vl_tied", "internvl_hf", "humanomni"] {
            let (plain, shuffled) = (clip(checkpoint, false, 1), clip(checkpoint, true, 1));
            assert_ne!(plain.data, shuffled.data, "{checkpoint}");
            assert_eq!(shuffled, clip(checkpoint, true, 1), "{checkpoint}");
            assert_eq!(MediumInput { data: plain.data.clone(), ..shuffled }, plain, "{checkpoint}");
            assert_eq!(clip(checkpoint, false, 2), plain, "{checkpoint}");
        }
    }
}
