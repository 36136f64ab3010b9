//! A checkpoint directory, opened once, from which models, prompts and adapters are built.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::export::check_links;
use crate::families::{Family, FamilyRow, family_of};
use crate::media_store::MediaStore;

/// A checkpoint directory with its configuration. `config.json` is read once, when the directory is opened. Everything that is
/// built from one value therefore uses the same configuration, even if the file changes later.
#[derive(Clone)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ConfigJson,
    family: Arc<Family>,
    media_store: Arc<MediaStore>,
}

impl Checkpoint {
    /// Reads `config.json` and finds the family by its `model_type` and `architectures`.
    ///
    /// ```
    /// use omnigrpo_models::{Checkpoint, LoadOptions, Model};
    ///
    /// # let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/checkpoints/qwen2_vl_untied");
    /// let checkpoint = Checkpoint::open(directory.as_ref())?;
    /// assert_eq!(checkpoint.family().name(), "qwen2_vl");
    /// let model = Model::load(&checkpoint, &LoadOptions::default())?;
    /// assert_eq!(model.decoder().config().layers, 2);
    /// # Ok::<(), omnigrpo_models::ModelError>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `config.json` is unreadable, the model is unsupported, the configuration or processor is invalid,
    /// or a file of the checkpoint is a link to a place outside the directory.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::open_with(dir, |_| Ok(Map::new()))
    }

    /// Opens a directory as [`Self::open`] does, for a family that is not in the table or is not found by this checkpoint's
    /// `model_type`.
    pub fn open_as(dir: &Path, row: &'static FamilyRow) -> Result<Self> {
        let config = ConfigJson::read(&dir.join("config.json"))?;
        check_links(dir)?;
        let family = Arc::new(Family::open(row, dir, &config)?);
        Ok(Self { dir: dir.to_path_buf(), config, family, media_store: Arc::default() })
    }

    /// Opens a directory as [`Self::open`] does. The keys that `replace` returns replace those of the file.
    pub fn open_with<E: From<ModelError>>(
        dir: &Path,
        replace: impl FnOnce(&ConfigJson) -> Result<Map<String, Value>, E>,
    ) -> Result<Self, E> {
        let path = dir.join("config.json");
        if !path.is_file() {
            return Err(E::from(ModelError::Checkpoint {
                dir: dir.to_path_buf(),
                what: "no config.json; expected a checkpoint directory in the published Hugging Face layout"
                    .into(),
            }));
        }
        let mut config = ConfigJson::read(&path)?;
        check_links(dir)?;
        config.replace(replace(&config)?);
        let family = Arc::new(family_of(dir, &config)?);
        Ok(Self { dir: dir.to_path_buf(), config, family, media_store: Arc::default() })
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the content of `config.json`, with the replaced keys.
    pub fn config(&self) -> &ConfigJson {
        &self.config
    }

    /// Returns the family.
    pub fn family(&self) -> &Arc<Family> {
        &self.family
    }

    /// Returns the store of decoded media, shared by all prompts that are built for this value.
    pub fn media_store(&self) -> &Arc<MediaStore> {
        &self.media_store
    }
}
