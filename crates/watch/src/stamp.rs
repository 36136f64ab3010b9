//! Identity of files.

use std::fs::Metadata;
use std::time::SystemTime;

/// Identity of the file at a path. It changes when the file is written or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Inode, which differs between a file and its replacement; 0 on systems without inodes.
    pub(crate) id: u64,
    pub(crate) bytes: u64,
    pub(crate) modified: Option<SystemTime>,
}

impl Stamp {
    pub(crate) fn of(meta: &Metadata) -> Self {
        #[cfg(unix)]
        let id = std::os::unix::fs::MetadataExt::ino(meta);
        #[cfg(not(unix))]
        let id = 0;
        Self { id, bytes: meta.len(), modified: meta.modified().ok() }
    }
}
