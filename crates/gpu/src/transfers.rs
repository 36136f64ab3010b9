//! Copies between a GPU and main memory, beside the other work of the GPU.
//!
//! The copies run on a second queue. They pass through a few pinned buffers, so that the GPU fills or empties one buffer while the
//! host works with another one. Events order the two queues, so no call waits for the GPU unless it needs a buffer or a result.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::device::{Array, Gpu};
use crate::driver::{Driver, Queue};

/// Number of pinned buffers for each direction.
const BUFFERS: usize = 2;
/// Bytes of a pinned buffer.
pub(crate) const PIECE: usize = 16 << 20;
/// Bytes of arrays that wait for their copy to main memory. A further download first waits until fewer remain.
const WAITING: usize = 128 << 20;

/// Bytes that one thread copies in main memory. A copy of more bytes is divided among up to [`COPIERS`] threads, because one thread
/// is slower than the link to a GPU.
const BYTES_OF_THREAD: usize = 1 << 20;
const COPIERS: usize = 4;

/// Copies bytes in main memory, with several threads if there are many.
///
/// # Panics
/// Panics if the lengths differ.
pub fn copy_bytes(to: &mut [u8], from: &[u8]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(COPIERS);
    let each = to.len().div_ceil(threads).max(BYTES_OF_THREAD);
    if to.len() <= each {
        return to.copy_from_slice(from);
    }
    assert_eq!(to.len(), from.len());
    let mut lacks_threads = false;
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(each).zip(from.chunks(each)) {
            let thread = std::thread::Builder::new();
            lacks_threads |= thread.spawn_scoped(scope, || to.copy_from_slice(from)).is_err();
        }
    });
    if lacks_threads {
        to.copy_from_slice(from);
    }
}

/// Main memory to which a device copies without the help of the CPU.
struct Pinned {
    gpu: Gpu,
    at: *mut u8,
    len: usize,
    /// Completion of the last copy to this memory.
    copied: Option<Mark>,
}

// SAFETY: the memory belongs to this value alone, apart from a copy of the device, for which `wait` waits.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates a buffer. Returns `None` if the device has failed or main memory is exhausted.
    fn new(gpu: &Gpu) -> Option<Self> {
        let len = gpu.driver().buffer();
        let at = if gpu.failed() { None } else { gpu.note(gpu.pin(len)) }?;
        Some(Self { gpu: gpu.clone(), at, len, copied: None })
    }

    /// Waits for the last copy, and returns the first `len` bytes.
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        if let Some(mark) = self.copied.take() {
            mark.wait();
        }
        // SAFETY: the allocation has at least as many bytes. No copy is in progress.
        unsafe { std::slice::from_raw_parts_mut(self.at, len.min(self.len)) }
    }

    /// Starts a copy of device memory to the first `len` bytes.
    fn start_read(&mut self, from: u64, len: usize) {
        let to = self.bytes(len);
        let (to, len) = (to.as_mut_ptr(), to.len());
        self.gpu.start_read(from, to, len);
        self.copied = self.gpu.mark(Queue::Copies);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.bytes(0);
        // After a failure, a copy without a mark may still use the memory, which is then left to the end of the process.
        if self.gpu.failed() {
            return;
        }
        let _ = self.gpu.note(self.gpu.unpin(self.at));
    }
}

/// A point in the order of a queue.
struct Mark {
    gpu: Gpu,
    event: u64,
}

impl Mark {
    /// Waits until the device has reached this point.
    fn wait(&self) {
        let _ = self.gpu.note(self.gpu.driver().wait_for(self.event));
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let _ = self.gpu.note(self.gpu.driver().forget_mark(self.event));
    }
}

impl Gpu {
    /// Size of the pinned buffers for uploads, in bytes of main memory, and maximum size with those for downloads.
    pub const PINNED_BYTES: [usize; 2] = [BUFFERS * PIECE, 2 * BUFFERS * PIECE];
}

/// Pinned buffers for uploads, the one that was used last at the end. They are allocated at the first use.
#[derive(Default)]
pub(crate) struct Ring(Mutex<VecDeque<Slot>>);

/// A pinned buffer. It has no handle to its device, which owns it.
struct Slot {
    at: *mut u8,
    /// Event at the end of the last copy from this memory.
    copied: Option<u64>,
}

// SAFETY: the memory belongs to this value alone, apart from a copy of the device, for which users wait.
unsafe impl Send for Slot {}

impl Slot {
    /// Waits for the last copy.
    fn settle(&mut self, driver: &dyn Driver) -> crate::Result<()> {
        match self.copied.take() {
            Some(event) => driver.wait_for(event).and(driver.forget_mark(event)),
            None => Ok(()),
        }
    }
}

impl Ring {
    /// Frees the buffers at the end of their device. After a failure, a copy may still use them, and they remain allocated.
    pub(crate) fn free(&mut self, driver: &dyn Driver, has_failed: bool) {
        let slots = std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner));
        for mut slot in slots.into_iter().filter(|_| !has_failed) {
            // Nobody is left to whom a failure could be reported.
            let _ = slot.settle(driver).and_then(|()| driver.unpin(slot.at, driver.buffer()));
        }
    }
}

impl Gpu {
    /// Replaces `bytes` bytes of device memory from `to` on, after all work that is already queued and before all work that
    /// follows. `make` writes some of them, whole `unit`s of bytes. It is called for consecutive ranges, while the previous one is
    /// copied, and must neither use the device nor wait for a thread that does: no other thread has exclusive use meanwhile.
    pub(crate) fn write_pieces(
        &self,
        to: u64,
        bytes: usize,
        unit: usize,
        mut make: impl FnMut(Range<usize>, &mut [u8]),
    ) {
        // Before the lock: a thread with exclusive use of the device may upload, too.
        let _entered = self.enter();
        let (driver, mut ring) = (self.driver(), lock(&self.ring().0));
        let after = |later: Queue, earlier: Queue| {
            let event = driver.mark(earlier)?;
            driver.follow(later, event).and(driver.forget_mark(event))
        };
        if !self.failed() {
            self.note(after(Queue::Copies, Queue::Main));
        }
        let step = driver.buffer() / unit * unit;
        for first in (0..bytes).step_by(step) {
            let range = first..(first + step).min(bytes);
            let (at, len) = (to + first as u64, range.len());
            // Without pinned memory, the driver copies from other memory.
            if ring.len() < BUFFERS
                && !self.failed()
                && let Ok(at) = driver.pin(driver.buffer())
            {
                ring.push_back(Slot { at, copied: None });
            } else if !ring.is_empty() {
                ring.rotate_left(1);
            }
            let slot = ring.back_mut().filter(|_| !self.failed());
            let settled = |slot: &mut Slot| self.note(slot.settle(driver)).is_some();
            let Some(slot) = slot.and_then(|slot| settled(slot).then_some(slot)) else {
                let mut own = vec![0; len];
                make(range, &mut own);
                if !self.failed() {
                    self.note(driver.write(at, &own));
                }
                continue;
            };
            // SAFETY: the buffer has at least as many bytes, and no copy is in progress.
            make(range, unsafe { std::slice::from_raw_parts_mut(slot.at, len) });
            let copied = driver.start_write(at, slot.at, len).and_then(|()| driver.mark(Queue::Copies));
            slot.copied = self.note(copied);
        }
        if !self.failed() {
            self.note(after(Queue::Main, Queue::Copies));
        }
    }
}

impl Gpu {
    fn pin(&self, bytes: usize) -> crate::Result<*mut u8> {
        let _entered = self.enter();
        self.driver().pin(bytes)
    }

    fn unpin(&self, at: *mut u8) -> crate::Result<()> {
        let _entered = self.enter();
        self.driver().unpin(at, self.driver().buffer())
    }

    /// Marks the end of the work that is queued now.
    fn mark(&self, queue: Queue) -> Option<Mark> {
        if self.failed() {
            return None;
        }
        let _entered = self.enter();
        let event = self.note(self.driver().mark(queue))?;
        Some(Mark { gpu: self.clone(), event })
    }

    /// Makes further work of a queue wait for a mark.
    fn follow(&self, queue: Queue, mark: Option<&Mark>) {
        let Some(mark) = mark.filter(|_| !self.failed()) else { return };
        let _entered = self.enter();
        self.note(self.driver().follow(queue, mark.event));
    }

    fn start_read(&self, from: u64, to: *mut u8, bytes: usize) {
        if self.failed() {
            return;
        }
        let _entered = self.enter();
        self.note(self.driver().start_read(from, to, bytes));
    }
}

/// A download that was ordered.
struct Order {
    array: Arc<Array>,
    /// End of the work that computes the array.
    ready: Option<Mark>,
    to: Vec<f32>,
    done: Sender<Vec<f32>>,
}

/// A piece that is being copied to a pinned buffer.
struct Piece {
    buffer: Option<Pinned>,
    bytes: Range<usize>,
    is_last: bool,
}

/// Bytes that wait for their copy. `None` after the thread that copies has ended.
type Waiting = Arc<(Mutex<Option<usize>>, Condvar)>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread that moves downloaded pieces from pinned buffers to their destination.
struct Worker {
    gpu: Gpu,
    free: Vec<Pinned>,
    flying: VecDeque<Piece>,
    /// Orders with pieces that are not complete, in the order of the pieces.
    orders: VecDeque<Order>,
    waiting: Waiting,
}

impl Drop for Worker {
    /// Lets callers of [`Transfers::download`] continue, even after a panic.
    fn drop(&mut self) {
        self.count(|_| None);
    }
}

impl Worker {
    fn count(&self, change: impl FnOnce(Option<usize>) -> Option<usize>) {
        let mut waiting = lock(&self.waiting.0);
        *waiting = change(*waiting);
        self.waiting.1.notify_all();
    }

    fn run(mut self, orders: &Receiver<Order>) {
        loop {
            let next = match self.flying.is_empty() {
                true => orders.recv().map_err(|RecvError| TryRecvError::Disconnected),
                false => orders.try_recv(),
            };
            match next {
                Ok(order) => self.start(order),
                Err(TryRecvError::Empty) => self.land(),
                Err(TryRecvError::Disconnected) => break,
            }
        }
        while !self.flying.is_empty() {
            self.land();
        }
    }

    fn start(&mut self, mut order: Order) {
        self.gpu.follow(Queue::Copies, order.ready.as_ref());
        let (at, bytes) = (order.array.place(0), order.array.num_bytes());
        order.to.resize(bytes / 4, 0.0);
        self.orders.push_back(order);
        let step = self.gpu.driver().buffer();
        // An array without elements has one piece without bytes.
        for first in (0..bytes.max(1)).step_by(step) {
            while self.free.is_empty() && self.flying.len() >= BUFFERS {
                self.land();
            }
            let range = first..(first + step).min(bytes);
            let mut buffer = self.free.pop().or_else(|| Pinned::new(&self.gpu));
            if let Some(buffer) = buffer.as_mut().filter(|_| !range.is_empty()) {
                buffer.start_read(at + first as u64, range.len());
            }
            let is_last = range.end == bytes;
            self.flying.push_back(Piece { buffer, bytes: range, is_last });
        }
    }

    /// Waits for the oldest piece and moves it to its destination. After a failure, the values are NaN.
    fn land(&mut self) {
        let Some(Piece { mut buffer, bytes, is_last }) = self.flying.pop_front() else { return };
        if let Some(order) = self.orders.front_mut() {
            let to = &mut bytemuck::cast_slice_mut::<_, u8>(&mut order.to)[bytes.clone()];
            if let Some(buffer) = &mut buffer {
                copy_bytes(to, buffer.bytes(bytes.len()));
            }
            if self.gpu.failed() {
                to.fill(0xff);
            }
        }
        self.free.extend(buffer);
        if is_last && let Some(Order { array, to, done, .. }) = self.orders.pop_front() {
            let bytes = array.num_bytes();
            drop(array);
            self.count(|waiting| waiting.map(|waiting| waiting - bytes));
            // Nobody waits for a gradient that was discarded.
            let _ = done.send(to);
        }
    }
}

/// Copies between a GPU and main memory that run beside the other work of the GPU.
pub struct Transfers {
    gpu: Gpu,
    orders: Option<Sender<Order>>,
    worker: Option<JoinHandle<()>>,
    waiting: Waiting,
}

/// Values on their way to main memory.
pub struct Arriving(Receiver<Vec<f32>>, Gpu);

impl Arriving {
    /// Waits for the values. They are NaN if the device has failed. Returns `None` if the copying thread has ended or could not
    /// start. The device reports that as its failure.
    pub fn wait(self) -> Option<Vec<f32>> {
        let values = self.0.recv().ok();
        if values.is_none() {
            let what = "the thread that copies has ended or could not start".into();
            let _ = self.1.note::<()>(Err(crate::Error::Driver { call: "a copy to main memory", what }));
        }
        values
    }
}

impl Transfers {
    /// Prepares copies. Buffers are allocated at the first use.
    pub fn new(gpu: &Gpu) -> Self {
        let waiting = Waiting::new((Mutex::new(Some(0)), Condvar::new()));
        let (orders, received) = channel();
        let worker = Worker {
            gpu: gpu.clone(),
            free: Vec::new(),
            flying: VecDeque::new(),
            orders: VecDeque::new(),
            waiting: Arc::clone(&waiting),
        };
        let thread = std::thread::Builder::new().name("downloads".into());
        let worker = thread.spawn(move || worker.run(&received)).ok();
        Self { gpu: gpu.clone(), orders: Some(orders), worker, waiting }
    }

    /// Starts to copy an f32 array to main memory, after all work that is already queued. The array is dropped when its values
    /// have arrived. `to` is memory for the values; its content does not matter. Waits first if too many bytes are waiting.
    pub fn download(&self, array: Arc<Array>, to: Vec<f32>) -> Arriving {
        let (done, arriving) = channel();
        let ready = self.gpu.mark(Queue::Main);
        {
            let (waiting, fewer) = &*self.waiting;
            let mut bytes = fewer
                .wait_while(lock(waiting), |bytes| bytes.is_some_and(|bytes| bytes > WAITING))
                .unwrap_or_else(PoisonError::into_inner);
            *bytes = bytes.map(|bytes| bytes + array.num_bytes());
        }
        if let Some(orders) = &self.orders {
            // Without a thread, `Arriving::wait` returns `None`.
            let _ = orders.send(Order { array, ready, to, done });
        }
        Arriving(arriving, self.gpu.clone())
    }

    /// Replaces elements of an array, after all work that is already queued and before all work that follows. `make` writes the
    /// bytes of some of them. It is called for consecutive ranges, while the previous one is copied.
    pub fn upload(
        &self,
        array: &Array,
        elements: Range<usize>,
        mut make: impl FnMut(Range<usize>, &mut [u8]),
    ) {
        let size = array.dtype().size();
        let (first, end) = (elements.start, elements.end.min(array.len()));
        let bytes = end.saturating_sub(first) * size;
        self.gpu.write_pieces(array.place(first), bytes, size, |range, to| {
            make(first + range.start / size..first + range.end / size, to);
        });
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(worker) = self.worker.take() {
            // The thread does not panic. If it did, its arrays would not arrive, which their receivers see.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "values from {}", self.1.name())
    }
}

impl std::fmt::Debug for Transfers {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Transfers of {}", self.gpu.name())
    }
}
