//! Compares files and values with those of the Python package `gguf`, and refuses files that are wrong.
//!
//! `tools/goldens/make_gguf.py` writes the files.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use omnigrpo_gguf::{GgufFile, GgufWriter, TensorType, Value};
use proptest::prelude::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn floats(name: &str) -> Vec<f32> {
    fs::read(data(name)).unwrap().as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn values_of_every_type_equal_those_of_the_python_package_to_the_bit() {
    let file = GgufFile::open(&data("read.gguf")).unwrap();
    let expected = floats("read.f32");
    let mut kinds: Vec<_> = file.tensors().iter().map(|tensor| tensor.kind().name()).collect();
    let mut all: Vec<_> = TensorType::all().map(TensorType::name).collect();
    kinds.sort_unstable();
    all.sort_unstable();
    assert_eq!(kinds, all);
    let mut at = 0;
    for tensor in file.tensors() {
        assert_eq!((tensor.name(), tensor.shape()[0]), (tensor.kind().name(), 3));
        let mut values = vec![0.0; tensor.num_values()];
        file.read(tensor, 0, &mut values).unwrap();
        assert_eq!(bits(&values), bits(&expected[at..at + values.len()]), "{}", tensor.name());
        // The second row alone.
        let columns = tensor.shape()[1];
        let mut row = vec![0.0; columns];
        file.read(tensor, columns, &mut row).unwrap();
        assert_eq!(bits(&row), bits(&values[columns..2 * columns]), "{}", tensor.name());
        at += values.len();
    }
    assert_eq!(at, expected.len());
}

#[test]
fn metadata_of_every_type_are_read() {
    let file = GgufFile::open(&data("read.gguf")).unwrap();
    let integers = [1, -2, 3].map(Value::I32).to_vec();
    let texts = ["a", "Ġb", ""].map(Value::from).to_vec();
    let expected = [
        ("general.architecture", Value::from("test")),
        ("a.u8", Value::U8(255)),
        ("a.i8", Value::I8(-128)),
        ("a.u16", Value::U16(65535)),
        ("a.i16", Value::I16(-32768)),
        ("a.u32", Value::U32(u32::MAX)),
        ("a.i32", Value::I32(i32::MIN)),
        ("a.f32", Value::F32(1e-5)),
        ("a.bool", Value::Bool(true)),
        ("a.text", Value::from("Grüße, 世界")),
        ("a.texts", Value::List(texts)),
        ("a.integers", Value::List(integers)),
        ("a.u64", Value::U64(u64::MAX)),
        ("a.i64", Value::I64(i64::MIN)),
        ("a.f64", Value::F64(0.1)),
    ];
    let got: Vec<_> = file.metadata().iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    assert_eq!(got, expected);
    assert_eq!(file.get("a.f32").unwrap().number(), Some(1e-5));
    assert_eq!(file.get("a.u64").unwrap().count(), Some(u64::MAX));
    assert_eq!(file.get("a.i8").unwrap().count(), None);
}

/// Writes `written.gguf` again, a few rows at a time.
fn write(path: &Path, rows_at_a_time: usize) {
    let source = floats("written.f32");
    let cut: Vec<f32> = source.chunks(64).flat_map(|row| &row[..33]).copied().collect();
    let metadata = GgufFile::open(&data("written.gguf")).unwrap().metadata().to_vec();
    let tensors = [
        ("vector".to_owned(), vec![64], TensorType::F32),
        ("f32".to_owned(), vec![5, 33], TensorType::F32),
        ("f16".to_owned(), vec![5, 33], TensorType::F16),
        ("q8_0".to_owned(), vec![5, 64], TensorType::Q8_0),
    ];
    let mut writer = GgufWriter::create(path, &metadata, &tensors).unwrap();
    writer.write(&source[..64]).unwrap();
    for (values, columns) in [(&cut, 33), (&cut, 33), (&source, 64)] {
        for rows in values.chunks(rows_at_a_time * columns) {
            writer.write(rows).unwrap();
        }
    }
    writer.finish().unwrap();
}

#[test]
fn written_files_equal_those_of_the_python_package_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    for rows_at_a_time in [1, 2, 5] {
        write(&path, rows_at_a_time);
        assert!(
            fs::read(&path).unwrap() == fs::read(data("written.gguf")).unwrap(),
            "{rows_at_a_time} rows at a time"
        );
    }
}

#[test]
fn values_that_do_not_fit_and_missing_values_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let create =
        |kind, shape: &[usize]| GgufWriter::create(&path, &[], &[("t".into(), shape.to_vec(), kind)]);
    let told = |kind, values: &[f32]| {
        let mut writer = create(kind, &[32]).unwrap();
        writer.write(values).and_then(|()| writer.finish()).unwrap_err().to_string()
    };
    let with = |x: f32| {
        let mut values = [0.0; 32];
        values[3] = x;
        values
    };
    for (kind, x) in [
        (TensorType::F16, 65536.0),
        (TensorType::F16, f32::NAN),
        (TensorType::Q8_0, 1e7),
        (TensorType::F32, f32::INFINITY),
    ] {
        let error = told(kind, &with(x));
        assert!(error.contains("tensor t: value 3 is ") && error.contains(kind.name()), "{error}");
    }
    assert!(told(TensorType::F32, &[0.0; 31]).contains("31 values were written, expected 32"));
    assert!(told(TensorType::F32, &[0.0; 33]).contains("got 33 values, expected at most 32"));
    let error = create(TensorType::Q4K, &[256]).err().unwrap().to_string();
    assert!(error.contains("its type is Q4_K, expected F32, F16 or Q8_0"), "{error}");
    let mixed = [("k".to_owned(), Value::List(vec![Value::U8(1), Value::I8(1)]))];
    let error = GgufWriter::create(&path, &mixed, &[]).err().unwrap().to_string();
    assert!(error.contains("key k is a list of lists or of several types"), "{error}");
    let error = create(TensorType::Q8_0, &[33]).err().unwrap().to_string();
    assert!(error.contains("its rows have 33 values, expected a multiple of 32"), "{error}");
}

/// Bytes of a file, piece by piece.
struct Made(Vec<u8>);

impl Made {
    fn new(version: u32, tensors: u64, keys: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(version).u64(tensors).u64(keys)
    }

    fn u32(mut self, x: u32) -> Self {
        self.0.extend(x.to_le_bytes());
        self
    }

    fn u64(mut self, x: u64) -> Self {
        self.0.extend(x.to_le_bytes());
        self
    }

    fn text(self, x: &str) -> Self {
        let mut made = self.u64(x.len() as u64);
        made.0.extend(x.as_bytes());
        made
    }

    /// A tensor: sizes in the order of the file, number of the type, place.
    fn tensor(self, name: &str, sizes: &[u64], kind: u32, at: u64) -> Self {
        let made = self.text(name).u32(sizes.len() as u32);
        sizes.iter().fold(made, |made, &size| made.u64(size)).u32(kind).u64(at)
    }

    /// Zeros up to the next multiple of 32, and then this many.
    fn values(mut self, bytes: usize) -> Self {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + bytes, 0);
        self
    }

    fn open(&self) -> Result<GgufFile, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        fs::write(&path, &self.0).unwrap();
        GgufFile::open(&path).map_err(|e| e.to_string())
    }

    fn refused(&self, parts: &[&str]) {
        let error = self.open().err().unwrap_or_default();
        assert!(error.contains("x.gguf: "), "{error}");
        parts.iter().for_each(|part| assert!(error.contains(part), "`{part}` is not in {error}"));
    }
}

#[test]
fn hostile_files_are_refused_with_got_and_expected() {
    let one = |sizes: &[u64], kind, at| Made::new(3, 1, 0).tensor("t", sizes, kind, at);
    assert!(one(&[4, 2], 0, 0).values(32).open().is_ok());
    // The end of the last tensor may be padded.
    assert!(one(&[3], 0, 0).values(12).open().is_ok());
    assert!(one(&[3], 0, 0).values(32).open().is_ok());
    assert!(Made::new(2, 0, 0).open().is_ok());

    Made(b"PK\x03\x04\0\0\0\0".to_vec())
        .refused(&["it begins with [80, 75, 3, 4], expected the letters GGUF"]);
    Made(b"GGU".to_vec()).refused(&["ends within the magic number: 3 bytes are left, expected 4"]);
    Made(b"GGUF\0\0\0\x03".to_vec()).refused(&["big-endian"]);
    Made::new(1, 0, 0).refused(&["version is 1, expected 2 or 3"]);
    Made::new(3, 1 << 40, 0).refused(&["1099511627776 tensors, expected at most 65536"]);
    Made::new(3, 0, u64::MAX).refused(&["ends within the metadata"]);
    // Lengths beyond the file take no memory.
    Made::new(3, 0, 1)
        .u64(u64::MAX)
        .u64(0)
        .refused(&["ends within the name of key 0: 8 bytes are left, expected 18446744073709551615"]);
    Made::new(3, 0, 1).text("k").u32(9).u32(0).u64(1 << 60).refused(&["ends within k"]);
    Made::new(3, 0, 1).text("k").u32(9).u32(9).u64(1).refused(&["key k is a list of lists"]);
    Made::new(3, 0, 1)
        .text("k")
        .u32(13)
        .u64(1)
        .refused(&["key k is of type 13, expected a type from 0 to 12"]);
    Made::new(3, 0, 1).text("k").u32(8).u64(1).u32(0xff).refused(&["k is not UTF-8"]);
    Made::new(3, 0, 1).text("key").u32(7).u32(2).refused(&["truth value 2, expected 0 or 1"]);
    Made::new(3, 0, 2).text("k").u32(4).u32(1).text("k").u32(4).u32(1).refused(&["key k appears twice"]);
    Made::new(3, 0, 1)
        .text("split.count")
        .u32(4)
        .u32(3)
        .refused(&["split.count", "llama-gguf-split --merge"]);
    Made::new(3, 0, 1).text("general.alignment").u32(4).u32(0).refused(&["expected a power of two"]);

    one(&[4], 10, 0)
        .values(84)
        .refused(&["tensor t: its values are of Q2_K (number 10), expected one of F32"]);
    one(&[4], 99, 0).values(84).refused(&["an unknown type (number 99)"]);
    one(&[33], 8, 0)
        .values(64)
        .refused(&["its rows have 33 values, expected a multiple of 32, the block of Q8_0"]);
    one(&[0], 0, 0).refused(&["its shape is [0]"]);
    one(&[1 << 31, 1 << 31, 1 << 31], 0, 0).refused(&["with a product below 2^48"]);
    one(&[u64::MAX], 0, 0).refused(&["tensor t"]);
    one(&[1; 5], 0, 0).refused(&["it has 5 dimensions, expected 1 to 4"]);
    one(&[4], 0, 32).values(64).refused(&["begin at byte 32 of the data, expected 0"]);
    one(&[1 << 20], 0, 0).values(64).refused(&["4194304 bytes end beyond the file"]);
    one(&[16], 0, 0).values(60).refused(&["was it copied completely?"]);
    one(&[4], 0, 0).values(33).refused(&["bytes, expected"]);
    let two = |name, at| Made::new(3, 2, 0).tensor("t", &[4], 0, 0).tensor(name, &[4], 0, at);
    assert!(two("u", 32).values(48).open().is_ok());
    two("u", 16).values(48).refused(&["tensor u: its values begin at byte 16 of the data, expected 32"]);
    two("t", 32).values(48).refused(&["tensor t appears twice"]);
}

#[test]
fn requests_outside_a_tensor_or_within_a_block_are_refused() {
    let file = GgufFile::open(&data("read.gguf")).unwrap();
    let tensor = file.tensors().iter().find(|tensor| tensor.kind() == TensorType::Q8_0).unwrap();
    for (first, len) in [(tensor.num_values(), 32), (16, 32), (0, 16), (usize::MAX, 32)] {
        let error = file.read(tensor, first, &mut vec![0.0; len]).unwrap_err().to_string();
        assert!(error.contains("tensor Q8_0") && error.contains("expected whole blocks of 32"), "{error}");
    }
}

proptest! {
    /// Any change of a file is an error or a file whose tensors can be read.
    #[test]
    fn changed_files_never_panic(at in 0usize..2000, byte: u8, len in 0usize..20_000) {
        let mut bytes = fs::read(data("read.gguf")).unwrap();
        let at = at % bytes.len();
        bytes[at] = byte;
        if len % 3 == 0 {
            bytes.truncate(len.max(1));
        }
        if let Ok(file) = Made(bytes).open() {
            for tensor in file.tensors() {
                let mut values = vec![0.0; tensor.num_values()];
                let _ = file.read(tensor, 0, &mut values);
            }
        }
    }
}
