//! Errors of devices.

use std::path::PathBuf;

/// An error of a device.
///
/// A device stores its first error, and later work computes nothing. Every caller receives this error. It can therefore be
/// cloned, and contains the messages of drivers and compilers as text.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error(
        "no NVIDIA driver was found (libcuda); install the GPU's driver (Ubuntu: `sudo ubuntu-drivers install`, \
         Debian: `sudo apt install nvidia-driver`), or use the CPU"
    )]
    NoDriver,
    /// Driver that is older than the kernels require.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, expected {}.{} or newer (driver 525); update the driver, or use the CPU",
        got / 1000, got % 1000 / 10, expected / 1000, expected % 1000 / 10
    )]
    OldDriver {
        /// Newest CUDA version that the driver supports, `1000 · major + 10 · minor`.
        got: i32,
        /// Oldest CUDA version that the driver must support.
        expected: i32,
    },
    /// GPU number that does not exist.
    #[error(
        "GPU {ordinal} does not exist: the driver reports {count} in total (CUDA_VISIBLE_DEVICES may hide others)"
    )]
    NoDevice {
        /// Requested GPU number.
        ordinal: usize,
        /// Number of GPUs that the driver reports.
        count: usize,
    },
    /// GPU that is older than the kernels require.
    #[error(
        "{name} has compute capability {major}.{minor}, expected 8.0 or higher (Ampere, 2020); use another GPU or the CPU"
    )]
    OldDevice {
        name: String,
        /// Major version of its compute capability.
        major: i32,
        /// Minor version of its compute capability.
        minor: i32,
    },
    /// GPU that cannot be opened because other processes use it.
    #[error(
        "{name} cannot be opened: {what}; another program uses this GPU (`nvidia-smi` lists programs); end that program, or use another GPU or the CPU"
    )]
    Occupied {
        name: String,
        /// Message from the driver.
        what: String,
    },
    /// CUDA library that is not installed.
    #[error(
        "{library} was not found; install it with `pip install '{package}'` or the CUDA toolkit, in the active Python environment \
         or with its folder in CUDA_HOME or LD_LIBRARY_PATH"
    )]
    Library {
        /// File name of the library.
        library: &'static str,
        /// Python package that contains the library for this driver.
        package: String,
    },
    /// CUDA library for a newer driver.
    #[error(
        "{path} is version {}.{}, expected at most {}, since the NVIDIA driver supports CUDA {}.{}; install a library for this driver \
         with `pip install '{package}'`, or update the driver",
        version[0], version[1], supports / 1000, supports / 1000, supports % 1000 / 10
    )]
    NewLibrary {
        path: PathBuf,
        /// Version of the library as `[major, minor]`.
        version: [i32; 2],
        /// Newest CUDA version that the driver supports, `1000 · major + 10 · minor`.
        supports: i32,
        /// Python package that contains the library for this driver.
        package: String,
    },
    /// Library that is older than this program requires.
    #[error("{path} is version {}.{}, expected {}.{} or newer; install a newer one with `pip install -U '{package}'`",
        version[0], version[1], expected[0], expected[1])]
    OldLibrary {
        path: PathBuf,
        /// Version of the library as `[major, minor]`.
        version: [i32; 2],
        /// Oldest version that suffices.
        expected: [i32; 2],
        /// Python package that contains the library for this driver.
        package: String,
    },
    /// Library that cannot be loaded or lacks functions.
    #[error("{path} cannot be used: {what}; install the library again")]
    DamagedLibrary {
        path: PathBuf,
        /// Message from the system.
        what: String,
    },
    /// Insufficient GPU memory for an array.
    #[error(
        "out of GPU memory: {wanted} bytes needed, {free} of {total} free; lower the number of tokens per pass (max_stream_tokens), \
         recompute activations (gradient_checkpointing), store the optimizer's state in main memory (offload_optimizer) and \
         the reference on the CPU (reference_device), or train adapters (use_peft) on weights in bfloat16, 8 bits \
         (load_in_8bit) or 4 bits (load_in_4bit)"
    )]
    Memory {
        /// Size of the array that did not fit, in bytes.
        wanted: usize,
        /// Number of bytes that were free at that time.
        free: usize,
        /// Memory of the GPU in bytes.
        total: usize,
    },
    /// File of kernels that does not compile.
    #[error("{file}.cu does not compile for {arch}: {log}")]
    Compile {
        file: String,
        arch: String,
        /// Message from the compiler.
        log: String,
    },
    /// File of kernels whose compilation was ended because it took too long.
    #[error("{file}.cu was not compiled in time; the first run that needs it compiles it")]
    Late { file: String },
    /// Kernel launch that was refused or failed.
    #[error("kernel {kernel}: {what}")]
    Launch {
        /// Name of the kernel, as `file/name`.
        kernel: String,
        /// Message from the driver.
        what: String,
    },
    /// Work that cannot be recorded, or a graph that cannot be replayed.
    #[error("GPU work cannot be replayed: it {what}")]
    Capture {
        /// Reason, as a verb phrase.
        what: String,
    },
    /// Product that failed, or for which cuBLASLt has no algorithm.
    #[error("product {m}×{n}×{k}: {what}")]
    Product {
        m: usize,
        n: usize,
        /// Number of terms in each sum.
        k: usize,
        /// Message from cuBLASLt.
        what: String,
    },
    /// Kernel that failed while it ran. The driver reports this at a later call.
    #[error(
        "a kernel failed ({call}: {what}); the last ones were {kernels}; the variable CUDA_LAUNCH_BLOCKING=1 makes the driver report \
         the failing one itself"
    )]
    Fault {
        /// Name of the driver call that reported the error.
        call: &'static str,
        /// Message from the driver.
        what: String,
        /// Last launches, the newest first.
        kernels: String,
    },
    /// Driver call that failed.
    #[error("{call}: {what}")]
    Driver {
        /// Name of the driver call.
        call: &'static str,
        /// Message from the driver.
        what: String,
    },
    /// Call of NCCL that failed, or a connection between GPUs that was lost.
    #[error("{call}: {what}; the variable NCCL_DEBUG=INFO makes NCCL print the cause")]
    Nccl {
        /// Name of the call.
        call: &'static str,
        /// Message from NCCL.
        what: String,
    },
    /// GPUs of several ranks that NCCL cannot connect.
    #[error("NCCL cannot connect the GPUs of the ranks: {what}")]
    Unconnectable {
        /// Reason.
        what: String,
    },
    /// Failure of another rank, or of the connection to it.
    #[error("{what}")]
    Rank {
        /// Message.
        what: String,
    },
    /// File of compiled kernels that cannot be written or read.
    #[error("compiled kernels in {path}: {what}")]
    Cache {
        path: PathBuf,
        /// Message from the system.
        what: String,
    },
}

impl From<omnigrpo_ranks::Error> for Error {
    fn from(error: omnigrpo_ranks::Error) -> Self {
        Self::Rank { what: error.to_string() }
    }
}

pub type Result<T> = std::result::Result<T, Error>;
