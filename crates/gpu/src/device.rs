//! Devices: memory, kernel launches and products.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use half::bf16;

use crate::cuda::Cuda;
use crate::driver::{Driver, Limits};
#[cfg(feature = "emulator")]
use crate::emulated::Emulated;
use crate::error::{Error, Result};
use crate::graph::{Blocks, Scope};
use crate::launchers::{Arg, Args, Element, Kernel, Launch};
use crate::nvml::Monitor;
use crate::product::Product;
use crate::transfers::{Ring, copy_bytes};

/// The storage type of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Returns the number of bytes that one number takes.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A handle to a device.
///
/// Work is queued and runs in order. Functions that queue work return no errors. Instead, the device stores the first failure.
/// After a failure, further work computes nothing, and results are read back as NaN. [`Gpu::check`] returns the failure.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    driver: Box<dyn Driver>,
    failure: Mutex<Option<Error>>,
    /// Lock that gives a thread exclusive use of the device. All other threads acquire it in shared mode for each driver call, or for
    /// an upload.
    door: RwLock<()>,
    scope: Mutex<Option<Scope>>,
    limits: Mutex<Limits>,
    /// Address of [`COUNTERS`] counters of blocks, allocated at first use.
    counters: OnceLock<u64>,
    ring: Ring,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let has_failed = self.failure.get_mut().unwrap_or_else(PoisonError::into_inner).is_some();
        self.ring.free(&*self.driver, has_failed);
        // No user of the device is left, so a failure is not reported.
        if let Some(&at) = self.counters.get() {
            let _ = self.driver.free(at, 4 * COUNTERS);
        }
    }
}

/// Number of counters that kernels share. Every kernel leaves them at 0.
pub(crate) const COUNTERS: usize = 256;

/// Number of threads per block in kernels whose threads each process one piece of work.
const THREADS: usize = 256;

impl Gpu {
    /// Bytes of memory that an open GPU needs besides arrays: the workspace of products.
    pub const OWN_BYTES: usize = crate::blas::Blas::WORKSPACE;

    /// Opens a GPU. `libraries` are folders that are searched for CUDA's libraries before the system loader is used. `cache` is a
    /// folder for compiled kernels.
    ///
    /// # Errors
    /// Returns an error if the driver is missing or too old, the GPU does not exist, or a library is missing.
    pub fn cuda(ordinal: usize, libraries: &[std::path::PathBuf], cache: &std::path::Path) -> Result<Self> {
        Ok(Self::over(Cuda::open(ordinal, libraries, cache)?))
    }

    /// Creates an emulator. `schedule` is the seed of the order in which threads run; with 0, all threads advance together.
    #[cfg(feature = "emulator")]
    pub fn emulated(schedule: u64) -> Self {
        Self::emulated_with(schedule, usize::MAX)
    }

    /// Creates an emulator with `memory` bytes.
    #[cfg(feature = "emulator")]
    pub fn emulated_with(schedule: u64, memory: usize) -> Self {
        Self::over(Emulated::linked(schedule, memory))
    }

    /// Creates an emulator that runs kernels from a shared library, for tests that insert faults into kernels.
    #[cfg(feature = "emulator")]
    pub fn emulated_from(library: &std::path::Path, schedule: u64) -> Result<Self> {
        Ok(Self::over(Emulated::load(library, schedule)?))
    }

    fn over(driver: impl Driver + 'static) -> Self {
        Self(Arc::new(Inner {
            limits: Mutex::new(driver.limits()),
            driver: Box::new(driver),
            failure: Mutex::default(),
            door: RwLock::default(),
            scope: Mutex::default(),
            counters: OnceLock::new(),
            ring: Ring::default(),
        }))
    }

    pub fn name(&self) -> String {
        self.driver().name()
    }

    /// Connects to the driver's management library, which reports the load of this GPU; `None` without it.
    pub fn monitor(&self) -> Option<Monitor> {
        Monitor::open(self.driver().bus()?).ok()
    }

    /// Returns the numbers of free and total bytes of memory, or `None` if they are unknown.
    pub fn memory(&self) -> Option<[usize; 2]> {
        self.driver().memory()
    }

    /// Returns true if both handles are of one device.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.0.driver
    }

    pub(crate) fn ring(&self) -> &Ring {
        &self.0.ring
    }

    pub(crate) fn door(&self) -> &RwLock<()> {
        &self.0.door
    }

    pub(crate) fn scope(&self) -> MutexGuard<'_, Option<Scope>> {
        self.0.scope.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other thread has exclusive use of the device. The caller keeps the guard only during one driver call or upload.
    pub(crate) fn enter(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let own = self.scope().as_ref().is_some_and(|scope| scope.thread == std::thread::current().id());
        (!own).then(|| self.0.door.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the numbers of uploads to the emulator, of reads from it and of kernels it ran, since it was opened.
    #[cfg(feature = "emulator")]
    pub fn traffic(&self) -> Option<[u64; 3]> {
        self.driver().emulated().map(Emulated::traffic)
    }

    /// On the emulator, makes launches of more than 4,096 blocks run only the first and the last 32 blocks of each dimension. New
    /// arrays then hold zeros, since most of them are not computed. A GPU runs all blocks.
    #[cfg(feature = "emulator")]
    pub fn sample_blocks(&self) {
        if let Some(emulated) = self.driver().emulated() {
            emulated.sample_blocks(4096);
        }
    }

    /// Chooses kernels as on a card with `[multiprocessors, bytes of shared memory of a block, bytes of a multiprocessor]`, or as on
    /// this one. A GPU refuses a block with more than it has.
    #[cfg(feature = "emulator")]
    pub fn choose_as_on(&self, card: Option<[usize; 3]>) {
        let cache = self.driver().limits().cache;
        let limits = card.map(|[multiprocessors, block, all]| Limits { multiprocessors, block, all, cache });
        *self.0.limits.lock().unwrap_or_else(PoisonError::into_inner) =
            limits.unwrap_or_else(|| self.driver().limits());
    }

    /// Returns the number of kernels that the emulator ran as those that start before the ones before them have ended.
    #[cfg(feature = "emulator")]
    pub fn early_launches(&self) -> Option<u64> {
        self.driver().emulated().map(Emulated::early_launches)
    }

    /// Returns the limits by which kernels are chosen.
    pub(crate) fn limits(&self) -> Limits {
        *self.0.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rounds `rows` up to one of a few batch sizes, so that one graph serves many batches. Kernels for few rows process at least
    /// 8 and at most 64 or 128 rows at a time. On the emulator, every additional row takes time.
    pub fn batch_of(&self, rows: usize) -> usize {
        let unit = self.driver().least_rows();
        match rows.div_ceil(unit) {
            units @ 0..=8 => units.next_power_of_two() * unit,
            units => units.next_multiple_of(8) * unit,
        }
    }

    /// Begins to compile all kernels on other threads, so that first launches wait for less. Does nothing when it is called again.
    pub fn begin_to_compile(&self) {
        self.driver().begin_to_compile();
    }

    /// Waits for queued work, and returns the first failure of this device.
    pub fn check(&self) -> Result<()> {
        if !self.refuses(|| "waits for its own results".into()) {
            let _entered = self.enter();
            self.note(self.driver().synchronize());
        }
        self.healthy()
    }

    /// Returns the first failure that is known now, without waiting.
    pub(crate) fn healthy(&self) -> Result<()> {
        self.failure().clone().map_or(Ok(()), Err)
    }

    fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.0.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the first error. If this thread records, the error is stored in the current recording, otherwise in the device.
    pub(crate) fn note<T>(&self, result: Result<T>) -> Option<T> {
        let failed = |error| self.refuse(error).map(|error| self.failure().get_or_insert(error).clone());
        result.map_err(failed).ok()
    }

    pub(crate) fn failed(&self) -> bool {
        self.failure().is_some()
    }

    /// Allocates memory with undefined contents.
    pub fn alloc(&self, len: usize, dtype: Dtype) -> Array {
        let bytes = len * dtype.size();
        let (at, memory) = match self.arena_block(bytes) {
            _ if self.failed() => (None, Memory::Own),
            Some((at, blocks)) => (self.note(at), Memory::Arena(blocks)),
            None => (self.note(self.driver_alloc(bytes)), Memory::Own),
        };
        Array { gpu: self.clone(), at: at.unwrap_or(0), len, dtype, memory, rounded: None }
    }

    pub(crate) fn driver_alloc(&self, bytes: usize) -> Result<u64> {
        let _entered = self.enter();
        self.driver().alloc(bytes)
    }

    /// Frees memory that [`Self::driver_alloc`] allocated.
    pub(crate) fn free(&self, at: u64, bytes: usize) {
        if self.puts_off(at, bytes) {
            return;
        }
        let _entered = self.enter();
        self.note(self.driver().free(at, bytes));
    }

    /// Returns [`COUNTERS`] counters, which are 0 between kernels. They outlive all recordings, so they are in no arena, and no
    /// recording can allocate them.
    pub(crate) fn counters(&self) -> Element<'_> {
        let counters = |at| Element::new(at, Dtype::F32);
        if let Some(&at) = self.0.counters.get() {
            return counters(at);
        }
        if self.refuses(|| "needs counters that no normal run has allocated".into()) {
            return Element::default();
        }
        let bytes = 4 * COUNTERS;
        let Some(at) = self.note(self.driver_alloc(bytes)) else { return Element::default() };
        self.clear_bytes(at, bytes);
        // Another thread may have stored its own in the meantime. Threads do not wait for each other here, since one of them may
        // have exclusive use of the device, for which the other waits.
        if self.0.counters.set(at).is_err() {
            self.free(at, bytes);
        }
        counters(self.0.counters.get().copied().unwrap_or(at))
    }

    /// Copies arrays of one dtype to one array, one behind the other, and returns its parts. Returns `None` if a part would begin at no
    /// multiple of [`Array::UNIT`] bytes, if memory is short, and while work is recorded or uses an arena.
    pub fn joined(&self, arrays: &[&Array]) -> Option<Vec<Array>> {
        let (first, rest) = arrays.split_first()?;
        let alike = rest.iter().all(|array| array.dtype == first.dtype);
        let aligned = arrays.iter().all(|array| array.num_bytes().is_multiple_of(Array::UNIT));
        if !alike || !aligned || self.scope().is_some() {
            return None;
        }
        let (len, dtype) = (arrays.iter().map(|array| array.len).sum::<usize>(), first.dtype);
        let at = self.driver_alloc(len * dtype.size()).ok()?;
        let all = Array { gpu: self.clone(), at, len, dtype, memory: Memory::Own, rounded: None };
        let mut first = 0;
        for array in arrays {
            let size = [1, array.len];
            self.copy_matrix(all.element(first), (*array).into(), [None; 2], size, [array.len; 2]);
            first += array.len;
        }
        let (all, mut first) = (Arc::new(all), 0);
        let part = |array: &&Array| {
            let own = Array::part(&all, first, array.len);
            first += array.len;
            own
        };
        Some(arrays.iter().map(part).collect())
    }

    /// Allocates an array of zeros.
    pub fn zeros(&self, len: usize, dtype: Dtype) -> Array {
        let mut array = self.alloc(len, dtype);
        self.clear(&mut array, 0..len);
        array
    }

    /// Zeroes a range of elements.
    pub fn clear(&self, array: &mut Array, range: std::ops::Range<usize>) {
        self.clear_bytes(array.place(range.start), range.len() * array.dtype.size());
    }

    fn clear_bytes(&self, at: u64, bytes: usize) {
        if bytes == 0 || self.failed() {
            return;
        }
        self.follows(false);
        let _entered = self.enter();
        self.note(self.driver().clear(at, bytes));
    }

    /// Uploads values.
    pub fn upload(&self, data: &[f32]) -> Array {
        self.upload_bytes(bytemuck::cast_slice(data), data.len(), Dtype::F32)
    }

    /// Uploads bf16 values.
    pub fn upload_bf16(&self, data: &[bf16]) -> Array {
        self.upload_bytes(bytemuck::cast_slice(data), data.len(), Dtype::Bf16)
    }

    /// Uploads plain data such as indices, offsets and tables, as words of 4 bytes.
    pub fn upload_words<T: bytemuck::NoUninit>(&self, data: &[T]) -> Array {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        self.upload_bytes(bytes, bytes.len() / 4, Dtype::F32)
    }

    fn upload_bytes(&self, bytes: &[u8], len: usize, dtype: Dtype) -> Array {
        let array = self.alloc(len, dtype);
        self.write(array.at, bytes);
        array
    }

    /// Replaces the first words of an array in one copy, after all work that is already queued.
    pub fn write_words(&self, array: &Array, words: &[u32]) {
        let words = &words[..words.len().min(array.num_bytes() / 4)];
        self.write(array.at, bytemuck::cast_slice(words));
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let count = bytes.len();
        if at == 0
            || count == 0
            || self.failed()
            || self.refuses(|| format!("uploads {count} bytes from the host"))
        {
            return;
        }
        // The driver copies many bytes from memory that is not pinned at a fraction of the rate.
        if count > self.driver().buffer() / 16 {
            return self.write_pieces(at, count, 1, |range, to| copy_bytes(to, &bytes[range]));
        }
        let _entered = self.enter();
        self.note(self.driver().write(at, bytes));
    }

    /// Fills `to` from device memory. After a failure, fills it with bytes whose bits are all one (NaN).
    fn read(&self, at: u64, to: &mut [u8]) {
        let done = if to.is_empty() {
            true
        } else if at == 0 || self.failed() || self.refuses(|| format!("reads {} bytes", to.len())) {
            false
        } else {
            let _entered = self.enter();
            let result = self.driver().read(at, to);
            self.note(result).is_some()
        };
        if !done {
            to.fill(0xff);
        }
    }

    /// Queues a kernel with a grid of blocks of `threads` threads and `shared` bytes of dynamic shared memory. A launch whose grid
    /// has no blocks does nothing.
    pub fn launch(&self, kernel: Kernel<'_>, grid: [usize; 3], threads: usize, shared: usize) {
        if self.failed() || grid.contains(&0) {
            return;
        }
        let early = kernel.starts_early();
        let (name, args) = kernel.into_parts();
        if let Err(what) = self.check_launch(grid, shared, &args) {
            self.note::<()>(Err(Error::Launch { kernel: name.into(), what }));
            return;
        }
        let early = self.follows(true) && early;
        let launch = Launch { kernel: name, grid, threads: threads as u32, shared, early };
        let _entered = self.enter();
        self.note(self.driver().launch(launch, &mut Args::new(&args)));
    }

    fn check_launch(
        &self,
        [x, y, z]: [usize; 3],
        shared: usize,
        args: &[Arg],
    ) -> std::result::Result<(), String> {
        let most_shared = self.limits().block;
        if x > i32::MAX as usize || y > 65_535 || z > 65_535 || shared > most_shared {
            return Err(format!(
                "expected at most 2147483647×65535×65535 blocks with {most_shared} bytes of shared memory on {}, got \
                 {x}×{y}×{z} blocks with {shared} bytes",
                self.name()
            ));
        }
        for arg in args {
            if let Arg::Mismatch(parameter, got) = arg {
                return Err(format!(
                    "the dtype of the array for {parameter} is {got:?}, which this kernel cannot read"
                ));
            }
            if i32::try_from(arg.most()).is_err() {
                return Err(format!("expected sizes of at most {}, got {}", i32::MAX, arg.most()));
            }
        }
        Ok(())
    }

    /// Queues a kernel with one thread for each of `count` pieces of work.
    pub fn each(&self, kernel: Kernel<'_>, count: usize) {
        let blocks = count.div_ceil(THREADS);
        // In the emulator, a short last block takes as long as a full one.
        let threads = if blocks == 1 { count.next_multiple_of(32) } else { THREADS };
        self.launch(kernel, [blocks, 1, 1], threads, 0);
    }

    /// Queues a kernel with one thread for every four columns of each row.
    pub fn each_quad(&self, kernel: Kernel<'_>, rows: usize, cols: usize) {
        self.each(kernel, rows * cols.div_ceil(4));
    }

    /// Queues a kernel with one block of threads for each of `rows` rows of `cols` elements. Rows without columns have a block too.
    pub fn each_row(&self, kernel: Kernel<'_>, rows: usize, cols: usize) {
        let threads = cols.div_ceil(4).next_multiple_of(32).clamp(32, THREADS);
        self.launch(kernel, [rows, 1, 1], threads, 0);
    }

    /// Queues a product. cuBLASLt refuses a sum of no terms, which is zero, and bf16 results of f32 factors.
    pub(crate) fn product(&self, product: &Product) {
        if self.failed() || product.m == 0 || product.n == 0 {
            return;
        }
        if product.k == 0 {
            return self.sum_of_nothing(product);
        }
        if product.a.dtype == Dtype::F32 && product.c_dtype == Dtype::Bf16 {
            return self.rounded_product(product);
        }
        self.follows(false);
        let _entered = self.enter();
        self.note(self.driver().product(product));
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Gpu({})", self.name())
    }
}

/// An array on a device. When it is dropped, its memory is freed after all work that is already queued.
#[derive(Debug)]
pub struct Array {
    gpu: Gpu,
    at: u64,
    len: usize,
    dtype: Dtype,
    memory: Memory,
    /// The values of an f32 array in bf16, as the kernel that wrote them left them.
    rounded: Option<Arc<Array>>,
}

/// Host data that is uploaded to a device in one copy. Each piece of data begins at a multiple of 16 bytes.
#[derive(Clone, Debug, Default)]
pub struct Pack(Vec<u32>);

impl Pack {
    /// Adds plain data that consists of complete words. Returns the index of its first word.
    pub fn add<T: bytemuck::NoUninit>(&mut self, data: &[T]) -> usize {
        let first = self.0.len();
        let bytes: &[u8] = bytemuck::cast_slice(data);
        self.0.extend(bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned::<u32>));
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        first
    }

    pub fn words(&self) -> &[u32] {
        &self.0
    }

    /// Uploads all words as one array.
    pub fn upload(&self, gpu: &Gpu) -> Arc<Array> {
        Arc::new(gpu.upload_words(&self.0))
    }
}

/// The owner of an array's memory.
#[derive(Debug)]
enum Memory {
    Own,
    /// A block of an arena.
    Arena(Arc<Blocks>),
    /// A part of another array.
    Part(Arc<Array>),
}

impl Array {
    /// Size in bytes of which the beginning of a [part](Self::part) is a multiple.
    pub const UNIT: usize = 16;

    /// Creates an array from `len` elements of `whole`. The first one must be at a multiple of 16 bytes.
    pub fn part(whole: &Arc<Self>, first: usize, len: usize) -> Self {
        let (all, dtype) = (whole.len, whole.dtype);
        let fits = first + len <= all && (first * dtype.size()).is_multiple_of(Self::UNIT);
        debug_assert!(fits, "{len} elements from {first} of {all}");
        let (len, at) = (len.min(all.saturating_sub(first)), whole.place(first));
        let (gpu, memory) = (whole.gpu.clone(), Memory::Part(Arc::clone(whole)));
        Self { gpu, at, len, dtype, memory, rounded: None }
    }

    /// Returns the array whose parts, in order and without gaps, these are.
    pub fn whole(parts: &[&Self]) -> Option<Arc<Self>> {
        let Memory::Part(whole) = &parts.first()?.memory else { return None };
        let mut next = 0;
        for part in parts {
            let own = matches!(&part.memory, Memory::Part(other) if Arc::ptr_eq(whole, other));
            if !own || part.at != whole.place(next) {
                return None;
            }
            next += part.len;
        }
        (next == whole.len).then(|| Arc::clone(whole))
    }

    /// Returns the values in bf16 if the kernel that wrote them left them.
    pub fn rounded(&self) -> Option<&Arc<Self>> {
        self.rounded.as_ref()
    }

    /// States the values in bf16. `None` before they change.
    pub fn set_rounded(&mut self, rounded: Option<Self>) {
        self.rounded = rounded.map(Arc::new);
    }

    /// Returns the size in bytes.
    pub(crate) fn num_bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Returns the device on which the array is allocated.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Copies the values to the host as f32, after waiting for queued work.
    pub fn to_vec(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::F32 => self.words(),
            Dtype::Bf16 => self.words::<bf16>().into_iter().map(bf16::to_f32).collect(),
        }
    }

    /// Copies the bytes to the host and interprets them as another type of plain data.
    pub(crate) fn words<T: bytemuck::Pod>(&self) -> Vec<T> {
        let mut data = vec![T::zeroed(); self.len * self.dtype.size() / size_of::<T>()];
        self.gpu.read(self.at, bytemuck::cast_slice_mut(&mut data));
        data
    }

    /// Copies the values to the host as bf16. f32 values are rounded.
    pub fn to_bf16(&self) -> Vec<bf16> {
        match self.dtype {
            Dtype::F32 => self.to_vec().into_iter().map(bf16::from_f32).collect(),
            Dtype::Bf16 => self.words(),
        }
    }

    /// Returns the device address of an element.
    pub(crate) fn place(&self, element: usize) -> u64 {
        match self.at {
            0 => 0,
            at => at + (element * self.dtype.size()) as u64,
        }
    }

    /// Returns an element as an argument of kernels.
    pub fn element(&self, index: usize) -> Element<'_> {
        Element::new(self.place(index), self.dtype)
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        match &self.memory {
            _ if self.at == 0 => {}
            Memory::Own => self.gpu.free(self.at, self.num_bytes()),
            Memory::Arena(blocks) => blocks.give_back(self.at),
            Memory::Part(_) => {}
        }
    }
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use super::*;
    use crate::launchers::{Sampling, Shape, attention, sums};

    /// Blocks have at most the shared memory of the device. On the emulator, that is the least of all supported GPUs.
    #[test]
    fn a_launch_that_needs_too_much_shared_memory_is_refused() {
        let refused = |shared| {
            let gpu = Gpu::emulated(0);
            gpu.launch(Kernel::new("linear/few_rows_1", false, Vec::new()), [1; 3], 32, shared);
            gpu.check().unwrap_err().to_string()
        };
        let said = refused((99 << 10) + 1);
        assert!(
            said.contains("at most") && said.contains("101376 bytes") && said.contains("101377"),
            "{said}"
        );
        // The next check is that of the arguments.
        let said = refused(99 << 10);
        assert!(said.contains("arguments differ"), "{said}");
    }

    /// A size that a kernel would read as a negative number, on its own and in a structure.
    #[test]
    fn a_size_beyond_32_bits_is_refused() {
        let refused = |launch: &dyn Fn(&Gpu)| {
            let gpu = Gpu::emulated(0);
            launch(&gpu);
            gpu.check().unwrap_err().to_string()
        };
        let said = "expected sizes of at most 2147483647, got 2147483648";
        let cols = 1 << 31;
        // Such an array is mapped, and nothing touches it.
        let swiglu = |gpu: &Gpu| drop(gpu.swiglu(&gpu.alloc(2 * cols, Dtype::Bf16), 1, cols));
        assert_eq!(refused(&swiglu), format!("kernel elementwise/swiglu: {said}"));
        let draw = |gpu: &Gpu, vocab| {
            let args = vec![Sampling { temperature: -1.0, vocab, ..Sampling::default() }.into()];
            gpu.launch(Kernel::new("sample/draw", false, args), [1; 3], 32, 0);
        };
        assert_eq!(refused(&|gpu| draw(gpu, cols)), format!("kernel sample/draw: {said}"));
        // The next check is that of the arguments.
        assert!(refused(&|gpu| draw(gpu, cols - 1)).contains("arguments differ"));
    }

    /// A kernel that reads f32 would read the pairs of a bf16 array.
    #[test]
    fn an_array_of_another_dtype_is_refused() {
        let gpu = Gpu::emulated(0);
        let [x, y] = [Dtype::F32, Dtype::Bf16].map(|dtype| gpu.zeros(8, dtype));
        gpu.each(sums::add_parts(&x, &x, 1, 8), 8);
        gpu.check().unwrap();
        gpu.each(sums::add_parts(&x, &y, 1, 8), 8);
        let said = "kernel sums/add_parts: the dtype of the array for partial is Bf16, which this kernel cannot read";
        assert_eq!(gpu.check().unwrap_err().to_string(), said);
    }

    /// Heads of 63 columns have no kernel.
    #[test]
    fn a_kernel_of_a_number_that_does_not_exist_is_refused() {
        let gpu = Gpu::emulated(0);
        let x = gpu.zeros(8, Dtype::Bf16);
        let lse = gpu.zeros(8, Dtype::F32);
        let kernel = attention::forward(63, &x, &lse, &x, &x, &x, &lse, &lse, Shape::default());
        gpu.launch(kernel, [1; 3], 128, 0);
        assert!(gpu.check().unwrap_err().to_string().starts_with("kernel attention/forward_?: "));
    }
}
