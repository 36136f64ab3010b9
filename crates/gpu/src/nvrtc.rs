//! Kernel text to machine code, by NVRTC, and a cache of it.

use std::ffi::{CStr, CString, c_char};
use std::io::Write;
use std::path::Path;

use cudarc::nvrtc::{result, sys};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::sources::PRIMITIVES;

/// Machine code and the assembler's report (registers, shared memory, spills of each kernel; empty from the cache).
#[derive(Clone, Debug)]
pub struct Compiled {
    /// An image for the driver.
    pub cubin: Vec<u8>,
    /// What the compiler and the assembler said.
    pub log: String,
}

/// Whether NVRTC can be loaded.
#[must_use]
pub fn is_present() -> bool {
    // SAFETY: loading the library runs its initialisers, which have no conditions.
    unsafe { sys::is_culib_present() }
}

/// Its version, `[major, minor]`.
///
/// # Errors
/// No NVRTC.
pub fn version() -> Result<[i32; 2]> {
    if !is_present() {
        return Err(Error::Library { library: "libnvrtc", package: "nvidia-cuda-nvrtc" });
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there, and both addresses are valid.
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

/// Compiles a file of kernels for an architecture such as `sm_90a`. Needs no card.
///
/// # Errors
/// No NVRTC, text that does not compile.
pub fn compile(file: &str, text: &str, arch: &str) -> Result<Compiled> {
    version()?;
    let bad = |log: String| Error::Compile { file: file.into(), arch: arch.into(), log };
    let c = |s: &str| CString::new(s).map_err(|_| bad("a zero byte in the text".into()));
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
    // SAFETY: the program was just created; buffers have the sizes that were asked for.
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
    let bytes: Vec<u8> = log.iter().map(|&byte| byte.cast_unsigned()).collect();
    CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

/// As [`compile`], from `cache` where it has been compiled before. The name of a file in the cache is a hash of the text, the
/// architecture, the options and the compiler's version; files appear there at once.
///
/// # Errors
/// As [`compile`]. A cache that cannot be written is no error: the next start compiles again.
pub fn compile_cached(file: &str, text: &str, arch: &str, cache: &Path) -> Result<Vec<u8>> {
    let mut hash = Sha256::new();
    for part in [PRIMITIVES, text, &options(arch).join(" "), &format!("{:?}", version()?)] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let hash: String = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    let path = cache.join(format!("{file}-{arch}-{hash}.cubin"));
    if let Ok(cubin) = std::fs::read(&path)
        && cubin.starts_with(b"\x7fELF")
    {
        return Ok(cubin);
    }
    let cubin = compile(file, text, arch)?.cubin;
    let _ = store(&path, &cubin);
    Ok(cubin)
}

fn store(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(cubin)?;
    file.persist(path)?;
    Ok(())
}
