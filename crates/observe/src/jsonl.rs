//! Append-only files with one JSON object per line.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use omnigrpo_guard::inside;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Error, write_atomic};

/// An open log. Each call appends its lines with one write, so a crash can truncate only the last line.
#[derive(Debug)]
pub(crate) struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Opens a log for appending and creates it if it is missing.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let file = inside::open_to_write(path, File::options().create(true).append(true));
        let file = file.map_err(|source| Error::io("open", path, source))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Appends rows. Returns false if the file has been removed or replaced since the last call; it is then created again.
    pub(crate) fn append<T: Serialize>(&mut self, rows: impl IntoIterator<Item = T>) -> Result<bool, Error> {
        let mut lines = Vec::new();
        for row in rows {
            serde_json::to_writer(&mut lines, &row)
                .map_err(|source| Error::Json { path: self.path.clone(), source })?;
            lines.push(b'\n');
        }
        let in_place = self.is_in_place();
        if !in_place {
            *self = Self::open(&self.path)?;
        }
        self.file.write_all(&lines).map_err(|source| Error::io("append to", &self.path, source))?;
        Ok(in_place)
    }

    /// Returns true if the path still refers to the open file.
    fn is_in_place(&self) -> bool {
        let identity = |meta: &fs::Metadata| {
            #[cfg(unix)]
            return std::os::unix::fs::MetadataExt::ino(meta);
            #[cfg(not(unix))]
            return meta.is_file();
        };
        match (fs::metadata(&self.path), self.file.metadata()) {
            (Ok(path), Ok(file)) => identity(&path) == identity(&file),
            _ => false,
        }
    }

    /// Waits until all appended lines are on disk.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        self.file.sync_data().map_err(|source| Error::io("sync", &self.path, source))
    }
}

/// The one field that every log line has. Other fields are ignored.
#[derive(Deserialize)]
struct Stamp {
    step: u64,
}

/// Removes the lines of steps after `last_step` and an incomplete last line; the remaining lines stay byte-identical. A missing
/// file counts as empty.
pub(crate) fn truncate_after(path: &Path, last_step: u64) -> Result<(), Error> {
    let reader = match inside::open_path(path) {
        Ok(file) => BufReader::new(file),
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(Error::io("read", path, source)),
    };
    // Lines are checked and copied one at a time, because the log of a long run may not fit in memory.
    let mut damaged = None;
    let result = write_atomic(path, |out| copy_until(reader, last_step, out, &mut damaged));
    match damaged {
        Some((line, source)) => Err(Error::Damaged { path: path.to_owned(), line, source }),
        None => result,
    }
}

/// Passes every row of a log to `take`, one at a time.
pub(crate) fn each_row<T: DeserializeOwned>(path: &Path, mut take: impl FnMut(T)) -> Result<(), Error> {
    let file = inside::open_path(path).map_err(|source| Error::io("read", path, source))?;
    for (number, line) in BufReader::new(file).split(b'\n').enumerate() {
        let line = line.map_err(|source| Error::io("read", path, source))?;
        let damaged = |source| Error::Damaged { path: path.to_owned(), line: number + 1, source };
        take(serde_json::from_slice(&line).map_err(damaged)?);
    }
    Ok(())
}

fn copy_until(
    mut reader: impl BufRead,
    last_step: u64,
    out: &mut dyn Write,
    damaged: &mut Option<(usize, serde_json::Error)>,
) -> io::Result<()> {
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        reader.read_until(b'\n', &mut line)?;
        number += 1;
        // A line without a newline is the end of the file, or was being written when the process died.
        if line.last() != Some(&b'\n') {
            return Ok(());
        }
        match serde_json::from_slice::<Stamp>(&line) {
            Ok(stamp) if stamp.step <= last_step => out.write_all(&line)?,
            Ok(_) => {}
            Err(error) => {
                *damaged = Some((number, error));
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn truncated(content: &str, last_step: u64) -> Result<String, Error> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        fs::write(&path, content).unwrap();
        truncate_after(&path, last_step)?;
        Ok(fs::read_to_string(&path).unwrap())
    }

    #[test]
    fn rows_after_the_checkpoint_go_and_the_others_stay_verbatim() {
        let rows =
            "{\"step\":1,\"loss\":0.10}\n{\"step\": 2}\n{\"eval_reward\":1,\"step\":2}\n{\"step\":3}\n";
        assert_eq!(truncated(rows, 2).unwrap(), &rows[..rows.len() - "{\"step\":3}\n".len()]);
        assert_eq!(truncated(rows, 0).unwrap(), "");
        assert_eq!(truncated(rows, 9).unwrap(), rows);
    }

    #[test]
    fn a_torn_last_line_is_dropped_even_if_it_parses() {
        assert_eq!(truncated("{\"step\":1}\n{\"step\":2,\"lo", 5).unwrap(), "{\"step\":1}\n");
        // The file is cut between the brace and the newline. Appending to it would join two rows.
        assert_eq!(truncated("{\"step\":1}\n{\"step\":2}", 5).unwrap(), "{\"step\":1}\n");
        assert_eq!(truncated("{\"st", 5).unwrap(), "");
    }

    #[test]
    fn damage_in_the_middle_is_an_error_and_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let content = "{\"step\":1}\nnot json\n{\"step\":3}\n";
        fs::write(&path, content).unwrap();
        let error = truncate_after(&path, 5).unwrap_err();
        assert!(matches!(&error, Error::Damaged { line: 2, .. }), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
    }

    #[test]
    fn a_log_that_was_removed_or_replaced_is_noticed_and_begun_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        let mut log = JsonLines::open(&path).unwrap();
        assert!(log.append([1]).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(!log.append([2]).unwrap());
        assert!(log.append([3]).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "2\n3\n");
        let other = directory.path().join("other");
        fs::write(&other, "mine\n").unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(!log.append([4]).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine\n4\n", "what took its place is kept");
    }

    #[test]
    fn a_missing_log_is_empty() {
        truncate_after(Path::new("/nowhere/metrics.jsonl"), 5).unwrap();
    }
}
