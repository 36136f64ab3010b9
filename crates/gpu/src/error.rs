//! Errors of devices.

use std::path::PathBuf;

/// An error of a device. A device stores its first error, and later work computes nothing. Every caller receives this
/// error, so it can be cloned and holds the messages of drivers and compilers as text.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error(
        "no NVIDIA driver was found (libcuda); install the GPU's driver (Ubuntu: `sudo ubuntu-drivers install`, \
         Debian: `sudo apt install nvidia-driver`), or use the CPU"
    )]
    NoDriver,
    /// Driver older than the kernels need.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, expected {}.{} or newer (driver 580); update the driver, or use the CPU",
        got / 1000, got % 1000 / 10, expected / 1000, expected % 1000 / 10
    )]
    OldDriver {
        /// Newest CUDA version it supports, `1000 · major + 10 · minor`.
        got: i32,
        /// Oldest supported version.
        expected: i32,
    },
    /// No GPU with this number.
    #[error("there is no GPU {ordinal}: the driver reports {count} (CUDA_VISIBLE_DEVICES may hide others)")]
    NoDevice {
        /// Requested number.
        ordinal: usize,
        /// Number of GPUs.
        count: usize,
    },
    /// GPU older than the kernels need.
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
    /// GPU in use by others, so that it cannot be opened.
    #[error(
        "{name} cannot be opened: {what}; another program holds it (`nvidia-smi` lists them): end it, or use another GPU or the CPU"
    )]
    Occupied {
        name: String,
        /// Message of the driver.
        what: String,
    },
    /// CUDA library that is not installed.
    #[error(
        "{library} was not found; install it with `pip install '{package}>=13,<14'` or the CUDA toolkit 13, in the active Python \
         environment or with its folder in CUDA_HOME or LD_LIBRARY_PATH"
    )]
    Library {
        /// File name.
        library: &'static str,
        /// Python package that contains it.
        package: &'static str,
    },
    /// Insufficient GPU memory.
    #[error(
        "out of GPU memory: {wanted} bytes needed, {free} of {total} free; lower the tokens of a pass (max_stream_tokens), \
         recompute activations (gradient_checkpointing), store the optimizer's state in main memory (offload_optimizer) and \
         the reference on the CPU (reference_device), or train adapters (use_peft) on weights in bfloat16 or fewer bits \
         (load_in_8bit, load_in_4bit)"
    )]
    Memory {
        /// Bytes of the array that did not fit.
        wanted: usize,
        /// Bytes free at that time.
        free: usize,
        /// Bytes of the GPU.
        total: usize,
    },
    /// Kernels that did not compile.
    #[error("{file}.cu does not compile for {arch}: {log}")]
    Compile {
        file: String,
        arch: String,
        /// Message of the compiler.
        log: String,
    },
    /// Launch that was refused or failed.
    #[error("kernel {kernel}: {what}")]
    Launch {
        /// Kernel, as `file/name`.
        kernel: String,
        /// Message of the driver.
        what: String,
    },
    /// Work that cannot be recorded, or a graph that cannot be replayed.
    #[error("GPU work cannot be replayed: it {what}")]
    Capture {
        /// Reason, as a verb phrase.
        what: String,
    },
    /// Product for which cuBLASLt has no algorithm, or which failed.
    #[error("product {m}×{n}×{k}: {what}")]
    Product {
        m: usize,
        n: usize,
        /// Terms of each sum.
        k: usize,
        /// Message of cuBLASLt.
        what: String,
    },
    /// Driver call that failed.
    #[error("{call}: {what}")]
    Driver {
        /// Name of the call.
        call: &'static str,
        /// Message of the driver.
        what: String,
    },
    /// File of compiled kernels that cannot be written or read.
    #[error("compiled kernels in {path}: {what}")]
    Cache {
        path: PathBuf,
        /// Message of the system.
        what: String,
    },
}

pub type Result<T> = std::result::Result<T, Error>;
