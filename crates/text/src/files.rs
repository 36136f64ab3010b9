//! Reader of small configuration files from a model directory, with a size limit. Links that leave the directory are errors.

use std::io::{ErrorKind, Read};
use std::path::Path;

use omnigrpo_guard::inside;
use serde_json::Value;

use crate::{Result, TextError};

/// Returns the file's bytes, or `None` if the file does not exist.
pub(crate) fn read_limited(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let read_error = |source| TextError::Read { path: path.to_owned(), source };
    let file = match inside::open_path(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(read_error(e)),
    };
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(read_error)?;
    match bytes.len() as u64 {
        got if got > limit => Err(TextError::TooLarge { path: path.to_owned(), got, limit }),
        _ => Ok(Some(bytes)),
    }
}

/// Returns the file as JSON, or `None` if the file does not exist.
pub(crate) fn read_json(path: &Path, limit: u64) -> Result<Option<Value>> {
    let Some(bytes) = read_limited(path, limit)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|e| TextError::BadFile {
        path: path.to_owned(),
        problem: "not JSON".to_owned(),
        source: Some(e.into()),
    })
}
