//! Files of a family's checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_ops::Param;
use serde_json::{Map, Value};

use crate::config_json::ConfigJson;
use crate::error::Result;

/// Names of tensors, towers in directories of their own, and layouts to export to.
pub trait Format: Send + Sync {
    /// The published name of a tensor in a file, or `None` for keys that are no weights.
    fn published_name(&self, key: &str) -> Option<String>;

    /// A tensor's name, or its module's, in the model class that `transformers` builds; adapters are saved under it.
    fn module_name(&self, published: &str) -> String {
        published.to_owned()
    }

    /// Towers that may be in directories of their own.
    fn companions(&self) -> Vec<Companion> {
        Vec::new()
    }

    /// Adjusts the `config.json` of a saved copy.
    fn saved_config(&self, _config: &mut Map<String, Value>) {}

    /// The layout the checkpoint is written in.
    fn layout(&self) -> &'static str {
        "hf"
    }

    /// The checkpoint in `dir`, whose `config.json` is `config`, with these weights in another layout. `None`: the family
    /// has no other.
    ///
    /// # Errors
    /// A layout this family does not have; settings it cannot express.
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

/// A tower whose weights may be in a directory of its own.
pub struct Companion {
    /// That directory, if one was found.
    pub dir: Option<PathBuf>,
    /// The option that gives it.
    pub option: &'static str,
    /// Prefix of its tensors in the checkpoint, before [`Self::published`].
    pub prefix: &'static str,
    /// The name of a tensor of that directory below the prefix, or `None` for what is not part of the tower.
    pub published: fn(&str) -> Option<String>,
}

/// A checkpoint in another layout than it was loaded in.
pub struct Converted {
    /// The weights under their names there.
    pub params: Vec<Arc<Param>>,
    /// `config.json`.
    pub config: Value,
    /// Files to write, by name.
    pub files: Vec<(&'static str, String)>,
    /// Files of the old layout that are not copied.
    pub left_out: &'static [&'static str],
}
