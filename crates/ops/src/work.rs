//! Operations of a pass, and the time that they take on this machine.
//!
//! A pass over [`Device::Outline`] computes nothing. [`work`] lists the operations that the same pass would compute on a CPU,
//! with their sizes. [`Work::seconds`] runs one operation of each kind and size with the CPU's kernels and adds up the times. For
//! a large operation, only some of its rows or outputs are measured. Successive calls use different copies of the weight, which
//! together exceed the caches, as the layers of a model do. A gradient is counted only for weights that are trained.
//!
//! The time between operations is not included: sampling, rewards, logs, and reading rows and media.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use omnigrpo_kernels::Arithmetic;
use omnigrpo_kernels::Top;
use omnigrpo_kernels::activation::Activation;
use omnigrpo_kernels::attention::{AttentionLayout, QueryRange};
use omnigrpo_kernels::quant::QuantMatrix;
use omnigrpo_kernels::recurrent::{Continued, Segments, delta_steps as steps};
use omnigrpo_kernels::sample::{DrawFrom, Sampler};

use crate::activation::Nonlinearity;
use crate::attention::GroupCache;
use crate::attention::{AttentionHeads, Layout, Turn};
use crate::backend::Backend;
use crate::decode::{DecodeBatch, DecodeRows};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::head::Targets;
use crate::host::Host;
use crate::linear::{Dx, Linear, Onto};
use crate::norm::Norm;
use crate::optim::{Moments, Step};
use crate::order::Order;
use crate::param::{Param, ParamDtype, Part, Values};
use crate::recurrent::DeltaHeads;
use crate::rope::RopeTable;
use crate::rows::Rows;

/// Limit on the floating-point operations of a measured product.
const MEASURED_FLOPS: usize = 1_000_000_000;
/// Limit on the rows of a measured product.
const MEASURED_ROWS: usize = 512;
/// Limit on the bytes of a measured weight, and on the bytes of all its copies.
const MEASURED_BYTES: usize = 32 << 20;
/// Limit on the values of a measured elementwise operation.
const MEASURED_VALUES: usize = 1 << 21;
/// Limit on the keys per query in measured attention.
const MEASURED_KEYS: usize = 4096;
/// Largest number of rows for which a product is limited by reading its weights. Such a product is measured with weights that are
/// not in a cache.
const FEW_ROWS: usize = 64;
/// Limit on the copies of a weight.
const MOST_COPIES: usize = 32;
/// Minimum time for which an operation is repeated. It runs at least twice.
const REPEATED: Duration = Duration::from_millis(4);

/// Form of a weight, which determines the kernels of its products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    dtype: ParamDtype,
    arithmetic: Arithmetic,
}

impl Form {
    pub(crate) fn of(weight: &Param) -> Self {
        Self { dtype: weight.dtype(), arithmetic: weight.arithmetic() }
    }
}

impl From<ParamDtype> for Form {
    fn from(dtype: ParamDtype) -> Self {
        Self { dtype, arithmetic: Arithmetic::default() }
    }
}

/// Kind and sizes of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    /// Product with a weight `[n, k]`.
    Linear { rows: usize, k: usize, n: usize, form: Form, per_row: bool },
    /// Gradient of a linear product with respect to its input rows.
    LinearDx { rows: usize, k: usize, n: usize, form: Form },
    /// Gradient of a linear product with respect to its weight.
    LinearDw { rows: usize, k: usize, n: usize, form: Form },
    /// Attention with a mean number of keys for each query.
    Attention { queries: usize, keys: usize, heads: AttentionHeads, back: bool },
    /// Attention over a cache.
    Cached { groups: usize, slots: usize, prompt: usize, own: usize, heads: AttentionHeads },
    /// Log-probabilities of one target per row, without a matrix of logits.
    Score { rows: usize, h: usize, v: usize, form: Form, back: Option<bool> },
    /// Logits for sampling.
    Logits { rows: usize, h: usize, v: usize, form: Form },
    /// Sampling of tokens from logits.
    Draw { rows: usize, v: usize },
    /// Normalisation.
    Norm { rows: usize, dim: usize, back: bool },
    /// Rotary position encoding.
    Rotate { rows: usize, heads: usize, dim: usize, half: usize },
    /// The gated delta rule over a stream.
    Delta { rows: usize, heads: DeltaHeads, back: bool },
    /// The gated delta rule of rows that continue sequences, `each` rows for each of them.
    DeltaSteps { slots: usize, each: usize, heads: DeltaHeads },
    /// Gated product of the two halves of each row.
    Swiglu { rows: usize, width: usize, back: bool },
    /// Activation function.
    Activation { len: usize, act: Activation, back: bool },
    /// Any other elementwise operation.
    Elementwise { len: usize },
    /// Update of a weight by the optimizer, including the norm of the gradient.
    AdamW { len: usize, dtype: ParamDtype, master: bool, coded: bool },
}

/// Measured time of each operation, in seconds.
#[derive(Clone, Debug, Default)]
pub struct Rates(HashMap<Call, f64>);

/// Operations of a pass by phase.
#[derive(Clone, Debug, Default)]
pub struct Work(HashMap<(&'static str, Call), f64>);

struct Log {
    phase: &'static str,
    times: f64,
    work: Option<Work>,
}

thread_local! {
    static LOG: RefCell<Log> = const { RefCell::new(Log { phase: "", times: 1.0, work: None }) };
}

/// Runs `f`, which works on [`Device::Outline`], and returns its operations.
pub fn work<R>(f: impl FnOnce() -> R) -> (R, Work) {
    let outer = LOG.with_borrow_mut(|log| log.work.replace(Work::default()));
    let result = f();
    let work = LOG.with_borrow_mut(|log| std::mem::replace(&mut log.work, outer));
    (result, work.unwrap_or_default())
}

/// Runs `f` and counts each of its operations `times` times.
pub fn repeated<R>(times: f64, f: impl FnOnce() -> R) -> R {
    let before = LOG.with_borrow_mut(|log| {
        let inner = log.times * times;
        std::mem::replace(&mut log.times, inner)
    });
    let result = f();
    LOG.with_borrow_mut(|log| log.times = before);
    result
}

/// Runs `f` and counts its operations under `phase`.
pub fn phase<R>(phase: &'static str, f: impl FnOnce() -> R) -> R {
    let before = LOG.with_borrow_mut(|log| std::mem::replace(&mut log.phase, phase));
    let result = f();
    LOG.with_borrow_mut(|log| log.phase = before);
    result
}

/// Lists an operation. `call` is evaluated only inside [`work`].
pub(crate) fn note(call: impl FnOnce() -> Call) {
    LOG.with_borrow_mut(|log| {
        if let Some(Work(calls)) = &mut log.work {
            let (call, share) = call().rounded();
            *calls.entry((log.phase, call)).or_default() += log.times * share;
        }
    });
}

/// Lists an elementwise operation on `len` values.
pub(crate) fn note_elements(len: usize) {
    note(|| Call::Elementwise { len });
}

/// Lists an activation of rows, or its gradient.
pub(crate) fn note_activation(x: &Rows, act: Nonlinearity, back: bool) {
    note(|| match act {
        Nonlinearity::Pointwise(act) => Call::Activation { len: x.len(), act, back },
        Nonlinearity::SwiGlu => Call::Swiglu { rows: x.rows(), width: x.cols() / 2, back },
    });
}

/// Lists a product of `rows` rows with each of these layers.
pub(crate) fn note_linear(rows: usize, layers: &[Linear], order: Order) {
    note(|| Call::Linear {
        rows,
        k: layers.first().map_or(0, Linear::k),
        n: layers.iter().map(Linear::n).sum(),
        form: layers.first().map_or(ParamDtype::F32.into(), |layer| Form::of(layer.weight())),
        per_row: order == Order::PerRow,
    });
}

/// Lists the gradient of a product with respect to its input rows.
pub(crate) fn note_dx(rows: usize, layers: &[Linear]) {
    note(|| Call::LinearDx {
        rows,
        k: layers.first().map_or(0, Linear::k),
        n: layers.iter().map(Linear::n).sum(),
        form: layers.first().map_or(ParamDtype::F32.into(), |layer| Form::of(layer.weight())),
    });
}

/// Lists the weight gradients of the layers that are trained.
pub(crate) fn note_dw(rows: usize, layers: &[Linear]) {
    for layer in layers.iter().filter(|layer| layer.weight().trainable()) {
        note(|| Call::LinearDw { rows, k: layer.k(), n: layer.n(), form: Form::of(layer.weight()) });
    }
}

/// Lists a product grouped by expert. The places are spread evenly over the experts, because the router's choice is unknown in a
/// pass without values.
pub(crate) fn note_experts(places: usize, experts: usize, call: impl Fn(usize) -> Call) {
    let touched = places.min(experts).max(1);
    repeated(touched as f64, || note(|| call(places.div_ceil(touched))));
}

/// Lists attention over a stream.
pub(crate) fn note_attention(rows: usize, layout: &AttentionLayout, heads: AttentionHeads, back: bool) {
    note(|| {
        let pairs: usize = layout.ranges.iter().map(pairs).sum();
        Call::Attention { queries: rows, keys: pairs.div_ceil(rows.max(1)), heads, back }
    });
}

/// Lists attention over caches.
pub(crate) fn note_cached(batch: &DecodeBatch, heads: AttentionHeads) {
    note(|| {
        let groups = batch.groups.len().max(1);
        let each = |f: &dyn Fn(&DecodeRows) -> usize| batch.groups.iter().map(f).sum::<usize>() / groups;
        let own = |group: &DecodeRows| group.slots.first().map_or(0, |&slot| group.cache.slot(slot).1);
        Call::Cached {
            groups,
            slots: each(&|group| group.slots.len()),
            prompt: each(&|group| group.cache.prompt_rows),
            own: each(&own),
            heads,
        }
    });
}

/// Returns the number of query-key pairs of a range.
fn pairs(range: &QueryRange) -> usize {
    let (queries, keys) = (range.queries.len(), range.keys.iter().map(|keys| keys.len()).sum::<usize>());
    // In a causal range, the last query sees all keys, and each earlier query sees one key less.
    let hidden = if range.causal { queries * queries.saturating_sub(1) / 2 } else { 0 };
    (queries * keys).saturating_sub(hidden)
}

/// Rounds up to one of two sizes per power of two. Sizes up to 16 are unchanged, because the kernels differ there.
fn few(size: usize) -> usize {
    let step = (size.next_power_of_two() / 4).max(1);
    if size <= 16 { size } else { size.next_multiple_of(step) }
}

impl Work {
    /// Returns the seconds of each phase. Operations that are missing from `rates` are measured, which takes about a second for a
    /// model.
    ///
    /// # Errors
    /// Returns an error if a measured operation fails, for example because memory is exhausted.
    pub fn seconds(&self, rates: &mut Rates) -> Result<HashMap<&'static str, f64>> {
        let mut out: HashMap<&'static str, f64> = HashMap::new();
        for ((phase, call), times) in &self.0 {
            let each = match rates.0.get(call) {
                Some(&each) => each,
                None => *rates.0.entry(*call).or_insert(call.seconds()?),
            };
            *out.entry(phase).or_default() += times * each;
        }
        Ok(out)
    }

    /// Returns the number of values that the products and attention operations of a phase output.
    pub fn outputs(&self, phase: &str) -> f64 {
        let of_phase = self.0.iter().filter(|((of, _), _)| *of == phase);
        let outputs = |call: &Call| match *call {
            Call::Linear { rows, n, .. } => rows * n,
            Call::Attention { queries, heads, .. } => queries * heads.q_width(),
            _ => 0,
        };
        of_phase.map(|((_, call), times)| times * outputs(call) as f64).sum()
    }

    /// Adds the time to copy `numbers` values to a phase.
    pub fn add_copies(&mut self, phase: &'static str, numbers: f64) {
        let len = MEASURED_VALUES;
        *self.0.entry((phase, Call::Elementwise { len })).or_default() += numbers / len as f64;
    }

    /// Multiplies the counts of a phase's operations by a factor, except for scoring over the vocabulary.
    pub fn scale_blocks(&mut self, phase: &str, by: f64) {
        let blocks = |of: &str, call: &Call| of == phase && !matches!(call, Call::Score { .. });
        self.0.iter_mut().filter(|((of, call), _)| blocks(of, call)).for_each(|(_, times)| *times *= by);
    }

    /// Moves the operations of a phase to another phase.
    pub fn rename(&mut self, phase: &str, to: &'static str) {
        for ((of, call), times) in std::mem::take(&mut self.0) {
            *self.0.entry((if of == phase { to } else { of }, call)).or_default() += times;
        }
    }

    /// Multiplies the counts of a phase's operations by a factor.
    pub fn scale(&mut self, phase: &str, by: f64) {
        self.0.iter_mut().filter(|((of, _), _)| *of == phase).for_each(|(_, times)| *times *= by);
    }

    /// Adds the operations of another pass.
    pub fn add(&mut self, other: Self) {
        for (key, times) in other.0 {
            *self.0.entry(key).or_default() += times;
        }
    }

    /// Returns the number of distinct operations, by kind and sizes.
    pub fn distinct(&self) -> usize {
        self.0.keys().map(|(_, call)| call).collect::<std::collections::HashSet<_>>().len()
    }
}

impl Call {
    /// Rounds the sizes of the operation up. Returns the rounded operation, and the given size as a fraction of the rounded size.
    fn rounded(mut self) -> (Self, f64) {
        let mut share = 1.0;
        let mut round = |size: &mut usize| {
            let given = *size;
            *size = few(given);
            share *= given as f64 / (*size).max(1) as f64;
        };
        match &mut self {
            Self::Linear { rows, .. }
            | Self::LinearDx { rows, .. }
            | Self::LinearDw { rows, .. }
            | Self::Score { rows, .. }
            | Self::Norm { rows, .. }
            | Self::Rotate { rows, .. }
            | Self::Delta { rows, .. }
            | Self::Swiglu { rows, .. } => round(rows),
            Self::Attention { queries, keys, .. } => {
                round(queries);
                round(keys);
            }
            Self::Cached { own, .. } => *own = few(*own),
            Self::Elementwise { len } | Self::Activation { len, .. } | Self::AdamW { len, .. } => round(len),
            Self::Logits { .. } | Self::Draw { .. } | Self::DeltaSteps { .. } => {}
        }
        (self, share)
    }

    /// Runs the operation on synthetic values and returns the seconds that it takes.
    fn seconds(self) -> Result<f64> {
        let cpu = Device::Cpu.backend();
        match self {
            Self::Linear { rows, k, n, form, per_row } => {
                let part = Product::of(rows, k, n, form);
                let (x, weights) = (noise(part.rows, k), part.weights(k, false)?);
                let order = if per_row { Order::PerRow } else { Order::Blocked };
                Ok(part.scale * in_turn(&weights, |layer| cpu.linear(&x, layer, Onto::Nothing, order)))
            }
            Self::LinearDx { rows, k, n, form } => {
                let part = Product::of(rows, k, n, form);
                let (dy, weights) = (noise(part.rows, part.n), part.weights(k, false)?);
                Ok(part.scale * in_turn(&weights, |layer| cpu.linear_dx(Dx::Like(&dy), &dy, 0, layer)))
            }
            Self::LinearDw { rows, k, n, form } => linear_dw(&Product::of(rows, k, n, form), k),
            Self::Attention { queries, keys, heads, back } => Ok(attention(queries, keys, heads, back)),
            Self::Cached { groups, slots, prompt, own, heads } => {
                cached(cpu, groups, slots, prompt, own, heads)
            }
            Self::Score { rows, h, v, form, back } => score(rows, h, v, form, back),
            Self::Logits { rows, h, v, form } => {
                let part = Product::of(rows, h, v, form);
                let (x, weights) = (noise(part.rows, h), part.weights(h, false)?);
                Ok(part.scale * in_turn(&weights, |head| cpu.logits(&x, head[0].weight())))
            }
            Self::Draw { rows, v } => {
                let logits = noise(rows, v);
                let from = vec![DrawFrom { seen: [&[], &[]], forbids: false, uniform: 0.5 }; rows];
                Ok(timed(|| {
                    let mut own = logits.clone();
                    drop(black_box(cpu.draw(&mut own, &Sampler::default(), &from)));
                }))
            }
            Self::Norm { rows, dim, back } => norm(rows, dim, back),
            Self::Rotate { rows, heads, dim, half } => {
                let width = heads * dim;
                let measured = rows.min((MEASURED_VALUES / width.max(1)).max(1));
                let table = RopeTable::from_angles(measured, half, |row, out| out.fill(row as f32));
                // A real pass computes this table once per stream, so it is not measured.
                let _ = table.waves();
                let mut x = noise(measured, width);
                Ok(rows as f64 / measured.max(1) as f64
                    * timed(|| cpu.rotate(&mut x, &table, [heads, dim], false)))
            }
            Self::Delta { rows, heads, back } => delta(rows, heads, back),
            Self::DeltaSteps { slots, each, heads } => delta_steps(slots, each, heads),
            Self::Swiglu { rows, width, back } => {
                let measured = rows.min((MEASURED_VALUES / width.max(1)).max(1));
                let (x, dy) = (noise(measured, 2 * width), noise(measured, width));
                Ok(rows as f64 / measured.max(1) as f64 * activation(x, &dy, Nonlinearity::SwiGlu, back))
            }
            Self::Activation { len, act, back } => {
                let measured = len.clamp(1, MEASURED_VALUES);
                let (x, dy) = (noise(1, measured), noise(1, measured));
                let secs = activation(x, &dy, Nonlinearity::Pointwise(act), back);
                Ok(len as f64 / measured as f64 * secs)
            }
            Self::Elementwise { len } => {
                let measured = len.clamp(1, MEASURED_VALUES);
                let (mut x, y) = (noise(1, measured), noise(1, measured));
                Ok(len as f64 / measured as f64 * timed(|| cpu.add(&mut x, &y)))
            }
            Self::AdamW { len, dtype, master, coded } => adamw(len, dtype, master, coded),
        }
    }
}

/// The measured part of a product.
struct Product {
    rows: usize,
    n: usize,
    form: Form,
    copies: usize,
    scale: f64,
}

impl Product {
    fn of(rows: usize, k: usize, n: usize, form: Form) -> Self {
        let (rows, k, n) = (rows.max(1), k.max(1), n.max(1));
        let measured_rows = rows.min(MEASURED_ROWS);
        let bytes_of = |n: usize| match form.dtype {
            ParamDtype::F32 => 4 * n * k,
            ParamDtype::Bf16 => 2 * n * k,
            ParamDtype::Quantised(_) => n * k,
        };
        let outputs = (MEASURED_FLOPS / (2 * measured_rows * k)).min(MEASURED_BYTES * n / bytes_of(n));
        let measured_n = n.min((outputs / 64 * 64).max(64));
        Self {
            rows: measured_rows,
            n: measured_n,
            form,
            copies: match rows <= FEW_ROWS {
                true => (MEASURED_BYTES / bytes_of(measured_n).max(1)).clamp(1, MOST_COPIES),
                false => 1,
            },
            scale: (rows as f64 / measured_rows as f64) * (n as f64 / measured_n as f64),
        }
    }

    fn weights(&self, k: usize, trained: bool) -> Result<Vec<Linear>> {
        let one = |_| {
            let shape = [self.n, k];
            let param = match self.form.dtype {
                ParamDtype::Quantised(bits) => {
                    let row = |i: usize, row: &mut [f32]| {
                        row.iter_mut().enumerate().for_each(|(j, x)| *x = value(i + j))
                    };
                    match QuantMatrix::from_rows(bits, self.n, k, row) {
                        Some(matrix) => Param::quantised("weight", Part::Llm, &shape, matrix)?,
                        None => {
                            Param::new("weight", Part::Llm, &shape, values(self.n * k, ParamDtype::Bf16))?
                        }
                    }
                }
                dtype => Param::new("weight", Part::Llm, &shape, values(self.n * k, dtype))?,
            };
            let param = param.with(self.form.arithmetic);
            param.set_trainable(trained);
            Linear::new(Arc::new(param), None)
        };
        // The operation reads and writes gradients, with four bytes per value.
        let copies = if trained { MEASURED_BYTES / (4 * self.n * k.max(1)) } else { self.copies };
        (0..copies.clamp(1, MOST_COPIES)).map(one).collect()
    }
}

fn linear_dw(part: &Product, k: usize) -> Result<f64> {
    let cpu = Device::Cpu.backend();
    let (x, dy, weights) = (noise(part.rows, k), noise(part.rows, part.n), part.weights(k, true)?);
    let accumulate = |layer: &[Linear]| {
        cpu.linear_dw(&x, &dy, 0, layer);
        cpu.zeros(0, 0, None)
    };
    // The first call allocates the gradients, so it is not measured.
    weights.iter().for_each(|layer| drop(accumulate(std::slice::from_ref(layer))));
    Ok(part.scale * in_turn(&weights, accumulate))
}

fn attention(queries: usize, all_keys: usize, heads: AttentionHeads, back: bool) -> f64 {
    let (cpu, keys) = (Device::Cpu.backend(), all_keys.min(MEASURED_KEYS));
    let each = 4 * heads.q_width() * keys.max(1);
    let measured = (MEASURED_FLOPS / 2 / each.max(1)).clamp(16, queries.max(16)).min(queries.max(1));
    let rows = measured.max(keys);
    let range = QueryRange { queries: 0..measured, keys: std::iter::once(0..keys).collect(), causal: false };
    let layout = Layout::new(AttentionLayout { ranges: vec![range] });
    let qkv = noise(rows, heads.packed_width());
    let scale = queries as f64 / measured.max(1) as f64 * (all_keys as f64 / keys.max(1) as f64);
    if !back {
        return scale * timed(|| drop(black_box(cpu.attention(&qkv, &layout, heads))));
    }
    let ((out, lse), dout) = (cpu.attention(&qkv, &layout, heads), noise(rows, heads.q_width()));
    scale * timed(|| drop(black_box(cpu.attention_back(&qkv, &out, &lse, &dout, &layout, heads))))
}

fn score(rows: usize, h: usize, v: usize, form: Form, back: Option<bool>) -> Result<f64> {
    let (cpu, part) = (Device::Cpu.backend(), Product::of(rows, h, v, form));
    let (x, weights) = (noise(part.rows, h), part.weights(h, back == Some(true))?);
    let targets = Targets {
        rows: (0..part.rows).collect(),
        offsets: (0..=part.rows).collect(),
        tokens: vec![0; part.rows],
    };
    let head = weights[0].weight();
    let scores = cpu.score(&x, head, &targets, 1.0, Top::NONE);
    if back.is_none() {
        return Ok(part.scale * timed(|| drop(black_box(cpu.score(&x, head, &targets, 1.0, Top::NONE)))));
    }
    let dlogp = vec![0.1; part.rows];
    Ok(part.scale * timed(|| drop(black_box(cpu.score_back(&x, head, &targets, &scores, &dlogp, None)))))
}

fn norm(rows: usize, dim: usize, back: bool) -> Result<f64> {
    let (cpu, measured) = (Device::Cpu.backend(), rows.min((MEASURED_VALUES / dim.max(1)).max(1)));
    let weight = Arc::new(Param::new("norm", Part::Llm, &[dim], Values::F32(vec![1.0; dim]))?);
    let norm = Norm::Rms { weight, eps: 1e-6 };
    let (x, dy) = (noise(measured, dim), noise(measured, dim));
    let scale = rows as f64 / measured.max(1) as f64;
    if !back {
        return Ok(scale * timed(|| drop(black_box(cpu.norm(&x, &norm)))));
    }
    let ((_, stats), mut dx) = (cpu.norm(&x, &norm), noise(measured, dim));
    Ok(scale * timed(|| cpu.norm_back(&mut dx, &x, &stats, &dy, &norm)))
}

fn delta(rows: usize, heads: DeltaHeads, back: bool) -> Result<f64> {
    let (cpu, measured) = (Device::Cpu.backend(), rows.min(MEASURED_ROWS));
    let (qkv, gates) = (noise(measured, heads.packed_width()), decays(measured, heads));
    let (segments, scale) = (Host::new(Segments::one(measured)), rows as f64 / measured.max(1) as f64);
    let (out, states) = cpu.delta(&qkv, &gates, &segments, heads)?;
    Ok(scale
        * timed(|| match back {
            false => drop(black_box(cpu.delta(&qkv, &gates, &segments, heads))),
            true => drop(black_box(cpu.delta_back(&qkv, &gates, &states, &out, &segments, heads))),
        }))
}

/// Measures states that together exceed the caches, as those of a model's layers do.
fn delta_steps(slots: usize, each: usize, heads: DeltaHeads) -> Result<f64> {
    let one = (slots * heads.state_len()).max(1);
    let mut states = vec![0.0; one * (MEASURED_BYTES / (4 * one)).clamp(1, 64)];
    let rows = slots * each;
    let (qkv, gates) = (noise(rows, heads.packed_width()), decays(rows, heads));
    let layers = states.len() / one;
    let secs = timed(|| {
        for layer in states.chunks_exact_mut(one) {
            let mut parts: Vec<Continued> = layer
                .chunks_exact_mut(heads.state_len().max(1))
                .enumerate()
                .map(|(i, state)| Continued { rows: i * each..(i + 1) * each, state })
                .collect();
            drop(black_box(steps(qkv.mat(), gates.mat(), &mut parts, heads.shape())));
        }
    });
    Ok(secs / layers as f64)
}

/// Returns gates with a weak decay.
fn decays(rows: usize, heads: DeltaHeads) -> Rows {
    let width = 2 * heads.value;
    let gate = |i: usize| if i % width < heads.value { -0.1 } else { 0.5 };
    Rows::on_cpu((0..rows * width).map(gate).collect(), rows, width)
}

fn adamw(len: usize, dtype: ParamDtype, master: bool, coded: bool) -> Result<f64> {
    let (cpu, measured) = (Device::Cpu.backend(), len.clamp(1, MEASURED_VALUES));
    let param = Param::new("weight", Part::Llm, &[measured], values(measured, dtype))?;
    let (grad, mut moments) = (noise(1, measured), Moments::default());
    let step = Step {
        lr: 1e-6,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.0,
        grad_scale: 1.0,
        master,
        random: !master,
        eight_bits: coded,
        offload: false,
    };
    let mut failed = None;
    let secs = timed(|| {
        moments.step += 1;
        black_box(cpu.sum_of_squares(&grad));
        failed = cpu.adamw(&param, &grad, &mut moments, &step).err();
    });
    failed.map_or(Ok(len as f64 / measured as f64 * secs), Err)
}

fn activation(mut x: Rows, dy: &Rows, act: Nonlinearity, back: bool) -> f64 {
    let cpu = Device::Cpu.backend();
    match back {
        false => timed(|| drop(black_box(cpu.activation(&x, act)))),
        true => timed(|| cpu.activation_back(&mut x, dy, act)),
    }
}

fn cached(
    cpu: &dyn Backend,
    groups: usize,
    slots: usize,
    prompt: usize,
    own: usize,
    heads: AttentionHeads,
) -> Result<f64> {
    let layer_bytes = 8 * heads.kv_width() * (prompt + slots * (own + 1)) * groups;
    let layers = (MEASURED_BYTES / layer_bytes.max(1)).clamp(1, MOST_COPIES);
    let mut caches = (0..groups)
        .map(|_| GroupCache::new(Device::Cpu, layers, heads, prompt, slots, own + 1))
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(|e| Error::shape("key-value cache", format!("cannot allocate the memory: {e}")))?;
    let of_prompt = noise(prompt, heads.packed_width());
    for cache in &mut caches {
        (0..layers).for_each(|layer| cpu.cache_prompt(cache, layer, &of_prompt, heads));
        cache.lengths.fill(own);
    }
    let qkv = noise(groups * slots, heads.packed_width());
    let rows = caches.iter_mut().map(|cache| DecodeRows { slots: (0..slots).collect(), cache });
    let mut batch = DecodeBatch::new(rows.collect());
    let mut turn = 0;
    Ok(timed(|| {
        turn += 1;
        drop(black_box(cpu.attend_cached(&qkv, turn % layers, &mut batch, heads, Turn::default())));
    }))
}

/// Returns the median seconds of `f`, which receives a different copy of the weight at each call. Results are kept until they
/// exceed the caches, as activations are in a real pass.
fn in_turn(weights: &[Linear], f: impl Fn(&[Linear]) -> Rows) -> f64 {
    let (mut turn, mut kept, mut bytes) = (0, VecDeque::new(), 0);
    timed(|| {
        turn += 1;
        let y = f(std::slice::from_ref(&weights[turn % weights.len()]));
        bytes += y.num_bytes();
        kept.push_back(y);
        while bytes > MEASURED_BYTES {
            bytes -= kept.pop_front().map_or(bytes, |y: Rows| y.num_bytes());
        }
    })
}

/// Returns the median seconds of `f`. A first call, which touches memory for the first time, is not measured.
fn timed(mut f: impl FnMut()) -> f64 {
    f();
    let (started, mut secs) = (Instant::now(), Vec::new());
    while secs.len() < 2 || started.elapsed() < REPEATED {
        let one = Instant::now();
        f();
        secs.push(one.elapsed().as_secs_f64());
    }
    secs.sort_by(f64::total_cmp);
    secs[(secs.len() - 1) / 2]
}

/// Returns a small value that varies with `at`.
fn value(at: usize) -> f32 {
    (at * 37 % 101) as f32 / 500.0 - 0.1
}

fn values(len: usize, dtype: ParamDtype) -> Values {
    match dtype {
        ParamDtype::F32 => Values::F32((0..len).map(value).collect()),
        _ => Values::Bf16((0..len).map(|at| bf16::from_f32(value(at))).collect()),
    }
}

fn noise(rows: usize, cols: usize) -> Rows {
    Rows::on_cpu((0..rows * cols).map(value).collect(), rows, cols)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn layer(n: usize, k: usize, trained: bool) -> Linear {
        let param = Param::outline("w", Part::Llm, &[n, k], ParamDtype::F32);
        param.set_trainable(trained);
        Linear::new(Arc::new(param), None).unwrap()
    }

    #[test]
    fn operations_are_listed_with_their_sizes_phases_and_repetitions() {
        let outline = Device::Outline.backend();
        let (frozen, trained) = (layer(8, 4, false), layer(8, 4, true));
        let x = Rows::zeros(Device::Outline, 3, 4);
        let ((), Work(calls)) = work(|| {
            outline.linear(&x, std::slice::from_ref(&frozen), Onto::Nothing, Order::Blocked);
            phase("backward", || {
                repeated(2.0, || {
                    let dy = Rows::zeros(Device::Outline, 3, 8);
                    for layer in [&frozen, &trained] {
                        outline.linear_dw(&x, &dy, 0, std::slice::from_ref(layer));
                    }
                });
            });
        });
        let form = ParamDtype::F32.into();
        let expected = [
            (("", Call::Linear { rows: 3, k: 4, n: 8, form, per_row: false }), 1.0),
            (("backward", Call::LinearDw { rows: 3, k: 4, n: 8, form }), 2.0),
        ];
        assert_eq!(calls, expected.into());
        // Outside `work`, nothing is listed.
        outline.linear(&x, std::slice::from_ref(&frozen), Onto::Nothing, Order::Blocked);
        assert_eq!(work(|| ()).1.distinct(), 0);
    }

    #[test]
    fn pairs_are_those_of_the_kernel() {
        let range = |queries, keys, causal| QueryRange { queries, keys: vec![keys], causal };
        assert_eq!(pairs(&range(0..4, 0..4, true)), 10);
        assert_eq!(pairs(&range(0..4, 0..4, false)), 16);
        // The range has two tokens of a completion after a prompt of three tokens.
        let after = QueryRange { queries: 3..5, keys: vec![0..3, 3..5], causal: true };
        assert_eq!(pairs(&after), 4 + 5);
    }

    #[test]
    fn a_product_of_twice_the_size_takes_about_twice_the_time() {
        let of =
            |rows, n| Call::Linear { rows, k: 64, n, form: ParamDtype::F32.into(), per_row: false }.rounded();
        // A size is rounded up, and the share accounts for the difference.
        let (call, share) = of(1000, 64);
        assert_eq!(call, of(1024, 64).0);
        assert!((share - 1000.0 / 1024.0).abs() < 1e-12);
        // The factor scales the measured part to the whole product.
        let (part, whole) = (
            Product::of(512, 4096, 512, ParamDtype::Bf16.into()),
            Product::of(1024, 4096, 4096, ParamDtype::Bf16.into()),
        );
        assert_eq!((part.rows, whole.rows), (512, 512));
        assert!((whole.scale * whole.n as f64 - 2.0 * 4096.0).abs() < 1e-9);
        let mut all = Work::default();
        for call in every_kind() {
            all.add(Work([(("", call), 1.0)].into()));
        }
        let once = all.seconds(&mut Rates::default()).unwrap()[""];
        assert!(once > 0.0 && once < 60.0);
    }

    /// Returns one operation of each kind. A kind that cannot be measured panics or fails here.
    fn every_kind() -> Vec<Call> {
        let heads = AttentionHeads { q: 4, kv: 2, dim: 16 };
        let of_delta = DeltaHeads { key: 1, value: 2, key_dim: 8, value_dim: 8 };
        let dtypes = [ParamDtype::F32, ParamDtype::Bf16, ParamDtype::Quantised(crate::QuantBits::Four)];
        let mut all = vec![
            Call::Attention { queries: 20, keys: 7, heads, back: false },
            Call::Attention { queries: 20, keys: 7, heads, back: true },
            Call::Cached { groups: 2, slots: 3, prompt: 5, own: 4, heads },
            Call::Draw { rows: 2, v: 100 },
            Call::Norm { rows: 3, dim: 64, back: false },
            Call::Norm { rows: 3, dim: 64, back: true },
            Call::Rotate { rows: 3, heads: 6, dim: 20, half: 8 },
            Call::Delta { rows: 70, heads: of_delta, back: false },
            Call::Delta { rows: 70, heads: of_delta, back: true },
            Call::DeltaSteps { slots: 2, each: 3, heads: of_delta },
            Call::Swiglu { rows: 3, width: 64, back: false },
            Call::Swiglu { rows: 3, width: 64, back: true },
            Call::Activation { len: 100, act: Activation::GeluTanh, back: false },
            Call::Activation { len: 100, act: Activation::GeluTanh, back: true },
            Call::Elementwise { len: 100 },
            Call::AdamW { len: 100, dtype: ParamDtype::F32, master: false, coded: false },
            Call::AdamW { len: 5000, dtype: ParamDtype::Bf16, master: false, coded: true },
            Call::AdamW { len: 100, dtype: ParamDtype::Bf16, master: true, coded: false },
        ];
        for form in dtypes.map(Form::from) {
            all.push(Call::Linear { rows: 3, k: 64, n: 64, form, per_row: true });
            all.push(Call::LinearDx { rows: 3, k: 64, n: 64, form });
            all.push(Call::Logits { rows: 3, h: 64, v: 100, form });
        }
        for form in [ParamDtype::F32, ParamDtype::Bf16].map(Form::from) {
            all.push(Call::LinearDw { rows: 3, k: 64, n: 64, form });
            for back in [None, Some(false), Some(true)] {
                all.push(Call::Score { rows: 3, h: 64, v: 100, form, back });
            }
        }
        all
    }
}
