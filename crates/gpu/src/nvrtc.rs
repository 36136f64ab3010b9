//! Compilation of kernels to machine code with NVRTC, and a cache of the results.

use std::ffi::{CString, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cudarc::nvrtc::sys;
use omnigrpo_guard::cache::own_folder;
use omnigrpo_guard::inside;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::libraries::{self, functions};
use crate::sources::PRIMITIVES;

functions! {
    /// Functions of NVRTC.
    Functions {
        nvrtcVersion(*mut c_int, *mut c_int) -> sys::nvrtcResult;
        nvrtcGetNumSupportedArchs(*mut c_int) -> sys::nvrtcResult;
        nvrtcGetSupportedArchs(*mut c_int) -> sys::nvrtcResult;
        nvrtcCreateProgram(*mut sys::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> sys::nvrtcResult;
        nvrtcCompileProgram(sys::nvrtcProgram, c_int, *const *const c_char) -> sys::nvrtcResult;
        nvrtcGetProgramLogSize(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
        nvrtcGetProgramLog(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
        nvrtcGetCUBINSize(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
        nvrtcGetCUBIN(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
        nvrtcGetPTXSize(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
        nvrtcGetPTX(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
        nvrtcDestroyProgram(*mut sys::nvrtcProgram) -> sys::nvrtcResult;
    }
}

/// Sets the function that NVRTC calls about once in a second while it compiles, with the pointer that is given here. A result of 1
/// ends the compilation.
type SetFlowCallback = unsafe extern "C" fn(
    sys::nvrtcProgram,
    extern "C" fn(*const Instant, *mut c_void) -> c_int,
    *const Instant,
) -> sys::nvrtcResult;

/// True at the end of the process. Compilations then end.
pub(crate) static ENDS: AtomicBool = AtomicBool::new(false);

extern "C" fn is_over(until: *const Instant, _: *mut c_void) -> c_int {
    // SAFETY: `compile` gives this address to NVRTC, and the instant lives as long as the compilation, or the address is null.
    let until = unsafe { until.as_ref() };
    c_int::from(ENDS.load(Ordering::Acquire) || until.is_some_and(|until| Instant::now() >= *until))
}

/// Maximum size of a file in the cache, in bytes. The files of this program have a few megabytes.
const MAX_CUBIN_BYTES: u64 = 256 << 20;

/// Code of a file, and the report of the assembler.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code, or PTX that ends with a zero byte for an architecture such as `compute_90`. The driver loads both.
    pub image: Vec<u8>,
    /// Output of the compiler and the assembler (registers, shared memory and spills of each kernel).
    pub log: String,
}

/// NVIDIA's compiler at run time. It needs no GPU.
#[derive(Clone)]
pub struct Nvrtc {
    functions: Functions,
    /// Versions before 12.8 lack this function.
    set_flow_callback: Option<SetFlowCallback>,
    version: [i32; 2],
    path: PathBuf,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "NVRTC {:?} in {}", self.version, self.path.display())
    }
}

fn failed(call: &'static str, result: sys::nvrtcResult) -> Result<()> {
    result.result().map_err(|error| Error::Driver { call, what: format!("{:?}", error.0) })
}

impl Nvrtc {
    /// Loads NVRTC from `given` folders ([`libraries::folders`]) or the system loader's path. `driver` is the newest CUDA version
    /// that the driver supports, `1000 · major + 10 · minor`, or `None` if there is no driver.
    ///
    /// # Errors
    /// Returns an error if NVRTC is missing, damaged, or newer than the driver.
    pub fn load(given: &[PathBuf], driver: Option<i32>) -> Result<Self> {
        let bind = |library: &libloading::Library| {
            // SAFETY: the type is that of the library's header.
            let set = unsafe { library.get::<SetFlowCallback>(b"nvrtcSetFlowCallback\0") };
            Ok((Functions::bind(library)?, set.ok().map(|set| *set)))
        };
        let ((functions, set_flow_callback), path) =
            libraries::load(libraries::NVRTC, given, driver, bind, |(functions, _)| {
                functions.nvrtcVersion as *const c_void
            })?;
        let mut version = [0; 2];
        let [major, minor] = &mut version;
        // SAFETY: both addresses are valid.
        failed("nvrtcVersion", unsafe { (functions.nvrtcVersion)(major, minor) })?;
        libraries::suits(libraries::NVRTC, &path, version, driver)?;
        // NVRTC opens its second library by name, but the loader may not search its folder.
        for (_, file) in
            path.parent().map(|folder| libraries::versions("libnvrtc-builtins", folder)).unwrap_or_default()
        {
            let own = file.to_string_lossy().ends_with(&format!(".so.{}.{}", version[0], version[1]));
            // SAFETY: the library's initialisers have no preconditions.
            if let (true, Ok(library)) = (own, unsafe { libloading::Library::new(&file) }) {
                std::mem::forget(library);
            }
        }
        Ok(Self { functions, set_flow_callback, version, path })
    }

    /// Returns the version that the library states, as `[major, minor]`.
    pub fn version(&self) -> [i32; 2] {
        self.version
    }

    /// Returns the path of the loaded file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the architecture to compile for on a GPU of this compute capability.
    ///
    /// This is the GPU's own architecture, such as `sm_90a`, if the compiler knows it. For a newer GPU, it is the newest known one,
    /// such as `compute_90`: the driver then compiles the PTX.
    pub fn architecture(&self, capability: [i32; 2]) -> Result<String> {
        let mut count = 0;
        // SAFETY: the address is valid.
        failed("nvrtcGetNumSupportedArchs", unsafe {
            (self.functions.nvrtcGetNumSupportedArchs)(&raw mut count)
        })?;
        let mut known = vec![0; usize::try_from(count).unwrap_or_default()];
        // SAFETY: the buffer has as many places as the library reported.
        failed("nvrtcGetSupportedArchs", unsafe {
            (self.functions.nvrtcGetSupportedArchs)(known.as_mut_ptr())
        })?;
        let [major, minor] = capability;
        choose(&known, capability).ok_or_else(|| Error::Driver {
            call: "nvrtcGetSupportedArchs",
            what: format!(
                "NVRTC {}.{} compiles for {known:?}, none of which a GPU of compute capability {major}.{minor} runs",
                self.version[0], self.version[1]
            ),
        })
    }

    /// Compiles a file of kernels for an architecture such as `sm_90a` or `compute_90`.
    ///
    /// # Errors
    /// Returns an error if the text does not compile, and [`Error::Late`] about a second after `until` or the end of the process if the
    /// compilation is not complete then. NVRTC before 12.8 compiles to the end.
    pub fn compile(&self, file: &str, text: &str, arch: &str, until: Option<Instant>) -> Result<Compiled> {
        if until.is_some_and(|until| Instant::now() >= until) {
            return Err(Error::Late { file: file.into() });
        }
        let f = &self.functions;
        let bad = |log: String| Error::Compile { file: file.into(), arch: arch.into(), log };
        let c = |s: &str| CString::new(s).map_err(|_| bad("the text contains a zero byte".into()));
        let (source, name, header) = (c(text)?, c(&format!("{file}.cu"))?, c(PRIMITIVES)?);
        let options = options(arch).iter().map(|option| c(option)).collect::<Result<Vec<_>>>()?;
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let (headers, names) = ([header.as_ptr()], [c"prim.cuh".as_ptr()]);
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings outlive the program, which is destroyed below, and the buffers have the sizes that NVRTC reported.
        unsafe {
            (f.nvrtcCreateProgram)(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                1,
                headers.as_ptr(),
                names.as_ptr(),
            )
            .result()
            .map_err(|error| bad(error.to_string()))?;
            if let Some(set) = self.set_flow_callback {
                // Without the function, the compilation goes on to its end.
                let _ = set(program, is_over, until.as_ref().map_or(std::ptr::null(), std::ptr::from_ref));
            }
            let done = (f.nvrtcCompileProgram)(program, options.len() as c_int, options.as_ptr()).result();
            let log = output(program, f.nvrtcGetProgramLogSize, f.nvrtcGetProgramLog).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            let (size, get) = match arch.starts_with("compute_") {
                true => (f.nvrtcGetPTXSize, f.nvrtcGetPTX),
                false => (f.nvrtcGetCUBINSize, f.nvrtcGetCUBIN),
            };
            let compiled = done.and_then(|()| output(program, size, get));
            let _ = (f.nvrtcDestroyProgram)(&raw mut program);
            match compiled {
                Ok(image) => Ok(Compiled { image, log }),
                Err(error) if error.0 == sys::nvrtcResult::NVRTC_ERROR_CANCELLED => {
                    Err(Error::Late { file: file.into() })
                }
                Err(error) => Err(bad(if log.trim().is_empty() { error.to_string() } else { log })),
            }
        }
    }

    /// Returns the image of [`Self::compile`] from `cache`, or compiles the file and stores the image there.
    ///
    /// The name of a file in the cache is a hash of the text, the architecture, the options and the compiler's version. Files appear
    /// atomically. The folder must belong to the user ([`own_folder`]). If the content of a file differs from the content that was
    /// stored, the kernels are compiled again.
    ///
    /// # Errors
    /// Returns the errors of [`Self::compile`]. If the cache cannot be written, this is not an error: the next start compiles the
    /// file again.
    pub fn compile_cached(
        &self,
        file: &str,
        text: &str,
        arch: &str,
        cache: &Path,
        until: Option<Instant>,
    ) -> Result<Vec<u8>> {
        let mut hash = Sha256::new();
        for part in
            [PRIMITIVES, text, &options(arch).join(" "), &self.version.map(|part| part.to_string()).join(".")]
        {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let hash: String = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let make = || Ok(self.compile(file, text, arch, until)?.image);
        cached(cache, &format!("{file}-{arch}-{hash}.cubin"), make)
    }
}

/// Reads an output of a program through the functions that return its size and its bytes.
///
/// # Safety
/// `program` must exist.
unsafe fn output(
    program: sys::nvrtcProgram,
    size: unsafe extern "C" fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
    get: unsafe extern "C" fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
) -> std::result::Result<Vec<u8>, cudarc::nvrtc::result::NvrtcError> {
    let mut bytes = 0;
    // SAFETY: the program exists, and the buffer has the size that NVRTC reported.
    unsafe {
        size(program, &raw mut bytes).result()?;
        let mut out = vec![0u8; bytes];
        get(program, out.as_mut_ptr().cast()).result()?;
        Ok(out)
    }
}

/// Returns the architecture for a GPU, given the architectures that a compiler knows, such as 90 for 9.0.
fn choose(known: &[i32], [major, minor]: [i32; 2]) -> Option<String> {
    let own = 10 * major + minor;
    if known.contains(&own) {
        // Hopper and data-centre Blackwell have architecture-specific instructions. The suffix `a` enables them.
        let suffix = if matches!(own, 90 | 100 | 103) { "a" } else { "" };
        return Some(format!("sm_{own}{suffix}"));
    }
    known.iter().filter(|&&other| other < own).max().map(|other| format!("compute_{other}"))
}

fn options(arch: &str) -> [String; 4] {
    [format!("-arch={arch}"), "-std=c++17".into(), "--ptxas-options=-v".into(), "-lineinfo".into()]
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

    #[test]
    fn a_gpu_that_the_compiler_does_not_know_gets_ptx_of_the_newest_known_one() {
        let known = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];
        let of = |major, minor| choose(&known, [major, minor]);
        assert_eq!(
            [of(8, 0), of(8, 9), of(9, 0), of(10, 0), of(12, 0), of(13, 0)].map(Option::unwrap),
            ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120", "compute_121"]
        );
        // NVRTC 12.4 on Blackwell.
        assert_eq!(choose(&known[..7], [10, 0]).unwrap(), "compute_90");
        assert_eq!(choose(&known, [7, 0]), None);
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
