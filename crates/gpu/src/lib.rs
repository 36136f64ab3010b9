//! Operations on a GPU: CUDA C++ kernels, which are compiled at run time, and the host code that launches them.
//!
//! * The kernels are source text in `cuda/`. On a GPU, NVRTC compiles them, and cuBLASLt computes products. All libraries are
//!   loaded when a GPU is opened, so CUDA is not needed to build or start this program.
//! * With the feature `emulator`, g++ compiles the same text against `emu/`, which runs a fiber for each thread. Tests can then
//!   run every kernel and the complete host code on a machine without a GPU.
//! * Sums of floats have a fixed order, and no float is added atomically. The same GPU and libraries therefore give the same bits.
//!
//! Functions take arrays and sizes, queue work and return new arrays. Callers must ensure that sizes match, as in
//! `omnigrpo-kernels`. The shapes use these names: `t` rows, `h` width, `n`/`k` outputs/inputs of a linear layer, `d` head width.

mod attention;
mod blas;
mod checkup;
mod conv;
mod cuda;
mod device;
mod driver;
mod elementwise;
#[cfg(feature = "emulator")]
mod emulated;
mod error;
mod experts;
mod graph;
mod head;
mod images;
pub mod launchers;
mod libraries;
mod linear;
mod nccl;
mod norm;
mod nvml;
pub mod nvrtc;
mod optim;
mod product;
mod recent;
mod recurrent;
mod sample;
pub mod sources;
mod sums;
mod transfers;

pub use attention::{CachedGroup, Decoding, DecodingSize, Heads, PAGE, Pattern, Turn, cached_scratch};
pub use conv::Unfolding;
pub use cuda::{Found, Survey, survey};
pub use device::{Array, Dtype, Gpu, Pack};
pub use driver::{Checked, Finding};
pub use elementwise::Place;
pub use error::{Error, Result};
pub use experts::Chosen;
pub use graph::{Arena, Graph};
pub use head::{Head, Marks, piece};
pub use launchers::{Element, Kernel};
pub use libraries::{Library, folders, libraries};
pub use linear::{Affine, Codes, Onto, Weight, few_rows_scratch};
pub use nccl::{Nccl, nccl};
pub use nvml::{Load, Monitor};
pub use optim::{MomentCodes, Moments, Step};
pub use recurrent::{Sequences, continued, delta_scratch};
pub use sample::{DrawPlaces, DrawSize, Drawn, Draws, Row, Sampling};
pub use sums::Mixture;
pub use transfers::{Arriving, Transfers, copy_bytes};
