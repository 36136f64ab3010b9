//! Weights and their gradients.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use half::bf16;
use memmap2::Mmap;
use omnigrpo_kernels::quant::{QuantBits, QuantMatrix};
use omnigrpo_kernels::{Stored, Weight};

use crate::adapter::Adapter;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::gpu::Sent;
use crate::optim::Squares;
use crate::outline::{Held, holding};
use crate::rows::Rows;

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

/// Storage dtype of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamDtype {
    F32,
    Bf16,
    /// Quantised and frozen: one matrix `[n, k]`, or one per expert.
    Quantised(QuantBits),
}

#[derive(Clone, Debug)]
pub enum Values {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// Values of a range of a weight, to be changed.
#[derive(Debug)]
pub(crate) enum ValuesMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

impl Values {
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a range of elements.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    #[must_use]
    pub fn slice(&self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::F32(data) => Self::F32(data[range].to_vec()),
            Self::Bf16(data) => Self::Bf16(data[range].to_vec()),
        }
    }

    /// Returns these elements from element `start` on, between zeros, `len` elements in total.
    fn padded(&self, start: usize, len: usize) -> Self {
        fn padded<T: Clone + Default>(data: &[T], start: usize, len: usize) -> Vec<T> {
            let mut all = vec![T::default(); len];
            all[start..][..data.len()].clone_from_slice(data);
            all
        }
        match self {
            Self::F32(data) => Self::F32(padded(data, start, len)),
            Self::Bf16(data) => Self::Bf16(padded(data, start, len)),
        }
    }

    /// Returns a range of elements to be changed.
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> ValuesMut<'_> {
        match self {
            Self::F32(data) => ValuesMut::F32(&mut data[range]),
            Self::Bf16(data) => ValuesMut::Bf16(&mut data[range]),
        }
    }

    /// Returns the bytes of a range of elements.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        match self {
            Self::F32(data) => bytemuck::cast_slice(&data[range]),
            Self::Bf16(data) => bytemuck::cast_slice(&data[range]),
        }
    }

    /// Concatenates values. If the dtypes differ, the result is f32.
    #[must_use]
    pub fn concat(parts: Vec<Self>) -> Self {
        if parts.iter().all(|part| matches!(part, Self::Bf16(_))) {
            let data = parts.into_iter().filter_map(|part| match part {
                Self::Bf16(data) => Some(data),
                Self::F32(_) => None,
            });
            return Self::Bf16(data.flatten().collect());
        }
        let wide = |part| match part {
            Self::F32(data) => data,
            Self::Bf16(data) => data.into_iter().map(bf16::to_f32).collect(),
        };
        Self::F32(parts.into_iter().flat_map(wide).collect())
    }

    /// Rounds to nearest even bfloat16.
    #[must_use]
    pub fn into_bf16(self) -> Self {
        match self {
            Self::F32(data) => Self::Bf16(data.into_iter().map(bf16::from_f32).collect()),
            bf16 => bf16,
        }
    }
}

/// Size in bytes below which a weight in a mapped file keeps its pages after a read.
const LEAST_LOAN: usize = 64 << 10;

#[derive(Clone, Debug)]
enum Data {
    Dense(Arc<Storage<RwLock<Values>>>),
    Quantised(Arc<Storage<QuantMatrix>>),
    Mapped(Arc<Storage<Mapped>>),
}

/// Values in a mapped file, in f32 or bf16. They are read in place and never written.
#[derive(Clone, Debug)]
struct Mapped {
    map: Arc<Mmap>,
    bytes: Range<usize>,
    dtype: ParamDtype,
    /// True if pages are returned to the system after each read.
    on_loan: bool,
}

impl Mapped {
    /// Returns the values. They are empty if the bytes do not match the dtype, but [`Param::mapped`] excludes that.
    fn stored(&self) -> Stored<'_> {
        let bytes = self.map.get(self.bytes.clone()).unwrap_or_default();
        match self.dtype {
            ParamDtype::Bf16 => Stored::Bf16(bytemuck::try_cast_slice(bytes).unwrap_or_default()),
            _ => Stored::F32(bytemuck::try_cast_slice(bytes).unwrap_or_default()),
        }
    }

    fn values(&self) -> Values {
        match self.stored() {
            Stored::Bf16(data) => Values::Bf16(data.to_vec()),
            Stored::F32(data) => Values::F32(data.to_vec()),
            Stored::Quantised(_) => Values::F32(Vec::new()),
        }
    }

    /// Releases the pages from this process. The next read finds them in the system's file cache, or reads the file again.
    fn give_back(&self) {
        #[cfg(unix)]
        {
            let Range { start, end } = self.bytes;
            // SAFETY: the map is shared with a file and read-only. Another reader may still use these pages, or a neighbouring
            // weight part of the first or last page. In both cases, the next access loads the same bytes from the file again.
            let done = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    start,
                    end.saturating_sub(start),
                )
            };
            // The call is only advice: if the system ignores it, the pages stay in memory.
            drop(done);
        }
    }
}

/// Values of a weight on the host, and a copy of them on a GPU.
#[derive(Debug)]
struct Storage<T> {
    host: T,
    copy: crate::gpu::Copy,
    /// Elements that are in memory while the weight is not lent ([`Param::cut`]).
    own: OnceLock<Range<usize>>,
}

impl<T> Storage<T> {
    fn new(host: T) -> Arc<Self> {
        Arc::new(Self { host, copy: crate::gpu::Copy::default(), own: OnceLock::new() })
    }
}

impl Storage<RwLock<Values>> {
    fn values(values: Values) -> Arc<Self> {
        Self::new(RwLock::new(values))
    }

    fn lock(&self) -> RwLockReadGuard<'_, Values> {
        self.host.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches changes from a GPU, and locks the values for reading.
    fn read(&self) -> RwLockReadGuard<'_, Values> {
        self.copy.fetch(&self.host);
        self.lock()
    }
}

/// The way of a gradient from a GPU to main memory.
#[derive(Debug, Default)]
struct Travel {
    /// True if the next gradient is the last of this step, so that it can be sent.
    is_last: bool,
    /// Gradient that was sent. The weight has no other gradient then.
    sent: Option<Sent>,
    /// Memory for the next gradient.
    spare: Vec<f32>,
}

/// One weight of a model: its published name, its values and its gradient. The weight of a linear layer can have an [`Adapter`].
#[derive(Debug)]
pub struct Param {
    name: String,
    part: Part,
    data: Data,
    dtype: ParamDtype,
    shape: Vec<usize>,
    is_outline: bool,
    trainable: AtomicBool,
    /// Gradient `[1, len]` in the device's compute dtype, whatever the dtype of the weight. It is `None` until a gradient reaches
    /// the weight.
    grad: Mutex<Option<Rows>>,
    travel: Mutex<Travel>,
    linear: AtomicBool,
    experts: AtomicBool,
    adapter: OnceLock<Arc<Adapter>>,
}

/// Read access to the values of a weight.
pub struct WeightGuard<'a>(Reading<'a>);

enum Reading<'a> {
    Dense(RwLockReadGuard<'a, Values>),
    Quantised(&'a QuantMatrix),
    Mapped(Stored<'a>),
    OnLoan(Loan<'a>),
}

/// Values in a mapped file, whose pages are returned to the system on drop.
struct Loan<'a>(&'a Mapped);

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

impl WeightGuard<'_> {
    #[must_use]
    pub fn stored(&self) -> Stored<'_> {
        match &self.0 {
            Reading::Dense(values) => match &**values {
                Values::F32(data) => Stored::F32(data),
                Values::Bf16(data) => Stored::Bf16(data),
            },
            Reading::Quantised(matrix) => Stored::Quantised(matrix.rows()),
            Reading::Mapped(stored) => *stored,
            Reading::OnLoan(loan) => loan.0.stored(),
        }
    }

    /// Returns the values as `[n, k]`, whatever the published shape.
    ///
    /// # Panics
    /// Panics if the number of elements is not `n · k`.
    #[must_use]
    pub fn weight(&self, n: usize, k: usize) -> Weight<'_> {
        Weight::new(self.stored(), n, k)
    }

    /// Returns the values as f32. This is meant for vectors (norms, biases), because values of other dtypes are copied.
    #[must_use]
    pub fn f32(&self) -> Cow<'_, [f32]> {
        match self.stored() {
            Stored::F32(data) => data.into(),
            Stored::Bf16(data) => data.iter().map(|x| x.to_f32()).collect(),
            Stored::Quantised(data) => {
                let mut wide = vec![0.0; data.len()];
                data.widen(&mut wide);
                wide.into()
            }
        }
    }
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
        Ok(Self::over(name, part, Data::Dense(Storage::values(values)), dtype, shape.to_vec()))
    }

    /// Creates a weight without values, which uses no memory. Such a weight serves to measure a model, or to continue checking
    /// the other weights when one could not be read. Operations with it fail, except on [`Device::Outline`]. [`Self::read`]
    /// returns no values.
    #[must_use]
    pub fn outline(name: impl Into<String>, part: Part, shape: &[usize], dtype: ParamDtype) -> Self {
        let nothing = Data::Dense(Storage::values(Values::F32(Vec::new())));
        Self { is_outline: true, ..Self::over(name.into(), part, nothing, dtype, shape.to_vec()) }
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
        Ok(Self::over(name, part, Data::Quantised(Storage::new(value)), dtype, shape.to_vec()))
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
        Ok(Self::over(name, part, Data::Mapped(Storage::new(mapped)), dtype, shape.to_vec()))
    }

    /// Makes a weight in a mapped file return its pages to the system after each read. Between reads, the weight uses no memory
    /// of the process. The next read finds the values in the system's file cache, or the system reads them again.
    #[must_use]
    pub fn on_loan(mut self) -> Self {
        if let Data::Mapped(mapped) = &self.data {
            self.data = Data::Mapped(Storage::new(Mapped { on_loan: true, ..mapped.host.clone() }));
        }
        self
    }

    fn over(name: String, part: Part, data: Data, dtype: ParamDtype, shape: Vec<usize>) -> Self {
        Self {
            name,
            part,
            data,
            dtype,
            shape,
            is_outline: false,
            trainable: AtomicBool::new(false),
            grad: Mutex::default(),
            travel: Mutex::default(),
            linear: AtomicBool::new(false),
            experts: AtomicBool::new(false),
            adapter: OnceLock::new(),
        }
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    #[must_use]
    pub fn part(&self) -> Part {
        self.part
    }

    /// Returns the published shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    #[must_use]
    pub fn dtype(&self) -> ParamDtype {
        self.dtype
    }

    /// Returns the size of the values in bytes. For an outline, this is the size that its values would have.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match (&self.data, self.dtype) {
            (Data::Quantised(value), _) => value.host.num_bytes(),
            (_, ParamDtype::F32) => 4 * self.len(),
            (_, ParamDtype::Bf16) => 2 * self.len(),
            (_, ParamDtype::Quantised(bits)) => {
                let k = self.shape.last().copied().unwrap_or(1).max(1);
                bits.matrix_bytes(self.len() / k, k)
            }
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the values are in a mapped file ([`Self::mapped`]).
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        matches!(self.data, Data::Mapped(_))
    }

    /// Returns whether backward passes compute this weight's gradient.
    #[must_use]
    pub fn trainable(&self) -> bool {
        self.trainable.load(Ordering::Relaxed)
    }

    /// Makes the weight trainable, or freezes it.
    pub fn set_trainable(&self, on: bool) {
        self.trainable.store(on, Ordering::Relaxed);
    }

    /// Returns a frozen copy of the weight in separate storage, without an adapter, for a reference model.
    #[must_use]
    pub fn frozen_copy(&self) -> Self {
        let mut copy = self.bare();
        if let Data::Dense(values) = &self.data {
            copy.data = Data::Dense(Storage::values(values.read().clone()));
        }
        copy
    }

    /// Returns a frozen handle to the same storage, without an adapter.
    #[must_use]
    pub fn bare(&self) -> Self {
        let handle =
            Self::over(self.name.clone(), self.part, self.data.clone(), self.dtype, self.shape.clone());
        Self { is_outline: self.is_outline, ..handle }
    }

    /// Returns whether the weight has no values ([`Self::outline`]).
    #[must_use]
    pub fn is_outline(&self) -> bool {
        self.is_outline
    }

    /// Returns an error if values are missing, except for an outline on a device that needs no values.
    pub(crate) fn usable(&self, device: Device) -> Result<()> {
        let what = match self.is_outline {
            true if device == Device::Outline => return Ok(()),
            true => "only its outline is loaded, not its values",
            false if self.is_whole() => return Ok(()),
            false => "only a part of its values is in this process",
        };
        Err(Error::Weight { name: self.name.clone(), what: what.into() })
    }

    /// Drops all values except for those of `own`, until [`Self::complete`]. Handles to the same storage are cut, too. Returns an
    /// error for a quantised weight, for one in a mapped file, and for one that is cut in another place.
    pub fn cut(&self, own: Range<usize>) -> Result<()> {
        let refuse = |what: &str| Err(Error::Weight { name: self.name.clone(), what: what.into() });
        let Data::Dense(values) = &self.data else {
            return refuse("only a weight in f32 or bf16 in memory can be cut");
        };
        if own.end > self.len() || *values.own.get_or_init(|| own.clone()) != own {
            return refuse("it is cut in another place");
        }
        self.release();
        Ok(())
    }

    /// Returns whether [`Self::cut`] was called, for this handle or for another one to the same storage.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        matches!(&self.data, Data::Dense(values) if values.own.get().is_some())
    }

    /// Returns whether all values are in memory. This includes a weight that is cut and whose own part has all values.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        match &self.data {
            Data::Dense(values) if values.own.get().is_some() => values.lock().len() == self.len(),
            _ => true,
        }
    }

    /// Makes room for all values of a weight that is cut. Those that are not in this process are 0 until [`Self::store_bytes`].
    pub fn complete(&self) {
        let Data::Dense(values) = &self.data else { return };
        let Some(own) = values.own.get().filter(|_| !self.is_whole()) else { return };
        values.copy.fetch_and_forget(&values.host);
        let mut part = values.host.write().unwrap_or_else(PoisonError::into_inner);
        *part = part.padded(own.start, self.len());
    }

    /// Drops the values of a weight that is cut, except for its own part.
    pub fn release(&self) {
        let Data::Dense(values) = &self.data else { return };
        let Some(own) = values.own.get().filter(|_| self.is_whole()) else { return };
        values.copy.fetch_and_forget(&values.host);
        let mut whole = values.host.write().unwrap_or_else(PoisonError::into_inner);
        *whole = whole.slice(own.clone());
    }

    /// Returns the first element that is in memory.
    fn first(&self) -> usize {
        match &self.data {
            Data::Dense(values) if !self.is_whole() => values.own.get().map_or(0, |own| own.start),
            _ => 0,
        }
    }

    /// Returns a frozen handle to the same storage under another name, without an adapter.
    #[must_use]
    pub fn named(&self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self.bare() }
    }

    /// Returns a copy of the values. Returns an error for a quantised weight.
    pub fn values(&self) -> Result<Values> {
        match &self.data {
            Data::Mapped(mapped) => Ok(mapped.host.values()),
            _ => self.write(|values| values.clone()),
        }
    }

    /// Returns whether this is the weight `[n, k]` of a linear layer, which can have an adapter.
    #[must_use]
    pub fn is_linear(&self) -> bool {
        self.linear.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_linear(&self) {
        self.linear.store(true, Ordering::Relaxed);
    }

    /// Returns whether this is the weight `[e, k, n]` of a layer of experts, which can have one adapter per expert.
    #[must_use]
    pub fn is_experts(&self) -> bool {
        self.experts.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_experts(&self) {
        self.experts.store(true, Ordering::Relaxed);
    }

    /// Returns the adapter whose output is added to this weight's product.
    #[must_use]
    pub fn adapter(&self) -> Option<&Arc<Adapter>> {
        self.adapter.get()
    }

    /// Attaches an adapter to the frozen weight of a linear layer or of experts. Returns an error if the weight is of another
    /// kind, is trained, already has an adapter, or differs in shape from the adapter.
    pub fn attach(&self, adapter: Arc<Adapter>) -> Result<()> {
        let shape = adapter.shape();
        let refuse = |what: String| Err(Error::Weight { name: self.name.clone(), what });
        if !(self.is_linear() || self.is_experts()) || self.shape != shape {
            let size = shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("×");
            return refuse(format!(
                "an adapter {size} on {:?}; expected the weight of a linear layer, or of experts, of that size",
                self.shape
            ));
        }
        if self.trainable() {
            return refuse("an adapter on a trained weight; train either the weight or the adapter".into());
        }
        if self.adapter.set(adapter).is_err() {
            return refuse("a second adapter; a weight can have only one".into());
        }
        Ok(())
    }

    /// Locks the values for reading.
    pub fn read(&self) -> WeightGuard<'_> {
        WeightGuard(match &self.data {
            Data::Dense(values) => Reading::Dense(values.read()),
            Data::Quantised(matrix) => Reading::Quantised(&matrix.host),
            // For a few pages, the system call costs more than it saves.
            Data::Mapped(mapped) if mapped.host.on_loan && mapped.host.bytes.len() >= LEAST_LOAN => {
                Reading::OnLoan(Loan(&mapped.host))
            }
            Data::Mapped(mapped) => Reading::Mapped(mapped.host.stored()),
        })
    }

    /// Locks the gradient buffer on `device`. The first use creates zeros; a gradient on another device is moved. Returns `None`
    /// for a frozen weight.
    pub(crate) fn gradient(&self, device: Device) -> Option<GradGuard<'_>> {
        self.trainable().then(|| {
            let mut grad = self.lock_grad();
            let rows =
                grad.get_or_insert_with(|| holding(Held::Gradients, || Rows::zeros(device, 1, self.len())));
            if rows.device() != device {
                *rows = rows.to_device(device);
            }
            GradGuard { grad, param: self }
        })
    }

    /// Locks the gradient. One that was sent to main memory arrives there first.
    fn lock_grad(&self) -> MutexGuard<'_, Option<Rows>> {
        let mut grad = self.grad.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = self.travel().sent.take();
        if let Some(sent) = sent {
            let arrived = match sent.wait(self.len()) {
                Some(values) => Rows::from_vec(values, 1, self.len()).ok(),
                None => Some(holding(Held::Gradients, || Rows::zeros(Device::Outline, 1, self.len()))),
            };
            *grad = arrived;
        }
        grad
    }

    fn travel(&self) -> MutexGuard<'_, Travel> {
        self.travel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Announces that the next gradient is the last of this step. On a GPU, it is sent to main memory as soon as it is computed,
    /// and its memory on the GPU is freed. A further gradient in the same step brings it back.
    pub fn send_next_grad(&self) {
        self.travel().is_last = true;
    }

    /// Sends a gradient on a GPU to main memory. `squares` is the sum of its squares if it is known.
    pub(crate) fn send_grad(&self, squares: Option<f64>) {
        self.send(&mut self.grad.lock().unwrap_or_else(PoisonError::into_inner), squares);
    }

    fn send(&self, grad: &mut Option<Rows>, squares: Option<f64>) {
        if let Some(rows) = grad.take() {
            let mut travel = self.travel();
            match Sent::start(rows, &mut travel.spare, squares) {
                Ok(sent) => travel.sent = Some(sent),
                Err(rows) => *grad = Some(rows),
            }
        }
    }

    /// Returns the sum of squares of a gradient that was sent. No further gradient is the last of this step.
    pub(crate) fn squares_if_sent(&self) -> Option<Squares> {
        let mut travel = self.travel();
        travel.is_last = false;
        travel.sent.as_mut().map(Sent::squares)
    }

    /// Returns the place of the gradient in the order in which gradients were sent to main memory, or 0 if it was not sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.travel().sent.as_ref().map_or(0, Sent::order)
    }

    /// Removes a gradient that was sent, and waits for its values. The inner value is `None` on [`Device::Outline`].
    pub(crate) fn take_sent(&self) -> Option<Option<Vec<f32>>> {
        let sent = self.travel().sent.take();
        sent.map(|sent| sent.wait(self.len()))
    }

    /// Keeps memory for the next gradient that is sent.
    pub(crate) fn recycle(&self, spare: Vec<f32>) {
        self.travel().spare = spare;
    }

    /// Creates a gradient of zeros if the weight has none. Does nothing for a frozen weight.
    pub fn reach(&self, device: Device) {
        if self.travel().sent.is_none() {
            drop(self.gradient(device));
        }
    }

    /// Runs `f` on the gradient `[1, len]`, or on `None` if no gradient has reached this weight since
    /// [`Self::clear_grad`].
    pub fn with_grad<R>(&self, f: impl FnOnce(Option<&mut Rows>) -> R) -> R {
        f(self.lock_grad().as_mut())
    }

    /// Returns a copy of the gradient, or `None` if no gradient has reached this weight since [`Self::clear_grad`].
    #[must_use]
    pub fn grad(&self) -> Option<Vec<f32>> {
        self.with_grad(|grad| grad.map(|grad| grad.to_vec()))
    }

    /// Drops the gradient and frees its memory.
    pub fn clear_grad(&self) {
        *self.travel() = Travel::default();
        drop(self.take_grad());
    }

    /// Removes the gradient `[1, len]` and returns it, or `None` if no gradient has reached this weight since
    /// [`Self::clear_grad`].
    #[must_use]
    pub fn take_grad(&self) -> Option<Rows> {
        self.lock_grad().take()
    }

    /// Replaces the gradient `[1, len]`. Returns an error if its size differs.
    pub fn set_grad(&self, grad: Option<Rows>) -> Result<()> {
        if let Some(dims) = grad.as_ref().map(Rows::dims).filter(|dims| *dims != (1, self.len())) {
            let what = format!("got a gradient of {dims:?}, expected (1, {})", self.len());
            return Err(Error::Weight { name: self.name.clone(), what });
        }
        *self.lock_grad() = grad;
        Ok(())
    }

    /// Overwrites the values in place with f32 values, for the optimizer and for loading. For a bf16 weight, they are rounded to
    /// nearest even. Returns an error if the length differs or the weight is quantised.
    pub fn store(&self, data: &[f32]) -> Result<()> {
        if data.len() != self.len() {
            let what = format!("storing {} values into a weight of {}", data.len(), self.len());
            return Err(Error::Weight { name: self.name.clone(), what });
        }
        self.write(|values| match values {
            Values::F32(to) => to.copy_from_slice(data),
            Values::Bf16(to) => {
                for (to, &from) in to.iter_mut().zip(data) {
                    *to = bf16::from_f32(from);
                }
            }
        })
    }

    /// Appends the bytes of a range of the values, in the dtype of the weight, to `out`. Does nothing for a quantised weight. The
    /// values of a weight that is cut need not be complete.
    ///
    /// # Panics
    /// Panics if values of the range are not in memory.
    pub fn append_bytes(&self, range: Range<usize>, out: &mut Vec<u8>) {
        let range = back(range, self.first());
        match self.read().stored() {
            Stored::F32(data) => out.extend_from_slice(bytemuck::cast_slice(&data[range])),
            Stored::Bf16(data) => out.extend_from_slice(bytemuck::cast_slice(&data[range])),
            Stored::Quantised(_) => {}
        }
    }

    /// Overwrites values, starting with element `at`, with the bytes of [`Self::append_bytes`] on a weight of the same dtype.
    /// Returns an error for a quantised weight, or if the bytes do not fit.
    pub fn store_bytes(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let fits = self.write(|values| {
            let all: &mut [u8] = match values {
                Values::F32(data) => bytemuck::cast_slice_mut(data),
                Values::Bf16(data) => bytemuck::cast_slice_mut(data),
            };
            let start = all.len().checked_div(self.len()).unwrap_or(0) * at;
            let to = all.get_mut(start..start + bytes.len());
            to.map(|to| to.copy_from_slice(bytes)).is_some()
        })?;
        if fits {
            return Ok(());
        }
        let what =
            format!("storing {} bytes from element {at} on into a weight of {}", bytes.len(), self.len());
        Err(Error::Weight { name: self.name.clone(), what })
    }

    /// Runs `f` on the values as f32 and stores the result. Returns an error for a quantised weight.
    pub fn update(&self, f: impl FnOnce(&mut [f32])) -> Result<()> {
        let mut data = self.read().f32().into_owned();
        f(&mut data);
        self.store(&data)
    }

    /// Runs `f` on the values in place. Returns an error for a quantised weight.
    pub(crate) fn write<R>(&self, f: impl FnOnce(&mut Values) -> R) -> Result<R> {
        self.usable(Device::Cpu)?;
        match &self.data {
            Data::Dense(values) => {
                values.copy.fetch_and_forget(&values.host);
                Ok(f(&mut values.host.write().unwrap_or_else(PoisonError::into_inner)))
            }
            Data::Quantised(_) => Err(Error::Weight {
                name: self.name.clone(),
                what: "a quantised weight cannot be written".into(),
            }),
            Data::Mapped(_) => Err(Error::Weight {
                name: self.name.clone(),
                what: "a weight in a mapped file cannot be written".into(),
            }),
        }
    }

    /// Changes a range of the values in place by `f`, which is called for consecutive parts of it. A copy on a GPU changes too:
    /// each part is sent while `f` computes the next one. Returns an error for a quantised weight and for one in a mapped file.
    pub(crate) fn rewrite(
        &self,
        range: Range<usize>,
        mut f: impl FnMut(Range<usize>, ValuesMut),
    ) -> Result<()> {
        let Data::Dense(values) = &self.data else { return self.write(|_| ()) };
        let first = self.first();
        let part = back(range.clone(), first);
        if self.is_outline || part.end > values.lock().len() {
            return Err(Error::Weight {
                name: self.name.clone(),
                what: format!("elements {range:?} are not in this process"),
            });
        }
        values.copy.fetch(&values.host);
        let f = |part: Range<usize>, values: ValuesMut<'_>| f(part.start + first..part.end + first, values);
        values.copy.rewrite(&mut values.host.write().unwrap_or_else(PoisonError::into_inner), part, f);
        Ok(())
    }

    /// Returns the values of a range of elements as f32. The values of a weight that is cut need not be complete.
    pub(crate) fn f32_of(&self, range: Range<usize>) -> Vec<f32> {
        let range = back(range, self.first());
        match self.read().stored() {
            Stored::F32(data) => data[range].to_vec(),
            Stored::Bf16(data) => data[range].iter().map(|x| x.to_f32()).collect(),
            Stored::Quantised(_) => Vec::new(),
        }
    }

    /// Returns the weight in GPU memory. It is copied there at first use.
    pub(crate) fn on_gpu(&self, gpu: &omnigrpo_gpu::Gpu, device: Device) -> Arc<crate::gpu::Weights> {
        use crate::gpu::Weights;
        match &self.data {
            Data::Dense(values) => values.copy.on(device, || Weights::dense(gpu, &values.read())),
            Data::Mapped(mapped) => mapped.copy.on(device, || Weights::dense(gpu, &mapped.host.values())),
            Data::Quantised(matrix) => {
                matrix.copy.on(device, || Weights::quantised(gpu, &matrix.host, &self.shape))
            }
        }
    }

    /// Replaces the values with an array in GPU memory.
    pub(crate) fn replace_on_gpu(&self, device: Device, array: omnigrpo_gpu::Array) {
        if let Data::Dense(values) = &self.data {
            values.copy.replace(device, array);
        }
    }

    /// Returns whether both weights use the same storage.
    #[must_use]
    pub fn shares_storage(&self, other: &Self) -> bool {
        match (&self.data, &other.data) {
            (Data::Dense(a), Data::Dense(b)) => Arc::ptr_eq(a, b),
            (Data::Quantised(a), Data::Quantised(b)) => Arc::ptr_eq(a, b),
            (Data::Mapped(a), Data::Mapped(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

/// Moves a range by `first` elements towards the beginning.
fn back(range: Range<usize>, first: usize) -> Range<usize> {
    range.start.saturating_sub(first)..range.end.saturating_sub(first)
}

/// Exclusive access to a gradient buffer; see [`Param::gradient`]. The last gradient of a step is sent when the guard is dropped.
pub(crate) struct GradGuard<'a> {
    grad: MutexGuard<'a, Option<Rows>>,
    param: &'a Param,
}

impl GradGuard<'_> {
    /// Returns the gradient on the CPU, in f32.
    pub(crate) fn cpu(&mut self) -> &mut [f32] {
        self.grad.as_mut().map(Rows::cpu_mut).unwrap_or_default()
    }

    /// Returns the gradient, whatever its device.
    pub(crate) fn rows(&mut self) -> Option<&mut Rows> {
        self.grad.as_mut()
    }

    /// Returns the gradient on the f64 twin.
    #[cfg(feature = "twin")]
    pub(crate) fn twin(&mut self) -> &mut [f64] {
        self.grad.as_mut().map(Rows::twin_mut).unwrap_or_default()
    }
}

impl Drop for GradGuard<'_> {
    fn drop(&mut self) {
        let is_last = self.param.travel().is_last;
        if is_last {
            self.param.send(&mut self.grad, None);
        }
    }
}
