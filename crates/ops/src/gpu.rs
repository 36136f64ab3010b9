//! The GPU backend: bf16 or f32 arrays in GPU memory, and the kernels of `omnigrpo-gpu`.
//!
//! An array is bf16 if all its sources are. A product with a bf16 or quantised weight rounds its other factor to bf16. Its output
//! is bf16 only if that factor was already bf16. The residual stream begins with f32 values and therefore stays f32. A norm with
//! a bf16 weight reads the residual stream, and everything computed from its output is bf16 until it is added to the stream. With
//! f32 weights, everything is f32. Statistics, log-probabilities and gradients of weights are always f32.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use omnigrpo_gpu::{
    Affine, Array, Arriving, CachedGroup, Chosen, Codes, Decoding, Drawn, Dtype, Gpu, Head, Heads, Marks,
    Mixture, Monitor, Nccl, PAGE, Pattern, Place, Row, Sampling, Transfers, Unfolding, Weight, copy_bytes,
};
use omnigrpo_kernels::dropout::Mask;
use omnigrpo_kernels::quant::QuantMatrix;
use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};
use omnigrpo_ranks::Ranks;

use crate::attention::{AttentionHeads, Layout};
use crate::cache::{GroupCache, Store};
use crate::conv::{Mix, Patches};
use crate::decode::{DecodeBatch, DecodeRows};
use crate::device::{Backend, Device, Weighing};
use crate::embedding::Tokens;
use crate::error::Result;
use crate::experts::{ExpertLinear, Routes};
use crate::head::{Scores, Targets};
use crate::linear::{Linear, Onto, Order};
use crate::mlp::Nonlinearity;
use crate::norm::Norm;
use crate::optim::{Moments, Numbers, Squares, Step};
use crate::param::{Param, ParamDtype, Values, ValuesMut};
use crate::rope::RopeTable;
use crate::rows::{Data, Rows, Window};

/// An open GPU or emulator. It stays open until the process ends, so a handle can be copied like any other [`Device`]. Opening
/// the same GPU twice creates two devices, each with a separate order of work.
#[derive(Clone, Copy)]
pub struct Card {
    gpu: &'static Gpu,
    /// Placeholder array for rows on other devices, which callers rule out.
    nothing: &'static Array,
    /// Copies of gradients and weights, created at the first use.
    transfers: &'static OnceLock<Transfers>,
    /// Connection with the GPUs of all ranks.
    nccl: &'static OnceLock<Nccl>,
    ordinal: Option<usize>,
}

impl Card {
    /// Bytes of memory that an open GPU needs besides the data of a run.
    pub const OWN_BYTES: usize = Gpu::OWN_BYTES;
    /// Maximum size of the buffers in main memory through which gradients and weights are copied, in bytes.
    pub const PINNED_BYTES: usize = Transfers::PINNED_BYTES;

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
    #[must_use]
    pub fn emulated(memory: Option<usize>) -> Self {
        Self::over(Gpu::emulated_with(1, memory.unwrap_or(usize::MAX)), None)
    }

    fn over(gpu: Gpu, ordinal: Option<usize>) -> Self {
        let nothing = Box::leak(Box::new(gpu.alloc(0, Dtype::F32)));
        let (transfers, nccl) = (Box::leak(Box::default()), Box::leak(Box::default()));
        Self { gpu: Box::leak(Box::new(gpu)), nothing, transfers, nccl, ordinal }
    }

    /// Returns the driver's number for the GPU, or `None` for an emulator.
    #[must_use]
    pub fn ordinal(self) -> Option<usize> {
        self.ordinal
    }

    #[must_use]
    pub fn name(self) -> String {
        self.gpu.name()
    }

    /// Returns the free and total bytes of memory, or `None` if they are unknown.
    #[must_use]
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
    #[must_use]
    pub fn monitor(self) -> Option<Monitor> {
        self.gpu.monitor()
    }

    pub(crate) fn gpu(self) -> &'static Gpu {
        self.gpu
    }

    /// Returns the numbers of uploads to an emulator, of reads from it and of kernels that it ran, since it was opened. Returns
    /// `None` for a GPU.
    #[cfg(feature = "emulator")]
    #[must_use]
    pub fn traffic(self) -> Option<[u64; 3]> {
        self.gpu.traffic()
    }

    fn transfers(self) -> &'static Transfers {
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

    fn weight(&self) -> Weight<'_> {
        match self {
            Self::Dense(array) => Weight::Dense(array),
            Self::Codes(codes) => Weight::Codes(codes),
        }
    }
}

/// Copy of a weight on one GPU.
#[derive(Debug)]
struct There {
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

/// A layer's weight and bias on the GPU.
struct Layer {
    weight: Arc<Weights>,
    bias: Option<Arc<Weights>>,
    n: usize,
    k: usize,
}

impl Layer {
    fn bias(&self) -> Option<&Array> {
        match self.bias.as_deref() {
            Some(Weights::Dense(array)) => Some(array),
            Some(Weights::Codes(_)) | None => None,
        }
    }

    fn affine(&self) -> Affine<'_> {
        Affine { weight: self.weight.weight(), bias: self.bias(), n: self.n }
    }
}

fn head_of<'a>(weights: &'a Weights, head: &Param, h: usize, temperature: f32) -> Head<'a> {
    Head { weight: weights.weight(), vocab: head.len() / h.max(1), h, temperature }
}

pub(crate) fn heads_of(heads: AttentionHeads) -> Heads {
    Heads { q: heads.q, kv: heads.kv, d: heads.dim }
}

/// Returns bf16 if both factors of a product are bf16, and f32 otherwise.
fn both(x: &Array, weight: &Weights) -> Dtype {
    match x.dtype() == Dtype::Bf16 && weight.weight().dtype() == Dtype::Bf16 {
        true => Dtype::Bf16,
        false => Dtype::F32,
    }
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

fn words(index: &[usize]) -> Vec<u32> {
    index.iter().map(|&i| i as u32).collect()
}

/// Converts a window of an array of `cols` columns.
fn place<'a>(window: Window, cols: usize, index: Option<&'a Array>) -> Place<'a> {
    Place { first: window.row * cols + window.col, stride: cols, index }
}

impl Card {
    fn device(&self) -> Device {
        Device::Gpu(*self)
    }

    fn rows(&self, data: Array, rows: usize, cols: usize) -> Rows {
        Rows::on_gpu(*self, data, rows, cols)
    }

    fn line(&self, data: Array) -> Rows {
        let cols = data.len();
        self.rows(data, 1, cols)
    }

    /// Returns the array of rows that are on this device.
    pub(crate) fn of<'a>(&'a self, x: &'a Rows) -> &'a Array {
        match &x.data {
            Data::Gpu(_, data) => data,
            _ => self.nothing,
        }
    }

    /// Runs `f` on the array of `x`, so that `f` can change it. A shared array is copied first.
    pub(crate) fn change(&self, x: &mut Rows, f: impl FnOnce(&mut Array)) {
        if let Data::Gpu(_, data) = &mut x.data {
            if Arc::get_mut(data).is_none() {
                *data = Arc::new(self.gpu.cast(data, data.dtype()));
            }
            if let Some(data) = Arc::get_mut(data) {
                f(data);
            }
        }
    }

    /// Runs `f` on the gradient of a weight if the weight is trained.
    fn accumulate(&self, param: &Param, f: impl FnOnce(&mut Array)) {
        if let Some(rows) = param.gradient(self.device()).as_mut().and_then(|guard| guard.rows()) {
            self.change(rows, f);
        }
    }

    fn weights(&self, param: &Param) -> Arc<Weights> {
        let weights = param.on_gpu(self.gpu, self.device());
        self.gpu.keep(&weights);
        weights
    }

    /// Runs `f` on a vector (norm, bias, scale) in the dtype in which it is stored.
    fn vector<R>(&self, param: &Param, f: impl FnOnce(&Array) -> R) -> R {
        match &*self.weights(param) {
            Weights::Dense(array) => f(array),
            codes @ Weights::Codes(_) => {
                f(&self.gpu.weight_rows(codes.weight(), param.len(), None, 1, Dtype::F32))
            }
        }
    }

    fn layer(&self, linear: &Linear) -> Layer {
        let bias = linear.bias().map(|bias| self.weights(bias));
        Layer { weight: self.weights(linear.weight()), bias, n: linear.n(), k: linear.k() }
    }

    fn layers(&self, layers: &[Linear]) -> Vec<Layer> {
        layers.iter().map(|layer| self.layer(layer)).collect()
    }

    /// Returns bf16 if the input and all weights are bf16, and f32 otherwise.
    fn output(&self, x: Dtype, layers: &[Layer]) -> Dtype {
        let narrow = |layer: &Layer| layer.weight.weight().dtype() == Dtype::Bf16;
        match x == Dtype::Bf16 && layers.iter().all(narrow) {
            true => Dtype::Bf16,
            false => Dtype::F32,
        }
    }

    /// Returns the input in the dtype of the first layer's weight, if several layers can share this conversion.
    fn operand(&self, x: &Array, layers: &[Layer]) -> Option<Array> {
        let wanted = layers.first()?.weight.weight().dtype();
        (layers.len() > 1 && wanted != x.dtype()).then(|| self.gpu.cast(x, wanted))
    }

    fn index(&self, window: Window) -> Option<Arc<Array>> {
        Some(window.index?.on(self.device(), |index| self.gpu.upload_words(&words(index))))
    }

    fn sums(&self, mix: &Mix) -> Arc<Mixture> {
        mix.on(self.device(), |mix| {
            Mixture::new(self.gpu, &words(&mix.offsets), &mix.rows, Some(&mix.weights))
        })
    }

    /// Chooses the experts of each row of `logits`.
    pub(crate) fn choose_experts(&self, logits: &Rows, topk: usize) -> Chosen {
        self.gpu.choose_experts(self.of(logits), [logits.rows(), logits.cols(), topk])
    }

    /// Returns the expert of each place.
    fn experts_of(&self, routes: &Routes) -> Arc<Array> {
        routes.experts().on(self.device(), |experts| self.gpu.upload_words(experts))
    }

    /// Allocates room for the next token of each row and runs `f` on the rows' cache positions.
    pub(crate) fn continued<T>(
        &self,
        groups: &mut [DecodeRows],
        dtype: Dtype,
        f: impl FnOnce(&[CachedGroup]) -> T,
    ) -> T {
        for group in groups.iter_mut() {
            let GroupCache { store, prompt_rows, lengths, heads, .. } = &mut *group.cache;
            let (Store::Gpu(pages), width) = (store, 2 * heads.kv_width()) else { continue };
            pages.prompt(self.gpu, *prompt_rows, width, dtype);
            for &slot in &group.slots {
                pages.grow(self.gpu, slot, lengths[slot] + 1, width, dtype);
            }
        }
        let cached = |group| -> Option<CachedGroup> {
            let group: &DecodeRows = group;
            let Pages { prompt, own, .. } = Pages::of(group)?;
            let completion = |&slot: &usize| (own[slot].iter().collect(), group.cache.lengths[slot] + 1);
            Some(CachedGroup {
                prompt: prompt.as_ref()?,
                prompt_rows: group.cache.prompt_rows,
                completions: group.slots.iter().map(completion).collect(),
            })
        };
        f(&groups.iter().filter_map(cached).collect::<Vec<_>>())
    }

    fn marks(&self, targets: &Targets) -> Marks {
        Marks::new(self.gpu, &words(&targets.offsets), &targets.tokens)
    }
}

/// Keys and values of a group on a GPU, for all layers: one array for the prompt, and pages for each completion that are
/// allocated as it grows. The dtype is that of the first rows written.
#[derive(Debug)]
pub(crate) struct Pages {
    layers: usize,
    prompt: Option<Arc<Array>>,
    own: Vec<Vec<Array>>,
}

impl Pages {
    fn new(layers: usize, slots: usize) -> Self {
        Self { layers, prompt: None, own: (0..slots).map(|_| Vec::new()).collect() }
    }

    fn of<'a>(group: &'a DecodeRows) -> Option<&'a Self> {
        match &group.cache.store {
            Store::Gpu(pages) => Some(pages),
            _ => None,
        }
    }

    /// Returns the dtype of a group's cache, or `None` if the prompt has not been written.
    pub(crate) fn dtype(group: &DecodeRows) -> Option<Dtype> {
        Some(Self::of(group)?.prompt.as_ref()?.dtype())
    }

    /// Returns the array of the prompt's rows of `width` values in all layers, allocated at first use.
    fn prompt(&mut self, gpu: &Gpu, rows: usize, width: usize, dtype: Dtype) -> &mut Arc<Array> {
        self.prompt.get_or_insert_with(|| Arc::new(gpu.alloc(self.layers * rows * width, dtype)))
    }

    /// Allocates pages until a slot has room for `len` tokens.
    fn grow(&mut self, gpu: &Gpu, slot: usize, len: usize, width: usize, dtype: Dtype) {
        while self.own[slot].len() * PAGE < len {
            self.own[slot].push(gpu.alloc(self.layers * PAGE * width, dtype));
        }
    }
}

/// Returns the terms of the transposed sums.
fn transposed(mix: &Mix) -> Vec<(u32, u32, f32)> {
    mix.terms().map(|(r, row, weight)| (row, r as u32, weight)).collect()
}

impl Backend for Card {
    fn zeros(&self, rows: usize, cols: usize, like: Option<&Rows>) -> Rows {
        let dtype = like.map_or(Dtype::F32, |x| self.of(x).dtype());
        self.rows(self.gpu.zeros(rows * cols, dtype), rows, cols)
    }

    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows {
        self.rows(self.gpu.upload(&data), rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        self.of(x).to_vec()
    }

    fn add(&self, to: &mut Rows, from: &Rows) {
        self.change(to, |to| self.gpu.add(to, self.of(from)));
    }

    fn scale(&self, x: &mut Rows, by: f32) {
        self.change(x, |x| self.gpu.scale(x, by));
    }

    fn part(&self, x: &Rows, of: Window, [rows, cols]: [usize; 2]) -> Rows {
        let (from, index) = (self.of(x), self.index(of));
        let mut y = self.gpu.alloc(rows * cols, from.dtype());
        let source = place(of, x.cols(), index.as_deref());
        self.gpu.copy_rows(&mut y, Place::new(0, cols), from, source, [rows, cols]);
        self.rows(y, rows, cols)
    }

    fn set_part(&self, to: &mut Rows, at: Window, from: &Rows, of: Window, size: [usize; 2]) {
        let (to_index, from_index) = (self.index(at), self.index(of));
        let target = place(at, to.cols(), to_index.as_deref());
        let source = place(of, from.cols(), from_index.as_deref());
        self.change(to, |to| self.gpu.copy_rows(to, target, self.of(from), source, size));
    }

    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows {
        use omnigrpo_gpu::Onto as Plus;
        let (rows, k) = x.dims();
        let (x, layers) = (self.of(x), self.layers(layers));
        let width = layers.iter().map(|layer| layer.n).sum();
        let create = |dtype| self.rows(self.gpu.alloc(rows * width, dtype), rows, width);
        let (mut y, first, plus) = match onto {
            Onto::Nothing => (create(self.output(x.dtype(), &layers)), 0, Plus::Nothing),
            Onto::Residual(residual) => {
                let residual = self.of(residual);
                (create(residual.dtype()), 0, Plus::Residual(residual))
            }
            Onto::Columns(y, first) => {
                debug_assert!(layers.iter().all(|layer| layer.bias().is_none()), "a bias replaces columns");
                (y, first, Plus::Output)
            }
        };
        let converted = self.operand(x, &layers);
        let (x, stride) = (converted.as_ref().unwrap_or(x), y.cols());
        self.change(&mut y, |y| {
            if order == Order::PerRow {
                let layers: Vec<_> = layers.iter().map(Layer::affine).collect();
                self.gpu.linear_rows(y, [first, stride], x, &layers, k, plus);
                return;
            }
            let mut col = first;
            for layer in &layers {
                let plus = match (layer.bias(), plus) {
                    (Some(bias), plus) => {
                        let residual =
                            if let Plus::Residual(residual) = plus { Some(residual) } else { None };
                        self.gpu.bias_rows(y, col, stride, rows, bias, residual);
                        Plus::Output
                    }
                    (None, plus) => plus,
                };
                self.gpu.linear(y, [col, stride], x, layer.weight.weight(), [0, layer.n, k], plus);
                col += layer.n;
            }
        });
        y
    }

    fn linear_dx(&self, dx: Option<Rows>, dy: &Rows, col: usize, layers: &[Linear]) -> Rows {
        let ((rows, width), dy, layers) = (dy.dims(), self.of(dy), self.layers(layers));
        let k = layers.first().map_or(0, |layer| layer.k);
        let mut adds = dx.is_some();
        let mut dx = dx.unwrap_or_else(|| {
            // The products of several layers are summed, and bf16 would round each partial sum.
            let dtype = if layers.len() > 1 { Dtype::F32 } else { self.output(dy.dtype(), &layers) };
            self.rows(self.gpu.alloc(rows * k, dtype), rows, k)
        });
        let converted = self.operand(dy, &layers);
        let dy = converted.as_ref().unwrap_or(dy);
        self.change(&mut dx, |dx| {
            let mut col = col;
            for layer in &layers {
                self.gpu.linear_dx(dx, dy, [col, width], layer.weight.weight(), [0, layer.n, k], adds);
                adds = true;
                col += layer.n;
            }
        });
        dx
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]) {
        let ((rows, k), width) = (x.dims(), dy.cols());
        let mut at = col;
        for layer in layers {
            let n = layer.n();
            let dtype = match layer.weight().dtype() {
                ParamDtype::F32 => Dtype::F32,
                ParamDtype::Bf16 | ParamDtype::Quantised(_) => Dtype::Bf16,
            };
            self.accumulate(layer.weight(), |dw| {
                self.gpu.linear_dw(dw, self.of(x), self.of(dy), [at, width], [0, n, k], dtype);
            });
            if let Some(bias) = layer.bias() {
                self.accumulate(bias, |db| {
                    self.gpu.add_column_sums(db, self.of(dy), [at, width], None, rows);
                });
            }
            at += n;
        }
    }

    fn dropout(&self, x: &Rows, mask: &Mask) -> Rows {
        let keys = mask.rows.as_ref().map(|keys| self.gpu.upload_words(&keys[..]));
        let (threshold, keep) = (u64::from(mask.threshold()), mask.keep());
        let y = self.gpu.dropout(self.of(x), x.cols(), keys.as_ref(), mask.key, threshold, keep);
        self.rows(y, x.rows(), x.cols())
    }

    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, order: Order) -> Rows {
        let (weight, sizes) = (self.weights(layer.weight()), [layer.k(), layer.n()]);
        let mut y = self.gpu.alloc(x.rows() * layer.n(), both(self.of(x), &weight));
        match order {
            Order::Blocked => {
                self.gpu.experts(&mut y, self.of(x), weight.weight(), routes.offsets(), sizes);
            }
            Order::PerRow => {
                self.gpu.experts_rows(&mut y, self.of(x), weight.weight(), &self.experts_of(routes), sizes);
            }
        }
        self.rows(y, x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows {
        let (weight, sizes) = (self.weights(layer.weight()), [layer.k(), layer.n()]);
        let mut dx = self.gpu.alloc(dy.rows() * layer.k(), both(self.of(dy), &weight));
        self.gpu.experts_dx(&mut dx, self.of(dy), weight.weight(), routes.offsets(), sizes);
        self.rows(dx, dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes) {
        let dtype = match layer.weight().dtype() {
            ParamDtype::F32 => Dtype::F32,
            ParamDtype::Bf16 | ParamDtype::Quantised(_) => Dtype::Bf16,
        };
        self.accumulate(layer.weight(), |dw| {
            let (routes, sizes) = ((routes.offsets(), dtype), [layer.k(), layer.n()]);
            self.gpu.experts_dw(dw, self.of(x), self.of(dy), routes, sizes);
        });
    }

    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows {
        let (rows, cols, experts) = (by.rows(x, logits), x.cols(), logits.cols());
        let (x, logits) = (self.of(x), self.of(logits));
        let y = match by {
            Weighing::Gate => self.gpu.gate(x, logits, cols),
            Weighing::Blend => self.gpu.blend(x, logits),
            Weighing::Experts(routes) => {
                let (places, of) = (self.sums(routes.of_rows()), self.experts_of(routes));
                self.gpu.weigh(x, logits, &places, &of, experts)
            }
        };
        self.rows(y, rows, cols)
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, by: Weighing) -> [Rows; 2] {
        let ((rows, cols), (t, experts)) = (x.dims(), logits.dims());
        let (x, logits, dy) = (self.of(x), self.of(logits), self.of(dy));
        let [dx, dlogits] = match by {
            Weighing::Gate => self.gpu.gate_back(x, logits, dy, cols),
            Weighing::Blend => self.gpu.blend_back(x, logits, dy),
            Weighing::Experts(routes) => {
                let (places, of) = (self.sums(routes.of_rows()), self.experts_of(routes));
                self.gpu.weigh_back([x, dy], logits, &places, &of, experts)
            }
        };
        [self.rows(dx, rows, cols), self.rows(dlogits, t, experts)]
    }

    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        let (rows, dim) = x.dims();
        match norm {
            Norm::Rms { weight, eps } => {
                let (y, rstd) =
                    self.vector(weight, |weight| self.gpu.rms(self.of(x), weight, *eps, weight.dtype()));
                (self.rows(y, rows, dim), self.rows(rstd, 1, rows))
            }
            Norm::Layer { weight, bias, eps } => {
                let (y, stats) = self.vector(weight, |weight| {
                    self.vector(bias, |bias| self.gpu.layer(self.of(x), weight, bias, *eps, weight.dtype()))
                });
                (self.rows(y, rows, dim), self.rows(stats, 2, rows))
            }
        }
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm) {
        let (rows, h) = x.dims();
        let [x, stats, dy] = [x, stats, dy].map(|rows| self.of(rows));
        self.vector(norm.weight(), |weight| {
            self.change(dx, |dx| match norm {
                Norm::Rms { .. } => self.gpu.rms_back(dx, dy, x, stats, weight),
                Norm::Layer { .. } => self.gpu.layer_back(dx, dy, x, stats, weight),
            });
        });
        match norm {
            Norm::Rms { weight, .. } => {
                self.accumulate(weight, |dw| self.gpu.norm_weight(dw, dy, x, None, (stats, 0)));
            }
            Norm::Layer { weight, bias, .. } => {
                self.accumulate(weight, |dw| {
                    self.gpu.norm_weight(dw, dy, x, Some((stats, 0)), (stats, rows))
                });
                self.accumulate(bias, |db| self.gpu.add_column_sums(db, dy, [0, h], None, rows));
            }
        }
    }

    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        let rows = qkv.rows();
        let pattern = layout.on(self.device(), |layout| Pattern::new(self.gpu, layout, rows));
        let (out, lse) = self.gpu.attention(self.of(qkv), &pattern, heads_of(heads));
        (self.rows(out, rows, heads.q_width()), self.rows(lse, rows, heads.q))
    }

    fn attention_back(
        &self,
        qkv: &Rows,
        out: &Rows,
        lse: &Rows,
        dout: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows {
        let rows = qkv.rows();
        let pattern = layout.on(self.device(), |layout| Pattern::new(self.gpu, layout, rows));
        let [qkv, out, lse, dout] = [qkv, out, lse, dout].map(|rows| self.of(rows));
        let dqkv = self.gpu.attention_back(qkv, out, lse, dout, &pattern, heads_of(heads));
        self.rows(dqkv, rows, heads.packed_width())
    }

    fn cache(&self, layers: usize, slots: usize, _: usize, _: AttentionHeads) -> std::io::Result<Store> {
        Ok(Store::Gpu(Pages::new(layers, slots)))
    }

    fn cache_prompt(&self, cache: &mut GroupCache, layer: usize, qkv: &Rows, heads: AttentionHeads) {
        let (from, width, rows) = (self.of(qkv), 2 * heads.kv_width(), qkv.rows());
        if let Store::Gpu(pages) = &mut cache.store {
            let prompt = pages.prompt(self.gpu, rows, width, from.dtype());
            if Arc::get_mut(prompt).is_none() {
                *prompt = Arc::new(self.gpu.cast(prompt, prompt.dtype()));
            }
            let Some(to) = Arc::get_mut(prompt) else { return };
            let (target, source) =
                (Place::new(layer * rows * width, width), Place::new(heads.q_width(), heads.packed_width()));
            self.gpu.copy_rows(to, target, from, source, [rows, width]);
        }
    }

    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
    ) -> (Rows, Rows) {
        let packed = self.of(qkv);
        let tables = match &batch.tables {
            Some(tables) => Arc::clone(tables),
            None => {
                let heads = heads_of(heads);
                let tables = Arc::new(self.continued(&mut batch.groups, packed.dtype(), |cached| {
                    Decoding::new(self.gpu, cached, heads)
                }));
                batch.tables = Some(Arc::clone(&tables));
                tables
            }
        };
        let out = self.gpu.attend_cached(packed, &tables, layer, heads_of(heads));
        (self.rows(out, qkv.rows(), heads.q_width()), self.zeros(0, heads.q, None))
    }

    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, inverse: bool) {
        let dims: [usize; 2] = x.dims().into();
        let copy =
            table.copies.on(self.device(), |()| table.waves().each_ref().map(|wave| self.gpu.upload(wave)));
        let [cos, sin] = &*copy;
        self.change(x, |x| self.gpu.rotate(x, dims, cos, sin, heads, inverse));
    }

    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows {
        let (rows, cols) = x.dims();
        match act {
            Nonlinearity::Pointwise(act) => self.rows(self.gpu.activation(self.of(x), act), rows, cols),
            Nonlinearity::SwiGlu => self.rows(self.gpu.swiglu(self.of(x), rows, cols / 2), rows, cols / 2),
        }
    }

    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Nonlinearity) {
        let ((rows, i), dy) = (dy.dims(), self.of(dy));
        self.change(x, |x| match act {
            Nonlinearity::Pointwise(act) => self.gpu.activation_back(x, dy, act),
            Nonlinearity::SwiGlu => self.gpu.swiglu_back(x, dy, rows, i),
        });
    }

    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        let y =
            self.vector(scale, |scale| self.gpu.scale_columns(self.of(x), Some(self.of(residual)), scale));
        self.rows(y, x.rows(), x.cols())
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let (rows, cols) = x.dims();
        let dx = self.vector(scale, |scale| self.gpu.scale_columns(self.of(dy), None, scale));
        self.accumulate(scale, |ds| {
            self.gpu.add_column_sums(ds, self.of(dy), [0, cols], Some(self.of(x)), rows);
        });
        self.rows(dx, rows, cols)
    }

    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows {
        let index = ids.on(self.device(), |ids| self.gpu.upload_words(ids));
        let weights = self.weights(table);
        let y = self.gpu.weight_rows(weights.weight(), h, Some(&index), ids.len(), Dtype::F32);
        self.rows(y, ids.len(), h)
    }

    fn add_rows(&self, x: &mut Rows, table: &Param, mix: &Mix) {
        let (h, weights) = (x.cols(), self.weights(table));
        let copy = mix.on(self.device(), |mix| {
            let own: Vec<u32> = (0..mix.rows.len() as u32).collect();
            let sums = Mixture::new(self.gpu, &words(&mix.offsets), &own, Some(&mix.weights));
            (sums, self.gpu.upload_words(&mix.rows))
        });
        let (sums, index) = &*copy;
        // Gathers the table rows in order of use, in f32.
        let own = self.gpu.weight_rows(weights.weight(), h, Some(index), mix.rows.len(), Dtype::F32);
        self.change(x, |x| self.gpu.mix(x, &own, sums, h, true));
    }

    fn add_rows_back(&self, table: &Param, mix: &Mix, dy: &Rows) {
        self.accumulate(table, |to| {
            let sums = Mixture::reversed(self.gpu, transposed(mix));
            self.gpu.mix(to, self.of(dy), &sums, dy.cols(), true);
        });
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        let sums = self.sums(mix);
        let mut y = self.gpu.alloc(mix.len() * x.cols(), self.of(x).dtype());
        self.gpu.mix(&mut y, self.of(x), &sums, x.cols(), false);
        self.rows(y, mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        let sums = Mixture::reversed(self.gpu, transposed(mix));
        let mut dx = self.gpu.zeros(rows * dy.cols(), self.of(dy).dtype());
        self.gpu.mix(&mut dx, self.of(dy), &sums, dy.cols(), true);
        self.rows(dx, rows, dy.cols())
    }

    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let unfolding = Unfolding::new(self.gpu, &patches.sources, patches.taps, x.rows());
        let unfolded = self.gpu.unfold(self.of(x), &unfolding, x.cols());
        let unfolded = self.rows(unfolded, patches.rows(), layer.k());
        self.linear(&unfolded, std::slice::from_ref(layer), Onto::Nothing, Order::Blocked)
    }

    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let (rows, c) = x.dims();
        let unfolding = Unfolding::new(self.gpu, &patches.sources, patches.taps, rows);
        let unfolded = self.gpu.unfold(self.of(x), &unfolding, c);
        let unfolded = self.rows(unfolded, patches.rows(), layer.k());
        self.linear_dw(&unfolded, dy, 0, std::slice::from_ref(layer));
        drop(unfolded);
        let dunfolded = self.linear_dx(None, dy, 0, std::slice::from_ref(layer));
        let dunfolded = self.of(&dunfolded);
        let mut dx = self.gpu.zeros(rows * c, dunfolded.dtype());
        self.gpu.fold(&mut dx, dunfolded, &unfolding, c);
        self.rows(dx, rows, c)
    }

    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        let y = self.vector(weight, |weight| self.gpu.depthwise(self.of(x), weight, side, false));
        self.rows(y, x.rows(), x.cols())
    }

    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        self.accumulate(weight, |dw| self.gpu.depthwise_weight(dw, self.of(dy), self.of(x), side));
        let dx = self.vector(weight, |weight| self.gpu.depthwise(self.of(dy), weight, side, true));
        self.rows(dx, x.rows(), x.cols())
    }

    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores {
        let (marks, weights) = (self.marks(targets), self.weights(head));
        let head = head_of(&weights, head, normed.cols(), temperature);
        let [logprobs, entropies, lse] = self.gpu.score(self.of(normed), head, &marks).map(|x| self.line(x));
        Scores { logprobs, entropies, lse, temperature }
    }

    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        targets: &Targets,
        scores: &Scores,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Rows {
        let (rows, h) = normed.dims();
        let (marks, weights) = (self.marks(targets), self.weights(head));
        let own = head_of(&weights, head, h, scores.temperature);
        let (dlogp, dentropy) = (self.gpu.upload(dlogp), dentropy.map(|d| self.gpu.upload(d)));
        let stats = [self.of(&scores.entropies), self.of(&scores.lse)];
        let run = |dhead: Option<&mut Array>| {
            self.gpu.score_back(self.of(normed), own, &marks, stats, (&dlogp, dentropy.as_ref()), dhead)
        };
        let mut dnormed = None;
        self.accumulate(head, |dhead| dnormed = Some(run(Some(dhead))));
        self.rows(dnormed.unwrap_or_else(|| run(None)), rows, h)
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (rows, h) = normed.dims();
        let (vocab, weights) = (head.len() / h.max(1), self.weights(head));
        let mut y = self.gpu.alloc(rows * vocab, Dtype::F32);
        let x = self.of(normed);
        let layer = Affine { weight: weights.weight(), bias: None, n: vocab };
        self.gpu.linear_rows(&mut y, [0, vocab], x, &[layer], h, omnigrpo_gpu::Onto::Nothing);
        self.rows(y, rows, vocab)
    }

    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>> {
        let vocab = logits.cols();
        let (sampling, rows) = (sampling(how), draw_rows(from));
        let mut drawn = Vec::new();
        self.change(logits, |logits| drawn = self.gpu.sample(logits, vocab, &sampling, &rows, how.forbidden));
        drawn.into_iter().map(sound).collect()
    }

    fn sum_of_squares(&self, x: &Rows) -> f64 {
        self.gpu.sum_of_squares(self.of(x))
    }

    /// Updates a weight on the GPU. Its state stays there.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()> {
        if matches!(param.dtype(), ParamDtype::Quantised(_)) {
            return param.write(|_| ());
        }
        let Step { lr, betas, eps, weight_decay, grad_scale, .. } = *step;
        let count = moments.step;
        let own = omnigrpo_gpu::Step { lr, betas, eps, weight_decay, grad_scale, count };
        let (state, mut weight) =
            self.state(param, moments, step.master && param.dtype() == ParamDtype::Bf16);
        let State { mut m, mut v, mut rest, .. } = state;
        self.gpu.adamw(&mut weight, rest.as_mut(), [&mut m, &mut v], self.of(grad), &own);
        param.replace_on_gpu(self.device(), weight);
        moments.put(State { card: *self, m, v, rest });
        Ok(())
    }
}

/// Optimizer state of a weight, on the GPU that updates the weight.
#[derive(Debug)]
pub(crate) struct State {
    card: Card,
    pub m: Array,
    pub v: Array,
    /// Difference between the f32 master and the bf16 weight.
    pub rest: Option<Array>,
}

impl State {
    /// Returns the f32 master, or an empty vector if there is none.
    pub fn master(&self, param: &Param) -> Vec<f32> {
        match (&*self.card.weights(param), &self.rest) {
            (Weights::Dense(weight), Some(rest)) => self.card.gpu.join_master(weight, rest),
            _ => Vec::new(),
        }
    }

    /// Returns the state in the form for main memory.
    pub fn numbers(&self, param: &Param) -> Numbers {
        Numbers { m: self.m.to_vec(), v: self.v.to_vec(), master: self.master(param) }
    }
}

impl Card {
    /// Moves the optimizer state of a weight to this GPU from its current location. Also returns a copy of the weight, which the
    /// update changes.
    fn state(&self, param: &Param, moments: &mut Moments, with_master: bool) -> (State, Array) {
        let copy = || self.vector(param, |weight| self.gpu.cast(weight, weight.dtype()));
        let numbers = match moments.take() {
            (Some(state), _) if state.card == *self => return (state, copy()),
            // State is moved from another GPU through main memory.
            (Some(state), _) => state.numbers(param),
            (None, numbers) => numbers,
        };
        let part = |data: &[f32]| match data.is_empty() {
            true => self.gpu.zeros(param.len(), Dtype::F32),
            false => self.gpu.upload(data),
        };
        let (weight, rest) = match (with_master, numbers.master.is_empty()) {
            (true, false) => {
                let (weight, rest) = self.gpu.split_master(&numbers.master);
                (weight, Some(rest))
            }
            // At the first step, the master is equal to the weight.
            (true, true) => (copy(), Some(self.gpu.zeros(param.len(), Dtype::Bf16))),
            (false, _) => (copy(), None),
        };
        (State { card: *self, m: part(&numbers.m), v: part(&numbers.v), rest }, weight)
    }
}
