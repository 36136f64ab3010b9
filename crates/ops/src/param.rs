//! Weights and their gradients.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use half::bf16;
use omnigrpo_kernels::Weight;
use omnigrpo_kernels::buffer;
use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};

use crate::adapter::Adapter;
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
    /// The text encoder that steers the projector.
    Instruction,
}

impl Part {
    /// Every part, in display order.
    pub const ALL: [Self; 5] = [Self::Llm, Self::Projector, Self::Vision, Self::Audio, Self::Instruction];

    /// The part's name in tables and messages.
    #[must_use]
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

/// A gradient: f32 whatever the weight's dtype, absent until something reaches the weight.
pub type GradBuffer = Option<Vec<f32>>;

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamDtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Quantised: frozen, `[n, k]`.
    Quantised(QuantBits),
}

#[derive(Clone, Debug)]
enum Data {
    Dense(Tensor),
    Quantised(Arc<QuantMatrix>),
    /// Only what it would be.
    Outline(ParamDtype),
}

/// One weight of a model: its published name, its data and its gradient. A linear layer's weight may carry an
/// [`Adapter`].
#[derive(Debug)]
pub struct Param {
    name: String,
    part: Part,
    data: Data,
    shape: Vec<usize>,
    trainable: AtomicBool,
    grad: Mutex<GradBuffer>,
    linear: AtomicBool,
    adapter: OnceLock<Arc<Adapter>>,
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
        let shape = value.dims().to_vec();
        Ok(Self::over(name, part, Data::Dense(value), shape))
    }

    /// Stands in for a weight that could not be read, without memory: it has the shape and no values, so that the rest
    /// of a model can be checked before the error. Nothing may be computed with it.
    ///
    /// # Errors
    /// A device without memory.
    pub fn stand_in(name: impl Into<String>, part: Part, shape: &[usize]) -> Result<Self> {
        let nothing = Tensor::zeros(0, DType::F32, &Device::Cpu)?;
        Ok(Self::over(name.into(), part, Data::Dense(nothing), shape.to_vec()))
    }

    /// A quantised weight. It can never be trained.
    ///
    /// # Errors
    /// A shape that is not `[n, k]` of the matrix.
    pub fn quantised(
        name: impl Into<String>,
        part: Part,
        shape: &[usize],
        value: QuantMatrix,
    ) -> Result<Self> {
        let name = name.into();
        if shape.len() != 2 || shape.iter().product::<usize>() != value.rows().len() {
            bail!("weight {name}: {} quantised values, expected shape {shape:?}", value.rows().len());
        }
        Ok(Self::over(name, part, Data::Quantised(Arc::new(value)), shape.to_vec()))
    }

    /// A weight without its data, to know how large a model is before it is loaded. Nothing can be computed with it.
    #[must_use]
    pub fn outline(name: impl Into<String>, part: Part, shape: &[usize], dtype: ParamDtype) -> Self {
        Self::over(name.into(), part, Data::Outline(dtype), shape.to_vec())
    }

    fn over(name: String, part: Part, data: Data, shape: Vec<usize>) -> Self {
        Self {
            name,
            part,
            data,
            shape,
            trainable: AtomicBool::new(false),
            grad: Mutex::new(None),
            linear: AtomicBool::new(false),
            adapter: OnceLock::new(),
        }
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

    /// Its shape, as published.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How it is stored.
    #[must_use]
    pub fn dtype(&self) -> ParamDtype {
        match &self.data {
            Data::Dense(value) if value.dtype() == DType::F32 => ParamDtype::F32,
            Data::Dense(_) => ParamDtype::Bf16,
            Data::Quantised(value) => ParamDtype::Quantised(value.bits()),
            Data::Outline(dtype) => *dtype,
        }
    }

    /// Memory of the data, bytes.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.data {
            Data::Dense(value) => value.elem_count() * value.dtype().size_in_bytes(),
            Data::Quantised(value) => value.num_bytes(),
            Data::Outline(ParamDtype::F32) => 4 * self.len(),
            Data::Outline(ParamDtype::Bf16) => 2 * self.len(),
            Data::Outline(ParamDtype::Quantised(bits)) => {
                let k = self.shape.last().copied().unwrap_or(1).max(1);
                self.len() / k * bits.row_bytes(k)
            }
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
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

    /// A frozen copy with storage of its own and without an adapter: one weight of a reference model.
    ///
    /// # Errors
    /// Out of memory on the device.
    pub fn frozen_copy(&self) -> Result<Self> {
        match &self.data {
            Data::Dense(value) => Self::new(self.name.clone(), self.part, value.copy()?),
            Data::Quantised(_) | Data::Outline(_) => Ok(self.bare()),
        }
    }

    /// A frozen handle on the same storage, without an adapter.
    #[must_use]
    pub fn bare(&self) -> Self {
        Self::over(self.name.clone(), self.part, self.data.clone(), self.shape.clone())
    }

    /// Whether this is the weight of a linear layer `[n, k]`, and so can carry an adapter.
    #[must_use]
    pub fn is_linear(&self) -> bool {
        self.linear.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_linear(&self) {
        self.linear.store(true, Ordering::Relaxed);
    }

    /// The adapter that is added to this weight's product.
    #[must_use]
    pub fn adapter(&self) -> Option<&Arc<Adapter>> {
        self.adapter.get()
    }

    /// Gives a linear layer's frozen weight an adapter.
    ///
    /// # Errors
    /// A weight that is no linear layer's, is trained itself, has an adapter, or has another shape than the adapter's.
    pub fn attach(&self, adapter: Arc<Adapter>) -> Result<()> {
        let (n, k) = adapter.shape();
        if !self.is_linear() || self.shape != [n, k] {
            bail!(
                "adapter {n}×{k} on {} {:?}: expected the weight of a linear layer of that size",
                self.name,
                self.shape
            );
        }
        if self.trainable() {
            bail!("adapter on {}: the weight itself is trained; train one of the two", self.name);
        }
        if self.adapter.set(adapter).is_err() {
            bail!("adapter on {}: it has one already", self.name);
        }
        Ok(())
    }

    /// Runs `f` on the data as a kernel weight.
    ///
    /// # Errors
    /// A device without kernels.
    pub fn with_weight<R>(&self, f: impl FnOnce(Weight) -> R) -> Result<R> {
        let value = match &self.data {
            Data::Dense(value) => value,
            Data::Quantised(value) => return Ok(f(Weight::Quantised(value.rows()))),
            Data::Outline(_) => bail!("weight {}: only its outline is here, nothing was loaded", self.name),
        };
        let (storage, layout) = value.storage_and_layout();
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("weight {}: not contiguous", self.name)
        };
        match &*storage {
            Storage::Cpu(CpuStorage::F32(data)) => Ok(f(Weight::F32(&data[start..end]))),
            Storage::Cpu(CpuStorage::BF16(data)) => Ok(f(Weight::Bf16(&data[start..end]))),
            _ => bail!("weight {}: no kernel for {:?} on this device", self.name, value.dtype()),
        }
    }

    /// Runs `f` on the data as f32. Meant for vectors (norms, biases): other storage is widened into a copy.
    ///
    /// # Errors
    /// A device without kernels.
    pub fn with_f32<R>(&self, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        self.with_weight(|weight| match weight {
            Weight::F32(data) => f(data),
            Weight::Bf16(data) => f(&data.iter().map(|x| x.to_f32()).collect::<Vec<_>>()),
            Weight::Quantised(data) => {
                let mut wide = vec![0.0; data.len()];
                data.widen(&mut wide);
                f(&wide)
            }
        })
    }

    /// The weight itself. The handle shares storage: an optimizer step is seen through it.
    ///
    /// # Errors
    /// A quantised weight.
    pub fn dense(&self) -> Result<&Tensor> {
        match &self.data {
            Data::Dense(value) => Ok(value),
            Data::Quantised(_) => bail!("weight {}: quantised weights cannot be written", self.name),
            Data::Outline(_) => bail!("weight {}: only its outline is here, nothing was loaded", self.name),
        }
    }

    /// Runs `f` on the gradient buffer, which is created as zeros at first use. Does nothing for a frozen weight.
    pub fn accumulate(&self, f: impl FnOnce(&mut [f32])) {
        if let Some(mut gradient) = self.gradient() {
            f(gradient.as_mut_slice());
        }
    }

    /// The gradient buffer for adding to, created as zeros at first use; `None` for a frozen weight. While the guard
    /// lives, nothing else can reach the gradient.
    #[must_use]
    pub fn gradient(&self) -> Option<GradGuard<'_>> {
        self.trainable().then(|| {
            let mut grad = self.grad.lock().unwrap_or_else(PoisonError::into_inner);
            grad.get_or_insert_with(|| buffer::zeros(self.len()));
            GradGuard(grad)
        })
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
    /// A length that differs, a quantised weight, or a device without in-place kernels.
    pub fn store(&self, data: &[f32]) -> Result<()> {
        if data.len() != self.len() {
            bail!("weight {}: storing {} values into {}", self.name, data.len(), self.len());
        }
        self.dense()?.inplace_op1(&Overwrite(data))
    }

    /// Runs `f` on the f32 data in place.
    ///
    /// # Errors
    /// A weight that is not f32 on the CPU.
    pub fn update_f32(&self, f: impl FnOnce(&mut [f32])) -> Result<()> {
        self.dense()?.inplace_op1(&UpdateF32(Mutex::new(Some(f))))
    }
}

/// Exclusive access to a gradient buffer; see [`Param::gradient`].
#[derive(Debug)]
pub struct GradGuard<'a>(MutexGuard<'a, GradBuffer>);

impl GradGuard<'_> {
    /// The gradient.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        self.0.as_deref_mut().unwrap_or_default()
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
