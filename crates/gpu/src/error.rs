//! What can go wrong on a device.

use std::path::PathBuf;

/// An error of a device. The first one of a device stays with it: what follows computes nothing. It is told to every caller, so
/// it can be cloned, and keeps what drivers and compilers said as text.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// There is no NVIDIA driver.
    #[error(
        "no NVIDIA driver was found (libcuda); install the card's (Ubuntu: `sudo ubuntu-drivers install`, Debian: `sudo apt install \
         nvidia-driver`), or use the CPU"
    )]
    NoDriver,
    /// The driver is older than the kernels need.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, expected {}.{} or newer (driver 580); update the driver, or use the CPU",
        got / 1000, got % 1000 / 10, expected / 1000, expected % 1000 / 10
    )]
    OldDriver {
        /// `1000 · major + 10 · minor` of the newest CUDA it supports.
        got: i32,
        /// The oldest that will do.
        expected: i32,
    },
    /// A card that is not there.
    #[error("there is no GPU {ordinal}; the driver sees {count} (CUDA_VISIBLE_DEVICES hides others)")]
    NoDevice {
        /// The one asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A card without what kernels are written for.
    #[error(
        "{name} has compute capability {major}.{minor}, expected 8.0 or higher (Ampere, 2020); use another card or the CPU"
    )]
    OldDevice {
        /// The card.
        name: String,
        /// Of its compute capability.
        major: i32,
        /// Of its compute capability.
        minor: i32,
    },
    /// A card that others use, so that it cannot be opened.
    #[error(
        "{name} cannot be opened: {what}; another program holds it (`nvidia-smi` lists them): end that, or use another card or the CPU"
    )]
    Occupied {
        /// The card.
        name: String,
        /// What the driver said.
        what: String,
    },
    /// A library of CUDA that is not installed.
    #[error(
        "{library} was not found; install it with `pip install '{package}>=13,<14'` or the CUDA toolkit 13, in the active Python \
         environment or with its folder in CUDA_HOME or LD_LIBRARY_PATH"
    )]
    Library {
        /// As files are called.
        library: &'static str,
        /// The Python package that brings it.
        package: &'static str,
    },
    /// No memory of the device.
    #[error(
        "out of GPU memory: {wanted} bytes wanted, {free} of {total} free; lower the tokens of a pass (max_stream_tokens), \
         compute activations again (gradient_checkpointing), hold the optimizer's state in main memory (offload_optimizer) and \
         the reference on the CPU (reference_device), or train adapters (use_peft) on weights in bfloat16 or fewer bits \
         (load_in_8bit, load_in_4bit)"
    )]
    Memory {
        /// Bytes of the array that did not fit.
        wanted: usize,
        /// Bytes free then.
        free: usize,
        /// Bytes of the card.
        total: usize,
    },
    /// Kernels that did not compile.
    #[error("{file}.cu does not compile for {arch}: {log}")]
    Compile {
        /// The file of kernels.
        file: String,
        /// The architecture.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// A launch that was refused, or failed.
    #[error("kernel {kernel}: {what}")]
    Launch {
        /// File and name.
        kernel: String,
        /// What the driver said.
        what: String,
    },
    /// Work that cannot be recorded, or a record that cannot be run.
    #[error("work that is recorded to run again {what}")]
    Capture {
        /// What it does that a record cannot do.
        what: String,
    },
    /// A product for which cuBLASLt has no algorithm, or which failed.
    #[error("product {m}×{n}×{k}: {what}")]
    Product {
        /// Rows.
        m: usize,
        /// Columns.
        n: usize,
        /// Terms of a sum.
        k: usize,
        /// What cuBLASLt said.
        what: String,
    },
    /// A call of the driver that failed.
    #[error("{call}: {what}")]
    Driver {
        /// What was asked of it.
        call: &'static str,
        /// What it said.
        what: String,
    },
    /// A file of compiled kernels that cannot be written or read.
    #[error("compiled kernels in {path}: {what}")]
    Cache {
        /// The file.
        path: PathBuf,
        /// What the system said.
        what: String,
    },
}

/// The result of what can fail at once.
pub type Result<T> = std::result::Result<T, Error>;
