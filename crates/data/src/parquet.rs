//! Converter from Hugging Face parquet files to JSON lines with media files beside them (feature `parquet`).
//!
//! Datasets on the hub store media inside the table, as `{bytes, path}` (the columns `Image`, `Video` and `Audio` of the
//! `datasets` library) or as plain bytes. Training reads rows in random order and media by path, so the table is unpacked once:
//! by `data convert parquet`, or into the cache if it is given as a file of rows. Every byte value becomes a file named after its
//! content hash, and the row refers to that file. Values without bytes keep their path. Times, dates and decimals become text.
//!
//! Unsupported types, encrypted files, and pages or rows that would not fit into memory are errors.

mod bounds;

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::DataError;
use crate::output::{Output, check_is_other};
use crate::roots::media_folder;
use crate::store::{short_hash, store};
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::record::reader::TreeBuilder;
use ::parquet::record::{Field, Row};
use bounds::{Bounded, Lengths, Limits};
use omnigrpo_guard::cache::own_folder;
use serde_json::{Map, Value};

/// Base limit for the bytes of rows that a table may unpack to. A multiple of the table's own size is added. The limit is needed
/// because an encoding can repeat one long text a million times in a few bytes.
const MAX_ROWS_BYTES: u64 = 1 << 30;
const MAX_GROWTH: u64 = 64;

/// Writes the rows of a parquet file to `output` (JSON lines) and its media to the folder `<output's stem>_media` beside it.
/// Returns the number of rows. `output` is either complete or absent.
///
/// # Errors
/// Returns an error if the input is not a parquet file, has no rows, uses an unknown type or compression, or unpacks to far more
/// bytes than its own size. Also returns an error if the output cannot be written or is the input itself.
pub fn convert_parquet(input: &Path, output: &Path) -> Result<u64, DataError> {
    check_is_other(input, output)?;
    let mut stem = output.file_stem().unwrap_or_default().to_owned();
    stem.push("_media");
    let media = Media { folder: output.with_file_name(&stem), prefix: stem.into() };
    rows(input, output, &media, Limits::default())
}

/// Unpacks the rows of a parquet file into a file of JSON lines in the cache, with the media beside it. Each file, size and time
/// of change is unpacked once.
pub(crate) fn unpack(input: &Path, cache_dir: &Path) -> Result<PathBuf, DataError> {
    let real = input.canonicalize().map_err(DataError::io("open", input))?;
    let metadata = real.metadata().map_err(DataError::io("open", input))?;
    let modified = metadata.modified().map_err(DataError::io("open", input))?;
    let modified = modified.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let key = format!("{}\0{}\0{modified}", real.display(), metadata.len());
    let (tables, folder) = (cache_dir.join("parquet"), media_folder(cache_dir));
    for own in [&tables, &folder] {
        own_folder(own).map_err(DataError::io("unpack a table into the cache folder", own))?;
    }
    let output = tables.join(short_hash(key.as_bytes())).join("rows.jsonl");
    if !output.exists() {
        rows(input, &output, &Media { prefix: folder.clone(), folder }, Limits::default())?;
    }
    Ok(output)
}

fn rows(input: &Path, output: &Path, media: &Media, limits: Limits) -> Result<u64, DataError> {
    let unreadable = |problem: String| DataError::Syntax {
        path: input.to_owned(),
        line: 0,
        problem: format!("cannot read this parquet file: {problem}"),
    };
    let file = File::open(input).map_err(DataError::io("open", input))?;
    let size = file.metadata().map_err(DataError::io("open", input))?.len();
    let limit_bytes = MAX_ROWS_BYTES.saturating_add(size.saturating_mul(MAX_GROWTH));
    let mut out = Output::create(output)?;
    let copy = || -> Result<u64, DataError> {
        let (mut num_rows, mut num_bytes) = (0, 0);
        let told = |error: ParquetError| match error {
            // Drops the prefix that the crate adds to its messages.
            ParquetError::General(what) => unreadable(what),
            other => unreadable(other.to_string()),
        };
        let bounded = Bounded::new(file, limits);
        let opened = bounded.opened();
        let reader = SerializedFileReader::new(bounded).map_err(told)?;
        let schema = reader.metadata().file_metadata().schema_descr_ptr();
        for number in 0..reader.num_row_groups() {
            let group = reader.get_row_group(number).map_err(told)?;
            opened.row_group(group.metadata()).map_err(told)?;
            let mut lengths = Lengths::of(&*group, limits).map_err(told)?;
            // Reads one row at a time, because a batch of long rows would be in memory at once.
            let builder = TreeBuilder::new().with_batch_size(1);
            let mut rows = builder.as_iter(schema.clone(), &*group).map_err(told)?;
            loop {
                opened.row();
                lengths.check_row().map_err(told)?;
                let Some(row) = rows.next() else { break };
                num_bytes += out.line(&media.row(&row.map_err(told)?)?)?;
                if num_bytes > limit_bytes {
                    return Err(unreadable(format!(
                        "its {size} bytes unpack to more than {limit_bytes} bytes of rows"
                    )));
                }
                num_rows += 1;
            }
        }
        Ok(num_rows)
    };
    // The reader panics on unknown types and on some damaged files.
    let num_rows = omnigrpo_guard::guarded(copy)
        .unwrap_or_else(|_| Err(unreadable("it has an unsupported type or is damaged".to_owned())))?;
    if num_rows == 0 {
        return Err(DataError::Empty { files: input.display().to_string() });
    }
    out.finish()?;
    Ok(num_rows)
}

struct Media {
    folder: PathBuf,
    /// Folder of the media as written in the rows.
    prefix: PathBuf,
}

impl Media {
    fn row(&self, row: &Row) -> Result<Value, DataError> {
        let columns = row.get_column_iter().map(|(name, field)| Ok((name.clone(), self.value(field)?)));
        Ok(Value::Object(columns.collect::<Result<Map<_, _>, _>>()?))
    }

    fn value(&self, field: &Field) -> Result<Value, DataError> {
        Ok(match field {
            Field::Null => Value::Null,
            Field::Bool(value) => (*value).into(),
            Field::Byte(value) => (*value).into(),
            Field::Short(value) => (*value).into(),
            Field::Int(value) => (*value).into(),
            Field::Long(value) => (*value).into(),
            Field::UByte(value) => (*value).into(),
            Field::UShort(value) => (*value).into(),
            Field::UInt(value) => (*value).into(),
            Field::ULong(value) => (*value).into(),
            Field::Float(value) => (*value).into(),
            Field::Double(value) => (*value).into(),
            Field::Str(text) => text.as_str().into(),
            Field::Bytes(bytes) => self.write(bytes.data(), None)?,
            Field::Group(row) => match embedded(row) {
                Some((Some(bytes), path)) => self.write(bytes, path)?,
                Some((None, path)) => path.into(),
                None => self.row(row)?,
            },
            Field::ListInternal(list) => {
                Value::Array(list.elements().iter().map(|field| self.value(field)).collect::<Result<_, _>>()?)
            }
            Field::MapInternal(map) => {
                let entry = |(key, value): &(Field, Field)| Ok((text(key), self.value(value)?));
                Value::Object(map.entries().iter().map(entry).collect::<Result<Map<_, _>, _>>()?)
            }
            other => text(other).into(),
        })
    }

    /// Writes a medium, unless it exists, and returns its path as written in the rows.
    fn write(&self, bytes: &[u8], path: Option<&str>) -> Result<Value, DataError> {
        let name = store(&self.folder, bytes, path)?;
        Ok(self.prefix.join(name).to_string_lossy().into_owned().into())
    }
}

fn text(field: &Field) -> String {
    match field {
        // The default formatting would add quotes.
        Field::Str(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns the bytes and the path of a `{bytes, path}` value of the `datasets` library.
fn embedded(row: &Row) -> Option<(Option<&[u8]>, Option<&str>)> {
    let (mut bytes, mut path, mut has_bytes) = (None, None, false);
    for (name, field) in row.get_column_iter() {
        match (name.as_str(), field) {
            ("bytes", Field::Bytes(data)) => (bytes, has_bytes) = (Some(data.data()), true),
            ("bytes", Field::Null) => has_bytes = true,
            ("path", Field::Str(text)) => path = Some(text.as_str()),
            ("path", Field::Null) => {}
            _ => return None,
        }
    }
    has_bytes.then_some((bytes, path))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ::parquet::basic::{Compression, GzipLevel, ZstdLevel};
    use ::parquet::data_type::{ByteArray, ByteArrayType};
    use ::parquet::file::properties::{EnabledStatistics, WriterProperties};
    use ::parquet::file::writer::SerializedFileWriter;
    use ::parquet::schema::parser::parse_message_type;

    use super::*;
    use crate::{Dataset, DatasetSpec, MediumSource, ReadOptions, Roots};

    /// Written by `tests/data/make_parquet.py` with the `datasets` library.
    const TABLE: &[u8] = include_bytes!("../tests/data/hub.parquet");

    #[test]
    fn a_hub_table_becomes_rows_and_files() {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("t.parquet"), folder.path().join("out/train.jsonl"));
        std::fs::write(&input, TABLE).unwrap();
        assert_eq!(convert_parquet(&input, &output).unwrap(), 3);
        std::fs::write(folder.path().join("out/kept.png"), "x").unwrap();
        let spec = DatasetSpec::file(&output);
        let dataset = Dataset::open(&[spec], &ReadOptions::default()).unwrap();
        let samples: Vec<_> = (0..3).map(|row| dataset.get(row).unwrap()).collect();
        assert_eq!(samples[0].question(), "Màu gì?");
        assert_eq!(samples[0].solution.as_deref(), Some("<answer>red</answer>"));
        assert_eq!(samples[0].columns["scores"], serde_json::json!([0.5, 1.5]));
        assert_eq!(samples[0].columns["level"], 3);
        let images: Vec<_> = samples
            .iter()
            .flat_map(|sample| &sample.media)
            .map(|medium| match &medium.source {
                MediumSource::Path(path) => std::fs::read(path).unwrap(),
                other => panic!("{other:?}"),
            })
            .collect();
        // Row 0 has two images, one of which row 1 repeats. Row 2 has one image by path.
        assert_eq!(images.len(), 4);
        assert!(images[0].starts_with(b"\x89PNG") && images[0] == images[2] && images[0] != images[1]);
        assert_eq!(images[3], b"x");
        assert_eq!(std::fs::read_dir(folder.path().join("out/train_media")).unwrap().count(), 2);
    }

    #[test]
    fn a_table_is_read_as_a_file_of_rows() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().canonicalize().unwrap();
        let input = place.join("hub.parquet");
        std::fs::write(&input, TABLE).unwrap();
        std::fs::write(place.join("kept.png"), "x").unwrap();
        let options = ReadOptions { cache_dir: Some(place.join("cache")), ..ReadOptions::default() };
        // Embedded media are stored in the cache, whatever the roots are; other paths are resolved against the user's roots.
        for roots in [Roots::default(), Roots::all(&place)] {
            let dataset = Dataset::open(&[DatasetSpec::file(&input).with_roots(roots)], &options).unwrap();
            assert_eq!(dataset.len(), 3);
            let samples: Vec<_> = (0..3).map(|row| dataset.get(row).unwrap()).collect();
            assert_eq!(samples[0].question(), "Màu gì?");
            assert_eq!((&*samples[2].origin.file, samples[2].origin.line), (input.as_path(), 3));
            let paths: Vec<_> = samples.iter().flat_map(|sample| &sample.media).map(|m| &m.source).collect();
            let MediumSource::Path(first) = paths[0] else { panic!("{paths:?}") };
            assert!(first.starts_with(place.join("cache/media")), "{first:?}");
            assert!(std::fs::read(first).unwrap().starts_with(b"\x89PNG"));
            assert_eq!(paths[3], &MediumSource::Path(place.join("kept.png")));
        }
        let unpacked = |place: &Path| std::fs::read_dir(place.join("cache/parquet")).unwrap().count();
        assert_eq!(unpacked(&place), 1);
        // Another account could have put this folder in the cache's place.
        #[cfg(unix)]
        for name in ["media", "parquet"] {
            let other = place.join(format!("other-{name}"));
            std::fs::create_dir_all(&other).unwrap();
            std::os::unix::fs::symlink(place.join("elsewhere"), other.join(name)).unwrap();
            let options = ReadOptions { cache_dir: Some(other), ..ReadOptions::default() };
            let error = Dataset::open(&[DatasetSpec::file(&input)], &options).err().unwrap();
            assert!(omnigrpo_guard::told(&error).contains("is a link or a file"), "{error}");
        }
        // A different table under the same name is unpacked again.
        let mut longer = TABLE.to_vec();
        longer.splice(4..4, [0; 8]);
        std::fs::write(&input, longer).unwrap();
        assert!(Dataset::open(&[DatasetSpec::file(&input)], &options).is_err());
        let none = Dataset::open(&[DatasetSpec::file(&input)], &ReadOptions::default());
        assert!(none.err().unwrap().to_string().contains("no cache folder to unpack it into"));
    }

    /// Returns a table with one column and one row that repeats the same value.
    fn one_row(schema: &str, compression: Compression, value: &[u8], times: usize) -> Vec<u8> {
        let repeated = schema.contains("repeated");
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = WriterProperties::builder()
            .set_compression(compression)
            .set_statistics_enabled(EnabledStatistics::None)
            .set_dictionary_page_size_limit(1 << 24);
        let mut file = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties.build())).unwrap();
        let mut group = file.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values = vec![ByteArray::from(value.to_vec()); times];
        let (definitions, mut repetitions) = (vec![1; times], vec![1; times]);
        repetitions[0] = 0;
        let (definitions, repetitions) =
            (repeated.then_some(&definitions[..]), repeated.then_some(&repetitions[..]));
        column.typed::<ByteArrayType>().write_batch(&values, definitions, repetitions).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        file.into_inner().unwrap()
    }

    /// The file has a few kilobytes. Its row would unpack to 4 GiB, or its page would exceed the limit; both must be rejected.
    #[test]
    fn rows_and_pages_are_refused_before_they_are_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("t.parquet"), folder.path().join("train.jsonl"));
        let convert = |bytes: &[u8], limits: Limits| {
            std::fs::write(&input, bytes).unwrap();
            let media = Media { folder: folder.path().join("media"), prefix: "media".into() };
            rows(&input, &output, &media, limits).map_err(|error| error.to_string())
        };
        const LIST: &str = "message m { repeated binary text (UTF8); }";
        const TEXT: &str = "message m { required binary text (UTF8); }";
        let bomb = one_row(LIST, Compression::SNAPPY, &[b'a'; 1 << 20], 4096);
        assert!(bomb.len() < 1 << 18, "{}", bomb.len());
        let message = convert(&bomb, Limits::default()).unwrap_err();
        assert!(
            message.contains("a row takes 4294967296 bytes in memory, expected at most 1073741824"),
            "{message}"
        );
        let small = Limits { num_bytes: 1 << 20, ..Limits::default() };
        for compression in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::ZSTD(ZstdLevel::default()),
            Compression::GZIP(GzipLevel::default()),
        ] {
            let bytes = one_row(TEXT, compression, &[b'a'; 4 << 20], 1);
            assert_eq!(convert(&bytes, Limits::default()), Ok(1), "{compression:?}");
            std::fs::remove_file(&output).unwrap();
            let message = convert(&bytes, small).unwrap_err();
            assert!(
                message.contains("a page takes") && message.contains("expected at most 1048576"),
                "{message}"
            );
        }
        let values = Limits { num_values: 4095, ..Limits::default() };
        let message = convert(&one_row(LIST, Compression::SNAPPY, b"a", 4096), values).unwrap_err();
        assert!(message.contains("the pages of a row have"), "{message}");
        assert!(!output.exists(), "a refused table left its rows");
    }

    #[test]
    fn other_files_are_errors_and_leave_no_output() {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("t.parquet"), folder.path().join("train.jsonl"));
        let mut cut = TABLE.to_vec();
        cut.truncate(TABLE.len() / 2);
        let mut damaged = TABLE.to_vec();
        damaged[10..60].fill(0xff);
        for bytes in [b"no parquet".to_vec(), cut, damaged] {
            std::fs::write(&input, bytes).unwrap();
            let message = convert_parquet(&input, &output).unwrap_err().to_string();
            assert!(message.contains("t.parquet") && message.contains("parquet file"), "{message}");
            assert!(!output.exists());
        }
    }
}
