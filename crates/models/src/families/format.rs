//! Files of a family's checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_ops::Param;
use serde_json::{Map, Value};

use crate::config_json::ConfigJson;
use crate::error::Result;

/// The role of a family that knows its files: tensor names, towers in separate directories, and layouts for export.
pub trait Format: Send + Sync {
    /// Returns the published name of a tensor in a file, or `None` for keys that are not weights.
    fn published_name(&self, key: &str) -> Option<String>;

    /// Returns the name of a tensor or module in the model class that `transformers` builds. Adapters are saved under this name.
    fn module_name(&self, published: &str) -> String {
        published.to_owned()
    }

    /// Returns the prefix of tensors that the model does not use and that a saved copy keeps unchanged. [`Self::published_name`]
    /// returns `None` for them.
    fn carried(&self) -> Option<&'static str> {
        None
    }

    /// Returns the towers that may be in separate directories.
    fn companions(&self) -> Vec<Companion> {
        Vec::new()
    }

    /// Adjusts the `config.json` of a saved copy.
    fn saved_config(&self, _config: &mut Map<String, Value>) {}

    /// Returns the layout in which the checkpoint is written.
    fn layout(&self) -> &'static str {
        "hf"
    }

    /// Converts these weights of the checkpoint in `dir`, whose `config.json` is `config`, to another layout. Returns `None` if
    /// the family has only one layout.
    ///
    /// # Errors
    /// Returns an error if the family does not have the layout or the layout cannot express the settings.
    fn convert(
        &self,
        _dir: &Path,
        _config: &ConfigJson,
        _params: &[Arc<Param>],
        _layout: &str,
    ) -> Result<Option<Converted>> {
        Ok(None)
    }
}

/// A tower whose weights may be in a separate directory.
pub struct Companion {
    /// Directory of the tower, if one was found.
    pub dir: Option<PathBuf>,
    /// Option that gives the directory.
    pub option: &'static str,
    /// Prefix of the tower's tensors in the checkpoint, before the names that [`Self::published`] returns.
    pub prefix: &'static str,
    /// Function that maps a key of that directory to the name below the prefix, or to `None` if it is not part of the tower.
    pub published: fn(&str) -> Option<String>,
}

/// A checkpoint, converted to another layout.
pub struct Converted {
    /// Weights under their names in that layout.
    pub params: Vec<Arc<Param>>,
    /// Content of `config.json`.
    pub config: Value,
    /// Files to write, by name.
    pub files: Vec<(&'static str, String)>,
    /// Files of the old layout that are not copied.
    pub left_out: &'static [&'static str],
}
