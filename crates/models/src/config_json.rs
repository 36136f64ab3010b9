//! Reading `config.json`: typed fields with defaults, errors that name file and key.

use std::path::{Path, PathBuf};

use omnigrpo_guard::inside;
use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// A `config.json`, or an object inside it.
#[derive(Clone, Debug)]
pub struct ConfigJson {
    path: PathBuf,
    object: Map<String, Value>,
}

/// No configuration is longer than this; a larger file is refused unread.
const MAX_BYTES: u64 = 16 << 20;

/// The largest value of a size, far above every published model's. Memory is only taken for tensors that the files
/// have, but products of sizes have to stay within an integer, and loops over blocks have to end.
fn most(key: &str) -> usize {
    let last = key.rsplit('_').next().unwrap_or_default();
    match key {
        "spatial_merge_size" | "temporal_patch_size" | "in_channels" | "in_chans" | "num_channels" => 1 << 6,
        "patch_size" | "depth" | "n_layers" => 1 << 10,
        "image_size" | "force_image_size" | "window_size" => 1 << 14,
        "num_frames" => 1 << 16,
        _ if last == "layers" => 1 << 10,
        _ => 1 << 24,
    }
}

impl ConfigJson {
    /// Reads a JSON object from a file.
    ///
    /// # Errors
    /// A missing, oversized or malformed file, a link that leads out of its directory.
    pub fn read(path: &Path) -> Result<Self> {
        let text = inside::read_path(path, MAX_BYTES).map_err(ModelError::io(path))?;
        match serde_json::from_slice(&text) {
            Ok(Value::Object(object)) => Ok(Self { path: path.to_path_buf(), object }),
            Ok(_) => Err(Self::fail(path, "expected a JSON object".into())),
            Err(source) => Err(ModelError::Json { path: path.to_path_buf(), source }),
        }
    }

    fn fail(path: &Path, what: String) -> ModelError {
        ModelError::Config { path: path.to_path_buf(), what }
    }

    /// An error about this file.
    pub fn error(&self, what: impl Into<String>) -> ModelError {
        Self::fail(&self.path, what.into())
    }

    /// Replaces some keys.
    pub fn replace(&mut self, keys: Map<String, Value>) {
        self.object.extend(keys);
    }

    /// Another object in this one's place: for constants that stand in for a file, under this file's name.
    #[must_use]
    pub(crate) fn with_object(&self, value: Value) -> Self {
        let object = match value {
            Value::Object(object) => object,
            _ => Map::new(),
        };
        Self { path: self.path.clone(), object }
    }

    /// The raw object.
    #[must_use]
    pub fn object(&self) -> &Map<String, Value> {
        &self.object
    }

    /// A value that is present and not null.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    /// The object under `key`, if there is one.
    ///
    /// # Errors
    /// A value that is no object.
    pub fn section(&self, key: &str) -> Result<Option<Self>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { path: self.path.clone(), object: object.clone() })),
            Some(value) => Err(self.error(format!("{key} is {}; expected an object", shortened(value)))),
        }
    }

    /// The object under `key`.
    ///
    /// # Errors
    /// A missing key, a value that is no object.
    pub fn required_section(&self, key: &str) -> Result<Self> {
        self.section(key)?.ok_or_else(|| self.error(format!("{key} is missing")))
    }

    /// A string, if there is one.
    ///
    /// # Errors
    /// A value that is no string.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.error(format!("{key} is {}; expected a string", shortened(value)))),
        }
    }

    /// Reads the number that is added to a variance.
    ///
    /// # Errors
    /// Anything but a number from 0 to 1.
    pub fn epsilon(&self, key: &str, default: f64) -> Result<f32> {
        match self.number(key, default)? {
            x if (0.0..1.0).contains(&x) => Ok(x as f32),
            x => Err(self.error(format!("{key} is {x:e}; expected a number from 0 to 1"))),
        }
    }

    /// A standard deviation of new weights.
    ///
    /// # Errors
    /// Anything but a number from 0 to 1,000.
    pub fn spread(&self, key: &str, default: f64) -> Result<f32> {
        match self.number(key, default)? {
            x if (0.0..=1e3).contains(&x) => Ok(x as f32),
            x => Err(self.error(format!("{key} is {x:e}; expected a number from 0 to 1000"))),
        }
    }

    /// A positive size. A missing key takes the default, or is an error without one.
    ///
    /// # Errors
    /// Anything but an integer from 1 to the largest that this key may have.
    pub fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        match (self.get(key), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(self.error(format!("{key} is missing"))),
            (Some(value), _) => self.in_bounds(key, value),
        }
    }

    fn in_bounds(&self, key: &str, value: &Value) -> Result<usize> {
        match value.as_u64() {
            Some(n) if (1..=most(key) as u64).contains(&n) => Ok(n as usize),
            _ => Err(self.error(format!(
                "{key} is {}; expected an integer from 1 to {}",
                shortened(value),
                most(key)
            ))),
        }
    }

    /// A size that is written as a number, or as the same number twice (height and width).
    pub fn side(&self, key: &str, default: usize) -> Result<usize> {
        match self.get(key) {
            Some(Value::Array(sides)) => match sides.as_slice() {
                [height, width] if height == width => self.in_bounds(key, height),
                _ => Err(self.error(format!(
                    "{key} is {}; expected two equal sizes",
                    shortened(&Value::from(sides.clone()))
                ))),
            },
            _ => self.size(key, Some(default)),
        }
    }

    /// A finite number.
    ///
    /// # Errors
    /// Anything else.
    pub fn number(&self, key: &str, default: f64) -> Result<f64> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => match value.as_f64() {
                Some(x) if x.is_finite() => Ok(x),
                _ => Err(self.error(format!("{key} is {}; expected a number", shortened(value)))),
            },
        }
    }

    /// A boolean.
    ///
    /// # Errors
    /// Anything else.
    pub fn boolean(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.error(format!("{key} is {}; expected true or false", shortened(value)))),
        }
    }

    /// A token id. `None` where the key is missing.
    ///
    /// # Errors
    /// Anything but an id below `vocab`.
    pub fn id(&self, key: &str, vocab: usize) -> Result<Option<u32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) if (id as usize) < vocab => Ok(Some(id)),
            _ => {
                let value = shortened(value);
                Err(self.error(format!("{key} is {value}, which is not an id of the vocabulary of {vocab}")))
            }
        }
    }

    /// A list of sizes (zero allowed).
    ///
    /// # Errors
    /// Anything else.
    pub fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list: Option<Vec<usize>> = value
            .as_array()
            .and_then(|list| list.iter().map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect());
        list.map(Some)
            .ok_or_else(|| self.error(format!("{key} is {}; expected a list of integers", shortened(value))))
    }
}

/// A value for a message: of a long one the beginning.
fn shortened(value: &Value) -> String {
    const SHOWN: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
