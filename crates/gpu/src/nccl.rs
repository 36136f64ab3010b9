//! Exchanges between the GPUs of several ranks, over NCCL. Arrays stay in GPU memory.
//!
//! Exchanges are queued behind the work of the GPU, as kernels are, and return no errors. If NCCL loses a connection, or a GPU
//! fails, a thread ends the connections of all ranks, which would otherwise wait forever, and their GPUs store a failure. A process
//! that ends is noticed by [`omnigrpo_ranks::Lifeline`], which names its rank.
//!
//! Only bytes are moved, and [`Gpu::fold`] adds them in the order of [`omnigrpo_ranks::sum`]. [`Nccl::sum`] is the sum whose order
//! NCCL chooses.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::nccl::sys;
use omnigrpo_guard::Fault;
use omnigrpo_ranks::Ranks;

use crate::device::{Array, Gpu};
use crate::error::{Error, Result};
use crate::launchers::sums;
use crate::libraries::{Library, NCCL, functions, load, package};

functions! {
    /// Functions of NCCL. Those that return a number return 0 if they succeed.
    Functions {
        ncclGetVersion(*mut c_int) -> c_int;
        ncclGetUniqueId(*mut sys::ncclUniqueId) -> c_int;
        ncclCommInitRank(*mut sys::ncclComm_t, c_int, sys::ncclUniqueId, c_int) -> c_int;
        ncclCommDestroy(sys::ncclComm_t) -> c_int;
        ncclCommAbort(sys::ncclComm_t) -> c_int;
        ncclCommGetAsyncError(sys::ncclComm_t, *mut c_int) -> c_int;
        ncclGetErrorString(c_int) -> *const c_char;
        ncclGetLastError(sys::ncclComm_t) -> *const c_char;
        ncclGroupStart() -> c_int;
        ncclGroupEnd() -> c_int;
        ncclSend(*const c_void, usize, sys::ncclDataType_t, c_int, sys::ncclComm_t, sys::cudaStream_t) -> c_int;
        ncclRecv(*mut c_void, usize, sys::ncclDataType_t, c_int, sys::ncclComm_t, sys::cudaStream_t) -> c_int;
        ncclAllGather(*const c_void, *mut c_void, usize, sys::ncclDataType_t, sys::ncclComm_t, sys::cudaStream_t) -> c_int;
        ncclBroadcast(*const c_void, *mut c_void, usize, sys::ncclDataType_t, c_int, sys::ncclComm_t, sys::cudaStream_t) -> c_int;
        ncclAllReduce(*const c_void, *mut c_void, usize, sys::ncclDataType_t, sys::ncclRedOp_t, sys::ncclComm_t, sys::cudaStream_t) -> c_int;
    }
}

/// Oldest supported version, which is the oldest one whose interface the bindings describe.
const OLDEST: [i32; 2] = [2, 18];
/// Pause between two looks for a lost connection.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest wait for a call of another thread before the connection is ended during the call.
const PATIENCE: Duration = Duration::from_secs(2);
const BYTES: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;
/// Result of a call that goes on in the background.
const IN_PROGRESS: c_int = sys::ncclResult_t::ncclInProgress as c_int;

/// Loads NCCL. Returns its functions, its file and its version as `[major, minor]`.
fn library(given: &[PathBuf], driver: Option<i32>) -> Result<(Functions, PathBuf, [i32; 2])> {
    let address = |functions: &Functions| functions.ncclGetVersion as *const c_void;
    let (functions, path) = load(NCCL, given, driver, Functions::bind, address)?;
    let mut number = 0;
    // SAFETY: the address is valid, and the call needs no connection.
    let status = unsafe { (functions.ncclGetVersion)(&raw mut number) };
    functions.check("ncclGetVersion", status)?;
    let version = version(number);
    if version < OLDEST {
        return Err(Error::OldLibrary { path, version, expected: OLDEST, package: package(NCCL, driver) });
    }
    Ok((functions, path, version))
}

/// Loads NCCL, which only several GPUs need, and asks for its version. `driver` is the newest version that the driver supports.
pub fn nccl(given: &[PathBuf], driver: Option<i32>) -> Library {
    let found = library(given, driver).map(|(_, path, version)| (path, version));
    Library { name: NCCL.name, found }
}

/// Returns `[major, minor]` of a version number. Version 2.9 introduced another form of it.
fn version(number: c_int) -> [i32; 2] {
    let unit = if number < 10_000 { 1000 } else { 10_000 };
    [number / unit, number % unit / 100]
}

impl Functions {
    /// Returns the failure of a call.
    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the functions accept every number and no connection, and return text with a zero byte, or null.
        let [general, last] = unsafe {
            [(self.ncclGetErrorString)(status), (self.ncclGetLastError)(std::ptr::null_mut())].map(|text| {
                if text.is_null() {
                    return String::new();
                }
                CStr::from_ptr(text).to_string_lossy().trim().to_owned()
            })
        };
        let what = if last.is_empty() { general } else { format!("{general} ({last})") };
        Err(Error::Nccl { call, what })
    }
}

/// Connection of a rank to the others, shared with the thread that watches it.
struct Connection {
    functions: Functions,
    handle: sys::ncclComm_t,
    /// Lock of a call. NCCL allows one call at a time.
    turn: Mutex<()>,
    /// True if no further call may use the connection.
    over: AtomicBool,
}

// SAFETY: `turn` orders the calls of different threads, except those that NCCL allows during another one (an abort and the question
// for errors).
unsafe impl Send for Connection {}
// SAFETY: as above.
unsafe impl Sync for Connection {}

impl Connection {
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Returns the error that NCCL has found in the background.
    fn failure(&self) -> Result<()> {
        let mut found = 0;
        // SAFETY: the address is valid. Only the thread that calls this ends the connection, or the one that waits for its end.
        let status = unsafe { (self.functions.ncclCommGetAsyncError)(self.handle, &raw mut found) };
        self.functions.check("ncclCommGetAsyncError", status)?;
        self.functions.check("an exchange over NCCL", found)
    }

    /// Ends the connection, and with it exchanges that wait for another rank.
    fn abort(&self) {
        self.over.store(true, Ordering::SeqCst);
        let until = Instant::now() + PATIENCE;
        // A call in progress may itself wait for a rank that is gone. No call begins after it.
        let _turn = loop {
            match self.turn.try_lock() {
                Ok(turn) => break Some(turn),
                Err(TryLockError::Poisoned(turn)) => break Some(turn.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() > until => break None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        // SAFETY: the connection exists, and nothing uses it afterwards. The cause was reported.
        let _ = unsafe { (self.functions.ncclCommAbort)(self.handle) };
    }
}

/// Connection of a GPU with the GPUs of all ranks.
pub struct Nccl {
    gpu: Gpu,
    connection: Arc<Connection>,
    size: usize,
    version: [i32; 2],
    watch: Option<JoinHandle<()>>,
}

/// Description of a rank that all ranks compare before they connect: version of NCCL, number of the machine, address of the GPU.
type Introduction = ([i32; 2], usize, Option<String>);

impl Nccl {
    /// Connects the GPUs of all ranks. `ranks` carries the identity of the connection. `libraries` are folders that are searched
    /// for NCCL before the system loader is used. Emulators use a stand-in.
    ///
    /// # Errors
    /// Returns an error on all ranks if NCCL is missing or too old on one of them, if their versions differ, if ranks share a GPU,
    /// or if NCCL cannot connect the GPUs.
    pub fn connect(gpu: &Gpu, ranks: &Ranks, libraries: &[PathBuf]) -> Result<Self> {
        let fault = |_: &Error| Fault::Machine;
        let machine = ranks.local()?.machine;
        let loaded =
            gpu.driver().libraries(libraries).and_then(|(folders, driver)| library(&folders, driver));
        let (functions, _, version) = ranks.agree(loaded, fault)?;
        check_introductions(&ranks.share((version, machine, gpu.driver().bus().map(str::to_owned)))?)?;

        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: the address is valid.
        let status = if ranks.is_first() { unsafe { (functions.ncclGetUniqueId)(&raw mut id) } } else { 0 };
        ranks.agree(functions.check("ncclGetUniqueId", status), fault)?;
        ranks.broadcast(0, &mut id.internal)?;
        let mut handle = std::ptr::null_mut();
        let (size, rank) = (ranks.size(), ranks.rank());
        let connected = gpu.beside_kernels(|_| {
            // SAFETY: the address is valid, and the context of the GPU is current. All ranks make this call with the same identity.
            let status =
                unsafe { (functions.ncclCommInitRank)(&raw mut handle, size as c_int, id, rank as c_int) };
            functions.check("ncclCommInitRank", status)
        });
        ranks.agree(connected, fault)?;
        let connection =
            Connection { functions, handle, turn: Mutex::default(), over: AtomicBool::new(false) };
        let (gpu, connection) = (gpu.clone(), Arc::new(connection));
        let watch = Some(watch(&gpu, &connection)?);
        Ok(Self { gpu, connection, size, version, watch })
    }

    /// Returns the name and the version of the engine.
    pub fn name(&self) -> String {
        format!("NCCL {}.{}", self.version[0], self.version[1])
    }

    /// Exchanges blocks. Both arrays have a block for each rank; block `r` of `send` becomes block `own rank` of `recv` on rank `r`.
    pub fn all_to_all(&self, send: &Array, recv: &mut Array) {
        let block = send.num_bytes() / self.size;
        self.queue("ncclSend, ncclRecv", |f, handle, stream| {
            // SAFETY: both arrays have a block of `block` bytes for each rank.
            unsafe {
                let mut status = (f.ncclGroupStart)();
                for peer in 0..self.size {
                    let [from, to] = [send.place(0), recv.place(0)].map(|at| at + (peer * block) as u64);
                    let peer = peer as c_int;
                    let sent = (f.ncclSend)(from as *const c_void, block, BYTES, peer, handle, stream);
                    let received = (f.ncclRecv)(to as *mut c_void, block, BYTES, peer, handle, stream);
                    status = [status, sent, received].into_iter().find(|&status| status != 0).unwrap_or(0);
                }
                let ended = (f.ncclGroupEnd)();
                if status == 0 { ended } else { status }
            }
        });
    }

    /// Copies the `own` of every rank into its block of `all`, on all ranks.
    pub fn all_gather(&self, own: &Array, all: &mut Array) {
        let (from, to, len) = (own.place(0), all.place(0), own.num_bytes());
        self.queue("ncclAllGather", |f, handle, stream| {
            // SAFETY: `own` has `len` bytes, and `all` has `len` bytes for each rank.
            unsafe { (f.ncclAllGather)(from as *const c_void, to as *mut c_void, len, BYTES, handle, stream) }
        });
    }

    /// Copies the array of rank `root` to all ranks.
    pub fn broadcast(&self, root: usize, data: &mut Array) {
        let (at, len) = (data.place(0), data.num_bytes());
        self.queue("ncclBroadcast", |f, handle, stream| {
            let root = root as c_int;
            // SAFETY: the array has `len` bytes. The call may read and write the same array.
            unsafe {
                (f.ncclBroadcast)(at as *const c_void, at as *mut c_void, len, BYTES, root, handle, stream)
            }
        });
    }

    /// Replaces an f32 array by the sum over all ranks, in the order that NCCL chooses.
    pub fn sum(&self, data: &mut Array) {
        let (at, len) = (data.place(0), data.len());
        let (float, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        self.queue("ncclAllReduce", |f, handle, stream| {
            // SAFETY: the array has `len` numbers. The call may read and write the same array.
            unsafe {
                (f.ncclAllReduce)(at as *const c_void, at as *mut c_void, len, float, sum, handle, stream)
            }
        });
    }

    /// Queues an exchange behind the work of the GPU. `call` returns the status of NCCL.
    fn queue(
        &self,
        name: &'static str,
        call: impl FnOnce(&Functions, sys::ncclComm_t, sys::cudaStream_t) -> c_int,
    ) {
        let (gpu, connection) = (&self.gpu, &*self.connection);
        if gpu.failed() || gpu.refuses(|| "exchanges arrays between ranks".into()) {
            return;
        }
        let _turn = connection.turn();
        // The thread that ended the connection has stored the cause.
        if connection.is_over() {
            return;
        }
        gpu.note(gpu.beside_kernels(|stream| {
            connection.functions.check(name, call(&connection.functions, connection.handle, stream.cast()))
        }));
    }
}

/// Starts the thread that ends a connection that has failed.
fn watch(gpu: &Gpu, connection: &Arc<Connection>) -> Result<JoinHandle<()>> {
    let (gpu, own) = (gpu.clone(), Arc::clone(connection));
    let look = move || {
        while !own.is_over() {
            // The other ranks wait for a GPU that has failed until its connection ends.
            if gpu.failed() || gpu.note(own.failure()).is_none() {
                own.abort();
            }
            std::thread::park_timeout(PAUSE);
        }
    };
    let started = std::thread::Builder::new().name("nccl".into()).spawn(look);
    started.map_err(|error| Error::Unconnectable { what: format!("no thread can watch them: {error}") })
}

/// Checks that all ranks have the same version of NCCL, and a GPU of their own.
fn check_introductions(all: &[Introduction]) -> Result<()> {
    let failed = |what| Err(Error::Unconnectable { what });
    for (rank, (version, machine, bus)) in all.iter().enumerate() {
        for (other, (its_version, its_machine, its_bus)) in all[..rank].iter().enumerate() {
            if version != its_version {
                let [a, b] = [its_version, version].map(|v| format!("{}.{}", v[0], v[1]));
                return failed(format!(
                    "rank {other} has version {a} of it, and rank {rank} version {b}; install the same version for all ranks"
                ));
            }
            if bus.is_some() && (machine, bus) == (its_machine, its_bus) {
                return failed(format!(
                    "ranks {other} and {rank} use the same GPU; start at most one rank for each GPU of a machine"
                ));
            }
        }
    }
    Ok(())
}

impl Drop for Nccl {
    /// Ends the connection together with the other ranks. After a failure they may be gone, and it ends alone.
    fn drop(&mut self) {
        let connection = &self.connection;
        let was_over = connection.over.swap(true, Ordering::SeqCst);
        if let Some(watch) = self.watch.take() {
            watch.thread().unpark();
            // A panic of the thread changes nothing.
            let _ = watch.join();
        }
        if was_over {
            return;
        }
        if self.gpu.failed() || std::thread::panicking() {
            return connection.abort();
        }
        let _ = self.gpu.beside_kernels(|_| {
            // SAFETY: the connection exists, and nothing uses it afterwards. Nobody could use an error.
            let _ = unsafe { (connection.functions.ncclCommDestroy)(connection.handle) };
            Ok(())
        });
    }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} of {} GPUs", self.name(), self.size)
    }
}

impl Gpu {
    /// Sums blocks of equal length in the order of [`omnigrpo_ranks::sum::fold`], and writes the sum to `to`. Overwrites `parts`.
    pub fn fold_blocks(&self, to: &mut Array, parts: &mut Array) {
        let (len, blocks) = (to.len(), parts.len().checked_div(to.len()).unwrap_or(0));
        self.each(sums::fold_blocks(to, parts, blocks, len), len);
    }

    /// Calls another library that queues work. It receives the stream of the kernels, whose context is current.
    fn beside_kernels<T>(&self, call: impl FnOnce(*mut c_void) -> Result<T>) -> Result<T> {
        let _entered = self.enter();
        call(self.driver().stream()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_in_both_forms() {
        let read = [2_708, 21_803, 22_708, 23_001].map(version);
        assert_eq!(read, [[2, 7], [2, 18], [2, 27], [2, 30]]);
    }

    #[test]
    fn ranks_need_one_version_and_a_gpu_each() {
        let bus = |at: &str| Some(at.to_owned());
        let said = |all: &[Introduction]| check_introductions(all).unwrap_err().to_string();
        let both = [([2, 28], 0, bus("0000:01:00.0")), ([2, 28], 0, bus("0000:01:00.0"))];
        assert!(said(&both).contains("ranks 0 and 1 use the same GPU"), "{}", said(&both));
        let mut apart = both.clone();
        apart[1].1 = 1;
        assert_eq!(check_introductions(&apart), Ok(()));
        apart[1].0 = [2, 27];
        assert!(
            said(&apart).contains("rank 0 has version 2.28 of it, and rank 1 version 2.27"),
            "{}",
            said(&apart)
        );
        assert_eq!(check_introductions(&[([2, 28], 0, None), ([2, 28], 0, None)]), Ok(()));
    }
}
