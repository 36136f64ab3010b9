//! Execution of kernels on the CPU, for tests; see `emu/emu.hpp`.
//!
//! A new array is filled with NaN (from 1 GiB on, with zeros), and its memory ends at a guard page. When the array is freed, the bytes between its end and
//! that page are checked.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Dtype;
use crate::driver::{Driver, Limits};
use crate::error::{Error, Result};
use crate::launchers::{Args, Launch};
use crate::product::{Factor, Product};

#[repr(C)]
struct Operand {
    at: u64,
    ld: i64,
    bf16: i32,
    transposed: i32,
}

type LaunchFn = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const u32,
    u32,
    usize,
    *mut *mut c_void,
    *const usize,
    usize,
    u64,
) -> *const c_char;
type ProductFn =
    unsafe extern "C" fn(i64, i64, i64, *const Operand, *const Operand, u64, i64, i32, u64) -> *const c_char;
type SampleFn = unsafe extern "C" fn(u64);
type EarlyFn = unsafe extern "C" fn(bool);
type MemoryFn = unsafe extern "C" fn(u64, usize, i32);

unsafe extern "C" {
    fn emulated_launch(
        file: *const c_char,
        name: *const c_char,
        grid: *const u32,
        threads: u32,
        shared: usize,
        args: *mut *mut c_void,
        sizes: *const usize,
        count: usize,
        seed: u64,
    ) -> *const c_char;
    fn emulated_product(
        m: i64,
        n: i64,
        k: i64,
        a: *const Operand,
        b: *const Operand,
        c: u64,
        ldc: i64,
        bf16: i32,
        plus: u64,
    ) -> *const c_char;
    fn emulated_sample(most_blocks: u64);
    fn emulated_early(early: bool);
}

/// Something that happened to memory, reported to a library that checks accesses (tools/gpu/ptx/hazards.cpp has the same numbers).
#[derive(Clone, Copy)]
enum Event {
    Allocated,
    Freed,
    Written,
    Undefined,
}

pub(crate) struct Emulated {
    schedule: u64,
    /// Number of bytes available and in use.
    memory: usize,
    used: AtomicUsize,
    launches: AtomicU64,
    early_launches: AtomicU64,
    /// Number of uploads and number of reads.
    traffic: [AtomicU64; 2],
    /// Calls that are recorded instead of executed.
    recording: Mutex<Option<Vec<Call>>>,
    /// Calls of complete recordings, by number.
    recorded: Mutex<HashMap<u64, Arc<[Call]>>>,
    /// Number of recordings so far.
    recordings: AtomicU64,
    launch: LaunchFn,
    product: ProductFn,
    memory_event: Option<MemoryFn>,
    sample: SampleFn,
    early: EarlyFn,
    /// Number of blocks above which a launch runs only the first and the last of each dimension.
    most_blocks: AtomicU64,
    _library: Option<libloading::Library>,
}

/// A recorded call.
enum Call {
    Launch(Launch, Args),
    Product(Product),
    /// Fills bytes with a value: zeros, or the all-one bytes of an undefined array.
    Fill {
        at: u64,
        bytes: usize,
        with: u8,
    },
}

const PAGE: usize = 4096;
/// Alignment of arrays in bytes. On a GPU it is 256.
const ALIGN: usize = 16;
const TAIL: u8 = 0xa5;
/// Size in bytes from which arrays are mapped lazily and hold zeros, because they may be larger than memory.
const LARGE: usize = 1 << 30;

/// Returns the number of bytes up to the guard page. The array occupies the last of these bytes.
fn room(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(PAGE)
}

impl Emulated {
    pub(crate) fn linked(schedule: u64, memory: usize) -> Self {
        Self {
            schedule,
            memory,
            used: AtomicUsize::new(0),
            launches: AtomicU64::new(0),
            early_launches: AtomicU64::new(0),
            traffic: Default::default(),
            recording: Mutex::default(),
            recorded: Mutex::default(),
            recordings: AtomicU64::new(0),
            launch: emulated_launch,
            product: emulated_product,
            memory_event: None,
            sample: emulated_sample,
            early: emulated_early,
            most_blocks: AtomicU64::new(u64::MAX),
            _library: None,
        }
    }

    pub(crate) fn load(path: &std::path::Path, schedule: u64) -> Result<Self> {
        let failed = |error: libloading::Error| Error::Cache { path: path.into(), what: error.to_string() };
        // SAFETY: the library is the emulator, compiled from the sources of this crate, so its symbols have these types.
        unsafe {
            let library = libloading::Library::new(path).map_err(failed)?;
            let launch = *library.get::<LaunchFn>(b"emulated_launch\0").map_err(failed)?;
            let product = *library.get::<ProductFn>(b"emulated_product\0").map_err(failed)?;
            let memory_event = library.get::<MemoryFn>(b"emulated_memory\0").ok().map(|symbol| *symbol);
            let sample = *library.get::<SampleFn>(b"emulated_sample\0").map_err(failed)?;
            let early = *library.get::<EarlyFn>(b"emulated_early\0").map_err(failed)?;
            let linked = Self::linked(schedule, usize::MAX);
            Ok(Self { launch, product, memory_event, sample, early, _library: Some(library), ..linked })
        }
    }

    fn report(&self, at: u64, bytes: usize, event: Event) {
        if let Some(report) = self.memory_event {
            // SAFETY: the function only takes notes.
            unsafe { report(at, bytes, event as i32) };
        }
    }

    pub(crate) fn sample_blocks(&self, most_blocks: u64) {
        self.most_blocks.store(most_blocks, Ordering::Relaxed);
    }

    fn samples(&self) -> bool {
        self.most_blocks.load(Ordering::Relaxed) != u64::MAX
    }

    /// Returns the numbers of uploads, of reads and of kernels.
    pub(crate) fn traffic(&self) -> [u64; 3] {
        let [uploads, reads] = &self.traffic;
        [uploads, reads, &self.launches].map(|count| count.load(Ordering::Relaxed))
    }

    /// Returns the number of kernels that may have started before those before them ended.
    pub(crate) fn early_launches(&self) -> u64 {
        self.early_launches.load(Ordering::Relaxed)
    }

    fn recording(&self) -> MutexGuard<'_, Option<Vec<Call>>> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorded(&self) -> MutexGuard<'_, HashMap<u64, Arc<[Call]>>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a call if a recording is in progress. Otherwise, returns the call.
    fn record(&self, call: Call) -> Option<Call> {
        match self.recording().as_mut() {
            Some(calls) => {
                calls.push(call);
                None
            }
            None => Some(call),
        }
    }

    fn fill(&self, at: u64, bytes: usize, with: u8) {
        if self.record(Call::Fill { at, bytes, with }).is_some() {
            self.fill_now(at, bytes, with);
        }
    }

    fn fill_now(&self, at: u64, bytes: usize, with: u8) {
        let (start, end) = (at as usize, at as usize + bytes);
        // Whole pages of a large array become zeros when they are used next, because it may be larger than memory.
        let pages = match with == 0 && bytes >= LARGE {
            true => start.next_multiple_of(PAGE)..end / PAGE * PAGE,
            false => end..end,
        };
        // SAFETY: the callers' ranges are inside arrays that `alloc` returned, whose mappings are private and of no file.
        unsafe {
            std::ptr::write_bytes(start as *mut u8, with, pages.start - start);
            libc::madvise(pages.start as *mut c_void, pages.len(), libc::MADV_DONTNEED);
            std::ptr::write_bytes(pages.end as *mut u8, with, end - pages.end);
        }
        self.report(at, bytes, if with == 0 { Event::Written } else { Event::Undefined });
    }

    fn run(&self, launch: Launch, args: &mut Args) -> Result<()> {
        let (file, name) = launch.file_and_name();
        let fail = |what: String| Err(Error::Launch { kernel: launch.kernel.into(), what });
        let (Ok(file), Ok(name)) = (CString::new(file), CString::new(name)) else {
            return fail("the name contains a zero byte".into());
        };
        let grid = launch.grid.map(|n| n as u32);
        // The order differs from launch to launch; 0 stays 0.
        let count = self.launches.fetch_add(1, Ordering::Relaxed);
        let seed = self.schedule.wrapping_mul(count.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15));
        // SAFETY: the functions only store the number.
        unsafe {
            (self.sample)(self.most_blocks.load(Ordering::Relaxed));
            (self.early)(launch.early);
        }
        self.early_launches.fetch_add(u64::from(launch.early), Ordering::Relaxed);
        let pointers = &mut args.pointers();
        // SAFETY: pointers and sizes are those of `args`, and the callee compares the sizes with the kernel's parameters. Kernels
        // access only their arguments, as on a GPU.
        let why = unsafe {
            (self.launch)(
                file.as_ptr(),
                name.as_ptr(),
                grid.as_ptr(),
                launch.threads,
                launch.shared,
                pointers.as_mut_ptr(),
                args.sizes.as_ptr(),
                args.sizes.len(),
                seed,
            )
        };
        message(why).map_or(Ok(()), fail)
    }

    fn multiply(&self, p: &Product) -> Result<()> {
        let operand = |f: Factor| Operand {
            at: f.at,
            ld: f.ld as i64,
            bf16: i32::from(f.dtype == Dtype::Bf16),
            transposed: i32::from(f.transposed),
        };
        let bf16 = i32::from(p.c_dtype == Dtype::Bf16);
        let (m, n, k) = (p.m as i64, p.n as i64, p.k as i64);
        // SAFETY: sizes and addresses belong to arrays; see `linear`.
        let why = unsafe {
            (self.product)(
                m,
                n,
                k,
                &operand(p.a),
                &operand(p.b),
                p.c,
                p.ldc as i64,
                bf16,
                p.plus.unwrap_or(0),
            )
        };
        message(why).map_or(Ok(()), |what| {
            Err(Error::Launch { kernel: "product".into(), what: format!("{m}×{n}×{k}: {what}") })
        })
    }
}

impl Driver for Emulated {
    fn name(&self) -> String {
        "emulator".into()
    }

    // The multiprocessors of an H100, with the least shared memory of the GPUs that are supported (compute capability 8.6, 8.9 and
    // 12.0).
    fn limits(&self) -> Limits {
        Limits { multiprocessors: 132, block: 99 << 10, all: 100 << 10, cache: 50 << 20 }
    }

    // Pieces are so small that arrays of tests have several, and every row of a batch takes time.

    fn logits(&self) -> [usize; 2] {
        [4, 1 << 10]
    }

    fn buffer(&self) -> usize {
        4 << 10
    }

    fn least_rows(&self) -> usize {
        2
    }

    fn libraries(&self, _: &[PathBuf]) -> Result<(Vec<PathBuf>, Option<i32>)> {
        Ok((vec![env!("OMNIGRPO_STAND_INS").into()], None))
    }

    fn emulated(&self) -> Option<&Self> {
        Some(self)
    }

    fn pin(&self, bytes: usize) -> Result<*mut u8> {
        Ok(Box::into_raw(vec![0u8; bytes].into_boxed_slice()).cast())
    }

    fn unpin(&self, at: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: `pin` made this buffer of the same length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(at, bytes)) });
        Ok(())
    }

    fn start_read(&self, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the buffer has as many bytes, and no other reference to it exists.
        self.read(from, unsafe { std::slice::from_raw_parts_mut(to, bytes) })
    }

    fn start_write(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the buffer has as many bytes, and nothing writes to it now.
        self.write(to, unsafe { std::slice::from_raw_parts(from, bytes) })
    }

    fn forget(&self, recorded: u64) -> Result<()> {
        self.recorded().remove(&recorded);
        Ok(())
    }

    fn memory(&self) -> Option<[usize; 2]> {
        let free = self.memory.saturating_sub(self.used.load(Ordering::Relaxed));
        (self.memory != usize::MAX).then_some([free, self.memory])
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        let room = room(bytes);
        let used = self.used.fetch_add(bytes, Ordering::Relaxed);
        if bytes > self.memory.saturating_sub(used) {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(Error::Memory {
                wanted: bytes,
                free: self.memory.saturating_sub(used),
                total: self.memory,
            });
        }
        // SAFETY: this is a new mapping with a page at either end, and only its own bytes are written.
        unsafe {
            let base = libc::mmap(
                std::ptr::null_mut(),
                room + 2 * PAGE,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            if base == libc::MAP_FAILED {
                return Err(Error::Memory { wanted: bytes, free: 0, total: 0 });
            }
            let inner = base.cast::<u8>().add(PAGE);
            if libc::mprotect(inner.cast(), room, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                return Err(Error::Memory { wanted: bytes, free: 0, total: 0 });
            }
            let tail = bytes.next_multiple_of(ALIGN) - bytes;
            let at = inner.add(room - bytes - tail);
            std::ptr::write_bytes(at.add(bytes), TAIL, tail);
            self.report(at as u64, bytes, Event::Allocated);
            if self.samples() {
                // The mapping holds zeros.
                self.report(at as u64, bytes, Event::Written);
            } else if bytes < LARGE {
                std::ptr::write_bytes(at, 0xff, bytes);
            }
            Ok(at as u64)
        }
    }

    fn free(&self, at: u64, bytes: usize) -> Result<()> {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.report(at, bytes, Event::Freed);
        let tail = bytes.next_multiple_of(ALIGN) - bytes;
        let end = at as usize + bytes;
        // SAFETY: `at` is from `alloc` with the same number of bytes. The tail is therefore mapped, and the mapping begins at the
        // computed address.
        unsafe {
            let whole = std::slice::from_raw_parts(end as *const u8, tail).iter().all(|&byte| byte == TAIL);
            let base = (end + tail - room(bytes) - PAGE) as *mut c_void;
            libc::munmap(base, room(bytes) + 2 * PAGE);
            match whole {
                true => Ok(()),
                false => Err(Error::Driver {
                    call: "freeing an array",
                    what: format!("a kernel wrote beyond the end of its {bytes} bytes"),
                }),
            }
        }
    }

    fn begin_capture(&self) -> Result<()> {
        *self.recording() = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<u64> {
        let calls = self.recording().take().unwrap_or_default();
        let number = self.recordings.fetch_add(1, Ordering::Relaxed);
        self.recorded().insert(number, calls.into());
        Ok(number)
    }

    fn replay(&self, recorded: u64) -> Result<()> {
        let calls = self.recorded().get(&recorded).map(Arc::clone).unwrap_or_default();
        for call in &*calls {
            match call {
                Call::Launch(launch, args) => self.run(*launch, &mut args.clone())?,
                Call::Product(product) => self.multiply(product)?,
                Call::Fill { at, bytes, with } => self.fill_now(*at, *bytes, *with),
            }
        }
        Ok(())
    }

    fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        self.fill(at, bytes, 0);
        Ok(())
    }

    fn poison(&self, at: u64, bytes: usize) {
        self.fill(at, bytes, 0xff);
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        self.traffic[0].fetch_add(1, Ordering::Relaxed);
        // SAFETY: the callers' ranges are inside arrays that `alloc` returned.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), at as *mut u8, from.len()) };
        self.report(at, from.len(), Event::Written);
        Ok(())
    }

    fn read(&self, at: u64, to: &mut [u8]) -> Result<()> {
        self.traffic[1].fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn launch(&self, launch: Launch, args: &mut Args) -> Result<()> {
        match self.record(Call::Launch(launch, args.clone())) {
            Some(_) => self.run(launch, args),
            None => Ok(()),
        }
    }

    // Refuses a combination of types that cuBLASLt does not have.
    fn product(&self, product: &Product) -> Result<()> {
        let Product { m, n, k, a, b, c_dtype, .. } = *product;
        if a.dtype != b.dtype || (a.dtype == Dtype::F32 && c_dtype == Dtype::Bf16) {
            let what = format!("cuBLASLt has no product of {:?} and {:?} in {c_dtype:?}", a.dtype, b.dtype);
            return Err(Error::Product { m, n, k, what });
        }
        match self.record(Call::Product(*product)) {
            Some(_) => self.multiply(product),
            None => Ok(()),
        }
    }
}

/// Returns the message of a call that failed.
fn message(why: *const c_char) -> Option<String> {
    // SAFETY: a pointer that is not null is to a text that the emulator keeps until this thread's next call.
    (!why.is_null()).then(|| unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned())
}
