//! Weights: [`Param`] is the identity of a weight, with its storage and what training adds to it.

mod storage;
mod trained;
mod values;

use std::sync::Arc;

use memmap2::Mmap;
use omnigrpo_kernels::paths::Path;
use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
use omnigrpo_kernels::{Arithmetic, Stored};

use crate::error::{Error, Result};

pub use storage::WeightGuard;
use storage::{Data, Mapped, Place, Storage};
pub(crate) use trained::GradGuard;
use trained::Trained;
pub use values::Values;
pub(crate) use values::ValuesMut;

/// Part of a model to which a weight belongs. Learning rates and freezing are set per part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Language model, including embeddings and head.
    Llm,
    /// Projector, which maps tower features to the width of the language model.
    Projector,
    Vision,
    Audio,
    /// Text encoder whose output conditions the projector.
    Instruction,
}

impl Part {
    /// Every part, in display order.
    pub const ALL: [Self; 5] = [Self::Llm, Self::Projector, Self::Vision, Self::Audio, Self::Instruction];

    /// Returns the name of the part for tables and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llm => "llm",
            Self::Projector => "projector",
            Self::Vision => "vision",
            Self::Audio => "audio",
            Self::Instruction => "instruction",
        }
    }
}

/// Storage dtype of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamDtype {
    F32,
    Bf16,
    /// Quantised and frozen: one matrix `[n, k]`, or one per expert.
    Quantised(QuantBits),
}

/// One weight of a model: its published name, its values and its gradient. The weight of a linear layer can have an [`Adapter`](crate::Adapter).
#[derive(Debug)]
pub struct Param {
    name: String,
    part: Part,
    dtype: ParamDtype,
    shape: Vec<usize>,
    arithmetic: Arithmetic,
    storage: Storage,
    trained: Trained,
}

impl Param {
    /// Creates a frozen weight with its published name. Returns an error if the number of values does not match the shape.
    pub fn new(name: impl Into<String>, part: Part, shape: &[usize], values: Values) -> Result<Self> {
        let name = name.into();
        if values.len() != shape.iter().product::<usize>() {
            return Err(Error::Weight {
                name,
                what: format!("{} values for the shape {shape:?}", values.len()),
            });
        }
        let dtype = match values {
            Values::F32(_) => ParamDtype::F32,
            Values::Bf16(_) => ParamDtype::Bf16,
        };
        Ok(Self::over(name, part, Data::Dense(Place::values(values)), dtype, shape.to_vec()))
    }

    /// Creates a weight without values, which uses no memory. Such a weight serves to measure a model, or to continue checking
    /// the other weights when one could not be read. Operations with it fail, except on [`Device::Outline`](crate::Device::Outline). [`Self::read`]
    /// returns no values.
    pub fn outline(name: impl Into<String>, part: Part, shape: &[usize], dtype: ParamDtype) -> Self {
        let nothing = Data::Dense(Place::values(Values::F32(Vec::new())));
        let mut outline = Self::over(name.into(), part, nothing, dtype, shape.to_vec());
        outline.storage.is_outline = true;
        outline
    }

    /// Creates a quantised weight, which can never be trained. `shape` ends in the dimensions of the matrix, `[.., n, k]`.
    pub fn quantised(
        name: impl Into<String>,
        part: Part,
        shape: &[usize],
        value: QuantMatrix,
    ) -> Result<Self> {
        let name = name.into();
        if shape.len() < 2 || shape.iter().product::<usize>() != value.rows().len() {
            let what = format!("{} quantised values for the shape {shape:?}", value.rows().len());
            return Err(Error::Weight { name, what });
        }
        let dtype = ParamDtype::Quantised(value.bits());
        Ok(Self::over(name, part, Data::Quantised(Place::new(value)), dtype, shape.to_vec()))
    }

    /// Creates a frozen weight whose values stay in a mapped file, starting at byte `at`. It can never be trained or written.
    ///
    /// # Errors
    /// Returns an error if the values extend beyond the file or are misaligned, if the dtype is neither f32 nor bf16, or if the
    /// byte order of the system differs from that of the file.
    pub fn mapped(
        name: impl Into<String>,
        part: Part,
        shape: &[usize],
        dtype: ParamDtype,
        (map, at): (Arc<Mmap>, usize),
    ) -> Result<Self> {
        let (name, len) = (name.into(), shape.iter().product::<usize>());
        let size = match dtype {
            ParamDtype::F32 => 4,
            ParamDtype::Bf16 => 2,
            ParamDtype::Quantised(_) => 0,
        };
        let mapped = Mapped { map, bytes: at..at.saturating_add(size * len), dtype, on_loan: false };
        let found = match mapped.stored() {
            Stored::Bf16(data) => data.len(),
            Stored::F32(data) => data.len(),
            Stored::Quantised(_) => 0,
        };
        if size == 0 || found != len || cfg!(target_endian = "big") {
            let what = format!("{shape:?} in {dtype:?} cannot be read in place from byte {at} of its file");
            return Err(Error::Weight { name, what });
        }
        Ok(Self::over(name, part, Data::Mapped(Place::new(mapped)), dtype, shape.to_vec()))
    }

    fn over(name: String, part: Part, data: Data, dtype: ParamDtype, shape: Vec<usize>) -> Self {
        let (arithmetic, storage, trained) = (Arithmetic::default(), Storage::new(data), Trained::default());
        Self { name, part, dtype, shape, arithmetic, storage, trained }
    }

    /// Multiplies with the weight by this arithmetic, if it is on a CPU.
    #[must_use]
    pub fn with(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    /// Returns how a CPU multiplies with the weight.
    #[must_use]
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// Returns the path of products with the weight if it is stored as bf16.
    pub(crate) fn rounding(&self) -> Option<Path> {
        (self.dtype == ParamDtype::Bf16).then(|| self.arithmetic.path())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn part(&self) -> Part {
        self.part
    }

    /// Returns the published shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn dtype(&self) -> ParamDtype {
        self.dtype
    }

    /// Returns the size of the values in bytes. For an outline, this is the size that its values would have.
    pub fn num_bytes(&self) -> usize {
        match (&self.storage.data, self.dtype) {
            (Data::Quantised(value), _) => value.host.num_bytes(),
            (_, ParamDtype::F32) => 4 * self.len(),
            (_, ParamDtype::Bf16) => 2 * self.len(),
            (_, ParamDtype::Quantised(bits)) => {
                let k = self.shape.last().copied().unwrap_or(1).max(1);
                bits.matrix_bytes(self.len() / k, k)
            }
        }
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a frozen copy of the weight in separate storage, without an adapter, for a reference model.
    pub fn frozen_copy(&self) -> Self {
        let mut copy = self.bare();
        if let Data::Dense(values) = &self.storage.data {
            copy.storage.data = Data::Dense(Place::values(values.read().clone()));
        }
        copy
    }

    /// Returns a frozen handle to the same storage, without an adapter.
    pub fn bare(&self) -> Self {
        Self {
            name: self.name.clone(),
            part: self.part,
            dtype: self.dtype,
            shape: self.shape.clone(),
            arithmetic: self.arithmetic,
            storage: self.storage.clone(),
            trained: Trained::default(),
        }
    }

    /// Returns a frozen handle to the same storage under another name, without an adapter.
    pub fn named(&self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self.bare() }
    }
}
