//! Reading `config.json`: typed fields with defaults, errors that name file and key.

use std::path::{Path, PathBuf};

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

impl ConfigJson {
    /// Reads a JSON object from a file.
    ///
    /// # Errors
    /// A missing, oversized or malformed file.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::metadata(path).map_err(ModelError::io(path))?.len();
        if bytes > MAX_BYTES {
            return Err(Self::fail(path, format!("{bytes} bytes; a configuration has at most {MAX_BYTES}")));
        }
        let text = std::fs::read(path).map_err(ModelError::io(path))?;
        match serde_json::from_slice(&text) {
            Ok(Value::Object(object)) => Ok(Self { path: path.to_path_buf(), object }),
            Ok(_) => Err(Self::fail(path, "expected a JSON object".into())),
            Err(e) => Err(Self::fail(path, format!("not valid JSON: {e}"))),
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
    pub fn replace(&mut self, keys: &Map<String, Value>) {
        self.object.extend(keys.clone());
    }

    /// Another object in this one's place: for constants that stand in for a file, under this file's name.
    #[must_use]
    pub fn with_object(&self, value: Value) -> Self {
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
    #[must_use]
    pub fn section(&self, key: &str) -> Option<Self> {
        let object = self.get(key)?.as_object()?.clone();
        Some(Self { path: self.path.clone(), object })
    }

    /// A positive size. A missing key takes the default, or is an error without one.
    ///
    /// # Errors
    /// Anything but an integer from 1 to 2³¹.
    pub fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        match (self.get(key), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(self.error(format!("{key} is missing"))),
            (Some(value), _) => match value.as_u64() {
                Some(n) if (1..=1 << 31).contains(&n) => Ok(n as usize),
                _ => Err(self.error(format!("{key} is {value}; expected a positive integer"))),
            },
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
                _ => Err(self.error(format!("{key} is {value}; expected a number"))),
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
            Some(value) => {
                value.as_bool().ok_or_else(|| self.error(format!("{key} is {value}; expected true or false")))
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
        list.map(Some).ok_or_else(|| self.error(format!("{key} is {value}; expected a list of integers")))
    }
}
