//! Typed access to `config.json`, with defaults, and errors that name file and key.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use omnigrpo_guard::inside;
use omnigrpo_ops::AttentionHeads;
use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// A `config.json`, or an object inside it.
#[derive(Clone, Debug)]
pub struct ConfigJson {
    path: PathBuf,
    object: Map<String, Value>,
}

/// Largest accepted size of a configuration, in bytes. A larger file is not read.
const MAX_BYTES: u64 = 16 << 20;

/// Returns the largest accepted value of a size, far above that of every published model. Memory is only allocated for tensors
/// that the files contain, but products of sizes must fit an integer, and loops over blocks must end.
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
    /// Returns an error if the file is missing, oversized or malformed, or is a link to a place outside its directory.
    pub fn read(path: &Path) -> Result<Self> {
        let text = inside::read_path(path, MAX_BYTES).map_err(ModelError::io(path))?;
        match serde_json::from_slice(&text) {
            Ok(Value::Object(object)) => Ok(Self { path: path.to_path_buf(), object }),
            Ok(_) => Err(Self::fail(path, "expected a JSON object".into())),
            Err(source) => Err(ModelError::Json { path: path.to_path_buf(), source }),
        }
    }

    /// Takes an object that was made from another file, which messages name.
    pub(crate) fn of_object(path: &Path, value: Value) -> Self {
        Self { path: path.to_path_buf(), object: Map::new() }.with_object(value)
    }

    fn fail(path: &Path, what: String) -> ModelError {
        ModelError::Config { path: path.to_path_buf(), what }
    }

    /// Creates an error about this file.
    pub fn error(&self, what: impl Into<String>) -> ModelError {
        Self::fail(&self.path, what.into())
    }

    /// Replaces some keys.
    pub fn replace(&mut self, keys: Map<String, Value>) {
        self.object.extend(keys);
    }

    /// Returns another object under this file's name, for constants that replace a file.
    pub(crate) fn with_object(&self, value: Value) -> Self {
        let object = match value {
            Value::Object(object) => object,
            _ => Map::new(),
        };
        Self { path: self.path.clone(), object }
    }

    /// Returns the raw object.
    pub fn object(&self) -> &Map<String, Value> {
        &self.object
    }

    /// Returns the value of a key, unless it is absent or null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    /// Returns the object under `key`, if it is present.
    ///
    /// # Errors
    /// Returns an error if the value is not an object.
    pub fn section(&self, key: &str) -> Result<Option<Self>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { path: self.path.clone(), object: object.clone() })),
            Some(value) => Err(self.error(format!("{key} is {}; expected an object", shortened(value)))),
        }
    }

    /// Returns the object under `key`.
    ///
    /// # Errors
    /// Returns an error if the key is missing or the value is not an object.
    pub fn required_section(&self, key: &str) -> Result<Self> {
        self.section(key)?.ok_or_else(|| self.error(format!("{key} is missing")))
    }

    /// Returns the string under `key`, if it is present.
    ///
    /// # Errors
    /// Returns an error if the value is not a string.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.error(format!("{key} is {}; expected a string", shortened(value)))),
        }
    }

    /// Returns the value that `known` gives to the string under `key`, or to `default` if the key is missing.
    ///
    /// # Errors
    /// Returns an error if the value is not a known string.
    pub fn choice<T: Copy>(&self, key: &str, default: &str, known: &[(&str, T)]) -> Result<T> {
        let name = self.text(key)?.unwrap_or(default);
        known.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
            self.error(format!("{key} is {name:?}; expected one of {}", names.join(", ")))
        })
    }

    /// Checks that a key is missing or has the only supported value.
    ///
    /// # Errors
    /// Returns an error if the value is another one.
    pub fn only(&self, key: &str, expected: impl Into<Value>) -> Result<()> {
        let expected = expected.into();
        match self.get(key).filter(|value| **value != expected) {
            None => Ok(()),
            Some(value) => {
                Err(self.error(format!("{key} is {}; only {expected} is supported", shortened(value))))
            }
        }
    }

    /// Returns `key` if it is present, or else its other name.
    pub(crate) fn either<'k>(&self, key: &'k str, other: &'k str) -> &'k str {
        if self.get(key).is_some() { key } else { other }
    }

    /// Returns an epsilon, the number that is added to a variance.
    ///
    /// # Errors
    /// Returns an error unless the value is a number from 0 to 1.
    pub fn epsilon(&self, key: &str, default: f64) -> Result<f32> {
        Ok(self.number_in(key, default, 0.0..=1.0)? as f32)
    }

    /// Returns a standard deviation of new weights.
    ///
    /// # Errors
    /// Returns an error unless the value is a number from 0 to 1,000.
    pub fn spread(&self, key: &str, default: f64) -> Result<f32> {
        Ok(self.number_in(key, default, 0.0..=1e3)? as f32)
    }

    /// Returns a number within a range.
    ///
    /// # Errors
    /// Returns an error if the value is anything else.
    pub fn number_in(&self, key: &str, default: f64, range: RangeInclusive<f64>) -> Result<f64> {
        let x = self.number(key, default)?;
        let (least, most) = (range.start(), range.end());
        match range.contains(&x) {
            true => Ok(x),
            false => Err(self.error(format!("{key} is {x:e}; expected a number from {least} to {most}"))),
        }
    }

    /// Returns the attention heads that share a width; queries, keys and values have the same number. The columns of a head are
    /// a multiple of `unit`.
    pub(crate) fn heads(
        &self,
        (key, default): (&str, usize),
        width: usize,
        unit: usize,
    ) -> Result<AttentionHeads> {
        let heads = self.size(key, Some(default))?;
        match width.is_multiple_of(heads * unit) {
            true => Ok(AttentionHeads { q: heads, kv: heads, dim: width / heads }),
            false => {
                let problem = match unit {
                    1 => ", which is not a multiple of it".to_owned(),
                    _ => format!("; expected heads of a multiple of {unit} columns"),
                };
                Err(self.error(format!("{key} is {heads}, for a width of {width}{problem}")))
            }
        }
    }

    /// Returns a positive size. If the key is missing, the default is used.
    ///
    /// # Errors
    /// Returns an error if the key is missing without a default, or the value is not an integer from 1 to the largest for this
    /// key.
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

    /// Returns a size that is written as a number, or as the same number twice (height and width).
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

    /// Returns a finite number.
    ///
    /// # Errors
    /// Returns an error if the value is anything else.
    pub fn number(&self, key: &str, default: f64) -> Result<f64> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => match value.as_f64() {
                Some(x) if x.is_finite() => Ok(x),
                _ => Err(self.error(format!("{key} is {}; expected a number", shortened(value)))),
            },
        }
    }

    /// Returns three numbers, one per colour.
    ///
    /// # Errors
    /// Returns an error if the value is anything else.
    pub(crate) fn triple(&self, key: &str, default: [f64; 3]) -> Result<[f64; 3]> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => serde_json::from_value(value.clone())
                .map_err(|_| self.error(format!("{key} is {}; expected three numbers", shortened(value)))),
        }
    }

    /// Returns a boolean.
    ///
    /// # Errors
    /// Returns an error if the value is anything else.
    pub fn boolean(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.error(format!("{key} is {}; expected true or false", shortened(value)))),
        }
    }

    /// Returns a token id, or `None` if the key is missing.
    ///
    /// # Errors
    /// Returns an error unless the value is an id below `vocab`.
    pub fn id(&self, key: &str, vocab: usize) -> Result<Option<u32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) if (id as usize) < vocab => Ok(Some(id)),
            _ => {
                let value = shortened(value);
                Err(self.error(format!("{key} is {value}, which is outside the vocabulary of {vocab}")))
            }
        }
    }

    /// Returns a token id.
    ///
    /// # Errors
    /// Returns an error unless the value, or the default if the key is missing, is an id below `vocab`.
    pub(crate) fn token(&self, key: &str, default: u32, vocab: usize) -> Result<u32> {
        match self.id(key, vocab)? {
            Some(id) => Ok(id),
            None if (default as usize) < vocab => Ok(default),
            None => {
                let what = format!("its default {default} is outside the vocabulary of {vocab}");
                Err(self.error(format!("{key} is missing, and {what}")))
            }
        }
    }

    /// Returns a list of sizes; zero is allowed.
    ///
    /// # Errors
    /// Returns an error if the value is anything else.
    pub fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list: Option<Vec<usize>> = value
            .as_array()
            .and_then(|list| list.iter().map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect());
        list.map(Some)
            .ok_or_else(|| self.error(format!("{key} is {}; expected a list of integers", shortened(value))))
    }
}

/// Formats a value for a message; a long one is truncated.
fn shortened(value: &Value) -> String {
    const SHOWN: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
