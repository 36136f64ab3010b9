//! Bounds on what a table unpacks to, before it is unpacked.
//!
//! A page says in its header how long it becomes, and the reader of the crate makes room for as much; one text of its
//! dictionary may stand a million times in one row, and the reader copies each. [`Bounded`] looks at every header before
//! the reader does, and [`Lengths`] adds up the texts of a row while they are still references.
//!
//! Refused: pages and rows beyond the limits, headers that name a field twice or in another order than every writer does, and
//! pages that become longer than they say.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::sync::{Arc, Mutex, PoisonError};

use ::parquet::basic::Compression;
use ::parquet::column::reader::ColumnReader;
use ::parquet::errors::{ParquetError, Result};
use ::parquet::file::metadata::RowGroupMetaData;
use ::parquet::file::reader::{ChunkReader, Length, RowGroupReader};
use bytes::Bytes;
use flate2::read::MultiGzDecoder;

/// How much of a table may be in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of unpacked pages, and of one row.
    pub(super) num_bytes: u64,
    /// Values of repeated columns in the pages that one row opens.
    pub(super) num_values: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { num_bytes: 1 << 30, num_values: 1 << 23 }
    }
}

/// Bytes of a page's header; statistics are the longest part of real ones.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Headers nest three deep.
const MAX_DEPTH: usize = 8;

fn refused(what: impl Into<String>) -> ParquetError {
    ParquetError::General(what.into())
}

/// The column chunk of a row group that is being read, and what of it is in memory.
#[derive(Debug)]
struct Chunk {
    start: u64,
    end: u64,
    repeated: bool,
    gzip: bool,
    dictionary_bytes: u64,
    page_bytes: u64,
}

#[derive(Debug, Default)]
struct Open {
    chunks: Vec<Chunk>,
    row_bytes: u64,
    row_values: u64,
}

/// What a reader has in memory; a handle.
#[derive(Debug, Clone)]
pub(super) struct Opened {
    open: Arc<Mutex<Open>>,
    limits: Limits,
}

impl Opened {
    /// Begins a row group.
    pub(super) fn row_group(&self, group: &RowGroupMetaData) -> Result<()> {
        let chunk = |column: &::parquet::file::metadata::ColumnChunkMetaData| {
            let (start, len) = column.byte_range();
            let end = start.checked_add(len).ok_or_else(|| refused("a column beyond the end of any file"))?;
            Ok(Chunk {
                start,
                end,
                repeated: column.column_descr().max_rep_level() > 0,
                gzip: matches!(column.compression(), Compression::GZIP(_)),
                dictionary_bytes: 0,
                page_bytes: 0,
            })
        };
        let chunks = group.columns().iter().map(chunk).collect::<Result<_>>()?;
        *self.lock() = Open { chunks, row_bytes: 0, row_values: 0 };
        Ok(())
    }

    /// Begins a row.
    pub(super) fn row(&self) {
        let mut open = self.lock();
        (open.row_bytes, open.row_values) = (0, 0);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the page whose header begins at `start`.
    fn page(&self, file: &File, start: u64) -> Result<()> {
        let mut open = self.lock();
        if open.chunks.is_empty() {
            // The table's own description is being read.
            return Ok(());
        }
        let Some(at) = open.chunks.iter().position(|c| (c.start..c.end).contains(&start)) else {
            return Err(refused("a page outside of its column"));
        };
        let mut input = Counted { inner: file.get_read(start)?.take(MAX_HEADER_BYTES), num_bytes: 0 };
        let header = Header::read(&mut input)?;
        let unpacked = header.unpacked_bytes.max(header.packed_bytes);
        let limits = self.limits;
        if unpacked > limits.num_bytes {
            return Err(too_large("a page becomes", unpacked, limits.num_bytes, "bytes"));
        }
        open.row_bytes += unpacked;
        let chunk = &mut open.chunks[at];
        match header.is_dictionary {
            true => chunk.dictionary_bytes = unpacked,
            false => chunk.page_bytes = unpacked,
        }
        let (repeated, gzip) = (chunk.repeated, chunk.gzip);
        if repeated {
            open.row_values += header.num_values;
        }
        let held: u64 = open.chunks.iter().map(|c| c.dictionary_bytes + c.page_bytes).sum();
        let num_bytes = held.max(open.row_bytes);
        if num_bytes > limits.num_bytes {
            return Err(too_large("the pages of a row become", num_bytes, limits.num_bytes, "bytes"));
        }
        if open.row_values > limits.num_values {
            return Err(too_large("the pages of a row hold", open.row_values, limits.num_values, "values"));
        }
        drop(open);
        // Of the compressions that are read, this one alone does not stop at the length that is said.
        if gzip && header.is_packed {
            let expected = header.unpacked_bytes.saturating_sub(header.plain_bytes);
            let mut body = file.try_clone()?;
            body.seek(SeekFrom::Start(start + input.num_bytes + header.plain_bytes))?;
            let packed = body.take(header.packed_bytes.saturating_sub(header.plain_bytes));
            let unpacked = MultiGzDecoder::new(packed).take(expected + 1);
            if io::copy(&mut { unpacked }, &mut io::sink())? > expected {
                return Err(refused(format!("a page becomes longer than the {expected} bytes it says")));
            }
        }
        Ok(())
    }
}

fn too_large(what: &str, got: u64, limit: u64, unit: &str) -> ParquetError {
    refused(format!("{what} {got} {unit} in memory, expected at most {limit}"))
}

/// A file whose pages are looked at before they are unpacked.
#[derive(Debug)]
pub(super) struct Bounded {
    file: File,
    opened: Opened,
}

impl Bounded {
    pub(super) fn new(file: File, limits: Limits) -> Self {
        Self { file, opened: Opened { open: Arc::default(), limits } }
    }

    pub(super) fn opened(&self) -> Opened {
        self.opened.clone()
    }
}

impl Length for Bounded {
    fn len(&self) -> u64 {
        self.file.len()
    }
}

impl ChunkReader for Bounded {
    type T = <File as ChunkReader>::T;

    // The reader comes here for headers of pages, and before that for the end of the file.
    fn get_read(&self, start: u64) -> Result<Self::T> {
        self.opened.page(&self.file, start)?;
        self.file.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        if (start.saturating_add(length as u64)) > self.file.len() {
            return Err(refused("a page or column beyond the end of the file"));
        }
        self.file.get_bytes(start, length)
    }
}

/// Sums of the lengths of a row's values, for columns where a value may stand in a row more than once.
pub(super) struct Lengths {
    columns: Vec<ColumnReader>,
    limit: u64,
}

impl Lengths {
    pub(super) fn of(group: &dyn RowGroupReader, limits: Limits) -> Result<Self> {
        let mut columns = Vec::new();
        for (i, column) in group.metadata().columns().iter().enumerate() {
            if column.column_descr().max_rep_level() == 0 {
                continue;
            }
            let reader = group.get_column_reader(i)?;
            if matches!(
                reader,
                ColumnReader::ByteArrayColumnReader(_) | ColumnReader::FixedLenByteArrayColumnReader(_)
            ) {
                columns.push(reader);
            }
        }
        Ok(Self { columns, limit: limits.num_bytes })
    }

    /// Looks at the next row.
    pub(super) fn check_row(&mut self) -> Result<()> {
        let (mut definitions, mut repetitions) = (Vec::new(), Vec::new());
        let mut num_bytes = 0;
        for column in &mut self.columns {
            let levels = (Some(&mut definitions), Some(&mut repetitions));
            match column {
                ColumnReader::ByteArrayColumnReader(reader) => {
                    let mut values = Vec::new();
                    reader.read_records(1, levels.0, levels.1, &mut values)?;
                    num_bytes += values.iter().map(|value| value.len() as u64).sum::<u64>();
                }
                ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                    let mut values = Vec::new();
                    reader.read_records(1, levels.0, levels.1, &mut values)?;
                    num_bytes += values.iter().map(|value| value.len() as u64).sum::<u64>();
                }
                _ => {}
            }
            definitions.clear();
            repetitions.clear();
        }
        if num_bytes > self.limit {
            return Err(too_large("a row becomes", num_bytes, self.limit, "bytes"));
        }
        Ok(())
    }
}

/// What a page's header says of its size. Source: `PageHeader` of parquet.thrift, in Thrift's compact protocol.
#[derive(Debug, Default, PartialEq, Eq)]
struct Header {
    is_dictionary: bool,
    unpacked_bytes: u64,
    packed_bytes: u64,
    num_values: u64,
    /// Bytes at the start of a page of version 2 that are never compressed.
    plain_bytes: u64,
    is_packed: bool,
}

impl Header {
    fn read(input: &mut impl Read) -> Result<Self> {
        let mut header = Self { is_packed: true, ..Self::default() };
        let mut sizes = [None; 2];
        fields(input, &mut Vec::new(), &mut |path, value| {
            let size = || {
                u64::try_from(value)
                    .ok()
                    .filter(|&n| n <= i32::MAX as u64)
                    .ok_or_else(|| refused(format!("a page's header says {value} for a size")))
            };
            match path {
                [1] => header.is_dictionary = value == 2,
                [2] => sizes[0] = Some(size()?),
                [3] => sizes[1] = Some(size()?),
                // Pages of data, of a dictionary, and of data in version 2.
                [5 | 7 | 8, 1] => header.num_values = size()?,
                [8, 5 | 6] => header.plain_bytes += size()?,
                [8, 7] => header.is_packed = value != 0,
                _ => {}
            }
            Ok(())
        })?;
        let [Some(unpacked), Some(packed)] = sizes else {
            return Err(refused("a page's header without its sizes"));
        };
        Ok(Self { unpacked_bytes: unpacked, packed_bytes: packed, ..header })
    }
}

/// Reads a structure and hands every whole number and truth value to `found`, with the numbers of its fields from the top.
/// Fields must come in ascending order, so that none comes twice.
fn fields(
    input: &mut impl Read,
    path: &mut Vec<i64>,
    found: &mut dyn FnMut(&[i64], i64) -> Result<()>,
) -> Result<()> {
    if path.len() == MAX_DEPTH {
        return Err(refused("a page's header nests too deep"));
    }
    path.push(0);
    let depth = path.len() - 1;
    loop {
        let start = byte(input)?;
        if start == 0 {
            path.pop();
            return Ok(());
        }
        let id = match start >> 4 {
            0 => number(input)?,
            step => path[depth] + i64::from(step),
        };
        if id <= path[depth] {
            return Err(refused("a page's header names its fields out of order"));
        }
        path[depth] = id;
        match start & 15 {
            kind @ (1 | 2) => found(path, i64::from(kind == 1))?,
            3 => over(input, 1)?,
            4..=6 => {
                let value = number(input)?;
                found(path, value)?;
            }
            7 => over(input, 8)?,
            8 => {
                let len = unsigned(input)?;
                over(input, len)?;
            }
            12 => fields(input, path, found)?,
            // No header has lists or maps.
            other => return Err(refused(format!("a page's header has a field of type {other}"))),
        }
    }
}

fn over(input: &mut impl Read, num_bytes: u64) -> Result<()> {
    match io::copy(&mut input.by_ref().take(num_bytes), &mut io::sink())? == num_bytes {
        true => Ok(()),
        false => Err(refused("a page's header ends early or is too long")),
    }
}

fn byte(input: &mut impl Read) -> Result<u8> {
    let mut byte = [0];
    input.read_exact(&mut byte).map_err(|_| refused("a page's header ends early or is too long"))?;
    Ok(byte[0])
}

fn unsigned(input: &mut impl Read) -> Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = byte(input)?;
        value |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return Ok(value);
        }
    }
    Err(refused("a number of a page's header is too long"))
}

/// A whole number, zigzag.
fn number(input: &mut impl Read) -> Result<i64> {
    let value = unsigned(input)?;
    Ok((value >> 1) as i64 ^ -((value & 1) as i64))
}

/// Counts what is read.
struct Counted<R> {
    inner: R,
    num_bytes: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.num_bytes += n as u64;
        Ok(n)
    }
}
