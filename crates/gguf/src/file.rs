//! An open file.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use crate::error::{GgufError, Result};
use crate::header::{Header, Tensor};
use crate::metadata::Value;

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 1 << 18;

/// An open GGUF file. Values are read only when they are asked for.
pub struct GgufFile {
    path: PathBuf,
    file: File,
    header: Header,
}

impl GgufFile {
    /// Opens a file, and reads and checks its metadata and its list of tensors.
    ///
    /// # Errors
    /// Returns an error if the file is unreadable, malformed or unsupported, or if its size is not that of its tensors.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(GgufError::io(path))?;
        let metadata = file.metadata().map_err(GgufError::io(path))?;
        let fail = |what: String| GgufError::File { path: path.to_path_buf(), what };
        if !metadata.is_file() {
            return Err(fail("it is not a regular file, expected a GGUF file".into()));
        }
        let header = Header::read(BufReader::new(&file), metadata.len()).map_err(fail)?;
        Ok(Self { path: path.to_path_buf(), file, header })
    }

    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metadata, in the order of the file.
    #[must_use]
    pub fn metadata(&self) -> &[(String, Value)] {
        &self.header.metadata
    }

    /// Returns the value of a key, if the file has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata().iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Returns the tensors, in the order of the file.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.header.tensors
    }

    /// Creates an error about this file.
    #[must_use]
    pub fn error(&self, what: impl Into<String>) -> GgufError {
        GgufError::File { path: self.path.clone(), what: what.into() }
    }

    /// Reads values of a tensor, from the value `first` on, as f32. Both `first` and the number of values are multiples of the type's
    /// block.
    ///
    /// # Errors
    /// Returns an error if the values are no whole blocks of the tensor, or if the file is unreadable or has become shorter.
    pub fn read(&self, tensor: &Tensor, first: usize, to: &mut [f32]) -> Result<()> {
        let (kind, path) = (tensor.kind(), &self.path);
        let (values, bytes) = (kind.block_values(), kind.block_bytes());
        let inside = first.checked_add(to.len()).is_some_and(|end| end <= tensor.num_values());
        if !inside || !first.is_multiple_of(values) || !to.len().is_multiple_of(values) {
            return Err(GgufError::Tensor {
                path: path.clone(),
                tensor: tensor.name().to_owned(),
                what: format!(
                    "{} values from value {first} on were requested, expected whole blocks of {values} within {}",
                    to.len(),
                    tensor.num_values()
                ),
            });
        }
        let blocks = PIECE_BYTES / bytes;
        let mut buffer = vec![0; bytes * blocks.min(to.len() / values)];
        let mut at = tensor.at() + (first / values * bytes) as u64;
        for to in to.chunks_mut(blocks * values) {
            let piece = &mut buffer[..to.len() / values * bytes];
            read_at(&self.file, at, piece).map_err(GgufError::io(path))?;
            kind.decode(piece, to);
            at += piece.len() as u64;
        }
        Ok(())
    }
}

#[cfg(unix)]
fn read_at(file: &File, at: u64, to: &mut [u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, at)
}

#[cfg(not(unix))]
fn read_at(file: &File, at: u64, to: &mut [u8]) -> std::io::Result<()> {
    use std::io::{Read as _, Seek as _};
    let mut file = file;
    file.seek(std::io::SeekFrom::Start(at))?;
    file.read_exact(to)
}
