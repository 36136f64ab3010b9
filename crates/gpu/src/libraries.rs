//! CUDA's libraries: search, loading and versions.
//!
//! Functions are bound from the library that the search found. Binding by name could give another file: `libnvrtc.so` on the
//! loader's path may belong to another version of CUDA. A library must not be newer than the driver in its major number.

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};

use crate::blas::{self, BlasFunctions};
use crate::error::{Error, Result};
use crate::nvrtc::Nvrtc;

/// Oldest supported major version of CUDA.
pub(crate) const OLDEST: i32 = 12;
/// Newest major version whose file names are tried on the system loader's path.
const NEWEST: i32 = 15;

/// Declares a table of the functions of a library, with the names that the functions have there.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($name:ident($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            pub(crate) fn bind(library: &libloading::Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of the library's headers. Libraries stay loaded until the program ends.
                unsafe { Ok(Self { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* }) }
            }
        }
    };
}
pub(crate) use functions;

/// A library of CUDA, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// File name of the library, without the ending `.so` and its version.
    pub name: &'static str,
    /// Python package that contains the library, without its ending for a version of CUDA.
    pub package: &'static str,
    /// Major version in the name of the file, if it is not that of CUDA.
    pub major: Option<i32>,
}

pub(crate) const NVRTC: Wanted = Wanted { name: "libnvrtc", package: "nvidia-cuda-nvrtc", major: None };
pub(crate) const CUBLASLT: Wanted = Wanted { name: "libcublasLt", package: "nvidia-cublas", major: None };
pub(crate) const NCCL: Wanted = Wanted { name: "libnccl", package: "nvidia-nccl", major: Some(2) };

/// A library that GPU operations need, and what was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    pub name: &'static str,
    /// Path of the loaded file, and the version that the library itself states, as `[major, minor]`.
    pub found: Result<(PathBuf, [i32; 2])>,
}

/// Loads the CUDA libraries that GPU operations need and asks for their versions. `driver` is the newest version that the driver
/// supports, or `None` if there is no driver.
pub fn libraries(given: &[PathBuf], driver: Option<i32>) -> [Library; 2] {
    let nvrtc = Nvrtc::load(given, driver).map(|nvrtc| (nvrtc.path().to_owned(), nvrtc.version()));
    let blas = load_blas(given, driver).map(|(functions, path)| (path, blas::version(&functions)));
    [Library { name: NVRTC.name, found: nvrtc }, Library { name: CUBLASLT.name, found: blas }]
}

/// Loads cuBLASLt. Returns its functions and the path of its file.
pub(crate) fn load_blas(given: &[PathBuf], driver: Option<i32>) -> Result<(BlasFunctions, PathBuf)> {
    let (functions, path) = load(CUBLASLT, given, driver, BlasFunctions::bind, |functions| {
        functions.cublasLtGetVersion as *const c_void
    })?;
    suits(CUBLASLT, &path, blas::version(&functions), driver)?;
    Ok((functions, path))
}

/// Loads the first suitable file of a library and binds its functions. `address` returns the address of one of the functions.
pub(crate) fn load<T>(
    wanted: Wanted,
    given: &[PathBuf],
    driver: Option<i32>,
    bind: impl Fn(&libloading::Library) -> std::result::Result<T, libloading::Error>,
    address: impl Fn(&T) -> *const c_void,
) -> Result<(T, PathBuf)> {
    let newest = driver.map_or(i32::MAX, |driver| driver / 1000);
    let (oldest, newest) = wanted.major.map_or((OLDEST, newest), |own| (own, own));
    let files = folders(given).into_iter().flat_map(|folder| versions(wanted.name, &folder));
    let by_name = (oldest..=newest.min(NEWEST))
        .rev()
        .map(|major| (major, PathBuf::from(format!("{}.so.{major}", wanted.name))));
    let (mut too_new, mut damaged) = (None, None);
    for (major, file) in files.chain(by_name) {
        if major < oldest || wanted.major.is_some_and(|own| major != own) {
            continue;
        }
        // A file that is too new is not loaded, since its initialisers may fail.
        if major > newest {
            if file.is_absolute() {
                too_new = too_new.or(Some((file, major)));
            }
            continue;
        }
        // SAFETY: the initialisers of CUDA's libraries have no preconditions.
        let library = match unsafe { libloading::Library::new(&file) } {
            Ok(library) => library,
            // Most names are absent from the loader's path.
            Err(_) if !file.is_absolute() => continue,
            Err(error) => {
                damaged = damaged.or(Some((file, error.to_string())));
                continue;
            }
        };
        match bind(&library) {
            Ok(functions) => {
                // Functions of the library are used until the program ends.
                std::mem::forget(library);
                let path = path_of(address(&functions)).unwrap_or(file);
                return Ok((functions, path));
            }
            Err(error) => damaged = damaged.or(Some((file, error.to_string()))),
        }
    }
    Err(match (too_new, damaged) {
        (_, Some((path, what))) => Error::DamagedLibrary { path, what },
        (Some((path, major)), None) => too_new_error(wanted, path, [major, 0], driver),
        (None, None) => Error::Library { library: wanted.name, package: package(wanted, driver) },
    })
}

/// Checks the version that a loaded library states.
pub(crate) fn suits(wanted: Wanted, path: &Path, version: [i32; 2], driver: Option<i32>) -> Result<()> {
    match driver {
        Some(driver) if version[0] > driver / 1000 => {
            Err(too_new_error(wanted, path.to_owned(), version, Some(driver)))
        }
        _ => Ok(()),
    }
}

fn too_new_error(wanted: Wanted, path: PathBuf, version: [i32; 2], driver: Option<i32>) -> Error {
    let supports = driver.unwrap_or_default();
    Error::NewLibrary { path, version, supports, package: package(wanted, driver) }
}

/// Returns what to install with pip.
pub(crate) fn package(wanted: Wanted, driver: Option<i32>) -> String {
    match driver.map(|driver| driver / 1000) {
        major if wanted.major.is_some() => format!("{}-cu{}", wanted.package, major.unwrap_or(13)),
        Some(12) => format!("{}-cu12", wanted.package),
        Some(major @ 14..) => format!("{}>={major},<{}", wanted.package, major + 1),
        _ => format!("{}>=13,<14", wanted.package),
    }
}

/// Returns the folders that may contain CUDA's libraries.
///
/// These are the given folders, their `lib64` and `lib`, and the folders `nvidia/*/lib` of Python packages. The packages are
/// searched directly below the given folders, and below the packages of a Python that is installed there.
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

/// Returns the files `<name>.so.<number>…` of a folder with their numbers, the highest first.
pub(crate) fn versions(name: &str, folder: &Path) -> Vec<(i32, PathBuf)> {
    let prefix = format!("{name}.so.");
    let version = |path: &Path| -> Option<i32> {
        path.file_name()?.to_str()?.strip_prefix(&prefix)?.split('.').next()?.parse().ok()
    };
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
    let mut all: Vec<_> = files.filter_map(|path| Some((version(&path)?, path))).collect();
    all.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    all
}

/// Returns the file of the library that contains a function.
#[cfg(unix)]
fn path_of(function: *const c_void) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the function accepts every address and writes only to `found`, which is zeroed and so always valid.
    let found = unsafe { (libc::dladdr(function, found.as_mut_ptr()) != 0).then(|| found.assume_init()) }?;
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name belongs to the loader and lives as long as the library, which is never unloaded.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
}

#[cfg(not(unix))]
fn path_of(_: *const c_void) -> Option<PathBuf> {
    None
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
        let both = [(13, lib.join("libnvrtc.so.13")), (12, lib.join("libnvrtc.so.12"))];
        assert_eq!(versions("libnvrtc", &lib), both);
        assert_eq!(versions("libcublasLt", &lib), []);
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libnvrtc.so.12");
        std::fs::write(&path, "no library").unwrap();
        let error = Nvrtc::load(&[dir.path().into()], Some(12_040)).err();
        assert!(matches!(&error, Some(Error::DamagedLibrary { path: got, .. }) if *got == path), "{error:?}");
    }

    #[test]
    fn a_library_that_is_newer_than_the_driver_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        // No system has a library of this name on the loader's path, where an older version would be taken.
        let wanted = Wanted { name: "libomnigrpo_test", package: "nvidia-cublas", major: None };
        let path = dir.path().join("libomnigrpo_test.so.13");
        std::fs::write(&path, "").unwrap();
        let error = load(wanted, &[dir.path().into()], Some(12_080), |_| Ok(()), |()| std::ptr::null()).err();
        let package = "nvidia-cublas-cu12".to_owned();
        let expected = |version| Error::NewLibrary {
            path: path.clone(),
            version,
            supports: 12_080,
            package: package.clone(),
        };
        assert_eq!(error, Some(expected([13, 0])));
        // The version that a library states decides, not that of its file.
        let error = suits(wanted, &path, [13, 2], Some(12_080)).err();
        assert_eq!(error, Some(expected([13, 2])));
        assert_eq!(suits(wanted, &path, [12, 9], Some(12_080)), Ok(()));
    }

    #[test]
    fn packages_follow_the_driver() {
        let names = [None, Some(12_080), Some(13_000), Some(14_010)].map(|driver| package(NVRTC, driver));
        let expected = [
            "nvidia-cuda-nvrtc>=13,<14",
            "nvidia-cuda-nvrtc-cu12",
            "nvidia-cuda-nvrtc>=13,<14",
            "nvidia-cuda-nvrtc>=14,<15",
        ];
        assert_eq!(names, expected);
        let names = [None, Some(12_080), Some(13_000)].map(|driver| package(NCCL, driver));
        assert_eq!(names, ["nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13"]);
    }
}
