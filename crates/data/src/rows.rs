//! Rows of an annotation file: an index of byte offsets, which allows random access to files larger than memory.
//!
//! The first character distinguishes JSON lines from a JSON array. Opening a file only parses its outer structure: quotes and
//! brackets of an array, or ends of lines. An error inside a row is reported when that row is read. The file is read, not mapped,
//! so a file that shrinks while in use causes an error and not a crash. Each row's bytes are hashed when the file is opened and
//! compared whenever the row is read. Content that overwrites the file is therefore never used as a row.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::error::{DataError, RowProblem, shorten};
use crate::formats::outputs::{self, RolloutLine};

/// Maximum size of a row, bytes.
pub(crate) const MAX_ROW_BYTES: u32 = 64 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

pub(crate) struct RowFile {
    pub(crate) path: Arc<Path>,
    file: Mutex<File>,
    rows: Vec<RowSpan>,
    /// Hash of each row's bytes at the time the file was opened.
    hashes: Vec<u64>,
    /// Line of the first changed row that was detected.
    changed: OnceLock<u64>,
    /// True if the rows came through a pipe.
    piped: bool,
    /// True for a rollout log, in which each row spans several lines.
    is_rollouts: bool,
    /// True if the path is that of the folder whose media are the rows.
    is_folder: bool,
}

/// Reports whether the file is a pipe, such as standard input or `<(…)` of a shell.
fn is_pipe(metadata: &std::fs::Metadata) -> bool {
    #[cfg(unix)]
    return std::os::unix::fs::FileTypeExt::is_fifo(&metadata.file_type());
    #[cfg(not(unix))]
    return false;
}

/// Copies a pipe into an unnamed file, because rows are read in any order.
fn spooled(mut pipe: File) -> std::io::Result<File> {
    let mut file = tempfile::tempfile()?;
    std::io::copy(&mut pipe, &mut file)?;
    file.rewind()?;
    Ok(file)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowSpan {
    offset: u64,
    /// Length of the row, bytes; `u32::MAX` for a row above the limit.
    len_bytes: u32,
    line: u32,
}

/// Returns the first 64 bits of the SHA-256 of a row.
fn hash(row: &[u8]) -> u64 {
    let digest: [u8; 32] = Sha256::digest(row).into();
    digest.iter().take(8).fold(0, |hash, &byte| hash << 8 | u64::from(byte))
}

impl RowSpan {
    fn new(offset: u64, end: u64, line: u64) -> Self {
        let len_bytes =
            u32::try_from(end - offset).ok().filter(|&len| len <= MAX_ROW_BYTES).unwrap_or(u32::MAX);
        Self { offset, len_bytes, line: u32::try_from(line).unwrap_or(u32::MAX) }
    }
}

impl RowFile {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let mut file = File::open(path).map_err(DataError::io("open", path))?;
        let metadata = file.metadata().map_err(DataError::io("open", path))?;
        let piped = is_pipe(&metadata);
        if piped {
            file = spooled(file).map_err(DataError::io("store the rows of", path))?;
        } else if !metadata.is_file() {
            let got = "neither a regular file nor a pipe".to_owned();
            return Err(DataError::UnknownFile { path: path.to_owned(), got });
        }
        Self::indexed(file, path, piped)
    }

    /// Stores rows that do not come from a file in an unnamed file. Messages refer to it as `path`.
    pub(crate) fn of(rows: impl IntoIterator<Item = Value>, path: &Path) -> Result<Self, DataError> {
        let keep = || -> std::io::Result<File> {
            let mut file = BufWriter::new(tempfile::tempfile()?);
            for row in rows {
                serde_json::to_writer(&mut file, &row)?;
                file.write_all(b"\n")?;
            }
            let mut file = file.into_inner()?;
            file.rewind()?;
            Ok(file)
        };
        let file = keep().map_err(DataError::io("store the rows of", path))?;
        Self::indexed(file, path, true)
    }

    fn indexed(file: File, path: &Path, piped: bool) -> Result<Self, DataError> {
        let mut reader = BufReader::with_capacity(1 << 20, file);
        let rows = index(&mut reader, path)?;
        let file = Mutex::new(reader.into_inner());
        let (hashes, changed) = (Vec::new(), OnceLock::new());
        let mut this = Self {
            path: path.into(),
            file,
            rows,
            hashes,
            changed,
            piped,
            is_rollouts: false,
            is_folder: false,
        };
        if this.rollout_line(0).is_some() {
            this.join_rollouts();
        }
        this.hashes = this.hashed().map_err(DataError::io("read", path))?;
        Ok(this)
    }

    /// Hashes the rows, in one pass over the file.
    fn hashed(&self) -> std::io::Result<Vec<u64>> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.rewind()?;
        let mut reader = BufReader::with_capacity(1 << 20, &mut *file);
        let (mut hashes, mut at, mut bytes) = (Vec::with_capacity(self.rows.len()), 0, Vec::new());
        for span in &self.rows {
            // A row above the limit is never read.
            let len_bytes = if span.len_bytes == u32::MAX { 0 } else { span.len_bytes };
            let gap = i64::try_from(span.offset.saturating_sub(at)).unwrap_or(i64::MAX);
            reader.seek_relative(gap)?;
            bytes.resize(len_bytes as usize, 0);
            reader.read_exact(&mut bytes)?;
            hashes.push(hash(&bytes));
            at = span.offset + u64::from(len_bytes);
        }
        Ok(hashes)
    }

    fn rollout_line(&self, row: u64) -> Option<RolloutLine> {
        serde_json::from_slice(&self.bytes(self.rows.get(row as usize)?).ok()?).ok()
    }

    /// Joins the lines of each prompt into one row. An unreadable line counts as part of the preceding prompt, which then becomes
    /// unusable as a whole.
    fn join_rollouts(&mut self) {
        let mut joined: Vec<RowSpan> = Vec::new();
        for (row, span) in self.rows.iter().enumerate() {
            let begins = self.rollout_line(row as u64).is_some_and(|line| line.sample == 0);
            match joined.last_mut() {
                Some(last) if !begins => {
                    let end = span.offset.saturating_add(u64::from(span.len_bytes));
                    *last = RowSpan::new(last.offset, end, u64::from(last.line));
                }
                _ => joined.push(*span),
            }
        }
        (self.rows, self.is_rollouts) = (joined, true);
    }

    /// Returns a row as JSON.
    pub(crate) fn value(&self, row: u64) -> Result<Value, RowProblem> {
        let bytes = self.read(row)?;
        if self.is_rollouts {
            return outputs::joined(&bytes);
        }
        serde_json::from_slice(&bytes).map_err(|error| match no_number(&bytes, &error) {
            Some(word) => RowProblem::NoNumber { word },
            None => error.into(),
        })
    }

    /// Returns the same rows under the name of their original file. Line numbers then count rows of the original file.
    #[must_use]
    pub(crate) fn named(self, path: &Path) -> Self {
        Self { path: path.into(), ..self }
    }

    /// Returns the rows of a table, which begin at these lines of its file.
    #[must_use]
    pub(crate) fn of_lines(mut self, lines: &[u64]) -> Self {
        for (row, line) in self.rows.iter_mut().zip(lines) {
            row.line = u32::try_from(*line).unwrap_or(u32::MAX);
        }
        Self { piped: false, ..self }
    }

    /// Returns the rows of the media of the folder whose path they have.
    #[must_use]
    pub(crate) fn in_folder(self) -> Self {
        Self { piped: false, is_folder: true, ..self }
    }

    /// Returns the folder against which relative paths of the rows are resolved.
    pub(crate) fn folder(&self) -> &Path {
        if self.is_folder {
            return &self.path;
        }
        match self.path.parent() {
            Some(folder) if folder != Path::new("") && !self.piped => folder,
            _ => Path::new("."),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.rows.len() as u64
    }

    /// Returns the line of the row's first character, from 1.
    pub(crate) fn line(&self, row: u64) -> u64 {
        self.rows.get(row as usize).map_or(0, |span| u64::from(span.line))
    }

    /// Passes the file's bytes to `sink`, piece by piece. It also works for rows from a pipe.
    pub(crate) fn feed(&self, sink: &mut impl FnMut(&[u8])) -> Result<(), DataError> {
        let io = || DataError::io("read", &self.path);
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.rewind().map_err(io())?;
        let mut reader = BufReader::with_capacity(1 << 20, &mut *file);
        loop {
            let bytes = reader.fill_buf().map_err(io())?;
            if bytes.is_empty() {
                return Ok(());
            }
            let num_bytes = bytes.len();
            sink(bytes);
            reader.consume(num_bytes);
        }
    }

    pub(crate) fn read(&self, row: u64) -> Result<Vec<u8>, RowProblem> {
        let Some(span) = self.rows.get(row as usize) else {
            return Err(RowProblem::OutOfRange { len: self.len() });
        };
        if span.len_bytes == u32::MAX {
            return Err(RowProblem::TooLong { limit_bytes: MAX_ROW_BYTES });
        }
        let was = self.hashes.get(row as usize);
        let unchanged = match self.bytes(span) {
            Ok(bytes) => Some(bytes).filter(|bytes| was == Some(&hash(bytes))),
            // The file is shorter than when it was opened.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => None,
            Err(error) => return Err(error.into()),
        };
        unchanged.ok_or_else(|| {
            self.changed.get_or_init(|| u64::from(span.line));
            RowProblem::Changed
        })
    }

    fn bytes(&self, span: &RowSpan) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; span.len_bytes as usize];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(span.offset))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Returns an error if any thread found a row that differs from its content when the file was opened.
    pub(crate) fn unchanged(&self) -> Result<(), DataError> {
        match self.changed.get() {
            Some(&line) => Err(DataError::Changed { path: self.path.to_path_buf(), line }),
            None => Ok(()),
        }
    }
}

/// Returns the word in place of a number at which the parser of a row failed.
fn no_number(row: &[u8], error: &serde_json::Error) -> Option<&'static str> {
    let line = row.split(|&byte| byte == b'\n').nth(error.line().checked_sub(1)?)?;
    // The parser stops at the first or the second byte of the word.
    let places = error.column().saturating_sub(2)..=error.column();
    let mut starts = places.filter_map(|at| line.get(at..));
    starts.find_map(|rest| {
        ["NaN", "Infinity", "-Infinity"].into_iter().find(|word| rest.starts_with(word.as_bytes()))
    })
}

fn index(reader: &mut BufReader<File>, path: &Path) -> Result<Vec<RowSpan>, DataError> {
    let io = || DataError::io("read", path);
    let mut offset = 0;
    if reader.fill_buf().map_err(io())?.starts_with(BYTE_ORDER_MARK) {
        reader.consume(BYTE_ORDER_MARK.len());
        offset = BYTE_ORDER_MARK.len() as u64;
    }
    let mut line = 1;
    loop {
        let Some(&byte) = reader.fill_buf().map_err(io())?.first() else { return Ok(Vec::new()) };
        match byte {
            b'{' => return index_lines(reader, path, offset, line),
            b'[' => return index_array(reader, path, offset, line),
            b'\n' => line += 1,
            b' ' | b'\t' | b'\r' => {}
            _ => {
                let start = String::from_utf8_lossy(reader.buffer().get(..40).unwrap_or(reader.buffer()))
                    .into_owned();
                let got = format!("content that begins with {start:?}");
                return Err(DataError::UnknownFile { path: path.to_owned(), got });
            }
        }
        reader.consume(1);
        offset += 1;
    }
}

fn index_lines(
    reader: &mut BufReader<File>,
    path: &Path,
    mut offset: u64,
    mut line: u64,
) -> Result<Vec<RowSpan>, DataError> {
    let mut rows = Vec::new();
    let (mut start, mut blank) = (offset, true);
    loop {
        let buffer = reader.fill_buf().map_err(DataError::io("read", path))?;
        let num_bytes = buffer.len();
        for piece in buffer.split_inclusive(|&byte| byte == b'\n') {
            blank = blank && piece.iter().all(u8::is_ascii_whitespace);
            offset += piece.len() as u64;
            if piece.ends_with(b"\n") {
                if !blank {
                    rows.push(RowSpan::new(start, offset - 1, line));
                }
                (start, blank) = (offset, true);
                line += 1;
            }
        }
        if num_bytes == 0 {
            if !blank {
                rows.push(RowSpan::new(start, offset, line));
            }
            break;
        }
        reader.consume(num_bytes);
    }
    refuse_spread_objects(reader, path, &rows)?;
    Ok(rows)
}

/// Rejects JSON objects that span several lines, since each line would be a bad row. If the first line is only part of an object
/// and the second line begins no row, the error is in the file, not in its rows.
fn refuse_spread_objects(
    reader: &mut BufReader<File>,
    path: &Path,
    rows: &[RowSpan],
) -> Result<(), DataError> {
    let mut read = |span: &RowSpan| -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; span.len_bytes as usize];
        reader.seek(SeekFrom::Start(span.offset)).map_err(DataError::io("read", path))?;
        reader.read_exact(&mut bytes).map_err(DataError::io("read", path))?;
        Ok(bytes)
    };
    let [first, second, ..] = rows else { return Ok(()) };
    if first.len_bytes > MAX_ROW_BYTES || second.len_bytes > MAX_ROW_BYTES {
        return Ok(());
    }
    let is_open =
        serde_json::from_slice::<serde::de::IgnoredAny>(&read(first)?).is_err_and(|error| error.is_eof());
    match is_open && !read(second)?.trim_ascii_start().starts_with(b"{") {
        true => Err(DataError::Syntax {
            path: path.to_owned(),
            line: u64::from(first.line),
            problem: "got JSON objects over several lines each, expected one object per line, or an array of rows; `jq -c .` \
                      writes each object on one line"
                .to_owned(),
        }),
        false => Ok(()),
    }
}

/// Indexes the rows of a JSON array. An element that is itself an array is a pack of qwen-vl-finetune's `pack_data.py`, whose
/// rows are trained as one sequence there. Each row of a pack becomes a separate row here.
fn index_array(
    reader: &mut BufReader<File>,
    path: &Path,
    offset: u64,
    line: u64,
) -> Result<Vec<RowSpan>, DataError> {
    let mut index = ArrayIndex { offset, line, between: 1, ..ArrayIndex::default() };
    let syntax =
        |line, problem: &str| DataError::Syntax { path: path.to_owned(), line, problem: problem.to_owned() };
    loop {
        let buffer = reader.fill_buf().map_err(DataError::io("read", path))?;
        let num_bytes = buffer.len();
        if num_bytes == 0 {
            break;
        }
        for &byte in buffer {
            index.add(byte).map_err(|problem| syntax(index.line, problem))?;
        }
        reader.consume(num_bytes);
    }
    if !index.done {
        let last = index.rows.len();
        return Err(syntax(
            index.line,
            &shorten(&format!(
                "the array has no end: got {last} complete rows, expected `]` after them; is the file truncated?"
            )),
        ));
    }
    Ok(index.rows)
}

/// State of [`index_array`] between two bytes.
#[derive(Default)]
struct ArrayIndex {
    rows: Vec<RowSpan>,
    offset: u64,
    line: u64,
    depth: u64,
    /// Nesting depth between rows: 1, or 2 inside a pack.
    between: u64,
    in_string: bool,
    escaped: bool,
    /// Start and line of the current element.
    element: Option<(u64, u64)>,
    /// End of the current element so far.
    end: u64,
    after_comma: bool,
    after_pack: bool,
    done: bool,
}

impl ArrayIndex {
    /// Reads the next byte. An error is the problem.
    fn add(&mut self, byte: u8) -> Result<(), &'static str> {
        let at = self.offset;
        self.offset += 1;
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                b'\n' => self.line += 1,
                _ => {}
            }
            self.end = self.offset;
            return Ok(());
        }
        match byte {
            b'\n' => self.line += 1,
            b' ' | b'\t' | b'\r' => {}
            _ if self.done => {
                return Err("got content after the array's closing `]`, expected the end of the file");
            }
            b'[' if self.depth == 0 => self.depth = 1,
            b'[' if self.depth == 1 && self.between == 1 && self.element.is_none() && !self.after_pack => {
                (self.depth, self.between, self.after_comma) = (2, 2, true);
            }
            b',' | b']' if self.depth == self.between => return self.end_element(byte),
            _ if self.after_pack => return Err("got content after a packed list, expected `,` or `]`"),
            b'}' if self.depth == self.between => {
                return Err("got `}` without its `{`; is a row's bracket missing?");
            }
            _ => {
                match byte {
                    b'"' => self.in_string = true,
                    b'[' | b'{' => self.depth += 1,
                    b']' | b'}' => self.depth -= 1,
                    _ => {}
                }
                // An element starts here. The opening bracket has already raised the depth.
                self.element.get_or_insert((at, self.line));
                self.end = self.offset;
            }
        }
        Ok(())
    }

    /// Ends an element, if there is one, at a comma or at the end of the array or of a pack.
    fn end_element(&mut self, byte: u8) -> Result<(), &'static str> {
        match self.element.take() {
            Some((start, start_line)) => self.rows.push(RowSpan::new(start, self.end, start_line)),
            None if self.after_pack || byte == b']' && !self.after_comma => {}
            None => {
                return Err(
                    "got an empty element in the array, expected a row before each `,` and after the last one",
                );
            }
        }
        self.after_comma = byte == b',';
        self.after_pack = byte == b']' && self.between == 2;
        if self.after_pack {
            (self.depth, self.between) = (1, 1);
        } else {
            self.done = byte == b']';
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(name: &str, content: &[u8]) -> Result<RowFile, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        RowFile::open(&path)
    }

    fn rows(name: &str, content: &str) -> Vec<(u64, String)> {
        let file = open(name, content.as_bytes()).unwrap();
        (0..file.len())
            .map(|row| (file.line(row), String::from_utf8(file.read(row).unwrap()).unwrap()))
            .collect()
    }

    fn owned(rows: &[(u64, &str)]) -> Vec<(u64, String)> {
        rows.iter().map(|(line, text)| (*line, (*text).to_owned())).collect()
    }

    #[test]
    fn lines_with_blanks_carriage_returns_and_no_final_newline() {
        let got = rows("a.jsonl", "\n {\"a\":1}\r\n\n  \n{\"b\":\"x\"}\nnot json\n{\"c\":2}");
        let expected = [(2, "{\"a\":1}\r"), (5, "{\"b\":\"x\"}"), (6, "not json"), (7, "{\"c\":2}")];
        assert_eq!(got, owned(&expected));
    }

    #[test]
    fn array_elements_keep_brackets_commas_and_quotes_inside() {
        let text = "\u{feff}[ {\"a\": \"],\\\"}\"},\n\n{\"b\": [1, {\"c\": []}]}\n , 7 ]\n";
        let expected = [(1, "{\"a\": \"],\\\"}\"}"), (3, "{\"b\": [1, {\"c\": []}]}"), (4, "7")];
        assert_eq!(rows("a.json", text), owned(&expected));
        assert_eq!(rows("a.json", "[]"), []);
        assert_eq!(rows("a.json", ""), []);
        assert_eq!(rows("a.json", "{\"a\":1}\n{\"a\":2}").len(), 2);
    }

    #[test]
    fn each_row_of_a_packed_list_is_a_row() {
        let text = "[[{\"a\": [1, 2]}, {\"b\": \"]\"}],\n [{\"c\": {}}] , {\"d\": 1}, [\n[], 7]]";
        let expected = [
            (1, "{\"a\": [1, 2]}"),
            (1, "{\"b\": \"]\"}"),
            (2, "{\"c\": {}}"),
            (2, "{\"d\": 1}"),
            (3, "[]"),
            (3, "7"),
        ];
        assert_eq!(rows("rows_pack.json", text), owned(&expected));
    }

    #[test]
    fn broken_frames_name_the_line() {
        let cases = [
            ("[{\"a\":1},\n{\"b\":", 2, "has no end"),
            ("[{},\n,{}]", 2, "empty element"),
            ("[{},]", 1, "empty element"),
            ("[{}}]", 1, "without its"),
            ("[[{}],\n[]]", 2, "empty element"),
            ("[[{},]]", 1, "empty element"),
            ("[[{}] {}]", 1, "after a packed list"),
            ("[[{}]\n[{}]]", 2, "after a packed list"),
            ("[[{}}]]", 1, "without its"),
            ("[[{}]", 1, "has no end"),
            ("[{}]\n[{}]", 2, "after the array"),
            ("{\n\"a\": 1}", 1, "several lines"),
        ];
        for (text, expected_line, expected) in cases {
            match open("a.json", text.as_bytes()) {
                Err(DataError::Syntax { line, problem, .. }) => {
                    assert_eq!(line, expected_line, "{text}");
                    assert!(problem.contains(expected), "{text}: {problem}");
                }
                other => panic!("{text}: {:?}", other.map(|file| file.len())),
            }
        }
        assert!(matches!(open("a.json", b"PAR1"), Err(DataError::UnknownFile { .. })));
        assert!(matches!(RowFile::open(Path::new("/nonexistent.json")), Err(DataError::Io { .. })));
        assert!(matches!(
            RowFile::open(Path::new("/")),
            Err(DataError::UnknownFile { .. } | DataError::Io { .. })
        ));
    }

    #[test]
    fn a_row_beyond_the_limit_costs_that_row() {
        let span = RowSpan::new(5, 5 + u64::from(MAX_ROW_BYTES) + 1, 3);
        assert_eq!(span.len_bytes, u32::MAX);
        assert_eq!(RowSpan::new(5, 5 + u64::from(MAX_ROW_BYTES), 3).len_bytes, MAX_ROW_BYTES);
    }

    #[test]
    fn a_file_that_is_written_to_gives_no_row_but_those_it_had() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text, changed) in [
            ("a.jsonl", "{\"a\":1}\n\n{\"b\":1}\n", "{\"a\":1}\n\n{\"b\":2}\n"),
            ("b.json", "[{\"a\":1},\n\n{\"b\":1} ]", "[{\"a\":1},\n\n{\"b\":2} ]"),
            // The file is truncated.
            ("c.jsonl", "{\"a\":1}\n\n{\"b\":1}\n", "{\"a\":1}\n"),
            // The rows after the removed part have moved.
            ("d.jsonl", "{\"a\":1}\n\n{\"b\":1}\n", "{\"a\":1}\n{\"b\":1}\n"),
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            let file = RowFile::open(&path).unwrap();
            assert_eq!(file.read(1).unwrap(), b"{\"b\":1}");
            std::fs::write(&path, changed).unwrap();
            assert!(file.read(0).is_ok() && file.unchanged().is_ok(), "{name}");
            assert!(matches!(file.read(1), Err(RowProblem::Changed)), "{name}");
            let told = file.unchanged().unwrap_err().to_string();
            assert!(told.contains(&format!("{name}:3: the row has changed")), "{told}");
            // Restoring the text restores the rows, but the detected change stays recorded.
            std::fs::write(&path, text).unwrap();
            assert!(file.read(1).is_ok() && file.unchanged().is_err(), "{name}");
        }
    }

    #[test]
    fn ten_megabytes_index_quickly() {
        let row = format!("{{\"id\": 1, \"text\": \"{}\"}}", "x".repeat(1000));
        let lines = format!("{row}\n").repeat(10_000);
        let array = format!("[{}{row}]", format!("{row},\n").repeat(9_999));
        for (name, text) in [("a.jsonl", lines), ("a.json", array)] {
            let started = std::time::Instant::now();
            let file = open(name, text.as_bytes()).unwrap();
            let secs = started.elapsed().as_secs_f64();
            assert_eq!(file.len(), 10_000);
            // The limit is two orders of magnitude above the usual time, so only quadratic behaviour fails on a busy machine.
            assert!(secs < 5.0, "{name}: {secs} s");
            assert_eq!(file.read(9_999).unwrap(), row.as_bytes());
        }
    }
}
