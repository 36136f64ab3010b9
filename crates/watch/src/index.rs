//! Line index of logs: the offset and a summary of each record, so that a file is never held in memory as a whole.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;
use crate::run::Run;
use crate::stamp::Stamp;

/// Longest line that is read, in bytes. Longer lines are skipped.
pub(crate) const MAX_LINE_BYTES: u64 = 32 << 20;
/// Largest number of lines read from a file. The rest is skipped.
const MAX_LINES: usize = 1 << 20;
/// Largest number of indices in the cache.
const KEPT: usize = 64;

/// Position and summary of a line.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Summary that is available without reading the line again.
    pub(crate) brief: T,
}

/// Knowledge about a run that grows with its files.
pub(crate) trait Followed: Default {
    /// Largest total size for all runs.
    const MOST: usize;

    fn size(&self) -> usize;

    /// Reads what is new, for a limited time.
    fn read(&mut self, run: &Run) -> Result<(), Error>;
}

/// Knowledge about the runs that were asked about most recently.
#[derive(Debug)]
pub(crate) struct Recent<T>(Mutex<VecDeque<(PathBuf, Arc<Mutex<T>>)>>);

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }
}

impl<T: Followed> Recent<T> {
    /// Calls `then` with the knowledge about a run, after reading what is new.
    pub(crate) fn with<R>(&self, run: &Run, then: impl FnOnce(&T) -> Result<R, Error>) -> Result<R, Error> {
        let own = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let at = all.iter().position(|(dir, _)| *dir == run.dir);
            let own = at.and_then(|at| all.remove(at)).unwrap_or_else(|| (run.dir.clone(), Arc::default()));
            all.push_back(own.clone());
            // One in use by another request counts as empty here. It is counted at the next request.
            let size = |own: &Arc<Mutex<T>>| own.try_lock().map_or(0, |own| own.size());
            let mut total: usize = all.iter().map(|(_, own)| size(own)).sum();
            while total > T::MOST && all.len() > 1 {
                total -= all.pop_front().map_or(0, |(_, own)| size(&own));
            }
            own.1
        };
        let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
        own.read(run)?;
        then(&own)
    }
}

/// Index of a file's lines.
pub(crate) type Index<T> = Arc<Vec<Entry<T>>>;

type Kept<T> = (PathBuf, Stamp, Index<T>);

/// Cache of indices for the most recently used files.
#[derive(Debug)]
pub(crate) struct Indices<T>(Mutex<VecDeque<Kept<T>>>);

impl<T> Default for Indices<T> {
    fn default() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }
}

impl<T> Indices<T> {
    /// Returns the index of the lines for which `brief` returns a summary.
    pub(crate) fn of(
        &self,
        run: &Run,
        path: &Path,
        brief: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Index<T>, Error> {
        let file = run.open(path)?;
        let stamp = Stamp::of(&file.metadata().map_err(Error::io("look at", path))?);
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., entries)) = kept().iter().find(|(own, at, _)| own == path && *at == stamp) {
            return Ok(Arc::clone(entries));
        }
        let mut entries = Vec::new();
        let mut lines = Lines::new(file);
        while let Some((offset, line)) = lines.next().map_err(Error::io("read", path))? {
            if let Some(brief) = brief(line) {
                entries.push(Entry { offset, bytes: line.len() as u64, brief });
            }
            if entries.len() == MAX_LINES {
                break;
            }
        }
        let entries = Arc::new(entries);
        let mut kept = kept();
        kept.retain(|(own, ..)| own != path);
        kept.push_back((path.to_owned(), stamp, Arc::clone(&entries)));
        let surplus = kept.len().saturating_sub(KEPT);
        kept.drain(..surplus);
        Ok(entries)
    }
}

/// Reads one line of a file.
pub(crate) fn line_at<T>(run: &Run, path: &Path, entry: &Entry<T>) -> Result<Vec<u8>, Error> {
    let mut file = run.open(path)?;
    file.seek(SeekFrom::Start(entry.offset)).map_err(Error::io("read", path))?;
    let mut line = Vec::new();
    file.take(entry.bytes.min(MAX_LINE_BYTES)).read_to_end(&mut line).map_err(Error::io("read", path))?;
    Ok(line)
}

/// Reader of the complete lines of a file, one at a time in a single buffer. A line without a newline is still being written and is
/// not returned.
pub(crate) struct Lines {
    reader: BufReader<File>,
    offset: u64,
    line: Vec<u8>,
}

impl Lines {
    pub(crate) fn new(file: File) -> Self {
        Self { reader: BufReader::with_capacity(1 << 16, file), offset: 0, line: Vec::new() }
    }

    /// Reads lines from an offset at which a line begins.
    pub(crate) fn from(file: File, offset: u64) -> std::io::Result<Self> {
        let mut lines = Self::new(file);
        lines.offset = lines.reader.seek(SeekFrom::Start(offset))?;
        Ok(lines)
    }

    /// Returns the offset and the bytes of the next line, without the newline.
    pub(crate) fn next(&mut self) -> std::io::Result<Option<(u64, &[u8])>> {
        loop {
            let start = self.offset;
            self.line.clear();
            let read = (&mut self.reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut self.line)?;
            self.offset += read as u64;
            if self.line.last() == Some(&b'\n') {
                self.line.pop();
                return Ok(Some((start, &self.line)));
            }
            if (read as u64) < MAX_LINE_BYTES {
                return Ok(None);
            }
            self.offset += self.reader.skip_until(b'\n')? as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(content: &[u8]) -> Vec<(u64, String)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log.jsonl");
        std::fs::write(&path, content).unwrap();
        let mut lines = Lines::new(File::open(&path).unwrap());
        let mut out = Vec::new();
        while let Some((offset, line)) = lines.next().unwrap() {
            out.push((offset, String::from_utf8_lossy(line).into_owned()));
        }
        out
    }

    #[test]
    fn lines_know_where_they_lie_and_a_torn_one_is_none() {
        let found = texts(b"one\n\nthree\nfo");
        assert_eq!(found, [(0, "one".into()), (4, String::new()), (5, "three".into())]);
        assert_eq!(texts(b""), []);
    }

    #[test]
    fn a_line_beyond_the_bound_is_passed_over() {
        let mut content = vec![b'x'; MAX_LINE_BYTES as usize + 5];
        content.extend(b"\nafter\n");
        assert_eq!(texts(&content), [(MAX_LINE_BYTES + 6, "after".to_owned())]);
    }

    #[test]
    fn an_index_is_made_anew_when_the_file_grows() {
        let directory = tempfile::tempdir().unwrap();
        let run = Run { dir: std::fs::canonicalize(directory.path()).unwrap() };
        let path = run.dir.join("log.jsonl");
        std::fs::write(&path, "1\nx\n3\n").unwrap();
        let indices = Indices::default();
        let number = |line: &[u8]| std::str::from_utf8(line).ok()?.parse::<u32>().ok();
        let first = indices.of(&run, &path, number).unwrap();
        assert_eq!(first.iter().map(|entry| entry.brief).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(line_at(&run, &path, &first[1]).unwrap(), b"3");
        assert!(Arc::ptr_eq(&first, &indices.of(&run, &path, number).unwrap()));
        std::fs::write(&path, "1\nx\n3\n4\n").unwrap();
        assert_eq!(indices.of(&run, &path, number).unwrap().len(), 3);
    }
}
