//! Arrays of the optimizer's state in a file, which is mapped into memory. The system writes pages that were changed to the disk and
//! removes them from memory when it needs the space.

use std::fs::File;
use std::path::Path;

use memmap2::MmapMut;

use crate::error::{Error, Result};

/// The arrays of a weight, of equal length and one after the other: first moment, second moment, and master if there is one. The file
/// has no name, so nothing is left when the process ends.
#[derive(Debug)]
pub(crate) struct StateFile {
    map: MmapMut,
    /// Number of values of each array.
    len: usize,
    /// True if the master was written.
    pub has_master: bool,
}

impl StateFile {
    /// Creates the arrays for `len` values, which are zeros. The space is reserved on the disk, as far as the file system reserves
    /// any: a write to the memory of a file on a full disk ends the process.
    pub fn new(folder: &Path, len: usize, with_master: bool) -> Result<Self> {
        let bytes = 4 * (len * if with_master { 3 } else { 2 }).max(1) as u64;
        let failed = |source| Error::StateFile { folder: folder.to_owned(), bytes, source };
        let file = tempfile::tempfile_in(folder).map_err(failed)?;
        reserve(&file, bytes).map_err(failed)?;
        // SAFETY: The file has no name, so no other process changes its length.
        let map = unsafe { MmapMut::map_mut(&file) }.map_err(failed)?;
        Ok(Self { map, len, has_master: false })
    }

    /// Returns first moment, second moment and master. The last is empty if it was not written.
    pub fn arrays(&self) -> [&[f32]; 3] {
        let mut each = bytemuck::cast_slice(&self.map).chunks_exact(self.len.max(1));
        let [m, v, master] = std::array::from_fn(|_| each.next().unwrap_or_default());
        [m, v, if self.has_master { master } else { &[] }]
    }

    /// Returns the arrays to change them. The last is empty if there is no space for a master.
    pub fn arrays_mut(&mut self) -> [&mut [f32]; 3] {
        let mut each = bytemuck::cast_slice_mut(&mut self.map).chunks_exact_mut(self.len.max(1));
        std::array::from_fn(|_| each.next().unwrap_or_default())
    }
}

/// Gives a new file blocks of the disk for this many bytes.
fn reserve(file: &File, bytes: u64) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::{Errno, retry_on_intr};

        match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
            Err(Errno::OPNOTSUPP) => {}
            done => return Ok(done?),
        }
    }
    #[cfg(unix)]
    {
        let disk = rustix::fs::fstatvfs(file)?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) < bytes {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
    }
    // Without a call that reserves, zeros are written.
    std::io::copy(&mut std::io::Read::take(std::io::repeat(0), bytes), &mut &*file)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_arrays_of_a_file_are_apart_and_begin_with_zeros() {
        let folder = tempfile::tempdir().unwrap();
        for (len, with_master) in [(3, true), (3, false), (1, true), (5000, true)] {
            let mut file = StateFile::new(folder.path(), len, with_master).unwrap();
            assert_eq!(file.arrays().map(<[f32]>::len), [len, len, 0]);
            assert!(file.arrays().concat().iter().all(|&x| x == 0.0));
            for (i, array) in file.arrays_mut().into_iter().enumerate() {
                array.fill(1.0 + i as f32);
            }
            file.has_master = with_master;
            let [m, v, master] = file.arrays();
            assert!(m.iter().all(|&x| x == 1.0) && v.iter().all(|&x| x == 2.0));
            assert_eq!(master, vec![3.0; if with_master { len } else { 0 }]);
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a file has a name");
    }

    #[test]
    fn a_folder_that_cannot_hold_the_file_is_an_error() {
        let error = StateFile::new(Path::new("/no/such/folder"), 4, true).unwrap_err();
        assert!(
            error.to_string().contains("of 48 bytes") && error.to_string().contains("/no/such/folder"),
            "{error}"
        );
        // No disk has room for 2^59 bytes.
        let error = StateFile::new(&std::env::temp_dir(), 1 << 56, false).unwrap_err();
        assert!(error.to_string().contains("of 576460752303423488 bytes"), "{error}");
    }
}
