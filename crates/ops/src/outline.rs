//! A device without values, which counts the memory that a pass would use.
//!
//! An outlined array has only a size. A complete step of an outlined model therefore runs in milliseconds, through the same code
//! as a real step. A [`Footprint`] reports the peak memory of the thread's rows. Values that are read back are zeros. The count
//! excludes the kernels' scratch memory of a few megabytes, except for the gradient of attention. With [`on_card`], values have
//! the dtypes that they have on a GPU, and its scratch memory counts too. [`crate::work`] lists the operations.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use omnigrpo_gpu::{Dtype, cached_scratch, few_rows_scratch, piece};
use omnigrpo_kernels::attention;
use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};

use crate::attention::{AttentionHeads, Layout};
use crate::cache::{GroupCache, Store};
use crate::conv::{Mix, Patches};
use crate::decode::DecodeBatch;
use crate::device::{Backend, Device, Weighing};
use crate::embedding::Tokens;
use crate::error::Result;
use crate::experts::{ExpertLinear, Routes};
use crate::gpu::heads_of;
use crate::head::{Scores, Targets};
use crate::linear::{Linear, Onto, Order};
use crate::mlp::Nonlinearity;
use crate::norm::Norm;
use crate::optim::{Moments, Step};
use crate::param::{Param, ParamDtype};
use crate::rope::RopeTable;
use crate::rows::{Data, Rows, Window};
use crate::work::{
    Call, note, note_activation, note_attention, note_cached, note_dw, note_dx, note_elements, note_experts,
    note_linear,
};
use omnigrpo_kernels::dropout::Mask;

pub(crate) struct Outline;

/// Purpose of rows in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Held {
    /// Values that a pass works on or keeps for its backward pass.
    #[default]
    Activations,
    /// Outputs of towers and projectors, and values remembered from towers.
    Features,
    /// Keys and values of completions in flight.
    Cache,
    /// Gradients of weights.
    Gradients,
    /// Arena of the recorded decoding steps of a GPU.
    Recorded,
}

/// Peak bytes of rows by purpose, at four bytes per value, or at two for values that a GPU stores in bf16. Caches use separate memory, so their peak is counted separately. For
/// the other purposes, these are the bytes at the moment when their sum was largest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint([u64; 5]);

impl Footprint {
    /// Returns the bytes used for a purpose.
    #[must_use]
    pub fn of(&self, held: Held) -> u64 {
        self.0[held as usize]
    }

    /// Returns the total bytes of all purposes except caches.
    #[must_use]
    pub fn passes(&self) -> u64 {
        self.0.iter().sum::<u64>() - self.of(Held::Cache)
    }

    /// Returns the footprint with the larger [`Self::passes`], combined with the larger cache peak of the two.
    fn most(self, other: Self) -> Self {
        let mut most = if other.passes() > self.passes() { other } else { self };
        most.0[Held::Cache as usize] = self.of(Held::Cache).max(other.of(Held::Cache));
        most
    }
}

#[derive(Default)]
struct Count {
    held: Held,
    /// Dtype of keys and values if the passes are those of a GPU.
    card: Option<Dtype>,
    /// Number of free blocks of each size in the arena, while work in an arena runs.
    arena: Option<HashMap<u64, u64>>,
    now: Footprint,
    most: Footprint,
}

thread_local! {
    static COUNT: RefCell<Count> = RefCell::default();
}

/// Runs `f`, which works on rows of [`Device::Outline`], and returns the peak memory of rows. Rows that existed before the call
/// are included.
pub fn footprint<R>(f: impl FnOnce() -> R) -> (R, Footprint) {
    let before = COUNT.with_borrow_mut(|count| std::mem::replace(&mut count.most, count.now));
    let result = f();
    let most = COUNT.with_borrow_mut(|count| {
        let most = count.most;
        count.most = most.most(before);
        most
    });
    (result, most)
}

/// Runs `f` and counts its rows of [`Device::Outline`] for the purpose `held`.
pub fn holding<R>(held: Held, f: impl FnOnce() -> R) -> R {
    let before = COUNT.with_borrow_mut(|count| std::mem::replace(&mut count.held, held));
    let result = f();
    COUNT.with_borrow_mut(|count| count.held = before);
    result
}

/// Runs `f` and counts its rows of [`Device::Outline`] as a GPU stores them. `bf16` states whether its caches hold bf16.
pub fn on_card<R>(bf16: bool, f: impl FnOnce() -> R) -> R {
    let cache = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
    let before = COUNT.with_borrow_mut(|count| count.card.replace(cache));
    let result = f();
    COUNT.with_borrow_mut(|count| count.card = before);
    result
}

/// Runs `f`, whose rows of [`Device::Outline`] are in an arena: a freed block serves only rows of the same size. The arena is
/// freed when `f` returns.
pub fn in_arena<R>(f: impl FnOnce() -> R) -> R {
    COUNT.with_borrow_mut(|count| count.arena = Some(HashMap::new()));
    let result = f();
    COUNT.with_borrow_mut(|count| {
        count.arena = None;
        count.now.0[Held::Recorded as usize] = 0;
    });
    result
}

/// Memory that is counted for as long as this value exists.
#[derive(Debug)]
pub(crate) struct Span {
    held: Held,
    bytes: u64,
    dtype: Dtype,
    in_arena: bool,
}

impl Span {
    fn new(elements: usize, dtype: Dtype) -> Self {
        let bytes = (dtype.size() * elements) as u64;
        COUNT.with_borrow_mut(|count| {
            let free = count.arena.as_mut().map(|arena| arena.entry(bytes).or_default());
            let (in_arena, held) = (free.is_some(), if free.is_some() { Held::Recorded } else { count.held });
            match free {
                Some(free) if *free > 0 => *free -= 1,
                _ => count.now.0[held as usize] += bytes,
            }
            count.most = count.most.most(count.now);
            Self { held, bytes, dtype, in_arena }
        })
    }

    fn like(&self) -> Self {
        holding(self.held, || Self::new(self.bytes as usize / self.dtype.size(), self.dtype))
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.bytes as usize
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // The count no longer exists if the thread is ending.
        let _ = COUNT.try_with(|count| {
            let mut count = count.borrow_mut();
            match &mut count.arena {
                Some(arena) if self.in_arena => *arena.entry(self.bytes).or_default() += 1,
                _ => {
                    let now = &mut count.now.0[self.held as usize];
                    *now = now.saturating_sub(self.bytes);
                }
            }
        });
    }
}

impl Rows {
    fn on_outline(dtype: Dtype, rows: usize, cols: usize) -> Self {
        Self::over(Data::Outline(Arc::new(Span::new(rows * cols, dtype))), rows, cols)
    }

    /// Counts a copy if the rows are shared, since a real device copies shared rows before it writes to them.
    fn touch(&mut self) {
        if let Data::Outline(span) = &mut self.data
            && Arc::get_mut(span).is_none()
        {
            *span = Arc::new(span.like());
        }
    }
}

fn same(x: &Rows) -> Rows {
    like(x, x.rows(), x.cols())
}

/// Returns rows of another shape in the dtype of `x`.
fn like(x: &Rows, rows: usize, cols: usize) -> Rows {
    Rows::on_outline(dtype(x), rows, cols)
}

fn in_f32(rows: usize, cols: usize) -> Rows {
    Rows::on_outline(Dtype::F32, rows, cols)
}

fn dtype(x: &Rows) -> Dtype {
    match &x.data {
        Data::Outline(span) => span.dtype,
        _ => Dtype::F32,
    }
}

/// Returns whether the passes are those of a GPU ([`on_card`]).
#[must_use]
pub fn is_on_card() -> bool {
    card().is_some()
}

/// Returns the dtype of caches if the passes are those of a GPU.
fn card() -> Option<Dtype> {
    COUNT.with_borrow(|count| count.card)
}

/// Returns the dtype of the factors in a product with a weight.
fn factor(weight: &Param) -> Dtype {
    match weight.dtype() {
        ParamDtype::Bf16 | ParamDtype::Quantised(_) if card().is_some() => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// Returns the dtype of products with weights: bf16 if all factors are.
fn product<'a>(x: &Rows, mut weights: impl Iterator<Item = &'a Arc<Param>>) -> Dtype {
    match dtype(x) == Dtype::Bf16 && weights.all(|weight| factor(weight) == Dtype::Bf16) {
        true => Dtype::Bf16,
        false => Dtype::F32,
    }
}

/// Counts the memory that a GPU needs during products: a copy of `x` in the dtype of the weights, and a widened weight.
fn factors(x: &Rows, layers: &[Linear]) -> [Option<Span>; 2] {
    let wanted = layers.first().map_or(Dtype::F32, |layer| factor(layer.weight()));
    let copy = card().is_some() && wanted != dtype(x);
    let codes = layers.iter().map(Linear::weight);
    let codes = codes.filter(|w| card().is_some() && matches!(w.dtype(), ParamDtype::Quantised(_)));
    let widest = codes.map(|weight| weight.len()).max();
    [copy.then(|| Span::new(x.len(), wanted)), widest.map(|len| Span::new(len, Dtype::Bf16))]
}

/// Counts the pieces of logits of a GPU, and a copy of the normalised rows. The gradient has its own logits and sums.
fn pieces(normed: &Rows, head: &Param, back: bool) -> Vec<Span> {
    if card().is_none() {
        return Vec::new();
    }
    let (rows, h, factor) = (normed.rows(), normed.cols(), factor(head));
    let [piece, logits] = piece(rows, head.len() / h.max(1));
    let copy = (factor != dtype(normed)).then(|| Span::new(rows * h, factor));
    let own = [Span::new(piece * h, factor), Span::new(logits, Dtype::F32)];
    let of_back = back.then(|| [Span::new(piece * h, Dtype::F32), Span::new(logits, factor)]);
    copy.into_iter().chain(own).chain(of_back.into_iter().flatten()).collect()
}

/// Counts a gradient of the weight if the weight is trained.
fn reach(param: &Param) {
    param.reach(Device::Outline);
}

fn reach_layers(layers: &[Linear]) {
    for layer in layers {
        reach(layer.weight());
        layer.bias().into_iter().for_each(|bias| reach(bias));
    }
}

/// Lists the scoring of rows by the head. `back` is `None` for the forward pass; for the backward pass, it is true if the head is
/// trained.
fn note_score(normed: &Rows, head: &Param, back: Option<bool>) {
    let (rows, h, dtype) = (normed.rows(), normed.cols(), head.dtype());
    note(|| Call::Score { rows, h, v: head.len() / h.max(1), dtype, back });
}

/// Elementwise operations per output of a 3×3 convolution of one channel.
const DEPTHWISE: usize = 9;

impl Backend for Outline {
    fn zeros(&self, rows: usize, cols: usize, like: Option<&Rows>) -> Rows {
        Rows::on_outline(like.map_or(Dtype::F32, dtype), rows, cols)
    }

    fn upload(&self, _: Vec<f32>, rows: usize, cols: usize) -> Rows {
        in_f32(rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        vec![0.0; x.len()]
    }

    fn add(&self, to: &mut Rows, _: &Rows) {
        note_elements(to.len());
        to.touch();
    }

    fn scale(&self, x: &mut Rows, _: f32) {
        note_elements(x.len());
        x.touch();
    }

    fn part(&self, x: &Rows, _: Window, [rows, cols]: [usize; 2]) -> Rows {
        note_elements(rows * cols);
        like(x, rows, cols)
    }

    fn set_part(&self, to: &mut Rows, at: Window, _: &Rows, _: Window, [rows, cols]: [usize; 2]) {
        // The target of listed rows is zeroed first.
        note_elements(at.index.map_or(rows * cols, |_| to.len()));
        to.touch();
    }

    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows {
        note_linear(x.rows(), layers, order);
        let out = match onto {
            Onto::Nothing => product(x, layers.iter().map(Linear::weight)),
            Onto::Residual(residual) => dtype(residual),
            Onto::Columns(mut y, _) => {
                y.touch();
                return y;
            }
        };
        let n = layers.iter().map(Linear::n).sum();
        let y = Rows::on_outline(out, x.rows(), n);
        let k = layers.first().map_or(0, Linear::k);
        // The kernels for few rows read codes, and may divide their sums.
        match order == Order::PerRow && card().is_some() {
            true => drop(Span::new(few_rows_scratch(x.rows(), n, k), Dtype::F32)),
            false => drop(factors(x, layers)),
        }
        y
    }

    fn linear_dx(&self, dx: Option<Rows>, dy: &Rows, _: usize, layers: &[Linear]) -> Rows {
        note_dx(dy.rows(), layers);
        let mut dx = dx.unwrap_or_else(|| {
            // A GPU sums the products of several layers in f32.
            let sum =
                if layers.len() > 1 { Dtype::F32 } else { product(dy, layers.iter().map(Linear::weight)) };
            Rows::on_outline(sum, dy.rows(), layers.first().map_or(0, Linear::k))
        });
        dx.touch();
        drop(factors(dy, layers));
        dx
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, _: usize, layers: &[Linear]) {
        note_dw(x.rows(), layers);
        drop([x, dy].map(|rows| {
            let wanted = layers.first().map_or(Dtype::F32, |layer| factor(layer.weight()));
            (card().is_some() && wanted != dtype(rows)).then(|| Span::new(rows.len(), wanted))
        }));
        reach_layers(layers);
    }

    fn dropout(&self, x: &Rows, _: &Mask) -> Rows {
        note_elements(x.len());
        same(x)
    }

    fn experts(&self, x: &Rows, layer: &ExpertLinear, _: &Routes, order: Order) -> Rows {
        let (k, n, dtype, per_row) = (layer.k(), layer.n(), layer.weight().dtype(), order == Order::PerRow);
        note_experts(x.rows(), layer.experts(), |rows| Call::Linear { rows, k, n, dtype, per_row });
        Rows::on_outline(product(x, [layer.weight()].into_iter()), x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, _: &Routes) -> Rows {
        let (k, n, dtype) = (layer.k(), layer.n(), layer.weight().dtype());
        note_experts(dy.rows(), layer.experts(), |rows| Call::LinearDx { rows, k, n, dtype });
        Rows::on_outline(product(dy, [layer.weight()].into_iter()), dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, _: &Rows, layer: &ExpertLinear, _: &Routes) {
        let (k, n, dtype) = (layer.k(), layer.n(), layer.weight().dtype());
        if layer.weight().trainable() {
            note_experts(x.rows(), layer.experts(), |rows| Call::LinearDw { rows, k, n, dtype });
        }
        reach(layer.weight());
    }

    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows {
        note_elements(x.len());
        like(x, by.rows(x, logits), x.cols())
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, _: &Rows, _: Weighing) -> [Rows; 2] {
        note_elements(x.len());
        [same(x), same(logits)]
    }

    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        note(|| Call::Norm { rows: x.rows(), dim: x.cols(), back: false });
        let statistics = if matches!(norm, Norm::Rms { .. }) { 1 } else { 2 };
        (Rows::on_outline(factor(norm.weight()), x.rows(), x.cols()), in_f32(statistics, x.rows()))
    }

    fn norm_back(&self, dx: &mut Rows, _: &Rows, _: &Rows, _: &Rows, norm: &Norm) {
        note(|| Call::Norm { rows: dx.rows(), dim: dx.cols(), back: true });
        dx.touch();
        reach(norm.weight());
        if let Norm::Layer { bias, .. } = norm {
            reach(bias);
        }
    }

    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        note_attention(qkv.rows(), layout, heads, false);
        (like(qkv, qkv.rows(), heads.q_width()), in_f32(qkv.rows(), heads.q))
    }

    fn attention_back(
        &self,
        qkv: &Rows,
        _: &Rows,
        _: &Rows,
        dout: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows {
        note_attention(qkv.rows(), layout, heads, true);
        let dqkv = same(qkv);
        let q = heads.q_width();
        let partial = match card() {
            None => attention::backward_space(layout, heads.shape()),
            // Query heads that share a key head write their parts of its gradient.
            Some(_) => qkv.rows() * (heads.q + if heads.q == heads.kv { 0 } else { 2 * q }),
        };
        let _partial = Span::new(partial, Dtype::F32);
        // Tensor cores read both gradients in bf16.
        let _dout = (dtype(qkv) != dtype(dout)).then(|| Span::new(dout.len(), dtype(qkv)));
        dqkv
    }

    fn cache(&self, layers: usize, _: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
        let elements = layers * rows * 2 * heads.kv_width();
        let span = || Span::new(elements, card().unwrap_or(Dtype::F32));
        Ok(Store::Outline(holding(Held::Cache, span)))
    }

    fn cache_prompt(&self, _: &mut GroupCache, _: usize, _: &Rows, _: AttentionHeads) {}

    fn attend_cached(
        &self,
        qkv: &Rows,
        _: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
    ) -> (Rows, Rows) {
        note_cached(batch, heads);
        if card().is_some() {
            let prompt = batch.groups.iter().map(|group| group.cache.prompt_rows).max().unwrap_or(0);
            let own = batch.groups.iter().map(|group| group.cache.slot_rows).max().unwrap_or(0);
            drop(Span::new(cached_scratch(qkv.rows(), [prompt, own], heads_of(heads)), Dtype::F32));
        }
        (like(qkv, qkv.rows(), heads.q_width()), in_f32(qkv.rows(), heads.q))
    }

    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, _: bool) {
        note(|| Call::Rotate { rows: x.rows(), heads, half: table.half });
        x.touch();
    }

    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows {
        note_activation(x, act, false);
        like(x, x.rows(), if let Nonlinearity::SwiGlu = act { x.cols() / 2 } else { x.cols() })
    }

    fn activation_back(&self, x: &mut Rows, _: &Rows, act: Nonlinearity) {
        note_activation(x, act, true);
        x.touch();
    }

    fn scale_onto(&self, x: &Rows, residual: &Rows, _: &Param) -> Rows {
        note_elements(x.len());
        same(residual)
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        note_elements(x.len());
        reach(scale);
        same(dy)
    }

    fn embed(&self, _: &Param, ids: &Tokens, h: usize) -> Rows {
        note_elements(ids.len() * h);
        in_f32(ids.len(), h)
    }

    fn add_rows(&self, x: &mut Rows, _: &Param, _: &Mix) {
        note_elements(x.len());
        x.touch();
    }

    fn add_rows_back(&self, table: &Param, _: &Mix, dy: &Rows) {
        note_elements(dy.len());
        reach(table);
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        note_elements(mix.rows.len() * x.cols());
        like(x, mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        note_elements(mix.rows.len() * dy.cols());
        like(dy, rows, dy.cols())
    }

    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        note_elements(patches.rows() * layer.k());
        note_linear(patches.rows(), std::slice::from_ref(layer), Order::Blocked);
        Rows::on_outline(product(x, [layer.weight()].into_iter()), patches.rows(), layer.n())
    }

    fn convolution_back(&self, x: &Rows, _: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let layers = std::slice::from_ref(layer);
        // The input is unfolded, and its gradient is folded.
        note_elements(2 * patches.rows() * layer.k());
        note_dx(patches.rows(), layers);
        note_dw(patches.rows(), layers);
        reach_layers(std::slice::from_ref(layer));
        same(x)
    }

    fn depthwise(&self, x: &Rows, _: &Param, _: [usize; 2]) -> Rows {
        note_elements(DEPTHWISE * x.len());
        same(x)
    }

    fn depthwise_back(&self, x: &Rows, _: &Rows, weight: &Param, _: [usize; 2]) -> Rows {
        note_elements(2 * DEPTHWISE * x.len());
        reach(weight);
        same(x)
    }

    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores {
        note_score(normed, head, None);
        drop(pieces(normed, head, false));
        let row = |cols| in_f32(1, cols);
        let (logprobs, rows) = (row(targets.tokens.len()), normed.rows());
        Scores { logprobs, entropies: row(rows), lse: row(rows), temperature }
    }

    fn score_back(
        &self,
        normed: &Rows,
        head: &Param,
        _: &Targets,
        _: &Scores,
        _: &[f32],
        _: Option<&[f32]>,
    ) -> Rows {
        note_score(normed, head, Some(head.trainable()));
        reach(head);
        drop(pieces(normed, head, true));
        in_f32(normed.rows(), normed.cols())
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (rows, h, dtype) = (normed.rows(), normed.cols(), head.dtype());
        note(|| Call::Logits { rows, h, v: head.len() / h.max(1), dtype });
        in_f32(normed.rows(), head.len() / normed.cols().max(1))
    }

    fn draw(&self, logits: &mut Rows, _: &Sampler, _: &[DrawFrom]) -> Vec<Option<Draw>> {
        note(|| Call::Draw { rows: logits.rows(), v: logits.cols() });
        vec![None; logits.rows()]
    }

    fn sum_of_squares(&self, _: &Rows) -> f64 {
        0.0
    }

    fn adamw(&self, param: &Param, _: &Rows, _: &mut Moments, step: &Step) -> Result<()> {
        note(|| Call::AdamW { len: param.len(), dtype: param.dtype(), master: step.master });
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::linear::PackedLinear;
    use crate::pass::Pass;
    use crate::{Device, Part};

    /// The norm with a bf16 weight reads f32 rows and begins the bf16 part of a block, which ends with the residual stream.
    #[test]
    fn a_card_stores_what_follows_a_norm_in_bf16() {
        let weight = |shape: &[usize]| Arc::new(Param::outline("w", Part::Llm, shape, ParamDtype::Bf16));
        let layer = Linear::new(weight(&[6, 8]), None).unwrap();
        let norm = Norm::Rms { weight: weight(&[8]), eps: 1e-6 };
        let run = || {
            let linear = PackedLinear::new(&[&layer], &Pass { device: Device::Outline, ..Pass::default() });
            let x = Rows::zeros(Device::Outline, 4, 8);
            let normed = norm.forward(&x).unwrap().0;
            let (y, of_stream) = (linear.forward(&normed).unwrap(), linear.forward(&x).unwrap());
            let onto = linear.forward_onto(&of_stream, &normed).unwrap();
            [&x, &normed, &y, &of_stream, &onto].map(Rows::num_bytes)
        };
        assert_eq!(run(), [128, 128, 96, 96, 96]);
        assert_eq!(on_card(true, run), [128, 64, 48, 96, 96]);
        assert!(!is_on_card());
    }

    #[test]
    fn an_arena_keeps_a_block_for_each_size() {
        let rows = |n| Rows::zeros(Device::Outline, 1, n);
        let (_, seen) = footprint(|| {
            let outside = rows(100);
            in_arena(|| {
                drop(rows(2));
                let again = rows(2);
                drop((rows(2), rows(5), again));
                drop(rows(5));
            });
            drop(outside);
            // The arena has been freed.
            drop(rows(101));
        });
        assert_eq!((seen.of(Held::Recorded), seen.of(Held::Activations)), (8 + 8 + 20, 400));
    }
}
