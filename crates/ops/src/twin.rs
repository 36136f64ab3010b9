//! The f64 twin, a reference for tests: plain loops over the formulas of `omnigrpo_kernels::twin`.

use std::sync::Arc;

use omnigrpo_kernels::attention::{AttentionLayout, Qkv, QueryRange};
use omnigrpo_kernels::dropout::Mask;
use omnigrpo_kernels::logprob::Gradient;
use omnigrpo_kernels::sample::{Draw, DrawFrom, Sampler};
use omnigrpo_kernels::{Mat, twin};

use crate::attention::{AttentionHeads, Layout};
use crate::cache::{GroupCache, Store};
use crate::conv::{Mix, Patches};
use crate::cpu::wide;
use crate::decode::DecodeBatch;
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
use crate::param::{Param, ParamDtype};
use crate::rope::RopeTable;
use crate::rows::{Data, Rows, Window};

pub(crate) struct Twin;

impl Rows {
    /// Returns the values of rows on the twin.
    pub(crate) fn twin(&self) -> &[f64] {
        match &self.data {
            Data::Twin(data) => data,
            _ => &[],
        }
    }

    /// Returns the values for writing. Shared values are copied first.
    pub(crate) fn twin_mut(&mut self) -> &mut [f64] {
        match &mut self.data {
            Data::Twin(data) => Arc::make_mut(data).as_mut_slice(),
            _ => &mut [],
        }
    }

    fn mat64(&self) -> Mat<'_, f64> {
        Mat::new(self.twin(), self.rows(), self.cols())
    }
}

fn values(param: &Param) -> Vec<f64> {
    wide(param.read().stored())
}

/// Adds `gradient` to the gradient of a weight if the weight is trained.
fn accumulate(param: &Param, gradient: &[f64]) {
    if let Some(mut guard) = param.gradient(Device::Twin) {
        guard.twin().iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
    }
}

fn scale(heads: AttentionHeads) -> f64 {
    1.0 / (heads.dim as f64).sqrt()
}

fn of_len(data: Vec<f64>) -> Rows {
    let cols = data.len();
    Rows::on_twin(data, 1, cols)
}

impl Backend for Twin {
    fn zeros(&self, rows: usize, cols: usize, _: Option<&Rows>) -> Rows {
        Rows::on_twin(vec![0.0; rows * cols], rows, cols)
    }

    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows {
        Rows::on_twin(data.into_iter().map(f64::from).collect(), rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        x.twin().iter().map(|&x| x as f32).collect()
    }

    fn add(&self, to: &mut Rows, from: &Rows) {
        to.twin_mut().iter_mut().zip(from.twin()).for_each(|(to, from)| *to += from);
    }

    fn scale(&self, x: &mut Rows, by: f32) {
        x.twin_mut().iter_mut().for_each(|x| *x *= f64::from(by));
    }

    fn part(&self, x: &Rows, of: Window, [rows, cols]: [usize; 2]) -> Rows {
        Rows::on_twin(moves::part(x.twin(), x.cols(), of, [rows, cols]), rows, cols)
    }

    fn set_part(&self, to: &mut Rows, at: Window, from: &Rows, of: Window, size: [usize; 2]) {
        let cols = to.cols();
        moves::set_part((to.twin_mut(), cols, at), (from.twin(), from.cols(), of), size);
    }

    fn linear(&self, x: &Rows, layers: &[Linear], onto: Onto, _: Order) -> Rows {
        let (mut y, mut col) = match onto {
            Onto::Nothing => (self.zeros(x.rows(), layers.iter().map(Linear::n).sum(), None), 0),
            Onto::Residual(residual) => (residual.clone(), 0),
            Onto::Columns(y, col) => (y, col),
        };
        let width = y.cols();
        for layer in layers {
            let (n, w, bias) = (layer.n(), values(layer.weight()), layer.bias().map(|bias| values(bias)));
            let product = twin::linear_forward(x.mat64(), Mat::new(&w, n, layer.k()), bias.as_deref());
            let rows = y.twin_mut().chunks_exact_mut(width.max(1));
            for (y, product) in rows.zip(product.chunks_exact(n.max(1))) {
                y[col..].iter_mut().zip(product).for_each(|(y, p)| *y += p);
            }
            col += n;
        }
        y
    }

    fn linear_dx(&self, dx: Option<Rows>, dy: &Rows, col: usize, layers: &[Linear]) -> Rows {
        let (rows, k) = (dy.rows(), layers.first().map_or(0, Linear::k));
        let (mut dx, mut col) = (dx.unwrap_or_else(|| self.zeros(rows, k, None)), col);
        for layer in layers {
            let (x, n, w) = (self.zeros(rows, k, None), layer.n(), values(layer.weight()));
            let dy = dy.mat64().columns(col..col + n);
            let own = twin::linear_backward(dy, x.mat64(), Mat::new(&w, n, k)).0;
            self.add(&mut dx, &Rows::on_twin(own, rows, k));
            col += n;
        }
        dx
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]) {
        let mut col = col;
        for layer in layers {
            let n = layer.n();
            let w = self.zeros(n, layer.k(), None);
            let dy = dy.mat64().columns(col..col + n);
            let (_, dw, db) = twin::linear_backward(dy, x.mat64(), w.mat64());
            accumulate(layer.weight(), &dw);
            if let Some(bias) = layer.bias() {
                accumulate(bias, &db);
            }
            col += n;
        }
    }

    fn dropout(&self, x: &Rows, mask: &Mask) -> Rows {
        let factors = mask.factors(x.rows(), x.cols());
        let y = x.twin().iter().zip(factors).map(|(x, factor)| x * f64::from(factor)).collect();
        Rows::on_twin(y, x.rows(), x.cols())
    }

    fn experts(&self, x: &Rows, layer: &ExpertLinear, routes: &Routes, _: Order) -> Rows {
        let w = values(layer.weight());
        let w = Mat::new(&w, layer.experts() * layer.k(), layer.n());
        Rows::on_twin(twin::experts_forward(x.mat64(), w, routes.groups()), x.rows(), layer.n())
    }

    fn experts_dx(&self, dy: &Rows, layer: &ExpertLinear, routes: &Routes) -> Rows {
        let (x, w) = (self.zeros(dy.rows(), layer.k(), None), values(layer.weight()));
        let w = Mat::new(&w, layer.experts() * layer.k(), layer.n());
        let dx = twin::experts_backward(dy.mat64(), x.mat64(), w, routes.groups()).0;
        Rows::on_twin(dx, dy.rows(), layer.k())
    }

    fn experts_dw(&self, x: &Rows, dy: &Rows, layer: &ExpertLinear, routes: &Routes) {
        let w = self.zeros(layer.experts() * layer.k(), layer.n(), None);
        let (_, dw) = twin::experts_backward(dy.mat64(), x.mat64(), w.mat64(), routes.groups());
        accumulate(layer.weight(), &dw);
    }

    fn weigh(&self, x: &Rows, logits: &Rows, by: Weighing) -> Rows {
        let y = match by {
            Weighing::Gate => twin::gate_forward(x.mat64(), logits.mat64()),
            Weighing::Blend => twin::blend_forward(alternatives(x, logits), logits.twin()),
            Weighing::Experts(routes) => twin::weigh_forward(x.mat64(), logits.mat64(), routes.choices()),
        };
        Rows::on_twin(y, by.rows(x, logits), x.cols())
    }

    fn weigh_back(&self, x: &Rows, logits: &Rows, dy: &Rows, by: Weighing) -> [Rows; 2] {
        let (dx, dlogits) = match by {
            Weighing::Gate => twin::gate_backward(dy.mat64(), x.mat64(), logits.mat64()),
            Weighing::Blend => twin::blend_backward(dy.twin(), alternatives(x, logits), logits.twin()),
            Weighing::Experts(routes) => {
                twin::weigh_backward(dy.mat64(), x.mat64(), logits.mat64(), routes.choices())
            }
        };
        [Rows::on_twin(dx, x.rows(), x.cols()), Rows::on_twin(dlogits, logits.rows(), logits.cols())]
    }

    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        let (rows, dim) = x.dims();
        let weight = values(norm.weight());
        let (count, (y, stats)) = match norm {
            Norm::Rms { eps, .. } => (1, twin::rms_forward(x.mat64(), &weight, f64::from(*eps))),
            Norm::Layer { bias, eps, .. } => {
                (2, twin::layer_forward(x.mat64(), &weight, &values(bias), f64::from(*eps)))
            }
        };
        (Rows::on_twin(y, rows, dim), Rows::on_twin(stats, count, rows))
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm) {
        let (x, dy, stats, weight) = (x.mat64(), dy.mat64(), stats.twin(), norm.weight());
        let own = match norm {
            Norm::Rms { .. } => {
                let (own, dw) = twin::rms_backward(dy, x, &values(weight), stats);
                accumulate(weight, &dw);
                own
            }
            Norm::Layer { bias, .. } => {
                let (own, dw, db) = twin::layer_backward(dy, x, &values(weight), stats);
                accumulate(weight, &dw);
                accumulate(bias, &db);
                own
            }
        };
        dx.twin_mut().iter_mut().zip(own).for_each(|(dx, own)| *dx += own);
    }

    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        let shape = heads.shape();
        let parts = Qkv::packed(qkv.mat64(), shape);
        let (out, lse) = twin::attention_forward(parts, layout, shape, scale(heads));
        (Rows::on_twin(out, qkv.rows(), heads.q_width()), Rows::on_twin(lse, qkv.rows(), heads.q))
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
        let shape = heads.shape();
        let parts = Qkv::packed(qkv.mat64(), shape);
        let (dq, dk, dv) = twin::attention_backward(dout.mat64(), parts, layout, shape, scale(heads));
        let mut dqkv = self.zeros(qkv.rows(), qkv.cols(), None);
        let (wide, narrow) = (heads.q_width(), heads.kv_width());
        for (first, width, data) in [(0, wide, dq), (wide, narrow, dk), (wide + narrow, narrow, dv)] {
            let data = Rows::on_twin(data, qkv.rows(), width);
            self.set_part(&mut dqkv, Window::at(0, first), &data, Window::default(), [qkv.rows(), width]);
        }
        dqkv
    }

    fn cache(&self, layers: usize, _: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
        Ok(Store::Twin(vec![vec![0.0; rows * 2 * heads.kv_width()]; layers]))
    }

    fn cache_prompt(&self, cache: &mut GroupCache, layer: usize, qkv: &Rows, heads: AttentionHeads) {
        if let Store::Twin(layers) = &mut cache.store {
            let (of, size) = (Window::at(0, heads.q_width()), [qkv.rows(), 2 * heads.kv_width()]);
            let kv = moves::part(qkv.twin(), qkv.cols(), of, size);
            layers[layer][..kv.len()].copy_from_slice(&kv);
        }
    }

    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        batch: &mut DecodeBatch,
        heads: AttentionHeads,
    ) -> (Rows, Rows) {
        let (kv, q_width) = (heads.kv_width(), heads.q_width());
        let mut out = Vec::with_capacity(qkv.rows() * q_width);
        let mut lse = Vec::with_capacity(qkv.rows() * heads.q);
        let mut row = 0;
        for group in &mut batch.groups {
            for &slot in &group.slots {
                let packed = qkv.mat64().row_range(row..row + 1);
                let ((start, len), prompt) = (group.cache.slot(slot), group.cache.prompt_rows);
                let Store::Twin(layers) = &mut group.cache.store else { continue };
                let data = &mut layers[layer];
                data[(start + len) * 2 * kv..][..2 * kv].copy_from_slice(&packed.row(0)[q_width..]);
                let cached = Mat::new(data, data.len() / (2 * kv).max(1), 2 * kv);
                let keys = vec![0..prompt, start..start + len + 1];
                let layout =
                    AttentionLayout { ranges: vec![QueryRange { queries: 0..1, keys, causal: false }] };
                let (k, v) = (cached.columns(0..kv), cached.columns(kv..2 * kv));
                let parts = Qkv { q: packed.columns(0..q_width), k, v };
                let (own, of_own) = twin::attention_forward(parts, &layout, heads.shape(), scale(heads));
                out.extend(own);
                lse.extend(of_own);
                row += 1;
            }
        }
        (Rows::on_twin(out, qkv.rows(), q_width), Rows::on_twin(lse, qkv.rows(), heads.q))
    }

    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, inverse: bool) {
        let angles = |data: &[f32]| data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (rows, width) = (x.rows(), heads * 2 * table.half);
        let waves = table.waves().each_ref().map(|wave| angles(wave));
        let [cos, sin] = waves.each_ref().map(|wave| Mat::new(wave, rows, table.half));
        let turned = twin::rope(cos, sin, inverse, x.mat64().columns(0..width));
        let turned = Rows::on_twin(turned, rows, width);
        self.set_part(x, Window::default(), &turned, Window::default(), [rows, width]);
    }

    fn activation(&self, x: &Rows, act: Nonlinearity) -> Rows {
        let (y, cols) = match act {
            Nonlinearity::Pointwise(act) => {
                (x.twin().iter().map(|&x| twin::activation(act, x).0).collect(), x.cols())
            }
            Nonlinearity::SwiGlu => (twin::swiglu_forward(x.mat64()), x.cols() / 2),
        };
        Rows::on_twin(y, x.rows(), cols)
    }

    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Nonlinearity) {
        let dx = match act {
            Nonlinearity::Pointwise(act) => {
                x.twin().iter().zip(dy.twin()).map(|(&x, dy)| dy * twin::activation(act, x).1).collect()
            }
            Nonlinearity::SwiGlu => twin::swiglu_backward(dy.mat64(), x.mat64()),
        };
        *x = Rows::on_twin(dx, x.rows(), x.cols());
    }

    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        let y = twin::residual_forward(x.mat64(), residual.mat64(), &values(scale));
        Rows::on_twin(y, x.rows(), x.cols())
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let (dx, dscale) = twin::residual_backward(dy.mat64(), x.mat64(), &values(scale));
        accumulate(scale, &dscale);
        Rows::on_twin(dx, x.rows(), x.cols())
    }

    fn embed(&self, table: &Param, ids: &Tokens, h: usize) -> Rows {
        let rows = values(table);
        Rows::on_twin(twin::gather(Mat::new(&rows, rows.len() / h.max(1), h), ids), ids.len(), h)
    }

    fn add_rows(&self, x: &mut Rows, table: &Param, mix: &Mix) {
        let (h, table) = (x.cols(), values(table));
        let own = twin::mix_forward(Mat::new(&table, table.len() / h.max(1), h), mix);
        x.twin_mut().iter_mut().zip(own).for_each(|(x, own)| *x += own);
    }

    fn add_rows_back(&self, table: &Param, mix: &Mix, dy: &Rows) {
        accumulate(table, &twin::mix_backward(dy.mat64(), mix, table.len() / dy.cols().max(1)));
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        Rows::on_twin(twin::mix_forward(x.mat64(), mix), mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        Rows::on_twin(twin::mix_backward(dy.mat64(), mix, rows), rows, dy.cols())
    }

    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let unfolded = twin::unfold(x.mat64(), &patches.sources, patches.taps);
        let unfolded = Rows::on_twin(unfolded, patches.rows(), layer.k());
        self.linear(&unfolded, std::slice::from_ref(layer), Onto::Nothing, Order::Blocked)
    }

    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let unfolded = twin::unfold(x.mat64(), &patches.sources, patches.taps);
        let unfolded = Rows::on_twin(unfolded, patches.rows(), layer.k());
        self.linear_dw(&unfolded, dy, 0, std::slice::from_ref(layer));
        let dunfolded = self.linear_dx(None, dy, 0, std::slice::from_ref(layer));
        let dx = twin::fold(dunfolded.mat64(), &patches.sources, patches.taps, x.rows());
        Rows::on_twin(dx, x.rows(), x.cols())
    }

    fn depthwise(&self, x: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        let y = twin::depthwise3_forward(x.mat64(), &values(weight), side);
        Rows::on_twin(y, x.rows(), x.cols())
    }

    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, side: [usize; 2]) -> Rows {
        let (dx, dw) = twin::depthwise3_backward(dy.mat64(), x.mat64(), &values(weight), side);
        accumulate(weight, &dw);
        Rows::on_twin(dx, x.rows(), x.cols())
    }

    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores {
        let (weight, t) = (values(head), f64::from(temperature));
        let head = Mat::new(&weight, head.len() / normed.cols().max(1), normed.cols());
        let scores = twin::logprob_forward(normed.mat64(), head, targets.kernel(), t);
        let [logprobs, entropies, lse] = [scores.logp, scores.entropy, scores.lse].map(of_len);
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
        let wide = |d: &[f32]| d.iter().map(|&d| f64::from(d)).collect::<Vec<_>>();
        let (dlogp, dentropy) = (wide(dlogp), dentropy.map(wide));
        let gradient = Gradient { logp: &dlogp, entropy: dentropy.as_deref() };
        let (weight, t) = (values(head), f64::from(scores.temperature));
        let mat = Mat::new(&weight, head.len() / normed.cols().max(1), normed.cols());
        let (dnormed, dhead) = twin::logprob_backward(gradient, normed.mat64(), mat, targets.kernel(), t);
        accumulate(head, &dhead);
        Rows::on_twin(dnormed, normed.rows(), normed.cols())
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (n, h) = normed.dims();
        let (weight, vocab) = (values(head), head.len() / h.max(1));
        Rows::on_twin(twin::linear_forward(normed.mat64(), Mat::new(&weight, vocab, h), None), n, vocab)
    }

    fn draw(&self, logits: &mut Rows, how: &Sampler, from: &[DrawFrom]) -> Vec<Option<Draw>> {
        let rows = logits.twin().chunks(logits.cols().max(1)).zip(from);
        rows.map(|(logits, from)| twin::draw(logits, how, from)).collect()
    }

    fn sum_of_squares(&self, x: &Rows) -> f64 {
        x.twin().iter().map(|x| x * x).sum()
    }

    /// Computes the update in f64, and rounds it to the f32 of the weight and the moments.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()> {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let round = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let keeps = step.master && param.dtype() != ParamDtype::F32;
        let by = step.kernel(moments.step).wide();
        let [m, v, master] = moments.on_host(param, 0..param.len(), keeps)?;
        let mut weight = if keeps { wide(master) } else { values(param) };
        let (mut wide_m, mut wide_v) = (wide(m), wide(v));
        twin::adamw(grad.twin(), &by, &mut weight, &mut wide_m, &mut wide_v);
        m.copy_from_slice(&round(&wide_m));
        v.copy_from_slice(&round(&wide_v));
        let weight = round(&weight);
        if keeps {
            master.copy_from_slice(&weight);
        }
        param.store(&weight)
    }
}

/// Views each alternative of a blend as one row.
fn alternatives<'a>(x: &'a Rows, logits: &Rows) -> Mat<'a, f64> {
    Mat::new(x.twin(), logits.cols(), x.len() / logits.cols())
}
