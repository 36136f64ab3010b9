//! Search for CUDA's libraries, including folders that the system loader does not search.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A library that GPU operations need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// File name of the library.
    pub name: &'static str,
    /// Python package that contains the library.
    pub package: &'static str,
    pub found: bool,
    /// Path of the library's file, if known.
    pub path: Option<PathBuf>,
}

/// Loads the CUDA libraries that GPU operations need. A library is loaded from [`folders`] if it is found there, otherwise by the
/// system loader.
#[must_use]
pub fn libraries(given: &[PathBuf]) -> [Library; 2] {
    let folders = folders(given);
    // NVRTC opens this library by name during compilation.
    preload("nvrtc-builtins", &folders);
    let library = |name, stem, package, is_present: unsafe fn() -> bool| {
        let path = preload(stem, &folders);
        // SAFETY: loading a CUDA library runs its initialisers, which have no preconditions.
        let found = path.is_some() || unsafe { is_present() };
        Library { name, package, found, path }
    };
    [
        library("libnvrtc", "nvrtc", "nvidia-cuda-nvrtc", cudarc::nvrtc::sys::is_culib_present),
        library("libcublasLt", "cublasLt", "nvidia-cublas", cudarc::cublaslt::sys::is_culib_present),
    ]
}

/// Loads all libraries. Returns an error if one is missing.
pub(crate) fn check(given: &[PathBuf]) -> Result<()> {
    let missing = libraries(given).into_iter().find(|library| !library.found);
    missing.map_or(Ok(()), |Library { name, package, .. }| Err(Error::Library { library: name, package }))
}

/// Returns the folders that may contain CUDA's libraries.
///
/// These are the given folders, their `lib64` and `lib`, and the folders `nvidia/*/lib` of Python packages. The packages are
/// searched directly below the given folders, and below the packages of a Python that is installed there.
#[must_use]
pub fn folders(given: &[PathBuf]) -> Vec<PathBuf> {
    let below = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut all = Vec::new();
    for folder in given {
        all.push(folder.clone());
        all.extend(["lib64", "lib"].map(|name| folder.join(name)));
        let pythons = below(folder.join("lib"))
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python")));
        let sites =
            pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name)));
        for site in std::iter::once(folder.clone()).chain(sites) {
            let mut packages: Vec<_> =
                below(site.join("nvidia")).map(|package| package.join("lib")).collect();
            packages.sort();
            all.extend(packages);
        }
    }
    all.retain(|folder| folder.is_dir());
    all
}

/// Loads a library by its full path, so that a later load by name finds it. Returns the path of its file if it was found.
pub(crate) fn preload(stem: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    folders.iter().filter_map(|folder| newest(stem, folder)).find(|path| keep(path))
}

/// Finds the file `lib<stem>.so.<number>` with the highest number.
fn newest(stem: &str, folder: &Path) -> Option<PathBuf> {
    let prefix = format!("lib{stem}.so.");
    let version = |path: &PathBuf| -> Option<u32> {
        path.file_name()?.to_str()?.strip_prefix(&prefix)?.split('.').next()?.parse().ok()
    };
    let files = std::fs::read_dir(folder).ok()?.flatten().map(|file| file.path());
    files.filter(|path| version(path).is_some()).max_by_key(version)
}

fn keep(path: &Path) -> bool {
    // SAFETY: the initialisers of CUDA's libraries have no preconditions. The library is never unloaded.
    match unsafe { libloading::Library::new(path) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_python_packages_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).unwrap();
        for name in ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.so.x"] {
            std::fs::write(lib.join(name), "").unwrap();
        }
        assert_eq!(
            folders(&[dir.path().into(), "/nowhere/at/all".into()]),
            [dir.path().to_path_buf(), lib.clone()]
        );
        let site = dir.path().join("env/lib/python3.12/site-packages/nvidia/cublas/lib");
        std::fs::create_dir_all(&site).unwrap();
        let env = dir.path().join("env");
        assert_eq!(folders(std::slice::from_ref(&env)), [env.clone(), env.join("lib"), site]);
        assert_eq!(newest("nvrtc", &lib), Some(lib.join("libnvrtc.so.13")));
        assert_eq!(newest("cublasLt", &lib), None);
        assert_eq!(preload("nvrtc", &[lib]), None, "an empty file is no library");
    }
}
