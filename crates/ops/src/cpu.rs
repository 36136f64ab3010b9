//! The CPU backend: f32 in main memory, with the kernels of `omnigrpo-kernels`.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use memmap2::MmapMut;
use omnigrpo_kernels::activation;
use omnigrpo_kernels::attention::{self, AttentionLayout, Qkv, QueryRange};
use omnigrpo_kernels::dropout::{self, Mask};
use omnigrpo_kernels::linear::{self as product, Gradient, Layer};
use omnigrpo_kernels::sample::{self, Draw, DrawFrom, Sampler};
use omnigrpo_kernels::{
    Mat, MatMut, Stored, Weight, buffer, conv, embedding, experts as grouped, logprob, norm as norms, optim,
    parallel, profile, rope, scale,
};

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
use crate::moves;
use crate::norm::Norm;
use crate::optim::{Moments, Step};
use crate::param::{GradGuard, Param, ParamDtype, WeightGuard};
use crate::rope::RopeTable;
use crate::rows::{Data, Rows, Window};

pub(crate) struct Cpu;

/// Minimum number of groups per thread for which each thread computes the attention of complete groups.
const GROUPS_PER_THREAD: usize = 4;

/// Maximum number of values in the patches unfolded at a time (64 MiB of `f32`).
const UNFOLDED: usize = 1 << 24;

impl Rows {
    /// Returns the values of rows on the CPU.
    pub(crate) fn cpu(&self) -> &[f32] {
        match &self.data {
            Data::Cpu(data) => data,
            _ => &[],
        }
    }

    /// Returns the values for writing. Shared values are copied first.
    pub(crate) fn cpu_mut(&mut self) -> &mut [f32] {
        match &mut self.data {
            Data::Cpu(data) => {
                if Arc::get_mut(data).is_none() {
                    *data = Arc::new(buffer::copy(data));
                }
                Arc::make_mut(data).as_mut_slice()
            }
            _ => &mut [],
        }
    }

    /// Views rows on the CPU as the kernels' matrix.
    fn mat(&self) -> Mat<'_> {
        Mat::new(self.cpu(), self.rows(), self.cols())
    }

    /// Views rows on the CPU as the kernels' mutable matrix.
    fn mat_mut(&mut self) -> MatMut<'_> {
        let (rows, cols) = self.dims();
        MatMut::new(self.cpu_mut(), rows, cols)
    }
}

/// Runs `f` on layers, converted to the kernels' structures.
fn with_layers<R>(layers: &[Linear], f: impl FnOnce(&[Layer]) -> R) -> R {
    let guards: Vec<(WeightGuard, Option<WeightGuard>)> =
        layers.iter().map(|l| (l.weight().read(), l.bias().map(|bias| bias.read()))).collect();
    let biases: Vec<Option<Cow<[f32]>>> =
        guards.iter().map(|(_, bias)| bias.as_ref().map(WeightGuard::f32)).collect();
    let parts = layers.iter().zip(&guards).zip(&biases);
    let layers: Vec<Layer> =
        parts.map(|((l, (w, _)), bias)| Layer { w: w.weight(l.n(), l.k()), bias: bias.as_deref() }).collect();
    f(&layers)
}

/// Runs `f` on the matrices of all experts, stacked vertically.
fn with_experts<R>(layer: &ExpertLinear, f: impl FnOnce(Weight) -> R) -> R {
    f(layer.weight().read().weight(layer.experts() * layer.k(), layer.n()))
}

/// Runs `f` on a table with rows of width `h`.
fn with_table<R>(table: &Param, h: usize, f: impl FnOnce(Weight) -> R) -> R {
    f(table.read().weight(table.len() / h.max(1), h))
}

/// Runs `f` on the gradient of a weight if the weight is trained.
fn accumulate(param: &Param, f: impl FnOnce(&mut [f32])) {
    if let Some(mut gradient) = param.gradient(Device::Cpu) {
        f(gradient.cpu());
    }
}

/// Computes `w [n, k] += s · leftᵀ right`, where both factors have `rank` rows.
pub(crate) fn merge(w: &mut [f32], left: &[f32], right: &[f32], rank: usize, scale: f32) {
    let (n, k) = (left.len() / rank, right.len() / rank);
    let left: Vec<f32> = left.iter().map(|x| x * scale).collect();
    let dw = MatMut::new(w, n, k);
    let (left, right) = (Mat::new(&left, rank, n), Mat::new(right, rank, k));
    product::backward_weight(left, right, &mut [Gradient { dw, col: 0, bf16: false }]);
}

impl Backend for Cpu {
    fn zeros(&self, rows: usize, cols: usize, _: Option<&Rows>) -> Rows {
        Rows::on_cpu(buffer::zeros(rows * cols), rows, cols)
    }

    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows {
        Rows::on_cpu(data, rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        buffer::copy(x.cpu())
    }

    fn add(&self, to: &mut Rows, from: &Rows) {
        buffer::add(to.cpu_mut(), from.cpu());
    }

    fn scale(&self, x: &mut Rows, by: f32) {
        x.cpu_mut().iter_mut().for_each(|x| *x *= by);
    }

    fn part(&self, x: &Rows, of: Window, [rows, cols]: [usize; 2]) -> Rows {
        Rows::on_cpu(moves::part(x.cpu(), x.cols(), of, [rows, cols]), rows, cols)
    }

    fn set_part(&self, to: &mut Rows, at: Window, from: &Rows, of: Window, size: [usize; 2]) {
        let cols = to.cols();
        moves::set_part((to.cpu_mut(), cols, at), (from.cpu(), from.cols(), of), size);
    }

    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, order: Order) -> Rows {
        let (rows, width) = (x.rows(), layers.iter().map(Linear::n).sum());
        with_layers(layers, |layers| {
            let adds = !matches!(onto, Onto::Nothing);
            let (mut y, col) = match (onto, order) {
                (Onto::Nothing, Order::Blocked) => {
                    return Rows::on_cpu(product::forward(x.mat(), layers), rows, width);
                }
                (Onto::Nothing, Order::PerRow) => (self.zeros(rows, width, None), 0),
                (Onto::Residual(residual), _) => (residual.clone(), 0),
                (Onto::Columns(y, col), _) => (y, col),
            };
            forward(order)(x.mat(), layers, adds, y.mat_mut().columns(col..col + width));
            y
        })
    }

    fn linear_dx(&self, dx: Option<Rows>, dy: &Rows, col: usize, layers: &[Linear]) -> Rows {
        let (n, k): (usize, _) = (layers.iter().map(Linear::n).sum(), layers.first().map_or(0, Linear::k));
        let own = dy.mat().columns(col..col + n);
        with_layers(layers, |layers| match dx {
            None => Rows::on_cpu(product::backward_input(own, layers), dy.rows(), k),
            Some(mut dx) => {
                product::backward_input_into(own, layers, true, dx.mat_mut());
                dx
            }
        })
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]) {
        let mut buffers: Vec<Option<GradGuard>> =
            layers.iter().map(|l| l.weight().gradient(Device::Cpu)).collect();
        let mut gradients = Vec::with_capacity(buffers.len());
        let mut at = col;
        for (layer, buffer) in layers.iter().zip(&mut buffers) {
            if let Some(buffer) = buffer {
                let bf16 = layer.weight().dtype() == ParamDtype::Bf16;
                let dw = MatMut::new(buffer.cpu(), layer.n(), layer.k());
                gradients.push(Gradient { dw, col: at, bf16 });
            }
            at += layer.n();
        }
        product::backward_weight(dy.mat(), x.mat(), &mut gradients);
        drop(buffers);
        at = col;
        for layer in layers {
            let columns = at..at + layer.n();
            at = columns.end;
            if let Some(bias) = layer.bias() {
                accumulate(bias, |db| product::backward_bias(dy.mat().columns(columns), db));
            }
        }
    }

    fn dropout(&self, x: &Rows, mask: &Mask) -> Rows {
        Rows::on_cpu(dropout::forward(x.mat(), mask), x.rows(), x.cols())
    }

    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, _: Order) -> Rows {
        let y = with_experts(layer, |w| grouped::forward(x.mat(), w, routes.groups()));
        Rows::on_cpu(y, x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows {
        let dx = with_experts(layer, |w| grouped::backward_input(dy.mat(), w, routes.groups()));
        Rows::on_cpu(dx, dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes) {
        let bf16 = layer.weight().dtype() == ParamDtype::Bf16;
        accumulate(layer.weight(), |dw| {
            let dw = MatMut::new(dw, layer.experts() * layer.k(), layer.n());
            grouped::backward_weight(dy.mat(), x.mat(), routes.groups(), bf16, dw);
        });
    }

    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows {
        let y = match by {
            Weighing::Gate => conv::gate_forward(x.mat(), logits.mat()),
            Weighing::Blend => conv::blend_forward(alternatives(x, logits), logits.cpu()),
            Weighing::Experts(routes) => grouped::weigh_forward(x.mat(), logits.mat(), routes.choices()),
        };
        Rows::on_cpu(y, by.rows(x, logits), x.cols())
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, by: Weighing) -> [Rows; 2] {
        let (dx, dlogits) = match by {
            Weighing::Gate => conv::gate_backward(dy.mat(), x.mat(), logits.mat()),
            Weighing::Blend => conv::blend_backward(dy.cpu(), alternatives(x, logits), logits.cpu()),
            Weighing::Experts(routes) => {
                grouped::weigh_backward(dy.mat(), x.mat(), logits.mat(), routes.choices())
            }
        };
        [Rows::on_cpu(dx, x.rows(), x.cols()), Rows::on_cpu(dlogits, logits.rows(), logits.cols())]
    }

    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        let (rows, dim) = x.dims();
        let weight = norm.weight().read();
        let (count, (y, stats)) = match norm {
            Norm::Rms { eps, .. } => (1, norms::rms_forward(x.mat(), &weight.f32(), *eps)),
            Norm::Layer { bias, eps, .. } => {
                (2, norms::layer_forward(x.mat(), &weight.f32(), &bias.read().f32(), *eps))
            }
        };
        (Rows::on_cpu(y, rows, dim), Rows::on_cpu(stats, count, rows))
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm) {
        let (x, stats, dy, dx) = (x.mat(), stats.cpu(), dy.mat(), dx.mat_mut());
        match norm {
            Norm::Rms { weight, .. } => {
                let (guard, mut gradient) = (weight.read(), weight.gradient(Device::Cpu));
                let dw = gradient.as_mut().map(GradGuard::cpu);
                norms::rms_backward(dy, x, &guard.f32(), stats, dx, dw);
            }
            Norm::Layer { weight, bias, .. } => {
                let of = |param: &Param| param.trainable().then(|| vec![0.0; param.len()]);
                let (mut dw, mut db) = (of(weight), of(bias));
                let own = weight.read();
                norms::layer_backward(dy, x, &own.f32(), stats, dx, dw.as_deref_mut(), db.as_deref_mut());
                drop(own);
                for (param, grad) in [(weight, dw), (bias, db)] {
                    if let Some(grad) = grad {
                        accumulate(param, |sum| sum.iter_mut().zip(grad).for_each(|(s, g)| *s += g));
                    }
                }
            }
        }
    }

    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        let (rows, shape) = (qkv.rows(), heads.shape());
        let (out, lse) = attention::forward(Qkv::packed(qkv.mat(), shape), layout, shape, heads.scale());
        (Rows::on_cpu(out, rows, heads.q_width()), Rows::on_cpu(lse, rows, heads.q))
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
        let (shape, scale) = (heads.shape(), heads.scale());
        let parts = Qkv::packed(qkv.mat(), shape);
        let dqkv = attention::backward(dout.mat(), parts, out.mat(), lse.cpu(), layout, shape, scale);
        Rows::on_cpu(dqkv, qkv.rows(), qkv.cols())
    }

    fn cache(&self, layers: usize, _: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
        let bytes = rows * 2 * heads.kv_width() * size_of::<f32>();
        Ok(Store::Cpu((0..layers).map(|_| MmapMut::map_anon(bytes.max(1))).collect::<std::io::Result<_>>()?))
    }

    fn cache_prompt(&self, cache: &mut GroupCache, layer: usize, qkv: &Rows, heads: AttentionHeads) {
        if let Store::Cpu(layers) = &mut cache.store {
            copy_kv(floats_mut(&mut layers[layer]), 0, qkv.cpu(), heads);
        }
    }

    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
    ) -> (Rows, Rows) {
        let mut out = self.zeros(qkv.rows(), heads.q_width(), None);
        let groups = &mut batch.groups;
        let _span = profile::span(profile::Op::AttentionDecode, || {
            let (queries, head_bytes) = (qkv.rows(), 4 * heads.dim);
            let own = |group: &DecodeRows| {
                group.slots.iter().map(|&slot| group.cache.slot(slot).1 + 1).sum::<usize>()
            };
            let prompts = |group: &DecodeRows| group.cache.prompt_rows * group.slots.len();
            let pairs: usize = groups.iter().map(|group| own(group) + prompts(group)).sum();
            let keys: usize = groups.iter().map(|group| own(group) + group.cache.prompt_rows).sum();
            (4 * pairs * heads.q_width(), 2 * head_bytes * (queries * heads.q + keys * heads.kv))
        });
        let mut lse = self.zeros(qkv.rows(), heads.q, None);
        let (mut rest, mut rest_lse, mut row) = (out.cpu_mut(), lse.cpu_mut(), 0);
        let each: Vec<_> = groups
            .iter_mut()
            .map(|group| {
                let count = group.slots.len();
                let own = rest.split_off_mut(..count * heads.q_width()).unwrap_or_default();
                let lse = rest_lse.split_off_mut(..count * heads.q).unwrap_or_default();
                let packed = qkv.mat().row_range(row..row + count);
                row += count;
                (group, packed, MatMut::new(own, count, heads.q_width()), lse)
            })
            .collect();
        // If there are many groups, each thread processes complete groups, however small. If there are few, all threads share
        // each group.
        let work = if each.len() < GROUPS_PER_THREAD * parallel::threads() { 0 } else { usize::MAX };
        parallel::map(each, work, |(group, packed, out, lse)| {
            attend_group(group, layer, packed, heads, out, lse);
        });
        (out, lse)
    }

    fn attend_extended(
        &self,
        qkv: &Rows,
        layer: usize,
        cache: &mut GroupCache,
        slot: usize,
        heads: AttentionHeads,
    ) -> Option<(Rows, Rows)> {
        let (rows, prompt_rows) = (qkv.rows(), cache.prompt_rows);
        let (start, len) = cache.slot(slot);
        let Store::Cpu(layers) = &mut cache.store else { return None };
        let buffer = floats_mut(&mut layers[layer]);
        copy_kv(buffer, start + len, qkv.cpu(), heads);
        let keys = vec![0..prompt_rows, start..start + len + rows];
        let layout = AttentionLayout { ranges: vec![QueryRange { queries: 0..rows, keys, causal: true }] };
        let kv = heads.kv_width();
        let cached = Mat::new(buffer, buffer.len() / (2 * kv).max(1), 2 * kv);
        let q = qkv.mat().columns(0..heads.q_width());
        let qkv = Qkv { q, k: cached.columns(0..kv), v: cached.columns(kv..2 * kv) };
        let (out, lse) = attention::forward(qkv, &layout, heads.shape(), heads.scale());
        Some((Rows::on_cpu(out, rows, heads.q_width()), Rows::on_cpu(lse, rows, heads.q)))
    }

    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, inverse: bool) {
        let rows = x.rows();
        let [cos, sin] = table.waves().each_ref().map(|wave| Mat::new(wave, rows, table.half));
        rope::apply(cos, sin, inverse, x.mat_mut().columns(0..heads * 2 * table.half));
    }

    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows {
        let (y, cols) = match act {
            Nonlinearity::Pointwise(act) => (activation::forward(x.cpu(), act), x.cols()),
            Nonlinearity::SwiGlu => (activation::swiglu_forward(x.mat()), x.cols() / 2),
        };
        Rows::on_cpu(y, x.rows(), cols)
    }

    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Nonlinearity) {
        match act {
            Nonlinearity::Pointwise(act) => activation::backward(dy.cpu(), act, x.cpu_mut()),
            Nonlinearity::SwiGlu => activation::swiglu_backward(dy.mat(), x.mat_mut()),
        }
    }

    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        let y = scale::residual_forward(x.mat(), residual.mat(), &scale.read().f32());
        Rows::on_cpu(y, x.rows(), x.cols())
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let dx = scale::residual_backward_input(dy.mat(), &scale.read().f32());
        accumulate(scale, |dscale| scale::residual_backward_scale(dy.mat(), x.mat(), dscale));
        Rows::on_cpu(dx, x.rows(), x.cols())
    }

    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows {
        Rows::on_cpu(with_table(table, h, |table| embedding::gather(table, ids)), ids.len(), h)
    }

    fn add_rows(&self, x: &mut Rows, table: &Param, mix: &Mix) {
        with_table(table, x.cols(), |table| embedding::add_rows(table, mix, x.mat_mut()));
    }

    fn add_rows_back(&self, table: &Param, mix: &Mix, dy: &Rows) {
        accumulate(table, |dtable| embedding::add_rows_backward(dy.mat(), mix, dtable));
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        Rows::on_cpu(conv::mix_forward(x.mat(), mix), mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        let mut dx = self.zeros(rows, dy.cols(), None);
        conv::mix_backward(dy.mat(), mix, dx.mat_mut());
        dx
    }

    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let mut y = self.zeros(patches.rows(), layer.n(), None);
        with_layers(std::slice::from_ref(layer), |layers| {
            pieces(x, patches, |rows, unfolded, _| {
                product::forward_into(unfolded, layers, false, y.mat_mut().row_range(rows));
            });
        });
        y
    }

    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let mut dx = self.zeros(x.rows(), x.cols(), None);
        let (weight, taps) = (layer.weight(), patches.taps);
        pieces(x, patches, |rows, unfolded, sources| {
            let dy = dy.mat().row_range(rows.clone());
            let bf16 = weight.dtype() == ParamDtype::Bf16;
            accumulate(weight, |dw| {
                let dw = MatMut::new(dw, layer.n(), layer.k());
                product::backward_weight(dy, unfolded, &mut [Gradient { dw, col: 0, bf16 }]);
            });
            if let Some(bias) = layer.bias() {
                accumulate(bias, |db| product::backward_bias(dy, db));
            }
            let layers = std::slice::from_ref(layer);
            let dunfolded = with_layers(layers, |layers| product::backward_input(dy, layers));
            conv::fold(Mat::new(&dunfolded, rows.len(), layer.k()), sources, taps, dx.mat_mut());
        });
        dx
    }

    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        let y = conv::depthwise3(x.mat(), &weight.read().f32(), side, false);
        Rows::on_cpu(y, x.rows(), x.cols())
    }

    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        accumulate(weight, |dw| conv::depthwise3_weight(dy.mat(), x.mat(), side, dw));
        let dx = conv::depthwise3(dy.mat(), &weight.read().f32(), side, true);
        Rows::on_cpu(dx, x.rows(), x.cols())
    }

    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores {
        let logprob::Scores { logp, entropy, lse } = with_table(head, normed.cols(), |weight| {
            logprob::forward(normed.mat(), logprob::Head { weight, temperature }, targets.kernel())
        });
        let row = |data: Vec<f32>| {
            let cols = data.len();
            Rows::on_cpu(data, 1, cols)
        };
        Scores { logprobs: row(logp), entropies: row(entropy), lse: row(lse), temperature }
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
        let dnormed = with_table(head, normed.cols(), |weight| {
            let ((v, h), mut gradient) = (weight.dims(), head.gradient(Device::Cpu));
            logprob::backward(
                logprob::Gradient { logp: dlogp, entropy: dentropy },
                normed.mat(),
                logprob::Head { weight, temperature: scores.temperature },
                targets.kernel(),
                logprob::Statistics { entropy: scores.entropies.cpu(), lse: scores.lse.cpu() },
                gradient.as_mut().map(|gradient| MatMut::new(gradient.cpu(), v, h)),
            )
        });
        Rows::on_cpu(dnormed, normed.rows(), normed.cols())
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let logits = with_table(head, normed.cols(), |head| logprob::logits_rows(normed.mat(), head));
        Rows::on_cpu(logits, normed.rows(), head.len() / normed.cols().max(1))
    }

    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>> {
        let (work, vocab) = (logits.len(), logits.cols());
        let _span = profile::span(profile::Op::Sampler, || (0, 4 * work));
        let rows = logits.cpu_mut().chunks_mut(vocab.max(1)).zip(from);
        parallel::map(rows, work, |(logits, from)| sample::draw(logits, how, from))
    }

    fn sum_of_squares(&self, x: &Rows) -> f64 {
        optim::sum_of_squares(x.cpu())
    }

    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()> {
        param.adamw_range(0..param.len(), grad.cpu(), moments, step)
    }
}

/// Returns the kernel for an order: the blocked product, or the product whose rows are independent.
fn forward(order: Order) -> fn(Mat, &[Layer], bool, MatMut) {
    match order {
        Order::Blocked => product::forward_into,
        Order::PerRow => product::forward_rows_into,
    }
}

/// Views each alternative of a blend as one row.
fn alternatives<'a>(x: &'a Rows, logits: &Rows) -> Mat<'a> {
    Mat::new(x.cpu(), logits.cols(), x.len() / logits.cols())
}

/// Calls `f(rows, unfolded rows, their sources)` for each part of a convolution's output. The bounds of the parts depend only on
/// sizes.
fn pieces(x: &Rows, patches: &Patches, mut f: impl FnMut(Range<usize>, Mat, &[u32])) {
    let Patches { sources, taps } = patches;
    let width = x.cols() * taps;
    let step = (UNFOLDED / width.max(1)).max(1);
    for start in (0..patches.rows()).step_by(step) {
        let rows = start..patches.rows().min(start + step);
        let sources = &sources[rows.start * taps..rows.end * taps];
        let unfolded = conv::unfold(x.mat(), sources, *taps);
        f(rows.clone(), Mat::new(&unfolded, rows.len(), width), sources);
    }
}

/// Appends the keys and values of `packed` to the group's slots. Writes the attention of each query over the prompt and its slot.
fn attend_group(
    group: &mut DecodeRows,
    layer: usize,
    packed: Mat,
    heads: AttentionHeads,
    out: MatMut,
    lse: &mut [f32],
) {
    let cache = &mut *group.cache;
    let slots: Vec<(usize, usize)> = group.slots.iter().map(|&slot| cache.slot(slot)).collect();
    let prompt_rows = cache.prompt_rows;
    let Store::Cpu(layers) = &mut cache.store else { return };
    let buffer = floats_mut(&mut layers[layer]);
    let mut ranges = Vec::with_capacity(slots.len());
    for (i, &(start, len)) in slots.iter().enumerate() {
        copy_kv(buffer, start + len, packed.row(i), heads);
        let keys = vec![0..prompt_rows, start..start + len + 1];
        ranges.push(QueryRange { queries: i..i + 1, keys, causal: false });
    }
    let (q, kv) = (packed.columns(0..heads.q_width()), heads.kv_width());
    let cached = Mat::new(buffer, buffer.len() / (2 * kv).max(1), 2 * kv);
    let qkv = Qkv { q, k: cached.columns(0..kv), v: cached.columns(kv..2 * kv) };
    attention::forward_decode_into(qkv, &AttentionLayout { ranges }, heads.shape(), heads.scale(), out, lse);
}

fn floats_mut(map: &mut MmapMut) -> &mut [f32] {
    bytemuck::cast_slice_mut(&mut map[..])
}

fn copy_kv(buffer: &mut [f32], first_row: usize, packed: &[f32], heads: AttentionHeads) {
    let kv = 2 * heads.kv_width();
    for (row, from) in packed.chunks_exact(heads.packed_width()).enumerate() {
        let at = (first_row + row) * kv;
        buffer[at..at + kv].copy_from_slice(&from[heads.q_width()..]);
    }
}

/// Returns the values of a weight as f64, in row-major order.
pub(crate) fn wide(weight: Stored) -> Vec<f64> {
    match weight {
        Stored::F32(data) => data.iter().map(|&x| f64::from(x)).collect(),
        Stored::Bf16(data) => data.iter().map(|x| x.to_f64()).collect(),
        Stored::Quantised(data) => {
            let mut f32s = vec![0.0; data.len()];
            data.widen(&mut f32s);
            f32s.into_iter().map(f64::from).collect()
        }
    }
}
