//! NVIDIA GPUs, used through the driver API. Libraries are loaded when a GPU is opened.

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

/// Oldest supported driver. The kernels are cubins of CUDA 13, which need a driver that supports CUDA 13.
const OLDEST_DRIVER: i32 = 13_000;

pub(crate) struct Cuda {
    pub(crate) name: String,
    /// Bytes of shared memory that a block can have.
    pub(crate) most_shared: usize,
    context: sys::CUcontext,
    stream: sys::CUstream,
    arch: String,
    cache: PathBuf,
    /// Functions by `file/name`. A file is compiled when one of its kernels is first launched.
    functions: Mutex<HashMap<&'static str, sys::CUfunction>>,
    modules: Mutex<HashMap<&'static str, sys::CUmodule>>,
    blas: Blas,
}

/// Handle of recorded work that can be replayed.
#[derive(Clone, Copy)]
pub(crate) struct Recorded(sys::CUgraphExec);

// SAFETY: the driver requires that calls with one graph do not overlap. The stream orders the launches, and ownership prevents
// destruction during use.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}

// SAFETY: any thread may use the handles if their context is its current context, which `enter` ensures. Tables are behind locks.
unsafe impl Send for Cuda {}
// SAFETY: as above. The stream orders the work that threads queue.
unsafe impl Sync for Cuda {}

fn said(call: &'static str) -> impl Fn(result::DriverError) -> Error {
    move |error| Error::Driver { call, what: error.to_string() }
}

/// Converts the error of a call that allocates memory.
fn memory_or(call: &'static str, wanted: usize) -> impl Fn(result::DriverError) -> Error {
    move |error| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            let (free, total) = result::mem_get_info().unwrap_or_default();
            Error::Memory { wanted, free, total }
        }
        _ => said(call)(error),
    }
}

/// A GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub name: String,
    pub capability: [i32; 2],
    /// Size of the memory in bytes.
    pub memory: usize,
}

/// The CUDA version and the GPUs that the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Newest CUDA version that the driver supports, `1000 · major + 10 · minor`.
    pub supports: i32,
    /// GPUs in the driver's order, without GPUs that `CUDA_VISIBLE_DEVICES` hides.
    pub cards: Vec<Found>,
}

/// Queries the driver. Returns an error if the driver is missing or reports an error.
pub fn survey() -> Result<Survey> {
    // SAFETY: loading the driver's library has no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    let mut supports = 0;
    // SAFETY: the driver is loaded and the address is valid. This call needs no initialisation.
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
    // SAFETY: the driver returned this device.
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
    /// Returns the GPU with this number if kernels can run on it. Returns an error if the GPU does not exist, or if the GPU or
    /// the driver is too old.
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

/// Returns the architecture whose code runs best on a GPU of this compute capability.
fn arch(major: i32, minor: i32) -> String {
    // Hopper and data-centre Blackwell have architecture-specific instructions. The suffix `a` enables them.
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
        // SAFETY: the driver returned the device and all handles below.
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(opened("cuDevicePrimaryCtxRetain"))?;
            result::ctx::set_current(context).map_err(said("cuCtxSetCurrent"))?;
            // The pool keeps freed memory, so that the next step can allocate it without a system call.
            let pool =
                result::device::get_default_mem_pool(device).map_err(said("cuDeviceGetDefaultMemPool"))?;
            let mut keep = u64::MAX;
            result::mem_pool::set_attribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut keep).cast(),
            )
            .map_err(said("cuMemPoolSetAttribute"))?;
            let most_shared = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
            let most_shared =
                result::device::get_attribute(device, most_shared).map_err(said("cuDeviceGetAttribute"))?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
                .map_err(said("cuStreamCreate"))?;
            let workspace =
                result::malloc_async(stream, Blas::WORKSPACE).map_err(opened("cuMemAllocAsync"))?;
            Ok(Self {
                name,
                most_shared: most_shared as usize,
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

    /// Makes this GPU's context the current context of the thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }.map_err(said("cuCtxSetCurrent"))
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }.map_err(said("cuStreamSynchronize"))
    }

    /// Returns the numbers of free and total bytes. Memory that the pool keeps counts as used.
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
        // SAFETY: `at` is from `alloc` and is freed only once. Queued work runs first.
        unsafe { result::free_async(at, self.stream) }.map_err(said("cuMemFreeAsync"))
    }

    pub(crate) fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the range is inside an array.
        unsafe { result::memset_d8_async(at, 0, bytes, self.stream) }.map_err(said("cuMemsetD8Async"))
    }

    pub(crate) fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the array has at least as many bytes. Host memory is pageable, so the driver copies it to a buffer before the
        // call returns.
        unsafe { result::memcpy_htod_async(at, from, self.stream) }.map_err(said("cuMemcpyHtoDAsync"))
    }

    pub(crate) fn read(&self, at: u64, to: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the array has at least as many bytes, and the next line waits for the copy.
        unsafe { result::memcpy_dtoh_async(to, at, self.stream) }.map_err(said("cuMemcpyDtoHAsync"))?;
        self.synchronize()
    }

    /// Starts recording the stream's work instead of executing it. Calls of other threads are unaffected. Calls of this thread
    /// must not wait for the GPU.
    pub(crate) fn begin_capture(&self) -> Result<()> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(said("cuStreamBeginCapture"))
    }

    /// Ends the recording, and returns the recorded work, ready for replay.
    pub(crate) fn end_capture(&self) -> Result<Recorded> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`. The graph is destroyed once, after its instantiation.
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
        // SAFETY: the graph belongs to this GPU and is alive. Its inputs and outputs are alive too, because `Graph` keeps them.
        unsafe { result::graph::launch(graph, self.stream) }.map_err(memory_or("cuGraphLaunch", 0))
    }

    pub(crate) fn forget(&self, Recorded(graph): Recorded) -> Result<()> {
        self.enter()?;
        // SAFETY: as above; the graph is not used again. The driver waits for a launch that is in progress.
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
        // SAFETY: the function belongs to a module that is never unloaded. The tests run the same calls on the emulator, which
        // compares the arguments with the kernel's parameters.
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
                    .ok_or_else(|| missing("the file of kernels does not exist".into()))?;
                let cubin = nvrtc::compile_cached(file, text, &self.arch, &self.cache)?;
                // SAFETY: the image is a cubin, which states its own size.
                let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
                    .map_err(|error| missing(error.to_string()))?;
                modules.insert(file, module);
                module
            }
        };
        let symbol = CString::new(name).map_err(|_| missing("the name contains a zero byte".into()))?;
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
