//! Compilation of kernels to machine code with NVRTC, and a cache of the results.

use std::ffi::{CStr, CString, c_char};
use std::io::Write;
use std::path::Path;

use cudarc::nvrtc::{result, sys};
use omnigrpo_guard::cache::own_folder;
use omnigrpo_guard::inside;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::sources::PRIMITIVES;

/// Maximum size of a file in the cache, in bytes. The files of this program have a few megabytes.
const MAX_CUBIN_BYTES: u64 = 256 << 20;

/// Machine code of a file, and the report of the assembler.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code, as an image that the driver loads.
    pub cubin: Vec<u8>,
    /// Output of the compiler and the assembler (registers, shared memory and spills of each kernel).
    pub log: String,
}

/// Returns true if NVRTC can be loaded.
#[must_use]
pub fn is_present() -> bool {
    // SAFETY: loading the library runs its initialisers, which have no preconditions.
    unsafe { sys::is_culib_present() }
}

/// Returns the version of NVRTC as `[major, minor]`. Returns an error if NVRTC is missing.
pub fn version() -> Result<[i32; 2]> {
    if !is_present() {
        return Err(Error::Library { library: "libnvrtc", package: "nvidia-cuda-nvrtc" });
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded, and both addresses are valid.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }
        .result()
        .map_err(|error| Error::Driver { call: "nvrtcVersion", what: error.to_string() })?;
    Ok([major, minor])
}

fn options(arch: &str) -> [String; 4] {
    [
        format!("--gpu-architecture={arch}"),
        "-std=c++17".into(),
        "--ptxas-options=-v".into(),
        "-lineinfo".into(),
    ]
}

/// Compiles a file of kernels for an architecture such as `sm_90a`. This does not need a GPU. Returns an error if NVRTC is
/// missing or the text does not compile.
pub fn compile(file: &str, text: &str, arch: &str) -> Result<Compiled> {
    version()?;
    let bad = |log: String| Error::Compile { file: file.into(), arch: arch.into(), log };
    let c = |s: &str| CString::new(s).map_err(|_| bad("the text contains a zero byte".into()));
    let (source, name, header) = (c(text)?, c(&format!("{file}.cu"))?, c(PRIMITIVES)?);
    let headers = [header.as_ptr()];
    let names = [c"prim.cuh".as_ptr()];
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings outlive the program, which is destroyed below.
    unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program,
            source.as_ptr(),
            name.as_ptr(),
            1,
            headers.as_ptr(),
            names.as_ptr(),
        )
    }
    .result()
    .map_err(|error| bad(error.to_string()))?;
    // SAFETY: the program was just created, and the buffers have the sizes that NVRTC reported.
    unsafe {
        let done = result::compile_program(program, &options(arch));
        let log = result::get_program_log(program).map(|log| text_of(&log)).unwrap_or_default();
        let compiled = done.and_then(|()| {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &raw mut size).result()?;
            let mut cubin = vec![0u8; size];
            sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast()).result()?;
            Ok(cubin)
        });
        let _ = result::destroy_program(program);
        match compiled {
            Ok(cubin) => Ok(Compiled { cubin, log }),
            Err(error) => Err(bad(if log.trim().is_empty() { error.to_string() } else { log })),
        }
    }
}

fn text_of(log: &[c_char]) -> String {
    // `c_char` is i8 on x86-64 and u8 on aarch64.
    let bytes: Vec<u8> = log.iter().flat_map(|byte| byte.to_ne_bytes()).collect();
    CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns the result of [`compile`] from `cache`, or compiles the file and stores the result there.
///
/// The name of a file in the cache is a hash of the text, the architecture, the options and the compiler's version. Files appear
/// atomically. The folder must belong to the user ([`own_folder`]). If the content of a file differs from the content that was
/// stored, the kernels are compiled again.
///
/// # Errors
/// Returns the errors of [`compile`]. If the cache cannot be written, this is not an error: the next start compiles the file
/// again.
pub fn compile_cached(file: &str, text: &str, arch: &str, cache: &Path) -> Result<Vec<u8>> {
    let mut hash = Sha256::new();
    for part in [PRIMITIVES, text, &options(arch).join(" "), &format!("{:?}", version()?)] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let hash: String = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    cached(cache, &format!("{file}-{arch}-{hash}.cubin"), || Ok(compile(file, text, arch)?.cubin))
}

/// Returns the content of a file in the cache. Creates the file if it is missing or was altered.
fn cached(cache: &Path, name: &str, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    let is_own = own_folder(cache).is_ok();
    if let Some(cubin) = is_own.then(|| load(cache, name)).flatten() {
        return Ok(cubin);
    }
    let cubin = make()?;
    if is_own {
        let _ = store(cache, name, &cubin);
    }
    Ok(cubin)
}

/// Returns the last bytes of a file in the cache: a hash of its name, the length of its code and the code.
fn seal(name: &str, cubin: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name);
    hash.update((cubin.len() as u64).to_le_bytes());
    hash.update(cubin);
    hash.finalize().into()
}

fn load(cache: &Path, name: &str) -> Option<Vec<u8>> {
    let mut cubin = inside::read(cache, name, MAX_CUBIN_BYTES).ok()?;
    let sealed = cubin.split_off(cubin.len().checked_sub(32)?);
    (sealed == seal(name, &cubin)).then_some(cubin)
}

fn store(cache: &Path, name: &str, cubin: &[u8]) -> std::io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(cache)?;
    file.write_all(cubin)?;
    file.write_all(&seal(name, cubin))?;
    file.as_file().sync_all()?;
    file.persist(cache.join(name))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_stored_is_loaded() {
        let place = tempfile::tempdir().unwrap();
        let cache = place.path().join("kernels");
        let (name, code) = ("norm-sm_90a-00.cubin", b"\x7fELF and so on".to_vec());
        let made = std::cell::Cell::new(0);
        let get = |name: &str| {
            cached(&cache, name, || {
                made.set(made.get() + 1);
                Ok(code.clone())
            })
            .unwrap()
        };
        assert_eq!((get(name), made.get()), (code.clone(), 1));
        assert_eq!((get(name), made.get()), (code.clone(), 1), "from the cache");
        let path = cache.join(name);
        let whole = std::fs::read(&path).unwrap();
        let mut wrong = vec![Vec::new(), code.clone(), [&whole[..], b"x"].concat()];
        wrong.extend((0..whole.len()).map(|len| whole[..len].to_vec()));
        wrong.extend((0..whole.len()).map(|at| {
            let mut altered = whole.clone();
            altered[at] ^= 1;
            altered
        }));
        for (at, wrong) in wrong.iter().enumerate() {
            std::fs::write(&path, wrong).unwrap();
            assert_eq!((get(name), made.get()), (code.clone(), 2 + at), "compiled again");
            assert_eq!(std::fs::read(&path).unwrap(), whole, "and stored");
        }
        // A file that was stored under the name of another file must not be used.
        let before = made.get();
        std::fs::copy(&path, cache.join("head-sm_90a-00.cubin")).unwrap();
        assert_eq!((get("head-sm_90a-00.cubin"), made.get()), (code.clone(), before + 1));
    }

    #[cfg(unix)]
    #[test]
    fn a_cache_that_is_a_link_is_neither_read_nor_written() {
        let place = tempfile::tempdir().unwrap();
        let (victim, cache) = (place.path().join("victim"), place.path().join("kernels"));
        std::fs::create_dir(&victim).unwrap();
        std::os::unix::fs::symlink(&victim, &cache).unwrap();
        store(&victim, "a.cubin", b"planted").unwrap();
        assert_eq!(cached(&cache, "a.cubin", || Ok(b"own".to_vec())).unwrap(), b"own");
        assert_eq!(load(&victim, "a.cubin").unwrap(), b"planted");
    }
}
