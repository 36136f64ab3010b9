//! GGUF, the file format of llama.cpp: metadata, a list of tensors, and their values.
//!
//! [`GgufFile::open`] reads the metadata and the list, and checks that every tensor lies inside the file where the format puts it.
//! [`GgufFile::read`] returns rows of a tensor as f32. [`GgufWriter`] writes a file tensor by tensor. Neither ever has a whole tensor in
//! memory unless the caller asks for one.
//!
//! Source: the specification of the format (`docs/gguf.md` of ggml) and the Python package `gguf` 0.19, whose values are equal to the
//! bit. Versions 2 and 3 are read, version 3 is written. Refused: files in parts, big-endian files, types that [`TensorType`] lacks.
//!
//! A file is not trusted. Every size is compared with the bytes of the file before memory is taken, and the header is limited to
//! [`MAX_HEADER_BYTES`].
//!
//! ```
//! use omnigrpo_gguf::{GgufFile, GgufWriter, TensorType, Value};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("small.gguf");
//! let metadata = [("general.architecture".to_owned(), Value::from("qwen2"))];
//! let tensors = [("output_norm.weight".to_owned(), vec![3], TensorType::F32)];
//! let mut writer = GgufWriter::create(&path, &metadata, &tensors)?;
//! writer.write(&[1.0, 2.0, 3.0])?;
//! writer.finish()?;
//!
//! let file = GgufFile::open(&path)?;
//! let tensor = &file.tensors()[0];
//! let mut values = [0.0; 3];
//! file.read(tensor, 0, &mut values)?;
//! assert_eq!((tensor.shape(), values), (&[3][..], [1.0, 2.0, 3.0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocks;
mod error;
mod file;
mod header;
mod metadata;
mod types;
mod writer;

pub use error::{GgufError, Result};
pub use file::GgufFile;
pub use header::{MAX_HEADER_BYTES, Tensor};
pub use metadata::{Metadata, Value};
pub use types::TensorType;
pub use writer::GgufWriter;

/// The first bytes of every file.
const MAGIC: [u8; 4] = *b"GGUF";
/// The version that is written.
const VERSION: u32 = 3;
/// Unit of the places of tensors in bytes, unless `general.alignment` gives another.
const ALIGNMENT: u64 = 32;
/// Key of another unit.
const ALIGNMENT_KEY: &str = "general.alignment";
