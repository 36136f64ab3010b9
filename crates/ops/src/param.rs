//! Weights and their gradients.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use half::bf16;
use omnigrpo_kernels::Weight;

use crate::slices::f32_of;

/// Which part of a model a weight belongs to. Learning rates and freezing go by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The language model, embeddings and head included.
    Llm,
    /// What maps tower features to the language model's width.
    Projector,
    /// The vision tower.
    Vision,
    /// The audio tower.
    Audio,
}

impl Part {
    /// Every part, in display order.
    pub const ALL: [Self; 4] = [Self::Llm, Self::Projector, Self::Vision, Self::Audio];

    /// The part's name in tables and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llm => "llm",
            Self::Projector => "projector",
            Self::Vision => "vision",
            Self::Audio => "audio",
        }
    }
}

/// A gradient: f32 whatever the weight's dtype, absent until something reaches the weight.
pub type GradBuffer = Option<Vec<f32>>;

/// One weight of a model: its published name, its data (f32 or bf16) and its gradient.
#[derive(Debug)]
pub struct Param {
    name: String,
    part: Part,
    value: Tensor,
    trainable: AtomicBool,
    grad: Mutex<GradBuffer>,
}

impl Param {
    /// A weight named as in the published checkpoint. It starts frozen.
    ///
    /// # Errors
    /// A dtype other than f32 and bf16.
    pub fn new(name: impl Into<String>, part: Part, value: Tensor) -> Result<Self> {
        let name = name.into();
        if !matches!(value.dtype(), DType::F32 | DType::BF16) {
            bail!("weight {name}: expected f32 or bf16, got {:?}", value.dtype());
        }
        let value = value.contiguous()?;
        Ok(Self { name, part, value, trainable: AtomicBool::new(false), grad: Mutex::new(None) })
    }

    /// The published name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The part it belongs to.
    #[must_use]
    pub fn part(&self) -> Part {
        self.part
    }

    /// The weight itself. The handle shares storage: an optimizer step is seen through it.
    #[must_use]
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.value.elem_count()
    }

    /// Whether the weight has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether backward passes compute this weight's gradient.
    #[must_use]
    pub fn trainable(&self) -> bool {
        self.trainable.load(Ordering::Relaxed)
    }

    /// Selects or freezes the weight.
    pub fn set_trainable(&self, on: bool) {
        self.trainable.store(on, Ordering::Relaxed);
    }

    /// A frozen copy with storage of its own: one weight of a reference model.
    ///
    /// # Errors
    /// Out of memory on the device.
    pub fn frozen_copy(&self) -> Result<Self> {
        Self::new(self.name.clone(), self.part, self.value.copy()?)
    }

    /// Runs `f` on the data as a kernel weight.
    ///
    /// # Errors
    /// A device without kernels.
    pub fn with_weight<R>(&self, f: impl FnOnce(Weight) -> R) -> Result<R> {
        let (storage, layout) = self.value.storage_and_layout();
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("weight {}: not contiguous", self.name)
        };
        match &*storage {
            Storage::Cpu(CpuStorage::F32(data)) => Ok(f(Weight::F32(&data[start..end]))),
            Storage::Cpu(CpuStorage::BF16(data)) => Ok(f(Weight::Bf16(&data[start..end]))),
            _ => bail!("weight {}: no kernel for {:?} on this device", self.name, self.value.dtype()),
        }
    }

    /// Runs `f` on the data as f32. Meant for vectors (norms, biases): bf16 is widened into a copy.
    ///
    /// # Errors
    /// A device without kernels.
    pub fn with_f32<R>(&self, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        self.with_weight(|weight| match weight {
            Weight::F32(data) => f(data),
            Weight::Bf16(data) => f(&data.iter().map(|x| x.to_f32()).collect::<Vec<_>>()),
        })
    }

    /// Runs `f` on the gradient buffer, which is created as zeros at first use. Does nothing for a frozen weight.
    pub fn accumulate(&self, f: impl FnOnce(&mut [f32])) {
        if self.trainable() {
            let mut grad = self.grad.lock().unwrap_or_else(PoisonError::into_inner);
            f(grad.get_or_insert_with(|| vec![0.0; self.len()]));
        }
    }

    /// Runs `f` on the gradient, if anything has reached this weight since [`Self::clear_grad`].
    pub fn with_grad<R>(&self, f: impl FnOnce(Option<&mut [f32]>) -> R) -> R {
        let mut grad = self.grad.lock().unwrap_or_else(PoisonError::into_inner);
        f(grad.as_deref_mut())
    }

    /// Forgets the gradient and gives its memory back.
    pub fn clear_grad(&self) {
        *self.grad.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Overwrites the data in place from f32 (rounded to nearest even for bf16), for the optimizer and for loading.
    ///
    /// # Errors
    /// A length that differs, or a device without in-place kernels.
    pub fn store(&self, data: &[f32]) -> Result<()> {
        if data.len() != self.len() {
            bail!("weight {}: storing {} values into {}", self.name, data.len(), self.len());
        }
        self.value.inplace_op1(&Overwrite(data))
    }

    /// Runs `f` on the f32 data in place.
    ///
    /// # Errors
    /// A weight that is not f32 on the CPU.
    pub fn update_f32(&self, f: impl FnOnce(&mut [f32])) -> Result<()> {
        self.value.inplace_op1(&UpdateF32(Mutex::new(Some(f))))
    }
}

struct Overwrite<'a>(&'a [f32]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let start = layout.start_offset();
        match storage {
            CpuStorage::F32(data) => data[start..start + self.0.len()].copy_from_slice(self.0),
            CpuStorage::BF16(data) => {
                for (to, &from) in data[start..].iter_mut().zip(self.0) {
                    *to = bf16::from_f32(from);
                }
            }
            _ => bail!("overwrite: expected f32 or bf16"),
        }
        Ok(())
    }
}

/// candle hands in-place ops `&self`, so the closure sits in a cell that is emptied by its one use.
struct UpdateF32<F>(Mutex<Option<F>>);

impl<F: FnOnce(&mut [f32])> InplaceOp1 for UpdateF32<F> {
    fn name(&self) -> &'static str {
        "update_f32"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let len = f32_of("update_f32", storage, layout)?.len();
        let (CpuStorage::F32(data), Some(f)) =
            (storage, self.0.lock().unwrap_or_else(PoisonError::into_inner).take())
        else {
            bail!("update_f32: called twice")
        };
        f(&mut data[layout.start_offset()..layout.start_offset() + len]);
        Ok(())
    }
}
