//! Atomic file writer: the output is either complete or absent.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use omnigrpo_guard::inside::is_same_file;

use crate::error::DataError;

/// Returns an error if the output would replace its own input.
pub(crate) fn check_is_other(input: &Path, output: &Path) -> Result<(), DataError> {
    match is_same_file(input, output) {
        true => Err(DataError::Setting {
            setting: "output",
            got: output.display().to_string(),
            expected: "a file other than the input",
        }),
        false => Ok(()),
    }
}

/// File that is written under a temporary name in its target folder. If it is dropped before [`Output::finish`], nothing remains.
pub(crate) struct Output {
    path: PathBuf,
    temporary: PathBuf,
    out: BufWriter<File>,
}

impl Output {
    /// Creates the temporary file, and any missing folders.
    pub(crate) fn create(path: &Path) -> Result<Self, DataError> {
        // Several threads may write the same medium at once.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        name.push(format!(".{}.{count}.tmp", std::process::id()));
        let temporary = path.with_file_name(name);
        if let Some(folder) = path.parent().filter(|folder| *folder != Path::new("")) {
            std::fs::create_dir_all(folder).map_err(DataError::io("create the folder", folder))?;
        }
        let file = File::create(&temporary).map_err(DataError::io("write", path))?;
        Ok(Self { path: path.to_owned(), temporary, out: BufWriter::new(file) })
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.out.write_all(bytes).map_err(DataError::io("write", &self.path))
    }

    /// Writes one value as a line of JSON and returns its number of bytes.
    pub(crate) fn line(&mut self, value: &impl Serialize) -> Result<u64, DataError> {
        let mut line = serde_json::to_vec(value)
            .map_err(std::io::Error::from)
            .map_err(DataError::io("write", &self.path))?;
        line.push(b'\n');
        self.bytes(&line)?;
        Ok(line.len() as u64)
    }

    /// Renames the file to its final name.
    pub(crate) fn finish(mut self) -> Result<(), DataError> {
        self.out
            .flush()
            .and_then(|()| self.out.get_ref().sync_all())
            .and_then(|()| std::fs::rename(&self.temporary, &self.path))
            .map_err(DataError::io("write", &self.path))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // The file is already renamed after `finish`; otherwise it is removed if possible.
        let _ = std::fs::remove_file(&self.temporary);
    }
}
