//! Tables of text and folders of media as rows.
//!
//! - A file `.csv` or `.tsv`: the first line has the names of the columns. A column whose cells are all numbers has numbers, any other has
//!   texts, and an empty cell is missing. Quotes and line ends within them are those of RFC 4180.
//! - A folder with `metadata.csv`, `metadata.jsonl` or `metadata.parquet`, and a folder of pictures, clips or sounds with a subfolder for
//!   each class, as `imagefolder` of `datasets` 5.2 reads them (`packaged_modules/folder_based_builder`). The label is the name of the
//!   class, where `datasets` has its number.
//!
//! Unlike pandas, texts such as `NA`, `None` and `nan` stay texts, whole numbers stay whole beside empty cells, and the separator of a file
//! `.csv` may also be a semicolon or a tab, as spreadsheets write it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use serde_json::{Map, Number, Value};

use crate::error::DataError;
use crate::formats::kind_of_extension;
use crate::rows::{MAX_ROW_BYTES, RowFile};

/// Largest number of folders within each other that are searched.
const MAX_DEPTH: usize = 8;
/// Largest number of columns of a table.
const MAX_COLUMNS: usize = 10_000;
/// Longest row of names of columns, in bytes.
const MAX_HEADER_BYTES: u64 = 1 << 20;

/// Names of the files with a row for each medium of a folder.
const METADATA: [&str; 3] = ["metadata.csv", "metadata.jsonl", "metadata.parquet"];

/// Names of the splits of `datasets`, each with the words that stand for it in names of folders.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Returns true if a file says by its name that its rows name media by `file_name`.
pub(crate) fn is_metadata(path: &Path) -> bool {
    path.file_name().is_some_and(|name| METADATA.iter().any(|own| name == *own))
}

/// Returns true if a file says by its name that it has rows.
fn is_table(path: &Path) -> bool {
    let extension = path.extension().and_then(|own| own.to_str()).map(str::to_lowercase);
    extension.is_some_and(|own| ["csv", "tsv", "json", "jsonl"].contains(&own.as_str()))
}

/// Gives the columns `file_name`, `NAME_file_name`, `file_names` and `NAME_file_names` of a row the names that they have in `datasets`,
/// unless the row has a column of that name.
pub(crate) fn rename_files(row: Map<String, Value>) -> Map<String, Value> {
    let renamed = |name: &str, value: &Value| -> Option<String> {
        let (end, whole) = match value {
            Value::String(_) => ("file_name", "image"),
            Value::Array(_) => ("file_names", "images"),
            _ => return None,
        };
        let start = name.strip_suffix(end)?;
        match start.strip_suffix('_') {
            _ if start.is_empty() => Some(column_of(value).unwrap_or(whole).to_owned()),
            Some(start) if !start.is_empty() => Some(start.to_owned()),
            _ => None,
        }
    };
    let own: BTreeSet<String> = row.keys().cloned().collect();
    let rename = |(name, value): (String, Value)| {
        let renamed = renamed(&name, &value).filter(|renamed| !own.contains(renamed));
        (renamed.unwrap_or(name), value)
    };
    row.into_iter().map(rename).collect()
}

/// Returns the column for the medium of a path: in `audiofolder` and `videofolder`, it has the name of the kind.
fn column_of(value: &Value) -> Option<&'static str> {
    use omnigrpo_text::MediumKind::{Audio, Image, Video};
    let (path, plural) = match value {
        Value::String(path) => (path.as_str(), false),
        Value::Array(all) => (all.first()?.as_str()?, true),
        _ => return None,
    };
    Some(match (kind_of_extension(Path::new(path).extension()?.to_str()?)?, plural) {
        (Image, false) => "image",
        (Image, true) => "images",
        (Video, false) => "video",
        (Video, true) => "videos",
        (Audio, false) => "audio",
        (Audio, true) => "audios",
    })
}

/// Reads a table of text; `None` if the name of the file is not that of one.
pub(crate) fn open(path: &Path) -> Result<Option<RowFile>, DataError> {
    let extension = path.extension().map(|own| own.to_string_lossy().to_lowercase());
    let table = match extension.as_deref() {
        Some("csv") => Table::new(path, None)?,
        Some("tsv") => Table::new(path, Some(b'\t'))?,
        _ => return Ok(None),
    };
    table.check()?;
    let header = table.header()?;
    let numbers = table.numbers(&header)?;
    let (mut lines, mut failure) = (Vec::new(), None);
    let mut reader = table.rows()?;
    let rows = std::iter::from_fn(|| {
        let (line, cells) = table.next(&mut reader).map_err(|error| failure = Some(error)).ok()??;
        lines.push(line);
        let cells = header.iter().zip(&numbers).zip(cells).filter(|(_, cell)| !cell.is_empty());
        let value = |is_number: bool, cell: String| match number(&cell).filter(|_| is_number) {
            Some(number) => Value::Number(number),
            None => cell.into(),
        };
        let row = cells.map(|((name, is_number), cell)| (name.clone(), value(*is_number, cell)));
        Some(Value::Object(row.collect()))
    });
    let file = RowFile::of(rows, path)?;
    failure.map_or(Ok(()), Err)?;
    Ok(Some(file.of_lines(&lines)))
}

/// A file of text with rows of cells.
struct Table<'a> {
    path: &'a Path,
    separator: u8,
    /// True if lines end with a carriage return. The reader counts its line feed to the next line.
    has_returns: bool,
}

impl<'a> Table<'a> {
    /// Looks at the first line of a table. Without a given one, the separator is that which occurs most often in it, outside of quotes.
    fn new(path: &'a Path, separator: Option<u8>) -> Result<Self, DataError> {
        let mut line = Vec::new();
        let file = File::open(path).map_err(DataError::io("open", path))?;
        if !file.metadata().is_ok_and(|found| found.is_file()) {
            let got = "a table that is no regular file".to_owned();
            return Err(DataError::UnknownFile { path: path.to_owned(), got });
        }
        let read = BufReader::new(std::io::Read::take(file, MAX_HEADER_BYTES)).read_until(b'\n', &mut line);
        read.map_err(DataError::io("read", path))?;
        let has_returns = line.ends_with(b"\r\n");
        // The last of equal ones wins.
        let mut counts = [(b'\t', 0), (b';', 0), (b',', 0)];
        let mut is_quoted = false;
        for byte in line {
            is_quoted ^= byte == b'"';
            let own = counts.iter_mut().filter(|(own, _)| !is_quoted && *own == byte);
            own.for_each(|(_, count)| *count += 1);
        }
        let found = counts.into_iter().max_by_key(|(_, count)| *count).map_or(b',', |(own, _)| own);
        Ok(Self { path, separator: separator.unwrap_or(found), has_returns })
    }

    fn reader(&self) -> Result<csv::Reader<File>, DataError> {
        let file = File::open(self.path).map_err(DataError::io("open", self.path))?;
        Ok(csv::ReaderBuilder::new().delimiter(self.separator).has_headers(false).from_reader(file))
    }

    /// Returns a reader that has passed the names of the columns.
    fn rows(&self) -> Result<csv::Reader<File>, DataError> {
        let mut reader = self.reader()?;
        self.next(&mut reader)?;
        Ok(reader)
    }

    /// Returns the next row with its line; `None` at the end.
    fn next(&self, reader: &mut csv::Reader<File>) -> Result<Option<(u64, Vec<String>)>, DataError> {
        let mut record = csv::ByteRecord::new();
        if !reader.read_byte_record(&mut record).map_err(|error| self.failed(&error))? {
            return Ok(None);
        }
        let line = self.line(record.position());
        let cells = record.iter().map(|cell| String::from_utf8(cell.to_vec())).collect::<Result<_, _>>();
        let cells = cells.map_err(|_| {
            self.wrong(
                line,
                "the row is no UTF-8; save the table as UTF-8, or run: iconv -f WINDOWS-1252 -t UTF-8",
            )
        })?;
        Ok(Some((line, cells)))
    }

    /// Checks that quotes are closed and that no row is too long, before a row is held in memory. The states are those of the reader.
    fn check(&self) -> Result<(), DataError> {
        enum At {
            Start,
            Cell,
            Quoted,
            Quote,
        }
        let file = File::open(self.path).map_err(DataError::io("open", self.path))?;
        let (mut reader, mut at, mut line) = (BufReader::with_capacity(1 << 16, file), At::Start, 1);
        // Line and length of the row, and the line where the last quote opened.
        let (mut row, mut row_bytes, mut opened) = (1, 0, 1);
        loop {
            let bytes = reader.fill_buf().map_err(DataError::io("read", self.path))?;
            if bytes.is_empty() {
                break;
            }
            for &byte in bytes {
                let ends_line = byte == b'\n' || byte == b'\r';
                row_bytes += 1;
                line += u64::from(byte == b'\n');
                at = match (at, byte) {
                    (At::Start, b'"') => {
                        opened = line;
                        At::Quoted
                    }
                    (At::Quoted, b'"') => At::Quote,
                    (At::Quoted, _) | (At::Quote, b'"') => At::Quoted,
                    (_, byte) if byte == self.separator || ends_line => At::Start,
                    _ => At::Cell,
                };
                let limit = if row == 1 { MAX_HEADER_BYTES } else { MAX_ROW_BYTES.into() };
                if row_bytes > limit {
                    let what = match at {
                        At::Quoted => format!(
                            "a quote opens in line {opened} and closes nowhere in the next {limit} bytes; close it, or double it within a quoted cell"
                        ),
                        _ => format!("the row has more than {limit} bytes"),
                    };
                    return Err(self.wrong(row, &what));
                }
                if ends_line && !matches!(at, At::Quoted) {
                    (row, row_bytes) = (line, 0);
                }
            }
            let read = bytes.len();
            reader.consume(read);
        }
        match at {
            At::Quoted => {
                let what =
                    "a quote opens here and closes nowhere; close it, or double it within a quoted cell";
                Err(self.wrong(opened, what))
            }
            _ => Ok(()),
        }
    }

    fn line(&self, position: Option<&csv::Position>) -> u64 {
        position.map_or(1, csv::Position::line) + u64::from(self.has_returns)
    }

    /// Returns the names of the columns.
    fn header(&self) -> Result<Vec<String>, DataError> {
        let names = self.next(&mut self.reader()?)?.map(|(_, names)| names).unwrap_or_default();
        let names: Vec<String> =
            names.iter().map(|name| name.trim_start_matches('\u{feff}').trim().to_owned()).collect();
        let mut seen = BTreeSet::new();
        let twice = names.iter().find(|name| !seen.insert(*name));
        let problem = match twice {
            _ if names.len() > MAX_COLUMNS => format!("more than {MAX_COLUMNS} columns"),
            Some(name) if name.is_empty() => "two columns without a name".to_owned(),
            Some(name) => format!("two columns are called `{name}`"),
            None => return Ok(names),
        };
        Err(self.wrong(1, &format!("{problem}; expected a first line with a name for each column")))
    }

    /// Returns for each column whether all of its cells are numbers.
    fn numbers(&self, header: &[String]) -> Result<Vec<bool>, DataError> {
        let (mut all, mut any) = (vec![true; header.len()], vec![false; header.len()]);
        let mut reader = self.rows()?;
        while let Some((_, cells)) = self.next(&mut reader)? {
            for (at, cell) in cells.iter().enumerate().filter(|(_, cell)| !cell.is_empty()) {
                all[at] = all[at] && number(cell).is_some();
                any[at] = true;
            }
        }
        Ok(all.iter().zip(any).map(|(all, any)| *all && any).collect())
    }

    fn wrong(&self, line: u64, problem: &str) -> DataError {
        DataError::Syntax { path: self.path.to_owned(), line, problem: problem.to_owned() }
    }

    fn failed(&self, error: &csv::Error) -> DataError {
        let line = self.line(error.position());
        match error.kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                let separator = match self.separator {
                    b'\t' => "\\t".to_owned(),
                    own => char::from(own).to_string(),
                };
                let problem = format!(
                    "the row has another number of cells than the first line: got {len}, expected {expected_len}; put quotes \
                     around cells with a `{separator}` or a quote, and write a quote within them twice"
                );
                self.wrong(line, &problem)
            }
            csv::ErrorKind::Io(source) => {
                let source = std::io::Error::new(source.kind(), source.to_string());
                DataError::Io { action: "read", path: self.path.to_owned(), source }
            }
            _ => self.wrong(line, &error.to_string()),
        }
    }
}

/// Returns the number of a cell whose text is the same when it is written again, so that no digit of an answer is lost.
fn number(cell: &str) -> Option<Number> {
    let number: Number = serde_json::from_str(cell).ok()?;
    (number.to_string() == cell).then_some(number)
}

/// Files of rows of a folder with media.
#[derive(Debug, PartialEq, Eq)]
pub struct MediaFolder {
    /// Metadata files, or the folder itself, whose media are its rows.
    pub files: Vec<PathBuf>,
    /// Folders, media and metadata files that belong to no split, because other folders have names of splits.
    pub left_out: Vec<String>,
    /// Tables and files of rows in the folder itself, which are not read.
    pub unread: Vec<String>,
}

/// Returns the files of rows of a split of a folder on this machine. `None` if the folder has neither metadata files nor media.
///
/// # Errors
/// Returns an error if the folder has splits, and not this one, or if it has none and another one than `train` is asked for.
pub fn media_folder(folder: &Path, split: &str) -> Result<Option<MediaFolder>, DataError> {
    let mut found = Found::default();
    found.search(folder, Path::new(""), 0)?;
    if found.metadata.is_empty() && found.media.is_empty() {
        return Ok(None);
    }
    let mut folders: Vec<(&str, PathBuf)> = Vec::new();
    for name in &found.top {
        folders.extend(split_of(name).map(|split| (split, folder.join(name))));
    }
    let mut left_out = BTreeSet::new();
    if folders.is_empty() {
        folders.push(("train", folder.to_owned()));
    } else {
        let first = |path: &Path| Some(path.components().next()?.as_os_str().to_str()?.to_owned());
        let metadata = found.metadata.iter().filter_map(|path| path.strip_prefix(folder).ok());
        let paths = found.media.iter().map(PathBuf::as_path).chain(metadata);
        left_out.extend(paths.filter_map(first).filter(|name| split_of(name).is_none()));
    }
    let wanted = split_of(split).unwrap_or(split);
    let own: Vec<&PathBuf> =
        folders.iter().filter(|(name, _)| *name == wanted).map(|(_, path)| path).collect();
    if own.is_empty() {
        let known: BTreeSet<&str> = folders.iter().map(|(name, _)| *name).collect();
        return Err(DataError::unknown_name("split", split, known.iter().copied()));
    }
    let inside = |path: &&PathBuf| own.iter().any(|own| path.starts_with(own));
    let metadata: Vec<PathBuf> = found.metadata.iter().filter(inside).cloned().collect();
    let files = if metadata.is_empty() { own.into_iter().cloned().collect() } else { metadata };
    Ok(Some(MediaFolder { files, left_out: left_out.into_iter().collect(), unread: found.tables }))
}

/// Returns the split that the name of a folder stands for.
fn split_of(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase();
    let is_word = |word: &&&str| {
        let rest = name.strip_prefix(**word);
        rest.is_some_and(|rest| {
            rest.is_empty() || rest.starts_with(|c: char| "-._ ".contains(c) || c.is_ascii_digit())
        })
    };
    SPLITS.iter().find(|(_, words)| words.iter().any(|word| is_word(&word))).map(|(split, _)| *split)
}

/// Files of a folder and its subfolders, in order. Hidden ones are left out.
#[derive(Default)]
struct Found {
    metadata: Vec<PathBuf>,
    /// Paths within the folder.
    media: Vec<PathBuf>,
    /// Names of the subfolders.
    top: Vec<String>,
    /// Names of tables and files of rows in the folder itself.
    tables: Vec<String>,
}

impl Found {
    fn search(&mut self, folder: &Path, within: &Path, depth: usize) -> Result<(), DataError> {
        let here = folder.join(within);
        let failed = || DataError::io("read the folder", &here);
        let entries = fs::read_dir(&here).map_err(failed())?.collect::<Result<Vec<_>, _>>();
        let mut entries = entries.map_err(failed())?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let refused = |what: &str| {
                let source = std::io::Error::new(std::io::ErrorKind::Unsupported, what);
                DataError::Io { action: "read", path: entry.path(), source }
            };
            let name = entry.file_name();
            let Some(name) = name.to_str() else { return Err(refused("its name is no UTF-8; rename it")) };
            let kind = entry.file_type().map_err(failed())?;
            if name.starts_with('.') || name.starts_with("__") {
                continue;
            }
            let name = name.to_owned();
            let path = within.join(&name);
            if kind.is_symlink() && entry.path().is_dir() {
                return Err(refused("links to folders are not followed; move the folder here"));
            }
            if kind.is_dir() {
                if depth == MAX_DEPTH {
                    return Err(refused(&format!(
                        "it lies more than {MAX_DEPTH} folders deep; name a folder within it"
                    )));
                }
                if depth == 0 {
                    self.top.push(name);
                }
                self.search(folder, &path, depth + 1)?;
            } else if is_metadata(&path) {
                self.metadata.push(folder.join(path));
            } else if column_of(&Value::String(name)).is_some() {
                self.media.push(path);
            } else if depth == 0 && is_table(&path) {
                self.tables.extend(path.to_str().map(str::to_owned));
            }
        }
        Ok(())
    }
}

/// Reads a folder of media: a row for each, with its path as `id` and, if the folders at one depth have at least two names, the name of its
/// folder as `label`.
pub(crate) fn open_folder(folder: &Path) -> Result<RowFile, DataError> {
    let mut found = Found::default();
    found.search(folder, Path::new(""), 0)?;
    if found.media.is_empty() {
        let got = "a folder without pictures, clips or sounds".to_owned();
        return Err(DataError::UnknownFile { path: folder.to_owned(), got });
    }
    let class = |path: &PathBuf| path.parent()?.file_name()?.to_str().map(str::to_owned);
    let depths: BTreeSet<usize> = found.media.iter().map(|path| path.components().count()).collect();
    let classes: BTreeSet<Option<String>> = found.media.iter().map(class).collect();
    let has_labels = depths.len() == 1 && classes.len() > 1;
    let rows = found.media.iter().map(|path| {
        let text = path.to_string_lossy().replace('\\', "/");
        let column = column_of(&Value::String(text.clone())).unwrap_or("image");
        let mut row =
            Map::from_iter([("id".to_owned(), text.clone().into()), (column.to_owned(), text.into())]);
        if let Some(class) = class(path).filter(|_| has_labels) {
            row.insert("label".to_owned(), class.into());
        }
        Value::Object(row)
    });
    Ok(RowFile::of(rows, folder)?.in_folder())
}
