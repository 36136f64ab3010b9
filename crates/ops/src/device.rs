//! Devices. A [`Device`] is a value that callers pass down; there is no global device.

use std::fmt;

use crate::error::{Error, Result};
use crate::outline;
use crate::rows::Rows;

/// Device that stores arrays and computes with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// CPU: f32 in main memory, with the kernels of `omnigrpo-kernels`.
    #[default]
    Cpu,
    /// Reference for tests: f64 in main memory, with plain loops.
    #[cfg(feature = "twin")]
    Twin,
    /// NVIDIA GPU or emulator of one: bf16 or f32 in GPU memory, with the kernels of `omnigrpo-gpu`.
    Gpu(crate::gpu::Card),
    /// Sizes without values, which measure the memory that a pass needs ([`footprint`](crate::footprint)). Weights may be
    /// outlines.
    Outline,
}

impl Device {
    /// Returns the devices of this build that are available on every machine, including a new emulator.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Cpu];
        #[cfg(feature = "twin")]
        all.push(Self::Twin);
        all.extend(Self::emulator());
        all
    }

    /// Creates an emulator of a GPU. Returns `None` in builds without the feature `emulator`.
    pub fn emulator() -> Option<Self> {
        #[cfg(feature = "emulator")]
        return Some(Self::Gpu(crate::gpu::Card::emulated(None)));
        #[cfg(not(feature = "emulator"))]
        None
    }

    /// Begins to compile the kernels of a GPU on other threads, so that its first operations wait for less.
    pub fn begin_to_compile(self) {
        if let Self::Gpu(card) = self {
            card.gpu().begin_to_compile();
        }
    }

    /// Waits for the queued work of this device and returns the first failure, such as insufficient memory. An operation on a GPU
    /// is only queued, so it does not report a failure. After a failure, all results are NaN.
    pub fn finish(self) -> Result<()> {
        match self {
            Self::Gpu(card) => card.finish(),
            _ => Ok(()),
        }
    }

    /// Returns the number of rows for which logits are computed and drawn at a time. On a GPU, the tokens of all rows in a batch
    /// reach the host in one copy. On a CPU, the logits stay in the processor's cache.
    pub fn logit_rows(self) -> usize {
        match self {
            Self::Gpu(_) => 128,
            Self::Outline if outline::is_on_card() => 128,
            _ => 16,
        }
    }

    /// Returns whether decoding stores the values that a backward pass needs, so that the host can read them.
    pub fn remembers_decoding(self) -> bool {
        self == Self::Cpu
    }

    /// Returns an error if `rows` is on another device.
    pub(crate) fn check(self, op: &'static str, rows: &Rows) -> Result<()> {
        match rows.device() {
            got if got == self => Ok(()),
            got => Err(Error::Device { op, got, expected: self }),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            #[cfg(feature = "twin")]
            Self::Twin => f.write_str("twin"),
            Self::Gpu(card) => card.fmt(f),
            Self::Outline => f.write_str("outline"),
        }
    }
}
