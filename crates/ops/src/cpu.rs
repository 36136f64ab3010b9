//! The CPU: f32 in main memory, kernels of `omnigrpo-kernels`.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use memmap2::MmapMut;
use omnigrpo_kernels::activation::{self, Activation};
use omnigrpo_kernels::attention::{self, AttentionLayout, QueryRange, View};
use omnigrpo_kernels::linear::{self as product, Gradient, Layer};
use omnigrpo_kernels::{Weight, buffer, conv, embedding, logprob, norm as norms, optim, rope, scale};

use crate::adapter::Mask;
use crate::attention::{AttentionHeads, DecodeRows, Layout};
use crate::cache::{GroupCache, Store};
use crate::conv::{Mix, Patches};
use crate::device::{Backend, Device};
use crate::embedding::{Ids, Taps};
use crate::error::Result;
use crate::head::{Scores, Targets};
use crate::linear::{Linear, Order};
use crate::moves;
use crate::norm::Norm;
use crate::optim::{Moments, Step};
use crate::param::{GradGuard, Param, ParamDtype, Values, WeightGuard};
use crate::rope::RopeTable;
use crate::rows::{Data, Index, Rows};

pub(crate) struct Cpu;

/// Elements of unfolded patches that exist at a time (64 MiB of `f32`).
const UNFOLDED: usize = 1 << 24;

impl Rows {
    /// The numbers of rows on the CPU.
    pub(crate) fn cpu(&self) -> &[f32] {
        match &self.data {
            Data::Cpu(data) => data,
            _ => &[],
        }
    }

    /// The same for writing; shared numbers are copied first.
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
}

/// Weights and biases of layers, for the kernels to read.
struct Reading<'a> {
    layers: Vec<(WeightGuard<'a>, Option<WeightGuard<'a>>, usize)>,
}

impl<'a> Reading<'a> {
    fn new(layers: &'a [Linear]) -> Self {
        let read = |l: &'a Linear| (l.weight().read(), l.bias().map(|bias| bias.read()), l.n());
        Self { layers: layers.iter().map(read).collect() }
    }

    fn run<R>(&self, f: impl FnOnce(&[Layer]) -> R) -> R {
        let biases: Vec<Option<Cow<[f32]>>> =
            self.layers.iter().map(|(_, bias, _)| bias.as_ref().map(WeightGuard::f32)).collect();
        let layers: Vec<Layer> = self
            .layers
            .iter()
            .zip(&biases)
            .map(|((w, _, n), bias)| Layer { w: w.weight(), bias: bias.as_deref(), n: *n })
            .collect();
        f(&layers)
    }
}

/// Runs `f` on the gradient of a weight that is trained.
fn accumulate(param: &Param, f: impl FnOnce(&mut [f32])) {
    if let Some(mut gradient) = param.gradient(Device::Cpu) {
        f(gradient.cpu());
    }
}

/// `w [n, k] += s · B A`
pub(crate) fn merge(w: &mut [f32], a: &Param, b: &Param, scale: f32) {
    let (&[rank, k], &[n, _]) = (a.shape(), b.shape()) else { return };
    let (a, b) = (a.read(), b.read());
    // dW += Bᵀᵀ A is the weight gradient's product with the rank as rows.
    let mut b_rn = vec![0.0; n * rank];
    for (i, row) in b.f32().chunks_exact(rank).enumerate() {
        row.iter().enumerate().for_each(|(r, &x)| b_rn[r * n + i] = x * scale);
    }
    product::backward_weight(
        &mut [Gradient { dw: w, col: 0, n, bf16: false }],
        &b_rn,
        n,
        &a.f32(),
        k,
        rank,
        k,
    );
}

impl Backend for Cpu {
    fn zeros(&self, rows: usize, cols: usize) -> Rows {
        Rows::on_cpu(buffer::zeros(rows * cols), rows, cols)
    }

    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows {
        Rows::on_cpu(data, rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        buffer::copy(x.cpu())
    }

    fn download_f64(&self, x: &Rows) -> Vec<f64> {
        x.cpu().iter().map(|&x| f64::from(x)).collect()
    }

    fn add(&self, to: &mut Rows, from: &Rows) {
        buffer::add(to.cpu_mut(), from.cpu());
    }

    fn scale(&self, x: &mut Rows, by: f32) {
        x.cpu_mut().iter_mut().for_each(|x| *x *= by);
    }

    fn select(&self, x: &Rows, index: &Index) -> Rows {
        Rows::on_cpu(moves::select(x.cpu(), x.cols(), index), index.len(), x.cols())
    }

    fn spread(&self, x: &Rows, index: &Index, rows: usize) -> Rows {
        let mut y = self.zeros(rows, x.cols());
        moves::spread(y.cpu_mut(), x.cols(), index, x.cpu());
        y
    }

    fn columns(&self, x: &Rows, columns: Range<usize>) -> Rows {
        let width = columns.len();
        Rows::on_cpu(moves::columns(x.cpu(), x.cols(), columns), x.rows(), width)
    }

    fn set_columns(&self, to: &mut Rows, first: usize, from: &Rows) {
        let cols = to.cols();
        moves::set_columns(to.cpu_mut(), cols, first, from.cpu(), from.cols());
    }

    fn set_rows(&self, to: &mut Rows, first: usize, from: &Rows, range: Range<usize>) {
        moves::set_rows(to.cpu_mut(), from.cols(), first, from.cpu(), range);
    }

    fn clear_rows(&self, x: &mut Rows, range: Range<usize>) {
        let cols = x.cols();
        x.cpu_mut()[range.start * cols..range.end * cols].fill(0.0);
    }

    fn linear(&self, x: &Rows, layers: &[Linear], residual: Option<&Rows>, order: Order) -> Rows {
        let (rows, k) = x.dims();
        let width = layers.iter().map(Linear::n).sum();
        let y = Reading::new(layers).run(|layers| match (order, residual) {
            (Order::Blocked, None) => product::output(x.cpu(), k, layers, rows, k),
            (Order::Blocked, Some(residual)) => {
                let mut y = buffer::copy(residual.cpu());
                product::forward(&mut y, width, x.cpu(), k, layers, rows, k, true);
                y
            }
            (Order::PerRow, residual) => {
                let mut y = residual.map_or_else(|| buffer::zeros(rows * width), |r| buffer::copy(r.cpu()));
                product::forward_rows(&mut y, width, x.cpu(), k, layers, rows, k, residual.is_some());
                y
            }
        });
        Rows::on_cpu(y, rows, width)
    }

    fn linear_add(&self, y: &mut Rows, col: usize, x: &Rows, weight: &Linear, order: Order) {
        let (rows, k) = x.dims();
        let width = y.cols();
        let guard = weight.weight().read();
        let layers = [Layer::new(guard.weight(), weight.n())];
        let run = match order {
            Order::Blocked => product::forward,
            Order::PerRow => product::forward_rows,
        };
        run(&mut y.cpu_mut()[col..], width, x.cpu(), k, &layers, rows, k, true);
    }

    fn linear_dx(&self, dy: &Rows, layers: &[Linear]) -> Rows {
        let (rows, width) = dy.dims();
        let k = layers.first().map_or(0, Linear::k);
        let dx = Reading::new(layers).run(|layers| product::input_gradient(dy.cpu(), width, layers, rows, k));
        Rows::on_cpu(dx, rows, k)
    }

    fn linear_dx_of(&self, dx: Option<Rows>, dy: &Rows, col: usize, weight: &Linear) -> Rows {
        let (rows, width) = dy.dims();
        let k = weight.k();
        let add = dx.is_some();
        let mut dx = dx.unwrap_or_else(|| self.zeros(rows, k));
        let guard = weight.weight().read();
        let layers = [Layer::new(guard.weight(), weight.n())];
        product::backward_input(dx.cpu_mut(), k, &dy.cpu()[col..], width, &layers, rows, k, add);
        dx
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]) {
        let ((rows, k), width) = (x.dims(), dy.cols());
        let mut buffers: Vec<Option<GradGuard>> =
            layers.iter().map(|l| l.weight().gradient(Device::Cpu)).collect();
        let mut gradients = Vec::with_capacity(buffers.len());
        let mut at = col;
        for (layer, buffer) in layers.iter().zip(&mut buffers) {
            if let Some(buffer) = buffer {
                let bf16 = layer.weight().dtype() == ParamDtype::Bf16;
                gradients.push(Gradient { dw: buffer.cpu(), col: at, n: layer.n(), bf16 });
            }
            at += layer.n();
        }
        product::backward_weight(&mut gradients, dy.cpu(), width, x.cpu(), k, rows, k);
        drop(buffers);
        at = col;
        for layer in layers {
            if let Some(bias) = layer.bias() {
                accumulate(bias, |db| product::backward_bias(db, &dy.cpu()[at..], width, rows, layer.n()));
            }
            at += layer.n();
        }
    }

    fn dropout(&self, x: &Rows, mask: &Mask) -> Rows {
        let mut y = buffer::copy(x.cpu());
        mask.apply(&mut y, x.cols());
        Rows::on_cpu(y, x.rows(), x.cols())
    }

    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        let (rows, dim) = x.dims();
        match norm {
            Norm::Rms { weight, eps } => {
                let mut rstd = vec![0.0; rows];
                let y = norms::rms_forward(&mut rstd, x.cpu(), &weight.read().f32(), rows, dim, *eps);
                (Rows::on_cpu(y, rows, dim), Rows::on_cpu(rstd, 1, rows))
            }
            Norm::Layer { weight, bias, eps } => {
                let mut stats = vec![0.0; 2 * rows];
                let (mean, rstd) = stats.split_at_mut(rows);
                let (weight, bias) = (weight.read(), bias.read());
                let y =
                    norms::layer_forward(mean, rstd, x.cpu(), &weight.f32(), &bias.f32(), rows, dim, *eps);
                (Rows::on_cpu(y, rows, dim), Rows::on_cpu(stats, 2, rows))
            }
        }
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm) {
        let (rows, dim) = x.dims();
        let (x, stats, dy, dx) = (x.cpu(), stats.cpu(), dy.cpu(), dx.cpu_mut());
        match norm {
            Norm::Rms { weight, .. } => {
                let (guard, mut gradient) = (weight.read(), weight.gradient(Device::Cpu));
                let dw = gradient.as_mut().map(GradGuard::cpu);
                norms::rms_backward(dx, dw, dy, x, &guard.f32(), stats, rows, dim);
            }
            Norm::Layer { weight, bias, .. } => {
                let (mean, rstd) = stats.split_at(rows);
                let mut dw = weight.trainable().then(|| vec![0.0; dim]);
                let mut db = bias.trainable().then(|| vec![0.0; dim]);
                norms::layer_backward(
                    dx,
                    dw.as_deref_mut(),
                    db.as_deref_mut(),
                    dy,
                    x,
                    &weight.read().f32(),
                    mean,
                    rstd,
                    rows,
                    dim,
                );
                for (param, grad) in [(weight, dw), (bias, db)] {
                    if let Some(grad) = grad {
                        accumulate(param, |sum| sum.iter_mut().zip(grad).for_each(|(s, g)| *s += g));
                    }
                }
            }
        }
    }

    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        let rows = qkv.rows();
        let mut out = buffer::zeros(rows * heads.q_width());
        let mut lse = buffer::zeros(rows * heads.q);
        let [q, k, v] = heads.views(qkv.cpu());
        attention::forward(&mut out, &mut lse, q, k, v, layout, heads.shape(), heads.scale());
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
        let [q, k, v] = heads.views(qkv.cpu());
        let (rows, shape) = (qkv.rows(), heads.shape());
        let dqkv = attention::backward(
            rows,
            dout.cpu(),
            out.cpu(),
            lse.cpu(),
            q,
            k,
            v,
            layout,
            shape,
            heads.scale(),
        );
        Rows::on_cpu(dqkv, rows, heads.packed_width())
    }

    fn cache(&self, layers: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
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
        groups: &mut [DecodeRows],
        heads: AttentionHeads,
    ) -> Rows {
        let (from, to) = (heads.packed_width(), heads.q_width());
        let mut out = buffer::zeros(qkv.rows() * to);
        let mut row = 0;
        for group in groups {
            let n = group.slots.len();
            let (packed, out) = (&qkv.cpu()[row * from..][..n * from], &mut out[row * to..][..n * to]);
            attend_group(group, layer, packed, heads, out);
            row += n;
        }
        Rows::on_cpu(out, qkv.rows(), to)
    }

    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, inverse: bool) {
        let (rows, cols) = x.dims();
        rope::apply(x.cpu_mut(), cols, 0, heads, 2 * table.half, &table.cos, &table.sin, rows, inverse);
    }

    fn activation(&self, x: &Rows, act: Activation) -> Rows {
        Rows::on_cpu(activation::forward(act, x.cpu()), x.rows(), x.cols())
    }

    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Activation) {
        activation::backward(act, x.cpu_mut(), dy.cpu());
    }

    fn swiglu(&self, gate_up: &Rows) -> Rows {
        let (rows, i) = (gate_up.rows(), gate_up.cols() / 2);
        Rows::on_cpu(activation::swiglu_forward(gate_up.cpu(), rows, i), rows, i)
    }

    fn swiglu_back(&self, gate_up: &mut Rows, dy: &Rows) {
        let (rows, i) = dy.dims();
        activation::swiglu_backward(gate_up.cpu_mut(), dy.cpu(), rows, i);
    }

    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        let mut y = buffer::zeros(x.len());
        scale::residual_forward(&mut y, x.cpu(), residual.cpu(), &scale.read().f32());
        Rows::on_cpu(y, x.rows(), x.cols())
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let mut dx = buffer::zeros(x.len());
        scale::residual_backward_input(&mut dx, dy.cpu(), &scale.read().f32());
        accumulate(scale, |ds| scale::residual_backward_scale(ds, dy.cpu(), x.cpu()));
        Rows::on_cpu(dx, x.rows(), x.cols())
    }

    fn embed(&self, table: &Param, ids: &[u32], h: usize) -> Rows {
        let mut x = vec![0.0; ids.len() * h];
        embedding::gather(&mut x, table.read().weight(), ids, h);
        Rows::on_cpu(x, ids.len(), h)
    }

    fn embed_back(&self, table: &Param, ids: &[u32], dx: &Rows) {
        accumulate(table, |dtable| embedding::scatter_add(dtable, dx.cpu(), ids, dx.cols()));
    }

    fn add_rows(&self, x: &mut Rows, table: &Param, ids: &Ids) {
        let h = x.cols();
        embedding::add_rows(x.cpu_mut(), table.read().weight(), ids, h);
    }

    fn add_rows_back(&self, table: &Param, ids: &Ids, dy: &Rows) {
        accumulate(table, |dtable| embedding::add_rows_backward(dtable, dy.cpu(), ids, dy.cols()));
    }

    fn add_mixed(&self, x: &mut Rows, table: &Param, taps: &Taps) {
        let h = x.cols();
        embedding::add_mixed(x.cpu_mut(), table.read().weight(), taps, h);
    }

    fn add_mixed_back(&self, table: &Param, taps: &Taps, dy: &Rows) {
        accumulate(table, |dtable| embedding::add_mixed_backward(dtable, dy.cpu(), taps, dy.cols()));
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        let mut y = buffer::zeros(mix.len() * x.cols());
        conv::mix_forward(&mut y, x.cpu(), mix, x.cols());
        Rows::on_cpu(y, mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        let mut dx = buffer::zeros(rows * dy.cols());
        conv::mix_backward(&mut dx, dy.cpu(), mix, dy.cols());
        Rows::on_cpu(dx, rows, dy.cols())
    }

    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let (n, k) = (layer.n(), layer.k());
        let mut y = buffer::zeros(patches.rows() * n);
        Reading::new(std::slice::from_ref(layer)).run(|layers| {
            pieces(x, patches, |start, rows, unfolded, _| {
                let y = &mut y[start * n..(start + rows) * n];
                product::forward(y, n, unfolded, k, layers, rows, k, false);
            });
        });
        Rows::on_cpu(y, patches.rows(), n)
    }

    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let (n, k, c) = (layer.n(), layer.k(), x.cols());
        let mut dx = buffer::zeros(x.len());
        let weight = layer.weight();
        pieces(x, patches, |start, rows, unfolded, sources| {
            let dy = &dy.cpu()[start * n..(start + rows) * n];
            let bf16 = weight.dtype() == ParamDtype::Bf16;
            accumulate(weight, |dw| {
                let mut gradient = [Gradient { dw, col: 0, n, bf16 }];
                product::backward_weight(&mut gradient, dy, n, unfolded, k, rows, k);
            });
            if let Some(bias) = layer.bias() {
                accumulate(bias, |db| product::backward_bias(db, dy, n, rows, n));
            }
            let mut dunfolded = buffer::zeros(rows * k);
            let guard = weight.read();
            product::backward_input(
                &mut dunfolded,
                k,
                dy,
                n,
                &[Layer::new(guard.weight(), n)],
                rows,
                k,
                false,
            );
            conv::fold(&mut dx, &dunfolded, sources, patches.taps, c);
        });
        Rows::on_cpu(dx, x.rows(), c)
    }

    fn depthwise(&self, x: &Rows, weight: &Param, [h, w]: [usize; 2]) -> Rows {
        let (t, c) = x.dims();
        let mut y = buffer::zeros(t * c);
        conv::depthwise3(&mut y, x.cpu(), &weight.read().f32(), t / (h * w), h, w, c, false);
        Rows::on_cpu(y, t, c)
    }

    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, [h, w]: [usize; 2]) -> Rows {
        let (t, c) = x.dims();
        let mut dx = buffer::zeros(t * c);
        accumulate(weight, |dw| conv::depthwise3_weight(dw, dy.cpu(), x.cpu(), t / (h * w), h, w, c));
        conv::depthwise3(&mut dx, dy.cpu(), &weight.read().f32(), t / (h * w), h, w, c, true);
        Rows::on_cpu(dx, t, c)
    }

    fn gate(&self, x: &Rows, gate: &Rows) -> Rows {
        let ((t, c), n) = (x.dims(), gate.rows());
        let mut y = buffer::zeros(t * c);
        conv::gate_forward(&mut y, x.cpu(), gate.cpu(), n, t / n, c);
        Rows::on_cpu(y, t, c)
    }

    fn gate_back(&self, x: &Rows, gate: &Rows, dy: &Rows) -> [Rows; 2] {
        let ((t, c), n) = (x.dims(), gate.rows());
        let (mut dx, mut dgate) = (buffer::zeros(t * c), vec![0.0; n * c]);
        conv::gate_backward(&mut dx, &mut dgate, dy.cpu(), x.cpu(), gate.cpu(), n, t / n, c);
        [Rows::on_cpu(dx, t, c), Rows::on_cpu(dgate, n, c)]
    }

    fn blend(&self, x: &Rows, logits: &Rows) -> Rows {
        let ((t, c), k) = (x.dims(), logits.cols());
        let mut y = buffer::zeros(t / k * c);
        conv::blend_forward(&mut y, x.cpu(), logits.cpu());
        Rows::on_cpu(y, t / k, c)
    }

    fn blend_back(&self, x: &Rows, logits: &Rows, dy: &Rows) -> [Rows; 2] {
        let ((t, c), k) = (x.dims(), logits.cols());
        let (mut dx, mut dlogits) = (buffer::zeros(t * c), vec![0.0; k]);
        conv::blend_backward(&mut dx, &mut dlogits, dy.cpu(), x.cpu(), logits.cpu());
        [Rows::on_cpu(dx, t, c), Rows::on_cpu(dlogits, 1, k)]
    }

    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores {
        let (n, h) = normed.dims();
        let mut logprobs = vec![0.0; targets.tokens.len()];
        let (mut entropies, mut lse) = (vec![0.0; n], vec![0.0; n]);
        logprob::forward(
            normed.cpu(),
            head.read().weight(),
            n,
            h,
            head.len() / h.max(1),
            &targets.tokens,
            &targets.offsets,
            temperature,
            &mut logprobs,
            &mut entropies,
            &mut lse,
        );
        let row = |data: Vec<f32>| {
            let cols = data.len();
            Rows::on_cpu(data, 1, cols)
        };
        Scores { logprobs: row(logprobs), entropies: row(entropies), lse: row(lse), temperature }
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
        let (n, h) = normed.dims();
        let mut dnormed = vec![0.0; n * h];
        let (guard, mut gradient) = (head.read(), head.gradient(Device::Cpu));
        logprob::backward(
            &mut dnormed,
            gradient.as_mut().map(GradGuard::cpu),
            normed.cpu(),
            guard.weight(),
            n,
            h,
            head.len() / h.max(1),
            &targets.tokens,
            &targets.offsets,
            scores.lse.cpu(),
            scores.entropies.cpu(),
            dlogp,
            dentropy,
            scores.temperature,
        );
        Rows::on_cpu(dnormed, n, h)
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (n, h) = normed.dims();
        let vocab = head.len() / h.max(1);
        let mut logits = vec![0.0; n * vocab];
        logprob::logits_rows(&mut logits, normed.cpu(), head.read().weight(), n, h, vocab);
        Rows::on_cpu(logits, n, vocab)
    }

    fn sum_of_squares(&self, x: &Rows) -> f64 {
        optim::sum_of_squares(x.cpu())
    }

    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()> {
        let Moments { step: count, m, v, master } = moments;
        let Step { lr, betas: [beta1, beta2], eps, weight_decay, grad_scale, master: keeps } = *step;
        let count = *count;
        let mut update = |weight: &mut [f32]| {
            optim::adamw(weight, m, v, grad.cpu(), lr, beta1, beta2, eps, weight_decay, count, grad_scale);
        };
        if param.dtype() == ParamDtype::F32 {
            return param.write(|values| {
                if let Values::F32(weight) = values {
                    update(weight);
                }
            });
        }
        if keeps {
            if master.is_empty() {
                *master = param.read().f32().into_owned();
            }
            update(master);
            return param.store(master);
        }
        let mut wide = param.read().f32().into_owned();
        update(&mut wide);
        param.store(&wide)
    }
}

/// Runs `f(first row, number of rows, unfolded rows, their sources)` over pieces of a convolution's output, whose bounds depend on
/// sizes alone.
fn pieces(x: &Rows, patches: &Patches, mut f: impl FnMut(usize, usize, &[f32], &[u32])) {
    let Patches { sources, taps } = patches;
    let c = x.cols();
    let step = (UNFOLDED / (c * taps).max(1)).max(1);
    let mut unfolded = vec![0.0; step.min(patches.rows()) * c * taps];
    for start in (0..patches.rows()).step_by(step) {
        let rows = step.min(patches.rows() - start);
        let sources = &sources[start * taps..(start + rows) * taps];
        let unfolded = &mut unfolded[..rows * c * taps];
        conv::unfold(unfolded, x.cpu(), sources, *taps, c);
        f(start, rows, unfolded, sources);
    }
}

/// Appends the keys and values of `packed` to the group's slots and writes each query's attention over prompt and own slot.
fn attend_group(
    group: &mut DecodeRows,
    layer: usize,
    packed: &[f32],
    heads: AttentionHeads,
    out: &mut [f32],
) {
    let cache = &mut *group.cache;
    let slots: Vec<(usize, usize)> = group.slots.iter().map(|&slot| cache.slot(slot)).collect();
    let prompt_rows = cache.prompt_rows;
    let Store::Cpu(layers) = &mut cache.store else { return };
    let buffer = floats_mut(&mut layers[layer]);
    let width = heads.packed_width();
    let mut ranges = Vec::with_capacity(slots.len());
    for (i, &(start, len)) in slots.iter().enumerate() {
        copy_kv(buffer, start + len, &packed[i * width..(i + 1) * width], heads);
        let keys = vec![0..prompt_rows, start..start + len + 1];
        ranges.push(QueryRange { queries: i..i + 1, keys, causal: false });
    }
    let stride = 2 * heads.kv_width();
    attention::forward_decode(
        out,
        View { data: packed, stride: width, col: 0 },
        View { data: buffer, stride, col: 0 },
        View { data: buffer, stride, col: heads.kv_width() },
        &AttentionLayout { ranges },
        heads.shape(),
        heads.scale(),
    );
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

/// A weight as f64, row by row.
pub(crate) fn wide(weight: Weight) -> Vec<f64> {
    match weight {
        Weight::F32(data) => data.iter().map(|&x| f64::from(x)).collect(),
        Weight::Bf16(data) => data.iter().map(|x| x.to_f64()).collect(),
        Weight::Quantised(data) => {
            let mut f32s = vec![0.0; data.len()];
            data.widen(&mut f32s);
            f32s.into_iter().map(f64::from).collect()
        }
    }
}
