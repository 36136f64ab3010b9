//! Partial results that survive the end of a process. Each row is appended as soon as it is done, and the next process with the
//! same work reuses the finished rows.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use omnigrpo_guard::inside;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::Error;

/// Finished rows of an output that is written as a whole at the end, stored in `<output>.partial`. The first line records the
/// settings that produce the rows; every other line contains the number and the text of a row.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    file: File,
    done: BTreeMap<u64, String>,
}

/// State of the partial file when it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// No rows.
    Nothing,
    /// Number of rows from the same work.
    Rows(usize),
    /// Rows from work with other settings.
    Other {
        /// Settings that differ.
        differences: Vec<String>,
        /// New path of those rows; `None` if there were none.
        moved_to: Option<PathBuf>,
    },
}

impl Partial {
    /// Opens the partial file of an output. `made_with` contains every setting that the rows depend on.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written or moved, or if another process is writing it.
    pub fn open(output: &Path, made_with: &Map<String, Value>) -> Result<(Self, Found), Error> {
        let mut path = output.as_os_str().to_owned();
        path.push(".partial");
        let path = PathBuf::from(path);
        let mut file = locked(&path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|source| Error::io("read", &path, source))?;

        let mut done = BTreeMap::new();
        let mut kept = 0;
        let mut found = Found::Nothing;
        for (number, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
            // A line without a newline was being written when the process died.
            let Some(line_text) = line.strip_suffix(b"\n").and_then(|line| std::str::from_utf8(line).ok())
            else {
                break;
            };
            if number == 0 {
                let before: Map<String, Value> = serde_json::from_str(line_text).unwrap_or_default();
                if before != *made_with {
                    let differences = differences(&before, made_with);
                    let has_rows = bytes.len() > line.len();
                    let moved_to = has_rows.then(|| aside(&path, &bytes)).transpose()?;
                    found = Found::Other { differences, moved_to };
                    break;
                }
            } else {
                let Some((row, text)) = line_text.split_once(' ') else { break };
                let Ok(row) = row.parse() else { break };
                done.insert(row, text.to_owned());
            }
            kept += line.len() as u64;
        }
        if !done.is_empty() {
            found = Found::Rows(done.len());
        }
        let write = |file: &mut File| {
            file.set_len(kept)?;
            file.seek(SeekFrom::End(0))?;
            if kept == 0 {
                file.write_all(format!("{}\n", Value::Object(made_with.clone())).as_bytes())
            } else {
                Ok(())
            }
        };
        write(&mut file).map_err(|source| Error::io("write", &path, source))?;
        Ok((Self { path, file, done }, found))
    }

    /// Returns the finished rows.
    pub fn done(&self) -> &BTreeMap<u64, String> {
        &self.done
    }

    /// Stores finished rows. Each text must be a single line.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, for example because the disk is full.
    pub fn add(&mut self, rows: impl IntoIterator<Item = (u64, String)>) -> Result<(), Error> {
        let mut lines = String::new();
        for (row, text) in rows {
            lines.push_str(&format!("{row} {text}\n"));
            self.done.insert(row, text);
        }
        self.file.write_all(lines.as_bytes()).map_err(|source| Error::io("append to", &self.path, source))
    }

    /// Adds rows as [`Self::add`] does, serialized as JSON.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, or if a value cannot be serialized as JSON.
    pub fn add_json<'a, T: Serialize + 'a>(
        &mut self,
        rows: impl IntoIterator<Item = &'a (u64, T)>,
    ) -> Result<(), Error> {
        let line = |(row, value): &(u64, T)| Ok((*row, serde_json::to_string(value)?));
        let lines: Result<Vec<_>, _> = rows.into_iter().map(line).collect();
        self.add(lines.map_err(|source| Error::Json { path: self.path.clone(), source })?)
    }

    /// Removes the file after the output has been written.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be written.
    pub fn remove(self) -> Result<(), Error> {
        std::fs::remove_file(&self.path).map_err(|source| Error::io("remove", &self.path, source))
    }
}

/// Opens a file and locks it for this process.
fn locked(path: &Path) -> Result<File, Error> {
    let options = &mut File::options();
    let options = options.create(true).truncate(false).read(true).write(true);
    let file = inside::open_to_write(path, options);
    let file = file.map_err(|source| Error::io("open", path, source))?;
    match file.try_lock() {
        // Some network file systems do not support locks.
        Err(TryLockError::Error(source)) if source.kind() == ErrorKind::Unsupported => {}
        other => {
            other.map_err(|source| Error::io("lock (is another process using it?)", path, source.into()))?
        }
    }
    Ok(file)
}

/// Copies the content of a file to the first free path of `<path>.1`, `<path>.2` and so on. The file itself stays in place, and so
/// does the lock on it.
fn aside(path: &Path, content: &[u8]) -> Result<PathBuf, Error> {
    for n in 1_u64.. {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{n}"));
        let to = PathBuf::from(name);
        let written = File::create_new(&to).and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()
        });
        match written {
            Err(source) if source.kind() == ErrorKind::AlreadyExists => {}
            Err(source) => return Err(Error::io("write", &to, source)),
            Ok(()) => return Ok(to),
        }
    }
    Err(Error::io("find a free file name after", path, ErrorKind::AlreadyExists.into()))
}

fn differences(before: &Map<String, Value>, now: &Map<String, Value>) -> Vec<String> {
    let shown = |value: Option<&Value>| value.map_or("unset".to_owned(), Value::to_string);
    let mut names: Vec<&String> = before.keys().chain(now.keys()).collect();
    names.sort();
    names.dedup();
    names
        .into_iter()
        .filter(|name| before.get(*name) != now.get(*name))
        .map(|name| format!("{name}: {} → {}", shown(before.get(name)), shown(now.get(name))))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(temperature: f64) -> Map<String, Value> {
        json!({ "verb": "generate", "temperature": temperature }).as_object().unwrap().clone()
    }

    #[test]
    fn rows_are_there_after_a_crash_and_a_torn_line_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("out.jsonl");
        let path = directory.path().join("out.jsonl.partial");
        let (mut first, found) = Partial::open(&output, &with(1.0)).unwrap();
        assert_eq!(found, Found::Nothing);
        first.add([(3, "{\"a\": 1}".to_owned()), (1, "{}".to_owned())]).unwrap();
        assert!(Partial::open(&output, &with(1.0)).unwrap_err().to_string().contains("another process"));
        drop(first);
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{whole}7 {{\"to")).unwrap();

        let (mut second, found) = Partial::open(&output, &with(1.0)).unwrap();
        assert_eq!(found, Found::Rows(2));
        assert_eq!(second.done(), &BTreeMap::from([(1, "{}".to_owned()), (3, "{\"a\": 1}".to_owned())]));
        second.add([(7, "{}".to_owned())]).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{whole}7 {{}}\n"));
        drop(second);

        // With other settings, work starts over and the difference is reported; the finished rows are kept.
        let finished = std::fs::read_to_string(&path).unwrap();
        let differences = vec!["temperature: 1.0 → 0.5".to_owned()];
        let aside = |n: u32| directory.path().join(format!("out.jsonl.partial.{n}"));
        let (mut third, found) = Partial::open(&output, &with(0.5)).unwrap();
        assert_eq!(found, Found::Other { differences, moved_to: Some(aside(1)) });
        assert!(third.done().is_empty());
        assert!(Partial::open(&output, &with(0.5)).unwrap_err().to_string().contains("another process"));
        third.add([(0, "{}".to_owned())]).unwrap();
        drop(third);
        let (fourth, found) = Partial::open(&output, &with(1.0)).unwrap();
        assert!(
            matches!(&found, Found::Other { moved_to: Some(path), .. } if *path == aside(2)),
            "{found:?}"
        );
        assert_eq!(std::fs::read_to_string(aside(1)).unwrap(), finished);
        assert!(std::fs::read_to_string(aside(2)).unwrap().ends_with("\n0 {}\n"));
        drop(fourth);
        // Without finished rows, no copy is kept.
        let (fifth, found) = Partial::open(&output, &with(0.5)).unwrap();
        assert!(matches!(&found, Found::Other { moved_to: None, .. }), "{found:?}");
        fifth.remove().unwrap();
        assert!(!path.exists() && !aside(3).exists());
    }
}
