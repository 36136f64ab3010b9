//! Whole-file writes that survive a crash: a file is either complete or unchanged.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::Error;

/// Writes a file atomically. After a crash at any moment, the path contains either the complete old content or the complete new
/// content.
///
/// `write` fills a temporary file in the directory of `path`. The file is synced and renamed over `path`, and then the directory is
/// synced. On an error, the temporary file is removed and `path` is unchanged. Two processes must not write the same path at the
/// same time.
///
/// # Errors
/// Returns an error if the operating system refuses any of these operations. The error names the path.
pub fn write_atomic(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Error> {
    let Some(name) = path.file_name() else {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "the path names no file");
        return Err(Error::io("write", path, source));
    };
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(".tmp");
    let temporary = path.with_file_name(hidden);

    let fill = || -> io::Result<()> {
        let mut file = BufWriter::new(File::create(&temporary)?);
        write(&mut file)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    };
    let done = fill()
        .map_err(|source| Error::io("write", path, source))
        .and_then(|()| fs::rename(&temporary, path).map_err(|source| Error::io("replace", path, source)));
    if done.is_err() {
        // A failure here is ignored: the original error is the one to report.
        let _ = fs::remove_file(&temporary);
        return done;
    }
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_directory(parent),
        _ => sync_directory(Path::new(".")),
    }
}

/// Syncs a directory, so that new file names in it survive a power failure.
///
/// # Errors
/// Returns an error if the operating system cannot open or sync the directory.
pub fn sync_directory(path: &Path) -> Result<(), Error> {
    // Only Unix allows a program to open and sync a directory.
    if cfg!(unix) {
        let sync = File::open(path).and_then(|directory| directory.sync_all());
        sync.map_err(|source| Error::io("sync", path, source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_the_whole_file_and_leaves_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.yaml");
        write_atomic(&path, |out| out.write_all(b"a longer first version")).unwrap();
        write_atomic(&path, |out| out.write_all(b"second")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_keeps_the_old_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        write_atomic(&path, |out| out.write_all(b"old")).unwrap();
        let error = write_atomic(&path, |out| {
            out.write_all(b"half of the new")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        })
        .unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        let message = error.to_string();
        assert!(message.contains("state.json") && message.contains("free some space"), "{message}");
    }

    #[test]
    fn a_leftover_of_a_killed_writer_is_no_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        fs::write(directory.path().join(".state.json.tmp"), "torn and much longer than what follows")
            .unwrap();
        write_atomic(&path, |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    /// Root ignores permission bits, so the test also writes to a path where even root gets an error.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_read_only_directory_is_named_with_a_remedy() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o555)).unwrap();
        let path = directory.path().join("state.json");
        if let Err(error) = write_atomic(&path, |out| out.write_all(b"x")) {
            let message = error.to_string();
            assert!(message.contains("state.json"), "{message}");
            assert!(message.contains("an output directory that you may write to"), "{message}");
        }
        let error = write_atomic(Path::new("/proc/state.json"), |out| out.write_all(b"x")).unwrap_err();
        assert!(error.to_string().starts_with("cannot write /proc/state.json; "), "{error}");
    }
}
