//! Limits on the unpacked size of a table, checked before it is unpacked.
//!
//! The header of a page states its unpacked length, and the crate's reader allocates memory of this size. One text of a dictionary
//! may occur a million times in one row, and the reader copies every occurrence. [`Bounded`] checks every header before the
//! reader sees it. [`Lengths`] adds up the texts of a row while they are still references.
//!
//! These are errors: pages and rows above the limits, headers with repeated or unordered fields, and pages that unpack to more
//! bytes than their header states.

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

/// Limits on the part of a table that is in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Maximum bytes of unpacked pages, and of one row.
    pub(super) num_bytes: u64,
    /// Maximum number of values in the pages of repeated columns that one row reads.
    pub(super) num_values: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { num_bytes: 1 << 30, num_values: 1 << 23 }
    }
}

/// Maximum size of a page header, bytes. In practice statistics are the longest part of a header.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Memory of the reader per dictionary value, bytes, in addition to the content. The reader allocates it for the stated number of
/// values.
const DICTIONARY_VALUE_BYTES: u64 = 32;
/// Maximum nesting depth. Real headers nest three deep.
const MAX_DEPTH: usize = 8;

fn refused(what: impl Into<String>) -> ParquetError {
    ParquetError::General(what.into())
}

/// Column chunk of the current row group, with the sizes of its pages in memory.
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

/// Shared handle to the record of a reader's memory use.
#[derive(Debug, Clone)]
pub(super) struct Opened {
    open: Arc<Mutex<Open>>,
    limits: Limits,
}

impl Opened {
    /// Starts a row group.
    pub(super) fn row_group(&self, group: &RowGroupMetaData) -> Result<()> {
        let chunk = |column: &::parquet::file::metadata::ColumnChunkMetaData| {
            let (start, len) = column.byte_range();
            let end = start.checked_add(len).ok_or_else(|| refused("a column whose byte range overflows"))?;
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

    /// Starts a row.
    pub(super) fn row(&self) {
        let mut open = self.lock();
        (open.row_bytes, open.row_values) = (0, 0);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the page whose header begins at `start`.
    fn page(&self, file: &File, start: u64) -> Result<()> {
        let mut open = self.lock();
        if open.chunks.is_empty() {
            // No row group has started: the reader is reading the table's metadata.
            return Ok(());
        }
        let Some(at) = open.chunks.iter().position(|c| (c.start..c.end).contains(&start)) else {
            return Err(refused("a page that starts outside its column"));
        };
        let mut input = Counted { inner: file.get_read(start)?.take(MAX_HEADER_BYTES), num_bytes: 0 };
        let header = Header::read(&mut input)?;
        // Both delta encodings allocate memory for as many values as their content states. The second one also repeats the
        // prefixes of values.
        if header.is_delta {
            return Err(refused(
                "texts in a delta encoding, whose size in memory is not bounded; write them in plain encoding",
            ));
        }
        let values_bytes = if header.is_dictionary { header.num_values * DICTIONARY_VALUE_BYTES } else { 0 };
        let unpacked = header.unpacked_bytes.max(header.packed_bytes) + values_bytes;
        let limits = self.limits;
        if unpacked > limits.num_bytes {
            return Err(too_large("a page takes", unpacked, limits.num_bytes, "bytes"));
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
            return Err(too_large("the pages of a row take", num_bytes, limits.num_bytes, "bytes"));
        }
        if open.row_values > limits.num_values {
            return Err(too_large("the pages of a row have", open.row_values, limits.num_values, "values"));
        }
        drop(open);
        // Gzip is the only supported compression whose decoder does not stop at the stated length.
        if gzip && header.is_packed {
            let expected = header.unpacked_bytes.saturating_sub(header.plain_bytes);
            let mut body = file.try_clone()?;
            body.seek(SeekFrom::Start(start + input.num_bytes + header.plain_bytes))?;
            let packed = body.take(header.packed_bytes.saturating_sub(header.plain_bytes));
            let unpacked = MultiGzDecoder::new(packed).take(expected + 1);
            if io::copy(&mut { unpacked }, &mut io::sink())? > expected {
                return Err(refused(format!(
                    "a page unpacks to more than the {expected} bytes stated in its header"
                )));
            }
        }
        Ok(())
    }
}

fn too_large(what: &str, got: u64, limit: u64, unit: &str) -> ParquetError {
    refused(format!("{what} {got} {unit} in memory, expected at most {limit}"))
}

/// File whose pages are checked before they are unpacked.
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

    // The reader calls this for the footer of the file first, and then for the headers of pages.
    fn get_read(&self, start: u64) -> Result<Self::T> {
        self.opened.page(&self.file, start)?;
        self.file.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        if (start.saturating_add(length as u64)) > self.file.len() {
            return Err(refused("a page or column that extends beyond the end of the file"));
        }
        self.file.get_bytes(start, length)
    }
}

/// Sum of the value lengths of each row, over the columns that can have several values per row.
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

    /// Checks the next row.
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
            return Err(too_large("a row takes", num_bytes, self.limit, "bytes"));
        }
        Ok(())
    }
}

/// Size fields of a page header. Source: `PageHeader` of parquet.thrift, in Thrift's compact protocol.
#[derive(Debug, Default, PartialEq, Eq)]
struct Header {
    is_dictionary: bool,
    unpacked_bytes: u64,
    packed_bytes: u64,
    num_values: u64,
    /// Flag for texts stored as lengths and differences (`DELTA_LENGTH_BYTE_ARRAY`, `DELTA_BYTE_ARRAY`).
    is_delta: bool,
    /// Number of bytes at the start of a version 2 page that are never compressed.
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
                    .ok_or_else(|| refused(format!("a page header has the invalid size {value}")))
            };
            match path {
                [1] => header.is_dictionary = value == 2,
                [2] => sizes[0] = Some(size()?),
                [3] => sizes[1] = Some(size()?),
                // Data page, dictionary page and version 2 data page.
                [5 | 7 | 8, 1] => header.num_values = header.num_values.max(size()?),
                [5, 2] | [8, 4] => header.is_delta |= matches!(value, 6 | 7),
                [8, 5 | 6] => header.plain_bytes += size()?,
                [8, 7] => header.is_packed = value != 0,
                _ => {}
            }
            Ok(())
        })?;
        let [Some(unpacked), Some(packed)] = sizes else {
            return Err(refused("a page header without its sizes"));
        };
        Ok(Self { unpacked_bytes: unpacked, packed_bytes: packed, ..header })
    }
}

/// Reads a structure and passes every integer and boolean to `found`, with the path of field numbers from the top. Fields must be
/// in ascending order, so that none can occur twice.
fn fields(
    input: &mut impl Read,
    path: &mut Vec<i64>,
    found: &mut dyn FnMut(&[i64], i64) -> Result<()>,
) -> Result<()> {
    if path.len() == MAX_DEPTH {
        return Err(refused("a page header is nested too deeply"));
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
            step => path[depth].saturating_add(i64::from(step)),
        };
        if id <= path[depth] {
            return Err(refused("a page header has its fields out of order"));
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
            // A header never contains lists or maps.
            other => {
                return Err(refused(format!("a page header has a field of the unexpected type {other}")));
            }
        }
    }
}

fn over(input: &mut impl Read, num_bytes: u64) -> Result<()> {
    match io::copy(&mut input.by_ref().take(num_bytes), &mut io::sink())? == num_bytes {
        true => Ok(()),
        false => Err(refused("a page header ends early or is too long")),
    }
}

fn byte(input: &mut impl Read) -> Result<u8> {
    let mut byte = [0];
    input.read_exact(&mut byte).map_err(|_| refused("a page header ends early or is too long"))?;
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
    Err(refused("a number in a page header is too long"))
}

/// Reads a zigzag-encoded integer.
fn number(input: &mut impl Read) -> Result<i64> {
    let value = unsigned(input)?;
    Ok((value >> 1) as i64 ^ -((value & 1) as i64))
}

/// Reader that counts the bytes read.
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

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression as Level;
    use flate2::write::GzEncoder;

    use super::*;

    /// Encodes a 32-bit integer in the compact protocol.
    fn varint(value: i32) -> Vec<u8> {
        let mut rest = (value << 1 ^ value >> 31) as u32;
        let mut bytes = Vec::new();
        while rest > 127 {
            bytes.push(rest as u8 | 128);
            rest >>= 7;
        }
        bytes.push(rest as u8);
        bytes
    }

    /// Builds a page header: kind, both sizes, and the structure `id` with a number of values and an encoding.
    fn header(kind: i32, sizes: [i32; 2], id: u8, num_values: i32, encoding: i32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for value in [kind, sizes[0], sizes[1]] {
            bytes.push(0x15);
            bytes.extend(varint(value));
        }
        bytes.push((id - 3) << 4 | 12);
        bytes.push(0x15);
        bytes.extend(varint(num_values));
        bytes.push(if id == 8 { 0x35 } else { 0x15 });
        bytes.extend(varint(encoding));
        bytes.extend([0, 0]);
        bytes
    }

    const DATA: (i32, u8) = (0, 5);
    const DICTIONARY: (i32, u8) = (2, 7);
    const DATA_V2: (i32, u8) = (3, 8);

    #[test]
    fn a_header_tells_the_sizes_of_its_page() {
        for (kind, id) in [DATA, DICTIONARY, DATA_V2] {
            for (encoding, is_delta) in [(0, false), (8, false), (6, true), (7, true)] {
                let read = Header::read(&mut &header(kind, [100, 60], id, 9, encoding)[..]).unwrap();
                let expected = Header {
                    is_dictionary: kind == 2,
                    unpacked_bytes: 100,
                    packed_bytes: 60,
                    num_values: 9,
                    is_delta: is_delta && kind != 2,
                    plain_bytes: 0,
                    is_packed: true,
                };
                assert_eq!(read, expected, "{kind} {encoding}");
            }
        }
    }

    #[test]
    fn headers_that_no_writer_makes_are_refused() {
        let good = header(0, [100, 60], 5, 9, 0);
        let cases: [(&[u8], &str); 8] = [
            (&good[..good.len() - 1], "ends early"),
            (&[0x15, 0, 0], "without its sizes"),
            (&header(0, [-1, 60], 5, 9, 0), "the invalid size -1"),
            // The second field again, by its explicit number.
            (&[0x25, 4, 0x05, 4, 4, 0], "out of order"),
            (&[0x19, 0, 0], "a field of the unexpected type 9"),
            (&[0x1c; 20], "nested too deeply"),
            (&[0x15, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1], "is too long"),
            (&[0x18, 100, 1, 2], "ends early"),
        ];
        for (bytes, expected) in cases {
            let message = Header::read(&mut &bytes[..]).unwrap_err().to_string();
            assert!(message.contains(expected), "{message} instead of {expected}");
        }
        // The largest numbers a field can have.
        let mut far = vec![0x05];
        far.extend([255, 255, 255, 255, 255, 255, 255, 255, 255, 1]);
        far.extend([0, 0xf5, 0, 0]);
        assert!(Header::read(&mut &far[..]).is_err());
    }

    #[test]
    fn pages_are_judged_by_what_they_become() {
        let page = |content: &[u8], gzip: bool| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(content).unwrap();
            let chunk = Chunk {
                start: 0,
                end: content.len() as u64,
                repeated: false,
                gzip,
                dictionary_bytes: 0,
                page_bytes: 0,
            };
            let open = Open { chunks: vec![chunk], row_bytes: 0, row_values: 0 };
            let opened = Opened { open: Arc::new(Mutex::new(open)), limits: Limits::default() };
            opened.page(&file, 0).map_err(|error| error.to_string())
        };
        assert_eq!(page(&header(2, [100, 60], 7, 9, 0), false), Ok(()));
        let message = page(&header(2, [100, 60], 7, i32::MAX, 0), false).unwrap_err();
        assert!(
            message.contains("a page takes 68719476804 bytes in memory, expected at most 1073741824"),
            "{message}"
        );
        for (kind, id) in [DATA, DATA_V2] {
            for encoding in [6, 7] {
                let message = page(&header(kind, [100, 60], id, 9, encoding), false).unwrap_err();
                assert!(message.contains("a delta encoding"), "{message}");
            }
        }
        let mut packed = GzEncoder::new(Vec::new(), Level::best());
        packed.write_all(&[0; 1 << 20]).unwrap();
        let packed = packed.finish().unwrap();
        let of_length =
            |said: i32| [header(0, [said, packed.len() as i32], 5, 9, 0), packed.clone()].concat();
        assert_eq!(page(&of_length(1 << 20), true), Ok(()));
        let message = page(&of_length(100), true).unwrap_err();
        assert!(
            message.contains("a page unpacks to more than the 100 bytes stated in its header"),
            "{message}"
        );
    }
}
