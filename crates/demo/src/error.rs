use std::path::PathBuf;

/// Why the demo's files could not be written.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A file or directory could not be written.
    #[error("cannot write {path}", path = path.display())]
    Write {
        /// Path of the file to write.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A picture could not be encoded.
    #[error("cannot encode {path}", path = path.display())]
    Encode {
        /// The file it was meant for.
        path: PathBuf,
        /// Why not.
        source: image::ImageError,
    },
    /// The directory holds something else already.
    #[error("{path} holds {found}, expected nothing or the dataset of seed {seed} with {sizes}; move it away or name another directory", path = path.display())]
    Occupied {
        /// The directory.
        path: PathBuf,
        /// Name of a file in the folder.
        found: String,
        /// The seed asked for.
        seed: u64,
        /// The sizes asked for, in words.
        sizes: String,
    },
    /// No unused picture was found for a question.
    #[error(
        "row {row} of {file}: {attempts} pictures drawn and every one was used before; ask for fewer questions"
    )]
    NoNewPicture {
        /// The file of the split.
        file: &'static str,
        /// Row in it, from 0.
        row: usize,
        /// Pictures tried.
        attempts: u64,
    },
}
