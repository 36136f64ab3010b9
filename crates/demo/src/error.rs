use std::path::PathBuf;

/// Errors of writing the demo's files.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A file or directory could not be written.
    #[error("cannot write {path}", path = path.display())]
    Write {
        /// Path of the file to write.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A picture could not be encoded.
    #[error("cannot encode {path}", path = path.display())]
    Encode {
        /// Path of the file to write.
        path: PathBuf,
        /// Error of the encoder.
        source: image::ImageError,
    },
    /// The directory already contains something else.
    #[error("{path} contains {found}, expected an empty directory or the dataset of seed {seed} with {sizes}; move it away or name another directory", path = path.display())]
    Occupied {
        /// Path of the directory.
        path: PathBuf,
        /// Description of what the directory contains.
        found: String,
        /// Requested seed.
        seed: u64,
        /// Requested sizes, in words.
        sizes: String,
    },
    /// No unused picture was found for a question.
    #[error(
        "row {row} of {file}: all {attempts} pictures drawn for it were used before; request fewer questions"
    )]
    NoNewPicture {
        /// Name of the file of the split.
        file: &'static str,
        /// Row number in the file, from 0.
        row: usize,
        /// Number of pictures tried.
        attempts: u64,
    },
}
