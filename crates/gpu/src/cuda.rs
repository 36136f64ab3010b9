//! NVIDIA cards through the driver's own interface. Libraries are loaded when a card is opened.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result, sys};

use crate::blas::Blas;
use crate::device::{Args, Launch};
use crate::error::{Error, Result};
use crate::libraries;
use crate::nvrtc;
use crate::product::Product;
use crate::sources::FILES;

/// Cubins of CUDA 13 run on drivers that support CUDA 13.
const OLDEST_DRIVER: i32 = 13_000;

pub(crate) struct Cuda {
    pub(crate) name: String,
    context: sys::CUcontext,
    stream: sys::CUstream,
    arch: String,
    cache: PathBuf,
    /// Functions by `file/name`; a file is compiled when one of its kernels is first launched.
    functions: Mutex<HashMap<&'static str, sys::CUfunction>>,
    modules: Mutex<HashMap<&'static str, sys::CUmodule>>,
    blas: Blas,
}

/// Recorded work that can be run.
#[derive(Clone, Copy)]
pub(crate) struct Recorded(sys::CUgraphExec);

// SAFETY: the driver asks that calls with one graph do not overlap: running is behind the stream's order, destroying behind
// ownership.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}

// SAFETY: the driver's handles may be used by any thread whose current context is theirs, which `enter` sees to; tables
// are behind locks.
unsafe impl Send for Cuda {}
// SAFETY: as above; the stream orders what threads queue.
unsafe impl Sync for Cuda {}

fn said(call: &'static str) -> impl Fn(result::DriverError) -> Error {
    move |error| Error::Driver { call, what: error.to_string() }
}

/// What a call that takes memory says.
fn memory_or(call: &'static str, wanted: usize) -> impl Fn(result::DriverError) -> Error {
    move |error| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            let (free, total) = result::mem_get_info().unwrap_or_default();
            Error::Memory { wanted, free, total }
        }
        _ => said(call)(error),
    }
}

/// A card, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: [i32; 2],
    /// Its memory, bytes.
    pub memory: usize,
}

/// What the driver sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The newest CUDA it supports, `1000 · major + 10 · minor`.
    pub supports: i32,
    /// Its cards, in its order; `CUDA_VISIBLE_DEVICES` hides others.
    pub cards: Vec<Found>,
}

/// Asks the driver.
///
/// # Errors
/// No driver, or one that answers with an error.
pub fn survey() -> Result<Survey> {
    // SAFETY: loading the driver's library has no conditions.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    let mut supports = 0;
    // SAFETY: the driver is loaded and the address valid; this call needs no initialisation.
    unsafe { sys::cuDriverGetVersion(&raw mut supports) }.result().map_err(said("cuDriverGetVersion"))?;
    let count = match result::init() {
        Ok(()) => result::device::get_count().map_err(said("cuDeviceGetCount"))?,
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => 0,
        Err(error) => return Err(said("cuInit")(error)),
    };
    let cards = (0..count).map(describe).collect::<Result<_>>()?;
    Ok(Survey { supports, cards })
}

fn describe(ordinal: i32) -> Result<Found> {
    use sys::CUdevice_attribute_enum as Attribute;
    let device = result::device::get(ordinal).map_err(said("cuDeviceGet"))?;
    let name = result::device::get_name(device).map_err(said("cuDeviceGetName"))?;
    // SAFETY: the device is one of the driver's.
    unsafe {
        let attribute =
            |which| result::device::get_attribute(device, which).map_err(said("cuDeviceGetAttribute"));
        Ok(Found {
            name,
            capability: [
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ],
            memory: result::device::total_mem(device).map_err(said("cuDeviceTotalMem"))?,
        })
    }
}

impl Survey {
    /// The card of this number, if kernels can run on it.
    ///
    /// # Errors
    /// No such card, one that is too old, a driver that is too old.
    pub fn usable(&self, ordinal: usize) -> Result<&Found> {
        let count = self.cards.len();
        let card = self.cards.get(ordinal).ok_or(Error::NoDevice { ordinal, count })?;
        if self.supports < OLDEST_DRIVER {
            return Err(Error::OldDriver { got: self.supports, expected: OLDEST_DRIVER });
        }
        match card.capability {
            [..8, _] => {
                let [major, minor] = card.capability;
                Err(Error::OldDevice { name: card.name.clone(), major, minor })
            }
            _ => Ok(card),
        }
    }
}

/// The architecture whose code a card of this compute capability runs best.
fn arch(major: i32, minor: i32) -> String {
    // Hopper and data-centre Blackwell have instructions of their own, behind an `a`.
    let own = matches!((major, minor), (9, 0) | (10, 0) | (10, 3));
    format!("sm_{major}{minor}{}", if own { "a" } else { "" })
}

impl Cuda {
    pub(crate) fn open(ordinal: usize, given: &[PathBuf], cache: &Path) -> Result<Self> {
        let Found { name, capability: [major, minor], .. } = survey()?.usable(ordinal)?.clone();
        libraries::check(given)?;
        let device = result::device::get(ordinal as i32).map_err(said("cuDeviceGet"))?;
        let opened = |call| {
            let name = name.clone();
            move |error: result::DriverError| match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY | sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
                    Error::Occupied { name, what: error.to_string() }
                }
                _ => said(call)(error),
            }
        };
        // SAFETY: the device is one of the driver's, as is every handle below.
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(opened("cuDevicePrimaryCtxRetain"))?;
            result::ctx::set_current(context).map_err(said("cuCtxSetCurrent"))?;
            // Freed memory stays with the program, so that the next step takes it without asking the system.
            let pool =
                result::device::get_default_mem_pool(device).map_err(said("cuDeviceGetDefaultMemPool"))?;
            let mut keep = u64::MAX;
            result::mem_pool::set_attribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut keep).cast(),
            )
            .map_err(said("cuMemPoolSetAttribute"))?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
                .map_err(said("cuStreamCreate"))?;
            let workspace =
                result::malloc_async(stream, Blas::WORKSPACE).map_err(opened("cuMemAllocAsync"))?;
            Ok(Self {
                name,
                context,
                stream,
                arch: arch(major, minor),
                cache: cache.into(),
                functions: Mutex::default(),
                modules: Mutex::default(),
                blas: Blas::new(workspace)?,
            })
        }
    }

    /// Makes this card's context the thread's.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }.map_err(said("cuCtxSetCurrent"))
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }.map_err(said("cuStreamSynchronize"))
    }

    /// Free and in all. What the pool holds for later counts as taken.
    pub(crate) fn memory(&self) -> Result<[usize; 2]> {
        self.enter()?;
        let (free, total) = result::mem_get_info().map_err(said("cuMemGetInfo"))?;
        Ok([free, total])
    }

    pub(crate) fn alloc(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::malloc_async(self.stream, bytes.max(1)) }
            .map_err(memory_or("cuMemAllocAsync", bytes))
    }

    pub(crate) fn free(&self, at: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: `at` is from `alloc` and freed once; queued work comes first.
        unsafe { result::free_async(at, self.stream) }.map_err(said("cuMemFreeAsync"))
    }

    pub(crate) fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the range lies in an array.
        unsafe { result::memset_d8_async(at, 0, bytes, self.stream) }.map_err(said("cuMemsetD8Async"))
    }

    pub(crate) fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the array has as many bytes. The host's are pageable, so they are staged before the call returns.
        unsafe { result::memcpy_htod_async(at, from, self.stream) }.map_err(said("cuMemcpyHtoDAsync"))
    }

    pub(crate) fn read(&self, at: u64, to: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the array has as many bytes; the copy is waited for.
        unsafe { result::memcpy_dtoh_async(to, at, self.stream) }.map_err(said("cuMemcpyDtoHAsync"))?;
        self.synchronize()
    }

    /// From here on the stream's work is recorded, not done. Other threads' calls are their own business; this one's may not wait.
    pub(crate) fn begin_capture(&self) -> Result<()> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(said("cuStreamBeginCapture"))
    }

    /// What was recorded, ready to run.
    pub(crate) fn end_capture(&self) -> Result<Recorded> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`; the graph is destroyed once, after what runs was made of it.
        unsafe {
            let graph = result::stream::end_capture(self.stream).map_err(said("cuStreamEndCapture"))?;
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).map(Recorded);
            let destroyed = result::graph::destroy(graph).map_err(said("cuGraphDestroy"));
            let made = made.map_err(memory_or("cuGraphInstantiate", 0))?;
            match destroyed {
                Ok(()) => Ok(made),
                Err(error) => self.forget(made).and(Err(error)),
            }
        }
    }

    pub(crate) fn replay(&self, Recorded(graph): Recorded) -> Result<()> {
        self.enter()?;
        // SAFETY: the graph is one of this card's and alive, as is what it reads and writes: `Graph` holds both.
        unsafe { result::graph::launch(graph, self.stream) }.map_err(memory_or("cuGraphLaunch", 0))
    }

    pub(crate) fn forget(&self, Recorded(graph): Recorded) -> Result<()> {
        self.enter()?;
        // SAFETY: as above; it is not used again. The driver waits for a run under way.
        unsafe { result::graph::exec_destroy(graph) }.map_err(said("cuGraphExecDestroy"))
    }

    pub(crate) fn product(&self, product: &Product) -> Result<()> {
        self.enter()?;
        self.blas.product(product, self.stream)
    }

    pub(crate) fn launch(&self, launch: Launch, args: &mut Args) -> Result<()> {
        self.enter()?;
        let fail = |error: result::DriverError| Error::Launch {
            kernel: launch.kernel.into(),
            what: error.to_string(),
        };
        let function = self.function(launch)?;
        let [x, y, z] = launch.grid.map(|n| n as u32);
        // SAFETY: the function is of a module that is never unloaded. The emulator, which runs the same calls in the tests,
        // compares arguments with parameters.
        unsafe {
            if launch.shared > 48 << 10 {
                let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                result::function::set_function_attribute(function, most, launch.shared as i32)
                    .map_err(fail)?;
            }
            let mut pointers: Vec<*mut c_void> = args.pointers();
            result::launch_kernel(
                function,
                (x, y, z),
                (launch.threads, 1, 1),
                launch.shared as u32,
                self.stream,
                &mut pointers,
            )
            .map_err(fail)
        }
    }

    fn function(&self, launch: Launch) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = functions.get(launch.kernel) {
            return Ok(function);
        }
        let (file, name) = launch.file_and_name();
        let missing = |what: String| Error::Launch { kernel: launch.kernel.into(), what };
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(file) {
            Some(&module) => module,
            None => {
                let (_, text) = FILES
                    .iter()
                    .find(|(known, _)| *known == file)
                    .ok_or_else(|| missing("no such file of kernels".into()))?;
                let cubin = nvrtc::compile_cached(file, text, &self.arch, &self.cache)?;
                // SAFETY: the image is a cubin, which says its own size.
                let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
                    .map_err(|error| missing(error.to_string()))?;
                modules.insert(file, module);
                module
            }
        };
        let symbol = CString::new(name).map_err(|_| missing("a name with a zero byte".into()))?;
        // SAFETY: modules are never unloaded.
        let function = unsafe { result::module::get_function(module, symbol) }
            .map_err(|error| missing(error.to_string()))?;
        functions.insert(launch.kernel, function);
        Ok(function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures() {
        let of = |major, minor| arch(major, minor);
        assert_eq!(
            [of(8, 0), of(8, 9), of(9, 0), of(10, 0), of(12, 0)],
            ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"]
        );
    }

    #[test]
    fn a_machine_without_a_driver_gets_an_error() {
        // SAFETY: as in `survey`.
        if !unsafe { sys::is_culib_present() } {
            assert_eq!(Cuda::open(0, &[], Path::new("/tmp")).err(), Some(Error::NoDriver));
        }
    }
}
