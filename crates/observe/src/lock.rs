//! One process per run directory.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::Error;

const NAME: &str = ".lock";
/// Most bytes of a holder's description that are read back.
const HOLDER_BYTES: u64 = 1024;

/// A run directory that no other process may write. It is given back when this value is dropped, and by the operating
/// system however the process ends; the file itself stays.
#[derive(Debug)]
pub struct RunLock {
    root: PathBuf,
    exclusive: bool,
    /// The lock belongs to the open file.
    _file: File,
}

impl RunLock {
    /// Takes the directory, which is created. `holder` says to others who has it.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process has it; a directory that cannot be written.
    pub fn acquire(root: &Path, holder: &str) -> Result<Self, Error> {
        fs::create_dir_all(root).map_err(|source| Error::io("create the directory", root, source))?;
        let path = root.join(NAME);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = file.map_err(|source| Error::io("open", &path, source))?;
        let exclusive = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => {
                let mut text = Vec::new();
                // What cannot be read is not said: the refusal does not depend on it.
                let _ = file.take(HOLDER_BYTES).read_to_end(&mut text);
                let text: String =
                    String::from_utf8_lossy(&text).chars().filter(|c| !c.is_control()).collect();
                let holder = if text.is_empty() { "another process".to_owned() } else { text };
                return Err(Error::Locked { path: root.to_owned(), holder });
            }
            Err(TryLockError::Error(source)) if source.kind() == io::ErrorKind::Unsupported => false,
            Err(TryLockError::Error(source)) => return Err(Error::io("lock", &path, source)),
        };
        // Best effort, since a full disk must not keep a run from going on: the lock holds without it.
        let _ = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
        Ok(Self { root: root.to_owned(), exclusive, _file: file })
    }

    /// The directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether other processes are kept out. Some network file systems have no locks.
    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        self.exclusive
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_holder_at_a_time_and_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("run");
        let first = RunLock::acquire(&root, "process 7 on host a since noon").unwrap();
        assert!(first.is_exclusive());
        let refused = RunLock::acquire(&root, "process 8").unwrap_err();
        assert!(
            matches!(&refused, Error::Locked { holder, .. } if holder == "process 7 on host a since noon")
        );
        assert!(refused.to_string().contains("process 7 on host a since noon"), "{refused}");
        drop(first);
        let second = RunLock::acquire(&root, "process 9").unwrap();
        assert_eq!(fs::read_to_string(root.join(NAME)).unwrap(), "process 9", "the old name is gone");
        drop(second);
    }
}
