//! CUDA's libraries, found where they are rather than where the loader looks alone.

use std::path::{Path, PathBuf};

/// Folders in which CUDA's libraries may be: those given, their `lib64` and `lib`, and the folders `nvidia/*/lib` that Python
/// packages make below them.
#[must_use]
pub fn folders(given: &[PathBuf]) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for folder in given {
        all.push(folder.clone());
        all.extend(["lib64", "lib"].map(|name| folder.join(name)));
        let packages = std::fs::read_dir(folder.join("nvidia")).into_iter().flatten().flatten();
        all.extend(packages.map(|package| package.path().join("lib")));
    }
    all.retain(|folder| folder.is_dir());
    all
}

/// Loads a library by its full path, so that loading it by name finds it. Whether one was found.
pub(crate) fn preload(stem: &str, folders: &[PathBuf]) -> bool {
    folders.iter().any(|folder| newest(stem, folder).is_some_and(|path| keep(&path)))
}

/// `lib<stem>.so.<number>` of the highest number.
fn newest(stem: &str, folder: &Path) -> Option<PathBuf> {
    let prefix = format!("lib{stem}.so.");
    let version = |path: &PathBuf| -> Option<u32> {
        path.file_name()?.to_str()?.strip_prefix(&prefix)?.split('.').next()?.parse().ok()
    };
    let files = std::fs::read_dir(folder).ok()?.flatten().map(|file| file.path());
    files.filter(|path| version(path).is_some()).max_by_key(version)
}

fn keep(path: &Path) -> bool {
    // SAFETY: CUDA's libraries have initialisers without conditions. It stays loaded for good.
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
        assert_eq!(newest("nvrtc", &lib), Some(lib.join("libnvrtc.so.13")));
        assert_eq!(newest("cublasLt", &lib), None);
        assert!(!preload("nvrtc", &[lib]), "an empty file is no library");
    }
}
