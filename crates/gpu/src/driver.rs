//! The interface to what runs a device: the CUDA driver or the emulator.

use std::ffi::c_void;
use std::path::PathBuf;
use std::time::Instant;

use crate::error::Result;
use crate::launchers::{Args, Launch};
use crate::product::Product;
use crate::sources::FILES;

/// Number of rows and of elements in a piece of logits on a GPU: 64 MiB of f32.
pub(crate) const LOGITS: [usize; 2] = [2048, 1 << 24];

/// Order of work on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Kernels, and copies that the host waits for.
    Main,
    /// Copies that run beside the kernels.
    Copies,
}

/// Limits of a card, by which kernels are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block can have.
    pub block: usize,
    /// Bytes of shared memory of a multiprocessor.
    pub all: usize,
    /// Bytes of the second-level cache.
    pub cache: usize,
}

impl Limits {
    /// Bytes of shared memory that a block takes besides its own.
    const RESERVED: usize = 1 << 10;

    /// Returns the number of blocks with this many bytes of shared memory that a multiprocessor runs at a time.
    pub(crate) fn blocks(self, shared: usize) -> usize {
        if shared > self.block { 0 } else { self.all / (shared + Self::RESERVED) }
    }

    /// Returns true if blocks with `large` bytes of shared memory do not leave a multiprocessor with one block at a time, while two
    /// with `small` bytes would run.
    pub(crate) fn has_room(self, large: usize, small: usize) -> bool {
        let blocks = self.blocks(large);
        blocks > 0 && blocks >= self.blocks(small).min(2)
    }
}

/// A measurement or state, or the problem that was found.
pub type Checked = std::result::Result<String, String>;

/// Result of one check.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Subject of the check.
    pub name: String,
    pub result: Checked,
}

impl Finding {
    pub(crate) fn new(name: &str, result: Checked) -> Self {
        Self { name: name.to_owned(), result }
    }
}

/// The calls that a device needs. Addresses are those of the device. Work of [`Queue::Main`] runs in the order of the calls.
///
/// The defaults are those of a device that finishes its work before a call returns.
pub(crate) trait Driver: Send + Sync {
    fn name(&self) -> String;

    /// Returns the address on the PCI bus, or `None` for an emulator.
    fn bus(&self) -> Option<&str> {
        None
    }

    /// Returns the numbers of free and total bytes of memory, or `None` if they are unknown.
    fn memory(&self) -> Option<[usize; 2]>;

    fn limits(&self) -> Limits;

    /// Returns the number of rows and of elements in a piece of logits.
    fn logits(&self) -> [usize; 2];

    /// Returns the number of bytes in a buffer for copies.
    fn buffer(&self) -> usize;

    /// Returns the number of rows of the smallest batch.
    fn least_rows(&self) -> usize;

    fn alloc(&self, bytes: usize) -> Result<u64>;

    /// Frees memory of [`Self::alloc`], which was allocated with the same number of bytes, after the queued work.
    fn free(&self, at: u64, bytes: usize) -> Result<()>;

    /// Sets bytes to 0.
    fn clear(&self, at: u64, bytes: usize) -> Result<()>;

    /// Makes the contents of memory undefined, so that a test finds a read before a write.
    fn poison(&self, _at: u64, _bytes: usize) {}

    fn write(&self, at: u64, from: &[u8]) -> Result<()>;

    /// Reads bytes, after the queued work.
    fn read(&self, at: u64, to: &mut [u8]) -> Result<()>;

    fn launch(&self, launch: Launch, args: &mut Args) -> Result<()>;

    fn product(&self, product: &Product) -> Result<()>;

    /// Waits for all queued work of [`Queue::Main`].
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Starts recording work instead of executing it. The caller has exclusive use of the device, and makes no call that waits for it.
    fn begin_capture(&self) -> Result<()>;

    /// Ends the recording. Returns the number of the recorded work.
    fn end_capture(&self) -> Result<u64>;

    fn replay(&self, recorded: u64) -> Result<()>;

    /// Frees recorded work.
    fn forget(&self, recorded: u64) -> Result<()>;

    /// Allocates main memory that the device accesses directly.
    fn pin(&self, bytes: usize) -> Result<*mut u8>;

    /// Frees memory of [`Self::pin`], which was allocated with the same number of bytes. Its copies are complete.
    fn unpin(&self, at: *mut u8, bytes: usize) -> Result<()>;

    /// Returns an event at the end of the work that is queued now.
    fn mark(&self, _queue: Queue) -> Result<u64> {
        Ok(0)
    }

    /// Makes further work of a queue wait for an event.
    fn follow(&self, _queue: Queue, _event: u64) -> Result<()> {
        Ok(())
    }

    /// Waits until the device has reached an event.
    fn wait_for(&self, _event: u64) -> Result<()> {
        Ok(())
    }

    fn forget_mark(&self, _event: u64) -> Result<()> {
        Ok(())
    }

    /// Starts a copy to memory of [`Self::pin`] in [`Queue::Copies`].
    fn start_read(&self, from: u64, to: *mut u8, bytes: usize) -> Result<()>;

    /// Starts a copy from memory of [`Self::pin`] in [`Queue::Copies`].
    fn start_write(&self, to: u64, from: *const u8, bytes: usize) -> Result<()>;

    /// Makes the device current for another library, and returns the stream of the kernels.
    fn stream(&self) -> Result<*mut c_void> {
        Ok(std::ptr::null_mut())
    }

    /// Returns the folders in which other libraries of the device are searched first, and the newest CUDA version that its driver
    /// supports. `given` are those that the user has named.
    fn libraries(&self, given: &[PathBuf]) -> Result<(Vec<PathBuf>, Option<i32>)>;

    /// Compiles all kernels, until `until` at most. Returns the result of each file.
    fn compile_all(&self, _until: Instant) -> Vec<Result<()>> {
        vec![Ok(()); FILES.len()]
    }

    /// Begins to compile all kernels on other threads.
    fn begin_to_compile(&self) {}

    /// Returns what the driver knows of the health of the device.
    fn health(&self) -> Vec<Finding> {
        Vec::new()
    }

    #[cfg(feature = "emulator")]
    fn emulated(&self) -> Option<&crate::emulated::Emulated> {
        None
    }
}
