//! The f64 twin: plain loops over the formulas of `omnigrpo_kernels::twin`, for tests of everything else.

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_kernels::activation::Activation;
use omnigrpo_kernels::attention::{AttentionLayout, QueryRange};
use omnigrpo_kernels::twin;

use crate::adapter::Mask;
use crate::attention::{AttentionHeads, DecodeRows, Layout};
use crate::cache::{GroupCache, Store};
use crate::conv::{Mix, Patches};
use crate::cpu::wide;
use crate::device::{Backend, Device};
use crate::embedding::{Ids, Taps};
use crate::error::Result;
use crate::head::{Scores, Targets};
use crate::linear::{Linear, Order};
use crate::moves;
use crate::norm::Norm;
use crate::optim::{Moments, Step};
use crate::param::{Param, ParamDtype};
use crate::rope::RopeTable;
use crate::rows::{Data, Index, Rows};

pub(crate) struct Twin;

impl Rows {
    /// The numbers of rows of the twin.
    pub(crate) fn twin(&self) -> &[f64] {
        match &self.data {
            Data::Twin(data) => data,
            _ => &[],
        }
    }

    /// The same for writing; shared numbers are copied first.
    pub(crate) fn twin_mut(&mut self) -> &mut [f64] {
        match &mut self.data {
            Data::Twin(data) => Arc::make_mut(data).as_mut_slice(),
            _ => &mut [],
        }
    }
}

fn values(param: &Param) -> Vec<f64> {
    wide(param.read().weight())
}

/// Adds to the gradient of a weight that is trained.
fn accumulate(param: &Param, gradient: &[f64]) {
    if let Some(mut guard) = param.gradient(Device::Twin) {
        guard.twin().iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
    }
}

/// Queries, keys and values apart.
fn split(qkv: &Rows, heads: AttentionHeads) -> [Vec<f64>; 3] {
    let (q, kv) = (heads.q_width(), heads.kv_width());
    [0..q, q..q + kv, q + kv..q + 2 * kv].map(|columns| moves::columns(qkv.twin(), qkv.cols(), columns))
}

fn scale(heads: AttentionHeads) -> f64 {
    1.0 / (heads.dim as f64).sqrt()
}

fn of_len(data: Vec<f64>) -> Rows {
    let cols = data.len();
    Rows::on_twin(data, 1, cols)
}

impl Backend for Twin {
    fn zeros(&self, rows: usize, cols: usize) -> Rows {
        Rows::on_twin(vec![0.0; rows * cols], rows, cols)
    }

    fn upload(&self, data: Vec<f32>, rows: usize, cols: usize) -> Rows {
        Rows::on_twin(data.into_iter().map(f64::from).collect(), rows, cols)
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        x.twin().iter().map(|&x| x as f32).collect()
    }

    fn download_f64(&self, x: &Rows) -> Vec<f64> {
        x.twin().to_vec()
    }

    fn add(&self, to: &mut Rows, from: &Rows) {
        to.twin_mut().iter_mut().zip(from.twin()).for_each(|(to, from)| *to += from);
    }

    fn scale(&self, x: &mut Rows, by: f32) {
        x.twin_mut().iter_mut().for_each(|x| *x *= f64::from(by));
    }

    fn select(&self, x: &Rows, index: &Index) -> Rows {
        Rows::on_twin(moves::select(x.twin(), x.cols(), index), index.len(), x.cols())
    }

    fn spread(&self, x: &Rows, index: &Index, rows: usize) -> Rows {
        let mut y = self.zeros(rows, x.cols());
        moves::spread(y.twin_mut(), x.cols(), index, x.twin());
        y
    }

    fn columns(&self, x: &Rows, columns: Range<usize>) -> Rows {
        let width = columns.len();
        Rows::on_twin(moves::columns(x.twin(), x.cols(), columns), x.rows(), width)
    }

    fn set_columns(&self, to: &mut Rows, first: usize, from: &Rows) {
        let cols = to.cols();
        moves::set_columns(to.twin_mut(), cols, first, from.twin(), from.cols());
    }

    fn set_rows(&self, to: &mut Rows, first: usize, from: &Rows, range: Range<usize>) {
        moves::set_rows(to.twin_mut(), from.cols(), first, from.twin(), range);
    }

    fn clear_rows(&self, x: &mut Rows, range: Range<usize>) {
        let cols = x.cols();
        x.twin_mut()[range.start * cols..range.end * cols].fill(0.0);
    }

    fn linear(&self, x: &Rows, layers: &[Linear], residual: Option<&Rows>, _: Order) -> Rows {
        let width = layers.iter().map(Linear::n).sum();
        let mut y = residual.cloned().unwrap_or_else(|| self.zeros(x.rows(), width));
        let mut col = 0;
        for layer in layers {
            self.linear_add(&mut y, col, x, layer, Order::Blocked);
            if let Some(bias) = layer.bias() {
                let bias = values(bias);
                for row in y.twin_mut().chunks_exact_mut(width) {
                    row[col..].iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
                }
            }
            col += layer.n();
        }
        y
    }

    fn linear_add(&self, y: &mut Rows, col: usize, x: &Rows, weight: &Linear, _: Order) {
        let (n, k) = (weight.n(), weight.k());
        let product = twin::linear_forward(x.twin(), &values(weight.weight()), None, x.rows(), k, n);
        let width = y.cols();
        let rows = y.twin_mut().chunks_exact_mut(width.max(1));
        for (y, product) in rows.zip(product.chunks_exact(n.max(1))) {
            y[col..].iter_mut().zip(product).for_each(|(y, p)| *y += p);
        }
    }

    fn linear_dx(&self, dy: &Rows, layers: &[Linear]) -> Rows {
        let mut dx = self.zeros(dy.rows(), layers.first().map_or(0, Linear::k));
        let mut col = 0;
        for layer in layers {
            dx = self.linear_dx_of(Some(dx), dy, col, layer);
            col += layer.n();
        }
        dx
    }

    fn linear_dx_of(&self, dx: Option<Rows>, dy: &Rows, col: usize, weight: &Linear) -> Rows {
        let (rows, n, k) = (dy.rows(), weight.n(), weight.k());
        let dy = moves::columns(dy.twin(), dy.cols(), col..col + n);
        let own = twin::linear_backward(&dy, &vec![0.0; rows * k], &values(weight.weight()), rows, k, n).0;
        let own = Rows::on_twin(own, rows, k);
        match dx {
            Some(mut dx) => {
                self.add(&mut dx, &own);
                dx
            }
            None => own,
        }
    }

    fn linear_dw(&self, x: &Rows, dy: &Rows, col: usize, layers: &[Linear]) {
        let (rows, k) = x.dims();
        let mut col = col;
        for layer in layers {
            let n = layer.n();
            let dy = moves::columns(dy.twin(), dy.cols(), col..col + n);
            let (_, dw, db) = twin::linear_backward(&dy, x.twin(), &vec![0.0; n * k], rows, k, n);
            accumulate(layer.weight(), &dw);
            if let Some(bias) = layer.bias() {
                accumulate(bias, &db);
            }
            col += n;
        }
    }

    fn dropout(&self, x: &Rows, mask: &Mask) -> Rows {
        let mut y = x.twin().to_vec();
        mask.each(&mut y, x.cols(), |y, factor| *y *= f64::from(factor));
        Rows::on_twin(y, x.rows(), x.cols())
    }

    fn norm(&self, x: &Rows, norm: &Norm) -> (Rows, Rows) {
        let (rows, dim) = x.dims();
        match norm {
            Norm::Rms { weight, eps } => {
                let (y, rstd) = twin::rms_forward(x.twin(), &values(weight), rows, dim, f64::from(*eps));
                (Rows::on_twin(y, rows, dim), Rows::on_twin(rstd, 1, rows))
            }
            Norm::Layer { weight, bias, eps } => {
                let (weight, bias) = (values(weight), values(bias));
                let (y, mean, rstd) =
                    twin::layer_forward(x.twin(), &weight, &bias, rows, dim, f64::from(*eps));
                (Rows::on_twin(y, rows, dim), Rows::on_twin([mean, rstd].concat(), 2, rows))
            }
        }
    }

    fn norm_back(&self, dx: &mut Rows, x: &Rows, stats: &Rows, dy: &Rows, norm: &Norm) {
        let (rows, dim) = x.dims();
        let own = match norm {
            Norm::Rms { weight, .. } => {
                let (own, dw) =
                    twin::rms_backward(dy.twin(), x.twin(), &values(weight), stats.twin(), rows, dim);
                accumulate(weight, &dw);
                own
            }
            Norm::Layer { weight, bias, .. } => {
                let (mean, rstd) = stats.twin().split_at(rows);
                let (own, dw, db) =
                    twin::layer_backward(dy.twin(), x.twin(), &values(weight), mean, rstd, rows, dim);
                accumulate(weight, &dw);
                accumulate(bias, &db);
                own
            }
        };
        dx.twin_mut().iter_mut().zip(own).for_each(|(dx, own)| *dx += own);
    }

    fn attention(&self, qkv: &Rows, layout: &Layout, heads: AttentionHeads) -> (Rows, Rows) {
        let [q, k, v] = split(qkv, heads);
        let (out, lse) = twin::attention_forward(&q, &k, &v, layout, heads.shape(), scale(heads));
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
        let [q, k, v] = split(qkv, heads);
        let shape = heads.shape();
        let (dq, dk, dv) = twin::attention_backward(dout.twin(), &q, &k, &v, layout, shape, scale(heads));
        let mut dqkv = self.zeros(qkv.rows(), qkv.cols());
        let (wide, narrow) = (heads.q_width(), heads.kv_width());
        for (first, width, data) in [(0, wide, dq), (wide, narrow, dk), (wide + narrow, narrow, dv)] {
            self.set_columns(&mut dqkv, first, &Rows::on_twin(data, qkv.rows(), width));
        }
        dqkv
    }

    fn cache(&self, layers: usize, rows: usize, heads: AttentionHeads) -> std::io::Result<Store> {
        Ok(Store::Twin(vec![vec![0.0; rows * 2 * heads.kv_width()]; layers]))
    }

    fn cache_prompt(&self, cache: &mut GroupCache, layer: usize, qkv: &Rows, heads: AttentionHeads) {
        if let Store::Twin(layers) = &mut cache.store {
            let kv = moves::columns(qkv.twin(), qkv.cols(), heads.q_width()..heads.packed_width());
            layers[layer][..kv.len()].copy_from_slice(&kv);
        }
    }

    fn attend_cached(
        &self,
        qkv: &Rows,
        layer: usize,
        groups: &mut [DecodeRows],
        heads: AttentionHeads,
    ) -> Rows {
        let (width, kv) = (qkv.cols(), 2 * heads.kv_width());
        let mut out = Vec::with_capacity(qkv.rows() * heads.q_width());
        let mut row = 0;
        for group in groups {
            for &slot in &group.slots {
                let packed = &qkv.twin()[row * width..(row + 1) * width];
                let ((start, len), prompt) = (group.cache.slot(slot), group.cache.prompt_rows);
                let Store::Twin(layers) = &mut group.cache.store else { continue };
                let data = &mut layers[layer];
                data[(start + len) * kv..][..kv].copy_from_slice(&packed[heads.q_width()..]);
                let half = heads.kv_width();
                let (k, v) = (moves::columns(data, kv, 0..half), moves::columns(data, kv, half..kv));
                let keys = vec![0..prompt, start..start + len + 1];
                let layout =
                    AttentionLayout { ranges: vec![QueryRange { queries: 0..1, keys, causal: false }] };
                let q = &packed[..heads.q_width()];
                out.extend(twin::attention_forward(q, &k, &v, &layout, heads.shape(), scale(heads)).0);
                row += 1;
            }
        }
        Rows::on_twin(out, qkv.rows(), heads.q_width())
    }

    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: usize, inverse: bool) {
        let angles = |data: &[f32]| data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (rows, width) = (x.rows(), heads * 2 * table.half);
        let turned = moves::columns(x.twin(), x.cols(), 0..width);
        let turned = twin::rope(
            &turned,
            heads,
            2 * table.half,
            &angles(&table.cos),
            &angles(&table.sin),
            rows,
            inverse,
        );
        self.set_columns(x, 0, &Rows::on_twin(turned, rows, width));
    }

    fn activation(&self, x: &Rows, act: Activation) -> Rows {
        let y = x.twin().iter().map(|&x| twin::activation(act, x).0).collect();
        Rows::on_twin(y, x.rows(), x.cols())
    }

    fn activation_back(&self, x: &mut Rows, dy: &Rows, act: Activation) {
        x.twin_mut().iter_mut().zip(dy.twin()).for_each(|(x, dy)| *x = dy * twin::activation(act, *x).1);
    }

    fn swiglu(&self, gate_up: &Rows) -> Rows {
        let (rows, i) = (gate_up.rows(), gate_up.cols() / 2);
        Rows::on_twin(twin::swiglu_forward(gate_up.twin(), rows, i), rows, i)
    }

    fn swiglu_back(&self, gate_up: &mut Rows, dy: &Rows) {
        let (rows, i) = dy.dims();
        let gradient = twin::swiglu_backward(dy.twin(), gate_up.twin(), rows, i);
        *gate_up = Rows::on_twin(gradient, rows, 2 * i);
    }

    fn scale_onto(&self, x: &Rows, residual: &Rows, scale: &Param) -> Rows {
        let y = twin::scale_residual_forward(x.twin(), residual.twin(), &values(scale));
        Rows::on_twin(y, x.rows(), x.cols())
    }

    fn scale_onto_back(&self, x: &Rows, dy: &Rows, scale: &Param) -> Rows {
        let (dx, dscale) = twin::scale_residual_backward(dy.twin(), x.twin(), &values(scale));
        accumulate(scale, &dscale);
        Rows::on_twin(dx, x.rows(), x.cols())
    }

    fn embed(&self, table: &Param, ids: &[u32], h: usize) -> Rows {
        Rows::on_twin(twin::gather(&values(table), ids, h), ids.len(), h)
    }

    fn embed_back(&self, table: &Param, ids: &[u32], dx: &Rows) {
        let h = dx.cols();
        accumulate(table, &twin::scatter_add(dx.twin(), ids, table.len() / h.max(1), h));
    }

    fn add_rows(&self, x: &mut Rows, table: &Param, ids: &Ids) {
        self.add_taps(x, table, &ids.on(Device::Twin, |ids| one_tap(ids)));
    }

    fn add_rows_back(&self, table: &Param, ids: &Ids, dy: &Rows) {
        self.add_taps_back(table, &ids.on(Device::Twin, |ids| one_tap(ids)), dy);
    }

    fn add_mixed(&self, x: &mut Rows, table: &Param, taps: &Taps) {
        self.add_taps(x, table, taps);
    }

    fn add_mixed_back(&self, table: &Param, taps: &Taps, dy: &Rows) {
        self.add_taps_back(table, taps, dy);
    }

    fn mix(&self, x: &Rows, mix: &Mix) -> Rows {
        Rows::on_twin(twin::mix_forward(x.twin(), mix, x.cols()), mix.len(), x.cols())
    }

    fn mix_back(&self, dy: &Rows, mix: &Mix, rows: usize) -> Rows {
        Rows::on_twin(twin::mix_backward(dy.twin(), mix, rows, dy.cols()), rows, dy.cols())
    }

    fn convolution(&self, x: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let unfolded = twin::unfold(x.twin(), &patches.sources, patches.taps, x.cols());
        let unfolded = Rows::on_twin(unfolded, patches.rows(), layer.k());
        self.linear(&unfolded, std::slice::from_ref(layer), None, Order::Blocked)
    }

    fn convolution_back(&self, x: &Rows, dy: &Rows, layer: &Linear, patches: &Patches) -> Rows {
        let unfolded = twin::unfold(x.twin(), &patches.sources, patches.taps, x.cols());
        let unfolded = Rows::on_twin(unfolded, patches.rows(), layer.k());
        self.linear_dw(&unfolded, dy, 0, std::slice::from_ref(layer));
        let dunfolded = self.linear_dx(dy, std::slice::from_ref(layer));
        let dx = twin::fold(dunfolded.twin(), &patches.sources, patches.taps, x.rows(), x.cols());
        Rows::on_twin(dx, x.rows(), x.cols())
    }

    fn depthwise(&self, x: &Rows, weight: &Param, [h, w]: [usize; 2]) -> Rows {
        let (t, c) = x.dims();
        let y = twin::depthwise3_forward(x.twin(), &values(weight), t / (h * w), h, w, c);
        Rows::on_twin(y, t, c)
    }

    fn depthwise_back(&self, x: &Rows, dy: &Rows, weight: &Param, [h, w]: [usize; 2]) -> Rows {
        let (t, c) = x.dims();
        let n = t / (h * w);
        let (dx, dw) = twin::depthwise3_backward(dy.twin(), x.twin(), &values(weight), n, h, w, c);
        accumulate(weight, &dw);
        Rows::on_twin(dx, t, c)
    }

    fn gate(&self, x: &Rows, gate: &Rows) -> Rows {
        let (t, c) = x.dims();
        Rows::on_twin(twin::gate_forward(x.twin(), gate.twin(), t / gate.rows(), c), t, c)
    }

    fn gate_back(&self, x: &Rows, gate: &Rows, dy: &Rows) -> [Rows; 2] {
        let (t, c) = x.dims();
        let (dx, dgate) = twin::gate_backward(dy.twin(), x.twin(), gate.twin(), t / gate.rows(), c);
        [Rows::on_twin(dx, t, c), Rows::on_twin(dgate, gate.rows(), c)]
    }

    fn blend(&self, x: &Rows, logits: &Rows) -> Rows {
        let (t, c) = x.dims();
        Rows::on_twin(twin::blend_forward(x.twin(), logits.twin()), t / logits.cols(), c)
    }

    fn blend_back(&self, x: &Rows, logits: &Rows, dy: &Rows) -> [Rows; 2] {
        let (dx, dlogits) = twin::blend_backward(dy.twin(), x.twin(), logits.twin());
        [Rows::on_twin(dx, x.rows(), x.cols()), of_len(dlogits)]
    }

    fn score(&self, normed: &Rows, head: &Param, targets: &Targets, temperature: f32) -> Scores {
        let (n, h) = normed.dims();
        let (logprobs, entropies, lse) = twin::logprob_forward(
            normed.twin(),
            &values(head),
            n,
            h,
            head.len() / h.max(1),
            &targets.tokens,
            &targets.offsets,
            f64::from(temperature),
        );
        Scores { logprobs: of_len(logprobs), entropies: of_len(entropies), lse: of_len(lse), temperature }
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
        let wide = |d: &[f32]| d.iter().map(|&d| f64::from(d)).collect::<Vec<_>>();
        let (dnormed, dhead) = twin::logprob_backward(
            normed.twin(),
            &values(head),
            n,
            h,
            head.len() / h.max(1),
            &targets.tokens,
            &targets.offsets,
            &wide(dlogp),
            dentropy.map(wide).as_deref(),
            f64::from(scores.temperature),
        );
        accumulate(head, &dhead);
        Rows::on_twin(dnormed, n, h)
    }

    fn logits(&self, normed: &Rows, head: &Param) -> Rows {
        let (n, h) = normed.dims();
        let vocab = head.len() / h.max(1);
        let logits = twin::linear_forward(normed.twin(), &values(head), None, n, h, vocab);
        Rows::on_twin(logits, n, vocab)
    }

    fn sum_of_squares(&self, x: &Rows) -> f64 {
        x.twin().iter().map(|x| x * x).sum()
    }

    /// Computed in f64 and rounded to the f32 of weight and moments.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()> {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let round = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let keeps = step.master && param.dtype() != ParamDtype::F32;
        let mut weight = match keeps && !moments.master.is_empty() {
            true => wide(&moments.master),
            false => values(param),
        };
        let (mut m, mut v) = (wide(&moments.m), wide(&moments.v));
        twin::adamw(
            &mut weight,
            &mut m,
            &mut v,
            grad.twin(),
            f64::from(step.lr),
            f64::from(step.betas[0]),
            f64::from(step.betas[1]),
            f64::from(step.eps),
            f64::from(step.weight_decay),
            moments.step,
            f64::from(step.grad_scale),
        );
        (moments.m, moments.v) = (round(&m), round(&v));
        let weight = round(&weight);
        if keeps {
            moments.master.clone_from(&weight);
        }
        param.store(&weight)
    }
}

fn one_tap(ids: &[Option<u32>]) -> Vec<Vec<(u32, f32)>> {
    ids.iter().map(|id| id.map(|id| (id, 1.0)).into_iter().collect()).collect()
}

impl Twin {
    fn add_taps(&self, x: &mut Rows, table: &Param, taps: &[Vec<(u32, f32)>]) {
        let (h, table) = (x.cols(), values(table));
        for (row, taps) in x.twin_mut().chunks_exact_mut(h).zip(taps) {
            for &(id, weight) in taps {
                let from = &table[id as usize * h..];
                row.iter_mut().zip(from).for_each(|(x, t)| *x += f64::from(weight) * t);
            }
        }
    }

    fn add_taps_back(&self, table: &Param, taps: &[Vec<(u32, f32)>], dy: &Rows) {
        let h = dy.cols();
        let mut gradient = vec![0.0; table.len()];
        for (dy, taps) in dy.twin().chunks_exact(h).zip(taps) {
            for &(id, weight) in taps {
                let to = &mut gradient[id as usize * h..];
                to.iter_mut().zip(dy).for_each(|(g, dy)| *g += f64::from(weight) * dy);
            }
        }
        accumulate(table, &gradient);
    }
}
