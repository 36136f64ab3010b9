//! A device without values, which counts the memory that a pass would use.
//!
//! An outlined array has only a size. A complete step of an outlined model therefore runs in milliseconds, through the same code
//! as a real step. A [`Footprint`] reports the peak memory of the thread's rows. Values that are read back are zeros. The count
//! excludes the kernels' scratch memory of a few megabytes, except for the gradient of attention. [`crate::work`] lists the
//! operations.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use omnigrpo_kernels::activation::Activation;
use omnigrpo_kernels::attention;
use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};

use crate::attention::{AttentionHeads, Layout};
use crate::cache::{GroupCache, Store};
use crate::conv::{Mix, Patches};
use crate::decode::DecodeBatch;
use crate::device::{Backend, Device};
use crate::embedding::{Ids, Taps, Tokens};
use crate::error::Result;
use crate::experts::{ExpertLinear, Routes};
use crate::head::{Scores, Targets};
use crate::linear::{Linear, Order};
use crate::norm::Norm;
use crate::optim::{Moments, Step};
use crate::param::Param;
use crate::rope::RopeTable;
use crate::rows::{Data, Index, Rows};
use crate::work::{
    Call, note, note_attention, note_cached, note_dw, note_dx, note_elements, note_experts, note_linear,
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
}

/// Peak bytes of rows by purpose, at four bytes per value. Caches use separate memory, so their peak is counted separately. For
/// the other purposes, these are the bytes at the moment when their sum was largest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint([u64; 4]);

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

/// Memory that is counted for as long as this value exists.
#[derive(Debug)]
pub(crate) struct Span {
    held: Held,
    bytes: u64,
}

impl Span {
    pub(crate) fn new(elements: usize) -> Self {
        let bytes = 4 * elements as u64;
        COUNT.with_borrow_mut(|count| {
            count.now.0[count.held as usize] += bytes;
            count.most = count.most.most(count.now);
            Self { held: count.held, bytes }
        })
    }

    fn like(&self) -> Self {
        holding(self.held, || Self::new((self.bytes / 4) as usize))
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.bytes as usize
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // The count no longer exists if the thread is ending.
        let _ = COUNT.try_with(|count| {
            let now = &mut count.borrow_mut().now.0[self.held as usize];
            *now = now.saturating_sub(self.bytes);
        });
    }
}

impl Rows {
    pub(crate) fn on_outline(rows: usize, cols: usize) -> Self {
        Self::over(Data::Outline(Arc::new(Span::new(rows * cols))), rows, cols)
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
    Rows::on_outline(x.rows(), x.cols())
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
    fn zeros(&self, rows: usize, cols: usize) -> Rows {
        Rows::on_outline(rows, cols)
    }

    fn upload(&self, _: Vec<f32>, rows: usize, cols: usize) -> Rows {
        Rows::on_outline(rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        vec![0.0; x.len()]
    }

    fn download_f64(&self, x: &Rows) -> Vec<f64> {
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

    fn select(&self, x: &Rows, index: &Index) -> Rows {
        note_elements(index.len() * x.cols());
        Rows::on_outline(index.len(), x.cols())
    }

    fn spread(&self, x: &Rows, _: &Index, rows: usize) -> Rows {
        note_elements(rows * x.cols());
        Rows::on_outline(rows, x.cols())
    }

    fn columns(&self, x: &Rows, columns: Range<usize>) -> Rows {
        note_elements(x.rows() * columns.len());
        Rows::on_outline(x.rows(), columns.len())
    }

    fn set_columns(&self, to: &mut Rows, _: usize, from: &Rows) {
        note_elements(from.len());
        to.touch();
    }

    fn set_rows(&self, to: &mut Rows, _: usize, from: &Rows, range: Range<usize>) {
        note_elements(range.len() * from.cols());
        to.touch();
    }

    fn clear_rows(&self, x: &mut Rows, _: Range<usize>) {
        x.touch();
    }

    fn linear(&self, x: &Rows, layers: &[Linear], _: Option<&Rows>, order: Order) -> Rows {
        note_linear(x.rows(), layers, order);
        Rows::on_outline(x.rows(), layers.iter().map(Linear::n).sum())
    }

    fn linear_add(&self, y: &mut Rows, _: usize, x: &Rows, weight: &Linear, order: Order) {
        note_linear(x.rows(), std::slice::from_ref(weight), order);
        y.touch();
    }

    fn linear_dx(&self, dy: &Rows, layers: &[Linear]) -> Rows {
        note_dx(dy.rows(), layers);
        Rows::on_outline(dy.rows(), layers.first().map_or(0, Linear::k))
    }

    fn linear_dx_of(&self, dx: Option<Rows>, dy: &Rows, _: usize, weight: &Linear) -> Rows {
        note_dx(dy.rows(), std::slice::from_ref(weight));
        let mut dx = dx.unwrap_or_else(|| Rows::on_outline(dy.rows(), weight.k()));
        dx.touch();
        dx
    }

    fn linear_dw(&self, x: &Rows, _: &Rows, _: usize, layers: &[Linear]) {
        note_dw(x.rows(), layers);
        reach_layers(layers);
    }

    fn dropout(&self, x: &Rows, _: &Mask) -> Rows {
        note_elements(x.len());
        same(x)
    }

    fn experts(&self, x: &Rows, layer: &ExpertLinear, _: &Routes, order: Order) -> Rows {
        let (k, n, dtype, per_row) = (layer.k(), layer.n(), layer.weight().dtype(), order == Order::PerRow);
        note_experts(x.rows(), layer.experts(), |rows| Call::Linear { rows, k, n, dtype, per_row });
        Rows::on_outline(x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, _: &Routes) -> Rows {
        let (k, n, dtype) = (layer.k(), layer.n(), layer.weight().dtype());
        note_experts(dy.rows(), layer.experts(), |rows| Call::LinearDx { rows, k, n, dtype });
        Rows::on_outline(dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, _: &Rows, layer: &ExpertLinear, _: &Routes) {
        let (k, n, dtype) = (layer.k(), layer.n(), layer.weight().dtype());
        if layer.weight().trainable() {
            note_experts(x.rows(), layer.experts(), |rows| Call::LinearDw { rows, k, n, dtype });
        }
        reach(layer.weight());
    }

    fn weigh(&self, x: &Rows, _: &Rows, _: &Routes) -> Rows {
        note_elements(x.len());
        same(x)
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, _: &Rows, _: &Routes) -> [Rows; 2] {
        note_elements(x.len());
        [same(x), same(logits)]
    }

    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        note(|| Call::Norm { rows: x.rows(), dim: x.cols(), back: false });
        let statistics = if matches!(norm, Norm::Rms { .. }) { 1 } else { 2 };
        (same(x), Rows::on_outline(statistics, x.rows()))
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
        (Rows::on_outline(qkv.rows(), heads.q_width()), Rows::on_outline(qkv.rows(), heads.q))
    }

    fn attention_back(
        &self,
        qkv: &Rows,
        _: &Rows,
        _: &Rows,
        _: &Rows,
        layout: &Layout,
        heads: AttentionHeads,
    ) -> Rows {
        note_attention(qkv.rows(), layout, heads, true);
        let dqkv = same(qkv);
        let _partial = Span::new(attention::backward_space(layout, heads.shape()));
        dqkv
    }

    fn cache(&self, layers: usize, _: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
        let elements = layers * rows * 2 * heads.kv_width();
        Ok(Store::Outline(holding(Held::Cache, || Span::new(elements))))
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
        (Rows::on_outline(qkv.rows(), heads.q_width()), Rows::on_outline(qkv.rows(), heads.q))
    }

    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, _: bool) {
        note(|| Call::Rotate { rows: x.rows(), heads, half: table.half });
        x.touch();
    }

    fn activation(&self, x: &Rows, act: Activation) -> Rows {
        note(|| Call::Activation { len: x.len(), act, back: false });
        same(x)
    }

    fn activation_back(&self, x: &mut Rows, _: &Rows, act: Activation) {
        note(|| Call::Activation { len: x.len(), act, back: true });
        x.touch();
    }

    fn swiglu(&self, gate_up: &Rows) -> Rows {
        note(|| Call::Swiglu { rows: gate_up.rows(), width: gate_up.cols() / 2, back: false });
        Rows::on_outline(gate_up.rows(), gate_up.cols() / 2)
    }

    fn swiglu_back(&self, gate_up: &mut Rows, _: &Rows) {
        note(|| Call::Swiglu { rows: gate_up.rows(), width: gate_up.cols() / 2, back: true });
        gate_up.touch();
    }

    fn scale_onto(&self, x: &Rows, _: &Rows, _: &Param) -> Rows {
        note_elements(x.len());
        same(x)
    }

    fn scale_onto_back(&self, x: &Rows, _: &Rows, scale: &Param) -> Rows {
        note_elements(x.len());
        reach(scale);
        same(x)
    }

    fn embed(&self, _: &Param, ids: &Tokens, h: usize) -> Rows {
        note_elements(ids.len() * h);
        Rows::on_outline(ids.len(), h)
    }

    fn embed_back(&self, table: &Param, _: &[u32], dy: &Rows) {
        note_elements(dy.len());
        reach(table);
    }

    fn add_rows(&self, x: &mut Rows, _: &Param, _: &Ids) {
        note_elements(x.len());
        x.touch();
    }

    fn add_rows_back(&self, table: &Param, _: &Ids, dy: &Rows) {
        note_elements(dy.len());
        reach(table);
    }

    fn add_mixed(&self, x: &mut Rows, _: &Param, _: &Taps) {
        note_elements(x.len());
        x.touch();
    }

    fn add_mixed_back(&self, table: &Param, _: &Taps, dy: &Rows) {
        note_elements(dy.len());
        reach(table);
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        note_elements(mix.rows.len() * x.cols());
        Rows::on_outline(mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        note_elements(mix.rows.len() * dy.cols());
        Rows::on_outline(rows, dy.cols())
    }

    fn convolution(&self, _: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        note_elements(patches.rows() * layer.k());
        note_linear(patches.rows(), std::slice::from_ref(layer), Order::Blocked);
        Rows::on_outline(patches.rows(), layer.n())
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

    fn gate(&self, x: &Rows, _: &Rows) -> Rows {
        note_elements(x.len());
        same(x)
    }

    fn gate_back(&self, x: &Rows, gate: &Rows, _: &Rows) -> [Rows; 2] {
        note_elements(x.len());
        [same(x), same(gate)]
    }

    fn blend(&self, x: &Rows, logits: &Rows) -> Rows {
        note_elements(x.len());
        Rows::on_outline(x.rows() / logits.cols(), x.cols())
    }

    fn blend_back(&self, x: &Rows, logits: &Rows, _: &Rows) -> [Rows; 2] {
        note_elements(x.len());
        [same(x), same(logits)]
    }

    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores {
        note_score(normed, head, None);
        let row = |cols| Rows::on_outline(1, cols);
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
        same(normed)
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (rows, h, dtype) = (normed.rows(), normed.cols(), head.dtype());
        note(|| Call::Logits { rows, h, v: head.len() / h.max(1), dtype });
        Rows::on_outline(normed.rows(), head.len() / normed.cols().max(1))
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
