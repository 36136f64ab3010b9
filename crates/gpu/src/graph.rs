//! Work that is recorded once and run again by one call: on a card a CUDA graph, on the emulator a list of calls.
//!
//! What is recorded are kernels with the addresses and numbers they were given, so everything that differs from run to run has to
//! lie in arrays whose place does not change, and so has the memory between the kernels. That comes from an [`Arena`]: it gives
//! its blocks to nothing else while a graph lives. Whoever wants a graph does the work once plainly in [`Gpu::within`] the arena,
//! which loads kernels and finds out which blocks the work takes, and then in [`Gpu::capture`]. All graphs of an arena share its
//! blocks; the card runs one after the other.
//!
//! A device that records does nothing else: other threads wait. Work that needs the host in between (reads, uploads) or memory
//! that the plain run did not take cannot be recorded; [`Gpu::capture`] says why, and the device stays usable.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLockWriteGuard};
use std::thread::ThreadId;

use crate::device::{Array, Driver, Gpu};
use crate::error::{Error, Result};

/// A block of an arena.
struct Block {
    at: u64,
    bytes: usize,
    taken: bool,
}

/// Memory for work that is run again and again.
///
/// A block is as large as the array that asked for it first, and serves arrays of that size only: on the emulator each still ends
/// at its guard page. What arrays give back stays here until the arena and all its arrays are gone.
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
    /// An arena without blocks.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        Self(Arc::new(Blocks { gpu: gpu.clone(), all: Mutex::default() }))
    }

    /// Bytes of its blocks.
    #[must_use]
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

/// What one thread has a device to itself for.
pub(crate) struct Scope {
    pub(crate) thread: ThreadId,
    arena: Arena,
    capture: Option<Capture>,
}

/// A recording under way.
#[derive(Default)]
struct Capture {
    /// Why it will not become a graph.
    refused: Option<Error>,
    /// Arrays that are not the arena's and were dropped meanwhile.
    dropped: Vec<(u64, usize)>,
    /// What has to live as long as the graph.
    kept: Vec<Arc<dyn Any + Send + Sync>>,
}

/// Recorded work. It may be run as long as this value lives, in any number.
pub struct Graph {
    gpu: Gpu,
    recorded: Recorded,
    /// Its memory, and what it reads.
    _arena: Arena,
    _kept: Vec<Arc<dyn Any + Send + Sync>>,
}

/// As the driver has it.
pub(crate) enum Recorded {
    Cuda(crate::cuda::Recorded),
    #[cfg(feature = "emulator")]
    Emulated(Vec<crate::emulated::Call>),
}

impl Drop for Graph {
    fn drop(&mut self) {
        #[cfg_attr(not(feature = "emulator"), expect(irrefutable_let_patterns, reason = "one driver"))]
        if let (Driver::Cuda(cuda), Recorded::Cuda(recorded)) = (self.gpu.driver(), &self.recorded) {
            self.gpu.note(cuda.forget(*recorded));
        }
    }
}

/// Ends a scope, also where its work panics.
struct Within<'a> {
    gpu: &'a Gpu,
    alone: Option<RwLockWriteGuard<'a, ()>>,
}

impl Within<'_> {
    fn close(&mut self) -> Option<Capture> {
        let capture = self.gpu.scope().take().and_then(|scope| scope.capture);
        // What follows goes through the door as all others do.
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
                let _ = self.gpu.end_recording();
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

    /// Runs `f` of this thread's scope, if it has one.
    fn in_scope<T>(&self, f: impl FnOnce(&mut Scope) -> T) -> Option<T> {
        let own = std::thread::current().id();
        self.scope().as_mut().filter(|scope| scope.thread == own).map(f)
    }

    /// Whether this thread records.
    pub(crate) fn captures(&self) -> bool {
        self.in_scope(|scope| scope.capture.is_some()) == Some(true)
    }

    /// Where this thread records, keeps `error` as the reason why nothing comes of it. Gives it back otherwise.
    pub(crate) fn refuse(&self, error: Error) -> Option<Error> {
        let mut error = Some(error);
        self.in_scope(|scope| {
            if let Some(capture) = &mut scope.capture {
                capture.refused = capture.refused.take().or(error.take());
            }
        });
        error
    }

    /// Whether this thread records; then what was to be done stands as the reason why nothing comes of it.
    pub(crate) fn refuses(&self, what: impl FnOnce() -> String) -> bool {
        let records = self.captures();
        if records {
            self.refuse(Error::Capture { what: what() });
        }
        records
    }

    /// Memory of this thread's arena, if it has one.
    pub(crate) fn arena_block(&self, bytes: usize) -> Option<(Result<u64>, Arc<Blocks>)> {
        let (arena, records) = self.in_scope(|scope| (scope.arena.clone(), scope.capture.is_some()))?;
        let found = match arena.free_block(bytes) {
            Some(at) => {
                // Memory that is used again begins as undefined as new one.
                #[cfg(feature = "emulator")]
                if let Driver::Emulated(emulated) = self.driver() {
                    emulated.poison(at, bytes);
                }
                Ok(at)
            }
            None if records => Err(Error::Capture {
                what: format!("takes {bytes} bytes of memory that the run before it did not take"),
            }),
            None => self.driver_alloc(bytes).inspect(|&at| arena.add(at, bytes)),
        };
        Some((found, arena.0))
    }

    /// Puts off giving back memory while this thread records.
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

    /// A graph that is being recorded keeps `what` for as long as it lives, since it has its address.
    pub fn keep<T: Any + Send + Sync>(&self, what: &Arc<T>) {
        self.in_scope(|scope| {
            if let Some(capture) = &mut scope.capture {
                capture.kept.push(Arc::<T>::clone(what));
            }
        });
    }

    /// Does work whose arrays come from `arena`. Meanwhile other threads wait for this device.
    pub fn within<T>(&self, arena: &Arena, work: impl FnOnce() -> T) -> T {
        let mut scope = self.open(arena, None);
        let done = work();
        scope.close();
        done
    }

    /// Records what `work` queues instead of doing it. The same work has been done before [within](Self::within) the arena, and
    /// arrays that it leaves hold nothing until the graph has been run.
    ///
    /// # Errors
    /// Work that reads what it has computed, brings numbers of the host, or takes memory that it did not take before; what the
    /// driver refuses; an earlier failure of the device.
    pub fn capture(&self, arena: &Arena, work: impl FnOnce()) -> Result<Graph> {
        self.healthy()?;
        let mut scope = self.open(arena, Some(Capture::default()));
        match self.driver() {
            Driver::Cuda(cuda) => cuda.begin_capture()?,
            #[cfg(feature = "emulator")]
            Driver::Emulated(emulated) => emulated.begin_capture(),
        }
        work();
        let recorded = self.end_recording();
        let Capture { refused, kept, .. } = scope.close().unwrap_or_default();
        // Made first, so that what was recorded is given back where it is of no use.
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

    fn end_recording(&self) -> Result<Recorded> {
        match self.driver() {
            Driver::Cuda(cuda) => cuda.end_capture().map(Recorded::Cuda),
            #[cfg(feature = "emulator")]
            Driver::Emulated(emulated) => Ok(Recorded::Emulated(emulated.end_capture())),
        }
    }

    /// Queues recorded work. It replaces what is in `results`; the emulator sees to it that nothing of an earlier run is left there.
    pub fn replay(&self, graph: &Graph, results: &[&Array]) {
        let _entered = self.enter();
        if self.failed() {
            return;
        }
        let _ = results;
        let done = match (self.driver(), &graph.recorded) {
            (Driver::Cuda(cuda), Recorded::Cuda(recorded)) => cuda.replay(*recorded),
            #[cfg(feature = "emulator")]
            (Driver::Emulated(emulated), Recorded::Emulated(calls)) => {
                results.iter().for_each(|array| emulated.poison(array.place(0), array.num_bytes()));
                emulated.replay(calls)
            }
            #[cfg(feature = "emulator")]
            _ => Err(Error::Capture { what: "is of another device".into() }),
        };
        self.note(done);
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
