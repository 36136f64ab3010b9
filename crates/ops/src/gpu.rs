//! The GPU backend: bf16 or f32 arrays in GPU memory, and the kernels of `omnigrpo-gpu`.
//!
//! An array is bf16 if all its sources are. A product with a bf16 or quantised weight rounds its other factor to bf16. Its output
//! is bf16 only if that factor was already bf16. The residual stream begins with f32 values and therefore stays f32. A norm with
//! a bf16 weight reads the residual stream, and everything computed from its output is bf16 until it is added to the stream. The
//! gradient of a bf16 input is bf16 if it is one product with bf16 weights, to which no adapter adds. With f32 weights, everything is
//! f32. Statistics, log-probabilities and gradients of weights and of the stream are always f32.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use omnigrpo_gpu::{
    Array, Arriving, Codes, Drawn, Dtype, Gpu, Heads, Monitor, Nccl, Row, Sampling, Transfers, Weight,
    copy_bytes,
};
use omnigrpo_kernels::quant::QuantMatrix;
use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};
use omnigrpo_ranks::Ranks;

use crate::attention::AttentionHeads;
use crate::device::Device;
use crate::error::Result;
use crate::optim::Squares;
use crate::param::{Param, Values, ValuesMut};
use crate::rows::{Data, Rows, misplaced};

/// An open GPU or emulator. It stays open until the process ends, so a handle can be copied like any other [`Device`]. Opening
/// the same GPU twice creates two devices, each with a separate order of work.
#[derive(Clone, Copy)]
pub struct Card {
    pub(crate) gpu: &'static Gpu,
    /// Copies of gradients and weights, created at the first use.
    transfers: &'static OnceLock<Transfers>,
    /// Connection with the GPUs of all ranks.
    nccl: &'static OnceLock<Nccl>,
    ordinal: Option<usize>,
}

impl Card {
    /// Bytes of memory that an open GPU needs besides the data of a run.
    pub const OWN_BYTES: usize = Gpu::OWN_BYTES;
    /// Size of the buffers in main memory through which weights travel to a GPU, in bytes, and size with those for gradients.
    pub const PINNED_BYTES: [usize; 2] = Gpu::PINNED_BYTES;

    /// Opens a GPU. `libraries` are folders that are searched for CUDA's libraries before the system loader's paths. `cache` is a
    /// folder for compiled kernels.
    ///
    /// # Errors
    /// Returns an error if the driver is missing or too old, the GPU does not exist, or a library is missing.
    pub fn open(ordinal: usize, libraries: &[PathBuf], cache: &Path) -> Result<Self> {
        Ok(Self::over(Gpu::cuda(ordinal, libraries, cache)?, Some(ordinal)))
    }

    /// Creates an emulator for tests, which runs kernels on the CPU with a schedule in which some warps run ahead of others.
    /// `memory` is its memory in bytes; `None` means all that the system provides.
    #[cfg(feature = "emulator")]
    pub fn emulated(memory: Option<usize>) -> Self {
        Self::over(Gpu::emulated_with(1, memory.unwrap_or(usize::MAX)), None)
    }

    pub(crate) fn over(gpu: Gpu, ordinal: Option<usize>) -> Self {
        let (transfers, nccl) = (Box::leak(Box::default()), Box::leak(Box::default()));
        Self { gpu: Box::leak(Box::new(gpu)), transfers, nccl, ordinal }
    }

    /// Returns the driver's number for the GPU, or `None` for an emulator.
    pub fn ordinal(self) -> Option<usize> {
        self.ordinal
    }

    pub fn name(self) -> String {
        self.gpu.name()
    }

    /// Returns the free and total bytes of memory, or `None` if they are unknown.
    pub fn memory(self) -> Option<[usize; 2]> {
        self.gpu.memory()
    }

    /// Connects this GPU with those of all other ranks over NCCL. Sums of [`crate::Blocks`] then stay in GPU memory. `libraries`
    /// are folders that are searched for NCCL before the system loader's paths. Returns the name of the engine.
    ///
    /// # Errors
    /// Returns an error on all ranks if NCCL is missing or too old on one of them, if ranks share a GPU, or if NCCL cannot connect
    /// the GPUs.
    pub fn connect(self, ranks: &Ranks, libraries: &[PathBuf]) -> Result<String> {
        let connected = Nccl::connect(self.gpu, ranks, libraries)?;
        Ok(self.nccl.get_or_init(|| connected).name())
    }

    /// Returns the connection with the GPUs of all ranks, if there is one.
    pub(crate) fn nccl(self) -> Option<&'static Nccl> {
        self.nccl.get()
    }

    /// Connects to the driver's management library, which reports the load of this GPU; `None` without it.
    pub fn monitor(self) -> Option<Monitor> {
        self.gpu.monitor()
    }

    pub(crate) fn gpu(self) -> &'static Gpu {
        self.gpu
    }

    /// Returns the numbers of uploads to an emulator, of reads from it and of kernels that it ran, since it was opened. Returns
    /// `None` for a GPU.
    #[cfg(feature = "emulator")]
    pub fn traffic(self) -> Option<[u64; 3]> {
        self.gpu.traffic()
    }

    pub(crate) fn transfers(self) -> &'static Transfers {
        self.transfers.get_or_init(|| Transfers::new(self.gpu))
    }

    pub(crate) fn finish(self) -> Result<()> {
        Ok(self.gpu.check()?)
    }
}

impl PartialEq for Card {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.gpu, other.gpu)
    }
}

impl Eq for Card {}

impl std::hash::Hash for Card {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        std::ptr::from_ref(self.gpu).hash(state);
    }
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.ordinal {
            Some(ordinal) => write!(f, "cuda:{ordinal}"),
            None => f.write_str("emulated"),
        }
    }
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{self} ({})", self.name())
    }
}

/// A weight in GPU memory.
#[derive(Debug)]
pub(crate) enum Weights {
    Dense(Array),
    Codes(Codes),
}

impl Weights {
    pub(crate) fn dense(gpu: &Gpu, values: &Values) -> Self {
        Self::Dense(match values {
            Values::F32(data) => gpu.upload(data),
            Values::Bf16(data) => gpu.upload_bf16(data),
        })
    }

    pub(crate) fn quantised(gpu: &Gpu, matrix: &QuantMatrix, shape: &[usize]) -> Self {
        let Some((&k, n)) = shape.split_last() else { return Self::Dense(gpu.alloc(0, Dtype::Bf16)) };
        let n = n.iter().product();
        let (codes, scales) = matrix.by_rows();
        let scales: Vec<_> = scales.iter().map(|scale| [scale.min, scale.step]).collect();
        Self::Codes(Codes::new(gpu, matrix.bits(), [n, k], &codes, &scales))
    }

    pub(crate) fn weight(&self) -> Weight<'_> {
        match self {
            Self::Dense(array) => Weight::Dense(array),
            Self::Codes(codes) => Weight::Codes(codes),
        }
    }
}

/// Copy of a weight on one GPU.
#[derive(Debug)]
pub(crate) struct There {
    device: Device,
    weights: Arc<Weights>,
    /// True if the copy has changed since the host last read it.
    newer: bool,
}

/// Copy of a weight on a GPU, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Copy(Mutex<Option<There>>);

impl Copy {
    fn lock(&self) -> MutexGuard<'_, Option<There>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the copy on `device`. If there is none, `make` creates it and fetches changes from another GPU.
    pub(crate) fn on(&self, device: Device, make: impl FnOnce() -> Weights) -> Arc<Weights> {
        if let Some(there) = self.lock().as_ref().filter(|there| there.device == device) {
            return Arc::clone(&there.weights);
        }
        let weights = Arc::new(make());
        *self.lock() = Some(There { device, weights: Arc::clone(&weights), newer: false });
        weights
    }

    /// Changes a range of the values on the host by `f`, which is called for consecutive parts of it. Sends each part to the copy
    /// while `f` computes the next one.
    pub(crate) fn rewrite(
        &self,
        host: &mut Values,
        range: Range<usize>,
        mut f: impl FnMut(Range<usize>, ValuesMut),
    ) {
        let there = self.lock().as_ref().map(|there| (there.device, Arc::clone(&there.weights)));
        match &there {
            Some((Device::Gpu(card), weights)) if let Weights::Dense(array) = &**weights => {
                card.transfers().upload(array, range, |part, to| {
                    f(part.clone(), host.part_mut(part.clone()));
                    copy_bytes(to, host.bytes(part));
                });
            }
            _ => f(range.clone(), host.part_mut(range)),
        }
    }

    /// Changes the copy on `device` in place by `f`, and returns true. Returns false if there is none, or if somebody else holds it.
    pub(crate) fn change(&self, device: Device, f: impl FnOnce(&mut Array)) -> bool {
        let mut copy = self.lock();
        let Some(there) = copy.as_mut().filter(|there| there.device == device) else { return false };
        let Some(Weights::Dense(array)) = Arc::get_mut(&mut there.weights) else { return false };
        f(array);
        there.newer = true;
        true
    }

    /// Returns an array of the copies of several weights on `device`, one behind the other. If `keeps` is true, they become its parts,
    /// if they are not; otherwise the array is a copy. Returns `None` if one has no dense copy there, or if the arrays cannot be joined
    /// now.
    fn join(copies: &[&Self], device: Device, gpu: &Gpu, keeps: bool) -> Option<Arc<Array>> {
        let present = |copy: &Self| {
            let there = copy.lock();
            there.as_ref().filter(|there| there.device == device).map(|there| Arc::clone(&there.weights))
        };
        let before: Vec<Arc<Weights>> = copies.iter().map(|copy| present(copy)).collect::<Option<_>>()?;
        let arrays = before.iter().map(|weights| match &**weights {
            Weights::Dense(array) => Some(array),
            Weights::Codes(_) => None,
        });
        let arrays: Vec<&Array> = arrays.collect::<Option<_>>()?;
        if let Some(whole) = Array::whole(&arrays) {
            return Some(whole);
        }
        // No weight is locked here: another thread may have exclusive use of the device, and wait for a weight.
        let parts = gpu.joined(&arrays)?;
        let whole = Array::whole(&parts.iter().collect::<Vec<_>>());
        if !keeps {
            return whole;
        }
        let mut locked: Vec<_> = copies.iter().map(|copy| copy.lock()).collect();
        // One that was replaced meanwhile has other values. No pass runs while an optimizer changes weights in place.
        let same = |(there, before): (&MutexGuard<Option<There>>, &Arc<Weights>)| {
            there.as_ref().is_some_and(|there| Arc::ptr_eq(&there.weights, before))
        };
        if !locked.iter().zip(&before).all(same) {
            return None;
        }
        for (there, part) in locked.iter_mut().filter_map(|copy| copy.as_mut()).zip(parts) {
            there.weights = Arc::new(Weights::Dense(part));
        }
        whole
    }

    pub(crate) fn replace(&self, device: Device, array: Array) {
        *self.lock() = Some(There { device, weights: Arc::new(Weights::Dense(array)), newer: true });
    }

    /// Copies changes back to the host.
    pub(crate) fn fetch(&self, host: &RwLock<Values>) {
        let mut copy = self.lock();
        if let Some(there) = copy.as_mut().filter(|there| there.newer)
            && let Weights::Dense(array) = &*there.weights
        {
            let values = match array.dtype() {
                Dtype::F32 => Values::F32(array.to_vec()),
                Dtype::Bf16 => Values::Bf16(array.to_bf16()),
            };
            *host.write().unwrap_or_else(PoisonError::into_inner) = values;
            there.newer = false;
        }
    }

    /// Copies changes back to the host and drops the copy. The host can then change the values.
    pub(crate) fn fetch_and_forget(&self, host: &RwLock<Values>) {
        self.fetch(host);
        *self.lock() = None;
    }
}

/// A gradient on its way to main memory.
#[derive(Debug)]
pub(crate) enum Sent {
    Card {
        card: Card,
        values: Arriving,
        squares: SquaresOf,
        /// Place in the order of all gradients that were sent.
        order: u64,
    },
    /// A gradient without values.
    Outline,
}

/// Sum of squares of a gradient that was sent.
#[derive(Debug)]
pub(crate) enum SquaresOf {
    Known(f64),
    /// Partial sums, as pairs of words.
    Arriving(Arriving),
}

impl Sent {
    /// Starts to send a gradient from a GPU to main memory, to the memory of `to`. Its memory on the GPU is freed after that.
    /// `squares` is the sum of its squares if it is known. Returns the rows if they are not on a GPU.
    pub(crate) fn start(
        rows: Rows,
        to: &mut Vec<f32>,
        squares: Option<f64>,
    ) -> std::result::Result<Self, Rows> {
        match rows.data {
            Data::Outline(_) if crate::outline::is_on_card() => Ok(Self::Outline),
            Data::Gpu(card, array) => {
                let squares = match squares {
                    Some(sum) => SquaresOf::Known(sum),
                    None => {
                        let partial = Arc::new(card.gpu.squares(&array));
                        SquaresOf::Arriving(card.transfers().download(partial, Vec::new()))
                    }
                };
                let values = card.transfers().download(array, std::mem::take(to));
                static SENT: AtomicU64 = AtomicU64::new(0);
                let order = 1 + SENT.fetch_add(1, Ordering::Relaxed);
                Ok(Self::Card { card, values, squares, order })
            }
            _ => Err(rows),
        }
    }

    pub(crate) fn order(&self) -> u64 {
        match self {
            Self::Card { order, .. } => *order,
            Self::Outline => 0,
        }
    }

    /// Returns the sum of squares, after waiting for it.
    pub(crate) fn squares(&mut self) -> Squares {
        let Self::Card { card, squares, .. } = self else {
            return Squares { device: Device::Outline, sum: 0.0 };
        };
        let sum = match std::mem::replace(squares, SquaresOf::Known(f64::NAN)) {
            SquaresOf::Known(sum) => sum,
            SquaresOf::Arriving(partial) => partial.wait().map_or(f64::NAN, |words| {
                words.as_chunks::<2>().0.iter().map(|pair| bytemuck::cast::<_, f64>(*pair)).sum()
            }),
        };
        *squares = SquaresOf::Known(sum);
        Squares { device: card.device(), sum }
    }

    /// Waits for the values. Returns `None` for an outline. The values are NaN if the GPU has failed.
    pub(crate) fn wait(self, len: usize) -> Option<Vec<f32>> {
        match self {
            Self::Outline => None,
            Self::Card { values, .. } => Some(values.wait().unwrap_or_else(|| vec![f32::NAN; len])),
        }
    }
}

/// Returns the sum of squares of each of `rows`. Waits once for each GPU.
pub(crate) fn sums_of_squares(rows: &[&Rows]) -> Vec<f64> {
    let mut sums = vec![0.0; rows.len()];
    let mut of_cards: Vec<(Card, Vec<usize>)> = Vec::new();
    for (at, rows) in rows.iter().enumerate() {
        match (&rows.data, of_cards.last_mut()) {
            (Data::Gpu(card, _), Some((last, places))) if last == card => places.push(at),
            (Data::Gpu(card, _), _) => of_cards.push((*card, vec![at])),
            _ => sums[at] = rows.sum_of_squares(),
        }
    }
    for (card, places) in of_cards {
        let arrays: Vec<&Array> = places.iter().map(|&at| card.of(rows[at])).collect();
        places.iter().zip(card.gpu.sums_of_squares(&arrays)).for_each(|(&at, sum)| sums[at] = sum);
    }
    sums
}

pub(crate) fn heads_of(heads: AttentionHeads) -> Heads {
    Heads { q: heads.q, kv: heads.kv, d: heads.dim }
}

pub(crate) fn sampling(how: &Sampler) -> Sampling {
    Sampling {
        temperature: how.temperature,
        top_p: how.top_p,
        top_k: how.top_k,
        min_p: how.min_p,
        repetition_penalty: how.repetition_penalty,
        scoring_temperature: how.scoring_temperature,
    }
}

pub(crate) fn draw_rows(from: &[DrawFrom]) -> Vec<Row> {
    let row = |from: &DrawFrom| Row { uniform: from.uniform, seen: from.present(), forbids: from.forbids };
    from.iter().map(row).collect()
}

/// Returns the draw if all its values are finite, and `None` otherwise.
pub(crate) fn sound(drawn: Drawn) -> Option<Draw> {
    let Drawn { id, logprob, sampler_logprob, entropy } = drawn;
    let all = [logprob, sampler_logprob, entropy];
    all.iter().all(|x| x.is_finite()).then_some(Draw { id, logprob, sampler_logprob, entropy })
}

pub(crate) fn words(index: &[usize]) -> Vec<u32> {
    index.iter().map(|&i| i as u32).collect()
}

impl Card {
    pub(crate) fn device(&self) -> Device {
        Device::Gpu(*self)
    }

    pub(crate) fn rows(&self, data: Array, rows: usize, cols: usize) -> Rows {
        Rows::on_gpu(*self, data, rows, cols)
    }

    /// Returns the array of rows that are on this device.
    pub(crate) fn of<'a>(&'a self, x: &'a Rows) -> &'a Array {
        match &x.data {
            Data::Gpu(card, data) if card == self => data,
            _ => misplaced(x.device(), &self.to_string()),
        }
    }

    /// Runs `f` on the array of `x`, so that `f` can change it. A shared array is copied first.
    pub(crate) fn change(&self, x: &mut Rows, f: impl FnOnce(&mut Array)) {
        let device = x.device();
        let data = match &mut x.data {
            Data::Gpu(card, data) if card == self => data,
            _ => misplaced(device, &self.to_string()),
        };
        if Arc::get_mut(data).is_none() {
            *data = Arc::new(self.gpu.cast(data, data.dtype()));
        }
        if let Some(data) = Arc::get_mut(data) {
            data.set_rounded(None);
            f(data);
        }
    }

    /// Runs `f` on the gradient of a weight if the weight is trained.
    pub(crate) fn accumulate(&self, param: &Param, f: impl FnOnce(&mut Array)) {
        if let Some(rows) = param.gradient(self.device()).as_mut().and_then(|guard| guard.rows()) {
            self.change(rows, f);
        }
    }

    /// Returns an array of these weights, one behind the other. They must differ from each other. They are joined at the first use, or
    /// each time if ranks divide one of them, since a part would keep the memory of the others.
    pub(crate) fn joined(&self, params: &[&Param]) -> Option<Arc<Array>> {
        params.iter().for_each(|param| drop(self.weights(param)));
        let copies: Vec<_> = params.iter().map(|param| param.copy()).collect();
        Copy::join(&copies, self.device(), self.gpu, !params.iter().any(|param| param.is_cut()))
    }

    pub(crate) fn weights(&self, param: &Param) -> Arc<Weights> {
        let weights = param.on_gpu(self.gpu, self.device());
        self.gpu.keep(&weights);
        weights
    }

    /// Runs `f` on a vector (norm, bias, scale) in the dtype in which it is stored.
    pub(crate) fn vector<R>(&self, param: &Param, f: impl FnOnce(&Array) -> R) -> R {
        match &*self.weights(param) {
            Weights::Dense(array) => f(array),
            codes @ Weights::Codes(_) => {
                f(&self.gpu.weight_rows(codes.weight(), param.len(), None, 1, Dtype::F32))
            }
        }
    }
}
