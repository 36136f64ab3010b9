//! NVIDIA GPUs, used through the driver API. Libraries are loaded when a GPU is opened.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use cudarc::driver::{result, sys};

use crate::blas::Blas;
use crate::driver::{Driver, Finding, LOGITS, Limits, Queue};
use crate::error::{Error, Result};
use crate::images::Images;
use crate::launchers::{Args, Launch};
use crate::libraries::OLDEST;
use crate::nvml;
use crate::nvrtc::Nvrtc;
use crate::product::Product;
use crate::sources::FILES;
use crate::transfers::PIECE;

/// Oldest supported driver.
const OLDEST_DRIVER: i32 = 1000 * OLDEST;
/// First driver whose graphs have kernels that start early, and first architecture whose kernels can wait.
const EARLY: [i32; 2] = [12_030, 90];
/// Number of launches whose names an error lists.
const REMEMBERED: usize = 16;

pub(crate) struct Cuda {
    name: String,
    limits: Limits,
    /// True if kernels of recorded graphs may start while the kernels before them run.
    starts_early: bool,
    /// Address on the PCI bus.
    bus: String,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Stream of copies that run beside the work of `stream`.
    copies: sys::CUstream,
    /// Default pool of the device.
    pool: sys::CUmemoryPool,
    images: Arc<Images>,
    /// Functions by `file/name`. A file is compiled when one of its kernels is first launched, unless it was compiled ahead.
    functions: Mutex<HashMap<&'static str, Function>>,
    modules: Mutex<HashMap<&'static str, sys::CUmodule>>,
    blas: Blas,
    /// Names of the last launches, the newest first.
    recent: Mutex<VecDeque<&'static str>>,
}

/// A kernel on the device.
struct Function {
    at: sys::CUfunction,
    /// Bytes of dynamic shared memory that its launches may have.
    shared: usize,
}

// SAFETY: any thread may use the handles if their context is its current context, which `enter` ensures. Tables are behind locks.
unsafe impl Send for Cuda {}
// SAFETY: as above. The stream orders the work that threads queue.
unsafe impl Sync for Cuda {}

fn said(call: &'static str) -> impl Fn(result::DriverError) -> Error {
    move |error| Error::Driver { call, what: described(&error) }
}

/// Returns the driver's name and description of an error.
fn described(error: &result::DriverError) -> String {
    match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("error {} of the driver", error.0 as u32),
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

/// Returns the number of an architecture such as `sm_90a` or `compute_90`.
fn number_of(arch: &str) -> i32 {
    let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

/// Returns true for an error of a kernel, which the driver reports at a later call.
fn is_fault(error: &result::DriverError) -> bool {
    use sys::CUresult;
    matches!(
        error.0,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
    )
}

impl Cuda {
    pub(crate) fn open(ordinal: usize, given: &[PathBuf], cache: &Path) -> Result<Self> {
        let survey = survey()?;
        let Found { name, capability, .. } = survey.usable(ordinal)?.clone();
        let nvrtc = Nvrtc::load(given, Some(survey.supports))?;
        let arch = nvrtc.architecture(capability)?;
        let device = result::device::get(ordinal as i32).map_err(said("cuDeviceGet"))?;
        let opened = |call| {
            let name = name.clone();
            move |error: result::DriverError| match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY | sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
                    Error::Occupied { name, what: described(&error) }
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
            use sys::CUdevice_attribute as Attribute;
            let number = |which| {
                let number = result::device::get_attribute(device, which);
                number.map(|number| number as usize).map_err(said("cuDeviceGetAttribute"))
            };
            let limits = Limits {
                multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                block: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
                all: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
                cache: number(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            };
            let make = || result::stream::create(result::stream::StreamKind::NonBlocking);
            let [stream, copies] = [make(), make()].map(|stream| stream.map_err(said("cuStreamCreate")));
            let (stream, copies) = (stream?, copies?);
            let workspace =
                result::malloc_async(stream, Blas::WORKSPACE).map_err(opened("cuMemAllocAsync"))?;
            let mut bus = [0u8; 32];
            sys::cuDeviceGetPCIBusId(bus.as_mut_ptr().cast(), bus.len() as i32, device)
                .result()
                .map_err(said("cuDeviceGetPCIBusId"))?;
            let bus = bus.iter().take_while(|&&byte| byte != 0).map(|&byte| char::from(byte)).collect();
            Ok(Self {
                name,
                limits,
                starts_early: survey.supports >= EARLY[0] && number_of(&arch) >= EARLY[1],
                bus,
                context,
                stream,
                copies,
                pool,
                images: Arc::new(Images::new(nvrtc, arch, cache)),
                functions: Mutex::default(),
                modules: Mutex::default(),
                blas: Blas::new(workspace, given, survey.supports)?,
                recent: Mutex::default(),
            })
        }
    }

    /// Converts an error of a launch. It may tell of a fault of an earlier kernel.
    fn refused(&self, call: &'static str, launch: Launch) -> impl Fn(result::DriverError) -> Error {
        move |error| match is_fault(&error) {
            true => self.said(call)(error),
            false => Error::Launch { kernel: launch.kernel.into(), what: described(&error) },
        }
    }

    /// Makes this GPU's context the current context of the thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }.map_err(self.said("cuCtxSetCurrent"))
    }

    /// Converts an error. An error of a kernel gets the names of the last launches.
    fn said(&self, call: &'static str) -> impl Fn(result::DriverError) -> Error {
        move |error| match is_fault(&error) {
            true => {
                let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
                let kernels = recent.iter().copied().collect::<Vec<_>>().join(", ");
                Error::Fault { call, what: described(&error), kernels }
            }
            false => said(call)(error),
        }
    }

    /// Converts the error of a call that allocates memory.
    fn memory_or(&self, call: &'static str, wanted: usize) -> impl Fn(result::DriverError) -> Error {
        move |error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = result::mem_get_info().unwrap_or_default();
                Error::Memory { wanted, free, total }
            }
            _ => self.said(call)(error),
        }
    }

    /// Stores the name of a launch for the message about a later error.
    fn remember(&self, name: &'static str) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.truncate(REMEMBERED - 1);
        recent.push_front(name);
    }

    /// Returns the freed memory that the pool keeps to the driver.
    fn return_freed(&self) -> Result<()> {
        self.synchronize()?;
        // SAFETY: a default pool lives as long as its device.
        unsafe { result::mem_pool::trim_to(self.pool, 0) }.map_err(self.said("cuMemPoolTrimTo"))
    }

    fn stream_of(&self, queue: Queue) -> sys::CUstream {
        match queue {
            Queue::Main => self.stream,
            Queue::Copies => self.copies,
        }
    }

    /// Returns the function of a launch, which may have as much shared memory as the launch needs.
    fn function(&self, launch: Launch) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match functions.entry(launch.kernel) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Function { at: self.find(launch)?, shared: 48 << 10 }),
        };
        if launch.shared > known.shared {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a module that is never unloaded.
            unsafe { result::function::set_function_attribute(known.at, most, launch.shared as i32) }
                .map_err(self.refused("cuFuncSetAttribute", launch))?;
            known.shared = launch.shared;
        }
        Ok(known.at)
    }

    /// Returns the function with this name. Compiles its file, unless another launch has.
    fn find(&self, launch: Launch) -> Result<sys::CUfunction> {
        let (file, name) = launch.file_and_name();
        let missing = |what: String| Error::Launch { kernel: launch.kernel.into(), what };
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(file) {
            Some(&module) => module,
            None => {
                let at = (FILES.iter().position(|(known, _)| *known == file))
                    .ok_or_else(|| missing("the file of kernels does not exist".into()))?;
                let image = self.images.of(at, None)?;
                // SAFETY: a cubin states its own size, and PTX ends with a zero byte.
                let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
                    .map_err(|error| missing(error.to_string()))?;
                modules.insert(file, module);
                module
            }
        };
        let symbol = CString::new(name).map_err(|_| missing("the name contains a zero byte".into()))?;
        // SAFETY: modules are never unloaded.
        unsafe { result::module::get_function(module, symbol) }.map_err(|error| missing(error.to_string()))
    }
}

impl Driver for Cuda {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn logits(&self) -> [usize; 2] {
        LOGITS
    }

    fn buffer(&self) -> usize {
        PIECE
    }

    fn least_rows(&self) -> usize {
        8
    }

    fn libraries(&self, given: &[PathBuf]) -> Result<(Vec<PathBuf>, Option<i32>)> {
        Ok((given.to_vec(), Some(survey()?.supports)))
    }

    fn health(&self) -> Vec<Finding> {
        let health = nvml::health(&self.bus).into_iter().map(|(name, result)| Finding::new(name, result));
        std::iter::once(Finding::new("kernels for", Ok(self.images.arch.clone()))).chain(health).collect()
    }

    fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream) }.map_err(self.said("cuStreamSynchronize"))
    }

    fn memory(&self) -> Option<[usize; 2]> {
        self.enter().ok()?;
        // Memory that the pool keeps counts as used.
        result::mem_get_info().ok().map(|(free, total)| [free, total])
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        let alloc = || unsafe { result::malloc_async(self.stream, bytes.max(1)) };
        let at = match alloc() {
            // The pool may keep enough memory, but in pieces that are too small.
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                self.return_freed()?;
                alloc()
            }
            done => done,
        };
        at.map_err(self.memory_or("cuMemAllocAsync", bytes))
    }

    fn free(&self, at: u64, _: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: `at` is from `alloc` and is freed only once. Queued work runs first.
        unsafe { result::free_async(at, self.stream) }.map_err(self.said("cuMemFreeAsync"))
    }

    fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the range is inside an array.
        unsafe { result::memset_d8_async(at, 0, bytes, self.stream) }.map_err(self.said("cuMemsetD8Async"))
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the array has at least as many bytes. Host memory is pageable, so the driver copies it to a buffer before the
        // call returns.
        unsafe { result::memcpy_htod_async(at, from, self.stream) }.map_err(self.said("cuMemcpyHtoDAsync"))
    }

    fn read(&self, at: u64, to: &mut [u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the array has at least as many bytes, and the next line waits for the copy.
        unsafe { result::memcpy_dtoh_async(to, at, self.stream) }.map_err(self.said("cuMemcpyDtoHAsync"))?;
        self.synchronize()
    }

    fn pin(&self, bytes: usize) -> Result<*mut u8> {
        self.enter()?;
        // SAFETY: the caller writes the memory before it reads it.
        let at = unsafe { result::malloc_host(bytes, 0) };
        at.map(<*mut c_void>::cast).map_err(|error| Error::Driver {
            call: "cuMemHostAlloc",
            what: format!("{error} (for {bytes} bytes of pinned main memory)"),
        })
    }

    fn unpin(&self, at: *mut u8, _: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: `at` is from `pin` and is freed only once. Its copies are complete.
        unsafe { result::free_host(at.cast()) }.map_err(self.said("cuMemFreeHost"))
    }

    fn mark(&self, queue: Queue) -> Result<u64> {
        use sys::CUevent_flags::{CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING};
        self.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the address is valid, and the stream lives as long as `self`.
        unsafe {
            sys::cuEventCreate(
                &raw mut event,
                CU_EVENT_BLOCKING_SYNC as u32 | CU_EVENT_DISABLE_TIMING as u32,
            )
            .result()
            .map_err(self.said("cuEventCreate"))?;
            result::event::record(event, self.stream_of(queue)).map_err(self.said("cuEventRecord"))?;
        }
        Ok(event as u64)
    }

    fn follow(&self, queue: Queue, event: u64) -> Result<()> {
        self.enter()?;
        let plain = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: `event` is from `mark` and exists; the stream lives as long as `self`.
        unsafe { result::stream::wait_event(self.stream_of(queue), event as sys::CUevent, plain) }
            .map_err(self.said("cuStreamWaitEvent"))
    }

    fn wait_for(&self, event: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: `event` is from `mark` and exists.
        unsafe { result::event::synchronize(event as sys::CUevent) }.map_err(self.said("cuEventSynchronize"))
    }

    fn forget_mark(&self, event: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: `event` is from `mark` and is destroyed only once.
        unsafe { result::event::destroy(event as sys::CUevent) }.map_err(self.said("cuEventDestroy"))
    }

    fn start_read(&self, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the range is inside an array, and the buffer has as many bytes. The caller waits before it uses them.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.copies) }
            .result()
            .map_err(self.said("cuMemcpyDtoHAsync"))
    }

    fn start_write(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: as above.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.copies) }
            .result()
            .map_err(self.said("cuMemcpyHtoDAsync"))
    }

    fn begin_capture(&self) -> Result<()> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(self.said("cuStreamBeginCapture"))
    }

    fn end_capture(&self) -> Result<u64> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`. The graph is destroyed once, after its instantiation.
        unsafe {
            let graph = result::stream::end_capture(self.stream).map_err(self.said("cuStreamEndCapture"))?;
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let destroyed = result::graph::destroy(graph).map_err(self.said("cuGraphDestroy"));
            let made = made.map_err(self.memory_or("cuGraphInstantiate", 0))? as u64;
            match destroyed {
                Ok(()) => Ok(made),
                Err(error) => self.forget(made).and(Err(error)),
            }
        }
    }

    fn replay(&self, recorded: u64) -> Result<()> {
        self.enter()?;
        self.remember("a recorded graph");
        // SAFETY: the graph belongs to this GPU and is alive. Its inputs and outputs are alive too, because `Graph` keeps
        // them. Launches of one graph do not overlap, because the stream orders them.
        unsafe { result::graph::launch(recorded as sys::CUgraphExec, self.stream) }
            .map_err(self.memory_or("cuGraphLaunch", 0))
    }

    fn forget(&self, recorded: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: as above; the graph is not used again. The driver waits for a launch that is in progress.
        unsafe { result::graph::exec_destroy(recorded as sys::CUgraphExec) }
            .map_err(self.said("cuGraphExecDestroy"))
    }

    fn product(&self, product: &Product) -> Result<()> {
        self.enter()?;
        self.remember("a product");
        self.blas.product(product, self.stream)
    }

    fn launch(&self, launch: Launch, args: &mut Args) -> Result<()> {
        self.enter()?;
        let function = self.function(launch)?;
        self.remember(launch.kernel);
        let fail = self.refused("cuLaunchKernelEx", launch);
        // Kernels for older architectures have no instruction that waits.
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let [x, y, z] = launch.grid.map(|n| n as u32);
        // SAFETY: the function belongs to a module that is never unloaded. The tests run the same calls on the emulator, which
        // compares the arguments with the kernel's parameters.
        unsafe {
            let mut pointers: Vec<*mut c_void> = args.pointers();
            let config = sys::CUlaunchConfig {
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: launch.threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: launch.shared as u32,
                hStream: self.stream,
                attrs: &raw mut early,
                numAttrs: u32::from(launch.early && self.starts_early),
            };
            sys::cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), std::ptr::null_mut())
                .result()
                .map_err(fail)
        }
    }

    fn stream(&self) -> Result<*mut c_void> {
        self.enter().map(|()| self.stream.cast())
    }

    fn bus(&self) -> Option<&str> {
        Some(&self.bus)
    }

    fn compile_all(&self, until: Instant) -> Vec<Result<()>> {
        self.images.all(until)
    }

    fn begin_to_compile(&self) {
        self.images.begin();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_gets_an_error() {
        // SAFETY: as in `survey`.
        if !unsafe { sys::is_culib_present() } {
            assert_eq!(Cuda::open(0, &[], Path::new("/tmp")).err(), Some(Error::NoDriver));
        }
    }
}
