//! Work that is recorded once and replayed by one call: a CUDA graph on a GPU, a list of calls on the emulator.
//!
//! A recording contains kernels with fixed addresses and numbers. Everything that differs between replays must therefore be in
//! arrays at fixed addresses. The memory between the kernels must have fixed addresses, too. An [`Arena`] provides such memory:
//! while a graph lives, its blocks serve nothing else.
//!
//! To create a graph, first run the work normally in [`Gpu::within`] the arena, which loads the kernels and determines the
//! blocks. Then run the work in [`Gpu::capture`]. All graphs of an arena share its blocks; the GPU replays one graph after the
//! other.
//!
//! Kernels of a decoding step that follow each other in a recording start early on GPUs that can: while the kernels before them run,
//! and until their text waits for these. Everything that was queued before the graph has ended when its first kernel starts.
//!
//! While a device records, other threads wait. Work cannot be recorded if it needs the host in between (reads, uploads), or if it
//! needs memory that the normal run did not use. [`Gpu::capture`] then returns the reason as an error, and the device stays
//! usable.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLockWriteGuard};
use std::thread::ThreadId;

use crate::device::{Array, Gpu};
use crate::error::{Error, Result};

/// A block of an arena.
struct Block {
    at: u64,
    bytes: usize,
    taken: bool,
}

/// Memory for work that is run repeatedly.
///
/// A block has the size of the array that first requested it, and serves only arrays of that size. On the emulator, each array
/// therefore still ends at its guard page. When an array is dropped, the arena keeps its memory. The memory is freed when the
/// arena and all its arrays are dropped.
#[derive(Clone)]
pub struct Arena(Arc<Blocks>);

pub(crate) struct Blocks {
    gpu: Gpu,
    all: Mutex<Vec<Block>>,
}

impl Blocks {
    fn lock(&self) -> MutexGuard<'_, Vec<Block>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn give_back(&self, at: u64) {
        if let Some(block) = self.lock().iter_mut().find(|block| block.at == at) {
            block.taken = false;
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        for block in std::mem::take(&mut *self.lock()) {
            self.gpu.free(block.at, block.bytes);
        }
    }
}

impl Arena {
    /// Creates an arena without blocks.
    pub fn new(gpu: &Gpu) -> Self {
        Self(Arc::new(Blocks { gpu: gpu.clone(), all: Mutex::default() }))
    }

    /// Returns the total number of bytes in the blocks of the arena.
    pub fn num_bytes(&self) -> usize {
        self.0.lock().iter().map(|block| block.bytes).sum()
    }

    fn free_block(&self, bytes: usize) -> Option<u64> {
        let mut all = self.0.lock();
        let block = all.iter_mut().find(|block| !block.taken && block.bytes == bytes)?;
        block.taken = true;
        Some(block.at)
    }

    fn add(&self, at: u64, bytes: usize) {
        self.0.lock().push(Block { at, bytes, taken: true });
    }
}

/// The state of a thread that has exclusive use of a device.
pub(crate) struct Scope {
    pub(crate) thread: ThreadId,
    arena: Arena,
    capture: Option<Capture>,
}

/// A recording in progress.
#[derive(Default)]
struct Capture {
    /// Reason why the recording cannot become a graph.
    refused: Option<Error>,
    /// Arrays outside the arena that were dropped during the recording.
    dropped: Vec<(u64, usize)>,
    /// Values that must live as long as the graph.
    kept: Vec<Arc<dyn Any + Send + Sync>>,
    /// True if the last recorded work is a kernel of this crate.
    after_kernel: bool,
}

/// Recorded work. It can be replayed any number of times as long as this value lives.
pub struct Graph {
    gpu: Gpu,
    /// Number that the driver gave the work.
    recorded: u64,
    /// Memory that the kernels use between each other.
    _arena: Arena,
    _kept: Vec<Arc<dyn Any + Send + Sync>>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.gpu.note(self.gpu.driver().forget(self.recorded));
    }
}

/// Guard that ends a scope when it is dropped, even if the work in the scope panics.
struct Within<'a> {
    gpu: &'a Gpu,
    alone: Option<RwLockWriteGuard<'a, ()>>,
}

impl Within<'_> {
    fn close(&mut self) -> Option<Capture> {
        let capture = self.gpu.scope().take().and_then(|scope| scope.capture);
        // From now on, calls acquire the lock in shared mode, as in all other threads.
        self.alone = None;
        let dropped = capture.iter().flat_map(|capture| &capture.dropped);
        dropped.for_each(|&(at, bytes)| self.gpu.free(at, bytes));
        capture
    }
}

impl Drop for Within<'_> {
    fn drop(&mut self) {
        if self.alone.is_some() {
            if self.gpu.captures() {
                let driver = self.gpu.driver();
                let _ = driver.end_capture().and_then(|recorded| driver.forget(recorded));
            }
            self.close();
        }
    }
}

impl Gpu {
    fn open(&self, arena: &Arena, capture: Option<Capture>) -> Within<'_> {
        let alone = self.door().write().unwrap_or_else(PoisonError::into_inner);
        let thread = std::thread::current().id();
        *self.scope() = Some(Scope { thread, arena: arena.clone(), capture });
        Within { gpu: self, alone: Some(alone) }
    }

    /// Runs `f` on the scope of this thread, if there is one.
    fn in_scope<T>(&self, f: impl FnOnce(&mut Scope) -> T) -> Option<T> {
        let own = std::thread::current().id();
        self.scope().as_mut().filter(|scope| scope.thread == own).map(f)
    }

    /// Returns true if this thread records.
    pub(crate) fn captures(&self) -> bool {
        self.in_scope(|scope| scope.capture.is_some()) == Some(true)
    }

    /// Stores `error` as the reason why the recording fails if this thread records. Otherwise, returns the error.
    pub(crate) fn refuse(&self, error: Error) -> Option<Error> {
        let mut error = Some(error);
        self.in_scope(|scope| {
            if let Some(capture) = &mut scope.capture {
                capture.refused = capture.refused.take().or(error.take());
            }
        });
        error
    }

    /// Returns true if this thread records. In this case, stores the operation as the reason why the recording fails.
    pub(crate) fn refuses(&self, what: impl FnOnce() -> String) -> bool {
        let records = self.captures();
        if records {
            self.refuse(Error::Capture { what: what() });
        }
        records
    }

    /// Allocates memory from the arena of this thread, if there is one.
    pub(crate) fn arena_block(&self, bytes: usize) -> Option<(Result<u64>, Arc<Blocks>)> {
        let (arena, records) = self.in_scope(|scope| (scope.arena.clone(), scope.capture.is_some()))?;
        let found = match arena.free_block(bytes) {
            Some(at) => {
                // Reused memory must start with undefined contents, as new memory does.
                self.driver().poison(at, bytes);
                Ok(at)
            }
            None if records => Err(Error::Capture {
                what: format!("needs {bytes} bytes of memory that the normal run did not use"),
            }),
            None => self.driver_alloc(bytes).inspect(|&at| arena.add(at, bytes)),
        };
        Some((found, arena.0))
    }

    /// Takes note of work that is queued. Returns true for a kernel that follows another one in a recording of this thread: it may
    /// start before that one ends.
    pub(crate) fn follows(&self, kernel: bool) -> bool {
        let follows = self.in_scope(|scope| {
            let capture = scope.capture.as_mut()?;
            Some(std::mem::replace(&mut capture.after_kernel, kernel) && kernel)
        });
        follows.flatten() == Some(true)
    }

    /// Postpones the freeing of memory if this thread records. Returns true if it was postponed.
    pub(crate) fn puts_off(&self, at: u64, bytes: usize) -> bool {
        let put_off = self.in_scope(|scope| {
            let dropped = scope.capture.as_mut().map(|capture| &mut capture.dropped);
            dropped.is_some_and(|dropped| {
                dropped.push((at, bytes));
                true
            })
        });
        put_off == Some(true)
    }

    /// Keeps `what` alive as long as the graph that is being recorded, because the graph contains its address.
    pub fn keep<T: Any + Send + Sync>(&self, what: &Arc<T>) {
        self.in_scope(|scope| {
            if let Some(capture) = &mut scope.capture {
                capture.kept.push(Arc::<T>::clone(what));
            }
        });
    }

    /// Runs work whose arrays are allocated from `arena`. Until it returns, other threads wait for this device.
    pub fn within<T>(&self, arena: &Arena, work: impl FnOnce() -> T) -> T {
        let mut scope = self.open(arena, None);
        let done = work();
        scope.close();
        done
    }

    /// Records the operations that `work` queues instead of executing them. The same work must have run before,
    /// [within](Self::within) the same arena. Arrays that `work` leaves are undefined until the graph is replayed.
    ///
    /// # Errors
    /// Returns an error if `work` reads its results, uploads data, or needs memory that the normal run did not use. Also returns
    /// an error if the driver refuses the recording, or if the device has failed before.
    pub fn capture(&self, arena: &Arena, work: impl FnOnce()) -> Result<Graph> {
        self.healthy()?;
        let mut scope = self.open(arena, Some(Capture::default()));
        self.driver().begin_capture()?;
        work();
        let recorded = self.driver().end_capture();
        let Capture { refused, kept, .. } = scope.close().unwrap_or_default();
        // The graph is created before the check, so that an unusable recording is freed.
        let graph = recorded.map(|recorded| Graph {
            gpu: self.clone(),
            recorded,
            _arena: arena.clone(),
            _kept: kept,
        });
        refused.map_or(Ok(()), Err)?;
        self.healthy()?;
        graph
    }

    /// Queues recorded work, which replaces the contents of `results`. The emulator first sets `results` to NaN, so that no value
    /// of an earlier replay remains.
    pub fn replay(&self, graph: &Graph, results: &[&Array]) {
        let _entered = self.enter();
        if self.failed() {
            return;
        }
        if !self.is(&graph.gpu) {
            self.note::<()>(Err(Error::Capture { what: "belongs to another device".into() }));
            return;
        }
        results.iter().for_each(|array| self.driver().poison(array.place(0), array.num_bytes()));
        self.note(self.driver().replay(graph.recorded));
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Graph of {}", self.gpu.name())
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Arena of {} bytes", self.num_bytes())
    }
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} blocks", self.lock().len())
    }
}
