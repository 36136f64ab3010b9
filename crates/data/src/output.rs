//! Files that are there whole or not at all.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use crate::error::DataError;

/// Writes `path` by way of a temporary file beside it. Missing folders are made.
pub(crate) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), DataError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let attempt = || {
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder)?;
        }
        let mut out = BufWriter::new(File::create(&temporary)?);
        write(&mut out)?;
        out.into_inner()?.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    attempt().map_err(|error| {
        // Best effort: the error above is the one to report.
        let _ = std::fs::remove_file(&temporary);
        DataError::io("write", path)(error)
    })
}
