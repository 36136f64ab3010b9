//! MPI, loaded at run time. One binary runs with Open MPI, with MPICH and every library with its ABI (Intel MPI, MVAPICH, Cray
//! MPICH), with every library that has the standard ABI of MPI 5, and without MPI.
//!
//! Calls move bytes, so few handles are needed: the world, the types of a byte and a float, the sum, and an error handler. Only
//! their values differ between ABIs: addresses of symbols in Open MPI, 32-bit numbers in MPICH, small pointers in the standard.
//! All are passed as `usize`. On the 64-bit systems that are supported, a 32-bit argument is the lower half of a register whose
//! upper half the callee ignores.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::{Engine, Error, Launcher, Result};

type Handle = usize;

/// Variable that names a library of MPI.
const VARIABLE: &str = "OMNIGRPO_MPI";

/// Maximum number of bytes that one call moves, because counts are 32-bit.
const MOST: usize = 1 << 30;

type Exchange =
    unsafe extern "C" fn(*const c_void, c_int, Handle, *mut c_void, c_int, Handle, Handle) -> c_int;

/// Functions and handles of a library.
struct Api {
    all_to_all: Exchange,
    all_gather: Exchange,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, c_int, Handle, Handle, Handle) -> c_int,
    broadcast: unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, Handle) -> c_int,
    barrier: unsafe extern "C" fn(Handle) -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
    handles: Handles,
}

/// Values that differ between ABIs.
#[derive(Clone, Copy)]
struct Handles {
    world: Handle,
    byte: Handle,
    float: Handle,
    sum: Handle,
    errors_return: Handle,
    in_place: usize,
    thread_serialized: c_int,
}

/// Values of MPICH 3.1 and later, and of all members of the MPICH ABI initiative.
const MPICH: Handles = Handles {
    world: 0x4400_0000,
    byte: 0x4c00_010d,
    float: 0x4c00_040a,
    sum: 0x5800_0003,
    errors_return: 0x5400_0001,
    in_place: usize::MAX,
    thread_serialized: 2,
};

/// Values of MPI 5.0, chapter 21.
const STANDARD: Handles = Handles {
    world: 0x101,
    byte: 0x247,
    float: 0x210,
    sum: 0x21,
    errors_return: 0x142,
    in_place: 1,
    thread_serialized: 2048,
};

/// Processes that an MPI launcher started.
pub struct Mpi {
    api: Api,
    rank: usize,
    size: usize,
    name: String,
    /// Guard of the library, which allows one call at a time from any thread (`MPI_THREAD_SERIALIZED`).
    turn: Mutex<()>,
}

impl Mpi {
    /// Loads the library of the launcher and connects its `launched` processes. A process can connect only once.
    ///
    /// # Errors
    /// Returns an error if no library can be loaded, or if it does not belong to the launcher.
    pub fn connect(launcher: Launcher, launched: usize) -> Result<Self> {
        let library = load(launcher)?;
        // SAFETY: names and types are those of the MPI standard, and handles are passed as described at the top of the file. The
        // library is never unloaded, so the pointers stay valid.
        unsafe {
            let handles = handles(&library);
            let init: unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int =
                symbol(&library, "MPI_Init_thread")?;
            let number: [unsafe extern "C" fn(Handle, *mut c_int) -> c_int; 2] =
                [symbol(&library, "MPI_Comm_rank")?, symbol(&library, "MPI_Comm_size")?];
            let on_error: unsafe extern "C" fn(Handle, Handle) -> c_int =
                symbol(&library, "MPI_Comm_set_errhandler")?;
            let version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int =
                symbol(&library, "MPI_Get_library_version")?;
            let api = Api {
                all_to_all: symbol(&library, "MPI_Alltoall")?,
                all_gather: symbol(&library, "MPI_Allgather")?,
                all_reduce: symbol(&library, "MPI_Allreduce")?,
                broadcast: symbol(&library, "MPI_Bcast")?,
                barrier: symbol(&library, "MPI_Barrier")?,
                error_string: symbol(&library, "MPI_Error_string")?,
                finalize: symbol(&library, "MPI_Finalize")?,
                handles,
            };
            // Longer than the longest version text of all ABIs.
            let (mut text, mut length) = (vec![0 as c_char; 16384], 0);
            version(text.as_mut_ptr(), &mut length);
            let name = CStr::from_ptr(text.as_ptr()).to_string_lossy();
            let name = name.split([',', '\n']).next().unwrap_or_default();
            let name = name.split_whitespace().collect::<Vec<_>>().join(" ");

            let mut provided = 0;
            api.check(
                "MPI_Init_thread",
                init(null_mut(), null_mut(), handles.thread_serialized, &mut provided),
            )?;
            std::mem::forget(library);
            api.check("MPI_Comm_set_errhandler", on_error(handles.world, handles.errors_return))?;
            let [mut rank, mut size] = [0; 2];
            api.check("MPI_Comm_rank", number[0](handles.world, &mut rank))?;
            api.check("MPI_Comm_size", number[1](handles.world, &mut size))?;
            let (rank, size) = (rank as usize, size as usize);
            if provided < handles.thread_serialized {
                let what = format!("{name} supports no calls from several threads");
                return Err(Error::Engine { call: "MPI_Init_thread", what });
            }
            if size != launched {
                return Err(Error::OtherMpi { launched, engine: name, connected: size, variable: VARIABLE });
            }
            Ok(Self { api, rank, size, name, turn: Mutex::new(()) })
        }
    }

    fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> c_int) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let code = call(&self.api);
        self.api.check(name, code)
    }

    /// Moves at most [`MOST`] bytes per call. `send` has `from` blocks and `recv` has `to` blocks of the same size.
    fn in_pieces(
        &self,
        name: &'static str,
        [from, to]: [usize; 2],
        send: &[u8],
        recv: &mut [u8],
        call: impl Fn(&Api, *const c_void, c_int, *mut c_void) -> c_int,
    ) -> Result<()> {
        let block = recv.len() / to;
        if send.len() != from * block || recv.len() != to * block {
            return Err(Error::Size { call: name, got: send.len(), unit: "bytes", expected: from * block });
        }
        let most = MOST / to.max(from);
        if block <= most {
            return self
                .call(name, |api| call(api, send.as_ptr().cast(), block as c_int, recv.as_mut_ptr().cast()));
        }
        let gather = |bytes: &[u8], count: usize, at: usize, len: usize| -> Vec<u8> {
            (0..count).flat_map(|b| bytes[b * block + at..][..len].iter().copied()).collect()
        };
        for at in (0..block).step_by(most) {
            let len = most.min(block - at);
            let (piece, mut out) = (gather(send, from, at, len), vec![0; to * len]);
            self.call(name, |api| call(api, piece.as_ptr().cast(), len as c_int, out.as_mut_ptr().cast()))?;
            for (b, out) in out.chunks(len).enumerate() {
                recv[b * block + at..][..len].copy_from_slice(out);
            }
        }
        Ok(())
    }
}

impl Engine for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.in_pieces("MPI_Alltoall", [self.size; 2], send, recv, |api, send, len, recv| {
            let Handles { byte, world, .. } = api.handles;
            // SAFETY: both buffers have a block of `len` bytes for each rank.
            unsafe { (api.all_to_all)(send, len, byte, recv, len, byte, world) }
        })
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) -> Result<()> {
        self.in_pieces("MPI_Allgather", [1, self.size], own, all, |api, own, len, all| {
            let Handles { byte, world, .. } = api.handles;
            // SAFETY: `own` has `len` bytes, and `all` has `len` bytes for each rank.
            unsafe { (api.all_gather)(own, len, byte, all, len, byte, world) }
        })
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        bytes.chunks_mut(MOST).try_for_each(|piece| {
            self.call("MPI_Bcast", |api| {
                let Handles { byte, world, .. } = api.handles;
                let (to, len) = (piece.as_mut_ptr().cast(), piece.len() as c_int);
                // SAFETY: the buffer has `len` bytes.
                unsafe { (api.broadcast)(to, len, byte, root as c_int, world) }
            })
        })
    }

    fn barrier(&self) -> Result<()> {
        // SAFETY: the call has no buffer.
        self.call("MPI_Barrier", |api| unsafe { (api.barrier)(api.handles.world) })
    }

    fn sum(&self, data: &mut [f32]) -> Option<Result<()>> {
        let done = data.chunks_mut(MOST / 4).try_for_each(|piece| {
            self.call("MPI_Allreduce", |api| {
                let Handles { float, sum, world, in_place, .. } = api.handles;
                let to = piece.as_mut_ptr().cast();
                // SAFETY: the buffer has `piece.len()` numbers; the call reads and writes it in place.
                unsafe {
                    (api.all_reduce)(in_place as *const c_void, to, piece.len() as c_int, float, sum, world)
                }
            })
        });
        Some(done)
    }
}

impl Drop for Mpi {
    /// Finalizes MPI together with the other ranks. While a panic unwinds they may be gone, so it does nothing then.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: nothing of the library is called afterwards, because this value is gone. Nobody could use an error.
            let _ = unsafe { (self.api.finalize)() };
        }
    }
}

impl Api {
    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut length) = (vec![0 as c_char; 8192], 0);
        // SAFETY: the buffer is longer than the longest message of all ABIs.
        let what = unsafe {
            (self.error_string)(code, text.as_mut_ptr(), &mut length);
            CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
        };
        Err(Error::Engine { call, what })
    }
}

/// Loads the library that `OMNIGRPO_MPI` names, else the launcher's own, else another one.
fn load(launcher: Launcher) -> Result<Library> {
    const OPEN_MPI: [&str; 2] = ["libmpi.so.40", "libmpi.so.80"];
    const OF_MPICH: [&str; 2] = ["libmpich.so.12", "libmpi.so.12"];
    const OF_THE_STANDARD: [&str; 2] = ["libmpi_abi.so.1", "libmpi_abi.so"];
    let names: Vec<String> = match std::env::var(VARIABLE).ok().filter(|path| !path.is_empty()) {
        Some(path) => vec![path],
        None => {
            let order = match launcher {
                Launcher::OpenMpi => [OPEN_MPI, OF_THE_STANDARD, OF_MPICH],
                _ => [OF_MPICH, OF_THE_STANDARD, OPEN_MPI],
            };
            order.into_iter().flatten().map(str::to_owned).collect()
        }
    };
    let mut tried = Vec::new();
    for name in names {
        // SAFETY: a library of MPI does nothing when it is loaded. Its plugins look for its symbols, hence the global scope.
        match unsafe { Library::open(Some(&name), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => return Ok(library),
            Err(error) => {
                use std::error::Error as _;
                let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                tried.push(if why.contains(&name) { why } else { format!("{name}: {why}") });
            }
        }
    }
    Err(Error::NoLibrary { tried: tried.join("; "), variable: VARIABLE })
}

/// Returns the handles of a library. Open MPI is recognised by its symbols, and the standard ABI by its version.
///
/// # Safety
/// `library` is a library of MPI.
unsafe fn handles(library: &Library) -> Handles {
    let address = |name: &str| -> Option<usize> {
        // SAFETY: only the address is used.
        unsafe { library.get::<*mut c_void>(name.as_bytes()).ok().map(|symbol| symbol.into_raw() as usize) }
    };
    let own = [
        "ompi_mpi_comm_world",
        "ompi_mpi_byte",
        "ompi_mpi_float",
        "ompi_mpi_op_sum",
        "ompi_mpi_errors_return",
    ];
    let own: Option<Vec<usize>> = own.into_iter().map(address).collect();
    if let Some(&[world, byte, float, sum, errors_return]) = own.as_deref() {
        return Handles { world, byte, float, sum, errors_return, in_place: 1, thread_serialized: 2 };
    }
    let (mut major, mut minor) = (-1, -1);
    // SAFETY: the type is that of MPI 5, and the call is allowed before MPI is initialised. A library that has the function and
    // an ABI of its own, such as `libmpi.so.12` of MPICH 5, returns -1.
    unsafe {
        type AbiVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        if let Ok(version) = symbol::<AbiVersion>(library, "MPI_Abi_get_version") {
            version(&mut major, &mut minor);
        }
    }
    if major >= 1 { STANDARD } else { MPICH }
}

/// Returns a function of a library.
///
/// # Safety
/// `T` is the type of the symbol.
unsafe fn symbol<T: Copy>(library: &Library, name: &'static str) -> Result<T> {
    // SAFETY: the caller guarantees the type.
    match unsafe { library.get::<T>(name.as_bytes()) } {
        Ok(symbol) => Ok(*symbol),
        Err(error) => Err(Error::Engine { call: name, what: error.to_string() }),
    }
}
