//! Where the values of a weight are: in memory, quantised, in a mapped file, or nowhere. A weight can have a copy on a GPU, and only
//! a part of its values in this process.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use half::bf16;
use memmap2::Mmap;
use omnigrpo_kernels::quant::QuantMatrix;
use omnigrpo_kernels::{Arithmetic, Stored, Weight, buffer};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::param::{Param, ParamDtype, Values, ValuesMut};

/// Size in bytes below which a weight in a mapped file keeps its pages after a read.
const LEAST_LOAN: usize = 64 << 10;

/// The values of a weight.
#[derive(Clone, Debug)]
pub(super) struct Storage {
    pub data: Data,
    /// True if there are no values.
    pub is_outline: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Data {
    Dense(Arc<Place<RwLock<Values>>>),
    Quantised(Arc<Place<QuantMatrix>>),
    Mapped(Arc<Place<Mapped>>),
}

/// Values in a mapped file, in f32 or bf16. They are read in place and never written.
#[derive(Clone, Debug)]
pub(super) struct Mapped {
    pub map: Arc<Mmap>,
    pub bytes: Range<usize>,
    pub dtype: ParamDtype,
    /// True if pages are returned to the system after each read.
    pub on_loan: bool,
}

impl Mapped {
    /// Returns the values. They are empty if the bytes do not match the dtype, but [`Param::mapped`] excludes that.
    pub fn stored(&self) -> Stored<'_> {
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
pub(super) struct Place<T> {
    pub host: T,
    copy: crate::gpu::Copy,
    /// Elements that are in memory while the weight is not lent ([`Param::cut`]).
    own: OnceLock<Range<usize>>,
}

impl<T> Place<T> {
    pub fn new(host: T) -> Arc<Self> {
        Arc::new(Self { host, copy: crate::gpu::Copy::default(), own: OnceLock::new() })
    }
}

impl Place<RwLock<Values>> {
    pub fn values(values: Values) -> Arc<Self> {
        Self::new(RwLock::new(values))
    }

    fn lock(&self) -> RwLockReadGuard<'_, Values> {
        self.host.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches changes from a GPU, and locks the values for reading.
    pub fn read(&self) -> RwLockReadGuard<'_, Values> {
        self.copy.fetch(&self.host);
        self.lock()
    }
}

impl Storage {
    pub fn new(data: Data) -> Self {
        Self { data, is_outline: false }
    }
}

/// Read access to the values of a weight.
pub struct WeightGuard<'a> {
    values: Reading<'a>,
    arithmetic: Arithmetic,
}

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
    pub fn stored(&self) -> Stored<'_> {
        match &self.values {
            Reading::Dense(values) => match &**values {
                Values::F32(data) => Stored::F32(data),
                Values::Bf16(data) => Stored::Bf16(data),
            },
            Reading::Quantised(matrix) => Stored::Quantised(matrix.rows()),
            Reading::Mapped(stored) => *stored,
            Reading::OnLoan(loan) => loan.0.stored(),
        }
    }

    /// Returns the values as `[n, k]`, whatever the published shape, with the arithmetic of the weight.
    ///
    /// # Panics
    /// Panics if the number of elements is not `n · k`.
    pub fn weight(&self, n: usize, k: usize) -> Weight<'_> {
        Weight::new(self.stored(), n, k).with(self.arithmetic)
    }

    /// Returns the values as f32. This is meant for vectors (norms, biases), because values of other dtypes are copied.
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
    /// Makes a weight in a mapped file return its pages to the system after each read. Between reads, the weight uses no memory
    /// of the process. The next read finds the values in the system's file cache, or the system reads them again.
    #[must_use]
    pub fn on_loan(mut self) -> Self {
        if let Data::Mapped(mapped) = &self.storage.data {
            self.storage.data = Data::Mapped(Place::new(Mapped { on_loan: true, ..mapped.host.clone() }));
        }
        self
    }

    /// Returns whether the values are in a mapped file ([`Self::mapped`]).
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage.data, Data::Mapped(_))
    }

    /// Returns whether the weight has no values ([`Self::outline`]).
    pub fn is_outline(&self) -> bool {
        self.storage.is_outline
    }

    /// Returns an error if values are missing, except for an outline on a device that needs no values.
    pub(crate) fn usable(&self, device: Device) -> Result<()> {
        let what = match self.storage.is_outline {
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
        let Data::Dense(values) = &self.storage.data else {
            return refuse("only a weight in f32 or bf16 in memory can be cut");
        };
        if own.end > self.len() || *values.own.get_or_init(|| own.clone()) != own {
            return refuse("it is cut in another place");
        }
        self.release();
        Ok(())
    }

    /// Returns whether [`Self::cut`] was called, for this handle or for another one to the same storage.
    pub fn is_cut(&self) -> bool {
        matches!(&self.storage.data, Data::Dense(values) if values.own.get().is_some())
    }

    /// Returns whether all values are in memory. This includes a weight that is cut and whose own part has all values.
    pub fn is_whole(&self) -> bool {
        match &self.storage.data {
            Data::Dense(values) if values.own.get().is_some() => values.lock().len() == self.len(),
            _ => true,
        }
    }

    /// Makes room for all values of a weight that is cut. Those that are not in this process are 0 until [`Self::store_bytes`].
    pub fn complete(&self) {
        let Data::Dense(values) = &self.storage.data else { return };
        let Some(own) = values.own.get().filter(|_| !self.is_whole()) else { return };
        values.copy.fetch_and_forget(&values.host);
        let mut part = values.host.write().unwrap_or_else(PoisonError::into_inner);
        *part = part.padded(own.start, self.len());
    }

    /// Drops the values of a weight that is cut, except for its own part.
    pub fn release(&self) {
        let Data::Dense(values) = &self.storage.data else { return };
        let Some(own) = values.own.get().filter(|_| self.is_whole()) else { return };
        values.copy.fetch_and_forget(&values.host);
        let mut whole = values.host.write().unwrap_or_else(PoisonError::into_inner);
        *whole = whole.slice(own.clone());
    }

    /// Returns the first element that is in memory.
    fn first(&self) -> usize {
        match &self.storage.data {
            Data::Dense(values) if !self.is_whole() => values.own.get().map_or(0, |own| own.start),
            _ => 0,
        }
    }

    /// Returns a copy of the values. Returns an error for a quantised weight.
    pub fn values(&self) -> Result<Values> {
        match &self.storage.data {
            Data::Mapped(mapped) => Ok(mapped.host.values()),
            _ => self.write(|values| values.clone()),
        }
    }

    /// Locks the values for reading.
    pub fn read(&self) -> WeightGuard<'_> {
        let values = match &self.storage.data {
            Data::Dense(values) => Reading::Dense(values.read()),
            Data::Quantised(matrix) => Reading::Quantised(&matrix.host),
            // For a few pages, the system call costs more than it saves.
            Data::Mapped(mapped) if mapped.host.on_loan && mapped.host.bytes.len() >= LEAST_LOAN => {
                Reading::OnLoan(Loan(&mapped.host))
            }
            Data::Mapped(mapped) => Reading::Mapped(mapped.host.stored()),
        };
        WeightGuard { values, arithmetic: self.arithmetic }
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
        match &self.storage.data {
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
        let Data::Dense(values) = &self.storage.data else { return self.write(|_| ()) };
        let first = self.first();
        let part = back(range.clone(), first);
        if self.storage.is_outline || part.end > values.lock().len() {
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
            Stored::F32(data) => buffer::copy(&data[range]),
            Stored::Bf16(data) => buffer::copy(&data[range]),
            Stored::Quantised(_) => Vec::new(),
        }
    }

    /// Returns the weight in GPU memory. It is copied there at first use.
    pub(crate) fn on_gpu(&self, gpu: &omnigrpo_gpu::Gpu, device: Device) -> Arc<crate::gpu::Weights> {
        use crate::gpu::Weights;
        match &self.storage.data {
            Data::Dense(values) => values.copy.on(device, || Weights::dense(gpu, &values.read())),
            Data::Mapped(mapped) => mapped.copy.on(device, || Weights::dense(gpu, &mapped.host.values())),
            Data::Quantised(matrix) => {
                matrix.copy.on(device, || Weights::quantised(gpu, &matrix.host, &self.shape))
            }
        }
    }

    /// Returns the place of the copy on a GPU.
    pub(crate) fn copy(&self) -> &crate::gpu::Copy {
        match &self.storage.data {
            Data::Dense(values) => &values.copy,
            Data::Mapped(mapped) => &mapped.copy,
            Data::Quantised(matrix) => &matrix.copy,
        }
    }

    /// Changes the copy on a GPU in place by `f`, and returns true. Returns false if there is none, or if somebody else holds it.
    pub(crate) fn change_on_gpu(&self, device: Device, f: impl FnOnce(&mut omnigrpo_gpu::Array)) -> bool {
        match &self.storage.data {
            Data::Dense(values) => values.copy.change(device, f),
            _ => false,
        }
    }

    /// Replaces the values with an array in GPU memory.
    pub(crate) fn replace_on_gpu(&self, device: Device, array: omnigrpo_gpu::Array) {
        if let Data::Dense(values) = &self.storage.data {
            values.copy.replace(device, array);
        }
    }

    /// Returns whether both weights use the same storage.
    pub fn shares_storage(&self, other: &Self) -> bool {
        match (&self.storage.data, &other.storage.data) {
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
